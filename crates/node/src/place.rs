//! The daemon's folder: made or checked, locked, its sockets bound. A dead daemon's leftovers are replaced; a living
//! daemon, another user's folder or a foreign file never is.

use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ebb_protocol::paths::{CONTROL_SOCKET, LAYER_SOCKET};
use rustix::fs::FlockOperation;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::config::Scope;

/// The longest path of a socket, in bytes: `sun_path` less its end.
const MAX_SOCKET_PATH: usize = 107;

/// Why the daemon cannot take its place. The user's to mend.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// A daemon is there.
    #[error("a daemon is already running in {} (pid {pid})", dir.display())]
    AlreadyRunning {
        /// The folder.
        dir: PathBuf,
        /// The daemon.
        pid: u32,
    },
    /// The folder is somebody else's.
    #[error("the folder {} belongs to user {owner}, not to you (user {uid})", dir.display())]
    Foreign {
        /// The folder.
        dir: PathBuf,
        /// Its owner.
        owner: u32,
        /// We.
        uid: u32,
    },
    /// Others may write to the folder.
    #[error("the folder {} may be written to by other users", dir.display())]
    Open {
        /// The folder.
        dir: PathBuf,
    },
    /// The path is something else.
    #[error("{} is in the way: it is not {what}", path.display())]
    InTheWay {
        /// The path.
        path: PathBuf,
        /// What it should be.
        what: &'static str,
    },
    /// The path of a socket would be too long.
    #[error("the path {} is too long for a socket: {length} bytes of at most {MAX_SOCKET_PATH}", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// The system refused.
    #[error("{} cannot be {what}: {source}", path.display())]
    System {
        /// What was to be done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

impl PlaceError {
    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::AlreadyRunning { .. } => {
                "use that one, stop it with `ebb daemon --stop`, or give this one its own --socket-dir".into()
            }
            Self::Foreign { .. } => "choose another --socket-dir, or ask that user to remove it".into(),
            Self::Open { dir } => format!("chmod go-w {}", dir.display()),
            Self::InTheWay { path, .. } => {
                format!("move {} away, or choose another --socket-dir", path.display())
            }
            Self::TooLong { .. } => "choose a --socket-dir with a shorter path, such as /tmp/ebb".into(),
            Self::System { path, .. } => {
                format!("check the permissions and the free space of {}", path.display())
            }
        }
    }
}

/// A folder that is ours, with two listening sockets. Dropped: the sockets are removed.
#[derive(Debug)]
pub(crate) struct Place {
    dir: PathBuf,
    pub layer: OwnedFd,
    pub control: OwnedFd,
    _lock: std::fs::File,
}

impl Place {
    /// Takes the folder.
    pub(crate) fn take(dir: &Path, scope: Scope) -> Result<Self, PlaceError> {
        for name in [LAYER_SOCKET, CONTROL_SOCKET] {
            let path = dir.join(name);
            let length = path.as_os_str().as_bytes().len();
            if length > MAX_SOCKET_PATH {
                return Err(PlaceError::TooLong { path, length });
            }
        }
        make_folder(dir, scope)?;
        let lock = lock(dir)?;
        let layer = bind(dir, LAYER_SOCKET, SocketType::SEQPACKET, scope)?;
        let control = bind(dir, CONTROL_SOCKET, SocketType::STREAM, scope)?;
        Ok(Self {
            dir: dir.into(),
            layer,
            control,
            _lock: lock,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The lock is still held: these are ours.
        for name in [LAYER_SOCKET, CONTROL_SOCKET] {
            let _ = std::fs::remove_file(self.dir.join(name));
        }
    }
}

fn system<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> PlaceError + use<'a> {
    move |source| PlaceError::System {
        what,
        path: path.into(),
        source,
    }
}

/// Makes a folder of ours (or checks one that is there), private unless everybody is served.
pub(crate) fn make_folder(dir: &Path, scope: Scope) -> Result<(), PlaceError> {
    let mode = if scope == Scope::System { 0o755 } else { 0o700 };
    match std::fs::symlink_metadata(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            if let Some(parent) = dir.parent() {
                std::fs::create_dir_all(parent).map_err(system("created", dir))?;
            }
            match std::fs::DirBuilder::new().mode(mode).create(dir) {
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                result => result.map_err(system("created", dir))?,
            }
            // The umask may have taken bits that others need to reach the sockets.
            if scope == Scope::System {
                std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode))
                    .map_err(system("made accessible", dir))?;
            }
        }
        Err(source) => return Err(system("reached", dir)(source)),
        Ok(_) => {}
    }
    // Whoever made it: it must be a folder (a link in a shared folder could lead anywhere), ours, and only ours to write.
    let found = std::fs::symlink_metadata(dir).map_err(system("reached", dir))?;
    let uid = rustix::process::geteuid().as_raw();
    if !found.is_dir() {
        return Err(PlaceError::InTheWay {
            path: dir.into(),
            what: "a folder",
        });
    }
    if found.uid() != uid {
        return Err(PlaceError::Foreign {
            dir: dir.into(),
            owner: found.uid(),
            uid,
        });
    }
    if found.mode() & 0o022 != 0 {
        return Err(PlaceError::Open { dir: dir.into() });
    }
    Ok(())
}

