//! The tables for people: one for each trace.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use ebb_lab::pool::event::{Notes, Trace};
use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::run::Outcome;
use ebb_units::Bytes;

use super::Replayed;
use crate::table::{Align, BOLD, DIM, RESET, Table, harmless};

pub(super) fn write(done: &[Replayed], to: &mut impl Write) -> std::io::Result<()> {
    for (number, replayed) in done.iter().enumerate() {
        if number > 0 {
            writeln!(to)?;
        }
        one(replayed, to)?;
    }
    if done.len() > 1 {
        summary(done, to)?;
    }
    Ok(())
}

/// All traces at a glance.
fn summary(done: &[Replayed], to: &mut impl Write) -> std::io::Result<()> {
    let policies = done
        .iter()
        .flat_map(|replayed| &replayed.rows)
        .map(|row| row.kind);
    let policies: BTreeSet<Kind> = policies.collect();
    let mut columns = vec![("% OVER LIVE", Align::Left)];
    columns.extend(policies.iter().map(|&kind| {
        let name = match kind {
            Kind::BestFit => "best",
            Kind::FirstFit => "first",
            Kind::TorchExpandable => "expandable",
            other => other.name(),
        };
        (name, Align::Right)
    }));
    let mut rows = Vec::new();
    for replayed in done {
        let mut cells = vec![short(&replayed.name)];
        for &kind in &policies {
            let row = replayed.rows.iter().find(|row| row.kind == kind);
            let cell = row.map_or_else(|| "-".into(), |row| over_live(&row.outcome));
            cells.push(cell.trim_end_matches(" %").to_owned());
        }
        rows.push(cells);
    }
    let widths = (1..columns.len()).map(|column| {
        let cells = rows.iter().map(|cells| cells[column].len());
        2 + cells.max().unwrap_or(0).max(columns[column].0.len())
    });
    let left = TERMINAL.saturating_sub(widths.sum()).max(columns[0].0.len());
    let mut table = Table::new(&columns);
    for mut cells in rows {
        cells[0] = fitted(&cells[0], left);
        table.row(cells);
    }
    writeln!(to)?;
    table.write(to, 0)
}

/// The column that gives way to others: all fit into a terminal of 80.
const LATE: usize = 4;
const TERMINAL: usize = 80;

fn one(replayed: &Replayed, to: &mut impl Write) -> std::io::Result<()> {
    writeln!(to, "{BOLD}{}{RESET}", harmless(&short(&replayed.name)))?;
    for fact in facts(replayed) {
        writeln!(to, "  {DIM}{fact}{RESET}")?;
    }
    let mut columns = vec![
        ("POLICY", Align::Left),
        ("PHYSICAL", Align::Right),
        ("OVER LIVE", Align::Right),
        ("MAP CALLS", Align::Right),
        ("2ND HALF", Align::Right),
        ("NS/OP", Align::Right),
    ];
    let bounded = replayed.rows.iter().any(|row| row.bounded.is_some());
    if bounded {
        columns.extend([("REFUSED", Align::Right), ("NEEDLESS", Align::Right)]);
        columns.remove(LATE);
    }
    let mut table = Table::new(&columns);
    for mut cells in cells(replayed) {
        if bounded {
            cells.remove(LATE);
        }
        table.row(cells);
    }
    table.write(to, 2)
}

/// What there is to know before the figures.
pub(super) fn facts(replayed: &Replayed) -> Vec<String> {
    let mut facts = Vec::new();
    if let Some(row) = replayed.rows.first() {
        let outcome = &row.outcome;
        let mut fact = format!(
            "{} operations, peak live {}",
            outcome.operations,
            amount(outcome.peak_live)
        );
        if outcome.peak_rounded != outcome.peak_live {
            fact += &format!(" ({} in blocks of 512 B)", amount(outcome.peak_rounded));
        }
        facts.push(fact);
        if let Some(bounded) = row.bounded {
            facts.push(format!("refused: on a card of {}", amount(bounded.capacity)));
        }
    }
    facts.extend_from_slice(&replayed.notes);
    for row in replayed.rows.iter().filter(|row| row.outcome.copied > 0) {
        let copied = amount(row.outcome.copied);
        facts.push(format!("{} copied {copied} of live blocks", row.kind.name()));
    }
    facts
}

