//! The driver's own checkpoint: locking a process's calls, moving its device memory to the host, and back.
//!
//! ```text
//! Running ──lock──> Locked ──checkpoint──> Checkpointed
//!    ^───unlock─────┘  ^──────restore──────────┘
//! ```
//! Memory here is host memory anyway: "moving" takes the link's time, takes the pages away from the process, and gives the bytes back to the
//! ledger. Addresses stay. Other processes are asked through the machine file; a thread of the process asked does it.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ebb_abi::*;
use ebb_simdev::{Direction, Slot};

use crate::R;
use crate::caller::Caller;
use crate::entry;
use crate::memory::managed;
use crate::memory::phys::Phys;
use crate::process::{lock, process};
use crate::stream::spawn;

const LOCK: u32 = 1;
const CHECKPOINT: u32 = 2;
const RESTORE: u32 = 3;
const UNLOCK: u32 = 4;

/// One change of state at a time.
static CHANGING: Mutex<()> = Mutex::new(());
static SERVICE_THREAD: AtomicI32 = AtomicI32::new(0);

/// Starts the thread that serves other processes.
pub(crate) fn start_service() {
    // Without the thread only checkpoints by other processes do not work, and they say so by not answering.
    let _ = spawn("ebb-sim-service", || {
        // SAFETY: gettid has no preconditions.
        SERVICE_THREAD.store(unsafe { libc::gettid() }, Ordering::Release);
        while !entry::is_ready() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let machine = process().machine;
        while let Some(request) = machine.next_request() {
            let result = change(request.code, request.argument);
            machine.answer(request, result.err().map_or(0, |code| code.0));
        }
    });
}

fn change(code: u32, argument: u64) -> R {
    let _changing = lock(&CHANGING);
    let machine = process().machine;
    let slot = machine.own_slot().ok_or(CUresult::ERROR_NOT_INITIALIZED)?;
    let state = CUprocessState(machine.checkpoint_state(slot));
    let expect = |wanted: CUprocessState| {
        if state == wanted {
            Ok(())
        } else {
            Err(CUresult::ERROR_ILLEGAL_STATE)
        }
    };
    let next = match code {
        LOCK => {
            expect(CU_PROCESS_STATE_RUNNING)?;
            lock_calls(argument)?;
            CU_PROCESS_STATE_LOCKED
        }
        CHECKPOINT => {
            expect(CU_PROCESS_STATE_LOCKED)?;
            refuse_what_cannot_move()?;
            move_out();
            CU_PROCESS_STATE_CHECKPOINTED
        }
        RESTORE => {
            expect(CU_PROCESS_STATE_CHECKPOINTED)?;
            move_in()?;
            CU_PROCESS_STATE_LOCKED
        }
        UNLOCK => {
            expect(CU_PROCESS_STATE_LOCKED)?;
            entry::set_locked(false);
            CU_PROCESS_STATE_RUNNING
        }
        _ => return Err(CUresult::ERROR_INVALID_VALUE),
    };
    machine.set_checkpoint_state(next.0);
    Ok(())
}

/// Holds calls back and waits for the work that was submitted. With a timeout, work that does not end lets the calls go on.
fn lock_calls(timeout_ms: u64) -> R {
    entry::set_locked(true);
    let give_up = (timeout_ms > 0).then(|| Instant::now() + Duration::from_millis(timeout_ms));
    for context in process().contexts.all() {
        for stream in context.shared.streams() {
            match give_up {
                None => stream.drain(),
                Some(give_up) => {
                    while !stream.is_idle() {
                        if Instant::now() >= give_up {
                            entry::set_locked(false);
                            return Err(CUresult::ERROR_NOT_READY);
                        }
                        std::thread::sleep(Duration::from_micros(200));
                    }
                }
            }
        }
    }
    Ok(())
}

/// What the driver (580) does not checkpoint: managed memory, memory that two processes know by a legacy
/// handle, and multicast objects. The process stays locked.
fn refuse_what_cannot_move() -> R {
    let shared = |allocation: &crate::memory::Allocation| allocation.shared;
    let blocked = managed::exists()
        || crate::ipc::is_any_open()
        || crate::multicast::exists()
        || process().memory.read().allocations.values().any(shared);
    if blocked {
        Err(CUresult::ERROR_NOT_SUPPORTED)
    } else {
        Ok(())
    }
}

