//! Many programs that start at the same moment, plain and under ebb in turn: how much later the last of them has done its first kernel and
//! ended, and how much later each.
//!
//! A program that fails, under ebb or without, fails the measurement: late is a figure, wrong is not.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::TASK;
use super::figure::{Figure, median};
use crate::demo::stage::Stage;
use crate::error::{CliError, Result};

/// How long the whole crowd may take, and how much more for each of it.
const PATIENCE: Duration = Duration::from_secs(60);
const EACH: Duration = Duration::from_secs(2);

/// What one round came to, in seconds.
struct Round {
    /// From the first start to the last end.
    all: f64,
    /// The median of all, each from its own start to its own end.
    each: f64,
}

/// What is known of a program that has ended: its seconds, or what went wrong.
type Ended = (u32, std::result::Result<f64, String>);

/// Starts `count` programs at once, `rounds` times each way.
pub(super) fn crowd(stage: &mut Stage, rounds: u32, count: u32) -> Result<Vec<Figure>> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..2 * rounds {
        let under = (round % 2 == 0) == (round / 2 % 2 == 0);
        let how = if under { "under ebb" } else { "without ebb" };
        super::say(&format!(
            "{count} programs at once {how}, round {} of {rounds}",
            round / 2 + 1
        ));
        let took = one_round(stage, under, count, how)?;
        if under { &mut ours } else { &mut theirs }.push(took);
    }
    super::unsay();
    let of = |rounds: &[Round], which: fn(&Round) -> f64| rounds.iter().map(which).collect();
    let figure = |what, which: fn(&Round) -> f64| {
        Figure::paired(
            what,
            0,
            "the same without ebb",
            of(&ours, which),
            of(&theirs, which),
        )
    };
    Ok(vec![
        figure("start of all", |round| round.all),
        figure("start of each", |round| round.each),
    ])
}

fn one_round(stage: &mut Stage, under: bool, count: u32, how: &str) -> Result<Round> {
    let (ended_tx, ended) = channel();
    let began = Instant::now();
    let mut running = Vec::new();
    for number in 0..count {
        let name = format!("{TASK}-{number}");
        let mut command = stage.server(under.then_some(name.as_str()))?;
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .process_group(0);
        let started = Instant::now();
        let mut child = command
            .spawn()
            .map_err(|error| CliError::failed(format!("cannot start a worker: {error}")))?;
        stage.guard.watch(child.id());
        running.push(child.id());
        if let Some(mut orders) = child.stdin.take() {
            // One that ends before it reads this says so by its status.
            let _ = orders.write_all(b"touch\n");
        }
        let said = child.stdout.take();
        let ended_tx = ended_tx.clone();
        std::thread::spawn(move || {
            let said = answer(said);
            let status = child.wait();
            let took = started.elapsed().as_secs_f64();
            let result = match status {
                Ok(status) if status.success() && said.contains("\"seconds\"") => Ok(took),
                Ok(status) => Err(format!("{status}, `{}`", said.trim())),
                Err(error) => Err(error.to_string()),
            };
            let _ = ended_tx.send((number, result));
        });
    }
    drop(ended_tx);
    let each = gather(&ended, count, began + PATIENCE + EACH * count, how)?;
    let all = began.elapsed().as_secs_f64();
    for pid in running {
        stage.guard.forget(pid);
    }
    Ok(Round {
        all,
        each: median(&each),
    })
}

/// Everything that a program says.
fn answer(from: Option<ChildStdout>) -> String {
    let mut text = String::new();
    if let Some(mut from) = from {
        let _ = from.read_to_string(&mut text);
    }
    text
}

/// Waits for all of them. Those that do not end in time are the guard's to end, with the stage.
fn gather(ended: &Receiver<Ended>, count: u32, deadline: Instant, how: &str) -> Result<Vec<f64>> {
    let (mut each, mut failed) = (Vec::new(), Vec::new());
    for waiting in (1..=count).rev() {
        match ended.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((_, Ok(took))) => each.push(took),
            Ok((number, Err(why))) => failed.push(format!("number {number}: {why}")),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                return Err(CliError::failed(format!(
                    "{waiting} of {count} programs {how} did not end in time"
                )));
            }
        }
    }
    match failed.first() {
        None => Ok(each),
        Some(first) => Err(CliError::failed(format!(
            "{} of {count} programs {how} failed; {first}",
            failed.len()
        ))
        .with_fix("lower --at-once, if the card has no room for so many contexts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_waited_for_and_failures_are_told() {
        let (tx, rx) = channel();
        let soon = Instant::now() + Duration::from_secs(60);
        for number in 0..3 {
            tx.send((number, Ok(f64::from(number)))).unwrap();
        }
        assert_eq!(gather(&rx, 3, soon, "x").unwrap(), [0.0, 1.0, 2.0]);
        tx.send((0, Ok(1.0))).unwrap();
        tx.send((1, Err("exit status: 3, ``".into()))).unwrap();
        let told = gather(&rx, 2, soon, "under ebb").unwrap_err().to_string();
        assert!(
            told.contains("1 of 2 programs under ebb failed") && told.contains("number 1: exit status: 3"),
            "{told}"
        );
        let told = gather(&rx, 2, Instant::now(), "x").unwrap_err().to_string();
        assert!(told.contains("2 of 2"), "{told}");
    }
}
