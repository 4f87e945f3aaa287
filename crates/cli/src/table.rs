//! [`Table`]: aligned columns for people, and text from other processes made harmless.

use std::io::Write;

/// Which side a column keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Figures.
    Right,
}

/// Aligned columns: no lines, two spaces between, no trailing blanks, so that `cut` and `awk` like it too.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub(crate) fn new(columns: &[(&'static str, Align)]) -> Self {
        Self {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; what a terminal would take for a command is made visible.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells.iter().map(|cell| harmless(cell)).collect());
    }

    /// Writes it, headings bold.
    pub(crate) fn write(&self, to: &mut impl Write, indent: usize) -> std::io::Result<()> {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                self.rows
                    .iter()
                    .map(|row| width(&row[i]))
                    .chain([width(self.columns[i].0)])
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let headings: Vec<String> = self.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        if headings.iter().any(|heading| !heading.is_empty()) {
            writeln!(to, "{:indent$}{BOLD}{}{RESET}", "", self.line(&headings, &widths))?;
        }
        for row in &self.rows {
            writeln!(to, "{:indent$}{}", "", self.line(row, &widths))?;
        }
        Ok(())
    }

    fn line(&self, cells: &[String], widths: &[usize]) -> String {
        let mut line = String::new();
        for (i, ((cell, (_, align)), full)) in cells.iter().zip(&self.columns).zip(widths).enumerate() {
            let blanks = " ".repeat(full - width(cell));
            if i > 0 {
                line.push_str("  ");
            }
            match align {
                Align::Left => line.extend([cell.as_str(), &blanks]),
                Align::Right => line.extend([blanks.as_str(), cell]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    }
}

/// Bold on.
pub(crate) const BOLD: &str = "\x1b[1m";
/// Dim on.
pub(crate) const DIM: &str = "\x1b[2m";
/// Green on.
pub(crate) const GREEN: &str = "\x1b[32m";
/// Yellow on.
pub(crate) const YELLOW: &str = "\x1b[33m";
/// Red on.
pub(crate) const RED: &str = "\x1b[31m";
/// All off.
pub(crate) const RESET: &str = "\x1b[0m";

fn width(text: &str) -> usize {
    text.chars().count()
}

/// Names come from other people's processes: what a terminal would obey is shown instead.
pub(crate) fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| {
            if c.is_control() || is_bidi(c) {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

/// Characters that turn the direction of the text around them.
fn is_bidi(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A rate for people: decimal, as links are sold.
pub(crate) fn rate(bytes_per_s: f64) -> String {
    if bytes_per_s <= 0.0 {
        return "-".into();
    }
    format!("{:.1} GB/s", bytes_per_s / 1e9)
}

/// Bytes a second; 0 if nothing was moved.
pub(crate) fn per_second(bytes: u64, nanos: u64) -> f64 {
    if nanos == 0 {
        0.0
    } else {
        bytes as f64 / (nanos as f64 / 1e9)
    }
}

/// A time for people: `350 ms`, `12 s`, `5 min`, `2 h`.
pub(crate) fn time(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{} s", ms / 1_000),
        120_000..7_200_000 => format!("{} min", ms / 60_000),
        _ => format!("{} h", ms / 3_600_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_lines_end_where_their_text_does() {
        let mut table = Table::new(&[("A", Align::Right), ("NAME", Align::Left), ("C", Align::Left)]);
        table.row(vec!["1".into(), "x".into(), String::new()]);
        table.row(vec!["100".into(), "longer".into(), "y".into()]);
        let mut text = Vec::new();
        table.write(&mut text, 2).unwrap();
        let text = String::from_utf8(text)
            .unwrap()
            .replace(BOLD, "")
            .replace(RESET, "");
        assert_eq!(text, "    A  NAME    C\n    1  x\n  100  longer  y\n");
    }

    #[test]
    fn a_name_cannot_command_the_terminal() {
        assert_eq!(harmless("a\x1b[2Jb\r\u{202e}c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c");
    }

    #[test]
    fn figures_read_well() {
        assert_eq!(time(350), "350 ms");
        assert_eq!(time(119_999), "119 s");
        assert_eq!(time(7_200_000), "2 h");
        assert_eq!(rate(per_second(16 << 30, 321_000_000)), "53.5 GB/s");
        assert_eq!(rate(per_second(1, 0)), "-");
    }
}
