//! What the daemon makes of NVML's figures. The library is a small C file that says what a text file says.

use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_node::test_util::{CARD, TestDaemon};
use ebb_protocol::control::{Answer, DeviceRow, Request, Snapshot};
use ebb_protocol::wire::ask_kind;
use ebb_units::Bytes;

const MIB: u64 = 1 << 20;

#[test]
fn child() {
    ebb_node::test_util::child_main();
}

/// The figures and the library that tells them.
struct Nvml {
    dir: tempfile::TempDir,
    library: PathBuf,
}

impl Nvml {
    fn build(flags: &[&str]) -> Self {
        let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
        let library = dir.path().join("nvml.so");
        let figures = dir.path().join("figures");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(format!("-DFIGURES=\"{}\"", figures.display()))
            .args(flags)
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_nvml.c"))
            .status()
            .expect("a C compiler is part of the base");
        assert!(built.success());
        Self { dir, library }
    }

    /// MiB of the card, free, reserved; then MiB by process. Replaced in one step: the daemon reads at any moment.
    fn say(&self, card: Option<(u64, u64, u64)>, processes: &[(u32, u64)]) {
        self.say_all(card, processes, &[]);
    }

    /// The same, and MiB by process that draws.
    fn say_all(&self, card: Option<(u64, u64, u64)>, processes: &[(u32, u64)], drawing: &[(u32, u64)]) {
        let mut text = card.map_or(String::new(), |(total, free, reserved)| {
            format!("{} {} {}\n", total * MIB, free * MIB, reserved * MIB)
        });
        for (pid, used) in processes {
            text += &format!("{pid} {}\n", used * MIB);
        }
        text += "graphics\n";
        for (pid, used) in drawing {
            text += &format!("{pid} {}\n", used * MIB);
        }
        let new = self.dir.path().join("figures.new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.dir.path().join("figures")).unwrap();
    }

    fn daemon(&self) -> TestDaemon {
        let mut config = TestDaemon::config(self.path(), "");
        config.nvml = Some(self.library.clone());
        TestDaemon::start_with(self.path(), config)
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

fn card(snapshot: &Snapshot) -> &DeviceRow {
    &snapshot.devices[0]
}

#[test]
fn the_card_is_known_before_the_first_program_and_the_drivers_part_is_promised_to_nobody() {
    for flags in [&[][..], &["-DOLD"]] {
        let nvml = Nvml::build(flags);
        nvml.say(Some((1000, 940, 60)), &[]);
        let daemon = nvml.daemon();
        let snapshot = daemon.snapshot();
        let card = card(&snapshot);
        assert_eq!(
            (card.uuid, card.name.as_str(), card.index),
            (CARD, "Fake H200", 0)
        );
        assert_eq!(
            (card.total, card.capacity),
            (Bytes::mib(1000), Bytes::mib(940)),
            "{flags:?}"
        );
        assert_eq!((card.unmanaged, card.free), (Bytes::ZERO, Bytes::mib(940)));
    }
}

#[test]
fn what_others_hold_is_unmanaged_and_not_promised() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 500, 0)), &[(1, 500)]);
    let daemon = nvml.daemon();
    let snapshot = daemon.snapshot();
    assert_eq!(
        (card(&snapshot).capacity, card(&snapshot).unmanaged),
        (Bytes::mib(1000), Bytes::mib(500))
    );
    let mut process = daemon.process([0; 32]);
    process.attach(Bytes::mib(1000), Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(400)));
    // Its own bytes are not counted twice.
    nvml.say(Some((1000, 100, 0)), &[(1, 500), (process.pid(), 400)]);
    assert!(
        !process.alloc(Bytes::mib(300)),
        "that can never fit beside what others hold"
    );
    nvml.say(Some((1000, 600, 0)), &[(process.pid(), 400)]);
    daemon.until("the other one is gone", |s| card(s).unmanaged.is_zero());
    assert!(process.alloc(Bytes::mib(300)));
}

