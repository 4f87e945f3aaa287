//! Ranks of one job on several cards: they leave together, come back together, and hold nothing that somebody waits for while one is away.
//!
//! `EBB_SEED=123 cargo test -p ebb-policy --test gangs -- --nocapture` runs one random world again and prints what happened.

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

const CARD: u64 = 100;
const MS: u64 = 1_000_000;
const STEP: u64 = 50 * MS;
/// Nanoseconds to copy a GiB.
const GIB_TIME: u64 = 20 * MS;
const STARVE: u64 = 60_000 * MS;

fn config() -> PolicyConfig {
    PolicyConfig {
        starve_after: Duration::from_nanos(STARVE),
        out_rate: 50 << 30,
        in_rate: 50 << 30,
        turn_per_copy: 5,
        ..PolicyConfig::default()
    }
}

/// A process on a card.
#[derive(Clone, Debug, Default)]
struct Rank {
    task: usize,
    device: u32,
    lease: u64,
    away: u64,
    /// Lease for what is away.
    coming: u64,
    /// What is still to be granted, and since when it was asked for.
    open: BTreeMap<AskId, (u64, u64)>,
    asks: u64,
    order: Option<(OrderId, u64, u64)>,
    /// When all of it is back.
    back: Option<u64>,
    /// Asks only if it is told to, or is the first that is not there.
    shy: bool,
    told: bool,
    longest: u64,
    /// What its job had done when it was brought back last.
    back_at: Option<u64>,
}

#[derive(Clone, Debug, Default)]
struct Job {
    footprint: u64,
    ranks: Vec<usize>,
    work: u64,
    /// It is not there before.
    start: u64,
    /// Steps in which all of it was there.
    worked: u64,
    /// Since when somebody has waited in vain for what a rank holds while another is away.
    half: Option<u64>,
    longest_half: u64,
    /// Times that a rank was brought back and taken again: after the job got on, and before.
    turns: u64,
    wasted: u64,
    ended: bool,
}

struct World {
    seed: u64,
    random: Pcg64Mcg,
    arbiter: Arbiter,
    now: u64,
    ranks: Vec<Rank>,
    jobs: Vec<Job>,
    log: Vec<(Time, Event, Vec<Action>)>,
    loud: bool,
}

impl World {
    fn empty(seed: u64, cards: u32, loud: bool) -> Self {
        let mut w = Self {
            seed,
            random: Pcg64Mcg::seed_from_u64(seed),
            arbiter: Arbiter::new(config()),
            now: 0,
            ranks: Vec::new(),
            jobs: Vec::new(),
            log: Vec::new(),
            loud,
        };
        for device in 0..cards {
            w.tell(Event::Device {
                device: DeviceId(device),
                capacity: Bytes::gib(CARD),
                unmanaged: Bytes::ZERO,
            });
        }
        w
    }

    /// Two to four cards, one or two gangs, some jobs of one card.
    fn new(seed: u64, loud: bool) -> Self {
        let mut w = Self::empty(seed, 0, loud);
        let cards = 2 + u32::try_from(w.draw(3)).unwrap();
        let mut w = Self::empty(seed, cards, loud);
        let gangs = 1 + w.draw(2);
        for _ in 0..gangs {
            let size = 2 + u32::try_from(w.draw(u64::from(cards) - 1)).unwrap();
            let first = u32::try_from(w.draw(u64::from(cards - size + 1))).unwrap();
            let (footprint, work, start) = (20 + w.draw(75), 100 + w.draw(300), w.draw(10_000) * MS);
            w.job(first..first + size, footprint, work, start);
        }
        for _ in 0..1 + w.draw(5) {
            let card = u32::try_from(w.draw(u64::from(cards))).unwrap();
            let (footprint, work, start) = (20 + w.draw(75), 100 + w.draw(300), w.draw(10_000) * MS);
            w.job(card..card + 1, footprint, work, start);
        }
        for n in 0..w.ranks.len() {
            w.ranks[n].shy = w.jobs[w.ranks[n].task].ranks.len() > 1 && w.draw(3) == 0;
        }
        w
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random.next_u64() % below.max(1)
    }

