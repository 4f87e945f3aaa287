//! Memory of the program that is bound to a multicast object: it stays where it is until it is unbound.
//!
//! A bind may block until every process of the team has added its devices. So the memory is pinned first, inside the gate,
//! and the call is made outside it, with nothing held: whoever waits for another rank keeps nobody waiting here.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_layer_core::vmm::{self, Use};
use ebb_layer_core::{PinId, PinReason};

use crate::barrier::{self, Passage};
use crate::bridge::Running;
use crate::hooks::vmm::no_such_handle;
use crate::hooks::with;
use crate::symbols::real;

/// Where something is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    object: u64,
    /// The engine's number of the memory's device.
    device: usize,
    offset: usize,
    size: usize,
}

/// What is bound, and the pins that this has set. Taken last, and nothing is called under it.
static BOUND: Mutex<Vec<(Place, Vec<PinId>)>> = Mutex::new(Vec::new());

fn bound() -> MutexGuard<'static, Vec<(Place, Vec<PinId>)>> {
    BOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that is going to be bound.
struct Ready {
    device: usize,
    pins: Vec<PinId>,
    used: Option<Use>,
}

/// Pins inside the gate. `Err`: the memory cannot be brought back. `Ok(None)`: it is none of ours.
fn ready(pick: impl FnOnce(&'static Running) -> Option<Ready>) -> Result<Option<Ready>, CUresult> {
    let passage = barrier::enter();
    if let Passage::Refused(code) = passage {
        return Err(code);
    }
    let ready = with(pick);
    barrier::leave(passage);
    Ok(ready)
}

/// After the bind: its pins last as long as it does.
fn settle(result: CUresult, ready: Ready, object: CUmemGenericAllocationHandle, offset: usize, size: usize) {
    with(|running| {
        if result.is_success() {
            let place = Place {
                object: object.0,
                device: ready.device,
                offset,
                size,
            };
            bound().push((place, ready.pins));
        } else {
            for pin in ready.pins {
                running.engine.unpin(pin);
            }
        }
        if let Some(used) = &ready.used {
            running.engine.vmm_end_use(used, None);
        }
        Some(())
    });
}

/// Binds by handle; a handle of the driver's goes straight through.
fn by_handle(
    object: CUmemGenericAllocationHandle,
    offset: usize,
    size: usize,
    memory: CUmemGenericAllocationHandle,
    call: impl FnOnce(CUmemGenericAllocationHandle) -> CUresult,
) -> CUresult {
    if !vmm::is_ours(memory.0) {
        return call(memory);
    }
    let found = ready(|running| {
        let used = running.engine.vmm_begin_use(memory.0)?;
        Some(Ready {
            device: used.device,
            pins: running.engine.vmm_pin_use(&used, PinReason::Multicast),
            used: Some(used),
        })
    });
    match found {
        Ok(Some(ready)) => {
            let driver = ready.used.as_ref().map_or(0, |used| used.real);
            let result = call(CUmemGenericAllocationHandle(driver));
            settle(result, ready, object, offset, size);
            result
        }
        Ok(None) => no_such_handle(),
        Err(code) => code,
    }
}

/// Binds by address; anything that is not mapped memory of the program goes straight through.
pub(crate) fn by_address(
    object: CUmemGenericAllocationHandle,
    offset: usize,
    ptr: CUdeviceptr,
    size: usize,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let ours = with(|running| running.engine.vmm_overlaps(ptr.0, size as u64).then_some(()));
    if ours.is_none() {
        return call();
    }
    let found = ready(|running| {
        Some(Ready {
            device: running.engine.vmm_device_at(ptr.0)?,
            pins: running
                .engine
                .vmm_pin_range(ptr.0, size as u64, PinReason::Multicast),
            used: None,
        })
    });
    match found {
        Ok(Some(ready)) => {
            let result = call();
            settle(result, ready, object, offset, size);
            result
        }
        Ok(None) => call(),
        Err(code) => code,
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastBindMem(
    mcHandle: CUmemGenericAllocationHandle,
    mcOffset: usize,
    memHandle: CUmemGenericAllocationHandle,
    memOffset: usize,
    size: usize,
    flags: u64,
) -> CUresult {
    // SAFETY: the program's own call, with the driver's handle in the place of ours.
    by_handle(mcHandle, mcOffset, size, memHandle, |memory| unsafe {
        real::cuMulticastBindMem(mcHandle, mcOffset, memory, memOffset, size, flags)
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastBindMem_v2(
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    memHandle: CUmemGenericAllocationHandle,
    memOffset: usize,
    size: usize,
    flags: u64,
) -> CUresult {
    // SAFETY: as above.
    by_handle(mcHandle, mcOffset, size, memHandle, |memory| unsafe {
        real::cuMulticastBindMem_v2(mcHandle, dev, mcOffset, memory, memOffset, size, flags)
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastUnbind(
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    size: usize,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMulticastUnbind(mcHandle, dev, mcOffset, size) };
    if result.is_success() {
        with(|running| {
            let place = Place {
                object: mcHandle.0,
                device: running.index_of(dev)?,
                offset: mcOffset,
                size,
            };
            let pins = {
                let mut bound = bound();
                let at = bound.iter().position(|(known, _)| *known == place)?;
                bound.swap_remove(at).1
            };
            for pin in pins {
                running.engine.unpin(pin);
            }
            Some(())
        });
    }
    result
}
