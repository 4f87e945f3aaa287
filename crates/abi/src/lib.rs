//! The CUDA driver's and NVML's binary interface, as plain Rust types.
//!
//! Nothing here calls anything. Handles and enumerations are transparent integers, because the driver that we meet may be
//! newer than this list: no value is illegal. The sizes and offsets of all structures are checked when the crate is
//! compiled. Names are the driver's own, so that a reader can look them up in its manual.
//!
//! * [`for_each_driver_function`]: all exported functions with their parameters, as a macro.
//! * [`versions`]: which symbol `cuGetProcAddress` answers, by version.
//! * [`nvml`]: the part of NVML that we read or answer.

#![forbid(unsafe_code)]
#![allow(
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    reason = "the names are the driver's own"
)]

mod attributes;
mod callbacks;
mod constants;
mod enums;
mod functions;
mod handles;
mod macros;
pub mod nvml;
mod result;
mod structs_exec;
mod structs_memory;
mod structs_other;
pub mod versions;

pub use attributes::*;
pub use callbacks::*;
pub use constants::*;
pub use enums::*;
pub use handles::*;
pub use macros::Zero;
pub use result::CUresult;
pub use structs_exec::*;
pub use structs_memory::*;
pub use structs_other::*;

// The types as the function list names them.
pub use core::ffi::{c_char, c_void};
