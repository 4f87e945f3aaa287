//! The event log: every event that the arbiter took in and every action that it answered with, one JSON object a line.
//!
//! Written by a thread of its own, in batches. A full disk costs records, never the daemon: what could not be written is
//! counted, said, and marked by a gap record where the log goes on.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ebb_policy::{Action, Event, PolicyConfig, Time};
use ebb_units::{Bytes, DeviceUuid};
use serde::{Deserialize, Serialize};

use crate::worker::{Answers, FromWorker, Worker};

/// Most that may wait for the disk.
const MAX_QUEUE: u64 = 16 << 20;
/// How long to leave a failing disk alone.
const RETRY: Duration = Duration::from_secs(1);

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "snake_case")]
pub enum Record {
    /// A daemon started; all that follows up to the next start is its.
    Start {
        /// Version of the daemon.
        version: String,
        /// Its process.
        pid: u32,
        /// Seconds since 1970, for people.
        unix_seconds: u64,
        /// Which rules its arbiter has ([`ebb_policy::RULES`]).
        #[serde(default)]
        rules: u32,
        /// What its arbiter decides by.
        policy: PolicyRecord,
    },
    /// One event and its actions.
    Step {
        /// When, in nanoseconds since the start.
        t: Time,
        /// What happened.
        event: Event,
        /// What was to be done.
        actions: Vec<Action>,
    },
    /// The arbiter decides by other numbers from here on: the settings were read again.
    Policy {
        /// When, in nanoseconds since the start.
        t: Time,
        /// What it decides by.
        policy: PolicyRecord,
    },
    /// A process that is not ours came onto a card, or left it (no bytes). Nothing is decided by this record: what others hold
    /// is an event of its own.
    Stranger {
        /// When, in nanoseconds since the start.
        t: Time,
        /// The card.
        device: DeviceUuid,
        /// The process.
        pid: u32,
        /// Its program.
        program: String,
        /// What it holds.
        bytes: Bytes,
        /// Why it is not managed, as far as can be seen.
        why: String,
    },
    /// The disk tier could not write or read. Nothing is decided by this record.
    Disk {
        /// When, in nanoseconds since the start.
        t: Time,
        /// What could not be done, and why.
        text: String,
    },
    /// Records are missing here.
    Gap {
        /// How many.
        lost: u64,
    },
    /// The file follows another one, which was full.
    Continued,
}

/// [`PolicyConfig`] as data; times in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of PolicyConfig")]
pub struct PolicyRecord {
    pub idle_after: u64,
    pub min_turn: u64,
    pub turn_per_copy: u32,
    #[serde(default)]
    pub turn_owed: u64,
    #[serde(default)]
    pub owed_max: u64,
    #[serde(default)]
    pub preempt: bool,
    #[serde(default)]
    pub preempt_grace: u64,
    #[serde(default)]
    pub low_mark: u32,
    #[serde(default)]
    pub high_mark: u32,
    #[serde(default)]
    pub predict: bool,
    pub alloc_wait: u64,
    pub alloc_wait_max: u64,
    pub retry: u64,
    pub retry_max: u64,
    pub order_timeout: u64,
    pub patience: u64,
    pub starve_after: u64,
    pub out_rate: u64,
    pub in_rate: u64,
}

impl From<&PolicyConfig> for PolicyRecord {
    fn from(config: &PolicyConfig) -> Self {
        // Every field by name: a new one that is missing here would make replays wrong.
        let PolicyConfig {
            idle_after,
            min_turn,
            turn_per_copy,
            turn_owed,
            owed_max,
            preempt,
            preempt_grace,
            low_mark,
            high_mark,
            predict,
            alloc_wait,
            alloc_wait_max,
            retry,
            retry_max,
            order_timeout,
            patience,
            starve_after,
            out_rate,
            in_rate,
        } = config;
        let nanos = |t: &Duration| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX);
        Self {
            idle_after: nanos(idle_after),
            min_turn: nanos(min_turn),
            turn_per_copy: *turn_per_copy,
            turn_owed: nanos(turn_owed),
            owed_max: nanos(owed_max),
            preempt: *preempt,
            preempt_grace: nanos(preempt_grace),
            low_mark: *low_mark,
            high_mark: *high_mark,
            predict: *predict,
            alloc_wait: nanos(alloc_wait),
            alloc_wait_max: nanos(alloc_wait_max),
            retry: nanos(retry),
            retry_max: nanos(retry_max),
            order_timeout: nanos(order_timeout),
            patience: nanos(patience),
            starve_after: nanos(starve_after),
            out_rate: *out_rate,
            in_rate: *in_rate,
        }
    }
}

