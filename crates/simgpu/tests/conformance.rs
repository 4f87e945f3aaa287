//! The simulated driver behaves as the real one was seen to behave, seen from a program.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use common::*;
use ebb_abi::*;

const GLOBAL: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_GLOBAL;
const RELAXED: CUstreamCaptureMode = CU_STREAM_CAPTURE_MODE_RELAXED;

#[test]
fn exports_every_symbol_of_the_interface() {
    let cuda = Cuda::load();
    for name in ALL_NAMES {
        let symbol = format!("{name}\0");
        assert!(
            unsafe { cuda.library.get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok(),
            "{name}"
        );
    }
    assert_eq!(ALL_NAMES.len(), 685);
}

#[test]
fn nothing_works_before_cuInit() {
    alone_raw("nothing_works_before_cuInit", &[], || {
        let cuda = Cuda::load();
        let mut count = 0;
        assert_eq!(cuda.cuDeviceGetCount(&mut count), CUresult::ERROR_NOT_INITIALIZED);
        ok(cuda.cuDriverGetVersion(&mut count));
        assert!(count >= 12000);
        assert_eq!(cuda.cuInit(1), CUresult::ERROR_INVALID_VALUE);
        ok(cuda.cuInit(0));
        ok(cuda.cuInit(0));
        ok(cuda.cuDeviceGetCount(&mut count));
        assert_eq!(count, 1);
    });
}

#[test]
fn unknown_features_say_so() {
    alone("unknown_features_say_so", &[], |cuda| {
        let mut array = CUarray::NULL;
        let shape = CUDA_ARRAY_DESCRIPTOR::default();
        assert_eq!(
            cuda.cuArrayCreate_v2(&mut array, &shape),
            CUresult::ERROR_NOT_SUPPORTED
        );
    });
}

#[test]
fn error_names() {
    let cuda = Cuda::load();
    let mut text = std::ptr::null();
    ok(cuda.cuGetErrorName(CUresult::ERROR_OUT_OF_MEMORY, &mut text));
    assert_eq!(
        unsafe { std::ffi::CStr::from_ptr(text) },
        c"CUDA_ERROR_OUT_OF_MEMORY"
    );
    assert_eq!(
        cuda.cuGetErrorName(CUresult(123_456), &mut text),
        CUresult::ERROR_INVALID_VALUE
    );
    assert!(text.is_null());
}

#[test]
fn devices_and_visibility() {
    let variables = [
        ("EBB_SIM_DEVICES", "3"),
        ("CUDA_VISIBLE_DEVICES", "2,0"),
        ("EBB_SIM_MEMORY", "256Mi"),
    ];
    alone("devices_and_visibility", &variables, |cuda| {
        let (mut count, mut bytes) = (0, 0);
        ok(cuda.cuDeviceGetCount(&mut count));
        assert_eq!(count, 2);
        ok(cuda.cuDeviceTotalMem_v2(&mut bytes, CUdevice(0)));
        assert_eq!(bytes, 256 * MIB);
        let mut uuid = CUuuid::default();
        ok(cuda.cuDeviceGetUuid_v2(&mut uuid, CUdevice(0)));
        let wanted = ebb_simdev::device_uuid(2).0;
        assert_eq!(uuid.bytes.map(|byte| byte as u8), wanted);
        let mut device = CUdevice(9);
        assert_eq!(cuda.cuDeviceGet(&mut device, 2), CUresult::ERROR_INVALID_DEVICE);
        let mut bus = [0; 20];
        ok(cuda.cuDeviceGetPCIBusId(bus.as_mut_ptr(), 20, CUdevice(1)));
        assert_eq!(c_bytes(&bus), "0000:17:00.0");
        ok(cuda.cuDeviceGetByPCIBusId(&mut device, bus.as_ptr()));
        assert_eq!(device, CUdevice(1));
        let mut value = 0;
        ok(cuda.cuDeviceGetAttribute(
            &mut value,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
            CUdevice(0),
        ));
        assert_eq!(value, 1);
    });
}

#[test]
fn no_visible_device() {
    alone_raw("no_visible_device", &[("CUDA_VISIBLE_DEVICES", "")], || {
        assert_eq!(Cuda::load().cuInit(0), CUresult::ERROR_NO_DEVICE);
    });
}

#[test]
fn contexts_cost_and_nest() {
    alone_raw(
        "contexts_cost_and_nest",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "16Mi")],
        || {
            let cuda = Cuda::load();
            ok(cuda.cuInit(0));
            let mut free = 0;
            assert_eq!(
                cuda.cuMemGetInfo_v2(&mut free, null_mut()),
                CUresult::ERROR_INVALID_CONTEXT
            );
            let (mut a, mut b, mut top) = (CUcontext::NULL, CUcontext::NULL, CUcontext::NULL);
            ok(cuda.cuCtxCreate_v2(&mut a, 0, CUdevice(0)));
            assert_eq!(cuda.free_bytes(), 48 * MIB);
            ok(cuda.cuCtxCreate_v4(&mut b, null_mut(), 0, CUdevice(0)));
            assert_eq!(cuda.free_bytes(), 32 * MIB);
            let inside = cuda.alloc(4 * MIB);
            ok(cuda.cuCtxPopCurrent_v2(&mut top));
            assert_eq!(top, b);
            ok(cuda.cuCtxGetCurrent(&mut top));
            assert_eq!(top, a);
            // What lives in a context dies with it.
            ok(cuda.cuCtxDestroy_v2(b));
            assert_eq!(cuda.free_bytes(), 48 * MIB);
            assert_eq!(cuda.cuMemFree_v2(inside), CUresult::ERROR_INVALID_VALUE);
            ok(cuda.cuCtxDestroy_v2(a));
            ok(cuda.cuCtxGetCurrent(&mut top));
            assert!(top.is_null());
            assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_INVALID_CONTEXT);
            // The third one does not fit any more.
            for _ in 0..4 {
                ok(cuda.cuCtxCreate_v2(&mut a, 0, CUdevice(0)));
            }
            assert_eq!(
                cuda.cuCtxCreate_v2(&mut a, 0, CUdevice(0)),
                CUresult::ERROR_OUT_OF_MEMORY
            );
        },
    );
}

