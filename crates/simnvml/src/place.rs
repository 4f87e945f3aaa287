//! What a handle means: a card, or a device that a card is cut into (MIG).

use std::ops::Range;

use ebb_simdev::{Machine, ProcessUse, Usage, card_uuid, device_uuid, slice_text, uuid_text};
use ebb_units::DeviceUuid;

use crate::system::machine;
use crate::*;

/// A card, or a slice of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) machine: &'static Machine,
    pub(crate) card: u32,
    /// The physical index, if it is a slice.
    pub(crate) slice: Option<u32>,
}

/// Handles are numbers, spread, so that null and small ones are none; cards and slices apart.
const CARDS: usize = 0x5eb1_0000;
const SLICES: usize = 0x5eb2_0000;

fn spread(base: usize, index: u32) -> nvmlDevice_t {
    nvmlDevice_t(base + (index as usize + 1) * 16)
}

impl Place {
    /// All handles that there are.
    pub(crate) fn all() -> Result<Vec<Self>, nvmlReturn_t> {
        let mut all = Self::cards()?;
        let slices = all.clone().into_iter().flat_map(Self::slices);
        all.extend(slices.collect::<Vec<_>>());
        Ok(all)
    }

    pub(crate) fn cards() -> Result<Vec<Self>, nvmlReturn_t> {
        let machine = machine()?;
        let card = |card| Self {
            machine,
            card,
            slice: None,
        };
        Ok((0..machine.config().cards()).map(card).collect())
    }

    pub(crate) fn of(device: nvmlDevice_t) -> Result<Self, nvmlReturn_t> {
        let mut all = Self::all()?.into_iter();
        all.find(|place| place.handle() == device)
            .ok_or(NVML_ERROR_INVALID_ARGUMENT)
    }

    pub(crate) fn handle(self) -> nvmlDevice_t {
        match self.slice {
            None => spread(CARDS, self.card),
            Some(slice) => spread(SLICES, slice),
        }
    }

    /// Whether it is a card that is cut.
    pub(crate) fn is_cut(self) -> bool {
        self.slice.is_none() && self.machine.config().mig > 0
    }

    /// What a card is cut into; nothing if it is whole.
    pub(crate) fn slices(self) -> Vec<Self> {
        if !self.is_cut() {
            return Vec::new();
        }
        let slice = |slice| Self {
            slice: Some(slice),
            ..self
        };
        self.machine.config().devices_of(self.card).map(slice).collect()
    }

    /// The physical devices that it is made of.
    pub(crate) fn devices(self) -> Range<u32> {
        match self.slice {
            Some(slice) => slice..slice + 1,
            None => self.machine.config().devices_of(self.card),
        }
    }

    /// Its place among the slices of its card.
    pub(crate) fn position(self) -> Option<u32> {
        Some(self.slice? - self.machine.config().devices_of(self.card).start)
    }

    pub(crate) fn uuid(self) -> DeviceUuid {
        match self.slice {
            Some(slice) => device_uuid(slice),
            None if self.is_cut() => card_uuid(self.card),
            None => device_uuid(self.card),
        }
    }

    pub(crate) fn uuid_text(self) -> String {
        match self.slice {
            Some(slice) => slice_text(device_uuid(slice)),
            None => uuid_text(self.uuid()),
        }
    }

    pub(crate) fn usage(self) -> Usage {
        let mut sum = Usage { total: 0, used: 0 };
        for device in self.devices() {
            let one = self.machine.usage(device);
            sum.total += one.total;
            sum.used += one.used;
        }
        sum
    }

    /// Who is there, and in which slice: its number, or all ones on a whole card.
    pub(crate) fn processes(self) -> Vec<(ProcessUse, u32)> {
        let first = self.machine.config().devices_of(self.card).start;
        let cut = self.machine.config().mig > 0;
        let mut all = Vec::new();
        for device in self.devices() {
            let instance = if cut { device - first + 1 } else { u32::MAX };
            all.extend(
                self.machine
                    .processes(device)
                    .into_iter()
                    .map(|process| (process, instance)),
            );
        }
        all
    }
}