impl From<&PolicyRecord> for PolicyConfig {
    fn from(record: &PolicyRecord) -> Self {
        Self {
            idle_after: Duration::from_nanos(record.idle_after),
            min_turn: Duration::from_nanos(record.min_turn),
            turn_per_copy: record.turn_per_copy,
            turn_owed: Duration::from_nanos(record.turn_owed),
            owed_max: Duration::from_nanos(record.owed_max),
            preempt: record.preempt,
            preempt_grace: Duration::from_nanos(record.preempt_grace),
            low_mark: record.low_mark,
            high_mark: record.high_mark,
            predict: record.predict,
            alloc_wait: Duration::from_nanos(record.alloc_wait),
            alloc_wait_max: Duration::from_nanos(record.alloc_wait_max),
            retry: Duration::from_nanos(record.retry),
            retry_max: Duration::from_nanos(record.retry_max),
            order_timeout: Duration::from_nanos(record.order_timeout),
            patience: Duration::from_nanos(record.patience),
            starve_after: Duration::from_nanos(record.starve_after),
            out_rate: record.out_rate,
            in_rate: record.in_rate,
        }
    }
}

/// The driver's end of the log.
#[derive(Debug)]
pub(crate) struct EventLog {
    worker: Worker<Vec<u8>>,
    queued: Arc<AtomicU64>,
    dropped: Arc<AtomicU64>,
    line: Vec<u8>,
}

impl EventLog {
    pub(crate) fn start(path: PathBuf, max_bytes: u64, answers: Answers) -> std::io::Result<Self> {
        let queued = Arc::new(AtomicU64::new(0));
        let dropped = Arc::new(AtomicU64::new(0));
        let (queued_there, dropped_there) = (queued.clone(), dropped.clone());
        let worker = Worker::start("ebb-log", true, move |lines| {
            let mut writer = Writer::new(path, max_bytes);
            let mut told = (false, 0);
            while let Some(batch) = next_batch(&lines, &queued_there) {
                writer.lost += dropped_there.swap(0, Ordering::Relaxed);
                writer.write(&batch);
                let news = (writer.trouble.is_some(), writer.total_lost + writer.lost);
                if news != told {
                    told = news;
                    answers.send(FromWorker::Log {
                        trouble: writer.trouble.clone(),
                        lost: news.1,
                    });
                }
            }
            writer.write(&Batch::default());
        })?;
        Ok(Self {
            worker,
            queued,
            dropped,
            line: Vec::new(),
        })
    }

    /// Hands a record to the disk. Never waits.
    pub(crate) fn push(&mut self, record: &Record) {
        self.line.clear();
        let written = serde_json::to_writer(&mut self.line, record).is_ok();
        self.line.push(b'\n');
        let bytes = self.line.len() as u64;
        if !written || self.queued.load(Ordering::Relaxed) + bytes > MAX_QUEUE {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.queued.fetch_add(bytes, Ordering::Relaxed);
        self.worker.send(self.line.clone());
    }
}

#[derive(Debug, Default)]
struct Batch {
    text: Vec<u8>,
    records: u64,
}

/// Everything that is waiting, or `None` at the end.
fn next_batch(lines: &Receiver<Vec<u8>>, queued: &AtomicU64) -> Option<Batch> {
    let mut batch = Batch::default();
    let mut line = lines.recv().ok()?;
    loop {
        queued.fetch_sub(line.len() as u64, Ordering::Relaxed);
        batch.text.append(&mut line);
        batch.records += 1;
        // Bounded, so that a steady stream still reaches the disk.
        if batch.text.len() > 1 << 20 {
            return Some(batch);
        }
        match lines.try_recv() {
            Ok(next) => line = next,
            Err(_) => return Some(batch),
        }
    }
}

/// The disk's end.
#[derive(Debug)]
struct Writer {
    path: PathBuf,
    max_bytes: u64,
    file: Option<(File, u64)>,
    /// Not written, and not marked by a gap record yet.
    lost: u64,
    /// Not written, and marked.
    total_lost: u64,
    trouble: Option<String>,
    retry_at: Option<Instant>,
}

impl Writer {
    fn new(path: PathBuf, max_bytes: u64) -> Self {
        Self {
            path,
            max_bytes,
            file: None,
            lost: 0,
            total_lost: 0,
            trouble: None,
            retry_at: None,
        }
    }

    fn write(&mut self, batch: &Batch) {
        if self.retry_at.is_some_and(|at| Instant::now() < at) {
            self.lost += batch.records;
            return;
        }
        match self.try_write(batch) {
            Ok(()) => {
                self.total_lost += std::mem::take(&mut self.lost);
                (self.trouble, self.retry_at) = (None, None);
            }
            Err(e) => {
                self.lost += batch.records;
                self.trouble = Some(format!("{} cannot be written: {e}", self.path.display()));
                self.retry_at = Some(Instant::now() + RETRY);
                self.file = None;
            }
        }
    }

