//! For tests: a daemon in this process, and clients that speak its protocols without a GPU.
//!
//! The daemon tells clients apart by process. A client of its own process is a child that connects, hands the connected
//! socket to the test and then only lives: what the test says over it comes, for the daemon, from the child. The child is this
//! test's own program again, told by its environment to run only the test that calls [`child_main`]:
//!
//! ```text
//! #[test]
//! fn child() {
//!     ebb_node::test_util::child_main();
//! }
//! ```

use std::io::{BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ebb_protocol::control::{Answer, NewTask, Payload, Request, Snapshot, read_line, write_line};
use ebb_protocol::socket::{self, Received};
use ebb_protocol::wire::SegmentInfo;
use ebb_protocol::{ToDaemon, ToLayer, paths};
use ebb_units::{Bytes, DeviceUuid, Priority};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::{Config, Daemon, Handle, Surroundings};

/// How long to wait for what must come. Only a guard against hanging.
pub const PATIENCE: Duration = Duration::from_secs(30);

const CHILD: &str = "EBB_NODE_TEST_CHILD";

/// The card that test clients attach to.
pub const CARD: DeviceUuid = DeviceUuid(*b"test card number");

/// A daemon in a thread of this process. Stopped when dropped.
#[derive(Debug)]
pub struct TestDaemon {
    dir: PathBuf,
    handle: Handle,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl TestDaemon {
    /// Settings for a daemon in `dir`, without NVML.
    ///
    /// # Panics
    /// If the settings are wrong.
    #[must_use]
    pub fn config(dir: &Path, more: &str) -> Config {
        let text = format!(
            "socket_dir = {:?}\nstate_dir = {:?}\nnvml = \"off\"\nidle_exit = \"off\"\n{more}\n",
            dir.join("run"),
            dir.join("state")
        );
        Config::parse(&text, Path::new("test.toml"), &Surroundings::default()).expect("valid settings")
    }

    /// A daemon in `dir` with more lines of settings.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start(dir: &Path, more: &str) -> Self {
        Self::start_with(dir, Self::config(dir, more))
    }

    /// A daemon with these settings.
    ///
    /// # Panics
    /// If it does not start.
    #[must_use]
    pub fn start_with(dir: &Path, config: Config) -> Self {
        let daemon = Daemon::start(config).expect("the daemon starts");
        let handle = daemon.handle();
        let thread = std::thread::spawn(move || daemon.run());
        Self {
            dir: dir.into(),
            handle,
            thread: Some(thread),
        }
    }

    /// Its folder of sockets.
    #[must_use]
    pub fn socket_dir(&self) -> PathBuf {
        self.dir.join("run")
    }

    /// Stops it and waits for its end.
    ///
    /// # Panics
    /// If it panicked.
    pub fn stop(mut self) {
        self.end();
    }

    /// Waits until it ends by itself.
    ///
    /// # Panics
    /// If it panicked.
    pub fn wait(mut self) {
        self.thread
            .take()
            .map(|thread| thread.join().expect("the daemon does not panic"));
    }

    fn end(&mut self) {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            let result = thread.join();
            if !std::thread::panicking() {
                result
                    .expect("the daemon does not panic")
                    .expect("the daemon ends well");
            }
        }
    }

    /// How often its driver was woken so far.
    #[must_use]
    pub fn wakeups(&self) -> u64 {
        self.handle.wakeups()
    }

    /// A connection of a command line.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn control(&self) -> Control {
        let stream = UnixStream::connect(self.socket_dir().join(paths::CONTROL_SOCKET)).expect("it listens");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a timeout can be set");
        Control {
            reader: BufReader::new(stream),
        }
    }

    /// One request, one answer.
    #[must_use]
    pub fn ask(&self, request: &Request) -> Answer {
        self.control().ask(request)
    }

    /// All that it shows.
    ///
    /// # Panics
    /// If it shows something else.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        match self.ask(&Request::List) {
            Answer::Ok(Payload::List(snapshot)) => snapshot,
            other => panic!("no listing: {other:?}"),
        }
    }

    /// Waits until the listing is as it should be.
    ///
    /// # Panics
    /// If it never is.
    pub fn until(&self, what: &str, wanted: impl Fn(&Snapshot) -> bool) -> Snapshot {
        let start = Instant::now();
        loop {
            let snapshot = self.snapshot();
            if wanted(&snapshot) {
                return snapshot;
            }
            assert!(start.elapsed() < PATIENCE, "never: {what}: {snapshot:#?}");
            std::thread::yield_now();
        }
    }

    /// A task whose first process is this one; its token.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn task(&self, name: &str, request: Bytes, limit: Option<Bytes>) -> [u8; 32] {
        let new = NewTask {
            name: name.into(),
            request,
            limit,
            priority: Priority::Normal,
            idle_release_ms: Some(0),
            hibernate_after_ms: None,
        };
        match self.ask(&Request::CreateTask(new)) {
            Answer::Ok(Payload::Task { token, .. }) => parse_token(&token),
            other => panic!("no task: {other:?}"),
        }
    }

    /// A client in this process.
    ///
    /// # Panics
    /// If it is not welcome.
    #[must_use]
    pub fn client(&self, token: [u8; 32]) -> Client {
        Client::hello(self.raw(), token, 0)
    }

    /// A connection that has said nothing yet.
    ///
    /// # Panics
    /// If nobody listens.
    #[must_use]
    pub fn raw(&self) -> OwnedFd {
        socket::connect(&self.socket_dir().join(paths::LAYER_SOCKET)).expect("it listens")
    }

    /// A client in a process of its own.
    #[must_use]
    pub fn process(&self, token: [u8; 32]) -> ProcessClient {
        ProcessClient::start(&self.socket_dir(), token)
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        self.end();
    }
}

