//! The jobs with ebb: [`Fleet`], whose arbiters are the daemon's own.
//!
//! ```text
//!          a card has room,               bytes are there            phase over, next one idle
//! queued ───────────────────▶ waiting ───────────────────▶ running ──────────────────────────▶ idle
//!          and the cluster      ▲  ▲                          │ taken for another               │
//!                               │  └──────────────────────────┘                                 │
//!                               └────────────── next phase busy, perhaps on another card ───────┘
//! ```
//! A job begins on the fullest card that has room for what it begins with, and when [`Expected`] has room; without a line, at once, on the
//! card of which least is expected. When it wakes and its
//! card has none, it goes to one that has, or others move to make room; if nothing helps, the arbiter lets them take turns.

use std::collections::BTreeSet;

use ebb_policy::TaskSpec;
use ebb_units::Bytes;

use super::admission::Expected;
use super::course::{Course, Step};
use super::progress::{Due, Progress};
use super::{Job, Outcome, Setting, State, by_arrival};
use crate::place::{Load, Move, Placer};
use crate::sim::{Fleet, Notice, Shape, Who, in_seconds, seconds};

/// Cards that carry too much are looked at again, so many at a time, when something ended elsewhere.
const EASED: usize = 4;

/// Longer than any simulation: released only when others need the room.
const NEVER: std::time::Duration = std::time::Duration::from_secs(1 << 33);

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    who: Option<Who>,
    course: Course,
    /// It has started and not ended.
    there: bool,
    /// It wants to use the GPU, and its bytes are not there: since when.
    waits: Option<f64>,
    /// It uses the GPU or wants to.
    busy: bool,
    /// Seconds that are left of its phase.
    left: f64,
    /// What its next idle time is called.
    nap: u32,
}

struct Run<'a> {
    jobs: &'a [Job],
    setting: &'a Setting,
    fleet: Fleet,
    placer: Placer,
    expected: Expected,
    progress: Progress,
    lives: Vec<Life>,
    owner: Vec<usize>,
    queue: Vec<usize>,
    requested: Vec<Bytes>,
    over: BTreeSet<usize>,
    moves: bool,
    running: usize,
    left: usize,
    out: Outcome,
}

/// Tokens of timers: the job, what for, and a number of which only the last one holds.
fn token(job: usize, nap: bool, version: u32) -> u64 {
    (job as u64) << 33 | u64::from(nap) << 32 | u64::from(version)
}

pub(super) fn run(jobs: &[Job], setting: &Setting) -> Outcome {
    Run::new(jobs, setting).run()
}

impl<'a> Run<'a> {
    fn new(jobs: &'a [Job], setting: &'a Setting) -> Self {
        let fleet = Fleet::new(Shape {
            cards: setting.cards,
            per_node: setting.per_node,
            card: setting.card,
            speeds: setting.speeds,
            policy: setting.policy.clone(),
        });
        Self {
            jobs,
            setting,
            fleet,
            placer: Placer::fixed(setting.cards, setting.card, jobs.len()),
            expected: Expected::new(jobs.len(), setting.cards, setting.fill),
            progress: Progress::new(jobs.len(), setting.cards),
            lives: vec![Life::default(); jobs.len()],
            owner: Vec::new(),
            queue: Vec::new(),
            requested: vec![Bytes::ZERO; setting.cards],
            over: BTreeSet::new(),
            // What is guaranteed is guaranteed on a card.
            moves: setting.moves && jobs.iter().all(|j| j.request.is_zero()),
            running: 0,
            left: jobs.len(),
            out: Outcome::begun(jobs, setting),
        }
    }

    fn now(&self) -> f64 {
        in_seconds(self.fleet.now())
    }

