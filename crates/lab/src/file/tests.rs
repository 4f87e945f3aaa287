use super::*;
use crate::cluster;

fn parsed(text: &str) -> Result<Scenario, String> {
    parse(text, Path::new("a.toml"), None).map_err(|e| e.to_string())
}

const PLAIN: &str = r#"
title = "Two"
policies = ["ebb", "slices 10s"]

[cluster]
memory = "40Gi"
idle_release = "off"

[costs]
one_way = "50G"

[[job]]
name = "train"
priority = "low"
limit = "32Gi"
repeat = 3
phase = [{ for = "2s", memory = "30Gi", gpu = 0.9 }, { for = "500ms", memory = "30Gi" }]

[[job]]
name = "serve"
count = 2
arrives = "1s"
every = "10s"
by_clock = true
jitter = 0.5
repeat = 4

[[job.phase]]
for = "1s"
memory = "8Gi"
gpu = 0.5
"#;

#[test]
fn a_file_is_read_as_it_says() {
    let s = parsed(PLAIN).unwrap();
    assert_eq!((s.title.as_str(), s.jobs.len(), s.setting.cards), ("Two", 3, 1));
    assert_eq!(s.policies, [Policy::Ebb, Policy::Slices(10.0)]);
    assert_eq!(s.setting.idle_release, None);
    assert!((s.setting.speeds.both_ways - 94e9 / 55e9 * 50e9).abs() < 1.0);
    assert_eq!((s.jobs[0].phases.len(), s.jobs[0].seconds()), (6, 7.5));
    assert_eq!(s.jobs[2].name, "serve 2");
    assert_eq!(s.jobs[2].arrives, 11.0);
    assert!(s.jobs[1].by_clock && s.jobs[1].phases.iter().all(|p| (0.5..=1.5).contains(&p.seconds)));
    let again = parsed(PLAIN).unwrap();
    assert_eq!(s.jobs, again.jobs, "what is random comes from the seed");
    let other = parse(PLAIN, Path::new("a.toml"), Some(7)).unwrap();
    assert_ne!(s.jobs[1], other.jobs[1]);
    let out = cluster::run(&s.jobs, &s.setting, Policy::Ebb);
    assert_eq!(out.failed(), 0);
}

#[test]
fn what_is_wrong_is_named_with_line_and_column() {
    for (from, to, place, what) in [
        (
            "memory = \"40Gi\"",
            "memory = \"40Qi\"",
            "line 6, column 10",
            "40Qi",
        ),
        (
            "memory = \"40Gi\"",
            "memori = \"40Gi\"",
            "line 6, column 1",
            "memori",
        ),
        ("gpu = 0.9", "gpu = 1.9", "line 17, column 47", "1.9 is no part"),
        (
            "\"slices 10s\"",
            "\"sliced 10s\"",
            "line 3, column 20",
            "`sliced 10s` is no policy",
        ),
        (
            "priority = \"low\"",
            "priority = \"lowest\"",
            "line 14, column 12",
            "lowest",
        ),
        (
            "for = \"500ms\"",
            "for = \"5 parsecs\"",
            "line 17, column 62",
            "is not a time",
        ),
        ("count = 2", "count = 0", "line 21, column 9", "0 is no count"),
        (
            "limit = \"32Gi\"",
            "limit = \"16Gi\"",
            "line 12, column 1",
            "more than its limit",
        ),
        (
            "memory = \"8Gi\"",
            "memory = \"80Gi\"",
            "line 19, column 1",
            "more than a card of 40 GiB",
        ),
        ("[cluster]", "[cluster", "line 5, column 9", ""),
    ] {
        assert!(PLAIN.contains(from), "{from}");
        let error = parsed(&PLAIN.replacen(from, to, 1)).unwrap_err();
        assert!(error.starts_with("a.toml, line "), "{error}");
        assert!(error.contains(place) && error.contains(what), "{to}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let error = parsed("[cluster]\nmemory = \"1Gi\"\n").unwrap_err();
    assert!(error.contains("no [[job]]"), "{error}");
}

#[test]
fn a_trace_gives_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let traces = dir.path().join("t");
    std::fs::create_dir(&traces).unwrap();
    std::fs::write(
        traces.join("single_data.csv"),
        "model,gpu_util,gmem\na,50,1000\nb,90,2000\n",
    )
    .unwrap();
    let text = |trace: &str| {
        format!(
            "[cluster]\nmemory = \"16Gi\"\n[[job]]\nname = \"t\"\ncount = 5\nwindow = \"10m\"\ntrace = \"{trace}\"\n"
        )
    };
    let path = dir.path().join("s.toml");
    let s = parse(&text("t"), &path, None).unwrap();
    assert_eq!(s.jobs.len(), 5);
    assert!(
        s.jobs
            .iter()
            .all(|j| j.seconds() == 600.0 && [0.5, 0.9].contains(&j.phases[0].duty))
    );
    let error = parse(&text("u"), &path, None).unwrap_err().to_string();
    assert!(
        error.contains("line 7, column 9") && error.contains("no trace that is known"),
        "{error}"
    );
}

/// The files that the documentation shows are right, and show what they say.
#[test]
fn the_examples_run() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/scenarios");
    let mut ran = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "toml") {
            continue;
        }
        let mut s = read(&path, None).unwrap();
        // The large one is for showing off.
        if s.setting.cards > 100 {
            s.setting.cards = 20;
            s.jobs.truncate(60);
        }
        for policy in &s.policies {
            let out = cluster::run(&s.jobs, &s.setting, *policy);
            assert_eq!(out.failed(), 0, "{}, {policy}", path.display());
        }
        ran += 1;
    }
    assert!(ran >= 3, "{ran} examples");
}
