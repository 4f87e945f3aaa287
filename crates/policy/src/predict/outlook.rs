//! [`Outlook`]: what is expected, turned into advice with its gain, its regret and its doubt.

use core::time::Duration;

/// What is expected of an idle task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Returns a second.
    pub rate: f64,
    /// Idle stretches of this task that were seen to their end.
    pub seen: f64,
    /// Those of all tasks.
    pub seen_of_all: f64,
}

/// What a decision is about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stake {
    /// What a return costs if the memory is not there: the time that the program waits for it.
    pub wait: Duration,
    /// What holding the memory costs others: seconds of their waiting, for each second of holding. Nothing if nobody needs it.
    pub price: f64,
    /// How long the decision will stand before it can be changed.
    pub stands: Duration,
}

/// What to do with an idle task's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Have it on the card: keep it there, or bring it back before it is asked for.
    Resident,
    /// Let it go.
    Away,
    /// Too little is known, or too little is to be won: change nothing.
    Unsure,
}

/// Returns of the task itself below which nothing is said.
const ENOUGH: f64 = 4.0;

impl Outlook {
    /// How likely the task returns within a time.
    #[must_use]
    pub fn within(&self, time: Duration) -> f64 {
        1.0 - (-self.rate.max(0.0) * time.as_secs_f64()).exp()
    }

    /// What having the memory away for as long as the decision stands saves others: seconds of their waiting.
    #[must_use]
    pub fn gain(&self, stake: &Stake) -> f64 {
        let time = stake.stands.as_secs_f64();
        // The mean of the shorter of its return and the end of the decision.
        let away = if self.rate > 1e-12 {
            self.within(stake.stands) / self.rate
        } else {
            time
        };
        stake.price * away
    }

    /// What it costs the task itself: seconds of its waiting.
    #[must_use]
    pub fn regret(&self, stake: &Stake) -> f64 {
        self.within(stake.stands) * stake.wait.as_secs_f64()
    }

    /// What to do. Sure only if gain and regret differ by more than what so few observations can tell.
    #[must_use]
    pub fn advice(&self, stake: &Stake) -> Advice {
        if self.seen < ENOUGH {
            return Advice::Unsure;
        }
        let (gain, regret) = (self.gain(stake), self.regret(stake));
        // A rate counted from n returns is known to about one part in the root of n.
        let doubt = 1.0 / self.seen.sqrt();
        if gain > regret * (1.0 + doubt) {
            Advice::Away
        } else if regret > gain * (1.0 + doubt) {
            Advice::Resident
        } else {
            Advice::Unsure
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stake(price: f64) -> Stake {
        Stake {
            wait: Duration::from_secs(1),
            price,
            stands: Duration::from_secs(10),
        }
    }

    fn outlook(rate: f64, seen: f64) -> Outlook {
        Outlook {
            rate,
            seen,
            seen_of_all: 1000.0,
        }
    }

    #[test]
    fn memory_that_nobody_wants_stays() {
        let o = outlook(1e-6, 100.0);
        assert_eq!(o.gain(&stake(0.0)), 0.0);
        assert_eq!(o.advice(&stake(0.0)), Advice::Resident);
    }

    #[test]
    fn the_price_decides() {
        let o = outlook(0.01, 100.0);
        assert_eq!(o.advice(&stake(0.001)), Advice::Resident);
        assert_eq!(o.advice(&stake(0.1)), Advice::Away);
        assert_eq!(o.advice(&stake(0.0101)), Advice::Unsure, "too close to tell");
    }

    #[test]
    fn with_little_seen_nothing_is_said() {
        assert_eq!(outlook(1e-6, 2.0).advice(&stake(1.0)), Advice::Unsure);
    }

    #[test]
    fn gain_and_regret_are_seconds() {
        let o = outlook(0.1, 100.0);
        let s = stake(0.5);
        assert!((o.within(s.stands) - (1.0 - (-1.0_f64).exp())).abs() < 1e-12);
        assert!((o.regret(&s) - 0.632).abs() < 1e-3);
        assert!((o.gain(&s) - 0.5 * 6.32).abs() < 1e-2);
    }
}
