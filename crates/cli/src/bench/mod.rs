//! `ebb bench`: what ebb costs and how fast memory moves, each figure beside the limit of the machine in the same run.
//!
//! A daemon of its own, a worker program that knows nothing of ebb, plain and under `ebb run`; as with the demo nothing
//! of it touches the user's daemons or stays. What is compared is measured in turn, so that a machine that changes its
//! pace does so for both.

mod clean;
mod compare;
mod crowd;
mod curve;
pub(crate) mod disk;
mod figure;
mod handover;
mod hibernate;
mod peer;
mod picture;
pub(crate) mod pool;
mod replicas;
mod server;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use ebb_node::HostMemory;
use ebb_protocol::control::Request;
use ebb_units::{Bytes, GRANULE};
use serde::Serialize;

use crate::args::{Bench, BenchArgs, BenchCommand};
use crate::demo::stage::{Card, Setup, Stage, spare_host_memory};
use crate::error::{CliError, Result};
use figure::{Figure, Phase};
use server::{Checked, Each, Held, Link, Server, Took};

/// The name of the task that is measured.
const TASK: &str = "bench";
/// How long the host arena may take to be there before measuring goes on without all of it.
const ARENA_PATIENCE: Duration = Duration::from_secs(180);
/// How long a pause may wait for the worker's work.
const PAUSE_MS: u64 = 30_000;
/// A program that was just brought back is owed a turn before it may be paused again (`turn_owed`, and how late its end is seen): that is no time
/// of the copying.
const TURN: Duration = Duration::from_millis(250);
/// The size of the allocation that is timed.
const ALLOCATION: Bytes = Bytes::mib(64);
/// Batches of launches, and allocations, of one measurement.
const CALLS: u32 = 40;

/// The whole result.
#[derive(Debug, Serialize)]
struct Report {
    gpu: String,
    card_bytes: u64,
    rounds: u32,
    figures: Vec<Figure>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    phases: Vec<Phase>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    others: Vec<compare::Other>,
    mismatches: u64,
}

/// `ebb bench`.
pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    match &args.command {
        Some(BenchCommand::Pool(args)) => return pool::pool(args),
        Some(BenchCommand::Disk(args)) => return disk::disk(args),
        None => {}
    }
    if let Some(picture) = &args.picture {
        picture::check(picture)?;
    }
    let wanted = |what: Bench| !args.curve && (args.what.is_empty() || args.what.contains(&what));
    let ring = args.ring;
    let mut stage = Stage::set_up_for(args.gpu, Setup { ring, linked: false }, |card, sim| {
        sizes(args, card, sim)
    })?;
    let mut report = Report {
        gpu: if stage.is_sim() {
            "sim".into()
        } else {
            stage.card.name.clone()
        },
        card_bytes: stage.card.total.0,
        rounds: args.rounds,
        figures: Vec::new(),
        phases: Vec::new(),
        others: Vec::new(),
        mismatches: 0,
    };
    if args.curve {
        let (figures, wrong) = curve::curve(&mut stage, args.rounds, args.within.map(Duration::from_secs))?;
        report.mismatches += wrong;
        report.figures.extend(figures);
    }
    if wanted(Bench::Release) || wanted(Bench::Restore) {
        let (figures, wrong) = moves(&mut stage, args.rounds)?;
        report.mismatches += wrong;
        let which = |figure: &Figure| {
            (figure.what == "release" && wanted(Bench::Release))
                || (figure.what == "restore" && wanted(Bench::Restore))
        };
        report.figures.extend(figures.into_iter().filter(which));
    }
    if wanted(Bench::Clean) {
        let (figures, wrong) = clean::clean(&mut stage, args.rounds)?;
        report.mismatches += wrong;
        report.figures.extend(figures);
    }
    if wanted(Bench::Handover) {
        let (figure, wrong) = handover::handover(&mut stage, args.rounds)?;
        report.mismatches += wrong;
        report.figures.push(figure);
    }
    if wanted(Bench::Replicas) {
        let (figures, wrong) = replicas::replicas(&mut stage, args.rounds)?;
        report.mismatches += wrong;
        report.figures.extend(figures);
    }
    if wanted(Bench::Launch) || wanted(Bench::Alloc) {
        calls(&mut stage, args.rounds, &wanted, &mut report.figures)?;
    }
    if wanted(Bench::Hibernate) {
        match hibernate::hibernate(&mut stage, args.rounds) {
            Ok((figures, phases, wrong)) => {
                report.figures.extend(figures);
                report.phases = phases;
                report.mismatches += wrong;
            }
            // Not every driver can, and then the others are measured all the same.
            Err(error) if args.what.is_empty() => {
                unsay();
                anstream::eprintln!("not measured: hibernate: {error}");
            }
            Err(error) => return Err(error),
        }
    }
    if wanted(Bench::Start) {
        match args.at_once {
            Some(count) => report
                .figures
                .extend(crowd::crowd(&mut stage, args.rounds, count)?),
            None => report.figures.push(start(&mut stage, args.rounds)?),
        }
    }
    if args.compare {
        report.others = compare::compare(&mut stage, args.rounds);
    }
    drop(stage);
    if wanted(Bench::Peer) {
        let setup = Setup { ring, linked: true };
        let mut stage = Stage::set_up_for(args.gpu, setup, |card, sim| sizes(args, card, sim))?;
        match peer::peer(&mut stage, args.rounds)? {
            Ok((figures, wrong)) => {
                report.figures.extend(figures);
                report.mismatches += wrong;
            }
            Err(why) => {
                unsay();
                anstream::eprintln!("NOT MEASURED: peer: {why}");
            }
        }
    }
    if args.json {
        let mut out = std::io::stdout();
        serde_json::to_writer(&mut out, &report)?;
        writeln!(out)?;
    } else {
        let mut out = anstream::stdout();
        writeln!(
            out,
            "{}, {}, medians of {}",
            report.gpu,
            Bytes(report.card_bytes),
            report.rounds
        )?;
        figure::write(&report.figures, &mut out)?;
        for phase in &report.phases {
            writeln!(out, "{}", phase.line())?;
        }
        if args.compare {
            compare::write(&report.others, &report.figures, &mut out)?;
        }
    }
    // Last: what was measured is told, whatever becomes of the file.
    if let Some(picture) = &args.picture {
        picture::write(&report, picture)?;
    }
    if report.mismatches > 0 {
        return Err(CliError::failed(format!(
            "{} words were not as written",
            report.mismatches
        )));
    }
    Ok(())
}

