//! `ebb simulate`: what ebb is worth on recorded traces, with the daemon's own arbiter in simulated time.

mod file;
mod mixed;
mod papers;
mod png;
mod policies;
mod profiles;
mod scenarios;
mod trace;

use std::io::Write;
use std::path::Path;

use ebb_lab::chart;
use ebb_lab::picture::Picture;
use serde_json::Value;

use crate::args::{Scenario, SimulateArgs, WhichScenario};
use crate::error::{CliError, Result};
use crate::table::Table;

/// A result in all the forms in which it is shown.
pub(crate) struct Shown {
    title: String,
    /// What one has to know to read the figures.
    lines: Vec<String>,
    table: Table,
    json: Value,
    charts: Vec<Picture>,
}

/// `ebb simulate`.
pub(crate) fn simulate(args: &SimulateArgs) -> Result<()> {
    if let Some(log) = &args.log {
        return replay(log, args.json);
    }
    if let Some(path) = &args.profiles {
        return show(&profiles::profiles(path, args)?, args);
    }
    if let Some(path) = &args.trace {
        return match trace::trace(path, args)? {
            trace::Found::Shown(shown) => show(&shown, args),
            trace::Found::Log(log) => replay(&log, args.json),
        };
    }
    let shown = match &args.scenario {
        Some(WhichScenario::Named(Scenario::Gentd26)) => scenarios::gentd26(args)?,
        Some(WhichScenario::Named(Scenario::Mixed)) => mixed::mixed(args)?,
        Some(WhichScenario::Named(Scenario::Lora)) => scenarios::lora(args)?,
        Some(WhichScenario::Named(Scenario::Drf)) => papers::drf(args),
        Some(WhichScenario::Named(Scenario::Shockwave)) => papers::shockwave(args)?,
        Some(WhichScenario::File(path)) => file::scenario(path, args)?,
        None => {
            return Err(CliError::usage(
                "nothing to simulate",
                "say --scenario NAME or FILE, --trace DIR, or --log FILE",
            ));
        }
    };
    show(&shown, args)
}

/// Shows a result in the forms that were asked for.
fn show(shown: &Shown, args: &SimulateArgs) -> Result<()> {
    if let Some(path) = &args.html {
        let page = chart::page(&shown.title, &shown.lines, &shown.charts);
        std::fs::write(path, page).map_err(|e| cannot_write(path, &e))?;
    }
    if let Some(path) = &args.png {
        if shown.charts.is_empty() {
            return Err(CliError::usage(
                "this scenario has no pictures",
                "leave --png out; the table has all figures",
            ));
        }
        png::write(path, &shown.title, &shown.lines, &shown.charts)?;
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
                "missing": report.missing.map(|missing| missing.to_string()),
                "cut": report.cut,
                "diverged_at_line": report.divergence.as_ref().map(|d| d.line),
            }),
        )?;
        writeln!(out)?;
    } else {
        let mut out = anstream::stdout();
        let plural = |n: u64| if n == 1 { "" } else { "s" };
        writeln!(
            out,
            "{} event{} of {} daemon{} gave the recorded actions, bit for bit",
            report.steps,
            plural(report.steps),
            report.runs,
            plural(report.runs)
        )?;
        if let Some(missing) = report.missing {
            writeln!(out, "{} could not be compared: {missing}", report.skipped)?;
        }
        if report.cut {
            writeln!(
                out,
                "the last line is not complete: the daemon was stopped while it wrote, or writes still"
            )?;
        }
    }
    match report.divergence {
        None => Ok(()),
        Some(d) => Err(CliError::failed(format!(
            "line {} of {}: recorded {:?}, replayed {:?}",
            d.line,
            d.file.display(),
            d.recorded,
            d.replayed
        ))
        .with_fix("replay it with the version of ebb that wrote it")),
    }
}
