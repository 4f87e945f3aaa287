//! Trainings and services together on one cluster: with ebb, and as others share cards.
//!
//! Jobs are drawn from recordings by a seed: trainings with measured bytes and GPU share that run for recorded times, and
//! windows of recorded serving containers. They come over a few hours to a cluster of so many cards that what the jobs use, bytes
//! or GPU time, whichever is more, would fill them exactly while jobs come ([`Mix::load`] 1): a busy cluster, in which everybody
//! waits in line at times. The cards are the same for every policy; see [`crate::cluster`] for what each does.

use ebb_units::Bytes;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

use crate::cluster::{self, Job, Outcome, Policy, Setting};
use crate::read::gentd::{Container, Recording};
use crate::read::jobs::Training;
use crate::serving::{self, ServingError};

/// The part of the cards that is filled by what started jobs are expected to use.
const FILL: f64 = 0.92;

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
    /// What the jobs use over what the cards have while jobs arrive: the cluster has as many cards as this needs.
    pub load: f64,
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
            load: 1.0,
            seed: 1,
        }
    }
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

/// Cards for the jobs, by [`Mix::load`].
#[must_use]
pub fn cards(jobs: &[Job], card: Bytes, mix: &Mix) -> usize {
    let bytes: f64 = jobs.iter().map(Job::in_use).sum::<f64>() / (card.0 as f64 / Bytes::gib(1).0 as f64);
    let gpu: f64 = jobs.iter().map(Job::gpu_hours).sum();
    ((bytes.max(gpu) / (mix.arrive_within * mix.load)).ceil() as usize).max(1)
}

/// The jobs of a drawn recording and the cluster for them. `card`: bytes of a card, or the smallest that is sold and holds the largest job; `count`: cards,
/// or as many as the mix's load says.
///
/// # Errors
/// A job is larger than a card, or there is none.
pub fn cluster(
    drawn: &Recording,
    mix: &Mix,
    card: Option<Bytes>,
    count: Option<usize>,
) -> Result<(Vec<Job>, Setting), ServingError> {
    let card = serving::card_for(drawn, card)?;
    let jobs = cluster::from::recording(drawn);
    if jobs.is_empty() {
        return Err(ServingError::Empty);
    }
    let cards = count.unwrap_or_else(|| cards(&jobs, card, mix));
    let setting = Setting {
        cards,
        card,
        idle_release: Some(std::time::Duration::from_secs(10)),
        fill: Some(FILL),
        ..Setting::default()
    };
    Ok((jobs, setting))
}

/// Utilisation and makespan of one outcome over another's.
#[must_use]
pub fn ratios(ours: &Outcome, theirs: &Outcome) -> (f64, f64) {
    (
        ours.utilisation / theirs.utilisation,
        ours.makespan / theirs.makespan,
    )
}

/// With ebb and with static allocation: what most want to know, in less time than all policies take.
#[must_use]
pub fn both(jobs: &[Job], setting: &Setting) -> [Outcome; 2] {
    [Policy::Static, Policy::Ebb].map(|policy| cluster::run(jobs, setting, policy))
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
    fn what_idles_makes_room_for_more_work() {
        let mix = Mix {
            jobs: 24,
            arrive_within: 0.3,
            trainings_of_ten: 0,
            run: (0.2, 0.5),
            ..Mix::default()
        };
        let drawn = draw(&services(), &[], &[1200.0], &mix);
        let (jobs, setting) = cluster(&drawn, &mix, None, None).unwrap();
        let [theirs, ours] = both(&jobs, &setting);
        let (utilisation, makespan) = ratios(&ours, &theirs);
        assert!(utilisation > 1.5 && makespan < 0.7, "{utilisation} {makespan}");
        assert_eq!((ours.failed(), theirs.failed()), (0, 0));
    }

    /// The recorded jobs, where they are there: what the lab promises, for seeds that nobody chose.
    #[test]
    fn recorded_jobs_use_the_cards_half_again_as_well_as_statically() {
        use crate::read::{gentd, jobs};
        let Some(data) = crate::data::for_tests("alibaba-gentd26") else {
            return;
        };
        let services = gentd::recording(&data).unwrap();
        let (trainings, times) = (jobs::trainings(&data).unwrap(), jobs::run_times(&data).unwrap());
        for seed in [101, 102] {
            let mix = Mix {
                seed,
                ..Mix::default()
            };
            let drawn = draw(&services, &trainings, &times, &mix);
            let (jobs, setting) = cluster(&drawn, &mix, None, None).unwrap();
            let [theirs, ours] = both(&jobs, &setting);
            let (utilisation, makespan) = ratios(&ours, &theirs);
            assert!(
                utilisation >= 1.5 && makespan <= 1.0,
                "seed {seed}: {utilisation} {makespan}"
            );
            assert_eq!((ours.failed(), theirs.failed()), (0, 0));
        }
    }
}
