//! What the daemon says.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{HEADER, MAX_PACKET, ToLayer, feature, outcome};
use ebb_units::Bytes;

use crate::core::Core;
use crate::device::{Device, Mode, Order};
use crate::fd::OurFd;
use crate::report;
use crate::share::{self, Opening};
use crate::sleep;

fn by_slot(core: &Core, slot: u32) -> Option<Arc<Device>> {
    core.devices()
        .into_iter()
        .find(|device| device.lock().slot == Some(slot))
}

/// Does what a message says. None of it waits for anything.
pub(super) fn handle(core: &Arc<Core>, message: ToLayer, fds: Vec<OurFd>) {
    match message {
        // `World` answers who asks on a connection of its own.
        ToLayer::Welcome { .. } | ToLayer::Refused { .. } | ToLayer::World { .. } | ToLayer::Held { .. } => {}
        ToLayer::Attached {
            uuid,
            device: slot,
            limit,
            charged_elsewhere,
            capacity: _,
        } => {
            let found = core.devices().into_iter().find(|device| device.uuid == uuid);
            if let Some(device) = found {
                attached(core, &device, slot, limit, charged_elsewhere);
            }
        }
        ToLayer::Grant { device, ask, bytes } => {
            if let Some(device) = by_slot(core, device) {
                granted(&device, ask, bytes.get());
            }
        }
        ToLayer::Deny {
            device,
            ask,
            reason,
            last,
        } => {
            if let Some(device) = by_slot(core, device) {
                let mut state = device.lock();
                if !state.refused_ahead(ask)
                    && let Some(open) = state.asks.get_mut(&ask)
                {
                    open.denied = Some((reason, last));
                }
                drop(state);
                device.wake();
            }
        }
        ToLayer::Reclaim {
            device,
            order,
            bytes,
            ref reason,
        }
        | ToLayer::SendAway {
            device,
            order,
            bytes,
            ref reason,
        } => {
            let beside = matches!(message, ToLayer::SendAway { .. });
            if let Some(device) = by_slot(core, device) {
                let mut state = device.lock();
                let epoch = state.epoch;
                state.orders.push_back(Order {
                    id: order,
                    bytes: bytes.get(),
                    epoch,
                    reason: String::from_utf8_lossy(reason).into_owned(),
                    beside,
                });
                drop(state);
                device.wake();
            }
        }
        ToLayer::Trim { device: slot, query } => match by_slot(core, slot) {
            Some(device) => {
                device.lock().trims.push_back(query);
                device.wake();
            }
            None => core.link.send(ToDaemon::Trimmed {
                device: slot,
                query,
                bytes: Bytes::ZERO,
            }),
        },
        ToLayer::BringBack { device } => {
            if let Some(device) = by_slot(core, device) {
                device.lock().bring_back = true;
                device.wake();
            }
        }
        ToLayer::CancelReclaim { device, order } => {
            if let Some(device) = by_slot(core, device) {
                cancelled(core, &device, order);
            }
        }
        ToLayer::ArenaGive { segments } => {
            let without: Vec<u64> = segments.iter().skip(fds.len()).map(|s| s.id).collect();
            if !without.is_empty() {
                core.link.send(ToDaemon::ArenaReturn { segments: without });
            }
            core.arena.arrive(core, segments, fds);
        }
        ToLayer::ArenaRecall { bytes } => core.arena.recall(bytes.get()),
        ToLayer::ArenaPart { bytes } => core.arena.part_with(core, bytes.get()),
        ToLayer::ArenaStored { segments } => core.arena.stored(core, &segments, fds),
        ToLayer::ArenaStay { segments } => core.arena.stay(&segments),
        ToLayer::ArenaBack { segments } => core.arena.back(core, &segments, fds),
        ToLayer::ArenaCommon { segment, blocks } => {
            core.arena.offered(core, segment, blocks, fds.into_iter().next());
        }
        ToLayer::ArenaCommonWanted { segments } => core.arena.unkeep(&segments),
        ToLayer::ArenaBroken { segments } => core.arena.broken(&segments),
        ToLayer::LodgingLent {
            device,
            lender,
            bytes,
        } => {
            if let Some(device) = by_slot(core, device) {
                core.arena.rooms.lent(core, &device, lender, bytes.get());
            }
        }
        ToLayer::LodgingWanted {
            device,
            lender,
            bytes,
        } => {
            if let Some(device) = by_slot(core, device) {
                core.arena.rooms.wanted(core, &device, lender, bytes.get());
            }
        }
        ToLayer::Limit {
            device,
            limit,
            charged_elsewhere,
        } => {
            if let Some(device) = by_slot(core, device) {
                let mut state = device.lock();
                state.pool.books.limit = limit.get();
                state.pool.books.elsewhere = charged_elsewhere.get();
                drop(state);
                device.wake();
            }
        }
        ToLayer::Features { bits } => {
            core.link.features.store(bits, Ordering::Release);
            if bits & feature::SHARE != 0 {
                core.share.met(core);
            }
            // A new daemon knows of nothing that is at rest.
            core.arena.rest(core);
        }
        ToLayer::ShareAsk {
            hold,
            pid,
            handle,
            from,
        } => share::incoming::ask(core, hold, pid, handle, from),
        ToLayer::ShareNamed { name } => share::incoming::named(core, name),
        ToLayer::ShareLet { hold } => share::incoming::let_go(core, hold),
        ToLayer::ShareChunks {
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
        } => {
            let sizes = [block, bytes.get(), offset.get(), size.get()];
            let found = Opening::arrived(hold, device, sizes, [from, count]);
            share::incoming::answer(core, hold, status, found, chunks, fds);
        }
        ToLayer::ShareInherit { hold, device, bytes } => {
            if let Some(device) = by_slot(core, device) {
                share::incoming::inherit(core, &device, hold, bytes.get());
            }
        }
        ToLayer::Sleep {
            order,
            ask,
            patient,
            wait_ms,
        } => sleep::ordered(core, order, ask, patient, Duration::from_millis(wait_ms)),
        ToLayer::Awake { order } => sleep::awake(core, order),
        ToLayer::Query { query } => {
            // Room for the number, the length and the header.
            let text = report::json(core, MAX_PACKET - HEADER - 16);
            core.link.send(ToDaemon::Report {
                query,
                text: text.into_bytes(),
            });
        }
    }
}

