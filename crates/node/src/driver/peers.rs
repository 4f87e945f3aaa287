//! Programs: their connections, their sessions, and what they say.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ebb_policy::{AskId, AskKind, Event, Outcome, Usage};
use ebb_protocol::socket::{self, Received};
use ebb_protocol::wire::{WireError, ask_kind, outcome};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::{Bytes, ClientId, DeviceId, DeviceUuid, OrderId, TaskId};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::timers::Timer;
use super::{ConnId, Driver, PeerId, ProcessKey, Source};
use crate::config::Scope;
use crate::{process, say, sys};

/// Packets that may wait for a program that does not read.
const MAX_QUEUE: usize = 4096;
/// Packets read from one program before others have their turn.
const TURN: usize = 64;
/// Packets that make no sense before the program is dropped.
const MAX_BAD: u32 = 16;
/// Sessions of one process: the library may be loaded more than once, not without end.
const MAX_SESSIONS: usize = 8;
/// Connections of one process, those that have not said who they are included.
const MAX_CONNS: usize = 64;
/// How long a connection may take to say who it is.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);
/// Asks of one client that may be open: threads that wait at the same time.
const MAX_ASKS: usize = 4096;

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

/// A session: one library in one process.
#[derive(Debug)]
pub(super) struct Peer {
    pub process: ProcessKey,
    pub task: TaskId,
    /// `None`: not connected, but the process lives and keeps what it has.
    pub conn: Option<ConnId>,
    pub clients: BTreeMap<DeviceId, Client>,
    pub program: String,
    /// Bad packets of all its connections, for doctor.
    pub bad: u64,
}

/// A session on one card, as the daemon mirrors it. The ledger is the arbiter's.
#[derive(Debug)]
pub(super) struct Client {
    pub id: ClientId,
    pub usage: Usage,
    pub allocated: Bytes,
    touches: u64,
    /// Overhead that NVML saw beyond what the library knows of.
    pub extra: Bytes,
    pub asks: BTreeSet<u64>,
    pub orders: BTreeSet<u64>,
    /// What the last `Attached` or `Limit` said.
    told: (Bytes, Bytes),
}

