//! Rules of the operator: what is to be done when a card, or the host memory, is in a certain state.
//!
//! ```text
//!            holds            holds for as long as it says
//! quiet ───────────> pending ──────────────────────────────> fired ──┐
//!   ^                   │ does not hold                        │     │ holds, margin included
//!   └───────────────────┴──────────────────────────────────────┘ <───┘
//!                                does not hold, not even with the margin
//! ```
//! A rule fires once, and again only after its condition did not hold by a margin: a figure that swings about the
//! threshold does not set it off each time. With `dry_run` it only says what it would have done. Each card has its own
//! state. [`Engine`] is pure: the driver feeds it samples and does what it returns.

mod condition;
pub(crate) mod notify;

use std::collections::BTreeMap;
use std::time::Duration;

use ebb_policy::Time;
use ebb_units::{DeviceId, Priority};
use serde::Deserialize;

pub use condition::{Condition, Figure, Sample, Value};

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deed {
    /// Everybody on the card gives back what it does not use. No copy.
    Trim,
    /// Idle tasks of a priority on the card give back what they have above their requests.
    Shrink(Priority),
    /// A task, by name or number, or all of a priority, is evicted and kept off its cards.
    Pause(String),
    /// And may run again.
    Resume(String),
    /// A task, or all of a priority, saves itself in its own way and gives way (`ebb run --checkpoint`).
    Checkpoint(String),
    /// Whoever is to be notified hears of it.
    Notify,
}

impl std::str::FromStr for Deed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (word, rest) = text
            .trim()
            .split_once(char::is_whitespace)
            .unwrap_or((text.trim(), ""));
        let rest = rest.trim();
        match (word, rest) {
            ("trim", "") => Ok(Self::Trim),
            ("notify", "") => Ok(Self::Notify),
            ("shrink", rest) => rest
                .parse()
                .map(Self::Shrink)
                .map_err(|_| format!("`{text}`: after shrink stands high, normal or low")),
            ("pause", rest) if !rest.is_empty() => Ok(Self::Pause(rest.into())),
            ("resume", rest) if !rest.is_empty() => Ok(Self::Resume(rest.into())),
            ("checkpoint", rest) if !rest.is_empty() => Ok(Self::Checkpoint(rest.into())),
            ("pause" | "resume" | "checkpoint", _) => {
                Err(format!("`{text}`: which task, or which priority?"))
            }
            _ => Err(format!(
                "`{text}` is nothing that can be done; write trim, shrink PRIORITY, pause TASK, resume TASK, checkpoint TASK or notify"
            )),
        }
    }
}

impl std::fmt::Display for Deed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Trim => f.write_str("trim"),
            Self::Shrink(priority) => write!(f, "shrink {}", priority.as_str()),
            Self::Pause(task) => write!(f, "pause {task}"),
            Self::Resume(task) => write!(f, "resume {task}"),
            Self::Checkpoint(task) => write!(f, "checkpoint {task}"),
            Self::Notify => f.write_str("notify"),
        }
    }
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// What it is called in the log and in notifications.
    pub name: String,
    /// When it fires.
    #[serde(deserialize_with = "parsed")]
    pub when: Condition,
    /// What is done then, in this order.
    #[serde(rename = "do", deserialize_with = "all_parsed")]
    pub deeds: Vec<Deed>,
    /// By how much its condition has to fail before it can fire again, in thousandths: of the whole for parts, of the size
    /// for sizes.
    #[serde(default = "margin", deserialize_with = "percent")]
    pub margin: u32,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

fn margin() -> u32 {
    50
}

// Errors of these are given by the reader of the file with the line and the column of the value.

fn parsed<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Condition, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(serde::de::Error::custom)
}

/// A deed as it is written.
struct Written(Deed);

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

fn all_parsed<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Deed>, D::Error> {
    let written = Vec::<Written>::deserialize(deserializer)?;
    if written.is_empty() {
        return Err(serde::de::Error::custom("a rule that does nothing"));
    }
    Ok(written.into_iter().map(|w| w.0).collect())
}

fn percent<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let text = String::deserialize(deserializer)?;
    crate::config::parse_percent(&text).map_err(serde::de::Error::custom)
}

/// Whom to notify, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NotifyConfig {
    /// A command for `sh -c`, with the news as JSON on its standard input.
    pub command: Option<String>,
    /// An `http://` address that is posted the same.
    #[serde(default, deserialize_with = "webhook")]
    pub webhook: Option<notify::Webhook>,
}

fn webhook<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<notify::Webhook>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Where a rule stands on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Pending(Time),
    Fired,
}

/// All rules and where they stand.
#[derive(Debug, Default)]
pub struct Engine {
    rules: Vec<Rule>,
    standing: BTreeMap<(usize, DeviceId), Standing>,
}

