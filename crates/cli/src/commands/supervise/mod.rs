//! `ebb run --checkpoint --restart`: this process stays, has the program as its child, and starts it again.
//!
//! ```text
//!          start                    gives way: is saved, is ended
//! room ───────────> running ─────────────────────────────────────────────────────────> wait for room ──> room
//!                    │   │ cannot be saved: its memory is taken by copy, and it goes on        ^
//!                    │   └──> running                                                          │
//!                    │ ends for want of memory, or at all: if --restart says so, after a pause │
//!                    ├─────────────────────────────────────────────────────────────────────────┘
//!                    └─> over, or this process was told to end: its exit status is ours
//! ```
//! The task is this process's, so it lives on between two runs of the program. Signals that this process gets are the program's, and
//! one that ends programs ends the starting again as well. If this process is killed, the program is told to end. Without a daemon
//! the program goes on, and is told nothing until there is one again.
//!
//! What a program has worked is not thrown away because it could not be saved: it is ended only once it is.

mod link;
mod save;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use ebb_node::Signals;
use ebb_units::{Bytes, DeviceUuid, TaskId};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use crate::args::{CheckpointWay, Restart, SupervisedArgs};
use crate::client::Client;
use crate::error::{CliError, Result};
use link::{Link, Refusals, has_room};
use save::Saved;

/// The longest between two looks at the program while something is waited for.
const LOOK: Duration = Duration::from_millis(100);
/// How often the daemon is asked.
const ASK: Duration = Duration::from_millis(500);
/// From the polite signal to the other one.
const TERM_TIME: Duration = Duration::from_secs(10);
/// The longest pause before a program that ends at once is started again.
const BACK_OFF_MAX: Duration = Duration::from_secs(60);
/// A program that ends so soon after Ctrl-C was ended by it. One that goes on has its own use for it.
const INTERRUPTED: Duration = Duration::from_secs(30);
/// How long a daemon that does not answer is waited for before the program is started without it.
const DAEMON_TIME: Duration = Duration::from_secs(30);
/// What is passed on to the program, and the news that it ended.
const SIGNALS: [Signal; 7] = [
    Signal::TERM,
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::USR1,
    Signal::USR2,
    Signal::CHILD,
];

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

/// A command that runs `program` as one that ends with this process. Its arguments are to follow.
pub(crate) fn under_us(command: &mut Command, name: &OsStr, program: &Path) {
    let parent = std::process::id().to_string();
    command.args(["supervised", "--parent", &parent, "--name"]);
    command.arg(name).arg("--").arg(program);
}

/// The second half: ends with whoever started it, and becomes the program.
pub(crate) fn become_program(args: &SupervisedArgs) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|e| CliError::failed(format!("prctl: {e}")))?;
    // It may have died before it could be asked for the signal.
    if getppid().is_none_or(|parent| parent.as_raw_pid().unsigned_abs() != args.parent) {
        return Err(CliError::failed("whoever started it has gone"));
    }
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
    /// The command `ebb` itself.
    pub(crate) own: PathBuf,
}

