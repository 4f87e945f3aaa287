//! The virtual-memory calls as the driver has them: what each use answers, and what each misuse.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const POSIX: CUmemAllocationHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
const TWO: &[(&str, &str)] = &[("EBB_SIM_DEVICES", "2"), ("EBB_SIM_CONTEXT_BYTES", "0")];
const NO_HANDLE: CUmemGenericAllocationHandle = CUmemGenericAllocationHandle::NULL;

fn retain(cuda: &Cuda, address: CUdeviceptr) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = NO_HANDLE;
    cuda.cuMemRetainAllocationHandle(&mut handle, address.0 as *mut c_void)
        .ok()
        .map(|()| handle)
}

fn export(cuda: &Cuda, handle: CUmemGenericAllocationHandle) -> Result<i32, CUresult> {
    let mut fd = -1;
    cuda.cuMemExportToShareableHandle(std::ptr::from_mut(&mut fd).cast(), handle, POSIX, 0)
        .ok()
        .map(|()| fd)
}

fn import(cuda: &Cuda, fd: i32) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = NO_HANDLE;
    cuda.cuMemImportFromShareableHandle(&mut handle, fd as usize as *mut c_void, POSIX)
        .ok()
        .map(|()| handle)
}

fn exportable(cuda: &Cuda) -> CUmemAllocationProp {
    CUmemAllocationProp {
        requestedHandleTypes: POSIX,
        ..cuda.device_properties()
    }
}

#[test]
fn reserving() {
    alone("reserving", SMALL, |cuda| {
        let mut a = CUdeviceptr::NULL;
        let null = CUdeviceptr::NULL;
        let mut reserve =
            |size, align, hint, flags| cuda.cuMemAddressReserve(&mut a, size, align, hint, flags);
        assert_eq!(reserve(0, 0, null, 0), INVALID);
        assert_eq!(reserve(4097, 0, null, 0), INVALID, "not in pages");
        assert_eq!(reserve(2 * MIB, 3, null, 0), INVALID, "no power of two");
        assert_eq!(reserve(2 * MIB, 0, null, 1), INVALID, "flags");
        assert_eq!(
            reserve(2 * MIB, 0, CUdeviceptr(12345), 0),
            INVALID,
            "a hint off the page"
        );
        assert_eq!(
            reserve(usize::MAX & !4095, 0, null, 0),
            CUresult::ERROR_OUT_OF_MEMORY
        );
        assert_eq!(cuda.cuMemAddressReserve(null_mut(), 2 * MIB, 0, null, 0), INVALID);
        ok(reserve(2 * MIB, 64 * MIB, null, 0));
        assert_eq!(a.0 as usize % (64 * MIB), 0);
        // A place that is taken is a hint that is not followed.
        let mut b = null;
        ok(cuda.cuMemAddressReserve(&mut b, 2 * MIB, 0, a, 0));
        assert_ne!(a, b);
        assert_eq!(cuda.cuMemAddressFree(a, 4096), INVALID, "another size");
        assert_eq!(
            cuda.cuMemAddressFree(plus(a, 4096), 2 * MIB),
            INVALID,
            "another start"
        );
        ok(cuda.cuMemAddressFree(a, 2 * MIB));
        assert_eq!(cuda.cuMemAddressFree(a, 2 * MIB), INVALID, "twice");
        let block = cuda.alloc(4 * MIB);
        assert_eq!(
            cuda.cuMemAddressFree(block, 4 * MIB),
            INVALID,
            "not reserved by the program"
        );
    });
}