#[test]
fn primary_contexts_are_counted() {
    alone_raw("primary_contexts_are_counted", &[], || {
        let cuda = Cuda::load();
        ok(cuda.cuInit(0));
        let device = CUdevice(0);
        let (mut first, mut second, mut flags, mut active) = (CUcontext::NULL, CUcontext::NULL, 0, 9);
        ok(cuda.cuDevicePrimaryCtxRetain(&mut first, device));
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, device));
        assert_eq!(first, second);
        ok(cuda.cuDevicePrimaryCtxRelease_v2(device));
        ok(cuda.cuDevicePrimaryCtxGetState(device, &mut flags, &mut active));
        assert_eq!(active, 1);
        ok(cuda.cuDevicePrimaryCtxRelease_v2(device));
        ok(cuda.cuDevicePrimaryCtxGetState(device, &mut flags, &mut active));
        assert_eq!(active, 0);
        assert_eq!(
            cuda.cuDevicePrimaryCtxRelease_v2(device),
            CUresult::ERROR_INVALID_CONTEXT
        );
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, device));
        assert_eq!(first, second);
    });
}

#[test]
fn alloc_rules() {
    alone(
        "alloc_rules",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")],
        |cuda| {
            let mut address = CUdeviceptr::NULL;
            assert_eq!(cuda.cuMemAlloc_v2(&mut address, 0), CUresult::ERROR_INVALID_VALUE);
            assert_eq!(cuda.cuMemAlloc_v2(null_mut(), 8), CUresult::ERROR_INVALID_VALUE);
            ok(cuda.cuMemFree_v2(CUdeviceptr::NULL));
            let small: Vec<_> = (0..3).map(|_| cuda.alloc(100)).collect();
            assert_eq!(small[1].0 - small[0].0, 512);
            assert_eq!(small[2].0 - small[1].0, 512);
            // Three small ones share one block of 2 MiB.
            assert_eq!(cuda.free_bytes(), 62 * MIB);
            assert_eq!(
                cuda.cuMemFree_v2(plus(small[0], 4)),
                CUresult::ERROR_INVALID_VALUE
            );
            for address in small {
                ok(cuda.cuMemFree_v2(address));
                assert_eq!(cuda.cuMemFree_v2(address), CUresult::ERROR_INVALID_VALUE);
            }
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            let large = cuda.alloc(3 * MIB);
            assert_eq!(cuda.free_bytes(), 60 * MIB);
            let (mut base, mut size) = (CUdeviceptr::NULL, 0);
            ok(cuda.cuMemGetAddressRange_v2(&mut base, &mut size, plus(large, 5)));
            assert_eq!((base, size), (large, 3 * MIB));
            // The last byte fits, and one more does not.
            let rest = cuda.alloc(60 * MIB);
            assert_eq!(cuda.try_alloc(1), Err(CUresult::ERROR_OUT_OF_MEMORY));
            assert_eq!(cuda.try_alloc(usize::MAX), Err(CUresult::ERROR_OUT_OF_MEMORY));
            ok(cuda.cuMemFree_v2(rest));
            cuda.alloc(1);
            let mut pitch = 0;
            ok(cuda.cuMemAllocPitch_v2(&mut address, &mut pitch, 100, 7, 4));
            assert_eq!(pitch, 512);
        },
    );
}

#[test]
fn copies_and_fills_move_bytes() {
    alone("copies_and_fills_move_bytes", &[], |cuda| {
        let (a, b) = (cuda.alloc(3 * MIB), cuda.alloc(3 * MIB));
        let bytes: Vec<u8> = (0..3 * MIB).map(|index| (index * 7 % 251) as u8).collect();
        cuda.write(a, &bytes);
        ok(cuda.cuMemcpyDtoD_v2(b, a, bytes.len()));
        assert_eq!(cuda.read(b, bytes.len()), bytes);
        ok(cuda.cuMemsetD8_v2(plus(b, 10), 0xab, 100));
        ok(cuda.cuMemsetD16_v2(plus(b, 200), 0x1234, 2));
        ok(cuda.cuMemsetD32_v2(plus(b, 400), 0x0102_0304, 1));
        let seen = cuda.read(b, 1000);
        assert_eq!(seen[9..11], [bytes[9], 0xab]);
        assert_eq!(seen[109..111], [0xab, bytes[110]]);
        assert_eq!(seen[200..205], [0x34, 0x12, 0x34, 0x12, bytes[204]]);
        assert_eq!(seen[400..404], [4, 3, 2, 1]);
        assert_eq!(
            cuda.cuMemsetD32_v2(plus(b, 2), 0, 1),
            CUresult::ERROR_INVALID_VALUE
        );
        // 2D: three rows of four bytes out of a pitch of 16.
        let mut host = [0_u8; 12];
        let copy = CUDA_MEMCPY2D {
            srcMemoryType: CU_MEMORYTYPE_DEVICE,
            srcDevice: a,
            srcPitch: 16,
            srcXInBytes: 1,
            srcY: 2,
            dstMemoryType: CU_MEMORYTYPE_HOST,
            dstHost: host.as_mut_ptr().cast(),
            dstPitch: 4,
            WidthInBytes: 4,
            Height: 3,
            ..CUDA_MEMCPY2D::default()
        };
        ok(cuda.cuMemcpy2D_v2(&copy));
        let wanted: Vec<u8> = (2..5)
            .flat_map(|row| bytes[row * 16 + 1..row * 16 + 5].to_vec())
            .collect();
        assert_eq!(host.to_vec(), wanted);
        ok(cuda.cuMemsetD2D8_v2(a, 16, 9, 4, 2));
        let seen = cuda.read(a, 32);
        assert_eq!((seen[3], seen[4], seen[16]), (9, bytes[4], 9));
    });
}

#[test]
fn a_touch_of_what_is_not_mapped_is_the_contexts_error() {
    alone(
        "a_touch_of_what_is_not_mapped_is_the_contexts_error",
        &[],
        |cuda| {
            let reserved = cuda.reserve(4 * MIB);
            let handle = cuda.create(2 * MIB);
            // Mapped, but without access: not enough.
            ok(cuda.cuMemMap(reserved, 2 * MIB, 0, handle, 0));
            ok(cuda.cuMemsetD8Async(reserved, 1, 16, NO_STREAM));
            assert_eq!(
                cuda.cuStreamSynchronize(NO_STREAM),
                CUresult::ERROR_ILLEGAL_ADDRESS
            );
            // And it stays.
            assert_eq!(cuda.try_alloc(8), Err(CUresult::ERROR_ILLEGAL_ADDRESS));
            ok(cuda.cuDevicePrimaryCtxReset_v2(CUdevice(0)));
            let mut context = CUcontext::NULL;
            ok(cuda.cuDevicePrimaryCtxRetain(&mut context, CUdevice(0)));
            ok(cuda.cuCtxSetCurrent(context));
            ok(cuda.set_access(reserved, 2 * MIB, CU_MEM_ACCESS_FLAGS_PROT_READ));
            assert_eq!(cuda.read(reserved, 4), [0; 4]);
            ok(cuda.cuMemsetD8Async(reserved, 1, 16, NO_STREAM));
            assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_ILLEGAL_ADDRESS);
        },
    );
}