/// Runs the program until it is over; never returns but for what is wrong before.
pub(crate) fn supervise(client: Client, plan: &Plan<'_>, start: impl Fn() -> Command) -> Result<()> {
    let signals = Signals::take(&SIGNALS.map(Signal::as_raw))
        .map_err(|e| CliError::failed(format!("signals cannot be read: {e}")))?;
    let mut this = Supervisor {
        link: Link::new(client),
        plan,
        signals,
        told_to_end: None,
        interrupted: None,
    };
    let mut pause = Duration::from_secs(1);
    loop {
        let before = this.link.news(plan.task, false).map_or(0, |news| news.denials);
        let began = Instant::now();
        let mut child = this
            .signals
            .give_back(&mut start())
            .spawn()
            .map_err(|e| CliError::failed(format!("cannot start the program: {e}")))?;
        let mut run = Run {
            refusals: Refusals::before(before),
            report: None,
            held: BTreeMap::new(),
            gave_way: false,
        };
        let status = this.watch(&mut child, &mut run)?;
        this.note_news(&mut run);
        let end = match status {
            _ if run.gave_way => End::GaveWay,
            status if status.success() => End::Done,
            _ if run.refusals.ago().is_some() => End::OutOfMemory,
            _ => End::Failed,
        };
        if end == End::OutOfMemory
            && let (Some(report), Some(ago)) = (&run.report, run.refusals.ago())
        {
            say(report);
            if ago > Duration::from_secs(60) {
                say(&format!(
                    "that was {} min before the program ended",
                    ago.as_secs() / 60
                ));
            }
        }
        if this.is_told_to_end() || !plan.restart.is_some_and(|restart| restart.applies(end)) {
            if end == End::GaveWay && !this.is_told_to_end() {
                say("the program gave way, and is not started again: `--restart on-preempt` would do that");
            }
            std::process::exit(code(status));
        }
        if end != End::GaveWay {
            if began.elapsed() > BACK_OFF_MAX {
                pause = Duration::from_secs(1);
            }
            say(&format!(
                "the program ended with {}, and is started again in {} s",
                in_words(status),
                pause.as_secs()
            ));
            this.rest(Instant::now() + pause);
            pause = (pause * 2).min(BACK_OFF_MAX);
        }
        this.wait_for_room(&run.held);
        say("the program is started again");
    }
}

/// One run of the program.
#[derive(Debug)]
struct Run {
    refusals: Refusals,
    report: Option<String>,
    held: BTreeMap<DeviceUuid, Bytes>,
    /// It was told to give way, and ended, or will.
    gave_way: bool,
}

/// The parent of the program.
#[derive(Debug)]
struct Supervisor<'a> {
    link: Link,
    plan: &'a Plan<'a>,
    signals: Signals,
    /// The signal that said so.
    told_to_end: Option<i32>,
    /// The last that a terminal sends, and that many programs have a use of their own for.
    interrupted: Option<(i32, Instant)>,
}

