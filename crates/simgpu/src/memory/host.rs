//! Page-locked host memory: allocated by the driver, or registered by the program.

use ebb_abi::*;

use super::HostRange;
use super::phys::fresh_buffer_id;
use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context;
use crate::process::process;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

fn page_align(bytes: u64) -> u64 {
    bytes.next_multiple_of(4096)
}

fn free_pages(address: u64, size: u64) {
    // SAFETY: the range was mapped by `cuMemHostAlloc` and has just been taken out of the table, so it is unmapped once.
    unsafe { libc::munmap(address as *mut libc::c_void, page_align(size) as usize) };
}

pub(crate) fn cuMemHostAlloc(c: &Caller, pp: *mut *mut c_void, bytesize: usize, Flags: u32) -> R {
    let context = context::current()?;
    let known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if pp.is_null() || bytesize == 0 || Flags & !known != 0 {
        return Err(INVALID);
    }
    context.shared.check()?;
    capture::check_unsafe_call()?;
    let size = page_align(bytesize as u64);
    // SAFETY: a new private mapping that replaces nothing.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(CUresult::ERROR_OUT_OF_MEMORY);
    }
    let range = HostRange {
        size: bytesize as u64,
        flags: Flags,
        allocated: true,
        context: context.shared.handle,
        buffer_id: fresh_buffer_id(),
    };
    process().memory.write().host.insert(address as u64, range);
    c.put(pp, address)
}

pub(crate) fn cuMemAllocHost_v2(c: &Caller, pp: *mut *mut c_void, bytesize: usize) -> R {
    cuMemHostAlloc(c, pp, bytesize, 0)
}

pub(crate) fn cuMemFreeHost(_: &Caller, p: *mut c_void) -> R {
    let address = p as u64;
    if p.is_null() {
        return Ok(());
    }
    context::current()?;
    let known = process()
        .memory
        .read()
        .host
        .get(&address)
        .is_some_and(|range| range.allocated);
    if !known {
        return Err(INVALID);
    }
    capture::check_unsafe_call()?;
    drain_all();
    let range = process().memory.write().host.remove(&address);
    if let Some(range) = range {
        free_pages(address, range.size);
    }
    Ok(())
}

pub(crate) fn cuMemHostRegister_v2(_: &Caller, p: *mut c_void, bytesize: usize, Flags: u32) -> R {
    let context = context::current()?;
    let known = CU_MEMHOSTREGISTER_PORTABLE
        | CU_MEMHOSTREGISTER_DEVICEMAP
        | CU_MEMHOSTREGISTER_IOMEMORY
        | CU_MEMHOSTREGISTER_READ_ONLY;
    let (address, size) = (p as u64, bytesize as u64);
    if p.is_null() || size == 0 || Flags & !known != 0 || address.checked_add(size).is_none() {
        return Err(INVALID);
    }
    capture::check_unsafe_call()?;
    let mut tables = process().memory.write();
    if tables.is_device(address) {
        return Err(INVALID);
    }
    let overlaps = tables
        .host
        .range(..address + size)
        .next_back()
        .is_some_and(|(base, found)| base + found.size > address);
    if overlaps {
        return Err(CUresult::ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    if !is_mapped(address, size) {
        return Err(INVALID);
    }
    let range = HostRange {
        size,
        flags: Flags,
        allocated: false,
        context: context.shared.handle,
        buffer_id: fresh_buffer_id(),
    };
    tables.host.insert(address, range);
    Ok(())
}

/// Whether the program really has this memory: pinning what is not there fails.
fn is_mapped(address: u64, size: u64) -> bool {
    let start = address & !4095;
    let end = page_align(address + size);
    // SAFETY: this only asks; a range with holes is answered with an error.
    unsafe { libc::msync(start as *mut libc::c_void, (end - start) as usize, libc::MS_ASYNC) == 0 }
}

pub(crate) fn cuMemHostUnregister(_: &Caller, p: *mut c_void) -> R {
    let address = p as u64;
    context::current()?;
    let known = process()
        .memory
        .read()
        .host
        .get(&address)
        .is_some_and(|range| !range.allocated);
    if !known {
        return Err(CUresult::ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    capture::check_unsafe_call()?;
    drain_all();
    process().memory.write().host.remove(&address);
    Ok(())
}

pub(crate) fn cuMemHostGetDevicePointer_v2(
    c: &Caller,
    pdptr: *mut CUdeviceptr,
    p: *mut c_void,
    Flags: u32,
) -> R {
    context::current()?;
    let address = p as u64;
    if Flags != 0 || process().memory.read().host_at(address).is_none() {
        return Err(INVALID);
    }
    c.put(pdptr, CUdeviceptr(address))
}

pub(crate) fn cuMemHostGetFlags(c: &Caller, pFlags: *mut u32, p: *mut c_void) -> R {
    context::current()?;
    let flags = process()
        .memory
        .read()
        .host_at(p as u64)
        .map(|(_, range)| range.flags)
        .ok_or(INVALID)?;
    // With unified addressing all of it is mapped.
    c.put(pFlags, flags | CU_MEMHOSTALLOC_DEVICEMAP)
}

/// Waits for all work: freed or unpinned memory may be in use by any of it.
fn drain_all() {
    for context in process().contexts.all() {
        context.shared.drain();
    }
}

/// Frees what a context that ends had allocated or registered.
pub(crate) fn free_context(handle: usize) {
    let mut freed = Vec::new();
    {
        let mut tables = process().memory.write();
        tables.host.retain(|address, range| {
            if range.context != handle {
                return true;
            }
            if range.allocated {
                freed.push((*address, range.size));
            }
            false
        });
    }
    for (address, size) in freed {
        free_pages(address, size);
    }
}
