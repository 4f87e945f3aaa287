//! To another card and back, beside a plain copy between the two cards in the same run.
//!
//! A program holds the memory, another one asks for so much that the first has to leave the card; the second card has room. What is timed is
//! the other program's allocation, and the first one's next call after the other has ended. Every word is written anew before and checked after.

use ebb_units::{Bytes, GRANULE};

use super::figure::Figure;
use super::handover::{await_idle, await_seen, await_that};
use super::server::{Checked, Held, PeerLink, Server, Took};
use super::{TASK, say, unsay};
use crate::demo::stage::Stage;
use crate::error::{CliError, Result};

/// The figures and how many words were wrong, or why there are none.
pub(super) type Measured = std::result::Result<(Vec<Figure>, u64), String>;

pub(super) fn peer(stage: &mut Stage, rounds: u32) -> Result<Measured> {
    let bytes = stage.bytes_per_job;
    let sample = bytes.0.min(2 << 30);
    say("measuring the link between the cards");
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let link: PeerLink = plain.ask(&format!("peer {sample} {rounds}"))?;
    if link.out.is_empty() {
        plain.end(&mut stage.guard)?;
        let why = match link.cards {
            1 => "the driver shows one card only".into(),
            n => format!("the first of the {n} cards does not reach the second"),
        };
        return Ok(Err(why));
    }
    // Room for one of the two and a quarter of the other: contexts, and what is under way. On a small (simulated) card a quarter is less
    // than those.
    let besides = Bytes(bytes.0 / 4).max(Bytes::mib(48));
    let ballast = stage
        .card
        .free
        .saturating_sub(bytes + besides)
        .round_down(GRANULE);
    if !ballast.is_zero() {
        let _: Held = plain.ask(&format!("hold {}", ballast.0))?;
        await_seen(stage, ballast)?;
    }
    let mut worker = Server::start(stage.server(Some(TASK))?, &mut stage.guard)?;
    let held: Held = worker.ask(&format!("hold {}", bytes.0))?;
    let (mut out, mut back, mut wrong) = (Vec::new(), Vec::new(), 0);
    for round in 0..=rounds {
        say(&format!("to the other card and back, round {round} of {rounds}"));
        let mut other = Server::start(stage.server(Some("other"))?, &mut stage.guard)?;
        let _: Took = other.ask("touch")?;
        let _: Took = worker.ask("rewrite")?;
        await_idle(stage, TASK)?;
        let before = stage.snapshot()?.totals;
        let took: Took = other.ask(&format!("take {}", bytes.0))?;
        let mut moved = Bytes::ZERO;
        await_that(stage, "has counted what left", |stage| {
            let now = stage.snapshot()?.totals;
            moved = now.out_bytes.saturating_sub(before.out_bytes);
            Ok(now.releases > before.releases)
        })?;
        let lodged = stage
            .snapshot()?
            .devices
            .iter()
            .map(|card| card.lodged)
            .sum::<Bytes>();
        if lodged.0 < moved.0 / 10 * 9 {
            return Err(CliError::failed(format!(
                "of {moved} that left the card {lodged} went to the other one"
            ))
            .with_fix("end what else runs on the other card; NVLink is needed between the two"));
        }
        other.end(&mut stage.guard)?;
        let touched: Took = worker.ask("touch")?;
        let checked: Checked = worker.ask("check")?;
        wrong += checked.wrong;
        if round > 0 {
            out.push(moved.0 as f64 / took.seconds);
            back.push(moved.0 as f64 / touched.seconds);
        }
    }
    worker.end(&mut stage.guard)?;
    plain.end(&mut stage.guard)?;
    unsay();
    let rates = |seconds: &[f64]| seconds.iter().map(|s| sample as f64 / s).collect::<Vec<f64>>();
    let figure = |what, samples, limits| {
        let mut figure = Figure::rates(what, held.held, "a plain copy between the cards", samples, limits);
        // Not measured in turn.
        figure.ratio = figure.ebb / figure.limit;
        figure
    };
    Ok(Ok((
        vec![
            figure("peer out", out, rates(&link.out)),
            figure("peer in", back, rates(&link.back)),
        ],
        wrong,
    )))
}
