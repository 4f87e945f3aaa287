//! Those who cannot give because they wait: inside a capture, or for what their own work on the GPU waits for.

mod common;

use std::time::Duration;

use common::{Desk, GPU, SECOND, config, gib, priority, spec};
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Two programs that hold all of the card; the first in turn wants more, then the other one does.
fn two(first: u64, second: u64) -> (Desk, AskId, AskId) {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.job(2, spec(), 50);
    d.pass(2 * SECOND);
    // The second has used the GPU for longer: the first one is before it.
    d.pass_using(5 * SECOND, &[2]);
    d.pass(2 * SECOND);
    let a = d.alloc(1, first);
    let order = d.order_to(2);
    assert_eq!(order.1, gib(first));
    let b = d.alloc(2, second);
    assert!(d.orders().is_empty(), "one gives already: {:?}", d.last);
    d.last.clear();
    d.last.push(Action::CancelReclaim {
        client: ClientId(2),
        order: order.0,
    });
    (d, a, b)
}

fn open_order(d: &Desk) -> OrderId {
    match d.last[0] {
        Action::CancelReclaim { order, .. } => order,
        _ => panic!("{:?}", d.last),
    }
}

#[test]
fn who_is_busy_until_it_is_served_is_served_from_the_one_before_it() {
    let (mut d, a, b) = two(30, 20);
    let order = open_order(&d);
    d.pass(SECOND);
    d.done(2, order, Outcome::Busy, 0);
    let (order, bytes, depth, reason) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(20), Depth::Evict));
    assert_eq!(reason, ReclaimReason::Demand { client: ClientId(2) });
    d.obey(1, order, 20);
    assert_eq!((d.granted(1, a), d.granted(2, b)), (gib(0), gib(20)));
    // It has its answer and lets go. The one before it is next, when the other had a turn.
    d.pass_using(2 * SECOND, &[2]);
    d.pass(2 * SECOND);
    let (order, bytes, ..) = d.order_to(2);
    assert_eq!(bytes, gib(50), "what it wants and what it gave");
    d.obey(2, order, 50);
    assert_eq!(d.granted(1, a), gib(30));
}

/// Refuses every order for so long, or until somebody is denied; all the answers.
fn refuse_all(d: &mut Desk, first: Vec<Action>, time: Duration) -> Vec<Action> {
    let end = d.now.after(time);
    let mut all = first;
    let mut at = 0;
    while d.now < end && !all.iter().any(|a| matches!(a, Action::Deny { .. })) {
        while let Some(action) = all.get(at).cloned() {
            at += 1;
            if let Action::Reclaim { client, order, .. } = action {
                all.extend(d.done(client.0, order, Outcome::Busy, 0).to_vec());
            }
        }
        all.extend(d.pass(SECOND / 4).to_vec());
    }
    all
}

#[test]
fn a_refusal_that_a_wait_explains_is_not_held_against_anybody_for_long() {
    let (mut d, ..) = two(30, 20);
    let order = open_order(&d);
    d.pass(SECOND);
    let first = d.done(2, order, Outcome::Busy, 0).to_vec();
    // The first one refuses as well, each time: nobody can be served.
    let all = refuse_all(&mut d, first, seconds(20));
    let pauses: Vec<u64> = all
        .iter()
        .filter_map(|a| match a {
            Action::Note(Note::BackingOff { pause_ms, .. }) => Some(*pause_ms),
            _ => None,
        })
        .collect();
    assert!(pauses.len() >= 8, "{pauses:?}");
    assert_eq!(pauses.iter().max(), Some(&4000), "{pauses:?}");
}

#[test]
fn two_that_are_busy_until_they_are_served_do_not_wait_for_each_other_for_ever() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::High), 50);
    d.job(2, priority(Priority::Low), 50);
    d.pass(2 * SECOND);
    d.alloc(1, 20);
    let mut first = d.last.clone();
    let low = d.alloc(2, 20);
    first.extend(d.last.clone());
    let began = d.now;
    let all = refuse_all(&mut d, first, seconds(60));
    let denied: Vec<&Action> = all.iter().filter(|a| matches!(a, Action::Deny { .. })).collect();
    assert!(
        matches!(denied[..], [Action::Deny { ask, reason: DenyReason::Deadlock { .. }, last: true, .. }] if *ask == low),
        "{denied:?}"
    );
    let waited = d.now.since(began);
    assert!(waited >= config().order_timeout, "work may take long: {waited:?}");
    assert!(waited < seconds(45), "{waited:?}");
}