#[test]
fn creating() {
    alone("creating", SMALL, |cuda| {
        let good = cuda.device_properties();
        let try_with = |change: &dyn Fn(&mut CUmemAllocationProp)| {
            let mut properties = good;
            change(&mut properties);
            cuda.try_create(2 * MIB, &properties)
                .map(|handle| ok(cuda.cuMemRelease(handle)))
        };
        assert_eq!(try_with(&|_| ()), Ok(()));
        assert_eq!(
            try_with(&|p| p.type_ = CU_MEM_ALLOCATION_TYPE_INVALID),
            Err(INVALID)
        );
        assert_eq!(
            try_with(&|p| p.location = CUmemLocation::device(3)),
            Err(CUresult::ERROR_INVALID_DEVICE)
        );
        let at = |type_, u| move |p: &mut CUmemAllocationProp| p.location = CUmemLocation { type_, u };
        assert_eq!(
            try_with(&at(CU_MEM_LOCATION_TYPE_HOST, 5)),
            Ok(()),
            "the number is ignored"
        );
        assert_eq!(try_with(&at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 0)), Ok(()));
        assert_eq!(try_with(&at(CU_MEM_LOCATION_TYPE_HOST_NUMA, 9)), Err(INVALID));
        assert_eq!(
            try_with(&at(CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0)),
            Err(INVALID)
        );
        let shared_host = |p: &mut CUmemAllocationProp| {
            p.location = CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_HOST,
                u: 0,
            };
            p.requestedHandleTypes = POSIX;
        };
        assert_eq!(try_with(&shared_host), Err(INVALID));
        assert_eq!(
            try_with(&|p| p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC),
            Err(CUresult::ERROR_NOT_SUPPORTED)
        );
        for size in [0, 1, MIB, 3 * MIB] {
            assert_eq!(cuda.try_create(size, &good), Err(INVALID), "{size}");
        }
        assert_eq!(
            cuda.try_create(66 * MIB, &good),
            Err(CUresult::ERROR_OUT_OF_MEMORY)
        );
        let mut handle = NO_HANDLE;
        assert_eq!(cuda.cuMemCreate(&mut handle, 2 * MIB, &good, 1), INVALID, "flags");
        assert_eq!(cuda.cuMemCreate(null_mut(), 2 * MIB, &good, 0), INVALID);
        assert_eq!(
            cuda.cuMemCreate(&mut handle, 2 * MIB, std::ptr::null(), 0),
            INVALID
        );
        assert_eq!(cuda.free_bytes(), 64 * MIB, "nothing stayed behind");
        // What is asked for and not had is told.
        let mut wish = good;
        wish.allocFlags[0] = 0x0101;
        let handle = cuda.try_create(2 * MIB, &wish).unwrap();
        let mut back = CUmemAllocationProp::default();
        ok(cuda.cuMemGetAllocationPropertiesFromHandle(&mut back, handle));
        assert_eq!(back.allocFlags[0], 0x0100, "for RDMA, not compressed");
        ok(cuda.cuMemRelease(handle));
        assert_eq!(
            cuda.cuMemGetAllocationPropertiesFromHandle(&mut back, handle),
            INVALID
        );
        let mut size = 0;
        let option = CUmemAllocationGranularity_flags(7);
        assert_eq!(
            cuda.cuMemGetAllocationGranularity(&mut size, &good, option),
            INVALID
        );
    });
}

