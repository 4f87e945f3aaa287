//! Allocating, with the waiting that may be in it.
//!
//! An allocation is a few map operations if the pool has what it takes; else driver calls, made inside the gate, so that
//! an eviction waits for them and they wait for an eviction; else a question to the daemon, waited for outside the gate.

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use ebb_device::{DeviceError, Props};
use ebb_protocol::wire::{ToDaemon, ask_kind, deny};
use ebb_units::Bytes;

use crate::core::Core;
use crate::device::{Device, Mode, State};
use crate::error::{AllocError, TouchError};
use crate::gate::DeviceSet;
use crate::pool::Plan;
use crate::{frameworks, residency, steps, streamed};

/// After its early out-of-memory a retrying program's next tries wait long, for this long.
const RETRY_WINDOW: Duration = Duration::from_secs(60);
/// The daemon keeps the time of a wait; ours is a net below it, for a daemon that hangs.
const SLACK: Duration = Duration::from_millis(500);
/// Between tries on a card that is full although we hold lease.
const FULL_PAUSE: Duration = Duration::from_millis(10);

/// What one try inside the gate came to.
enum Tried {
    Got(u64),
    /// There is not lease enough for so many bytes.
    Short(u64),
    /// The card is full although there is lease.
    Full,
    Failed(AllocError),
}

/// What is allocated.
#[derive(Clone, Copy)]
enum What {
    Own {
        size: u64,
        owner: u64,
    },
    External {
        bytes: u64,
    },
    /// Memory that the program makes by itself.
    Program {
        len: u64,
        props: Props,
    },
}

impl What {
    const fn bytes(self) -> Bytes {
        match self {
            Self::Own { size, .. } => Bytes(size),
            Self::External { bytes } => Bytes(bytes),
            Self::Program { len, .. } => Bytes(len),
        }
    }
}

/// How long one allocation waits.
#[derive(Debug, Default)]
struct Waiting {
    /// It has waited so long for the card, since it had lease for what it wants. Time at the gate, evicted perhaps, is no such time.
    full: Duration,
    /// A deadline, set when first needed.
    lease: Option<Instant>,
}

impl Waiting {
    /// It waited so long for a full card.
    fn waited_for_card(&mut self, time: Duration) {
        self.full = self.full.saturating_add(time);
    }

    /// What is left of the time that a full card is waited for.
    fn left_for_card(&self, most: Duration) -> Duration {
        most.saturating_sub(self.full)
    }

    /// Its lease went while it waited for the card: that begins anew.
    fn lease_went(&mut self) {
        self.full = Duration::ZERO;
    }
}

pub(crate) fn own(core: &Core, device: &Arc<Device>, size: u64, owner: u64) -> Result<u64, AllocError> {
    if size == 0 {
        return Err(AllocError::Size(Bytes(size)));
    }
    // A size that cannot even be rounded up is too much, not a bad parameter: the driver says out of memory.
    if size
        .checked_next_multiple_of(device.memory.granularity())
        .is_none()
    {
        return Err(AllocError::NeverFits(Bytes(size)));
    }
    allocate(core, device, What::Own { size, owner })
}

/// The same without waiting for anybody: only with the lease that there is, on a card that has room.
pub(crate) fn own_now(core: &Core, device: &Arc<Device>, size: u64, owner: u64) -> Result<u64, AllocError> {
    match try_once(core, device, What::Own { size, owner })? {
        Tried::Got(ptr) => {
            core.link.poke();
            Ok(ptr)
        }
        Tried::Failed(error) => Err(error),
        Tried::Full | Tried::Short(_) => Err(AllocError::TimedOut(Bytes(size))),
    }
}

pub(crate) fn external(core: &Core, device: &Arc<Device>, bytes: u64) -> Result<(), AllocError> {
    allocate(core, device, What::External { bytes }).map(|_| ())
}

/// Memory that the program makes by itself; its handle.
pub(crate) fn program(core: &Core, device: &Arc<Device>, len: u64, props: Props) -> Result<u64, AllocError> {
    allocate(core, device, What::Program { len, props })
}

