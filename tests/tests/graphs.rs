//! Graphs and captures across releases.

use std::time::Duration;

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Program, Stage};

fn program(stage: &Stage, name: &str) -> Program {
    let mut program = stage.python(&["--name", name], &[]);
    program.ok("init()");
    program.ok("retain()");
    program.ok("s = stream()");
    program.ok("[function(f) and 0 for f in ('ebb_fill', 'ebb_check', 'ebb_spin')]");
    program.ok("def begin(mode=2): ok(cuda.cuStreamBeginCapture_v2(s, mode))");
    program.ok(
        "def write(p, seed): launch_on(s, 'ebb_fill', c_uint64(p), c_uint64(MIB), c_uint(seed), c_uint(0))",
    );
    program.ok("def end(): g = c_void_p(); ok(cuda.cuStreamEndCapture(s, byref(g))); return g");
    program.ok(
        "def make(g): e = c_void_p(); ok(cuda.cuGraphInstantiateWithFlags(byref(e), g, c_uint64(0)), 'instantiate'); return e",
    );
    program.ok("def run(e): ok(cuda.cuGraphLaunch(e, s), 'launch'); ok(cuda.cuStreamSynchronize(s), 'wait')");
    program
}

/// Steps captured one after the other into several graphs, memory released between capture, instantiation, upload and every replay.
#[test]
fn bug_074_graphs_replay_after_any_number_of_releases() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "steps");
    program.ok("m = [alloc(4 * MIB) for _ in range(3)]");
    for i in 0..3 {
        program.ok(&format!("begin({i})"));
        program.ok(&format!("write(m[{i}], {i})"));
        program.ok(&format!("write(m[({i} + 1) % 3], 10 + {i})"));
        program.ok(&format!("g{i} = end()"));
        stage.release("steps");
        program.ok(&format!("e{i} = make(g{i})"));
        stage.release("steps");
        program.ok(&format!("ok(cuda.cuGraphUpload(e{i}, s))"));
    }
    for round in 0..4 {
        for i in 0..3 {
            stage.release("steps");
            program.ok(&format!("run(e{i})"));
            stage.release("steps");
            assert_eq!(
                program.ok(&format!("wrong(m[{i}], MIB, {i})")),
                [0],
                "round {round}, graph {i}"
            );
            assert_eq!(
                program.ok(&format!("wrong(m[({i} + 1) % 3], MIB, 10 + {i})")),
                [0]
            );
        }
    }
    // A child graph, a clone, and an update of an instance, all while the memory is away.
    program.ok("parent, node, other = c_void_p(), c_void_p(), c_void_p()");
    program.ok("ok(cuda.cuGraphCreate(byref(parent), 0))");
    stage.release("steps");
    program.ok("ok(cuda.cuGraphAddChildGraphNode(byref(node), parent, None, c_size_t(0), g0))");
    program.ok("ok(cuda.cuGraphClone(byref(other), parent))");
    stage.release("steps");
    program.ok("e = make(other)");
    stage.release("steps");
    program.ok("run(e)");
    assert_eq!(program.ok("wrong(m[0], MIB, 0)"), [0]);
    assert_eq!(program.ok("wrong(m[1], MIB, 10)"), [0]);
}

/// Memory that a graph owns: the driver's, so it is counted and named; what the graph computes is right after releases of the rest.
#[test]
fn bug_076_memory_owned_by_graphs_is_counted_and_named() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "owned");
    program.ok("keep = alloc(4 * MIB)");
    program.ok("p = c_uint64()");
    program.ok("begin()");
    program.ok("ok(cuda.cuMemAllocAsync(byref(p), c_size_t(4 * MIB), s))");
    program.ok("write(p.value, 7)");
    program.ok("ok(cuda.cuMemcpyDtoDAsync_v2(c_uint64(keep), p, c_size_t(4 * MIB), s))");
    program.ok("ok(cuda.cuMemFreeAsync(p, s))");
    program.ok("g = end()");
    program.ok("e = make(g)");
    for round in 0..4 {
        program.ok(&format!("fill(keep, MIB, {round})"));
        stage.release("owned");
        program.ok("run(e)");
        assert_eq!(program.ok("wrong(keep, MIB, 7)"), [0], "round {round}");
    }
    assert!(
        program.ok(OWNED)[0] >= 4 << 20,
        "captured allocations are counted"
    );
}

