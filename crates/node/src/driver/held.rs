//! What a process has on a card, for the process itself: its library must know what a context took, and starting NVML in every program costs each
//! of them 10 to 40 ms, one after the other when many start at once, and leaves threads in them that its end can trip over.
//!
//! NVML is read on a thread of its own. An answer is from a reading that began after the question came; one reading answers all who wait.

use ebb_protocol::ToLayer;
use ebb_units::{Bytes, DeviceUuid};

use super::{ConnId, Driver};
use crate::nvml::Card;

/// More questions than that wait only if NVML hangs.
const MAX_WAITING: usize = 4096;

/// A question that waits for NVML.
#[derive(Debug)]
pub(super) struct AskedHeld {
    conn: ConnId,
    pid: u32,
    device: DeviceUuid,
    /// The reading after this poke answers it.
    poke: u64,
}

impl Driver {
    /// A process wants to know what it has on a card.
    pub(super) fn ask_held(&mut self, conn: ConnId, device: DeviceUuid) {
        let pid = self
            .conns
            .get(&conn)
            .and_then(|conn| self.processes.get(&conn.process))
            .map(|process| process.pid);
        match pid {
            Some(pid) if self.sees_processes() && self.asked_held.len() < MAX_WAITING => {
                self.poke();
                let poke = self.pokes.get();
                self.asked_held.push(AskedHeld {
                    conn,
                    pid,
                    device,
                    poke,
                });
            }
            _ => self.tell_held(conn, device, None),
        }
    }

    /// Whether NVML answers this daemon.
    pub(super) fn sees_processes(&self) -> bool {
        self.cards.is_some() && self.cards_trouble.is_none()
    }

    /// The cards were read, after all pokes up to `poked`; none, if NVML does not answer.
    pub(super) fn answer_held(&mut self, cards: &[Card], poked: u64) {
        let (now, later) = std::mem::take(&mut self.asked_held)
            .into_iter()
            .partition(|asked| asked.poke <= poked);
        self.asked_held = later;
        let now: Vec<AskedHeld> = now;
        for asked in now {
            let card = cards.iter().find(|card| card.uuid == asked.device);
            let listed = card.and_then(|card| card.processes.as_ref());
            let bytes = listed.and_then(|listed| {
                let own = listed.iter().find(|(pid, _)| *pid == asked.pid);
                // Not listed is nothing, unless the list is of another pid namespace.
                let ours = || listed.iter().all(|(pid, _)| is_here(*pid));
                own.map(|(_, used)| *used)
                    .or_else(|| ours().then_some(Bytes::ZERO))
            });
            self.tell_held(asked.conn, asked.device, bytes);
        }
    }

    fn tell_held(&self, conn: ConnId, device: DeviceUuid, bytes: Option<Bytes>) {
        let message = ToLayer::Held {
            device,
            known: bytes.is_some(),
            bytes: bytes.unwrap_or_default(),
        };
        self.send_once(conn, &message);
    }
}

/// Whether a process of this number is one that this daemon sees.
fn is_here(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}
