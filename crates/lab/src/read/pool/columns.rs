//! Tables whose first line names the columns: in any order, in any case, with or without quotes, a byte order mark, spaces, empty lines.

use std::io::BufRead;

use super::{Wrong, lines};

/// The cells of a line. Cells may be quoted, as `"a,b"`, with `""` for a quote; a cell does not go on in the next line.
///
/// # Errors
/// If a quote is not closed.
pub(super) fn cells(line: &str) -> Result<Vec<String>, &'static str> {
    let mut cells = Vec::new();
    let mut rest = line;
    loop {
        let start = rest.trim_start();
        if let Some(quoted) = start.strip_prefix('"') {
            let mut cell = String::new();
            let mut left = quoted;
            loop {
                let (inside, after) = left.split_once('"').ok_or("a quote that is not closed")?;
                cell.push_str(inside);
                left = after;
                match left.strip_prefix('"') {
                    Some(more) => {
                        cell.push('"');
                        left = more;
                    }
                    None => break,
                }
            }
            cells.push(cell);
            let after = left.trim_start();
            match after.strip_prefix(',') {
                Some(more) => rest = more,
                None if after.is_empty() => return Ok(cells),
                None => return Err("something after a closed quote"),
            }
        } else if let Some((cell, more)) = rest.split_once(',') {
            cells.push(cell.trim().to_owned());
            rest = more;
        } else {
            cells.push(rest.trim().to_owned());
            return Ok(cells);
        }
    }
}

/// Whether a first line names all these columns.
pub(super) fn names(line: &str, wanted: &[&str]) -> bool {
    cells(line).is_ok_and(|columns| wanted.iter().all(|name| position(&columns, name).is_some()))
}

fn position(columns: &[String], name: &str) -> Option<usize> {
    columns
        .iter()
        .position(|column| column.eq_ignore_ascii_case(name))
}

/// Calls `each` with the values of the wanted columns of every row, in the order in which they are wanted. From the `needed`-th on
/// columns may be missing: their values are empty.
pub(super) fn rows<const N: usize>(
    input: &mut dyn BufRead,
    wanted: &[&'static str; N],
    needed: usize,
    mut each: impl FnMut(&Row<'_, N>) -> Result<(), Wrong>,
) -> Result<(), Wrong> {
    let mut lines = lines(input);
    let Some((line, header)) = lines.next().transpose()? else {
        return Err(Wrong::line(1, "expected a header, found the end"));
    };
    let header = cells(&header).map_err(|what| Wrong::line(line, what))?;
    let mut places = [None; N];
    for (number, (place, name)) in places.iter_mut().zip(wanted).enumerate() {
        *place = position(&header, name);
        if place.is_none() && number < needed {
            return Err(Wrong::line(line, format!("no column `{name}`")));
        }
    }
    for line in lines {
        let (line, text) = line?;
        if text.trim().is_empty() {
            continue;
        }
        let found = cells(&text).map_err(|what| Wrong::line(line, what))?;
        // Commas at the end may be too many: spreadsheets write them.
        let beyond = found.iter().skip(header.len()).any(|cell| !cell.is_empty());
        if found.len() < header.len() || beyond {
            let (found, expected) = (found.len(), header.len());
            return Err(Wrong::line(line, format!("{found} columns, expected {expected}")));
        }
        let values = places.map(|place| place.map_or("", |place| found[place].trim()));
        let names = wanted;
        each(&Row { line, names, values })?;
    }
    Ok(())
}

/// One row of a table.
pub(super) struct Row<'a, const N: usize> {
    /// Its line in the file.
    pub line: u64,
    names: &'a [&'static str; N],
    values: [&'a str; N],
}

impl<const N: usize> Row<'_, N> {
    /// The text of the wanted column of this number.
    pub(super) fn text(&self, column: usize) -> &str {
        self.values[column]
    }

    /// A whole number that is not negative; `0x1f` and `31.0` are, too.
    pub(super) fn number(&self, column: usize) -> Result<u64, Wrong> {
        let text = self.values[column];
        let number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            // A sign after it is none of a number.
            Some(digits) if digits.starts_with(['+', '-']) => None,
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => whole(text).parse().ok(),
        };
        number.ok_or_else(|| self.wrong(column, "a whole number from 0 to 2^64 - 1"))
    }

    /// The same, or 0 if there is nothing.
    pub(super) fn number_or_0(&self, column: usize) -> Result<u64, Wrong> {
        if self.values[column].is_empty() {
            return Ok(0);
        }
        self.number(column)
    }

    /// A whole number.
    pub(super) fn signed(&self, column: usize) -> Result<i64, Wrong> {
        let number = whole(self.values[column]).parse();
        number.map_err(|_| self.wrong(column, "a whole number of 64 bits"))
    }

    /// What is wrong with a value.
    pub(super) fn wrong(&self, column: usize, expected: &str) -> Wrong {
        let name = self.names[column];
        let value: String = self.values[column].chars().take(60).collect();
        Wrong::line(self.line, format!("{name} is `{value}`, expected {expected}"))
    }
}

/// Without a fraction of nothing, which table programs put behind whole numbers.
fn whole(text: &str) -> &str {
    match text.split_once('.') {
        Some((whole, zeros)) if !zeros.is_empty() && zeros.bytes().all(|b| b == b'0') => whole,
        _ => text,
    }
}
