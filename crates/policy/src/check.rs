//! The invariants, as a check, and the books counted anew.

use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

use crate::Arbiter;
use crate::book::MOST_SAID;
use crate::state::{Client, Device, Holding, Totals};

impl Arbiter {
    /// Verifies every invariant.
    ///
    /// - On each device, leases, overheads and unmanaged memory fit the capacity, unless overhead, unmanaged memory,
    ///   the capacity or an adopted client made it otherwise and it has not been under since.
    /// - On each device, each task is within its limit, with the same exception for a limit that was lowered.
    /// - Who is gathered for is there, waits and is not paused.
    /// - No client is in a task or on a device that is not there; no ask is open for nothing.
    /// - Guarantees never pass requests.
    /// - A card lends room to clients of other cards only.
    /// - Every sum and index is what it would be if it were counted anew.
    ///
    /// # Errors
    /// What is wrong, for a person.
    pub fn check(&self) -> Result<(), String> {
        for (id, c) in self.clients.iter() {
            if !self.tasks.contains_key(&c.task) || !self.devices.contains_key(&c.device) {
                return Err(format!("{id} belongs to nothing"));
            }
            self.check_client(*id, c)?;
        }
        for (id, d) in self.devices.iter() {
            if d.over() && !d.excused {
                return Err(format!("{id} has {} but {} are given out", d.capacity, d.used()));
            }
            if let Some(g) = d.gathering {
                match self.clients.get(&g) {
                    None => return Err(format!("{id} is gathered for {g}, which is gone")),
                    Some(c) if c.device != *id => {
                        return Err(format!("{id} is gathered for {g}, which is elsewhere"));
                    }
                    Some(c) if c.asks.is_empty() => {
                        return Err(format!("{id} is gathered for {g}, which does not wait"));
                    }
                    Some(c) if self.task_of(c).paused => {
                        return Err(format!("{id} is gathered for {g}, which is paused"));
                    }
                    Some(_) => {}
                }
            }
            for (task, part) in d.parts.iter() {
                self.check_part(*id, d, *task)?;
                let limit = self.tasks[task].limit();
                if part.sums.held > limit && !d.excused_tasks.contains(task) {
                    let held = part.sums.held;
                    return Err(format!("{task} holds {held} on {id}, over its limit of {limit}"));
                }
            }
            self.check_device(*id, d)?;
        }
        self.check_lodgers()?;
        for (id, t) in self.tasks.iter() {
            if t.guaranteed.values().any(|g| *g > t.spec.request) {
                return Err(format!("{id} is guaranteed more than it requested"));
            }
            if t.clients
                .iter()
                .any(|c| self.clients.get(c).is_none_or(|c| c.task != *id))
            {
                return Err(format!("{id} has a client that is not its own"));
            }
        }
        Ok(())
    }

    fn check_client(&self, id: ClientId, c: &Client) -> Result<(), String> {
        if c.asks.iter().any(|a| a.left.is_zero()) {
            return Err(format!("{id} has an ask for nothing"));
        }
        if c.incoming > c.lease {
            return Err(format!("{id} gets {} back in {} of lease", c.incoming, c.lease));
        }
        let mut asks: Vec<_> = c.asks.iter().map(|a| a.id).collect();
        asks.sort_unstable();
        asks.dedup();
        if asks.len() != c.asks.len() {
            return Err(format!("{id} has an ask twice"));
        }
        let l = &c.linked;
        if l.sums != Totals::of(c) {
            return Err(format!(
                "{id} is booked as {:?} but is {:?}",
                l.sums,
                Totals::of(c)
            ));
        }
        if l.stalled != self.stalled(c).min(MOST_SAID) {
            return Err(format!("{id} is booked as stalled with {}", l.stalled));
        }
        let gang = [
            self.missing(id, c),
            self.coming(id, c),
            self.broken(c),
            self.expects(c),
        ];
        if [l.missing, l.coming, l.broken, l.expects] != gang {
            return Err(format!("{id} is with its gang or not: {l:?}"));
        }
        let index = &self.device_of(c).index;
        let held = match l.holding {
            Holding::Nothing => true,
            Holding::Idle(key) => index.idle.contains(&key),
            Holding::Waiting(key) => index.waiting.contains(&key),
            Holding::Running(key) => index.running.contains(&key),
        };
        let ranked = l
            .rank
            .is_none_or(|key| index.rank.contains(&key) && index.needs.contains(&(l.least, id)));
        let spare = l.spare.is_none_or(|key| index.spare.contains(&key));
        let clean = l.clean.is_none_or(|key| index.clean.contains(&key));
        if !held || !ranked || !spare || !clean {
            return Err(format!("{id} is not where its books say: {l:?}"));
        }
        if l.rank.is_some() != (!c.asks.is_empty() && !self.task_of(c).paused) {
            return Err(format!("{id} waits or not: {l:?}"));
        }
        if (l.holding == Holding::Nothing) != c.movable().is_zero() {
            return Err(format!("{id} holds or not: {l:?}"));
        }
        if l.active != self.active(c) && c.last_touch < self.now {
            // A touch that put off its end is booked at the next look.
            let end = c.active_until(&self.config);
            return Err(format!("{id} is booked as active: {}, until {end:?}", l.active));
        }
        if let Some(at) = self.next_wake(id, c)
            && l.wake
                .is_none_or(|wake| wake > at || !self.wakes.contains(&(wake, id)))
        {
            return Err(format!(
                "{id} is to be woken at {at:?}, and would be at {:?}",
                l.wake
            ));
        }
        Ok(())
    }

