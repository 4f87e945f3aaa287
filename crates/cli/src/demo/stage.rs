//! [`Stage`]: the card of the demo, a daemon of its own, and the environment for the jobs.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_node::HostMemory;
use ebb_protocol::control::{DeviceRow, Payload, Request, Snapshot};
use ebb_units::{Bytes, DeviceUuid, GRANULE};
use serde::Deserialize;

use super::guard::Guard;
use super::worker_path;
use crate::args::{DemoArgs, Gpu};
use crate::background::own_command;
use crate::client::{Client, unexpected};
use crate::commands::run::in_front;
use crate::driver;
use crate::error::{CliError, Result};

/// The simulated card: small enough for any machine, large enough that moving it takes a time that can be seen.
const SIM_CARD: Bytes = Bytes::mib(512);
/// A simulated context.
const SIM_CONTEXT: Bytes = Bytes::mib(8);
/// The simulated link, in bytes a second: slow enough for the host's memory to keep up with on a small machine.
const SIM_LINK: u64 = 2_000_000_000;
/// A daemon that does not answer by then never will.
const PATIENCE: Duration = Duration::from_secs(30);

/// The card, as a program without ebb sees it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Card {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: DeviceUuid,
    /// What it has.
    pub total: Bytes,
    /// What a program with a context could allocate before the demo began.
    pub(crate) free: Bytes,
}

/// What a stage is like, beside its sizes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Setup {
    /// A ring of host memory is pinned, and nothing else.
    pub ring: bool,
    /// Programs see every card; there are two simulated ones, linked as by NVLink.
    pub linked: bool,
}

/// What the demo runs on. Dropped: everything of it ends and its folder goes.
#[derive(Debug)]
pub(crate) struct Stage {
    folder: PathBuf,
    sim: Option<PathBuf>,
    worker: PathBuf,
    daemon: Child,
    client: Client,
    /// The card before anything ran.
    pub card: Card,
    /// What each job will hold.
    pub bytes_per_job: Bytes,
    linked: bool,
    // Last: it cleans up when all else is dropped.
    pub guard: Guard,
}

impl Stage {
    /// Sets it up for the demo, or says what is missing.
    pub(super) fn set_up(args: &DemoArgs) -> Result<Self> {
        Self::set_up_for(args.gpu, Setup::default(), |card, sim| {
            let job = per_job(args, card.total)?;
            Ok((job, check_room(card, job, sim, &HostMemory::read())?))
        })
    }

    /// Sets it up. `sizes` says, by the card and whether it is simulated, what a job holds and what the host arena may.
    pub(crate) fn set_up_for(
        gpu: Gpu,
        setup: Setup,
        sizes: impl FnOnce(&Card, bool) -> Result<(Bytes, Bytes)>,
    ) -> Result<Self> {
        let worker = worker_path()?;
        let sim = match choose(gpu)? {
            Gpu::Sim => Some(driver::simulated_folder()?),
            _ => None,
        };
        let folder = make_folder()?;
        let mut guard = Guard::start(&folder)?;
        let cards = if setup.linked { 2 } else { 1 };
        let card = probe(&worker, &folder, sim.as_deref(), cards)?;
        let (bytes_per_job, budget) = sizes(&card, sim.is_some())?;
        std::fs::write(
            folder.join("ebb.toml"),
            config(&folder, sim.is_some(), budget, setup.ring),
        )
        .map_err(|error| cannot_write(&folder, &error))?;
        let daemon = start_daemon(&folder, sim.as_deref())?;
        guard.watch(daemon.id());
        let (client, daemon) = await_daemon(&folder, daemon)?;
        Ok(Self {
            folder,
            sim,
            worker,
            daemon,
            client,
            card,
            bytes_per_job,
            linked: setup.linked,
            guard,
        })
    }

    /// Whether the card is simulated.
    pub(crate) fn is_sim(&self) -> bool {
        self.sim.is_some()
    }

    /// The rate of the link that the card hangs on, roughly.
    pub(super) fn link_bytes_per_s(&self) -> f64 {
        if self.is_sim() { SIM_LINK as f64 } else { 50e9 }
    }

    /// Everything that the daemon shows.
    pub(crate) fn snapshot(&mut self) -> Result<Snapshot> {
        match self.client.ask(&Request::List)? {
            Payload::List(snapshot) => Ok(snapshot),
            other => Err(unexpected(&other)),
        }
    }

