//! [`Fleet`]: cards, their links and the arbiters of their nodes, in simulated time.
//!
//! ```text
//!  scenario ── join, want, busy, idle, pause, relocate ──▶ Fleet ──▶ events ──▶ ebb_policy::Arbiter, one a node
//!           ◀── Ready, Stopped, Away, Timer ──────────────   │  ◀── grants, orders ──┘
//!                                                            └─ chunks over each card's link, both ways
//! ```
//! The arbiter is the daemon's own. What is modelled is the rest: a client copies in chunks over its card's link, which is
//! slower each way while both ways are in use; a client that is ordered to give back stops, gives unused lease at once and
//! copies the rest out; its bytes come back when it is busy again and the arbiter grants them.

mod client;
mod link;
mod orders;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use ebb_policy::{Action, Arbiter, Event, PolicyConfig, TaskSpec, Time, Usage};
use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use client::Client;
pub use link::Speeds;
use link::{Direction, Lane};

/// A client of the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Who(pub usize);

/// Something that a scenario hears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The time that it asked to be told of.
    Timer(u64),
    /// A busy client has all its bytes and runs.
    Ready(Who),
    /// A running client was stopped: its memory is taken.
    Stopped(Who),
    /// All of a paused client's bytes are in host memory.
    Away(Who),
    /// A client asks for what can never fit.
    Refused(Who),
}

/// What the fleet is made of.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Cards in all.
    pub cards: usize,
    /// Cards of a node: they share an arbiter, and host memory.
    pub per_node: usize,
    /// Bytes of a card.
    pub card: Bytes,
    /// How fast bytes move.
    pub speeds: Speeds,
    /// What the arbiters decide by.
    pub policy: PolicyConfig,
}

/// The most bytes that move in one go.
const CHUNK: Bytes = Bytes::gib(1);

#[derive(Debug)]
struct Node {
    arbiter: Arbiter,
    members: Vec<usize>,
    /// The deadline for which a tick is in the queue.
    tick: Option<Time>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Timer(u64),
    Tick(usize),
    Chunk(usize, Direction),
}

/// See the module.
#[derive(Debug)]
pub struct Fleet {
    shape: Shape,
    now: Time,
    due: BinaryHeap<Reverse<(Time, u64, Due)>>,
    order_of_due: u64,
    nodes: Vec<Node>,
    /// Both ways of every card's link: out, back.
    lanes: Vec<[Lane; 2]>,
    clients: Vec<Client>,
    tasks: u64,
    told: VecDeque<(usize, Event)>,
    notices: VecDeque<Notice>,
    moved: [Bytes; 2],
    events: u64,
}

