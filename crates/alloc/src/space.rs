//! Spans of reserved device addresses: best fit, coalescing.

use std::collections::{BTreeMap, BTreeSet};

use crate::GiveBackError;

/// Free and used spans of one or more ranges of numbers. Neighbouring ranges stay apart: a span never crosses from one
/// into the next, because they are different reservations.
///
/// # Invariants
/// `free` and `by_size` hold the same spans. Free spans of one range neither overlap nor touch each other.
#[derive(Clone, Debug, Default)]
pub struct AddressSpace {
    /// Start to length.
    ranges: BTreeMap<u64, u64>,
    /// Start to length.
    free: BTreeMap<u64, u64>,
    /// Length and start.
    by_size: BTreeSet<(u64, u64)>,
    free_total: u64,
}

impl AddressSpace {
    /// Nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            ranges: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            free_total: 0,
        }
    }

    /// Adds a range, all free. `false` (and no change) if it overlaps one that is there, is empty, or wraps around.
    #[must_use]
    pub fn add_range(&mut self, start: u64, len: u64) -> bool {
        let Some(end) = start.checked_add(len).filter(|end| *end > start) else {
            return false;
        };
        let clash = self
            .ranges
            .range(..end)
            .next_back()
            .is_some_and(|(at, n)| at + n > start);
        if clash {
            return false;
        }
        self.ranges.insert(start, len);
        self.insert(start, len);
        true
    }

    /// Takes a range away that is free as a whole. `false` (and no change) otherwise.
    #[must_use]
    pub fn remove_range(&mut self, start: u64) -> bool {
        match (self.ranges.get(&start), self.free.get(&start)) {
            (Some(range), Some(free)) if range == free => {
                let len = *range;
                self.ranges.remove(&start);
                self.remove(start, len);
                true
            }
            _ => false,
        }
    }

    /// The range that contains an address: start and length.
    #[must_use]
    pub fn range_of(&self, at: u64) -> Option<(u64, u64)> {
        let (start, len) = self.ranges.range(..=at).next_back()?;
        (at - start < *len).then_some((*start, *len))
    }

    /// All ranges: start and length.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.iter().map(|(start, len)| (*start, *len))
    }

    /// Takes the smallest free span that is long enough, the lowest of these, and leaves its rest.
    #[must_use]
    pub fn take(&mut self, len: u64) -> Option<u64> {
        if len == 0 {
            return None;
        }
        let (found, start) = *self.by_size.range((len, 0)..).next()?;
        self.remove(start, found);
        if found > len {
            self.insert(start + len, found - len);
        }
        Some(start)
    }

    /// The lowest free span of at least that length: start and length.
    #[must_use]
    pub fn first(&self, len: u64) -> Option<(u64, u64)> {
        self.free
            .iter()
            .find(|(_, n)| **n >= len)
            .map(|(start, n)| (*start, *n))
    }

    /// Takes exactly these. `false` (and no change) if they are not free, all in one span.
    #[must_use]
    pub fn take_at(&mut self, start: u64, len: u64) -> bool {
        let Some((at, found)) = self.free.range(..=start).next_back().map(|(at, n)| (*at, *n)) else {
            return false;
        };
        if len == 0 || start.checked_add(len).is_none_or(|end| end > at + found) {
            return false;
        }
        self.remove(at, found);
        if start > at {
            self.insert(at, start - at);
        }
        if at + found > start + len {
            self.insert(start + len, at + found - start - len);
        }
        true
    }

    /// Takes the end of the highest free span that is long enough.
    #[must_use]
    pub fn take_last(&mut self, len: u64) -> Option<u64> {
        if len == 0 {
            return None;
        }
        let (at, found) = self
            .free
            .iter()
            .rev()
            .find(|(_, n)| **n >= len)
            .map(|(at, n)| (*at, *n))?;
        let start = at + found - len;
        self.take_at(start, len).then_some(start)
    }

    /// Gives a span (or any part of one that was taken) back.
    ///
    /// # Errors
    /// [`GiveBackError::NotLive`] if any of it is free already or lies in no range; nothing changes.
    pub fn give_back(&mut self, start: u64, len: u64) -> Result<(), GiveBackError> {
        let wrong = GiveBackError::NotLive(start);
        let end = start.checked_add(len).filter(|_| len > 0).ok_or(wrong)?;
        let (range, range_len) = self.range_of(start).ok_or(wrong)?;
        if end > range + range_len {
            return Err(wrong);
        }
        let before = self.free.range(..end).next_back().map(|(at, n)| (*at, *n));
        if before.is_some_and(|(at, n)| at + n > start) {
            return Err(wrong);
        }
        let (mut new_start, mut new_end) = (start, end);
        if let Some((at, n)) = before
            && at + n == start
            && at >= range
        {
            self.remove(at, n);
            new_start = at;
        }
        if end < range + range_len
            && let Some(n) = self.free.get(&end).copied()
        {
            self.remove(end, n);
            new_end = end + n;
        }
        self.insert(new_start, new_end - new_start);
        Ok(())
    }

    /// Sum of the free spans.
    #[must_use]
    pub const fn free_total(&self) -> u64 {
        self.free_total
    }

    /// The longest span that [`Self::take`] could give.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        self.by_size.last().map_or(0, |(len, _)| *len)
    }

    fn insert(&mut self, start: u64, len: u64) {
        self.free.insert(start, len);
        self.by_size.insert((len, start));
        self.free_total += len;
    }

    fn remove(&mut self, start: u64, len: u64) {
        self.free.remove(&start);
        self.by_size.remove(&(len, start));
        self.free_total -= len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rangemap::RangeSet;

    #[test]
    fn the_best_fit_is_taken_and_neighbours_join() {
        let mut space = AddressSpace::new();
        assert!(space.add_range(100, 50));
        let [a, b, c] = [10, 5, 20].map(|n| space.take(n).unwrap());
        assert_eq!((a, b, c), (100, 110, 115));
        space.give_back(a, 10).unwrap();
        // Free: 100..110 and 135..150.
        assert_eq!(space.take(12), Some(135));
        assert_eq!(space.take(8), Some(100));
        space.give_back(100, 8).unwrap();
        space.give_back(b, 5).unwrap();
        assert_eq!(space.largest_free(), 15);
        assert_eq!(space.take(15), Some(100));
        assert_eq!(space.take(4), None);
        assert_eq!(space.take(0), None);
    }

    #[test]
    fn both_ends_and_exact_places_can_be_taken() {
        let mut space = AddressSpace::new();
        assert!(space.add_range(0, 100));
        assert_eq!(space.take_last(10), Some(90));
        assert!(space.take_at(20, 10));
        assert!(
            !space.take_at(25, 10)
                && !space.take_at(15, 6)
                && !space.take_at(85, 10)
                && !space.take_at(40, 0)
        );
        assert_eq!(
            (space.first(1), space.first(21), space.first(61)),
            (Some((0, 20)), Some((30, 60)), None)
        );
        assert_eq!(
            (space.take_last(60), space.take_last(21), space.take_last(0)),
            (Some(30), None, None)
        );
        assert!(space.take_at(0, 20));
        assert_eq!(space.free_total(), 0);
    }

    #[test]
    fn ranges_that_touch_stay_apart() {
        let mut space = AddressSpace::new();
        assert!(space.add_range(0, 10));
        assert!(space.add_range(10, 10));
        assert!(!space.add_range(5, 3));
        assert!(!space.add_range(u64::MAX, 2));
        assert!(!space.add_range(50, 0));
        assert_eq!(space.take(11), None);
        let a = space.take(10).unwrap();
        let b = space.take(10).unwrap();
        space.give_back(b, 10).unwrap();
        space.give_back(a, 10).unwrap();
        assert_eq!(space.take(11), None);
        assert!(space.remove_range(0));
        assert!(!space.remove_range(0));
        assert_eq!(space.take(10), Some(10));
        assert!(!space.remove_range(10), "in use");
    }

    #[test]
    fn what_is_free_cannot_be_given_back() {
        let mut space = AddressSpace::new();
        assert!(space.add_range(0, 100));
        let at = space.take(10).unwrap();
        for (start, len) in [(50, 1), (at, 11), (at, 0), (95, 10), (200, 1), (u64::MAX, 1)] {
            assert_eq!(
                space.give_back(start, len),
                Err(GiveBackError::NotLive(start)),
                "{start}+{len}"
            );
        }
        space.give_back(at, 10).unwrap();
        assert_eq!(space.give_back(at, 10), Err(GiveBackError::NotLive(at)));
    }

    proptest! {
        /// Against a set of numbers: what is free here is free there, and every span that fits is found.
        #[test]
        fn agrees_with_a_range_set(ops in prop::collection::vec((any::<bool>(), 1u64..40, any::<prop::sample::Index>()), 1..200)) {
            let mut space = AddressSpace::new();
            let mut model = RangeSet::new();
            prop_assert!(space.add_range(1000, 256));
            model.insert(1000..1256);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (take, len, which) in ops {
                if take || live.is_empty() {
                    let best = model.iter().map(|r| r.end - r.start).filter(|n| *n >= len).min();
                    match space.take(len) {
                        Some(at) => {
                            let span = model.get(&at).cloned();
                            prop_assert_eq!(span.map(|r| r.end - r.start), best, "not the best fit");
                            prop_assert!(model.gaps(&(at..at + len)).next().is_none(), "gave out what is in use");
                            model.remove(at..at + len);
                            live.push((at, len));
                        }
                        None => prop_assert_eq!(best, None),
                    }
                } else {
                    let (at, len) = live.swap_remove(which.index(live.len()));
                    prop_assert_eq!(space.give_back(at, len), Ok(()));
                    model.insert(at..at + len);
                    prop_assert!(space.give_back(at, len).is_err());
                }
                let spans: Vec<_> = model.iter().map(|r| (r.start, r.end - r.start)).collect();
                prop_assert_eq!(&space.free.iter().map(|(a, n)| (*a, *n)).collect::<Vec<_>>(), &spans);
                prop_assert_eq!(space.free_total(), spans.iter().map(|s| s.1).sum::<u64>());
                prop_assert_eq!(space.by_size.len(), spans.len());
            }
        }
    }
}
