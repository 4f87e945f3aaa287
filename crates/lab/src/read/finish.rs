//! A trace of jobs of several cards each, and what seven schedulers made of it.

use std::io::BufRead;
use std::path::{Path, PathBuf};

use super::open::{OpenError, open};
use super::table::{Table, TableError, at_most, number};

/// The most of anything in a trace; seconds are looked at round by round.
const MOST: f64 = 1e9;

/// A job that wants some cards for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GangJob {
    /// When it comes, seconds.
    pub arrives: f64,
    /// How long it takes with its cards to itself, seconds.
    pub seconds: f64,
    /// Cards.
    pub cards: usize,
}

/// What a scheduler made of the trace, as published.
#[derive(Clone, Debug, PartialEq)]
pub struct Published {
    /// In simulation or on real cards.
    pub place: String,
    /// The scheduler.
    pub policy: String,
    /// From the first arrival to the last end, seconds.
    pub makespan: f64,
    /// From arrival to end, mean, seconds.
    pub turnaround: f64,
    /// The worst ratio of turnaround over what a fair part of the cluster would give.
    pub worst: f64,
    /// Jobs whose ratio is above 1.05, percent.
    pub unfair: f64,
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum GangError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A line of it is wrong.
    #[error("{path}, line {line}: {what}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// The published table is wrong.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// The folder of the trace inside a folder of many; the folder itself if it is one.
#[must_use]
pub fn folder(data: &Path) -> PathBuf {
    let inner = data.join("shockwave");
    if inner.is_dir() { inner } else { data.to_owned() }
}

/// The trace file of a folder: the one whose name ends in `.trace`.
#[must_use]
pub fn trace_in(folder: &Path) -> Option<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            name.ends_with(".trace") || name.ends_with(".trace.gz")
        })
        .collect();
    all.sort();
    all.into_iter().next()
}

/// The jobs of a trace: columns by tabs, the cards before the mode or the weight, then the seconds (where there are any), last the arrival.
///
/// # Errors
/// The file is not there, or a line of it is wrong.
pub fn jobs(path: &Path) -> Result<Vec<GangJob>, GangError> {
    let mut out = Vec::new();
    for (n, line) in std::io::BufReader::new(open(path)?).lines().enumerate() {
        let wrong = |what: String| GangError::Line {
            path: path.to_owned(),
            line: n + 1,
            what,
        };
        let line = line.map_err(|e| wrong(e.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let columns: Vec<&str> = line.split('\t').collect();
        if columns.len() != 12 {
            return Err(wrong(format!("expected 12 columns, found {}", columns.len())));
        }
        let read = |column: usize, name: &str| {
            let value = number(columns[column].trim()).map_err(wrong)?;
            let value = value.ok_or_else(|| wrong(format!("no {name}")))?;
            at_most(value, MOST, name).map_err(wrong)
        };
        out.push(GangJob {
            cards: read(6, "a number of cards")?.max(1.0) as usize,
            seconds: read(10, "a duration")?,
            arrives: read(11, "an arrival")?,
        });
    }
    if out.is_empty() {
        return Err(GangError::Table(TableError::Whole {
            path: path.to_owned(),
            what: "no job in it".into(),
        }));
    }
    Ok(out)
}

/// What others made of it; nothing if the folder has no such table: a trace of one's own has none.
///
/// # Errors
/// A line of the table is wrong.
pub fn published(folder: &Path) -> Result<Vec<Published>, GangError> {
    let Ok(path) = super::table::find(folder, "results") else {
        return Ok(Vec::new());
    };
    let mut table = Table::open(
        &path,
        [
            "where",
            "policy",
            "makespan_s",
            "avg_jct_s",
            "worst_ftf",
            "unfair_pct_over_1.05",
        ],
    )?;
    let mut out = Vec::new();
    while let Some(row) = table.next_as(|[place, policy, makespan, jct, worst, unfair]| {
        let read = |text: &str| number(text)?.ok_or_else(|| "a number is missing".to_owned());
        Ok(Published {
            place: place.to_owned(),
            policy: policy.to_owned(),
            makespan: read(makespan)?,
            turnaround: read(jct)?,
            worst: read(worst)?,
            unfair: read(unfair)?,
        })
    })? {
        out.push(row);
    }
    Ok(out)
}
