//! Common segments: one host copy of blocks that several tasks have alike.
//!
//! ```text
//!   rest               look                equal sample               merge                     offered
//!  (told) ──> fresh ──────────> known ──────────────────> match ────────────────> common ──────────────────> held, by each that took it
//!    ^          │                 │                         │ not equal,            │ (also: equals one)        │ left, died
//!    └──────────┴── its segment is gone, told anew ─────────┴── no room now         └── nobody took it ─────────┴──> gone
//! ```
//! Programs say which places in their segments are at rest; [`crate::equal`] finds and merges what is equal, in the background. A place is
//! known by segment and offset, and by the number of the *notice* that told of it: the program alone knows whether the notice still holds when
//! the offer arrives, and takes no offer whose notice does not. From the moment at which an offer is sent the receiver counts as a holder,
//! until it says that it is none or is dead. A common segment is gone with its last holder; its pages cannot be given back before, one by
//! one, since nobody can change a sealed file.
//!
//! Only what belongs to one *domain* is compared: one user, and one set of namespaces. Nobody can tell by time or by bytes what others hold.

mod holders;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ebb_policy::Time;
use ebb_protocol::wire::{CommonBlock, RestingRun};
use ebb_units::Bytes;
use rustix::io::Errno;

use super::{Arena, Holder, Move, Segment, State};
use crate::equal::{self, Alike, BLOCK, Block, Found, Merged, Sample, Secret};

/// Bytes that are read in a second at most, all in all.
const RATE: u64 = 2 << 30;
/// Blocks that are looked at by one job.
const LOOK: usize = 256;
/// Blocks that are read by one job that compares, but for the last match's.
const MERGE: usize = 1024;
/// After somebody was asked for it.
const ASKED_PAUSE: Duration = Duration::from_millis(50);
/// After there was no memory for a common segment, in the budget or on the machine.
const ROOM_PAUSE: Duration = Duration::from_secs(2);

/// Segment and offset.
type Spot = (u64, u64);

#[derive(Clone, Debug)]
struct Place {
    holder: Holder,
    /// What the holder knows the segment by.
    wire: u64,
    notice: u64,
    domain: u64,
    sample: Option<Sample>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    /// Of one program alone, as far as is known.
    Place(Spot),
    /// About to be compared.
    Match(u64),
    /// In a common segment.
    Common(Spot),
}

/// Places with one sample.
#[derive(Clone, Debug)]
struct Match {
    domain: u64,
    sample: Sample,
    /// In a common segment, which the others are compared with.
    common: Option<Spot>,
    /// With the notice of each.
    places: Vec<(Spot, u64)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Hold {
    wire: u64,
    /// It has said so, or may have.
    held: bool,
    /// Sent and not answered.
    offers: u32,
}

#[derive(Debug)]
struct Common {
    domain: u64,
    samples: Vec<Sample>,
    holders: BTreeMap<Holder, Hold>,
    wanted_at: Option<Time>,
}

#[derive(Debug)]
enum UnderWay {
    Look(Vec<Target>),
    Merge(Vec<(u64, Match)>),
}

#[derive(Clone, Copy, Debug)]
enum Target {
    Place(Spot, u64),
    Common(Spot),
}

/// What there is of it.
#[derive(Debug, Default)]
pub(super) struct Commons {
    /// `None`: it is off, and nothing is begun.
    secret: Option<Arc<Secret>>,
    names: BTreeMap<String, u64>,
    domains: BTreeMap<Holder, u64>,
    places: BTreeMap<Spot, Place>,
    fresh: VecDeque<Target>,
    index: BTreeMap<(u64, Sample), Known>,
    matches: BTreeMap<u64, Match>,
    next_match: u64,
    commons: BTreeMap<u64, Common>,
    by_wire: BTreeMap<(Holder, u64), u64>,
    under_way: Option<UnderWay>,
    not_before: Time,
}

impl Commons {
    /// A place is not what it was any more.
    fn forget(&mut self, spot: Spot) -> Option<Place> {
        let place = self.places.remove(&spot)?;
        if let Some(sample) = place.sample {
            let entry = (place.domain, sample);
            if self.index.get(&entry) == Some(&Known::Place(spot)) {
                self.index.remove(&entry);
            }
        }
        Some(place)
    }

