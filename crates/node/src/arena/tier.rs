//! Segments that go to disk and come back: who, when, and what of it is where.
//!
//! ```text
//!          Part, Parted              written              Kept              Fetch             read
//!  (Lent) ─────────────> Spilling ──────────> Stored ──────────> OnDisk ──────────> Loading ──────> (Lent)
//!     ^                     │ failed, Fetch,     │ Fetch,           ^                   │ no memory now
//!     │                     │ hung up            │ hung up          └───────────────────┤
//!     └─────────────────────┴────────────────────┘ Stay               cannot be read    └──> gone (Broken)
//! ```
//! The holder lets go of a segment before it is written, and has its file before the memory goes; so its bytes are whole
//! in one place at least that a living process holds, whoever dies when. A holder that returns a segment or dies ends
//! what is under way with it; the end of the job finds nothing to do.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ebb_disk::Packing;
use ebb_policy::Time;
use ebb_protocol::wire::SegmentInfo;
use ebb_units::Bytes;

use super::{Arena, Holder, Job, Move, Segment, State};
use crate::disk::{self, SegmentFile, Trouble, Written};

/// How long a holder that was asked to let go may take: it waits for the GPU's work when it unregisters.
const PART_PATIENCE: Duration = Duration::from_secs(5);
/// A holder that could not let go of anything is not asked again for so long.
const PART_PAUSE: Duration = Duration::from_secs(2);
/// After the disk failed or was full: how long nothing is written, at first and at most.
const TROUBLE_PAUSE: Duration = Duration::from_secs(1);
const TROUBLE_PAUSE_MAX: Duration = Duration::from_secs(120);
/// After there was no memory to read into.
const MEMORY_PAUSE: Duration = Duration::from_millis(500);
/// So many segments ahead may be read for one holder.
const AHEAD: usize = 4;

/// What is on disk of one holder, and what it was asked.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Bytes of its segments that have no memory, or none yet.
    pub(super) on_disk: Bytes,
    /// Asked to let go and not answered yet.
    parting: Bytes,
    parting_at: Time,
    not_before: Time,
    /// When what it has off the card changed last.
    moved_at: Time,
    /// Wanted back, in order.
    fetch: VecDeque<u64>,
    fetch_at: u64,
}

impl Account {
    pub(super) fn moved(&mut self, now: Time) {
        self.moved_at = now;
    }

    pub(super) fn parting(&self) -> Bytes {
        self.parting
    }

    pub(super) fn forget(&mut self, key: u64) {
        self.fetch.retain(|other| *other != key);
    }
}

/// What holds for all.
#[derive(Debug, Default)]
pub(super) struct Tier {
    /// Most that the files may take; `None`: nothing is written.
    limit: Option<Bytes>,
    /// Cold for so long: written although nobody needs the memory.
    after: Option<Duration>,
    packing: Packing,
    spills: usize,
    loads: usize,
    jobs_at_once: usize,
    /// Nothing is written until then, for the disk failed so many times in a row.
    not_before: Time,
    failures: u32,
    trouble: Option<Trouble>,
    no_memory_until: Time,
    fetches: u64,
    totals: TierTotals,
}

impl Tier {
    pub(super) fn is_on(&self) -> bool {
        self.limit.is_some()
    }
}

/// What the disk tier has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TierTotals {
    /// Bytes of segments written, as they were in memory.
    pub spilled: Bytes,
    /// Of those, zeros that were not stored.
    pub zeros: Bytes,
    /// Bytes of segments read back.
    pub loaded: Bytes,
}

/// The disk tier's settings, as the arena needs them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierSettings {
    /// Most that the files may take.
    pub limit: Bytes,
    /// Written when cold for so long; `None`: only when somebody needs the memory.
    pub after: Option<Duration>,
    /// How blocks are packed.
    pub packing: Packing,
    /// Threads that write and read.
    pub threads: usize,
}

