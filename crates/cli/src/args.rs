//! The commands and their flags.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use ebb_units::{Bytes, Priority};

const EXAMPLES: &str = "\
Examples:
  ebb demo                                          see it work, with or without a GPU
  ebb run --request 20Gi --limit 60Gi -- python train.py
  ebb ps                                            who holds what
  ebb doctor                                        is everything in place here?";

/// GPU memory that flows to whoever needs it now.
#[derive(Debug, Parser)]
#[command(name = "ebb", version, after_help = EXAMPLES, propagate_version = false)]
#[command(
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Folder of the daemon's sockets [default: the system's daemon if it runs, else your own]
    #[arg(
        long,
        global = true,
        env = "EBB_SOCKET_DIR",
        hide_env_values = true,
        value_name = "DIR"
    )]
    #[arg(value_hint = ValueHint::DirPath, help_heading = "General options")]
    pub socket_dir: Option<PathBuf>,
    /// When to colour the output
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "WHEN",
        help_heading = "General options"
    )]
    pub color: ColorChoice,
}

/// When to colour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a GPU program, unchanged, so that its memory can flow
    Run(RunArgs),
    /// List the tasks and the cards
    Ps(PsArgs),
    /// Watch the cards and the tasks
    Top(TopArgs),
    /// List the operator's rules, where they stand, and what they did
    Rules(RulesArgs),
    /// Take a task's memory off the card and keep it off
    Pause(PauseArgs),
    /// Take all of tasks off the card, their contexts included, until they use the GPU again
    Hibernate(HibernateArgs),
    /// Give back what tasks keep for later and do not use; nothing is evicted
    Trim(TrimArgs),
    /// Let a paused task run again, bring a hibernated one back
    Resume(TasksArgs),
    /// Change a task's limit, request or priority
    Limit(LimitArgs),
    /// Check this machine, or say what of a process can be released and why not the rest
    Doctor(DoctorArgs),
    /// Two jobs that do not fit together finish together
    Demo(DemoArgs),
    /// Measure how fast memory moves and what ebb costs, beside the machine's own limits
    Bench(BenchArgs),
    /// Replay recorded traces, or a daemon's log, through the arbiter in simulated time
    Simulate(SimulateArgs),
    /// Run the daemon
    Daemon(DaemonArgs),
    /// Put ebb into a folder such as /usr/local
    Install(InstallArgs),
    /// Print the completions of a shell
    Completions(CompletionsArgs),
    /// Print the manual page, or write all of them
    Man(ManArgs),
    /// Print the versions of ebb and of the daemon
    Version(ListArgs),
    /// Does what a daemon says by the driver's checkpoint
    #[command(
        hide = true,
        name = "checkpoint-helper",
        after_help = "Examples: the daemon starts it."
    )]
    CheckpointHelper(CheckpointHelperArgs),
    /// Becomes a program that ends with the one who started it
    #[command(
        hide = true,
        name = "supervised",
        after_help = "Examples: `ebb run --restart` starts it."
    )]
    Supervised(SupervisedArgs),
}

/// `ebb run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb run -- python train.py
  ebb run --request 20Gi --limit 60Gi --priority high -- python train.py --epochs 3
  ebb run --idle-release 30s -- jupyter lab        memory leaves the card while nobody computes
  ebb run --gpu sim -- ./my-cuda-program           on the simulated GPU
  ebb run --checkpoint signal --restart always -- python train.py
                                                   gives way when it must, and goes on from its own checkpoint

