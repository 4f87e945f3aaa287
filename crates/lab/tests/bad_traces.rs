//! Traces that are not as they should be: each is refused with the file, the line and what is wrong, and none makes a reader panic or a
//! simulation without end.

use std::path::Path;

use ebb_lab::read::{finish, gentd, jobs};
use ebb_lab::{keep, serving, traces};
use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

const MEMORY: &str = "pod_gpu_memory_used_bytes_anon.csv";
const DUTY: &str = "pod_gpu_duty_cycle_anon.csv";
const REQUESTS: &str = "lora_request_trace.csv";
const SAMPLES: &str = "timestamp_anon,value,container_ip\n0,1000,a\n60,2000,a\n120,1000,b\n180,50,b\n";
const ASKED: &str = "gmt_create,predict_status,exec_time_seconds,groupId,checkpoint_model_version_id\n\
    2024-11-15 16:57:50,SUCCEED,3.5,g,m\n2024-11-15 17:57:50,SUCCEED,1,g,n\n2024-11-15 18:57:50,FAILED,,g,\n";
const GANGS: &str =
    "t\tc\td\t-n\t1\t10\t2\tstatic\t1\t-1\t100\t5\nt\tc\td\t-n\t1\t10\t1\tstatic\t1\t-1\t50\t9\n";

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

/// What reading a recording with this table of memory says.
fn memory(text: &str) -> String {
    let dir = folder(&[(MEMORY, text), (DUTY, SAMPLES)]);
    gentd::recording(dir.path()).map_or_else(|e| e.to_string(), |r| format!("{} steps", r.steps))
}

fn requests(text: &str) -> String {
    let dir = folder(&[(REQUESTS, text)]);
    gentd::requests(dir.path()).map_or_else(|e| e.to_string(), |r| format!("{} requests", r.len()))
}

fn gangs(text: &str) -> String {
    let dir = folder(&[("a.trace", text)]);
    finish::jobs(&dir.path().join("a.trace")).map_or_else(|e| e.to_string(), |r| format!("{} jobs", r.len()))
}

#[track_caller]
fn says(said: &str, end: &str) {
    assert!(said.ends_with(end), "{said}\ninstead of\n{end}");
}

#[test]
fn a_recording_is_refused_with_file_line_and_reason() {
    says(&memory(SAMPLES), "4 steps");
    let row = |row: &str| memory(&format!("timestamp_anon,value,container_ip\n0,1,a\n{row}\n"));
    says(
        &memory(""),
        "anon.csv, line 1: the file is empty; column `timestamp_anon` is wanted",
    );
    says(
        &memory("time,value,container_ip\n"),
        "anon.csv, line 1: no column `timestamp_anon`; there are time, value, container_ip",
    );
    says(
        &memory("timestamp_anon,value,container_ip\n"),
        "anon.csv: no sample of a container in it",
    );
    says(
        &row("-60,1,a"),
        "anon.csv, line 3: a time of -60: expected one from 0 to 100000000000",
    );
    says(
        &row("1e300,1,a"),
        &format!(
            "line 3: a time of 1{}: expected one from 0 to 100000000000",
            "0".repeat(300)
        ),
    );
    says(
        &row("60,-1,a"),
        "line 3: a value of -1: expected one from 0 to 1125899906842624",
    );
    says(&row("60,x,a"), "line 3: expected a number, found `x`");
    says(&row("60,inf,a"), "line 3: expected a number, found `inf`");
    says(&row("60,1"), "line 3: expected 3 values, found 2");
    says(&row("60,1,a,7"), "line 3: expected 3 values, found 4");
    // Nothing there is no error, and the order does not matter.
    says(&row("60,NaN,a"), "1 steps");
    says(
        &memory("timestamp_anon,value,container_ip\n120,1,a\n0,1,a\n60,1,a\n"),
        "3 steps",
    );
    // One wrong time among many would be a grid without end.
    let text = format!("{SAMPLES}90000000000,5,b\n");
    says(
        &memory(&text),
        "mostly 60 s after each other: is one of the times wrong?",
    );
}

#[test]
fn requests_are_refused_with_file_line_and_reason() {
    says(&requests(ASKED), "2 requests");
    let row = |at: &str, took: &str| {
        let head = ASKED.lines().next().unwrap();
        requests(&format!("{head}\n1000,SUCCEED,1,g,m\n{at},SUCCEED,{took},g,m\n"))
    };
    says(
        &row("-5", "1"),
        "line 3: a time of -5: expected one from 0 to 100000000000",
    );
    says(
        &row("2000", "-1"),
        "line 3: a duration of -1: expected one from 0 to 2592000",
    );
    says(&row("2000", "1e30"), "expected one from 0 to 2592000");
    says(
        &row("noon", "1"),
        "line 3: expected a time such as 2024-11-15 16:57:50, found `noon`",
    );
    says(
        &row("2024-11-15 16:57:50", "1"),
        "days apart, more than 400: is one of the times wrong?",
    );
    says(
        &requests(ASKED.lines().next().unwrap()),
        "trace.csv: no request in it that was answered (`SUCCEED`)",
    );
}

