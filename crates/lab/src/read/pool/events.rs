//! Events of PyTorch's caching allocator as a table, as `snapshot_to_csv.py` of our data folder writes them.
//!
//! Ops: `s` a segment and `p` a block that were there at the start, `A` allocate, `F` free, `S` a segment more, `T` a segment less,
//! `O` out of memory. Times are in microseconds, and empty at the start.

use std::io::BufRead;

use super::Wrong;
use super::builder::{Builder, TooMuch};
use super::columns::rows;
use crate::pool::event::Trace;

/// The columns that tell this format. `seq` says nothing that the order does not.
pub(super) const COLUMNS: [&str; 5] = ["t_us", "op", "addr", "size", "stream"];
const T: usize = 0;
const OP: usize = 1;
const ADDRESS: usize = 2;
const SIZE: usize = 3;
const STREAM: usize = 4;

pub(super) fn read(input: &mut dyn BufRead) -> Result<Trace, Wrong> {
    let mut builder = Builder::default();
    let mut begun = false;
    rows(input, &COLUMNS, |row| {
        if !row.text(T).is_empty() {
            let us: i64 = row
                .text(T)
                .parse()
                .map_err(|_| row.wrong(T, "microseconds, or nothing"))?;
            builder.at(u64::try_from(us).unwrap_or(0).saturating_mul(1000));
        }
        let op = row.text(OP);
        let too_much = |TooMuch| row.wrong(SIZE, TooMuch::EXPECTED);
        let (address, size, stream) = (row.number(ADDRESS)?, row.number(SIZE)?, row.number(STREAM)?);
        match op {
            "s" => builder.reserve(size),
            "p" if begun => return Err(row.wrong(OP, "no block of the start after the first event")),
            "p" => builder.at_start(address, size, stream).map_err(too_much)?,
            "A" => builder.allocate(address, size, stream).map_err(too_much)?,
            "F" => builder.free(address, Some(stream)),
            "S" => builder.reserve(size),
            "T" => builder.unreserve(size),
            "O" => builder.notes().out_of_memory += 1,
            _ => return Err(row.wrong(OP, "one of s, p, A, F, S, T, O")),
        }
        begun |= !matches!(op, "s" | "p");
        Ok(())
    })?;
    Ok(builder.finish(""))
}
