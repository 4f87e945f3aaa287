//! Multicast objects and external memory: the rules of making, binding and letting go.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const UNSUPPORTED: CUresult = CUresult::ERROR_NOT_SUPPORTED;
const POSIX: CUmemAllocationHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const TWO: &[(&str, &str)] = &[
    ("EBB_SIM_DEVICES", "2"),
    ("EBB_SIM_MEMORY", "64Mi"),
    ("EBB_SIM_CONTEXT_BYTES", "0"),
];

fn team(cuda: &Cuda, properties: &CUmulticastObjectProp) -> Result<CUmemGenericAllocationHandle, CUresult> {
    let mut handle = CUmemGenericAllocationHandle::NULL;
    cuda.cuMulticastCreate(&mut handle, properties)
        .ok()
        .map(|()| handle)
}

fn of_two(size: usize) -> CUmulticastObjectProp {
    CUmulticastObjectProp {
        numDevices: 2,
        size,
        handleTypes: 0,
        flags: 0,
    }
}

#[test]
fn one_device_is_no_team() {
    alone("one_device_is_no_team", &[], |cuda| {
        let mut supported = 9;
        let attribute = CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED;
        ok(cuda.cuDeviceGetAttribute(&mut supported, attribute, CUdevice(0)));
        assert_eq!(supported, 0);
        assert_eq!(team(cuda, &of_two(2 * MIB)), Err(UNSUPPORTED));
    });
}

