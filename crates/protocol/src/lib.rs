//! Messages between layer, daemon and command line.
//!
//! Two conversations, on two sockets in one folder:
//!
//! * `layer.sock`, `SOCK_SEQPACKET`: the preloaded library and the daemon. One [`wire`] message a packet, fixed
//!   little-endian layout, file descriptors beside some of them ([`socket`]).
//! * `ctl.sock`, `SOCK_STREAM`: the command line (and plugins) and the daemon, one JSON object a line (`control`,
//!   behind the feature of that name, so that the library does not carry a JSON reader into its host).
//!
//! # Compatibility
//! Compatible changes: a new message kind (receivers skip kinds they do not know), and a new field at the *end* of a
//! message that older receivers may do without (they ignore what follows the fields they know). Everything else raises
//! [`wire::VERSION`], and [`wire::MIN_VERSION`] says how old a peer may be.

#![forbid(unsafe_code)]

#[cfg(feature = "control")]
pub mod control;
pub mod paths;
pub mod socket;
pub mod wire;

pub use wire::{ToDaemon, ToLayer};
