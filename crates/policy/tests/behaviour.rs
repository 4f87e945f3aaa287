//! One test a rule, named after the behaviour.

mod common;

use std::time::Duration;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

fn demand(client: u64) -> ReclaimReason {
    ReclaimReason::Demand {
        client: ClientId(client),
    }
}

fn turn_ended(client: u64) -> ReclaimReason {
    ReclaimReason::TurnEnded {
        client: ClientId(client),
    }
}

fn no_release(request: u64) -> TaskSpec {
    TaskSpec {
        request: gib(request),
        idle_release: None,
        ..spec()
    }
}

// ---- Free room, unused lease, the idle.

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
fn who_stops_is_shown_as_idle_in_time() {
    let mut d = Desk::new(10);
    d.job(1, no_release(0), 5);
    d.touch(1);
    assert_eq!(d.arbiter.next_deadline(), Some(d.now.after(SECOND)));
    d.pass(SECOND);
    assert_eq!(d.arbiter.next_deadline(), None, "and then there is nothing to do");
}

#[test]
fn asking_for_nothing_is_granted() {
    let mut d = Desk::new(10);
    d.job(1, spec(), 10);
    let ask = d.alloc(1, 0);
    assert!(matches!(d.last[0], Action::Grant { ask: a, complete: true, .. } if a == ask));
}

#[test]
fn an_idle_client_gives_only_what_is_needed() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 80);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 50);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!((bytes, depth, reason), (gib(30), Depth::Evict, demand(2)));
    d.progress(1, order, 20);
    assert_eq!(d.granted(2, ask), gib(0), "an allocation is granted whole");
    d.progress(1, order, 10);
    assert_eq!(d.granted(2, ask), gib(50));
    assert_eq!(d.client(1).lease, gib(50));
}

#[test]
fn unused_lease_is_taken_without_eviction_even_from_an_active_client() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 90);
    d.pass_using(2 * SECOND, &[1]);
    d.usage(
        1,
        Usage {
            resident: gib(80),
            cached: gib(15),
            ..Usage::default()
        },
    );
    assert_eq!(d.client(1).unused, gib(25));
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 30);
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(20), Depth::Unused));
    d.obey(1, order, 20);
    assert_eq!(d.granted(2, ask), gib(30));
}

#[test]
fn lease_granted_a_moment_ago_is_not_called_unused() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 90);
    d.usage(1, Usage::default());
    assert_eq!(d.client(1).unused, gib(0));
}

#[test]
fn lower_priorities_go_first_then_the_longest_idle() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::Normal), 20);
    d.job(2, priority(Priority::Low), 20);
    d.job(3, priority(Priority::Normal), 20);
    d.job(4, priority(Priority::High), 20);
    d.pass(SECOND);
    d.touch(2);
    d.touch(1);
    d.pass(2 * SECOND);
    d.job(5, spec(), 0);
    d.alloc(5, 90);
    let order: Vec<_> = d.orders().iter().map(|o| (o.0, o.2)).collect();
    // Ids, not times, order the answers; the amounts tell who came last.
    assert_eq!(order, [(2, gib(20)), (3, gib(20)), (1, gib(20)), (4, gib(10))]);
}

#[test]
fn an_active_client_within_its_request_is_never_taken_from() {
    let mut d = Desk::new(100);
    d.job(1, request(60), 60);
    d.job(2, spec(), 40);
    d.join(3, 2);
    d.pass_using(SECOND, &[1, 2]);
    d.alloc(3, 30);
    for _ in 0..100 {
        d.pass_using(SECOND, &[1, 2]);
        assert!(d.orders().iter().all(|o| o.0 != 1), "{:?}", d.last);
    }
    assert_eq!(d.client(1).lease, gib(60));
}

#[test]
fn a_request_is_served_at_once_out_of_bursts() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.job(2, request(40), 0);
    let ask = d.alloc(2, 40);
    let (order, bytes, _, reason) = d.order_to(1);
    assert_eq!(bytes, gib(40));
    assert_eq!(reason, ReclaimReason::Guarantee { client: ClientId(2) });
    d.obey(1, order, 40);
    assert_eq!(d.granted(2, ask), gib(40));
}

#[test]
fn an_idle_request_is_lent_only_with_idle_release() {
    let mut d = Desk::new(100);
    d.job(1, request(80), 80);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    d.alloc(2, 50);
    assert_eq!(d.order_to(1).1, gib(30));

    let mut d = Desk::new(100);
    d.job(1, no_release(80), 90);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 50);
    assert!(matches!(d.denied(ask), Some((DenyReason::NeverFits { usable, .. }, true)) if usable == gib(20)));
    // What is above the request is lent all the same.
    d.alloc(2, 15);
    assert_eq!(d.order_to(1).1, gib(5));
}

#[test]
fn a_lent_request_comes_back_ahead_of_bursts() {
    let mut d = Desk::new(100);
    d.job(1, request(60), 60);
    d.pass(2 * SECOND);
    d.job(2, spec(), 40);
    let more = d.alloc(2, 60);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 60);
    assert_eq!(d.granted(2, more), gib(60));
    // A third one waits for its turn; the owner of the request does not.
    d.job(3, spec(), 0);
    d.alloc(3, 50);
    assert!(d.orders().is_empty());
    let back = d.restore(1, 60);
    let (order, bytes, _, reason) = d.order_to(2);
    assert_eq!(bytes, gib(60));
    assert_eq!(reason, ReclaimReason::Guarantee { client: ClientId(1) });
    d.obey(2, order, 60);
    assert_eq!(d.granted(1, back), gib(60));
}

// ---- Turns.

