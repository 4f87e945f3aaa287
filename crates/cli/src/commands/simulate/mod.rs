//! `ebb simulate`: what ebb is worth on recorded traces, with the daemon's own arbiter in simulated time.

mod mixed;
mod papers;
mod policies;
mod scenarios;

use std::io::Write;
use std::path::Path;

use ebb_lab::chart::{self, Chart};
use serde_json::Value;

use crate::args::{Scenario, SimulateArgs};
use crate::error::{CliError, Result};
use crate::table::Table;

/// A result in all the forms in which it is shown.
pub(crate) struct Shown {
    title: String,
    /// What one has to know to read the figures.
    lines: Vec<String>,
    table: Table,
    json: Value,
    charts: Vec<Chart>,
}

/// `ebb simulate`.
pub(crate) fn simulate(args: &SimulateArgs) -> Result<()> {
    if let Some(log) = &args.log {
        return replay(log, args.json);
    }
    let shown = match args.scenario {
        Some(Scenario::Gentd26) => scenarios::gentd26(args)?,
        Some(Scenario::Mixed) => mixed::mixed(args)?,
        Some(Scenario::Lora) => scenarios::lora(args)?,
        Some(Scenario::Drf) => papers::drf(args),
        Some(Scenario::Shockwave) => papers::shockwave(args)?,
        None => {
            return Err(CliError::usage(
                "nothing to simulate",
                "say --scenario gentd26, mixed or lora, or --log FILE",
            ));
        }
    };
    if let Some(path) = &args.html {
        let page = chart::page(&shown.title, &shown.lines, &shown.charts);
        std::fs::write(path, page).map_err(|e| cannot_write(path, &e))?;
    }
    if args.json {
        let mut out = std::io::stdout();
        serde_json::to_writer(&mut out, &shown.json)?;
        writeln!(out)?;
        return Ok(());
    }
    let mut out = anstream::stdout();
    writeln!(out, "{}", shown.title)?;
    for line in &shown.lines {
        writeln!(out, "  {line}")?;
    }
    writeln!(out)?;
    shown.table.write(&mut out, 0)?;
    Ok(())
}

fn cannot_write(path: &Path, error: &std::io::Error) -> CliError {
    CliError::usage(
        format!("cannot write {}: {error}", path.display()),
        "name a file in a folder that you may write to",
    )
}

/// Feeds a daemon's event log to a fresh arbiter and says whether it does the same.
fn replay(log: &Path, json: bool) -> Result<()> {
    let report = ebb_node::replay(log).map_err(|error| {
        let detail = std::error::Error::source(&error).map_or_else(String::new, |s| format!(": {s}"));
        CliError::usage(
            format!("{}: {error}{detail}", log.display()),
            "name an event log that a daemon wrote (`event_log` in its settings)",
        )
    })?;
    if json {
        let mut out = std::io::stdout();
        serde_json::to_writer(
            &mut out,
            &serde_json::json!({
                "runs": report.runs,
                "steps": report.steps,
                "skipped": report.skipped,
                "diverged_at_line": report.divergence.as_ref().map(|d| d.line),
            }),
        )?;
        writeln!(out)?;
    } else {
        writeln!(
            anstream::stdout(),
            "{} events of {} daemons gave the recorded actions; {} could not be fed",
            report.steps,
            report.runs,
            report.skipped
        )?;
    }
    match report.divergence {
        None => Ok(()),
        Some(d) => Err(CliError::failed(format!(
            "line {} of {}: recorded {:?}, replayed {:?}",
            d.line,
            log.display(),
            d.recorded,
            d.replayed
        ))
        .with_fix("replay it with the version of ebb that wrote it")),
    }
}
