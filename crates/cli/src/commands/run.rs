//! `ebb run`: everything is checked first, then this process becomes the program.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use ebb_protocol::control::{NewTask, Payload, Request};
use ebb_protocol::paths::{ENV_SOCKET_DIR, ENV_STRICT, ENV_SWITCH, ENV_TOKEN};
use ebb_units::TaskId;

use crate::args::{Global, Gpu, IdleRelease, RunArgs};
use crate::client::{Client, NoDaemon, own_folder, sim_folder, unexpected};
use crate::commands::supervise;
use crate::error::{CliError, Result};
use crate::program::{NOT_EXECUTABLE, NOT_FOUND};
use crate::{background, driver, library, program};

/// Runs the program. Returns only if that failed.
pub(crate) fn run(global: &Global, args: &RunArgs) -> Result<()> {
    if let Some(limit) = args.limit
        && args.request > limit
    {
        return Err(CliError::usage(
            format!(
                "the request ({}) is above the limit ({})",
                args.request.to_quantity(),
                limit.to_quantity()
            ),
            "lower --request or raise --limit",
        ));
    }
    let name = args.program.first().expect("clap wants one");
    let path = program::resolve(name, std::env::var_os("PATH"))?;
    let library = library::locate()?;
    let sim = (args.gpu == Gpu::Sim)
        .then(driver::simulated_folder)
        .transpose()?;
    let mut client = connect(global, args.gpu, sim.as_deref())?;
    if sim.is_none() && !args.allow_no_gpu {
        driver::check(args.gpu, || knows_devices(&mut client))?;
    }
    if let Some(why) = program::bypass(&path) {
        warn(&format!("{} passes ebb by: {}", path.display(), why.explain()));
    }
    if std::env::var_os(ENV_SWITCH).is_some_and(|value| value == "off") {
        warn("EBB=off is set: the library does nothing");
    }
    let (task, token) = create_task(&mut client, args)?;
    let supervised = args.checkpoint.is_some() || args.restart.is_some();
    let folder = std::path::absolute(client.folder()).unwrap_or_else(|_| client.folder().into());
    let prepare = |command: &mut Command| {
        command.env("LD_PRELOAD", preload(&library, std::env::var_os("LD_PRELOAD")));
        command.env(ENV_SOCKET_DIR, &folder);
        command.env(ENV_TOKEN, &token);
        if args.strict {
            command.env(ENV_STRICT, "1");
        }
        if let Some(sim) = &sim {
            command.env(
                "LD_LIBRARY_PATH",
                in_front(sim, std::env::var_os("LD_LIBRARY_PATH")),
            );
        }
    };
    if supervised {
        let plan = supervise::Plan {
            task,
            checkpoint: args.checkpoint.as_ref(),
            restart: args.restart,
            own: std::env::current_exe()
                .map_err(|e| CliError::failed(format!("the path of ebb itself is not known: {e}")))?,
        };
        return supervise::supervise(client, &plan, || {
            let mut command = Command::new(&plan.own);
            supervise::under_us(&mut command, name, &path);
            command.args(&args.program[1..]);
            prepare(&mut command);
            command
        });
    }
    let mut command = Command::new(&path);
    command.arg0(name).args(&args.program[1..]);
    prepare(&mut command);
    widen_descriptor_table();
    let error = command.exec();
    let status = if error.kind() == std::io::ErrorKind::NotFound {
        NOT_FOUND
    } else {
        NOT_EXECUTABLE
    };
    Err(CliError::failed(format!("cannot run {}: {error}", path.display())).with_status(status))
}

/// Makes room for the high descriptors that the library will have. The kernel keeps the table over `exec`. Growing it there, where
/// several threads run, would make the first of them wait for a grace period of the kernel, which takes 5 to 30 ms.
fn widen_descriptor_table() {
    // Closed again at once. A limit that is lower than this is the program's affair.
    let _ = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), HIGHEST);
}

/// Where the library's descriptors end, if the usual limit of 1,024 holds.
const HIGHEST: i32 = 1_000;