#[test]
fn another_thread_of_the_one_before_it_is_no_reason_to_wait_for_ever() {
    let (mut d, _, b) = two(30, 20);
    let order = open_order(&d);
    d.pass_using(SECOND, &[1]);
    d.done(2, order, Outcome::Busy, 0);
    // One thread of the first waits, another one goes on: it keeps its turn, but not more.
    let mut orders = d.orders();
    let end = d.now.after(seconds(3));
    while orders.is_empty() && d.now < end {
        d.pass_using(SECOND / 10, &[1]);
        orders = d.orders();
    }
    assert_eq!((orders[0].0, orders[0].2), (1, gib(20)), "{:?}", d.last);
    d.obey(1, orders[0].1, 20);
    assert_eq!(d.granted(2, b), gib(20));
}

#[test]
fn who_is_busy_and_waits_for_nothing_is_waited_for() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 30);
    d.job(2, spec(), 50);
    d.job(3, spec(), 20);
    d.pass(2 * SECOND);
    d.pass_using(5 * SECOND, &[3]);
    d.pass(2 * SECOND);
    let a = d.alloc(1, 60);
    let orders = d.orders();
    let c = d.alloc(3, 10);
    assert!(d.orders().is_empty());
    for (client, order, ..) in orders {
        d.done(client, order, Outcome::Busy, 0);
    }
    // The second is busy but does not wait, and will let go: nothing is taken from the one in turn before that.
    let taken = d
        .pass(SECOND / 4)
        .iter()
        .any(|action| matches!(action, Action::Reclaim { client, .. } if *client == ClientId(1)));
    assert!(!taken, "{:?}", d.last);
    assert_eq!((d.granted(1, a), d.granted(3, c)), (gib(0), gib(0)));
}

#[test]
fn a_rank_that_waits_on_another_card_explains_it_as_well() {
    const OTHER: DeviceId = DeviceId(1);
    let mut d = Desk::new(100);
    d.tell(Event::Device {
        device: OTHER,
        capacity: gib(100),
        unmanaged: Bytes::ZERO,
    });
    d.job(1, spec(), 40);
    d.job(2, spec(), 40);
    d.job(3, spec(), 20);
    d.pass(2 * SECOND);
    // Another process of the second task, on the other card, which is full.
    for (client, task) in [(12, 2), (4, 4)] {
        if task == 4 {
            d.task(4, spec());
        }
        d.tell(Event::ClientJoined {
            client: ClientId(client),
            task: TaskId(task),
            device: OTHER,
            lease: gib(50),
            evicted: Bytes::ZERO,
            overhead: Bytes::ZERO,
        });
    }
    d.pass_using(5 * SECOND, &[2, 3]);
    d.pass(2 * SECOND);
    d.pass_using(SECOND, &[4]);
    let elsewhere = d.alloc(12, 10);
    assert_eq!(d.granted(12, elsewhere), gib(0));
    let a = d.alloc(1, 60);
    let mut orders = d.orders();
    let c = d.alloc(3, 10);
    orders.extend(d.orders());
    assert!(orders.iter().any(|o| o.0 == 2), "{orders:?}");
    let mut got = Bytes::ZERO;
    for (client, order, ..) in orders {
        // The third gives nothing: its work does not end either.
        d.done(client, order, Outcome::Busy, 0);
        got += d.granted(3, c);
        for (client, order, bytes, ..) in d.orders() {
            assert_eq!((client, bytes), (1, gib(10)));
            d.obey(client, order, 10);
            got += d.granted(3, c);
        }
    }
    assert_eq!((got, d.granted(1, a)), (gib(10), gib(0)));
    assert_eq!(d.client(2).device, GPU);
}

/// Chunks are larger than what is ordered of them: a client then holds lease that nothing uses, and asks for so much less when they are to
/// come back. That counted twice, as lease and as what is away, and who filled the card was taken for one that could never be served.
#[test]
fn a_restore_into_lease_that_is_left_over_is_possible() {
    let mut desk = Desk::new(100);
    desk.job(1, spec(), 96);
    desk.job(2, spec(), 0);
    let used = |resident, evicted| Usage {
        resident: gib(resident),
        evicted: gib(evicted),
        ..Usage::default()
    };
    desk.usage(1, used(96, 0));
    desk.pass(seconds(5));
    desk.alloc(2, 40);
    let (order, wanted, ..) = desk.order_to(1);
    assert_eq!(wanted, gib(36));
    // It has three chunks of 32, of which two go.
    desk.progress(1, order, 36);
    desk.usage(1, used(32, 64));
    desk.done(1, order, Outcome::Done, 64);
    desk.usage(2, used(40, 0));
    desk.usage(1, used(32, 64));
    desk.pass(seconds(5));
    // With the 28 that are left over, 36 more are enough, and the second one idles.
    let ask = desk.restore(1, 36);
    let (order, wanted, ..) = desk.order_to(2);
    assert_eq!(wanted, gib(36));
    desk.obey(2, order, 36);
    assert_eq!(desk.granted(1, ask), gib(36));
}
