//! Who has what in common segments: from the first offer until the last one has left or is dead.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ebb_policy::Time;
use ebb_protocol::wire::{CommonBlock, SegmentInfo};
use ebb_units::Bytes;

use super::super::{Arena, Holder, Job, Move, Segment, State};
use super::{Common, Hold, Known, Target};
use crate::equal::{self, BLOCK};

/// A common segment that was wanted back is not asked for again so soon.
const WANTED_PAUSE: Duration = Duration::from_secs(5);
/// Blocks in one offer: they fit a packet.
const OFFER: usize = 1024;

impl Arena {
    pub(super) fn offer(
        &mut self,
        key: u64,
        holder: Holder,
        blocks: Vec<CommonBlock>,
        moves: &mut Vec<Move>,
    ) {
        let Some(segment) = self.segments.get(&key) else {
            return;
        };
        let (Some(memory), Some(common)) = (&segment.memory, self.common.commons.get_mut(&key)) else {
            return;
        };
        let hold = common.holders.entry(holder).or_insert(Hold {
            wire: segment.wire,
            ..Hold::default()
        });
        self.common.by_wire.insert((holder, hold.wire), key);
        let info = SegmentInfo {
            id: hold.wire,
            bytes: segment.bytes,
        };
        for some in blocks.chunks(OFFER) {
            hold.offers += 1;
            moves.push(Move::Offer {
                to: holder,
                segment: info,
                blocks: some.to_vec(),
                memory: memory.clone(),
            });
        }
    }

    /// A holder took an offer or did not, or it never reached him.
    pub(crate) fn offer_answered(
        &mut self,
        holder: Holder,
        wire: u64,
        held: Option<bool>,
        moves: &mut Vec<Move>,
    ) {
        let Some(key) = self.common.by_wire.get(&(holder, wire)).copied() else {
            return;
        };
        let common = self.common.commons.get_mut(&key);
        if let Some(hold) = common.and_then(|common| common.holders.get_mut(&holder)) {
            hold.offers = hold.offers.saturating_sub(1);
            hold.held = held.unwrap_or(hold.held);
        }
        self.sweep_common(key, moves);
    }

    /// Nothing of a holder's is in these any more.
    pub(crate) fn common_left(&mut self, holder: Holder, wires: &[u64], moves: &mut Vec<Move>) {
        for wire in wires {
            let Some(key) = self.common.by_wire.get(&(holder, *wire)).copied() else {
                continue;
            };
            let common = self.common.commons.get_mut(&key);
            if let Some(hold) = common.and_then(|common| common.holders.get_mut(&holder)) {
                hold.held = false;
            }
            self.sweep_common(key, moves);
        }
    }

