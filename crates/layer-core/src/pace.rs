//! How fast the arena's segments are registered while the program works.
//!
//! Registering holds locks of the driver: a launch that falls into it waits for its end, milliseconds. So it takes a share of the time as long
//! as the program uses the GPU, and all of it when the program does not or when an eviction waits for a segment.

use std::time::{Duration, Instant};

/// One part in so many of the time is registering.
const SHARE: u32 = 10;
/// After that long without a use of the GPU nobody is held up.
const LOOK: Duration = Duration::from_millis(2);
/// A segment that took longer than usual does not put the next one off for ever.
const LONGEST: Duration = Duration::from_millis(200);

#[derive(Debug, Default)]
pub(crate) struct Pace {
    until: Option<Instant>,
    /// Uses of the GPU when it was looked last.
    seen: Option<u64>,
}

impl Pace {
    /// A segment was registered.
    pub(crate) fn worked(&mut self, from: Instant, to: Instant) {
        let took = to.saturating_duration_since(from);
        self.until = Some(to + (took * (SHARE - 1)).min(LONGEST));
        self.seen = None;
    }

    /// How long to wait before looking again, if the next one is not due. `passages`: uses of the GPU so far.
    pub(crate) fn rest(&mut self, now: Instant, passages: impl Fn() -> u64) -> Option<Duration> {
        let left = self.until?.saturating_duration_since(now);
        let uses = passages();
        let idle = self.seen.replace(uses) == Some(uses);
        if left.is_zero() || idle {
            *self = Self::default();
            return None;
        }
        Some(left.min(LOOK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn while_the_program_works_it_takes_a_share_of_the_time() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        let began = now;
        let uses = std::cell::Cell::new(0);
        let passages = || {
            uses.set(uses.get() + 1);
            uses.get()
        };
        assert_eq!(pace.rest(now, passages), None, "the first one at once");
        for _ in 0..10 {
            pace.worked(now, now + 4 * MS);
            now += 4 * MS;
            while let Some(rest) = pace.rest(now, passages) {
                assert!(rest <= LOOK);
                now += rest;
            }
        }
        assert_eq!(now - began, 10 * 40 * MS);
    }

    #[test]
    fn while_nothing_is_used_it_goes_on_after_a_look() {
        let mut pace = Pace::default();
        let now = Instant::now();
        pace.worked(now, now + 4 * MS);
        assert_eq!(pace.rest(now + 4 * MS, || 7), Some(LOOK));
        assert_eq!(pace.rest(now + 6 * MS, || 7), None);
    }

    #[test]
    fn one_that_took_long_puts_the_next_one_off_within_a_bound() {
        let mut pace = Pace::default();
        let now = Instant::now();
        pace.worked(now, now + 1000 * MS);
        assert_eq!(pace.until, Some(now + 1000 * MS + LONGEST));
    }
}
