//! [`DeviceUuid`]: which card, whatever its index is in this or that list.

use core::fmt;
use core::str::FromStr;

/// A GPU's identity. Indices differ between CUDA, NVML and every visibility mask; this does not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceUuid(pub [u8; 16]);

/// A text that is no device identity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a GPU UUID; expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")]
pub struct UuidError(String);

impl fmt::Display for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for DeviceUuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let bad = || UuidError(text.into());
        let body = text.strip_prefix("GPU-").unwrap_or(text);
        let hex: Vec<u8> = body.bytes().filter(|b| *b != b'-').collect();
        if hex.len() != 32 || !hex.iter().all(u8::is_ascii_hexdigit) {
            return Err(bad());
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
            let pair = core::str::from_utf8(pair).map_err(|_| bad())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| bad())?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for DeviceUuid {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for DeviceUuid {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_short_or_foreign_text_is_refused() {
        for text in [
            "",
            "GPU-",
            "GPU-12",
            "MIG-0011",
            "GPU-zz000000-0000-0000-0000-000000000000",
        ] {
            assert!(text.parse::<DeviceUuid>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_written_uuid_reads_back(bytes: [u8; 16]) {
            prop_assert_eq!(DeviceUuid(bytes).to_string().parse(), Ok(DeviceUuid(bytes)));
        }
    }
}
