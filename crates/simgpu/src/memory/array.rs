//! Arrays: memory for textures, which has no address that a program sees.
//!
//! Here an array is rows at a pitch, plane behind plane, in memory of its context; a level of a mipmapped array is an array of its own.
//! An array that was made for *deferred mapping* has no memory until the program maps some of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use super::{BLOCK, Kind, READ_WRITE, alloc};
use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context::{self, Context};
use crate::handles::{Table, fresh};
use crate::process::{lock, process};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const HANDLE: CUresult = CUresult::ERROR_INVALID_HANDLE;

/// Rows begin at multiples of this.
const PITCH: u64 = 512;
const DEFERRED_MAPPING: u32 = 0x80;
/// Flags that change nothing about the memory: gather, depth, colour attachment, video.
const OTHER_FLAGS: u32 = 0x08 | 0x10 | 0x20 | 0x100;

/// The arrays and mipmapped arrays that the program holds.
static ARRAYS: std::sync::OnceLock<Table<Array>> = std::sync::OnceLock::new();
static MIPMAPS: std::sync::OnceLock<Table<Mipmap>> = std::sync::OnceLock::new();

fn arrays() -> &'static Table<Array> {
    ARRAYS.get_or_init(Table::default)
}

fn mipmaps() -> &'static Table<Mipmap> {
    MIPMAPS.get_or_init(Table::default)
}

/// An array.
#[derive(Debug)]
pub(crate) struct Array {
    handle: usize,
    context: usize,
    device: u32,
    pub(crate) descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    /// Where its memory is; zero while it has none.
    base: AtomicU64,
    /// Bytes of a row, from row to row, and of all.
    row: u64,
    pitch: u64,
    bytes: u64,
    /// It is a level of a mipmapped array and goes with it.
    level: bool,
}

#[derive(Debug)]
struct Mipmap {
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    levels: Vec<Arc<Array>>,
}

