//! Which card a handle is, and what the program's task has there.

use core::ffi::{CStr, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use ebb_abi::nvml::*;
use ebb_layer_core::Config;
use ebb_layer_core::host::MmapHost;
use ebb_layer_core::world::{Seen, World, WorldProcess, ask, held};
use ebb_units::DeviceUuid;

use super::processes::slice_of;
use super::real;
use crate::hooks::with_books;
use crate::{barrier, bridge};

/// Which card a handle of NVML is: that of the whole card or of a slice of it (MIG).
pub(super) fn uuid_of(device: nvmlDevice_t) -> Option<DeviceUuid> {
    let mut text = [0 as c_char; NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    // SAFETY: a place of the length that is given along.
    let known = unsafe { real::nvmlDeviceGetUUID(device, text.as_mut_ptr(), text.len() as u32) };
    if !known.is_success() {
        return None;
    }
    let bytes = text.map(|byte| byte.cast_unsigned());
    let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_str().ok()?;
    text.strip_prefix("MIG-").unwrap_or(text).parse().ok()
}

/// What a process without an engine knows of its task: where the daemon is and which task it belongs to.
fn settings() -> &'static Config {
    static SETTINGS: AtomicPtr<Config> = AtomicPtr::new(core::ptr::null_mut());
    // SAFETY: null, or a leaked box that is stored once and never changes.
    if let Some(known) = unsafe { SETTINGS.load(Ordering::Acquire).as_ref() } {
        return known;
    }
    // No lock: a child of a fork may come here while another thread of its parent did.
    let mine = Box::into_raw(Box::new(Config::from_env(Arc::new(MmapHost))));
    match SETTINGS.compare_exchange(core::ptr::null_mut(), mine, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, published, and leaked.
        Ok(_) => unsafe { &*mine },
        Err(known) => {
            // SAFETY: made by `into_raw` above and not published.
            drop(unsafe { Box::from_raw(mine) });
            // SAFETY: not null, because the exchange failed; leaked by who published it.
            unsafe { &*known }
        }
    }
}

/// Whether `ebb run` started this program, or it is managed by a daemon all the same.
pub(super) fn in_task() -> bool {
    if barrier::is_off() {
        return false;
    }
    let served = || bridge::running().is_some_and(|running| running.engine.may_be_served());
    barrier::run(|| settings().token != [0; 32] || served()).unwrap_or(false)
}

/// What this process has on a card, by what the daemon sees.
pub(super) fn held_here(card: DeviceUuid) -> Seen {
    let served = bridge::running().is_some_and(|running| running.engine.daemon_sees_processes());
    if !served || barrier::is_off() {
        return Seen::Unseen;
    }
    barrier::run(|| held(settings(), card)).unwrap_or(Seen::Unseen)
}

/// What the task has on a card. `None`: no task, or no daemon to ask.
pub(super) fn world(device: nvmlDevice_t) -> Option<World> {
    if !in_task() {
        return None;
    }
    barrier::run(|| ask(settings(), uuid_of(device)?)).flatten()
}

/// Free and total of a card of the task, as `cuMemGetInfo` tells them.
pub(super) fn memory(device: nvmlDevice_t, free: u64, total: u64) -> Option<(u64, u64)> {
    let managed = with_books(|running| {
        let device = running.by_uuid(uuid_of(device)?)?;
        let (free, total) = running.mem_info(device.index?, free, total);
        Some((free.min(total), total))
    });
    // A card that is cut has what its slices have.
    if managed.is_none()
        && let Some(slices) = slices(device)
    {
        let used = slices
            .into_iter()
            .map(|slice| world(slice).map(|world| world.charged.0));
        let used: Option<u64> = used.sum();
        return used.map(|used| (total.saturating_sub(used), total));
    }
    managed.or_else(|| {
        let world = world(device)?;
        let total = world.limit.map_or(total, |limit| limit.0.min(total));
        Some((total.saturating_sub(world.charged.0), total))
    })
}

/// What a card is cut into (MIG); `None` if it is whole, or a slice itself. Asked only in tasks.
fn slices(device: nvmlDevice_t) -> Option<Vec<nvmlDevice_t>> {
    if !in_task() {
        return None;
    }
    let (mut cut, mut pending, mut count) = (0, 0, 0);
    // SAFETY: places of our own.
    let known = unsafe { real::nvmlDeviceGetMigMode(device, &raw mut cut, &raw mut pending) };
    if !known.is_success() || cut == 0 {
        return None;
    }
    // SAFETY: as above.
    let known = unsafe { real::nvmlDeviceGetMaxMigDeviceCount(device, &raw mut count) };
    if !known.is_success() {
        return None;
    }
    let slices = (0..count.min(64)).filter_map(|index| {
        let mut slice = nvmlDevice_t(0);
        // SAFETY: a place of our own. Not every number has a slice.
        unsafe { real::nvmlDeviceGetMigDeviceHandleByIndex(device, index, &raw mut slice) }
            .is_success()
            .then_some(slice)
    });
    Some(slices.collect())
}

/// The task's processes on a card, each with the slice of it where it is. `None` if the driver's answer should stand.
pub(super) fn placed(device: nvmlDevice_t) -> Option<Vec<(WorldProcess, (u32, u32))>> {
    let here = |device| {
        let slice = slice_of(device);
        let list = processes(device)?.into_iter();
        Some(list.map(move |process| (process, slice)).collect::<Vec<_>>())
    };
    match slices(device) {
        None => here(device),
        Some(slices) => {
            let lists: Option<Vec<_>> = slices.into_iter().map(here).collect();
            Some(lists?.into_iter().flatten().collect())
        }
    }
}

/// The task's processes on a card. `None` if the driver's answer should stand.
pub(super) fn processes(device: nvmlDevice_t) -> Option<Vec<WorldProcess>> {
    let mut found = world(device)?.processes;
    let own = with_books(|running| {
        let known = running.by_uuid(uuid_of(device)?)?;
        running.engine.own_charge(known.index?)
    });
    if let Some(bytes) = own {
        let pid = std::process::id();
        // It may have told nobody yet.
        if !bytes.is_zero() && !found.iter().any(|process| process.pid == pid) {
            found.push(WorldProcess {
                pid,
                seen_pid: pid,
                bytes,
            });
        }
    }
    Some(found)
}
