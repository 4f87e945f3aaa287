//! An idle release that is shorter than the time after which others count a client as idle.

mod common;

use std::time::Duration;

use common::*;
use ebb_policy::*;
use ebb_units::ClientId;

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn released_after(wait: Duration) -> TaskSpec {
    TaskSpec {
        idle_release: Some(wait),
        ..spec()
    }
}

#[test]
fn it_is_released_after_its_own_time_and_not_before() {
    let mut d = Desk::new(100);
    assert!(config().idle_after >= ms(1000));
    d.job(1, released_after(ms(300)), 50);
    d.pass(2 * SECOND);
    let (order, _, depth, reason) = d.order_to(1);
    assert_eq!((depth, reason), (Depth::Evict, ReclaimReason::IdleRelease));
    d.obey(1, order, 50);
    let back = d.restore(1, 50);
    assert_eq!(d.granted(1, back), gib(50));
    d.restored(1, 50);
    d.pass_using(5 * SECOND, &[1]);
    assert!(d.orders().is_empty(), "it works");
    d.touch(1);
    d.pass(ms(299));
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass(ms(1));
    let (order, ..) = d.order_to(1);
    // Others still count it as one that works; that does not call the order off, and use of it does.
    d.pass(ms(100));
    let off = Action::CancelReclaim {
        client: ClientId(1),
        order,
    };
    assert!(!d.last.contains(&off), "{:?}", d.last);
    d.progress(1, order, 10);
    let back = d.restore(1, 10);
    assert!(d.last.contains(&off), "{:?}", d.last);
    assert_eq!(d.granted(1, back), gib(10));
}

#[test]
fn no_time_is_shorter_than_what_it_takes_to_hear_of_use() {
    let mut d = Desk::new(100);
    d.job(1, released_after(ms(1)), 50);
    d.pass_using(20 * SECOND, &[1]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass(ms(200));
    d.order_to(1);
}