#[test]
fn two_that_do_not_fit_take_turns() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 75);
    d.pass_using(20 * SECOND, &[1]);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 75);
    // One that ran for long gives way at once.
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!((bytes, depth, reason), (gib(50), Depth::Evict, turn_ended(2)));
    d.obey(1, order, 50);
    assert_eq!(d.granted(2, ask), gib(75));
    let back = d.restore(1, 50);
    // 50 GiB out and 50 in at 50 GiB/s make two seconds; ten times that is a turn.
    d.pass_using(19 * SECOND, &[2]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass_using(2 * SECOND, &[2]);
    let (order, bytes, _, reason) = d.order_to(2);
    assert_eq!((bytes, reason), (gib(50), turn_ended(1)));
    d.obey(2, order, 50);
    assert_eq!(d.granted(1, back), gib(50));
}

#[test]
fn a_restore_is_handed_over_piece_by_piece() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 75);
    d.pass(2 * SECOND);
    d.job(2, spec(), 25);
    let ask = d.alloc(2, 50);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 50);
    assert_eq!(d.granted(2, ask), gib(50));
    d.pass(2 * SECOND);
    let back = d.restore(1, 50);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(50));
    for _ in 0..5 {
        d.progress(2, order, 10);
        assert_eq!(d.granted(1, back), gib(10));
    }
    assert_eq!(d.client(1).state, ClientState::Restoring);
    d.restored(1, 50);
    assert_eq!(d.client(1).state, ClientState::Active);
    assert_eq!(d.client(1).restores, 1);
}

#[test]
fn only_one_client_gathers() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass(2 * SECOND);
    for id in [2, 3] {
        d.task(id, spec());
        d.tell(Event::ClientJoined {
            client: ClientId(id),
            task: TaskId(id),
            device: GPU,
            lease: Bytes::ZERO,
            evicted: gib(60),
            overhead: Bytes::ZERO,
        });
    }
    let second = d.restore(2, 60);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(60));
    let third = d.restore(3, 60);
    d.progress(1, order, 40);
    assert_eq!((d.granted(2, second), d.granted(3, third)), (gib(40), gib(0)));
    d.obey(1, order, 20);
    assert_eq!((d.granted(2, second), d.granted(3, third)), (gib(20), gib(0)));
    // The other 40 GiB of the first one would not do for the third.
    assert!(d.orders().is_empty(), "{:?}", d.last);
    assert_eq!(d.client(3).lease, gib(0));
}

#[test]
fn nothing_is_taken_for_what_cannot_be_served_now() {
    let mut d = Desk::new(100);
    d.job(1, request(50), 50);
    d.job(2, spec(), 20);
    d.pass_using(2 * SECOND, &[1]);
    d.task(3, spec());
    d.tell(Event::ClientJoined {
        client: ClientId(3),
        task: TaskId(3),
        device: GPU,
        lease: Bytes::ZERO,
        evicted: gib(60),
        overhead: Bytes::ZERO,
    });
    // 30 free and 20 idle make 50; 10 are missing while the first one uses its request.
    let back = d.restore(3, 60);
    assert!(
        d.orders().is_empty() && d.granted(3, back).is_zero(),
        "{:?}",
        d.last
    );
    assert!(d.client(3).why.contains("50 GiB"), "{}", d.client(3).why);
    d.pass(2 * SECOND);
    assert_eq!(
        d.orders().iter().map(|o| o.2).sum::<Bytes>(),
        gib(30),
        "{:?}",
        d.last
    );
}

#[test]
fn who_has_its_turn_gets_what_it_needs_to_go_on_from_who_waits_for_its_end() {
    let mut d = Desk::new(252);
    // As if it had run for longer, and so stood behind.
    d.job(1, spec(), 180);
    d.pass_using(200 * SECOND, &[1]);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 180);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 120);
    assert_eq!(d.granted(2, ask), gib(180));
    d.restore(1, 120);
    d.pass_using(4 * SECOND, &[2]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    // The card is full to 12 GiB: it goes on with these, and with more from the one that waits.
    let more = d.alloc(2, 20);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!((bytes, depth, reason), (gib(8), Depth::Evict, demand(2)));
    d.obey(1, order, 30);
    assert_eq!(d.granted(2, more), gib(20));
    // Its turn still ends.
    d.pass_using(200 * SECOND, &[2]);
    assert_eq!((d.orders()[0].0, d.orders()[0].4), (2, turn_ended(1)));
}

#[test]
fn a_higher_priority_goes_first_after_the_shortest_turn() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::Low), 75);
    d.pass_using(Duration::from_millis(500), &[1]);
    d.job(2, priority(Priority::High), 0);
    d.alloc(2, 75);
    assert!(d.orders().is_empty());
    d.pass_using(Duration::from_millis(600), &[1]);
    assert_eq!(d.order_to(1).3, turn_ended(2));

    // One of the same priority waits for a turn that pays for the copying.
    let mut d = Desk::new(100);
    d.job(1, spec(), 75);
    d.job(2, spec(), 0);
    d.alloc(2, 75);
    d.pass_using(Duration::from_millis(9900), &[1]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass_using(Duration::from_millis(200), &[1]);
    assert_eq!(d.order_to(1).3, turn_ended(2));
}

#[test]
fn a_turn_is_worth_the_copying_that_it_was_bought_with() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.pass(2 * SECOND);
    d.job(2, spec(), 40);
    let ask = d.alloc(2, 60);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 60);
    assert_eq!(d.granted(2, ask), gib(60));
    // The second one paid for 60 GiB out, 1.2 seconds: a small third one does not send it away after one.
    d.job(3, spec(), 0);
    d.alloc(3, 1);
    d.pass_using(11 * SECOND, &[2]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass_using(2 * SECOND, &[2]);
    assert_eq!(d.order_to(2).1, gib(1));
}

