//! The table, the list of disagreements, and the same as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::known::{self, Known};
use crate::modes::{Mode, Tool};
use crate::runner::{End, Result, Run, Verdict};

/// What all results say together.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    pub results: &'a [Result],
    pub modes: &'a [Mode],
    pub tool: &'a Tool,
    pub simulated: bool,
    /// Whether all behaviours were run: some have nothing to evict, but not all.
    pub complete: bool,
}

#[derive(Clone, Copy, Default)]
struct Cell {
    passed: usize,
    failed: usize,
    known: usize,
    skipped: usize,
    missing: usize,
}

impl Cell {
    fn add(&mut self, verdict: &Verdict, known: bool) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
            Verdict::NotApplicable => self.missing += 1,
            Verdict::Failed(_) if known => self.known += 1,
            Verdict::Failed(_) => self.failed += 1,
        }
    }

    fn text(self) -> String {
        if self.passed + self.failed + self.known + self.skipped == 0 {
            return "n/a".into();
        }
        let failed = match (self.failed, self.known) {
            (failed, 0) => failed.to_string(),
            (failed, known) => format!("{failed}(+{known})"),
        };
        format!("{}/{failed}/{}", self.passed, self.skipped)
    }
}

impl Report<'_> {
    /// The entry, if this disagreement of ebb's is known on this GPU.
    fn known(&self, name: &str, mode: Mode) -> Option<&'static Known> {
        known::find(name, mode, self.simulated).filter(|_| matches!(self.tool, Tool::Ebb { .. }))
    }

    fn cells(&self) -> (BTreeMap<&'static str, Vec<Cell>>, Vec<Cell>) {
        let mut groups: BTreeMap<&str, Vec<Cell>> = BTreeMap::new();
        let mut totals = vec![Cell::default(); self.modes.len()];
        for result in self.results {
            let row = groups
                .entry(result.behaviour.group())
                .or_insert_with(|| vec![Cell::default(); self.modes.len()]);
            for (at, (mode, _, verdict)) in result.runs.iter().enumerate() {
                let known = self.known(result.behaviour.name, *mode).is_some();
                row[at].add(verdict, known);
                totals[at].add(verdict, known);
            }
        }
        (groups, totals)
    }

    /// Evictions that took something, pauses done, pauses refused, behaviours with an eviction.
    pub(crate) fn evictions(&self) -> (u64, u64, u64, usize) {
        let counts: Vec<(u64, u64, u64)> = self
            .results
            .iter()
            .filter_map(|result| result.run(Mode::Evicting)?.evictions)
            .collect();
        let sum = |of: fn(&(u64, u64, u64)) -> u64| counts.iter().map(of).sum();
        (
            sum(|c| c.0),
            sum(|c| c.1),
            sum(|c| c.2),
            counts.iter().filter(|c| c.0 > 0).count(),
        )
    }

    /// Behaviours that passed in a process with others.
    pub(crate) fn together(&self) -> usize {
        self.results.iter().filter(|result| result.together).count()
    }

    /// What has to be looked at: unexpected disagreements, entries of the known list that agree, a mode that did nothing.
    pub(crate) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for result in self.results {
            for (mode, _, verdict) in &result.runs {
                let (name, mode_name) = (result.behaviour.name, mode.name());
                let known = self.known(name, *mode);
                match (verdict, known) {
                    (Verdict::Failed(why), None) => faults.push(format!("{name} ({mode_name}): {why}")),
                    (Verdict::Passed, Some(known)) if self.simulated && !known.sometimes => {
                        faults.push(format!(
                            "{name} ({mode_name}): agrees, but is on the list of known ones"
                        ));
                    }
                    _ => {}
                }
            }
        }
        let evicting = self.results.iter().any(|result| {
            result
                .run(Mode::Evicting)
                .is_some_and(|run| !run.lines.is_empty())
        });
        if evicting && self.complete && self.evictions().0 == 0 {
            faults.push("evicting: nothing was evicted in this mode, so that it proves nothing".into());
        }
        faults
    }

    /// Groups by modes, passed/failed/skipped.
    pub(crate) fn table(&self, markdown: bool) -> String {
        let (groups, totals) = self.cells();
        let mut rows = vec![
            std::iter::once("group".to_owned())
                .chain(self.modes.iter().map(|mode| mode.name().to_owned()))
                .collect::<Vec<_>>(),
        ];
        for (group, cells) in &groups {
            rows.push(
                std::iter::once((*group).to_owned())
                    .chain(cells.iter().map(|cell| cell.text()))
                    .collect(),
            );
        }
        rows.push(
            std::iter::once("all".to_owned())
                .chain(totals.iter().map(|cell| cell.text()))
                .collect(),
        );
        let width = |at: usize| rows.iter().map(|row| row[at].len()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..=self.modes.len()).map(width).collect();
        let mut text = String::new();
        for (at, row) in rows.iter().enumerate() {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| {
                    if column == 0 {
                        format!("{cell:<width$}")
                    } else {
                        format!("{cell:>width$}")
                    }
                })
                .collect();
            if markdown {
                let _ = writeln!(text, "| {} |", cells.join(" | "));
                if at == 0 {
                    let line: Vec<&str> = std::iter::once("---")
                        .chain(self.modes.iter().map(|_| "---:"))
                        .collect();
                    let _ = writeln!(text, "| {} |", line.join(" | "));
                }
            } else {
                let _ = writeln!(text, "{}", cells.join("  ").trim_end());
            }
        }
        text
    }

    /// Each disagreement with both observations; ways that saw the same stand together.
    pub(crate) fn disagreements(&self) -> String {
        let mut text = String::new();
        for result in self.results {
            let mut told: Vec<(&Verdict, &[String])> = Vec::new();
            for (mode, run, verdict) in &result.runs {
                let seen: &[String] = run.as_ref().map_or(&[], |run| &run.lines);
                let Verdict::Failed(why) = verdict else { continue };
                if *mode != Mode::Plain && told.contains(&(verdict, seen)) {
                    continue;
                }
                told.push((verdict, seen));
                let name = result.behaviour.name;
                let alike = result
                    .runs
                    .iter()
                    .filter(|(_, other, also)| {
                        also == verdict && other.as_ref().is_some_and(|other| other.lines == seen)
                    })
                    .map(|(mode, _, _)| mode.name());
                let modes: Vec<&str> = alike.collect();
                let _ = writeln!(text, "\n{name} ({}): {why}", modes.join(", "));
                let _ = writeln!(text, "  {}", result.behaviour.what);
                if let Some(known) = self.known(name, *mode) {
                    let _ = writeln!(text, "  known: {}", known.why);
                }
                let reference = match (*mode, result.behaviour.fact) {
                    (Mode::Plain, fact) => fact.unwrap_or_default().iter().map(ToString::to_string).collect(),
                    _ => result
                        .run(Mode::Plain)
                        .map(|run| run.lines.clone())
                        .unwrap_or_default(),
                };
                side_by_side(&mut text, &reference, seen);
            }
        }
        text
    }

    /// What was skipped, and why: loud, so that nobody takes it for passed.
    pub(crate) fn skips(&self) -> String {
        let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for result in self.results {
            if let Some((_, _, Verdict::Skipped(why))) = result.runs.first() {
                reasons.entry(why).or_default().push(result.behaviour.name);
            }
        }
        let mut text = String::new();
        for (why, names) in reasons {
            let _ = writeln!(text, "skipped: {why}: {}", names.join(", "));
        }
        text
    }

    pub(crate) fn json(&self) -> Value {
        let (groups, totals) = self.cells();
        let row = |cells: &[Cell]| -> Value {
            self.modes
                .iter()
                .zip(cells)
                .map(|(mode, cell)| {
                    let value = json!({
                        "passed": cell.passed, "failed": cell.failed, "known": cell.known,
                        "skipped": cell.skipped, "not_applicable": cell.missing,
                    });
                    (mode.name().to_owned(), value)
                })
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        let (releases, pauses, refused, behaviours) = self.evictions();
        json!({
            "gpu": if self.simulated { "simulated" } else { "real" },
            "behaviours": self.results.len(),
            "together": self.together(),
            "totals": row(&totals),
            "groups": groups.iter().map(|(name, cells)| ((*name).to_owned(), row(cells))).collect::<serde_json::Map<_, _>>(),
            "evictions": { "releases": releases, "pauses": pauses, "refused": refused, "behaviours": behaviours },
            "faults": self.faults(),
            "results": self.results.iter().map(|result| self.result(result)).collect::<Vec<_>>(),
        })
    }

    fn result(&self, result: &Result) -> Value {
        let modes: serde_json::Map<String, Value> = result
            .runs
            .iter()
            .map(|(mode, run, verdict)| {
                let (word, why) = match verdict {
                    Verdict::Passed => ("passed", None),
                    Verdict::Skipped(why) => ("skipped", Some(why.as_str())),
                    Verdict::Failed(why) => ("failed", Some(why.as_str())),
                    Verdict::NotApplicable => ("n/a", None),
                };
                let known = self
                    .known(result.behaviour.name, *mode)
                    .filter(|_| word == "failed")
                    .map(|known| known.why);
                let value = json!({
                    "verdict": word, "why": why, "known": known,
                    "seen": run.as_ref().map(|run| &run.lines),
                    "ended": run.as_ref().map(|run| &run.end),
                    "evictions": run.as_ref().and_then(|run| run.evictions),
                    "ms": run.as_ref().map(|run| run.millis),
                });
                (mode.name().to_owned(), value)
            })
            .collect();
        json!({
            "name": result.behaviour.name, "what": result.behaviour.what, "together": result.together, "modes": modes,
        })
    }
}

