//! [`Server`]: a worker program that waits for commands, and its answers.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::demo::guard::Guard;
use crate::error::{CliError, Result};

/// A worker that waits for commands. Dropped: killed.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// A line that says what went wrong.
#[derive(Debug, Deserialize)]
struct Refusal {
    error: String,
    #[serde(default)]
    out_of_memory: bool,
}

/// Times in seconds, as `launch` and `alloc` answer.
#[derive(Debug, Deserialize)]
pub(super) struct Each {
    /// One of each round.
    pub each: Vec<f64>,
}

/// What `touch` and `rewrite` answer.
#[derive(Debug, Deserialize)]
pub(super) struct Took {
    /// How long.
    pub seconds: f64,
}

/// What `check` answers.
#[derive(Debug, Deserialize)]
pub(super) struct Checked {
    /// Words that were not as written.
    pub wrong: u64,
}

/// What `hold` answers.
#[derive(Debug, Deserialize)]
pub(super) struct Held {
    /// Bytes.
    pub held: u64,
}

/// What `link` answers: seconds per copy.
#[derive(Debug, Deserialize)]
pub(super) struct Link {
    /// From the card.
    pub out: Vec<f64>,
    /// To the card.
    #[serde(rename = "in")]
    pub back: Vec<f64>,
    /// Both at once.
    pub both: Vec<f64>,
}

/// What `peer` answers: seconds per copy between two cards; nothing if there is no second one in reach.
#[derive(Debug, Deserialize)]
pub(super) struct PeerLink {
    /// How many cards the program sees.
    pub cards: u32,
    /// To the second card.
    pub out: Vec<f64>,
    /// From it.
    #[serde(rename = "in")]
    pub back: Vec<f64>,
}

impl Server {
    /// Starts it. It is ready when it answers.
    pub(super) fn start(mut command: Command, guard: &mut Guard) -> Result<Self> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .process_group(0);
        let mut child = command
            .spawn()
            .map_err(|error| CliError::failed(format!("cannot start a worker: {error}")))?;
        guard.watch(child.id());
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Ok(Self {
            orders: child.stdin.take(),
            answers,
            child,
        })
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command and waits for its answer.
    pub(super) fn ask<T: DeserializeOwned>(&mut self, line: &str) -> Result<T> {
        let dead = || CliError::failed(format!("a worker ended before it answered `{line}`"));
        let orders = self.orders.as_mut().ok_or_else(dead)?;
        writeln!(orders, "{line}")
            .and_then(|()| orders.flush())
            .map_err(|_| dead())?;
        let mut answer = String::new();
        if self.answers.read_line(&mut answer).map_err(|_| dead())? == 0 {
            return Err(dead());
        }
        if let Ok(refusal) = serde_json::from_str::<Refusal>(&answer) {
            let error = CliError::failed(format!("`{line}`: {}", refusal.error));
            return Err(if refusal.out_of_memory {
                error.with_fix("lower --bytes, or end what else runs on the card")
            } else {
                error
            });
        }
        Ok(serde_json::from_str(&answer)?)
    }

    /// Lets it end by itself; how long that took.
    pub(super) fn end(mut self, guard: &mut Guard) -> Result<Duration> {
        let began = Instant::now();
        drop(self.orders.take());
        let status = self
            .child
            .wait()
            .map_err(|error| CliError::failed(format!("cannot wait for a worker: {error}")))?;
        guard.forget(self.child.id());
        if status.success() {
            Ok(began.elapsed())
        } else {
            Err(CliError::failed(format!("a worker ended with {status}")))
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
