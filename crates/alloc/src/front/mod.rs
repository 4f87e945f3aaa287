//! [`Front`]: a pool for many threads.
//!
//! ```text
//!   allocate ──► own shard has one of that size ─────────────────────────────► block      (one lock, two look-ups)
//!                    │ no
//!                    ▼
//!               the pool has room that is mapped ────────────────────────────► block
//!                    │ no: before anything is mapped, all shards give back what nobody holds
//!                    ▼
//!               calls of the driver, under no lock ──► the pool again ───────► block
//!   free ──────► the shard that has the block (mostly one's own): kept there, or to the pool
//! ```
//!
//! A block that a shard keeps is live for the pool: it stays mapped, and in its place. It goes to the next allocation of the same
//! rounded size *for the same stream* on a thread of that shard, without anybody's waiting; nothing else may be done with
//! a block that work may still use.
//!
//! # Locks
//! One at a time, never two: a shard, one part of the table of owners, the pool. No call of the driver is made under any.
//! Which shard has a block is in the table of owners from before the block is handed out until after it has gone back.

mod mesh;
mod shard;
mod sync;
#[cfg(test)]
mod tests;

use rustc_hash::FxHashMap;

use crate::pool::{
    Backing, Call, Config, Finished, FreeError, Mark, Plan, Pool, Request, Segment, Stats, Step, Stream,
    Watermarks,
};
use shard::{Freed, Shard};
use sync::{Mutex, Padded, lock, thread};

/// The driver as many threads use it at once.
pub trait Driver {
    /// What can go wrong.
    type Error;

    /// Makes one call. [`Call::Wait`] waits.
    ///
    /// # Errors
    /// If it was not done. Nothing may be left of a call that failed.
    fn call(&self, call: &Call) -> Result<(), Self::Error>;

    /// Makes several copies ([`Call::Copy`]) that do not touch each other; when it returns, none is under way.
    ///
    /// # Errors
    /// If not all were done: the bytes at their targets are then undefined.
    fn copy(&self, copies: &[Call]) -> Result<(), Self::Error> {
        copies.iter().try_for_each(|copy| self.call(copy))
    }

    /// A mark that covers all work that the stream has so far.
    fn mark(&self, stream: Stream) -> Mark;

    /// How far the stream's work is.
    fn done(&self, stream: Stream) -> Mark;

    /// Reserves addresses: start and length, whole granules, at least so many bytes.
    ///
    /// # Errors
    /// If there are none.
    fn reserve(&self, bytes: u64) -> Result<(u64, u64), Self::Error>;
}

/// Why there is no block.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError<E> {
    /// It would take so many physical bytes more than the limit leaves. Others may free some; nothing cached is left.
    #[error("no room: {0} bytes are missing under the limit")]
    NoRoom(u64),
    /// The driver refused. Everything is as before.
    #[error("the driver refused a call")]
    Driver(#[source] E),
}

/// How much threads keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// How many shards there are. Threads are dealt out to them.
    pub shards: usize,
    /// The most bytes that a shard keeps.
    pub bytes: u64,
    /// Larger blocks are not kept.
    pub block: u64,
}

impl Default for Keep {
    fn default() -> Self {
        Self {
            shards: 32,
            bytes: 256 << 20,
            block: 64 << 20,
        }
    }
}

/// Where a front stands: the pool's figures, and of all that it gave out what the shards keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FrontStats {
    /// The pool's. What shards keep is live there.
    pub pool: Stats,
    /// What the blocks that are held were asked for.
    pub requested: u64,
    /// What they take.
    pub allocated: u64,
    /// What shards keep.
    pub cached: u64,
}

/// What a front gave out, of blocks that take from one power of two bytes (included) to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FrontClass {
    /// The power of two.
    pub from: u64,
    /// Blocks that are held.
    pub blocks: u64,
    /// Bytes that they were asked for.
    pub requested: u64,
    /// Bytes that they take.
    pub allocated: u64,
    /// Bytes of blocks that shards keep.
    pub cached: u64,
    /// Blocks that ever came from the pool: what shards kept and gave out again is not counted again.
    pub made_total: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Front<D> {
    driver: D,
    keep: Keep,
    config: Config,
    shards: Vec<Padded<Shard>>,
    /// Which shard has a block, by its address.
    owners: Vec<Padded<FxHashMap<u64, u32>>>,
    pool: Mutex<Pool>,
}

