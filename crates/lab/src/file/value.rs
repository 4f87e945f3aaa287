//! Values of a scenario file: sizes, times, parts, policies. Each says what is wrong with it in its own words.

use std::time::Duration;

use ebb_units::{Bytes, Priority};
use serde::{Deserialize, Deserializer, de};

use crate::cluster::Policy;

/// A size: `80Gi`, or a plain number of bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Size(pub(super) Bytes);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map(Self).map_err(de::Error::custom)
    }
}

/// A time: `250ms`, `30s`, `5m`, `1.5h`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seconds(pub(super) f64);

pub(super) fn seconds(text: &str) -> Result<f64, String> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let wrong = || format!("`{text}` is not a time; write one like 250ms, 30s, 5m or 1.5h");
    let number: f64 = text[..end].parse().map_err(|_| wrong())?;
    let unit = match &text[end..] {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(wrong()),
    };
    // Times are counted in nanoseconds of 64 bits.
    Some(number * unit)
        .filter(|s| *s <= 1e9)
        .ok_or_else(|| format!("`{text}` is longer than a simulation can be"))
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        seconds(&String::deserialize(d)?)
            .map(Self)
            .map_err(de::Error::custom)
    }
}

/// A time, or `off`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct OrOff(pub(super) Option<Duration>);

impl<'de> Deserialize<'de> for OrOff {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        if text == "off" {
            return Ok(Self(None));
        }
        seconds(&text)
            .map(|s| Self(Some(Duration::from_secs_f64(s))))
            .map_err(de::Error::custom)
    }
}

/// A part of a whole, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Part(pub(super) f64);

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let part = f64::deserialize(d)?;
        if (0.0..=1.0).contains(&part) {
            Ok(Self(part))
        } else {
            Err(de::Error::custom(format!(
                "{part} is no part of a whole: from 0 to 1"
            )))
        }
    }
}

/// A count of at least one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Count(pub(super) usize);

/// More of anything is a mistake.
const MOST: u64 = 10_000_000;

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let count = u64::deserialize(d)?;
        usize::try_from(count)
            .ok()
            .filter(|_| (1..=MOST).contains(&count))
            .map(Self)
            .ok_or_else(|| de::Error::custom(format!("{count} is no count: from 1 to {MOST}")))
    }
}

/// `low`, `normal`, `high`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Class(pub(super) Priority);

impl<'de> Deserialize<'de> for Class {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        match text.as_str() {
            "low" => Ok(Self(Priority::Low)),
            "normal" => Ok(Self(Priority::Normal)),
            "high" => Ok(Self(Priority::High)),
            _ => Err(de::Error::custom(format!(
                "`{text}` is no priority: low, normal or high"
            ))),
        }
    }
}

/// A policy: `ebb`, `static`, `quotas`, `slices 30s`, `keep-alive 5m`, `oracle`.
pub(super) fn policy(text: &str) -> Result<Policy, String> {
    let (name, time) = text.split_once(' ').unwrap_or((text, ""));
    let timed = |usual: f64| -> Result<f64, String> {
        let time = if time.is_empty() { usual } else { seconds(time)? };
        Some(time)
            .filter(|t| *t > 0.0)
            .ok_or_else(|| format!("`{text}`: a time of zero"))
    };
    match (name, time) {
        ("ebb", "") => Ok(Policy::Ebb),
        ("static", "") => Ok(Policy::Static),
        ("quotas", "") => Ok(Policy::Quotas),
        ("oracle", "") => Ok(Policy::Oracle),
        ("slices", _) => timed(30.0).map(Policy::Slices),
        ("keep-alive", _) => timed(300.0).map(Policy::KeepAlive),
        _ => Err(format!(
            "`{text}` is no policy: ebb, static, quotas, slices 30s, keep-alive 5m or oracle"
        )),
    }
}