#[test]
fn bug_011_what_the_driver_takes_by_itself_for_a_program_is_charged_and_given_back() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 1000, 0)), &[]);
    let daemon = nvml.daemon();
    let mut process = daemon.process(daemon.task("t", Bytes::ZERO, Some(Bytes::mib(512))));
    process.attach(Bytes::mib(1000), Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(400)));
    nvml.say(Some((1000, 500, 0)), &[(process.pid(), 500)]);
    let snapshot = daemon.until("100 MiB are found", |s| card(s).overhead == Bytes::mib(100));
    assert_eq!(
        (card(&snapshot).leased, card(&snapshot).unmanaged),
        (Bytes::mib(400), Bytes::ZERO)
    );
    assert!(!process.alloc(Bytes::mib(14)), "400 and 100 of 512");
    assert!(process.alloc(Bytes::mib(12)));
    nvml.say(Some((1000, 588, 0)), &[(process.pid(), 412)]);
    daemon.until("it has gone back", |s| card(s).overhead.is_zero());
    // A killed process still shows for a moment: that is nobody's memory.
    nvml.say(Some((1000, 588, 0)), &[(process.pid(), 412)]);
    process.kill();
    let snapshot = daemon.until("it is free at once", |s| card(s).leased.is_zero());
    assert_eq!(card(&snapshot).unmanaged, Bytes::ZERO);
}

/// The library waits for room on a card that is full by what its driver took, with lease for what it waits for: as much of the driver's part
/// must not be hidden by that, or the card stays full for ever while the ledger has room.
#[test]
fn lease_that_nothing_uses_yet_hides_nothing_of_the_drivers_part() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 1000, 0)), &[]);
    let daemon = nvml.daemon();
    let mut process = daemon.process([0; 32]);
    process.attach(Bytes::mib(1000), Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(400)));
    let ask = process.ask(ask_kind::ALLOC, Bytes::mib(200), true);
    let granted = process.answer();
    assert!(
        matches!(granted, ebb_protocol::ToLayer::Grant { ask: of, .. } if of == ask),
        "{granted:?}"
    );
    nvml.say(Some((1000, 500, 0)), &[(process.pid(), 500)]);
    let snapshot = daemon.until("100 MiB are found", |s| card(s).overhead == Bytes::mib(100));
    assert_eq!(
        (card(&snapshot).leased, card(&snapshot).free),
        (Bytes::mib(600), Bytes::mib(300))
    );
}

#[test]
fn bug_005_memory_that_came_by_another_interface_counts_against_its_task_and_is_promised_to_nobody() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((10_000, 10_000, 0)), &[]);
    let daemon = nvml.daemon();
    let mut process = daemon.process(daemon.task("simulator", Bytes::ZERO, Some(Bytes::mib(8000))));
    process.attach(Bytes::mib(10_000), Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(2000)));
    // The ledger says 2 GB, NVML's list of those that draw says 6: the rest came through Vulkan. It stands in both lists.
    let pid = process.pid();
    nvml.say_all(Some((10_000, 4000, 0)), &[(pid, 6000)], &[(pid, 6000)]);
    let snapshot = daemon.until("4 GB are found", |s| card(s).overhead == Bytes::mib(4000));
    let promised = card(&snapshot).free + Bytes::mib(6000);
    assert_eq!(promised, card(&snapshot).capacity, "promised to nobody");
    assert_eq!(snapshot.tasks[0].processes[0].unseen, Bytes::mib(4000));
    assert!(!process.alloc(Bytes::mib(2010)), "2000 and 4000 of 8000");
    assert!(process.alloc(Bytes::mib(1990)));
    // A program that only draws is in that list alone.
    let mut painter = Command::new("sleep").arg("1000").spawn().unwrap();
    nvml.say_all(
        Some((10_000, 1000, 0)),
        &[(pid, 7990)],
        &[(pid, 7990), (painter.id(), 1000)],
    );
    let snapshot = daemon.until("the painter is seen", |s| card(s).unmanaged == Bytes::mib(1000));
    assert_eq!(card(&snapshot).strangers[0].pid, painter.id());
    painter.kill().unwrap();
    painter.wait().unwrap();
}

