//! Managed memory and copies between devices.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
const TWO: &[(&str, &str)] = &[("EBB_SIM_DEVICES", "2"), ("EBB_SIM_CONTEXT_BYTES", "0")];

fn managed(cuda: &Cuda, bytes: usize) -> CUdeviceptr {
    let mut address = CUdeviceptr::NULL;
    ok(cuda.cuMemAllocManaged(&mut address, bytes, CU_MEM_ATTACH_GLOBAL.0));
    address
}

fn range(
    cuda: &Cuda,
    attribute: CUmem_range_attribute,
    address: CUdeviceptr,
    bytes: usize,
) -> Result<i32, CUresult> {
    let mut value = -99_i32;
    cuda.cuMemRangeGetAttribute(
        std::ptr::from_mut(&mut value).cast(),
        4,
        attribute,
        address,
        bytes,
    )
    .ok()
    .map(|()| value)
}

#[test]
fn pages_move_and_make_room() {
    alone("pages_move_and_make_room", SMALL, |cuda| {
        let a = managed(cuda, 96 * MIB);
        assert_eq!(
            cuda.free_bytes(),
            64 * MIB,
            "more than the card has, and nothing taken"
        );
        // Both sides reach it.
        unsafe { (a.0 as *mut u32).write(41) };
        ok(cuda.launch(cuda.kernel("ebb_touch"), NO_STREAM, &[a.0, 1, 1]));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(unsafe { (a.0 as *const u32).read() }, 42);
        assert_eq!(
            cuda.free_bytes(),
            64 * MIB - (64 << 10),
            "the page that was touched"
        );
        let s = cuda.stream(0);
        ok(cuda.cuMemPrefetchAsync(a, 32 * MIB, CUdevice(0), s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(cuda.free_bytes(), 32 * MIB);
        // It gives way to memory that does not move.
        let plain = cuda.alloc(60 * MIB);
        ok(cuda.cuMemsetD8_v2(a, 7, 96 * MIB));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(plus(a, 96 * MIB - 1), 1), [7]);
        ok(cuda.cuMemFree_v2(plain));
        ok(cuda.cuMemPrefetchAsync_v2(a, 4 * MIB, CUmemLocation::device(0), 0, s));
        ok(cuda.cuStreamSynchronize(s));
        let before = cuda.free_bytes();
        ok(cuda.cuMemPrefetchAsync(a, 4 * MIB, CU_DEVICE_CPU, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(cuda.free_bytes(), before + 4 * MIB);
        ok(cuda.cuMemPrefetchAsync(a, 4 * MIB, CUdevice(0), s));
        ok(cuda.cuMemFree_v2(a));
        assert_eq!(cuda.free_bytes(), 64 * MIB);
    });
}

#[test]
fn what_is_asked_and_advised() {
    alone("what_is_asked_and_advised", TWO, |cuda| {
        let a = managed(cuda, 8 * MIB);
        let attribute = |which| cuda.attribute::<i32>(which, plus(a, 5));
        assert_eq!(attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED), Ok(1));
        assert_eq!(attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE), Ok(2), "a device's");
        assert_eq!(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE), Ok(0));
        let pointer = cuda.attribute::<u64>(CU_POINTER_ATTRIBUTE_HOST_POINTER, plus(a, 5));
        assert_eq!(pointer, Ok(a.0 + 5));
        let (prefetched, preferred) = (
            CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION,
            CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION,
        );
        let none = CU_DEVICE_INVALID.0;
        assert_eq!(range(cuda, prefetched, a, 8 * MIB), Ok(none));
        let s = cuda.stream(0);
        ok(cuda.cuMemPrefetchAsync(a, 4 * MIB, CUdevice(1), s));
        assert_eq!(range(cuda, prefetched, a, 4 * MIB), Ok(1));
        assert_eq!(range(cuda, prefetched, a, 8 * MIB), Ok(none), "not all of it");
        ok(cuda.cuMemPrefetchAsync(a, 8 * MIB, CU_DEVICE_CPU, s));
        assert_eq!(range(cuda, prefetched, a, 8 * MIB), Ok(-1));
        assert_eq!(
            range(
                cuda,
                CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE,
                a,
                8 * MIB
            ),
            Ok(CU_MEM_LOCATION_TYPE_HOST.0 as i32)
        );
        let advise = |advice, device| cuda.cuMemAdvise(a, 8 * MIB, advice, device);
        ok(advise(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CUdevice(0)));
        assert_eq!(range(cuda, preferred, a, 8 * MIB), Ok(0));
        ok(advise(CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, CUdevice(0)));
        assert_eq!(range(cuda, preferred, a, 8 * MIB), Ok(none));
        ok(advise(CU_MEM_ADVISE_SET_READ_MOSTLY, CUdevice(0)));
        assert_eq!(range(cuda, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, a, 8 * MIB), Ok(1));
        ok(advise(CU_MEM_ADVISE_SET_ACCESSED_BY, CUdevice(1)));
        let mut list = [7_i32; 3];
        let by = CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY;
        ok(cuda.cuMemRangeGetAttribute(list.as_mut_ptr().cast(), 12, by, a, 8 * MIB));
        assert_eq!(list, [1, none, none]);
        assert_eq!(
            cuda.cuMemRangeGetAttribute(list.as_mut_ptr().cast(), 6, by, a, 8 * MIB),
            INVALID
        );
        assert_eq!(
            advise(CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CUdevice(8)),
            CUresult::ERROR_INVALID_DEVICE
        );
        assert_eq!(advise(CUmem_advise(50), CUdevice(0)), INVALID);
        // Only managed memory, only inside it.
        let plain = cuda.alloc(8 * MIB);
        assert_eq!(cuda.cuMemPrefetchAsync(plain, MIB, CUdevice(0), s), INVALID);
        assert_eq!(
            cuda.cuMemAdvise(plain, MIB, CU_MEM_ADVISE_SET_READ_MOSTLY, CUdevice(0)),
            INVALID
        );
        assert_eq!(range(cuda, preferred, plain, MIB), Err(INVALID));
        assert_eq!(cuda.cuMemPrefetchAsync(a, 9 * MIB, CUdevice(0), s), INVALID);
        assert_eq!(cuda.cuMemPrefetchAsync(a, 0, CUdevice(0), s), INVALID);
        assert_eq!(
            cuda.cuMemPrefetchAsync(a, MIB, CUdevice(8), s),
            CUresult::ERROR_INVALID_DEVICE
        );
        let device = CUmemLocation::device(0);
        assert_eq!(cuda.cuMemPrefetchAsync_v2(a, MIB, device, 1, s), INVALID, "flags");
        let mut place = CUdeviceptr::NULL;
        assert_eq!(cuda.cuMemAllocManaged(&mut place, 0, 1), INVALID);
        assert_eq!(
            cuda.cuMemAllocManaged(&mut place, 8, 4),
            INVALID,
            "attached to no stream"
        );
        ok(cuda.cuStreamAttachMemAsync(s, a, 0, CU_MEM_ATTACH_SINGLE.0));
        assert_eq!(
            cuda.cuStreamAttachMemAsync(s, a, 5, CU_MEM_ATTACH_SINGLE.0),
            INVALID
        );
        assert_eq!(cuda.cuStreamAttachMemAsync(s, plus(a, 8), 0, 1), INVALID);
        assert_eq!(cuda.cuStreamAttachMemAsync(s, plain, 0, 1), INVALID);
        assert_eq!(
            cuda.cuStreamAttachMemAsync(NO_STREAM, a, 0, CU_MEM_ATTACH_SINGLE.0),
            INVALID
        );
        // In batches, by location.
        let (mut addresses, mut sizes) = ([a, plus(a, 2 * MIB), plus(a, 4 * MIB)], [MIB; 3]);
        let mut locations = [CUmemLocation::device(1), CUmemLocation::device(0)];
        let mut batch = |starts: &mut [usize; 2], stream| {
            cuda.cuMemPrefetchBatchAsync(
                addresses.as_mut_ptr(),
                sizes.as_mut_ptr(),
                3,
                locations.as_mut_ptr(),
                starts.as_mut_ptr(),
                2,
                0,
                stream,
            )
        };
        ok(batch(&mut [0, 2], s));
        let seen = [0, 2, 4].map(|at| range(cuda, prefetched, plus(a, at * MIB), MIB));
        assert_eq!(seen, [Ok(1), Ok(1), Ok(0)]);
        assert_eq!(batch(&mut [1, 2], s), INVALID, "the first must be zero");
        assert_eq!(batch(&mut [0, 3], s), INVALID);
        assert_eq!(batch(&mut [0, 2], NO_STREAM), INVALID, "the legacy stream");
    });
}

