//! Runs behaviours, each run in a process of its own with a time limit, and judges them.

use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::batch;
use crate::behaviour::Behaviour;
use crate::child::beside;
use crate::ending::bound_to_us;
use crate::modes::Mode;
use crate::world::World;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// It saw everything.
    Done,
    /// It cannot be looked at here, and why.
    Skipped(String),
    /// It could not go on, and why.
    Stopped(String),
    /// Its process died of this.
    Died(String),
    /// It was not finished within the limit.
    Hung,
}

/// One run of a behaviour.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Run {
    pub end: End,
    pub lines: Vec<String>,
    /// Evictions that took something, pauses done, pauses refused.
    pub evictions: Option<(u64, u64, u64)>,
    pub millis: u64,
}

/// What a run says of the tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Passed,
    Skipped(String),
    Failed(String),
    /// The tool has no such way to run.
    NotApplicable,
}

/// One way of running a behaviour, what it saw (if it was run), and what that says.
pub(crate) type InMode = (Mode, Option<Run>, Verdict);

/// A behaviour in all ways.
#[derive(Debug)]
pub(crate) struct Result {
    pub behaviour: &'static Behaviour,
    pub runs: Vec<InMode>,
    /// In processes that other behaviours were run in as well.
    pub together: bool,
}

impl Result {
    pub(crate) fn run(&self, mode: Mode) -> Option<&Run> {
        self.runs
            .iter()
            .find(|(m, _, _)| *m == mode)
            .and_then(|(_, run, _)| run.as_ref())
    }
}

/// How to run.
#[derive(Debug)]
pub(crate) struct Settings {
    pub modes: Vec<Mode>,
    pub jobs: usize,
    /// Behaviours in one process, where that is harmless.
    pub batch: usize,
    pub limit: Duration,
    pub program: PathBuf,
}

/// Runs them all: several at once, then those that want to be alone.
pub(crate) fn run_all(
    behaviours: &[&'static Behaviour],
    world: &World,
    settings: &Settings,
    progress: impl Fn(&Result) + Sync,
) -> Vec<Result> {
    let results: Mutex<Vec<(usize, Result)>> = Mutex::new(Vec::new());
    for (alone, jobs) in [(false, settings.jobs), (true, 1)] {
        let wanted = behaviours.iter().copied().enumerate();
        // Of few behaviours fewer share a process, so that all places have something to do.
        let most = settings.batch.min(behaviours.len().div_ceil(jobs.max(1)));
        let units = batch::units(wanted.filter(|(_, behaviour)| behaviour.alone == alone), most);
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..jobs.max(1) {
                scope.spawn(|| {
                    while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let mut together = batch::in_all_modes(unit, world, settings);
                        for (at, behaviour) in unit {
                            let result = together
                                .remove(behaviour.name)
                                .unwrap_or_else(|| in_all_modes(behaviour, world, settings));
                            progress(&result);
                            if let Ok(mut results) = results.lock() {
                                results.push((*at, result));
                            }
                        }
                    }
                });
            }
        });
    }
    let mut results = results.into_inner().unwrap_or_default();
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

fn in_all_modes(behaviour: &'static Behaviour, world: &World, settings: &Settings) -> Result {
    let mut runs: Vec<InMode> = Vec::new();
    for mode in &settings.modes {
        if world.command(*mode, &settings.program).is_none() {
            runs.push((*mode, None, Verdict::NotApplicable));
            continue;
        }
        let plain = runs.first().and_then(|(_, run, _)| run.as_ref());
        let (run, verdict) = match plain.map(|run| &run.end) {
            Some(End::Skipped(why)) => (None, Verdict::Skipped(why.clone())),
            Some(End::Done) | None => match one(behaviour, *mode, world, settings) {
                None => (None, Verdict::NotApplicable),
                Some(run) => {
                    let verdict = judge(behaviour, &run, plain);
                    (Some(run), verdict)
                }
            },
            Some(_) => (
                None,
                Verdict::Skipped("there is no plain run to compare with".into()),
            ),
        };
        runs.push((*mode, run, verdict));
    }
    Result {
        behaviour,
        runs,
        together: false,
    }
}

/// The plain run is held to what is known of the driver, every other one to the plain run.
pub(crate) fn judge(behaviour: &Behaviour, run: &Run, plain: Option<&Run>) -> Verdict {
    match &run.end {
        End::Done => {}
        End::Skipped(why) if plain.is_none() => return Verdict::Skipped(why.clone()),
        End::Skipped(why) => return Verdict::Failed(format!("skipped, unlike plain: {why}")),
        End::Stopped(why) => return Verdict::Failed(why.clone()),
        End::Died(how) => return Verdict::Failed(format!("its process died: {how}")),
        End::Hung => return Verdict::Failed("it hung".into()),
    }
    match (plain, behaviour.fact) {
        (Some(plain), _) if plain.lines != run.lines => Verdict::Failed("unlike plain".into()),
        (None, Some(fact)) if run.lines != fact => {
            Verdict::Failed("unlike what is known of the driver".into())
        }
        _ => Verdict::Passed,
    }
}

fn one(behaviour: &Behaviour, mode: Mode, world: &World, settings: &Settings) -> Option<Run> {
    several(&[behaviour], mode, settings.limit, world, settings)?.pop()
}