#[test]
fn virtual_memory_rules() {
    alone(
        "virtual_memory_rules",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")],
        |cuda| {
            let invalid = CUresult::ERROR_INVALID_VALUE;
            let properties = cuda.device_properties();
            let mut granularity = 0;
            ok(cuda.cuMemGetAllocationGranularity(
                &mut granularity,
                &properties,
                CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            ));
            assert_eq!(granularity, 2 * MIB);
            assert_eq!(cuda.try_create(MIB, &properties), Err(invalid));
            let address = cuda.reserve(8 * MIB);
            let (a, b) = (cuda.create(2 * MIB), cuda.create(4 * MIB));
            assert_eq!(cuda.free_bytes(), 58 * MIB);
            cuda.map(address, 2 * MIB, a);
            cuda.map(plus(address, 2 * MIB), 4 * MIB, b);
            assert_eq!(cuda.cuMemMap(address, 2 * MIB, 0, a, 0), invalid, "mapped twice");
            assert_eq!(
                cuda.cuMemMap(plus(address, 8 * MIB), 2 * MIB, 0, a, 0),
                invalid,
                "outside"
            );
            assert_eq!(cuda.cuMemAddressFree(address, 8 * MIB), invalid, "in use");
            // One call over two mappings is right, half of one is not.
            assert_eq!(cuda.cuMemUnmap(plus(address, 2 * MIB), 2 * MIB), invalid);
            cuda.write(plus(address, MIB), &[7; 2 * MIB]);
            assert_eq!(cuda.read(plus(address, 2 * MIB), 2), [7, 7]);
            // The handle goes first, the memory stays until it is unmapped.
            ok(cuda.cuMemRelease(a));
            assert_eq!(cuda.cuMemRelease(a), invalid);
            assert_eq!(cuda.free_bytes(), 58 * MIB);
            ok(cuda.cuMemUnmap(address, 6 * MIB));
            assert_eq!(cuda.free_bytes(), 60 * MIB);
            // The other memory keeps its bytes while its handle lives, at any address.
            cuda.map(plus(address, 4 * MIB), 4 * MIB, b);
            assert_eq!(cuda.read(plus(address, 4 * MIB), 2), [7, 7]);
            let mut retained = CUmemGenericAllocationHandle::NULL;
            ok(cuda.cuMemRetainAllocationHandle(&mut retained, (address.0 + 5 * MIB as u64) as *mut c_void));
            assert_eq!(retained, b);
            ok(cuda.cuMemRelease(b));
            let mut back = CUmemAllocationProp::default();
            ok(cuda.cuMemGetAllocationPropertiesFromHandle(&mut back, retained));
            assert_eq!(back.location.id(), 0);
            ok(cuda.cuMemRelease(retained));
            ok(cuda.cuMemUnmap(plus(address, 4 * MIB), 4 * MIB));
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            ok(cuda.cuMemAddressFree(address, 8 * MIB));
            // An address can be asked for.
            let mut again = CUdeviceptr::NULL;
            ok(cuda.cuMemAddressReserve(&mut again, 4 * MIB, 0, plus(address, 2 * MIB), 0));
            assert_eq!(again, plus(address, 2 * MIB));
        },
    );
}

#[test]
fn host_memory_by_cuMemCreate() {
    alone("host_memory_by_cuMemCreate", &[], |cuda| {
        let location = CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST_NUMA,
            u: 0,
        };
        let properties = CUmemAllocationProp {
            location,
            ..cuda.device_properties()
        };
        let before = cuda.free_bytes();
        let handle = cuda.try_create(2 * MIB, &properties).unwrap();
        assert_eq!(cuda.free_bytes(), before, "costs the device nothing");
        let address = cuda.reserve(4 * MIB);
        cuda.map(address, 2 * MIB, handle);
        let access = CUmemAccessDesc {
            location,
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        ok(cuda.cuMemSetAccess(address, 2 * MIB, &access, 1));
        // Both sides see it: the processor directly, the device by copies and kernels.
        let words = address.0 as *mut u32;
        unsafe { words.write(77) };
        let data = cuda.alloc(4);
        ok(cuda.cuMemcpyDtoD_v2(data, address, 4));
        assert_eq!(cuda.read(data, 4), [77, 0, 0, 0]);
        ok(cuda.cuMemsetD32_v2(address, 78, 1));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(unsafe { words.read() }, 78);
        // Device memory is not for the processor.
        cuda.map(plus(address, 2 * MIB), 2 * MIB, cuda.create(2 * MIB));
        let result = cuda.cuMemSetAccess(plus(address, 2 * MIB), 2 * MIB, &access, 1);
        assert_eq!(result, CUresult::ERROR_INVALID_VALUE);
    });
}

#[test]
fn granularity_is_configurable() {
    let variables = [("EBB_SIM_GRANULARITY", "64Ki")];
    alone("granularity_is_configurable", &variables, |cuda| {
        let address = cuda.reserve(128 << 10);
        let handle = cuda.create(64 << 10);
        cuda.map(plus(address, 64 << 10), 64 << 10, handle);
        cuda.write(plus(address, 64 << 10), &[3]);
    });
}

#[test]
fn virtual_memory_is_not_cuMemAlloc_memory() {
    alone("virtual_memory_is_not_cuMemAlloc_memory", &[], |cuda| {
        let plain = cuda.alloc(4 * MIB);
        let mapped = cuda.reserve(2 * MIB);
        cuda.map(mapped, 2 * MIB, cuda.create(2 * MIB));
        let mut current = CUcontext::NULL;
        ok(cuda.cuCtxGetCurrent(&mut current));
        let context = |address| cuda.attribute::<CUcontext>(CU_POINTER_ATTRIBUTE_CONTEXT, address);
        assert_eq!(context(plain), Ok(current));
        assert_eq!(context(mapped), Ok(CUcontext::NULL));
        let legacy =
            |address| cuda.attribute::<i32>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address);
        assert_eq!((legacy(plain), legacy(mapped)), (Ok(1), Ok(0)));
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        ok(cuda.cuIpcGetMemHandle(&mut handle, plain));
        assert_eq!(
            cuda.cuIpcGetMemHandle(&mut handle, mapped),
            CUresult::ERROR_INVALID_VALUE
        );
        assert_eq!(cuda.cuMemFree_v2(mapped), CUresult::ERROR_INVALID_VALUE);
        let mut retained = CUmemGenericAllocationHandle::NULL;
        let retain = |address: CUdeviceptr, out: &mut _| {
            cuda.cuMemRetainAllocationHandle(out, address.0 as *mut c_void)
        };
        assert_eq!(retain(plain, &mut retained), CUresult::ERROR_INVALID_VALUE);
        ok(retain(mapped, &mut retained));
        let yes = 1_u32;
        let sync = |address| {
            cuda.cuPointerSetAttribute(
                std::ptr::from_ref(&yes).cast(),
                CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                address,
            )
        };
        ok(sync(plain));
        assert_eq!(sync(mapped), CUresult::ERROR_NOT_SUPPORTED);
        ok(cuda.cuMemFreeAsync(plain, NO_STREAM));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.cuMemFree_v2(plain), CUresult::ERROR_INVALID_VALUE);
        // What the driver does not know: an error for one attribute, zeros for a list.
        let local = 5_u32;
        let unknown = CUdeviceptr(std::ptr::from_ref(&local) as u64);
        assert_eq!(context(unknown), Err(CUresult::ERROR_INVALID_VALUE));
        let mut kind = CUmemorytype(77);
        let mut attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        let mut place = std::ptr::from_mut(&mut kind).cast::<c_void>();
        ok(cuda.cuPointerGetAttributes(1, &mut attribute, &mut place, unknown));
        assert_eq!(kind.0, 0);
    });
}

