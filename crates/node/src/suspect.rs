//! Why a process that is on a card is not one of ours: what `/proc` says about it.
//!
//! Asked by the thread that asks NVML, not by the state driver: these files may be long, and reading some waits for the process.
//! Nothing here is proof. A program that wants to pass the library by can; that it did is known from NVML.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::process;

/// The most that is read of a file of `/proc`.
const MOST: u64 = 4 << 20;
/// How long an answer holds: a library may be loaded after the first look.
const HOLDS: Duration = Duration::from_secs(10);

/// Why a process is not one of ours, as far as can be seen from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The loader takes no `LD_PRELOAD` for it.
    Setuid,
    /// It has no loader.
    Static,
    /// The library is in it and switched off.
    Off,
    /// The library is in it, and the card's memory came through a graphics interface.
    Graphics,
    /// The library is in it, and was passed by.
    PassedBy,
    /// The library was to be loaded and was not.
    NotLoaded,
    /// Nobody wanted the library in it.
    NoPreload,
    /// Its files cannot be read.
    Hidden,
}

impl Why {
    /// Whether the library is in the process, and at work as far as can be seen: it may be about to tell of itself.
    pub(crate) fn has_library(self) -> bool {
        matches!(self, Self::PassedBy | Self::Graphics)
    }

    /// For people.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Setuid => "a setuid, setgid or privileged program: the loader ignores LD_PRELOAD for it",
            Self::Static => "a static program: nothing can be preloaded into it",
            Self::Off => "EBB=off in its environment",
            Self::Graphics => "its memory came through a graphics interface (Vulkan, OpenGL), not CUDA",
            Self::PassedBy => {
                "libebb.so is loaded but was passed by: dlmopen, RTLD_DEEPBIND, or no connection to this daemon"
            }
            Self::NotLoaded => "LD_PRELOAD names libebb.so, but the loader did not load it",
            Self::NoPreload => "not started by `ebb run`: no libebb.so in its LD_PRELOAD",
            Self::Hidden => "another user's process: why it is not managed cannot be seen",
        }
    }
}

/// What is known of one process.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub program: String,
    pub why: Why,
    /// The task that its environment names.
    pub token: Option<[u8; 32]>,
}

impl fmt::Debug for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the token: it is a capability.
        f.debug_struct("Facts")
            .field("program", &self.program)
            .field("why", &self.why)
            .finish_non_exhaustive()
    }
}

/// Answers of the last seconds, by process.
#[derive(Debug, Default)]
pub(crate) struct Memory(BTreeMap<u32, (u64, Instant, Facts)>);

impl Memory {
    /// Facts about these processes, those that have ended left out.
    pub(crate) fn look(&mut self, pids: impl Iterator<Item = u32>) -> BTreeMap<u32, Facts> {
        let known = std::mem::take(&mut self.0);
        for pid in pids {
            let Some(start) = process::start_time(pid) else {
                continue;
            };
            let fresh = known
                .get(&pid)
                .filter(|(born, at, _)| *born == start && at.elapsed() < HOLDS);
            let entry = match fresh {
                Some(entry) => entry.clone(),
                None => (start, Instant::now(), look(pid)),
            };
            self.0.insert(pid, entry);
        }
        self.0
            .iter()
            .map(|(pid, (_, _, facts))| (*pid, facts.clone()))
            .collect()
    }
}

/// What the files of a process say.
#[derive(Debug, Default)]
struct Seen {
    privileged: bool,
    is_static: bool,
    maps: Option<Vec<u8>>,
    environ: Option<Vec<u8>>,
}

fn look(pid: u32) -> Facts {
    let read = |name: &str| {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(format!("/proc/{pid}/{name}")).ok()?;
        file.take(MOST).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    };
    let exe = format!("/proc/{pid}/exe");
    let ids = Ids::parse(&String::from_utf8_lossy(&read("status").unwrap_or_default()));
    let privileged = std::fs::metadata(&exe).is_ok_and(|file| {
        let mut value = [0u8; 64];
        let capable = rustix::fs::getxattr(&exe, "security.capability", &mut value).is_ok();
        ids.privileged(file.mode(), file.uid(), file.gid()) || capable
    });
    let seen = Seen {
        privileged,
        is_static: read_start(&exe).is_some_and(|start| has_no_loader(&start)),
        maps: read("maps"),
        environ: read("environ"),
    };
    Facts {
        program: process::name(pid),
        why: seen.why(),
        token: seen
            .environ
            .as_deref()
            .and_then(|environ| variable(environ, ebb_protocol::paths::ENV_TOKEN))
            .and_then(|text| crate::statefile::from_hex(std::str::from_utf8(text).ok()?)),
    }
}

fn read_start(path: &str) -> Option<Vec<u8>> {
    let mut start = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(64 << 10).read_to_end(&mut start).ok()?;
    Some(start)
}

