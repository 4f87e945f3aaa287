//! [`Course`]: how far a job is in what it does.

use super::{Done, Job};

/// What a job does next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Step {
    /// Nothing, up to a time.
    Idle(f64),
    /// It uses the GPU: the phase, which may go on from another one without a pause.
    Busy,
    /// It has ended.
    End,
}

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Course {
    /// The phase that it is in; before the first one, nothing.
    pub(super) phase: Option<usize>,
    started: f64,
    /// Where the next phase begins by the clock, seconds after the start.
    planned: f64,
    /// The burst that it is in: since when it was wanted, and what it takes alone.
    burst: Option<(f64, f64)>,
}

impl Course {
    pub(super) fn start(&mut self, now: f64) {
        self.started = now;
    }

    /// On to the next phase. Ended bursts go to `done`.
    pub(super) fn next(&mut self, now: f64, job: &Job, done: &mut Done) -> Step {
        let place = self.phase.map_or(0, |p| p + 1);
        self.phase = Some(place);
        let Some(phase) = job.phases.get(place) else {
            self.end_burst(now, done);
            return Step::End;
        };
        let begins = self.started + self.planned;
        self.planned += phase.seconds;
        if phase.duty > 0.0 {
            let wanted = if job.by_clock { begins.min(now) } else { now };
            let burst = self.burst.get_or_insert((wanted, 0.0));
            burst.1 += phase.seconds;
            return Step::Busy;
        }
        self.end_burst(now, done);
        Step::Idle(if job.by_clock {
            (self.started + self.planned).max(now)
        } else {
            now + phase.seconds
        })
    }

    fn end_burst(&mut self, now: f64, done: &mut Done) {
        if let Some((since, alone)) = self.burst.take() {
            done.bursts.push((now - since, alone));
        }
    }
}
