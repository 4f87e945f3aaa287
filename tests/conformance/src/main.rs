//! `ebb-conformance`: behaviours of the CUDA driver's memory interface, run plain and under an interposer, and compared.
//!
//! ```text
//! main ─► world (card, daemon) ─► runner ── one process a run ──► child ─► groups::* ─► driver
//!                                   │                              └──► observe: lines in a file
//!                                   └─► report: table, disagreements, JSON
//! ```
//! Each behaviour is a small program. What it saw without an interposer is the reference; what is known of the real driver
//! stands beside it. See `docs/conformance.md`.

mod batch;
mod behaviour;
mod child;
mod driver;
mod ending;
mod evict;
mod fds;
mod groups;
mod helpers;
mod known;
mod modes;
mod observe;
mod report;
mod runner;
mod world;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;

use crate::behaviour::{Behaviour, matches};
use crate::modes::{Mode, Tool};
use crate::report::Report;
use crate::runner::Settings;
use crate::world::World;

/// Behaviours of the CUDA driver's memory interface, run plain and under an interposer, and compared.
#[derive(Debug, Parser)]
#[command(name = "ebb-conformance", version)]
struct Args {
    /// Look at another preloaded library instead of ebb
    #[arg(long, value_name = "LIBRARY")]
    preload: Option<String>,
    /// Environment for --preload
    #[arg(long, value_name = "NAME=VALUE", requires = "preload")]
    env: Vec<String>,
    /// ebb's command line (default: beside this program, else in PATH)
    #[arg(long, value_name = "PATH", conflicts_with = "preload")]
    ebb: Option<PathBuf>,
    /// ebb's library (default: where the command line finds it)
    #[arg(long, value_name = "PATH", conflicts_with = "preload")]
    library: Option<PathBuf>,
    /// Only these ways to run; plain is always one of them
    #[arg(long, value_enum, value_delimiter = ',')]
    modes: Vec<Mode>,
    /// On a simulated GPU (its libraries lie beside this program)
    #[arg(long)]
    sim: bool,
    /// Only behaviours of this name: `alloc.*`, `*.zero_size*`; several by repeating it
    #[arg(long, value_name = "GLOB")]
    only: Vec<String>,
    /// List the behaviours
    #[arg(long)]
    list: bool,
    /// Print one JSON object with every observation
    #[arg(long)]
    json: bool,
    /// Print the table as Markdown
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
    /// Write there instead of to standard output
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Processes at a time (default: 4; on a real card half the processors, at most 12: contexts are made one after the other there)
    #[arg(long)]
    jobs: Option<usize>,
    /// Behaviours in one process, each with a new context; what does not pass so is run again by itself (default: 8 on a real
    /// card, where starting the driver is most of the time, else 1)
    #[arg(long, value_name = "NUMBER")]
    batch: Option<usize>,
    /// Seconds after which a run counts as hung
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    limit: u64,
    /// One line for each behaviour while they run
    #[arg(short, long)]
    verbose: bool,
    /// Run these behaviours here, and write what the first saw to --out, what the others saw beside it
    #[arg(long, hide = true, value_name = "NAME", value_delimiter = ',')]
    behave: Vec<String>,
    /// As its second process
    #[arg(long, hide = true, requires = "behave")]
    peer: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if !args.behave.is_empty() {
        let out = args.out.clone().unwrap_or_else(|| "/dev/stdout".into());
        let status = child::behave(&args.behave, args.peer, &out);
        return ExitCode::from(u8::try_from(status).unwrap_or(1));
    }
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    let chosen: Vec<&'static Behaviour> = groups::all()
        .filter(|behaviour| {
            args.only.is_empty() || args.only.iter().any(|only| matches(only, behaviour.name))
        })
        .collect();
    if chosen.is_empty() {
        bail!("no behaviour has such a name; --list shows all");
    }
    if args.list {
        for behaviour in &chosen {
            println!("{:<50} {}", behaviour.name, behaviour.what);
        }
        println!("{} behaviours", chosen.len());
        return Ok(true);
    }
    let program = std::env::current_exe().context("a process knows its program")?;
    let folder = program
        .parent()
        .context("a program lies in a folder")?
        .to_path_buf();
    let tool = tool(args, &folder)?;
    let world = World::new(tool.clone(), args.sim.then_some(folder.as_path()))?;
    let modes: Vec<Mode> = tool
        .modes()
        .iter()
        .copied()
        .filter(|mode| *mode == Mode::Plain || args.modes.is_empty() || args.modes.contains(mode))
        .collect();
    let settings = Settings {
        modes: modes.clone(),
        jobs: args.jobs.unwrap_or_else(|| jobs(args.sim)),
        batch: args.batch.unwrap_or(if args.sim { 1 } else { 8 }),
        limit: Duration::from_secs(args.limit),
        program,
    };
    let results = runner::run_all(&chosen, &world, &settings, |result| {
        if args.verbose {
            eprintln!("{}", report::line(result));
        }
    });
    let report = Report {
        results: &results,
        modes: &modes,
        tool: &tool,
        simulated: world.simulated(),
        complete: args.only.is_empty(),
    };
    let mut text = String::new();
    if args.json {
        text = format!("{}\n", report.json());
    } else {
        text += &report.table(args.markdown);
        text += "passed/failed/skipped, (+n) known to fail; plain is the reference\n";
        if modes.contains(&Mode::Evicting) && matches!(tool, Tool::Ebb { .. }) {
            let (releases, pauses, refused, behaviours) = report.evictions();
            text += &format!(
                "evictions: {releases} took memory off the card, in {behaviours} behaviours; {pauses} pauses, {refused} refused\n"
            );
        }
        if report.together() > 0 {
            text += &format!(
                "together: {} behaviours passed in a process with others\n",
                report.together()
            );
        }
        text += &report.skips();
        text += &report.disagreements();
    }
    match &args.out {
        Some(path) => std::fs::write(path, text).with_context(|| path.display().to_string())?,
        None => std::io::stdout().write_all(text.as_bytes())?,
    }
    let faults = report.faults();
    for fault in &faults {
        eprintln!("fault: {fault}");
    }
    if !faults.is_empty() && args.verbose {
        eprintln!("--- the daemon's warnings ---");
        let log = world.daemon_log();
        log.lines()
            .filter(|line| !line.contains("info:"))
            .for_each(|line| eprintln!("{line}"));
    }
    Ok(faults.is_empty())
}

