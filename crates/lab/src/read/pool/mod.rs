//! Traces of allocators, from every format that we know: told by what is in the file, and by its name where that says nothing.
//!
//! | format | told by |
//! | --- | --- |
//! | PyTorch's memory snapshot | a pickle: its first byte, or a name in `.pickle` or `.pkl` |
//! | allocator events (`op,addr,size`, and `t_us,stream,device`) | its header |
//! | lifetimes of buffers (`id,lower,upper,size`) | its header |
//! | ebb's own (`docs/pool-traces.md`) | its first word |
//! | training runs of Salus | five columns without a header: name, seconds, MB, iterations, command |
//!
//! Each may be packed with gzip, whatever its name.

mod builder;
mod columns;
mod events;
mod lifetimes;
mod native;
mod salus;
mod snapshot;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::open::{OpenError, open};
use crate::pool::event::Trace;

/// Where in a file something is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A line, counted from 1.
    Line(u64),
    /// A byte of the unpacked content, counted from 0.
    Byte(u64),
    /// A value in the data, by the way that leads there.
    Value(String),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Line(n) => write!(f, "line {n}"),
            Self::Byte(n) => write!(f, "byte {n}"),
            Self::Value(path) => f.write_str(path),
        }
    }
}

/// What is wrong in a file, and where. The file's fault: trying again does not help.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {what}")]
pub struct Wrong {
    /// Where.
    pub place: Place,
    /// What was found and what was expected.
    pub what: String,
}

impl Wrong {
    fn line(line: u64, what: impl Into<String>) -> Self {
        let place = Place::Line(line);
        let what = what.into();
        Self { place, what }
    }
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No such file, or no right to it.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Its content is not what its format asks for.
    #[error("{path}: {wrong}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        wrong: Wrong,
    },
    /// Its format is none that we know.
    #[error(
        "{path}: {found}; expected a PyTorch snapshot (pickle), columns t_us,op,addr,size,stream or \
         id,lower,upper,size, `ebb-pool-trace 1`, or the runs of Salus",
        path = path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What it begins with.
        found: String,
    },
}

/// How files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Bytes of one unit in lifetimes of buffers, which have no unit of their own.
    pub unit: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            unit: ebb_units::GRANULE.0,
        }
    }
}

/// What some programs put before a text to say that it is UTF-8.
const MARK: char = '\u{feff}';

/// What a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Events,
    Lifetimes,
    Native,
    Salus,
    Snapshot,
}

/// All traces of a file: one for each card that something happened on.
///
/// # Errors
/// If it cannot be read, is of no format that we know, or is wrong in its format.
pub fn read(path: &Path, options: &Options) -> Result<Vec<Trace>, ReadError> {
    read_from(&mut *open(path)?, path, options)
}

/// All traces of an unpacked content, which errors and traces name by its path.
///
/// # Errors
/// If it cannot be read, is of no format that we know, or is wrong in its format.
pub fn read_from(content: &mut dyn Read, path: &Path, options: &Options) -> Result<Vec<Trace>, ReadError> {
    let mut input = BufReader::with_capacity(1 << 16, content);
    // What is packed comes in pieces that may end within the first line.
    let mut head = Vec::new();
    let first = input.by_ref().take(1 << 16).read_until(b'\n', &mut head);
    first.map_err(|source| OpenError {
        path: path.to_owned(),
        source,
    })?;
    let Some(format) = tell(&head).or_else(|| by_name(path)) else {
        return Err(ReadError::Unknown {
            path: path.to_owned(),
            found: begins(&head),
        });
    };
    let mut input = head.as_slice().chain(input);
    let traces = match format {
        Format::Events => events::read(&mut input),
        Format::Lifetimes => lifetimes::read(&mut input, options.unit).map(|trace| vec![trace]),
        Format::Native => native::read(&mut input),
        Format::Snapshot => snapshot::read(&mut input),
        Format::Salus => salus::read(&mut input).map(|trace| vec![trace]),
    };
    let mut traces = traces.map_err(|wrong| ReadError::Content {
        path: path.to_owned(),
        wrong,
    })?;
    let name = path.display();
    for trace in &mut traces {
        trace.name = format!("{name}{}", trace.name);
    }
    Ok(traces)
}

/// The format, from the name.
fn by_name(path: &Path) -> Option<Format> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".gz").unwrap_or(name);
    let pickle = [".pickle", ".pkl"].iter().any(|end| name.ends_with(end));
    pickle.then_some(Format::Snapshot)
}

/// The format, from the first bytes.
fn tell(head: &[u8]) -> Option<Format> {
    // The first operation of every pickle since Python 2.3: the version.
    if matches!(head, [0x80, 0..=5, ..]) {
        return Some(Format::Snapshot);
    }
    let line = head.split(|&b| b == b'\n').next().unwrap_or_default();
    let line = std::str::from_utf8(line).ok()?;
    let line = line.trim_start_matches(MARK).trim();
    let has = |wanted: &[&str]| columns::names(line, wanted);
    if has(&events::COLUMNS) {
        Some(Format::Events)
    } else if has(&lifetimes::COLUMNS) {
        Some(Format::Lifetimes)
    } else if line == native::HEADER {
        Some(Format::Native)
    } else if salus::is(line) {
        Some(Format::Salus)
    } else {
        None
    }
}

/// How files begin that are packed in a way that we do not know.
const PACKED: [(&[u8], &str); 6] = [
    (b"PK\x03\x04", "packed with zip, or written by torch.save"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd"),
    (b"\xfd7zXZ\0", "packed with xz"),
    (b"BZh", "packed with bzip2"),
    (b"\xff\xfe", "text in UTF-16"),
    (b"\xfe\xff", "text in UTF-16"),
];

/// What an unknown file begins with, for people.
fn begins(head: &[u8]) -> String {
    if head.is_empty() {
        return "it is empty".into();
    }
    for (magic, what) in PACKED {
        if head.starts_with(magic) {
            return format!("it is {what}: unpack it first (gzip need not be)");
        }
    }
    let line = head.split(|&b| b == b'\n').next().unwrap_or_default();
    let text: String = String::from_utf8_lossy(line)
        .chars()
        .take(60)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect();
    format!("it begins with `{text}`")
}

/// The rest of the input as lines with their numbers; a line that is no text, or too long to be one of ours, is an error.
fn lines<'a>(input: &'a mut dyn BufRead) -> impl Iterator<Item = Result<(u64, String), Wrong>> + 'a {
    const LONGEST: u64 = 1 << 20;
    let mut number = 0;
    std::iter::from_fn(move || {
        number += 1;
        let mut line = Vec::new();
        match input.take(LONGEST).read_until(b'\n', &mut line) {
            Err(error) => return Some(Err(Wrong::line(number, format!("cannot be read: {error}")))),
            Ok(0) => return None,
            Ok(n) if n as u64 == LONGEST => {
                return Some(Err(Wrong::line(number, "longer than a mebibyte")));
            }
            Ok(_) => {}
        }
        Some(match String::from_utf8(line) {
            Ok(line) => {
                let line = line.trim_end_matches(['\n', '\r']);
                let line = if number == 1 {
                    line.trim_start_matches(MARK)
                } else {
                    line
                };
                Ok((number, line.to_owned()))
            }
            Err(_) => Err(Wrong::line(number, "not text in UTF-8")),
        })
    })
}

#[cfg(test)]
mod tests;
