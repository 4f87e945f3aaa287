use super::*;
use crate::read::gentd::Container;

/// Containers of so many GiB that are busy in the samples that `busy` says, with this duty cycle.
fn recording(gib: &[u64], steps: usize, duty: f64, busy: impl Fn(usize, usize) -> bool) -> Recording {
    Recording {
        period: 60.0,
        steps,
        containers: gib
            .iter()
            .enumerate()
            .map(|(n, gib)| Container {
                name: format!("c{n}"),
                bytes: vec![Some(Bytes::gib(*gib)); steps],
                duty: (0..steps)
                    .map(|step| if busy(n, step) { duty } else { 0.0 })
                    .collect(),
            })
            .collect(),
    }
}

#[test]
fn containers_that_take_turns_need_one_card() {
    let recording = recording(&[20; 4], 40, 0.5, |n, step| step % 4 == n);
    let out = serve(&recording, &Setting::default()).unwrap();
    assert_eq!(out.card, Bytes::gib(24));
    assert_eq!(out.static_peak, Bytes::gib(80));
    assert_eq!(out.cards_peak, 1);
    assert_eq!(out.wakes, 40);
    assert!(out.wait(0.99) < 0.6, "{:?}", out.waits);
    assert_eq!((out.over_gpu_time, out.over_bytes), (0, 0));
}

#[test]
fn gpu_time_is_not_sold_twice() {
    // By bytes all four fit one card; by GPU time two do.
    let all = recording(&[10, 10, 10, 47], 30, 0.45, |n, _| n < 3);
    let out = serve(&all, &Setting::default()).unwrap();
    assert_eq!(out.card, Bytes::gib(48));
    assert_eq!(out.cards_peak, 2);
    assert_eq!(out.over_gpu_time, 0);
}

#[test]
fn cards_are_given_back_when_nobody_is_busy() {
    let recording = recording(&[20; 4], 60, 0.2, |_, step| step < 6);
    let out = serve(&recording, &Setting::default()).unwrap();
    assert!(
        out.card_hours < out.cards_peak as f64 * 8.0 / 60.0,
        "{} hours of {} cards",
        out.card_hours,
        out.cards_peak
    );
    assert_eq!(*out.cards.last().unwrap(), 0);
}

#[test]
fn what_does_not_fit_a_card_is_refused_by_name() {
    let recording = recording(&[20, 60], 3, 0.2, |_, _| true);
    let setting = Setting {
        card: Some(Bytes::gib(48)),
        ..Setting::default()
    };
    let error = serve(&recording, &setting).unwrap_err().to_string();
    assert_eq!(error, "container c1 holds 60 GiB, more than a card of 48 GiB");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let recording = recording(&[12, 20, 30, 8, 40], 30, 0.3, |n, step| (step * (n + 3)) % 5 < 2);
    let run = |seed| {
        serve(
            &recording,
            &Setting {
                seed,
                ..Setting::default()
            },
        )
        .unwrap()
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).card_hours, run(4).card_hours);
}

/// The recorded cluster, where it is there: some of its busiest hour. The whole is in docs/measurements/lab.md.
#[test]
fn a_part_of_the_recorded_cluster_is_served() {
    let Some(data) = crate::data::for_tests("alibaba-gentd26") else {
        return;
    };
    let mut recording = crate::read::gentd::recording(&data).unwrap();
    recording.steps = 12;
    let out = serve(&recording, &Setting::default()).unwrap();
    assert_eq!((out.over_gpu_time, out.over_bytes), (0, 0));
    assert!(out.wait(0.99) < 1.2, "{}", out.wait(0.99));
    assert!(out.peak_vs_static() < 0.6, "{}", out.peak_vs_static());
}
