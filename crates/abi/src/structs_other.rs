//! Structures of the rarer interfaces: external memory, textures, checkpoint, multicast, resources.

#![expect(missing_docs, reason = "the names are the driver's own")]

use super::macros::driver_struct;
use crate::*;

driver_struct! {
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC [88, 8] {
        @0 offset: u64,
        @8 size: u64,
        @16 flags: u32,
        @20 reserved: [u32; 16],
    }
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC [104, 8] {
        @0 type_: CUexternalMemoryHandleType,
        @8 handle: [u64; 2],
        @24 size: u64,
        @32 flags: u32,
        @36 reserved: [u32; 16],
    }
    CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC [120, 8] {
        @0 offset: u64,
        @8 arrayDesc: CUDA_ARRAY3D_DESCRIPTOR,
        @48 numLevels: u32,
        @52 reserved: [u32; 16],
    }
    CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC [96, 8] {
        @0 type_: CUexternalSemaphoreHandleType,
        @8 handle: [u64; 2],
        @24 flags: u32,
        @28 reserved: [u32; 16],
    }
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS [144, 8] {
        @0 params: [u64; 9],
        @72 flags: u32,
        @76 reserved: [u32; 16],
    }
    CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS [144, 8] {
        @0 params: [u64; 9],
        @72 flags: u32,
        @76 reserved: [u32; 16],
    }
    CUDA_EXT_SEM_SIGNAL_NODE_PARAMS [24, 8] {
        @0 extSemArray: *mut CUexternalSemaphore,
        @8 paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS,
        @16 numExtSems: u32,
    }
    CUDA_EXT_SEM_WAIT_NODE_PARAMS [24, 8] {
        @0 extSemArray: *mut CUexternalSemaphore,
        @8 paramsArray: *const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS,
        @16 numExtSems: u32,
    }
    CUDA_FABRIC_COPY_BATCH_OP [64, 8] {
        @0 src: CUfabricCpyOperand,
        @24 dst: CUfabricCpyOperand,
        @48 size: usize,
        @56 flags: u32,
    }
    CUDA_RESOURCE_DESC [144, 8] {
        @0 resType: CUresourcetype,
        @8 res: [u64; 16],
        @136 flags: u32,
    }
    CUDA_RESOURCE_VIEW_DESC [112, 8] {
        @0 format: CUresourceViewFormat,
        @8 width: usize,
        @16 height: usize,
        @24 depth: usize,
        @32 firstMipmapLevel: u32,
        @36 lastMipmapLevel: u32,
        @40 firstLayer: u32,
        @44 lastLayer: u32,
        @48 reserved: [u32; 16],
    }
    CUDA_TEXTURE_DESC [104, 4] {
        @0 addressMode: [CUaddress_mode; 3],
        @12 filterMode: CUfilter_mode,
        @16 flags: u32,
        @20 maxAnisotropy: u32,
        @24 mipmapFilterMode: CUfilter_mode,
        @28 mipmapLevelBias: f32,
        @32 minMipmapLevelClamp: f32,
        @36 maxMipmapLevelClamp: f32,
        @40 borderColor: [f32; 4],
        @56 reserved: [i32; 12],
    }
    CU_DEV_SM_RESOURCE_GROUP_PARAMS [64, 4] {
        @0 smCount: u32,
        @4 coscheduledSmCount: u32,
        @8 preferredCoscheduledSmCount: u32,
        @12 flags: u32,
        @16 localityDomainId: u32,
        @20 reserved: [u32; 11],
    }
    CUasyncNotificationInfo [16, 8] {
        @0 type_: CUasyncNotificationType,
        @8 info: u64,
    }
    CUcheckpointCheckpointArgs [64, 8] {
        @0 customStorageInfo_out: *mut *mut CUcheckpointCustomStorageInfo,
        @8 reserved: [c_char; 56],
    }
    CUcheckpointCustomStorageInfo [24, 8] {
        @0 handle: CUcheckpointOperationHandle,
        @8 perDeviceData: *mut CUcheckpointCustomStoragePerDeviceData,
        @16 deviceCount: u32,
    }
    CUcheckpointCustomStoragePerDeviceData [24, 8] {
        @0 devPtr: CUdeviceptr,
        @8 size: usize,
        @16 stream: CUstream,
    }
    CUcheckpointGpuPair [32, 1] {
        @0 oldUuid: CUuuid,
        @16 newUuid: CUuuid,
    }
    CUcheckpointLockArgs [64, 8] {
        @0 timeoutMs: u32,
        @4 reserved0: u32,
        @8 reserved1: [u64; 7],
    }
    CUcheckpointRestoreArgs [64, 8] {
        @0 gpuPairs: *mut CUcheckpointGpuPair,
        @8 gpuPairsCount: u32,
        @12 padding0: u32,
        @16 customStorageInfo_out: *mut *mut CUcheckpointCustomStorageInfo,
        @24 reserved: [c_char; 40],
    }
    CUcheckpointUnlockArgs [64, 8] {
        @0 reserved: [u64; 8],
    }
    CUcliqueInfo [8, 4] {
        @0 type_: CUcliqueType,
        @4 id: u32,
    }
    CUdevResource [144, 8] {
        @0 type_: CUdevResourceType,
        @4 _internal_padding: [u8; 92],
        @96 u: [u64; 5],
        @136 nextResource: *mut CUdevResource,
    }
    CUdevprop [56, 4] {
        @0 maxThreadsPerBlock: i32,
        @4 maxThreadsDim: [i32; 3],
        @16 maxGridSize: [i32; 3],
        @28 sharedMemPerBlock: i32,
        @32 totalConstantMemory: i32,
        @36 SIMDWidth: i32,
        @40 memPitch: i32,
        @44 regsPerBlock: i32,
        @48 clockRate: i32,
        @52 textureAlign: i32,
    }
    CUexecAffinityParam [8, 4] {
        @0 type_: CUexecAffinityType,
        @4 param: u32,
    }
    CUlogicalEndpointProp [24, 8] {
        @0 type_: CUlogicalEndpointType,
        @4 u: u32,
        @8 size: u64,
        @16 ipcHandleTypes: u32,
        @20 flags: u32,
    }
    CUmemDecompressParams [64, 8] {
        @0 srcNumBytes: usize,
        @8 dstNumBytes: usize,
        @16 dstActBytes: *mut u32,
        @24 src: *const c_void,
        @32 dst: *mut c_void,
        @40 algo: CUmemDecompressAlgorithm,
        @44 padding: [u8; 20],
    }
    CUmulticastObjectProp [32, 8] {
        @0 numDevices: u32,
        @8 size: usize,
        @16 handleTypes: u64,
        @24 flags: u64,
    }
    CUtensorMap [128, 128] {
        @0 opaque: [u64; 16],
    }
}
