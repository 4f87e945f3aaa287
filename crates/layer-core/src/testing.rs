//! What the tests stand on: an engine over a fake device, and a daemon that does what a test tells it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_device::DeviceMemory;
use ebb_device::fake::{Card, FakeDevice, FakeHost};
use ebb_protocol::wire::{SegmentInfo, ask_kind, feature, outcome};
use ebb_protocol::{ToDaemon, ToLayer, socket};
use ebb_units::{Bytes, DeviceUuid};

use crate::engine::Engine;
use crate::gate::Gate;
use crate::{Config, TouchError};

/// The tests' granule.
pub(crate) const G: u64 = 64 << 10;
/// Long enough for any machine: a hang guard, not a measure.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// How the daemon answers by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script {
    pub(crate) limit: u64,
    pub(crate) capacity: u64,
    /// Answers asks for allocations, out of the capacity.
    pub(crate) grant_allocs: bool,
    /// Answers asks for restores.
    pub(crate) grant_restores: bool,
    /// How much arena it has.
    pub(crate) arena: u64,
    /// Room on another card that it lends; `None`: it cannot do that.
    pub(crate) lends: Option<u64>,
    pub(crate) segment: u64,
    /// Answers `Attach` at all.
    pub(crate) answer_attach: bool,
    /// It wants nothing pinned but a ring.
    pub(crate) ring: bool,
    /// It has host copies in common.
    pub(crate) common: bool,
    /// Goes on with sessions, as a daemon that did not die.
    pub(crate) resume: bool,
    pub(crate) alloc_wait: Duration,
    pub(crate) alloc_wait_max: Duration,
    pub(crate) busy_wait: Duration,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            limit: u64::MAX,
            capacity: 1 << 40,
            grant_allocs: true,
            grant_restores: true,
            arena: 1 << 30,
            lends: None,
            segment: 16 * G,
            answer_attach: true,
            ring: false,
            common: false,
            resume: false,
            alloc_wait: Duration::from_millis(100),
            alloc_wait_max: LONG,
            busy_wait: LONG,
        }
    }
}

/// What a finished order came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OrderEnd {
    pub(crate) outcome: u32,
    pub(crate) freed: u64,
    pub(crate) copied: u64,
}

#[derive(Debug, Default)]
struct Books {
    script: Script,
    connection: Option<Arc<OwnedFd>>,
    connections: u64,
    /// Lease by slot.
    lease: BTreeMap<u32, u64>,
    freed: BTreeMap<u64, u64>,
    ended: BTreeMap<u64, OrderEnd>,
    next_order: u64,
    next_segment: u64,
    given: BTreeMap<u64, u64>,
    /// The memory of all segments that were ever given, as the daemon keeps it.
    memories: BTreeMap<u64, Arc<OwnedFd>>,
    restored: u64,
    /// Room on the other card that the program has, by its own account.
    lodged: u64,
    log: Vec<ToDaemon>,
    stop: bool,
}

/// The scripted daemon: a thread that accepts connections one after another.
pub(crate) struct Daemon {
    path: PathBuf,
    shared: Arc<(Mutex<Books>, Condvar)>,
    _folder: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.lock().stop = true;
        self.disconnect();
        // Wakes the thread out of its accept.
        let _ = socket::connect(&self.path);
    }
}

