//! The books of all pools: which are ours, which streams freed something, and how far those are known to have come.
//!
//! One counter numbers everything: what is born, allocated and freed. A *fence* marks a place in a stream; it is taken with the
//! number that the counter had before, so that every free with that number or a lower one lies before it.
//!
//! Everything runs under one lock and is a few map operations.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use super::heap::{ANYBODY, Heap, Live, Piece, Stream, UNIT};
use super::{Fence, PoolFacts, PoolFigures, StreamKey};

/// Slabs are no larger than this, except for an allocation that is.
const SLAB_MAX: u64 = 32 << 20;
/// Of one stream so many fences are kept: the oldest, which is passed first, and the newest.
const FENCES: usize = 2;

/// Numbers that are keys: spread by one multiplication. Programs do not choose addresses to collide.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }
    fn write_u64(&mut self, number: u64) {
        let mixed = (self.0.rotate_left(23) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

type Map<K, V> = HashMap<K, V, BuildHasherDefault<Spread>>;

/// A pool, by its place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PoolNo(usize);

#[derive(Debug)]
pub(super) struct MemPool {
    pub(super) handle: u64,
    pub(super) device: usize,
    pub(super) facts: PoolFacts,
    pub(super) heap: Heap,
    used_high: u64,
    reserved_high: u64,
    /// The program destroyed it; it goes with its last slab.
    destroyed: bool,
    /// It holds more than it should after the next wait of the program.
    ripe: bool,
}

impl MemPool {
    /// What it may keep.
    fn keep(&self) -> u64 {
        if self.destroyed {
            0
        } else {
            self.facts.release_threshold
        }
    }
}

#[derive(Debug)]
struct Entry {
    key: StreamKey,
    /// The counter when it was entered.
    born: u64,
    /// The number of the last free on it.
    last: u64,
    /// It is known to have come so far.
    settled: u64,
    /// Places in it, oldest first.
    fences: Vec<(u64, Fence)>,
    /// Threads that record on it at this moment.
    busy: u32,
    /// The program destroyed it.
    gone: bool,
}

/// A stream's fences, taken out of the books while they are looked at.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) stream: Stream,
    pub(super) born: u64,
    pub(super) fences: Vec<(u64, Fence)>,
}

/// A piece of another stream, given out under the condition that its stream is waited for.
#[derive(Debug)]
pub(super) struct Foreign {
    pool: PoolNo,
    piece: Piece,
    whose: Stream,
    born: u64,
    number: u64,
    pub(super) at: u64,
    pub(super) fence: (u64, Fence),
}

/// What is known about a live piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) live: Live,
    pub(crate) pool: u64,
    pub(crate) device: usize,
}

#[derive(Debug, Default)]
pub(super) struct Book {
    counter: u64,
    pools: Vec<Option<MemPool>>,
    by_handle: Map<u64, PoolNo>,
    /// The pool that allocations of a device come from.
    current: Vec<Option<PoolNo>>,
    live: Map<u64, (PoolNo, Piece)>,
    slabs: BTreeMap<u64, (u64, PoolNo, u32)>,
    /// Place 0 is nobody's.
    streams: Vec<Option<Entry>>,
    by_key: Map<StreamKey, Stream>,
    ripe: usize,
    /// Streams that freed something and are not known to have come so far.
    unsettled: usize,
}

impl Book {
    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Everything that happened so far has this number or a lower one.
    pub(super) fn now(&self) -> u64 {
        self.counter
    }

    /// How many pools should shrink when the program waits for something.
    pub(super) fn ripe(&self) -> usize {
        self.ripe
    }

    /// How many streams are not known to have come to their last free.
    pub(super) fn unsettled(&self) -> usize {
        self.unsettled
    }

    /// Whether there is any memory of ours in pools.
    pub(super) fn slabs(&self) -> usize {
        self.slabs.len()
    }

    pub(super) fn pool(&self, no: PoolNo) -> Option<&MemPool> {
        self.pools.get(no.0)?.as_ref()
    }

    fn pool_mut(&mut self, no: PoolNo) -> Option<&mut MemPool> {
        self.pools.get_mut(no.0)?.as_mut()
    }

