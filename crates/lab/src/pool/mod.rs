//! Allocators, replayed on recorded traces: how much physical memory each needs for what the program asked.
//!
//! [`event`] is what a trace says, [`policy`] what an allocator has to offer to be replayed, [`run`] the replay itself, which checks
//! every answer. The allocators that ours is compared with are a module each, and [`kind`] knows all of them by name.

pub mod buddy;
pub mod event;
pub mod fit;
pub mod gmlake;
pub mod kind;
pub mod mix;
pub mod ours;
pub mod policy;
pub mod run;
pub mod timeline;
pub mod torch;

#[cfg(test)]
mod model;