impl Supervisor<'_> {
    /// Until the program is over.
    fn watch(&mut self, child: &mut Child, run: &mut Run) -> Result<ExitStatus> {
        let mut asked = Instant::now();
        // Kept open: who hangs up wants no answer any more.
        let mut returns: Option<Client> = None;
        loop {
            if let Some(status) = ended(child)? {
                return Ok(status);
            }
            self.signals.wait(ASK.saturating_sub(asked.elapsed()));
            self.pass_on(child);
            if asked.elapsed() < ASK {
                continue;
            }
            asked = Instant::now();
            let Some(within) = self.note_news(run) else {
                continue;
            };
            // Whoever is to end for good is not saved to be started again.
            if self.is_told_to_end() {
                continue;
            }
            self.link.note_held(self.plan.task, &mut run.held);
            if let Some(CheckpointWay::Hibernate) = self.plan.checkpoint {
                say("giving way: the program is hibernated, and goes on when there is room");
                returns = save::hibernate(&self.link, self.plan.task, within).or(returns);
                continue;
            }
            let deadline = Instant::now() + within;
            if let Some(way) = self.plan.checkpoint {
                say(&format!(
                    "giving way: the program has {:.1} s to save itself",
                    within.as_secs_f64()
                ));
                if self.save(way, child, deadline)? == Saved::No {
                    // It may still be at it, and end by itself later.
                    run.gave_way = *way == CheckpointWay::Signal;
                    say(
                        "the program is not ended, so that nothing is lost: what it holds is copied to host memory, and comes back in its turn",
                    );
                    returns = save::evict(&self.link, self.plan.task, within).or(returns);
                    continue;
                }
            } else {
                say("giving way: the program is ended");
            }
            run.gave_way = true;
            return self.stop(child);
        }
    }

    /// Whether there is a way for the program to give way.
    fn gives_way(&self) -> bool {
        let restarts = self
            .plan
            .restart
            .is_some_and(|restart| restart.applies(End::GaveWay));
        self.plan.checkpoint.is_some() || restarts
    }

    /// How long the program has to give way, if it is to.
    fn note_news(&mut self, run: &mut Run) -> Option<Duration> {
        let news = self.link.news(self.plan.task, self.gives_way())?;
        run.refusals.note(news.denials);
        run.report = news.report.or(run.report.take());
        news.give_way_ms.map(Duration::from_millis)
    }

    /// Ends the program, politely first.
    fn stop(&mut self, child: &mut Child) -> Result<ExitStatus> {
        let deadline = Instant::now() + TERM_TIME;
        if ended(child)?.is_none() {
            signal(child, Signal::TERM);
        }
        while ended(child)?.is_none() && Instant::now() < deadline {
            self.signals.wait(LOOK);
            self.pass_on(child);
        }
        if ended(child)?.is_none() {
            let _ = child.kill();
        }
        child
            .wait()
            .map_err(|e| CliError::failed(format!("the program cannot be waited for: {e}")))
    }

    /// What this process is told is meant for the program.
    fn pass_on(&mut self, child: &Child) {
        while let Some(told) = self.signals.next() {
            let Some(number) = SIGNALS.into_iter().find(|s| s.as_raw() == told.number) else {
                continue;
            };
            match number {
                Signal::CHILD => continue,
                Signal::TERM | Signal::HUP => self.told_to_end = Some(told.number),
                Signal::INT | Signal::QUIT => self.interrupted = Some((told.number, Instant::now())),
                _ => {}
            }
            // A terminal has told the program itself.
            if !told.by_kernel {
                signal(child, number);
            }
        }
    }

    fn is_told_to_end(&self) -> bool {
        let interrupted = self.interrupted.is_some_and(|(_, at)| at.elapsed() < INTERRUPTED);
        self.told_to_end.is_some() || interrupted
    }

    /// Waits while there is no program. What ends programs ends this one.
    fn rest(&mut self, until: Instant) {
        while let Some(left) = until
            .checked_duration_since(Instant::now())
            .filter(|left| !left.is_zero())
        {
            while let Some(told) = self.signals.next() {
                if told.number != Signal::CHILD.as_raw() {
                    std::process::exit(128 + told.number);
                }
            }
            self.signals.wait(left);
        }
    }

    fn wait_for_room(&mut self, held: &BTreeMap<DeviceUuid, Bytes>) {
        let mut said = false;
        let mut silent = Instant::now();
        loop {
            let text = match self.link.list() {
                Some(snapshot) if has_room(&snapshot, held) => return,
                Some(_) => {
                    silent = Instant::now();
                    format!("{} waits for room to go on", self.plan.task)
                }
                None if silent.elapsed() > DAEMON_TIME => {
                    return say("no daemon answers: the program is started without it");
                }
                None => "no daemon answers; it is waited for".into(),
            };
            if !std::mem::replace(&mut said, true) {
                say(&text);
            }
            self.rest(Instant::now() + Duration::from_secs(1));
        }
    }
}

/// As a shell says it.
fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

fn ended(child: &mut Child) -> Result<Option<ExitStatus>> {
    child
        .try_wait()
        .map_err(|e| CliError::failed(format!("the program cannot be waited for: {e}")))
}

fn signal(child: &Child, signal: Signal) {
    // It is our child and was not waited for: the number is still its own. It may have ended by itself.
    let _ = kill_process(Pid::from_child(child), signal);
}

fn say(text: &str) {
    anstream::eprintln!("ebb run: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_again() {
        let ends = [End::Done, End::Failed, End::OutOfMemory, End::GaveWay];
        let applies = |restart: Restart| ends.map(|end| restart.applies(end));
        assert_eq!(applies(Restart::OnOom), [false, false, true, false]);
        assert_eq!(applies(Restart::OnPreempt), [false, false, false, true]);
        assert_eq!(applies(Restart::Always), [false, true, true, true]);
    }

    #[test]
    fn exit_statuses_are_as_a_shell_says_them() {
        assert_eq!(code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(code(ExitStatus::from_raw(9)), 137);
        assert_eq!(in_words(ExitStatus::from_raw(9)), "signal 9");
        assert_eq!(in_words(ExitStatus::from_raw(3 << 8)), "status 3");
    }
}
