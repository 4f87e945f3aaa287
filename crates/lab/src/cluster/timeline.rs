//! [`Timeline`]: who was where when, for pictures.

use ebb_units::Bytes;

/// What a job does in a span of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has arrived and has no card yet.
    Queued,
    /// It runs.
    Running,
    /// It wants to use the GPU and its bytes are not there.
    Waiting,
    /// It does not use the GPU.
    Idle,
}

/// A span of a job's time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// From, seconds.
    pub from: f64,
    /// To, seconds.
    pub to: f64,
    /// What it does.
    pub state: State,
}

/// One job over time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    /// What it did.
    pub spans: Vec<Span>,
    /// Bytes on a card, at each change: seconds, bytes.
    pub resident: Vec<(f64, Bytes)>,
    /// When it was stopped for another.
    pub stops: Vec<f64>,
}

/// Who was where when; empty if nobody asked for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// The jobs, in the order given.
    pub lanes: Vec<Lane>,
}

impl Timeline {
    pub(super) fn new(jobs: usize, wanted: bool) -> Self {
        Self {
            lanes: vec![Lane::default(); if wanted { jobs } else { 0 }],
        }
    }

    /// From now on a job does something else; `None`: it has ended.
    pub(super) fn enter(&mut self, job: usize, now: f64, state: Option<State>) {
        let Some(lane) = self.lanes.get_mut(job) else {
            return;
        };
        if let Some(last) = lane.spans.last_mut()
            && last.to.is_infinite()
        {
            if Some(last.state) == state {
                return;
            }
            last.to = now;
            if last.to <= last.from {
                lane.spans.pop();
            }
        }
        if let Some(state) = state {
            match lane.spans.last_mut() {
                Some(last) if last.state == state && last.to >= now => last.to = f64::INFINITY,
                _ => lane.spans.push(Span {
                    from: now,
                    to: f64::INFINITY,
                    state,
                }),
            }
        }
    }

    pub(super) fn resident(&mut self, job: usize, now: f64, bytes: Bytes) {
        let Some(lane) = self.lanes.get_mut(job) else {
            return;
        };
        match lane.resident.last_mut() {
            Some(last) if last.1 == bytes => {}
            Some(last) if last.0 >= now => last.1 = bytes,
            _ => lane.resident.push((now, bytes)),
        }
    }

    pub(super) fn stop(&mut self, job: usize, now: f64) {
        if let Some(lane) = self.lanes.get_mut(job) {
            lane.stops.push(now);
        }
    }
}
