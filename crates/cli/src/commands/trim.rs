//! `ebb trim`: what each task gave back.

use std::io::Write;

use ebb_protocol::control::{Payload, Request, TrimmedTask};

use crate::args::{Global, TrimArgs};
use crate::client::{Client, unexpected};
use crate::error::Result;
use crate::table::{Align, Table};

/// `ebb trim`.
pub(crate) fn trim(global: &Global, args: &TrimArgs) -> Result<()> {
    let mut client = Client::open(global)?;
    let mut rows: Vec<TrimmedTask> = Vec::new();
    let asked: Vec<Option<String>> = if args.all {
        vec![None]
    } else {
        args.tasks.iter().cloned().map(Some).collect()
    };
    for task in asked {
        let answer = client.ask(&Request::Trim { task })?;
        let Payload::Trimmed { tasks } = answer else {
            return Err(unexpected(&answer));
        };
        rows.extend(tasks);
    }
    let mut out = anstream::stdout();
    if args.json {
        writeln!(out, "{}", serde_json::json!({ "tasks": rows }))?;
        return Ok(());
    }
    if rows.is_empty() {
        writeln!(out, "no tasks")?;
        return Ok(());
    }
    let mut table = Table::new(&[
        ("TASK", Align::Left),
        ("NAME", Align::Left),
        ("GIVEN BACK", Align::Right),
        ("", Align::Left),
    ]);
    for row in rows {
        let silent = match row.silent {
            0 => String::new(),
            1 => "1 process did not answer".into(),
            n => format!("{n} processes did not answer"),
        };
        table.row(vec![
            row.task.to_string(),
            row.name,
            row.bytes.to_string(),
            silent,
        ]);
    }
    table.write(&mut out, 0)?;
    Ok(())
}
