//! Handles that programs hold: numbers that were never given out are told from those that were.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// No two handles of any kind are equal, and none is reused: a stale one is found out.
static NEXT: AtomicUsize = AtomicUsize::new(0x5eb0_0000_1000);

/// A fresh handle value.
pub(crate) fn fresh() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Handles are unique and spread: their own bits serve as the hash.
#[derive(Debug, Default)]
pub(crate) struct PlainHasher(u64);

impl Hasher for PlainHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_usize(&mut self, value: usize) {
        self.0 = (value as u64 >> 4).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
}

/// The objects of one kind that the program holds handles to.
#[derive(Debug)]
pub(crate) struct Table<T> {
    map: RwLock<HashMap<usize, Arc<T>, BuildHasherDefault<PlainHasher>>>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self {
            map: RwLock::default(),
        }
    }
}

impl<T> Table<T> {
    /// Stores an object under a handle from [`fresh`].
    pub(crate) fn insert(&self, handle: usize, object: Arc<T>) {
        self.map
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(handle, object);
    }

    /// The object behind a handle.
    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.map
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&handle)
            .cloned()
    }

    /// Takes a handle back.
    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.map
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&handle)
    }

    /// All objects, in no order.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.map
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .cloned()
            .collect()
    }

    /// The handles whose object passes the test, in no order.
    pub(crate) fn handles_where(&self, test: impl Fn(&T) -> bool) -> Vec<usize> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        map.iter()
            .filter(|(_, object)| test(object))
            .map(|(handle, _)| *handle)
            .collect()
    }

    /// Takes back all handles whose object passes the test.
    pub(crate) fn remove_where(&self, test: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let handles: Vec<usize> = map
            .iter()
            .filter(|(_, object)| test(object))
            .map(|(handle, _)| *handle)
            .collect();
        handles.iter().filter_map(|handle| map.remove(handle)).collect()
    }
}
