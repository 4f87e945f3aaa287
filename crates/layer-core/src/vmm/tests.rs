//! The program's own memory over the fake device: evicted and restored, under faults, and against a tiny model.

use std::collections::BTreeMap;

use ebb_device::fake::Call;
use ebb_device::{DeviceError, DeviceMemory, Grant, Handle, Location, Props};
use ebb_protocol::wire::outcome;
use ebb_units::Bytes;

use super::is_ours;
use crate::testing::{Daemon, G, Rig, Script, done, pattern};
use crate::{AllocError, PinReason};

const ERROR: DeviceError = DeviceError::Driver {
    code: 999,
    call: "ordered by the test",
};
const OWN: Grant = Grant {
    location: Location { kind: 1, id: 0 },
    flags: Grant::READ_WRITE,
};
const PEER: Grant = Grant {
    location: Location { kind: 1, id: 1 },
    flags: Grant::READ_WRITE,
};
const READ_ONLY: Grant = Grant {
    location: Location { kind: 1, id: 0 },
    flags: 1,
};
const PROPS: Props = Props([1, 2, 3, 4]);

/// The calls as the hooks make them.
impl Rig {
    fn make(&self, len: u64) -> u64 {
        let handle = self.engine.vmm_create(self.device, len, PROPS).unwrap();
        assert!(is_ours(handle));
        handle
    }

    fn addresses(&self, len: u64) -> u64 {
        self.fake.reserve(len, G).unwrap()
    }

    fn try_map(&self, handle: u64, at: u64, size: u64) -> Result<(), DeviceError> {
        self.engine.gate().enter().unwrap();
        let used = self.engine.vmm_begin_use(handle).expect("a live handle");
        let result = self.fake.map_as(at, size, Handle(used.real));
        if result.is_ok() {
            self.engine.vmm_mapped(&used, at, size);
        }
        self.engine.vmm_end_use(&used, None);
        self.engine.gate().leave();
        result
    }

    fn map(&self, handle: u64, at: u64, size: u64) {
        self.try_map(handle, at, size).unwrap();
    }

    fn allow(&self, at: u64, size: u64, grants: &[Grant]) {
        self.touch(|fake| fake.grant(at, size, grants)).unwrap().unwrap();
        self.engine.gate().enter().unwrap();
        self.engine.vmm_granted(at, size, grants);
        self.engine.gate().leave();
    }

    fn unmap(&self, at: u64, size: u64) {
        if self.engine.vmm_unmap_away(at, size) {
            return;
        }
        self.engine.gate().enter().unwrap();
        let taken = self.engine.vmm_take(at, size);
        self.fake.unmap_as(at, size).unwrap();
        self.engine.vmm_unmapped(taken);
        self.engine.gate().leave();
    }

    fn release(&self, handle: u64) {
        assert!(self.engine.vmm_release(handle));
    }
}

/// One handle of each kind that matters, with what has to hold of it afterwards.
struct Held {
    at: u64,
    all: Vec<(u64, u64, u8)>,
    handles: Vec<u64>,
    twice: u64,
    unmapped: u64,
}

impl Held {
    /// In one reservation: mapped whole; mapped twice, for a peer too; only its first part mapped; readable only. And
    /// one that is not mapped.
    fn new(rig: &Rig) -> Self {
        let at = rig.addresses(64 * G);
        let whole = rig.make(4 * G);
        rig.map(whole, at, 4 * G);
        let twice = rig.make(2 * G);
        rig.map(twice, at + 4 * G, 2 * G);
        rig.map(twice, at + 10 * G, 2 * G);
        let part = rig.make(6 * G);
        rig.map(part, at + 20 * G, 3 * G);
        let read = rig.make(2 * G);
        rig.map(read, at + 30 * G, 2 * G);
        rig.allow(at, 6 * G, &[OWN, PEER]);
        rig.allow(at + 10 * G, 2 * G, &[OWN]);
        rig.allow(at + 20 * G, 3 * G, &[OWN]);
        rig.allow(at + 30 * G, 2 * G, &[OWN]);
        let all = vec![(at, 6 * G, 1), (at + 20 * G, 3 * G, 2), (at + 30 * G, 2 * G, 3)];
        for (at, size, seed) in &all {
            rig.fill(*at, *size, *seed);
        }
        rig.allow(at + 30 * G, 2 * G, &[READ_ONLY]);
        let unmapped = rig.make(5 * G);
        Self {
            at,
            all,
            handles: vec![whole, twice, part, read, unmapped],
            twice: at + 10 * G,
            unmapped: 5 * G,
        }
    }

