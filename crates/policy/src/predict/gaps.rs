//! [`Gaps`]: a decaying histogram of idle times, read as the chance of return at an age.

/// Bins of idle time: from 4 s on, each half as long again, the last one open (13 days and more).
const BINS: usize = 32;
const FIRST: f64 = 4.0;
const RATIO: f64 = 1.5;

/// How often idle stretches ended in each bin of age, over the time that was spent in it.
///
/// The quotient is the hazard: of those that were idle for so long, the share that returned, a second. A task with a strict
/// period shows as one high bin: nothing is expected before it, and everything in it.
#[derive(Clone, Debug)]
pub(super) struct Gaps {
    ended: [f32; BINS],
    seconds: [f32; BINS],
    keep: f32,
}

impl Gaps {
    /// A histogram in which each new idle stretch takes `1 - keep` of the weight of the old ones.
    pub(super) fn new(keep: f32) -> Self {
        Self {
            ended: [0.0; BINS],
            seconds: [0.0; BINS],
            keep,
        }
    }

    /// One that starts as a heavy-tailed guess: the chance of return falls as one over the age.
    pub(super) fn guess(keep: f32) -> Self {
        let mut gaps = Self::new(keep);
        for bin in 0..BINS {
            gaps.ended[bin] = 1.0;
            gaps.seconds[bin] = (3.0 * (start(bin).max(1.0) * start(bin + 1)).sqrt()) as f32;
        }
        gaps
    }

    /// An idle stretch of that length ended.
    pub(super) fn close(&mut self, gap: f64) {
        let last = bin(gap);
        for n in 0..BINS {
            self.ended[n] *= self.keep;
            self.seconds[n] *= self.keep;
            if n < last {
                self.seconds[n] += (start(n + 1) - start(n)) as f32;
            }
        }
        self.ended[last] += 1.0;
        self.seconds[last] += (gap - start(last)).max(0.0) as f32;
    }

    /// Returns a second expected at this age; where little was seen, `prior` (weighed as three returns) speaks.
    pub(super) fn rate(&self, age: f64, prior: f64) -> f64 {
        const WEIGHT: f64 = 3.0;
        let n = bin(age);
        (f64::from(self.ended[n]) + WEIGHT) / (f64::from(self.seconds[n]) + WEIGHT / prior.max(1e-9))
    }
}

/// The age at which a bin begins, seconds.
fn start(bin: usize) -> f64 {
    if bin == 0 {
        0.0
    } else {
        FIRST * RATIO.powi(bin as i32 - 1)
    }
}

/// The bin of an age.
fn bin(age: f64) -> usize {
    let mut end = FIRST;
    let mut n = 0;
    while age > end && n < BINS - 1 {
        end *= RATIO;
        n += 1;
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_begin_where_the_last_one_ended() {
        assert_eq!(bin(0.0), 0);
        for n in 0..BINS - 1 {
            assert!(start(n) < start(n + 1));
            assert_eq!(bin(start(n + 1) - 1e-3), n);
            assert_eq!(bin(start(n + 1) + 1e-3), n + 1);
        }
        assert_eq!(bin(1e12), BINS - 1);
    }

    #[test]
    fn a_strict_period_shows_as_one_high_bin() {
        let mut gaps = Gaps::new(0.98);
        for _ in 0..50 {
            gaps.close(600.0);
        }
        let prior = 1e-3;
        assert!(gaps.rate(60.0, prior) < 1e-3, "nothing comes early");
        assert!(gaps.rate(590.0, prior) > 5e-3, "it comes now");
        assert!(gaps.rate(590.0, prior) > 10.0 * gaps.rate(200.0, prior));
    }

    #[test]
    fn with_nothing_seen_the_prior_speaks() {
        let gaps = Gaps::new(0.98);
        assert!((gaps.rate(100.0, 0.02) - 0.02).abs() < 1e-9);
    }
}