Exit status: the program's own; 2 if something has to be changed first, 126 if the program cannot be run, 127 if it
is not there.")]
pub(crate) struct RunArgs {
    /// Bytes that are this program's for the asking, on each card that it uses
    #[arg(long, value_name = "SIZE", default_value = "0", allow_hyphen_values = true)]
    pub request: Bytes,
    /// The most that it may hold on a card, exact to 2 MiB [default: the card]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub limit: Option<Bytes>,
    /// Who goes first when not all fit: high, normal or low
    #[arg(long, value_name = "PRIORITY", default_value = "normal")]
    pub priority: Priority,
    /// Name to show [default: the program's]
    #[arg(long, value_name = "NAME", value_parser = parse_name)]
    pub name: Option<String>,
    /// Idle time after which memory leaves the card unasked, like 30s or 5m, or `off` [default: the daemon's]
    #[arg(long, value_name = "TIME", value_parser = parse_idle)]
    pub idle_release: Option<IdleRelease>,
    /// Time after such a release when the driver's part (contexts, modules) leaves the card, too, like 10m, or `off` [default: the
    /// daemon's]
    #[arg(long, value_name = "TIME", value_parser = parse_idle)]
    pub hibernate_after: Option<IdleRelease>,
    /// Which GPU: what the program finds by itself, the simulated one, or a real one for certain
    #[arg(long, value_enum, default_value_t, value_name = "GPU")]
    pub gpu: Gpu,
    /// Take only what nobody holds: an allocation without room fails at once, nobody is evicted for it
    #[arg(long)]
    pub strict: bool,
    /// How the program saves itself when it is to give way: a shell command (with EBB_PID, EBB_TASK), `signal` (SIGUSR1), or `hibernate`
    #[arg(long, value_name = "WAY", value_parser = parse_checkpoint)]
    pub checkpoint: Option<CheckpointWay>,
    /// When the program is started again, once there is room: it ran out of memory, it gave way, or whenever it fails
    #[arg(long, value_enum, value_name = "WHEN")]
    pub restart: Option<Restart>,
    /// Run the program even if no GPU driver is found
    #[arg(long)]
    pub allow_no_gpu: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub program: Vec<OsString>,
}

/// How a program saves itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CheckpointWay {
    /// A command for `sh -c`.
    Command(String),
    /// SIGUSR1; the program saves itself and ends.
    Signal,
    /// Nothing of its own is needed.
    Hibernate,
}

fn parse_checkpoint(text: &str) -> Result<CheckpointWay, String> {
    match text.trim() {
        "" => Err("write a shell command, `signal` or `hibernate`".into()),
        "signal" => Ok(CheckpointWay::Signal),
        "hibernate" => Ok(CheckpointWay::Hibernate),
        command => Ok(CheckpointWay::Command(command.into())),
    }
}

/// When a program is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Restart {
    /// After it ended for want of memory
    OnOom,
    /// After it gave way to others
    OnPreempt,
    /// After both, and whenever it fails
    Always,
}

/// What a helper is started by.
#[derive(Debug, Args)]
pub(crate) struct CheckpointHelperArgs {
    /// The process that it ends with
    pub parent: Option<u32>,
}

/// What a supervised program is started by.
#[derive(Debug, Args)]
pub(crate) struct SupervisedArgs {
    /// The process with which it ends
    #[arg(long)]
    pub parent: u32,
    /// What it is called as
    #[arg(long)]
    pub name: OsString,
    /// The program's file and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

/// Which GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Gpu {
    /// What is there
    #[default]
    Auto,
    /// The simulated GPU
    Sim,
    /// A real GPU
    Real,
}

/// Commands that list.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  ebb version
  ebb version --json | jq .daemon")]
