//! Published results beside ours: dominant resource fairness, and finish-time fairness over 32 cards.

use ebb_lab::finish::{self, Plan};
use ebb_lab::{drf, read};
use serde_json::{Value, json};

use super::Shown;
use super::scenarios::four;
use crate::args::SimulateArgs;
use crate::error::{CliError, Result};
use crate::table::{Align, Table};

/// Random instances of which the properties are looked at.
const INSTANCES: u64 = 10_000;

/// Ghodsi et al., NSDI 2011.
pub(super) fn drf(args: &SimulateArgs) -> Shown {
    let example = drf::example();
    let broken = drf::check(args.seed(), INSTANCES);
    let mut table = Table::new(&[
        ("", Align::Left),
        ("PRINTED", Align::Right),
        ("HERE", Align::Right),
    ]);
    let pair = |a: String, b: String| format!("{a} and {b}");
    table.row(vec![
        "tasks of A and B".into(),
        "3 and 2".into(),
        pair(example.tasks[0].to_string(), example.tasks[1].to_string()),
    ]);
    table.row(vec![
        "dominant shares".into(),
        "2/3 and 2/3".into(),
        pair(
            format!("{:.4}", example.dominant[0]),
            format!("{:.4}", example.dominant[1]),
        ),
    ]);
    for (name, broken) in [
        ("users with less than an even part of everything", broken.sharing),
        ("users who would rather have what another has", broken.envy),
        ("users who could have more at nobody's cost", broken.waste),
        ("lies about needs that paid", broken.lies),
    ] {
        table.row(vec![name.into(), "0".into(), broken.to_string()]);
    }
    Shown {
        title: "Dominant resource fairness".into(),
        lines: vec![
            "the paper's example: 9 processors and 18 GB; a task of A needs 1 and 4, one of B 3 and 1".into(),
            format!(
                "the four properties on {INSTANCES} random instances, seed {}",
                args.seed()
            ),
        ],
        table,
        json: json!({
            "tasks": example.tasks,
            "dominant_share": example.dominant.iter().map(|d| four(*d)).collect::<Value>(),
            "instances": broken.instances,
            "sharing_incentive_violations": broken.sharing,
            "envy_violations": broken.envy,
            "pareto_violations": broken.waste,
            "lies_that_paid": broken.lies,
        }),
        charts: Vec::new(),
    }
}

/// Zheng et al., NSDI 2023.
pub(super) fn shockwave(args: &SimulateArgs) -> Result<Shown> {
    let folder = read::finish::folder(&args.data);
    let unreadable = |error: read::finish::GangError| {
        CliError::usage(
            error.to_string(),
            "name the folder of the traces with --data DIR or EBB_DATA",
        )
    };
    let path = read::finish::trace_in(&folder).ok_or_else(|| {
        CliError::usage(
            format!("no file that ends in .trace in {}", folder.display()),
            "name the folder of the traces with --data DIR or EBB_DATA",
        )
    })?;
    let jobs = read::finish::jobs(&path).map_err(unreadable)?;
    let published = read::finish::published(&folder).map_err(unreadable)?;
    let plan = Plan {
        cards: args.cards.unwrap_or(Plan::default().cards),
        ..Plan::default()
    };
    let known = finish::run(&jobs, &plan);
    let unknown = finish::run(&jobs, &Plan { bound: None, ..plan });
    let mut table = Table::new(&[
        ("WHERE", Align::Left),
        ("POLICY", Align::Left),
        ("MAKESPAN", Align::Right),
        ("MEAN TURNAROUND", Align::Right),
        ("WORST RATIO", Align::Right),
        ("OVER 1.05", Align::Right),
    ]);
    let mut rows = Vec::new();
    let mut row = |place: &str, policy: &str, makespan: f64, turnaround: f64, worst: f64, unfair: f64| {
        table.row(vec![
            place.into(),
            policy.into(),
            format!("{makespan:.0} s"),
            format!("{turnaround:.0} s"),
            format!("{worst:.2}"),
            format!("{unfair:.1} %"),
        ]);
        rows.push(json!({
            "where": place,
            "policy": policy,
            "makespan_s": four(makespan),
            "mean_turnaround_s": four(turnaround),
            "worst_fairness_ratio": four(worst),
            "unfair_percent": four(unfair),
        }));
    };
    for (name, out) in [
        ("deadlines, run times given", &known),
        ("shares, run times unknown", &unknown),
    ] {
        row(
            "ebb",
            name,
            out.makespan,
            out.turnaround,
            out.worst(),
            out.unfair(),
        );
    }
    for p in &published {
        row(&p.place, &p.policy, p.makespan, p.turnaround, p.worst, p.unfair);
    }
    Ok(Shown {
        title: "Finish-time fairness: jobs of several cards each".into(),
        lines: vec![
            format!(
                "{} jobs on {} cards, rounds of {} s, {} s lost at each start; {} and {} starts",
                jobs.len(),
                plan.cards,
                plan.round,
                plan.switch,
                known.switches,
                unknown.switches
            ),
            "ratio: time from arrival to end over time alone times jobs over cards; 1 is a fair part".into(),
            "ours take the run times of the trace; theirs became shorter as batches grew".into(),
        ],
        table,
        json: json!({
            "makespan_s": four(known.makespan),
            "worst_fairness_ratio": four(known.worst()),
            "unfair_percent": four(known.unfair()),
            "mean_turnaround_s": four(known.turnaround),
            "jobs": jobs.len(),
            "cards": plan.cards,
            "table": rows,
        }),
        charts: Vec::new(),
    })
}
