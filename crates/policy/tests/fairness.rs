//! Who has how much: dominant shares, tenants, classes, the share of copying, marks, deadlocks, ranks.

mod common;

use std::time::Duration;

use common::world::{Faults, Job, World};
use common::*;
use ebb_policy::fair::{User, dividable, whole};
use ebb_policy::*;
use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};
use proptest::prelude::*;

// ---- The function.

/// Ghodsi et al., section 4: 9 processors and 18 GB; A's tasks need 1 and 4, B's 3 and 1. A gets 3 tasks, B 2, both two thirds.
#[test]
fn the_papers_example() {
    let users = [(vec![1, 4], 1), (vec![3, 1], 1)];
    assert_eq!(whole(&[9, 18], &users), [3, 2]);
    let users = [User::new(&[1.0, 4.0]), User::new(&[3.0, 1.0])];
    let units = dividable(&[9.0, 18.0], &users, &[1.0]);
    for (user, units) in users.iter().zip(&units) {
        let share = user.dominant(&[9.0, 18.0]) * units;
        assert!((share - 2.0 / 3.0).abs() < 1e-9, "{share}");
    }
}

#[test]
fn weights_and_groups_share_by_weight() {
    let user = |group| User {
        group,
        ..User::new(&[1.0])
    };
    // One user of the heavy group, three of the light one.
    let users = [user(0), user(1), user(1), user(1)];
    let units = dividable(&[12.0], &users, &[3.0, 1.0]);
    for (units, right) in units.iter().zip([9.0, 1.0, 1.0, 1.0]) {
        assert!((units - right).abs() < 1e-9, "{units}");
    }
}

fn needs() -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec(1u32..=100, 3).prop_map(|v| v.into_iter().map(f64::from).collect())
}

/// Users of groups 0, 1 and 2, with weights.
fn users(most: usize) -> impl Strategy<Value = Vec<User>> {
    let user = (needs(), 1u32..=4, 0usize..3).prop_map(|(needs, weight, group)| User {
        weight: f64::from(weight),
        group,
        ..User::new(&needs)
    });
    prop::collection::vec(user, 1..most)
}

/// The same, all of one group.
fn equals(most: usize) -> impl Strategy<Value = Vec<User>> {
    users(most).prop_map(|users| users.into_iter().map(|u| User { group: 0, ..u }).collect())
}

/// Units that a user could do with an amount of each resource.
fn useful(user: &User, amounts: &[f64]) -> f64 {
    user.needs
        .iter()
        .zip(amounts)
        .map(|(need, has)| has / need)
        .fold(f64::INFINITY, f64::min)
}

/// What so many units of a user's work take, a part of it.
fn bundle(user: &User, units: f64, part: f64) -> Vec<f64> {
    user.needs.iter().map(|need| need * units * part).collect()
}

