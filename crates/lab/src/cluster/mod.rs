//! Jobs on a cluster of cards: with ebb, and as others share cards.
//!
//! A [`Job`] is what it does alone on a card: phases, each with bytes and a share of the GPU's time for so many seconds. A phase
//! without GPU time is *idle*: the job holds its bytes and does not use them. Jobs arrive, wait in line for a start, run, and end.
//! What a [`Policy`] changes is who may start where, whose bytes stay on the card, and what bringing them back costs:
//!
//! | policy | a job takes of its card | idle bytes |
//! | --- | --- | --- |
//! | ebb | what it uses now; the arbiter settles conflicts | leave when others need the room, or after a while |
//! | static | its peak bytes and its peak GPU share, from start to end | stay |
//! | quotas | its peak bytes; GPU time is shared | stay |
//! | slices | a whole card while it is its turn | leave with the whole process at the end of the turn |
//! | keep-alive | its bytes, until it idled for a fixed time | leave after that time, never before |
//! | oracle | what it uses now, known in advance; moving is free | are nowhere |
//!
//! The same for all: jobs start in order of arrival, later ones that fit go ahead; on a card that is asked for more than its GPU
//! time everybody gets an even part, or less if it wants less ([`share`]), and takes longer accordingly; what a job waits for its
//! bytes delays all that it does afterwards. Nothing but the oracle looks ahead.

mod admission;
mod course;
mod fixed;
pub mod from;
mod oracle;
mod ours;
mod progress;
mod queue;
pub mod share;
mod slices;
#[cfg(test)]
mod tests;
mod timeline;

use std::time::Duration;

use ebb_policy::PolicyConfig;
use ebb_units::{Bytes, Priority};

use crate::sim::Speeds;

pub use timeline::{Lane, Span, State, Timeline};

/// What a job does for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// For how long, alone on a card.
    pub seconds: f64,
    /// Bytes that it holds.
    pub bytes: Bytes,
    /// Share of the GPU's time; 0: it is idle.
    pub duty: f64,
}

/// A job: what it does alone on a card, and what it may have.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Its name.
    pub name: String,
    /// When it comes, seconds.
    pub arrives: f64,
    /// Who goes first.
    pub priority: Priority,
    /// Bytes that are its for the asking.
    pub request: Bytes,
    /// The most that it may have.
    pub limit: Option<Bytes>,
    /// Its bytes may leave while it idles; otherwise they are its own from start to end, and its request is not lent either.
    pub lends: bool,
    /// Its bursts come by the clock: a delay shortens the idle time that follows. Otherwise idle times are kept.
    pub by_clock: bool,
    /// What it does.
    pub phases: Vec<Phase>,
}

impl Job {
    /// The most bytes that it holds.
    #[must_use]
    pub fn peak(&self) -> Bytes {
        self.phases.iter().map(|p| p.bytes).max().unwrap_or_default()
    }

    /// The largest share of GPU time that it uses.
    #[must_use]
    pub fn peak_duty(&self) -> f64 {
        self.phases.iter().map(|p| p.duty).fold(0.0, f64::max)
    }

    /// How long it takes alone, seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.phases.iter().map(|p| p.seconds).sum()
    }

    /// Bytes in use over time: those of its phases with GPU time, gibibyte-hours.
    #[must_use]
    pub fn in_use(&self) -> f64 {
        let busy = self.phases.iter().filter(|p| p.duty > 0.0);
        busy.map(|p| gib(p.bytes) * p.seconds / 3600.0).sum()
    }

    /// GPU time, hours.
    #[must_use]
    pub fn gpu_hours(&self) -> f64 {
        self.phases.iter().map(|p| p.duty * p.seconds / 3600.0).sum()
    }
}

/// How cards are shared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Policy {
    /// The arbiter decides.
    Ebb,
    /// Everybody has its peak, of bytes and of GPU time, from start to end.
    Static,
    /// Everybody has its peak of bytes from start to end; GPU time is shared.
    Quotas,
    /// Whole processes take turns of so many seconds.
    Slices(f64),
    /// Idle bytes leave after so many seconds, never before.
    KeepAlive(f64),
    /// Knows the future, and moves for nothing.
    Oracle,
}

impl Policy {
    /// All of them, with usual numbers.
    pub const ALL: [Self; 6] = [
        Self::Ebb,
        Self::Static,
        Self::Quotas,
        Self::Slices(30.0),
        Self::KeepAlive(300.0),
        Self::Oracle,
    ];
}

impl core::fmt::Display for Policy {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Ebb => f.pad("ebb"),
            Self::Static => f.pad("static"),
            Self::Quotas => f.pad("quotas"),
            Self::Slices(s) => f.pad(&format!("slices of {s} s")),
            Self::KeepAlive(s) => f.pad(&format!("keep-alive {s} s")),
            Self::Oracle => f.pad("oracle"),
        }
    }
}

