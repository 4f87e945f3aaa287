//! The daemon: who has how much of which card, and the host memory for what is off the cards.
//!
//! ```text
//!   programs ── layer.sock ──┐                      ┌── NVML            (a worker: may block)
//!   ebb ps … ── ctl.sock ────┤   state driver       ├── arena segments  (workers: zeroing, faulting in)
//!   pidfds ── deaths ────────┼──  one thread, ──────┼── event log       (a worker: the disk)
//!   timers, signals ─────────┘    owns everything   └── tasks.json      (a worker: the disk)
//!                                      │
//!                                   Arbiter (crates/policy): events in, actions out
//! ```
//! [`Daemon`] is used by `ebb daemon`; [`Config`] is its file. [`replay()`] feeds an event log to a fresh arbiter.

#![deny(unsafe_code)]

mod arena;
mod budget;
pub mod checkpoint;
mod config;
mod daemon;
mod disk;
mod driver;
mod equal;
mod eventlog;
mod group;
#[allow(unsafe_code, reason = "calls into a foreign library")]
mod nvml;
mod place;
mod process;
mod replay;
pub mod rules;
mod say;
mod signals;
mod statefile;
mod suspect;
#[allow(unsafe_code, reason = "the corner of system calls that rustix does not wrap")]
mod sys;
#[cfg(feature = "test-util")]
pub mod test_util;
mod worker;

pub use budget::{CgroupMemory, HostMemory};
pub use config::{
    ArenaConfig, Config, ConfigError, EventLogConfig, Scope, Surroundings, parse_duration, read_settings,
};
pub use daemon::{Daemon, Handle, StartError};
pub use disk::{DiskContent, DiskPlan, DiskRates, PackedRates, measure_disk};
pub use ebb_disk::Packing;
pub use eventlog::{PolicyRecord, Record};
pub use group::Group;
pub use place::PlaceError;
pub use replay::{Divergence, Missing, ReplayError, Report, replay};
pub use say::{Level, set_level};
pub use signals::{Signals, Told};
