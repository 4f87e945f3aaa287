//! The disk tier with real processes: more tasks than host memory holds, and deaths while bytes are in files.

use ebb_protocol::control::{Answer, DiskRow, Request};
use ebb_tests::{Options, Program, Stage, eventually};
use ebb_units::Bytes;

/// A stage whose host memory holds one program's memory and a little, and a folder on a real disk.
struct Scene {
    stage: Stage,
    folder: tempfile::TempDir,
}

const HELD: Bytes = Bytes::mib(48);

fn scene(more: &str) -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("segments");
    let reserve = if more.contains("reserve") {
        ""
    } else {
        "reserve = \"0\"\n"
    };
    let stage = Stage::new(Options {
        arena: Bytes::mib(64),
        config: format!("[disk]\ndir = {dir:?}\n{reserve}{more}"),
        ..Options::default()
    });
    Scene { stage, folder }
}

impl Scene {
    fn disk(&self) -> DiskRow {
        self.stage.snapshot().arena.disk.expect("there is a disk tier")
    }

    fn pause(&self, task: &str) -> Answer {
        self.stage.ask(&Request::Pause {
            task: task.into(),
            wait_ms: Some(30_000),
        })
    }

    fn resume(&self, task: &str) {
        let resumed = self.stage.ask(&Request::Resume { task: task.into() });
        assert!(matches!(resumed, Answer::Ok(_)), "{resumed:?}");
    }

    fn start(&self, name: &str, seed: u64) -> Program {
        let mut program = self.stage.run(&["--name", name]);
        program.hold("m", HELD, seed);
        program
    }

    /// Two programs, of which the first one's memory is mostly on disk since the second one's needed the room.
    fn one_on_disk(&self) -> (Program, Program) {
        let first = self.start("first", 1);
        let paused = self.pause("first");
        assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
        let second = self.start("second", 2);
        let paused = self.pause("second");
        assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
        assert!(self.disk().segments >= Bytes::mib(24), "{:?}", self.disk());
        (first, second)
    }

    fn names(&self) -> usize {
        std::fs::read_dir(self.folder.path().join("segments"))
            .unwrap()
            .count()
    }
}

#[test]
fn bug_109_more_tasks_than_host_memory_holds_are_off_the_card_and_come_back() {
    let scene = scene("");
    let mut programs = Vec::new();
    for i in 0..5u64 {
        let name = format!("task{i}");
        programs.push(scene.start(&name, i));
        let paused = scene.pause(&name);
        assert!(matches!(paused, Answer::Ok(_)), "task {i}: {paused:?}");
        let arena = scene.stage.snapshot().arena;
        assert!(arena.held <= arena.budget, "{arena:?}");
    }
    let disk = scene.disk();
    assert!(disk.segments >= Bytes::mib(5 * 48 - 64), "{disk:?}");
    assert_eq!(scene.names(), 0, "files have no names");
    for round in 0..2 {
        for (i, program) in programs.iter_mut().enumerate() {
            let name = format!("task{i}");
            scene.resume(&name);
            assert_eq!(program.wrong("m", i as u64), 0, "task {i}, round {round}");
            let paused = scene.pause(&name);
            assert!(
                matches!(paused, Answer::Ok(_)),
                "task {i}, round {round}: {paused:?}"
            );
        }
    }
    let arena = scene.stage.snapshot().arena;
    assert!(arena.held <= arena.budget, "{arena:?}");
    drop(programs);
    eventually("the files to be gone", || {
        let disk = scene.disk();
        (disk.stored.is_zero() && disk.segments.is_zero())
            .then_some(())
            .ok_or(format!("{disk:?}"))
    });
}

#[test]
fn the_daemon_is_killed_and_the_program_reads_its_files_itself() {
    let mut scene = scene("");
    let (mut first, mut second) = scene.one_on_disk();
    scene.stage.kill_daemon();
    assert_eq!(first.wrong("m", 1), 0);
    drop(first);
    assert_eq!(second.wrong("m", 2), 0);
}

#[test]
fn a_new_daemon_takes_the_files_on_and_brings_them_back() {
    let mut scene = scene("");
    let (mut first, mut second) = scene.one_on_disk();
    let before = scene.disk().segments;
    scene.stage.kill_daemon();
    scene.stage.start_daemon();
    eventually("the programs to say what they have", || {
        let disk = scene.disk();
        (disk.segments == before)
            .then_some(())
            .ok_or(format!("{disk:?}, {before} before"))
    });
    for (name, program, seed) in [("first", &mut first, 1), ("second", &mut second, 2)] {
        scene.resume(name);
        assert_eq!(program.wrong("m", seed), 0, "{name}");
        let paused = scene.pause(name);
        assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
    }
    assert!(scene.disk().loaded > Bytes::ZERO, "by the daemon");
    assert_eq!(scene.names(), 0);
}

#[test]
fn a_program_that_is_killed_takes_its_files_along() {
    let scene = scene("");
    let (mut first, mut second) = scene.one_on_disk();
    first.kill();
    eventually("its files to be gone", || {
        let disk = scene.disk();
        disk.segments.is_zero().then_some(()).ok_or(format!("{disk:?}"))
    });
    scene.resume("second");
    assert_eq!(second.wrong("m", 2), 0);
}

#[test]
fn a_disk_that_takes_nothing_is_said_and_loses_nothing() {
    let scene = scene("reserve = \"900Ti\"\n");
    let mut first = scene.start("first", 1);
    let paused = scene.pause("first");
    assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
    let mut second = scene.start("second", 2);
    // The card has room for both, host memory has not: the second one stays, and is told why.
    let refused = scene.stage.ask(&Request::Pause {
        task: "second".into(),
        wait_ms: Some(6_000),
    });
    assert!(matches!(refused, Answer::Error(_)), "{refused:?}");
    let disk = scene.disk();
    assert!(disk.trouble.contains("too little free"), "{disk:?}");
    assert_eq!((disk.segments, disk.stored), (Bytes::ZERO, Bytes::ZERO));
    assert_eq!(second.wrong("m", 2), 0);
    scene.resume("first");
    assert_eq!(first.wrong("m", 1), 0);
}
