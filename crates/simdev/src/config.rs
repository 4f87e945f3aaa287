//! How a simulated machine is configured: environment variables.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `EBB_SIM_DIR` | state folder that all processes of one machine share | `/dev/shm/ebb-sim-<uid>` |
//! | `EBB_SIM_DEVICES` | number of devices, 0 to 16 | 1 |
//! | `EBB_SIM_MEMORY` | bytes of each device, a quantity | `1Gi` |
//! | `EBB_SIM_CONTEXT_BYTES` | what a context costs, a quantity | `16Mi` |
//! | `EBB_SIM_MPS_CLIENT_BYTES` | the machine runs MPS, and this is what each client's context costs instead, a quantity | 0: no MPS |
//! | `EBB_SIM_MPS_SERVER_BYTES` | what the MPS server costs on a device while any client has a context there, a quantity | 0 |
//! | `EBB_SIM_MODULE_BYTES` | what each module costs its process from its first function on (at loading, if `CUDA_MODULE_LOADING=EAGER`), a quantity | 0 |
//! | `EBB_SIM_MIG` | each card is cut into so many devices (MIG), 0 to 7; `EBB_SIM_DEVICES` counts these | 0: no MIG |
//! | `EBB_SIM_NVLINK` | the devices are linked with each other as by NVLink: 0 or 1 | 0 |
//! | `EBB_SIM_GRANULARITY` | granularity of `cuMemCreate`, a power of two of at least 4 KiB | `2Mi` |
//! | `EBB_SIM_LINK_BYTES_PER_S` | speed of each direction of the link, a quantity; 0: copies take no extra time | 0 |
//! | `EBB_SIM_LINK_LATENCY_US` | microseconds that each copy over the link takes in addition | 0 |
//! | `EBB_SIM_FAULT` | which calls fail, see `faults` in the driver | |
//! | `EBB_SIM_TRACE` | file to which each call's name is appended, one a line | |
//! | `CUDA_VISIBLE_DEVICES` | as with the real driver | |
//!
//! All but `EBB_SIM_MODULE_BYTES`, `EBB_SIM_MIG`, `EBB_SIM_NVLINK` and the last three are properties of the machine: the first process to open a state folder fixes them.

use std::fmt;
use std::path::PathBuf;

use ebb_units::Bytes;

use crate::file::MAX_DEVICES;

/// What a machine is made of. Later processes read this from the state folder instead of their environment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// The state folder.
    pub dir: PathBuf,
    /// How many devices there are.
    pub devices: u32,
    /// Bytes of each device.
    pub memory: u64,
    /// Bytes that a context costs.
    pub context_bytes: u64,
    /// Bytes that an MPS client's context costs; 0 means no MPS.
    pub mps_client_bytes: u64,
    /// Bytes that the MPS server costs on a device while any client has a context there.
    pub mps_server_bytes: u64,
    /// Bytes that each module costs this process.
    pub module_bytes: u64,
    /// How many devices a card is cut into; 0 means that cards are not cut.
    pub mig: u32,
    /// The devices are linked as by NVLink.
    pub nvlink: bool,
    /// Granularity of physical allocations in bytes.
    pub granularity: u64,
    /// Bytes per second of each direction of the link; 0 means no limit.
    pub link_bytes_per_s: u64,
    /// Nanoseconds that every copy over the link takes in addition.
    pub link_latency_ns: u64,
}

