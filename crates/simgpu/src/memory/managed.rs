//! Managed memory: one address for the processor and all devices, pages that move.
//!
//! The bytes lie in host memory all the time, since processor and "devices" are one machine here. What moves is the *charge*: a page
//! is charged to the device on which it counts as resident, from the moment a kernel or a fill touches it there or a prefetch brings
//! it, until a prefetch takes it elsewhere, it is freed, or the device needs the room: managed pages give way to everything else, and
//! a page that finds no room stays with the host. That the processor touches a page is not seen and moves nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use ebb_abi::*;

use super::{BLOCK, HOST, Kind, READ_WRITE, alloc, phys::Phys};
use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::process::{lock, process};
use crate::stream::submit;
use crate::work::Work;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

/// What moves at once.
const PAGE: u64 = 64 << 10;

/// What is known about a page. Devices by physical index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Page {
    resident: Option<u32>,
    read_mostly: bool,
    preferred: Option<Target>,
    accessed_by: Vec<u32>,
    prefetched: Option<Target>,
}

/// A location that a program names: a device, the host, or the host's one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Device(u32),
    Host,
    Node,
}

impl Target {
    fn of(location: CUmemLocation) -> Result<Self, CUresult> {
        match location.type_ {
            CU_MEM_LOCATION_TYPE_DEVICE => process().physical(location.id()).map(Self::Device),
            CU_MEM_LOCATION_TYPE_HOST => Ok(Self::Host),
            CU_MEM_LOCATION_TYPE_HOST_NUMA if location.u == 0 => Ok(Self::Node),
            CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => Ok(Self::Node),
            _ => Err(INVALID),
        }
    }

    /// The older calls name devices, and the processor as one.
    fn of_device(device: CUdevice) -> Result<Self, CUresult> {
        if device == CU_DEVICE_CPU {
            return Ok(Self::Host);
        }
        process().physical(device.0).map(Self::Device)
    }

    fn device(self) -> Option<u32> {
        match self {
            Self::Device(device) => Some(device),
            _ => None,
        }
    }

    /// As the attributes tell it: the type, and the number (the processor: -1).
    fn told(this: Option<Self>) -> (CUmemLocationType, i32) {
        match this {
            Some(Self::Device(device)) => (
                CU_MEM_LOCATION_TYPE_DEVICE,
                process().ordinal(device).unwrap_or(CU_DEVICE_INVALID.0),
            ),
            Some(Self::Host) => (CU_MEM_LOCATION_TYPE_HOST, CU_DEVICE_CPU.0),
            Some(Self::Node) => (CU_MEM_LOCATION_TYPE_HOST_NUMA, 0),
            None => (CU_MEM_LOCATION_TYPE_INVALID, CU_DEVICE_INVALID.0),
        }
    }
}

/// All managed memory of the process by address.
static ALL: Mutex<BTreeMap<u64, Vec<Page>>> = Mutex::new(BTreeMap::new());
/// How much of it there is: programs without any pay one look.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether the process has managed memory.
pub(crate) fn exists() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

/// Makes managed memory. Returns the address.
pub(crate) fn allocate(bytes: u64) -> Result<u64, CUresult> {
    let oom = CUresult::ERROR_OUT_OF_MEMORY;
    let size = bytes.checked_next_multiple_of(BLOCK).ok_or(oom)?;
    let (machine, arena) = (process().machine, process().arena);
    let phys = Phys::new(machine, arena, None, size, CUmemAllocationProp::default(), false)?;
    let everyone = (0..machine.config().devices).chain([HOST]);
    let address = alloc::map_phys(phys, everyone.map(|who| (who, READ_WRITE)).collect())?;
    let pages = bytes.div_ceil(PAGE) as usize;
    lock(&ALL).insert(address, vec![Page::default(); pages]);
    COUNT.fetch_add(1, Ordering::AcqRel);
    Ok(address)
}

/// Frees what [`allocate`] made; the allocation's entry is gone already.
pub(crate) fn free(address: u64) {
    let pages = lock(&ALL).remove(&address);
    if let Some(pages) = pages {
        COUNT.fetch_sub(1, Ordering::AcqRel);
        for device in pages.iter().filter_map(|page| page.resident) {
            process().machine.credit(device, PAGE);
        }
    }
    alloc::unmap_block(address);
}

