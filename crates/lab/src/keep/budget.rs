//! [`Budget`]: the predictor with as many idle hours as a fixed time would have spent.

use super::{Kind, Outcome};

/// The threshold at which the hours of a fixed time are spent, in returns for each such time: a start, from which it is steered.
const START: f64 = 0.55;
/// The share of the allowance that spending is steered to: the rest is room for spending to swing in.
const AIM: f64 = 0.996;
/// The share of the allowance by which spending may be off before the threshold doubles or so.
const SWING: f64 = 0.02;
/// Seconds of allowance given in advance for each model that was seen, in fixed times.
const ADVANCE: f64 = 1.0;
/// How fast the threshold is steered, each hour.
const GAIN: f64 = 0.02;

#[derive(Debug)]
pub(super) struct Budget {
    seconds: f64,
    /// Logarithm of the threshold, as learned slowly.
    level: f64,
    /// The threshold that holds.
    threshold: f64,
    models: Vec<State>,
    /// Idle seconds spent so far, and what the fixed time would have spent on the same gaps.
    spent: f64,
    allowed: f64,
    steered: f64,
    cold: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    resident: bool,
    since: f64,
}

impl Budget {
    pub(super) fn new(seconds: f64, models: usize) -> Self {
        let threshold = START / seconds;
        Self {
            seconds,
            level: threshold.ln(),
            threshold,
            models: vec![State::default(); models],
            spent: 0.0,
            allowed: 0.0,
            steered: 0.0,
            cold: 0,
        }
    }

    pub(super) fn decide(&mut self, now: f64, model: usize, rate: f64) {
        self.account(now, model);
        self.models[model].resident = rate >= self.threshold;
    }

    pub(super) fn fade(&mut self, now: f64, model: usize, rate: f64) {
        let was = self.models[model].resident;
        self.decide(now, model, rate);
        self.models[model].resident &= was;
    }

    /// A request for an idle model that was idle for so long, or was never seen.
    pub(super) fn arrive(&mut self, now: f64, model: usize, gap: Option<f64>) {
        self.account(now, model);
        // A fixed time is spent after every use; that of the last use is allowed when the model is first seen.
        self.allowed += gap.map_or(ADVANCE * self.seconds, |gap| gap.min(self.seconds));
        self.cold += u64::from(gap.is_none() || !self.models[model].resident);
        self.models[model].resident = false;
    }

    pub(super) fn resident(&self) -> bool {
        self.models.iter().any(|m| m.resident)
    }

    /// Moves the threshold so that spending keeps up with the allowance.
    pub(super) fn steer(&mut self, now: f64) {
        let hours = (now - self.steered).max(0.0) / 3600.0;
        self.steered = now;
        let swing = self.allowed * SWING + 10.0 * self.seconds;
        let ahead = ((self.spent - self.allowed * AIM) / swing).clamp(-1.0, 4.0);
        self.level += GAIN * hours * ahead;
        self.threshold = (self.level + 0.7 * ahead).exp();
    }

    fn account(&mut self, now: f64, model: usize) {
        let m = &mut self.models[model];
        if m.resident {
            self.spent += (now - m.since).max(0.0);
        }
        m.since = now;
    }

    pub(super) fn outcome(&self, requests: usize) -> Outcome {
        Outcome {
            kind: Kind::Budget(self.seconds),
            idle_hours: self.spent / 3600.0,
            cold_percent: 100.0 * self.cold as f64 / requests.max(1) as f64,
        }
    }
}
