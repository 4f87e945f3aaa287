//! Scenario files: a cluster, jobs, policies to compare, in TOML. `docs/scenarios.md` describes the form.
//!
//! What is wrong is told with file, line and column.

mod draw;
#[cfg(test)]
mod tests;
mod value;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_units::Bytes;
use serde::Deserialize;
use toml::Spanned;

use crate::cluster::{Job, Policy, Setting};
use crate::sim::Speeds;

use value::{Class, Count, OrOff, Part, Seconds, Size};

/// A scenario as a file says it, all that is random drawn.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it shows.
    pub title: String,
    /// The cluster.
    pub setting: Setting,
    /// The jobs.
    pub jobs: Vec<Job>,
    /// What is compared, the first one being what the others are compared with.
    pub policies: Vec<Policy>,
}

/// A scenario file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Something in it is wrong.
    #[error("{path}, line {line}, column {column}: {what}", path = path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
        /// What is wrong.
        what: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    title: Option<String>,
    #[serde(default)]
    seed: u64,
    policies: Option<Vec<Spanned<String>>>,
    cluster: RawCluster,
    #[serde(default)]
    costs: RawCosts,
    #[serde(default)]
    arbiter: RawArbiter,
    #[serde(default, rename = "job")]
    jobs: Vec<Spanned<RawJob>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCluster {
    #[serde(default = "one")]
    cards: Count,
    memory: Size,
    per_node: Option<Count>,
    moves: Option<bool>,
    fill: Option<Part>,
    idle_release: Option<OrOff>,
}

fn one() -> Count {
    Count(1)
}

fn yes() -> bool {
    true
}

/// Bytes a second, and what each switch costs besides.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCosts {
    one_way: Option<Size>,
    both_ways: Option<Size>,
    net: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawArbiter {
    idle_after: Option<Seconds>,
    min_turn: Option<Seconds>,
    turn_per_copy: Option<Count>,
    preempt: Option<bool>,
    preempt_grace: Option<Seconds>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawJob {
    name: String,
    #[serde(default = "one")]
    count: Count,
    arrives: Option<Seconds>,
    every: Option<Seconds>,
    #[serde(default)]
    priority: Class,
    request: Option<Size>,
    limit: Option<Size>,
    #[serde(default = "yes")]
    lends: bool,
    #[serde(default)]
    by_clock: bool,
    #[serde(default = "one")]
    repeat: Count,
    #[serde(default)]
    jitter: Part,
    #[serde(default, rename = "phase")]
    phases: Vec<RawPhase>,
    trace: Option<Spanned<PathBuf>>,
    window: Option<Seconds>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPhase {
    #[serde(rename = "for")]
    seconds: Seconds,
    memory: Size,
    #[serde(default)]
    gpu: Part,
}

/// Where something is wrong, as bytes from the beginning.
struct Wrong {
    at: usize,
    what: String,
}

/// Reads a scenario file. `seed`: instead of the one that the file names.
///
/// # Errors
/// [`FileError`] if it cannot be read, or says what cannot be.
pub fn read(path: &Path, seed: Option<u64>) -> Result<Scenario, FileError> {
    let text = std::fs::read_to_string(path).map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    parse(&text, path, seed)
}

/// As [`read`], of a text. Traces are looked for from the folder of `path` on.
///
/// # Errors
/// [`FileError`] if it says what cannot be.
pub fn parse(text: &str, path: &Path, seed: Option<u64>) -> Result<Scenario, FileError> {
    let wrong = |wrong: Wrong| {
        let before = text.get(..wrong.at.min(text.len())).unwrap_or(text);
        let line_starts = before.rfind('\n').map_or(0, |n| n + 1);
        FileError::Wrong {
            path: path.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_starts..].chars().count() + 1,
            what: wrong.what,
        }
    };
    let raw: Raw = toml::from_str(text).map_err(|e| {
        wrong(Wrong {
            at: e.span().map_or(0, |s| s.start),
            what: e.message().trim_end().replace('\n', "; "),
        })
    })?;
    build(raw, path, seed).map_err(wrong)
}

fn build(raw: Raw, path: &Path, seed: Option<u64>) -> Result<Scenario, Wrong> {
    let card = raw.cluster.memory.0;
    let usual = Setting::default();
    let rate = |given: Option<Size>, usual: f64| given.map_or(usual, |s| (s.0.0 as f64).max(1.0));
    let one_way = rate(raw.costs.one_way, usual.speeds.one_way);
    let speeds = Speeds {
        one_way,
        both_ways: rate(
            raw.costs.both_ways,
            usual.speeds.both_ways * one_way / usual.speeds.one_way,
        ),
        net: rate(raw.costs.net, usual.speeds.net),
    };
    let mut policy = usual.policy.clone();
    policy.out_rate = one_way as u64;
    policy.in_rate = one_way as u64;
    let time =
        |given: Option<Seconds>, usual: Duration| given.map_or(usual, |s| Duration::from_secs_f64(s.0));
    let a = &raw.arbiter;
    policy.idle_after = time(a.idle_after, policy.idle_after).max(Duration::from_millis(1));
    policy.min_turn = time(a.min_turn, policy.min_turn);
    policy.preempt_grace = time(a.preempt_grace, policy.preempt_grace);
    policy.preempt = a.preempt.unwrap_or(policy.preempt);
    if let Some(n) = a.turn_per_copy {
        policy.turn_per_copy = u32::try_from(n.0).unwrap_or(u32::MAX);
    }
    let setting = Setting {
        cards: raw.cluster.cards.0,
        card,
        per_node: raw.cluster.per_node.map_or(usual.per_node, |n| n.0),
        speeds,
        idle_release: raw.cluster.idle_release.map_or(usual.idle_release, |r| r.0),
        policy,
        moves: raw.cluster.moves.unwrap_or(usual.moves),
        fill: raw.cluster.fill.map(|f| f.0),
        timeline: false,
    };
    if raw.jobs.is_empty() {
        return Err(Wrong {
            at: 0,
            what: "no [[job]]".into(),
        });
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let jobs = draw::jobs(&raw.jobs, folder, card, seed.unwrap_or(raw.seed))?;
    let given = raw.policies.unwrap_or_default();
    let policies = given.iter().map(|p| {
        value::policy(p.get_ref()).map_err(|what| Wrong {
            at: p.span().start,
            what,
        })
    });
    let policies: Vec<Policy> = policies.collect::<Result<_, _>>()?;
    Ok(Scenario {
        title: raw.title.unwrap_or_else(|| {
            let name = path.file_stem().and_then(|n| n.to_str());
            name.unwrap_or("a scenario").to_owned()
        }),
        setting,
        jobs,
        policies: if policies.is_empty() {
            Policy::ALL.to_vec()
        } else {
            policies
        },
    })
}

fn shown(bytes: Bytes) -> String {
    bytes.to_string()
}
