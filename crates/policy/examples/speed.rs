//! How many events a second the arbiter takes in, on one core, for 10 to 10,000 tasks.
//!
//! `cargo run --release -p ebb-policy --example speed [SECONDS-PER-ROW [MIX [TASKS [eight|one]]]]`
//!
//! With `digest` for the seconds, it prints for each row a number that depends on every action of its first events: two
//! versions of the arbiter that decide alike print the same.
//!
//! Time is the thread's time on the processor, and includes what it takes to play the programs.
//!
//! Three mixes, each on cards of 141 GiB, once with eight tasks a card and once with all tasks of the row on one card:
//! * *calm*: everybody fits. Touches, accounts of use, small allocations and returns: what a daemon hears most of the time.
//! * *bursty*: three times what fits. Tasks work and idle; their memory is released and restored by orders that are obeyed.
//! * *contended*: three times what fits and nobody idles. Turns.

use std::collections::VecDeque;

use ebb_policy::{Action, Arbiter, AskId, AskKind, Event, Outcome, PolicyConfig, TaskSpec, Time, Usage};
use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

const CARD: Bytes = Bytes::gib(141);

#[derive(Clone, Copy, PartialEq)]
enum Mix {
    Calm,
    Bursty,
    Contended,
}

#[derive(Clone, Default)]
struct Program {
    live: Bytes,
    away: Bytes,
    asks: u64,
    waiting: bool,
}

struct World {
    arbiter: Arbiter,
    /// Of all actions, if somebody wants to compare.
    digest: Option<u64>,
    now: u64,
    mix: Mix,
    programs: Vec<Program>,
    queue: VecDeque<Event>,
    actions: Vec<Action>,
    random: u64,
    size: Bytes,
}

impl World {
    fn new(tasks: u64, cards: u64, mix: Mix) -> Self {
        let size = match mix {
            Mix::Calm => Bytes(CARD.0 * cards / tasks * 8 / 10),
            Mix::Bursty | Mix::Contended => Bytes(CARD.0 * cards / tasks * 3),
        };
        let mut world = Self {
            arbiter: Arbiter::new(PolicyConfig::default()),
            digest: None,
            now: 1,
            mix,
            programs: vec![Program::default(); usize::try_from(tasks).expect("few")],
            queue: VecDeque::new(),
            actions: Vec::new(),
            random: 0x9e37_79b9_7f4a_7c15,
            size: size.round_down(Bytes::mib(2)),
        };
        for card in 0..cards {
            world.feed(&Event::Device {
                device: DeviceId(u32::try_from(card).expect("few")),
                capacity: CARD,
                unmanaged: Bytes::ZERO,
            });
        }
        for n in 0..tasks {
            let device = DeviceId(u32::try_from(n % cards).expect("few"));
            world.feed(&Event::TaskAdded {
                task: TaskId(n),
                spec: TaskSpec::default(),
                devices: vec![device],
                adopt: false,
            });
            world.feed(&Event::ClientJoined {
                client: ClientId(n),
                task: TaskId(n),
                device,
                lease: Bytes::ZERO,
                evicted: Bytes::ZERO,
                overhead: Bytes::ZERO,
            });
        }
        world
    }

    fn draw(&mut self, below: u64) -> u64 {
        // xorshift*: any sequence will do, as long as it is the same each time.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
    }