/// Everybody needs everything: one resource is used up, and of none more than there is.
fn is_used_up(users: &[User], units: &[f64], capacity: &[f64]) -> bool {
    let used = |r: usize| users.iter().zip(units).map(|(u, n)| u.needs[r] * n).sum::<f64>();
    (0..3).any(|r| used(r) >= capacity[r] * (1.0 - 1e-9))
        && (0..3).all(|r| used(r) <= capacity[r] * (1.0 + 1e-9))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    /// Nobody does worse than with its part of everything, by its weight; nobody would rather have what another one has, as much of it as weighs the
    /// same; and nothing that somebody could use is left.
    #[test]
    fn nobody_envies_and_nothing_is_wasted(users in equals(7), capacity in needs()) {
        let units = dividable(&capacity, &users, &[1.0]);
        let weights: f64 = users.iter().map(|u| u.weight).sum();
        for (n, user) in users.iter().enumerate() {
            let part: Vec<f64> = capacity.iter().map(|c| c * user.weight / weights).collect();
            prop_assert!(units[n] >= useful(user, &part) * (1.0 - 1e-9), "sharing");
            for (other, theirs) in users.iter().zip(&units) {
                let theirs = bundle(other, *theirs, user.weight / other.weight);
                prop_assert!(units[n] >= useful(user, &theirs) * (1.0 - 1e-9), "envy");
            }
        }
        prop_assert!(is_used_up(&users, &units, &capacity));
    }

    /// Who says that it needs something else than it does gets less done.
    #[test]
    fn lying_does_not_pay(mut users in equals(6), lie in needs(), capacity in needs()) {
        let honest = dividable(&capacity, &users, &[1.0])[0];
        let truth = users[0].clone();
        users[0].needs = lie;
        let lied = dividable(&capacity, &users, &[1.0])[0];
        let got = bundle(&users[0], lied, 1.0);
        prop_assert!(useful(&truth, &got) <= honest * (1.0 + 1e-9));
    }

    /// In groups: nobody does worse than with its part of its group's part of everything, nobody would rather have what another one of its group has,
    /// and a group has by its weight, whoever is in it.
    #[test]
    fn groups_share_by_weight_and_so_do_their_users(users in users(9), weights in prop::array::uniform3(1u32..=5), capacity in needs()) {
        let weights = weights.map(f64::from);
        let units = dividable(&capacity, &users, &weights);
        let of = |group: usize| users.iter().zip(&units).filter(move |(u, _)| u.group == group);
        let all: f64 = (0..3).filter(|g| of(*g).next().is_some()).map(|g| weights[g]).sum();
        let mut shares = Vec::new();
        for (group, weight) in weights.iter().enumerate() {
            let inside: f64 = of(group).map(|(u, _)| u.weight).sum();
            for (user, units) in of(group) {
                let part = weight / all * user.weight / inside;
                let part: Vec<f64> = capacity.iter().map(|c| c * part).collect();
                prop_assert!(*units >= useful(user, &part) * (1.0 - 1e-9), "sharing");
                for (other, theirs) in of(group) {
                    let theirs = bundle(other, *theirs, user.weight / other.weight);
                    prop_assert!(*units >= useful(user, &theirs) * (1.0 - 1e-9), "envy");
                }
            }
            let share: f64 = of(group).map(|(u, n)| u.dominant(&capacity) * n).sum();
            if share > 0.0 {
                shares.push(share / weight);
            }
        }
        let (least, most) = shares.iter().fold((f64::INFINITY, 0.0f64), |(a, b), s| (a.min(*s), b.max(*s)));
        prop_assert!(least >= most * (1.0 - 1e-9), "{shares:?}");
        prop_assert!(is_used_up(&users, &units, &capacity));
    }
}

// ---- Over time.

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn job(footprint: u64, spec: TaskSpec) -> Job {
    Job {
        spec,
        start: Duration::ZERO,
        footprint: gib(footprint),
        pieces: 1,
        work: seconds(1_000_000),
        busy: seconds(1),
        idle: Duration::ZERO,
        scratch: Bytes::ZERO,
        overhead: Bytes::ZERO,
        processes: 1,
        long: true,
    }
}

fn run(jobs: Vec<Job>, events: &[Event], config: PolicyConfig, time: Duration) -> World {
    let mut w = World::new(1, gib(100), Faults::default(), jobs, config);
    for event in events {
        w.tell(event.clone());
    }
    while w.now.since(Time(0)) < time {
        w.step();
    }
    w
}

fn worked(w: &World) -> Vec<f64> {
    w.programs.iter().map(|p| p.worked.as_secs_f64()).collect()
}

#[test]
fn copying_stays_under_its_share() {
    let config = PolicyConfig {
        turn_per_copy: PolicyConfig::default().turn_per_copy,
        ..config()
    };
    let w = run(vec![job(75, spec()), job(75, spec())], &[], config, seconds(1000));
    let share = w.copying.as_secs_f64() / 1000.0;
    assert!(share < 0.055, "{share}");
    assert!(share > 0.01, "they do take turns: {share}");
}

/// Ten small tasks that run side by side use a tenth of the memory each while a large one uses all of it.
#[test]
fn time_goes_by_the_dominant_share() {
    let mut jobs = vec![job(95, spec())];
    jobs.extend((0..9).map(|_| job(11, spec())));
    let w = run(jobs, &[], config(), seconds(1500));
    let worked = worked(&w);
    // Each has the card's memory (or the GPU) for the same product of share and time.
    let large = worked[0] * 0.95;
    for small in &worked[1..] {
        let share = small * 0.111;
        assert!(
            (share / large - 1.0).abs() < 0.35,
            "{large} and {share} of {worked:?}"
        );
    }
}