/// What the worker holds, and the host arena's budget.
fn sizes(args: &BenchArgs, card: &Card, sim: bool) -> Result<(Bytes, Bytes)> {
    let bytes = args
        .bytes
        .unwrap_or(if sim { Bytes::mib(128) } else { Bytes::gib(16) })
        .round_down(GRANULE);
    if bytes < Bytes::mib(16) {
        return Err(CliError::usage(
            "what is moved has to be 16 MiB at least",
            "raise --bytes",
        ));
    }
    if bytes > card.free {
        return Err(CliError::usage(
            format!(
                "{bytes} do not fit on {}, which has {} free",
                card.name, card.free
            ),
            "lower --bytes, or end what else runs on the card",
        ));
    }
    // A handover has the bytes of two programs, of which one is away; where the host has room, segments need not change hands
    // then.
    let two = args.what.is_empty() || args.what.contains(&Bench::Handover);
    let spare = spare_host_memory(card, sim, &HostMemory::read());
    let moved = if two && Bytes(bytes.0 / 4 * 9) + Bytes::mib(128) <= spare {
        bytes + bytes
    } else {
        bytes
    };
    // Room for the bytes, and for segments that are begun.
    let budget = (moved + Bytes(moved.0 / 8).max(Bytes::mib(64))).round_down(GRANULE);
    if budget > spare {
        return Err(CliError::usage(
            format!("moving {bytes} needs {budget} of host memory, and {spare} can be used"),
            format!(
                "lower --bytes to {}",
                Bytes(spare.0 / 5 * 4).round_down(GRANULE).to_quantity()
            ),
        ));
    }
    Ok((bytes, budget))
}

/// A line for a person who watches, gone when the next one comes.
fn say(text: &str) {
    let mut err = anstream::stderr();
    if std::io::stderr().is_terminal() {
        let _ = write!(err, "\r\x1b[2K\x1b[2m{text}\x1b[0m");
        let _ = err.flush();
    }
}

/// The line is not needed any more.
fn unsay() {
    let mut err = anstream::stderr();
    if std::io::stderr().is_terminal() {
        let _ = write!(err, "\r\x1b[2K");
        let _ = err.flush();
    }
}

