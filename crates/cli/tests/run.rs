//! `ebb run` against a daemon that answers what the test says.

mod common;

use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use common::{Fake, assert_refused, ebb, library, oblige, refuse, stderr, stdout};
use ebb_protocol::control::Request;
use ebb_units::{Bytes, Priority};

fn environment(text: &str) -> HashMap<String, String> {
    text.lines()
        .filter_map(|line| line.split_once('='))
        .map(|(k, v)| (k.into(), v.into()))
        .collect()
}

#[test]
fn the_program_takes_the_place_of_the_command_with_all_that_the_library_needs() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let other = library(fake.folder.path(), "other.so");
    let mut command = fake.ebb(&[
        "run",
        "--allow-no-gpu",
        "--request",
        "1Gi",
        "--limit",
        "2Gi",
        "--priority",
        "high",
        "--name",
        "n",
        "--idle-release",
        "30s",
        "--",
        "sh",
        "-c",
        "echo PID=$$; env",
    ]);
    command.env("EBB_LIB", &lib).env("LD_PRELOAD", &other);
    let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let env = environment(&stdout(&output));
    assert_eq!(
        env["PID"],
        pid.to_string(),
        "the process is the same: the daemon knows it by its id"
    );
    let real = lib.canonicalize().unwrap();
    assert_eq!(
        env["LD_PRELOAD"],
        format!("{}:{}", real.display(), other.display())
    );
    assert_eq!(env["EBB_TASK_TOKEN"], "ab".repeat(32));
    assert_eq!(env["EBB_SOCKET_DIR"], fake.folder.path().display().to_string());
    let task = fake.heard().into_iter().find_map(|request| match request {
        Request::CreateTask(task) => Some(task),
        _ => None,
    });
    let task = task.expect("a task was made");
    assert_eq!(
        (task.name.as_str(), task.request, task.limit),
        ("n", Bytes::gib(1), Some(Bytes::gib(2)))
    );
    assert_eq!(
        (task.priority, task.idle_release_ms),
        (Priority::High, Some(30_000))
    );
}

#[test]
fn the_exit_status_is_the_programs_own() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let run = |words: &[&str]| {
        let mut command = fake.ebb(&[&["run", "--allow-no-gpu", "--"], words].concat());
        command.env("EBB_LIB", &lib).output().unwrap()
    };
    assert_eq!(run(&["sh", "-c", "exit 37"]).status.code(), Some(37));
    let missing = run(&["no-such-program"]);
    assert_eq!(missing.status.code(), Some(127));
    assert!(stderr(&missing).contains("no-such-program"));
    assert_eq!(run(&["/no/such/program"]).status.code(), Some(127));
    assert_eq!(run(&["/tmp"]).status.code(), Some(126));
    let plain = fake.folder.path().join("plain");
    std::fs::write(&plain, "text").unwrap();
    assert_eq!(run(&[plain.to_str().unwrap()]).status.code(), Some(126));
    let tasks = fake
        .heard()
        .iter()
        .filter(|request| matches!(request, Request::CreateTask(_)))
        .count();
    assert_eq!(tasks, 1, "programs that cannot run make no task");
}

#[test]
fn what_is_wrong_is_said_before_a_task_is_made() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let run = |words: &[&str]| {
        fake.ebb(&[&["run"], words].concat())
            .env("EBB_LIB", &lib)
            .output()
            .unwrap()
    };
    assert_refused(
        &run(&["--request", "2Gi", "--limit", "1Gi", "true"]),
        &["2Gi", "1Gi"],
    );
    assert_refused(&run(&["--limit", "20Gb", "true"]), &["Gb"]);
    assert_refused(&run(&["--limit", "-1Gi", "true"]), &["negative"]);
    assert_refused(&run(&["--priority", "urgent", "true"]), &["urgent", "high"]);
    assert_refused(&run(&["--idle-release", "soon", "true"]), &["soon"]);
    assert_refused(&run(&["--limt", "1Gi", "true"]), &["--limt"]);
    assert_refused(&run(&[]), &[]);
    assert!(fake.heard().is_empty());
}

#[test]
fn the_daemons_refusal_is_passed_on() {
    let fake = Fake::start(|request| match request {
        Request::CreateTask(_) => refuse(
            "the limit (300 GiB) is above the card (140 GiB)",
            "lower --limit",
            true,
        ),
        other => oblige(other),
    });
    let lib = library(fake.folder.path(), "libebb.so");
    let mut command = fake.ebb(&["run", "--allow-no-gpu", "--limit", "300Gi", "true"]);
    assert_refused(
        &command.env("EBB_LIB", &lib).output().unwrap(),
        &["300 GiB", "140 GiB", "lower --limit"],
    );
}

