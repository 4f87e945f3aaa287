//! [`Daemon`]: everything put together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Resource;

use crate::arena::{Arena, Job};
use crate::budget::HostMemory;
use crate::config::{Config, ConfigError, Scope};
use crate::driver::{DiskTier, Driver, Parts};
use crate::eventlog::EventLog;
use crate::place::{Place, PlaceError, make_folder};
use crate::say;
use crate::statefile::StateFile;
use crate::worker::{Answers, FromWorker, Waker, Worker, watch_cards, write_state};

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings are wrong. The user's to mend.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its folder cannot be taken. The user's to mend.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The system refused something that is always there. May pass.
    #[error("the daemon cannot start: {what}: {source}")]
    System {
        /// What.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl StartError {
    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::Config(e) => e.fix(),
            Self::Place(e) => e.fix(),
            Self::System { .. } => "check the limits on open files and threads (`ulimit -a`)".into(),
        }
    }

    /// The daemon that runs already, if that is what is wrong.
    #[must_use]
    pub fn running(&self) -> Option<u32> {
        match self {
            Self::Place(PlaceError::AlreadyRunning { pid, .. }) => Some(*pid),
            _ => None,
        }
    }
}

/// A daemon that has taken its place and is about to serve.
#[derive(Debug)]
pub struct Daemon {
    driver: Driver,
    handle: Handle,
    socket_dir: PathBuf,
}

/// Stops a daemon from another thread.
#[derive(Clone, Debug)]
pub struct Handle {
    answers: Answers,
    wakeups: Arc<AtomicU64>,
}

impl Handle {
    /// Asks the daemon to end.
    pub fn stop(&self) {
        self.answers.send(FromWorker::Stop);
    }

    /// How often its driver was woken so far. An idle daemon sleeps.
    #[must_use]
    pub fn wakeups(&self) -> u64 {
        self.wakeups.load(Ordering::Relaxed)
    }
}

impl Daemon {
    /// Takes the daemon's place: folder, lock, sockets, workers, and what an earlier daemon left. Connections are accepted
    /// from here on, and served by [`Daemon::run`].
    ///
    /// # Errors
    /// [`StartError`], whose `fix` says what to do.
    pub fn start(config: Config) -> Result<Self, StartError> {
        Self::start_with(config, None, false)
    }

    /// Like [`Daemon::start`], for a process that is the daemon: SIGTERM and SIGINT end it, SIGHUP has it read
    /// `config_path` again. To be called before the process starts other threads.
    ///
    /// # Errors
    /// [`StartError`], whose `fix` says what to do.
    pub fn start_as_process(config: Config, config_path: Option<&Path>) -> Result<Self, StartError> {
        // Its memory is the arena; its files are sockets, pidfds and segments.
        raise_file_limit();
        crate::sys::ignore_file_size_signal();
        Self::start_with(config, config_path, true)
    }

    fn start_with(config: Config, config_path: Option<&Path>, as_process: bool) -> Result<Self, StartError> {
        let system = |what| move |source| StartError::System { what, source };
        if let Some(level) = config.log {
            say::set_level(level);
        }
        let budget = config.arena_budget(&HostMemory::read())?;
        let signals = if as_process {
            Some(crate::sys::signals(&SIGNALS).map_err(system("signals"))?)
        } else {
            None
        };
        let place = Place::take(&config.socket_dir, config.scope)?;
        let waker = Waker::new().map_err(system("eventfd"))?;
        let (answers, from_workers) = Answers::new(waker.clone());

        // A state folder that cannot be had costs the log and the limits over a restart, not the service.
        let (log, state_worker, state_trouble, saved) = match make_folder(&config.state_dir, Scope::User) {
            Ok(()) => {
                let file = config.state_dir.join("tasks.json");
                let saved = StateFile::read(&file).unwrap_or_else(|e| {
                    say::error!("{} is of no use and is begun anew: {e}", file.display());
                    StateFile::default()
                });
                let state = write_state(file, answers.clone()).map_err(system("a thread"))?;
                (start_log(&config, &answers)?, Some(state), None, saved)
            }
            Err(e) => {
                say::error!(
                    "no event log, and limits do not survive a restart: {e} ({})",
                    e.fix()
                );
                (None, None, Some(e.to_string()), StateFile::default())
            }
        };
        let one_user = config.scope == Scope::User;
        let mut arena = Arena::new(&config.arena, budget, one_user, first_segment_id());
        let to_driver = answers.clone();
        let arena_workers = Worker::pool("ebb-arena", config.arena.threads, move |job: Job| {
            to_driver.send(FromWorker::Segment(job.run()));
        })
        .map_err(system("threads"))?;
        let disk = DiskTier::start(&config, &mut arena, &answers).map_err(system("threads"))?;
        let equal = crate::driver::common::start(&config, &mut arena, &answers).map_err(system("threads"))?;
        let cards = match &config.nvml {
            Some(path) => Some(watch_cards(path.clone(), answers.clone()).map_err(system("a thread"))?),
            None => None,
        };
        let socket_dir = config.socket_dir.clone();
        let handle = Handle {
            answers: answers.clone(),
            wakeups: Arc::new(AtomicU64::new(0)),
        };
        let parts = Parts {
            config,
            config_path: config_path.map(Path::to_path_buf),
            place,
            waker,
            answers,
            from_workers,
            signals,
            arena,
            arena_workers,
            equal,
            disk,
            cards,
            log,
            state_worker,
            state_trouble,
            saved,
            wakeups: handle.wakeups.clone(),
        };
        let driver = Driver::new(parts).map_err(system("epoll"))?;
        Ok(Self {
            driver,
            handle,
            socket_dir,
        })
    }

    /// The folder of its sockets.
    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        &self.socket_dir
    }

    /// For stopping it from elsewhere.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until it is told to stop: by a signal, by `ebb daemon --stop`, by its handle, or by having no task for `idle_exit`.
    ///
    /// # Errors
    /// The system's, if it cannot wait for events any more.
    pub fn run(mut self) -> std::io::Result<()> {
        self.driver.run()
    }
}

/// What the daemon takes as messages.
pub(crate) const SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn start_log(config: &Config, answers: &Answers) -> Result<Option<EventLog>, StartError> {
    let Some(path) = config.event_log_path() else {
        return Ok(None);
    };
    let log = EventLog::start(path, config.event_log.max_bytes.0, answers.clone());
    log.map(Some).map_err(|source| StartError::System {
        what: "a thread",
        source,
    })
}

/// Ids of segments go on from here. Programs still know those of an earlier daemon's segments.
fn first_segment_id() -> u64 {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    // Milliseconds leave room for a million segments each before the next daemon's begin.
    u64::try_from(now.as_millis()).unwrap_or(0) << 20
}

fn raise_file_limit() {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = rustix::process::setrlimit(Resource::Nofile, limit) {
        say::warning!("the limit on open files cannot be raised: {e}");
    }
}
