//! How the library gets in, with a driver that does nothing: look-ups of every kind, other preloaded libraries, what it
//! exports and needs, and programs that never use a GPU.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use common::{Bench, finish, library, run};

/// A bench with the driver that does nothing in `lib/`.
fn bench() -> (Bench, std::path::PathBuf) {
    let bench = Bench::new();
    bench.compile(
        "driver.c",
        "lib/libcuda.so.1",
        &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"],
    );
    let libraries = bench.path().join("lib");
    (bench, libraries)
}

fn lookups(bench: &Bench) -> std::path::PathBuf {
    let lib = bench.path().join("lib");
    bench.compile(
        "who.c",
        "lib/libone.so",
        &["-shared", "-fPIC", "-DNUMBER=1", "-DNEXT_NAME=who_next"],
    );
    bench.compile(
        "who.c",
        "lib/libtwo.so",
        &["-shared", "-fPIC", "-DNUMBER=2", "-DNEXT_NAME=who_next_of_two"],
    );
    let search = format!("-L{}", lib.display());
    bench.compile(
        "lookups.c",
        "lookups",
        &[&search, "-Wl,--no-as-needed", "-lone", "-ltwo", "-ldl"],
    )
}

#[test]
fn look_ups_are_routed_and_callers_keep_their_identity() {
    let (bench, lib) = bench();
    let program = lookups(&bench);
    let plain = run(&mut bench.plain(&program, &lib));
    assert_eq!(
        plain,
        "default cuInit: null\n\
         default nvmlDeviceGetMemoryInfo: null\n\
         handle cuMemAlloc_v2: libcuda.so.1\n\
         handle cuDriverGetVersion: libcuda.so.1\n\
         handle cuMemcpyHtoD_v2: null\n\
         handle cuNothing: null\n\
         handle curl_easy_init: null\n\
         default cuInit: null\n\
         global cuInit: libcuda.so.1\n\
         global cuDriverGetVersion: libcuda.so.1\n\
         cos 0 = 1\n\
         dlvsym memcpy: libc.so.6\n\
         dlvsym nothing: null\n\
         dlvsym driver: null\n\
         who: default 1, next 1, next of the first 2\n"
    );
    let with = run(&mut bench.command(&program, &lib));
    let hooked = plain
        .replace(
            "handle cuMemAlloc_v2: libcuda.so.1",
            "handle cuMemAlloc_v2: libebb.so",
        )
        .replace("global cuInit: libcuda.so.1", "global cuInit: libebb.so")
        // In the global scope our symbol is found once there is a driver behind it, loaded for whomever.
        .replace(
            "handle curl_easy_init: null\ndefault cuInit: null",
            "handle curl_easy_init: null\ndefault cuInit: libebb.so",
        );
    // A driver without versions answers a versioned look-up differently from glibc to glibc: the same as without us.
    assert_eq!(with, hooked);
}

#[test]
fn off_is_off() {
    let (bench, lib) = bench();
    let program = lookups(&bench);
    let plain = run(&mut bench.plain(&program, &lib));
    for word in ["off", "0", "no"] {
        let off = run(bench.command(&program, &lib).env("EBB", word));
        // Our symbol is in the global scope all the same; with a driver behind it that is loaded, it answers with that.
        let off = off.replace(
            "curl_easy_init: null\ndefault cuInit: libcuda.so.1",
            "curl_easy_init: null\ndefault cuInit: null",
        );
        assert_eq!(off, plain);
        assert!(off.contains("handle cuMemAlloc_v2: libcuda.so.1"), "{off}");
    }
}

fn linked(bench: &Bench, lib: &Path) -> std::path::PathBuf {
    let driver = lib.join("libcuda.so.1");
    bench.compile(
        "linked.c",
        "linked",
        &[driver.to_str().expect("a plain path"), "-ldl"],
    )
}

