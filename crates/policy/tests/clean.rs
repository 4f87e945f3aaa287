//! What leaves without a copy goes before what has to be copied, among those who may be taken from alike.

mod common;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, Priority};

/// A client's account: so much on the card, and so much of it as host memory has it.
fn account(d: &mut Desk, client: u64, resident: u64, clean: u64) {
    let usage = Usage {
        resident: gib(resident),
        clean: gib(clean),
        ..Usage::default()
    };
    d.usage(client, usage);
}

/// The orders of the last answers, without their numbers, and their grounds.
fn taken(d: &Desk) -> Vec<(u64, Bytes, String)> {
    let order = |a: &Action| match a {
        Action::Reclaim {
            client,
            bytes,
            depth: Depth::Evict,
            grounds,
            ..
        } => Some((client.0, *bytes, grounds.to_string())),
        _ => None,
    };
    d.last.iter().filter_map(order).collect()
}

#[test]
fn clean_memory_of_the_idle_goes_before_what_has_to_be_copied() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.pass(3 * SECOND);
    d.job(2, spec(), 40);
    account(&mut d, 1, 40, 0);
    account(&mut d, 2, 40, 25);
    d.pass(5 * SECOND);
    d.job(3, spec(), 0);
    d.alloc(3, 40);
    assert_eq!(
        taken(&d),
        [(2, gib(20), "clean, idle 5.0 s, burst, priority normal".into())],
        "though the other has idled longer"
    );
}

#[test]
fn what_is_not_clean_follows_in_the_old_order() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.pass(3 * SECOND);
    d.job(2, spec(), 40);
    account(&mut d, 1, 40, 0);
    account(&mut d, 2, 40, 25);
    d.pass(5 * SECOND);
    d.job(3, spec(), 0);
    d.alloc(3, 60);
    let orders = taken(&d);
    let bytes: Vec<_> = orders.iter().map(|o| (o.0, o.1)).collect();
    assert_eq!(bytes, [(2, gib(25)), (1, gib(15))]);
    assert!(orders[0].2.starts_with("clean, idle 5.0 s"), "{orders:?}");
    assert!(orders[1].2.starts_with("idle 8.0 s"), "{orders:?}");

    // One that gives clean and other bytes has one order for both.
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.job(2, spec(), 40);
    account(&mut d, 2, 40, 25);
    d.pass(5 * SECOND);
    d.touch(1);
    d.job(3, spec(), 0);
    d.alloc(3, 55);
    assert_eq!(
        taken(&d),
        [(2, gib(35), "idle 5.0 s, burst, priority normal".into())]
    );
}

#[test]
fn a_priority_counts_before_the_cost_of_a_copy() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::High), 40);
    d.job(2, priority(Priority::Low), 40);
    account(&mut d, 1, 40, 40);
    account(&mut d, 2, 40, 0);
    d.pass(5 * SECOND);
    d.job(3, spec(), 0);
    d.alloc(3, 70);
    let bytes: Vec<_> = taken(&d).iter().map(|o| (o.0, o.1)).collect();
    assert_eq!(bytes, [(2, gib(40)), (1, gib(10))]);
}

#[test]
fn what_nobody_uses_goes_before_what_is_clean() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.job(2, spec(), 40);
    d.pass(5 * SECOND);
    account(&mut d, 1, 30, 0);
    account(&mut d, 2, 40, 40);
    d.job(3, spec(), 0);
    d.alloc(3, 45);
    let orders: Vec<_> = d.orders().iter().map(|o| (o.0, o.2, o.3)).collect();
    assert_eq!(
        orders,
        [(1, gib(10), Depth::Unused), (2, gib(15), Depth::Evict)],
        "{:?}",
        d.last
    );
}

#[test]
fn what_is_clean_is_counted_down_as_it_leaves() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.job(2, spec(), 50);
    account(&mut d, 1, 50, 10);
    account(&mut d, 2, 50, 5);
    d.pass(2 * SECOND);
    d.job(3, spec(), 0);
    d.alloc(3, 10);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(10));
    d.obey(1, order, 10);
    // It has not said so yet, and has nothing more that is clean.
    d.job(4, spec(), 0);
    d.alloc(4, 5);
    assert_eq!(d.order_to(2).1, gib(5));
}

/// A turn lasts so many times the copying that ends it: of what is clean nothing is copied.
#[test]
fn a_turn_of_clean_memory_is_shorter() {
    for (clean, turn) in [(0, 20), (50, 10)] {
        let mut d = Desk::new(100);
        d.job(1, spec(), 50);
        d.job(2, spec(), 50);
        d.pass(2 * SECOND);
        d.touch(2);
        // The first one's memory is taken, so that it waits for the other's turn to end.
        d.alloc(2, 50);
        let (order, ..) = d.order_to(1);
        d.obey(1, order, 50);
        account(&mut d, 2, 100, clean);
        d.restore(1, 50);
        let mut passed = 0;
        while taken(&d).is_empty() {
            d.pass_using(SECOND, &[2]);
            passed += 1;
            assert!(passed < 60, "its turn never ends");
        }
        assert!((turn - 3..=turn + 2).contains(&passed), "{passed} s of {turn}");
        let clean = taken(&d)[0].2.starts_with("clean, running");
        assert_eq!(clean, turn == 10, "{:?}", d.last);
    }
}
