//! What need not be copied is not, and whatever is told of it, no byte is lost.

use std::collections::BTreeMap;

use ebb_device::fake::Call;
use ebb_device::{DeviceError, fingerprint::BLOCK};
use ebb_protocol::wire::outcome;
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;
use proptest::prelude::*;

use crate::testing::{Daemon, G, LONG, Rig, Script, done, pattern};

const ERROR: DeviceError = DeviceError::Driver {
    code: 1,
    call: "ordered by the test",
};

/// Chunks of several blocks.
fn rig(daemon: &Daemon, keep: u64) -> Rig {
    rig_of(daemon, keep, 1 << 30)
}

fn rig_of(daemon: &Daemon, keep: u64, slice: u64) -> Rig {
    let card = ebb_device::fake::Card::new(1 << 30);
    Rig::with(Some(daemon), card, 1 << 30, G, |config| {
        config.chunk_max = Bytes(4 * BLOCK);
        config.keep_max = Bytes(keep);
        config.survey_slice = Bytes(slice);
    })
}

fn write(rig: &Rig, at: u64, bytes: &[u8]) {
    rig.touch(|fake| fake.write(at, bytes)).unwrap().unwrap();
}

fn sums(rig: &Rig) -> (u64, u64) {
    let sums = rig.engine.core.arena.sums();
    (sums.used, sums.kept)
}

fn counted(rig: &Rig) -> (u64, u64, u64) {
    rig.state(|state| {
        let counters = &state.counters;
        (counters.bytes_out, counters.bytes_unchanged, counters.bytes_zero)
    })
}

#[test]
fn only_blocks_that_changed_are_copied() {
    let daemon = Daemon::start(Script::default());
    let rig = rig(&daemon, u64::MAX);
    let len = 6 * BLOCK + 3 * G;
    let at = rig.alloc(len);
    rig.fill(at, len, 1);
    assert_eq!(daemon.reclaim(u64::MAX).copied, len);
    assert_eq!(sums(&rig), (len, 0));
    assert!(rig.holds(at, len, 1));
    daemon.wait_restored(1);
    assert_eq!(sums(&rig), (0, len), "the host copy is kept");

    assert_eq!(daemon.reclaim(u64::MAX).copied, 0, "unchanged");
    assert_eq!(sums(&rig), (len, 0));
    assert!(rig.holds(at, len, 1));
    daemon.wait_restored(2);

    // A byte in the third block, and the last one of all.
    write(&rig, at + 2 * BLOCK + 77, &[0x5a]);
    let mut expected = pattern(len, 1);
    expected[usize::try_from(2 * BLOCK + 77).unwrap()] = 0x5a;
    write(&rig, at + len - 1, &[0x5b]);
    *expected.last_mut().unwrap() = 0x5b;
    assert_eq!(daemon.reclaim(u64::MAX).copied, BLOCK + 3 * G);
    let mut bytes = vec![0; expected.len()];
    rig.touch(|fake| fake.read(at, &mut bytes)).unwrap().unwrap();
    assert!(bytes == expected);
    daemon.wait_restored(3);

    // A block becomes zero, and is not zero again.
    write(&rig, at, &vec![0; usize::try_from(BLOCK).unwrap()]);
    assert_eq!(daemon.reclaim(u64::MAX).copied, 0, "zeros are not copied");
    rig.touch(|fake| fake.read(at, &mut bytes)).unwrap().unwrap();
    expected[..usize::try_from(BLOCK).unwrap()].fill(0);
    assert!(bytes == expected);
    daemon.wait_restored(4);
    rig.fill(at, len, 1);
    write(&rig, at + 2 * BLOCK + 77, &[0x5a]);
    write(&rig, at + len - 1, &[0x5b]);
    assert_eq!(daemon.reclaim(u64::MAX).copied, BLOCK);
    assert_eq!(
        counted(&rig),
        (len + 2 * BLOCK + 3 * G, 4 * len - 3 * BLOCK - 3 * G, BLOCK)
    );
    rig.engine.free(at).unwrap();
    assert_eq!(sums(&rig), (0, 0));
    rig.assert_gone_after_detach();
}

/// What the daemon was told last that would leave without a copy.
fn told(daemon: &Daemon) -> u64 {
    let mut last = 0;
    daemon.each(|message| {
        if let ToDaemon::Clean { bytes, .. } = message {
            last = bytes.get();
        }
    });
    last
}