    fn try_write(&mut self, batch: &Batch) -> std::io::Result<()> {
        if self
            .file
            .as_ref()
            .is_some_and(|(_, length)| *length + batch.text.len() as u64 > self.max_bytes)
        {
            self.file = None;
            rotate(&self.path)?;
        }
        if self.file.is_none() {
            self.file = Some(open(&self.path, self.max_bytes)?);
        }
        let (file, length) = self.file.as_mut().expect("opened above");
        let mut text = Vec::new();
        if self.lost > 0 {
            serde_json::to_writer(&mut text, &Record::Gap { lost: self.lost })?;
            text.push(b'\n');
        }
        text.extend_from_slice(&batch.text);
        if let Err(e) = file.write_all(&text) {
            // No half line stays behind.
            let _ = file.set_len(*length);
            return Err(e);
        }
        *length += text.len() as u64;
        Ok(())
    }
}

/// Where the file is that a log follows.
pub(crate) fn older(path: &Path) -> PathBuf {
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    old.into()
}

fn rotate(path: &Path) -> std::io::Result<()> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
        std::fs::rename(path, older(path))?;
    }
    Ok(())
}

/// Opens the log behind what an earlier daemon wrote. A line that it could not finish is cut off.
fn open(path: &Path, max_bytes: u64) -> std::io::Result<(File, u64)> {
    let options = || {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).append(true).create(true).mode(0o600);
        options
    };
    let mut file = options().open(path)?;
    let mut length = file.metadata()?.len();
    if length > max_bytes {
        rotate(path)?;
        file = options().open(path)?;
        length = file.metadata()?.len();
    }
    if length > 0 {
        let whole = end_of_last_line(&file, length)?;
        if whole < length {
            file.set_len(whole)?;
            length = whole;
        }
    } else if older(path).exists() {
        let mut line = serde_json::to_vec(&Record::Continued)?;
        line.push(b'\n');
        file.write_all(&line)?;
        length = line.len() as u64;
    }
    Ok((file, length))
}

fn end_of_last_line(file: &File, length: u64) -> std::io::Result<u64> {
    let mut end = length;
    let mut piece = vec![0; 64 << 10];
    while end > 0 {
        let start = end.saturating_sub(piece.len() as u64);
        let piece = &mut piece[..usize::try_from(end - start).expect("a piece is small")];
        std::os::unix::fs::FileExt::read_exact_at(file, piece, start)?;
        if let Some(at) = piece.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::Waker;

    fn record(t: u64) -> Record {
        Record::Step {
            t: Time(t),
            event: Event::Tick,
            actions: Vec::new(),
        }
    }

    fn read(path: &Path) -> Vec<Record> {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
            .collect()
    }

    fn batch(t: u64) -> Batch {
        let mut text = serde_json::to_vec(&record(t)).unwrap();
        text.push(b'\n');
        Batch { text, records: 1 }
    }

    #[test]
    fn records_arrive_in_order_behind_those_of_an_earlier_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        // The earlier daemon died in the middle of a line.
        std::fs::write(&path, "{\"record\":\"continued\"}\n{\"record\":\"st").unwrap();
        let (answers, _receiver) = Answers::new(Waker::new().unwrap());
        let mut log = EventLog::start(path.clone(), 1 << 20, answers).unwrap();
        for t in 0..100 {
            log.push(&record(t));
        }
        drop(log);
        let records = read(&path);
        assert_eq!(records[0], Record::Continued);
        assert_eq!(records[1..], (0..100).map(record).collect::<Vec<_>>());
    }

    #[test]
    fn a_full_file_is_followed_by_another_and_two_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        let mut writer = Writer::new(path.clone(), 1000);
        for t in 0..200 {
            writer.write(&batch(t));
        }
        let old = read(&dir.path().join("events.jsonl.old"));
        let new = read(&path);
        assert_eq!((&old[0], &new[0]), (&Record::Continued, &Record::Continued));
        assert_eq!(new.last(), Some(&record(199)));
        for file in ["events.jsonl", "events.jsonl.old"] {
            assert!(
                std::fs::metadata(dir.path().join(file)).unwrap().len() <= 1000,
                "{file}"
            );
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_full_disk_costs_records_and_leaves_a_mark() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events.jsonl");
        // Every write to this device says that the disk is full.
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut writer = Writer::new(path.clone(), 1 << 20);
        writer.write(&batch(1));
        assert!(
            writer.trouble.as_ref().unwrap().contains("No space left"),
            "{:?}",
            writer.trouble
        );
        writer.write(&batch(2));
        assert_eq!(writer.lost, 2);
        std::fs::remove_file(&path).unwrap();
        writer.retry_at = None;
        writer.write(&batch(3));
        assert_eq!(
            (writer.trouble.clone(), writer.lost, writer.total_lost),
            (None, 0, 2)
        );
        assert_eq!(read(&path), vec![Record::Gap { lost: 2 }, record(3)]);
    }

    #[test]
    fn the_policys_numbers_survive_the_file() {
        let config = PolicyConfig {
            turn_per_copy: 7,
            min_turn: Duration::from_millis(123),
            ..PolicyConfig::default()
        };
        assert_eq!(PolicyConfig::from(&PolicyRecord::from(&config)), config);
    }
}
