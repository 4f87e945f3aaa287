//! [`Job`]: one run of the worker program, and what it tells.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;

use serde::Deserialize;

use super::guard::Guard;
use crate::error::{CliError, Result};

/// The worker's exit status when the card had no room.
pub(super) const OUT_OF_MEMORY: i32 = 3;

/// A line of the worker.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// It has its memory, filled.
    Holding {
        /// How much.
        bytes: u64,
    },
    /// A step is done.
    Step {
        /// Which, from 1.
        step: u32,
        /// Words that were wrong.
        mismatches: u64,
        /// How long it took.
        seconds: f64,
    },
    /// All steps are done, and the last check.
    Done {
        /// Words that were wrong in all.
        mismatches: u64,
        /// How long it all took.
        seconds: f64,
    },
}

/// worker --what happened--> demo
#[derive(Debug)]
pub(super) enum News {
    /// The job of this number said something.
    Said(usize, Event),
    /// The job of this number has closed its output: it ends, or has ended.
    Ended(usize),
}

/// A running worker. Dropped: killed.
#[derive(Debug)]
pub(super) struct Job {
    child: Child,
    errors: Option<std::thread::JoinHandle<String>>,
}

impl Job {
    /// Starts it; its lines go to `news_tx` with `number`.
    pub(super) fn start(
        mut command: Command,
        number: usize,
        news_tx: Sender<News>,
        guard: &mut Guard,
    ) -> Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command
            .spawn()
            .map_err(|error| CliError::failed(format!("cannot start a job: {error}")))?;
        guard.watch(child.id());
        let stdout = child.stdout.take().expect("piped");
        let mut stderr = child.stderr.take().expect("piped");
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::result::Result::ok) {
                if let Ok(event) = serde_json::from_str(&line)
                    && news_tx.send(News::Said(number, event)).is_err()
                {
                    return;
                }
            }
            let _ = news_tx.send(News::Ended(number));
        });
        let errors = std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stderr.by_ref().take(64 << 10).read_to_end(&mut text);
            // What is beyond that is read away: a full pipe would stop the job.
            let _ = std::io::copy(&mut stderr, &mut std::io::sink());
            String::from_utf8_lossy(&text).trim().to_owned()
        });
        Ok(Self {
            child,
            errors: Some(errors),
        })
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end. The status, and what it wrote to stderr.
    pub(super) fn finish(&mut self, guard: &mut Guard) -> Result<(ExitStatus, String)> {
        let status = self
            .child
            .wait()
            .map_err(|error| CliError::failed(format!("cannot wait for a job: {error}")))?;
        guard.forget(self.child.id());
        let errors = self
            .errors
            .take()
            .and_then(|thread| thread.join().ok())
            .unwrap_or_default();
        Ok((status, errors))
    }

    /// Stops it, as a user would.
    pub(super) fn stop(&mut self, guard: &mut Guard) -> Result<()> {
        let _ = self.child.kill();
        self.finish(guard).map(drop)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workers_lines_are_understood() {
        let read = |text: &str| serde_json::from_str::<Event>(text);
        assert!(matches!(
            read(r#"{"event":"holding","bytes":7,"blocks":2,"seconds":0.1}"#),
            Ok(Event::Holding { bytes: 7 })
        ));
        let step = read(r#"{"event":"step","step":3,"steps":9,"mismatches":1,"seconds":0.5}"#);
        assert!(matches!(
            step,
            Ok(Event::Step {
                step: 3,
                mismatches: 1,
                ..
            })
        ));
        assert!(read(r#"{"event":"other"}"#).is_err());
    }
}
