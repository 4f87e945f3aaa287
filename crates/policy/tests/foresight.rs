//! Memory that comes back before it is asked for.

mod common;

use std::time::Duration;

use common::*;
use ebb_policy::predict::Foresight;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId};

fn ahead(idle_release: u64) -> (Desk, TaskSpec) {
    let config = PolicyConfig {
        predict: true,
        ..config()
    };
    let spec = TaskSpec {
        idle_release: Some(Duration::from_secs(idle_release)),
        ..spec()
    };
    (Desk::with(config, 100), spec)
}

/// Client 1 works for a second and idles for `gap`, `times` times; its memory leaves each time and it waits for it.
fn beat(desk: &mut Desk, gibs: u64, gap: u64, times: u32) {
    for _ in 0..times {
        desk.pass_using(Duration::from_secs(1), &[1]);
        let order = released(desk, 1);
        let rest = Duration::from_secs(gap).saturating_sub(Duration::from_secs(5));
        desk.obey(1, order, gibs);
        for _ in 0..rest.as_millis() / 100 {
            desk.pass(Duration::from_millis(100));
            if brought(&desk.last).is_some() {
                return;
            }
        }
        let ask = desk.restore(1, gibs);
        assert_eq!(desk.granted(1, ask), gib(gibs), "{:?}", desk.last);
        desk.restored(1, gibs);
    }
}

/// Passes five seconds, in which a client is released for having idled.
fn released(desk: &mut Desk, client: u64) -> ebb_units::OrderId {
    desk.pass(Duration::from_secs(5));
    desk.last
        .iter()
        .find_map(|a| match a {
            Action::Reclaim {
                client: c,
                order,
                reason: ReclaimReason::IdleRelease,
                ..
            } if c.0 == client => Some(*order),
            _ => None,
        })
        .unwrap_or_else(|| panic!("{:?}", desk.last))
}

fn brought(actions: &[Action]) -> Option<Foresight> {
    actions.iter().find_map(|a| match a {
        Action::BringBack {
            client: ClientId(1),
            foresight,
        } => *foresight,
        _ => None,
    })
}

#[test]
fn a_program_with_a_period_finds_its_memory_back() {
    let (mut desk, spec) = ahead(2);
    desk.job(1, spec, 40);
    beat(&mut desk, 40, 30, 8);
    let foresight = brought(&desk.last).unwrap_or_else(|| panic!("{:?}", desk.last));
    assert!(foresight.gain_ms > foresight.regret_ms, "{foresight}");
    assert!(foresight.seen >= 4 && foresight.chance > 600, "{foresight}");
    // It comes, costs nobody anything, and counts as idle until it is used.
    let ask = desk.restore(1, 40);
    assert_eq!(desk.granted(1, ask), gib(40));
    desk.restored(1, 40);
    assert_eq!(
        desk.arbiter.snapshot().tasks[0].clients[0].state,
        ClientState::Idle
    );
}

#[test]
fn without_prediction_nothing_is_brought_back() {
    let (desk, spec) = ahead(2);
    let mut desk = Desk::with(
        PolicyConfig {
            predict: false,
            ..desk.arbiter.config().clone()
        },
        100,
    );
    desk.job(1, spec, 40);
    beat(&mut desk, 40, 30, 8);
    assert_eq!(brought(&desk.last), None);
}

#[test]
fn a_guess_takes_nothing_from_anybody_who_runs() {
    let (mut desk, spec) = ahead(2);
    desk.job(1, spec.clone(), 40);
    beat(&mut desk, 40, 30, 8);
    assert!(brought(&desk.last).is_some());
    // Somebody else was faster, and runs.
    desk.job(2, spec, 80);
    let ask = desk.restore(1, 40);
    assert_eq!(desk.granted(1, ask), Bytes::ZERO);
    assert!(
        !desk
            .last
            .iter()
            .any(|a| matches!(a, Action::Reclaim { .. } | Action::Note(Note::Reserved { .. })))
    );
    desk.pass_using(Duration::from_millis(900), &[2]);
    assert!(
        !desk.last.iter().any(|a| matches!(a, Action::Reclaim { .. })),
        "{:?}",
        desk.last
    );
}

/// Client 1 has used the GPU every 30 s, client 2 every `other` seconds, for an hour. Then 1 is away, and 2 has all of the card and idles.
fn one_away_and_one_that_idles(other: u64) -> Desk {
    let (mut desk, spec) = ahead(3600);
    desk.job(1, spec.clone(), 40);
    desk.job(2, spec.clone(), 60);
    for n in 0..120 {
        desk.touch(1);
        if n * 30 % other == 0 {
            desk.touch(2);
        }
        desk.pass(Duration::from_secs(30));
    }
    desk.touch(1);
    desk.tell(Event::TaskChanged {
        task: ebb_units::TaskId(1),
        spec: TaskSpec {
            idle_release: Some(Duration::from_secs(2)),
            ..spec
        },
        force: false,
    });
    let order = released(&mut desk, 1);
    desk.obey(1, order, 40);
    let ask = desk.alloc(2, 40);
    assert_eq!(desk.granted(2, ask), gib(40));
    desk.touch(2);
    desk.pass(Duration::from_secs(24));
    desk
}

#[test]
fn room_is_made_from_what_idles_for_longer() {
    let mut desk = one_away_and_one_that_idles(300);
    let order = desk.last.iter().find_map(|a| match a {
        Action::Reclaim {
            client: ClientId(2),
            order,
            bytes,
            reason: ReclaimReason::Foreseen { client: ClientId(1) },
            ..
        } => Some((*order, *bytes)),
        _ => None,
    });
    let (order, bytes) = order.unwrap_or_else(|| panic!("{:?}", desk.last));
    assert_eq!(bytes, gib(40), "no more than is needed");
    assert!(brought(&desk.last).is_none(), "not before there is room");
    desk.obey(2, order, 40);
    desk.pass(Duration::from_secs(2));
    assert!(brought(&desk.last).is_some(), "{:?}", desk.last);
}

#[test]
fn no_room_is_made_from_who_is_expected_as_soon() {
    let mut desk = one_away_and_one_that_idles(30);
    desk.pass(Duration::from_secs(4));
    assert!(
        !desk.last.iter().any(|a| matches!(a, Action::Reclaim { .. })),
        "{:?}",
        desk.last
    );
}

#[test]
fn a_wrong_guess_makes_quiet() {
    let (mut desk, spec) = ahead(2);
    desk.job(1, spec, 40);
    beat(&mut desk, 40, 30, 8);
    let first = desk.now;
    let mut guesses = 1;
    // It never comes again, is released for idling, and might be brought back for ever.
    for _ in 0..3600 {
        if brought(&desk.last).is_some() {
            let ask = desk.restore(1, 40);
            assert_eq!(desk.granted(1, ask), gib(40));
            desk.restored(1, 40);
        }
        desk.pass(Duration::from_secs(1));
        guesses += u32::from(brought(&desk.last).is_some());
        let order = desk.last.iter().find_map(|a| match a {
            Action::Reclaim { order, .. } => Some(*order),
            _ => None,
        });
        if let Some(order) = order {
            desk.obey(1, order, 40);
        }
    }
    assert!(desk.now.since(first) >= Duration::from_secs(3600));
    assert!(guesses <= 4, "{guesses} in an hour");
}