#[test]
fn what_was_only_read_is_believed_clean_and_goes_first() {
    let daemon = Daemon::start(Script::default());
    let rig = rig(&daemon, u64::MAX);
    let (read, written) = (4 * BLOCK, 8 * BLOCK);
    let weights = rig.alloc(read);
    let state = rig.alloc(written);
    rig.fill(weights, read, 1);
    rig.fill(state, written, 2);
    assert_eq!(told(&daemon), 0, "nothing was away yet");
    for round in 1..=3 {
        let all = daemon.reclaim(u64::MAX);
        assert!(done(all));
        assert!(rig.holds(weights, read, 1));
        daemon.wait_restored(round);
        rig.fill(state, written, 2 + u8::try_from(round).unwrap());
        // Of what was back only once nothing is known, and what changed is not believed again.
        let expected = if round == 1 { 0 } else { read };
        rig.until("what is clean is told", |_| told(&daemon) == expected);
        assert_eq!(all.copied, if round == 1 { read + written } else { written });
    }
    // Asked for as much: that goes, without a copy, and is not told of any more.
    let some = daemon.reclaim(read);
    assert!(done(some));
    assert_eq!((some.copied, told(&daemon)), (0, 0));
    assert!(rig.holds(weights, read, 1) && rig.holds(state, written, 5));
    daemon.wait_restored(4);
    rig.until("it is believed again", |_| told(&daemon) == read);
    rig.engine.free(weights).unwrap();
    rig.until("what is gone is not", |_| told(&daemon) == 0);
    rig.engine.free(state).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn what_is_back_and_was_not_touched_is_clean_for_certain() {
    let daemon = Daemon::start(Script::default());
    let rig = rig(&daemon, u64::MAX);
    let at = rig.alloc(6 * BLOCK);
    rig.fill(at, 6 * BLOCK, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    daemon.send(ToLayer::BringBack { device: 0 });
    daemon.wait_restored(1);
    rig.until("all of it is told", |_| told(&daemon) == 6 * BLOCK);
    assert!(rig.holds(at, 6 * BLOCK, 1));
    rig.until("a touch ends that", |_| told(&daemon) == 0);
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

/// The GPU is asked about one slice after the other: what it has told of goes without a copy, though it does not tell of the rest.
#[test]
fn what_was_told_leaves_while_the_rest_is_asked_about() {
    for (told, error) in [(0, ERROR), (1, ERROR), (3, DeviceError::OutOfMemory), (4, ERROR)] {
        let daemon = Daemon::start(Script::default());
        let rig = rig_of(&daemon, u64::MAX, 2 * BLOCK);
        // Chunks of four blocks: a slice each.
        let len = 16 * BLOCK;
        let at = rig.alloc(len);
        rig.fill(at, len, 1);
        assert_eq!(daemon.reclaim(u64::MAX).copied, len);
        assert!(rig.holds(at, len, 1));
        daemon.wait_restored(1);
        rig.fake.fail_nth(Call::Fingerprint, told + 1, error);
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end), "{end:?}");
        assert_eq!(end.copied, len - told * 4 * BLOCK);
        assert!(rig.holds(at, len, 1));
        daemon.wait_restored(2);
        rig.fake.heal();
        rig.engine.free(at).unwrap();
        rig.assert_gone_after_detach();
    }
}

/// An order that is taken back, or a chunk that cannot leave, while the GPU is asked: everything stays good, and nobody asks on.
#[test]
fn an_eviction_that_ends_while_the_gpu_is_asked_leaves_nothing_behind() {
    let daemon = Daemon::start(Script::default());
    let rig = rig_of(&daemon, u64::MAX, 2 * BLOCK);
    let len = 32 * BLOCK;
    let at = rig.alloc(len);
    rig.fill(at, len, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(at, len, 1));
    daemon.wait_restored(1);
    // However many leave by one call: what fails together is tried by itself, and fails again.
    rig.fake.fail_always(Call::Unmap, ERROR);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(end.outcome, outcome::FAILED, "{end:?}");
    rig.fake.heal();
    let looked = rig.fake.calls(Call::Fingerprint);
    assert!(rig.holds(at, len, 1));
    assert_eq!(
        rig.fake.calls(Call::Fingerprint),
        looked,
        "nobody asks while the program runs"
    );
    rig.assert_clean();
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(at, len, 1));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn zeros_take_no_host_memory_and_need_none() {
    let daemon = Daemon::start(Script {
        arena: 0,
        ..Script::default()
    });
    let rig = Rig::with(
        Some(&daemon),
        ebb_device::fake::Card::new(1 << 30),
        1 << 30,
        G,
        |config| config.arena_wait = std::time::Duration::from_millis(10),
    );
    let (zero, other) = (rig.alloc(32 * G), rig.alloc(16 * G));
    write(&rig, zero, &vec![0; usize::try_from(32 * G).unwrap()]);
    rig.fill(other, 16 * G, 2);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!(
        (end.outcome, end.freed, end.copied),
        (outcome::NO_ROOM, 32 * G, 0)
    );
    assert_eq!(rig.card.used(), 16 * G);
    let mut bytes = vec![1; usize::try_from(32 * G).unwrap()];
    rig.touch(|fake| fake.read(zero, &mut bytes)).unwrap().unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    assert!(rig.holds(other, 16 * G, 2));
    daemon.wait_restored(1);
    // Nothing can be told: then it needs room like everything else, and the program is not even stopped.
    rig.fake.fail_always(Call::Fingerprint, ERROR);
    assert_eq!(daemon.reclaim(u64::MAX).outcome, outcome::NO_ROOM);
    rig.fake.heal();
    rig.fake.block(Call::Quiesce);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.outcome, end.freed), (outcome::NO_ROOM, 0));
    rig.fake.heal();
    rig.assert_gone_after_detach();
}

