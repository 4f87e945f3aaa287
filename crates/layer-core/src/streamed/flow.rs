//! The steps of an allocation, of a free, and of shrinking.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::book::{Book, PoolNo, Taken};
use super::{Fence, FenceState, Fences, OWNER, PoolError, StreamKey, Streamed, Waited, WhichPool};
use crate::allocate;
use crate::core::Core;
use crate::device::Device;
use crate::engine;
use crate::error::{AllocError, FreeError};
use ebb_units::Bytes;

/// How long an allocation that finds no room waits for running work, behind which there is some.
const WAIT: Duration = Duration::from_secs(20);
/// Between looks at that work.
const PAUSE: Duration = Duration::from_millis(1);
/// How long the end of a stream waits for who records on it at this moment.
const BUSY: Duration = Duration::from_secs(2);

fn resolve(book: &Book, which: WhichPool) -> Option<PoolNo> {
    match which {
        WhichPool::Current(device) => book.current(device),
        WhichPool::Handle(handle) => book.by_handle(handle),
    }
}

/// One try with what the pool has.
fn take(
    streamed: &Streamed,
    which: WhichPool,
    stream: &StreamKey,
    room: u64,
    size: u64,
) -> Result<Option<u64>, PoolError> {
    let mut book = streamed.lock();
    let no = resolve(&book, which).ok_or(PoolError::Unknown)?;
    let stream = book.stream(*stream);
    Ok(book.take(no, stream, room, size))
}

pub(super) fn alloc(core: &Core, which: WhichPool, stream: &StreamKey, size: u64) -> Result<u64, PoolError> {
    let room = Book::room(size)
        .filter(|room| *room > 0)
        .ok_or(AllocError::Size(Bytes(size)))?;
    if let Some(ptr) = take(&core.streamed, which, stream, room, size)? {
        return Ok(ptr);
    }
    slowly(core, which, stream, room, size)
}