    fn run(mut self) -> Outcome {
        for job in by_arrival(self.jobs) {
            self.fleet
                .timer(seconds(self.jobs[job].arrives), token(job, true, 0));
        }
        while self.left > 0 {
            let Some(notice) = self.fleet.step() else { break };
            match notice {
                Notice::Timer(token) => {
                    let (job, nap, version) = ((token >> 33) as usize, token >> 32 & 1 == 1, token as u32);
                    if !nap {
                        self.through(job, version);
                    } else if version == 0 {
                        self.arrive(job);
                    } else if self.lives[job].nap == version && self.lives[job].there {
                        self.next(job);
                    }
                }
                Notice::Ready(who) => self.ready(who),
                Notice::Stopped(who) => self.stopped(who),
                Notice::Refused(who) => {
                    let job = self.owner[who.0];
                    if self.lives[job].who == Some(who) {
                        self.end(job, false);
                    }
                }
                Notice::Away(_) => {}
            }
            self.resident();
        }
        self.out.moved = self.fleet.moved();
        self.out.events = self.fleet.events();
        self.out
    }

    fn arrive(&mut self, job: usize) {
        let j = &self.jobs[job];
        let most = self.setting.most(j);
        if j.peak() > most || j.request > most {
            self.left -= 1;
            return;
        }
        self.out.timeline.enter(job, self.now(), Some(State::Queued));
        self.queue.push(job);
        self.queue
            .sort_by_key(|job| core::cmp::Reverse(self.jobs[*job].priority));
        self.start_some();
    }

    /// Starts who can start, the first in line first.
    fn start_some(&mut self) {
        let mut place = 0;
        // Whoever needs no less than one that found no room finds none.
        let mut refused: Vec<Load> = Vec::new();
        while let Some(job) = self.queue.get(place).copied() {
            let first = self.jobs[job].phases.first();
            let load = first.map_or(Load::default(), |p| Load {
                bytes: p.bytes,
                duty: p.duty,
            });
            let hopeless = self.jobs[job].request.is_zero()
                && refused
                    .iter()
                    .any(|r| r.bytes <= load.bytes && r.duty <= load.duty);
            if !hopeless && self.start(job, load) {
                self.queue.remove(place);
            } else {
                if !hopeless && self.jobs[job].request.is_zero() {
                    refused.push(load);
                }
                place += 1;
            }
        }
    }

    fn start(&mut self, job: usize, load: Load) -> bool {
        let now = self.now();
        let uses = self.uses(load.bytes, load.duty);
        if self.moves && self.running > 0 && !self.expected.room(now, uses) {
            return false;
        }
        let request = self.jobs[job].request;
        let (requested, expected, moves) = (&self.requested, &mut self.expected, self.moves);
        let cards = (0..self.setting.cards).filter(|card| requested[*card] + request <= self.setting.card);
        let card = if self.setting.fill.is_none() {
            let least = cards.min_by(|a, b| {
                let (a, b) = (expected.on(now, *a), expected.on(now, *b));
                a.total_cmp(&b)
            });
            least.inspect(|card| self.placer.put(job, *card, load))
        } else {
            let open: Vec<bool> = (0..self.setting.cards)
                .map(|card| {
                    requested[card] + request <= self.setting.card
                        && (moves || expected.room_on(now, card, uses))
                })
                .collect();
            self.placer.begin(job, load, |card| open[card])
        };
        let Some(card) = card else {
            return false;
        };
        self.requested[card] += request;
        self.expected.start(now, job, card, uses);
        let spec = TaskSpec {
            request,
            limit: self.jobs[job].limit,
            priority: self.jobs[job].priority,
            idle_release: if self.jobs[job].lends {
                Some(self.setting.idle_release.unwrap_or(NEVER))
            } else {
                None
            },
            ..TaskSpec::default()
        };
        let who = self.fleet.join(card, spec, Bytes::ZERO);
        self.own(who, job);
        self.running += 1;
        self.lives[job].there = true;
        self.lives[job].busy = true;
        self.lives[job].waits = Some(now);
        self.out.jobs[job].started = Some(now);
        self.out.timeline.enter(job, now, Some(State::Waiting));
        self.fleet.need(who, load.bytes);
        self.fleet.busy(who);
        true
    }

