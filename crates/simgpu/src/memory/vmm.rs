//! The virtual-memory calls: addresses, physical memory and mappings as things of their own.

use std::sync::{Arc, Mutex};

use ebb_abi::*;
use ebb_simdev::HOST_DEVICE;

use super::phys::{Phys, flags_from};
use super::{HOST, Mapping, READ, READ_WRITE};
use crate::R;
use crate::caller::Caller;
use crate::handles::fresh;
use crate::multicast::Multicast;
use crate::process::{MemHandle, lock, process};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
/// Among the allocation flags, in a part that is reserved: the object is a multicast one.
pub(crate) const MULTICAST_MARK: u16 = 0x8000;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`.
const MAPPED_BY_PCIE: u64 = 1;
/// The host's page size.
const PAGE: u64 = 4096;

fn granularity() -> u64 {
    process().machine.config().granularity
}

/// The device whose memory properties ask for; `None` for the host.
fn check_properties(properties: &CUmemAllocationProp) -> Result<Option<u32>, CUresult> {
    if properties.type_ != CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(INVALID);
    }
    let location = properties.location;
    let device = match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => Some(process().physical(location.id())?),
        // Not to be shared.
        CU_MEM_LOCATION_TYPE_HOST if properties.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE => {
            return Err(INVALID);
        }
        CU_MEM_LOCATION_TYPE_HOST => None,
        // The simulated host has one node.
        CU_MEM_LOCATION_TYPE_HOST_NUMA if location.u == 0 => None,
        _ => return Err(INVALID),
    };
    let known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
    if properties.requestedHandleTypes.0 & !known != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    Ok(device)
}

/// Who is meant by a location that accesses memory: a physical device index, or [`HOST`].
fn accessor(location: CUmemLocation) -> Result<u32, CUresult> {
    match location.type_ {
        CU_MEM_LOCATION_TYPE_DEVICE => process().physical(location.id()),
        CU_MEM_LOCATION_TYPE_HOST
        | CU_MEM_LOCATION_TYPE_HOST_NUMA
        | CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(HOST),
        _ => Err(INVALID),
    }
}

pub(crate) fn cuMemGetAllocationGranularity(
    c: &Caller,
    granularity_: *mut usize,
    prop: *const CUmemAllocationProp,
    option: CUmemAllocationGranularity_flags,
) -> R {
    if option.0 > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED.0 {
        return Err(INVALID);
    }
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
    let in_pages = size.is_multiple_of(PAGE) && addr.0.is_multiple_of(PAGE);
    let aligned = alignment == 0 || alignment.is_power_of_two();
    if ptr.is_null() || flags != 0 || size == 0 || !in_pages || !aligned {
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
    let mut properties = c.get(prop)?;
    let device = check_properties(&properties)?;
    // Simulated devices do not compress: who asks gets plain memory, and the properties say so.
    properties.allocFlags[0] &= 0xff00;
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
    c.put(handle, add_handle(phys, None))
}

/// Gives memory its handle, or the same handle again after it was released.
pub(crate) fn add_handle(phys: Arc<Phys>, multicast: Option<Multicast>) -> CUmemGenericAllocationHandle {
    let handle = *phys.handle.get_or_init(fresh);
    process().mem_handles.insert(
        handle,
        Arc::new(MemHandle {
            phys,
            multicast,
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
    if flags != 0 || offset != 0 || size == 0 || ptr.is_null() {
        return Err(INVALID);
    }
    // Another size than the memory's has a code of its own, whatever else is wrong with the call. Parts of a multicast object can be mapped.
    if size != found.phys.bytes && !(found.multicast.is_some() && size < found.phys.bytes) {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    if !size.is_multiple_of(unit) || !ptr.0.is_multiple_of(unit) {
        return Err(INVALID);
    }
    if let Some(multicast) = &found.multicast {
        multicast.wait_complete();
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
        if !matches!(description.flags.0, 0 | READ | READ_WRITE) {
            return Err(INVALID);
        }
        let who = accessor(description.location)?;
        wanted.push((who, description.location.type_, description.flags.0));
    }
    let mut tables = process().memory.write();
    let by_program = tables
        .reservation_at(ptr.0)
        .is_some_and(|(_, found)| found.by_program);
    let starts = tables
        .whole_mappings(ptr.0, size as u64)
        .filter(|_| by_program)
        .ok_or(INVALID)?;
    // All or nothing: the processor reaches the host's memory and no device's, and a node's access is for a node's memory.
    for start in &starts {
        let Some(mapping) = tables.mappings.get(start) else {
            return Err(INVALID);
        };
        let made_on = mapping.phys.properties.location.type_;
        for (who, kind, flags) in &wanted {
            let node = *kind == CU_MEM_LOCATION_TYPE_HOST_NUMA && made_on != *kind;
            let device = *who == HOST && mapping.phys.device.is_some();
            if (node || device) && *flags != 0 {
                return Err(INVALID);
            }
        }
    }
    for start in starts {
        for (who, _, flags) in &wanted {
            tables.set_access(start, *who, *flags)?;
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
    let who = accessor(c.get(location)?)?;
    let tables = process().memory.read();
    let (_, mapping) = tables.mapping_at(ptr.0).ok_or(INVALID)?;
    c.put(flags, u64::from(mapping.access_of(who)))
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
    let known = phys.handle.get().copied();
    if let Some(value) = known
        && let Some(known) = process.mem_handles.get(value)
    {
        let mut references = lock(&known.references);
        if *references > 0 {
            *references += 1;
            return c.put(handle, CUmemGenericAllocationHandle(value as u64));
        }
    }
    c.put(handle, add_handle(phys, None))
}

pub(crate) fn cuMemGetAllocationPropertiesFromHandle(
    c: &Caller,
    prop: *mut CUmemAllocationProp,
    handle: CUmemGenericAllocationHandle,
) -> R {
    let found = find(handle)?;
    if found.multicast.is_some() {
        return Err(INVALID);
    }
    c.put(prop, found.phys.properties)
}

pub(crate) fn cuMemExportToShareableHandle(
    c: &Caller,
    shareableHandle: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> R {
    let found = find(handle)?;
    if flags != 0 || shareableHandle.is_null() || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
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
    if flags_from(object.flags)[3] == MULTICAST_MARK {
        // Teams of several processes are not simulated.
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let location = match object.device {
        HOST_DEVICE => CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST_NUMA,
            u: 0,
        },
        device => CUmemLocation::device(process.ordinal(device).ok_or(CUresult::ERROR_NOT_SUPPORTED)?),
    };
    let properties = CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location,
        allocFlags: flags_from(object.flags),
        ..CUmemAllocationProp::default()
    };
    c.put(
        handle,
        add_handle(
            Phys::import(process.machine, process.arena, object, properties),
            None,
        ),
    )
}

/// A dma-buf of a range. What stands for one is a descriptor of the same pages whose position is where the range begins: the holder sees what
/// the device sees, and keeps no memory charged.
pub(crate) fn cuMemGetHandleForAddressRange(
    c: &Caller,
    handle: *mut c_void,
    dptr: CUdeviceptr,
    size: usize,
    handleType: CUmemRangeHandleType,
    flags: u64,
) -> R {
    let (start, size) = (dptr.0, size as u64);
    let in_pages = start.is_multiple_of(PAGE) && size.is_multiple_of(PAGE);
    if handleType != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        || handle.is_null()
        || size == 0
        || !in_pages
        || flags & !MAPPED_BY_PCIE != 0
    {
        return Err(INVALID);
    }
    if flags != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    let fd = {
        let tables = process().memory.read();
        let (base, first) = tables.mapping_at(start).ok_or(INVALID)?;
        let device = first.phys.device.ok_or(INVALID)?;
        if let Some((base, allocation)) = tables.allocation_at(start)
            && start + size > (base + allocation.size).next_multiple_of(PAGE)
        {
            return Err(INVALID);
        }
        // Every part must be mapped, on the same device, and of the same kind.
        let mut at = start;
        while at < start + size {
            let (base, mapping) = tables.mapping_at(at).ok_or(INVALID)?;
            let alike = mapping.phys.device == Some(device)
                && mapping.phys.properties.allocFlags == first.phys.properties.allocFlags;
            if !alike {
                return Err(INVALID);
            }
            at = base + mapping.size;
        }
        first.phys.buffer_fd(first.offset + start - base)
    };
    let fd = fd.map_err(|_| CUresult::ERROR_OPERATING_SYSTEM)?;
    c.put(handle.cast::<i32>(), fd)
}
