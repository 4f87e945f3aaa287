//! Everything that is known, as rows for people.

use std::collections::BTreeMap;

use ebb_policy::ClientView;
use ebb_protocol::control::{ArenaRow, DeviceRow, ProcessRow, Snapshot, TaskRow};
use ebb_units::{Bytes, ClientId};

use super::{Driver, PeerId};

impl Driver {
    pub(super) fn snapshot(&mut self) -> Snapshot {
        // What happened a moment ago is in it: a release shows at once and in full.
        self.settle();
        let view = self.arbiter.snapshot();
        let mut devices: Vec<DeviceRow> = view
            .devices
            .iter()
            .filter_map(|seen| {
                let device = self.devices.get(&seen.device)?;
                Some(DeviceRow {
                    uuid: device.uuid,
                    index: device.index,
                    name: device.name.clone(),
                    total: device.total,
                    capacity: seen.capacity,
                    leased: seen.leased,
                    overhead: seen.overhead,
                    unmanaged: seen.unmanaged,
                    lodged: seen.lodged,
                    free: seen.free,
                    peak: seen.peak,
                    strangers: super::strangers::rows(&device.strangers),
                })
            })
            .collect();
        devices.sort_by_key(|device| device.index);
        let clients: BTreeMap<ClientId, &ClientView> = view
            .tasks
            .iter()
            .flat_map(|task| &task.clients)
            .map(|client| (client.client, client))
            .collect();
        let tasks = self
            .tasks
            .iter()
            .map(|(id, task)| TaskRow {
                task: *id,
                name: task.name.clone(),
                priority: task.spec.priority,
                request: task.spec.request,
                limit: task.spec.limit,
                paused: task.paused,
                hibernation: self.hibernation_row(*id),
                processes: self
                    .peers
                    .iter()
                    .filter(|(_, peer)| peer.task == *id)
                    .flat_map(|(peer, _)| self.rows(*peer, &clients))
                    .collect(),
            })
            .collect();
        Snapshot {
            uptime_ms: self.now().0 / 1_000_000,
            devices,
            tasks,
            arena: ArenaRow {
                budget: self.arena.budget(),
                held: self.arena.held(),
                lent: self.arena.lent(),
                common: self.arena.common_bytes(),
                spared: self.arena.spared(),
                disk: self.disk_row(),
            },
            totals: self.totals.clone(),
        }
    }

    /// One session's rows: the card with most first.
    pub(super) fn process_rows(&self, peer: PeerId) -> Vec<ProcessRow> {
        let view = self.arbiter.snapshot();
        let clients: BTreeMap<ClientId, &ClientView> = view
            .tasks
            .iter()
            .flat_map(|task| &task.clients)
            .map(|client| (client.client, client))
            .collect();
        let mut rows = self.rows(peer, &clients);
        rows.sort_by_key(|row| std::cmp::Reverse((row.lease, row.evicted)));
        rows
    }

    fn rows(&self, id: PeerId, clients: &BTreeMap<ClientId, &ClientView>) -> Vec<ProcessRow> {
        let Some(peer) = self.peers.get(&id) else {
            return Vec::new();
        };
        let Some(process) = self.processes.get(&peer.process) else {
            return Vec::new();
        };
        let connected = peer.conn.is_some();
        let now = self.now();
        let mut bare = ProcessRow {
            pid: process.pid,
            program: peer.program.clone(),
            device: None,
            state: if connected { "attached" } else { "not_connected" }.into(),
            why: if process.cgroup.is_empty() {
                String::new()
            } else {
                format!("in {}", process.cgroup)
            },
            since_ms: 0,
            allocated: Bytes::ZERO,
            resident: Bytes::ZERO,
            evicted: Bytes::ZERO,
            lodged: Bytes::ZERO,
            on_disk: Bytes::ZERO,
            cached: Bytes::ZERO,
            managed: Bytes::ZERO,
            managed_out: Bytes::ZERO,
            pinned: Bytes::ZERO,
            overhead: Bytes::ZERO,
            unseen: Bytes::ZERO,
            lease: Bytes::ZERO,
            releases: 0,
            restores: 0,
        };
        if peer.clients.is_empty() {
            bare.why = "has made no context on a card".into();
            return vec![bare];
        }
        // A process's segments hold bytes of all its cards: which of them are on disk it alone knows.
        let mut on_disk = self.arena.on_disk_of(id);
        peer.clients
            .iter()
            .map(|(device, client)| {
                let mut row = bare.clone();
                row.why = String::new();
                row.device = self.devices.get(device).map(|device| device.uuid);
                row.allocated = client.allocated;
                row.resident = client.usage.resident;
                row.cached = client.usage.cached;
                (row.managed, row.managed_out) = client.managed;
                row.pinned = client.usage.pinned;
                row.unseen = client.extra;
                if let Some(seen) = clients.get(&client.id) {
                    row.lease = seen.lease;
                    row.overhead = seen.overhead;
                    row.evicted = seen.evicted;
                    row.lodged = seen.lodged.min(seen.evicted);
                    row.on_disk = on_disk.min(seen.evicted - row.lodged);
                    on_disk = on_disk.saturating_sub(row.on_disk);
                    row.releases = seen.releases;
                    row.restores = seen.restores;
                    row.since_ms = u64::try_from(now.since(seen.since).as_millis()).unwrap_or(u64::MAX);
                    if connected {
                        row.state = seen.state.as_str().into();
                        row.why.clone_from(&seen.why);
                    }
                }
                if let Some((word, why)) = self.sleep_state(id) {
                    (row.state, row.why) = (word.into(), why);
                    if self.is_down(id) {
                        // What its library counts as there is where the driver put it.
                        (row.resident, row.pinned) = (Bytes::ZERO, Bytes::ZERO);
                    }
                } else if !connected {
                    row.why = "its socket is closed; it keeps what it has".into();
                } else if peer.bad > 0 && row.why.is_empty() {
                    row.why = format!("{} packets of it made no sense", peer.bad);
                }
                row
            })
            .collect()
    }
}
