//! [`Stage`]: a simulated card and a daemon in a folder of their own.

use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ebb_protocol::control::{Answer, NewTask, Payload, Request, Snapshot, read_line, write_line};
use ebb_units::{Bytes, Priority};

use crate::{Artefacts, Program, eventually};

/// What the simulated card and the daemon are like.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of each card.
    pub card: Bytes,
    /// How many cards; or slices of cards, where these are cut.
    pub devices: u32,
    /// The cards are linked with each other as by NVLink.
    pub nvlink: bool,
    /// Slices that each card is cut into (MIG); 0: cards are whole.
    pub slices: u32,
    /// What a client of MPS costs; zero: no MPS.
    pub mps_client: Bytes,
    /// What a context costs.
    pub context: Bytes,
    /// Bytes a second of the link, 0 for no delay.
    pub link: u64,
    /// The host arena's budget.
    pub arena: Bytes,
    /// Pin a ring of it and no more.
    pub ring: bool,
    /// Equal host copies are had in common.
    pub share: bool,
    /// More lines of `ebb.toml`.
    pub config: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            card: Bytes::mib(256),
            devices: 1,
            nvlink: false,
            slices: 0,
            mps_client: Bytes::ZERO,
            context: Bytes::mib(4),
            link: 0,
            arena: Bytes::mib(1024),
            ring: false,
            share: true,
            config: String::new(),
        }
    }
}

/// A simulated card and a daemon.
#[derive(Debug)]
pub struct Stage {
    folder: tempfile::TempDir,
    options: Options,
    daemon: Option<Child>,
}

