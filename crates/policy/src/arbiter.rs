//! [`Arbiter`]: the entry points.

use ebb_units::{DeviceId, TaskId};

use crate::{Action, Charged, Event, PolicyConfig, Time, View};

/// The arbiter of one node.
#[derive(Clone, Debug)]
pub struct Arbiter {
    config: PolicyConfig,
}

impl Arbiter {
    /// An arbiter that knows no device yet.
    #[must_use]
    pub fn new(config: PolicyConfig) -> Self {
        Self { config }
    }

    /// What it decides by.
    #[must_use]
    pub fn config(&self) -> &PolicyConfig {
        &self.config
    }

    /// Takes in one event and says what is to be done.
    pub fn handle(&mut self, now: Time, event: &Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.handle_into(now, event, &mut actions);
        actions
    }

    /// Like [`Self::handle`], appending to a buffer.
    pub fn handle_into(&mut self, _now: Time, _event: &Event, _actions: &mut Vec<Action>) {}

    /// When [`Event::Tick`] is due, if nothing else happens before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        None
    }

    /// Everything, for listings.
    #[must_use]
    pub fn snapshot(&self) -> View {
        View::default()
    }

    /// What a task has on a device.
    #[must_use]
    pub fn charged(&self, _task: TaskId, _device: DeviceId) -> Charged {
        Charged::default()
    }

    /// Verifies every invariant.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        Ok(())
    }
}
