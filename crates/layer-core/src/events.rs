//! What happened lately, for `ebb doctor`. Nothing is printed: the terminal is the program's.

use std::collections::VecDeque;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How many events are kept.
const KEPT: usize = 256;

/// A fixed ring of the latest events, and a file if the environment names one.
#[derive(Debug)]
pub(crate) struct Events {
    start: Instant,
    log: Option<PathBuf>,
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    latest: VecDeque<(Duration, String)>,
    total: u64,
    /// The same text over and over is one entry with a count.
    repeats: u64,
}

impl Events {
    pub(crate) fn new(log: Option<PathBuf>) -> Self {
        Self {
            start: Instant::now(),
            log,
            ring: Mutex::default(),
        }
    }

    /// Remembers an event. Taken last of all locks.
    pub(crate) fn note(&self, text: impl Into<String>) {
        let text = text.into();
        let at = self.start.elapsed();
        if let Some(path) = &self.log {
            // Opened anew each time: nothing to close after a fork, nothing to keep after a rotation. A full disk is
            // not the program's problem.
            if let Ok(mut file) = std::fs::OpenOptions::new().append(true).create(true).open(path) {
                let line = format!(
                    "{:.6} ebb[{}] {text}\n",
                    at.as_secs_f64(),
                    rustix::process::getpid().as_raw_nonzero()
                );
                let _ = file.write_all(line.as_bytes());
            }
        }
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.total += 1;
        if ring.latest.back().is_some_and(|(_, last)| *last == text) {
            ring.repeats += 1;
            return;
        }
        if ring.repeats > 0 {
            let repeats = std::mem::take(&mut ring.repeats);
            if let Some((_, last)) = ring.latest.back_mut() {
                last.push_str(&format!(" (and {repeats} times more)"));
            }
        }
        if ring.latest.len() == KEPT {
            ring.latest.pop_front();
        }
        ring.latest.push_back((at, text));
    }

    /// The latest events, oldest first: time since the start and text.
    pub(crate) fn latest(&self) -> (u64, Vec<(Duration, String)>) {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        (ring.total, ring.latest.iter().cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_bounded_and_repeats_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let events = Events::new(Some(log.clone()));
        for _ in 0..3 {
            events.note("again");
        }
        for i in 0..KEPT {
            events.note(format!("event {i}"));
        }
        let (total, latest) = events.latest();
        assert_eq!((total, latest.len()), (KEPT as u64 + 3, KEPT));
        assert_eq!(latest[0].1, "event 0");
        let text = std::fs::read_to_string(log).unwrap();
        assert_eq!(text.lines().count(), KEPT + 3);
        let events = Events::new(None);
        events.note("a");
        events.note("a");
        events.note("b");
        assert_eq!(events.latest().1[0].1, "a (and 1 times more)");
    }
}
