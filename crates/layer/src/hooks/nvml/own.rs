//! What this process has on a card, by the driver's own account: how the layer sees what contexts and the like take.
//!
//! The daemon is asked, which has NVML running. Without one that sees processes NVML starts here, which takes 10 to 40 ms; not before there is
//! a context, because a program that only looks for cards, and forks then, must not leave a child with half an NVML; and never on a thread
//! of its own, which the program's end could overtake.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_abi::nvml::*;
use ebb_units::{Bytes, DeviceUuid};

use super::{real, world};
use ebb_layer_core::world::Seen;

/// How long one waits for the other thread. It may itself wait for the loader's lock, which the waiting thread may hold.
const PATIENCE: Duration = Duration::from_secs(1);

/// Something that is done once, by whoever comes first.
#[derive(Debug)]
struct Once {
    step: Mutex<Step>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Going,
    Done(bool),
}

impl Once {
    const fn new() -> Self {
        Self {
            step: Mutex::new(Step::Nothing),
            changed: Condvar::new(),
        }
    }

    /// Whether the caller is the one who has to do it, and to say so to [`Self::done`].
    fn claim(&self) -> bool {
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        let free = *step == Step::Nothing;
        if free {
            *step = Step::Going;
        }
        free
    }

    fn done(&self, well: bool) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = Step::Done(well);
        self.changed.notify_all();
    }

    /// Whether it went well; false also if nobody began, or if it is still going on when the patience ends.
    fn went_well(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match *step {
                Step::Done(well) => return well,
                Step::Nothing => return false,
                Step::Going if left.is_zero() => return false,
                Step::Going => {
                    step = self
                        .changed
                        .wait_timeout(step, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            }
        }
    }
}

static START: Once = Once::new();

/// Loads the library, as the program itself would find it. Never closed.
fn load() -> bool {
    // SAFETY: a name that ends with a zero byte.
    let handle = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    !handle.is_null()
}

fn init() -> bool {
    // SAFETY: no arguments.
    unsafe { real::nvmlInit_v2() }.is_success()
}

/// Whether a context of this process is being made for the first time.
pub(crate) fn is_first() -> bool {
    static FIRST: AtomicBool = AtomicBool::new(true);
    FIRST.swap(false, Ordering::AcqRel)
}

/// What this process has on a card, by the driver's own account. `None` where that cannot be known, as in a container
/// that does not see its processes' numbers, and where it has no context yet.
pub(crate) fn process_bytes(uuid: DeviceUuid) -> Option<Bytes> {
    match world::held_here(uuid) {
        Seen::Bytes(bytes) => return Some(bytes),
        // What it has is found by the daemon itself within the second or so.
        Seen::Silent => return None,
        Seen::Unseen => {}
    }
    if START.claim() {
        START.done(load() && init());
    }
    if !START.went_well(PATIENCE) {
        return None;
    }
    let device = handle_of(uuid)?;
    let pid = std::process::id();
    processes(device)?
        .iter()
        .find(|process| process.pid == pid)
        .and_then(|process| {
            let bytes = process.usedGpuMemory;
            (bytes != NVML_VALUE_NOT_AVAILABLE).then_some(Bytes(bytes))
        })
}

/// The handle of a card, or of the slice of a card (MIG) that has this identity.
fn handle_of(uuid: DeviceUuid) -> Option<nvmlDevice_t> {
    let card = uuid.to_string();
    let slice = card.replacen("GPU-", "MIG-", 1);
    [card, slice].into_iter().find_map(|text| {
        let text = std::ffi::CString::new(text).ok()?;
        let mut device = nvmlDevice_t(0);
        // SAFETY: a string with its terminator, and a place for the answer.
        unsafe { real::nvmlDeviceGetHandleByUUID(text.as_ptr(), &raw mut device) }
            .is_success()
            .then_some(device)
    })
}

fn processes(device: nvmlDevice_t) -> Option<Vec<nvmlProcessInfo_v3_t>> {
    let mut infos = vec![nvmlProcessInfo_v3_t::default(); 64];
    // Processes may come between two calls: a few tries.
    for _ in 0..4 {
        let mut count = u32::try_from(infos.len()).ok()?;
        // SAFETY: a place for as many entries as `count` says; both versions have the same entries.
        let result = unsafe {
            match real::nvmlDeviceGetComputeRunningProcesses_v3(device, &raw mut count, infos.as_mut_ptr()) {
                NVML_ERROR_FUNCTION_NOT_FOUND => {
                    real::nvmlDeviceGetComputeRunningProcesses_v2(device, &raw mut count, infos.as_mut_ptr())
                }
                other => other,
            }
        };
        match result {
            NVML_SUCCESS => {
                infos.truncate(count as usize);
                return Some(infos);
            }
            NVML_ERROR_INSUFFICIENT_SIZE => {
                infos.resize(count as usize * 2 + 16, nvmlProcessInfo_v3_t::default())
            }
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_does_it_and_the_others_hear_how_it_went() {
        let once = Once::new();
        assert!(
            !once.went_well(PATIENCE),
            "nobody began, and nobody is waited for"
        );
        assert!(once.claim() && !once.claim());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| once.went_well(Duration::from_secs(600)));
            once.done(true);
            assert!(waiting.join().unwrap());
        });
        assert!(!once.claim(), "never again");
    }

    #[test]
    fn what_hangs_is_not_waited_for_for_ever() {
        let once = Once::new();
        assert!(once.claim());
        assert!(!once.went_well(Duration::from_millis(1)));
    }
}