/// Runs behaviours one after the other in one process. A run that it did not come to is of a dead program.
pub(crate) fn several(
    behaviours: &[&Behaviour],
    mode: Mode,
    limit: Duration,
    world: &World,
    settings: &Settings,
) -> Option<Vec<Run>> {
    let names: Vec<&str> = behaviours.iter().map(|behaviour| behaviour.name).collect();
    let out = world.out().join(format!("{}.{}", names.first()?, mode.name()));
    let errors = out.with_extension(format!("{}.stderr", mode.name()));
    let mut command = world.command(mode, &settings.program)?;
    command.args(["--behave", &names.join(","), "--out"]).arg(&out);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.stderr(File::create(&errors).map_or_else(|_| Stdio::null(), Stdio::from));
    // A group of its own: what it leaves behind is ended with it.
    bound_to_us(command.process_group(0));
    let began = Instant::now();
    let ended = match command.spawn() {
        Ok(child) => await_end(child, began + limit),
        Err(error) => Some(format!("it does not start: {error}")),
    };
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let mut runs = Vec::new();
    for name in &names {
        let file = beside(&out, name);
        let mut run = read(&file);
        run.millis = millis / names.len() as u64;
        match &ended {
            None => run.end = End::Hung,
            Some(how) if run.end == End::Died(String::new()) => {
                let said = std::fs::read_to_string(&errors).unwrap_or_default();
                run.end = End::Died(format!("{how} {}", said.lines().next().unwrap_or_default()));
            }
            // What it saw is complete, but it did not end well.
            Some(how) if !how.is_empty() && run.end == End::Done => run.end = End::Died(how.clone()),
            Some(_) => {}
        }
        let _ = std::fs::remove_file(&file);
        runs.push(run);
    }
    let _ = std::fs::remove_file(&errors);
    Some(runs)
}

/// Waits for the end of a process; `None` if it had to be killed. An empty text is a good end.
fn await_end(mut child: Child, deadline: Instant) -> Option<String> {
    let group = i32::try_from(child.id()).unwrap_or(i32::MAX);
    let mut ended = false;
    while !ended && Instant::now() < deadline {
        ended = zombie(child.id());
        if !ended {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    // SAFETY: no memory is involved. The group is our child's: it is not waited for yet, so its number is not reused.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let status = child.wait().ok()?;
    if !ended {
        return None;
    }
    Some(match (status.code(), status.signal()) {
        (Some(0), _) => String::new(),
        (_, Some(signal)) => format!("signal {signal}"),
        _ => format!("{status}"),
    })
}

/// Whether a child has ended, without taking its status.
fn zombie(pid: u32) -> bool {
    // SAFETY: zero bytes are a valid siginfo_t.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a place for the answer, and the process is our child.
    let code = unsafe { libc::waitid(libc::P_PID, pid, &mut info, flags) };
    // SAFETY: waitid filled the fields that it defines; zero if nobody has ended.
    code != 0 || unsafe { info.si_pid() } != 0
}

fn read(path: &Path) -> Run {
    let mut run = Run {
        end: End::Died(String::new()),
        lines: Vec::new(),
        evictions: None,
        millis: 0,
    };
    let mut why: Option<End> = None;
    for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
        match line.split_at_checked(1) {
            Some(("=", line)) => run.lines.push(line.to_owned()),
            Some(("?", reason)) => why = Some(End::Skipped(reason.to_owned())),
            Some(("!", reason)) => why = Some(End::Stopped(reason.to_owned())),
            Some(("#", counts)) => {
                let mut counts = counts.split(' ').map(|word| word.parse().unwrap_or(0));
                let mut next = || counts.next().unwrap_or(0);
                let (a, b, c) = run.evictions.unwrap_or_default();
                run.evictions = Some((a + next(), b + next(), c + next()));
            }
            Some((".", _)) => run.end = why.take().unwrap_or(End::Done),
            _ => {}
        }
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Driver;
    use crate::observe::Test;

    fn read_text(text: &str) -> Run {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), text).expect("written");
        read(file.path())
    }

    const NOTHING: Behaviour = Behaviour::new("a.b", "c", |_: &mut Test, _: Driver| ()).fact(&["x: 1"]);

    #[test]
    fn a_file_without_an_end_is_of_a_dead_program() {
        assert_eq!(read_text("=a: 1\n").end, End::Died(String::new()));
        let done = read_text("=a: 1\n#1 2 3\n#1 0 0\n.\n");
        assert_eq!((done.end, done.evictions), (End::Done, Some((2, 2, 3))));
        assert_eq!(done.lines, ["a: 1"]);
        assert_eq!(read_text("?no\n.\n").end, End::Skipped("no".into()));
        assert_eq!(read_text("!bad\n.\n").end, End::Stopped("bad".into()));
    }

    #[test]
    fn plain_is_held_to_the_fact_and_the_rest_to_plain() {
        let right = read_text("=x: 1\n.\n");
        let wrong = read_text("=x: 2\n.\n");
        assert_eq!(judge(&NOTHING, &right, None), Verdict::Passed);
        assert!(matches!(judge(&NOTHING, &wrong, None), Verdict::Failed(_)));
        assert_eq!(judge(&NOTHING, &wrong, Some(&wrong)), Verdict::Passed);
        assert!(matches!(
            judge(&NOTHING, &wrong, Some(&right)),
            Verdict::Failed(_)
        ));
        let skipped = read_text("?no\n.\n");
        assert!(matches!(judge(&NOTHING, &skipped, None), Verdict::Skipped(_)));
        assert!(matches!(
            judge(&NOTHING, &skipped, Some(&right)),
            Verdict::Failed(_)
        ));
    }
}
