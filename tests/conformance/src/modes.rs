//! The ways in which every behaviour is run, and the tool that is looked at.

use std::path::PathBuf;

/// What switches ebb's strict-capacity mode on.
pub(crate) const ENV_STRICT: &str = "EBB_STRICT";

/// A way to run a behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Mode {
    /// Without any interposer: the reference.
    Plain,
    /// Under ebb.
    Ebb,
    /// Under ebb, with all memory taken off the card between every two calls of the driver.
    Evicting,
    /// Under ebb in its strict-capacity mode.
    Strict,
    /// Under another preloaded library.
    Preload,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Ebb => "ebb",
            Self::Evicting => "evicting",
            Self::Strict => "strict",
            Self::Preload => "preload",
        }
    }
}

/// What is looked at.
#[derive(Clone, Debug)]
pub(crate) enum Tool {
    /// The driver alone.
    Nothing,
    /// ebb, by its command and library.
    Ebb {
        /// The command line.
        ebb: PathBuf,
        /// The preloaded library; `None`: the one that the command finds.
        library: Option<PathBuf>,
        /// Whether it has the strict-capacity mode.
        strict: bool,
    },
    /// Any other preloaded library.
    Other {
        /// The library, or several as the loader takes them.
        preload: String,
        /// What it needs in the environment.
        env: Vec<(String, String)>,
    },
}

impl Tool {
    /// The columns of the table: the ways that this tool has, and those that it has not.
    pub(crate) fn modes(&self) -> &'static [Mode] {
        match self {
            Self::Nothing => &[Mode::Plain],
            Self::Ebb { .. } => &[Mode::Plain, Mode::Ebb, Mode::Evicting, Mode::Strict],
            Self::Other { .. } => &[Mode::Plain, Mode::Preload, Mode::Evicting, Mode::Strict],
        }
    }
}