impl Client {
    /// What the arbiter should know.
    pub(super) fn usage_event(&self) -> Event {
        let overhead = self.usage.overhead.saturating_add(self.extra);
        Event::Usage {
            client: self.id,
            usage: Usage {
                overhead,
                ..self.usage
            },
        }
    }
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
        let process = if cred.pid == 0 {
            None
        } else {
            self.process_of(cred.pid, cred.uid, sys::peer_pidfd(&fd))
        };
        let Some(key) = process else {
            return refuse(
                &fd,
                "the daemon cannot see this process: it lives in another pid namespace".into(),
            );
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

    fn bad_packet(&mut self, id: ConnId, why: &str) {
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

    fn refuse_conn(&mut self, id: ConnId, text: String) {
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

    fn hello(&mut self, id: ConnId, token: &[u8; 32], program: &[u8; 64], resumes: u64) {
        let Some(key) = self.conns.get(&id).map(|conn| conn.process) else {
            return;
        };
        let others: Vec<PeerId> = self
            .processes
            .get(&key)
            .map(|p| p.peers.iter().copied().collect())
            .unwrap_or_default();
        let peer = if others.contains(&resumes) {
            // The same library over a new connection. The old one, if we have not noticed yet, is over.
            if let Some(old) = self.peers.get(&resumes).and_then(|peer| peer.conn) {
                self.drain(old);
                self.close_layer(old);
            }
            resumes
        } else {
            if resumes == 0 {
                self.forget_replaced(&others);
            }
            let sessions = self.processes.get(&key).map_or(0, |p| p.peers.len());
            if sessions >= MAX_SESSIONS {
                return self.refuse_conn(id, format!("{MAX_SESSIONS} sessions of one process are enough"));
            }
            let end = program.iter().position(|b| *b == 0).unwrap_or(program.len());
            let mut name = super::tasks::clean_name(&String::from_utf8_lossy(&program[..end]));
            if end == 0
                && let Some(process) = self.processes.get(&key)
            {
                name = super::tasks::clean_name(&process::name(process.pid));
            }
            let Some(task) = self.task_for(token, key, &name) else {
                return self.refuse_conn(id, "no task could be made for this process".into());
            };
            let peer = self.new_id();
            let new = Peer {
                process: key,
                task,
                conn: None,
                clients: BTreeMap::new(),
                program: name,
                bad: 0,
            };
            self.peers.insert(peer, new);
            if let Some(process) = self.processes.get_mut(&key) {
                process.peers.insert(peer);
            }
            peer
        };
        // The old connection's end may have taken this one with it.
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.peer = Some(peer);
        let Some(known) = self.peers.get_mut(&peer) else {
            return;
        };
        known.conn = Some(id);
        let task = known.task;
        let ms = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let welcome = ToLayer::Welcome {
            session: peer,
            task: task.0,
            alloc_wait_ms: ms(self.config.policy.alloc_wait),
            alloc_wait_max_ms: ms(self.config.policy.alloc_wait_max),
            busy_wait_ms: ms(self.config.busy_wait),
        };
        self.send(peer, &welcome, Vec::new());
    }

    /// A fresh library in a process that had others: those that hung up are gone with the program that `exec` replaced.
    fn forget_replaced(&mut self, others: &[PeerId]) {
        for peer in others {
            // Its end may have arrived and not been read yet.
            if let Some(conn) = self.peers.get(peer).and_then(|peer| peer.conn) {
                self.drain(conn);
            }
            if self.peers.get(peer).is_some_and(|peer| peer.conn.is_none()) {
                self.remove_peer(*peer);
            }
        }
    }

    /// Reads a connection to its present end.
    fn drain(&mut self, id: ConnId) {
        // Bounded by what a socket's buffer holds.
        for _ in 0..64 {
            self.read_layer(id);
        }
    }

    fn message(&mut self, conn: ConnId, peer: PeerId, message: ToDaemon, fds: Vec<OwnedFd>) {
        match message {
            ToDaemon::Hello { .. } => {}
            ToDaemon::Attach {
                device,
                total,
                lease,
                evicted,
                overhead,
                ..
            } => {
                self.attach(conn, peer, device, total, lease, evicted, overhead);
            }
            ToDaemon::Ask {
                device,
                ask,
                kind,
                bytes,
                long,
            } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                if client.asks.len() >= MAX_ASKS || !client.asks.insert(ask) {
                    return self.bad_packet(conn, "an ask's number is used twice, or too many are open");
                }
                let kind = if kind == ask_kind::RESTORE {
                    AskKind::Restore
                } else {
                    AskKind::Alloc
                };
                let event = Event::Ask {
                    client: client.id,
                    ask: AskId(ask),
                    kind,
                    bytes,
                    long,
                };
                self.ask_or_hold(event);
            }
            ToDaemon::CancelAsk { device, ask } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                client.asks.remove(&ask);
                let client = client.id;
                self.drop_held_ask(client, ask);
                self.feed(Event::AskCancelled {
                    client,
                    ask: AskId(ask),
                });
            }
            ToDaemon::Return { device, bytes } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)).map(|c| c.id) else {
                    return;
                };
                self.mark(peer);
                self.feed(Event::Returned { client, bytes });
            }
            ToDaemon::Usage {
                device,
                allocated,
                resident,
                evicted,
                cached,
                pinned,
                overhead,
                touches,
                ..
            } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                client.usage = Usage {
                    resident,
                    cached,
                    evicted,
                    pinned,
                    overhead,
                };
                client.allocated = allocated;
                let touched = std::mem::replace(&mut client.touches, touches) != touches;
                let (id, event) = (client.id, client.usage_event());
                self.mark(peer);
                self.feed(event);
                if touched {
                    self.feed(Event::Touched { client: id });
                }
                let evicted = self.peers.get(&peer).map_or(Bytes::ZERO, |peer| {
                    peer.clients.values().map(|client| client.usage.evicted).sum()
                });
                self.arena.in_use(peer, evicted);
            }
            ToDaemon::ReclaimProgress { device, order, bytes } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                if !client.orders.contains(&order) {
                    return;
                }
                let client = client.id;
                self.mark(peer);
                self.feed(Event::ReclaimProgress {
                    client,
                    order: OrderId(order),
                    bytes,
                });
            }
            ToDaemon::ReclaimDone {
                device,
                order,
                outcome,
                copied,
                nanos,
            } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                if !client.orders.remove(&order) {
                    return;
                }
                let client = client.id;
                if !copied.is_zero() {
                    self.totals.releases += 1;
                    self.totals.out_bytes = self.totals.out_bytes.saturating_add(copied);
                    self.totals.out_nanos = self.totals.out_nanos.saturating_add(nanos);
                }
                let outcome = read_outcome(outcome);
                self.feed(Event::ReclaimDone {
                    client,
                    order: OrderId(order),
                    outcome,
                    copied,
                    nanos,
                });
            }
            ToDaemon::Restored {
                device,
                copied,
                nanos,
            } => {
                let Some(client) = self.client_mut(peer, DeviceId(device)).map(|c| c.id) else {
                    return;
                };
                self.totals.restores += 1;
                self.totals.in_bytes = self.totals.in_bytes.saturating_add(copied);
                self.totals.in_nanos = self.totals.in_nanos.saturating_add(nanos);
                self.feed(Event::Restored {
                    client,
                    copied,
                    nanos,
                });
            }
            ToDaemon::ArenaWant { bytes, urgent } => {
                self.arena.want(peer, bytes, urgent);
                self.arena_dirty = true;
            }
            ToDaemon::ArenaReturn { segments } => {
                let mut moves = Vec::new();
                if self.arena.returned(peer, &segments, &mut moves) > 0 {
                    self.bad_packet(conn, "it returns a segment that it does not hold");
                }
                self.do_moves(moves);
                self.arena_dirty = true;
            }
            ToDaemon::ArenaDeclare { segments } => {
                let taken = self.arena.declare(peer, &segments, fds);
                if taken < segments.len() {
                    say::debug!("{} declared segments are not taken on", segments.len() - taken);
                }
                self.arena_dirty = true;
            }
            ToDaemon::Report { query, text } => self.report_arrived(peer, query, &text),
            ToDaemon::Detach { device } => self.detach(peer, DeviceId(device)),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    fn attach(
        &mut self,
        conn: ConnId,
        peer: PeerId,
        uuid: DeviceUuid,
        total: Bytes,
        lease: Bytes,
        evicted: Bytes,
        overhead: Bytes,
    ) {
        let Some(device) = self.device_for(uuid, total) else {
            return self.bad_packet(conn, "it names a card that cannot be");
        };
        // What nobody can hold is not believed: it would only make this client's own account absurd.
        let card = self
            .devices
            .get(&device)
            .map_or(Bytes::ZERO, |device| device.total);
        let (lease, overhead) = (lease.min(card), overhead.min(card));
        let usage = Usage {
            resident: lease,
            evicted,
            overhead,
            ..Usage::default()
        };
        let Some((task, process)) = self.peers.get(&peer).map(|peer| (peer.task, peer.process)) else {
            return;
        };
        let known = self.client_mut(peer, device).map(|client| client.id);
        let held = known.map(|client| self.lease_of(client));
        let kept = match (known, held) {
            (Some(client), Some(held)) if lease <= held => {
                // Heard of before: what it does not say that it has, it has not.
                self.cancel_all(peer, device);
                if lease < held {
                    self.feed(Event::Returned {
                        client,
                        bytes: held - lease,
                    });
                }
                Some(client)
            }
            (Some(_), _) => {
                // It went on alone and grew. Its account is opened anew.
                self.detach(peer, device);
                None
            }
            _ => None,
        };
        let id = kept.unwrap_or_else(|| {
            let id = ClientId(self.next_client);
            self.next_client += 1;
            id
        });
        let (limit, elsewhere) = self.elsewhere(task, device, id);
        let capacity = self
            .devices
            .get(&device)
            .map_or(Bytes::ZERO, super::cards::Device::capacity);
        if kept.is_none() {
            self.clients.insert(id, (peer, device));
            let client = Client {
                id,
                usage,
                allocated: Bytes::ZERO,
                touches: 0,
                extra: Bytes::ZERO,
                asks: BTreeSet::new(),
                orders: BTreeSet::new(),
                told: (limit, elsewhere),
            };
            if let Some(peer) = self.peers.get_mut(&peer) {
                peer.clients.insert(device, client);
            }
            self.feed(Event::ClientJoined {
                client: id,
                task,
                device,
                lease,
                evicted,
                overhead,
            });
        } else if let Some(client) = self.client_mut(peer, device) {
            (client.usage, client.told) = (usage, (limit, elsewhere));
            let event = client.usage_event();
            self.feed(event);
        }
        // Told its slot before the arbiter has anything to say to it.
        let attached = ToLayer::Attached {
            uuid,
            device: device.0,
            limit,
            charged_elsewhere: elsewhere,
            capacity,
        };
        self.send(peer, &attached, Vec::new());
        self.mark(peer);
        self.settle();
        self.recovered(process);
        self.state_dirty = true;
    }

    fn lease_of(&mut self, client: ClientId) -> Bytes {
        self.settle();
        self.arbiter
            .snapshot()
            .tasks
            .iter()
            .flat_map(|task| &task.clients)
            .find(|view| view.client == client)
            .map_or(Bytes::ZERO, |view| view.lease)
    }

    /// What a client was granted and, by its own last word, does not use.
    pub(super) fn unused_of(&self, client: ClientId) -> Bytes {
        self.arbiter
            .snapshot()
            .tasks
            .iter()
            .flat_map(|task| &task.clients)
            .find(|view| view.client == client)
            .map_or(Bytes::ZERO, |view| view.unused)
    }

    /// A task's limit on a card, and what its other clients there are charged.
    fn elsewhere(&self, task: TaskId, device: DeviceId, client: ClientId) -> (Bytes, Bytes) {
        let limit = self
            .tasks
            .get(&task)
            .and_then(|task| task.spec.limit)
            .unwrap_or(Bytes::MAX);
        let view = self
            .arbiter
            .snapshot()
            .tasks
            .into_iter()
            .find(|view| view.task == task);
        let charged = view.map_or(Bytes::ZERO, |view| {
            view.clients
                .iter()
                .filter(|other| other.device == device && other.client != client)
                .map(|other| {
                    other
                        .lease
                        .saturating_add(other.overhead)
                        .saturating_add(other.evicted)
                })
                .sum()
        });
        (limit, charged)
    }

    /// Tells clients what changed of their task's limit and of what its other processes are charged.
    pub(super) fn tell_limits(&mut self) {
        let dirty = std::mem::take(&mut self.dirty_tasks);
        let clients: Vec<(PeerId, DeviceId, ClientId, TaskId)> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.conn.is_some() && dirty.contains(&peer.task))
            .flat_map(|(id, peer)| peer.clients.iter().map(|(d, c)| (*id, *d, c.id, peer.task)))
            .collect();
        for (peer, device, client, task) in clients {
            let (limit, charged_elsewhere) = self.elsewhere(task, device, client);
            let Some(known) = self.client_mut(peer, device) else {
                continue;
            };
            if known.told != (limit, charged_elsewhere) {
                known.told = (limit, charged_elsewhere);
                self.send(
                    peer,
                    &ToLayer::Limit {
                        device: device.0,
                        limit,
                        charged_elsewhere,
                    },
                    Vec::new(),
                );
            }
        }
    }

    /// What the task of this session has may have changed.
    pub(super) fn mark(&mut self, peer: PeerId) {
        if let Some(peer) = self.peers.get(&peer) {
            self.dirty_tasks.insert(peer.task);
        }
    }

    fn detach(&mut self, peer: PeerId, device: DeviceId) {
        self.mark(peer);
        let Some(client) = self
            .peers
            .get_mut(&peer)
            .and_then(|peer| peer.clients.remove(&device))
        else {
            return;
        };
        self.clients.remove(&client.id);
        for ask in &client.asks {
            self.drop_held_ask(client.id, *ask);
        }
        self.feed(Event::ClientLeft { client: client.id });
        self.state_dirty = true;
        self.look_at_cards();
    }

    /// Nobody answers on this card any more: what was asked is off, what was ordered has failed.
    fn cancel_all(&mut self, peer: PeerId, device: DeviceId) {
        let Some(client) = self.client_mut(peer, device) else {
            return;
        };
        let (id, asks, orders) = (
            client.id,
            std::mem::take(&mut client.asks),
            std::mem::take(&mut client.orders),
        );
        for ask in asks {
            self.drop_held_ask(id, ask);
            self.feed(Event::AskCancelled {
                client: id,
                ask: AskId(ask),
            });
        }
        for order in orders {
            self.feed(Event::ReclaimDone {
                client: id,
                order: OrderId(order),
                outcome: Outcome::Failed,
                copied: Bytes::ZERO,
                nanos: 0,
            });
        }
    }

    /// A session is over for good, with all that it held.
    pub(super) fn remove_peer(&mut self, id: PeerId) {
        let Some(devices) = self
            .peers
            .get(&id)
            .map(|p| p.clients.keys().copied().collect::<Vec<_>>())
        else {
            return;
        };
        for device in devices {
            self.detach(id, device);
        }
        if let Some(peer) = self.peers.remove(&id) {
            if let Some(process) = self.processes.get_mut(&peer.process) {
                process.peers.remove(&id);
            }
            if let Some(conn) = peer.conn {
                self.drop_conn(conn);
            }
        }
        let mut moves = Vec::new();
        self.arena.died(id, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
        self.fail_queries(id);
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
        self.arena_dirty = true;
        self.fail_queries(peer);
        if devices.is_empty() && self.arena.held_by(peer).is_zero() {
            self.remove_peer(peer);
        }
        self.look_at_cards();
    }

    fn drop_conn(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.remove(&id) {
            let _ = epoll::delete(&self.epoll, &conn.fd);
        }
    }

    pub(super) fn is_connected(&self, peer: PeerId) -> bool {
        self.peers.get(&peer).is_some_and(|peer| peer.conn.is_some())
    }

    pub(super) fn client_mut(&mut self, peer: PeerId, device: DeviceId) -> Option<&mut Client> {
        self.peers.get_mut(&peer)?.clients.get_mut(&device)
    }

    /// Sends a message; queues it if the program is slow; drops the program if it is too slow.
    pub(super) fn send(&mut self, peer: PeerId, message: &ToLayer, fds: Vec<Arc<OwnedFd>>) {
        let Some(id) = self.peers.get(&peer).and_then(|peer| peer.conn) else {
            return;
        };
        let Ok(packet) = message.encode() else { return };
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        if conn.queue.is_empty() {
            match send_now(&conn.fd, &packet, &fds) {
                Ok(()) => return,
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {}
                // Its end is read, and dealt with, in its turn.
                Err(_) => return,
            }
        }
        conn.queue.push_back((packet, fds));
        if conn.queue.len() > MAX_QUEUE {
            say::warning!("a program does not read what it is told and is dropped");
            return self.close_layer(id);
        }
        self.interest(id, true);
    }

    fn flush(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        while let Some((packet, fds)) = conn.queue.front() {
            match send_now(&conn.fd, packet, fds) {
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => return,
                Ok(()) | Err(_) => {
                    conn.queue.pop_front();
                }
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

fn read_outcome(n: u32) -> Outcome {
    match n {
        outcome::DONE => Outcome::Done,
        outcome::BUSY | outcome::CAPTURING => Outcome::Busy,
        outcome::NOTHING_LEFT => Outcome::NothingLeft,
        outcome::NO_ROOM => Outcome::NoRoom,
        // Failed, or a newer library's reason.
        _ => Outcome::Failed,
    }
}
