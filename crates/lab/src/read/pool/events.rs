//! Events of PyTorch's caching allocator as a table, as `snapshot_to_csv.py` of our data folder writes them.
//!
//! Ops: `s` a segment and `p` a block that were there at the start, `A` allocate, `F` free, `S` a segment more, `T` a segment less,
//! `O` out of memory; or PyTorch's own words for them. Times are in microseconds, and empty at the start.

use std::collections::BTreeMap;
use std::io::BufRead;

use super::Wrong;
use super::builder::{Builder, TooMuch, by_card};
use super::columns::rows;
use crate::pool::event::Trace;

/// The columns that tell this format.
pub(super) const COLUMNS: [&str; 3] = ["op", "addr", "size"];
/// What is looked at. `seq` says nothing that the order does not.
const ALL: [&str; 6] = ["op", "addr", "size", "t_us", "stream", "device"];
const OP: usize = 0;
const ADDRESS: usize = 1;
const SIZE: usize = 2;
const T: usize = 3;
const STREAM: usize = 4;
const DEVICE: usize = 5;

pub(super) fn read(input: &mut dyn BufRead) -> Result<Vec<Trace>, Wrong> {
    let mut cards: BTreeMap<u64, (Builder, bool)> = BTreeMap::new();
    rows(input, &ALL, COLUMNS.len(), |row| {
        let card = row.number_or_0(DEVICE)?;
        let (builder, begun) = cards.entry(card).or_default();
        let time = row.text(T);
        if !time.is_empty() {
            // Fractions are of no use to an order.
            let us: f64 = time
                .parse()
                .ok()
                .filter(|us: &f64| us.is_finite())
                .ok_or_else(|| row.wrong(T, "microseconds, or nothing"))?;
            let us = time.parse().unwrap_or(us as i64);
            builder.at(u64::try_from(us).unwrap_or(0).saturating_mul(1000));
        }
        let op = match row.text(OP) {
            "alloc" => "A",
            "free" | "free_completed" => "F",
            "segment_alloc" | "segment_map" => "S",
            "segment_free" | "segment_unmap" => "T",
            "oom" => "O",
            other => other,
        };
        let too_much = |TooMuch| row.wrong(SIZE, TooMuch::EXPECTED);
        let stream = row.number_or_0(STREAM)?;
        match op {
            "O" => builder.notes().out_of_memory += 1,
            "free_requested" | "snapshot" | "user_defined" => builder.notes().ignored += 1,
            "s" | "S" => builder.reserve(row.number(SIZE)?),
            "T" => builder.unreserve(row.number(SIZE)?),
            "p" if *begun => return Err(row.wrong(OP, "no block of the start after the first event")),
            "p" => builder
                .at_start(row.number(ADDRESS)?, row.number(SIZE)?, stream)
                .map_err(too_much)?,
            "A" => builder
                .allocate(row.number(ADDRESS)?, row.number(SIZE)?, stream)
                .map_err(too_much)?,
            // Of a free the size is known.
            "F" => {
                row.number_or_0(SIZE)?;
                builder.free(row.number(ADDRESS)?, Some(stream));
            }
            _ => return Err(row.wrong(OP, "one of s, p, A, F, S, T, O")),
        }
        *begun |= !matches!(op, "s" | "p");
        Ok(())
    })?;
    Ok(by_card(
        cards.into_iter().map(|(card, (builder, _))| (card, builder)),
    ))
}
