//! Memory that outlives whoever made it: a program gave a handle of it away, freed it or died, and another program still has it.
//!
//! The descriptor went between the two programs by ways of their own, so nobody can say whose memory an importer holds. What is known is how much
//! each program has exported and imported on a card. When exported memory goes, as much of it as is imported at all may be there still: that
//! *estate* of the card is promised to nobody, in the same step in which its maker's account is closed. It shrinks as importers let go, and to what NVML
//! says is used on the card and by no process, as soon as NVML was asked twice.

use ebb_units::{Bytes, DeviceId};

use super::cards::Device;
use super::{Driver, PeerId};
use crate::say;

/// What is left behind on one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Estate {
    /// Promised to nobody.
    pub bytes: Bytes,
    /// NVML's looks since it grew.
    looks: u8,
}

impl Estate {
    /// Exported memory is gone, and others have that much imported.
    fn grow(&mut self, exported: Bytes, imported: Bytes) -> Bytes {
        let more = exported.min(imported.saturating_sub(self.bytes));
        if !more.is_zero() {
            self.bytes = self.bytes.saturating_add(more);
            self.looks = 0;
        }
        more
    }

    /// NVML has looked: so much is used by nobody, by the larger of its last two words.
    pub(super) fn look(&mut self, ownerless: Bytes) {
        self.looks = self.looks.saturating_add(1);
        if self.looks >= 2 {
            self.bytes = self.bytes.min(ownerless);
        }
    }
}

impl Device {
    /// What is on the card and in nobody's account.
    pub(super) fn of_nobody(&self) -> Bytes {
        self.unmanaged.saturating_add(self.estate.bytes)
    }
}

impl Driver {
    /// What programs have imported on a card, but for one of them.
    fn imported(&self, device: DeviceId, but: Option<PeerId>) -> Bytes {
        let peers = self.peers.iter().filter(|(id, _)| Some(**id) != but);
        peers
            .filter_map(|(_, peer)| Some(peer.clients.get(&device)?.imported))
            .sum()
    }

    /// A program that exported this much on a card has freed it or died. Says how much of it stays with others; who asked counts that at the
    /// same moment at which the maker's account is credited.
    pub(super) fn leaves_behind(&mut self, maker: PeerId, device: DeviceId, exported: Bytes) -> Bytes {
        if exported.is_zero() {
            return Bytes::ZERO;
        }
        let imported = self.imported(device, Some(maker));
        let Some(card) = self.devices.get_mut(&device) else {
            return Bytes::ZERO;
        };
        let more = card.estate.grow(exported, imported);
        if !more.is_zero() {
            say::info!(
                "{more} on GPU {} whose maker has let it go are held by programs that imported them",
                card.index
            );
        }
        more
    }

    /// Importers have let go of something, perhaps. Whether there is less left behind now.
    pub(super) fn estate_shrinks(&mut self, device: DeviceId) -> bool {
        let imported = self.imported(device, None);
        let Some(card) = self.devices.get_mut(&device) else {
            return false;
        };
        let before = card.estate.bytes;
        card.estate.bytes = before.min(imported);
        card.estate.bytes != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_left_behind_than_others_have() {
        let mut estate = Estate::default();
        assert_eq!(estate.grow(Bytes(100), Bytes(60)), Bytes(60));
        assert_eq!(estate.grow(Bytes(100), Bytes(60)), Bytes::ZERO);
        assert_eq!(estate.grow(Bytes(5), Bytes(100)), Bytes(5));
        assert_eq!(estate.bytes, Bytes(65));
    }

    #[test]
    fn two_looks_decide() {
        let mut estate = Estate::default();
        estate.grow(Bytes(100), Bytes(100));
        estate.look(Bytes::ZERO);
        assert_eq!(estate.bytes, Bytes(100), "the first may be from before");
        estate.look(Bytes(70));
        assert_eq!(estate.bytes, Bytes(70));
        estate.grow(Bytes(10), Bytes(100));
        estate.look(Bytes(70));
        assert_eq!(estate.bytes, Bytes(80));
        estate.look(Bytes(200));
        assert_eq!(estate.bytes, Bytes(80), "it does not grow by looks");
    }
}
