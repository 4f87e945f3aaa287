//! Programs that fail, die or stop at a driver call that a test names; and which calls there are.
//!
//! What a release or a restore calls, and how often, is not written down in tests: a [`Trace`] of a run in which nothing goes wrong
//! says which calls a part of it makes, and the test goes through them. So a step that is new is tried without anybody thinking of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ebb_protocol::control::{Answer, Failure, Payload, Request};
use rustix::process::{Pid, Signal, kill_process};

use crate::{PATIENCE, Program, Reply, Stage, eventually, ledger_of};

/// What happens at a step instead of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The call fails with this code.
    Fails(u32),
    /// So does every later one.
    FailsFrom(u32),
    /// The process is killed in it.
    Dies,
    /// The process is stopped in it until [`go_on`].
    Stops,
}

/// The n-th use of a call by a process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Step {
    /// The symbol, in full.
    pub call: String,
    /// From 1.
    pub n: u64,
}

impl Step {
    /// The n-th use of `call`.
    #[must_use]
    pub fn new(call: &str, n: u64) -> Self {
        Self { call: call.into(), n }
    }

    /// The rule for `EBB_SIM_FAULT`.
    #[must_use]
    pub fn fault(&self, effect: Effect) -> String {
        let Self { call, n } = self;
        match effect {
            Effect::Fails(code) => format!("{call}:{n}:{code}"),
            Effect::FailsFrom(code) => format!("{call}:{n}+:{code}"),
            Effect::Dies => format!("{call}:{n}:kill"),
            Effect::Stops => format!("{call}:{n}:stop"),
        }
    }
}

/// The calls that one process made, by `EBB_SIM_TRACE`.
#[derive(Debug)]
pub struct Trace {
    path: PathBuf,
    folder: tempfile::TempDir,
}

/// How often each call was made by some moment.
pub type Counts = BTreeMap<String, u64>;

impl Default for Trace {
    fn default() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self {
            path: folder.path().join("calls"),
            folder,
        }
    }
}

impl Trace {
    /// What to set `EBB_SIM_TRACE` to.
    #[must_use]
    pub fn path(&self) -> &str {
        debug_assert!(self.path.starts_with(self.folder.path()));
        self.path.to_str().expect("a path of letters")
    }

    /// The calls until now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::new();
        for line in std::fs::read_to_string(&self.path).unwrap_or_default().lines() {
            *counts.entry(line.to_owned()).or_default() += 1;
        }
        counts
    }
}

/// The steps that were made between two moments, without those that only ask. Of each call at most `most`, evenly spread and the first
/// and last among them; all with `EBB_STEPS=all`.
#[must_use]
pub fn steps_between(before: &Counts, after: &Counts, most: u64) -> Vec<Step> {
    let all = std::env::var("EBB_STEPS").is_ok_and(|which| which == "all");
    let mut steps = Vec::new();
    for (call, to) in after {
        let from = before.get(call).copied().unwrap_or(0);
        if *to == from || asks_only(call) {
            continue;
        }
        let count = to - from;
        let chosen = if all { count } else { count.min(most) };
        let mut at: Vec<u64> = (0..chosen)
            .map(|i| {
                if chosen == 1 {
                    from + 1
                } else {
                    from + 1 + i * (count - 1) / (chosen - 1)
                }
            })
            .collect();
        at.dedup();
        steps.extend(at.into_iter().map(|n| Step {
            call: call.clone(),
            n,
        }));
    }
    steps
}

/// Calls that change nothing and are made at any time: how often is chance.
fn asks_only(call: &str) -> bool {
    let asks = [
        "Get",
        "Query",
        "Current",
        "TotalMem",
        "CanAccessPeer",
        "DriverEntry",
    ];
    asks.iter().any(|part| call.contains(part)) && !call.starts_with("cuCheckpoint")
}

/// Whether a process is stopped.
#[must_use]
pub fn is_stopped(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The name may hold anything; the state follows its last parenthesis.
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|rest| rest.starts_with('T'))
}

/// Lets a stopped process go on.
pub fn go_on(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let _ = pid.map(|pid| kill_process(pid, Signal::CONT));
}

/// The processes that one started: their numbers.
#[must_use]
pub fn children(of: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{of}/task")) else {
        return found;
    };
    for task in tasks.flatten() {
        let path: PathBuf = Path::new(&task.path()).join("children");
        let listed = std::fs::read_to_string(path).unwrap_or_default();
        found.extend(
            listed
                .split_whitespace()
                .filter_map(|pid| pid.parse::<u32>().ok()),
        );
    }
    found
}

impl Program {
    /// A line that is to work in the end: calls of the program's own that were told to fail may come before, `tries` of them.
    ///
    /// # Panics
    /// If it does not.
    pub fn in_the_end(&mut self, line: &str, tries: usize, when: &str) -> String {
        for attempt in 0.. {
            match self.say(line) {
                Reply::Ok(rest) => return rest,
                Reply::Err(code) => assert!(attempt < tries, "`{line}` fails with {code}: {when}"),
            }
        }
        unreachable!("the loop ends by itself")
    }

    /// Sends lines one after the other, and hears what becomes of them; `false` once it died of one.
    pub fn hear_out(&mut self, lines: &[String]) -> bool {
        lines.iter().all(|line| {
            self.send(line);
            self.poll(PATIENCE).is_some()
        })
    }
}

impl Stage {
    /// Takes a task off its cards and lets it come back, whatever becomes of it: the daemon answers, with yes or no.
    pub fn out_and_back(&self, task: &str) {
        let wait_ms = Some(5_000);
        let _ = self.ask(&Request::Pause {
            task: task.into(),
            wait_ms,
        });
        let _ = self.ask(&Request::Resume { task: task.into() });
    }

    /// Hibernates a task: what the daemon said, or why not.
    ///
    /// # Errors
    /// The daemon's.
    ///
    /// # Panics
    /// At any other answer.
    pub fn hibernate(&self, task: &str) -> Result<String, Failure> {
        let wait_ms = Some(20_000);
        match self.ask(&Request::Hibernate {
            task: task.into(),
            wait_ms,
        }) {
            Answer::Ok(Payload::Done { message }) => Ok(message),
            Answer::Error(failure) => Err(failure),
            other => panic!("no such answer: {other:?}"),
        }
    }

    /// What the first card says is used, whoever asks.
    #[must_use]
    pub fn used(&self) -> u64 {
        let mut looker = self.run_plain(&[]);
        let info = looker.ok("info");
        // The looker's own context.
        info[1] - info[0] - self.context().0
    }

    /// Waits until no more is leased on the first card than at some moment before.
    pub fn wait_for_ledger(&self, what: &str, at_most: ebb_units::Bytes) {
        eventually(what, || {
            let snapshot = self.snapshot();
            let held = ledger_of(&snapshot);
            if held <= at_most {
                Ok(())
            } else {
                Err(format!("{held} of {at_most} leased: {snapshot:#?}"))
            }
        });
    }
}
