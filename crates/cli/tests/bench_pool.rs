//! `ebb bench pool` as its users call it.

mod common;

use std::path::{Path, PathBuf};

use common::{ebb, stderr, stdout};

fn trace(name: &str) -> String {
    format!("{}/tests/traces/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn json_is_an_object_for_each_trace_and_policy() {
    let folder = tempfile::tempdir().unwrap();
    let (steps, plan) = (trace("steps.csv"), trace("plan.csv"));
    let args = [
        "bench",
        "pool",
        "--json",
        "--policy",
        "best-fit,buddy",
        "--trace",
        &steps,
        &plan,
    ];
    let output = ebb(folder.path(), &args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let rows: Vec<serde_json::Value> = serde_json::from_str(&stdout(&output)).unwrap();
    let told: Vec<_> = rows
        .iter()
        .map(|row| (row["trace"].as_str().unwrap(), row["policy"].as_str().unwrap()))
        .collect();
    assert_eq!(
        told,
        [
            (steps.as_str(), "best-fit"),
            (steps.as_str(), "buddy"),
            (plan.as_str(), "best-fit"),
            (plan.as_str(), "buddy")
        ]
    );
    let keys: Vec<_> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    let expected = [
        "trace",
        "policy",
        "peak_live_bytes",
        "peak_physical_bytes",
        "map_calls",
        "ns_per_op",
    ];
    assert_eq!(keys, expected);
    assert_eq!(rows[0]["peak_live_bytes"], 4_194_304 + 1_000 + 6_291_456);
    // A unit of the plan is a granule: 3 + 4 at the peak, one behind the other.
    assert_eq!(
        (&rows[2]["peak_live_bytes"], &rows[2]["peak_physical_bytes"]),
        (&(7 * 2_097_152).into(), &(7 * 2_097_152).into())
    );
    assert!(rows[3]["ns_per_op"].as_f64().unwrap() > 0.0);
}

#[test]
fn every_policy_is_there_for_people() {
    let folder = tempfile::tempdir().unwrap();
    let page: PathBuf = folder.path().join("page.html");
    let steps = trace("steps.csv");
    let args = [
        "bench",
        "pool",
        "--trace",
        &steps,
        "--interleave",
        "1",
        "--html",
        page.to_str().unwrap(),
    ];
    let output = ebb(folder.path(), &args).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let text = stdout(&output);
    for policy in ["best-fit", "first-fit", "buddy", "pytorch", "pytorch-expandable"] {
        assert!(text.contains(policy), "{text}");
    }
    assert!(text.contains("jobs in 24 h, of 1 traces"), "{text}");
    assert!(std::fs::read_to_string(page).unwrap().contains("<svg"));
}

#[test]
fn what_cannot_be_read_is_said_and_how_to_mend_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| -> String {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let nowhere = Path::new("/nowhere/trace.csv").to_str().unwrap().to_owned();
    let cases = [
        (nowhere, "/nowhere/trace.csv: No such file", "fix: check --trace"),
        (
            file("a.csv", b"id,lower,upper,size\n0,4,3,1\n"),
            "line 2: upper is `3`",
            "fix: mend the file",
        ),
        (
            file("b.csv", b"what,is,this\n"),
            "it begins with `what,is,this`",
            "fix: docs/pool-traces.md",
        ),
        (
            file("c.pickle", b"cos\nsystem\n(S'true'\ntR."),
            "byte 0: GLOBAL refused",
            "fix: mend the file",
        ),
        (
            file("d.csv", b"id,lower,upper,size\n"),
            "nothing happens in it",
            "fix: leave it out",
        ),
    ];
    for (path, what, fix) in cases {
        let output = ebb(folder.path(), &["bench", "pool", "--trace", &path])
            .output()
            .unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(what) && text.contains(fix), "{text}");
    }
    let output = ebb(folder.path(), &["bench", "pool"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
