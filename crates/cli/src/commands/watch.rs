//! What is going on, for a person who waits for it: one line on standard error, gone when the result is there.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Says what is done as long as it lives, if standard error is a terminal.
pub(super) struct Watch(ProgressBar);

impl Watch {
    pub(super) fn new(doing: impl Into<String>) -> Self {
        // Hidden unless stderr is a terminal.
        let bar = ProgressBar::new_spinner().with_message(doing.into());
        // The first picture comes with the first tick: what is done at once shows nothing.
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// The same, and for how long already.
    pub(super) fn timed(doing: impl Into<String>) -> Self {
        let watch = Self::new(doing);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}, {elapsed}") {
            watch.0.set_style(style);
        }
        watch
    }

    /// What is done from here on.
    pub(super) fn say(&self, doing: impl Into<String>) {
        self.0.set_message(doing.into());
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