    fn assert_whole(&self, rig: &Rig, what: &str) {
        let (at, _) = (self.at, rig.touch(|_| ()).unwrap());
        let grants = |at| {
            let (size, props, grants) = rig.fake.mapping(at).unwrap();
            let grants: Vec<_> = grants.into_iter().map(|(l, flags)| (l.id, flags)).collect();
            (size / G, props, grants)
        };
        assert_eq!(grants(at), (4, PROPS, vec![(0, 3), (1, 3)]), "{what}");
        assert_eq!(grants(at + 4 * G), (2, PROPS, vec![(0, 3), (1, 3)]), "{what}");
        assert_eq!(grants(at + 10 * G), (2, PROPS, vec![(0, 3)]), "{what}");
        assert_eq!(grants(at + 20 * G), (3, PROPS, vec![(0, 3)]), "{what}");
        assert_eq!(grants(at + 30 * G), (2, PROPS, vec![(0, 1)]), "{what}");
        rig.allow(at + 30 * G, 2 * G, &[OWN]);
        for (at, size, seed) in &self.all {
            assert!(rig.holds(*at, *size, *seed), "{what}: {size} bytes are lost");
        }
        rig.allow(at + 30 * G, 2 * G, &[READ_ONLY]);
        let mut bytes = vec![0; usize::try_from(2 * G).unwrap()];
        rig.touch(|fake| fake.read(self.twice, &mut bytes))
            .unwrap()
            .unwrap();
        let want = &pattern(6 * G, 1)[usize::try_from(4 * G).unwrap()..];
        assert_eq!(bytes, want, "{what}: both mappings are of one memory");
    }

    fn free(self, rig: &Rig) {
        for handle in self.handles {
            rig.release(handle);
        }
        for (at, size) in [(0, 6), (10, 2), (20, 3), (30, 2)] {
            rig.unmap(self.at + at * G, size * G);
        }
        rig.fake.free_reservation(self.at, 64 * G).unwrap();
    }
}

fn ready(daemon: &Daemon) -> (Rig, Held) {
    let rig = Rig::new(Some(daemon), 512 * G);
    let held = Held::new(&rig);
    rig.until("arena", |rig| {
        let sums = rig.engine.core.arena.sums();
        sums.total >= rig.books().allocated && sums.arriving == 0
    });
    (rig, held)
}

/// fzyzcjy/torch_memory_saver#24: what a program maps by itself used to be out of reach of a release.
#[test]
fn bug_077_memory_that_the_program_maps_itself_leaves_and_comes_back() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    assert_eq!(rig.card.used(), 19 * G);
    assert_eq!((rig.books().used, rig.books().allocated), (19 * G, 19 * G));
    for round in 1..4 {
        let end = daemon.reclaim(u64::MAX);
        assert!(done(end), "{end:?}");
        assert_eq!((end.freed, rig.card.used(), daemon.lease()), (19 * G, 0, 0));
        // What nobody could write is not copied, nor what is unchanged, if it can be read where it lies: 8 granules have
        // no mapping over all of them.
        let written = 19 * G - held.unmapped;
        assert_eq!(end.copied, if round == 1 { written } else { 8 * G });
        held.assert_whole(&rig, &format!("round {round}"));
        daemon.wait_restored(round);
        assert_eq!(rig.card.used(), 19 * G);
    }
    held.free(&rig);
    assert_eq!((rig.books().used, rig.books().allocated), (0, 0));
    rig.assert_gone_after_detach();
}

