//! Whole programs on the simulated GPU, with the library preloaded. Where nothing should differ, the same program runs
//! without it and both outputs are compared.

mod common;

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use common::program::{PYTHON, Told, same, script, under};
use common::{Bench, run, sim};
use ebb_units::Bytes;

#[test]
fn memory_is_like_the_drivers() {
    assert!(same("memory").contains("wrong 0 True"));
}

#[test]
fn bug_019_memory_of_every_origin_is_freed_by_who_gave_it() {
    assert!(same("origins").contains("async, freed plainly 0"));
}

#[test]
fn stream_ordered_memory_is_like_the_drivers() {
    assert!(same("pools").contains("its own stream has it at once True"));
}

#[test]
fn bug_031_nothing_of_ours_breaks_a_capture() {
    let output = same("capture");
    for mode in 0..3 {
        assert!(output.contains(&format!("mode {mode} wrong 0")), "{output}");
    }
}

#[test]
fn bug_032_fork_in_both_orders() {
    assert_eq!(same("fork"), "child first 40\nexec 5\nparent 0 0\n");
}

#[test]
fn many_threads() {
    assert_eq!(same("threads"), "failures [] even True\n");
}

#[test]
fn bug_025_old_runtimes_look_the_look_up_up() {
    let bench = Bench::new();
    let code = "from gpu import *\n\
        init()\n\
        found, again = c_void_p(), c_void_p()\n\
        for version in (11030, 11080, 12000, 13000):\n\
        \x20   ok(cuda.cuGetProcAddress(b'cuGetProcAddress', byref(found), version, c_uint64(0)))\n\
        \x20   kind = ctypes.CFUNCTYPE(c_int, c_char_p, c_void_p, c_int, c_uint64, c_void_p)\n\
        \x20   ok(kind(found.value)(b'cuMemAlloc', ctypes.cast(byref(again), c_void_p), version, 0, None))\n\
        \x20   print(version, owner(found.value), owner(again.value))\n\
        ok(cuda.cuGetProcAddress_v2(b'cuMemFree', byref(again), 12000, c_uint64(0), None))\n\
        print(owner(again.value), cuda.cuGetProcAddress(None, byref(again), 12000, c_uint64(0)) != 0)\n\
        print(cuda.cuGetProcAddress(b'cuMemFree', None, 12000, c_uint64(0)) != 0)";
    let run_with = |with: bool| {
        let python = Path::new("python3");
        let mut command = if with {
            bench.command(python, sim())
        } else {
            bench.plain(python, sim())
        };
        run(command.args(["-B", "-c", code]).env("PYTHONPATH", PYTHON))
    };
    let (with, plain) = (run_with(true), run_with(false));
    assert_eq!(
        with.replace("libebb.so", "libcuda.so.1")
            .replace("libsimcuda.so", "libcuda.so.1"),
        plain.replace("libsimcuda.so", "libcuda.so.1")
    );
    assert_eq!(with.matches("libebb.so").count(), 9, "{with}");
    assert!(
        with.contains("11030 ('libebb.so', 'cuGetProcAddress') ('libebb.so', 'cuMemAlloc_v2')"),
        "{with}"
    );
    assert!(
        with.contains("12000 ('libebb.so', 'cuGetProcAddress_v2') ('libebb.so', 'cuMemAlloc_v2')"),
        "{with}"
    );
}

/// What the library's table says of each function, from the library itself.
fn hooked() -> HashMap<String, bool> {
    let code = "import ctypes, sys\n\
        f = ctypes.CDLL(sys.argv[1]).ebb_classes; f.restype = ctypes.c_char_p\n\
        print(f().decode())";
    let output = run(Command::new("python3").args(["-c", code]).arg(common::library()));
    let table: HashMap<String, bool> = output
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            Some((words.next()?.to_owned(), words.nth(1)? != "pass"))
        })
        .collect();
    assert_eq!(table.len(), 721);
    table
}

#[test]
fn bug_026_every_name_version_and_flag_is_routed_to_its_own_form() {
    let bench = Bench::new();
    let names: Vec<&str> = ebb_abi::versions::BASE_FUNCTIONS
        .iter()
        .map(|(name, _, _)| *name)
        .collect();
    let list = bench.path().join("names");
    std::fs::write(&list, names.join("\n")).expect("room");
    let plain = run(script(&bench, "routing", false).env("EBB_TEST_NAMES", &list));
    let with = run(script(&bench, "routing", true).env("EBB_TEST_NAMES", &list));
    let hooked = hooked();
    let (mut ours, mut lines) = (0, 0);
    for (with, plain) in with.lines().zip(plain.lines()) {
        lines += 1;
        let (with_words, plain_words): (Vec<&str>, Vec<&str>) =
            (with.split(' ').collect(), plain.split(' ').collect());
        // name version flags: code status symbol library code-of-the-older-form
        assert_eq!(with_words[..6], plain_words[..6], "another code, status or form");
        assert_eq!(with_words[7], plain_words[7]);
        let symbol = plain_words[5];
        if symbol != "-" {
            let expected = if hooked[symbol] {
                "libebb.so"
            } else {
                plain_words[6]
            };
            assert_eq!(with_words[6], expected, "{with}");
            ours += usize::from(hooked[symbol]);
        }
    }
    assert_eq!(lines, names.len() * 18 * 3);
    assert!(ours > 4000, "only {ours} look-ups were routed");
}