#[test]
fn what_is_being_copied_in_is_let_arrive() {
    let slow = PolicyConfig {
        out_rate: 5 << 30,
        in_rate: 5 << 30,
        ..config()
    };
    let mut d = Desk::with(slow, 100);
    d.job(1, priority(Priority::Low), 50);
    d.pass(60 * SECOND);
    let (order, ..) = d.order_to(1);
    d.progress(1, order, 50);
    d.tell(Event::ReclaimDone {
        client: ClientId(1),
        order,
        outcome: Outcome::Done,
        copied: gib(50),
        nanos: 0,
    });
    let back = d.restore(1, 50);
    assert_eq!(d.granted(1, back), gib(50));
    d.job(2, priority(Priority::High), 0);
    d.alloc(2, 75);
    // The copy takes ten seconds. The shortest turn begins after it.
    d.pass(10 * SECOND);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.tell(Event::Restored {
        client: ClientId(1),
        copied: gib(50),
        nanos: 0,
    });
    d.pass_using(Duration::from_millis(900), &[1]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass_using(Duration::from_millis(200), &[1]);
    assert_eq!(d.order_to(1).3, turn_ended(2));
}

#[test]
fn orders_under_way_count_against_what_a_request_leaves() {
    let mut d = Desk::new(100);
    d.job(1, no_release(50), 40);
    d.join(2, 1);
    let ask = d.alloc(2, 40);
    assert_eq!(d.granted(2, ask), gib(40));
    d.pass(2 * SECOND);
    d.job(3, spec(), 0);
    // The task has 30 above its request; 20 of them are ordered. The second ask of the same client waits its time.
    let first = d.alloc(3, 40);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(20));
    let second = d.alloc(3, 25);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.obey(1, order, 20);
    assert_eq!((d.granted(3, first), d.granted(3, second)), (gib(40), gib(0)));
    // 10 are left above the request: not enough for the second.
    assert!(d.orders().is_empty(), "{:?}", d.last);
    let third = d.alloc(3, 10);
    assert!(d.orders().is_empty(), "the oldest comes first: {:?}", d.last);
    d.tell(Event::AskCancelled {
        client: ClientId(3),
        ask: second,
    });
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(10));
    d.obey(1, order, 10);
    assert_eq!(d.granted(3, third), gib(10));
}

#[test]
fn early_turns_of_a_higher_priority_wait_until_the_copying_is_paid_for() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::Low), 75);
    d.pass_using(2 * SECOND, &[1]);
    d.job(2, priority(Priority::High), 0);
    d.alloc(2, 75);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 50);
    d.pass_using(2 * SECOND, &[2]);
    // The one that goes first idles for a moment; the other one comes back.
    d.pass(2 * SECOND);
    d.restore(1, 50);
    let (order, ..) = d.order_to(2);
    d.obey(2, order, 50);
    d.restored(1, 50);
    // Three seconds of copying are worth thirty of work; a full turn takes twenty.
    d.restore(2, 50);
    d.pass_using(19 * SECOND, &[1]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass_using(2 * SECOND, &[1]);
    assert_eq!(d.order_to(1).3, turn_ended(2));
}

#[test]
fn a_request_takes_over_what_is_being_gathered_for_a_burst() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.job(2, spec(), 40);
    d.pass(2 * SECOND);
    d.touch(2);
    let more = d.alloc(2, 40);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 40);
    assert_eq!(d.granted(2, more), gib(40));
    d.pass(2 * SECOND);
    let back = d.restore(1, 40);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(40));
    d.progress(2, order, 10);
    assert_eq!(d.granted(1, back), gib(10));
    d.job(3, request(30), 0);
    let own = d.alloc(3, 30);
    for _ in 0..2 {
        d.progress(2, order, 10);
        assert_eq!((d.granted(1, back), d.granted(3, own)), (gib(0), gib(0)));
    }
    d.progress(2, order, 10);
    assert_eq!(d.granted(3, own), gib(30));
    // The first one goes on to be served from the rest.
    d.done(2, order, Outcome::Done, 40);
    let (_, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(30));
}

#[test]
fn idling_earns_no_credit() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 75);
    d.job(2, no_release(0), 25);
    d.pass_using(1000 * SECOND, &[1]);
    // The second one did nothing for long; it may not run a thousand seconds ahead now.
    let more = d.alloc(2, 50);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 50);
    assert_eq!(d.granted(2, more), gib(50));
    d.restore(1, 50);
    d.pass_using(21 * SECOND, &[2]);
    assert_eq!(d.order_to(2).3, turn_ended(1));
}

// ---- Allocations that wait.

#[test]
fn beyond_the_limit_is_denied_at_once_and_for_good() {
    let mut d = Desk::new(100);
    d.job(1, limit(50), 50);
    let ask = d.ask(1, AskKind::Alloc, Bytes(1), true);
    let Some((
        DenyReason::OverLimit {
            asked,
            charged,
            limit,
        },
        true,
    )) = d.denied(ask)
    else {
        panic!("{:?}", d.last);
    };
    assert_eq!((asked, charged, limit), (Bytes(1), gib(50), gib(50)));
}

#[test]
fn overhead_counts_against_the_limit() {
    let mut d = Desk::new(100);
    d.job(1, limit(50), 40);
    d.usage(
        1,
        Usage {
            resident: gib(40),
            overhead: gib(5),
            ..Usage::default()
        },
    );
    let ask = d.alloc(1, 6);
    assert!(matches!(
        d.denied(ask),
        Some((DenyReason::OverLimit { .. }, true))
    ));
    let ask = d.alloc(1, 5);
    assert_eq!(d.granted(1, ask), gib(5));
}

