//! The driver's checkpoint of this very process, for the one case that nobody else is there to undo it: its daemon is gone.

use std::time::{Duration, Instant};

use ebb_abi::{
    CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, CUprocessState,
    CUresult,
};
use ebb_layer_core::WakesItself;

use crate::symbols::raw;

/// How long a change of state that somebody else began may take.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(50);

/// Brings this process back.
#[derive(Debug)]
pub(crate) struct OwnCheckpoint;

fn failed(call: &str, code: CUresult) -> String {
    format!("{call} answered {}", code.0)
}

impl WakesItself for OwnCheckpoint {
    fn wake_itself(&self) -> Result<(), String> {
        let pid = i32::try_from(std::process::id()).map_err(|error| error.to_string())?;
        let began = Instant::now();
        loop {
            let mut state = CUprocessState(0);
            // SAFETY: a valid place for the answer.
            let asked = unsafe { raw::cuCheckpointProcessGetState(pid, &raw mut state) };
            if !asked.is_success() {
                return Err(failed("cuCheckpointProcessGetState", asked));
            }
            // The calls that only a checkpointed process needs; no arguments: as it was.
            let (call, result) = match state {
                CU_PROCESS_STATE_RUNNING => return Ok(()),
                CU_PROCESS_STATE_CHECKPOINTED => ("cuCheckpointProcessRestore", {
                    // SAFETY: no arguments to be read.
                    unsafe { raw::cuCheckpointProcessRestore(pid, core::ptr::null_mut()) }
                }),
                CU_PROCESS_STATE_LOCKED => ("cuCheckpointProcessUnlock", {
                    // SAFETY: as above.
                    unsafe { raw::cuCheckpointProcessUnlock(pid, core::ptr::null_mut()) }
                }),
                // Somebody's call is under way, or it failed for good.
                other if began.elapsed() > PATIENCE => return Err(format!("it stays in state {}", other.0)),
                _ => {
                    std::thread::sleep(LOOK);
                    continue;
                }
            };
            if !result.is_success() {
                return Err(failed(call, result));
            }
        }
    }
}
