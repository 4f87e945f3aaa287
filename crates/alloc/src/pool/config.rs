//! [`Config`]: what an owner of a pool decides once.

/// How sizes are rounded, how memory is cut, and when it grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Bytes of the smallest piece of physical memory: what the driver answers for the properties that chunks are made with.
    pub granule: u64,
    /// Every size is rounded up to a multiple of this, and every address is one.
    pub quantum: u64,
    /// Steps in which sizes grow between one power of two and the next (`roundup_power2_divisions` of PyTorch); 0: sizes
    /// are rounded to the quantum alone. Coarse steps waste memory inside blocks and make more blocks interchangeable.
    pub divisions: u64,
    /// The largest chunk that growing makes, in bytes, unless an allocation would need more than 64 of them.
    pub chunk_max: u64,
    /// Idle memory that growing leaves alone instead of stitching it, in thousandths of the physical memory. 0 grows only
    /// when everything is in use; each step above saves map calls while a program warms up.
    pub slack_permille: u64,
    /// The most stitched views that are kept for their next use.
    pub views_max: usize,
    /// Physical bytes that the pool may have.
    pub limit: u64,
}

impl Config {
    /// What is right for a card with this granule: the driver's own alignment, exact sizes, no slack, no limit.
    #[must_use]
    pub const fn for_granule(granule: u64) -> Self {
        Self {
            granule,
            quantum: if granule < 512 { granule } else { 512 },
            divisions: 0,
            chunk_max: 64 << 20,
            slack_permille: 0,
            views_max: 4096,
            limit: u64::MAX,
        }
    }

    /// The bytes that a block of `size` bytes takes; `None` if that is no number. Nothing takes one quantum.
    #[must_use]
    pub fn round(&self, size: u64) -> Option<u64> {
        let exact = size.max(1).checked_next_multiple_of(self.quantum)?;
        if self.divisions < 2 || exact <= self.quantum {
            return Some(exact);
        }
        // The power of two at or below, and the step between it and the next one.
        let power = 1u64 << (63 - exact.leading_zeros());
        let step = (power / self.divisions).max(self.quantum);
        exact
            .checked_next_multiple_of(step)?
            .checked_next_multiple_of(self.quantum)
    }

    /// The lengths of the chunks that grow by `granules`, in granules.
    pub(super) fn cut(&self, granules: u64) -> impl Iterator<Item = u64> + use<> {
        const HANDLES_MAX: u64 = 64;
        let most = (self.chunk_max / self.granule)
            .max(granules.div_ceil(HANDLES_MAX))
            .max(1);
        let mut rest = granules;
        std::iter::from_fn(move || {
            let next = rest.min(most);
            rest -= next;
            (next > 0).then_some(next)
        })
    }

    pub(super) const fn down(&self, at: u64) -> u64 {
        at - at % self.granule
    }

    pub(super) const fn up(&self, at: u64) -> u64 {
        at.div_ceil(self.granule) * self.granule
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_to_the_quantum_or_to_steps_between_powers_of_two() {
        let exact = Config::for_granule(2 << 20);
        assert_eq!(
            [0, 1, 512, 513, 6912].map(|n| exact.round(n)),
            [512, 512, 512, 1024, 7168].map(Some)
        );
        assert_eq!(exact.round(u64::MAX), None);
        let steps = Config {
            divisions: 4,
            ..exact
        };
        assert_eq!(
            [512, 1100, 4096, 4097, 5121, (1 << 20) + 1].map(|n| steps.round(n)),
            [512, 1536, 4096, 5120, 6144, (1 << 20) + (1 << 18)].map(Some)
        );
        for n in 1..10_000 {
            let one = steps.round(n).unwrap_or(0);
            assert!(
                one >= n && one.is_multiple_of(512) && one <= n.max(512).next_multiple_of(512) * 5 / 4 + 512
            );
        }
    }

    #[test]
    fn growth_is_cut_into_chunks_and_never_into_very_many() {
        let config = Config::for_granule(2 << 20);
        assert_eq!(config.cut(70).collect::<Vec<_>>(), [32, 32, 6]);
        assert_eq!(config.cut(0).count(), 0);
        assert!(config.cut(1 << 40).count() <= 64);
        assert_eq!(config.cut(1 << 40).sum::<u64>(), 1 << 40);
    }
}