#[test]
fn evicted_bytes_count_against_the_limit() {
    let mut d = Desk::new(100);
    d.job(1, limit(50), 40);
    d.pass(61 * SECOND);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 40);
    assert_eq!((d.client(1).lease, d.client(1).evicted), (gib(0), gib(40)));
    let ask = d.alloc(1, 11);
    assert!(d.denied(ask).is_some_and(|(_, last)| last));
    let ask = d.alloc(1, 10);
    assert_eq!(d.granted(1, ask), gib(10));
}

/// HAMi-core PR#273: check and add are one step across the processes of a task.
#[test]
fn two_processes_cannot_pass_their_limit_together() {
    let mut d = Desk::new(100);
    d.job(9, spec(), 95);
    d.job(1, limit(10), 0);
    d.join(2, 1);
    // Both wait for the same room.
    let (a, b) = (d.alloc(1, 6), d.alloc(2, 6));
    assert_eq!((d.granted(1, a), d.granted(2, b)), (gib(0), gib(0)));
    d.tell(Event::ClientLeft {
        client: ClientId(9),
        kept: Bytes::ZERO,
    });
    assert_eq!(d.granted(1, a) + d.granted(2, b), gib(6));
    assert_eq!(
        d.last
            .iter()
            .filter(|a| matches!(a, Action::Deny { last: true, .. }))
            .count(),
        1
    );
}

#[test]
fn unused_lease_of_a_sibling_makes_room_under_the_limit() {
    let mut d = Desk::new(100);
    d.job(1, limit(50), 40);
    d.join(2, 1);
    d.pass_using(2 * SECOND, &[1]);
    d.usage(
        1,
        Usage {
            resident: gib(40),
            cached: gib(30),
            ..Usage::default()
        },
    );
    let ask = d.alloc(2, 20);
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(10), Depth::Unused));
    d.obey(1, order, 10);
    assert_eq!(d.granted(2, ask), gib(20));
}

#[test]
fn what_never_fits_is_denied_at_once_and_for_good() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    let ask = d.alloc(1, 101);
    assert!(
        matches!(d.denied(ask), Some((DenyReason::NeverFits { footprint, usable }, true))
        if footprint == gib(101) && usable == gib(100))
    );
    // Nor does it beside what a neighbour never lends, used or not.
    d.job(2, no_release(50), 10);
    let ask = d.alloc(1, 51);
    assert!(matches!(d.denied(ask), Some((DenyReason::NeverFits { usable, .. }, true)) if usable == gib(50)));
}

#[test]
fn what_a_neighbour_lends_when_it_idles_is_waited_for() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    d.job(2, request(50), 50);
    d.touch(2);
    let ask = d.alloc(1, 51);
    let answers = (d.denied(ask), d.granted(1, ask));
    assert_eq!(answers, (None, gib(0)), "it may fit later");
    d.pass(2 * SECOND);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(1));
    d.obey(2, order, 1);
    assert_eq!(d.granted(1, ask), gib(51));
    // A pause lends everything, for as long as it lasts: no reason to say never.
    let mut d = Desk::new(100);
    d.job(1, spec(), 0);
    d.job(2, no_release(50), 10);
    d.tell(Event::Pause { task: TaskId(2) });
    let ask = d.alloc(1, 95);
    assert_eq!(d.denied(ask), None);
}

#[test]
fn a_short_ask_gets_an_early_answer_and_a_long_one_waits() {
    let mut d = Desk::new(100);
    d.job(1, request(100), 100);
    d.job(2, spec(), 0);
    d.pass_using(2 * SECOND, &[1]);
    // The neighbour goes idle later on, so this is no case of "never".
    d.tell(Event::TaskChanged {
        task: TaskId(1),
        spec: spec(),
        force: false,
    });
    d.touch(1);
    let short = d.ask(2, AskKind::Alloc, gib(90), false);
    d.tell(Event::AskCancelled {
        client: ClientId(2),
        ask: short,
    });
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.job(2, spec(), 0);
    d.touch(1);
    let short = d.ask(2, AskKind::Alloc, gib(90), false);
    d.pass_using(Duration::from_millis(1900), &[1]);
    assert_eq!(d.denied(short), None);
    d.pass_using(Duration::from_millis(200), &[1]);
    assert_eq!(d.denied(short), Some((DenyReason::TimedOut, false)));

    // The longest wait needs a neighbour that can never be moved.
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.usage(
        1,
        Usage {
            resident: gib(100),
            pinned: gib(100),
            ..Usage::default()
        },
    );
    d.job(2, spec(), 0);
    let long = d.alloc(2, 90);
    d.pass_using(599 * SECOND, &[1]);
    assert_eq!(d.denied(long), None);
    d.pass_using(2 * SECOND, &[1]);
    assert_eq!(d.denied(long), Some((DenyReason::TimedOut, false)));
}

#[test]
fn a_short_ask_that_is_being_served_is_not_cut_off() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let short = d.ask(2, AskKind::Alloc, gib(90), false);
    let (order, ..) = d.order_to(1);
    d.pass(4 * SECOND);
    assert_eq!(d.denied(short), None);
    d.obey(1, order, 90);
    assert_eq!(d.granted(2, short), gib(90));
}

