//! Room on one card for bytes that left another.
//!
//! A card that has room to spare lends it to clients of other cards, for what is evicted there: the link between the cards is
//! many times as fast as the one to the host. Such room is the card's own before it is anybody's: it is lent only while nobody
//! there waits and above a margin, it counts against no request and no guarantee, and the first one there who needs it gets
//! it back before a byte is taken from any client of that card.
//!
//! ```text
//!           lent                 wanted                   left
//! free ───────────────> lodging ─────────> wanted back ──────────> free
//!  ^                       │ left            │ nothing for an order's time: late
//!  └───────────────────────┘                 └─> others are taken from meanwhile; it stays wanted
//! ```

use std::collections::BTreeMap;

use ebb_units::{Bytes, ClientId, DeviceId, GRANULE};

use crate::Arbiter;
use crate::action::{Action, Note};
use crate::rank::LOOKED_AT;
use crate::time::Time;

/// This part of a card is never lent: allocations there mostly find it without waiting for a lodger to leave.
const MARGIN: u64 = 32;

/// What one client of another card has here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lodger {
    bytes: Bytes,
    /// Of that: wanted back.
    wanted: Bytes,
    /// When it was wanted, or last gave something back.
    since: Time,
    /// It did not give anything back for too long: nobody counts on it.
    late: bool,
}

/// Whose evicted bytes lie on a card that is not theirs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lodgers {
    all: BTreeMap<ClientId, Lodger>,
    bytes: Bytes,
    coming: Bytes,
}

impl Lodgers {
    /// All that lies here.
    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// What is wanted back and will be soon.
    pub(crate) fn coming(&self) -> Bytes {
        self.coming
    }

    /// When the first of those that are to give something back is late.
    pub(crate) fn next_late(&self, patience: core::time::Duration) -> Option<Time> {
        let waited_for = self.all.values().filter(|l| !l.late && !l.wanted.is_zero());
        waited_for.map(|l| l.since.after(patience)).min()
    }

    fn wanted(&self) -> Bytes {
        self.all.values().map(|l| l.wanted).sum()
    }

    fn add_up(&mut self) {
        self.all.retain(|_, l| !l.bytes.is_zero());
        for l in self.all.values_mut() {
            l.wanted = l.wanted.min(l.bytes);
        }
        self.bytes = self.all.values().map(|l| l.bytes).sum();
        self.coming = self.all.values().filter(|l| !l.late).map(|l| l.wanted).sum();
    }
}

impl Arbiter {
    /// How much of a card can be lent: what nobody there has, waits for, or will want back, above the margin.
    fn spare(&self, lender: DeviceId, most: Bytes) -> Bytes {
        let Some(d) = self.devices.get(&lender) else {
            return Bytes::ZERO;
        };
        if !d.index.rank.is_empty() || d.gathering.is_some() || d.over() {
            return Bytes::ZERO;
        }
        let marks = self.config.high_mark.max(self.config.low_mark);
        let margin = self.thousandths(lender, marks).max(Bytes(d.capacity.0 / MARGIN));
        d.free()
            .saturating_sub(margin)
            .saturating_sub(d.sums.away)
            .min(most.saturating_sub(d.lodgers.bytes))
            .round_down(GRANULE)
    }

    /// A client looks for room elsewhere.
    pub(crate) fn lodging_asked(
        &mut self,
        client: ClientId,
        lenders: &[DeviceId],
        bytes: Bytes,
        most: Bytes,
        out: &mut Vec<Action>,
    ) {
        let Some(c) = self.clients.get(&client) else {
            return out.push(unknown(client));
        };
        // What is paused stays away for long: it is not what lent room is for.
        let paused = self.task_of(c).paused;
        let best = lenders
            .iter()
            .filter(|lender| **lender != c.device && !paused)
            .map(|lender| (self.spare(*lender, most), core::cmp::Reverse(*lender)))
            .max();
        let (spare, lender) = best.map_or((Bytes::ZERO, None), |(spare, lender)| (spare, Some(lender.0)));
        let bytes = bytes.min(spare).round_down(GRANULE);
        let lender = lender.filter(|_| !bytes.is_zero());
        if let Some(lender) = lender {
            self.change_lodger(client, lender, |l| l.bytes = l.bytes.saturating_add(bytes));
        }
        out.push(Action::LodgingLent {
            client,
            lender,
            bytes,
        });
    }

