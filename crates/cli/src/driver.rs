//! The GPU driver as a program would find it: by looking, without loading anything.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::args::Gpu;
use crate::elf;
use crate::error::{CliError, Result};

/// The driver's library.
pub(crate) const CUDA: &str = "libcuda.so.1";
/// The management library.
pub(crate) const NVML: &str = "libnvidia-ml.so.1";
/// Environment: a folder with the simulated GPU's libraries, instead of looking for it.
pub(crate) const ENV_SIM: &str = "EBB_SIM_LIB";

/// A library that the loader would take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Where it is.
    pub path: PathBuf,
}

impl Found {
    /// Whether it is the simulated GPU. Reads the file, which takes a moment: ask only where it matters.
    pub(crate) fn is_simulated(&self) -> bool {
        is_simulated(&self.path)
    }
}

/// Looks for a library where the loader would: `LD_LIBRARY_PATH`, the loader's cache, the usual folders.
pub(crate) fn find(name: &str) -> Option<Found> {
    let named = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    find_in(
        name,
        &named,
        &std::fs::read("/etc/ld.so.cache").unwrap_or_default(),
        &usual_folders(),
    )
}

fn find_in(name: &str, named: &OsString, cache: &[u8], usual: &[PathBuf]) -> Option<Found> {
    let from_environment = std::env::split_paths(named)
        .filter(|dir| !dir.as_os_str().is_empty())
        .map(|dir| dir.join(name));
    let from_cache = cached(cache, name);
    let from_folders = usual.iter().map(|dir| dir.join(name));
    // As the loader does, go past files that are for another machine.
    let path = from_environment
        .chain(from_cache)
        .chain(from_folders)
        .find(|path| elf::check_library(path).is_ok())?;
    Some(Found { path })
}

/// The paths of this name in the loader's cache, whose strings lie in it one after the other, each with a zero byte.
fn cached(cache: &[u8], name: &str) -> Vec<PathBuf> {
    let ending = format!("/{name}");
    cache
        .split(|byte| *byte == 0)
        .filter(|text| text.starts_with(b"/") && text.ends_with(ending.as_bytes()))
        .map(|text| PathBuf::from(OsString::from_vec(text.to_vec())))
        .collect()
}

fn usual_folders() -> Vec<PathBuf> {
    let arch = if cfg!(target_arch = "aarch64") {
        "aarch64-linux-gnu"
    } else {
        "x86_64-linux-gnu"
    };
    [
        format!("/lib/{arch}"),
        format!("/usr/lib/{arch}"),
        "/lib64".into(),
        "/usr/lib64".into(),
        "/lib".into(),
        "/usr/lib".into(),
    ]
    .into_iter()
    .map(PathBuf::from)
    .collect()
}

/// The simulated libraries carry the name of the variable that sizes their cards; nothing else does.
fn is_simulated(path: &Path) -> bool {
    const MARK: &[u8] = b"EBB_SIM_DIR";
    // A real driver's library is far larger than this, and not worth reading.
    let small = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() < 64 << 20);
    small && std::fs::read(path).is_ok_and(|bytes| bytes.windows(MARK.len()).any(|window| window == MARK))
}

/// Whether the kernel shows a GPU of this vendor: on servers, under WSL, on integrated boards.
pub(crate) fn has_device_node() -> bool {
    let numbered = std::fs::read_dir("/dev").is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = entry.file_name();
            let digits = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
            digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        })
    });
    numbered || Path::new("/dev/dxg").exists() || Path::new("/dev/nvgpu").exists()
}

