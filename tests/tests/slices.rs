//! Cards that are cut into devices (MIG): each slice is a card of its own to the daemon, to programs and to NVML.

use std::path::Path;

use ebb_tests::{Look, Options, Stage, eventually};
use ebb_units::Bytes;
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn stage() -> Stage {
    Stage::new(Options {
        devices: 2,
        slices: 2,
        ..Options::default()
    })
}

fn program(stage: &Stage, flags: &[&str], slice: &str) -> Look {
    let mut command = stage.run_command(flags, Path::new("python3"));
    command.env("CUDA_VISIBLE_DEVICES", slice);
    Look::start(command)
}

/// The identities of the slices, as masks take them.
fn names(stage: &Stage) -> Vec<String> {
    let mut command = std::process::Command::new("python3");
    stage.gpu_env(&mut command);
    let seen = Look::start(command).ask("slices");
    let slices = seen[0]["slices"].as_array().expect("slices").iter();
    slices
        .map(|slice| slice["uuid"].as_str().expect("a text").to_owned())
        .collect()
}

#[test]
fn each_slice_is_a_card_of_its_own() {
    let stage = stage();
    let names = names(&stage);
    assert_eq!(names.len(), 2);
    let rows = stage.snapshot().devices;
    let seen: Vec<String> = rows
        .iter()
        .map(|row| row.uuid.to_string().replacen("GPU-", "MIG-", 1))
        .collect();
    assert_eq!(seen, names, "and the whole card is none");
    assert!(rows.iter().all(|row| row.total == Bytes::mib(256)));
    // Two programs that would not fit on one of them.
    let mut first = program(&stage, &["--name", "first", "--limit", "220Mi"], &names[0]);
    let mut second = program(&stage, &["--name", "second"], &names[1]);
    for program in [&mut first, &mut second] {
        program.ask("open 0");
        assert_eq!(program.ask(&format!("alloc {}", 200 * MIB)), 0);
    }
    assert_eq!(first.ask("info"), json!([16 * MIB, 220 * MIB]));
    eventually("each is charged on its own, contexts included", || {
        let snapshot = stage.snapshot();
        let held: Vec<(Bytes, Bytes, Bytes)> = snapshot
            .devices
            .iter()
            .map(|row| (row.leased, row.overhead, row.unmanaged))
            .collect();
        let wanted = (Bytes::mib(200), Bytes::mib(4), Bytes::ZERO);
        if held == [wanted, wanted] {
            Ok(())
        } else {
            Err(format!("{held:?}"))
        }
    });
    // NVML by every form of a slice's handle: the task's own world, and nobody else's.
    let pid = first.pid();
    let seen = eventually("the slice shows it", || {
        let seen = first.ask("slices");
        let there = seen[0]["slices"][0]["processes"]["Compute_v3"] == json!([[pid, 204 * MIB]]);
        if there { Ok(seen) } else { Err(seen.to_string()) }
    });
    let [own, other] = [0, 1].map(|index| &seen[0]["slices"][index]);
    assert_eq!(own["memory"], json!([220 * MIB, 16 * MIB, 204 * MIB]));
    assert_eq!(own["details"][0], json!([[pid, 204 * MIB]]));
    assert_eq!(other["processes"]["Compute_v3"], json!([]));
    assert_eq!(other["memory"][2], 0, "the neighbour is not seen: {other}");
    // The whole card: what the task has on its slices, each with the number of the slice.
    assert_eq!(seen[0]["processes"], json!([[pid, 204 * MIB, 1]]));
    assert_eq!(
        (&seen[0]["used"], &seen[0]["total"]),
        (&json!(204 * MIB), &json!(512 * MIB))
    );
}

/// A program sees one slice at most, whatever its mask names, and its memory goes and comes back there.
#[test]
fn memory_of_a_slice_goes_and_comes_back() {
    let stage = stage();
    let names = names(&stage);
    let mask = format!("{},{}", names[1], names[0]);
    let mut program = stage.run_with_env(&["--name", "one"], &[("CUDA_VISIBLE_DEVICES", &mask)]);
    program.hold("m", Bytes::mib(64), 5);
    for _ in 0..2 {
        stage.release("one");
        assert_eq!(program.wrong("m", 5), 0);
    }
    let leased: Vec<Bytes> = stage.snapshot().devices.iter().map(|row| row.leased).collect();
    assert_eq!(leased[0], Bytes::ZERO);
    assert!(leased[1] >= Bytes::mib(64));
}

/// A task without a program: NVML of a whole card that is cut, without ebb, is the driver's.
#[test]
fn without_a_task_the_answers_are_the_drivers() {
    let stage = stage();
    let mut program = program(&stage, &["--name", "busy"], "0");
    program.ask("open 0");
    assert_eq!(program.ask(&format!("alloc {}", 32 * MIB)), 0);
    let mut command = std::process::Command::new("python3");
    stage.gpu_env(&mut command);
    let seen: Value = Look::start(command).ask("slices");
    assert_eq!(seen[0]["processes"], json!([[program.pid(), 36 * MIB, 1]]));
    assert_eq!(seen[0]["slices"][0]["memory"][2], 36 * MIB);
    assert_eq!(seen[0]["slices"][1]["memory"][2], 0);
}