#[test]
fn bug_047_one_total_and_one_free_in_every_answer() {
    let bench = Bench::new();
    let limit = Bytes::mib(64);
    let mut command = script(&bench, "limit", true);
    let _daemon = under(&bench, command.arg(limit.0.to_string()), limit);
    let output = run(&mut command);
    let total = limit.0;
    assert!(
        output.starts_with(&format!("totals {total} {total} {total} surfaces 1\nfree True\n")),
        "{output}"
    );
    assert!(
        output.contains("after the last granule True next -2 surfaces 1\n"),
        "{output}"
    );
    assert!(output.contains("again True surfaces 1\n"), "{output}");
    assert!(
        output.contains("managed beyond the limit -2 free is as before True\n"),
        "{output}"
    );
    assert!(output.contains("managed counts True True\n"), "{output}");
}

#[test]
fn bug_037_a_limit_below_the_context_is_no_error_of_the_query() {
    for mib in [1, 2, 4, 5, 6, 8] {
        let bench = Bench::new();
        let mut command = script(&bench, "limit", true);
        let limit = Bytes::mib(mib);
        let _daemon = under(&bench, command.arg(limit.0.to_string()), limit);
        let output = run(&mut command);
        assert!(
            output.contains("free True\n") && output.contains("next -2 surfaces 1\n"),
            "{mib} MiB: {output}"
        );
    }
}

#[test]
fn bugs_001_002_devices_are_told_apart_by_identity_under_every_mask() {
    let uuids = {
        let bench = Bench::new();
        let code = "from gpu import *\n\
            init()\n\
            for d in range(4):\n\
            \x20   u = ctypes.create_string_buffer(16); ok(cuda.cuDeviceGetUuid(u, d)); h = u.raw.hex()\n\
            \x20   print('GPU-' + '-'.join((h[:8], h[8:12], h[12:16], h[16:20], h[20:])))";
        let mut command = bench.plain(Path::new("python3"), sim());
        run(command
            .args(["-B", "-c", code])
            .env("PYTHONPATH", PYTHON)
            .env("EBB_SIM_DEVICES", "4"))
    };
    let uuids: Vec<&str> = uuids.lines().collect();
    let by_uuid = format!("{},{}", uuids[3], uuids[1]);
    // The mask and how many devices it leaves.
    for (mask, left) in [
        ("2,3", 2),
        ("1", 1),
        ("3,2,1,0", 4),
        (by_uuid.as_str(), 2),
        ("0,7,1", 1),
        ("1,1", 0),
        ("", 0),
    ] {
        let bench = Bench::new();
        let mut command = script(&bench, "devices", true);
        command
            .env("CUDA_VISIBLE_DEVICES", mask)
            .env("EBB_SIM_DEVICES", "4")
            .env("EBB_SIM_MEMORY", "64Mi");
        let _daemon = under(&bench, &mut command, Bytes::mib(24));
        if left == 0 {
            // The driver itself says that there is none.
            assert!(!common::finish(&mut command).status.success(), "{mask:?}");
            continue;
        }
        let output = run(&mut command);
        let expected: String = (0..left)
            .map(|d| format!("{d} took 8 ordinal {d} same total True\n{d} freed with its context True\n"))
            .collect();
        assert_eq!(output, expected, "mask {mask:?}");
    }
}

