//! Legacy interprocess handles of memory: `cuIpcGetMemHandle` and its kin, on memory that the driver would not share.
//!
//! Handles of ours are told from the driver's by their first bytes; the driver's pass. What another process hands out is
//! mapped at one range, as often as it is opened counted, and unmapped when it is closed as often or its context goes.
//!
//! # Locks
//! `OPEN` alone. It is not held while the daemon is asked: a thread that opens what another one is opening waits for it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_cuda::Imported;
use ebb_device::DeviceError;
use ebb_layer_core::{Allocation, Engine, ExternalKind, ShareError, ShareHandle};

use crate::bridge::{self, Running};
use crate::hooks::{capture, imports, share, with};
use crate::symbols::real;

/// Memory of another process that is mapped here.
#[derive(Debug)]
struct Open {
    handle: ShareHandle,
    context: CUcontext,
    hold: u64,
    /// `None` while the first thread that opens it is at it.
    memory: Option<Imported>,
    /// Its allocation: first address and size.
    base: u64,
    size: u64,
    /// The engine's number of its device.
    device: usize,
    /// How often it was opened and not closed. 0: it waits for the end of a capture.
    count: u64,
    number: u64,
}

#[derive(Debug)]
struct Table {
    open: Vec<Open>,
    last: u64,
}

static OPEN: Mutex<Table> = Mutex::new(Table {
    open: Vec::new(),
    last: 0,
});
static CHANGED: Condvar = Condvar::new();

fn table() -> MutexGuard<'static, Table> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The allocation of another process that contains an address.
pub(crate) fn lookup(ptr: u64) -> Option<Allocation> {
    let table = table();
    let open = table
        .open
        .iter()
        .find(|open| open.memory.is_some() && open.count > 0 && ptr.wrapping_sub(open.base) < open.size)?;
    Some(Allocation {
        base: open.base,
        size: open.size,
        device: open.device,
        owner: open.context.0 as u64,
        // Far from those of the pool.
        id: open.number | 1 << 40,
        pool: 0,
    })
}

