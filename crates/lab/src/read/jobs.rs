//! What jobs are like: measured training configurations, and recorded run times.

use std::path::Path;

use ebb_units::Bytes;

use super::table::{Table, TableError, at_most, find, number};

/// A training configuration alone on a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Training {
    /// Bytes of the card that it holds.
    pub bytes: Bytes,
    /// Share of the GPU's time that it uses, 0 to 1.
    pub duty: f64,
}

/// The measured training configurations: in their folder inside a folder of many, or in the folder itself.
///
/// # Errors
/// The table is not there, or a line of it is wrong.
pub fn trainings(data: &Path) -> Result<Vec<Training>, TableError> {
    let inner = data.join("lucid-profiles");
    let path = find(if inner.is_dir() { &inner } else { data }, "single_data")?;
    let mut table = Table::open(&path, ["gpu_util", "gmem"])?;
    let mut out = Vec::new();
    while let Some(training) = table.next_as(|[util, mib]| {
        let util = at_most(number(util)?.ok_or("no gpu_util")?, 100.0, "a gpu_util")?;
        let mib = at_most(number(mib)?.ok_or("no gmem")?, 1e9, "a gmem")?;
        Ok(Training {
            bytes: Bytes((mib.max(1.0) * 1_048_576.0) as u64),
            duty: (util / 100.0).clamp(0.01, 1.0),
        })
    })? {
        out.push(training);
    }
    if out.is_empty() {
        return Err(table.whole("no training in it"));
    }
    Ok(out)
}

/// Recorded run times of jobs, seconds.
///
/// # Errors
/// The table is not there, or a line of it is wrong.
pub fn run_times(data: &Path) -> Result<Vec<f64>, TableError> {
    let path = find(&data.join("alibaba-pai-2020"), "philly_runtime")?;
    let mut table = Table::open(&path, ["runtime"])?;
    let mut out = Vec::new();
    while let Some(time) = table.next_as(|[time]| {
        let time = number(time)?;
        time.map(|time| at_most(time, 1e9, "a run time")).transpose()
    })? {
        out.extend(time);
    }
    if out.is_empty() {
        return Err(table.whole("no run time in it"));
    }
    Ok(out)
}
