//! Where the sockets are.

use std::path::{Path, PathBuf};

/// Environment: the folder of the daemon's sockets. `ebb run` sets it for the program that it starts.
pub const ENV_SOCKET_DIR: &str = "EBB_SOCKET_DIR";
/// Environment: the task's capability, 64 hexadecimal digits. `ebb run` sets it.
pub const ENV_TOKEN: &str = "EBB_TASK_TOKEN";
/// Environment: `off` makes the preloaded library do nothing at all.
pub const ENV_SWITCH: &str = "EBB";
/// Environment: `1` makes the library take only what nobody holds: nothing is oversubscribed by this program.
pub const ENV_STRICT: &str = "EBB_STRICT";
/// How much host memory copies of what is back on the card may keep in a process: a quantity; all that there is if unset.
pub const ENV_KEEP: &str = "EBB_KEEP";
/// Settings of the pool that frameworks allocate from.
pub const ENV_POOL: &str = "EBB_POOL";
/// Folder of the system's daemon.
pub const SYSTEM_DIR: &str = "/run/ebb";
/// The layer's socket in that folder.
pub const LAYER_SOCKET: &str = "layer.sock";
/// The command line's socket in that folder.
pub const CONTROL_SOCKET: &str = "ctl.sock";

/// The folder of a user's own daemon: in the runtime folder of the login if there is one, else under `/tmp`.
#[must_use]
pub fn user_dir(runtime_dir: Option<&Path>, uid: u32) -> PathBuf {
    match runtime_dir {
        Some(dir) if dir.is_absolute() => dir.join("ebb"),
        _ => PathBuf::from(format!("/tmp/ebb-{uid}")),
    }
}

/// The folders to look for a daemon in, best first: what the environment names (and then nothing else), the system's,
/// the user's own.
#[must_use]
pub fn candidates(named: Option<&Path>, runtime_dir: Option<&Path>, uid: u32) -> Vec<PathBuf> {
    match named {
        Some(dir) => vec![dir.to_path_buf()],
        None => vec![PathBuf::from(SYSTEM_DIR), user_dir(runtime_dir, uid)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_folder_is_the_only_one() {
        let named = Path::new("/x");
        assert_eq!(candidates(Some(named), None, 7), vec![PathBuf::from("/x")]);
        assert_eq!(
            candidates(None, None, 7),
            vec![PathBuf::from("/run/ebb"), PathBuf::from("/tmp/ebb-7")]
        );
        assert_eq!(
            user_dir(Some(Path::new("/run/user/7")), 7),
            PathBuf::from("/run/user/7/ebb")
        );
        assert_eq!(
            user_dir(Some(Path::new("relative")), 7),
            PathBuf::from("/tmp/ebb-7")
        );
    }
}
