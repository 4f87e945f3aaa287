//! `ebb ps`: who holds what.

use std::io::Write;

use ebb_protocol::control::{GoneRow, Payload, ProcessRow, Request, Snapshot, TaskRow, TaskWhy};
use ebb_units::Bytes;

use crate::args::{Global, PsArgs};
use crate::client::{Client, unexpected};
use crate::error::Result;
use crate::table::{Align, BOLD, DIM, RESET, Table, harmless, per_second, rate, time};

/// `ebb ps`.
pub(crate) fn ps(global: &Global, args: &PsArgs) -> Result<()> {
    if let Some(task) = &args.why {
        return why(global, task, args.json);
    }
    let answer = Client::open(global)?.ask(&Request::List)?;
    let Payload::List(snapshot) = answer else {
        return Err(unexpected(&answer));
    };
    let mut out = anstream::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &snapshot)?;
        writeln!(out)?;
    } else {
        write_snapshot(&mut out, &snapshot)?;
    }
    out.flush()?;
    Ok(())
}

/// `ebb ps --why`.
fn why(global: &Global, task: &str, json: bool) -> Result<()> {
    let task = (!task.is_empty()).then(|| task.to_owned());
    let answer = Client::open(global)?.ask(&Request::Why { task })?;
    let Payload::Why { tasks, gone } = answer else {
        return Err(unexpected(&answer));
    };
    let mut out = anstream::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, &serde_json::json!({ "tasks": tasks, "gone": gone }))?;
        writeln!(out)?;
    } else {
        if !tasks.is_empty() || gone.is_empty() {
            write_why(&mut out, &tasks)?;
        }
        write_gone(&mut out, &gone, !tasks.is_empty())?;
    }
    out.flush()?;
    Ok(())
}

/// What was decided, task by task, the newest last: it stands next to the prompt.
fn write_why(out: &mut impl Write, tasks: &[TaskWhy]) -> std::io::Result<()> {
    if tasks.is_empty() {
        return writeln!(out, "no tasks; `ebb run -- PROGRAM` makes one");
    }
    for (n, task) in tasks.iter().enumerate() {
        if n > 0 {
            writeln!(out)?;
        }
        writeln!(out, "{BOLD}{} {}{RESET}", task.task, harmless(&task.name))?;
        let width = task.decisions.iter().map(|d| time(d.ago_ms).len()).max();
        for decision in &task.decisions {
            let (ago, width) = (time(decision.ago_ms), width.unwrap_or(0));
            writeln!(
                out,
                "  {DIM}{ago:>width$} ago{RESET}  {}",
                harmless(&decision.text)
            )?;
        }
        for wait in &task.waits {
            let (pid, gpu, waited) = (wait.pid, wait.gpu, time(wait.waited_ms));
            let text = harmless(&wait.text);
            writeln!(
                out,
                "  {BOLD}waits{RESET} on GPU {gpu} (pid {pid}) for {waited}: {text}"
            )?;
        }
        if task.decisions.is_empty() && task.waits.is_empty() {
            writeln!(
                out,
                "  {DIM}nothing was decided about it: it has what it wants{RESET}"
            )?;
        }
    }
    Ok(())
}

/// Tasks that ended after memory was refused to them: the report may be all that is left of why.
fn write_gone(out: &mut impl Write, gone: &[GoneRow], mut below: bool) -> std::io::Result<()> {
    for gone in gone {
        if std::mem::replace(&mut below, true) {
            writeln!(out)?;
        }
        writeln!(
            out,
            "{BOLD}{} {}{RESET} ended {} ago, after memory was refused to it {} ago:",
            gone.task,
            harmless(&gone.name),
            time(gone.ended_ms),
            time(gone.refused_ms)
        )?;
        for line in gone.report.lines() {
            writeln!(out, "  {}", harmless(line))?;
        }
    }
    Ok(())
}

/// The tables.
pub(crate) fn write_snapshot(out: &mut impl Write, snapshot: &Snapshot) -> std::io::Result<()> {
    tasks(out, snapshot)?;
    writeln!(out)?;
    devices(out, snapshot)?;
    strangers(out, snapshot)?;
    let (arena, totals) = (&snapshot.arena, &snapshot.totals);
    writeln!(
        out,
        "\nhost arena: {} of {} held, {} lent",
        arena.held, arena.budget, arena.lent
    )?;
    if !arena.common.is_zero() {
        writeln!(
            out,
            "shared host copies: {}, in place of {} more",
            arena.common, arena.spared
        )?;
    }
    if let Some(disk) = &arena.disk {
        let limit = match disk.limit {
            Bytes::MAX => String::new(),
            limit => format!(" of {limit}"),
        };
        writeln!(
            out,
            "on disk: {} in {}{limit} of files, {} written and {} read so far",
            disk.segments, disk.stored, disk.spilled, disk.loaded
        )?;
        if !disk.trouble.is_empty() {
            writeln!(out, "nothing goes to disk at present: {}", disk.trouble)?;
        }
    }
    writeln!(
        out,
        "since {}: {} releases ({} out, {}), {} restores ({} in, {}), {} refused",
        time(snapshot.uptime_ms),
        totals.releases,
        totals.out_bytes,
        rate(per_second(totals.out_bytes.0, totals.out_nanos)),
        totals.restores,
        totals.in_bytes,
        rate(per_second(totals.in_bytes.0, totals.in_nanos)),
        totals.denials,
    )
}

