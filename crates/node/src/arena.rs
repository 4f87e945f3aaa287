//! The host arena: one budget of memory for what is off the cards, in segments that are lent to programs.
//!
//! ```text
//!            make job                give                    return, death
//!  (nothing) ────────> Preparing ──────────> Ready ──> Lent ───────────────> Cleaning ──> Ready   (zeroed in place)
//!                          │ failed                                             └───────> gone    (punched, closed)
//!                          └──────> gone
//! ```
//! A segment is in exactly one state, and lent to one holder at a time. Before it serves another task its pages are
//! zeroed; where the tasks may belong to different users it is not reused at all: a program may have kept the
//! descriptor, and would see what the next one writes. The bookkeeping is pure; [`Job::run`] is what takes time, and
//! runs elsewhere. What goes to disk and comes back is in [`tier`], what several tasks have in common in [`common`].

mod common;
mod tier;

pub(crate) use tier::TierSettings;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ebb_policy::Time;
use ebb_protocol::wire::{CommonBlock, MAX_FDS, SegmentInfo};
use ebb_units::{Bytes, GRANULE};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::config::ArenaConfig;
use crate::{disk, equal};

/// Who holds segments: a session.
pub(crate) type Holder = u64;

/// How long a recall may go unanswered before it is no longer counted on.
const RECALL_PATIENCE: Duration = Duration::from_secs(1);
/// How long to wait after the machine had no memory for a segment.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Preparing,
    Ready,
    Lent(Holder),
    Cleaning,
    /// The holder has let go of it, and it is being written.
    Spilling(Holder),
    /// Written; the holder has not said yet that it has the file.
    Stored(Holder),
    /// In its file alone.
    OnDisk(Holder),
    /// Being read into new memory.
    Loading(Holder),
    /// Was being read for a holder that is gone.
    Dropping,
    /// A common segment in the making.
    Merging,
    /// Of several holders, and nobody's to write.
    Common,
}

#[derive(Debug)]
struct Segment {
    bytes: Bytes,
    memory: Option<Arc<OwnedFd>>,
    state: State,
    /// What the holder knows it by.
    wire: u64,
    /// Where it is on disk, and how many bytes it takes there.
    file: Option<Arc<File>>,
    stored: Bytes,
    /// Ends the disk's job on it; another one for each job.
    off: Arc<AtomicBool>,
}

impl Segment {
    fn new(bytes: Bytes, memory: Option<Arc<OwnedFd>>, state: State, wire: u64) -> Self {
        Self {
            bytes,
            memory,
            state,
            wire,
            file: None,
            stored: Bytes::ZERO,
            off: Arc::default(),
        }
    }
}

#[derive(Debug)]
struct Account {
    want: Bytes,
    urgent: bool,
    evicted: Bytes,
    held: Bytes,
    /// What it has in common segments, of what is off the card and of what is not.
    common: (Bytes, Bytes),
    /// Asked back and not come yet.
    recalled: Bytes,
    recalled_at: Time,
    segments: BTreeMap<u64, u64>,
    tier: tier::Account,
}

/// Something that takes time.
#[derive(Debug)]
pub(crate) enum Job {
    Make {
        key: u64,
        bytes: Bytes,
        huge_pages: bool,
    },
    Zero {
        key: u64,
        bytes: Bytes,
        memory: Arc<OwnedFd>,
    },
    Discard {
        key: u64,
        bytes: Bytes,
        memory: Option<Arc<OwnedFd>>,
    },
}

/// How a [`Job`] ended.
#[derive(Debug)]
pub(crate) struct Prepared {
    key: u64,
    result: Result<Option<Arc<OwnedFd>>, Errno>,
}