/// Every call of an eviction, and of a restore, fails once.
#[test]
fn no_failing_call_loses_a_byte_a_mapping_or_a_right() {
    for restore in [false, true] {
        for k in 1.. {
            let what = format!("call {k}, restore {restore}");
            let daemon = Daemon::start(Script::default());
            let (rig, held) = ready(&daemon);
            if restore {
                assert!(done(daemon.reclaim(u64::MAX)));
            }
            rig.fake.fail_kth(
                k,
                if k % 2 == 0 {
                    ERROR
                } else {
                    DeviceError::OutOfMemory
                },
            );
            if restore {
                rig.touch(|_| ()).unwrap();
            } else {
                daemon.reclaim(u64::MAX);
            }
            let reached = !rig.fake.fault_pending();
            rig.fake.heal();
            held.assert_whole(&rig, &what);
            let end = daemon.reclaim(u64::MAX);
            assert!(done(end), "{what}: a later eviction: {end:?}");
            assert_eq!((rig.card.used(), daemon.lease()), (0, 0), "{what}");
            held.assert_whole(&rig, &what);
            held.free(&rig);
            rig.assert_gone_after_detach();
            if !reached {
                assert!(k > 30, "{what}: there are more calls than that");
                break;
            }
        }
    }
}

/// A call that fails for a while, whichever it is.
#[test]
fn a_call_that_always_fails_heals() {
    for call in [
        Call::CreateAs,
        Call::MapAs,
        Call::UnmapAs,
        Call::GrantAs,
        Call::Reserve,
        Call::FreeReservation,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::Release,
    ] {
        let daemon = Daemon::start(Script::default());
        let (rig, held) = ready(&daemon);
        rig.fake.fail_always(call, ERROR);
        let end = daemon.reclaim(u64::MAX);
        assert!(
            [outcome::FAILED, outcome::DONE, outcome::NOTHING_LEFT].contains(&end.outcome),
            "{call:?}: {end:?}"
        );
        rig.fake.heal();
        held.assert_whole(&rig, call.name());
        assert!(done(daemon.reclaim(u64::MAX)), "{call:?}");
        assert_eq!(rig.card.used(), 0, "{call:?}");
        held.assert_whole(&rig, call.name());
        held.free(&rig);
        rig.assert_gone_after_detach();
    }
}

#[test]
fn memory_lives_until_the_last_reference_and_the_last_mapping() {
    let rig = Rig::new(None, 64 * G);
    let at = rig.addresses(16 * G);
    let handle = rig.make(2 * G);
    rig.map(handle, at, 2 * G);
    rig.map(handle, at + 8 * G, G);
    assert_eq!(rig.engine.vmm_retain(at + G + 5), Some(handle));
    rig.release(handle);
    rig.release(handle);
    assert!(!rig.engine.vmm_release(handle), "no third reference");
    assert!(rig.engine.vmm_begin_use(handle).is_none());
    rig.unmap(at, 2 * G);
    assert_eq!(rig.books().used, 2 * G);
    assert_eq!(
        rig.engine.vmm_retain(at + 8 * G),
        Some(handle),
        "a mapping gives it out again"
    );
    rig.unmap(at + 8 * G, G);
    assert_eq!(rig.card.used(), 2 * G);
    rig.release(handle);
    assert_eq!(
        (rig.card.used(), rig.books().used, rig.books().allocated),
        (0, 0, 0)
    );
    assert_eq!(rig.engine.vmm_retain(at), None);
    rig.fake.free_reservation(at, 16 * G).unwrap();
    rig.assert_gone_after_detach();
}

/// A trim while everything is away: nothing is brought back to be thrown away.
#[test]
fn what_is_away_is_unmapped_and_released_where_it_is() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    let kept = rig.alloc(17 * G);
    rig.fill(kept, 17 * G, 9);
    assert!(done(daemon.reclaim(u64::MAX)));
    held.free(&rig);
    assert_eq!(
        (daemon.restored(), rig.card.used(), rig.books().allocated),
        (0, 0, 17 * G)
    );
    assert!(rig.holds(kept, 17 * G, 9));
    daemon.wait_restored(1);
    assert_eq!(rig.card.used(), 17 * G);
    rig.engine.free(kept).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn the_gate_opens_when_all_that_was_away_is_freed() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    assert!(done(daemon.reclaim(u64::MAX)));
    held.free(&rig);
    rig.until("the gate to open", |rig| rig.state(|state| !state.closed));
    rig.assert_gone_after_detach();
}

