use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn config(segment: Bytes) -> ArenaConfig {
    ArenaConfig {
        budget: None,
        segment,
        huge_pages: false,
        threads: 2,
        pinned: crate::config::Pinned::All,
        share: true,
    }
}

/// An arena whose jobs run when the test says so, and its holders.
struct Bench {
    arena: Arena,
    jobs: Vec<Job>,
    hands: BTreeMap<Holder, BTreeMap<u64, Arc<OwnedFd>>>,
    recalls: Vec<(Holder, Bytes)>,
    now: Time,
}

impl Bench {
    fn new(budget: Bytes, one_user: bool) -> Self {
        Self {
            arena: Arena::new(&config(Bytes::mib(2)), budget, one_user, 1 << 40),
            jobs: Vec::new(),
            hands: BTreeMap::new(),
            recalls: Vec::new(),
            now: Time::from_millis(1),
        }
    }

    fn take(&mut self, moves: Vec<Move>) {
        for what in moves {
            match what {
                Move::Work(job) => self.jobs.push(job),
                Move::Recall { from, bytes } => self.recalls.push((from, bytes)),
                Move::Give { to, segments } => {
                    assert!(segments.len() <= MAX_FDS);
                    for (info, memory) in segments {
                        // No byte of an earlier holder is left; the next one would find what we leave here.
                        let mut content = vec![1; info.bytes.to_usize()];
                        assert_eq!(rustix::io::pread(&*memory, &mut content, 0), Ok(content.len()));
                        assert!(
                            content.iter().all(|byte| *byte == 0),
                            "segment {} is not clean",
                            info.id
                        );
                        rustix::io::pwrite(&*memory, b"secret", 4096).unwrap();
                        for (other, hand) in &self.hands {
                            assert!(
                                !hand.contains_key(&info.id),
                                "{} is in the hand of {other}",
                                info.id
                            );
                        }
                        self.hands.entry(to).or_default().insert(info.id, memory);
                    }
                }
                other => panic!("there is no disk here: {other:?}"),
            }
        }
        self.arena.check();
        assert!(
            self.arena.held() <= self.arena.budget(),
            "{} held",
            self.arena.held()
        );
    }

    fn pump(&mut self) {
        let mut moves = Vec::new();
        self.arena.pump(self.now, &mut moves);
        self.take(moves);
    }

    fn work(&mut self) {
        while let Some(job) = self.jobs.pop() {
            self.arena.prepared(self.now, job.run()).unwrap();
            self.pump();
        }
    }

    fn want(&mut self, holder: Holder, bytes: Bytes, urgent: bool) {
        self.arena.want(holder, bytes, urgent);
        self.pump();
    }

    fn give_back(&mut self, holder: Holder, n: usize) {
        let hand = self.hands.entry(holder).or_default();
        let ids: Vec<u64> = hand.keys().copied().take(n).collect();
        for id in &ids {
            hand.remove(id);
        }
        let mut moves = Vec::new();
        assert_eq!(self.arena.returned(holder, &ids, &mut moves), 0);
        self.take(moves);
        self.pump();
    }

    fn die(&mut self, holder: Holder) {
        self.hands.remove(&holder);
        let mut moves = Vec::new();
        self.arena.died(holder, &mut moves);
        self.take(moves);
        self.pump();
    }

    fn held_by(&self, holder: Holder) -> usize {
        self.hands.get(&holder).map_or(0, BTreeMap::len)
    }
}

#[test]
fn what_is_wanted_is_given_ahead_of_need_within_the_budget() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    bench.want(1, Bytes::mib(7), false);
    bench.work();
    assert_eq!(bench.held_by(1), 4, "rounded up to segments");
    bench.want(2, Bytes::gib(1), false);
    bench.work();
    assert_eq!((bench.held_by(2), bench.arena.held()), (4, Bytes::mib(16)));
    assert_eq!(bench.arena.lent(), Bytes::mib(16));
}

#[test]
fn the_last_piece_of_a_budget_is_used_too() {
    let mut arena = Arena::new(&config(Bytes::mib(8)), Bytes::mib(70), true, 0);
    arena.want(1, Bytes::gib(1), false);
    let mut moves = Vec::new();
    while arena.held() < Bytes::mib(70) {
        let before = arena.held();
        arena.pump(Time(1), &mut moves);
        for what in std::mem::take(&mut moves) {
            if let Move::Work(job) = what {
                arena.prepared(Time(1), job.run()).unwrap();
            }
        }
        assert!(arena.held() > before);
    }
    assert_eq!(arena.held(), Bytes::mib(70));
}

