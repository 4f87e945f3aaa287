//! Jobs out of recordings.

use ebb_units::Priority;

use super::{Job, Phase};
use crate::read::gentd::{Container, Recording};

/// A recorded container as a job: each sample is a phase, and equal ones that follow each other are one. Where there is no sample
/// it holds what it held before, idle. `None`: there is none at all.
#[must_use]
pub fn container(recording: &Recording, container: &Container) -> Option<Job> {
    let life = container.life();
    let mut phases: Vec<Phase> = Vec::new();
    for step in life.clone() {
        let sample = container.bytes[step];
        let bytes = sample.or(phases.last().map(|p| p.bytes)).unwrap_or_default();
        let duty = if sample.is_some() {
            container.duty[step]
        } else {
            0.0
        };
        match phases.last_mut() {
            Some(last) if last.bytes == bytes && last.duty == duty => last.seconds += recording.period,
            _ => phases.push(Phase {
                seconds: recording.period,
                bytes,
                duty,
            }),
        }
    }
    (!phases.is_empty()).then(|| Job {
        name: container.name.clone(),
        arrives: life.start as f64 * recording.period,
        priority: Priority::Normal,
        request: ebb_units::Bytes::ZERO,
        limit: None,
        lends: true,
        by_clock: false,
        phases,
    })
}

/// All containers of a recording that have a sample.
#[must_use]
pub fn recording(recording: &Recording) -> Vec<Job> {
    let all = recording.containers.iter();
    all.filter_map(|c| container(recording, c)).collect()
}