#[test]
fn the_limit_holds_to_the_granule_and_refusals_are_the_drivers() {
    let daemon = Daemon::start(Script {
        limit: 40 * G,
        ..Script::default()
    });
    let rig = Rig::new(Some(&daemon), 64 * G);
    let first = rig.make(23 * G);
    let second = rig.make(17 * G);
    let refused = rig.engine.vmm_create(rig.device, G, PROPS);
    assert!(
        matches!(refused, Err(AllocError::OverLimit { .. })),
        "{refused:?}"
    );
    assert!(matches!(
        rig.engine.vmm_create(rig.device, G + 1, PROPS),
        Err(AllocError::Size(_))
    ));
    rig.release(second);
    let ptr = rig.alloc(17 * G);
    rig.engine.free(ptr).unwrap();
    // The pool keeps it, and gives it up for this.
    let again = rig.make(17 * G);
    rig.fake.fail_nth(Call::CreateAs, 1, ERROR);
    rig.release(again);
    assert_eq!(
        rig.engine.vmm_create(rig.device, G, PROPS),
        Err(AllocError::Device(ERROR))
    );
    rig.release(first);
    assert_eq!((rig.books().used, rig.books().allocated), (0, 0));
    rig.assert_gone_after_detach();
}

/// pytorch/pytorch#35901: half of the memory could not be used since a big free block was cut up. With memory that is
/// mapped where it is needed, pieces of any place make a large whole.
#[test]
fn bug_112_scattered_free_memory_serves_a_large_request() {
    let rig = Rig::new(None, 512 * G);
    let all: Vec<u64> = (0..32).map(|_| rig.alloc(16 * G)).collect();
    let handles: Vec<u64> = all
        .iter()
        .step_by(2)
        .map(|ptr| {
            rig.engine.free(*ptr).unwrap();
            rig.make(16 * G)
        })
        .collect();
    assert_eq!(rig.card.used(), 512 * G);
    let at = rig.addresses(256 * G);
    for (handle, place) in handles
        .iter()
        .zip((at..).step_by(usize::try_from(16 * G).unwrap()))
    {
        rig.map(*handle, place, 16 * G);
        rig.release(*handle);
    }
    rig.allow(at, 256 * G, &[OWN]);
    rig.fill(at, 256 * G, 5);
    assert!(rig.holds(at, 256 * G, 5));
    rig.unmap(at, 256 * G);
    let large = rig.alloc(256 * G);
    rig.engine.free(large).unwrap();
    for ptr in all.iter().skip(1).step_by(2) {
        rig.engine.free(*ptr).unwrap();
    }
    rig.fake.free_reservation(at, 256 * G).unwrap();
    rig.assert_gone_after_detach();
}

