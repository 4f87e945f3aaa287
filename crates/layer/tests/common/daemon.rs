//! A daemon of a few lines: grants what fits one card, gives host memory, and evicts when the test says so. What a real
//! one decides is tested elsewhere; here it is there so that the layer has a limit and an order to obey.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ebb_protocol::socket;
use ebb_protocol::wire::{SegmentInfo, ToDaemon, ToLayer, deny, outcome};
use ebb_units::{Bytes, DeviceUuid};

/// What the daemon knows of one device of one session.
#[derive(Clone, Copy, Debug, Default)]
struct Client {
    lease: u64,
    overhead: u64,
}

#[derive(Debug, Default)]
struct State {
    /// By session and slot.
    clients: HashMap<(usize, u32), Client>,
    slots: HashMap<(usize, u32), DeviceUuid>,
    sessions: Vec<Arc<OwnedFd>>,
    orders: u64,
    segments: u64,
}

/// The daemon. Its threads end with the test program.
pub(crate) struct Daemon {
    state: Arc<Mutex<State>>,
    done: Mutex<Receiver<(u32, u64)>>,
    restored: Mutex<Receiver<u64>>,
}

/// A hang guard.
const PATIENCE: Duration = Duration::from_secs(60);

fn send(fd: impl AsFd, message: &ToLayer, fds: &[BorrowedFd<'_>]) {
    // A client that has ended does not listen any more.
    let _ = socket::send(fd, &message.encode().expect("it fits"), fds);
}

impl Daemon {
    /// Listens in `folder`; every task has this limit on every card (the largest number for none).
    pub(crate) fn start(folder: &Path, limit: Bytes) -> Self {
        std::fs::create_dir_all(folder).expect("a folder");
        let listener = socket::listen(&folder.join("layer.sock")).expect("a socket");
        let state = Arc::new(Mutex::new(State::default()));
        let (done_tx, done) = channel();
        let (restored_tx, restored) = channel();
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            while let Ok(fd) = rustix::net::accept(&listener) {
                let fd = Arc::new(fd);
                let (state, done, restored) = (Arc::clone(&shared), done_tx.clone(), restored_tx.clone());
                let number = {
                    let mut state = state.lock().expect("no panic");
                    state.sessions.push(Arc::clone(&fd));
                    state.sessions.len() - 1
                };
                std::thread::spawn(move || {
                    while let Ok(Some(packet)) = socket::recv(&*fd) {
                        let Ok(message) = ToDaemon::decode(&packet.packet) else {
                            continue;
                        };
                        let mut state = state.lock().expect("no panic");
                        match message {
                            // The test may have stopped listening.
                            ToDaemon::ReclaimDone { outcome, copied, .. } => {
                                let _ = done.send((outcome, copied.0));
                            }
                            ToDaemon::Restored { copied, .. } => {
                                let _ = restored.send(copied.0);
                            }
                            other => state.answer(number, &fd, limit, other),
                        }
                    }
                    let mut state = state.lock().expect("no panic");
                    state.clients.retain(|(session, _), _| *session != number);
                });
            }
        });
        Self {
            state,
            done: Mutex::new(done),
            restored: Mutex::new(restored),
        }
    }

    /// Orders everything of the newest session's first device back; the outcome and the bytes that were copied. An order to a connection that
    /// has ended, or that has told of no device yet, is given anew, as the daemon does: on a busy machine a library may connect twice.
    pub(crate) fn evict_all(&self) -> (u32, u64) {
        let done = self.done.lock().expect("no panic");
        let deadline = Instant::now() + PATIENCE;
        let mut ordered = None;
        loop {
            let session = {
                let mut state = self.state.lock().expect("no panic");
                let newest = state.sessions.len().checked_sub(1).expect("a session");
                let attached = state.clients.contains_key(&(newest, 0));
                if attached && ordered != Some(newest) {
                    state.orders += 1;
                    let order = ToLayer::Reclaim {
                        device: 0,
                        order: state.orders,
                        bytes: Bytes(u64::MAX),
                        reason: b"a test".to_vec(),
                    };
                    send(&*state.sessions[newest], &order, &[]);
                    ordered = Some(newest);
                }
                newest
            };
            match done.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(error) => panic!("the order to session {session} is not answered ({ordered:?}): {error}"),
            }
        }
    }

    /// Evicts, trying again while a program is busy.
    pub(crate) fn evict(&self) -> u64 {
        loop {
            match self.evict_all() {
                (outcome::DONE | outcome::NOTHING_LEFT, copied) => return copied,
                (outcome::BUSY | outcome::CAPTURING | outcome::NO_ROOM, _) => {}
                (other, _) => panic!("the eviction failed: {other}"),
            }
        }
    }

    /// Waits for the next restore.
    pub(crate) fn restored(&self) -> u64 {
        self.restored
            .lock()
            .expect("no panic")
            .recv_timeout(PATIENCE)
            .expect("a restore")
    }

    /// Whether one has happened that nobody has waited for.
    pub(crate) fn has_restored(&self) -> bool {
        self.restored.lock().expect("no panic").try_recv().is_ok()
    }
}

