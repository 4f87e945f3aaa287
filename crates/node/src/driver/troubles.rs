//! What the daemon knows is not as its operator wants it, for `ebb doctor`.

use ebb_protocol::control::Trouble;

use super::Driver;

impl Driver {
    /// All of it, the worst first.
    pub(super) fn troubles(&self) -> Vec<Trouble> {
        let mut troubles = Vec::new();
        let mut add = |found: String, fix: &str| {
            troubles.push(Trouble {
                found,
                fix: fix.into(),
            });
        };
        for device in self.devices.values().filter(|card| card.capacity().is_zero()) {
            add(
                format!(
                    "card {} ({}) has nothing for tasks: all of its {} are kept back",
                    device.index, device.name, device.total
                ),
                "lower `[device] reserve` in ebb.toml",
            );
        }
        if let Some(trouble) = &self.state_trouble {
            add(
                format!("limits and pauses do not survive a restart of the daemon: {trouble}"),
                "make room there, or name another folder: `state_dir` in ebb.toml",
            );
        }
        if let Some(trouble) = &self.log_trouble {
            add(
                format!("the event log is not written: {trouble}"),
                "make room there, or name another file: `[event_log] path` in ebb.toml",
            );
        }
        if let Some(trouble) = &self.cards_trouble {
            add(
                format!("what programs outside ebb hold is not seen: {trouble}"),
                "check `nvml` in ebb.toml, and that the daemon finds libnvidia-ml.so.1",
            );
        }
        troubles.extend(self.rule_troubles());
        troubles
    }
}
