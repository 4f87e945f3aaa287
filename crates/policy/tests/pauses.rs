//! Pauses and resumes, however close together: whoever is resumed gets its memory back and a turn.

mod common;

use std::time::Duration;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, TaskId};

const TASK: TaskId = TaskId(1);
const TURN: Duration = Duration::from_millis(100);

/// A task with `ranks` processes, each on a card of its own; kernels end only while all of them are on their cards.
struct Ranks {
    arbiter: Arbiter,
    now: Time,
    ranks: Vec<Rank>,
    /// Milliseconds that a restore takes.
    copy: u64,
    /// Time in which all ranks were there.
    together: Duration,
    done: Option<Bytes>,
    fetched: usize,
    round: u64,
}

#[derive(Debug, Default)]
struct Rank {
    away: bool,
    order: Option<OrderId>,
    left_in: u64,
    ask: Option<AskId>,
    asks: u64,
    /// Copying in, and until when.
    arrives: Option<u64>,
    /// Does not touch the GPU by itself.
    quiet: bool,
}

impl Ranks {
    fn new(ranks: u64, copy: u64) -> Self {
        let mut world = Self {
            arbiter: Arbiter::new(config()),
            now: Time(0),
            ranks: Vec::new(),
            copy,
            together: Duration::ZERO,
            done: None,
            fetched: 0,
            round: 0,
        };
        for device in 0..ranks {
            world.tell(Event::Device {
                device: DeviceId(u32::try_from(device).unwrap()),
                capacity: gib(100),
                unmanaged: Bytes::ZERO,
            });
        }
        world.tell(Event::TaskAdded {
            task: TASK,
            spec: spec(),
            devices: vec![],
            adopt: false,
        });
        for rank in 0..ranks {
            world.ranks.push(Rank::default());
            world.tell(Event::ClientJoined {
                client: ClientId(rank),
                task: TASK,
                device: DeviceId(u32::try_from(rank).unwrap()),
                lease: gib(10),
                evicted: Bytes::ZERO,
                overhead: Bytes::ZERO,
            });
        }
        world
    }

    fn tell(&mut self, event: Event) {
        let actions = self.arbiter.handle(self.now, &event);
        self.arbiter.check().unwrap();
        for action in actions {
            match action {
                Action::Reclaim { client, order, .. } => {
                    let rank = &mut self.ranks[usize::try_from(client.0).unwrap()];
                    assert!(!rank.away || rank.arrives.is_some(), "an order for what is away");
                    rank.order = Some(order);
                }
                Action::Grant { client, complete, .. } => {
                    assert!(complete);
                    let rank = &mut self.ranks[usize::try_from(client.0).unwrap()];
                    rank.ask = None;
                    rank.arrives = Some(self.now.0 / 1_000_000 + self.copy);
                }
                Action::BringBack { client, .. } => {
                    self.fetched += 1;
                    self.ranks[usize::try_from(client.0).unwrap()].quiet = false;
                }
                Action::PauseDone { left, .. } => self.done = Some(left),
                _ => {}
            }
        }
    }

    fn together(&self) -> bool {
        self.ranks.iter().all(|r| !r.away && r.order.is_none())
    }

    /// A millisecond: orders are obeyed once no kernel waits for a rank that is away, restores arrive, the gate asks.
    fn step(&mut self) {
        let now = self.now.0 / 1_000_000;
        for n in 0..self.ranks.len() {
            let client = ClientId(n as u64);
            // A kernel ends only if no rank is away since an earlier pause: those of one pause stop at the same place.
            let round = self.round;
            let waits = self.ranks.iter().any(|r| r.away && r.left_in != round);
            let rank = &mut self.ranks[n];
            if let Some(order) = rank.order {
                if waits && !rank.away {
                    continue;
                }
                rank.order = None;
                let copied = if rank.away { Bytes::ZERO } else { gib(10) };
                rank.away = true;
                rank.arrives = None;
                rank.left_in = round;
                self.tell(Event::ReclaimProgress {
                    client,
                    order,
                    bytes: gib(10),
                });
                self.tell(Event::ReclaimDone {
                    client,
                    order,
                    outcome: Outcome::Done,
                    copied,
                    nanos: 200_000_000,
                });
            } else if rank.away && rank.arrives == Some(now) {
                rank.away = false;
                rank.arrives = None;
                self.tell(Event::Restored {
                    client,
                    copied: gib(10),
                    nanos: self.copy * 1_000_000,
                });
            } else if rank.away && rank.arrives.is_none() && rank.ask.is_none() && !rank.quiet {
                rank.asks += 1;
                let ask = AskId(rank.asks);
                rank.ask = Some(ask);
                self.tell(Event::Ask {
                    client,
                    ask,
                    kind: AskKind::Restore,
                    bytes: gib(10),
                    long: true,
                });
            } else if !rank.away && now.is_multiple_of(50) {
                self.tell(Event::Touched { client });
            }
        }
        if self.together() {
            self.together += MS;
        }
        let end = self.now.after(MS);
        while let Some(next) = self.arbiter.next_deadline().filter(|t| *t <= end) {
            self.now = next;
            self.tell(Event::Tick);
        }
        self.now = end;
    }