impl State {
    fn answer(&mut self, session: usize, fd: &Arc<OwnedFd>, limit: Bytes, message: ToDaemon) {
        match message {
            ToDaemon::Hello { .. } => {
                let welcome = ToLayer::Welcome {
                    session: session as u64 + 1,
                    task: 1,
                    alloc_wait_ms: 200,
                    alloc_wait_max_ms: 20_000,
                    busy_wait_ms: 20_000,
                };
                send(fd, &welcome, &[]);
            }
            ToDaemon::Attach {
                device,
                total,
                overhead,
                lease,
                ..
            } => {
                let slot =
                    u32::try_from(self.slots.keys().filter(|(s, _)| *s == session).count()).expect("few");
                self.slots.insert((session, slot), device);
                self.clients.insert(
                    (session, slot),
                    Client {
                        lease: lease.0,
                        overhead: overhead.0,
                    },
                );
                let charged_elsewhere = Bytes::ZERO;
                send(
                    fd,
                    &ToLayer::Attached {
                        uuid: device,
                        device: slot,
                        limit,
                        charged_elsewhere,
                        capacity: total,
                    },
                    &[],
                );
            }
            ToDaemon::Ask {
                device, ask, bytes, ..
            } => {
                let Some(client) = self.clients.get_mut(&(session, device)) else {
                    return;
                };
                let over = client
                    .lease
                    .saturating_add(client.overhead)
                    .saturating_add(bytes.0)
                    > limit.0;
                let answer = if over {
                    ToLayer::Deny {
                        device,
                        ask,
                        reason: deny::OVER_LIMIT,
                        last: true,
                    }
                } else {
                    client.lease += bytes.0;
                    ToLayer::Grant { device, ask, bytes }
                };
                send(fd, &answer, &[]);
            }
            ToDaemon::Return { device, bytes } | ToDaemon::ReclaimProgress { device, bytes, .. } => {
                if let Some(client) = self.clients.get_mut(&(session, device)) {
                    client.lease = client
                        .lease
                        .checked_sub(bytes.0)
                        .expect("no more is given back than was granted");
                }
            }
            ToDaemon::Usage { device, overhead, .. } => {
                if let Some(client) = self.clients.get_mut(&(session, device)) {
                    client.overhead = overhead.0;
                }
            }
            ToDaemon::ArenaWant { bytes, .. } if bytes.0 > 0 => {
                self.segments += 1;
                let bytes = Bytes(bytes.0.next_multiple_of(8 << 20));
                let memory =
                    rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
                rustix::fs::ftruncate(&memory, bytes.0).expect("room");
                let segment = SegmentInfo {
                    id: self.segments,
                    bytes,
                };
                send(
                    fd,
                    &ToLayer::ArenaGive {
                        segments: vec![segment],
                    },
                    &[memory.as_fd()],
                );
            }
            ToDaemon::Detach { device } => {
                self.clients.remove(&(session, device));
            }
            _ => {}
        }
    }
}
