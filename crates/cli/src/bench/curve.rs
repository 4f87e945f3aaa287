//! Whether the cost of a byte stays the same: release and restore of more and more, and of the same in more and more programs.

use std::time::{Duration, Instant};

use ebb_units::{Bytes, GRANULE};

use super::figure::Figure;
use super::server::{Checked, Held, Link, Server, Took};
use super::{TURN, await_arena, release, say, unsay};
use crate::demo::stage::Stage;
use crate::error::Result;

/// Names of the figures for so many programs.
const PROGRAMS: [(usize, &str, &str); 7] = [
    (1, "release, 1 program", "restore, 1 program"),
    (2, "release, 2 programs", "restore, 2 programs"),
    (4, "release, 4 programs", "restore, 4 programs"),
    (8, "release, 8 programs", "restore, 8 programs"),
    (16, "release, 16 programs", "restore, 16 programs"),
    (32, "release, 32 programs", "restore, 32 programs"),
    (64, "release, 64 programs", "restore, 64 programs"),
];

/// Also how many words were wrong. After `within` nothing more is begun.
pub(super) fn curve(stage: &mut Stage, rounds: u32, within: Option<Duration>) -> Result<(Vec<Figure>, u64)> {
    let began = Instant::now();
    let most = stage.bytes_per_job;
    let least = if stage.is_sim() {
        Bytes::mib(16)
    } else {
        Bytes::gib(1)
    };
    let sample = most.0.min(1 << 30);
    say("measuring the link");
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let link: Link = plain.ask(&format!("link {sample} {rounds}"))?;
    plain.end(&mut stage.guard)?;
    let (mut figures, mut wrong) = (Vec::new(), 0);
    let mut measure = |stage: &mut Stage, names, count: usize, each: Bytes| -> Result<()> {
        if within.is_some_and(|within| began.elapsed() > within) {
            unsay();
            anstream::eprintln!("not measured, the time is over: {count} times {each}");
            return Ok(());
        }
        let (held, out, back, lost) = all_of(stage, count, each, rounds)?;
        let rates = |seconds: &[f64]| seconds.iter().map(|s| sample as f64 / s).collect();
        let (release, restore) = names;
        figures.push(Figure::rate(
            release,
            held,
            "pinned copy out",
            &out,
            rates(&link.out),
        ));
        figures.push(Figure::rate(
            restore,
            held,
            "pinned copy in",
            &back,
            rates(&link.back),
        ));
        wrong += lost;
        Ok(())
    };
    let mut size = least;
    while size < most {
        measure(stage, ("release", "restore"), 1, size)?;
        size = Bytes(size.0 * 2);
    }
    measure(stage, ("release", "restore"), 1, most)?;
    // Every context takes half a gigabyte of a real card.
    let room = stage.card.free.saturating_sub(most);
    let context = if stage.is_sim() {
        Bytes::mib(16)
    } else {
        Bytes::mib(700)
    };
    for (count, release, restore) in PROGRAMS {
        let each = Bytes(most.0 / count as u64).round_down(GRANULE);
        if each < least || context.0 * count as u64 > room.0 {
            break;
        }
        measure(stage, (release, restore), count, each)?;
    }
    unsay();
    Ok((figures, wrong))
}

/// So many programs with so much each, one after the other: bytes held, the seconds of every round out and back, words that
/// were wrong.
fn all_of(
    stage: &mut Stage,
    count: usize,
    each: Bytes,
    rounds: u32,
) -> Result<(u64, Vec<f64>, Vec<f64>, u64)> {
    let mut programs = Vec::new();
    let mut sum = 0;
    for number in 0..count {
        say(&format!("{count} programs of {each}: {number} started"));
        let name = format!("curve-{number}");
        let mut program = Server::start(stage.server(Some(&name))?, &mut stage.guard)?;
        let held: Held = program.ask(&format!("hold {}", each.0))?;
        sum += held.held;
        programs.push((name, program));
    }
    await_arena(stage, sum)?;
    let (mut out, mut back, mut wrong) = (Vec::new(), Vec::new(), 0);
    for round in 0..=rounds {
        say(&format!("{count} programs of {each}, round {round} of {rounds}"));
        for (_, program) in &mut programs {
            let _: Took = program.ask("rewrite")?;
        }
        std::thread::sleep(TURN);
        let began = Instant::now();
        for (name, _) in &programs {
            release(stage, name)?;
        }
        let took = began.elapsed().as_secs_f64();
        let began = Instant::now();
        for (_, program) in &mut programs {
            let _: Took = program.ask("touch")?;
        }
        if round > 0 {
            out.push(took);
            back.push(began.elapsed().as_secs_f64());
        }
    }
    for (_, mut program) in programs {
        let checked: Checked = program.ask("check")?;
        wrong += checked.wrong;
        program.end(&mut stage.guard)?;
    }
    Ok((sum, out, back, wrong))
}
