//! Giving memory back: what the arbiter orders, and what leaves for another card.

use std::time::Duration;

use ebb_policy::{Depth, Event, Outcome};
use ebb_units::{Bytes, OrderId};

use super::link::Direction;
use super::{CHUNK, Fleet, Notice, Who, id};

/// An order being carried out.
#[derive(Debug)]
pub(super) struct Order {
    id: OrderId,
    left: Bytes,
    depth: Depth,
    copied: Bytes,
    time: Duration,
    /// A chunk is on its way out.
    leaving: bool,
    cancelled: bool,
}

impl Fleet {
    pub(super) fn ordered(&mut self, who: usize, order: OrderId, bytes: Bytes, depth: Depth) {
        let c = &mut self.clients[who];
        if c.draining {
            // It leaves with all that it has anyway.
            return;
        }
        c.order = Some(Order {
            id: order,
            left: bytes,
            depth,
            copied: Bytes::ZERO,
            time: Duration::ZERO,
            leaving: false,
            cancelled: false,
        });
        self.step_order(who);
    }

    pub(super) fn cancelled(&mut self, who: usize, order: OrderId) {
        if let Some(o) = self.clients[who].order.as_mut().filter(|o| o.id == order) {
            o.cancelled = true;
            self.step_order(who);
        }
    }

    /// The next step of the order: unused lease at once, then a chunk.
    pub(super) fn step_order(&mut self, who: usize) {
        let c = &mut self.clients[who];
        let (spare, live) = (c.spare(), c.live);
        let coming = !c.coming.is_zero();
        let Some(o) = c.order.as_mut() else { return };
        if o.leaving {
            return;
        }
        let take = if o.cancelled {
            Bytes::ZERO
        } else {
            o.left.min(spare)
        };
        o.left = o.left.saturating_sub(take);
        let order = o.id;
        let evict = !o.cancelled && o.depth == Depth::Evict && !o.left.is_zero() && !live.is_zero();
        let wait = !o.cancelled && o.depth == Depth::Evict && !o.left.is_zero() && coming;
        c.lease = c.lease.saturating_sub(take);
        let card = c.card;
        if !take.is_zero() {
            let node = self.node(card);
            self.tell(
                node,
                Event::ReclaimProgress {
                    client: id(who),
                    order,
                    bytes: take,
                },
            );
        }
        if evict {
            let c = &mut self.clients[who];
            if let Some(o) = &mut c.order {
                o.leaving = true;
            }
            let left = c.order.as_ref().map_or(Bytes::ZERO, |o| o.left);
            if std::mem::take(&mut c.ready) {
                self.notices.push_back(Notice::Stopped(Who(who)));
            }
            self.send(who, Direction::Out, left.min(live).min(CHUNK));
        } else if !wait {
            self.order_done(who);
        }
    }

    fn order_done(&mut self, who: usize) {
        let Some(o) = self.clients[who].order.take() else {
            return;
        };
        self.account(who);
        let node = self.node(self.clients[who].card);
        self.tell(
            node,
            Event::ReclaimDone {
                client: id(who),
                order: o.id,
                outcome: Outcome::Done,
                copied: o.copied,
                nanos: u64::try_from(o.time.as_nanos()).unwrap_or(u64::MAX),
            },
        );
        self.kick(who);
    }

    pub(super) fn copied_out(&mut self, who: usize, bytes: Bytes, time: Duration) {
        let c = &mut self.clients[who];
        let bytes = bytes.min(c.live);
        c.live = c.live.saturating_sub(bytes);
        c.evicted += bytes;
        c.lease = c.lease.saturating_sub(bytes);
        if c.draining {
            return self.drained(who, bytes);
        }
        let Some(o) = c.order.as_mut() else { return };
        o.leaving = false;
        o.copied += bytes;
        o.time += time;
        o.left = o.left.saturating_sub(bytes);
        let order = o.id;
        let node = self.node(self.clients[who].card);
        self.tell(
            node,
            Event::ReclaimProgress {
                client: id(who),
                order,
                bytes,
            },
        );
        self.step_order(who);
    }

    /// Sends the next chunk of a client that moved away.
    pub(super) fn drain(&mut self, who: usize) {
        let c = &self.clients[who];
        let leaving = c.order.as_ref().is_some_and(|o| o.leaving);
        if !leaving && !c.live.is_zero() {
            let bytes = c.live.min(CHUNK);
            self.send(who, Direction::Out, bytes);
        }
    }

    fn drained(&mut self, who: usize, bytes: Bytes) {
        if let Some(o) = self.clients[who].order.as_mut() {
            o.leaving = false;
        }
        let node = self.node(self.clients[who].card);
        self.tell(
            node,
            Event::Returned {
                client: id(who),
                bytes,
            },
        );
        let new = self.clients[who].heir.filter(|new| !self.clients[*new].gone);
        if self.clients[who].live.is_zero() {
            if let Some(new) = new {
                self.clients[new].source = None;
            }
            self.left(who);
        } else {
            self.drain(who);
        }
        if let Some(new) = new {
            self.kick(new);
        }
    }
}
