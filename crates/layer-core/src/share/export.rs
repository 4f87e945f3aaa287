//! Handing memory out.
//!
//! Handles are given out without asking anybody. Memory is pinned when a hold begins and moves again when its last one
//! ends. Asks of the daemon are served by a thread of their own: what is asked for may have to come back to the card first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ebb_device::DeviceError;
use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{MAX_FDS, share};
use ebb_units::Bytes;

use super::{MAGIC, SECRET, ShareHandle, random};
use crate::core::Core;
use crate::engine::Engine;
use crate::fd::OurFd;
use crate::pins::{self, PinId, PinReason};
use crate::threads;

/// How long a daemon that lives takes at most to answer.
const ROUND_TRIP: Duration = Duration::from_secs(2);

/// An allocation that has a handle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exported {
    device: usize,
    base: u64,
    /// Its id: another allocation at this address is another.
    id: u64,
}

/// Somebody wants memory.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) hold: u64,
    pub(super) pid: u32,
    pub(super) handle: ShareHandle,
    pub(super) from: u32,
}

impl Engine {
    /// The handle of the allocation that contains an address: the same bytes for the same allocation. `None` if it is not
    /// ours, or nobody could open it.
    #[must_use]
    pub fn share_handle(&self, ptr: u64) -> Option<ShareHandle> {
        let core = &self.core;
        if !self.can_share() {
            return None;
        }
        // As in the driver: memory of stream-ordered pools has other ways.
        let allocation = self.lookup(ptr).filter(|allocation| allocation.pool == 0)?;
        let key = (allocation.device, allocation.id);
        let mut exports = core.share.exports();
        let (name, new) = match exports.name {
            Some(name) => (name, false),
            None => (random()?, true),
        };
        let secret = match exports.secrets.get(&key) {
            Some(secret) => *secret,
            None => {
                let secret = random()?;
                exports.secrets.insert(key, secret);
                exports.by_secret.insert(
                    secret,
                    Exported {
                        device: allocation.device,
                        base: allocation.base,
                        id: allocation.id,
                    },
                );
                secret
            }
        };
        exports.name = Some(name);
        let prune = exports.secrets.len() > exports.prune_at.max(256);
        drop(exports);
        if new {
            core.link.send(ToDaemon::ShareName {
                name,
                lent: Vec::new(),
            });
            core.events
                .note("a legacy IPC handle was given out; programs under ebb on this node can open it, others cannot");
        }
        if prune {
            self.forget_gone();
        }
        wait_until_named(core);
        let mut handle = [0; share::HANDLE];
        handle[..MAGIC.len()].copy_from_slice(&MAGIC);
        handle[share::NAME].copy_from_slice(&name);
        handle[SECRET].copy_from_slice(&secret);
        Some(handle)
    }

    /// Handles of memory that is gone open nothing any more and need not be remembered.
    fn forget_gone(&self) {
        let all: Vec<([u8; 16], Exported)> = {
            let exports = self.core.share.exports();
            exports.by_secret.iter().map(|(s, e)| (*s, *e)).collect()
        };
        let gone: Vec<_> = all
            .into_iter()
            .filter(|(_, exported)| !lives(&self.core, exported))
            .collect();
        let mut exports = self.core.share.exports();
        for (secret, exported) in gone {
            exports.by_secret.remove(&secret);
            exports.secrets.remove(&(exported.device, exported.id));
        }
        exports.prune_at = exports.secrets.len() * 2;
    }
}

/// The daemon has the name of this process.
pub(super) fn named(core: &Core, name: [u8; 16]) {
    let mut exports = core.share.exports();
    exports.named = exports.name == Some(name);
    drop(exports);
    core.share.asked.notify_all();
}

/// Nobody gets a handle that could not be opened yet. Waits once a connection, for one round trip; without an answer the
/// handle is given all the same, since the daemon may come back.
fn wait_until_named(core: &Core) {
    let deadline = Instant::now() + ROUND_TRIP;
    let mut exports = core.share.exports();
    while !exports.named && core.link.epoch() != 0 && !core.is_closed() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        exports = core
            .share
            .asked
            .wait_timeout(exports, left)
            .map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
    }
}

fn lives(core: &Core, exported: &Exported) -> bool {
    core.device(exported.device).is_some_and(|device| {
        device
            .lock()
            .pool
            .lookup(exported.base)
            .is_some_and(|live| live.tag.id == exported.id)
    })
}

/// Puts an ask before the thread that serves them.
pub(super) fn ask(core: &Arc<Core>, ask: Ask) {
    let mut exports = core.share.exports();
    exports.asks.push_back(ask);
    if !exports.thread {
        let theirs = Arc::clone(core);
        exports.thread = threads::spawn("ebb-share", move || serve(&theirs)).is_ok();
        if !exports.thread {
            let refused: Vec<Ask> = exports.asks.drain(..).collect();
            drop(exports);
            for ask in refused {
                refuse(core, ask.hold, share::FAILED);
            }
            return;
        }
    }
    drop(exports);
    core.share.asked.notify_all();
}

