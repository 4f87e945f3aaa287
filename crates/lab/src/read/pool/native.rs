//! Our own format: a line an event, simple enough to write by hand or with a line of Python. `docs/pool-traces.md` describes it.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::str::SplitAsciiWhitespace;

use super::builder::{Builder, TooMuch, by_card};
use super::{Wrong, lines};
use crate::pool::event::Trace;

/// The first line.
pub(super) const HEADER: &str = "ebb-pool-trace 1";

pub(super) fn read(input: &mut dyn BufRead) -> Result<Vec<Trace>, Wrong> {
    let mut cards: BTreeMap<u64, (Builder, bool)> = BTreeMap::new();
    let mut card = 0;
    for line in lines(input).skip(1) {
        let (line, text) = line?;
        let text = text.split('#').next().unwrap_or_default();
        let mut words = Words {
            line,
            words: text.split_ascii_whitespace(),
        };
        let Some(first) = words.words.next() else {
            continue;
        };
        if first == "gpu" {
            card = words.number("the number of a card")?;
            words.end()?;
            continue;
        }
        let (builder, begun) = cards.entry(card).or_default();
        let at_ns = first
            .parse()
            .map_err(|_| words.wrong(first, "a time in nanoseconds, or `gpu`"))?;
        builder.at(at_ns);
        let op = words.words.next().unwrap_or_default();
        match op {
            "p" | "a" => {
                let block = words.number("the number of a block")?;
                let size = words.number("a size in bytes")?;
                let stream = words.optional("the number of a stream")?.unwrap_or(0);
                let done = match op {
                    "a" => builder.allocate(block, size, stream),
                    _ if *begun => return Err(words.wrong("p", "blocks of the start before all else")),
                    _ => builder.at_start(block, size, stream),
                };
                done.map_err(|TooMuch| words.wrong(&size.to_string(), TooMuch::EXPECTED))?;
            }
            "f" => {
                let block = words.number("the number of a block")?;
                let stream = words.optional("the number of a stream")?;
                builder.free(block, stream);
            }
            "s" => builder.synchronize(),
            "e" => builder.end(),
            _ => return Err(words.wrong(op, "one of p, a, f, s, e")),
        }
        *begun |= op != "p";
        words.end()?;
    }
    Ok(by_card(
        cards.into_iter().map(|(card, (builder, _))| (card, builder)),
    ))
}

/// The words of a line that are left.
struct Words<'a> {
    line: u64,
    words: SplitAsciiWhitespace<'a>,
}

impl Words<'_> {
    fn wrong(&self, found: &str, expected: &str) -> Wrong {
        let found = if found.is_empty() {
            "the end of the line".to_owned()
        } else {
            format!("`{found}`")
        };
        Wrong::line(self.line, format!("found {found}, expected {expected}"))
    }

    fn optional(&mut self, what: &str) -> Result<Option<u64>, Wrong> {
        self.words
            .next()
            .map(|word| word.parse().map_err(|_| self.wrong(word, what)))
            .transpose()
    }

    fn number(&mut self, what: &str) -> Result<u64, Wrong> {
        self.optional(what)?.ok_or_else(|| self.wrong("", what))
    }

    fn end(&mut self) -> Result<(), Wrong> {
        match self.words.next() {
            Some(word) => Err(self.wrong(word, "the end of the line")),
            None => Ok(()),
        }
    }
}
