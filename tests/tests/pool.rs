//! The pool's C functions and `ebb trim`, with the daemon and programs as they are.

use std::process::Command;

use ebb_tests::{Artefacts, Options, Program, Stage, ledger_of};
use ebb_units::Bytes;

/// A framework in Python: `take(size)`, `give(at)`, `idle()` and `reserved()` are the pool's.
fn framework(stage: &Stage, name: &str, flags: &[&str]) -> Program {
    let mut program = stage.python(&[&["--name", name], flags].concat(), &[]);
    for line in [
        "init()",
        "retain()",
        "pool = ctypes.CDLL('libebb.so')",
        "pool.ebb_pool_alloc.restype = pool.ebb_pool_try_alloc.restype = c_void_p",
        "def take(size): return pool.ebb_pool_alloc(ctypes.c_ssize_t(size), 0, None) or 0",
        "def give(at): pool.ebb_pool_free(c_void_p(at), ctypes.c_ssize_t(0), 0, None)",
        "figures = (c_uint64 * 22)()",
        "def reserved(): pool.ebb_pool_stats(0, figures, c_size_t(176)); return [figures[4]]",
    ] {
        program.ok(line);
    }
    program
}

/// Runs `ebb trim` with these words; what each task gave back.
fn trim(stage: &Stage, words: &[&str]) -> Vec<(String, u64)> {
    let mut command = Command::new(&Artefacts::get().ebb);
    command
        .arg("trim")
        .args(words)
        .arg("--json")
        .env("EBB_SOCKET_DIR", stage.socket_dir());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = |row: &serde_json::Value| {
        assert_eq!(row["silent"], 0, "{answer}");
        (
            row["name"].as_str().unwrap().to_owned(),
            row["bytes"].as_u64().unwrap(),
        )
    };
    answer["tasks"].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn a_trim_brings_what_programs_keep_and_touches_nothing_that_lives() {
    let stage = Stage::new(Options::default());
    let mut plain = stage.run(&["--name", "plain"]);
    plain.hold("a", Bytes::mib(16), 1);
    plain.hold("b", Bytes::mib(24), 2);
    plain.ok("free b");
    let mut torch = framework(&stage, "torch", &[]);
    torch.ok("a, b = take(8 * MIB), take(12 * MIB)");
    torch.ok("fill(a, 2 * MIB, 3)");
    torch.ok("give(b)");
    torch.ok("cuda.cuCtxSynchronize()");
    assert_eq!(torch.ok("reserved()"), [20 << 20]);
    let held = ledger_of(&stage.snapshot());
    let given = trim(&stage, &["--all"]);
    assert_eq!(given.len(), 2);
    for (name, bytes) in &given {
        let least = if name == "plain" { 24 << 20 } else { 12 << 20 };
        assert!(*bytes >= least, "{given:?}");
    }
    let sum: u64 = given.iter().map(|(_, bytes)| bytes).sum();
    let now = ledger_of(&stage.snapshot());
    assert_eq!(now.0 + sum, held.0, "what is given back is in the ledger at once");
    assert_eq!(torch.ok("reserved()"), [8 << 20]);
    assert_eq!(trim(&stage, &["torch"]), [("torch".to_owned(), 0)]);
    assert_eq!(
        (plain.wrong("a", 1), torch.ok("wrong(a, 2 * MIB, 3)")),
        (0, vec![0])
    );
}

/// Two frameworks that do not fit together, each with its tensors in the pool, take turns.
#[test]
fn frameworks_with_their_tensors_in_the_pool_share_a_card() {
    let stage = Stage::new(Options {
        card: Bytes::mib(128),
        context: Bytes::mib(2),
        ..Options::default()
    });
    let mut programs = ["one", "two"].map(|name| framework(&stage, name, &[]));
    for (program, seed) in programs.iter_mut().zip(1..) {
        // Stitched of two holes.
        program.ok("a, b, c = take(16 * MIB), take(16 * MIB), take(16 * MIB)");
        program.ok("give(a); give(c)");
        program.ok("wide = take(32 * MIB)");
        program.ok("small = take(30 * MIB)");
        assert_eq!(program.ok("reserved()"), [78 << 20]);
        program.ok(&format!("fill(wide, 8 * MIB, {seed})"));
        program.ok(&format!("fill(b, 4 * MIB, {})", seed + 10));
    }
    for round in 0..4 {
        for (program, seed) in programs.iter_mut().zip(1..) {
            let wrong = program.ok(&format!(
                "[wrong(wide, 8 * MIB, {seed}), wrong(b, 4 * MIB, {})]",
                seed + 10
            ));
            assert_eq!(wrong, [0, 0], "round {round}, program {seed}");
        }
    }
    assert!(stage.snapshot().totals.releases > 0, "they took turns");
    // One dies in the middle: nothing of it is left.
    let [mut one, mut two] = programs;
    one.kill();
    two.ok("more = take(20 * MIB)");
    assert_eq!(two.ok("[more > 0, wrong(wide, 8 * MIB, 2)]"), [1, 0]);
    two.kill();
    stage.wait_until_empty();
}

/// The limit is the task's, whoever allocates; a framework hears of it as null.
#[test]
fn the_limit_is_a_null() {
    let stage = Stage::new(Options::default());
    let mut program = framework(&stage, "small", &["--limit", "64Mi"]);
    program.ok("a = take(32 * MIB)");
    program.ok("b = pool.ebb_pool_try_alloc(ctypes.c_ssize_t(40 * MIB), 0, None) or 0");
    assert_eq!(program.ok("[a > 0, b]"), [1, 0]);
    program.ok("give(a)");
    program.ok("c = take(40 * MIB)");
    assert_eq!(program.ok("[c > 0]"), [1], "what it kept is given back for it");
    assert_eq!(program.ok("reserved()")[0] >> 20, 40);
}

/// Small blocks that keep granules apart are brought together by a trim, at their addresses: kernels, and a graph that was captured before, find what
/// they wrote; so they do after the memory has left the card.
#[test]
fn a_trim_brings_small_blocks_together() {
    let stage = Stage::new(Options::default());
    let mut torch = framework(&stage, "torch", &[]);
    for line in [
        "s = stream()",
        "[function(f) and 0 for f in ('ebb_fill', 'ebb_check')]",
        // Eight in each granule, of which one is left, each at another place.
        "all = [take(MIB // 4) for _ in range(128)]",
        "kept = [all[8 * n + n % 8] for n in range(16)]",
        "[give(at) for at in all if at not in kept]",
        "[fill(at, MIB // 16, n) for n, at in enumerate(kept)]",
        "ok(cuda.cuStreamBeginCapture_v2(s, 2))",
        "launch_on(s, 'ebb_fill', c_uint64(kept[3]), c_uint64(MIB // 16), c_uint(77), c_uint(0))",
        "g, e = c_void_p(), c_void_p()",
        "ok(cuda.cuStreamEndCapture(s, byref(g)))",
        "ok(cuda.cuGraphInstantiateWithFlags(byref(e), g, c_uint64(0)))",
        "def bad(): return [sum(wrong(at, MIB // 16, n) for n, at in enumerate(kept) if n != 3)]",
        "big = (c_uint64 * 25)()",
        "def meshed(): pool.ebb_pool_stats(0, big, c_size_t(200)); return [big[23]]",
    ] {
        torch.ok(line);
    }
    assert_eq!(torch.ok("reserved()"), [32 << 20]);
    let held = ledger_of(&stage.snapshot()).0;
    let given = trim(&stage, &["torch"]);
    assert!(given[0].1 >= 28 << 20, "{given:?}");
    assert_eq!(torch.ok("reserved()"), [4 << 20], "eight into one, twice");
    assert_eq!(torch.ok("meshed()"), [14]);
    assert_eq!(ledger_of(&stage.snapshot()).0 + given[0].1, held);
    assert_eq!(torch.ok("bad()"), [0]);
    for round in 0..2 {
        torch.ok("ok(cuda.cuGraphLaunch(e, s)); ok(cuda.cuStreamSynchronize(s))");
        assert_eq!(torch.ok("wrong(kept[3], MIB // 16, 77)"), [0], "round {round}");
        assert_eq!(torch.ok("bad()"), [0], "round {round}");
        stage.release("torch");
        torch.ok("fill(kept[3], MIB // 16, 1)");
    }
    assert_eq!(trim(&stage, &["torch"])[0].1, 0, "nothing more to be had");
    // New blocks take what lies between, and what is freed goes.
    torch.ok("more = [take(MIB // 4) for _ in range(112)]");
    torch.ok("[fill(at, MIB // 16, 200) for at in more]");
    assert_eq!(torch.ok("bad()"), [0]);
    torch.ok("[give(at) for at in kept + more]");
    trim(&stage, &["torch"]);
    assert_eq!(torch.ok("reserved()"), [0]);
    torch.kill();
    stage.wait_until_empty();
}

/// Killed at any moment of it, a program leaves nothing on the card and in the ledger.
#[test]
fn a_program_may_die_while_its_blocks_move() {
    let stage = Stage::new(Options::default());
    for round in 0..6u32 {
        let mut torch = framework(&stage, "torch", &[]);
        torch.ok("all = [take(MIB // 4) for _ in range(256)]");
        torch.ok("[give(at) for n, at in enumerate(all) if n % 8 != n // 8 % 8]");
        std::thread::scope(|scope| {
            let stage = &stage;
            scope.spawn(move || {
                Command::new(&Artefacts::get().ebb)
                    .args(["trim", "--all", "--json"])
                    .env("EBB_SOCKET_DIR", stage.socket_dir())
                    .output()
                    .unwrap()
            });
            // Somewhere in the middle, another place each time.
            std::thread::sleep(std::time::Duration::from_millis(u64::from(round)));
            torch.kill();
        });
        stage.wait_until_empty();
    }
}
