//! The lab: what the arbiter and the pool are worth, on recorded traces, in simulated time.
//!
//! It drives the same `ebb-policy` and `ebb-alloc` that the daemon and the library use. Nothing here reads a clock: time is
//! what the trace says, and a seed decides all that is random, so that a run can be repeated to the bit.

#![forbid(unsafe_code)]

pub mod chart;
pub mod cluster;
#[cfg(test)]
mod data;
pub mod drf;
pub mod file;
pub mod finish;
pub mod keep;
pub mod mixed;
pub mod picture;
mod place;
pub mod pool;
pub mod read;
pub mod serving;
pub mod sim;
pub mod stats;
pub mod traces;