#[test]
fn a_recall_takes_what_is_kept_at_once() {
    let daemon = Daemon::start(Script::default());
    let rig = rig(&daemon, u64::MAX);
    let at = rig.alloc(40 * G);
    rig.fill(at, 40 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(at, 40 * G, 1));
    daemon.wait_restored(1);
    let given = daemon.arena_given();
    assert_eq!((sums(&rig), given % (16 * G)), ((0, 40 * G), 0));
    daemon.send(ToLayer::ArenaRecall { bytes: Bytes(16 * G) });
    daemon.wait_arena(given - 16 * G);
    daemon.send(ToLayer::ArenaRecall { bytes: Bytes(given) });
    daemon.wait_arena(0);
    assert_eq!(sums(&rig), (0, 0));
    assert!(rig.holds(at, 40 * G, 1));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

/// What is back on the card holds host memory only as long as nobody else wants it, and none at all if so configured.
#[test]
fn bug_104_no_host_copy_of_what_is_back_holds_memory_that_another_needs() {
    for keep in [0, u64::MAX] {
        let daemon = Daemon::start(Script::default());
        let rig = rig(&daemon, keep);
        let at = rig.alloc(64 * G);
        rig.fill(at, 64 * G, 1);
        assert!(done(daemon.reclaim(u64::MAX)));
        assert!(rig.holds(at, 64 * G, 1));
        daemon.wait_restored(1);
        assert_eq!(
            sums(&rig),
            (0, if keep == 0 { 0 } else { 64 * G }),
            "used, and kept"
        );
        // Somebody else needs it: all of it goes back, at once and without the program.
        let given = daemon.arena_given();
        daemon.send(ToLayer::ArenaRecall { bytes: Bytes(given) });
        daemon.wait_arena(0);
        assert_eq!(
            (sums(&rig), rig.host.segments(), rig.fake.registered()),
            ((0, 0), 0, 0)
        );
        assert!(rig.holds(at, 64 * G, 1));
        rig.engine.free(at).unwrap();
        rig.assert_gone_after_detach();
    }
}

#[test]
fn kept_copies_give_way_to_what_leaves() {
    // Room for one of two.
    let daemon = Daemon::start(Script {
        arena: 32 * G,
        ..Script::default()
    });
    let rig = rig(&daemon, u64::MAX);
    let (a, b) = (rig.alloc(32 * G), rig.alloc(24 * G));
    rig.fill(a, 32 * G, 1);
    rig.fill(b, 24 * G, 2);
    rig.until("arena", |rig| rig.engine.core.arena.sums().total == 32 * G);
    let end = daemon.reclaim(32 * G);
    assert!(done(end) && end.copied == 32 * G, "{end:?}");
    assert!(rig.holds(a, 32 * G, 1));
    daemon.wait_restored(1);
    assert_eq!(sums(&rig), (0, 32 * G));
    // Pinned, it must not go: the other one has to, and its room is taken by what is kept.
    let pin = rig.engine.pin(a, Bytes(32 * G), crate::PinReason::Registered);
    let end = daemon.reclaim(24 * G);
    assert!(done(end) && end.copied == 24 * G, "{end:?}");
    assert_eq!(sums(&rig).0, 24 * G);
    assert!(rig.holds(b, 24 * G, 2) && rig.holds(a, 32 * G, 1));
    rig.engine.unpin(pin.unwrap());
    for at in [a, b] {
        rig.engine.free(at).unwrap();
    }
    rig.assert_gone_after_detach();
}

#[test]
fn what_is_kept_is_bounded() {
    for keep in [0, 20 * G] {
        let daemon = Daemon::start(Script::default());
        let rig = Rig::with(
            Some(&daemon),
            ebb_device::fake::Card::new(1 << 30),
            1 << 30,
            G,
            |config| config.keep_max = Bytes(keep),
        );
        let at = rig.alloc(64 * G);
        rig.fill(at, 64 * G, 1);
        for round in 1..3 {
            let end = daemon.reclaim(u64::MAX);
            assert!(done(end), "{end:?}");
            let kept = if keep == 0 { 0 } else { 16 * G };
            assert_eq!(end.copied, if round == 1 { 64 * G } else { 64 * G - kept });
            assert!(rig.holds(at, 64 * G, 1));
            daemon.wait_restored(round);
            assert_eq!(sums(&rig), (0, kept));
        }
        rig.engine.free(at).unwrap();
        rig.assert_gone_after_detach();
    }
}

/// The k-th call fails, of an eviction or a restore of memory of which a part is unchanged, a part changed, and a part zero.
#[test]
fn any_failing_call_in_between_loses_nothing() {
    let len = 2 * BLOCK + 4 * G;
    let cases = [
        (false, ERROR, 1 << 30),
        (true, ERROR, 1 << 30),
        (false, DeviceError::OutOfMemory, 1 << 30),
        (false, ERROR, BLOCK),
    ];
    for (restore, error, slice) in cases {
        for k in 1.. {
            let what = format!("call {k}, restore {restore}, {error}, slices of {slice}");
            let daemon = Daemon::start(Script::default());
            let rig = rig_of(&daemon, u64::MAX, slice);
            let at = [rig.alloc(len), rig.alloc(len), rig.alloc(len)];
            for (seed, at) in at.iter().enumerate() {
                rig.fill(*at, len, u8::try_from(seed).unwrap());
            }
            assert!(done(daemon.reclaim(u64::MAX)));
            assert!(rig.holds(at[0], len, 0));
            daemon.wait_restored(1);
            let mut changed = pattern(len, 1);
            changed[5] ^= 1;
            write(&rig, at[1], &changed);
            write(&rig, at[2], &vec![0; changed.len()]);
            let whole = |rig: &Rig| {
                let mut bytes = vec![0; changed.len()];
                assert!(rig.holds(at[0], len, 0), "{what}");
                rig.touch(|fake| fake.read(at[1], &mut bytes)).unwrap().unwrap();
                assert!(bytes == changed, "{what}");
                rig.touch(|fake| fake.read(at[2], &mut bytes)).unwrap().unwrap();
                assert!(bytes.iter().all(|byte| *byte == 0), "{what}");
            };
            if restore {
                assert!(done(daemon.reclaim(u64::MAX)));
            }
            rig.fake.fail_kth(k, error);
            if restore {
                rig.touch(|_| ()).unwrap();
            } else {
                daemon.reclaim(u64::MAX);
            }
            let reached = !rig.fake.fault_pending();
            rig.fake.heal();
            whole(&rig);
            let end = daemon.reclaim(u64::MAX);
            assert!(done(end), "{what}: a later eviction: {end:?}");
            assert_eq!((rig.card.used(), daemon.lease()), (0, 0), "{what}");
            whole(&rig);
            for at in at {
                rig.engine.free(at).unwrap();
            }
            assert_eq!(sums(&rig), (0, 0), "{what}");
            rig.assert_gone_after_detach();
            if !reached {
                assert!(k > 8, "{what}: there are more calls than that");
                break;
            }
        }
    }
}

/// The context dies at the k-th call: everything ends, nothing hangs or panics.
#[test]
fn a_context_that_dies_at_any_call_ends_it() {
    for k in 1..24 {
        let daemon = Daemon::start(Script::default());
        let rig = rig(&daemon, u64::MAX);
        let len = 2 * BLOCK;
        let at = rig.alloc(len);
        rig.fill(at, len, 1);
        assert!(done(daemon.reclaim(u64::MAX)));
        assert!(rig.holds(at, len, 1));
        daemon.wait_restored(1);
        rig.fake.fail_kth(k, DeviceError::Gone);
        daemon.reclaim(u64::MAX);
        let _ = rig.touch(|_| ());
        let begun = std::time::Instant::now();
        rig.engine.detach_device(rig.device);
        assert!(begun.elapsed() < LONG);
    }
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(u64),
    Free(prop::sample::Index),
    /// Where in which, how long, and with what; zeros if there is no seed.
    Write(prop::sample::Index, prop::sample::Index, u64, Option<u8>),
    Look(prop::sample::Index),
    Evict(u64),
    Recall(u64),
    Forget(bool),
    Fail(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        3 => prop_oneof![(1..20u64).prop_map(|n| n * G), (1..3u64).prop_map(|n| n * BLOCK + 5)].prop_map(Op::Alloc),
        1 => index().prop_map(Op::Free),
        6 => (index(), index(), 1..3 * G, prop::option::of(1..9u8)).prop_map(|(a, b, len, seed)| Op::Write(a, b, len, seed)),
        2 => index().prop_map(Op::Look),
        6 => prop_oneof![(1..64u64).prop_map(|n| n * G), Just(u64::MAX)].prop_map(Op::Evict),
        1 => (1..40u64).prop_map(|n| Op::Recall(n * G)),
        1 => any::<bool>().prop_map(Op::Forget),
        1 => (1..30u64).prop_map(Op::Fail),
    ]
}

fn run(ops: Vec<Op>, arena: u64, slice: u64) {
    let daemon = Daemon::start(Script {
        arena,
        ..Script::default()
    });
    let card = ebb_device::fake::Card::new(1 << 30);
    let rig = Rig::with(Some(&daemon), card, 1 << 30, G, |config| {
        config.chunk_max = Bytes(2 * BLOCK);
        config.survey_slice = Bytes(slice);
        config.arena_wait = std::time::Duration::from_millis(5);
    });
    // What a program knows: its bytes.
    let mut live: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let look = |rig: &Rig, at: u64, expected: &[u8]| {
        let mut bytes = vec![0; expected.len()];
        rig.touch(|fake| fake.read(at, &mut bytes)).unwrap().unwrap();
        assert!(bytes == expected, "{} bytes are not as written", expected.len());
    };
    for op in ops {
        match op {
            Op::Alloc(size) if live.len() < 6 => {
                if let Ok(at) = rig.engine.alloc(rig.device, size, 1) {
                    let zeros = vec![0; usize::try_from(size).unwrap()];
                    write(&rig, at, &zeros);
                    live.insert(at, zeros);
                }
            }
            Op::Free(which) if !live.is_empty() => {
                let at = *live.keys().nth(which.index(live.len())).unwrap();
                live.remove(&at);
                rig.engine.free(at).unwrap();
            }
            Op::Write(which, place, len, seed) if !live.is_empty() => {
                let number = which.index(live.len());
                let (at, bytes) = live.iter_mut().nth(number).unwrap();
                let from = place.index(bytes.len());
                let to = bytes.len().min(from + usize::try_from(len).unwrap());
                match seed {
                    Some(seed) => bytes[from..to].copy_from_slice(&pattern((to - from) as u64, seed)),
                    None => bytes[from..to].fill(0),
                }
                write(&rig, at + from as u64, &bytes[from..to]);
            }
            Op::Look(which) if !live.is_empty() => {
                let (at, bytes) = live.iter().nth(which.index(live.len())).unwrap();
                look(&rig, *at, bytes);
            }
            Op::Evict(bytes) => {
                let end = daemon.reclaim(bytes);
                let expected = [
                    outcome::DONE,
                    outcome::FAILED,
                    outcome::NOTHING_LEFT,
                    outcome::NO_ROOM,
                ];
                assert!(expected.contains(&end.outcome), "{end:?}");
            }
            Op::Recall(bytes) => daemon.send(ToLayer::ArenaRecall { bytes: Bytes(bytes) }),
            Op::Forget(forget) => rig.fake.forget_fingerprints(forget),
            Op::Fail(k) => rig.fake.fail_kth(k, ERROR),
            _ => {}
        }
        rig.until("rest", |rig| {
            rig.state(|state| state.current.is_none() && state.orders.is_empty())
        });
        let zero = rig.state(|state| state.pool.books.evicted);
        assert!(sums(&rig).0 <= zero, "host memory is used for what is away alone");
    }
    rig.fake.heal();
    for (at, bytes) in live {
        look(&rig, at, &bytes);
        rig.engine.free(at).unwrap();
    }
    rig.until("no copy of what is freed", |rig| sums(rig) == (0, 0));
    rig.assert_gone_after_detach();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_written_between_evictions_comes_back(ops in prop::collection::vec(op(), 1..40), tight in any::<bool>(), slice in prop_oneof![Just(G), Just(4 * BLOCK)]) {
        run(ops, if tight { 48 * G } else { 1 << 30 }, slice);
    }
}
