//! The daemon's end of a helper.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};

use rustix::process::{Pid, PidfdFlags, Signal};

use super::{COMMAND, Line};
use crate::worker::{Answers, FromWorker};

/// A helper process. Ended when dropped: by the end of its input, so that a call that is under way is finished. It does not outlive the
/// thread that started it, which is the daemon's for as long as there is one.
#[derive(Debug)]
pub(crate) struct Helper {
    input: ChildStdin,
    pidfd: OwnedFd,
}

impl Helper {
    /// Starts one that speaks as `id`, as that user and group if the daemon may choose. What it says comes by `answers`, a line at a
    /// time, and its end as nothing. Making a process takes about a millisecond.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start(
        program: &Path,
        id: u64,
        owner: Option<(u32, u32)>,
        answers: Answers,
    ) -> std::io::Result<Self> {
        let mut command = Command::new(program);
        command
            .arg(COMMAND)
            .arg(std::process::id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // It sees every card, whatever the daemon was told to see.
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("LD_PRELOAD")
            // Signals of a terminal are for the daemon.
            .process_group(0);
        if let Some((uid, gid)) = owner {
            command.uid(uid).gid(gid);
        }
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(pid), Some(input), Some(output)) = (pid, input, output) else {
            return Err(std::io::Error::other("the helper has no pipes"));
        };
        // Nobody has waited for it yet: the number is still its own.
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
        std::thread::Builder::new()
            .name("ebb-checkpoint".into())
            .spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Some(line) = Line::parse(&line) {
                        answers.send(FromWorker::Helper {
                            helper: id,
                            line: Some(line),
                        });
                    }
                }
                let _ = child.wait();
                answers.send(FromWorker::Helper {
                    helper: id,
                    line: None,
                });
            })?;
        Ok(Self { input, pidfd })
    }

    /// Tells it something. A helper that is dead is heard of by its end.
    pub(crate) fn tell(&mut self, line: &str) {
        // Commands are far shorter than a pipe holds, and one is under way at a time.
        let _ = writeln!(self.input, "{line}");
    }

    /// Ends it at once, also amid a call.
    pub(crate) fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }
}
