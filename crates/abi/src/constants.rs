//! Flags and figures that the driver defines outside its enumerations.

/// Bytes of an IPC handle.
pub const CU_IPC_HANDLE_SIZE: usize = 64;
/// `cuMemHostAlloc`: pinned for every context.
pub const CU_MEMHOSTALLOC_PORTABLE: u32 = 1;
/// `cuMemHostAlloc`: also mapped into the device's address space.
pub const CU_MEMHOSTALLOC_DEVICEMAP: u32 = 2;
/// `cuMemHostAlloc`: write-combined.
pub const CU_MEMHOSTALLOC_WRITECOMBINED: u32 = 4;
/// `cuMemHostRegister`: pinned for every context.
pub const CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;
/// `cuMemHostRegister`: also mapped into the device's address space.
pub const CU_MEMHOSTREGISTER_DEVICEMAP: u32 = 2;
/// `cuMemHostRegister`: memory of a device, not of the system.
pub const CU_MEMHOSTREGISTER_IOMEMORY: u32 = 4;
/// `cuMemHostRegister`: the device only reads it.
pub const CU_MEMHOSTREGISTER_READ_ONLY: u32 = 8;
/// `CUmemAllocationProp` usage: a tile pool of sparse arrays.
pub const CU_MEM_CREATE_USAGE_TILE_POOL: u16 = 1;
/// `CUmemAllocationProp` usage: a target of hardware decompression.
pub const CU_MEM_CREATE_USAGE_HW_DECOMPRESS: u16 = 2;
/// Array flag: layered.
pub const CUDA_ARRAY3D_LAYERED: u32 = 1;
/// Array flag: surfaces may load and store.
pub const CUDA_ARRAY3D_SURFACE_LDST: u32 = 2;
/// Array flag: cube map.
pub const CUDA_ARRAY3D_CUBEMAP: u32 = 4;
/// Array flag: sparse, without memory of its own.
pub const CUDA_ARRAY3D_SPARSE: u32 = 0x40;
/// `cuLaunchKernel` extra: ends the list.
pub const CU_LAUNCH_PARAM_END: usize = 0;
/// `cuLaunchKernel` extra: the next entry points to the parameter buffer.
pub const CU_LAUNCH_PARAM_BUFFER_POINTER: usize = 1;
/// `cuLaunchKernel` extra: the next entry points to the buffer's size.
pub const CU_LAUNCH_PARAM_BUFFER_SIZE: usize = 2;
/// The newest interface that this crate describes: major × 1000 + minor × 10.
pub const CUDA_VERSION: i32 = 13050;
