//! `ebb doctor PID`: the process byte by byte, as the daemon counts it and as the library in the process reports it.
//!
//! The library's report is JSON whose shape may grow; every field of it is shown, known or not.

use std::io::Write;

use ebb_protocol::control::{Payload, ProcessRow, Request};
use ebb_units::Bytes;
use serde_json::{Map, Value};

use crate::args::{DoctorArgs, Global};
use crate::client::{Client, unexpected};
use crate::error::{CliError, Result};
use crate::table::{Align, BOLD, DIM, RESET, Table, harmless, time};
use crate::{elf, library};

/// The section of the library with its table of classes, one function a line: name, class, treatment.
const CLASSES: &str = ".ebb.classes";

/// The process that somebody means: a number, or the only process of a task that is named.
pub(super) fn find(global: &Global, named: &str) -> Result<u32> {
    if let Ok(pid) = named.parse() {
        return Ok(pid);
    }
    let answer = Client::open(global)?.ask(&Request::List)?;
    let Payload::List(snapshot) = answer else {
        return Err(unexpected(&answer));
    };
    let tasks = snapshot.tasks.iter();
    let processes: Vec<u32> = tasks
        .filter(|task| task.name == named || task.task.to_string() == named)
        .flat_map(|task| task.processes.iter().map(|process| process.pid))
        .collect();
    match processes[..] {
        [pid] => Ok(pid),
        [] => Err(CliError::usage(
            format!(
                "no process and no task with a process is called {}",
                harmless(named)
            ),
            "`ebb ps` lists the tasks",
        )),
        _ => {
            let all: Vec<String> = processes.iter().map(u32::to_string).collect();
            Err(CliError::usage(
                format!("{} has several processes: {}", harmless(named), all.join(", ")),
                "name one of them",
            ))
        }
    }
}

/// Asks about one process and shows the answer.
pub(super) fn examine(global: &Global, pid: u32, args: &DoctorArgs) -> Result<()> {
    let answer = Client::open(global)?.ask(&Request::Doctor { pid })?;
    let Payload::Doctor { process, report } = answer else {
        return Err(unexpected(&answer));
    };
    let classes = if args.classes { Some(classes()?) } else { None };
    let mut out = anstream::stdout().lock();
    if args.json {
        let mut answer = serde_json::json!({ "process": process, "report": report });
        if let Some(classes) = &classes {
            let rows = classes
                .iter()
                .map(|[name, class, how]| serde_json::json!({ "name": name, "class": class, "how": how }));
            answer["classes"] = rows.collect();
        }
        serde_json::to_writer_pretty(&mut out, &answer)?;
        writeln!(out)?;
    } else {
        write_process(&mut out, &process)?;
        match &report {
            Some(report) => {
                for line in releasable(report).iter().chain(&lacking(report)) {
                    writeln!(out, "{BOLD}{line}{RESET}")?;
                }
                write_report(&mut out, report)?;
            }
            None => writeln!(
                out,
                "\nthe library in the process did not answer: it is busy, stopped, or was never loaded (a static program?)"
            )?,
        }
    }
    if let Some(classes) = classes.filter(|_| !args.json) {
        writeln!(out, "\n{BOLD}driver calls{RESET}")?;
        let mut table = Table::new(&[
            ("CALL", Align::Left),
            ("CLASS", Align::Left),
            ("TREATMENT", Align::Left),
        ]);
        for row in classes {
            table.row(row.into());
        }
        table.write(&mut out, 0)?;
    }
    out.flush()?;
    Ok(())
}

/// What the library does at each call of the driver, from the library's file.
fn classes() -> Result<Vec<[String; 3]>> {
    let path = library::locate()?;
    let bytes = elf::section(&path, CLASSES).ok_or_else(|| {
        CliError::failed(format!("{} has no table of classes", path.display()))
            .with_fix("install the version of this command")
    })?;
    Ok(read_classes(&String::from_utf8_lossy(&bytes)))
}