    /// What of a holder's lies in common segments.
    pub(crate) fn common_use(&mut self, holder: Holder, away: Bytes, kept: Bytes) {
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.common = (away, kept);
        }
    }

    /// Common segments that a holder has, from an earlier daemon or over an earlier connection; all of them, `first` ones first. Returns how
    /// many were taken on; the others stay the process's own affair.
    pub(crate) fn declare_common(
        &mut self,
        holder: Holder,
        first: bool,
        infos: &[SegmentInfo],
        memories: Vec<OwnedFd>,
        moves: &mut Vec<Move>,
    ) -> usize {
        let before = self.common.of(holder);
        if first {
            for key in &before {
                if let Some(common) = self.common.commons.get_mut(key) {
                    common.holders.remove(&holder);
                }
            }
            self.common.by_wire.retain(|(other, _), _| *other != holder);
        }
        let mut taken = 0;
        for (info, memory) in infos.iter().zip(memories) {
            taken += usize::from(self.declare_one_common(holder, *info, memory));
        }
        let all: Vec<u64> = self.common.commons.keys().copied().collect();
        for key in all {
            self.sweep_common(key, moves);
        }
        taken
    }

    fn declare_one_common(&mut self, holder: Holder, info: SegmentInfo, memory: OwnedFd) -> bool {
        if !equal::is_sealed(&memory, info.bytes) {
            return false;
        }
        let id = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino)).ok();
        let this = id(&memory);
        let same = |key: &&u64| {
            let memory = self.segments.get(key).and_then(|segment| segment.memory.as_ref());
            memory.is_some_and(|memory| id(memory) == this)
        };
        let known = self.common.commons.keys().find(same).copied();
        let key = match known {
            Some(key) => key,
            None => {
                let Some(domain) = self.common.domains.get(&holder).copied() else {
                    return false;
                };
                if self.held.saturating_add(info.bytes) > self.budget {
                    return false;
                }
                let key = self.next;
                self.next += 1;
                self.held += info.bytes;
                let segment = Segment::new(info.bytes, Some(Arc::new(memory)), State::Common, info.id);
                self.segments.insert(key, segment);
                let common = Common {
                    domain,
                    samples: Vec::new(),
                    holders: BTreeMap::new(),
                    wanted_at: None,
                };
                self.common.commons.insert(key, common);
                if self.common.secret.is_some() {
                    let spots = (0..info.bytes.0 / BLOCK.0).map(|n| Target::Common((key, n * BLOCK.0)));
                    self.common.fresh.extend(spots);
                }
                key
            }
        };
        // A number stands for one segment.
        if let Some(other) = self
            .common
            .by_wire
            .get(&(holder, info.id))
            .filter(|other| **other != key)
        {
            let other = *other;
            if let Some(common) = self.common.commons.get_mut(&other) {
                common.holders.remove(&holder);
            }
        }
        if let Some(common) = self.common.commons.get_mut(&key) {
            let hold = Hold {
                wire: info.id,
                held: true,
                offers: 0,
            };
            if let Some(old) = common.holders.insert(holder, hold) {
                self.common.by_wire.remove(&(holder, old.wire));
            }
        }
        self.common.by_wire.insert((holder, info.id), key);
        // So that its death is noticed.
        self.account(holder);
        true
    }

    /// A holder hung up: what it had been told of may not have reached it, and what it told holds no longer.
    pub(in crate::arena) fn common_hung_up(&mut self, holder: Holder) {
        self.common.forget_holder(holder);
        for key in self.common.of(holder) {
            let common = self.common.commons.get_mut(&key);
            if let Some(hold) = common.and_then(|common| common.holders.get_mut(&holder)) {
                // It says what it has when it comes back.
                (hold.held, hold.offers) = (true, 0);
            }
        }
    }

    /// Whether a session that is over for now holds something all the same.
    pub(crate) fn holds_common(&self, holder: Holder) -> bool {
        !self.common.of(holder).is_empty()
    }

    pub(in crate::arena) fn common_died(&mut self, holder: Holder, moves: &mut Vec<Move>) {
        self.common.forget_holder(holder);
        self.common.domains.remove(&holder);
        for key in self.common.of(holder) {
            if let Some(common) = self.common.commons.get_mut(&key) {
                common.holders.remove(&holder);
            }
            self.sweep_common(key, moves);
        }
        self.common.by_wire.retain(|(other, _), _| *other != holder);
    }

    /// A common segment that nobody holds goes.
    pub(super) fn sweep_common(&mut self, key: u64, moves: &mut Vec<Move>) {
        let Some(common) = self.common.commons.get_mut(&key) else {
            return;
        };
        let by_wire = &mut self.common.by_wire;
        common.holders.retain(|holder, hold| {
            let stays = hold.held || hold.offers > 0;
            if !stays {
                by_wire.remove(&(*holder, hold.wire));
            }
            stays
        });
        if !common.holders.is_empty() {
            return;
        }
        let Some(common) = self.common.commons.remove(&key) else {
            return;
        };
        for sample in common.samples {
            let entry = (common.domain, sample);
            if let Some(Known::Common(spot)) = self.common.index.get(&entry)
                && spot.0 == key
            {
                self.common.index.remove(&entry);
            }
        }
        if let Some(segment) = self.segments.get_mut(&key) {
            segment.state = State::Cleaning;
            let (bytes, memory) = (segment.bytes, segment.memory.take());
            self.jobs += 1;
            moves.push(Move::Work(Job::Discard { key, bytes, memory }));
        }
    }

    /// Asks for common segments back, oldest first, so many bytes: kept copies in them give way. What is off the card stays.
    pub(in crate::arena) fn recall_common(&mut self, now: Time, short: Bytes, moves: &mut Vec<Move>) {
        let lately = |common: &Common| common.wanted_at.is_some_and(|at| now < at.after(WANTED_PAUSE));
        let asked = self.common.commons.iter().filter(|(_, common)| lately(common));
        let asked: Bytes = asked.map(|(key, _)| self.segments[key].bytes).sum();
        let mut short = short.saturating_sub(asked);
        for (key, common) in &mut self.common.commons {
            if short.is_zero() {
                break;
            }
            if lately(common) {
                continue;
            }
            common.wanted_at = Some(now);
            short = short.saturating_sub(self.segments[key].bytes);
            moves.extend(common.holders.iter().map(|(holder, hold)| Move::Unkeep {
                to: *holder,
                ids: vec![hold.wire],
            }));
        }
    }
}
