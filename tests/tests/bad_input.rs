//! What is wrong with the input is said once, clearly, with a fix, and the exit status is 2.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ebb_tests::{Artefacts, Options, Stage};
use ebb_units::Bytes;

fn output(mut command: Command) -> Output {
    command
        .stdin(std::process::Stdio::null())
        .output()
        .expect("the command starts")
}

/// Asserts one clear message: status 2, nothing on stdout, an `error:` that has these words, and a fix.
fn refused(output: &Output, words: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("error: "), "{error}");
    assert_eq!(error.matches("error: ").count(), 1, "one message: {error}");
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
    assert!(!error.contains("panicked"), "{error}");
    assert!(output.stdout.is_empty());
}

fn run(stage: &Stage, flags: &[&str]) -> Output {
    output(stage.run_command(flags, Path::new("/bin/true")))
}

#[test]
fn sizes_and_priorities() {
    let stage = Stage::new(Options::default());
    for (flags, words) in [
        (vec!["--limit", "lots"], vec!["lots", "20Gi"]),
        (vec!["--limit", "20Gb"], vec!["Gb", "Gi"]),
        (vec!["--limit", "-1Gi"], vec!["-1Gi"]),
        (vec!["--limit", "16Ei"], vec!["16Ei"]),
        (vec!["--request", "1.5"], vec!["1.5", "whole"]),
        (vec!["--priority", "urgent"], vec!["urgent", "high"]),
        (vec!["--idle-release", "soon"], vec!["soon"]),
    ] {
        refused(&run(&stage, &flags), &words);
    }
}

#[test]
fn bug_041_figures_that_do_not_go_together() {
    let stage = Stage::new(Options::default());
    refused(
        &run(&stage, &["--request", "128Mi", "--limit", "64Mi"]),
        &["request", "limit", "fix"],
    );
    refused(&run(&stage, &["--limit", "300Mi"]), &["256 MiB", "fix"]);
    refused(&run(&stage, &["--request", "300Mi"]), &["256 MiB", "fix"]);
    // Guarantees are promises: their sum must fit.
    let mut first = stage.run(&["--request", "160Mi"]);
    first.hold("a", Bytes::mib(8), 1);
    refused(&run(&stage, &["--request", "160Mi"]), &["fix"]);
    assert_eq!(first.wrong("a", 1), 0);
}

#[test]
fn programs_that_cannot_run() {
    let stage = Stage::new(Options::default());
    let missing = output(stage.run_command(&[], Path::new("/no/such/program")));
    assert_eq!(
        missing.status.code(),
        Some(127),
        "{}",
        String::from_utf8_lossy(&missing.stderr)
    );
    let folder = output(stage.run_command(&[], Path::new("/tmp")));
    assert_eq!(
        folder.status.code(),
        Some(126),
        "{}",
        String::from_utf8_lossy(&folder.stderr)
    );
    let mut exits = stage.run_command(&[], Path::new("/bin/sh"));
    exits.args(["-c", "exit 37"]);
    assert_eq!(output(exits).status.code(), Some(37), "the program's own status");
}

/// A copy of the layer, spoiled by `change`.
fn spoiled(stage: &Stage, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = std::fs::read(&Artefacts::get().layer).unwrap();
    change(&mut bytes);
    let path = stage.folder().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn bug_007_a_library_that_the_loader_would_ignore_is_refused_before() {
    let stage = Stage::new(Options::default());
    let run_with = |library: &Path| {
        let mut command = stage.run_command(&[], Path::new("/bin/true"));
        command.env("EBB_LIB", library);
        output(command)
    };
    refused(
        &run_with(Path::new("/no/such/libebb.so")),
        &["/no/such/libebb.so", "fix"],
    );
    refused(
        &run_with(&spoiled(&stage, "empty.so", Vec::clear)),
        &["empty.so", "fix"],
    );
    refused(
        &run_with(&spoiled(&stage, "short.so", |b| b.truncate(b.len() / 2))),
        &["short.so", "fix"],
    );
    refused(
        &run_with(&spoiled(&stage, "text.so", |b| b.fill(b'x'))),
        &["text.so", "fix"],
    );
    refused(
        &run_with(&spoiled(&stage, "narrow.so", |b| b[4] = 1)),
        &["narrow.so", "fix"],
    ); // 32-bit
    refused(
        &run_with(&spoiled(&stage, "foreign.so", |b| b[18] = 0xf3)),
        &["foreign.so", "fix"],
    ); // another processor
}

#[test]
fn no_gpu_and_no_driver() {
    let stage = Stage::new(Options::default());
    let mut command = stage.run_command(&["--gpu", "real"], Path::new("/bin/true"));
    command.env("LD_LIBRARY_PATH", "/nonexistent");
    let answer = output(command);
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("skipped: this machine has a real GPU");
    } else {
        refused(&answer, &["driver"]);
    }
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let mut stage = Stage::new(Options::default());
    let mut second = Command::new(&Artefacts::get().ebb);
    second
        .arg("daemon")
        .arg("--config")
        .arg(stage.config_path())
        .arg("--socket-dir")
        .arg(stage.socket_dir());
    stage.gpu_env(&mut second);
    refused(&output(second), &["already"]);
    assert!(stage.daemon_runs());
    stage.kill_daemon(); // leaves its sockets behind
    assert!(stage.socket_dir().join("ctl.sock").exists());
    stage.start_daemon();
}