#[test]
fn two_growing_clients_do_not_deadlock() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.job(2, spec(), 50);
    let a = d.alloc(1, 30);
    let b = d.alloc(2, 30);
    assert!(d.orders().is_empty());
    // Both stand still; after the idle time one of them is picked.
    d.pass(SECOND);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(30));
    d.obey(2, order, 30);
    assert_eq!((d.granted(1, a), d.granted(2, b)), (gib(30), gib(0)));
    // Once the first one is done, the second gets it all.
    d.pass_using(SECOND, &[1]);
    d.tell(Event::TaskRemoved { task: TaskId(1) });
    assert_eq!(d.granted(2, b), gib(30));
    let back = d.restore(2, 30);
    assert_eq!(d.granted(2, back), gib(30));
}

#[test]
fn an_ask_that_is_cancelled_takes_its_orders_along() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 50);
    let (order, ..) = d.order_to(1);
    d.tell(Event::AskCancelled {
        client: ClientId(2),
        ask,
    });
    assert!(d.last.contains(&Action::CancelReclaim {
        client: ClientId(1),
        order
    }));
    d.progress(1, order, 10);
    d.done(1, order, Outcome::Done, 10);
    assert_eq!((d.free(), d.client(1).lease), (gib(10), gib(90)));
    assert_eq!(d.client(1).evicted, gib(10));
}

// ---- Idle release and refusals.

#[test]
fn an_idle_client_is_released_once() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.pass(59 * SECOND);
    assert!(d.orders().is_empty());
    d.pass(SECOND);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!(
        (bytes, depth, reason),
        (Bytes::MAX, Depth::Evict, ReclaimReason::IdleRelease)
    );
    assert_eq!(d.client(1).state, ClientState::Evicting);
    // 10 GiB cannot be moved.
    d.progress(1, order, 40);
    d.done(1, order, Outcome::Done, 40);
    assert_eq!(d.client(1).state, ClientState::Released);
    d.pass(1000 * SECOND);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    let back = d.restore(1, 40);
    assert_eq!(d.granted(1, back), gib(40));
    d.restored(1, 40);
    d.pass(61 * SECOND);
    assert_eq!(d.orders().len(), 1);
}

#[test]
fn an_active_client_is_not_released() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.pass_using(200 * SECOND, &[1]);
    assert!(d.orders().is_empty());
    d.job(2, no_release(0), 10);
    d.pass_using(200 * SECOND, &[1]);
    assert!(d.orders().is_empty(), "released although it is switched off");
}

#[test]
fn a_touch_calls_an_idle_release_off() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.pass(60 * SECOND);
    let (order, ..) = d.order_to(1);
    d.progress(1, order, 10);
    let back = d.restore(1, 10);
    assert!(d.last.contains(&Action::CancelReclaim {
        client: ClientId(1),
        order
    }));
    assert_eq!(d.granted(1, back), gib(10));
}

#[test]
fn a_busy_client_is_left_alone_for_longer_each_time() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.pass(60 * SECOND);
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let (order, ..) = d.order_to(1);
        d.done(1, order, Outcome::Busy, 0);
        assert_eq!(d.client(1).state, ClientState::Active, "busy counts as active");
        assert!(d.client(1).why.contains("Busy"));
        let before = d.now;
        while d.orders().is_empty() {
            d.now = d.arbiter.next_deadline().expect("it is tried again");
            d.tell(Event::Tick);
        }
        pauses.push(d.now.since(before).as_millis());
    }
    assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]);
}

#[test]
fn after_a_refusal_another_victim_is_found() {
    for outcome in [Outcome::Failed, Outcome::NoRoom, Outcome::Busy] {
        let mut d = Desk::new(100);
        d.job(1, spec(), 50);
        d.job(2, spec(), 50);
        d.pass(SECOND);
        d.touch(2);
        d.pass(2 * SECOND);
        d.job(3, spec(), 0);
        let ask = d.alloc(3, 40);
        let (order, ..) = d.order_to(1);
        d.progress(1, order, 4);
        d.done(1, order, outcome, 4);
        let (order, bytes, ..) = d.order_to(2);
        assert_eq!(bytes, gib(36), "{outcome:?}");
        d.obey(2, order, 36);
        assert_eq!(d.granted(3, ask), gib(40));
    }
}

#[test]
fn the_only_victim_is_tried_again_when_its_pause_is_over() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 40);
    let (order, ..) = d.order_to(1);
    d.done(1, order, Outcome::Busy, 0);
    assert!(d.orders().is_empty());
    let before = d.now;
    while d.orders().is_empty() {
        d.now = d.arbiter.next_deadline().expect("it is tried again");
        d.tell(Event::Tick);
    }
    assert_eq!(d.now.since(before), Duration::from_millis(500));
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 40);
    assert_eq!(d.granted(2, ask), gib(40));
}

#[test]
fn an_order_without_an_answer_is_given_up() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.job(2, spec(), 50);
    d.pass(SECOND);
    d.touch(2);
    d.pass(2 * SECOND);
    d.job(3, spec(), 0);
    let ask = d.alloc(3, 40);
    let (order, ..) = d.order_to(1);
    d.pass(30 * SECOND);
    assert!(d.last.contains(&Action::CancelReclaim {
        client: ClientId(1),
        order
    }));
    let (second, ..) = d.order_to(2);
    // The late answer still counts for the ledger.
    d.progress(1, order, 40);
    assert_eq!(d.granted(3, ask), gib(40));
    d.obey(2, second, 40);
    assert_eq!(d.free(), gib(40));
}

// ---- Pause and limits by hand.

