//! Other cards on which the fake device can have memory.

use ebb_units::DeviceUuid;

use super::{Card, FakeDevice, Inner};
use crate::Props;

/// What marks memory of another card among the properties; its number is the second word.
const LENT: u64 = 0xEBB_1E4D;

#[derive(Debug, Default)]
pub(super) struct Lenders(Vec<(DeviceUuid, Card)>);

impl Lenders {
    pub(super) fn list(&self) -> Vec<(DeviceUuid, Props)> {
        let props = |at: usize| Props([LENT, at as u64, 0, 0]);
        let all = self.0.iter().enumerate();
        all.map(|(at, (uuid, _))| (*uuid, props(at))).collect()
    }

    /// The card that such memory lies on, if it is another one.
    pub(super) fn card(&self, props: &Props) -> Option<&Card> {
        let at = usize::try_from(props.0[1]).ok()?;
        self.0
            .get(at)
            .filter(|_| props.0[0] == LENT)
            .map(|(_, card)| card)
    }
}

impl FakeDevice {
    /// From now on this device can have memory on another card.
    pub fn reach(&self, uuid: DeviceUuid, card: Card) {
        self.lock().lenders.0.push((uuid, card));
    }

    /// What is gone goes back to the cards that it was on.
    pub(super) fn give_back(&self, inner: &mut Inner) {
        for (props, bytes) in inner.state.take_gone() {
            inner.lenders.card(&props).unwrap_or(&self.card).give(bytes);
        }
    }
}