/// Something to tell a holder, or to hand to a worker.
#[derive(Debug)]
pub(crate) enum Move {
    Give {
        to: Holder,
        segments: Vec<(SegmentInfo, Arc<OwnedFd>)>,
    },
    Recall {
        from: Holder,
        bytes: Bytes,
    },
    Work(Job),
    /// For a worker that may wait for the disk.
    Disk(disk::Job),
    /// Let go of so much.
    Part {
        from: Holder,
        bytes: Bytes,
    },
    /// It is in this file.
    Stored {
        to: Holder,
        id: u64,
        file: Arc<File>,
    },
    /// It is in the memory that it was in.
    Stay {
        to: Holder,
        ids: Vec<u64>,
    },
    /// It is in this memory.
    Back {
        to: Holder,
        segment: SegmentInfo,
        memory: Arc<OwnedFd>,
    },
    /// It cannot be read.
    Broken {
        to: Holder,
        ids: Vec<u64>,
    },
    /// For the worker that looks for equal blocks.
    Equal(equal::Job),
    /// Some of its bytes are in this common segment, too.
    Offer {
        to: Holder,
        segment: SegmentInfo,
        blocks: Vec<CommonBlock>,
        memory: Arc<OwnedFd>,
    },
    /// Give up what is only kept in these common segments.
    Unkeep {
        to: Holder,
        ids: Vec<u64>,
    },
}

/// The arena.
#[derive(Debug)]
pub(crate) struct Arena {
    budget: Bytes,
    segment: Bytes,
    huge_pages: bool,
    jobs_at_once: usize,
    /// All tasks belong to one user, who could read them all anyway: zeroing in place is enough.
    one_user: bool,
    segments: BTreeMap<u64, Segment>,
    accounts: BTreeMap<Holder, Account>,
    next: u64,
    wire_base: u64,
    held: Bytes,
    jobs: usize,
    no_memory_until: Time,
    tier: tier::Tier,
    common: common::Commons,
}

impl Arena {
    /// An empty arena. `wire_base` should differ from daemon to daemon, so that ids of a dead daemon's segments are
    /// not given out again.
    pub(crate) fn new(config: &ArenaConfig, budget: Bytes, one_user: bool, wire_base: u64) -> Self {
        Self {
            budget,
            segment: segment_size(config.segment, budget),
            huge_pages: config.huge_pages,
            jobs_at_once: config.threads * 2,
            one_user,
            segments: BTreeMap::new(),
            accounts: BTreeMap::new(),
            next: 1,
            wire_base,
            held: Bytes::ZERO,
            jobs: 0,
            no_memory_until: Time(0),
            tier: tier::Tier::default(),
            common: common::Commons::default(),
        }
    }

    pub(crate) fn budget(&self) -> Bytes {
        self.budget
    }

    /// A new budget. What is held above it is asked back if it is empty, and written to disk if there is one; nothing is
    /// taken by force.
    pub(crate) fn set_budget(&mut self, budget: Bytes) {
        self.budget = budget;
    }

