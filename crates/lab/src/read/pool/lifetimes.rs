//! Lifetimes of buffers: problems of static planning, of which minimalloc and idealloc have collections.
//!
//! A buffer lives from `lower` to before `upper` of a logical time and takes `size` units. What ends at an instant makes room for
//! what begins at it; among what begins at once, the file's order stands.

use std::io::BufRead;

use super::Wrong;
use super::builder::{Builder, TooMuch};
use super::columns::rows;
use crate::pool::event::Trace;

/// The columns that tell this format. `id` is not needed, and other columns (hints, offsets of a solution) are not looked at.
pub(super) const COLUMNS: [&str; 3] = ["lower", "upper", "size"];
const LOWER: usize = 0;
const UPPER: usize = 1;
const SIZE: usize = 2;

pub(super) fn read(input: &mut dyn BufRead, unit: u64) -> Result<Trace, Wrong> {
    /// A buffer's beginning or end. The order of the fields is the order of the events.
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    struct Edge {
        at: i64,
        begins: bool,
        buffer: u64,
        bytes: u64,
        line: u64,
    }
    let mut edges = Vec::new();
    let (mut buffer, mut empty) = (0, 0);
    rows(input, &COLUMNS, COLUMNS.len(), |row| {
        let (lower, upper) = (row.signed(LOWER)?, row.signed(UPPER)?);
        if lower > upper {
            return Err(row.wrong(UPPER, &format!("at least lower, which is {lower}")));
        }
        let bytes = row.number(SIZE)?.checked_mul(unit);
        let Some(bytes) = bytes else {
            return Err(Wrong::line(row.line, too_much(unit)));
        };
        // Nothing lives from an instant to before the same.
        if lower == upper {
            empty += 1;
            return Ok(());
        }
        for (at, begins) in [(lower, true), (upper, false)] {
            edges.push(Edge {
                at,
                begins,
                buffer,
                bytes,
                line: row.line,
            });
        }
        buffer += 1;
        Ok(())
    })?;
    edges.sort_unstable();
    let mut builder = Builder::default();
    builder.notes().ignored += empty;
    let first = edges.first().map_or(0, |edge| edge.at.min(0));
    for edge in edges {
        builder.at(edge.at.abs_diff(first));
        if edge.begins {
            builder
                .allocate(edge.buffer, edge.bytes, 0)
                .map_err(|TooMuch| Wrong::line(edge.line, too_much(unit)))?;
        } else if builder.knows(edge.buffer) {
            builder.free(edge.buffer, None);
        }
    }
    Ok(builder.finish(""))
}

fn too_much(unit: u64) -> String {
    format!("in units of {unit} bytes more than 2^62 bytes would be live at once: take a smaller unit")
}
