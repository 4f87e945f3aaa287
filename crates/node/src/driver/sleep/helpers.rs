//! Helpers: which works for which task, what it is told, and what its answers mean.

use std::collections::BTreeSet;
use std::time::Duration;

use ebb_units::{Bytes, TaskId};

use super::{DRIVER_BYTES_PER_SECOND, DRIVER_WAIT, KEEP_HELPER, Stage, Tool};
use crate::checkpoint::{Helper, Line};
use crate::driver::Driver;
use crate::driver::timers::Timer;
use crate::say;

impl Driver {
    /// A helper for a task: one that has nothing to do, or a new one.
    pub(super) fn take_helper(&mut self, task: TaskId) {
        let member = self.sleeps.tasks.get(&task).and_then(|sleep| {
            let peer = self.peers.get(sleep.members.keys().next()?)?;
            self.processes.get(&peer.process)
        });
        let Some((pid, owner)) = member.map(|process| (process.pid, process.uid)) else {
            return;
        };
        let idle = self
            .sleeps
            .tools
            .iter()
            .find(|(_, tool)| tool.task.is_none() && tool.owner == owner)
            .map(|(id, _)| *id);
        let id = match idle {
            Some(id) => id,
            None => {
                let id = self.new_id();
                let other = (owner != self.uid).then(|| (owner, crate::process::group(pid).unwrap_or(owner)));
                match Helper::start(&self.config.helper, id, other, self.answers.clone()) {
                    Ok(helper) => {
                        let tool = Tool {
                            helper,
                            task: None,
                            ready: false,
                            owner,
                            idle_since: self.now(),
                        };
                        self.sleeps.tools.insert(id, tool);
                        id
                    }
                    Err(error) => {
                        let why = format!("no process for the driver's checkpoint: {error}");
                        say::warning!("{why}");
                        return self.helper_failed(task, &why);
                    }
                }
            }
        };
        if let Some(tool) = self.sleeps.tools.get_mut(&id) {
            tool.task = Some(task);
        }
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
            sleep.helper = Some(id);
        }
        self.sleeps.moved.insert(task);
    }

    /// The helper is not needed at present. One of each user stays for a while: it has loaded the driver, which takes longer than
    /// what it is told.
    pub(super) fn let_helper_go(&mut self, task: TaskId) {
        let now = self.now();
        let sleep = self.sleeps.tasks.get_mut(&task);
        let Some(id) = sleep.and_then(|sleep| sleep.helper.take()) else {
            return;
        };
        let Some(tool) = self.sleeps.tools.get_mut(&id) else {
            return;
        };
        (tool.task, tool.idle_since) = (None, now);
        let owner = tool.owner;
        let spare = |(other, tool): (&u64, &Tool)| *other != id && tool.task.is_none() && tool.owner == owner;
        if self.sleeps.tools.iter().any(spare) {
            // Dropped: it ends when it reads the end of its input.
            self.sleeps.tools.remove(&id);
        } else {
            self.after(KEEP_HELPER, Timer::Helpers);
        }
    }

    /// Lets helpers end that have had nothing to do for long, but for users of whom a task sleeps.
    pub(in crate::driver) fn end_idle_helpers(&mut self) {
        let now = self.now();
        let asleep = self.sleeps.tasks.keys().filter_map(|task| self.tasks.get(task));
        let owners: BTreeSet<u32> = asleep.map(|task| task.owner).collect();
        self.sleeps.tools.retain(|_, tool| {
            let idle = tool.task.is_none() && now.since(tool.idle_since) >= KEEP_HELPER;
            !idle || owners.contains(&tool.owner)
        });
    }

    pub(super) fn drop_helper(&mut self, id: u64) {
        if let Some(tool) = self.sleeps.tools.remove(&id) {
            tool.helper.kill();
        }
    }

    /// A helper's line, or its end.
    pub(in crate::driver) fn helper_said(&mut self, id: u64, line: Option<Line>) {
        let Some(task) = self.sleeps.tools.get(&id).map(|tool| tool.task) else {
            return;
        };
        match line {
            Some(Line::Ready) => {
                if let Some(tool) = self.sleeps.tools.get_mut(&id) {
                    tool.ready = true;
                }
                self.sleeps.moved.extend(task);
            }
            Some(Line::Unable(why)) => {
                self.sleeps.tools.remove(&id);
                if let Some(task) = task {
                    self.helper_failed(task, &why);
                }
            }
            None => {
                self.sleeps.tools.remove(&id);
                if let Some(task) = task {
                    self.helper_failed(task, "the process for the driver's checkpoint ended");
                }
            }
            Some(line) => {
                if let Some(task) = task {
                    self.helper_did(task, line);
                }
            }
        }
    }

    pub(super) fn helper_did(&mut self, task: TaskId, line: Line) {
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        match line {
            Line::Step(what, pid, nanos) => {
                say::debug!("{task}: process {pid} {what} in {} ms", nanos / 1_000_000);
                self.phase(task, &what);
            }
            Line::State(pid, state) => {
                if sleep.stage == Stage::Asleep && state != 2 {
                    say::info!(
                        "{task}: process {pid} sleeps and is not checkpointed (state {state}): it is woken"
                    );
                    sleep.wanted = true;
                    self.sleeps.moved.insert(task);
                }
            }
            Line::Stuck(pid, why) => {
                say::error!("{task}: process {pid} is not undone: {why}");
                sleep.why = format!("process {pid}: {why}");
                // What is not undone by the helper is undone by the next.
                if sleep.stage == Stage::Down {
                    sleep.stage = Stage::Undo;
                }
            }
            Line::Failed(pid, why) => {
                sleep.told = false;
                let why = format!("process {pid}: {why}");
                match sleep.stage {
                    Stage::Down => self.give_up_sleep(task, &why, ""),
                    Stage::Up => self.up_failed(task, &why),
                    Stage::Undo => {
                        if sleep.why.is_empty() {
                            sleep.why.clone_from(&why);
                        }
                        self.again_later(task);
                    }
                    _ => {}
                }
            }
            Line::Done => match (std::mem::take(&mut sleep.told), sleep.stage).1 {
                Stage::Down => self.is_asleep(task),
                Stage::Up => self.is_awake(task),
                Stage::Undo => {
                    let why = std::mem::take(&mut sleep.why);
                    self.give_up_sleep(task, &why, "");
                }
                Stage::Asleep => {
                    self.let_helper_go(task);
                    self.looked(task);
                }
                _ => {}
            },
            Line::Ready | Line::Unable(_) => {}
        }
    }

    /// There is no helper, or it is there no more.
    pub(super) fn helper_failed(&mut self, task: TaskId, why: &str) {
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        sleep.helper = None;
        sleep.told = false;
        match sleep.stage {
            Stage::Asking | Stage::Evicting | Stage::Preparing => self.give_up_sleep(task, why, ""),
            Stage::Down => {
                sleep.stage = Stage::Undo;
                sleep.why = why.into();
                self.again_later(task);
            }
            Stage::Undo => self.again_later(task),
            Stage::Asleep => self.looked(task),
            Stage::Room | Stage::Up => self.up_failed(task, why),
        }
    }

    /// A command for all processes of a task.
    pub(super) fn command(&mut self, task: TaskId, command: &str) {
        let Some(sleep) = self.sleeps.tasks.get(&task) else {
            return;
        };
        let Some(id) = sleep.helper else { return };
        let pids = self.pids(task);
        let words: Vec<String> = pids.iter().map(ToString::to_string).collect();
        if let Some(tool) = self.sleeps.tools.get_mut(&id) {
            tool.helper.tell(&format!("{command} {}", words.join(" ")));
        }
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
            sleep.told = true;
        }
        // What the driver copies itself, and what it takes besides.
        let parked: Bytes = self
            .sleeps
            .tasks
            .get(&task)
            .into_iter()
            .flat_map(|sleep| sleep.members.values())
            .flat_map(|member| member.parked.values())
            .map(|parked| parked.lease.saturating_add(parked.overhead))
            .sum();
        let held: Bytes = self
            .held(task)
            .map(|(_, _, lease, overhead)| lease + overhead)
            .sum();
        let wait = DRIVER_WAIT + Duration::from_secs((parked + held).0 / DRIVER_BYTES_PER_SECOND);
        self.due_in(task, wait);
    }

    /// The processes of a task that are in it.
    pub(super) fn pids(&self, task: TaskId) -> BTreeSet<u32> {
        let members = self
            .sleeps
            .tasks
            .get(&task)
            .into_iter()
            .flat_map(|sleep| sleep.members.keys());
        members
            .filter_map(|peer| self.peers.get(peer))
            .filter_map(|peer| self.processes.get(&peer.process))
            .map(|process| process.pid)
            .collect()
    }

    pub(super) fn look(&mut self, task: TaskId) {
        self.command(task, "look");
    }
}
