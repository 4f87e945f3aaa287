//! [`Client`]: a connection to the daemon, and where to find one.

use std::io::{BufReader, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_protocol::control::{Answer, ControlError, Payload, Request, read_line, write_line};
use ebb_protocol::paths::{CONTROL_SOCKET, candidates, user_dir};

use crate::args::Global;
use crate::error::{CliError, Result};

/// How long an answer may take. Pausing a task waits for its work on the GPU, so this is long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to a daemon.
#[derive(Debug)]
pub(crate) struct Client {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    folder: PathBuf,
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum NoDaemon {
    /// Nothing was ever there.
    Absent,
    /// A socket that nobody listens on.
    Stale(PathBuf),
    /// There is one, but not for us.
    Unusable(CliError),
}

impl Client {
    /// Connects to the daemon of one folder.
    pub(crate) fn connect_to(folder: &Path) -> std::result::Result<Self, NoDaemon> {
        check_owner(folder)?;
        let socket = folder.join(CONTROL_SOCKET);
        let stream = match UnixStream::connect(&socket) {
            Ok(stream) => stream,
            Err(error) => {
                return Err(match error.kind() {
                    ErrorKind::NotFound | ErrorKind::NotADirectory => NoDaemon::Absent,
                    ErrorKind::ConnectionRefused => NoDaemon::Stale(socket),
                    ErrorKind::PermissionDenied => NoDaemon::Unusable(CliError::usage(
                        format!("{} may not be used by you", socket.display()),
                        "ask its owner, or choose a daemon of your own with --socket-dir",
                    )),
                    ErrorKind::InvalidInput => NoDaemon::Unusable(CliError::usage(
                        format!("{} is too long for the name of a socket", socket.display()),
                        "choose a --socket-dir of fewer than 90 bytes",
                    )),
                    _ => NoDaemon::Unusable(CliError::failed(format!(
                        "cannot connect to {}: {error}",
                        socket.display()
                    ))),
                });
            }
        };
        check_peer(&stream, &socket)?;
        let failed = |error: std::io::Error| NoDaemon::Unusable(CliError::failed(error.to_string()));
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let reader = BufReader::new(stream.try_clone().map_err(failed)?);
        Ok(Self {
            reader,
            writer: stream,
            folder: folder.to_path_buf(),
        })
    }

    /// Connects to the first daemon that answers, best place first.
    pub(crate) fn find(global: &Global) -> std::result::Result<Self, NoDaemon> {
        let mut result = NoDaemon::Absent;
        for folder in folders(global) {
            match Self::connect_to(&folder) {
                Ok(client) => return Ok(client),
                Err(NoDaemon::Absent) => {}
                // The system's daemon may be closed to us while our own is open.
                Err(other) => result = other,
            }
        }
        Err(result)
    }

    /// Connects, or says why not.
    pub(crate) fn open(global: &Global) -> Result<Self> {
        Self::find(global).map_err(|why| match why {
            NoDaemon::Absent => CliError::failed("no daemon runs")
                .with_fix("`ebb run -- PROGRAM` starts one, and so does `ebb daemon --background`"),
            NoDaemon::Stale(socket) => CliError::usage(
                format!(
                    "no daemon listens on {}: it was left there by one that died",
                    socket.display()
                ),
                "`ebb daemon --background` (or the next `ebb run`) starts a new one in its place",
            ),
            NoDaemon::Unusable(error) => error,
        })
    }

    /// The folder of the daemon's sockets.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Payload> {
        write_line(&mut self.writer, request)?;
        self.next_answer()
    }

    /// The next answer: for [`Request::Watch`] there are many.
    pub(crate) fn next_answer(&mut self) -> Result<Payload> {
        match read_line(&mut self.reader)? {
            Answer::Ok(payload) => Ok(payload),
            Answer::Error(failure) => Err(failure.into()),
        }
    }

    /// Asks, and tells an answer that is a refusal from no answer.
    pub(crate) fn try_ask(&mut self, request: &Request) -> std::result::Result<Answer, ControlError> {
        write_line(&mut self.writer, request)?;
        read_line(&mut self.reader)
    }

    /// Waits no longer than this for an answer.
    pub(crate) fn be_patient(&self, patience: Duration) {
        // Without it the patience stays as it was, which is longer.
        let _ = self.writer.set_read_timeout(Some(patience));
        let _ = self.writer.set_write_timeout(Some(patience));
    }

    /// Another connection to the same daemon.
    pub(crate) fn again(&self) -> Option<Self> {
        Self::connect_to(&self.folder).ok()
    }

    /// Sends a request without reading the answer.
    pub(crate) fn send(&mut self, request: &Request) -> Result<()> {
        Ok(write_line(&mut self.writer, request)?)
    }
}

/// The daemon answered something that does not answer the question.
pub(crate) fn unexpected(payload: &Payload) -> CliError {
    CliError::failed(format!(
        "the daemon gave an answer to another question: {payload:?}"
    ))
    .with_fix("ebb and its daemon differ in version: `ebb version` shows both; restart the older")
}

/// The folders where a daemon may be, best first.
pub(crate) fn folders(global: &Global) -> Vec<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let runtime = runtime_dir();
    let mut folders = candidates(global.socket_dir.as_deref(), runtime.as_deref(), uid);
    if global.socket_dir.is_none() {
        folders.push(sim_folder());
    }
    folders
}

/// The folder of the daemon that this user's `ebb run` starts.
pub(crate) fn own_folder() -> PathBuf {
    user_dir(runtime_dir().as_deref(), rustix::process::geteuid().as_raw())
}

/// The folder of the daemon that this user's `ebb run --gpu sim` starts: a daemon manages one kind of card.
pub(crate) fn sim_folder() -> PathBuf {
    own_folder().join("sim")
}

fn runtime_dir() -> Option<PathBuf> {
    // A left-over of another login (`su`) names a folder that is not ours: the owner decides.
    let dir = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
    let owner = std::fs::metadata(&dir).ok()?.uid();
    (owner == rustix::process::geteuid().as_raw()).then_some(dir)
}

/// A folder of somebody else could hold a socket of somebody else, which would hear our task's token.
fn check_owner(folder: &Path) -> std::result::Result<(), NoDaemon> {
    let Ok(metadata) = std::fs::metadata(folder) else {
        return Ok(());
    };
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() == own || metadata.uid() == 0 {
        return Ok(());
    }
    Err(NoDaemon::Unusable(foreign(
        &folder.display().to_string(),
        metadata.uid(),
    )))
}

fn check_peer(stream: &UnixStream, socket: &Path) -> std::result::Result<(), NoDaemon> {
    let own = rustix::process::geteuid();
    match rustix::net::sockopt::socket_peercred(stream) {
        Ok(peer) if peer.uid == own || peer.uid.is_root() => Ok(()),
        Ok(peer) => Err(NoDaemon::Unusable(foreign(
            &socket.display().to_string(),
            peer.uid.as_raw(),
        ))),
        Err(error) => Err(NoDaemon::Unusable(CliError::failed(format!(
            "{}: {error}",
            socket.display()
        )))),
    }
}

fn foreign(what: &str, uid: u32) -> CliError {
    CliError::usage(
        format!("{what} belongs to another user (uid {uid})"),
        "choose a folder of your own with --socket-dir, or remove that one if it should not be there",
    )
}