/// A daemon that runs, or one that we start.
fn connect(global: &Global, gpu: Gpu, sim: Option<&Path>) -> Result<Client> {
    let named = global.socket_dir.clone();
    let found = match (&named, gpu) {
        (Some(folder), _) => Client::connect_to(folder),
        (None, Gpu::Sim) => Client::connect_to(&sim_folder()),
        (None, _) => find_real(global),
    };
    match found {
        Ok(client) => Ok(client),
        Err(NoDaemon::Unusable(error)) => Err(error),
        Err(NoDaemon::Absent | NoDaemon::Stale(_)) => {
            let folder = named.unwrap_or_else(|| {
                if gpu == Gpu::Sim {
                    sim_folder()
                } else {
                    own_folder()
                }
            });
            background::launch(&folder, |command| {
                if let Some(sim) = sim {
                    command.env(
                        "LD_LIBRARY_PATH",
                        in_front(sim, std::env::var_os("LD_LIBRARY_PATH")),
                    );
                }
            })
        }
    }
}

/// The daemons that may manage a real card: all but the one of the simulated GPU.
fn find_real(global: &Global) -> std::result::Result<Client, NoDaemon> {
    let mut result = NoDaemon::Absent;
    for folder in crate::client::folders(global)
        .into_iter()
        .filter(|folder| *folder != sim_folder())
    {
        match Client::connect_to(&folder) {
            Ok(client) => return Ok(client),
            Err(NoDaemon::Absent) => {}
            // The system's daemon may have died or be closed to us: a daemon of our own is the next best.
            Err(NoDaemon::Stale(_) | NoDaemon::Unusable(_)) if folder != own_folder() => {}
            Err(other) => result = other,
        }
    }
    Err(result)
}

fn knows_devices(client: &mut Client) -> Result<bool> {
    match client.ask(&Request::List)? {
        Payload::List(snapshot) => Ok(!snapshot.devices.is_empty()),
        other => Err(unexpected(&other)),
    }
}

fn create_task(client: &mut Client, args: &RunArgs) -> Result<(TaskId, String)> {
    let task = NewTask {
        name: args.name.clone().unwrap_or_else(|| default_name(&args.program)),
        request: args.request,
        limit: args.limit,
        priority: args.priority,
        idle_release_ms: args.idle_release.map(IdleRelease::to_wire_ms),
        hibernate_after_ms: args.hibernate_after.map(IdleRelease::to_wire_ms),
    };
    match client.ask(&Request::CreateTask(task))? {
        Payload::Task { task, token } => Ok((task, token)),
        other => Err(unexpected(&other)),
    }
}

/// The program's file name, without what a terminal or the daemon would not take.
fn default_name(program: &[OsString]) -> String {
    let file = program
        .first()
        .map(Path::new)
        .and_then(Path::file_name)
        .unwrap_or(OsStr::new("program"));
    let mut name: String = file
        .to_string_lossy()
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    while name.len() > 64 {
        name.pop();
    }
    if name.is_empty() { "program".into() } else { name }
}

/// Our library in front of what is preloaded already; an `ebb run` inside an `ebb run` has it once.
fn preload(library: &Path, present: Option<OsString>) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let present = present.unwrap_or_default();
    let present = present.to_string_lossy();
    for entry in present.split([':', ' ']).filter(|entry| !entry.is_empty()) {
        if Path::new(entry).file_name() != library.file_name() {
            value.push(":");
            value.push(entry);
        }
    }
    value
}

/// `folder` in front of a search path.
pub(crate) fn in_front(folder: &Path, present: Option<OsString>) -> OsString {
    let mut value = folder.as_os_str().to_owned();
    if let Some(present) = present.filter(|present| !present.is_empty()) {
        value.push(":");
        value.push(present);
    }
    value
}

fn warn(message: &str) {
    anstream::eprintln!("warning: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_preloaded_first_and_once() {
        let library = Path::new("/opt/ebb/libebb.so");
        assert_eq!(preload(library, None), "/opt/ebb/libebb.so");
        assert_eq!(
            preload(library, Some("/a.so:/b.so".into())),
            "/opt/ebb/libebb.so:/a.so:/b.so"
        );
        assert_eq!(
            preload(library, Some("/old/libebb.so /a.so".into())),
            "/opt/ebb/libebb.so:/a.so"
        );
    }

    #[test]
    fn a_task_is_called_as_its_program() {
        assert_eq!(
            default_name(&["/usr/bin/python3".into(), "x.py".into()]),
            "python3"
        );
        assert_eq!(default_name(&["a\u{1b}[31mb".into()]), "a[31mb");
        assert_eq!(default_name(&["x".repeat(200).into()]).len(), 64);
    }
}
