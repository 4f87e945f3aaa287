//! Green contexts: parts of a device with streams of their own, under the device's primary context.

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Options, Program, Stage, ledger_of};
use ebb_units::Bytes;

/// A program with two green contexts of half a device each; the first is current, with `m` allocated.
fn program(stage: &Stage, retained: bool) -> Program {
    let mut program = stage.python(&["--name", "green"], &[]);
    program.ok("init()");
    if retained {
        program.ok("retain()");
    }
    program.ok(
        "whole, parts, n = ctypes.create_string_buffer(144), ctypes.create_string_buffer(288), c_uint(2)",
    );
    program.ok("ok(cuda.cuDeviceGetDevResource(0, whole, 1), 'resource')");
    program.ok("ok(cuda.cuDevSmResourceSplitByCount(parts, byref(n), whole, None, 0, 4), 'split')");
    assert_eq!(program.ok("n.value"), [2]);
    program.ok("greens, contexts, streams = [], [], []");
    program.ok(
        "def green(i): d, g, c, s = c_void_p(), c_void_p(), c_void_p(), c_void_p(); \
         ok(cuda.cuDevResourceGenerateDesc(byref(d), byref(parts, 144 * i), 1), 'description'); \
         ok(cuda.cuGreenCtxCreate(byref(g), d, 0, 1), 'green'); ok(cuda.cuCtxFromGreenCtx(byref(c), g), 'context'); \
         ok(cuda.cuGreenCtxStreamCreate(byref(s), g, 1, 0), 'stream'); greens.append(g); contexts.append(c); streams.append(s)",
    );
    program.ok("green(0)");
    program.ok("green(1)");
    program.ok("def enter(i): ok(cuda.cuCtxSetCurrent(contexts[i])); _functions.clear()");
    program.ok("enter(0)");
    program.ok("m = alloc(8 * MIB)");
    program.ok("fill(m, 2 * MIB, 1)");
    program
}

fn put_work_into_the_other(program: &mut Program, seed: u32) {
    program.ok("enter(1)");
    program.ok("launch_on(streams[1], 'ebb_spin', c_uint64(200_000_000))");
    program.ok(&format!(
        "launch_on(streams[1], 'ebb_fill', c_uint64(m), c_uint64(2 * MIB), c_uint({seed}), c_uint(0))"
    ));
}

/// Work in the stream of a green context is waited for, whichever of them are known otherwise: nothing of what it writes is lost.
#[test]
fn a_release_waits_for_the_work_of_green_contexts() {
    for retained in [false, true] {
        let stage = Stage::new(Options::default());
        let mut program = program(&stage, retained);
        for seed in 2..4 {
            put_work_into_the_other(&mut program, seed);
            // One that is busy for longer than a release waits goes on; the order comes again.
            let pause = Request::Pause {
                task: "green".into(),
                wait_ms: Some(30_000),
            };
            let answer = stage.ask(&pause);
            assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
            assert_eq!(ledger_of(&stage.snapshot()), Bytes::ZERO);
            let _ = stage.ask(&Request::Resume { task: "green".into() });
            assert_eq!(program.ok(&format!("wrong(m, 2 * MIB, {seed})")), [0]);
        }
    }
}

/// Memory stays when the green context goes in which it was allocated; with the last hold on the primary context all goes.
#[test]
fn memory_outlives_a_green_context_and_not_the_last() {
    for retained in [false, true] {
        let stage = Stage::new(Options::default());
        let mut program = program(&stage, retained);
        program.ok("enter(1)");
        program.ok("ok(cuda.cuGreenCtxDestroy(greens[0]))");
        stage.release("green");
        assert_eq!(program.ok("wrong(m, 2 * MIB, 1)"), [0], "retained: {retained}");
        program.ok("ok(cuda.cuGreenCtxDestroy(greens[1]))");
        if retained {
            program.ok("retain()");
            program.ok("_functions.clear()");
            stage.release("green");
            assert_eq!(program.ok("wrong(m, 2 * MIB, 1)"), [0]);
            program.ok("ok(cuda.cuDevicePrimaryCtxRelease_v2(0)); ok(cuda.cuDevicePrimaryCtxRelease_v2(0))");
        }
        ebb_tests::eventually("nothing is held any more", || {
            let held = ledger_of(&stage.snapshot());
            if held.is_zero() {
                Ok(())
            } else {
                Err(held.to_string())
            }
        });
        // And a new beginning.
        program.ok("retain()");
        program.ok("_functions.clear()");
        program.ok("m = alloc(4 * MIB)");
        program.ok("fill(m, MIB, 5)");
        stage.release("green");
        assert_eq!(program.ok("wrong(m, MIB, 5)"), [0]);
    }
}
