use super::*;

fn fleet(cards: usize, gib: u64) -> Fleet {
    Fleet::new(Shape {
        cards,
        per_node: 2,
        card: Bytes::gib(gib),
        speeds: Speeds::default(),
        policy: PolicyConfig::default(),
    })
}

/// Lets time pass until the notice comes; when that was, in seconds.
fn until(fleet: &mut Fleet, wanted: Notice) -> f64 {
    for _ in 0..100_000 {
        match fleet.step() {
            Some(notice) if notice == wanted => return in_seconds(fleet.now()),
            Some(_) => {}
            None => break,
        }
    }
    panic!("{wanted:?} never came");
}

#[test]
fn a_restore_takes_its_bytes_over_the_link() {
    let mut f = fleet(1, 64);
    let who = f.join(0, TaskSpec::default(), Bytes(55_000_000_000));
    f.busy(who);
    let at = until(&mut f, Notice::Ready(who));
    assert!((at - 1.0).abs() < 0.01, "{at}");
    assert_eq!(f.bytes_of(who), (Bytes(55_000_000_000), Bytes::ZERO));
}

#[test]
fn both_ways_at_once_are_slower_each() {
    let mut f = fleet(1, 48);
    let first = f.join(0, TaskSpec::default(), Bytes::gib(40));
    f.busy(first);
    until(&mut f, Notice::Ready(first));
    f.idle(first);
    f.timer(seconds(10.0), 1);
    until(&mut f, Notice::Timer(1));
    let second = f.join(0, TaskSpec::default(), Bytes::gib(40));
    f.busy(second);
    let took = until(&mut f, Notice::Ready(second)) - 10.0;
    // 32 GiB have to leave, one chunk ahead of what comes, at 47 GB/s.
    let alone = Bytes::gib(40).0 as f64 / 55e9;
    assert!(took > alone * 1.05 && took < alone * 1.35, "{took} {alone}");
    let (here, away) = f.bytes_of(first);
    assert_eq!(here + away, Bytes::gib(40));
    assert_eq!(here, Bytes::gib(8), "no more than needed left");
}

#[test]
fn a_client_that_moves_brings_every_byte_and_leaves_the_card_empty() {
    for (to, net) in [(1, false), (2, true)] {
        let mut f = fleet(4, 48);
        let old = f.join(0, TaskSpec::default(), Bytes::gib(30));
        f.busy(old);
        until(&mut f, Notice::Ready(old));
        let began = in_seconds(f.now());
        let new = f.relocate(old, to);
        let took = until(&mut f, Notice::Ready(new)) - began;
        assert_eq!(f.bytes_of(new), (Bytes::gib(30), Bytes::ZERO));
        assert_eq!((f.granted_on(0), f.granted_on(to)), (Bytes::ZERO, Bytes::gib(30)));
        let rate = if net { 48e9 } else { 55e9 };
        let at_least = Bytes::gib(30).0 as f64 / rate;
        assert!(took > at_least && took < at_least * 1.2, "{took} {at_least}");
    }
}

#[test]
fn a_paused_clients_card_is_empty_and_a_resumed_one_goes_on() {
    let mut f = fleet(1, 48);
    let who = f.join(0, TaskSpec::default(), Bytes::gib(20));
    f.busy(who);
    until(&mut f, Notice::Ready(who));
    f.idle(who);
    f.pause(who);
    until(&mut f, Notice::Away(who));
    assert_eq!(f.granted_on(0), Bytes::ZERO);
    f.resume(who);
    f.busy(who);
    until(&mut f, Notice::Ready(who));
    assert_eq!(f.bytes_of(who), (Bytes::gib(20), Bytes::ZERO));
}

#[test]
fn what_is_wanted_more_is_allocated_and_what_is_wanted_less_is_freed() {
    let mut f = fleet(1, 48);
    let who = f.join(0, TaskSpec::default(), Bytes::ZERO);
    f.want(who, Bytes::gib(12));
    f.busy(who);
    until(&mut f, Notice::Ready(who));
    assert_eq!(f.granted_on(0), Bytes::gib(12));
    f.want(who, Bytes::gib(5));
    assert_eq!(f.granted_on(0), Bytes::gib(5));
    f.want(who, Bytes::gib(49));
    until(&mut f, Notice::Refused(who));
}

/// Busy and idle clients that do not fit together, at random: no byte is lost, no card is over-granted.
#[test]
fn no_byte_is_lost_whatever_happens() {
    use rand_pcg::Pcg64;
    use rand_pcg::rand_core::{Rng, SeedableRng};
    for seed in 0..6 {
        let mut rng = Pcg64::seed_from_u64(seed);
        let mut f = fleet(4, 48);
        let mut clients: Vec<(Who, Bytes)> = (0..10)
            .map(|n| {
                let bytes = Bytes::gib(5 + n * 4);
                (f.join(n as usize % 4, TaskSpec::default(), bytes), bytes)
            })
            .collect();
        f.timer(seconds(1.0), 0);
        for round in 0_u64..80 {
            until(&mut f, Notice::Timer(round));
            f.timer(seconds(1.0 + (round + 1) as f64 * 0.7), round + 1);
            let n = rng.next_u64() as usize % clients.len();
            let (who, bytes) = clients[n];
            match rng.next_u64() % 6 {
                0 | 1 => f.busy(who),
                2 => f.idle(who),
                3 => f.pause(who),
                4 => f.resume(who),
                _ => clients[n] = (f.relocate(who, rng.next_u64() as usize % 4), bytes),
            }
            for card in 0..4 {
                assert!(f.granted_on(card) <= Bytes::gib(48), "seed {seed}");
            }
            for (who, bytes) in &clients {
                let (here, away) = f.bytes_of(*who);
                assert_eq!(here + away, *bytes, "seed {seed}, round {round}");
            }
        }
    }
}
