//! `ebb run --checkpoint --restart`: this process stays, has the program as its child, and starts it again.
//!
//! ```text
//!          start                    gives way: saves itself in its own way, is ended
//! room ───────────> running ─────────────────────────────────────────────────────────> wait for room ──> room
//!                      │ ends for want of memory, or at all: if --restart says so            ^
//!                      ├─────────────────────────────────────────────────────────────────────┘
//!                      └─> over: its exit status is ours
//! ```
//! The task is this process's, so it lives on between two runs of the program. If this process dies, the program is told
//! to end. Without a daemon the program goes on, and is not told anything.

use std::collections::BTreeMap;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use ebb_protocol::control::{Payload, Request, Snapshot, TaskNews};
use ebb_units::{Bytes, DeviceUuid, TaskId};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

use crate::args::{CheckpointWay, Restart, SupervisedArgs};
use crate::client::{Client, unexpected};
use crate::error::{CliError, Result};

/// How often is looked whether something happened.
const LOOK: Duration = Duration::from_millis(100);
/// How often the daemon is asked.
const ASK: Duration = Duration::from_millis(500);
/// From the polite signal to the other one.
const TERM_TIME: Duration = Duration::from_secs(10);
/// The longest pause before a program that ends at once is started again.
const BACK_OFF_MAX: Duration = Duration::from_secs(60);

/// How a run of the program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By itself, and well.
    Done,
    /// By itself, and not well.
    Failed,
    /// Not well, after memory was refused to it.
    OutOfMemory,
    /// It gave way.
    GaveWay,
}

impl Restart {
    /// Whether a program that ended so is started again.
    pub(crate) fn applies(self, end: End) -> bool {
        match end {
            End::Done => false,
            End::Failed => self == Self::Always,
            End::OutOfMemory => matches!(self, Self::OnOom | Self::Always),
            End::GaveWay => matches!(self, Self::OnPreempt | Self::Always),
        }
    }
}

/// The second half: ends with whoever started it, and becomes the program.
pub(crate) fn become_program(args: &SupervisedArgs) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|e| CliError::failed(format!("prctl: {e}")))?;
    let (path, rest) = args.program.split_first().expect("clap wants one");
    let error = Command::new(path).arg0(&args.name).args(rest).exec();
    let status = if error.kind() == std::io::ErrorKind::NotFound {
        crate::program::NOT_FOUND
    } else {
        crate::program::NOT_EXECUTABLE
    };
    Err(CliError::failed(format!("cannot run {}: {error}", path.display())).with_status(status))
}

/// What the user wants done.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) task: TaskId,
    pub(crate) checkpoint: Option<&'a CheckpointWay>,
    pub(crate) restart: Option<Restart>,
}

