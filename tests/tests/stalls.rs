//! A program that allocates where its own work waits for the allocation: inside a capture, or before a host function of a stream may end.
//! It can give nothing until it is served, and somebody who is before it in turn wants just what it has.

use std::time::Duration;

use ebb_tests::{Options, Program, Reply, Stage, eventually};

/// Two programs on a full card. The second opens what cannot end, the first asks for more than is free, then the second does.
fn both_get_their_memory(open: &[&str], ask: &str, close: &[&str]) {
    let stage = Stage::new(Options::default());
    let start = |name: &str, priority: &str| {
        let mut program: Program = stage.python(&["--name", name, "--priority", priority], &[]);
        program.ok("init()");
        program.ok("retain()");
        program.ok("m = alloc(100 * MIB)");
        program.ok("[fill(m, 25 * MIB, 7), None][1]");
        program
    };
    // With its weight the first is before the second in turn.
    let mut first = start("first", "high");
    let mut second = start("second", "low");
    second.ok("import threading");
    second.ok("s = stream()");
    for line in open {
        second.ok(line);
    }
    first.send("q = alloc(60 * MIB)");
    let state = |name: &str| {
        let snapshot = stage.snapshot();
        let task = snapshot.tasks.into_iter().find(|task| task.name == name);
        task.map_or_else(String::new, |task| {
            task.processes
                .iter()
                .map(|process| process.state.clone())
                .collect()
        })
    };
    eventually("the first waits", || match state("first") {
        waits if waits == "waiting" => Ok(()),
        other => Err(other),
    });
    second.ok(ask);
    assert_eq!(
        first.poll(Duration::ZERO),
        None,
        "served from the one before it, which waits until it can give"
    );
    for line in close {
        second.ok(line);
    }
    assert_eq!(first.answer(), Reply::Ok(String::new()), "its turn comes after");
    assert_eq!(first.ok("wrong(m, 25 * MIB, 7)"), [0]);
    assert_eq!(second.ok("wrong(m, 25 * MIB, 7)"), [0]);
    assert!(first.finish().success());
    assert!(second.finish().success());
    stage.wait_until_empty();
}

const CAPTURE: &str = "ok(cuda.cuStreamBeginCapture_v2(s, 2))";

#[test]
fn an_allocation_inside_a_capture_is_served_before_who_waits_for_its_memory() {
    both_get_their_memory(
        &[CAPTURE],
        "q = alloc(30 * MIB)",
        &["g = c_void_p()", "ok(cuda.cuStreamEndCapture(s, byref(g)))"],
    );
}

#[test]
fn a_memory_node_of_a_capture_is_served_before_who_waits_for_its_memory() {
    both_get_their_memory(
        &[CAPTURE],
        "q = c_uint64(); ok(cuda.cuMemAllocAsync(byref(q), c_size_t(30 * MIB), s))",
        &[
            "ok(cuda.cuMemFreeAsync(q, s))",
            "g = c_void_p()",
            "ok(cuda.cuStreamEndCapture(s, byref(g)))",
        ],
    );
}

#[test]
fn an_allocation_that_work_on_the_gpu_waits_for_is_served_before_who_waits_for_its_memory() {
    both_get_their_memory(
        &[
            "flag = threading.Event()",
            "wait = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: flag.wait() and None)",
            "ok(cuda.cuLaunchHostFunc(s, wait, None))",
        ],
        "q = alloc(30 * MIB)",
        &["flag.set()", "ok(cuda.cuStreamSynchronize(s))"],
    );
}
