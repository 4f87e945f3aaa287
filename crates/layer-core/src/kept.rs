//! Host copies: of what is away, and of what came back and may leave again unchanged.
//!
//! A chunk on the card knows its kept copy by a [`Ticket`] alone. The copy may be given up at any time by whoever needs
//! the room; then the ticket is good for nothing, and the chunk is copied as if there had been none.

use std::collections::BTreeMap;

use ebb_alloc::Piece;
use ebb_device::Fingerprint;
use ebb_device::fingerprint::BLOCK;

use crate::arena::{Slots, is_common};

/// Where the bytes of a chunk are when it is not on the card, and what is known of them.
///
/// | pieces | fingerprints | |
/// | --- | --- | --- |
/// | none | none | nobody ever wrote it |
/// | none | all of them zero | it is all zeros |
/// | some | none | in the pieces |
/// | some | some | in the pieces, except for the blocks that are zero |
///
/// The pieces are of host memory, of this process's own or in common with others ([`crate::arena::is_common`]), or one of them is a room on another
/// card ([`crate::arena::room_of`]) and the only one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostCopy {
    pub(crate) pieces: Vec<Piece>,
    /// One for each block, or none.
    pub(crate) prints: Vec<Fingerprint>,
    /// When the chunk left last, it was as it had come back: what was only read once is likely only read again.
    pub(crate) steady: bool,
}

impl HostCopy {
    /// Bytes of which nothing is known.
    #[cfg(test)]
    pub(crate) fn plain(pieces: Vec<Piece>) -> Self {
        Self {
            pieces,
            ..Self::default()
        }
    }

    /// Bytes of it in common segments, if its chunk came back and left again unchanged.
    pub(crate) fn steady_common(&self) -> u64 {
        if self.steady { common_of(self) } else { 0 }
    }

    /// Whether there is nothing to bring back.
    pub(crate) fn is_blank(&self) -> bool {
        self.pieces.is_empty() && self.prints.is_empty()
    }

    /// The runs of zeros in a chunk of `len` bytes, which are not in the pieces: where, and how long.
    pub(crate) fn zeros(&self, len: u64) -> Vec<(u64, u64)> {
        runs(len, &self.prints, |_, print| print.zero)
    }

    /// The runs that are in the pieces.
    pub(crate) fn filled(&self, len: u64) -> Vec<(u64, u64)> {
        if self.prints.is_empty() {
            return vec![(0, len)];
        }
        runs(len, &self.prints, |_, print| !print.zero)
    }

    /// The runs of the chunk, as it is known to be now, that are not in this copy of it as they are.
    pub(crate) fn stale(&self, len: u64, now: &[Fingerprint]) -> Vec<(u64, u64)> {
        runs(len, now, |at, print| {
            !print.zero && self.prints.get(at) != Some(print)
        })
    }
}

/// Runs of blocks that `pick` wants.
fn runs(len: u64, prints: &[Fingerprint], pick: impl Fn(usize, &Fingerprint) -> bool) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for ((at, print), start) in prints.iter().enumerate().zip((0..len).step_by(BLOCK as usize)) {
        if !pick(at, print) {
            continue;
        }
        let bytes = BLOCK.min(len - start);
        match runs.last_mut() {
            Some((from, run)) if *from + *run == start => *run += bytes,
            _ => runs.push((start, bytes)),
        }
    }
    runs
}

/// By which a chunk on the card knows its kept copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

/// The copy of a chunk that is on a card.
#[derive(Debug)]
struct Kept {
    copy: HostCopy,
    device: usize,
    /// Bytes of the chunk.
    len: u64,
}

/// Bytes of the chunks on a card that have kept copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OnCard {
    /// All of them.
    pub(crate) kept: u64,
    /// Those that were steady when they left last.
    pub(crate) steady: u64,
}

/// The kept copies of a process, oldest first. Their pieces count as used in the arena's slots. What of them lies in common segments makes no room
/// for anything here if it is given up, and counts apart.
#[derive(Debug, Default)]
pub(crate) struct KeptCopies {
    copies: BTreeMap<Ticket, Kept>,
    next: u64,
    bytes: u64,
    common: u64,
    on_card: BTreeMap<usize, OnCard>,
}

