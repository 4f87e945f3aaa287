//! Link arguments of `libebb.so`: its name, that it stays loaded, and which C library it needs.
//!
//! A library that is preloaded into every program of a container must need no newer symbol version than the container's C library has, or
//! no program starts there. What the linker writes down is the version of the library it links against. So it links against stubs:
//! empty functions under the names and versions of glibc 2.17, made here from a list. At run time the real library answers.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const LIST: &str = "glibc-2.17.txt";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={LIST}");
    println!("cargo::rerun-if-env-changed=CC");
    for argument in ["-Wl,-soname,libebb.so", "-Wl,-z,nodelete", "-Wl,-Bsymbolic"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    // Without this function `std` keeps a thread's destructors behind a plain key. With it every thread of ours would begin by asking for the
    // loader's lock, and never begin while a constructor of the program's uses the driver.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--defsym=__cxa_thread_atexit_impl=0");
    println!("cargo::rustc-check-cfg=cfg(glibc_stubs)");
    let target = |what: &str| env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    let arch = target("ARCH");
    if target("ENV") != "gnu" || !matches!(arch.as_str(), "x86_64" | "aarch64") {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let list = fs::read_to_string(LIST).expect("the list lies beside build.rs");
    match stubs(&list, &arch, &out) {
        Ok(()) => {
            println!("cargo::rustc-cfg=glibc_stubs");
            println!("cargo::rustc-cdylib-link-arg=-L{}", out.display());
            // Nothing may be left to be found at run time under whatever version there is.
            for argument in [
                "-Wl,-z,defs",
                "-Wl,--no-as-needed",
                "-lpthread",
                "-ldl",
                "-lld",
                "-Wl,--as-needed",
            ] {
                println!("cargo::rustc-cdylib-link-arg={argument}");
            }
        }
        Err(error) => {
            println!("cargo::warning=libebb.so will need this machine's C library: no stubs: {error}")
        }
    }
}

/// Makes `libc.so`, `libpthread.so`, `libdl.so` and `libld.so` (the loader's own) in `out`.
fn stubs(list: &str, arch: &str, out: &Path) -> Result<(), String> {
    let mut libraries: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split_whitespace();
        let (Some(library), Some(version), Some(name)) = (words.next(), words.next(), words.next()) else {
            return Err(format!("`{line}` is no line of {LIST}"));
        };
        // AArch64 came with 2.17: everything that is older there has that version.
        let version = if arch == "aarch64" { "GLIBC_2.17" } else { version };
        libraries
            .entry(library)
            .or_default()
            .entry(version)
            .or_default()
            .push(name);
    }
    for (library, versions) in libraries {
        let soname = match library {
            "c" => "libc.so.6",
            "pthread" => "libpthread.so.0",
            "dl" => "libdl.so.2",
            "ld" if arch == "aarch64" => "ld-linux-aarch64.so.1",
            "ld" => "ld-linux-x86-64.so.2",
            other => return Err(format!("{LIST} names an unknown library `{other}`")),
        };
        let (mut source, mut script) = (String::new(), String::new());
        for (version, names) in versions {
            let _ = writeln!(script, "{version} {{ global: {}; }};", names.join("; "));
            for name in names {
                let _ = writeln!(source, "void {name}(void) {{}}");
            }
        }
        let file = |extension: &str| out.join(format!("lib{library}.{extension}"));
        fs::write(file("c"), source).map_err(|e| e.to_string())?;
        fs::write(file("map"), script).map_err(|e| e.to_string())?;
        let mut compiler = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler
            .args(["-shared", "-fPIC", "-nostdlib", "-w", "-fno-builtin", "-O0"])
            .arg(format!("-Wl,-soname,{soname}"))
            .arg(format!("-Wl,--version-script={}", file("map").display()))
            .arg("-o")
            .arg(file("so"))
            .arg(file("c"));
        let output = compiler.output().map_err(|e| format!("{compiler:?}: {e}"))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
    }
    Ok(())
}