    fn feed(&mut self, event: &Event) {
        self.arbiter.handle_into(Time(self.now), event, &mut self.actions);
        let mut actions = std::mem::take(&mut self.actions);
        if let Some(digest) = &mut self.digest {
            for byte in format!("{} {actions:?}", self.now).bytes() {
                *digest = (*digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        for action in actions.drain(..) {
            match action {
                Action::Grant { client, bytes, .. } => {
                    let p = &mut self.programs[usize::try_from(client.0).expect("small")];
                    p.waiting = false;
                    let back = p.away.min(bytes);
                    p.away = p.away.saturating_sub(back);
                    p.live = p.live.saturating_add(bytes);
                    if !back.is_zero() && p.away.is_zero() {
                        self.queue.push_back(Event::Restored {
                            client,
                            copied: back,
                            nanos: back.0 / 50,
                        });
                    }
                }
                Action::Deny { client, .. } => {
                    self.programs[usize::try_from(client.0).expect("small")].waiting = false
                }
                Action::Reclaim {
                    client, order, bytes, ..
                } => {
                    let p = &mut self.programs[usize::try_from(client.0).expect("small")];
                    let bytes = bytes.min(p.live);
                    p.live = p.live.saturating_sub(bytes);
                    p.away = p.away.saturating_add(bytes);
                    self.queue
                        .push_back(Event::ReclaimProgress { client, order, bytes });
                    self.queue.push_back(Event::ReclaimDone {
                        client,
                        order,
                        outcome: Outcome::Done,
                        copied: bytes,
                        nanos: bytes.0 / 50,
                    });
                }
                _ => {}
            }
        }
        // Kept for its memory.
        self.actions = actions;
    }

    /// The next thing that happens: an answer to an order, a deadline, or something that a program does.
    fn next(&mut self) -> Event {
        if let Some(event) = self.queue.pop_front() {
            return event;
        }
        // A program is heard of ten times a second.
        self.now += 100_000_000 / self.programs.len() as u64;
        if self.arbiter.next_deadline().is_some_and(|at| at.0 <= self.now) {
            return Event::Tick;
        }
        let n = match self.mix {
            // A tenth of them works for two seconds, then the next tenth.
            Mix::Bursty => {
                let len = self.programs.len() as u64;
                let tenth = (len / 10).max(1);
                ((self.now / 2_000_000_000) * tenth + self.draw(tenth)) % len
            }
            Mix::Calm | Mix::Contended => self.draw(self.programs.len() as u64),
        };
        // Who waits stands at the gate and does nothing.
        let mut n = n;
        for _ in 0..64 {
            if !self.programs[usize::try_from(n).expect("small")].waiting {
                break;
            }
            n = self.draw(self.programs.len() as u64);
        }
        let client = ClientId(n);
        let what = self.draw(20);
        let size = self.size;
        let p = &mut self.programs[usize::try_from(n).expect("small")];
        let piece = Bytes::mib(2);
        if p.waiting {
            return Event::Touched { client };
        }
        if !p.away.is_zero() {
            (p.asks, p.waiting) = (p.asks + 1, true);
            return Event::Ask {
                client,
                ask: AskId(p.asks),
                kind: AskKind::Restore,
                bytes: p.away,
                long: true,
            };
        }
        if p.live < size {
            (p.asks, p.waiting) = (p.asks + 1, true);
            let bytes = if what == 0 {
                piece
            } else {
                size.saturating_sub(p.live).max(piece)
            };
            return Event::Ask {
                client,
                ask: AskId(p.asks),
                kind: AskKind::Alloc,
                bytes,
                long: true,
            };
        }
        match what {
            0 if self.mix == Mix::Calm => {
                p.live = p.live.saturating_sub(piece);
                Event::Returned { client, bytes: piece }
            }
            1..=8 => Event::Usage {
                client,
                usage: Usage {
                    resident: p.live,
                    ..Usage::default()
                },
            },
            _ => Event::Touched { client },
        }
    }
}

/// Of this thread: the machine may be busy with other things.
fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |at: usize, what: &str| args.get(at).is_none_or(|a| a == what);
    let digest = args.first().is_some_and(|a| a == "digest");
    let seconds: f64 = args.first().and_then(|s| s.parse().ok()).unwrap_or(1.0);
    println!(
        "{:>10} {:>6} {:>7} {:>14} {:>10}",
        "mix", "cards", "tasks", "events/s", "ns/event"
    );
    for (name, mix) in [
        ("calm", Mix::Calm),
        ("bursty", Mix::Bursty),
        ("contended", Mix::Contended),
    ] {
        for eight in [true, false] {
            for tasks in [10, 100, 1000, 10_000] {
                if !wanted(1, name)
                    || !wanted(2, &tasks.to_string())
                    || !wanted(3, if eight { "eight" } else { "one" })
                {
                    continue;
                }
                let cards = if eight { u64::max(1, tasks / 8) } else { 1 };
                let mut world = World::new(tasks, cards, mix);
                if digest {
                    world.digest = Some(0xcbf2_9ce4_8422_2325);
                    for _ in 0..60 * tasks.max(1000) {
                        let event = world.next();
                        world.feed(&event);
                    }
                    println!(
                        "{name:>10} {cards:>6} {tasks:>7} {:016x}",
                        world.digest.unwrap_or_default()
                    );
                    continue;
                }
                // Until everybody has begun.
                for _ in 0..30 * tasks {
                    let event = world.next();
                    world.feed(&event);
                }
                let (start, mut events) = (cpu_seconds(), 0u64);
                while cpu_seconds() - start < seconds {
                    for _ in 0..1000 {
                        let event = world.next();
                        world.feed(&event);
                    }
                    events += 1000;
                }
                let inside = cpu_seconds() - start;
                println!(
                    "{name:>10} {cards:>6} {tasks:>7} {:>14.0} {:>10.0}",
                    events as f64 / inside,
                    inside * 1e9 / events as f64
                );
            }
        }
    }
}
