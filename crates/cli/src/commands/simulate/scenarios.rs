//! The built-in scenarios: what is read, what is run, how it is shown.

use ebb_lab::chart::{Axis, Chart, Mark, Series};
use ebb_lab::keep::{self, Kind};
use ebb_lab::picture::Picture;
use ebb_lab::read::gentd;
use ebb_lab::read::table::TableError;
use ebb_lab::serving::{self, Setting};
use ebb_units::Bytes;
use serde_json::json;

use super::Shown;
use super::file::SHORTEST;
use crate::args::SimulateArgs;
use crate::commands::watch::Watch;
use crate::error::{CliError, Result};
use crate::table::{Align, Table};

pub(super) fn unreadable(error: &TableError) -> CliError {
    CliError::usage(
        error.to_string(),
        "name the folder of the traces with --data DIR or EBB_DATA",
    )
}

pub(super) fn axis(name: &str, log: bool) -> Axis {
    Axis {
        name: name.into(),
        log,
    }
}

pub(super) fn four(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

/// The serving cluster.
pub(super) fn gentd26(args: &SimulateArgs) -> Result<Shown> {
    let watch = Watch::timed("reading traces");
    let recording = gentd::recording(&args.data).map_err(|e| unreadable(&e))?;
    watch.say(format!(
        "{} containers over {:.1} h",
        recording.containers.len(),
        serving::hours(&recording)
    ));
    let setting = Setting {
        card: args.card,
        seed: args.seed(),
        ..Setting::default()
    };
    let out = serving::serve(&recording, &setting)
        .map_err(|e| CliError::usage(e.to_string(), "name larger cards with --card"))?;
    drop(watch);
    let mut table = Table::new(&[
        ("", Align::Left),
        ("STATIC", Align::Right),
        ("EBB", Align::Right),
        ("RATIO", Align::Right),
    ]);
    let gib = |bytes: Bytes| bytes.0 as f64 / (1_u64 << 30) as f64;
    let card = gib(out.card);
    table.row(vec![
        "memory of cards at the peak, GiB".into(),
        format!("{:.0}", gib(out.static_peak)),
        format!("{:.0} ({} cards)", card * out.cards_peak as f64, out.cards_peak),
        format!("{:.3}", out.peak_vs_static()),
    ]);
    table.row(vec![
        "memory of cards over time, GiB h".into(),
        format!("{:.0}", out.static_gib_hours),
        format!("{:.0}", out.card_hours * card),
        format!("{:.3}", out.card_hours_vs_static()),
    ]);
    table.row(vec![
        "bytes of busy containers at the peak, GiB".into(),
        String::new(),
        format!("{:.0}", gib(out.busy_peak)),
        format!("{:.3}", out.oracle_peak_vs_static()),
    ]);
    for (name, share) in [("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("longest", 1.0)] {
        table.row(vec![
            format!("added wait of a wake or move, {name}"),
            "0".into(),
            format!("{:.3} s", out.wait(share)),
            String::new(),
        ]);
    }
    let lines = vec![
        format!(
            "{} containers, {:.1} h, cards of {:.0} GiB, {} a node, 55 GB/s each way and 94 both",
            recording.containers.len(),
            serving::hours(&recording),
            card,
            setting.per_node
        ),
        format!(
            "{} wakes, {} with all bytes on the card; {} moves between cards; {} out, {} back",
            out.wakes, out.warm, out.moves, out.moved[0], out.moved[1]
        ),
        format!(
            "cards asked for more than their GPU time in {} samples, for more than their bytes in {}",
            out.over_gpu_time, out.over_bytes
        ),
    ];
    let hours = |n: usize| n as f64 * recording.period / 3600.0;
    let series = |name: &str, mark, values: Vec<f64>| Series {
        name: name.into(),
        mark,
        points: values
            .into_iter()
            .enumerate()
            .map(|(n, v)| (hours(n), v))
            .collect(),
    };
    let memory = Chart {
        title: "Memory of the cards that the cluster needs".into(),
        x: axis("hours", false),
        y: axis("GiB", false),
        series: vec![
            series(
                "static, each at its peak",
                Mark::Line,
                out.fixed.iter().map(|b| gib(*b)).collect(),
            ),
            series(
                "cards on with ebb",
                Mark::Steps,
                out.cards.iter().map(|n| *n as f64 * card).collect(),
            ),
            series(
                "bytes of busy containers",
                Mark::Line,
                out.busy.iter().map(|b| gib(*b)).collect(),
            ),
        ],
    };
    let waits = Chart {
        title: "Added wait of wakes and moves".into(),
        x: axis("percent of wakes and moves", false),
        y: axis("seconds, at most", true),
        series: vec![Series {
            name: "wait".into(),
            mark: Mark::Line,
            points: (0..=200)
                .map(|n| (f64::from(n) / 2.0, out.wait(f64::from(n) / 200.0).max(SHORTEST)))
                .collect(),
        }],
    };
    Ok(Shown {
        title: "A serving cluster: containers' memory leaves while they idle".into(),
        lines,
        table,
        json: json!({
            "peak_vs_static": four(out.peak_vs_static()),
            "card_hours_vs_static": four(out.card_hours_vs_static()),
            "p99_added_wait_s": four(out.wait(0.99)),
            "oracle_peak_vs_static": four(out.oracle_peak_vs_static()),
        }),
        charts: vec![Picture::Chart(memory), Picture::Chart(waits)],
    })
}

/// Keep-alive.
pub(super) fn lora(args: &SimulateArgs) -> Result<Shown> {
    let watch = Watch::timed("reading traces");
    let requests = gentd::requests(&args.data).map_err(|e| unreadable(&e))?;
    watch.say(format!("{} requests", requests.len()));
    let out = keep::compare(&requests);
    drop(watch);
    let mut table = Table::new(&[
        ("POLICY", Align::Left),
        ("IDLE HOURS", Align::Right),
        ("COLD", Align::Right),
    ]);
    for o in &out {
        table.row(vec![
            o.kind.to_string(),
            format!("{:.1}", o.idle_hours),
            format!("{:.2} %", o.cold_percent),
        ]);
    }
    let points = |name: &str, mark, which: fn(&Kind) -> bool| {
        let mut points: Vec<(f64, f64)> = out
            .iter()
            .filter(|o| which(&o.kind) && o.idle_hours >= 25.0)
            .map(|o| (o.idle_hours, o.cold_percent))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series {
            name: name.into(),
            mark,
            points,
        }
    };
    let chart = Chart {
        title: "Cold requests for the hours that idle models stay resident".into(),
        x: axis("idle-resident hours", true),
        y: axis("cold requests, percent", false),
        series: vec![
            points("fixed keep-alive", Mark::Dots, |k| matches!(k, Kind::Fixed(_))),
            points("predicted", Mark::Line, |k| matches!(k, Kind::Predicted(_))),
            points("predicted, steered to the hours of fixed", Mark::Dots, |k| {
                matches!(k, Kind::Budget(_))
            }),
            points("optimal, knows every gap", Mark::Dots, |k| {
                matches!(k, Kind::Optimal(_))
            }),
        ],
    };
    Ok(Shown {
        title: "Keep-alive of models: cold requests against idle hours".into(),
        lines: vec![format!("{} answered requests", requests.len())],
        table,
        json: out
            .iter()
            .map(|o| {
                json!({
                    "policy": o.kind.to_string(),
                    "idle_hours": (o.idle_hours * 10.0).round() / 10.0,
                    "cold_percent": (o.cold_percent * 1000.0).round() / 1000.0,
                })
            })
            .collect(),
        charts: vec![Picture::Chart(chart)],
    })
}