fn allocate(core: &Core, device: &Arc<Device>, what: What) -> Result<u64, AllocError> {
    let mut waiting = Waiting::default();
    // Stream-ordered pools may have room behind running work, and small blocks granules to themselves: that is waited for once, before
    // an allocation fails.
    let mut waited = false;
    let result = loop {
        let failed = match try_once(core, device, what)? {
            Tried::Got(ptr) => break Ok(ptr),
            Tried::Failed(AllocError::OverLimit { .. }) | Tried::Full | Tried::Short(_)
                if streamed::make_room(core, device.index) > 0
                    || frameworks::make_room(core, device.index, what.bytes().get()) > 0 =>
            {
                continue;
            }
            Tried::Failed(error) => error,
            Tried::Full => match pause_full(core, device, &mut waiting) {
                Ok(()) => continue,
                Err(error) => error,
            },
            Tried::Short(bytes) => {
                waiting.lease_went();
                match wait_for_lease(core, device, what.bytes(), bytes, &mut waiting) {
                    Ok(()) => continue,
                    Err(error) => error,
                }
            }
        };
        let room = !matches!(failed, AllocError::Bypass | AllocError::Size(_));
        if waited
            || !room
            || streamed::make_room_waiting(core, device.index) == 0 && !residency::mesh_for_room(core, device)
        {
            break Err(failed);
        }
        waited = true;
    };
    match &result {
        Ok(_) => core.link.poke(),
        Err(AllocError::Bypass | AllocError::Size(_)) => {}
        Err(error) => {
            core.events.note(format!(
                "device {}: allocation of {} refused: {error}",
                device.index,
                what.bytes()
            ));
            device.lock().counters.out_of_memory_answers += 1;
        }
    }
    result
}

/// One try, inside the gate if calls of the driver may be in it.
fn try_once(core: &Core, device: &Arc<Device>, what: What) -> Result<Tried, AllocError> {
    Ok(match what {
        What::Own { .. } | What::Program { .. } => {
            core.gate
                .enter_for(|| DeviceSet::one(device.index))
                .map_err(|error| match error {
                    TouchError::OutOfMemory => AllocError::TimedOut(what.bytes()),
                    TouchError::Device(error) => AllocError::Device(error),
                })?;
            let inside = Inside(core);
            let tried = match what {
                What::Own { size, owner } => try_own(core, device, size, owner),
                What::Program { len, props } => try_program(core, device, len, &props),
                What::External { bytes } => try_external(core, device, bytes),
            };
            drop(inside);
            tried
        }
        What::External { bytes } => try_external(core, device, bytes),
    })
}

/// Leaves the gate also if something panics on the way (no call that a thread may be cancelled in is made with it:
/// the driver's memory calls are none).
struct Inside<'a>(&'a Core);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.gate.leave();
    }
}

fn try_own(core: &Core, device: &Device, size: u64, owner: u64) -> Tried {
    let memory = &*device.memory;
    let mut emptied = false;
    loop {
        let plan = {
            let mut state = device.lock();
            if state.dead || state.stop {
                return Tried::Failed(AllocError::Bypass);
            }
            let plan = state.pool.plan(size, owner);
            if matches!(plan, Plan::Ready(_)) {
                state.early = None;
            }
            plan
        };
        match plan {
            Plan::Ready(ptr) => return Tried::Got(ptr),
            Plan::Short(bytes) => return Tried::Short(bytes),
            Plan::OverLimit { charged, limit } => {
                return Tried::Failed(over_limit(core, device, size, charged, limit));
            }
            Plan::Drop(apart) => device.take_apart(core, &apart),
            Plan::Addresses(len) => {
                if let Err(error) = more_addresses(device, len) {
                    return Tried::Failed(error.into());
                }
            }
            Plan::Build { base, len, chunk } => match steps::build(memory, base, len, chunk) {
                Ok(chunks) => {
                    let mut state = device.lock();
                    state.early = None;
                    return match state.pool.built(base, &chunks, size, owner) {
                        Plan::Ready(ptr) => Tried::Got(ptr),
                        _ => Tried::Failed(AllocError::Bypass),
                    };
                }
                Err(failed) => {
                    let mut state = device.lock();
                    state.pool.not_built(base, &failed.stuck);
                    device.note_stuck(core, &mut state, &failed.stuck);
                    if failed.error != DeviceError::OutOfMemory {
                        state.counters.driver_errors += 1;
                        state.dead |= failed.error == DeviceError::Gone;
                        return Tried::Failed(failed.error.into());
                    }
                    if !give_up_kept(core, device, state) || emptied {
                        return Tried::Full;
                    }
                    emptied = true;
                }
            },
        }
    }
}

