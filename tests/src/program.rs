//! [`Program`]: a `gpu-script` that a test talks to, line by line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use ebb_units::Bytes;

use crate::PATIENCE;

/// What a script answered to one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It worked; the rest of the line.
    Ok(String),
    /// The driver's error code.
    Err(u32),
}

/// A running `gpu-script`. Killed when dropped.
#[derive(Debug)]
pub struct Program {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Program {
    /// Starts it. Its stderr must stay empty: [`Program::finish`] checks.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit());
        let mut child = command
            .spawn()
            .unwrap_or_else(|e| panic!("{command:?} does not start: {e}"));
        let stdin = child.stdin.take();
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

    /// Its process id (`ebb run` becomes the program, so this is the program's).
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line without waiting for the answer.
    pub fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("not finished");
        let _ = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
    }

    /// The next answer, if one arrives within `wait`; `None` also if the program ended.
    pub fn poll(&mut self, wait: std::time::Duration) -> Option<Reply> {
        match self.lines.recv_timeout(wait) {
            Ok(line) => Some(parse(&line)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => None,
        }
    }

    /// The next answer.
    ///
    /// # Panics
    /// If none arrives in time.
    pub fn answer(&mut self) -> Reply {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => parse(&line),
            Err(e) => panic!(
                "the program gave no answer ({e}); it ended with {:?}",
                self.child.try_wait()
            ),
        }
    }

    /// Sends a line and waits for the answer.
    pub fn say(&mut self, line: &str) -> Reply {
        self.send(line);
        self.answer()
    }

    /// Sends a line that must work; the words of the answer as numbers.
    ///
    /// # Panics
    /// If it did not work.
    pub fn ok(&mut self, line: &str) -> Vec<u64> {
        match self.say(line) {
            Reply::Ok(rest) => rest
                .split_whitespace()
                .map(|word| word.parse().expect("a number"))
                .collect(),
            Reply::Err(code) => panic!("`{line}` failed with driver error {code}"),
        }
    }

    /// Allocates and fills `name`.
    pub fn hold(&mut self, name: &str, bytes: Bytes, seed: u64) {
        self.ok(&format!("alloc {name} {}", bytes.0));
        self.ok(&format!("fill {name} {seed}"));
    }

    /// The count of wrong words in `name`.
    pub fn wrong(&mut self, name: &str, seed: u64) -> u64 {
        self.ok(&format!("check {name} {seed}"))[0]
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends its input and waits for its end.
    ///
    /// # Panics
    /// If it does not end in time.
    pub fn finish(mut self) -> ExitStatus {
        drop(self.stdin.take());
        crate::eventually("the program ends", || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            other => Err(format!("{other:?}")),
        })
    }
}

fn parse(line: &str) -> Reply {
    match line.split_once(' ').unwrap_or((line, "")) {
        ("ok", rest) => Reply::Ok(rest.into()),
        ("err", code) => Reply::Err(code.parse().expect("a driver code")),
        _ => panic!("`{line}` is no answer of gpu-script"),
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}