#[test]
fn tenants_share_by_weight_however_many_tasks_they_have() {
    let of = |tenant| TaskSpec {
        tenant: Tenant(tenant),
        ..spec()
    };
    let jobs = vec![job(75, of(1)), job(75, of(2)), job(75, of(2)), job(75, of(2))];
    let even = worked(&run(jobs.clone(), &[], config(), seconds(1500)));
    let (one, three) = (even[0], even[1..].iter().sum::<f64>());
    assert!((one / three - 1.0).abs() < 0.25, "{even:?}");
    let weight = Event::Tenant {
        tenant: Tenant(1),
        weight: 3,
    };
    let heavy = worked(&run(jobs, &[weight], config(), seconds(1500)));
    let (one, three) = (heavy[0], heavy[1..].iter().sum::<f64>());
    assert!((one / three - 3.0).abs() < 0.9, "{heavy:?}");
}

// ---- Classes.

fn preempting() -> PolicyConfig {
    PolicyConfig {
        preempt: true,
        preempt_grace: Duration::from_secs(2),
        ..config()
    }
}

fn warned(actions: &[Action]) -> Vec<u64> {
    let warned = |a: &Action| match a {
        Action::Warn { client, .. } => Some(client.0),
        _ => None,
    };
    actions.iter().filter_map(warned).collect()
}

#[test]
fn a_lower_class_is_warned_gives_way_and_returns_by_itself() {
    let mut d = Desk::with(preempting(), 100);
    d.job(1, priority(Priority::Low), 80);
    d.pass_using(SECOND, &[1]);
    d.job(2, priority(Priority::High), 0);
    let ask = d.alloc(2, 50);
    assert_eq!(warned(&d.last), [1]);
    assert!(d.orders().is_empty());
    d.pass_using(Duration::from_millis(1900), &[1]);
    assert!(d.orders().is_empty(), "it saves itself: {:?}", d.last);
    d.pass_using(Duration::from_millis(200), &[1]);
    let (order, bytes, depth, _) = d.order_to(1);
    assert_eq!((bytes, depth), (gib(30), Depth::Evict));
    d.obey(1, order, 30);
    assert_eq!(d.granted(2, ask), gib(50));
    let back = d.restore(1, 30);
    d.pass_using(seconds(60), &[2]);
    assert_eq!(d.granted(1, back), gib(0), "no turn against a higher class");
    d.tell(Event::ClientLeft {
        client: ClientId(2),
        kept: Bytes::ZERO,
    });
    assert_eq!(d.granted(1, back), gib(30));
}

#[test]
fn nobody_between_stops_what_a_victim_saves_for_a_higher_class() {
    let mut d = Desk::with(preempting(), 100);
    d.job(1, priority(Priority::Low), 80);
    d.pass_using(SECOND, &[1]);
    d.job(2, priority(Priority::High), 0);
    d.alloc(2, 50);
    assert_eq!(warned(&d.last), [1]);
    // Even what idles of it is not for the one in the middle, as long as it saves itself.
    d.pass(Duration::from_millis(1500));
    d.job(3, priority(Priority::Normal), 0);
    d.alloc(3, 30);
    assert!(
        d.orders()
            .iter()
            .all(|o| o.0 != 1 || matches!(o.4, ReclaimReason::Demand { client } if client == ClientId(2))),
        "{:?}",
        d.last
    );
}

#[test]
fn who_was_warned_has_its_time_even_if_it_only_writes_a_file_in_it() {
    let mut d = Desk::with(preempting(), 100);
    d.job(1, priority(Priority::Low), 80);
    d.pass_using(SECOND, &[1]);
    d.job(2, priority(Priority::High), 0);
    let ask = d.alloc(2, 50);
    assert_eq!(warned(&d.last), [1]);
    // It does not use the GPU any more, and needs what it has there all the same.
    d.pass(Duration::from_millis(1900));
    assert!(d.orders().is_empty(), "{:?}", d.last);
    d.pass(Duration::from_millis(200));
    let (order, bytes, ..) = d.order_to(1);
    assert_eq!(bytes, gib(30));
    d.obey(1, order, 30);
    assert_eq!(d.granted(2, ask), gib(50));
}

