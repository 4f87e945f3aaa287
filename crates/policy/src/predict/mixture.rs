//! [`Mixture`]: how much each view of the past is worth, learned from how it did.

/// Non-negative weights of rates. What is expected is their weighted sum.
///
/// Learned by expectation and maximisation, one step a return: a return is credited to the components in the shares in
/// which they had predicted it, and a component's weight is the returns credited to it over the returns that it
/// predicted. So a component that promises more than comes true loses weight, and all together stay calibrated.
#[derive(Clone, Debug)]
pub(super) struct Mixture<const N: usize> {
    weight: [f64; N],
    credited: [f64; N],
    predicted: [f64; N],
    returns: f64,
}

impl<const N: usize> Mixture<N> {
    /// Equal weights that sum to one, held with the conviction of a few returns.
    pub(super) fn new() -> Self {
        const CONVICTION: f64 = 20.0;
        let weight = 1.0 / N as f64;
        Self {
            weight: [weight; N],
            credited: [weight * CONVICTION; N],
            predicted: [CONVICTION; N],
            returns: 0.0,
        }
    }

    /// The rate that the components say together.
    pub(super) fn rate(&self, parts: &[f64; N]) -> f64 {
        parts.iter().zip(&self.weight).map(|(x, w)| x * w).sum()
    }

    /// Time passed in which this was predicted.
    pub(super) fn wait(&mut self, parts: &[f64; N], seconds: f64) {
        for (sum, x) in self.predicted.iter_mut().zip(parts) {
            *sum += x * seconds;
        }
    }

    /// A task returned when this was predicted.
    pub(super) fn returned(&mut self, parts: &[f64; N]) {
        let all = self.rate(parts);
        if all <= 0.0 {
            return;
        }
        // Early credit is given by weights that are not learned yet: it is forgotten fast, later credit slowly.
        self.returns += 1.0;
        let keep = 1.0 - (self.returns + 10.0).powf(-0.8).max(1e-4);
        for (n, part) in parts.iter().enumerate() {
            self.credited[n] = self.credited[n] * keep + self.weight[n] * part / all;
            self.predicted[n] *= keep;
            self.weight[n] = self.credited[n] / self.predicted[n].max(1e-3);
        }
    }

    /// Returns learned from.
    pub(super) fn returns(&self) -> f64 {
        self.returns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_component_that_is_right_gets_the_weight() {
        // Two tasks in turn: one returns once in 10 s, the other once in 1000 s. The first component knows, the
        // second says the mean always.
        let mut mixture = Mixture::<2>::new();
        for _ in 0..3000 {
            for (gap, rate) in [(10.0, 0.1), (1000.0, 0.001)] {
                let parts = [rate, 0.05];
                mixture.wait(&parts, gap);
                mixture.returned(&parts);
            }
        }
        assert!(mixture.weight[0] > 0.85, "{mixture:?}");
        assert!(mixture.weight[1] < 0.05, "{mixture:?}");
    }

    #[test]
    fn what_is_predicted_is_calibrated() {
        let mut mixture = Mixture::<3>::new();
        let parts = [0.3, 0.01, 0.02];
        for _ in 0..2000 {
            mixture.wait(&parts, 20.0);
            mixture.returned(&parts);
        }
        let rate = mixture.rate(&parts);
        assert!((rate - 0.05).abs() < 0.005, "{rate}");
    }
}