/// Each holds what the other lacks for a single chunk. The one who lacks least is served, then the other; nobody waits for ever, and nothing goes to
/// and fro.
#[test]
fn two_who_are_about_to_release_do_not_wait_for_each_other() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    for holder in [1, 2] {
        bench.want(holder, Bytes::mib(8), false);
    }
    bench.work();
    assert_eq!((bench.held_by(1), bench.held_by(2)), (4, 4));
    // Both at once: what one was asked for before it was about to release, it keeps.
    bench.arena.want(1, Bytes::mib(12), true);
    bench.want(2, Bytes::mib(10), true);
    // The second lacks less.
    assert_eq!(bench.recalls, vec![(1, Bytes::mib(2))]);
    bench.pump();
    assert_eq!(bench.recalls.len(), 1, "asked once");
    bench.give_back(1, 1);
    bench.work();
    assert_eq!((bench.held_by(1), bench.held_by(2)), (3, 5));
    // It has released into that, needs no more, and what is empty of it is the other's.
    let _ = bench.arena.in_use(bench.now, 2, Bytes::mib(4));
    bench.want(2, Bytes::mib(4), false);
    bench.work();
    let recalled: Vec<_> = bench.recalls.drain(1..).collect();
    assert_eq!(recalled, vec![(2, Bytes::mib(6))]);
    bench.give_back(2, 3);
    bench.work();
    assert_eq!((bench.held_by(1), bench.held_by(2)), (6, 2));
    assert_eq!(bench.recalls.len(), 1);
}

/// What all others have is not enough for any of them: nothing is taken in vain.
#[test]
fn nothing_is_taken_from_one_who_releases_if_it_would_not_be_enough() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    for holder in [1, 2] {
        bench.want(holder, Bytes::mib(8), false);
    }
    bench.work();
    let _ = bench.arena.in_use(bench.now, 1, Bytes::mib(8));
    let _ = bench.arena.in_use(bench.now, 2, Bytes::mib(6));
    bench.arena.want(1, Bytes::mib(12), true);
    bench.want(2, Bytes::mib(14), true);
    bench.work();
    assert!(bench.recalls.is_empty(), "{:?}", bench.recalls);
}

#[test]
fn an_urgent_need_recalls_what_is_empty_elsewhere_and_goes_first() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    bench.want(1, Bytes::mib(16), false);
    bench.work();
    let _ = bench.arena.in_use(bench.now, 1, Bytes::mib(4));
    // A need without haste takes nothing that somebody wants.
    bench.want(2, Bytes::mib(4), false);
    assert!(bench.recalls.is_empty());
    bench.want(3, Bytes::mib(6), true);
    assert_eq!(bench.recalls, vec![(1, Bytes::mib(6))]);
    bench.pump();
    assert_eq!(bench.recalls.len(), 1, "not asked twice while it is on its way");
    bench.give_back(1, 3);
    bench.work();
    assert_eq!(
        (bench.held_by(3), bench.held_by(2)),
        (3, 0),
        "the urgent one first"
    );
    // No answer: asked again later.
    bench.want(3, Bytes::mib(8), true);
    assert_eq!(bench.recalls.len(), 2);
    bench.now = bench.now.after(RECALL_PATIENCE);
    bench.pump();
    assert_eq!(bench.recalls.len(), 3);
}

#[test]
fn what_is_in_use_is_never_recalled() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    bench.want(1, Bytes::mib(16), false);
    bench.work();
    let _ = bench.arena.in_use(bench.now, 1, Bytes::mib(16));
    bench.want(2, Bytes::mib(6), true);
    assert!(bench.recalls.is_empty());
}

#[test]
fn a_dead_holder_returns_everything_and_memory_nobody_wants_goes_back() {
    for one_user in [true, false] {
        let mut bench = Bench::new(Bytes::mib(16), one_user);
        bench.want(1, Bytes::mib(16), false);
        bench.work();
        bench.want(2, Bytes::mib(6), false);
        bench.die(1);
        bench.work();
        assert_eq!(bench.held_by(2), 3, "one user: {one_user}");
        bench.die(2);
        bench.work();
        assert_eq!(bench.arena.held(), Bytes::ZERO);
    }
}

