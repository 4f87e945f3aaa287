//! What the driver knows about an address.

use ebb_abi::*;

use super::{Allocation, Kind, Tables};
use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::process::{Process, process};

/// Everything about one address that the attributes are made from.
struct Facts {
    device: bool,
    /// The context's handle; zero for memory that belongs to none.
    context: usize,
    ordinal: i32,
    base: u64,
    size: u64,
    buffer_id: u64,
    managed: bool,
    mapped: bool,
    legacy_ipc: bool,
    handle_types: u32,
    pool: usize,
    rdma: bool,
    by_program: bool,
    synchronous: bool,
    access: u32,
}

fn facts(process: &Process, tables: &Tables, address: u64) -> Option<Facts> {
    if let Some((base, range)) = tables.host_at(address) {
        let ordinal = process
            .contexts
            .get(range.context)
            .map_or(0, |context| context.shared.ordinal);
        return Some(Facts {
            device: false,
            context: range.context,
            ordinal,
            base,
            size: range.size,
            buffer_id: range.buffer_id,
            managed: false,
            mapped: true,
            legacy_ipc: false,
            handle_types: 0,
            pool: 0,
            rdma: false,
            by_program: false,
            synchronous: false,
            access: CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE.0,
        });
    }
    let (mapping_base, mapping) = tables.mapping_at(address)?;
    let allocation: Option<(u64, &Allocation)> = tables.allocation_at(address);
    let ordinal = mapping
        .phys
        .device
        .and_then(|device| process.ordinal(device))
        .unwrap_or(0);
    let access = mapping.phys.device.map_or(0, |device| mapping.access_of(device));
    let mut facts = Facts {
        device: mapping.phys.device.is_some(),
        context: 0,
        ordinal,
        base: mapping_base,
        size: mapping.size,
        buffer_id: mapping.phys.id,
        managed: false,
        mapped: true,
        legacy_ipc: false,
        handle_types: mapping.phys.properties.requestedHandleTypes.0,
        pool: 0,
        rdma: mapping.phys.properties.allocFlags[0].to_ne_bytes()[1] != 0,
        by_program: allocation.is_none(),
        synchronous: false,
        access,
    };
    if let Some((base, allocation)) = allocation {
        facts.context = allocation.context;
        facts.base = base;
        facts.size = allocation.size;
        facts.buffer_id = allocation.buffer_id;
        facts.synchronous = tables.synchronous.contains(&allocation.buffer_id);
        facts.managed = allocation.kind == Kind::Managed;
        if facts.managed {
            // A device's, for all that is asked: the one of the context that it was made in.
            let owner = process.contexts.get(allocation.context);
            facts.device = true;
            facts.ordinal = owner.map_or(0, |context| context.shared.ordinal);
            facts.access = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE.0;
        }
        facts.legacy_ipc = matches!(allocation.kind, Kind::Legacy { .. });
        facts.rdma = matches!(allocation.kind, Kind::Legacy { .. });
        if let Kind::Pool(pool) = allocation.kind {
            facts.pool = pool;
        }
    } else if tables
        .reservation_at(address)
        .is_some_and(|(_, reservation)| !reservation.by_program)
    {
        // A free part of a block of small allocations: nobody's.
        return None;
    }
    Some(facts)
}

/// Writes one attribute. `None` facts: an address that the driver does not know.
fn answer(
    c: &Caller,
    data: *mut c_void,
    attribute: CUpointer_attribute,
    facts: Option<&Facts>,
    address: u64,
) -> R {
    let invalid = Err(CUresult::ERROR_INVALID_VALUE);
    let Some(f) = facts else { return invalid };
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => c.put(data.cast(), CUcontext(f.context)),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => c.put(
            data.cast(),
            if f.device {
                CU_MEMORYTYPE_DEVICE
            } else {
                CU_MEMORYTYPE_HOST
            },
        ),
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => c.put(data.cast(), CUdeviceptr(address)),
        CU_POINTER_ATTRIBUTE_HOST_POINTER if !f.device || f.managed => c.put(data.cast::<u64>(), address),
        CU_POINTER_ATTRIBUTE_BUFFER_ID => c.put(data.cast(), f.buffer_id),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => c.put(data.cast(), i32::from(f.managed)),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => c.put(data.cast(), f.ordinal),
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => c.put(data.cast(), i32::from(f.legacy_ipc)),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => c.put(data.cast(), CUdeviceptr(f.base)),
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => c.put(data.cast(), f.size as usize),
        CU_POINTER_ATTRIBUTE_MAPPED => c.put(data.cast(), i32::from(f.mapped)),
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => c.put(data.cast(), u64::from(f.handle_types)),
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => c.put(data.cast(), i32::from(f.rdma)),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => c.put(data.cast(), f.access),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => c.put(data.cast(), CUmemoryPool(f.pool)),
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE if f.by_program => c.put(data.cast(), f.size as usize),
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR if f.by_program => c.put(data.cast(), CUdeviceptr(f.base)),
        CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => c.put(data.cast(), f.buffer_id),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS if f.by_program => Err(CUresult::ERROR_NOT_SUPPORTED),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => c.put(data.cast(), i32::from(f.synchronous)),
        _ => invalid,
    }
}

pub(crate) fn cuPointerGetAttribute(
    c: &Caller,
    data: *mut c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> R {
    context::current()?;
    let process = process();
    let tables = process.memory.read();
    answer(c, data, attribute, facts(process, &tables, ptr.0).as_ref(), ptr.0)
}

pub(crate) fn cuPointerGetAttributes(
    c: &Caller,
    numAttributes: u32,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> R {
    context::current()?;
    let wanted = c.array(attributes.cast_const(), numAttributes as usize)?;
    let places = c.array(data.cast_const(), numAttributes as usize)?;
    let process = process();
    let tables = process.memory.read();
    let facts = facts(process, &tables, ptr.0);
    for (attribute, place) in wanted.into_iter().zip(places) {
        // An address that is unknown, or an attribute that it does not have, answers zeros here and no error.
        if answer(c, place, attribute, facts.as_ref(), ptr.0).is_err() {
            zero(c, place, attribute)?;
        }
    }
    Ok(())
}

fn zero(c: &Caller, place: *mut c_void, attribute: CUpointer_attribute) -> R {
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT
        | CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        | CU_POINTER_ATTRIBUTE_HOST_POINTER
        | CU_POINTER_ATTRIBUTE_BUFFER_ID
        | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        | CU_POINTER_ATTRIBUTE_RANGE_SIZE
        | CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
        | CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        | CU_POINTER_ATTRIBUTE_MAPPING_SIZE
        | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR
        | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => c.put(place.cast(), 0_u64),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => c.put(place.cast(), -2_i32),
        _ => c.put(place.cast(), 0_u32),
    }
}

pub(crate) fn cuPointerSetAttribute(
    c: &Caller,
    value: *const c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> R {
    context::current()?;
    if attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let on = c.get(value.cast::<u32>())? != 0;
    let process = process();
    let mut tables = process.memory.write();
    let facts = facts(process, &tables, ptr.0).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    if facts.by_program {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    if on {
        tables.synchronous.insert(facts.buffer_id);
    } else {
        tables.synchronous.remove(&facts.buffer_id);
    }
    Ok(())
}
