//! One device: its books, what the daemon said about it, and what its owner thread has to do.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ebb_device::{DeviceError, DeviceMemory};
use ebb_protocol::ToDaemon;
use ebb_units::{Bytes, DeviceUuid};

use crate::ahead::Ahead;
use crate::beside::Beside;
use crate::core::{Core, before};
use crate::engine::ExternalKind;
use crate::pool::{Dismantle, Pool, Stuck};
use crate::quiet::Quiet;
use crate::{frameworks, steps};

/// Where the device's memory is. `residency` has the diagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Resident,
    Closing,
    CopyingOut,
    Evicted,
    Waiting,
    CopyingIn,
    Meshing,
}

impl Phase {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Closing => "closing",
            Self::CopyingOut => "copying out",
            Self::Evicted => "evicted",
            Self::Waiting => "waiting for room",
            Self::CopyingIn => "copying in",
            Self::Meshing => "bringing blocks together",
        }
    }
}

/// Who decides about room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No daemon: the driver.
    #[default]
    Alone,
    /// The daemon was told of the device and has not answered yet.
    Attaching,
    /// The daemon.
    Connected,
}

/// An ask that is not answered in full.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) restore: bool,
    /// What is still to be granted.
    pub(crate) left: u64,
    /// The answer was no: reason, final.
    pub(crate) denied: Option<(u32, bool)>,
}

/// The daemon wants lease back.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) id: u64,
    pub(crate) bytes: u64,
    pub(crate) epoch: u64,
    pub(crate) reason: String,
    /// Only what the driver placed by itself is wanted; no lease.
    pub(crate) beside: bool,
}

/// Restoring keeps failing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failing {
    pub(crate) since: Instant,
    pub(crate) tries: u32,
    pub(crate) error: DeviceError,
}

/// What threads want of the owner that brings blocks together for them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mesh {
    /// How often it was wanted, and up to which of these it was done.
    pub(crate) wanted: u64,
    pub(crate) done: u64,
    /// Bytes that went the last time.
    pub(crate) gained: u64,
    /// The blocks of which nothing came.
    pub(crate) vain: Option<u64>,
}

/// Counters for the report.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) evictions: u64,
    pub(crate) restores: u64,
    pub(crate) bytes_out: u64,
    pub(crate) bytes_in: u64,
    pub(crate) nanos_out: u64,
    pub(crate) nanos_in: u64,
    pub(crate) busy: u64,
    pub(crate) capturing: u64,
    pub(crate) no_room: u64,
    pub(crate) failed: u64,
    pub(crate) driver_errors: u64,
    /// Bytes that left without a copy because their kept copy was as they were.
    pub(crate) bytes_unchanged: u64,
    /// Bytes that left without a copy because they were zero.
    pub(crate) bytes_zero: u64,
    pub(crate) out_of_memory_answers: u64,
}