    fn check_part(&self, device: DeviceId, d: &Device, task: TaskId) -> Result<(), String> {
        let part = &d.parts[&task];
        let t = &self.tasks[&task];
        let mut sums = Totals::default();
        let (mut asking, mut active, mut stalled) = (0, 0, Bytes::ZERO);
        for id in &part.clients {
            let c = &self.clients[id];
            sums.replace(&Totals::default(), &Totals::of(c));
            asking += u32::from(!c.asks.is_empty());
            active += u32::from(c.linked.active);
            stalled += c.linked.stalled;
        }
        let protected = t.protected(device, part.wanting());
        sums.locked = sums.stuck.max(protected.min(sums.held));
        let real = (sums, asking, active, protected, sums.held > t.limit());
        let booked = (part.sums, part.asking, part.active, part.protected, part.excess);
        if real != booked {
            return Err(format!(
                "{task} on {device} is booked as {booked:?} but is {real:?}"
            ));
        }
        let barred = sums.locked.max(sums.stuck.saturating_add(stalled));
        if (part.stalled, part.barred) != (stalled, barred) {
            return Err(format!(
                "{task} on {device} has {stalled} that is stalled, {barred} barred"
            ));
        }
        if part.contends.is_some() != part.wanting() || part.excess != d.index.excess.contains(&task) {
            return Err(format!("{task} on {device} is not where its books say"));
        }
        Ok(())
    }

    fn check_device(&self, id: DeviceId, d: &Device) -> Result<(), String> {
        let mut sums = Totals::default();
        for part in d.parts.values() {
            sums.replace(&Totals::default(), &part.sums);
        }
        let barred: Bytes = d.parts.values().map(|part| part.barred).sum();
        if barred != d.barred {
            return Err(format!("{id} has {barred} barred but booked {}", d.barred));
        }
        let guaranteed: Bytes = self.tasks.values().map(|t| t.guaranteed(id)).sum();
        let kept: Bytes = self.tasks.values().map(|t| t.kept(id)).sum();
        if (sums, guaranteed, kept) != (d.sums, d.guaranteed, d.kept) {
            let booked = (d.sums, d.guaranteed, d.kept);
            return Err(format!(
                "{id} is booked as {booked:?} but is {:?}",
                (sums, guaranteed, kept)
            ));
        }
        let count = |f: fn(&Client) -> bool| {
            d.parts
                .values()
                .flat_map(|p| &p.clients)
                .filter(|c| f(&self.clients[c]))
                .count()
        };
        let there = [
            count(|c| c.linked.rank.is_some()),
            count(|c| c.linked.rank.is_some()),
            count(|c| c.linked.spare.is_some()),
            count(|c| matches!(c.linked.holding, Holding::Idle(_)) && !c.clean().is_zero()),
            count(|c| c.linked.order),
            count(|c| c.linked.holding != Holding::Nothing),
            d.parts.values().filter(|p| p.contends.is_some()).count(),
        ];
        let index = &d.index;
        let booked = [
            index.rank.len(),
            index.needs.len(),
            index.spare.len(),
            index.clean.len(),
            index.orders.len(),
            index.idle.len() + index.waiting.len() + index.running.len(),
            index.contends.len(),
        ];
        let movable = |kind: fn(&Holding) -> bool| -> Bytes {
            let clients = d
                .parts
                .values()
                .flat_map(|p| &p.clients)
                .map(|c| &self.clients[c].linked);
            clients.filter(|l| kind(&l.holding)).map(|l| l.movable).sum()
        };
        let movable = [
            movable(|h| matches!(h, Holding::Idle(_))),
            movable(|h| matches!(h, Holding::Waiting(_))),
            movable(|h| matches!(h, Holding::Running(_))),
        ];
        if movable != index.movable {
            return Err(format!(
                "{id} has {movable:?} to move but booked {:?}",
                index.movable
            ));
        }
        if there != booked {
            return Err(format!("{id} has {booked:?} entries for {there:?}"));
        }
        Ok(())
    }
}