    /// A client has left room that was lent to it.
    pub(crate) fn lodging_left(
        &mut self,
        client: ClientId,
        lender: DeviceId,
        bytes: Bytes,
        out: &mut Vec<Action>,
    ) {
        let now = self.now;
        let there = |d: &crate::state::Device| d.lodgers.all.get(&client).map(|l| l.bytes);
        let held = self.devices.get(&lender).and_then(there).unwrap_or_default();
        if held < bytes {
            out.push(Action::Note(Note::GaveBackTooMuch {
                client,
                said: bytes,
                held,
            }));
        }
        if held.is_zero() {
            return;
        }
        self.change_lodger(client, lender, |l| {
            l.bytes = l.bytes.saturating_sub(bytes);
            l.wanted = l.wanted.saturating_sub(bytes);
            (l.since, l.late) = (now, false);
        });
    }

    /// All that a client has elsewhere, by its own word.
    pub(crate) fn lodging_held(
        &mut self,
        client: ClientId,
        held: &[(DeviceId, Bytes)],
        out: &mut Vec<Action>,
    ) {
        let Some(home) = self.clients.get(&client).map(|c| c.device) else {
            return out.push(unknown(client));
        };
        let devices: Vec<DeviceId> = self.devices.keys().copied().filter(|d| *d != home).collect();
        for device in devices {
            let said = held.iter().filter(|(lender, _)| *lender == device);
            let bytes: Bytes = said.map(|(_, bytes)| *bytes).sum();
            // What nobody can have is not believed.
            let bytes = bytes.min(self.devices[&device].capacity);
            let now = self.now;
            let d = &self.devices[&device];
            if bytes.is_zero() && !d.lodgers.all.contains_key(&client) {
                continue;
            }
            // Nothing of what was wanted before is known to it.
            self.change_lodger(client, device, |l| {
                *l = Lodger {
                    bytes,
                    since: now,
                    ..Lodger::default()
                };
            });
            self.excuse(device, None, out);
        }
    }

    /// A client is gone, and with it what it had elsewhere.
    pub(crate) fn lodger_gone(&mut self, client: ClientId) {
        let there = |d: &crate::state::Device| d.lodgers.all.contains_key(&client);
        let lenders: Vec<DeviceId> = self
            .devices
            .iter()
            .filter(|(_, d)| there(d))
            .map(|(id, _)| *id)
            .collect();
        for lender in lenders {
            self.change_lodger(client, lender, |l| l.bytes = Bytes::ZERO);
        }
    }

    fn change_lodger(&mut self, client: ClientId, lender: DeviceId, change: impl FnOnce(&mut Lodger)) {
        let Some(d) = self.devices.get_mut(&lender) else {
            return;
        };
        change(d.lodgers.all.entry(client).or_default());
        d.lodgers.add_up();
        d.again = true;
        self.touch_device(lender);
    }