#[test]
fn copies_between_devices() {
    alone("copies_between_devices", TWO, |cuda| {
        let (mut first, mut second) = (CUcontext::NULL, CUcontext::NULL);
        ok(cuda.cuCtxGetCurrent(&mut first));
        ok(cuda.cuDevicePrimaryCtxRetain(&mut second, CUdevice(1)));
        let a = cuda.alloc(4 * MIB);
        cuda.write(a, &[1, 2, 3, 4]);
        ok(cuda.cuCtxSetCurrent(second));
        let b = cuda.alloc(4 * MIB);
        // Without peer access a copy goes by way of the host, a kernel does not.
        ok(cuda.cuMemcpyDtoD_v2(b, a, 4));
        assert_eq!(cuda.read(b, 4), [1, 2, 3, 4]);
        ok(cuda.cuMemcpyPeer(plus(b, 4), second, a, first, 4));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(plus(b, 4), 4), [1, 2, 3, 4]);
        assert_eq!(
            cuda.cuMemcpyPeer(b, CUcontext(5), a, first, 4),
            CUresult::ERROR_INVALID_CONTEXT
        );
        assert_eq!(
            cuda.cuCtxDisablePeerAccess(first),
            CUresult::ERROR_PEER_ACCESS_NOT_ENABLED
        );
        assert_eq!(cuda.cuCtxEnablePeerAccess(first, 1), INVALID);
        assert_eq!(
            cuda.cuCtxEnablePeerAccess(second, 0),
            CUresult::ERROR_INVALID_DEVICE
        );
        let mut yes = 0;
        ok(cuda.cuDeviceCanAccessPeer(&mut yes, CUdevice(0), CUdevice(1)));
        assert_eq!(yes, 1);
        // Memory that the program mapped needs the device's own right, but for a copy that names the contexts.
        ok(cuda.cuCtxSetCurrent(first));
        let space = cuda.reserve(2 * MIB);
        cuda.map(space, 2 * MIB, cuda.create(2 * MIB));
        cuda.write(space, &[9; 4]);
        ok(cuda.cuCtxSetCurrent(second));
        ok(cuda.cuMemcpyPeer(b, second, space, first, 4));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(b, 4), [9; 4]);
        assert_eq!(cuda.cuMemcpyDtoDAsync_v2(b, space, 4, NO_STREAM), INVALID);
        let mut seen = [0_u8; 4];
        let host = seen.as_mut_ptr().cast();
        assert_eq!(cuda.cuMemcpyDtoH_v2(host, space, 4), INVALID, "nor to the host");
        let rows = CUDA_MEMCPY3D_PEER {
            srcMemoryType: CU_MEMORYTYPE_DEVICE,
            srcDevice: space,
            srcContext: first,
            srcPitch: 2,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstDevice: plus(b, 8),
            dstContext: second,
            dstPitch: 4,
            WidthInBytes: 2,
            Height: 2,
            Depth: 1,
            ..CUDA_MEMCPY3D_PEER::default()
        };
        ok(cuda.cuMemcpy3DPeer(&rows));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(plus(b, 8), 6), [9, 9, 0, 0, 9, 9]);
    });
}