/// A driver for one plan.
struct Calls<'a, D>(&'a D);

impl<D: Driver> Backing for Calls<'_, D> {
    type Error = D::Error;

    fn call(&mut self, call: &Call) -> Result<(), D::Error> {
        self.0.call(call)
    }
}

/// What became of a plan.
enum Outcome<E> {
    Ran(Finished),
    /// Work was not over when it was to be: with this error.
    Late(AllocateError<E>),
}
use Outcome::{Late, Ran};

impl<D: Driver> Front<D> {
    /// An empty pool over this driver.
    ///
    /// # Panics
    /// As [`Pool::new`], and if there are to be no shards.
    #[must_use]
    pub fn new(config: Config, keep: Keep, driver: D) -> Self {
        assert!(keep.shards > 0, "a front has shards");
        Self {
            driver,
            keep,
            config,
            shards: (0..keep.shards).map(|_| Padded::new(Shard::default())).collect(),
            owners: (0..keep.shards)
                .map(|_| Padded::new(FxHashMap::default()))
                .collect(),
            pool: Mutex::new(Pool::new(config)),
        }
    }

    /// The driver.
    pub const fn driver(&self) -> &D {
        &self.driver
    }

    fn owners(&self, at: u64) -> &Padded<FxHashMap<u64, u32>> {
        let hash = (at / self.config.quantum).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let index = usize::try_from(hash).unwrap_or(0) % self.owners.len();
        &self.owners[index]
    }

    fn shard(&self) -> usize {
        thread() % self.shards.len()
    }

    /// A block of `size` bytes for work of `stream`.
    ///
    /// # Errors
    /// [`AllocateError`]; nothing has changed but that what threads kept may have gone back to the pool.
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<u64, AllocateError<D::Error>> {
        self.allocate_on(self.shard(), size, stream)
    }

    fn allocate_on(&self, shard: usize, size: u64, stream: Stream) -> Result<u64, AllocateError<D::Error>> {
        let Some(len) = self.config.round(size) else {
            return Err(AllocateError::NoRoom(size));
        };
        if let Some(at) = self.shards[shard].lock().pop(stream, len, size) {
            return Ok(at);
        }
        let mut request = Request {
            size,
            align: 1,
            stream,
            asked: false,
        };
        let ready = lock(&self.pool).allocate_mapped(&request);
        if let Some(at) = ready {
            self.adopt(shard, at, stream, len, size);
            return Ok(at);
        }
        self.flush(0);
        // Work that memory would have to be taken from could not be waited for.
        let mut late = None;
        loop {
            let step = if late.is_some() {
                lock(&self.pool).allocate_new(&request)
            } else {
                lock(&self.pool).allocate(request)
            };
            let at = match step {
                Step::Ready(at) => at,
                Step::Run(plan) => match self.run_in_time(*plan) {
                    Ok(Ran(Finished::Block(at))) => at,
                    Ok(Ran(Finished::Less | Finished::Failed)) => return Err(AllocateError::NoRoom(size)),
                    Ok(Late(error)) if late.is_none() => {
                        late = Some(error);
                        continue;
                    }
                    Ok(Late(error)) | Err(error) => return Err(error),
                },
                Step::Ask(streams) => {
                    for stream in streams {
                        let done = self.driver.done(stream);
                        lock(&self.pool).done(stream, done);
                    }
                    request.asked = true;
                    continue;
                }
                Step::Wait(works) => {
                    for (stream, mark) in works {
                        let wait = Call::Wait { stream, mark };
                        self.driver.call(&wait).map_err(AllocateError::Driver)?;
                        lock(&self.pool).done(stream, mark);
                    }
                    continue;
                }
                // With time there would be room.
                Step::NoRoom(short) => return Err(late.unwrap_or(AllocateError::NoRoom(short))),
                Step::Addresses(bytes) => {
                    let (start, len) = self.driver.reserve(bytes).map_err(AllocateError::Driver)?;
                    if !lock(&self.pool).add_range(start, len) {
                        return Err(AllocateError::NoRoom(size));
                    }
                    continue;
                }
            };
            self.adopt(shard, at, stream, len, size);
            return Ok(at);
        }
    }

    /// The shard first: a block in the table of owners is in its shard.
    fn adopt(&self, shard: usize, at: u64, stream: Stream, len: u64, size: u64) {
        self.shards[shard].lock().adopt(at, stream, len, size);
        let number = u32::try_from(shard).unwrap_or(0);
        self.owners(at).lock().insert(at, number);
    }

