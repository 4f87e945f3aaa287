//! Taking memory that has not changed since it came back: told by a hash on the GPU, dropped without a copy. What limits it is
//! how fast the card reads its own memory; a copy within the card, read and written, is the measure of that.

use std::time::Instant;

use super::figure::{Figure, median};
use super::server::{Checked, Each, Held, Server, Took};
use super::{TURN, await_arena, release, say, unsay};
use crate::demo::stage::Stage;
use crate::error::Result;

const TASK: &str = "clean";

/// Also how many words were wrong.
pub(super) fn clean(stage: &mut Stage, rounds: u32) -> Result<(Vec<Figure>, u64)> {
    let bytes = stage.bytes_per_job;
    let sample = bytes.0.min(4 << 30) / 4;
    say("measuring the card's memory");
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let card: Each = plain.ask(&format!("card {sample} {rounds}"))?;
    plain.end(&mut stage.guard)?;
    let mut worker = Server::start(stage.server(Some(TASK))?, &mut stage.guard)?;
    let held: Held = worker.ask(&format!("hold {}", bytes.0))?;
    await_arena(stage, held.held)?;
    let mut seconds = Vec::new();
    // The first time everything is copied.
    release(stage, TASK)?;
    for round in 0..=rounds {
        say(&format!("release of unchanged memory, round {round} of {rounds}"));
        let _: Took = worker.ask("touch")?;
        std::thread::sleep(TURN);
        let began = Instant::now();
        release(stage, TASK)?;
        if round > 0 {
            seconds.push(began.elapsed().as_secs_f64());
        }
    }
    let checked: Checked = worker.ask("check")?;
    worker.end(&mut stage.guard)?;
    unsay();
    let limits: Vec<f64> = card.each.iter().map(|s| 2.0 * sample as f64 / s).collect();
    let times = limits.iter().map(|rate| held.held as f64 / rate).collect();
    let against = "the card's memory, read and written by a copy";
    let mut time = Figure::paired("clean, time", held.held, against, seconds.clone(), times);
    time.ratio = median(&time.samples) / median(&time.limits);
    Ok((
        vec![Figure::rate("clean", held.held, against, &seconds, limits), time],
        checked.wrong,
    ))
}