fn jobs(simulated: bool) -> usize {
    let processors = std::thread::available_parallelism().map_or(4, usize::from);
    if simulated {
        4
    } else {
        (processors / 2).clamp(4, 12)
    }
}

fn tool(args: &Args, folder: &std::path::Path) -> Result<Tool> {
    if let Some(preload) = &args.preload {
        let env = args
            .env
            .iter()
            .map(|pair| {
                let (name, value) = pair.split_once('=').context("--env wants NAME=VALUE")?;
                Ok((name.to_owned(), value.to_owned()))
            })
            .collect::<Result<_>>()?;
        return Ok(Tool::Other {
            preload: preload.clone(),
            env,
        });
    }
    let beside = Some(folder.join("ebb")).filter(|path| path.is_file());
    let in_path = || {
        std::env::split_paths(&std::env::var_os("PATH")?)
            .map(|folder| folder.join("ebb"))
            .find(|path| path.is_file())
    };
    let Some(ebb) = args.ebb.clone().or(beside).or_else(in_path) else {
        if args.modes.iter().any(|mode| *mode != Mode::Plain) {
            bail!("ebb is not found; name it with --ebb");
        }
        return Ok(Tool::Nothing);
    };
    let beside = Some(folder.join("libebb.so")).filter(|path| path.is_file());
    let library = args.library.clone().or(beside);
    // A library that does not know the switch would pass for strict without being it.
    let strict = library.as_ref().is_some_and(|library| {
        let word = modes::ENV_STRICT.as_bytes();
        std::fs::read(library).is_ok_and(|bytes| bytes.windows(word.len()).any(|at| at == word))
    });
    Ok(Tool::Ebb { ebb, library, strict })
}