/// Bytes of an element.
fn element(d: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<u64, CUresult> {
    let channel = match d.Format {
        CU_AD_FORMAT_UNSIGNED_INT8 | CU_AD_FORMAT_SIGNED_INT8 => 1,
        CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => 2,
        CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => 4,
        CUarray_format(192..=194 | 198..=200) => 1,
        CUarray_format(195..=197 | 201..=203) => 2,
        // Planar and compressed formats are not simulated.
        CUarray_format(37..=255) => return Err(CUresult::ERROR_NOT_SUPPORTED),
        _ => return Err(INVALID),
    };
    if !matches!(d.NumChannels, 1 | 2 | 4) {
        return Err(INVALID);
    }
    Ok(channel * u64::from(d.NumChannels))
}

fn check(d: &CUDA_ARRAY3D_DESCRIPTOR) -> R {
    let known = CUDA_ARRAY3D_LAYERED
        | CUDA_ARRAY3D_SURFACE_LDST
        | CUDA_ARRAY3D_CUBEMAP
        | CUDA_ARRAY3D_SPARSE
        | DEFERRED_MAPPING
        | OTHER_FLAGS;
    let layered = d.Flags & CUDA_ARRAY3D_LAYERED != 0;
    if d.Width == 0 || d.Flags & !known != 0 || (d.Depth > 0 && d.Height == 0 && !layered) {
        return Err(INVALID);
    }
    if layered && d.Depth == 0 {
        return Err(INVALID);
    }
    if d.Flags & CUDA_ARRAY3D_CUBEMAP != 0 {
        let faces = if layered {
            d.Depth.is_multiple_of(6)
        } else {
            d.Depth == 6
        };
        if d.Width != d.Height || !faces {
            return Err(INVALID);
        }
    }
    if d.Flags & CUDA_ARRAY3D_SPARSE != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    element(d).map(drop)
}

impl Array {
    fn make(context: &Context, d: CUDA_ARRAY3D_DESCRIPTOR, level: bool) -> Result<Arc<Self>, CUresult> {
        let oom = CUresult::ERROR_OUT_OF_MEMORY;
        let row = (d.Width as u64).checked_mul(element(&d)?).ok_or(oom)?;
        let pitch = row.checked_next_multiple_of(PITCH).ok_or(oom)?;
        let rows = (d.Height.max(1) as u64)
            .checked_mul(d.Depth.max(1) as u64)
            .ok_or(oom)?;
        let bytes = pitch.checked_mul(rows).ok_or(oom)?;
        let base = if d.Flags & DEFERRED_MAPPING != 0 {
            0
        } else {
            alloc::allocate(context, bytes, Kind::Array)?
        };
        let array = Arc::new(Self {
            handle: fresh(),
            context: context.shared.handle,
            device: context.shared.device,
            descriptor: d,
            base: AtomicU64::new(base),
            row,
            pitch,
            bytes,
            level,
        });
        arrays().insert(array.handle, Arc::clone(&array));
        Ok(array)
    }

    fn planes(&self) -> u64 {
        self.descriptor.Depth.max(1) as u64
    }

    fn height(&self) -> u64 {
        self.descriptor.Height.max(1) as u64
    }

    fn end(&self) {
        arrays().remove(self.handle);
        let base = self.base.swap(0, Ordering::AcqRel);
        if base == 0 {
            return;
        }
        if self.descriptor.Flags & DEFERRED_MAPPING != 0 {
            alloc::unmap_block(base);
        } else if let Some(context) = process().contexts.get(self.context) {
            alloc::free_global(&context, base);
        }
    }

    /// Where a copy of so many bytes, rows and planes begins, and the distances: `None` if it does not lie in the array.
    pub(crate) fn side(&self, at: [u64; 3], extent: [u64; 3]) -> Option<(u64, u64, u64)> {
        let limits = [self.row, self.height(), self.planes()];
        let inside = (0..3).all(|axis| {
            at[axis]
                .checked_add(extent[axis])
                .is_some_and(|end| end <= limits[axis])
        });
        let base = self.base.load(Ordering::Acquire);
        if !inside || base == 0 {
            return None;
        }
        let plane = self.pitch * self.height();
        Some((
            base + at[0] + at[1] * self.pitch + at[2] * plane,
            self.pitch,
            plane,
        ))
    }
}

/// The array of a handle.
pub(crate) fn find(handle: CUarray) -> Result<Arc<Array>, CUresult> {
    arrays().get(handle.0).ok_or(HANDLE)
}

fn mipmap(handle: CUmipmappedArray) -> Result<Arc<Mipmap>, CUresult> {
    mipmaps().get(handle.0).ok_or(HANDLE)
}

/// The arrays of a context that ends go with it; their memory is the context's, and gone already.
pub(crate) fn free_context(context: usize) {
    for array in arrays().remove_where(|array| array.context == context) {
        if array.descriptor.Flags & DEFERRED_MAPPING != 0 {
            array.end();
        }
    }
    mipmaps().remove_where(|mipmap| mipmap.levels[0].context == context);
}

fn start(context: &Context) -> R {
    context.shared.check()?;
    capture::check_unsafe_call()
}

pub(crate) fn cuArray3DCreate_v2(
    c: &Caller,
    pHandle: *mut CUarray,
    pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR,
) -> R {
    let context = context::current()?;
    let descriptor = c.get(pAllocateArray)?;
    if pHandle.is_null() {
        return Err(INVALID);
    }
    check(&descriptor)?;
    start(&context)?;
    c.put(pHandle, CUarray(Array::make(&context, descriptor, false)?.handle))
}

pub(crate) fn cuArrayCreate_v2(
    c: &Caller,
    pHandle: *mut CUarray,
    pAllocateArray: *const CUDA_ARRAY_DESCRIPTOR,
) -> R {
    let flat = c.get(pAllocateArray)?;
    let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
        Width: flat.Width,
        Height: flat.Height,
        Format: flat.Format,
        NumChannels: flat.NumChannels,
        ..CUDA_ARRAY3D_DESCRIPTOR::default()
    };
    cuArray3DCreate_v2(c, pHandle, &descriptor)
}

