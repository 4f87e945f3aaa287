//! The invariants, as a check.

use ebb_units::Bytes;

use crate::Arbiter;

impl Arbiter {
    /// Verifies every invariant.
    ///
    /// - On each device, leases, overheads and unmanaged memory fit the capacity, unless overhead, unmanaged memory,
    ///   the capacity or an adopted client made it otherwise and it has not been under since.
    /// - On each device, each task is within its limit, with the same exception for a limit that was lowered.
    /// - Who is gathered for is there, waits and is not paused.
    /// - No client is in a task or on a device that is not there; no ask is open for nothing.
    /// - Guarantees never pass requests.
    ///
    /// # Errors
    /// What is wrong, for a person.
    pub fn check(&self) -> Result<(), String> {
        for (id, c) in &self.clients {
            if !self.tasks.contains_key(&c.task) || !self.devices.contains_key(&c.device) {
                return Err(format!("{id} belongs to nothing"));
            }
            if c.asks.iter().any(|a| a.left.is_zero()) {
                return Err(format!("{id} has an ask for nothing"));
            }
            if c.incoming > c.lease {
                return Err(format!("{id} gets {} back in {} of lease", c.incoming, c.lease));
            }
            let mut asks: Vec<_> = c.asks.iter().map(|a| a.id).collect();
            asks.sort_unstable();
            asks.dedup();
            if asks.len() != c.asks.len() {
                return Err(format!("{id} has an ask twice"));
            }
        }
        for (id, d) in &self.devices {
            let used = self.used(*id);
            if used > d.capacity && !d.excused {
                return Err(format!("{id} has {} but {used} are given out", d.capacity));
            }
            if let Some(g) = d.gathering {
                match self.clients.get(&g) {
                    None => return Err(format!("{id} is gathered for {g}, which is gone")),
                    Some(c) if c.device != *id => {
                        return Err(format!("{id} is gathered for {g}, which is elsewhere"));
                    }
                    Some(c) if c.asks.is_empty() => {
                        return Err(format!("{id} is gathered for {g}, which does not wait"));
                    }
                    Some(c) if self.task_of(c).paused => {
                        return Err(format!("{id} is gathered for {g}, which is paused"));
                    }
                    Some(_) => {}
                }
            }
            let sums = self.sums(*id);
            for (task, t) in &self.tasks {
                let held = sums.get(task).map_or(Bytes::ZERO, |s| s.held);
                if held > t.limit() && !t.excused.contains(id) {
                    return Err(format!(
                        "{task} holds {held} on {id}, over its limit of {}",
                        t.limit()
                    ));
                }
                if t.guaranteed(*id) > t.spec.request {
                    return Err(format!("{task} is guaranteed more than it requested on {id}"));
                }
            }
        }
        Ok(())
    }
}
