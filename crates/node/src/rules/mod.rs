//! Rules of the operator: what is to be done when a card, or the host memory, is in a certain state.
//!
//! ```text
//!            holds            holds for as long as it says, and the last time is long enough ago
//! quiet ───────────> pending ────────────────────────────────────────────────────────────────────> fired ──┐
//!   ^                   │ does not hold                                                              │     │ holds, margin included
//!   └───────────────────┴────────────────────────────────────────────────────────────────────────────┘ <───┘
//!                                does not hold, not even with the margin
//! ```
//! A rule fires once, and again only after its condition did not hold by a margin, and no sooner than its `rest` after the last time: a
//! figure that swings about the threshold, or past it and back, does not set it off each time. With `dry_run` it only says what it
//! would have done. Each card has its own state. [`Engine`] is pure: the driver feeds it samples and does what it returns.

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
    #[serde(deserialize_with = "name")]
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
    /// It does not fire again on a card before so long after it fired there.
    #[serde(default = "rest", deserialize_with = "duration")]
    pub rest: Duration,
    /// Only say what would be done.
    #[serde(default)]
    pub dry_run: bool,
}

/// The longest name of a rule, in characters.
const MAX_NAME: usize = 64;

fn margin() -> u32 {
    50
}

fn rest() -> Duration {
    Duration::from_secs(60)
}

// Errors of these are given by the reader of the file with the line and the column of the value.

fn name<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.is_empty() || text.chars().count() > MAX_NAME || text.contains(char::is_control) {
        let error = format!("a name has 1 to {MAX_NAME} characters, none of them a line's end or the like");
        return Err(serde::de::Error::custom(error));
    }
    Ok(text)
}

fn duration<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    crate::config::parse_duration(&text).map_err(serde::de::Error::custom)
}

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

/// One deed, or a list of them.
struct Deeds;

impl<'de> serde::de::Visitor<'de> for Deeds {
    type Value = Vec<Deed>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("what is to be done, like [\"trim\", \"notify\"]")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        text.parse().map(|deed| vec![deed]).map_err(E::custom)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut deeds = Vec::new();
        while let Some(Written(deed)) = list.next_element()? {
            deeds.push(deed);
        }
        if deeds.is_empty() {
            return Err(serde::de::Error::custom("a rule that does nothing"));
        }
        Ok(deeds)
    }
}

fn all_parsed<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<Deed>, D::Error> {
    deserializer.deserialize_any(Deeds)
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

/// What a rule waits for on one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Its condition does not hold.
    #[default]
    Quiet,
    /// It holds since then, and the rule has not fired.
    Pending(Time),
    /// It fired, and its condition has not failed by the margin since.
    Fired,
}

/// Where a rule stands on one card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What it waits for.
    pub phase: Phase,
    /// How often it fired.
    pub fired: u64,
    /// When it did last.
    pub last: Option<Time>,
}

/// All rules and where they stand.
#[derive(Debug, Default)]
pub struct Engine {
    rules: Vec<Rule>,
    standing: BTreeMap<(usize, DeviceId), Standing>,
}

impl Rule {
    /// When it fires, if nothing changes: its condition holds since `since`.
    fn due(&self, since: Time, standing: &Standing) -> Time {
        let held = since.after(self.when.lasting);
        standing.last.map_or(held, |last| held.max(last.after(self.rest)))
    }
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

    /// All rules, in the file's order.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Where the n-th rule stands on a card.
    #[must_use]
    pub fn standing(&self, n: usize, device: DeviceId) -> Standing {
        self.standing.get(&(n, device)).copied().unwrap_or_default()
    }

