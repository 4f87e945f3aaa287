//! Room on one card for what another evicted.

mod common;

use std::time::Duration;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

/// Another card, which lends.
const LENDER: DeviceId = DeviceId(1);

/// Two cards of 100 GiB. Client 1 lives on the first; client 2, of a task of its own, on the second with so much lease.
fn two(config: PolicyConfig, lease: u64) -> Desk {
    let mut desk = Desk::with(config, 100);
    desk.tell(Event::Device {
        device: LENDER,
        capacity: gib(100),
        unmanaged: Bytes::ZERO,
    });
    desk.job(1, spec(), 50);
    desk.task(2, spec());
    on_lender(&mut desk, 2, lease);
    desk
}

fn on_lender(desk: &mut Desk, client: u64, lease: u64) {
    desk.tell(Event::ClientJoined {
        client: ClientId(client),
        task: TaskId(2),
        device: LENDER,
        lease: gib(lease),
        evicted: Bytes::ZERO,
        overhead: Bytes::ZERO,
    });
}

fn ask(desk: &mut Desk, client: u64, gibs: u64) -> Bytes {
    desk.tell(Event::LodgingAsked {
        client: ClientId(client),
        lenders: vec![GPU, LENDER],
        bytes: gib(gibs),
        most: Bytes::MAX,
    });
    match &desk.last[..] {
        [
            Action::LodgingLent {
                client: to,
                lender,
                bytes,
            },
        ] => {
            assert_eq!(*to, ClientId(client));
            assert_eq!(lender.is_some(), !bytes.is_zero());
            let own = if client == 1 { GPU } else { LENDER };
            assert_ne!(*lender, Some(own), "never its own card");
            *bytes
        }
        other => panic!("one answer, not {other:?}"),
    }
}

fn leave(desk: &mut Desk, client: u64, gibs: u64) {
    desk.tell(Event::LodgingLeft {
        client: ClientId(client),
        lender: LENDER,
        bytes: gib(gibs),
    });
}

/// What is wanted back by the last answers.
fn wanted(desk: &Desk) -> Vec<(u64, Bytes)> {
    desk.last
        .iter()
        .filter_map(|action| match action {
            Action::LodgingWanted { client, bytes, .. } => Some((client.0, *bytes)),
            _ => None,
        })
        .collect()
}

fn free_there(desk: &Desk) -> Bytes {
    desk.arbiter.free_on(LENDER).unwrap()
}

#[test]
fn what_is_spare_is_lent_and_no_more() {
    let mut desk = two(config(), 40);
    assert_eq!(ask(&mut desk, 1, 20), gib(20));
    assert_eq!(free_there(&desk), gib(40));
    // A thirty-second of the card stays free.
    let rest = ask(&mut desk, 1, 100);
    assert!(rest < gib(37) && rest > gib(36), "{rest}");
    assert_eq!(ask(&mut desk, 1, 1), Bytes::ZERO);
    assert_eq!(desk.client(1).lodged, gib(20) + rest);
    leave(&mut desk, 1, 20);
    assert_eq!(ask(&mut desk, 1, 20), gib(20));
    assert_eq!(ask(&mut desk, 2, 20), gib(20), "the other way round as well");
}

#[test]
fn an_operators_bound_and_a_pause_hold() {
    let mut desk = two(config(), 0);
    desk.tell(Event::LodgingAsked {
        client: ClientId(1),
        lenders: vec![LENDER],
        bytes: gib(50),
        most: gib(10),
    });
    assert_eq!(desk.client(1).lodged, gib(10));
    desk.tell(Event::Pause { task: TaskId(1) });
    desk.tell(Event::LodgingAsked {
        client: ClientId(1),
        lenders: vec![LENDER],
        bytes: gib(50),
        most: Bytes::MAX,
    });
    assert_eq!(desk.client(1).lodged, gib(10), "what is paused gets none");
}

#[test]
fn whoever_is_on_the_card_gets_its_room_back_before_anybody_there_is_taken_from() {
    let mut desk = two(config(), 40);
    on_lender(&mut desk, 3, 10);
    assert_eq!(ask(&mut desk, 1, 40), gib(40));
    desk.pass(Duration::from_secs(5));
    // Client 3 is idle and could be evicted.
    let alloc = desk.alloc(2, 30);
    assert_eq!(desk.orders(), [], "nobody of the card is taken from");
    assert_eq!(wanted(&desk), [(1, gib(20))], "no more than is short");
    leave(&mut desk, 1, 12);
    assert_eq!(desk.granted(2, alloc), Bytes::ZERO);
    leave(&mut desk, 1, 8);
    assert_eq!(desk.granted(2, alloc), gib(30));
    assert_eq!(desk.client(1).lodged, gib(20));
}

#[test]
fn nothing_is_lent_while_somebody_there_waits_or_will_want_its_own_back() {
    let mut desk = two(config(), 90);
    desk.touch(2);
    on_lender(&mut desk, 3, 0);
    desk.alloc(3, 20);
    assert_eq!(ask(&mut desk, 1, 1), Bytes::ZERO);
    let mut desk = two(config(), 0);
    desk.usage(
        2,
        Usage {
            evicted: gib(90),
            ..Usage::default()
        },
    );
    let lent = ask(&mut desk, 1, 50);
    assert!(lent < gib(10), "{lent}");
}

