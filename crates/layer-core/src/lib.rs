//! All logic of the preloaded library, testable with no GPU.
#![deny(unsafe_code)]

pub mod config;
pub mod engine;
pub mod error;
pub mod gate;
pub mod host;

pub use config::Config;
pub use engine::{Allocation, Engine, ExternalKind, MemInfo};
pub use error::{AllocError, FreeError, TouchError};
pub use gate::Gate;
