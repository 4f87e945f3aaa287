//! The program closes the library's descriptors and has its own files at their numbers.

use std::os::fd::RawFd;

use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;

use crate::fd::{ChildSlot, program};
use crate::testing::{Daemon, G, Rig, Script, done};

fn numbers<'a>(slots: impl Iterator<Item = &'a ChildSlot>) -> Vec<RawFd> {
    slots.filter_map(ChildSlot::number).collect()
}

fn attached(rig: &Rig) {
    rig.until("the attach to be answered", |rig| {
        rig.state(|state| state.slot.is_some())
    });
}

fn with_arena(rig: &Rig) -> u64 {
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    rig.until("arena", |rig| {
        let sums = rig.engine.core.arena.sums();
        sums.total >= 64 * G && sums.arriving == 0
    });
    ptr
}

/// The same daemon: the session goes on, and so do the segments, whose mappings are not touched by it.
#[test]
fn a_program_that_takes_every_number_keeps_its_files_and_its_memory() {
    let daemon = Daemon::start(Script {
        resume: true,
        ..Script::default()
    });
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = with_arena(&rig);
    daemon.expect("hello", |m| matches!(m, ToDaemon::Hello { .. }).then_some(()));
    let core = &rig.engine.core;
    let taken = numbers(core.link.child_fds().chain(core.arena.child_fds()));
    assert_eq!(taken.len(), 3 + 4, "socket, bell, segments: {taken:?}");
    let file = tempfile::tempfile().unwrap();
    for number in &taken {
        program::take_over(*number, &file);
    }
    // Nobody rings and the daemon says nothing: the bell has hung up.
    daemon.wait_connections(2);
    let resumes = daemon.expect("hello again", |m| match m {
        ToDaemon::Hello { resumes, .. } => Some(*resumes),
        _ => None,
    });
    assert_eq!(resumes, 1);
    attached(&rig);
    assert_eq!(daemon.lease(), rig.books().used);
    let given = daemon.arena_given();
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(ptr, 64 * G, 1));
    assert_eq!(daemon.arena_given(), given, "the old segments were used");
    assert!(!daemon.saw(|m| matches!(m, ToDaemon::ArenaDeclare { .. })));
    daemon.script(|script| script.arena = 0);
    daemon.send(ToLayer::ArenaRecall { bytes: Bytes::MAX });
    daemon.wait_arena(0);
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
    drop(rig);
    for number in taken {
        assert!(program::still_has(number, &file), "{number}");
        program::close(number);
    }
    assert_eq!(file.metadata().unwrap().len(), 0);
}

/// A new daemon cannot be told of segments without descriptors: what is in them comes back, and they go unasked.
#[test]
fn segments_without_descriptors_are_not_kept_from_a_new_daemon() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = with_arena(&rig);
    assert!(done(daemon.reclaim(u64::MAX)));
    for number in numbers(rig.engine.core.arena.child_fds()) {
        program::close(number);
    }
    daemon.script(|script| script.arena = 0);
    daemon.disconnect();
    daemon.wait_connections(2);
    attached(&rig);
    assert_eq!(rig.host.segments(), 4, "in use");
    assert!(rig.holds(ptr, 64 * G, 1));
    rig.until("they go", |rig| rig.host.segments() == 0);
    assert_eq!(rig.fake.registered(), 0);
    assert!(!daemon.saw(|m| matches!(m, ToDaemon::ArenaDeclare { .. } | ToDaemon::ArenaReturn { .. })));
    // With new ones everything works again.
    daemon.script(|script| script.arena = 1 << 30);
    assert!(done(daemon.reclaim(u64::MAX)));
    assert!(rig.holds(ptr, 64 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}