/// An environment variable whose value makes no sense. The user's fault; trying again does not help.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// The variable.
    pub variable: &'static str,
    /// What it holds.
    pub value: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={:?} is not understood", self.variable, self.value)
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// What a context costs: under MPS, a client's.
    #[must_use]
    pub fn context_cost(&self) -> u64 {
        match self.mps_client_bytes {
            0 => self.context_bytes,
            client => client,
        }
    }

    /// The card that a device is, or is a slice of.
    #[must_use]
    pub fn card_of(&self, device: u32) -> u32 {
        device / self.mig.max(1)
    }

    /// How many cards there are.
    #[must_use]
    pub fn cards(&self) -> u32 {
        self.devices.div_ceil(self.mig.max(1))
    }

    /// The devices of a card.
    #[must_use]
    pub fn devices_of(&self, card: u32) -> core::ops::Range<u32> {
        let slices = self.mig.max(1);
        (card * slices).min(self.devices)..((card + 1) * slices).min(self.devices)
    }

    /// Reads the configuration of this process's environment.
    ///
    /// # Errors
    /// A variable that does not parse.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_lookup(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
    }

    /// The same from any source of variables.
    ///
    /// # Errors
    /// A variable that does not parse.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let quantity = |variable: &'static str, default: u64| match lookup(variable) {
            None => Ok(default),
            Some(value) => match value.trim().parse::<Bytes>() {
                Ok(bytes) => Ok(bytes.get()),
                Err(_) => Err(ConfigError { variable, value }),
            },
        };
        let number = |variable: &'static str, default: u64, max: u64| match lookup(variable) {
            None => Ok(default),
            Some(value) => match value.trim().parse::<u64>() {
                Ok(number) if number <= max => Ok(number),
                _ => Err(ConfigError { variable, value }),
            },
        };
        let granularity = quantity("EBB_SIM_GRANULARITY", 2 << 20)?;
        if !granularity.is_power_of_two() || granularity < 4096 {
            let value = lookup("EBB_SIM_GRANULARITY").unwrap_or_default();
            return Err(ConfigError {
                variable: "EBB_SIM_GRANULARITY",
                value,
            });
        }
        let devices = number("EBB_SIM_DEVICES", 1, MAX_DEVICES as u64)?;
        Ok(Self {
            dir: lookup("EBB_SIM_DIR").map_or_else(default_dir, PathBuf::from),
            devices: u32::try_from(devices).unwrap_or(u32::MAX),
            memory: quantity("EBB_SIM_MEMORY", 1 << 30)?,
            context_bytes: quantity("EBB_SIM_CONTEXT_BYTES", 16 << 20)?,
            mps_client_bytes: quantity("EBB_SIM_MPS_CLIENT_BYTES", 0)?,
            mps_server_bytes: quantity("EBB_SIM_MPS_SERVER_BYTES", 0)?,
            module_bytes: quantity("EBB_SIM_MODULE_BYTES", 0)?,
            mig: u32::try_from(number("EBB_SIM_MIG", 0, 7)?).unwrap_or(0),
            nvlink: number("EBB_SIM_NVLINK", 0, 1)? == 1,
            granularity,
            link_bytes_per_s: quantity("EBB_SIM_LINK_BYTES_PER_S", 0)?,
            link_latency_ns: number("EBB_SIM_LINK_LATENCY_US", 0, 60_000_000)? * 1000,
        })
    }
}

fn default_dir() -> PathBuf {
    // SAFETY: getuid has no preconditions and cannot fail.
    let uid = unsafe { libc::getuid() };
    PathBuf::from(format!("/dev/shm/ebb-sim-{uid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_lookup(|name| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn defaults() {
        let config = with(&[]).unwrap();
        assert_eq!(
            (config.devices, config.memory, config.context_bytes),
            (1, 1 << 30, 16 << 20)
        );
        assert_eq!((config.granularity, config.link_bytes_per_s), (2 << 20, 0));
    }

    #[test]
    fn cards_are_cut_into_devices() {
        let config = with(&[("EBB_SIM_DEVICES", "5"), ("EBB_SIM_MIG", "2")]).unwrap();
        assert_eq!(
            (config.cards(), config.card_of(3), config.devices_of(2)),
            (3, 1, 4..5)
        );
        let whole = with(&[("EBB_SIM_DEVICES", "2")]).unwrap();
        assert_eq!(
            (whole.cards(), whole.card_of(1), whole.devices_of(1)),
            (2, 1, 1..2)
        );
    }

    #[test]
    fn quantities_and_bad_values() {
        let config = with(&[("EBB_SIM_MEMORY", "512Mi"), ("EBB_SIM_GRANULARITY", "64Ki")]).unwrap();
        assert_eq!((config.memory, config.granularity), (512 << 20, 64 << 10));
        for (name, value) in [
            ("EBB_SIM_MEMORY", "much"),
            ("EBB_SIM_GRANULARITY", "3Mi"),
            ("EBB_SIM_GRANULARITY", "1Ki"),
            ("EBB_SIM_DEVICES", "17"),
            ("EBB_SIM_LINK_LATENCY_US", "-1"),
            ("EBB_SIM_MIG", "8"),
        ] {
            assert_eq!(
                with(&[(name, value)]).unwrap_err().variable,
                name,
                "{name}={value}"
            );
        }
    }
}
