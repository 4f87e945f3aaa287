//! `ebb doctor` without a process: one line a check, and what to do about each that fails.

use std::io::Write;

use ebb_node::HostMemory;
use ebb_protocol::control::{Payload, Request, Snapshot, StrangerRow};
use serde::Serialize;

use crate::args::Global;
use crate::client::Client;

use crate::error::{CliError, Result};
use crate::table::{GREEN, RED, RESET, YELLOW, harmless};
use crate::{driver, library};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Good,
    /// Works, but not as well as it could, or not yet.
    Note,
    /// Programs under ebb will not do what they should.
    Bad,
}

#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    fn good(what: &'static str, found: impl Into<String>) -> Self {
        Self {
            what,
            verdict: Verdict::Good,
            found: found.into(),
            fix: None,
        }
    }

    fn note(what: &'static str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            what,
            verdict: Verdict::Note,
            found: found.into(),
            fix: Some(fix.into()),
        }
    }

    fn bad(what: &'static str, error: CliError) -> Self {
        Self {
            what,
            verdict: Verdict::Bad,
            found: error.message,
            fix: error.fix,
        }
    }
}

/// Checks the machine; fails if something is bad.
pub(super) fn check(global: &Global, json: bool) -> Result<()> {
    let mut checks = vec![library_check()];
    checks.extend(driver_checks());
    match Client::open(global) {
        Ok(client) => checks.extend(daemon_checks(client)?),
        Err(error) if error.message == "no daemon runs" => {
            checks.push(Check::note(
                "daemon",
                "none runs",
                "none needed: `ebb run` starts one",
            ));
        }
        Err(error) => checks.push(Check::bad("daemon", error)),
    }
    checks.extend(environment_checks());
    let mut out = anstream::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, &serde_json::json!({ "checks": checks }))?;
        writeln!(out)?;
    } else {
        for check in &checks {
            write_check(&mut out, check)?;
        }
    }
    out.flush()?;
    match checks
        .iter()
        .filter(|check| check.verdict == Verdict::Bad)
        .count()
    {
        0 => Ok(()),
        1 => Err(CliError::failed("one check failed")),
        bad => Err(CliError::failed(format!("{bad} checks failed"))),
    }
}

fn write_check(out: &mut impl Write, check: &Check) -> std::io::Result<()> {
    let (colour, mark) = match check.verdict {
        Verdict::Good => (GREEN, "ok  "),
        Verdict::Note => (YELLOW, "note"),
        Verdict::Bad => (RED, "bad "),
    };
    writeln!(
        out,
        "{colour}{mark}{RESET}  {:<12} {}",
        check.what,
        harmless(&check.found)
    )?;
    if let Some(fix) = &check.fix {
        writeln!(out, "                   fix: {fix}")?;
    }
    Ok(())
}

fn library_check() -> Check {
    match library::locate() {
        Ok(path) => Check::good(
            "library",
            format!("{} (version {})", path.display(), env!("CARGO_PKG_VERSION")),
        ),
        Err(error) => Check::bad("library", error),
    }
}

fn driver_checks() -> Vec<Check> {
    let Some(cuda) = driver::find(driver::CUDA) else {
        let error = CliError::usage(
            format!("no {} for the loader to find", driver::CUDA),
            "install the NVIDIA driver; without one, `ebb demo` shows ebb at work on the simulated GPU",
        );
        return vec![Check::bad("driver", error)];
    };
    let simulated = cuda.is_simulated();
    let kernel = (!simulated).then(kernel_driver).flatten();
    let version = match &kernel {
        _ if simulated => "simulated".into(),
        Some(version) => format!("version {version}"),
        None => "version unknown".into(),
    };
    let found = format!("{} ({version})", cuda.path.display());
    let mut checks = vec![match kernel.as_deref().and_then(major) {
        Some(major) if major < OLDEST => {
            let fix = format!("install version {OLDEST} or newer; until then programs run as without ebb");
            let message = format!("{found} has no virtual memory management");
            Check::bad("driver", CliError::usage(message, fix))
        }
        _ => Check::good("driver", found),
    }];
    checks.push(match driver::find(driver::NVML) {
        Some(nvml) => Check::good("management", nvml.path.display().to_string()),
        None => Check::note(
            "management",
            format!("no {}: the daemon cannot see what others hold", driver::NVML),
            "give the container the driver's `utility` capability (NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        ),
    });
    if !simulated && !driver::has_device_node() {
        let fix = "check `nvidia-smi`; in a container: give it the GPU, as `docker run --gpus all` does";
        checks.push(Check::bad(
            "gpu",
            CliError::usage("the driver is there, but no card is", fix),
        ));
    }
    checks
}

/// The oldest driver that manages virtual memory (CUDA 10.2).
const OLDEST: u32 = 440;

/// The version of the kernel's half of the driver: the one that counts.
fn kernel_driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    driver_version(&text).map(str::to_owned)
}

