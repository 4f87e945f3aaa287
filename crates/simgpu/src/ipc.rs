//! Legacy interprocess handles: memory and events of another process, named in 64 bytes.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ebb_abi::*;
use ebb_simdev::EventCell;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::event::Event;
use crate::handles::fresh;
use crate::memory::phys::{Phys, fresh_buffer_id};
use crate::memory::{Allocation, Kind, READ_WRITE, alloc};
use crate::process::{lock, process};

const MEMORY_MAGIC: u64 = 0x4942_4245_4d45_4d31;
const EVENT_MAGIC: u64 = 0x4942_4245_4556_4e31;

/// An event in the machine file.
#[derive(Debug)]
pub(crate) struct SharedEvent(Arc<EventCell>);

/// A record of a shared event that somebody waits for.
#[derive(Debug, Clone)]
pub(crate) struct SharedPoint {
    cell: Arc<EventCell>,
    number: u64,
}

impl SharedEvent {
    pub(crate) fn create() -> Result<Arc<Self>, CUresult> {
        process()
            .machine
            .create_event()
            .map(|cell| Arc::new(Self(cell)))
            .ok_or(CUresult::ERROR_OUT_OF_MEMORY)
    }

    pub(crate) fn begin(&self) -> u64 {
        self.0.begin()
    }

    pub(crate) fn complete(&self, number: u64) {
        self.0.complete(number);
    }

    /// The latest record.
    pub(crate) fn point(&self) -> SharedPoint {
        SharedPoint {
            cell: Arc::clone(&self.0),
            number: self.0.latest(),
        }
    }
}

impl SharedPoint {
    pub(crate) fn is_reached(&self) -> bool {
        self.cell.is_reached(self.number)
    }

