//! What the program is told: its own world.

use core::ffi::c_void;

use ebb_abi::*;
use ebb_layer_core::Allocation;
use ebb_units::Bytes;

use crate::bridge::Running;
use crate::hooks::{share, vmm, with};
use crate::symbols::real;

/// Replaces the driver's free and total by the task's own.
///
/// # Safety
/// Both are null or valid.
unsafe fn own_world(free: *mut usize, total: *mut usize) {
    // SAFETY: this function's contract.
    let (driver_free, driver_total) = unsafe { (free.as_ref().copied(), total.as_ref().copied()) };
    let answer = with(|running| {
        let (index, _) = running.here()?;
        // A null place: the driver's figure is not known, and is of use only without a limit, where the other one is unchanged by it.
        let (free, total) = (driver_free.unwrap_or(0), driver_total.unwrap_or(usize::MAX));
        Some(running.mem_info(index, free as u64, total as u64))
    });
    if let Some((own_free, own_total)) = answer {
        // SAFETY: as above.
        unsafe {
            if !free.is_null() {
                free.write(Bytes(own_free).to_usize());
            }
            if !total.is_null() {
                total.write(Bytes(own_total).to_usize());
            }
        }
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemGetInfo_v2(free, total) };
    if result.is_success() {
        // SAFETY: the driver accepted the same pointers.
        unsafe { own_world(free, total) };
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetInfo(free: *mut u32, total: *mut u32) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemGetInfo(free, total) };
    if result.is_success() {
        let (mut wide_free, mut wide_total) = (0usize, 0usize);
        // SAFETY: two places of our own.
        if unsafe { real::cuMemGetInfo_v2(&raw mut wide_free, &raw mut wide_total) }.is_success() {
            // SAFETY: two places of our own, and the program's, which the driver accepted. The first version cuts its answers.
            unsafe {
                own_world(&raw mut wide_free, &raw mut wide_total);
                if !free.is_null() {
                    free.write(u32::try_from(wide_free).unwrap_or(u32::MAX));
                }
                if !total.is_null() {
                    total.write(u32::try_from(wide_total).unwrap_or(u32::MAX));
                }
            }
        }
    }
    result
}

/// A device's memory as the task sees it. A device without a context is attached for the question, if the process belongs
/// to a task: programs size themselves by this call before they make a context, and must not learn another number later.
fn own_total(dev: CUdevice, total: u64) -> Option<u64> {
    with(|running| {
        let index = running
            .index_of(dev)
            .or_else(|| running.attach_for_question(dev))?;
        Some(running.mem_info(index, total, total).1.min(total))
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CUdevice) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuDeviceTotalMem_v2(bytes, dev) };
    if result.is_success() && !bytes.is_null() {
        // SAFETY: the driver has just written it.
        if let Some(total) = own_total(dev, unsafe { bytes.read() } as u64) {
            // SAFETY: as above.
            unsafe { bytes.write(Bytes(total).to_usize()) };
        }
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuDeviceTotalMem(bytes: *mut u32, dev: CUdevice) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuDeviceTotalMem(bytes, dev) };
    if result.is_success() && !bytes.is_null() {
        // SAFETY: the driver has just written it.
        if let Some(total) = own_total(dev, unsafe { bytes.read() }.into()) {
            // SAFETY: as above.
            unsafe { bytes.write(u32::try_from(total).unwrap_or(u32::MAX)) };
        }
    }
    result
}

