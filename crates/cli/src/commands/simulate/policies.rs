//! Results of several policies side by side.

use ebb_lab::cluster::{Job, Outcome, Policy};
use ebb_units::Bytes;
use serde_json::{Value, json};

use super::scenarios::four;
use crate::table::{Align, Table};

fn gib(bytes: Bytes) -> f64 {
    bytes.0 as f64 / (1_u64 << 30) as f64
}

/// A time as people say it.
pub(super) fn span(seconds: f64) -> String {
    if seconds < 120.0 {
        format!("{seconds:.1} s")
    } else if seconds < 7200.0 {
        format!("{:.1} min", seconds / 60.0)
    } else {
        format!("{:.2} h", seconds / 3600.0)
    }
}

pub(super) fn table(jobs: &[Job], all: &[(Policy, Outcome)]) -> Table {
    let mut table = Table::new(&[
        ("POLICY", Align::Left),
        ("MAKESPAN", Align::Right),
        ("USED", Align::Right),
        ("TURNAROUND", Align::Right),
        ("WAIT P99", Align::Right),
        ("STOPPED", Align::Right),
        ("MOVED OUT", Align::Right),
        ("BACK", Align::Right),
        ("FAILED", Align::Right),
    ]);
    for (policy, out) in all {
        table.row(vec![
            policy.to_string(),
            span(out.makespan),
            format!("{:.1} %", out.utilisation * 100.0),
            span(out.mean_turnaround(jobs)),
            span(out.wait(0.99)),
            out.stopped().to_string(),
            format!("{:.0} GiB", gib(out.moved[0])),
            format!("{:.0} GiB", gib(out.moved[1])),
            out.failed().to_string(),
        ]);
    }
    table
}

pub(super) fn json(jobs: &[Job], all: &[(Policy, Outcome)]) -> Value {
    all.iter()
        .map(|(policy, out)| {
            json!({
                "policy": policy.to_string(),
                "makespan_s": four(out.makespan),
                "utilisation": four(out.utilisation),
                "mean_turnaround_s": four(out.mean_turnaround(jobs)),
                "p99_added_wait_s": four(out.wait(0.99)),
                "stopped": out.stopped(),
                "moves": out.moves,
                "moved_out_bytes": out.moved[0].0,
                "moved_back_bytes": out.moved[1].0,
                "failed": out.failed(),
            })
        })
        .collect()
}