/// Everything about a device that changes.
#[derive(Debug)]
pub(crate) struct State {
    /// The device's number.
    index: usize,
    pub(crate) pool: Pool,
    pub(crate) mode: Mode,
    /// The daemon's number for it; only while connected.
    pub(crate) slot: Option<u32>,
    /// Counts connections: what belongs to an older one is void.
    pub(crate) epoch: u64,
    /// Bytes in host memory by the last word to the daemon.
    pub(crate) told_evicted: u64,
    /// Bytes that would leave without a copy, by the last word to the daemon.
    pub(crate) told_clean: u64,
    /// When everything was back last, the program had touched it so often.
    pub(crate) back_at: Option<u64>,
    /// When the daemon was told last that the limit refused something.
    pub(crate) told_refused: Option<Instant>,
    /// Lease given up between `Attach` and its answer.
    pub(crate) unreported: u64,
    pub(crate) attach_deadline: Option<Instant>,
    pub(crate) asks: BTreeMap<u64, Ask>,
    pub(crate) next_ask: u64,
    pub(crate) orders: VecDeque<Order>,
    /// What is kept is wanted back, by the numbers of the daemon's questions.
    pub(crate) trims: VecDeque<u64>,
    pub(crate) mesh: Mesh,
    /// Blocks have no memory behind their addresses, since a call failed that was to map it: the gate stays closed until that is mended.
    pub(crate) torn: bool,
    /// What the order in work could not do, in words.
    pub(crate) trouble: Option<String>,
    /// The order in work, and whether the daemon took it back.
    pub(crate) current: Option<(u64, bool)>,
    pub(crate) phase: Phase,
    /// The owner holds the gate closed for this device; then the device is quiet, too.
    pub(crate) closed: bool,
    /// The daemon says that what is away will be needed: it comes back without a touch.
    pub(crate) bring_back: bool,
    pub(crate) failing: Option<Failing>,
    /// The last time fingerprints were asked for, there were none.
    pub(crate) unprinted: bool,
    /// The driver or the context is gone.
    pub(crate) dead: bool,
    /// The device is being detached: the owner ends.
    pub(crate) stop: bool,
    pub(crate) owner_ended: bool,
    pub(crate) external: BTreeMap<ExternalKind, u64>,
    /// Addresses in the driver's own pools were given to other processes.
    pub(crate) pools_shared: bool,
    pub(crate) beside: Beside,
    /// When a program that retries got its early out-of-memory.
    pub(crate) early: Option<Instant>,
    pub(crate) ahead: Ahead,
    pub(crate) counters: Counters,
    /// Counts [`Device::wake`]: who looked without the lock sees that something changed since.
    pub(crate) version: u64,
}

/// One device of the process.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) index: usize,
    pub(crate) uuid: DeviceUuid,
    pub(crate) total: Bytes,
    pub(crate) memory: Arc<dyn DeviceMemory>,
    pub(crate) quiet: Quiet,
    state: Mutex<State>,
    changed: Condvar,
}

impl Device {
    pub(crate) fn new(
        index: usize,
        uuid: DeviceUuid,
        total: Bytes,
        memory: Arc<dyn DeviceMemory>,
        pool: Pool,
    ) -> Self {
        Self {
            index,
            uuid,
            total,
            memory,
            quiet: Quiet::default(),
            changed: Condvar::new(),
            state: Mutex::new(State {
                index,
                pool,
                mode: Mode::Alone,
                slot: None,
                epoch: 0,
                told_evicted: 0,
                told_clean: 0,
                back_at: None,
                told_refused: None,
                unreported: 0,
                attach_deadline: None,
                asks: BTreeMap::new(),
                next_ask: 1,
                orders: VecDeque::new(),
                trims: VecDeque::new(),
                mesh: Mesh::default(),
                torn: false,
                trouble: None,
                current: None,
                phase: Phase::Resident,
                closed: false,
                bring_back: false,
                failing: None,
                unprinted: false,
                dead: false,
                stop: false,
                owner_ended: false,
                external: BTreeMap::new(),
                pools_shared: false,
                beside: Beside::default(),
                early: None,
                ahead: Ahead::default(),
                counters: Counters::default(),
                version: 0,
            }),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if nobody has it before the deadline that keeps it for good: for `exit`, which may have interrupted who holds it.
    pub(crate) fn lock_before(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        before(deadline, || match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        })
    }

    /// Waits for [`Self::wake`].
    pub(crate) fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for [`Self::wake`], so long at most.
    pub(crate) fn wait_for<'a>(
        &self,
        state: MutexGuard<'a, State>,
        at_most: Duration,
    ) -> MutexGuard<'a, State> {
        self.changed
            .wait_timeout(state, at_most)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }

    /// Everybody who waits on this device looks again. The lock makes sure that nobody is between looking and waiting.
    pub(crate) fn wake(&self) {
        self.lock().version += 1;
        self.notify();
    }

    /// The second half of [`Self::wake`], for who has changed the state under its lock.
    pub(crate) fn notify(&self) {
        self.changed.notify_all();
    }

    pub(crate) fn contains(&self, ptr: u64) -> bool {
        self.lock().pool.contains(ptr)
    }

    pub(crate) fn overlaps(&self, ptr: u64, size: u64) -> bool {
        self.lock().pool.overlaps(ptr, size)
    }

    /// Takes chunks apart on the device and enters it in the books.
    pub(crate) fn take_apart(&self, core: &Core, apart: &Dismantle) {
        if apart.chunks.is_empty() {
            return;
        }
        let stuck = steps::apart(&*self.memory, apart);
        let mut state = self.lock();
        state.pool.dismantled(apart, &stuck);
        self.note_stuck(core, &mut state, &stuck);
        drop(state);
        self.wake();
    }

    pub(crate) fn note_stuck(&self, core: &Core, state: &mut State, stuck: &[Stuck]) {
        if !stuck.is_empty() {
            state.counters.driver_errors += stuck.len() as u64;
            core.events.note(format!(
                "device {}: the driver did not take {} chunks back; they are tried again later",
                self.index,
                stuck.len()
            ));
        }
    }

    /// Tries again what the driver would not take back.
    pub(crate) fn retry_stuck(&self) {
        let remains = self.lock().pool.take_remains();
        for one in remains {
            let held = one.holds_memory().then_some(one.len);
            let after = one.clear(&*self.memory);
            self.lock().pool.tried_remains(held, after);
        }
        let before = self.lock().pool.take_stuck();
        if before.is_empty() {
            return;
        }
        let after = steps::again(&*self.memory, &before);
        self.lock().pool.tried_stuck(&before, after);
    }
}

