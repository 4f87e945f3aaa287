//! [`Rhythm`]: when one program will use the GPU again, from its own last idle times.
//!
//! ```text
//!            idle times seen                        a window that most of them ended in begins
//! (unknown) ─────────────────> listening ─────────────────────────────────────────> brought back ahead
//!                                  ^  ^               came in time: trust grows          │      │
//!                                  │  └───────────────────────────────────────────────────┘      │ did not come
//!                                  └─────────── quiet, for twice as long each time <─────────────┘
//! ```
//! The last idle times, the recent ones with more weight, say how many of those that lasted as long as this one has ended within
//! the next moments. A period shows as a window in which nearly all end; whatever has no rhythm has no such window, and then
//! nothing is done. Whole numbers only, so that a log replays to the same actions on every machine.

use core::fmt;
use core::time::Duration;

use crate::time::Time;

/// Idle times that are remembered.
const KEPT: usize = 16;
/// What each weighs, the last one first: seven eighths of the one after it.
const WEIGHT: [u32; KEPT] = [64, 56, 49, 43, 38, 33, 29, 25, 22, 19, 17, 15, 13, 11, 10, 9];
/// Below so many nothing is said.
const ENOUGH: u32 = 4;
/// Counted beside what was seen: as if it had once not come back.
const DOUBT: u32 = 64;
/// How long a program is left alone after it was brought back for nothing; doubled each time.
const QUIET: Duration = Duration::from_secs(300);
/// The longest such time.
const QUIET_MOST: Duration = Duration::from_secs(4 * 3600);

/// What is expected of a program, and what it is worth to act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Foresight {
    /// It is expected to use the GPU within so many milliseconds.
    pub within_ms: u64,
    /// So likely, in thousandths.
    pub chance: u32,
    /// From so many of its idle times.
    pub seen: u32,
    /// Waiting that is expected to be saved, in milliseconds.
    pub gain_ms: u64,
    /// Copying that is expected to be for nothing, in milliseconds.
    pub regret_ms: u64,
}

impl fmt::Display for Foresight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "expected back within {} ms with {} %, from {} idle times: saves {} ms, wastes {} ms",
            self.within_ms,
            self.chance / 10,
            self.seen,
            self.gain_ms,
            self.regret_ms
        )
    }
}

impl Foresight {
    /// Gain and regret differ by more than what so few observations can tell.
    pub(crate) fn worth_it(&self) -> bool {
        // A share counted from n is known to about one part in the root of n.
        let doubt = 100 / u64::from(self.seen.min(KEPT as u32).isqrt().max(1));
        self.gain_ms.saturating_mul(100) > self.regret_ms.saturating_mul(100 + doubt)
    }
}

/// It was brought back before it asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// When.
    pub(crate) at: Time,
    /// Its ask stands behind all others until then: nobody gives anything for a guess.
    pub(crate) humble_until: Time,
    /// If it has not used the GPU by then, it was for nothing.
    pub(crate) until: Time,
}

/// What a program's idle times were.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rhythm {
    /// In milliseconds; a ring.
    gaps: [u32; KEPT],
    next: usize,
    seen: u32,
    /// Times in a row that it was brought back for nothing, less half of them each time that it was right.
    wrong: u32,
    quiet_until: Time,
    /// Not looked at before that: what it needs is not there.
    pub(crate) retry_at: Time,
    /// What bringing it back takes, as of the last look.
    pub(crate) lead: Duration,
    pub(crate) ahead: Option<Ahead>,
}

