//! [`Condition`]: `device.used > 92% and arena.used < 80% for 30s`.

use std::str::FromStr;
use std::time::Duration;

use ebb_units::Bytes;

use crate::config::{parse_duration, parse_percent};

/// What can be asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Leases, overheads and unmanaged memory of a card.
    Used,
    /// What is left of it.
    Free,
    /// What programs outside ebb hold.
    Unmanaged,
    /// Programs that wait for memory of the card.
    Waiting,
    /// Host memory lent to tasks.
    Arena,
}

const FIGURES: [(&str, Figure); 5] = [
    ("device.used", Figure::Used),
    ("device.free", Figure::Free),
    ("device.unmanaged", Figure::Unmanaged),
    ("device.waiting", Figure::Waiting),
    ("arena.used", Figure::Arena),
];

/// What a figure is held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// Thousandths of the card, or of the arena.
    Part(u32),
    /// Bytes.
    Bytes(Bytes),
    /// A number of programs.
    Count(u64),
}

/// One comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Test {
    figure: Figure,
    above: bool,
    or_equal: bool,
    value: Value,
}

/// What has to hold, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// As it was written, with one space between words.
    text: String,
    tests: Vec<Test>,
    /// It has to hold for so long without a break.
    pub lasting: Duration,
}

/// The figures of one card at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// What the card can give.
    pub capacity: Bytes,
    /// All that is taken of it.
    pub used: Bytes,
    /// By programs outside ebb.
    pub unmanaged: Bytes,
    /// Programs that wait.
    pub waiting: u64,
    /// Host memory lent to tasks, and the arena's budget.
    pub arena: (Bytes, Bytes),
}

impl Test {
    /// The figure in the value's unit, the whole for parts, and the value.
    fn sides(&self, s: &Sample) -> (u128, u128, u128) {
        let (figure, whole) = match self.figure {
            Figure::Used => (s.used.0, s.capacity.0),
            Figure::Free => (s.capacity.saturating_sub(s.used).0, s.capacity.0),
            Figure::Unmanaged => (s.unmanaged.0, s.capacity.0),
            Figure::Waiting => (s.waiting, 0),
            Figure::Arena => (s.arena.0.0, s.arena.1.0),
        };
        let value = match self.value {
            Value::Part(part) => u128::from(whole) * u128::from(part) / 1000,
            Value::Bytes(bytes) => u128::from(bytes.0),
            Value::Count(n) => u128::from(n),
        };
        (u128::from(figure), u128::from(whole), value)
    }

    /// Whether it holds; with a margin (in thousandths of the whole, or of the value for sizes) it holds more easily.
    fn holds(&self, s: &Sample, margin: u32) -> bool {
        let (figure, whole, value) = self.sides(s);
        let slack = match self.value {
            Value::Part(_) => whole * u128::from(margin) / 1000,
            Value::Bytes(_) => value * u128::from(margin) / 1000,
            Value::Count(_) => 0,
        };
        let equal = self.or_equal && slack == 0;
        if self.above {
            let value = value.saturating_sub(slack);
            figure > value || (equal && figure == value)
        } else {
            let value = value.saturating_add(slack);
            figure < value || (equal && figure == value)
        }
    }
}

impl std::fmt::Display for Condition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Condition {
    /// Whether all of it holds; `margin`: see [`crate::rules::Rule`].
    #[must_use]
    pub fn holds(&self, sample: &Sample, margin: u32) -> bool {
        self.tests.iter().all(|test| test.holds(sample, margin))
    }
}

/// A word and where it begins.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut rest = text;
    loop {
        let trimmed = rest.trim_start();
        let at = text.len() - trimmed.len();
        if trimmed.is_empty() {
            return words;
        }
        let operator = trimmed
            .find(|c| !matches!(c, '<' | '>' | '='))
            .unwrap_or(trimmed.len());
        let end = if operator > 0 {
            operator
        } else {
            trimmed
                .find(|c: char| c.is_whitespace() || matches!(c, '<' | '>' | '='))
                .unwrap_or(trimmed.len())
        };
        words.push((at, &trimmed[..end]));
        rest = &trimmed[end..];
    }
}