#[test]
fn a_paused_task_leaves_and_stays_away() {
    let mut d = Desk::new(100);
    d.job(1, request(60), 60);
    d.pass_using(SECOND, &[1]);
    d.tell(Event::Pause { task: TaskId(1) });
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!(
        (bytes, depth, reason),
        (Bytes::MAX, Depth::Evict, ReclaimReason::Paused)
    );
    d.obey(1, order, 60);
    assert!(d.last.contains(&Action::PauseDone {
        task: TaskId(1),
        left: gib(0)
    }));
    assert_eq!(d.client(1).state, ClientState::Paused);
    let back = d.restore(1, 60);
    d.pass(700 * SECOND);
    assert_eq!((d.granted(1, back), d.denied(back)), (gib(0), None));
    d.tell(Event::Resume { task: TaskId(1) });
    assert_eq!(d.granted(1, back), gib(60));
}

#[test]
fn a_pause_that_meets_running_work_says_so_and_tries_again() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.tell(Event::Pause { task: TaskId(1) });
    let (order, ..) = d.order_to(1);
    d.done(1, order, Outcome::Busy, 0);
    assert!(d.last.contains(&Action::PauseBlocked {
        task: TaskId(1),
        client: ClientId(1),
        outcome: Outcome::Busy
    }));
    d.pass(SECOND);
    let (order, ..) = d.order_to(1);
    // 10 GiB of it are pinned.
    d.progress(1, order, 50);
    d.done(1, order, Outcome::NothingLeft, 50);
    assert!(d.last.contains(&Action::PauseDone {
        task: TaskId(1),
        left: gib(10)
    }));
    d.pass(100 * SECOND);
    assert!(d.orders().is_empty());
}

#[test]
fn resuming_calls_the_eviction_off() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.tell(Event::Pause { task: TaskId(1) });
    let (order, ..) = d.order_to(1);
    d.progress(1, order, 20);
    d.tell(Event::Resume { task: TaskId(1) });
    assert!(d.last.contains(&Action::CancelReclaim {
        client: ClientId(1),
        order
    }));
    let back = d.restore(1, 20);
    assert_eq!(d.granted(1, back), gib(20));
}

#[test]
fn a_limit_below_what_is_live_needs_force() {
    let mut d = Desk::new(100);
    d.job(1, limit(80), 60);
    let change = |gibs, force| Event::TaskChanged {
        task: TaskId(1),
        spec: limit(gibs),
        force,
    };
    d.tell(change(50, false));
    let refused = Refusal::LimitBelowLive {
        device: GPU,
        limit: gib(50),
        live: gib(60),
        cached: gib(0),
    };
    assert!(d.last.contains(&Action::ChangeRefused {
        task: TaskId(1),
        why: refused
    }));
    d.tell(change(50, true));
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!(
        (bytes, depth, reason),
        (gib(10), Depth::Evict, ReclaimReason::LimitLowered)
    );
    d.obey(1, order, 10);
    assert_eq!(d.client(1).lease, gib(50));
    // It cannot run until the limit fits again, and hears that.
    let back = d.restore(1, 10);
    d.pass(599 * SECOND);
    assert_eq!(d.granted(1, back), gib(0));
    assert!(d.client(1).why.contains("limit of 50 GiB"), "{}", d.client(1).why);
    d.pass(2 * SECOND);
    assert!(matches!(
        d.denied(back),
        Some((DenyReason::OverLimit { .. }, false))
    ));
    let back = d.restore(1, 10);
    d.tell(change(60, false));
    assert_eq!(d.granted(1, back), gib(10));
}

#[test]
fn a_lower_limit_takes_what_is_unused() {
    let mut d = Desk::new(100);
    d.job(1, limit(80), 60);
    d.pass_using(2 * SECOND, &[1]);
    d.usage(
        1,
        Usage {
            resident: gib(50),
            cached: gib(10),
            ..Usage::default()
        },
    );
    d.tell(Event::TaskChanged {
        task: TaskId(1),
        spec: limit(45),
        force: false,
    });
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(15), Depth::Unused));
    d.progress(1, order, 15);
    d.done(1, order, Outcome::Done, 0);
    let ask = d.alloc(1, 1);
    assert!(d.denied(ask).is_some());
}

// ---- Tasks, devices, processes that come and go.

#[test]
fn requests_must_fit_together() {
    let mut d = Desk::new(100);
    d.tell(Event::Device {
        device: GPU,
        capacity: gib(100),
        unmanaged: gib(10),
    });
    d.task(1, request(60));
    d.task(2, request(31));
    let Action::TaskRefused { task: TaskId(2), why } = d.last[0].clone() else {
        panic!("{:?}", d.last);
    };
    assert_eq!(
        why.to_string(),
        "a request of 31 GiB does not fit gpu0: 100 GiB less 10 GiB unmanaged, and other tasks have requested 60 GiB"
    );
    d.task(2, request(30));
    assert_eq!(d.last, [Action::TaskAccepted { task: TaskId(2) }]);
    d.tell(Event::TaskRemoved { task: TaskId(1) });
    d.task(3, request(60));
    assert_eq!(d.last, [Action::TaskAccepted { task: TaskId(3) }]);
    let above = TaskSpec {
        request: gib(2),
        limit: Some(gib(1)),
        ..spec()
    };
    d.task(4, above);
    assert!(matches!(
        d.last[0],
        Action::TaskRefused {
            why: Refusal::RequestAboveLimit { .. },
            ..
        }
    ));
}