impl Segment {
    /// Whether the holder's memory is counted in its hands.
    pub(super) fn is_in_hand(&self) -> bool {
        matches!(self.state, State::Lent(_) | State::Spilling(_) | State::Stored(_))
    }

    pub(super) fn holder(&self) -> Option<Holder> {
        match self.state {
            State::Lent(h) | State::Spilling(h) | State::Stored(h) | State::OnDisk(h) | State::Loading(h) => {
                Some(h)
            }
            State::Preparing
            | State::Ready
            | State::Cleaning
            | State::Dropping
            | State::Merging
            | State::Common => None,
        }
    }
}

impl Arena {
    /// Switches the disk tier on or changes it.
    pub(crate) fn set_tier(&mut self, settings: TierSettings) {
        self.tier.limit = Some(settings.limit);
        self.tier.after = settings.after;
        self.tier.packing = settings.packing;
        self.tier.jobs_at_once = settings.threads * 2;
    }

    /// Bytes that the files take on disk, those in the making at their largest.
    pub(crate) fn stored(&self) -> Bytes {
        self.segments.values().map(|segment| segment.stored).sum()
    }

    /// Bytes of one holder that are on disk, as they were in memory.
    pub(crate) fn on_disk_of(&self, holder: Holder) -> Bytes {
        self.accounts
            .get(&holder)
            .map_or(Bytes::ZERO, |account| account.tier.on_disk)
    }

    /// Bytes that are on disk, as they were in memory.
    pub(crate) fn on_disk(&self) -> Bytes {
        self.accounts.values().map(|account| account.tier.on_disk).sum()
    }

    /// What the tier may store at most; `None` if it is off.
    pub(crate) fn disk_limit(&self) -> Option<Bytes> {
        self.tier.limit
    }

    /// Why nothing is written at present.
    pub(crate) fn disk_trouble(&self) -> Option<Trouble> {
        self.tier.trouble
    }

    pub(crate) fn tier_totals(&self) -> TierTotals {
        self.tier.totals
    }

    #[cfg(any(test, debug_assertions))]
    pub(super) fn on_disk_alone(&self) -> Bytes {
        let alone = self
            .segments
            .values()
            .filter(|s| matches!(s.state, State::OnDisk(_)));
        alone.map(|segment| segment.bytes).sum()
    }

    /// Bytes that holders wait for and that have no room yet: as far ahead as reading goes.
    pub(super) fn to_load(&self) -> Bytes {
        let next = self
            .accounts
            .values()
            .flat_map(|a| a.tier.fetch.iter().take(AHEAD));
        next.map(|key| self.segments[key].bytes).sum()
    }

    /// Ends what the disk does with a segment that nobody needs any more. `true` if it is in memory as any other.
    pub(super) fn leave_disk(&mut self, key: u64, moves: &mut Vec<Move>) -> bool {
        self.common.forget_segment(key);
        let segment = self
            .segments
            .get_mut(&key)
            .expect("a segment in an account exists");
        let Some(holder) = segment.holder() else {
            return true;
        };
        segment.stored = Bytes::ZERO;
        let file = segment.file.take();
        moves.extend(file.map(|file| Move::Disk(disk::Job::Forget { file })));
        let bytes = segment.bytes;
        match segment.state {
            State::Spilling(_) => {
                segment.off.store(true, Ordering::Relaxed);
                segment.state = State::Lent(holder);
            }
            State::Stored(_) => segment.state = State::Lent(holder),
            State::OnDisk(_) => {
                self.segments.remove(&key);
                self.gone_from_disk(holder, bytes);
                return false;
            }
            State::Loading(_) => {
                segment.off.store(true, Ordering::Relaxed);
                segment.state = State::Dropping;
                self.gone_from_disk(holder, bytes);
                return false;
            }
            _ => {}
        }
        true
    }