    /// Wants back as much as those of the card itself need.
    pub(crate) fn recall_lodgers(&mut self, device: DeviceId, out: &mut Vec<Action>) {
        let (now, patience) = (self.now, self.config.order_timeout);
        let Some(d) = self.devices.get_mut(&device) else {
            return;
        };
        if d.lodgers.all.is_empty() {
            return;
        }
        for l in d.lodgers.all.values_mut() {
            l.late |= !l.wanted.is_zero() && l.since.after(patience) <= now;
        }
        d.lodgers.add_up();
        let d = &self.devices[&device];
        let waiting = d.index.rank.iter().take(LOOKED_AT).map(|key| self.candidate(key));
        let needed: Bytes = waiting.map(|c| c.need.saturating_add(c.later)).sum();
        let free = d.free();
        let mut short = needed
            .saturating_sub(free)
            .max(d.used().saturating_sub(d.capacity));
        if self.config.low_mark > 0 && free < self.thousandths(device, self.config.low_mark) {
            let high = self.config.high_mark.max(self.config.low_mark);
            short = short.max(self.thousandths(device, high).saturating_sub(free));
        }
        let mut left = short.saturating_sub(d.lodgers.wanted());
        if left.is_zero() {
            return;
        }
        let mut from: Vec<(Bytes, ClientId)> = d
            .lodgers
            .all
            .iter()
            .map(|(id, l)| (l.bytes.saturating_sub(l.wanted), *id))
            .filter(|(bytes, _)| !bytes.is_zero())
            .collect();
        // Few large ones rather than many small ones.
        from.sort_by_key(|(bytes, id)| (core::cmp::Reverse(*bytes), *id));
        for (most, client) in from {
            if left.is_zero() {
                break;
            }
            let bytes = most.min(left.round_up(GRANULE));
            left = left.saturating_sub(bytes);
            self.change_lodger(client, device, |l| {
                if l.wanted.is_zero() {
                    l.since = now;
                }
                l.wanted = l.wanted.saturating_add(bytes);
            });
            out.push(Action::LodgingWanted {
                client,
                lender: device,
                bytes,
            });
        }
    }

    /// What is paused stays away for long, and may be hibernated: all that it has elsewhere is wanted back. Whether some of that
    /// is still waited for.
    pub(crate) fn lodging_of_paused(&mut self, clients: &[ClientId], out: &mut Vec<Action>) -> bool {
        let now = self.now;
        let mut waited_for = false;
        let lenders: Vec<DeviceId> = self
            .devices
            .iter()
            .filter(|(_, d)| !d.lodgers.all.is_empty())
            .map(|(id, _)| *id)
            .collect();
        for lender in lenders {
            for client in clients {
                let Some(l) = self.devices[&lender].lodgers.all.get(client).copied() else {
                    continue;
                };
                waited_for |= !l.late;
                let bytes = l.bytes.saturating_sub(l.wanted);
                if bytes.is_zero() {
                    continue;
                }
                self.change_lodger(*client, lender, |l| {
                    if l.wanted.is_zero() {
                        l.since = now;
                    }
                    l.wanted = l.bytes;
                });
                out.push(Action::LodgingWanted {
                    client: *client,
                    lender,
                    bytes,
                });
            }
        }
        waited_for
    }

    /// What a client has on cards that are not its own.
    pub fn lodged(&self, client: ClientId) -> impl Iterator<Item = (DeviceId, Bytes)> {
        self.devices
            .iter()
            .filter_map(move |(id, d)| Some((*id, d.lodgers.all.get(&client)?.bytes)))
    }

    pub(crate) fn check_lodgers(&self) -> Result<(), String> {
        for (id, d) in self.devices.iter() {
            let mut counted = d.lodgers.clone();
            counted.add_up();
            if (counted.bytes, counted.coming) != (d.lodgers.bytes, d.lodgers.coming) {
                return Err(format!("{id} has lodgers that do not add up: {:?}", d.lodgers));
            }
            for client in d.lodgers.all.keys() {
                match self.clients.get(client) {
                    None => return Err(format!("{id} lends to {client}, which is gone")),
                    Some(c) if c.device == *id => return Err(format!("{id} lends to its own {client}")),
                    Some(_) => {}
                }
            }
        }
        Ok(())
    }
}

fn unknown(client: ClientId) -> Action {
    Action::Note(Note::Ignored {
        what: format!("{client} is not known"),
    })
}
