//! Identities that the daemon hands out, and priorities.

use core::fmt;
use core::str::FromStr;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(transparent))]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&format!(concat!($prefix, "{}"), self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

id!(
    /// One `ebb run`: the unit that has a request, a limit and a priority. Never reused by one daemon, and a
    /// restarted daemon goes on above the ids that its clients re-declare.
    TaskId(u64), "t"
);
id!(
    /// One process on one device, as the daemon knows it. Never reused, so that a late message about a process
    /// that died cannot reach its successor.
    ClientId(u64), "c"
);
id!(
    /// A device's place in the daemon's own list. Only meaningful inside one daemon; [`crate::DeviceUuid`] is identity.
    DeviceId(u32), "gpu"
);
id!(
    /// One order to give bytes back.
    OrderId(u64), "o"
);

/// Who goes first when not all fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum Priority {
    /// Runs on what others leave, but is never starved.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Served first and given longer turns.
    High,
}

impl Priority {
    /// The word that people write.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }

    /// A number for messages: 0 low, 1 normal, 2 high.
    #[must_use]
    pub const fn to_wire(self) -> u32 {
        match self {
            Self::Low => 0,
            Self::Normal => 1,
            Self::High => 2,
        }
    }

    /// The inverse of [`Self::to_wire`]; an unknown number is the default, since it comes from a newer peer.
    #[must_use]
    pub const fn from_wire(n: u32) -> Self {
        match n {
            0 => Self::Low,
            2 => Self::High,
            _ => Self::Normal,
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that is no priority.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a priority; use high, normal or low")]
pub struct PriorityError(String);

impl FromStr for Priority {
    type Err = PriorityError;

    fn from_str(text: &str) -> Result<Self, PriorityError> {
        match text {
            "low" => Ok(Self::Low),
            "normal" => Ok(Self::Normal),
            "high" => Ok(Self::High),
            _ => Err(PriorityError(text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_order_and_read_back() {
        assert!(Priority::High > Priority::Normal && Priority::Normal > Priority::Low);
        for p in [Priority::Low, Priority::Normal, Priority::High] {
            assert_eq!(p.as_str().parse(), Ok(p));
            assert_eq!(Priority::from_wire(p.to_wire()), p);
        }
        assert!("urgent".parse::<Priority>().is_err());
    }

    #[test]
    fn ids_say_what_they_are() {
        assert_eq!(
            (TaskId(3).to_string(), ClientId(4).to_string()),
            ("t3".into(), "c4".into())
        );
        assert_eq!(format!("{:<6}|", DeviceId(0)), "gpu0  |");
    }
}
