//! Common segments against a tiny model: programs that keep copies, tell of them, take offers or not, and go away at any step.
//!
//! A copy is a number. Where the model says it is, that number has to be, whatever happened. Bytes are not really read here (`equal` has tests
//! of its own): what a block of a memory file holds is in a map.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;

use ebb_protocol::wire::RestingRun;
use proptest::prelude::*;

use super::*;
use crate::equal::{self, BLOCK, Block, Found, Merged, Sample, Secret};

/// Blocks of a segment.
const BLOCKS: u64 = 4;
const SEGMENT: Bytes = Bytes(BLOCK.0 * BLOCKS);

/// A value's sample: some values cannot be told apart by it.
fn sample(value: u8) -> Sample {
    Sample(u128::from(value / 2))
}

/// Memory files, by number: what is in their blocks.
#[derive(Debug, Default)]
struct Machine {
    content: BTreeMap<(u64, u64), u8>,
    sealed: BTreeMap<u64, usize>,
}

fn file_number(memory: &OwnedFd) -> u64 {
    rustix::fs::fstat(memory).unwrap().st_ino
}

impl Machine {
    fn at(&self, block: &Block) -> u8 {
        let spot = (file_number(&block.memory), block.offset / BLOCK.0);
        self.content.get(&spot).copied().unwrap_or(0)
    }

    /// What the worker would do.
    fn run(&mut self, job: equal::Job) -> equal::Done {
        match job {
            equal::Job::Look { blocks, .. } => {
                equal::Done::Looked(blocks.iter().map(|b| Some(sample(self.at(b)))).collect())
            }
            equal::Job::Merge { key, alike } => {
                let (mut values, mut found) = (Vec::new(), Vec::new());
                for group in &alike {
                    let first = self.at(&group.first);
                    let equal: Vec<bool> = group.others.iter().map(|b| self.at(b) == first).collect();
                    let at = (!group.sealed && equal.contains(&true)).then(|| {
                        values.push(first);
                        (values.len() as u64 - 1) * BLOCK.0
                    });
                    found.push(Some(Found { at, equal }));
                }
                let memory = (!values.is_empty()).then(|| self.seal(&values));
                let result = Ok(Merged { memory, found });
                equal::Done::Merged { key, result }
            }
        }
    }

