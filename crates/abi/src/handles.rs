//! Handles: what the driver gives out and takes back. Pointers to it, plain integers to us.

use super::macros::driver_newtype;

driver_newtype! {
    /// A device's ordinal among those that this process sees.
    CUdevice: i32;
    /// An address in device memory.
    CUdeviceptr: u64;
    /// A handle to physical memory made by `cuMemCreate`.
    CUmemGenericAllocationHandle: u64;
    /// A condition of a conditional graph node.
    CUgraphConditionalHandle: u64;
    /// A bindless texture.
    CUtexObject: u64;
    /// A bindless surface.
    CUsurfObject: u64;
    /// A place in the driver's log.
    CUlogIterator: u32;
    /// The name of an endpoint that several devices share.
    CUlogicalEndpointId: u32;
    /// Memory in an opaque layout.
    CUarray: usize;
    /// The driver's `CUasyncCallbackHandle`.
    CUasyncCallbackHandle: usize;
    /// The driver's `CUcheckpointOperationHandle`.
    CUcheckpointOperationHandle: usize;
    /// A context: a process's state on one device.
    CUcontext: usize;
    /// The driver's `CUcoredumpCallbackHandle`.
    CUcoredumpCallbackHandle: usize;
    /// The driver's `CUdevResourceDesc`.
    CUdevResourceDesc: usize;
    /// A mark in a stream.
    CUevent: usize;
    /// The driver's `CUexternalMemory`.
    CUexternalMemory: usize;
    /// The driver's `CUexternalSemaphore`.
    CUexternalSemaphore: usize;
    /// A kernel of a module.
    CUfunction: usize;
    /// A graph of work.
    CUgraph: usize;
    /// A graph made ready to launch.
    CUgraphExec: usize;
    /// One piece of work of a graph.
    CUgraphNode: usize;
    /// The driver's `CUgraphicsResource`.
    CUgraphicsResource: usize;
    /// The driver's `CUgreenCtx`.
    CUgreenCtx: usize;
    /// A kernel of a library.
    CUkernel: usize;
    /// Code loaded for all contexts.
    CUlibrary: usize;
    /// The driver's `CUlinkState`.
    CUlinkState: usize;
    /// The driver's `CUlogsCallbackHandle`.
    CUlogsCallbackHandle: usize;
    /// A stream-ordered memory pool.
    CUmemoryPool: usize;
    /// The driver's `CUmipmappedArray`.
    CUmipmappedArray: usize;
    /// Loaded code.
    CUmodule: usize;
    /// A stream: a queue of work in order.
    CUstream: usize;
    /// The driver's `CUsurfref`.
    CUsurfref: usize;
    /// The driver's `CUtexref`.
    CUtexref: usize;
    /// The driver's `CUuserObject`.
    CUuserObject: usize;
}

/// Device addresses of the interface before CUDA 3.2, which were 32 bits wide.
pub type CUdeviceptr_v1 = u32;

/// The legacy default stream, when named explicitly.
pub const CU_STREAM_LEGACY: CUstream = CUstream(1);
/// The calling thread's own default stream.
pub const CU_STREAM_PER_THREAD: CUstream = CUstream(2);
/// No device: the processor itself, in calls that take a device as a location.
pub const CU_DEVICE_CPU: CUdevice = CUdevice(-1);
/// No device.
pub const CU_DEVICE_INVALID: CUdevice = CUdevice(-2);

macro_rules! show_as_hex {
    ($($name:ident)*) => {$(
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    )*};
}
show_as_hex!(CUdeviceptr CUcontext CUstream CUmemGenericAllocationHandle);
