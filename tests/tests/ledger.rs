//! The ledger beside what the card holds: nothing that is there is promised to others, whoever placed it.

use std::process::Command;

use ebb_tests::{Look, Options, Stage, eventually};
use ebb_units::Bytes;

/// A program that knows nothing of ebb and looks at the card.
fn outside(stage: &Stage) -> Look {
    let mut command = Command::new("python3");
    stage.gpu_env(&mut command);
    Look::start(command)
}

/// Waits until the sum of what programs have on the card, by the ledger, is what NVML says is used.
fn agree(stage: &Stage, nvml: &mut Look, what: &str) {
    eventually(what, || {
        let used = Bytes(nvml.ask("look")[0]["used"].as_u64().expect("a number"));
        let snapshot = stage.snapshot();
        let rows = || snapshot.tasks.iter().flat_map(|task| &task.processes);
        let there: Bytes = rows().map(|row| row.resident.saturating_add(row.overhead)).sum();
        let booked = snapshot.devices[0]
            .leased
            .saturating_add(snapshot.devices[0].overhead);
        if there == used && booked >= used {
            Ok(())
        } else {
            let shown: Vec<_> = rows()
                .map(|row| (row.lease, row.resident, row.overhead, row.unseen))
                .collect();
            Err(format!(
                "{used} used; lease, resident, overhead, unseen: {shown:?}"
            ))
        }
    });
}

/// Managed pages, memory of graphs that the driver rounds up, code, local memory, and what the library itself has the driver load.
#[test]
fn the_ledger_has_all_that_is_on_the_card() {
    let stage = Stage::new(Options::default());
    let mut nvml = outside(&stage);
    let mut program = stage.python(&["--name", "mixed"], &[("EBB_SIM_MODULE_BYTES", "6Mi")]);
    program.ok("init()");
    program.ok("retain()");
    program.ok("s = stream()");
    agree(&stage, &mut nvml, "a context");
    program.ok("m = alloc(40 * MIB)");
    program.ok("fill(m, 10 * MIB, 1)");
    agree(&stage, &mut nvml, "memory and a module");
    program.ok("p = c_uint64(); ok(cuda.cuMemAllocManaged(byref(p), c_size_t(21 * MIB), 1))");
    program.ok("[fill(p.value, 5 * MIB, 2), None][1]");
    agree(&stage, &mut nvml, "managed pages");
    program.ok("ok(cuda.cuStreamBeginCapture_v2(s, 2))");
    program.ok("q = c_uint64(); ok(cuda.cuMemAllocAsync(byref(q), c_size_t(3 * MIB), s))");
    program.ok("g, e = c_void_p(), c_void_p(); ok(cuda.cuStreamEndCapture(s, byref(g)))");
    program.ok("ok(cuda.cuGraphInstantiateWithFlags(byref(e), g, c_uint64(0)))");
    program.ok("ok(cuda.cuGraphLaunch(e, s)); ok(cuda.cuStreamSynchronize(s))");
    agree(
        &stage,
        &mut nvml,
        "a graph's memory, of three MiB in two granules",
    );
    // Lease that nothing uses, of small allocations in a row.
    program.ok("more = [alloc(2 * MIB) for _ in range(12)]");
    program.ok("ok(cuda.cuCtxSetLimit(0, c_size_t(1536)))");
    program.ok("[fill(m, 10 * MIB, 3), None][1]");
    agree(&stage, &mut nvml, "local memory beside unused lease");
    stage.release("mixed");
    assert_eq!(program.ok("wrong(m, 10 * MIB, 3)"), [0]);
    agree(&stage, &mut nvml, "after a release and a restore");
    drop(program);
    stage.wait_until_empty();
}
