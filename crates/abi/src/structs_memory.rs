//! Structures of the memory calls: locations, properties, copies, arrays, pools, IPC.

#![expect(missing_docs, reason = "the names are the driver's own")]

use super::macros::driver_struct;
use crate::*;

driver_struct! {
    CUDA_ARRAY3D_DESCRIPTOR [40, 8] {
        @0 Width: usize,
        @8 Height: usize,
        @16 Depth: usize,
        @24 Format: CUarray_format,
        @28 NumChannels: u32,
        @32 Flags: u32,
    }
    CUDA_ARRAY3D_DESCRIPTOR_v1 [24, 4] {
        @0 Width: u32,
        @4 Height: u32,
        @8 Depth: u32,
        @12 Format: CUarray_format,
        @16 NumChannels: u32,
        @20 Flags: u32,
    }
    CUDA_ARRAY_DESCRIPTOR [24, 8] {
        @0 Width: usize,
        @8 Height: usize,
        @16 Format: CUarray_format,
        @20 NumChannels: u32,
    }
    CUDA_ARRAY_DESCRIPTOR_v1 [16, 4] {
        @0 Width: u32,
        @4 Height: u32,
        @8 Format: CUarray_format,
        @12 NumChannels: u32,
    }
    CUDA_ARRAY_MEMORY_REQUIREMENTS [32, 8] {
        @0 size: usize,
        @8 alignment: usize,
        @16 reserved: [u32; 4],
    }
    CUDA_ARRAY_SPARSE_PROPERTIES [48, 8] {
        @0 tileExtent: [u32; 3],
        @12 miptailFirstLevel: u32,
        @16 miptailSize: u64,
        @24 flags: u32,
        @28 reserved: [u32; 4],
    }
    CUDA_MEMCPY2D [128, 8] {
        @0 srcXInBytes: usize,
        @8 srcY: usize,
        @16 srcMemoryType: CUmemorytype,
        @24 srcHost: *const c_void,
        @32 srcDevice: CUdeviceptr,
        @40 srcArray: CUarray,
        @48 srcPitch: usize,
        @56 dstXInBytes: usize,
        @64 dstY: usize,
        @72 dstMemoryType: CUmemorytype,
        @80 dstHost: *mut c_void,
        @88 dstDevice: CUdeviceptr,
        @96 dstArray: CUarray,
        @104 dstPitch: usize,
        @112 WidthInBytes: usize,
        @120 Height: usize,
    }
    CUDA_MEMCPY2D_v1 [96, 8] {
        @0 srcXInBytes: u32,
        @4 srcY: u32,
        @8 srcMemoryType: CUmemorytype,
        @16 srcHost: *const c_void,
        @24 srcDevice: CUdeviceptr_v1,
        @32 srcArray: CUarray,
        @40 srcPitch: u32,
        @44 dstXInBytes: u32,
        @48 dstY: u32,
        @52 dstMemoryType: CUmemorytype,
        @56 dstHost: *mut c_void,
        @64 dstDevice: CUdeviceptr_v1,
        @72 dstArray: CUarray,
        @80 dstPitch: u32,
        @84 WidthInBytes: u32,
        @88 Height: u32,
    }
    CUDA_MEMCPY3D [200, 8] {
        @0 srcXInBytes: usize,
        @8 srcY: usize,
        @16 srcZ: usize,
        @24 srcLOD: usize,
        @32 srcMemoryType: CUmemorytype,
        @40 srcHost: *const c_void,
        @48 srcDevice: CUdeviceptr,
        @56 srcArray: CUarray,
        @64 reserved0: *mut c_void,
        @72 srcPitch: usize,
        @80 srcHeight: usize,
        @88 dstXInBytes: usize,
        @96 dstY: usize,
        @104 dstZ: usize,
        @112 dstLOD: usize,
        @120 dstMemoryType: CUmemorytype,
        @128 dstHost: *mut c_void,
        @136 dstDevice: CUdeviceptr,
        @144 dstArray: CUarray,
        @152 reserved1: *mut c_void,
        @160 dstPitch: usize,
        @168 dstHeight: usize,
        @176 WidthInBytes: usize,
        @184 Height: usize,
        @192 Depth: usize,
    }
    CUDA_MEMCPY3D_BATCH_OP [112, 8] {
        @0 src: CUmemcpy3DOperand,
        @40 dst: CUmemcpy3DOperand,
        @80 extent: CUextent3D,
        @104 srcAccessOrder: CUmemcpySrcAccessOrder,
        @108 flags: u32,
    }
    CUDA_MEMCPY3D_PEER [200, 8] {
        @0 srcXInBytes: usize,
        @8 srcY: usize,
        @16 srcZ: usize,
        @24 srcLOD: usize,
        @32 srcMemoryType: CUmemorytype,
        @40 srcHost: *const c_void,
        @48 srcDevice: CUdeviceptr,
        @56 srcArray: CUarray,
        @64 srcContext: CUcontext,
        @72 srcPitch: usize,
        @80 srcHeight: usize,
        @88 dstXInBytes: usize,
        @96 dstY: usize,
        @104 dstZ: usize,
        @112 dstLOD: usize,
        @120 dstMemoryType: CUmemorytype,
        @128 dstHost: *mut c_void,
        @136 dstDevice: CUdeviceptr,
        @144 dstArray: CUarray,
        @152 dstContext: CUcontext,
        @160 dstPitch: usize,
        @168 dstHeight: usize,
        @176 WidthInBytes: usize,
        @184 Height: usize,
        @192 Depth: usize,
    }
    CUDA_MEMCPY3D_v1 [144, 8] {
        @0 srcXInBytes: u32,
        @4 srcY: u32,
        @8 srcZ: u32,
        @12 srcLOD: u32,
        @16 srcMemoryType: CUmemorytype,
        @24 srcHost: *const c_void,
        @32 srcDevice: CUdeviceptr_v1,
        @40 srcArray: CUarray,
        @48 reserved0: *mut c_void,
        @56 srcPitch: u32,
        @60 srcHeight: u32,
        @64 dstXInBytes: u32,
        @68 dstY: u32,
        @72 dstZ: u32,
        @76 dstLOD: u32,
        @80 dstMemoryType: CUmemorytype,
        @88 dstHost: *mut c_void,
        @96 dstDevice: CUdeviceptr_v1,
        @104 dstArray: CUarray,
        @112 reserved1: *mut c_void,
        @120 dstPitch: u32,
        @124 dstHeight: u32,
        @128 WidthInBytes: u32,
        @132 Height: u32,
        @136 Depth: u32,
    }
    CUarrayMapInfo [96, 8] {
        @0 resourceType: CUresourcetype,
        @8 resource: u64,
        @16 subresourceType: CUarraySparseSubresourceType,
        @24 subresource: [u64; 4],
        @56 memOperationType: CUmemOperationType,
        @60 memHandleType: CUmemHandleType,
        @64 memHandle: u64,
        @72 offset: u64,
        @80 deviceBitMask: u32,
        @84 flags: u32,
        @88 reserved: [u32; 2],
    }
    CUextent3D [24, 8] {
        @0 width: usize,
        @8 height: usize,
        @16 depth: usize,
    }
    CUfabricCpyOperand [24, 8] {
        @0 type_: CUfabricCpyOperandType,
        @8 op: [u64; 2],
    }
    CUipcEventHandle [64, 1] {
        @0 reserved: [c_char; 64],
    }
    CUipcMemHandle [64, 1] {
        @0 reserved: [c_char; 64],
    }
    CUmemAccessDesc [12, 4] {
        @0 location: CUmemLocation,
        @8 flags: CUmemAccess_flags,
    }
    CUmemAllocationProp [32, 8] {
        @0 type_: CUmemAllocationType,
        @4 requestedHandleTypes: CUmemAllocationHandleType,
        @8 location: CUmemLocation,
        @16 win32HandleMetaData: *mut c_void,
        @24 allocFlags: [u16; 4],
    }
    CUmemFabricHandle [64, 1] {
        @0 data: [u8; 64],
    }
    CUmemLocation [8, 4] {
        @0 type_: CUmemLocationType,
        @4 u: u32,
    }
    CUmemPoolProps [88, 8] {
        @0 allocType: CUmemAllocationType,
        @4 handleTypes: CUmemAllocationHandleType,
        @8 location: CUmemLocation,
        @16 win32SecurityAttributes: *mut c_void,
        @24 maxSize: usize,
        @32 usage: u16,
        @34 gpuDirectRDMACapable: u8,
        @35 reserved: [u8; 53],
    }
    CUmemPoolPtrExportData [64, 1] {
        @0 reserved: [u8; 64],
    }
    CUmemcpy3DOperand [40, 8] {
        @0 type_: CUmemcpy3DOperandType,
        @8 op: [u64; 4],
    }
    CUmemcpyAttributes [24, 4] {
        @0 srcAccessOrder: CUmemcpySrcAccessOrder,
        @4 srcLocHint: CUmemLocation,
        @12 dstLocHint: CUmemLocation,
        @20 flags: u32,
    }
    CUuuid [16, 1] {
        @0 bytes: [c_char; 16],
    }
}

impl CUmemLocation {
    /// The device with this ordinal.
    #[must_use]
    pub const fn device(ordinal: i32) -> Self {
        Self {
            type_: CU_MEM_LOCATION_TYPE_DEVICE,
            u: ordinal.cast_unsigned(),
        }
    }

    /// The ordinal of the device, or the number of the NUMA node, by the location's kind.
    #[must_use]
    pub const fn id(self) -> i32 {
        self.u.cast_signed()
    }
}