/// The card is full: what we keep for later is worth less than what is wanted now. Whether there was anything.
fn give_up_kept(core: &Core, device: &Device, mut state: MutexGuard<'_, State>) -> bool {
    let apart = state.pool.drop_cached(u64::MAX);
    let some = !apart.chunks.is_empty() || state.pool.books.stuck > 0;
    drop(state);
    device.take_apart(core, &apart);
    device.retry_stuck();
    device.wake();
    some
}

fn try_program(core: &Core, device: &Device, len: u64, props: &Props) -> Tried {
    let mut emptied = false;
    loop {
        let plan = {
            let mut state = device.lock();
            if state.dead || state.stop {
                return Tried::Failed(AllocError::Bypass);
            }
            state.pool.plan_program(len)
        };
        match plan {
            Plan::Ready(_) => {}
            Plan::Short(more) => return Tried::Short(more),
            Plan::OverLimit { charged, limit } => {
                return Tried::Failed(over_limit(core, device, len, charged, limit));
            }
            Plan::Drop(apart) => {
                device.take_apart(core, &apart);
                continue;
            }
            Plan::Build { .. } | Plan::Addresses(_) => return Tried::Failed(AllocError::Bypass),
        }
        let error = match device.memory.create_as(len, props) {
            Ok(real) => {
                device.lock().early = None;
                let maker = Arc::clone(&device.memory);
                let handle = core
                    .vmm
                    .with(|table| table.add(maker, device.index, len, *props, real));
                return Tried::Got(handle);
            }
            Err(error) => error,
        };
        let mut state = device.lock();
        state.pool.program_gone(len);
        if error != DeviceError::OutOfMemory {
            // The driver's answer to what the program asked for, and no fault of the device.
            state.dead |= error == DeviceError::Gone;
            return Tried::Failed(error.into());
        }
        if !give_up_kept(core, device, state) || emptied {
            return Tried::Full;
        }
        emptied = true;
    }
}

fn try_external(core: &Core, device: &Device, bytes: u64) -> Tried {
    loop {
        let plan = {
            let mut state = device.lock();
            if state.dead || state.stop {
                return Tried::Failed(AllocError::Bypass);
            }
            state.pool.plan_external(bytes)
        };
        match plan {
            Plan::Ready(_) => return Tried::Got(0),
            Plan::Short(more) => return Tried::Short(more),
            Plan::OverLimit { charged, limit } => {
                return Tried::Failed(over_limit(core, device, bytes, charged, limit));
            }
            Plan::Drop(apart) => device.take_apart(core, &apart),
            Plan::Build { .. } | Plan::Addresses(_) => return Tried::Failed(AllocError::Bypass),
        }
    }
}

/// How long a thread of the program waits for word of a refusal to be with the daemon.
const TELL_MOST: Duration = Duration::from_millis(50);

fn over_limit(core: &Core, device: &Device, size: u64, charged: u64, limit: u64) -> AllocError {
    let mut state = device.lock();
    let asked = state.pool.rounded(size).unwrap_or(size);
    // Whoever runs the program wants to know why it has no memory; who tries again and again is not worth a message each time.
    let now = Instant::now();
    let due = state
        .told_refused
        .is_none_or(|at| now >= at + core.config.usage_every);
    if let Some(slot) = state.slot.filter(|_| due) {
        state.told_refused = Some(now);
        core.link.send(ToDaemon::Refused {
            device: slot,
            asked: Bytes(asked),
            charged: Bytes(charged),
            limit: Bytes(limit),
        });
    }
    drop(state);
    if due {
        // Many programs end at once for that.
        core.link.wait_sent(TELL_MOST);
    }
    AllocError::OverLimit {
        asked: Bytes(asked),
        charged: Bytes(charged),
        limit: Bytes(limit),
    }
}

/// Another range of addresses: as large as the card, or half of that, and so on, but never less than needed.
pub(crate) fn more_addresses(device: &Device, at_least: u64) -> Result<(), DeviceError> {
    let memory = &*device.memory;
    let granule = memory.granularity();
    let mut size = device
        .total
        .get()
        .max(at_least)
        .checked_next_multiple_of(granule)
        .unwrap_or(at_least);
    let mut first_error = None;
    loop {
        match memory.reserve(size, granule) {
            Ok(base) => {
                let added = device.lock().pool.add_range(base, size);
                debug_assert!(added, "the driver gives an address out once");
                return Ok(());
            }
            Err(error) => {
                let error = *first_error.get_or_insert(error);
                if size <= at_least || error == DeviceError::Gone {
                    return Err(error);
                }
                size = (size / 2).max(at_least).next_multiple_of(granule);
            }
        }
    }
}

