//! The cards: what NVML says of them, or what programs say where there is no NVML.

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_policy::{Event, Time};
use ebb_units::{Bytes, DeviceId, DeviceUuid, GRANULE};

use super::Driver;
use super::estates::Estate;
use super::hidden::Reading;
use super::strangers::Stranger;
use crate::nvml::{Card, NvmlError};
use crate::say;
use crate::worker::FromWorker;

/// How long a dead process may still show in NVML before what it holds counts as somebody else's, and a process with the library
/// in it before it tells of its context.
const GRACE: Duration = Duration::from_secs(3);
/// The books are compared with the cards at least that often; a little less than the second after which they are read anyhow.
const LOOK_EVERY: Duration = Duration::from_millis(900);
/// Most cards that are taken on by programs' word.
const MAX_DEVICES: usize = 64;

#[derive(Clone, Debug)]
pub(super) struct Device {
    pub uuid: DeviceUuid,
    pub index: u32,
    pub name: String,
    pub total: Bytes,
    /// Promised to nobody; as configured, or as measured.
    pub reserve: Bytes,
    /// Kept for the next program's context, which its driver takes without asking: the most that one took so far.
    pub newcomer: Bytes,
    /// Held by programs that are not ours.
    pub unmanaged: Bytes,
    /// Memory whose maker is gone and that others still have.
    pub estate: Estate,
    /// Used beyond what NVML's processes account for, in the last sample; the driver's own part.
    overhang: Option<Bytes>,
    /// The least of that so far.
    measured: Option<Bytes>,
    /// For each of our processes here, the last that NVML said of it.
    readings: BTreeMap<u32, Reading>,
    /// Who NVML showed here in the last sample, and since when.
    listed: BTreeMap<u32, Time>,
    /// Processes without an account here.
    pub strangers: BTreeMap<u32, Stranger>,
}

impl Device {
    pub(super) fn capacity(&self) -> Bytes {
        let kept = self.reserve.saturating_add(self.newcomer);
        self.total.saturating_sub(kept).round_down(GRANULE)
    }
}

/// What a program's word about its context may keep from everybody: no liar makes a card small.
fn newcomer(overhead: Bytes, total: Bytes) -> Bytes {
    overhead.min(Bytes(total.0 / 64)).round_up(GRANULE)
}

/// A little that stays free beside the driver's own part: the driver rounds and keeps pools. Nothing on small cards.
fn slack(total: Bytes) -> Bytes {
    Bytes(total.0 / 512).min(Bytes::mib(64)).round_down(GRANULE)
}

/// What our own clients hold on one card, by process: lease, and the overhead that they know of themselves.
type Ours = BTreeMap<u32, Bytes>;

/// What others hold: processes that are not ours, and, where pids cannot be matched (another pid namespace), what the
/// nameless hold beyond ours. And those of them that can be named.
fn unmanaged(
    listed: &[(u32, Bytes)],
    ours: &Ours,
    known: impl Fn(u32) -> bool,
    visible: impl Fn(u32) -> bool,
) -> (Bytes, Vec<(u32, Bytes)>) {
    let mut foreign = Vec::new();
    let mut nameless = Bytes::ZERO;
    for (pid, used) in listed {
        if known(*pid) {
            continue;
        }
        if visible(*pid) {
            foreign.push((*pid, *used));
        } else {
            nameless = nameless.saturating_add(*used);
        }
    }
    let unmatched: Bytes = ours
        .iter()
        .filter(|(pid, _)| !listed.iter().any(|(p, _)| p == *pid))
        .map(|(_, bytes)| *bytes)
        .sum();
    let named: Bytes = foreign.iter().map(|(_, used)| *used).sum();
    (named.saturating_add(nameless.saturating_sub(unmatched)), foreign)
}

impl Driver {
    /// Waits a moment for NVML's first word, so that the first program finds its card known.
    pub(super) fn first_cards(&mut self) {
        if self.cards.is_none() {
            return;
        }
        if let Ok(FromWorker::Cards(cards, _, began)) = self.from_workers.recv_timeout(Duration::from_secs(3))
        {
            self.see_cards(cards, began);
        }
    }

    /// Asks NVML now rather than within the second.
    pub(super) fn look_at_cards(&self) {
        self.poke();
        self.look_wanted.set(self.pokes.get());
    }

    /// Has the cards read now.
    pub(super) fn poke(&self) {
        if let Some(worker) = &self.cards {
            self.pokes.set(self.pokes.get() + 1);
            worker.send(self.pokes.get());
        }
    }

    /// Whether a reading is for the books. One that only answers what a process has is not: it comes at the very moment when a context was
    /// made and before its account says so, and two such readings would make that look like memory of nobody.
    pub(super) fn is_time_to_look(&mut self, poked: u64) -> bool {
        let now = self.now();
        let due = self.looked.is_none_or(|at| now.since(at) >= LOOK_EVERY);
        let wanted = self.look_wanted.get();
        let wanted = wanted > self.looked_after && wanted <= poked;
        if wanted || due {
            self.looked = Some(now);
            self.looked_after = poked;
        }
        wanted || due
    }

