//! What is not in line with the copies: rooms on another card are made and taken apart beside them, and neighbours are unmapped together.

use ebb_device::DeviceError;
use ebb_device::fake::{Call, Card};
use ebb_device::fingerprint::BLOCK;
use ebb_units::Bytes;

use crate::testing::{Daemon, G, Rig, Script, done};

const ERROR: DeviceError = DeviceError::Driver {
    code: 1,
    call: "ordered by the test",
};
/// A chunk, and an allocation of twelve.
const CHUNK: u64 = 8 * G;
const LEN: u64 = 12 * CHUNK;

fn linked(lends: u64) -> (Daemon, Rig) {
    let daemon = Daemon::start(Script {
        lends: Some(lends),
        ..Script::default()
    });
    let rig = Rig::with(Some(&daemon), Card::new(1 << 30), 1 << 30, G, |config| {
        config.keep_max = Bytes::ZERO;
    });
    (daemon, rig)
}

/// Starts to send everything to the other card, with the first copy held up: by then six rooms are ready, beside the one that it goes to.
fn held_up(daemon: &Daemon, rig: &Rig) -> u64 {
    rig.fake.block(Call::CopyBetween);
    let order = daemon.order(u64::MAX);
    rig.until("rooms made ahead of the first copy", |rig| {
        rig.fake.calls(Call::CopyBetween) == 1 && rig.other.used() == 7 * CHUNK
    });
    order
}

#[test]
fn rooms_are_made_ahead_of_the_copies_and_no_more_than_a_few() {
    let (daemon, rig) = linked(LEN);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 1);
    let order = held_up(&daemon, &rig);
    assert_eq!(rig.fake.calls(Call::CreateAs), 7);
    rig.fake.heal();
    let end = daemon.end_of(order);
    assert!(done(end) && end.copied == LEN, "{end:?}");
    daemon.wait_lodged(LEN);
    assert_eq!(rig.fake.calls(Call::CreateAs), 12, "one for each chunk");
    assert!(rig.holds(at, LEN, 1));
    daemon.wait_lodged(0);
    rig.assert_gone_after_detach();
}

/// They are the first that goes, at once: nobody waits for the copy that is under way.
#[test]
fn rooms_made_ahead_go_at_once_when_the_other_card_wants_them() {
    let (daemon, rig) = linked(LEN);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 2);
    let order = held_up(&daemon, &rig);
    daemon.want_lodging(LEN - CHUNK);
    daemon.wait_lodged(CHUNK);
    assert_eq!(rig.other.used(), CHUNK);
    rig.fake.heal();
    let end = daemon.end_of(order);
    assert!(done(end) && end.copied == LEN, "{end:?}");
    assert!(rig.holds(at, LEN, 2));
    daemon.wait_lodged(0);
    rig.assert_gone_after_detach();
}

/// All that is lent is one room, and the helper makes it when the chunk comes: the chunk waits for it instead of going by the host.
#[test]
fn a_room_in_the_making_is_waited_for() {
    let (daemon, rig) = linked(CHUNK);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 6);
    // The helper is at it before the program has come to a halt.
    rig.fake.begin_work();
    rig.fake.block(Call::CreateAs);
    let order = daemon.order(u64::MAX);
    rig.until("a room in the making", |rig| rig.fake.calls(Call::CreateAs) == 1);
    rig.fake.end_work();
    rig.until("a room that is promised", |rig| {
        rig.engine.core.arena.rooms.is_any_promised()
    });
    rig.fake.heal();
    let end = daemon.end_of(order);
    assert!(done(end) && end.copied == LEN, "{end:?}");
    daemon.wait_lodged(CHUNK);
    assert_eq!(rig.other.used(), CHUNK);
    assert!(rig.holds(at, LEN, 6));
    daemon.wait_lodged(0);
    rig.assert_gone_after_detach();
}

