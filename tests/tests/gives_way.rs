//! When nothing fits: a program saves itself in its own way, gives way, and goes on when there is room.

use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Artefacts, Options, Program, Stage, eventually};
use ebb_units::Bytes;

const HELD: Bytes = Bytes::mib(180);

/// `trainer` under `ebb run`, which stays its parent. Ended when dropped.
struct Trainer {
    child: Child,
    folder: PathBuf,
}

impl Trainer {
    fn start(stage: &Stage, flags: &[&str]) -> Self {
        let folder = stage.folder().to_path_buf();
        let mut command = stage.run_command(flags, &Artefacts::get().program("trainer"));
        let output = |name: &str| std::fs::File::create(folder.join(name)).unwrap();
        command
            .arg(folder.join("trained"))
            .arg(HELD.0.to_string())
            .env("TRAINED", folder.join("trained"))
            .stdin(Stdio::null())
            .stdout(output("said"))
            .stderr(output("told"));
        let child = command.spawn().unwrap();
        Self { child, folder }
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.join(name)).unwrap_or_default()
    }

    /// The steps at which it said so.
    fn steps(&self, what: &str) -> Vec<u32> {
        let said = self.read("said");
        let steps = said
            .lines()
            .filter_map(|line| line.strip_prefix(what)?.trim().parse().ok());
        steps.collect()
    }

    fn until(&self, what: &str, over: impl Fn(&Self) -> bool) {
        eventually(what, || {
            if over(self) {
                return Ok(());
            }
            Err(format!(
                "said:\n{}told:\n{}",
                self.read("said"),
                self.read("told")
            ))
        });
    }

    /// Lets it finish.
    fn end(mut self) -> (ExitStatus, Vec<u32>) {
        std::fs::write(self.folder.join("trained.end"), "").unwrap();
        let status = eventually("it ends", || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            _ => Err(format!(
                "said:\n{}told:\n{}",
                self.read("said"),
                self.read("told")
            )),
        });
        (status, self.steps("done"))
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // Its program ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A card on which a higher priority takes what a lower one has, after enough time to save itself.
fn stage() -> Stage {
    Stage::new(Options {
        config: "[policy]\npreempt = true\npreempt_grace = \"30s\"\n".into(),
        ..Options::default()
    })
}

/// Somebody urgent, who needs what the trainer has; returns when it has it.
fn urgent(stage: &Stage) -> Program {
    let mut urgent = stage.run(&["--priority", "high", "--name", "urgent"]);
    urgent.hold("x", HELD, 3);
    assert_eq!(urgent.wrong("x", 3), 0);
    urgent
}

/// A trainer of low priority that can give way like this, and somebody urgent who has had it do so.
fn preempted(stage: &Stage, checkpoint: &str, restart: &str) -> (Trainer, Program) {
    let how = ["--checkpoint", checkpoint, "--restart", restart];
    let flags = [&["--priority", "low", "--name", "train"], &how[..]].concat();
    let trainer = Trainer::start(stage, &flags);
    trainer.until("it trains", |t| !t.steps("begins").is_empty());
    (trainer, urgent(stage))
}

/// Saves itself by its own means, makes room by ending, and goes on from what it saved.
fn saves_itself(way: &str) {
    let stage = stage();
    let (trainer, urgent) = preempted(&stage, way, "on-preempt");
    let saved = trainer.steps("saved");
    assert_eq!(
        saved.len(),
        1,
        "before anything was taken: {}",
        trainer.read("told")
    );
    trainer.until("it waits", |t| t.read("told").contains("waits for room to go on"));
    assert!(trainer.read("told").contains("giving way: the program has"));
    assert!(trainer.steps("goes on").is_empty(), "not before there is room");
    assert!(urgent.finish().success());
    trainer.until("it goes on", |t| !t.steps("goes on").is_empty());
    assert_eq!(trainer.steps("goes on"), saved, "from where it saved itself");
    let (status, done) = trainer.end();
    assert!(status.success(), "{status}");
    assert!(done.len() == 1 && done[0] >= saved[0], "{done:?} after {saved:?}");
    stage.wait_until_empty();
}

#[test]
fn a_program_that_is_preempted_saves_itself_by_a_command_and_goes_on() {
    saves_itself("touch \"$TRAINED.save\"; while [ -e \"$TRAINED.save\" ]; do sleep 0.05; done");
}