    fn job(&mut self, cards: std::ops::Range<u32>, footprint: u64, work: u64, start: u64) {
        let task = self.jobs.len();
        let mut ranks = Vec::new();
        for device in cards {
            ranks.push(self.ranks.len());
            self.ranks.push(Rank {
                task,
                device,
                ..Rank::default()
            });
        }
        self.jobs.push(Job {
            footprint,
            ranks,
            work,
            start,
            ..Job::default()
        });
    }

    fn wrong(&self, what: &str) -> ! {
        let tail: Vec<_> = self.log.iter().rev().take(12).rev().collect();
        panic!(
            "seed {}: {what} at {:?}\n{:#?}\n{:#?}\n{tail:#?}",
            self.seed,
            Time(self.now),
            self.jobs,
            self.ranks
        );
    }

    fn tell(&mut self, event: Event) {
        let actions = self.arbiter.handle(Time(self.now), &event);
        if let Err(wrong) = self.arbiter.check() {
            self.wrong(&wrong);
        }
        if self.loud && !(actions.is_empty() && matches!(event, Event::Touched { .. } | Event::Tick)) {
            println!("{:?} {event:?} -> {actions:?}", Time(self.now));
        }
        self.log.push((Time(self.now), event, actions.clone()));
        for action in actions {
            self.obey(&action);
        }
    }

    fn obey(&mut self, action: &Action) {
        let now = self.now;
        match *action {
            Action::Grant {
                client,
                ask,
                bytes,
                complete,
            } => {
                let p = &mut self.ranks[usize::try_from(client.0).unwrap()];
                let bytes = bytes.0 >> 30;
                p.lease += bytes;
                let open = p.open.get_mut(&ask).expect("an ask is granted");
                open.0 -= bytes;
                let since = open.1;
                if p.away > 0 {
                    p.coming += bytes;
                }
                if complete {
                    p.open.remove(&ask);
                    p.longest = p.longest.max(now - since);
                    p.back = (p.coming >= p.away).then_some(now + p.away * GIB_TIME);
                }
            }
            Action::Deny { client, reason, .. } => self.wrong(&format!("{client} is denied: {reason}")),
            Action::Reclaim {
                client,
                order,
                bytes,
                depth,
                ..
            } => {
                let p = &mut self.ranks[usize::try_from(client.0).unwrap()];
                let take = (bytes.0 >> 30).min(p.lease);
                let copy = if depth == Depth::Evict {
                    take.saturating_sub(p.coming)
                } else {
                    0
                };
                p.order = Some((order, take, now + copy * GIB_TIME));
                p.back = None;
                if let Some(at) = p.back_at.take_if(|_| copy > 0) {
                    let job = &mut self.jobs[p.task];
                    job.turns += 1;
                    job.wasted += u64::from(job.worked == at);
                    if self.loud && job.worked == at {
                        println!("{:?} in vain, {}", Time(now), p.task);
                    }
                }
            }
            Action::CancelReclaim { client, order } => {
                let p = &mut self.ranks[usize::try_from(client.0).unwrap()];
                if let Some((open, take, until)) = &mut p.order
                    && *open == order
                {
                    (*take, *until) = (0, now);
                }
            }
            Action::BringBack { client, .. } => {
                self.ranks[usize::try_from(client.0).unwrap()].told = true;
            }
            _ => {}
        }
    }

    fn there(&self, n: usize) -> bool {
        let p = &self.ranks[n];
        p.lease == self.jobs[p.task].footprint && p.away == 0 && p.order.is_none()
    }

    fn ask(&mut self, n: usize, kind: AskKind, gibs: u64) {
        let p = &mut self.ranks[n];
        p.asks += 1;
        p.told = false;
        let ask = AskId(p.asks);
        p.open.insert(ask, (gibs, self.now));
        self.tell(Event::Ask {
            client: ClientId(n as u64),
            ask,
            kind,
            bytes: Bytes::gib(gibs),
            long: true,
        });
    }

