//! A task's part of a card, for a process of the task that asks: limit, charge, and its processes by the numbers that they have *there*.
//!
//! Containers have pid namespaces of their own. NVML names processes as the host does; a tool in a container then shows numbers that do not
//! exist there. The daemon sees both sides.

use ebb_protocol::ToLayer;
use ebb_protocol::wire::{MAX_PACKET, WorldProcess};
use ebb_units::{Bytes, DeviceUuid, TaskId};

use super::{ConnId, Driver};
use crate::process;

/// No more are named: an answer is one packet.
const MAX_NAMED: usize = MAX_PACKET / 32;

impl Driver {
    /// Answers a question about a card. Nothing is kept of who asked.
    pub(super) fn tell_world(&self, conn: ConnId, token: &[u8; 32], uuid: DeviceUuid) {
        let Some(caller) = self
            .conns
            .get(&conn)
            .and_then(|conn| self.processes.get(&conn.process))
        else {
            return;
        };
        let of_session = || {
            let peer = caller.peers.iter().find_map(|peer| self.peers.get(peer))?;
            Some(peer.task)
        };
        let task = self.tokens.get(token).copied().or_else(of_session);
        let world = match task.and_then(|task| self.world_of(task, uuid, caller.pid)) {
            Some(world) => world,
            None => ToLayer::World {
                device: uuid,
                known: false,
                limit: Bytes::ZERO,
                charged: Bytes::ZERO,
                processes: Vec::new(),
            },
        };
        self.send_once(conn, &world);
    }

    fn world_of(&self, task: TaskId, uuid: DeviceUuid, caller: u32) -> Option<ToLayer> {
        let limit = self.tasks.get(&task)?.spec.limit.unwrap_or(Bytes::MAX);
        // A card that no program has used yet is the whole limit, and free.
        let device = self.device_named(uuid);
        let mut processes: Vec<WorldProcess> = Vec::new();
        let mut charged = device.map_or(Bytes::ZERO, |device| self.strange_bytes(task, device));
        for peer in self.peers.values().filter(|peer| peer.task == task) {
            let Some(client) = device.and_then(|device| peer.clients.get(&device)) else {
                continue;
            };
            let Some(seen_pid) = self.processes.get(&peer.process).map(|process| process.pid) else {
                continue;
            };
            let bytes = client
                .allocated
                .saturating_add(client.usage.overhead)
                .saturating_add(client.extra);
            charged = charged.saturating_add(bytes);
            if let Some(known) = processes.iter_mut().find(|known| known.seen_pid == seen_pid) {
                known.bytes = known.bytes.saturating_add(bytes);
            } else if processes.len() < MAX_NAMED
                && let Some(pid) = process::pid_as_seen_by(caller, seen_pid)
            {
                processes.push(WorldProcess { pid, seen_pid, bytes });
            }
        }
        processes.sort_by_key(|process| process.pid);
        Some(ToLayer::World {
            device: uuid,
            known: true,
            limit,
            charged,
            processes,
        })
    }
}