#[test]
fn bug_062_asking_and_waiting_bring_nothing_back() {
    let bench = Bench::new();
    let mut command = script(&bench, "idle", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    assert_eq!(program.say("check"), "wrong 0");
    for round in 0..3 {
        let copied = daemon.evict();
        assert!(copied >= 40 << 20, "round {round}: {copied} bytes went out");
        for _ in 0..3 {
            assert_eq!(program.say("health"), "healthy True 0 True");
        }
        assert!(!daemon.has_restored(), "a health check brought the memory back");
        assert_eq!(program.say("check"), "wrong 0");
        assert_eq!(daemon.restored(), copied, "all of it came back");
    }
    program.finish();
}

#[test]
fn what_is_freed_or_allocated_while_evicted() {
    let bench = Bench::new();
    let mut command = script(&bench, "idle", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    for _ in 0..3 {
        daemon.evict();
        assert_eq!(program.say("free"), "freed");
        assert_eq!(program.say("alloc"), "alloc 0 0");
        assert_eq!(program.say("check"), "wrong 0");
    }
    program.finish();
}

#[test]
fn a_program_without_a_daemon_goes_on_alone() {
    let bench = Bench::new();
    let mut program = Told::start(&mut script(&bench, "idle", true));
    assert_eq!(program.say("check"), "wrong 0");
    assert_eq!(program.say("alloc"), "alloc 0 0");
    program.finish();
}

#[test]
fn frees_keep_their_place_in_a_stream() {
    let output = same("order");
    assert!(
        output.contains("busy still 600\n") && output.contains("wrong [0, 0, 0]\n"),
        "{output}"
    );
    assert!(output.contains("quiet after a plain free 0\n"), "{output}");
}

#[test]
fn memory_goes_with_its_context() {
    let output = same("lives");
    assert_eq!(output.matches("first gone True True 0\n").count(), 3, "{output}");
    assert_eq!(output.matches("after True True\n").count(), 3, "{output}");
}

#[test]
fn threads_work_on_while_memory_comes_and_goes() {
    let bench = Bench::new();
    let mut command = script(&bench, "churn", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    let turns = |line: String| {
        line.strip_prefix("turns ")
            .and_then(|n| n.parse::<u64>().ok())
            .expect("a number")
    };
    for _ in 0..12 {
        let before = turns(program.say("turns"));
        daemon.evict();
        // Every thread has come round since: memory is there again for all.
        while turns(program.say("turns")) < before + 2 {}
    }
    drop(program.child.stdin.take());
    assert_eq!(program.line(), "bad []");
    program.finish();
}

/// Also 17 (what is charged, and when it is credited), 22 (what goes in bulk) and 23 (a reset leaves nothing held).
#[test]
fn bug_004_017_022_023_pools_under_a_limit() {
    let bench = Bench::new();
    let mut command = script(&bench, "pools_limit", true);
    let _daemon = under(&bench, &mut command, Bytes::mib(110));
    assert_eq!(
        run(&mut command),
        "limit 2 True True\nround and round 200\nall of it for somebody else True True\ncredited True\n\
         kept False trimmed True\nkept True trimmed True\n\
         exportable True True True full -2 True\nused 0\ngiven back True\ndestroyed pool True\ndestroyed stream True\nreset True -1 True\n"
    );
}

/// Also 79: cold memory that the program never frees is released all the same.
#[test]
fn bug_035_079_stream_order_holds_while_memory_comes_and_goes() {
    let bench = Bench::new();
    let mut command = script(&bench, "pools_churn", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    let turns = |line: String| {
        line.strip_prefix("turns ")
            .and_then(|n| n.parse::<u64>().ok())
            .expect("a number")
    };
    for _ in 0..8 {
        assert!(daemon.evict() >= 24 << 20, "the cold block goes");
        // Asked only now: turns from before the eviction would say nothing of what is back.
        let before = turns(program.say("turns"));
        while turns(program.say("turns")) < before + 2 {}
    }
    drop(program.child.stdin.take());
    assert_eq!(program.line(), "bad []");
    program.finish();
}

#[test]
fn exit_with_memory_that_is_away() {
    let bench = Bench::new();
    let mut command = script(&bench, "idle", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let program = Told::start(&mut command);
    assert!(daemon.evict() > 0);
    program.finish();
}

#[test]
fn frees_after_exit_has_begun() {
    let bench = Bench::new();
    let driver = sim().join("libcuda.so.1");
    let program = bench.compile("at_exit.c", "at_exit", &[driver.to_str().expect("a plain path")]);
    for _ in 0..5 {
        assert_eq!(
            run(&mut bench.command(&program, sim())),
            "late fine\nearly fine\n"
        );
    }
}

#[test]
fn the_report_says_what_happened() {
    let bench = Bench::new();
    let code = "from gpu import *\n\
        init(); retain()\n\
        a, m = alloc(3 * MIB), c_uint64()\n\
        ok(cuda.cuMemAllocManaged(byref(m), c_size_t(4 * MIB), 1))\n\
        h = ctypes.create_string_buffer(64)\n\
        print('ipc', cuda.cuIpcGetMemHandle(h, c_uint64(a)))\n\
        r = report()\n\
        d = r['engine']['devices'][0]\n\
        print(r['layer']['faults'], r['layer']['running'], d['allocations'], d['overhead'] == 4 * MIB)\n\
        print(any('cuIpcGetMemHandle' in e['text'] for e in r['engine']['events']))\n\
        print([p for p in d['pinned'] if 'managed' in str(p)] != [])";
    let mut command = bench.command(Path::new("python3"), sim());
    let output = run(command.args(["-B", "-c", code]).env("PYTHONPATH", PYTHON));
    assert_eq!(output, "ipc 1\n0 True 1 True\nTrue\nTrue\n");
}