    /// Takes in a card's figures: the rules that fire now, in the file's order.
    pub fn look(&mut self, now: Time, device: DeviceId, sample: &Sample) -> Vec<&Rule> {
        let mut fired = Vec::new();
        for (n, rule) in self.rules.iter().enumerate() {
            let standing = self.standing.entry((n, device)).or_default();
            let margin = if standing.phase == Phase::Fired {
                rule.margin
            } else {
                0
            };
            standing.phase = match standing.phase {
                _ if !rule.when.holds(sample, margin) => Phase::Quiet,
                Phase::Fired => Phase::Fired,
                phase => {
                    let since = match phase {
                        Phase::Pending(since) => since,
                        _ => now,
                    };
                    if now >= rule.due(since, standing) {
                        fired.push(rule);
                        standing.fired += 1;
                        standing.last = Some(now);
                        Phase::Fired
                    } else {
                        Phase::Pending(since)
                    }
                }
            };
        }
        fired
    }

    /// When a rule that is pending would fire.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        let due = |((n, _), standing): (&(usize, DeviceId), &Standing)| match standing.phase {
            Phase::Pending(since) => Some(self.rules[*n].due(since, standing)),
            Phase::Quiet | Phase::Fired => None,
        };
        self.standing.iter().filter_map(due).min()
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
            rest: Duration::ZERO,
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
    fn a_rule_rests_and_then_fires_for_what_still_holds() {
        let mut engine = Engine::default();
        let mut full = rule("device.used > 92%");
        full.rest = Duration::from_secs(60);
        engine.set(vec![full]);
        // Far beyond the margin, 1,000 times in 1,000 seconds.
        let fired: usize = (0..1000).map(|n| look(&mut engine, n * 1000, 95 * (n % 2))).sum();
        assert!((16..=17).contains(&fired), "once a minute: {fired}");
        let mut engine = Engine::default();
        let mut full = rule("device.used > 92%");
        full.rest = Duration::from_secs(60);
        engine.set(vec![full]);
        assert_eq!(look(&mut engine, 0, 95), 1);
        assert_eq!(look(&mut engine, 1000, 50), 0);
        assert_eq!(look(&mut engine, 2000, 95), 0, "too soon");
        assert_eq!(engine.next(), Some(Time::from_millis(60_000)));
        assert_eq!(look(&mut engine, 60_000, 95), 1, "it holds still");
        let standing = engine.standing(0, CARD);
        assert_eq!((standing.fired, standing.phase), (2, Phase::Fired));
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
    fn a_rule_is_read_and_a_wrong_one_is_refused_with_its_place() {
        let read = |text: &str| toml::from_str::<Rule>(text).map_err(|e| e.to_string());
        let one = read("name = \"full\"\nwhen = \"device.used > 90%\"\ndo = \"trim\"\n").unwrap();
        assert_eq!((one.deeds, one.rest), (vec![Deed::Trim], Duration::from_secs(60)));
        let head = "name = \"full\"\nwhen = \"device.used > 90%\"\n";
        for (text, place, said) in [
            (
                "do = 3",
                "line 3, column 6",
                "expected what is to be done, like [\"trim\"",
            ),
            (
                "do = [\"explode\"]",
                "line 3, column 6",
                "`explode` is nothing that can be done",
            ),
            ("do = []", "line 3, column 6", "a rule that does nothing"),
            (
                "do = \"trim\"\nrest = \"soon\"",
                "line 4, column 8",
                "`soon` is not a time",
            ),
            (
                "do = \"trim\"\nmargin = 5",
                "line 4, column 10",
                "expected a string",
            ),
            (
                "do = \"trim\"\nevery = \"1m\"",
                "line 4, column 1",
                "unknown field `every`",
            ),
        ] {
            let error = read(&format!("{head}{text}\n")).unwrap_err();
            assert!(error.contains(place) && error.contains(said), "{error}");
        }
        let long = "x".repeat(65);
        let error = read(&format!(
            "name = \"{long}\"\nwhen = \"device.used > 9%\"\ndo = \"trim\"\n"
        ));
        assert!(error.unwrap_err().contains("a name has 1 to 64 characters"));
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