#[test]
fn bug_007_a_library_that_the_loader_would_ignore_starts_nothing() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let bytes = std::fs::read(&lib).unwrap();
    let run_with = |name: &str, content: &[u8]| {
        let path = fake.folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        fake.ebb(&["run", "--allow-no-gpu", "true"])
            .env("EBB_LIB", &path)
            .output()
            .unwrap()
    };
    assert_refused(&run_with("empty.so", b""), &["empty.so", "empty"]);
    assert_refused(
        &run_with("cut.so", &bytes[..bytes.len() / 2]),
        &["cut.so", "truncated"],
    );
    assert_refused(&run_with("text.so", b"#!/bin/sh\n"), &["text.so", "no ELF"]);
    let mut other = bytes.clone();
    other[18] = 21;
    assert_refused(&run_with("other.so", &other), &["other.so", "ppc64"]);
    let absent = fake
        .ebb(&["run", "--allow-no-gpu", "true"])
        .env("EBB_LIB", "/no/lib.so")
        .output()
        .unwrap();
    assert_refused(&absent, &["/no/lib.so"]);
    assert!(fake.heard().is_empty());
}

#[test]
fn without_a_driver_nothing_starts_unless_it_is_wanted() {
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: this machine has a real driver");
        return;
    }
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let refused = fake.ebb(&["run", "true"]).env("EBB_LIB", &lib).output().unwrap();
    assert_refused(&refused, &["no GPU driver", "--allow-no-gpu"]);
    library(fake.folder.path(), "libcuda.so.1");
    let mut command = fake.ebb(&["run", "true"]);
    let refused = command
        .env("EBB_LIB", &lib)
        .env("LD_LIBRARY_PATH", fake.folder.path())
        .output()
        .unwrap();
    assert_refused(&refused, &["no GPU", "--gpu sim"]);
    let ran = fake
        .ebb(&["run", "--allow-no-gpu", "true"])
        .env("EBB_LIB", &lib)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", stderr(&ran));
}

#[test]
fn a_program_that_passes_the_library_by_is_named() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let source = fake.folder.path().join("p.c");
    std::fs::write(
        &source,
        "void _start(void) { __asm__ volatile(\"syscall\" :: \"a\"(231), \"D\"(5)); }",
    )
    .unwrap();
    if !cfg!(target_arch = "x86_64") {
        return;
    }
    let program = fake.folder.path().join("static");
    let mut compiler = std::process::Command::new("gcc");
    compiler
        .args(["-static", "-nostdlib", "-o"])
        .arg(&program)
        .arg(&source);
    assert!(compiler.status().unwrap().success());
    let mut command = fake.ebb(&["run", "--allow-no-gpu", "--", program.to_str().unwrap()]);
    let output = command.env("EBB_LIB", &lib).output().unwrap();
    assert_eq!(output.status.code(), Some(5), "it runs all the same");
    assert!(
        stderr(&output).contains("passes ebb by: it is linked statically"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_socket_folder_of_another_user_is_not_used() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make a folder of another user");
        return;
    }
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    std::os::unix::fs::chown(fake.folder.path(), Some(12_345), None).unwrap();
    let output = fake
        .ebb(&["run", "--allow-no-gpu", "true"])
        .env("EBB_LIB", &lib)
        .output()
        .unwrap();
    assert_refused(&output, &["another user", "12345"]);
    assert!(
        fake.heard().is_empty(),
        "no word, and no token, goes to a stranger"
    );
}

#[test]
fn a_daemon_that_cannot_start_says_why_and_where_its_log_is() {
    let folder = tempfile::tempdir().unwrap();
    let lib = library(folder.path(), "libebb.so");
    let home = folder.path().join("home/ebb");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::write(home.join("ebb.toml"), "nonsense = 1\n").unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut command = ebb(&run, &["run", "--allow-no-gpu", "true"]);
    command
        .env("EBB_LIB", &lib)
        .env("XDG_CONFIG_HOME", folder.path().join("home"));
    let output = command.output().unwrap();
    let error = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.starts_with("error: the daemon did not start: ") && error.contains("nonsense"),
        "{error}"
    );
    assert!(error.contains("daemon.log"), "{error}");
}
