//! Reported faults of other ways to share a GPU, each as a test of the right behaviour.

mod common;

use std::time::Duration;

use common::*;
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, TaskId};

/// A program with the library switched off takes what it likes: that is promised to nobody, and the one who asks is told.
#[test]
fn bug_008_what_runs_without_the_library_is_promised_to_nobody() {
    let mut d = Desk::new(24);
    d.tell(Event::Device {
        device: GPU,
        capacity: gib(24),
        unmanaged: gib(22),
    });
    d.task(1, request(4));
    let refused = d.last.iter().find_map(|a| match a {
        Action::TaskRefused { why, .. } => Some(why.to_string()),
        _ => None,
    });
    assert_eq!(
        refused.as_deref(),
        Some(
            "a request of 4 GiB does not fit gpu0: 24 GiB less 22 GiB unmanaged, and other tasks have requested 0 B"
        )
    );
    d.job(2, request(2), 2);
}

/// "A quarter of a GPU" is a quarter, whoever preallocates first.
#[test]
fn bug_013_the_first_of_four_quarters_does_not_take_the_card() {
    let mut d = Desk::new(96);
    let quarter = TaskSpec {
        request: gib(24),
        limit: Some(gib(24)),
        ..spec()
    };
    for task in 1..=4 {
        d.job(task, quarter.clone(), 0);
        let greedy = d.alloc(task, 86);
        assert!(
            matches!(d.denied(greedy), Some((DenyReason::OverLimit { .. }, true))),
            "{:?}",
            d.last
        );
        let ask = d.alloc(task, 24);
        assert_eq!(d.granted(task, ask), gib(24));
    }
    assert!(d.last.iter().all(|a| !matches!(a, Action::Reclaim { .. })));
}

/// A program whose frees wait for an out-of-memory hears of one soon; its next try waits.
#[test]
fn bug_038_who_flushes_on_out_of_memory_hears_of_it_soon() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 60);
    d.job(2, request(40), 40);
    d.pass_using(Duration::from_millis(100), &[1, 2]);
    let first = d.ask(1, AskKind::Alloc, gib(20), false);
    d.pass_using(2 * SECOND + MS, &[2]);
    assert_eq!(d.denied(first), Some((DenyReason::TimedOut, false)));
    // It flushes what it had deferred, and tries again.
    d.tell(Event::Returned {
        client: ClientId(1),
        bytes: gib(30),
    });
    let again = d.alloc(1, 20);
    assert_eq!(d.granted(1, again), gib(20));
}

/// Ten times too much is asked for: whoever waits is served when another one idles, and is told meanwhile what for it waits.
#[test]
fn bug_040_oversubscribed_requests_wait_with_a_reason() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 90);
    d.pass_using(SECOND, &[1]);
    d.job(2, spec(), 0);
    let ask = d.alloc(2, 50);
    assert_eq!((d.denied(ask), d.granted(2, ask)), (None, gib(0)));
    assert_eq!(d.client(2).why, "needs 50 GiB; its turn comes after c1");
    d.pass(SECOND);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(40));
    d.obey(1, order, 40);
    assert_eq!(d.granted(2, ask), gib(50));
}

/// A limit above the card: one process is told at once, with the figures, what cannot be; several use it by turns.
#[test]
fn bug_041_a_limit_above_the_card_says_what_fits() {
    let mut d = Desk::new(100);
    d.job(1, limit(200), 80);
    let ask = d.alloc(1, 40);
    let (reason, last) = d.denied(ask).expect("an answer at once");
    assert!(last);
    assert_eq!(
        reason.to_string(),
        "a footprint of 120 GiB can never fit: the device leaves 100 GiB beside what is guaranteed to others"
    );
    // A second process of the task has the other half of the limit, off the card while the first one runs.
    d.join(2, 1);
    d.pass(2 * SECOND);
    let ask = d.alloc(2, 80);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(60));
    d.obey(1, order, 60);
    assert_eq!(d.granted(2, ask), gib(80));
}

