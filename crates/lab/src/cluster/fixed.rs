//! Static allocation, quotas, keep-alive by a fixed time: a job holds bytes of one card, and nobody takes them.
//!
//! With keep-alive, a job whose bytes left waits for room on its card, in line, and then for its bytes. One that needs more
//! than its card has left gives up what it has and stands in line with all of it: two that grow cannot wait for each other.

use ebb_units::Bytes;

use super::admission::Expected;
use super::course::{Course, Step};
use super::progress::{Due, Progress};
use super::queue::Agenda;
use super::{Job, Outcome, Setting, State, by_arrival};

/// What a job holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rule {
    Static,
    Quotas,
    KeepAlive(f64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Arrive(usize),
    Through(usize, u32),
    Wake(usize, u32),
    LetGo(usize, u32),
    Back(usize),
}

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    card: usize,
    course: Course,
    /// Bytes and GPU share that it holds of its card.
    holds: (Bytes, f64),
    /// Its bytes left the card.
    away: bool,
    waits: Option<f64>,
    nap: u32,
}

struct Run<'a> {
    jobs: &'a [Job],
    setting: &'a Setting,
    rule: Rule,
    now: f64,
    agenda: Agenda<Event>,
    lives: Vec<Life>,
    used: Vec<(Bytes, f64)>,
    /// Who waits for room on each card, the first first.
    lines: Vec<Vec<usize>>,
    queue: Vec<usize>,
    expected: Expected,
    progress: Progress,
    out: Outcome,
}

pub(super) fn run(jobs: &[Job], setting: &Setting, rule: Rule) -> Outcome {
    let mut run = Run {
        jobs,
        setting,
        rule,
        now: 0.0,
        agenda: Agenda::new(),
        lives: vec![Life::default(); jobs.len()],
        used: vec![(Bytes::ZERO, 0.0); setting.cards],
        lines: vec![Vec::new(); setting.cards],
        queue: Vec::new(),
        expected: Expected::new(jobs.len(), setting.cards, setting.fill),
        progress: Progress::new(jobs.len(), setting.cards),
        out: Outcome::begun(jobs, setting),
    };
    for job in by_arrival(jobs) {
        run.agenda.enter(jobs[job].arrives, Event::Arrive(job));
    }
    while let Some((at, event)) = run.agenda.next() {
        run.now = at;
        run.handle(event);
    }
    run.out
}