    /// Nothing is held or wanted.
    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_zero() && self.unmet().is_zero()
    }

    /// Bytes of all segments, those in the making included.
    pub(crate) fn held(&self) -> Bytes {
        self.held
    }

    /// Bytes in programs' hands.
    pub(crate) fn lent(&self) -> Bytes {
        self.accounts.values().map(|account| account.held).sum()
    }

    /// Bytes in one holder's hands.
    pub(crate) fn held_by(&self, holder: Holder) -> Bytes {
        self.accounts
            .get(&holder)
            .map_or(Bytes::ZERO, |account| account.held)
    }

    fn account(&mut self, holder: Holder) -> &mut Account {
        self.accounts.entry(holder).or_insert_with(|| Account {
            want: Bytes::ZERO,
            urgent: false,
            evicted: Bytes::ZERO,
            held: Bytes::ZERO,
            common: (Bytes::ZERO, Bytes::ZERO),
            recalled: Bytes::ZERO,
            recalled_at: Time(0),
            segments: BTreeMap::new(),
            tier: tier::Account::default(),
        })
    }

    /// A holder says how much it would like to hold in all.
    pub(crate) fn want(&mut self, holder: Holder, bytes: Bytes, urgent: bool) {
        let want = bytes.min(self.budget);
        let account = self.account(holder);
        (account.want, account.urgent) = (want, urgent);
        if urgent {
            // Whoever begs for room gives none back meanwhile, whatever it was asked before.
            account.recalled = Bytes::ZERO;
        }
    }

    /// A holder says how much of what it holds is in use. `true` if [`Self::pump`] has more to recall by that.
    #[must_use]
    pub(crate) fn in_use(&mut self, now: Time, holder: Holder, evicted: Bytes) -> bool {
        let Some(account) = self.accounts.get_mut(&holder) else {
            return false;
        };
        let before = std::mem::replace(&mut account.evicted, evicted);
        if before != evicted {
            account.tier.moved(now);
        }
        let grew = evicted > before && self.tier.is_on();
        grew || evicted < before && !(self.wanted(true).is_zero() && self.to_load().is_zero())
    }

    /// Segments that a holder gives back. Ids that it does not hold are ignored; says how many.
    pub(crate) fn returned(&mut self, holder: Holder, ids: &[u64], moves: &mut Vec<Move>) -> usize {
        let mut foreign = 0;
        for id in ids {
            let Some(account) = self.accounts.get_mut(&holder) else {
                return ids.len();
            };
            let Some(key) = account.segments.remove(id) else {
                foreign += 1;
                continue;
            };
            let segment = &self.segments[&key];
            if segment.is_in_hand() {
                account.held = account.held.saturating_sub(segment.bytes);
                account.recalled = account.recalled.saturating_sub(segment.bytes);
            }
            account.tier.forget(key);
            self.clean(key, moves);
        }
        foreign
    }

    /// A holder is no more: all its segments come back at once.
    pub(crate) fn died(&mut self, holder: Holder, moves: &mut Vec<Move>) {
        if let Some(account) = self.accounts.remove(&holder) {
            for key in account.segments.into_values() {
                self.clean(key, moves);
            }
        }
        self.common_died(holder, moves);
    }

    fn clean(&mut self, key: u64, moves: &mut Vec<Move>) {
        // Memory that nobody waits for goes back to the machine.
        let reuse = self.one_user && self.held <= self.budget && self.unmet() > Bytes::ZERO;
        if !self.leave_disk(key, moves) {
            return;
        }
        let segment = self.segments.get_mut(&key).expect("a lent segment exists");
        assert!(
            matches!(segment.state, State::Lent(_)),
            "only what was lent comes back"
        );
        segment.state = State::Cleaning;
        let bytes = segment.bytes;
        let job = match &segment.memory {
            Some(memory) if reuse => Job::Zero {
                key,
                bytes,
                memory: memory.clone(),
            },
            _ => Job::Discard {
                key,
                bytes,
                memory: segment.memory.take(),
            },
        };
        self.jobs += 1;
        moves.push(Move::Work(job));
    }

    /// What holders want and do not have: all, or those in need.
    fn wanted(&self, urgent_only: bool) -> Bytes {
        self.accounts
            .values()
            .filter(|a| a.urgent || !urgent_only)
            .map(Account::lacks)
            .sum()
    }

    /// What is ready or will be.
    fn coming(&self) -> Bytes {
        let coming = self.segments.values().filter(|s| match s.state {
            State::Preparing | State::Ready => true,
            // What is being punched does not come back.
            State::Cleaning => s.memory.is_some(),
            _ => false,
        });
        coming.map(|s| s.bytes).sum()
    }

    /// Whether those who want memory ahead of need are served at present: who waits for what is on disk goes before them.
    fn serves_all(&self) -> bool {
        self.to_load().is_zero() && self.over().is_zero()
    }

    /// What is wanted by those who are served, beyond what is ready or on its way.
    fn unmet(&self) -> Bytes {
        self.wanted(!self.serves_all()).saturating_sub(self.coming())
    }

    /// Segments that a process holds from a daemon that died. Returns how many were taken on; the others stay the
    /// process's own affair.
    pub(crate) fn declare(&mut self, holder: Holder, infos: &[SegmentInfo], memories: Vec<OwnedFd>) -> usize {
        let mut taken = 0;
        for (info, memory) in infos.iter().zip(memories) {
            let known = self
                .accounts
                .get(&holder)
                .is_some_and(|a| a.segments.contains_key(&info.id));
            if known || !is_segment(&memory, info.bytes) || self.is_here(&memory) {
                continue;
            }
            if self.held.saturating_add(info.bytes) > self.budget {
                continue;
            }
            let key = self.next;
            self.next += 1;
            self.held += info.bytes;
            let memory = Some(Arc::new(memory));
            let segment = Segment::new(info.bytes, memory, State::Lent(holder), info.id);
            self.segments.insert(key, segment);
            let account = self.account(holder);
            account.segments.insert(info.id, key);
            account.held += info.bytes;
            taken += 1;
        }
        taken
    }

    /// Whether this very memory is a segment already: nobody may bring in what another one holds.
    fn is_here(&self, memory: &OwnedFd) -> bool {
        let id = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|s| (s.st_dev, s.st_ino)).ok();
        let this = id(memory);
        self.segments
            .values()
            .any(|s| s.memory.as_ref().is_some_and(|m| id(m) == this))
    }

    /// A job ended. An error is the machine's: it has no memory for a segment at present.
    pub(crate) fn prepared(&mut self, now: Time, done: Prepared) -> Result<(), Errno> {
        self.jobs = self.jobs.saturating_sub(1);
        let Some(segment) = self.segments.get_mut(&done.key) else {
            return Ok(());
        };
        assert!(
            matches!(segment.state, State::Preparing | State::Cleaning),
            "a job works on nobody's segment"
        );
        match done.result {
            Ok(Some(memory)) => {
                segment.memory = Some(memory);
                segment.state = State::Ready;
                Ok(())
            }
            result => {
                self.held = self.held.saturating_sub(segment.bytes);
                self.segments.remove(&done.key);
                if let Err(e) = result {
                    self.no_memory_until = now.after(SHORTAGE_PAUSE);
                    return Err(e);
                }
                Ok(())
            }
        }
    }

    /// When [`Self::pump`] should be called again although nothing happened.
    pub(crate) fn next_deadline(&self, now: Time) -> Option<Time> {
        let tier = self.next_tier_deadline(now);
        let tier = tier.into_iter().chain(self.next_common_deadline(now)).min();
        if self.unmet().is_zero() && self.to_load().is_zero() && self.over().is_zero() {
            return tier;
        }
        let recalls = self.accounts.values().filter(|a| !a.recalled.is_zero());
        let next = recalls.map(|a| a.recalled_at.after(RECALL_PATIENCE)).min();
        let shortage = (self.no_memory_until > now).then_some(self.no_memory_until);
        next.into_iter().chain(shortage).chain(tier).min()
    }

    /// Serves what is wanted: from what is ready, else by making more within the budget, else by recalling.
    pub(crate) fn pump(&mut self, now: Time, moves: &mut Vec<Move>) {
        for account in self.accounts.values_mut() {
            if now >= account.recalled_at.after(RECALL_PATIENCE) {
                account.recalled = Bytes::ZERO;
            }
        }
        self.give(moves);
        self.trim(moves);
        self.load(now, moves);
        self.make(now, moves);
        self.recall(now, moves);
        self.spill(now, moves);
        self.seek_equals(now, moves);
    }

    fn give(&mut self, moves: &mut Vec<Move>) {
        // Whoever is about to release goes first, of these who lacks least, then whoever has least.
        let all = self.serves_all();
        let first = self.first_urgent();
        let mut order: Vec<(bool, bool, Bytes, Holder)> = self
            .accounts
            .iter()
            .filter(|(_, a)| !a.lacks().is_zero() && (all || a.urgent))
            .map(|(holder, a)| (!a.urgent, first != Some(*holder), a.held, *holder))
            .collect();
        order.sort_unstable();
        let ready: Vec<u64> = self
            .segments
            .iter()
            .filter(|(_, s)| s.state == State::Ready)
            .map(|(key, _)| *key)
            .collect();
        let mut ready = ready.into_iter();
        for (.., holder) in order {
            let mut given = Vec::new();
            loop {
                let account = self.accounts.get_mut(&holder).expect("listed above");
                if account.lacks().is_zero() {
                    break;
                }
                let Some(key) = ready.next() else { break };
                let segment = self.segments.get_mut(&key).expect("listed above");
                assert_eq!(segment.state, State::Ready, "a segment is lent once");
                segment.state = State::Lent(holder);
                account.held += segment.bytes;
                // A holder may have declared any number as that of a segment of its own.
                while account.segments.contains_key(&segment.wire) {
                    segment.wire = self.wire_base.wrapping_add(self.next);
                    self.next += 1;
                }
                account.segments.insert(segment.wire, key);
                let memory = segment.memory.clone().expect("a ready segment has memory");
                given.push((
                    SegmentInfo {
                        id: segment.wire,
                        bytes: segment.bytes,
                    },
                    memory,
                ));
            }
            while !given.is_empty() {
                let rest = given.split_off(given.len().min(MAX_FDS));
                moves.push(Move::Give {
                    to: holder,
                    segments: std::mem::replace(&mut given, rest),
                });
            }
        }
    }

    /// What was made for somebody who is gone, or is above a budget that was lowered, goes back to the machine.
    fn trim(&mut self, moves: &mut Vec<Move>) {
        let needed = self.wanted(!self.serves_all());
        let mut surplus = self.coming().saturating_sub(needed.saturating_sub(self.over()));
        for (key, segment) in &mut self.segments {
            if segment.state == State::Ready && segment.bytes <= surplus {
                surplus = surplus.saturating_sub(segment.bytes);
                segment.state = State::Cleaning;
                self.jobs += 1;
                let (key, bytes, memory) = (*key, segment.bytes, segment.memory.take());
                moves.push(Move::Work(Job::Discard { key, bytes, memory }));
            }
        }
    }

    fn make(&mut self, now: Time, moves: &mut Vec<Move>) {
        if now < self.no_memory_until {
            return;
        }
        let mut unmet = self.unmet();
        while !unmet.is_zero() && self.jobs < self.jobs_at_once {
            let room = self
                .budget
                .saturating_sub(self.held)
                .saturating_sub(self.to_load());
            let room = room.round_down(GRANULE);
            let bytes = self.segment.min(room);
            if bytes.is_zero() {
                return;
            }
            let key = self.next;
            self.next += 1;
            self.held += bytes;
            self.jobs += 1;
            let wire = self.wire_base.wrapping_add(key);
            self.segments
                .insert(key, Segment::new(bytes, None, State::Preparing, wire));
            moves.push(Move::Work(Job::Make {
                key,
                bytes,
                huge_pages: self.huge_pages,
            }));
            unmet = unmet.saturating_sub(bytes);
        }
    }

    /// What is held above the budget, because that was lowered.
    fn over(&self) -> Bytes {
        self.held.saturating_sub(self.budget)
    }

    /// What there is to serve needs from, or will be without asking anybody for more.
    fn in_sight(&self) -> Bytes {
        let makeable = self.budget.saturating_sub(self.held).round_down(GRANULE);
        // What is being punched becomes room in the budget.
        let punched = self.segments.values().filter(|s| match s.state {
            State::Cleaning => s.memory.is_none(),
            // What is written is punched next.
            State::Spilling(_) | State::Stored(_) | State::Dropping => true,
            _ => false,
        });
        let freeing: Bytes = punched.map(|s| s.bytes).sum();
        let asked: Bytes = self
            .accounts
            .values()
            .map(|a| a.recalled + a.tier.parting())
            .sum();
        [self.coming(), makeable, freeing, asked].into_iter().sum()
    }

    /// Of those who are about to release and lack room for it: who lacks least.
    fn first_urgent(&self) -> Option<Holder> {
        let lacking = self
            .accounts
            .iter()
            .filter(|(_, a)| a.urgent && !a.lacks().is_zero());
        lacking
            .map(|(holder, a)| (a.lacks(), *holder))
            .min()
            .map(|(_, holder)| holder)
    }

    /// What a holder has that nothing is in and that it was not asked for.
    fn empty_at(&self, holder: Holder, a: &Account) -> Bytes {
        let used = a.evicted.saturating_sub(a.tier.on_disk);
        let used = used.saturating_sub(self.common_away(holder));
        a.held.saturating_sub(used).saturating_sub(a.recalled)
    }

    /// Several who are about to release would wait for what the others have and cannot use, all of them for good: what the first
    /// of them lacks is taken from the others, if that is enough.
    fn recall_for_first(&mut self, now: Time, available: Bytes, moves: &mut Vec<Move>) {
        let Some(first) = self.first_urgent() else {
            return;
        };
        let mut short = self.accounts[&first].lacks().saturating_sub(available);
        let others = self
            .accounts
            .iter()
            .filter(|(holder, a)| **holder != first && a.urgent);
        let mut spare: Vec<(Bytes, Holder)> = others
            .map(|(holder, a)| (self.empty_at(*holder, a), *holder))
            .filter(|(spare, _)| !spare.is_zero())
            .collect();
        let all: Bytes = spare.iter().map(|(spare, _)| *spare).sum();
        if short.is_zero() || all < short {
            return;
        }
        spare.sort_unstable_by_key(|(spare, holder)| (std::cmp::Reverse(*spare), *holder));
        for (spare, holder) in spare {
            let bytes = spare.min(short);
            if bytes.is_zero() {
                break;
            }
            let account = self.accounts.get_mut(&holder).expect("listed above");
            account.recalled += bytes;
            account.recalled_at = now;
            short = short.saturating_sub(bytes);
            moves.push(Move::Recall { from: holder, bytes });
        }
    }

    fn recall(&mut self, now: Time, moves: &mut Vec<Move>) {
        let available = self.in_sight();
        let mut asked = Bytes::ZERO;
        // First what is held beyond what is wanted; for an urgent need also what is wanted but empty.
        for pass in [false, true] {
            let needed = self.wanted(pass).saturating_add(self.to_load());
            let needed = needed.saturating_add(self.over());
            let mut short = needed.saturating_sub(available).saturating_sub(asked);
            if short.is_zero() {
                continue;
            }
            let mut spare: Vec<(Bytes, Holder)> = self
                .accounts
                .iter()
                .filter(|(_, a)| !a.urgent || a.lacks().is_zero())
                .map(|(holder, a)| {
                    let used = a.evicted.saturating_sub(a.tier.on_disk);
                    let used = used.saturating_sub(self.common_away(*holder));
                    let keep = if pass { used } else { used.max(a.want) };
                    (a.held.saturating_sub(keep).saturating_sub(a.recalled), *holder)
                })
                .filter(|(spare, _)| !spare.is_zero())
                .collect();
            spare.sort_unstable_by_key(|(spare, holder)| (std::cmp::Reverse(*spare), *holder));
            for (spare, holder) in spare {
                if short.is_zero() {
                    break;
                }
                let bytes = spare.min(short);
                asked += bytes;
                let account = self.accounts.get_mut(&holder).expect("listed above");
                account.recalled += bytes;
                account.recalled_at = now;
                short = short.saturating_sub(bytes);
                moves.push(Move::Recall { from: holder, bytes });
            }
        }
        let needed = self.wanted(true).saturating_add(self.to_load());
        let needed = needed.saturating_add(self.over());
        let short = needed.saturating_sub(available).saturating_sub(asked);
        if asked.is_zero() && !short.is_zero() {
            self.recall_for_first(now, available, moves);
        }
        self.recall_common(now, short, moves);
    }

    /// Verifies the bookkeeping.
    #[cfg(any(test, debug_assertions))]
    pub(crate) fn check(&self) {
        let all: Bytes = self.segments.values().map(|s| s.bytes).sum();
        let all = all.saturating_sub(self.on_disk_alone());
        assert_eq!(all, self.held, "held is the sum of the segments that have memory");
        let mut lent = BTreeMap::new();
        for (holder, account) in &self.accounts {
            let (mut held, mut on_disk) = (Bytes::ZERO, Bytes::ZERO);
            for key in account.segments.values() {
                let segment = &self.segments[key];
                if segment.is_in_hand() {
                    held += segment.bytes;
                } else {
                    on_disk += segment.bytes;
                }
            }
            assert_eq!(held, account.held, "an account is the sum of its segments");
            assert_eq!(on_disk, account.tier.on_disk, "and of those that are on disk");
            for key in account.segments.values() {
                assert_eq!(self.segments[key].holder(), Some(*holder));
                assert!(lent.insert(*key, *holder).is_none(), "a segment is in one hand");
            }
        }
        let states = self.segments.iter().filter(|(_, s)| s.holder().is_some()).count();
        assert_eq!(states, lent.len(), "every lent segment is in an account");
        self.check_common();
    }
}