/// Fixed halves: an idle engine's half is lent, and comes back when it has work, within a stated time.
#[test]
fn bug_064_an_idle_half_is_lent_and_comes_back() {
    let mut d = Desk::new(100);
    let half = TaskSpec {
        request: gib(40),
        limit: Some(gib(90)),
        ..spec()
    };
    d.job(1, half.clone(), 40);
    d.job(2, half, 40);
    d.pass_using(2 * SECOND, &[2]);
    // The first one idles: the second may grow to its limit.
    let more = d.alloc(2, 50);
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(30));
    d.obey(1, order, 30);
    assert_eq!(d.granted(2, more), gib(50));
    d.pass_using(SECOND, &[2]);
    // It comes back: the other shrinks at once, but not below its own request.
    let back = d.restore(1, 30);
    let (order, bytes, _, reason) = d.order_to(2);
    assert_eq!(
        (bytes, reason),
        (gib(30), ReclaimReason::Guarantee { client: ClientId(1) })
    );
    d.obey(2, order, 30);
    assert_eq!(d.granted(1, back), gib(30));
    assert!(d.client(2).lease >= gib(40));
}

/// Taking memory keeps its contents: what is only dropped was not in use.
#[test]
fn bug_073_what_is_in_use_is_copied_never_dropped() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 80);
    d.pass(2 * SECOND);
    d.usage(
        1,
        Usage {
            resident: gib(80),
            cached: gib(10),
            ..Usage::default()
        },
    );
    d.job(2, spec(), 0);
    let small = d.alloc(2, 30);
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!(
        (bytes, depth),
        (gib(10), Depth::Unused),
        "an order that may not evict"
    );
    d.progress(1, order, 10);
    assert_eq!(d.granted(2, small), gib(30));
    d.done(1, order, Outcome::Done, 0);
    d.alloc(2, 20);
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(20), Depth::Evict));
    d.obey(1, order, 20);
    assert_eq!(
        d.client(1).evicted,
        gib(20),
        "and what it took is known to be in the host"
    );
}

/// A restore on a full card waits, however long; it is not an out-of-memory.
#[test]
fn bug_085_a_restore_without_room_waits() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.pass(2 * SECOND);
    d.job(2, request(100), 60);
    let all = d.alloc(2, 40);
    let (order, ..) = d.order_to(1);
    d.obey(1, order, 40);
    assert_eq!(d.granted(2, all), gib(40));
    let back = d.restore(1, 40);
    for _ in 0..100 {
        d.pass_using(10 * SECOND, &[2]);
        assert_eq!(d.denied(back), None);
    }
    d.tell(Event::ClientLeft {
        client: ClientId(2),
        kept: Bytes::ZERO,
    });
    assert_eq!(d.granted(1, back), gib(40));
}

/// A group is released when all of it is; and what is granted is free, not promised.
#[test]
fn bug_086_a_slow_rank_is_waited_for() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.join(2, 1);
    let second = d.alloc(2, 40);
    assert_eq!(d.granted(2, second), gib(40));
    d.pass(2 * SECOND);
    d.job(3, spec(), 0);
    let trainer = d.alloc(3, 90);
    let orders: Vec<OrderOf> = d.orders().iter().map(|o| (o.0, o.1, o.2)).collect();
    assert_eq!(orders.len(), 2);
    d.obey(1, orders[0].1, 40);
    assert_eq!(d.granted(3, trainer), gib(0), "one rank has released");
    d.progress(2, orders[1].1, 20);
    assert_eq!(d.granted(3, trainer), gib(0), "the other is half way");
    let left = orders[1].2.saturating_sub(gib(20));
    d.tell(Event::ReclaimProgress {
        client: ClientId(2),
        order: orders[1].1,
        bytes: left,
    });
    assert_eq!(d.granted(3, trainer), gib(90));
    // The same for a pause: it is done when the last one is out.
    let mut d = Desk::new(100);
    d.job(1, spec(), 40);
    d.join(2, 1);
    d.alloc(2, 40);
    d.tell(Event::Pause { task: TaskId(1) });
    let orders = d.orders();
    d.obey(orders[0].0, orders[0].1, 40);
    let done = |d: &Desk| d.last.iter().any(|a| matches!(a, Action::PauseDone { .. }));
    assert!(!done(&d));
    d.obey(orders[1].0, orders[1].1, 40);
    assert!(done(&d));
}

