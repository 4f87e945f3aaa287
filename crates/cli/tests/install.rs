//! `ebb install`: what it writes works from where it is, and replaces nothing in place.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use common::{Fake, assert_refused, library, stderr, stdout};

#[test]
fn an_installed_copy_finds_its_library_and_its_manual() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let prefix = fake.folder.path().join("prefix");
    let install = || {
        let mut command = fake.ebb(&["install", "--prefix", prefix.to_str().unwrap(), "--json"]);
        let output = command.env("EBB_LIB", &lib).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let written: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
        written["written"].as_array().unwrap().len()
    };
    assert!(install() >= 3);
    let installed = prefix
        .join("lib/ebb")
        .join(env!("CARGO_PKG_VERSION"))
        .join("libebb.so");
    let command = prefix.join("bin/ebb");
    assert_eq!(
        std::fs::metadata(&command).unwrap().permissions().mode() & 0o777,
        0o755
    );
    assert!(prefix.join("share/man/man1/ebb-run.1").is_file());

    let mut run = Command::new(&command);
    run.args(["run", "--allow-no-gpu", "--", "sh", "-c", "echo $LD_PRELOAD"]);
    run.env("EBB_SOCKET_DIR", fake.folder.path())
        .env_remove("LD_PRELOAD")
        .env_remove("EBB_LIB");
    let output = run.output().unwrap();
    assert_eq!(
        stdout(&output).trim(),
        installed.canonicalize().unwrap().display().to_string(),
        "{}",
        stderr(&output)
    );

    let before = std::fs::metadata(&installed).unwrap().ino();
    install();
    assert_ne!(
        std::fs::metadata(&installed).unwrap().ino(),
        before,
        "running programs keep the file that they have"
    );

    // An installed copy can install itself elsewhere, and into its own prefix.
    let again = Command::new(&command)
        .args(["install", "--prefix", prefix.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(again.status.success(), "{}", stderr(&again));
}

#[test]
fn a_prefix_that_cannot_be_written_is_refused() {
    let fake = Fake::obliging();
    let lib = library(fake.folder.path(), "libebb.so");
    let mut command = fake.ebb(&["install", "--prefix", "/proc/nowhere"]);
    assert_refused(
        &command.env("EBB_LIB", &lib).output().unwrap(),
        &["/proc/nowhere", "--prefix"],
    );
}