fn daemon_with(stage: &Stage, config: &str) -> Output {
    let path = stage.folder().join("bad.toml");
    std::fs::write(&path, config).unwrap();
    let mut command = Command::new(&Artefacts::get().ebb);
    command
        .arg("daemon")
        .arg("--config")
        .arg(path)
        .arg("--socket-dir")
        .arg(stage.folder().join("other"));
    stage.gpu_env(&mut command);
    output(command)
}

#[test]
fn bug_106_an_arena_larger_than_memory_is_refused_with_the_figures() {
    let stage = Stage::without_daemon(Options::default());
    refused(
        &daemon_with(&stage, "[arena]\nbudget = \"900Ti\"\n"),
        &["arena", "900 TiB", "fix"],
    );
    refused(
        &daemon_with(&stage, "[arena]\nbudget = \"a lot\"\n"),
        &["bad.toml", "a lot"],
    );
    refused(
        &daemon_with(&stage, "[arena]\nbugdet = \"1Gi\"\n"),
        &["bugdet", "budget"],
    );
    refused(&daemon_with(&stage, "[arena\n"), &["bad.toml"]);
}

#[test]
fn settings_without_an_end() {
    let stage = Stage::without_daemon(Options::default());
    let mut command = Command::new(&Artefacts::get().ebb);
    command.args(["daemon", "--config", "/dev/zero", "--socket-dir"]);
    command.arg(stage.folder().join("other"));
    stage.gpu_env(&mut command);
    refused(&output(command), &["/dev/zero", "1 MiB"]);
}

#[test]
fn a_socket_folder_that_cannot_be_used() {
    let stage = Stage::without_daemon(Options::default());
    let ebb = &Artefacts::get().ebb;
    let mut command = Command::new(ebb);
    let long = stage.folder().join("x".repeat(120));
    command.arg("daemon").arg("--socket-dir").arg(&long);
    stage.gpu_env(&mut command);
    refused(&output(command), &["fix"]);
    let file = stage.folder().join("file");
    std::fs::write(&file, "").unwrap();
    let mut command = Command::new(ebb);
    command.arg("daemon").arg("--socket-dir").arg(&file);
    stage.gpu_env(&mut command);
    refused(&output(command), &["file"]);
}

#[test]
fn words_that_are_no_task() {
    let stage = Stage::new(Options::default());
    for words in [["pause", "t99"], ["resume", "nobody"]] {
        let mut command = Command::new(&Artefacts::get().ebb);
        command.args(words).env("EBB_SOCKET_DIR", stage.socket_dir());
        refused(&output(command), &[words[1], "ebb ps"]);
    }
    let mut command = Command::new(&Artefacts::get().ebb);
    command
        .args(["doctor", "1"])
        .env("EBB_SOCKET_DIR", stage.socket_dir());
    let answer = output(command);
    assert!(!answer.status.success() && answer.stderr.starts_with(b"error: "));
}

#[test]
fn a_full_disk_under_the_event_log_stops_nothing() {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: this system has no /dev/full");
        return;
    }
    let mut stage = Stage::without_daemon(Options::default());
    std::os::unix::fs::symlink("/dev/full", stage.folder().join("state/events.jsonl")).unwrap();
    stage.start_daemon();
    let mut program = stage.run(&[]);
    program.hold("a", Bytes::mib(16), 1);
    assert_eq!(program.wrong("a", 1), 0);
    assert!(stage.daemon_runs());
}