    fn away(&self) -> usize {
        self.ranks.iter().filter(|r| r.away).count()
    }

    fn pass(&mut self, ms: u64) {
        (0..ms).for_each(|_| self.step());
    }

    /// Until the pause is complete; how many milliseconds that took.
    fn until_paused(&mut self, most: u64) -> u64 {
        for ms in 0..most {
            if self.done.take().is_some() {
                return ms;
            }
            self.step();
        }
        panic!("not paused within {most} ms: {:#?}", self.arbiter.snapshot());
    }

    fn pause(&mut self) {
        self.done = None;
        self.round += 1;
        self.tell(Event::Pause { task: TASK });
    }

    fn resume(&mut self) {
        self.tell(Event::Resume { task: TASK });
    }
}

#[test]
fn a_pause_that_finds_nothing_owed_acts_at_once() {
    let mut w = Ranks::new(2, 300);
    w.pass(500);
    w.pause();
    assert!(w.until_paused(10) <= 2);
}

#[test]
fn a_resume_owes_the_restore_and_a_turn_however_soon_the_next_pause_comes() {
    for ranks in [1, 2, 4] {
        for gap in [0, 1, 20, 299, 350] {
            let mut w = Ranks::new(ranks, 300);
            w.pass(100);
            w.pause();
            w.until_paused(1000);
            for round in 1..=20u32 {
                w.pass(5);
                let before = w.together;
                w.resume();
                w.pass(gap);
                w.pause();
                w.until_paused(3000);
                assert!(
                    w.together - before >= TURN,
                    "{ranks} ranks, pauses {gap} ms after resumes, round {round}: {:?}",
                    w.together - before
                );
            }
        }
    }
}

#[test]
fn ranks_that_left_together_come_back_together() {
    let mut w = Ranks::new(3, 100);
    w.pass(100);
    w.pause();
    w.until_paused(1000);
    // Two of them do nothing by themselves: they were sent into the kernel long ago.
    w.ranks[1].quiet = true;
    w.ranks[2].quiet = true;
    w.ranks.iter_mut().skip(1).for_each(|r| r.ask = None);
    w.pass(10);
    w.resume();
    w.pass(1);
    let asked = w.fetched;
    w.pass(110);
    assert!(w.together(), "{:?}", w.ranks);
    assert!(asked <= 2);
}

#[test]
fn a_restore_that_never_arrives_does_not_put_off_a_pause_for_good() {
    let mut w = Ranks::new(1, u64::from(u32::MAX));
    w.pass(100);
    w.pause();
    w.until_paused(1000);
    w.pass(5);
    w.resume();
    w.pass(20);
    w.pause();
    let took = w.until_paused(20_000);
    assert!((5_000..7_000).contains(&took), "{took} ms");
}

#[test]
fn a_pause_that_was_put_off_can_be_taken_back() {
    let mut w = Ranks::new(1, 300);
    w.pass(100);
    w.pause();
    w.until_paused(1000);
    w.pass(5);
    w.resume();
    w.pass(10);
    w.pause();
    w.resume();
    w.pass(2000);
    assert_eq!(w.away(), 0);
}

#[test]
fn who_does_not_want_its_memory_back_is_paused_when_it_had_time_to_ask() {
    let mut w = Ranks::new(1, 300);
    w.pass(100);
    w.ranks[0].quiet = true;
    w.pause();
    w.until_paused(1000);
    w.resume();
    w.pass(20);
    w.pause();
    let took = w.until_paused(200);
    assert!((78..=82).contains(&took), "{took} ms");
}

#[test]
fn a_turn_follows_every_restore_even_before_a_request() {
    let mut d = Desk::new(100);
    d.job(1, request(60), 60);
    d.pass(2 * SECOND);
    d.job(2, spec(), 40);
    let more = d.alloc(2, 60);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 60);
    assert_eq!(d.granted(2, more), gib(60));
    let back = d.restore(1, 60);
    let (order, ..) = d.order_to(2);
    d.obey(2, order, 60);
    assert_eq!(d.granted(1, back), gib(60));
    d.restored(1, 60);
    d.pass(2 * SECOND);
    // It idles, the other comes back, and the owner of the request wants it in the same moment.
    let again = d.restore(2, 60);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 60);
    assert_eq!(d.granted(2, again), gib(60));
    d.restored(2, 60);
    let mine = d.restore(1, 60);
    assert!(d.orders().is_empty(), "it is let have its turn: {:?}", d.last);
    d.pass(TURN);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(60));
    d.obey(2, order, 60);
    assert_eq!(d.granted(1, mine), gib(60));
}
