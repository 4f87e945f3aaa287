//! The conversation with the daemon.
//!
//! ```text
//!   Starting -> Handshake -> Connected -> Alone -> (every second) Handshake ...
//!       |           |                       ^
//!       +-----------+-----------------------+        Refused: alone for good
//! ```
//! One thread owns the socket. Everybody else puts messages into the outbox and rings; nobody waits for the daemon but
//! who asked it for something, and that with a bound. A daemon that is gone, stuck or talks nonsense is left; the engine
//! goes on alone with what it has and declares it to the next one.
//!
//! While connected and idle the thread sleeps without a timeout: the gate wakes it at the first passage after
//! `Gate::watch`, the books at their first change.
//!
//! Sockets may be closed under our feet: the program may close every descriptor it does not know (`fd`). That ends the
//! connection and the next one has new sockets. The bell is a pair of sockets for that reason: it can be told from the
//! program's files, and the end that rings hangs up when it is closed, which wakes the thread that sleeps on the other.
//!
//! # Locks
//! `outbox` may be taken under a device's lock or the arena's, and so may `bell`, for one system call; `status` is taken
//! alone.

mod incoming;
mod thread;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_protocol::ToDaemon;
use ebb_units::Bytes;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

use crate::core::Core;
use crate::device::{Device, Mode};
use crate::fd::{ChildSlot, OurFd};
use crate::threads;

/// More messages than this wait only if the daemon does not read.
const OUTBOX_MAX: usize = 4096;

/// Where the conversation is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// No attempt has ended yet.
    Starting,
    /// With this session id, in this task.
    Connected { session: u64, task: u64 },
    /// Nobody there: why.
    Alone(String),
    /// The daemon does not want us, for good: why.
    Refused(String),
}

#[derive(Debug, Default)]
struct Outbox {
    /// Messages are taken in only while connected.
    open: bool,
    queue: VecDeque<(ToDaemon, Vec<Arc<OurFd>>)>,
    overflow: bool,
    /// Something was taken in that the socket has not got yet.
    unsent: bool,
}

/// The conversation.
#[derive(Debug)]
pub(crate) struct Link {
    outbox: Mutex<Outbox>,
    /// All of it is with the socket.
    sent: Condvar,
    /// The end of the bell that rings: one bell a connection.
    bell: Mutex<Option<OurFd>>,
    status: Mutex<Status>,
    status_changed: Condvar,
    /// Something that `Usage` tells has changed.
    dirty: AtomicBool,
    /// The connection that is open, counted from 1; 0 if none.
    epoch: AtomicU64,
    /// What its daemon can do.
    features: AtomicU64,
    /// The socket and both ends of the bell once more, for a forked child.
    in_child: [ChildSlot; 3],
    bad_packets: AtomicU64,
    connections: AtomicU64,
    /// When a daemon's socket took a connection last.
    seen: Mutex<Option<Instant>>,
}

impl Link {
    pub(crate) fn new() -> Self {
        Self {
            outbox: Mutex::default(),
            sent: Condvar::new(),
            bell: Mutex::default(),
            status: Mutex::new(Status::Starting),
            status_changed: Condvar::new(),
            dirty: AtomicBool::new(false),
            epoch: AtomicU64::new(0),
            features: AtomicU64::new(0),
            in_child: [const { ChildSlot::new() }; 3],
            bad_packets: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            seen: Mutex::new(None),
        }
    }

    /// A daemon's socket has just taken a connection.
    fn saw_daemon(&self) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether a daemon served us within that time and has not sent us away: it may be slow, or be started again.
    pub(crate) fn served_within(&self, time: Duration) -> bool {
        let seen = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.is_some_and(|at| at.elapsed() < time) && !matches!(self.status(), Status::Refused(_))
    }

