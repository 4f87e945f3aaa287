//! How long to keep what is not in use: cold requests against idle hours, on recorded requests.
//!
//! One instance of each model serves all its requests. While it serves, it is resident; between two requests it is *idle*, and
//! a policy says at every moment whether it stays resident. A request that finds its model idle and not resident is *cold*,
//! and so is a model's first. Requests that begin before the model's last one ended find it resident under every policy.
//!
//! * *Fixed*: resident for the same time after each use.
//! * *Predicted*: resident while [`Predictor`] expects more returns a second than a threshold. The threshold is the price of an
//!   idle second in requests; the whole curve is run at once. All that it knows at a moment lies before that moment.
//! * *Predicted, hours of fixed*: the same, with a threshold that is steered so that as many idle hours are spent so far as a
//!   fixed time would have spent so far. Nobody has to choose a threshold.
//! * *Optimal*: knows every gap, and keeps the shortest ones that the hours pay for.

mod budget;
mod curve;
mod fixed;

use ebb_policy::Time;
use ebb_policy::predict::Predictor;

use crate::read::gentd::Request;

use budget::Budget;
use curve::Curve;
pub use fixed::Gaps;

/// One policy's result.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// What kind of policy.
    pub kind: Kind,
    /// Hours of residency while idle, of all models together.
    pub idle_hours: f64,
    /// Cold requests, percent of all.
    pub cold_percent: f64,
}

/// A policy and its one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Kept for so many seconds.
    Fixed(f64),
    /// Kept while more returns a second are expected.
    Predicted(f64),
    /// Predicted, steered to the hours of the fixed time of so many seconds.
    Budget(f64),
    /// Knows every gap, with the hours of the fixed time of so many seconds.
    Optimal(f64),
}

impl core::fmt::Display for Kind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Fixed(s) => write!(f, "fixed {}", span(s)),
            Self::Predicted(rate) => write!(f, "predicted, {:.2} returns an hour", rate * 3600.0),
            Self::Budget(s) => write!(f, "predicted, hours of fixed {}", span(s)),
            Self::Optimal(s) => write!(f, "optimal, hours of fixed {}", span(s)),
        }
    }
}

fn span(seconds: f64) -> String {
    match seconds {
        s if s >= 3600.0 => format!("{} h", s / 3600.0),
        s if s >= 60.0 => format!("{} min", s / 60.0),
        s => format!("{s} s"),
    }
}

/// The fixed times that are tried, seconds.
pub const FIXED: [f64; 8] = [0.0, 60.0, 300.0, 600.0, 1_200.0, 3_600.0, 14_400.0, 86_400.0];
/// The fixed times whose hours the predictor is given.
const BUDGETS: [f64; 5] = [60.0, 300.0, 600.0, 1_200.0, 3_600.0];
/// Thresholds of the curve: returns a second, from the least on.
const LEAST: f64 = 5e-5;
const MOST: f64 = 2e-2;
const POINTS: usize = 61;
/// How often a decision is looked at again, seconds.
const STEP: f64 = 10.0;
/// How long after the last request a model may go on being resident, seconds.
const TAIL: f64 = 2.0 * 86_400.0;

/// What the policies make of the requests.
#[must_use]
pub fn compare(requests: &[Request]) -> Vec<Outcome> {
    let gaps = Gaps::of(requests);
    let mut out: Vec<Outcome> = FIXED.iter().map(|s| gaps.fixed(*s)).collect();
    out.extend(predicted(requests));
    for seconds in FIXED {
        let hours = gaps.fixed(seconds).idle_hours;
        out.push(gaps.optimal(seconds, hours));
    }
    out
}

/// A model while the requests are replayed.
#[derive(Clone, Debug, Default)]
struct Model {
    running: u32,
    seen: bool,
    idle_since: f64,
}

impl Model {
    fn idle(&self) -> bool {
        self.seen && self.running == 0
    }
}

