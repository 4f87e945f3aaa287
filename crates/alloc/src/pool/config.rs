//! [`Config`]: what an owner of a pool decides once.

use ebb_units::Bytes;

/// Why settings were not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// No setting has that name.
    #[error("unknown setting {0:?}; there are granularity, divisions, chunk, slack, views")]
    Unknown(String),
    /// It has no value, or none that it can have.
    #[error("{name}: {value:?} is not {expected}")]
    Value {
        /// Which setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it can have.
        expected: &'static str,
    },
}

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
    /// The most that may be idle when most is in use, in thousandths of that, of a pool that would map anew without an end otherwise; see
    /// [`super::Pool::second`]. 0 grows only when everything is in use.
    pub slack_permille: u64,
    /// The most stitched views that are kept for their next use.
    pub views_max: usize,
    /// Physical bytes that the pool may have.
    pub limit: u64,
}

impl Config {
    /// What is right for a card with this granule: the driver's own alignment, exact sizes, no limit.
    #[must_use]
    pub const fn for_granule(granule: u64) -> Self {
        Self {
            granule,
            quantum: if granule < 512 { granule } else { 512 },
            divisions: 0,
            chunk_max: 64 << 20,
            slack_permille: 125,
            views_max: 4096,
            limit: u64::MAX,
        }
    }

    /// Changes what `text` says: `name:value` or `name=value`, separated by commas, as in `granularity:512,chunk:64Mi`.
    ///
    /// | name | value |
    /// | --- | --- |
    /// | `granularity` | the quantum: bytes, a divisor of the granule |
    /// | `divisions` | 0, or a power of two: see [`Self::divisions`] |
    /// | `chunk` | bytes, at least a granule: see [`Self::chunk_max`] |
    /// | `slack` | thousandths, at most 1000: see [`Self::slack_permille`] |
    /// | `views` | how many: see [`Self::views_max`] |
    ///
    /// # Errors
    /// [`SettingError`] for the first that is wrong; nothing changes.
    pub fn set(&mut self, text: &str) -> Result<(), SettingError> {
        let mut config = *self;
        for setting in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            let (name, value) = setting.split_once([':', '=']).unwrap_or((setting, ""));
            config.set_one(name.trim(), value.trim())?;
        }
        *self = config;
        Ok(())
    }

    fn set_one(&mut self, name: &str, value: &str) -> Result<(), SettingError> {
        let bytes = || value.parse::<Bytes>().ok().map(|bytes| bytes.0);
        let wrong = |name, expected| SettingError::Value {
            name,
            value: value.into(),
            expected,
        };
        match name {
            "granularity" => {
                self.quantum = bytes()
                    .filter(|n| *n > 0 && self.granule.is_multiple_of(*n))
                    .ok_or_else(|| wrong("granularity", "a divisor of the granule"))?;
            }
            "divisions" => {
                self.divisions = value
                    .parse()
                    .ok()
                    .filter(|n: &u64| *n == 0 || n.is_power_of_two())
                    .ok_or_else(|| wrong("divisions", "0 or a power of two"))?;
            }
            "chunk" => {
                self.chunk_max = bytes()
                    .filter(|n| *n >= self.granule)
                    .ok_or_else(|| wrong("chunk", "a size of at least a granule"))?;
            }
            "slack" => {
                self.slack_permille = value
                    .parse()
                    .ok()
                    .filter(|n| *n <= 1000)
                    .ok_or_else(|| wrong("slack", "a number of thousandths"))?;
            }
            "views" => self.views_max = value.parse().map_err(|_| wrong("views", "a number"))?,
            other => return Err(SettingError::Unknown(other.into())),
        }
        Ok(())
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
    fn settings_change_all_or_nothing() {
        let mut config = Config::for_granule(2 << 20);
        config
            .set("granularity:1Ki, divisions=4,chunk:1Gi,slack:5,views:10,")
            .unwrap();
        assert_eq!(
            (
                config.quantum,
                config.divisions,
                config.chunk_max,
                config.slack_permille,
                config.views_max
            ),
            (1024, 4, 1 << 30, 5, 10)
        );
        let before = config;
        assert_eq!(config.set(""), Ok(()));
        assert_eq!(
            config.set("slack:1,colour:red"),
            Err(SettingError::Unknown("colour".into()))
        );
        for wrong in [
            "granularity:3",
            "granularity:0",
            "divisions:3",
            "chunk:1Mi",
            "chunk",
            "slack:1001",
            "views:many",
        ] {
            assert!(
                matches!(config.set(wrong), Err(SettingError::Value { .. })),
                "{wrong}"
            );
        }
        assert_eq!(config, before);
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
