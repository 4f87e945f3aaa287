//! [`Companions`]: what one task's use says about another's, through whoever uses them.
//!
//! A caller (a tenant, a user, a notebook) that used task A goes on to B. Which B, is learned as a table of successions,
//! kept apart for tasks that this caller has used before and for those that it has not.

use std::collections::BTreeMap;

/// Seconds over which a caller's last use fades.
const SPANS: [f64; 5] = [15.0, 60.0, 240.0, 900.0, 3600.0];
/// Components that companions contribute: new tasks of a caller that just came, and of one that is at it for long;
/// tasks that it knows; and both for callers that have work running.
pub(super) const PARTS: usize = 3 * SPANS.len() + 2;
/// A caller that was away for so long begins anew, seconds.
const SESSION: f64 = 3.0 * 3600.0;
/// Uses after which a caller counts as being at it for long.
const LONG: u32 = 3;
/// Callers remembered; the one that was seen least lately is forgotten first.
const CALLERS: usize = 4096;
/// Tasks remembered of a caller, and successors of a task.
const KNOWN: usize = 32;
const SUCCESSORS: usize = 128;
/// Weight of the general popularity beside the successions that were seen.
const PRIOR: f64 = 0.5;

#[derive(Clone, Debug)]
struct Caller {
    /// The task used last.
    last: usize,
    /// When its last use began or ended.
    seen: f64,
    running: u32,
    /// Uses in this session.
    uses: u32,
    /// Tasks used, the latest last.
    known: Vec<usize>,
}

#[derive(Clone, Debug, Default)]
struct Next {
    to: BTreeMap<usize, f64>,
    sum: f64,
}

impl Next {
    fn add(&mut self, task: usize) {
        const KEEP: f64 = 0.995;
        for count in self.to.values_mut() {
            *count *= KEEP;
        }
        *self.to.entry(task).or_insert(0.0) += 1.0;
        if self.to.len() > SUCCESSORS {
            let least = self
                .to
                .iter()
                .min_by(|a, b| a.1.total_cmp(b.1))
                .map(|(task, _)| *task);
            if let Some(least) = least {
                self.to.remove(&least);
            }
        }
        self.sum = self.to.values().sum();
    }
}

/// The callers and the successions.
#[derive(Clone, Debug, Default)]
pub(super) struct Companions {
    callers: BTreeMap<u64, Caller>,
    /// Callers whose session is not over.
    active: Vec<u64>,
    next: Vec<Next>,
    popularity: Vec<f64>,
    popular: f64,
}

impl Companions {
    /// A task begins to be used by a caller.
    pub(super) fn began(&mut self, now: f64, caller: u64, task: usize) {
        self.room_for(task);
        const KEEP: f64 = 0.999;
        for p in &mut self.popularity {
            *p *= KEEP;
        }
        self.popularity[task] += 1.0;
        self.popular = self.popularity.iter().sum();
        if !self.callers.contains_key(&caller) && self.callers.len() >= CALLERS {
            self.forget_one();
        }
        let known = self.callers.entry(caller).or_insert(Caller {
            last: task,
            seen: now,
            running: 0,
            uses: 0,
            known: Vec::new(),
        });
        let anew = now - known.seen > SESSION;
        if known.last != task && !anew {
            self.next[known.last].add(task);
        }
        known.uses = if anew { 1 } else { known.uses.saturating_add(1) };
        known.last = task;
        known.seen = now;
        known.running += 1;
        known.known.retain(|t| *t != task);
        if known.known.len() == KNOWN {
            known.known.remove(0);
        }
        known.known.push(task);
        if let Err(at) = self.active.binary_search(&caller) {
            self.active.insert(at, caller);
        }
    }

    /// That use ended.
    pub(super) fn ended(&mut self, now: f64, caller: u64) {
        if let Some(known) = self.callers.get_mut(&caller) {
            known.running = known.running.saturating_sub(1);
            known.seen = now;
        }
    }

    /// Nobody speaks of a task any more.
    pub(super) fn forget(&mut self, task: usize) {
        if task < self.next.len() {
            self.next[task] = Next::default();
            self.popularity[task] = 0.0;
            self.popular = self.popularity.iter().sum();
        }
        for next in &mut self.next {
            if let Some(count) = next.to.remove(&task) {
                next.sum -= count;
            }
        }
        self.callers.retain(|_, c| c.last != task);
        for caller in self.callers.values_mut() {
            caller.known.retain(|t| *t != task);
        }
        let callers = &self.callers;
        self.active.retain(|c| callers.contains_key(c));
    }

    /// Callers whose session is over do not count from now on.
    pub(super) fn expire(&mut self, now: f64) {
        let callers = &self.callers;
        self.active.retain(|id| {
            callers
                .get(id)
                .is_some_and(|c| c.running > 0 || now - c.seen <= SESSION)
        });
    }

