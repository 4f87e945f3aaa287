//! Stream-ordered pools as the driver has them: figures, reuse, trimming, sharing, locations, and what becomes of them in a capture.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
const TWO: &[(&str, &str)] = &[("EBB_SIM_DEVICES", "2"), ("EBB_SIM_CONTEXT_BYTES", "0")];

fn figure(cuda: &Cuda, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> usize {
    let mut value = 0_u64;
    ok(cuda.cuMemPoolGetAttribute(pool, attribute, std::ptr::from_mut(&mut value).cast()));
    value as usize
}

fn number(cuda: &Cuda, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> i32 {
    let mut value = -77_i32;
    ok(cuda.cuMemPoolGetAttribute(pool, attribute, std::ptr::from_mut(&mut value).cast()));
    value
}

fn set<T>(cuda: &Cuda, pool: CUmemoryPool, attribute: CUmemPool_attribute, mut value: T) -> CUresult {
    cuda.cuMemPoolSetAttribute(pool, attribute, std::ptr::from_mut(&mut value).cast())
}

fn default(cuda: &Cuda) -> CUmemoryPool {
    let mut pool = CUmemoryPool::NULL;
    ok(cuda.cuDeviceGetDefaultMemPool(&mut pool, CUdevice(0)));
    pool
}

fn device_pool(device: i32) -> CUmemPoolProps {
    CUmemPoolProps {
        allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation::device(device),
        ..CUmemPoolProps::default()
    }
}

fn create(cuda: &Cuda, properties: &CUmemPoolProps) -> CUmemoryPool {
    let mut pool = CUmemoryPool::NULL;
    ok(cuda.cuMemPoolCreate(&mut pool, properties));
    pool
}

fn alloc(cuda: &Cuda, bytes: usize, stream: CUstream) -> CUdeviceptr {
    let mut address = CUdeviceptr::NULL;
    ok(cuda.cuMemAllocAsync(&mut address, bytes, stream));
    address
}

/// A stream that stands still until the flag is set.
fn held(cuda: &Cuda) -> (CUstream, CUdeviceptr) {
    let flag = cuda.alloc(4);
    ok(cuda.cuMemsetD32_v2(flag, 0, 1));
    ok(cuda.cuCtxSynchronize());
    let stream = cuda.stream(CU_STREAM_NON_BLOCKING.0);
    ok(cuda.launch(cuda.kernel("ebb_spin_until"), stream, &[flag.0]));
    (stream, flag)
}

/// Lets a held stream go on, without waiting for anything that it holds.
fn release(cuda: &Cuda, flag: CUdeviceptr) {
    let side = cuda.stream(CU_STREAM_NON_BLOCKING.0);
    ok(cuda.cuMemsetD32Async(flag, 1, 1, side));
    ok(cuda.cuStreamSynchronize(side));
}

#[test]
fn figures_and_marks() {
    alone("figures_and_marks", SMALL, |cuda| {
        let (pool, s) = (default(cuda), cuda.stream(0));
        let a = alloc(cuda, 3 * MIB, s);
        let b = alloc(cuda, 100, s);
        assert_eq!(
            figure(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT),
            3 * MIB + 512
        );
        // The small one found room behind the large one.
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 4 * MIB);
        ok(cuda.cuMemFreeAsync(a, s));
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 512);
        ok(cuda.cuMemFreeAsync(b, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 4 * MIB);
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 3 * MIB + 512);
        // A mark goes back to what is, and to nothing else.
        assert_eq!(set(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, 5_u64), INVALID);
        assert_eq!(set(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 0_u64), INVALID);
        assert_eq!(
            set(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, 0_u64),
            INVALID
        );
        ok(set(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0_u64));
        ok(set(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0_u64));
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 0);
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 0);
        // What a pool is.
        assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_ALLOCATION_TYPE), 1);
        assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES), 0);
        assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_LOCATION_TYPE), 1);
        assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_LOCATION_ID), 0);
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_MAX_POOL_SIZE), 0);
        assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC), 1);
        ok(set(cuda, pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 0_i32));
        assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC), 0);
        let mut value = 0_u64;
        let place = std::ptr::from_mut(&mut value).cast();
        assert_eq!(
            cuda.cuMemPoolGetAttribute(pool, CUmemPool_attribute(99), place),
            INVALID
        );
        assert_eq!(
            cuda.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, null_mut()),
            INVALID
        );
    });
}