/// NVIDIA/cuda-python#2345: after a reservation that failed, an address was freed that had never been granted, and the first
/// error was lost.
#[test]
fn bug_115_a_failed_reservation_frees_nothing_and_its_error_is_kept() {
    let rig = Rig::new(None, 64 * G);
    let kept = rig.alloc(16 * G);
    rig.fill(kept, 16 * G, 1);
    rig.fake.fail_always(Call::Reserve, DeviceError::OutOfMemory);
    rig.fake.fail_nth(Call::Reserve, 1, ERROR);
    let tries = rig.fake.calls(Call::Reserve);
    assert_eq!(
        rig.engine.alloc(rig.device, 128 * G, 1),
        Err(AllocError::Device(ERROR))
    );
    assert!(rig.fake.calls(Call::Reserve) > tries);
    assert_eq!(rig.fake.calls(Call::FreeReservation), 0);
    assert!(rig.holds(kept, 16 * G, 1));
    rig.fake.heal();
    rig.engine.free(kept).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn what_somebody_else_may_hold_stays_and_is_named() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    rig.engine.gate().enter().unwrap();
    let used = rig.engine.vmm_begin_use(held.handles[0]).unwrap();
    rig.engine.vmm_end_use(&used, Some(PinReason::Exported));
    let pins = |at, size| rig.engine.vmm_pin_range(at, size, PinReason::DmaBuf);
    let dma_buf = pins(held.at + 20 * G, 1);
    assert_eq!((dma_buf.len(), pins(held.at + 50 * G, G).len()), (1, 0));
    rig.engine.gate().leave();
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.outcome, end.freed), (outcome::NOTHING_LEFT, 9 * G));
    assert_eq!(rig.card.used(), 10 * G);
    let report = rig.engine.report_json();
    for part in [
        format!(r#"{{"reason":"exported handle","bytes":{}}}"#, 4 * G),
        format!(r#"{{"reason":"dma-buf","bytes":{}}}"#, 6 * G),
        r#""releasable":0"#.to_owned(),
    ] {
        assert!(report.contains(&part), "{part} in {report}");
    }
    held.assert_whole(&rig, "partly pinned");
    rig.engine.unpin(dma_buf[0]);
    assert_eq!(daemon.reclaim(u64::MAX).freed, 15 * G, "the last holder has gone");
    held.assert_whole(&rig, "less pinned");
    held.free(&rig);
    rig.assert_gone_after_detach();
}

#[test]
fn access_to_a_part_of_a_mapping_pins_what_it_cannot_put_back() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    rig.engine.vmm_granted(held.at + G, G, &[OWN]);
    assert_eq!(daemon.reclaim(u64::MAX).freed, 15 * G);
    held.assert_whole(&rig, "one is pinned");
    held.free(&rig);
    rig.assert_gone_after_detach();
}

/// On machines where the processor reaches the card's memory it does so past every gate.
#[test]
fn what_the_processor_may_use_stays() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    let processor = |flags| Grant {
        location: Location { kind: 2, id: 0 },
        flags,
    };
    rig.allow(held.at + 4 * G, 2 * G, &[processor(0)]);
    assert_eq!(daemon.reclaim(u64::MAX).freed, 19 * G, "nothing was given");
    rig.allow(held.at + 20 * G, 3 * G, &[processor(1)]);
    assert_eq!(daemon.reclaim(u64::MAX).freed, 13 * G);
    let report = rig.engine.report_json();
    assert!(report.contains("used by the processor"), "{report}");
    rig.touch(|_| ()).unwrap();
    held.free(&rig);
    rig.assert_gone_after_detach();
}

/// Copies need a context; what was written stays where it is as long as there is none, and what was not may go.
#[test]
fn without_a_context_nothing_is_copied_and_nothing_is_lost() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    rig.fake.without_context(true);
    let end = daemon.reclaim(u64::MAX);
    assert_eq!((end.freed, end.copied), (5 * G, 0));
    rig.fake.without_context(false);
    held.assert_whole(&rig, "without a context");
    held.free(&rig);
    rig.assert_gone_after_detach();
}

#[test]
fn memory_outlives_the_contexts_and_is_counted_again() {
    let daemon = Daemon::start(Script::default());
    let (rig, held) = ready(&daemon);
    assert!(done(daemon.reclaim(u64::MAX)));
    rig.engine.detach_device(rig.device);
    assert_eq!(rig.card.used(), 19 * G, "it came back before its context went");
    let memory: std::sync::Arc<dyn DeviceMemory> = rig.fake.clone();
    let again = rig
        .engine
        .attach_device(crate::testing::uuid(), memory, Bytes(512 * G), Bytes::ZERO)
        .unwrap();
    assert_eq!(again, rig.device);
    assert_eq!((rig.books().used, rig.books().allocated), (19 * G, 19 * G));
    held.assert_whole(&rig, "attached again");
    assert!(done(daemon.reclaim(u64::MAX)));
    held.assert_whole(&rig, "and moved again");
    held.free(&rig);
    rig.assert_gone_after_detach();
}