    fn seal(&mut self, values: &[u8]) -> (Arc<OwnedFd>, Bytes) {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("common", flags).unwrap();
        let bytes = Bytes(values.len() as u64 * BLOCK.0);
        rustix::fs::ftruncate(&memory, bytes.0).unwrap();
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        let number = file_number(&memory);
        for (n, value) in values.iter().enumerate() {
            self.content.insert((number, n as u64), *value);
        }
        self.sealed.insert(number, values.len());
        (Arc::new(memory), bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Own(u64, u64),
    Common(u64, u64),
}

/// A program as the library in it behaves.
#[derive(Debug, Default)]
struct Program {
    connected: bool,
    segments: BTreeMap<u64, Arc<OwnedFd>>,
    commons: BTreeMap<u64, Arc<OwnedFd>>,
    /// What each copy has to hold, and where it is.
    copies: Vec<(u8, Home)>,
    told: BTreeMap<(u64, u64), u64>,
    notice: u64,
    inbox: VecDeque<Move>,
}

impl Program {
    fn memory(&self, home: Home) -> (&Arc<OwnedFd>, u64) {
        match home {
            Home::Own(id, n) => (&self.segments[&id], n),
            Home::Common(id, n) => (&self.commons[&id], n),
        }
    }

    fn free_place(&self) -> Option<(u64, u64)> {
        let all = self
            .segments
            .keys()
            .flat_map(|id| (0..BLOCKS).map(move |n| (*id, n)));
        let taken = |(id, n): &(u64, u64)| self.copies.iter().any(|(_, home)| *home == Home::Own(*id, *n));
        all.into_iter().find(|place| !taken(place))
    }

    /// Common segments with nothing of ours in them.
    fn unused(&mut self) -> Vec<u64> {
        let used = |id: &u64| {
            self.copies
                .iter()
                .any(|(_, home)| matches!(home, Home::Common(at, _) if at == id))
        };
        let unused: Vec<u64> = self.commons.keys().filter(|id| !used(id)).copied().collect();
        for id in &unused {
            self.commons.remove(id);
        }
        unused
    }
}

struct World {
    arena: Arena,
    machine: Machine,
    programs: BTreeMap<Holder, Program>,
    jobs: Vec<Job>,
    equal: Vec<equal::Job>,
    now: Time,
    generation: u64,
    budget: Bytes,
}

/// Two programs are of one user, the third is not.
fn domain(holder: Holder) -> String {
    String::from(if holder % 3 == 2 { "b" } else { "a" })
}

impl World {
    fn new(segments: u64) -> Self {
        let budget = Bytes(SEGMENT.0 * segments);
        Self {
            arena: Self::arena(budget, 1),
            machine: Machine::default(),
            programs: (0..3).map(|holder| (holder, Program::default())).collect(),
            jobs: Vec::new(),
            equal: Vec::new(),
            now: Time::from_millis(1),
            generation: 1,
            budget,
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
        // The size of one is bounded by the budget.
        arena.segment = SEGMENT;
        arena.set_common(Some(Secret::of([9; 32])));
        arena
    }

    fn call<T>(&mut self, with: impl FnOnce(&mut Arena, Time, &mut Vec<Move>) -> T) -> T {
        let mut moves = Vec::new();
        let result = with(&mut self.arena, self.now, &mut moves);
        self.arena.pump(self.now, &mut moves);
        for what in moves {
            match what {
                Move::Work(job) => self.jobs.push(job),
                Move::Equal(job) => self.equal.push(job),
                Move::Give { to, .. }
                | Move::Recall { from: to, .. }
                | Move::Offer { to, .. }
                | Move::Unkeep { to, .. } => {
                    if let Some(program) = self.programs.get_mut(&to) {
                        program.inbox.push_back(what);
                    }
                }
                _ => {}
            }
        }
        self.arena.check();
        assert!(self.arena.held() <= self.budget, "{} held", self.arena.held());
        result
    }

    fn connect(&mut self, holder: Holder) {
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        if std::mem::replace(&mut program.connected, true) {
            return;
        }
        program.told.clear();
        let commons: Vec<(u64, Arc<OwnedFd>)> =
            program.commons.iter().map(|(id, fd)| (*id, fd.clone())).collect();
        let blocks = |machine: &Machine, fd: &OwnedFd| machine.sealed[&file_number(fd)] as u64;
        let (infos, fds): (Vec<SegmentInfo>, Vec<OwnedFd>) = commons
            .iter()
            .map(|(id, fd)| {
                let bytes = Bytes(blocks(&self.machine, fd) * BLOCK.0);
                (SegmentInfo { id: *id, bytes }, fd.try_clone().unwrap())
            })
            .unzip();
        self.call(|arena, _, moves| {
            arena.set_domain(holder, domain(holder));
            arena.declare_common(holder, true, &infos, fds, moves);
        });
    }

    fn hang_up(&mut self, holder: Holder) {
        if let Some(program) = self.programs.get_mut(&holder) {
            program.connected = false;
            program.inbox.clear();
            program.told.clear();
            self.call(|arena, _, moves| {
                arena.want(holder, Bytes::ZERO, false);
                arena.hung_up(holder, moves);
            });
        }
    }

    /// The daemon is killed. What programs have in segments of its own stays theirs, and no daemon's business here.
    fn restart(&mut self) {
        self.generation += 1;
        self.arena = Self::arena(self.budget, self.generation);
        (self.jobs, self.equal) = (Vec::new(), Vec::new());
        for program in self.programs.values_mut() {
            program.connected = false;
            program.inbox.clear();
            program.told.clear();
        }
    }

    fn want(&mut self, holder: Holder, segments: u64, urgent: bool) {
        if self.programs[&holder].connected {
            self.call(|arena, _, _| arena.want(holder, Bytes(SEGMENT.0 * segments), urgent));
        }
    }

    /// A chunk leaves the card.
    fn evict(&mut self, holder: Holder, value: u8) {
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        if let Some((id, n)) = program.free_place() {
            let number = file_number(&program.segments[&id]);
            program.told.remove(&(id, n));
            program.copies.push((value, Home::Own(id, n)));
            self.machine.content.insert((number, n), value);
        }
    }

    fn rest(&mut self, holder: Holder) {
        let Some(program) = self.programs.get_mut(&holder).filter(|p| p.connected) else {
            return;
        };
        program.notice += 1;
        let notice = program.notice;
        let mut runs = Vec::new();
        for (_, home) in &program.copies {
            if let Home::Own(id, n) = *home
                && let std::collections::btree_map::Entry::Vacant(entry) = program.told.entry((id, n))
            {
                entry.insert(notice);
                runs.push(RestingRun {
                    segment: id,
                    offset: n * BLOCK.0,
                    bytes: BLOCK,
                });
            }
        }
        self.call(|arena, _, _| arena.rest(holder, notice, &runs));
        self.tell_use(holder);
    }

    fn tell_use(&mut self, holder: Holder) {
        let program = &self.programs[&holder];
        if !program.connected {
            return;
        }
        let common = program
            .copies
            .iter()
            .filter(|(_, home)| matches!(home, Home::Common(..)))
            .count() as u64;
        let all = program.copies.len() as u64;
        self.call(|arena, now, _| {
            arena.common_use(holder, Bytes(common * BLOCK.0), Bytes::ZERO);
            let _ = arena.in_use(now, holder, Bytes(all * BLOCK.0));
        });
    }

    /// It comes back, and its host copy is given up.
    fn restore(&mut self, holder: Holder, which: usize) {
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        if !program.copies.is_empty() {
            let which = which % program.copies.len();
            program.copies.swap_remove(which);
        }
        self.leave_unused(holder);
    }

    fn leave_unused(&mut self, holder: Holder) {
        let unused = self
            .programs
            .get_mut(&holder)
            .map(Program::unused)
            .unwrap_or_default();
        if self.programs[&holder].connected && !unused.is_empty() {
            self.call(|arena, _, moves| arena.common_left(holder, &unused, moves));
        }
        self.tell_use(holder);
    }

    fn give_back(&mut self, holder: Holder) {
        let Some(program) = self.programs.get_mut(&holder).filter(|p| p.connected) else {
            return;
        };
        let used = |id: &u64| {
            program
                .copies
                .iter()
                .any(|(_, home)| matches!(home, Home::Own(at, _) if at == id))
        };
        let empty: Vec<u64> = program.segments.keys().filter(|id| !used(id)).copied().collect();
        for id in &empty {
            program.segments.remove(id);
            program.told.retain(|(at, _), _| at != id);
        }
        self.call(|arena, _, moves| {
            arena.returned(holder, &empty, moves);
        });
    }

    /// A program reads one message. A library may also not want what it is offered.
    fn hear(&mut self, holder: Holder, willing: bool) {
        let Some(program) = self.programs.get_mut(&holder) else {
            return;
        };
        match program.inbox.pop_front() {
            Some(Move::Give { segments, .. }) => {
                for (info, memory) in segments {
                    let number = file_number(&memory);
                    for n in 0..BLOCKS {
                        self.machine.content.remove(&(number, n));
                    }
                    program.segments.insert(info.id, memory);
                }
            }
            Some(Move::Offer {
                segment,
                blocks,
                memory,
                ..
            }) => {
                let number = file_number(&memory);
                program.commons.insert(segment.id, memory);
                for block in blocks.iter().filter(|_| willing) {
                    let (place, at) = ((block.segment, block.offset / BLOCK.0), block.at / BLOCK.0);
                    if program.told.get(&place) != Some(&block.notice) {
                        continue;
                    }
                    let own = Home::Own(place.0, place.1);
                    let copy = program.copies.iter_mut().find(|(_, home)| *home == own);
                    if let Some(copy) = copy {
                        assert_eq!(self.machine.content[&(number, at)], copy.0, "no byte is lost");
                        copy.1 = Home::Common(segment.id, at);
                        program.told.remove(&place);
                    }
                }
                let unused = program.unused();
                let held = !unused.contains(&segment.id);
                self.call(|arena, _, moves| arena.offer_answered(holder, segment.id, Some(held), moves));
                self.tell_use(holder);
            }
            Some(Move::Recall { .. }) => self.give_back(holder),
            // Nothing is only kept here: all of it is off the card.
            _ => {}
        }
    }

    fn die(&mut self, holder: Holder) {
        self.programs.insert(holder, Program::default());
        self.call(|arena, _, moves| arena.died(holder, moves));
    }

    fn work(&mut self, which: usize) {
        let all = self.jobs.len() + self.equal.len();
        if all == 0 {
            return self.wait(10);
        }
        let which = which % all;
        if which < self.jobs.len() {
            let done = match self.jobs.remove(which) {
                // Without pages: nobody reads them here.
                Job::Make { key, bytes, .. } => Prepared {
                    key,
                    result: make_bare(bytes, false).map(|fd| Some(Arc::new(fd))),
                },
                Job::Zero { key, memory, .. } => Prepared {
                    key,
                    result: Ok(Some(memory)),
                },
                Job::Discard { key, .. } => Prepared {
                    key,
                    result: Ok(None),
                },
            };
            self.call(|arena, now, _| arena.prepared(now, done).unwrap());
        } else {
            let job = self.equal.remove(which - self.jobs.len());
            let done = self.machine.run(job);
            self.call(|arena, now, moves| arena.equal(now, done, moves).unwrap());
        }
    }

    fn wait(&mut self, ms: u64) {
        self.now = self.now.after(Duration::from_millis(ms));
        self.call(|_, _, _| ());
    }

    /// Until nothing more happens.
    fn run(&mut self) {
        for _ in 0..2000 {
            let talk: Vec<Holder> = self.programs.keys().copied().collect();
            for holder in talk {
                while self.programs.get(&holder).is_some_and(|p| !p.inbox.is_empty()) {
                    self.hear(holder, true);
                }
            }
            if !self.jobs.is_empty() || !self.equal.is_empty() {
                self.work(0);
                continue;
            }
            // As the driver: not at once, and not before it has something to do.
            let next = self.arena.next_deadline(self.now);
            match next.map(|at| at.max(self.now.after(Duration::from_millis(10)))) {
                Some(at) if at < self.now.after(Duration::from_secs(30)) => {
                    self.now = at;
                    self.call(|_, _, _| ());
                }
                _ => break,
            }
        }
    }

    /// Every copy of every program holds what it has to.
    fn verify(&self) {
        for (holder, program) in &self.programs {
            for (value, home) in &program.copies {
                let (memory, n) = program.memory(*home);
                let found = self.machine.content[&(file_number(memory), n)];
                assert_eq!(found, *value, "program {holder} at {home:?}");
            }
        }
        // No file is in the hands of two domains.
        let mut seen: BTreeMap<u64, String> = BTreeMap::new();
        for (holder, program) in &self.programs {
            for memory in program.commons.values() {
                let owner = seen.entry(file_number(memory)).or_insert_with(|| domain(*holder));
                assert_eq!(*owner, domain(*holder));
            }
        }
    }

    /// All programs with the same copies off the card, told.
    fn alike(&mut self, holders: &[Holder], values: &[u8]) {
        for holder in holders {
            self.connect(*holder);
            self.want(*holder, (values.len() as u64).div_ceil(BLOCKS), false);
        }
        self.run();
        for holder in holders {
            for value in values {
                self.evict(*holder, *value);
            }
            self.rest(*holder);
        }
        self.run();
        self.verify();
    }

    fn in_common(&self, holder: Holder) -> usize {
        let copies = &self.programs[&holder].copies;
        copies
            .iter()
            .filter(|(_, home)| matches!(home, Home::Common(..)))
            .count()
    }
}

#[test]
fn two_programs_of_one_user_have_one_copy_and_the_third_its_own() {
    let mut world = World::new(8);
    world.alike(&[0, 1, 2], &[10, 20, 30, 40]);
    assert_eq!(
        (world.in_common(0), world.in_common(1), world.in_common(2)),
        (4, 4, 0)
    );
    assert_eq!(world.arena.common_bytes(), SEGMENT);
    assert_eq!(world.arena.spared(), SEGMENT);
    for holder in 0..3 {
        world.give_back(holder);
        world.want(holder, 0, false);
    }
    world.run();
    // One in common, and the third program's.
    assert_eq!(world.arena.held(), Bytes(2 * SEGMENT.0));
    // The first one's death takes nothing from the second.
    world.die(0);
    world.run();
    world.verify();
    assert_eq!(world.arena.common_bytes(), SEGMENT);
    world.die(1);
    world.die(2);
    world.run();
    assert_eq!(world.arena.held(), Bytes::ZERO);
}

#[test]
fn who_comes_later_joins_and_one_program_has_equal_blocks_once() {
    let mut world = World::new(16);
    world.alike(&[0], &[7, 7, 7, 9]);
    assert_eq!(world.in_common(0), 3);
    assert_eq!(world.arena.common_bytes(), BLOCK);
    world.alike(&[1], &[7, 9]);
    assert_eq!((world.in_common(0), world.in_common(1)), (4, 2));
    assert_eq!(world.arena.common_bytes(), Bytes(2 * BLOCK.0));
}

#[test]
fn one_sample_is_no_proof() {
    let mut world = World::new(8);
    // 10 and 11 look alike.
    world.alike(&[0, 1], &[10]);
    world.alike(&[0], &[11]);
    world.alike(&[1], &[30]);
    assert_eq!((world.in_common(0), world.in_common(1)), (1, 1));
    world.verify();
}

#[test]
fn a_daemon_that_is_killed_takes_nothing_along_and_the_next_one_hears_of_it() {
    let mut world = World::new(8);
    world.alike(&[0, 1], &[10, 20, 30]);
    world.restart();
    world.verify();
    assert_eq!(world.arena.common_bytes(), Bytes::ZERO);
    world.connect(0);
    world.connect(1);
    assert_eq!(world.arena.common_bytes(), Bytes(3 * BLOCK.0), "once for both");
    world.run();
    // A third replica joins what an earlier daemon made.
    let third = 3;
    world.programs.insert(third, Program::default());
    world.alike(&[third], &[10, 20, 30]);
    assert_eq!(world.in_common(third), 3);
    assert_eq!(world.arena.common_bytes(), Bytes(3 * BLOCK.0));
}

#[test]
fn what_was_written_since_is_not_taken() {
    let mut world = World::new(8);
    for holder in [0, 1] {
        world.connect(holder);
        world.want(holder, 1, false);
    }
    world.run();
    for holder in [0, 1] {
        world.evict(holder, 10);
        world.rest(holder);
    }
    while world.programs[&0].inbox.is_empty() {
        world.work(0);
    }
    // It comes back, and something else goes to where it was, before the offer is read.
    world.restore(0, 0);
    world.evict(0, 50);
    world.run();
    world.verify();
    assert_eq!((world.in_common(0), world.in_common(1)), (0, 1));
}

#[test]
fn in_a_full_arena_what_is_in_common_makes_the_room_for_more() {
    // Room for both programs' own, and for one segment more.
    let mut world = World::new(9);
    let values: Vec<u8> = (0..16).map(|n| n * 2).collect();
    world.alike(&[0, 1], &values);
    assert_eq!((world.in_common(0), world.in_common(1)), (16, 16));
    for holder in [0, 1] {
        world.give_back(holder);
        world.want(holder, 0, false);
    }
    world.run();
    assert_eq!(world.arena.held(), Bytes(4 * SEGMENT.0), "one copy for both");
}

#[test]
fn a_forged_file_is_not_taken_on() {
    let mut world = World::new(8);
    world.connect(0);
    let memory = make_bare(SEGMENT, false).unwrap();
    assert!(memory.as_raw_fd() >= 0);
    let info = SegmentInfo {
        id: 5,
        bytes: SEGMENT,
    };
    let taken = world.call(|arena, _, moves| arena.declare_common(0, true, &[info], vec![memory], moves));
    assert_eq!((taken, world.arena.held()), (0, Bytes::ZERO));
}

#[derive(Clone, Debug)]
enum Op {
    Connect(Holder),
    HangUp(Holder),
    Want(Holder, u64, bool),
    Evict(Holder, u8),
    Rest(Holder),
    Restore(Holder, usize),
    GiveBack(Holder),
    Hear(Holder, bool),
    Die(Holder),
    Work(usize),
    Wait(u64),
    Restart,
    Run,
}

fn op() -> impl Strategy<Value = Op> {
    let holder = 0u64..3;
    prop_oneof![
        2 => holder.clone().prop_map(Op::Connect),
        1 => holder.clone().prop_map(Op::HangUp),
        3 => (holder.clone(), 0u64..4, any::<bool>()).prop_map(|(h, n, u)| Op::Want(h, n, u)),
        8 => (holder.clone(), 0u8..6).prop_map(|(h, v)| Op::Evict(h, v)),
        5 => holder.clone().prop_map(Op::Rest),
        4 => (holder.clone(), any::<usize>()).prop_map(|(h, n)| Op::Restore(h, n)),
        2 => holder.clone().prop_map(Op::GiveBack),
        8 => (holder.clone(), prop::bool::weighted(0.9)).prop_map(|(h, w)| Op::Hear(h, w)),
        1 => holder.prop_map(Op::Die),
        12 => any::<usize>().prop_map(Op::Work),
        2 => (1u64..3000).prop_map(Op::Wait),
        1 => Just(Op::Restart),
        1 => Just(Op::Run),
    ]
}

proptest! {
    #[test]
    fn no_copy_is_ever_lost_or_seen_by_another_user(ops in prop::collection::vec(op(), 1..120)) {
        let mut world = World::new(8);
        for op in ops {
            match op {
                Op::Connect(h) => world.connect(h),
                Op::HangUp(h) => world.hang_up(h),
                Op::Want(h, n, urgent) => world.want(h, n, urgent),
                Op::Evict(h, value) => world.evict(h, value),
                Op::Rest(h) => world.rest(h),
                Op::Restore(h, which) => world.restore(h, which),
                Op::GiveBack(h) => world.give_back(h),
                Op::Hear(h, willing) => world.hear(h, willing),
                Op::Die(h) => world.die(h),
                Op::Work(which) => world.work(which),
                Op::Wait(ms) => world.wait(ms),
                Op::Restart => world.restart(),
                Op::Run => world.run(),
            }
            world.verify();
        }
        for holder in 0..3 {
            world.die(holder);
        }
        world.run();
        prop_assert_eq!(world.arena.held(), Bytes::ZERO, "nothing stays");
        prop_assert_eq!(world.arena.spared(), Bytes::ZERO);
    }
}