impl FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words = words(text);
        let at = |n: usize| words.get(n).map_or(text.len(), |(at, _)| *at) + 1;
        let word = |n: usize| words.get(n).map(|(_, word)| *word);
        let missing = |n: usize, what: &str| match word(n) {
            Some(word) => format!("at character {}: `{word}` stands where {what} should", at(n)),
            None => format!("at its end: {what} is missing"),
        };
        let mut tests = Vec::new();
        let mut n = 0;
        loop {
            let names = FIGURES.map(|(name, _)| name).join(", ");
            let figure = word(n)
                .and_then(|w| FIGURES.iter().find(|(name, _)| *name == w))
                .ok_or_else(|| missing(n, &format!("a figure ({names})")))?
                .1;
            let (above, or_equal) = match word(n + 1) {
                Some(">") => (true, false),
                Some(">=") => (true, true),
                Some("<") => (false, false),
                Some("<=") => (false, true),
                _ => return Err(missing(n + 1, "one of > >= < <=")),
            };
            let wanted = if figure == Figure::Waiting {
                "a number"
            } else {
                "a part like 92% or a size like 20Gi"
            };
            let value = word(n + 2).ok_or_else(|| missing(n + 2, wanted))?;
            let value = match figure {
                Figure::Waiting => value.parse().map(Value::Count).ok(),
                _ if value.ends_with('%') => Some(
                    parse_percent(value)
                        .map(Value::Part)
                        .map_err(|e| format!("at character {}: {e}", at(n + 2)))?,
                ),
                _ => value.parse().map(Value::Bytes).ok(),
            }
            .ok_or_else(|| missing(n + 2, wanted))?;
            tests.push(Test {
                figure,
                above,
                or_equal,
                value,
            });
            n += 3;
            match word(n) {
                Some("and") => n += 1,
                _ => break,
            }
        }
        let mut lasting = Duration::ZERO;
        if word(n) == Some("for") {
            let time = word(n + 1).ok_or_else(|| missing(n + 1, "a time like 30s"))?;
            lasting = parse_duration(time).map_err(|e| format!("at character {}: {e}", at(n + 1)))?;
            n += 2;
        }
        if word(n).is_some() {
            return Err(missing(n, "the end, `and` or `for`"));
        }
        let text = words.iter().map(|(_, word)| *word).collect::<Vec<_>>().join(" ");
        Ok(Self { text, tests, lasting })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(used: u64) -> Sample {
        Sample {
            capacity: Bytes::gib(100),
            used: Bytes::gib(used),
            arena: (Bytes::gib(30), Bytes::gib(40)),
            waiting: 2,
            ..Sample::default()
        }
    }

    #[test]
    fn conditions_mean_what_they_say() {
        for (text, used, holds) in [
            ("device.used > 92%", 93, true),
            ("device.used > 92%", 92, false),
            ("device.used>=92%", 92, true),
            ("device.free < 10Gi", 91, true),
            ("device.free<10Gi", 90, false),
            ("device.used > 50% and arena.used > 80%", 60, false),
            ("device.used > 50% and arena.used > 70%", 60, true),
            ("device.waiting >= 2", 0, true),
            ("device.waiting > 2", 0, false),
        ] {
            let condition: Condition = text.parse().unwrap();
            assert_eq!(condition.holds(&sample(used), 0), holds, "{text} at {used}");
        }
        let condition: Condition = "device.used > 92.5% for 30s".parse().unwrap();
        assert_eq!(condition.lasting, Duration::from_secs(30));
        let crammed: Condition = " device.used>92%  for 1m".parse().unwrap();
        assert_eq!(crammed.to_string(), "device.used > 92% for 1m");
    }

    #[test]
    fn a_margin_makes_it_hold_for_longer() {
        let condition: Condition = "device.used > 92%".parse().unwrap();
        assert!(condition.holds(&sample(88), 50));
        assert!(!condition.holds(&sample(87), 50));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (text, said) in [
            (
                "device.usd > 92%",
                "at character 1: `device.usd` stands where a figure",
            ),
            (
                "device.used 92%",
                "at character 13: `92%` stands where one of > >= < <= should",
            ),
            (
                "device.used > ",
                "at its end: a part like 92% or a size like 20Gi is missing",
            ),
            (
                "device.used > 920%",
                "at character 15: `920%` is more than the whole",
            ),
            ("device.used > 92% for", "at its end: a time like 30s is missing"),
            (
                "device.used > 92% for ever",
                "at character 23: `ever` is not a time",
            ),
            (
                "device.used > 92% or so",
                "at character 19: `or` stands where the end",
            ),
            (
                "device.waiting > 5Gi",
                "at character 18: `5Gi` stands where a number should",
            ),
            ("", "at its end: a figure"),
        ] {
            let error = text.parse::<Condition>().unwrap_err();
            assert!(error.starts_with(said), "{text}: {error}");
        }
    }
}
