//! Finish-time fairness over many cards: jobs that want several cards at once share a cluster.
//!
//! A job's *ratio* is its time from arrival to end over what it would take on a fair part of the cluster: its time alone times
//! the jobs of the trace over the cards (at least 1), as Zheng et al. count it ("Shockwave", NSDI 2023). A ratio of 1 or less is
//! fair. Two ways to share:
//!
//! * *Shares*: nothing is known of run times. Who ran for the smallest part of its time in the cluster goes first.
//! * *Deadlines*: run times are given. A job's deadline is where its ratio reaches a bound. Who would miss it by waiting on goes first;
//!   then those whose time to go is most of what is left for all, so that none of them is left over at the end; then the shortest.
//!
//! Looked at anew at each arrival and end, and every round. A job that is started or comes back pays for it. Cards of one job are on
//! one server in theirs; here any will do.

use crate::read::finish::GangJob;

/// Above this ratio a job counts as treated unfairly.
pub const UNFAIR: f64 = 1.05;

/// Whoever needs more than this part of the time in which all can be through at the earliest goes before shorter ones.
const LONG: f64 = 0.7;

/// How the cluster is run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Cards.
    pub cards: usize,
    /// Seconds after which turns are looked at anew.
    pub round: f64,
    /// Seconds that a job loses each time when it gets its cards.
    pub switch: f64,
    /// The ratio that nobody is to pass; `None`: run times are not known.
    pub bound: Option<f64>,
}

impl Default for Plan {
    /// As in the published table, and two copies of a card of 32 GiB, out and in, with some to spare.
    fn default() -> Self {
        Self {
            cards: 32,
            round: 120.0,
            switch: 2.0,
            bound: Some(1.0),
        }
    }
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// From the first arrival to the last end, seconds.
    pub makespan: f64,
    /// From arrival to end, mean, seconds.
    pub turnaround: f64,
    /// The ratio of each job.
    pub ratios: Vec<f64>,
    /// Times that a job got its cards.
    pub switches: u64,
}

impl Outcome {
    /// The worst ratio.
    #[must_use]
    pub fn worst(&self) -> f64 {
        self.ratios.iter().copied().fold(0.0, f64::max)
    }

    /// Jobs that were treated unfairly, percent.
    #[must_use]
    pub fn unfair(&self) -> f64 {
        let n = self.ratios.iter().filter(|r| **r > UNFAIR).count();
        100.0 * n as f64 / self.ratios.len().max(1) as f64
    }
}

/// Runs the jobs. Jobs that want more cards than there are are left out.
#[must_use]
pub fn run(jobs: &[GangJob], plan: &Plan) -> Outcome {
    let jobs: Vec<GangJob> = jobs
        .iter()
        .copied()
        .filter(|j| j.cards <= plan.cards && j.seconds > 0.0)
        .collect();
    let crowd = (jobs.len() as f64 / plan.cards as f64).max(1.0);
    let mut left: Vec<f64> = jobs.iter().map(|j| j.seconds).collect();
    let mut ran = vec![0.0; jobs.len()];
    let mut ends: Vec<Option<f64>> = vec![None; jobs.len()];
    let mut runs = vec![false; jobs.len()];
    let mut switches = 0;
    let first = jobs.iter().map(|j| j.arrives).fold(f64::INFINITY, f64::min);
    let mut now = if first.is_finite() { first } else { 0.0 };
    while ends.iter().any(Option::is_none) {
        let here: Vec<usize> = (0..jobs.len())
            .filter(|n| jobs[*n].arrives <= now && ends[*n].is_none())
            .collect();
        // Who goes before whom: smaller first.
        let mut line: Vec<(u8, f64, usize)> = match plan.bound {
            Some(bound) => by_deadline(&jobs, &left, &here, now, bound * crowd, plan),
            None => here
                .iter()
                .map(|n| {
                    let share = ran[*n] / (now - jobs[*n].arrives).max(1.0);
                    // Not back and forth between two of one share.
                    (0, if runs[*n] { share - 0.02 } else { share }, *n)
                })
                .collect(),
        };
        line.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        let mut free = plan.cards;
        let mut next = vec![false; jobs.len()];
        for (_, _, n) in line {
            if jobs[n].cards <= free {
                free -= jobs[n].cards;
                next[n] = true;
                if !runs[n] {
                    left[n] += plan.switch;
                    switches += 1;
                }
            }
        }
        runs = next;
        let round = ((now / plan.round).floor() + 1.0) * plan.round;
        let arrival = jobs.iter().map(|j| j.arrives).filter(|at| *at > now);
        let end = (0..jobs.len()).filter(|n| runs[*n]).map(|n| now + left[n]);
        // Where nobody is, nothing is to be looked at until somebody comes.
        let looked = if here.is_empty() { f64::INFINITY } else { round };
        let until = arrival.chain(end).fold(looked, f64::min);
        for n in (0..jobs.len()).filter(|n| runs[*n]) {
            left[n] -= until - now;
            ran[n] += until - now;
            if left[n] <= 1e-9 {
                ends[n] = Some(until);
            }
        }
        now = until;
        for n in 0..jobs.len() {
            runs[n] &= ends[n].is_none();
        }
    }
    let took = |n: usize| ends[n].unwrap_or(now) - jobs[n].arrives;
    Outcome {
        makespan: if jobs.is_empty() { 0.0 } else { now - first },
        turnaround: (0..jobs.len()).map(took).sum::<f64>() / jobs.len().max(1) as f64,
        ratios: (0..jobs.len())
            .map(|n| took(n) / (jobs[n].seconds * crowd))
            .collect(),
        switches,
    }
}

