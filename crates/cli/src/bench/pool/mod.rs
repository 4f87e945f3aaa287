//! `ebb bench pool`: allocators replayed on recorded traces: how much physical memory each needs for what the program asked.
//!
//! No GPU and no daemon: the allocators are replayed in this process. Each replay checks every answer; then the same is done again
//! without checks, by the clock.

mod table;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueHint, builder::PossibleValuesParser, builder::TypedValueParser};
use ebb_lab::pool::event::Trace;
use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::run::{Options, Outcome, replay, time};
use ebb_lab::read::pool::{self as read, ReadError};
use ebb_units::Bytes;
use serde::Serialize;

use super::{say, unsay};
use crate::error::{CliError, Result};

/// Replays of one policy on one trace by the clock go on for this long, and at least [`ROUNDS`] times; the fastest counts.
const LONG_ENOUGH: Duration = Duration::from_millis(200);
const ROUNDS: u32 = 3;
/// Addresses and physical memory that no trace uses up, but small enough for sums.
const BOUNDLESS: u64 = 1 << 62;

/// `ebb bench pool`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb bench pool --trace snapshot.pickle           a file of torch.cuda.memory._dump_snapshot
  ebb bench pool --trace traces/*.csv.gz --policy ebb,best-fit
  ebb bench pool --trace plan.csv --unit 1 --json

Snapshots are read without running any code of theirs. What can be read, and how to write traces of your own:
docs/pool-traces.md. Files may be packed with gzip.")]
pub(crate) struct PoolArgs {
    /// What is replayed, each file by itself
    #[arg(long, value_name = "FILE", required = true, num_args = 1.., value_hint = ValueHint::FilePath)]
    pub trace: Vec<PathBuf>,
    /// Which allocators [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = kinds())]
    pub policy: Vec<Kind>,
    /// Bytes of one unit, in traces of buffer lifetimes, which have no unit of their own
    #[arg(long, value_name = "SIZE", default_value = "2Mi")]
    pub unit: Bytes,
    /// One JSON array, with an object for each trace and policy
    #[arg(long)]
    pub json: bool,
}

fn kinds() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::ALL.map(Kind::name))
        .try_map(|name| Kind::named(&name).ok_or("no such policy"))
}

/// One policy on one trace.
#[derive(Debug)]
struct Row {
    kind: Kind,
    outcome: Outcome,
    ns_per_op: f64,
}

/// One trace with all policies.
#[derive(Debug)]
struct Replayed {
    trace: Trace,
    rows: Vec<Row>,
}

/// What programs read: the fields and their order stay.
#[derive(Debug, Serialize)]
struct Line<'a> {
    trace: &'a str,
    policy: &'static str,
    peak_live_bytes: u64,
    peak_physical_bytes: u64,
    map_calls: u64,
    ns_per_op: f64,
}

pub(crate) fn pool(args: &PoolArgs) -> Result<()> {
    if args.unit.is_zero() {
        return Err(CliError::usage(
            "a unit of no bytes",
            "give --unit a size, such as 2Mi or 1",
        ));
    }
    let kinds = if args.policy.is_empty() {
        Kind::ALL.to_vec()
    } else {
        args.policy.clone()
    };
    let mut done = Vec::new();
    for path in &args.trace {
        for trace in traces(path, args.unit)? {
            done.push(one(trace, &kinds)?);
        }
    }
    unsay();
    if args.json {
        let mut out = std::io::stdout();
        serde_json::to_writer(&mut out, &lines(&done))?;
        writeln!(out)?;
    } else {
        table::write(&done, &mut anstream::stdout())?;
    }
    Ok(())
}

fn traces(path: &Path, unit: Bytes) -> Result<Vec<Trace>> {
    say(&format!("reading {}", path.display()));
    read::read(path, &read::Options { unit: unit.0 }).map_err(|error| {
        let fix = match &error {
            ReadError::Open(_) => "check --trace",
            ReadError::Content { .. } => "mend the file, or record it again",
            ReadError::Unknown { .. } => "docs/pool-traces.md says what can be read",
        };
        CliError::usage(error.to_string(), fix)
    })
}

/// All policies on one trace.
fn one(trace: Trace, kinds: &[Kind]) -> Result<Replayed> {
    let options = Options {
        capacity: BOUNDLESS,
        ..Options::default()
    };
    let mut rows = Vec::new();
    for &kind in kinds {
        say(&format!("{}: {}", trace.name, kind.name()));
        let mut policy = kind.make(options.capacity);
        let outcome = replay(trace.events.iter().cloned(), &mut *policy, &options)
            .map_err(|broken| CliError::failed(format!("{}: {}: {broken}", trace.name, kind.name())))?;
        drop(policy);
        rows.push(Row {
            kind,
            outcome,
            ns_per_op: ns_per_op(&trace, kind, &options),
        });
    }
    Ok(Replayed { trace, rows })
}

/// The fastest of several replays without checks.
fn ns_per_op(trace: &Trace, kind: Kind, options: &Options) -> f64 {
    let (mut fastest, mut rounds) = (f64::INFINITY, 0);
    let began = Instant::now();
    while rounds < ROUNDS || began.elapsed() < LONG_ENOUGH {
        let mut policy = kind.make(options.capacity);
        let start = Instant::now();
        let operations = time(trace, &mut *policy, options);
        let ns = start.elapsed().as_nanos() as f64;
        fastest = fastest.min(ns / operations.max(1) as f64);
        rounds += 1;
        if began.elapsed() > 10 * LONG_ENOUGH {
            break;
        }
    }
    fastest
}

fn lines(done: &[Replayed]) -> Vec<Line<'_>> {
    done.iter()
        .flat_map(|replayed| {
            replayed.rows.iter().map(|row| Line {
                trace: &replayed.trace.name,
                policy: row.kind.name(),
                peak_live_bytes: row.outcome.peak_live,
                peak_physical_bytes: row.outcome.peak_physical,
                map_calls: row.outcome.map_calls,
                ns_per_op: (row.ns_per_op * 10.0).round() / 10.0,
            })
        })
        .collect()
}