#[cold]
fn slowly(core: &Core, which: WhichPool, stream: &StreamKey, room: u64, size: u64) -> Result<u64, PoolError> {
    let streamed = &core.streamed;
    let (handle, device, facts) = {
        let book = streamed.lock();
        let pool = resolve(&book, which)
            .and_then(|no| book.pool(no))
            .ok_or(PoolError::Unknown)?;
        (pool.handle, pool.device, pool.facts)
    };
    let fences = usable(streamed);
    if facts.opportunistic
        && let Some(fences) = &fences
    {
        look(streamed, fences, Some(stream));
        if let Some(ptr) = take(streamed, which, stream, room, size)? {
            return Ok(ptr);
        }
    }
    let device = core.device(device).ok_or(AllocError::Bypass)?;
    let mut first = match grow(core, &device, which, stream, room, size, false) {
        Ok(Some(ptr)) => return Ok(ptr),
        Ok(None) => PoolError::Full,
        Err(error @ (PoolError::Unknown | PoolError::Alloc(AllocError::Bypass))) => return Err(error),
        Err(error) => error,
    };
    if facts.dependencies
        && let Some(fences) = &fences
    {
        look(streamed, fences, Some(stream));
        if let Some(ptr) = borrow(streamed, fences, which, stream, room, size)? {
            return Ok(ptr);
        }
    }
    if first == PoolError::Full {
        // Only what this pool has can help, when its streams have come so far.
        let deadline = Instant::now() + WAIT;
        while let Some(fences) = usable(streamed) {
            look(streamed, &fences, Some(stream));
            let slabs = streamed.lock().trim(|pool| (pool.handle == handle).then_some(0));
            release(core, slabs);
            if let Some(ptr) = take(streamed, which, stream, room, size)? {
                return Ok(ptr);
            }
            match grow(core, &device, which, stream, room, size, true) {
                Ok(Some(ptr)) => return Ok(ptr),
                Ok(None) => {}
                Err(error) => {
                    first = error;
                    break;
                }
            }
            if !streamed.lock().waits(|pool| pool.handle == handle) || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        return Err(first);
    }
    grow(core, &device, which, stream, room, size, true)?.ok_or(PoolError::Full)
}

/// A slab more, and the allocation out of it. `Ok(None)`: the pool may not grow. Without patience only with what lease there is.
fn grow(
    core: &Core,
    device: &Arc<Device>,
    which: WhichPool,
    stream: &StreamKey,
    room: u64,
    size: u64,
    patient: bool,
) -> Result<Option<u64>, PoolError> {
    let granule = device.memory.granularity();
    let (no, wish, need) = {
        let book = core.streamed.lock();
        let no = resolve(&book, which).ok_or(PoolError::Unknown)?;
        let Some((wish, need)) = book.growth(no, room, granule) else {
            return Ok(None);
        };
        (no, wish, need)
    };
    let mut made = Err(AllocError::Size(Bytes(need)));
    if wish > need {
        made = allocate::own_now(core, device, wish, OWNER).map(|base| (base, wish));
    }
    if made.is_err() && !matches!(made, Err(AllocError::Bypass)) {
        made = if patient {
            allocate::own(core, device, need, OWNER)
        } else {
            allocate::own_now(core, device, need, OWNER)
        }
        .map(|base| (base, need));
    }
    let (base, len) = made?;
    let mut book = core.streamed.lock();
    if !book.add_slab(no, device.index, base, len) {
        drop(book);
        let _ = engine::free_on(core, device, base);
        return Err(AllocError::Bypass.into());
    }
    let number = book.stream(*stream);
    // Another thread cannot have taken it: the lock was not let go since the slab was entered.
    Ok(book.take(no, number, room, size))
}

/// What another stream freed: this one waits for it.
fn borrow(
    streamed: &Streamed,
    fences: &Arc<dyn Fences>,
    which: WhichPool,
    stream: &StreamKey,
    room: u64,
    size: u64,
) -> Result<Option<u64>, PoolError> {
    let foreign = {
        let mut book = streamed.lock();
        let no = resolve(&book, which).ok_or(PoolError::Unknown)?;
        let number = book.stream(*stream);
        book.take_foreign(no, number, room, size)
    };
    let Some(foreign) = foreign else { return Ok(None) };
    let waits = fences.hold(stream, foreign.fence.1);
    let at = foreign.at;
    let unused = streamed.lock().foreign_taken(foreign, waits);
    recycle(fences, unused);
    Ok(waits.then_some(at))
}

pub(super) fn free(core: &Core, ptr: u64, stream: Option<&StreamKey>) -> Option<Result<(), FreeError>> {
    let streamed = &core.streamed;
    let mut book = streamed.lock();
    let Some(at_once) = book.free(ptr, stream.copied()) else {
        return book.contains(ptr).then_some(Err(FreeError::Invalid));
    };
    drop(book);
    if let Some(key) = at_once
        && let Some(fences) = usable(streamed)
    {
        // Nobody but this thread can mark its own stream, and it may never come by again.
        fence(streamed, &fences, |other| *other == key);
    }
    Some(Ok(()))
}

/// The driver's marks, if they may be used now.
fn usable(streamed: &Streamed) -> Option<Arc<dyn Fences>> {
    streamed.fences.get().filter(|fences| fences.allowed()).cloned()
}

fn recycle(fences: &Arc<dyn Fences>, unused: impl IntoIterator<Item = Fence>) {
    for fence in unused {
        fences.recycle(fence);
    }
}

/// Marks streams that freed something since they were marked last.
fn fence(streamed: &Streamed, fences: &Arc<dyn Fences>, wanted: impl Fn(&StreamKey) -> bool) {
    let to_do = streamed.lock().take_unfenced(wanted);
    for (stream, born, key, number) in to_do {
        let made = fences.record(&key);
        let unused = streamed.lock().fenced(stream, born, number, made);
        streamed.idle.notify_all();
        recycle(fences, unused);
    }
}

/// Finds out how far the streams have come. `own`: the one that the calling thread uses, which may be its own default stream.
fn look(streamed: &Streamed, fences: &Arc<dyn Fences>, own: Option<&StreamKey>) {
    fence(streamed, fences, |key| key.thread == 0 || Some(key) == own);
    let taken = streamed.lock().take_fences();
    for Taken {
        stream,
        born,
        fences: marks,
    } in taken
    {
        let mut passed = 0;
        let mut left = Vec::new();
        for (number, mark) in marks {
            match fences.state(mark) {
                FenceState::Passed => {
                    passed = passed.max(number);
                    fences.recycle(mark);
                }
                FenceState::Pending => left.push((number, mark)),
                FenceState::Lost => fences.recycle(mark),
            }
        }
        let unused = streamed.lock().put_fences(
            Taken {
                stream,
                born,
                fences: left,
            },
            passed,
        );
        recycle(fences, unused);
    }
}

/// Slabs that were taken out of the books go back to the devices' pools.
fn release(core: &Core, slabs: Vec<(usize, u64)>) -> usize {
    let mut released = 0;
    for (device, base) in slabs {
        if let Some(device) = core.device(device) {
            released += usize::from(engine::free_on(core, &device, base).is_ok());
        }
    }
    released
}

pub(super) fn shrink_ripe(core: &Core) {
    let slabs = core.streamed.lock().trim_ripe();
    release(core, slabs);
}

fn trim_device(core: &Core, device: usize) -> usize {
    let slabs = core
        .streamed
        .lock()
        .trim(|pool| (pool.device == device).then_some(0));
    release(core, slabs)
}

pub(super) fn trim_to(core: &Core, handle: u64, keep: u64) -> bool {
    if core.streamed.lock().by_handle(handle).is_none() {
        return false;
    }
    if let Some(fences) = usable(&core.streamed) {
        look(&core.streamed, &fences, None);
    }
    let slabs = core
        .streamed
        .lock()
        .trim(|pool| (pool.handle == handle).then_some(keep));
    release(core, slabs);
    true
}

/// The program has waited: what was freed before that in those streams is anybody's.
pub(super) fn waited(core: &Core, mark: u64, waited: &Waited) {
    let streamed = &core.streamed;
    let unused = match waited {
        Waited::Context(context) => {
            let mut book = streamed.lock();
            let device = book.device_of_context(*context);
            book.settle_those(mark, |key, _| {
                key.context == *context || key.is_nobodys() && Some(key.device) == device
            })
        }
        Waited::Stream(stream) => streamed
            .lock()
            .settle_those(mark, |key, gone| key == stream && !gone),
        Waited::Event => Vec::new(),
    };
    if let Some(fences) = streamed.fences.get() {
        recycle(fences, unused);
    }
    if streamed.lock().ripe() == 0 {
        return;
    }
    if let Some(fences) = usable(streamed) {
        look(streamed, &fences, None);
    }
    shrink_ripe(core);
}

/// Room for somebody else on a device: everything that pools keep there and nobody needs. Returns how many slabs went.
pub(crate) fn make_room(core: &Core, device: usize) -> usize {
    if !core.streamed.is_used() {
        return 0;
    }
    if let Some(fences) = usable(&core.streamed) {
        look(&core.streamed, &fences, None);
    }
    trim_device(core, device)
}

/// The same, before an allocation fails: waits for work behind which there is room.
pub(crate) fn make_room_waiting(core: &Core, device: usize) -> usize {
    let deadline = Instant::now() + WAIT;
    loop {
        let released = make_room(core, device);
        if released > 0 || !core.streamed.is_used() {
            return released;
        }
        let waits = core.streamed.lock().waits(|pool| pool.device == device);
        if !waits || usable(&core.streamed).is_none() || core.is_exiting() || Instant::now() > deadline {
            return 0;
        }
        std::thread::sleep(PAUSE);
    }
}

/// A device's gate is closed and nothing runs on it: all that was freed on its streams is anybody's, and what nobody needs goes.
pub(crate) fn after_quiet(core: &Core, device: usize) {
    let streamed = &core.streamed;
    if !streamed.is_used() {
        return;
    }
    let unused = {
        let mut book = streamed.lock();
        let now = book.now();
        book.settle_those(now, |key, _| key.device == device)
    };
    if let Some(fences) = streamed.fences.get() {
        recycle(fences, unused);
    }
    trim_device(core, device);
}

/// How streams end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The driver has not destroyed them yet: they can be marked, and their work may still run.
    Soon,
    /// They cannot be reached any more, and their work may still run.
    Unreachable,
    /// Their work is over.
    Over,
}

/// Streams end.
pub(super) fn streams_go(core: &Core, which: impl Fn(&StreamKey) -> bool + Copy, end: End) {
    let streamed = &core.streamed;
    if end == End::Soon
        && let Some(fences) = usable(streamed)
    {
        fence(streamed, &fences, which);
    }
    let mut book = streamed.lock();
    let unused = if end == End::Over {
        let now = book.now();
        book.settle_those(now, |key, _| which(key))
    } else {
        Vec::new()
    };
    let busy = book.streams_go(which);
    drop(book);
    if let Some(fences) = streamed.fences.get() {
        recycle(fences, unused);
    }
    if busy {
        wait_idle(streamed, which);
    }
    if end == End::Over {
        shrink_ripe(core);
    }
}

/// Waits, not for ever, until nobody records on streams that end.
fn wait_idle(streamed: &Streamed, which: impl Fn(&StreamKey) -> bool) {
    let deadline = Instant::now() + BUSY;
    loop {
        let book = streamed
            .book
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let left = deadline.saturating_duration_since(Instant::now());
        if !book.is_busy(&which) || left.is_zero() {
            return;
        }
        drop(streamed.idle.wait_timeout(book, left));
    }
}