pub(crate) struct ListArgs {
    /// Exact figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb ps`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb ps
  ebb ps --why
  ebb ps --why t3
  ebb ps --json | jq '.tasks[] | {name, resident: [.processes[].resident] | add}'")]
pub(crate) struct PsArgs {
    /// What was decided about each task and why, and what it waits for: of one task, or of all
    #[arg(long, value_name = "TASK", num_args = 0..=1, default_missing_value = "")]
    pub why: Option<String>,
    /// Exact figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb rules`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb rules
  ebb rules --json | jq '.fired[-1]'

Rules stand in ebb.toml: `ebb daemon --example` shows how they are written, `ebb daemon --check --config FILE` looks at them,
`ebb daemon --reload` has them hold.")]
pub(crate) struct RulesArgs {
    /// Exact figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb top`.
#[derive(Debug, Args)]
#[command(after_help = "\
Keys: up/down choose, p pause, r resume, q quit.

Examples:
  ebb top
  ebb top --interval 250ms
  ebb top --json | head -n 1                       one JSON object a line, for programs")]
pub(crate) struct TopArgs {
    /// Time between two pictures
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    pub interval: Duration,
    /// A line of JSON whenever something changes, instead of a picture
    #[arg(long)]
    pub json: bool,
}

/// `ebb pause`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb pause t3
  ebb pause train --wait 30s                       by name; gives a long kernel time to end")]
pub(crate) struct PauseArgs {
    /// The task: t3, its name, or the id of one of its processes
    pub task: String,
    /// How long to wait for work that runs on the GPU [default: the daemon's]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub wait: Option<Duration>,
    /// The answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb hibernate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb hibernate t3                                 nothing of it is on the card; its next GPU call brings it back
  ebb pause t3 && ebb hibernate t3                 the same, and it stays away until `ebb resume t3`
  ebb hibernate train eval --wait 1m

The driver (570 or newer) does not checkpoint programs that share memory with others or have managed memory: `ebb doctor PID` says what
is in the way.")]
pub(crate) struct HibernateArgs {
    /// The tasks: t3, a name, or the id of one of a task's processes
    #[arg(required = true, value_name = "TASK")]
    pub tasks: Vec<String>,
    /// How long to wait for work that runs on the GPU [default: the daemon's]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub wait: Option<Duration>,
    /// The answers as JSON, one a line
    #[arg(long)]
    pub json: bool,
}

/// `ebb trim`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb trim t3                                      its caches, and what its pools do not need
  ebb trim --all                                   those of all your tasks")]
pub(crate) struct TrimArgs {
    /// The tasks: t3, a name, or the id of one of a task's processes
    #[arg(value_name = "TASK", required_unless_present = "all", conflicts_with = "all")]
    pub tasks: Vec<String>,
    /// All of your tasks, or all there are if you are root
    #[arg(long)]
    pub all: bool,
    /// The answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// Commands on tasks.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb resume t3
  ebb resume train eval")]
pub(crate) struct TasksArgs {
    /// The tasks: t3, a name, or the id of one of a task's processes
    #[arg(required = true, value_name = "TASK")]
    pub tasks: Vec<String>,
    /// The answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb limit`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb limit t3 40Gi
  ebb limit train --request 10Gi --priority low")]
pub(crate) struct LimitArgs {
    /// The task: t3, its name, or the id of one of its processes
    pub task: String,
    /// The new limit on each card
    #[arg(value_name = "SIZE", allow_hyphen_values = true, required_unless_present_any = ["request", "priority"])]
    pub limit: Option<Bytes>,
    /// The new request on each card
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub request: Option<Bytes>,
    /// The new priority: high, normal or low
    #[arg(long, value_name = "PRIORITY")]
    pub priority: Option<Priority>,
    /// The answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb doctor                                       driver, library, daemon, arena
  ebb doctor 4711                                  one process, byte by byte
  ebb doctor 4711 --classes                        and what ebb does at each driver call")]
pub(crate) struct DoctorArgs {
    /// A process that uses the GPU: its number, or its task's name
    #[arg(value_name = "PID|TASK")]
    pub process: Option<String>,
    /// Also list the driver's calls and what ebb does at each
    #[arg(long, requires = "process")]
    pub classes: bool,
    /// Exact figures as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb demo                                         a real GPU if there is one, else the simulated GPU
  ebb demo --gpu real --bytes-per-job 100Gi
  ebb demo --json | tail -n 1                      the result as one JSON object")]
pub(crate) struct DemoArgs {
    /// Which GPU
    #[arg(long, value_enum, default_value_t, value_name = "GPU")]
    pub gpu: Gpu,
    /// What each of the two jobs holds [default: 75 % of the card]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub bytes_per_job: Option<Bytes>,
    /// How often each job checks and rewrites its memory [default: as many as make several turns]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub steps: Option<u32>,
    /// End with one line of JSON
    #[arg(long)]
    pub json: bool,
    /// The process that cleans up after the demo
    #[arg(long, hide = true, value_name = "DIR")]
    pub guard: Option<PathBuf>,
}

/// What `ebb bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bench {
    /// Taking all of a program's memory
    Release,
    /// Bringing it back when the program goes on
    Restore,
    /// Taking memory that has not changed since it came back
    Clean,
    /// From one program to another on a card that has room for one, both ways of the link at once
    Handover,
    /// Host memory of several programs with the same bytes, and bringing them back
    Replicas,
    /// To another card over NVLink and back
    Peer,
    /// An empty kernel launch
    Launch,
    /// Allocating and freeing 64 MiB
    Alloc,
    /// From the start of a program to its first kernel
    Start,
    /// All of a program off the card, contexts included, and back to its next kernel
    Hibernate,
}

/// What `ebb bench` measures without a GPU.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Replay allocators on recorded traces: how much memory each needs for what was asked
    Pool(crate::bench::pool::PoolArgs),
    /// Write arena segments to a disk and read them back, beside what that disk does by itself
    Disk(crate::bench::disk::DiskArgs),
}

/// `ebb bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb bench                                        all of them
  ebb bench release restore --bytes 64Gi
  ebb bench clean handover --bytes 48Gi
  ebb bench --curve --bytes 120Gi
  ebb bench --gpu sim launch alloc --json
  ebb bench start --at-once 100                    a hundred programs at the same moment
  ebb bench release restore hibernate --compare --picture bench.svg
  ebb bench hibernate                              to nothing on the card, beside the driver's checkpoint alone
  ebb bench pool --trace snapshot.pickle           allocators on a recorded trace
  ebb bench disk /var/cache                        the disk tier, on the disk of that folder

Each figure stands beside what limits it on this machine, measured in the same run: the copy to and from pinned memory,
or the same call without ebb. The ratio is that of the two.")]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// What to measure [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    pub what: Vec<Bench>,
    /// Which GPU
    #[arg(long, value_enum, default_value_t, value_name = "GPU")]
    pub gpu: Gpu,
    /// What is released and restored [default: 16Gi, 128Mi on the simulated GPU]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub bytes: Option<Bytes>,
    /// Release and restore for sizes from 1 GiB (16 MiB simulated) up to --bytes, doubling, and for 1, 2, 4, ... programs at once
    #[arg(long, conflicts_with = "what")]
    pub curve: bool,
    /// `--curve`: begin nothing more after so many seconds, and say what was left out
    #[arg(long, value_name = "SECONDS", requires = "curve")]
    pub within: Option<u64>,
    /// How often each is measured
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Pin a ring of host memory and no more, as with `arena.pinned = "ring"`
    #[arg(long)]
    pub ring: bool,
    /// Measure the driver's own checkpoint, cuda-checkpoint, torch_memory_saver and vLLM's sleep as well, as far as they are installed
    #[arg(long)]
    pub compare: bool,
    /// Draw the results, each beside its limit: a .svg or .html file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub picture: Option<std::path::PathBuf>,
    /// `start`: so many programs at the same moment instead of one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub at_once: Option<u32>,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

/// A built-in scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scenario {
    /// A serving cluster: how many cards it needs when memory leaves idle containers
    Gentd26,
    /// Trainings and services together, on as many cards as they need with ebb, against static allocation
    Mixed,
    /// How long to keep models that are not in use: cold requests against idle hours
    Lora,
    /// Dominant resource fairness: the paper's example, and its four properties on random instances
    Drf,
    /// Finish-time fairness: 120 jobs on 32 cards, beside what seven published schedulers made of them
    Shockwave,
}

/// A built-in scenario, or a file.
#[derive(Clone, Debug)]
pub(crate) enum WhichScenario {
    /// Built in.
    Named(Scenario),
    /// A scenario file.
    File(PathBuf),
}

fn parse_scenario(text: &str) -> Result<WhichScenario, String> {
    if let Ok(named) = Scenario::from_str(text, false) {
        return Ok(WhichScenario::Named(named));
    }
    if text.contains(['.', '/']) {
        return Ok(WhichScenario::File(text.into()));
    }
    let names: Vec<String> = Scenario::value_variants()
        .iter()
        .filter_map(|v| Some(v.to_possible_value()?.get_name().to_owned()))
        .collect();
    Err(format!(
        "no such scenario; there are {}, and files (`./x.toml`)",
        names.join(", ")
    ))
}

impl SimulateArgs {
    /// The seed of built-in scenarios.
    pub(crate) fn seed(&self) -> u64 {
        self.seed.unwrap_or(1)
    }