    /// The account may be gone already.
    fn gone_from_disk(&mut self, holder: Holder, bytes: Bytes) {
        if let Some(account) = self.accounts.get_mut(&holder) {
            account.tier.on_disk = account.tier.on_disk.saturating_sub(bytes);
        }
    }

    /// A holder let go of these.
    pub(crate) fn parted(&mut self, now: Time, holder: Holder, ids: &[u64], moves: &mut Vec<Move>) {
        let Some(account) = self.accounts.get_mut(&holder) else {
            return;
        };
        account.tier.parting = Bytes::ZERO;
        if ids.is_empty() {
            account.tier.not_before = now.after(PART_PAUSE);
        }
        let keys: Vec<(u64, u64)> = ids
            .iter()
            .filter_map(|id| Some((*id, *account.segments.get(id)?)))
            .collect();
        let mut stay = Vec::new();
        for (id, key) in keys {
            let room = self.disk_room(now);
            let segment = self.segments.get_mut(&key).expect("listed in the account");
            if segment.state != State::Lent(holder) {
                continue;
            }
            let Some(memory) = segment.memory.clone().filter(|_| segment.bytes <= room) else {
                stay.push(id);
                continue;
            };
            segment.state = State::Spilling(holder);
            segment.stored = segment.bytes;
            segment.off = Arc::new(AtomicBool::new(false));
            self.tier.spills += 1;
            moves.push(Move::Disk(disk::Job::Spill {
                key,
                bytes: segment.bytes,
                memory,
                packing: self.tier.packing,
                off: segment.off.clone(),
            }));
        }
        if !stay.is_empty() {
            let account = self.account(holder);
            account.tier.not_before = account.tier.not_before.max(now.after(PART_PAUSE));
            moves.push(Move::Stay {
                to: holder,
                ids: stay,
            });
        }
    }

    /// What may be written now.
    fn disk_room(&self, now: Time) -> Bytes {
        match self.tier.limit {
            Some(limit) if now >= self.tier.not_before => limit.saturating_sub(self.stored()),
            _ => Bytes::ZERO,
        }
    }

    /// A segment was written, or not. What went wrong is the caller's to tell.
    pub(crate) fn spilled(
        &mut self,
        now: Time,
        key: u64,
        off: &Arc<AtomicBool>,
        result: Result<(SegmentFile, Written), Trouble>,
        moves: &mut Vec<Move>,
    ) -> Option<Trouble> {
        self.tier.spills = self.tier.spills.saturating_sub(1);
        let ours = self.segments.get_mut(&key).filter(|s| Arc::ptr_eq(&s.off, off));
        let waiting = ours.and_then(|segment| match segment.state {
            State::Spilling(holder) => Some((segment, holder)),
            _ => None,
        });
        match (result, waiting) {
            (Ok((file, written)), Some((segment, holder))) => {
                segment.state = State::Stored(holder);
                segment.stored = Bytes(written.stored);
                segment.file = Some(file.ours);
                let id = segment.wire;
                let totals = &mut self.tier.totals;
                totals.spilled += segment.bytes;
                totals.zeros += Bytes(written.zeros);
                moves.push(Move::Stored {
                    to: holder,
                    id,
                    file: file.theirs,
                });
                (self.tier.failures, self.tier.trouble) = (0, None);
                None
            }
            (Ok((file, _)), None) => {
                moves.push(Move::Disk(disk::Job::Forget { file: file.ours }));
                None
            }
            (Err(trouble), waiting) => {
                if let Some((segment, holder)) = waiting {
                    segment.state = State::Lent(holder);
                    segment.stored = Bytes::ZERO;
                    let ids = vec![segment.wire];
                    moves.push(Move::Stay { to: holder, ids });
                }
                if trouble == Trouble::CalledOff {
                    return None;
                }
                let pause = TROUBLE_PAUSE.saturating_mul(1 << self.tier.failures.min(7));
                self.tier.not_before = now.after(pause.min(TROUBLE_PAUSE_MAX));
                self.tier.failures = self.tier.failures.saturating_add(1);
                // Said once, not at every try.
                let known = self.tier.trouble.replace(trouble) == Some(trouble);
                (!known).then_some(trouble)
            }
        }
    }