#[test]
fn binding() {
    alone("binding", TWO, |cuda| {
        let wrong = |change: &dyn Fn(&mut CUmulticastObjectProp)| {
            let mut properties = of_two(8 * MIB);
            change(&mut properties);
            team(cuda, &properties).err()
        };
        assert_eq!(wrong(&|p| p.numDevices = 1), Some(INVALID));
        assert_eq!(wrong(&|p| p.numDevices = 3), Some(INVALID));
        assert_eq!(wrong(&|p| p.size = MIB), Some(INVALID));
        assert_eq!(wrong(&|p| p.flags = 1), Some(INVALID));
        let mut unit = 0;
        let minimum = CU_MULTICAST_GRANULARITY_MINIMUM;
        ok(cuda.cuMulticastGetGranularity(&mut unit, &of_two(8 * MIB), minimum));
        assert_eq!(unit, 2 * MIB);
        let object = team(cuda, &of_two(8 * MIB)).unwrap();
        ok(cuda.cuMulticastAddDevice(object, CUdevice(0)));
        assert_eq!(cuda.cuMulticastAddDevice(object, CUdevice(0)), INVALID, "twice");
        assert_eq!(
            cuda.cuMulticastAddDevice(object, CUdevice(4)),
            CUresult::ERROR_INVALID_DEVICE
        );
        ok(cuda.cuMulticastAddDevice(object, CUdevice(1)));
        let memory = cuda.create(4 * MIB);
        assert_eq!(
            cuda.cuMulticastAddDevice(memory, CUdevice(0)),
            INVALID,
            "not an object"
        );
        let bind = |at, from, size| cuda.cuMulticastBindMem(object, at, memory, from, size, 0);
        assert_eq!(bind(MIB, 0, 2 * MIB), INVALID, "off the granule");
        assert_eq!(bind(0, 2 * MIB, 4 * MIB), INVALID, "over the memory's end");
        assert_eq!(bind(6 * MIB, 0, 4 * MIB), INVALID, "over the object's end");
        assert_eq!(cuda.cuMulticastBindMem(object, 0, object, 0, 2 * MIB, 0), INVALID);
        assert_eq!(
            cuda.cuMulticastBindMem_v2(object, CUdevice(1), 0, memory, 0, 2 * MIB, 0),
            INVALID,
            "another device's"
        );
        ok(bind(0, 0, 4 * MIB));
        assert_eq!(bind(2 * MIB, 0, 2 * MIB), INVALID, "taken");
        // What is bound lives on without its handle.
        ok(cuda.cuMemRelease(memory));
        assert_eq!(cuda.free_bytes(), 60 * MIB);
        assert_eq!(cuda.cuMulticastUnbind(object, CUdevice(1), 0, 4 * MIB), INVALID);
        ok(cuda.cuMulticastUnbind(object, CUdevice(0), 0, 4 * MIB));
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        // By address: mapped memory and a pool's, not `cuMemAlloc`'s.
        let space = cuda.reserve(8 * MIB);
        cuda.map(space, 2 * MIB, cuda.create(2 * MIB));
        ok(cuda.cuMulticastBindAddr(object, 2 * MIB, space, 2 * MIB, 0));
        let plain = cuda.alloc(2 * MIB);
        assert_eq!(
            cuda.cuMulticastBindAddr(object, 4 * MIB, plain, 2 * MIB, 0),
            INVALID
        );
        // The object is mapped like memory, and stands in a checkpoint's way.
        let (view, whole) = (cuda.reserve(8 * MIB), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        ok(cuda.cuMemMap(view, 8 * MIB, 0, object, 0));
        ok(cuda.set_access(view, 8 * MIB, whole));
        let pid = std::process::id() as i32;
        ok(cuda.cuCheckpointProcessLock(pid, std::ptr::null_mut()));
        assert_eq!(
            cuda.cuCheckpointProcessCheckpoint(pid, std::ptr::null_mut()),
            UNSUPPORTED
        );
        ok(cuda.cuCheckpointProcessUnlock(pid, std::ptr::null_mut()));
        ok(cuda.cuMemUnmap(view, 8 * MIB));
        ok(cuda.cuMemRelease(object));
        assert_eq!(cuda.cuMulticastAddDevice(object, CUdevice(0)), INVALID);
        // A shared object binds shared memory only.
        let mut shared = of_two(2 * MIB);
        shared.handleTypes = u64::from(POSIX.0);
        let object = team(cuda, &shared).unwrap();
        ok(cuda.cuMulticastAddDevice(object, CUdevice(0)));
        ok(cuda.cuMulticastAddDevice(object, CUdevice(1)));
        let bind = |memory| cuda.cuMulticastBindMem(object, 0, memory, 0, 2 * MIB, 0);
        assert_eq!(bind(cuda.create(2 * MIB)), INVALID);
        let properties = CUmemAllocationProp {
            requestedHandleTypes: POSIX,
            ..cuda.device_properties()
        };
        ok(bind(cuda.try_create(2 * MIB, &properties).unwrap()));
    });
}

#[test]
fn external_memory() {
    alone("external_memory", TWO, |cuda| {
        let properties = CUmemAllocationProp {
            requestedHandleTypes: POSIX,
            ..cuda.device_properties()
        };
        let memory = cuda.try_create(4 * MIB, &properties).unwrap();
        let mut fd = -1_i32;
        ok(cuda.cuMemExportToShareableHandle(std::ptr::from_mut(&mut fd).cast(), memory, POSIX, 0));
        let space = cuda.reserve(4 * MIB);
        cuda.map(space, 4 * MIB, memory);
        cuda.write(plus(space, MIB), b"theirs");
        let import = |type_, fd: i32, size| {
            let mut external = CUexternalMemory::NULL;
            let description = CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
                type_,
                handle: [u64::from(fd as u32), 0],
                size,
                ..CUDA_EXTERNAL_MEMORY_HANDLE_DESC::default()
            };
            cuda.cuImportExternalMemory(&mut external, &description)
                .ok()
                .map(|()| external)
        };
        let opaque = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD;
        assert_eq!(
            import(CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_WIN32, fd, 1),
            Err(INVALID)
        );
        assert_eq!(
            import(CU_EXTERNAL_MEMORY_HANDLE_TYPE_NVSCIBUF, fd, 1),
            Err(UNSUPPORTED)
        );
        assert_eq!(import(opaque, 0, 1), Err(CUresult::ERROR_OPERATING_SYSTEM));
        assert_eq!(import(opaque, fd, 0), Err(INVALID));
        assert_eq!(import(opaque, fd, 5 << 20), Err(INVALID), "larger than it is");
        let external = import(opaque, fd, 4 << 20).unwrap();
        assert_eq!(
            unsafe { libc::fcntl(fd, libc::F_GETFD) },
            -1,
            "the descriptor was given away"
        );
        let buffer = |offset, size| {
            let mut address = CUdeviceptr::NULL;
            let description = CUDA_EXTERNAL_MEMORY_BUFFER_DESC {
                offset,
                size,
                ..CUDA_EXTERNAL_MEMORY_BUFFER_DESC::default()
            };
            cuda.cuExternalMemoryGetMappedBuffer(&mut address, external, &description)
                .ok()
                .map(|()| address)
        };
        assert_eq!(buffer(1 << 20, 4 << 20), Err(INVALID), "over its end");
        let address = buffer(1 << 20, 1 << 20).unwrap();
        assert_eq!(cuda.read(address, 6), b"theirs");
        let mut name = CUipcMemHandle { reserved: [0; 64] };
        assert_eq!(cuda.cuIpcGetMemHandle(&mut name, address), INVALID);
        ok(cuda.cuDestroyExternalMemory(external));
        assert_eq!(
            cuda.cuDestroyExternalMemory(external),
            CUresult::ERROR_INVALID_HANDLE
        );
        assert_eq!(
            cuda.read(address, 6),
            b"theirs",
            "the buffer stays until it is freed"
        );
        ok(cuda.cuMemFree_v2(address));
        assert_eq!(cuda.cuMemFree_v2(address), INVALID);
        ok(cuda.cuMemUnmap(space, 4 * MIB));
        ok(cuda.cuMemRelease(memory));
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        let mut semaphore = CUexternalSemaphore::NULL;
        let description = CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC {
            type_: CU_EXTERNAL_SEMAPHORE_HANDLE_TYPE_OPAQUE_FD,
            ..CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC::default()
        };
        assert_eq!(
            cuda.cuImportExternalSemaphore(&mut semaphore, &description),
            CUresult::ERROR_OPERATING_SYSTEM
        );
        assert_eq!(
            cuda.cuDestroyExternalSemaphore(semaphore),
            CUresult::ERROR_INVALID_HANDLE
        );
    });
}
