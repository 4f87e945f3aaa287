//! What each of the driver's functions means to us: one table, from which hooks, tests and `ebb doctor` are made.
//!
//! A function that the driver's list has and this table has not does not compile.
//!
//! | class | meaning |
//! | --- | --- |
//! | allocate | takes memory |
//! | free | gives memory back |
//! | touch | may make the GPU read or write memory, or lets the driver look at addresses |
//! | query | asks; the answer may be virtualised |
//! | share | lets somebody else hold memory |
//! | capture | stream capture |
//! | lifetime | begins or ends what memory depends on |
//! | pass | nothing to do with memory |
//!
//! | how | meaning |
//! | --- | --- |
//! | gate | hook generated from the function list: through the gate, call, leave |
//! | sync | the same, and waited for while memory wants it so |
//! | own | hook written by hand, in `hooks/` |
//! | held | hook generated: the call as it is, unless the process sleeps (is checkpointed, `0004-tiers.md`): then it wakes it first |
//! | bars | the same; from then on the process cannot be checkpointed |
//! | pass | no hook: the program gets the driver's function itself |

use crate::interop;

/// Calls `$callback!` with the table.
macro_rules! for_each_class {
    ($callback:ident) => {
        $callback! { $
            // May make the GPU, or a copy engine, read or write memory of the program; or the driver checks an address in it.
            // The hook is generated: enter the gate, call, leave.
            touch gate {
                cuFabricCpyBatchAsync cuFabricCpyBatchAsync_ptsz cuGraphAddBatchMemOpNode cuGraphAddMemcpyNode
                cuGraphAddMemsetNode cuGraphBatchMemOpNodeSetParams cuGraphExecBatchMemOpNodeSetParams
                cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecNodeSetParams
                cuGraphExecChildGraphNodeSetParams cuGraphExecUpdate cuGraphExecUpdate_v2
                cuGraphLaunch cuGraphLaunch_ptsz cuGraphMemcpyNodeSetParams cuGraphMemsetNodeSetParams
                cuGraphNodeSetParams cuGraphNodeSetParams_v2 cuGraphUpload cuGraphUpload_ptsz
                cuGraphicsMapResources cuGraphicsMapResources_ptsz cuGraphicsUnmapResources
                cuGraphicsUnmapResources_ptsz cuLaunch cuLaunchCooperativeKernel
                cuLaunchCooperativeKernelMultiDevice cuLaunchCooperativeKernel_ptsz cuLaunchGrid
                cuLaunchGridAsync cuLaunchKernel cuLaunchKernelEx cuLaunchKernelEx_ptsz cuLaunchKernel_ptsz
                cuLogicalEndpointBindAddr cuMemAdvise cuMemAdvise_v2 cuMemBatchDecompressAsync
                cuMemBatchDecompressAsync_ptsz cuMemDiscardAndPrefetchBatchAsync
                cuMemDiscardAndPrefetchBatchAsync_ptsz cuMemDiscardBatchAsync cuMemDiscardBatchAsync_ptsz
                cuMemPrefetchAsync cuMemPrefetchAsync_ptsz
                cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz cuMemPrefetchBatchAsync
                cuMemPrefetchBatchAsync_ptsz cuMemcpy2DAsync cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz
                cuMemcpy3DAsync cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz cuMemcpy3DBatchAsync
                cuMemcpy3DBatchAsync_ptsz cuMemcpy3DBatchAsync_v2 cuMemcpy3DBatchAsync_v2_ptsz
                cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz cuMemcpy3DWithAttributesAsync
                cuMemcpy3DWithAttributesAsync_ptsz cuMemcpyAsync cuMemcpyAsync_ptsz cuMemcpyAtoHAsync
                cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz
                cuMemcpyBatchAsync_v2 cuMemcpyBatchAsync_v2_ptsz cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2
                cuMemcpyDtoDAsync_v2_ptsz cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz
                cuMemcpyHtoAAsync cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz cuMemcpyHtoDAsync
                cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz
                cuMemcpyWithAttributesAsync cuMemcpyWithAttributesAsync_ptsz cuMemsetD16Async
                cuMemsetD16Async_ptsz cuMemsetD2D16Async cuMemsetD2D16Async_ptsz cuMemsetD2D32Async
                cuMemsetD2D32Async_ptsz cuMemsetD2D8Async cuMemsetD2D8Async_ptsz cuMemsetD32Async
                cuMemsetD32Async_ptsz cuMemsetD8Async cuMemsetD8Async_ptsz cuSignalExternalSemaphoresAsync
                cuSignalExternalSemaphoresAsync_ptsz cuStreamAttachMemAsync cuStreamAttachMemAsync_ptsz
                cuStreamBatchMemOp cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
                cuStreamWaitValue32 cuStreamWaitValue32_ptsz cuStreamWaitValue32_v2
                cuStreamWaitValue32_v2_ptsz cuStreamWaitValue64 cuStreamWaitValue64_ptsz
                cuStreamWaitValue64_v2 cuStreamWaitValue64_v2_ptsz cuStreamWriteValue32
                cuStreamWriteValue32_ptsz cuStreamWriteValue32_v2 cuStreamWriteValue32_v2_ptsz
                cuStreamWriteValue64 cuStreamWriteValue64_ptsz cuStreamWriteValue64_v2
                cuStreamWriteValue64_v2_ptsz cuTensorMapEncodeIm2col cuTensorMapEncodeIm2colWide
                cuTensorMapEncodeTiled cuTensorMapReplaceAddress cuTexObjectCreate cuTexRefSetAddress
                cuTexRefSetAddress2D cuTexRefSetAddress2D_v2 cuTexRefSetAddress2D_v3 cuTexRefSetAddress_v2
                cuWaitExternalSemaphoresAsync cuWaitExternalSemaphoresAsync_ptsz
            }
            // As above, and the program's handles are to be translated, or an instance holds its graph's memory.
            touch own {
                cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams
                cuGraphInstantiateWithParams_ptsz cuGraphInstantiate_v2
                cuMemMapArrayAsync cuMemMapArrayAsync_ptsz
            }
            // The same, and the driver may return before they are done: memory with SYNC_MEMOPS wants otherwise.
            touch sync {
                cuMemcpy cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds
                cuMemcpy2D_v2 cuMemcpy2D_v2_ptds cuMemcpy3D cuMemcpy3DPeer cuMemcpy3DPeer_ptds cuMemcpy3D_v2
                cuMemcpy3D_v2_ptds cuMemcpyAtoA cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds cuMemcpyAtoD
                cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds cuMemcpyAtoH cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds
                cuMemcpyDtoA cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyDtoD cuMemcpyDtoD_v2
                cuMemcpyDtoD_v2_ptds cuMemcpyDtoH cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds cuMemcpyHtoA
                cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds cuMemcpyHtoD cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds
                cuMemcpyPeer cuMemcpyPeer_ptds cuMemcpy_ptds cuMemsetD16 cuMemsetD16_v2 cuMemsetD16_v2_ptds
                cuMemsetD2D16 cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D32 cuMemsetD2D32_v2
                cuMemsetD2D32_v2_ptds cuMemsetD2D8 cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds cuMemsetD32
                cuMemsetD32_v2 cuMemsetD32_v2_ptds cuMemsetD8 cuMemsetD8_v2 cuMemsetD8_v2_ptds
            }
            // Takes device or pinned memory.
            allocate own {
                cuMemPoolCreate
                cuArray3DCreate cuArray3DCreate_v2 cuArrayCreate cuArrayCreate_v2 cuGraphAddMemAllocNode
                cuGraphAddNode cuGraphAddNode_v2 cuGraphAddNode_v3 cuMemAlloc cuMemAllocAsync
                cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz cuMemAllocHost
                cuMemAllocHost_v2 cuMemAllocManaged cuMemAllocPitch cuMemAllocPitch_v2 cuMemAlloc_v2
                cuMemCreate cuMemHostAlloc cuMemHostRegister cuMemHostRegister_v2 cuMemMap
                cuMipmappedArrayCreate
            }
            // Takes driver memory that has no size in the call; seen in the driver's overhead.
            allocate held {
                cuFuncLoad cuLibraryLoadData cuLibraryLoadFromFile cuLinkCreate cuLinkCreate_v2
                cuMemAddressReserve cuModuleLoad cuModuleLoadData cuModuleLoadDataEx
                cuModuleLoadFatBinary
            }
            // Gives memory back.
            free own {
                cuMemPoolDestroy cuMemPoolTrimTo
                cuArrayDestroy cuGraphAddMemFreeNode cuGraphDestroy cuGraphExecDestroy cuMemAddressFree cuMemFree cuMemFreeAsync cuMemFreeAsync_ptsz cuMemFreeHost
                cuMemFree_v2 cuMemHostUnregister cuMemRelease cuMemUnmap cuMipmappedArrayDestroy
            }
            // Gives back what is counted elsewhere, or is no memory of a card.
            free held {
                cuDeviceGraphMemTrim cuLinkDestroy
            }
            // The answer is the task's own world.
            query own {
                cuMemPoolGetAttribute cuCtxSynchronize cuCtxSynchronize_v2 cuStreamSynchronize cuStreamSynchronize_ptsz cuEventSynchronize
                cuDeviceTotalMem cuDeviceTotalMem_v2 cuMemGetAccess cuMemGetAddressRange cuMemGetAddressRange_v2
                cuMemGetAllocationPropertiesFromHandle
                cuMemGetInfo cuMemGetInfo_v2 cuPointerGetAttribute cuPointerGetAttributes
            }
            // The driver's answer is right as it is. Waiting and asking never bring memory back.
            query held {
                cuArray3DGetDescriptor cuArray3DGetDescriptor_v2 cuArrayGetDescriptor
                cuArrayGetDescriptor_v2 cuArrayGetMemoryRequirements cuArrayGetPlane
                cuArrayGetSparseProperties cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal
                cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevResource cuCtxGetDevice
                cuCtxGetDevice_v2 cuCtxGetExecAffinity cuCtxGetFlags cuCtxGetId cuCtxGetLimit
                cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange cuDeviceCanAccessPeer
                cuDeviceComputeCapability cuDeviceGet cuDeviceGetAttribute cuDeviceGetByPCIBusId
                cuDeviceGetCliqueCount cuDeviceGetCliqueInfo cuDeviceGetCount cuDeviceGetDefaultMemPool
                cuDeviceGetDevResource cuDeviceGetExecAffinitySupport cuDeviceGetFabricClusterUuid
                cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid
                cuDeviceGetMemPool cuDeviceGetName cuDeviceGetNvSciSyncAttributes
                cuDeviceGetP2PAtomicCapabilities cuDeviceGetP2PAttribute cuDeviceGetPCIBusId
                cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetUuid
                cuDeviceGetUuid_v2 cuDevicePrimaryCtxGetState cuEventElapsedTime cuEventElapsedTime_v2
                cuEventQuery cuFuncGetAttribute cuFuncGetModule cuFuncGetName cuFuncGetParamCount
                cuFuncGetParamInfo cuFuncIsLoaded cuGraphBatchMemOpNodeGetParams
                cuGraphChildGraphNodeGetGraph cuGraphDebugDotPrint cuGraphEventRecordNodeGetEvent
                cuGraphEventWaitNodeGetEvent cuGraphExecGetFlags cuGraphExecGetId
                cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresWaitNodeGetParams
                cuGraphGetEdges cuGraphGetEdges_v2 cuGraphGetId cuGraphGetNodes cuGraphGetRootNodes
                cuGraphHostNodeGetParams cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
                cuGraphKernelNodeGetParams_v2 cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams
                cuGraphMemcpyNodeGetParams cuGraphMemsetNodeGetParams cuGraphNodeFindInClone
                cuGraphNodeGetContainingGraph cuGraphNodeGetDependencies cuGraphNodeGetDependencies_v2
                cuGraphNodeGetDependentNodes cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled
                cuGraphNodeGetLocalId cuGraphNodeGetParams cuGraphNodeGetToolsId cuGraphNodeGetType
                cuGreenCtxGetDevResource cuGreenCtxGetId cuKernelGetAttribute cuKernelGetFunction
                cuKernelGetLibrary cuKernelGetName cuKernelGetParamCount cuKernelGetParamInfo
                cuLibraryEnumerateKernels cuLibraryGetGlobal cuLibraryGetKernel cuLibraryGetKernelCount
                cuLibraryGetManaged cuLibraryGetModule cuLibraryGetUnifiedFunction cuLogsCurrent
                cuLogsDumpToFile cuLogsDumpToMemory cuMemGetAllocationGranularity cuMemGetDefaultMemPool
                cuMemGetLocationInfo cuMemGetMemPool cuMemHostGetDevicePointer
                cuMemHostGetDevicePointer_v2 cuMemHostGetFlags cuMemPoolGetAccess cuMemRangeGetAttribute
                cuMemRangeGetAttributes cuMipmappedArrayGetLevel cuMipmappedArrayGetMemoryRequirements
                cuMipmappedArrayGetSparseProperties cuModuleEnumerateFunctions cuModuleGetFunction
                cuModuleGetFunctionCount cuModuleGetGlobal cuModuleGetGlobal_v2 cuModuleGetLoadingMode
                cuModuleGetSurfRef cuModuleGetTexRef cuOccupancyAvailableDynamicSMemPerBlock
                cuOccupancyMaxActiveBlocksPerMultiprocessor
                cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxActiveClusters
                cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
                cuOccupancyMaxPotentialClusterSize cuStreamGetAttribute cuStreamGetAttribute_ptsz
                cuStreamGetCtx cuStreamGetCtx_ptsz cuStreamGetCtx_v2 cuStreamGetCtx_v2_ptsz
                cuStreamGetDevResource cuStreamGetDevResource_ptsz cuStreamGetDevice
                cuStreamGetDevice_ptsz cuStreamGetFlags cuStreamGetFlags_ptsz cuStreamGetGreenCtx
                cuStreamGetId cuStreamGetId_ptsz cuStreamGetPriority cuStreamGetPriority_ptsz
                cuStreamQuery cuStreamQuery_ptsz cuSurfObjectGetResourceDesc cuSurfRefGetArray
                cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc
                cuTexRefGetAddress cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray
                cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat
                cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias
                cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray
            }
            // The same, and no checkpoint holds it back.
            query pass {
                cuDriverGetVersion cuGetErrorName cuGetErrorString
            }
            // Lets somebody else hold memory, or shows what an allocation is made of.
            share own {
                cuDestroyExternalMemory cuImportExternalMemory cuMemImportFromShareableHandle
                cuMemPoolExportPointer cuMemPoolImportPointer
                cuMemPoolSetAccess
                cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuIpcCloseMemHandle cuIpcGetMemHandle
                cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 cuLogicalEndpointBindMem
                cuMemExportToShareableHandle cuMemGetHandleForAddressRange cuMemSetAccess
                cuMulticastBindMem cuMulticastBindMem_v2 cuMulticastUnbind
                cuMemRetainAllocationHandle cuMulticastBindAddr cuMulticastBindAddr_v2
                cuPointerSetAttribute
            }
            // Shares what is not ours to move.
            share held {
                cuDestroyExternalSemaphore cuExternalMemoryGetMappedBuffer
                cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites
                cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer
                cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags
                cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray
                cuGraphicsUnregisterResource cuLogicalEndpointAddDevice cuLogicalEndpointDestroy
                cuLogicalEndpointGetLimits cuLogicalEndpointIdRelease cuLogicalEndpointIdReserve
                cuLogicalEndpointQuery cuLogicalEndpointUnbind cuMulticastAddDevice
                cuMulticastGetGranularity
            }
            // The same, and the driver checkpoints no process that has done it.
            share bars {
                cuImportExternalSemaphore cuIpcGetEventHandle cuIpcOpenEventHandle
                cuLogicalEndpointCreate cuLogicalEndpointExport cuLogicalEndpointImport
                cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMulticastCreate
            }
            // Starts or ends a capture.
            capture own {
                cuStreamBeginCapture cuStreamBeginCaptureToCig cuStreamBeginCaptureToCig_ptsz
                cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz cuStreamBeginCapture_ptsz
                cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz cuStreamBeginRecaptureToGraph
                cuStreamBeginRecaptureToGraph_ptsz cuStreamDestroy cuStreamDestroy_v2 cuStreamEndCapture
                cuStreamEndCaptureToCig cuStreamEndCaptureToCig_ptsz cuStreamEndCapture_ptsz
            }
            // Asks about a capture or changes its rules.
            capture held {
                cuStreamGetCaptureInfo cuStreamGetCaptureInfo_ptsz cuStreamGetCaptureInfo_v2
                cuStreamGetCaptureInfo_v2_ptsz cuStreamGetCaptureInfo_v3 cuStreamGetCaptureInfo_v3_ptsz
                cuStreamIsCapturing cuStreamIsCapturing_ptsz cuStreamUpdateCaptureDependencies
                cuStreamUpdateCaptureDependencies_ptsz cuStreamUpdateCaptureDependencies_v2
                cuStreamUpdateCaptureDependencies_v2_ptsz cuThreadExchangeStreamCaptureMode
            }
            // Begins or ends what memory depends on.
            lifetime own {
                cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxDestroy_v2
                cuCtxPopCurrent cuCtxPopCurrent_v2 cuCtxPushCurrent cuCtxPushCurrent_v2 cuCtxSetCurrent
                cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset
                cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRetain cuGetProcAddress cuGetProcAddress_v2
                cuGreenCtxCreate cuGreenCtxDestroy cuInit
            }
            // Begins or ends what memory does not depend on.
            lifetime held {
                cuCtxAttach cuCtxDetach cuCtxFromGreenCtx cuCtxResetPersistingL2Cache cuCtxSetCacheConfig
                cuCtxSetFlags cuCtxSetLimit cuCtxSetSharedMemConfig cuDevicePrimaryCtxSetFlags
                cuDevicePrimaryCtxSetFlags_v2 cuEventCreate cuEventDestroy cuEventDestroy_v2
                cuGreenCtxStreamCreate cuLibraryUnload cuModuleUnload
                cuStreamCreate cuStreamCreateWithPriority
            }
            // The same, and no checkpoint holds it back.
            lifetime pass {
                cuCheckpointOperationComplete cuCheckpointProcessCheckpoint
                cuCheckpointProcessGetRestoreThreadId cuCheckpointProcessGetState cuCheckpointProcessLock
                cuCheckpointProcessRestore cuCheckpointProcessUnlock cuGetExportTable
            }
            // What the program says about stream-ordered pools.
            pass own {
                cuDeviceSetMemPool cuMemPoolSetAttribute cuMemSetMemPool
            }
            // Nothing to do with memory.
            pass held {
                cuCoredumpDeregisterCompleteCallback cuCoredumpDeregisterStartCallback
                cuCoredumpRegisterCompleteCallback cuCoredumpRegisterStartCallback cuCoredumpSetAttribute
                cuCoredumpSetAttributeGlobal cuCtxRecordEvent cuCtxWaitEvent cuDevResourceGenerateDesc
                cuDevSmResourceSplit cuDevSmResourceSplitByCount cuDeviceRegisterAsyncNotification
                cuDeviceSetGraphMemAttribute cuDeviceUnregisterAsyncNotification cuEventRecord
                cuEventRecordWithFlags cuEventRecordWithFlags_ptsz cuEventRecord_ptsz cuFuncSetAttribute
                cuFuncSetBlockShape cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize
                cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddDependencies_v2
                cuGraphAddEmptyNode cuGraphAddEventRecordNode cuGraphAddEventWaitNode
                cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
                cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddKernelNode_v2 cuGraphClone
                cuGraphConditionalHandleCreate cuGraphCreate cuGraphDestroyNode
                cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeSetEvent
                cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
                cuGraphExecExternalSemaphoresSignalNodeSetParams
                cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExecHostNodeSetParams
                cuGraphExecKernelNodeSetParams cuGraphExecKernelNodeSetParams_v2
                cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeSetParams
                cuGraphHostNodeSetParams cuGraphKernelNodeCopyAttributes cuGraphKernelNodeSetAttribute
                cuGraphKernelNodeSetParams cuGraphKernelNodeSetParams_v2 cuGraphNodeSetEnabled
                cuGraphReleaseUserObject cuGraphRemoveDependencies cuGraphRemoveDependencies_v2
                cuGraphRetainUserObject cuGreenCtxRecordEvent cuGreenCtxWaitEvent cuKernelSetAttribute
                cuKernelSetCacheConfig cuLaunchHostFunc cuLaunchHostFunc_ptsz cuLaunchHostFunc_v2
                cuLaunchHostFunc_v2_ptsz cuLinkAddData cuLinkAddData_v2 cuLinkAddFile cuLinkAddFile_v2
                cuLinkComplete cuLogsRegisterCallback cuLogsUnregisterCallback cuParamSetSize
                cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv cuStreamAddCallback
                cuStreamAddCallback_ptsz cuStreamCopyAttributes cuStreamCopyAttributes_ptsz
                cuStreamSetAttribute cuStreamSetAttribute_ptsz cuStreamWaitEvent cuStreamWaitEvent_ptsz
                cuSurfObjectCreate cuSurfObjectDestroy cuSurfRefSetArray cuTensorMapSetAllocationClass
                cuTexObjectDestroy cuTexRefCreate cuTexRefDestroy cuTexRefSetAddressMode cuTexRefSetArray
                cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat
                cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
                cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuUserObjectCreate
                cuUserObjectRelease cuUserObjectRetain
            }
        }
    };
}
pub(crate) use for_each_class;

