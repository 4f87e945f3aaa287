//! What can be asked of a device.

use std::sync::Mutex;
use std::sync::PoisonError;

use ebb_abi::{Zero, c_char};
use ebb_simdev::{MAX_DEVICES, Machine, ProcessUse, device_name, now_ns};

use crate::place::Place;
use crate::system::machine;
use crate::*;

/// Where devices sit on the bus: the driver says the same.
const FIRST_BUS: u32 = 0x17;

/// The machine, and the first physical device of a handle.
pub(crate) fn find(device: nvmlDevice_t) -> Result<(&'static Machine, u32), nvmlReturn_t> {
    let place = Place::of(device)?;
    Ok((place.machine, place.devices().start))
}

/// # Safety
/// As the interface demands, here and below.
pub(crate) unsafe fn count(place: *mut u32) -> R {
    let cards = machine()?.config().cards();
    // SAFETY: the caller's promise.
    unsafe { put(place, cards) }
}

pub(crate) unsafe fn by_index(index: u32, device: *mut nvmlDevice_t) -> R {
    let cards = Place::cards()?;
    let card = cards.get(index as usize).ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    // SAFETY: the caller's promise.
    unsafe { put(device, card.handle()) }
}

/// Answers with the handle of what is found.
unsafe fn put_found(device: *mut nvmlDevice_t, found: Option<Place>) -> R {
    let handle = found.ok_or(NVML_ERROR_NOT_FOUND)?.handle();
    // SAFETY: the caller's promise.
    unsafe { put(device, handle) }
}

pub(crate) unsafe fn by_uuid(uuid: *const c_char, device: *mut nvmlDevice_t) -> R {
    let all = Place::all()?;
    // SAFETY: the caller's promise.
    let wanted = unsafe { text(uuid) }?;
    let found = all
        .into_iter()
        .find(|place| place.uuid_text().eq_ignore_ascii_case(wanted));
    // SAFETY: the caller's promise.
    unsafe { put_found(device, found) }
}

