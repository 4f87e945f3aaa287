//! Several programs with the same bytes, as replicas of one model have: how much host memory each takes when all are off the card, and how fast
//! one comes back from what it has in common with the others.

use std::time::{Duration, Instant};

use ebb_units::{Bytes, GRANULE};

use super::figure::Figure;
use super::server::{Checked, Held, Link, Server, Took};
use super::{TURN, await_arena, release, say, unsay};
use crate::demo::stage::Stage;
use crate::error::{CliError, Result};

/// How many.
const COUNT: u64 = 3;
/// The most that stays with a program of a segment of its own.
const SEGMENT: u64 = 16 << 20;
/// How long finding out what is equal may take, and how much longer for each gigabyte.
const PATIENCE: Duration = Duration::from_secs(30);
const EACH_GB: Duration = Duration::from_secs(2);

fn name(n: u64) -> String {
    format!("replica-{n}")
}

/// Also how many words were wrong.
pub(super) fn replicas(stage: &mut Stage, rounds: u32) -> Result<(Vec<Figure>, u64)> {
    let each = Bytes(stage.bytes_per_job.0 / COUNT).round_down(GRANULE);
    let sample = each.0.min(1 << 30);
    say("measuring the link");
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let link: Link = plain.ask(&format!("link {sample} {rounds}"))?;
    plain.end(&mut stage.guard)?;
    let mut workers = Vec::new();
    for n in 0..COUNT {
        let mut worker = Server::start(stage.server(Some(&name(n)))?, &mut stage.guard)?;
        let _: Held = worker.ask(&format!("hold {}", each.0))?;
        workers.push(worker);
    }
    await_arena(stage, each.0 * COUNT)?;
    for n in 0..COUNT {
        release(stage, &name(n))?;
    }
    // All but what is smaller than a block.
    let most = Bytes(each.0 / 10 * 9);
    await_common(stage, "nothing was found to be equal", each, |common, _| {
        common >= most
    })?;
    let (mut host, mut back, mut wrong) = (Vec::new(), Vec::new(), 0);
    for round in 0..=rounds {
        say(&format!("replicas, round {round} of {rounds}"));
        for worker in &mut workers {
            let touched: Took = worker.ask("touch")?;
            if round > 0 {
                back.push(touched.seconds);
            }
        }
        std::thread::sleep(TURN);
        for n in 0..COUNT {
            release(stage, &name(n))?;
        }
        // The room of their own goes back when it has turned out that nobody writes; a segment of it stays with each.
        let own = (each.0 / 10).max(SEGMENT) * COUNT;
        await_common(stage, "the room of their own stays", each, |common, held| {
            held.0 <= common.0 + own
        })?;
        if round > 0 {
            host.push(stage.snapshot()?.arena.held.0 as f64 / COUNT as f64);
        }
    }
    for worker in &mut workers {
        let checked: Checked = worker.ask("check")?;
        wrong += checked.wrong;
    }
    for worker in workers {
        worker.end(&mut stage.guard)?;
    }
    unsay();
    let alone = vec![each.0 as f64];
    let limits = link.back.iter().map(|s| sample as f64 / s).collect();
    Ok((
        vec![
            Figure::bytes(
                "replicas, host memory of each",
                each.0,
                "a copy of its own",
                host,
                alone,
            ),
            Figure::rate("replicas, restore", each.0, "pinned copy in", &back, limits),
        ],
        wrong,
    ))
}

/// Waits until what is in common and what is held in all are so.
fn await_common(
    stage: &mut Stage,
    otherwise: &str,
    each: Bytes,
    ready: impl Fn(Bytes, Bytes) -> bool,
) -> Result<()> {
    let gigabytes = u32::try_from((each.0 * COUNT) >> 30).unwrap_or(u32::MAX);
    let deadline = Instant::now() + PATIENCE + EACH_GB.saturating_mul(gigabytes);
    loop {
        let arena = stage.snapshot()?.arena;
        if ready(arena.common, arena.held) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(CliError::failed(format!(
                "{otherwise}: {} in common, {} held for {COUNT} times {each}",
                arena.common, arena.held
            )));
        }
        say(&format!("in common: {} of {each}", arena.common));
        std::thread::sleep(Duration::from_millis(50));
    }
}