/// The size of a segment: as configured, but small enough that a small budget can be shared.
fn segment_size(configured: Bytes, budget: Bytes) -> Bytes {
    configured
        .min(Bytes(budget.0 / 8).round_down(GRANULE))
        .max(GRANULE)
}

/// Whether this is memory such as a daemon hands out: sealed in size, of the size that was said, and really there.
fn is_segment(memory: &OwnedFd, bytes: Bytes) -> bool {
    let seals = SealFlags::SHRINK | SealFlags::GROW;
    let Ok(found) = rustix::fs::fcntl_get_seals(memory) else {
        return false;
    };
    let Ok(stat) = rustix::fs::fstat(memory) else {
        return false;
    };
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    // Huge pages are not counted in blocks; they come from a pool that the machine's owner set up.
    let huge = u64::try_from(stat.st_blksize).unwrap_or(0) >= GRANULE.0;
    let backed = huge || u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512) >= size;
    found.contains(seals) && size == bytes.0 && size > 0 && size.is_multiple_of(GRANULE.0) && backed
}

impl Account {
    /// What it wants and does not have, in memory or on disk. What lies in common segments needs no room ahead of need, unless it is written: then
    /// its holder is in need.
    fn lacks(&self) -> Bytes {
        let has = self.held.saturating_add(self.tier.on_disk);
        let (away, kept) = self.common;
        let common = if self.urgent {
            Bytes::ZERO
        } else {
            away.saturating_add(kept)
        };
        self.want.saturating_sub(has).saturating_sub(common)
    }
}