/// A hold is over.
pub(super) fn let_go(core: &Core, hold: u64) {
    let mut exports = core.share.exports();
    exports.asks.retain(|ask| ask.hold != hold);
    if let Some((serving, over)) = &mut exports.serving
        && *serving == hold
    {
        *over = true;
    }
    let pin = exports.holds.remove(&hold);
    drop(exports);
    if let Some(pin) = pin {
        pins::unpin(core, pin);
    }
}

fn serve(core: &Core) {
    loop {
        let ask = {
            let mut exports = core.share.exports();
            loop {
                if core.is_closed() || core.is_exiting() {
                    return;
                }
                if let Some(ask) = exports.asks.pop_front() {
                    exports.serving = Some((ask.hold, false));
                    break ask;
                }
                // A bound, for the flags above, which are set without this lock.
                exports = core
                    .share
                    .asked
                    .wait_timeout(exports, Duration::from_secs(1))
                    .map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
            }
        };
        // What waits here waits for room on the card, as any call of the program does.
        let answer = match core.gate.enter() {
            Ok(()) => {
                let answer = hand_out(core, &ask);
                core.gate.leave();
                answer
            }
            Err(_) => Err(share::FAILED),
        };
        match answer {
            Ok((message, fds)) => core.link.send_with(message, fds),
            Err(status) => refuse(core, ask.hold, status),
        }
        let over = core.share.exports().serving.take().is_some_and(|(_, over)| over);
        if over {
            let_go(core, ask.hold);
        }
    }
}

fn refuse(core: &Core, hold: u64, status: u32) {
    core.link.send(ToDaemon::ShareGive {
        hold,
        status,
        device: 0,
        block: 0,
        bytes: Bytes::ZERO,
        offset: Bytes::ZERO,
        size: Bytes::ZERO,
        from: 0,
        count: 0,
        chunks: Vec::new(),
    });
}

/// Pins what an ask is about, if this is its beginning, and takes descriptors of its next chunks. Inside the gate.
fn hand_out(core: &Core, ask: &Ask) -> Result<(ToDaemon, Vec<Arc<OurFd>>), u32> {
    let mut secret = [0; 16];
    secret.copy_from_slice(&ask.handle[SECRET]);
    let exported = {
        let exports = core.share.exports();
        let named = exports.name.is_some_and(|name| ask.handle[share::NAME] == name);
        exports.by_secret.get(&secret).copied().filter(|_| named)
    };
    let exported = exported.ok_or(share::UNKNOWN)?;
    let device = core.device(exported.device).ok_or(share::UNKNOWN)?;
    let begins = ask.from == 0;
    let (block, live, slot, pin) = {
        let mut state = device.lock();
        let live = state
            .pool
            .lookup(exported.base)
            .filter(|live| live.tag.id == exported.id)
            .ok_or(share::UNKNOWN)?;
        let block = state.pool.block(live.base).ok_or(share::FAILED)?;
        let slot = state.slot.ok_or(share::FAILED)?;
        let pin = if begins {
            let on = state.pool.pinnable(live.base, 1).map_err(|_| share::FAILED)?;
            let who = format!("opened by pid {}", ask.pid);
            Some(state.pool.pins.add(on, PinReason::LegacyIpc, who))
        } else {
            None
        };
        (block, live, slot, pin)
    };
    if let Some(number) = pin {
        let pin = PinId::new(device.index, number);
        if let Some(old) = core.share.exports().holds.insert(ask.hold, pin) {
            // The same hold from its beginning once more.
            pins::unpin(core, old);
        }
        core.link.poke();
    } else if !core.share.exports().holds.contains_key(&ask.hold) {
        return Err(share::UNKNOWN);
    }
    let from = ask.from as usize;
    let some = block.chunks.get(from..).unwrap_or_default();
    let some = &some[..some.len().min(MAX_FDS)];
    let fds: Result<Vec<_>, DeviceError> = some
        .iter()
        .map(|(_, handle)| device.memory.export(*handle).map(|fd| Arc::new(OurFd::new(fd))))
        .collect();
    // A handle that was given back meanwhile may be another's by now.
    let same = device
        .lock()
        .pool
        .block(live.base)
        .is_some_and(|now| now.number == block.number)
        && lives(core, &exported);
    let fds = match fds {
        Ok(fds) if same && !fds.is_empty() => fds,
        other => {
            if let Err(error) = other {
                core.events
                    .note(format!("device {}: handing memory out: {error}", device.index));
            }
            let_go(core, ask.hold);
            return Err(if same { share::FAILED } else { share::UNKNOWN });
        }
    };
    let message = ToDaemon::ShareGive {
        hold: ask.hold,
        status: share::OK,
        device: slot,
        block: block.number,
        bytes: Bytes(block.len),
        offset: Bytes(live.base - block.base),
        size: Bytes(live.size),
        from: ask.from,
        count: u32::try_from(block.chunks.len()).unwrap_or(u32::MAX),
        chunks: some.iter().map(|(len, _)| Bytes(*len)).collect(),
    };
    Ok((message, fds))
}
