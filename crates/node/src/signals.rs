//! [`Signals`]: signals that a process reads when it has time for them, instead of being ended by them.
//!
//! A process that has a program as its child must not be ended by what is meant for both: it tells the program, waits for it, and
//! ends with the program's status. What was ignored or blocked before stays so (`nohup`).

use std::io;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Signals of this process, from [`Signals::take`] on.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
    taken: Vec<i32>,
}

/// A signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// Which.
    pub number: i32,
    /// The kernel sent it, as a terminal does: to all of its foreground programs, the child among them.
    pub by_kernel: bool,
}

impl Signals {
    /// From now on this thread, and threads that it starts, are not interrupted by these signals, as far as they were before. To
    /// be called before the process starts other threads.
    ///
    /// # Errors
    /// The system's, if there is no descriptor to be had.
    pub fn take(wanted: &[i32]) -> io::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kept = mask_of(&status, "SigIgn:") | mask_of(&status, "SigBlk:");
        let taken: Vec<i32> = wanted
            .iter()
            .copied()
            .filter(|number| (1..=64).contains(number) && kept & (1 << (number - 1)) == 0)
            .collect();
        let fd = crate::sys::signals(&taken)?;
        Ok(Self { fd, taken })
    }

    /// The next that came, if any.
    #[must_use]
    pub fn next(&self) -> Option<Told> {
        let (number, code) = crate::sys::next_signal_with_code(&self.fd)?;
        Some(Told {
            number,
            // Those of programs are 0 and less.
            by_kernel: code > 0,
        })
    }

    /// Waits until one comes, or so long.
    pub fn wait(&self, most: Duration) {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let most = Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(most.subsec_nanos()),
        };
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, Some(&most));
    }

    /// Has a program that is started hear what was taken from this process.
    pub fn give_back<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        crate::sys::unblocked(command, self.taken.clone())
    }
}

/// A mask of signals, as the kernel tells it.
fn mask_of(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a thread of its own: the mask is the thread's, and other tests have theirs.
    #[test]
    fn signals_are_read_and_a_child_has_its_own() {
        let taken = std::thread::spawn(|| {
            let signals = Signals::take(&[libc::SIGUSR2, libc::SIGCHLD]).unwrap();
            assert_eq!(signals.next(), None);
            let script = "grep SigBlk: /proc/self/status; kill -USR2 $$; sleep 60";
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdout(std::process::Stdio::piped());
            let child = signals.give_back(&mut command).spawn().unwrap();
            let output = child.wait_with_output().unwrap();
            use std::os::unix::process::ExitStatusExt;
            assert_eq!(
                output.status.signal(),
                Some(libc::SIGUSR2),
                "it is not blocked there"
            );
            let text = String::from_utf8(output.stdout).unwrap();
            mask_of(&text, "SigBlk:") & (1 << (libc::SIGUSR2 - 1))
        });
        assert_eq!(taken.join().unwrap(), 0);
    }

    #[test]
    fn masks_are_read() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000001\n";
        assert_eq!(mask_of(status, "SigIgn:"), 1, "SIGHUP, as nohup has it");
        assert_eq!(mask_of(status, "SigCgt:"), 0);
    }
}