impl KeptCopies {
    /// Bytes of all pieces of the process's own.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of all pieces in common segments.
    pub(crate) fn common(&self) -> u64 {
        self.common
    }

    /// Of those, of the copies of one device's chunks.
    pub(crate) fn common_of_device(&self, device: usize) -> u64 {
        let here = self.copies.values().filter(|kept| kept.device == device);
        here.map(|kept| common_of(&kept.copy)).sum()
    }

    /// Of those, of copies that were steady when they left last.
    pub(crate) fn steady_common(&self) -> u64 {
        self.copies.values().map(|kept| kept.copy.steady_common()).sum()
    }

    /// Bytes that giving everything up would make room for, in whole `unit`s.
    pub(crate) fn room(&self, unit: u64) -> u64 {
        let pieces = self.copies.values().flat_map(|kept| own(&kept.copy));
        pieces.map(|piece| piece.len / unit * unit).sum()
    }

    /// Of a chunk of `len` bytes on a device.
    pub(crate) fn add(&mut self, copy: HostCopy, device: usize, len: u64) -> Ticket {
        self.next += 1;
        let ticket = Ticket(self.next);
        self.bytes += bytes_of(&copy);
        self.common += common_of(&copy);
        let sums = self.on_card.entry(device).or_default();
        sums.kept += len;
        sums.steady += if copy.steady { len } else { 0 };
        self.copies.insert(ticket, Kept { copy, device, len });
        ticket
    }

    pub(crate) fn get(&self, ticket: Ticket) -> Option<&HostCopy> {
        self.copies.get(&ticket).map(|kept| &kept.copy)
    }

    /// Takes a copy out. Its pieces stay used.
    pub(crate) fn claim(&mut self, ticket: Ticket) -> Option<HostCopy> {
        let Kept { copy, device, len } = self.copies.remove(&ticket)?;
        self.bytes -= bytes_of(&copy);
        self.common -= common_of(&copy);
        if let Some(sums) = self.on_card.get_mut(&device) {
            sums.kept -= len;
            sums.steady -= if copy.steady { len } else { 0 };
        }
        Some(copy)
    }

    /// The chunk is not as its copy is.
    pub(crate) fn differs(&mut self, ticket: Ticket) {
        if let Some(kept) = self.copies.get_mut(&ticket)
            && std::mem::take(&mut kept.copy.steady)
            && let Some(sums) = self.on_card.get_mut(&kept.device)
        {
            sums.steady -= kept.len;
        }
    }

    /// What a device has of such chunks.
    pub(crate) fn on_card(&self, device: usize) -> OnCard {
        self.on_card.get(&device).copied().unwrap_or_default()
    }

    /// Gives a copy up. `false` if it is not there.
    pub(crate) fn give_up(&mut self, ticket: Ticket, slots: &mut Slots) -> bool {
        let Some(copy) = self.claim(ticket) else {
            return false;
        };
        for piece in copy.pieces {
            let given = slots.give_back(piece);
            debug_assert!(given.is_ok(), "{piece:?} was not taken");
        }
        true
    }

    /// Gives the oldest copy up that makes room. `false` if there is none.
    pub(crate) fn give_up_oldest(&mut self, slots: &mut Slots) -> bool {
        let makes_room = |kept: &Kept| own(&kept.copy).next().is_some();
        let oldest = self.copies.iter().find(|(_, kept)| makes_room(kept));
        match oldest.map(|(ticket, _)| *ticket) {
            Some(ticket) => self.give_up(ticket, slots),
            None => false,
        }
    }

    /// Lets `change` look at the pieces of every copy, which may lie elsewhere from then on.
    pub(crate) fn rehome(&mut self, mut change: impl FnMut(&mut Vec<Piece>)) {
        for Kept { copy, .. } in self.copies.values_mut() {
            self.bytes -= bytes_of(copy);
            self.common -= common_of(copy);
            change(&mut copy.pieces);
            self.bytes += bytes_of(copy);
            self.common += common_of(copy);
        }
    }