impl Daemon {
    pub(crate) fn start(script: Script) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layer.sock");
        let listener = socket::listen(&path).unwrap();
        let shared = Arc::new((
            Mutex::new(Books {
                script,
                ..Books::default()
            }),
            Condvar::new(),
        ));
        let theirs = Arc::clone(&shared);
        std::thread::spawn(move || {
            loop {
                let Ok(peer) = rustix::net::accept(&listener) else {
                    return;
                };
                let peer = Arc::new(peer);
                {
                    let mut books = theirs.0.lock().unwrap();
                    if books.stop {
                        return;
                    }
                    books.connection = Some(Arc::clone(&peer));
                    books.connections += 1;
                    theirs.1.notify_all();
                }
                serve(&theirs, &peer);
            }
        });
        Self {
            path,
            shared,
            _folder: folder,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a condition holds.
    fn until<T>(&self, what: &str, mut ready: impl FnMut(&mut Books) -> Option<T>) -> T {
        let deadline = Instant::now() + LONG;
        let mut books = self.lock();
        loop {
            if let Some(value) = ready(&mut books) {
                return value;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "waited in vain for {what}; log: {:#?}",
                books.log
            );
            books = self
                .shared
                .1
                .wait_timeout(books, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(crate) fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.lock().script);
    }

    pub(crate) fn send(&self, message: ToLayer) {
        let connection = self.lock().connection.clone().expect("connected");
        socket::send(&*connection, &message.encode().unwrap(), &[]).unwrap();
    }

    pub(crate) fn send_with(&self, message: ToLayer, fds: &[OwnedFd]) {
        let connection = self.lock().connection.clone().expect("connected");
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        socket::send(&*connection, &message.encode().unwrap(), &fds).unwrap();
    }

    /// The memory of a segment.
    pub(crate) fn memory(&self, id: u64) -> Arc<OwnedFd> {
        self.lock().memories[&id].clone()
    }

    /// Bytes that do not come from a protocol at all.
    pub(crate) fn send_raw(&self, bytes: &[u8]) {
        let connection = self.lock().connection.clone().expect("connected");
        socket::send(&*connection, bytes, &[]).unwrap();
    }

    /// Dies, as far as the layer can see. Its books are lost.
    pub(crate) fn disconnect(&self) {
        let mut books = self.lock();
        if let Some(connection) = books.connection.take() {
            let _ = rustix::net::shutdown(&*connection, rustix::net::Shutdown::Both);
        }
        books.lease.clear();
        books.given.clear();
    }

    pub(crate) fn connections(&self) -> u64 {
        self.lock().connections
    }

    pub(crate) fn wait_connections(&self, n: u64) {
        self.until("a connection", |books| (books.connections >= n).then_some(()));
    }

    /// Orders bytes back and waits for the end.
    pub(crate) fn reclaim(&self, bytes: u64) -> OrderEnd {
        let order = self.order(bytes);
        self.end_of(order)
    }

    /// Orders away what the driver placed by itself, and waits for the end.
    pub(crate) fn send_away(&self, bytes: u64) -> OrderEnd {
        let order = {
            let mut books = self.lock();
            books.next_order += 1;
            books.next_order
        };
        self.send(ToLayer::SendAway {
            device: 0,
            order,
            bytes: Bytes(bytes),
            reason: b"a test wants it".to_vec(),
        });
        self.end_of(order)
    }

    /// All messages that came.
    pub(crate) fn each(&self, mut look: impl FnMut(&ToDaemon)) {
        self.lock().log.iter().for_each(&mut look);
    }

    pub(crate) fn order(&self, bytes: u64) -> u64 {
        let order = {
            let mut books = self.lock();
            books.next_order += 1;
            books.next_order
        };
        self.send(ToLayer::Reclaim {
            device: 0,
            order,
            bytes: Bytes(bytes),
            reason: b"a test wants it".to_vec(),
        });
        order
    }

    pub(crate) fn end_of(&self, order: u64) -> OrderEnd {
        self.until("the end of an order", |books| books.ended.get(&order).copied())
    }

    pub(crate) fn grant(&self, ask: u64, bytes: u64) {
        *self.lock().lease.entry(0).or_default() += bytes;
        self.send(ToLayer::Grant {
            device: 0,
            ask,
            bytes: Bytes(bytes),
        });
    }

    /// The next message (of those that came since the last look) that `pick` wants.
    pub(crate) fn expect<T>(&self, what: &str, pick: impl Fn(&ToDaemon) -> Option<T>) -> T {
        self.until(what, |books| {
            let at = books.log.iter().position(|message| pick(message).is_some())?;
            let found = pick(&books.log[at]);
            books.log.drain(..=at);
            found
        })
    }

    pub(crate) fn expect_ask(&self, kind: u32) -> (u64, u64, bool) {
        self.expect("an ask", |message| match message {
            ToDaemon::Ask {
                ask,
                kind: k,
                bytes,
                long,
                ..
            } if *k == kind => Some((*ask, bytes.get(), *long)),
            _ => None,
        })
    }

    pub(crate) fn saw(&self, pick: impl Fn(&ToDaemon) -> bool) -> bool {
        self.lock().log.iter().any(pick)
    }

    pub(crate) fn lease(&self) -> u64 {
        self.lock().lease.get(&0).copied().unwrap_or(0)
    }

    pub(crate) fn restored(&self) -> u64 {
        self.lock().restored
    }

    pub(crate) fn wait_restored(&self, n: u64) {
        self.until("a restore", |books| (books.restored >= n).then_some(()));
    }

    pub(crate) fn arena_given(&self) -> u64 {
        self.lock().given.values().sum()
    }

    /// Waits until the program has so much room on the other card.
    pub(crate) fn wait_lodged(&self, bytes: u64) {
        self.until("room on the other card", |books| {
            (books.lodged == bytes).then_some(())
        });
    }

    /// The other card needs so much of its room.
    pub(crate) fn want_lodging(&self, bytes: u64) {
        self.send(ToLayer::LodgingWanted {
            device: 0,
            lender: lender(),
            bytes: Bytes(bytes),
        });
    }

    pub(crate) fn wait_arena(&self, at_most: u64) {
        self.until("arena to come back", |books| {
            (books.given.values().sum::<u64>() <= at_most).then_some(())
        });
    }

    /// Waits until a usage with `pick` was told.
    pub(crate) fn wait_usage(&self, pick: impl Fn(&ToDaemon) -> bool) {
        self.until("a usage", |books| {
            books
                .log
                .iter()
                .rev()
                .find(|message| matches!(message, ToDaemon::Usage { .. }))
                .filter(|message| pick(message))
                .map(|_| ())
        });
    }
}

fn serve(shared: &(Mutex<Books>, Condvar), peer: &Arc<OwnedFd>) {
    while let Ok(Some(received)) = socket::recv(peer) {
        let Ok(message) = ToDaemon::decode(&received.packet) else {
            continue;
        };
        let mut books = shared.0.lock().unwrap();
        if !books
            .connection
            .as_ref()
            .is_some_and(|open| Arc::ptr_eq(open, peer))
        {
            // What was under way when the daemon died is read by nobody: its books are lost.
            return;
        }
        let answers = books.take(&message);
        books.log.push(message);
        drop(books);
        for (answer, fds) in answers {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            if socket::send(peer, &answer.encode().unwrap(), &fds).is_err() {
                return;
            }
        }
        shared.1.notify_all();
    }
}

type Answers = Vec<(ToLayer, Vec<OwnedFd>)>;

impl Books {
    fn take(&mut self, message: &ToDaemon) -> Answers {
        let script = self.script;
        match message {
            ToDaemon::Hello { resumes, .. } => {
                let welcome = ToLayer::Welcome {
                    session: if script.resume && *resumes != 0 {
                        *resumes
                    } else {
                        self.connections
                    },
                    task: 1,
                    alloc_wait_ms: ms(script.alloc_wait),
                    alloc_wait_max_ms: ms(script.alloc_wait_max),
                    busy_wait_ms: ms(script.busy_wait),
                };
                let lodging = script.lends.map_or(0, |_| feature::LODGING);
                let ring = if script.ring { feature::RING } else { 0 };
                let common = if script.common { feature::COMMON } else { 0 };
                let bits = lodging | ring | common;
                let features = (bits != 0).then(|| (ToLayer::Features { bits }, Vec::new()));
                [(welcome, Vec::new())].into_iter().chain(features).collect()
            }
            ToDaemon::LodgingAsk { device, bytes } => {
                let lent = bytes
                    .get()
                    .min(script.lends.unwrap_or(0).saturating_sub(self.lodged));
                self.lodged += lent;
                let answer = ToLayer::LodgingLent {
                    device: *device,
                    lender: lender(),
                    bytes: Bytes(lent),
                };
                vec![(answer, Vec::new())]
            }
            ToDaemon::LodgingLeft {
                lender: of, bytes, ..
            } => {
                assert_eq!(*of, lender());
                self.lodged = self
                    .lodged
                    .checked_sub(bytes.get())
                    .expect("no more is left than was lent");
                Vec::new()
            }
            ToDaemon::LodgingHeld { held, .. } => {
                self.lodged = held.iter().map(|at| at.bytes.get()).sum();
                Vec::new()
            }
            ToDaemon::Attach { device, lease, .. } if script.answer_attach => {
                self.lease.insert(0, lease.get());
                vec![(
                    ToLayer::Attached {
                        uuid: *device,
                        device: 0,
                        limit: Bytes(script.limit),
                        charged_elsewhere: Bytes::ZERO,
                        capacity: Bytes(script.capacity),
                    },
                    Vec::new(),
                )]
            }
            ToDaemon::Ask {
                device,
                ask,
                kind,
                bytes,
                ..
            } => {
                let may = if *kind == ask_kind::RESTORE {
                    script.grant_restores
                } else {
                    script.grant_allocs
                };
                let lease = self.lease.entry(*device).or_default();
                if may && *lease + bytes.get() <= script.capacity {
                    *lease += bytes.get();
                    let grant = ToLayer::Grant {
                        device: *device,
                        ask: *ask,
                        bytes: *bytes,
                    };
                    return vec![(grant, Vec::new())];
                }
                Vec::new()
            }
            ToDaemon::Return { device, bytes } => {
                self.give(*device, bytes.get());
                Vec::new()
            }
            ToDaemon::ReclaimProgress { device, order, bytes } => {
                self.give(*device, bytes.get());
                *self.freed.entry(*order).or_default() += bytes.get();
                Vec::new()
            }
            ToDaemon::ReclaimDone {
                order,
                outcome,
                copied,
                ..
            } => {
                let freed = self.freed.get(order).copied().unwrap_or(0);
                let end = OrderEnd {
                    outcome: *outcome,
                    freed,
                    copied: copied.get(),
                };
                assert!(self.ended.insert(*order, end).is_none(), "an order ends once");
                Vec::new()
            }
            ToDaemon::Restored { .. } => {
                self.restored += 1;
                Vec::new()
            }
            ToDaemon::ArenaWant { bytes, .. } => self.arena(bytes.get()),
            ToDaemon::ArenaReturn { segments } => {
                for id in segments {
                    assert!(self.given.remove(id).is_some(), "segment {id} was not lent");
                }
                Vec::new()
            }
            ToDaemon::ArenaDeclare { segments } => {
                for segment in segments {
                    self.given.insert(segment.id, segment.bytes.get());
                    self.next_segment = self.next_segment.max(segment.id);
                }
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    fn give(&mut self, device: u32, bytes: u64) {
        let lease = self.lease.entry(device).or_default();
        *lease = lease
            .checked_sub(bytes)
            .expect("no more lease comes back than was granted");
    }

    fn arena(&mut self, want: u64) -> Answers {
        let mut answers = Vec::new();
        let target = want.min(self.script.arena);
        while self.given.values().sum::<u64>() + self.script.segment
            <= target.next_multiple_of(self.script.segment)
            && self.given.values().sum::<u64>() < self.script.arena
        {
            self.next_segment += 1;
            let info = SegmentInfo {
                id: self.next_segment,
                bytes: Bytes(self.script.segment),
            };
            let fd = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, self.script.segment).unwrap();
            self.given.insert(info.id, info.bytes.get());
            self.memories.insert(info.id, Arc::new(fd.try_clone().unwrap()));
            answers.push((ToLayer::ArenaGive { segments: vec![info] }, vec![fd]));
        }
        answers
    }
}

fn ms(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap()
}

impl Daemon {
    pub(crate) fn path(&self) -> PathBuf {
        self.path.clone()
    }
}

/// An engine over a fake device.
pub(crate) struct Rig {
    pub(crate) engine: Arc<Engine>,
    pub(crate) fake: Arc<FakeDevice>,
    pub(crate) host: Arc<FakeHost>,
    pub(crate) card: Card,
    /// Another card, in reach.
    pub(crate) other: Card,
    pub(crate) device: usize,
}

impl Drop for Rig {
    /// The gate lives for ever, and with it the engine's core.
    fn drop(&mut self) {
        self.host.clear();
    }
}

/// Bytes that depend on their place and a seed.
pub(crate) fn pattern(size: u64, seed: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::new();
    for word in 0..size.div_ceil(8) {
        let mixed = (word ^ u64::from(seed) << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bytes.extend_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
    }
    bytes.truncate(usize::try_from(size).unwrap());
    bytes
}

pub(crate) fn uuid() -> DeviceUuid {
    DeviceUuid([7; 16])
}

/// The card that lends room.
pub(crate) fn lender() -> DeviceUuid {
    DeviceUuid([8; 16])
}

impl Rig {
    pub(crate) fn new(daemon: Option<&Daemon>, capacity: u64) -> Self {
        Self::with(daemon, Card::new(capacity), capacity, G, |_| {})
    }

    pub(crate) fn with(
        daemon: Option<&Daemon>,
        card: Card,
        total: u64,
        granule: u64,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let host = Arc::new(FakeHost::default());
        let fake = Arc::new(FakeDevice::new(card.clone(), host.clone(), granule));
        let other = Card::new(1 << 40);
        fake.reach(lender(), other.clone());
        let mut config = Config::new(host.clone());
        config.sockets = daemon.map(Daemon::path).into_iter().collect();
        config.program = "test".into();
        config.connect_wait = LONG;
        config.arena_wait = LONG;
        config.lodging_wait = LONG;
        config.busy_wait = LONG;
        config.usage_every = Duration::from_millis(1);
        config.cache_max = Bytes(64 * granule);
        // Leases are what tests count.
        config.ahead_max = Bytes::ZERO;
        // Small chunks, so that small allocations have several.
        config.chunk_max = Bytes(8 * granule);
        change(&mut config);
        let gate: &'static Gate = Box::leak(Box::new(Gate::new()));
        let engine = Engine::start(config, gate);
        let memory: Arc<dyn DeviceMemory> = fake.clone();
        let device = engine
            .attach_device(uuid(), memory, Bytes(total), Bytes::ZERO)
            .unwrap();
        Self {
            engine,
            fake,
            host,
            card,
            other,
            device,
        }
    }

    pub(crate) fn alloc(&self, size: u64) -> u64 {
        self.engine.alloc(self.device, size, 1).unwrap()
    }

    /// A kernel of the program, as the hooks run it.
    pub(crate) fn touch<T>(&self, run: impl FnOnce(&FakeDevice) -> T) -> Result<T, TouchError> {
        let gate = self.engine.gate();
        gate.enter()?;
        let value = run(&self.fake);
        gate.leave();
        Ok(value)
    }

    /// Fills an allocation with a pattern of its own.
    pub(crate) fn fill(&self, ptr: u64, size: u64, seed: u8) {
        let bytes = pattern(size, seed);
        self.touch(|fake| fake.write(ptr, &bytes)).unwrap().unwrap();
    }

    /// Whether an allocation still holds its pattern.
    pub(crate) fn holds(&self, ptr: u64, size: u64, seed: u8) -> bool {
        let mut bytes = vec![0; usize::try_from(size).unwrap()];
        self.touch(|fake| fake.read(ptr, &mut bytes)).unwrap().unwrap();
        bytes == pattern(size, seed)
    }

    /// Nothing that a correct program does not do has been done.
    pub(crate) fn assert_clean(&self) {
        assert_eq!(self.fake.violations(), Vec::<String>::new());
    }

    /// Everything is given back: no handle, mapping, reservation or registration is left.
    pub(crate) fn assert_gone_after_detach(&self) {
        self.engine.detach_device(self.device);
        self.assert_clean();
        assert_eq!(
            (
                self.fake.handles(),
                self.fake.mapped(),
                self.fake.reserved(),
                self.fake.registered()
            ),
            (0, 0, 0, 0),
            "handles, mapped, reserved, registered; {}",
            self.engine.report_json()
        );
        assert_eq!((self.card.used(), self.other.used()), (0, 0));
    }
}

/// Whether an order was carried out as far as there was something.
pub(crate) fn done(end: OrderEnd) -> bool {
    end.outcome == outcome::DONE
}

impl Rig {
    /// Waits until a condition holds.
    pub(crate) fn until(&self, what: &str, ready: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + LONG;
        while !ready(self) {
            assert!(
                Instant::now() < deadline,
                "waited in vain for {what}; {}",
                self.engine.report_json()
            );
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Looks at the device's state.
    pub(crate) fn state<T>(&self, look: impl FnOnce(&crate::device::State) -> T) -> T {
        look(&self.engine.core.device(self.device).unwrap().lock())
    }

    pub(crate) fn books(&self) -> crate::pool::Books {
        self.state(|state| state.pool.books)
    }
}
