//! [`Agenda`]: what happens when, the earliest first, and of those at once the first that was entered.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

#[derive(Debug, PartialEq)]
struct Entry<T> {
    at: f64,
    order: u64,
    what: T,
}

impl<T: PartialEq> Eq for Entry<T> {}

impl<T: PartialEq> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: PartialEq> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.total_cmp(&other.at).then(self.order.cmp(&other.order))
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Agenda<T> {
    heap: BinaryHeap<Reverse<Entry<T>>>,
    order: u64,
}

impl<T: PartialEq> Agenda<T> {
    pub(super) fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
            order: 0,
        }
    }

    pub(super) fn enter(&mut self, at: f64, what: T) {
        self.order += 1;
        let order = self.order;
        self.heap.push(Reverse(Entry { at, order, what }));
    }

    /// When the next thing happens.
    pub(super) fn peek(&self) -> Option<f64> {
        self.heap.peek().map(|Reverse(e)| e.at)
    }

    pub(super) fn next(&mut self) -> Option<(f64, T)> {
        self.heap.pop().map(|Reverse(e)| (e.at, e.what))
    }
}
