//! Takes the memory off the card between two calls of the driver: a pause and a resume by the daemon's control socket.
//!
//! The daemon is asked anew each time over a fresh connection: behaviours close descriptors, fork and die. What it did is
//! counted by the daemon (`releases` of the process) and read once at the end: an eviction counts if bytes left the card.

use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ebb_protocol::control::{Answer, Payload, Request, read_line, write_line};
use ebb_protocol::paths::{CONTROL_SOCKET, ENV_SOCKET_DIR};

/// Set by the runner for the mode with evictions.
pub(crate) const ENV_EVICT: &str = "EBB_CONFORMANCE_EVICT";

/// How long a pause may wait for running work. Work that waits for the behaviour itself does not end: such a pause is
/// refused, which is counted and is no fault.
const BUSY_MS: u64 = 250;

static ON: AtomicBool = AtomicBool::new(false);
/// Pauses that the daemon carried out, and those that it did not.
static DONE: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// One at a time in a process: a pause of one thread must not be taken back by another's resume.
static TURN: Mutex<()> = Mutex::new(());

/// Evictions from now on, if this is that mode.
pub(crate) fn begin() {
    if std::env::var_os(ENV_EVICT).is_some() {
        ON.store(true, Ordering::Relaxed);
    }
}

/// Evicts what this process holds.
pub(crate) fn between_calls() {
    if ON.load(Ordering::Relaxed) {
        evict();
    }
}

#[cold]
fn evict() {
    let Ok(_turn) = TURN.lock() else { return };
    let task = std::process::id().to_string();
    let pause = Request::Pause {
        task: task.clone(),
        wait_ms: Some(BUSY_MS),
    };
    match ask(&[pause, Request::Resume { task }]).as_deref() {
        Some([Answer::Ok(_), _]) => DONE.fetch_add(1, Ordering::Relaxed),
        _ => REFUSED.fetch_add(1, Ordering::Relaxed),
    };
}

/// What happened, for the runner: releases of this process, pauses done, pauses refused.
pub(crate) fn counted() -> Option<(u64, u64, u64)> {
    if !ON.swap(false, Ordering::Relaxed) {
        return None;
    }
    /// Of behaviours before, in the same process.
    static COUNTED: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    let releases: u64 = match ask(&[Request::List])?.pop()? {
        Answer::Ok(Payload::List(snapshot)) => snapshot
            .tasks
            .iter()
            .flat_map(|task| &task.processes)
            .filter(|process| process.pid == pid)
            .map(|process| process.releases)
            .sum(),
        _ => 0,
    };
    let before = COUNTED.swap(releases, Ordering::Relaxed);
    Some((
        // The daemon begins anew if the process came to it anew.
        releases.checked_sub(before).unwrap_or(releases),
        DONE.swap(0, Ordering::Relaxed),
        REFUSED.swap(0, Ordering::Relaxed),
    ))
}

/// Puts requests and gives their answers; `None` if the daemon cannot be reached.
fn ask(requests: &[Request]) -> Option<Vec<Answer>> {
    let folder = PathBuf::from(std::env::var_os(ENV_SOCKET_DIR)?);
    let mut stream = UnixStream::connect(folder.join(CONTROL_SOCKET)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut answers = Vec::new();
    for request in requests {
        write_line(&mut stream, request).ok()?;
        answers.push(read_line(&mut reader).ok()?);
    }
    Some(answers)
}
