//! Managed memory: one address for the processor and all devices.

use ebb_abi::*;

use crate::behaviour::{Behaviour, Need};
use crate::driver::Driver;
use crate::helpers::*;

#[track_caller]
fn managed(cu: Driver, bytes: usize) -> CUdeviceptr {
    let mut address = CUdeviceptr::NULL;
    must(
        "cuMemAllocManaged",
        cu.cuMemAllocManaged(&mut address, bytes, CU_MEM_ATTACH_GLOBAL.0),
    );
    address
}

/// The processor's view; the device must be done.
fn bytes(address: CUdeviceptr, bytes: usize) -> &'static mut [u8] {
    // SAFETY: managed memory of at least that size, which the behaviour frees last.
    unsafe { std::slice::from_raw_parts_mut(address.0 as *mut u8, bytes) }
}

const MANAGED: &[Need] = &[Need::Attribute(83, "managed memory")];

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "managed.both_sides_see_it",
        "The processor and the device write and read the same bytes",
        |t, cu| {
            let address = managed(cu, MIB);
            bytes(address, MIB).fill(3);
            t.see("device", compare(&cu.read(address, MIB), &vec![3; MIB]));
            t.code("fill", cu.cuMemsetD8_v2(address, 4, MIB));
            cu.sync();
            t.see("processor", compare(bytes(address, MIB), &vec![4; MIB]));
            t.code("free", cu.cuMemFree_v2(address));
            t.code("again", cu.cuMemFree_v2(address));
        },
    )
    .needs(MANAGED)
    .fact(&[
        "device: right",
        "fill: SUCCESS",
        "processor: right",
        "free: SUCCESS",
        "again: INVALID_VALUE",
    ]),
    Behaviour::new("managed.misuse", "No bytes, no place, bad flags", |t, cu| {
        let mut address = CUdeviceptr::NULL;
        let global = CU_MEM_ATTACH_GLOBAL.0;
        t.code("no bytes", cu.cuMemAllocManaged(&mut address, 0, global));
        t.code("no place", cu.cuMemAllocManaged(std::ptr::null_mut(), 64, global));
        t.code("no flags", cu.cuMemAllocManaged(&mut address, 64, 0));
        t.code("flags 9", cu.cuMemAllocManaged(&mut address, 64, 9));
    })
    .needs(MANAGED),
    Behaviour::new(
        "managed.a_kernel_uses_it",
        "A kernel writes it and the processor reads it",
        |t, cu| {
            let address = managed(cu, MIB);
            let check = cu.kernel("ebb_check");
            let fill = cu.kernel("ebb_fill");
            let result = managed(cu, 8);
            bytes(result, 8).fill(0);
            let words = (MIB / 4) as u64;
            t.code("fill", cu.launch(fill, NO_STREAM, &[address.0, words, 9, 0]));
            t.code(
                "check",
                cu.launch(check, NO_STREAM, &[address.0, words, 9, 0, result.0]),
            );
            cu.sync();
            t.see("wrong words", bytes(result, 8)[0]);
        },
    )
    .needs(MANAGED)
    .fact(&["fill: SUCCESS", "check: SUCCESS", "wrong words: 0"]),
    Behaviour::new(
        "managed.range_and_flag",
        "Its range is known, and that it is managed",
        |t, cu| {
            let address = managed(cu, 3 * MIB);
            t.see("range", either(cu.range(plus(address, MIB))));
            t.see(
                "managed",
                either(cu.attribute::<u32>(CU_POINTER_ATTRIBUTE_IS_MANAGED, address)),
            );
            cu.free(address);
        },
    )
    .needs(MANAGED)
    .fact(&["range: (1048576, 3145728)", "managed: 1"]),
    Behaviour::new(
        "managed.prefetch_to_the_device_and_back",
        "Prefetching moves nothing that can be seen",
        |t, cu| {
            let address = managed(cu, 4 * MIB);
            bytes(address, 4 * MIB).copy_from_slice(&pattern(4 * MIB, 3));
            let device = CUmemLocation::device(0);
            let host = CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_HOST,
                u: 0,
            };
            t.code(
                "to the device",
                cu.cuMemPrefetchAsync_v2(address, 4 * MIB, device, 0, NO_STREAM),
            );
            cu.sync();
            t.see("bytes", compare(&cu.read(address, 4 * MIB), &pattern(4 * MIB, 3)));
            t.code(
                "to the host",
                cu.cuMemPrefetchAsync_v2(address, 4 * MIB, host, 0, NO_STREAM),
            );
            cu.sync();
            t.see("bytes", compare(bytes(address, 4 * MIB), &pattern(4 * MIB, 3)));
        },
    )
    .needs(MANAGED)
    .fact(&[
        "to the device: SUCCESS",
        "bytes: right",
        "to the host: SUCCESS",
        "bytes: right",
    ]),
    Behaviour::new(
        "managed.prefetch_misuse",
        "Prefetching other memory, no bytes, no device",
        |t, cu| {
            let (address, plain) = (managed(cu, MIB), cu.alloc(MIB));
            let device = CUmemLocation::device(0);
            t.code(
                "plain memory",
                cu.cuMemPrefetchAsync_v2(plain, MIB, device, 0, NO_STREAM),
            );
            t.code(
                "no bytes",
                cu.cuMemPrefetchAsync_v2(address, 0, device, 0, NO_STREAM),
            );
            t.code(
                "flags",
                cu.cuMemPrefetchAsync_v2(address, MIB, device, 1, NO_STREAM),
            );
            t.see(
                "no device is refused",
                cu.cuMemPrefetchAsync_v2(address, MIB, CUmemLocation::device(99), 0, NO_STREAM)
                    != CUresult::SUCCESS,
            );
        },
    )
    .needs(MANAGED),
    Behaviour::new(
        "managed.advice",
        "Advice is taken, and of other memory refused",
        |t, cu| {
            let (address, plain) = (managed(cu, MIB), cu.alloc(MIB));
            let device = CUmemLocation::device(0);
            for (label, advice) in [
                ("read mostly", CU_MEM_ADVISE_SET_READ_MOSTLY),
                ("not so", CU_MEM_ADVISE_UNSET_READ_MOSTLY),
                ("preferred", CU_MEM_ADVISE_SET_PREFERRED_LOCATION),
                ("accessed by", CU_MEM_ADVISE_SET_ACCESSED_BY),
            ] {
                t.code(label, cu.cuMemAdvise_v2(address, MIB, advice, device));
            }
            t.code(
                "plain memory",
                cu.cuMemAdvise_v2(plain, MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, device),
            );
        },
    )
    .needs(MANAGED),
    Behaviour::new(
        "managed.range_attributes",
        "What was advised can be asked for",
        |t, cu| {
            let address = managed(cu, GRANULE);
            let advised = cu.cuMemAdvise_v2(
                address,
                GRANULE,
                CU_MEM_ADVISE_SET_READ_MOSTLY,
                CUmemLocation::device(0),
            );
            t.code("advise", advised);
            let mut value = 77_i32;
            let code = cu.cuMemRangeGetAttribute(
                (&raw mut value).cast(),
                4,
                CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY,
                address,
                GRANULE,
            );
            let code = t.exists("cuMemRangeGetAttribute", code);
            t.code("ask", code);
            t.see("read mostly", value);
        },
    )
    .needs(MANAGED)
    .fact(&["advise: SUCCESS", "ask: SUCCESS", "read mostly: 1"]),
    Behaviour::new(
        "managed.attached_to_a_stream",
        "Managed memory can be attached to a stream",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code(
                "alloc",
                cu.cuMemAllocManaged(&mut address, MIB, CU_MEM_ATTACH_HOST.0),
            );
            let stream = cu.stream();
            t.code(
                "attach",
                cu.cuStreamAttachMemAsync(stream, address, 0, CU_MEM_ATTACH_SINGLE.0),
            );
            t.code("fill", cu.cuMemsetD8Async(address, 2, MIB, stream));
            must("sync", cu.cuStreamSynchronize(stream));
            t.see("bytes", compare(bytes(address, MIB), &vec![2; MIB]));
        },
    )
    .needs(MANAGED)
    .fact(&[
        "alloc: SUCCESS",
        "attach: SUCCESS",
        "fill: SUCCESS",
        "bytes: right",
    ]),
    Behaviour::new(
        "managed.freed_in_a_stream",
        "What cuMemFreeAsync says to managed memory",
        |t, cu| {
            let address = managed(cu, MIB);
            t.code("free", cu.cuMemFreeAsync(address, NO_STREAM));
            cu.sync();
        },
    )
    .needs(MANAGED),
    Behaviour::new(
        "managed.plain_copies",
        "Copies between managed and plain memory, both ways",
        |t, cu| {
            let (address, plain) = (managed(cu, MIB), cu.alloc(MIB));
            bytes(address, MIB).copy_from_slice(&pattern(MIB, 7));
            t.code("one", cu.cuMemcpyDtoD_v2(plain, address, MIB));
            cu.sync();
            bytes(address, MIB).fill(0);
            t.code("two", cu.cuMemcpyDtoD_v2(address, plain, MIB));
            cu.sync();
            t.see("bytes", compare(bytes(address, MIB), &pattern(MIB, 7)));
        },
    )
    .needs(MANAGED)
    .fact(&["one: SUCCESS", "two: SUCCESS", "bytes: right"]),
];
