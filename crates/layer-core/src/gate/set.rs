//! [`DeviceSet`]: devices by the engine's numbers, in one word.

/// Some of the devices of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceSet(pub(crate) u64);

impl DeviceSet {
    /// No device.
    pub const NONE: Self = Self(0);
    /// Every device, known or not: what a call whose memory is not known may touch.
    pub const ALL: Self = Self(u64::MAX);

    /// One device by its number. Numbers beyond 63 are never given out; they count as every device.
    #[must_use]
    pub const fn one(device: usize) -> Self {
        if device < 64 { Self(1 << device) } else { Self::ALL }
    }

    /// Both together.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Those of them that are not in the other.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether both have a device in common.
    #[must_use]
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether all of the other's are in it.
    #[must_use]
    pub const fn has_all(self, other: Self) -> bool {
        other.without(self).is_empty()
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether a device is in it.
    #[must_use]
    pub const fn has(self, device: usize) -> bool {
        self.meets(Self::one(device))
    }

    /// The numbers.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..64).filter(move |device| self.0 & 1 << device != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_sets() {
        let two = DeviceSet::one(3).with(DeviceSet::one(63));
        assert_eq!(two.iter().collect::<Vec<_>>(), [3, 63]);
        assert!(two.has(3) && two.has(63) && !two.has(0) && !two.is_empty());
        assert_eq!(two.without(DeviceSet::one(3)), DeviceSet::one(63));
        assert!(DeviceSet::ALL.meets(two) && !DeviceSet::NONE.meets(two));
        assert_eq!(DeviceSet::one(64), DeviceSet::ALL);
    }
}
