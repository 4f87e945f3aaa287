//! Small blocks that keep granules apart are brought together, at the same addresses: what the device's owner thread does of it. When it
//! does it is `residency::mesh`'s to say.

use ebb_alloc::front::AllocateError;
use ebb_device::DeviceError;

use super::One;
use super::tables::AsOwner;
use crate::core::Core;
use crate::device::Device;
use crate::error::AllocError;

/// Bytes between blocks in a device's pool, at most what can be gained.
pub(crate) fn scattered(core: &Core, device: usize) -> u64 {
    core.frameworks.get(device).map_or(0, |one| one.front.scattered())
}

/// A figure that changes with every block of a device's pool that comes or goes; `None` if there is no pool.
pub(crate) fn changes(core: &Core, device: usize) -> Option<u64> {
    Some(core.frameworks.get(device)?.front.changes())
}

/// Whether there is anything to bring together, as far as that can be seen while the program goes on.
pub(crate) fn would_mesh(core: &Core, device: usize) -> bool {
    let Some(one) = core.frameworks.get(device) else {
        return false;
    };
    let Some(engine) = one.front.driver().engine() else {
        return false;
    };
    let movable = one.front.driver().movable(&engine);
    !one.front.meshable(|chunk| movable.contains(&chunk)).is_empty()
}

/// Brings blocks together as long as `go_on`. A device's gate is closed and nothing runs on it. How many bytes went; afterwards the gate must not
/// be opened while [`torn`](crate::device::State::torn).
pub(crate) fn mesh_as_owner(core: &Core, device: &Device, mut go_on: impl FnMut() -> bool) -> u64 {
    let Some(one) = core.frameworks.get(device.index) else {
        return 0;
    };
    let Some(engine) = one.front.driver().engine() else {
        return 0;
    };
    one.streams().all_past();
    // What threads keep for later is nobody's block.
    one.front.flush(0);
    one.front.ask();
    let before = one.front.stats().pool.released_total;
    let movable = one.front.driver().movable(&engine);
    let pairs = one.front.meshable(|chunk| movable.contains(&chunk));
    {
        let _owner = AsOwner::moving();
        for pair in pairs {
            if !go_on() {
                break;
            }
            if let Err(error) = one.front.mesh(pair) {
                core.events.note(format!(
                    "device {}: bringing blocks together: {}",
                    device.index,
                    told(&error)
                ));
                break;
            }
        }
    }
    let torn = one.front.torn() && mend_one(&one).is_err();
    device.lock().torn = torn;
    settle(&one);
    one.front.stats().pool.released_total - before
}

/// Puts right what failing calls have torn, on the device's owner thread, before the gate opens.
///
/// # Errors
/// The driver's: try again.
pub(crate) fn mend(core: &Core, device: usize) -> Result<(), DeviceError> {
    let Some(one) = core.frameworks.get(device) else {
        return Ok(());
    };
    let result = mend_one(&one);
    settle(&one);
    result.map_err(|error| match error {
        AllocateError::Driver(AllocError::Device(error)) => error,
        _ => DeviceError::OutOfMemory,
    })
}

fn mend_one(one: &One) -> Result<(), AllocateError<AllocError>> {
    let _owner = AsOwner::moving();
    one.front.mend()
}

fn settle(one: &One) {
    if !one.front.torn() {
        one.front.driver().settled();
    }
}

fn told(error: &AllocateError<AllocError>) -> String {
    match error {
        AllocateError::Driver(error) => error.to_string(),
        AllocateError::NoRoom(_) => error.to_string(),
    }
}