impl Job {
    /// Does it.
    pub(crate) fn run(self) -> Prepared {
        match self {
            Self::Make {
                key,
                bytes,
                huge_pages,
            } => {
                let made = if huge_pages {
                    make(bytes, true)
                } else {
                    Err(Errno::NOMEM)
                };
                Prepared {
                    key,
                    result: made.or_else(|_| make(bytes, false)).map(|fd| Some(Arc::new(fd))),
                }
            }
            Self::Zero { key, bytes, memory } => {
                // A segment that cannot be zeroed is not handed on.
                let zeroed = write_zeros(&memory, bytes)
                    .or_else(|_| punch(&memory, bytes).and_then(|()| fill(&memory, bytes)));
                Prepared {
                    key,
                    result: Ok(zeroed.is_ok().then_some(memory)),
                }
            }
            Self::Discard { key, bytes, memory } => {
                if let Some(memory) = memory {
                    // Frees the pages even if somebody still holds the descriptor.
                    let _ = punch(&memory, bytes);
                }
                Prepared {
                    key,
                    result: Ok(None),
                }
            }
        }
    }
}

pub(crate) fn make(bytes: Bytes, huge_pages: bool) -> Result<OwnedFd, Errno> {
    let memory = make_bare(bytes, huge_pages)?;
    fill(&memory, bytes)?;
    Ok(memory)
}

