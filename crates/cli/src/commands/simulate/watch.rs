//! What is being simulated, for a person who waits for it: one line on standard error, gone when the result is there.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Says what is done and for how long, as long as it lives, if standard error is a terminal.
pub(super) struct Watch(Option<ProgressBar>);

impl Watch {
    pub(super) fn new(doing: impl Into<String>) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}, {elapsed}") {
            bar.set_style(style);
        }
        bar.set_message(doing.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(Some(bar))
    }

    /// What is done from here on.
    pub(super) fn say(&self, doing: impl Into<String>) {
        if let Some(bar) = &self.0 {
            bar.set_message(doing.into());
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