#[test]
fn streams_run_later_and_in_order() {
    alone("streams_run_later_and_in_order", &[], |cuda| {
        let flag = cuda.alloc(4);
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let until = cuda.kernel("ebb_spin_until");
        let (s, other) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        let data = cuda.alloc(4);
        ok(cuda.launch(until, s, &[flag.0]));
        ok(cuda.cuMemsetD32Async(data, 5, 1, s));
        let event = cuda.event();
        ok(cuda.cuEventRecord(event, s));
        assert_eq!(cuda.cuStreamQuery(s), CUresult::ERROR_NOT_READY);
        assert_eq!(cuda.cuEventQuery(event), CUresult::ERROR_NOT_READY);
        // Another stream that waits for the event does not run ahead.
        ok(cuda.cuStreamWaitEvent(other, event, 0));
        ok(cuda.cuMemsetD32Async(data, 6, 1, other));
        assert_eq!(cuda.cuStreamQuery(other), CUresult::ERROR_NOT_READY);
        // A non-blocking stream goes its own way: the legacy stream is free.
        ok(cuda.cuMemsetD32_v2(flag, 1, 1));
        ok(cuda.cuStreamSynchronize(other));
        ok(cuda.cuEventSynchronize(event));
        assert_eq!(cuda.read(data, 4), [6, 0, 0, 0]);
        ok(cuda.cuStreamQuery(s));
        let end = cuda.event();
        ok(cuda.cuEventRecord(end, other));
        ok(cuda.cuEventSynchronize(end));
        let mut time = -1.0;
        ok(cuda.cuEventElapsedTime(&mut time, event, end));
        assert!(time >= 0.0);
    });
}

#[test]
fn the_legacy_stream_keeps_order_with_blocking_ones() {
    alone("the_legacy_stream_keeps_order_with_blocking_ones", &[], |cuda| {
        let (flag, data) = (cuda.alloc(4), cuda.alloc(4));
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let until = cuda.kernel("ebb_spin_until");
        let (blocking, free) = (cuda.stream(0), cuda.stream(CU_STREAM_NON_BLOCKING.0));
        ok(cuda.launch(until, blocking, &[flag.0]));
        ok(cuda.cuMemsetD32Async(data, 1, 1, NO_STREAM));
        assert_eq!(cuda.cuStreamQuery(NO_STREAM), CUresult::ERROR_NOT_READY);
        // And what comes after on a blocking stream waits for the legacy one in turn.
        let second = cuda.stream(0);
        ok(cuda.cuMemsetD32Async(data, 2, 1, second));
        assert_eq!(cuda.cuStreamQuery(second), CUresult::ERROR_NOT_READY);
        ok(cuda.cuMemsetD32Async(flag, 1, 1, free));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(data, 4), [2, 0, 0, 0]);
    });
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    alone("a_destroyed_stream_finishes_its_work", &[], |cuda| {
        let (flag, data) = (cuda.alloc(4), cuda.alloc(4));
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuMemsetD8_v2(data, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let (s, other) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        ok(cuda.launch(cuda.kernel("ebb_spin_until"), s, &[flag.0]));
        ok(cuda.cuMemsetD32Async(data, 8, 1, s));
        ok(cuda.cuStreamDestroy_v2(s));
        assert_eq!(cuda.cuStreamSynchronize(s), CUresult::ERROR_INVALID_HANDLE);
        ok(cuda.cuMemsetD32Async(flag, 1, 1, other));
        // Waiting for the context waits for it.
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(data, 4), [8, 0, 0, 0]);
    });
}

#[test]
fn cuMemFree_waits_and_unmap_does_not() {
    alone("cuMemFree_waits_and_unmap_does_not", &[], |cuda| {
        let flag = cuda.alloc(4);
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        let other = cuda.reserve(2 * MIB);
        let handle = cuda.create(2 * MIB);
        cuda.map(other, 2 * MIB, handle);
        ok(cuda.cuCtxSynchronize());
        let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        ok(cuda.launch(cuda.kernel("ebb_spin_until"), s, &[flag.0]));
        // None of these waits for the kernel; if one did, the test would hang here.
        ok(cuda.cuMemUnmap(other, 2 * MIB));
        ok(cuda.cuMemRelease(handle));
        let fresh = cuda.alloc(2 * MIB);
        assert_eq!(cuda.cuStreamQuery(s), CUresult::ERROR_NOT_READY);
        let setter = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        static RELEASED: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn released(_: *mut c_void) {
            RELEASED.store(1, Ordering::SeqCst);
        }
        ok(cuda.cuLaunchHostFunc(setter, Some(released), null_mut()));
        ok(cuda.cuMemsetD32Async(flag, 1, 1, setter));
        ok(cuda.cuMemFree_v2(fresh));
        assert_eq!(RELEASED.load(Ordering::SeqCst), 1);
        ok(cuda.cuStreamQuery(s));
    });
}

