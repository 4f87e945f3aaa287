//! What can be asked of a device.

use std::sync::Mutex;
use std::sync::PoisonError;

use ebb_abi::{Zero, c_char};
use ebb_simdev::{MAX_DEVICES, Machine, ProcessUse, device_name, device_uuid, now_ns, uuid_text};

use crate::system::machine;
use crate::*;

/// Where devices sit on the bus: the driver says the same.
const FIRST_BUS: u32 = 0x17;

/// A handle is the physical index plus one, spread, so that null and small numbers are none.
fn handle(index: u32) -> nvmlDevice_t {
    nvmlDevice_t(0x5eb1_0000 + (index as usize + 1) * 16)
}

pub(crate) fn find(device: nvmlDevice_t) -> Result<(&'static Machine, u32), nvmlReturn_t> {
    let machine = machine()?;
    let count = machine.config().devices;
    let index = (0..count)
        .find(|index| handle(*index) == device)
        .ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    Ok((machine, index))
}

/// # Safety
/// As the interface demands, here and below.
pub(crate) unsafe fn count(place: *mut u32) -> R {
    let devices = machine()?.config().devices;
    // SAFETY: the caller's promise.
    unsafe { put(place, devices) }
}

pub(crate) unsafe fn by_index(index: u32, device: *mut nvmlDevice_t) -> R {
    if index >= machine()?.config().devices {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    unsafe { put(device, handle(index)) }
}

pub(crate) unsafe fn by_uuid(uuid: *const c_char, device: *mut nvmlDevice_t) -> R {
    let devices = machine()?.config().devices;
    // SAFETY: the caller's promise.
    let wanted = unsafe { text(uuid) }?;
    let found = (0..devices).find(|index| uuid_text(device_uuid(*index)).eq_ignore_ascii_case(wanted));
    // SAFETY: the caller's promise.
    unsafe { put(device, handle(found.ok_or(NVML_ERROR_NOT_FOUND)?)) }
}

/// By the bytes of the UUID or its text.
pub(crate) unsafe fn by_uuid_value(uuid: *const nvmlUUID_v1_t, device: *mut nvmlDevice_t) -> R {
    let devices = machine()?.config().devices;
    // SAFETY: null or a structure by the caller's promise.
    let asked = unsafe { uuid.as_ref() }.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    if asked.version != nvmlUUID_v1 {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let found = match asked.type_ {
        NVML_UUID_TYPE_BINARY => (0..devices).find(|index| device_uuid(*index).0 == asked.value[..16]),
        NVML_UUID_TYPE_ASCII => {
            let end = asked.value.iter().position(|byte| *byte == 0);
            let wanted = &asked.value[..end.unwrap_or(asked.value.len())];
            (0..devices).find(|index| {
                uuid_text(device_uuid(*index))
                    .as_bytes()
                    .eq_ignore_ascii_case(wanted)
            })
        }
        _ => return Err(NVML_ERROR_INVALID_ARGUMENT),
    };
    // SAFETY: the caller's promise.
    unsafe { put(device, handle(found.ok_or(NVML_ERROR_NOT_FOUND)?)) }
}

fn serial_of(index: u32) -> String {
    format!("15532230{:05}", index + 1)
}

pub(crate) unsafe fn serial(device: nvmlDevice_t, place: *mut c_char, length: u32) -> R {
    let (_, index) = find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put_text(place, length, &serial_of(index)) }
}

pub(crate) unsafe fn by_serial(serial: *const c_char, device: *mut nvmlDevice_t) -> R {
    let devices = machine()?.config().devices;
    // SAFETY: the caller's promise.
    let wanted = unsafe { text(serial) }?;
    let found = (0..devices).find(|index| serial_of(*index) == wanted);
    // SAFETY: the caller's promise.
    unsafe { put(device, handle(found.ok_or(NVML_ERROR_NOT_FOUND)?)) }
}

fn bus_id(index: u32) -> String {
    format!("00000000:{:02X}:00.0", FIRST_BUS + index)
}

pub(crate) unsafe fn by_pci(id: *const c_char, device: *mut nvmlDevice_t) -> R {
    let devices = machine()?.config().devices;
    // SAFETY: the caller's promise.
    let wanted = unsafe { text(id) }?.to_ascii_uppercase();
    // The domain is written with four digits, eight, or not at all.
    let found = (0..devices).find(|index| {
        let full = bus_id(*index);
        wanted == full || wanted == full[4..] || wanted == full[9..]
    });
    // SAFETY: the caller's promise.
    unsafe { put(device, handle(found.ok_or(NVML_ERROR_NOT_FOUND)?)) }
}

pub(crate) unsafe fn index(device: nvmlDevice_t, place: *mut u32) -> R {
    let (_, index) = find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(place, index) }
}

pub(crate) unsafe fn name(device: nvmlDevice_t, place: *mut c_char, length: u32) -> R {
    find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put_text(place, length, device_name()) }
}

pub(crate) unsafe fn uuid(device: nvmlDevice_t, place: *mut c_char, length: u32) -> R {
    let (_, index) = find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put_text(place, length, &uuid_text(device_uuid(index))) }
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (place, byte) in out.iter_mut().zip(text.bytes()).take(N - 1) {
        *place = byte as c_char;
    }
    out
}

pub(crate) unsafe fn pci(device: nvmlDevice_t, place: *mut nvmlPciInfo_t) -> R {
    let (_, index) = find(device)?;
    let id = bus_id(index);
    let info = nvmlPciInfo_t {
        busIdLegacy: chars(&id[4..]),
        bus: FIRST_BUS + index,
        // NVIDIA's vendor number in the low half: tools look at it.
        pciDeviceId: 0x5eb0_10de,
        busId: chars(&id),
        ..nvmlPciInfo_t::ZERO
    };
    // SAFETY: the caller's promise.
    unsafe { put(place, info) }
}

