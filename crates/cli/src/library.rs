//! Where `libebb.so` is, and whether the loader will take it.

use std::path::{Path, PathBuf};

use crate::elf;
use crate::error::{CliError, Result};

/// The name of the preloaded library.
pub(crate) const NAME: &str = "libebb.so";
/// Environment: the library to preload, instead of looking for it.
pub(crate) const ENV: &str = "EBB_LIB";

/// The library to preload, checked.
pub(crate) fn locate() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(ENV) {
        return check(
            PathBuf::from(named),
            &format!("correct {ENV}, or unset it to take the installed library"),
        );
    }
    let exe = std::env::current_exe()
        .map_err(|error| CliError::failed(format!("cannot find my own program: {error}")))?;
    let folder = exe.parent().unwrap_or(Path::new("/"));
    let places = places(folder);
    match places.iter().find(|path| path.symlink_metadata().is_ok()) {
        Some(path) => check(
            path.clone(),
            "install ebb again: `ebb install --prefix DIR` from a whole copy",
        ),
        None => Err(CliError::usage(
            format!("{NAME} is not there; looked at {}", list(&places)),
            format!("build it with `cargo xtask layout`, or name it in {ENV}"),
        )),
    }
}

/// The places to look at, first one first: beside the command (a build folder), and as installed.
fn places(folder: &Path) -> Vec<PathBuf> {
    let mut places = vec![folder.join(NAME)];
    if let Some(prefix) = folder.parent() {
        places.push(installed(prefix).join(NAME));
    }
    places
}

/// The versioned folder below a prefix, so that a new version never writes where an old one is in use.
pub(crate) fn installed(prefix: &Path) -> PathBuf {
    prefix.join("lib/ebb").join(env!("CARGO_PKG_VERSION"))
}

fn check(path: PathBuf, fix: &str) -> Result<PathBuf> {
    let refused =
        |why: String| CliError::usage(format!("{} cannot be preloaded: {why}", path.display()), fix);
    let real = path
        .canonicalize()
        .map_err(|error| refused(format!("it cannot be read: {error}")))?;
    elf::check_library(&real).map_err(|why| refused(why.to_string()))?;
    let text = real
        .to_str()
        .filter(|text| !text.contains([' ', ':', '$', '\n', '\t']));
    if text.is_none() {
        return Err(CliError::usage(
            format!(
                "{} cannot be preloaded: the loader splits names at spaces and colons",
                real.display()
            ),
            "move it to a folder without such characters",
        ));
    }
    Ok(real)
}

fn list(paths: &[PathBuf]) -> String {
    paths
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_beside_the_command_and_where_it_is_installed() {
        let found = places(Path::new("/usr/local/bin"));
        assert_eq!(found[0], Path::new("/usr/local/bin/libebb.so"));
        let versioned = format!("/usr/local/lib/ebb/{}/libebb.so", env!("CARGO_PKG_VERSION"));
        assert_eq!(found[1], Path::new(&versioned));
    }

    #[test]
    fn a_name_that_the_loader_would_split_is_refused() {
        let folder = tempfile::Builder::new().prefix("with space").tempdir().unwrap();
        let path = folder.path().join(NAME);
        std::fs::copy("/proc/self/exe", &path).unwrap();
        let error = check(path, "f").unwrap_err();
        assert!(error.message.contains("splits"), "{error}");
        assert_eq!(error.status, 2);
    }
}