    fn uses(&self, bytes: Bytes, duty: f64) -> [f64; 2] {
        [bytes.0 as f64 / self.setting.card.0 as f64, duty]
    }

    fn own(&mut self, who: Who, job: usize) {
        if self.owner.len() <= who.0 {
            self.owner.resize(who.0 + 1, job);
        }
        self.owner[who.0] = job;
        self.lives[job].who = Some(who);
    }

    /// It has all its bytes.
    fn ready(&mut self, who: Who) {
        let job = self.owner[who.0];
        let now = self.now();
        let life = self.lives[job];
        if life.who != Some(who) || !life.busy {
            return;
        }
        if let Some(since) = life.waits {
            self.lives[job].waits = None;
            self.waited(job, now - since);
        }
        if life.course.phase.is_none() {
            self.lives[job].course.start(now);
            self.next(job);
        } else {
            self.go_on(job);
        }
    }

    fn waited(&mut self, job: usize, wait: f64) {
        self.out.waits.push(wait);
        self.out.jobs[job].waited += wait;
    }

    /// Its memory is taken for another.
    fn stopped(&mut self, who: Who) {
        let job = self.owner[who.0];
        let now = self.now();
        let life = self.lives[job];
        if life.who != Some(who) || !life.busy || life.waits.is_some() {
            return;
        }
        let (left, due) = self.progress.stop(now, job);
        self.due(&due);
        self.lives[job].left = left;
        self.lives[job].waits = Some(now);
        self.out.jobs[job].stopped += 1;
        self.out.timeline.stop(job, now);
        self.out.timeline.enter(job, now, Some(State::Waiting));
    }