/// The card is full although we hold lease: another process is not dead yet, or somebody allocates past the daemon.
fn pause_full(core: &Core, device: &Device, waiting: &mut Waiting) -> Result<(), AllocError> {
    let full = AllocError::Device(DeviceError::OutOfMemory);
    let state = device.lock();
    let alone = state.mode == Mode::Alone && !core.link.served_within(core.config.full_wait);
    if alone || core.config.strict {
        // As without us. A daemon that was there a moment ago is slow or starts again, and neighbours that it had told to
        // make room do so meanwhile.
        return Err(full);
    }
    let left = waiting.left_for_card(core.waits.alloc().max(core.config.full_wait));
    if left.is_zero() {
        return Err(full);
    }
    let since = Instant::now();
    drop(device.wait_for(state, left.min(FULL_PAUSE)));
    waiting.waited_for_card(since.elapsed());
    Ok(())
}

/// Asks the daemon for more and waits. `Ok` means that something changed and another try is due.
fn wait_for_lease(
    core: &Core,
    device: &Device,
    size: Bytes,
    len: u64,
    waiting: &mut Waiting,
) -> Result<(), AllocError> {
    let timed_out = AllocError::TimedOut(size);
    let mut state = device.lock();
    let epoch = state.epoch;
    while state.mode == Mode::Attaching && state.epoch == epoch {
        // The link leaves a daemon that does not answer about a device; this only nets a link that hangs.
        let version = state.version;
        state = device.wait_for(state, core.config.connect_wait + SLACK);
        if state.version == version {
            return Err(timed_out);
        }
    }
    if state.mode != Mode::Connected || state.epoch != epoch || state.stop {
        return Ok(());
    }
    let early = state.early.is_some_and(|at| at.elapsed() < RETRY_WINDOW);
    let strict = core.config.strict;
    let long = !strict
        && (early || {
            drop(state);
            let retries = (core.config.program_retries)();
            state = device.lock();
            !retries
        });
    let wait = if long {
        core.waits.alloc_max()
    } else {
        core.waits.alloc()
    };
    let deadline = *waiting.lease.get_or_insert_with(|| Instant::now() + wait + SLACK);
    let short = state.pool.books.short_of(len);
    if state.epoch != epoch || short == 0 {
        return Ok(());
    }
    let kind = if strict { ask_kind::STRICT } else { ask_kind::ALLOC };
    let Some(ask) = state.ask(core, kind, short, long) else {
        return Ok(());
    };
    let denied = loop {
        if state.epoch != epoch || state.stop || state.dead {
            return Ok(());
        }
        match state.asks.get(&ask) {
            None => {
                state.ask_ahead(core, short);
                return Ok(());
            }
            Some(open) => {
                if let Some(denied) = open.denied {
                    state.asks.remove(&ask);
                    if state.pool.books.short_of(len) < short {
                        // Lease came meanwhile, asked for ahead perhaps: less is needed than was judged.
                        return Ok(());
                    }
                    break denied;
                }
            }
        }
        let books = &state.pool.books;
        if books.unused().saturating_add(books.cached) >= len {
            // The program itself freed enough meanwhile.
            state.cancel_ask(core, ask);
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            state.cancel_ask(core, ask);
            break (deny::TIMED_OUT, false);
        }
        state = device.wait_for(state, left);
    };
    match denied {
        (deny::OVER_LIMIT, _) => {
            let (charged, limit) = (state.pool.books.charged(), state.pool.books.limit);
            Err(AllocError::OverLimit {
                asked: size,
                charged: Bytes(charged),
                limit: Bytes(limit),
            })
        }
        (deny::NEVER_FITS, _) | (_, true) => Err(AllocError::NeverFits(size)),
        (deny::STOPPING, _) => {
            // It will close the connection; then the driver decides. Should it not, the time is bounded all the same.
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(timed_out);
            }
            drop(device.wait_for(state, left.min(Duration::from_secs(1))));
            Ok(())
        }
        _ => {
            if !long {
                state.early = Some(Instant::now());
            }
            Err(timed_out)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_card_is_waited_for_as_long_as_before_once_the_lease_went() {
        let most = Duration::from_secs(2);
        let mut waiting = Waiting::default();
        waiting.waited_for_card(most / 2);
        assert_eq!(waiting.left_for_card(most), most / 2);
        waiting.waited_for_card(most);
        assert_eq!(waiting.left_for_card(most), Duration::ZERO);
        waiting.lease_went();
        assert_eq!(waiting.left_for_card(most), most);
    }
}
