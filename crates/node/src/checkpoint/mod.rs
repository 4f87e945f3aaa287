//! The driver's own checkpoint of other processes, by a helper process: `ebb` once more, which loads the driver and does what it is told.
//!
//! Not in the daemon: the driver stays out of the process that must not hang, and a call that never returns is ended by ending the helper. The
//! helper runs as the user whose processes it is told of.
//!
//! ```text
//! daemon ── down 2000 4711 4712 ──> helper        lock each, then checkpoint each
//!        <── locked 4711 1200345 ──               one line a step: what, whom, nanoseconds
//!        <── checkpointed 4711 331000123 ──
//!        <── done ──                              or `failed PID CALL CODE NAME`, after everything is undone
//!        ── up 4711 4712 ──>                      restore each, then unlock each, whatever state each is in
//!        ── in 4711 4712 ──>                      the same, but who runs is not locked once more to be sure of it
//!        ── look 4711 ──>     <── state 4711 2 ──
//! ```
//! The first line of the helper is `ready`, or `unable` and why. It ends when its input does, after the command that it is at, and with the
//! daemon at once: a call that is under way then may be carried out later, and the next helper sees to that.

#[allow(unsafe_code, reason = "calls into a foreign library")]
mod driver;
mod helper;
mod spawn;

pub use helper::run;
pub(crate) use spawn::Helper;

use ebb_abi::CUresult;

/// The hidden command of `ebb` that is a helper.
pub const COMMAND: &str = "checkpoint-helper";

/// A line of a helper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// It can do what it is told.
    Ready,
    /// It cannot: why.
    Unable(String),
    /// A step is done: what, whom, how long it took in nanoseconds.
    Step(String, u32, u64),
    /// The state of a process, as the driver numbers it.
    State(u32, i64),
    /// The command is carried out.
    Done,
    /// It is not, and undone as far as that went: why, and whose fault it is.
    Failed(u32, String),
    /// A step of undoing failed: that process is in neither state for certain.
    Stuck(u32, String),
}

impl Line {
    /// Reads a line. `None` if it is none.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let two = || {
            let (pid, rest) = rest.split_once(' ')?;
            Some((pid.parse::<u32>().ok()?, rest))
        };
        Some(match word {
            "ready" => Self::Ready,
            "unable" => Self::Unable(rest.into()),
            "done" => Self::Done,
            "locked" | "checkpointed" | "restored" | "unlocked" => {
                let (pid, nanos) = two()?;
                Self::Step(word.into(), pid, nanos.parse().ok()?)
            }
            "state" => {
                let (pid, state) = two()?;
                Self::State(pid, state.parse().ok()?)
            }
            "failed" | "stuck" => {
                let (pid, why) = two()?;
                if word == "failed" {
                    Self::Failed(pid, why.into())
                } else {
                    Self::Stuck(pid, why.into())
                }
            }
            _ => return None,
        })
    }
}

/// What a driver that refuses means, for a person.
fn meaning(code: CUresult) -> &'static str {
    match code {
        CUresult::ERROR_NOT_SUPPORTED => "the driver does not checkpoint such a process",
        CUresult::ERROR_NOT_READY => "its work on the GPU did not end in time",
        CUresult::ERROR_OUT_OF_MEMORY => "there is no room for it",
        CUresult::ERROR_INVALID_VALUE | CUresult::ERROR_NOT_INITIALIZED => "the driver knows no such process",
        CUresult::ERROR_ILLEGAL_STATE => "it is not in the state for that",
        _ => "the driver refused",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_read_back() {
        assert_eq!(Line::parse("ready"), Some(Line::Ready));
        assert_eq!(
            Line::parse("unable no such file"),
            Some(Line::Unable("no such file".into()))
        );
        assert_eq!(
            Line::parse("checkpointed 4711 12"),
            Some(Line::Step("checkpointed".into(), 4711, 12))
        );
        assert_eq!(Line::parse("state 7 2"), Some(Line::State(7, 2)));
        assert_eq!(
            Line::parse("failed 7 a b c"),
            Some(Line::Failed(7, "a b c".into()))
        );
        for bad in ["", "state x 2", "locked 7", "locked 7 x", "failed", "hello"] {
            assert_eq!(Line::parse(bad), None, "{bad}");
        }
    }
}
