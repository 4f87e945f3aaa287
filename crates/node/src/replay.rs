//! [`replay`]: feeds the events of a log to a fresh arbiter and compares what it does with what was done.
//!
//! A full log goes on in a new file, and the one before is kept: the two are read as one. What is before them is gone, and so is
//! what a full disk cost; from there to the next start of a daemon the state is not known, and nothing can be compared.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use ebb_policy::{Action, Arbiter, PolicyConfig};

use crate::eventlog::{Record, older};

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Daemons that wrote the log.
    pub runs: u64,
    /// Events that were fed and gave the recorded actions.
    pub steps: u64,
    /// Events that could not be fed: the state before them is not in the log (records were lost, or an older file is gone).
    pub skipped: u64,
    /// Why, for the first of them.
    pub missing: Option<Missing>,
    /// The last line is not complete: the daemon was stopped while it wrote, or writes still.
    pub cut: bool,
    /// The first event that gave other actions.
    pub divergence: Option<Divergence>,
}

/// What of a log is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Its beginning: it follows a file that is gone, or was cut.
    Beginning,
    /// So many records, which a daemon could not write.
    Records(u64),
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Beginning => {
                f.write_str("the beginning is missing: it was in an older file, or was cut off")
            }
            Self::Records(n) => write!(
                f,
                "{n} records are missing: the disk was full when they were to be written"
            ),
        }
    }
}

/// An event that gave other actions than recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// The file that it is in.
    pub file: PathBuf,
    /// Line of the log, from 1.
    pub line: u64,
    /// What was done then.
    pub recorded: Vec<Action>,
    /// What would be done now.
    pub replayed: Vec<Action>,
}

/// A log that cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// It cannot be read.
    #[error("the event log cannot be read")]
    Io(#[from] std::io::Error),
    /// Nothing of it can be replayed.
    #[error("nothing of it can be replayed, {skipped} events: {missing}")]
    Nothing {
        /// Events in it.
        skipped: u64,
        /// What is not there.
        missing: Missing,
    },
    /// The file that it follows is no event log.
    #[error("{}, which it follows: {source}", path.display())]
    Older {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<ReplayError>,
    },
    /// It was written by an arbiter with other rules: it would not do the same.
    #[error(
        "line {line}: this run was decided by rules of version {rules}, and this program has version {}",
        ebb_policy::RULES
    )]
    Rules {
        /// Where, from 1.
        line: u64,
        /// Its version; 0 before there were versions.
        rules: u32,
    },
    /// A line is no record.
    #[error("line {line} is no record of an event log: {source}")]
    Format {
        /// Which, from 1.
        line: u64,
        /// Why.
        source: serde_json::Error,
    },
}

/// Replays a log file, and the one that it follows, if that is there.
///
/// # Errors
/// [`ReplayError`] if it cannot be read, or nothing of it can be replayed. Other actions than recorded are no error but the
/// report's `divergence`.
pub fn replay(path: &Path) -> Result<Report, ReplayError> {
    let mut run = Run::default();
    let before = older(path);
    if follows(path)? && before.is_file() {
        run.file(&before, false).map_err(|error| ReplayError::Older {
            path: before.clone(),
            source: Box::new(error),
        })?;
        // A rotation comes between two whole lines.
        run.report.cut = false;
    }
    if run.report.divergence.is_none() {
        let goes_on = run.begun;
        run.file(path, goes_on)?;
    }
    let report = run.report;
    match report.missing {
        Some(missing) if report.steps == 0 && report.divergence.is_none() => Err(ReplayError::Nothing {
            skipped: report.skipped,
            missing,
        }),
        _ => Ok(report),
    }
}

/// Whether a log says that it follows another file.
fn follows(path: &Path) -> Result<bool, ReplayError> {
    let mut first = Vec::new();
    BufReader::new(std::fs::File::open(path)?).read_until(b'\n', &mut first)?;
    Ok(matches!(serde_json::from_slice(&first), Ok(Record::Continued)))
}

