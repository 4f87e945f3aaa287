//! [`Table`]: things by their number, found in one step and walked in the order of the numbers.
//!
//! The arbiter looks clients, tasks and devices up dozens of times an event, and walks over all of them almost never. So
//! they lie in slots, a small open-addressed index of tags says in which, and an ordered set of the keys is kept for the
//! walks. The hash is a fixed multiplication: the same events find the same slots, and no order of slots is ever seen.

use core::ops::Index;
use std::collections::BTreeSet;

use ebb_units::{ClientId, DeviceId, TaskId};

/// What things are called by.
pub(crate) trait Key: Copy + Ord + core::fmt::Debug {
    /// One number for each key.
    fn number(self) -> u64;
}

impl Key for ClientId {
    fn number(self) -> u64 {
        self.0
    }
}

impl Key for TaskId {
    fn number(self) -> u64 {
        self.0
    }
}

impl Key for DeviceId {
    fn number(self) -> u64 {
        u64::from(self.0)
    }
}

/// Where the index has nothing.
const NONE: u32 = u32::MAX;

/// A cell of the index: which slot, and enough of the hash that a wrong slot is hardly ever looked at.
#[derive(Clone, Copy, Debug)]
struct Cell {
    slot: u32,
    tag: u32,
}

const EMPTY: Cell = Cell { slot: NONE, tag: 0 };

/// Things by key.
#[derive(Clone, Debug)]
pub(crate) struct Table<K, V> {
    /// A power of two of cells, at most half of them in use; linear probing, no tombstones.
    cells: Vec<Cell>,
    slots: Vec<Option<(K, V)>>,
    free: Vec<u32>,
    order: BTreeSet<K>,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self {
            cells: Vec::new(),
            slots: Vec::new(),
            free: Vec::new(),
            order: BTreeSet::new(),
        }
    }
}

fn hash(number: u64) -> u64 {
    // The golden ratio: numbers given one after another lie far apart.
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 32)
}

fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}

impl<K: Key, V> Table<K, V> {
    fn mask(&self) -> usize {
        self.cells.len().wrapping_sub(1)
    }

    fn home(&self, hash: u64) -> usize {
        // The low half, which the tag is not.
        (hash as u32 as usize) & self.mask()
    }

    /// The cell and the slot of a key.
    #[inline]
    fn find(&self, key: K) -> Option<(usize, usize)> {
        if self.cells.is_empty() {
            return None;
        }
        let hash = hash(key.number());
        let mut at = self.home(hash);
        loop {
            let cell = *self.cells.get(at)?;
            if cell.slot == NONE {
                return None;
            }
            if cell.tag == tag(hash)
                && let Some(Some((k, _))) = self.slots.get(cell.slot as usize)
                && *k == key
            {
                return Some((at, cell.slot as usize));
            }
            at = (at + 1) & self.mask();
        }
    }

    #[inline]
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let (_, slot) = self.find(*key)?;
        self.slots.get(slot)?.as_ref().map(|(_, v)| v)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let (_, slot) = self.find(*key)?;
        self.slots.get_mut(slot)?.as_mut().map(|(_, v)| v)
    }

    #[inline]
    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.find(*key).is_some()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Puts something in; what was there under the key comes out.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        if let Some(old) = self.get_mut(&key) {
            return Some(core::mem::replace(old, value));
        }
        if (self.order.len() + 1) * 2 > self.cells.len() {
            self.grow();
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(None);
                (self.slots.len() - 1) as u32
            }
        };
        self.slots[slot as usize] = Some((key, value));
        self.order.insert(key);
        self.place(key, slot);
        None
    }

    /// What is under a key, made if there is nothing.
    pub(crate) fn or_insert_with(&mut self, key: K, value: impl FnOnce() -> V) -> Option<&mut V> {
        if !self.contains_key(&key) {
            self.insert(key, value());
        }
        self.get_mut(&key)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let (mut hole, slot) = self.find(*key)?;
        let (_, value) = self.slots.get_mut(slot)?.take()?;
        self.free.push(slot as u32);
        self.order.remove(key);
        // Those behind move up, unless that would be before where they belong.
        let mut at = hole;
        loop {
            at = (at + 1) & self.mask();
            let cell = self.cells[at];
            if cell.slot == NONE {
                break;
            }
            let home = self.slots[cell.slot as usize]
                .as_ref()
                .map_or(at, |(k, _)| self.home(hash(k.number())));
            let from_home = at.wrapping_sub(home) & self.mask();
            let from_hole = at.wrapping_sub(hole) & self.mask();
            if from_home >= from_hole {
                self.cells[hole] = cell;
                hole = at;
            }
        }
        self.cells[hole] = EMPTY;
        Some(value)
    }

    fn place(&mut self, key: K, slot: u32) {
        let hash = hash(key.number());
        let mut at = self.home(hash);
        while self.cells[at].slot != NONE {
            at = (at + 1) & self.mask();
        }
        self.cells[at] = Cell { slot, tag: tag(hash) };
    }

    fn grow(&mut self) {
        let len = (self.cells.len() * 2).max(8);
        self.cells.clear();
        self.cells.resize(len, EMPTY);
        let there: Vec<(K, u32)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(at, s)| s.as_ref().map(|(k, _)| (*k, at as u32)))
            .collect();
        for (key, slot) in there {
            self.place(key, slot);
        }
    }

    /// The keys, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &K> + Clone {
        self.order.iter()
    }

    /// All of it, in the order of the keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> + Clone {
        self.order.iter().filter_map(|k| Some((k, self.get(k)?)))
    }

    /// The values, in the order of the keys.
    pub(crate) fn values(&self) -> impl Iterator<Item = &V> + Clone {
        self.iter().map(|(_, v)| v)
    }
}

impl<K: Key, V> Index<&K> for Table<K, V> {
    type Output = V;

    #[inline]
    fn index(&self, key: &K) -> &V {
        match self.get(key) {
            Some(v) => v,
            None => panic!("{key:?} is not there"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// It does what an ordered map does.
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0u8..4, 0u64..40, any::<bool>()), 1..300)) {
            let mut table = Table::<ClientId, usize>::default();
            let mut model = BTreeMap::new();
            for (n, (what, key, far)) in steps.into_iter().enumerate() {
                // Keys that fall on the same cell, and neighbours.
                let key = ClientId(if far { key << 40 } else { key });
                match what {
                    0 | 1 => prop_assert_eq!(table.insert(key, n), model.insert(key, n)),
                    2 => prop_assert_eq!(table.remove(&key), model.remove(&key)),
                    _ => prop_assert_eq!(table.get_mut(&key).map(|v| *v), model.get(&key).copied()),
                }
                prop_assert!(table.iter().eq(model.iter()));
                prop_assert_eq!(table.contains_key(&key), model.contains_key(&key));
            }
        }
    }
}
