//! What the demo shows: bars while it runs on a terminal, lines elsewhere, a table and an object at the end.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use ebb_protocol::control::Snapshot;
use ebb_units::Bytes;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::table::{Align, BOLD, GREEN, RED, RESET, Table, rate};

/// The result. Its JSON form is what programs read: the fields and their order stay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Outcome {
    /// `sim`, or the card's name.
    pub gpu: String,
    /// How many jobs were run together.
    pub jobs: u32,
    /// What the card has.
    pub card_bytes: u64,
    /// What the jobs held together.
    pub held_bytes: u64,
    /// Jobs that came to their end.
    pub finished: u32,
    /// Words that were not as written.
    pub mismatches: u64,
    /// Whether the second job failed for memory without ebb.
    pub oom_without_ebb: bool,
    /// How often memory was taken from a job by copying it out.
    pub releases: u64,
    /// While copying out.
    pub out_bytes_per_s: u64,
    /// While copying in.
    pub in_bytes_per_s: u64,
}

/// What is in the table and not in the object.
#[derive(Debug, Clone)]
pub(super) struct Details {
    /// Per job: seconds, bytes held, words that were wrong.
    pub jobs: Vec<(f64, Bytes, u64)>,
    /// Bytes copied out and in.
    pub moved: (Bytes, Bytes),
    /// The most that the ledger ever had.
    pub peak: Bytes,
}

impl Outcome {
    /// What is not as it should be.
    pub(super) fn faults(&self, details: &Details) -> Vec<String> {
        let mut faults = Vec::new();
        if !self.oom_without_ebb {
            faults.push("without ebb, the second job did not fail for memory".into());
        }
        if self.finished != self.jobs {
            faults.push(format!("{} of {} jobs finished", self.finished, self.jobs));
        }
        if self.mismatches != 0 {
            faults.push(format!("{} words were not as written", self.mismatches));
        }
        if self.releases == 0 {
            faults.push("no memory changed hands".into());
        }
        if details.peak.0 > self.card_bytes {
            faults.push(format!("the ledger had {}, more than the card", details.peak));
        }
        faults
    }

    /// The table for people.
    pub(super) fn write(&self, out: &mut impl Write, details: &Details) -> std::io::Result<()> {
        use Align::Right;
        writeln!(out)?;
        let mut table = Table::new(&[
            ("JOB", Align::Left),
            ("SECONDS", Right),
            ("HELD", Right),
            ("WRONG WORDS", Right),
        ]);
        for (i, (seconds, held, wrong)) in details.jobs.iter().enumerate() {
            table.row(vec![
                super::name_of(i).into(),
                format!("{seconds:.1}"),
                held.to_string(),
                wrong.to_string(),
            ]);
        }
        table.write(out, 2)?;
        writeln!(out)?;
        let mut table = Table::new(&[("", Align::Left), ("", Align::Left)]);
        let mut line = |what: &str, found: String| table.row(vec![what.into(), found]);
        let (card, held) = (Bytes(self.card_bytes), Bytes(self.held_bytes));
        line(
            "card",
            format!(
                "{card} ({})",
                if self.gpu == "sim" { "simulated" } else { &self.gpu }
            ),
        );
        line(
            "held by both",
            format!("{held}, {} % of the card", percent(held, card)),
        );
        line(
            "peak of the ledger",
            format!("{}, {} % of the card", details.peak, percent(details.peak, card)),
        );
        line("releases", self.releases.to_string());
        line(
            "moved out",
            format!("{} at {}", details.moved.0, rate(self.out_bytes_per_s as f64)),
        );
        line(
            "moved in",
            format!("{} at {}", details.moved.1, rate(self.in_bytes_per_s as f64)),
        );
        table.write(out, 2)?;
        writeln!(out)?;
        let faults = self.faults(details);
        if faults.is_empty() {
            writeln!(
                out,
                "{GREEN}{BOLD}both jobs finished, and every byte of theirs is as they wrote it{RESET}"
            )
        } else {
            writeln!(
                out,
                "{RED}{BOLD}not as it should be:{RESET} {}",
                faults.join("; ")
            )
        }
    }
}

fn percent(part: Bytes, whole: Bytes) -> u128 {
    u128::from(part.0) * 100 / u128::from(whole.0.max(1))
}

/// How the demo goes, on stderr: the results alone go to stdout.
#[derive(Debug)]
pub(super) struct Live {
    bars: Option<(MultiProgress, Vec<ProgressBar>, ProgressBar)>,
    /// Quarters of each job that were told, where there is no terminal.
    told: Vec<u32>,
}

impl Live {
    /// On this stderr.
    pub(super) fn new() -> Self {
        Self {
            bars: None,
            told: Vec::new(),
        }
    }

    /// A sentence that stays.
    pub(super) fn say(&self, text: &str) {
        match &self.bars {
            Some((all, ..)) => all.suspend(|| anstream::eprintln!("{text}")),
            None => anstream::eprintln!("{text}"),
        }
    }

