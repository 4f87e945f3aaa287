//! [`replay`]: feeds the events of a log to a fresh arbiter and compares what it does with what was done.

use std::io::{BufRead, BufReader};
use std::path::Path;

use ebb_policy::{Action, Arbiter, PolicyConfig};

use crate::eventlog::Record;

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Daemons that wrote the log.
    pub runs: u64,
    /// Events that were fed and gave the recorded actions.
    pub steps: u64,
    /// Events that could not be fed: the state before them is not in the log (records were lost, or an older file is gone).
    pub skipped: u64,
    /// The first event that gave other actions.
    pub divergence: Option<Divergence>,
}

/// An event that gave other actions than recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
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

/// Replays a log file.
///
/// # Errors
/// [`ReplayError`] if it cannot be read. Other actions than recorded are no error but the report's `divergence`.
pub fn replay(path: &Path) -> Result<Report, ReplayError> {
    let mut report = Report::default();
    let mut arbiter: Option<Arbiter> = None;
    for (number, line) in BufReader::new(std::fs::File::open(path)?).lines().enumerate() {
        let number = number as u64 + 1;
        let record =
            serde_json::from_str(&line?).map_err(|source| ReplayError::Format { line: number, source })?;
        match record {
            Record::Start { policy, rules, .. } => {
                if rules != ebb_policy::RULES {
                    return Err(ReplayError::Rules { line: number, rules });
                }
                report.runs += 1;
                arbiter = Some(Arbiter::new(PolicyConfig::from(&policy)));
            }
            Record::Step { t, event, actions } => {
                let Some(arbiter) = &mut arbiter else {
                    report.skipped += 1;
                    continue;
                };
                let replayed = arbiter.handle(t, &event);
                if replayed != actions {
                    report.divergence = Some(Divergence {
                        line: number,
                        recorded: actions,
                        replayed,
                    });
                    return Ok(report);
                }
                report.steps += 1;
            }
            Record::Policy { policy, .. } => {
                if let Some(arbiter) = &mut arbiter {
                    arbiter.set_config(PolicyConfig::from(&policy));
                }
            }
            Record::Stranger { .. } | Record::Disk { .. } => {}
            // What comes behind a gap cannot be told from here.
            Record::Gap { .. } | Record::Continued => arbiter = None,
        }
    }
    Ok(report)
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