#[test]
fn mapping_and_unmapping() {
    alone("mapping_and_unmapping", SMALL, |cuda| {
        let space = cuda.reserve(16 * MIB);
        let a = cuda.create(4 * MIB);
        let map = |at: usize, size, offset, handle, flags| {
            cuda.cuMemMap(plus(space, at), size, offset, handle, flags)
        };
        assert_eq!(map(0, 4 * MIB, 0, a, 1), INVALID, "flags");
        assert_eq!(map(0, 2 * MIB, 2 * MIB, a, 0), INVALID, "an offset");
        let unsupported = CUresult::ERROR_NOT_SUPPORTED;
        assert_eq!(map(0, 6 * MIB, 0, a, 0), unsupported, "more than there is");
        assert_eq!(map(0, 3 * MIB, 0, a, 0), unsupported, "not in granules");
        assert_eq!(map(1 << 40, 2 * MIB, 0, a, 0), unsupported, "a part");
        assert_eq!(map(1 << 40, 4 * MIB, 0, a, 0), INVALID, "nobody's address");
        assert_eq!(map(MIB, 4 * MIB, 0, a, 0), INVALID, "off the granule");
        assert_eq!(map(14 * MIB, 4 * MIB, 0, a, 0), INVALID, "over the end");
        assert_eq!(map(0, 0, 0, a, 0), INVALID);
        assert_eq!(map(0, 2 * MIB, 0, CUmemGenericAllocationHandle(77), 0), INVALID);
        ok(map(0, 4 * MIB, 0, a, 0));
        // The same memory at a second place, and at a third.
        ok(map(4 * MIB, 4 * MIB, 0, a, 0));
        ok(map(8 * MIB, 4 * MIB, 0, a, 0));
        assert_eq!(map(2 * MIB, 4 * MIB, 0, a, 0), INVALID, "overlaps");
        ok(cuda.set_access(space, 12 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
        assert_eq!(cuda.free_bytes(), 60 * MIB, "charged once");
        cuda.write(plus(space, MIB), &[5; 10]);
        assert_eq!(cuda.read(plus(space, 5 * MIB), 10), [5; 10]);
        assert_eq!(cuda.read(plus(space, 9 * MIB), 10), [5; 10]);
        // A released handle maps nothing more; what is mapped stays.
        ok(cuda.cuMemRelease(a));
        assert_eq!(map(12 * MIB, 2 * MIB, 0, a, 0), INVALID);
        let unmap = |at: usize, size| cuda.cuMemUnmap(plus(space, at), size);
        assert_eq!(unmap(0, 2 * MIB), INVALID, "half of a mapping");
        assert_eq!(unmap(2 * MIB, 2 * MIB), INVALID, "the other half");
        assert_eq!(unmap(0, 6 * MIB), INVALID, "one and a half");
        assert_eq!(unmap(8 * MIB, 6 * MIB), INVALID, "a hole at the end");
        assert_eq!(unmap(0, 0), INVALID);
        assert_eq!(cuda.cuMemAddressFree(space, 16 * MIB), INVALID, "still mapped");
        ok(unmap(0, 8 * MIB));
        assert_eq!(unmap(0, 4 * MIB), INVALID, "twice");
        assert_eq!(cuda.free_bytes(), 60 * MIB, "the third mapping keeps it");
        // The handle that a mapping gives back is the one that it was made with.
        let again = retain(cuda, plus(space, 9 * MIB)).unwrap();
        assert_eq!(again, a);
        ok(map(0, 4 * MIB, 0, again, 0));
        ok(unmap(0, 4 * MIB));
        ok(unmap(8 * MIB, 4 * MIB));
        assert_eq!(cuda.free_bytes(), 60 * MIB, "the handle keeps it");
        assert_eq!(retain(cuda, plus(space, 9 * MIB)), Err(INVALID));
        ok(cuda.cuMemRelease(again));
        assert_eq!(cuda.cuMemRelease(again), INVALID);
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        ok(cuda.cuMemAddressFree(space, 16 * MIB));
    });
}

#[test]
fn references_are_counted() {
    alone("references_are_counted", SMALL, |cuda| {
        let space = cuda.reserve(2 * MIB);
        let a = cuda.create(2 * MIB);
        cuda.map(space, 2 * MIB, a);
        for _ in 0..3 {
            assert_eq!(retain(cuda, plus(space, 5)), Ok(a));
        }
        ok(cuda.cuMemUnmap(space, 2 * MIB));
        for _ in 0..4 {
            assert_eq!(cuda.free_bytes(), 62 * MIB);
            ok(cuda.cuMemRelease(a));
        }
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        assert_eq!(cuda.cuMemRelease(a), INVALID);
        assert_eq!(cuda.cuMemRetainAllocationHandle(null_mut(), null_mut()), INVALID);
    });
}

#[test]
fn access_rights() {
    alone("access_rights", TWO, |cuda| {
        let space = cuda.reserve(8 * MIB);
        let (a, b) = (cuda.create(2 * MIB), cuda.create(2 * MIB));
        ok(cuda.cuMemMap(space, 2 * MIB, 0, a, 0));
        ok(cuda.cuMemMap(plus(space, 4 * MIB), 2 * MIB, 0, b, 0));
        let on = |device, flags| CUmemAccessDesc {
            location: CUmemLocation::device(device),
            flags,
        };
        let both = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let set = |at: usize, size, list: &[CUmemAccessDesc]| {
            cuda.cuMemSetAccess(plus(space, at), size, list.as_ptr(), list.len())
        };
        let get = |device, at: usize| {
            let mut flags = 99_u64;
            cuda.cuMemGetAccess(&mut flags, &CUmemLocation::device(device), plus(space, at))
                .ok()
                .map(|()| flags)
        };
        assert_eq!(get(0, 0), Ok(0), "none at first");
        assert_eq!(
            set(0, 4 * MIB, &[on(0, both)]),
            INVALID,
            "half of it is not mapped"
        );
        assert_eq!(set(0, 6 * MIB, &[on(0, both)]), INVALID, "a hole in the middle");
        assert_eq!(set(2 * MIB, 2 * MIB, &[on(0, both)]), INVALID, "not mapped");
        assert_eq!(set(0, MIB, &[on(0, both)]), INVALID, "a part of a mapping");
        assert_eq!(set(0, 2 * MIB, &[]), INVALID);
        assert_eq!(set(0, 2 * MIB, &[on(0, CUmemAccess_flags(2))]), INVALID);
        assert_eq!(set(0, 2 * MIB, &[on(4, both)]), CUresult::ERROR_INVALID_DEVICE);
        let host = CUmemAccessDesc {
            location: CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_HOST,
                u: 0,
            },
            flags: both,
        };
        assert_eq!(set(0, 2 * MIB, &[on(0, both), host]), INVALID);
        assert_eq!(get(0, 0), Ok(0), "a refused call changes nothing");
        ok(set(
            0,
            2 * MIB,
            &[on(0, both), on(1, CU_MEM_ACCESS_FLAGS_PROT_READ)],
        ));
        assert_eq!((get(0, 5), get(1, 5)), (Ok(3), Ok(1)));
        assert_eq!(get(0, 2 * MIB), Err(INVALID), "not mapped");
        assert_eq!(get(9, 0), Err(CUresult::ERROR_INVALID_DEVICE));
        // What is mapped anew starts without rights.
        ok(cuda.cuMemUnmap(space, 2 * MIB));
        ok(cuda.cuMemMap(space, 2 * MIB, 0, a, 0));
        assert_eq!((get(0, 0), get(1, 0)), (Ok(0), Ok(0)));
        // Peer access between contexts is not for these: each device needs its own right.
        ok(set(4 * MIB, 2 * MIB, &[on(0, both)]));
        let (mut first, mut second) = (CUcontext::NULL, CUcontext::NULL);
        ok(cuda.cuCtxGetCurrent(&mut first));
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, CUdevice(1)));
        let plain = cuda.alloc(2 * MIB);
        ok(cuda.cuCtxSetCurrent(second));
        ok(cuda.cuCtxEnablePeerAccess(first, 0));
        assert_eq!(
            cuda.cuCtxEnablePeerAccess(first, 0),
            CUresult::ERROR_PEER_ACCESS_ALREADY_ENABLED
        );
        ok(cuda.cuMemsetD8Async(plain, 1, 16, NO_STREAM));
        ok(cuda.cuCtxSynchronize());
        ok(set(4 * MIB, 2 * MIB, &[on(1, CU_MEM_ACCESS_FLAGS_PROT_READ)]));
        assert_eq!(cuda.read(plus(space, 4 * MIB), 1), [0], "it may read");
        ok(cuda.cuMemsetD8Async(plus(space, 4 * MIB), 1, 16, NO_STREAM));
        assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_ILLEGAL_ADDRESS);
        // The other context is well.
        ok(cuda.cuCtxSetCurrent(first));
        ok(cuda.cuMemsetD8Async(plus(space, 4 * MIB), 1, 16, NO_STREAM));
        ok(cuda.cuCtxSynchronize());
    });
}

