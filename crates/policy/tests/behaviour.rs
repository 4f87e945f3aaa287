//! One test a rule, named after the behaviour.

mod common;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

#[test]
fn free_room_is_granted_at_once() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    let ask = d.alloc(1, 40);
    assert_eq!(d.granted(1, ask), gib(40));
    assert_eq!(d.free(), gib(0));
    assert!(d.orders().is_empty());
}

#[test]
fn an_idle_client_gives_only_what_is_needed() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 80);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 50);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(30), Depth::Evict));
    assert_eq!(reason, ReclaimReason::Demand { client: ClientId(2) });
    d.progress(1, order, 20);
    assert_eq!(d.granted(2, ask), gib(0), "an allocation is granted whole");
    d.progress(1, order, 10);
    assert_eq!(d.granted(2, ask), gib(50));
    assert_eq!(d.client(1).lease, gib(50));
}