/// Bytes that the report counts as memory of graphs.
const OWNED: &str = "sum(e['bytes'] for d in report()['engine']['devices'] for e in d['pinned'] if e['reason'] == 'memory node of a graph')";

/// Memory of a graph counts as long as anything may launch it, and what it left as long as that is there: no longer, and no less.
#[test]
fn memory_of_graphs_counts_as_long_as_it_can_be_there() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "counted");
    program.ok("p = c_uint64()");
    let capture = |program: &mut Program, free: bool| {
        program.ok("begin()");
        program.ok("ok(cuda.cuMemAllocAsync(byref(p), c_size_t(4 * MIB), s))");
        program.ok("write(p.value, 7)");
        if free {
            program.ok("ok(cuda.cuMemFreeAsync(p, s))");
        }
    };
    // The graph goes first, as most programs do it; then the instance.
    capture(&mut program, true);
    program.ok("g = end()");
    program.ok("e = make(g)");
    program.ok("ok(cuda.cuGraphDestroy(g))");
    assert_eq!(program.ok(OWNED), [4 << 20], "it can be launched");
    program.ok("run(e)");
    program.ok("ok(cuda.cuGraphExecDestroy(e))");
    assert_eq!(program.ok(OWNED), [0]);
    // What was launched and not freed stays, whoever is gone; its free is the end.
    capture(&mut program, false);
    program.ok("g = end()");
    program.ok("e = make(g)");
    program.ok("run(e)");
    program.ok("ok(cuda.cuGraphDestroy(g))");
    program.ok("ok(cuda.cuGraphExecDestroy(e))");
    assert_eq!(program.ok(OWNED), [4 << 20], "it is still there");
    stage.release("counted");
    assert_eq!(program.ok("wrong(p.value, MIB, 7)"), [0]);
    program.ok("ok(cuda.cuMemFreeAsync(p, s))");
    assert_eq!(program.ok(OWNED), [0]);
    // A capture that comes to nothing takes its memory along.
    for _ in 0..2 {
        capture(&mut program, false);
        assert_eq!(
            program.ok("cuda.cuCtxSynchronize()"),
            [900],
            "it breaks the capture"
        );
        assert_eq!(program.ok("cuda.cuStreamEndCapture(s, byref(c_void_p()))"), [901]);
        assert_eq!(program.ok(OWNED), [0], "nothing came of it");
    }
    // As does a stream that is destroyed in the middle of one.
    capture(&mut program, false);
    program.ok("ok(cuda.cuStreamDestroy_v2(s))");
    assert_eq!(program.ok(OWNED), [0], "the stream took it along");
    assert_eq!(
        program.ok("report()['engine']['gate']['captures']"),
        [0],
        "nobody captures any more"
    );
}

/// A release that is asked for during a capture waits for its end, breaks nothing, and then happens; in every mode.
#[test]
fn a_release_waits_for_the_end_of_a_capture() {
    let stage = Stage::new(Options::default());
    let mut program = program(&stage, "capturing");
    program.ok("m = alloc(4 * MIB)");
    for mode in 0..3 {
        program.ok(&format!("begin({mode})"));
        program.ok(&format!("write(m, {mode})"));
        let tries = "report()['engine']['devices'][0]['counters']['capturing']";
        let before = program.ok(tries)[0];
        let stage = &stage;
        let answer = std::thread::scope(|scope| {
            let pause = Request::Pause {
                task: "capturing".into(),
                wait_ms: Some(50_000),
            };
            let pausing = scope.spawn(move || stage.ask(&pause));
            ebb_tests::eventually("it was tried during the capture", || {
                let now = program.ok(tries)[0];
                if now > before {
                    Ok(())
                } else {
                    Err(format!("{now} tries"))
                }
            });
            program.ok("g = end()");
            pausing.join().expect("no panic")
        });
        assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
        assert!(ebb_tests::ledger_of(&stage.snapshot()).is_zero());
        program.send("e = make(g)");
        assert_eq!(
            program.poll(Duration::from_millis(200)),
            None,
            "paused: a touch waits"
        );
        let _ = stage.ask(&Request::Resume {
            task: "capturing".into(),
        });
        assert!(matches!(program.answer(), ebb_tests::Reply::Ok(_)), "mode {mode}");
        program.ok("run(e)");
        assert_eq!(program.ok(&format!("wrong(m, MIB, {mode})")), [0], "mode {mode}");
    }
}