    /// A holder has the files of these: their memory goes.
    pub(crate) fn kept(&mut self, holder: Holder, ids: &[u64], moves: &mut Vec<Move>) {
        for id in ids {
            let Some(account) = self.accounts.get_mut(&holder) else {
                return;
            };
            let Some(key) = account.segments.get(id) else {
                continue;
            };
            let segment = self.segments.get_mut(key).expect("listed in the account");
            if segment.state != State::Stored(holder) {
                continue;
            }
            segment.state = State::OnDisk(holder);
            let (bytes, memory) = (segment.bytes, segment.memory.take());
            account.held = account.held.saturating_sub(bytes);
            account.tier.on_disk += bytes;
            // The memory is counted until it is really gone.
            let ghost = self.next;
            self.next += 1;
            self.segments
                .insert(ghost, Segment::new(bytes, None, State::Cleaning, 0));
            self.jobs += 1;
            moves.push(Move::Work(Job::Discard {
                key: ghost,
                bytes,
                memory,
            }));
        }
    }

    /// A holder wants these back, in this order.
    pub(crate) fn fetch(&mut self, holder: Holder, ids: &[u64], moves: &mut Vec<Move>) {
        let (mut stay, mut broken) = (Vec::new(), Vec::new());
        for id in ids {
            let account = self.accounts.get_mut(&holder);
            let Some((account, key)) = account.and_then(|a| a.segments.get(id).copied().map(|key| (a, key)))
            else {
                broken.push(*id);
                continue;
            };
            let segment = self.segments.get_mut(&key).expect("listed in the account");
            match segment.state {
                State::OnDisk(_) => {
                    if !account.tier.fetch.contains(&key) {
                        if account.tier.fetch.is_empty() {
                            self.tier.fetches += 1;
                            account.tier.fetch_at = self.tier.fetches;
                        }
                        account.tier.fetch.push_back(key);
                    }
                }
                State::Loading(_) => {}
                _ => {
                    self.leave_disk(key, moves);
                    stay.push(*id);
                }
            }
        }
        if !stay.is_empty() {
            moves.push(Move::Stay {
                to: holder,
                ids: stay,
            });
        }
        if !broken.is_empty() {
            moves.push(Move::Broken {
                to: holder,
                ids: broken,
            });
        }
    }

    /// A holder hung up. It takes back by itself what it let go of and has no file of.
    pub(crate) fn hung_up(&mut self, holder: Holder, moves: &mut Vec<Move>) {
        self.common_hung_up(holder);
        let Some(account) = self.accounts.get_mut(&holder) else {
            return;
        };
        account.tier.parting = Bytes::ZERO;
        account.tier.fetch.clear();
        let keys: Vec<u64> = account.segments.values().copied().collect();
        for key in keys {
            if matches!(self.segments[&key].state, State::Spilling(_) | State::Stored(_)) {
                self.leave_disk(key, moves);
            }
        }
    }

