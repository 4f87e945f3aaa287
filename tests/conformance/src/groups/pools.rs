//! Stream-ordered memory: `cuMemAllocAsync`, pools and their attributes.

use ebb_abi::*;

use crate::behaviour::{Behaviour, Need};
use crate::driver::Driver;
use crate::helpers::*;
use crate::observe::Test;

fn take(cu: Driver, bytes: usize, stream: CUstream) -> Result<CUdeviceptr, CUresult> {
    let mut address = CUdeviceptr::NULL;
    match cu.cuMemAllocAsync(&mut address, bytes, stream) {
        CUresult::SUCCESS => Ok(address),
        code => Err(code),
    }
}

fn default_pool(cu: Driver) -> CUmemoryPool {
    let mut pool = CUmemoryPool::NULL;
    must(
        "cuDeviceGetDefaultMemPool",
        cu.cuDeviceGetDefaultMemPool(&mut pool, CUdevice(0)),
    );
    pool
}

fn properties() -> CUmemPoolProps {
    CUmemPoolProps {
        allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation::device(0),
        ..CUmemPoolProps::default()
    }
}

#[track_caller]
fn own_pool(cu: Driver) -> CUmemoryPool {
    let mut pool = CUmemoryPool::NULL;
    must("cuMemPoolCreate", cu.cuMemPoolCreate(&mut pool, &properties()));
    pool
}

fn from_pool(cu: Driver, bytes: usize, pool: CUmemoryPool) -> Result<CUdeviceptr, CUresult> {
    let mut address = CUdeviceptr::NULL;
    match cu.cuMemAllocFromPoolAsync(&mut address, bytes, pool, NO_STREAM) {
        CUresult::SUCCESS => Ok(address),
        code => Err(code),
    }
}

fn figure(cu: Driver, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> Result<u64, CUresult> {
    let mut value = 0_u64;
    match cu.cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) {
        CUresult::SUCCESS => Ok(value),
        code => Err(code),
    }
}

fn set(cu: Driver, pool: CUmemoryPool, attribute: CUmemPool_attribute, value: u64) -> CUresult {
    let mut value = value;
    cu.cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast())
}

const USED: CUmemPool_attribute = CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
const USED_HIGH: CUmemPool_attribute = CU_MEMPOOL_ATTR_USED_MEM_HIGH;
const RESERVED: CUmemPool_attribute = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
const THRESHOLD: CUmemPool_attribute = CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;