type All = MutexGuard<'static, BTreeMap<u64, Vec<Page>>>;

/// The pages of a span that lies in one allocation.
fn pages_of(all: &mut All, address: u64, bytes: u64) -> Option<&mut [Page]> {
    let (base, pages) = all.range_mut(..=address).next_back()?;
    let first = (address - *base) / PAGE;
    let end = (address - *base).checked_add(bytes)?.div_ceil(PAGE);
    pages.get_mut(first as usize..end as usize)
}

/// A device touches a span: its pages become resident there, as far as there is room. Other spans are not concerned.
pub(crate) fn touch(device: u32, address: u64, bytes: u64) {
    if exists() {
        move_to(&mut lock(&ALL), Some(device), address, bytes);
    }
}

fn move_to(all: &mut All, device: Option<u32>, address: u64, bytes: u64) {
    let machine = process().machine;
    let Some(pages) = pages_of(all, address, bytes) else {
        return;
    };
    let away = pages.iter().filter(|page| page.resident != device).count() as u64;
    if away == 0 {
        return;
    }
    if let Some(device) = device
        && !machine.charge(device, away * PAGE)
    {
        make_room_from(all, device, away * PAGE, Some((address, bytes)));
        if !machine.charge(device, away * PAGE) {
            return;
        }
    }
    for page in pages_of(all, address, bytes).unwrap_or_default() {
        if page.resident != device {
            if let Some(old) = page.resident {
                machine.credit(old, PAGE);
            }
            page.resident = device;
        }
    }
}

/// Moves managed pages off a device for something else. Says whether any moved. If they are being moved just now, none does.
pub(crate) fn make_room(device: u32) -> bool {
    match ALL.try_lock() {
        Ok(mut all) if exists() => make_room_from(&mut all, device, u64::MAX, None) > 0,
        _ => false,
    }
}

fn make_room_from(all: &mut All, device: u32, wanted: u64, except: Option<(u64, u64)>) -> u64 {
    let mut freed = 0;
    for (base, pages) in all.iter_mut() {
        for (index, page) in pages.iter_mut().enumerate() {
            let at = base + index as u64 * PAGE;
            let spared = except.is_some_and(|(start, bytes)| at + PAGE > start && at < start + bytes);
            if freed < wanted && page.resident == Some(device) && !spared {
                page.resident = None;
                process().machine.credit(device, PAGE);
                freed += PAGE;
            }
        }
    }
    freed
}

/// Does a prefetch: work of a stream.
pub(crate) fn prefetch_now(device: Option<u32>, address: u64, bytes: u64) {
    move_to(&mut lock(&ALL), device, address, bytes);
}

/// Does something to all pages of a range that a program named; the range must be managed memory.
fn each(address: CUdeviceptr, count: usize, mut body: impl FnMut(&mut Page)) -> R {
    let mut all = lock(&ALL);
    let pages = pages_of(&mut all, address.0, count as u64)
        .filter(|_| count > 0)
        .ok_or(INVALID)?;
    pages.iter_mut().for_each(&mut body);
    Ok(())
}

fn prefetch(c: &Caller, address: CUdeviceptr, count: usize, target: Target, stream: CUstream) -> R {
    let stream = c.stream(stream)?;
    stream.context.check()?;
    capture::refuse_captured(&stream)?;
    each(address, count, |page| page.prefetched = Some(target))?;
    let work = Work::Prefetch {
        device: target.device(),
        address: address.0,
        bytes: count as u64,
    };
    submit(&stream, work).map(drop)
}

pub(crate) fn cuMemPrefetchAsync(
    c: &Caller,
    devPtr: CUdeviceptr,
    count: usize,
    dstDevice: CUdevice,
    hStream: CUstream,
) -> R {
    prefetch(c, devPtr, count, Target::of_device(dstDevice)?, hStream)
}

pub(crate) fn cuMemPrefetchAsync_v2(
    c: &Caller,
    devPtr: CUdeviceptr,
    count: usize,
    location: CUmemLocation,
    flags: u32,
    hStream: CUstream,
) -> R {
    if flags != 0 {
        return Err(INVALID);
    }
    prefetch(c, devPtr, count, Target::of(location)?, hStream)
}