/// What the cluster is made of.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Cards.
    pub cards: usize,
    /// Bytes of a card.
    pub card: Bytes,
    /// Cards of a node.
    pub per_node: usize,
    /// How fast bytes move.
    pub speeds: Speeds,
    /// An idle job's bytes leave after so long even if nobody needs the room; `None`: only then.
    pub idle_release: Option<Duration>,
    /// What the arbiter decides by.
    pub policy: PolicyConfig,
    /// Jobs may go to another card while they run.
    pub moves: bool,
    /// Jobs wait in line until what is expected of the cards is at most this part of them; `None`: they start when they come, and share
    /// what there is.
    pub fill: Option<f64>,
    /// Keep who was where when.
    pub timeline: bool,
}

impl Setting {
    /// The most that a job may ever hold on a card.
    fn most(&self, job: &Job) -> Bytes {
        job.limit.map_or(self.card, |limit| limit.min(self.card))
    }
}

impl Default for Setting {
    fn default() -> Self {
        let speeds = Speeds::default();
        Self {
            cards: 1,
            card: Bytes::gib(80),
            per_node: 8,
            speeds,
            idle_release: Some(Duration::from_secs(60)),
            policy: PolicyConfig {
                out_rate: speeds.one_way as u64,
                in_rate: speeds.one_way as u64,
                ..PolicyConfig::default()
            },
            moves: true,
            fill: None,
            timeline: false,
        }
    }
}

/// What became of a job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Done {
    /// When it started, seconds; `None`: never.
    pub started: Option<f64>,
    /// When it ended, seconds; `None`: it did not, for it can never fit.
    pub ended: Option<f64>,
    /// Seconds that it waited for bytes after it had started.
    pub waited: f64,
    /// How often it was stopped while it ran, its bytes taken for another.
    pub stopped: u64,
    /// Seconds from the wish to use the GPU to the end of that use, and what it would have taken alone, for each busy phase.
    pub bursts: Vec<(f64, f64)>,
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// From the first arrival to the last end, seconds.
    pub makespan: f64,
    /// Bytes in use by busy jobs over bytes of the cards, by what the jobs use alone.
    pub utilisation: f64,
    /// The jobs, in the order given.
    pub jobs: Vec<Done>,
    /// Waits of all that wanted to use the GPU, seconds, the shortest first.
    pub waits: Vec<f64>,
    /// Bytes moved: out, back.
    pub moved: [Bytes; 2],
    /// Moves of running jobs to other cards.
    pub moves: u64,
    /// Events that arbiters handled.
    pub events: u64,
    /// Who was where when.
    pub timeline: Timeline,
}

impl Outcome {
    /// Before anything has happened.
    fn begun(jobs: &[Job], setting: &Setting) -> Self {
        Self {
            jobs: vec![Done::default(); jobs.len()],
            timeline: Timeline::new(jobs.len(), setting.timeline),
            ..Self::default()
        }
    }

    /// A share of the waits is no longer than this, seconds.
    #[must_use]
    pub fn wait(&self, share: f64) -> f64 {
        crate::stats::quantile(&self.waits, share)
    }

    /// Seconds from arrival to end, mean.
    #[must_use]
    pub fn mean_turnaround(&self, jobs: &[Job]) -> f64 {
        let all = || {
            self.jobs
                .iter()
                .zip(jobs)
                .filter_map(|(d, j)| Some(d.ended? - j.arrives))
        };
        all().sum::<f64>() / all().count().max(1) as f64
    }

    /// Jobs that did not end.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.jobs.iter().filter(|d| d.ended.is_none()).count()
    }

    /// Times that running jobs were stopped for others.
    #[must_use]
    pub fn stopped(&self) -> u64 {
        self.jobs.iter().map(|d| d.stopped).sum()
    }

    fn finish(mut self, jobs: &[Job], setting: &Setting) -> Self {
        let first = jobs.iter().map(|j| j.arrives).fold(f64::INFINITY, f64::min);
        let last = self.jobs.iter().filter_map(|d| d.ended).fold(0.0, f64::max);
        self.makespan = (last - first).max(0.0);
        let done = jobs.iter().zip(&self.jobs).filter(|(_, d)| d.ended.is_some());
        let used: f64 = done.map(|(j, _)| j.in_use()).sum();
        let there = setting.cards as f64 * gib(setting.card) * self.makespan / 3600.0;
        self.utilisation = if there > 0.0 { used / there } else { 0.0 };
        self.waits.sort_by(f64::total_cmp);
        self
    }
}

/// Runs the jobs under a policy.
#[must_use]
pub fn run(jobs: &[Job], setting: &Setting, policy: Policy) -> Outcome {
    let out = match policy {
        Policy::Ebb => ours::run(jobs, setting),
        Policy::Static => fixed::run(jobs, setting, fixed::Rule::Static),
        Policy::Quotas => fixed::run(jobs, setting, fixed::Rule::Quotas),
        Policy::KeepAlive(s) => fixed::run(jobs, setting, fixed::Rule::KeepAlive(s)),
        Policy::Slices(s) => slices::run(jobs, setting, s),
        Policy::Oracle => oracle::run(jobs, setting),
    };
    out.finish(jobs, setting)
}

/// Places of the jobs in order of arrival.
fn by_arrival(jobs: &[Job]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by(|a, b| jobs[*a].arrives.total_cmp(&jobs[*b].arrives).then(a.cmp(b)));
    order
}

fn gib(bytes: Bytes) -> f64 {
    bytes.0 as f64 / Bytes::gib(1).0 as f64
}