pub(crate) fn cuArray3DGetDescriptor_v2(
    c: &Caller,
    pArrayDescriptor: *mut CUDA_ARRAY3D_DESCRIPTOR,
    hArray: CUarray,
) -> R {
    c.put(pArrayDescriptor, find(hArray)?.descriptor)
}

pub(crate) fn cuArrayGetDescriptor_v2(
    c: &Caller,
    pArrayDescriptor: *mut CUDA_ARRAY_DESCRIPTOR,
    hArray: CUarray,
) -> R {
    let d = find(hArray)?.descriptor;
    let answer = CUDA_ARRAY_DESCRIPTOR {
        Width: d.Width,
        Height: d.Height,
        Format: d.Format,
        NumChannels: d.NumChannels,
    };
    c.put(pArrayDescriptor, answer)
}

pub(crate) fn cuArrayDestroy(_: &Caller, hArray: CUarray) -> R {
    let array = find(hArray)?;
    if array.level {
        return Err(HANDLE);
    }
    capture::check_unsafe_call()?;
    drain(&array);
    array.end();
    Ok(())
}

/// Work may still use an array that goes.
fn drain(array: &Array) {
    for context in process().contexts.all() {
        if context.shared.device == array.device {
            context.shared.drain();
        }
    }
}

/// What an array needs of memory that is mapped to it. Only one that was made for that tells.
fn requirements(d: &CUDA_ARRAY3D_DESCRIPTOR, bytes: u64) -> Result<CUDA_ARRAY_MEMORY_REQUIREMENTS, CUresult> {
    if d.Flags & DEFERRED_MAPPING == 0 {
        return Err(INVALID);
    }
    Ok(CUDA_ARRAY_MEMORY_REQUIREMENTS {
        size: bytes.next_multiple_of(BLOCK) as usize,
        alignment: BLOCK as usize,
        ..CUDA_ARRAY_MEMORY_REQUIREMENTS::default()
    })
}

pub(crate) fn cuArrayGetMemoryRequirements(
    c: &Caller,
    memoryRequirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
    array: CUarray,
    device: CUdevice,
) -> R {
    process().physical(device.0)?;
    let array = find(array)?;
    c.put(memoryRequirements, requirements(&array.descriptor, array.bytes)?)
}

pub(crate) fn cuMipmappedArrayGetMemoryRequirements(
    c: &Caller,
    memoryRequirements: *mut CUDA_ARRAY_MEMORY_REQUIREMENTS,
    mipmap_: CUmipmappedArray,
    device: CUdevice,
) -> R {
    process().physical(device.0)?;
    let mipmap = mipmap(mipmap_)?;
    let bytes = mipmap.levels.iter().map(|level| level.bytes).sum();
    c.put(memoryRequirements, requirements(&mipmap.descriptor, bytes)?)
}

/// There are no sparse arrays.
pub(crate) fn cuArrayGetSparseProperties(
    _: &Caller,
    _sparseProperties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
    array: CUarray,
) -> R {
    find(array)?;
    Err(INVALID)
}

pub(crate) fn cuMipmappedArrayGetSparseProperties(
    _: &Caller,
    _sparseProperties: *mut CUDA_ARRAY_SPARSE_PROPERTIES,
    mipmap_: CUmipmappedArray,
) -> R {
    mipmap(mipmap_)?;
    Err(INVALID)
}

/// There are no arrays of several planes.
pub(crate) fn cuArrayGetPlane(_: &Caller, _pPlaneArray: *mut CUarray, hArray: CUarray, _planeIdx: u32) -> R {
    find(hArray)?;
    Err(INVALID)
}