    /// The seed, if one was named.
    pub(crate) fn seed_given(&self) -> Option<u64> {
        self.seed
    }
}

/// `ebb simulate`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  ebb simulate --scenario mixed --seeds 20         jobs on a busy cluster, beside five other ways of sharing cards
  ebb simulate --scenario my.toml --png my.png     a scenario of your own (docs/scenarios.md)
  ebb simulate --trace /data/my-trace              whatever recording that is
  ebb simulate --scenario gentd26 --data traces    cards at the peak, card-hours and waits, against static allocation
  ebb simulate --scenario lora --html lora.html    the whole curve as a picture
  ebb simulate --log ~/.local/state/ebb/events.jsonl   does the arbiter do again what it did?")]
pub(crate) struct SimulateArgs {
    /// What to simulate: gentd26, lora, mixed, drf, shockwave, or a scenario file
    #[arg(long, value_name = "NAME|FILE", value_parser = parse_scenario, value_hint = ValueHint::FilePath)]
    #[arg(required_unless_present_any = ["log", "trace", "profiles"])]
    pub scenario: Option<WhichScenario>,
    /// A folder with a recorded trace, or a daemon's event log: what it is, is told by what is in it
    #[arg(long, value_name = "DIR|FILE", value_hint = ValueHint::AnyPath, conflicts_with = "scenario")]
    pub trace: Option<PathBuf>,
    /// Jobs as each was recorded alone (scripts/gpu/mix.py): what they take together on one card
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["scenario", "trace", "log"])]
    pub profiles: Option<PathBuf>,
    /// What they took, to compare with
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "profiles")]
    pub measured: Option<PathBuf>,
    /// A daemon's event log, replayed to the same actions
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["scenario", "trace"])]
    pub log: Option<PathBuf>,
    /// The folder of the recorded traces
    #[arg(
        long,
        env = "EBB_DATA",
        value_name = "DIR",
        default_value = "../shared/data",
        hide_env_values = true
    )]
    #[arg(value_hint = ValueHint::DirPath)]
    pub data: PathBuf,
    /// The size of a card [default: the smallest sold that holds the largest container]
    #[arg(long, value_name = "SIZE")]
    pub card: Option<Bytes>,
    /// Cards [default: as many as the jobs' use would fill while they arrive]
    #[arg(long, value_name = "N")]
    pub cards: Option<usize>,
    /// Seed of all that is random [default: 1, or what a scenario file says]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// So many seeds, from --seed on: the ratios of each, and the worst
    #[arg(long, value_name = "N", conflicts_with = "html")]
    pub seeds: Option<u64>,
    /// Write a page with pictures
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Write the pictures as one image
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "seeds")]
    pub png: Option<PathBuf>,
    /// JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb daemon`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb daemon --config /etc/ebb/ebb.toml            in the foreground, as systemd runs it
  ebb daemon --background                          your own, as `ebb run` starts it
  ebb daemon --check --config ebb.toml             is the file right?
  ebb daemon --stop                                programs go on with what they have")]
