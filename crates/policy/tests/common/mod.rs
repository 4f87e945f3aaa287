//! A hand-driven arbiter: events by short calls, answers kept for asking about them.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

pub mod world;

use std::time::Duration;

use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

pub const GPU: DeviceId = DeviceId(0);

pub fn gib(n: u64) -> Bytes {
    Bytes::gib(n)
}

pub fn config() -> PolicyConfig {
    PolicyConfig {
        out_rate: 50 << 30,
        in_rate: 50 << 30,
        turn_per_copy: 10,
        ..PolicyConfig::default()
    }
}

pub struct Desk {
    pub arbiter: Arbiter,
    pub now: Time,
    /// The answers to the last call.
    pub last: Vec<Action>,
    next_ask: u64,
}

impl Desk {
    /// One device of this many GiB.
    pub fn new(capacity: u64) -> Self {
        Self::with(config(), capacity)
    }

    pub fn with(config: PolicyConfig, capacity: u64) -> Self {
        let mut desk = Self {
            arbiter: Arbiter::new(config),
            now: Time(0),
            last: Vec::new(),
            next_ask: 0,
        };
        desk.tell(Event::Device {
            device: GPU,
            capacity: gib(capacity),
            unmanaged: Bytes::ZERO,
        });
        desk
    }

    pub fn tell(&mut self, event: Event) -> &[Action] {
        self.last = self.arbiter.handle(self.now, &event);
        if let Err(wrong) = self.arbiter.check() {
            panic!("{wrong} after {event:?} at {:?}", self.now);
        }
        &self.last
    }

    /// Lets time pass with a tick at every deadline, and keeps all answers.
    pub fn pass(&mut self, time: Duration) -> &[Action] {
        let end = self.now.after(time);
        let mut all = Vec::new();
        while let Some(next) = self.arbiter.next_deadline().filter(|t| *t <= end) {
            assert!(next > self.now, "a deadline lies ahead");
            self.now = next;
            all.extend(self.tell(Event::Tick).to_vec());
        }
        self.now = end;
        all.extend(self.tell(Event::Tick).to_vec());
        self.last = all;
        &self.last
    }

    /// Lets time pass while these clients go on using the GPU.
    pub fn pass_using(&mut self, time: Duration, clients: &[u64]) -> &[Action] {
        let end = self.now.after(time);
        let step = Duration::from_millis(100);
        let mut all = Vec::new();
        while self.now < end {
            let wait = step.min(end.since(self.now));
            for c in clients {
                all.extend(self.touch(*c).to_vec());
            }
            all.extend(self.pass(wait).to_vec());
        }
        for c in clients {
            all.extend(self.touch(*c).to_vec());
        }
        self.last = all;
        &self.last
    }

    pub fn task(&mut self, task: u64, spec: TaskSpec) -> &[Action] {
        self.tell(Event::TaskAdded {
            task: TaskId(task),
            spec,
            devices: Vec::new(),
            adopt: false,
        })
    }

    /// A task and one client of the same number, with this much lease at once.
    pub fn job(&mut self, id: u64, spec: TaskSpec, lease: u64) {
        self.task(id, spec);
        assert!(
            self.last.contains(&Action::TaskAccepted { task: TaskId(id) }),
            "{:?}",
            self.last
        );
        self.join(id, id);
        if lease > 0 {
            let ask = self.alloc(id, lease);
            assert_eq!(self.granted(id, ask), gib(lease), "{:?}", self.last);
        }
    }

    pub fn join(&mut self, client: u64, task: u64) {
        self.tell(Event::ClientJoined {
            client: ClientId(client),
            task: TaskId(task),
            device: GPU,
            lease: Bytes::ZERO,
            evicted: Bytes::ZERO,
            overhead: Bytes::ZERO,
        });
    }

    pub fn ask(&mut self, client: u64, kind: AskKind, bytes: Bytes, long: bool) -> AskId {
        self.next_ask += 1;
        let ask = AskId(self.next_ask);
        self.tell(Event::Ask {
            client: ClientId(client),
            ask,
            kind,
            bytes,
            long,
        });
        ask
    }

    pub fn alloc(&mut self, client: u64, gibs: u64) -> AskId {
        self.ask(client, AskKind::Alloc, gib(gibs), true)
    }

