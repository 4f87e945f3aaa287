//! Room for evicted chunks in the segments of the host arena.

use std::collections::BTreeMap;

use crate::GiveBackError;

/// A piece of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Piece {
    /// The segment's id.
    pub segment: u64,
    /// Where in it.
    pub offset: u64,
    /// How long.
    pub len: u64,
}

#[derive(Clone, Debug)]
struct Segment {
    len: u64,
    /// Start to length of free runs, none touching the next.
    free: BTreeMap<u64, u64>,
    free_total: u64,
    /// No new pieces: it is to be returned when it is empty.
    closed: bool,
}

/// Free and used pieces of the segments.
///
/// The fullest segments are filled first, so that others run empty and can be returned to the daemon. A chunk may be cut
/// into several pieces; one that fits whole into a gap isn't. Finding room walks the free runs (a few hundred at most:
/// pieces are as large as chunks), giving back does not.
#[derive(Clone, Debug, Default)]
pub struct HostSlots {
    segments: BTreeMap<u64, Segment>,
}

impl HostSlots {
    /// Adds a segment, all free. `false` if the id is there already or it is empty.
    #[must_use]
    pub fn add(&mut self, id: u64, len: u64) -> bool {
        if len == 0 || self.segments.contains_key(&id) {
            return false;
        }
        self.segments.insert(
            id,
            Segment {
                len,
                free: BTreeMap::from([(0, len)]),
                free_total: len,
                closed: false,
            },
        );
        true
    }

    /// Takes an empty segment away; its length. `None` if it isn't empty or not there.
    pub fn remove(&mut self, id: u64) -> Option<u64> {
        let segment = self.segments.get(&id)?;
        if segment.free_total != segment.len {
            return None;
        }
        self.segments.remove(&id).map(|s| s.len)
    }

    /// Whether new pieces may come from a segment.
    pub fn set_closed(&mut self, id: u64, closed: bool) {
        if let Some(segment) = self.segments.get_mut(&id) {
            segment.closed = closed;
        }
    }

