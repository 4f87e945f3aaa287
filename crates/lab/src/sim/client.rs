//! What a client does: allocate, bring its bytes back, run.

use std::time::Duration;

use ebb_policy::{AskId, AskKind, Event, TaskSpec, Time, Usage};
use ebb_units::{Bytes, TaskId};

use super::link::Direction;
use super::orders::Order;
use super::{CHUNK, Fleet, Notice, Who, id};

/// One process on one card.
///
/// ```text
///            busy                    all bytes there            ordered to give back
///   idle ──────────▶ bringing back ───────────────────▶ running ─────────────────────▶ giving back ─┐
///    ▲                    ▲ allocating                     │ idle                                   │ busy still
///    └────────────────────┴────────────────────────────────┘                 ▲──────────────────────┘
/// ```
#[derive(Debug)]
pub(super) struct Client {
    pub(super) card: usize,
    pub(super) task: TaskId,
    pub(super) spec: TaskSpec,
    pub(super) lease: Bytes,
    /// On the card.
    pub(super) live: Bytes,
    /// In host memory.
    pub(super) evicted: Bytes,
    /// Of these, on their way in.
    pub(super) coming: Bytes,
    /// What it wants to have in all.
    pub(super) target: Bytes,
    pub(super) busy: bool,
    /// Has all its bytes and runs.
    pub(super) ready: bool,
    pub(super) paused: bool,
    pub(super) gone: bool,
    /// It moved to another card: its bytes leave for there.
    pub(super) draining: bool,
    /// The client that it was, on another card, while bytes of it are still there.
    pub(super) source: Option<usize>,
    /// The client that it became on another card.
    pub(super) heir: Option<usize>,
    /// Its host copy is in another node.
    pub(super) over_net: bool,
    pub(super) order: Option<Order>,
    asks: Vec<(AskId, AskKind, Bytes)>,
    next_ask: u64,
    /// Brought back since the last `Restored`, and for how long.
    brought: (Bytes, Duration),
    pub(super) touched: Option<Time>,
    pub(super) accounted: Option<Usage>,
}

impl Client {
    pub(super) fn new(card: usize, task: TaskId, spec: TaskSpec, evicted: Bytes) -> Self {
        Self {
            card,
            task,
            spec,
            lease: Bytes::ZERO,
            live: Bytes::ZERO,
            evicted,
            coming: Bytes::ZERO,
            target: evicted,
            busy: false,
            ready: false,
            paused: false,
            gone: false,
            draining: false,
            source: None,
            heir: None,
            over_net: false,
            order: None,
            asks: Vec::new(),
            next_ask: 0,
            brought: (Bytes::ZERO, Duration::ZERO),
            touched: None,
            accounted: None,
        }
    }

    /// Lease with nothing behind it, and nothing on its way into it.
    pub(super) fn spare(&self) -> Bytes {
        self.lease.saturating_sub(self.live).saturating_sub(self.coming)
    }

    /// What it had asked for is not needed any more.
    pub(super) fn take_back_asks(&mut self) -> Vec<AskId> {
        std::mem::take(&mut self.asks).into_iter().map(|a| a.0).collect()
    }

    fn asked(&self, kind: AskKind) -> Bytes {
        self.asks.iter().filter(|a| a.1 == kind).map(|a| a.2).sum()
    }
}

impl Fleet {
    /// Does the next thing that the client can do.
    pub(super) fn kick(&mut self, who: usize) {
        let c = &self.clients[who];
        if c.gone || c.draining || c.order.is_some() {
            return;
        }
        self.shrink(who);
        let c = &self.clients[who];
        if !c.busy {
            return;
        }
        if !c.evicted.is_zero() {
            self.bring_back(who);
        } else if c.live < c.target {
            self.allocate(who);
        } else if !c.ready {
            self.clients[who].ready = true;
            self.clients[who].touched = None;
            self.notices.push_back(Notice::Ready(Who(who)));
        }
        self.account(who);
    }