/// Runs the program until it is over; never returns but for what is wrong before.
pub(crate) fn supervise(client: &mut Client, plan: &Plan<'_>, start: impl Fn() -> Command) -> Result<()> {
    let mut pause = Duration::from_secs(1);
    loop {
        let before = news(client, plan.task).denials;
        let began = Instant::now();
        let mut child = start()
            .spawn()
            .map_err(|e| CliError::failed(format!("cannot start the program: {e}")))?;
        let mut held = BTreeMap::new();
        let (status, gave_way) = watch(client, plan, &mut child, &mut held)?;
        let after = news(client, plan.task);
        let end = match status {
            _ if gave_way => End::GaveWay,
            status if status.success() => End::Done,
            _ if after.denials > before => End::OutOfMemory,
            _ => End::Failed,
        };
        if end == End::OutOfMemory
            && let Some(report) = &after.report
        {
            say(report);
        }
        if !plan.restart.is_some_and(|restart| restart.applies(end)) {
            std::process::exit(code(status));
        }
        if end != End::GaveWay {
            if began.elapsed() > BACK_OFF_MAX {
                pause = Duration::from_secs(1);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(BACK_OFF_MAX);
        }
        wait_for_room(client, plan.task, &held);
        say("the program is started again");
    }
}

/// As a shell says it.
fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Until the program is over: how it ended, and whether it gave way.
fn watch(
    client: &mut Client,
    plan: &Plan<'_>,
    child: &mut Child,
    held: &mut BTreeMap<DeviceUuid, Bytes>,
) -> Result<(ExitStatus, bool)> {
    let mut asked = Instant::now();
    // Kept open: who hangs up wants no answer any more.
    let mut returns: Option<Client> = None;
    loop {
        if let Some(status) = ended(child)? {
            return Ok((status, false));
        }
        std::thread::sleep(LOOK);
        if asked.elapsed() < ASK {
            continue;
        }
        asked = Instant::now();
        let Some(within) = news(client, plan.task).give_way_ms.map(Duration::from_millis) else {
            continue;
        };
        note_held(client, plan.task, held);
        if let Some(CheckpointWay::Hibernate) = plan.checkpoint {
            say("giving way: the program is hibernated, and goes on when there is room");
            returns = hibernate(client, plan.task, within).or(returns);
            continue;
        }
        if plan.checkpoint.is_none() && plan.restart.is_none_or(|restart| !restart.applies(End::GaveWay)) {
            continue;
        }
        say(&format!(
            "giving way: the program has {:.1} s to save itself",
            within.as_secs_f64()
        ));
        let deadline = Instant::now() + within;
        if let Some(way) = plan.checkpoint {
            save(way, plan.task, child, deadline)?;
        }
        return Ok((stop(child)?, true));
    }
}

/// Takes all of a task off its cards, and lets it come back when there is room.
///
/// It is paused first: a program that uses the GPU all the time would want its memory back before the last of it has left. If it cannot
/// be hibernated, its memory is off the card all the same, and only its contexts stay.
///
/// Returns the connection on which its return will be answered.
fn hibernate(client: &mut Client, task: TaskId, within: Duration) -> Option<Client> {
    let wait_ms = Some(u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
    let task = task.to_string();
    let pause = Request::Pause {
        task: task.clone(),
        wait_ms,
    };
    let hibernate = Request::Hibernate {
        task: task.clone(),
        wait_ms,
    };
    match client.ask(&pause).and_then(|_| client.ask(&hibernate)) {
        Ok(_) => {}
        Err(error) => say(&format!("it could not be hibernated: {error}")),
    }
    // Answered when it is back, however long others have the room: nobody waits for that here.
    let mut resumes = client.again()?;
    resumes.send(&Request::Resume { task }).ok()?;
    Some(resumes)
}

/// Lets the program save itself.
fn save(way: &CheckpointWay, task: TaskId, child: &mut Child, deadline: Instant) -> Result<()> {
    match way {
        CheckpointWay::Hibernate => Ok(()),
        CheckpointWay::Signal => {
            signal(child, Signal::USR1);
            until(deadline, || Ok(ended(child)?.is_some()))
        }
        CheckpointWay::Command(command) => {
            let saving = Command::new("sh")
                .args(["-c", command])
                .env("EBB_PID", child.id().to_string())
                .env("EBB_TASK", task.to_string())
                .spawn();
            let mut saving = match saving {
                Ok(saving) => saving,
                Err(error) => {
                    say(&format!("the checkpoint command cannot be run: {error}"));
                    return Ok(());
                }
            };
            until(deadline, || Ok(ended(&mut saving)?.is_some()))?;
            match ended(&mut saving)? {
                Some(status) if status.success() => {}
                Some(status) => say(&format!("the checkpoint command failed: {status}")),
                None => {
                    say("the checkpoint command took too long");
                    let _ = saving.kill();
                    let _ = saving.wait();
                }
            }
            Ok(())
        }
    }
}

/// Ends the program, politely first.
fn stop(child: &mut Child) -> Result<ExitStatus> {
    if ended(child)?.is_none() {
        signal(child, Signal::TERM);
        until(Instant::now() + TERM_TIME, || Ok(ended(child)?.is_some()))?;
    }
    if ended(child)?.is_none() {
        let _ = child.kill();
    }
    child
        .wait()
        .map_err(|e| CliError::failed(format!("the program cannot be waited for: {e}")))
}

fn ended(child: &mut Child) -> Result<Option<ExitStatus>> {
    child
        .try_wait()
        .map_err(|e| CliError::failed(format!("the program cannot be waited for: {e}")))
}

fn until(deadline: Instant, mut over: impl FnMut() -> Result<bool>) -> Result<()> {
    while !over()? && Instant::now() < deadline {
        std::thread::sleep(LOOK.min(deadline.saturating_duration_since(Instant::now())));
    }
    Ok(())
}

fn signal(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // It is our child and was not waited for: the number is still its own. It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// Nothing happened, as far as a daemon that does not answer goes.
fn news(client: &mut Client, task: TaskId) -> TaskNews {
    let request = Request::News {
        task: task.to_string(),
    };
    match client.ask(&request) {
        Ok(Payload::News(news)) => news,
        _ => TaskNews::default(),
    }
}

fn list(client: &mut Client) -> Result<Snapshot> {
    match client.ask(&Request::List)? {
        Payload::List(snapshot) => Ok(snapshot),
        other => Err(unexpected(&other)),
    }
}

/// What the task has of each card, on it and in host memory: what it will want again.
fn note_held(client: &mut Client, task: TaskId, held: &mut BTreeMap<DeviceUuid, Bytes>) {
    let Ok(snapshot) = list(client) else { return };
    for row in snapshot
        .tasks
        .iter()
        .filter(|row| row.task == task)
        .flat_map(|row| &row.processes)
    {
        if let Some(device) = row.device {
            let sum = held.entry(device).or_insert(Bytes::ZERO);
            *sum = sum
                .saturating_add(row.resident)
                .saturating_add(row.evicted)
                .saturating_add(row.overhead);
        }
    }
}

/// Whether the cards have what the task had.
fn has_room(snapshot: &Snapshot, held: &BTreeMap<DeviceUuid, Bytes>) -> bool {
    snapshot.devices.iter().all(|card| {
        held.get(&card.uuid)
            .is_none_or(|held| card.free >= (*held).min(card.capacity))
    })
}

fn wait_for_room(client: &mut Client, task: TaskId, held: &BTreeMap<DeviceUuid, Bytes>) {
    let mut said = false;
    while let Ok(snapshot) = list(client) {
        if has_room(&snapshot, held) {
            return;
        }
        if !std::mem::replace(&mut said, true) {
            say(&format!("{task} waits for room to go on"));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn say(text: &str) {
    anstream::eprintln!("ebb run: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_protocol::control::DeviceRow;

    #[test]
    fn what_is_started_again() {
        let ends = [End::Done, End::Failed, End::OutOfMemory, End::GaveWay];
        let applies = |restart: Restart| ends.map(|end| restart.applies(end));
        assert_eq!(applies(Restart::OnOom), [false, false, true, false]);
        assert_eq!(applies(Restart::OnPreempt), [false, false, false, true]);
        assert_eq!(applies(Restart::Always), [false, true, true, true]);
    }

    #[test]
    fn room_is_what_it_had() {
        let card = |free: u64| DeviceRow {
            uuid: DeviceUuid([1; 16]),
            capacity: Bytes::gib(100),
            free: Bytes::gib(free),
            ..crate::fixtures::busy().devices[0].clone()
        };
        let snapshot = |free| Snapshot {
            devices: vec![card(free)],
            ..Snapshot::default()
        };
        let held = BTreeMap::from([(DeviceUuid([1; 16]), Bytes::gib(40))]);
        assert!(!has_room(&snapshot(39), &held));
        assert!(has_room(&snapshot(40), &held));
        assert!(has_room(&snapshot(0), &BTreeMap::new()));
    }

    #[test]
    fn a_program_saves_itself_and_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("saved");
        let program = |script: &str| Command::new("sh").args(["-c", script]).spawn().unwrap();
        let soon = || Instant::now() + Duration::from_secs(20);
        // By its own signal. It is ready when the file is there.
        let mut child = program(&format!(
            "trap 'echo saved > {0}; exit 0' USR1; echo > {0}; while :; do sleep 0.05; done",
            file.display()
        ));
        until(soon(), || Ok(file.exists())).unwrap();
        save(&CheckpointWay::Signal, TaskId(1), &mut child, soon()).unwrap();
        assert!(stop(&mut child).unwrap().success());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "saved\n");
        // By a command.
        let mut child = program("exec sleep 600");
        let command = CheckpointWay::Command(format!("echo $EBB_TASK $EBB_PID > {}", file.display()));
        save(&command, TaskId(7), &mut child, soon()).unwrap();
        assert_eq!(
            std::fs::read_to_string(&file).unwrap(),
            format!("t7 {}\n", child.id())
        );
        assert_eq!(code(stop(&mut child).unwrap()), 128 + 15);
    }
}
