//! What a program can ask about devices.

use ebb_abi::*;
use ebb_simdev::{card_uuid, device_name, device_uuid};

use crate::R;
use crate::caller::Caller;
use crate::process::process;

/// The compute capability that devices claim.
const CAPABILITY: (i32, i32) = (9, 0);
/// Where devices sit on the bus: one after the other from here.
const FIRST_BUS: u32 = 0x17;

/// How many threads can run at once: multiprocessors times threads on each.
pub(crate) const RESIDENT_THREADS: u64 = 8 * 2048;

fn bus_of(physical: u32) -> u32 {
    FIRST_BUS + process().machine.config().card_of(physical)
}

pub(crate) fn cuDeviceGet(c: &Caller, device: *mut CUdevice, ordinal: i32) -> R {
    process().physical(ordinal)?;
    c.put(device, CUdevice(ordinal))
}

pub(crate) fn cuDeviceGetCount(c: &Caller, count: *mut i32) -> R {
    c.put(count, process().visible.len() as i32)
}

pub(crate) fn cuDeviceGetName(c: &Caller, name: *mut c_char, len: i32, dev: CUdevice) -> R {
    process().physical(dev.0)?;
    c.put_text(name, usize::try_from(len).unwrap_or(0), device_name())
}

/// The first version tells the card, also of a slice.
pub(crate) fn cuDeviceGetUuid(c: &Caller, uuid: *mut CUuuid, dev: CUdevice) -> R {
    let physical = process().physical(dev.0)?;
    let config = process().machine.config();
    let whole = match config.mig {
        0 => device_uuid(physical),
        _ => card_uuid(config.card_of(physical)),
    };
    let bytes = whole.0.map(|byte| byte as c_char);
    c.put(uuid, CUuuid { bytes })
}

pub(crate) fn cuDeviceGetUuid_v2(c: &Caller, uuid: *mut CUuuid, dev: CUdevice) -> R {
    let physical = process().physical(dev.0)?;
    let bytes = device_uuid(physical).0.map(|byte| byte as c_char);
    c.put(uuid, CUuuid { bytes })
}

pub(crate) fn cuDeviceTotalMem_v2(c: &Caller, bytes: *mut usize, dev: CUdevice) -> R {
    process().physical(dev.0)?;
    c.put(bytes, process().machine.config().memory as usize)
}

pub(crate) fn cuDeviceComputeCapability(c: &Caller, major: *mut i32, minor: *mut i32, dev: CUdevice) -> R {
    process().physical(dev.0)?;
    c.put(major, CAPABILITY.0)?;
    c.put(minor, CAPABILITY.1)
}

fn bus_text(physical: u32) -> String {
    format!("0000:{:02X}:00.0", bus_of(physical))
}

pub(crate) fn cuDeviceGetPCIBusId(c: &Caller, pciBusId: *mut c_char, len: i32, dev: CUdevice) -> R {
    let physical = process().physical(dev.0)?;
    c.put_text(pciBusId, usize::try_from(len).unwrap_or(0), &bus_text(physical))
}

pub(crate) fn cuDeviceGetByPCIBusId(c: &Caller, dev: *mut CUdevice, pciBusId: *const c_char) -> R {
    let wanted = c.text(pciBusId)?.to_ascii_uppercase();
    let process = process();
    let found = process.visible.iter().position(|physical| {
        let full = bus_text(*physical);
        // The domain and the function may be left out.
        wanted == full
            || wanted == full[5..]
            || format!("{wanted}.0") == full
            || format!("{wanted}.0") == full[5..]
    });
    c.put(dev, CUdevice(found.ok_or(CUresult::ERROR_INVALID_DEVICE)? as i32))
}

pub(crate) fn cuDeviceCanAccessPeer(
    c: &Caller,
    canAccessPeer: *mut i32,
    dev: CUdevice,
    peerDev: CUdevice,
) -> R {
    process().physical(dev.0)?;
    process().physical(peerDev.0)?;
    c.put(canAccessPeer, i32::from(dev != peerDev))
}

pub(crate) fn cuDeviceGetP2PAttribute(
    c: &Caller,
    value: *mut i32,
    attrib: CUdevice_P2PAttribute,
    srcDevice: CUdevice,
    dstDevice: CUdevice,
) -> R {
    process().physical(srcDevice.0)?;
    process().physical(dstDevice.0)?;
    if srcDevice == dstDevice {
        return Err(CUresult::ERROR_INVALID_DEVICE);
    }
    let answer = match attrib {
        CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED => 1,
        CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK => 0,
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED => i32::from(process().machine.config().nvlink),
        _ => 0,
    };
    c.put(value, answer)
}

pub(crate) fn cuDeviceGetExecAffinitySupport(
    c: &Caller,
    pi: *mut i32,
    _type: CUexecAffinityType,
    dev: CUdevice,
) -> R {
    process().physical(dev.0)?;
    c.put(pi, 0)
}

/// What a simulated device answers; what is not here is a feature that it does not have.
fn attribute(attribute: CUdevice_attribute, physical: u32) -> i32 {
    match attribute {
        CU_DEVICE_ATTRIBUTE_MPS_ENABLED => i32::from(process().machine.config().mps_client_bytes > 0),
        CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED => i32::from(crate::multicast::is_supported()),
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => i32::MAX,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 48 << 10,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 227 << 10,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => 228 << 10,
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => 1 << 10,
        CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 64 << 10,
        CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        CU_DEVICE_ATTRIBUTE_MAX_PITCH => i32::MAX,
        CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => 65536,
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE => 1_000_000,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => 1_000_000,
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 512,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 32 << 20,
        CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT | CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT => 512,
        CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 8,
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => 32,
        // One engine for each direction.
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 2,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => CAPABILITY.0,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => CAPABILITY.1,
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => {
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0 as i32
        }
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => bus_of(physical) as i32,
        CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
        | CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID
        | CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID
        | CU_DEVICE_ATTRIBUTE_MULTI_GPU_BOARD_GROUP_ID
        | CU_DEVICE_ATTRIBUTE_NUMA_ID => 0,
        CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
        | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        | CU_DEVICE_ATTRIBUTE_HOST_NUMA_MEMORY_POOLS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
        | CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        | CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED => 1,
        _ => 0,
    }
}

pub(crate) fn cuDeviceGetAttribute(c: &Caller, pi: *mut i32, attrib: CUdevice_attribute, dev: CUdevice) -> R {
    let physical = process().physical(dev.0)?;
    if attrib.0 == 0 || attrib.0 >= 1000 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    c.put(pi, attribute(attrib, physical))
}

pub(crate) fn cuDeviceGetProperties(c: &Caller, prop: *mut CUdevprop, dev: CUdevice) -> R {
    process().physical(dev.0)?;
    let answer = CUdevprop {
        maxThreadsPerBlock: 1024,
        maxThreadsDim: [1024, 1024, 64],
        maxGridSize: [i32::MAX, 65535, 65535],
        sharedMemPerBlock: 48 << 10,
        totalConstantMemory: 64 << 10,
        SIMDWidth: 32,
        memPitch: i32::MAX,
        regsPerBlock: 65536,
        clockRate: 1_000_000,
        textureAlign: 512,
    };
    c.put(prop, answer)
}
