//! Other programs, run and checked.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::metadata::root;

/// `cargo` with these arguments, in the root of the repository.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    // `cargo xtask` describes this package to us; what we start is not this package.
    for name in [
        "CARGO_MANIFEST_DIR",
        "CARGO_PKG_NAME",
        "CARGO_PKG_VERSION",
        "RUSTC_WORKSPACE_WRAPPER",
    ] {
        command.env_remove(name);
    }
    command
}

/// A program with these arguments, in the root of the repository.
pub(crate) fn program(name: impl AsRef<Path>, arguments: &[&str]) -> Command {
    let mut command = Command::new(name.as_ref());
    command.args(arguments).current_dir(root());
    command
}

/// Runs it; its output is shown. Fails if it does.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !status.success() {
        bail!("{} ended with {status}", shown(command));
    }
    Ok(())
}

/// Runs it and returns what it prints.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let done = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", shown(command)))?;
    if !done.status.success() {
        bail!("{} ended with {}", shown(command), done.status);
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Runs it unseen. Whether it succeeded, and what it said.
pub(crate) fn quietly(command: &mut Command) -> (bool, String) {
    match command.stdin(Stdio::null()).output() {
        Ok(done) => {
            let text = [done.stdout, done.stderr].concat();
            (done.status.success(), String::from_utf8_lossy(&text).into_owned())
        }
        Err(error) => (false, error.to_string()),
    }
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}