/// The table and a model that is written down plainly go through the same random calls, and agree after each.
#[test]
fn random_calls_agree_with_a_tiny_model() {
    struct Model {
        /// Handle: size, references, contents; gone with the last of both.
        memory: BTreeMap<u64, (u64, u32, u8)>,
        /// Address: size and handle.
        maps: BTreeMap<u64, (u64, u64)>,
    }
    let seed = std::env::var("EBB_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("EBB_SEED={seed}");
    let mut random = seed;
    let mut next = move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) % below
    };
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 512 * G);
    const PLACES: u64 = 12;
    let base = rig.addresses(PLACES * 4 * G);
    let mut model = Model {
        memory: BTreeMap::new(),
        maps: BTreeMap::new(),
    };
    for step in 0..3000u32 {
        let pick = next(100);
        let handles: Vec<u64> = model.memory.keys().copied().collect();
        let chosen =
            (!handles.is_empty()).then(|| handles[usize::try_from(next(handles.len() as u64)).unwrap()]);
        let place = base + next(PLACES) * 4 * G;
        match (pick, chosen) {
            (0..15, _) if model.memory.len() < 10 => {
                let len = (1 + next(4)) * G;
                model.memory.insert(rig.make(len), (len, 1, 0));
            }
            (15..45, Some(handle)) if !model.maps.contains_key(&place) => {
                let (len, references, seed) = model.memory[&handle];
                if references == 0 {
                    continue;
                }
                let size = if next(3) == 0 { G } else { len };
                rig.map(handle, place, size);
                rig.allow(place, size, if next(2) == 0 { &[OWN, PEER] } else { &[OWN] });
                model.maps.insert(place, (size, handle));
                if seed == 0 && size == len {
                    let seed = u8::try_from(1 + step % 250).unwrap();
                    rig.fill(place, len, seed);
                    model.memory.insert(handle, (len, references, seed));
                }
            }
            (45..65, _) => {
                if let Some((size, _)) = model.maps.remove(&place) {
                    rig.unmap(place, size);
                }
            }
            (65..80, Some(handle)) => {
                let entry = model.memory.get_mut(&handle).unwrap();
                assert_eq!(rig.engine.vmm_release(handle), entry.1 > 0, "step {step}");
                entry.1 = entry.1.saturating_sub(1);
            }
            (80..85, _) => {
                let want = model.maps.get(&place).map(|(_, handle)| *handle);
                assert_eq!(rig.engine.vmm_retain(place), want, "step {step}");
                if let Some(handle) = want {
                    model.memory.get_mut(&handle).unwrap().1 += 1;
                }
            }
            (85..93, _) => {
                let end = daemon.reclaim(next(20) * G + 1);
                assert!(
                    [outcome::DONE, outcome::NOTHING_LEFT].contains(&end.outcome),
                    "step {step}: {end:?}"
                );
            }
            _ => {
                for (place, (size, handle)) in &model.maps {
                    let (len, _, seed) = model.memory[handle];
                    let mut bytes = vec![0; usize::try_from(*size).unwrap()];
                    rig.touch(|fake| fake.read(*place, &mut bytes)).unwrap().unwrap();
                    if seed > 0 {
                        let want = &pattern(len, seed)[..bytes.len()];
                        assert!(bytes == want, "step {step}: {place:#x}");
                    }
                }
            }
        }
        let maps = &model.maps;
        model.memory.retain(|handle, (_, references, _)| {
            *references > 0 || maps.values().any(|(_, other)| other == handle)
        });
        let bytes: u64 = model.memory.values().map(|(len, ..)| len).sum();
        let books = rig.books();
        assert_eq!(books.allocated, bytes, "step {step}");
        assert!(books.used + books.evicted >= bytes, "step {step}: {books:?}");
        for (place, (size, _)) in &model.maps {
            assert!(rig.engine.vmm_contains(place + size - 1), "step {step}");
            let next = model.maps.contains_key(&(place + size));
            assert_eq!(rig.engine.vmm_contains(place + size), next, "step {step}");
        }
        assert_eq!(rig.fake.violations(), Vec::<String>::new(), "step {step}");
    }
    for (place, (size, _)) in &model.maps {
        rig.unmap(*place, *size);
    }
    for (handle, (_, references, _)) in &model.memory {
        for _ in 0..*references {
            rig.release(*handle);
        }
    }
    rig.touch(|_| ()).unwrap();
    rig.fake.free_reservation(base, PLACES * 4 * G).unwrap();
    assert_eq!((rig.books().used, rig.books().allocated), (0, 0));
    rig.assert_gone_after_detach();
}
