//! [`Behaviour`]: one thing that a driver does, with its name, its program and what is known of its result.

use std::os::unix::net::UnixStream;

use crate::driver::Driver;
use crate::observe::Test;

/// What a behaviour needs to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A second device.
    SecondDevice,
    /// A capability of the device, by its attribute and in words.
    Attribute(u32, &'static str),
}

/// One thing that a driver does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Behaviour {
    /// `group.sentence_in_words`.
    pub name: &'static str,
    /// One line for a person.
    pub what: &'static str,
    /// The program, after the context was made current.
    pub run: fn(&mut Test, Driver),
    /// What its second process does.
    pub peer: Option<fn(&mut Test, Driver, UnixStream)>,
    /// The observation, where it is known of the real driver.
    pub fact: Option<&'static [&'static str]>,
    /// What it needs.
    pub needs: &'static [Need],
    /// It looks at figures that other processes change: nothing runs beside it.
    pub alone: bool,
    /// It starts the driver itself.
    pub raw: bool,
}

impl Behaviour {
    pub(crate) const fn new(name: &'static str, what: &'static str, run: fn(&mut Test, Driver)) -> Self {
        Self {
            name,
            what,
            run,
            peer: None,
            fact: None,
            needs: &[],
            alone: false,
            raw: false,
        }
    }

    /// What the real driver is known to do: the plain run is held to it.
    pub(crate) const fn fact(self, lines: &'static [&'static str]) -> Self {
        Self {
            fact: Some(lines),
            ..self
        }
    }

    /// The program of its second process.
    pub(crate) const fn with(self, peer: fn(&mut Test, Driver, UnixStream)) -> Self {
        Self {
            peer: Some(peer),
            ..self
        }
    }

    /// What it needs; otherwise it is skipped.
    pub(crate) const fn needs(self, needs: &'static [Need]) -> Self {
        Self { needs, ..self }
    }

    /// Nothing runs beside it.
    pub(crate) const fn alone(self) -> Self {
        Self { alone: true, ..self }
    }

    /// No context is made for it.
    pub(crate) const fn raw(self) -> Self {
        Self { raw: true, ..self }
    }

    /// The first word of its name.
    pub(crate) fn group(&self) -> &'static str {
        self.name.split('.').next().unwrap_or(self.name)
    }
}

/// Whether a name matches a pattern of words and `*`.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((head, rest)) => name.strip_prefix(head).is_some_and(|tail| {
            (0..=tail.len())
                .filter(|at| tail.is_char_boundary(*at))
                .any(|at| matches(rest, &tail[at..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn patterns() {
        assert!(matches("*", "alloc.a"));
        assert!(matches("alloc.*", "alloc.a"));
        assert!(matches("*.a", "alloc.a"));
        assert!(matches("a*c.*", "alloc.a"));
        assert!(!matches("alloc", "alloc.a"));
        assert!(!matches("vmm.*", "alloc.a"));
    }

    #[test]
    fn names_are_unique_and_words() {
        let mut seen = BTreeSet::new();
        for behaviour in crate::groups::all() {
            assert!(seen.insert(behaviour.name), "{} is there twice", behaviour.name);
            assert!(behaviour.name.contains('.'), "{} has no group", behaviour.name);
            assert!(
                behaviour
                    .name
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'.'),
                "{}",
                behaviour.name
            );
            assert!(!behaviour.what.is_empty() && !behaviour.what.ends_with('.'));
        }
    }
}