/// What a function means to us.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Touch,
    Allocate,
    Free,
    Query,
    Share,
    Capture,
    Lifetime,
    Pass,
}

/// How a function is treated.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    Gate,
    Sync,
    Own,
    Held,
    Bars,
    Pass,
}

macro_rules! table {
    ($d:tt $( $class:ident $how:ident { $($name:ident)* } )*) => {
        /// Class and treatment of every function, in the order of the classes.
        #[cfg(test)]
        pub(crate) const TABLE: &[(&str, Class, How)] = &[$($(
            (stringify!($name), table!(@class $class), table!(@how $how)),
        )*)*];

        /// The same as text, one function a line: name, class, treatment. Ends with a zero byte.
        const TEXT: &str = concat!($($(
            stringify!($name), " ", stringify!($class), " ", stringify!($how), "\n",
        )*)* "\0");
    };
    (@class touch) => { Class::Touch };
    (@class allocate) => { Class::Allocate };
    (@class free) => { Class::Free };
    (@class query) => { Class::Query };
    (@class share) => { Class::Share };
    (@class capture) => { Class::Capture };
    (@class lifetime) => { Class::Lifetime };
    (@class pass) => { Class::Pass };
    (@how gate) => { How::Gate };
    (@how sync) => { How::Sync };
    (@how own) => { How::Own };
    (@how held) => { How::Held };
    (@how bars) => { How::Bars };
    (@how pass) => { How::Pass };
}
for_each_class!(table);