impl Fleet {
    /// A fleet with nobody on it.
    #[must_use]
    pub fn new(shape: Shape) -> Self {
        let per_node = shape.per_node.max(1);
        let nodes = (0..shape.cards.div_ceil(per_node))
            .map(|_| Node {
                arbiter: Arbiter::new(shape.policy.clone()),
                members: Vec::new(),
                tick: None,
            })
            .collect();
        let mut fleet = Self {
            now: Time(0),
            due: BinaryHeap::new(),
            order_of_due: 0,
            nodes,
            lanes: (0..shape.cards)
                .map(|_| [Lane::default(), Lane::default()])
                .collect(),
            clients: Vec::new(),
            tasks: 0,
            told: VecDeque::new(),
            notices: VecDeque::new(),
            moved: [Bytes::ZERO; 2],
            events: 0,
            shape: Shape { per_node, ..shape },
        };
        for card in 0..fleet.shape.cards {
            fleet.tell(
                card / per_node,
                Event::Device {
                    device: device(card),
                    capacity: fleet.shape.card,
                    unmanaged: Bytes::ZERO,
                },
            );
        }
        fleet.settle();
        fleet
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// What it is made of.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Bytes moved so far: out, back.
    #[must_use]
    pub fn moved(&self) -> [Bytes; 2] {
        self.moved
    }

    /// Events that the arbiters handled.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// The card that a client is on.
    #[must_use]
    pub fn card_of(&self, who: Who) -> usize {
        self.clients[who.0].card
    }

    /// Bytes of a client on its card, and in host memory.
    #[must_use]
    pub fn bytes_of(&self, who: Who) -> (Bytes, Bytes) {
        let c = &self.clients[who.0];
        (c.live, c.evicted)
    }

    /// Granted on a card.
    #[must_use]
    pub fn granted_on(&self, card: usize) -> Bytes {
        let free = self.nodes[card / self.shape.per_node]
            .arbiter
            .free_on(device(card))
            .unwrap_or(self.shape.card);
        self.shape.card.saturating_sub(free)
    }

    /// Tells [`Notice::Timer`] at a time.
    pub fn timer(&mut self, at: Time, token: u64) {
        self.push(at, Due::Timer(token));
    }

    /// A task that the arbiter of a card's node hears of.
    fn add_task(&mut self, card: usize, spec: &TaskSpec) -> TaskId {
        self.tasks += 1;
        let task = TaskId(self.tasks);
        let added = Event::TaskAdded {
            task,
            spec: spec.clone(),
            devices: Vec::new(),
            adopt: false,
        };
        self.tell(self.node(card), added);
        task
    }

    /// A new task with one client, whose bytes are in host memory.
    pub fn join(&mut self, card: usize, spec: TaskSpec, evicted: Bytes) -> Who {
        let task = self.add_task(card, &spec);
        let who = self.joined(card, task, spec, evicted);
        self.settle();
        who
    }

    fn joined(&mut self, card: usize, task: TaskId, spec: TaskSpec, evicted: Bytes) -> Who {
        let who = self.clients.len();
        self.clients.push(Client::new(card, task, spec, evicted));
        let node = self.node(card);
        self.nodes[node].members.push(who);
        self.tell(
            node,
            Event::ClientJoined {
                client: id(who),
                task,
                device: device(card),
                lease: Bytes::ZERO,
                evicted,
                overhead: Bytes::ZERO,
            },
        );
        Who(who)
    }

    /// The client ends, and its task.
    pub fn leave(&mut self, who: Who) {
        self.left(who.0);
        self.settle();
    }

    fn left(&mut self, who: usize) {
        if self.clients[who].gone {
            return;
        }
        self.clients[who].gone = true;
        let node = self.node(self.clients[who].card);
        self.nodes[node].members.retain(|m| *m != who);
        self.tell(
            node,
            Event::ClientLeft {
                client: id(who),
                kept: Bytes::ZERO,
            },
        );
        let task = self.clients[who].task;
        self.tell(node, Event::TaskRemoved { task });
    }

    /// The client moves to another card of the fleet and keeps its bytes: what is on the old card is copied out of it while it
    /// is copied into the new one.
    pub fn relocate(&mut self, who: Who, card: usize) -> Who {
        let old = &mut self.clients[who.0];
        let (spec, target, busy) = (old.spec.clone(), old.target, old.busy);
        let (live, all) = (old.live, old.live + old.evicted);
        old.busy = false;
        let from = old.card;
        let task = self.add_task(card, &spec);
        let node = self.node(card);
        let new = self.joined(card, task, spec, all);
        let slower = self.node(from) != node;
        let c = &mut self.clients[new.0];
        c.target = target;
        c.over_net = slower;
        if live.is_zero() {
            self.left(who.0);
        } else {
            c.source = Some(who.0);
            self.clients[who.0].draining = true;
            self.clients[who.0].heir = Some(new.0);
            self.drain(who.0);
        }
        self.settle();
        if busy {
            self.busy(new);
        }
        new
    }

    /// How many bytes the client wants in all. What is more than now is allocated when it is busy; what is less is freed.
    pub fn want(&mut self, who: Who, bytes: Bytes) {
        self.clients[who.0].target = bytes;
        self.kick(who.0);
        self.settle();
    }

    /// As [`Self::want`], but the client does not run before it has more: [`Notice::Ready`] comes again then. Whether it has to
    /// wait.
    pub fn need(&mut self, who: Who, bytes: Bytes) -> bool {
        let c = &mut self.clients[who.0];
        let waits = c.busy && (!c.ready || bytes > c.live);
        if waits {
            c.ready = false;
        }
        self.want(who, bytes);
        waits
    }

    /// The client uses the GPU from now on. [`Notice::Ready`] comes when it has its bytes.
    pub fn busy(&mut self, who: Who) {
        let c = &mut self.clients[who.0];
        if !c.busy {
            c.busy = true;
            c.ready = false;
            c.touched = None;
        }
        self.kick(who.0);
        self.settle();
    }

    /// The client does not use the GPU from now on.
    pub fn idle(&mut self, who: Who) {
        let c = &mut self.clients[who.0];
        c.busy = false;
        c.ready = false;
        let node = c.card / self.shape.per_node;
        for ask in c.take_back_asks() {
            self.tell(
                node,
                Event::AskCancelled {
                    client: id(who.0),
                    ask,
                },
            );
        }
        self.settle();
    }

    /// Its task's memory is to leave the card. [`Notice::Away`] comes when it has.
    pub fn pause(&mut self, who: Who) {
        let c = &mut self.clients[who.0];
        if !c.paused {
            c.paused = true;
            let (node, task) = (c.card / self.shape.per_node, c.task);
            self.tell(node, Event::Pause { task });
        }
        self.settle();
    }

    /// Its task may have memory again.
    pub fn resume(&mut self, who: Who) {
        let c = &mut self.clients[who.0];
        if c.paused {
            c.paused = false;
            let (node, task) = (c.card / self.shape.per_node, c.task);
            self.tell(node, Event::Resume { task });
        }
        self.settle();
    }

    /// What happens next: the time goes on until there is something to tell. `None`: nothing will ever happen.
    pub fn step(&mut self) -> Option<Notice> {
        loop {
            if let Some(notice) = self.notices.pop_front() {
                return Some(notice);
            }
            let Reverse((at, _, due)) = self.due.pop()?;
            self.now = self.now.max(at);
            match due {
                Due::Timer(token) => return Some(Notice::Timer(token)),
                Due::Tick(node) => {
                    if self.nodes[node].tick == Some(at) {
                        self.nodes[node].tick = None;
                        self.tell(node, Event::Tick);
                    }
                }
                Due::Chunk(card, direction) => self.chunk_done(card, direction),
            }
            self.settle();
        }
    }

    fn node(&self, card: usize) -> usize {
        card / self.shape.per_node
    }

    fn push(&mut self, at: Time, due: Due) {
        self.order_of_due += 1;
        self.due.push(Reverse((at, self.order_of_due, due)));
    }

    fn tell(&mut self, node: usize, event: Event) {
        self.told.push_back((node, event));
    }

    /// Hands all events to the arbiters and carries out what they order, until nothing is left to say.
    fn settle(&mut self) {
        let mut told_any = Vec::new();
        while let Some((node, event)) = self.told.pop_front() {
            self.touch(node);
            self.handle(node, &event);
            if !told_any.contains(&node) {
                told_any.push(node);
            }
        }
        for node in told_any {
            let next = self.nodes[node].arbiter.next_deadline();
            if next != self.nodes[node].tick {
                self.nodes[node].tick = next;
                if let Some(at) = next {
                    self.push(at, Due::Tick(node));
                }
            }
        }
    }

    fn handle(&mut self, node: usize, event: &Event) {
        self.events += 1;
        let actions = self.nodes[node].arbiter.handle(self.now, event);
        for action in actions {
            self.obey(node, &action);
        }
    }

    /// The arbiter hears of clients that use the GPU, as it does from the library: now and then.
    fn touch(&mut self, node: usize) {
        let every = self.shape.policy.idle_after.mul_f64(0.8);
        for n in 0..self.nodes[node].members.len() {
            let who = self.nodes[node].members[n];
            let c = &mut self.clients[who];
            if c.busy && c.ready && c.touched.is_none_or(|t| self.now.since(t) >= every) {
                c.touched = Some(self.now);
                self.handle(node, &Event::Touched { client: id(who) });
            }
        }
    }

    fn obey(&mut self, node: usize, action: &Action) {
        let of = |client: ClientId| client.0 as usize;
        match *action {
            Action::Grant {
                client,
                ask,
                bytes,
                complete,
            } => self.granted(of(client), ask, bytes, complete),
            Action::Deny {
                client, ask, last, ..
            } => self.denied(of(client), ask, last),
            Action::Reclaim {
                client,
                order,
                bytes,
                depth,
                ..
            } => {
                self.ordered(of(client), order, bytes, depth);
            }
            Action::CancelReclaim { client, order } => self.cancelled(of(client), order),
            Action::PauseDone { task, .. } => {
                let gone = self.nodes[node]
                    .members
                    .iter()
                    .copied()
                    .find(|m| self.clients[*m].task == task);
                if let Some(who) = gone {
                    self.notices.push_back(Notice::Away(Who(who)));
                }
            }
            _ => {}
        }
    }

    /// Tells the arbiter what a client has.
    fn account(&mut self, who: usize) {
        let c = &self.clients[who];
        if c.gone {
            return;
        }
        let usage = Usage {
            resident: c.live,
            cached: Bytes::ZERO,
            evicted: c.evicted,
            pinned: Bytes::ZERO,
            ..Usage::default()
        };
        if c.accounted != Some(usage) {
            let node = self.node(c.card);
            self.clients[who].accounted = Some(usage);
            self.tell(
                node,
                Event::Usage {
                    client: id(who),
                    usage,
                },
            );
        }
    }
}

fn id(who: usize) -> ClientId {
    ClientId(who as u64)
}

fn device(card: usize) -> DeviceId {
    DeviceId(u32::try_from(card).unwrap_or(u32::MAX))
}

/// Seconds as a time of the simulation.
#[must_use]
pub fn seconds(s: f64) -> Time {
    Time((s * 1e9).round().max(0.0) as u64)
}

/// A time as seconds.
#[must_use]
pub fn in_seconds(time: Time) -> f64 {
    time.since(Time(0)).as_secs_f64()
}

/// How long so many bytes take at a rate.
fn takes(bytes: Bytes, rate: f64) -> Duration {
    Duration::from_secs_f64(bytes.0 as f64 / rate)
}
