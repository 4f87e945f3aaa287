//! The whole suite on the simulated GPU: plain, under ebb, with an eviction between every two calls, and strict. It
//! fails on a disagreement that is not on the list of known ones, and on one on that list that is none any more.

#![forbid(unsafe_code)]

use std::process::Command;

use serde_json::Value;

#[test]
fn every_behaviour_is_the_same_in_all_ways() {
    // Builds the command, the library and the simulated GPU beside our program, if nobody has.
    let _built = ebb_tests::Artefacts::get();
    let output = Command::new(env!("CARGO_BIN_EXE_ebb-conformance"))
        .args(["--sim", "--json", "--jobs", "3", "--limit", "60"])
        .output()
        .expect("the suite starts");
    let said = String::from_utf8_lossy(&output.stderr);
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("no report ({e}):\n{said}"));
    if !output.status.success() {
        for result in report["results"].as_array().into_iter().flatten() {
            for (mode, run) in result["modes"].as_object().into_iter().flatten() {
                if run["verdict"] == "failed" && run["known"].is_null() {
                    println!(
                        "{} {mode}: {run}\n  plain: {}",
                        result["name"], result["modes"]["plain"]
                    );
                }
            }
        }
        panic!("the suite disagrees:\n{said}");
    }
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let (behaviours, evictions) = (number(&report["behaviours"]), &report["evictions"]);
    println!(
        "{behaviours} behaviours, {} ms, evictions {evictions}",
        longest(&report)
    );
    // The mode with evictions is worth something only if memory really left the card, in most of those that hold some.
    assert!(number(&evictions["behaviours"]) * 3 > behaviours, "{evictions}");
    assert!(number(&evictions["releases"]) > behaviours, "{evictions}");
}

#[test]
fn behaviours_that_share_a_process_see_the_same() {
    let _built = ebb_tests::Artefacts::get();
    let output = Command::new(env!("CARGO_BIN_EXE_ebb-conformance"))
        .args(["--sim", "--json", "--jobs", "2", "--limit", "60", "--batch", "6"])
        .args(["--only", "vmm.*", "--only", "free.*", "--only", "context.*"])
        .output()
        .expect("the suite starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let results = report["results"].as_array().expect("a list");
    let names: std::collections::HashSet<&str> = results.iter().filter_map(|r| r["name"].as_str()).collect();
    assert_eq!(names.len(), results.len(), "each once");
    let together = |result: &&Value| result["together"] == true;
    assert!(results.iter().filter(together).count() * 2 > results.len());
    // What is known to fail was run by itself, and so was what is about contexts.
    for result in results.iter().filter(together) {
        assert!(
            !result["name"].as_str().unwrap_or("").starts_with("context."),
            "{result}"
        );
        for (_, run) in result["modes"].as_object().into_iter().flatten() {
            assert_eq!(run["verdict"], "passed", "{result}");
        }
    }
}

/// The time of the slowest run.
fn longest(report: &Value) -> u64 {
    report["results"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|result| result["modes"].as_object().into_iter().flatten())
        .filter_map(|(_, run)| run["ms"].as_u64())
        .max()
        .unwrap_or(0)
}
