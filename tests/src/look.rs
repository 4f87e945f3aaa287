//! [`Look`]: a Python program that a test asks what it sees of its cards.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use serde_json::Value;

use crate::PATIENCE;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python/look.py");

/// A running program. Killed when dropped.
#[derive(Debug)]
pub struct Look {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Look {
    /// Starts it; the command runs Python.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        command
            .args(["-B", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut child = command
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?} does not start: {e}"));
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (lines_tx, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if lines_tx.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, stdin, lines }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line without waiting for the answer.
    pub fn send(&mut self, line: &str) {
        let _ = writeln!(self.stdin, "{line}").and_then(|()| self.stdin.flush());
    }

    /// The next answer.
    ///
    /// # Panics
    /// If none comes.
    pub fn answer(&mut self) -> Value {
        let line = self
            .lines
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|e| panic!("no answer ({e}); it ended with {:?}", self.child.try_wait()));
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("`{line}` is no answer: {e}"))
    }

    /// Sends a line and waits for the answer.
    pub fn ask(&mut self, line: &str) -> Value {
        self.send(line);
        self.answer()
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