fn tasks(out: &mut impl Write, snapshot: &Snapshot) -> std::io::Result<()> {
    use Align::{Left, Right};
    if snapshot.tasks.is_empty() {
        return writeln!(out, "no tasks; `ebb run -- PROGRAM` makes one");
    }
    let mut columns = vec![
        ("TASK", Left),
        ("NAME", Left),
        ("PRIORITY", Left),
        ("REQUEST", Right),
        ("LIMIT", Right),
        ("PID", Right),
        ("GPU", Left),
        ("STATE", Left),
        ("ON CARD", Right),
        ("IN HOST", Right),
    ];
    // The rarer tiers, where something is there.
    let processes = || snapshot.tasks.iter().flat_map(|task| &task.processes);
    let lodged = processes().any(|process| !process.lodged.is_zero());
    let on_disk = processes().any(|process| !process.on_disk.is_zero());
    columns.extend(lodged.then_some(("OTHER CARD", Right)));
    columns.extend(on_disk.then_some(("ON DISK", Right)));
    columns.extend([("CACHED", Right), ("PINNED", Right), ("WHY", Left)]);
    let amounts = columns.len() - 9;
    let mut table = Table::new(&columns);
    for task in &snapshot.tasks {
        let mut head = task_cells(task);
        if task.processes.is_empty() {
            let state = if task.paused { "paused" } else { "starting" };
            head.extend(["-", "-", state].map(String::from));
            head.extend(std::iter::repeat_n(String::from("-"), amounts));
            head.push(String::new());
            table.row(head);
            continue;
        }
        for process in &task.processes {
            let mut cells = std::mem::replace(&mut head, vec![String::new(); 5]);
            cells.push(process.pid.to_string());
            cells.push(gpu_name(snapshot, process.device));
            cells.push(process.state.clone());
            cells.extend([process.resident, in_host(process)].map(amount));
            cells.extend(lodged.then(|| amount(process.lodged)));
            cells.extend(on_disk.then(|| amount(process.on_disk)));
            cells.extend([process.cached, process.pinned].map(amount));
            cells.push(process.why.clone());
            table.row(cells);
        }
    }
    table.write(out, 0)
}

/// What of a process is in host memory. Managed memory has no place of its own in the ledger: what is known to be there is shown there.
pub(crate) fn in_host(process: &ProcessRow) -> Bytes {
    let elsewhere = process.lodged.saturating_add(process.on_disk);
    process
        .evicted
        .saturating_sub(elsewhere)
        .saturating_add(process.managed_out)
}

fn task_cells(task: &TaskRow) -> Vec<String> {
    vec![
        task.task.to_string(),
        task.name.clone(),
        task.priority.to_string(),
        amount(task.request),
        task.limit
            .map_or_else(|| "card".into(), |limit| limit.to_string()),
    ]
}

fn devices(out: &mut impl Write, snapshot: &Snapshot) -> std::io::Result<()> {
    use Align::{Left, Right};
    if snapshot.devices.is_empty() {
        return writeln!(
            out,
            "{DIM}no GPU is known yet: the first program that uses one will show it{RESET}"
        );
    }
    let mut columns = vec![
        ("GPU", Right),
        ("NAME", Left),
        ("TOTAL", Right),
        ("FOR TASKS", Right),
        ("GRANTED", Right),
        ("OVERHEAD", Right),
        ("UNMANAGED", Right),
    ];
    let lent = snapshot.devices.iter().any(|device| !device.lodged.is_zero());
    columns.extend(lent.then_some(("LENT", Right)));
    columns.extend([("FREE", Right), ("PEAK", Right)]);
    let mut table = Table::new(&columns);
    for device in &snapshot.devices {
        let mut cells = vec![device.index.to_string(), device.name.clone()];
        cells.extend([device.total, device.capacity].map(|bytes| bytes.to_string()));
        cells.extend([device.leased, device.overhead, device.unmanaged].map(amount));
        cells.extend(lent.then(|| amount(device.lodged)));
        cells.extend([device.free, device.peak].map(|bytes| bytes.to_string()));
        table.row(cells);
    }
    table.write(out, 0)
}