/// Ranks jobs so that none whose deadline is `times` its time alone after its arrival misses it, if that can be: those first that are pressed, by
/// deadline; then the longest, if it would be what is left over; then the shortest ones. Pressed is whose own time is nearly up, and all up to a deadline before which there is hardly room
/// for the work of those that end there or earlier.
fn by_deadline(
    jobs: &[GangJob],
    left: &[f64],
    here: &[usize],
    now: f64,
    times: f64,
    plan: &Plan,
) -> Vec<(u8, f64, usize)> {
    // A round may pass before it is looked at again, and what is needed may not be free at once.
    let margin = 2.0 * plan.round;
    let deadline = |n: usize| jobs[n].arrives + times * jobs[n].seconds;
    let mut order = here.to_vec();
    order.sort_by(|a, b| deadline(*a).total_cmp(&deadline(*b)).then(a.cmp(b)));
    let (mut work, mut pressed_until) = (0.0, f64::NEG_INFINITY);
    for n in &order {
        work += left[*n] * jobs[*n].cards as f64 / plan.cards as f64;
        if now + work + margin > deadline(*n) {
            pressed_until = deadline(*n);
        }
    }
    // All can be through by then at the earliest; whoever needs most of that time may not wait long either.
    let longest = here.iter().map(|n| left[*n]).fold(0.0, f64::max);
    let through = work.max(longest);
    order
        .into_iter()
        .map(|n| {
            let pressed = deadline(n) <= pressed_until || now + left[n] + margin > deadline(n);
            if pressed {
                (0, deadline(n), n)
            } else if left[n] > LONG * through {
                (1, -left[n], n)
            } else {
                (2, left[n] * jobs[n].cards as f64, n)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use rand_pcg::Pcg64;
    use rand_pcg::rand_core::{Rng, SeedableRng};

    use super::*;
    use crate::read::finish;

    fn job(arrives: f64, seconds: f64, cards: usize) -> GangJob {
        GangJob {
            arrives,
            seconds,
            cards,
        }
    }

    #[test]
    fn alone_a_job_takes_its_time() {
        let out = run(&[job(7.0, 500.0, 4)], &Plan::default());
        assert!((out.makespan - 502.0).abs() < 1e-6, "{out:?}");
        assert_eq!(out.switches, 1);
    }

    #[test]
    fn short_jobs_do_not_wait_for_a_long_one() {
        let jobs = [job(0.0, 10_000.0, 1), job(10.0, 600.0, 1), job(10.0, 600.0, 1)];
        for bound in [None, Some(1.2)] {
            let plan = Plan {
                cards: 1,
                bound,
                ..Plan::default()
            };
            let out = run(&jobs, &plan);
            assert!(out.worst() < 1.25, "{bound:?}: {:?}", out.ratios);
            assert!(out.makespan < 11_800.0, "{bound:?}: {}", out.makespan);
        }
    }

    /// Random jobs on eight cards: all end, none is better off than alone, and cards are never over-sold.
    #[test]
    fn work_is_neither_lost_nor_made() {
        for seed in 0..40 {
            let mut rng = Pcg64::seed_from_u64(seed);
            let mut below = |n: u64| rng.next_u64() % n;
            let jobs: Vec<GangJob> = (0..30)
                .map(|_| job(below(4000) as f64, 60.0 + below(6000) as f64, 1 << below(4)))
                .collect();
            let work: f64 = jobs.iter().map(|j| j.seconds * j.cards as f64).sum();
            for bound in [None, Some(UNFAIR), Some(1.5)] {
                let plan = Plan {
                    cards: 8,
                    bound,
                    ..Plan::default()
                };
                let out = run(&jobs, &plan);
                assert!(out.makespan * 8.0 >= work, "seed {seed}");
                let crowd = jobs.len() as f64 / 8.0;
                assert!(out.ratios.iter().all(|r| r * crowd >= 1.0), "seed {seed}");
            }
        }
    }

    /// The published table, where it is there: no worse than what is printed in it.
    #[test]
    fn the_published_table_is_met() {
        let Some(data) = crate::data::for_tests("shockwave") else {
            return;
        };
        let folder = finish::folder(&data);
        let jobs = finish::jobs(&finish::trace_in(&folder).unwrap()).unwrap();
        assert_eq!(jobs.len(), 120);
        let best = finish::published(&folder).unwrap();
        let best = best
            .iter()
            .find(|p| p.policy == "shockwave" && p.place == "simulation")
            .unwrap();
        let out = run(&jobs, &Plan::default());
        assert!(out.worst() <= best.worst, "{} {}", out.worst(), best.worst);
        assert!(
            out.makespan <= best.makespan,
            "{} {}",
            out.makespan,
            best.makespan
        );
        assert!(out.unfair() <= best.unfair, "{} {}", out.unfair(), best.unfair);
    }
}
