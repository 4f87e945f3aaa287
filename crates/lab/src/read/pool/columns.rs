//! Tables whose first line names the columns.

use std::io::BufRead;

use super::{Wrong, lines};

/// Calls `each` with the values of the wanted columns of every row, in the order in which they are wanted.
pub(super) fn rows<const N: usize>(
    input: &mut dyn BufRead,
    wanted: &[&'static str; N],
    mut each: impl FnMut(&Row<'_, N>) -> Result<(), Wrong>,
) -> Result<(), Wrong> {
    let mut lines = lines(input);
    let Some((_, header)) = lines.next().transpose()? else {
        return Err(Wrong::line(1, "expected a header, found the end"));
    };
    let header: Vec<&str> = header.split(',').map(str::trim).collect();
    let mut places = [0; N];
    for (place, name) in places.iter_mut().zip(wanted) {
        *place = header
            .iter()
            .position(|column| column == name)
            .ok_or_else(|| Wrong::line(1, format!("no column `{name}`")))?;
    }
    for line in lines {
        let (line, text) = line?;
        if text.is_empty() {
            continue;
        }
        let mut values = [""; N];
        let mut found = 0;
        for (column, value) in text.split(',').enumerate() {
            found += 1;
            for (slot, place) in values.iter_mut().zip(places) {
                if place == column {
                    *slot = value.trim();
                }
            }
        }
        if found < header.len() {
            let expected = header.len();
            return Err(Wrong::line(line, format!("{found} columns, expected {expected}")));
        }
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

    /// A number that is not negative.
    pub(super) fn number(&self, column: usize) -> Result<u64, Wrong> {
        self.values[column]
            .parse()
            .map_err(|_| self.wrong(column, "a number that is not negative"))
    }

    /// What is wrong with a value.
    pub(super) fn wrong(&self, column: usize, expected: &str) -> Wrong {
        let (name, value) = (self.names[column], self.values[column]);
        Wrong::line(self.line, format!("{name} is `{value}`, expected {expected}"))
    }
}
