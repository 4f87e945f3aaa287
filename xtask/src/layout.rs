//! Builds, with everything at the places where `ebb` looks for it.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::metadata::{root, workspace};
use crate::shell::{cargo, run};

/// What `ebb` needs, as cargo names it.
const PARTS: &[&str] = &[
    "-p",
    "ebb-cli",
    "-p",
    "ebb-layer",
    "-p",
    "ebb-demo-worker",
    "-p",
    "ebb-simgpu",
    "-p",
    "ebb-simnvml",
];
/// The simulated libraries: as cargo names them, and as programs look for them.
const SIM: [(&str, &str); 2] = [
    ("libsimcuda.so", "libcuda.so.1"),
    ("libsimnvml.so", "libnvidia-ml.so.1"),
];

/// Builds in release form and runs `ebb demo`; its output and status pass through.
pub(crate) fn demo(arguments: &[String]) -> Result<ExitCode> {
    run(cargo(&["build", "--release", "--locked"]).args(PARTS))?;
    let folder = workspace()?.target.join("release");
    sim_links(&folder)?;
    let mut command = std::process::Command::new(folder.join("ebb"));
    let status = command
        .arg("demo")
        .args(arguments)
        .status()
        .context("cannot start ebb")?;
    Ok(ExitCode::from(
        status
            .code()
            .and_then(|code| u8::try_from(code).ok())
            .unwrap_or(1),
    ))
}

/// Builds for development.
pub(crate) fn development() -> Result<()> {
    run(cargo(&["build", "--locked"]).args(PARTS))?;
    let folder = workspace()?.target.join("debug");
    sim_links(&folder)?;
    println!("{}", folder.join("ebb").display());
    Ok(())
}

/// Links in `sim/`, so that a build renews what is there.
pub(crate) fn sim_links(folder: &Path) -> Result<()> {
    let sim = folder.join("sim");
    std::fs::create_dir_all(&sim)?;
    for (built, name) in SIM {
        let temporary = sim.join(format!(".{name}.{}", std::process::id()));
        let _ = std::fs::remove_file(&temporary);
        symlink(Path::new("..").join(built), &temporary)?;
        std::fs::rename(&temporary, sim.join(name))?;
    }
    Ok(())
}

/// Builds for shipping, with the header of the pool's functions: a folder that can be copied to /usr/local as it is.
pub(crate) fn dist() -> Result<()> {
    run(cargo(&["build", "--profile", "dist", "--locked", "-p", "ebb-conformance"]).args(PARTS))?;
    let dist = workspace()?.target.join("dist");
    sim_links(&dist)?;
    // The command that was built knows best what belongs where.
    let ebb = dist.join("ebb");
    run(std::process::Command::new(&ebb)
        .arg("install")
        .arg("--prefix")
        .arg(&dist)
        .stdout(std::process::Stdio::null()))?;
    // Not part of an installation, but wanted beside it on a machine that has a card and no compiler.
    std::fs::copy(dist.join("ebb-conformance"), dist.join("bin/ebb-conformance"))?;
    for (shell, place) in [
        ("bash", "share/bash-completion/completions/ebb"),
        ("zsh", "share/zsh/site-functions/_ebb"),
        ("fish", "share/fish/vendor_completions.d/ebb.fish"),
    ] {
        let text = crate::shell::read(std::process::Command::new(&ebb).args(["completions", shell]))?;
        let path = dist.join(place);
        std::fs::create_dir_all(path.parent().context("a place in a folder")?)?;
        std::fs::write(path, text)?;
    }
    let include = dist.join("include");
    std::fs::create_dir_all(&include)?;
    let header = root().join("crates/layer/include/ebb_pool.h");
    std::fs::copy(header, include.join("ebb_pool.h"))?;
    println!("{}", dist.display());
    Ok(())
}