#[test]
fn a_trim_sees_only_frees_that_the_host_has_seen() {
    alone("a_trim_sees_only_frees_that_the_host_has_seen", SMALL, |cuda| {
        let pool = default(cuda);
        ok(set(cuda, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX));
        let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        let reserved = || figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        let a = alloc(cuda, 8 * MIB, s);
        let b = alloc(cuda, 8 * MIB, s);
        ok(cuda.cuMemFreeAsync(a, s));
        // The free may be over, but the program has not asked.
        ok(cuda.cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 16 * MIB);
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(reserved(), 16 * MIB, "the threshold keeps it");
        ok(cuda.cuMemPoolTrimTo(pool, 9 * MIB));
        assert_eq!(reserved(), 16 * MIB, "8 would be less than asked for");
        ok(cuda.cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 8 * MIB, "what is in use stays");
        // An event that was waited for counts as well, and a query that says yes.
        ok(cuda.cuMemFreeAsync(b, s));
        let event = cuda.event();
        ok(cuda.cuEventRecord(event, s));
        ok(cuda.cuEventSynchronize(event));
        ok(cuda.cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 0);
        let c = alloc(cuda, 8 * MIB, s);
        ok(cuda.cuMemFreeAsync(c, s));
        eventually("the stream is idle", || {
            cuda.cuStreamQuery(s) == CUresult::SUCCESS
        });
        ok(cuda.cuMemPoolTrimTo(pool, 0));
        assert_eq!(reserved(), 0);
        assert_eq!(cuda.cuMemPoolTrimTo(CUmemoryPool(1), 0), INVALID);
    });
}

#[test]
fn reuse_between_streams() {
    alone("reuse_between_streams", SMALL, |cuda| {
        let pool = default(cuda);
        let (s, flag) = held(cuda);
        let other = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        let a = alloc(cuda, 8 * MIB, s);
        ok(cuda.cuMemFreeAsync(a, s));
        // Another stream does not get it while the free is ahead.
        let b = alloc(cuda, 8 * MIB, other);
        assert_ne!(a, b);
        ok(cuda.cuMemFreeAsync(b, other));
        // It does when it was made to wait for the free.
        let third = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        let event = cuda.event();
        ok(cuda.cuEventRecord(event, s));
        ok(cuda.cuStreamWaitEvent(third, event, 0));
        ok(set(cuda, pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 0_i32));
        assert_eq!(alloc(cuda, 8 * MIB, third), a);
        ok(cuda.cuMemFreeAsync(a, third));
        // Without room, the allocating stream is made to wait for what another will free.
        let fourth = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        let rest = cuda.free_bytes();
        let filler = cuda.alloc(rest);
        let late = alloc(cuda, 8 * MIB, fourth);
        assert!(late == a || late == b);
        ok(cuda.cuMemsetD8Async(late, 1, 8 * MIB, fourth));
        release(cuda, flag);
        ok(cuda.cuStreamSynchronize(fourth));
        ok(cuda.cuMemFree_v2(filler));
        assert_eq!(cuda.read(late, 2), [1, 1]);
    });
}

#[test]
fn freed_in_part_order_and_split() {
    alone("freed_in_part_order_and_split", SMALL, |cuda| {
        let s = cuda.stream(0);
        let a = alloc(cuda, 8 * MIB, s);
        ok(cuda.cuMemFreeAsync(a, s));
        // The same stream cuts smaller pieces out of what it freed.
        assert_eq!(alloc(cuda, 2 * MIB, s), a);
        assert_eq!(alloc(cuda, 6 * MIB, s), plus(a, 2 * MIB));
        assert_eq!(cuda.cuMemFreeAsync(plus(a, MIB), s), INVALID, "an inner address");
        ok(cuda.cuMemFreeAsync(CUdeviceptr::NULL, s));
        ok(cuda.cuMemFreeAsync(a, s));
        assert_eq!(cuda.cuMemFreeAsync(a, s), INVALID, "freed twice");
        assert_eq!(cuda.cuMemFree_v2(a), INVALID);
        let mut out = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocAsync(&mut out, 0, s));
        ok(cuda.cuMemFreeAsync(out, s));
        assert_eq!(cuda.cuMemAllocAsync(null_mut(), 8, s), INVALID);
    });
}

