//! The program that `ebb run` is to run: where it is, and whether a preloaded library reaches it.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::elf::{self, ElfError};
use crate::error::{CliError, Result};

/// As shells have it: the program is not there.
pub(crate) const NOT_FOUND: u8 = 127;
/// As shells have it: it is there and cannot be run.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// Scripts may be interpreted by scripts, this deep in Linux.
const MAX_INTERPRETERS: u32 = 4;

/// Why a preloaded library does not get into a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Bypass {
    /// Linked without a loader.
    Static,
    /// The loader ignores preloads when the program gains rights.
    Privileged,
    /// For another kind of machine, so with another kind of library.
    OtherMachine,
}

impl Bypass {
    /// For a person.
    pub(crate) fn explain(&self) -> &'static str {
        match self {
            Self::Static => "it is linked statically, so no library can be preloaded",
            Self::Privileged => {
                "it gains rights when it starts (setuid, setgid or file capabilities), so the loader ignores preloads"
            }
            Self::OtherMachine => "it is for another kind of machine than libebb.so",
        }
    }
}

/// Finds a program as shells do.
pub(crate) fn resolve(name: &OsStr, search: Option<OsString>) -> Result<PathBuf> {
    let shown = name.to_string_lossy();
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return if path.symlink_metadata().is_err() {
            Err(not_found(format!("{shown} does not exist"), "check the path"))
        } else {
            check_executable(&path).map(|()| path)
        };
    }
    if name.is_empty() {
        return Err(not_found(
            "the program's name is empty".into(),
            "write `ebb run -- PROGRAM`",
        ));
    }
    let search = search.unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut refused = None;
    for folder in std::env::split_paths(&search) {
        let path = if folder.as_os_str().is_empty() {
            PathBuf::from(".").join(name)
        } else {
            folder.join(name)
        };
        if !path.exists() {
            continue;
        }
        match check_executable(&path) {
            Ok(()) => return Ok(path),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| {
        not_found(
            format!("no program `{shown}` in PATH"),
            "install it, or write its path, like ./train",
        )
    }))
}

fn not_found(message: String, fix: &str) -> CliError {
    CliError::failed(message).with_fix(fix).with_status(NOT_FOUND)
}

fn check_executable(path: &Path) -> Result<()> {
    let refused = |message: String, fix: String| {
        CliError::failed(message)
            .with_fix(fix)
            .with_status(NOT_EXECUTABLE)
    };
    let shown = path.display();
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(refused(
            format!("{shown} is a folder"),
            "name a program in it".into(),
        )),
        Ok(metadata) if metadata.mode() & 0o111 == 0 || access(path, Access::EXEC_OK).is_err() => {
            Err(refused(
                format!("{shown} may not be executed"),
                format!("`chmod +x {shown}`, or run it by its interpreter"),
            ))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(refused(
            format!("{shown} cannot be used: {error}"),
            "check the path".into(),
        )),
    }
}

/// Whether, and why, a preloaded library would not get into this program. Scripts are as their interpreter is.
pub(crate) fn bypass(path: &Path) -> Option<Bypass> {
    let mut path = path.to_path_buf();
    for _ in 0..=MAX_INTERPRETERS {
        match interpreter_of(&path) {
            Some(interpreter) => path = interpreter,
            None => break,
        }
    }
    if gains_rights(&path) {
        return Some(Bypass::Privileged);
    }
    match elf::inspect(&path) {
        Ok(elf) if !elf.interpreter => Some(Bypass::Static),
        Err(ElfError::OtherMachine(_)) => Some(Bypass::OtherMachine),
        // Unreadable or strange: `exec` will say what it thinks of it.
        _ => None,
    }
}

