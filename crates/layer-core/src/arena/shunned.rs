//! Cards that a copy failed to or from: the link may be lost, so nothing goes there for a while, longer each time.
//!
//! ```text
//!          failed                 the pause is over
//!  open ──────────> shunned ──────────────────────────> open, on trial ── worked ──> open
//!                      ^                                    │ failed: the next pause is twice as long
//!                      └────────────────────────────────────┘
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ebb_units::DeviceUuid;

/// A failure may have been that one copy's own; a link that is lost comes back by an operator's hand, if at all.
const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
struct Pause {
    until: Instant,
    long: Duration,
}

/// Those of one card's lenders that failed.
#[derive(Debug, Default)]
pub(super) struct Shunned {
    pauses: BTreeMap<DeviceUuid, Pause>,
}

impl Shunned {
    /// A copy failed. Several that were under way together count as one.
    pub(super) fn failed(&mut self, lender: DeviceUuid, now: Instant) {
        let long = match self.pauses.get(&lender) {
            Some(pause) if now < pause.until => return,
            Some(pause) => (pause.long * 2).min(LONGEST),
            None => FIRST,
        };
        let until = now + long;
        self.pauses.insert(lender, Pause { until, long });
    }

    /// A copy succeeded. One that was under way when another failed proves nothing.
    pub(super) fn worked(&mut self, lender: DeviceUuid, now: Instant) {
        if !self.has(lender, now) {
            self.pauses.remove(&lender);
        }
    }

    /// Whether nothing is to go there now.
    pub(super) fn has(&self, lender: DeviceUuid, now: Instant) -> bool {
        self.pauses.get(&lender).is_some_and(|pause| now < pause.until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_twice_as_long_each_time_until_a_copy_works() {
        let (lender, other) = (DeviceUuid([1; 16]), DeviceUuid([2; 16]));
        let (mut shunned, mut now) = (Shunned::default(), Instant::now());
        let mut long = FIRST;
        for _ in 0..10 {
            shunned.failed(lender, now);
            // Others that were under way.
            shunned.failed(lender, now + Duration::from_millis(1));
            shunned.worked(lender, now + Duration::from_millis(2));
            assert!(shunned.has(lender, now + long - Duration::from_millis(1)));
            assert!(!shunned.has(lender, now + long) && !shunned.has(other, now));
            now += long;
            long = (2 * long).min(LONGEST);
        }
        shunned.worked(lender, now);
        shunned.failed(lender, now);
        assert!(!shunned.has(lender, now + FIRST));
    }
}
