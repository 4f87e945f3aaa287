//! From one program to another on a card that has room for one: out of the first and into the second at the same time, both
//! ways of the link busy. What limits it is a copy both ways at once.
//!
//! A program without ebb takes what is too much of the card. Whoever has the memory writes all of it anew before it is taken, so
//! that all of it has to be copied, and is idle when the other one asks: what is measured is the move, not whose turn it is.

use std::time::{Duration, Instant};

use ebb_protocol::control::Totals;
use ebb_units::{Bytes, GRANULE};

use super::figure::Figure;
use super::server::{Checked, Held, Link, Server, Took};
use super::{await_arena, say, unsay};
use crate::demo::stage::Stage;
use crate::error::{CliError, Result};

const NAMES: [&str; 2] = ["first", "second"];
/// How long the daemon may take to see what is on the card, or that a program is idle.
const PATIENCE: Duration = Duration::from_secs(30);

/// Also how many words were wrong.
pub(super) fn handover(stage: &mut Stage, rounds: u32) -> Result<(Figure, u64)> {
    let bytes = stage.bytes_per_job;
    // The copies both ways need two places of this size.
    let sample = bytes.0.min(2 << 30) / 2;
    say("measuring the link");
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let link: Link = plain.ask(&format!("link {sample} {rounds}"))?;
    // What one needs stays free, and room for three contexts and for what is under way. What were free besides would come in without anything going out,
    // and that is no handover.
    let context = stage.card.total.saturating_sub(stage.card.free);
    let snapshot = stage.snapshot()?;
    let capacity = stage
        .card_in(&snapshot)
        .map_or(stage.card.free, |card| card.capacity);
    let besides = context + context + context + Bytes(bytes.0 / 32) + Bytes::mib(24);
    let ballast = capacity
        .min(stage.card.free)
        .saturating_sub(bytes + besides)
        .round_down(GRANULE);
    if !ballast.is_zero() {
        let _: Held = plain.ask(&format!("hold {}", ballast.0))?;
        await_seen(stage, ballast)?;
    }
    let mut programs = Vec::new();
    let mut held = 0;
    for name in NAMES {
        say("two programs, of which one fits");
        let mut program = Server::start(stage.server(Some(name))?, &mut stage.guard)?;
        let took: Held = program.ask(&format!("hold {}", bytes.0))?;
        held = took.held;
        programs.push(program);
    }
    await_arena(stage, 2 * held)?;
    let mut rates = Vec::new();
    for round in 0..=2 * rounds {
        say(&format!("handover {round} of {}", 2 * rounds));
        // The second one has it when it begins.
        let (to, from) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
        let _: Took = programs[from].ask("rewrite")?;
        await_idle(stage, NAMES[from])?;
        let before = stage.snapshot()?.totals;
        let took: Took = programs[to].ask("touch")?;
        let moved = await_moved(stage, &before)?;
        // In the first round segments are not registered yet.
        if round > 0 {
            rates.push(moved.0 as f64 / took.seconds);
        }
    }
    let mut wrong = 0;
    for mut program in programs {
        let checked: Checked = program.ask("check")?;
        wrong += checked.wrong;
        program.end(&mut stage.guard)?;
    }
    plain.end(&mut stage.guard)?;
    unsay();
    let limits = link.both.iter().map(|s| 2.0 * sample as f64 / s).collect();
    let against = "pinned copies both ways at once";
    let mut figure = Figure::rates("handover", 2 * held, against, rates, limits);
    // Not measured in turn.
    figure.ratio = figure.ebb / figure.limit;
    Ok((figure, wrong))
}

/// What was copied since then, both ways together: the card may have had room for a part of both programs, and that part is not moved.
fn await_moved(stage: &mut Stage, before: &Totals) -> Result<Bytes> {
    let mut moved = Bytes::ZERO;
    await_that(stage, "has counted what was moved", |stage| {
        let now = stage.snapshot()?.totals;
        let out = now.out_bytes.saturating_sub(before.out_bytes);
        let back = now.in_bytes.saturating_sub(before.in_bytes);
        moved = out.saturating_add(back);
        // Both words come when the moving is over, the way out's a moment later perhaps.
        Ok(now.restores > before.restores && now.releases > before.releases)
    })?;
    Ok(moved)
}

/// Waits until the daemon knows of what somebody else has on the card.
pub(super) fn await_seen(stage: &mut Stage, bytes: Bytes) -> Result<()> {
    await_that(stage, "sees what is on the card", |stage| {
        let snapshot = stage.snapshot()?;
        Ok(stage
            .card_in(&snapshot)
            .is_some_and(|card| card.unmanaged >= bytes))
    })
}

/// Waits until a program counts as idle.
pub(super) fn await_idle(stage: &mut Stage, name: &str) -> Result<()> {
    await_that(stage, "sees that a program is idle", |stage| {
        let snapshot = stage.snapshot()?;
        let task = snapshot.tasks.iter().find(|task| task.name == name);
        Ok(task.is_some_and(|task| task.processes.iter().all(|process| process.state == "idle")))
    })
}

pub(super) fn await_that(
    stage: &mut Stage,
    what: &str,
    mut ready: impl FnMut(&mut Stage) -> Result<bool>,
) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        if ready(stage)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(CliError::failed(format!(
        "waited in vain until the daemon {what}"
    )))
}