    /// Begins to read what is wanted, first come first served, as far as there is room.
    pub(super) fn load(&mut self, now: Time, moves: &mut Vec<Move>) {
        if now < self.tier.no_memory_until {
            return;
        }
        let mut waiting: Vec<(u64, Holder)> = self
            .accounts
            .iter()
            .filter(|(_, a)| !a.tier.fetch.is_empty())
            .map(|(holder, a)| (a.tier.fetch_at, *holder))
            .collect();
        waiting.sort_unstable();
        for (_, holder) in waiting {
            while self.tier.loads < self.tier.jobs_at_once.max(2) {
                let account = self.accounts.get_mut(&holder).expect("listed above");
                let Some(key) = account.tier.fetch.front().copied() else {
                    break;
                };
                let segment = self.segments.get_mut(&key).expect("listed in the account");
                if self.held.saturating_add(segment.bytes) > self.budget {
                    // Whoever came later waits as well, or the first would never get his turn.
                    return;
                }
                account.tier.fetch.pop_front();
                let Some(file) = segment.file.clone() else {
                    continue;
                };
                self.held += segment.bytes;
                self.tier.loads += 1;
                segment.state = State::Loading(holder);
                segment.off = Arc::new(AtomicBool::new(false));
                moves.push(Move::Disk(disk::Job::Load {
                    key,
                    bytes: segment.bytes,
                    file,
                    huge_pages: self.huge_pages,
                    off: segment.off.clone(),
                }));
            }
        }
    }

    /// A segment was read, or not.
    pub(crate) fn loaded(
        &mut self,
        now: Time,
        key: u64,
        off: &Arc<AtomicBool>,
        result: Result<Arc<OwnedFd>, Trouble>,
        moves: &mut Vec<Move>,
    ) -> Option<Trouble> {
        self.tier.loads = self.tier.loads.saturating_sub(1);
        let segment = self.segments.get_mut(&key).filter(|s| Arc::ptr_eq(&s.off, off))?;
        let bytes = segment.bytes;
        let State::Loading(holder) = segment.state else {
            // Nobody waits any more: the memory goes with the result.
            if segment.state == State::Dropping {
                self.segments.remove(&key);
                self.held = self.held.saturating_sub(bytes);
            }
            return None;
        };
        let id = segment.wire;
        match result {
            Ok(memory) => {
                segment.state = State::Lent(holder);
                segment.memory = Some(memory.clone());
                segment.stored = Bytes::ZERO;
                let file = segment.file.take();
                moves.extend(file.map(|file| Move::Disk(disk::Job::Forget { file })));
                self.tier.totals.loaded += bytes;
                self.gone_from_disk(holder, bytes);
                let account = self.account(holder);
                account.held += bytes;
                account.tier.moved(now);
                let segment = SegmentInfo { id, bytes };
                moves.push(Move::Back {
                    to: holder,
                    segment,
                    memory,
                });
                None
            }
            Err(Trouble::Memory(errno)) => {
                // The machine is short at present: the file is as good as before.
                segment.state = State::OnDisk(holder);
                self.held = self.held.saturating_sub(bytes);
                self.account(holder).tier.fetch.push_front(key);
                self.tier.no_memory_until = now.after(MEMORY_PAUSE);
                Some(Trouble::Memory(errno))
            }
            Err(trouble) => {
                // The program has the file too, and may have better luck. This daemon has done with it.
                segment.state = State::OnDisk(holder);
                self.held = self.held.saturating_sub(bytes);
                self.account(holder).segments.remove(&id);
                self.leave_disk(key, moves);
                moves.push(Move::Broken {
                    to: holder,
                    ids: vec![id],
                });
                Some(trouble)
            }
        }
    }

    /// Files of segments that a holder has from an earlier daemon, or from this one over an earlier connection: what it
    /// says is in a file is not in memory. Returns how many were taken on.
    pub(crate) fn declare_stored(
        &mut self,
        holder: Holder,
        files: Vec<(SegmentInfo, File)>,
        moves: &mut Vec<Move>,
    ) -> usize {
        let mut taken = 0;
        for (info, file) in files {
            let known = self.account(holder).segments.get(&info.id).copied();
            if let Some(key) = known {
                if self.segments[&key].holder().is_some() && !self.segments[&key].is_in_hand() {
                    taken += 1;
                    continue;
                }
                // It was read back and the news of it was lost on the way.
                self.returned(holder, &[info.id], moves);
            }
            let key = self.next;
            self.next += 1;
            let stored = disk::taken(&file);
            let mut segment = Segment::new(info.bytes, None, State::OnDisk(holder), info.id);
            segment.stored = stored;
            segment.file = Some(Arc::new(file));
            self.segments.insert(key, segment);
            let account = self.account(holder);
            account.segments.insert(info.id, key);
            account.tier.on_disk += info.bytes;
            taken += 1;
        }
        taken
    }

