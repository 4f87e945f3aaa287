//! Connections of programs: accepted, read, written to without waiting, dropped when they misbehave.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ebb_protocol::socket::{self, Received};
use ebb_protocol::wire::WireError;
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::{Bytes, DeviceId};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::timers::Timer;
use super::{ConnId, Driver, PeerId, ProcessKey, Source};
use crate::config::Scope;
use crate::{say, sys};

/// Packets that may wait for a program that does not read.
const MAX_QUEUE: usize = 4096;
/// Packets read from one program before others have their turn.
const TURN: usize = 64;
/// Packets that make no sense before the program is dropped.
const MAX_BAD: u32 = 16;
/// Connections of one process, those that have not said who they are included.
const MAX_CONNS: usize = 64;
/// How long a connection may take to say who it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);

/// A connection of a program.
#[derive(Debug)]
pub(super) struct LayerConn {
    fd: OwnedFd,
    pub process: ProcessKey,
    /// Its session, once it said who it is.
    pub peer: Option<PeerId>,
    queue: VecDeque<(Vec<u8>, Vec<Arc<OwnedFd>>)>,
    bad: u32,
}

impl Driver {
    pub(super) fn accept_layers(&mut self) {
        loop {
            match rustix::net::accept_with(&self.place.layer, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => self.welcome(fd),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                Err(e) => {
                    self.accept_failed(e, true);
                    return;
                }
            }
        }
    }

    /// No descriptor is left: turn one peer away instead of hearing of it again and again.
    pub(super) fn accept_failed(&mut self, e: Errno, layer: bool) {
        say::warning!("a connection cannot be accepted: {e}");
        if matches!(e, Errno::MFILE | Errno::NFILE) && self.spare.take().is_some() {
            let listener = if layer {
                &self.place.layer
            } else {
                &self.place.control
            };
            drop(rustix::net::accept_with(
                listener,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            ));
            self.spare = std::fs::File::open("/dev/null").ok();
        }
        self.after(Duration::from_millis(100), Timer::Accept);
    }

    fn welcome(&mut self, fd: OwnedFd) {
        let refuse = |fd: &OwnedFd, text: String| {
            say::info!("a program is refused: {text}");
            if let Ok(packet) = (ToLayer::Refused {
                text: text.into_bytes(),
            })
            .encode()
            {
                let _ = socket::send(fd, &packet, &[]);
            }
        };
        let Ok(cred) = sys::peer(&fd) else { return };
        if self.config.scope == Scope::User && cred.uid != self.uid && cred.uid != 0 {
            return refuse(
                &fd,
                format!("this daemon serves user {}, not user {}", self.uid, cred.uid),
            );
        }
        if cred.pid == 0 {
            return refuse(
                &fd,
                "the daemon cannot see this process: it lives in another pid namespace".into(),
            );
        }
        let Some(key) = self.process_of(cred.pid, cred.uid, sys::peer_pidfd(&fd)) else {
            // It is dead by now, or the machine is short of something at this moment: a refusal would be for good, and
            // one that is alive comes again.
            say::debug!(
                "process {} cannot be looked at; its connection is dropped",
                cred.pid
            );
            return;
        };
        if self.conns.values().filter(|conn| conn.process == key).count() >= MAX_CONNS {
            return refuse(&fd, format!("{MAX_CONNS} connections of one process are enough"));
        }
        let id = self.new_id();
        if self
            .watch(
                &fd,
                Source::Layer(id),
                epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
            )
            .is_err()
        {
            return;
        }
        if let Some(known) = self.processes.get_mut(&key) {
            // What the kernel says now counts, not what a file said.
            known.uid = cred.uid;
        }
        self.conns.insert(
            id,
            LayerConn {
                fd,
                process: key,
                peer: None,
                queue: VecDeque::new(),
                bad: 0,
            },
        );
        self.after(HELLO_PATIENCE, Timer::Hello(id));
    }

