//! The simulated machine: what all processes that load the simulated driver share.
//!
//! A state folder holds one file, `machine`, which every process maps: the devices with their capacity, one *slot* for
//! each process with the bytes it holds, one entry for each *object* (memory that may outlive its creator because it was
//! exported), and the time until which each direction of each device's link is taken.
//!
//! # Note \[Exact after kill -9\]
//!
//! There is no total anywhere. A device's used bytes are the sum over live slots plus the sum over live objects,
//! computed under the file's lock; charging is one store into the own slot. So a process may die at any instruction:
//! either its store happened, and then its slot is dead with it, or it did not. What is alive is the kernel's word, not ours:
//!
//! * the ledger's lock and a slot's life are *open file description* locks on bytes of the file, which the kernel drops when
//!   the process is gone (a zombie has closed its files, so it counts as dead; process ids are never trusted);
//! * an object is a file that every holder, and every exported descriptor in flight, keeps locked in shared mode.
//!
//! A forked child would inherit the descriptions and keep the dead alive, so the driver closes them in the child.

mod config;
mod event;
mod file;
mod identity;
mod link;
mod machine;
mod object;
mod request;
mod visible;

pub use config::{Config, ConfigError};
pub use event::EventCell;
pub use file::{HOST_DEVICE, MAX_DEVICES, MAX_EVENTS, MAX_SLOTS};
pub use identity::{card_uuid, device_name, device_uuid, slice_text, uuid_text};
pub use link::{Direction, now_ns};
pub use machine::{AttachError, Machine, ProcessUse, Slot, Usage};
pub use object::Object;
pub use request::Request;
pub use visible::{visible_devices, visible_slice};