    /// Room for `len` bytes in whole `unit`s: all of it or nothing.
    #[must_use]
    pub fn take(&mut self, len: u64, unit: u64) -> Option<Vec<Piece>> {
        if len == 0 || unit == 0 || self.available(unit) < len {
            return None;
        }
        let whole = self
            .open()
            .flat_map(|(id, s)| s.free.iter().map(move |(at, n)| (s.free_total, *n, id, *at)))
            .filter(|(_, n, _, _)| *n >= len)
            .min()
            .map(|(_, _, id, at)| (id, at));
        let mut pieces = Vec::new();
        match whole {
            Some((segment, offset)) => pieces.push(Piece { segment, offset, len }),
            None => {
                let mut rest = len;
                let mut fullest: Vec<(u64, &Segment)> = self.open().collect();
                fullest.sort_by_key(|(id, s)| (s.free_total, *id));
                'all: for (segment, s) in fullest {
                    for (offset, n) in &s.free {
                        let take = (n / unit * unit).min(rest);
                        if take > 0 {
                            pieces.push(Piece {
                                segment,
                                offset: *offset,
                                len: take,
                            });
                            rest -= take;
                        }
                        if rest == 0 {
                            break 'all;
                        }
                    }
                }
                if rest > 0 {
                    return None;
                }
            }
        }
        for piece in &pieces {
            self.cut(*piece);
        }
        Some(pieces)
    }

    fn open(&self) -> impl Iterator<Item = (u64, &Segment)> {
        self.segments
            .iter()
            .filter(|(_, s)| !s.closed)
            .map(|(id, s)| (*id, s))
    }

    /// Takes the head of a free run.
    fn cut(&mut self, piece: Piece) {
        let Some(segment) = self.segments.get_mut(&piece.segment) else {
            return;
        };
        if let Some(n) = segment.free.remove(&piece.offset) {
            segment.free_total -= piece.len;
            if n > piece.len {
                segment.free.insert(piece.offset + piece.len, n - piece.len);
            }
        }
    }

    /// Gives a piece (or part of one) back.
    ///
    /// # Errors
    /// [`GiveBackError::NotLive`] if any of it is free already or lies in no segment; nothing changes.
    pub fn give_back(&mut self, piece: Piece) -> Result<(), GiveBackError> {
        let wrong = GiveBackError::NotLive(piece.offset);
        let segment = self.segments.get_mut(&piece.segment).ok_or(wrong)?;
        let end = piece
            .offset
            .checked_add(piece.len)
            .filter(|end| piece.len > 0 && *end <= segment.len)
            .ok_or(wrong)?;
        let (mut start, mut stop) = (piece.offset, end);
        if let Some((at, n)) = segment.free.range(..end).next_back().map(|(a, n)| (*a, *n)) {
            if at + n > piece.offset {
                return Err(wrong);
            }
            if at + n == piece.offset {
                segment.free.remove(&at);
                start = at;
            }
        }
        if let Some(n) = segment.free.remove(&end) {
            stop = end + n;
        }
        segment.free.insert(start, stop - start);
        segment.free_total += piece.len;
        Ok(())
    }

    /// Bytes that [`Self::take`] could give in whole units.
    #[must_use]
    pub fn available(&self, unit: u64) -> u64 {
        self.open()
            .flat_map(|(_, s)| s.free.values())
            .map(|n| n / unit * unit)
            .sum()
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.segments.values().map(|s| s.len - s.free_total).sum()
    }

    /// Bytes in use in one segment.
    #[must_use]
    pub fn used_in(&self, id: u64) -> u64 {
        self.segments.get(&id).map_or(0, |s| s.len - s.free_total)
    }

    /// Bytes of all segments.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.segments.values().map(|s| s.len).sum()
    }

    /// Segments with nothing in them, highest first: id and length.
    #[must_use]
    pub fn empty(&self) -> Vec<(u64, u64)> {
        self.segments
            .iter()
            .rev()
            .filter(|(_, s)| s.free_total == s.len)
            .map(|(id, s)| (*id, s.len))
            .collect()
    }

    /// Whether a segment is there with nothing in it.
    #[must_use]
    pub fn is_empty(&self, id: u64) -> bool {
        self.segments.get(&id).is_some_and(|s| s.free_total == s.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whole_gaps_come_first_and_pieces_only_when_needed() {
        let mut slots = HostSlots::default();
        assert!(slots.add(1, 8) && slots.add(2, 8) && !slots.add(2, 8) && !slots.add(3, 0));
        let a = slots.take(6, 2).unwrap();
        assert_eq!(
            a,
            [Piece {
                segment: 1,
                offset: 0,
                len: 6
            }]
        );
        let b = slots.take(6, 2).unwrap();
        assert_eq!(b[0].segment, 2);
        let c = slots.take(4, 2).unwrap();
        assert_eq!(c.len(), 2);
        assert_eq!((slots.available(2), slots.used()), (0, 16));
        assert_eq!(slots.take(2, 2), None);
        assert_eq!(slots.empty(), []);
        for piece in b.iter().chain(&c) {
            slots.give_back(*piece).unwrap();
        }
        assert_eq!(slots.empty(), [(2, 8)]);
        assert_eq!(slots.remove(1), None);
        assert_eq!(slots.remove(2), Some(8));
        assert!(slots.give_back(b[0]).is_err());
        assert_eq!(slots.total(), 8);
    }

    #[test]
    fn what_is_begun_is_filled_before_what_is_empty() {
        let mut slots = HostSlots::default();
        assert!(slots.add(1, 8) && slots.add(2, 8) && slots.add(3, 8));
        let first = slots.take(6, 2).unwrap();
        let second = slots.take(6, 2).unwrap();
        assert_eq!((first[0].segment, second[0].segment), (1, 2));
        slots.give_back(first[0]).unwrap();
        // Two bytes fit into the empty first segment, too; the second one is begun.
        assert_eq!(slots.take(2, 2).unwrap()[0].segment, 2);
        assert_eq!(slots.empty(), [(3, 8), (1, 8)]);
        // Cut into pieces: as few segments as will do are touched.
        assert!(slots.take(4, 2).is_some());
        let cut = slots.take(10, 2).unwrap();
        assert_eq!(
            cut.iter().map(|p| (p.segment, p.len)).collect::<Vec<_>>(),
            [(1, 4), (3, 6)]
        );
    }

    #[test]
    fn a_closed_segment_gives_nothing_more() {
        let mut slots = HostSlots::default();
        assert!(slots.add(1, 4) && slots.add(2, 4));
        slots.set_closed(1, true);
        assert_eq!(slots.take(4, 1).unwrap()[0].segment, 2);
        assert_eq!(slots.take(1, 1), None);
        slots.set_closed(1, false);
        assert!(slots.take(1, 1).is_some());
    }

    #[test]
    fn odd_rests_are_left_alone() {
        let mut slots = HostSlots::default();
        assert!(slots.add(1, 7) && slots.add(2, 5));
        assert_eq!(slots.available(4), 8);
        let pieces = slots.take(8, 4).unwrap();
        assert!(pieces.iter().all(|p| p.len == 4));
        assert_eq!(slots.take(4, 4), None);
    }

    proptest! {
        #[test]
        fn every_byte_has_one_owner(ops in prop::collection::vec((any::<bool>(), 1u64..12, any::<prop::sample::Index>()), 1..200)) {
            let mut slots = HostSlots::default();
            for id in 0..4 {
                prop_assert!(slots.add(id, 16));
            }
            let mut owner = vec![None; 64];
            let mut live: Vec<Vec<Piece>> = Vec::new();
            for (turn, (take, len, which)) in ops.into_iter().enumerate() {
                let bytes = |p: &Piece| {
                    let start = usize::try_from(p.segment * 16 + p.offset).unwrap();
                    start..start + usize::try_from(p.len).unwrap()
                };
                let free = owner.iter().filter(|o: &&Option<usize>| o.is_none()).count() as u64;
                if take || live.is_empty() {
                    match slots.take(len, 1) {
                        Some(pieces) => {
                            prop_assert_eq!(pieces.iter().map(|p| p.len).sum::<u64>(), len);
                            for p in &pieces {
                                prop_assert!(p.offset + p.len <= 16);
                                for o in &mut owner[bytes(p)] {
                                    prop_assert!(o.replace(turn).is_none());
                                }
                            }
                            live.push(pieces);
                        }
                        None => prop_assert!(free < len),
                    }
                } else {
                    let pieces = live.swap_remove(which.index(live.len()));
                    for p in &pieces {
                        owner[bytes(p)].fill(None);
                        prop_assert_eq!(slots.give_back(*p), Ok(()));
                        prop_assert!(slots.give_back(*p).is_err(), "given back twice");
                    }
                }
                let used = owner.iter().filter(|o| o.is_some()).count() as u64;
                prop_assert_eq!((slots.used(), slots.available(1)), (used, 64 - used));
            }
        }
    }
}
