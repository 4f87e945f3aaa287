//! Other cards on which a device can have memory: those that it reaches over NVLink.
//!
//! Memory is made on a device by saying so in its properties, and used by another one after `cuMemSetAccess`; neither needs a
//! context on the first. That a link is NVLink is told by native atomics: over PCIe there are none, and going through the
//! host's bridge would be no faster than going to its memory.

use ebb_abi::*;
use ebb_device::Props;
use ebb_units::DeviceUuid;

use crate::device::{location, props_of};
use crate::{DeviceFacts, DriverTable};

/// The other devices of this process that `device` reaches so, and what memory on them is made with.
pub(crate) fn of(table: &DriverTable, device: CUdevice) -> Vec<(DeviceUuid, Props)> {
    let mut count = 0;
    // SAFETY: a valid place for the answer.
    if !unsafe { table.cuDeviceGetCount(&raw mut count) }.is_success() {
        return Vec::new();
    }
    (0..count)
        .map(CUdevice)
        .filter(|peer| *peer != device && is_linked(table, device, *peer))
        .filter_map(|peer| {
            let facts = DeviceFacts::read(table, peer).ok().filter(|facts| facts.vmm)?;
            let prop = CUmemAllocationProp {
                type_: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: location(peer),
                ..CUmemAllocationProp::default()
            };
            Some((facts.uuid, props_of(&prop)))
        })
        .collect()
}

fn is_linked(table: &DriverTable, device: CUdevice, peer: CUdevice) -> bool {
    let (mut can, mut atomics) = (0, 0);
    // SAFETY: a valid place for the answer.
    let can_said = unsafe { table.cuDeviceCanAccessPeer(&raw mut can, device, peer) };
    // SAFETY: as above.
    let atomics_said = unsafe {
        table.cuDeviceGetP2PAttribute(
            &raw mut atomics,
            CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            device,
            peer,
        )
    };
    can_said.is_success() && atomics_said.is_success() && can != 0 && atomics != 0
}