impl Run<'_> {
    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive(job) => self.arrive(job),
            Event::Through(job, version) => {
                if let Some(due) = self.progress.through(self.now, job, version) {
                    self.due(&due);
                    self.next(job);
                }
            }
            Event::Wake(job, nap) if self.lives[job].nap == nap => self.next(job),
            Event::LetGo(job, nap) if self.lives[job].nap == nap => {
                let card = self.lives[job].card;
                self.out.moved[0] += self.lives[job].holds.0;
                self.lives[job].away = true;
                self.hold(job, Bytes::ZERO, 0.0);
                self.serve_line(card);
                self.start_on(card);
            }
            Event::Back(job) => {
                self.lives[job].away = false;
                let since = self.lives[job].waits.take().unwrap_or(self.now);
                self.ready(job, since);
            }
            Event::Wake(..) | Event::LetGo(..) => {}
        }
    }

    fn arrive(&mut self, job: usize) {
        let j = &self.jobs[job];
        let most = self.setting.most(j);
        if j.peak() > most {
            return;
        }
        self.out.timeline.enter(job, self.now, Some(State::Queued));
        for card in self.best_first() {
            if self.fits(job, card) {
                return self.start(job, card);
            }
        }
        self.queue.push(job);
        self.queue
            .sort_by_key(|job| core::cmp::Reverse(self.jobs[*job].priority));
    }

    /// Cards in the order in which a job is tried: the fullest; where GPU time is shared, that of which least is wanted.
    fn best_first(&self) -> Vec<usize> {
        let mut cards: Vec<usize> = (0..self.setting.cards).collect();
        match self.rule {
            Rule::Static => cards.sort_by_key(|c| (core::cmp::Reverse(self.used[*c].0), *c)),
            _ => cards.sort_by(|a, b| {
                let gpu = self.used[*a].1.total_cmp(&self.used[*b].1);
                gpu.then(self.used[*b].0.cmp(&self.used[*a].0)).then(a.cmp(b))
            }),
        }
        cards
    }

    /// What a job is to hold at its start.
    fn first_hold(&self, job: usize) -> (Bytes, f64) {
        let j = &self.jobs[job];
        let first = j.phases.first();
        match self.rule {
            Rule::Static => (j.peak(), j.peak_duty()),
            // GPU time is not reserved, but a job says at its start what it wants of it.
            Rule::Quotas => (j.peak(), first.map_or(0.0, |p| p.duty)),
            Rule::KeepAlive(_) => first.map_or((Bytes::ZERO, 0.0), |p| (p.bytes, p.duty)),
        }
    }

    fn fits(&mut self, job: usize, card: usize) -> bool {
        let (bytes, duty) = self.first_hold(job);
        let used = self.used[card];
        used.0 + bytes <= self.setting.card
            && match self.rule {
                Rule::Static => used.1 + duty <= 1.0 + 1e-9,
                Rule::Quotas => true,
                Rule::KeepAlive(_) => {
                    let uses = self.uses(bytes, duty);
                    self.lines[card].is_empty() && self.expected.room_on(self.now, card, uses)
                }
            }
    }

    fn uses(&self, bytes: Bytes, duty: f64) -> [f64; 2] {
        [bytes.0 as f64 / self.setting.card.0 as f64, duty]
    }

    fn start(&mut self, job: usize, card: usize) {
        let (bytes, duty) = self.first_hold(job);
        let uses = self.uses(bytes, duty);
        self.lives[job].card = card;
        self.expected.start(self.now, job, card, uses);
        self.hold(job, bytes, duty);
        self.out.jobs[job].started = Some(self.now);
        self.lives[job].course.start(self.now);
        self.next(job);
    }

    /// Starts who can start on a card on which something ended.
    fn start_on(&mut self, card: usize) {
        let mut place = 0;
        let mut refused: Vec<(Bytes, f64)> = Vec::new();
        while let Some(job) = self.queue.get(place).copied() {
            let wants = self.first_hold(job);
            let hopeless = refused.iter().any(|r| r.0 <= wants.0 && r.1 <= wants.1);
            if !hopeless && self.fits(job, card) {
                self.queue.remove(place);
                // What starts may start others.
                self.start(job, card);
                (place, refused) = (0, Vec::new());
            } else {
                if !hopeless {
                    refused.push(wants);
                }
                place += 1;
            }
        }
    }

    fn hold(&mut self, job: usize, bytes: Bytes, duty: f64) {
        let life = &mut self.lives[job];
        let used = &mut self.used[life.card];
        used.0 = used.0.saturating_sub(life.holds.0) + bytes;
        used.1 = (used.1 - life.holds.1 + duty).max(0.0);
        life.holds = (bytes, duty);
        let resident = match self.rule {
            // Of what is reserved it has what it has.
            Rule::Static | Rule::Quotas if !bytes.is_zero() => {
                let phase = life.course.phase.and_then(|p| self.jobs[job].phases.get(p));
                phase.map_or(Bytes::ZERO, |p| p.bytes)
            }
            _ => bytes,
        };
        self.out.timeline.resident(job, self.now, resident);
    }

    fn next(&mut self, job: usize) {
        let step = self.lives[job]
            .course
            .next(self.now, &self.jobs[job], &mut self.out.jobs[job]);
        let phase = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p));
        let Some(phase) = phase.copied().filter(|_| step != Step::End) else {
            return self.end(job);
        };
        self.lives[job].nap += 1;
        let nap = self.lives[job].nap;
        let (holds, card) = (self.lives[job].holds, self.lives[job].card);
        let uses = if phase.duty > 0.0 {
            self.uses(phase.bytes, phase.duty)
        } else {
            [0.0; 2]
        };
        self.expected.uses(self.now, job, card, uses);
        match step {
            Step::Idle(until) => {
                self.out.timeline.enter(job, self.now, Some(State::Idle));
                self.agenda.enter(until, Event::Wake(job, nap));
                match self.rule {
                    Rule::Static => self.hold(job, holds.0, holds.1),
                    Rule::Quotas => self.hold(job, holds.0, 0.0),
                    Rule::KeepAlive(time) => {
                        // Idle, it grows no more than there is room.
                        let bytes = if self.lives[job].away {
                            Bytes::ZERO
                        } else {
                            phase.bytes.min(holds.0.max(phase.bytes.min(self.free(card))))
                        };
                        self.hold(job, bytes, 0.0);
                        if !self.lives[job].away {
                            self.agenda.enter(self.now + time, Event::LetGo(job, nap));
                        }
                        self.serve_line(card);
                        self.start_on(card);
                    }
                }
            }
            Step::Busy => match self.rule {
                Rule::Static | Rule::Quotas => {
                    let duty = if self.rule == Rule::Static {
                        holds.1
                    } else {
                        phase.duty
                    };
                    self.hold(job, holds.0, duty);
                    self.ready(job, self.now);
                }
                Rule::KeepAlive(_) => {
                    let more = phase.bytes.saturating_sub(holds.0);
                    if self.lives[job].away || more > self.free(card) {
                        if !self.lives[job].away {
                            self.out.moved[0] += holds.0;
                            self.lives[job].away = true;
                            self.hold(job, Bytes::ZERO, 0.0);
                        }
                        self.lives[job].waits = Some(self.now);
                        self.out.timeline.enter(job, self.now, Some(State::Waiting));
                        self.lines[card].push(job);
                        self.serve_line(card);
                    } else {
                        self.hold(job, phase.bytes, phase.duty);
                        self.ready(job, self.now);
                    }
                }
            },
            Step::End => {}
        }
    }

    fn free(&self, card: usize) -> Bytes {
        self.setting.card.saturating_sub(self.used[card].0)
    }

    /// Lets in who waits for room on a card, the first one first.
    fn serve_line(&mut self, card: usize) {
        while let Some(job) = self.lines[card].first().copied() {
            let phase = self.lives[job]
                .course
                .phase
                .and_then(|p| self.jobs[job].phases.get(p));
            let Some(phase) = phase.copied() else { break };
            if phase.bytes > self.free(card) {
                break;
            }
            self.lines[card].remove(0);
            self.hold(job, phase.bytes, phase.duty);
            self.out.moved[1] += phase.bytes;
            let takes = phase.bytes.0 as f64 / self.setting.speeds.one_way;
            self.agenda.enter(self.now + takes, Event::Back(job));
        }
    }

    fn ready(&mut self, job: usize, since: f64) {
        let wait = self.now - since;
        self.out.waits.push(wait);
        self.out.jobs[job].waited += wait;
        self.out.timeline.enter(job, self.now, Some(State::Running));
        let phase = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p));
        let Some(phase) = phase.copied() else { return };
        let card = self.lives[job].card;
        let due = self
            .progress
            .start(self.now, job, card, phase.duty, phase.seconds);
        self.due(&due);
    }

    fn due(&mut self, due: &[Due]) {
        for d in due {
            self.agenda.enter(d.at, Event::Through(d.job, d.version));
        }
    }

    fn end(&mut self, job: usize) {
        self.hold(job, Bytes::ZERO, 0.0);
        self.lives[job].nap += 1;
        self.expected.end(job);
        self.out.jobs[job].ended = Some(self.now);
        self.out.timeline.enter(job, self.now, None);
        let card = self.lives[job].card;
        self.serve_line(card);
        self.start_on(card);
    }
}