fn parse_token(hex: &str) -> [u8; 32] {
    crate::statefile::from_hex(hex).expect("a token is 64 hexadecimal digits")
}

/// A command line's connection.
#[derive(Debug)]
pub struct Control {
    reader: BufReader<UnixStream>,
}

impl Control {
    /// Sends a request without waiting.
    ///
    /// # Panics
    /// If the daemon hung up.
    pub fn send(&mut self, request: &Request) {
        write_line(self.reader.get_mut(), request).expect("the daemon listens");
    }

    /// The next answer.
    ///
    /// # Panics
    /// If none comes.
    #[must_use]
    pub fn answer(&mut self) -> Answer {
        read_line(&mut self.reader).expect("the daemon answers")
    }

    /// A request and its answer.
    #[must_use]
    pub fn ask(&mut self, request: &Request) -> Answer {
        self.send(request);
        self.answer()
    }
}

/// What a library would be to the daemon.
#[derive(Debug)]
pub struct Client {
    /// The connection.
    pub fd: OwnedFd,
    /// Number of the session.
    pub session: u64,
    /// The task that it belongs to.
    pub task: u64,
    /// Lease on the test card, by its own account.
    pub lease: Bytes,
    /// Arena segments in its hands.
    pub segments: Vec<(SegmentInfo, OwnedFd)>,
    next_ask: u64,
}

impl Client {
    /// Says hello over a connection.
    ///
    /// # Panics
    /// If it is not welcome.
    #[must_use]
    pub fn hello(fd: OwnedFd, token: [u8; 32], resumes: u64) -> Self {
        let mut program = [0; 64];
        program[..4].copy_from_slice(b"test");
        let hello = ToDaemon::Hello {
            pid: std::process::id(),
            token,
            program,
            resumes,
        };
        let mut client = Self {
            fd,
            session: 0,
            task: 0,
            lease: Bytes::ZERO,
            segments: Vec::new(),
            next_ask: 1,
        };
        client.send(&hello);
        match client.recv() {
            ToLayer::Welcome { session, task, .. } => (client.session, client.task) = (session, task),
            other => panic!("not welcome: {other:?}"),
        }
        // Right behind it; what it offers is tested with real processes.
        let features = client.recv();
        assert!(matches!(features, ToLayer::Features { .. }), "{features:?}");
        client
    }

    /// Sends a message.
    ///
    /// # Panics
    /// If the daemon hung up.
    pub fn send(&self, message: &ToDaemon) {
        self.send_with(message, &[]);
    }