#[test]
fn what_pools_keep_makes_room_for_the_same_process() {
    alone("what_pools_keep_makes_room_for_the_same_process", SMALL, |cuda| {
        let pool = default(cuda);
        ok(set(cuda, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX));
        let s = cuda.stream(0);
        let a = alloc(cuda, 40 * MIB, s);
        ok(cuda.cuMemFreeAsync(a, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(cuda.free_bytes(), 24 * MIB);
        let large = cuda.alloc(60 * MIB);
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
        ok(cuda.cuMemFree_v2(large));
    });
}

#[test]
fn a_free_of_pool_memory_does_not_wait() {
    alone("a_free_of_pool_memory_does_not_wait", SMALL, |cuda| {
        let quiet = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        let a = alloc(cuda, 4 * MIB, quiet);
        ok(cuda.cuStreamSynchronize(quiet));
        let (s, flag) = held(cuda);
        ok(cuda.cuMemFree_v2(a));
        assert_eq!(cuda.cuStreamQuery(s), CUresult::ERROR_NOT_READY);
        release(cuda, flag);
    });
}

#[test]
fn own_pools_and_current_ones() {
    alone("own_pools_and_current_ones", TWO, |cuda| {
        let mut properties = device_pool(0);
        properties.maxSize = 3 * MIB;
        let pool = create(cuda, &properties);
        assert_eq!(
            figure(cuda, pool, CU_MEMPOOL_ATTR_MAX_POOL_SIZE),
            4 * MIB,
            "in whole blocks"
        );
        let s = cuda.stream(0);
        let mut a = CUdeviceptr::NULL;
        let oom = CUresult::ERROR_OUT_OF_MEMORY;
        assert_eq!(cuda.cuMemAllocFromPoolAsync(&mut a, 6 * MIB, pool, s), oom);
        ok(cuda.cuMemAllocFromPoolAsync(&mut a, 4 * MIB, pool, s));
        let mut b = CUdeviceptr::NULL;
        assert_eq!(cuda.cuMemAllocFromPoolAsync(&mut b, 512, pool, s), oom);
        assert_eq!(cuda.attribute(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, a), Ok(pool));
        ok(cuda.cuMemFreeAsync(a, s));
        // The current pool of a device is what calls without a pool use.
        let mut current = CUmemoryPool::NULL;
        ok(cuda.cuDeviceGetMemPool(&mut current, CUdevice(0)));
        assert_eq!(current, default(cuda));
        ok(cuda.cuDeviceSetMemPool(CUdevice(0), pool));
        assert_eq!(cuda.cuDeviceSetMemPool(CUdevice(1), pool), INVALID);
        let c = alloc(cuda, 100, s);
        assert_eq!(cuda.attribute(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, c), Ok(pool));
        let mut location = CUmemLocation::device(0);
        ok(cuda.cuMemGetMemPool(&mut current, &mut location, CU_MEM_ALLOCATION_TYPE_PINNED));
        assert_eq!(current, pool);
        // Destroying it makes the default current again, though a piece still lives.
        ok(cuda.cuMemPoolDestroy(pool));
        assert_eq!(cuda.cuMemPoolDestroy(pool), INVALID);
        ok(cuda.cuDeviceGetMemPool(&mut current, CUdevice(0)));
        assert_eq!(current, default(cuda));
        assert_eq!(cuda.cuMemPoolDestroy(current), INVALID);
        cuda.write(c, &[5; 100]);
        ok(cuda.cuMemFreeAsync(c, s));
        ok(cuda.cuStreamSynchronize(s));
        let mut wrong = device_pool(7);
        assert_eq!(
            cuda.cuMemPoolCreate(&mut current, &wrong),
            CUresult::ERROR_INVALID_DEVICE
        );
        wrong = CUmemPoolProps::default();
        assert_eq!(cuda.cuMemPoolCreate(&mut current, &wrong), INVALID);
    });
}

#[test]
fn pools_by_location() {
    alone("pools_by_location", TWO, |cuda| {
        let pinned = CU_MEM_ALLOCATION_TYPE_PINNED;
        let mut pool = CUmemoryPool::NULL;
        for (kind, id) in [
            (CU_MEM_LOCATION_TYPE_DEVICE, 1),
            (CU_MEM_LOCATION_TYPE_HOST, 0),
            (CU_MEM_LOCATION_TYPE_HOST_NUMA, 0),
        ] {
            let mut location = CUmemLocation { type_: kind, u: id };
            ok(cuda.cuMemGetDefaultMemPool(&mut pool, &mut location, pinned));
            assert_eq!(number(cuda, pool, CU_MEMPOOL_ATTR_LOCATION_TYPE), kind.0 as i32);
            let mut own = device_pool(0);
            own.location = location;
            let own = create(cuda, &own);
            ok(cuda.cuMemSetMemPool(&mut location, pinned, own));
            let mut current = CUmemoryPool::NULL;
            ok(cuda.cuMemGetMemPool(&mut current, &mut location, pinned));
            assert_eq!(current, own);
            let managed = CU_MEM_ALLOCATION_TYPE_MANAGED;
            assert_eq!(
                cuda.cuMemGetDefaultMemPool(&mut pool, &mut location, managed),
                CUresult::ERROR_NOT_SUPPORTED
            );
        }
        let mut nowhere = CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT,
            u: 0,
        };
        assert_eq!(
            cuda.cuMemGetDefaultMemPool(&mut pool, &mut nowhere, pinned),
            INVALID
        );
        // Host memory costs the device nothing; the processor reaches it at once, the device when it may.
        let mut host = device_pool(0);
        host.location = CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST,
            u: 0,
        };
        host.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        assert_eq!(
            cuda.cuMemPoolCreate(&mut pool, &host),
            INVALID,
            "not to be shared"
        );
        host.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
        let pool = create(cuda, &host);
        let (s, before) = (cuda.stream(0), cuda.free_bytes());
        let mut a = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocFromPoolAsync(&mut a, 4 * MIB, pool, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(cuda.free_bytes(), before);
        unsafe { (a.0 as *mut u32).write(7) };
        let access = CUmemAccessDesc {
            location: CUmemLocation::device(0),
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        ok(cuda.cuMemPoolSetAccess(pool, &access, 1));
        ok(cuda.cuMemsetD32Async(plus(a, 4), 8, 1, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(unsafe { (a.0 as *const [u32; 2]).read() }, [7, 8]);
        ok(cuda.cuMemFreeAsync(a, s));
    });
}

#[test]
fn access_of_peers() {
    alone("access_of_peers", TWO, |cuda| {
        let pool = default(cuda);
        let s = cuda.stream(0);
        let a = alloc(cuda, MIB, s);
        ok(cuda.cuStreamSynchronize(s));
        let mut flags = CUmemAccess_flags(9);
        let mut location = CUmemLocation::device(1);
        ok(cuda.cuMemPoolGetAccess(&mut flags, pool, &mut location));
        assert_eq!(flags.0, 0);
        let on = |device, flags| CUmemAccessDesc {
            location: CUmemLocation::device(device),
            flags,
        };
        let none = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        let both = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        assert_eq!(
            cuda.cuMemPoolSetAccess(pool, &on(0, none), 1),
            INVALID,
            "its own device"
        );
        assert_eq!(
            cuda.cuMemPoolSetAccess(pool, &on(5, both), 1),
            CUresult::ERROR_INVALID_DEVICE
        );
        let host = CUmemAccessDesc {
            location: CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_HOST,
                u: 0,
            },
            flags: both,
        };
        assert_eq!(cuda.cuMemPoolSetAccess(pool, &host, 1), INVALID);
        ok(cuda.cuMemPoolSetAccess(pool, &on(1, both), 1));
        ok(cuda.cuMemPoolGetAccess(&mut flags, pool, &mut location));
        assert_eq!(flags, both);
        // What exists and what comes are both for the other device, until it is taken back.
        let b = alloc(cuda, 32 * MIB, s);
        let mut second = CUcontext::NULL;
        ok(cuda.cuStreamSynchronize(s));
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, CUdevice(1)));
        ok(cuda.cuCtxSetCurrent(second));
        for address in [a, b] {
            ok(cuda.cuMemsetD8Async(address, 3, 16, NO_STREAM));
        }
        ok(cuda.cuCtxSynchronize());
        ok(cuda.cuMemPoolSetAccess(pool, &on(1, none), 1));
        ok(cuda.cuMemsetD8Async(a, 3, 16, NO_STREAM));
        assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn a_capture_makes_nodes() {
    alone("a_capture_makes_nodes", SMALL, |cuda| {
        let (pool, s) = (default(cuda), cuda.stream(CU_STREAM_NON_BLOCKING.0));
        let graph_figure = |attribute| {
            let mut value = 0_u64;
            ok(cuda.cuDeviceGetGraphMemAttribute(
                CUdevice(0),
                attribute,
                std::ptr::from_mut(&mut value).cast(),
            ));
            value as usize
        };
        let used = || graph_figure(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
        let reserved = || graph_figure(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
        ok(cuda.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        let a = alloc(cuda, 4 * MIB, s);
        ok(cuda.cuMemsetD8Async(a, 9, 4 * MIB, s));
        let outside = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        assert_eq!(cuda.cuMemFreeAsync(a, outside), INVALID, "not made yet");
        ok(cuda.cuMemFreeAsync(a, s));
        let mut graph = CUgraph::NULL;
        ok(cuda.cuStreamEndCapture(s, &mut graph));
        let mut count = 0;
        ok(cuda.cuGraphGetNodes(graph, null_mut(), &mut count));
        assert_eq!(count, 3);
        assert_eq!(figure(cuda, pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
        assert_eq!((used(), reserved()), (0, 0));
        let mut exec = CUgraphExec::NULL;
        ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        for _ in 0..3 {
            ok(cuda.cuGraphLaunch(exec, s));
            ok(cuda.cuStreamSynchronize(s));
        }
        // The device keeps it for the next launch until it is trimmed.
        assert_eq!((used(), reserved()), (0, 4 * MIB));
        assert_eq!(cuda.free_bytes(), 60 * MIB);
        assert_eq!(graph_figure(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 4 * MIB);
        ok(cuda.cuDeviceGraphMemTrim(CUdevice(0)));
        assert_eq!(reserved(), 0);
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        let mut zero = 0_u64;
        ok(cuda.cuDeviceSetGraphMemAttribute(
            CUdevice(0),
            CU_GRAPH_MEM_ATTR_USED_MEM_HIGH,
            std::ptr::from_mut(&mut zero).cast(),
        ));
        assert_eq!(graph_figure(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH), 0);
        assert_eq!(
            cuda.cuDeviceSetGraphMemAttribute(
                CUdevice(0),
                CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT,
                std::ptr::from_mut(&mut zero).cast(),
            ),
            INVALID
        );
    });
}

#[test]
fn pools_between_processes() {
    let posix = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if plays("owner") {
        let cuda = Cuda::start();
        let s = cuda.stream(0);
        let mut fd = -1;
        let place: *mut c_void = std::ptr::from_mut(&mut fd).cast();
        assert_eq!(
            cuda.cuMemPoolExportToShareableHandle(place, default(&cuda), posix, 0),
            INVALID
        );
        let mut data = CUmemPoolPtrExportData { reserved: [0; 64] };
        let private = alloc(&cuda, 100, s);
        assert_eq!(cuda.cuMemPoolExportPointer(&mut data, private), INVALID);
        let pool = create(
            &cuda,
            &CUmemPoolProps {
                handleTypes: posix,
                ..device_pool(0)
            },
        );
        assert_eq!(
            number(&cuda, pool, CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES),
            posix.0 as i32
        );
        assert_eq!(
            cuda.cuMemPoolExportToShareableHandle(place, pool, posix, 1),
            INVALID
        );
        ok(cuda.cuMemPoolExportToShareableHandle(place, pool, posix, 0));
        say(&fd.to_string());
        let mut pad = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocFromPoolAsync(&mut pad, 1000, pool, s));
        let mut piece = CUdeviceptr::NULL;
        ok(cuda.cuMemAllocFromPoolAsync(&mut piece, 6 * MIB, pool, s));
        ok(cuda.cuStreamSynchronize(s));
        cuda.write(piece, b"from the owner");
        ok(cuda.cuMemPoolExportPointer(&mut data, piece));
        say(&hex(&data.reserved.map(|byte| byte as c_char)));
        assert_eq!(hear(), "read it");
        assert_eq!(cuda.read(piece, 14), b"FROM the owner");
        ok(cuda.cuMemFreeAsync(piece, s));
        ok(cuda.cuStreamSynchronize(s));
        say("freed");
        hear();
        return;
    }
    if plays("guest") {
        let cuda = Cuda::start();
        let fd: usize = std::env::var("EBB_SIM_TEST_FD").unwrap().parse().unwrap();
        let mut data = CUmemPoolPtrExportData {
            reserved: unhex(&hear()).map(|byte| byte as u8),
        };
        let mut pool = CUmemoryPool::NULL;
        assert_eq!(
            cuda.cuMemPoolImportFromShareableHandle(&mut pool, null_mut(), posix, 0),
            INVALID
        );
        ok(cuda.cuMemPoolImportFromShareableHandle(&mut pool, fd as *mut c_void, posix, 0));
        let (s, mut piece) = (cuda.stream(0), CUdeviceptr::NULL);
        // An imported pool gives nothing out, is not exported again, and is nobody's current pool.
        assert_eq!(cuda.cuMemAllocFromPoolAsync(&mut piece, 8, pool, s), INVALID);
        assert_eq!(cuda.cuDeviceSetMemPool(CUdevice(0), pool), INVALID);
        assert_eq!(number(&cuda, pool, CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES), 0);
        assert_eq!(
            cuda.cuMemPoolImportPointer(&mut piece, default(&cuda), &mut data),
            INVALID
        );
        ok(cuda.cuMemPoolImportPointer(&mut piece, pool, &mut data));
        assert_eq!(cuda.read(piece, 14), b"from the owner");
        cuda.write(piece, b"FROM");
        assert_eq!(
            cuda.attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, piece),
            Ok(6 * MIB)
        );
        say("read");
        hear();
        // The owner has freed it meanwhile: the bytes are this process's to let go.
        assert_eq!(cuda.read(piece, 14), b"FROM the owner");
        ok(cuda.cuMemFreeAsync(piece, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(cuda.cuMemFreeAsync(piece, s), INVALID);
        ok(cuda.cuMemPoolDestroy(pool));
        say("gone");
        hear();
        return;
    }
    let dir = state_dir();
    let test = "pools_between_processes";
    let variables = [("EBB_SIM_MEMORY", "256Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
    let mut owner = Actor::start(command(test, "owner", dir.path(), &variables));
    let remote: i32 = owner.hear().parse().unwrap();
    let data = owner.hear();
    let fd = fetch_fd(owner.child.id(), remote);
    let mut guest = command(test, "guest", dir.path(), &variables);
    guest.env("EBB_SIM_TEST_FD", fd.to_string());
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut guest, move || {
            libc::fcntl(fd, libc::F_SETFD, 0);
            Ok(())
        });
    }
    let mut guest = Actor::start(guest);
    unsafe { libc::close(fd) };
    guest.tell(&data);
    assert_eq!(guest.hear(), "read");
    let machine = machine(dir.path());
    // The private pool's block, and the shared pool's two: nothing is charged twice.
    assert_eq!(machine.usage(0).used as usize, (2 + 2 + 6) * MIB);
    owner.tell("read it");
    assert_eq!(owner.hear(), "freed");
    assert_eq!(
        machine.usage(0).used as usize,
        (2 + 2 + 6) * MIB,
        "the guest holds it"
    );
    guest.tell("let go");
    assert_eq!(guest.hear(), "gone");
    assert_eq!(machine.usage(0).used as usize, (2 + 2) * MIB);
}
