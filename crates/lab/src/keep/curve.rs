//! [`Curve`]: all thresholds at once.

use super::{Kind, Outcome};

/// Results of many thresholds in one pass.
///
/// A model is resident under every threshold up to its rate, so that one number says under how many: time and warm requests
/// are counted by that number and summed up at the end.
#[derive(Debug)]
pub(super) struct Curve {
    thresholds: Vec<f64>,
    /// For each model: under how many thresholds it is resident, and since when.
    models: Vec<(usize, f64)>,
    /// Seconds spent resident under exactly so many.
    idle: Vec<f64>,
    /// Requests that found it resident under exactly so many.
    warm: Vec<u64>,
    /// First requests: cold under every threshold.
    first: u64,
}

impl Curve {
    pub(super) fn new(least: f64, most: f64, points: usize, models: usize) -> Self {
        let ratio = (most / least).powf(1.0 / (points - 1) as f64);
        Self {
            thresholds: (0..points).map(|n| least * ratio.powi(n as i32)).collect(),
            models: vec![(0, 0.0); models],
            idle: vec![0.0; points + 1],
            warm: vec![0; points + 1],
            first: 0,
        }
    }

    /// An idle model's rate, looked at now.
    pub(super) fn decide(&mut self, now: f64, model: usize, rate: f64) {
        let under = self.thresholds.partition_point(|t| *t <= rate);
        self.account(now, model);
        self.models[model].0 = under;
    }

    /// As [`Self::decide`], but what was let go stays away.
    pub(super) fn fade(&mut self, now: f64, model: usize, rate: f64) {
        let under = self.thresholds.partition_point(|t| *t <= rate);
        self.account(now, model);
        self.models[model].0 = self.models[model].0.min(under);
    }

    /// A request for an idle model, or for one never seen.
    pub(super) fn arrive(&mut self, now: f64, model: usize, seen: bool) {
        self.account(now, model);
        if seen {
            self.warm[self.models[model].0] += 1;
        } else {
            self.first += 1;
        }
        self.models[model].0 = 0;
    }

    /// Whether any model is resident and idle under any threshold.
    pub(super) fn resident(&self) -> bool {
        self.models.iter().any(|m| m.0 > 0)
    }

    fn account(&mut self, now: f64, model: usize) {
        let (under, since) = self.models[model];
        self.idle[under] += (now - since).max(0.0);
        self.models[model].1 = now;
    }

    pub(super) fn outcomes(&self, requests: usize) -> Vec<Outcome> {
        let returns: u64 = self.warm.iter().sum();
        (0..self.thresholds.len())
            .map(|n| {
                let idle: f64 = self.idle[n + 1..].iter().sum();
                let warm: u64 = self.warm[n + 1..].iter().sum();
                Outcome {
                    kind: Kind::Predicted(self.thresholds[n]),
                    idle_hours: idle / 3600.0,
                    cold_percent: 100.0 * (self.first + returns - warm) as f64 / requests.max(1) as f64,
                }
            })
            .collect()
    }
}
