//! Trainings and services together, on the cards that they need with ebb, against static allocation on as many.
//!
//! Jobs are drawn from recordings by a seed: trainings with measured bytes and GPU share that run for recorded times, and
//! windows of recorded serving containers. With ebb a job starts when it arrives; what is idle is in host memory. Statically it
//! waits in the order of arrival until a card has room for its peak and for its GPU share at its peak, and holds both
//! until it ends. The cards are as many for both.

use ebb_units::Bytes;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

use crate::read::gentd::{Container, Recording};
use crate::read::jobs::Training;
use crate::serving::{self, ServingError, Setting};

/// How the jobs are drawn.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Jobs.
    pub jobs: usize,
    /// Of ten, so many are trainings.
    pub trainings_of_ten: u64,
    /// Jobs arrive within so many hours.
    pub arrive_within: f64,
    /// Run times, hours: shorter ones and longer ones are not drawn.
    pub run: (f64, f64),
    /// Of all that is random.
    pub seed: u64,
}

impl Default for Mix {
    fn default() -> Self {
        Self {
            jobs: 240,
            trainings_of_ten: 3,
            arrive_within: 2.0,
            run: (0.25, 2.0),
            seed: 1,
        }
    }
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Jobs.
    pub jobs: usize,
    /// Cards, as many for both.
    pub cards: usize,
    /// From the first arrival to the last end, hours: static, with ebb.
    pub makespan: [f64; 2],
    /// Bytes in use by busy jobs over bytes of the cards, mean over the makespan: static, with ebb.
    pub utilisation: [f64; 2],
    /// The serving run.
    pub served: serving::Outcome,
}

/// Draws the jobs as one recording, from a recording of services, training configurations and run times.
#[must_use]
pub fn draw(services: &Recording, trainings: &[Training], run_times: &[f64], mix: &Mix) -> Recording {
    let mut rng = Pcg64::seed_from_u64(mix.seed);
    let mut below = |n: usize| (rng.next_u64() % n.max(1) as u64) as usize;
    let steps_of = |hours: f64| (hours * 3600.0 / services.period).round() as usize;
    let (least, most) = (steps_of(mix.run.0).max(1), steps_of(mix.run.1).max(2));
    let times: Vec<usize> = run_times
        .iter()
        .map(|s| (s / services.period).round() as usize)
        .filter(|n| (least..=most).contains(n))
        .collect();
    // A service that is busy at some time.
    let usable: Vec<&Container> = services
        .containers
        .iter()
        .filter(|c| c.life().len() > most && c.duty.iter().any(|d| *d > 0.0))
        .collect();
    let steps = steps_of(mix.arrive_within) + most + 1;
    let containers = (0..mix.jobs)
        .map(|n| {
            let arrives = below(steps_of(mix.arrive_within).max(1));
            let length = if times.is_empty() {
                most
            } else {
                times[below(times.len())]
            };
            let training = (below(10) as u64) < mix.trainings_of_ten || usable.is_empty();
            let mut job = Container {
                name: format!("job {n}"),
                bytes: vec![None; steps],
                duty: vec![0.0; steps],
            };
            if training && !trainings.is_empty() {
                let t = trainings[below(trainings.len())];
                for step in arrives..arrives + length {
                    job.bytes[step] = Some(t.bytes);
                    job.duty[step] = t.duty;
                }
            } else if !usable.is_empty() {
                let c = usable[below(usable.len())];
                let life = c.life();
                let from = life.start + below(life.len() - length);
                for at in 0..length {
                    job.bytes[arrives + at] = c.bytes[from + at];
                    job.duty[arrives + at] = c.duty[from + at];
                }
            }
            job
        })
        .collect();
    Recording {
        period: services.period,
        steps,
        containers,
    }
}

/// Runs the jobs both ways.
///
/// # Errors
/// A job is larger than a card, or there is none.
pub fn run(jobs: &Recording, setting: &Setting) -> Result<Outcome, ServingError> {
    let served = serving::serve(jobs, setting)?;
    let cards = served.cards_peak.max(1);
    let last = jobs.containers.iter().map(|c| c.life().end).max().unwrap_or(0);
    // Whoever ends last waited at most for as long as any job did in all.
    let waited = served.waited.iter().copied().fold(0.0, f64::max);
    let ours = last as f64 * jobs.period + waited;
    let theirs = static_end(jobs, cards, served.card) as f64 * jobs.period;
    let hours = [theirs / 3600.0, ours / 3600.0];
    let card_gib = served.card.0 as f64 / Bytes::gib(1).0 as f64;
    let utilisation = hours.map(|h| served.busy_gib_hours / (cards as f64 * card_gib * h));
    Ok(Outcome {
        jobs: jobs.containers.len(),
        cards,
        makespan: hours,
        utilisation,
        served,
    })
}

