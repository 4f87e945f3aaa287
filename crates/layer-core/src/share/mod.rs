//! Memory of ours that other processes open, and memory of theirs that is open here: legacy IPC through the daemon.
//!
//! `docs/design/0003-sharing.md` says how it goes. `export`: handles, and a thread that hands memory out. `open`: the other
//! side. Neither keeps a descriptor longer than it takes to send or import it.
//!
//! # Locks
//! `exports` and `imports` may be taken under a device's lock; under them only the link's outbox is.

mod export;
mod open;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ebb_protocol::ToDaemon;
use ebb_protocol::wire::{HeldShare, share};
use ebb_units::{Bytes, DeviceUuid};

use crate::core::Core;
use crate::engine::Engine;
use crate::pins::PinId;
use export::{Ask, Exported};
use open::Answer;
pub use open::{Opening, Piece};

/// First bytes of every handle.
const MAGIC: [u8; 8] = *b"ebb-ipc1";
/// Where in a handle the secret of the allocation is.
const SECRET: core::ops::Range<usize> = share::NAME.end..share::NAME.end + 16;
/// What fits one packet of declarations.
const DECLARED: usize = 900;

/// How long a daemon takes at most to be started again.
const RESTART: Duration = Duration::from_secs(3);

/// A handle's bytes.
pub type ShareHandle = [u8; share::HANDLE];

/// Why memory was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// Nobody has such memory (any more).
    #[error("no program has such memory any more")]
    Gone,
    /// It is this process's own.
    #[error("it is this process's own memory")]
    Own,
    /// The program that has it could not hand it out, the daemon is gone, or nobody answered in time.
    #[error("it could not be handed out")]
    Failed,
}

#[derive(Debug, Default)]
struct Exports {
    /// What handles of this process are called, once it has given one out.
    name: Option<[u8; 16]>,
    /// The daemon knows it.
    named: bool,
    by_secret: HashMap<[u8; 16], Exported>,
    secrets: HashMap<(usize, u64), [u8; 16]>,
    /// When to look for handles of memory that is gone.
    prune_at: usize,
    asks: VecDeque<Ask>,
    /// The hold that is being served, and whether it has ended meanwhile.
    serving: Option<(u64, bool)>,
    holds: BTreeMap<u64, PinId>,
    thread: bool,
}

/// Memory of another process that is open here.
#[derive(Clone, Copy, Debug)]
struct Import {
    name: [u8; 16],
    uuid: DeviceUuid,
    device: usize,
    block: u64,
    bytes: u64,
    /// Counted to this process.
    inherited: u64,
}

#[derive(Debug, Default)]
struct Imports {
    waiting: HashMap<u64, Option<Answer>>,
    open: BTreeMap<u64, Import>,
    last: u64,
}

/// All sharing of this process.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// A daemon that can share has been met.
    capable: AtomicBool,
    /// It was waited for one, once.
    waited: AtomicBool,
    exports: Mutex<Exports>,
    asked: Condvar,
    imports: Mutex<Imports>,
    answered: Condvar,
}

/// Figures for the report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums {
    pub(crate) handles: u64,
    pub(crate) lent: u64,
    pub(crate) open: u64,
    pub(crate) open_bytes: u64,
}

/// Bytes that nobody can guess.
fn random<const N: usize>() -> Option<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .ok()
        .map(|()| bytes)
}

impl Share {
    fn exports(&self) -> MutexGuard<'_, Exports> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn imports(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes everybody: the engine is closed.
    pub(crate) fn ring(&self) {
        drop(self.exports());
        self.asked.notify_all();
        drop(self.imports());
        self.answered.notify_all();
    }

    pub(crate) fn sums(&self) -> Sums {
        let (handles, lent) = {
            let exports = self.exports();
            (exports.by_secret.len() as u64, exports.holds.len() as u64)
        };
        let imports = self.imports();
        Sums {
            handles,
            lent,
            open: imports.open.len() as u64,
            open_bytes: imports.open.values().map(|import| import.bytes).sum(),
        }
    }

    /// The daemon can share: tells it what there is already.
    pub(crate) fn met(&self, core: &Core) {
        let exports = self.exports();
        self.capable.store(true, Ordering::Release);
        self.asked.notify_all();
        let name = exports.name.map(|name| ToDaemon::ShareName {
            name,
            lent: exports.holds.keys().copied().collect(),
        });
        drop(exports);
        let imports = self.imports();
        let holds: Vec<HeldShare> = imports
            .open
            .iter()
            .map(|(hold, import)| HeldShare {
                hold: *hold,
                name: import.name,
                device: import.uuid,
                block: import.block,
                bytes: Bytes(import.bytes),
                inherited: import.inherited > 0,
            })
            .collect();
        let any = imports.last > 0;
        drop(imports);
        if let Some(name) = name {
            core.link.send(name);
        }
        if !any {
            return;
        }
        let all = holds.len() <= DECLARED;
        if holds.is_empty() {
            core.link.send(ToDaemon::ShareHeld { holds, all });
            return;
        }
        for part in holds.chunks(DECLARED) {
            core.link.send(ToDaemon::ShareHeld {
                holds: part.to_vec(),
                all,
            });
        }
    }

    /// The connection is over: nobody is answered any more.
    pub(crate) fn unmet(&self) {
        let mut imports = self.imports();
        for answer in imports.waiting.values_mut() {
            answer.get_or_insert(Answer::Lost);
        }
        drop(imports);
        self.answered.notify_all();
        let mut exports = self.exports();
        exports.asks.clear();
        exports.named = false;
    }
}

impl Engine {
    /// Whether memory of ours can be opened in other processes: a daemon that can do its part has been met. One that is being started again
    /// at this moment is waited for, once.
    #[must_use]
    pub fn can_share(&self) -> bool {
        let core = &self.core;
        let share = &core.share;
        let capable = || share.capable.load(Ordering::Acquire);
        if core.is_child() || capable() {
            return !core.is_child();
        }
        if core.is_passthrough()
            || core.config.sockets.is_empty()
            || share.waited.swap(true, Ordering::AcqRel)
        {
            return false;
        }
        let deadline = Instant::now() + RESTART;
        let mut exports = share.exports();
        while !capable() && !core.is_closed() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            exports = share
                .asked
                .wait_timeout(exports, left)
                .map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
        }
        drop(exports);
        capable()
    }

    /// Whether these are bytes of a handle that some engine gave out.
    #[must_use]
    pub fn is_share_handle(handle: &ShareHandle) -> bool {
        handle[..MAGIC.len()] == MAGIC
    }
}

/// For the link: what concerns sharing.
pub(crate) mod incoming {
    use super::*;
    use crate::device::Device;
    use crate::fd::OurFd;

    pub(crate) fn ask(core: &Arc<Core>, hold: u64, pid: u32, handle: ShareHandle, from: u32) {
        export::ask(
            core,
            Ask {
                hold,
                pid,
                handle,
                from,
            },
        );
    }

    pub(crate) fn named(core: &Core, name: [u8; 16]) {
        export::named(core, name);
    }

    pub(crate) fn let_go(core: &Core, hold: u64) {
        export::let_go(core, hold);
    }

    pub(crate) fn answer(
        core: &Core,
        hold: u64,
        status: u32,
        found: Opening,
        chunks: Vec<Bytes>,
        fds: Vec<OurFd>,
    ) {
        open::answer(core, hold, status, found, chunks, fds);
    }

    pub(crate) fn inherit(core: &Core, device: &Device, hold: u64, bytes: u64) {
        open::inherit(core, device, hold, bytes);
    }
}