#[test]
fn a_lodger_counts_against_no_guarantee() {
    let mut desk = two(config(), 0);
    assert!(ask(&mut desk, 1, 100) > gib(90));
    desk.task(
        3,
        TaskSpec {
            request: gib(90),
            ..spec()
        },
    );
    assert!(desk.last.contains(&Action::TaskAccepted { task: TaskId(3) }));
    desk.tell(Event::ClientJoined {
        client: ClientId(3),
        task: TaskId(3),
        device: LENDER,
        lease: Bytes::ZERO,
        evicted: Bytes::ZERO,
        overhead: Bytes::ZERO,
    });
    let alloc = desk.alloc(3, 90);
    let left = wanted(&desk)[0].1;
    desk.tell(Event::LodgingLeft {
        client: ClientId(1),
        lender: LENDER,
        bytes: left,
    });
    assert_eq!(desk.granted(3, alloc), gib(90));
}

#[test]
fn a_lodger_that_does_not_move_is_not_waited_for_for_ever() {
    let mut desk = two(config(), 40);
    on_lender(&mut desk, 3, 10);
    ask(&mut desk, 1, 40);
    desk.pass(Duration::from_secs(5));
    let alloc = desk.alloc(2, 20);
    assert_eq!((wanted(&desk).len(), desk.orders()), (1, vec![]));
    desk.pass(config().order_timeout);
    let (order, bytes, ..) = desk.order_to(3);
    assert_eq!(bytes, gib(10));
    desk.obey(3, order, 10);
    assert_eq!(desk.granted(2, alloc), gib(20));
    // It stays wanted, and what comes late is welcome.
    leave(&mut desk, 1, 10);
    assert_eq!(desk.client(1).lodged, gib(30));
}

#[test]
fn a_lodgers_death_frees_its_room() {
    let mut desk = two(config(), 40);
    ask(&mut desk, 1, 40);
    let alloc = desk.alloc(2, 50);
    assert_eq!(desk.granted(2, alloc), Bytes::ZERO);
    desk.tell(Event::ClientLeft {
        client: ClientId(1),
        kept: Bytes::ZERO,
    });
    assert_eq!(desk.granted(2, alloc), gib(50));
    assert_eq!(free_there(&desk), gib(10));
}

#[test]
fn a_new_daemon_believes_what_it_is_told_within_reason() {
    let mut desk = two(config(), 90);
    let held = |gibs| Event::LodgingHeld {
        client: ClientId(1),
        held: vec![(LENDER, gib(gibs)), (GPU, gib(5))],
    };
    desk.tell(held(30));
    assert_eq!(wanted(&desk), [(1, gib(20))], "more than there is");
    assert_eq!(desk.client(1).lodged, gib(30));
    desk.tell(held(10));
    assert_eq!(wanted(&desk), []);
    desk.tell(Event::LodgingHeld {
        client: ClientId(1),
        held: Vec::new(),
    });
    assert_eq!((desk.client(1).lodged, free_there(&desk)), (Bytes::ZERO, gib(10)));
}

#[test]
fn with_marks_a_lodger_leaves_before_idle_memory() {
    let config = PolicyConfig {
        low_mark: 100,
        high_mark: 200,
        ..config()
    };
    let mut desk = two(config, 70);
    assert_eq!(ask(&mut desk, 1, 50), gib(10), "no more than above the high mark");
    on_lender(&mut desk, 3, 12);
    assert_eq!(wanted(&desk), [(1, gib(10))]);
    desk.pass(Duration::from_secs(20));
    assert_eq!(
        desk.orders(),
        [],
        "idle memory stays while the lodger is on its way"
    );
}

#[test]
fn what_is_paused_leaves_other_cards_before_the_pause_is_told() {
    let mut desk = two(config(), 0);
    ask(&mut desk, 1, 20);
    desk.pass(Duration::from_secs(1));
    desk.tell(Event::Pause { task: TaskId(1) });
    assert_eq!(wanted(&desk), [(1, gib(20))]);
    let told = |desk: &Desk| desk.last.iter().any(|a| matches!(a, Action::PauseDone { .. }));
    let (order, ..) = desk.order_to(1);
    desk.obey(1, order, 50);
    assert!(!told(&desk));
    leave(&mut desk, 1, 19);
    assert!(!told(&desk) && wanted(&desk).is_empty());
    leave(&mut desk, 1, 1);
    assert!(told(&desk), "{:?}", desk.last);
}

#[test]
fn a_pause_does_not_wait_for_ever_for_what_lies_elsewhere() {
    let mut desk = two(config(), 0);
    ask(&mut desk, 1, 20);
    desk.pass(Duration::from_secs(1));
    desk.tell(Event::Pause { task: TaskId(1) });
    let (order, ..) = desk.order_to(1);
    desk.obey(1, order, 50);
    desk.pass(config().order_timeout);
    assert!(desk.last.iter().any(|a| matches!(a, Action::PauseDone { .. })));
    desk.tell(Event::Resume { task: TaskId(1) });
    assert_eq!(desk.client(1).lodged, gib(20));
}