    fn step(&mut self) {
        let now = self.now;
        for n in 0..self.ranks.len() {
            self.live(n);
        }
        for task in 0..self.jobs.len() {
            let job = &self.jobs[task];
            if job.ended || now < job.start {
                continue;
            }
            if job.ranks.iter().all(|n| self.there(*n)) {
                self.jobs[task].worked += 1;
                for n in self.jobs[task].ranks.clone() {
                    self.tell(Event::Touched {
                        client: ClientId(n as u64),
                    });
                }
            }
            if self.jobs[task].worked >= self.jobs[task].work {
                self.jobs[task].ended = true;
                for n in self.jobs[task].ranks.clone() {
                    let p = &mut self.ranks[n];
                    (p.lease, p.away, p.coming, p.order, p.back) = (0, 0, 0, None, None);
                    p.open.clear();
                }
                self.tell(Event::TaskRemoved {
                    task: TaskId(task as u64),
                });
            }
            self.look_at(task);
        }
        let end = now + STEP;
        while let Some(next) = self.arbiter.next_deadline().filter(|t| t.0 <= end) {
            self.now = next.0;
            self.tell(Event::Tick);
        }
        self.now = end;
    }

    fn live(&mut self, n: usize) {
        let now = self.now;
        let (task, client) = (self.ranks[n].task, ClientId(n as u64));
        let job = self.jobs[task].clone();
        if job.ended || now < job.start {
            return;
        }
        if self.ranks[n].asks == 0 {
            if job.ranks[0] == n {
                self.tell(Event::TaskAdded {
                    task: TaskId(task as u64),
                    spec: TaskSpec::default(),
                    devices: vec![],
                    adopt: false,
                });
            }
            self.tell(Event::ClientJoined {
                client,
                task: TaskId(task as u64),
                device: DeviceId(self.ranks[n].device),
                lease: Bytes::ZERO,
                evicted: Bytes::ZERO,
                overhead: Bytes::ZERO,
            });
            return self.ask(n, AskKind::Alloc, job.footprint);
        }
        let p = &mut self.ranks[n];
        if let Some((order, take, _)) = p.order.take_if(|o| o.2 <= now) {
            let lease = take.min(p.coming);
            let copied = take - lease;
            p.coming -= lease;
            p.away += copied;
            p.lease -= take;
            if take > 0 {
                self.tell(Event::ReclaimProgress {
                    client,
                    order,
                    bytes: Bytes::gib(take),
                });
            }
            self.tell(Event::ReclaimDone {
                client,
                order,
                outcome: Outcome::Done,
                copied: Bytes::gib(copied),
                nanos: copied * GIB_TIME,
            });
        }
        let p = &mut self.ranks[n];
        if p.order.is_some() {
            return;
        }
        if p.away > 0 && p.coming >= p.away && p.back.is_none() {
            p.back = Some(now);
        }
        if p.back.take_if(|at| *at <= now).is_some() && p.away > 0 {
            let copied = std::mem::take(&mut p.away);
            p.coming = 0;
            p.back_at = Some(self.jobs[task].worked);
            self.tell(Event::Restored {
                client,
                copied: Bytes::gib(copied),
                nanos: copied * GIB_TIME,
            });
        }
        let p = &self.ranks[n];
        // Somebody finds that it cannot go on; who waits for that one needs nothing of its own yet.
        let first = job.ranks.iter().find(|m| !self.there(**m)) == Some(&n);
        let asked: u64 = p.open.values().map(|(left, _)| left).sum();
        let wants = !p.shy || p.told || first || asked > 0;
        if p.away > p.coming + asked && wants {
            let missing = p.away - p.coming - asked;
            self.ask(n, AskKind::Restore, missing);
        }
    }

