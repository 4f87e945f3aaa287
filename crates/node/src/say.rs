//! What the daemon tells people: lines on stderr, with a level.
//!
//! Under systemd each line starts with the priority that the journal understands. Tokens are never printed: nothing
//! that is passed here has one.

use std::io::Write;
use std::sync::atomic::{AtomicU8, Ordering};

/// How much a line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something does not work.
    Error = 0,
    /// Something works less well than it should.
    Warn = 1,
    /// What an operator wants to have in the log.
    Info = 2,
    /// Everything.
    Debug = 3,
}

impl Level {
    /// Reads a word such as `EBB_LOG` or the config file hold.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Some(match word {
            "error" => Self::Error,
            "warn" => Self::Warn,
            "info" => Self::Info,
            "debug" => Self::Debug,
            _ => return None,
        })
    }

    fn word(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);

/// Lines above this level are not printed from now on.
pub fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

/// Prints a line. A stderr that is gone or full is not worth dying for.
pub(crate) fn say(level: Level, text: std::fmt::Arguments<'_>) {
    if level as u8 > LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let line = if journal {
        // syslog: 3 error, 4 warning, 6 information, 7 debugging
        let priority = [3, 4, 6, 7][level as usize];
        format!("<{priority}>{text}\n")
    } else {
        format!("ebb daemon: {}: {text}\n", level.word())
    };
    let _ = std::io::stderr().write_all(line.as_bytes());
}

macro_rules! error { ($($t:tt)*) => { $crate::say::say($crate::say::Level::Error, format_args!($($t)*)) }; }
macro_rules! warning { ($($t:tt)*) => { $crate::say::say($crate::say::Level::Warn, format_args!($($t)*)) }; }
macro_rules! info { ($($t:tt)*) => { $crate::say::say($crate::say::Level::Info, format_args!($($t)*)) }; }
macro_rules! debug { ($($t:tt)*) => { $crate::say::say($crate::say::Level::Debug, format_args!($($t)*)) }; }
pub(crate) use {debug, error, info, warning};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_read_back() {
        for level in [Level::Error, Level::Warn, Level::Info, Level::Debug] {
            assert_eq!(Level::from_word(level.word()), Some(level));
        }
        assert_eq!(Level::from_word("loud"), None);
    }
}
