//! What the driver says about an address: ranges and pointer attributes.

use std::ffi::c_void;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;
use crate::observe::Test;

/// The attributes that do not depend on where memory lies, of one address.
fn attributes(t: &mut Test, cu: Driver, address: CUdeviceptr) {
    let mut current = CUcontext::NULL;
    must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut current));
    let context = cu.attribute::<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, address);
    t.see(
        "context",
        match context {
            Ok(context) if context == current => "the current one".into(),
            Ok(CUcontext::NULL) => "none".into(),
            Ok(_) => "another".into(),
            Err(code) => crate::observe::short(code),
        },
    );
    let integers: [(&str, CUpointer_attribute); 7] = [
        ("memory type", CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
        ("managed", CU_POINTER_ATTRIBUTE_IS_MANAGED),
        ("ordinal", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL),
        (
            "legacy IPC capable",
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ),
        ("mapped", CU_POINTER_ATTRIBUTE_MAPPED),
        ("access", CU_POINTER_ATTRIBUTE_ACCESS_FLAGS),
        ("sync memops", CU_POINTER_ATTRIBUTE_SYNC_MEMOPS),
    ];
    for (label, attribute) in integers {
        t.see(label, either(cu.attribute::<u32>(attribute, address)));
    }
    let types = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, address);
    t.see("handle types", either(types));
    let pool = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address);
    t.see("has a pool", either(pool.map(|pool| pool != 0)));
    let device = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address);
    t.see(
        "device pointer is itself",
        either(device.map(|device| device == address.0)),
    );
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "pointer.of_an_allocation",
        "The attributes of cuMemAlloc memory",
        |t, cu| {
            let address = cu.alloc(3 * MIB);
            attributes(t, cu, plus(address, MIB));
            cu.free(address);
        },
    ),
    Behaviour::new(
        "pointer.of_a_small_allocation",
        "The attributes of a small allocation",
        |t, cu| {
            let address = cu.alloc(100);
            attributes(t, cu, address);
            cu.free(address);
        },
    ),
    Behaviour::new(
        "pointer.of_mapped_memory",
        "The attributes of memory that the program mapped",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, handle);
            attributes(t, cu, address);
        },
    ),
    Behaviour::new(
        "pointer.of_stream_ordered_memory",
        "The attributes of cuMemAllocAsync memory",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            must(
                "cuMemAllocAsync",
                cu.cuMemAllocAsync(&mut address, 3 * MIB, NO_STREAM),
            );
            cu.sync();
            attributes(t, cu, address);
            must("cuMemFreeAsync", cu.cuMemFreeAsync(address, NO_STREAM));
            cu.sync();
        },
    ),
    Behaviour::new(
        "pointer.of_page_locked_memory",
        "The attributes of page-locked host memory",
        |t, cu| {
            let mut host = std::ptr::null_mut();
            must("cuMemHostAlloc", cu.cuMemHostAlloc(&mut host, 8192, 0));
            attributes(t, cu, CUdeviceptr(host as u64));
            must("cuMemFreeHost", cu.cuMemFreeHost(host));
        },
    ),
    Behaviour::new(
        "pointer.of_managed_memory",
        "The attributes of managed memory",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            must(
                "cuMemAllocManaged",
                cu.cuMemAllocManaged(&mut address, MIB, CU_MEM_ATTACH_GLOBAL.0),
            );
            attributes(t, cu, address);
            cu.free(address);
        },
    ),
    Behaviour::new(
        "pointer.unknown_address_is_invalid",
        "An address of the program's own has no attributes",
        |t, cu| {
            let local = 5_u64;
            let address = CUdeviceptr(std::ptr::from_ref(&local) as u64);
            attributes(t, cu, address);
        },
    ),
    Behaviour::new(
        "pointer.freed_address_is_invalid",
        "A freed address has no attributes and no range",
        |t, cu| {
            let (address, keep) = (cu.alloc(8 * MIB), cu.alloc(100));
            cu.free(address);
            t.see(
                "context",
                either(
                    cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_CONTEXT, address)
                        .map(|_| "some"),
                ),
            );
            t.see("range", either(cu.range(address)));
            cu.free(keep);
        },
    )
    .fact(&["context: INVALID_VALUE", "range: NOT_FOUND"]),
    Behaviour::new(
        "pointer.range_start_and_size",
        "RANGE_START and RANGE_SIZE tell the allocation",
        |t, cu| {
            let address = cu.alloc(7 * MIB + 5);
            let inner = plus(address, 6 * MIB);
            let start = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, inner);
            t.see("start", either(start.map(|start| start == address.0)));
            t.see(
                "size",
                either(cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_RANGE_SIZE, inner)),
            );
            cu.free(address);
        },
    )
    .fact(&["start: true", "size: 7340037"]),
    Behaviour::new(
        "pointer.buffer_ids_are_unique",
        "Each allocation has a BUFFER_ID of its own, the same all over it",
        |t, cu| {
            let (a, b) = (cu.alloc(4 * MIB), cu.alloc(100));
            let id = |address| cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
            let (first, inner, other) = (id(a), id(plus(a, 3 * MIB)), id(b));
            t.see("same inside", first == inner && first.is_ok());
            t.see("different outside", first != other && other.is_ok());
            cu.free(a);
            cu.free(b);
        },
    )
    .fact(&["same inside: true", "different outside: true"]),
    Behaviour::new(
        "pointer.buffer_id_is_never_used_again",
        "A new allocation at an old address has a new BUFFER_ID",
        |t, cu| {
            let a = cu.alloc(4 * MIB);
            let first = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_BUFFER_ID, a);
            cu.free(a);
            let b = cu.alloc(4 * MIB);
            let second = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_BUFFER_ID, b);
            t.see("new", first != second && second.is_ok());
            cu.free(b);
        },
    )
    .fact(&["new: true"]),
    Behaviour::new(
        "pointer.several_at_once",
        "cuPointerGetAttributes answers several at once",
        |t, cu| {
            let address = cu.alloc(2 * MIB);
            let (mut kind, mut size, mut managed) = (0_u32, 0_u64, 7_u32);
            let mut asked = [
                CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                CU_POINTER_ATTRIBUTE_IS_MANAGED,
            ];
            let mut places: [*mut c_void; 3] = [
                (&raw mut kind).cast(),
                (&raw mut size).cast(),
                (&raw mut managed).cast(),
            ];
            t.code(
                "ask",
                cu.cuPointerGetAttributes(3, asked.as_mut_ptr(), places.as_mut_ptr(), address),
            );
            t.see("answers", format!("{kind} {size} {managed}"));
            cu.free(address);
        },
    )
    .fact(&["ask: SUCCESS", "answers: 2 2097152 0"]),
    Behaviour::new(
        "pointer.several_of_an_unknown_address",
        "cuPointerGetAttributes of an unknown address succeeds with nothing",
        |t, cu| {
            let local = 5_u64;
            let address = CUdeviceptr(std::ptr::from_ref(&local) as u64);
            let (mut kind, mut context) = (77_u32, 77_u64);
            let mut asked = [CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_CONTEXT];
            let mut places: [*mut c_void; 2] = [(&raw mut kind).cast(), (&raw mut context).cast()];
            t.code(
                "ask",
                cu.cuPointerGetAttributes(2, asked.as_mut_ptr(), places.as_mut_ptr(), address),
            );
            t.see("answers", format!("{kind} {context}"));
        },
    )
    .fact(&["ask: SUCCESS", "answers: 0 0"]),
    Behaviour::new(
        "pointer.no_place_is_invalid",
        "Missing places and unknown attributes are refused",
        |t, cu| {
            let address = cu.alloc(512);
            let none = std::ptr::null_mut();
            t.code(
                "no place",
                cu.cuPointerGetAttribute(none, CU_POINTER_ATTRIBUTE_CONTEXT, address),
            );
            let mut value = 0_u64;
            t.code(
                "attribute 999",
                cu.cuPointerGetAttribute((&raw mut value).cast(), CUpointer_attribute(999), address),
            );
            cu.free(address);
        },
    )
    .fact(&["no place: INVALID_VALUE", "attribute 999: INVALID_VALUE"]),
    Behaviour::new(
        "pointer.range_with_one_place",
        "cuMemGetAddressRange takes a place for either answer alone",
        |t, cu| {
            let address = cu.alloc(MIB);
            let (mut base, mut size) = (CUdeviceptr::NULL, 0);
            t.code(
                "base",
                cu.cuMemGetAddressRange_v2(&mut base, std::ptr::null_mut(), plus(address, 9)),
            );
            t.see("base is right", base == address);
            t.code(
                "size",
                cu.cuMemGetAddressRange_v2(std::ptr::null_mut(), &mut size, address),
            );
            t.see("size", size);
            cu.free(address);
        },
    ),
    Behaviour::new(
        "pointer.range_at_the_edges",
        "The first and last byte belong to an allocation, the next does not",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            t.see("first", either(cu.range(address)));
            t.see("last", either(cu.range(plus(address, 4 * MIB - 1))));
            let after = cu.range(plus(address, 4 * MIB));
            t.see(
                "after is another's",
                after.is_err() || after.is_ok_and(|r| r.0 == 0),
            );
            cu.free(address);
        },
    )
    .fact(&[
        "first: (0, 4194304)",
        "last: (4194303, 4194304)",
        "after is another's: true",
    ]),
    Behaviour::new(
        "pointer.range_of_unknown_is_not_found",
        "An unknown address has no range",
        |t, cu| {
            t.see("low", either(cu.range(CUdeviceptr(0x1000))));
            t.see("null", either(cu.range(CUdeviceptr::NULL)));
        },
    ),
    Behaviour::new(
        "pointer.range_of_mapped_memory",
        "The range of memory that the program mapped",
        |t, cu| {
            let address = cu.reserve(4 * GRANULE);
            let (a, b) = (cu.create(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, a);
            cu.map(plus(address, GRANULE), GRANULE, b);
            t.see("first", either(cu.range(plus(address, 5))));
            t.see("second", either(cu.range(plus(address, GRANULE + 5))));
            t.see("unmapped", either(cu.range(plus(address, 3 * GRANULE))));
        },
    ),
    Behaviour::new(
        "pointer.sync_memops_can_be_set",
        "SYNC_MEMOPS can be set on cuMemAlloc memory, and is then seen",
        |t, cu| {
            let address = cu.alloc(MIB);
            let yes = 1_u32;
            let set =
                cu.cuPointerSetAttribute((&raw const yes).cast(), CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address);
            t.code("set", set);
            let seen = cu.attribute::<u32>(CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address);
            t.see("seen", either(seen.map(|value| value & 1)));
            cu.write(address, &[4; 16]);
            t.see("bytes", format!("{:?}", cu.read(address, 2)));
            t.code("free", cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "pointer.sync_memops_not_on_mapped_memory",
        "SYNC_MEMOPS cannot be set on memory that the program mapped",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, handle);
            let yes = 1_u32;
            let set =
                cu.cuPointerSetAttribute((&raw const yes).cast(), CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address);
            t.code("set", set);
        },
    )
    .fact(&["set: NOT_SUPPORTED"]),
    Behaviour::new(
        "pointer.only_sync_memops_can_be_set",
        "Other attributes cannot be set",
        |t, cu| {
            let address = cu.alloc(MIB);
            let yes = 1_u32;
            let value: *const c_void = (&raw const yes).cast();
            t.code(
                "context",
                cu.cuPointerSetAttribute(value, CU_POINTER_ATTRIBUTE_CONTEXT, address),
            );
            t.code(
                "no value",
                cu.cuPointerSetAttribute(std::ptr::null(), CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address),
            );
            cu.free(address);
        },
    ),
];