/// By the bytes of the UUID or its text.
pub(crate) unsafe fn by_uuid_value(uuid: *const nvmlUUID_v1_t, device: *mut nvmlDevice_t) -> R {
    let mut all = Place::all()?.into_iter();
    // SAFETY: null or a structure by the caller's promise.
    let asked = unsafe { uuid.as_ref() }.ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    if asked.version != nvmlUUID_v1 {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let found = match asked.type_ {
        NVML_UUID_TYPE_BINARY => all.find(|place| place.uuid().0 == asked.value[..16]),
        NVML_UUID_TYPE_ASCII => {
            let end = asked.value.iter().position(|byte| *byte == 0);
            let wanted = &asked.value[..end.unwrap_or(asked.value.len())];
            all.find(|place| place.uuid_text().as_bytes().eq_ignore_ascii_case(wanted))
        }
        _ => return Err(NVML_ERROR_INVALID_ARGUMENT),
    };
    // SAFETY: the caller's promise.
    unsafe { put_found(device, found) }
}

fn serial_of(card: u32) -> String {
    format!("15532230{:05}", card + 1)
}

pub(crate) unsafe fn serial(device: nvmlDevice_t, place: *mut c_char, length: u32) -> R {
    let card = Place::of(device)?.card;
    // SAFETY: the caller's promise.
    unsafe { put_text(place, length, &serial_of(card)) }
}

pub(crate) unsafe fn by_serial(serial: *const c_char, device: *mut nvmlDevice_t) -> R {
    let cards = Place::cards()?;
    // SAFETY: the caller's promise.
    let wanted = unsafe { text(serial) }?;
    let found = cards.into_iter().find(|place| serial_of(place.card) == wanted);
    // SAFETY: the caller's promise.
    unsafe { put_found(device, found) }
}

fn bus_id(card: u32) -> String {
    format!("00000000:{:02X}:00.0", FIRST_BUS + card)
}

pub(crate) unsafe fn by_pci(id: *const c_char, device: *mut nvmlDevice_t) -> R {
    let cards = Place::cards()?;
    // SAFETY: the caller's promise.
    let wanted = unsafe { text(id) }?.to_ascii_uppercase();
    // The domain is written with four digits, eight, or not at all.
    let found = cards.into_iter().find(|place| {
        let full = bus_id(place.card);
        wanted == full || wanted == full[4..] || wanted == full[9..]
    });
    // SAFETY: the caller's promise.
    unsafe { put_found(device, found) }
}

/// The mode of a card: cut or not, and cut or not after the next reset.
pub(crate) unsafe fn mig_mode(device: nvmlDevice_t, current: *mut u32, pending: *mut u32) -> R {
    let place = Place::of(device)?;
    if !place.is_cut() {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    // SAFETY: the caller's promise.
    unsafe {
        put(current, 1)?;
        put(pending, 1)
    }
}

pub(crate) unsafe fn most_slices(device: nvmlDevice_t, count: *mut u32) -> R {
    let place = Place::of(device)?;
    let most = if place.is_cut() {
        place.machine.config().mig
    } else {
        0
    };
    // SAFETY: the caller's promise.
    unsafe { put(count, most) }
}

pub(crate) unsafe fn is_slice(device: nvmlDevice_t, answer: *mut u32) -> R {
    let place = Place::of(device)?;
    // SAFETY: the caller's promise.
    unsafe { put(answer, u32::from(place.slice.is_some())) }
}

pub(crate) unsafe fn slice(device: nvmlDevice_t, index: u32, slice: *mut nvmlDevice_t) -> R {
    let place = Place::of(device)?;
    if !place.is_cut() {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    // SAFETY: the caller's promise.
    unsafe { put_found(slice, place.slices().get(index as usize).copied()) }
}

pub(crate) unsafe fn card_of_slice(slice: nvmlDevice_t, device: *mut nvmlDevice_t) -> R {
    let place = Place::of(slice)?;
    if place.slice.is_none() {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    // SAFETY: the caller's promise.
    unsafe { put(device, Place { slice: None, ..place }.handle()) }
}

/// The numbers of a slice: each has an instance of its own, and one of computing in that.
pub(crate) unsafe fn gpu_instance(device: nvmlDevice_t, id: *mut u32) -> R {
    let position = Place::of(device)?.position().ok_or(NVML_ERROR_NOT_SUPPORTED)?;
    // SAFETY: the caller's promise.
    unsafe { put(id, position + 1) }
}

pub(crate) unsafe fn compute_instance(device: nvmlDevice_t, id: *mut u32) -> R {
    Place::of(device)?.position().ok_or(NVML_ERROR_NOT_SUPPORTED)?;
    // SAFETY: the caller's promise.
    unsafe { put(id, 0) }
}

pub(crate) unsafe fn index(device: nvmlDevice_t, place: *mut u32) -> R {
    let found = Place::of(device)?;
    let index = found.position().unwrap_or(found.card);
    // SAFETY: the caller's promise.
    unsafe { put(place, index) }
}

pub(crate) unsafe fn name(device: nvmlDevice_t, place: *mut c_char, length: u32) -> R {
    let name = match Place::of(device)?.slice {
        Some(_) => format!("{} MIG 1g", device_name()),
        None => device_name().into(),
    };
    // SAFETY: the caller's promise.
    unsafe { put_text(place, length, &name) }
}

pub(crate) unsafe fn uuid(device: nvmlDevice_t, place: *mut c_char, length: u32) -> R {
    let text = Place::of(device)?.uuid_text();
    // SAFETY: the caller's promise.
    unsafe { put_text(place, length, &text) }
}

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (place, byte) in out.iter_mut().zip(text.bytes()).take(N - 1) {
        *place = byte as c_char;
    }
    out
}

pub(crate) unsafe fn pci(device: nvmlDevice_t, place: *mut nvmlPciInfo_t) -> R {
    let card = Place::of(device)?.card;
    let id = bus_id(card);
    let info = nvmlPciInfo_t {
        busIdLegacy: chars(&id[4..]),
        bus: FIRST_BUS + card,
        // NVIDIA's vendor number in the low half: tools look at it.
        pciDeviceId: 0x5eb0_10de,
        busId: chars(&id),
        ..nvmlPciInfo_t::ZERO
    };
    // SAFETY: the caller's promise.
    unsafe { put(place, info) }
}

pub(crate) unsafe fn memory(device: nvmlDevice_t, place: *mut nvmlMemory_t) -> R {
    let usage = Place::of(device)?.usage();
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
    let found = Place::of(device)?;
    if place.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: not null, and a structure of this type whose version is set by the caller's promise.
    let version = unsafe { (&raw const (*place).version).read_unaligned() };
    if version != nvmlMemory_v2 {
        return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    let usage = found.usage();
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
    let total = Place::of(device)?.usage().total.next_power_of_two();
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
    make: impl Fn((ProcessUse, u32)) -> T,
) -> R {
    let there = Place::of(device)?;
    if count.is_null() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    let found = there.processes();
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
    let make = |(process, _): (ProcessUse, u32)| nvmlProcessInfo_v1_t {
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
    let make = |(process, instance): (ProcessUse, u32)| nvmlProcessInfo_v2_t {
        pid: process.pid,
        usedGpuMemory: process.bytes,
        gpuInstanceId: instance,
        computeInstanceId: if instance == u32::MAX { instance } else { 0 },
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