#[test]
fn exporting_and_importing() {
    alone("exporting_and_importing", SMALL, |cuda| {
        let plain = cuda.create(2 * MIB);
        assert_eq!(export(cuda, plain), Err(INVALID), "not asked for");
        ok(cuda.cuMemRelease(plain));
        let mut wish = exportable(cuda);
        wish.allocFlags[0] = 0x0100;
        let a = cuda.try_create(4 * MIB, &wish).unwrap();
        let mut fd = -1;
        let place = std::ptr::from_mut(&mut fd).cast();
        assert_eq!(cuda.cuMemExportToShareableHandle(place, a, POSIX, 1), INVALID);
        let fabric = CU_MEM_HANDLE_TYPE_FABRIC;
        assert_eq!(cuda.cuMemExportToShareableHandle(place, a, fabric, 0), INVALID);
        assert_eq!(
            cuda.cuMemExportToShareableHandle(null_mut(), a, POSIX, 0),
            INVALID
        );
        let fd = export(cuda, a).unwrap();
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
        assert_eq!(import(cuda, -1), Err(INVALID));
        assert_eq!(import(cuda, 0), Err(INVALID), "not the driver's");
        // Twice: two handles of one memory, each to be released.
        let (b, c) = (import(cuda, fd).unwrap(), import(cuda, fd).unwrap());
        assert!(a != b && b != c);
        assert_eq!(cuda.free_bytes(), 60 * MIB, "charged once");
        let mut back = CUmemAllocationProp::default();
        ok(cuda.cuMemGetAllocationPropertiesFromHandle(&mut back, b));
        assert_eq!(
            (back.location.id(), back.allocFlags[0], back.requestedHandleTypes),
            (0, 0x0100, POSIX)
        );
        let space = cuda.reserve(8 * MIB);
        cuda.map(space, 4 * MIB, a);
        cuda.map(plus(space, 4 * MIB), 4 * MIB, b);
        cuda.write(space, &[6; 9]);
        assert_eq!(cuda.read(plus(space, 4 * MIB), 9), [6; 9]);
        assert_eq!(retain(cuda, plus(space, 4 * MIB)), Ok(b));
        ok(cuda.cuMemRelease(b));
        ok(cuda.cuMemUnmap(space, 8 * MIB));
        for handle in [a, b, c] {
            assert_eq!(cuda.free_bytes(), 60 * MIB);
            ok(cuda.cuMemRelease(handle));
        }
        // The descriptor is the last that holds it, and it can be imported once more.
        assert_eq!(cuda.free_bytes(), 60 * MIB);
        let again = import(cuda, fd).unwrap();
        unsafe { libc::close(fd) };
        assert_eq!(cuda.free_bytes(), 60 * MIB);
        ok(cuda.cuMemRelease(again));
        assert_eq!(cuda.free_bytes(), 64 * MIB);
    });
}

