//! What the driver holds for a process and no call shows: what NVML sees of it beyond what it says that it has.
//!
//! ```text
//!  told, at most every 100 ms    ───●────●──────────●──────────────●───
//!  readings, about one a second  ─────[first]───────────────────[next]─
//!                                      └──────── the window ──────────┘
//! ```
//! A reading and what a process tells are not of one moment, and neither is its lease: lease that was granted and is not used yet hides as much of
//! what the driver took. So one reading is judged when the next one is there, by what the process told since a little before it:
//! * what it told was the same all the time: then the rest is hidden, to the byte;
//! * else it is no less than what two readings in a row show beyond all that the process could have had, its lease, and no more than
//!   what two show beyond the least that it told. Within these bounds the last judgement stands: a program that is never quiet must
//!   not make the ledger forget what was seen, and promise it to others.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ebb_units::{Bytes, DeviceId};

use super::{Driver, PeerId};

/// What a process does shows in what it tells after so long.
const LATE: Duration = Duration::from_millis(200);
/// So many changes are kept; older ones count by the least of them.
const CHANGES: usize = 32;

/// What one client told that is on the card because of it, the driver's own part included.
#[derive(Clone, Debug, Default)]
pub(super) struct Told(VecDeque<(Instant, Bytes)>);

impl Told {
    /// It tells.
    pub(super) fn note(&mut self, now: Instant, bytes: Bytes) {
        if self.0.back().is_some_and(|(_, last)| *last == bytes) {
            return;
        }
        if self.0.len() == CHANGES {
            let first = self.0.pop_front();
            if let (Some((at, least)), Some(second)) = (first, self.0.front_mut()) {
                *second = (at, least.min(second.1));
            }
        }
        self.0.push_back((now, bytes));
    }

    /// The least that it told from then on, and whether that was so all the time.
    fn since(&self, from: Instant) -> (Bytes, bool) {
        // What was told before is true until something else is.
        let first = self.0.iter().rposition(|(at, _)| *at <= from);
        let known = first.is_some();
        let window = || self.0.iter().skip(first.unwrap_or(0)).map(|(_, bytes)| *bytes);
        let least = window().min().filter(|_| known).unwrap_or_default();
        (least, known && window().all(|bytes| bytes == least))
    }
}

/// What NVML said of a process on a card, and what can be said of that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    began: Instant,
    heard: Instant,
    used: Bytes,
    /// The most that its lease and what it knows itself of the driver's part can have been.
    account: Bytes,
    /// What the reading before this one left for hidden at the most.
    before: Bytes,
}

impl Reading {
    pub(super) fn new(began: Instant, heard: Instant, used: Bytes, account: Bytes) -> Self {
        Self {
            began,
            heard,
            used,
            account,
            before: Bytes::MAX,
        }
    }

    /// So much has gone since, and is known to have been hidden.
    pub(super) fn gone(&mut self, bytes: Bytes) {
        self.used = self.used.saturating_sub(bytes);
        self.before = self.before.saturating_sub(bytes);
    }

    fn least(&self) -> Bytes {
        self.used.saturating_sub(self.account)
    }

    /// Judges the reading before this one, now that this one is there: what is hidden, where `believed` was. `told`: what its clients told;
    /// `lent`: it may have as much here of other cards' memory, of which it tells nothing.
    pub(super) fn judge<'a>(
        &mut self,
        last: &Self,
        told: impl Iterator<Item = &'a Told>,
        lent: bool,
        believed: Bytes,
    ) -> Bytes {
        let from = last.began.checked_sub(LATE).unwrap_or(last.began);
        let (mut there, mut steady) = (Bytes::ZERO, !lent);
        for told in told {
            let (least, same) = told.since(from);
            there = there.saturating_add(least);
            steady &= same;
        }
        let most = last.used.saturating_sub(there);
        self.before = most;
        if steady && self.heard.saturating_duration_since(last.heard) >= LATE {
            return most;
        }
        let least = last.least().min(self.least());
        believed.min(most.max(last.before)).max(least)
    }
}

impl Driver {
    /// Takes note of what a client tells.
    pub(super) fn note_told(&mut self, peer: PeerId, device: DeviceId) {
        let down = self.is_down(peer);
        if let Some(client) = self.client_mut(peer, device) {
            // What its library counts as there is in host memory, where the driver put it.
            let there = client.usage.resident.saturating_add(client.usage.overhead);
            let there = if down { Bytes::ZERO } else { there };
            client.there.note(Instant::now(), there);
        }
    }

