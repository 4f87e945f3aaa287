//! `ebb demo`: two jobs that do not fit together finish together.
//!
//! First without ebb: the second job fails for memory, which is measured and not assumed. Then both under ebb, by
//! `ebb run`, with a daemon of the demo's own. Nothing of it touches daemons, settings or folders of the user, and
//! nothing of it stays ([`guard`]).

pub(crate) mod guard;
mod job;
mod show;
pub(crate) mod stage;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ebb_protocol::control::{Snapshot, Totals};
use ebb_units::Bytes;

use crate::args::DemoArgs;
use crate::error::{CliError, Result};
use crate::table::{BOLD, DIM, RESET, per_second};
use job::{Event, Job, News};
use show::{Details, Live, Outcome};
use stage::Stage;

/// The program that the demo runs.
pub(crate) const WORKER: &str = "ebb-demo-worker";
/// Environment: that program, instead of looking for it.
const ENV_WORKER: &str = "EBB_DEMO_WORKER";
/// How many jobs are run together.
const JOBS: usize = 2;
/// Steps of a job that is only there to hold memory.
const MANY: u32 = 1_000_000;
/// No job said anything for so long: it hangs. Generous: a step on a slow machine, a turn of the other job.
const SILENCE: Duration = Duration::from_secs(300);

/// `ebb demo`.
pub(crate) fn demo(args: &DemoArgs) -> Result<()> {
    if let Some(folder) = &args.guard {
        guard::stand(folder, std::io::stdin().lock());
        return Ok(());
    }
    let mut live = Live::new();
    let mut stage = Stage::set_up(args)?;
    let (outcome, details) = play(&mut stage, &mut live, args)?;
    live.finish();
    if args.json {
        outcome.write(&mut anstream::stderr(), &details)?;
        let mut out = std::io::stdout();
        serde_json::to_writer(&mut out, &outcome)?;
        writeln!(out)?;
    } else {
        outcome.write(&mut anstream::stdout(), &details)?;
    }
    let faults = outcome.faults(&details);
    if faults.is_empty() {
        Ok(())
    } else {
        Err(CliError::failed(faults.join("; ")))
    }
}

/// The name of a job, which is also its task's.
fn name_of(job: usize) -> &'static str {
    ["job a", "job b"][job]
}

/// The worker program: as named, beside the command (a build folder), or as installed.
pub(crate) fn worker_path() -> Result<PathBuf> {
    let exe = std::env::current_exe()
        .map_err(|error| CliError::failed(format!("cannot find my own program: {error}")))?;
    let folder = exe.parent().unwrap_or(Path::new("/"));
    let places = match std::env::var_os(ENV_WORKER) {
        Some(named) => vec![PathBuf::from(named)],
        None => [
            Some(folder.join(WORKER)),
            folder
                .parent()
                .map(|prefix| crate::library::installed(prefix).join(WORKER)),
        ]
        .into_iter()
        .flatten()
        .collect(),
    };
    places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        CliError::usage(
            format!(
                "{WORKER} is not there; looked at {}",
                places
                    .iter()
                    .map(|p| p.display().to_string())
                    .collect::<Vec<_>>()
                    .join(" and ")
            ),
            format!("build it with `cargo xtask layout`, or name it in {ENV_WORKER}"),
        )
    })
}