/// The predictor's curve, and its results within budgets.
fn predicted(requests: &[Request]) -> Vec<Outcome> {
    let count = requests.iter().map(|r| r.model as usize + 1).max().unwrap_or(0);
    let mut curve = Curve::new(LEAST, MOST, POINTS, count);
    let mut budgets: Vec<Budget> = BUDGETS.iter().map(|s| Budget::new(*s, count)).collect();
    let mut predictor = replay(requests, |told| match told {
        Told::Rate(now, model, rate) => {
            curve.decide(now, model, rate);
            budgets.iter_mut().for_each(|b| b.decide(now, model, rate));
        }
        Told::Arrival(now, model, gap) => {
            curve.arrive(now, model, gap.is_some());
            budgets.iter_mut().for_each(|b| b.arrive(now, model, gap));
        }
        Told::Step(now) => budgets.iter_mut().for_each(|b| b.steer(now)),
    });
    // After the last request a model stays for as long as its policy holds on without a break.
    let end = requests.iter().map(|r| r.at + r.took).fold(0.0, f64::max);
    let mut step = end;
    while step < end + TAIL && (curve.resident() || budgets.iter().any(Budget::resident)) {
        predictor.advance(time(step));
        for model in 0..count {
            let rate = predictor.rate_at_step(model as u64).unwrap_or(0.0);
            curve.fade(step, model, rate);
            budgets.iter_mut().for_each(|b| b.fade(step, model, rate));
        }
        step += STEP;
    }
    let mut out = curve.outcomes(requests.len());
    out.extend(budgets.iter().map(|b| b.outcome(requests.len())));
    out
}

/// What a policy hears, in order of time.
enum Told {
    /// An idle model's expected returns a second, from now on.
    Rate(f64, usize, f64),
    /// A request for a model that is not in use, and how long that was idle; nothing if it was never used.
    Arrival(f64, usize, Option<f64>),
    /// A step of time is over.
    Step(f64),
}

/// Replays the requests, telling what is expected of each idle model when it becomes idle and every few seconds.
fn replay(requests: &[Request], mut tell: impl FnMut(Told)) -> Predictor {
    let mut events: Vec<(f64, bool, usize)> = Vec::with_capacity(2 * requests.len());
    for (n, r) in requests.iter().enumerate() {
        events.push((r.at, false, n));
        events.push((r.at + r.took, true, n));
    }
    // At one moment the beginnings come first: there is no gap between an end and a beginning at the same time.
    events.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let count = requests.iter().map(|r| r.model as usize + 1).max().unwrap_or(0);
    let mut models = vec![Model::default(); count];
    let mut predictor = Predictor::new();
    let mut step = 0.0;
    for &(now, ends, n) in &events {
        while step <= now {
            predictor.advance(time(step));
            for (place, _) in models.iter().enumerate().filter(|(_, m)| m.idle()) {
                let rate = predictor.rate_at_step(place as u64).unwrap_or(0.0);
                tell(Told::Rate(step, place, rate));
            }
            tell(Told::Step(step));
            step += STEP;
        }
        let request = &requests[n];
        let (id, caller) = (u64::from(request.model), Some(u64::from(request.tenant)));
        let place = request.model as usize;
        let model = &mut models[place];
        if ends {
            predictor.ended(time(now), id, caller);
            model.running -= 1;
            if model.running == 0 {
                model.idle_since = now;
                let rate = predictor.rate(time(now), id).unwrap_or(0.0);
                tell(Told::Rate(now, place, rate));
            }
        } else {
            if model.running == 0 {
                let gap = model.seen.then_some(now - model.idle_since);
                tell(Told::Arrival(now, place, gap));
            }
            model.running += 1;
            model.seen = true;
            predictor.began(time(now), id, caller);
        }
    }
    predictor
}

fn time(seconds: f64) -> Time {
    Time((seconds * 1e9) as u64)
}

#[cfg(test)]
mod tests;