fn gains_rights(path: &Path) -> bool {
    let Ok(metadata) = std::fs::metadata(path) else {
        return false;
    };
    let (mode, own_uid, own_gid) = (
        metadata.mode(),
        rustix::process::geteuid(),
        rustix::process::getegid(),
    );
    let setuid = mode & 0o4000 != 0 && metadata.uid() != own_uid.as_raw();
    let setgid = mode & 0o2010 == 0o2010 && metadata.gid() != own_gid.as_raw();
    let mut nothing = [0u8; 0];
    let capabilities =
        rustix::fs::getxattr(path, "security.capability", &mut nothing[..]).is_ok_and(|size| size > 0);
    // Root has all capabilities already, and gains none.
    setuid || setgid || (capabilities && !own_uid.is_root())
}

fn interpreter_of(script: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    std::fs::File::open(script)
        .ok()?
        .take(256)
        .read_to_end(&mut start)
        .ok()?;
    let line = start.strip_prefix(b"#!")?.split(|b| *b == b'\n').next()?;
    let mut words = line
        .split(|b| b.is_ascii_whitespace())
        .filter(|word| !word.is_empty());
    let interpreter = PathBuf::from(OsStr::from_bytes(words.next()?));
    if interpreter.file_name() == Some(OsStr::new("env")) {
        // `#!/usr/bin/env [-S] [NAME=value] python3`: what counts is what env will run.
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
        return resolve(OsStr::from_bytes(name), std::env::var_os("PATH")).ok();
    }
    Some(interpreter)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn file(folder: &Path, name: &str, text: &[u8], mode: u32) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    #[test]
    fn finds_programs_as_shells_do() {
        let folder = tempfile::tempdir().unwrap();
        let good = file(folder.path(), "good", b"#!/bin/sh\n", 0o755);
        file(folder.path(), "plain", b"text", 0o644);
        let search = || Some(folder.path().as_os_str().to_owned());
        assert_eq!(resolve(OsStr::new("good"), search()), Ok(good.clone()));
        assert_eq!(resolve(good.as_os_str(), None), Ok(good));
        let status = |name: &str| resolve(OsStr::new(name), search()).unwrap_err().status;
        assert_eq!(status("absent"), NOT_FOUND);
        assert_eq!(status("./absent"), NOT_FOUND);
        assert_eq!(status(""), NOT_FOUND);
        assert_eq!(status("plain"), NOT_EXECUTABLE);
        assert_eq!(status("/tmp"), NOT_EXECUTABLE);
    }

    #[test]
    fn scripts_are_as_their_interpreter_is() {
        let folder = tempfile::tempdir().unwrap();
        let own = std::env::current_exe().unwrap();
        assert_eq!(bypass(&own), None);
        let script = file(
            folder.path(),
            "s",
            format!("#!{} -x\n", own.display()).as_bytes(),
            0o755,
        );
        assert_eq!(bypass(&script), None);
        let mut no_loader = std::fs::read(&own).unwrap();
        let at = u64::from_le_bytes(no_loader[32..40].try_into().unwrap()) as usize;
        let count = u16::from_le_bytes(no_loader[56..58].try_into().unwrap()) as usize;
        for i in 0..count {
            let kind = at + i * 56;
            if no_loader[kind] == 3 {
                no_loader[kind] = 0;
            }
        }
        let fixed = file(folder.path(), "static", &no_loader, 0o755);
        assert_eq!(bypass(&fixed), Some(Bypass::Static));
        let script = file(
            folder.path(),
            "s2",
            format!("#!{}\n", fixed.display()).as_bytes(),
            0o755,
        );
        assert_eq!(bypass(&script), Some(Bypass::Static));
        no_loader[18] = 21;
        assert_eq!(
            bypass(&file(folder.path(), "ppc", &no_loader, 0o755)),
            Some(Bypass::OtherMachine)
        );
    }

    #[test]
    fn a_circle_of_scripts_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("circle");
        file(
            folder.path(),
            "circle",
            format!("#!{}\n", path.display()).as_bytes(),
            0o755,
        );
        assert_eq!(bypass(&path), None);
    }
}