    pub(crate) fn wait(&self) {
        while !self.is_reached() {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// A handle's bytes as numbers.
fn pack(words: [u64; 8]) -> [c_char; CU_IPC_HANDLE_SIZE] {
    let mut bytes = [0; CU_IPC_HANDLE_SIZE];
    for (place, byte) in bytes
        .iter_mut()
        .zip(words.iter().flat_map(|word| word.to_le_bytes()))
    {
        *place = byte as c_char;
    }
    bytes
}

fn unpack(bytes: &[c_char; CU_IPC_HANDLE_SIZE]) -> [u64; 8] {
    std::array::from_fn(|index| u64::from_le_bytes(std::array::from_fn(|byte| bytes[index * 8 + byte] as u8)))
}

pub(crate) fn cuIpcGetMemHandle(c: &Caller, pHandle: *mut CUipcMemHandle, dptr: CUdeviceptr) -> R {
    context::current()?;
    let mut tables = process().memory.write();
    let (base, allocation) = tables
        .allocation_at(dptr.0)
        .filter(|(_, allocation)| matches!(allocation.kind, Kind::Legacy { .. }))
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let id = allocation.buffer_id;
    let (block, mapping) = tables.mapping_at(base).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    let (fd, offset) = mapping.phys.pages();
    let device = mapping.phys.device.unwrap_or(0);
    let words = [
        MEMORY_MAGIC,
        u64::from(std::process::id()),
        fd as u64,
        offset,
        mapping.size,
        base - block,
        u64::from(device),
        // New memory at an old address is another handle.
        id,
    ];
    c.put(
        pHandle,
        CUipcMemHandle {
            reserved: pack(words),
        },
    )?;
    if let Some(allocation) = tables.allocations.get_mut(&base) {
        allocation.shared = true;
    }
    Ok(())
}

/// A handle that is open in a context: opening it again counts.
#[derive(Debug)]
struct Opened {
    words: [u64; 8],
    context: usize,
    /// Where its block is mapped.
    base: u64,
    address: u64,
    count: u64,
}

static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

/// Whether memory of another process is open here.
pub(crate) fn is_any_open() -> bool {
    !lock(&OPENED).is_empty()
}

/// What a context that ends had open is closed.
pub(crate) fn free_context(context: usize) {
    let gone: Vec<u64> = {
        let mut opened = lock(&OPENED);
        let gone = opened
            .iter()
            .filter(|it| it.context == context)
            .map(|it| it.base)
            .collect();
        opened.retain(|it| it.context != context);
        gone
    };
    gone.into_iter().for_each(forget);
}

fn forget(base: u64) {
    process().memory.write().allocations.remove(&base);
    alloc::unmap_block(base);
}

pub(crate) fn cuIpcOpenMemHandle_v2(
    c: &Caller,
    pdptr: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    Flags: u32,
) -> R {
    let context = context::current()?;
    if pdptr.is_null() || Flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    context.shared.check()?;
    let words = unpack(&handle.reserved);
    let [magic, pid, fd, offset, size, inner, device, _] = words;
    if magic != MEMORY_MAGIC || inner >= size {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    if pid == u64::from(std::process::id()) {
        return Err(CUresult::ERROR_INVALID_CONTEXT);
    }
    let mut opened = lock(&OPENED);
    let here = context.shared.handle;
    if let Some(known) = opened
        .iter_mut()
        .find(|it| it.words == words && it.context == here)
    {
        known.count += 1;
        return c.put(pdptr, CUdeviceptr(known.address));
    }
    let process = process();
    let device = u32::try_from(device)
        .ok()
        .filter(|device| process.ordinal(*device).is_some());
    let device = device.ok_or(CUresult::ERROR_INVALID_DEVICE)?;
    // A handle of a process that is gone, or of something that is not device memory, opens nothing.
    let path = format!("/proc/{pid}/fd/{fd}");
    let named = std::fs::read_link(&path).is_ok_and(|name| name.to_string_lossy().contains("ebb-sim-memory"));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(&path)
        .ok()
        .filter(|_| named)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let phys = Phys::foreign(process.machine, process.arena, file.into(), offset, device, size);
    let mut access = vec![(device, READ_WRITE)];
    if context.shared.device != device {
        access.push((context.shared.device, READ_WRITE));
    }
    let base = alloc::map_phys(phys, access)?;
    let allocation = Allocation {
        size,
        kind: Kind::Imported,
        context: here,
        buffer_id: fresh_buffer_id(),
        shared: false,
    };
    process.memory.write().allocations.insert(base, allocation);
    let address = base + inner;
    opened.push(Opened {
        words,
        context: here,
        base,
        address,
        count: 1,
    });
    c.put(pdptr, CUdeviceptr(address))
}

pub(crate) fn cuIpcCloseMemHandle(_: &Caller, dptr: CUdeviceptr) -> R {
    let context = context::current()?;
    let base = {
        let mut opened = lock(&OPENED);
        let index = opened
            .iter()
            .position(|it| it.address == dptr.0)
            .ok_or(CUresult::ERROR_INVALID_VALUE)?;
        opened[index].count -= 1;
        if opened[index].count > 0 {
            return Ok(());
        }
        opened.swap_remove(index).base
    };
    context.shared.drain();
    forget(base);
    Ok(())
}

pub(crate) fn cuIpcGetEventHandle(c: &Caller, pHandle: *mut CUipcEventHandle, event: CUevent) -> R {
    let event = process()
        .events
        .get(event.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let shared = event.shared.as_ref().ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let (index, generation) = shared.0.name();
    let pid = u64::from(std::process::id());
    let words = [
        EVENT_MAGIC,
        u64::from(index),
        u64::from(generation),
        pid,
        0,
        0,
        0,
        0,
    ];
    c.put(
        pHandle,
        CUipcEventHandle {
            reserved: pack(words),
        },
    )
}

pub(crate) fn cuIpcOpenEventHandle(c: &Caller, phEvent: *mut CUevent, handle: CUipcEventHandle) -> R {
    let context = context::current()?;
    let [magic, index, generation, pid, ..] = unpack(&handle.reserved);
    if magic != EVENT_MAGIC || phEvent.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    if pid == u64::from(std::process::id()) {
        return Err(CUresult::ERROR_INVALID_CONTEXT);
    }
    let cell = process()
        .machine
        .open_event(index as u32, generation as u32)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let handle = fresh();
    let flags = CU_EVENT_DISABLE_TIMING.0 | CU_EVENT_INTERPROCESS.0;
    let event = Event::new(context.shared.handle, flags, Some(Arc::new(SharedEvent(cell))));
    process().events.insert(handle, event);
    c.put(phEvent, CUevent(handle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_keep_their_words() {
        let words = [1, u64::MAX, 3, 4, 5, 6, 7, 8];
        assert_eq!(unpack(&pack(words)), words);
    }
}