#[test]
fn a_starving_lower_class_gets_its_turn() {
    let with = |p| job(75, priority(p));
    let config = PolicyConfig {
        starve_after: seconds(100),
        ..preempting()
    };
    let w = run(
        vec![with(Priority::High), with(Priority::Low)],
        &[],
        config,
        seconds(2000),
    );
    let worked = worked(&w);
    assert!(worked[1] > 20.0, "{worked:?}");
    assert!(worked[0] > 4.0 * worked[1], "{worked:?}");
    let longest = w.programs[1].longest_wait;
    assert!(longest < seconds(160), "{longest:?}");
}

// ---- Marks.

#[test]
fn above_the_low_mark_nothing_moves_and_below_it_a_batch_goes() {
    let config = PolicyConfig {
        low_mark: 100,
        high_mark: 300,
        ..config()
    };
    let mut d = Desk::with(config, 100);
    d.job(1, spec(), 20);
    d.job(2, spec(), 20);
    d.job(3, spec(), 20);
    d.pass(seconds(300));
    assert!(d.orders().is_empty(), "there is room: {:?}", d.last);
    d.job(4, spec(), 25);
    d.pass(seconds(300));
    assert!(d.orders().is_empty(), "15 % are free: {:?}", d.last);
    d.touch(4);
    let ask = d.alloc(4, 7);
    assert_eq!(d.granted(4, ask), gib(7));
    // 8 are free; up to 30 go, the longest idle first.
    let orders: Vec<_> = d.orders().iter().map(|o| (o.0, o.2, o.4)).collect();
    assert_eq!(
        orders,
        [
            (1, gib(20), ReclaimReason::LowMark),
            (2, gib(2), ReclaimReason::LowMark)
        ]
    );
}

/// What an active client keeps and does not use goes before anything of an idle one: nobody waits for a copy of it.
#[test]
fn below_the_low_mark_what_nobody_uses_goes_first() {
    let config = PolicyConfig {
        low_mark: 100,
        high_mark: 300,
        ..config()
    };
    let mut d = Desk::with(config, 100);
    d.job(1, spec(), 40);
    d.job(2, spec(), 40);
    d.usage(
        1,
        Usage {
            resident: gib(40),
            cached: gib(15),
            ..Usage::default()
        },
    );
    d.pass(seconds(300));
    d.job(3, spec(), 5);
    d.touch(1);
    d.touch(3);
    assert!(d.orders().is_empty(), "15 % are free: {:?}", d.last);
    let ask = d.alloc(3, 7);
    assert_eq!(d.granted(3, ask), gib(7));
    let orders: Vec<_> = d.orders().iter().map(|o| (o.0, o.2, o.3)).collect();
    assert_eq!(
        orders,
        [(1, gib(15), Depth::Unused), (2, gib(7), Depth::Evict)],
        "8 are free, 22 are missing"
    );
}

// ---- Deadlock.

fn pinned(d: &mut Desk, client: u64, gibs: u64) {
    d.usage(
        client,
        Usage {
            resident: gib(gibs),
            pinned: gib(gibs),
            ..Usage::default()
        },
    );
}

#[test]
fn who_holds_what_cannot_move_and_waits_for_more_does_not_wait_for_ever() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::High), 50);
    d.job(2, priority(Priority::Low), 45);
    pinned(&mut d, 1, 50);
    pinned(&mut d, 2, 45);
    let high = d.alloc(1, 20);
    let low = d.alloc(2, 20);
    d.pass(Duration::from_secs(4));
    assert_eq!(
        (d.denied(high), d.denied(low)),
        (None, None),
        "it may be over in a moment"
    );
    d.pass(Duration::from_secs(2));
    assert_eq!(d.denied(high), None);
    assert!(
        matches!(d.denied(low), Some((DenyReason::Deadlock { footprint, usable }, true)) if footprint == gib(65) && usable == gib(50))
    );
    d.tell(Event::ClientLeft {
        client: ClientId(2),
        kept: Bytes::ZERO,
    });
    assert_eq!(d.granted(1, high), gib(20));
}

#[test]
fn one_who_may_let_go_is_waited_for() {
    let mut d = Desk::new(100);
    d.job(1, spec(), 50);
    d.job(2, spec(), 45);
    pinned(&mut d, 1, 50);
    pinned(&mut d, 2, 45);
    let ask = d.alloc(1, 20);
    d.pass(Duration::from_secs(60));
    assert_eq!(d.denied(ask), None, "the other one is idle, but not waiting");
}

// ---- Reasons.

