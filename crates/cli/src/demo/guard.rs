//! [`Guard`]: whatever becomes of the demo, nothing of it stays.
//!
//! A second process, out of reach of the terminal's Ctrl-C, reads from a pipe what the demo starts. When the pipe ends
//! (the demo is done, was interrupted, or was killed) it ends those processes, and only those, and removes the demo's
//! folder. So there is one way to clean up, and it needs nothing of a process that is being killed.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::background::own_command;
use crate::error::{CliError, Result};

/// How long processes get to end by themselves.
const GRACE: Duration = Duration::from_secs(5);

/// The demo's end of the pipe.
#[derive(Debug)]
pub(crate) struct Guard {
    pipe: Option<ChildStdin>,
    process: Child,
}

impl Guard {
    /// Starts the second process, which will remove `folder`.
    pub(super) fn start(folder: &Path) -> Result<Self> {
        let mut command = own_command()?;
        command.arg("demo").arg("--guard").arg(folder);
        // A group of its own: Ctrl-C ends the demo, and the guard then sees the end of its pipe.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let mut process = command
            .spawn()
            .map_err(|error| CliError::failed(format!("cannot start a process: {error}")))?;
        Ok(Self {
            pipe: process.stdin.take(),
            process,
        })
    }

    /// Hands a process over to the guard.
    pub(crate) fn watch(&mut self, pid: u32) {
        self.tell(&format!("watch {pid}"));
    }

    /// The process has ended; its number may go to another now.
    pub(crate) fn forget(&mut self, pid: u32) {
        self.tell(&format!("forget {pid}"));
    }

    fn tell(&mut self, line: &str) {
        if let Some(pipe) = &mut self.pipe {
            let _ = writeln!(pipe, "{line}").and_then(|()| pipe.flush());
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// What the second process does.
pub(super) fn stand(folder: &Path, orders: impl BufRead) {
    let mut watched: BTreeMap<u32, u64> = BTreeMap::new();
    for line in orders.lines().map_while(std::result::Result::ok) {
        match line.split_once(' ') {
            Some(("watch", pid)) => {
                if let Ok(pid) = pid.parse()
                    && let Some(started) = started(pid)
                {
                    watched.insert(pid, started);
                }
            }
            Some(("forget", pid)) => {
                if let Ok(pid) = pid.parse::<u32>() {
                    watched.remove(&pid);
                }
            }
            _ => {}
        }
    }
    for (signal, wait) in [(Signal::TERM, GRACE), (Signal::KILL, GRACE)] {
        for (pid, start) in &watched {
            send(*pid, *start, signal);
        }
        let began = Instant::now();
        while began.elapsed() < wait && watched.iter().any(|(pid, start)| started(*pid) == Some(*start)) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let _ = std::fs::remove_dir_all(folder);
}

fn send(pid: u32, start: u64, signal: Signal) {
    // A number that belongs to another process by now is not ours to end.
    if started(pid) != Some(start) {
        return;
    }
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// When a process started, in ticks since the machine did; `None` if it is gone or only waits to be reaped.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; what follows the last one is fields 3 and on.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn what_was_started_ends_and_what_was_not_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("demo");
        std::fs::create_dir(&inner).unwrap();
        std::fs::write(inner.join("file"), "x").unwrap();
        let sleeper = || Command::new("sleep").arg("600").spawn().unwrap();
        let (mut ours, mut forgotten) = (sleeper(), sleeper());
        let orders = format!(
            "watch {}\nwatch {}\nforget {}\nnonsense\n",
            ours.id(),
            forgotten.id(),
            forgotten.id()
        );
        // Nobody reaps `ours` meanwhile: a process that only waits to be reaped counts as gone.
        stand(&inner, orders.as_bytes());
        assert!(!ours.wait().unwrap().success());
        assert!(
            forgotten.try_wait().unwrap().is_none(),
            "the other process goes on"
        );
        assert!(!inner.exists());
        forgotten.kill().unwrap();
        forgotten.wait().unwrap();
    }

    #[test]
    fn a_number_that_was_given_to_another_process_is_left_alone() {
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        let start = started(other.id()).unwrap();
        send(other.id(), start + 1, Signal::KILL);
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(started(other.id()), None);
    }
}
