//! Programs: their sessions, what they say, and what they hold.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use ebb_policy::{AskId, AskKind, Event, Outcome, Usage, View};
use ebb_protocol::wire::{ask_kind, outcome};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::{Bytes, ClientId, DeviceId, DeviceUuid, OrderId, TaskId};

use super::hidden::Told;
use super::{ConnId, Driver, PeerId, ProcessKey};
use crate::{process, say};

/// Sessions of one process: the library may be loaded more than once, not without end.
const MAX_SESSIONS: usize = 8;
/// Asks of one client that may be open: threads that wait at the same time.
const MAX_ASKS: usize = 4096;

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
    /// Managed memory, and how much of it is known to be in host memory.
    pub managed: (Bytes, Bytes),
    /// The most that an order could send away beside its lease.
    pub loose: Bytes,
    /// Memory given to other processes by handle, and memory of others that it has.
    pub exported: Bytes,
    pub imported: Bytes,
    /// Cards that can hold memory of this one's.
    pub lenders: Vec<DeviceUuid>,
    touches: u64,
    /// Overhead that NVML saw beyond what the library knows of.
    pub extra: Bytes,
    /// What it told lately that is on the card because of it.
    pub there: Told,
    pub asks: BTreeSet<u64>,
    pub orders: BTreeSet<u64>,
    /// What was away at the end of the last release or restore.
    away: Bytes,
    /// What the last `Attached` or `Limit` said.
    told: (Bytes, Bytes),
}

impl Client {
    /// What the arbiter should know.
    /// `down`: the driver has it in host memory, and all that may be on the card is what NVML still sees.
    pub(super) fn usage_event(&self, down: bool) -> Event {
        if down {
            let (evicted, overhead) = (self.usage.evicted, self.extra);
            return Event::Usage {
                client: self.id,
                usage: Usage {
                    evicted,
                    overhead,
                    ..Usage::default()
                },
            };
        }
        let overhead = self.usage.overhead.saturating_add(self.extra);
        Event::Usage {
            client: self.id,
            usage: Usage {
                overhead,
                loose: self.extra.min(self.loose),
                ..self.usage
            },
        }
    }
}