#[test]
fn every_order_says_why_of_this_one() {
    let mut d = Desk::new(100);
    d.job(1, priority(Priority::Low), 80);
    d.pass(seconds(14));
    d.job(2, spec(), 0);
    d.alloc(2, 50);
    let said = d.last.iter().find_map(|a| match a {
        Action::Reclaim { reason, grounds, .. } => Some(format!("{reason}: {grounds}")),
        _ => None,
    });
    assert_eq!(
        said.as_deref(),
        Some("idle memory needed by c2: idle 14 s, burst, priority low")
    );
    assert_eq!(
        d.client(1).why,
        "idle memory needed by c2 (idle 14 s, burst, priority low)"
    );
}

// ---- Ranks.

/// Two tasks with a rank on each of two cards that hold one of them: whoever has one card gets the other, too.
#[test]
fn ranks_have_their_turns_together() {
    let mut a = Arbiter::new(config());
    let mut now = Time(0);
    for device in 0..2 {
        a.handle(
            now,
            &Event::Device {
                device: DeviceId(device),
                capacity: gib(100),
                unmanaged: Bytes::ZERO,
            },
        );
    }
    // Clients 1 and 2 are of task 1, 3 and 4 of task 2; each begins with a card.
    let mut held = [true, false, false, true];
    for task in 1..=2u64 {
        a.handle(
            now,
            &Event::TaskAdded {
                task: TaskId(task),
                spec: spec(),
                devices: vec![],
                adopt: false,
            },
        );
        for device in 0..2u32 {
            let client = ClientId((task - 1) * 2 + u64::from(device) + 1);
            let has = held[usize::try_from(client.0).unwrap() - 1];
            let lease = if has { gib(75) } else { Bytes::ZERO };
            let evicted = if has { Bytes::ZERO } else { gib(75) };
            a.handle(
                now,
                &Event::ClientJoined {
                    client,
                    task: TaskId(task),
                    device: DeviceId(device),
                    lease,
                    evicted,
                    overhead: Bytes::ZERO,
                },
            );
        }
    }
    let mut asks = [0u64; 4];
    let mut waiting = [false; 4];
    let mut queue: Vec<Event> = Vec::new();
    let (mut together, mut apart) = ([0u32; 2], 0u32);
    for step in 0..6000 {
        for n in 0..4usize {
            let client = ClientId(n as u64 + 1);
            if held[n] {
                queue.push(Event::Touched { client });
            } else if !waiting[n] {
                asks[n] += 1;
                waiting[n] = true;
                queue.push(Event::Ask {
                    client,
                    ask: AskId(asks[n]),
                    kind: AskKind::Restore,
                    bytes: gib(75),
                    long: true,
                });
            }
        }
        queue.push(Event::Tick);
        let mut back = [Bytes::ZERO; 4];
        while !queue.is_empty() {
            for event in std::mem::take(&mut queue) {
                for action in a.handle(now, &event) {
                    match action {
                        Action::Reclaim {
                            client, order, bytes, ..
                        } => {
                            let n = usize::try_from(client.0).unwrap() - 1;
                            let bytes = bytes.min(gib(75));
                            held[n] = false;
                            queue.push(Event::ReclaimProgress { client, order, bytes });
                            queue.push(Event::ReclaimDone {
                                client,
                                order,
                                outcome: Outcome::Done,
                                copied: bytes,
                                nanos: 1_500_000_000,
                            });
                        }
                        Action::Grant {
                            client,
                            complete,
                            bytes,
                            ..
                        } => {
                            let n = usize::try_from(client.0).unwrap() - 1;
                            back[n] += bytes;
                            if complete {
                                waiting[n] = false;
                                held[n] = true;
                                queue.push(Event::Restored {
                                    client,
                                    copied: back[n],
                                    nanos: 1_500_000_000,
                                });
                            }
                        }
                        _ => {}
                    }
                }
            }
        }
        if step > 1000 {
            match (held[0] && held[1], held[2] && held[3]) {
                (true, _) => together[0] += 1,
                (_, true) => together[1] += 1,
                _ => apart += 1,
            }
        }
        now = now.after(Duration::from_millis(100));
    }
    assert!(
        together[0] > 1500 && together[1] > 1500,
        "{together:?}, {apart} apart"
    );
    assert!(apart < 500, "{together:?}, {apart} apart");
}