/// The ranges of a batch call. Its stream must not be the legacy one.
fn batch(
    c: &Caller,
    dptrs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    flags: u64,
    stream: CUstream,
) -> Result<Vec<(CUdeviceptr, usize)>, CUresult> {
    if flags != 0 || count == 0 || c.stream(stream)?.is_legacy() {
        return Err(INVALID);
    }
    let addresses = c.array(dptrs.cast_const(), count)?;
    let ranges: Vec<_> = addresses
        .into_iter()
        .zip(c.array(sizes.cast_const(), count)?)
        .collect();
    for (address, bytes) in &ranges {
        each(*address, *bytes, |_| ())?;
    }
    Ok(ranges)
}

pub(crate) fn cuMemPrefetchBatchAsync(
    c: &Caller,
    dptrs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    prefetchLocs: *mut CUmemLocation,
    prefetchLocIdxs: *mut usize,
    numPrefetchLocs: usize,
    flags: u64,
    hStream: CUstream,
) -> R {
    let ranges = batch(c, dptrs, sizes, count, flags, hStream)?;
    let starts = c.array(prefetchLocIdxs.cast_const(), numPrefetchLocs)?;
    let locations = c.array(prefetchLocs.cast_const(), numPrefetchLocs)?;
    let ordered = starts.windows(2).all(|pair| pair[0] < pair[1]);
    if starts.first() != Some(&0) || !ordered || starts.last().is_some_and(|last| *last >= count) {
        return Err(INVALID);
    }
    let targets: Result<Vec<Target>, CUresult> = locations.into_iter().map(Target::of).collect();
    let targets = targets?;
    for (index, (address, bytes)) in ranges.into_iter().enumerate() {
        let which = starts.partition_point(|start| *start <= index) - 1;
        prefetch(c, address, bytes, targets[which], hStream)?;
    }
    Ok(())
}

pub(crate) fn cuMemDiscardBatchAsync(
    c: &Caller,
    dptrs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    flags: u64,
    hStream: CUstream,
) -> R {
    // What a discarded page holds is undefined: what it held is one possibility.
    batch(c, dptrs, sizes, count, flags, hStream).map(drop)
}

pub(crate) fn cuMemDiscardAndPrefetchBatchAsync(
    c: &Caller,
    dptrs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    prefetchLocs: *mut CUmemLocation,
    prefetchLocIdxs: *mut usize,
    numPrefetchLocs: usize,
    flags: u64,
    hStream: CUstream,
) -> R {
    cuMemPrefetchBatchAsync(
        c,
        dptrs,
        sizes,
        count,
        prefetchLocs,
        prefetchLocIdxs,
        numPrefetchLocs,
        flags,
        hStream,
    )
}

fn advise(address: CUdeviceptr, count: usize, advice: CUmem_advise, target: Result<Target, CUresult>) -> R {
    match advice {
        CU_MEM_ADVISE_SET_READ_MOSTLY => each(address, count, |page| page.read_mostly = true),
        CU_MEM_ADVISE_UNSET_READ_MOSTLY => each(address, count, |page| page.read_mostly = false),
        CU_MEM_ADVISE_SET_PREFERRED_LOCATION => {
            let target = target?;
            each(address, count, |page| page.preferred = Some(target))
        }
        CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION => each(address, count, |page| page.preferred = None),
        CU_MEM_ADVISE_SET_ACCESSED_BY | CU_MEM_ADVISE_UNSET_ACCESSED_BY => {
            let who = target?.device().unwrap_or(HOST);
            each(address, count, |page| {
                page.accessed_by.retain(|known| *known != who);
                if advice == CU_MEM_ADVISE_SET_ACCESSED_BY {
                    page.accessed_by.push(who);
                    page.accessed_by.sort_unstable();
                }
            })
        }
        _ => Err(INVALID),
    }
}

pub(crate) fn cuMemAdvise(
    _: &Caller,
    devPtr: CUdeviceptr,
    count: usize,
    advice: CUmem_advise,
    device: CUdevice,
) -> R {
    advise(devPtr, count, advice, Target::of_device(device))
}