/// Who holds memory of a card past us. Nothing if there is nobody.
fn strangers(out: &mut impl Write, snapshot: &Snapshot) -> std::io::Result<()> {
    use Align::{Left, Right};
    let all = || {
        snapshot
            .devices
            .iter()
            .flat_map(|device| device.strangers.iter().map(move |row| (device, row)))
    };
    if all().next().is_none() {
        return Ok(());
    }
    writeln!(out, "\nnot managed by ebb, and promised to nobody:")?;
    let mut table = Table::new(&[
        ("PID", Right),
        ("PROGRAM", Left),
        ("TASK", Left),
        ("GPU", Right),
        ("HOLDS", Right),
        ("WHY", Left),
    ]);
    for (device, row) in all() {
        table.row(vec![
            row.pid.to_string(),
            row.program.clone(),
            row.task.map_or_else(|| "-".into(), |task| task.to_string()),
            device.index.to_string(),
            row.bytes.to_string(),
            row.why.clone(),
        ]);
    }
    table.write(out, 0)
}

/// Nothing is a dash: the eye finds what is something.
fn amount(bytes: Bytes) -> String {
    if bytes.is_zero() {
        "-".into()
    } else {
        bytes.to_string()
    }
}

/// The index of a card, as people call it.
pub(crate) fn gpu_name(snapshot: &Snapshot, device: Option<ebb_units::DeviceUuid>) -> String {
    let Some(uuid) = device else { return "-".into() };
    let known = snapshot.devices.iter().find(|row| row.uuid == uuid);
    known.map_or_else(|| uuid.to_string(), |row| row.index.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn text(snapshot: &Snapshot) -> String {
        let mut out = Vec::new();
        write_snapshot(&mut out, snapshot).unwrap();
        anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string()
    }

    #[test]
    fn a_busy_card() {
        insta::assert_snapshot!(text(&fixtures::busy()));
    }

    #[test]
    fn every_tier_that_holds_something_is_shown() {
        let mut snapshot = fixtures::busy();
        let process = &mut snapshot.tasks[1].processes[0];
        (process.lodged, process.on_disk) = (Bytes::gib(30), Bytes::gib(45));
        snapshot.devices[0].lodged = Bytes::gib(7);
        let text = text(&snapshot);
        for expected in [
            "OTHER CARD",
            "30 GiB",
            "ON DISK",
            "45 GiB",
            "5 GiB",
            "LENT",
            "7 GiB",
        ] {
            assert!(text.contains(expected), "{expected} in {text}");
        }
    }

    #[test]
    fn reasons_stand_under_their_task_and_what_it_waits_for_last() {
        use ebb_protocol::control::{DecisionRow, WaitRow};
        let decision = |ago_ms, text: &str| DecisionRow {
            ago_ms,
            text: text.into(),
        };
        let tasks = [
            TaskWhy {
                task: ebb_units::TaskId(3),
                name: "train\u{1b}[2J".into(),
                waits: vec![WaitRow {
                    pid: 77,
                    waited_ms: 12_000,
                    text: "needs 20 GiB: 3 GiB free, 17 GiB missing; it is next".into(),
                    ..WaitRow::default()
                }],
                decisions: vec![
                    decision(
                        95_000,
                        "17 GiB taken from t1 chat: idle 14 s, burst, priority low",
                    ),
                    decision(900, "is next: 20 GiB are gathered for it"),
                ],
            },
            TaskWhy {
                task: ebb_units::TaskId(4),
                name: "calm".into(),
                ..TaskWhy::default()
            },
        ];
        let mut out = Vec::new();
        write_why(&mut out, &tasks).unwrap();
        let text = anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string();
        insta::assert_snapshot!(text);
    }

    #[test]
    fn who_ended_without_memory_is_told_last() {
        let gone = [GoneRow {
            task: ebb_units::TaskId(5),
            name: "train".into(),
            ended_ms: 40_000,
            refused_ms: 41_000,
            report: "t5 `train` was refused memory: no\n  t1 `chat`: 3 GiB on the card".into(),
        }];
        let mut out = Vec::new();
        write_gone(&mut out, &gone, false).unwrap();
        let text = anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string();
        assert_eq!(
            text,
            "t5 train ended 40 s ago, after memory was refused to it 41 s ago:\n  \
             t5 `train` was refused memory: no\n    t1 `chat`: 3 GiB on the card\n"
        );
    }

    #[test]
    fn nothing_there() {
        insta::assert_snapshot!(text(&Snapshot::default()));
    }
}