/// Lines that differ with both forms, the others once.
fn side_by_side(text: &mut String, reference: &[String], seen: &[String]) {
    for at in 0..reference.len().max(seen.len()) {
        match (reference.get(at), seen.get(at)) {
            (Some(a), Some(b)) if a == b => {
                let _ = writeln!(text, "    {a}");
            }
            (a, b) => {
                if let Some(a) = a {
                    let _ = writeln!(text, "  - {a}");
                }
                if let Some(b) = b {
                    let _ = writeln!(text, "  + {b}");
                }
            }
        }
    }
}

/// One line while it runs.
pub(crate) fn line(result: &Result) -> String {
    let words: Vec<String> = result
        .runs
        .iter()
        .map(|(mode, run, verdict)| {
            let word = match verdict {
                Verdict::Passed => "passed",
                Verdict::Skipped(_) => "skipped",
                Verdict::Failed(_) => "FAILED",
                Verdict::NotApplicable => "n/a",
            };
            format!("{} {word}{}", mode.name(), time(run.as_ref()))
        })
        .collect();
    format!("{}: {}", result.behaviour.name, words.join(", "))
}

fn time(run: Option<&Run>) -> String {
    match run {
        Some(run) if run.end == End::Hung => " (hung)".into(),
        Some(run) if run.millis > 2000 => format!(" ({:.1} s)", run.millis as f64 / 1e3),
        _ => String::new(),
    }
}