    pub fn restore(&mut self, client: u64, gibs: u64) -> AskId {
        self.ask(client, AskKind::Restore, gib(gibs), true)
    }

    pub fn touch(&mut self, client: u64) -> &[Action] {
        self.tell(Event::Touched {
            client: ClientId(client),
        })
    }

    pub fn progress(&mut self, client: u64, order: OrderId, gibs: u64) -> &[Action] {
        self.tell(Event::ReclaimProgress {
            client: ClientId(client),
            order,
            bytes: gib(gibs),
        })
    }

    pub fn done(&mut self, client: u64, order: OrderId, outcome: Outcome, copied: u64) -> &[Action] {
        self.tell(Event::ReclaimDone {
            client: ClientId(client),
            order,
            outcome,
            copied: gib(copied),
            nanos: copied * 20_000_000,
        })
    }

    /// Obeys an order by evicting, and keeps the answers to both steps.
    pub fn obey(&mut self, client: u64, order: OrderId, gibs: u64) -> &[Action] {
        let mut all = self.progress(client, order, gibs).to_vec();
        all.extend(self.done(client, order, Outcome::Done, gibs).to_vec());
        self.last = all;
        &self.last
    }

    pub fn restored(&mut self, client: u64, gibs: u64) -> &[Action] {
        self.tell(Event::Restored {
            client: ClientId(client),
            copied: gib(gibs),
            nanos: gibs * 20_000_000,
        })
    }

    pub fn usage(&mut self, client: u64, usage: Usage) -> &[Action] {
        self.tell(Event::Usage {
            client: ClientId(client),
            usage,
        })
    }

    /// What the last answers grant for an ask.
    pub fn granted(&self, client: u64, ask: AskId) -> Bytes {
        self.last
            .iter()
            .filter_map(|a| match a {
                Action::Grant {
                    client: c,
                    ask: k,
                    bytes,
                    ..
                } if *c == ClientId(client) && *k == ask => Some(*bytes),
                _ => None,
            })
            .sum()
    }

    /// How the last answers deny an ask.
    pub fn denied(&self, ask: AskId) -> Option<(DenyReason, bool)> {
        self.last.iter().find_map(|a| match a {
            Action::Deny {
                ask: k, reason, last, ..
            } if *k == ask => Some((*reason, *last)),
            _ => None,
        })
    }

    /// The orders among the last answers.
    pub fn orders(&self) -> Vec<(u64, OrderId, Bytes, Depth, ReclaimReason)> {
        self.last
            .iter()
            .filter_map(|a| match a {
                Action::Reclaim {
                    client,
                    order,
                    bytes,
                    depth,
                    reason,
                    ..
                } => Some((client.0, *order, *bytes, *depth, *reason)),
                _ => None,
            })
            .collect()
    }

    /// The only order among the last answers, which must be to this client.
    pub fn order_to(&self, client: u64) -> (OrderId, Bytes, Depth, ReclaimReason) {
        let orders = self.orders();
        assert_eq!(orders.len(), 1, "one order in {:?}", self.last);
        let (to, order, bytes, depth, reason) = orders[0];
        assert_eq!(to, client, "in {:?}", self.last);
        (order, bytes, depth, reason)
    }

    pub fn client(&self, client: u64) -> ClientView {
        self.arbiter
            .snapshot()
            .tasks
            .into_iter()
            .flat_map(|t| t.clients)
            .find(|c| c.client == ClientId(client))
            .expect("the client is there")
    }

    pub fn free(&self) -> Bytes {
        self.arbiter.snapshot().devices[0].free
    }
}

pub fn spec() -> TaskSpec {
    TaskSpec::default()
}

pub fn request(gibs: u64) -> TaskSpec {
    TaskSpec {
        request: gib(gibs),
        ..spec()
    }
}

pub fn limit(gibs: u64) -> TaskSpec {
    TaskSpec {
        limit: Some(gib(gibs)),
        ..spec()
    }
}

pub fn priority(priority: Priority) -> TaskSpec {
    TaskSpec { priority, ..spec() }
}

pub const SECOND: Duration = Duration::from_secs(1);
pub const MS: Duration = Duration::from_millis(1);