/// The switches of a pool, set to zero and back.
fn switch(t: &mut Test, cu: Driver, attribute: CUmemPool_attribute) {
    let pool = own_pool(cu);
    let get = || {
        let mut value = 77_i32;
        let code = cu.cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast());
        (code, value)
    };
    t.see("at first", get().1);
    let mut zero = 0_i32;
    t.code(
        "set",
        cu.cuMemPoolSetAttribute(pool, attribute, (&raw mut zero).cast()),
    );
    t.see("then", get().1);
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "async.there_and_back",
        "Stream-ordered memory is taken, used and freed in a stream",
        |t, cu| {
            let stream = cu.stream();
            let address = take(cu, 3 * MIB, stream);
            t.see("alloc", either(address.map(|_| "memory")));
            let Ok(address) = address else { return };
            t.code("fill", cu.cuMemsetD8Async(address, 0x33, 3 * MIB, stream));
            t.code("wait", cu.cuStreamSynchronize(stream));
            t.see("bytes", compare(&cu.read(address, 3 * MIB), &vec![0x33; 3 * MIB]));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            t.code("wait", cu.cuStreamSynchronize(stream));
        },
    )
    .fact(&[
        "alloc: \"memory\"",
        "fill: SUCCESS",
        "wait: SUCCESS",
        "bytes: right",
        "free: SUCCESS",
        "wait: SUCCESS",
    ]),
    Behaviour::new(
        "async.zero_size_is_memory",
        "No bytes are given like any other number, no place is refused",
        |t, cu| {
            t.see("no bytes", either(take(cu, 0, NO_STREAM).map(|_| "memory")));
            t.code("no place", cu.cuMemAllocAsync(std::ptr::null_mut(), 64, NO_STREAM));
        },
    )
    .fact(&["no bytes: \"memory\"", "no place: INVALID_VALUE"]),
    Behaviour::new(
        "async.more_than_the_card",
        "More than the card has is out of memory",
        |t, cu| {
            t.see("2^45", either(take(cu, 1 << 45, NO_STREAM).map(|_| "memory")));
            let after = take(cu, MIB, NO_STREAM);
            t.see("after", either(after.map(|_| "memory")));
        },
    )
    .fact(&["2^45: OUT_OF_MEMORY", "after: \"memory\""]),
    Behaviour::new(
        "async.free_by_the_plain_free",
        "cuMemFree takes stream-ordered memory",
        |t, cu| {
            let address = take(cu, MIB, NO_STREAM).expect("memory");
            t.code("free", cu.cuMemFree_v2(address));
            t.code("again", cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "async.plain_memory_by_the_stream_ordered_free",
        "cuMemFreeAsync takes cuMemAlloc memory",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            t.code("free", cu.cuMemFreeAsync(address, NO_STREAM));
            cu.sync();
            t.code("again", cu.cuMemFree_v2(address));
        },
    )
    .fact(&["free: SUCCESS", "again: INVALID_VALUE"]),
    Behaviour::new(
        "async.plain_memory_is_freed_in_order",
        "Work before a cuMemFreeAsync of cuMemAlloc memory still sees it",
        |t, cu| {
            let stream = cu.stream();
            let (address, kept) = (cu.alloc(4 * MIB), cu.alloc(4 * MIB));
            let spin = cu.kernel("ebb_spin");
            must("launch", cu.launch(spin, stream, &[20_000_000]));
            must("memset", cu.cuMemsetD8Async(address, 7, 4 * MIB, stream));
            must("copy", cu.cuMemcpyDtoDAsync_v2(kept, address, 4 * MIB, stream));
            t.code("free", cu.cuMemFreeAsync(address, stream));
            t.code("wait", cu.cuStreamSynchronize(stream));
            t.see("bytes", compare(&cu.read(kept, 4 * MIB), &vec![7; 4 * MIB]));
        },
    )
    .fact(&["free: SUCCESS", "wait: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "async.free_misuse",
        "Nothing, inner addresses, unknown ones, twice",
        |t, cu| {
            t.code("null", cu.cuMemFreeAsync(CUdeviceptr::NULL, NO_STREAM));
            let address = take(cu, 4 * MIB, NO_STREAM).expect("memory");
            t.code("inner", cu.cuMemFreeAsync(plus(address, 512), NO_STREAM));
            t.code("unknown", cu.cuMemFreeAsync(CUdeviceptr(0x1000), NO_STREAM));
            t.code("right", cu.cuMemFreeAsync(address, NO_STREAM));
            cu.sync();
            t.code("again", cu.cuMemFreeAsync(address, NO_STREAM));
        },
    ),
    Behaviour::new(
        "async.alloc_does_not_wait_for_the_stream",
        "An allocation returns while the stream still works",
        |t, cu| {
            // From a warm pool, so that nothing has to be mapped first.
            let stream = cu.stream();
            let warm = take(cu, MIB, stream).expect("memory");
            must("free", cu.cuMemFreeAsync(warm, stream));
            block(cu, stream);
            let address = take(cu, MIB, stream);
            t.see("alloc", either(address.map(|_| "memory")));
            if let Ok(address) = address {
                t.code("fill", cu.cuMemsetD8Async(address, 4, MIB, stream));
                t.code("free", cu.cuMemFreeAsync(address, stream));
            }
            t.code("stream", cu.cuStreamQuery(stream));
            unblock();
            t.code("wait", cu.cuStreamSynchronize(stream));
        },
    )
    .fact(&[
        "alloc: \"memory\"",
        "fill: SUCCESS",
        "free: SUCCESS",
        "stream: NOT_READY",
        "wait: SUCCESS",
    ]),
    Behaviour::new(
        "async.other_stream_after_an_event",
        "Another stream uses the memory after an event, and frees it",
        |t, cu| {
            let (a, b, event) = (cu.stream(), cu.stream(), cu.event());
            let address = take(cu, MIB, a).expect("memory");
            must("memset", cu.cuMemsetD8Async(address, 5, MIB, a));
            must("record", cu.cuEventRecord(event, a));
            t.code("wait", cu.cuStreamWaitEvent(b, event, 0));
            let kept = cu.alloc(MIB);
            must("copy", cu.cuMemcpyDtoDAsync_v2(kept, address, MIB, b));
            t.code("free", cu.cuMemFreeAsync(address, b));
            must("sync", cu.cuStreamSynchronize(b));
            t.see("bytes", compare(&cu.read(kept, MIB), &vec![5; MIB]));
        },
    )
    .fact(&["wait: SUCCESS", "free: SUCCESS", "bytes: right"]),
    Behaviour::new(
        "async.freed_memory_is_used_again_in_the_stream",
        "The same stream gets the same memory at once",
        |t, cu| {
            let stream = cu.stream();
            let first = take(cu, 4 * MIB, stream).expect("memory");
            must("free", cu.cuMemFreeAsync(first, stream));
            let second = take(cu, 4 * MIB, stream).expect("memory");
            t.see("the same address", first == second);
        },
    )
    .fact(&["the same address: true"]),
    Behaviour::new(
        "async.legacy_and_per_thread_streams",
        "All default streams take and free memory",
        |t, cu| {
            for (label, stream) in [
                ("null", NO_STREAM),
                ("legacy", CU_STREAM_LEGACY),
                ("per thread", CU_STREAM_PER_THREAD),
            ] {
                let address = take(cu, MIB, stream);
                t.see(label, either(address.map(|_| "memory")));
                if let Ok(address) = address {
                    t.code("free", cu.cuMemFreeAsync(address, stream));
                }
            }
            cu.sync();
        },
    ),
    Behaviour::new(
        "async.per_thread_symbols",
        "The _ptsz symbols take and free memory",
        |t, cu| {
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAllocAsync_ptsz(&mut address, MIB, NO_STREAM));
            t.code("fill", cu.cuMemsetD8Async_ptsz(address, 3, MIB, NO_STREAM));
            t.code("free", cu.cuMemFreeAsync_ptsz(address, NO_STREAM));
            t.code("wait", cu.cuStreamSynchronize_ptsz(NO_STREAM));
        },
    )
    .fact(&[
        "alloc: SUCCESS",
        "fill: SUCCESS",
        "free: SUCCESS",
        "wait: SUCCESS",
    ]),
    Behaviour::new(
        "async.range_of_it",
        "The range of stream-ordered memory is what was asked for",
        |t, cu| {
            let address = take(cu, 5 * MIB + 3, NO_STREAM).expect("memory");
            cu.sync();
            t.see("range", either(cu.range(plus(address, MIB))));
        },
    ),
    Behaviour::new(
        "async.needs_a_context",
        "Without a current context there is no memory",
        |t, cu| {
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(CUcontext::NULL));
            t.see("alloc", either(take(cu, MIB, NO_STREAM).map(|_| "memory")));
        },
    ),
    Behaviour::new(
        "async.many_small_ones_are_apart",
        "Two hundred small ones have their own bytes",
        |t, cu| {
            let all: Vec<CUdeviceptr> = (0..200)
                .map(|_| take(cu, 1000, NO_STREAM).expect("memory"))
                .collect();
            let mut sorted: Vec<u64> = all.iter().map(|a| a.0).collect();
            sorted.sort_unstable();
            t.see("apart", sorted.windows(2).all(|pair| pair[1] - pair[0] >= 1000));
            t.see("aligned to 512", sorted.iter().all(|a| a % 512 == 0));
            let freed = all
                .iter()
                .filter(|a| cu.cuMemFreeAsync(**a, NO_STREAM) == CUresult::SUCCESS)
                .count();
            t.see("freed", freed);
            cu.sync();
        },
    )
    .fact(&["apart: true", "aligned to 512: true", "freed: 200"]),
    Behaviour::new(
        "pool.supported",
        "The device says that it has pools",
        |t, cu| {
            let mut value = 0;
            t.code(
                "ask",
                cu.cuDeviceGetAttribute(
                    &mut value,
                    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
                    CUdevice(0),
                ),
            );
            t.see("pools", value);
        },
    )
    .fact(&["ask: SUCCESS", "pools: 1"]),
    Behaviour::new(
        "pool.default_is_the_current_one",
        "At first a device's pool is its default pool",
        |t, cu| {
            let mut current = CUmemoryPool::NULL;
            t.code("get", cu.cuDeviceGetMemPool(&mut current, CUdevice(0)));
            t.see("the same", current == default_pool(cu));
        },
    )
    .fact(&["get: SUCCESS", "the same: true"]),
    Behaviour::new(
        "pool.current_can_be_set",
        "cuMemAllocAsync takes from the pool that was set",
        |t, cu| {
            let pool = own_pool(cu);
            t.code("set", cu.cuDeviceSetMemPool(CUdevice(0), pool));
            let mut current = CUmemoryPool::NULL;
            must("get", cu.cuDeviceGetMemPool(&mut current, CUdevice(0)));
            t.see("got", current == pool);
            let address = take(cu, 4 * MIB, NO_STREAM).expect("memory");
            cu.sync();
            t.see("used", either(figure(cu, pool, USED)));
            let of = cu.attribute::<u64>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address);
            t.see("its pool", either(of.map(|of| of == pool.0 as u64)));
            t.code("free", cu.cuMemFreeAsync(address, NO_STREAM));
        },
    )
    .fact(&[
        "set: SUCCESS",
        "got: true",
        "used: 4194304",
        "its pool: true",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "pool.used_follows_allocations",
        "USED and USED_HIGH tell what is taken",
        |t, cu| {
            let pool = own_pool(cu);
            t.see("at first", either(figure(cu, pool, USED)));
            let a = from_pool(cu, 4 * MIB, pool).expect("memory");
            let b = from_pool(cu, 2 * MIB, pool).expect("memory");
            t.see("two", either(figure(cu, pool, USED)));
            must("free", cu.cuMemFreeAsync(a, NO_STREAM));
            cu.sync();
            t.see("one", either(figure(cu, pool, USED)));
            t.see("most", either(figure(cu, pool, USED_HIGH)));
            must("free", cu.cuMemFreeAsync(b, NO_STREAM));
            cu.sync();
            t.see("none", either(figure(cu, pool, USED)));
        },
    )
    .fact(&[
        "at first: 0",
        "two: 6291456",
        "one: 2097152",
        "most: 6291456",
        "none: 0",
    ]),
    Behaviour::new(
        "pool.high_marks_can_be_reset",
        "USED_HIGH can be set to zero and nothing else",
        |t, cu| {
            let pool = own_pool(cu);
            let a = from_pool(cu, 4 * MIB, pool).expect("memory");
            must("free", cu.cuMemFreeAsync(a, NO_STREAM));
            cu.sync();
            t.code("to 5", set(cu, pool, USED_HIGH, 5));
            t.code("to 0", set(cu, pool, USED_HIGH, 0));
            t.see("then", either(figure(cu, pool, USED_HIGH)));
            t.code("used", set(cu, pool, USED, 0));
        },
    ),
    Behaviour::new(
        "pool.reserved_is_at_least_used",
        "RESERVED covers USED",
        |t, cu| {
            let pool = own_pool(cu);
            let _held = from_pool(cu, 3 * MIB, pool).expect("memory");
            let (used, reserved) = (figure(cu, pool, USED), figure(cu, pool, RESERVED));
            t.see(
                "covers",
                matches!((used, reserved), (Ok(used), Ok(reserved)) if reserved >= used && used >= 3 * MIB as u64),
            );
        },
    )
    .fact(&["covers: true"]),
    Behaviour::new(
        "pool.gives_back_at_a_synchronisation",
        "With a threshold of zero nothing is kept after a synchronisation",
        |t, cu| {
            let pool = own_pool(cu);
            let a = from_pool(cu, 32 * MIB, pool).expect("memory");
            must("free", cu.cuMemFreeAsync(a, NO_STREAM));
            must("sync", cu.cuStreamSynchronize(NO_STREAM));
            cu.sync();
            t.see("reserved", either(figure(cu, pool, RESERVED)));
        },
    )
    .fact(&["reserved: 0"]),
    Behaviour::new(
        "pool.threshold_keeps_memory",
        "Below the release threshold memory is kept over a synchronisation, until trimmed",
        |t, cu| {
            let pool = own_pool(cu);
            t.see("at first", either(figure(cu, pool, THRESHOLD)));
            t.code("set", set(cu, pool, THRESHOLD, u64::MAX));
            t.see(
                "seen",
                either(figure(cu, pool, THRESHOLD).map(|v| v == u64::MAX)),
            );
            let a = from_pool(cu, 32 * MIB, pool).expect("memory");
            must("free", cu.cuMemFreeAsync(a, NO_STREAM));
            cu.sync();
            t.see(
                "kept",
                either(figure(cu, pool, RESERVED).map(|v| v >= 32 * MIB as u64)),
            );
            t.code("trim", cu.cuMemPoolTrimTo(pool, 0));
            t.see("after", either(figure(cu, pool, RESERVED)));
        },
    )
    .fact(&[
        "at first: 0",
        "set: SUCCESS",
        "seen: true",
        "kept: true",
        "trim: SUCCESS",
        "after: 0",
    ]),
    Behaviour::new(
        "pool.trim_spares_what_is_used",
        "Trimming to zero leaves live memory and its bytes",
        |t, cu| {
            let pool = own_pool(cu);
            must("threshold", set(cu, pool, THRESHOLD, u64::MAX));
            let a = from_pool(cu, 8 * MIB, pool).expect("memory");
            cu.write(a, &pattern(8 * MIB, 1));
            t.code("trim", cu.cuMemPoolTrimTo(pool, 0));
            t.see("bytes", compare(&cu.read(a, 8 * MIB), &pattern(8 * MIB, 1)));
            t.see("used", either(figure(cu, pool, USED)));
        },
    )
    .fact(&["trim: SUCCESS", "bytes: right", "used: 8388608"]),
    Behaviour::new(
        "pool.reuse_event_dependencies_switch",
        "REUSE_FOLLOW_EVENT_DEPENDENCIES is on, and can be switched off",
        |t, cu| switch(t, cu, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES),
    )
    .fact(&["at first: 1", "set: SUCCESS", "then: 0"]),
    Behaviour::new(
        "pool.reuse_opportunistic_switch",
        "REUSE_ALLOW_OPPORTUNISTIC is on, and can be switched off",
        |t, cu| switch(t, cu, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC),
    )
    .fact(&["at first: 1", "set: SUCCESS", "then: 0"]),
    Behaviour::new(
        "pool.reuse_internal_dependencies_switch",
        "REUSE_ALLOW_INTERNAL_DEPENDENCIES is on, and can be switched off",
        |t, cu| switch(t, cu, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES),
    )
    .fact(&["at first: 1", "set: SUCCESS", "then: 0"]),
    Behaviour::new(
        "pool.unknown_attribute_is_invalid",
        "Attributes that do not exist",
        |t, cu| {
            let pool = own_pool(cu);
            t.see("get", either(figure(cu, pool, CUmemPool_attribute(999))));
            t.code("set", set(cu, pool, CUmemPool_attribute(999), 0));
            t.code(
                "no place",
                cu.cuMemPoolGetAttribute(pool, THRESHOLD, std::ptr::null_mut()),
            );
        },
    ),
    Behaviour::new(
        "pool.create_misuse",
        "A pool needs a place, properties, a type, a device",
        |t, cu| {
            let mut pool = CUmemoryPool::NULL;
            t.code(
                "no place",
                cu.cuMemPoolCreate(std::ptr::null_mut(), &properties()),
            );
            t.code("no properties", cu.cuMemPoolCreate(&mut pool, std::ptr::null()));
            let bad = CUmemPoolProps {
                allocType: CU_MEM_ALLOCATION_TYPE_INVALID,
                ..properties()
            };
            t.code("no type", cu.cuMemPoolCreate(&mut pool, &bad));
            let bad = CUmemPoolProps {
                location: CUmemLocation::device(99),
                ..properties()
            };
            t.see(
                "no device is refused",
                cu.cuMemPoolCreate(&mut pool, &bad) != CUresult::SUCCESS,
            );
        },
    ),
    Behaviour::new(
        "pool.destroyed_while_used",
        "A destroyed pool's memory lives until it is freed",
        |t, cu| {
            let pool = own_pool(cu);
            let a = from_pool(cu, 4 * MIB, pool).expect("memory");
            cu.write(a, &pattern(4096, 2));
            t.code("destroy", cu.cuMemPoolDestroy(pool));
            t.see("bytes", compare(&cu.read(a, 4096), &pattern(4096, 2)));
            t.code("free", cu.cuMemFreeAsync(a, NO_STREAM));
            cu.sync();
        },
    )
    .fact(&["destroy: SUCCESS", "bytes: right", "free: SUCCESS"]),
    Behaviour::new(
        "pool.default_cannot_be_destroyed",
        "The default pool cannot be destroyed",
        |t, cu| {
            t.code("destroy", cu.cuMemPoolDestroy(default_pool(cu)));
            t.see("alloc", either(take(cu, MIB, NO_STREAM).map(|_| "memory")));
        },
    ),
    Behaviour::new(
        "pool.destroying_the_current_one",
        "After its current pool is destroyed a device has its default one",
        |t, cu| {
            let pool = own_pool(cu);
            must("set", cu.cuDeviceSetMemPool(CUdevice(0), pool));
            t.code("destroy", cu.cuMemPoolDestroy(pool));
            let mut current = CUmemoryPool::NULL;
            t.code("get", cu.cuDeviceGetMemPool(&mut current, CUdevice(0)));
            t.see("the default", current == default_pool(cu));
        },
    ),
    Behaviour::new(
        "pool.access_of_its_own_device",
        "A pool's own device has access, which cannot be taken",
        |t, cu| {
            let pool = own_pool(cu);
            let (mut flags, mut device) = (CUmemAccess_flags(77), CUmemLocation::device(0));
            t.code("get", cu.cuMemPoolGetAccess(&mut flags, pool, &mut device));
            t.see("access", flags.0);
            let none = CUmemAccessDesc {
                location: device,
                flags: CU_MEM_ACCESS_FLAGS_PROT_NONE,
            };
            t.see(
                "taking it is refused",
                cu.cuMemPoolSetAccess(pool, &none, 1) != CUresult::SUCCESS,
            );
        },
    ),
    Behaviour::new(
        "pool.access_of_a_second_device",
        "A second device gets access to a pool when it is given",
        |t, cu| {
            let pool = own_pool(cu);
            let (mut flags, mut device) = (CUmemAccess_flags(77), CUmemLocation::device(1));
            must("get", cu.cuMemPoolGetAccess(&mut flags, pool, &mut device));
            t.see("at first", flags.0);
            let access = CUmemAccessDesc {
                location: device,
                flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            t.code("set", cu.cuMemPoolSetAccess(pool, &access, 1));
            must("get", cu.cuMemPoolGetAccess(&mut flags, pool, &mut device));
            t.see("then", flags.0);
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&["at first: 0", "set: SUCCESS", "then: 3"]),
    Behaviour::new(
        "pool.alloc_from_no_pool",
        "A pool that is none is refused",
        |t, cu| {
            t.see(
                "none",
                either(from_pool(cu, MIB, CUmemoryPool::NULL).map(|_| "memory")),
            );
        },
    ),
    Behaviour::new(
        "pool.max_size_is_kept",
        "A pool with a largest size gives no more than that",
        |t, cu| {
            let mut pool = CUmemoryPool::NULL;
            let limited = CUmemPoolProps {
                maxSize: 64 * MIB,
                ..properties()
            };
            t.code("create", cu.cuMemPoolCreate(&mut pool, &limited));
            let first = from_pool(cu, 32 * MIB, pool);
            t.see("32 MiB", either(first.map(|_| "memory")));
            t.see("64 MiB more", either(from_pool(cu, 64 * MIB, pool).map(|_| "memory")));
        },
    ),
    Behaviour::new(
        "pool.two_pools_are_apart",
        "Figures of one pool do not show in another",
        |t, cu| {
            let (a, b) = (own_pool(cu), own_pool(cu));
            let _held = from_pool(cu, 4 * MIB, a).expect("memory");
            t.see(
                "a and b",
                format!("{} {}", either(figure(cu, a, USED)), either(figure(cu, b, USED))),
            );
        },
    )
    .fact(&["a and b: 4194304 0"]),
];
