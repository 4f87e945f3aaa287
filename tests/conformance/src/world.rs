//! [`World`]: the card and the daemon that the behaviours run on, in a folder of their own that goes with it.

use std::ffi::OsString;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ebb_protocol::control::{Answer, Payload, Request, read_line, write_line};
use ebb_protocol::paths::{CONTROL_SOCKET, ENV_SOCKET_DIR};

use crate::ending::{bound_to_us, on_signal_remove};
use crate::evict::ENV_EVICT;
use crate::modes::{ENV_STRICT, Mode, Tool};
use crate::observe::ENV_SIMULATED;

/// Names of the simulated libraries: as cargo names them, and as programs look for them.
const SIMULATED: [(&str, &str); 2] = [
    ("libsimcuda.so", "libcuda.so.1"),
    ("libsimnvml.so", "libnvidia-ml.so.1"),
];

/// A card, and a daemon if the tool is ebb.
#[derive(Debug)]
pub(crate) struct World {
    folder: tempfile::TempDir,
    tool: Tool,
    env: Vec<(&'static str, OsString)>,
    simulated: bool,
    daemon: Option<Child>,
}

impl World {
    /// The real card, or a simulated one of the libraries in `simulated`.
    pub(crate) fn new(tool: Tool, simulated: Option<&Path>) -> Result<Self> {
        // In memory where possible; short, for the length of socket names.
        let base = Some(PathBuf::from("/dev/shm"))
            .filter(|path| path.is_dir())
            .unwrap_or_else(std::env::temp_dir);
        let folder = tempfile::Builder::new()
            .prefix("ebb-conf")
            .tempdir_in(base)
            .context("a temporary folder")?;
        on_signal_remove(folder.path().to_path_buf());
        for name in ["out", "run", "state", "sim", "lib"] {
            std::fs::create_dir(folder.path().join(name))?;
        }
        let mut env: Vec<(&'static str, OsString)> = Vec::new();
        if let Some(built) = simulated {
            let lib = folder.path().join("lib");
            for (name, wanted) in SIMULATED {
                let built = built.join(name);
                if !built.is_file() {
                    bail!("{} is missing; build the workspace first", built.display());
                }
                std::os::unix::fs::symlink(std::path::absolute(built)?, lib.join(wanted))?;
            }
            env.extend([
                ("LD_LIBRARY_PATH", lib.into_os_string()),
                ("EBB_SIM_DIR", folder.path().join("sim").into_os_string()),
                ("EBB_SIM_MEMORY", "1Gi".into()),
                ("EBB_SIM_DEVICES", "2".into()),
                ("EBB_SIM_CONTEXT_BYTES", "4Mi".into()),
                ("EBB_SIM_LINK_BYTES_PER_S", "0".into()),
                (ENV_SIMULATED, "1".into()),
            ]);
        }
        let mut world = Self {
            folder,
            tool,
            env,
            simulated: simulated.is_some(),
            daemon: None,
        };
        if let Tool::Ebb { ebb, .. } = &world.tool {
            let ebb = ebb.clone();
            world.start_daemon(&ebb)?;
        }
        Ok(world)
    }

    pub(crate) fn simulated(&self) -> bool {
        self.simulated
    }

    /// Where runs write their lines.
    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn clean(&self, command: &mut Command) {
        for name in ["LD_PRELOAD", "EBB_SIM_FAULT", "EBB_TASK_TOKEN", "EBB"] {
            command.env_remove(name);
        }
        if self.simulated {
            command.env_remove("CUDA_VISIBLE_DEVICES");
        }
        command.envs(self.env.iter().cloned());
    }

    /// The command that runs `program` in one of the ways. `None`: the tool has no such way.
    pub(crate) fn command(&self, mode: Mode, program: &Path) -> Option<Command> {
        let mut command = match (mode, &self.tool) {
            (Mode::Plain, _) => Command::new(program),
            (Mode::Preload, Tool::Other { preload, env }) => {
                let mut command = Command::new(program);
                self.clean(&mut command);
                command.env("LD_PRELOAD", preload);
                command.envs(env.iter().cloned());
                return Some(command);
            }
            (Mode::Strict, Tool::Ebb { strict: false, .. }) => return None,
            (Mode::Ebb | Mode::Evicting | Mode::Strict, Tool::Ebb { ebb, .. }) => {
                let mut command = Command::new(ebb);
                command
                    .args(["run", "--name", "conformance", "--idle-release", "off"])
                    .arg("--")
                    .arg(program);
                command
            }
            _ => return None,
        };
        self.clean(&mut command);
        if let Tool::Ebb { library, .. } = &self.tool {
            command.envs(library.as_ref().map(|library| ("EBB_LIB", library)));
            command.env(ENV_SOCKET_DIR, self.folder.path().join("run"));
        }
        match mode {
            Mode::Evicting => drop(command.env(ENV_EVICT, "1")),
            Mode::Strict => drop(command.env(ENV_STRICT, "1")),
            _ => {}
        }
        Some(command)
    }

    fn start_daemon(&mut self, ebb: &Path) -> Result<()> {
        let folder = self.folder.path();
        let config = folder.join("ebb.toml");
        std::fs::write(
            &config,
            format!(
                "state_dir = {:?}\n[policy]\nbusy_wait = \"100ms\"\nturn_owed = \"0ms\"\n[arena]\nbudget = \"2Gi\"\nsegment = \"8Mi\"\n",
                folder.join("state")
            ),
        )?;
        let log = std::fs::File::create(folder.join("daemon.log"))?;
        let mut command = Command::new(ebb);
        command
            .arg("daemon")
            .arg("--config")
            .arg(&config)
            .arg("--socket-dir")
            .arg(folder.join("run"));
        self.clean(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.daemon = Some(
            bound_to_us(&mut command)
                .spawn()
                .context("the daemon does not start")?,
        );
        let began = Instant::now();
        while self.snapshot().is_none() {
            let ended = matches!(self.daemon.as_mut().map(Child::try_wait), Some(Ok(Some(_))));
            if ended || began.elapsed() > Duration::from_secs(60) {
                bail!("the daemon does not answer:\n{}", self.daemon_log());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// What the daemon wrote.
    pub(crate) fn daemon_log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("daemon.log")).unwrap_or_default()
    }

    /// Everything that the daemon shows.
    fn snapshot(&self) -> Option<ebb_protocol::control::Snapshot> {
        let stream = UnixStream::connect(self.folder.path().join("run").join(CONTROL_SOCKET)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
        write_line(&mut &stream, &Request::List).ok()?;
        match read_line(&mut BufReader::new(stream)).ok()? {
            Answer::Ok(Payload::List(snapshot)) => Some(snapshot),
            _ => None,
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}