/// When the last job ends under static allocation, in samples: first come, first served, onto the fullest card that has room for
/// the job's peak; a later job that fits goes ahead of one that does not.
fn static_end(jobs: &Recording, cards: usize, card: Bytes) -> usize {
    let mut queue: Vec<usize> = (0..jobs.containers.len())
        .filter(|n| !jobs.containers[*n].life().is_empty())
        .collect();
    queue.sort_by_key(|n| (jobs.containers[*n].life().start, *n));
    let mut running: Vec<(usize, usize, Bytes, f64)> = Vec::new();
    let mut step = 0;
    let mut end = 0;
    while !queue.is_empty() {
        running.retain(|r| r.0 > step);
        queue.retain(|n| {
            let job = &jobs.containers[*n];
            if job.life().start > step {
                return true;
            }
            let (peak, duty) = (job.peak(), job.duty.iter().copied().fold(0.0, f64::max));
            let used = |on: usize| {
                running
                    .iter()
                    .filter(|r| r.1 == on)
                    .fold((Bytes::ZERO, 0.0), |sum, r| (sum.0 + r.2, sum.1 + r.3))
            };
            let fits = (0..cards)
                .filter(|on| used(*on).0 + peak <= card && used(*on).1 + duty <= 1.0 + 1e-9)
                .max_by_key(|on| (used(*on).0, usize::MAX - on));
            match fits {
                Some(on) => {
                    let until = step + job.life().len();
                    end = end.max(until);
                    running.push((until, on, peak, duty));
                    false
                }
                None => true,
            }
        });
        step += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    fn services() -> Recording {
        let steps = 400;
        Recording {
            period: 60.0,
            steps,
            containers: (0..8)
                .map(|n| Container {
                    name: format!("s{n}"),
                    bytes: vec![Some(Bytes::gib(16 + n)); steps],
                    duty: (0..steps)
                        .map(|s| {
                            if (s as u64 + n).is_multiple_of(6) {
                                0.3
                            } else {
                                0.0
                            }
                        })
                        .collect(),
                })
                .collect(),
        }
    }

    #[test]
    fn jobs_are_drawn_the_same_for_a_seed_and_live_as_long_as_drawn() {
        let trainings = [Training {
            bytes: Bytes::gib(10),
            duty: 0.5,
        }];
        let mix = Mix {
            jobs: 30,
            ..Mix::default()
        };
        let a = draw(&services(), &trainings, &[1800.0, 3600.0], &mix);
        assert_eq!(a, draw(&services(), &trainings, &[1800.0, 3600.0], &mix));
        assert_eq!(a.containers.len(), 30);
        assert!(a.containers.iter().all(|c| [30, 60].contains(&c.life().len())));
    }

    #[test]
    fn statically_jobs_wait_for_room() {
        // Three jobs of 16 GiB, ten samples each, at once, on one card of 24.
        let mut r = services();
        r.steps = 10;
        r.containers.truncate(3);
        for c in &mut r.containers {
            c.bytes = vec![Some(Bytes::gib(16)); 10];
            c.duty = vec![0.2; 10];
        }
        assert_eq!(static_end(&r, 1, Bytes::gib(24)), 30);
        assert_eq!(static_end(&r, 3, Bytes::gib(24)), 10);
        assert_eq!(static_end(&r, 1, Bytes::gib(48)), 10);
    }

    #[test]
    fn what_idles_makes_room_for_more_work() {
        let mix = Mix {
            jobs: 24,
            arrive_within: 0.3,
            trainings_of_ten: 0,
            run: (0.2, 0.5),
            ..Mix::default()
        };
        let jobs = draw(&services(), &[], &[1200.0], &mix);
        let out = run(&jobs, &Setting::default()).unwrap();
        assert!(
            out.utilisation[1] > 1.5 * out.utilisation[0],
            "{:?}",
            out.utilisation
        );
        assert!(out.makespan[1] <= out.makespan[0], "{:?}", out.makespan);
    }
}
