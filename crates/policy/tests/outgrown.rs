//! Sums in which something counts that should not: what was evicted of a program must come back all the same.

mod common;

use common::*;
use ebb_policy::*;
use ebb_units::Bytes;

fn with(resident: u64, evicted: u64, overhead: u64) -> Usage {
    Usage {
        resident: gib(resident),
        evicted: gib(evicted),
        overhead: gib(overhead),
        ..Usage::default()
    }
}

/// A task at its limit, 5 of 50 GiB its context; evicted for another one. What it has away.
fn evicted(d: &mut Desk) -> u64 {
    d.job(1, limit(50), 45);
    d.usage(1, with(45, 0, 5));
    d.job(2, spec(), 50);
    d.pass_using(2 * SECOND, &[2]);
    d.alloc(2, 45);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(45));
    d.obey(1, order, 45);
    d.usage(1, with(0, 45, 5));
    45
}

#[test]
fn what_was_evicted_comes_back_although_the_driver_took_more_meanwhile() {
    let mut d = Desk::new(100);
    let away = evicted(&mut d);
    // NVML sees 2 GiB more of it: code that was loaded.
    d.usage(1, with(0, away, 7));
    d.tell(Event::ClientLeft {
        client: ebb_units::ClientId(2),
        kept: Bytes::ZERO,
    });
    let ask = d.restore(1, away);
    assert_eq!(d.granted(1, ask), gib(45), "{:?}", d.last);
    d.restored(1, away);
    d.usage(1, with(45, 0, 7));
    d.pass_using(2 * SECOND, &[1]);
    assert!(d.orders().is_empty(), "what lives is not taken for it");
    let more = d.alloc(1, 1);
    assert!(
        matches!(d.denied(more), Some((DenyReason::OverLimit { .. }, true))),
        "{:?}",
        d.last
    );
}

#[test]
fn a_limit_lowered_by_force_keeps_it_away() {
    let mut d = Desk::new(100);
    let away = evicted(&mut d);
    d.tell(Event::TaskChanged {
        task: ebb_units::TaskId(1),
        spec: limit(20),
        force: true,
    });
    d.tell(Event::ClientLeft {
        client: ebb_units::ClientId(2),
        kept: Bytes::ZERO,
    });
    let ask = d.restore(1, away);
    assert_eq!(d.granted(1, ask), Bytes::ZERO, "{:?}", d.last);
    d.tell(Event::TaskChanged {
        task: ebb_units::TaskId(1),
        spec: limit(50),
        force: false,
    });
    assert_eq!(d.granted(1, ask), gib(45), "{:?}", d.last);
}

/// Chunks are larger than what was ordered of them: lease that stays with a client whose bytes are away is not missing a second time.
#[test]
fn what_a_client_has_lease_for_is_not_gathered_again() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.usage(1, with(0, 40, 5));
    d.tell(Event::Returned {
        client: ebb_units::ClientId(1),
        bytes: gib(40),
    });
    d.job(2, spec(), 90);
    d.usage(2, with(90, 0, 0));
    d.pass(2 * SECOND);
    let back = d.restore(1, 40);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(35));
    // 64 GiB leave, and the lease of 35 of them is given back.
    d.progress(2, order, 35);
    assert_eq!(d.granted(1, back), gib(35), "{:?}", d.last);
    d.usage(2, with(26, 64, 0));
    d.done(2, order, Outcome::Done, 64);
    d.restored(1, 40);
    d.usage(1, with(40, 0, 5));
    d.pass(10 * SECOND);
    let ask = d.restore(2, 35);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(35));
    d.progress(1, order, 35);
    assert_eq!(d.granted(2, ask), gib(35), "{:?}", d.last);
}