    fn run(&self, plan: Plan) -> Result<Finished, AllocateError<D::Error>> {
        match self.run_in_time(plan)? {
            Ran(finished) => Ok(finished),
            Late(error) => Err(error),
        }
    }

    fn run_in_time(&self, plan: Plan) -> Result<Outcome<D::Error>, AllocateError<D::Error>> {
        let (done, error) = plan.run(&mut Calls(&self.driver));
        let late = matches!(plan.calls().get(done), Some(Call::Wait { .. }));
        let finished = lock(&self.pool).finish(plan, done);
        match error.map(AllocateError::Driver) {
            None => Ok(Ran(finished)),
            Some(error) if late => Ok(Late(error)),
            Some(error) => Err(error),
        }
    }

    /// Frees a block whose last work is `stream`'s, and that of `others`.
    ///
    /// # Errors
    /// [`FreeError`] if nobody holds a block that begins there; nothing changes.
    pub fn free(&self, at: u64, stream: Stream, others: &[Stream]) -> Result<(), FreeError> {
        self.free_on(self.shard(), at, stream, others)
    }

    fn free_on(&self, shard: usize, at: u64, stream: Stream, others: &[Stream]) -> Result<(), FreeError> {
        let keep = others.iter().all(|other| *other == stream);
        let (block, bytes) = (self.keep.block, self.keep.bytes);
        let (mut freed, mut cached) = {
            let mut own = self.shards[shard].lock();
            (own.free(at, stream, keep, block), own.cached)
        };
        let mut owner = shard;
        if freed.is_none() {
            let Some(other) = self.owners(at).lock().get(&at).copied() else {
                return Err(match lock(&self.pool).find(at) {
                    Some(_) => FreeError::Inner(at),
                    None => FreeError::NotLive(at),
                });
            };
            owner = other as usize;
            let mut other = self.shards[owner].lock();
            freed = other.free(at, stream, keep, block);
            cached = other.cached;
        }
        match freed.unwrap_or(Err(FreeError::NotLive(at)))? {
            Freed::Kept if cached > bytes => self.flush_shard(owner, bytes / 2),
            Freed::Kept => {}
            Freed::Pass => {
                self.owners(at).lock().remove(&at);
                let mark = self.driver.mark(stream);
                let marks: Vec<(Stream, Mark)> = others
                    .iter()
                    .map(|other| (*other, self.driver.mark(*other)))
                    .collect();
                let given = lock(&self.pool).free(at, stream, mark, &marks);
                debug_assert!(given.is_ok(), "a block in a shard is live");
            }
        }
        Ok(())
    }

    /// What was asked for at this address, if somebody holds a block that begins there.
    pub fn size(&self, at: u64) -> Option<u64> {
        let owner = self.owners(at).lock().get(&at).copied()?;
        self.shards[owner as usize].lock().held(at)
    }

    fn flush_shard(&self, shard: usize, left: u64) {
        let blocks = self.shards[shard].lock().drain(left);
        if blocks.is_empty() {
            return;
        }
        let mut marks: FxHashMap<Stream, Mark> = FxHashMap::default();
        for (at, stream) in &blocks {
            self.owners(*at).lock().remove(at);
            marks.entry(*stream).or_insert_with(|| self.driver.mark(*stream));
        }
        let mut pool = lock(&self.pool);
        for (at, stream) in blocks {
            let mark = marks.get(&stream).copied().unwrap_or(Mark(u64::MAX));
            let given = pool.free(at, stream, mark, &[]);
            debug_assert!(given.is_ok(), "a block in a shard is live");
        }
    }

    /// All shards give back what nobody holds, down to so many bytes each.
    pub fn flush(&self, left: u64) {
        for shard in 0..self.shards.len() {
            self.flush_shard(shard, left);
        }
    }

    /// Tells the pool how far all streams are that keep something free.
    pub fn ask(&self) {
        let streams = lock(&self.pool).streams();
        for stream in streams {
            let done = self.driver.done(stream);
            lock(&self.pool).done(stream, done);
        }
    }

    /// Gives everything back that nobody holds. Waits for the work that may use it.
    ///
    /// # Errors
    /// The driver's, after as much as it did.
    pub fn trim(&self) -> Result<(), AllocateError<D::Error>> {
        self.flush(0);
        self.ask();
        let plan = lock(&self.pool).trim();
        plan.map_or(Ok(()), |plan| self.run(plan).map(|_| ()))
    }