#[test]
fn kernels_compute() {
    alone("kernels_compute", &[], |cuda| {
        let words = 700_000_u64;
        let (data, result) = (cuda.alloc(words as usize * 4), cuda.alloc(8));
        ok(cuda.cuMemsetD8_v2(result, 0, 8));
        let (fill, check, touch, sum) = (
            cuda.kernel("ebb_fill"),
            cuda.kernel("ebb_check"),
            cuda.kernel("ebb_touch"),
            cuda.kernel("ebb_sum"),
        );
        let wrong = || u64::from_le_bytes(cuda.read(result, 8).try_into().unwrap());
        ok(cuda.launch(fill, NO_STREAM, &[data.0, words, 3, 4]));
        ok(cuda.launch(check, NO_STREAM, &[data.0, words, 3, 4, result.0]));
        assert_eq!(wrong(), 0);
        ok(cuda.launch(touch, NO_STREAM, &[data.0, words, 1000]));
        ok(cuda.launch(check, NO_STREAM, &[data.0, words, 3, 4, result.0]));
        assert_eq!(wrong(), 700);
        ok(cuda.cuMemsetD8_v2(result, 0, 8));
        ok(cuda.cuMemsetD32_v2(data, 2, words as usize));
        ok(cuda.launch(sum, NO_STREAM, &[data.0, words, result.0]));
        assert_eq!(wrong(), 2 * words);
        let saxpy = cuda.kernel("ebb_saxpy");
        let (x, y) = (cuda.alloc(8), cuda.alloc(8));
        let floats = |values: [f32; 2]| {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect::<Vec<_>>()
        };
        cuda.write(x, &floats([1.5, -2.0]));
        cuda.write(y, &floats([10.0, 20.0]));
        ok(cuda.launch(saxpy, NO_STREAM, &[y.0, x.0, u64::from(2.0_f32.to_bits()), 2]));
        assert_eq!(cuda.read(y, 8), floats([13.0, 16.0]));
        // Kernels see page-locked host memory, and nothing else of the host.
        let mut pinned = null_mut();
        ok(cuda.cuMemHostAlloc(&mut pinned, 4096, 0));
        ok(cuda.launch(fill, NO_STREAM, &[pinned as u64, 1024, 1, 1]));
        ok(cuda.cuCtxSynchronize());
        let mut plain = vec![0_u32; 1024];
        ok(cuda.launch(fill, NO_STREAM, &[plain.as_mut_ptr() as u64, 1024, 1, 1]));
        assert_eq!(cuda.cuCtxSynchronize(), CUresult::ERROR_ILLEGAL_ADDRESS);
    });
}

#[test]
fn launches_are_checked() {
    alone("launches_are_checked", &[], |cuda| {
        let empty = cuda.kernel("ebb_empty");
        let launch = |grid: u32, block: u32| {
            cuda.cuLaunchKernel(
                empty,
                grid,
                1,
                1,
                block,
                1,
                1,
                0,
                NO_STREAM,
                null_mut(),
                null_mut(),
            )
        };
        ok(launch(1, 1024));
        assert_eq!(launch(0, 1), CUresult::ERROR_INVALID_VALUE);
        assert_eq!(launch(1, 1025), CUresult::ERROR_INVALID_VALUE);
        assert_eq!(
            cuda.launch(CUfunction(77), NO_STREAM, &[]),
            CUresult::ERROR_INVALID_HANDLE
        );
        assert_eq!(
            cuda.launch(empty, CUstream(77), &[]),
            CUresult::ERROR_INVALID_HANDLE
        );
        // A parameter buffer instead of pointers.
        let (data, fill) = (cuda.alloc(16), cuda.kernel("ebb_fill"));
        let buffer = [data.0, 4, 1 | 2 << 32];
        let mut size = 24_usize;
        let mut extra = [
            CU_LAUNCH_PARAM_BUFFER_POINTER as *mut c_void,
            buffer.as_ptr().cast_mut().cast(),
            CU_LAUNCH_PARAM_BUFFER_SIZE as *mut c_void,
            std::ptr::from_mut(&mut size).cast(),
            null_mut(),
        ];
        ok(cuda.cuLaunchKernel(
            fill,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            NO_STREAM,
            null_mut(),
            extra.as_mut_ptr(),
        ));
        let seen = cuda.read(data, 16);
        ok(cuda.launch(fill, NO_STREAM, &[data.0, 4, 1, 2]));
        assert_eq!(cuda.read(data, 16), seen);
        let mut module = CUmodule::NULL;
        assert_eq!(
            cuda.cuModuleLoadData(&mut module, c"hello".as_ptr().cast()),
            CUresult::ERROR_INVALID_PTX
        );
    });
}

#[test]
fn page_locked_host_memory() {
    alone("page_locked_host_memory", &[], |cuda| {
        let mut pinned = null_mut();
        ok(cuda.cuMemHostAlloc(&mut pinned, 10_000, CU_MEMHOSTALLOC_PORTABLE));
        let mut flags = 0;
        ok(cuda.cuMemHostGetFlags(&mut flags, pinned));
        assert_eq!(flags & CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
        let mut device = CUdeviceptr::NULL;
        ok(cuda.cuMemHostGetDevicePointer_v2(&mut device, pinned, 0));
        assert_eq!(device.0, pinned as u64);
        assert_eq!(
            cuda.cuMemHostUnregister(pinned),
            CUresult::ERROR_HOST_MEMORY_NOT_REGISTERED
        );
        ok(cuda.cuMemFreeHost(pinned));
        assert_eq!(cuda.cuMemFreeHost(pinned), CUresult::ERROR_INVALID_VALUE);
        let mut own = vec![0_u8; 3 << 16];
        let start = own.as_mut_ptr().cast::<c_void>();
        ok(cuda.cuMemHostRegister_v2(start, own.len(), 0));
        let inner = own.as_mut_ptr().wrapping_add(100).cast();
        assert_eq!(
            cuda.cuMemHostRegister_v2(inner, 10, 0),
            CUresult::ERROR_HOST_MEMORY_ALREADY_REGISTERED
        );
        assert_eq!(
            cuda.attribute::<CUmemorytype>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUdeviceptr(inner as u64)),
            Ok(CU_MEMORYTYPE_HOST)
        );
        ok(cuda.cuMemHostUnregister(start));
        assert_eq!(
            cuda.cuMemHostRegister_v2(4096 as *mut c_void, 4096, 0),
            CUresult::ERROR_INVALID_VALUE
        );
    });
}

