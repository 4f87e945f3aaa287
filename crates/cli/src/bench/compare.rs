//! `ebb bench --compare`: the same bytes out and back by the driver's own checkpoint, and by whatever else is installed here.
//!
//! Each is asked to do what it is made for, with a process that holds the same bytes, written anew before. One that is not installed is
//! named so; one that fails or takes too long is ended, and named with what it said.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::figure::{Figure, Unit, median};
use super::hibernate::Driver;
use super::server::{Held, Server, Took};
use super::{PAUSE_MS, say, unsay};
use crate::demo::stage::Stage;
use crate::error::{CliError, Result};
use crate::table::{Align, Table};

/// No other way may take longer than that, all rounds together.
const LIMIT: Duration = Duration::from_secs(240);
/// More rounds of something that takes ten times as long say nothing more.
const ROUNDS: u32 = 3;

/// What is run for ways that are Python packages.
const SCRIPT: &str = include_str!("compare.py");

/// Another way to get memory off a card and back.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Other {
    /// Its name.
    pub by: String,
    /// Bytes that the process holds.
    pub bytes: u64,
    /// Seconds to take them off the card, of each round.
    pub out: Vec<f64>,
    /// Seconds until they can be used again.
    pub back: Vec<f64>,
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What the script answers.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    out: Vec<f64>,
    #[serde(rename = "in")]
    back: Vec<f64>,
    missing: Option<String>,
    failed: Option<String>,
}

/// All that there are.
pub(super) fn compare(stage: &mut Stage, rounds: u32) -> Vec<Other> {
    let bytes = stage.bytes_per_job.0;
    let rounds = rounds.min(ROUNDS);
    let mut others = Vec::new();
    let mut add = |by: &str, result: std::result::Result<(Vec<f64>, Vec<f64>), String>| {
        let (out, back, why) = match result {
            Ok((out, back)) => (out, back, None),
            Err(why) => (Vec::new(), Vec::new(), Some(why)),
        };
        others.push(Other {
            by: by.into(),
            bytes,
            out,
            back,
            why,
        });
    };
    if stage.is_sim() {
        for by in [
            "cuCheckpointProcess*",
            "cuda-checkpoint",
            "torch_memory_saver",
            "vLLM sleep",
        ] {
            add(
                by,
                Err("a simulated GPU has no other ways to be compared with".into()),
            );
        }
        return others;
    }
    say("comparing: the driver's checkpoint");
    add(
        "cuCheckpointProcess*",
        by_driver(stage, rounds).map_err(|error| error.message),
    );
    say("comparing: cuda-checkpoint");
    add("cuda-checkpoint", by_tool(stage, rounds));
    for (by, package) in [
        ("torch_memory_saver", "torch_memory_saver"),
        ("vLLM sleep", "vllm"),
    ] {
        say(&format!("comparing: {by}"));
        add(by, by_script(stage, package, bytes, rounds));
    }
    unsay();
    others
}

fn by_driver(stage: &mut Stage, rounds: u32) -> Result<(Vec<f64>, Vec<f64>)> {
    let mut driver = Driver::start(stage)?;
    let mut plain = holder(stage)?;
    let pid = plain.pid();
    let took = in_turns(&mut plain, rounds, |down| {
        driver.tell(&if down {
            format!("down {PAUSE_MS} {pid}")
        } else {
            format!("up {pid}")
        })
    });
    plain.end(&mut stage.guard)?;
    took
}

/// NVIDIA's command for the same calls.
fn by_tool(stage: &mut Stage, rounds: u32) -> std::result::Result<(Vec<f64>, Vec<f64>), String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("cuda-checkpoint"));
    let Some(tool) = found.into_iter().find(|tool| tool.is_file()) else {
        return Err("not installed".into());
    };
    let mut plain = holder(stage).map_err(|error| error.message)?;
    let pid = plain.pid().to_string();
    let took = in_turns(&mut plain, rounds, |_| {
        let mut command = Command::new(&tool);
        command.args(["--toggle", "--pid", &pid]);
        let began = Instant::now();
        bounded(command, stage)
            .map(|_| began.elapsed().as_secs_f64())
            .map_err(CliError::failed)
    });
    let took = took.map_err(|error| error.message);
    // One that did not come back is ended when it is dropped.
    if took.is_ok() {
        plain.end(&mut stage.guard).map_err(|error| error.message)?;
    }
    took
}

/// A plain program that holds the bytes.
fn holder(stage: &mut Stage) -> Result<Server> {
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let _: Held = plain.ask(&format!("hold {}", stage.bytes_per_job.0))?;
    Ok(plain)
}

/// Down and up by `toggle`; back ends with the program's next kernel. The first round is not counted.
fn in_turns(
    plain: &mut Server,
    rounds: u32,
    mut toggle: impl FnMut(bool) -> Result<f64>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let (mut out, mut back) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let _: Took = plain.ask("rewrite")?;
        let down = toggle(true)?;
        let up = toggle(false)?;
        let again: Took = plain.ask("touch")?;
        if round > 0 {
            out.push(down);
            back.push(up + again.seconds);
        }
    }
    Ok((out, back))
}