pub(crate) struct DaemonArgs {
    /// Settings; `--example` prints a file with all of them
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Start it in the background and return when it answers
    #[arg(long, conflicts_with_all = ["check", "example", "reload", "stop"])]
    pub background: bool,
    /// Read the settings, say what is wrong with them, and stop
    #[arg(long, conflicts_with_all = ["example", "reload", "stop"])]
    pub check: bool,
    /// Print a file with all settings and their meaning
    #[arg(long, conflicts_with_all = ["reload", "stop"])]
    pub example: bool,
    /// Have the running daemon read its settings again; if they are wrong, the old ones hold
    #[arg(long, conflicts_with = "stop")]
    pub reload: bool,
    /// Stop the running daemon
    #[arg(long)]
    pub stop: bool,
    /// The second half of --background: leave the terminal's session
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// `ebb install`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb install --prefix /usr/local
  ebb install --prefix ~/.local

Files are replaced by renaming: programs that run with the old library keep it.")]
pub(crate) struct InstallArgs {
    /// Where bin/ and lib/ are
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub prefix: PathBuf,
    /// What was written, as JSON
    #[arg(long)]
    pub json: bool,
}

/// `ebb completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb completions bash > ~/.local/share/bash-completion/completions/ebb
  ebb completions zsh > \"${fpath[1]}/_ebb\"
  ebb completions fish > ~/.config/fish/completions/ebb.fish")]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// `ebb man`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ebb man | man -l -
  ebb man --dir /usr/local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write a page for ebb and each command into this folder
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

/// When to release an idle program's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdleRelease {
    /// Never unasked.
    Off,
    /// After this time.
    After(Duration),
}

