//! The jobs of a scenario file: repeated, numbered, with what is random drawn from the seed.

use std::path::Path;

use ebb_units::Bytes;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};
use toml::Spanned;

use crate::cluster::{Job, Phase, from};
use crate::read::gentd::{self, Container, Recording};
use crate::read::jobs::{self, Training};
use crate::traces::{self, Kind};

use super::{RawJob, Wrong, shown};

/// The most phases of one job.
const MOST_PHASES: usize = 2_000_000;

fn part(rng: &mut Pcg64) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
}

/// What a trace folder gives.
enum Source {
    Containers(Recording),
    Trainings(Vec<Training>),
}

pub(super) fn jobs(
    raw: &[Spanned<RawJob>],
    folder: &Path,
    card: Bytes,
    seed: u64,
) -> Result<Vec<Job>, Wrong> {
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut out = Vec::new();
    for spanned in raw {
        let at = spanned.span().start;
        let job = spanned.get_ref();
        let wrong = |what: String| Wrong {
            at,
            what: format!("job {}: {what}", job.name),
        };
        let source = match &job.trace {
            None => None,
            Some(trace) => Some(source(&folder.join(trace.get_ref())).map_err(|what| Wrong {
                at: trace.span().start,
                what,
            })?),
        };
        if source.is_some() != job.phases.is_empty() {
            return Err(wrong("give it phases, or a trace to draw them from".into()));
        }
        if job.phases.len().saturating_mul(job.repeat.0) > MOST_PHASES {
            return Err(wrong(format!("more than {MOST_PHASES} phases")));
        }
        for n in 0..job.count.0 {
            let mut one = match &source {
                Some(source) => from_trace(source, job, &mut rng).map_err(wrong)?,
                None => by_hand(job, &mut rng),
            };
            one.name = if job.count.0 > 1 {
                format!("{} {}", job.name, n + 1)
            } else {
                job.name.clone()
            };
            let every = job.every.map_or(0.0, |s| s.0);
            one.arrives = job.arrives.map_or(0.0, |s| s.0) + every * n as f64;
            one.priority = job.priority.0;
            one.request = job.request.map_or(Bytes::ZERO, |s| s.0);
            one.limit = job.limit.map(|s| s.0);
            one.lends = job.lends;
            one.by_clock = job.by_clock;
            check(&one, card).map_err(wrong)?;
            out.push(one);
        }
    }
    Ok(out)
}

/// What would be refused before anything ran.
fn check(job: &Job, card: Bytes) -> Result<(), String> {
    let peak = job.peak();
    if peak > card {
        return Err(format!("{} are more than a card of {}", shown(peak), shown(card)));
    }
    if job.limit.is_some_and(|limit| peak > limit) {
        return Err(format!("{} are more than its limit", shown(peak)));
    }
    if job.limit.is_some_and(|limit| job.request > limit) || job.request > card {
        return Err("its request is more than it can have".into());
    }
    if job.seconds() <= 0.0 {
        return Err("it takes no time".into());
    }
    Ok(())
}

fn by_hand(job: &RawJob, rng: &mut Pcg64) -> Job {
    let mut phases = Vec::with_capacity(job.phases.len() * job.repeat.0);
    for _ in 0..job.repeat.0 {
        for p in &job.phases {
            let swing = job.jitter.0 * (2.0 * part(rng) - 1.0);
            phases.push(Phase {
                seconds: p.seconds.0 * (1.0 + swing),
                bytes: p.memory.0,
                duty: p.gpu.0,
            });
        }
    }
    empty(phases)
}

fn empty(phases: Vec<Phase>) -> Job {
    Job {
        name: String::new(),
        arrives: 0.0,
        priority: ebb_units::Priority::Normal,
        request: Bytes::ZERO,
        limit: None,
        lends: true,
        by_clock: false,
        phases,
    }
}

fn source(path: &Path) -> Result<Source, String> {
    let kind = traces::recognise(path).map_err(|e| e.to_string())?;
    match kind {
        Kind::Serving => gentd::recording(path)
            .map(Source::Containers)
            .map_err(|e| e.to_string()),
        Kind::Profiles => jobs::trainings(path)
            .map(Source::Trainings)
            .map_err(|e| e.to_string()),
        other => Err(format!("{}: jobs cannot be drawn from {other}", path.display())),
    }
}

/// One that is drawn from a trace, for as long as the window.
fn from_trace(source: &Source, job: &RawJob, rng: &mut Pcg64) -> Result<Job, String> {
    let window = job.window.map_or(3600.0, |s| s.0).max(1.0);
    match source {
        Source::Trainings(all) => {
            let t = all
                .get((rng.next_u64() % all.len().max(1) as u64) as usize)
                .ok_or("the trace is empty")?;
            Ok(empty(vec![Phase {
                seconds: window,
                bytes: t.bytes,
                duty: t.duty,
            }]))
        }
        Source::Containers(recording) => {
            let steps = ((window / recording.period).round() as usize).max(1);
            let usable: Vec<&Container> = recording
                .containers
                .iter()
                .filter(|c| c.life().len() >= steps && c.duty.iter().any(|d| *d > 0.0))
                .collect();
            if usable.is_empty() {
                return Err("no container of the trace lives as long as the window".into());
            }
            // A window without a sample is not one.
            for _ in 0..64 {
                let c = usable[(rng.next_u64() % usable.len() as u64) as usize];
                let life = c.life();
                let start = life.start + (rng.next_u64() % (life.len() - steps + 1) as u64) as usize;
                let cut = Container {
                    name: c.name.clone(),
                    bytes: c.bytes[start..start + steps].to_vec(),
                    duty: c.duty[start..start + steps].to_vec(),
                };
                if let Some(job) = from::container(recording, &cut) {
                    return Ok(job);
                }
            }
            Err("no window of the trace has a sample".into())
        }
    }
}
