//! All logic of the preloaded library, testable with no GPU.
//!
//! * [`gate`]: every call that may make the GPU use memory passes it, and it can be closed.
//! * `pool`: books of one device: addresses, chunks, lease. `steps`: driver calls that happen as a whole or not at all.
//! * `pins`: what must stay on the card, and why. `residency`: a device's memory leaves the card and comes back; one owner thread per device.
//! * `share`: memory that several processes have open. `arena`: host memory for it, lent by the daemon. `link`: the conversation with the daemon.
//! * `sleep`: the process makes no driver call, so that the driver may checkpoint it.
//! * `beside`: managed memory and what the driver keeps for graphs, which a release sends away as far as the driver lets it.
//! * `streamed`: stream-ordered allocation out of the pool. [`engine`]: what the hooks call.
//!   [`world`]: what a process without an engine asks.
//!
//! `core` states the lock order. Unsafe code is in `gate::tls` (the thread's own word), `host` (`mmap`), `fd`
//! (what a forked child closes) and `threads` (signals) alone.

#![deny(unsafe_code)]

mod ahead;
mod allocate;
mod arena;
mod beside;
pub mod config;
mod core;
mod device;
pub mod engine;
pub mod error;
mod events;
mod fd;
mod frameworks;
pub mod gate;
pub mod host;
mod kept;
mod link;
mod pace;
mod pins;
mod pool;
mod quiet;
mod reach;
mod report;
mod residency;
mod share;
mod sleep;
mod steps;
mod streamed;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
pub mod threads;
pub mod vmm;
pub mod world;

pub use config::Config;
pub use ebb_alloc::front::FrontClass;
pub use engine::{Allocation, Engine, ExternalKind, MemInfo};
pub use error::{AllocError, FreeError, TouchError};
pub use fd::widen_descriptor_table;
pub use frameworks::{FrameworkStats, Order};
pub use gate::{CallGate, DeviceSet, Gate, Knock};
pub use pins::{PinError, PinId, PinReason};
pub use share::{Opening, Piece, ShareError, ShareHandle};
pub use sleep::WakesItself;
pub use streamed::{
    Fence, FenceState, Fences, PoolError, PoolFacts, PoolFigures, StreamKey, Waited, WhichPool,
};