type OrderOf = (u64, ebb_units::OrderId, Bytes);

/// Whatever chose the card: a request that does not fit it is refused on the node, and fits once there is room.
#[test]
fn bug_128_no_card_is_promised_twice() {
    let mut a = Arbiter::new(config());
    let now = Time(0);
    let card = |n: u32| DeviceId(n);
    for n in 0..8 {
        a.handle(
            now,
            &Event::Device {
                device: card(n),
                capacity: gib(80),
                unmanaged: Bytes::ZERO,
            },
        );
    }
    let add = |a: &mut Arbiter, task: u64, devices: [u32; 2]| {
        let event = Event::TaskAdded {
            task: TaskId(task),
            spec: request(80),
            devices: devices.map(card).to_vec(),
            adopt: false,
        };
        let accepted = a
            .handle(now, &event)
            .contains(&Action::TaskAccepted { task: TaskId(task) });
        a.check().unwrap();
        accepted
    };
    for task in 0..4u32 {
        assert!(add(&mut a, u64::from(task), [2 * task, 2 * task + 1]));
    }
    for n in 0..7 {
        assert!(
            !add(&mut a, 9, [n, n + 1]),
            "cards {n} and {} have their pods",
            n + 1
        );
    }
    // A rolling update: the old one goes, the new one comes, on its cards and on no others.
    a.handle(now, &Event::TaskRemoved { task: TaskId(2) });
    assert!(!add(&mut a, 9, [3, 4]));
    assert!(add(&mut a, 9, [4, 5]));
}

/// What the driver keeps for itself is not there to be requested, and contexts count: who stays within its request gets it.
#[test]
fn bug_131_the_drivers_own_memory_is_not_promised() {
    let (card, reserve, context) = (Bytes::gib(15), Bytes::mib(450), Bytes::mib(300));
    let usable = card - reserve;
    let mut d = Desk::new(1);
    d.tell(Event::Device {
        device: GPU,
        capacity: usable,
        unmanaged: Bytes::ZERO,
    });
    let part = |bytes: u64| TaskSpec {
        request: Bytes(bytes),
        limit: Some(Bytes(bytes)),
        ..spec()
    };
    // Requests that sum to the whole card do not all fit; those that sum to what it can give do.
    for (whole, fits) in [(card, false), (usable, true)] {
        let third = whole.0 / 3;
        let accepted = (1..=3).all(|task| {
            d.task(task, part(third));
            d.last.contains(&Action::TaskAccepted { task: TaskId(task) })
        });
        assert_eq!(accepted, fits, "{whole}");
        if !fits {
            (1..=3).for_each(|task| drop(d.tell(Event::TaskRemoved { task: TaskId(task) }).to_vec()));
        }
    }
    let third = usable.0 / 3;
    for task in 1..=3 {
        d.tell(Event::ClientJoined {
            client: ClientId(task),
            task: TaskId(task),
            device: GPU,
            lease: Bytes::ZERO,
            evicted: Bytes::ZERO,
            overhead: context,
        });
    }
    for task in 1..=3 {
        // All that its request leaves beside its context.
        let bytes = Bytes(third).saturating_sub(context);
        let ask = d.ask(task, AskKind::Alloc, bytes, true);
        assert_eq!(d.granted(task, ask), bytes, "{:?}", d.last);
        d.touch(task);
    }
}
