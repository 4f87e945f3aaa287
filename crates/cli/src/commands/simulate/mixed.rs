//! `mixed`: trainings and services drawn from recordings, on one busy cluster.

use ebb_lab::cluster::{self, Job, Outcome, Policy, Setting};
use ebb_lab::mixed::{self, Mix};
use ebb_lab::read::gentd::Recording;
use ebb_lab::read::jobs::Training;
use ebb_lab::read::{gentd, jobs};
use serde_json::json;

use super::scenarios::{four, unreadable};
use super::{Shown, policies};
use crate::args::SimulateArgs;
use crate::commands::watch::Watch;
use crate::error::{CliError, Result};
use crate::table::{Align, Table};

/// What jobs are drawn from.
struct Drawn {
    services: Recording,
    trainings: Vec<Training>,
    times: Vec<f64>,
}

impl Drawn {
    fn read(args: &SimulateArgs) -> Result<Self> {
        let _watch = Watch::timed("reading traces");
        Ok(Self {
            services: gentd::recording(&args.data).map_err(|e| unreadable(&e))?,
            trainings: jobs::trainings(&args.data).map_err(|e| unreadable(&e))?,
            times: jobs::run_times(&args.data).map_err(|e| unreadable(&e))?,
        })
    }

    fn cluster(&self, args: &SimulateArgs, seed: u64) -> Result<(Vec<Job>, Setting)> {
        let mix = Mix {
            seed,
            ..Mix::default()
        };
        let drawn = mixed::draw(&self.services, &self.trainings, &self.times, &mix);
        mixed::cluster(&drawn, &mix, args.card, args.cards)
            .map_err(|e| CliError::usage(e.to_string(), "name larger cards with --card"))
    }
}

fn head(jobs: &[Job], setting: &Setting) -> String {
    let bytes: f64 = jobs.iter().map(Job::in_use).sum::<f64>() * (1_u64 << 30) as f64 / setting.card.0 as f64;
    let gpu: f64 = jobs.iter().map(Job::gpu_hours).sum();
    format!(
        "{} jobs on {} cards of {}; alone they use {bytes:.1} cards' hours of memory and {gpu:.1} of GPU time",
        jobs.len(),
        setting.cards,
        setting.card
    )
}

/// Trainings and services together.
pub(super) fn mixed(args: &SimulateArgs) -> Result<Shown> {
    let drawn = Drawn::read(args)?;
    if let Some(count) = args.seeds {
        return seeds(args, &drawn, count);
    }
    let (jobs, setting) = drawn.cluster(args, args.seed())?;
    let setting = Setting {
        timeline: args.html.is_some() || args.png.is_some(),
        ..setting
    };
    let watch = Watch::timed("simulating");
    let run = |(n, policy): (usize, Policy)| {
        watch.say(format!("{policy}: {} of {} policies", n + 1, Policy::ALL.len()));
        (policy, cluster::run(&jobs, &setting, policy))
    };
    let all: Vec<(Policy, Outcome)> = Policy::ALL.into_iter().enumerate().map(run).collect();
    drop(watch);
    let (utilisation, makespan) = mixed::ratios(&all[0].1, &all[1].1);
    Ok(Shown {
        title: "Trainings and services together, on as many cards".into(),
        lines: vec![
            head(&jobs, &setting),
            format!(
                "with ebb against static: {utilisation:.3} of the utilisation, {makespan:.3} of the makespan"
            ),
            "used: bytes in use by busy jobs, of the cards' bytes, over the makespan".into(),
        ],
        table: policies::table(&jobs, &all),
        json: json!({
            "utilisation_vs_static": four(utilisation),
            "makespan_vs_static": four(makespan),
            "jobs": jobs.len(),
            "cards": setting.cards,
            "policies": policies::json(&jobs, &all),
        }),
        charts: if setting.timeline {
            super::file::charts(&jobs, &setting, &all)
        } else {
            Vec::new()
        },
    })
}

/// The ratios for several seeds.
fn seeds(args: &SimulateArgs, drawn: &Drawn, count: u64) -> Result<Shown> {
    let mut table = Table::new(&[
        ("SEED", Align::Right),
        ("CARDS", Align::Right),
        ("STATIC", Align::Right),
        ("EBB", Align::Right),
        ("UTILISATION", Align::Right),
        ("MAKESPAN", Align::Right),
    ]);
    let mut rows = Vec::new();
    let (mut least, mut most): (f64, f64) = (f64::INFINITY, 0.0);
    let mut number = 0;
    let watch = Watch::timed("simulating");
    for seed in args.seed()..args.seed().saturating_add(count.max(1)) {
        watch.say(format!("seed {seed}: {} of {}", rows.len() + 1, count.max(1)));
        let (jobs, setting) = drawn.cluster(args, seed)?;
        let [theirs, ours] = mixed::both(&jobs, &setting);
        let (utilisation, makespan) = mixed::ratios(&ours, &theirs);
        (least, most) = (least.min(utilisation), most.max(makespan));
        number = jobs.len();
        table.row(vec![
            seed.to_string(),
            setting.cards.to_string(),
            policies::span(theirs.makespan),
            policies::span(ours.makespan),
            format!("{utilisation:.3}"),
            format!("{makespan:.3}"),
        ]);
        rows.push(json!({
            "seed": seed,
            "cards": setting.cards,
            "utilisation_vs_static": four(utilisation),
            "makespan_vs_static": four(makespan),
        }));
    }
    Ok(Shown {
        title: "Trainings and services together, on as many cards".into(),
        lines: vec![format!(
            "{} seeds: at least {least:.3} of the utilisation, at most {most:.3} of the makespan",
            rows.len()
        )],
        table,
        json: json!({
            "utilisation_vs_static": four(least),
            "makespan_vs_static": four(most),
            "jobs": number,
            "seeds": rows,
        }),
        charts: Vec::new(),
    })
}
