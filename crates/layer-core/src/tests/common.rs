//! Host copies in common with others: what the library does of it, with a daemon that offers what is the same, or was.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use ebb_device::fake::{Call, Card};
use ebb_device::fingerprint::BLOCK;
use ebb_protocol::wire::{CommonBlock, RestingRun, SegmentInfo};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::testing::{Daemon, G, Rig, Script, pattern};

const LEN: u64 = 6 * BLOCK;
/// The number of the common segment.
const ID: u64 = 77_000;

fn script() -> Script {
    Script {
        common: true,
        segment: 4 * BLOCK,
        ..Script::default()
    }
}

fn rig(daemon: &Daemon, keep: u64) -> Rig {
    Rig::with(Some(daemon), Card::new(1 << 30), 1 << 30, G, |config| {
        config.chunk_max = Bytes(4 * BLOCK);
        config.keep_max = Bytes(keep);
    })
}

fn common(rig: &Rig) -> (u64, u64) {
    rig.engine.core.arena.sums().common
}

/// What is at rest, by the next notice.
fn rest(daemon: &Daemon) -> (u64, Vec<RestingRun>) {
    daemon.expect("what is at rest", |message| match message {
        ToDaemon::ArenaRest { notice, runs } => Some((*notice, runs.clone())),
        _ => None,
    })
}

/// A sealed file with the bytes that are in these runs, and the offer of it.
fn same(rig: &Rig, notice: u64, runs: &[RestingRun]) -> (ToLayer, OwnedFd) {
    let (mut bytes, mut blocks) = (Vec::new(), Vec::new());
    for run in runs {
        let host = rig.engine.core.arena.host_of(run.segment).unwrap();
        for from in (0..run.bytes.get()).step_by(BLOCK as usize) {
            let len = BLOCK.min(run.bytes.get() - from);
            blocks.push(CommonBlock {
                segment: run.segment,
                offset: run.offset + from,
                bytes: Bytes(len),
                notice,
                at: bytes.len() as u64,
            });
            let part = rig
                .host
                .bytes(host.offset(run.offset + from), len, |b| b.to_vec());
            bytes.extend(part.unwrap());
        }
    }
    let memory = rustix::fs::memfd_create("common", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(memory);
    file.write_all_at(&bytes, 0).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK).unwrap();
    let segment = SegmentInfo {
        id: ID,
        bytes: Bytes(bytes.len() as u64),
    };
    (ToLayer::ArenaCommon { segment, blocks }, file.into())
}

fn answer(daemon: &Daemon) -> bool {
    daemon.expect("an answer", |message| match message {
        ToDaemon::ArenaCommonHeld { segment: ID, held } => Some(*held),
        _ => None,
    })
}

fn left(daemon: &Daemon) {
    daemon.expect("it to be left", |message| match message {
        ToDaemon::ArenaCommonLeft { segments } => (*segments == [ID]).then_some(()),
        _ => None,
    });
}

/// All of it is off the card, and offered as it is.
fn offered(daemon: &Daemon, rig: &Rig) -> u64 {
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 1);
    daemon.reclaim(u64::MAX);
    let (notice, runs) = rest(daemon);
    assert_eq!(runs.iter().map(|run| run.bytes.get()).sum::<u64>(), LEN);
    let (offer, file) = same(rig, notice, &runs);
    daemon.send_with(offer, &[file]);
    at
}

#[test]
fn what_is_offered_is_taken_and_its_own_room_is_free() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = offered(&daemon, &rig);
    assert!(answer(&daemon));
    let sums = rig.engine.core.arena.sums();
    assert_eq!((sums.used, sums.kept, sums.common), (0, 0, (LEN, 0)));
    daemon.expect("the use of it", |message| match message {
        ToDaemon::ArenaCommonUse { away, kept } => (away.get() == LEN && kept.is_zero()).then_some(()),
        _ => None,
    });
    assert!(rig.holds(at, LEN, 1), "every byte");
    daemon.wait_restored(1);
    assert_eq!(common(&rig), (0, LEN), "the copy is kept");
    assert!(
        rig.engine.core.arena.sums().total >= LEN,
        "it could have been written"
    );
    assert_eq!(daemon.reclaim(u64::MAX).copied, 0, "unchanged");
    // The room of its own goes back by itself.
    rig.until("room to go", |rig| rig.engine.core.arena.sums().total == 0);
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(2);
    // What is written needs room of its own; nobody else's bytes change.
    let mut expected = pattern(LEN, 1);
    let place = usize::try_from(2 * BLOCK + 7).unwrap();
    expected[place] ^= 0xFF;
    rig.touch(|fake| fake.write(at + 2 * BLOCK + 7, &[expected[place]]))
        .unwrap()
        .unwrap();
    // There is no room for it at first: then the chunk is copied as a whole.
    let copied = daemon.reclaim(u64::MAX).copied;
    assert!(
        (BLOCK..=4 * BLOCK).contains(&copied),
        "one chunk at most: {copied}"
    );
    assert_eq!(common(&rig), (LEN - copied, 0));
    let mut bytes = vec![0; expected.len()];
    rig.touch(|fake| fake.read(at, &mut bytes)).unwrap().unwrap();
    assert!(bytes == expected);
    rig.engine.free(at).unwrap();
    left(&daemon);
    rig.assert_gone_after_detach();
}

