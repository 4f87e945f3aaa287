//! Programs that behave as clients do, in steps of simulated time, with their own account of what they were granted.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

pub const GPU: DeviceId = DeviceId(0);
pub const STEP: Duration = Duration::from_millis(50);
const STEP_NANOS: u64 = 50_000_000;

/// Chances in a thousand, a step or an order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub busy: u64,
    pub failed: u64,
    pub no_room: u64,
    /// An order is begun only some steps later.
    pub late: u64,
    /// An order is never answered.
    pub deaf: u64,
    /// The program dies in a step.
    pub death: u64,
    /// An account of the use is not sent.
    pub silent: u64,
}

/// What a program does with its life.
#[derive(Clone, Debug)]
pub struct Job {
    pub spec: TaskSpec,
    /// When it starts.
    pub start: Duration,
    /// All that it allocates, in this many pieces.
    pub footprint: Bytes,
    pub pieces: u64,
    /// Time on the GPU that it needs.
    pub work: Duration,
    /// It works this long, then idles that long.
    pub busy: Duration,
    pub idle: Duration,
    /// What each step of its work allocates, and frees at its end.
    pub scratch: Bytes,
    pub overhead: Bytes,
    /// Programs of that task, with the footprint each.
    pub processes: u64,
    /// Tells that an early out-of-memory is of no use.
    pub long: bool,
}

#[derive(Debug)]
struct Reclaiming {
    id: OrderId,
    left: Bytes,
    depth: Depth,
    copied: Bytes,
    wait: u64,
    fate: Option<Outcome>,
    deaf: bool,
    cancelled: bool,
}

#[derive(Debug)]
struct OpenAsk {
    kind: AskKind,
    left: Bytes,
    since: Time,
}

#[derive(Debug)]
pub struct Program {
    pub id: ClientId,
    pub job: Job,
    pub task: TaskId,
    pub lease: Bytes,
    live: Bytes,
    evicted: Bytes,
    copied_in: Bytes,
    asks: BTreeMap<AskId, OpenAsk>,
    next_ask: u64,
    order: Option<Reclaiming>,
    /// Work done so far.
    pub worked: Duration,
    /// Position in the cycle of work and idleness.
    phase: Duration,
    told: Option<Usage>,
    pub joined: bool,
    pub ended: Option<Time>,
    pub out_of_memory: bool,
    pub longest_wait: Duration,
    retry_long: bool,
}

pub struct World {
    pub arbiter: Arbiter,
    pub now: Time,
    pub programs: Vec<Program>,
    pub log: Vec<(Time, Event, Vec<Action>)>,
    pub capacity: Bytes,
    /// Bytes a step in each direction.
    pub rate: Bytes,
    pub faults: Faults,
    pub copied_out: Bytes,
    pub copied_in: Bytes,
    /// Time in which nobody who had work could do it.
    pub stalled: Duration,
    /// Time in which bytes moved in some direction.
    pub copying: Duration,
    rng: Pcg64,
    live_tasks: BTreeMap<TaskId, u64>,
    moved: bool,
}

impl World {
    pub fn new(seed: u64, capacity: Bytes, faults: Faults, jobs: Vec<Job>, config: PolicyConfig) -> Self {
        let rate = Bytes(config.out_rate / 20);
        let mut world = Self {
            arbiter: Arbiter::new(config),
            now: Time(0),
            programs: Vec::new(),
            log: Vec::new(),
            capacity,
            rate,
            faults,
            copied_out: Bytes::ZERO,
            copied_in: Bytes::ZERO,
            stalled: Duration::ZERO,
            copying: Duration::ZERO,
            rng: Pcg64::seed_from_u64(seed),
            live_tasks: BTreeMap::new(),
            moved: false,
        };
        world.tell(Event::Device {
            device: GPU,
            capacity,
            unmanaged: Bytes::ZERO,
        });
        let mut client = 0;
        for (n, job) in jobs.into_iter().enumerate() {
            let task = TaskId(n as u64 + 1);
            world.live_tasks.insert(task, job.processes);
            for _ in 0..job.processes {
                client += 1;
                world.programs.push(Program {
                    id: ClientId(client),
                    job: job.clone(),
                    task,
                    lease: Bytes::ZERO,
                    live: Bytes::ZERO,
                    evicted: Bytes::ZERO,
                    copied_in: Bytes::ZERO,
                    asks: BTreeMap::new(),
                    next_ask: 0,
                    order: None,
                    worked: Duration::ZERO,
                    phase: Duration::ZERO,
                    told: None,
                    joined: false,
                    ended: None,
                    out_of_memory: false,
                    longest_wait: Duration::ZERO,
                    retry_long: false,
                });
            }
        }
        world
    }

