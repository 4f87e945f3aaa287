//! Training runs of Salus: name, seconds alone on the GPU, peak MB, iterations, command; no header.
//!
//! Only the peak is known of each run. The trace is one block of that size for that time for each run, one run after the
//! other, each a process of its own.

use std::io::BufRead;

use super::builder::{Builder, TooMuch};
use super::{Wrong, lines};
use crate::pool::event::Trace;

/// Whether a line is one of these.
pub(super) fn is(line: &str) -> bool {
    run(line).is_ok()
}

/// Seconds and bytes.
fn run(line: &str) -> Result<(f64, u64), String> {
    let mut columns = line.split(',').skip(1);
    let mut figure = |name: &str| -> Result<f64, String> {
        let text = columns.next().unwrap_or_default().trim();
        let value = text
            .parse()
            .ok()
            .filter(|value: &f64| value.is_finite() && *value >= 0.0);
        value.ok_or_else(|| format!("{name} is `{text}`, expected a number that is not negative"))
    };
    let (seconds, mb, _iterations) = (figure("seconds")?, figure("peak MB")?, figure("iterations")?);
    if columns.next().is_none() {
        return Err("4 columns, expected 5: name, seconds, peak MB, iterations, command".into());
    }
    // Peaks are of a card: far below what the conversion could not hold.
    Ok((seconds, (mb * 1e6).min(1e18) as u64))
}

pub(super) fn read(input: &mut dyn BufRead) -> Result<Trace, Wrong> {
    let mut builder = Builder::default();
    let mut now_ns = 0f64;
    for line in lines(input) {
        let (line, text) = line?;
        if text.is_empty() {
            continue;
        }
        let (seconds, bytes) = run(&text).map_err(|what| Wrong::line(line, what))?;
        builder.at(now_ns as u64);
        builder
            .allocate(line, bytes, 0)
            .map_err(|TooMuch| Wrong::line(line, TooMuch::EXPECTED))?;
        now_ns += seconds * 1e9;
        builder.at(now_ns as u64);
        builder.end();
    }
    Ok(builder.finish(""))
}
