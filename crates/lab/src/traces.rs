//! Which recorded trace a folder holds, told by its files and not by its name.

use std::path::{Path, PathBuf};

use crate::read::table::{Table, find};

/// A kind of trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Memory and duty cycle of serving containers.
    Serving,
    /// Requests for models.
    Requests,
    /// Measured training configurations.
    Profiles,
    /// Jobs of several cards, and what schedulers made of them.
    Gangs,
    /// A daemon's event log.
    EventLog,
    /// A folder that holds several of these.
    Several,
}

impl core::fmt::Display for Kind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(match self {
            Self::Serving => "a serving cluster's recording",
            Self::Requests => "requests for models",
            Self::Profiles => "measured trainings",
            Self::Gangs => "jobs of several cards",
            Self::EventLog => "a daemon's event log",
            Self::Several => "a folder of several traces",
        })
    }
}

/// A folder in which nothing known is.
#[derive(Debug, thiserror::Error)]
#[error(
    "{path}: no trace that is known: looked for tables pod_gpu_memory_used_bytes_anon and pod_gpu_duty_cycle_anon, \
     lora_request_trace, single_data, a *.trace, a daemon's *.jsonl",
    path = path.display()
)]
pub struct UnknownTrace {
    /// The folder or file.
    pub path: PathBuf,
}

/// Whether a table with these columns is in a folder.
fn has<const N: usize>(folder: &Path, name: &str, columns: [&str; N]) -> bool {
    find(folder, name).is_ok_and(|path| Table::open(&path, columns).is_ok())
}

/// Event logs of a folder, or the file itself if it is one.
#[must_use]
pub fn event_log(path: &Path) -> Option<PathBuf> {
    let is_log = |path: &Path| {
        use std::io::{BufRead, Read};
        let Ok(file) = std::fs::File::open(path) else {
            return false;
        };
        let mut line = String::new();
        let mut head = std::io::BufReader::new(file.take(64 << 10));
        head.read_line(&mut line).is_ok() && line.starts_with('{') && line.contains("\"record\"")
    };
    if path.is_file() {
        return is_log(path).then(|| path.to_owned());
    }
    let mut all: Vec<PathBuf> = std::fs::read_dir(path)
        .ok()?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "jsonl") && is_log(p))
        .collect();
    all.sort();
    all.into_iter().next()
}

/// Says what a folder (or a file) holds. One that holds both serving recordings and requests is told as the former.
///
/// # Errors
/// [`UnknownTrace`] if it is nothing that is known.
pub fn recognise(path: &Path) -> Result<Kind, UnknownTrace> {
    if event_log(path).is_some() {
        return Ok(Kind::EventLog);
    }
    let sampled = ["timestamp_anon", "value", "container_ip"];
    if has(path, "pod_gpu_memory_used_bytes_anon", sampled) && has(path, "pod_gpu_duty_cycle_anon", sampled) {
        return Ok(Kind::Serving);
    }
    if has(
        path,
        "lora_request_trace",
        ["gmt_create", "exec_time_seconds", "checkpoint_model_version_id"],
    ) {
        return Ok(Kind::Requests);
    }
    if has(path, "single_data", ["gpu_util", "gmem"]) {
        return Ok(Kind::Profiles);
    }
    if crate::read::finish::trace_in(path).is_some_and(|p| crate::read::finish::jobs(&p).is_ok()) {
        return Ok(Kind::Gangs);
    }
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten();
    if inside
        .filter(|e| e.path().is_dir())
        .any(|e| recognise_one(&e.path()))
    {
        return Ok(Kind::Several);
    }
    Err(UnknownTrace {
        path: path.to_owned(),
    })
}

/// A folder inside a folder; not deeper.
fn recognise_one(path: &Path) -> bool {
    let sampled = ["timestamp_anon", "value", "container_ip"];
    has(path, "pod_gpu_memory_used_bytes_anon", sampled) || has(path, "single_data", ["gpu_util", "gmem"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_are_told_by_what_is_in_them() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let write = |path: &Path, name: &str, text: &str| std::fs::write(path.join(name), text).unwrap();
        assert!(recognise(&at("nothing")).is_err());
        let serving = at("x");
        write(
            &serving,
            "pod_gpu_memory_used_bytes_anon.csv",
            "value,timestamp_anon,container_ip\n",
        );
        write(
            &serving,
            "pod_gpu_duty_cycle_anon.csv",
            "timestamp_anon,value,container_ip\n",
        );
        assert_eq!(recognise(&serving).unwrap(), Kind::Serving);
        let profiles = at("y");
        write(&profiles, "single_data.csv", "model,gpu_util,gmem\na,50,1000\n");
        assert_eq!(recognise(&profiles).unwrap(), Kind::Profiles);
        assert_eq!(recognise(dir.path()).unwrap(), Kind::Several);
        let gangs = at("z");
        write(
            &gangs,
            "a.trace",
            "t\tc\td\t-n\t1\t10\t2\tstatic\t1\t-1\t100\t5\n",
        );
        assert_eq!(recognise(&gangs).unwrap(), Kind::Gangs);
        let log = at("l");
        write(&log, "events.jsonl", "{\"record\":\"start\"}\n");
        assert_eq!(recognise(&log).unwrap(), Kind::EventLog);
        assert_eq!(recognise(&log.join("events.jsonl")).unwrap(), Kind::EventLog);
        // A name says nothing.
        write(&at("alibaba-gentd26"), "readme.md", "");
        assert!(recognise(&dir.path().join("alibaba-gentd26")).is_err());
    }
}
