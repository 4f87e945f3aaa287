//! Which spans of a number line are free: device addresses, and offsets in the memory file.

use std::collections::BTreeMap;

/// Free spans, by start. Neighbours are always merged.
#[derive(Debug, Default, Clone)]
pub(crate) struct Spans {
    free: BTreeMap<u64, u64>,
}

impl Spans {
    /// All of `[start, start + size)` free.
    pub(crate) fn new(start: u64, size: u64) -> Self {
        Self {
            free: BTreeMap::from([(start, size)]),
        }
    }

    /// Takes the lowest aligned span of `size`. `align` is a power of two.
    pub(crate) fn take(&mut self, size: u64, align: u64) -> Option<u64> {
        let (start, at) = self.free.iter().find_map(|(start, length)| {
            let at = start.checked_add(align - 1)? & !(align - 1);
            (at.checked_add(size)? <= start + length).then_some((*start, at))
        })?;
        self.carve(start, at, size);
        Some(at)
    }

    /// Takes exactly `[at, at + size)`, if it is free.
    pub(crate) fn take_at(&mut self, at: u64, size: u64) -> bool {
        let Some((start, length)) = self.free.range(..=at).next_back().map(|(s, l)| (*s, *l)) else {
            return false;
        };
        if at.checked_add(size).is_none_or(|end| end > start + length) {
            return false;
        }
        self.carve(start, at, size);
        true
    }

    fn carve(&mut self, start: u64, at: u64, size: u64) {
        let length = self.free.remove(&start).unwrap_or(0);
        if at > start {
            self.free.insert(start, at - start);
        }
        if start + length > at + size {
            self.free.insert(at + size, start + length - (at + size));
        }
    }

    /// Gives a span back.
    pub(crate) fn give(&mut self, start: u64, size: u64) {
        let (mut start, mut size) = (start, size);
        if let Some((before, length)) = self.free.range(..start).next_back().map(|(s, l)| (*s, *l))
            && before + length == start
        {
            self.free.remove(&before);
            start = before;
            size += length;
        }
        if let Some(length) = self.free.remove(&(start + size)) {
            size += length;
        }
        self.free.insert(start, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_lowest_and_merges() {
        let mut spans = Spans::new(0, 100);
        assert_eq!(spans.take(10, 1), Some(0));
        assert_eq!(spans.take(10, 16), Some(16));
        assert_eq!(spans.take(6, 1), Some(10));
        spans.give(0, 10);
        spans.give(16, 10);
        spans.give(10, 6);
        assert_eq!(spans.free, BTreeMap::from([(0, 100)]));
        assert!(!spans.take_at(95, 6));
        assert!(spans.take_at(95, 5));
        assert_eq!(spans.take(96, 1), None);
    }
}
