//! The commands that ask a daemon, and those that need none.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use common::{Fake, assert_refused, ebb, oblige, refuse, stderr, stdout};
use ebb_protocol::control::{Answer, Payload, ProcessRow, Request, Snapshot};
use ebb_units::Bytes;

#[test]
fn a_listing_is_exact_as_json() {
    let mut snapshot = Snapshot::default();
    snapshot.totals.out_bytes = Bytes(123_456_789_012_345);
    let sent = snapshot.clone();
    let fake = Fake::start(move |_| Answer::Ok(Payload::List(sent.clone())));
    let output = fake.ebb(&["ps", "--json"]).output().unwrap();
    assert_eq!(
        serde_json::from_str::<Snapshot>(&stdout(&output)).unwrap(),
        snapshot
    );
    let output = fake.ebb(&["ps"]).output().unwrap();
    assert!(stdout(&output).contains("no tasks"));
    assert!(!stdout(&output).contains('\u{1b}'), "no colour in a pipe");
    let output = fake.ebb(&["ps", "--color", "always"]).output().unwrap();
    assert!(stdout(&output).contains('\u{1b}'));
}

#[test]
fn commands_on_a_task_ask_what_was_said() {
    let fake = Fake::obliging();
    for (words, wanted) in [
        (
            vec!["pause", "t3", "--wait", "2s"],
            Request::Pause {
                task: "t3".into(),
                wait_ms: Some(2000),
            },
        ),
        (vec!["resume", "train"], Request::Resume { task: "train".into() }),
        (
            vec!["limit", "4711", "40Gi"],
            Request::Limit {
                task: "4711".into(),
                limit: Some(Bytes::gib(40)),
                request: None,
                priority: None,
            },
        ),
    ] {
        let output = fake.ebb(&words).output().unwrap();
        assert_eq!(stdout(&output), "done\n", "{}", stderr(&output));
        assert_eq!(fake.heard().last(), Some(&wanted));
    }
    let output = fake.ebb(&["pause", "t3", "--json"]).output().unwrap();
    assert_eq!(stdout(&output), "{\"message\":\"done\"}\n");
    assert_refused(&fake.ebb(&["limit", "t3"]).output().unwrap(), &[]);
    assert_refused(
        &fake
            .ebb(&["limit", "t3", "1Gi", "--request", "2Gi"])
            .output()
            .unwrap(),
        &["request"],
    );
}

#[test]
fn a_refusal_has_its_fix_and_its_status() {
    let fake = Fake::start(|_| refuse("no task is called t9", "`ebb ps` lists them", true));
    assert_refused(&fake.ebb(&["pause", "t9"]).output().unwrap(), &["t9", "ebb ps"]);
    let fake = Fake::start(|_| refuse("t3 is busy", "try again", false));
    let output = fake.ebb(&["pause", "t3"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "error: t3 is busy\n  fix: try again\n");
}

#[test]
fn doctor_shows_a_process_whose_library_does_not_answer() {
    let row = ProcessRow {
        pid: 4711,
        program: "x".into(),
        device: None,
        state: "active".into(),
        why: String::new(),
        since_ms: 1,
        allocated: Bytes::gib(1),
        resident: Bytes::gib(1),
        evicted: Bytes::ZERO,
        lodged: Bytes::ZERO,
        on_disk: Bytes::ZERO,
        cached: Bytes::ZERO,
        managed: Bytes::ZERO,
        managed_out: Bytes::ZERO,
        pinned: Bytes::ZERO,
        overhead: Bytes::ZERO,
        unseen: Bytes::ZERO,
        lease: Bytes::gib(1),
        releases: 0,
        restores: 0,
    };
    let fake = Fake::start(move |request| match request {
        Request::Doctor { pid: 4711 } => Answer::Ok(Payload::Doctor {
            process: row.clone(),
            report: None,
        }),
        other => oblige(other),
    });
    let output = fake.ebb(&["doctor", "4711"]).output().unwrap();
    assert!(
        stdout(&output).contains("1 073 741 824") && stdout(&output).contains("did not answer"),
        "{}",
        stdout(&output)
    );
    let output = fake.ebb(&["doctor", "--json"]).output().unwrap();
    let checks: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    let daemon = checks["checks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|check| check["what"] == "daemon")
        .unwrap();
    assert_eq!(daemon["verdict"], "good");
}

#[test]
fn no_daemon_and_a_dead_ones_socket_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let output = ebb(folder.path(), &["ps"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: no daemon runs\n  fix: "));
    drop(UnixListener::bind(folder.path().join("ctl.sock")).unwrap());
    assert_refused(
        &ebb(folder.path(), &["ps"]).output().unwrap(),
        &["ctl.sock", "left there"],
    );
    let long = folder.path().join("x".repeat(120));
    std::fs::create_dir(&long).unwrap();
    assert_refused(&ebb(&long, &["ps"]).output().unwrap(), &["too long"]);
}

#[test]
fn a_daemon_that_breaks_off_or_talks_nonsense_is_an_error_and_no_panic() {
    for said in [
        &b""[..],
        b"{}\n",
        b"nonsense\n",
        b"{\"ok\":{\"kind\":\"done\",\"message\":\"x\"}}\n",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("ctl.sock")).unwrap();
        let speaker = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut byte = [0];
            let _ = stream.read(&mut byte);
            let _ = stream.write_all(said);
        });
        let output = ebb(folder.path(), &["ps"]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).starts_with("error: "), "{}", stderr(&output));
        speaker.join().unwrap();
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let fake = Fake::obliging();
    for words in [
        vec!["top", "--json"],
        vec!["completions", "bash"],
        vec!["ps"],
        vec!["man"],
    ] {
        let mut command = fake.ebb(&words);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(stderr(&output), "", "{words:?}");
        assert!(output.status.success(), "{words:?}: {}", output.status);
    }
}

#[test]
fn top_wants_a_terminal_or_json() {
    let fake = Fake::obliging();
    assert_refused(&fake.ebb(&["top"]).output().unwrap(), &["--json"]);
}

#[test]
fn every_command_explains_itself() {
    let folder = tempfile::tempdir().unwrap();
    let commands = [
        "run",
        "ps",
        "top",
        "pause",
        "resume",
        "limit",
        "doctor",
        "demo",
        "bench",
        "daemon",
        "install",
        "completions",
        "man",
        "version",
    ];
    for command in commands {
        let output = ebb(folder.path(), &[command, "--help"]).output().unwrap();
        assert!(output.status.success());
        assert!(stdout(&output).contains("Examples:"), "{command}");
    }
    let output = ebb(folder.path(), &["version", "--json"]).output().unwrap();
    let version: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert!(version["daemon"].is_null());
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = ebb(folder.path(), &["completions", shell]).output().unwrap();
        assert!(
            output.status.success() && stdout(&output).contains("idle-release"),
            "{shell}"
        );
    }
}
