//! What the tests need of the machine, put there if it is missing.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::shell::{program, quietly, run};

/// The client of the driver that we did not write: NVIDIA's own Python bindings, at the version that was tried.
const CUDA_BINDINGS: &str = "cuda-bindings==13.5.0";

/// Programs, and the Debian packages that have them.
const NEEDED: &[(&str, &[&str], &str)] = &[
    ("gcc", &["--version"], "gcc libc6-dev"),
    ("objdump", &["--version"], "binutils"),
    ("git", &["--version"], "git"),
    ("python3", &["--version"], "python3 python3-venv"),
];

/// Installs what is missing; fails if that is not possible.
pub(crate) fn prepare() -> Result<()> {
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(name, flag, _)| !quietly(&mut program(name, flag)).0)
        .map(|(_, _, package)| *package)
        .collect();
    if missing.is_empty() { Ok(()) } else { apt(&missing) }
}

fn apt(packages: &[&str]) -> Result<()> {
    let packages: Vec<&str> = packages.iter().flat_map(|names| names.split(' ')).collect();
    let list = packages.join(" ");
    if !quietly(&mut program("apt-get", &["--version"])).0 {
        bail!("these are missing, and this is no Debian: {list}");
    }
    let (root, _) = quietly(&mut program("sh", &["-c", "test $(id -u) = 0"]));
    if !root && !quietly(&mut program("sudo", &["-n", "true"])).0 {
        bail!("these are missing: {list}\n  fix: sudo apt-get install {list}");
    }
    let prefix: &[&str] = if root { &[] } else { &["sudo", "-n"] };
    eprintln!("installing {list}");
    for words in [
        vec!["apt-get", "update", "-qq"],
        [
            vec!["apt-get", "install", "-y", "-qq", "--no-install-recommends"],
            packages,
        ]
        .concat(),
    ] {
        let words = [prefix, &words].concat();
        run(program(words[0], &words[1..])
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdout(std::process::Stdio::null()))?;
    }
    Ok(())
}

/// A Python with the bindings, made below `target` once. `None` if this machine is offline, which is said.
pub(crate) fn python(target: &Path) -> Result<Option<PathBuf>> {
    let venv = target.join("venv");
    let python = venv.join("bin/python");
    let has_bindings =
        |python: &Path| quietly(&mut program(python, &["-c", "import cuda.bindings.driver"])).0;
    if has_bindings(&python) {
        return Ok(Some(python));
    }
    std::fs::create_dir_all(target)?;
    let make = || quietly(program("python3", &["-m", "venv", "--clear"]).arg(&venv));
    let (mut made, mut said) = make();
    if !made {
        apt(&["python3 python3-venv"])?;
        (made, said) = make();
    }
    if !made {
        bail!("python3 -m venv fails:\n{said}");
    }
    eprintln!("installing {CUDA_BINDINGS} into {}", venv.display());
    let (installed, said) = quietly(&mut program(
        &python,
        &[
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--retries",
            "2",
            CUDA_BINDINGS,
        ],
    ));
    if installed && has_bindings(&python) {
        return Ok(Some(python));
    }
    if offline(&said) {
        eprintln!(
            "{:=<78}\nSKIPPED: no network, so the simulated GPU is not tried with {CUDA_BINDINGS}\n{:=<78}",
            "", ""
        );
        return Ok(None);
    }
    bail!("{CUDA_BINDINGS} cannot be installed:\n{said}");
}

/// Whether pip failed for lack of a network, and not for another reason.
fn offline(said: &str) -> bool {
    [
        "Temporary failure in name resolution",
        "Name or service not known",
        "Network is unreachable",
        "No route to host",
        "Connection refused",
        "timed out",
    ]
    .iter()
    .any(|words| said.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_missing_network_excuses() {
        assert!(offline(
            "Failed to establish a new connection: [Errno -3] Temporary failure in name resolution"
        ));
        assert!(!offline(
            "ERROR: Could not find a version that satisfies the requirement cuda-bindings==99"
        ));
    }
}