fn by_script(
    stage: &mut Stage,
    package: &str,
    bytes: u64,
    rounds: u32,
) -> std::result::Result<(Vec<f64>, Vec<f64>), String> {
    let mut command = Command::new("python3");
    command
        .args(["-c", SCRIPT, package, &bytes.to_string(), &rounds.to_string()])
        .env_remove("LD_PRELOAD")
        .env("CUDA_VISIBLE_DEVICES", stage.card.uuid.to_string());
    let text = bounded(command, stage)?;
    // Packages greet on the standard output; the answer is the last line.
    let line = text.lines().last().unwrap_or_default();
    let said: Said = serde_json::from_str(line).map_err(|_| format!("it said: {}", line.trim()))?;
    match said {
        Said {
            missing: Some(package),
            ..
        } => Err(format!("not installed ({package})")),
        Said {
            failed: Some(why), ..
        } => Err(why),
        Said { out, back, .. } if out.is_empty() || out.len() != back.len() => {
            Err("it measured nothing".into())
        }
        Said { out, back, .. } => Ok((out, back)),
    }
}

/// Runs it for so long at most; what it wrote.
fn bounded(mut command: Command, stage: &mut Stage) -> std::result::Result<String, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("it cannot be started: {error}"))?;
    stage.guard.watch(child.id());
    let began = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if began.elapsed() < LIMIT => std::thread::sleep(Duration::from_millis(2)),
            _ => break None,
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    stage.guard.forget(child.id());
    let status = status.ok_or_else(|| format!("it did not end in {} s", LIMIT.as_secs()))?;
    let mut text = String::new();
    // Less than a pipe holds: a line of figures, and what packages greet with.
    if let Some(out) = child.stdout.as_mut() {
        let _ = out.take(1 << 16).read_to_string(&mut text);
    }
    if status.success() {
        Ok(text)
    } else {
        Err(format!("it ended with {status}"))
    }
}

/// What ebb took in the same run: seconds for so many bytes.
fn ours(figures: &[Figure], what: &str, bytes: u64) -> Option<f64> {
    let figure = figures.iter().find(|figure| figure.what == what)?;
    match figure.unit {
        Unit::BytesPerS => Some(bytes as f64 / figure.ebb),
        Unit::Seconds => Some(figure.ebb),
        Unit::Bytes => None,
    }
}

/// The table for people.
pub(super) fn write(
    others: &[Other],
    figures: &[Figure],
    to: &mut impl std::io::Write,
) -> std::io::Result<()> {
    let mut table = Table::new(&[
        ("BESIDE", Align::Left),
        ("OUT", Align::Right),
        ("EBB", Align::Right),
        ("FASTER", Align::Right),
        ("BACK", Align::Right),
        ("EBB", Align::Right),
        ("FASTER", Align::Right),
    ]);
    let (mut any, mut without) = (false, Vec::new());
    for other in others {
        if let Some(why) = &other.why {
            without.push(format!("NOT COMPARED: {}: {why}", other.by));
            continue;
        }
        any = true;
        // What takes the context off the card as well is beside hibernate.
        let whole = other.by.contains("heckpoint");
        let names = if whole {
            ["hibernate", "wake"]
        } else {
            ["release", "restore"]
        };
        let mut cells = vec![other.by.clone()];
        for (theirs, what) in [(&other.out, names[0]), (&other.back, names[1])] {
            let theirs = median(theirs);
            let ebb = ours(figures, what, other.bytes);
            cells.push(Unit::Seconds.show(theirs));
            cells.push(ebb.map_or_else(|| "-".into(), |ebb| Unit::Seconds.show(ebb)));
            cells.push(ebb.map_or_else(|| "-".into(), |ebb| format!("×{:.1}", theirs / ebb)));
        }
        table.row(cells);
    }
    writeln!(to)?;
    if any {
        table.write(to, 0)?;
    }
    without.iter().try_for_each(|line| writeln!(to, "{line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stands_beside_what_it_does() {
        let figures = [
            Figure::rate("release", 100, "link", &[2.0], vec![50.0]),
            Figure::paired("hibernate", 100, "driver", vec![1.0], vec![8.0]),
        ];
        let other = |by: &str, why: Option<&str>| Other {
            by: by.into(),
            bytes: 100,
            out: vec![8.0],
            back: vec![3.0],
            why: why.map(Into::into),
        };
        let others = [
            other("cuda-checkpoint", None),
            other("torch_memory_saver", None),
            other("vLLM sleep", Some("not installed (vllm)")),
        ];
        let mut out = Vec::new();
        write(&others, &figures, &mut out).unwrap();
        let text = anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string();
        assert!(text.contains("×8.0") && text.contains("×4.0"), "{text}");
        assert!(
            text.contains("NOT COMPARED: vLLM sleep: not installed (vllm)"),
            "{text}"
        );
    }

    #[test]
    fn a_package_that_is_not_there_is_said_to_be_missing() {
        let done = Command::new("python3")
            .args(["-c", SCRIPT, "no_such_package", "1073741824", "1"])
            .output()
            .unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        let said: Said = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        assert_eq!(said.missing.as_deref(), Some("no_such_package"));
    }
}