    /// `began`: when the reading did.
    pub(super) fn see_cards(&mut self, cards: Result<Vec<Card>, NvmlError>, began: std::time::Instant) {
        let cards = match cards {
            Ok(cards) => {
                if self.cards_trouble.take().is_some() {
                    say::info!("NVML answers");
                }
                cards
            }
            Err(e) => {
                let text = e.to_string();
                if self.cards_trouble.as_ref() != Some(&text) {
                    say::warning!(
                        "{text}; cards are learned from programs, other users of them are not seen"
                    );
                    self.cards_trouble = Some(text);
                }
                return;
            }
        };
        let now = self.now();
        self.departed.retain(|_, at| now.since(*at) < GRACE);
        let held = self.held_by_pid(began);
        self.shrunk.forget(began);
        for card in cards {
            self.see_card(&card, held.get(&card.uuid).cloned().unwrap_or_default(), began);
        }
    }

    fn see_card(&mut self, card: &Card, ours: Ours, began: std::time::Instant) {
        let id = self
            .device_named(card.uuid)
            .unwrap_or_else(|| self.new_device(card.uuid));
        // Ours is who has an account on this card: a program of a task that passes the library by is as foreign as any. One that has
        // the library may be about to tell of its first context here.
        let now = self.now();
        let before = self.devices.get(&id).map(|device| &device.listed);
        let since = |pid: u32| before.and_then(|listed| listed.get(&pid)).copied().unwrap_or(now);
        let coming = |pid: u32| {
            let loaded = card.facts.get(&pid).is_some_and(|facts| facts.why.has_library());
            loaded && now.since(since(pid)) < GRACE
        };
        let account = |pid: u32| {
            let process = self.by_pid.get(&pid).and_then(|key| self.processes.get(key));
            let here = |peer| {
                self.peers
                    .get(peer)
                    .is_some_and(|peer| peer.clients.contains_key(&id))
            };
            process.is_some_and(|process| process.peers.iter().any(here))
        };
        let known = |pid| {
            account(pid) || coming(pid) || self.departed.contains_key(&pid) || self.lodged_lately(pid, id)
        };
        // Room that this card lent is in its account already.
        let lodged = |(pid, used): &(u32, Bytes)| {
            let lent = ours
                .get(pid)
                .filter(|_| !account(*pid))
                .copied()
                .unwrap_or_default();
            (*pid, used.saturating_sub(lent))
        };
        let visible = |pid: u32| std::path::Path::new(&format!("/proc/{pid}")).exists();
        let foreign = card.processes.as_ref().map(|listed| {
            let listed: Vec<(u32, Bytes)> = listed.iter().map(lodged).collect();
            let (bytes, mut strangers) = unmanaged(&listed, &ours, known, visible);
            strangers.retain(|(_, bytes)| !bytes.is_zero());
            (bytes, strangers)
        });
        let listed = card.processes.iter().flatten();
        let listed = listed.map(|(pid, _)| (*pid, since(*pid))).collect();
        // While the list has the dead, it is older than their death: it says nothing of what they left.
        let buried = !card
            .processes
            .iter()
            .flatten()
            .any(|(pid, _)| self.departed.contains_key(pid));
        let configured = self.config.reserve;
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let before = (device.capacity(), device.of_nobody());
        device.total = card.total;
        device.index = card.index;
        device.name.clone_from(&card.name);
        // Used and not by any process: the driver's own. The two figures are not read at one moment, so the larger of
        // two samples counts, and of these the least.
        if let Some(listed) = &card.processes {
            let sum: Bytes = listed.iter().map(|(_, used)| *used).sum();
            let overhang = card.total.saturating_sub(card.free).saturating_sub(sum);
            let steady = device.overhang.map_or(overhang, |last| last.max(overhang));
            device.overhang = Some(overhang);
            let measured = device.measured.map_or(steady, |least| least.min(steady));
            device.measured = Some(measured);
            if buried {
                device.estate.look(steady.saturating_sub(measured));
            }
        }
        let measured = device
            .measured
            .unwrap_or_default()
            .max(card.reserved)
            .saturating_add(slack(card.total));
        device.reserve = configured.unwrap_or(measured).min(device.total);
        device.listed = listed;
        let strangers = foreign.map(|(bytes, strangers)| {
            device.unmanaged = bytes;
            strangers
        });
        let last = std::mem::take(&mut device.readings);
        let after = (device.capacity(), device.of_nobody());
        if let Some(strangers) = strangers {
            self.see_strangers(id, card, &strangers);
        }
        if before != after || before.0.is_zero() {
            self.feed_device(id);
        }
        // What the driver took for them by itself.
        let mut readings = BTreeMap::new();
        for (pid, used) in card.processes.iter().flatten() {
            if let Some(account) = ours.get(pid) {
                let mut reading = Reading::new(began, std::time::Instant::now(), *used, *account);
                self.look_for_hidden(*pid, id, last.get(pid), &mut reading);
                readings.insert(*pid, reading);
            }
        }
        if let Some(device) = self.devices.get_mut(&id) {
            device.readings = readings;
        }
    }

