//! The thread that owns the socket.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ebb_protocol::ToDaemon;
use ebb_protocol::socket;
use ebb_protocol::wire::{ToLayer, WireError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::time::Timespec;

use super::{Link, Status, incoming};
use crate::core::Core;
use crate::device::Mode;
use crate::fd::OurFd;
use crate::sleep;

/// Between attempts to connect.
const RETRY: Duration = Duration::from_secs(1);
/// A daemon that takes nothing for so long is stuck.
const STUCK: Duration = Duration::from_secs(10);
/// Packets read before looking at anything else.
const BURST: usize = 64;

/// The program closed what it does not know.
const CLOSED: &str = "the program closed our descriptors";

/// Why a connection ended.
enum End {
    /// Try again.
    Lost(String),
    /// The daemon does not want us.
    Refused(String),
    /// The engine was dropped.
    Closed,
}

pub(super) fn run(core: &Arc<Core>) {
    let link = &core.link;
    let mut session = 0;
    let mut epoch = 0;
    loop {
        let end = match connect(core) {
            Ok(socket) => {
                link.saw_daemon();
                epoch += 1;
                link.in_child[0].set(&socket);
                let end = match link.new_bell() {
                    Ok(bell) => Connection::new(core, &socket, &bell, epoch).serve(&mut session),
                    Err(error) => End::Lost(format!("no bell: {error}")),
                };
                link.drop_bell();
                link.saw_daemon();
                end
            }
            Err(why) => End::Lost(why),
        };
        leave(core);
        match end {
            End::Lost(why) => {
                if link.status() != Status::Alone(why.clone()) {
                    core.events.note(format!("no daemon: {why}"));
                }
                link.set_status(Status::Alone(why));
            }
            End::Refused(why) => {
                core.events.note(format!("the daemon refused: {why}"));
                link.set_status(Status::Refused(why));
                return;
            }
            End::Closed => return,
        }
        if core.is_closed() {
            return;
        }
        std::thread::sleep(RETRY);
    }
}

fn connect(core: &Core) -> Result<OurFd, String> {
    let mut why = String::new();
    for path in &core.config.sockets {
        match open(path) {
            Ok(socket) => return Ok(socket),
            Err(error) => {
                if !why.is_empty() {
                    why.push_str("; ");
                }
                why.push_str(&format!("{}: {error}", path.display()));
            }
        }
    }
    Err(why)
}

fn open(path: &Path) -> Result<OurFd, Errno> {
    let socket = OurFd::new(socket::connect(path)?);
    rustix::io::ioctl_fionbio(socket.get().ok_or(Errno::BADF)?, true)?;
    Ok(socket)
}

/// Nobody decides about room but the driver now.
fn leave(core: &Arc<Core>) {
    let link = &core.link;
    link.epoch.store(0, Ordering::Release);
    link.features.store(0, Ordering::Release);
    {
        let mut outbox = link.outbox();
        outbox.open = false;
        outbox.overflow = false;
        outbox.queue.clear();
        link.all_sent(&mut outbox);
    }
    core.share.unmet();
    core.arena.alone();
    core.arena.rooms.alone();
    sleep::left(core);
    for device in core.devices() {
        let mut state = device.lock();
        if state.mode == Mode::Alone {
            continue;
        }
        state.mode = Mode::Alone;
        state.epoch = 0;
        state.slot = None;
        state.beside.untold();
        state.told_clean = 0;
        state.attach_deadline = None;
        state.asks.clear();
        state.orders.clear();
        let books = &mut state.pool.books;
        books.alone = true;
        books.lease = books.used;
        drop(state);
        device.wake();
    }
}

struct Connection<'a> {
    core: &'a Arc<Core>,
    socket: &'a OurFd,
    bell: &'a OurFd,
    epoch: u64,
    welcomed: bool,
    handshake: Instant,
    /// Since when the outbox could not be emptied.
    full_since: Option<Instant>,
    last_usage: Instant,
    told: BTreeMap<usize, ToDaemon>,
    passages: u64,
    /// The gate tells of the next passage; no need to look.
    watching: bool,
}

impl<'a> Connection<'a> {
    fn new(core: &'a Arc<Core>, socket: &'a OurFd, bell: &'a OurFd, epoch: u64) -> Self {
        let now = Instant::now();
        Self {
            core,
            socket,
            bell,
            epoch,
            welcomed: false,
            handshake: now + core.config.connect_wait,
            full_since: None,
            last_usage: now,
            told: BTreeMap::new(),
            passages: 0,
            watching: false,
        }
    }