#[test]
fn between_users_memory_is_never_reused() {
    let mut bench = Bench::new(Bytes::mib(4), false);
    bench.want(1, Bytes::mib(4), false);
    bench.work();
    let kept: Vec<Arc<OwnedFd>> = bench.hands[&1].values().cloned().collect();
    bench.want(2, Bytes::mib(4), true);
    bench.give_back(1, 2);
    bench.work();
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    for now in bench.hands[&2].values() {
        assert!(
            kept.iter().all(|before| inode(before) != inode(now)),
            "a kept descriptor would see it"
        );
    }
    for before in kept {
        assert_eq!(
            rustix::fs::fstat(&*before).unwrap().st_blocks,
            0,
            "its pages are gone"
        );
    }
}

#[test]
fn segments_are_sealed_in_size() {
    let memory = make(Bytes::mib(2), false).unwrap();
    assert!(rustix::fs::ftruncate(&memory, 0).is_err());
    assert!(rustix::fs::ftruncate(&memory, 4 << 20).is_err());
    assert!(is_segment(&memory, Bytes::mib(2)));
    assert!(!is_segment(&memory, Bytes::mib(4)));
}

#[test]
fn without_huge_pages_in_the_pool_small_ones_do() {
    let done = Job::Make {
        key: 1,
        bytes: Bytes::mib(2),
        huge_pages: true,
    }
    .run();
    let memory = done.result.unwrap().unwrap();
    assert!(is_segment(&memory, Bytes::mib(2)));
    // Zeroing in place works on either kind.
    let zeroed = Job::Zero {
        key: 1,
        bytes: Bytes::mib(2),
        memory,
    }
    .run();
    assert!(zeroed.result.unwrap().is_some());
}

#[test]
fn a_shortage_of_the_machine_pauses_and_is_tried_again() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    bench.want(1, Bytes::mib(4), false);
    for job in bench.jobs.drain(..) {
        let Job::Make { key, .. } = job else {
            panic!("{job:?}")
        };
        let failed = Prepared {
            key,
            result: Err(Errno::NOMEM),
        };
        assert_eq!(bench.arena.prepared(bench.now, failed), Err(Errno::NOMEM));
    }
    bench.pump();
    assert!(bench.jobs.is_empty(), "not at once");
    assert_eq!(bench.arena.held(), Bytes::ZERO);
    bench.now = bench.arena.next_deadline(bench.now).unwrap();
    bench.pump();
    bench.work();
    assert_eq!(bench.held_by(1), 2);
}

