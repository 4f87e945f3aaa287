//! What the simulation implements: the table from the interface's functions to ours.
//!
//! The glob import is the answer for everything that is not named: NOT_SUPPORTED. A name that is imported by itself takes its place,
//! and the compiler checks that it exists and has the interface's parameters. A per-thread form (`_ptds`, `_ptsz`) is the same function,
//! because the [`Caller`](crate::caller::Caller) knows which default stream is meant; an older version with the same parameters is too.

pub(crate) use crate::export::defaults::*;

pub(crate) use crate::capture::{
    cuStreamBeginCapture, cuStreamBeginCapture as cuStreamBeginCapture_ptsz, cuStreamBeginCapture_v2,
    cuStreamBeginCapture_v2 as cuStreamBeginCapture_v2_ptsz, cuStreamBeginCaptureToGraph,
    cuStreamBeginCaptureToGraph as cuStreamBeginCaptureToGraph_ptsz, cuStreamEndCapture,
    cuStreamEndCapture as cuStreamEndCapture_ptsz, cuStreamGetCaptureInfo,
    cuStreamGetCaptureInfo as cuStreamGetCaptureInfo_ptsz, cuStreamGetCaptureInfo_v2,
    cuStreamGetCaptureInfo_v2 as cuStreamGetCaptureInfo_v2_ptsz, cuStreamGetCaptureInfo_v3,
    cuStreamGetCaptureInfo_v3 as cuStreamGetCaptureInfo_v3_ptsz, cuStreamIsCapturing,
    cuStreamIsCapturing as cuStreamIsCapturing_ptsz, cuStreamUpdateCaptureDependencies,
    cuStreamUpdateCaptureDependencies as cuStreamUpdateCaptureDependencies_ptsz,
    cuStreamUpdateCaptureDependencies_v2,
    cuStreamUpdateCaptureDependencies_v2 as cuStreamUpdateCaptureDependencies_v2_ptsz,
    cuThreadExchangeStreamCaptureMode,
};
pub(crate) use crate::checkpoint::{
    cuCheckpointProcessCheckpoint, cuCheckpointProcessGetRestoreThreadId, cuCheckpointProcessGetState,
    cuCheckpointProcessLock, cuCheckpointProcessRestore, cuCheckpointProcessUnlock,
};
pub(crate) use crate::conditional::cuGraphConditionalHandleCreate;
pub(crate) use crate::context::{
    cuCtxCreate_v2, cuCtxCreate_v2 as cuCtxCreate, cuCtxCreate_v3, cuCtxCreate_v4, cuCtxDestroy_v2,
    cuCtxDestroy_v2 as cuCtxDestroy, cuCtxDisablePeerAccess, cuCtxEnablePeerAccess, cuCtxGetApiVersion,
    cuCtxGetCacheConfig, cuCtxGetCurrent, cuCtxGetDevice, cuCtxGetDevice_v2, cuCtxGetFlags, cuCtxGetId,
    cuCtxGetLimit, cuCtxGetSharedMemConfig, cuCtxGetStreamPriorityRange, cuCtxPopCurrent_v2,
    cuCtxPopCurrent_v2 as cuCtxPopCurrent, cuCtxPushCurrent_v2, cuCtxPushCurrent_v2 as cuCtxPushCurrent,
    cuCtxRecordEvent, cuCtxResetPersistingL2Cache, cuCtxSetCacheConfig, cuCtxSetCurrent, cuCtxSetFlags,
    cuCtxSetLimit, cuCtxSetSharedMemConfig, cuCtxSynchronize, cuCtxSynchronize_v2, cuCtxWaitEvent,
    cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxRelease_v2,
    cuDevicePrimaryCtxRelease_v2 as cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxReset_v2,
    cuDevicePrimaryCtxReset_v2 as cuDevicePrimaryCtxReset, cuDevicePrimaryCtxRetain,
    cuDevicePrimaryCtxSetFlags_v2, cuDevicePrimaryCtxSetFlags_v2 as cuDevicePrimaryCtxSetFlags,
};
pub(crate) use crate::copy::{
    cuMemcpy, cuMemcpy as cuMemcpy_ptds, cuMemcpy2D_v2, cuMemcpy2D_v2 as cuMemcpy2D_v2_ptds,
    cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2 as cuMemcpy2DAsync_v2_ptsz, cuMemcpy2DUnaligned_v2,
    cuMemcpy2DUnaligned_v2 as cuMemcpy2DUnaligned_v2_ptds, cuMemcpy3D_v2,
    cuMemcpy3D_v2 as cuMemcpy3D_v2_ptds, cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2 as cuMemcpy3DAsync_v2_ptsz,
    cuMemcpy3DPeer, cuMemcpy3DPeer as cuMemcpy3DPeer_ptds, cuMemcpy3DPeerAsync,
    cuMemcpy3DPeerAsync as cuMemcpy3DPeerAsync_ptsz, cuMemcpyAsync, cuMemcpyAsync as cuMemcpyAsync_ptsz,
    cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2 as cuMemcpyBatchAsync_v2_ptsz, cuMemcpyDtoD_v2,
    cuMemcpyDtoD_v2 as cuMemcpyDtoD_v2_ptds, cuMemcpyDtoDAsync_v2,
    cuMemcpyDtoDAsync_v2 as cuMemcpyDtoDAsync_v2_ptsz, cuMemcpyDtoH_v2,
    cuMemcpyDtoH_v2 as cuMemcpyDtoH_v2_ptds, cuMemcpyDtoHAsync_v2,
    cuMemcpyDtoHAsync_v2 as cuMemcpyDtoHAsync_v2_ptsz, cuMemcpyHtoD_v2,
    cuMemcpyHtoD_v2 as cuMemcpyHtoD_v2_ptds, cuMemcpyHtoDAsync_v2,
    cuMemcpyHtoDAsync_v2 as cuMemcpyHtoDAsync_v2_ptsz, cuMemcpyPeer, cuMemcpyPeer as cuMemcpyPeer_ptds,
    cuMemcpyPeerAsync, cuMemcpyPeerAsync as cuMemcpyPeerAsync_ptsz, cuMemsetD2D8_v2,
    cuMemsetD2D8_v2 as cuMemsetD2D8_v2_ptds, cuMemsetD2D8Async, cuMemsetD2D8Async as cuMemsetD2D8Async_ptsz,
    cuMemsetD2D16_v2, cuMemsetD2D16_v2 as cuMemsetD2D16_v2_ptds, cuMemsetD2D16Async,
    cuMemsetD2D16Async as cuMemsetD2D16Async_ptsz, cuMemsetD2D32_v2,
    cuMemsetD2D32_v2 as cuMemsetD2D32_v2_ptds, cuMemsetD2D32Async,
    cuMemsetD2D32Async as cuMemsetD2D32Async_ptsz, cuMemsetD8_v2, cuMemsetD8_v2 as cuMemsetD8_v2_ptds,
    cuMemsetD8Async, cuMemsetD8Async as cuMemsetD8Async_ptsz, cuMemsetD16_v2,
    cuMemsetD16_v2 as cuMemsetD16_v2_ptds, cuMemsetD16Async, cuMemsetD16Async as cuMemsetD16Async_ptsz,
    cuMemsetD32_v2, cuMemsetD32_v2 as cuMemsetD32_v2_ptds, cuMemsetD32Async,
    cuMemsetD32Async as cuMemsetD32Async_ptsz,
};
pub(crate) use crate::copy_array::{
    cuMemcpyAtoA_v2, cuMemcpyAtoA_v2 as cuMemcpyAtoA_v2_ptds, cuMemcpyAtoD_v2,
    cuMemcpyAtoD_v2 as cuMemcpyAtoD_v2_ptds, cuMemcpyAtoH_v2, cuMemcpyAtoH_v2 as cuMemcpyAtoH_v2_ptds,
    cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2 as cuMemcpyAtoHAsync_v2_ptsz, cuMemcpyDtoA_v2,
    cuMemcpyDtoA_v2 as cuMemcpyDtoA_v2_ptds, cuMemcpyHtoA_v2, cuMemcpyHtoA_v2 as cuMemcpyHtoA_v2_ptds,
    cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2 as cuMemcpyHtoAAsync_v2_ptsz,
};
pub(crate) use crate::device::{
    cuDeviceCanAccessPeer, cuDeviceComputeCapability, cuDeviceGet, cuDeviceGetAttribute,
    cuDeviceGetByPCIBusId, cuDeviceGetCount, cuDeviceGetExecAffinitySupport, cuDeviceGetName,
    cuDeviceGetP2PAttribute, cuDeviceGetPCIBusId, cuDeviceGetProperties, cuDeviceGetUuid, cuDeviceGetUuid_v2,
    cuDeviceTotalMem_v2,
};
pub(crate) use crate::event::{
    cuEventCreate, cuEventDestroy_v2, cuEventDestroy_v2 as cuEventDestroy, cuEventElapsedTime,
    cuEventElapsedTime as cuEventElapsedTime_v2, cuEventQuery, cuEventRecord,
    cuEventRecord as cuEventRecord_ptsz, cuEventRecordWithFlags,
    cuEventRecordWithFlags as cuEventRecordWithFlags_ptsz, cuEventSynchronize,
};
pub(crate) use crate::external::{
    cuDestroyExternalMemory, cuDestroyExternalSemaphore, cuExternalMemoryGetMappedBuffer,
    cuImportExternalMemory, cuImportExternalSemaphore, cuSignalExternalSemaphoresAsync,
    cuSignalExternalSemaphoresAsync as cuSignalExternalSemaphoresAsync_ptsz, cuWaitExternalSemaphoresAsync,
    cuWaitExternalSemaphoresAsync as cuWaitExternalSemaphoresAsync_ptsz,
};
pub(crate) use crate::graph::{
    cuGraphClone, cuGraphCreate, cuGraphDestroy, cuGraphExecDestroy, cuGraphExecGetFlags,
    cuGraphInstantiate_v2, cuGraphInstantiate_v2 as cuGraphInstantiate, cuGraphInstantiateWithFlags,
    cuGraphInstantiateWithParams, cuGraphInstantiateWithParams as cuGraphInstantiateWithParams_ptsz,
    cuGraphLaunch, cuGraphLaunch as cuGraphLaunch_ptsz, cuGraphUpload, cuGraphUpload as cuGraphUpload_ptsz,
};
pub(crate) use crate::graph_edges::{
    cuGraphAddDependencies, cuGraphAddDependencies_v2, cuGraphDestroyNode, cuGraphGetEdges,
    cuGraphGetEdges_v2, cuGraphGetNodes, cuGraphGetRootNodes, cuGraphNodeGetDependencies,
    cuGraphNodeGetDependencies_v2, cuGraphNodeGetDependentNodes, cuGraphNodeGetDependentNodes_v2,
    cuGraphRemoveDependencies, cuGraphRemoveDependencies_v2,
};
pub(crate) use crate::graph_memory::{
    cuDeviceGetGraphMemAttribute, cuDeviceGraphMemTrim, cuDeviceSetGraphMemAttribute,
};
pub(crate) use crate::graph_nodes::{
    cuGraphAddChildGraphNode, cuGraphAddEmptyNode, cuGraphAddEventRecordNode, cuGraphAddEventWaitNode,
    cuGraphAddHostNode, cuGraphAddKernelNode, cuGraphAddKernelNode_v2, cuGraphAddMemAllocNode,
    cuGraphAddMemFreeNode, cuGraphAddMemcpyNode, cuGraphAddMemsetNode, cuGraphAddNode, cuGraphAddNode_v2,
    cuGraphAddNode_v2 as cuGraphAddNode_v3, cuGraphChildGraphNodeGetGraph, cuGraphExecHostNodeSetParams,
    cuGraphExecKernelNodeSetParams_v2, cuGraphExecMemcpyNodeSetParams, cuGraphExecMemsetNodeSetParams,
    cuGraphHostNodeGetParams, cuGraphHostNodeSetParams, cuGraphKernelNodeGetParams_v2,
    cuGraphKernelNodeSetParams_v2, cuGraphMemAllocNodeGetParams, cuGraphMemFreeNodeGetParams,
    cuGraphMemcpyNodeGetParams, cuGraphMemcpyNodeSetParams, cuGraphMemsetNodeGetParams,
    cuGraphMemsetNodeSetParams, cuGraphNodeGetContainingGraph, cuGraphNodeGetType,
};
pub(crate) use crate::graph_nodes::{
    cuGraphEventRecordNodeGetEvent, cuGraphEventWaitNodeGetEvent, cuGraphExecKernelNodeSetParams,
    cuGraphKernelNodeGetParams, cuGraphKernelNodeSetParams,
};
pub(crate) use crate::graph_update::{
    cuGraphEventRecordNodeSetEvent, cuGraphEventWaitNodeSetEvent, cuGraphExecChildGraphNodeSetParams,
    cuGraphExecEventRecordNodeSetEvent, cuGraphExecEventWaitNodeSetEvent, cuGraphExecNodeSetParams,
    cuGraphExecUpdate, cuGraphExecUpdate_v2, cuGraphNodeFindInClone, cuGraphNodeGetEnabled,
    cuGraphNodeSetEnabled, cuGraphNodeSetParams, cuGraphNodeSetParams as cuGraphNodeSetParams_v2,
};
pub(crate) use crate::green::{
    cuCtxFromGreenCtx, cuDevResourceGenerateDesc, cuDevSmResourceSplitByCount, cuDeviceGetDevResource,
    cuGreenCtxCreate, cuGreenCtxDestroy, cuGreenCtxGetDevResource, cuGreenCtxRecordEvent,
    cuGreenCtxStreamCreate, cuGreenCtxWaitEvent,
};
pub(crate) use crate::ipc::{
    cuIpcCloseMemHandle, cuIpcGetEventHandle, cuIpcGetMemHandle, cuIpcOpenEventHandle, cuIpcOpenMemHandle_v2,
    cuIpcOpenMemHandle_v2 as cuIpcOpenMemHandle,
};
pub(crate) use crate::launch::{
    cuLaunchCooperativeKernel, cuLaunchCooperativeKernel as cuLaunchCooperativeKernel_ptsz, cuLaunchKernel,
    cuLaunchKernel as cuLaunchKernel_ptsz, cuLaunchKernelEx, cuLaunchKernelEx as cuLaunchKernelEx_ptsz,
};
pub(crate) use crate::memory::alloc::{
    cuMemAlloc_v2, cuMemAllocManaged, cuMemAllocPitch_v2, cuMemFree_v2, cuMemGetAddressRange_v2,
    cuMemGetInfo_v2,
};
pub(crate) use crate::memory::array::{
    cuArray3DCreate_v2, cuArray3DGetDescriptor_v2, cuArrayCreate_v2, cuArrayDestroy, cuArrayGetDescriptor_v2,
    cuArrayGetMemoryRequirements, cuArrayGetPlane, cuArrayGetSparseProperties, cuMemMapArrayAsync,
    cuMemMapArrayAsync as cuMemMapArrayAsync_ptsz, cuMipmappedArrayCreate, cuMipmappedArrayDestroy,
    cuMipmappedArrayGetLevel, cuMipmappedArrayGetMemoryRequirements, cuMipmappedArrayGetSparseProperties,
};
pub(crate) use crate::memory::host::{
    cuMemAllocHost_v2, cuMemFreeHost, cuMemHostAlloc, cuMemHostGetDevicePointer_v2, cuMemHostGetFlags,
    cuMemHostRegister_v2, cuMemHostRegister_v2 as cuMemHostRegister, cuMemHostUnregister,
};
pub(crate) use crate::memory::managed::{
    cuMemAdvise, cuMemAdvise_v2, cuMemDiscardAndPrefetchBatchAsync,
    cuMemDiscardAndPrefetchBatchAsync as cuMemDiscardAndPrefetchBatchAsync_ptsz, cuMemDiscardBatchAsync,
    cuMemDiscardBatchAsync as cuMemDiscardBatchAsync_ptsz, cuMemPrefetchAsync,
    cuMemPrefetchAsync as cuMemPrefetchAsync_ptsz, cuMemPrefetchAsync_v2,
    cuMemPrefetchAsync_v2 as cuMemPrefetchAsync_v2_ptsz, cuMemPrefetchBatchAsync,
    cuMemPrefetchBatchAsync as cuMemPrefetchBatchAsync_ptsz, cuMemRangeGetAttribute, cuMemRangeGetAttributes,
    cuStreamAttachMemAsync, cuStreamAttachMemAsync as cuStreamAttachMemAsync_ptsz,
};
pub(crate) use crate::memory::pointer::{
    cuPointerGetAttribute, cuPointerGetAttributes, cuPointerSetAttribute,
};
pub(crate) use crate::memory::vmm::{
    cuMemAddressFree, cuMemAddressReserve, cuMemCreate, cuMemExportToShareableHandle, cuMemGetAccess,
    cuMemGetAllocationGranularity, cuMemGetAllocationPropertiesFromHandle, cuMemGetHandleForAddressRange,
    cuMemImportFromShareableHandle, cuMemMap, cuMemRelease, cuMemRetainAllocationHandle, cuMemSetAccess,
    cuMemUnmap,
};
pub(crate) use crate::misc::{cuDriverGetVersion, cuGetErrorName, cuGetErrorString, cuGetExportTable};
pub(crate) use crate::module::{
    cuFuncGetAttribute, cuFuncGetModule, cuFuncGetName, cuFuncGetParamInfo, cuFuncIsLoaded, cuFuncLoad,
    cuFuncSetAttribute, cuFuncSetCacheConfig, cuKernelGetAttribute, cuKernelGetFunction, cuKernelGetLibrary,
    cuKernelGetName, cuKernelGetParamInfo, cuKernelSetAttribute, cuLibraryGetGlobal, cuLibraryGetKernel,
    cuLibraryGetKernelCount, cuLibraryGetModule, cuLibraryLoadData, cuLibraryLoadFromFile, cuLibraryUnload,
    cuModuleEnumerateFunctions, cuModuleGetFunction, cuModuleGetFunctionCount, cuModuleGetGlobal_v2,
    cuModuleGetLoadingMode, cuModuleLoad, cuModuleLoadData, cuModuleLoadDataEx, cuModuleLoadFatBinary,
    cuModuleUnload, cuOccupancyMaxActiveBlocksPerMultiprocessor,
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
};
pub(crate) use crate::multicast::{
    cuMulticastAddDevice, cuMulticastBindAddr, cuMulticastBindAddr_v2, cuMulticastBindMem,
    cuMulticastBindMem_v2, cuMulticastCreate, cuMulticastGetGranularity, cuMulticastUnbind,
};
pub(crate) use crate::pool::{
    cuDeviceGetDefaultMemPool, cuDeviceGetMemPool, cuDeviceSetMemPool, cuMemAllocAsync,
    cuMemAllocAsync as cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync,
    cuMemAllocFromPoolAsync as cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync,
    cuMemFreeAsync as cuMemFreeAsync_ptsz, cuMemGetDefaultMemPool, cuMemGetMemPool, cuMemPoolCreate,
    cuMemPoolDestroy, cuMemPoolExportPointer, cuMemPoolExportToShareableHandle, cuMemPoolGetAccess,
    cuMemPoolGetAttribute, cuMemPoolImportFromShareableHandle, cuMemPoolImportPointer, cuMemPoolSetAccess,
    cuMemPoolSetAttribute, cuMemPoolTrimTo, cuMemSetMemPool,
};
pub(crate) use crate::proc_address::{cuGetProcAddress, cuGetProcAddress_v2};
pub(crate) use crate::process::cuInit;
pub(crate) use crate::stream::{
    cuLaunchHostFunc, cuLaunchHostFunc as cuLaunchHostFunc_ptsz, cuLaunchHostFunc_v2,
    cuLaunchHostFunc_v2 as cuLaunchHostFunc_v2_ptsz, cuStreamAddCallback,
    cuStreamAddCallback as cuStreamAddCallback_ptsz, cuStreamBatchMemOp_v2,
    cuStreamBatchMemOp_v2 as cuStreamBatchMemOp, cuStreamBatchMemOp_v2 as cuStreamBatchMemOp_ptsz,
    cuStreamBatchMemOp_v2 as cuStreamBatchMemOp_v2_ptsz, cuStreamCopyAttributes,
    cuStreamCopyAttributes as cuStreamCopyAttributes_ptsz, cuStreamCreate, cuStreamCreateWithPriority,
    cuStreamDestroy_v2, cuStreamDestroy_v2 as cuStreamDestroy, cuStreamGetAttribute,
    cuStreamGetAttribute as cuStreamGetAttribute_ptsz, cuStreamGetCtx, cuStreamGetCtx as cuStreamGetCtx_ptsz,
    cuStreamGetCtx_v2, cuStreamGetCtx_v2 as cuStreamGetCtx_v2_ptsz, cuStreamGetDevice,
    cuStreamGetDevice as cuStreamGetDevice_ptsz, cuStreamGetFlags, cuStreamGetFlags as cuStreamGetFlags_ptsz,
    cuStreamGetId, cuStreamGetId as cuStreamGetId_ptsz, cuStreamGetPriority,
    cuStreamGetPriority as cuStreamGetPriority_ptsz, cuStreamQuery, cuStreamQuery as cuStreamQuery_ptsz,
    cuStreamSetAttribute, cuStreamSetAttribute as cuStreamSetAttribute_ptsz, cuStreamSynchronize,
    cuStreamSynchronize as cuStreamSynchronize_ptsz, cuStreamWaitEvent,
    cuStreamWaitEvent as cuStreamWaitEvent_ptsz, cuStreamWaitValue32_v2,
    cuStreamWaitValue32_v2 as cuStreamWaitValue32, cuStreamWaitValue32_v2 as cuStreamWaitValue32_ptsz,
    cuStreamWaitValue32_v2 as cuStreamWaitValue32_v2_ptsz, cuStreamWaitValue64_v2,
    cuStreamWaitValue64_v2 as cuStreamWaitValue64, cuStreamWaitValue64_v2 as cuStreamWaitValue64_ptsz,
    cuStreamWaitValue64_v2 as cuStreamWaitValue64_v2_ptsz, cuStreamWriteValue32_v2,
    cuStreamWriteValue32_v2 as cuStreamWriteValue32, cuStreamWriteValue32_v2 as cuStreamWriteValue32_ptsz,
    cuStreamWriteValue32_v2 as cuStreamWriteValue32_v2_ptsz, cuStreamWriteValue64_v2,
    cuStreamWriteValue64_v2 as cuStreamWriteValue64, cuStreamWriteValue64_v2 as cuStreamWriteValue64_ptsz,
    cuStreamWriteValue64_v2 as cuStreamWriteValue64_v2_ptsz,
};
pub(crate) use crate::texture::{
    cuSurfObjectCreate, cuSurfObjectDestroy, cuSurfObjectGetResourceDesc, cuTexObjectCreate,
    cuTexObjectDestroy, cuTexObjectGetResourceDesc, cuTexObjectGetResourceViewDesc,
    cuTexObjectGetTextureDesc,
};
pub(crate) use crate::user_object::{
    cuGraphReleaseUserObject, cuGraphRetainUserObject, cuUserObjectCreate, cuUserObjectRelease,
    cuUserObjectRetain,
};