    /// Nothing in a segment is what it was.
    pub(super) fn forget_segment(&mut self, key: u64) {
        let spots: Vec<Spot> = self
            .places
            .range((key, 0)..=(key, u64::MAX))
            .map(|(spot, _)| *spot)
            .collect();
        for spot in spots {
            self.forget(spot);
        }
    }

    fn forget_holder(&mut self, holder: Holder) {
        let theirs = |(spot, place): (&Spot, &Place)| (place.holder == holder).then_some(*spot);
        let spots: Vec<Spot> = self.places.iter().filter_map(theirs).collect();
        for spot in spots {
            self.forget(spot);
        }
    }

    fn of(&self, holder: Holder) -> Vec<u64> {
        let keys = self.by_wire.range((holder, 0)..=(holder, u64::MAX));
        keys.map(|(_, key)| *key).collect()
    }
}

impl Arena {
    /// Switches it on or off. What is in common segments stays there.
    pub(crate) fn set_common(&mut self, secret: Option<Secret>) {
        let commons = &mut self.common;
        if secret.is_some() == commons.secret.is_some() {
            return;
        }
        commons.secret = secret.map(Arc::new);
        if commons.secret.is_none() {
            commons.fresh.clear();
            commons.matches.clear();
            commons.index.clear();
            commons.places.clear();
        }
    }

    pub(crate) fn has_common(&self) -> bool {
        self.common.secret.is_some()
    }

    /// Whether it is known whose a holder's bytes are.
    pub(crate) fn has_domain(&self, holder: Holder) -> bool {
        self.common.domains.contains_key(&holder)
    }

    /// Whose a holder's bytes are: nothing is compared over the borders of these.
    pub(crate) fn set_domain(&mut self, holder: Holder, name: String) {
        let next = self.common.names.len() as u64;
        let domain = *self.common.names.entry(name).or_insert(next);
        self.common.domains.insert(holder, domain);
    }

    /// Bytes of all common segments.
    pub(crate) fn common_bytes(&self) -> Bytes {
        self.common
            .commons
            .keys()
            .map(|key| self.segments[key].bytes)
            .sum()
    }

    /// What those bytes would take beyond that if each holder had its own.
    pub(crate) fn spared(&self) -> Bytes {
        let uses = self.accounts.values().map(|account| account.common);
        let all: Bytes = uses.map(|(away, kept)| away.saturating_add(kept)).sum();
        all.saturating_sub(self.common_bytes())
    }

    /// Of what a holder has off the card: bytes that lie in common segments.
    pub(super) fn common_away(&self, holder: Holder) -> Bytes {
        self.accounts
            .get(&holder)
            .map_or(Bytes::ZERO, |account| account.common.0)
    }

    /// A holder says which of its bytes are at rest. Ids that it does not hold are ignored, and what is not whole blocks.
    pub(crate) fn rest(&mut self, holder: Holder, notice: u64, runs: &[RestingRun]) {
        let domain = self.common.domains.get(&holder).copied();
        let (Some(account), Some(domain)) = (self.accounts.get(&holder), domain) else {
            return;
        };
        if self.common.secret.is_none() {
            return;
        }
        for run in runs {
            let Some(key) = account.segments.get(&run.segment) else {
                continue;
            };
            let end = run.offset.checked_add(run.bytes.0);
            let inside = end.is_some_and(|end| end <= self.segments[key].bytes.0);
            if !inside || !run.offset.is_multiple_of(BLOCK.0) {
                continue;
            }
            for n in 0..run.bytes.0 / BLOCK.0 {
                let spot = (*key, run.offset + n * BLOCK.0);
                self.common.forget(spot);
                let place = Place {
                    holder,
                    wire: run.segment,
                    notice,
                    domain,
                    sample: None,
                };
                self.common.places.insert(spot, place);
                self.common.fresh.push_back(Target::Place(spot, notice));
            }
        }
    }

