//! What leaves one card goes to another that has room, and gives way there.

use ebb_protocol::control::{Answer, ProcessRow, Request, Snapshot, TaskRow};
use ebb_tests::{Options, Program, Stage, eventually};
use ebb_units::Bytes;

fn linked() -> Options {
    Options {
        devices: 2,
        nvlink: true,
        ..Options::default()
    }
}

fn row(snapshot: &Snapshot, program: &Program) -> ProcessRow {
    let mut rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
    rows.find(|row| row.pid == program.pid())
        .cloned()
        .unwrap_or_else(|| panic!("{} is not there: {snapshot:#?}", program.pid()))
}

/// A program on the first card, off it by another's doing, with its bytes on the second.
fn lodged(stage: &Stage) -> (Program, Program) {
    let mut guest = stage.run(&[]);
    guest.ok("open 0");
    guest.hold("a", Bytes::mib(160), 1);
    let mut other = stage.run(&[]);
    other.ok("open 0");
    other.hold("b", Bytes::mib(200), 2);
    let snapshot = stage.snapshot();
    let away = row(&snapshot, &guest);
    assert!(
        away.lodged >= Bytes::mib(64) && away.lodged <= away.evicted,
        "{away:?}"
    );
    assert_eq!(snapshot.devices[1].lodged, away.lodged, "{snapshot:#?}");
    (guest, other)
}

fn lent(snapshot: &Snapshot) -> Bytes {
    snapshot.devices[1].lodged
}

#[test]
fn what_does_not_fit_one_card_lies_on_the_next_and_comes_back() {
    let stage = Stage::new(linked());
    let (mut guest, mut other) = lodged(&stage);
    for _ in 0..3 {
        assert_eq!(guest.wrong("a", 1), 0);
        assert_eq!(other.wrong("b", 2), 0);
    }
    guest.ok("free a");
    other.ok("free b");
    eventually("nothing is lent", || match lent(&stage.snapshot()) {
        Bytes::ZERO => Ok(()),
        bytes => Err(format!("{bytes} are")),
    });
}

#[test]
fn whoever_lives_on_the_other_card_gets_its_room() {
    let stage = Stage::new(linked());
    let (mut guest, mut other) = lodged(&stage);
    let mut owner = stage.run(&[]);
    owner.ok("open 1");
    owner.hold("c", Bytes::mib(230), 3);
    let snapshot = stage.snapshot();
    assert!(lent(&snapshot) < Bytes::mib(32), "{snapshot:#?}");
    for (program, name, seed) in [(&mut guest, "a", 1), (&mut other, "b", 2), (&mut owner, "c", 3)] {
        assert_eq!(program.wrong(name, seed), 0, "{name}");
    }
}

#[test]
fn lent_room_is_nobodys_stranger_and_dies_with_its_borrower() {
    let stage = Stage::new(linked());
    let (mut guest, mut other) = lodged(&stage);
    // NVML is read every second: what it shows of the borrower on the other card is in the books.
    let before = stage.snapshot().uptime_ms;
    eventually("some readings", || {
        let snapshot = stage.snapshot();
        let card = &snapshot.devices[1];
        assert!(card.unmanaged.is_zero() && card.strangers.is_empty(), "{card:?}");
        if snapshot.uptime_ms > before + 4_500 {
            Ok(())
        } else {
            Err("not yet".into())
        }
    });
    guest.kill();
    eventually("its room is free", || {
        let snapshot = stage.snapshot();
        let card = &snapshot.devices[1];
        if lent(&snapshot).is_zero() && card.free == card.capacity {
            Ok(())
        } else {
            Err(format!("{card:?}"))
        }
    });
    assert_eq!(other.wrong("b", 2), 0);
    let mut owner = stage.run(&[]);
    owner.ok("open 1");
    owner.hold("c", Bytes::mib(230), 3);
    assert_eq!(owner.wrong("c", 3), 0);
}

#[test]
fn a_daemon_that_is_killed_and_comes_back_knows_what_is_lent() {
    let mut stage = Stage::new(linked());
    let (mut guest, mut other) = lodged(&stage);
    let before = lent(&stage.snapshot());
    stage.kill_daemon();
    stage.start_daemon();
    eventually("the room is in the books again", || {
        match lent(&stage.snapshot()) {
            bytes if bytes == before => Ok(()),
            bytes => Err(format!("{bytes} of {before}")),
        }
    });
    let mut owner = stage.run(&[]);
    owner.ok("open 1");
    owner.hold("c", Bytes::mib(230), 3);
    for (program, name, seed) in [(&mut guest, "a", 1), (&mut other, "b", 2), (&mut owner, "c", 3)] {
        assert_eq!(program.wrong(name, seed), 0, "{name}");
    }
}

#[test]
fn a_hibernated_task_has_nothing_on_other_cards() {
    let stage = Stage::new(linked());
    let (mut guest, mut other) = lodged(&stage);
    let snapshot = stage.snapshot();
    let holds = |task: &&TaskRow| task.processes.iter().any(|row| row.pid == guest.pid());
    let task = snapshot.tasks.iter().find(holds).unwrap().task.to_string();
    let answer = stage.ask(&Request::Hibernate {
        task: task.clone(),
        wait_ms: Some(20_000),
    });
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
    assert!(lent(&stage.snapshot()).is_zero());
    let answer = stage.ask(&Request::Resume { task });
    assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
    assert_eq!(guest.wrong("a", 1), 0);
    assert_eq!(other.wrong("b", 2), 0);
}

#[test]
fn the_operator_may_turn_it_off() {
    let stage = Stage::new(Options {
        config: "[peer]\nenabled = false".into(),
        ..linked()
    });
    let mut guest = stage.run(&[]);
    guest.ok("open 0");
    guest.hold("a", Bytes::mib(160), 1);
    let mut other = stage.run(&[]);
    other.ok("open 0");
    other.hold("b", Bytes::mib(200), 2);
    let snapshot = stage.snapshot();
    assert!(lent(&snapshot).is_zero() && !row(&snapshot, &guest).evicted.is_zero());
    assert_eq!(guest.wrong("a", 1), 0);
}