    /// From here on, so many jobs with so many steps each.
    pub(super) fn begin(&mut self, jobs: usize, steps: u32) {
        self.told = vec![0; jobs];
        if !std::io::stderr().is_terminal() {
            return;
        }
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        let style = ProgressStyle::with_template("  {prefix} [{bar:24}] {pos:>4}/{len} {msg}")
            .expect("a valid template");
        let bars = (0..jobs)
            .map(|i| {
                let bar = all
                    .add(ProgressBar::new(u64::from(steps)).with_style(style.clone().progress_chars("=> ")));
                bar.set_prefix(super::name_of(i));
                bar.set_message("starting");
                bar.tick();
                bar
            })
            .collect();
        let card = all.add(
            ProgressBar::new(1).with_style(ProgressStyle::with_template("  card  {msg}").expect("valid")),
        );
        card.enable_steady_tick(Duration::from_millis(100));
        self.bars = Some((all, bars, card));
    }

    /// A job has done a step.
    pub(super) fn step(&mut self, job: usize, step: u32, steps: u32) {
        match &self.bars {
            Some((_, bars, _)) => bars[job].set_position(u64::from(step)),
            None => {
                let quarter = step * 4 / steps.max(1);
                if quarter > self.told[job] {
                    self.told[job] = quarter;
                    self.say(&format!("  {}: step {step} of {steps}", super::name_of(job)));
                }
            }
        }
    }

    /// How the tasks and the card are at present.
    pub(super) fn listing(&self, snapshot: &Snapshot, card_bytes: Bytes) {
        let Some((_, bars, card)) = &self.bars else { return };
        for (i, bar) in bars.iter().enumerate() {
            let task = snapshot.tasks.iter().find(|task| task.name == super::name_of(i));
            let process =
                task.and_then(|task| task.processes.iter().find(|process| process.device.is_some()));
            if let Some(process) = process {
                bar.set_message(format!(
                    "{:9} {} on the card, {} in host memory",
                    process.state, process.resident, process.evicted
                ));
            }
        }
        if let Some(device) = snapshot.devices.first() {
            let room = 24;
            let held = (device.leased + device.overhead).0;
            let cells = usize::try_from(u128::from(held) * room as u128 / u128::from(card_bytes.0.max(1)))
                .unwrap_or(room)
                .min(room);
            card.set_message(format!(
                "[{}{}] {} of {card_bytes}; {} releases, {} moved out, {} in",
                "#".repeat(cells),
                ".".repeat(room - cells),
                Bytes(held),
                snapshot.totals.releases,
                snapshot.totals.out_bytes,
                snapshot.totals.in_bytes,
            ));
        }
    }

    /// A job has ended.
    pub(super) fn end(&self, job: usize, how: &str) {
        match &self.bars {
            Some((_, bars, _)) => bars[job].abandon_with_message(how.to_owned()),
            None => self.say(&format!("  {}: {how}", super::name_of(job))),
        }
    }

    /// All have ended; the bars stay as they are.
    pub(super) fn finish(&mut self) {
        if let Some((_, bars, card)) = self.bars.take() {
            for bar in bars {
                bar.abandon();
            }
            card.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> (Outcome, Details) {
        let outcome = Outcome {
            gpu: "sim".into(),
            jobs: 2,
            card_bytes: 512 << 20,
            held_bytes: 768 << 20,
            finished: 2,
            mismatches: 0,
            oom_without_ebb: true,
            releases: 6,
            out_bytes_per_s: 1_900_000_000,
            in_bytes_per_s: 1_800_000_000,
        };
        let details = Details {
            jobs: vec![(6.1, Bytes::mib(384), 0), (7.25, Bytes::mib(384), 0)],
            moved: (Bytes::mib(1600), Bytes::mib(1600)),
            peak: Bytes::mib(500),
        };
        (outcome, details)
    }

    #[test]
    fn the_object_is_as_promised() {
        let text = serde_json::to_string(&good().0).unwrap();
        assert_eq!(
            text,
            r#"{"gpu":"sim","jobs":2,"card_bytes":536870912,"held_bytes":805306368,"finished":2,"mismatches":0,"oom_without_ebb":true,"releases":6,"out_bytes_per_s":1900000000,"in_bytes_per_s":1800000000}"#
        );
    }

    #[test]
    fn the_table() {
        let (outcome, details) = good();
        let mut out = Vec::new();
        outcome.write(&mut out, &details).unwrap();
        insta::assert_snapshot!(anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string());
    }

    #[test]
    fn each_fault_is_named() {
        let (outcome, details) = good();
        assert!(outcome.faults(&details).is_empty());
        let bad = Outcome {
            mismatches: 3,
            oom_without_ebb: false,
            releases: 0,
            finished: 1,
            ..outcome
        };
        let details = Details {
            peak: Bytes::gib(1),
            ..details
        };
        assert_eq!(bad.faults(&details).len(), 5);
    }
}
