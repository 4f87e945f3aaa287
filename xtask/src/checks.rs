//! `cargo xtask test`: everything that has to pass, cheapest first, and a summary.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::layout::sim_links;
use crate::metadata::{Workspace, root, workspace};
use crate::shell::{cargo, program, quietly, run};
use crate::{layering, machine, tidy};

/// A script that drives the simulated GPU through bindings that we did not write.
const PYTHON_CLIENT: &str = "crates/simgpu/tests/python/sim_cuda_bindings.py";

/// Where property tests take their seed from; without it each run has its own.
const RNG_SEED: &str = "PROPTEST_RNG_SEED";

/// The packages with property tests.
const PROPERTIES: [&str; 7] = [
    "ebb-units",
    "ebb-protocol",
    "ebb-alloc",
    "ebb-disk",
    "ebb-policy",
    "ebb-lab",
    "ebb-layer-core",
];

/// The steps that were run, how they ended and how long they took.
#[derive(Default)]
struct Summary {
    steps: Vec<(&'static str, bool, f64)>,
}

impl Summary {
    fn step(&mut self, name: &'static str, work: impl FnOnce() -> Result<()>) {
        eprintln!("\n==> {name}");
        let began = Instant::now();
        let result = work();
        if let Err(error) = &result {
            eprintln!("error: {error:#}");
        }
        self.steps
            .push((name, result.is_ok(), began.elapsed().as_secs_f64()));
    }

    fn failed(&self) -> usize {
        self.steps.iter().filter(|(_, good, _)| !good).count()
    }

    fn end(&self) -> ExitCode {
        println!();
        for (name, good, seconds) in &self.steps {
            println!(
                "{}  {name:<10} {seconds:7.1} s",
                if *good { "ok    " } else { "FAILED" }
            );
        }
        let failed = self.failed();
        println!("\nsteps: {} passed, {failed} failed", self.steps.len() - failed);
        if failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }
}

/// What is quick to check.
pub(crate) fn lint() -> Result<ExitCode> {
    let mut summary = Summary::default();
    quick(&mut summary, &workspace()?);
    Ok(summary.end())
}

/// What needs no compiler.
pub(crate) fn tidiness() -> Result<ExitCode> {
    let mut summary = Summary::default();
    tidy_steps(&mut summary, &workspace()?);
    Ok(summary.end())
}

fn tidy_steps(summary: &mut Summary, workspace: &Workspace) {
    summary.step("layering", || none(layering::faults(workspace)?));
    summary.step("tidy", || none(tidy::faults(workspace)?));
}

fn quick(summary: &mut Summary, workspace: &Workspace) {
    tidy_steps(summary, workspace);
    summary.step("format", || run(&mut cargo(&["fmt", "--all", "--check"])));
    summary.step("clippy", || {
        run(&mut cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ]))
    });
}