    /// The place, if it is what that notice told of and can be read.
    fn resting(&self, spot: Spot, notice: u64) -> Option<(&Place, Block)> {
        let place = self.common.places.get(&spot).filter(|p| p.notice == notice)?;
        let segment = self.segments.get(&spot.0)?;
        if segment.state != State::Lent(place.holder) {
            return None;
        }
        let block = Block {
            memory: segment.memory.clone()?,
            offset: spot.1,
        };
        Some((place, block))
    }

    fn in_common(&self, spot: Spot) -> Option<Block> {
        self.common.commons.get(&spot.0)?;
        let memory = self.segments.get(&spot.0)?.memory.clone()?;
        Some(Block {
            memory,
            offset: spot.1,
        })
    }

    /// Begins what is to be done next, one thing at a time.
    pub(super) fn seek_equals(&mut self, now: Time, moves: &mut Vec<Move>) {
        let Some(secret) = self.common.secret.clone() else {
            return;
        };
        if self.common.under_way.is_some() || now < self.common.not_before {
            return;
        }
        let new = self
            .common
            .matches
            .values()
            .filter(|m| m.common.is_none())
            .count() as u64;
        // As large as segments are, if there is so much: each is a file and a mapping in every program that has it.
        if new * BLOCK.0 < self.segment.0 && self.look(&secret, moves) {
            return;
        }
        self.merge(now, moves);
    }

    fn look(&mut self, secret: &Arc<Secret>, moves: &mut Vec<Move>) -> bool {
        let (mut targets, mut blocks) = (Vec::new(), Vec::new());
        while targets.len() < LOOK {
            let Some(target) = self.common.fresh.pop_front() else {
                break;
            };
            let block = match target {
                Target::Place(spot, notice) => self.resting(spot, notice).map(|(_, block)| block),
                Target::Common(spot) => self.in_common(spot),
            };
            if let Some(block) = block {
                targets.push(target);
                blocks.push(block);
            }
        }
        if targets.is_empty() {
            return false;
        }
        self.common.under_way = Some(UnderWay::Look(targets));
        let secret = secret.clone();
        moves.push(Move::Equal(equal::Job::Look { blocks, secret }));
        true
    }