#[test]
fn what_is_told_is_told_once_and_anew_when_it_was_written() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 1);
    daemon.reclaim(u64::MAX);
    let (first, runs) = rest(&daemon);
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(1);
    // The copies are brought up to date in one block.
    rig.touch(|fake| fake.write(at, &[9])).unwrap().unwrap();
    assert_eq!(daemon.reclaim(u64::MAX).copied, BLOCK);
    let (second, again) = rest(&daemon);
    assert!(second > first && again.iter().all(|run| run.bytes.get() <= 4 * BLOCK));
    let sum: u64 = again.iter().map(|run| run.bytes.get()).sum();
    assert!(sum < LEN, "only the chunk that was written: {again:?}");
    // An offer by the first notice is good for the other chunk alone.
    let (offer, file) = same(&rig, first, &runs);
    daemon.send_with(offer, &[file]);
    assert!(answer(&daemon));
    assert_eq!(common(&rig), (LEN - sum, 0));
    let mut expected = pattern(LEN, 1);
    expected[0] = 9;
    let mut bytes = vec![0; expected.len()];
    rig.touch(|fake| fake.read(at, &mut bytes)).unwrap().unwrap();
    assert!(bytes == expected);
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn what_was_at_rest_once_and_is_not_any_more_is_not_taken() {
    let daemon = Daemon::start(script());
    // Without kept copies places are free when their chunk is back.
    let rig = rig(&daemon, 0);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 1);
    daemon.reclaim(u64::MAX);
    let (notice, runs) = rest(&daemon);
    let (offer, file) = same(&rig, notice, &runs);
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(1);
    rig.fill(at, LEN, 2);
    daemon.reclaim(u64::MAX);
    // The same places hold other bytes now.
    daemon.send_with(offer, &[file]);
    assert!(!answer(&daemon));
    assert_eq!(common(&rig), (0, 0));
    assert!(rig.holds(at, LEN, 2));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn the_daemon_dies_and_the_next_one_hears_what_is_in_common() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = offered(&daemon, &rig);
    assert!(answer(&daemon));
    daemon.disconnect();
    let held = daemon.expect("what is in common", |message| match message {
        ToDaemon::ArenaCommonDeclare {
            segments,
            first: true,
        } => Some(segments.clone()),
        _ => None,
    });
    assert_eq!((held.len(), held[0].id, held[0].bytes.get()), (1, ID, LEN));
    assert!(rig.holds(at, LEN, 1), "no daemon is needed for the bytes");
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn a_daemon_that_dies_between_the_offer_and_the_answer_takes_nothing_along() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = offered(&daemon, &rig);
    daemon.disconnect();
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_connections(2);
    rig.until("the attach to be answered", |rig| {
        rig.state(|state| state.slot.is_some())
    });
    daemon.reclaim(u64::MAX);
    assert!(rig.holds(at, LEN, 1));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn what_cannot_be_pinned_is_not_taken_nor_asked_for_again() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 1);
    daemon.reclaim(u64::MAX);
    let (notice, runs) = rest(&daemon);
    let (offer, file) = same(&rig, notice, &runs);
    rig.fake
        .fail_always(Call::RegisterHost, ebb_device::DeviceError::OutOfMemory);
    daemon.send_with(offer, &[file]);
    assert!(!answer(&daemon));
    rig.fake.heal();
    assert!(rig.holds(at, LEN, 1));
    rig.fill(at, LEN, 2);
    daemon.reclaim(u64::MAX);
    assert!(rig.holds(at, LEN, 2));
    let asked = |message: &ToDaemon| matches!(message, ToDaemon::ArenaRest { .. });
    assert!(!daemon.saw(asked), "copies of its own are faster");
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn a_copy_in_common_that_is_only_kept_gives_way() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = offered(&daemon, &rig);
    assert!(answer(&daemon));
    // Of what is off the card nothing goes.
    daemon.send(ToLayer::ArenaCommonWanted { segments: vec![ID] });
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(1);
    daemon.send(ToLayer::ArenaCommonWanted { segments: vec![ID] });
    left(&daemon);
    assert_eq!(common(&rig), (0, 0));
    assert_eq!(daemon.reclaim(u64::MAX).copied, LEN);
    assert!(rig.holds(at, LEN, 1));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

/// The room for what was written is not there at once: it is asked for, and nothing is lost meanwhile.
#[test]
fn what_was_in_common_and_is_written_waits_for_room_of_its_own() {
    let daemon = Daemon::start(script());
    let rig = rig(&daemon, u64::MAX);
    let at = offered(&daemon, &rig);
    assert!(answer(&daemon));
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(1);
    assert_eq!(daemon.reclaim(u64::MAX).copied, 0);
    rig.until("room to go", |rig| rig.engine.core.arena.sums().total == 0);
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_restored(2);
    rig.fill(at, LEN, 3);
    assert_eq!(daemon.reclaim(u64::MAX).copied, LEN);
    left(&daemon);
    assert!(rig.holds(at, LEN, 3));
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}