fn read_classes(text: &str) -> Vec<[String; 3]> {
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let how = |how: &str| match how {
            "gate" | "sync" => "waits until the memory is on the card".to_owned(),
            "own" => "handled by ebb".to_owned(),
            "held" => "as it is; wakes a hibernated process first".to_owned(),
            "bars" => "as it is; the process cannot be hibernated after it".to_owned(),
            "pass" => "the driver's, untouched".to_owned(),
            other => other.to_owned(),
        };
        Some([
            words.next()?.to_owned(),
            words.next()?.to_owned(),
            how(words.next()?),
        ])
    };
    text.lines().filter_map(row).collect()
}

fn write_process(out: &mut impl Write, process: &ProcessRow) -> std::io::Result<()> {
    writeln!(
        out,
        "{BOLD}process {} {}{RESET}",
        process.pid,
        harmless(&process.program)
    )?;
    let why = if process.why.is_empty() {
        String::new()
    } else {
        format!(": {}", harmless(&process.why))
    };
    writeln!(
        out,
        "{} for {}{why}",
        harmless(&process.state),
        time(process.since_ms)
    )?;
    let card = process
        .device
        .map_or_else(|| "none yet".into(), |uuid| uuid.to_string());
    writeln!(
        out,
        "card: {card}; memory was taken {} times and brought back {} times\n",
        process.releases, process.restores
    )?;
    let mut table = Table::new(&[
        ("MEMORY", Align::Left),
        ("BYTES", Align::Right),
        ("", Align::Right),
        ("", Align::Left),
    ]);
    let mut row = |what: &str, bytes: Bytes, note: &str| {
        table.row(vec![
            what.into(),
            exact(bytes.0),
            if bytes.is_zero() {
                String::new()
            } else {
                bytes.to_string()
            },
            note.into(),
        ]);
    };
    row(
        "allocated",
        process.allocated,
        "what the program asked for and has not freed",
    );
    row(
        "  on the card",
        process.resident,
        "releasable, except what is pinned",
    );
    row(
        "  off the card",
        process.evicted,
        "comes back with the next call that needs it",
    );
    for (where_to, bytes) in [
        ("    on another card", process.lodged),
        ("    on disk", process.on_disk),
    ] {
        if !bytes.is_zero() {
            row(where_to, bytes, "of that; the rest is in host memory");
        }
    }
    row(
        "cached",
        process.cached,
        "on the card, unused: goes first, without a copy",
    );
    row("pinned", process.pinned, "cannot be moved; the report says why");
    row(
        "driver's own",
        process.overhead,
        "context, modules: goes only with the process",
    );
    row(
        "  found by NVML",
        process.unseen,
        "no call showed it: local memory of kernels, modules, printf heap, or another interface (Vulkan, OpenGL)",
    );
    row(
        "granted",
        process.lease,
        "what the ledger has for this process, without the driver's own",
    );
    table.write(out, 0)
}