impl State {
    /// What the daemon should know of what the driver placed beside the pool, if that is news.
    pub(crate) fn beside_news(&mut self, core: &Core) -> Option<ToDaemon> {
        let device = self.slot?;
        let loose = if self.dead {
            0
        } else {
            self.beside.loose(core.gate.passages())
        };
        let (loose, gone) = self.beside.news(loose)?;
        Some(ToDaemon::Beside {
            device,
            loose: Bytes(loose),
            gone: Bytes(gone),
        })
    }

    /// What the daemon should know of what could leave without a copy, if that is news.
    ///
    /// That is a belief, but for a program that has not been on the GPU since all was back: what was unchanged when it left last, or of which
    /// nothing else was seen since.
    pub(crate) fn clean_news(&mut self, core: &Core) -> Option<ToDaemon> {
        let device = self.slot?;
        let sums = core.arena.on_card(self.index);
        let untouched = self.back_at == Some(core.touches(self.index));
        let clean = match (self.unprinted || self.dead, untouched) {
            (true, _) => 0,
            (false, true) => sums.kept,
            (false, false) => sums.steady,
        };
        (std::mem::replace(&mut self.told_clean, clean) != clean).then_some(ToDaemon::Clean {
            device,
            bytes: Bytes(clean),
        })
    }

    /// What the daemon should know of use at present.
    pub(crate) fn usage(&mut self, core: &Core, touches: u64) -> Option<ToDaemon> {
        let device = self.slot?;
        self.told_evicted = self.pool.books.evicted;
        let books = &self.pool.books;
        let room = books.unused().min(books.limit.saturating_sub(books.charged()));
        let (spare, wish) = frameworks::spare(core, self.index, room);
        self.ask_for_ease(core, wish);
        let books = &self.pool.books;
        let beside = |kind| self.external.get(&kind).copied().unwrap_or(0);
        let imported = beside(ExternalKind::Imported);
        let pools = if self.pools_shared {
            beside(ExternalKind::AsyncPool)
        } else {
            0
        };
        // What pools keep and have not needed lately goes without a copy, as what is cached.
        let spare = core.streamed.sums(self.index).2 + spare;
        let spare = spare.min(books.allocated);
        Some(ToDaemon::Usage {
            device,
            allocated: Bytes(books.allocated - spare + books.external),
            resident: Bytes(books.used),
            evicted: Bytes(books.evicted),
            cached: Bytes(books.cached + spare),
            pinned: Bytes(
                books.external + books.stuck + self.pool.pinned_bytes() + core.vmm.pinned_bytes(&self.pool),
            ),
            overhead: Bytes(books.overhead + books.own),
            touches,
            allocations: self.pool.live_count(),
            managed: Bytes(books.managed),
            managed_out: Bytes(self.beside.out(core.gate.passages())),
            exported: Bytes(core.vmm.exported_bytes(&self.pool) + pools),
            imported: Bytes(imported),
        })
    }

