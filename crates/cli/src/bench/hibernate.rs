//! `ebb bench hibernate`: a process to nothing on the card, and back to its next kernel; beside it the driver's checkpoint alone, of a
//! process that holds the same, in turn.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;

use ebb_protocol::control::Request;

use super::figure::{Figure, Phase};
use super::server::{Checked, Held, Server, Took};
use super::{PAUSE_MS, TASK, TURN, await_arena, say, unsay};
use crate::demo::stage::Stage;
use crate::error::{CliError, Result};

/// What the driver is asked to do by itself, by the same helper that a daemon has.
pub(super) struct Driver {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Driver {
    pub(super) fn start(stage: &mut Stage) -> Result<Self> {
        let mut child = stage
            .checkpoint_helper()?
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| CliError::failed(format!("cannot start a helper: {error}")))?;
        stage.guard.watch(child.id());
        let orders = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        let mut driver = Self {
            child,
            orders,
            answers,
        };
        driver.await_line("ready")?;
        Ok(driver)
    }

    /// Reads on until a line that begins so.
    fn await_line(&mut self, wanted: &str) -> Result<()> {
        loop {
            let mut line = String::new();
            if self.answers.read_line(&mut line)? == 0 {
                return Err(CliError::failed("the helper for the driver's checkpoint ended"));
            }
            let line = line.trim_end();
            if line.starts_with(wanted) {
                return Ok(());
            }
            if line.starts_with("failed") || line.starts_with("unable") {
                return Err(CliError::failed(format!("the driver's checkpoint: {line}")));
            }
        }
    }

    /// Gives a command; how many seconds it took.
    pub(super) fn tell(&mut self, command: &str) -> Result<f64> {
        let began = Instant::now();
        writeln!(self.orders, "{command}")?;
        self.await_line("done")?;
        Ok(began.elapsed().as_secs_f64())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Both ways, by their phases as well, and how many words were wrong.
pub(super) fn hibernate(stage: &mut Stage, rounds: u32) -> Result<(Vec<Figure>, Vec<Phase>, u64)> {
    let bytes = stage.bytes_per_job;
    let mut driver = Driver::start(stage)?;
    let mut plain = Server::start(stage.server(None)?, &mut stage.guard)?;
    let _: Held = plain.ask(&format!("hold {}", bytes.0))?;
    let mut worker = Server::start(stage.server(Some(TASK))?, &mut stage.guard)?;
    let held: Held = worker.ask(&format!("hold {}", bytes.0))?;
    await_arena(stage, held.held)?;
    let [mut out, mut back, mut theirs_out, mut theirs_back] = [const { Vec::new() }; 4];
    let (mut wrong, mut phases) = (0, Vec::new());
    for round in 0..=rounds {
        say(&format!("hibernate and back, round {round} of {rounds}"));
        let _: Took = worker.ask("rewrite")?;
        std::thread::sleep(TURN);
        let began = Instant::now();
        stage.ask(&Request::Hibernate {
            task: TASK.into(),
            wait_ms: Some(PAUSE_MS),
        })?;
        let took = began.elapsed().as_secs_f64();
        let touched: Took = worker.ask("touch")?;
        let checked: Checked = worker.ask("check")?;
        wrong += checked.wrong;
        if round > 0 {
            add_phases(stage, &mut phases)?;
        }
        say(&format!(
            "the driver's checkpoint alone, round {round} of {rounds}"
        ));
        let _: Took = plain.ask("rewrite")?;
        let pid = plain.pid();
        let down = driver.tell(&format!("down {PAUSE_MS} {pid}"))?;
        let up = driver.tell(&format!("up {pid}"))?;
        let again: Took = plain.ask("touch")?;
        // The first round may find segments that are not registered yet, and a driver that was not asked before.
        if round > 0 {
            out.push(took);
            back.push(touched.seconds);
            theirs_out.push(down);
            theirs_back.push(up + again.seconds);
        }
    }
    worker.end(&mut stage.guard)?;
    plain.end(&mut stage.guard)?;
    unsay();
    let alone = "the driver's checkpoint alone";
    Ok((
        vec![
            Figure::paired("hibernate", held.held, alone, out, theirs_out),
            Figure::paired("wake", held.held, alone, back, theirs_back),
        ],
        phases,
        wrong,
    ))
}

/// What the daemon says of the round that is over.
fn add_phases(stage: &mut Stage, phases: &mut Vec<Phase>) -> Result<()> {
    let snapshot = stage.snapshot()?;
    let row = snapshot.tasks.into_iter().find(|task| task.name == TASK);
    let Some(row) = row.and_then(|task| task.hibernation) else {
        return Ok(());
    };
    for (of, rows) in [("hibernate", row.down), ("wake", row.up)] {
        for row in rows {
            let seconds = row.ns as f64 / 1e9;
            match phases
                .iter_mut()
                .find(|phase| phase.of == of && phase.what == row.what)
            {
                Some(phase) => phase.samples.push(seconds),
                None => phases.push(Phase {
                    of,
                    what: row.what,
                    samples: vec![seconds],
                }),
            }
        }
    }
    Ok(())
}
