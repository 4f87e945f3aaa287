//! [`Bytes`]: an amount of memory.

use core::fmt;
use core::iter::Sum;
use core::ops::{Add, AddAssign, Sub, SubAssign};

/// The granule: the smallest piece of physical GPU memory that the driver hands out, 2 MiB on today's cards.
///
/// Accounting rounds to it. Code that talks to a device asks the device for its own granularity.
pub const GRANULE: Bytes = Bytes(2 << 20);

/// An amount of memory in bytes.
///
/// Arithmetic with `+` and `-` panics on overflow in every profile that checks it and saturates nowhere;
/// where a peer's number is involved use the `saturating_*` or `checked_*` forms.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);
    /// The largest amount; stands for "no bound".
    pub const MAX: Self = Self(u64::MAX);

    /// `n` KiB.
    #[must_use]
    #[inline]
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB.
    #[must_use]
    #[inline]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    #[must_use]
    #[inline]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The plain number.
    #[must_use]
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The number as a size in this process's memory.
    ///
    /// # Panics
    /// If the amount does not fit an address, which no amount of real memory does on a 64-bit machine.
    #[must_use]
    pub fn to_usize(self) -> usize {
        usize::try_from(self.0).expect("an amount of memory fits an address on 64-bit machines")
    }

    /// Whether this is nothing.
    #[must_use]
    #[inline]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Rounds up to a multiple of `unit`, saturating at the largest multiple.
    #[must_use]
    #[inline]
    pub const fn round_up(self, unit: Self) -> Self {
        let rest = self.0 % unit.0;
        if rest == 0 {
            return self;
        }
        match self.0.checked_add(unit.0 - rest) {
            Some(n) => Self(n),
            None => Self(u64::MAX - u64::MAX % unit.0),
        }
    }

    /// Rounds down to a multiple of `unit`.
    #[must_use]
    #[inline]
    pub const fn round_down(self, unit: Self) -> Self {
        Self(self.0 - self.0 % unit.0)
    }

    /// `self + other`, or the largest amount.
    #[must_use]
    #[inline]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// `self - other`, or nothing.
    #[must_use]
    #[inline]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `self + other` unless it overflows.
    #[must_use]
    #[inline]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// `self - other` unless it would be negative.
    #[must_use]
    #[inline]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        self.0 -= other.0;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Self::saturating_add)
    }
}

impl fmt::Display for Bytes {
    /// The amount as people read it: binary units, one decimal where it says something (`6.2 GiB`).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (name, shift) in UNITS {
            let unit = 1u64 << shift;
            if self.0 >= unit {
                let text = if self.0.is_multiple_of(unit) {
                    format!("{} {name}", self.0 / unit)
                } else {
                    // Rounded down: a figure on screen never claims more than there is.
                    let tenths = u128::from(self.0) * 10 / u128::from(unit);
                    format!("{}.{} {name}", tenths / 10, tenths % 10)
                };
                return f.pad(&text);
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_goes_to_the_granule_and_never_overflows() {
        assert_eq!(Bytes(0).round_up(GRANULE), Bytes(0));
        assert_eq!(Bytes(1).round_up(GRANULE), GRANULE);
        assert_eq!(GRANULE.round_up(GRANULE), GRANULE);
        assert_eq!(
            Bytes::MAX.round_up(GRANULE),
            Bytes(u64::MAX - u64::MAX % GRANULE.0)
        );
        assert_eq!(Bytes(GRANULE.0 * 3 - 1).round_down(GRANULE), Bytes(GRANULE.0 * 2));
    }

    #[test]
    fn display_uses_binary_units_and_never_rounds_up() {
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Bytes::kib(1).to_string(), "1 KiB");
        assert_eq!(Bytes(1536 << 20).to_string(), "1.5 GiB");
        assert_eq!(Bytes((2 << 30) - 1).to_string(), "1.9 GiB");
        assert_eq!(format!("{:>10}", Bytes::gib(3)), "     3 GiB");
    }

    #[test]
    fn sums_saturate() {
        assert_eq!([Bytes::MAX, Bytes(1)].into_iter().sum::<Bytes>(), Bytes::MAX);
    }
}
