//! Contexts and what becomes of their memory: primary, own, several, destroyed, reset, none.

use ebb_abi::*;

use crate::behaviour::{Behaviour, Need};
use crate::driver::Driver;
use crate::helpers::*;

fn current(cu: Driver) -> CUcontext {
    let mut context = CUcontext::NULL;
    must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut context));
    context
}

#[track_caller]
fn own(cu: Driver) -> CUcontext {
    let mut context = CUcontext::NULL;
    must("cuCtxCreate", cu.cuCtxCreate_v2(&mut context, 0, CUdevice(0)));
    context
}

fn active(cu: Driver) -> String {
    let (mut flags, mut active) = (0, 77);
    match cu.cuDevicePrimaryCtxGetState(CUdevice(0), &mut flags, &mut active) {
        CUresult::SUCCESS => active.to_string(),
        code => crate::observe::short(code),
    }
}

fn copy(cu: Driver, address: CUdeviceptr) -> CUresult {
    let mut host = [0_u8; 4];
    cu.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), address, 4)
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "context.primary_is_one",
        "The primary context is the same each time it is retained",
        |t, cu| {
            let (first, second) = (current(cu), cu.primary(0));
            t.see("the same", first == second);
            t.see("active", active(cu));
            t.code("release", cu.cuDevicePrimaryCtxRelease_v2(CUdevice(0)));
            t.see("active", active(cu));
            t.code("release", cu.cuDevicePrimaryCtxRelease_v2(CUdevice(0)));
            t.see("active", active(cu));
            t.code("too often", cu.cuDevicePrimaryCtxRelease_v2(CUdevice(0)));
        },
    ),
    Behaviour::new(
        "context.primary_is_inactive_at_first",
        "Before anybody retains it the primary context is inactive, and nothing needs it",
        |t, cu| {
            t.code("init", cu.cuInit(0));
            t.see("active", active(cu));
            let mut total = 0;
            t.code("total", cu.cuDeviceTotalMem_v2(&mut total, CUdevice(0)));
            let mut address = CUdeviceptr::NULL;
            t.code("alloc", cu.cuMemAlloc_v2(&mut address, 64));
            t.see("active", active(cu));
        },
    )
    .raw()
    .fact(&[
        "init: SUCCESS",
        "active: 0",
        "total: SUCCESS",
        "alloc: INVALID_CONTEXT",
        "active: 0",
    ]),
    Behaviour::new(
        "context.init_misuse",
        "cuInit takes no flags and can be repeated",
        |t, cu| {
            t.code("flags", cu.cuInit(1));
            t.code("right", cu.cuInit(0));
            t.code("again", cu.cuInit(0));
        },
    )
    .raw()
    .fact(&["flags: INVALID_VALUE", "right: SUCCESS", "again: SUCCESS"]),
    Behaviour::new(
        "context.own_context",
        "A context of the program's own has its memory",
        |t, cu| {
            let primary = current(cu);
            let context = own(cu);
            t.see("current", current(cu) == context);
            let address = cu.alloc(3 * MIB);
            cu.write(address, &[1, 2, 3]);
            t.see("bytes", format!("{:?}", cu.read(address, 3)));
            let of = cu.attribute::<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, address);
            t.see("its context", either(of.map(|of| of == context)));
            let mut popped = CUcontext::NULL;
            t.code("pop", cu.cuCtxPopCurrent_v2(&mut popped));
            t.see("below", current(cu) == primary);
            t.code("destroy", cu.cuCtxDestroy_v2(context));
        },
    )
    .fact(&[
        "current: true",
        "bytes: [1, 2, 3]",
        "its context: true",
        "pop: SUCCESS",
        "below: true",
        "destroy: SUCCESS",
    ]),
    Behaviour::new(
        "context.destroyed_takes_its_memory",
        "Memory of a destroyed context is gone",
        |t, cu| {
            let primary = current(cu);
            let context = own(cu);
            let address = cu.alloc(4 * MIB);
            t.code("destroy", cu.cuCtxDestroy_v2(context));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(primary));
            t.see("range", either(cu.range(address)));
            t.code("free", cu.cuMemFree_v2(address));
        },
    )
    .fact(&["destroy: SUCCESS", "range: NOT_FOUND", "free: INVALID_VALUE"]),
    Behaviour::new(
        "context.primary_is_not_destroyed_by_name",
        "cuCtxDestroy of a primary context, and its memory after it",
        |t, cu| {
            let mut primary = CUcontext::NULL;
            must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut primary));
            let address = cu.alloc(MIB);
            cu.write(address, &pattern(MIB, 8));
            let code = cu.cuCtxDestroy_v2(primary);
            t.code("destroy", code);
            if code != CUresult::SUCCESS {
                t.see("bytes", compare(&cu.read(address, MIB), &pattern(MIB, 8)));
            }
        },
    ),
    Behaviour::new(
        "context.destroyed_gives_memory_back",
        "What a destroyed context held is free again",
        |t, cu| {
            let info = || {
                let (mut free, mut total) = (0, 0);
                must("cuMemGetInfo", cu.cuMemGetInfo_v2(&mut free, &mut total));
                free
            };
            let primary = current(cu);
            let before = info();
            let context = own(cu);
            let _address = cu.alloc(64 * MIB);
            must("destroy", cu.cuCtxDestroy_v2(context));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(primary));
            t.see("missing MiB", before.saturating_sub(info()) / MIB);
        },
    )
    .alone()
    .fact(&["missing MiB: 0"]),
    Behaviour::new(
        "context.reset_takes_its_memory",
        "Memory of a reset primary context is gone, and new memory can be had",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            t.code("reset", cu.cuDevicePrimaryCtxReset_v2(CUdevice(0)));
            cu.primary(0);
            t.see("range", either(cu.range(address)));
            let again = cu.alloc(4 * MIB);
            cu.write(again, &[1]);
            t.see("byte", cu.read(again, 1)[0]);
            t.code("free", cu.cuMemFree_v2(again));
        },
    )
    .fact(&["reset: SUCCESS", "range: NOT_FOUND", "byte: 1", "free: SUCCESS"]),
    Behaviour::new(
        "context.released_takes_its_memory",
        "When the last user releases the primary context its memory is gone",
        |t, cu| {
            let address = cu.alloc(4 * MIB);
            t.code("release", cu.cuDevicePrimaryCtxRelease_v2(CUdevice(0)));
            t.see("active", active(cu));
            cu.primary(0);
            t.see("range", either(cu.range(address)));
        },
    )
    .fact(&["release: SUCCESS", "active: 0", "range: NOT_FOUND"]),
    Behaviour::new(
        "context.reset_spares_mapped_memory",
        "Memory that the program mapped belongs to no context: it survives a reset",
        |t, cu| {
            let (address, handle) = (cu.reserve(GRANULE), cu.create(GRANULE));
            cu.map(address, GRANULE, handle);
            cu.write(address, &[7; 8]);
            cu.sync();
            t.code("reset", cu.cuDevicePrimaryCtxReset_v2(CUdevice(0)));
            cu.primary(0);
            t.code("copy", copy(cu, address));
            t.code("unmap", cu.cuMemUnmap(address, GRANULE));
            t.code("release", cu.cuMemRelease(handle));
        },
    ),
    Behaviour::new(
        "context.memory_of_another_one",
        "Two contexts of one device use each other's memory",
        |t, cu| {
            let primary = current(cu);
            let address = cu.alloc(3 * MIB);
            cu.write(address, &[4; 16]);
            cu.sync();
            let context = own(cu);
            t.code("copy", copy(cu, address));
            t.code("fill", cu.cuMemsetD8_v2(address, 5, 16));
            cu.sync();
            t.code("free", cu.cuMemFree_v2(address));
            must("destroy", cu.cuCtxDestroy_v2(context));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(primary));
            t.see("range", either(cu.range(address)));
        },
    ),
    Behaviour::new(
        "context.pushed_and_popped",
        "The stack of contexts of a thread",
        |t, cu| {
            let primary = current(cu);
            let context = own(cu);
            t.code("push", cu.cuCtxPushCurrent_v2(primary));
            t.see("primary", current(cu) == primary);
            let mut popped = CUcontext::NULL;
            t.code("pop", cu.cuCtxPopCurrent_v2(&mut popped));
            t.see("own", popped == primary && current(cu) == context);
            must("destroy", cu.cuCtxDestroy_v2(context));
        },
    )
    .fact(&["push: SUCCESS", "primary: true", "pop: SUCCESS", "own: true"]),
    Behaviour::new(
        "context.a_thread_with_none",
        "A new thread has no context; questions about memory need none or one as ever",
        |t, cu| {
            let address = cu.alloc(MIB);
            let lines = std::thread::spawn(move || {
                let (mut free, mut total) = (0, 0);
                let mut other = CUdeviceptr::NULL;
                vec![
                    ("alloc", cu.cuMemAlloc_v2(&mut other, 64)),
                    ("info", cu.cuMemGetInfo_v2(&mut free, &mut total)),
                    ("copy", copy(cu, address)),
                    (
                        "range",
                        cu.range(address).map_or_else(|code| code, |_| CUresult::SUCCESS),
                    ),
                    ("synchronise", cu.cuCtxSynchronize()),
                ]
            });
            for (label, code) in lines.join().expect("the thread ends") {
                t.code(label, code);
            }
            cu.free(address);
        },
    ),
    Behaviour::new(
        "context.free_in_a_thread_with_none",
        "What cuMemFree says in a thread without a context",
        |t, cu| {
            let address = cu.alloc(MIB);
            let freed = std::thread::spawn(move || cu.cuMemFree_v2(address))
                .join()
                .expect("the thread ends");
            t.code("free", freed);
        },
    ),
    Behaviour::new(
        "context.versions_of_create",
        "cuCtxCreate of all versions make a context that can be used",
        |t, cu| {
            let primary = current(cu);
            let mut context = CUcontext::NULL;
            t.code(
                "v3",
                cu.cuCtxCreate_v3(&mut context, std::ptr::null_mut(), 0, 0, CUdevice(0)),
            );
            let address = cu.alloc(64);
            cu.free(address);
            must("destroy", cu.cuCtxDestroy_v2(context));
            let mut parameters = CUctxCreateParams::default();
            t.code(
                "v4",
                cu.cuCtxCreate_v4(&mut context, &mut parameters, 0, CUdevice(0)),
            );
            let address = cu.alloc(64);
            cu.free(address);
            must("destroy", cu.cuCtxDestroy_v2(context));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(primary));
        },
    ),
    Behaviour::new("context.destroy_misuse", "No context, twice", |t, cu| {
        t.code("none", cu.cuCtxDestroy_v2(CUcontext::NULL));
        let context = own(cu);
        t.code("first", cu.cuCtxDestroy_v2(context));
    }),
    Behaviour::new(
        "context.two_devices",
        "Each device has its own memory",
        |t, cu| {
            let a = cu.alloc(3 * MIB);
            cu.write(a, &[1; 8]);
            cu.primary(1);
            let b = cu.alloc(3 * MIB);
            cu.write(b, &[2; 8]);
            let ordinal = |address| cu.attribute::<i32>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
            t.see(
                "ordinals",
                format!("{} {}", either(ordinal(a)), either(ordinal(b))),
            );
            t.see("different", a != b);
            t.see("b", cu.read(b, 1)[0]);
            cu.primary(0);
            t.see("a", cu.read(a, 1)[0]);
            t.code("free of the other's", cu.cuMemFree_v2(b));
            t.code("free", cu.cuMemFree_v2(a));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&[
        "ordinals: 0 1",
        "different: true",
        "b: 2",
        "a: 1",
        "free of the other's: SUCCESS",
        "free: SUCCESS",
    ]),
    Behaviour::new(
        "context.peer_access",
        "Peer access is enabled once, used, and disabled",
        |t, cu| {
            let (mut can, first) = (0, current(cu));
            must(
                "can",
                cu.cuDeviceCanAccessPeer(&mut can, CUdevice(0), CUdevice(1)),
            );
            if can == 0 {
                t.skip("the devices have no access to each other");
            }
            let second = cu.primary(1);
            let there = cu.alloc(MIB);
            cu.write(there, &[6; 64]);
            cu.sync();
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(first));
            t.code("enable", cu.cuCtxEnablePeerAccess(second, 0));
            t.code("again", cu.cuCtxEnablePeerAccess(second, 0));
            let (touch, here) = (cu.kernel("ebb_touch"), cu.alloc(MIB));
            t.code("launch", cu.launch(touch, NO_STREAM, &[there.0, 4, 1]));
            cu.sync();
            t.code("copy", cu.cuMemcpyDtoD_v2(here, there, 64));
            t.see("bytes", format!("{:?}", cu.read(here, 5)));
            t.code("disable", cu.cuCtxDisablePeerAccess(second));
            t.code("again", cu.cuCtxDisablePeerAccess(second));
        },
    )
    .needs(&[Need::SecondDevice])
    .fact(&[
        "enable: SUCCESS",
        "again: PEER_ACCESS_ALREADY_ENABLED",
        "launch: SUCCESS",
        "copy: SUCCESS",
        "bytes: [7, 6, 6, 6, 7]",
        "disable: SUCCESS",
        "again: PEER_ACCESS_NOT_ENABLED",
    ]),
    Behaviour::new(
        "context.limits_are_told",
        "Limits of a context can be asked for and set",
        |t, cu| {
            let mut value = 0;
            t.code("stack", cu.cuCtxGetLimit(&mut value, CU_LIMIT_STACK_SIZE));
            t.code("set", cu.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 16 * MIB));
            t.code("heap", cu.cuCtxGetLimit(&mut value, CU_LIMIT_MALLOC_HEAP_SIZE));
            t.see("at least", value >= 16 * MIB);
            t.see(
                "unknown is refused",
                cu.cuCtxGetLimit(&mut value, CUlimit(999)) != CUresult::SUCCESS,
            );
        },
    )
    .fact(&[
        "stack: SUCCESS",
        "set: SUCCESS",
        "heap: SUCCESS",
        "at least: true",
        "unknown is refused: true",
    ]),
];