    /// After every change of a pool.
    fn weigh(&mut self, no: PoolNo) {
        let Some(Some(pool)) = self.pools.get_mut(no.0) else {
            return;
        };
        let ripe = pool.heap.idle() > 0 && pool.heap.reserved() > pool.keep();
        if ripe != pool.ripe {
            pool.ripe = ripe;
            if ripe {
                self.ripe += 1;
            } else {
                self.ripe -= 1;
            }
        }
        if pool.destroyed && pool.heap.reserved() == 0 {
            self.pools[no.0] = None;
        }
    }

    // Pools.

    pub(super) fn register(&mut self, handle: u64, device: usize, facts: PoolFacts) {
        if let Some(&no) = self.by_handle.get(&handle)
            && self.pool(no).is_some_and(|pool| pool.device == device)
        {
            return;
        }
        let pool = MemPool {
            handle,
            device,
            facts,
            heap: Heap::default(),
            used_high: 0,
            reserved_high: 0,
            destroyed: false,
            ripe: false,
        };
        let no = match self.pools.iter().position(Option::is_none) {
            Some(place) => {
                self.pools[place] = Some(pool);
                PoolNo(place)
            }
            None => {
                self.pools.push(Some(pool));
                PoolNo(self.pools.len() - 1)
            }
        };
        self.by_handle.insert(handle, no);
    }

    pub(super) fn by_handle(&self, handle: u64) -> Option<PoolNo> {
        self.by_handle.get(&handle).copied()
    }

    pub(super) fn current(&self, device: usize) -> Option<PoolNo> {
        self.current.get(device).copied().flatten()
    }

    pub(super) fn set_current(&mut self, device: usize, handle: Option<u64>) {
        if self.current.len() <= device {
            self.current.resize(device + 1, None);
        }
        self.current[device] = handle.and_then(|handle| self.by_handle(handle));
    }

    /// The program destroyed a pool: no more allocations come from it.
    pub(super) fn destroy(&mut self, handle: u64) -> bool {
        let Some(no) = self.by_handle.remove(&handle) else {
            return false;
        };
        for current in &mut self.current {
            current.take_if(|current| *current == no);
        }
        if let Some(pool) = self.pool_mut(no) {
            pool.destroyed = true;
        }
        self.weigh(no);
        true
    }

    pub(super) fn facts_mut(&mut self, handle: u64, change: impl FnOnce(&mut PoolFacts)) -> bool {
        let Some(no) = self.by_handle(handle) else {
            return false;
        };
        if let Some(pool) = self.pool_mut(no) {
            change(&mut pool.facts);
        }
        self.weigh(no);
        true
    }

    pub(super) fn figures(&self, handle: u64) -> Option<PoolFigures> {
        let pool = self.pool(self.by_handle(handle)?)?;
        Some(PoolFigures {
            reserved: pool.heap.reserved(),
            reserved_high: pool.reserved_high,
            used: pool.heap.used(),
            used_high: pool.used_high,
            facts: pool.facts,
        })
    }

    pub(super) fn reset_high(&mut self, handle: u64, reserved: bool) -> bool {
        let Some(no) = self.by_handle(handle) else {
            return false;
        };
        if let Some(pool) = self.pool_mut(no) {
            if reserved {
                pool.reserved_high = pool.heap.reserved();
            } else {
                pool.used_high = pool.heap.used();
            }
        }
        true
    }

    /// A device is detached: everything on it goes, and the caller sees to the memory.
    pub(super) fn drop_device(&mut self, device: usize) {
        for index in 0..self.pools.len() {
            let Some(pool) = self.pools[index].take_if(|pool| pool.device == device) else {
                continue;
            };
            self.ripe -= usize::from(pool.ripe);
            for at in pool.heap.live_addresses() {
                self.live.remove(&at);
            }
            for base in pool.heap.slabs() {
                self.slabs.remove(&base);
            }
            self.by_handle.retain(|_, no| no.0 != index);
            if self.current(device) == Some(PoolNo(index)) {
                self.current[device] = None;
            }
        }
    }

    // Allocating and freeing.

