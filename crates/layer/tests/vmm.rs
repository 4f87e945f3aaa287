//! Programs that make and map their memory by themselves, on the simulated GPU with the library preloaded.

mod common;

use common::program::{Told, same, script, under};
use common::{Bench, run};
use ebb_units::Bytes;

#[test]
fn memory_by_handles_is_like_the_drivers() {
    let output = same("vmm");
    assert!(output.contains("one memory 0"), "{output}");
}

/// fzyzcjy/torch_memory_saver#24: what a program maps by itself used to be out of reach of a release.
#[test]
fn bug_077_expandable_segments_leave_and_come_back() {
    let bench = Bench::new();
    let mut command = script(&bench, "segments", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    assert_eq!(program.say("check"), "wrong 0");
    for round in 0..3 {
        let copied = daemon.evict();
        assert!(copied >= 56 << 20, "round {round}: {copied} bytes went out");
        assert_eq!(program.say("check"), "wrong 0");
        assert!(daemon.restored() >= 56 << 20);
        daemon.evict();
        assert_eq!(
            program.say("look"),
            "rights [3, 3, 3, 3, 1] True (1, 1, 1, 0) True 0"
        );
        assert_eq!(program.say("check"), "wrong 0");
        daemon.restored();
        daemon.evict();
        assert_eq!(program.say("shrink"), "shrink 1");
        assert!(!daemon.has_restored(), "a trim needs nothing back");
        assert_eq!(program.say("grow"), "grow 0");
        daemon.restored();
        assert_eq!(program.say("check"), "wrong 0");
    }
    assert_eq!(program.say("report"), "pinned 0 10");
    assert_eq!(program.say("export"), "export True");
    assert_eq!(program.say("report"), format!("pinned {} 10", 2 << 20));
    daemon.evict();
    assert_eq!(program.say("check"), "wrong 0");
    program.finish();
}

#[test]
fn segments_that_cannot_grow_hear_the_drivers_code() {
    let bench = Bench::new();
    let mut command = script(&bench, "segments", true);
    let _daemon = under(&bench, &mut command, Bytes::mib(96));
    let mut program = Told::start(&mut command);
    for _ in 0..2 {
        assert_eq!(program.say("fill up"), "full -2 True");
        assert_eq!(program.say("check"), "wrong 0");
    }
    program.finish();
}

/// NVIDIA/nccl#2106, HAMi#2641: a collective library that is opened at run time probes host memory by `cuMemCreate`, on
/// several threads at once, and hung. HAMi-core#187: the same call took its device from a context that the thread had not.
#[test]
fn bug_028_bug_029_host_memory_by_handles_is_no_business_of_any_device() {
    let bench = Bench::new();
    let plain = run(&mut script(&bench, "vmm_host", false));
    let mut command = script(&bench, "vmm_host", true);
    let _daemon = under(&bench, &mut command, Bytes::mib(8));
    let with = run(&mut command);
    let (with, devices) = with.split_once("report ").expect("a report");
    assert_eq!(with, plain);
    assert_eq!(devices, "[]\n", "no device was touched or charged");
    assert_eq!(plain.matches("[0, 0, 0, 0, 0, 0, 0]").count(), 4, "{plain}");
}

/// vllm PR#29569: a network card could not register memory that was made without its flag.
#[test]
fn bug_094_a_network_card_reaches_what_it_could_reach_before() {
    assert_eq!(same("vmm_rdma"), "1 1\n0 0\npool 1 1\n");
}

/// NVIDIA/cuda-python#2345: growing behind the old addresses, which are taken: what is freed is what was granted.
#[test]
fn bug_115_a_reservation_that_fails_leaves_the_others_alone() {
    assert_eq!(
        same("vmm_grow"),
        "hint taken True\nfailed -2 then 0\nwrong 0\nfreed 0 0 1\n"
    );
}

#[test]
fn a_capture_sees_the_same() {
    let output = same("vmm_capture");
    assert_eq!(output.matches("replay 0").count(), 3, "{output}");
}

/// Memory that another process has by a descriptor is the exporter's: charged there, and there it stays.
#[test]
fn what_is_exported_is_charged_once_and_stays() {
    let bench = Bench::new();
    let plain = run(&mut script(&bench, "vmm_share", false));
    let mut command = script(&bench, "vmm_share", true);
    let _daemon = under(&bench, &mut command, Bytes::mib(64));
    let with = run(&mut command);
    let lines = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| !line.starts_with("books"))
            .map(ToOwned::to_owned)
            .collect()
    };
    assert_eq!(lines(&with), lines(&plain));
    assert!(
        with.contains("child wrong 0\n") && with.contains("parent wrong 0\n"),
        "{with}"
    );
    let books: Vec<&str> = with.lines().filter(|line| line.starts_with("books")).collect();
    assert_eq!(
        books,
        [
            "books child allocated 0 handles 0",
            "books parent allocated 33554432 pinned 33554432"
        ]
    );
}

#[test]
fn rights_of_another_device_come_back_too() {
    let bench = Bench::new();
    let mut command = script(&bench, "vmm_peers", true);
    command.env("EBB_SIM_DEVICES", "2").env("EBB_SIM_MEMORY", "256Mi");
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    let first = program.say("check");
    assert_eq!(first, "rights [3, 3, 3, 0] wrong 0 0");
    for _ in 0..3 {
        assert!(daemon.evict() >= 8 << 20);
        assert_eq!(program.say("check"), first);
        daemon.restored();
        daemon.evict();
        assert_eq!(program.say("kernel"), "wrong 0", "a kernel of the other device");
        daemon.restored();
    }
    program.finish();
}

#[test]
fn threads_map_and_unmap_while_memory_comes_and_goes() {
    let bench = Bench::new();
    let mut command = script(&bench, "vmm_churn", true);
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    let turns = |line: String| -> u64 {
        let count = line.strip_prefix("turns ").expect("a count");
        count.parse().expect("a number")
    };
    for _ in 0..12 {
        let before = turns(program.say("turns"));
        daemon.evict();
        // It goes on by itself, through the gate.
        while turns(program.say("turns")) <= before {}
    }
    assert_eq!(program.say("stop"), "wrong 0 errors []");
    program.finish();
}

#[test]
fn what_is_bound_to_a_multicast_object_stays_until_it_is_unbound() {
    let bench = Bench::new();
    let mut command = script(&bench, "vmm_multicast", true);
    command.env("EBB_SIM_DEVICES", "2").env("EBB_SIM_MEMORY", "256Mi");
    let daemon = under(&bench, &mut command, Bytes(u64::MAX));
    let mut program = Told::start(&mut command);
    assert_eq!(program.say("devices"), "added [0, 0]");
    for _ in 0..2 {
        assert!(daemon.evict() >= 8 << 20);
        assert_eq!(program.say("bind"), "bound [0, 0] True");
        daemon.restored();
        assert!(daemon.evict() < 8 << 20, "it is bound");
        assert_eq!(program.say("check"), "wrong 0");
        assert_eq!(program.say("unbind"), "unbound [0, 0]");
    }
    assert!(daemon.evict() >= 8 << 20);
    assert_eq!(program.say("check"), "wrong 0");
    program.finish();
}
