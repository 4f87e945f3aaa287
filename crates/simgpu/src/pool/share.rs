//! Pools between processes: a pool that was made for it is exported as a descriptor, and each piece as 64 bytes that name it.
//!
//! The descriptor is a small memory file that says which pool it is. Blocks of such a pool are objects of the machine, so whoever
//! imports a piece opens the object by its number: it is charged once and lives as long as either side holds it. Every import maps
//! the piece's block for itself.

use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;

use ebb_abi::*;
use ebb_simdev::HOST_DEVICE;

use super::calls::find;
use super::{INVALID, Make, Pool, State};
use crate::R;
use crate::caller::Caller;
use crate::memory::phys::{Phys, flags_from, fresh_buffer_id};
use crate::memory::{Allocation, Kind, alloc};
use crate::process::{lock, process};

const POOL_MAGIC: u64 = 0x4c4f_4f50_4d49_5331;
const PIECE_MAGIC: u64 = 0x4345_4950_4d49_5331;
/// `CU_DEVICE_INVALID`: the location's number of a pool whose device this process does not see.
const NO_DEVICE: i32 = -2;

pub(crate) fn cuMemPoolExportToShareableHandle(
    c: &Caller,
    handle_out: *mut c_void,
    pool: CUmemoryPool,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> R {
    let pool = find(pool)?;
    let shared = pool.make.handle_types & handleType.0 != 0 && !pool.imported;
    if flags != 0 || handle_out.is_null() || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !shared
    {
        return Err(INVALID);
    }
    let os = |_| CUresult::ERROR_OPERATING_SYSTEM;
    // SAFETY: the name is a valid string; the result is checked.
    let fd = unsafe { libc::memfd_create(c"ebb-sim-pool".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(CUresult::ERROR_OPERATING_SYSTEM);
    }
    // SAFETY: the descriptor was just made and is owned by nobody else.
    let mut file = unsafe { File::from_raw_fd(fd) };
    let device = u64::from(pool.make.device.unwrap_or(HOST_DEVICE));
    for word in [POOL_MAGIC, pool.name, device] {
        file.write_all(&word.to_le_bytes()).map_err(os)?;
    }
    c.put(handle_out.cast::<i32>(), file.into_raw_fd())
}

pub(crate) fn cuMemPoolImportFromShareableHandle(
    c: &Caller,
    pool_out: *mut CUmemoryPool,
    handle: *mut c_void,
    handleType: CUmemAllocationHandleType,
    flags: u64,
) -> R {
    if flags != 0 || pool_out.is_null() || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
        return Err(INVALID);
    }
    // A descriptor is passed in the pointer's place; it stays the program's.
    let fd = i32::try_from(handle as usize).map_err(|_| INVALID)?;
    let file = File::open(format!("/proc/self/fd/{fd}")).map_err(|_| INVALID)?;
    let word = |index: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, index * 8)
            .map(|()| u64::from_le_bytes(bytes))
            .map_err(|_| INVALID)
    };
    if word(0)? != POOL_MAGIC {
        return Err(INVALID);
    }
    let device = Some(word(2)? as u32).filter(|device| *device != HOST_DEVICE);
    let location = match device.map(|device| process().ordinal(device)) {
        Some(Some(ordinal)) => CUmemLocation::device(ordinal),
        Some(None) => CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_INVISIBLE,
            u: NO_DEVICE.cast_unsigned(),
        },
        None => CUmemLocation {
            type_: CU_MEM_LOCATION_TYPE_HOST_NUMA,
            u: 0,
        },
    };
    let make = Make {
        location,
        device,
        handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0,
        rdma: false,
        usage: 0,
        max_size: 0,
    };
    c.put(
        pool_out,
        CUmemoryPool(Pool::new(make, Some(word(1)?), false).handle),
    )
}

pub(crate) fn cuMemPoolExportPointer(
    c: &Caller,
    shareData_out: *mut CUmemPoolPtrExportData,
    ptr: CUdeviceptr,
) -> R {
    let words = {
        let tables = process().memory.read();
        let allocation = tables.allocations.get(&ptr.0).ok_or(INVALID)?;
        let Kind::Pool(handle) = allocation.kind else {
            return Err(INVALID);
        };
        let pool = process().pools.get(handle).ok_or(INVALID)?;
        if pool.imported {
            return Err(INVALID);
        }
        let (base, mapping) = tables.mapping_at(ptr.0).ok_or(INVALID)?;
        // Only blocks of a pool that was made to be shared are objects.
        let object = mapping.phys.object_id().ok_or(INVALID)?;
        [PIECE_MAGIC, pool.name, object, ptr.0 - base, allocation.size]
    };
    let mut data = CUmemPoolPtrExportData { reserved: [0; 64] };
    for (place, byte) in data
        .reserved
        .iter_mut()
        .zip(words.iter().flat_map(|word| word.to_le_bytes()))
    {
        *place = byte;
    }
    c.put(shareData_out, data)
}

pub(crate) fn cuMemPoolImportPointer(
    c: &Caller,
    ptr_out: *mut CUdeviceptr,
    pool: CUmemoryPool,
    shareData: *mut CUmemPoolPtrExportData,
) -> R {
    let pool = find(pool)?;
    let data = c.get(shareData.cast_const())?;
    let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|byte| data.reserved[index * 8 + byte]));
    let [magic, name, object, inner, size] = [0, 1, 2, 3, 4].map(word);
    if !pool.imported || ptr_out.is_null() || magic != PIECE_MAGIC || name != pool.name {
        return Err(INVALID);
    }
    if pool.make.location.type_ == CU_MEM_LOCATION_TYPE_INVISIBLE {
        return Err(CUresult::ERROR_INVALID_DEVICE);
    }
    let process = process();
    let object = process.machine.open_object(object).map_err(|_| INVALID)?;
    if inner.checked_add(size).is_none_or(|end| end > object.bytes) || size == 0 {
        return Err(INVALID);
    }
    let properties = CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: pool.make.location,
        allocFlags: flags_from(object.flags),
        ..CUmemAllocationProp::default()
    };
    let phys = Phys::import(process.machine, process.arena, object, properties);
    let mut state = lock(&pool.state);
    let base = alloc::map_phys(phys, state.access.clone())?;
    state.imports.push(base);
    state.used += size.next_multiple_of(crate::memory::heap::SMALL);
    state.used_high = state.used_high.max(state.used);
    drop(state);
    let allocation = Allocation {
        size,
        kind: Kind::Pool(pool.handle),
        context: 0,
        buffer_id: fresh_buffer_id(),
        shared: false,
    };
    process
        .memory
        .write()
        .allocations
        .insert(base + inner, allocation);
    c.put(ptr_out, CUdeviceptr(base + inner))
}

/// Lets go of an imported piece.
pub(super) fn drop_import(state: &mut State, address: u64) {
    let base = process().memory.read().mapping_at(address).map(|(base, _)| base);
    if let Some(base) = base {
        state.imports.retain(|known| *known != base);
        alloc::unmap_block(base);
    }
}
