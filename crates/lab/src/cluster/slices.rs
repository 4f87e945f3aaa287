//! Time slices of whole processes: one job of a card has the GPU for a while, then the next one that wants it.
//!
//! Who has its turn has the GPU alone, up to the end of the slice or until it idles. A process whose bytes are not on the card
//! brings all of them, and processes leave as a whole for it, those whose turn was longest ago first; the copies are made one
//! after the other, before it begins. That is what schedulers on the driver's managed memory and on checkpoints do.

use ebb_units::Bytes;

use super::admission::Expected;
use super::course::{Course, Step};
use super::queue::Agenda;
use super::{Job, Outcome, Setting, State, by_arrival};

/// What a new job is expected to use. Whoever runs has the whole GPU, whatever it does with it; half of the time is a guess, without which
/// nobody would ever be let in beside another.
const NEW: [f64; 2] = [0.0, 0.5];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Arrive(usize),
    Wake(usize, u32),
    /// The copies for a turn are made.
    Begin(usize),
    /// A turn or a phase is over.
    Over(usize),
}

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    card: usize,
    course: Course,
    resident: Bytes,
    waits: Option<f64>,
    left: f64,
    last: f64,
    nap: u32,
}

#[derive(Clone, Debug, Default)]
struct Card {
    members: Vec<usize>,
    line: Vec<usize>,
    turn: Option<usize>,
    began: f64,
    ends: f64,
}

struct Run<'a> {
    jobs: &'a [Job],
    setting: &'a Setting,
    slice: f64,
    now: f64,
    agenda: Agenda<Event>,
    lives: Vec<Life>,
    cards: Vec<Card>,
    queue: Vec<usize>,
    expected: Expected,
    out: Outcome,
}

pub(super) fn run(jobs: &[Job], setting: &Setting, slice: f64) -> Outcome {
    let mut run = Run {
        jobs,
        setting,
        slice,
        now: 0.0,
        agenda: Agenda::new(),
        lives: vec![Life::default(); jobs.len()],
        cards: vec![Card::default(); setting.cards],
        queue: Vec::new(),
        expected: Expected::new(jobs.len(), setting.cards, setting.fill),
        out: Outcome::begun(jobs, setting),
    };
    for job in by_arrival(jobs) {
        run.agenda.enter(jobs[job].arrives, Event::Arrive(job));
    }
    while let Some((at, event)) = run.agenda.next() {
        run.now = at;
        match event {
            Event::Arrive(job) => run.arrive(job),
            Event::Wake(job, nap) if run.lives[job].nap == nap => run.next(job),
            Event::Wake(..) => {}
            Event::Begin(job) => run.begin(job),
            Event::Over(job) => run.over(job),
        }
    }
    run.out
}

