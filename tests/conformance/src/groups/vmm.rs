//! The program's own virtual memory: reserve, create, map, access, unmap, release, retain.

use std::ffi::c_void;

use ebb_abi::*;

use crate::behaviour::{Behaviour, Need};
use crate::driver::Driver;
use crate::helpers::*;

const READ: CUmemAccess_flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
const WRITE: CUmemAccess_flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

fn retain(cu: Driver, address: CUdeviceptr) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = CUmemGenericAllocationHandle::NULL;
    match cu.cuMemRetainAllocationHandle(&mut handle, address.0 as *mut c_void) {
        CUresult::SUCCESS => Ok(handle),
        code => Err(code),
    }
}

/// Reserved, created, mapped and writable.
fn mapped(cu: Driver, bytes: usize) -> (CUdeviceptr, CUmemGenericAllocationHandle) {
    let (address, handle) = (cu.reserve(bytes), cu.create(bytes));
    cu.map(address, bytes, handle);
    (address, handle)
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "vmm.granularity_is_2_mib",
        "Minimum and recommended granularity",
        |t, cu| {
            for (label, which) in [
                ("minimum", CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                ("recommended", CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
            ] {
                let mut bytes = 0;
                must(
                    "granularity",
                    cu.cuMemGetAllocationGranularity(&mut bytes, &cu.properties(0), which),
                );
                t.see(label, bytes);
            }
        },
    )
    .fact(&["minimum: 2097152", "recommended: 2097152"]),
    Behaviour::new(
        "vmm.granularity_misuse",
        "Granularity without a place, without properties, of no device",
        |t, cu| {
            let (mut bytes, min) = (0, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
            let good = cu.properties(0);
            t.code(
                "no place",
                cu.cuMemGetAllocationGranularity(std::ptr::null_mut(), &good, min),
            );
            t.code(
                "no properties",
                cu.cuMemGetAllocationGranularity(&mut bytes, std::ptr::null(), min),
            );
            t.code(
                "no type",
                cu.cuMemGetAllocationGranularity(&mut bytes, &CUmemAllocationProp::default(), min),
            );
            t.code(
                "option 9",
                cu.cuMemGetAllocationGranularity(&mut bytes, &good, CUmemAllocationGranularity_flags(9)),
            );
        },
    ),
    Behaviour::new(
        "vmm.whole_life",
        "Reserve, create, map, access, use, unmap, release, free",
        |t, cu| {
            let (mut address, mut handle) = (CUdeviceptr::NULL, CUmemGenericAllocationHandle::NULL);
            t.code(
                "reserve",
                cu.cuMemAddressReserve(&mut address, 4 * MIB, 0, CUdeviceptr::NULL, 0),
            );
            t.code(
                "create",
                cu.cuMemCreate(&mut handle, 4 * MIB, &cu.properties(0), 0),
            );
            t.code("map", cu.cuMemMap(address, 4 * MIB, 0, handle, 0));
            t.code("access", cu.access(address, 4 * MIB, WRITE));
            let sent = pattern(4 * MIB, 5);
            cu.write(address, &sent);
            t.see("bytes", compare(&cu.read(address, 4 * MIB), &sent));
            t.code("unmap", cu.cuMemUnmap(address, 4 * MIB));
            t.code("release", cu.cuMemRelease(handle));
            t.code("free", cu.cuMemAddressFree(address, 4 * MIB));
        },
    )
    .fact(&[
        "reserve: SUCCESS",
        "create: SUCCESS",
        "map: SUCCESS",
        "access: SUCCESS",
        "bytes: right",
        "unmap: SUCCESS",
        "release: SUCCESS",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "vmm.create_sizes",
        "Only multiples of the granularity can be created",
        |t, cu| {
            let mut handle = CUmemGenericAllocationHandle::NULL;
            for bytes in [0, 1, MIB, GRANULE, GRANULE + 1, 3 * GRANULE] {
                let code = cu.cuMemCreate(&mut handle, bytes, &cu.properties(0), 0);
                t.code(&bytes.to_string(), code);
                if code == CUresult::SUCCESS {
                    must("cuMemRelease", cu.cuMemRelease(handle));
                }
            }
        },
    )
    .fact(&[
        "0: INVALID_VALUE",
        "1: INVALID_VALUE",
        "1048576: INVALID_VALUE",
        "2097152: SUCCESS",
        "2097153: INVALID_VALUE",
        "6291456: SUCCESS",
    ]),
    Behaviour::new(
        "vmm.create_misuse",
        "Creation without a place, properties, a type, a device",
        |t, cu| {
            let mut handle = CUmemGenericAllocationHandle::NULL;
            let good = cu.properties(0);
            t.code(
                "no place",
                cu.cuMemCreate(std::ptr::null_mut(), GRANULE, &good, 0),
            );
            t.code(
                "no properties",
                cu.cuMemCreate(&mut handle, GRANULE, std::ptr::null(), 0),
            );
            let bad = CUmemAllocationProp {
                type_: CU_MEM_ALLOCATION_TYPE_INVALID,
                ..good
            };
            t.code("no type", cu.cuMemCreate(&mut handle, GRANULE, &bad, 0));
            let bad = CUmemAllocationProp {
                location: CUmemLocation::device(99),
                ..good
            };
            t.see(
                "no device is refused",
                cu.cuMemCreate(&mut handle, GRANULE, &bad, 0) != CUresult::SUCCESS,
            );
            t.code("flags", cu.cuMemCreate(&mut handle, GRANULE, &good, 1));
        },
    ),
    Behaviour::new(
        "vmm.create_more_than_the_card",
        "More than the card has is out of memory",
        |t, cu| {
            let mut handle = CUmemGenericAllocationHandle::NULL;
            t.code("2^46", cu.cuMemCreate(&mut handle, 1 << 46, &cu.properties(0), 0));
            t.see("no handle", handle.is_null());
        },
    )
    .fact(&["2^46: OUT_OF_MEMORY", "no handle: true"]),
    Behaviour::new(
        "vmm.reserve_sizes",
        "Only multiples of the granularity can be reserved",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            for bytes in [0, 1, 4096, MIB, GRANULE, GRANULE + 4096] {
                let code = cu.cuMemAddressReserve(&mut address, bytes, 0, CUdeviceptr::NULL, 0);
                t.see(
                    &bytes.to_string(),
                    if code == CUresult::SUCCESS {
                        "taken"
                    } else {
                        "refused"
                    },
                );
                if code == CUresult::SUCCESS {
                    must("cuMemAddressFree", cu.cuMemAddressFree(address, bytes));
                }
            }
        },
    ),
    Behaviour::new(
        "vmm.reserve_aligned",
        "Addresses come at the alignment that was asked for",
        |t, cu| {
            for alignment in [0, GRANULE, 64 * MIB, 1 << 30] {
                let mut address = CUdeviceptr::NULL;
                let code = cu.cuMemAddressReserve(&mut address, GRANULE, alignment, CUdeviceptr::NULL, 0);
                t.code(&alignment.to_string(), code);
                t.see("aligned", address.0.is_multiple_of(alignment.max(GRANULE) as u64));
                must("cuMemAddressFree", cu.cuMemAddressFree(address, GRANULE));
            }
        },
    )
    .fact(&[
        "0: SUCCESS",
        "aligned: true",
        "2097152: SUCCESS",
        "aligned: true",
        "67108864: SUCCESS",
        "aligned: true",
        "1073741824: SUCCESS",
        "aligned: true",
    ]),
    Behaviour::new(
        "vmm.reserve_alignment_is_a_power_of_two",
        "Other alignments are refused",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code(
                "3 MiB",
                cu.cuMemAddressReserve(&mut address, GRANULE, 3 * MIB, CUdeviceptr::NULL, 0),
            );
        },
    ),
    Behaviour::new(
        "vmm.reserve_at_a_free_address",
        "An address that was freed can be asked for and is given",
        |t, cu| {
            let first = cu.reserve(64 * MIB);
            must("cuMemAddressFree", cu.cuMemAddressFree(first, 64 * MIB));
            let mut again = CUdeviceptr::NULL;
            t.code(
                "reserve",
                cu.cuMemAddressReserve(&mut again, 32 * MIB, 0, first, 0),
            );
            t.see("the same", again == first);
        },
    )
    .fact(&["reserve: SUCCESS", "the same: true"]),
    Behaviour::new(
        "vmm.reserve_at_a_taken_address",
        "A taken address is a hint that is not followed",
        |t, cu| {
            let first = cu.reserve(64 * MIB);
            let mut other = CUdeviceptr::NULL;
            let code = cu.cuMemAddressReserve(&mut other, 32 * MIB, 0, first, 0);
            t.code("reserve", code);
            t.see(
                "another",
                code == CUresult::SUCCESS && other.0.abs_diff(first.0) >= 32 * MIB as u64,
            );
        },
    ),
    Behaviour::new(
        "vmm.reserve_flags",
        "Unknown flags of a reservation are refused",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code(
                "flags 0x100",
                cu.cuMemAddressReserve(&mut address, GRANULE, 0, CUdeviceptr::NULL, 0x100),
            );
            t.code(
                "no place",
                cu.cuMemAddressReserve(std::ptr::null_mut(), GRANULE, 0, CUdeviceptr::NULL, 0),
            );
        },
    ),
    Behaviour::new(
        "vmm.address_free_misuse",
        "Only a whole reservation can be freed, once",
        |t, cu| {
            let address = cu.reserve(8 * MIB);
            t.code("half", cu.cuMemAddressFree(address, 4 * MIB));
            t.code("inner", cu.cuMemAddressFree(plus(address, GRANULE), GRANULE));
            t.code("null", cu.cuMemAddressFree(CUdeviceptr::NULL, GRANULE));
            t.code("whole", cu.cuMemAddressFree(address, 8 * MIB));
            t.code("again", cu.cuMemAddressFree(address, 8 * MIB));
        },
    ),
    Behaviour::new(
        "vmm.address_free_while_mapped",
        "Addresses with memory behind them cannot be freed",
        |t, cu| {
            let (address, _) = mapped(cu, GRANULE);
            t.code("free", cu.cuMemAddressFree(address, GRANULE));
            cu.write(address, &[1]);
            t.see("still there", cu.read(address, 1)[0]);
            t.code("unmap", cu.cuMemUnmap(address, GRANULE));
            t.code("free", cu.cuMemAddressFree(address, GRANULE));
        },
    )
    .fact(&[
        "free: INVALID_VALUE",
        "still there: 1",
        "unmap: SUCCESS",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "vmm.map_twice_is_invalid",
        "Addresses with memory cannot be mapped again",
        |t, cu| {
            let (address, handle) = mapped(cu, GRANULE);
            t.code("again", cu.cuMemMap(address, GRANULE, 0, handle, 0));
            let other = cu.create(GRANULE);
            t.code("another", cu.cuMemMap(address, GRANULE, 0, other, 0));
        },
    )
    .fact(&["again: INVALID_VALUE", "another: INVALID_VALUE"]),
    Behaviour::new(
        "vmm.map_outside_is_invalid",
        "Only reserved addresses can be mapped",
        |t, cu| {
            // Not asked: one granule behind a reservation. The driver reserves more than is asked for, so that it may be taken.
            let (address, handle) = (cu.reserve(GRANULE), cu.create(2 * GRANULE));
            t.code(
                "behind",
                cu.cuMemMap(plus(address, 1 << 40), GRANULE, 0, handle, 0),
            );
            t.code("null", cu.cuMemMap(CUdeviceptr::NULL, GRANULE, 0, handle, 0));
        },
    )
    .fact(&["behind: NOT_SUPPORTED", "null: INVALID_VALUE"]),
    Behaviour::new(
        "vmm.map_misuse",
        "Sizes, offsets, flags and handles that are wrong",
        |t, cu| {
            let (address, handle) = (cu.reserve(8 * GRANULE), cu.create(2 * GRANULE));
            t.code("no size", cu.cuMemMap(address, 0, 0, handle, 0));
            t.code("half a granule", cu.cuMemMap(address, MIB, 0, handle, 0));
            t.code(
                "more than the handle",
                cu.cuMemMap(address, 3 * GRANULE, 0, handle, 0),
            );
            t.code("flags", cu.cuMemMap(address, 2 * GRANULE, 0, handle, 1));
            t.code(
                "no handle",
                cu.cuMemMap(address, GRANULE, 0, CUmemGenericAllocationHandle::NULL, 0),
            );
            // A handle that is made up ends the process on a real card.
            t.code("right", cu.cuMemMap(address, 2 * GRANULE, 0, handle, 0));
        },
    )
    .fact(&[
        "no size: INVALID_VALUE",
        "half a granule: NOT_SUPPORTED",
        "more than the handle: NOT_SUPPORTED",
        "flags: INVALID_VALUE",
        "no handle: INVALID_VALUE",
        "right: SUCCESS",
    ]),
    Behaviour::new(
        "vmm.map_with_an_offset",
        "What the driver says to an offset into a handle",
        |t, cu| {
            let (address, handle) = (cu.reserve(2 * GRANULE), cu.create(2 * GRANULE));
            t.code("offset", cu.cuMemMap(address, GRANULE, GRANULE, handle, 0));
        },
    ),
    Behaviour::new(
        "vmm.map_part_of_a_handle",
        "The first part of a handle alone",
        |t, cu| {
            let (address, handle) = (cu.reserve(2 * GRANULE), cu.create(2 * GRANULE));
            t.code("part", cu.cuMemMap(address, GRANULE, 0, handle, 0));
        },
    ),
    Behaviour::new(
        "vmm.without_access_a_copy_is_refused",
        "Mapped memory without access cannot be copied",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            must("cuMemMap", cu.cuMemMap(address, GRANULE, 0, handle, 0));
            let mut seen = [0_u8; 4];
            t.see(
                "copy is refused",
                cu.cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), address, 4) != CUresult::SUCCESS,
            );
        },
    )
    .fact(&["copy is refused: true"]),
    Behaviour::new(
        "vmm.access_is_seen",
        "cuMemGetAccess tells what was set",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            must("cuMemMap", cu.cuMemMap(address, GRANULE, 0, handle, 0));
            let device = CUmemLocation::device(0);
            let mut flags = 77;
            t.code("ask", cu.cuMemGetAccess(&mut flags, &device, address));
            t.see("none", flags);
            for wanted in [READ, WRITE, CU_MEM_ACCESS_FLAGS_PROT_NONE] {
                t.code("set", cu.access(address, GRANULE, wanted));
                must("cuMemGetAccess", cu.cuMemGetAccess(&mut flags, &device, address));
                t.see("seen", flags);
            }
        },
    ),
    Behaviour::new(
        "vmm.access_read_only_is_kept",
        "Read-only memory is read; the bytes are those from before",
        |t, cu| {
            let (address, _) = mapped(cu, GRANULE);
            cu.write(address, &[8; 64]);
            // A short copy may still be under way when its call returns, and would meet read-only memory.
            cu.sync();
            t.code("read only", cu.access(address, GRANULE, READ));
            t.see("bytes", format!("{:?}", cu.read(address, 3)));
            t.code("writable", cu.access(address, GRANULE, WRITE));
            cu.write(address, &[9; 64]);
            t.see("bytes", format!("{:?}", cu.read(address, 3)));
        },
    )
    .fact(&[
        "read only: SUCCESS",
        "bytes: [8, 8, 8]",
        "writable: SUCCESS",
        "bytes: [9, 9, 9]",
    ]),
    Behaviour::new(
        "vmm.access_misuse",
        "Access of unmapped addresses, parts, no list",
        |t, cu| {
            let address = cu.reserve(4 * GRANULE);
            t.code("unmapped", cu.access(address, GRANULE, WRITE));
            let handle = cu.create(2 * GRANULE);
            must("cuMemMap", cu.cuMemMap(address, 2 * GRANULE, 0, handle, 0));
            t.code("beyond", cu.access(address, 4 * GRANULE, WRITE));
            t.code("no size", cu.access(address, 0, WRITE));
            t.code(
                "no list",
                cu.cuMemSetAccess(address, 2 * GRANULE, std::ptr::null(), 1),
            );
            let mut flags = 0;
            t.code(
                "ask unmapped",
                cu.cuMemGetAccess(&mut flags, &CUmemLocation::device(0), plus(address, 3 * GRANULE)),
            );
        },
    ),
    Behaviour::new(
        "vmm.access_over_two_mappings",
        "One call gives access to adjacent mappings",
        |t, cu| {
            let address = cu.reserve(3 * GRANULE);
            let (a, b) = (cu.create(GRANULE), cu.create(2 * GRANULE));
            must("cuMemMap", cu.cuMemMap(address, GRANULE, 0, a, 0));
            must(
                "cuMemMap",
                cu.cuMemMap(plus(address, GRANULE), 2 * GRANULE, 0, b, 0),
            );
            t.code("access", cu.access(address, 3 * GRANULE, WRITE));
            let sent = pattern(GRANULE, 6);
            cu.write(plus(address, MIB), &sent);
            t.see(
                "across the border",
                compare(&cu.read(plus(address, MIB), GRANULE), &sent),
            );
        },
    )
    .fact(&["access: SUCCESS", "across the border: right"]),
    Behaviour::new(
        "vmm.unmap_over_two_mappings",
        "One call unmaps adjacent mappings",
        |t, cu| {
            let address = cu.reserve(3 * GRANULE);
            let (a, b) = (cu.create(GRANULE), cu.create(2 * GRANULE));
            cu.map(address, GRANULE, a);
            cu.map(plus(address, GRANULE), 2 * GRANULE, b);
            t.code("unmap", cu.cuMemUnmap(address, 3 * GRANULE));
            t.code("map again", cu.cuMemMap(address, GRANULE, 0, a, 0));
        },
    )
    .fact(&["unmap: SUCCESS", "map again: SUCCESS"]),
    Behaviour::new("vmm.unmap_misuse", "Half a mapping, nothing, twice", |t, cu| {
        let address = cu.reserve(4 * GRANULE);
        let handle = cu.create(2 * GRANULE);
        cu.map(address, 2 * GRANULE, handle);
        t.code("half", cu.cuMemUnmap(address, GRANULE));
        t.code("other half", cu.cuMemUnmap(plus(address, GRANULE), GRANULE));
        t.code("no size", cu.cuMemUnmap(address, 0));
        t.code("unmapped", cu.cuMemUnmap(plus(address, 2 * GRANULE), 2 * GRANULE));
        t.code("right", cu.cuMemUnmap(address, 2 * GRANULE));
        t.code("again", cu.cuMemUnmap(address, 2 * GRANULE));
    }),
    Behaviour::new(
        "vmm.memory_lives_until_the_last_mapping_goes",
        "A released handle's memory stays while it is mapped",
        |t, cu| {
            let (address, handle) = mapped(cu, GRANULE);
            cu.write(address, &pattern(GRANULE, 4));
            t.code("release", cu.cuMemRelease(handle));
            t.see("bytes", compare(&cu.read(address, GRANULE), &pattern(GRANULE, 4)));
            t.code("unmap", cu.cuMemUnmap(address, GRANULE));
        },
    )
    .fact(&["release: SUCCESS", "bytes: right", "unmap: SUCCESS"]),
    Behaviour::new(
        "vmm.memory_lives_until_the_handle_goes",
        "Unmapped memory keeps its bytes while there is a handle, at any address",
        |t, cu| {
            let (address, handle) = mapped(cu, GRANULE);
            cu.write(address, &pattern(GRANULE, 2));
            cu.sync();
            must("cuMemUnmap", cu.cuMemUnmap(address, GRANULE));
            let elsewhere = cu.reserve(GRANULE);
            cu.map(elsewhere, GRANULE, handle);
            t.see(
                "bytes",
                compare(&cu.read(elsewhere, GRANULE), &pattern(GRANULE, 2)),
            );
        },
    )
    .fact(&["bytes: right"]),
    Behaviour::new(
        "vmm.one_handle_at_two_addresses",
        "What is written at one address is read at the other",
        |t, cu| {
            let (a, handle) = mapped(cu, GRANULE);
            let b = cu.reserve(GRANULE);
            cu.map(b, GRANULE, handle);
            cu.write(a, &pattern(4096, 1));
            t.see("b", compare(&cu.read(b, 4096), &pattern(4096, 1)));
            cu.write(plus(b, 100), &[0; 10]);
            t.see("a", format!("{:?}", cu.read(plus(a, 99), 3)[1..].to_vec()));
            must("cuMemUnmap", cu.cuMemUnmap(a, GRANULE));
            t.see("b still", format!("{:?}", cu.read(plus(b, 100), 2)));
        },
    )
    .fact(&["b: right", "a: [0, 0]", "b still: [0, 0]"]),
    Behaviour::new(
        "vmm.release_misuse",
        "A handle can be released once; none, never",
        |t, cu| {
            let handle = cu.create(GRANULE);
            t.code("first", cu.cuMemRelease(handle));
            t.code("second", cu.cuMemRelease(handle));
            t.code("none", cu.cuMemRelease(CUmemGenericAllocationHandle::NULL));
        },
    )
    .fact(&["first: SUCCESS", "second: INVALID_VALUE", "none: INVALID_VALUE"]),
    Behaviour::new(
        "vmm.retain_gives_a_handle",
        "A retained handle keeps the memory after the first one is gone",
        |t, cu| {
            let (address, handle) = mapped(cu, GRANULE);
            cu.write(address, &[6; 16]);
            // A short copy may still be under way when its call returns; unmapping does not wait for it.
            cu.sync();
            let again = retain(cu, plus(address, MIB));
            t.see("retain", either(again.map(|_| "a handle")));
            must("cuMemRelease", cu.cuMemRelease(handle));
            must("cuMemUnmap", cu.cuMemUnmap(address, GRANULE));
            if let Ok(again) = again {
                cu.map(address, GRANULE, again);
                t.see("bytes", format!("{:?}", cu.read(address, 2)));
                t.code("release", cu.cuMemRelease(again));
            }
        },
    )
    .fact(&["retain: \"a handle\"", "bytes: [6, 6]", "release: SUCCESS"]),
    Behaviour::new(
        "vmm.retain_of_the_same_memory_is_the_same_handle",
        "Handle and retained handle are one value, each released once",
        |t, cu| {
            let (address, handle) = mapped(cu, GRANULE);
            t.see(
                "the same",
                either(retain(cu, address).map(|again| again == handle)),
            );
            t.code("release", cu.cuMemRelease(handle));
            t.code("release", cu.cuMemRelease(handle));
            t.see("bytes", cu.read(address, 8).len());
            t.code("too often", cu.cuMemRelease(handle));
        },
    ),
    Behaviour::new(
        "vmm.retain_of_other_memory_is_invalid",
        "cuMemAlloc memory, reserved and unknown addresses have no handle",
        |t, cu| {
            let address = cu.alloc(GRANULE);
            t.see("cuMemAlloc", either(retain(cu, address)));
            cu.free(address);
            let reserved = cu.reserve(GRANULE);
            t.see("reserved", either(retain(cu, reserved)));
            t.see("null", either(retain(cu, CUdeviceptr::NULL)));
        },
    )
    .fact(&[
        "cuMemAlloc: INVALID_VALUE",
        "reserved: INVALID_VALUE",
        "null: INVALID_VALUE",
    ]),
    Behaviour::new(
        "vmm.properties_come_back",
        "A handle tells with what it was created",
        |t, cu| {
            let asked = CUmemAllocationProp {
                requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                ..cu.properties(0)
            };
            let (mut handle, mut told) = (CUmemGenericAllocationHandle::NULL, CUmemAllocationProp::default());
            must("cuMemCreate", cu.cuMemCreate(&mut handle, GRANULE, &asked, 0));
            t.code(
                "ask",
                cu.cuMemGetAllocationPropertiesFromHandle(&mut told, handle),
            );
            t.see("type", told.type_.0);
            t.see(
                "location",
                format!("{} {}", told.location.type_.0, told.location.id()),
            );
            t.see("handle types", told.requestedHandleTypes.0);
            t.code(
                "of nothing",
                cu.cuMemGetAllocationPropertiesFromHandle(&mut told, CUmemGenericAllocationHandle::NULL),
            );
            t.code("release", cu.cuMemRelease(handle));
        },
    ),
    Behaviour::new(
        "vmm.export_only_if_asked_for",
        "A handle can be exported only if that was asked for at its creation",
        |t, cu| {
            let handle = cu.create(GRANULE);
            let mut fd = -1_i32;
            t.code(
                "export",
                cu.cuMemExportToShareableHandle(
                    (&raw mut fd).cast(),
                    handle,
                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    0,
                ),
            );
            t.see("no descriptor", fd);
            t.code("release", cu.cuMemRelease(handle));
        },
    )
    .fact(&["export: INVALID_VALUE", "no descriptor: -1", "release: SUCCESS"]),
    Behaviour::new(
        "vmm.fresh_memory_can_be_filled",
        "New physical memory takes a fill and gives it back",
        |t, cu| {
            let (address, _) = mapped(cu, 4 * GRANULE);
            t.code("fill", cu.cuMemsetD32_v2(address, 0x0101_0101, GRANULE));
            t.see(
                "bytes",
                compare(&cu.read(address, 4 * GRANULE), &vec![1; 4 * GRANULE]),
            );
        },
    )
    .fact(&["fill: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "vmm.growing_a_range",
        "A range grows by mapping more behind what is there, as frameworks do",
        |t, cu| {
            let address = cu.reserve(64 * MIB);
            let mut handles = Vec::new();
            for step in 0..6 {
                let handle = cu.create(GRANULE);
                cu.map(plus(address, step * GRANULE), GRANULE, handle);
                cu.write(plus(address, step * GRANULE), &[step as u8 + 1; 512]);
                handles.push(handle);
            }
            let firsts: Vec<u8> = (0..6)
                .map(|step| cu.read(plus(address, step * GRANULE), 1)[0])
                .collect();
            t.see("bytes", format!("{firsts:?}"));
            for step in (0..6).rev() {
                must("unmap", cu.cuMemUnmap(plus(address, step * GRANULE), GRANULE));
                must("release", cu.cuMemRelease(handles[step]));
            }
            t.code("free", cu.cuMemAddressFree(address, 64 * MIB));
        },
    )
    .fact(&["bytes: [1, 2, 3, 4, 5, 6]", "free: SUCCESS"]),
    Behaviour::new(
        "vmm.a_kernel_uses_it",
        "A kernel writes over the border of two handles",
        |t, cu| {
            let address = cu.reserve(2 * GRANULE);
            let (a, b) = (cu.create(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, a);
            cu.map(plus(address, GRANULE), GRANULE, b);
            let (fill, check) = (cu.kernel("ebb_fill"), cu.kernel("ebb_check"));
            let result = cu.alloc(8);
            must("memset", cu.cuMemsetD8_v2(result, 0, 8));
            let words = (2 * GRANULE / 4) as u64;
            t.code("fill", cu.launch(fill, NO_STREAM, &[address.0, words, 7, 1]));
            t.code(
                "check",
                cu.launch(check, NO_STREAM, &[address.0, words, 7, 1, result.0]),
            );
            t.see("wrong words", format!("{:?}", cu.read(result, 8)));
        },
    )
    .fact(&[
        "fill: SUCCESS",
        "check: SUCCESS",
        "wrong words: [0, 0, 0, 0, 0, 0, 0, 0]",
    ]),
    Behaviour::new(
        "vmm.calls_do_not_wait_for_running_work",
        "Creating, mapping, unmapping and releasing come back while a stream is busy",
        |t, cu| {
            let (stream, address) = (cu.stream(), cu.reserve(GRANULE));
            block(cu, stream);
            let handle = cu.create(GRANULE);
            t.code("map", cu.cuMemMap(address, GRANULE, 0, handle, 0));
            t.code("access", cu.access(address, GRANULE, WRITE));
            t.code("unmap", cu.cuMemUnmap(address, GRANULE));
            t.code("release", cu.cuMemRelease(handle));
            t.code("stream", cu.cuStreamQuery(stream));
            unblock();
            t.code("wait", cu.cuStreamSynchronize(stream));
        },
    )
    .fact(&[
        "map: SUCCESS",
        "access: SUCCESS",
        "unmap: SUCCESS",
        "release: SUCCESS",
        "stream: NOT_READY",
        "wait: SUCCESS",
    ]),
    Behaviour::new(
        "vmm.host_memory",
        "Physical memory of the host is for the processor and the device",
        |t, cu| {
            let location = CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_HOST_NUMA,
                u: 0,
            };
            let properties = CUmemAllocationProp {
                location,
                ..cu.properties(0)
            };
            let mut handle = CUmemGenericAllocationHandle::NULL;
            let created = cu.cuMemCreate(&mut handle, GRANULE, &properties, 0);
            t.code("create", created);
            if created != CUresult::SUCCESS {
                return;
            }
            let address = cu.reserve(GRANULE);
            cu.map(address, GRANULE, handle);
            let access = CUmemAccessDesc {
                location,
                flags: WRITE,
            };
            t.code("access", cu.cuMemSetAccess(address, GRANULE, &access, 1));
            cu.write(address, &[42; 8]);
            cu.sync();
            // SAFETY: the processor was just given access to this memory.
            t.see("seen by the processor", unsafe {
                (address.0 as *const u8).read_volatile()
            });
        },
    ),
    Behaviour::new(
        "vmm.second_device_memory",
        "Memory of a second device, for the first one and the second one",
        |t, cu| {
            let mut handle = CUmemGenericAllocationHandle::NULL;
            t.code(
                "create",
                cu.cuMemCreate(&mut handle, GRANULE, &cu.properties(1), 0),
            );
            let address = cu.reserve(GRANULE);
            must("cuMemMap", cu.cuMemMap(address, GRANULE, 0, handle, 0));
            let both = [0, 1].map(|device| CUmemAccessDesc {
                location: CUmemLocation::device(device),
                flags: WRITE,
            });
            t.code("access", cu.cuMemSetAccess(address, GRANULE, both.as_ptr(), 2));
            cu.write(address, &[5; 32]);
            t.see("bytes", format!("{:?}", cu.read(address, 2)));
            for device in [0, 1] {
                let mut flags = 77;
                t.code(
                    "ask",
                    cu.cuMemGetAccess(&mut flags, &CUmemLocation::device(device), address),
                );
                t.see("seen", flags);
            }
        },
    )
    .needs(&[Need::SecondDevice]),
];