impl Engine {
    /// Goes on with these rules. One that is as before keeps its standing.
    pub fn set(&mut self, rules: Vec<Rule>) {
        let mut standing = BTreeMap::new();
        for (new, rule) in rules.iter().enumerate() {
            if let Some(old) = self.rules.iter().position(|r| r == rule) {
                let kept = self.standing.iter().filter(|((n, _), _)| *n == old);
                standing.extend(kept.map(|((_, device), s)| ((new, *device), *s)));
            }
        }
        self.rules = rules;
        self.standing = standing;
    }

    /// Whether there is anything to look at.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Takes in a card's figures: the rules that fire now, in the file's order.
    pub fn look(&mut self, now: Time, device: DeviceId, sample: &Sample) -> Vec<&Rule> {
        let mut fired = Vec::new();
        for (n, rule) in self.rules.iter().enumerate() {
            let key = (n, device);
            let next = match self.standing.get(&key) {
                Some(Standing::Fired) => rule.when.holds(sample, rule.margin).then_some(Standing::Fired),
                before => rule.when.holds(sample, 0).then(|| {
                    let since = match before {
                        Some(Standing::Pending(since)) => *since,
                        _ => now,
                    };
                    if now.since(since) >= rule.when.lasting {
                        fired.push(rule);
                        Standing::Fired
                    } else {
                        Standing::Pending(since)
                    }
                }),
            };
            match next {
                Some(next) => self.standing.insert(key, next),
                None => self.standing.remove(&key),
            };
        }
        fired
    }

    /// When a rule that is pending would fire.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        let pending = self
            .standing
            .iter()
            .filter_map(|((n, _), standing)| match standing {
                Standing::Pending(since) => Some(since.after(self.rules[*n].when.lasting)),
                Standing::Fired => None,
            });
        pending.min()
    }
}

/// How often the driver looks.
pub(crate) const EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_units::Bytes;

    const CARD: DeviceId = DeviceId(0);

    fn rule(when: &str) -> Rule {
        Rule {
            name: "full".into(),
            when: when.parse().unwrap(),
            deeds: vec![Deed::Trim],
            margin: 50,
            dry_run: false,
        }
    }

    fn look(engine: &mut Engine, ms: u64, used: u64) -> usize {
        let sample = Sample {
            capacity: Bytes::gib(100),
            used: Bytes::gib(used),
            ..Sample::default()
        };
        engine.look(Time::from_millis(ms), CARD, &sample).len()
    }

    #[test]
    fn a_rule_fires_once_when_it_has_held_for_long_enough() {
        let mut engine = Engine::default();
        engine.set(vec![rule("device.used > 92% for 30s")]);
        assert_eq!(look(&mut engine, 0, 95), 0);
        assert_eq!(engine.next(), Some(Time::from_millis(30_000)));
        assert_eq!(look(&mut engine, 29_000, 95), 0);
        assert_eq!(look(&mut engine, 29_500, 90), 0, "a break begins it anew");
        assert_eq!(look(&mut engine, 30_000, 95), 0);
        assert_eq!(look(&mut engine, 60_000, 95), 1);
        assert_eq!(look(&mut engine, 90_000, 95), 0);
    }

    #[test]
    fn swinging_about_the_threshold_fires_once() {
        let mut engine = Engine::default();
        engine.set(vec![rule("device.used > 92%")]);
        let fired: usize = (0..100)
            .map(|n| look(&mut engine, n * 1000, 90 + 4 * (n % 2)))
            .sum();
        assert_eq!(fired, 1);
        assert_eq!(look(&mut engine, 200_000, 80), 0);
        assert_eq!(look(&mut engine, 201_000, 93), 1, "and again after it was over");
    }

    #[test]
    fn a_rule_that_stays_keeps_its_standing_through_a_change_of_others() {
        let mut engine = Engine::default();
        engine.set(vec![rule("device.used > 92%")]);
        assert_eq!(look(&mut engine, 0, 95), 1);
        engine.set(vec![rule("device.free < 1Gi"), rule("device.used > 92%")]);
        assert_eq!(look(&mut engine, 1000, 95), 0);
        engine.set(vec![rule("device.used > 91%")]);
        assert_eq!(look(&mut engine, 2000, 95), 1, "a new one");
    }

    #[test]
    fn deeds_are_read_and_written() {
        for text in [
            "trim",
            "shrink low",
            "pause batch",
            "resume batch",
            "checkpoint batch",
            "notify",
        ] {
            assert_eq!(text.parse::<Deed>().unwrap().to_string(), text);
        }
        for text in ["shrink", "shrink big", "pause", "explode", ""] {
            assert!(text.parse::<Deed>().is_err(), "{text}");
        }
    }
}
