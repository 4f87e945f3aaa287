//! Lease for the allocations that will come next: a program that makes many small ones, one after the other, would ask the daemon for each.
//!
//! After a few asks in quick succession one more is sent that nobody waits for. It is of the strict kind: granted from what nobody holds, or
//! not at all; and what it brings is unused lease, which the daemon takes back first and without a copy.

use std::time::{Duration, Instant};

use ebb_protocol::wire::ask_kind;

use crate::core::Core;
use crate::device::State;

/// Asks that are further apart do not belong together.
const TOGETHER: Duration = Duration::from_millis(20);
/// So many in a row, before anything is asked for that is not needed yet.
const ROW: u32 = 4;
/// Larger ones are worth their question.
const SMALL: u64 = 32 << 20;
/// How long nothing is asked for ahead after a refusal: the card is full.
const PAUSE: Duration = Duration::from_secs(1);

/// What one device has asked for lately.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ahead {
    last: Option<Instant>,
    row: u32,
    /// What the last one ahead was for.
    bytes: u64,
    /// The ask that nobody waits for.
    open: Option<u64>,
    refused: Option<Instant>,
}

impl Ahead {
    /// An ask for `short` bytes was granted at `now`: what to ask for ahead, `most` at most.
    fn after(&mut self, now: Instant, short: u64, most: u64) -> Option<u64> {
        let together = self
            .last
            .is_some_and(|last| now.saturating_duration_since(last) <= TOGETHER);
        self.last = Some(now);
        if !together || short > SMALL {
            self.row = 1;
            self.bytes = 0;
            return None;
        }
        self.row = self.row.saturating_add(1);
        let refused = self
            .refused
            .is_some_and(|at| now.saturating_duration_since(at) < PAUSE);
        if self.row < ROW || self.open.is_some() || refused {
            return None;
        }
        self.bytes = self.bytes.max(short).saturating_mul(2).min(most);
        // A single allocation's worth saves nothing.
        (self.bytes > short).then_some(self.bytes)
    }

    /// The daemon refused an ask. Whether it is the one that nobody waits for.
    fn refused(&mut self, ask: u64, now: Instant) -> bool {
        let ours = self.open == Some(ask);
        if ours {
            self.open = None;
            self.bytes = 0;
            self.refused = Some(now);
        }
        ours
    }
}

impl State {
    /// An ask for `short` bytes was granted.
    pub(crate) fn ask_ahead(&mut self, core: &Core, short: u64) {
        if self.ahead.open.is_some_and(|ask| !self.asks.contains_key(&ask)) {
            self.ahead.open = None;
        }
        // Strict programs take nothing that they do not need, and nobody goes over the limit for it.
        let most = core.config.ahead_max.get().min(self.room_under_limit());
        if core.config.strict || most == 0 {
            return;
        }
        if let Some(bytes) = self.ahead.after(Instant::now(), short, most) {
            self.ahead.open = self.ask(core, ask_kind::STRICT, bytes, false);
        }
    }

    /// What the limit leaves beside the lease that is there.
    pub(crate) fn room_under_limit(&self) -> u64 {
        let books = &self.pool.books;
        books.limit.saturating_sub(books.charged() + books.unused())
    }

    /// So much more would make things easier and nothing possible: asked for if nobody has to lose anything for it.
    pub(crate) fn ask_for_ease(&mut self, core: &Core, bytes: u64) {
        let bytes = bytes.min(self.room_under_limit());
        let ahead = &self.ahead;
        let refused = ahead.refused.is_some_and(|at| at.elapsed() < PAUSE);
        let open = ahead.open.is_some_and(|ask| self.asks.contains_key(&ask));
        if bytes > 0 && !core.config.strict && !refused && !open {
            self.ahead.open = self.ask(core, ask_kind::STRICT, bytes, false);
        }
    }

    /// Forgets an ask that the daemon refused, if nobody waits for it. Whether that was so.
    pub(crate) fn refused_ahead(&mut self, ask: u64) -> bool {
        let ours = self.ahead.refused(ask, Instant::now());
        if ours {
            self.asks.remove(&ask);
        }
        ours
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;
    const MOST: u64 = 64 << 20;

    fn row(ahead: &mut Ahead, from: Instant, n: u32, every: Duration) -> Vec<Option<u64>> {
        (0..n)
            .map(|i| ahead.after(from + every * i, GRANULE, MOST))
            .collect()
    }

    #[test]
    fn a_row_of_small_ones_asks_for_more_and_more() {
        let mut ahead = Ahead::default();
        let seen = row(&mut ahead, Instant::now(), 10, Duration::from_millis(1));
        let mib = |n: u64| Some(n << 20);
        assert_eq!(
            seen,
            [
                None,
                None,
                None,
                mib(4),
                mib(8),
                mib(16),
                mib(32),
                mib(64),
                mib(64),
                mib(64)
            ]
        );
    }

    #[test]
    fn single_ones_and_large_ones_ask_for_what_they_need() {
        let now = Instant::now();
        let mut ahead = Ahead::default();
        assert!(
            row(&mut ahead, now, 20, Duration::from_millis(50))
                .iter()
                .all(Option::is_none)
        );
        let mut ahead = Ahead::default();
        assert!((0..20).all(|_| ahead.after(now, 64 << 20, MOST).is_none()));
    }

    #[test]
    fn one_at_a_time_and_none_for_a_while_after_a_refusal() {
        let now = Instant::now();
        let mut ahead = Ahead::default();
        row(&mut ahead, now, 4, Duration::ZERO);
        ahead.open = Some(7);
        assert_eq!(ahead.after(now, GRANULE, MOST), None);
        assert!(!ahead.refused(8, now), "another one");
        assert!(ahead.refused(7, now));
        assert_eq!(ahead.after(now, GRANULE, MOST), None);
        let later = now + PAUSE;
        assert_eq!(ahead.after(later, GRANULE, MOST), None, "a new row");
        let seen = row(&mut ahead, later, 3, Duration::ZERO);
        assert_eq!(seen.last(), Some(&Some(2 * GRANULE)));
    }

    #[test]
    fn no_more_than_there_is() {
        let now = Instant::now();
        let mut ahead = Ahead::default();
        for _ in 0..10 {
            assert_eq!(ahead.after(now, GRANULE, GRANULE), None);
        }
    }
}
