//! Where things go: device addresses, small blocks inside them, and room in host memory. Pure: no driver, clock or lock.
//!
//! * [`AddressSpace`]: spans of a reserved address range.
//! * [`Blocks`]: small allocations, 512 bytes apart, inside shared segments.
//! * [`HostSlots`]: room for evicted chunks in arena segments.
//! * [`pool`]: device memory, addresses and physical memory together; it neither fragments nor waits.
//! * [`front`]: that pool for many threads, which keep blocks for their next use.
//!
//! The first three know exactly what is free, so that what is given back twice, or was never given out, is an error and never
//! an entry in a list. The cost of a call goes with the logarithm of what is live; history costs nothing.

#![forbid(unsafe_code)]

mod blocks;
pub mod front;
pub mod pool;
mod slots;
mod space;

pub use blocks::{BLOCK_ALIGN, Block, Blocks, Freed};
pub use slots::{HostSlots, Piece};
pub use space::AddressSpace;

/// What was given back isn't something that was given out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GiveBackError {
    /// It lies inside something live, and is not the start or the size of it.
    #[error("{0:#x} lies inside something that is in use, and isn't its start")]
    Inner(u64),
    /// Nothing is live there: never given out, or given back already.
    #[error("nothing is in use at {0:#x}")]
    NotLive(u64),
}