#[test]
fn requests_are_counted_device_by_device() {
    let mut d = Desk::new(80);
    d.tell(Event::Device {
        device: DeviceId(1),
        capacity: gib(80),
        unmanaged: gib(0),
    });
    // Nobody knows yet which device each will use.
    d.task(1, request(60));
    d.task(2, request(60));
    assert_eq!(d.last, [Action::TaskAccepted { task: TaskId(2) }]);
    d.task(3, request(60));
    assert!(matches!(d.last[0], Action::TaskRefused { .. }));
    // Both choose the same: the later one is guaranteed what is left, until that changes.
    d.join(1, 1);
    d.join(2, 2);
    let cut = |guaranteed| {
        Action::Note(Note::GuaranteeCut {
            task: TaskId(2),
            device: GPU,
            request: gib(60),
            guaranteed,
        })
    };
    assert!(d.last.contains(&cut(gib(20))), "{:?}", d.last);
    d.tell(Event::TaskRemoved { task: TaskId(1) });
    d.task(4, request(20));
    d.join(4, 4);
    assert!(
        !d.last
            .iter()
            .any(|a| matches!(a, Action::Note(Note::GuaranteeCut { .. })))
    );
}

#[test]
fn unmanaged_memory_is_promised_to_nobody_and_taken_from_the_idle() {
    let mut d = Desk::new(100);
    d.job(1, request(50), 50);
    d.job(2, spec(), 50);
    d.pass_using(2 * SECOND, &[1]);
    d.tell(Event::Device {
        device: GPU,
        capacity: gib(100),
        unmanaged: gib(8),
    });
    let (order, bytes, _, reason) = d.order_to(2);
    assert_eq!((bytes, reason), (gib(8), ReclaimReason::Overcommitted));
    d.obey(2, order, 8);
    assert_eq!(d.free(), gib(0));
    let ask = d.alloc(2, 1);
    assert_eq!(d.granted(2, ask), gib(0));
}

#[test]
fn a_running_client_is_not_stopped_for_the_books() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass_using(2 * SECOND, &[1]);
    let overhead = Usage {
        resident: gib(98),
        overhead: gib(1),
        cached: gib(1),
        ..Usage::default()
    };
    d.usage(1, overhead);
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(1), Depth::Unused));
    d.progress(1, order, 1);
    d.done(1, order, Outcome::Done, 0);
    d.tell(Event::Device {
        device: GPU,
        capacity: gib(100),
        unmanaged: gib(8),
    });
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(2), Depth::Unused));
    d.progress(1, order, 2);
    d.done(1, order, Outcome::Done, 0);
    d.pass_using(10 * SECOND, &[1]);
    assert!(d.orders().is_empty(), "{:?}", d.last);
    // When it idles, the books are put right.
    d.pass(2 * SECOND);
    assert!(d.orders().iter().any(|o| o.3 == Depth::Evict), "{:?}", d.last);
}

#[test]
fn a_dead_victim_frees_all_and_a_dead_gatherer_wants_nothing() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 50);
    let (order, ..) = d.order_to(1);
    d.progress(1, order, 10);
    d.tell(Event::ClientLeft {
        client: ClientId(1),
        kept: Bytes::ZERO,
    });
    assert_eq!((d.granted(2, ask), d.free()), (gib(50), gib(50)));
    d.progress(1, order, 10);
    assert_eq!(d.free(), gib(50), "news of the dead change nothing");

    let mut d = Desk::new(100);
    d.job(1, spec(), 100);
    d.pass(2 * SECOND);
    d.job(2, spec(), 0);
    d.alloc(2, 50);
    let (order, ..) = d.order_to(1);
    d.tell(Event::ClientLeft {
        client: ClientId(2),
        kept: Bytes::ZERO,
    });
    assert!(d.last.contains(&Action::CancelReclaim {
        client: ClientId(1),
        order
    }));
}

#[test]
fn clients_of_an_earlier_daemon_keep_what_they_hold() {
    let mut d = Desk::new(100);
    for id in [1, 2] {
        d.tell(Event::TaskAdded {
            task: TaskId(id),
            spec: request(70),
            devices: vec![],
            adopt: true,
        });
        assert!(d.last.contains(&Action::TaskAccepted { task: TaskId(id) }));
        d.tell(Event::ClientJoined {
            client: ClientId(id),
            task: TaskId(id),
            device: GPU,
            lease: gib(48),
            evicted: gib(2),
            overhead: gib(1),
        });
    }
    assert_eq!(d.free(), gib(2));
    assert!(d.orders().is_empty());
    let back = d.restore(1, 2);
    assert_eq!(d.granted(1, back), gib(2));
}

/// HAMi#1181: no number of a client's turns the ledger into a number near 2^64.
#[test]
fn giving_back_too_much_gives_back_what_there_is() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 10);
    d.tell(Event::Returned {
        client: ClientId(1),
        bytes: gib(11),
    });
    assert!(matches!(d.last[0], Action::Note(Note::GaveBackTooMuch { .. })));
    assert_eq!((d.client(1).lease, d.free()), (gib(0), gib(100)));
}

/// What another process had open is released when it has closed it, also after a pause that came to its end without it.
#[test]
fn a_pause_goes_on_when_pinned_memory_moves_again() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    let usage = |pinned| Usage {
        resident: gib(60),
        pinned,
        ..Usage::default()
    };
    d.tell(Event::Usage {
        client: ClientId(1),
        usage: usage(gib(60)),
    });
    d.tell(Event::Pause { task: TaskId(1) });
    assert!(d.client(1).lease == gib(60) && !d.last.iter().any(|a| matches!(a, Action::Reclaim { .. })));
    d.tell(Event::Usage {
        client: ClientId(1),
        usage: usage(gib(0)),
    });
    assert!(
        d.last.iter().any(|a| matches!(a, Action::Reclaim { .. })),
        "{:?}",
        d.last
    );
}

