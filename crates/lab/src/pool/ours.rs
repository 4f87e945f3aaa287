//! [`Ours`]: the pool of `ebb-alloc` under replay, with a driver that only counts.
//!
//! Marks of streams are times: a free at which the work will be done at `done_ns` has that mark, and what a stream has come to is
//! the time that it is. So the pool knows no more than events would tell it, and it asks only when it would have to map.

use std::ops::Range;

use ebb_alloc::pool::{self, Backing, Call, Config, Finished, Mark, Pool, Step, Watermarks};
use ebb_units::GRANULE;

use super::event::Stream;
use super::policy::{Figures, Free, Policy, Refused, Request};

/// The addresses that there are: enough for problems whose unit is a granule.
const ADDRESSES: Range<u64> = 1 << 40..1 << 62;

/// Marks under which all idle memory is wanted back that the pool's hysteresis does not keep, and the free bytes for it.
const MARKS: Watermarks = Watermarks {
    low: 4,
    high: u64::MAX,
    batch: 0,
};
const FREE: u64 = 2;
const SECOND_NS: u64 = 1_000_000_000;

/// A driver that can do everything.
#[derive(Debug, Default)]
struct Able;

impl Backing for Able {
    type Error = std::convert::Infallible;

    fn call(&mut self, _call: &Call) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Our pool.
#[derive(Debug)]
pub struct Ours {
    pool: Pool,
    meshes: bool,
    /// When the pool was last told that a second has passed.
    second_ns: u64,
}

impl Ours {
    /// An empty one that may hold so many physical bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let mut config = Config::for_granule(GRANULE.0);
        config.limit = capacity;
        let mut pool = Pool::new(config);
        let added = pool.add_range(ADDRESSES.start, ADDRESSES.end - ADDRESSES.start);
        debug_assert!(added, "an empty pool takes any whole granules");
        Self {
            pool,
            meshes: false,
            second_ns: 0,
        }
    }

    /// One that brings small blocks together whenever nothing happens: then all work is done and none is queued.
    #[must_use]
    pub fn meshing(capacity: u64) -> Self {
        Self {
            meshes: true,
            ..Self::new(capacity)
        }
    }

    /// The pool, for figures that other policies do not have.
    #[must_use]
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }
}

const fn stream(stream: Stream) -> pool::Stream {
    pool::Stream(stream as u64)
}

/// Of work that is done at this time. No work is done at mark 0.
const fn mark(at_ns: u64) -> Mark {
    Mark(at_ns.saturating_add(1))
}

impl Policy for Ours {
    fn allocate(&mut self, request: Request) -> Result<u64, Refused> {
        if request.now_ns.saturating_sub(self.second_ns) >= SECOND_NS {
            // Nothing happened in seconds that were passed over.
            let quiet = request.now_ns - self.second_ns >= 2 * SECOND_NS;
            self.second_ns = request.now_ns;
            for _ in 0..1 + u32::from(quiet) {
                self.pool.second(u64::MAX);
            }
        }
        let mut asked = false;
        loop {
            let step = self.pool.allocate(pool::Request {
                size: request.size,
                align: 1,
                stream: stream(request.stream),
                asked,
            });
            match step {
                Step::Ready(at) => return Ok(at),
                Step::Run(plan) => {
                    let (done, _) = plan.run(&mut Able);
                    return match self.pool.finish(*plan, done) {
                        Finished::Block(at) => Ok(at),
                        Finished::Less | Finished::Failed => Err(Refused(request.size)),
                    };
                }
                Step::Ask(streams) => {
                    for other in streams {
                        self.pool.done(other, mark(request.now_ns));
                    }
                    asked = true;
                }
                Step::Wait(works) => {
                    for (other, mark) in works {
                        self.pool.done(other, mark);
                    }
                }
                Step::NoRoom(_) | Step::Addresses(_) => return Err(Refused(request.size)),
            }
        }
    }

    fn free(&mut self, address: u64, free: Free) {
        let freed = self
            .pool
            .free(address, stream(free.stream), mark(free.done_ns), &[]);
        debug_assert!(freed.is_ok(), "{address:#x} is a live block");
    }

    fn synchronize(&mut self, _now_ns: u64) {
        self.pool.all_done();
    }

    fn end(&mut self, streams: Range<Stream>, _now_ns: u64) {
        for one in streams {
            self.pool.end(stream(one));
        }
        // What the process leaves goes back, less what the others needed at a time since the last but one ended.
        let surplus = self.pool.surplus(FREE, &MARKS);
        self.pool.tick();
        if surplus > 0
            && let Some(plan) = self.pool.release(surplus)
        {
            let (done, _) = plan.run(&mut Able);
            self.pool.finish(plan, done);
        }
    }

    fn idle(&mut self, _now_ns: u64) {
        if !self.meshes {
            return;
        }
        self.pool.all_done();
        for pair in self.pool.meshable() {
            if let Some(plan) = self.pool.mesh(pair) {
                let (done, _) = plan.run(&mut Able);
                self.pool.finish(plan, done);
            }
        }
    }

    fn copied(&self) -> u64 {
        self.pool.copied()
    }

    fn figures(&self) -> Figures {
        let (physical, map_calls) = self.pool.physical();
        Figures {
            live: self.pool.requested(),
            physical,
            map_calls,
        }
    }
}