pub(crate) fn cuMipmappedArrayCreate(
    c: &Caller,
    pHandle: *mut CUmipmappedArray,
    pMipmappedArrayDesc: *const CUDA_ARRAY3D_DESCRIPTOR,
    numMipmapLevels: u32,
) -> R {
    let context = context::current()?;
    let descriptor = c.get(pMipmappedArrayDesc)?;
    if pHandle.is_null() || numMipmapLevels == 0 {
        return Err(INVALID);
    }
    check(&descriptor)?;
    if descriptor.Flags & DEFERRED_MAPPING != 0 {
        return Err(CUresult::ERROR_NOT_SUPPORTED);
    }
    start(&context)?;
    // More levels than halvings are cut, as the header says.
    let largest = descriptor.Width.max(descriptor.Height).max(descriptor.Depth);
    let levels = numMipmapLevels.min(largest.ilog2() + 1);
    let layered = descriptor.Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0;
    let half = |side: usize, level: u32| match side {
        0 => 0,
        side => (side >> level).max(1),
    };
    let mut made: Vec<Arc<Array>> = Vec::new();
    for level in 0..levels {
        let shape = CUDA_ARRAY3D_DESCRIPTOR {
            Width: half(descriptor.Width, level),
            Height: half(descriptor.Height, level),
            Depth: if layered {
                descriptor.Depth
            } else {
                half(descriptor.Depth, level)
            },
            ..descriptor
        };
        match Array::make(&context, shape, true) {
            Ok(array) => made.push(array),
            Err(code) => {
                made.iter().for_each(|array| array.end());
                return Err(code);
            }
        }
    }
    let handle = fresh();
    mipmaps().insert(
        handle,
        Arc::new(Mipmap {
            descriptor,
            levels: made,
        }),
    );
    c.put(pHandle, CUmipmappedArray(handle))
}

pub(crate) fn cuMipmappedArrayGetLevel(
    c: &Caller,
    pLevelArray: *mut CUarray,
    hMipmappedArray: CUmipmappedArray,
    level: u32,
) -> R {
    let mipmap = mipmap(hMipmappedArray)?;
    let array = mipmap.levels.get(level as usize).ok_or(INVALID)?;
    c.put(pLevelArray, CUarray(array.handle))
}

pub(crate) fn cuMipmappedArrayDestroy(_: &Caller, hMipmappedArray: CUmipmappedArray) -> R {
    capture::check_unsafe_call()?;
    let mipmap = mipmaps().remove(hMipmappedArray.0).ok_or(HANDLE)?;
    drain(&mipmap.levels[0]);
    mipmap.levels.iter().for_each(|level| level.end());
    Ok(())
}

/// Puts the program's own memory behind an array, or takes it away. In stream order with the work before; what comes after waits.
pub(crate) fn cuMemMapArrayAsync(
    c: &Caller,
    mapInfoList: *mut CUarrayMapInfo,
    count: u32,
    hStream: CUstream,
) -> R {
    let stream = c.stream(hStream)?;
    capture::refuse_captured(&stream)?;
    for info in c.array(mapInfoList.cast_const(), count as usize)? {
        if info.resourceType != CU_RESOURCE_TYPE_ARRAY || info.flags != 0 || info.reserved != [0; 2] {
            return Err(INVALID);
        }
        let array = find(CUarray(info.resource as usize))?;
        if array.descriptor.Flags & DEFERRED_MAPPING == 0 || info.deviceBitMask != 1 << stream.context.ordinal
        {
            return Err(INVALID);
        }
        stream.drain();
        match info.memOperationType {
            CU_MEM_OPERATION_TYPE_MAP => map(&array, &info)?,
            CU_MEM_OPERATION_TYPE_UNMAP if info.memHandle == 0 => {
                let base = array.base.swap(0, Ordering::AcqRel);
                if base != 0 {
                    alloc::unmap_block(base);
                }
            }
            _ => return Err(INVALID),
        }
    }
    Ok(())
}

/// One change of an array's memory at a time.
static MAPPING: Mutex<()> = Mutex::new(());

fn map(array: &Array, info: &CUarrayMapInfo) -> R {
    let memory = process()
        .mem_handles
        .get(info.memHandle as usize)
        .ok_or(INVALID)?;
    let whole = info.offset == 0 && memory.phys.bytes >= array.bytes;
    let _one = lock(&MAPPING);
    if !whole || memory.phys.device != Some(array.device) || array.base.load(Ordering::Acquire) != 0 {
        return Err(INVALID);
    }
    let base = alloc::map_phys(Arc::clone(&memory.phys), vec![(array.device, READ_WRITE)])?;
    array.base.store(base, Ordering::Release);
    Ok(())
}
