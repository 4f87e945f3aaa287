//! What the fake's driver places by itself: managed memory that is on the card or not, and memory that it keeps for graphs.

use std::collections::BTreeMap;

use super::FakeDevice;
use crate::DeviceError;

#[derive(Debug, Default)]
pub(super) struct Beside {
    /// Managed memory: its length, and how much of its beginning is on the card.
    managed: BTreeMap<u64, (u64, u64)>,
    /// What was asked to move, in order.
    pushes: Vec<(u64, u64)>,
    refused: Option<DeviceError>,
    graphs_idle: u64,
    graphs_used: u64,
}

impl FakeDevice {
    /// The program touches managed memory on this device: so much of its beginning is on the card now. Without room it stays.
    pub fn touch_managed(&self, addr: u64, len: u64, on_card: u64) {
        let mut inner = self.lock();
        let entry = inner.beside.managed.entry(addr).or_insert((len, 0));
        if self.card.take(on_card.saturating_sub(entry.1)) {
            entry.1 = entry.1.max(on_card);
        }
    }

    /// What was asked to move to the host: address and length, in order.
    #[must_use]
    pub fn pushes(&self) -> Vec<(u64, u64)> {
        self.lock().beside.pushes.clone()
    }

    /// Every push fails like this.
    pub fn refuse_pushes(&self, error: DeviceError) {
        self.lock().beside.refused = Some(error);
    }

    /// Graphs have run: the driver keeps so much that is idle, and so much that is in use.
    pub fn keep_for_graphs(&self, idle: u64, used: u64) {
        assert!(
            self.card.take(idle + used),
            "the card is large enough for the test"
        );
        let mut inner = self.lock();
        inner.beside.graphs_idle += idle;
        inner.beside.graphs_used += used;
    }

    pub(super) fn push_managed(&self, addr: u64, len: u64) -> Result<(), DeviceError> {
        let mut inner = self.lock();
        inner.beside.pushes.push((addr, len));
        if let Some(error) = inner.beside.refused {
            return Err(error);
        }
        let found = inner.beside.managed.range_mut(..=addr).next_back();
        let Some((base, (size, on_card))) = found.filter(|(base, (size, _))| addr + len <= **base + *size)
        else {
            return Err(DeviceError::Driver {
                code: 1,
                call: "push_to_host",
            });
        };
        let _ = size;
        // What is on the card is a beginning: pushing goes from the front, so that it shrinks to what lies behind.
        let first = addr - base;
        if first < *on_card {
            let gone = len.min(*on_card - first);
            *on_card -= gone;
            self.card.give(gone);
        }
        Ok(())
    }

    pub(super) fn trim_kept(&self) -> Result<u64, DeviceError> {
        let mut inner = self.lock();
        self.card.give(std::mem::take(&mut inner.beside.graphs_idle));
        Ok(inner.beside.graphs_used)
    }

    pub(super) fn beside_bytes(&self) -> u64 {
        let inner = self.lock();
        let managed: u64 = inner.beside.managed.values().map(|(_, on_card)| on_card).sum();
        managed + inner.beside.graphs_idle + inner.beside.graphs_used
    }
}