    /// How large a new slab for `room` bytes should be, and how large it must be; `None` if the pool may not grow so far.
    pub(super) fn growth(&self, no: PoolNo, room: u64, granule: u64) -> Option<(u64, u64)> {
        let pool = self.pool(no)?;
        let need = room.checked_next_multiple_of(granule)?;
        let reserved = pool.heap.reserved();
        let may = match pool.facts.max_size {
            0 => u64::MAX,
            max => max.saturating_sub(reserved),
        };
        if need > may {
            return None;
        }
        let wish = (reserved / 4).min(SLAB_MAX) / granule * granule;
        Some((need.max(wish.min(may / granule * granule)), need))
    }

    /// The rule of sizes: `None` if that is no number.
    pub(super) fn room(size: u64) -> Option<u64> {
        size.checked_next_multiple_of(UNIT)
    }

    pub(super) fn take(&mut self, no: PoolNo, stream: Stream, room: u64, size: u64) -> Option<u64> {
        let id = self.next();
        let pool = self.pools.get_mut(no.0)?.as_mut()?;
        let piece = pool.heap.take(stream, room, size, id)?;
        let at = pool.heap.address(piece);
        self.entered(no, piece, at);
        Some(at)
    }

    fn entered(&mut self, no: PoolNo, piece: Piece, at: u64) {
        self.live.insert(at, (no, piece));
        if let Some(pool) = self.pool_mut(no) {
            pool.used_high = pool.used_high.max(pool.heap.used());
        }
        self.weigh(no);
    }

    /// A new slab. `false` if the pool has gone meanwhile: then the caller keeps the memory.
    pub(super) fn add_slab(&mut self, no: PoolNo, device: usize, base: u64, len: u64) -> bool {
        let Some(pool) = self
            .pool_mut(no)
            .filter(|pool| pool.device == device && !pool.destroyed)
        else {
            return false;
        };
        let slab = pool.heap.add_slab(base, len);
        pool.reserved_high = pool.reserved_high.max(pool.heap.reserved());
        self.slabs.insert(base, (len, no, slab));
        true
    }

    /// Takes a piece that is free to another stream which has a fence behind it.
    pub(super) fn take_foreign(
        &mut self,
        no: PoolNo,
        stream: Stream,
        room: u64,
        size: u64,
    ) -> Option<Foreign> {
        let id = self.next();
        let pool = self.pools.get_mut(no.0)?.as_mut()?;
        let streams = &self.streams;
        let fenced = |other: Stream| {
            let entry = streams.get(other.0 as usize)?.as_ref()?;
            (other != stream).then_some(entry.fences.last()?.0)
        };
        let (piece, whose, number) = pool.heap.take_foreign(stream, room, size, id, fenced)?;
        let at = pool.heap.address(piece);
        let entry = self.streams.get_mut(whose.0 as usize)?.as_mut()?;
        let fence = entry.fences.pop()?;
        let born = entry.born;
        self.entered(no, piece, at);
        Some(Foreign {
            pool: no,
            piece,
            whose,
            born,
            number,
            at,
            fence,
        })
    }

    /// Whether the stream waits for the other one now. If it does not, the piece is as it was. Returns a fence that is of no more use.
    pub(super) fn foreign_taken(&mut self, foreign: Foreign, waits: bool) -> Option<Fence> {
        let unused = self.put_fence(foreign.whose, foreign.born, foreign.fence);
        if !waits && self.live.remove(&foreign.at).is_some() {
            let to = match self.entry(foreign.whose, foreign.born) {
                Some(entry) if entry.settled < foreign.number => foreign.whose,
                _ => ANYBODY,
            };
            if let Some(pool) = self.pool_mut(foreign.pool) {
                pool.heap.give(foreign.piece, to, foreign.number);
            }
            self.weigh(foreign.pool);
        }
        unused
    }

    /// Frees a live piece on a stream, or on the one that it was allocated on. `None` if there is none at that address. Returns
    /// the stream, if it must be fenced at once.
    pub(super) fn free(&mut self, at: u64, on: Option<StreamKey>) -> Option<Option<StreamKey>> {
        let (no, piece) = self.live.remove(&at)?;
        let number = self.next();
        let stream = match on {
            Some(key) => self.stream(key),
            None => self.stream_of(no, piece),
        };
        if let Some(Some(entry)) = self.streams.get_mut(stream.0 as usize) {
            self.unsettled += usize::from(entry.last <= entry.settled);
            entry.last = number;
        }
        let pool = self.pool_mut(no)?;
        pool.heap.give(piece, stream, number);
        self.weigh(no);
        Some(on.filter(|key| key.thread != 0))
    }

