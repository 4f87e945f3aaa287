//! The oracle: knows what every job will do, moves for nothing, and cuts jobs over cards as it likes.
//!
//! On a grid of time, each job starts at the first moment from which all that it will use fits beside what is planned already,
//! bytes and GPU time of all cards together. Nobody who has to decide card by card, or who learns what jobs do as they do it,
//! can use the cards much better; an order of starts that plans jobs together might, so this is no proven bound.

use super::{Done, Job, Outcome, Setting, State, Timeline, by_arrival};

/// Points of the grid.
const GRID: f64 = 4096.0;

pub(super) fn run(jobs: &[Job], setting: &Setting) -> Outcome {
    let mut out = Outcome {
        jobs: vec![Done::default(); jobs.len()],
        timeline: Timeline::new(jobs.len(), setting.timeline),
        ..Outcome::default()
    };
    let card = setting.card.0 as f64;
    let fits: Vec<bool> = jobs
        .iter()
        .map(|j| j.peak() <= j.limit.map_or(setting.card, |l| l.min(setting.card)))
        .collect();
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
