//! [`Bank`]: one stream of events, seen over several spans of time at once.

/// Exponentially decaying averages of a stream of events, one for each span.
///
/// An event contributes `exp(-age / span) / span`: over all time that is one event, so that what a span says is a rate in
/// events a second, and all spans can be compared.
#[derive(Clone, Debug)]
pub(super) struct Bank<const N: usize> {
    sums: [f64; N],
    /// The time of `sums`, seconds.
    at: f64,
}

impl<const N: usize> Bank<N> {
    pub(super) fn new(now: f64) -> Self {
        Self {
            sums: [0.0; N],
            at: now,
        }
    }

    /// An event at `now`, which is not before any other.
    pub(super) fn add(&mut self, now: f64, spans: &[f64; N]) {
        self.sums = self.read(now, spans);
        self.at = self.at.max(now);
        for (sum, span) in self.sums.iter_mut().zip(spans) {
            *sum += 1.0 / span;
        }
    }

    /// Events a second by each span.
    pub(super) fn read(&self, now: f64, spans: &[f64; N]) -> [f64; N] {
        let age = (now - self.at).max(0.0);
        let mut out = self.sums;
        if age > 0.0 {
            for (sum, span) in out.iter_mut().zip(spans) {
                *sum *= (-age / span).exp();
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_stream_reads_as_its_rate_in_every_span() {
        let spans = [30.0, 300.0];
        let mut bank = Bank::new(0.0);
        for n in 0..1000 {
            bank.add(f64::from(n) * 5.0, &spans);
        }
        // Read in the middle between two events; the shorter span sees the grain of the stream.
        let rates = bank.read(999.0 * 5.0 + 2.5, &spans);
        assert!((rates[0] - 0.2).abs() < 0.01, "{rates:?}");
        assert!((rates[1] - 0.2).abs() < 0.001, "{rates:?}");
    }

    #[test]
    fn a_burst_is_forgotten_by_the_short_span_first() {
        let spans = [10.0, 1000.0];
        let mut bank = Bank::new(0.0);
        for _ in 0..10 {
            bank.add(0.0, &spans);
        }
        let rates = bank.read(100.0, &spans);
        assert!(rates[0] < 1e-4 && rates[1] > 9e-3, "{rates:?}");
    }
}
