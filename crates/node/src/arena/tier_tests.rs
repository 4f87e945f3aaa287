//! Segments to disk and back, with real files, over programs and daemons that go away at any step.

use std::collections::VecDeque;

use ebb_disk::Packing;
use proptest::prelude::*;

use super::*;
use crate::disk::{Done, Store};

const SEGMENT: Bytes = GRANULE;

/// Where a program has the bytes of a segment.
#[derive(Clone, Debug)]
enum Home {
    Here(Arc<OwnedFd>),
    /// Let go of: in this memory still.
    Parted(Arc<OwnedFd>, bool),
    File(Arc<File>, bool),
}

/// A program as the library in it behaves.
#[derive(Debug, Default)]
struct Program {
    homes: BTreeMap<u64, Home>,
    /// What must be in a segment; nothing in those that are empty.
    marks: BTreeMap<u64, u64>,
    inbox: VecDeque<Move>,
}

#[derive(Debug)]
struct Stage {
    arena: Arena,
    store: Store,
    programs: BTreeMap<Holder, Program>,
    jobs: Vec<Job>,
    disk: Vec<disk::Job>,
    now: Time,
    next_mark: u64,
    budget: Bytes,
    /// Nothing can be written.
    full: bool,
    generation: u64,
    _dir: tempfile::TempDir,
}

fn mark_of(memory: &OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    assert_eq!(rustix::io::pread(memory, &mut bytes, SEGMENT.0 / 2), Ok(8));
    u64::from_le_bytes(bytes)
}

