//! The oracle: knows what every job will do, moves for nothing, and cuts jobs over cards and moments as it likes.
//!
//! Whoever uses the GPU may run at any rate up to that of running alone, as long as bytes and GPU time of all cards together
//! are enough for all rates. Who goes first is tried two ways, of which the one counts that ends sooner: who has the most before it, for it would be what is left over
//! at the end, and who came first, by which jobs of one rhythm fall into step. Looked at anew whenever a phase
//! begins or ends, and [`LOOKS`] times over all. Nobody who has to decide card by card, whose copies take time, or who learns what jobs do as they do it can
//! be expected to do better; it is no proven bound. With more than [`MANY`] jobs each job is started at the first moment on a grid from which all
//! that it will use fits beside what is planned already, and then runs as alone.

use super::course::{Course, Step};
use super::queue::Agenda;
use super::{Job, Outcome, Setting, State, by_arrival};

/// Points of the grid.
const GRID: f64 = 4096.0;
/// Jobs with which every change can be looked at.
const MANY: usize = 2000;
/// Looks besides those at changes.
const LOOKS: f64 = 2000.0;

pub(super) fn run(jobs: &[Job], setting: &Setting) -> Outcome {
    if jobs.len() > MANY {
        return planned(jobs, setting);
    }
    let last = |out: &Outcome| out.jobs.iter().filter_map(|d| d.ended).fold(0.0, f64::max);
    let tries = [Order::Longest, Order::First].map(|order| Fluid::new(jobs, setting, order).run());
    let [longest, first] = tries;
    if last(&first) < last(&longest) {
        first
    } else {
        longest
    }
}

/// Who goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// Who has the most before it.
    Longest,
    /// Who came first.
    First,
}

#[derive(Clone, Copy, Debug, Default)]
struct Life {
    course: Course,
    busy: bool,
    /// Seconds left of its phase, as alone, and of all that follows.
    left: f64,
    after: f64,
    rate: f64,
    nap: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    Arrive(usize),
    Wake(usize, u32),
    Look,
}

struct Fluid<'a> {
    jobs: &'a [Job],
    setting: &'a Setting,
    now: f64,
    agenda: Agenda<Event>,
    lives: Vec<Life>,
    busy: Vec<usize>,
    ended: usize,
    order: Order,
    out: Outcome,
}

impl<'a> Fluid<'a> {
    fn new(jobs: &'a [Job], setting: &'a Setting, order: Order) -> Self {
        Self {
            order,
            jobs,
            setting,
            now: 0.0,
            agenda: Agenda::new(),
            lives: vec![Life::default(); jobs.len()],
            busy: Vec::new(),
            ended: 0,
            out: Outcome::begun(jobs, setting),
        }
    }

    fn run(mut self) -> Outcome {
        let mut looks = 0.0_f64;
        for job in by_arrival(self.jobs) {
            let j = &self.jobs[job];
            let most = self.setting.most(j);
            if j.peak() > most {
                self.ended += 1;
                continue;
            }
            looks = looks.max(j.arrives + j.seconds());
            self.lives[job].after = j.seconds();
            self.agenda.enter(j.arrives, Event::Arrive(job));
        }
        let every = (looks / LOOKS).max(0.01);
        self.agenda.enter(0.0, Event::Look);
        while self.ended < self.jobs.len() {
            self.share();
            let through = self
                .busy
                .iter()
                .filter(|j| self.lives[**j].rate > 0.0)
                .map(|j| self.now + self.lives[*j].left / self.lives[*j].rate)
                .fold(f64::INFINITY, f64::min);
            match self.agenda.peek() {
                Some(at) if at <= through => {
                    let Some((at, event)) = self.agenda.next() else {
                        break;
                    };
                    self.go_on(at);
                    match event {
                        Event::Arrive(job) => {
                            self.out.jobs[job].started = Some(at);
                            self.lives[job].course.start(at);
                            self.next(job);
                        }
                        Event::Wake(job, nap) if self.lives[job].nap == nap => self.next(job),
                        Event::Wake(..) => {}
                        Event::Look => self.agenda.enter(at + every, Event::Look),
                    }
                }
                _ if through.is_finite() => self.go_on(through),
                _ => break,
            }
            for job in self.busy.clone() {
                if self.lives[job].left <= 1e-9 {
                    self.next(job);
                }
            }
        }
        self.out
    }