    /// A new ask of this device, already sent.
    pub(crate) fn ask(&mut self, core: &Core, kind: u32, bytes: u64, long: bool) -> Option<u64> {
        let slot = self.slot?;
        // Freed in host memory a moment ago, and asked for anew: whether it fits must not be judged by both.
        if self.pool.books.evicted != self.told_evicted
            && let Some(usage) = self.usage(core, core.touches(self.index))
        {
            core.link.send(usage);
        }
        let ask = self.next_ask;
        self.next_ask += 1;
        self.asks.insert(
            ask,
            Ask {
                restore: kind == ebb_protocol::wire::ask_kind::RESTORE,
                left: bytes,
                denied: None,
            },
        );
        core.link.send(ToDaemon::Ask {
            device: slot,
            ask,
            kind,
            bytes: Bytes(bytes),
            long,
        });
        Some(ask)
    }

    /// Takes an ask back, if it is still open.
    pub(crate) fn cancel_ask(&mut self, core: &Core, ask: u64) {
        if let Some(open) = self.asks.remove(&ask)
            && open.denied.is_none()
            && let Some(device) = self.slot
        {
            core.link.send(ToDaemon::CancelAsk { device, ask });
        }
    }

    /// What was asked for evicted bytes and is still to come.
    pub(crate) fn restore_outstanding(&self) -> u64 {
        self.asks
            .values()
            .filter(|ask| ask.restore && ask.denied.is_none())
            .map(|ask| ask.left)
            .sum()
    }

    /// Takes all asks for evicted bytes back.
    pub(crate) fn cancel_restore_asks(&mut self, core: &Core) {
        let open: Vec<u64> = self
            .asks
            .iter()
            .filter(|(_, ask)| ask.restore)
            .map(|(id, _)| *id)
            .collect();
        for ask in open {
            self.cancel_ask(core, ask);
        }
    }

    /// Gives all unused lease up; how much. The caller tells the daemon.
    pub(crate) fn give_unused(&mut self) -> u64 {
        if self.mode != Mode::Connected {
            return 0;
        }
        let bytes = self.pool.books.unused();
        self.pool.books.lease -= bytes;
        bytes
    }

    /// Gives unused lease up for an order, `left` at most, and tells the daemon.
    pub(crate) fn give_lease(&mut self, core: &Core, order: &Order, left: &mut u64) {
        let bytes = self.pool.books.unused().min(*left);
        if bytes == 0 || self.mode == Mode::Alone {
            return;
        }
        self.pool.books.lease -= bytes;
        *left -= bytes;
        match self.slot {
            Some(device) if order.epoch == self.epoch => core.link.send(ToDaemon::ReclaimProgress {
                device,
                order: order.id,
                bytes: Bytes(bytes),
            }),
            Some(device) => core.link.send(ToDaemon::Return {
                device,
                bytes: Bytes(bytes),
            }),
            None => self.unreported += bytes,
        }
    }

    /// Whether an order is not wanted any more.
    pub(crate) fn is_void(&self, order: &Order) -> bool {
        order.epoch != self.epoch || self.current == Some((order.id, true)) || self.stop
    }
}
