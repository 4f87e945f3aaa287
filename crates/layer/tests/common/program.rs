//! The Python programs: run to their end, or told line by line what to do.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use ebb_units::Bytes;

use super::daemon::Daemon;
use super::{Bench, run, sim};

pub(crate) const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python");
pub(crate) const KERNELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../simgpu/ptx/kernels.ptx");

/// One of the Python programs, with or without the library.
pub(crate) fn script(bench: &Bench, name: &str, with: bool) -> Command {
    let python = Path::new("python3");
    let mut command = if with {
        bench.command(python, sim())
    } else {
        bench.plain(python, sim())
    };
    // The first time that a module is used its cache would be written beside it.
    command
        .arg("-B")
        .arg("-W")
        .arg("ignore")
        .arg(format!("{PYTHON}/{name}.py"))
        .env("EBB_TEST_KERNELS", KERNELS);
    command
}

/// Runs a program with and without the library and gives the output, which must not differ.
pub(crate) fn same(name: &str) -> String {
    let bench = Bench::new();
    let plain = run(&mut script(&bench, name, false));
    let with = run(&mut script(&bench, name, true));
    assert_eq!(with, plain, "{name} sees a difference");
    plain
}

/// A program under a daemon of a few lines.
pub(crate) fn under(bench: &Bench, command: &mut Command, limit: Bytes) -> Daemon {
    let sockets = bench.path().join("run");
    let daemon = Daemon::start(&sockets, limit);
    command
        .env("EBB_SOCKET_DIR", &sockets)
        .env("EBB_TASK_TOKEN", "07".repeat(32));
    daemon
}

/// A program that is told what to do on standard input.
pub(crate) struct Told {
    pub(crate) child: std::process::Child,
    pub(crate) lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Told {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut told = Self { child, lines };
        assert_eq!(told.line(), "ready");
        told
    }

    pub(crate) fn line(&mut self) -> String {
        self.lines
            .next()
            .expect("the program goes on")
            .expect("plain text")
    }

    pub(crate) fn say(&mut self, what: &str) -> String {
        let stdin = self.child.stdin.as_mut().expect("piped");
        writeln!(stdin, "{what}")
            .and_then(|()| stdin.flush())
            .expect("the program listens");
        self.line()
    }

    pub(crate) fn finish(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().expect("it ends").success());
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
