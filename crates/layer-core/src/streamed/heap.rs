//! The memory of one pool: slabs, cut into pieces that live, or are free to somebody.
//!
//! ```text
//!            take (stream S or anybody's)            settle(S, n), n >= its number
//!   free to S ------------------------> live   free to S ----------------> anybody's
//!       ^                                |
//!       +------------ give(S, n) --------+
//! ```
//!
//! A piece that was freed on a stream is at once free *to that stream*, because what the stream does next comes after
//! everything that it did before. To all others it is free when the stream has come so far: when it is *settled*. Frees are
//! numbered by the caller; neighbours that are free to the same stream become one piece with the higher number.
//!
//! Pieces are nodes of a list in the order of addresses, one list a slab, so that neighbours are found without a search.
//! Nothing here calls anything or waits.

use std::collections::BTreeSet;

/// Sizes and addresses are multiples of this, as in the driver's pools.
pub(crate) const UNIT: u64 = 512;
/// Whose a free piece is when it is everybody's.
pub(crate) const ANYBODY: Stream = Stream(0);

const NONE: u32 = u32::MAX;

/// A stream, by its place in the caller's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Stream(pub(crate) u32);

/// A live piece, by its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece(u32);

/// What a live piece is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) at: u64,
    /// What was asked for.
    pub(crate) size: u64,
    /// The stream that it was allocated on.
    pub(crate) stream: Stream,
    /// Never used again.
    pub(crate) id: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No piece: the place in the table is vacant.
    Vacant,
    Live {
        size: u64,
        stream: Stream,
        id: u64,
    },
    Free {
        to: Stream,
        number: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Node {
    at: u64,
    len: u64,
    before: u32,
    after: u32,
    slab: u32,
    state: State,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    base: u64,
    len: u64,
    first: u32,
    live: u32,
}

/// Pieces and slabs of one pool.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    slabs: Vec<Option<Slab>>,
    /// Free pieces of each stream: length, address, place.
    free: Vec<BTreeSet<(u64, u64, u32)>>,
    reserved: u64,
    used: u64,
    /// Bytes of slabs in which nothing lives.
    idle: u64,
    /// Live pieces.
    live: u64,
}

impl Heap {
    /// Bytes of all slabs.
    pub(crate) const fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Bytes of live pieces.
    pub(crate) const fn used(&self) -> u64 {
        self.used
    }

    /// Bytes of slabs in which nothing lives, whoever may have them.
    pub(crate) const fn idle(&self) -> u64 {
        self.idle
    }

    /// How many pieces live.
    #[cfg(test)]
    pub(crate) const fn live(&self) -> u64 {
        self.live
    }

    fn set_of(&mut self, stream: Stream) -> &mut BTreeSet<(u64, u64, u32)> {
        let index = stream.0 as usize;
        if self.free.len() <= index {
            self.free.resize_with(index + 1, BTreeSet::new);
        }
        &mut self.free[index]
    }

    fn best(&self, stream: Stream, len: u64) -> Option<(u64, u64, u32)> {
        self.free
            .get(stream.0 as usize)?
            .range((len, 0, 0)..)
            .next()
            .copied()
    }

    /// Whether something is free to a stream alone.
    pub(crate) fn waits_for(&self, stream: Stream) -> bool {
        self.free
            .get(stream.0 as usize)
            .is_some_and(|set| !set.is_empty())
    }