    /// Time passes.
    fn go_on(&mut self, to: f64) {
        let passed = (to - self.now).max(0.0);
        for job in &self.busy {
            let life = &mut self.lives[*job];
            life.left -= passed * life.rate;
        }
        self.now = self.now.max(to);
    }

    /// How fast everybody goes.
    fn share(&mut self) {
        let lives = &self.lives;
        let ahead = |j: usize| lives[j].left + lives[j].after;
        let mut order = self.busy.clone();
        match self.order {
            Order::Longest => order.sort_by(|a, b| ahead(*b).total_cmp(&ahead(*a)).then(a.cmp(b))),
            Order::First => order.sort_by(|a, b| {
                let came = |j: usize| self.jobs[j].arrives;
                came(*a).total_cmp(&came(*b)).then(a.cmp(b))
            }),
        }
        let mut left = [self.setting.cards as f64; 2];
        for job in order {
            let phase = self.lives[job]
                .course
                .phase
                .and_then(|p| self.jobs[job].phases.get(p));
            let uses = phase.map_or([0.0; 2], |p| {
                [p.bytes.0 as f64 / self.setting.card.0 as f64, p.duty]
            });
            let rate = (0..2)
                .filter(|n| uses[*n] > 0.0)
                .map(|n| left[n] / uses[n])
                .fold(1.0, f64::min)
                .max(0.0);
            for n in 0..2 {
                left[n] = (left[n] - rate * uses[n]).max(0.0);
            }
            let before = std::mem::replace(&mut self.lives[job].rate, rate);
            if (before > 0.0) != (rate > 0.0) || before == 0.0 {
                let (state, bytes) = match phase {
                    Some(p) if rate > 0.0 => (State::Running, p.bytes),
                    _ => (State::Waiting, ebb_units::Bytes::ZERO),
                };
                self.out.timeline.enter(job, self.now, Some(state));
                self.out.timeline.resident(job, self.now, bytes);
            }
        }
    }

    fn next(&mut self, job: usize) {
        self.busy.retain(|j| *j != job);
        self.lives[job].rate = 0.0;
        let step = self.lives[job]
            .course
            .next(self.now, &self.jobs[job], &mut self.out.jobs[job]);
        let phase = self.lives[job]
            .course
            .phase
            .and_then(|p| self.jobs[job].phases.get(p));
        let Some(phase) = phase.filter(|_| step != Step::End) else {
            self.ended += 1;
            self.out.jobs[job].ended = Some(self.now);
            self.out.timeline.enter(job, self.now, None);
            self.out.timeline.resident(job, self.now, ebb_units::Bytes::ZERO);
            return;
        };
        let life = &mut self.lives[job];
        life.nap += 1;
        life.after = (life.after - phase.seconds).max(0.0);
        if let Step::Idle(until) = step {
            life.busy = false;
            self.agenda.enter(until, Event::Wake(job, life.nap));
            self.out.timeline.enter(job, self.now, Some(State::Idle));
            self.out.timeline.resident(job, self.now, ebb_units::Bytes::ZERO);
        } else {
            if !life.busy {
                self.out.waits.push(0.0);
            }
            life.busy = true;
            life.left = phase.seconds;
            self.busy.push(job);
        }
    }
}