/// In a sentence for each card: how much could go, and what keeps the rest.
fn releasable(report: &Value) -> Vec<String> {
    let devices = report["devices"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    devices
        .iter()
        .filter_map(|device| {
            let figure = |name: &str| device[name].as_u64();
            // What is cached is resident, too.
            let here = figure("resident")?;
            let pins = device["pinned"].as_array().map(Vec::as_slice).unwrap_or_default();
            let pins: Vec<String> = pins
                .iter()
                .filter_map(|pin| Some((pin["bytes"].as_u64()?, pin["reason"].as_str()?)))
                .map(|(bytes, reason)| format!("{} pinned: {}", Bytes(bytes), harmless(reason)))
                .collect();
            let rest = if pins.is_empty() {
                "nothing is pinned".into()
            } else {
                pins.join(", ")
            };
            let index = figure("index").unwrap_or(0);
            Some(format!(
                "card {index}: {} of {} releasable, {rest}",
                Bytes(figure("releasable")?),
                Bytes(here)
            ))
        })
        .collect()
}

/// What memory cannot be used for here, because the driver would not make it so.
fn lacking(report: &Value) -> Vec<String> {
    let devices = report["devices"].as_array().map(Vec::as_slice);
    devices
        .unwrap_or_default()
        .iter()
        .filter_map(|device| {
            let lacks = device["lacks"].as_str()?;
            let index = device["index"].as_u64().unwrap_or(0);
            Some(format!(
                "card {index}: the driver makes no memory for {}",
                harmless(lacks)
            ))
        })
        .collect()
}

/// Bytes with the thousands apart: exact, and still to be read.
fn exact(bytes: u64) -> String {
    let digits = bytes.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

fn write_report(out: &mut impl Write, report: &Value) -> std::io::Result<()> {
    match report {
        Value::Object(fields) => {
            let (plain, nested): (Vec<_>, Vec<_>) = fields.iter().partition(|(_, value)| is_plain(value));
            if !plain.is_empty() {
                writeln!(out, "\n{BOLD}the library{RESET}")?;
                write_plain(out, &plain, 0)?;
            }
            for (name, value) in nested {
                writeln!(out, "\n{BOLD}{}{RESET}", label(name))?;
                write_nested(out, value, 0)?;
            }
            Ok(())
        }
        other => writeln!(out, "\n{}", harmless(&other.to_string())),
    }
}

fn write_nested(out: &mut impl Write, value: &Value, indent: usize) -> std::io::Result<()> {
    match value {
        Value::Array(items) if items.is_empty() => writeln!(out, "{:indent$}{DIM}none{RESET}", ""),
        Value::Array(items) => {
            if let Some(rows) = items.iter().map(flat_object).collect::<Option<Vec<_>>>() {
                return write_rows(out, &rows, indent);
            }
            for item in items {
                if is_plain(item) {
                    writeln!(out, "{:indent$}{}", "", show("", item))?;
                } else {
                    write_nested(out, item, indent)?;
                    writeln!(out)?;
                }
            }
            Ok(())
        }
        Value::Object(fields) => {
            let (plain, nested): (Vec<_>, Vec<_>) = fields.iter().partition(|(_, value)| is_plain(value));
            write_plain(out, &plain, indent)?;
            for (name, value) in nested {
                writeln!(out, "{:indent$}{}:", "", label(name))?;
                write_nested(out, value, indent + 2)?;
            }
            Ok(())
        }
        plain => writeln!(out, "{:indent$}{}", "", show("", plain)),
    }
}

fn write_plain(out: &mut impl Write, fields: &[(&String, &Value)], indent: usize) -> std::io::Result<()> {
    let mut table = Table::new(&[("", Align::Left), ("", Align::Left)]);
    for (name, value) in fields {
        table.row(vec![label(name), show(name, value)]);
    }
    table.write(out, indent)
}

/// Rows of equal shape as one table, in the order of the first row's fields.
fn write_rows(out: &mut impl Write, rows: &[&Map<String, Value>], indent: usize) -> std::io::Result<()> {
    let mut names: Vec<&String> = Vec::new();
    for name in rows.iter().flat_map(|row| row.keys()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let aligns: Vec<(&'static str, Align)> = names
        .iter()
        .map(|name| {
            let figures = rows.iter().all(|row| row.get(*name).is_none_or(Value::is_number));
            ("", if figures { Align::Right } else { Align::Left })
        })
        .collect();
    let mut table = Table::new(&aligns);
    table.row(names.iter().map(|name| label(name).to_uppercase()).collect());
    for row in rows {
        table.row(
            names
                .iter()
                .map(|name| row.get(*name).map(|value| show(name, value)).unwrap_or_default())
                .collect(),
        );
    }
    table.write(out, indent)
}

fn flat_object(value: &Value) -> Option<&Map<String, Value>> {
    value.as_object().filter(|fields| fields.values().all(is_plain))
}

fn is_plain(value: &Value) -> bool {
    !value.is_array() && !value.is_object()
}

fn label(name: &str) -> String {
    harmless(&name.replace('_', " "))
}

/// A value for people. Fields that count memory are named so, and get a unit beside the exact figure.
fn show(name: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.into(),
        Value::Number(number) => match number.as_u64() {
            Some(bytes) if counts_bytes(name) && bytes >= 1024 => {
                format!("{} ({})", exact(bytes), Bytes(bytes))
            }
            Some(number) if names_something(name) => number.to_string(),
            Some(plain) => exact(plain),
            None => number.to_string(),
        },
        Value::String(text) => harmless(text),
        other => harmless(&other.to_string()),
    }
}

/// Whether a number is a name and no amount.
fn names_something(name: &str) -> bool {
    name.split('_')
        .any(|word| ["pid", "index", "id", "version"].contains(&word))
}

fn counts_bytes(name: &str) -> bool {
    const WORDS: [&str; 19] = [
        "bytes",
        "size",
        "limit",
        "request",
        "lease",
        "leased",
        "resident",
        "evicted",
        "cached",
        "pinned",
        "allocated",
        "releasable",
        "overhead",
        "total",
        "charged",
        "granularity",
        "used",
        "registered",
        "lent",
    ];
    name.split('_').any(|word| WORDS.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn shown(report: Value) -> String {
        let mut out = Vec::new();
        write_process(&mut out, &fixtures::busy().tasks[1].processes[0]).unwrap();
        write_report(&mut out, &report).unwrap();
        anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string()
    }

    #[test]
    fn every_field_of_a_report_is_shown() {
        insta::assert_snapshot!(shown(serde_json::json!({
            "connected": true,
            "version": "0.1.0",
            "limit_bytes": 64424509440u64,
            "not_releasable": [
                { "kind": "context", "bytes": 552599552, "why": "the driver's own" },
                { "kind": "pool", "bytes": 0, "why": "stream\u{1b}[2J-ordered" },
            ],
            "counters": { "touches": 1234567, "by_class": { "launch": 7, "copy": 2 } },
            "events": ["attached", "evicted 3 chunks"],
            "errors": [],
            "mixed": [1, { "a": [true, null] }],
        })));
    }

    #[test]
    fn what_could_go_is_said_in_a_sentence() {
        let report = serde_json::json!({ "devices": [{
            "index": 0, "resident": 7u64 << 30, "cached": 1u64 << 30, "releasable": 6u64 << 30,
            "pinned": [{ "reason": "legacy IPC (opened by pid 123)", "bytes": 1u64 << 30 }],
        }] });
        let said = releasable(&report);
        assert_eq!(
            said,
            ["card 0: 6 GiB of 7 GiB releasable, 1 GiB pinned: legacy IPC (opened by pid 123)"]
        );
        assert!(releasable(&Value::Null).is_empty());
    }

    #[test]
    fn what_the_driver_refused_is_said() {
        let report = serde_json::json!({ "devices": [
            { "index": 0 }, { "index": 1, "lacks": "access by network cards" },
        ] });
        assert_eq!(
            lacking(&report),
            ["card 1: the driver makes no memory for access by network cards"]
        );
        assert!(lacking(&Value::Null).is_empty());
    }

    #[test]
    fn the_table_of_classes_reads_line_by_line() {
        let rows = read_classes("cuMemAlloc_v2 allocate own\ncuLaunchKernel touch gate\nbroken\n");
        assert_eq!(rows.len(), 2);
        assert_eq!(
            rows[1],
            ["cuLaunchKernel", "touch", "waits until the memory is on the card"]
        );
    }

    #[test]
    fn strange_reports_do_no_harm() {
        for report in [
            Value::Null,
            serde_json::json!([]),
            serde_json::json!("x\u{1b}"),
            serde_json::json!({}),
        ] {
            let _ = shown(report);
        }
        assert_eq!(exact(1_234_567), "1 234 567");
    }
}
