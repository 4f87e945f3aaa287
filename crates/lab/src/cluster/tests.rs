use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

use super::*;

fn phase(seconds: f64, gib: u64, duty: f64) -> Phase {
    Phase {
        seconds,
        bytes: Bytes::gib(gib),
        duty,
    }
}

fn job(name: &str, arrives: f64, phases: Vec<Phase>) -> Job {
    Job {
        name: name.into(),
        arrives,
        priority: Priority::Normal,
        request: Bytes::ZERO,
        limit: None,
        lends: true,
        by_clock: false,
        phases,
    }
}

fn cluster(cards: usize, gib: u64) -> Setting {
    Setting {
        cards,
        card: Bytes::gib(gib),
        timeline: true,
        ..Setting::default()
    }
}

/// Bytes on the cards at each change.
fn sums(timeline: &Timeline) -> Vec<Bytes> {
    let mut changes: Vec<(f64, usize, Bytes)> = Vec::new();
    for (n, lane) in timeline.lanes.iter().enumerate() {
        changes.extend(lane.resident.iter().map(|(at, bytes)| (*at, n, *bytes)));
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut now = vec![Bytes::ZERO; timeline.lanes.len()];
    let mut out = Vec::new();
    for (n, change) in changes.iter().enumerate() {
        now[change.1] = change.2;
        // What changes at one moment is looked at when all of it has.
        if changes.get(n + 1).is_none_or(|next| next.0 > change.0) {
            out.push(now.iter().copied().sum());
        }
    }
    out
}

#[test]
fn a_job_alone_takes_as_long_as_it_takes_under_every_policy() {
    let jobs = [job(
        "a",
        5.0,
        vec![phase(10.0, 20, 0.5), phase(3.0, 20, 0.0), phase(10.0, 30, 1.0)],
    )];
    for policy in Policy::ALL {
        let out = run(&jobs, &cluster(1, 40), policy);
        assert!((out.makespan - 23.0).abs() < 0.01, "{policy}: {}", out.makespan);
        assert_eq!(out.failed(), 0, "{policy}");
        assert_eq!(out.jobs[0].bursts.len(), 2, "{policy}: {:?}", out.jobs[0]);
    }
}

#[test]
fn who_alternates_shares_a_card_with_ebb_and_waits_in_line_statically() {
    let bursts = |n: usize| -> Vec<Phase> {
        let busy = phase(10.0, 30, 0.9);
        let idle = phase(30.0, 30, 0.0);
        (0..40)
            .map(|k| if k % 2 == n % 2 { busy } else { idle })
            .collect()
    };
    let jobs: Vec<Job> = (0..3).map(|n| job(&format!("j{n}"), 0.0, bursts(n))).collect();
    let setting = cluster(1, 40);
    let ours = run(&jobs, &setting, Policy::Ebb);
    let theirs = run(&jobs, &setting, Policy::Static);
    let oracle = run(&jobs, &setting, Policy::Oracle);
    assert!((theirs.makespan - 3.0 * 800.0).abs() < 1.0, "{}", theirs.makespan);
    assert!(ours.makespan < 0.55 * theirs.makespan, "{}", ours.makespan);
    assert!(
        oracle.makespan <= ours.makespan * 1.01,
        "{} {}",
        oracle.makespan,
        ours.makespan
    );
    assert!(ours.moved[1] > Bytes::gib(100), "{:?}", ours.moved);
}

#[test]
fn gpu_time_is_shared_and_not_sold_twice() {
    // By bytes both fit; by GPU time they take twice as long.
    let jobs: Vec<Job> = (0..2)
        .map(|n| job(&format!("j{n}"), 0.0, vec![phase(100.0, 10, 1.0)]))
        .collect();
    for policy in Policy::ALL {
        let out = run(&jobs, &cluster(1, 40), policy);
        assert!((out.makespan - 200.0).abs() < 1.0, "{policy}: {}", out.makespan);
    }
}

#[test]
fn bursts_by_the_clock_are_counted_from_when_they_were_due() {
    // Two services, each by itself busy 2 s in every 10 s; the second one's bursts fall into the first one's.
    let bursts = || -> Vec<Phase> {
        (0..10)
            .flat_map(|_| [phase(2.0, 30, 1.0), phase(8.0, 30, 0.0)])
            .collect()
    };
    let jobs: Vec<Job> = (0..2)
        .map(|n| Job {
            by_clock: true,
            ..job(&format!("s{n}"), 0.0, bursts())
        })
        .collect();
    let out = run(&jobs, &cluster(1, 40), Policy::Ebb);
    // The clock holds: nobody ends later than a burst after what was planned.
    assert!(out.makespan < 100.0 + 8.0, "{}", out.makespan);
    let longest = out.jobs.iter().flat_map(|d| &d.bursts).map(|b| b.0 - b.1);
    assert!(longest.fold(0.0, f64::max) > 0.5, "one of them waits each time");
}

#[test]
fn what_can_never_fit_fails_and_the_others_go_on() {
    let jobs = [
        job("large", 0.0, vec![phase(10.0, 50, 0.5)]),
        job("small", 0.0, vec![phase(10.0, 5, 0.5)]),
    ];
    for policy in Policy::ALL {
        let out = run(&jobs, &cluster(1, 40), policy);
        assert_eq!(out.failed(), 1, "{policy}");
        assert!(out.jobs[1].ended.is_some(), "{policy}");
    }
}

#[test]
fn a_higher_priority_waits_less() {
    let busy = |gib| vec![phase(60.0, gib, 0.6)];
    let mut jobs: Vec<Job> = (0..6).map(|n| job(&format!("j{n}"), 0.0, busy(30))).collect();
    jobs[5].priority = Priority::High;
    for policy in [Policy::Ebb, Policy::Static] {
        let out = run(&jobs, &cluster(1, 40), policy);
        let ended = |n: usize| out.jobs[n].ended.unwrap();
        assert!(
            (1..5).filter(|n| ended(5) < ended(*n)).count() >= 4,
            "{policy}: {:?}",
            out.jobs
        );
    }
}

/// Random jobs: all of them end, cards are never over-granted, and no policy does more work than there is.
#[test]
fn whatever_the_jobs_are_they_end_and_cards_hold_what_they_hold() {
    for seed in 0..12 {
        let mut rng = Pcg64::seed_from_u64(seed);
        let mut below = |n: u64| rng.next_u64() % n;
        let jobs: Vec<Job> = (0..14)
            .map(|n| {
                let phases = (0..1 + below(12))
                    .map(|_| {
                        let duty = if below(2) == 0 {
                            0.0
                        } else {
                            0.1 + below(10) as f64 / 10.0
                        };
                        phase(1.0 + below(120) as f64, 1 + below(39), duty.min(1.0))
                    })
                    .collect();
                Job {
                    by_clock: below(2) == 0,
                    priority: [Priority::Low, Priority::Normal, Priority::High][below(3) as usize],
                    ..job(&format!("j{n}"), below(300) as f64, phases)
                }
            })
            .collect();
        let setting = Setting {
            moves: seed % 2 == 0,
            per_node: 2,
            ..cluster(3, 40)
        };
        for policy in Policy::ALL {
            let out = run(&jobs, &setting, policy);
            assert_eq!(out.failed(), 0, "seed {seed}, {policy}");
            assert!(out.utilisation <= 1.0, "seed {seed}, {policy}");
            let longest = jobs.iter().map(Job::seconds).fold(0.0, f64::max);
            assert!(out.makespan + 1e-6 >= longest, "seed {seed}, {policy}");
            if policy != Policy::Oracle {
                let most = sums(&out.timeline).into_iter().max().unwrap();
                assert!(most <= Bytes::gib(120), "seed {seed}, {policy}: {most}");
            }
            for (done, job) in out.jobs.iter().zip(&jobs) {
                assert!(
                    done.ended.unwrap() - done.started.unwrap() + 1e-6
                        >= job.seconds() * if job.by_clock { 0.0 } else { 1.0 },
                    "seed {seed}, {policy}: {done:?}"
                );
            }
            assert_eq!(out, run(&jobs, &setting, policy), "the same again");
        }
    }
}

#[test]
fn requests_are_guaranteed_on_the_card() {
    let mut jobs: Vec<Job> = (0..4)
        .map(|n| job(&format!("j{n}"), 0.0, vec![phase(30.0, 20, 0.3)]))
        .collect();
    for j in &mut jobs {
        j.request = Bytes::gib(20);
    }
    let out = run(&jobs, &cluster(1, 40), Policy::Ebb);
    // Two at a time, none of which is ever stopped.
    assert_eq!(out.stopped(), 0);
    assert!((out.makespan - 60.0).abs() < 2.0, "{}", out.makespan);
}