    /// Sends a message with descriptors.
    ///
    /// # Panics
    /// If the daemon hung up.
    pub fn send_with(&self, message: &ToDaemon, fds: &[&OwnedFd]) {
        let packet = message.encode().expect("a message fits a packet");
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        socket::send(&self.fd, &packet, &fds).expect("the daemon listens");
    }

    /// The next message, if one comes in time. Segments are kept in [`Self::segments`].
    ///
    /// # Panics
    /// If the daemon hung up or sends nonsense.
    pub fn poll(&mut self, wait: Duration) -> Option<ToLayer> {
        if !readable(&self.fd, wait) {
            return None;
        }
        let Received { packet, fds } = socket::recv(&self.fd).expect("readable").expect("not hung up");
        let message = ToLayer::decode(&packet).expect("the daemon sends messages");
        if let ToLayer::ArenaGive { segments } = &message {
            assert_eq!(segments.len(), fds.len(), "a descriptor for each segment");
            self.segments.extend(segments.iter().copied().zip(fds));
        }
        Some(message)
    }

    /// The next message.
    ///
    /// # Panics
    /// If none comes.
    pub fn recv(&mut self) -> ToLayer {
        self.poll(PATIENCE).expect("the daemon says something")
    }

    /// The next message that is not about limits or the arena.
    pub fn answer(&mut self) -> ToLayer {
        loop {
            match self.recv() {
                ToLayer::Limit { .. } | ToLayer::ArenaGive { .. } | ToLayer::ArenaRecall { .. } => {}
                message => return message,
            }
        }
    }

    /// Makes a context on the test card. Its slot, the limit, and what others of the task are charged.
    ///
    /// # Panics
    /// If that does not work.
    pub fn attach(&mut self, total: Bytes, lease: Bytes, evicted: Bytes) -> (u32, Bytes, Bytes) {
        self.send(&ToDaemon::Attach {
            device: CARD,
            total,
            granularity: ebb_units::GRANULE,
            lease,
            evicted,
            overhead: Bytes::ZERO,
        });
        self.lease = lease;
        match self.answer() {
            ToLayer::Attached {
                uuid,
                device,
                limit,
                charged_elsewhere,
                ..
            } => {
                assert_eq!(uuid, CARD);
                (device, limit, charged_elsewhere)
            }
            other => panic!("not attached: {other:?}"),
        }
    }

    /// Asks for lease; the number of the ask.
    pub fn ask(&mut self, kind: u32, bytes: Bytes, long: bool) -> u64 {
        let ask = self.next_ask;
        self.next_ask += 1;
        self.send(&ToDaemon::Ask {
            device: 0,
            ask,
            kind,
            bytes,
            long,
        });
        ask
    }

    /// Whether an allocation was granted; waits for the answer.
    ///
    /// # Panics
    /// If another answer comes.
    pub fn alloc(&mut self, bytes: Bytes) -> bool {
        let ask = self.ask(ebb_protocol::wire::ask_kind::ALLOC, bytes, true);
        match self.answer() {
            ToLayer::Grant {
                ask: of,
                bytes: granted,
                ..
            } => {
                assert_eq!((of, granted), (ask, bytes), "an allocation is granted whole");
                self.lease += bytes;
                self.used();
                true
            }
            ToLayer::Deny { ask: of, .. } => {
                assert_eq!(of, ask);
                false
            }
            other => panic!("no answer to an ask: {other:?}"),
        }
    }

    /// Says that all its lease is in use.
    pub fn used(&self) {
        self.usage(self.lease, Bytes::ZERO, 1);
    }

    /// Says what it has.
    pub fn usage(&self, resident: Bytes, evicted: Bytes, touches: u64) {
        self.usage_with(resident, evicted, touches, [Bytes::ZERO; 2]);
    }

    /// Says how much of what it has no allocation uses.
    pub fn usage_cached(&self, resident: Bytes, cached: Bytes) {
        self.send(&ToDaemon::Usage {
            device: 0,
            allocated: resident.saturating_sub(cached),
            resident,
            evicted: Bytes::ZERO,
            cached,
            pinned: Bytes::ZERO,
            overhead: Bytes::ZERO,
            touches: 1,
            allocations: 1,
            managed: Bytes::ZERO,
            managed_out: Bytes::ZERO,
            exported: Bytes::ZERO,
            imported: Bytes::ZERO,
        });
    }