/// Programs that the library is not in: by their pid, their name, their bytes and the likely reason.
#[test]
fn who_passes_us_by_is_named_with_a_reason() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 1000, 0)), &[]);
    let daemon = nvml.daemon();
    let capability = daemon.task("job", Bytes::ZERO, Some(Bytes::mib(400)));
    let token: String = capability.iter().map(|byte| format!("{byte:02x}")).collect();
    let source = nvml.path().join("idle.c");
    std::fs::write(
        &source,
        "#include <unistd.h>\nint main(void) { return pause(); }\n",
    )
    .unwrap();
    let fixed = nvml.path().join("fixed-program");
    let built = Command::new("cc")
        .args(["-static", "-o"])
        .args([&fixed, &source])
        .status();
    assert!(built.unwrap().success(), "the C library has its static form");
    let mut children = [
        Command::new("sleep")
            .arg("1000")
            .env_remove("LD_PRELOAD")
            .spawn()
            .unwrap(),
        Command::new(&fixed)
            .env("EBB_TASK_TOKEN", &token)
            .spawn()
            .unwrap(),
    ];
    let (plain, fixed) = (children[0].id(), children[1].id());
    nvml.say(Some((1000, 700, 0)), &[(plain, 100), (fixed, 200)]);
    let snapshot = daemon.until("both are named", |s| {
        card(s).strangers.len() == 2 && card(s).strangers.iter().all(|row| row.program != "cards")
    });
    let rows = &card(&snapshot).strangers;
    assert_eq!(
        (rows[0].pid, rows[0].program.as_str(), rows[0].bytes),
        (fixed, "fixed-program", Bytes::mib(200))
    );
    assert!(rows[0].why.contains("static"), "{}", rows[0].why);
    assert_eq!(rows[0].task, Some(snapshot.tasks[0].task), "by its environment");
    assert_eq!(
        (rows[1].pid, rows[1].program.as_str(), rows[1].bytes, rows[1].task),
        (plain, "sleep", Bytes::mib(100), None)
    );
    assert!(rows[1].why.contains("ebb run"), "{}", rows[1].why);
    assert_eq!(card(&snapshot).unmanaged, Bytes::mib(300));
    // What a child of the task holds past the library is told to the others of it.
    let mut sibling = daemon.process(capability);
    let (_, _, elsewhere) = sibling.attach(Bytes::mib(1000), Bytes::ZERO, Bytes::ZERO);
    assert_eq!(elsewhere, Bytes::mib(200));
    let Answer::Error(told) = daemon.ask(&Request::Doctor { pid: fixed }) else {
        panic!("it is not ours");
    };
    assert!(
        told.message.contains("200 MiB") && told.message.contains("static"),
        "{told}"
    );
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    nvml.say(Some((1000, 1000, 0)), &[]);
    daemon.until("they have left", |s| {
        card(s).strangers.is_empty() && card(s).unmanaged.is_zero()
    });
    sibling.kill();
    let log = nvml.path().join("state/events.jsonl");
    daemon.stop();
    let text = std::fs::read_to_string(&log).unwrap();
    let records = text
        .lines()
        .filter(|line| line.contains("\"record\":\"stranger\""))
        .count();
    assert_eq!(records, 4, "two came and two went:\n{text}");
    assert!(
        !text.contains(&token),
        "the task's capability is nobody's business"
    );
    let report = ebb_node::replay(&log).unwrap();
    assert_eq!(report.divergence, None);
}

/// A session is no account: what such a process has on a card where it has none is somebody else's.
#[test]
fn a_process_with_a_session_that_passes_the_library_by_is_a_stranger() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 1000, 0)), &[]);
    let daemon = nvml.daemon();
    let process = daemon.process([0; 32]);
    nvml.say(Some((1000, 500, 0)), &[(process.pid(), 500)]);
    let snapshot = daemon.until("it is no account", |s| card(s).unmanaged == Bytes::mib(500));
    assert_eq!(card(&snapshot).strangers[0].pid, process.pid());
}

#[test]
fn bug_139_the_dead_hold_nothing_at_the_next_look() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((4000, 4000, 0)), &[]);
    let daemon = nvml.daemon();
    let mut pair = [0, 1].map(|_| daemon.process([0; 32]));
    for process in &mut pair {
        process.attach(Bytes::mib(4000), Bytes::ZERO, Bytes::ZERO);
        assert!(process.alloc(Bytes::mib(1000)));
    }
    let pids = pair.each_ref().map(|process| process.pid());
    nvml.say(Some((4000, 2000, 0)), &[(pids[0], 1000), (pids[1], 1000)]);
    let [mut first, second] = pair;
    first.kill();
    // NVML still shows the dead one; nobody is charged for it.
    let snapshot = daemon.until("one is gone", |s| card(s).leased == Bytes::mib(1000));
    assert_eq!(
        (card(&snapshot).unmanaged, card(&snapshot).strangers.len()),
        (Bytes::ZERO, 0)
    );
    let shown: Vec<u32> = snapshot
        .tasks
        .iter()
        .flat_map(|task| task.processes.iter().map(|process| process.pid))
        .collect();
    assert_eq!(shown, [second.pid()]);
}