/// On a grid: for many jobs.
fn planned(jobs: &[Job], setting: &Setting) -> Outcome {
    let mut out = Outcome::begun(jobs, setting);
    let card = setting.card.0 as f64;
    let fits: Vec<bool> = jobs.iter().map(|j| j.peak() <= setting.most(j)).collect();
    let all: f64 = jobs.iter().map(Job::seconds).fold(0.0, f64::max);
    let demand = |part: fn(&super::Phase, f64) -> f64| -> f64 {
        let phases = jobs.iter().flat_map(|j| &j.phases);
        phases.map(|p| part(p, card) * p.seconds).sum::<f64>() / setting.cards as f64
    };
    let busy = demand(|p, card| {
        if p.duty > 0.0 {
            p.bytes.0 as f64 / card
        } else {
            0.0
        }
    });
    let gpu = demand(|p, _| p.duty);
    let last = jobs.iter().map(|j| j.arrives).fold(0.0, f64::max);
    let grid = ((last + all + busy.max(gpu)) / GRID).max(1e-3);
    // What is planned in each interval of the grid, in cards.
    let mut planned: Vec<[f64; 2]> = Vec::new();
    let most = setting.cards as f64 * (1.0 + 1e-9);
    for job in by_arrival(jobs) {
        if !fits[job] {
            continue;
        }
        let j = &jobs[job];
        let uses = on_grid(j, grid, card);
        // Two points of the grid may be asked for more than there is by what was rounded up into them.
        let alone = uses
            .iter()
            .fold([0.0_f64; 2], |m, u| [m[0].max(u[0]), m[1].max(u[1])]);
        let room = [most.max(alone[0]), most.max(alone[1])];
        let mut from = (j.arrives / grid).ceil() as usize;
        'seek: loop {
            for (n, u) in uses.iter().enumerate().rev() {
                let p = planned.get(from + n).copied().unwrap_or_default();
                if p[0] + u[0] > room[0] || p[1] + u[1] > room[1] {
                    from += 1;
                    continue 'seek;
                }
            }
            break;
        }
        if planned.len() < from + uses.len() {
            planned.resize(from + uses.len(), [0.0; 2]);
        }
        for (n, u) in uses.iter().enumerate() {
            planned[from + n][0] += u[0];
            planned[from + n][1] += u[1];
        }
        let start = (from as f64 * grid).max(j.arrives);
        let done = &mut out.jobs[job];
        done.started = Some(start);
        done.ended = Some(start + j.seconds());
        done.bursts = bursts(j);
        if setting.timeline {
            out.timeline.enter(job, j.arrives, Some(State::Queued));
            let mut at = start;
            for p in &j.phases {
                let (state, bytes) = if p.duty > 0.0 {
                    (State::Running, p.bytes)
                } else {
                    (State::Idle, ebb_units::Bytes::ZERO)
                };
                out.timeline.enter(job, at, Some(state));
                out.timeline.resident(job, at, bytes);
                at += p.seconds;
            }
            out.timeline.enter(job, at, None);
            out.timeline.resident(job, at, ebb_units::Bytes::ZERO);
        }
    }
    out
}

/// Its bursts, none of which takes longer than alone.
fn bursts(job: &Job) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    let mut burst = 0.0;
    for p in &job.phases {
        if p.duty > 0.0 {
            burst += p.seconds;
        } else if burst > 0.0 {
            out.push((burst, burst));
            burst = 0.0;
        }
    }
    out.extend((burst > 0.0).then_some((burst, burst)));
    out
}

/// What a job uses in each interval of the grid after its start, in cards: averages.
fn on_grid(job: &Job, grid: f64, card: f64) -> Vec<[f64; 2]> {
    let mut out: Vec<[f64; 2]> = Vec::new();
    let mut at = 0.0;
    for p in &job.phases {
        let end = at + p.seconds;
        if p.duty > 0.0 {
            let mut cell = (at / grid) as usize;
            while (cell as f64) * grid < end {
                let low = (cell as f64 * grid).max(at);
                let part = (((cell + 1) as f64 * grid).min(end) - low).max(0.0) / grid;
                if out.len() <= cell {
                    out.resize(cell + 1, [0.0; 2]);
                }
                out[cell][0] += part * p.bytes.0 as f64 / card;
                out[cell][1] += part * p.duty;
                cell += 1;
            }
        }
        at = end;
    }
    out
}