/// Whether an address lies in memory of another process, or beside it in what came along.
pub(crate) fn contains(ptr: u64) -> bool {
    table().open.iter().any(|open| {
        open.memory
            .as_ref()
            .is_some_and(|memory| ptr.wrapping_sub(memory.base()) < memory.len())
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuIpcGetMemHandle(
    pHandle: *mut CUipcMemHandle,
    dptr: CUdeviceptr,
) -> CUresult {
    if !pHandle.is_null()
        && let Some(handle) = with(|running| {
            running.here()?;
            running.engine.share_handle(dptr.0)
        })
    {
        let handle = CUipcMemHandle {
            reserved: handle.map(|byte| byte as c_char),
        };
        // SAFETY: not null, and the program's place for the answer.
        unsafe { pHandle.write(handle) };
        return CUresult::SUCCESS;
    }
    // Memory of ours that nobody could open: there is no daemon, or one that cannot share.
    share::refuse("cuIpcGetMemHandle", dptr.0, CUresult::ERROR_INVALID_VALUE).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        unsafe { real::cuIpcGetMemHandle(pHandle, dptr) }
    })
}

fn code(error: ShareError) -> CUresult {
    match error {
        ShareError::Own => CUresult::ERROR_INVALID_CONTEXT,
        ShareError::Gone => CUresult::ERROR_INVALID_HANDLE,
        ShareError::Failed => CUresult::ERROR_MAP_FAILED,
    }
}

fn device_code(error: DeviceError) -> CUresult {
    bridge::device_code(error).unwrap_or(CUresult::ERROR_DEINITIALIZED)
}

/// Opens a handle of ours, in the current context.
fn open(running: &'static Running, handle: &ShareHandle, context: CUcontext) -> Result<u64, CUresult> {
    close_what_waits(running);
    let mut table = table();
    loop {
        let known = table
            .open
            .iter_mut()
            .find(|open| open.handle == *handle && open.context == context && open.count > 0);
        match known {
            Some(open) if open.memory.is_some() => {
                open.count += 1;
                return Ok(open.base);
            }
            // Another thread is at it: it comes to an end, one way or the other.
            Some(_) => table = CHANGED.wait(table).unwrap_or_else(PoisonError::into_inner),
            None => break,
        }
    }
    table.last += 1;
    let number = table.last;
    table.open.push(Open {
        handle: *handle,
        context,
        hold: 0,
        memory: None,
        base: 0,
        size: 0,
        device: 0,
        count: 1,
        number,
    });
    drop(table);
    // Whatever becomes of it, those who wait must not wait for ever.
    let under_way = UnderWay(number);
    let opened = import(running, handle);
    let mut table = self::table();
    let result = match opened {
        Ok(new) => {
            let base = new.base;
            if let Some(open) = table.open.iter_mut().find(|open| open.number == number) {
                open.hold = new.hold;
                open.memory = Some(new.memory);
                (open.base, open.size, open.device) = (base, new.size, new.device);
            }
            Ok(base)
        }
        Err(code) => Err(code),
    };
    drop(table);
    drop(under_way);
    result
}

/// Takes an entry that came to nothing away.
struct UnderWay(u64);

impl Drop for UnderWay {
    fn drop(&mut self) {
        table()
            .open
            .retain(|open| open.number != self.0 || open.memory.is_some());
        CHANGED.notify_all();
    }
}

struct New {
    hold: u64,
    memory: Imported,
    base: u64,
    size: u64,
    device: usize,
}

/// Gets the memory and maps it.
fn import(running: &'static Running, handle: &ShareHandle) -> Result<New, CUresult> {
    let here = running.current_device().ok_or(CUresult::ERROR_INVALID_CONTEXT)?;
    let engine = &running.engine;
    let (opening, mut pieces) = engine.open_share(handle).map_err(code)?;
    let mut mapped = || {
        let ordinal = running
            .ordinal_of(opening.device)
            .ok_or(CUresult::ERROR_INVALID_DEVICE)?;
        let device = running
            .attach(ordinal, None)
            .ok_or(CUresult::ERROR_INVALID_DEVICE)?;
        let cuda = running.cuda(device).ok_or(CUresult::ERROR_INVALID_DEVICE)?;
        let mut memory = Imported::reserve(cuda, opening.bytes).map_err(device_code)?;
        let mut count = 0;
        loop {
            for piece in &pieces {
                let fd = piece.fd().ok_or(CUresult::ERROR_MAP_FAILED)?;
                memory.add(fd, piece.len).map_err(device_code)?;
                count += 1;
            }
            if count >= opening.count {
                break;
            }
            pieces = engine.more_of_share(handle, &opening, count).map_err(code)?;
        }
        memory.give_access(&[here]).map_err(device_code)?;
        Ok((memory, device))
    };
    match mapped() {
        Ok((memory, device)) => {
            engine.share_is_open(&opening, device);
            // Named, not charged: another process is.
            let _ = running.reserve(device, ExternalKind::Ipc, opening.bytes);
            Ok(New {
                hold: opening.hold,
                base: memory.base() + opening.offset,
                memory,
                size: opening.size,
                device,
            })
        }
        Err(code) => {
            engine.close_share(opening.hold);
            engine.note(&format!(
                "memory of another process could not be mapped: {code:?}"
            ));
            Err(code)
        }
    }
}

/// Unmaps, and says that it is closed.
fn close(running: &Running, open: Open) -> Result<(), DeviceError> {
    let Some(memory) = open.memory else { return Ok(()) };
    let bytes = memory.len();
    let closed = memory.close();
    if let Err(error) = closed {
        running
            .engine
            .note(&format!("memory of another process stays mapped: {error}"));
    }
    running.engine.close_share(open.hold);
    running.release(open.device, ExternalKind::Ipc, bytes);
    closed
}

/// What was closed while a stream was captured.
fn close_what_waits(running: &Running) {
    let waits = |open: &Open| open.count == 0;
    if !table().open.iter().any(waits) {
        return;
    }
    let devices: Vec<usize> = table()
        .open
        .iter()
        .filter(|open| waits(open))
        .map(|open| open.device)
        .collect();
    for device in devices {
        if let Some(Ok(())) = capture::without_captures(|| running.quiesce(device)) {
            let ready: Vec<Open> = table()
                .open
                .extract_if(.., |open| waits(open) && open.device == device)
                .collect();
            for open in ready {
                let _ = close(running, open);
            }
        }
    }
}

/// A context is gone or about to go, and with it what was opened in it.
pub(crate) fn context_goes(running: &Running, context: CUcontext) {
    let gone: Vec<Open> = table()
        .open
        .extract_if(.., |open| open.context == context && open.memory.is_some())
        .collect();
    for open in gone {
        let _ = close(running, open);
    }
}

fn ours(handle: &CUipcMemHandle) -> Option<ShareHandle> {
    let bytes: ShareHandle = handle.reserved.map(|byte| byte as u8);
    Engine::is_share_handle(&bytes).then_some(bytes)
}

/// Opens a handle if it is one of ours.
///
/// # Safety
/// `pdptr` is null or valid.
unsafe fn open_ours(pdptr: *mut CUdeviceptr, handle: &CUipcMemHandle, flags: u32) -> Option<CUresult> {
    let handle = ours(handle)?;
    let result = with(|running| {
        if pdptr.is_null() || flags & !CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.0 != 0 {
            return Some(Err(CUresult::ERROR_INVALID_VALUE));
        }
        let Some(context) = running.current_context() else {
            return Some(Err(CUresult::ERROR_INVALID_CONTEXT));
        };
        Some(open(running, &handle, context))
    })?;
    Some(match result {
        Ok(base) => {
            // SAFETY: not null, and the program's place for the answer.
            unsafe { pdptr.write(CUdeviceptr(base)) };
            CUresult::SUCCESS
        }
        Err(code) => code,
    })
}

macro_rules! open_handle {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(
            pdptr: *mut CUdeviceptr,
            handle: CUipcMemHandle,
            Flags: u32,
        ) -> CUresult {
            // SAFETY: the program's own arguments.
            match unsafe { open_ours(pdptr, &handle, Flags) } {
                Some(code) => code,
                None => {
                    // SAFETY: the program's own call.
                    let result = unsafe { real::$name(pdptr, handle, Flags) };
                    if result.is_success() {
                        with(|_| {
                            // SAFETY: the driver has just written it.
                            imports::opened(unsafe { pdptr.read() });
                            Some(())
                        });
                    }
                    result
                }
            }
        }
    )*};
}
open_handle! { cuIpcOpenMemHandle cuIpcOpenMemHandle_v2 }

