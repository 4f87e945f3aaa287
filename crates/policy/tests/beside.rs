//! What the driver places for programs beside their leases: managed memory that is on the card can be ordered away.

mod common;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, TaskId};

/// A client with so much managed memory on the card, and a context of a gibibyte.
fn managed(d: &mut Desk, client: u64, gibs: u64) {
    d.usage(
        client,
        Usage {
            overhead: gib(gibs + 1),
            loose: gib(gibs),
            ..Usage::default()
        },
    );
}

#[test]
fn idle_managed_memory_makes_room_for_another() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    d.job(2, spec(), 0);
    managed(&mut d, 1, 60);
    d.pass(2 * SECOND);
    let ask = d.alloc(2, 60);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!(
        (bytes, depth, reason),
        (
            gib(21),
            Depth::Evict,
            ReclaimReason::Demand { client: ClientId(2) }
        )
    );
    managed(&mut d, 1, 39);
    assert_eq!(d.granted(2, ask), gib(60), "{:?}", d.last);
    d.done(1, order, Outcome::Done, 0);
    assert!(
        !d.last
            .iter()
            .any(|a| matches!(a, Action::Note(Note::BackingOff { .. }))),
        "{:?}",
        d.last
    );
    assert_eq!(d.client(1).overhead, gib(40));
}

#[test]
fn one_that_uses_its_managed_memory_keeps_it_until_its_turn_is_over() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    d.job(2, spec(), 0);
    managed(&mut d, 1, 60);
    d.pass_using(2 * SECOND, &[1]);
    d.alloc(2, 60);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass_using(6 * SECOND, &[1]);
    let (_, _, depth, reason) = d.order_to(1);
    assert_eq!(
        (depth, reason),
        (Depth::Evict, ReclaimReason::TurnEnded { client: ClientId(2) })
    );
}

#[test]
fn an_allocation_is_served_by_the_managed_memory_of_the_same_program() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    managed(&mut d, 1, 95);
    d.touch(1);
    let ask = d.alloc(1, 10);
    assert_eq!(d.denied(ask), None, "{:?}", d.last);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!(
        (bytes, depth, reason),
        (gib(6), Depth::Beside, ReclaimReason::Own)
    );
    // As it goes, in steps; nothing is ordered twice.
    managed(&mut d, 1, 92);
    assert_eq!((d.granted(1, ask), d.orders().len()), (gib(0), 0), "{:?}", d.last);
    managed(&mut d, 1, 89);
    assert_eq!(d.granted(1, ask), gib(10), "{:?}", d.last);
    d.done(1, order, Outcome::Done, 0);
    assert_eq!(d.client(1).lease, gib(10));
}

#[test]
fn others_that_idle_go_before_what_is_its_own() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    d.job(2, spec(), 10);
    managed(&mut d, 1, 85);
    d.pass_using(2 * SECOND, &[1]);
    d.alloc(1, 20);
    let mut orders: Vec<_> = d.orders().into_iter().map(|o| (o.0, o.2, o.3)).collect();
    orders.sort_by_key(|o| o.0);
    assert_eq!(orders, [(1, gib(6), Depth::Beside), (2, gib(10), Depth::Evict)]);
}

#[test]
fn two_that_fill_the_card_with_managed_memory_are_both_served() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    d.job(2, spec(), 0);
    managed(&mut d, 1, 58);
    managed(&mut d, 2, 40);
    d.pass(2 * SECOND);
    let first = d.alloc(1, 10);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(10));
    let second = d.alloc(2, 10);
    managed(&mut d, 2, 30);
    let mut granted = (d.granted(1, first), d.granted(2, second));
    d.done(2, order, Outcome::Done, 0);
    for round in 0..4 {
        let orders = d.orders();
        let Some((to, order, bytes, ..)) = orders.first().copied() else {
            break;
        };
        let left = if to == 1 { 58 } else { 30 } - bytes.get().div_ceil(1 << 30);
        managed(&mut d, to, left);
        granted.0 = granted.0.max(d.granted(1, first));
        granted.1 = granted.1.max(d.granted(2, second));
        d.done(to, order, Outcome::Done, 0);
        assert!(round < 3, "{granted:?}");
    }
    assert_eq!(granted, (gib(10), gib(10)));
}

#[test]
fn a_pause_takes_managed_memory_off_the_card_and_keeps_it_off() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    managed(&mut d, 1, 60);
    d.tell(Event::Pause { task: TaskId(1) });
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (Bytes::MAX, Depth::Evict));
    managed(&mut d, 1, 0);
    d.done(1, order, Outcome::Done, 0);
    let left = gib(1);
    let told = Action::PauseDone {
        task: TaskId(1),
        left,
    };
    assert!(d.last.contains(&told), "{:?}", d.last);
    managed(&mut d, 1, 8);
    assert_eq!(d.order_to(1).1, Bytes::MAX, "it came back without a lease");
}

#[test]
fn what_is_said_to_be_loose_and_is_not_is_left_alone_for_a_while() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    managed(&mut d, 1, 95);
    let ask = d.alloc(1, 10);
    let (order, ..) = d.order_to(1);
    d.done(1, order, Outcome::NothingLeft, 0);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    // It is asked again, every few seconds, and the allocation is refused in the end.
    let mut orders = 0;
    let mut denied = None;
    for _ in 0..700 {
        d.pass(SECOND);
        denied = denied.or(d.denied(ask));
        for (to, order, ..) in d.orders() {
            orders += 1;
            d.done(to, order, Outcome::NothingLeft, 0);
        }
    }
    assert!(orders < 200, "{orders}");
    assert!(denied.is_some());
}

#[test]
fn a_limit_below_what_is_cached_says_so() {
    let mut d = Desk::new(100);
    d.job(1, limit(80), 60);
    d.usage(
        1,
        Usage {
            resident: gib(60),
            cached: gib(40),
            ..Usage::default()
        },
    );
    d.tell(Event::TaskChanged {
        task: TaskId(1),
        spec: limit(30),
        force: false,
    });
    let why = d.last.iter().find_map(|a| match a {
        Action::ChangeRefused { why, .. } => Some(why.to_string()),
        _ => None,
    });
    let text = "the task has 20 GiB live and 40 GiB cached on gpu0, more than the new limit of 30 GiB";
    assert_eq!(why.as_deref(), Some(text));
}