#[test]
fn segments_of_a_dead_daemon_are_taken_on_once_and_false_ones_never() {
    let mut arena = Arena::new(&config(Bytes::mib(2)), Bytes::mib(8), true, 0);
    let good = make(Bytes::mib(2), false).unwrap();
    let info = SegmentInfo {
        id: 77,
        bytes: Bytes::mib(2),
    };
    let same = good.try_clone().unwrap();
    assert_eq!(arena.declare(1, &[info], vec![good]), 1);
    // Another one claims the same memory under another id; the same one claims another memory under the same id.
    assert_eq!(arena.declare(2, &[SegmentInfo { id: 78, ..info }], vec![same]), 0);
    assert_eq!(
        arena.declare(1, &[info], vec![make(Bytes::mib(2), false).unwrap()]),
        0
    );
    // The same id in another hand is another segment.
    assert_eq!(
        arena.declare(2, &[info], vec![make(Bytes::mib(2), false).unwrap()]),
        1
    );
    // Not sealed; sparse; of another size; no memory at all; more than the budget.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let loose = rustix::fs::memfd_create("loose", flags).unwrap();
    rustix::fs::ftruncate(&loose, 2 << 20).unwrap();
    let sparse = rustix::fs::memfd_create("sparse", flags).unwrap();
    rustix::fs::ftruncate(&sparse, 2 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&sparse, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    for (id, bad) in [loose, sparse, null].into_iter().enumerate() {
        let info = SegmentInfo {
            id: id as u64,
            bytes: Bytes::mib(2),
        };
        assert_eq!(arena.declare(3, &[info], vec![bad]), 0, "case {id}");
    }
    let large = make(Bytes::mib(6), false).unwrap();
    assert_eq!(
        arena.declare(
            3,
            &[SegmentInfo {
                id: 1,
                bytes: Bytes::mib(6)
            }],
            vec![large]
        ),
        0
    );
    arena.check();
    assert_eq!((arena.held(), arena.lent()), (Bytes::mib(4), Bytes::mib(4)));
    let mut moves = Vec::new();
    assert_eq!(
        arena.returned(1, &[77, 5], &mut moves),
        1,
        "an id that it does not hold is ignored"
    );
    arena.check();
}

#[test]
fn a_holder_that_declares_the_numbers_to_come_gets_others() {
    let mut bench = Bench::new(Bytes::mib(16), true);
    bench.want(1, Bytes::mib(4), false);
    // The numbers that are next in line, as the holder may well guess.
    for id in 0..8 {
        let info = SegmentInfo {
            id: (1 << 40) + id,
            bytes: Bytes::mib(2),
        };
        let memory = make(Bytes::mib(2), false).unwrap();
        let taken = bench.arena.declare(1, &[info], vec![memory]);
        assert_eq!(taken, usize::from(id < 6), "the budget holds");
    }
    bench.want(1, Bytes::mib(16), false);
    bench.work();
    assert_eq!(bench.held_by(1), 2);
    assert_eq!(bench.arena.lent(), Bytes::mib(16));
    bench.die(1);
    bench.work();
    assert_eq!(bench.arena.held(), Bytes::ZERO);
}

#[test]
fn small_budgets_get_small_segments() {
    assert_eq!(segment_size(Bytes::mib(256), Bytes::gib(100)), Bytes::mib(256));
    assert_eq!(segment_size(Bytes::mib(256), Bytes::mib(512)), Bytes::mib(64));
    assert_eq!(segment_size(Bytes::mib(256), Bytes::mib(3)), GRANULE);
}

#[derive(Clone, Debug)]
enum Op {
    Want(Holder, u64, bool),
    Use(Holder, u64),
    Return(Holder, usize),
    Foreign(Holder, u64),
    Die(Holder),
    Work(usize),
    Wait,
}

fn op() -> impl Strategy<Value = Op> {
    let holder = 1..4_u64;
    prop_oneof![
        (holder.clone(), 0..24 * MIB, any::<bool>()).prop_map(|(h, b, u)| Op::Want(h, b, u)),
        (holder.clone(), 0..24 * MIB).prop_map(|(h, b)| Op::Use(h, b)),
        (holder.clone(), 0..4_usize).prop_map(|(h, n)| Op::Return(h, n)),
        (holder.clone(), any::<u64>()).prop_map(|(h, id)| Op::Foreign(h, id)),
        holder.prop_map(Op::Die),
        (0..4_usize).prop_map(Op::Work),
        Just(Op::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The budget holds, a segment is in one hand, and what is given is zero: checked in [`Bench::take`] at every step.
    #[test]
    fn arena_bounds_and_isolation_hold_whatever_happens(
        ops in prop::collection::vec(op(), 1..50),
        one_user: bool,
    ) {
        let mut bench = Bench::new(Bytes::mib(16), one_user);
        for op in ops {
            match op {
                Op::Want(h, bytes, urgent) => bench.want(h, Bytes(bytes), urgent),
                Op::Use(h, bytes) => {
                    let _ = bench.arena.in_use(bench.now, h, Bytes(bytes));
                }
                Op::Return(h, n) => bench.give_back(h, n),
                Op::Foreign(h, id) => {
                    let mine = bench.hands.get(&h).is_some_and(|hand| hand.contains_key(&id));
                    if !mine {
                        let mut moves = Vec::new();
                        prop_assert_eq!(bench.arena.returned(h, &[id], &mut moves), 1);
                        prop_assert!(moves.is_empty());
                    }
                }
                Op::Die(h) => bench.die(h),
                Op::Work(n) => {
                    for _ in 0..n.min(bench.jobs.len()) {
                        let job = bench.jobs.remove(0);
                        bench.arena.prepared(bench.now, job.run()).unwrap();
                        bench.pump();
                    }
                }
                Op::Wait => {
                    bench.now = bench.now.after(RECALL_PATIENCE);
                    bench.pump();
                }
            }
        }
        // Once nobody is left, nothing is.
        for holder in 1..4 {
            bench.die(holder);
        }
        bench.work();
        prop_assert_eq!(bench.arena.held(), Bytes::ZERO);
    }
}