    fn merge(&mut self, now: Time, moves: &mut Vec<Move>) {
        let Some(domain) = self.common.matches.values().next().map(|first| first.domain) else {
            return;
        };
        // Whoever is in need has the room first: what he gives back by it makes more.
        let room = if self.wanted(true).is_zero() {
            self.budget
                .saturating_sub(self.held)
                .saturating_sub(self.to_load())
        } else {
            Bytes::ZERO
        };
        let mut room = room.min(self.segment).0 / BLOCK.0;
        let ids: Vec<u64> = self
            .common
            .matches
            .iter()
            .filter(|(_, one)| one.domain == domain)
            .map(|(id, _)| *id)
            .collect();
        let (mut chosen, mut alike, mut new, mut waits) = (Vec::new(), Vec::new(), 0, false);
        let mut blocks_read = 0;
        for id in ids {
            if blocks_read >= MERGE {
                break;
            }
            let Some(mut one) = self.common.matches.remove(&id) else {
                continue;
            };
            let resting = one
                .places
                .iter()
                .filter(|(spot, n)| self.resting(*spot, *n).is_some());
            one.places = resting.copied().collect();
            let sealed = one.common.and_then(|spot| self.in_common(spot));
            if sealed.is_none() {
                one.common = None;
            }
            if one.places.len() < 1 + usize::from(sealed.is_none()) {
                // Nothing is left to compare with.
                let known = match (one.places.first(), one.common) {
                    (_, Some(spot)) => Some(Known::Common(spot)),
                    (Some((spot, _)), None) => Some(Known::Place(*spot)),
                    (None, None) => None,
                };
                self.settle(&one, known);
                continue;
            }
            if sealed.is_none() && room == 0 {
                waits = true;
                self.common.matches.insert(id, one);
                continue;
            }
            let blocks = one.places.iter().filter_map(|(spot, n)| self.resting(*spot, *n));
            let mut blocks = sealed.clone().into_iter().chain(blocks.map(|(_, block)| block));
            let Some(first) = blocks.next() else { continue };
            let others: Vec<Block> = blocks.collect();
            blocks_read += 1 + others.len();
            if sealed.is_none() {
                room -= 1;
                new += 1;
            }
            alike.push(Alike {
                first,
                sealed: sealed.is_some(),
                others,
            });
            chosen.push((id, one));
        }
        if chosen.is_empty() {
            if waits {
                let pause = if self.ask_for_own(now, moves) {
                    ASKED_PAUSE
                } else {
                    ROOM_PAUSE
                };
                self.common.not_before = now.after(pause);
            }
            return;
        }
        let key = self.next;
        self.next += 1;
        let bytes = Bytes(new * BLOCK.0);
        self.held += bytes;
        let wire = self.wire_base.wrapping_add(key);
        self.segments
            .insert(key, Segment::new(bytes, None, State::Merging, wire));
        self.common.under_way = Some(UnderWay::Merge(chosen));
        moves.push(Move::Equal(equal::Job::Merge { key, alike }));
    }

    /// Asks for room that is empty because what was in it is in common by now, a segment at a time. `false`: there is none.
    fn ask_for_own(&mut self, now: Time, moves: &mut Vec<Move>) -> bool {
        let spare = |(holder, account): (&Holder, &super::Account)| {
            let (away, kept) = account.common;
            let used = account.evicted.saturating_sub(account.tier.on_disk);
            let spare = account.held.saturating_sub(used.saturating_sub(away));
            let theirs = spare.min(away.saturating_add(kept));
            (theirs >= self.segment && account.recalled.is_zero()).then_some((theirs, *holder))
        };
        let Some((_, from)) = self.accounts.iter().filter_map(spare).max() else {
            return false;
        };
        let bytes = self.segment;
        let account = self.account(from);
        (account.recalled, account.recalled_at) = (bytes, now);
        moves.push(Move::Recall { from, bytes });
        true
    }

    /// What a sample stands for from now on.
    fn settle(&mut self, one: &Match, known: Option<Known>) {
        let entry = (one.domain, one.sample);
        match known {
            Some(known) => self.common.index.insert(entry, known),
            None => self.common.index.remove(&entry),
        };
    }

    /// A job ended. An error is the machine's: it has no memory for a common segment at present.
    pub(crate) fn equal(&mut self, now: Time, done: equal::Done, moves: &mut Vec<Move>) -> Result<(), Errno> {
        match (done, self.common.under_way.take()) {
            (equal::Done::Looked(samples), Some(UnderWay::Look(targets))) => {
                let read = Bytes(targets.len() as u64 * (BLOCK.0 / 64));
                self.common.not_before = now.after(at_rate(read));
                for (target, sample) in targets.into_iter().zip(samples) {
                    self.looked(target, sample);
                }
                Ok(())
            }
            (equal::Done::Merged { key, result }, Some(UnderWay::Merge(chosen))) => {
                self.merged(now, key, result, chosen, moves)
            }
            (_, other) => {
                self.common.under_way = other;
                Ok(())
            }
        }
    }

