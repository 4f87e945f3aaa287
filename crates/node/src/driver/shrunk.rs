//! What processes gave back a moment ago.
//!
//! A reading of NVML is heard of some time after it was made, and what a process gives back in between is in the reading, but not in
//! its account any more. A program that changes hands of a hundred MiB in a tenth of a second would seem to hold as much beyond its
//! account, twice in a row, and the ledger would pass the card for bytes that nobody has. So an account is compared with what it was at
//! the most since the reading began: what it is and what left it since.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ebb_policy::Event;
use ebb_units::{Bytes, ClientId};

/// No reading takes that long, or it is of no use.
const LONGEST: Duration = Duration::from_secs(10);

/// Lease that was given back, in the order of time.
#[derive(Debug, Default)]
pub(super) struct Shrunk(VecDeque<(Instant, ClientId, Bytes)>);

impl Shrunk {
    /// Takes note of what an event takes away from somebody.
    pub(super) fn note(&mut self, now: Instant, event: &Event) {
        let (client, bytes) = match *event {
            Event::Returned { client, bytes } | Event::ReclaimProgress { client, bytes, .. } => {
                (client, bytes)
            }
            Event::Inherited {
                from: Some(from),
                bytes,
                ..
            } => (from, bytes),
            _ => return,
        };
        while self
            .0
            .front()
            .is_some_and(|(at, ..)| now.saturating_duration_since(*at) > LONGEST)
        {
            self.0.pop_front();
        }
        self.0.push_back((now, client, bytes));
    }

    /// Forgets what was before a reading: the next one begins later.
    pub(super) fn forget(&mut self, reading: Instant) {
        while self.0.front().is_some_and(|(at, ..)| *at < reading) {
            self.0.pop_front();
        }
    }

    /// What a client gave back since then.
    pub(super) fn since(&self, reading: Instant, client: ClientId) -> Bytes {
        self.0
            .iter()
            .rev()
            .take_while(|(at, ..)| *at >= reading)
            .filter(|(_, who, _)| *who == client)
            .map(|(.., bytes)| *bytes)
            .fold(Bytes::ZERO, Bytes::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use ebb_units::OrderId;

    use super::*;

    #[test]
    fn what_left_an_account_since_a_reading_is_counted_and_what_left_before_is_not() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut shrunk = Shrunk::default();
        let returned = |client, mib| Event::Returned {
            client: ClientId(client),
            bytes: Bytes::mib(mib),
        };
        shrunk.note(at(0), &returned(1, 1));
        shrunk.note(at(10), &returned(1, 2));
        shrunk.note(at(20), &returned(2, 4));
        let order = Event::ReclaimProgress {
            client: ClientId(1),
            order: OrderId(7),
            bytes: Bytes::mib(8),
        };
        shrunk.note(at(30), &order);
        shrunk.note(at(40), &Event::Tick);
        let since = |shrunk: &Shrunk, ms, client| shrunk.since(at(ms), ClientId(client));
        assert_eq!(since(&shrunk, 10, 1), Bytes::mib(10));
        assert_eq!(since(&shrunk, 11, 1), Bytes::mib(8));
        assert_eq!(since(&shrunk, 10, 2), Bytes::mib(4));
        shrunk.forget(at(20));
        assert_eq!(since(&shrunk, 0, 1), Bytes::mib(8));
        // Without readings nothing is kept for long.
        shrunk.note(at(20_000), &returned(3, 16));
        assert_eq!(since(&shrunk, 0, 1), Bytes::ZERO);
    }
}
