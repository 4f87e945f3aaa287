//! The daemon in the background: started, waited for, and out of the way.
//!
//! ```text
//! ebb run ──spawns, waits──> ebb daemon --background ──spawns, waits until it answers──> ebb daemon --detached
//! ```
//! The process in the middle ends as soon as the daemon answers, so that the program which `ebb run` becomes has no
//! child that it does not know of.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_protocol::control::Request;
use ebb_protocol::paths::{ENV_SOCKET_DIR, ENV_TOKEN};

use crate::client::{Client, NoDaemon};
use crate::error::{CliError, Result};

/// How long a daemon may take until it answers. It is there in milliseconds; a loaded machine may need longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where a daemon in the background writes.
pub(crate) fn log_path(folder: &Path) -> PathBuf {
    folder.join("daemon.log")
}

/// A command that runs this very program, outside ebb itself.
pub(crate) fn own_command() -> Result<Command> {
    let exe = std::env::current_exe()
        .map_err(|error| CliError::failed(format!("cannot find my own program: {error}")))?;
    let mut command = Command::new(exe);
    command
        .env_remove("LD_PRELOAD")
        .env_remove(ENV_TOKEN)
        .env_remove(ENV_SOCKET_DIR);
    Ok(command)
}

/// Runs `ebb daemon --background` with this folder and more environment, and connects.
pub(crate) fn launch(folder: &Path, prepare: impl FnOnce(&mut Command)) -> Result<Client> {
    let mut command = own_command()?;
    command
        .arg("daemon")
        .arg("--background")
        .arg("--socket-dir")
        .arg(folder);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    prepare(&mut command);
    let done = command
        .output()
        .map_err(|error| CliError::failed(format!("cannot start the daemon: {error}")))?;
    if done.status.success() {
        return Client::connect_to(folder).map_err(|_| {
            CliError::failed("the daemon started and ended at once")
                .with_fix(format!("see {}", log_path(folder).display()))
        });
    }
    // The process in the middle has said it in our own words.
    let text = String::from_utf8_lossy(&done.stderr);
    let (message, fix) = text.split_once("\n  fix: ").unwrap_or((&text, ""));
    let mut error = CliError::failed(message.trim().trim_start_matches("error: "));
    error.fix = (!fix.is_empty()).then(|| fix.trim().to_owned());
    error.status = done
        .status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(crate::error::FAILED);
    Err(error)
}

/// The process in the middle: starts the daemon and waits until it answers. `Ok` says whether one was started.
pub(crate) fn start(folder: &Path, config: Option<&Path>) -> Result<bool> {
    match Client::connect_to(folder) {
        Ok(_) => return Ok(false),
        Err(NoDaemon::Unusable(error)) => return Err(error),
        Err(NoDaemon::Absent | NoDaemon::Stale(_)) => {}
    }
    let folder = std::path::absolute(folder).map_err(|error| CliError::failed(error.to_string()))?;
    let cannot = |what: &Path, error: std::io::Error| {
        CliError::usage(
            format!("cannot write {}: {error}", what.display()),
            "choose another folder with --socket-dir",
        )
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .map_err(|error| cannot(&folder, error))?;
    let log = log_path(&folder);
    let log_file = OpenOptions::new()
        .create(true)
        .append(true)
        .read(true)
        .mode(0o600)
        .custom_flags(libc_nofollow())
        .open(&log)
        .map_err(|error| cannot(&log, error))?;
    let began_at = log_file.metadata().map_or(0, |metadata| metadata.len());
    let to_log = || log_file.try_clone().map_err(|error| cannot(&log, error));
    let mut command = own_command()?;
    command
        .arg("daemon")
        .arg("--detached")
        .arg("--socket-dir")
        .arg(&folder);
    if let Some(config) = config {
        let config = std::path::absolute(config).map_err(|error| CliError::failed(error.to_string()))?;
        command.arg("--config").arg(config);
    }
    // Not in the folder that the user happens to stand in: it could never be unmounted.
    command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(to_log()?)
        .stderr(to_log()?);
    let child = command
        .spawn()
        .map_err(|error| CliError::failed(format!("cannot start the daemon: {error}")))?;
    await_answer(&folder, child, &log, began_at).map(|()| true)
}

fn await_answer(folder: &Path, mut child: Child, log: &Path, began_at: u64) -> Result<()> {
    let began = Instant::now();
    let mut ended = None;
    loop {
        if let Ok(mut client) = Client::connect_to(folder)
            && client.ask(&Request::Hello).is_ok()
        {
            return Ok(());
        }
        // Two that start at once: one of them gives way to the other, which may need a moment more.
        if let Some((status, at)) = ended
            && Instant::now().duration_since(at) > Duration::from_millis(500)
        {
            return Err(dead(status, log, began_at));
        }
        if ended.is_none() {
            ended = child
                .try_wait()
                .ok()
                .flatten()
                .map(|status| (status, Instant::now()));
        }
        if began.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            return Err(CliError::failed(format!(
                "the daemon did not answer within {} s{}",
                PATIENCE.as_secs(),
                said(log, began_at)
            ))
            .with_fix(format!("see {}", log.display())));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn dead(status: std::process::ExitStatus, log: &Path, began_at: u64) -> CliError {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    let text = tail(log, began_at);
    // A daemon that knows what is wrong says it as every command does.
    if let Some(at) = text.rfind("error: ") {
        let text = &text[at + "error: ".len()..];
        let (message, fix) = text.split_once("\n  fix: ").unwrap_or((text, ""));
        let fix = if fix.is_empty() {
            format!("see {}", log.display())
        } else {
            format!("{} (log: {})", fix.trim(), log.display())
        };
        return CliError::failed(format!("the daemon did not start: {}", message.trim()))
            .with_fix(fix)
            .with_status(code.filter(|code| *code != 0).unwrap_or(crate::error::FAILED));
    }
    CliError::failed(format!(
        "the daemon ended at once ({status}){}",
        said(log, began_at)
    ))
    .with_fix(format!("see {}", log.display()))
}

fn said(log: &Path, began_at: u64) -> String {
    let text = tail(log, began_at);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    last.map(|line| format!("; its last words: {}", line.trim()))
        .unwrap_or_default()
}

/// What this daemon wrote: the log from where it began, a little of it.
fn tail(log: &Path, began_at: u64) -> String {
    let mut text = Vec::new();
    if let Ok(mut file) = std::fs::File::open(log)
        && file.seek(SeekFrom::Start(began_at)).is_ok()
    {
        let _ = file.take(64 << 10).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn libc_nofollow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits().cast_signed()
}

/// The settings that a daemon in the background takes when none are named.
pub(crate) fn default_config() -> Option<PathBuf> {
    default_place().filter(|path| path.exists())
}

/// Where it would be: a daemon that began without it can be told to read it.
pub(crate) fn default_place() -> Option<PathBuf> {
    let base = match std::env::var_os("XDG_CONFIG_HOME") {
        Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir),
        _ => PathBuf::from(std::env::var_os("HOME")?).join(".config"),
    };
    Some(base.join("ebb/ebb.toml"))
}