/// Times in the arbiter's milliseconds.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Rhythm {
    /// An idle time ended.
    pub(crate) fn returned(&mut self, gap: Duration) {
        self.gaps[self.next] = u32::try_from(gap.as_millis()).unwrap_or(u32::MAX);
        self.next = (self.next + 1) % KEPT;
        self.seen = self.seen.saturating_add(1);
        if self.ahead.take().is_some() {
            self.wrong /= 2;
        }
    }

    /// It was brought back, and nothing came of it.
    pub(crate) fn was_wrong(&mut self, now: Time) {
        self.ahead = None;
        let quiet = QUIET.saturating_mul(1 << self.wrong.min(16)).min(QUIET_MOST);
        self.quiet_until = now.after(quiet);
        self.wrong = self.wrong.saturating_add(1);
    }

    /// Whether anything can be said of it at present.
    pub(crate) fn speaks(&self, now: Time) -> bool {
        self.seen >= ENOUGH && now >= self.quiet_until && self.ahead.is_none()
    }

    /// Its idle times with their weights, the last one first.
    fn weighted(&self) -> impl Iterator<Item = (u64, u32)> {
        let len = KEPT.min(self.seen as usize);
        (0..len).map(|n| (u64::from(self.gaps[(self.next + KEPT - 1 - n) % KEPT]), WEIGHT[n]))
    }

    /// How long a program that has idled for so long would be held ready: twice what bringing it takes, or a seventh of its idle
    /// time, since no rhythm is exact.
    fn window(age_ms: u64, lead_ms: u64) -> u64 {
        (2 * lead_ms).max(age_ms / 7).max(1)
    }

    /// How likely, in thousandths, an idle time that has lasted so long ends within `ms`.
    pub(crate) fn chance(&self, age_ms: u64, ms: u64) -> u32 {
        let (mut ended, mut all) = (0, DOUBT);
        for (gap, weight) in self.weighted().filter(|(gap, _)| *gap >= age_ms) {
            all += weight;
            if gap <= age_ms.saturating_add(ms) {
                ended += weight;
            }
        }
        ended * 1000 / all
    }

    /// What bringing it back now is worth: it waits for `wait` otherwise, and `waste` of copying is for nothing if it does not come.
    pub(crate) fn foresight(&self, idle: Duration, wait: Duration, waste: Duration) -> Foresight {
        let (age, wait, waste) = (millis(idle), millis(wait), millis(waste));
        let within_ms = Self::window(age, wait);
        let chance = self.chance(age, within_ms);
        Foresight {
            within_ms,
            chance,
            seen: self.seen.min(KEPT as u32),
            gain_ms: wait * u64::from(chance) / 1000,
            regret_ms: waste * u64::from(1000 - chance) / 1000,
        }
    }

    /// The next moment at which a window begins that one of its idle times ended in.
    pub(crate) fn next_look(&self, now: Time, idle_since: Time) -> Option<Time> {
        if self.seen < ENOUGH || self.ahead.is_some() {
            return None;
        }
        let lead = millis(self.lead);
        let starts = self.weighted().map(|(gap, _)| {
            let window = (2 * lead).max(gap / 8);
            idle_since.after(Duration::from_millis(gap.saturating_sub(window)))
        });
        let not_before = self.quiet_until.max(self.retry_at);
        let looks = starts.map(|at| at.max(not_before));
        looks.filter(|at| *at > now).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn rhythm(gaps: &[u64]) -> Rhythm {
        let mut r = Rhythm::default();
        for gap in gaps {
            r.returned(Duration::from_secs(*gap));
        }
        r
    }

    fn ask(r: &Rhythm, idle: u64) -> Foresight {
        r.foresight(
            Duration::from_secs(idle),
            Duration::from_secs(1),
            Duration::from_secs(2),
        )
    }

    #[test]
    fn a_period_is_worth_acting_on_just_before_it_ends() {
        let r = rhythm(&[30; 8]);
        assert!(!ask(&r, 5).worth_it());
        assert!(!ask(&r, 20).worth_it());
        assert!(ask(&r, 27).worth_it(), "{}", ask(&r, 27));
        assert!(!ask(&r, 31).worth_it(), "it is late already: who knows");
        let look = r.next_look(Time(10 * S), Time(0));
        assert_eq!(look, Some(Time(26_250_000_000)), "an eighth before it");
    }

    #[test]
    fn what_has_no_rhythm_is_left_alone() {
        let r = rhythm(&[3, 170, 22, 900, 8, 64, 410, 33, 5, 250]);
        for idle in 0..1000 {
            assert!(!ask(&r, idle).worth_it(), "{idle}: {}", ask(&r, idle));
        }
    }

    #[test]
    fn with_little_seen_nothing_is_said() {
        let r = rhythm(&[30; 3]);
        assert!(!r.speaks(Time(0)));
        assert_eq!(r.next_look(Time(0), Time(0)), None);
    }

    #[test]
    fn the_recent_past_weighs_more() {
        let mut gaps = vec![100; 12];
        gaps.extend([30; 6]);
        let r = rhythm(&gaps);
        assert!(r.chance(25_000, 10_000) > 500);
    }

    #[test]
    fn what_was_wrong_is_quiet_for_longer_each_time() {
        let mut r = rhythm(&[30; 8]);
        let mut now = Time(0);
        let mut last = 0;
        for _ in 0..4 {
            r.was_wrong(now);
            assert!(!r.speaks(now.after(Duration::from_secs(299))));
            let quiet = r.quiet_until.since(now).as_secs();
            assert!(quiet >= 2 * last && quiet >= 300);
            (last, now) = (quiet, r.quiet_until);
            assert!(r.speaks(now));
        }
    }
}