fn play(stage: &mut Stage, live: &mut Live, args: &DemoArgs) -> Result<(Outcome, Details)> {
    let (job, card) = (stage.bytes_per_job, stage.card.clone());
    let kind = if stage.is_sim() {
        "simulated card"
    } else {
        card.name.as_str()
    };
    live.say(&format!(
        "{BOLD}{kind}, {}; two jobs that hold {job} each{RESET}",
        card.total
    ));
    let (oom_without_ebb, step_seconds) = without_ebb(stage, live)?;
    stage.await_free_card()?;
    let steps = args
        .steps
        .unwrap_or_else(|| enough_steps(step_seconds, job, stage.link_bytes_per_s()));
    live.say(&format!("{BOLD}with ebb{RESET}: both jobs, {steps} steps each"));
    let run = with_ebb(stage, live, steps)?;
    let (totals, peak) = (&run.totals, run.peak);
    let rate = |bytes: Bytes, nanos| per_second(bytes.0, nanos) as u64;
    let outcome = Outcome {
        gpu: if stage.is_sim() { "sim".into() } else { card.name },
        jobs: JOBS as u32,
        card_bytes: card.total.0,
        held_bytes: run.jobs.iter().map(|job| job.held.0).sum(),
        finished: run.jobs.iter().filter(|job| job.finished).count() as u32,
        mismatches: run.jobs.iter().map(|job| job.mismatches).sum(),
        oom_without_ebb,
        releases: totals.releases,
        out_bytes_per_s: rate(totals.out_bytes, totals.out_nanos),
        in_bytes_per_s: rate(totals.in_bytes, totals.in_nanos),
    };
    let details = Details {
        jobs: run
            .jobs
            .iter()
            .map(|job| (job.seconds, job.held, job.mismatches))
            .collect(),
        moved: (totals.out_bytes, totals.in_bytes),
        peak,
    };
    Ok((outcome, details))
}

/// So many steps that each job works for several turns: turns get longer as more has to be copied.
fn enough_steps(step_seconds: f64, job: Bytes, link_bytes_per_s: f64) -> u32 {
    let copy_seconds = job.0 as f64 / link_bytes_per_s;
    let target = (copy_seconds * 25.0).max(6.0);
    (target / step_seconds.max(1e-4)).ceil().clamp(8.0, 100_000.0) as u32
}

/// The first job holds its memory; the second tries to. Whether it failed for memory, and how long a step takes.
fn without_ebb(stage: &mut Stage, live: &Live) -> Result<(bool, f64)> {
    let (news_tx, news_rx) = channel();
    let command = stage.plain_job(MANY, 1);
    let mut first = Job::start(command, 0, news_tx.clone(), &mut stage.guard)?;
    let mut step_seconds = f64::MAX;
    // The first step may find a cold card: the faster of two counts.
    loop {
        match next(&news_rx)? {
            News::Said(_, Event::Step { step, seconds, .. }) => {
                step_seconds = step_seconds.min(seconds);
                if step >= 2 {
                    break;
                }
            }
            News::Said(..) => {}
            News::Ended(_) => return Err(died(&mut first, stage, "without ebb, the first job")),
        }
    }
    let command = stage.plain_job(1, 2);
    let mut second = Job::start(command, 1, news_tx, &mut stage.guard)?;
    let mut fits = false;
    loop {
        match next(&news_rx)? {
            News::Said(1, _) => fits = true,
            News::Ended(1) => break,
            News::Ended(_) => return Err(died(&mut first, stage, "without ebb, the first job")),
            News::Said(..) => {}
        }
    }
    let (status, said) = second.finish(&mut stage.guard)?;
    first.stop(&mut stage.guard)?;
    let failed = status.code() == Some(job::OUT_OF_MEMORY) && !fits;
    if failed {
        live.say(&format!(
            "{BOLD}without ebb{RESET}: job a holds its memory, job b fails {DIM}({}){RESET}",
            said.trim_start_matches("error: ")
        ));
    } else {
        live.say(&format!(
            "{BOLD}without ebb{RESET}: job b ended with {status} {DIM}({said}){RESET}"
        ));
    }
    Ok((failed, step_seconds))
}

/// How a job under ebb went.
#[derive(Debug, Default, Clone)]
struct JobResult {
    held: Bytes,
    mismatches: u64,
    seconds: f64,
    done: bool,
    ended: bool,
    finished: bool,
}

/// How the run under ebb went.
#[derive(Debug)]
struct Run {
    jobs: Vec<JobResult>,
    totals: Totals,
    peak: Bytes,
}