    pub(super) fn layer_ready(&mut self, id: ConnId, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.flush(id);
        }
        self.read_layer(id);
    }

    /// Reads what has arrived, up to a turn; the rest is heard of again.
    fn read_layer(&mut self, id: ConnId) {
        for _ in 0..TURN {
            let Some(conn) = self.conns.get(&id) else { return };
            match socket::recv(&conn.fd) {
                Ok(Some(received)) => self.packet(id, received),
                Ok(None) => return self.close_layer(id),
                Err(Errno::AGAIN) => return,
                Err(Errno::MSGSIZE) => self.bad_packet(id, "it is too long"),
                Err(_) => return self.close_layer(id),
            }
        }
    }

    fn packet(&mut self, id: ConnId, received: Received) {
        match ToDaemon::decode(&received.packet) {
            Ok(message) => {
                let Some(conn) = self.conns.get(&id) else { return };
                match (conn.peer, message) {
                    (
                        None,
                        ToDaemon::Hello {
                            token,
                            program,
                            resumes,
                            ..
                        },
                    ) => {
                        self.hello(id, &token, &program, resumes);
                    }
                    (_, ToDaemon::AskWorld { token, device }) => self.tell_world(id, &token, device),
                    (_, ToDaemon::AskHeld { device }) => self.ask_held(id, device),
                    (None, _) => self.bad_packet(id, "it came before a hello"),
                    (Some(_), ToDaemon::Hello { .. }) => self.bad_packet(id, "a second hello"),
                    (Some(peer), message) => self.message(id, peer, message, received.fds),
                }
            }
            Err(e) if e.is_skippable() => {}
            Err(WireError::Version(n)) => {
                self.refuse_conn(id, format!("the library speaks protocol {n}, the daemon another"));
            }
            Err(e) => self.bad_packet(id, &e.to_string()),
        }
    }

    pub(super) fn bad_packet(&mut self, id: ConnId, why: &str) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.bad += 1;
        let (bad, peer) = (conn.bad, conn.peer);
        say::debug!("a packet makes no sense: {why}");
        if let Some(peer) = peer.and_then(|peer| self.peers.get_mut(&peer)) {
            peer.bad += 1;
        }
        if bad >= MAX_BAD {
            say::warning!("a program sent {bad} packets that make no sense and is dropped");
            self.close_layer(id);
        }
    }

    pub(super) fn refuse_conn(&mut self, id: ConnId, text: String) {
        say::info!("a program is refused: {text}");
        if let Some(conn) = self.conns.get(&id)
            && let Ok(packet) = (ToLayer::Refused {
                text: text.into_bytes(),
            })
            .encode()
        {
            let _ = socket::send(&conn.fd, &packet, &[]);
        }
        self.close_layer(id);
    }

    /// Reads a connection to its present end.
    pub(super) fn drain(&mut self, id: ConnId) {
        // Bounded by what a socket's buffer holds.
        for _ in 0..64 {
            self.read_layer(id);
        }
    }

    /// A connection is over; the process may live, and then its session keeps what it has.
    pub(super) fn close_layer(&mut self, id: ConnId) {
        let Some((peer, key)) = self.conns.get(&id).map(|conn| (conn.peer, conn.process)) else {
            return;
        };
        self.drop_conn(id);
        let Some(peer) = peer else {
            // It never said who it is and leaves no trace.
            return self.forget_unless_used(key);
        };
        let Some(known) = self.peers.get_mut(&peer) else {
            return;
        };
        if known.conn != Some(id) {
            return;
        }
        known.conn = None;
        let devices: Vec<DeviceId> = known.clients.keys().copied().collect();
        for device in &devices {
            self.cancel_all(peer, *device);
        }
        self.arena.want(peer, Bytes::ZERO, false);
        self.arena_hung_up(peer);
        self.arena_dirty = true;
        self.fail_queries(peer);
        self.fail_trims(peer);
        self.sleeper_hung_up(peer);
        self.shares_unanswered(peer);
        let has_none = self.arena.held_by(peer).is_zero()
            && self.arena.on_disk_of(peer).is_zero()
            && !self.arena.holds_common(peer);
        if devices.is_empty() && has_none {
            self.remove_peer(peer);
        }
        self.look_at_cards();
    }

    pub(super) fn drop_conn(&mut self, id: ConnId) {
        let Some(conn) = self.conns.remove(&id) else {
            return;
        };
        let _ = epoll::delete(&self.epoll, &conn.fd);
        if let Some(peer) = conn.peer {
            for (packet, _) in conn.queue {
                self.undelivered(peer, &packet);
            }
        }
    }

    /// A packet that never left: segments in it are in nobody's hands.
    fn undelivered(&mut self, peer: PeerId, packet: &[u8]) {
        if let Ok(ToLayer::ArenaGive { segments }) = ToLayer::decode(packet) {
            let ids: Vec<u64> = segments.iter().map(|segment| segment.id).collect();
            let mut moves = Vec::new();
            self.arena.returned(peer, &ids, &mut moves);
            self.do_moves(moves);
            self.arena_dirty = true;
        } else if let Ok(ToLayer::ArenaCommon { segment, .. }) = ToLayer::decode(packet) {
            self.offer_answered(peer, segment.id, None);
        }
    }

    pub(super) fn is_connected(&self, peer: PeerId) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.conn.is_some())
    }

    /// Sends a message; queues it if the program is slow; drops the program if it is too slow.
    pub(super) fn send(&mut self, peer: PeerId, message: &ToLayer, fds: Vec<Arc<OwnedFd>>) {
        let Ok(packet) = message.encode() else { return };
        let Some(id) = self.peers.get(&peer).and_then(|peer| peer.conn) else {
            return self.undelivered(peer, &packet);
        };
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        if conn.queue.is_empty() {
            match send_now(&conn.fd, &packet, &fds) {
                Ok(()) => return,
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {}
                // Its end is read, and dealt with, in its turn.
                Err(_) => return self.undelivered(peer, &packet),
            }
        }
        conn.queue.push_back((packet, fds));
        if conn.queue.len() > MAX_QUEUE {
            say::warning!("a program does not read what it is told and is dropped");
            return self.close_layer(id);
        }
        self.interest(id, true);
    }

    /// Sends an answer that may be lost: who does not read asks again.
    pub(super) fn send_once(&self, id: ConnId, message: &ToLayer) {
        if let Some(conn) = self.conns.get(&id)
            && conn.queue.is_empty()
            && let Ok(packet) = message.encode()
        {
            let _ = send_now(&conn.fd, &packet, &[]);
        }
    }

    fn flush(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        while let Some((packet, fds)) = conn.queue.front() {
            match send_now(&conn.fd, packet, fds) {
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => return,
                Ok(()) => drop(conn.queue.pop_front()),
                // Its end is read in its turn, and what is queued is then dealt with.
                Err(_) => break,
            }
        }
        self.interest(id, false);
    }

    fn interest(&self, id: ConnId, write: bool) {
        if let Some(conn) = self.conns.get(&id) {
            let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
            flags.set(epoll::EventFlags::OUT, write);
            let data = epoll::EventData::new_u64(Source::Layer(id).to_u64());
            let _ = epoll::modify(&self.epoll, &conn.fd, data, flags);
        }
    }
}

fn send_now(fd: &OwnedFd, packet: &[u8], fds: &[Arc<OwnedFd>]) -> Result<(), Errno> {
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
    socket::send(fd, packet, &borrowed)
}
