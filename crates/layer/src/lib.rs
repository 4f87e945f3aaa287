//! `libebb.so`: what stands between a program and the GPU driver.
//!
//! Loaded by `LD_PRELOAD`. This crate holds only what must be in the program's way: exported symbols, the table that
//! routes look-ups to them, and the barrier that keeps our faults from the program. What they do is decided in
//! `ebb-layer-core`. `docs/design/0002-layer.md` says how the parts fit.
//!
//! Three rules hold everywhere here:
//! * The real call stands *between* two barriers of ours ([`barrier`]), never inside one, in an `extern "C-unwind"` function with
//!   nothing to drop: a thread that is cancelled inside the driver unwinds through us as if we were not there.
//! * Nothing is started, locked, allocated or opened when the library is loaded. Most programs that load it never use a GPU.
//! * Nothing is ever written to the program's output.

#![allow(
    non_camel_case_types,
    non_snake_case,
    reason = "hooks have the names of what they replace"
)]

#[cfg(panic = "abort")]
compile_error!(
    "the layer must be built with panic = \"unwind\": a fault of ours must not end the host program"
);

mod alive;
mod barrier;
mod bridge;
mod checkpoint;
mod classes;
mod elf;
mod fences;
mod fork;
mod frameworks;
mod hooks;
mod interop;
mod library;
mod loader;
// Test programs link the machine's own C library.
#[cfg(all(glibc_stubs, not(test)))]
mod old_glibc;
mod peek;
mod report;
mod symbols;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the loader part is written for x86-64 and AArch64");