/// Both jobs under ebb: the second starts when the first holds its memory.
fn with_ebb(stage: &mut Stage, live: &mut Live, steps: u32) -> Result<Run> {
    live.begin(JOBS, steps);
    let (news_tx, news_rx) = channel();
    let mut results = vec![JobResult::default(); JOBS];
    let command = stage.ebb_job(name_of(0), steps, 3)?;
    let mut jobs = vec![Job::start(command, 0, news_tx.clone(), &mut stage.guard)?];
    let mut last_news = Instant::now();
    let mut last_listing = Instant::now();
    while results.iter().any(|result| !result.ended) {
        match news_rx.recv_timeout(Duration::from_millis(100)) {
            Ok(news) => {
                last_news = Instant::now();
                hear(&news, &mut results, live, steps);
                if let News::Ended(number) = news {
                    end(&mut jobs[number], number, &mut results[number], stage, live)?;
                }
                if jobs.len() < JOBS && (!results[0].held.is_zero() || results[0].ended) {
                    let number = jobs.len();
                    let command = stage.ebb_job(name_of(number), steps, 4)?;
                    jobs.push(Job::start(command, number, news_tx.clone(), &mut stage.guard)?);
                }
            }
            Err(RecvTimeoutError::Timeout) if last_news.elapsed() > SILENCE => {
                let listing = serde_json::to_string(&stage.snapshot()?)?;
                let pids: Vec<String> = jobs.iter().map(|job| job.pid().to_string()).collect();
                return Err(CliError::failed(format!(
                    "no job (pids {}) got on for {} s; the daemon shows {listing} and wrote:\n{}",
                    pids.join(", "),
                    SILENCE.as_secs(),
                    stage.daemon_log()
                )));
            }
            Err(_) => {}
        }
        if last_listing.elapsed() >= Duration::from_millis(100) {
            last_listing = Instant::now();
            let snapshot = stage.snapshot()?;
            live.listing(&snapshot, stage.card.total);
        }
    }
    let snapshot: Snapshot = stage.snapshot()?;
    let peak = stage.card_in(&snapshot).map(|card| card.peak).unwrap_or_default();
    Ok(Run {
        jobs: results,
        totals: snapshot.totals,
        peak,
    })
}

fn hear(news: &News, results: &mut [JobResult], live: &mut Live, steps: u32) {
    let News::Said(number, event) = news else { return };
    let result = &mut results[*number];
    match event {
        Event::Holding { bytes } => result.held = Bytes(*bytes),
        Event::Step { step, mismatches, .. } => {
            result.mismatches += mismatches;
            live.step(*number, *step, steps);
        }
        Event::Done { mismatches, seconds } => {
            // The last check is in this sum and in no step.
            result.mismatches = *mismatches;
            result.seconds = *seconds;
            result.done = true;
        }
    }
}

fn end(job: &mut Job, number: usize, result: &mut JobResult, stage: &mut Stage, live: &Live) -> Result<()> {
    let (status, said) = job.finish(&mut stage.guard)?;
    result.ended = true;
    result.finished = status.success() && result.done;
    if result.finished {
        live.end(number, &format!("finished in {:.1} s", result.seconds));
        return Ok(());
    }
    live.end(number, &format!("ended with {status}: {said}"));
    let log = stage.daemon_log();
    if !log.is_empty() {
        live.say(&format!("{DIM}the daemon wrote:\n{log}{RESET}"));
    }
    Ok(())
}

fn next(news_rx: &Receiver<News>) -> Result<News> {
    news_rx
        .recv_timeout(SILENCE)
        .map_err(|_| CliError::failed(format!("a job said nothing for {} s", SILENCE.as_secs())))
}

fn died(job: &mut Job, stage: &mut Stage, which: &str) -> CliError {
    match job.finish(&mut stage.guard) {
        Ok((status, said)) => CliError::failed(format!("{which} ended with {status}: {said}")),
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_works_for_several_turns_whatever_the_card() {
        // 384 MiB in steps of 0.2 s; 105 GiB in steps of 55 ms.
        assert_eq!(enough_steps(0.2, Bytes::mib(384), 2e9), 30);
        assert_eq!(enough_steps(0.055, Bytes::gib(105), 50e9), 1025);
        assert_eq!(enough_steps(100.0, Bytes::mib(384), 2e9), 8);
    }
}
