//! The virtual-memory calls: addresses, physical memory and mappings as things of their own.

use std::sync::{Arc, Mutex};

use ebb_abi::*;

use super::phys::Phys;
use super::{HOST, Mapping, READ, READ_WRITE};
use crate::R;
use crate::caller::Caller;
use crate::handles::fresh;
use crate::process::{MemHandle, lock, process};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

fn granularity() -> u64 {
    process().machine.config().granularity
}

/// The physical device index of a location; `None` for the host.
fn device_of(location: CUmemLocation) -> Result<Option<u32>, CUresult> {
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => process().physical(location.id()).map(Some),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(None),
        _ => Err(INVALID),
    }
}

fn check_properties(properties: &CUmemAllocationProp) -> Result<Option<u32>, CUresult> {
    if properties.type_ != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(INVALID);
    }
    let known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
    if properties.requestedHandleTypes.0 & !known != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    device_of(properties.location)
}

pub(crate) fn cuMemGetAllocationGranularity(
    c: &Caller,
    granularity_: *mut usize,
    prop: *const CUmemAllocationProp,
    _option: CUmemAllocationGranularity_flags,
) -> R {
    check_properties(&c.get(prop)?)?;
    c.put(granularity_, granularity() as usize)
}

pub(crate) fn cuMemAddressReserve(
    c: &Caller,
    ptr: *mut CUdeviceptr,
    size: usize,
    alignment: usize,
    addr: CUdeviceptr,
    flags: u64,
) -> R {
    let (size, unit) = (size as u64, granularity());
    let align = (alignment as u64).max(unit);
    if ptr.is_null() || flags != 0 || size == 0 || !size.is_multiple_of(unit) || !align.is_power_of_two() {
        return Err(INVALID);
    }
    let address = process()
        .memory
        .write()
        .reserve(size, align, addr.0, true)
        .ok_or(CUresult::ERROR_OUT_OF_MEMORY)?;
    c.put(ptr, CUdeviceptr(address))
}

pub(crate) fn cuMemAddressFree(_: &Caller, ptr: CUdeviceptr, size: usize) -> R {
    let mut tables = process().memory.write();
    let known = tables
        .reservations
        .get(&ptr.0)
        .is_some_and(|found| found.by_program && found.size == size as u64);
    if !known || tables.has_mapping_in(ptr.0, size as u64) {
        return Err(INVALID);
    }
    tables.unreserve(ptr.0);
    Ok(())
}

pub(crate) fn cuMemCreate(
    c: &Caller,
    handle: *mut CUmemGenericAllocationHandle,
    size: usize,
    prop: *const CUmemAllocationProp,
    flags: u64,
) -> R {
    let properties = c.get(prop)?;
    let device = check_properties(&properties)?;
    let bytes = size as u64;
    if handle.is_null() || flags != 0 || bytes == 0 || !bytes.is_multiple_of(granularity()) {
        return Err(INVALID);
    }
    let process = process();
    let exportable = properties.requestedHandleTypes.0 & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0 != 0;
    let phys = Phys::new(
        process.machine,
        process.arena,
        device,
        bytes,
        properties,
        exportable,
    )?;
    c.put(handle, add_handle(phys))
}

fn add_handle(phys: Arc<Phys>) -> CUmemGenericAllocationHandle {
    let handle = fresh();
    process().mem_handles.insert(
        handle,
        Arc::new(MemHandle {
            handle,
            phys,
            references: Mutex::new(1),
        }),
    );
    CUmemGenericAllocationHandle(handle as u64)
}

fn find(handle: CUmemGenericAllocationHandle) -> Result<Arc<MemHandle>, CUresult> {
    process().mem_handles.get(handle.0 as usize).ok_or(INVALID)
}

pub(crate) fn cuMemRelease(_: &Caller, handle: CUmemGenericAllocationHandle) -> R {
    let found = find(handle)?;
    let last = {
        let mut references = lock(&found.references);
        if *references == 0 {
            return Err(INVALID);
        }
        *references -= 1;
        *references == 0
    };
    if last {
        process().mem_handles.remove(handle.0 as usize);
    }
    Ok(())
}