const LINKED: &str = "init 0\n\
    alloc 0 1010\n\
    driver 1, shim N\n\
    free of nobody's 1, of the driver's 0\n\
    launch 7001\n\
    cuMemAlloc: 0 libebb.so\n\
    cuDriverGetVersion: 0 libcuda.so.1\n\
    cuLaunchKernel: 0 libebb.so\n\
    cuGetProcAddress: 0 libebb.so\n\
    cuNothing: 500 null\n\
    of a newer version: libcuda.so.1\n";

#[test]
fn a_linked_program_is_caught_and_pointers_are_routed() {
    let (bench, lib) = bench();
    let program = linked(&bench, &lib);
    // The inner entry that the driver hands out for cuLaunchKernel is routed by name and version, and left alone for a
    // version that nobody knows yet.
    assert_eq!(
        run(&mut bench.command(&program, &lib)),
        LINKED.replace("shim N", "shim -1")
    );
}

#[test]
fn two_preloaded_libraries_in_either_order() {
    let (bench, lib) = bench();
    let program = linked(&bench, &lib);
    for arguments in [&[][..], &["-DBY_HANDLE"][..]] {
        let name = format!("shim{}.so", arguments.len());
        let mut all = vec!["-shared", "-fPIC"];
        all.extend(arguments);
        let shim = bench.compile("shim.c", &name, &all);
        let (shim, ebb) = (shim.display().to_string(), library().display().to_string());
        for order in [format!("{shim}:{ebb}"), format!("{ebb}:{shim}")] {
            let output = run(bench.plain(&program, &lib).env("LD_PRELOAD", &order));
            let lines: Vec<&str> = output.lines().take(5).collect();
            assert_eq!(
                lines,
                [
                    "init 0",
                    "alloc 0 1010",
                    "driver 1, shim 1",
                    "free of nobody's 1, of the driver's 0",
                    "launch 7001"
                ],
                "{order}"
            );
        }
    }
}

#[test]
fn a_thread_is_cancelled_inside_a_launch() {
    let (bench, lib) = bench();
    let driver = lib.join("libcuda.so.1");
    let program = bench.compile("cancel.c", "cancel", &[driver.to_str().expect("a plain path")]);
    assert_eq!(run(&mut bench.command(&program, &lib)), "init 0\nfine\n");
}

#[test]
fn programs_that_use_no_gpu_do_not_notice() {
    let bench = Bench::new();
    let empty = bench.path().join("sim");
    let script = "import threading, subprocess, os, sys\n\
        ts = [threading.Thread(target=lambda: sum(range(1000))) for _ in range(64)]\n\
        [t.start() for t in ts]; [t.join() for t in ts]\n\
        pid = os.fork()\n\
        if pid == 0: os._exit(7)\n\
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n\
        assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout == b'1\\n'\n\
        assert subprocess.run('exec sh -c \"exec sh -c true\"', shell=True).returncode == 0\n\
        pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 3'], os.environ)\n\
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n\
        import ctypes; assert ctypes.CDLL('libm.so.6').abs(-3) == 3\n\
        print('fine')";
    assert_eq!(
        run(bench.command(Path::new("python3"), &empty).args(["-c", script])),
        "fine\n"
    );
    assert_eq!(
        run(bench
            .command(Path::new("bash"), &empty)
            .args(["-c", "ls / | head -1 | wc -l"])),
        "1\n"
    );
    assert_eq!(run(&mut bench.command(Path::new("true"), &empty)), "");
    let failed = finish(bench.command(Path::new("bash"), &empty).args(["-c", "exit 9"]));
    assert_eq!(failed.status.code(), Some(9));
}

/// A preloaded library is in every program: loading it must cost nothing that could be seen.
#[test]
fn loading_starts_nothing() {
    let bench = Bench::new();
    let script = "import os\n\
        print(len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')))";
    let plain = run(bench
        .plain(Path::new("python3"), bench.path())
        .args(["-c", script]));
    assert_eq!(
        run(bench
            .command(Path::new("python3"), bench.path())
            .args(["-c", script])),
        plain
    );
    assert!(plain.starts_with("1 "), "{plain}");
}

