//! `ebb bench pool`: allocators replayed on recorded traces: how much physical memory each needs for what the program asked.
//!
//! No GPU and no daemon: the allocators are replayed in this process. Each replay checks every answer; then the same is done again
//! without checks, by the clock.

mod page;
mod table;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, ValueHint, builder::PossibleValuesParser, builder::TypedValueParser};
use ebb_lab::pool::event::{Event, Recorded, Trace};
use ebb_lab::pool::kind::Kind;
use ebb_lab::pool::mix::{DAY_NS, Mix};
use ebb_lab::pool::run::{Fast, Options, Outcome, replay};
use ebb_lab::read::pool::{self as read, ReadError};
use ebb_units::{Bytes, GRANULE};
use serde::Serialize;

use super::{say, unsay};
use crate::error::{CliError, Result};

/// Replays of one policy on one trace by the clock go on for this long, and at least [`ROUNDS`] times; the fastest counts.
const LONG_ENOUGH: Duration = Duration::from_millis(200);
const ROUNDS: u32 = 3;
/// Addresses and physical memory that no trace uses up, but small enough for sums.
const BOUNDLESS: u64 = 1 << 62;
/// Events between two looks at the clock, and between two words about how far it is.
const CHUNK: usize = 1 << 16;

/// `ebb bench pool`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb bench pool --trace snapshot.pickle           a file of torch.cuda.memory._dump_snapshot
  ebb bench pool --trace traces/*.csv.gz --policy ebb,best-fit
  ebb bench pool --trace plan.csv --unit 1 --json
  ebb bench pool --trace traces/*.csv.gz --interleave 7 --html day.html

With --interleave the traces are the jobs of a day: at random times one comes, plays its trace over some minutes, and
ends, every third before its time. What is refused is counted on a card that is 2 % larger than the most that is live at
once, unless --capacity says otherwise; all other figures are of a card without bound.

ebb-mesh is ebb that stops the program in every pause of more than a millisecond to bring small blocks together, by copying, at
the same addresses.

Snapshots are read without running any code of theirs. What can be read, and how to write traces of your own:
docs/pool-traces.md. Files may be packed with gzip.")]
pub(crate) struct PoolArgs {
    /// What is replayed, each file by itself unless they are interleaved
    #[arg(long, value_name = "FILE", required = true, num_args = 1.., value_hint = ValueHint::FilePath)]
    pub trace: Vec<PathBuf>,
    /// Which allocators [default: all but ebb-mesh]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = kinds())]
    pub policy: Vec<Kind>,
    /// Bytes of one unit, in traces of buffer lifetimes, which have no unit of their own
    #[arg(long, value_name = "SIZE", default_value = "2Mi")]
    pub unit: Bytes,
    /// Interleave the traces to a day of one card, made from this seed
    #[arg(long, value_name = "SEED")]
    pub interleave: Option<u64>,
    /// Count what each allocator refuses on a card of this size
    #[arg(long, value_name = "SIZE")]
    pub capacity: Option<Bytes>,
    /// Draw what each allocator held over time into a page for the browser
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// One JSON array, with an object for each trace and policy
    #[arg(long)]
    pub json: bool,
}

fn kinds() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::ALL.map(Kind::name))
        .try_map(|name| Kind::named(&name).ok_or("no such policy"))
}

/// What is replayed.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    /// What a file recorded.
    Trace(&'a Trace),
    /// A day that is made of several.
    Day(&'a [Trace], u64),
}

impl<'a> Source<'a> {
    fn name(self) -> String {
        match self {
            Self::Trace(trace) => trace.name.clone(),
            Self::Day(_, seed) => format!("interleaved:{seed}"),
        }
    }

    /// What a reader should know of it.
    fn notes(self) -> Vec<String> {
        match self {
            Self::Trace(trace) => table::notes(trace),
            Self::Day(traces, seed) => {
                let mut mix = Mix::new(traces, seed);
                mix.by_ref().for_each(drop);
                vec![format!(
                    "{} jobs in 24 h, of {} traces",
                    mix.begun(),
                    traces.len()
                )]
            }
        }
    }

    fn events(self) -> Box<dyn Iterator<Item = Event> + 'a> {
        match self {
            Self::Trace(trace) => Box::new(trace.events.iter().cloned()),
            Self::Day(traces, seed) => Box::new(Mix::new(traces, seed)),
        }
    }

    fn slots(self) -> u32 {
        match self {
            Self::Trace(trace) => trace.slots,
            Self::Day(traces, seed) => Mix::new(traces, seed).slots(),
        }
    }
}

/// What was refused on a card that is small.
#[derive(Debug, Clone, Copy)]
struct Bounded {
    capacity: u64,
    refused: u64,
    /// Of these, how many would have fitted beside what was live.
    unjustified: u64,
}

/// One policy on one source.
#[derive(Debug)]
struct Row {
    kind: Kind,
    outcome: Outcome,
    ns_per_op: f64,
    bounded: Option<Bounded>,
}

/// One source with all policies.
#[derive(Debug)]
struct Replayed {
    name: String,
    notes: Vec<String>,
    recorded: Option<Recorded>,
    /// Whether its time means something to people.
    by_time: bool,
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
        Kind::usual().collect::<Vec<_>>()
    } else {
        args.policy.clone()
    };
    let mut read = Vec::new();
    for path in &args.trace {
        read.extend(traces(path, args.unit)?);
    }
    if let Some(empty) = read.iter().find(|trace| trace.events.is_empty()) {
        return Err(CliError::usage(
            format!("{}: nothing happens in it", empty.name),
            "leave it out, or record it again",
        ));
    }
    let done = match args.interleave {
        Some(seed) => vec![one(Source::Day(&read, seed), &kinds, args.capacity)?],
        None => read
            .iter()
            .map(|trace| one(Source::Trace(trace), &kinds, args.capacity))
            .collect::<Result<_>>()?,
    };
    if let Some(file) = &args.html {
        std::fs::write(file, page::page(&done)).map_err(|error| {
            CliError::usage(
                format!("cannot write {}: {error}", file.display()),
                "choose another --html",
            )
        })?;
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

/// All policies on one source.
fn one(source: Source<'_>, kinds: &[Kind], capacity: Option<Bytes>) -> Result<Replayed> {
    let by_time = matches!(source, Source::Day(..));
    let name = source.name();
    let bound = |capacity: u64| Options {
        capacity,
        ..Options::default()
    };
    let whole = bound(BOUNDLESS);
    let mut rows = Vec::new();
    for &kind in kinds {
        let outcome = checked(source, kind, &whole)?;
        let small = match capacity {
            Some(capacity) => Some(capacity.0),
            None if by_time => Some(
                Bytes(outcome.peak_live + outcome.peak_live / 50)
                    .round_up(GRANULE)
                    .0,
            ),
            None => None,
        };
        let bounded = small.map(|capacity| -> Result<Bounded> {
            let there = checked(source, kind, &bound(capacity))?;
            Ok(Bounded {
                capacity,
                refused: there.refused + there.unjustified,
                unjustified: there.unjustified,
            })
        });
        let bounded = bounded.transpose()?;
        rows.push(Row {
            kind,
            ns_per_op: ns_per_op(source, kind, &whole),
            outcome,
            bounded,
        });
    }
    Ok(Replayed {
        name,
        notes: source.notes(),
        recorded: match source {
            Source::Trace(trace) => trace.recorded,
            Source::Day(..) => None,
        },
        by_time,
        rows,
    })
}

/// One replay with every answer checked.
fn checked(source: Source<'_>, kind: Kind, options: &Options) -> Result<Outcome> {
    let name = source.name();
    say(&format!("{name}: {}", kind.name()));
    let events = source.events().enumerate().map(|(number, event)| {
        if number > 0 && number.is_multiple_of(CHUNK) {
            let far = match source {
                Source::Trace(trace) => 100 * number / trace.events.len().max(1),
                Source::Day(..) => (100 * event.at_ns / DAY_NS) as usize,
            };
            say(&format!("{name}: {}, {far} %", kind.name()));
        }
        event
    });
    replay(events, &mut *kind.make(options.capacity), options)
        .map_err(|broken| CliError::failed(format!("{name}: {}: {broken}", kind.name())))
}

/// The fastest of several replays without checks.
fn ns_per_op(source: Source<'_>, kind: Kind, options: &Options) -> f64 {
    say(&format!("{}: {}, by the clock", source.name(), kind.name()));
    let (mut fastest, mut rounds) = (f64::INFINITY, 0);
    let began = Instant::now();
    while rounds < ROUNDS || began.elapsed() < LONG_ENOUGH {
        let mut policy = kind.make(options.capacity);
        let mut fast = Fast::new(source.slots(), options);
        let (mut operations, mut took) = (0, Duration::ZERO);
        let mut go = |events: &[Event]| {
            let start = Instant::now();
            operations += fast.go(events, &mut *policy);
            took += start.elapsed();
        };
        match source {
            Source::Trace(trace) => go(&trace.events),
            // A day does not fit memory: making its events is not timed.
            Source::Day(..) => {
                let mut events = source.events();
                let mut chunk = Vec::with_capacity(CHUNK);
                loop {
                    chunk.clear();
                    chunk.extend(events.by_ref().take(CHUNK));
                    if chunk.is_empty() {
                        break;
                    }
                    go(&chunk);
                }
            }
        }
        fastest = fastest.min(took.as_nanos() as f64 / operations.max(1) as f64);
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
                trace: &replayed.name,
                policy: row.kind.name(),
                peak_live_bytes: row.outcome.peak_live,
                peak_physical_bytes: row.outcome.peak_physical,
                map_calls: row.outcome.map_calls,
                ns_per_op: (row.ns_per_op * 10.0).round() / 10.0,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use ebb_lab::pool::event::Op;

    use super::*;

    /// A trace with a hole that the next block does not fit into.
    fn trace() -> Trace {
        let ops = [
            Op::Allocate {
                slot: 0,
                size: 3 << 20,
                stream: 0,
            },
            Op::Allocate {
                slot: 1,
                size: 1000,
                stream: 0,
            },
            Op::Free { slot: 0, stream: 0 },
            Op::Allocate {
                slot: 0,
                size: 30 << 20,
                stream: 0,
            },
        ];
        let mut trace = Trace {
            name: "folder/hole.csv".into(),
            events: ops
                .into_iter()
                .zip(0..)
                .map(|(op, at_ns)| Event { at_ns, op })
                .collect(),
            slots: 2,
            streams: 1,
            preamble: 1,
            recorded: Some(Recorded {
                peak_reserved: 42 << 20,
            }),
            ..Trace::default()
        };
        trace.notes.at_start = 1;
        trace.notes.at_start_bytes = 3 << 20;
        trace.notes.unknown_frees = 2;
        trace
    }

    /// All baselines on it, with times that do not depend on the machine.
    pub(super) fn replayed() -> Replayed {
        let kinds = Kind::usual().filter(|kind| kind.name() != "ebb");
        let capacity = Some(Bytes::mib(33));
        let mut replayed = one(Source::Trace(&trace()), &kinds.collect::<Vec<_>>(), capacity).unwrap();
        for (row, ns) in replayed.rows.iter_mut().zip(10..) {
            row.ns_per_op = f64::from(ns);
        }
        replayed
    }

    #[test]
    fn the_table() {
        let mut out = Vec::new();
        table::write(&[replayed(), replayed()], &mut out).unwrap();
        insta::assert_snapshot!(anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string());
    }

    #[test]
    fn programs_get_what_is_promised() {
        let replayed = [replayed()];
        let lines = lines(&replayed);
        let json = serde_json::to_string(&lines[0]).unwrap();
        assert_eq!(
            json,
            "{\"trace\":\"folder/hole.csv\",\"policy\":\"best-fit\",\"peak_live_bytes\":31458280,\"peak_physical_bytes\":35651584,\
             \"map_calls\":2,\"ns_per_op\":10.0}"
        );
    }

    #[test]
    fn a_day_is_replayed_on_a_card_without_bound_and_on_a_small_one() {
        let replayed = one(Source::Day(&[trace()], 3), &[Kind::BestFit], None).unwrap();
        assert_eq!(replayed.name, "interleaved:3");
        let row = &replayed.rows[0];
        assert_eq!((row.outcome.refused, row.outcome.unjustified), (0, 0));
        let bounded = row.bounded.unwrap();
        assert!(bounded.capacity >= row.outcome.peak_live && bounded.capacity < row.outcome.peak_physical);
        assert!(bounded.refused > 0, "holes of 3 MiB serve no 30 MiB");
    }
}
