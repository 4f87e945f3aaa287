//! [`Reach`]: which devices' work may use the memory of which other devices.
//!
//! A kernel may touch whatever its device has access to: its own memory, and that of devices that gave it access (peer access,
//! access set on mappings). A copy may touch any address, from a stream of any device, without either. The first decides
//! for which devices a call goes through the gate, so it has to be known before the first such kernel; the second
//! is noted when such a copy is made. Both decide whose work has to be over before memory is moved. Nothing is ever taken out.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::{Core, MAX_DEVICES};
use crate::gate::DeviceSet;

/// Per device, others whose memory its work may use.
#[derive(Debug)]
pub(crate) struct Reach {
    access: [AtomicU64; MAX_DEVICES],
    copies: [AtomicU64; MAX_DEVICES],
}

impl Reach {
    pub(crate) const fn new() -> Self {
        Self {
            access: [const { AtomicU64::new(0) }; MAX_DEVICES],
            copies: [const { AtomicU64::new(0) }; MAX_DEVICES],
        }
    }

    /// Kernels of `user` may use memory of `owners` from here on.
    pub(crate) fn gain(&self, user: usize, owners: DeviceSet) {
        grow(&self.access, user, owners);
    }

    /// A copy in a stream of `user` uses memory of `owners`. Told inside the gate, before the copy is made.
    pub(crate) fn copies(&self, user: usize, owners: DeviceSet) {
        grow(&self.copies, user, owners);
    }

    /// Devices whose memory kernels of these devices may use, with the devices themselves.
    pub(crate) fn of(&self, users: DeviceSet) -> DeviceSet {
        users
            .iter()
            .filter_map(|user| self.access.get(user))
            .fold(users, |all, owners| {
                all.with(DeviceSet(owners.load(Ordering::Acquire)))
            })
    }

    /// Devices whose work may use memory of `owner`, with itself.
    pub(crate) fn users(&self, owner: usize) -> DeviceSet {
        let both = self.access.iter().zip(&self.copies).enumerate();
        both.filter(|(_, (access, copies))| {
            DeviceSet(access.load(Ordering::Acquire) | copies.load(Ordering::Acquire)).has(owner)
        })
        .fold(DeviceSet::one(owner), |all, (user, _)| {
            all.with(DeviceSet::one(user))
        })
    }
}

fn grow(table: &[AtomicU64; MAX_DEVICES], user: usize, owners: DeviceSet) {
    if let Some(known) = table.get(user)
        && !DeviceSet(known.load(Ordering::Relaxed)).has_all(owners)
    {
        known.fetch_or(owners.0, Ordering::AcqRel);
    }
}

impl Core {
    /// A counter that changes when something used a device's memory.
    pub(crate) fn touches(&self, device: usize) -> u64 {
        self.gate.passages_of(self.reach.users(device))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_who_has_access_or_copied() {
        let reach = Reach::new();
        let one = DeviceSet::one;
        assert_eq!((reach.of(one(0)), reach.users(0)), (one(0), one(0)));
        reach.gain(1, one(0));
        reach.copies(2, one(0));
        assert_eq!(reach.of(one(1)), one(0).with(one(1)));
        assert_eq!(reach.of(one(2)), one(2), "a copy gives a kernel nothing");
        assert_eq!(reach.users(0), one(0).with(one(1)).with(one(2)));
        assert_eq!(reach.users(1), one(1), "not the other way round");
        reach.copies(5, DeviceSet::ALL);
        assert!(reach.users(63).has(5));
    }
}
