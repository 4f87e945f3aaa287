//! `--scenario FILE`: a scenario of one's own.

use std::path::Path;
use std::time::Instant;

use ebb_lab::chart::{Chart, Mark, Series};
use ebb_lab::cluster::{self, Job, Outcome, Policy};
use ebb_lab::file::{self, Scenario};
use ebb_lab::picture::{self, Bars, Picture};
use serde_json::{Value, json};

use super::policies::span;
use super::scenarios::{axis, four};
use super::{Shown, policies};
use crate::args::SimulateArgs;
use crate::commands::watch::Watch;
use crate::error::{CliError, Result};

/// Shorter waits are drawn as this long: an axis of factors has no zero.
pub(super) const SHORTEST: f64 = 0.01;
/// With more jobs than this nobody looks at each, and who was where is not kept.
const LOOKED_AT: usize = 400;

pub(super) fn read(path: &Path, args: &SimulateArgs) -> Result<Scenario> {
    let mut scenario = file::read(path, args.seed_given()).map_err(|e| {
        CliError::usage(
            e.to_string(),
            "the form of a scenario file is in docs/scenarios.md",
        )
    })?;
    if let Some(cards) = args.cards {
        scenario.setting.cards = cards.max(1);
    }
    if let Some(card) = args.card {
        scenario.setting.card = card;
    }
    Ok(scenario)
}

/// Runs a scenario under all its policies.
pub(super) fn scenario(path: &Path, args: &SimulateArgs) -> Result<Shown> {
    let scenario = read(path, args)?;
    Ok(compare(&scenario, args.html.is_some() || args.png.is_some()))
}

/// Runs a scenario and shows it.
pub(super) fn compare(scenario: &Scenario, pictures: bool) -> Shown {
    let Scenario {
        title,
        setting,
        jobs,
        policies,
    } = scenario;
    let mut setting = setting.clone();
    setting.timeline = pictures && jobs.len() <= LOOKED_AT;
    let mut seconds = 0.0;
    let mut all: Vec<(Policy, Outcome)> = Vec::new();
    let watch = Watch::timed("simulating");
    for (n, policy) in policies.iter().enumerate() {
        watch.say(format!("{policy}: {} of {} policies", n + 1, policies.len()));
        let began = Instant::now();
        let out = cluster::run(jobs, &setting, *policy);
        if *policy == Policy::Ebb {
            seconds = began.elapsed().as_secs_f64();
        }
        all.push((*policy, out));
    }
    drop(watch);
    let peak: u64 = jobs.iter().map(|j| j.peak().0).sum();
    let mut lines = vec![format!(
        "{} jobs on {} of {}; at their peaks they hold {} together",
        jobs.len(),
        if setting.cards == 1 {
            "a card".to_owned()
        } else {
            format!("{} cards", setting.cards)
        },
        setting.card,
        ebb_units::Bytes(peak)
    )];
    if let Some((_, out)) = all.iter().find(|(p, o)| *p == Policy::Ebb && o.events > 0) {
        lines.push(format!(
            "with ebb: {} events of arbiters in {}, {:.0} thousand a second",
            out.events,
            span(seconds),
            out.events as f64 / seconds.max(1e-9) / 1000.0
        ));
    }
    Shown {
        title: title.clone(),
        lines,
        table: policies::table(jobs, &all),
        json: json(title, scenario, &all),
        charts: if pictures {
            charts(jobs, &setting, &all)
        } else {
            Vec::new()
        },
    }
}

/// Pictures of a comparison: who had which memory, what the jobs did, how long it took, how long they waited.
pub(super) fn charts(jobs: &[Job], setting: &cluster::Setting, all: &[(Policy, Outcome)]) -> Vec<Picture> {
    let mut out = Vec::new();
    let ours = all
        .iter()
        .find(|(p, _)| *p == Policy::Ebb)
        .or_else(|| all.first());
    if let Some((policy, run)) = ours {
        out.extend(picture::of_run(jobs, run, setting.cards, setting.card, *policy));
    }
    if all.len() > 1 {
        let bars = |title: &str, value: fn(&Outcome) -> f64, write: fn(f64) -> String| {
            Picture::Bars(Bars {
                title: title.into(),
                bars: all
                    .iter()
                    .map(|(p, o)| (p.to_string(), value(o), write(value(o))))
                    .collect(),
            })
        };
        out.push(bars(
            "From the first arrival to the last end",
            |o| o.makespan,
            span,
        ));
        out.push(bars(
            "Bytes in use by busy tasks, of the cards' bytes",
            |o| o.utilisation * 100.0,
            |v| format!("{v:.1} %"),
        ));
    }
    let series: Vec<Series> = all
        .iter()
        .filter(|(_, o)| o.wait(1.0) > 0.0)
        .map(|(p, o)| Series {
            name: p.to_string(),
            mark: Mark::Line,
            points: (0..=200)
                .map(|n| (f64::from(n) / 2.0, o.wait(f64::from(n) / 200.0).max(SHORTEST)))
                .collect(),
        })
        .collect();
    if !series.is_empty() {
        out.push(Picture::Chart(Chart {
            title: "How long those waited who wanted to use the GPU".into(),
            x: axis("percent of them", false),
            y: axis("seconds, at most", true),
            series,
        }));
    }
    out
}

fn json(title: &str, scenario: &Scenario, all: &[(Policy, Outcome)]) -> Value {
    let jobs = &scenario.jobs;
    let each: Option<Value> = (jobs.len() <= LOOKED_AT).then(|| {
        all.iter()
            .map(|(policy, out)| {
                let each: Value = jobs
                    .iter()
                    .zip(&out.jobs)
                    .map(|(job, done)| {
                        let mut slower: Vec<f64> = done.bursts.iter().map(|b| b.0 / b.1.max(1e-9)).collect();
                        slower.sort_by(f64::total_cmp);
                        json!({
                            "job": job.name,
                            "started_s": done.started.map(four),
                            "ended_s": done.ended.map(four),
                            "waited_s": four(done.waited),
                            "stopped": done.stopped,
                            "bursts": done.bursts.len(),
                            "p99_slowdown": four(ebb_lab::stats::quantile(&slower, 0.99)),
                        })
                    })
                    .collect();
                json!({ "policy": policy.to_string(), "jobs": each })
            })
            .collect()
    });
    json!({
        "title": title,
        "jobs": jobs.len(),
        "cards": scenario.setting.cards,
        "card_bytes": scenario.setting.card.0,
        "policies": policies::json(jobs, all),
        "each": each,
    })
}