impl Stage {
    fn new(segments: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("d"), Bytes::ZERO).unwrap();
        let budget = Bytes(SEGMENT.0 * segments);
        Self {
            arena: Self::arena(budget, 1),
            store,
            programs: BTreeMap::new(),
            jobs: Vec::new(),
            disk: Vec::new(),
            now: Time::from_millis(1),
            next_mark: 1,
            budget,
            full: false,
            generation: 1,
            _dir: dir,
        }
    }

    fn arena(budget: Bytes, generation: u64) -> Arena {
        let config = ArenaConfig {
            budget: None,
            segment: SEGMENT,
            huge_pages: false,
            threads: 2,
            pinned: crate::config::Pinned::All,
            share: true,
        };
        let mut arena = Arena::new(&config, budget, true, generation << 40);
        arena.set_tier(TierSettings {
            limit: Bytes(SEGMENT.0 * 64),
            after: None,
            packing: Packing::None,
            threads: 2,
        });
        arena
    }

    fn take(&mut self, moves: Vec<Move>) {
        self.take_above(moves);
        assert!(self.arena.held() <= self.budget, "{} held", self.arena.held());
    }

    /// While what is held may be more than the budget that was lowered just now.
    fn take_above(&mut self, moves: Vec<Move>) {
        for what in moves {
            let to = match &what {
                Move::Work(_) | Move::Disk(_) => None,
                Move::Give { to, .. }
                | Move::Stored { to, .. }
                | Move::Stay { to, .. }
                | Move::Back { to, .. }
                | Move::Broken { to, .. } => Some(*to),
                Move::Recall { from, .. } | Move::Part { from, .. } => Some(*from),
                Move::Equal(_) | Move::Offer { .. } | Move::Unkeep { .. } => unreachable!("it is off"),
            };
            match (what, to) {
                (Move::Work(job), _) => self.jobs.push(job),
                (Move::Disk(job), _) => self.disk.push(job),
                (other, Some(to)) => self.programs.entry(to).or_default().inbox.push_back(other),
                _ => {}
            }
        }
        self.arena.check();
    }

    fn pump(&mut self) {
        let mut moves = Vec::new();
        self.arena.pump(self.now, &mut moves);
        self.take(moves);
    }

    fn call<T>(&mut self, with: impl FnOnce(&mut Arena, Time, &mut Vec<Move>) -> T) -> T {
        let mut moves = Vec::new();
        let result = with(&mut self.arena, self.now, &mut moves);
        self.take(moves);
        self.pump();
        result
    }

    fn work(&mut self, which: usize) {
        let all = self.jobs.len() + self.disk.len();
        if all == 0 {
            return;
        }
        let which = which % all;
        if which < self.jobs.len() {
            let done = self.jobs.remove(which).run();
            self.arena.prepared(self.now, done).unwrap();
            return self.pump();
        }
        let job = self.disk.remove(which - self.jobs.len());
        let full = Store::open(&self._dir.path().join("d"), Bytes::MAX).unwrap();
        let store = if self.full { &full } else { &self.store };
        match job.run(Some(store)) {
            Done::Spilled { key, off, result } => {
                self.call(|arena, now, moves| arena.spilled(now, key, &off, result, moves));
            }
            Done::Loaded { key, off, result } => {
                self.call(|arena, now, moves| arena.loaded(now, key, &off, result, moves));
            }
            Done::Forgotten => {}
        }
    }

    /// A program reads its next message.
    fn hear(&mut self, holder: Holder) -> bool {
        let Some(program) = self.programs.get_mut(&holder) else {
            return false;
        };
        let Some(message) = program.inbox.pop_front() else {
            return false;
        };
        match message {
            Move::Give { segments, .. } => {
                for (info, memory) in segments {
                    program.homes.insert(info.id, Home::Here(memory));
                }
            }
            Move::Recall { bytes, .. } => {
                let n = usize::try_from(bytes.0.div_ceil(SEGMENT.0)).unwrap();
                let empty = program.homes.keys().filter(|id| !program.marks.contains_key(id));
                let ids: Vec<u64> = empty.copied().take(n).collect();
                ids.iter().for_each(|id| drop(program.homes.remove(id)));
                self.call(|arena, _, moves| arena.returned(holder, &ids, moves));
            }
            Move::Part { bytes, .. } => {
                let n = usize::try_from(bytes.0.div_ceil(SEGMENT.0)).unwrap();
                let mut ids = Vec::new();
                for (id, home) in &mut program.homes {
                    if let Home::Here(memory) = home
                        && program.marks.contains_key(id)
                        && ids.len() < n
                    {
                        *home = Home::Parted(memory.clone(), false);
                        ids.push(*id);
                    }
                }
                self.call(|arena, now, moves| arena.parted(now, holder, &ids, moves));
            }
            Move::Stored { id, file, .. } => {
                if let Some(home) = program.homes.get_mut(&id)
                    && matches!(home, Home::Parted(_, false))
                {
                    *home = Home::File(file, false);
                    self.call(|arena, _, moves| arena.kept(holder, &[id], moves));
                }
            }
            Move::Stay { ids, .. } => {
                for id in ids {
                    if let Some(home) = program.homes.get_mut(&id)
                        && let Home::Parted(memory, _) = home
                    {
                        *home = Home::Here(memory.clone());
                    }
                }
            }
            Move::Back { segment, memory, .. } => {
                if let Some(home) = program.homes.get_mut(&segment.id) {
                    *home = Home::Here(memory);
                }
            }
            Move::Broken { ids, .. } => {
                for id in ids {
                    self.read_alone(holder, id);
                }
            }
            Move::Work(_) | Move::Disk(_) | Move::Equal(_) | Move::Offer { .. } | Move::Unkeep { .. } => {
                unreachable!()
            }
        }
        true
    }

    /// As the library does without a daemon's help: the bytes are checked at once and are nobody's segment any more.
    fn read_alone(&mut self, holder: Holder, id: u64) {
        let program = self.programs.get_mut(&holder).unwrap();
        let Some(Home::File(file, _)) = program.homes.remove(&id) else {
            return;
        };
        let mut found = 0;
        ebb_disk::load(
            SEGMENT.0,
            &mut |buffer, at| Ok(rustix::io::pread(&*file, buffer, at)?),
            &mut |part, at| {
                let place = SEGMENT.0 / 2;
                if (at..at + part.len() as u64).contains(&place) {
                    let from = usize::try_from(place - at).unwrap();
                    found = u64::from_le_bytes(part[from..from + 8].try_into().unwrap());
                }
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(Some(found), program.marks.remove(&id), "segment {id} alone");
    }

    fn used(&self, holder: Holder) -> Bytes {
        let n = self
            .programs
            .get(&holder)
            .map_or(0, |program| program.marks.len());
        Bytes(SEGMENT.0 * n as u64)
    }

    /// A release: bytes go into an empty segment.
    fn fill(&mut self, holder: Holder) {
        let mark = self.next_mark;
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        let empty = program.homes.iter().find_map(|(id, home)| match home {
            Home::Here(memory) if !program.marks.contains_key(id) => Some((*id, memory.clone())),
            _ => None,
        });
        if let Some((id, memory)) = empty {
            self.next_mark += 1;
            rustix::io::pwrite(&*memory, &mark.to_le_bytes(), SEGMENT.0 / 2).unwrap();
            program.marks.insert(id, mark);
        }
        let used = self.used(holder);
        let now = self.now;
        let _ = self.arena.in_use(now, holder, used);
        self.pump();
    }

    /// A restore of what is here; what is not is asked for.
    fn restore(&mut self, holder: Holder) {
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        let (mut gone, mut fetch) = (Vec::new(), Vec::new());
        for (id, home) in &mut program.homes {
            match home {
                Home::Here(memory) => {
                    if let Some(mark) = program.marks.remove(id) {
                        assert_eq!(mark_of(memory), mark, "segment {id}");
                        gone.push(*id);
                    }
                }
                Home::Parted(_, asked) | Home::File(_, asked) => {
                    if !std::mem::replace(asked, true) {
                        fetch.push(*id);
                    }
                }
            }
        }
        gone.iter().for_each(|id| drop(program.homes.remove(id)));
        let used = self.used(holder);
        self.call(|arena, now, moves| {
            arena.returned(holder, &gone, moves);
            let _ = arena.in_use(now, holder, used);
            if !fetch.is_empty() {
                arena.fetch(holder, &fetch, moves);
            }
        });
    }

    /// The connection ends: what was on its way is lost, and the program takes back what it has no file of.
    fn hang_up(&mut self, holder: Holder) {
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        let given = program.inbox.drain(..).flat_map(|message| match message {
            Move::Give { segments, .. } => segments,
            _ => Vec::new(),
        });
        let lost: Vec<u64> = given.map(|(info, _)| info.id).collect();
        for home in program.homes.values_mut() {
            match home {
                Home::Parted(memory, _) => *home = Home::Here(memory.clone()),
                Home::File(_, asked) => *asked = false,
                Home::Here(_) => {}
            }
        }
        self.call(|arena, _, moves| {
            arena.returned(holder, &lost, moves);
            arena.want(holder, Bytes::ZERO, false);
            arena.hung_up(holder, moves);
        });
    }

    /// It comes back, or meets another daemon.
    fn declare(&mut self, holder: Holder) {
        let Some(program) = self.programs.get(&holder) else {
            return;
        };
        let (mut infos, mut memories, mut files) = (Vec::new(), Vec::new(), Vec::new());
        for (id, home) in &program.homes {
            let info = SegmentInfo {
                id: *id,
                bytes: SEGMENT,
            };
            match home {
                Home::Here(memory) | Home::Parted(memory, _) => {
                    infos.push(info);
                    memories.push(memory.try_clone().unwrap());
                }
                Home::File(file, _) => {
                    assert!(self.store.is_ours(&**file));
                    files.push((info, file.try_clone().unwrap()));
                }
            }
        }
        let used = self.used(holder);
        self.call(|arena, now, moves| {
            arena.declare(holder, &infos, memories);
            arena.declare_stored(holder, files, moves);
            let _ = arena.in_use(now, holder, used);
        });
    }

    /// The daemon is killed: its jobs end nowhere, and the next one hears of everything from the programs.
    fn kill_daemon(&mut self) {
        self.jobs.clear();
        self.disk.clear();
        self.generation += 1;
        self.arena = Self::arena(self.budget, self.generation);
        let holders: Vec<Holder> = self.programs.keys().copied().collect();
        for holder in &holders {
            let program = self.programs.get_mut(holder).unwrap();
            program.inbox.clear();
            for home in program.homes.values_mut() {
                match home {
                    Home::Parted(memory, _) => *home = Home::Here(memory.clone()),
                    Home::File(_, asked) => *asked = false,
                    Home::Here(_) => {}
                }
            }
        }
        for holder in holders {
            self.declare(holder);
        }
    }

    fn die(&mut self, holder: Holder) {
        self.programs.remove(&holder);
        self.call(|arena, _, moves| arena.died(holder, moves));
        // What was on its way to it.
        self.programs.remove(&holder);
    }

    /// Lets everything run until nothing moves any more, or nothing but questions that get the same answer again.
    fn settle(&mut self) {
        let mut rounds = 0;
        for _ in 0..1_000 {
            let holders: Vec<Holder> = self.programs.keys().copied().collect();
            let heard = holders.into_iter().filter(|holder| self.hear(*holder)).count();
            let worked = !self.jobs.is_empty() || !self.disk.is_empty();
            self.work(0);
            if heard == 0 && !worked {
                self.now = self.now.after(Duration::from_secs(10));
                self.pump();
                let quiet = self.jobs.is_empty()
                    && self.disk.is_empty()
                    && self.programs.values().all(|program| program.inbox.is_empty());
                rounds += 1;
                if quiet || rounds == 20 {
                    return;
                }
            }
        }
        panic!("it never comes to rest");
    }

    /// Programs bring everything back, and every byte is right.
    fn all_back(&mut self) {
        self.full = false;
        let holders: Vec<Holder> = (1..=4).collect();
        for holder in &holders {
            let now = self.now;
            self.arena.want(*holder, Bytes::ZERO, false);
            let _ = self.arena.in_use(now, *holder, self.used(*holder));
        }
        for _ in 0..20 {
            self.settle();
            holders.iter().for_each(|holder| self.restore(*holder));
            if self.programs.values().all(|program| program.marks.is_empty()) {
                return;
            }
        }
        panic!("something does not come back");
    }
}

#[test]
fn more_than_the_arena_holds_is_released_and_comes_back() {
    let mut stage = Stage::new(4);
    for holder in 1..=4 {
        stage.arena.want(holder, Bytes(SEGMENT.0 * 3), true);
        for _ in 0..3 {
            stage.settle();
            stage.fill(holder);
        }
        stage.arena.want(holder, Bytes(SEGMENT.0 * 3), false);
        assert_eq!(stage.used(holder), Bytes(SEGMENT.0 * 3), "task {holder} is out");
    }
    assert!(
        stage.arena.on_disk() >= Bytes(SEGMENT.0 * 8),
        "{}",
        stage.arena.on_disk()
    );
    // Files hold what they must and no more: a block of two is empty in each.
    assert!(stage.arena.stored() < stage.arena.on_disk());
    stage.all_back();
    stage.settle();
    assert_eq!(
        (stage.arena.on_disk(), stage.arena.stored()),
        (Bytes::ZERO, Bytes::ZERO)
    );
    let totals = stage.arena.tier_totals();
    assert!(totals.loaded <= totals.spilled && totals.loaded >= Bytes(SEGMENT.0 * 8));
}

#[test]
fn bug_109_what_has_been_cold_for_long_needs_no_host_memory() {
    let mut stage = Stage::new(8);
    stage.arena.set_tier(TierSettings {
        limit: Bytes::gib(1),
        after: Some(Duration::from_secs(60)),
        packing: Packing::Zstd,
        threads: 2,
    });
    stage.arena.want(1, Bytes(SEGMENT.0 * 2), true);
    stage.settle();
    stage.fill(1);
    stage.fill(1);
    stage.arena.want(1, Bytes(SEGMENT.0 * 2), false);
    let due = stage.arena.next_deadline(stage.now).expect("it will be cold");
    assert!(due > stage.now.after(Duration::from_secs(30)), "not yet");
    stage.now = due;
    stage.settle();
    assert_eq!(
        (stage.arena.held(), stage.arena.on_disk()),
        (Bytes::ZERO, Bytes(SEGMENT.0 * 2))
    );
    stage.all_back();
}

#[test]
fn a_full_disk_is_told_once_and_everything_stays_in_memory() {
    let mut stage = Stage::new(2);
    stage.full = true;
    stage.arena.want(1, Bytes(SEGMENT.0 * 2), true);
    stage.settle();
    stage.fill(1);
    stage.fill(1);
    stage.arena.want(1, Bytes::ZERO, false);
    stage.arena.want(2, SEGMENT, true);
    stage.pump();
    for _ in 0..20 {
        stage.hear(1);
        stage.work(0);
    }
    assert_eq!(stage.arena.disk_trouble(), Some(crate::disk::Trouble::Reserve));
    assert_eq!(
        (stage.arena.on_disk(), stage.arena.stored()),
        (Bytes::ZERO, Bytes::ZERO)
    );
    // Room again: tried again by itself, after a while.
    stage.full = false;
    stage.settle();
    assert_eq!(stage.arena.disk_trouble(), None);
    assert_eq!(stage.arena.held_by(2), SEGMENT);
    stage.all_back();
}

#[test]
fn a_lowered_budget_is_met_by_what_is_empty_and_then_by_the_disk() {
    let mut stage = Stage::new(6);
    stage.arena.want(1, Bytes(SEGMENT.0 * 6), true);
    stage.settle();
    (0..4).for_each(|_| stage.fill(1));
    stage.arena.want(1, Bytes(SEGMENT.0 * 6), false);
    stage.settle();
    assert_eq!(
        stage.arena.held(),
        Bytes(SEGMENT.0 * 6),
        "as configured, to the byte"
    );
    // The control group was made smaller.
    let lower = Bytes(SEGMENT.0 * 2);
    stage.arena.set_budget(lower);
    stage.now = stage.now.after(Duration::from_secs(10));
    let mut moves = Vec::new();
    stage.arena.pump(stage.now, &mut moves);
    stage.take_above(moves);
    for _ in 0..200 {
        stage.budget = stage.arena.held().max(lower);
        stage.hear(1);
        stage.work(0);
    }
    stage.budget = lower;
    stage.settle();
    assert!(stage.arena.held() <= lower, "{}", stage.arena.held());
    assert!(stage.arena.on_disk() >= Bytes(SEGMENT.0 * 2));
    stage.all_back();
}

#[test]
fn reading_goes_before_what_is_wanted_ahead_of_need() {
    let mut stage = Stage::new(4);
    for holder in [1, 2] {
        stage.arena.want(holder, Bytes(SEGMENT.0 * 3), true);
        for _ in 0..3 {
            stage.settle();
            stage.fill(holder);
        }
        stage.arena.want(holder, Bytes(SEGMENT.0 * 3), false);
    }
    assert!(stage.arena.on_disk_of(1) >= Bytes(SEGMENT.0 * 2));
    // It goes on wanting room for all that it has, as programs do, and so does the other one.
    for _ in 0..6 {
        stage.restore(1);
        stage.settle();
    }
    assert!(stage.programs[&1].marks.is_empty(), "all of it came back");
    stage.all_back();
}

#[test]
fn the_limit_of_the_disk_holds() {
    let mut stage = Stage::new(2);
    stage.arena.set_tier(TierSettings {
        limit: SEGMENT,
        after: None,
        packing: Packing::None,
        threads: 2,
    });
    stage.arena.want(1, Bytes(SEGMENT.0 * 2), true);
    stage.settle();
    stage.fill(1);
    stage.fill(1);
    stage.arena.want(1, Bytes::ZERO, false);
    stage.arena.want(2, Bytes(SEGMENT.0 * 2), true);
    stage.settle();
    assert!(stage.arena.stored() <= SEGMENT);
    assert_eq!(stage.arena.held_by(2), SEGMENT, "as much as the disk took");
    stage.all_back();
}

#[test]
fn a_file_that_a_new_daemon_does_not_take_is_read_by_the_program() {
    let mut stage = Stage::new(2);
    stage.arena.want(1, SEGMENT, true);
    stage.settle();
    stage.fill(1);
    stage.arena.want(1, Bytes::ZERO, false);
    stage.arena.want(2, Bytes(SEGMENT.0 * 2), true);
    stage.settle();
    assert_eq!(stage.arena.on_disk_of(1), SEGMENT);
    // A daemon without a disk tier.
    stage.arena = Stage::arena(stage.budget, 9);
    stage.restore(1);
    stage.settle();
    assert!(stage.programs[&1].marks.is_empty(), "read and checked by itself");
}

#[derive(Clone, Debug)]
enum Op {
    Want(Holder, u64, bool),
    Fill(Holder),
    Restore(Holder),
    Hear(Holder),
    Work(usize),
    HangUp(Holder),
    KillDaemon,
    Die(Holder),
    Full(bool),
    Later,
}

fn op() -> impl Strategy<Value = Op> {
    let holder = || 1u64..4;
    prop_oneof![
        3 => (holder(), 0u64..5, any::<bool>()).prop_map(|(h, n, urgent)| Op::Want(h, n, urgent)),
        4 => holder().prop_map(Op::Fill),
        2 => holder().prop_map(Op::Restore),
        8 => holder().prop_map(Op::Hear),
        8 => any::<usize>().prop_map(Op::Work),
        1 => holder().prop_map(Op::HangUp),
        1 => Just(Op::KillDaemon),
        1 => holder().prop_map(Op::Die),
        1 => any::<bool>().prop_map(Op::Full),
        2 => Just(Op::Later),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn whatever_happens_no_byte_is_lost(ops in prop::collection::vec(op(), 1..120)) {
        let mut stage = Stage::new(3);
        for op in ops {
            match op {
                Op::Want(holder, n, urgent) => {
                    stage.call(|arena, _, _| arena.want(holder, Bytes(SEGMENT.0 * n), urgent));
                }
                Op::Fill(holder) => stage.fill(holder),
                Op::Restore(holder) => stage.restore(holder),
                Op::Hear(holder) => { stage.hear(holder); }
                Op::Work(which) => stage.work(which),
                Op::HangUp(holder) => {
                    stage.hang_up(holder);
                    stage.declare(holder);
                }
                Op::KillDaemon => stage.kill_daemon(),
                Op::Die(holder) => stage.die(holder),
                Op::Full(full) => stage.full = full,
                Op::Later => {
                    stage.now = stage.now.after(Duration::from_millis(1500));
                    stage.pump();
                }
            }
        }
        stage.all_back();
    }
}