    fn chance(&mut self, in_thousand: u64) -> bool {
        in_thousand > 0 && self.rng.next_u64() % 1000 < in_thousand
    }

    pub fn program(&mut self, id: ClientId) -> &mut Program {
        &mut self.programs[usize::try_from(id.0).unwrap() - 1]
    }

    /// One event: the arbiter's answers reach the programs, and every account is compared.
    pub fn tell(&mut self, event: Event) {
        let actions = self.arbiter.handle(self.now, &event);
        self.log.push((self.now, event.clone(), actions.clone()));
        for action in &actions {
            self.obey(action, &event);
        }
        let mut all = Bytes::ZERO;
        for p in self.programs.iter().filter(|p| p.joined && p.ended.is_none()) {
            assert_eq!(
                self.arbiter.lease(p.id),
                Some(p.lease),
                "{} after {event:?}: {actions:?}",
                p.id
            );
            all += p.lease;
        }
        assert!(all <= self.capacity, "{all} of {}", self.capacity);
        assert_eq!(self.arbiter.free_on(GPU), Some(self.capacity - all));
    }

    fn obey(&mut self, action: &Action, event: &Event) {
        match *action {
            Action::Grant {
                client,
                ask,
                bytes,
                complete,
            } => {
                let now = self.now;
                let p = self.program(client);
                let open = p
                    .asks
                    .get_mut(&ask)
                    .unwrap_or_else(|| panic!("{client} {ask} is granted twice, after {event:?}"));
                assert!(bytes <= open.left, "{client} {ask} got more than it asked");
                assert!(
                    open.kind == AskKind::Restore || bytes == open.left,
                    "an allocation in pieces"
                );
                open.left -= bytes;
                assert_eq!(complete, open.left.is_zero());
                p.lease += bytes;
                let (kind, since) = (open.kind, open.since);
                if complete {
                    p.asks.remove(&ask);
                    p.longest_wait = p.longest_wait.max(now.since(since));
                    if kind == AskKind::Alloc {
                        // The allocation is made at once.
                        p.live += bytes;
                        // What it asked for covers the piece and nothing else.
                    }
                }
            }
            Action::Deny {
                client,
                ask,
                last,
                reason,
            } => {
                let p = self.program(client);
                let open = p.asks.remove(&ask).expect("an open ask is denied");
                assert_eq!(open.kind, AskKind::Alloc, "a restore was denied: {reason}");
                if last {
                    p.out_of_memory = true;
                } else {
                    p.retry_long = true;
                }
            }
            Action::Reclaim {
                client,
                order,
                bytes,
                depth,
                ..
            } => {
                let f = self.faults;
                let fate = if self.chance(f.busy) {
                    Some(Outcome::Busy)
                } else if self.chance(f.failed) {
                    Some(Outcome::Failed)
                } else if self.chance(f.no_room) {
                    Some(Outcome::NoRoom)
                } else {
                    None
                };
                let wait = if self.chance(f.late) {
                    self.rng.next_u64() % 40
                } else {
                    0
                };
                let deaf = self.chance(f.deaf);
                let p = self.program(client);
                assert!(
                    p.order.as_ref().is_none_or(|o| o.deaf),
                    "{client} has two orders, after {event:?}"
                );
                p.order = Some(Reclaiming {
                    id: order,
                    left: bytes,
                    depth,
                    copied: Bytes::ZERO,
                    wait,
                    fate,
                    deaf,
                    cancelled: false,
                });
            }
            Action::CancelReclaim { client, order } => {
                let p = self.program(client);
                match p.order.as_mut().filter(|o| o.id == order) {
                    // Given up by the arbiter; the program has forgotten it.
                    Some(o) if o.deaf => p.order = None,
                    Some(o) => o.cancelled = true,
                    None => {}
                }
            }
            Action::TaskRefused { task, ref why } => panic!("{task} refused: {why}"),
            _ => {}
        }
    }

    fn ended(&self) -> bool {
        self.programs.iter().all(|p| p.ended.is_some())
    }

    /// Runs until all programs ended; how long that took.
    pub fn run(&mut self, most: Duration) -> Duration {
        while !self.ended() {
            if self.now.since(Time(0)) > most {
                let open: Vec<_> = self.programs.iter().filter(|p| p.ended.is_none()).collect();
                let tail = self.log.iter().rev().take(30).rev().collect::<Vec<_>>();
                panic!(
                    "not done after {most:?}: {open:#?}\n{:#?}\n{tail:#?}",
                    self.arbiter.snapshot()
                );
            }
            self.step();
        }
        self.now.since(Time(0))
    }