/// The property tests with new seeds until the time is up, or something fails. The seed is printed: it repeats the round.
pub(crate) fn soak(minutes: &str) -> Result<ExitCode> {
    let minutes: u64 = minutes
        .parse()
        .with_context(|| format!("`{minutes}` is no number of minutes"))?;
    let began = Instant::now();
    let first = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    for round in 0.. {
        if round > 0 && began.elapsed().as_secs() >= minutes * 60 {
            println!("rounds: {round}, none failed");
            break;
        }
        let seed = first.wrapping_add(round).to_string();
        eprintln!("\n==> round {round}: {RNG_SEED}={seed}");
        let mut tests = cargo(&["test", "--release", "--locked", "--quiet", "--lib", "--tests"]);
        for package in PROPERTIES {
            tests.args(["-p", package]);
        }
        run(tests.env(RNG_SEED, seed).env("INSTA_UPDATE", "no"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The tests of `ebb-alloc` under Miri: a case of each property. What is not installed is a failure, and said.
pub(crate) fn miri() -> Result<ExitCode> {
    // Not the toolchain that `cargo xtask` has chosen for us.
    let nightly = || {
        let mut cargo = program("cargo", &["+nightly"]);
        for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
            cargo.env_remove(name);
        }
        cargo
    };
    let (there, said) = quietly(nightly().args(["miri", "--version"]));
    if !there {
        bail!(
            "Miri cannot run, and nothing was checked: {}\n\
             rustup toolchain install nightly --component miri --component rust-src",
            said.trim()
        );
    }
    let mut tests = nightly();
    tests.args(["miri", "test", "-p", "ebb-alloc", "--lib", "--locked"]);
    // Property tests look for a seed, and write down what fails.
    tests.env("MIRIFLAGS", "-Zmiri-disable-isolation");
    run(tests.env("PROPTEST_CASES", "1"))?;
    Ok(ExitCode::SUCCESS)
}

/// Everything.
pub(crate) fn all(filter: Option<&str>) -> Result<ExitCode> {
    let workspace = workspace()?;
    let mut summary = Summary::default();
    summary.step("machine", machine::prepare);
    if filter.is_none() {
        quick(&mut summary, &workspace);
    }
    let folder = workspace.target.join("debug");
    let failed = summary.failed();
    summary.step("build", || {
        run(&mut cargo(&[
            "build",
            "--workspace",
            "--all-targets",
            "--locked",
            "--quiet",
        ]))?;
        sim_links(&folder)
    });
    if summary.failed() > failed {
        return Ok(summary.end());
    }
    let mut python = None;
    summary.step("python", || {
        python = machine::python(&workspace.target)?;
        Ok(())
    });
    summary.step("tests", || {
        // All packages, even if one has a test that fails: one run shows everything.
        let mut tests = cargo(&["test", "--workspace", "--locked", "--quiet", "--no-fail-fast"]);
        if let Some(filter) = filter {
            tests.arg(filter);
        }
        tests.env("INSTA_UPDATE", "no").env("EBB_TESTS_PREBUILT", "1");
        // What passes once passes again: chance is for `soak`.
        if std::env::var_os(RNG_SEED).is_none() {
            tests.env(RNG_SEED, "20");
        }
        run(&mut tests)
    });
    if filter.is_none() {
        if let Some(python) = &python {
            summary.step("bindings", || python_client(python, &folder));
        }
        summary.step("demo", || demo(&folder));
        summary.step("bench", || bench(&folder));
        summary.step("docs", docs);
    }
    Ok(summary.end())
}

fn none(faults: Vec<String>) -> Result<()> {
    for fault in &faults {
        eprintln!("{fault}");
    }
    if faults.is_empty() {
        Ok(())
    } else {
        bail!("{} found", faults.len())
    }
}

/// NVIDIA's own bindings take the simulated driver for the real one.
fn python_client(python: &Path, folder: &Path) -> Result<()> {
    let state = folder.join("sim-state");
    let _ = std::fs::remove_dir_all(&state);
    std::fs::create_dir_all(&state)?;
    if !root().join(PYTHON_CLIENT).is_file() {
        bail!("{PYTHON_CLIENT} is missing");
    }
    let result = run(program(python, &[PYTHON_CLIENT])
        .env("LD_LIBRARY_PATH", folder.join("sim"))
        .env("EBB_SIM_DIR", &state)
        .env_remove("CUDA_VISIBLE_DEVICES"));
    let _ = std::fs::remove_dir_all(&state);
    result
}

/// The demo on the simulated GPU: what a newcomer sees first has to work, and its last line is what programs read.
fn demo(folder: &Path) -> Result<()> {
    let mut command = Command::new(folder.join("ebb"));
    command
        .args(["demo", "--gpu", "sim", "--json"])
        .current_dir(root())
        .stderr(std::process::Stdio::inherit());
    let done = command.output().context("cannot start ebb")?;
    let text = String::from_utf8_lossy(&done.stdout);
    println!("{text}");
    if !done.status.success() {
        bail!("ebb demo ended with {}", done.status);
    }
    let last = text.lines().last().unwrap_or_default();
    let object: serde_json::Value = serde_json::from_str(last).context("the last line is no JSON object")?;
    for (name, wanted) in [
        ("finished", serde_json::json!(2)),
        ("mismatches", 0.into()),
        ("oom_without_ebb", true.into()),
    ] {
        if object[name] != wanted {
            bail!("{name} is {} and not {wanted}", object[name]);
        }
    }
    Ok(())
}

/// The measurements on the simulated GPU: not how fast, which says nothing here, but that each is made and no word is wrong.
fn bench(folder: &Path) -> Result<()> {
    bench_of(folder, &[], &["release", "restore", "launch", "alloc", "start"])?;
    let crowd = ["start", "--at-once", "4"];
    bench_of(folder, &crowd, &["start of all", "start of each"])
}

fn bench_of(folder: &Path, arguments: &[&str], wanted: &[&str]) -> Result<()> {
    let mut command = Command::new(folder.join("ebb"));
    command
        .arg("bench")
        .args(arguments)
        .args(["--gpu", "sim", "--rounds", "1", "--json"])
        .current_dir(root())
        .stderr(std::process::Stdio::inherit());
    let done = command.output().context("cannot start ebb")?;
    if !done.status.success() {
        bail!("ebb bench ended with {}", done.status);
    }
    let object: serde_json::Value = serde_json::from_slice(&done.stdout).context("no JSON object")?;
    if object["mismatches"] != 0 {
        bail!("{} words were wrong", object["mismatches"]);
    }
    let figures = object["figures"].as_array().context("no figures")?;
    for what in wanted {
        let figure = figures
            .iter()
            .find(|figure| figure["what"] == **what)
            .with_context(|| format!("{what} is missing"))?;
        for value in ["ebb", "limit", "ratio"] {
            if figure[value].as_f64().is_none_or(|value| value <= 0.0) {
                bail!("{what}: {value} is {}", figure[value]);
            }
        }
    }
    Ok(())
}

fn docs() -> Result<()> {
    // For those who work on it: nothing here is published, so private parts are documented and linked. Two steps, since
    // the command and the library have one name.
    let flags = "-D warnings -A rustdoc::private_intra_doc_links";
    for arguments in [&["--workspace", "--exclude", "ebb-cli"][..], &["-p", "ebb-cli"]] {
        let mut command = cargo(&[
            "doc",
            "--no-deps",
            "--document-private-items",
            "--locked",
            "--quiet",
        ]);
        run(command.args(arguments).env("RUSTDOCFLAGS", flags))?;
    }
    Ok(())
}