    /// The stream that a piece was allocated on. If that has gone, a stream that nobody has and that only a wait for all settles.
    fn stream_of(&mut self, no: PoolNo, piece: Piece) -> Stream {
        let live = self.pool(no).and_then(|pool| pool.heap.live_at(piece));
        let device = self.pool(no).map_or(0, |pool| pool.device);
        if let Some(live) = live
            && let Some(Some(entry)) = self.streams.get(live.stream.0 as usize)
            && entry.born <= live.id
            && !entry.gone
        {
            return live.stream;
        }
        self.stream(StreamKey::nobodys(device))
    }

    // Streams.

    /// A stream's place; it is entered when it is new.
    pub(super) fn stream(&mut self, key: StreamKey) -> Stream {
        if let Some(&known) = self.by_key.get(&key) {
            return known;
        }
        let born = self.next();
        let entry = Entry {
            key,
            born,
            last: 0,
            settled: 0,
            fences: Vec::new(),
            busy: 0,
            gone: false,
        };
        if self.streams.is_empty() {
            self.streams.push(None);
        }
        let place = match self.streams.iter().skip(1).position(Option::is_none) {
            Some(place) => {
                self.streams[place + 1] = Some(entry);
                place + 1
            }
            None => {
                self.streams.push(Some(entry));
                self.streams.len() - 1
            }
        };
        let stream = Stream(u32::try_from(place).unwrap_or(u32::MAX));
        self.by_key.insert(key, stream);
        stream
    }

    fn entry(&self, stream: Stream, born: u64) -> Option<&Entry> {
        self.streams
            .get(stream.0 as usize)?
            .as_ref()
            .filter(|entry| entry.born == born)
    }

    fn entry_mut(&mut self, stream: Stream, born: u64) -> Option<&mut Entry> {
        self.streams
            .get_mut(stream.0 as usize)?
            .as_mut()
            .filter(|entry| entry.born == born)
    }

    #[cfg(test)]
    pub(super) fn known_streams(&self) -> usize {
        self.entries().count()
    }

    /// The device of a context, if a stream of it is known.
    pub(super) fn device_of_context(&self, context: u64) -> Option<usize> {
        let (_, entry) = self.entries().find(|(_, entry)| entry.key.context == context)?;
        Some(entry.key.device)
    }

    fn entries(&self) -> impl Iterator<Item = (Stream, &Entry)> {
        self.streams
            .iter()
            .enumerate()
            .filter_map(|(place, entry)| Some((Stream(u32::try_from(place).ok()?), entry.as_ref()?)))
    }

    /// Streams that freed something and have no fence behind it yet; they are busy until [`Self::fenced`]. A thread's own stream
    /// can be reached from that thread alone.
    pub(super) fn take_unfenced(
        &mut self,
        wanted: impl Fn(&StreamKey) -> bool,
    ) -> Vec<(Stream, u64, StreamKey, u64)> {
        let upto = self.counter;
        self.streams
            .iter_mut()
            .enumerate()
            .filter_map(|(place, entry)| {
                let entry = entry.as_mut()?;
                let fenced = entry.fences.last().map_or(entry.settled, |(number, _)| *number);
                if entry.gone || entry.last <= fenced || entry.key.is_nobodys() || !wanted(&entry.key) {
                    return None;
                }
                entry.busy += 1;
                Some((Stream(u32::try_from(place).ok()?), entry.born, entry.key, upto))
            })
            .collect()
    }

    /// The fence was made, or was not. Returns one that is of no more use.
    pub(super) fn fenced(
        &mut self,
        stream: Stream,
        born: u64,
        number: u64,
        fence: Option<Fence>,
    ) -> Option<Fence> {
        if let Some(entry) = self.entry_mut(stream, born) {
            entry.busy = entry.busy.saturating_sub(1);
        }
        self.put_fence(stream, born, (number, fence?))
    }