    /// Asks holders to let go of what is cold, if the memory is needed, or cold for long enough.
    pub(super) fn spill(&mut self, now: Time, moves: &mut Vec<Move>) {
        for account in self.accounts.values_mut() {
            if now >= account.tier.parting_at.after(PART_PATIENCE) && !account.tier.parting.is_zero() {
                // A library that does not know the message, or a wedged program.
                account.tier.parting = Bytes::ZERO;
                account.tier.not_before = now.after(PART_PATIENCE);
            }
        }
        let asked: Bytes = self.accounts.values().map(|a| a.tier.parting).sum();
        // As much as is worked on at once: what is not begun yet is not let go of for nothing, and who comes with
        // something to read does not wait behind a long queue.
        let at_once =
            Bytes(self.segment.0.saturating_mul(
                (self.tier.jobs_at_once - self.tier.spills.min(self.tier.jobs_at_once)) as u64,
            ));
        let mut room = self.disk_room(now).min(at_once).saturating_sub(asked);
        let needed = self.wanted(true).saturating_add(self.to_load());
        let needed = needed.saturating_add(self.over());
        let mut short = needed.saturating_sub(self.in_sight());
        let after = self.tier.after;
        let mut cold: Vec<(Time, Holder)> = self
            .accounts
            .iter()
            .filter(|(_, a)| a.tier.parting.is_zero() && now >= a.tier.not_before)
            // Who begs for room or waits for what is on disk is not cold.
            .filter(|(_, a)| !a.urgent && a.tier.fetch.is_empty())
            .map(|(holder, a)| (a.tier.moved_at, *holder))
            .collect();
        cold.sort_unstable();
        for (since, holder) in cold {
            let common = self.common_away(holder);
            let account = self.accounts.get_mut(&holder).expect("listed above");
            let used = account
                .evicted
                .saturating_sub(account.tier.on_disk)
                .saturating_sub(common)
                .min(account.held);
            let ripe = after.is_some_and(|after| now >= since.after(after));
            let bytes = if ripe { used } else { used.min(short) }.min(room);
            // Less than a segment is let go of by nobody.
            if bytes.is_zero() || room < self.segment {
                continue;
            }
            short = short.saturating_sub(bytes);
            room = room.saturating_sub(bytes);
            account.tier.parting = bytes;
            account.tier.parting_at = now;
            moves.push(Move::Part { from: holder, bytes });
        }
    }

    /// When [`Self::pump`] has to look at the disk again although nothing happened.
    pub(super) fn next_tier_deadline(&self, now: Time) -> Option<Time> {
        let tier = &self.tier;
        if !tier.is_on() && self.to_load().is_zero() {
            return None;
        }
        let waits = !(self.wanted(true).is_zero() && self.to_load().is_zero() && self.over().is_zero());
        let accounts = self.accounts.values().flat_map(|a| {
            let answer = (!a.tier.parting.is_zero()).then(|| a.tier.parting_at.after(PART_PATIENCE));
            let has = a.held.min(a.evicted.saturating_sub(a.tier.on_disk));
            let ripe = tier
                .after
                .map(|after| a.tier.moved_at.after(after).max(a.tier.not_before));
            let ripe = ripe.filter(|_| !has.is_zero() && a.tier.parting.is_zero() && !a.urgent);
            let again = waits.then_some(a.tier.not_before);
            [answer, ripe.map(|at| at.max(tier.not_before)), again]
        });
        let pauses = [tier.not_before, tier.no_memory_until].map(|at| waits.then_some(at));
        accounts.chain(pauses).flatten().filter(|at| *at > now).min()
    }
}
