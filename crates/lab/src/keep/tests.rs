use super::*;

fn request(at: f64, model: u32, tenant: u32) -> Request {
    Request {
        at,
        took: 10.0,
        model,
        tenant,
    }
}

/// Tenants that use model 0, then model 1 a minute later; model 2 comes at random, seldom.
fn announced(seed: u64) -> Vec<Request> {
    let mut x = seed;
    let mut random = move |below: f64| {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as f64 / f64::from(1u32 << 31) * below
    };
    let mut out = Vec::new();
    let mut at = 0.0;
    for tenant in 0..300 {
        at += 600.0 + random(1800.0);
        out.push(request(at, 0, tenant));
        out.push(request(at + 40.0 + random(40.0), 1, tenant));
        if tenant % 10 == 0 {
            out.push(request(at + 300.0 + random(200.0), 2, 1000 + tenant));
        }
    }
    out
}

#[test]
fn a_fixed_time_counts_as_it_is_defined() {
    // Gaps of 90, 10 (within the first), and 290 s.
    let requests = [
        request(0.0, 0, 0),
        request(100.0, 0, 0),
        request(105.0, 0, 0),
        request(405.0, 0, 0),
    ];
    let gaps = Gaps::of(&requests);
    let fixed = gaps.fixed(100.0);
    assert_eq!(fixed.cold_percent, 50.0, "the first one and the one after 290 s");
    assert_eq!(fixed.idle_hours * 3600.0, 90.0 + 100.0 + 100.0);
    assert_eq!(
        gaps.fixed(0.0).cold_percent,
        75.0,
        "a request within another is never cold"
    );
    assert_eq!(gaps.optimal(100.0, 90.0 / 3600.0).cold_percent, 50.0);
    assert_eq!(gaps.optimal(100.0, 380.0 / 3600.0).cold_percent, 25.0);
}

#[test]
fn what_is_announced_is_there_when_it_comes() {
    for seed in [1, 2, 3] {
        let requests = announced(seed);
        let out = compare(&requests);
        let fixed = out.iter().find(|o| o.kind == Kind::Fixed(300.0)).unwrap();
        let ours = out
            .iter()
            .filter(|o| matches!(o.kind, Kind::Predicted(_)) && o.idle_hours <= fixed.idle_hours)
            .map(|o| o.cold_percent)
            .fold(100.0, f64::min);
        // A fixed time always misses the second model, which comes half an hour after its last use.
        assert!(
            ours < fixed.cold_percent - 25.0,
            "seed {seed}: {ours} and {}",
            fixed.cold_percent
        );
    }
}

#[test]
fn more_hours_are_fewer_cold_requests_all_along_the_curve() {
    let out = compare(&announced(7));
    let curve: Vec<_> = out
        .iter()
        .filter(|o| matches!(o.kind, Kind::Predicted(_)))
        .collect();
    assert_eq!(curve.len(), POINTS);
    for pair in curve.windows(2) {
        assert!(pair[0].idle_hours >= pair[1].idle_hours, "{pair:?}");
        assert!(pair[0].cold_percent <= pair[1].cold_percent, "{pair:?}");
    }
}

#[test]
fn nothing_is_known_before_it_happened() {
    // Two traces that are one up to a moment: what was spent and missed up to there is the same under both.
    let requests = announced(5);
    let half = requests.len() / 2;
    let cut = requests[half].at;
    let mut other: Vec<Request> = requests[..half].to_vec();
    other.extend(requests[half..].iter().enumerate().map(|(n, r)| Request {
        model: 3 + n as u32 % 2,
        ..*r
    }));
    let before = |requests: &[Request]| {
        let mut log = Vec::new();
        replay(requests, |told| {
            if let Told::Rate(now, model, rate) = told
                && now < cut
            {
                log.push((now.to_bits(), model, rate.to_bits()));
            }
        });
        log
    };
    let (a, b) = (before(&requests), before(&other));
    assert!(a.len() > 1000);
    assert_eq!(a, b);
}

/// The recorded requests, where they are there: the figure that the lab promises.
#[test]
fn on_the_recorded_requests_prediction_beats_every_fixed_time() {
    let Some(data) = crate::data::for_tests("alibaba-gentd26") else {
        return;
    };
    let mut requests = crate::read::gentd::requests(&data).unwrap();
    // A part of them: this is a test, the whole is in docs/measurements/lab.md.
    requests.truncate(2500);
    let out = compare(&requests);
    for fixed in out
        .iter()
        // One minute is too short for the little that these few requests teach: there the two are alike.
        .filter(|o| matches!(o.kind, Kind::Fixed(s) if (120.0..=1200.0).contains(&s)))
    {
        let ours = out
            .iter()
            .filter(|o| matches!(o.kind, Kind::Predicted(_)) && o.idle_hours <= fixed.idle_hours)
            .map(|o| o.cold_percent)
            .fold(100.0, f64::min);
        assert!(ours < fixed.cold_percent, "{fixed:?}: {ours}");
    }
}