    /// NVML has been read once more: what of a process is hidden.
    pub(super) fn look_for_hidden(
        &mut self,
        pid: u32,
        device: DeviceId,
        last: Option<&Reading>,
        this: &mut Reading,
    ) {
        let Some(process) = self.by_pid.get(&pid).and_then(|key| self.processes.get(key)) else {
            return;
        };
        let peers = process.peers.clone();
        // Where the driver has put a process to sleep or brought it back, that is news, and the process may have nothing to tell.
        for peer in &peers {
            self.note_told(*peer, device);
        }
        let clients = || {
            let peers = peers.iter().filter_map(|peer| self.peers.get(peer));
            peers.filter_map(|peer| peer.clients.get(&device))
        };
        let Some(believed) = clients().next().map(|client| client.extra) else {
            return;
        };
        let lent = self.lodged_lately(pid, device);
        let bytes = match last {
            Some(last) => this.judge(last, clients().map(|client| &client.there), lent, believed),
            None => believed,
        };
        for peer in peers {
            if let Some(client) = self.client_mut(peer, device) {
                if client.extra != bytes {
                    client.extra = bytes;
                    self.mark(peer);
                    self.feed_usage(peer, device);
                }
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;

    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    /// Readings of a process, about one a second, and what it told in between.
    struct Process {
        start: Instant,
        told: Told,
        last: Option<Reading>,
        believed: Bytes,
    }

    impl Process {
        fn new() -> Self {
            Self {
                start: Instant::now(),
                told: Told::default(),
                last: None,
                believed: Bytes::ZERO,
            }
        }

        fn tells(&mut self, ms: u64, granules: u64) {
            self.told.note(at(self.start, ms), Bytes(granules * G));
        }

        /// NVML shows `used` where the process has `lease`. What is believed to be hidden, in granules.
        fn read(&mut self, ms: u64, used: u64, lease: u64) -> u64 {
            let (began, heard) = (at(self.start, ms), at(self.start, ms + 5));
            let mut this = Reading::new(began, heard, Bytes(used * G), Bytes(lease * G));
            if let Some(last) = &self.last {
                self.believed = this.judge(last, [&self.told].into_iter(), false, self.believed);
            }
            self.last = Some(this);
            assert_eq!(self.believed.0 % G, 0);
            self.believed.0 / G
        }
    }

    #[test]
    fn lease_that_is_not_used_hides_nothing_of_a_quiet_process() {
        let mut process = Process::new();
        process.tells(0, 10);
        assert_eq!(process.read(1000, 13, 20), 0);
        assert_eq!(process.read(2000, 13, 20), 3);
        // It gives it back.
        assert_eq!(process.read(3000, 10, 20), 3);
        assert_eq!(process.read(4000, 10, 20), 0);
    }

    #[test]
    fn what_was_seen_of_a_busy_process_is_not_forgotten_while_it_may_be_there() {
        let mut process = Process::new();
        let mut ms = 0;
        let mut busy = |process: &mut Process, used: u64, lease| {
            for told in [used - 6, used - 3, used - 5] {
                ms += 300;
                process.tells(ms, told);
            }
            ms += 100;
            process.read(ms, used, lease)
        };
        // Three granules are hidden, seen only while all lease is in use.
        assert_eq!(busy(&mut process, 23, 20), 0);
        assert_eq!(busy(&mut process, 23, 20), 3);
        for _ in 0..5 {
            assert_eq!(busy(&mut process, 18, 20), 3);
        }
    }

    #[test]
    fn no_more_is_hidden_than_two_readings_leave_room_for() {
        let mut process = Process::new();
        process.tells(0, 10);
        process.read(1000, 15, 10);
        assert_eq!(process.read(2000, 15, 10), 5);
        // From here on it is never quiet, and NVML sees one granule beyond the least that it tells.
        process.tells(2100, 12);
        assert_eq!(
            process.read(3000, 13, 20),
            5,
            "one reading may be of a bad moment"
        );
        process.tells(3100, 13);
        process.tells(3200, 12);
        assert_eq!(process.read(4000, 13, 20), 5);
        process.tells(4100, 13);
        process.tells(4200, 12);
        assert_eq!(process.read(5000, 13, 20), 1);
    }

    #[test]
    fn a_single_reading_makes_nothing() {
        let mut process = Process::new();
        process.tells(0, 10);
        process.read(1000, 10, 10);
        // An allocation that it has not told of, and lease for it that the daemon has not taken note of.
        process.read(2000, 14, 10);
        process.tells(2050, 14);
        assert_eq!(process.read(3000, 14, 14), 0);
    }

    #[test]
    fn readings_in_quick_succession_prove_less() {
        let mut process = Process::new();
        process.tells(0, 10);
        process.read(1000, 13, 20);
        assert_eq!(process.read(1050, 13, 20), 0, "it may be about to tell");
        assert_eq!(process.read(1100, 23, 20), 0);
        assert_eq!(process.read(1150, 23, 20), 3, "beyond all that it can have");
    }

    #[test]
    fn what_is_known_to_have_gone_is_not_seen_again() {
        let mut process = Process::new();
        process.tells(0, 10);
        process.read(1000, 15, 10);
        process.read(2000, 15, 10);
        process.believed = Bytes(2 * G);
        if let Some(last) = &mut process.last {
            last.gone(Bytes(3 * G));
        }
        assert_eq!(process.read(3000, 12, 10), 2);
    }

    #[test]
    fn who_told_nothing_before_is_not_quiet() {
        let mut process = Process::new();
        process.read(1000, 13, 20);
        process.tells(1500, 10);
        assert_eq!(process.read(2000, 13, 20), 0);
        assert_eq!(process.read(3000, 13, 20), 3);
    }

    #[test]
    fn of_very_many_changes_the_least_still_counts() {
        let mut told = Told::default();
        let start = Instant::now();
        for i in 0..100 {
            told.note(at(start, i), Bytes(if i == 3 { 1 } else { 100 + i }));
        }
        assert_eq!(told.0.len(), CHANGES);
        assert_eq!(told.since(at(start, 99)), (Bytes(199), true));
        assert_eq!(told.since(at(start, 90)), (Bytes(190), false));
        assert_eq!(told.since(at(start, 20)).0, Bytes(1));
        assert_eq!(told.since(at(start, 200)), (Bytes(199), true));
    }
}