fn driver_version(text: &str) -> Option<&str> {
    text.split_whitespace()
        .find(|word| word.split('.').count() >= 2 && word.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
}

fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

fn daemon_checks(mut client: Client) -> Result<Vec<Check>> {
    let folder = client.folder().display().to_string();
    let mut checks = Vec::new();
    if let Payload::Hello {
        version,
        pid,
        event_log,
        troubles,
    } = client.ask(&Request::Hello)?
    {
        let log = event_log
            .map(|log| format!(", event log {log}"))
            .unwrap_or_default();
        let found = format!("version {version}, pid {pid}, in {folder}{log}");
        checks.push(if version == env!("CARGO_PKG_VERSION") {
            Check::good("daemon", found)
        } else {
            Check::note(
                "daemon",
                found,
                format!(
                    "restart it: this command is version {}",
                    env!("CARGO_PKG_VERSION")
                ),
            )
        });
        let troubles = troubles.into_iter();
        checks.extend(troubles.map(|trouble| Check::note("daemon", trouble.found, trouble.fix)));
    }
    if let Payload::List(snapshot) = client.ask(&Request::List)? {
        checks.extend(listing_checks(&snapshot, &HostMemory::read()));
    }
    Ok(checks)
}

fn listing_checks(snapshot: &Snapshot, memory: &HostMemory) -> Vec<Check> {
    let mut checks = Vec::new();
    for device in &snapshot.devices {
        let found = format!(
            "{} {}: {}, {} for tasks, {} free",
            device.index, device.name, device.total, device.capacity, device.free
        );
        checks.push(if device.unmanaged.is_zero() {
            Check::good("gpu", found)
        } else {
            Check::note(
                "gpu",
                format!(
                    "{found}; {} held by programs that ebb does not manage",
                    device.unmanaged
                ),
                "start them by `ebb run`, or leave it: what they hold is promised to nobody",
            )
        });
        checks.extend(device.strangers.iter().map(stranger_check));
    }
    if snapshot.devices.is_empty() {
        checks.push(Check::note(
            "gpu",
            "none is known to the daemon yet",
            "the first program that uses one will show it",
        ));
    }
    let arena = &snapshot.arena;
    let largest = snapshot
        .devices
        .iter()
        .map(|device| device.capacity)
        .max()
        .unwrap_or_default();
    let mut found = format!("{} of {} held", arena.held, arena.budget);
    found.push_str(&format!(", {} available on this machine", memory.available));
    if let Some(group) = memory.cgroup {
        found.push_str(&format!(
            ", this control group may use {} and uses {}",
            group.limit, group.used
        ));
    }
    checks.push(if arena.budget < largest {
        Check::note(
            "host arena",
            format!("{found}; a full card ({largest}) does not fit"),
            "raise `[arena] budget` in ebb.toml if the machine has the memory",
        )
    } else {
        Check::good("host arena", found)
    });
    checks
}

/// A process that passes us by. One of a task is a fault of how it was started: it was meant to be managed.
fn stranger_check(row: &StrangerRow) -> Check {
    let of = row
        .task
        .map(|task| format!(" of task {task}"))
        .unwrap_or_default();
    let found = format!(
        "process {} ({}){of} holds {}: {}",
        row.pid, row.program, row.bytes, row.why
    );
    let fix = if row.task.is_some() {
        "it counts against its task's limit, but cannot be released; start a program that the library can be loaded into"
    } else {
        "start it by `ebb run`"
    };
    Check::note("not managed", found, fix)
}

fn environment_checks() -> Vec<Check> {
    let mut checks = Vec::new();
    if std::env::var_os(ebb_protocol::paths::ENV_SWITCH).is_some_and(|value| value == "off") {
        checks.push(Check::note(
            "environment",
            "EBB=off: the library does nothing",
            "unset EBB",
        ));
    }
    if let Some(preload) = std::env::var_os("LD_PRELOAD").filter(|value| !value.is_empty()) {
        let found = format!("LD_PRELOAD={}", preload.to_string_lossy());
        checks.push(Check::good(
            "environment",
            format!("{found}: stays, behind libebb.so"),
        ));
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;
    use ebb_node::CgroupMemory;
    use ebb_units::Bytes;

    #[test]
    fn the_drivers_version_is_read() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (u@h)\nGCC version: 12";
        let version = driver_version(text);
        assert_eq!((version, version.and_then(major)), (Some("580.82.07"), Some(580)));
        assert_eq!(driver_version("nothing of that kind"), None);
    }

    #[test]
    fn what_others_hold_and_an_arena_that_is_too_small_are_said() {
        let mut snapshot = fixtures::busy();
        let memory = HostMemory {
            total: Bytes::gib(600),
            available: Bytes::gib(500),
            cgroup: None,
        };
        let checks = listing_checks(&snapshot, &memory);
        assert_eq!(checks[0].verdict, Verdict::Note);
        assert!(
            checks[0]
                .found
                .contains("2 GiB held by programs that ebb does not manage")
        );
        assert_eq!(checks[1].verdict, Verdict::Note);
        assert!(
            checks[1].found.contains("process 977") && checks[1].found.contains("a static program"),
            "{}",
            checks[1].found
        );
        assert_eq!(checks[2].verdict, Verdict::Good);
        snapshot.arena.budget = Bytes::gib(8);
        let group = CgroupMemory {
            limit: Bytes::gib(10),
            used: Bytes::gib(1),
        };
        let checks = listing_checks(
            &snapshot,
            &HostMemory {
                cgroup: Some(group),
                ..memory
            },
        );
        assert_eq!(checks[2].verdict, Verdict::Note);
        assert!(checks[2].found.contains("may use 10 GiB"), "{}", checks[2].found);
    }
}