    /// Runs what is left of its phase.
    fn go_on(&mut self, job: usize) {
        let now = self.now();
        let Some(phase) = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p))
        else {
            return;
        };
        let Some(who) = self.lives[job].who else { return };
        self.out.timeline.enter(job, now, Some(State::Running));
        let card = self.fleet.card_of(who);
        let due = self
            .progress
            .start(now, job, card, phase.duty, self.lives[job].left);
        self.due(&due);
    }

    fn due(&mut self, due: &[Due]) {
        for d in due {
            // Never before it is through: a timer is a whole number of nanoseconds.
            let at = seconds(d.at).max(self.fleet.now());
            self.fleet.timer(at, token(d.job, false, d.version));
        }
    }

    fn through(&mut self, job: usize, version: u32) {
        if let Some(due) = self.progress.through(self.now(), job, version) {
            self.due(&due);
            self.next(job);
        }
    }

    /// The next phase.
    fn next(&mut self, job: usize) {
        let now = self.now();
        let step = self.lives[job]
            .course
            .next(now, &self.jobs[job], &mut self.out.jobs[job]);
        let Some(phase) = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p))
        else {
            return self.end(job, true);
        };
        let Some(who) = self.lives[job].who else { return };
        let load = Load {
            bytes: phase.bytes,
            duty: phase.duty,
        };
        let was_busy = self.lives[job].busy && self.lives[job].course.phase != Some(0);
        match step {
            Step::Idle(until) => {
                self.lives[job].busy = false;
                self.lives[job].nap += 1;
                let nap = self.lives[job].nap;
                self.placer.idle(job);
                self.fleet.idle(who);
                self.fleet.want(who, phase.bytes);
                self.out.timeline.enter(job, now, Some(State::Idle));
                self.fleet.timer(seconds(until), token(job, true, nap));
                self.count(job, load.bytes, 0.0);
                self.ease();
                self.start_some();
            }
            Step::Busy => {
                self.lives[job].left = phase.seconds;
                self.lives[job].busy = true;
                self.lives[job].waits = Some(now);
                if was_busy || self.lives[job].course.phase == Some(0) {
                    self.placer.change(job, load);
                } else {
                    self.wake(job, load);
                }
                let Some(who) = self.lives[job].who else { return };
                if let Some(card) = self.placer.card_of(job).filter(|card| self.placer.over(*card)) {
                    self.over.insert(card);
                }
                self.count(job, load.bytes, load.duty);
                // Woken, it has to have its bytes; running, only more of them.
                let waits = self.fleet.need(who, load.bytes);
                self.fleet.busy(who);
                if was_busy && !waits {
                    self.lives[job].waits = None;
                    self.go_on(job);
                } else if !waits && self.lives[job].course.phase == Some(0) {
                    self.lives[job].waits = None;
                    self.waited(job, 0.0);
                    self.go_on(job);
                } else {
                    self.out.timeline.enter(job, now, Some(State::Waiting));
                }
                self.ease();
            }
            Step::End => self.end(job, true),
        }
    }

    fn count(&mut self, job: usize, bytes: Bytes, duty: f64) {
        let uses = if duty > 0.0 {
            self.uses(bytes, duty)
        } else {
            [0.0; 2]
        };
        let card = self.placer.card_of(job).unwrap_or(0);
        self.expected.uses(self.now(), job, card, uses);
    }

    /// It was idle, and wants to use the GPU.
    fn wake(&mut self, job: usize, load: Load) {
        if self.moves {
            let moves = self.placer.wake(job, load);
            self.carry_out(&moves);
        } else {
            self.placer.stay(job, load);
        }
    }

    fn carry_out(&mut self, moves: &[Move]) {
        let now = self.now();
        for Move { container: job, card } in moves {
            let Some(who) = self.lives[*job].who else { continue };
            if self.fleet.card_of(who) == *card {
                continue;
            }
            let life = self.lives[*job];
            if life.busy && life.waits.is_none() {
                let (left, due) = self.progress.stop(now, *job);
                self.due(&due);
                self.lives[*job].left = left;
                self.lives[*job].waits = Some(now);
                self.out.timeline.enter(*job, now, Some(State::Waiting));
            }
            self.out.moves += 1;
            let new = self.fleet.relocate(who, *card);
            self.own(new, *job);
            let phase = self.lives[*job]
                .course
                .phase
                .and_then(|p| self.jobs[*job].phases.get(p));
            if let Some(p) = phase {
                self.count(*job, p.bytes, p.duty);
            }
        }
    }

    /// Moves who can go off cards that carry too much.
    fn ease(&mut self) {
        if !self.moves {
            return;
        }
        for card in self.over.iter().copied().take(EASED).collect::<Vec<_>>() {
            if let Some(m) = self.placer.ease(card) {
                self.carry_out(&[m]);
            }
            if !self.placer.over(card) {
                self.over.remove(&card);
            }
        }
    }

    fn end(&mut self, job: usize, well: bool) {
        let now = self.now();
        let due = self.progress.stop(now, job).1;
        self.due(&due);
        self.lives[job].there = false;
        self.lives[job].busy = false;
        if let Some(card) = self.placer.card_of(job) {
            self.requested[card] = self.requested[card].saturating_sub(self.jobs[job].request);
        }
        self.placer.forget(job);
        self.expected.end(job);
        if let Some(who) = self.lives[job].who.take() {
            self.out.timeline.resident(job, now, Bytes::ZERO);
            self.fleet.leave(who);
        }
        self.running -= 1;
        self.left -= 1;
        if well {
            self.out.jobs[job].ended = Some(now);
        }
        self.out.timeline.enter(job, now, None);
        self.ease();
        self.start_some();
    }

    /// Bytes on cards, for the pictures.
    fn resident(&mut self) {
        if self.out.timeline.lanes.is_empty() {
            return;
        }
        let now = self.now();
        for job in 0..self.jobs.len() {
            if let Some(who) = self.lives[job].who {
                self.out.timeline.resident(job, now, self.fleet.bytes_of(who).0);
            }
        }
    }
}
