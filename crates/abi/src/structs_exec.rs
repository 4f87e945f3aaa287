//! Structures of contexts, streams, launches, captures and graphs.

#![expect(missing_docs, reason = "the names are the driver's own")]

use super::macros::driver_struct;
use crate::*;

driver_struct! {
    CUDA_BATCH_MEM_OP_NODE_PARAMS [32, 8] {
        @0 ctx: CUcontext,
        @8 count: u32,
        @16 paramArray: *mut CUstreamBatchMemOpParams,
        @24 flags: u32,
    }
    CUDA_GRAPH_INSTANTIATE_PARAMS [32, 8] {
        @0 flags: u64,
        @8 hUploadStream: CUstream,
        @16 hErrNode_out: CUgraphNode,
        @24 result_out: CUgraphInstantiateResult,
    }
    CUDA_HOST_NODE_PARAMS [16, 8] {
        @0 fn_: CUhostFn,
        @8 userData: *mut c_void,
    }
    CUDA_HOST_NODE_PARAMS_v2 [32, 8] {
        @0 fn_: CUhostFn,
        @8 userData: *mut c_void,
        @16 syncMode: u32,
        @24 u: u64,
    }
    CUDA_KERNEL_NODE_PARAMS [72, 8] {
        @0 func: CUfunction,
        @8 gridDimX: u32,
        @12 gridDimY: u32,
        @16 gridDimZ: u32,
        @20 blockDimX: u32,
        @24 blockDimY: u32,
        @28 blockDimZ: u32,
        @32 sharedMemBytes: u32,
        @40 kernelParams: *mut *mut c_void,
        @48 extra: *mut *mut c_void,
        @56 kern: CUkernel,
        @64 ctx: CUcontext,
    }
    CUDA_KERNEL_NODE_PARAMS_v1 [56, 8] {
        @0 func: CUfunction,
        @8 gridDimX: u32,
        @12 gridDimY: u32,
        @16 gridDimZ: u32,
        @20 blockDimX: u32,
        @24 blockDimY: u32,
        @28 blockDimZ: u32,
        @32 sharedMemBytes: u32,
        @40 kernelParams: *mut *mut c_void,
        @48 extra: *mut *mut c_void,
    }
    CUDA_KERNEL_NODE_PARAMS_v3 [72, 8] {
        @0 func: CUfunction,
        @8 gridDimX: u32,
        @12 gridDimY: u32,
        @16 gridDimZ: u32,
        @20 blockDimX: u32,
        @24 blockDimY: u32,
        @28 blockDimZ: u32,
        @32 sharedMemBytes: u32,
        @40 kernelParams: *mut *mut c_void,
        @48 extra: *mut *mut c_void,
        @56 kern: CUkernel,
        @64 ctx: CUcontext,
    }
    CUDA_LAUNCH_PARAMS [56, 8] {
        @0 function: CUfunction,
        @8 gridDimX: u32,
        @12 gridDimY: u32,
        @16 gridDimZ: u32,
        @20 blockDimX: u32,
        @24 blockDimY: u32,
        @28 blockDimZ: u32,
        @32 sharedMemBytes: u32,
        @40 hStream: CUstream,
        @48 kernelParams: *mut *mut c_void,
    }
    CUDA_MEMCPY_NODE_PARAMS [216, 8] {
        @0 flags: i32,
        @4 reserved: i32,
        @8 copyCtx: CUcontext,
        @16 copyParams: CUDA_MEMCPY3D,
    }
    CUDA_MEMSET_NODE_PARAMS [40, 8] {
        @0 dst: CUdeviceptr,
        @8 pitch: usize,
        @16 value: u32,
        @20 elementSize: u32,
        @24 width: usize,
        @32 height: usize,
    }
    CUDA_MEMSET_NODE_PARAMS_v2 [48, 8] {
        @0 dst: CUdeviceptr,
        @8 pitch: usize,
        @16 value: u32,
        @20 elementSize: u32,
        @24 width: usize,
        @32 height: usize,
        @40 ctx: CUcontext,
    }
    CUDA_MEM_ALLOC_NODE_PARAMS [120, 8] {
        @0 poolProps: CUmemPoolProps,
        @88 accessDescs: *const CUmemAccessDesc,
        @96 accessDescCount: usize,
        @104 bytesize: usize,
        @112 dptr: CUdeviceptr,
    }
    CUDA_MEM_ALLOC_NODE_PARAMS_v2 [120, 8] {
        @0 poolProps: CUmemPoolProps,
        @88 accessDescs: *const CUmemAccessDesc,
        @96 accessDescCount: usize,
        @104 bytesize: usize,
        @112 dptr: CUdeviceptr,
    }
    CUDA_MEM_FREE_NODE_PARAMS [8, 8] {
        @0 dptr: CUdeviceptr,
    }
    CUctxCigParam [16, 8] {
        @0 sharedDataType: CUcigDataType,
        @8 sharedData: *mut c_void,
    }
    CUctxCreateParams [24, 8] {
        @0 execAffinityParams: *mut CUexecAffinityParam,
        @8 numExecAffinityParams: i32,
        @16 cigParams: *mut CUctxCigParam,
    }
    CUgraphEdgeData [8, 1] {
        @0 from_port: u8,
        @1 to_port: u8,
        @2 type_: u8,
        @3 reserved: [u8; 5],
    }
    CUgraphExecUpdateResultInfo [24, 8] {
        @0 result: CUgraphExecUpdateResult,
        @8 errorNode: CUgraphNode,
        @16 errorFromNode: CUgraphNode,
    }
    CUgraphNodeParams [256, 8] {
        @0 type_: CUgraphNodeType,
        @4 reserved0: [i32; 3],
        @16 u: [u64; 29],
        @248 reserved2: i64,
    }
    CUlaunchAttribute [72, 8] {
        @0 id: CUlaunchAttributeID,
        @4 pad: [c_char; 4],
        @8 value: CUlaunchAttributeValue,
    }
    CUlaunchAttributeValue [64, 8] {
        @0 words: [u64; 8],
    }
    CUlaunchConfig [56, 8] {
        @0 gridDimX: u32,
        @4 gridDimY: u32,
        @8 gridDimZ: u32,
        @12 blockDimX: u32,
        @16 blockDimY: u32,
        @20 blockDimZ: u32,
        @24 sharedMemBytes: u32,
        @32 hStream: CUstream,
        @40 attrs: *mut CUlaunchAttribute,
        @48 numAttrs: u32,
    }
    CUstreamBatchMemOpParams [48, 8] {
        @0 words: [u64; 6],
    }
    CUstreamCigCaptureParams [8, 8] {
        @0 streamCigParams: *mut CUstreamCigParam,
    }
    CUstreamCigParam [16, 8] {
        @0 streamSharedDataType: CUstreamCigDataType,
        @8 streamSharedData: *mut c_void,
    }
}