    /// Starts the thread.
    pub(crate) fn start(&self, core: &Arc<Core>) {
        let alone = |why: String| self.set_status(Status::Alone(why));
        if core.config.sockets.is_empty() {
            return alone("no socket to try".into());
        }
        let core = Arc::clone(core);
        let spawned = threads::spawn("ebb-link", move || thread::run(&core));
        if let Err(error) = spawned {
            alone(format!("no thread: {error}"));
        }
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message, if there is a connection. Never waits.
    pub(crate) fn send(&self, message: ToDaemon) {
        self.send_with(message, Vec::new());
    }

    pub(crate) fn send_with(&self, message: ToDaemon, fds: Vec<Arc<OurFd>>) {
        let mut outbox = self.outbox();
        if !outbox.open {
            return;
        }
        if outbox.queue.len() >= OUTBOX_MAX {
            outbox.overflow = true;
        } else {
            outbox.queue.push_back((message, fds));
            outbox.unsent = true;
        }
        drop(outbox);
        self.ring();
    }

    /// Waits until what was sent is with the socket: the program may end now, and its threads with it.
    pub(crate) fn wait_sent(&self, at_most: Duration) {
        let waits = |outbox: &mut Outbox| outbox.open && outbox.unsent;
        // Poisoned: what panicked there is past helping, and the program goes on.
        drop(self.sent.wait_timeout_while(self.outbox(), at_most, waits));
    }

    /// The socket has all of it, or there is none any more.
    fn all_sent(&self, outbox: &mut Outbox) {
        outbox.unsent = false;
        self.sent.notify_all();
    }

    /// Wakes the thread.
    pub(crate) fn ring(&self) {
        let bell = self.bell.lock().unwrap_or_else(PoisonError::into_inner);
        // Lost: the thread knows by the hang-up. Full: it rings already.
        if let Some(fd) = bell.as_ref().and_then(OurFd::get) {
            let _ = rustix::net::send(fd, &[1], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    /// The connection that is open; 0 if none.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whether the daemon that is connected can do something.
    pub(crate) fn can(&self, feature: u64) -> bool {
        self.epoch() != 0 && self.features.load(Ordering::Acquire) & feature != 0
    }

    /// Whether the daemon wants nothing pinned but a ring; the last one's word, if there is none now.
    pub(crate) fn wants_ring(&self) -> bool {
        self.features.load(Ordering::Acquire) & ebb_protocol::wire::feature::RING != 0
    }

    /// Makes the bell of a new connection. Returns the end to sleep on.
    fn new_bell(&self) -> Result<OurFd, Errno> {
        let (rings, hears) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        let (rings, hears) = (OurFd::new(rings), OurFd::new(hears));
        self.in_child[1].set(&rings);
        self.in_child[2].set(&hears);
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = Some(rings);
        Ok(hears)
    }

    /// The connection is over: nobody listens until the next one, which looks at everything first, and a child finds
    /// nothing to close.
    fn drop_bell(&self) {
        self.in_child.iter().for_each(ChildSlot::clear);
        *self.bell.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Something that `Usage` tells has changed. Cheap: at most one write per interval.
    pub(crate) fn poke(&self) {
        if !self.dirty.load(Ordering::Relaxed) && !self.dirty.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }

    pub(crate) fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_status(&self, status: Status) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
        self.status_changed.notify_all();
    }

    /// Waits until the first attempt to connect has ended.
    pub(crate) fn wait_started(&self, at_most: Duration) {
        let deadline = Instant::now() + at_most;
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        while *status == Status::Starting {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            status = self
                .status_changed
                .wait_timeout(status, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Bad packets, connections so far.
    pub(crate) fn counters(&self) -> (u64, u64) {
        (
            self.bad_packets.load(Ordering::Relaxed),
            self.connections.load(Ordering::Relaxed),
        )
    }

    /// Tells the daemon of a device, if there is a connection and it was not told in this one.
    pub(crate) fn attach(&self, core: &Core, device: &Device) {
        let mut state = device.lock();
        // Read under the lock: when the connection ends, the number goes first and the devices are visited after it.
        let epoch = self.epoch.load(Ordering::Acquire);
        if epoch == 0 || state.epoch == epoch {
            return;
        }
        state.epoch = epoch;
        state.mode = Mode::Attaching;
        state.slot = None;
        state.unreported = 0;
        state.asks.clear();
        state.orders.clear();
        state.attach_deadline = Some(Instant::now() + core.config.connect_wait);
        let books = &mut state.pool.books;
        // What is not used is not declared: the daemon may have lent it to somebody else by now.
        books.alone = false;
        books.lease = books.used;
        self.send(ToDaemon::Attach {
            device: device.uuid,
            total: device.total,
            granularity: Bytes(device.memory.granularity()),
            lease: Bytes(books.lease),
            evicted: Bytes(books.evicted),
            overhead: Bytes(books.overhead + books.own),
        });
        drop(state);
        // It sleeps without a timeout, and there is a deadline now.
        self.ring();
    }

    /// In a forked child: descriptors to close. Takes no lock.
    pub(crate) fn child_fds(&self) -> impl Iterator<Item = &ChildSlot> {
        self.in_child.iter()
    }
}
