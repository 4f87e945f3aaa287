//! The simulated GPU: a `libcuda.so.1` that real processes load.
//!
//! Not a mock. Processes share a machine whose capacity is a ledger in shared memory (`ebb-simdev`); physical memory is pages of
//! memory files, mapped at reserved addresses with real protection; streams are queues that threads work off later; kernels are a
//! small built-in set, found by name in PTX text that the real driver accepts too. How it is configured: `ebb_simdev::Config`;
//! how calls are made to fail: module `faults`.
//!
//! # How it is put together
//!
//! `export` makes one exported C function for every function of the driver's interface, from the list in `ebb-abi`. Each
//! passes `entry::enter` (initialised? told to fail? stopped by a checkpoint?) and a panic barrier, and ends in the function of
//! the same name in `routes`: what the simulation implements is listed there, everything else answers NOT_SUPPORTED.
//!
//! Lock order, first to last: a context's stream list, a stream's queue, the capture registry, the memory tables, a heap, the ledger.
//! Nothing waits for a stream while it holds any of them.

#![allow(
    non_snake_case,
    reason = "functions of the interface carry the driver's names"
)]
#![allow(
    clippy::too_many_arguments,
    reason = "the driver's functions have the parameters that they have"
)]

mod caller;
mod capture;
mod checkpoint;
mod conditional;
mod context;
mod copy;
mod copy_array;
mod device;
mod entry;
mod event;
mod export;
mod external;
mod faults;
mod fingerprint;
mod graph;
mod graph_edges;
mod graph_memory;
mod graph_nodes;
mod graph_update;
mod green;
mod handles;
mod ipc;
mod kernels;
mod launch;
mod memory;
mod misc;
mod module;
mod multicast;
mod pool;
mod proc_address;
mod process;
mod routes;
mod stream;
mod texture;
mod user_object;
mod work;

/// What a function of the interface comes to.
pub(crate) type R = Result<(), ebb_abi::CUresult>;
