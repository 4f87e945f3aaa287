//! The process lists that `nvidia-smi` shows: it reads them through a private table of functions, not through the public calls.
//!
//! A table is known by its identity and by its size, and only those that were looked at are touched: the program then gets a copy in which the
//! lists are ours. Another driver's table, or a list with anything unexpected in it, passes as it is.

use core::sync::atomic::{AtomicPtr, Ordering};

use ebb_abi::nvml::*;

use super::{real, world};
use crate::barrier;

type List = unsafe extern "C-unwind" fn(
    device: nvmlDevice_t,
    count: *mut u32,
    place: *mut PrivateProcess,
) -> nvmlReturn_t;

/// The driver's table and the one that the program has instead; made once, never changed, never freed.
struct Copy {
    original: *const usize,
    words: Box<[usize]>,
}

static COPY: AtomicPtr<Copy> = AtomicPtr::new(core::ptr::null_mut());

/// # Safety
/// As NVML's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn nvmlInternalGetExportTable(
    table: *mut *const usize,
    id: *const [u8; 16],
) -> nvmlReturn_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::nvmlInternalGetExportTable(table, id) };
    // SAFETY: NVML has just read the identity.
    if !result.is_success() || table.is_null() || id.is_null() || unsafe { id.read() } != PRIVATE_TABLE {
        return result;
    }
    // SAFETY: NVML has just written the table's address, or left what the program had there.
    let original = unsafe { table.read() };
    if !world::in_task() {
        return result;
    }
    // SAFETY: the table of that identity lives as long as the library.
    if let Some(copy) = barrier::run(|| unsafe { copy_of(original) }).flatten() {
        // SAFETY: the program's place, which NVML has written before.
        unsafe { table.write(copy.words.as_ptr()) };
    }
    result
}

/// The copy of a table, if it is one that is known.
///
/// # Safety
/// `original` is null or a table whose first word is its size in bytes.
unsafe fn copy_of(original: *const usize) -> Option<&'static Copy> {
    // SAFETY: null or a table by the caller's promise.
    if original.is_null() || unsafe { original.read() } != PRIVATE_TABLE_SIZE {
        return None;
    }
    // SAFETY: null, or leaked once and never changed.
    let mut known = unsafe { COPY.load(Ordering::Acquire).as_ref() };
    if known.is_none() {
        // SAFETY: as many bytes as its first word says.
        let words = unsafe { core::slice::from_raw_parts(original, PRIVATE_TABLE_SIZE / size_of::<usize>()) };
        let mut words: Box<[usize]> = words.into();
        let ours: [List; 3] = [compute, graphics, mps];
        for (at, list) in PRIVATE_LISTS.into_iter().zip(ours) {
            if words[at] != 0 {
                words[at] = list as usize;
            }
        }
        // No lock: a child of a fork may come here while another thread of its parent did.
        let mine = Box::into_raw(Box::new(Copy { original, words }));
        if COPY
            .compare_exchange(core::ptr::null_mut(), mine, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            // SAFETY: made by `into_raw` above and not published.
            drop(unsafe { Box::from_raw(mine) });
        }
        // SAFETY: published above, by this thread or by another one.
        known = unsafe { COPY.load(Ordering::Acquire).as_ref() };
    }
    // A second copy of the library has a table of its own.
    known.filter(|copy| copy.original == original)
}

/// The driver's list, and of its entries the task's.
///
/// # Safety
/// As the function that stands at this place of the driver's table.
unsafe fn list(
    which: usize,
    device: nvmlDevice_t,
    count: *mut u32,
    place: *mut PrivateProcess,
) -> nvmlReturn_t {
    // SAFETY: null, or leaked once and never changed.
    let Some(copy) = (unsafe { COPY.load(Ordering::Acquire).as_ref() }) else {
        return NVML_ERROR_UNKNOWN;
    };
    // SAFETY: a known table has the list's function at this place; it was not null when ours took its place.
    let real: List = unsafe { core::mem::transmute(copy.original.add(PRIVATE_LISTS[which]).read()) };
    // SAFETY: the program's own call.
    let result = unsafe { real(device, count, place) };
    if !result.is_success() || count.is_null() || place.is_null() {
        return result;
    }
    // SAFETY: the driver has just written the count, and so many entries.
    let entries = unsafe { core::slice::from_raw_parts_mut(place, count.read() as usize) };
    if !entries.iter().all(is_plausible) {
        return result;
    }
    let Some(processes) = world::processes(device) else {
        return result;
    };
    let kept = barrier::run(|| keep(entries, &processes)).unwrap_or(entries.len());
    // SAFETY: the program's place, written before.
    unsafe { count.write(kept as u32) };
    result
}