fn dynamic_symbols() -> Vec<String> {
    let output = Command::new("objdump")
        .arg("-T")
        .arg(library())
        .output()
        .expect("binutils come with the C compiler");
    assert!(output.status.success());
    String::from_utf8(output.stdout)
        .expect("plain text")
        .lines()
        .map(str::to_owned)
        .collect()
}

#[test]
fn only_what_is_meant_is_exported() {
    let exported: BTreeSet<String> = dynamic_symbols()
        .iter()
        .filter(|line| line.contains(" g ") && !line.contains("*UND*"))
        .filter_map(|line| line.split_whitespace().last().map(str::to_owned))
        .collect();
    for name in [
        "dlsym",
        "dlvsym",
        "cuInit",
        "cuMemAlloc_v2",
        "cuGetProcAddress_v2",
        "nvmlDeviceGetMemoryInfo",
        "ebb_report",
    ] {
        assert!(exported.contains(name), "{name} is not exported");
    }
    let meant = |name: &str| {
        let upper = |at: usize| name.as_bytes().get(at).is_some_and(u8::is_ascii_uppercase);
        matches!(name, "dlsym" | "dlvsym")
            || name.starts_with("cu") && upper(2)
            || name.starts_with("nvml") && upper(4)
            || name.starts_with("ebb_")
    };
    let others: Vec<&String> = exported.iter().filter(|name| !meant(name)).collect();
    assert!(others.is_empty(), "exported by accident: {others:?}");
    assert!(
        !exported.contains("ebb_gate_word"),
        "the gate's word is nobody's business"
    );
}

#[test]
fn no_newer_c_library_than_2_17_is_needed() {
    let mut needed = 0;
    for line in dynamic_symbols().iter().filter(|line| line.contains("*UND*")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let name = words.last().copied().unwrap_or_default();
        match words
            .iter()
            .find_map(|word| word.trim_matches(['(', ')']).strip_prefix("GLIBC_"))
        {
            Some(version) => {
                let mut parts = version
                    .split('.')
                    .map(|part| part.parse::<u32>().expect("a number"));
                let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
                assert!(version <= (2, 17), "{name} needs glibc {version:?}");
                needed += 1;
            }
            None => {
                let weak = line.contains(" w ");
                assert!(
                    weak || line.contains("GCC_"),
                    "{name} is neither versioned nor optional: {line}"
                );
            }
        }
    }
    assert!(needed > 20, "the symbols of the C library were not found");
}

#[test]
fn it_has_a_name_and_stays_loaded() {
    let output = Command::new("objdump")
        .arg("-p")
        .arg(library())
        .output()
        .expect("binutils come with the C compiler");
    let text = String::from_utf8(output.stdout).expect("plain text");
    assert!(
        text.lines()
            .any(|line| line.split_whitespace().eq(["SONAME", "libebb.so"])),
        "{text}"
    );
    let flags = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("FLAGS_1"))
        .expect("FLAGS_1 is there");
    let flags = u64::from_str_radix(flags.trim().trim_start_matches("0x"), 16).expect("a number");
    assert_ne!(flags & 8, 0, "NODELETE");
}

/// `ebb doctor --classes` reads the table of classes from the file.
#[test]
fn the_table_of_classes_is_a_section_of_the_file() {
    let bench = Bench::new();
    let to = bench.path().join("classes");
    let mut objcopy = Command::new("objcopy");
    objcopy
        .arg("-O")
        .arg("binary")
        .arg("--only-section=.ebb.classes")
        .arg(library())
        .arg(&to);
    assert!(
        objcopy
            .status()
            .expect("binutils come with the C compiler")
            .success()
    );
    let text = std::fs::read_to_string(&to).expect("plain text");
    let rows: Vec<Vec<&str>> = text
        .trim_end_matches('\0')
        .lines()
        .map(|line| line.split(' ').collect())
        .collect();
    assert_eq!(rows.len(), 721);
    assert!(rows.iter().all(|row| row.len() == 3));
    assert!(rows.contains(&vec!["cuMemAlloc_v2", "allocate", "own"]));
    assert!(rows.contains(&vec!["cuLaunchKernel", "touch", "gate"]));
}