    /// All pieces of all copies.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.copies.values().flat_map(|kept| &kept.copy.pieces)
    }

    /// Bytes in each segment.
    pub(crate) fn by_segment(&self) -> BTreeMap<u64, u64> {
        let mut sums = BTreeMap::new();
        for piece in self.copies.values().flat_map(|kept| own(&kept.copy)) {
            *sums.entry(piece.segment).or_default() += piece.len;
        }
        sums
    }

    /// Gives up what has a piece in a segment.
    pub(crate) fn leave(&mut self, segment: u64, slots: &mut Slots) {
        let there: Vec<Ticket> = self
            .copies
            .iter()
            .filter(|(_, kept)| kept.copy.pieces.iter().any(|piece| piece.segment == segment))
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in there {
            self.give_up(ticket, slots);
        }
    }
}

fn own(copy: &HostCopy) -> impl Iterator<Item = &Piece> {
    copy.pieces.iter().filter(|piece| !is_common(piece))
}

fn bytes_of(copy: &HostCopy) -> u64 {
    own(copy).map(|piece| piece.len).sum()
}

fn common_of(copy: &HostCopy) -> u64 {
    let common = copy.pieces.iter().filter(|piece| is_common(piece));
    common.map(|piece| piece.len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(n: u64) -> Fingerprint {
        Fingerprint {
            sums: [n; 4],
            zero: n == 0,
        }
    }

    #[test]
    fn runs_of_blocks() {
        let len = 4 * BLOCK + 4096;
        let copy = HostCopy {
            pieces: Vec::new(),
            prints: [1, 0, 0, 2, 3].map(print).to_vec(),
            steady: false,
        };
        assert_eq!(copy.zeros(len), [(BLOCK, 2 * BLOCK)]);
        assert_eq!(copy.filled(len), [(0, BLOCK), (3 * BLOCK, BLOCK + 4096)]);
        assert_eq!(copy.stale(len, &copy.prints), []);
        // A block that is zero now needs no copy, and one that was and is not any more does.
        let now = [1, 7, 0, 0, 9].map(print);
        assert_eq!(copy.stale(len, &now), [(BLOCK, BLOCK), (4 * BLOCK, 4096)]);
        assert_eq!(HostCopy::default().filled(len), [(0, len)]);
        assert_eq!(HostCopy::default().stale(len, &now).len(), 2);
        assert!(HostCopy::default().is_blank() && !copy.is_blank());
    }

    #[test]
    fn kept_copies_give_way() {
        let mut slots = Slots::default();
        assert!(slots.add(1, 8) && slots.add(2, 8));
        let mut kept = KeptCopies::default();
        let tickets: Vec<Ticket> = (0..4)
            .map(|n| {
                let mut copy = HostCopy::plain(slots.take(4, 2).unwrap());
                copy.steady = n > 0;
                kept.add(copy, 7, 5)
            })
            .collect();
        let sums = |kept: &KeptCopies| (kept.on_card(7).kept, kept.on_card(7).steady);
        assert_eq!((sums(&kept), kept.on_card(0)), ((20, 15), OnCard::default()));
        kept.differs(tickets[3]);
        kept.differs(tickets[3]);
        kept.differs(tickets[0]);
        assert_eq!(sums(&kept), (20, 10));
        assert_eq!((kept.bytes(), kept.room(2), kept.room(3)), (16, 16, 12));
        assert_eq!(kept.by_segment(), BTreeMap::from([(1, 8), (2, 8)]));
        let claimed = kept.claim(tickets[1]).unwrap();
        assert!(kept.claim(tickets[1]).is_none() && kept.get(tickets[1]).is_none());
        assert_eq!((kept.bytes(), slots.used(), sums(&kept)), (12, 16, (15, 5)));
        kept.leave(2, &mut slots);
        assert!(slots.is_empty(2) && kept.get(tickets[3]).is_none());
        assert!(kept.give_up_oldest(&mut slots) && !kept.give_up_oldest(&mut slots));
        assert!(!kept.give_up(tickets[0], &mut slots));
        assert_eq!((kept.bytes(), slots.used(), sums(&kept)), (0, 4, (0, 0)));
        slots.give_back(claimed.pieces[0]).unwrap();
    }
}