fn attached(core: &Core, device: &Device, slot: u32, limit: Bytes, elsewhere: Bytes) {
    let mut state = device.lock();
    if state.mode != Mode::Attaching {
        return;
    }
    state.mode = Mode::Connected;
    state.slot = Some(slot);
    state.attach_deadline = None;
    state.pool.books.limit = limit.get();
    state.pool.books.elsewhere = elsewhere.get();
    let unreported = std::mem::take(&mut state.unreported);
    if unreported > 0 {
        core.link.send(ToDaemon::Return {
            device: slot,
            bytes: Bytes(unreported),
        });
    }
    drop(state);
    core.arena.rooms.met(core, device, slot);
    core.link.poke();
    device.wake();
}

/// Lease arrives. For an ask that was taken back meanwhile it stays, too: the next allocation is glad of it, and the
/// daemon sees in `Usage` that nobody uses it.
fn granted(device: &Device, ask: u64, bytes: u64) {
    let mut state = device.lock();
    state.pool.books.lease = state.pool.books.lease.saturating_add(bytes);
    if let Some(open) = state.asks.get_mut(&ask) {
        open.left = open.left.saturating_sub(bytes);
        if open.left == 0 {
            state.asks.remove(&ask);
        }
    }
    drop(state);
    device.wake();
}

fn cancelled(core: &Core, device: &Device, order: u64) {
    let mut state = device.lock();
    let before = state.orders.len();
    state.orders.retain(|queued| queued.id != order);
    if state.orders.len() < before
        && let Some(slot) = state.slot
    {
        core.link.send(ToDaemon::ReclaimDone {
            device: slot,
            order,
            outcome: outcome::DONE,
            copied: Bytes::ZERO,
            nanos: 0,
        });
    }
    if let Some((current, taken_back)) = &mut state.current
        && *current == order
    {
        *taken_back = true;
    }
    drop(state);
    device.wake();
}
