//! Tables whose first line names the columns, packed or not, wherever the columns stand.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::open::{OpenError, open};

/// A table that cannot be read. It is the caller's file: trying again does not help.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The file is not there or cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No file of that name is in the folder, packed or not.
    #[error("no {name}.csv or {name}.csv.gz in {}", dir.display())]
    Missing {
        /// The folder.
        dir: PathBuf,
        /// The name without its ending.
        name: String,
    },
    /// It is not as it should be as a whole.
    #[error("{}: {what}", path.display())]
    Whole {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A line is not as it should be.
    #[error("{}, line {line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Which line, from 1.
        line: u64,
        /// What is wrong.
        what: String,
    },
}

/// A table, read row by row.
pub struct Table<const N: usize> {
    path: PathBuf,
    reader: csv::Reader<Box<dyn Read>>,
    places: [usize; N],
    record: csv::StringRecord,
}

impl<const N: usize> core::fmt::Debug for Table<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Table")
            .field("path", &self.path)
            .field("places", &self.places)
            .finish_non_exhaustive()
    }
}

/// The file of that name in a folder, `.csv` or `.csv.gz`.
///
/// # Errors
/// [`TableError::Missing`] if there is none.
pub fn find(dir: &Path, name: &str) -> Result<PathBuf, TableError> {
    ["csv.gz", "csv"]
        .into_iter()
        .map(|ending| dir.join(format!("{name}.{ending}")))
        .find(|path| path.is_file())
        .ok_or_else(|| TableError::Missing {
            dir: dir.to_owned(),
            name: name.to_owned(),
        })
}

impl<const N: usize> Table<N> {
    /// Opens a table of which these columns are wanted.
    ///
    /// # Errors
    /// The file cannot be opened, or has no such columns.
    pub fn open(path: &Path, columns: [&str; N]) -> Result<Self, TableError> {
        let mut reader = csv::ReaderBuilder::new()
            .trim(csv::Trim::All)
            .from_reader(open(path)?);
        let line = |what: String| TableError::Line {
            path: path.to_owned(),
            line: 1,
            what,
        };
        let header = reader.headers().map_err(|e| line(said(&e)))?;
        let mut places = [0; N];
        for (place, column) in places.iter_mut().zip(columns) {
            *place = header
                .iter()
                .position(|name| name == column)
                .ok_or_else(|| match header.len() {
                    0 => line(format!("the file is empty; column `{column}` is wanted")),
                    _ => {
                        let there = header.iter().take(12).collect::<Vec<_>>().join(", ");
                        line(format!("no column `{column}`; there are {there}"))
                    }
                })?;
        }
        Ok(Self {
            path: path.to_owned(),
            reader,
            places,
            record: csv::StringRecord::new(),
        })
    }

    /// The wanted values of the next row, in the order in which they were wanted.
    ///
    /// # Errors
    /// The row has another number of values than the header.
    pub fn row(&mut self) -> Result<Option<[&str; N]>, TableError> {
        match self.reader.read_record(&mut self.record) {
            Ok(true) => Ok(Some(self.places.map(|place| &self.record[place]))),
            Ok(false) => Ok(None),
            Err(error) => {
                let line = error
                    .position()
                    .map_or(self.reader.position().line(), csv::Position::line);
                Err(TableError::Line {
                    path: self.path.clone(),
                    line: line.max(1),
                    what: said(&error),
                })
            }
        }
    }

    /// An error that names the line that was read last.
    #[must_use]
    pub fn wrong(&self, what: String) -> TableError {
        TableError::Line {
            path: self.path.clone(),
            line: self.record.position().map_or(1, csv::Position::line),
            what,
        }
    }

    /// An error of the table as a whole.
    #[must_use]
    pub fn whole(&self, what: impl Into<String>) -> TableError {
        TableError::Whole {
            path: self.path.clone(),
            what: what.into(),
        }
    }

    /// The next row, each value as its column's reader makes it; an error of it names the line.
    ///
    /// # Errors
    /// As [`Self::row`], and what `read` says.
    pub fn next_as<T>(
        &mut self,
        read: impl FnOnce([&str; N]) -> Result<T, String>,
    ) -> Result<Option<T>, TableError> {
        let value = match self.row()? {
            None => return Ok(None),
            Some(row) => read(row),
        };
        value.map(Some).map_err(|what| self.wrong(what))
    }
}

/// What is wrong with a table, without what its error says of the place.
fn said(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Io(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
            "the packed file ends too early; fetch it anew".into()
        }
        csv::ErrorKind::Io(e) => format!("{e}; the file may be damaged"),
        csv::ErrorKind::Utf8 { .. } => "no text".into(),
        csv::ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => format!("expected {expected_len} values, found {len}"),
        _ => error.to_string(),
    }
}

/// The latest moment, seconds since 1970: what is later is no time of a recording, and makes simulations without end.
pub(crate) const LATEST: f64 = 1e11;

/// A number from 0 to `most`; `what` it is.
///
/// # Errors
/// It is not.
pub fn at_most(number: f64, most: f64, what: &str) -> Result<f64, String> {
    if (0.0..=most).contains(&number) {
        Ok(number)
    } else {
        Err(format!("{what} of {number}: expected one from 0 to {most}"))
    }
}

/// A number, or nothing if the place is empty or says that it is.
///
/// # Errors
/// What was found instead.
pub fn number(text: &str) -> Result<Option<f64>, String> {
    if text.is_empty() || text.eq_ignore_ascii_case("null") || text.eq_ignore_ascii_case("nan") {
        return Ok(None);
    }
    text.parse()
        .ok()
        .filter(|n: &f64| n.is_finite())
        .map(Some)
        .ok_or_else(|| format!("expected a number, found `{text}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.csv");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    #[test]
    fn columns_are_found_wherever_they_stand() {
        let (_dir, path) = table("b,x,a\n1,2,3\n");
        let mut t = Table::open(&path, ["a", "b"]).unwrap();
        assert_eq!(t.row().unwrap(), Some(["3", "1"]));
        assert_eq!(t.row().unwrap(), None);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let (_dir, path) = table("a\n1\nx\n");
        let mut t = Table::open(&path, ["a"]).unwrap();
        let read = |[a]: [&str; 1]| number(a);
        assert_eq!(t.next_as(read).unwrap(), Some(Some(1.0)));
        let error = t.next_as(read).unwrap_err().to_string();
        assert!(
            error.ends_with("t.csv, line 3: expected a number, found `x`"),
            "{error}"
        );
        let error = Table::open(&path, ["z"]).unwrap_err().to_string();
        assert!(error.ends_with("line 1: no column `z`; there are a"), "{error}");
    }

    #[test]
    fn packed_or_plain_is_found_and_nothing_is_named() {
        let (dir, path) = table("a\n");
        assert_eq!(find(dir.path(), "t").unwrap(), path);
        let error = find(dir.path(), "u").unwrap_err().to_string();
        assert!(error.starts_with("no u.csv or u.csv.gz in "), "{error}");
    }
}
