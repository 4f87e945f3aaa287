//! The arbiter: who may have how many bytes of which GPU, and when.
//!
//! A pure state machine: [`Event`] and [`Time`] in, [`Action`]s out. It does no I/O, reads no clock, starts no thread
//! and draws no random number, so that a log of events replays to the same actions, bit for bit.
//!
//! It owns the *ledger*: every client's lease, as granted, given back or reclaimed. What it wants from a client is an
//! order, and lease only comes down when the client says that it did come down (or dies).

#![forbid(unsafe_code)]

mod action;
mod admission;
mod arbiter;
mod check;
mod config;
mod deadline;
mod event;
mod ledger;
mod rank;
mod schedule;
mod state;
mod time;
mod victims;
mod view;

pub use action::{Action, DenyReason, Depth, Note, ReclaimReason, Refusal};
pub use arbiter::Arbiter;
pub use config::PolicyConfig;
pub use event::{AskId, AskKind, Event, Outcome, TaskSpec, Usage};
pub use time::Time;
pub use view::{Charged, ClientState, ClientView, DeviceView, TaskView, View};