pub(crate) fn cuMemAdvise_v2(
    _: &Caller,
    devPtr: CUdeviceptr,
    count: usize,
    advice: CUmem_advise,
    location: CUmemLocation,
) -> R {
    advise(devPtr, count, advice, Target::of(location))
}

pub(crate) fn cuMemRangeGetAttribute(
    c: &Caller,
    data: *mut c_void,
    dataSize: usize,
    attribute: CUmem_range_attribute,
    devPtr: CUdeviceptr,
    count: usize,
) -> R {
    let mut pages = Vec::new();
    each(devPtr, count, |page| pages.push(page.clone()))?;
    if attribute == CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY {
        if dataSize == 0 || !dataSize.is_multiple_of(4) {
            return Err(INVALID);
        }
        let mut answer: Vec<i32> = pages[0]
            .accessed_by
            .iter()
            .filter(|who| pages.iter().all(|page| page.accessed_by.contains(who)))
            .map(|who| match *who {
                HOST => CU_DEVICE_CPU.0,
                device => process().ordinal(device).unwrap_or(CU_DEVICE_INVALID.0),
            })
            .collect();
        answer.resize(dataSize / 4, CU_DEVICE_INVALID.0);
        return c.put_array(data.cast::<i32>(), dataSize / 4, &answer);
    }
    if dataSize != 4 {
        return Err(INVALID);
    }
    let common = |pick: fn(&Page) -> Option<Target>| {
        let first = pick(&pages[0]);
        Target::told(first.filter(|_| pages.iter().all(|page| pick(page) == first)))
    };
    // The older attributes know devices and the processor only.
    let older = |(kind, id): (CUmemLocationType, i32)| match kind {
        CU_MEM_LOCATION_TYPE_HOST_NUMA => CU_DEVICE_INVALID.0,
        _ => id,
    };
    let (preferred, prefetched) = (common(|page| page.preferred), common(|page| page.prefetched));
    let answer = match attribute {
        CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY => i32::from(pages.iter().all(|page| page.read_mostly)),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION => older(preferred),
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION => older(prefetched),
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE => preferred.0.0 as i32,
        CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_ID => preferred.1,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE => prefetched.0.0 as i32,
        CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID => prefetched.1,
        _ => return Err(INVALID),
    };
    c.put(data.cast::<i32>(), answer)
}

pub(crate) fn cuMemRangeGetAttributes(
    c: &Caller,
    data: *mut *mut c_void,
    dataSizes: *mut usize,
    attributes: *mut CUmem_range_attribute,
    numAttributes: usize,
    devPtr: CUdeviceptr,
    count: usize,
) -> R {
    let places = c.array(data.cast_const(), numAttributes)?;
    let sizes = c.array(dataSizes.cast_const(), numAttributes)?;
    let wanted = c.array(attributes.cast_const(), numAttributes)?;
    for ((place, size), attribute) in places.into_iter().zip(sizes).zip(wanted) {
        cuMemRangeGetAttribute(c, place, size, attribute, devPtr, count)?;
    }
    Ok(())
}

pub(crate) fn cuStreamAttachMemAsync(
    c: &Caller,
    hStream: CUstream,
    dptr: CUdeviceptr,
    length: usize,
    flags: u32,
) -> R {
    let stream = c.stream(hStream)?;
    capture::refuse_captured(&stream)?;
    let known = [CU_MEM_ATTACH_GLOBAL, CU_MEM_ATTACH_HOST, CU_MEM_ATTACH_SINGLE];
    if !known.iter().any(|flag| flag.0 == flags) {
        return Err(INVALID);
    }
    // Not to the default streams, which are everybody's.
    if flags == CU_MEM_ATTACH_SINGLE.0 && hStream.0 <= 2 {
        return Err(INVALID);
    }
    let size = {
        let tables = process().memory.read();
        let allocation = tables.allocations.get(&dptr.0).ok_or(INVALID)?;
        if allocation.kind != Kind::Managed {
            return Err(INVALID);
        }
        allocation.size
    };
    if length != 0 && length as u64 != size {
        return Err(INVALID);
    }
    Ok(())
}
