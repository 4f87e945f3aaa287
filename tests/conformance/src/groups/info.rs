//! What a program is told about memory as a whole: free and total bytes, the device's size, NVML.

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;

fn info(cu: Driver) -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    must("cuMemGetInfo", cu.cuMemGetInfo_v2(&mut free, &mut total));
    (free, total)
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "info.free_is_below_total",
        "Something is free, and less than the card has",
        |t, cu| {
            let (free, total) = info(cu);
            t.see("free", free > 0 && free <= total);
        },
    )
    .fact(&["free: true"]),
    Behaviour::new(
        "info.total_is_the_devices_size",
        "cuMemGetInfo and cuDeviceTotalMem tell one total",
        |t, cu| {
            let (_, total) = info(cu);
            let mut size = 0;
            t.code("total", cu.cuDeviceTotalMem_v2(&mut size, CUdevice(0)));
            t.see("equal", size == total);
        },
    )
    .fact(&["total: SUCCESS", "equal: true"]),
    Behaviour::new(
        "info.free_falls_by_what_is_taken",
        "An allocation of 64 MiB takes about that from what is free",
        |t, cu| {
            let (before, _) = info(cu);
            let address = cu.alloc(64 * MIB);
            let (during, _) = info(cu);
            cu.free(address);
            let (after, _) = info(cu);
            t.see("taken MiB", before.saturating_sub(during) / MIB);
            t.see("given back", after == before);
        },
    )
    .alone()
    .fact(&["taken MiB: 64", "given back: true"]),
    Behaviour::new(
        "info.free_is_exact_to_a_granule",
        "Allocations count in whole granules of 2 MiB",
        |t, cu| {
            let (before, _) = info(cu);
            let address = cu.alloc(GRANULE + 1);
            let (during, _) = info(cu);
            t.see("taken", before.saturating_sub(during));
            cu.free(address);
        },
    )
    .alone(),
    Behaviour::new(
        "info.vmm_handle_takes_memory",
        "Physical memory counts from its creation to its release",
        |t, cu| {
            let (before, _) = info(cu);
            let handle = cu.create(32 * MIB);
            let (during, _) = info(cu);
            must("cuMemRelease", cu.cuMemRelease(handle));
            let (after, _) = info(cu);
            t.see("taken MiB", before.saturating_sub(during) / MIB);
            t.see("given back", after == before);
        },
    )
    .alone()
    .fact(&["taken MiB: 32", "given back: true"]),
    Behaviour::new(
        "info.reserved_addresses_take_none",
        "Addresses without memory cost nothing",
        |t, cu| {
            let (before, _) = info(cu);
            let address = cu.reserve(1 << 30);
            let (during, _) = info(cu);
            t.see("taken", before.saturating_sub(during));
            t.code("free", cu.cuMemAddressFree(address, 1 << 30));
        },
    )
    .alone()
    .fact(&["taken: 0", "free: SUCCESS"]),
    Behaviour::new("info.null_places", "Places that are not given", |t, cu| {
        let (mut free, mut total) = (0, 0);
        t.code("no free", cu.cuMemGetInfo_v2(std::ptr::null_mut(), &mut total));
        t.code("no total", cu.cuMemGetInfo_v2(&mut free, std::ptr::null_mut()));
        t.code(
            "no total of the device",
            cu.cuDeviceTotalMem_v2(std::ptr::null_mut(), CUdevice(0)),
        );
    }),
    Behaviour::new(
        "info.needs_a_context",
        "Without a current context there is no answer",
        |t, cu| {
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(CUcontext::NULL));
            let (mut free, mut total) = (0, 0);
            t.code("info", cu.cuMemGetInfo_v2(&mut free, &mut total));
            t.code(
                "total needs none",
                cu.cuDeviceTotalMem_v2(&mut total, CUdevice(0)),
            );
        },
    )
    .fact(&["info: INVALID_CONTEXT", "total needs none: SUCCESS"]),
    Behaviour::new("info.needs_init", "Before cuInit there is no answer", |t, cu| {
        let (mut free, mut total) = (0, 0);
        t.code("info", cu.cuMemGetInfo_v2(&mut free, &mut total));
        t.code("total", cu.cuDeviceTotalMem_v2(&mut total, CUdevice(0)));
    })
    .raw()
    .fact(&["info: NOT_INITIALIZED", "total: NOT_INITIALIZED"]),
    Behaviour::new(
        "info.total_of_no_device",
        "A device that does not exist has no size",
        |t, cu| {
            let mut total = 0;
            t.code("99", cu.cuDeviceTotalMem_v2(&mut total, CUdevice(99)));
            t.code("-1", cu.cuDeviceTotalMem_v2(&mut total, CUdevice(-1)));
        },
    )
    .fact(&["99: INVALID_DEVICE", "-1: INVALID_DEVICE"]),
    Behaviour::new(
        "info.total_does_not_change",
        "The total stays while memory is taken and freed",
        |t, cu| {
            let (_, first) = info(cu);
            let a = cu.alloc(32 * MIB);
            let (_, second) = info(cu);
            cu.free(a);
            let (_, third) = info(cu);
            t.see("equal", first == second && second == third);
        },
    )
    .fact(&["equal: true"]),
];
