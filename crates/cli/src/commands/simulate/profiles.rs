//! `--profiles FILE [--measured FILE]`: a mix of jobs as each of them was recorded alone, predicted, and beside it what was measured.
//!
//! Both files are what `scripts/gpu/mix.py` writes.

use std::path::Path;
use std::time::Duration;

use ebb_lab::cluster::{self, Job, Outcome, Phase, Policy, Setting};
use ebb_lab::sim::Speeds;
use ebb_units::{Bytes, Priority};
use serde::Deserialize;
use serde_json::json;

use super::policies::span;
use super::scenarios::four;
use super::{Shown, file};
use crate::args::SimulateArgs;
use crate::error::{CliError, Result};
use crate::table::{Align, Table};

/// How far a prediction may be off, percent.
const WITHIN: f64 = 10.0;

#[derive(Debug, Deserialize)]
struct Profiles {
    /// What jobs can have of the card.
    card_bytes: u64,
    /// Bytes a second of the link, one way and both ways together, as measured; the usual ones otherwise.
    one_way: Option<f64>,
    both_ways: Option<f64>,
    idle_release_s: Option<f64>,
    jobs: Vec<Profile>,
}

#[derive(Debug, Deserialize)]
struct Profile {
    name: String,
    #[serde(default)]
    arrives_s: f64,
    #[serde(default)]
    priority: Priority,
    #[serde(default)]
    request_bytes: u64,
    #[serde(default = "yes")]
    lends: bool,
    #[serde(default)]
    by_clock: bool,
    /// So often.
    repeat: usize,
    phases: Vec<Recorded>,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize)]
struct Recorded {
    seconds: f64,
    bytes: u64,
    gpu: f64,
}

#[derive(Debug, Deserialize)]
struct Measured {
    makespan_s: f64,
    moved_back_bytes: u64,
}

fn json_of<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T> {
    let wrong = |what: String| {
        CliError::usage(
            format!("{}: {what}", path.display()),
            "name a file that scripts/gpu/mix.py wrote",
        )
    };
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))
}

fn world(profiles: &Profiles, path: &Path) -> Result<(Vec<Job>, Setting)> {
    let wrong = |what: String| {
        CliError::usage(
            format!("{}: {what}", path.display()),
            "record the jobs anew, each alone",
        )
    };
    let usual = Speeds::default();
    let one_way = profiles.one_way.filter(|r| *r > 0.0).unwrap_or(usual.one_way);
    let both = profiles.both_ways.filter(|r| *r > 0.0);
    let speeds = Speeds {
        one_way,
        both_ways: both.unwrap_or(usual.both_ways / usual.one_way * one_way),
        ..usual
    };
    let mut setting = Setting {
        cards: 1,
        card: Bytes(profiles.card_bytes),
        speeds,
        ..Setting::default()
    };
    setting.policy.out_rate = one_way as u64;
    setting.policy.in_rate = one_way as u64;
    if let Some(s) = profiles.idle_release_s {
        setting.idle_release = Duration::try_from_secs_f64(s).ok();
    }
    let mut jobs = Vec::new();
    for p in &profiles.jobs {
        let phases: Vec<Phase> = p
            .phases
            .iter()
            .map(|r| Phase {
                seconds: r.seconds,
                bytes: Bytes(r.bytes),
                duty: r.gpu.clamp(0.0, 1.0),
            })
            .collect();
        let sound = phases.iter().all(|p| p.seconds.is_finite() && p.seconds >= 0.0);
        if phases.is_empty() || !sound || !(p.arrives_s.is_finite() && p.arrives_s >= 0.0) {
            return Err(wrong(format!("job {}: its times are none", p.name)));
        }
        let job = Job {
            name: p.name.clone(),
            arrives: p.arrives_s,
            priority: p.priority,
            request: Bytes(p.request_bytes),
            limit: None,
            lends: p.lends,
            by_clock: p.by_clock,
            phases: phases.repeat(p.repeat.clamp(1, 1_000_000)),
        };
        if job.peak() > setting.card {
            return Err(wrong(format!(
                "job {} holds {}, more than the card's {}",
                p.name,
                job.peak(),
                setting.card
            )));
        }
        jobs.push(job);
    }
    if jobs.is_empty() {
        return Err(wrong("no jobs".into()));
    }
    Ok((jobs, setting))
}

/// How far a figure is off what was measured, percent.
fn off(predicted: f64, measured: f64) -> f64 {
    100.0 * (predicted - measured) / measured.max(1e-9)
}