/// The address to ask the driver about: for one that is ours and freed, one that nobody has, so that the answer is the
/// driver's own for such addresses.
fn ask_about(ptr: CUdeviceptr) -> CUdeviceptr {
    const NOBODYS: CUdeviceptr = CUdeviceptr(8);
    let vacant = with(|running| running.is_vacant(ptr.0).then_some(())).is_some();
    if vacant { NOBODYS } else { ptr }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetAddressRange_v2(
    pbase: *mut CUdeviceptr,
    psize: *mut usize,
    dptr: CUdeviceptr,
) -> CUresult {
    // Without a current context the driver refuses the question.
    let ours = with(|running| {
        let allocation = running.lookup(dptr.0)?;
        running.current_context().map(|_| allocation)
    });
    match ours {
        Some(allocation) => {
            // SAFETY: the program's places for the answer; either may be null.
            unsafe {
                if !pbase.is_null() {
                    pbase.write(CUdeviceptr(allocation.base));
                }
                if !psize.is_null() {
                    psize.write(Bytes(allocation.size).to_usize());
                }
            }
            CUresult::SUCCESS
        }
        // SAFETY: the program's own call.
        None => vmm::about(dptr, 1, || unsafe {
            real::cuMemGetAddressRange_v2(pbase, psize, ask_about(dptr))
        }),
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetAddressRange(
    pbase: *mut u32,
    psize: *mut u32,
    dptr: u32,
) -> CUresult {
    // No address of ours has 32 bits.
    // SAFETY: the program's own call.
    unsafe { real::cuMemGetAddressRange(pbase, psize, dptr) }
}

/// `CU_MEMORYTYPE_DEVICE`.
const MEMORYTYPE_DEVICE: u32 = 2;

/// What an attribute of memory of ours is, in the width that the driver writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Word(u32),
    Long(u64),
    /// The attribute does not exist for device memory: `CUDA_ERROR_INVALID_VALUE` alone, null in a list.
    None,
}

/// Memory of ours as the driver describes memory of `cuMemAlloc`.
fn attribute(
    running: &Running,
    allocation: &Allocation,
    attribute: CUpointer_attribute,
    ptr: u64,
) -> Option<Value> {
    let device = running.by_index(allocation.device)?;
    Some(match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => Value::Long(allocation.owner),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => Value::Word(MEMORYTYPE_DEVICE),
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => Value::Long(ptr),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => Value::None,
        CU_POINTER_ATTRIBUTE_IS_MANAGED | CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE => Value::Word(0),
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => Value::Word(u32::from(share::sync::is_set(allocation))),
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => Value::Word(u32::from(
            allocation.pool == 0
                && running.engine.contains(ptr)
                && running.engine.can_share()
                && device.cuda.as_ref().is_some_and(|cuda| cuda.is_made_to_share()),
        )),
        // Far from the driver's own numbers.
        CU_POINTER_ATTRIBUTE_BUFFER_ID | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
            Value::Long(allocation.id | 1 << 48)
        }
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => Value::Word(device.ordinal.0.cast_unsigned()),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR | CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            Value::Long(allocation.base)
        }
        CU_POINTER_ATTRIBUTE_RANGE_SIZE | CU_POINTER_ATTRIBUTE_MAPPING_SIZE => Value::Long(allocation.size),
        CU_POINTER_ATTRIBUTE_MAPPED => Value::Word(1),
        CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => Value::Long(0),
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => Value::Long(allocation.pool),
        // What the memory is, not what the card could do: a transport that believes more falls back to copies without a word.
        CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => Value::Word(u32::from(
            device
                .cuda
                .as_ref()
                .map_or(device.facts.rdma, |cuda| cuda.is_made_for_network_cards()),
        )),
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => Value::Word(CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE.0),
        // Of a newer driver, or of no use: its own answer.
        _ => return None,
    })
}

/// # Safety
/// `place` is valid for the width of the attribute.
unsafe fn write(place: *mut c_void, value: Value) {
    // SAFETY: this function's contract. The program's place may be of any alignment.
    unsafe {
        match value {
            Value::Word(word) => place.cast::<u32>().write_unaligned(word),
            Value::Long(long) => place.cast::<u64>().write_unaligned(long),
            Value::None => {}
        }
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuPointerGetAttribute(
    data: *mut c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> CUresult {
    if !data.is_null()
        && let Some(value) =
            with(|running| self::attribute(running, &running.lookup(ptr.0)?, attribute, ptr.0))
    {
        if value == Value::None {
            return CUresult::ERROR_INVALID_VALUE;
        }
        // SAFETY: not null, and the program's place for this attribute.
        unsafe { write(data, value) };
        return CUresult::SUCCESS;
    }
    // SAFETY: the program's own call.
    let result = vmm::about(ptr, 1, || unsafe {
        real::cuPointerGetAttribute(data, attribute, ask_about(ptr))
    });
    if result.is_success() && !data.is_null() && is_number(attribute) {
        with(|running| {
            let number = vmm::buffer_id(running, ptr.0)?;
            // SAFETY: the driver has just written it, in this width.
            unsafe { write(data, Value::Long(number)) };
            Some(())
        });
    }
    result
}

/// Attributes that number the memory itself, which is another one whenever it has come back.
fn is_number(attribute: CUpointer_attribute) -> bool {
    matches!(
        attribute,
        CU_POINTER_ATTRIBUTE_BUFFER_ID | CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID
    )
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuPointerGetAttributes(
    numAttributes: u32,
    attributes: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    ptr: CUdeviceptr,
) -> CUresult {
    // The driver fills in what it knows of such memory; what is different about ours is written over that.
    // SAFETY: the program's own call.
    let result = vmm::about(ptr, 1, || unsafe {
        real::cuPointerGetAttributes(numAttributes, attributes, data, ask_about(ptr))
    });
    let count = numAttributes as usize;
    if !result.is_success() || count == 0 {
        return result;
    }
    with(|running| {
        let number = vmm::buffer_id(running, ptr.0)?;
        for index in 0..count {
            // SAFETY: the driver has read and written this many entries of both arrays.
            let (asked, place) = unsafe { (attributes.add(index).read(), data.add(index).read()) };
            if is_number(asked) && !place.is_null() {
                // SAFETY: the program's place for this attribute.
                unsafe { write(place, Value::Long(number)) };
            }
        }
        Some(())
    });
    with(|running| {
        let allocation = running.lookup(ptr.0)?;
        for index in 0..count {
            // SAFETY: the driver has read and written this many entries of both arrays.
            let (asked, place) = unsafe { (attributes.add(index).read(), data.add(index).read()) };
            match attribute(running, &allocation, asked, ptr.0) {
                Some(Value::None) if !place.is_null() => {
                    // SAFETY: a pointer-sized place: the only attribute without a value is a pointer.
                    unsafe { write(place, Value::Long(0)) };
                }
                Some(value) if !place.is_null() => {
                    // SAFETY: the program's place for this attribute.
                    unsafe { write(place, value) };
                }
                _ => {}
            }
        }
        Some(())
    });
    result
}
