//! The arbiter: who may have how many bytes of which GPU, and when.
//!
//! A pure state machine: [`Event`] and [`Time`] in, [`Action`]s out. It does no I/O, reads no clock, starts no thread
//! and draws no random number, so that a log of events replays to the same actions, bit for bit. Its driver hands it
//! every event, carries the actions out, and sends [`Event::Tick`] when [`Arbiter::next_deadline`] has come.
//!
//! It owns the *ledger*: every client's lease, as granted, given back or reclaimed. What it wants from a client is an
//! order, and lease only comes down when the client says that it did come down (or dies).
//!
//! # The rules
//! * **Whence bytes come**: free room; unused lease of anyone (no copy); clients that do not use the GPU, lower
//!   priorities first, of one priority what is clean (no copy), then the longest idle; clients that wait themselves and stand behind; last, running clients whose turn
//!   is over. Only as many as needed. Overhead that is *loose* (managed memory) is taken like lease; last, the asker's own.
//! * **Request**: an ask with which a task stays within its request goes before all others and takes from bursts at
//!   once. While a task uses the GPU or waits to, nothing takes it below its request. When it idles, its bytes are lent
//!   out, unless its `idle_release` is off. A task above its request runs on what others leave: if they claim what they
//!   requested, it waits.
//! * **Limit**: lease and overhead of all clients of a task on a device, checked before every grant. Evicted bytes count
//!   for new allocations. A limit can be lowered below what is live only by force; clients are then evicted down to it,
//!   and their restores wait (and are denied now and then, saying so) until it fits.
//! * **Turns**: clients that do not fit together alternate by weighted virtual time: that of a task grows by the resource
//!   of which it uses the largest part (GPU time, memory while it runs, the link), less for a higher priority (4, 2, 1) and
//!   for a tenant that weighs more or has fewer tasks. A turn lasts twenty times the copying that ends it, and that it was
//!   bought with. A higher priority may end a lower one's turn early, as long as earlier copying is paid off; with
//!   `preempt` it always does, after a warning. A task has one place for all its devices, and its ranks leave and come back together. Whoever waited for `patience` while it is owed the card is not overtaken by
//!   newcomers; whoever waited for `starve_after` goes first.
//! * **Gathering**: bytes are taken for one client a device at a time, and only if all it needs can be had; its restore
//!   is granted piece by piece as room comes free.
//! * **Waiting**: an allocation that can never fit is denied for good at once. One that may fit waits: `alloc_wait` if
//!   its program can answer an early out-of-memory by flushing caches, unless it is being served; else `alloc_wait_max`.
//!   Restores wait without end.
//! * **Owed**: a restore that is granted, and every one that a resume lets begin, is let arrive and followed by a short turn
//!   before the client is taken from or paused again. What one pause took from a task comes back together.
//! * **Marks**: with `low_mark`, idle memory stays where it is until little is free, and then goes in one batch.
//! * **Foresight**: with `predict`, a program with a rhythm finds its memory back just before its next use, if there is room or others idle
//!   for longer; a guess takes nothing from anybody who uses the GPU or waits.
//! * **Lodging**: what a card has to spare is lent to what other cards evict, while nobody there waits and above a margin; whoever is
//!   on that card and needs it comes first, before a byte is taken from any client there.
//! * **Stalled**: who is refused because its work waits for its own allocation is served from the others, whoever stands before
//!   it and needs what it has.
//! * **Deadlock**: if all who hold what cannot be moved wait for more, the youngest of the lowest priority is refused.
//! * **Refusals**: a client whose work does not end, or whose copies fail, is left alone for longer each time; others
//!   are tried.
//! * **The books**: if overhead or unmanaged memory grow past the capacity, unused lease and idle clients make up for it.
//!   Running clients are left alone, and nothing is granted until the sum is right.

#![forbid(unsafe_code)]

mod action;
mod admission;
mod arbiter;
mod book;
mod check;
mod config;
mod deadline;
mod event;
pub mod fair;
mod foresee;
mod gang;
mod lodging;
mod marks;
mod owed;
pub mod predict;
mod rank;
mod schedule;
mod stall;
mod state;
mod table;
mod time;
mod victims;
mod view;
mod waiting;

/// Counts changes of the rules: a log of events replays to the same actions under the same number only.
pub const RULES: u32 = 10;

pub use action::{Action, DenyReason, Depth, Grounds, Note, ReclaimReason, Refusal};
pub use arbiter::Arbiter;
pub use config::PolicyConfig;
pub use event::{AskId, AskKind, Event, Outcome, TaskSpec, Tenant, Usage};
pub use time::Time;
pub use view::{Charged, ClientState, ClientView, DeviceView, TaskView, View};
pub use waiting::{Stuck, Wait};
