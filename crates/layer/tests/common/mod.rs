//! What the tests of the preloaded library share: where things were built, and programs that use them.

#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod daemon;
pub(crate) mod program;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A hang guard: long enough for any busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// `target/<profile>`.
pub(crate) fn target() -> PathBuf {
    let exe = std::env::current_exe().expect("a process knows its program");
    exe.ancestors()
        .find(|dir| dir.join("deps").is_dir())
        .expect("tests lie in a target folder")
        .to_path_buf()
}

/// Builds packages of this workspace beside this test: cargo does not build libraries that no test can link.
fn build(packages: &[&str]) {
    if std::env::var_os("EBB_TESTS_PREBUILT").is_some() {
        return;
    }
    let target = target();
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["build", "--quiet", "--target-dir"])
        .arg(target.parent().expect("a profile's folder lies in another"));
    for package in packages {
        cargo.args(["-p", package]);
    }
    if target.ends_with("release") {
        cargo.arg("--release");
    }
    cargo.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    assert!(
        cargo.status().expect("cargo starts").success(),
        "{packages:?} do not build"
    );
}

/// The library under test.
pub(crate) fn library() -> PathBuf {
    static BUILT: OnceLock<()> = OnceLock::new();
    BUILT.get_or_init(|| build(&["ebb-layer"]));
    let path = target().join("libebb.so");
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// A folder with the simulated `libcuda.so.1` and `libnvidia-ml.so.1`, built if need be.
pub(crate) fn sim() -> &'static Path {
    static SIM: OnceLock<PathBuf> = OnceLock::new();
    SIM.get_or_init(|| {
        build(&["ebb-simgpu", "ebb-simnvml"]);
        let target = target();
        let folder = target.join("layer-tests-sim");
        std::fs::create_dir_all(&folder).expect("the target folder is writable");
        for (built, name) in [
            ("libsimcuda.so", "libcuda.so.1"),
            ("libsimnvml.so", "libnvidia-ml.so.1"),
        ] {
            let temporary = folder.join(format!("{name}.{}", std::process::id()));
            let _ = std::fs::remove_file(&temporary);
            std::os::unix::fs::symlink(target.join(built), &temporary).expect("a link can be made");
            std::fs::rename(&temporary, folder.join(name)).expect("a link can be renamed");
        }
        folder
    })
}

/// A folder for one test: compiled programs and the simulated card's state. Gone when dropped.
pub(crate) struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let base = if Path::new("/dev/shm").is_dir() {
            PathBuf::from("/dev/shm")
        } else {
            std::env::temp_dir()
        };
        let folder = tempfile::Builder::new()
            .prefix("ebb-l")
            .tempdir_in(base)
            .expect("a temporary folder");
        std::fs::create_dir(folder.path().join("sim")).expect("a folder");
        Self { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Compiles one of the C sources beside this file.
    pub(crate) fn compile(&self, source: &str, output: &str, arguments: &[&str]) -> PathBuf {
        let output = self.path().join(output);
        if let Some(parent) = output.parent() {
            std::fs::create_dir_all(parent).expect("a folder");
        }
        let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
        compiler
            .args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
            .arg(&output)
            .arg(source)
            .args(arguments);
        let built = compiler.output().expect("a C compiler is there");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
        output
    }

    /// A program with the library preloaded, no daemon, and libraries from `libraries`.
    pub(crate) fn command(&self, program: &Path, libraries: &Path) -> Command {
        let mut command = self.plain(program, libraries);
        command.env("LD_PRELOAD", library());
        command
    }

    /// The same without the library.
    pub(crate) fn plain(&self, program: &Path, libraries: &Path) -> Command {
        let mut command = Command::new(program);
        for name in [
            "EBB",
            "EBB_TASK_TOKEN",
            "EBB_LOG",
            "EBB_KEEP",
            "EBB_POOL",
            "CUDA_VISIBLE_DEVICES",
            "EBB_SIM_FAULT",
            "LD_PRELOAD",
        ] {
            command.env_remove(name);
        }
        command
            .env("LD_LIBRARY_PATH", libraries)
            .env("EBB_SOCKET_DIR", self.path().join("no-daemon"))
            .env("EBB_SIM_DIR", self.path().join("sim"))
            .env("EBB_SIM_MEMORY", "256Mi")
            .env("EBB_SIM_CONTEXT_BYTES", "4Mi")
            // What leaves is counted by what is copied: nothing is kept that could save a copy.
            .env("EBB_KEEP", "0");
        command
    }
}

/// Runs to the end and gives the output, which must be successful and quiet on standard error.
pub(crate) fn run(command: &mut Command) -> String {
    let output = finish(command);
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success(),
        "{command:?}\n{}\nstdout: {out}\nstderr: {err}",
        output.status
    );
    assert_eq!(err, "", "something was written to standard error by {command:?}");
    out.into_owned()
}

/// Runs to the end, however it ends.
pub(crate) fn finish(command: &mut Command) -> Output {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|e| panic!("{command:?} does not start: {e}"));
    let read = |mut from: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            let _ = from.read_to_end(&mut text);
            text
        })
    };
    let stdout = read(Box::new(child.stdout.take().expect("piped")));
    let stderr = read(Box::new(child.stderr.take().expect("piped")));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            break Some(status);
        }
        if began.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let (stdout, stderr) = (stdout.join().expect("no panic"), stderr.join().expect("no panic"));
    let Some(status) = status else {
        let last = &stdout[stdout.len().saturating_sub(2000)..];
        panic!(
            "{command:?} hangs\nstdout: {}\nstderr: {}",
            String::from_utf8_lossy(last),
            String::from_utf8_lossy(&stderr)
        );
    };
    Output {
        status,
        stdout,
        stderr,
    }
}