/// Memory of a segment that has no pages yet.
pub(crate) fn make_bare(bytes: Bytes, huge_pages: bool) -> Result<OwnedFd, Errno> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    if huge_pages {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let memory = rustix::fs::memfd_create("ebb-arena", flags)?;
    rustix::fs::ftruncate(&memory, bytes.0)?;
    // From here on nobody can pull pages from under another's mapping.
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// Gives the memory all its pages now.
fn fill(memory: &impl AsFd, bytes: Bytes) -> Result<(), Errno> {
    match crate::sys::populate(memory, bytes.to_usize()) {
        // Kernels before 5.14.
        Err(Errno::INVAL | Errno::NOSYS) => write_zeros(memory, bytes),
        result => result,
    }
}

pub(crate) fn write_zeros(memory: &impl AsFd, bytes: Bytes) -> Result<(), Errno> {
    static ZEROS: [u8; 1 << 20] = [0; 1 << 20];
    let mut at = 0;
    while at < bytes.0 {
        let piece = usize::try_from(bytes.0 - at)
            .unwrap_or(ZEROS.len())
            .min(ZEROS.len());
        match rustix::io::retry_on_intr(|| rustix::io::pwrite(memory, &ZEROS[..piece], at))? {
            0 => return Err(Errno::NOSPC),
            n => at += n as u64,
        }
    }
    Ok(())
}

fn punch(memory: &impl AsFd, bytes: Bytes) -> Result<(), Errno> {
    rustix::fs::fallocate(
        memory,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        0,
        bytes.0,
    )
}

#[cfg(test)]
mod common_tests;

#[cfg(test)]
mod tests;

#[cfg(test)]
mod tier_tests;
