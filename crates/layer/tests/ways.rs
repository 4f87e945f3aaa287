//! Every way in, for every function: linked by the loader, `dlsym`, `dlvsym`. The driver's own look-up, in which the runtime's entry
//! points end, is `sim.rs`'s: every name, version and flag (`bug_026`), and how a runtime finds it (`bug_025`).

mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use common::{Bench, run};

/// Class and treatment of every function, from the library's own table.
fn classes() -> BTreeMap<String, (String, String)> {
    let code = "import ctypes, sys\n\
        f = ctypes.CDLL(sys.argv[1]).ebb_classes; f.restype = ctypes.c_char_p\n\
        print(f().decode())";
    let output = run(Command::new("python3").args(["-c", code]).arg(common::library()));
    output
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').map(str::to_owned);
            Some((words.next()?, (words.next()?, words.next()?)))
        })
        .collect()
}

/// A driver whose functions have a version, as a program may ask for one, and a program that gets each by every way of the loader.
fn generated(bench: &Bench, names: &[&String]) -> (PathBuf, PathBuf) {
    let (mut driver, mut program) = (String::new(), String::new());
    program.push_str(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n#include <string.h>\n\
         static const char *owner(void *address)\n{\n    Dl_info info;\n    if (!address || !dladdr(address, &info)) return \"null\";\n\
         \x20   const char *slash = strrchr(info.dli_fname, '/');\n    return slash ? slash + 1 : info.dli_fname;\n}\n",
    );
    for name in names {
        let _ = writeln!(driver, "int {name}(void) {{ return 0; }}");
        let _ = writeln!(program, "extern int {name}(void);");
    }
    program.push_str("static const struct { const char *name; void *linked; } all[] = {\n");
    for name in names {
        let _ = writeln!(program, "    {{\"{name}\", (void *){name}}},");
    }
    program.push_str(
        "};\nint main(void)\n{\n    void *driver = dlopen(\"libcuda.so.1\", RTLD_NOW | RTLD_LOCAL);\n\
         \x20   for (size_t i = 0; i < sizeof all / sizeof *all; i++)\n\
         \x20       printf(\"%s %s %s %s\\n\", all[i].name, owner(all[i].linked), owner(dlsym(driver, all[i].name)),\n\
         \x20              owner(dlvsym(driver, all[i].name, \"DRIVER_1\")));\n    return 0;\n}\n",
    );
    let at = |name: &str| bench.path().join(name);
    std::fs::write(at("driver.c"), driver).expect("room");
    std::fs::write(at("program.c"), program).expect("room");
    std::fs::write(at("driver.map"), "DRIVER_1 { global: cu*; };\n").expect("room");
    std::fs::create_dir(at("lib")).expect("a folder");
    let cc = |arguments: &[String]| {
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        let built = compiler.args(arguments).output().expect("a C compiler is there");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
    };
    let words = |text: &str| -> Vec<String> {
        let folder = bench.path().display().to_string();
        text.split(' ').map(|word| word.replace('@', &folder)).collect()
    };
    cc(&words(
        "-shared -fPIC -Wl,-soname,libcuda.so.1 -Wl,--version-script=@/driver.map -o @/lib/libcuda.so.1 @/driver.c",
    ));
    cc(&words(
        "-fPIE -pie -o @/program @/program.c @/lib/libcuda.so.1 -ldl",
    ));
    (at("program"), at("lib"))
}

#[test]
fn every_function_is_reached_by_link_dlsym_and_dlvsym() {
    let bench = Bench::new();
    let classes = classes();
    let names: Vec<&String> = classes.keys().collect();
    let (program, lib) = generated(&bench, &names);
    let output = run(&mut bench.command(&program, &lib));
    let mut hooked = 0;
    for (line, (name, (_, how))) in output.lines().zip(&classes) {
        let expected = if how == "pass" {
            "libcuda.so.1"
        } else {
            "libebb.so"
        };
        hooked += usize::from(how != "pass");
        assert_eq!(line, format!("{name} {expected} {expected} {expected}"));
    }
    assert_eq!(output.lines().count(), classes.len());
    assert!(hooked > 250, "only {hooked} are hooked");
    // Without the library all of it is the driver's.
    let plain = run(&mut bench.plain(&program, &lib));
    assert_eq!(plain.matches("libcuda.so.1").count(), 3 * classes.len());
}
