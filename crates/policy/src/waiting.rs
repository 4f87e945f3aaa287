//! [`Wait`]: what a client waits for, as numbers that add up.

use ebb_units::{Bytes, ClientId};

use crate::Arbiter;
use crate::action::DenyReason;
use crate::rank::LOOKED_AT;
use crate::time::Time;

/// What a client waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Since when.
    pub since: Time,
    /// What it is served with next.
    pub needs: Bytes,
    /// What of its memory is away besides, and will be needed with that.
    pub later: Bytes,
    /// Free on the device.
    pub free: Bytes,
    /// What others were told to give back, and have not yet.
    pub coming: Bytes,
    /// What its task may still have under its limit, if that is less than it needs.
    pub limit_room: Option<Bytes>,
    /// Its place among those who wait there, from 1; more than 64 are not counted.
    pub place: usize,
    /// Room is gathered for it at present.
    pub gathering: bool,
    /// Room is gathered for that one before.
    pub behind: Option<ClientId>,
    /// Whose turn has to end for it, and when that may be if nothing else happens.
    pub turn: Option<(ClientId, Time)>,
    /// Why it cannot be served at all as things are.
    pub stuck: Option<Stuck>,
}

/// Why somebody who waits cannot be served as things are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// Its task's limit is below what it is to get back.
    Limit(DenyReason),
    /// Others use what they requested: no more than this is left for it, whatever is evicted.
    Requested {
        /// What it could have.
        usable: Bytes,
    },
    /// Others wait as well and are busy until they are served: without what they hold no more than this is left for it.
    Stalled {
        /// What it could have.
        usable: Bytes,
    },
}

impl Wait {
    /// What is missing when all that is free and all that is coming is its own.
    #[must_use]
    pub fn short(&self) -> Bytes {
        self.needs
            .saturating_add(self.later)
            .saturating_sub(self.free)
            .saturating_sub(self.coming)
    }
}

impl Arbiter {
    /// What a client waits for; `None` if it does not wait.
    #[must_use]
    pub fn waiting(&self, id: ClientId) -> Option<Wait> {
        let c = self.clients.get(&id)?;
        let d = self.device_of(c);
        let me = self.candidate(&c.linked.rank?);
        let place = d
            .index
            .rank
            .iter()
            .take(LOOKED_AT)
            .position(|key| key.client == id);
        let all = me.need.saturating_add(me.later);
        let room = self.limit_room(c.task, c.device);
        let over = self.restore_over_limit(c).filter(|_| c.wants_back());
        let stuck = over.map(Stuck::Limit).or_else(|| {
            (!self.possible(&me)).then(|| Stuck::Requested {
                usable: self.usable(id),
            })
        });
        let stuck = stuck.or_else(|| {
            (!self.possible_now(&me)).then(|| Stuck::Stalled {
                usable: self.usable_now(id),
            })
        });
        let gathering = d.gathering == Some(id);
        let holders = self.holders(c.device);
        let turns = holders
            .iter()
            .filter(|h| !h.suspended && h.id != id && !gathering && stuck.is_none())
            .filter_map(|h| Some((self.next_turn(c.device, std::slice::from_ref(h), &[me])?, h.id)));
        Some(Wait {
            since: c.waits_since().unwrap_or(self.now),
            needs: me.need,
            later: me.later,
            free: d.free(),
            coming: d.sums.ordered,
            limit_room: (room < all).then_some(room),
            place: place.map_or(LOOKED_AT + 1, |at| at + 1),
            gathering,
            behind: d.gathering.filter(|g| *g != id),
            turn: turns.min().map(|(at, client)| (client, at)),
            stuck,
        })
    }
}

#[cfg(test)]
mod tests {
    use ebb_units::{DeviceId, TaskId};

    use super::*;
    use crate::{AskId, AskKind, Event, PolicyConfig, TaskSpec};

    #[test]
    fn the_numbers_of_a_wait_add_up() {
        let mut arbiter = Arbiter::new(PolicyConfig::default());
        let device = DeviceId(0);
        let mut events = vec![Event::Device {
            device,
            capacity: Bytes::gib(100),
            unmanaged: Bytes::ZERO,
        }];
        for n in 1..=2 {
            events.push(Event::TaskAdded {
                task: TaskId(n),
                spec: TaskSpec::default(),
                devices: vec![],
                adopt: false,
            });
            events.push(Event::ClientJoined {
                client: ClientId(n),
                task: TaskId(n),
                device,
                lease: Bytes::ZERO,
                evicted: Bytes::ZERO,
                overhead: Bytes::ZERO,
            });
            events.push(Event::Ask {
                client: ClientId(n),
                ask: AskId(1),
                kind: AskKind::Alloc,
                bytes: Bytes::gib(75),
                long: true,
            });
        }
        for event in &events {
            arbiter.handle(Time::from_millis(1), event);
        }
        assert_eq!(arbiter.waiting(ClientId(1)), None);
        let wait = arbiter.waiting(ClientId(2)).unwrap();
        assert_eq!(
            (wait.needs, wait.free, wait.coming, wait.short(), wait.place),
            (Bytes::gib(75), Bytes::gib(25), Bytes::ZERO, Bytes::gib(50), 1)
        );
        let (holder, at) = wait.turn.unwrap();
        assert_eq!(holder, ClientId(1));
        assert!(at > Time::from_millis(1000), "{at:?}");
        assert_eq!(wait.stuck, None);
    }
}