    fn looked(&mut self, target: Target, sample: Option<Sample>) {
        let (domain, sample, known) = match (target, sample) {
            (Target::Place(spot, notice), Some(sample)) => {
                let Some(domain) = self.resting(spot, notice).map(|(place, _)| place.domain) else {
                    return;
                };
                if let Some(place) = self.common.places.get_mut(&spot) {
                    place.sample = Some(sample);
                }
                (domain, sample, Known::Place(spot))
            }
            (Target::Common(spot), Some(sample)) => {
                let Some(common) = self.common.commons.get_mut(&spot.0) else {
                    return;
                };
                common.samples.push(sample);
                (common.domain, sample, Known::Common(spot))
            }
            (Target::Place(spot, _), None) => {
                self.common.forget(spot);
                return;
            }
            (Target::Common(_), None) => return,
        };
        let entry = (domain, sample);
        let place = |commons: &Commons, spot: Spot| {
            let place = commons.places.get(&spot)?;
            (place.sample == Some(sample) && place.domain == domain).then_some((spot, place.notice))
        };
        let before = self.common.index.get(&entry).copied();
        let commons = &mut self.common;
        let (common, places) = match (known, before) {
            (Known::Place(spot), Some(Known::Match(id))) => {
                let place = place(commons, spot);
                if let Some(one) = commons.matches.get_mut(&id) {
                    one.places.extend(place);
                }
                return;
            }
            (Known::Place(spot), Some(Known::Common(with))) => (Some(with), vec![spot]),
            (Known::Place(spot), Some(Known::Place(other))) if other != spot => (None, vec![other, spot]),
            (Known::Common(with), Some(Known::Place(other))) => (Some(with), vec![other]),
            (Known::Common(_), Some(_)) => return,
            (known, _) => {
                commons.index.insert(entry, known);
                return;
            }
        };
        let places: Vec<(Spot, u64)> = places
            .into_iter()
            .filter_map(|spot| place(commons, spot))
            .collect();
        if places.len() < 1 + usize::from(common.is_none()) {
            // What was known is not there any more.
            commons.index.insert(entry, known);
            return;
        }
        commons.next_match += 1;
        let id = commons.next_match;
        commons.matches.insert(
            id,
            Match {
                domain,
                sample,
                common,
                places,
            },
        );
        commons.index.insert(entry, Known::Match(id));
    }

    fn merged(
        &mut self,
        now: Time,
        key: u64,
        result: Result<Merged, Errno>,
        chosen: Vec<(u64, Match)>,
        moves: &mut Vec<Move>,
    ) -> Result<(), Errno> {
        let planned = self
            .segments
            .get(&key)
            .map_or(Bytes::ZERO, |segment| segment.bytes);
        let (memory, found, error) = match result {
            Ok(merged) => (merged.memory, merged.found, None),
            Err(error) => (None, Vec::new(), Some(error)),
        };
        self.held = self.held.saturating_sub(planned);
        if let Some((memory, bytes)) = memory
            && let Some(segment) = self.segments.get_mut(&key)
        {
            (segment.memory, segment.bytes, segment.state) = (Some(memory), bytes, State::Common);
            self.held += bytes;
            let common = Common {
                domain: chosen.first().map_or(0, |(_, one)| one.domain),
                samples: Vec::new(),
                holders: BTreeMap::new(),
                wanted_at: None,
            };
            self.common.commons.insert(key, common);
        } else {
            self.segments.remove(&key);
        }
        let mut offers: BTreeMap<(u64, Holder), Vec<CommonBlock>> = BTreeMap::new();
        let (mut read, mut short) = (0, error.is_some());
        for (n, (id, one)) in chosen.into_iter().enumerate() {
            let Some(found) = found.get(n).cloned().flatten() else {
                short = true;
                // Unless it was switched off meanwhile.
                if self.common.secret.is_some() {
                    self.common.matches.insert(id, one);
                }
                continue;
            };
            read += one.places.len() as u64 * BLOCK.0;
            self.compared(key, one, &found, &mut offers);
        }
        let touched: BTreeSet<u64> = offers.keys().map(|(key, _)| *key).chain([key]).collect();
        for ((key, holder), blocks) in offers {
            self.offer(key, holder, blocks, moves);
        }
        for key in touched {
            self.sweep_common(key, moves);
        }
        let pause = if short { ROOM_PAUSE } else { at_rate(Bytes(read)) };
        self.common.not_before = now.after(pause);
        error.map_or(Ok(()), Err)
    }