/// A program that dies leaves what it exported with those that imported it. At no moment is that promised to anybody.
#[test]
fn what_importers_keep_of_a_dead_exporter_is_promised_to_nobody() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 1000, 0)), &[]);
    let daemon = nvml.daemon();
    let [mut exporter, mut importer, mut third] = [0, 1, 2].map(|_| daemon.process([0; 32]));
    for process in [&mut exporter, &mut importer, &mut third] {
        process.attach(Bytes::mib(1000), Bytes::ZERO, Bytes::ZERO);
    }
    assert!(exporter.alloc(Bytes::mib(600)));
    exporter.usage_with(Bytes::mib(600), Bytes::ZERO, 1, [Bytes::mib(500), Bytes::ZERO]);
    importer.usage_with(Bytes::ZERO, Bytes::ZERO, 1, [Bytes::ZERO, Bytes::mib(300)]);
    // An answer comes after all that was said before.
    for process in [&mut exporter, &mut importer] {
        process.ask(ask_kind::ALLOC, Bytes::mib(2), true);
        process.answer();
    }
    let (dying, living) = (exporter.pid(), importer.pid());
    nvml.say(Some((1000, 396, 0)), &[(dying, 602), (living, 2)]);
    daemon.until("it is counted once", |s| {
        card(s).leased == Bytes::mib(604) && card(s).unmanaged.is_zero()
    });
    // Asked for while it lives, and more than is free when it has died.
    third.ask(ask_kind::ALLOC, Bytes::mib(800), true);
    exporter.kill();
    nvml.say(Some((1000, 698, 0)), &[(living, 2)]);
    daemon.until("others still have some of it", |s| {
        card(s).unmanaged == Bytes::mib(300)
    });
    assert_eq!(card(&daemon.snapshot()).leased, Bytes::mib(2), "800 do not fit");
    // NVML looks again and again, and it stays.
    let looks = |n: u64| {
        nvml.say(Some((1000, 698, n)), &[(living, 2)]);
        daemon.until("another look", |s| card(s).capacity == Bytes::mib(1000 - n));
    };
    (1..=3).for_each(|n| looks(2 * n));
    assert_eq!(card(&daemon.snapshot()).unmanaged, Bytes::mib(300));
    // The importer lets some of it go, and then all.
    importer.usage_with(Bytes::ZERO, Bytes::ZERO, 2, [Bytes::ZERO, Bytes::mib(100)]);
    daemon.until("less is left", |s| card(s).unmanaged == Bytes::mib(100));
    importer.kill();
    daemon.until("nothing is left", |s| card(s).unmanaged.is_zero());
}

/// Where NVML counts it to the importers it is in their accounts, and must not be held back a second time.
#[test]
fn what_nvml_counts_to_an_importer_is_not_held_back_as_well() {
    let nvml = Nvml::build(&[]);
    nvml.say(Some((1000, 1000, 0)), &[]);
    let daemon = nvml.daemon();
    let [mut exporter, mut importer] = [0, 1].map(|_| daemon.process([0; 32]));
    for process in [&mut exporter, &mut importer] {
        process.attach(Bytes::mib(1000), Bytes::ZERO, Bytes::ZERO);
    }
    assert!(exporter.alloc(Bytes::mib(500)));
    exporter.usage_with(Bytes::mib(500), Bytes::ZERO, 1, [Bytes::mib(500), Bytes::ZERO]);
    importer.usage_with(Bytes::ZERO, Bytes::ZERO, 1, [Bytes::ZERO, Bytes::mib(500)]);
    nvml.say(
        Some((1000, 500, 0)),
        &[(exporter.pid(), 500), (importer.pid(), 0)],
    );
    daemon.until("it is there", |s| card(s).leased == Bytes::mib(500));
    exporter.kill();
    nvml.say(Some((1000, 500, 0)), &[(importer.pid(), 500)]);
    daemon.until("it is the importer's", |s| {
        card(s).unmanaged.is_zero() && card(s).overhead == Bytes::mib(500)
    });
}

#[test]
fn a_card_that_appears_later_is_added() {
    let nvml = Nvml::build(&[]);
    nvml.say(None, &[]);
    let daemon = nvml.daemon();
    assert!(daemon.snapshot().devices.is_empty());
    nvml.say(Some((1000, 1000, 0)), &[]);
    let snapshot = daemon.until("it is there", |s| s.devices.len() == 1);
    assert_eq!(card(&snapshot).capacity, Bytes::mib(1000));
}