/// LMCache#4980: memory that a dead program shared is counted to who still has it open, and to nobody twice.
#[test]
fn bug_092_what_is_still_open_is_counted_to_who_has_it_open() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.job(2, spec(), 10);
    d.tell(Event::Inherited {
        client: ClientId(2),
        from: Some(ClientId(1)),
        bytes: gib(20),
    });
    assert_eq!((d.client(1).lease, d.client(2).lease), (gib(40), gib(30)));
    d.tell(Event::ClientLeft {
        client: ClientId(1),
        kept: Bytes::ZERO,
    });
    assert_eq!((d.client(2).lease, d.free()), (gib(30), gib(70)));
    // It closes it: as any lease that is given back.
    d.tell(Event::Returned {
        client: ClientId(2),
        bytes: gib(20),
    });
    assert_eq!(d.free(), gib(90));
}

#[test]
fn a_task_takes_its_clients_along() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 10);
    d.join(2, 1);
    d.tell(Event::TaskRemoved { task: TaskId(1) });
    assert_eq!(d.free(), gib(100));
    assert!(d.arbiter.snapshot().tasks.is_empty());
}

#[test]
fn unknown_ids_are_noted_and_ignored() {
    let mut d = Desk::new(100);
    let (client, task, order) = (ClientId(7), TaskId(7), OrderId(7));
    for event in [
        Event::ClientLeft {
            client,
            kept: Bytes::ZERO,
        },
        Event::Touched { client },
        Event::Returned {
            client,
            bytes: gib(1),
        },
        Event::Usage {
            client,
            usage: Usage::default(),
        },
        Event::ReclaimProgress {
            client,
            order,
            bytes: gib(1),
        },
        Event::ReclaimDone {
            client,
            order,
            outcome: Outcome::Done,
            copied: gib(1),
            nanos: 1,
        },
        Event::Restored {
            client,
            copied: gib(1),
            nanos: 1,
        },
        Event::Ask {
            client,
            ask: AskId(1),
            kind: AskKind::Alloc,
            bytes: gib(1),
            long: true,
        },
        Event::AskCancelled {
            client,
            ask: AskId(1),
        },
        Event::TaskRemoved { task },
        Event::Pause { task },
        Event::Resume { task },
        Event::ClientJoined {
            client,
            task,
            device: GPU,
            lease: gib(1),
            evicted: gib(1),
            overhead: gib(1),
        },
    ] {
        d.tell(event.clone());
        assert!(
            matches!(&d.last[..], [Action::Note(Note::Ignored { .. })]),
            "{event:?}: {:?}",
            d.last
        );
    }
    assert_eq!(d.free(), gib(100));
}

#[test]
fn the_operator_takes_back_what_is_unused_and_what_idles_above_requests() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::Low), 30);
    let low = TaskSpec {
        priority: Priority::Low,
        ..request(20)
    };
    d.job(2, low, 30);
    d.job(3, spec(), 30);
    d.pass(2 * SECOND);
    d.usage(
        3,
        Usage {
            resident: gib(30),
            cached: gib(5),
            ..Usage::default()
        },
    );
    d.tell(Event::Trim { device: GPU });
    let (order, bytes, depth, reason) = d.order_to(3);
    assert_eq!(
        (bytes, depth, reason),
        (gib(5), Depth::Unused, ReclaimReason::Operator)
    );
    d.progress(3, order, 5);
    d.done(3, order, Outcome::Done, 0);
    d.tell(Event::Shrink {
        device: GPU,
        priority: Priority::Low,
    });
    let orders: Vec<_> = d.orders().iter().map(|o| (o.0, o.2, o.3)).collect();
    assert_eq!(orders, [(1, gib(30), Depth::Evict), (2, gib(10), Depth::Evict)]);
    d.tell(Event::Trim { device: DeviceId(9) });
    assert!(matches!(d.last[..], [Action::Note(Note::Ignored { .. })]));
}

#[test]
fn states_have_a_word_a_reason_and_a_time() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 75);
    assert_eq!(d.client(1).state, ClientState::Active);
    d.pass_using(5 * SECOND, &[1]);
    d.job(2, spec(), 20);
    d.alloc(2, 60);
    let waiting = d.client(2);
    assert_eq!((waiting.state, waiting.asked), (ClientState::Waiting, gib(60)));
    assert_eq!(waiting.why, "needs 60 GiB; its turn comes after c1");
    assert_eq!(waiting.since, d.now);
    d.pass(2 * SECOND);
    assert_eq!(d.client(1).state, ClientState::Evicting);
    assert_eq!(
        d.client(1).why,
        "idle memory needed by c2 (idle 1.0 s, burst, priority normal)"
    );
    assert_eq!(d.client(2).why, "gathering 60 GiB");
    let device = d.arbiter.snapshot().devices[0].clone();
    assert_eq!(device.gathering_for, Some(ClientId(2)));
    assert_eq!(device.peak, gib(95));
}

/// Memory that others imported from a program outlives it. In the step in which its account is closed that counts as held by nobody.
#[test]
fn what_others_keep_of_the_dead_is_granted_to_nobody() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.job(2, spec(), 40);
    let ask = d.alloc(2, 50);
    d.tell(Event::ClientLeft {
        client: ClientId(1),
        kept: gib(20),
    });
    assert_eq!((d.client(2).lease, d.free()), (gib(40), gib(40)), "{ask:?}");
    assert!(
        !d.last
            .iter()
            .any(|a| matches!(a, Action::Grant { complete: true, .. }))
    );
    // Never more than it had; and what the importers let go is there for those that wait.
    d.job(3, spec(), 10);
    d.tell(Event::ClientLeft {
        client: ClientId(3),
        kept: gib(90),
    });
    assert_eq!(d.free(), gib(30));
    d.tell(Event::Device {
        device: GPU,
        capacity: gib(100),
        unmanaged: Bytes::ZERO,
    });
    assert_eq!(d.client(2).lease, gib(90));
}
