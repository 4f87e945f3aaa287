//! [`Predictor`]: when a task will use the GPU again, from what it did so far.
//!
//! ```text
//!   busy ──▶ ┌ own     the task's recent uses, fading over 10 s to 5 days (trend)        ┐
//!   idle ──▶ │ gaps    a decaying histogram of its idle times, beside everyone's         │ parts   ┌─────────┐   returns
//!            │ day     its share by hour of the day (period)                             ├────────▶│ mixture │──▶ a second
//!            │ load    its usual rate, scaled by how busy everyone is just now           │         └────▲────┘
//!            └ company what callers did who used other tasks a moment ago                ┘              │
//!                                                         what came true, and what did not ─────────────┘
//! ```
//! Each part is a *rate*: returns a second, were it alone right. Their weighted sum is the rate that is expected; the weights
//! are learned from what came true, for all tasks together. A rate is what a decision needs: a second of residency is worth
//! having exactly while the rate, times what a return saves, is above what the memory is worth to others. That rule releases
//! early, keeps while a return is likely, and brings back just before one is due, without a case for each.
//!
//! Pure: the driver says when tasks begin and end to be used, and what time it is. Memory is bounded: a few hundred bytes a
//! task, and a bounded list of callers.

mod bank;
mod companions;
mod gaps;
mod mixture;
mod outlook;
mod rhythm;

use std::collections::BTreeMap;

use crate::time::Time;

use bank::Bank;
use companions::Companions;
use gaps::Gaps;
use mixture::Mixture;

pub use outlook::{Advice, Outlook, Stake};
pub use rhythm::Foresight;
pub(crate) use rhythm::{Ahead, Rhythm};

/// Seconds over which a task's own uses fade.
const SPANS: [f64; 9] = [
    10.0, 30.0, 90.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 432_000.0,
];
const OWN: usize = SPANS.len();
/// Parts beside the own ones and those of companions: steady, two by the hour, three by load, two histograms.
const OTHERS: usize = 8;
const PARTS: usize = OWN + OTHERS + companions::PARTS;
/// How often expectations are compared with what came, seconds.
const STEP: f64 = 10.0;
/// After a pause of the driver longer than this, the time in between teaches nothing, seconds.
const LONGEST: f64 = 86_400.0;
/// The span by which everyone's load is seen, seconds.
const LOAD: f64 = 900.0;

/// What one task did.
#[derive(Clone, Debug)]
struct History {
    own: Bank<OWN>,
    gaps: Gaps,
    /// Uses by hour of the day, fading.
    hours: [f32; 24],
    running: u32,
    /// It was in use at some time.
    used: bool,
    /// When it last became idle, or was first seen.
    idle_since: f64,
    /// Up to when its idle time was compared with what was expected.
    compared: f64,
    /// Idle stretches seen to their end.
    returns: u32,
    /// The rate at the last step.
    rate: f64,
}

/// Learns from every task and says when each will be used again.
#[derive(Clone, Debug)]
pub struct Predictor {
    now: f64,
    /// The next step.
    step: f64,
    /// Tasks by number; a slot's place is the task's name inside.
    places: BTreeMap<u64, usize>,
    tasks: Vec<Option<History>>,
    everyone: Gaps,
    load: Bank<1>,
    load_mean: Bank<1>,
    companions: Companions,
    mixture: Mixture<PARTS>,
    scratch: Vec<[f64; companions::PARTS]>,
}

impl Default for Predictor {
    fn default() -> Self {
        Self {
            now: 0.0,
            step: 0.0,
            places: BTreeMap::new(),
            tasks: Vec::new(),
            everyone: Gaps::guess(0.9998),
            load: Bank::new(0.0),
            load_mean: Bank::new(0.0),
            companions: Companions::default(),
            mixture: Mixture::new(),
            scratch: Vec::new(),
        }
    }
}

impl Predictor {
    /// A predictor that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The task begins to be used, on behalf of a caller if one is known. Uses may overlap.
    pub fn began(&mut self, now: Time, task: u64, caller: Option<u64>) {
        let now = self.advance_to(seconds(now));
        let place = self.place(now, task);
        let parts = self.parts_of(now, place);
        let Some(t) = self.tasks[place].as_mut() else {
            return;
        };
        if t.running == 0 && t.used {
            let gap = now - t.idle_since;
            self.mixture.wait(&parts, (now - t.compared).max(0.0));
            self.mixture.returned(&parts);
            self.everyone.close(gap);
            t.gaps.close(gap);
            t.returns = t.returns.saturating_add(1);
        }
        t.running += 1;
        t.used = true;
        for count in &mut t.hours {
            *count *= 0.999;
        }
        t.hours[hour(now)] += 1.0;
        self.load.add(now, &[LOAD]);
        self.load_mean.add(now, &[432_000.0]);
        if let Some(caller) = caller {
            self.companions.began(now, caller, place);
        }
    }

    /// One use of the task ends; with the last one it is idle.
    pub fn ended(&mut self, now: Time, task: u64, caller: Option<u64>) {
        let now = self.advance_to(seconds(now));
        let place = self.place(now, task);
        if let Some(t) = self.tasks[place].as_mut() {
            t.running = t.running.saturating_sub(1);
            t.own.add(now, &SPANS);
            if t.running == 0 {
                t.idle_since = now;
                t.compared = now;
            }
        }
        if let Some(caller) = caller {
            self.companions.ended(now, caller);
        }
    }