/// Taking all of a program's memory, by the clock of whoever asks for it, and bringing it back, by the clock of the
/// program's next call. Every word is written anew before and checked after. Also how many were wrong.
fn moves(stage: &mut Stage, rounds: u32) -> Result<(Vec<Figure>, u64)> {
    let bytes = stage.bytes_per_job;
    // A copy of a gigabyte is long enough to tell the link's rate.
    let sample = bytes.0.min(1 << 30);
    say("measuring the link");
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let link: Link = plain.ask(&format!("link {sample} {rounds}"))?;
    plain.end(&mut stage.guard)?;
    let mut worker = Server::start(stage.server(Some(TASK))?, &mut stage.guard)?;
    let held: Held = worker.ask(&format!("hold {}", bytes.0))?;
    await_arena(stage, held.held)?;
    let (mut out, mut back, mut wrong) = (Vec::new(), Vec::new(), 0);
    for round in 0..=rounds {
        say(&format!("release and restore, round {round} of {rounds}"));
        let _: Took = worker.ask("rewrite")?;
        std::thread::sleep(TURN);
        let began = Instant::now();
        stage.ask(&Request::Pause {
            task: TASK.into(),
            wait_ms: Some(PAUSE_MS),
        })?;
        let took = began.elapsed().as_secs_f64();
        stage.ask(&Request::Resume { task: TASK.into() })?;
        let touched: Took = worker.ask("touch")?;
        let checked: Checked = worker.ask("check")?;
        wrong += checked.wrong;
        // The first round may find segments that are not registered yet.
        if round > 0 {
            out.push(took);
            back.push(touched.seconds);
        }
    }
    worker.end(&mut stage.guard)?;
    unsay();
    let rates = |seconds: &[f64]| seconds.iter().map(|s| sample as f64 / s).collect();
    Ok((
        vec![
            Figure::rate("release", held.held, "pinned copy out", &out, rates(&link.out)),
            Figure::rate("restore", held.held, "pinned copy in", &back, rates(&link.back)),
        ],
        wrong,
    ))
}

/// Takes all of a task's memory, and lets it go on when it likes.
fn release(stage: &mut Stage, task: &str) -> Result<()> {
    stage.ask(&Request::Pause {
        task: task.into(),
        wait_ms: Some(PAUSE_MS),
    })?;
    stage.ask(&Request::Resume { task: task.into() })?;
    Ok(())
}

/// Waits until the host memory for it is there, as it is for a program that has run for a while.
fn await_arena(stage: &mut Stage, bytes: u64) -> Result<()> {
    let began = Instant::now();
    loop {
        let arena = stage.snapshot()?.arena;
        if arena.lent.0 >= bytes || began.elapsed() > ARENA_PATIENCE {
            return Ok(());
        }
        say(&format!("host memory: {} of {}", arena.lent, Bytes(bytes)));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Launches and allocations, plain and under ebb in turn.
fn calls(
    stage: &mut Stage,
    rounds: u32,
    wanted: &impl Fn(Bench) -> bool,
    figures: &mut Vec<Figure>,
) -> Result<()> {
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let mut under = Server::start(stage.server(Some(TASK))?, &mut stage.guard)?;
    let cases = [
        (Bench::Launch, "launch", 0, format!("launch {CALLS}")),
        (
            Bench::Alloc,
            "alloc",
            ALLOCATION.0,
            format!("alloc {} {CALLS}", ALLOCATION.0),
        ),
    ];
    for (which, what, bytes, line) in cases {
        if !wanted(which) {
            continue;
        }
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            say(&format!("{what}, round {} of {rounds}", round + 1));
            let measure = |server: &mut Server| -> Result<f64> {
                let each: Each = server.ask(&line)?;
                Ok(figure::median(&each.each))
            };
            // Whoever goes second finds a warmer machine: that takes turns, too.
            let (a, b) = if round % 2 == 0 {
                let a = measure(&mut plain)?;
                (a, measure(&mut under)?)
            } else {
                let b = measure(&mut under)?;
                (measure(&mut plain)?, b)
            };
            theirs.push(a);
            ours.push(b);
        }
        figures.push(Figure::paired(what, bytes, "the same without ebb", ours, theirs));
    }
    plain.end(&mut stage.guard)?;
    under.end(&mut stage.guard)?;
    unsay();
    Ok(())
}

/// From the start of a program to the end of its first kernel.
fn start(stage: &mut Stage, rounds: u32) -> Result<Figure> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..2 * rounds {
        let under = (round % 2 == 0) == (round / 2 % 2 == 0);
        say(&format!("start, round {} of {rounds}", round / 2 + 1));
        let command = stage.server(under.then_some(TASK))?;
        let began = Instant::now();
        let mut server = Server::start(command, &mut stage.guard)?;
        let _: Took = server.ask("touch")?;
        let took = began.elapsed().as_secs_f64();
        server.end(&mut stage.guard)?;
        if under { &mut ours } else { &mut theirs }.push(took);
    }
    unsay();
    Ok(Figure::paired("start", 0, "the same without ebb", ours, theirs))
}