/// Whether this is what the driver that was looked at writes.
fn is_plausible(entry: &PrivateProcess) -> bool {
    /// No Linux gives a process a larger number.
    const MOST: u32 = 1 << 22;
    (1..=MOST).contains(&entry.process.pid) && entry.name.contains(&0)
}

/// Keeps the task's processes at the front, by the numbers and with the bytes that they have here; how many they are.
fn keep(entries: &mut [PrivateProcess], processes: &[ebb_layer_core::world::WorldProcess]) -> usize {
    let mut kept = 0;
    for index in 0..entries.len() {
        let seen = entries[index].process.pid;
        let Some(known) = processes.iter().find(|process| process.seen_pid == seen) else {
            continue;
        };
        entries.copy_within(index..=index, kept);
        entries[kept].process.pid = known.pid;
        entries[kept].process.usedGpuMemory = known.bytes.0;
        kept += 1;
    }
    kept
}

macro_rules! lists {
    ($($name:ident $which:literal;)*) => {$(
        unsafe extern "C-unwind" fn $name(
            device: nvmlDevice_t,
            count: *mut u32,
            place: *mut PrivateProcess,
        ) -> nvmlReturn_t {
            // SAFETY: the program's own call, as the driver's table promises.
            unsafe { list($which, device, count, place) }
        }
    )*};
}
lists! {
    compute 0;
    graphics 1;
    mps 2;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_layer_core::world::WorldProcess;
    use ebb_units::Bytes;

    fn entry(pid: u32, name: &[u8]) -> PrivateProcess {
        let mut entry = PrivateProcess {
            process: nvmlProcessDetail_v1_t {
                pid,
                usedGpuMemory: 1 << 30,
                ..nvmlProcessDetail_v1_t::default()
            },
            name: [0; 4096],
        };
        entry.name[..name.len()].copy_from_slice(name);
        entry
    }

    #[test]
    fn the_tasks_processes_are_kept_with_their_names() {
        let mut entries = [entry(70, b"other"), entry(71, b"one"), entry(72, b"two")];
        let known = |pid, seen_pid, bytes| WorldProcess {
            pid,
            seen_pid,
            bytes: Bytes(bytes),
        };
        let kept = keep(&mut entries, &[known(2, 72, 5), known(1, 71, 4), known(3, 99, 6)]);
        let seen: Vec<_> = entries[..kept]
            .iter()
            .map(|entry| (entry.process.pid, entry.process.usedGpuMemory, &entry.name[..4]))
            .collect();
        assert_eq!(seen, [(1, 4, &b"one\0"[..]), (2, 5, &b"two\0"[..])]);
    }

    #[test]
    fn what_is_not_a_process_is_not_touched() {
        assert!(is_plausible(&entry(1, b"init")));
        assert!(!is_plausible(&entry(0, b"zero")));
        assert!(!is_plausible(&entry(u32::MAX, b"none")));
        assert!(!is_plausible(&entry(1, &[b'x'; 4096])));
    }

    #[test]
    fn a_table_of_another_size_passes() {
        let table = [PRIVATE_TABLE_SIZE + 8, 1, 2];
        // SAFETY: a table of our own, of which only the first word is read.
        assert!(unsafe { copy_of(table.as_ptr()) }.is_none());
        // SAFETY: null is allowed.
        assert!(unsafe { copy_of(core::ptr::null()) }.is_none());
    }

    #[test]
    fn an_entry_is_as_large_as_the_drivers() {
        assert_eq!(size_of::<PrivateProcess>(), 4128);
    }
}