/// A replay under way.
#[derive(Default)]
struct Run {
    report: Report,
    /// As it was; `None` where that is not known.
    arbiter: Option<Arbiter>,
    /// Why it is not.
    gap: Option<Missing>,
    /// A file was read.
    begun: bool,
}

impl Run {
    fn file(&mut self, path: &Path, goes_on: bool) -> Result<(), ReplayError> {
        self.begun = true;
        let mut lines = BufReader::new(std::fs::File::open(path)?);
        let mut line = Vec::new();
        for number in 1.. {
            line.clear();
            if lines.read_until(b'\n', &mut line)? == 0 {
                break;
            }
            let record = match serde_json::from_slice(&line) {
                Ok(record) => record,
                Err(_) if line.last() != Some(&b'\n') => {
                    self.report.cut = true;
                    break;
                }
                Err(source) => return Err(ReplayError::Format { line: number, source }),
            };
            if number == 1 && goes_on && matches!(record, Record::Continued) {
                continue;
            }
            if let Err(recorded) = self.record(number, record)? {
                self.report.divergence = Some(Divergence {
                    file: path.to_owned(),
                    ..recorded
                });
                break;
            }
        }
        Ok(())
    }

    /// One line; the inner error is what it does otherwise.
    fn record(&mut self, line: u64, record: Record) -> Result<Result<(), Divergence>, ReplayError> {
        match record {
            Record::Start { policy, rules, .. } => {
                if rules != ebb_policy::RULES {
                    return Err(ReplayError::Rules { line, rules });
                }
                self.report.runs += 1;
                self.arbiter = Some(Arbiter::new(PolicyConfig::from(&policy)));
            }
            Record::Step { t, event, actions } => {
                let Some(arbiter) = &mut self.arbiter else {
                    self.report.skipped += 1;
                    let why = self.gap.unwrap_or(Missing::Beginning);
                    self.report.missing.get_or_insert(why);
                    return Ok(Ok(()));
                };
                let replayed = arbiter.handle(t, &event);
                if replayed != actions {
                    return Ok(Err(Divergence {
                        file: PathBuf::new(),
                        line,
                        recorded: actions,
                        replayed,
                    }));
                }
                self.report.steps += 1;
            }
            Record::Policy { policy, .. } => {
                if let Some(arbiter) = &mut self.arbiter {
                    arbiter.set_config(PolicyConfig::from(&policy));
                }
            }
            Record::Stranger { .. } | Record::Disk { .. } => {}
            // What comes behind a gap cannot be told from here.
            Record::Gap { lost } => (self.arbiter, self.gap) = (None, Some(Missing::Records(lost))),
            Record::Continued => (self.arbiter, self.gap) = (None, Some(Missing::Beginning)),
        }
        Ok(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use ebb_policy::{AskId, AskKind, Event, TaskSpec, Time};
    use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

    use super::*;

    /// What a daemon writes whose settings were read again after the first client had its memory.
    fn log(change: bool) -> Vec<Record> {
        let device = DeviceId(0);
        let before = PolicyConfig::default();
        let after = PolicyConfig {
            min_turn: Duration::from_secs(200),
            ..before.clone()
        };
        let mut arbiter = Arbiter::new(before.clone());
        let mut records = vec![Record::Start {
            version: "0".into(),
            pid: 1,
            unix_seconds: 0,
            rules: ebb_policy::RULES,
            policy: (&before).into(),
        }];
        let mut events = vec![Event::Device {
            device,
            capacity: Bytes::gib(100),
            unmanaged: Bytes::ZERO,
        }];
        for n in 1..=2 {
            let (task, client) = (TaskId(n), ClientId(n));
            events.push(Event::TaskAdded {
                task,
                spec: TaskSpec::default(),
                devices: vec![],
                adopt: false,
            });
            events.push(Event::ClientJoined {
                client,
                task,
                device,
                lease: Bytes::ZERO,
                evicted: Bytes::ZERO,
                overhead: Bytes::ZERO,
            });
            events.push(Event::Ask {
                client,
                ask: AskId(n),
                kind: AskKind::Alloc,
                bytes: Bytes::gib(75),
                long: true,
            });
        }
        // The first goes on using the GPU; whether its turn is over in between depends on the settings.
        events.extend((0..400).map(|_| Event::Touched { client: ClientId(1) }));
        for (n, event) in events.into_iter().enumerate() {
            let t = Time::from_millis(n as u64 * 200);
            if change && n == 5 {
                arbiter.set_config(after.clone());
                records.push(Record::Policy {
                    t,
                    policy: (&after).into(),
                });
            }
            let actions = arbiter.handle(t, &event);
            records.push(Record::Step { t, event, actions });
        }
        records
    }

    fn replayed(records: &[Record]) -> Report {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for record in records {
            serde_json::to_writer(&mut file, record).unwrap();
            file.write_all(b"\n").unwrap();
        }
        replay(file.path()).unwrap()
    }

    fn text(records: &[Record]) -> String {
        let line = |record| serde_json::to_string(record).unwrap() + "\n";
        records.iter().map(line).collect()
    }

    #[test]
    fn a_log_in_two_files_replays_as_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("any.log");
        let records = log(true);
        let (first, second) = records.split_at(200);
        let second = text(&[Record::Continued]) + &text(second);
        std::fs::write(&path, &second).unwrap();
        let alone = replay(&path).unwrap_err();
        assert!(
            matches!(
                alone,
                ReplayError::Nothing {
                    skipped: 209,
                    missing: Missing::Beginning
                }
            ),
            "{alone}"
        );
        std::fs::write(older(&path), text(first)).unwrap();
        let report = replay(&path).unwrap();
        assert_eq!((report.runs, report.steps, report.skipped), (1, 407, 0));
        assert_eq!(
            (report.divergence, report.missing, report.cut),
            (None, None, false)
        );
        // What the older file lacks is said with its name.
        std::fs::write(older(&path), "no record\n").unwrap();
        let error = replay(&path).unwrap_err().to_string();
        assert!(
            error.contains("any.log.old, which it follows: line 1 is no record"),
            "{error}"
        );
    }

    #[test]
    fn what_is_cut_or_damaged_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let all = text(&log(false));
        // In the middle of the last line: as far as it goes.
        std::fs::write(&path, &all[..all.len() - 9]).unwrap();
        let report = replay(&path).unwrap();
        assert_eq!((report.steps, report.cut, report.divergence), (406, true, None));
        // In the middle of another one: by its number.
        let mut lines: Vec<&str> = all.lines().collect();
        lines[99] = &lines[99][..20];
        std::fs::write(&path, lines.join("\n") + "\n").unwrap();
        let error = replay(&path).unwrap_err().to_string();
        assert!(
            error.starts_with("line 100 is no record of an event log"),
            "{error}"
        );
        // Its head is gone.
        let tail: String = all.lines().skip(50).map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, tail).unwrap();
        let error = replay(&path).unwrap_err().to_string();
        assert!(error.contains("358 events: the beginning is missing"), "{error}");
        // Records are lost in between: what is before them was compared.
        let mut records = log(false);
        records.insert(100, Record::Gap { lost: 7 });
        std::fs::write(&path, text(&records)).unwrap();
        let report = replay(&path).unwrap();
        assert_eq!((report.steps, report.skipped), (99, 308));
        assert_eq!(report.missing, Some(Missing::Records(7)));
    }

    #[test]
    fn settings_that_changed_replay() {
        let records = log(true);
        let report = replayed(&records);
        assert_eq!((report.divergence, report.steps), (None, 407));
        // The record is what makes it so.
        let without: Vec<Record> = records
            .into_iter()
            .filter(|r| !matches!(r, Record::Policy { .. }))
            .collect();
        assert!(replayed(&without).divergence.is_some());
    }
}