    /// What was found of one match.
    fn compared(
        &mut self,
        key: u64,
        one: Match,
        found: &Found,
        offers: &mut BTreeMap<(u64, Holder), Vec<CommonBlock>>,
    ) {
        // Without one that is common already, the first place is what the others were compared with.
        let own = one.common.is_none();
        let common = match one.common {
            Some(spot) => self.in_common(spot).map(|_| spot),
            None => found.at.map(|at| (key, at)),
        };
        let equal = std::iter::once(own)
            .filter(|own| *own)
            .chain(found.equal.iter().copied());
        let places: Vec<((Spot, u64), bool)> = one.places.iter().copied().zip(equal).collect();
        let Some((key, at)) = common else {
            // Nothing is equal to the first one, or what they were equal to is gone.
            let lone = places.first().map(|((spot, _), _)| *spot).filter(|_| own);
            self.settle(&one, lone.map(Known::Place));
            for ((spot, notice), _) in places {
                if Some(spot) != lone && self.resting(spot, notice).is_some() {
                    self.common.forget(spot);
                }
            }
            return;
        };
        self.settle(&one, Some(Known::Common((key, at))));
        if own && let Some(common) = self.common.commons.get_mut(&key) {
            common.samples.push(one.sample);
        }
        for ((spot, notice), equal) in places {
            if self.resting(spot, notice).is_none() {
                continue;
            }
            // In common from here on, or with nothing but the sample alike: no candidate any more.
            let Some(place) = self.common.forget(spot).filter(|_| equal) else {
                continue;
            };
            offers.entry((key, place.holder)).or_default().push(CommonBlock {
                segment: place.wire,
                offset: spot.1,
                bytes: BLOCK,
                notice,
                at,
            });
        }
    }

    /// When [`Self::seek_equals`] has to be called again although nothing happened.
    pub(super) fn next_common_deadline(&self, now: Time) -> Option<Time> {
        let commons = &self.common;
        let waits = !(commons.fresh.is_empty() && commons.matches.is_empty());
        (commons.secret.is_some() && commons.under_way.is_none() && waits)
            .then(|| commons.not_before.max(now))
    }

    /// Verifies the bookkeeping.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn check_common(&self) {
        let commons = &self.common;
        let states = self.segments.values().filter(|s| s.state == State::Common);
        assert_eq!(states.count(), commons.commons.len(), "each is a segment");
        let mut holds = 0;
        for (key, common) in &commons.commons {
            assert_eq!(self.segments[key].state, State::Common);
            assert!(!common.holders.is_empty(), "each is held");
            for (holder, hold) in &common.holders {
                assert!(hold.held || hold.offers > 0, "nobody is kept who has nothing");
                assert_eq!(commons.by_wire.get(&(*holder, hold.wire)), Some(key));
                assert!(self.accounts.contains_key(holder), "a holder's death is noticed");
                holds += 1;
            }
        }
        assert_eq!(holds, commons.by_wire.len(), "no number stands for nothing");
        for (spot, place) in &commons.places {
            assert!(self.segments.contains_key(&spot.0), "a place is in a segment");
            assert!(self.accounts.contains_key(&place.holder));
        }
        for ((domain, _), known) in &commons.index {
            if let Known::Common(spot) = known {
                let common = commons.commons.get(&spot.0);
                assert!(
                    common.is_none_or(|common| common.domain == *domain),
                    "nothing leaves its domain"
                );
            }
        }
    }
}

fn at_rate(bytes: Bytes) -> Duration {
    Duration::from_nanos(bytes.0.saturating_mul(1_000_000_000) / RATE)
}