impl IdleRelease {
    /// As the protocol has it: milliseconds, 0 for never.
    pub(crate) fn to_wire_ms(self) -> u64 {
        match self {
            Self::Off => 0,
            Self::After(time) => u64::try_from(time.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

fn parse_idle(text: &str) -> Result<IdleRelease, String> {
    if text == "off" {
        return Ok(IdleRelease::Off);
    }
    match parse_duration(text)? {
        Duration::ZERO => {
            Err("an idle time of nothing would never let memory stay; write `off` for never".into())
        }
        time => Ok(IdleRelease::After(time)),
    }
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if (Duration::from_millis(50)..=Duration::from_secs(3600)).contains(&time) {
        Ok(time)
    } else {
        Err("the time between two pictures is 50ms to 1h".into())
    }
}

/// A time as people write it: `500ms`, `30s`, `1.5m`, `2h`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is not a time; write one like 500ms, 30s, 5m or 1h");
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(bad)?;
    let (digits, unit) = text.split_at(end);
    let seconds_a_unit = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad()),
    };
    let amount: f64 = digits.parse().map_err(|_| bad())?;
    // A century is further than any of these times means anything.
    match Duration::try_from_secs_f64(amount * seconds_a_unit) {
        Ok(time) if time <= Duration::from_secs(100 * 366 * 86_400) => Ok(Duration::from_millis(
            u64::try_from(time.as_millis()).map_err(|_| bad())?,
        )),
        _ => Err(bad()),
    }
}

fn parse_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > 64 || text.chars().any(char::is_control) {
        return Err("a name has 1 to 64 bytes and no control characters".into());
    }
    Ok(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound_and_every_command_has_examples() {
        let command = Cli::command();
        command.clone().debug_assert();
        for sub in command.get_subcommands() {
            let help = sub.clone().render_help().to_string();
            assert!(
                help.contains("Examples:"),
                "`ebb {} --help` shows no example",
                sub.get_name()
            );
        }
    }

    #[test]
    fn times_read_as_people_write_them() {
        assert_eq!(parse_duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("2h"), Ok(Duration::from_secs(7200)));
        for bad in ["", "5", "s", "-1s", "1 s", "1d", "1..5s", "9999999999999999h"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_idle("off"), Ok(IdleRelease::Off));
        assert_eq!(parse_idle("30s").map(IdleRelease::to_wire_ms), Ok(30_000));
        assert!(parse_idle("0s").is_err());
    }

    #[test]
    fn the_programs_own_flags_stay_its_own() {
        let cli =
            Cli::try_parse_from(["ebb", "run", "--limit", "2Gi", "--", "prog", "--limit", "x"]).unwrap();
        let Command::Run(run) = cli.command else {
            panic!("not run")
        };
        assert_eq!(run.limit, Some(Bytes::gib(2)));
        assert_eq!(run.program, ["prog", "--limit", "x"]);
        let cli = Cli::try_parse_from(["ebb", "run", "prog", "--socket-dir", "/x"]).unwrap();
        assert_eq!(
            cli.global.socket_dir, None,
            "what follows the program is the program's"
        );
    }

    #[test]
    fn bad_values_are_refused() {
        for args in [
            ["run", "--request", "20Gb", "x"],
            ["run", "--limit", "-1", "x"],
            ["run", "--priority", "urgent", "x"],
            ["run", "--idle-release", "0s", "x"],
            ["run", "--name", "", "x"],
            ["demo", "--steps", "0", "--json"],
        ] {
            let error = Cli::try_parse_from(["ebb"].into_iter().chain(args)).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{args:?}");
        }
    }
}