/// All physical memory that the process holds, each once.
fn all_memory() -> Vec<Arc<Phys>> {
    let mut found: Vec<Arc<Phys>> = process()
        .memory
        .read()
        .mappings
        .values()
        .map(|mapping| Arc::clone(&mapping.phys))
        .collect();
    found.extend(
        process()
            .mem_handles
            .all()
            .iter()
            .map(|handle| Arc::clone(&handle.phys)),
    );
    found.extend(crate::graph_memory::idle_memory());
    found.sort_by_key(|phys| phys.id);
    found.dedup_by_key(|phys| phys.id);
    found
}

fn take_link_time(memory: &[Arc<Phys>], direction: Direction) {
    let machine = process().machine;
    for device in process().visible.iter().copied() {
        let bytes = memory
            .iter()
            .filter(|phys| phys.device == Some(device))
            .map(|phys| phys.bytes)
            .sum::<u64>();
        if bytes > 0 {
            machine.wait_link(machine.take_link(device, direction, bytes));
        }
    }
}

fn move_out() {
    let memory = all_memory();
    take_link_time(&memory, Direction::ToHost);
    process().memory.write().hide_all(true);
    for phys in &memory {
        phys.park();
    }
    let machine = process().machine;
    for context in process().contexts.all() {
        machine.credit_context(context.shared.device, context.held_bytes());
    }
}

fn move_in() -> R {
    let memory = all_memory();
    let machine = process().machine;
    let mut contexts = Vec::new();
    let mut failed = false;
    for context in process().contexts.all() {
        let bytes = context.held_bytes();
        if machine.charge_context(context.shared.device, bytes) {
            contexts.push((context.shared.device, bytes));
        } else {
            failed = true;
            break;
        }
    }
    if failed || !memory.iter().all(|phys| phys.unpark()) {
        // All or nothing: what was taken goes back, and the process stays as it was.
        for phys in &memory {
            phys.park();
        }
        for (device, bytes) in contexts {
            machine.credit_context(device, bytes);
        }
        return Err(CUresult::ERROR_OUT_OF_MEMORY);
    }
    take_link_time(&memory, Direction::ToDevice);
    process().memory.read().hide_all(false);
    Ok(())
}

/// Who is meant: this process, or the slot of another.
fn target(pid: i32) -> Result<Option<Slot>, CUresult> {
    let pid = u32::try_from(pid).map_err(|_| CUresult::ERROR_INVALID_VALUE)?;
    if pid == std::process::id() {
        return Ok(None);
    }
    process()
        .machine
        .slot_of(pid)
        .map(Some)
        .ok_or(CUresult::ERROR_INVALID_VALUE)
}

fn run(pid: i32, code: u32, argument: u64) -> R {
    match target(pid)? {
        None => change(code, argument),
        Some(slot) => {
            let timeout = Duration::from_secs(600);
            match process().machine.ask(slot, code, argument, timeout) {
                Some(0) => Ok(()),
                Some(code) => Err(CUresult(code)),
                None => Err(CUresult::ERROR_NOT_READY),
            }
        }
    }
}

pub(crate) fn cuCheckpointProcessLock(c: &Caller, pid: i32, args: *mut CUcheckpointLockArgs) -> R {
    let timeout = if args.is_null() {
        0
    } else {
        u64::from(c.get(args.cast_const())?.timeoutMs)
    };
    run(pid, LOCK, timeout)
}

pub(crate) fn cuCheckpointProcessCheckpoint(
    _: &Caller,
    pid: i32,
    _args: *mut CUcheckpointCheckpointArgs,
) -> R {
    run(pid, CHECKPOINT, 0)
}

pub(crate) fn cuCheckpointProcessRestore(_: &Caller, pid: i32, _args: *mut CUcheckpointRestoreArgs) -> R {
    run(pid, RESTORE, 0)
}

pub(crate) fn cuCheckpointProcessUnlock(_: &Caller, pid: i32, _args: *mut CUcheckpointUnlockArgs) -> R {
    run(pid, UNLOCK, 0)
}

pub(crate) fn cuCheckpointProcessGetState(c: &Caller, pid: i32, state: *mut CUprocessState) -> R {
    let machine = process().machine;
    let slot = match target(pid)? {
        Some(slot) => slot,
        None => machine.own_slot().ok_or(CUresult::ERROR_NOT_INITIALIZED)?,
    };
    c.put(state, CUprocessState(machine.checkpoint_state(slot)))
}

pub(crate) fn cuCheckpointProcessGetRestoreThreadId(c: &Caller, pid: i32, tid: *mut i32) -> R {
    match target(pid)? {
        None => c.put(tid, SERVICE_THREAD.load(Ordering::Acquire)),
        Some(_) => Err(CUresult::ERROR_NOT_SUPPORTED),
    }
}