/// Holds `daemon.lock` for as long as the returned file lives. The kernel lets go of it when the daemon dies.
fn lock(dir: &Path) -> Result<std::fs::File, PlaceError> {
    let path = dir.join("daemon.lock");
    let mut file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(system("opened", &path))?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut text = String::new();
        let _ = file.read_to_string(&mut text);
        return Err(PlaceError::AlreadyRunning {
            dir: dir.into(),
            pid: text.trim().parse().unwrap_or(0),
        });
    }
    // Who holds it, for the message above; the lock does not depend on it.
    let _ = file
        .set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

fn bind(dir: &Path, name: &str, kind: SocketType, scope: Scope) -> Result<OwnedFd, PlaceError> {
    let path = dir.join(name);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new = || rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
    let failed = |e: rustix::io::Errno| system("listened on", &path)(e.into());
    let address = SocketAddrUnix::new(&path).map_err(failed)?;
    match std::fs::symlink_metadata(&path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(PlaceError::InTheWay {
                path,
                what: "a socket",
            });
        }
        Ok(_) => {
            // We hold the lock, so no daemon of this kind lives here. Something else may still listen: ask.
            let probe = new().map_err(failed)?;
            match rustix::net::connect(&probe, &address) {
                Ok(()) | Err(rustix::io::Errno::AGAIN) => {
                    let pid = crate::sys::peer(&probe).map_or(0, |peer| peer.pid);
                    return Err(PlaceError::AlreadyRunning { dir: dir.into(), pid });
                }
                Err(_) => std::fs::remove_file(&path).map_err(system("replaced", &path))?,
            }
        }
        Err(_) => {}
    }
    let socket = new().map_err(failed)?;
    rustix::net::bind(&socket, &address).map_err(failed)?;
    let mode = if scope == Scope::System { 0o666 } else { 0o600 };
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
        .map_err(system("made accessible", &path))?;
    // A whole cluster of processes may start at once.
    rustix::net::listen(&socket, 4096).map_err(failed)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_folder_is_made_private_or_public_and_sockets_vanish_with_the_daemon() {
        let base = folder();
        for (scope, dir_mode, socket_mode) in [(Scope::User, 0o700, 0o600), (Scope::System, 0o755, 0o666)] {
            let dir = base.path().join(format!("{scope:?}"));
            let place = Place::take(&dir, scope).unwrap();
            assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o777, dir_mode);
            let socket = dir.join(LAYER_SOCKET);
            assert_eq!(std::fs::metadata(&socket).unwrap().mode() & 0o777, socket_mode);
            drop(place);
            assert!(!socket.exists());
        }
    }

    #[test]
    fn a_second_daemon_hears_of_the_first() {
        let base = folder();
        let dir = base.path().join("run");
        let _place = Place::take(&dir, Scope::User).unwrap();
        let error = Place::take(&dir, Scope::User).unwrap_err();
        assert!(
            matches!(error, PlaceError::AlreadyRunning { pid, .. } if pid == std::process::id()),
            "{error}"
        );
        assert!(
            dir.join(LAYER_SOCKET).exists(),
            "the living daemon keeps its socket"
        );
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let base = folder();
        let dir = base.path().join("run");
        make_folder(&dir, Scope::User).unwrap();
        let listener = ebb_protocol::socket::listen(&dir.join(LAYER_SOCKET)).unwrap();
        let error = Place::take(&dir, Scope::User).unwrap_err();
        assert!(
            matches!(error, PlaceError::AlreadyRunning { pid, .. } if pid == std::process::id()),
            "{error}"
        );
        drop(listener);
        Place::take(&dir, Scope::User).unwrap();
    }

    #[test]
    fn foreign_things_are_left_alone() {
        let base = folder();
        let file = base.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(matches!(
            Place::take(&file, Scope::User).unwrap_err(),
            PlaceError::InTheWay { .. }
        ));
        let dir = base.path().join("run");
        make_folder(&dir, Scope::User).unwrap();
        std::fs::write(dir.join(CONTROL_SOCKET), "precious").unwrap();
        assert!(matches!(
            Place::take(&dir, Scope::User).unwrap_err(),
            PlaceError::InTheWay { .. }
        ));
        assert_eq!(
            std::fs::read_to_string(dir.join(CONTROL_SOCKET)).unwrap(),
            "precious"
        );
        let link = base.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        assert!(matches!(
            Place::take(&link, Scope::User).unwrap_err(),
            PlaceError::InTheWay { .. }
        ));
        let open = base.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(
            Place::take(&open, Scope::User).unwrap_err(),
            PlaceError::Open { .. }
        ));
    }

    #[test]
    fn a_folder_of_another_user_is_refused() {
        let base = folder();
        let dir = base.path().join("run");
        std::fs::create_dir(&dir).unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&dir, Some(12_345), None).unwrap();
            let error = Place::take(&dir, Scope::User).unwrap_err();
            assert!(
                matches!(
                    error,
                    PlaceError::Foreign {
                        owner: 12_345,
                        uid: 0,
                        ..
                    }
                ),
                "{error}"
            );
        } else {
            let error = make_folder(Path::new("/"), Scope::User).unwrap_err();
            assert!(matches!(error, PlaceError::Foreign { owner: 0, .. }), "{error}");
        }
    }

    #[test]
    fn a_path_too_long_for_a_socket_is_named() {
        let base = folder();
        let dir = base.path().join("d".repeat(120));
        assert!(matches!(
            Place::take(&dir, Scope::User).unwrap_err(),
            PlaceError::TooLong { .. }
        ));
        assert!(!dir.exists());
    }
}