    fn put_fence(&mut self, stream: Stream, born: u64, fence: (u64, Fence)) -> Option<Fence> {
        let Some(entry) = self
            .entry_mut(stream, born)
            .filter(|entry| entry.settled < fence.0)
        else {
            return Some(fence.1);
        };
        let place = entry.fences.partition_point(|(number, _)| *number <= fence.0);
        entry.fences.insert(place, fence);
        (entry.fences.len() > FENCES).then(|| entry.fences.remove(1).1)
    }

    /// The fences of streams with something unsettled, taken out to be looked at.
    pub(super) fn take_fences(&mut self) -> Vec<Taken> {
        self.streams
            .iter_mut()
            .enumerate()
            .filter_map(|(place, entry)| {
                let entry = entry.as_mut()?;
                if entry.fences.is_empty() {
                    return None;
                }
                Some(Taken {
                    stream: Stream(u32::try_from(place).ok()?),
                    born: entry.born,
                    fences: std::mem::take(&mut entry.fences),
                })
            })
            .collect()
    }

    /// They were looked at: the stream has come as far as `passed`, and these are left. Returns those that are of no more use.
    pub(super) fn put_fences(&mut self, taken: Taken, passed: u64) -> Vec<Fence> {
        let mut unused = Vec::new();
        if self.entry(taken.stream, taken.born).is_some() {
            self.settle(taken.stream, passed);
        }
        for fence in taken.fences {
            unused.extend(self.put_fence(taken.stream, taken.born, fence));
        }
        self.bury(taken.stream);
        unused
    }

    /// A stream has come so far.
    fn settle(&mut self, stream: Stream, upto: u64) {
        let Some(Some(entry)) = self.streams.get_mut(stream.0 as usize) else {
            return;
        };
        if upto <= entry.settled {
            return;
        }
        self.unsettled -= usize::from(entry.last > entry.settled && entry.last <= upto);
        entry.settled = upto;
        for no in 0..self.pools.len() {
            if let Some(pool) = &mut self.pools[no] {
                pool.heap.settle(stream, upto);
            }
        }
    }

    /// Streams of which the caller knows that they have come so far (it also hears whether they were destroyed). Returns fences that are of no more use.
    pub(super) fn settle_those(&mut self, upto: u64, which: impl Fn(&StreamKey, bool) -> bool) -> Vec<Fence> {
        let those: Vec<Stream> = self
            .entries()
            .filter(|(_, entry)| entry.last > entry.settled && which(&entry.key, entry.gone))
            .map(|(stream, _)| stream)
            .collect();
        let mut unused = Vec::new();
        for stream in those {
            self.settle(stream, upto);
            if let Some(Some(entry)) = self.streams.get_mut(stream.0 as usize) {
                while entry.fences.first().is_some_and(|(number, _)| *number <= upto) {
                    unused.push(entry.fences.remove(0).1);
                }
            }
            self.bury(stream);
        }
        unused
    }

    /// A place in the table is vacant when its stream has gone and nothing waits for it.
    fn bury(&mut self, stream: Stream) {
        if let Some(slot) = self.streams.get_mut(stream.0 as usize) {
            slot.take_if(|entry| {
                entry.gone && entry.busy == 0 && entry.settled >= entry.last && entry.fences.is_empty()
            });
        }
    }

    /// The program is about to destroy streams: they are found by no key any more. `true` if somebody records on one of
    /// them at this moment.
    pub(super) fn streams_go(&mut self, which: impl Fn(&StreamKey) -> bool) -> bool {
        let those: Vec<(Stream, StreamKey)> = self
            .entries()
            .filter(|(_, entry)| which(&entry.key))
            .map(|(stream, entry)| (stream, entry.key))
            .collect();
        let mut busy = false;
        for (stream, key) in those {
            self.by_key.remove(&key);
            if let Some(Some(entry)) = self.streams.get_mut(stream.0 as usize) {
                entry.gone = true;
                busy |= entry.busy > 0;
            }
            self.bury(stream);
        }
        busy
    }

    /// Whether somebody records on a stream at this moment that the program destroys.
    pub(super) fn is_busy(&self, which: impl Fn(&StreamKey) -> bool) -> bool {
        self.entries()
            .any(|(_, entry)| entry.busy > 0 && which(&entry.key))
    }