    /// The same, with what it exported and imported by handle.
    pub fn usage_with(
        &self,
        resident: Bytes,
        evicted: Bytes,
        touches: u64,
        [exported, imported]: [Bytes; 2],
    ) {
        self.send(&ToDaemon::Usage {
            device: 0,
            allocated: resident.saturating_add(evicted),
            resident,
            evicted,
            cached: Bytes::ZERO,
            pinned: Bytes::ZERO,
            overhead: Bytes::ZERO,
            touches,
            allocations: 1,
            managed: Bytes::ZERO,
            managed_out: Bytes::ZERO,
            exported,
            imported,
        });
    }

    /// Gives lease back.
    pub fn give_back(&mut self, bytes: Bytes) {
        self.lease = self.lease.saturating_sub(bytes);
        self.send(&ToDaemon::Return { device: 0, bytes });
    }

    /// Obeys a reclaim as a library would that copies everything out in one step.
    pub fn obey(&mut self, order: u64, bytes: Bytes) {
        let bytes = bytes.min(self.lease);
        self.lease -= bytes;
        self.send(&ToDaemon::ReclaimProgress {
            device: 0,
            order,
            bytes,
        });
        let outcome = ebb_protocol::wire::outcome::DONE;
        self.send(&ToDaemon::ReclaimDone {
            device: 0,
            order,
            outcome,
            copied: bytes,
            nanos: 1_000_000,
        });
    }

    /// Whether the daemon has hung up.
    #[must_use]
    pub fn dropped(&self) -> bool {
        loop {
            if !readable(&self.fd, PATIENCE) {
                return false;
            }
            match socket::recv(&self.fd) {
                Ok(None) | Err(_) => return true,
                Ok(Some(_)) => {}
            }
        }
    }
}

/// Waits until something can be read, or the peer hung up.
#[must_use]
pub fn readable(fd: &OwnedFd, wait: Duration) -> bool {
    let wait = Timespec {
        tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(wait.subsec_nanos()),
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&wait)), Ok(n) if n > 0)
}

/// A client in a process of its own. Killed when dropped.
#[derive(Debug)]
pub struct ProcessClient {
    child: Child,
    helper: UnixStream,
    /// What it says and hears.
    pub client: Client,
}

impl std::ops::Deref for ProcessClient {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.client
    }
}

impl std::ops::DerefMut for ProcessClient {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

impl ProcessClient {
    /// A process that says hello with this token.
    ///
    /// # Panics
    /// If it cannot be started, or the test has no `child` test.
    #[must_use]
    pub fn start(socket_dir: &Path, token: [u8; 32]) -> Self {
        let (helper, theirs) = UnixStream::pair().expect("a socket pair");
        let child = Command::new(std::env::current_exe().expect("a process knows its program"))
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, socket_dir.join(paths::LAYER_SOCKET))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .expect("this program starts again");
        let fd = new_connection(&helper);
        Self {
            child,
            helper,
            client: Client::hello(fd, token, 0),
        }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A further connection of the same process.
    #[must_use]
    pub fn connect(&self) -> OwnedFd {
        new_connection(&self.helper)
    }

    /// `kill -9`. The test still holds the socket: the daemon knows by the death alone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ProcessClient {
    fn drop(&mut self) {
        self.kill();
    }
}

fn new_connection(helper: &UnixStream) -> OwnedFd {
    rustix::io::write(helper, b"c").expect("the child listens");
    let received = socket::recv(helper)
        .expect("the child answers")
        .expect("the child lives");
    received.fds.into_iter().next().expect("the child sends a socket")
}

/// In a child: connects whenever the test says so, hands the socket over, and lives. Elsewhere: does nothing.
///
/// # Panics
/// If nobody listens.
pub fn child_main() {
    let Some(path) = std::env::var_os(CHILD) else {
        return;
    };
    let mut byte = [0];
    while matches!(std::io::stdin().read(&mut byte), Ok(1)) {
        let fd = socket::connect(Path::new(&path)).expect("the daemon listens");
        socket::send(std::io::stdin(), b"s", &[fd.as_fd()]).expect("the test listens");
    }
}