pub(crate) fn cuMemMap(
    _: &Caller,
    ptr: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> R {
    let (size, offset, unit) = (size as u64, offset as u64, granularity());
    let found = find(handle)?;
    if flags != 0 || offset != 0 || size == 0 || !size.is_multiple_of(unit) || !ptr.0.is_multiple_of(unit) {
        return Err(INVALID);
    }
    if size > found.phys.bytes {
        return Err(INVALID);
    }
    let mut tables = process().memory.write();
    let inside = tables
        .reservation_at(ptr.0)
        .is_some_and(|(base, found)| found.by_program && ptr.0 + size <= base + found.size);
    if !inside || tables.has_mapping_in(ptr.0, size) {
        return Err(INVALID);
    }
    let mapping = Mapping {
        size,
        phys: Arc::clone(&found.phys),
        offset,
        access: Vec::new(),
    };
    tables.map(ptr.0, mapping)
}

pub(crate) fn cuMemUnmap(_: &Caller, ptr: CUdeviceptr, size: usize) -> R {
    let gone: Vec<Option<Mapping>> = {
        let mut tables = process().memory.write();
        let by_program = tables
            .reservation_at(ptr.0)
            .is_some_and(|(_, found)| found.by_program);
        if !by_program || size == 0 {
            return Err(INVALID);
        }
        let starts = tables.whole_mappings(ptr.0, size as u64).ok_or(INVALID)?;
        starts.into_iter().map(|start| tables.unmap(start)).collect()
    };
    // What nobody else holds goes back to the ledger here, without the tables' lock.
    drop(gone);
    Ok(())
}

pub(crate) fn cuMemSetAccess(
    c: &Caller,
    ptr: CUdeviceptr,
    size: usize,
    desc: *const CUmemAccessDesc,
    count: usize,
) -> R {
    let descriptions = c.array(desc, count)?;
    if descriptions.is_empty() || size == 0 {
        return Err(INVALID);
    }
    let mut wanted = Vec::new();
    for description in &descriptions {
        let flags = description.flags.0;
        if !matches!(flags, 0 | READ | READ_WRITE) {
            return Err(INVALID);
        }
        wanted.push((device_of(description.location)?, flags));
    }
    let mut tables = process().memory.write();
    let by_program = tables
        .reservation_at(ptr.0)
        .is_some_and(|(_, found)| found.by_program);
    let starts = tables
        .whole_mappings(ptr.0, size as u64)
        .filter(|_| by_program)
        .ok_or(INVALID)?;
    for start in starts {
        for (device, flags) in &wanted {
            // The processor reaches the host's memory, and no device's.
            let on_device = tables
                .mappings
                .get(&start)
                .is_some_and(|mapping| mapping.phys.device.is_some());
            if device.is_none() && on_device && *flags != 0 {
                return Err(INVALID);
            }
            tables.set_access(start, device.unwrap_or(HOST), *flags)?;
        }
    }
    Ok(())
}

pub(crate) fn cuMemGetAccess(
    c: &Caller,
    flags: *mut u64,
    location: *const CUmemLocation,
    ptr: CUdeviceptr,
) -> R {
    let device = device_of(c.get(location)?)?;
    let tables = process().memory.read();
    let (_, mapping) = tables.mapping_at(ptr.0).ok_or(INVALID)?;
    c.put(flags, u64::from(mapping.access_of(device.unwrap_or(HOST))))
}

pub(crate) fn cuMemRetainAllocationHandle(
    c: &Caller,
    handle: *mut CUmemGenericAllocationHandle,
    addr: *mut c_void,
) -> R {
    let process = process();
    let phys = {
        let tables = process.memory.read();
        let address = addr as u64;
        let by_program = tables
            .reservation_at(address)
            .is_some_and(|(_, found)| found.by_program);
        let (_, mapping) = tables.mapping_at(address).filter(|_| by_program).ok_or(INVALID)?;
        Arc::clone(&mapping.phys)
    };
    if handle.is_null() {
        return Err(INVALID);
    }
    for known in process.mem_handles.all() {
        if Arc::ptr_eq(&known.phys, &phys) {
            let mut references = lock(&known.references);
            if *references > 0 {
                *references += 1;
                return c.put(handle, CUmemGenericAllocationHandle(known.handle as u64));
            }
        }
    }
    c.put(handle, add_handle(phys))
}

pub(crate) fn cuMemGetAllocationPropertiesFromHandle(
    c: &Caller,
    prop: *mut CUmemAllocationProp,
    handle: CUmemGenericAllocationHandle,
) -> R {
    c.put(prop, find(handle)?.phys.properties)
}

pub(crate) fn cuMemExportToShareableHandle(
    c: &Caller,
    shareableHandle: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> R {
    let found = find(handle)?;
    if flags != 0 || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return Err(INVALID);
    }
    let fd = found.phys.exported_fd().ok_or(INVALID)?;
    // SAFETY: the descriptor is open as long as `found` lives; the copy belongs to the program.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(CUresult::ERROR_OPERATING_SYSTEM);
    }
    c.put(shareableHandle.cast::<i32>(), copy)
}

pub(crate) fn cuMemImportFromShareableHandle(
    c: &Caller,
    handle: *mut CUmemGenericAllocationHandle,
    osHandle: *mut c_void,
    shHandleType: CUmemAllocationHandleType,
) -> R {
    if handle.is_null() || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return Err(INVALID);
    }
    let process = process();
    // A descriptor is passed in the pointer's place.
    let fd = i32::try_from(osHandle as usize).map_err(|_| INVALID)?;
    let object = process.machine.import_object(fd).map_err(|_| INVALID)?;
    let ordinal = process
        .ordinal(object.device)
        .ok_or(CUresult::ERROR_INVALID_DEVICE)?;
    let properties = CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: CUmemLocation::device(ordinal),
        ..CUmemAllocationProp::default()
    };
    c.put(
        handle,
        add_handle(Phys::import(process.machine, process.arena, object, properties)),
    )
}

pub(crate) fn cuMemGetHandleForAddressRange(
    c: &Caller,
    handle: *mut c_void,
    dptr: CUdeviceptr,
    size: usize,
    handleType: CUmemRangeHandleType,
    _flags: u64,
) -> R {
    if handleType != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || size == 0 {
        return Err(INVALID);
    }
    let fd = {
        let tables = process().memory.read();
        let (base, mapping) = tables.mapping_at(dptr.0).ok_or(INVALID)?;
        if dptr.0 + size as u64 > base + mapping.size {
            return Err(INVALID);
        }
        // Not a dma-buf, but a descriptor of the same pages: what the holder can rely on is that it is one.
        // SAFETY: the descriptor is open while the mapping exists.
        unsafe { libc::fcntl(mapping.phys.pages().0, libc::F_DUPFD_CLOEXEC, 0) }
    };
    if fd < 0 {
        return Err(CUresult::ERROR_OPERATING_SYSTEM);
    }
    c.put(handle.cast::<i32>(), fd)
}
