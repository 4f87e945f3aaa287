//! Starting, stopping, and what is not about one device.

use std::sync::{Mutex, OnceLock, PoisonError};

use ebb_abi::c_char;
use ebb_simdev::Machine;

use crate::{
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND, NVML_ERROR_UNINITIALIZED,
};
use crate::{R, nvmlReturn_t, put, put_text};

/// What the simulated driver calls itself.
pub(crate) const DRIVER_VERSION: &str = "580.0.sim";
/// The CUDA version of that driver.
const CUDA_DRIVER_VERSION: i32 = 13000;

/// How often the library was initialised more than shut down.
static USERS: Mutex<u32> = Mutex::new(0);
static MACHINE: OnceLock<Machine> = OnceLock::new();

fn users() -> std::sync::MutexGuard<'static, u32> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn init() -> R {
    let mut users = users();
    if MACHINE.get().is_none() {
        // The machine stays open when the last user shuts down: others of this process may hold the same file.
        let machine = Machine::open_from_env().map_err(|error| {
            eprintln!("ebb simulated NVML: {error}");
            NVML_ERROR_DRIVER_NOT_LOADED
        })?;
        let _ = MACHINE.set(machine);
    }
    *users += 1;
    Ok(())
}

pub(crate) fn shutdown() -> R {
    let mut users = users();
    *users = users.checked_sub(1).ok_or(NVML_ERROR_UNINITIALIZED)?;
    Ok(())
}

/// The machine, while the library is initialised.
pub(crate) fn machine() -> Result<&'static Machine, nvmlReturn_t> {
    if *users() == 0 {
        return Err(NVML_ERROR_UNINITIALIZED);
    }
    MACHINE.get().ok_or(NVML_ERROR_UNINITIALIZED)
}

/// # Safety
/// As the interface demands.
pub(crate) unsafe fn driver_version(version: *mut c_char, length: u32) -> R {
    machine()?;
    // SAFETY: the caller's promise.
    unsafe { put_text(version, length, DRIVER_VERSION) }
}

/// # Safety
/// As the interface demands.
pub(crate) unsafe fn nvml_version(version: *mut c_char, length: u32) -> R {
    machine()?;
    // SAFETY: the caller's promise.
    unsafe { put_text(version, length, &format!("13.{DRIVER_VERSION}")) }
}

/// # Safety
/// As the interface demands.
pub(crate) unsafe fn cuda_driver_version(version: *mut i32) -> R {
    // SAFETY: the caller's promise.
    unsafe { put(version, CUDA_DRIVER_VERSION) }
}

/// The name of a process, as the first word of its command line.
///
/// # Safety
/// As the interface demands.
pub(crate) unsafe fn process_name(pid: u32, name: *mut c_char, length: u32) -> R {
    machine()?;
    if length == 0 {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NVML_ERROR_NOT_FOUND)?;
    let first =
        String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned();
    // A name that is too long is cut.
    let mut end = first.len().min(length as usize - 1);
    while !first.is_char_boundary(end) {
        end -= 1;
    }
    // SAFETY: the caller's promise.
    unsafe { put_text(name, length, &first[..end]) }
}