    pub fn step(&mut self) {
        self.moved = false;
        let mut had_work = false;
        let mut worked = false;
        for n in 0..self.programs.len() {
            if self.programs[n].ended.is_some() || self.now.since(Time(0)) < self.programs[n].job.start {
                continue;
            }
            let before = self.programs[n].worked;
            let wants = self.programs[n].wants_to_work();
            self.live_a_step(n);
            had_work |= wants;
            worked |= self.programs[n].worked > before;
        }
        if had_work && !worked {
            self.stalled += STEP;
        }
        if self.moved {
            self.copying += STEP;
        }
        // Where one process of a task waits while another runs, its place changes all the time; that is looked at with
        // the next event, which is never far.
        if self.programs.iter().all(|p| p.job.processes == 1) && self.chance(20) {
            self.check_deadline();
        }
        let end = self.now.after(STEP);
        while let Some(next) = self.arbiter.next_deadline().filter(|t| *t <= end) {
            assert!(next > self.now, "a deadline lies ahead");
            self.now = next;
            self.tell(Event::Tick);
        }
        self.now = end;
    }

    /// Before the arbiter's own deadline there is nothing to do: one that it forgot would show here.
    fn check_deadline(&mut self) {
        let hour = self.now.0 + 3_600_000_000_000;
        let next = self.arbiter.next_deadline().map_or(hour, |t| t.0.min(hour));
        let before = Time(self.now.0 + self.rng.next_u64() % (next - self.now.0));
        let actions = self.arbiter.clone().handle(before, &Event::Tick);
        assert!(
            actions.is_empty(),
            "at {before:?}, before the deadline of {next}: {actions:?}\n{:#?}",
            self.arbiter.snapshot()
        );
    }

    fn live_a_step(&mut self, n: usize) {
        let (client, task) = (self.programs[n].id, self.programs[n].task);
        if !self.programs[n].joined {
            let job = self.programs[n].job.clone();
            let first = self.programs[..n].iter().all(|p| p.task != task);
            if first {
                self.tell(Event::TaskAdded {
                    task,
                    spec: job.spec,
                    devices: vec![],
                    adopt: false,
                });
            }
            self.tell(Event::ClientJoined {
                client,
                task,
                device: GPU,
                lease: Bytes::ZERO,
                evicted: Bytes::ZERO,
                overhead: Bytes::ZERO,
            });
            self.programs[n].joined = true;
        }
        let death = self.faults.death;
        if self.chance(death) || self.programs[n].out_of_memory {
            return self.end(n);
        }
        self.reclaim(n);
        self.bring_back(n);
        if self.now.0.is_multiple_of(100_000_000) {
            self.account(n);
        }
        self.work(n);
        if self.programs[n].worked >= self.programs[n].job.work {
            self.end(n);
        }
    }

    fn end(&mut self, n: usize) {
        let (client, task) = (self.programs[n].id, self.programs[n].task);
        self.programs[n].ended = Some(self.now);
        self.programs[n].lease = Bytes::ZERO;
        self.programs[n].order = None;
        self.tell(Event::ClientLeft {
            client,
            kept: Bytes::ZERO,
        });
        let left = self.live_tasks.get_mut(&task).unwrap();
        *left -= 1;
        if *left == 0 {
            self.tell(Event::TaskRemoved { task });
        }
    }

    /// A step of the order that is open.
    fn reclaim(&mut self, n: usize) {
        let rate = self.rate;
        let p = &mut self.programs[n];
        let client = p.id;
        let Some(o) = &mut p.order else { return };
        if o.deaf {
            return;
        }
        if o.wait > 0 {
            o.wait -= 1;
            return;
        }
        let order = o.id;
        let unused = p.lease - p.live;
        let take = o.left.min(unused);
        let mut copy = Bytes::ZERO;
        let stop = o.cancelled || (o.fate.is_some() && (o.copied > rate || o.fate == Some(Outcome::Busy)));
        if !stop && o.depth == Depth::Evict {
            copy = (o.left.saturating_sub(take)).min(p.live).min(rate);
        }
        p.live -= copy;
        p.evicted += copy;
        p.lease = p.lease - take - copy;
        o.copied += copy;
        o.left = o.left.saturating_sub(take).saturating_sub(copy);
        let nothing = p.lease.is_zero() || (o.depth == Depth::Unused && p.lease == p.live);
        let done = stop || o.left.is_zero() || nothing;
        let outcome = o.fate.filter(|_| stop && !o.cancelled).unwrap_or(Outcome::Done);
        let copied = o.copied;
        if done {
            p.order = None;
        }
        self.copied_out += copy;
        self.moved |= !copy.is_zero();
        if !(take + copy).is_zero() {
            self.tell(Event::ReclaimProgress {
                client,
                order,
                bytes: take + copy,
            });
        }
        if !copy.is_zero() {
            self.account(n);
        }
        if done {
            let nanos = STEP_NANOS * copied.0.div_ceil(rate.0.max(1));
            self.tell(Event::ReclaimDone {
                client,
                order,
                outcome,
                copied,
                nanos,
            });
        }
    }