    /// Frees what is more than wanted: first what is on the card.
    fn shrink(&mut self, who: usize) {
        let c = &mut self.clients[who];
        let over = (c.live + c.evicted).saturating_sub(c.target);
        let here = over.min(c.live);
        if !here.is_zero() {
            c.live = c.live.saturating_sub(here);
            c.lease = c.lease.saturating_sub(here);
            let node = self.node(self.clients[who].card);
            self.tell(
                node,
                Event::Returned {
                    client: id(who),
                    bytes: here,
                },
            );
        }
        let c = &mut self.clients[who];
        let away = over.saturating_sub(here).min(c.evicted.saturating_sub(c.coming));
        if !away.is_zero() && c.source.is_none() {
            c.evicted = c.evicted.saturating_sub(away);
        }
        self.account(who);
    }

    fn bring_back(&mut self, who: usize) {
        let c = &self.clients[who];
        let missing = c
            .evicted
            .saturating_sub(c.coming)
            .saturating_sub(c.spare())
            .saturating_sub(c.asked(AskKind::Restore));
        if !missing.is_zero() {
            self.ask(who, AskKind::Restore, missing);
        }
        // What has not left the old card yet cannot come.
        let still_there = c_source_live(self, who);
        let c = &self.clients[who];
        let ahead = c.evicted.saturating_sub(c.coming).saturating_sub(still_there);
        let bytes = c.spare().min(ahead).min(CHUNK);
        if c.coming.is_zero() && !bytes.is_zero() {
            self.clients[who].coming = bytes;
            self.send(who, Direction::Back, bytes);
        }
    }

    fn allocate(&mut self, who: usize) {
        let c = &mut self.clients[who];
        let need = c.target.saturating_sub(c.live);
        if c.spare() >= need {
            c.live = c.target;
            self.kick(who);
        } else if c.asks.is_empty() {
            let bytes = need.saturating_sub(c.spare());
            self.ask(who, AskKind::Alloc, bytes);
        }
    }

    fn ask(&mut self, who: usize, kind: AskKind, bytes: Bytes) {
        let c = &mut self.clients[who];
        c.next_ask += 1;
        let ask = AskId(c.next_ask);
        c.asks.push((ask, kind, bytes));
        let node = c.card / self.shape.per_node;
        self.tell(
            node,
            Event::Ask {
                client: id(who),
                ask,
                kind,
                bytes,
                long: true,
            },
        );
    }

    pub(super) fn granted(&mut self, who: usize, ask: AskId, bytes: Bytes, complete: bool) {
        let c = &mut self.clients[who];
        c.lease += bytes;
        for open in c.asks.iter_mut().filter(|a| a.0 == ask) {
            open.2 = open.2.saturating_sub(bytes);
        }
        if complete {
            c.asks.retain(|a| a.0 != ask);
        }
        self.kick(who);
    }

    pub(super) fn denied(&mut self, who: usize, ask: AskId, last: bool) {
        self.clients[who].asks.retain(|a| a.0 != ask);
        if last {
            self.notices.push_back(Notice::Refused(Who(who)));
        } else {
            self.kick(who);
        }
    }

    pub(super) fn copied_in(&mut self, who: usize, bytes: Bytes, time: Duration) {
        let c = &mut self.clients[who];
        c.coming = c.coming.saturating_sub(bytes);
        c.live += bytes;
        c.evicted = c.evicted.saturating_sub(bytes);
        c.brought.0 += bytes;
        c.brought.1 += time;
        if c.evicted.is_zero() {
            let (copied, took) = std::mem::take(&mut c.brought);
            c.over_net = false;
            c.touched = Some(self.now);
            let node = self.node(self.clients[who].card);
            self.account(who);
            self.tell(
                node,
                Event::Restored {
                    client: id(who),
                    copied,
                    nanos: u64::try_from(took.as_nanos()).unwrap_or(u64::MAX),
                },
            );
        }
        if self.clients[who].order.is_some() {
            self.step_order(who);
        } else {
            self.kick(who);
        }
    }
}

/// Bytes of a client that are still on the card that it came from.
fn c_source_live(fleet: &Fleet, who: usize) -> Bytes {
    fleet.clients[who]
        .source
        .map_or(Bytes::ZERO, |source| fleet.clients[source].live)
}
