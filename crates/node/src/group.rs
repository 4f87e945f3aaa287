//! [`Group`]: a command as a process group of its own, so that all that it starts can be ended with it.
//!
//! ```text
//! start ──> runs ──> is over ──> wait
//!             └─ kill, also once it is over: what it left in the background ─┘
//! ```
//! Until it is waited for, its number, which is its group's as well, is nobody else's.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// A command and all that it started. It goes on when this is dropped.
#[derive(Debug)]
pub struct Group(Child);

impl Group {
    /// Starts it. Signals of a terminal are for others.
    ///
    /// # Errors
    /// The system's.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        command.process_group(0).spawn().map(Self)
    }

    /// Its input, if that is a pipe and was not taken.
    pub fn input(&mut self) -> Option<ChildStdin> {
        self.0.stdin.take()
    }

    /// Whether the command has ended. It is not waited for here.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(Pid::from_child(&self.0)), look), Ok(None))
    }

    /// Ends at once what is left of it.
    pub fn kill(&self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
    }

    /// Waits for the command, and says how it ended.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(mut self) -> io::Result<ExitStatus> {
        self.0.wait()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn what_a_command_started_in_the_background_ends_with_it() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo $!"]).stdout(Stdio::piped());
        let mut leader = Group::start(&mut command).unwrap();
        while !leader.is_over() {
            std::thread::yield_now();
        }
        assert!(leader.is_over(), "and again: it was not waited for");
        leader.kill();
        // The pipe's end: nobody is left who holds it.
        let mut said = String::new();
        leader.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(leader.wait().unwrap().success());
    }
}