#[test]
fn host_memory_of_a_node() {
    alone("host_memory_of_a_node", SMALL, |cuda| {
        let node = CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST_NUMA,
            u: 0,
        };
        let host = CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST,
            u: 0,
        };
        let make = |location, types| {
            let properties = CUmemAllocationProp {
                location,
                requestedHandleTypes: types,
                ..cuda.device_properties()
            };
            cuda.try_create(2 * MIB, &properties).unwrap()
        };
        let (a, b) = (make(node, POSIX), make(host, CU_MEM_HANDLE_TYPE_NONE));
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        let space = cuda.reserve(6 * MIB);
        ok(cuda.cuMemMap(space, 2 * MIB, 0, a, 0));
        ok(cuda.cuMemMap(plus(space, 2 * MIB), 2 * MIB, 0, b, 0));
        let set = |at: usize, location| {
            let access = CUmemAccessDesc {
                location,
                flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            cuda.cuMemSetAccess(plus(space, at), 2 * MIB, &access, 1)
        };
        ok(set(0, node));
        assert_eq!(set(2 * MIB, node), INVALID, "not made on a node");
        ok(set(2 * MIB, host));
        unsafe { (space.0 as *mut u8).write(3) };
        // Shared like a device's.
        let imported = import(cuda, export(cuda, a).unwrap()).unwrap();
        let mut back = CUmemAllocationProp::default();
        ok(cuda.cuMemGetAllocationPropertiesFromHandle(&mut back, imported));
        assert_eq!(back.location.type_, CU_MEM_LOCATION_TYPE_HOST_NUMA);
        ok(cuda.cuMemMap(plus(space, 4 * MIB), 2 * MIB, 0, imported, 0));
        ok(set(4 * MIB, node));
        assert_eq!(unsafe { (plus(space, 4 * MIB).0 as *const u8).read() }, 3);
        assert_eq!(cuda.free_bytes(), 64 * MIB);
    });
}

#[test]
fn dma_bufs() {
    alone("dma_bufs", SMALL, |cuda| {
        let kind = CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let get = |address, size, flags| {
            let mut fd = -1_i32;
            cuda.cuMemGetHandleForAddressRange(std::ptr::from_mut(&mut fd).cast(), address, size, kind, flags)
                .ok()
                .map(|()| fd)
        };
        let space = cuda.reserve(8 * MIB);
        let (a, b) = (cuda.create(2 * MIB), cuda.create(2 * MIB));
        cuda.map(space, 2 * MIB, a);
        cuda.map(plus(space, 2 * MIB), 2 * MIB, b);
        cuda.write(plus(space, MIB), b"seen from outside");
        let fd = get(plus(space, MIB), 2 * MIB, 0).unwrap();
        let mut seen = [0_u8; 17];
        let count = unsafe { libc::read(fd, seen.as_mut_ptr().cast(), seen.len()) };
        assert_eq!((count, &seen), (17, b"seen from outside"));
        unsafe { libc::close(fd) };
        assert_eq!(get(space, 6 * MIB, 0), Err(INVALID), "not all mapped");
        assert_eq!(get(plus(space, 8), 4096, 0), Err(INVALID), "off the page");
        assert_eq!(get(space, 100, 0), Err(INVALID), "not in pages");
        assert_eq!(get(space, 0, 0), Err(INVALID));
        assert_eq!(get(space, 4096, 8), Err(INVALID), "flags");
        let plain = cuda.alloc(4 * MIB);
        unsafe { libc::close(get(plain, 4 * MIB, 0).unwrap()) };
        assert_eq!(get(plain, 8 * MIB, 0), Err(INVALID));
        let local = 0_u8;
        assert_eq!(
            get(CUdeviceptr(std::ptr::from_ref(&local) as u64 & !4095), 4096, 0),
            Err(INVALID)
        );
    });
}