/// Closes what was opened at an address; `None` if nothing of ours was.
fn close_at(running: &Running, ptr: u64) -> Option<CUresult> {
    close_what_waits(running);
    let device = {
        let mut table = table();
        let open = table
            .open
            .iter_mut()
            .find(|open| open.memory.is_some() && open.count > 0 && open.base == ptr)?;
        if open.count > 1 {
            open.count -= 1;
            return Some(CUresult::SUCCESS);
        }
        open.device
    };
    // Closing waits for work, as in the driver: what runs may still use it.
    let waited = capture::without_captures(|| {
        let here = running.here().map(|(index, _)| index);
        let also = here.filter(|here| *here != device);
        running
            .quiesce(device)
            .and_then(|()| also.map_or(Ok(()), |also| running.quiesce(also)))
    });
    if let Some(Err(error)) = waited {
        return bridge::device_code(error);
    }
    let mut table = table();
    let at = table
        .open
        .iter()
        .position(|open| open.memory.is_some() && open.count > 0 && open.base == ptr);
    let Some(at) = at else {
        // Another thread was faster.
        return Some(CUresult::ERROR_INVALID_VALUE);
    };
    table.open[at].count -= 1;
    if table.open[at].count > 0 || waited.is_none() {
        // Opened again meanwhile; or a stream is captured, and nobody may wait now: the next call closes it.
        return Some(CUresult::SUCCESS);
    }
    let open = table.open.swap_remove(at);
    drop(table);
    match close(running, open) {
        Ok(()) => Some(CUresult::SUCCESS),
        Err(error) => bridge::device_code(error),
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuIpcCloseMemHandle(dptr: CUdeviceptr) -> CUresult {
    with(|running| close_at(running, dptr.0)).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        let result = unsafe { real::cuIpcCloseMemHandle(dptr) };
        if result.is_success() {
            imports::closed(dptr);
        }
        result
    })
}

/// In the child of a fork: what the parent has open is not ours.
pub(crate) fn forget_in_child() {
    if let Ok(mut table) = OPEN.try_lock() {
        for open in table.open.drain(..) {
            // Nothing of it is unmapped: the driver is not used in a child.
            core::mem::forget(open);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_of_the_driver_are_not_ours() {
        let mut handle = CUipcMemHandle {
            reserved: [7; CU_IPC_HANDLE_SIZE],
        };
        assert_eq!(ours(&handle), None);
        for (place, byte) in handle.reserved.iter_mut().zip(*b"ebb-ipc1") {
            *place = byte as c_char;
        }
        assert_eq!(ours(&handle).map(|bytes| bytes[8]), Some(7));
        // SAFETY: a null place, which is looked at before it is used.
        let nobody = unsafe { open_ours(core::ptr::null_mut(), &handle, 0) };
        assert_eq!(nobody, None, "without an engine the driver answers");
    }

    #[test]
    fn errors_are_the_drivers() {
        assert_eq!(code(ShareError::Own), CUresult(201));
        assert_eq!(code(ShareError::Gone), CUresult(400));
        assert_eq!(code(ShareError::Failed), CUresult(205));
    }
}
