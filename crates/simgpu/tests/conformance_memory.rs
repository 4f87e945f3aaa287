//! The simulated driver behaves as the real one was seen to behave, seen from a program: memory of every kind.

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