    /// Gives so much of the idle memory back, if there is so much.
    ///
    /// # Errors
    /// The driver's, after as much as it did.
    pub fn release(&self, bytes: u64) -> Result<(), AllocateError<D::Error>> {
        self.flush(0);
        self.ask();
        let plan = lock(&self.pool).release(bytes);
        plan.map_or(Ok(()), |plan| self.run(plan).map(|_| ()))
    }

    /// Gives idle memory back if the device has less free than it should; how much went.
    ///
    /// # Errors
    /// The driver's, after as much as it did.
    pub fn relieve(&self, free: u64, marks: &Watermarks) -> Result<u64, AllocateError<D::Error>> {
        if free < marks.low {
            self.flush(0);
            self.ask();
        }
        let (plan, before) = {
            let mut pool = lock(&self.pool);
            let surplus = pool.surplus(free, marks);
            let plan = if surplus > 0 { pool.release(surplus) } else { None };
            (plan, pool.stats().released_total)
        };
        if let Some(plan) = plan {
            self.run(plan)?;
        }
        Ok(lock(&self.pool).stats().released_total - before)
    }

    /// Idle bytes that were not needed lately; see [`Pool::spare`].
    pub fn spare(&self) -> u64 {
        lock(&self.pool).spare()
    }

    /// A second has passed: see [`Pool::second`].
    pub fn second(&self, room: u64) -> u64 {
        lock(&self.pool).second(room)
    }

    /// A period has ended: see [`Pool::tick`].
    pub fn tick(&self) {
        lock(&self.pool).tick();
    }

    /// Waits, stream by stream, for the work that keeps free memory from others. Where that fails, goes on with the next.
    pub fn settle(&self) {
        self.flush(0);
        let streams = lock(&self.pool).streams();
        for stream in streams {
            let mark = self.driver.mark(stream);
            if self.driver.call(&Call::Wait { stream, mark }).is_ok() {
                lock(&self.pool).done(stream, mark);
            }
        }
    }

    /// Makes a stream private; see [`Pool::keep`].
    pub fn keep(&self, stream: Stream) {
        lock(&self.pool).keep(stream);
    }

    /// It is like others from here on; see [`Pool::keep_no_more`].
    pub fn keep_no_more(&self, stream: Stream) {
        // What shards keep for it serves nobody else there.
        self.flush(0);
        lock(&self.pool).keep_no_more(stream);
    }

    /// A stream is gone, its work done; see [`Pool::end`].
    pub fn end(&self, stream: Stream) {
        self.flush(0);
        lock(&self.pool).end(stream);
    }

    /// What lies where. What shards keep is given back first, so that it is seen as free.
    pub fn segments(&self) -> Vec<Segment> {
        self.flush(0);
        lock(&self.pool).segments()
    }

    /// Peaks begin anew.
    pub fn reset_peaks(&self) {
        lock(&self.pool).reset_peaks();
    }

    /// Changes the physical bytes that there may be.
    pub fn set_limit(&self, limit: u64) {
        lock(&self.pool).set_limit(limit);
    }

    /// Where it stands. Not one moment: threads go on between one shard and the next.
    pub fn stats(&self) -> FrontStats {
        let mut stats = FrontStats {
            pool: lock(&self.pool).stats(),
            ..FrontStats::default()
        };
        for shard in &self.shards {
            let shard = shard.lock();
            stats.requested += shard.requested;
            stats.allocated += shard.allocated;
            stats.cached += shard.cached;
        }
        stats
    }

    /// By size: the classes of which there ever was a block. Not one moment, as [`Self::stats`].
    pub fn classes(&self) -> Vec<FrontClass> {
        let mut classes: Vec<FrontClass> = (0..u64::BITS)
            .map(|power| FrontClass {
                from: 1 << power,
                ..FrontClass::default()
            })
            .collect();
        for one in lock(&self.pool).classes() {
            if let Some(class) = classes.get_mut(one.from.ilog2() as usize) {
                class.made_total = one.blocks_total;
            }
        }
        for shard in &self.shards {
            shard.lock().add_to(&mut classes);
        }
        classes.retain(|class| class.made_total > 0);
        classes
    }

    /// Tests the pool's invariants; see [`Pool::check`].
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        lock(&self.pool).check()
    }
}
