//! `ebb install`: files are written beside their place and renamed into it.
//!
//! A library that is rewritten in place crashes every program that has it mapped. A renamed one leaves them the old
//! inode, and a versioned folder leaves them the old path as well.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::args::{Global, InstallArgs};
use crate::commands::manual;
use crate::error::{CliError, Result};
use crate::{driver, library};

/// `ebb install`.
pub(crate) fn install(_global: &Global, args: &InstallArgs) -> Result<()> {
    let written = install_into(&args.prefix)?;
    let mut out = anstream::stdout();
    if args.json {
        writeln!(out, "{}", serde_json::json!({ "written": written }))?;
        return Ok(());
    }
    for path in &written {
        writeln!(out, "{}", path.display())?;
    }
    let bin = args.prefix.join("bin");
    let in_path =
        std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir == bin));
    if !in_path {
        anstream::eprintln!("note: {} is not in PATH", bin.display());
    }
    Ok(())
}

fn install_into(prefix: &Path) -> Result<Vec<PathBuf>> {
    let exe = std::env::current_exe()
        .map_err(|error| CliError::failed(format!("cannot find my own program: {error}")))?;
    let versioned = library::installed(prefix);
    let mut files = vec![(library::locate()?, versioned.join(library::NAME), 0o755)];
    // The demo's parts go along if they are here; ebb itself does without them.
    if let Ok(sim) = driver::simulated_folder() {
        files.push((
            sim.join(driver::CUDA),
            versioned.join("sim").join(driver::CUDA),
            0o755,
        ));
        files.push((
            sim.join(driver::NVML),
            versioned.join("sim").join(driver::NVML),
            0o755,
        ));
    }
    if let Ok(worker) = crate::demo::worker_path() {
        files.push((worker, versioned.join(crate::demo::WORKER), 0o755));
    }
    // The command last: once it is there, all that it needs is there.
    files.push((exe, prefix.join("bin/ebb"), 0o755));
    let failed = |error: std::io::Error, path: &Path| {
        CliError::usage(
            format!("cannot write {}: {error}", path.display()),
            "choose another --prefix, or run it as root",
        )
    };
    let mut written = Vec::new();
    for (from, to, mode) in files {
        put(&from, &to, mode).map_err(|error| failed(error, &to))?;
        written.push(to);
    }
    let pages = prefix.join("share/man/man1");
    manual::write_pages(&pages).map_err(|error| failed(error, &pages))?;
    written.push(pages);
    Ok(written)
}

/// Copies under another name in the same folder, flushes, and renames: at every instant the old file or the new one.
fn put(from: &Path, to: &Path, mode: u32) -> std::io::Result<()> {
    let folder = to.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    if let (Ok(from), Ok(to)) = (from.canonicalize(), to.canonicalize())
        && from == to
    {
        return Ok(());
    }
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", std::process::id()));
    let copied = (|| {
        std::fs::copy(from, &temporary)?;
        std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(mode))?;
        std::fs::File::open(&temporary)?.sync_all()?;
        std::fs::rename(&temporary, to)
    })();
    if copied.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn bug_121_a_library_in_use_keeps_its_bytes_when_it_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new, place) = (
            dir.path().join("old"),
            dir.path().join("new"),
            dir.path().join("lib/x/libebb.so"),
        );
        std::fs::write(&old, b"old").unwrap();
        std::fs::write(&new, b"newer").unwrap();
        put(&old, &place, 0o755).unwrap();
        let mut in_use = std::fs::File::open(&place).unwrap();
        let inode = in_use.metadata().unwrap().ino();
        put(&new, &place, 0o755).unwrap();
        let mut bytes = String::new();
        in_use.read_to_string(&mut bytes).unwrap();
        assert_eq!(bytes, "old", "the running program's file is untouched");
        assert_eq!(std::fs::read(&place).unwrap(), b"newer");
        assert_ne!(std::fs::metadata(&place).unwrap().ino(), inode);
        let left: Vec<_> = std::fs::read_dir(place.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file is left: {left:?}");
    }

    #[test]
    fn a_copy_that_fails_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("libebb.so");
        std::fs::write(&place, b"old").unwrap();
        assert!(put(&dir.path().join("absent"), &place, 0o755).is_err());
        assert_eq!(std::fs::read(&place).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
