//! [`Expected`]: what those who have started are expected to use, from what they did.
//!
//! Memory and GPU time that a job uses are averaged over the last minutes, beginning as if it used all that it has now. A job
//! is started when the sum of these averages leaves room for all of its own. So the cluster is filled by what jobs do, not
//! by what they may do at their peaks, and nothing ahead is looked at.

use std::collections::BTreeSet;

/// Seconds over which is averaged.
const OVER: f64 = 240.0;
/// Averages that are brought up to date at each look.
const REFRESHED: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct One {
    there: bool,
    card: usize,
    /// What it uses now: bytes over those of a card, GPU time.
    now: [f64; 2],
    mean: [f64; 2],
    since: f64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Expected {
    jobs: Vec<One>,
    started: BTreeSet<usize>,
    on: Vec<BTreeSet<usize>>,
    next: usize,
    /// The part of the cards that is filled; `None`: jobs start at once.
    fill: Option<f64>,
    sums: Vec<[f64; 2]>,
    all: [f64; 2],
}

impl Expected {
    pub(super) fn new(jobs: usize, cards: usize, fill: Option<f64>) -> Self {
        Self {
            jobs: vec![One::default(); jobs],
            started: BTreeSet::new(),
            on: vec![BTreeSet::new(); cards],
            next: 0,
            fill,
            sums: vec![[0.0; 2]; cards],
            all: [0.0; 2],
        }
    }

    /// Whether there is room for one more on the cluster.
    pub(super) fn room(&mut self, now: f64, uses: [f64; 2]) -> bool {
        for _ in 0..REFRESHED.min(self.started.len()) {
            let next = self.started.range(self.next + 1..).next();
            let Some(next) = next.or_else(|| self.started.first()).copied() else {
                break;
            };
            self.next = next;
            self.refresh(now, next);
        }
        let Some(fill) = self.fill else { return true };
        let most = self.sums.len() as f64 * fill;
        (0..2).all(|n| self.all[n] + uses[n] <= most)
    }

    /// Whether there is room for one more on a card.
    pub(super) fn room_on(&mut self, now: f64, card: usize, uses: [f64; 2]) -> bool {
        let Some(fill) = self.fill else { return true };
        self.on(now, card);
        // A card's first one has room whatever it uses.
        let empty = self.on[card].is_empty();
        empty || (0..2).all(|n| self.sums[card][n] + uses[n] <= fill)
    }

    /// What is expected of a card, of what is wanted most.
    pub(super) fn on(&mut self, now: f64, card: usize) -> f64 {
        for job in self.on[card].clone() {
            self.refresh(now, job);
        }
        self.sums[card][0].max(self.sums[card][1])
    }

    pub(super) fn start(&mut self, now: f64, job: usize, card: usize, uses: [f64; 2]) {
        self.jobs[job] = One {
            there: true,
            card,
            now: uses,
            mean: uses,
            since: now,
        };
        self.started.insert(job);
        self.on[card].insert(job);
        self.add(card, uses, 1.0);
    }

    /// What a job uses from now on, and where.
    pub(super) fn uses(&mut self, now: f64, job: usize, card: usize, uses: [f64; 2]) {
        if !self.jobs[job].there {
            return;
        }
        self.refresh(now, job);
        let one = &mut self.jobs[job];
        one.now = uses;
        let (old, mean) = (one.card, one.mean);
        one.card = card;
        if old != card {
            self.on[old].remove(&job);
            self.on[card].insert(job);
            self.add(old, mean, -1.0);
            self.add(card, mean, 1.0);
        }
    }

    pub(super) fn end(&mut self, job: usize) {
        let one = std::mem::take(&mut self.jobs[job]);
        if one.there {
            self.add(one.card, one.mean, -1.0);
            self.started.remove(&job);
            self.on[one.card].remove(&job);
        }
    }

    fn refresh(&mut self, now: f64, job: usize) {
        let one = &mut self.jobs[job];
        let keeps = (-(now - one.since).max(0.0) / OVER).exp();
        one.since = now;
        let (before, uses) = (one.mean, one.now);
        let mean = [0, 1].map(|n| before[n] * keeps + uses[n] * (1.0 - keeps));
        one.mean = mean;
        let card = one.card;
        self.add(card, [0, 1].map(|n| mean[n] - before[n]), 1.0);
    }

    fn add(&mut self, card: usize, what: [f64; 2], sign: f64) {
        for (n, what) in what.into_iter().enumerate() {
            self.sums[card][n] += sign * what;
            self.all[n] += sign * what;
        }
    }
}