#[test]
fn a_program_that_is_preempted_saves_itself_on_a_signal_and_goes_on() {
    saves_itself("signal");
}

/// What could not be saved is not ended: its memory is taken by copy, and the same process goes on where it was.
#[test]
fn a_program_that_could_not_be_saved_is_not_ended_and_goes_on() {
    let stage = stage();
    let (trainer, urgent) = preempted(&stage, "echo the disk is full >&2; exit 28", "always");
    let told = trainer.read("told");
    assert!(
        told.contains("the checkpoint command failed: status 28") && told.contains("is not ended"),
        "{told}"
    );
    assert!(urgent.finish().success());
    let (status, done) = trainer.end();
    assert!(status.success(), "{status}");
    assert_eq!(done.len(), 1, "every word was right in every step");
    stage.wait_until_empty();
}

/// `ebb run` is told to end: the program hears it, its status is kept, and nothing is started again.
#[test]
fn what_ebb_run_is_told_is_the_programs_and_ends_the_starting_again() {
    let stage = stage();
    let flags = ["--name", "train", "--checkpoint", "signal", "--restart", "always"];
    let mut trainer = Trainer::start(&stage, &flags);
    trainer.until("it trains", |t| !t.steps("begins").is_empty());
    let pid = rustix::process::Pid::from_child(&trainer.child);
    // Not meant for `ebb run`, which would be ended by it: the program saves itself and ends well, which is an end like any other.
    rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
    let status = trainer.child.wait().unwrap();
    assert_eq!((status.code(), trainer.steps("saved").len()), (Some(0), 1));
    let mut trainer = Trainer::start(&stage, &flags);
    trainer.until("it goes on", |t| !t.steps("goes on").is_empty());
    let pid = rustix::process::Pid::from_child(&trainer.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = trainer.child.wait().unwrap();
    assert_eq!(status.code(), Some(128 + 15), "{}", trainer.read("told"));
    assert!(!trainer.read("told").contains("started again"));
    stage.wait_until_empty();
}

/// Needs nothing of its own: the same process goes on where it was.
#[test]
fn a_program_that_is_preempted_is_hibernated_and_goes_on() {
    let stage = stage();
    let (trainer, urgent) = preempted(&stage, "hibernate", "on-preempt");
    assert!(
        trainer
            .read("told")
            .contains("giving way: the program is hibernated")
    );
    let told = trainer.read("told");
    assert!(!told.contains("could not be hibernated"), "{told}");
    assert!(urgent.finish().success());
    assert!(trainer.steps("saved").is_empty() && trainer.steps("begins").len() == 1);
    let (status, done) = trainer.end();
    assert!(status.success(), "{status}");
    assert_eq!(done.len(), 1);
    stage.wait_until_empty();
}

/// A program that ends for want of memory leaves a report, and is tried again.
#[test]
fn a_program_without_memory_leaves_a_report_and_is_started_again() {
    let stage = Stage::new(Options::default());
    let flags = ["--limit", "100Mi", "--name", "train", "--restart", "on-oom"];
    let trainer = Trainer::start(&stage, &flags);
    let mut other = stage.run(&["--name", "other"]);
    other.hold("y", Bytes::mib(32), 1);
    trainer.until("it is refused", |t| t.read("told").contains("what to change"));
    trainer.until("it is tried again", |t| {
        t.read("told").matches("the program is started again").count() >= 1
            && t.read("told").matches("`other`: ").count() >= 1
    });
    let told = trainer.read("told");
    for part in [
        "`train` was refused memory: ",
        "would pass its limit of 100 MiB",
        "the card: ",
        "request 0 B",
        "what to change: a higher --limit",
    ] {
        assert!(told.contains(part), "{part} in {told}");
    }
    let raised = stage.ask(&Request::Limit {
        task: "train".into(),
        limit: Some(Bytes::mib(220)),
        request: None,
        priority: None,
    });
    assert!(matches!(raised, Answer::Ok(_)), "{raised:?}");
    trainer.until("it has its memory", |t| !t.steps("begins").is_empty());
    let (status, _) = trainer.end();
    assert!(status.success(), "{status}");
    assert_eq!(other.wrong("y", 1), 0);
}