    /// Whether a rank holds what somebody waits for while another of its gang is away, and nothing is done about it.
    fn look_at(&mut self, task: usize) {
        let job = &self.jobs[task];
        let missing = |n: &usize| {
            let p = &self.ranks[*n];
            p.away > 0 && p.back.is_none() && p.order.is_none() && p.lease == 0
        };
        let waited_for = |n: &usize| {
            let p = &self.ranks[*n];
            let device = self
                .ranks
                .iter()
                .enumerate()
                .filter(|(_, o)| o.device == p.device);
            // Room is made on that card, or has been.
            let moves = device.clone().any(|(_, o)| o.order.is_some() || o.back.is_some());
            let held: u64 = device.clone().map(|(_, o)| o.lease).sum();
            // Who stands behind another may have to wait for what that one gets.
            let first = |m: usize| {
                let wait = self.arbiter.waiting(ClientId(m as u64));
                wait.is_some_and(|wait| wait.place == 1)
            };
            let wanted = device.filter(|(m, o)| m != n && self.jobs[o.task].ranks.len() == 1 && first(*m));
            let could = |o: &Rank| {
                let need = self.jobs[o.task].footprint - o.lease;
                need <= CARD - held + p.lease
            };
            self.there(*n) && !moves && wanted.map(|(_, o)| o).any(could)
        };
        let half = job.ranks.iter().any(missing) && job.ranks.iter().any(waited_for);
        let now = self.now;
        let job = &mut self.jobs[task];
        if half && !job.ended {
            if self.loud && job.half.is_none() {
                println!("{:?} half a gang, {task}", Time(now));
            }
            let since = *job.half.get_or_insert(now);
            job.longest_half = job.longest_half.max(now - since);
        } else {
            job.half = None;
        }
    }

    fn run(&mut self) {
        let most = 4 * 3600 * 1000 * MS;
        while self.jobs.iter().any(|j| !j.ended) {
            self.step();
            if self.now > most {
                self.wrong("livelock");
            }
        }
    }

    fn judge(&self) {
        for job in self.jobs.iter().filter(|j| j.ranks.len() > 1) {
            // As long as another's turn lasts at the least, and a moment.
            if job.longest_half > 2000 * MS {
                self.wrong(&format!(
                    "half a gang held memory for {:?}",
                    Time(job.longest_half)
                ));
            }
        }
        // The stated bound, for a gang once for each card of its: their turns end by themselves.
        let turn = |j: &Job| 6 * 2 * j.footprint * GIB_TIME + 2000 * MS;
        let all: u64 = self.jobs.iter().map(turn).sum();
        for p in &self.ranks {
            let cards = self.jobs[p.task].ranks.len() as u64;
            let bound = STARVE + cards * 2 * all;
            if p.longest > bound {
                self.wrong(&format!(
                    "{:?} waited, the bound is {:?}",
                    Time(p.longest),
                    Time(bound)
                ));
            }
        }
        let mut again = Arbiter::new(config());
        for (time, event, actions) in &self.log {
            assert_eq!(
                &again.handle(*time, event),
                actions,
                "seed {}: another run does otherwise",
                self.seed
            );
        }
    }
}

#[test]
fn random_gangs_are_whole_or_away() {
    if let Some(seed) = std::env::var("EBB_SEED").ok().and_then(|s| s.parse().ok()) {
        let mut w = World::new(seed, true);
        w.run();
        return w.judge();
    }
    let seeds = if cfg!(debug_assertions) { 150 } else { 3000 };
    let (mut turns, mut wasted) = (0, 0);
    let mut failed = BTreeMap::new();
    for seed in 0..seeds {
        let run = std::panic::catch_unwind(|| {
            let mut w = World::new(seed, false);
            w.run();
            w.judge();
            let gangs = || w.jobs.iter().filter(|j| j.ranks.len() > 1);
            let sum = |f: fn(&Job) -> u64| gangs().map(f).sum::<u64>();
            (sum(|j| j.turns), sum(|j| j.wasted))
        });
        match run {
            Ok(some) => {
                (turns, wasted) = (turns + some.0, wasted + some.1);
            }
            Err(e) => {
                let text = e.downcast_ref::<String>().cloned().unwrap_or_default();
                failed.insert(seed, text.lines().next().unwrap_or_default().to_string());
            }
        }
        if failed.len() > 5 {
            break;
        }
    }
    assert!(failed.is_empty(), "run one again with EBB_SEED: {failed:#?}");
    // Brought back without the others, or taken before they came, is copying in vain.
    println!("{turns} turns of ranks, {wasted} in vain");
    assert!(
        turns > seeds && wasted * 25 < turns,
        "{wasted} of {turns} in vain"
    );
}
