//! `ebb pause`, `ebb hibernate`, `ebb resume`, `ebb limit`: one question, one answer.

use std::io::Write;

use ebb_protocol::control::{Payload, Request};

use super::watch::Watch;
use crate::args::{Global, HibernateArgs, LimitArgs, PauseArgs, TasksArgs};
use crate::client::{Client, unexpected};
use crate::error::{CliError, Result};
use crate::table::harmless;

/// `ebb pause`.
pub(crate) fn pause(global: &Global, args: &PauseArgs) -> Result<()> {
    let wait_ms = args
        .wait
        .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    done(
        global,
        &Request::Pause {
            task: args.task.clone(),
            wait_ms,
        },
        args.json,
    )
}

/// `ebb hibernate`.
pub(crate) fn hibernate(global: &Global, args: &HibernateArgs) -> Result<()> {
    let wait_ms = args
        .wait
        .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
    each(&args.tasks, |task| {
        let task = task.clone();
        done(global, &Request::Hibernate { task, wait_ms }, args.json)
    })
}

/// `ebb resume`.
pub(crate) fn resume(global: &Global, args: &TasksArgs) -> Result<()> {
    each(&args.tasks, |task| {
        done(global, &Request::Resume { task: task.clone() }, args.json)
    })
}

/// The same with each task. What fails for one is said, and the others have their turn.
fn each(tasks: &[String], mut with: impl FnMut(&String) -> Result<()>) -> Result<()> {
    let mut failed = None;
    for task in tasks {
        if let Err(error) = with(task)
            && let Some(earlier) = failed.replace(error)
        {
            crate::usage::say(&earlier);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// `ebb limit`.
pub(crate) fn limit(global: &Global, args: &LimitArgs) -> Result<()> {
    if let (Some(request), Some(limit)) = (args.request, args.limit)
        && request > limit
    {
        return Err(CliError::usage(
            format!(
                "the request ({}) is above the limit ({})",
                request.to_quantity(),
                limit.to_quantity()
            ),
            "lower --request or raise the limit",
        ));
    }
    let request = Request::Limit {
        task: args.task.clone(),
        limit: args.limit,
        request: args.request,
        priority: args.priority,
    };
    done(global, &request, args.json)
}

/// Taking memory off a card waits for what runs there: on a terminal, something moves meanwhile.
fn watch(request: &Request) -> Option<Watch> {
    let what = match request {
        Request::Pause { task, .. } => format!("pausing {}: waiting for its work on the GPU", harmless(task)),
        Request::Hibernate { task, .. } => format!("hibernating {}", harmless(task)),
        Request::Resume { task } => format!("bringing {} back", harmless(task)),
        Request::Limit { task, .. } => format!("changing {}", harmless(task)),
        _ => return None,
    };
    Some(Watch::new(what))
}

fn done(global: &Global, request: &Request, json: bool) -> Result<()> {
    let mut client = Client::open(global)?;
    let waiting = watch(request);
    let answer = client.ask(request);
    drop(waiting);
    let answer = answer?;
    let Payload::Done { message } = &answer else {
        return Err(unexpected(&answer));
    };
    let mut out = anstream::stdout();
    if json {
        writeln!(out, "{}", serde_json::json!({ "message": message }))?;
    } else {
        writeln!(out, "{}", harmless(message))?;
    }
    Ok(())
}
