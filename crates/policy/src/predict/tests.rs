use super::*;

fn at(seconds: f64) -> Time {
    Time((seconds * 1e9) as u64)
}

/// Numbers below a bound, the same ones for a seed.
fn random(seed: u64) -> impl FnMut(f64) -> f64 {
    let mut x = seed;
    move |below| {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as f64 / f64::from(1_u32 << 31) * below
    }
}

/// Idle times of a task that may return at any moment, `mean` seconds on average.
fn memoryless(mean: f64, random: &mut impl FnMut(f64) -> f64) -> f64 {
    -mean * (1.0 - random(1.0)).ln()
}

#[test]
fn a_task_that_comes_often_is_expected_sooner_than_one_that_does_not() {
    let mut p = Predictor::new();
    let mut random = random(1);
    let mut next = [0.0, 0.0];
    let means = [50.0, 2000.0];
    let mut ended = [0.0, 0.0];
    while next[0] < 100_000.0 {
        let task = usize::from(next[1] < next[0]);
        p.began(at(next[task]), task as u64, None);
        p.ended(at(next[task] + 0.1), task as u64, None);
        ended[task] = next[task];
        next[task] += 0.1 + memoryless(means[task], &mut random);
    }
    let now = at(ended[0].max(ended[1]) + 20.0);
    let (often, seldom) = (p.rate(now, 0).unwrap(), p.rate(now, 1).unwrap());
    assert!(often > 10.0 * seldom, "{often} {seldom}");
    assert!((1.0 / 100.0..1.0 / 25.0).contains(&often), "{often}");
}

#[test]
fn expectation_fades_with_idleness() {
    let mut p = Predictor::new();
    let mut random = random(2);
    let mut end = 0.0;
    for _ in 0..400 {
        let begin = end + memoryless(20.0, &mut random);
        end = begin + 3.0;
        p.began(at(begin), 1, None);
        p.ended(at(end), 1, None);
    }
    let soon = p.rate(at(end + 20.0), 1).unwrap();
    p.advance(at(end + 3600.0));
    let late = p.rate(at(end + 3600.0), 1).unwrap();
    assert!(late < soon / 20.0, "{soon} {late}");
}

#[test]
fn a_period_brings_the_expectation_back() {
    let mut p = Predictor::new();
    for n in 0..60 {
        let t = f64::from(n) * 3600.0;
        p.began(at(t), 1, None);
        p.ended(at(t + 10.0), 1, None);
    }
    let last = 59.0 * 3600.0 + 10.0;
    p.advance(at(last + 900.0));
    let between = p.rate(at(last + 900.0), 1).unwrap();
    p.advance(at(last + 3500.0));
    let due = p.rate(at(last + 3500.0), 1).unwrap();
    assert!(due > 3.0 * between, "{between} {due}");
}

#[test]
fn callers_that_go_on_announce_the_next_task() {
    let mut p = Predictor::new();
    let mut t = 0.0;
    for caller in 0..300 {
        p.began(at(t), 1, Some(caller));
        p.ended(at(t + 10.0), 1, Some(caller));
        p.began(at(t + 40.0), 2, Some(caller));
        p.ended(at(t + 50.0), 2, Some(caller));
        t += 2000.0 + f64::from(caller as u32 * 7919 % 1000);
    }
    p.advance(at(t));
    let before = p.rate(at(t), 2).unwrap();
    p.began(at(t), 1, Some(1000));
    p.ended(at(t + 10.0), 1, Some(1000));
    let after = p.rate(at(t + 12.0), 2).unwrap();
    assert!(after > 4.0 * before, "{before} {after}");
}

#[test]
fn in_use_or_unknown_there_is_nothing_to_expect() {
    let mut p = Predictor::new();
    assert_eq!(p.rate(at(1.0), 7), None);
    p.began(at(1.0), 7, None);
    assert_eq!(p.rate(at(2.0), 7), None);
    p.began(at(2.0), 7, None);
    p.ended(at(3.0), 7, None);
    assert_eq!(p.rate(at(3.0), 7), None, "another use of it goes on");
    p.ended(at(4.0), 7, None);
    assert!(p.rate(at(5.0), 7).is_some());
    p.forget(7);
    assert_eq!(p.rate(at(6.0), 7), None);
}

#[test]
fn the_same_history_gives_the_same_rates() {
    let run = || {
        let mut p = Predictor::new();
        let mut x: u64 = 1;
        let mut t = 0.0;
        for _ in 0..2000 {
            x = x
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            t += (x >> 58) as f64;
            let task = x >> 40 & 7;
            p.began(at(t), task, Some(x >> 50 & 15));
            p.ended(at(t + 1.0), task, Some(x >> 50 & 15));
        }
        (0..8)
            .map(|task| p.rate(at(t + 100.0), task).map(f64::to_bits))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(), run());
}

#[test]
fn slots_of_tasks_that_ended_are_used_again() {
    let mut p = Predictor::new();
    for task in 0..1000 {
        p.began(at(task as f64), task, Some(task % 5));
        p.ended(at(task as f64 + 0.5), task, Some(task % 5));
        if task >= 10 {
            p.forget(task - 10);
        }
    }
    assert!(p.tasks.len() <= 11);
}
