//! What the daemon makes of NVML's figures. The library is a small C file that says what a text file says.

use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_node::test_util::{CARD, TestDaemon};
use ebb_protocol::control::{DeviceRow, Snapshot};
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
        let mut text = card.map_or(String::new(), |(total, free, reserved)| {
            format!("{} {} {}\n", total * MIB, free * MIB, reserved * MIB)
        });
        for (pid, used) in processes {
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