pub(crate) unsafe fn memory(device: nvmlDevice_t, place: *mut nvmlMemory_t) -> R {
    let (machine, index) = find(device)?;
    let usage = machine.usage(index);
    // SAFETY: the caller's promise.
    unsafe {
        put(
            place,
            nvmlMemory_t {
                total: usage.total,
                free: usage.free(),
                used: usage.used,
            },
        )
    }
}

pub(crate) unsafe fn memory_v2(device: nvmlDevice_t, place: *mut nvmlMemory_v2_t) -> R {
    let (machine, index) = find(device)?;
    if place.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, and a structure of this type whose version is set by the caller's promise.
    let version = unsafe { (&raw const (*place).version).read_unaligned() };
    if version != nvmlMemory_v2 {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let usage = machine.usage(index);
    let answer = nvmlMemory_v2_t {
        version,
        total: usage.total,
        reserved: 0,
        free: usage.free(),
        used: usage.used,
    };
    // SAFETY: the caller's promise.
    unsafe { put(place, answer) }
}

pub(crate) unsafe fn bar1(device: nvmlDevice_t, place: *mut nvmlBAR1Memory_t) -> R {
    let (machine, index) = find(device)?;
    let total = machine.usage(index).total.next_power_of_two();
    // SAFETY: the caller's promise.
    unsafe {
        put(
            place,
            nvmlBAR1Memory_t {
                bar1Total: total,
                bar1Free: total,
                bar1Used: 0,
            },
        )
    }
}

/// Answers the list of processes in one of its forms: the count goes in as the room and comes out as the number.
unsafe fn processes<T>(
    device: nvmlDevice_t,
    count: *mut u32,
    list: *mut T,
    make: impl Fn(ProcessUse) -> T,
) -> R {
    let (machine, index) = find(device)?;
    if count.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    let found = machine.processes(index);
    // SAFETY: not null, and good for one value by the caller's promise.
    let room = unsafe { count.read_unaligned() } as usize;
    // SAFETY: as above.
    unsafe { count.write_unaligned(found.len() as u32) };
    if found.is_empty() {
        return Ok(());
    }
    if room < found.len() {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    if list.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    for (place, process) in found.into_iter().enumerate() {
        // SAFETY: the list is good for `room` entries by the caller's promise, and `place` is below it.
        unsafe { list.add(place).write_unaligned(make(process)) };
    }
    Ok(())
}

pub(crate) unsafe fn processes_v1(
    device: nvmlDevice_t,
    count: *mut u32,
    list: *mut nvmlProcessInfo_v1_t,
) -> R {
    let make = |process: ProcessUse| nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
    };
    // SAFETY: the caller's promise.
    unsafe { processes(device, count, list, make) }
}

pub(crate) unsafe fn processes_v2(
    device: nvmlDevice_t,
    count: *mut u32,
    list: *mut nvmlProcessInfo_v2_t,
) -> R {
    let make = |process: ProcessUse| nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
        gpuInstanceId: u32::MAX,
        computeInstanceId: u32::MAX,
    };
    // SAFETY: the caller's promise.
    unsafe { processes(device, count, list, make) }
}

/// There is never a process of this kind (graphics, MPS).
pub(crate) unsafe fn no_processes(device: nvmlDevice_t, count: *mut u32) -> R {
    find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(count, 0) }
}

/// The last sample of a device: when, how long it had been busy then, and the answer.
#[derive(Clone, Copy)]
struct Sample {
    at_ns: u64,
    busy_ns: u64,
    percent: u32,
}

/// The time over which utilisation is measured.
const PERIOD_NS: u64 = 100_000_000;

static SAMPLES: Mutex<[Option<Sample>; MAX_DEVICES]> = Mutex::new([None; MAX_DEVICES]);

pub(crate) fn busy_percent(machine: &Machine, index: u32) -> u32 {
    let mut samples = SAMPLES.lock().unwrap_or_else(PoisonError::into_inner);
    let (at_ns, busy_ns) = (now_ns(), machine.busy_ns(index));
    let slot = &mut samples[index as usize];
    let percent = match *slot {
        None => 0,
        Some(last) if at_ns.saturating_sub(last.at_ns) < PERIOD_NS => return last.percent,
        Some(last) => {
            let share = busy_ns.saturating_sub(last.busy_ns) * 100 / (at_ns - last.at_ns);
            // Kernels of several streams count at once.
            share.min(100) as u32
        }
    };
    *slot = Some(Sample {
        at_ns,
        busy_ns,
        percent,
    });
    percent
}

pub(crate) unsafe fn utilization(device: nvmlDevice_t, place: *mut nvmlUtilization_t) -> R {
    let (machine, index) = find(device)?;
    let gpu = busy_percent(machine, index);
    // SAFETY: the caller's promise.
    unsafe { put(place, nvmlUtilization_t { gpu, memory: gpu }) }
}

pub(crate) unsafe fn capability(device: nvmlDevice_t, major: *mut i32, minor: *mut i32) -> R {
    find(device)?;
    // SAFETY: the caller's promise.
    unsafe {
        put(major, 9)?;
        put(minor, 0)
    }
}

/// Answers a number that is the same for every device.
pub(crate) unsafe fn figure(device: nvmlDevice_t, place: *mut u32, value: u32) -> R {
    find(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(place, value) }
}

/// Answers that the device has no such thing.
pub(crate) fn unsupported(device: nvmlDevice_t) -> R {
    find(device)?;
    Err(NVML_ERROR_NOT_SUPPORTED)
}
