//! [`CliError`]: what went wrong and what to do, in the one shape that people see.

use std::fmt;

use ebb_protocol::control::{ControlError, Failure};

/// Exit status of a failure that may be gone the next time.
pub(crate) const FAILED: u8 = 1;
/// Exit status of something that has to be changed first: an argument, a file, the machine.
pub(crate) const USAGE: u8 = 2;

/// A failure of the command line, printed as `error: message` and `  fix: what to do`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CliError {
    /// What was wrong, and where.
    pub message: String,
    /// What to do about it.
    pub fix: Option<String>,
    /// The exit status.
    pub status: u8,
}

/// What every command returns.
pub(crate) type Result<T> = std::result::Result<T, CliError>;

impl CliError {
    /// A failure of the moment.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            fix: None,
            status: FAILED,
        }
    }

    /// Something that the user has to change.
    pub(crate) fn usage(message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            fix: Some(fix.into()),
            status: USAGE,
        }
    }

    /// The same failure with another exit status.
    pub(crate) fn with_status(mut self, status: u8) -> Self {
        self.status = status;
        self
    }

    /// The same failure with advice.
    pub(crate) fn with_fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// Whether the reader of our output has gone, which is no failure worth words.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        self.message == BROKEN_PIPE
    }
}

const BROKEN_PIPE: &str = "the reader of the output has gone";

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        if let Some(fix) = &self.fix {
            write!(f, "\n  fix: {fix}")?;
        }
        Ok(())
    }
}

impl From<Failure> for CliError {
    fn from(failure: Failure) -> Self {
        Self {
            message: failure.message,
            fix: failure.fix,
            status: if failure.usage { USAGE } else { FAILED },
        }
    }
}

impl From<ControlError> for CliError {
    fn from(error: ControlError) -> Self {
        let detail = std::error::Error::source(&error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        Self::failed(format!("{error}{detail}"))
            .with_fix("see the daemon's log (`ebb doctor` says where it is), then try again")
    }
}

impl From<std::io::Error> for CliError {
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            Self::failed(BROKEN_PIPE)
        } else {
            Self::failed(format!("cannot write the output: {error}"))
        }
    }
}

impl From<serde_json::Error> for CliError {
    fn from(error: serde_json::Error) -> Self {
        match error.io_error_kind() {
            Some(kind) => std::io::Error::from(kind).into(),
            None => Self::failed(format!("cannot write JSON: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_and_what_to_do() {
        let error = CliError::usage("the request is above the limit", "lower --request");
        assert_eq!(
            error.to_string(),
            "error: the request is above the limit\n  fix: lower --request"
        );
        assert_eq!(error.status, 2);
        assert_eq!(CliError::failed("busy").to_string(), "error: busy");
    }

    #[test]
    fn the_daemons_refusals_keep_their_status() {
        let failure = Failure {
            message: "m".into(),
            fix: None,
            usage: true,
        };
        assert_eq!(CliError::from(failure.clone()).status, USAGE);
        assert_eq!(
            CliError::from(Failure {
                usage: false,
                ..failure
            })
            .status,
            FAILED
        );
    }
}