    /// The task is gone for good.
    pub fn forget(&mut self, task: u64) {
        if let Some(place) = self.places.remove(&task) {
            self.tasks[place] = None;
            self.companions.forget(place);
        }
    }

    /// Returns a second that are expected of an idle task now. `None`: it is in use, or was never seen in use.
    #[must_use]
    pub fn rate(&self, now: Time, task: u64) -> Option<f64> {
        let place = *self.places.get(&task)?;
        let t = self.tasks[place].as_ref()?;
        let now = seconds(now).max(self.now);
        (t.running == 0 && t.used).then(|| self.mixture.rate(&self.parts_of(now, place)))
    }

    /// As [`Self::rate`], as it was when [`Self::advance`] last made a step: cheap.
    #[must_use]
    pub fn rate_at_step(&self, task: u64) -> Option<f64> {
        let t = self.tasks[*self.places.get(&task)?].as_ref()?;
        (t.running == 0 && t.used).then_some(t.rate)
    }

    /// What is expected of an idle task, and how well founded that is. `None` as with [`Self::rate`].
    #[must_use]
    pub fn outlook(&self, now: Time, task: u64) -> Option<Outlook> {
        let rate = self.rate(now, task)?;
        let own = self.tasks[*self.places.get(&task)?].as_ref()?.returns;
        Some(Outlook {
            rate,
            seen: f64::from(own),
            seen_of_all: self.mixture.returns(),
        })
    }

    /// Lets time pass: what was expected is compared with what came. Call it about every ten seconds, or when convenient.
    pub fn advance(&mut self, now: Time) {
        self.advance_to(seconds(now));
    }

    fn advance_to(&mut self, now: f64) -> f64 {
        let now = now.max(self.now);
        if now - self.step > LONGEST {
            // Nobody was there to see it.
            self.step = now;
            for t in self.tasks.iter_mut().flatten() {
                t.compared = now;
            }
        }
        while self.step <= now {
            let step = self.step;
            self.one_step(step);
            self.step = step + STEP;
        }
        self.now = now;
        now
    }

    fn one_step(&mut self, now: f64) {
        self.companions.expire(now);
        let mut company = std::mem::take(&mut self.scratch);
        company.clear();
        company.resize(self.tasks.len(), [0.0; companions::PARTS]);
        self.companions.all(now, &mut company);
        for (place, company) in company.iter().enumerate() {
            let Some(t) = &self.tasks[place] else { continue };
            if t.running > 0 || !t.used {
                continue;
            }
            let parts = self.parts(now, t, company);
            let waited = now - t.compared;
            self.mixture.wait(&parts, waited.max(0.0));
            let rate = self.mixture.rate(&parts);
            if let Some(t) = &mut self.tasks[place] {
                t.compared = now;
                t.rate = rate;
            }
        }
        self.scratch = company;
    }

    /// The place of a task, which is new if it was not known.
    fn place(&mut self, now: f64, task: u64) -> usize {
        if let Some(place) = self.places.get(&task) {
            return *place;
        }
        let new = History {
            own: Bank::new(now),
            gaps: Gaps::new(0.99),
            hours: [0.0; 24],
            running: 0,
            used: false,
            idle_since: now,
            compared: now,
            returns: 0,
            rate: 0.0,
        };
        let place = match self.tasks.iter().position(Option::is_none) {
            Some(free) => {
                self.tasks[free] = Some(new);
                free
            }
            None => {
                self.tasks.push(Some(new));
                self.tasks.len() - 1
            }
        };
        self.places.insert(task, place);
        place
    }

    fn parts_of(&self, now: f64, place: usize) -> [f64; PARTS] {
        match &self.tasks[place] {
            Some(t) => self.parts(now, t, &self.companions.one(now, place)),
            None => [0.0; PARTS],
        }
    }

    fn parts(&self, now: f64, t: &History, company: &[f64; companions::PARTS]) -> [f64; PARTS] {
        let mut parts = [0.0; PARTS];
        let own = t.own.read(now, &SPANS);
        parts[..OWN].copy_from_slice(&own);
        let [quarter, day, days] = [own[OWN - 3], own[OWN - 2], own[OWN - 1]];
        let uses: f32 = t.hours.iter().sum();
        // Two uses an hour are taken for granted, so that one day does not make a habit.
        let habit = f64::from((t.hours[hour(now)] + 2.0) / ((uses + 48.0) / 24.0));
        let mean = self.load_mean.read(now, &[432_000.0])[0].max(1e-9);
        let load = (self.load.read(now, &[LOAD])[0] / mean).min(4.0);
        let age = now - t.idle_since;
        let everyone = self.everyone.rate(age, 1e-3);
        parts[OWN..OWN + OTHERS].copy_from_slice(&[
            2e-6,
            day * habit,
            days * habit,
            quarter * load,
            day * load,
            days * load,
            everyone,
            t.gaps.rate(age, everyone),
        ]);
        parts[OWN + OTHERS..].copy_from_slice(company);
        parts
    }
}

fn seconds(time: Time) -> f64 {
    time.0 as f64 / 1e9
}

/// The hour of the day, counted from the driver's start: only that it comes again after a day matters.
fn hour(now: f64) -> usize {
    (now / 3600.0) as usize % 24
}

#[cfg(test)]
mod tests;