/// More rooms are ready than are needed after all: they go when the order is over.
#[test]
fn rooms_that_no_chunk_needs_go_with_the_order() {
    let (daemon, rig) = linked(1 << 30);
    let at = rig.alloc(LEN);
    // Nothing is copied.
    let zeros = vec![0; usize::try_from(LEN).unwrap()];
    rig.touch(|fake| fake.write(at, &zeros)).unwrap().unwrap();
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end) && end.copied == 0, "{end:?}");
    daemon.wait_lodged(0);
    assert_eq!(rig.other.used(), 0);
    rig.engine.free(at).unwrap();
    rig.assert_gone_after_detach();
}

/// A room that cannot be made ahead is as one that cannot be made: the chunks go by the host.
#[test]
fn a_room_that_cannot_be_made_ahead_costs_no_byte() {
    for call in [Call::Reserve, Call::CreateAs, Call::MapAs, Call::GrantAs] {
        for nth in 1..9 {
            let (daemon, rig) = linked(LEN);
            let at = rig.alloc(LEN);
            rig.fill(at, LEN, 3);
            rig.fake.fail_nth(call, nth, ERROR);
            let end = daemon.reclaim(u64::MAX);
            assert!(done(end) && end.copied == LEN, "{call:?} {nth}: {end:?}");
            assert!(rig.holds(at, LEN, 3), "{call:?} {nth}");
            daemon.wait_lodged(0);
            rig.assert_gone_after_detach();
        }
    }
}

/// The program goes on while the rooms that it had are taken apart.
#[test]
fn nobody_waits_for_rooms_to_be_taken_apart_on_the_way_in() {
    let (daemon, rig) = linked(LEN);
    let at = rig.alloc(LEN);
    rig.fill(at, LEN, 4);
    daemon.reclaim(u64::MAX);
    daemon.wait_lodged(LEN);
    rig.fake.block(Call::UnmapAs);
    assert!(rig.holds(at, LEN, 4));
    assert_eq!(rig.other.used(), LEN, "none of them is gone yet");
    rig.fake.heal();
    daemon.wait_lodged(0);
    assert_eq!(rig.other.used(), 0);
    rig.assert_gone_after_detach();
}

/// Twenty chunks of a block, all with a kept copy that they equal.
fn unchanged() -> (Daemon, Rig, u64, u64) {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::with(Some(&daemon), Card::new(1 << 30), 1 << 30, G, |config| {
        config.chunk_max = Bytes(BLOCK);
        config.keep_max = Bytes(u64::MAX);
    });
    let len = 20 * BLOCK;
    let at = rig.alloc(len);
    rig.fill(at, len, 5);
    assert_eq!(daemon.reclaim(u64::MAX).copied, len);
    assert!(rig.holds(at, len, 5));
    daemon.wait_restored(1);
    (daemon, rig, at, len)
}

#[test]
fn unchanged_neighbours_are_unmapped_by_one_call() {
    let (daemon, rig, at, len) = unchanged();
    let (unmaps, releases) = (rig.fake.calls(Call::Unmap), rig.fake.calls(Call::Release));
    let end = daemon.reclaim(u64::MAX);
    assert!(done(end) && end.copied == 0, "{end:?}");
    // As they are begun: sixteen together, then what the place of those that are gone lets begin.
    let unmaps = rig.fake.calls(Call::Unmap) - unmaps;
    assert!(unmaps <= 6, "{unmaps} calls for twenty chunks");
    assert_eq!(rig.fake.calls(Call::Release) - releases, 20);
    assert_eq!(rig.fake.mapped(), 0);
    assert!(rig.holds(at, len, 5));
    rig.assert_gone_after_detach();
}

#[test]
fn neighbours_that_cannot_be_unmapped_together_leave_one_by_one() {
    for failures in [1, 2, 3, 21] {
        let (daemon, rig, at, len) = unchanged();
        for nth in 1..=failures {
            rig.fake.fail_nth(Call::Unmap, nth, ERROR);
        }
        daemon.reclaim(u64::MAX);
        assert!(rig.holds(at, len, 5), "{failures}");
        rig.fake.heal();
        rig.assert_gone_after_detach();
    }
}
