//! [`Maps`]: which ranges are mapped, and which of them may be used.

use std::collections::BTreeMap;

/// Mappings by their first address: size, and whether access was given.
#[derive(Debug, Default)]
pub(crate) struct Maps(BTreeMap<u64, (u64, bool)>);

impl Maps {
    pub(crate) fn map(&mut self, addr: u64, size: u64) {
        self.0.insert(addr, (size, false));
    }

    /// Whether a range is made of whole mappings, with no gap.
    pub(crate) fn are_whole(&self, addr: u64, size: u64) -> bool {
        let mut at = addr;
        while at < addr.saturating_add(size) {
            match self.0.get(&at) {
                Some((size, _)) => at += size,
                None => return false,
            }
        }
        size > 0 && at == addr + size
    }

    /// Forgets the mappings of a range.
    pub(crate) fn unmap(&mut self, addr: u64, size: u64) {
        while let Some((&at, _)) = self.0.range(addr..addr + size).next() {
            self.0.remove(&at);
        }
    }

    /// Access was given to a range.
    pub(crate) fn give_access(&mut self, addr: u64, size: u64) {
        for (_, (_, access)) in self.0.range_mut(addr..addr + size) {
            *access = true;
        }
    }

    /// Mappings that may be used: start and size.
    pub(crate) fn accessible(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0
            .iter()
            .filter(|(_, (_, access))| *access)
            .map(|(&at, &(size, _))| (at, size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_whole_or_not() {
        let mut maps = Maps::default();
        maps.map(10, 10);
        maps.map(20, 5);
        maps.map(30, 5);
        assert!(maps.are_whole(10, 10) && maps.are_whole(10, 15) && maps.are_whole(30, 5));
        assert!(
            !maps.are_whole(10, 12)
                && !maps.are_whole(12, 8)
                && !maps.are_whole(20, 15)
                && !maps.are_whole(0, 5)
        );
        assert!(!maps.are_whole(10, 0));
        maps.give_access(10, 15);
        assert_eq!(maps.accessible().collect::<Vec<_>>(), [(10, 10), (20, 5)]);
        maps.unmap(10, 15);
        assert!(!maps.are_whole(10, 10));
        assert!(maps.are_whole(30, 5));
        assert_eq!(maps.accessible().count(), 0);
    }
}