impl Run<'_> {
    fn arrive(&mut self, job: usize) {
        let j = &self.jobs[job];
        let most = self.setting.most(j);
        if j.peak() > most {
            return;
        }
        self.out.timeline.enter(job, self.now, Some(State::Queued));
        let mut cards: Vec<usize> = (0..self.cards.len()).collect();
        cards.sort_by_key(|c| (self.cards[*c].members.len(), *c));
        for card in cards {
            if self.fits(card) {
                return self.start(job, card);
            }
        }
        self.queue.push(job);
        self.queue
            .sort_by_key(|job| core::cmp::Reverse(self.jobs[*job].priority));
    }

    fn fits(&mut self, card: usize) -> bool {
        self.expected.room_on(self.now, card, NEW)
    }

    fn start(&mut self, job: usize, card: usize) {
        self.expected.start(self.now, job, card, NEW);
        self.cards[card].members.push(job);
        self.lives[job].card = card;
        self.out.jobs[job].started = Some(self.now);
        self.lives[job].course.start(self.now);
        self.next(job);
    }

    fn start_on(&mut self, card: usize) {
        // All want the same: the whole GPU. What starts may start others.
        while let Some(job) = self.queue.first().copied()
            && self.fits(card)
        {
            self.queue.remove(0);
            self.start(job, card);
        }
    }

    fn next(&mut self, job: usize) {
        let step = self.lives[job]
            .course
            .next(self.now, &self.jobs[job], &mut self.out.jobs[job]);
        let phase = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p));
        let phase = phase.copied().filter(|_| step != Step::End);
        let card = self.lives[job].card;
        self.lives[job].nap += 1;
        let nap = self.lives[job].nap;
        let Some(phase) = phase else {
            self.hold(job, Bytes::ZERO);
            self.expected.end(job);
            self.cards[card].members.retain(|m| *m != job);
            self.out.jobs[job].ended = Some(self.now);
            self.out.timeline.enter(job, self.now, None);
            self.turn(card);
            return self.start_on(card);
        };
        match step {
            Step::Idle(until) => {
                self.expected.uses(self.now, job, card, [0.0; 2]);
                self.out.timeline.enter(job, self.now, Some(State::Idle));
                self.agenda.enter(until, Event::Wake(job, nap));
                self.turn(card);
                self.start_on(card);
            }
            Step::Busy => {
                self.expected.uses(self.now, job, card, [0.0, 1.0]);
                self.lives[job].left = phase.seconds;
                if self.cards[card].turn == Some(job) {
                    // Its turn goes on into the next phase.
                    self.begin(job);
                } else {
                    self.lives[job].waits = Some(self.now);
                    self.out.timeline.enter(job, self.now, Some(State::Waiting));
                    self.cards[card].line.push(job);
                    self.turn(card);
                }
            }
            Step::End => {}
        }
    }

    fn phase_bytes(&self, job: usize) -> Bytes {
        let phase = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p));
        phase.map_or(Bytes::ZERO, |p| p.bytes)
    }

    fn hold(&mut self, job: usize, bytes: Bytes) {
        self.lives[job].resident = bytes;
        self.out.timeline.resident(job, self.now, bytes);
    }

    /// The next turn of a card, if nobody has one.
    fn turn(&mut self, card: usize) {
        if self.cards[card].turn.is_some() || self.cards[card].line.is_empty() {
            return;
        }
        let job = self.cards[card].line.remove(0);
        self.cards[card].turn = Some(job);
        let takes = self.make_room(job);
        self.cards[card].began = self.now + takes;
        self.cards[card].ends = self.now + takes + self.slice;
        self.agenda.enter(self.now + takes, Event::Begin(job));
    }

    /// Brings a whole process in, and others out for it: how long that takes.
    fn make_room(&mut self, job: usize) -> f64 {
        let card = self.lives[job].card;
        let wants = self.phase_bytes(job);
        let here = self.lives[job].resident;
        // A process that has never been on the card allocates; one that has been brings its bytes.
        let back = if self.lives[job].last > 0.0 && here.is_zero() {
            wants
        } else {
            Bytes::ZERO
        };
        let mut others: Vec<usize> = self.cards[card]
            .members
            .iter()
            .copied()
            .filter(|m| *m != job)
            .collect();
        others.sort_by(|a, b| self.lives[*a].last.total_cmp(&self.lives[*b].last).then(a.cmp(b)));
        let mut there: Bytes = others.iter().map(|m| self.lives[*m].resident).sum();
        let mut out = Bytes::ZERO;
        for other in others {
            if there + wants.max(here) <= self.setting.card {
                break;
            }
            let bytes = self.lives[other].resident;
            there = there.saturating_sub(bytes);
            out += bytes;
            self.hold(other, Bytes::ZERO);
        }
        self.hold(job, wants);
        self.out.moved[0] += out;
        self.out.moved[1] += back;
        (out + back).0 as f64 / self.setting.speeds.one_way
    }

    fn begin(&mut self, job: usize) {
        let card = self.lives[job].card;
        let takes = if self.phase_bytes(job) > self.lives[job].resident {
            self.make_room(job)
        } else {
            self.hold(job, self.phase_bytes(job));
            0.0
        };
        if takes > 0.0 {
            self.cards[card].began = self.now + takes;
            self.cards[card].ends = self.cards[card].ends.max(self.now + takes);
            self.agenda.enter(self.now + takes, Event::Begin(job));
            return;
        }
        if let Some(since) = self.lives[job].waits.take() {
            let wait = self.now - since;
            self.out.waits.push(wait);
            self.out.jobs[job].waited += wait;
        }
        self.out.timeline.enter(job, self.now, Some(State::Running));
        self.cards[card].began = self.now;
        let until = (self.now + self.lives[job].left).min(self.cards[card].ends.max(self.now + 1e-3));
        self.agenda.enter(until, Event::Over(job));
    }

    fn over(&mut self, job: usize) {
        let card = self.lives[job].card;
        let life = &mut self.lives[job];
        life.left = (life.left - (self.now - self.cards[card].began)).max(0.0);
        life.last = self.now;
        if life.left > 1e-9 {
            if self.cards[card].line.is_empty() {
                // Nobody else wants it.
                self.cards[card].ends = self.now + self.slice;
                return self.begin(job);
            }
            life.waits = Some(self.now);
            self.out.jobs[job].stopped += 1;
            self.out.timeline.stop(job, self.now);
            self.out.timeline.enter(job, self.now, Some(State::Waiting));
            self.cards[card].line.push(job);
            self.cards[card].turn = None;
            return self.turn(card);
        }
        let goes_on = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p + 1))
            .is_some_and(|p| p.duty > 0.0);
        let late = self.now >= self.cards[card].ends && !self.cards[card].line.is_empty();
        if !goes_on || late {
            self.cards[card].turn = None;
        }
        self.next(job);
    }
}