/// The figures, a row for each policy.
pub(super) fn cells(replayed: &Replayed) -> Vec<Vec<String>> {
    let bounded = replayed.rows.iter().any(|row| row.bounded.is_some());
    let mut all = Vec::new();
    for row in &replayed.rows {
        let outcome = &row.outcome;
        let mut cells = vec![
            row.kind.name().into(),
            amount(outcome.peak_physical),
            over_live(outcome),
            outcome.map_calls.to_string(),
            outcome.late_map_calls.to_string(),
            format!("{:.0}", row.ns_per_op),
        ];
        if bounded {
            let counts = row.bounded.map(|bounded| [bounded.refused, bounded.unjustified]);
            cells.extend(counts.map_or(["-".into(), "-".into()], |counts| {
                counts.map(|count| count.to_string())
            }));
        }
        all.push(cells);
    }
    if let (Some(recorded), Some(first)) = (replayed.recorded, replayed.rows.first()) {
        let mut cells = vec![
            "as recorded".into(),
            amount(recorded.peak_reserved),
            over(recorded.peak_reserved, first.outcome.peak_live),
        ];
        cells.resize(if bounded { 8 } else { 6 }, "-".into());
        all.push(cells);
    }
    all
}

/// A file's name in so many columns: without what says how it is written, then without its middle.
fn fitted(name: &str, columns: usize) -> String {
    let bare = [".gz", ".csv", ".pickle", ".pkl"]
        .iter()
        .fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
    let all: Vec<char> = bare.chars().collect();
    if all.len() <= columns {
        return bare.to_owned();
    }
    let before = (columns - 1) / 2;
    let after = all.len() - (columns - 1 - before);
    all[..before].iter().chain(&['…']).chain(&all[after..]).collect()
}

/// The file without its folder.
pub(super) fn short(name: &str) -> String {
    Path::new(name)
        .file_name()
        .map_or_else(|| name.to_owned(), |file| file.to_string_lossy().into_owned())
}

/// What was odd in the file, in words.
pub(super) fn notes(trace: &Trace) -> Vec<String> {
    let Notes {
        at_start,
        at_start_bytes,
        unknown_frees,
        missed_frees,
        ignored,
        out_of_memory,
    } = trace.notes;
    let told = [
        (
            at_start,
            "block",
            format!("at the start, {}", amount(at_start_bytes)),
        ),
        (unknown_frees, "free", "of unknown blocks: left out".into()),
        (
            missed_frees,
            "block",
            "whose free was not recorded: freed when its address comes again".into(),
        ),
        (
            ignored,
            "event",
            "that says nothing about memory: left out".into(),
        ),
        (out_of_memory, "out-of-memory error", "in the recording".into()),
    ];
    told.into_iter()
        .filter(|&(count, ..)| count > 0)
        .map(|(count, what, text)| format!("{count} {what}{} {text}", if count == 1 { "" } else { "s" }))
        .collect()
}

/// Bytes, to four figures: differences of percents have to show.
pub(super) fn amount(bytes: u64) -> String {
    const UNITS: [(&str, u32); 6] = [
        ("EiB", 60),
        ("PiB", 50),
        ("TiB", 40),
        ("GiB", 30),
        ("MiB", 20),
        ("KiB", 10),
    ];
    // From 10 on: 1,734 MiB say more than 1.69 GiB.
    for (name, shift) in UNITS {
        if bytes >= 10 << shift {
            let value = bytes as f64 / (1u64 << shift) as f64;
            let digits = if value < 100.0 { 2 } else { 1 };
            return format!("{value:.digits$} {name}");
        }
    }
    Bytes(bytes).to_string()
}

fn over_live(outcome: &Outcome) -> String {
    match outcome.refused + outcome.unjustified {
        0 => over(outcome.peak_physical, outcome.peak_live),
        // Out of addresses: its peak is that of another program.
        refused => format!("{refused} refused"),
    }
}

/// How much more, in percent.
fn over(physical: u64, live: u64) -> String {
    if live == 0 {
        return "-".into();
    }
    let percent = (physical as f64 / live as f64 - 1.0) * 100.0;
    format!("{percent:+.2} %")
}