/// The folder with the simulated GPU's libraries.
pub(crate) fn simulated_folder() -> Result<PathBuf> {
    let named = std::env::var_os(ENV_SIM).map(PathBuf::from);
    let places = match named {
        Some(folder) => vec![folder],
        None => {
            let exe = std::env::current_exe()
                .map_err(|e| CliError::failed(format!("cannot find my own program: {e}")))?;
            let folder = exe.parent().unwrap_or(Path::new("/")).to_path_buf();
            let prefix = folder
                .parent()
                .map(|prefix| crate::library::installed(prefix).join("sim"));
            [Some(folder.join("sim")), prefix].into_iter().flatten().collect()
        }
    };
    let mut why = String::new();
    for folder in &places {
        match elf::check_library(&folder.join(CUDA)).and_then(|()| elf::check_library(&folder.join(NVML))) {
            Ok(()) => {
                return folder
                    .canonicalize()
                    .map_err(|error| CliError::failed(format!("{}: {error}", folder.display())));
            }
            Err(error) => why = format!("{}: {error}", folder.display()),
        }
    }
    Err(CliError::usage(
        format!("the simulated GPU is not there ({why})"),
        format!("build it with `cargo xtask layout`, or name its folder in {ENV_SIM}"),
    ))
}

/// What `ebb run` finds out about the GPU before it starts a program. `devices_known` asks the daemon, and only where no look
/// at the machine answers.
pub(crate) fn check(gpu: Gpu, devices_known: impl FnOnce() -> Result<bool>) -> Result<()> {
    let Some(driver) = find(CUDA) else {
        return Err(CliError::usage(
            format!("no GPU driver: {CUDA} is neither in LD_LIBRARY_PATH nor where the loader looks"),
            "install the NVIDIA driver (in a container: give it the GPU, as `docker run --gpus all` does), try `--gpu sim`, \
             or add --allow-no-gpu to run the program all the same",
        ));
    };
    if gpu == Gpu::Real && driver.is_simulated() {
        return Err(CliError::usage(
            format!(
                "{} is the simulated GPU, and --gpu real was asked for",
                driver.path.display()
            ),
            "take its folder out of LD_LIBRARY_PATH",
        ));
    }
    let present = has_device_node() || devices_known()? || driver.is_simulated() && simulated_devices();
    if present {
        return Ok(());
    }
    Err(CliError::usage(
        format!(
            "no GPU: the driver ({}) is there, but no card is",
            driver.path.display()
        ),
        "check `nvidia-smi` (in a container: give it the GPU, as `docker run --gpus all` does), try `--gpu sim`, or add \
         --allow-no-gpu to run the program all the same",
    ))
}

fn simulated_devices() -> bool {
    std::env::var("EBB_SIM_DEVICES").map_or(true, |count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_cache_is_read_for_whole_names() {
        let cache = b"glibc-ld.so.cache1.1\0\x01\0libcuda.so.1\0/usr/lib/libcuda.so.1\0/opt/libcuda.so.1.2\0/a/xlibcuda.so.1\0";
        assert_eq!(cached(cache, CUDA), [PathBuf::from("/usr/lib/libcuda.so.1")]);
        assert!(cached(b"", CUDA).is_empty());
    }

    #[test]
    fn the_environment_comes_first_and_unusable_files_are_passed_by() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, mark: &[u8]| {
            let dir = folder.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            // Any program of this machine is for this machine.
            let mut bytes = std::fs::read("/bin/sh").unwrap();
            bytes.extend_from_slice(mark);
            std::fs::write(dir.join("libx.so.1"), bytes).unwrap();
            dir
        };
        let (first, second) = (make("first", b"EBB_SIM_DIR"), make("second", b""));
        let broken = folder.path().join("broken");
        std::fs::create_dir(&broken).unwrap();
        std::fs::write(broken.join("libx.so.1"), b"").unwrap();
        let named = std::env::join_paths([&broken, &first]).unwrap();
        let found = find_in("libx.so.1", &named, b"", std::slice::from_ref(&second)).unwrap();
        assert_eq!(found.path, first.join("libx.so.1"));
        assert!(found.is_simulated());
        let found = find_in("libx.so.1", &OsString::new(), b"", std::slice::from_ref(&second)).unwrap();
        assert_eq!(found.path, second.join("libx.so.1"));
        assert!(!found.is_simulated());
        assert_eq!(find_in("liby.so.1", &named, b"", &[second]), None);
    }
}
