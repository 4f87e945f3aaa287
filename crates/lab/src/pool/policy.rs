//! [`Policy`]: what an allocator has to offer to be replayed.

use super::event::Stream;

/// What a block is wanted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Bytes, at least 1.
    pub size: u64,
    /// Whose work will use it.
    pub stream: Stream,
    /// The time.
    pub now_ns: u64,
}

/// How a block was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    /// Whose work used it last: there it may be used again at once.
    pub stream: Stream,
    /// The time.
    pub now_ns: u64,
    /// When that work is done: from then on any stream may use the block. A policy must not look ahead: this is what an
    /// event, recorded now, will answer.
    pub done_ns: u64,
}

/// There is no room. The policy has tried all that it knows of before it says so, waiting for work included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no room for {0} bytes")]
pub struct Refused(pub u64);

/// What a policy says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// Bytes of all blocks that are allocated, as they were asked for.
    pub live: u64,
    /// Physical bytes of the card that it holds.
    pub physical: u64,
    /// How often it had the driver put memory behind addresses since its start: a call for each handle that is mapped
    /// (`cuMemMap`), or for each segment from an allocator that maps by itself (`cudaMalloc`).
    pub map_calls: u64,
}

/// An allocator under replay. Addresses are its own: nothing is ever stored at them.
pub trait Policy {
    /// A block of at least the size that is asked for, which overlaps no other block, at a multiple of 256.
    ///
    /// # Errors
    /// If the capacity that it was made with does not suffice.
    fn allocate(&mut self, request: Request) -> Result<u64, Refused>;

    /// Frees the block at this address, which [`Policy::allocate`] returned and nobody freed since.
    fn free(&mut self, address: u64, free: Free);

    /// All work is done: what was freed before may be used by any stream.
    fn synchronize(&mut self, _now_ns: u64) {}

    /// A process has ended that used these streams. It has freed all its blocks, and its work is done.
    fn end(&mut self, _streams: std::ops::Range<Stream>, _now_ns: u64) {}

    /// Nothing will happen for a while: time for what need not be done at once.
    fn idle(&mut self, _now_ns: u64) {}

    /// Bytes of live blocks that it has copied so far.
    fn copied(&self) -> u64 {
        0
    }

    /// Where it stands. Called after every event: it should cost little.
    fn figures(&self) -> Figures;
}