    fn link(&self) -> &'a Link {
        &self.core.link
    }

    /// The socket for one use, if the program has not closed it.
    fn socket(&self) -> Result<BorrowedFd<'a>, String> {
        self.socket.get().ok_or_else(|| CLOSED.into())
    }

    fn serve(&mut self, session: &mut u64) -> End {
        let link = self.link();
        link.connections.fetch_add(1, Ordering::Relaxed);
        link.outbox().open = true;
        let mut program = [0; 64];
        let name = self.core.config.program.as_bytes();
        let len = name.len().min(program.len() - 1);
        program[..len].copy_from_slice(&name[..len]);
        link.send(ToDaemon::Hello {
            pid: rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(),
            token: self.core.config.token,
            program,
            resumes: *session,
        });
        loop {
            if let Some(end) = self.turn(session) {
                return end;
            }
        }
    }

    fn turn(&mut self, session: &mut u64) -> Option<End> {
        if self.core.is_closed() {
            return Some(End::Closed);
        }
        if let Err(error) = self.flush() {
            return Some(End::Lost(error));
        }
        let now = Instant::now();
        if !self.welcomed && now >= self.handshake {
            return Some(End::Lost("the daemon does not answer".into()));
        }
        if self.attach_overdue(now) {
            return Some(End::Lost("the daemon does not answer about a device".into()));
        }
        if self.welcomed {
            self.usage(now);
            if let Err(error) = self.flush() {
                return Some(End::Lost(error));
            }
        }
        let readable = match self.sleep() {
            Ok(readable) => readable,
            Err(error) => return Some(End::Lost(error)),
        };
        if !readable {
            return None;
        }
        for _ in 0..BURST {
            let socket = match self.socket() {
                Ok(socket) => socket,
                Err(why) => return Some(End::Lost(why)),
            };
            match socket::recv(socket) {
                Ok(None) => return Some(End::Lost("the daemon closed the connection".into())),
                Err(Errno::AGAIN) => break,
                Err(error) => return Some(End::Lost(format!("receiving: {error}"))),
                Ok(Some(received)) => {
                    if let Some(end) = self.packet(&received.packet, received.fds, session) {
                        return Some(end);
                    }
                }
            }
        }
        None
    }

    fn packet(&mut self, packet: &[u8], fds: Vec<OwnedFd>, session: &mut u64) -> Option<End> {
        let fds = fds.into_iter().map(OurFd::new).collect();
        match ToLayer::decode(packet) {
            Ok(message) => self.handle(message, fds, session),
            Err(error) => {
                self.link().bad_packets.fetch_add(1, Ordering::Relaxed);
                (!error.is_skippable()).then(|| End::Lost(format!("the daemon sent nonsense: {error}")))
            }
        }
    }

    fn handle(&mut self, message: ToLayer, fds: Vec<OurFd>, session: &mut u64) -> Option<End> {
        match message {
            ToLayer::Refused { text } => {
                return Some(End::Refused(String::from_utf8_lossy(&text).into_owned()));
            }
            ToLayer::Welcome {
                session: id,
                task,
                alloc_wait_ms,
                alloc_wait_max_ms,
                busy_wait_ms,
            } if !self.welcomed => {
                self.welcomed = true;
                let resumed = std::mem::replace(session, id) == id;
                let ms = Duration::from_millis;
                self.core
                    .waits
                    .set(ms(alloc_wait_ms), ms(alloc_wait_max_ms), ms(busy_wait_ms));
                let link = self.link();
                for (message, fds) in self.core.arena.declare(resumed) {
                    link.send_with(message, fds);
                }
                link.epoch.store(self.epoch, Ordering::Release);
                sleep::met(self.core);
                for device in self.core.devices() {
                    link.attach(self.core, &device);
                }
                link.set_status(Status::Connected { session: id, task });
                link.dirty.store(true, Ordering::Release);
                self.core
                    .events
                    .note(format!("connected: session {id}, task {task}"));
            }
            other if self.welcomed => incoming::handle(self.core, other, fds),
            _ => {}
        }
        None
    }

    /// Sends what waits, as far as the socket takes it.
    fn flush(&mut self) -> Result<(), String> {
        loop {
            let Some((message, fds)) = ({
                let mut outbox = self.link().outbox();
                if outbox.overflow {
                    return Err("the daemon does not read".into());
                }
                let next = outbox.queue.pop_front();
                if next.is_none() {
                    self.link().all_sent(&mut outbox);
                }
                next
            }) else {
                self.full_since = None;
                return Ok(());
            };
            let packet = match message.encode() {
                Ok(packet) => packet,
                Err(WireError::TooLong) => continue,
                Err(error) => return Err(format!("encoding: {error}")),
            };
            let borrowed: Option<Vec<_>> = fds.iter().map(|fd| fd.get()).collect();
            match socket::send(self.socket()?, &packet, &borrowed.ok_or(CLOSED)?) {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    self.link().outbox().queue.push_front((message, fds));
                    let since = *self.full_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= STUCK {
                        return Err("the daemon does not read".into());
                    }
                    return Ok(());
                }
                Err(error) => return Err(format!("sending: {error}")),
            }
        }
    }

    fn attach_overdue(&self, now: Instant) -> bool {
        self.core
            .devices()
            .iter()
            .any(|device| device.lock().attach_deadline.is_some_and(|at| now >= at))
    }

    /// Tells of use, if it is time and something changed.
    fn usage(&mut self, now: Instant) {
        let link = self.link();
        let passages = self.core.gate.passages();
        let moved = passages != self.passages;
        if moved || !self.core.gate.is_watched() {
            // A thread that waited at the gate ends the watch when it goes on, and was counted when it came.
            self.watching = false;
        }
        if !(moved || link.dirty.load(Ordering::Acquire))
            || now < self.last_usage + self.core.config.usage_every
        {
            if !self.watching && !moved && now >= self.last_usage + self.core.config.usage_every {
                // Nothing for an interval: sleep until somebody comes.
                self.core.gate.watch();
                self.watching = true;
                if self.core.gate.passages() != self.passages {
                    link.dirty.store(true, Ordering::Release);
                }
            }
            return;
        }
        link.dirty.store(false, Ordering::Release);
        self.last_usage = now;
        self.passages = passages;
        let mut allocated = 0;
        for device in self.core.devices() {
            allocated += device.lock().pool.books.allocated;
            let touches = self.core.touches(device.index);
            if let Some(news) = device.lock().beside_news(self.core) {
                link.send(news);
            }
            if let Some(news) = device.lock().clean_news(self.core) {
                link.send(news);
            }
            if let Some(usage) = device.lock().usage(self.core, touches)
                && self.told.get(&device.index) != Some(&usage)
            {
                link.send(usage.clone());
                self.told.insert(device.index, usage);
            }
        }
        if let Some(news) = self.core.arena.common_news() {
            link.send(news);
        }
        if let Some(want) = self.core.arena.want(self.core, allocated) {
            link.send(want);
        }
    }

    /// When to look again without being woken.
    fn timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        let mut due: Vec<Instant> = self
            .core
            .devices()
            .iter()
            .filter_map(|device| device.lock().attach_deadline)
            .collect();
        if !self.welcomed {
            due.push(self.handshake);
        } else if !self.watching || self.link().dirty.load(Ordering::Acquire) {
            due.push(self.last_usage + self.core.config.usage_every);
        }
        if let Some(since) = self.full_since {
            due.push(since + STUCK);
        }
        // Rounded up: a timeout that ends early would turn into a busy loop.
        due.into_iter()
            .min()
            .map(|at| at.saturating_duration_since(now) + Duration::from_millis(1))
    }

    /// Sleeps until there is something to do. Whether the socket has something to read.
    fn sleep(&self) -> Result<bool, String> {
        let timeout = self.timeout().and_then(|d| Timespec::try_from(d).ok());
        let mut wanted = PollFlags::IN;
        if self.full_since.is_some() {
            wanted |= PollFlags::OUT;
        }
        let (socket, bell) = (self.socket()?, self.bell.get().ok_or(CLOSED)?);
        let mut fds = [
            PollFd::from_borrowed_fd(socket, wanted),
            PollFd::from_borrowed_fd(bell, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(format!("poll: {error}")),
        }
        let [at_socket, at_bell] = [fds[0].revents(), fds[1].revents()];
        if at_bell.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
            // Nobody hangs up the other end while this connection lasts.
            return Err(CLOSED.into());
        }
        if at_bell.contains(PollFlags::IN) {
            let mut rung = [0; 4096];
            let _ = rustix::net::recv(self.bell.get().ok_or(CLOSED)?, &mut rung, RecvFlags::DONTWAIT);
        }
        Ok(at_socket.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL))
    }
}
