//! [`DriverTable`]: the driver's functions that we call, by name.

#![allow(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "names and parameters are the driver's own"
)]

use core::ffi::{CStr, c_void};

use ebb_abi::*;

macro_rules! table {
    ($( $(#[$doc:meta])* $name:ident($($parameter:ident: $ty:ty),*); )*) => {
        /// The driver's functions that this crate and the layer call by themselves.
        ///
        /// A function that the driver does not have is an error of that call, not of the whole.
        #[derive(Clone, Copy)]
        pub struct DriverTable {
            $($name: Option<unsafe extern "C" fn($($ty),*) -> CUresult>,)*
        }

        impl DriverTable {
            /// Looks every function up.
            ///
            /// # Safety
            /// What `find` answers for a name is null or the address of the driver's function of that name, which must stay loaded.
            pub unsafe fn load(mut find: impl FnMut(&'static CStr) -> *const c_void) -> Self {
                Self { $($name: {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("a name holds a zero byte"),
                    };
                    let address = find(NAME);
                    // SAFETY: null is `None`; anything else is the function of that name, by this function's contract, and the
                    // signature is the driver's.
                    unsafe { core::mem::transmute::<*const c_void, Option<unsafe extern "C" fn($($ty),*) -> CUresult>>(address) }
                },)* }
            }

            $(
                $(#[$doc])*
                ///
                /// # Safety
                /// As the driver's function of this name: pointers are valid for what it reads and writes.
                pub unsafe fn $name(&self $(, $parameter: $ty)*) -> CUresult {
                    match self.$name {
                        // SAFETY: the caller's contract is the function's.
                        Some(function) => unsafe { function($($parameter),*) },
                        None => CUresult::ERROR_NOT_SUPPORTED,
                    }
                }
            )*
        }
    };
}

table! {
    /// Makes a context current, on top of the thread's stack.
    cuCtxPushCurrent_v2(ctx: CUcontext);
    /// Takes the top context off the thread's stack.
    cuCtxPopCurrent_v2(ctx: *mut CUcontext);
    /// The current context.
    cuCtxGetCurrent(ctx: *mut CUcontext);
    /// The device of the current context.
    cuCtxGetDevice(device: *mut CUdevice);
    /// Waits for all work of the current context.
    cuCtxSynchronize();
    /// A property of a device.
    cuDeviceGetAttribute(value: *mut i32, attribute: CUdevice_attribute, device: CUdevice);
    /// How many devices there are.
    cuDeviceGetCount(count: *mut i32);
    /// Whether one device reaches another's memory.
    cuDeviceCanAccessPeer(can: *mut i32, device: CUdevice, peer: CUdevice);
    /// A property of the link between two devices.
    cuDeviceGetP2PAttribute(value: *mut i32, attribute: CUdevice_P2PAttribute, device: CUdevice, peer: CUdevice);
    /// A device's identity.
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    /// A device's identity, older form.
    cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice);
    /// A device's memory.
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    /// A device's primary context: flags, and whether it is active.
    cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut u32, active: *mut i32);
    /// Free and total memory of the current context's device.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    /// Reserves addresses.
    cuMemAddressReserve(ptr: *mut CUdeviceptr, size: usize, alignment: usize, addr: CUdeviceptr, flags: u64);
    /// Gives a reservation back.
    cuMemAddressFree(ptr: CUdeviceptr, size: usize);
    /// The sizes of physical memory are multiples of this.
    cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags);
    /// Makes physical memory.
    cuMemCreate(handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: u64);
    /// A descriptor of a handle's memory.
    cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: u64);
    /// A handle of the memory behind a descriptor.
    cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: CUmemAllocationHandleType);
    /// Gives a handle back.
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    /// Maps a handle.
    cuMemMap(ptr: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64);
    /// Removes mappings.
    cuMemUnmap(ptr: CUdeviceptr, size: usize);
    /// Lets devices use a mapped range.
    cuMemSetAccess(ptr: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize);
    /// Enqueues a copy to the host.
    cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream);
    /// Enqueues a copy to the device.
    cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream);
    /// Enqueues a copy between devices, or within one.
    cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
    /// Enqueues that memory is filled with a byte.
    cuMemsetD8Async(dst: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
    /// Pins host memory.
    cuMemHostRegister_v2(p: *mut c_void, bytes: usize, flags: u32);
    /// Unpins host memory.
    cuMemHostUnregister(p: *mut c_void);
    /// Loads code into the current context.
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    /// Takes code out of its context.
    cuModuleUnload(module: CUmodule);
    /// A kernel of a module.
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    /// A variable of a module.
    cuModuleGetGlobal_v2(at: *mut CUdeviceptr, bytes: *mut usize, module: CUmodule, name: *const c_char);
    /// Begins to compile code for the current context's device.
    cuLinkCreate_v2(options: u32, names: *mut CUjit_option, values: *mut *mut c_void, state: *mut CUlinkState);
    /// Gives code to compile.
    cuLinkAddData_v2(state: CUlinkState, kind: CUjitInputType, data: *mut c_void, bytes: usize, name: *const c_char, options: u32, names: *mut CUjit_option, values: *mut *mut c_void);
    /// Compiles it. What comes out lives as long as the state.
    cuLinkComplete(state: CUlinkState, image: *mut *mut c_void, bytes: *mut usize);
    /// Ends that.
    cuLinkDestroy(state: CUlinkState);
    /// Enqueues a kernel.
    cuLaunchKernel(function: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32, shared: u32, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void);
    /// Makes a stream.
    cuStreamCreateWithPriority(stream: *mut CUstream, flags: u32, priority: i32);
    /// Makes a stream, older form.
    cuStreamCreate(stream: *mut CUstream, flags: u32);
    /// Ends a stream.
    cuStreamDestroy_v2(stream: CUstream);
    /// A stream's context.
    cuStreamGetCtx(stream: CUstream, ctx: *mut CUcontext);
    /// Makes what comes next in a stream wait for an event.
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    /// Whether a stream is captured, and into which graph.
    cuStreamGetCaptureInfo_v2(stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut u64, graph: *mut CUgraph, deps: *mut *const CUgraphNode, count: *mut usize);
    /// A device's own stream-ordered pool.
    cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    /// The stream-ordered pool that a device's allocations come from.
    cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    /// A figure or a switch of a pool.
    cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    /// Whether a stream is captured.
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    /// Waits for a stream.
    cuStreamSynchronize(stream: CUstream);
    /// Makes an event.
    cuEventCreate(event: *mut CUevent, flags: u32);
    /// Ends an event.
    cuEventDestroy_v2(event: CUevent);
    /// Marks a place in a stream.
    cuEventRecord(event: CUevent, stream: CUstream);
    /// Whether an event has happened.
    cuEventQuery(event: CUevent);
    /// Waits for an event.
    cuEventSynchronize(event: CUevent);
    /// Enqueues a function on the host.
    cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);
    /// Changes what the calling thread may do while captures are under way.
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    /// Enqueues that managed memory moves.
    cuMemPrefetchAsync_v2(ptr: CUdeviceptr, count: usize, location: CUmemLocation, flags: u32, stream: CUstream);
    /// Enqueues that managed memory moves, older form.
    cuMemPrefetchAsync(ptr: CUdeviceptr, count: usize, device: CUdevice, stream: CUstream);
    /// Lets go of what is kept for graphs.
    cuDeviceGraphMemTrim(device: CUdevice);
    /// A figure of what is kept for graphs.
    cuDeviceGetGraphMemAttribute(device: CUdevice, attribute: CUgraphMem_attribute, value: *mut c_void);
    /// A property of an address.
    cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, ptr: CUdeviceptr);
}

impl core::fmt::Debug for DriverTable {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("DriverTable").finish_non_exhaustive()
    }
}