    /// Copies in what there is lease for.
    fn bring_back(&mut self, n: usize) {
        let rate = self.rate;
        let p = &mut self.programs[n];
        if p.evicted.is_zero() || !p.wants_to_work() || p.order.is_some() {
            return;
        }
        let room = p.lease - p.live;
        let copy = p.evicted.min(room).min(rate);
        p.live += copy;
        p.evicted -= copy;
        p.copied_in += copy;
        self.copied_in += copy;
        self.moved |= !copy.is_zero();
        if !copy.is_zero() {
            self.account(n);
        }
        let p = &mut self.programs[n];
        let client = p.id;
        if p.evicted.is_zero() {
            let copied = std::mem::take(&mut p.copied_in);
            let nanos = STEP_NANOS * copied.0.div_ceil(rate.0.max(1));
            self.tell(Event::Restored {
                client,
                copied,
                nanos,
            });
            return;
        }
        let asked: Bytes = p
            .asks
            .values()
            .filter(|a| a.kind == AskKind::Restore)
            .map(|a| a.left)
            .sum();
        let missing = p.evicted.saturating_sub(p.lease - p.live).saturating_sub(asked);
        if !missing.is_zero() {
            self.ask(n, AskKind::Restore, missing, true);
        }
    }

    fn ask(&mut self, n: usize, kind: AskKind, bytes: Bytes, long: bool) {
        let now = self.now;
        let p = &mut self.programs[n];
        p.next_ask += 1;
        let ask = AskId(p.next_ask);
        p.asks.insert(
            ask,
            OpenAsk {
                kind,
                left: bytes,
                since: now,
            },
        );
        let client = p.id;
        self.tell(Event::Ask {
            client,
            ask,
            kind,
            bytes,
            long,
        });
    }

    /// Sent every 100 ms, and whenever something left or came back.
    fn account(&mut self, n: usize) {
        let silent = self.faults.silent;
        if self.chance(silent) {
            return;
        }
        let p = &mut self.programs[n];
        let usage = Usage {
            resident: p.live,
            cached: Bytes::ZERO,
            evicted: p.evicted,
            pinned: Bytes::ZERO,
            ..Usage::default()
        };
        if p.told != Some(usage) {
            p.told = Some(usage);
            let client = p.id;
            self.tell(Event::Usage { client, usage });
        }
    }

    fn work(&mut self, n: usize) {
        let p = &mut self.programs[n];
        let cycle = p.job.busy + p.job.idle;
        if !p.wants_to_work() {
            p.phase = (p.phase + STEP)
                .as_nanos()
                .checked_rem(cycle.as_nanos())
                .map_or(Duration::ZERO, |n| {
                    Duration::from_nanos(u64::try_from(n).unwrap())
                });
            return;
        }
        let gated = !p.evicted.is_zero()
            || p.order
                .as_ref()
                .is_some_and(|o| o.depth == Depth::Evict && o.wait == 0 && !o.deaf);
        if p.asks.values().any(|a| a.kind == AskKind::Alloc) || gated {
            return;
        }
        let client = p.id;
        let whole = p.job.footprint + p.job.scratch;
        if p.live < whole {
            let piece = Bytes(p.job.footprint.0.div_ceil(p.job.pieces));
            let bytes = if p.live < p.job.footprint {
                piece.min(p.job.footprint - p.live)
            } else {
                whole - p.live
            };
            let long = p.job.long || std::mem::take(&mut p.retry_long);
            // Lease without memory behind it is used first.
            if p.lease - p.live >= bytes {
                p.live += bytes;
            } else {
                self.ask(n, AskKind::Alloc, bytes, long);
            }
            if self.programs[n].live < whole || whole == self.programs[n].job.footprint {
                return;
            }
        }
        let p = &mut self.programs[n];
        p.worked += STEP;
        p.phase += STEP;
        if p.phase >= cycle {
            p.phase = Duration::ZERO;
        }
        let bytes = p.job.scratch;
        if !bytes.is_zero() {
            (p.live, p.lease) = (p.live - bytes, p.lease - bytes);
            self.tell(Event::Returned { client, bytes });
        }
        if self.now.0.is_multiple_of(100_000_000) {
            self.tell(Event::Touched { client });
        }
    }
}

impl Program {
    pub fn wants_to_work(&self) -> bool {
        self.ended.is_none() && (self.phase < self.job.busy || self.live + self.evicted < self.job.footprint)
    }
}
