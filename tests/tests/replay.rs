//! A daemon's event log, recorded while programs fight for a card, gives the same decisions when it is replayed.

use std::path::Path;
use std::process::{Command, Output};

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Artefacts, Options, Reply, Stage, eventually};

fn simulate(log: &Path, json: bool) -> Output {
    let mut command = Command::new(&Artefacts::get().ebb);
    command.arg("simulate").arg("--log").arg(log);
    if json {
        command.arg("--json");
    }
    command.output().expect("ebb runs")
}

fn report(log: &Path) -> serde_json::Value {
    let output = simulate(log, true);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).expect("an object")
}

#[test]
fn the_log_of_a_daemon_under_pressure_replays_bit_for_bit() {
    let mut stage = Stage::new(Options {
        config: "[policy]\nmin_turn = \"50ms\"\n".into(),
        ..Options::default()
    });
    let flags: [&[&str]; 4] = [
        &["--name", "a", "--priority", "high"],
        &["--name", "b", "--limit", "200Mi"],
        &["--name", "c", "--idle-release", "1s"],
        &["--name", "d", "--request", "40Mi"],
    ];
    let mut programs = flags.map(|flags| stage.run(flags));
    for (n, program) in programs.iter_mut().enumerate() {
        program.send(&format!("alloc m {}", 150 << 20));
        program.send(&format!("fill m {n}"));
        for _ in 0..6 {
            program.send(&format!("check m {n}"));
        }
    }
    for program in &mut programs {
        assert!(matches!(program.answer(), Reply::Ok(_)));
        assert!(matches!(program.answer(), Reply::Ok(_)));
        for _ in 0..6 {
            assert_eq!(program.answer(), Reply::Ok("0".into()));
        }
    }
    // What people do stands in it as well; and one dies.
    let done = |answer: Answer| assert!(!matches!(answer, Answer::Error(_)), "{answer:?}");
    done(stage.ask(&Request::Pause {
        task: "a".into(),
        wait_ms: Some(30_000),
    }));
    done(stage.ask(&Request::Resume { task: "a".into() }));
    let [mut a, mut b, c, mut d] = programs;
    drop(c);
    assert_eq!(a.wrong("m", 0), 0);
    assert_eq!(b.wrong("m", 1), 0);
    assert_eq!(d.wrong("m", 3), 0);
    for program in [a, b, d] {
        assert!(program.finish().success());
    }
    stage.wait_until_empty();
    // It is written in the background: all of it is there when the last program's end is.
    let log = stage.folder().join("state/events.jsonl");
    let text = eventually("the log has the end", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let ended = text.matches("\"event\":\"task_removed\"").count();
        if ended == 4 {
            Ok(text)
        } else {
            Err(format!("{ended} ends"))
        }
    });
    stage.kill_daemon();
    assert!(
        text.matches("\"action\":\"reclaim\"").count() > 4,
        "there was pressure"
    );
    let whole = report(&log);
    assert!(whole["steps"].as_u64() > Some(50), "{whole}");
    let rest = (&whole["skipped"], &whole["missing"], &whole["diverged_at_line"]);
    assert_eq!(
        rest,
        (&0.into(), &serde_json::Value::Null, &serde_json::Value::Null),
        "{whole}"
    );

    // Another decision in it is found, and a log that cannot be read is said to be one.
    let forged = text.replacen("\"action\":\"reclaim\"", "\"action\":\"cancel_reclaim\"", 1);
    std::fs::write(&log, forged).unwrap();
    let output = simulate(&log, false);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("recorded"), "{said}");
    let behind: String = text.lines().skip(9).map(|line| format!("{line}\n")).collect();
    std::fs::write(&log, behind).unwrap();
    let output = simulate(&log, false);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("the beginning is missing"),
        "{said}"
    );
    let damaged = text.replacen("\"record\":\"step\"", "\"record\":\"st", 1);
    std::fs::write(&log, damaged).unwrap();
    let output = simulate(&log, false);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && said.contains("is no record of an event log"),
        "{said}"
    );
}