impl Driver {
    pub(super) fn hello(&mut self, id: ConnId, token: &[u8; 32], program: &[u8; 64], resumes: u64) {
        let Some(key) = self.conns.get(&id).map(|conn| conn.process) else {
            return;
        };
        let others: Vec<PeerId> = self
            .processes
            .get(&key)
            .map(|p| p.peers.iter().copied().collect())
            .unwrap_or_default();
        // The old connection, if its end has not been noticed yet, is over. A session that held nothing ends with it.
        if others.contains(&resumes)
            && let Some(old) = self.peers.get(&resumes).and_then(|peer| peer.conn)
        {
            self.drain(old);
            self.close_layer(old);
        }
        let peer = if others.contains(&resumes) && self.peers.contains_key(&resumes) {
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
        self.sleeper_is_back(peer);
        let ms = |wait: Duration| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
        let welcome = ToLayer::Welcome {
            session: peer,
            task: task.0,
            alloc_wait_ms: ms(self.config.policy.alloc_wait),
            alloc_wait_max_ms: ms(self.config.policy.alloc_wait_max),
            busy_wait_ms: ms(self.config.busy_wait),
        };
        self.send(peer, &welcome, Vec::new());
        self.tell_features(peer);
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

    pub(super) fn message(&mut self, conn: ConnId, peer: PeerId, message: ToDaemon, fds: Vec<OwnedFd>) {
        match message {
            // Handled before a session is asked for.
            ToDaemon::Hello { .. } | ToDaemon::AskWorld { .. } | ToDaemon::AskHeld { .. } => {}
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
                if kind == ask_kind::STRICT && !self.has_room(DeviceId(device), bytes) {
                    if let Some(client) = self.client_mut(peer, DeviceId(device)) {
                        client.asks.remove(&ask);
                    }
                    let reason = ebb_protocol::wire::deny::NEVER_FITS;
                    let last = true;
                    let message = ToLayer::Deny {
                        device,
                        ask,
                        reason,
                        last,
                    };
                    return self.send(peer, &message, Vec::new());
                }
                let Some(client) = self.client_mut(peer, DeviceId(device)).map(|client| client.id) else {
                    return;
                };
                let kind = if kind == ask_kind::RESTORE {
                    AskKind::Restore
                } else {
                    AskKind::Alloc
                };
                let event = Event::Ask {
                    client,
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
                managed,
                managed_out,
                exported,
                imported,
                ..
            } => {
                let device_id = DeviceId(device);
                let card = self
                    .devices
                    .get(&device_id)
                    .map_or(Bytes::ZERO, |card| card.total);
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                client.usage = Usage {
                    resident,
                    cached,
                    evicted,
                    pinned,
                    overhead,
                    // A message of its own.
                    clean: client.usage.clean,
                    ..Usage::default()
                };
                client.allocated = allocated;
                client.managed = (managed, managed_out);
                client.imported = imported.min(card);
                let exported = exported.min(card);
                let freed = std::mem::replace(&mut client.exported, exported).saturating_sub(exported);
                let touched = std::mem::replace(&mut client.touches, touches) != touches;
                let id = client.id;
                self.context_took(DeviceId(device), overhead);
                self.mark(peer);
                self.feed_usage(peer, DeviceId(device));
                let left = self.leaves_behind(peer, device_id, freed);
                if self.estate_shrinks(device_id) || !left.is_zero() {
                    self.feed_device(device_id);
                }
                if touched {
                    self.feed(Event::Touched { client: id });
                }
                let evicted = self.peers.get(&peer).map_or(Bytes::ZERO, |peer| {
                    peer.clients.values().map(|client| client.usage.evicted).sum()
                });
                let now = self.now();
                self.arena_dirty |= self.arena.in_use(now, peer, evicted);
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
                // What left without a copy was told just before, as what is away.
                let away = client.usage.evicted;
                let left = !copied.is_zero() || away > client.away;
                client.away = away;
                let client = client.id;
                if left {
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
                let Some(client) = self.client_mut(peer, DeviceId(device)) else {
                    return;
                };
                client.away = Bytes::ZERO;
                let client = client.id;
                self.restored_after_sleep(peer);
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
            ToDaemon::ArenaParted { segments } => self.arena_parted(peer, &segments),
            ToDaemon::ArenaKept { segments } => self.arena_kept(peer, &segments),
            ToDaemon::ArenaFetch { segments } => self.arena_fetch(peer, &segments),
            ToDaemon::Refused {
                device,
                asked,
                charged,
                limit,
            } => {
                if let Some(client) = self.client_mut(peer, DeviceId(device)).map(|c| c.id) {
                    let why = ebb_policy::DenyReason::OverLimit {
                        asked,
                        charged,
                        limit,
                    };
                    self.totals.denials += 1;
                    self.note_refusal(client, &why);
                    self.note_denial(client, why);
                }
            }
            ToDaemon::ArenaRest { notice, runs } => self.arena_rest(peer, notice, &runs),
            ToDaemon::ArenaCommonHeld { segment, held } => self.offer_answered(peer, segment, Some(held)),
            ToDaemon::ArenaCommonLeft { segments } => self.common_left(peer, &segments),
            ToDaemon::ArenaCommonDeclare { segments, first } => {
                self.common_declared(peer, first, &segments, fds)
            }
            ToDaemon::ArenaCommonUse { away, kept } => self.common_use(peer, away, kept),
            ToDaemon::ArenaDeclareStored { segments } => self.arena_declare_stored(peer, segments, fds),
            ToDaemon::LodgingLenders { device, lenders } => {
                self.lodging_lenders(peer, DeviceId(device), lenders);
            }
            ToDaemon::LodgingAsk { device, bytes } => self.lodging_ask(peer, DeviceId(device), bytes),
            ToDaemon::LodgingLeft {
                device,
                lender,
                bytes,
            } => self.lodging_left(peer, DeviceId(device), lender, bytes),
            ToDaemon::LodgingHeld { device, held } => self.lodging_held(peer, DeviceId(device), &held),
            ToDaemon::Trimmed { device, query, bytes } => self.trimmed(peer, DeviceId(device), query, bytes),
            ToDaemon::Clean { device, bytes } => self.clean(peer, DeviceId(device), bytes),
            ToDaemon::Beside { device, loose, gone } => self.beside(peer, DeviceId(device), loose, gone),
            ToDaemon::Report { query, text } => self.report_arrived(peer, query, &text),
            ToDaemon::Detach { device } => {
                self.shares_detached(peer, DeviceId(device));
                self.detach(peer, DeviceId(device), false);
            }
            ToDaemon::ShareName { name, lent } => self.share_name(conn, peer, name, lent),
            ToDaemon::ShareHeld { holds, all } => self.share_held(peer, holds, all),
            ToDaemon::ShareOpen { hold, handle, from } => self.share_open(conn, peer, hold, handle, from),
            ToDaemon::ShareGive {
                hold,
                status,
                device,
                block,
                bytes,
                offset,
                size,
                from,
                count,
                chunks,
            } => self.share_give(
                conn,
                peer,
                hold,
                status,
                DeviceId(device),
                [block, from.into(), count.into()],
                [bytes, offset, size],
                chunks,
                fds,
            ),
            ToDaemon::ShareClose { hold } => self.share_close(peer, hold),
            ToDaemon::SleepAnswer { order, outcome, text } => self.sleep_answer(peer, order, outcome, &text),
            ToDaemon::WakeMe { order } => self.wake_me(peer, order),
            ToDaemon::Sleeping { order } => self.sleeping(peer, order),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    pub(super) fn attach(
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
        self.context_took(device, overhead);
        let asleep = self.declared_asleep(peer, device, lease, overhead);
        let (lease, overhead) = if asleep {
            (Bytes::ZERO, Bytes::ZERO)
        } else {
            (lease, overhead)
        };
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
                self.detach(peer, device, false);
                None
            }
            _ => None,
        };
        let id = kept.unwrap_or_else(|| {
            let id = ClientId(self.next_client);
            self.next_client += 1;
            id
        });
        let (limit, elsewhere) = self.elsewhere(&self.arbiter.snapshot(), task, device, id);
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
                managed: (Bytes::ZERO, Bytes::ZERO),
                loose: Bytes::ZERO,
                exported: Bytes::ZERO,
                imported: Bytes::ZERO,
                lenders: Vec::new(),
                touches: 0,
                extra: Bytes::ZERO,
                there: Told::default(),
                asks: BTreeSet::new(),
                orders: BTreeSet::new(),
                away: Bytes::ZERO,
                told: (limit, elsewhere),
            };
            if let Some(peer) = self.peers.get_mut(&peer) {
                peer.clients.insert(device, client);
            }
            self.note_told(peer, device);
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
            client.loose = Bytes::ZERO;
            self.feed_usage(peer, device);
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

    /// Whether so much of a card is in nobody's hands now.
    fn has_room(&mut self, device: DeviceId, bytes: Bytes) -> bool {
        self.settle();
        let view = self.arbiter.snapshot();
        let free = view.devices.iter().find(|seen| seen.device == device);
        free.is_some_and(|seen| seen.free >= bytes)
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

    /// A task's limit on a card, and what it is charged there beyond what this client knows of itself.
    fn elsewhere(&self, view: &View, task: TaskId, device: DeviceId, client: ClientId) -> (Bytes, Bytes) {
        let limit = self
            .tasks
            .get(&task)
            .and_then(|task| task.spec.limit)
            .unwrap_or(Bytes::MAX);
        let view = view
            .tasks
            .binary_search_by_key(&task, |view| view.task)
            .ok()
            .map(|at| &view.tasks[at]);
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
        // What the driver took for this very process and no call showed counts as elsewhere: the library does not know of it. What
        // may be managed memory it has counted.
        let own = self
            .clients
            .get(&client)
            .and_then(|(peer, device)| self.peers.get(peer)?.clients.get(device))
            .map_or(Bytes::ZERO, |client| {
                let managed = client.managed.0.saturating_sub(client.managed.1);
                client.extra.saturating_sub(managed)
            });
        let charged = charged
            .saturating_add(own)
            .saturating_add(self.strange_bytes(task, device));
        (limit, charged)
    }

    /// Tells clients what changed of their task's limit and of what its other processes are charged.
    pub(super) fn tell_limits(&mut self) {
        let dirty = std::mem::take(&mut self.dirty_tasks);
        if dirty.is_empty() {
            return;
        }
        let view = self.arbiter.snapshot();
        let clients: Vec<(PeerId, DeviceId, ClientId, TaskId)> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.conn.is_some() && dirty.contains(&peer.task))
            .flat_map(|(id, peer)| peer.clients.iter().map(|(d, c)| (*id, *d, c.id, peer.task)))
            .collect();
        for (peer, device, client, task) in clients {
            let (limit, charged_elsewhere) = self.elsewhere(&view, task, device, client);
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

    /// `gone`: the program is; one that lives has what it exported still, and accounts for it when it attaches again.
    pub(super) fn detach(&mut self, peer: PeerId, device: DeviceId, gone: bool) {
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
        let kept = if gone {
            self.leaves_behind(peer, device, client.exported)
        } else {
            Bytes::ZERO
        };
        self.feed(Event::ClientLeft {
            client: client.id,
            kept,
        });
        if self.estate_shrinks(device) || !kept.is_zero() {
            self.feed_device(device);
        }
        self.state_dirty = true;
        self.look_at_cards();
    }

    /// Nobody answers on this card any more: what was asked is off, what was ordered has failed.
    pub(super) fn cancel_all(&mut self, peer: PeerId, device: DeviceId) {
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
        self.sleeper_left(id);
        // First, so that memory which others still have open is free at no moment.
        self.shares_left(id);
        for device in devices {
            self.detach(id, device, true);
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
        self.fail_trims(id);
    }

    pub(super) fn client_mut(&mut self, peer: PeerId, device: DeviceId) -> Option<&mut Client> {
        self.peers.get_mut(&peer)?.clients.get_mut(&device)
    }
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