impl Seen {
    fn why(&self) -> Why {
        if self.privileged {
            return Why::Setuid;
        }
        if self.is_static {
            return Why::Static;
        }
        // An empty file is a kernel thread's, or one that we may open and not read.
        let Some(maps) = self.maps.as_deref().filter(|maps| !maps.is_empty()) else {
            return Why::Hidden;
        };
        let environ = self.environ.as_deref().unwrap_or_default();
        let mapped = |name: &str| contains(maps, name.as_bytes());
        if mapped("/libebb.so") {
            let off = variable(environ, ebb_protocol::paths::ENV_SWITCH);
            let graphics = [
                "/libvulkan.so",
                "/libGLX_nvidia.so",
                "/libEGL_nvidia.so",
                "/libnvidia-glcore.so",
            ];
            return if off.is_some_and(|value| matches!(value, b"off" | b"OFF" | b"0" | b"no" | b"false")) {
                Why::Off
            } else if graphics.iter().any(|name| mapped(name)) {
                Why::Graphics
            } else {
                Why::PassedBy
            };
        }
        match variable(environ, "LD_PRELOAD") {
            Some(preload) if contains(preload, b"libebb.so") => Why::NotLoaded,
            _ => Why::NoPreload,
        }
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|at| at == part)
}

/// The value of a variable in the bytes of an environment.
fn variable<'a>(environ: &'a [u8], name: &str) -> Option<&'a [u8]> {
    environ
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// Real and effective ids.
#[derive(Clone, Copy, Debug, Default)]
struct Ids {
    uid: [u32; 2],
    gid: [u32; 2],
}

impl Ids {
    fn parse(status: &str) -> Self {
        let pair = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let mut numbers = line
                .unwrap_or_default()
                .split_whitespace()
                .filter_map(|word| word.parse().ok());
            [numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)]
        };
        Self {
            uid: pair("Uid:"),
            gid: pair("Gid:"),
        }
    }

    /// Whether a program file with this mode and owner gave its process more than its user had.
    fn privileged(self, mode: u32, owner: u32, group: u32) -> bool {
        let bits = mode & 0o4000 != 0 && owner != self.uid[0] || mode & 0o2000 != 0 && group != self.gid[0];
        bits || self.uid[0] != self.uid[1] || self.gid[0] != self.gid[1]
    }
}

/// Whether an ELF program of 64 bits names no loader. `false` for what is no such file: a static program is a claim.
fn has_no_loader(start: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let number = |at: usize, bytes: usize| -> Option<usize> {
        let field = start.get(at..at + bytes)?;
        Some(
            field
                .iter()
                .rev()
                .fold(0, |sum, byte| sum << 8 | usize::from(*byte)),
        )
    };
    let headers = || {
        let (at, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        (0..count)
            .map(|i| number(at.checked_add(i * size)?, 4))
            .collect::<Option<Vec<usize>>>()
    };
    start.starts_with(b"\x7fELF\x02\x01")
        && headers().is_some_and(|kinds| !kinds.is_empty() && !kinds.contains(&(PT_INTERP as usize)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(maps: &str, environ: &[&str]) -> Seen {
        Seen {
            maps: Some(maps.into()),
            environ: Some(environ.join("\0").into_bytes()),
            ..Seen::default()
        }
    }

    #[test]
    fn the_likely_reason() {
        let ebb = "7f00-7f01 r-xp 0 0:0 1 /opt/ebb/libebb.so\n";
        let cuda = "7f02-7f03 r-xp 0 0:0 1 /lib/libcuda.so.580\n";
        let vulkan = "7f04-7f05 r-xp 0 0:0 1 /lib/libvulkan.so.1.3\n";
        let both = format!("{ebb}{cuda}");
        assert_eq!(seen(cuda, &["A=1"]).why(), Why::NoPreload);
        assert_eq!(
            seen(cuda, &["LD_PRELOAD=/opt/ebb/libebb.so"]).why(),
            Why::NotLoaded
        );
        assert_eq!(seen(&both, &["EBB=off"]).why(), Why::Off);
        assert_eq!(seen(&both, &["XEBB=off"]).why(), Why::PassedBy);
        assert_eq!(seen(&format!("{ebb}{vulkan}"), &[]).why(), Why::Graphics);
        assert_eq!(seen("", &[]).why(), Why::Hidden);
        let privileged = Seen {
            privileged: true,
            ..seen(cuda, &[])
        };
        assert_eq!(privileged.why(), Why::Setuid);
    }

    #[test]
    fn who_has_more_than_its_user() {
        let user = Ids::parse("Name:\tx\nUid:\t1000\t1000\t1000\t1000\nGid:\t100\t100\t100\t100\n");
        assert!(!user.privileged(0o100_755, 0, 0));
        assert!(user.privileged(0o104_755, 0, 0), "setuid root");
        assert!(
            !user.privileged(0o104_755, 1000, 0),
            "setuid, but to the same user"
        );
        assert!(user.privileged(0o102_755, 0, 0), "setgid root");
        let raised = Ids::parse("Uid:\t1000\t0\t0\t0\nGid:\t100\t100\t100\t100\n");
        assert!(raised.privileged(0o100_755, 0, 0));
    }

    #[test]
    fn programs_without_a_loader() {
        let own = read_start("/proc/self/exe").unwrap();
        assert!(!has_no_loader(&own));
        for start in [&b""[..], b"#!/bin/sh\n", b"\x7fELF\x02\x01", &own[..40]] {
            assert!(!has_no_loader(start), "no claim about what cannot be read");
        }
    }

    #[test]
    fn this_process_was_not_preloaded() {
        let facts = Memory::default().look([std::process::id(), u32::MAX].into_iter());
        let own = &facts[&std::process::id()];
        assert_eq!((own.why, own.token, facts.len()), (Why::NoPreload, None, 1));
        assert!(!own.program.is_empty());
    }
}