    /// A process has sent so much off a card: what was seen of it before shows more than there is.
    pub(super) fn has_gone(&mut self, pid: u32, id: DeviceId, bytes: Bytes) {
        let device = self.devices.get_mut(&id);
        if let Some(reading) = device.and_then(|device| device.readings.get_mut(&pid)) {
            reading.gone(bytes);
        }
    }

    pub(super) fn feed_device(&mut self, id: DeviceId) {
        if let Some(device) = self.devices.get(&id) {
            let (capacity, unmanaged) = (device.capacity(), device.of_nobody());
            self.feed(Event::Device {
                device: id,
                capacity,
                unmanaged,
            });
        }
    }

    /// What a context took on a card: as much stays free for the next, unless the configuration says what stays free.
    pub(super) fn context_took(&mut self, id: DeviceId, overhead: Bytes) {
        if self.config.reserve.is_some() {
            return;
        }
        let Some(device) = self.devices.get_mut(&id) else {
            return;
        };
        let kept = newcomer(overhead, device.total);
        if kept > device.newcomer {
            device.newcomer = kept;
            self.feed_device(id);
        }
    }

    pub(super) fn device_named(&self, uuid: DeviceUuid) -> Option<DeviceId> {
        self.devices
            .iter()
            .find(|(_, device)| device.uuid == uuid)
            .map(|(id, _)| *id)
    }

    fn new_device(&mut self, uuid: DeviceUuid) -> DeviceId {
        let index = u32::try_from(self.devices.len()).unwrap_or(u32::MAX);
        let id = DeviceId(index);
        self.devices.insert(
            id,
            Device {
                uuid,
                index,
                name: "GPU".into(),
                total: Bytes::ZERO,
                reserve: Bytes::ZERO,
                newcomer: Bytes::ZERO,
                unmanaged: Bytes::ZERO,
                estate: Estate::default(),
                overhang: None,
                measured: None,
                readings: BTreeMap::new(),
                listed: BTreeMap::new(),
                strangers: BTreeMap::new(),
            },
        );
        id
    }

    /// A program has a context on this card. Without NVML its word is all there is.
    pub(super) fn device_for(&mut self, uuid: DeviceUuid, total: Bytes) -> Option<DeviceId> {
        if let Some(id) = self.device_named(uuid) {
            return Some(id);
        }
        if self.devices.len() >= MAX_DEVICES || total.is_zero() || total > Bytes::gib(1 << 14) {
            return None;
        }
        let id = self.new_device(uuid);
        let reserve = self.config.reserve.unwrap_or(slack(total)).min(total);
        let device = self.devices.get_mut(&id)?;
        (device.total, device.reserve) = (total, reserve);
        say::info!("{uuid} with {total} is known from a program");
        self.feed_device(id);
        Some(id)
    }

    /// A process with a session is gone: what NVML still shows of it is on its way out.
    pub(super) fn note_departed(&mut self, pid: u32) {
        let now: Time = self.now();
        self.departed.insert(pid, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_those_that_are_not_ours() {
        let listed = [(10, Bytes::mib(100)), (20, Bytes::mib(30)), (30, Bytes::mib(5))];
        let ours = Ours::from([(10, Bytes::mib(90))]);
        let known = |pid| pid == 10 || pid == 30;
        assert_eq!(
            unmanaged(&listed, &ours, known, |_| true),
            (Bytes::mib(30), vec![(20, Bytes::mib(30))])
        );
    }

    #[test]
    fn in_another_pid_namespace_ours_are_subtracted_from_the_nameless() {
        // NVML says host pids; here the same processes have other ones.
        let listed = [(90_010, Bytes::mib(100)), (90_020, Bytes::mib(30))];
        let ours = Ours::from([(10, Bytes::mib(100))]);
        assert_eq!(
            unmanaged(&listed, &ours, |pid| pid == 10, |pid| pid < 1000),
            (Bytes::mib(30), vec![])
        );
        let more = Ours::from([(10, Bytes::gib(1))]);
        assert_eq!(
            unmanaged(&listed, &more, |pid| pid == 10, |pid| pid < 1000),
            (Bytes::ZERO, vec![])
        );
    }

    #[test]
    fn room_for_a_context_is_bounded_by_the_card() {
        assert_eq!(newcomer(Bytes::mib(527), Bytes::gib(140)), Bytes::mib(528));
        assert_eq!(newcomer(Bytes::gib(100), Bytes::gib(128)), Bytes::gib(2));
        assert_eq!(newcomer(Bytes::ZERO, Bytes::gib(128)), Bytes::ZERO);
    }

    #[test]
    fn slack_is_for_real_cards() {
        assert_eq!(slack(Bytes::mib(256)), Bytes::ZERO);
        assert_eq!(slack(Bytes::gib(140)), Bytes::mib(64));
    }
}