    /// The demo's card in a listing.
    pub(crate) fn card_in<'a>(&self, snapshot: &'a Snapshot) -> Option<&'a DeviceRow> {
        snapshot
            .devices
            .iter()
            .find(|device| device.uuid == self.card.uuid)
    }

    /// The worker as a plain program.
    pub(super) fn plain_job(&self, steps: u32, seed: u32) -> Command {
        let mut command = Command::new(&self.worker);
        command.env_remove("LD_PRELOAD");
        self.finish_command(command, steps, seed)
    }

    /// The worker under `ebb run`.
    pub(super) fn ebb_job(&self, name: &str, steps: u32, seed: u32) -> Result<Command> {
        let command = self.under_ebb(name)?;
        Ok(self.finish_command(command, steps, seed))
    }

    fn under_ebb(&self, name: &str) -> Result<Command> {
        let mut command = own_command()?;
        command
            .arg("run")
            .arg("--socket-dir")
            .arg(self.folder.join("run"))
            .arg("--name")
            .arg(name);
        command.arg("--").arg(&self.worker);
        Ok(command)
    }

    /// Asks the daemon.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Payload> {
        self.client.ask(request)
    }

    /// The worker that waits for commands, as a plain program or under `ebb run`.
    pub(crate) fn server(&self, name: Option<&str>) -> Result<Command> {
        let mut command = match name {
            None => {
                let mut command = Command::new(&self.worker);
                command.env_remove("LD_PRELOAD");
                command
            }
            Some(name) => self.under_ebb(name)?,
        };
        command.arg("--serve");
        self.on_the_card(&mut command);
        Ok(command)
    }

    /// The helper for the driver's checkpoint, as the daemon starts it.
    pub(crate) fn checkpoint_helper(&self) -> Result<Command> {
        let exe = std::env::current_exe()
            .map_err(|error| CliError::failed(format!("cannot find my own program: {error}")))?;
        let mut command = Command::new(exe);
        command.arg(ebb_node::checkpoint::COMMAND);
        environment(&mut command, &self.folder, self.sim.as_deref());
        command.env_remove("CUDA_VISIBLE_DEVICES");
        Ok(command)
    }

    fn finish_command(&self, mut command: Command, steps: u32, seed: u32) -> Command {
        command.args(["--bytes", &self.bytes_per_job.0.to_string()]);
        command.args(["--steps", &steps.to_string(), "--seed", &seed.to_string()]);
        self.on_the_card(&mut command);
        command
    }

    fn on_the_card(&self, command: &mut Command) {
        environment(command, &self.folder, self.sim.as_deref());
        if self.linked {
            // All that the driver shows, in its own order, of which the card is the first.
            command.env("EBB_SIM_NVLINK", "1");
            return;
        }
        // By identity: indices differ between the driver's order and the listing's.
        command.env("CUDA_VISIBLE_DEVICES", self.card.uuid.to_string());
    }

    /// The daemon's own words, for a failure.
    pub(crate) fn daemon_log(&self) -> String {
        let text = std::fs::read_to_string(self.folder.join("daemon.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Waits until processes that ended are off the card, and the daemon has seen it: it looks once a second.
    pub(super) fn await_free_card(&mut self) -> Result<()> {
        let slack = Bytes::mib(64);
        let others = self.card.total.saturating_sub(self.card.free) + slack;
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let now = probe(&self.worker, &self.folder, self.sim.as_deref(), 1)?;
            let snapshot = self.snapshot()?;
            let seen = self
                .card_in(&snapshot)
                .is_none_or(|card| card.unmanaged <= others);
            if seen && now.free + slack >= self.card.free {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let error = CliError::failed("the memory of a job that ended stays on the card");
        Err(error.with_fix("see `nvidia-smi`, and try again"))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = self.client.send(&Request::Shutdown);
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            if !matches!(self.daemon.try_wait(), Ok(None)) {
                self.guard.forget(self.daemon.id());
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        self.guard.forget(self.daemon.id());
    }
}

fn choose(gpu: Gpu) -> Result<Gpu> {
    let real =
        driver::find(driver::CUDA).is_some_and(|found| !found.is_simulated()) && driver::has_device_node();
    match gpu {
        Gpu::Auto if real => Ok(Gpu::Real),
        Gpu::Auto => Ok(Gpu::Sim),
        Gpu::Real => driver::check(Gpu::Real, || Ok(false))
            .map(|()| Gpu::Real)
            .map_err(|mut error| {
                error.fix = Some("check `nvidia-smi`, or take `--gpu sim`".into());
                error
            }),
        Gpu::Sim => Ok(Gpu::Sim),
    }
}

fn usable(bytes: Bytes) -> Bytes {
    bytes.round_down(if bytes > Bytes::gib(4) {
        Bytes::gib(1)
    } else {
        GRANULE
    })
}

fn per_job(args: &DemoArgs, total: Bytes) -> Result<Bytes> {
    let bytes = args
        .bytes_per_job
        .unwrap_or(Bytes(total.0 / 4 * 3))
        .round_down(GRANULE);
    if bytes < Bytes::mib(16) {
        return Err(CliError::usage(
            "a job has to hold 16 MiB at least",
            "raise --bytes-per-job",
        ));
    }
    Ok(bytes)
}

fn slack(sim: bool) -> Bytes {
    if sim { Bytes::mib(64) } else { Bytes::gib(1) }
}

/// Asks the driver through the worker program, since this program never loads it.
/// A simulated machine has so many cards from its first program on.
fn probe(worker: &Path, folder: &Path, sim: Option<&Path>, cards: u32) -> Result<Card> {
    let mut command = Command::new(worker);
    command
        .arg("--probe")
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null());
    environment(&mut command, folder, sim);
    if sim.is_some() {
        command.env("EBB_SIM_DEVICES", cards.to_string());
    }
    let done = command
        .output()
        .map_err(|error| CliError::failed(format!("cannot run {}: {error}", worker.display())))?;
    if done.status.success() {
        return serde_json::from_slice(&done.stdout).map_err(|error| {
            CliError::failed(format!(
                "{} says what is not understood: {error}",
                worker.display()
            ))
        });
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let said = said.trim().trim_start_matches("error: ");
    Err(CliError::usage(
        format!("the GPU cannot be used: {said}"),
        "check `nvidia-smi`, or take `--gpu sim`",
    ))
}

/// Whether there is something to show, and room for it. The budget of the host arena: all that one job holds at least, since
/// the other one is on the card; up to what both hold where the host has it, so that segments need not be shared out closely.
fn check_room(card: &Card, job: Bytes, sim: bool, memory: &HostMemory) -> Result<Bytes> {
    let room = card.free;
    if job > room {
        return Err(CliError::usage(
            format!(
                "a job of {job} does not fit on {}, which has {room} free",
                card.name
            ),
            format!(
                "take `--bytes-per-job {}`, or end what else runs on the card",
                usable(room).to_quantity()
            ),
        ));
    }
    if job + job <= room {
        return Err(CliError::usage(
            format!(
                "two jobs of {job} fit together on {}, which has {room} free: there is nothing to show",
                card.name
            ),
            format!(
                "take `--bytes-per-job {}`",
                usable(Bytes(room.0 / 4 * 3)).to_quantity()
            ),
        ));
    }
    let left = spare_host_memory(card, sim, memory);
    let needed = job + slack(sim);
    if needed <= left {
        // Of what is more than needed, half.
        return Ok((job + job)
            .min(needed + Bytes((left - needed).0 / 2))
            .round_down(GRANULE));
    }
    let possible = usable(left.saturating_sub(slack(sim)));
    let fix = if !sim && possible + possible > room {
        format!("take `--bytes-per-job {}`", possible.to_quantity())
    } else {
        "run it where there is more memory, or take `--gpu sim`, which needs little".into()
    };
    Err(CliError::usage(
        format!("the demo needs {needed} of host memory, and {left} can be used"),
        fix,
    ))
}

fn make_folder() -> Result<PathBuf> {
    // Short, for the length of a socket's name; in memory, since a simulated card lies in it.
    let bases = ["/dev/shm", "/tmp"]
        .map(PathBuf::from)
        .into_iter()
        .chain([std::env::temp_dir()]);
    let mut why = None;
    for base in bases {
        let folder = base.join(format!("ebb-demo-{}", std::process::id()));
        let mut builder = std::fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let made = builder.create(&folder).and_then(|()| {
            ["run", "sim", "state"].iter().try_for_each(|name| {
                let mut builder = std::fs::DirBuilder::new();
                std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
                builder.create(folder.join(name))
            })
        });
        match made {
            Ok(()) => return Ok(folder),
            Err(error) => why = Some(cannot_write(&folder, &error)),
        }
    }
    Err(why.unwrap_or_else(|| CliError::failed("no folder for temporary files")))
}

fn cannot_write(folder: &Path, error: &std::io::Error) -> CliError {
    CliError::usage(
        format!("cannot write into {}: {error}", folder.display()),
        "make room or set TMPDIR",
    )
}

/// What of the host's memory the arena may take: a tenth stays for everything else, and a simulated card is host memory, too.
pub(crate) fn spare_host_memory(card: &Card, sim: bool, memory: &HostMemory) -> Bytes {
    let left = memory
        .cgroup
        .map_or(memory.available, |group| group.left().min(memory.available));
    Bytes(left.0 / 10 * 9).saturating_sub(if sim { card.total } else { Bytes::ZERO })
}

fn config(folder: &Path, sim: bool, budget: Bytes, ring: bool) -> String {
    let segment = if sim { "8Mi" } else { "256Mi" };
    let pinned = if ring { "ring" } else { "all" };
    format!(
        "scope = \"user\"\nsocket_dir = {:?}\nstate_dir = {:?}\nidle_exit = \"off\"\nlog = \"info\"\n\
         [arena]\nbudget = \"{}\"\nsegment = \"{segment}\"\npinned = \"{pinned}\"\n",
        folder.join("run"),
        folder.join("state"),
        budget.to_quantity(),
    )
}

fn environment(command: &mut Command, folder: &Path, sim: Option<&Path>) {
    let Some(sim) = sim else { return };
    command
        .env(
            "LD_LIBRARY_PATH",
            in_front(sim, std::env::var_os("LD_LIBRARY_PATH")),
        )
        .env("EBB_SIM_DIR", folder.join("sim"))
        .env("EBB_SIM_DEVICES", "1")
        .env("EBB_SIM_MEMORY", SIM_CARD.to_quantity())
        .env("EBB_SIM_CONTEXT_BYTES", SIM_CONTEXT.to_quantity())
        .env("EBB_SIM_LINK_BYTES_PER_S", SIM_LINK.to_string())
        .env("EBB_SIM_LINK_LATENCY_US", "10");
    // What somebody tries out elsewhere is no part of this card.
    for name in [
        "EBB_SIM_FAULT",
        "EBB_SIM_TRACE",
        "EBB_SIM_GRANULARITY",
        "EBB_NVML",
    ] {
        command.env_remove(name);
    }
}

fn start_daemon(folder: &Path, sim: Option<&Path>) -> Result<Child> {
    let log = File::create(folder.join("daemon.log")).map_err(|error| cannot_write(folder, &error))?;
    let mut command = own_command()?;
    command
        .arg("daemon")
        .arg("--config")
        .arg(folder.join("ebb.toml"))
        .arg("--socket-dir")
        .arg(folder.join("run"));
    environment(&mut command, folder, sim);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .process_group(0);
    command
        .spawn()
        .map_err(|error| CliError::failed(format!("cannot start the daemon: {error}")))
}

fn await_daemon(folder: &Path, mut daemon: Child) -> Result<(Client, Child)> {
    let began = Instant::now();
    loop {
        if let Ok(mut client) = Client::connect_to(&folder.join("run"))
            && client.ask(&Request::Hello).is_ok()
        {
            return Ok((client, daemon));
        }
        let ended = daemon.try_wait().ok().flatten();
        if ended.is_some() || began.elapsed() > PATIENCE {
            let _ = daemon.kill();
            let _ = daemon.wait();
            let log = std::fs::read_to_string(folder.join("daemon.log")).unwrap_or_default();
            let log = log.trim();
            // The daemon says its own mistakes as every command does.
            if let Some(rest) = log.rfind("error: ").map(|at| &log[at + "error: ".len()..]) {
                let (message, fix) = rest.split_once("\n  fix: ").unwrap_or((rest, ""));
                let mut error = CliError::usage(message.trim(), fix.trim());
                error.fix = error.fix.filter(|fix| !fix.is_empty());
                return Err(error);
            }
            return Err(CliError::failed(format!(
                "the demo's daemon does not answer; it wrote:\n{log}"
            )));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(free: Bytes) -> Card {
        Card {
            name: "card".into(),
            uuid: DeviceUuid::default(),
            total: Bytes::gib(80),
            free,
        }
    }

    fn memory(available: Bytes) -> HostMemory {
        HostMemory {
            total: available,
            available,
            cgroup: None,
        }
    }

    #[test]
    fn what_cannot_show_anything_is_refused_with_a_size_that_can() {
        let check = |job, free| check_room(&card(free), job, false, &memory(Bytes::gib(1000)));
        assert_eq!(check(Bytes::gib(60), Bytes::gib(79)), Ok(Bytes::gib(120)));
        let error = check(Bytes::gib(60), Bytes::gib(50)).unwrap_err();
        assert_eq!((error.status, error.fix.unwrap().contains("50Gi")), (2, true));
        let error = check(Bytes::gib(20), Bytes::gib(79)).unwrap_err();
        assert!(error.message.contains("fit together") && error.fix.unwrap().contains("59Gi"));
    }

    #[test]
    fn more_than_the_hosts_memory_is_refused() {
        let check = |available| check_room(&card(Bytes::gib(79)), Bytes::gib(60), false, &memory(available));
        let tight = check(Bytes::gib(70)).unwrap();
        assert!((Bytes::gib(61)..Bytes::gib(63)).contains(&tight), "{tight}");
        let error = check(Bytes::gib(64)).unwrap_err();
        assert!(
            error.message.contains("host memory") && error.fix.unwrap().contains("56Gi"),
            "{}",
            error.message
        );
        assert_eq!(error.status, 2);
    }
}
