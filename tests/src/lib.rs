//! A stage for tests with real processes: a simulated card, a daemon, and programs under the preloaded library.
//!
//! Everything lives in one temporary folder and dies with the [`Stage`]: the daemon and every program are killed by pid
//! when their value drops. Conditions are awaited with a bound ([`eventually`]), nothing sleeps for a fixed time.

mod artefacts;
mod cuda;
mod look;
mod program;
mod stage;
mod steps;

pub use artefacts::Artefacts;
pub use cuda::{Attribute, Cuda, CudaError, IpcHandle, KERNELS};
pub use look::Look;
pub use program::{Program, Reply};
pub use stage::{Options, Stage, ledger_of};
pub use steps::{Counts, Effect, Step, Trace, children, go_on, is_stopped, steps_between};

use std::time::{Duration, Instant};

/// How long a condition may take on a busy two-core machine before a test gives up. A hang guard, not a measurement.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` gives a value.
///
/// # Panics
/// After [`PATIENCE`], with `what` and the last state that `condition` reported.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match condition() {
            Ok(value) => return value,
            Err(state) if began.elapsed() > PATIENCE => {
                panic!("waited in vain until {what}; last seen: {state}")
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// The seed of a random test: `EBB_SEED` if set, else one from the clock. Printed, so that a failure can be repeated.
#[must_use]
pub fn seed() -> u64 {
    let seed = std::env::var("EBB_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.map_or(1, |d| d.as_secs() ^ u64::from(d.subsec_nanos()))
        });
    println!("seed: EBB_SEED={seed}");
    seed
}