impl Stage {
    /// A card and a running daemon.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let mut stage = Self::without_daemon(options);
        stage.start_daemon();
        stage
    }

    /// A card only.
    #[must_use]
    pub fn without_daemon(options: Options) -> Self {
        // In memory where possible: what is tested is not the disk. Short, for the length of socket names.
        let base = if Path::new("/dev/shm").is_dir() {
            PathBuf::from("/dev/shm")
        } else {
            std::env::temp_dir()
        };
        let folder = tempfile::Builder::new()
            .prefix("ebb-t")
            .tempdir_in(base)
            .expect("a temporary folder");
        for name in ["sim", "run", "state"] {
            std::fs::create_dir(folder.path().join(name)).expect("a folder");
        }
        let stage = Self {
            folder,
            options,
            daemon: None,
        };
        std::fs::write(stage.config_path(), stage.config_text()).expect("a config file");
        stage
    }

    /// The folder of everything.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What a context costs on its cards.
    #[must_use]
    pub fn context(&self) -> Bytes {
        self.options.context
    }

    /// The sockets' folder.
    #[must_use]
    pub fn socket_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    /// The daemon's config file.
    #[must_use]
    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("ebb.toml")
    }

    fn config_text(&self) -> String {
        format!(
            "state_dir = {:?}\n{}\n[arena]\nbudget = {:?}\nsegment = \"8Mi\"\npinned = {:?}\nshare = {}\n",
            self.folder.path().join("state"),
            self.options.config,
            self.options.arena.to_quantity(),
            if self.options.ring { "ring" } else { "all" },
            self.options.share,
        )
    }

    /// The environment of a simulated card, for any command.
    pub fn gpu_env<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("LD_LIBRARY_PATH", &Artefacts::get().sim)
            .env("EBB_SIM_DIR", self.folder.path().join("sim"))
            .env("EBB_SIM_MEMORY", self.options.card.to_quantity())
            .env("EBB_SIM_DEVICES", self.options.devices.to_string())
            .env("EBB_SIM_NVLINK", if self.options.nvlink { "1" } else { "0" })
            .env("EBB_SIM_MIG", self.options.slices.to_string())
            .env("EBB_SIM_MPS_CLIENT_BYTES", self.options.mps_client.to_quantity())
            .env("EBB_SIM_CONTEXT_BYTES", self.options.context.to_quantity())
            .env("EBB_SIM_LINK_BYTES_PER_S", self.options.link.to_string())
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("EBB_SIM_FAULT")
    }

    /// Starts the daemon and waits until it answers.
    pub fn start_daemon(&mut self) {
        self.start_daemon_with(&[]);
    }

    /// The same with more environment, for it and the helpers that it starts.
    pub fn start_daemon_with(&mut self, env: &[(&str, &str)]) {
        assert!(self.daemon.is_none(), "the daemon runs already");
        let mut command = Command::new(&Artefacts::get().ebb);
        command
            .arg("daemon")
            .arg("--config")
            .arg(self.config_path())
            .arg("--socket-dir")
            .arg(self.socket_dir());
        self.gpu_env(&mut command);
        command.envs(env.iter().copied());
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.path().join("daemon.log"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log file"));
        self.daemon = Some(command.spawn().expect("the daemon starts"));
        eventually("the daemon answers", || {
            let daemon = self.daemon.as_mut().expect("just started");
            if let Ok(Some(status)) = daemon.try_wait() {
                panic!("the daemon ended with {status}:\n{}", self.daemon_log());
            }
            self.try_ask(&Request::Hello).map(drop)
        });
    }

    /// `kill -9`.
    pub fn kill_daemon(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }

    /// The daemon's process.
    ///
    /// # Panics
    /// If none was started.
    #[must_use]
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().expect("a daemon").id()
    }

    /// Whether the daemon still runs.
    pub fn daemon_runs(&mut self) -> bool {
        self.daemon
            .as_mut()
            .is_some_and(|daemon| matches!(daemon.try_wait(), Ok(None)))
    }

    /// What the daemon wrote.
    #[must_use]
    pub fn daemon_log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("daemon.log")).unwrap_or_default()
    }

    fn try_ask(&self, request: &Request) -> Result<Answer, String> {
        let stream =
            UnixStream::connect(self.socket_dir().join("ctl.sock")).map_err(|e| format!("no daemon: {e}"))?;
        let patience = Some(crate::PATIENCE);
        stream.set_read_timeout(patience).map_err(|e| e.to_string())?;
        let mut writer = stream.try_clone().map_err(|e| e.to_string())?;
        write_line(&mut writer, request).map_err(|e| e.to_string())?;
        read_line(&mut BufReader::new(stream)).map_err(|e| format!("{e} ({e:?})"))
    }

    /// Asks the daemon and does not wait for the answer; whoever asked stays on the line until the end of the stage's life.
    pub fn send(&self, request: &Request) {
        let mut stream =
            UnixStream::connect(self.socket_dir().join("ctl.sock")).expect("a daemon that listens");
        write_line(&mut stream, request).expect("a daemon that reads");
        // Hanging up would not take it back; the descriptor goes with the test's process.
        std::mem::forget(stream);
    }

    /// Asks the daemon.
    ///
    /// # Panics
    /// If it does not answer.
    #[must_use]
    pub fn ask(&self, request: &Request) -> Answer {
        self.try_ask(request)
            .unwrap_or_else(|e| panic!("{e}\n{}", self.daemon_log()))
    }

    /// Everything that the daemon shows.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        match self.ask(&Request::List) {
            Answer::Ok(Payload::List(snapshot)) => snapshot,
            other => panic!("no listing: {other:?}"),
        }
    }

    /// A new task whose first process is this test process.
    #[must_use]
    pub fn task(&self, name: &str, request: Bytes, limit: Option<Bytes>, priority: Priority) -> String {
        let new = NewTask {
            name: name.into(),
            request,
            limit,
            priority,
            idle_release_ms: Some(0),
            hibernate_after_ms: None,
        };
        match self.ask(&Request::CreateTask(new)) {
            Answer::Ok(Payload::Task { token, .. }) => token,
            other => panic!("no task: {other:?}"),
        }
    }

    /// A command that runs `program` by `ebb run` with these flags.
    #[must_use]
    pub fn run_command(&self, flags: &[&str], program: &Path) -> Command {
        let artefacts = Artefacts::get();
        let mut command = Command::new(&artefacts.ebb);
        command.arg("run").args(flags).arg("--").arg(program);
        self.gpu_env(&mut command);
        command
            .env("EBB_SOCKET_DIR", self.socket_dir())
            .env("EBB_LIB", &artefacts.layer);
        command
    }

    /// A scripted program under `ebb run` with these flags.
    #[must_use]
    pub fn run(&self, flags: &[&str]) -> Program {
        Program::start(self.run_command(flags, &Artefacts::get().program("gpu-script")))
    }

    /// A scripted program under `ebb run` with these flags and more environment.
    #[must_use]
    pub fn run_with_env(&self, flags: &[&str], env: &[(&str, &str)]) -> Program {
        let mut command = self.run_command(flags, &Artefacts::get().program("gpu-script"));
        command.envs(env.iter().copied());
        Program::start(command)
    }

    /// A scripted program of a task that [`Self::task`] made, by its token.
    #[must_use]
    pub fn run_in_task(&self, token: &str) -> Program {
        let artefacts = Artefacts::get();
        let mut command = Command::new(artefacts.program("gpu-script"));
        self.gpu_env(&mut command);
        command
            .env("LD_PRELOAD", &artefacts.layer)
            .env("EBB_SOCKET_DIR", self.socket_dir())
            .env("EBB_TASK_TOKEN", token);
        Program::start(command)
    }

    /// Python under `ebb run` with these flags and more environment: each line that it is told is source, and every driver
    /// call is at hand (`tests/python/shell.py`, with `gpu.py` of the library's own tests).
    #[must_use]
    pub fn python(&self, flags: &[&str], env: &[(&str, &str)]) -> Program {
        let mut command = self.run_command(flags, Path::new("python3"));
        command
            .args(["-B", concat!(env!("CARGO_MANIFEST_DIR"), "/python/shell.py")])
            .env(
                "EBB_TEST_PYTHON",
                concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/layer/tests/python"),
            )
            .env(
                "EBB_TEST_KERNELS",
                concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/simgpu/ptx/kernels.ptx"),
            )
            .envs(env.iter().copied());
        Program::start(command)
    }

    /// Takes a task's memory off its cards and lets it go on: its next touch brings it back.
    ///
    /// # Panics
    /// If the daemon does not do it.
    pub fn release(&self, task: &str) {
        let wait_ms = Some(30_000);
        let paused = self.ask(&Request::Pause {
            task: task.into(),
            wait_ms,
        });
        assert!(matches!(paused, Answer::Ok(_)), "{paused:?}");
        let resumed = self.ask(&Request::Resume { task: task.into() });
        assert!(matches!(resumed, Answer::Ok(_)), "{resumed:?}");
    }

    /// A scripted program without ebb.
    #[must_use]
    pub fn run_plain(&self, env: &[(&str, &str)]) -> Program {
        let mut command = Command::new(Artefacts::get().program("gpu-script"));
        self.gpu_env(&mut command);
        command.envs(env.iter().copied());
        Program::start(command)
    }

    /// Waits until the ledger says that nothing is held on the first card, contexts included.
    pub fn wait_until_empty(&self) {
        eventually("the ledger is empty", || {
            let snapshot = self.snapshot();
            let held: Bytes = snapshot.devices.iter().map(|d| d.leased + d.overhead).sum();
            if held.is_zero() && snapshot.tasks.is_empty() {
                Ok(())
            } else {
                Err(format!("{snapshot:#?}"))
            }
        });
    }
}

/// Bytes granted on the first card.
#[must_use]
pub fn ledger_of(snapshot: &Snapshot) -> Bytes {
    snapshot
        .devices
        .first()
        .map_or(Bytes::ZERO, |device| device.leased)
}

impl Drop for Stage {
    fn drop(&mut self) {
        if std::thread::panicking() {
            if let Ok(Answer::Ok(Payload::List(snapshot))) = self.try_ask(&Request::List) {
                eprintln!("--- ebb ps ---\n{snapshot:#?}");
            }
            let events =
                std::fs::read_to_string(self.folder.path().join("state/events.jsonl")).unwrap_or_default();
            let lines: Vec<&str> = events.lines().collect();
            let tail = &lines[lines.len().saturating_sub(60)..];
            eprintln!(
                "--- the event log's end ---\n{}\n--- daemon.log ---\n{}",
                tail.join("\n"),
                self.daemon_log()
            );
        }
        self.kill_daemon();
    }
}