#[test]
fn trainings_run_times_and_jobs_are_refused_with_file_line_and_reason() {
    let training = |text: &str| {
        let dir = folder(&[("single_data.csv", text)]);
        jobs::trainings(dir.path()).map_or_else(|e| e.to_string(), |r| format!("{} trainings", r.len()))
    };
    says(&training("gpu_util,gmem\n50,1000\n"), "1 trainings");
    says(&training("gpu_util,gmem\n"), "single_data.csv: no training in it");
    says(
        &training("gpu_util,gmem\n150,1000\n"),
        "line 2: a gpu_util of 150: expected one from 0 to 100",
    );
    says(
        &training("gpu_util,gmem\n50,-1\n"),
        "line 2: a gmem of -1: expected one from 0 to 1000000000",
    );
    says(&training("gpu_util,gmem\n50,\n"), "line 2: no gmem");
    says(&gangs(GANGS), "2 jobs");
    says(&gangs(""), "a.trace: no job in it");
    says(&gangs("a\tb\n"), "a.trace, line 1: expected 12 columns, found 2");
    says(
        &gangs(&GANGS.replace("\t100\t", "\t1e12\t")),
        "line 1: a duration of 1000000000000: expected one from 0 to 1000000000",
    );
    says(
        &gangs(&GANGS.replace("\t100\t", "\t-3\t")),
        "line 1: a duration of -3: expected one from 0 to 1000000000",
    );
}

#[test]
fn a_packed_file_that_is_cut_says_so() {
    use std::io::Write;
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(SAMPLES.as_bytes()).unwrap();
    for n in 0..20_000 {
        writeln!(gz, "{},{},c{}", 240 + 60 * n, n * n, n % 7).unwrap();
    }
    let packed = gz.finish().unwrap();
    let dir = folder(&[(DUTY, SAMPLES)]);
    let path = dir.path().join(format!("{MEMORY}.gz"));
    std::fs::write(&path, &packed).unwrap();
    assert!(gentd::recording(dir.path()).is_ok());
    std::fs::write(&path, &packed[..packed.len() / 2]).unwrap();
    let said = gentd::recording(dir.path()).unwrap_err().to_string();
    says(&said, "the packed file ends too early; fetch it anew");
    let mut damaged = packed;
    let middle = damaged.len() / 2;
    damaged[middle..middle + 40].fill(0xff);
    std::fs::write(&path, &damaged).unwrap();
    let said = gentd::recording(dir.path()).unwrap_err().to_string();
    assert!(said.contains("anon.csv.gz, line "), "{said}");
}

/// Jobs years apart, none at times, more cards than there are: all of it ends.
#[test]
fn long_breaks_take_no_time() {
    let job = |arrives: f64, cards: usize| finish::GangJob {
        arrives,
        seconds: 10.0,
        cards,
    };
    let all = [job(5.0, 1), job(999_999_990.0, 2), job(0.0, 64)];
    let out = ebb_lab::finish::run(&all, &ebb_lab::finish::Plan::default());
    assert_eq!(out.ratios.len(), 2);
    assert!(
        (out.makespan - (999_999_990.0 + 12.0 - 5.0)).abs() < 1e-3,
        "{out:?}"
    );
}

/// A trace with some bytes changed is read or refused, and what is read can be simulated.
#[test]
fn changed_bytes_are_read_or_refused() {
    let mut rng = Pcg64::seed_from_u64(11);
    let mut below = |n: usize| usize::try_from(rng.next_u64() % n as u64).unwrap();
    let mut read = 0;
    for _ in 0..400 {
        let mut change = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..1 + below(3) {
                let at = below(bytes.len());
                match below(3) {
                    0 => bytes[at] = b"09-.,\ne\"N\xff\t "[below(12)],
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, b"0123456789"[below(10)]),
                }
            }
            bytes
        };
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at(MEMORY), change(SAMPLES)).unwrap();
        std::fs::write(at(DUTY), change(SAMPLES)).unwrap();
        std::fs::write(at(REQUESTS), change(ASKED)).unwrap();
        std::fs::write(at("a.trace"), change(GANGS)).unwrap();
        let _ = traces::recognise(dir.path());
        if let Ok(recording) = gentd::recording(dir.path())
            && recording.steps < 10_000
        {
            read += 1;
            let _ = serving::serve(&recording, &serving::Setting::default());
        }
        if let Ok(requests) = gentd::requests(dir.path())
            && requests.iter().all(|r| r.at + r.took < 3e5)
        {
            read += 1;
            let _ = keep::compare(&requests);
        }
        read += usize::from(finish::jobs(Path::new(&at("a.trace"))).is_ok());
    }
    assert!(read > 60, "{read} of 1200 could be read");
}