    /// Whether something of such pools waits for a stream, and will learn of its progress.
    pub(super) fn waits(&self, which: impl Fn(&MemPool) -> bool) -> bool {
        let unsettled: Vec<Stream> = self
            .entries()
            .filter(|(_, entry)| entry.last > entry.settled && !entry.key.is_nobodys())
            .filter(|(_, entry)| !entry.fences.is_empty() || !entry.gone && entry.key.thread == 0)
            .map(|(stream, _)| stream)
            .collect();
        self.pools
            .iter()
            .flatten()
            .filter(|pool| which(pool))
            .any(|pool| unsettled.iter().any(|&stream| pool.heap.waits_for(stream)))
    }

    // Shrinking.

    /// Takes slabs out that nobody needs: of pools that are `wanted`, down to what it says that they may keep.
    pub(super) fn trim(&mut self, wanted: impl Fn(&MemPool) -> Option<u64>) -> Vec<(usize, u64)> {
        let mut out = Vec::new();
        for no in 0..self.pools.len() {
            let Some(pool) = &mut self.pools[no] else { continue };
            let Some(keep) = wanted(pool) else { continue };
            let keep = if pool.destroyed { 0 } else { keep };
            let device = pool.device;
            for (base, _) in pool.heap.trim(keep) {
                self.slabs.remove(&base);
                out.push((device, base));
            }
            self.weigh(PoolNo(no));
        }
        out
    }

    /// The same for pools that hold more than their threshold.
    pub(super) fn trim_ripe(&mut self) -> Vec<(usize, u64)> {
        self.trim(|pool| pool.ripe.then(|| pool.keep()))
    }

    // Looking up.

    /// The slab that contains an address.
    fn slab_of(&self, ptr: u64) -> Option<(PoolNo, u32)> {
        let (base, &(len, no, slab)) = self.slabs.range(..=ptr).next_back()?;
        (ptr - base < len).then_some((no, slab))
    }

    /// Whether an address lies in memory of a pool, allocated or not.
    pub(super) fn contains(&self, ptr: u64) -> bool {
        self.slab_of(ptr).is_some()
    }

    /// The live piece that contains an address.
    pub(super) fn find(&self, ptr: u64) -> Option<Found> {
        let (no, live) = match self.live.get(&ptr) {
            Some(&(no, piece)) => (no, self.pool(no)?.heap.live_at(piece)?),
            None => {
                let (no, slab) = self.slab_of(ptr)?;
                (no, self.pool(no)?.heap.find(slab, ptr)?)
            }
        };
        let pool = self.pool(no)?;
        Some(Found {
            live,
            pool: pool.handle,
            device: pool.device,
        })
    }

    /// Sums of a device for the report: reserved, used, idle.
    pub(super) fn sums(&self, device: usize) -> (u64, u64, u64) {
        let mut sums = (0, 0, 0);
        for pool in self.pools.iter().flatten().filter(|pool| pool.device == device) {
            sums.0 += pool.heap.reserved();
            sums.1 += pool.heap.used();
            sums.2 += pool.heap.idle();
        }
        sums
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut live = 0;
        for (no, pool) in self.pools.iter().enumerate() {
            let Some(pool) = pool else { continue };
            pool.heap.check();
            live += pool.heap.live();
            for at in pool.heap.live_addresses() {
                assert_eq!(self.live[&at].0, PoolNo(no));
            }
            assert_eq!(
                pool.ripe,
                pool.heap.idle() > 0 && pool.heap.reserved() > pool.keep()
            );
        }
        assert_eq!(self.live.len() as u64, live);
        assert_eq!(
            self.ripe,
            self.pools.iter().flatten().filter(|pool| pool.ripe).count()
        );
        let unsettled = self.entries().filter(|(_, entry)| entry.last > entry.settled);
        assert_eq!(self.unsettled, unsettled.count());
        for (_, entry) in self.entries() {
            assert!(entry.fences.windows(2).all(|pair| pair[0].0 <= pair[1].0));
            assert!(entry.fences.len() <= FENCES);
        }
    }
}