#[test]
fn pools_keep_and_release() {
    alone(
        "pools_keep_and_release",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")],
        |cuda| {
            let s = cuda.stream(0);
            let mut pool = CUmemoryPool::NULL;
            ok(cuda.cuDeviceGetDefaultMemPool(&mut pool, CUdevice(0)));
            let figure = |attribute| {
                let mut value = 0_u64;
                ok(cuda.cuMemPoolGetAttribute(pool, attribute, std::ptr::from_mut(&mut value).cast()));
                value as usize
            };
            let mut a = CUdeviceptr::NULL;
            ok(cuda.cuMemAllocAsync(&mut a, 8 * MIB, s));
            ok(cuda.cuMemsetD8Async(a, 1, 8 * MIB, s));
            assert_eq!(cuda.free_bytes(), 56 * MIB);
            assert_eq!(cuda.attribute(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, a), Ok(pool));
            ok(cuda.cuMemFreeAsync(a, s));
            // The same stream may have it again at once.
            let mut b = CUdeviceptr::NULL;
            ok(cuda.cuMemAllocAsync(&mut b, 8 * MIB, s));
            assert_eq!(a, b);
            ok(cuda.cuMemFreeAsync(b, s));
            assert_eq!(figure(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
            assert_eq!(figure(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 8 * MIB);
            // Without a threshold, waiting gives it back.
            ok(cuda.cuStreamSynchronize(s));
            assert_eq!(figure(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 0);
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            let mut keep = u64::MAX;
            let keep = std::ptr::from_mut(&mut keep).cast();
            ok(cuda.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, keep));
            ok(cuda.cuMemAllocAsync(&mut a, 8 * MIB, s));
            ok(cuda.cuMemFreeAsync(a, s));
            ok(cuda.cuStreamSynchronize(s));
            assert_eq!(cuda.free_bytes(), 56 * MIB);
            // What is only kept makes room, if it must, for the pool itself.
            ok(cuda.cuMemAllocAsync(&mut a, 60 * MIB, s));
            ok(cuda.cuMemFreeAsync(a, s));
            ok(cuda.cuStreamSynchronize(s));
            ok(cuda.cuMemPoolTrimTo(pool, 0));
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            assert_eq!(
                cuda.cuMemAllocAsync(&mut a, 65 * MIB, s),
                CUresult::ERROR_OUT_OF_MEMORY
            );
            let properties = CUmemPoolProps {
                allocType: CU_MEM_ALLOCATION_TYPE_PINNED,
                location: CUmemLocation::device(0),
                ..CUmemPoolProps::default()
            };
            let mut own = CUmemoryPool::NULL;
            ok(cuda.cuMemPoolCreate(&mut own, &properties));
            ok(cuda.cuMemAllocFromPoolAsync(&mut a, 100, own, s));
            ok(cuda.cuMemPoolDestroy(own));
            assert_eq!(
                cuda.cuMemAllocFromPoolAsync(&mut b, 100, own, s),
                CUresult::ERROR_INVALID_VALUE
            );
            assert_eq!(cuda.free_bytes(), 62 * MIB);
            ok(cuda.cuMemFree_v2(a));
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            assert_eq!(cuda.cuMemPoolDestroy(pool), CUresult::ERROR_INVALID_VALUE);
        },
    );
}

#[test]
fn graphs_by_hand() {
    alone("graphs_by_hand", &[], |cuda| {
        let data = cuda.alloc(64);
        let mut graph = CUgraph::NULL;
        ok(cuda.cuGraphCreate(&mut graph, 0));
        let set = |value: u32| CUDA_MEMSET_NODE_PARAMS {
            dst: data,
            value,
            elementSize: 4,
            width: 16,
            height: 1,
            ..CUDA_MEMSET_NODE_PARAMS::default()
        };
        let (mut first, mut second) = (CUgraphNode::NULL, CUgraphNode::NULL);
        let null = CUcontext::NULL;
        ok(cuda.cuGraphAddMemsetNode(&mut second, graph, std::ptr::null(), 0, &set(2), null));
        ok(cuda.cuGraphAddMemsetNode(&mut first, graph, std::ptr::null(), 0, &set(1), null));
        // Made later, runs earlier.
        ok(cuda.cuGraphAddDependencies(graph, &first, &second, 1));
        let mut count = 0;
        ok(cuda.cuGraphGetNodes(graph, null_mut(), &mut count));
        assert_eq!(count, 2);
        let mut exec = CUgraphExec::NULL;
        ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok(cuda.cuGraphLaunch(exec, NO_STREAM));
        assert_eq!(cuda.read(data, 4), [2, 0, 0, 0]);
        ok(cuda.cuGraphExecMemsetNodeSetParams(exec, second, &set(9), null));
        ok(cuda.cuGraphLaunch(exec, NO_STREAM));
        assert_eq!(cuda.read(data, 4), [9, 0, 0, 0]);
        // The graph itself did not change.
        let mut back = CUDA_MEMSET_NODE_PARAMS::default();
        ok(cuda.cuGraphMemsetNodeGetParams(second, &mut back));
        assert_eq!(back.value, 2);
        ok(cuda.cuGraphAddDependencies(graph, &second, &first, 1));
        let mut circle = CUgraphExec::NULL;
        assert_eq!(
            cuda.cuGraphInstantiateWithFlags(&mut circle, graph, 0),
            CUresult::ERROR_INVALID_VALUE
        );
        ok(cuda.cuGraphExecDestroy(exec));
        ok(cuda.cuGraphDestroy(graph));
        assert_eq!(cuda.cuGraphLaunch(exec, NO_STREAM), CUresult::ERROR_INVALID_VALUE);
    });
}

#[test]
fn graph_memory_nodes() {
    alone(
        "graph_memory_nodes",
        &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")],
        |cuda| {
            let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
            ok(cuda.cuStreamBeginCapture_v2(s, GLOBAL));
            let mut address = CUdeviceptr::NULL;
            ok(cuda.cuMemAllocAsync(&mut address, 8 * MIB, s));
            ok(cuda.cuMemsetD8Async(address, 7, 8 * MIB, s));
            ok(cuda.cuMemFreeAsync(address, s));
            let mut graph = CUgraph::NULL;
            ok(cuda.cuStreamEndCapture(s, &mut graph));
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            let mut exec = CUgraphExec::NULL;
            ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            for _ in 0..3 {
                ok(cuda.cuGraphLaunch(exec, s));
            }
            ok(cuda.cuStreamSynchronize(s));
            assert_eq!(cuda.free_bytes(), 64 * MIB);
            // No room: the launch says so.
            let all = cuda.alloc(60 * MIB);
            assert_eq!(cuda.cuGraphLaunch(exec, s), CUresult::ERROR_OUT_OF_MEMORY);
            ok(cuda.cuMemFree_v2(all));
            ok(cuda.cuGraphLaunch(exec, s));
            ok(cuda.cuStreamSynchronize(s));
        },
    );
}

#[test]
fn capture_records_and_joins() {
    alone("capture_records_and_joins", &[], |cuda| {
        let data = cuda.alloc(8);
        ok(cuda.cuMemsetD8_v2(data, 0, 8));
        let (a, b) = (cuda.stream(0), cuda.stream(0));
        let (fork, join) = (cuda.event(), cuda.event());
        ok(cuda.cuStreamBeginCapture_v2(a, RELAXED));
        let mut status = CUstreamCaptureStatus(9);
        ok(cuda.cuStreamIsCapturing(a, &mut status));
        assert_eq!(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
        ok(cuda.cuMemsetD32Async(data, 1, 1, a));
        ok(cuda.cuEventRecord(fork, a));
        ok(cuda.cuStreamWaitEvent(b, fork, 0));
        ok(cuda.cuMemsetD32Async(plus(data, 4), 2, 1, b));
        ok(cuda.cuEventRecord(join, b));
        ok(cuda.cuStreamWaitEvent(a, join, 0));
        ok(cuda.cuMemcpyDtoDAsync_v2(data, plus(data, 4), 4, a));
        let mut graph = CUgraph::NULL;
        assert_eq!(
            cuda.cuStreamEndCapture(b, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_UNMATCHED
        );
        assert_eq!(
            cuda.cuStreamEndCapture(a, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_INVALIDATED
        );
        // The same again, ended well.
        ok(cuda.cuStreamBeginCapture_v2(a, RELAXED));
        ok(cuda.cuMemsetD32Async(data, 1, 1, a));
        ok(cuda.cuEventRecord(fork, a));
        ok(cuda.cuStreamWaitEvent(b, fork, 0));
        ok(cuda.cuMemsetD32Async(plus(data, 4), 2, 1, b));
        ok(cuda.cuEventRecord(join, b));
        ok(cuda.cuStreamWaitEvent(a, join, 0));
        ok(cuda.cuMemcpyDtoDAsync_v2(data, plus(data, 4), 4, a));
        ok(cuda.cuStreamEndCapture(a, &mut graph));
        assert_eq!(cuda.read(data, 8), [0; 8], "captured work must not run");
        let mut exec = CUgraphExec::NULL;
        ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok(cuda.cuGraphLaunch(exec, a));
        assert_eq!(cuda.read(data, 8), [2, 0, 0, 0, 2, 0, 0, 0]);
    });
}

#[test]
fn capture_forbids() {
    alone("capture_forbids", &[], |cuda| {
        let unsupported = CUresult::ERROR_STREAM_CAPTURE_UNSUPPORTED;
        let (s, other) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        let mut graph = CUgraph(5);
        let ends_invalid = |graph: &mut CUgraph| {
            assert_eq!(
                cuda.cuStreamEndCapture(s, graph),
                CUresult::ERROR_STREAM_CAPTURE_INVALIDATED
            );
            assert!(graph.is_null());
        };
        // Allocating in the global mode.
        ok(cuda.cuStreamBeginCapture_v2(s, GLOBAL));
        assert_eq!(cuda.try_alloc(8), Err(unsupported));
        ends_invalid(&mut graph);
        // In a thread that is relaxed, it is fine, and so is what virtual memory needs and waiting for another stream.
        let mut mode = RELAXED;
        ok(cuda.cuThreadExchangeStreamCaptureMode(&mut mode));
        assert_eq!(mode, GLOBAL);
        ok(cuda.cuStreamBeginCapture_v2(s, GLOBAL));
        let address = cuda.alloc(8);
        let reserved = cuda.reserve(2 * MIB);
        cuda.map(reserved, 2 * MIB, cuda.create(2 * MIB));
        ok(cuda.cuMemUnmap(reserved, 2 * MIB));
        ok(cuda.cuStreamSynchronize(other));
        ok(cuda.cuMemsetD8Async(address, 0, 8, s));
        ok(cuda.cuStreamEndCapture(s, &mut graph));
        // Waiting for the context is not, whatever the mode, and it spoils the capture.
        ok(cuda.cuStreamBeginCapture_v2(s, RELAXED));
        assert_eq!(cuda.cuCtxSynchronize(), unsupported);
        ends_invalid(&mut graph);
        // Neither is waiting for the stream itself.
        ok(cuda.cuStreamBeginCapture_v2(s, RELAXED));
        assert_eq!(cuda.cuStreamSynchronize(s), unsupported);
        ends_invalid(&mut graph);
        // The legacy stream, while a stream that keeps order with it is captured.
        let blocking = cuda.stream(0);
        ok(cuda.cuStreamBeginCapture_v2(blocking, RELAXED));
        assert_eq!(
            cuda.cuMemsetD8Async(address, 0, 8, NO_STREAM),
            CUresult::ERROR_STREAM_CAPTURE_IMPLICIT
        );
        assert_eq!(
            cuda.cuStreamEndCapture(blocking, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_INVALIDATED
        );
        assert_eq!(cuda.cuStreamBeginCapture_v2(NO_STREAM, RELAXED), unsupported);
        // A stream that joined and was not joined back.
        let event = cuda.event();
        ok(cuda.cuStreamBeginCapture_v2(s, RELAXED));
        ok(cuda.cuEventRecord(event, s));
        ok(cuda.cuStreamWaitEvent(other, event, 0));
        ok(cuda.cuMemsetD8Async(address, 0, 8, other));
        assert_eq!(
            cuda.cuStreamEndCapture(s, &mut graph),
            CUresult::ERROR_STREAM_CAPTURE_UNJOINED
        );
        ok(cuda.cuStreamSynchronize(other));
        ok(cuda.cuCtxSynchronize());
    });
}

#[test]
fn proc_addresses_by_version() {
    let cuda = Cuda::load();
    let find = |name: &std::ffi::CStr, version: i32, flags: u64| {
        let mut address = null_mut();
        let mut status = CUdriverProcAddressQueryResult(9);
        let result = cuda.cuGetProcAddress_v2(name.as_ptr(), &mut address, version, flags, &mut status);
        (result.0, address as usize, status.0)
    };
    let symbol = |name: &str| unsafe {
        let symbol = cuda
            .library
            .get::<unsafe extern "C" fn()>(format!("{name}\0").as_bytes())
            .unwrap();
        *symbol as *const () as usize
    };
    assert_eq!(find(c"cuMemAlloc", 13000, 0), (0, symbol("cuMemAlloc_v2"), 0));
    assert_eq!(find(c"cuMemAlloc", 2000, 0), (0, symbol("cuMemAlloc"), 0));
    assert_eq!(
        find(c"cuMemcpyHtoD", 13000, 2),
        (0, symbol("cuMemcpyHtoD_v2_ptds"), 0)
    );
    assert_eq!(find(c"cuMemcpyHtoD", 13000, 1), (0, symbol("cuMemcpyHtoD_v2"), 0));
    assert_eq!(
        find(c"cuGetProcAddress", 12000, 0),
        (0, symbol("cuGetProcAddress_v2"), 0)
    );
    assert_eq!(
        find(c"cuGetProcAddress", 11030, 0),
        (0, symbol("cuGetProcAddress"), 0)
    );
    assert_eq!(find(c"cuMemAllocAsync", 11010, 0), (0, 0, 2));
    assert_eq!(find(c"cuNoSuchThing", 13000, 0), (0, 0, 1));
    let mut address = null_mut();
    let old = cuda.cuGetProcAddress(c"cuNoSuchThing".as_ptr(), &mut address, 13000, 0);
    assert_eq!(old, CUresult::ERROR_NOT_FOUND);
}

#[test]
fn calls_fail_when_told() {
    let variables = [("EBB_SIM_FAULT", "cuMemCreate:2:2,cuMemMap:*:999")];
    alone("calls_fail_when_told", &variables, |cuda| {
        let properties = cuda.device_properties();
        assert!(cuda.try_create(2 * MIB, &properties).is_ok());
        assert_eq!(
            cuda.try_create(2 * MIB, &properties),
            Err(CUresult::ERROR_OUT_OF_MEMORY)
        );
        let handle = cuda.create(2 * MIB);
        let address = cuda.reserve(2 * MIB);
        for _ in 0..3 {
            assert_eq!(
                cuda.cuMemMap(address, 2 * MIB, 0, handle, 0),
                CUresult::ERROR_UNKNOWN
            );
        }
        assert_eq!(cuda.free_bytes(), (1024 - 16 - 4) * MIB);
    });
}

#[test]
fn calls_are_traced() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    alone("calls_are_traced", &[("EBB_SIM_TRACE", path)], |cuda| {
        cuda.alloc(8);
    });
    if is_main() {
        let text = std::fs::read_to_string(path).unwrap();
        let calls: Vec<&str> = text.lines().collect();
        assert_eq!(
            calls,
            [
                "cuInit",
                "cuDevicePrimaryCtxRetain",
                "cuCtxSetCurrent",
                "cuMemAlloc_v2"
            ]
        );
    }
}

#[test]
fn the_link_takes_time() {
    let variables = [
        ("EBB_SIM_LINK_BYTES_PER_S", "1Gi"),
        ("EBB_SIM_LINK_LATENCY_US", "1000"),
    ];
    alone("the_link_takes_time", &variables, |cuda| {
        let data = cuda.alloc(32 * MIB);
        let mut pinned = null_mut();
        ok(cuda.cuMemHostAlloc(&mut pinned, 32 * MIB, 0));
        let (s, begin, end) = (cuda.stream(0), cuda.event(), cuda.event());
        ok(cuda.cuEventRecord(begin, s));
        ok(cuda.cuMemcpyHtoDAsync_v2(data, pinned, 32 * MIB, s));
        ok(cuda.cuEventRecord(end, s));
        ok(cuda.cuEventSynchronize(end));
        let mut time = 0.0;
        ok(cuda.cuEventElapsedTime(&mut time, begin, end));
        // 31.25 ms and 1 ms: never less, however loaded the machine is.
        assert!(time >= 32.0, "{time}");
    });
}

#[test]
fn checkpoint_frees_the_device_and_brings_it_back() {
    alone("checkpoint_frees_the_device_and_brings_it_back", &[], |cuda| {
        let pid = std::process::id() as i32;
        let data = cuda.alloc(16 * MIB);
        cuda.write(data, &[5; 1000]);
        let mut state = CUprocessState(9);
        let illegal = CUresult::ERROR_ILLEGAL_STATE;
        assert_eq!(cuda.cuCheckpointProcessCheckpoint(pid, null_mut()), illegal);
        ok(cuda.cuCheckpointProcessLock(pid, null_mut()));
        ok(cuda.cuCheckpointProcessGetState(pid, &mut state));
        assert_eq!(state, CU_PROCESS_STATE_LOCKED);
        ok(cuda.cuCheckpointProcessCheckpoint(pid, null_mut()));
        let machine = ebb_simdev::Machine::open_from_env().unwrap();
        assert_eq!(machine.usage(0).used, 0);
        assert_eq!(cuda.cuCheckpointProcessUnlock(pid, null_mut()), illegal);
        ok(cuda.cuCheckpointProcessRestore(pid, null_mut()));
        assert_eq!(machine.usage(0).used as usize, 32 * MIB);
        ok(cuda.cuCheckpointProcessUnlock(pid, null_mut()));
        assert_eq!(cuda.read(data, 1000), [5; 1000]);
    });
}

#[test]
fn a_forked_child_has_no_device() {
    alone("a_forked_child_has_no_device", &[], |cuda| {
        cuda.alloc(2 * MIB);
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let codes = [
                cuda.cuInit(0),
                cuda.cuCtxSynchronize(),
                cuda.cuMemFree_v2(CUdeviceptr(1)),
            ];
            let right = codes.iter().all(|code| *code == CUresult::ERROR_NOT_INITIALIZED);
            unsafe { libc::_exit(if right { 0 } else { 1 }) };
        }
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
        cuda.alloc(2 * MIB);
    });
}

#[test]
fn per_thread_streams_are_apart() {
    alone("per_thread_streams_are_apart", &[], |cuda| {
        let (mut mine, mut legacy, mut named) = (0, 0, 0);
        ok(cuda.cuStreamGetId_ptsz(NO_STREAM, &mut mine));
        ok(cuda.cuStreamGetId(NO_STREAM, &mut legacy));
        ok(cuda.cuStreamGetId(CU_STREAM_PER_THREAD, &mut named));
        assert_ne!(mine, legacy);
        assert_eq!(mine, named);
        let mut context = CUcontext::NULL;
        ok(cuda.cuCtxGetCurrent(&mut context));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok(cuda.cuCtxSetCurrent(context));
                let mut other = 0;
                ok(cuda.cuStreamGetId(CU_STREAM_PER_THREAD, &mut other));
                assert_ne!(other, mine);
            });
        });
    });
}

#[test]
fn stream_memory_operations() {
    alone("stream_memory_operations", &[], |cuda| {
        let word = cuda.alloc(8);
        ok(cuda.cuMemsetD8_v2(word, 0, 8));
        ok(cuda.cuCtxSynchronize());
        let (a, b) = (
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
            cuda.stream(CU_STREAM_NON_BLOCKING.0),
        );
        ok(cuda.cuStreamWaitValue32_v2(a, word, 3, CU_STREAM_WAIT_VALUE_GEQ.0));
        assert_eq!(cuda.cuStreamQuery(a), CUresult::ERROR_NOT_READY);
        ok(cuda.cuStreamWriteValue32_v2(b, word, 4, 0));
        ok(cuda.cuStreamSynchronize(a));
        assert_eq!(cuda.read(word, 4), [4, 0, 0, 0]);
    });
}