    /// The components for every task, added to rows of `out` (one a task).
    pub(super) fn all(&self, now: f64, out: &mut [[f64; PARTS]]) {
        for id in &self.active {
            let Some(caller) = self.callers.get(id) else {
                continue;
            };
            let (sums, fade) = (self.sums(caller), fade(caller, now));
            let tasks = self.popularity.len().min(out.len());
            for (task, row) in out.iter_mut().enumerate().take(tasks) {
                self.contribute(caller, task, sums, &fade, row);
            }
        }
    }

    /// The components for one task.
    pub(super) fn one(&self, now: f64, task: usize) -> [f64; PARTS] {
        let mut row = [0.0; PARTS];
        if task < self.popularity.len() {
            for id in &self.active {
                let Some(caller) = self.callers.get(id) else {
                    continue;
                };
                self.contribute(caller, task, self.sums(caller), &fade(caller, now), &mut row);
            }
        }
        row
    }

    /// How likely a caller's next task is this one, by successions and popularity; not normalised.
    fn chance(&self, from: usize, to: usize) -> f64 {
        let next = &self.next[from];
        let seen = next.to.get(&to).copied().unwrap_or(0.0);
        seen + PRIOR * self.popularity[to] / self.popular.max(1e-9)
    }

    /// What the chances of tasks that a caller does not know sum up to, and those of all.
    fn sums(&self, caller: &Caller) -> (f64, f64) {
        let all = self.next[caller.last].sum + PRIOR;
        let known: f64 = caller.known.iter().map(|t| self.chance(caller.last, *t)).sum();
        ((all - known).max(1e-6), all)
    }

    fn contribute(
        &self,
        caller: &Caller,
        task: usize,
        (new, all): (f64, f64),
        fade: &[f64; SPANS.len()],
        row: &mut [f64; PARTS],
    ) {
        if caller.last == task {
            return;
        }
        const N: usize = SPANS.len();
        let chance = self.chance(caller.last, task);
        let is_known = caller.known.contains(&task);
        let share = if is_known {
            chance / all
        } else {
            (chance / new).min(1.0)
        };
        if caller.running > 0 {
            row[3 * N + usize::from(is_known)] += share / SPANS[1];
            return;
        }
        let group = match (is_known, caller.uses > LONG) {
            (false, false) => 0,
            (false, true) => N,
            (true, _) => 2 * N,
        };
        for (x, fade) in row[group..group + N].iter_mut().zip(fade) {
            *x += share * fade;
        }
    }

    fn room_for(&mut self, task: usize) {
        if task >= self.next.len() {
            self.next.resize(task + 1, Next::default());
            self.popularity.resize(task + 1, 0.0);
        }
    }

    fn forget_one(&mut self) {
        let oldest = self
            .callers
            .iter()
            .min_by(|a, b| a.1.seen.total_cmp(&b.1.seen))
            .map(|(id, _)| *id);
        if let Some(oldest) = oldest {
            self.callers.remove(&oldest);
            self.active.retain(|id| *id != oldest);
        }
    }
}

/// How far a caller's last use has faded, by each span.
fn fade(caller: &Caller, now: f64) -> [f64; SPANS.len()] {
    let age = (now - caller.seen).max(0.0);
    SPANS.map(|span| (-age / span).exp() / span)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_succession_that_was_seen_is_expected_again() {
        let mut c = Companions::default();
        for (n, caller) in (0..20).enumerate() {
            let at = n as f64 * 1000.0;
            c.began(at, caller, 0);
            c.ended(at + 5.0, caller);
            c.began(at + 60.0, caller, 1);
            c.ended(at + 65.0, caller);
        }
        c.began(90_000.0, 99, 0);
        c.ended(90_005.0, 99);
        c.began(90_000.0, 98, 2);
        c.expire(90_010.0);
        let soon: f64 = c.one(90_010.0, 1)[..SPANS.len()].iter().sum();
        let other: f64 = c.one(90_010.0, 2)[..SPANS.len()].iter().sum();
        assert!(soon > 10.0 * other, "{soon} {other}");
    }

    #[test]
    fn callers_are_bounded() {
        let mut c = Companions::default();
        for caller in 0..2 * CALLERS as u64 {
            c.began(caller as f64, caller, (caller % 7) as usize);
            c.ended(caller as f64, caller);
        }
        assert_eq!(c.callers.len(), CALLERS);
        assert!(c.active.len() <= CALLERS);
    }

    #[test]
    fn all_and_one_agree() {
        let mut c = Companions::default();
        for n in 0..200_u64 {
            c.began(n as f64 * 7.0, n % 13, (n * n % 11) as usize);
            if n % 3 != 0 {
                c.ended(n as f64 * 7.0 + 3.0, n % 13);
            }
        }
        let now = 1500.0;
        c.expire(now);
        let mut rows = [[0.0; PARTS]; 11];
        c.all(now, &mut rows);
        for (task, row) in rows.iter().enumerate() {
            assert_eq!(*row, c.one(now, task));
        }
    }
}
