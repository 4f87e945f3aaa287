//! A daemon that answers what a test says, and the command to be tested.

// Each test file is a program of its own and uses a part of this.
#![allow(dead_code, unreachable_pub)]

use std::io::BufReader;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use ebb_protocol::control::{Answer, Failure, Payload, Request, Snapshot, read_line, write_line};
use ebb_units::TaskId;

/// What a fake daemon answers.
pub type Script = dyn Fn(&Request) -> Answer + Send + Sync;

/// A folder with a daemon in it.
pub struct Fake {
    pub folder: tempfile::TempDir,
    heard: Arc<Mutex<Vec<Request>>>,
}

impl Fake {
    /// A daemon that answers by `script`.
    pub fn start(script: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("ctl.sock")).unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (script, heard_too): (Arc<Script>, _) = (Arc::new(script), Arc::clone(&heard));
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (script, heard) = (Arc::clone(&script), Arc::clone(&heard_too));
                std::thread::spawn(move || serve(&stream, &*script, &heard));
            }
        });
        Self { folder, heard }
    }

    /// A daemon that knows nothing and agrees to everything.
    pub fn obliging() -> Self {
        Self::start(oblige)
    }

    /// What it was asked.
    pub fn heard(&self) -> Vec<Request> {
        self.heard.lock().unwrap().clone()
    }

    /// The command, pointed at this daemon.
    pub fn ebb(&self, arguments: &[&str]) -> Command {
        ebb(self.folder.path(), arguments)
    }
}

fn serve(stream: &UnixStream, script: &Script, heard: &Mutex<Vec<Request>>) {
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    while let Ok(request) = read_line::<Request>(&mut reader) {
        heard.lock().unwrap().push(request.clone());
        if write_line(&mut writer, &script(&request)).is_err() {
            return;
        }
    }
}

/// The answers of [`Fake::obliging`].
pub fn oblige(request: &Request) -> Answer {
    Answer::Ok(match request {
        Request::Hello => Payload::Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: 1,
            event_log: Some("/log".into()),
            troubles: Vec::new(),
        },
        Request::CreateTask(_) => Payload::Task {
            task: TaskId(7),
            token: "ab".repeat(32),
        },
        Request::List | Request::Watch { .. } => Payload::List(Snapshot::default()),
        _ => Payload::Done {
            message: "done".into(),
        },
    })
}

/// A refusal.
pub fn refuse(message: &str, fix: &str, usage: bool) -> Answer {
    Answer::Error(Failure {
        message: message.into(),
        fix: Some(fix.into()),
        usage,
    })
}

/// The command with a socket folder and nothing of the surroundings that could reach a real daemon.
pub fn ebb(socket_dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebb"));
    command
        .args(arguments)
        .env("EBB_SOCKET_DIR", socket_dir)
        .stdin(Stdio::null());
    for name in [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "EBB",
        "EBB_LIB",
        "EBB_TASK_TOKEN",
        "NO_COLOR",
        "EBB_SIM_DEVICES",
    ] {
        command.env_remove(name);
    }
    command
}

/// An empty library that the loader takes.
pub fn library(folder: &Path, name: &str) -> PathBuf {
    let path = folder.join(name);
    let mut compiler = Command::new("gcc");
    compiler
        .args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"])
        .arg(&path);
    assert!(compiler.status().expect("gcc is there").success());
    path
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Standard output as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts one message with a fix and status 2.
pub fn assert_refused(output: &Output, words: &[&str]) {
    let error = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("error: "), "{error}");
    assert_eq!(error.matches("error: ").count(), 1, "{error}");
    assert!(error.contains("\n  fix: "), "{error}");
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
    assert!(output.stdout.is_empty());
}