    /// A slab, all of it free to anybody.
    pub(crate) fn add_slab(&mut self, base: u64, len: u64) -> u32 {
        let slab = match self.slabs.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                self.slabs.push(None);
                self.slabs.len() - 1
            }
        };
        let index = u32::try_from(slab).unwrap_or(NONE);
        let first = self.node(Node {
            at: base,
            len,
            before: NONE,
            after: NONE,
            slab: index,
            state: State::Vacant,
        });
        self.slabs[slab] = Some(Slab {
            base,
            len,
            first,
            live: 0,
        });
        self.reserved += len;
        self.idle += len;
        self.set_free(first, ANYBODY, 0);
        index
    }

    fn node(&mut self, node: Node) -> u32 {
        match self.vacant.pop() {
            Some(place) => {
                self.nodes[place as usize] = node;
                place
            }
            None => {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
            }
        }
    }

    fn set_free(&mut self, place: u32, to: Stream, number: u64) {
        let node = &mut self.nodes[place as usize];
        node.state = State::Free { to, number };
        let key = (node.len, node.at, place);
        self.set_of(to).insert(key);
    }

    /// Gives out a piece to a stream: what is free to the stream itself, or to anybody, whichever fits better.
    pub(crate) fn take(&mut self, stream: Stream, len: u64, size: u64, id: u64) -> Option<Piece> {
        let own = self.best(stream, len);
        let anybodys = self.best(ANYBODY, len);
        let (_, _, place) = match (own, anybodys) {
            (Some(own), Some(other)) if other.0 < own.0 => other,
            (Some(own), _) => own,
            (None, other) => other?,
        };
        self.occupy(place, stream, len, size, id);
        Some(Piece(place))
    }

    /// Gives a piece out that is free to another stream, which `allowed` says and which has the number that it says at most. The
    /// caller makes `stream` wait for it. Also says whose it was, and its number.
    pub(crate) fn take_foreign(
        &mut self,
        stream: Stream,
        len: u64,
        size: u64,
        id: u64,
        allowed: impl Fn(Stream) -> Option<u64>,
    ) -> Option<(Piece, Stream, u64)> {
        let (place, to, number) = (1..self.free.len()).find_map(|index| {
            let to = Stream(u32::try_from(index).ok()?);
            let upto = allowed(to)?;
            self.free[index].range((len, 0, 0)..).find_map(|&(_, _, place)| {
                match self.nodes[place as usize].state {
                    State::Free { number, .. } if number <= upto => Some((place, to, number)),
                    _ => None,
                }
            })
        })?;
        self.occupy(place, stream, len, size, id);
        Some((Piece(place), to, number))
    }

    fn occupy(&mut self, place: u32, stream: Stream, len: u64, size: u64, id: u64) {
        let node = self.nodes[place as usize];
        let State::Free { to, number } = node.state else {
            return;
        };
        self.set_of(to).remove(&(node.len, node.at, place));
        if node.len > len {
            let rest = self.node(Node {
                at: node.at + len,
                len: node.len - len,
                before: place,
                after: node.after,
                slab: node.slab,
                state: State::Vacant,
            });
            if node.after != NONE {
                self.nodes[node.after as usize].before = rest;
            }
            let taken = &mut self.nodes[place as usize];
            taken.after = rest;
            taken.len = len;
            self.set_free(rest, to, number);
        }
        self.nodes[place as usize].state = State::Live { size, stream, id };
        self.used += len;
        self.live += 1;
        if let Some(slab) = &mut self.slabs[node.slab as usize] {
            if slab.live == 0 {
                self.idle -= slab.len;
            }
            slab.live += 1;
        }
    }

    /// A piece, if it lives.
    pub(crate) fn live_at(&self, piece: Piece) -> Option<Live> {
        let node = self.nodes.get(piece.0 as usize)?;
        match node.state {
            State::Live { size, stream, id } => Some(Live {
                at: node.at,
                size,
                stream,
                id,
            }),
            _ => None,
        }
    }

    /// The first address of a piece.
    pub(crate) fn address(&self, piece: Piece) -> u64 {
        self.nodes[piece.0 as usize].at
    }

    /// The live piece of a slab that contains an address (the padding behind it belongs to nobody).
    pub(crate) fn find(&self, slab: u32, at: u64) -> Option<Live> {
        let mut place = self.slabs.get(slab as usize)?.as_ref()?.first;
        while place != NONE {
            let node = &self.nodes[place as usize];
            if at < node.at + node.len {
                return self.live_at(Piece(place)).filter(|live| at - live.at < live.size);
            }
            place = node.after;
        }
        None
    }

    /// Takes a live piece back: free to a stream from now on, or to anybody.
    pub(crate) fn give(&mut self, piece: Piece, to: Stream, number: u64) {
        let mut place = piece.0;
        let node = self.nodes[place as usize];
        if !matches!(node.state, State::Live { .. }) {
            return;
        }
        self.used -= node.len;
        self.live -= 1;
        if let Some(slab) = &mut self.slabs[node.slab as usize] {
            slab.live -= 1;
            if slab.live == 0 {
                self.idle += slab.len;
            }
        }
        self.nodes[place as usize].state = State::Vacant;
        let number = self.join(&mut place, to, number);
        self.set_free(place, to, number);
    }

    /// Makes one piece of a node that is in no set and its neighbours that are free to the same. Returns the highest number.
    fn join(&mut self, place: &mut u32, to: Stream, mut number: u64) -> u64 {
        let node = self.nodes[*place as usize];
        if let Some(theirs) = self.number_if_free_to(node.after, to) {
            number = number.max(theirs);
            self.swallow_next(*place);
        }
        if let Some(theirs) = self.number_if_free_to(node.before, to) {
            number = number.max(theirs);
            let before = self.nodes[node.before as usize];
            self.set_of(to).remove(&(before.len, before.at, node.before));
            *place = node.before;
            // What was the node itself stands in no set: taking it out of one changes nothing.
            self.swallow_next(*place);
        }
        number
    }

    fn number_if_free_to(&self, place: u32, stream: Stream) -> Option<u64> {
        if place == NONE {
            return None;
        }
        match self.nodes[place as usize].state {
            State::Free { to, number } if to == stream => Some(number),
            _ => None,
        }
    }

    fn swallow_next(&mut self, place: u32) {
        let next = self.nodes[place as usize].after;
        let gone = self.nodes[next as usize];
        if let State::Free { to, .. } = gone.state {
            self.set_of(to).remove(&(gone.len, gone.at, next));
        }
        self.nodes[next as usize].state = State::Vacant;
        self.vacant.push(next);
        if gone.after != NONE {
            self.nodes[gone.after as usize].before = place;
        }
        let node = &mut self.nodes[place as usize];
        node.after = gone.after;
        node.len += gone.len;
    }

    /// A stream has come as far as a number: what was freed on it up to there is anybody's.
    pub(crate) fn settle(&mut self, stream: Stream, upto: u64) {
        if stream == ANYBODY || !self.waits_for(stream) {
            return;
        }
        let ready: Vec<(u64, u64, u32)> = self.free[stream.0 as usize]
            .iter()
            .copied()
            .filter(|&(_, _, place)| {
                matches!(self.nodes[place as usize].state, State::Free { number, .. } if number <= upto)
            })
            .collect();
        for key in ready {
            // Pieces of one stream never stand side by side, so that none of these is swallowed by another before its turn.
            self.free[stream.0 as usize].remove(&key);
            let mut place = key.2;
            self.nodes[place as usize].state = State::Vacant;
            let number = self.join(&mut place, ANYBODY, 0);
            self.set_free(place, ANYBODY, number);
        }
    }

    /// Takes slabs out that are wholly anybody's, largest addresses first, as long as at least `keep` bytes are left.
    pub(crate) fn trim(&mut self, keep: u64) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        if self.idle == 0 {
            return out;
        }
        for index in (0..self.slabs.len()).rev() {
            let Some(slab) = self.slabs[index].filter(|slab| slab.live == 0) else {
                continue;
            };
            if self.reserved - slab.len < keep {
                continue;
            }
            let whole = self.nodes[slab.first as usize];
            if whole.len != slab.len || self.number_if_free_to(slab.first, ANYBODY).is_none() {
                continue;
            }
            self.set_of(ANYBODY).remove(&(whole.len, whole.at, slab.first));
            self.nodes[slab.first as usize].state = State::Vacant;
            self.vacant.push(slab.first);
            self.slabs[index] = None;
            self.reserved -= slab.len;
            self.idle -= slab.len;
            out.push((slab.base, slab.len));
        }
        out
    }

    /// First addresses of all slabs.
    pub(crate) fn slabs(&self) -> impl Iterator<Item = u64> + '_ {
        self.slabs.iter().flatten().map(|slab| slab.base)
    }

    /// First addresses of all live pieces.
    pub(crate) fn live_addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.nodes
            .iter()
            .filter(|node| matches!(node.state, State::Live { .. }))
            .map(|node| node.at)
    }

    /// Whether all that must hold does. For tests.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        let (mut reserved, mut used, mut idle, mut live) = (0, 0, 0, 0);
        let mut listed = 0;
        for slab in self.slabs.iter().flatten() {
            let (mut at, mut place, mut before, mut lives) = (slab.base, slab.first, NONE, 0);
            let mut last_free = None;
            while place != NONE {
                let node = self.nodes[place as usize];
                assert_eq!((node.at, node.before), (at, before));
                assert!(node.len > 0 && node.len.is_multiple_of(UNIT));
                match node.state {
                    State::Vacant => panic!("a vacant node in a list"),
                    State::Live { size, .. } => {
                        assert!(size <= node.len && size + UNIT > node.len);
                        used += node.len;
                        lives += 1;
                        last_free = None;
                    }
                    State::Free { to, .. } => {
                        assert_ne!(last_free, Some(to), "two neighbours are one piece");
                        last_free = Some(to);
                        listed += 1;
                        assert!(self.free[to.0 as usize].contains(&(node.len, node.at, place)));
                    }
                }
                at += node.len;
                before = place;
                place = node.after;
            }
            assert_eq!((at, lives), (slab.base + slab.len, slab.live));
            reserved += slab.len;
            live += u64::from(lives);
            idle += if lives == 0 { slab.len } else { 0 };
        }
        assert_eq!((self.reserved, self.used), (reserved, used));
        assert_eq!((self.idle, self.live), (idle, live));
        assert_eq!(listed, self.free.iter().map(BTreeSet::len).sum::<usize>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Stream = Stream(1);
    const B: Stream = Stream(2);
    const SLAB: u64 = 64 * UNIT;

    fn heap() -> Heap {
        let mut heap = Heap::default();
        heap.add_slab(1 << 30, SLAB);
        heap
    }

    fn take(heap: &mut Heap, stream: Stream, units: u64) -> Option<Piece> {
        let piece = heap.take(stream, units * UNIT, units * UNIT - 3, 1);
        heap.check();
        piece
    }

    #[test]
    fn what_was_freed_on_a_stream_is_at_once_its_own_and_not_anothers() {
        let mut heap = heap();
        let piece = take(&mut heap, A, 64).unwrap();
        let at = heap.address(piece);
        heap.give(piece, A, 1);
        assert_eq!(take(&mut heap, B, 1), None);
        let again = take(&mut heap, A, 64).unwrap();
        assert_eq!(heap.address(again), at);
        heap.give(again, A, 2);
        heap.settle(A, 1);
        assert_eq!(take(&mut heap, B, 64), None, "the stream is not there yet");
        heap.settle(A, 2);
        assert!(take(&mut heap, B, 64).is_some());
    }

    #[test]
    fn neighbours_of_one_stream_become_one() {
        let mut heap = heap();
        let all: Vec<Piece> = (0..4).map(|_| take(&mut heap, A, 16).unwrap()).collect();
        for (number, piece) in [(1, all[1]), (2, all[3]), (3, all[2])] {
            heap.give(piece, A, number);
            heap.check();
        }
        assert!(take(&mut heap, A, 48).is_some());
        heap.give(all[0], B, 4);
        heap.check();
        assert_eq!(take(&mut heap, A, 1), None);
    }

    #[test]
    fn a_slab_goes_only_when_it_is_wholly_anybodys() {
        let mut heap = heap();
        heap.add_slab(1 << 31, SLAB);
        let one = take(&mut heap, A, 64).unwrap();
        let other = take(&mut heap, A, 8).unwrap();
        assert_eq!(heap.trim(0), []);
        heap.give(one, A, 1);
        assert_eq!((heap.idle(), heap.trim(0)), (SLAB, vec![]));
        heap.settle(A, 1);
        heap.check();
        assert_eq!(heap.trim(2 * SLAB), [], "so much may stay");
        assert_eq!(heap.trim(0), [(1 << 30, SLAB)]);
        heap.check();
        assert_eq!((heap.reserved(), heap.used(), heap.live()), (SLAB, 8 * UNIT, 1));
        assert_eq!(heap.address(other), 1 << 31);
        heap.add_slab(1 << 32, SLAB);
        heap.check();
    }

    #[test]
    fn an_address_is_found_in_its_piece_and_not_behind_it() {
        let mut heap = heap();
        let first = take(&mut heap, A, 2).unwrap();
        let second = take(&mut heap, A, 2).unwrap();
        let at = heap.address(second);
        assert_eq!(heap.find(0, at + 1020).map(|live| live.at), Some(at));
        assert_eq!(heap.find(0, at + 1021), None, "the padding is nobody's");
        heap.give(first, A, 1);
        assert_eq!(heap.find(0, heap.address(first)), None);
    }

    #[test]
    fn a_foreign_piece_is_taken_up_to_where_its_stream_is_waited_for() {
        let mut heap = heap();
        let piece = take(&mut heap, A, 64).unwrap();
        heap.give(piece, A, 7);
        assert_eq!(heap.take_foreign(B, UNIT, 1, 9, |_| Some(6)), None);
        assert_eq!(heap.take_foreign(B, UNIT, 1, 9, |_| None), None);
        let (piece, whose, number) = heap.take_foreign(B, UNIT, 1, 9, |_| Some(7)).unwrap();
        assert_eq!((whose, number), (A, 7));
        heap.check();
        heap.give(piece, whose, number);
        heap.check();
        assert!(take(&mut heap, A, 64).is_some());
    }
}
