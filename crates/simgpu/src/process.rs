//! The process's side of the driver: everything that `cuInit` sets up.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ebb_abi::CUresult;
use ebb_simdev::{Machine, visible_devices, visible_slice};

use crate::R;
use crate::caller::Caller;
use crate::context::Context;
use crate::entry;
use crate::event::Event;
use crate::graph::{Exec, Graph};
use crate::handles::Table;
use crate::memory::Memory;
use crate::memory::phys::{Arena, Phys, abandon_objects_after_fork};
use crate::module::{Function, Library, Module};
use crate::multicast::Multicast;
use crate::pool::Pool;
use crate::stream::Stream;

/// A device as this process sees it.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    /// The primary context while it exists, and how often it is retained.
    pub(crate) context: Option<Arc<Context>>,
    pub(crate) retained: u32,
    pub(crate) flags: u32,
}

/// A handle of `cuMemCreate`: the memory, and how many times the handle must be released.
#[derive(Debug)]
pub(crate) struct MemHandle {
    pub(crate) phys: Arc<Phys>,
    /// Set if it is a multicast object.
    pub(crate) multicast: Option<Multicast>,
    pub(crate) references: Mutex<u32>,
}

/// All state of the driver in this process. Made once, never undone.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) machine: &'static Machine,
    pub(crate) arena: &'static Arena,
    /// Physical indices in the order of the process's ordinals.
    pub(crate) visible: Vec<u32>,
    pub(crate) memory: Memory,
    pub(crate) primaries: Vec<Mutex<Primary>>,
    pub(crate) contexts: Table<Context>,
    pub(crate) streams: Table<Stream>,
    pub(crate) events: Table<Event>,
    pub(crate) modules: Table<Module>,
    pub(crate) libraries: Table<Library>,
    pub(crate) functions: Table<Function>,
    pub(crate) graphs: Table<Graph>,
    pub(crate) execs: Table<Exec>,
    pub(crate) pools: Table<Pool>,
    pub(crate) mem_handles: Table<MemHandle>,
    /// The default pool of each device, of the host and of its one node; and the pool that allocations without one use (a handle).
    pub(crate) device_pools: Vec<Mutex<(Option<Arc<Pool>>, usize)>>,
}

static PROCESS: OnceLock<Process> = OnceLock::new();
static INIT: Mutex<()> = Mutex::new(());

/// The process's state. Only called behind the gate, which opens after `cuInit`.
#[expect(
    clippy::expect_used,
    reason = "the gate opens after cuInit has set it; a panic ends at the barrier"
)]
pub(crate) fn process() -> &'static Process {
    PROCESS.get().expect("the gate is open only after cuInit")
}

/// Locks, whatever became of a thread that held the lock: the data are plain values that are whole between calls.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// The physical index of an ordinal.
    pub(crate) fn physical(&self, ordinal: i32) -> Result<u32, CUresult> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|index| self.visible.get(index).copied())
            .ok_or(CUresult::ERROR_INVALID_DEVICE)
    }

    /// The ordinal of a physical index, if the process sees it.
    pub(crate) fn ordinal(&self, physical: u32) -> Option<i32> {
        self.visible
            .iter()
            .position(|index| *index == physical)
            .and_then(|index| i32::try_from(index).ok())
    }
}

/// `cuInit`.
pub(crate) fn cuInit(_: &Caller, flags: u32) -> R {
    if flags != 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let _once = lock(&INIT);
    if entry::is_ready() {
        return Ok(());
    }
    let (machine, arena, memory) = open().map_err(|message| {
        // Not a call that fails by itself, but a simulation that cannot work: the one who set it up must see why.
        eprintln!("ebb simulated GPU: {message}");
        CUresult::ERROR_OPERATING_SYSTEM
    })?;
    let mask = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let visible = match machine.config() {
        cut if cut.mig > 0 => visible_slice(mask.as_deref(), cut),
        whole => visible_devices(mask.as_deref(), whole.devices),
    };
    if visible.is_empty() {
        return Err(CUresult::ERROR_NO_DEVICE);
    }
    machine.attach().map_err(|error| {
        eprintln!("ebb simulated GPU: {error}");
        CUresult::ERROR_OPERATING_SYSTEM
    })?;
    let devices = visible.len();
    let process = Process {
        machine,
        arena,
        visible,
        memory,
        primaries: (0..devices).map(|_| Mutex::default()).collect(),
        contexts: Table::default(),
        streams: Table::default(),
        events: Table::default(),
        modules: Table::default(),
        libraries: Table::default(),
        functions: Table::default(),
        graphs: Table::default(),
        execs: Table::default(),
        pools: Table::default(),
        mem_handles: Table::default(),
        device_pools: (0..devices + 2).map(|_| Mutex::default()).collect(),
    };
    if PROCESS.set(process).is_err() {
        return Err(CUresult::ERROR_UNKNOWN);
    }
    // SAFETY: the handler has the right type and lives as long as the library, which is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_forked_child)) };
    crate::checkpoint::start_service();
    entry::set_ready();
    Ok(())
}

fn open() -> Result<(&'static Machine, &'static Arena, Memory), String> {
    let machine = Machine::open_from_env().map_err(|error| error.to_string())?;
    let arena = Arena::new().map_err(|error| format!("no memory file: {error}"))?;
    let memory = Memory::new().map_err(|error| format!("no address space for devices: {error}"))?;
    Ok((Box::leak(Box::new(machine)), Box::leak(Box::new(arena)), memory))
}

/// Runs in a child right after the fork, when only this thread exists: closes what would keep the parent's memory alive.
extern "C" fn in_forked_child() {
    entry::set_forked();
    abandon_objects_after_fork();
    if let Some(process) = PROCESS.get() {
        process.machine.abandon_after_fork();
        // SAFETY: closing is all that happens to this descriptor in the child, where every later call is turned away. The
        // number is not reused by us; the owner of the value never runs its destructor.
        unsafe { libc::close(process.arena.fd()) };
    }
}