/// The table as text, in a section of its own: `ebb doctor` reads it from the library's file without loading it.
#[unsafe(link_section = ".ebb.classes")]
#[used]
static SECTION: [u8; interop::TEXT.len() + TEXT.len()] = {
    let mut bytes = [0; interop::TEXT.len() + TEXT.len()];
    let (first, rest) = bytes.split_at_mut(interop::TEXT.len());
    first.copy_from_slice(interop::TEXT.as_bytes());
    rest.copy_from_slice(TEXT.as_bytes());
    bytes
};

/// The table as text, which ends with a zero byte.
pub(crate) fn text() -> &'static [u8] {
    &SECTION
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    macro_rules! names {
        ($($name:ident($($parameter:ident: $ty:ty),*);)*) => { [$(stringify!($name)),*] };
    }

    #[test]
    fn every_driver_function_has_exactly_one_class() {
        let functions = ebb_abi::for_each_driver_function!(names);
        let mut table = BTreeMap::new();
        for &(name, class, how) in TABLE {
            assert_eq!(
                table.insert(name, (class, how)),
                None,
                "{name} stands in the table twice"
            );
        }
        for name in functions {
            assert!(table.remove(name).is_some(), "{name} has no class");
        }
        assert!(table.is_empty(), "no functions of the driver: {table:?}");
    }

    /// The list is made from the newest headers by `scripts/driver-functions.py`, which also says when it is out of date.
    #[test]
    fn every_function_of_the_newest_headers_has_a_class() {
        const LIST: &str = include_str!("../../abi/driver-functions.txt");
        let text = std::str::from_utf8(text()).unwrap().trim_end_matches('\0');
        let mut classed = BTreeMap::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(words.len(), 3, "{line}");
            assert_eq!(classed.insert(words[0], words[1]), None, "{} twice", words[0]);
        }
        let mut count = 0;
        for line in LIST.lines().filter(|line| !line.starts_with('#')) {
            if let Some(version) = line.strip_prefix("version ") {
                assert_eq!(version.parse(), Ok(ebb_abi::CUDA_VERSION), "the list's version");
                continue;
            }
            assert!(classed.contains_key(line), "{line} has no class");
            count += 1;
        }
        assert_eq!(count, classed.len(), "a class for what no header has");
        assert_eq!(count, TABLE.len() + interop::COUNT);
    }

    #[test]
    fn forms_of_one_function_have_one_class() {
        fn base(name: &str) -> &str {
            let name = name
                .strip_suffix("_ptsz")
                .or_else(|| name.strip_suffix("_ptds"))
                .unwrap_or(name);
            name.rsplit_once("_v")
                .filter(|(_, n)| n.parse::<u32>().is_ok())
                .map_or(name, |(name, _)| name)
        }
        let mut classes: BTreeMap<&str, (Class, How, &str)> = BTreeMap::new();
        for &(name, class, how) in TABLE {
            let &mut (class_before, how_before, other) =
                classes.entry(base(name)).or_insert((class, how, name));
            assert_eq!(
                (class, how),
                (class_before, how_before),
                "{name} and {other} differ"
            );
        }
    }

    #[test]
    fn waiting_and_asking_do_not_touch() {
        for &(name, class, _) in TABLE {
            if name.contains("Synchronize")
                || name.contains("Query")
                || name.contains("EventRecord") && !name.contains("Graph")
            {
                assert_ne!(
                    class,
                    Class::Touch,
                    "{name} would bring an idle program's memory back"
                );
            }
        }
    }

    #[test]
    fn work_touches() {
        for &(name, class, how) in TABLE {
            let work = [
                "cuMemcpy",
                "cuMemset",
                "cuLaunchKernel",
                "cuLaunchCooperative",
                "cuLaunchGrid",
                "cuGraphLaunch",
            ];
            if work.iter().any(|start| name.starts_with(start)) {
                assert_eq!(class, Class::Touch, "{name}");
                assert!(matches!(how, How::Gate | How::Sync), "{name}");
            }
        }
    }
}