/// Predicts a mix, and compares.
pub(super) fn profiles(path: &Path, args: &SimulateArgs) -> Result<Shown> {
    let profiles: Profiles = json_of(path)?;
    let (jobs, mut setting) = world(&profiles, path)?;
    setting.timeline = args.html.is_some() || args.png.is_some();
    let measured: Option<Measured> = args.measured.as_deref().map(json_of).transpose()?;
    let all: Vec<(Policy, Outcome)> = [Policy::Ebb, Policy::Static, Policy::Quotas]
        .into_iter()
        .map(|p| (p, cluster::run(&jobs, &setting, p)))
        .collect();
    let ours = &all[0].1;
    let moved = ours.moved[1].0;
    let rows = [
        (
            "makespan, s",
            ours.makespan,
            measured.as_ref().map(|m| m.makespan_s),
        ),
        (
            "bytes brought back, GB",
            moved as f64 / 1e9,
            measured.as_ref().map(|m| m.moved_back_bytes as f64 / 1e9),
        ),
    ];
    let mut table = Table::new(&[
        ("", Align::Left),
        ("PREDICTED", Align::Right),
        ("MEASURED", Align::Right),
        ("OFF BY", Align::Right),
    ]);
    for (name, predicted, measured) in rows {
        table.row(vec![
            name.into(),
            format!("{predicted:.1}"),
            measured.map_or_else(String::new, |m| format!("{m:.1}")),
            measured.map_or_else(String::new, |m| format!("{:+.1} %", off(predicted, m))),
        ]);
    }
    let errors: Option<Vec<f64>> = rows.iter().map(|r| r.2.map(|m| off(r.1, m))).collect();
    let peak: Bytes = jobs.iter().map(Job::peak).sum();
    Ok(Shown {
        title: "A mix of recorded jobs on one card".into(),
        lines: vec![
            format!(
                "{} jobs that hold {peak} together, on {}",
                jobs.len(),
                setting.card
            ),
            format!(
                "predicted: {} with ebb, {} as they fit by their peaks",
                span(ours.makespan),
                span(all[2].1.makespan)
            ),
        ],
        table,
        json: json!({
            "predicted": {
                "makespan_s": four(ours.makespan),
                "moved_out_bytes": ours.moved[0].0,
                "moved_back_bytes": moved,
                "work_vs_as_they_fit": four(all[2].1.makespan / ours.makespan.max(1e-9)),
                "failed": ours.failed(),
            },
            "measured": measured.as_ref().map(|m| json!({
                "makespan_s": m.makespan_s,
                "moved_back_bytes": m.moved_back_bytes,
            })),
            "makespan_error_percent": errors.as_ref().map(|e| four(e[0])),
            "moved_error_percent": errors.as_ref().map(|e| four(e[1])),
            "within_10_percent": errors.as_ref().map(|e| e.iter().all(|e| e.abs() <= WITHIN)),
        }),
        charts: if setting.timeline {
            file::charts(&jobs, &setting, &all)
        } else {
            Vec::new()
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIX: &str = r#"{"card_bytes": 1000000000, "one_way": 1e9, "both_ways": 2e9, "jobs": [
        {"name": "a", "repeat": 10, "phases": [{"seconds": 3, "bytes": 700000000, "gpu": 1}, {"seconds": 4, "bytes": 700000000, "gpu": 0}]},
        {"name": "b", "repeat": 10, "priority": "high", "phases": [{"seconds": 2, "bytes": 600000000, "gpu": 1}, {"seconds": 5, "bytes": 600000000, "gpu": 0}]}]}"#;

    #[test]
    fn recorded_jobs_become_a_world_that_ends() {
        let profiles: Profiles = serde_json::from_str(MIX).unwrap();
        let (jobs, setting) = world(&profiles, Path::new("p.json")).unwrap();
        assert_eq!((jobs.len(), jobs[0].seconds()), (2, 70.0));
        let ours = cluster::run(&jobs, &setting, Policy::Ebb);
        let theirs = cluster::run(&jobs, &setting, Policy::Quotas);
        assert_eq!(ours.failed(), 0);
        assert!((theirs.makespan - 140.0).abs() < 0.1, "one after the other");
        assert!(ours.makespan < 100.0, "{}", ours.makespan);
        assert!(ours.moved[1].0 > 5_000_000_000, "{:?}", ours.moved);
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (from, to, what) in [
            (
                "\"bytes\": 700000000",
                "\"bytes\": 1700000000",
                "more than the card",
            ),
            ("\"seconds\": 3", "\"seconds\": -3", "times are none"),
        ] {
            let profiles: Profiles = serde_json::from_str(&MIX.replacen(from, to, 1)).unwrap();
            let error = world(&profiles, Path::new("p.json")).unwrap_err();
            assert!(error.message.starts_with("p.json: job a"), "{}", error.message);
            assert!(error.message.contains(what), "{}", error.message);
        }
    }

    #[test]
    fn errors_have_a_sign() {
        assert_eq!(off(110.0, 100.0), 10.0);
        assert_eq!(off(90.0, 100.0), -10.0);
    }
}
