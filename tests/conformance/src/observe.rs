//! [`Test`]: what a behaviour writes its observation into, and what it may ask of its surroundings.
//!
//! An observation is a list of short lines, `label: value`, that say nothing of addresses or of the card's size, so that
//! two runs of the same program can be compared as text. Lines are written out one by one: of a program that dies there
//! is what it saw until then.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use ebb_abi::CUresult;

use crate::driver::Driver;

/// Thrown by a behaviour that cannot be looked at here. Loud: it is listed with its reason.
#[derive(Debug)]
pub(crate) struct Skip(pub String);

/// Where the process writes its lines: set for the child by the runner.
pub(crate) const ENV_SIMULATED: &str = "EBB_CONFORMANCE_SIMULATED";

/// One run of one behaviour.
#[derive(Debug)]
pub(crate) struct Test {
    name: &'static str,
    out: File,
    path: PathBuf,
    lines: usize,
}

impl Test {
    pub(crate) fn new(name: &'static str, path: PathBuf) -> std::io::Result<Self> {
        let out = File::options().create(true).append(true).open(&path)?;
        Ok(Self {
            name,
            out,
            path,
            lines: 0,
        })
    }

    /// A line with a value.
    pub(crate) fn see(&mut self, label: &str, value: impl Display) {
        self.lines += 1;
        self.write(&format!("={label}: {value}"));
    }

    /// A line with a result of the driver.
    pub(crate) fn code(&mut self, label: &str, code: CUresult) {
        self.see(label, short(code));
    }

    /// A result that must be success for the rest to make sense. Seen only if it is not.
    #[track_caller]
    pub(crate) fn ok(&mut self, label: &str, code: CUresult) {
        if code != CUresult::SUCCESS {
            self.see(label, short(code));
            panic!("{label} failed: {}", short(code));
        }
    }

    /// Whether the GPU is simulated.
    pub(crate) fn simulated(&self) -> bool {
        std::env::var_os(ENV_SIMULATED).is_some()
    }

    /// Ends a behaviour that cannot be looked at here.
    pub(crate) fn skip(&self, why: impl Into<String>) -> ! {
        std::panic::panic_any(Skip(why.into()))
    }

    /// The simulated GPU answers NOT_SUPPORTED to what it lacks: then there is nothing to compare.
    pub(crate) fn exists(&self, what: &str, code: CUresult) -> CUresult {
        // Under an interposer it is the interposer's answer, and there is.
        let plain = std::env::var_os("LD_PRELOAD").is_none();
        if code == CUresult::ERROR_NOT_SUPPORTED && plain && self.simulated() {
            self.skip(format!("not simulated: {what}"));
        }
        code
    }

    pub(crate) fn write(&mut self, line: &str) {
        // One write a line, so that lines of two processes do not mix. Nobody is there to hear of a failure.
        let _ = self.out.write_all(format!("{line}\n").as_bytes());
    }

    /// A second process that runs the behaviour's other half over a socket.
    #[track_caller]
    pub(crate) fn peer(&self) -> Peer {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let path = self.path.with_extension("peer");
        let child = Command::new(std::env::current_exe().expect("a process knows its program"))
            .args(["--behave", self.name, "--peer", "--out"])
            .arg(&path)
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("a second process");
        Peer {
            child,
            socket: ours,
            path,
        }
    }
}

/// The other process of a behaviour, seen from the first.
#[derive(Debug)]
pub(crate) struct Peer {
    child: Child,
    pub(crate) socket: UnixStream,
    path: PathBuf,
}

impl Peer {
    /// Waits for its end and takes over its lines.
    pub(crate) fn join(mut self, t: &mut Test) {
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        let status = self.child.wait().expect("a child can be waited for");
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let _ = std::fs::remove_file(&self.path);
        for line in text.lines() {
            match line.split_at_checked(1) {
                Some(("=", line)) => t.see("peer", line),
                Some(("#", line)) => t.write(&format!("#{line}")),
                Some(("?", why)) => t.skip(why.to_owned()),
                _ => t.see("peer failed", line),
            }
        }
        if !status.success() {
            t.see("peer ended", status);
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A result as the driver names it, without the prefix that all have.
pub(crate) fn short(code: CUresult) -> String {
    match code.c_name() {
        Some(name) => name
            .to_string_lossy()
            .trim_start_matches("CUDA_ERROR_")
            .trim_start_matches("CUDA_")
            .to_owned(),
        None => format!("{}", code.0),
    }
}

/// Starts the driver with the first device's primary context, as most programs do.
#[track_caller]
pub(crate) fn begin(t: &mut Test) {
    let cu = Driver;
    let started = cu.cuInit(0);
    t.ok("cuInit", started);
    cu.primary(0);
    crate::evict::begin();
}
