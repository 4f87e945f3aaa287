//! How a program saves itself before it gives way.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_node::{Group, Signals};
use ebb_protocol::control::Request;
use ebb_units::TaskId;
use rustix::process::Signal;

use super::{Supervisor, ended, link::Link, say, signal};
use crate::args::CheckpointWay;
use crate::error::Result;

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Saved {
    /// It is saved, and may be ended.
    Yes,
    /// It is not: to end it would lose its work.
    No,
}

impl Supervisor<'_> {
    /// Lets the program save itself, until the deadline.
    pub(super) fn save(
        &mut self,
        way: &CheckpointWay,
        child: &mut Child,
        deadline: Instant,
    ) -> Result<Saved> {
        match way {
            CheckpointWay::Hibernate => Ok(Saved::Yes),
            CheckpointWay::Signal => self.save_by_signal(child, deadline),
            CheckpointWay::Command(command) => self.save_by_command(command, child, deadline),
        }
    }

    fn save_by_signal(&mut self, child: &mut Child, deadline: Instant) -> Result<Saved> {
        signal(child, Signal::USR1);
        loop {
            match ended(child)? {
                Some(status) if status.signal() == Some(Signal::USR1.as_raw()) => {
                    say("SIGUSR1 ended the program: it has no handler for it, and saved nothing");
                    return Ok(Saved::Yes);
                }
                Some(_) => return Ok(Saved::Yes),
                None if Instant::now() >= deadline => {
                    say("the program did not end on SIGUSR1 in time");
                    return Ok(Saved::No);
                }
                None => self.wait_until(deadline, child),
            }
        }
    }

    fn save_by_command(&mut self, command: &str, child: &mut Child, deadline: Instant) -> Result<Saved> {
        let saving = match start(&self.signals, &self.plan.own, command, child.id(), self.plan.task) {
            Ok(saving) => saving,
            Err(error) => {
                say(&format!("the checkpoint command cannot be run: {error}"));
                return Ok(Saved::No);
            }
        };
        while !saving.is_over() && Instant::now() < deadline {
            self.wait_until(deadline, child);
        }
        let late = !saving.is_over();
        // What it started in the background, or all of it if it is late, does not outlive the time that it had.
        saving.kill();
        match saving.wait() {
            _ if late => say("the checkpoint command took too long, and was ended"),
            Ok(status) if status.success() => return Ok(Saved::Yes),
            Ok(status) => say(&format!(
                "the checkpoint command failed: {}",
                super::in_words(status)
            )),
            Err(error) => say(&format!("the checkpoint command cannot be waited for: {error}")),
        }
        Ok(Saved::No)
    }

    /// Until something is heard, or for a moment.
    fn wait_until(&mut self, deadline: Instant, child: &Child) {
        self.signals
            .wait(super::LOOK.min(deadline.saturating_duration_since(Instant::now())));
        self.pass_on(child);
    }
}

/// The user's command, as a group of its own, so that all of it can be ended. It hears and ends as the program does, and has no
/// input: that is the program's.
fn start(
    signals: &Signals,
    own: &std::path::Path,
    command: &str,
    pid: u32,
    task: TaskId,
) -> std::io::Result<Group> {
    let mut saving = Command::new(own);
    super::under_us(&mut saving, "sh".as_ref(), "/bin/sh".as_ref());
    saving
        .args(["-c", command])
        .env("EBB_PID", pid.to_string())
        .env("EBB_TASK", task.to_string())
        .stdin(Stdio::null());
    Group::start(signals.give_back(&mut saving))
}

/// Takes all of a task's memory off its cards, by copy, and lets it come back when it is its turn: nothing is lost, and the program goes on.
///
/// Returns the connection on which its return will be answered: who hangs up wants no answer any more.
pub(super) fn evict(link: &Link, task: TaskId, within: Duration) -> Option<crate::client::Client> {
    take_off(link, task, within, false)
}

/// The same, contexts included.
///
/// It is paused first: a program that uses the GPU all the time would want its memory back before the last of it has left. If it cannot
/// be hibernated, its memory is off the card all the same, and only its contexts stay.
pub(super) fn hibernate(link: &Link, task: TaskId, within: Duration) -> Option<crate::client::Client> {
    take_off(link, task, within, true)
}

fn take_off(link: &Link, task: TaskId, within: Duration, contexts: bool) -> Option<crate::client::Client> {
    let wait_ms = Some(u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
    let task = task.to_string();
    let mut client = link.another()?;
    let pause = Request::Pause {
        task: task.clone(),
        wait_ms,
    };
    let hibernate = Request::Hibernate {
        task: task.clone(),
        wait_ms,
    };
    match client.ask(&pause) {
        Ok(_) if contexts => {
            if let Err(error) = client.ask(&hibernate) {
                say(&format!("it could not be hibernated: {}", error.message));
            }
        }
        Ok(_) => {}
        Err(error) => say(&format!("its memory could not be taken: {}", error.message)),
    }
    // Answered when it is back, however long others have the room: nobody waits for that here.
    let mut resumes = link.another()?;
    resumes.send(&Request::Resume { task }).ok()?;
    Some(resumes)
}
