//! Between the hooks and the engine: when it starts, which devices it manages, and which driver code an answer is.
//!
//! Nothing else in this crate knows the engine's types beyond passing them on.
//!
//! # Locks
//! `Running::attaching`, then `Running::devices`. Neither is held across a call into the engine that may wait for memory;
//! `attaching` is held while a device is attached (driver calls, one message), so that two threads do not attach it twice.

use core::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ebb_abi::{CU_MEM_LOCATION_TYPE_DEVICE, CUcontext, CUdevice, CUmemLocation, CUresult};
use ebb_cuda::{CudaDevice, DeviceFacts, DriverTable};
use ebb_device::{DeviceError, DeviceMemory, Grant, Location};
use ebb_layer_core::host::MmapHost;
use ebb_layer_core::{
    AllocError, Allocation, Config, DeviceSet, Engine, ExternalKind, Fences, FreeError, MemInfo, TouchError,
};
use ebb_units::{Bytes, DeviceUuid};

use crate::barrier::{self, CALLS, GATE};
use crate::checkpoint::OwnCheckpoint;
use crate::fences::EventFences;
use crate::hooks::{self, nvml, pools};
use crate::library::CUDA;
use crate::{alive, elf, fork, frameworks};

/// The engine and what the layer knows beside it. Made once a process, never freed.
pub(crate) struct Running {
    pub(crate) engine: Arc<Engine>,
    pub(crate) table: Arc<DriverTable>,
    /// How streams are marked for stream-ordered pools.
    pub(crate) fences: Arc<EventFences>,
    /// `ebb run` started this program.
    in_task: bool,
    attaching: Mutex<()>,
    devices: RwLock<Vec<Managed>>,
}

/// A device that the engine manages, or that it was not able to.
#[derive(Clone, Debug)]
pub(crate) struct Managed {
    /// The driver's number of it in this process.
    pub(crate) ordinal: CUdevice,
    pub(crate) facts: DeviceFacts,
    /// The engine's number, if the engine manages it.
    pub(crate) index: Option<usize>,
    pub(crate) cuda: Option<Arc<CudaDevice>>,
    contexts: Vec<CUcontext>,
    /// The one of them that belongs to the device, if the program holds it.
    primary: Option<CUcontext>,
    /// What contexts take, as far as we saw it.
    overhead: Bytes,
    /// Which of them took how much of it.
    took: Vec<(CUcontext, u64)>,
}

impl Managed {
    /// What the driver took for a context that goes, in bytes; it counts no more.
    fn forget_taken(&mut self, context: CUcontext) -> u64 {
        let gone = self.took.extract_if(.., |(of, _)| *of == context);
        gone.map(|(_, bytes)| bytes).sum()
    }
}

static RUNNING: AtomicPtr<Running> = AtomicPtr::new(core::ptr::null_mut());
/// Whether the engine manages more than one device, or ever did.
static SEVERAL: AtomicBool = AtomicBool::new(false);
/// 0 not started, 1 started or starting, 2 never in this process (it is a fork of one that had started).
static STARTED: AtomicU8 = AtomicU8::new(0);

/// Whether calls pass the gate. The first thing that every touch asks.
#[inline(always)]
pub(crate) fn is_running() -> bool {
    alive::is_running()
}

/// Whether calls on one device may use the memory of another.
#[inline(always)]
pub(crate) fn several() -> bool {
    SEVERAL.load(Ordering::Relaxed)
}

/// The engine, if it runs.
#[inline]
pub(crate) fn running() -> Option<&'static Running> {
    if !is_running() {
        return None;
    }
    // SAFETY: null, or a leaked box that is stored once and whose parts are all shareable.
    unsafe { RUNNING.load(Ordering::Acquire).as_ref() }
}

/// Something of ours is broken: nothing new is managed in this process. Memory that is ours already is still found,
/// freed and brought back.
pub(crate) fn give_up() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if !ONCE.swap(true, Ordering::Relaxed)
        && let Some(engine) = engine()
    {
        engine.give_up("a fault of the layer");
    }
}

/// In the child of a fork: nothing of the parent's engine is used again. Takes no lock.
pub(crate) fn forget_in_child() {
    STARTED.store(2, Ordering::Relaxed);
    alive::ends();
}

/// The engine of this process, for the handler of `exit` and for the report.
pub(crate) fn engine() -> Option<&'static Engine> {
    if alive::is_child() {
        return None;
    }
    inherited()
}

/// The engine even where it is the parent's: for the handler of `fork` alone, which takes no lock.
pub(crate) fn inherited() -> Option<&'static Engine> {
    // SAFETY: as in `running`.
    unsafe { RUNNING.load(Ordering::Acquire).as_ref() }.map(|running| &*running.engine)
}

/// After the first successful `cuInit`. Threads that come meanwhile do not wait: one may hold the loader's lock.
pub(crate) fn start() {
    if barrier::is_off()
        || STARTED
            .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
    {
        return;
    }
    barrier::quiet_panics();
    let address = |name: &'static CStr| {
        let real = CUDA.index(name).map_or(0, |index| CUDA.real(index));
        core::ptr::with_exposed_provenance(real)
    };
    // SAFETY: `real` answers 0 or the driver's function of that name, in a library whose handle is never closed.
    let table = Arc::new(unsafe { DriverTable::load(address) });
    let mut config = Config::from_env(Arc::new(MmapHost));
    config.program_retries = program_retries;
    let in_task = config.token != [0; 32];
    fork::register();
    let engine = Engine::start(config, &GATE);
    engine.set_sleep(&CALLS, Arc::new(OwnCheckpoint));
    let fences = Arc::new(EventFences::new(Arc::clone(&table)));
    engine.set_fences(Arc::clone(&fences) as Arc<dyn Fences>);
    let running = Running {
        engine,
        fences,
        table,
        in_task,
        attaching: Mutex::new(()),
        devices: RwLock::new(Vec::new()),
    };
    RUNNING.store(Box::into_raw(Box::new(running)), Ordering::Release);
    alive::begins();
}

/// Whether the program's allocator flushes its caches and tries again after an out-of-memory.
fn program_retries() -> bool {
    const KNOWN: &[&[u8]] = &[
        b"libc10_cuda",
        b"libtorch_cuda",
        b"librmm",
        b"/cupy",
        b"/jaxlib/",
        b"xla_cuda",
        b"/cupy_backends/",
    ];
    elf::any_path(|path| {
        KNOWN
            .iter()
            .any(|part| path.windows(part.len()).any(|at| at == *part))
    })
}

impl Running {
    fn read_devices<T>(&self, read: impl FnOnce(&[Managed]) -> T) -> T {
        read(&self.devices.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change_devices<T>(&self, change: impl FnOnce(&mut Vec<Managed>) -> T) -> T {
        change(&mut self.devices.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// The current context of the calling thread.
    pub(crate) fn current_context(&self) -> Option<CUcontext> {
        let mut context = CUcontext::NULL;
        // SAFETY: a valid place for the answer.
        let known = unsafe { self.table.cuCtxGetCurrent(&raw mut context) };
        (known.is_success() && !context.is_null()).then_some(context)
    }

    /// The device of the current context.
    pub(crate) fn current_device(&self) -> Option<CUdevice> {
        let mut device = CUdevice(0);
        // SAFETY: a valid place for the answer.
        unsafe { self.table.cuCtxGetDevice(&raw mut device) }
            .is_success()
            .then_some(device)
    }

    /// Engine number of the device of the current context, and the context; attaches the device if need be.
    pub(crate) fn here(&self) -> Option<(usize, CUcontext)> {
        let context = self.current_context()?;
        let known = self.read_devices(|devices| {
            devices
                .iter()
                .find(|device| device.contexts.contains(&context))
                .map(|device| device.index)
        });
        match known {
            Some(index) => Some((index?, context)),
            // A context that no hook saw being made.
            None => Some((self.attach(self.current_device()?, Some(context))?, context)),
        }
    }

    /// Engine number of a device by the driver's number, if it is managed already.
    pub(crate) fn index_of(&self, ordinal: CUdevice) -> Option<usize> {
        self.read_devices(|devices| devices.iter().find(|device| device.ordinal == ordinal)?.index)
    }

    /// Engine number of a known context's device, if it is managed.
    pub(crate) fn index_of_context(&self, context: CUcontext) -> Option<usize> {
        self.read_devices(|devices| {
            devices
                .iter()
                .find(|device| device.contexts.contains(&context))?
                .index
        })
    }

    /// The contexts that live on a device, by its engine number.
    pub(crate) fn contexts_of(&self, index: usize) -> Vec<CUcontext> {
        self.by_index(index)
            .map_or_else(Vec::new, |device| device.contexts)
    }

    /// The calling thread's current context has changed: its work counts for that device from now on.
    pub(crate) fn works_on_current(&self) {
        let context = self.current_context();
        GATE.works_on(context.and_then(|context| self.index_of_context(context)));
    }

    /// What is known of a device by the engine's number.
    pub(crate) fn by_index(&self, index: usize) -> Option<Managed> {
        self.read_devices(|devices| devices.iter().find(|device| device.index == Some(index)).cloned())
    }

    /// The driver's numbers of the devices that are known.
    pub(crate) fn ordinals(&self) -> Vec<CUdevice> {
        self.read_devices(|devices| devices.iter().map(|device| device.ordinal).collect())
    }

    /// What is known of a device by its identity.
    pub(crate) fn by_uuid(&self, uuid: DeviceUuid) -> Option<Managed> {
        self.read_devices(|devices| devices.iter().find(|device| device.facts.uuid == uuid).cloned())
    }

    /// Makes the engine manage a device, and a context of it known. `None` if it cannot be managed.
    pub(crate) fn attach(&self, ordinal: CUdevice, context: Option<CUcontext>) -> Option<usize> {
        let _attaching = self.attaching.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.change_devices(|devices| {
            let device = devices.iter_mut().find(|device| device.ordinal == ordinal)?;
            if let Some(context) = context {
                if !device.contexts.contains(&context) {
                    device.contexts.push(context);
                }
                if let Some(cuda) = &device.cuda {
                    cuda.add_context(context);
                }
            }
            Some(device.index)
        });
        if let Some(index) = known {
            return index;
        }
        let facts = DeviceFacts::read(&self.table, ordinal).ok()?;
        let contexts = context.into_iter().collect();
        let (primary, overhead) = (None, Bytes::ZERO);
        let mut device = Managed {
            ordinal,
            facts,
            index: None,
            cuda: None,
            contexts,
            primary,
            overhead,
            took: Vec::new(),
        };
        if facts.vmm {
            match CudaDevice::new(Arc::clone(&self.table), ordinal, context, &facts) {
                Ok(cuda) => {
                    let cuda = Arc::new(cuda);
                    // What the process has on the card before its first allocation is the context.
                    device.overhead = context
                        .and_then(|_| nvml::process_bytes(facts.uuid))
                        .unwrap_or(Bytes::ZERO);
                    device.took = context
                        .map(|context| (context, device.overhead.0))
                        .into_iter()
                        .collect();
                    let memory: Arc<dyn DeviceMemory> = Arc::clone(&cuda) as Arc<dyn DeviceMemory>;
                    match self
                        .engine
                        .attach_device(facts.uuid, memory, facts.total, device.overhead)
                    {
                        Ok(index) => (device.index, device.cuda) = (Some(index), Some(cuda)),
                        Err(error) => self.engine.note(&format!("{}: not managed: {error}", facts.uuid)),
                    }
                }
                Err(error) => self.engine.note(&format!("{}: not managed: {error}", facts.uuid)),
            }
        } else {
            self.engine
                .note(&format!("{}: not managed: no virtual memory calls", facts.uuid));
        }
        if facts.mps {
            // The driver's server maps for all its clients, and takes a millisecond for each call that gives access.
            self.engine.note(&format!("{}: shared through MPS", facts.uuid));
        }
        let index = device.index;
        self.change_devices(|devices| {
            devices.push(device);
            if devices.iter().filter(|device| device.index.is_some()).count() > 1 {
                SEVERAL.store(true, Ordering::SeqCst);
            }
        });
        index
    }

    /// Attaches a device that has no context yet, so that a question about it gets the task's answer. Only in a task: elsewhere
    /// there is no limit to tell, and most programs ask about every device.
    pub(crate) fn attach_for_question(&self, ordinal: CUdevice) -> Option<usize> {
        if self.in_task {
            self.attach(ordinal, None)
        } else {
            None
        }
    }

    /// A context goes, and everything that was allocated in it. `alive`: the driver has not destroyed it yet. Says what the driver took for it,
    /// as far as that was seen.
    pub(crate) fn context_goes(&self, context: CUcontext, alive: bool) -> u64 {
        let _attaching = self.attaching.lock().unwrap_or_else(PoisonError::into_inner);
        hooks::ipc::context_goes(self, context);
        hooks::share::context_goes(self, context);
        hooks::forbidden::context_goes(context);
        let device = self.change_devices(|devices| {
            let device = devices
                .iter_mut()
                .find(|device| device.contexts.contains(&context))?;
            device.contexts.retain(|&known| known != context);
            device.primary.take_if(|primary| *primary == context);
            let took = device.forget_taken(context);
            Some((device.clone(), took))
        });
        let Some((device, took)) = device else { return 0 };
        let (Some(index), Some(cuda)) = (device.index, &device.cuda) else {
            return 0;
        };
        if !alive {
            // No call may be made in it any more, also not while the engine lets go.
            cuda.forget_context(context);
        }
        if device.contexts.is_empty() {
            self.engine.detach_device(index);
            frameworks::private::device_gone(index);
            // Another context is a new start.
            self.change_devices(|devices| devices.retain(|known| known.ordinal != device.ordinal));
        } else {
            self.engine.free_owner(index, context.0 as u64);
        }
        pools::context_gone(self, context);
        if alive {
            cuda.remove_context(context);
        }
        took
    }

    /// A green context is about to go: a part of a device's primary context, whose memory stays. Says what the driver took for it.
    pub(crate) fn part_goes(&self, context: CUcontext) -> u64 {
        let _attaching = self.attaching.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = self.change_devices(|devices| {
            let device = devices
                .iter_mut()
                .find(|device| device.contexts.contains(&context))?;
            if device.contexts.len() > 1 {
                device.contexts.retain(|&known| known != context);
            }
            let took = device.forget_taken(context);
            Some((device.clone(), took))
        });
        let Some((device, took)) = gone else { return 0 };
        if device.contexts.contains(&context) {
            // The last one known: the primary context goes with it, and all that is there.
            if let Some(index) = device.index {
                self.engine.detach_device(index);
                frameworks::private::device_gone(index);
                self.change_devices(|devices| devices.retain(|known| known.ordinal != device.ordinal));
            }
            return 0;
        }
        if let Some(cuda) = &device.cuda {
            cuda.remove_context(context);
        }
        pools::context_gone(self, context);
        took
    }

    /// The program holds a device's primary context.
    pub(crate) fn set_primary(&self, ordinal: CUdevice, context: CUcontext) {
        self.change_devices(|devices| {
            if let Some(device) = devices.iter_mut().find(|device| device.ordinal == ordinal) {
                device.primary = Some(context);
            }
        });
    }

    /// A device's primary context, if the program holds it.
    pub(crate) fn primary_of(&self, ordinal: CUdevice) -> Option<CUcontext> {
        self.read_devices(|devices| devices.iter().find(|device| device.ordinal == ordinal)?.primary)
    }

    /// Whether a device has contexts beside its primary one.
    pub(crate) fn has_other_contexts(&self, ordinal: CUdevice) -> bool {
        self.read_devices(|devices| {
            devices.iter().any(|device| {
                device.ordinal == ordinal
                    && device
                        .contexts
                        .iter()
                        .any(|&context| Some(context) != device.primary)
            })
        })
    }

    /// The driver took more for itself on a device, for a context.
    pub(crate) fn overhead_grows(&self, index: usize, context: CUcontext, bytes: u64) {
        self.change_overhead(index, |device| {
            device.overhead = Bytes(device.overhead.0.saturating_add(bytes));
            device.took.push((context, bytes));
        });
    }

    /// The driver gave back what it had taken for a context.
    pub(crate) fn overhead_shrinks(&self, index: usize, bytes: u64) {
        self.change_overhead(index, |device| {
            device.overhead = Bytes(device.overhead.0.saturating_sub(bytes));
        });
    }

    fn change_overhead(&self, index: usize, change: impl FnOnce(&mut Managed)) {
        let overhead = self.change_devices(|devices| {
            let device = devices.iter_mut().find(|device| device.index == Some(index))?;
            change(device);
            Some(device.overhead)
        });
        if let Some(overhead) = overhead {
            self.engine.set_overhead(index, overhead);
        }
    }

    /// The device of a known context.
    pub(crate) fn device_of(&self, context: CUcontext) -> Option<CUdevice> {
        self.read_devices(|devices| {
            devices
                .iter()
                .find(|device| device.contexts.contains(&context))
                .map(|d| d.ordinal)
        })
    }

    /// A location was given access to memory of these devices; inside the gate, for all of them.
    pub(crate) fn gains_access(&self, location: &CUmemLocation, owners: DeviceSet) {
        if location.type_ == CU_MEM_LOCATION_TYPE_DEVICE
            && let Some(user) = self.index_of(CUdevice(location.u.cast_signed()))
        {
            self.engine.gain_access(user, owners);
        }
    }

    /// A device may use the memory of another from now on.
    pub(crate) fn peers(&self, owner: CUdevice, user: CUdevice) {
        let cuda = self.read_devices(|devices| {
            devices
                .iter()
                .find(|d| d.ordinal == owner)
                .and_then(|d| d.cuda.clone())
        });
        if let (Some(owner), Some(user)) = (self.index_of(owner), self.index_of(user)) {
            self.engine.gain_access(user, DeviceSet::one(owner));
        }
        if let Some(cuda) = cuda
            && let Err(error) = cuda.add_peer(user)
        {
            self.engine.note(&format!(
                "peer access of device {} to our memory on {}: {error}",
                user.0, owner.0
            ));
        }
        self.framework_peer(owner, user, Grant::READ_WRITE);
    }

    /// It may not any more.
    pub(crate) fn no_peer(&self, owner: CUdevice, user: CUdevice) {
        let cuda = self.read_devices(|devices| {
            devices
                .iter()
                .find(|d| d.ordinal == owner)
                .and_then(|d| d.cuda.clone())
        });
        if let Some(cuda) = cuda
            && let Err(error) = cuda.remove_peer(user)
        {
            self.engine.note(&format!(
                "taking access of device {} to our memory on {} away: {error}",
                user.0, owner.0
            ));
        }
        self.framework_peer(owner, user, 0);
    }

    fn framework_peer(&self, owner: CUdevice, user: CUdevice, flags: u32) {
        let peer = Location {
            kind: CU_MEM_LOCATION_TYPE_DEVICE.0,
            id: user.0.cast_unsigned(),
        };
        if let Some(owner) = self.index_of(owner) {
            self.engine.framework_peer(owner, peer, flags);
        }
    }

    /// The driver's calls for a device that the engine manages.
    pub(crate) fn cuda(&self, index: usize) -> Option<Arc<CudaDevice>> {
        self.read_devices(|devices| {
            devices
                .iter()
                .find(|d| d.index == Some(index))
                .and_then(|d| d.cuda.clone())
        })
    }

    /// The driver's number, in this process, of the device with that identity.
    pub(crate) fn ordinal_of(&self, uuid: DeviceUuid) -> Option<CUdevice> {
        if let Some(known) = self.by_uuid(uuid) {
            return Some(known.ordinal);
        }
        // The driver counts the devices that this process may see from 0.
        (0..64)
            .map(CUdevice)
            .map_while(|device| {
                DeviceFacts::read(&self.table, device)
                    .ok()
                    .map(|facts| (device, facts))
            })
            .find(|(_, facts)| facts.uuid == uuid)
            .map(|(device, _)| device)
    }

    /// Waits for everything that was submitted to a managed device. Not during a capture.
    pub(crate) fn quiesce(&self, index: usize) -> Result<(), DeviceError> {
        let cuda = self.read_devices(|devices| {
            devices
                .iter()
                .find(|d| d.index == Some(index))
                .and_then(|d| d.cuda.clone())
        });
        cuda.map_or(Ok(()), |cuda| cuda.quiesce())
    }

    /// The live allocation of ours, or of another process that has it open here, that contains an address.
    pub(crate) fn lookup(&self, ptr: u64) -> Option<Allocation> {
        if self.engine.contains(ptr) {
            self.engine.lookup(ptr)
        } else {
            hooks::ipc::lookup(ptr)
        }
    }

    /// Whether an address lies in our ranges, but in no live allocation. Cached memory is mapped there, and the driver would
    /// describe it; to the program it is freed.
    pub(crate) fn is_vacant(&self, ptr: u64) -> bool {
        self.engine.contains(ptr) && self.engine.lookup(ptr).is_none()
    }

    /// What the program is told: total and free, from the driver's own.
    pub(crate) fn mem_info(&self, index: usize, free: u64, total: u64) -> (u64, u64) {
        match self.engine.mem_info(index) {
            MemInfo::Own { total, free } => (free.0, total.0),
            MemInfo::Strict {
                total,
                free: own,
                cached,
            } => (own.0.min(free.saturating_add(cached.0)), total.0),
            MemInfo::Driver { cached } => (free.saturating_add(cached.0).min(total), total),
        }
    }

    /// Counts memory that passes the pool by, before the driver is asked for it.
    pub(crate) fn reserve(&self, index: usize, kind: ExternalKind, bytes: u64) -> Result<(), CUresult> {
        self.engine
            .external_reserve(index, kind, Bytes(bytes))
            .or_else(|error| match alloc_code(error) {
                Some(code) => Err(code),
                // Not managed any more: nothing to count.
                None => Ok(()),
            })
    }

    /// Memory that passed the pool by is gone.
    pub(crate) fn release(&self, index: usize, kind: ExternalKind, bytes: u64) {
        self.engine.external_release(index, kind, Bytes(bytes));
    }
}

/// The driver's code for a refused allocation; `None` if the driver itself should be asked.
pub(crate) fn alloc_code(error: AllocError) -> Option<CUresult> {
    match error {
        AllocError::Size(_) => Some(CUresult::ERROR_INVALID_VALUE),
        AllocError::OverLimit { .. } | AllocError::NeverFits(_) | AllocError::TimedOut(_) => {
            Some(CUresult::ERROR_OUT_OF_MEMORY)
        }
        AllocError::Device(error) => device_code(error),
        AllocError::Bypass => None,
    }
}

/// The driver's code for a failed call of ours; `None` if the driver itself should be asked.
pub(crate) fn device_code(error: DeviceError) -> Option<CUresult> {
    match error {
        DeviceError::OutOfMemory => Some(CUresult::ERROR_OUT_OF_MEMORY),
        DeviceError::Driver { code, .. } => Some(CUresult(code)),
        DeviceError::Gone => None,
    }
}

/// The driver's code for a refused free; `None` if the driver itself should be asked.
pub(crate) fn free_code(error: FreeError) -> Option<CUresult> {
    match error {
        FreeError::Invalid => Some(CUresult::ERROR_INVALID_VALUE),
        FreeError::Bypass => None,
    }
}

/// The driver's code for a touch whose memory cannot be brought back.
pub(crate) fn touch_code(error: TouchError) -> CUresult {
    match error {
        TouchError::OutOfMemory => CUresult::ERROR_OUT_OF_MEMORY,
        TouchError::Device(error) => device_code(error).unwrap_or(CUresult::ERROR_DEINITIALIZED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_drivers_codes() {
        assert_eq!(alloc_code(AllocError::Size(Bytes(0))), Some(CUresult(1)));
        assert_eq!(alloc_code(AllocError::NeverFits(Bytes(1))), Some(CUresult(2)));
        assert_eq!(alloc_code(AllocError::TimedOut(Bytes(1))), Some(CUresult(2)));
        assert_eq!(
            alloc_code(AllocError::Device(DeviceError::OutOfMemory)),
            Some(CUresult(2))
        );
        assert_eq!(
            alloc_code(AllocError::Device(DeviceError::Driver { code: 719, call: "x" })),
            Some(CUresult(719))
        );
        assert_eq!(alloc_code(AllocError::Bypass), None);
        assert_eq!(free_code(FreeError::Invalid), Some(CUresult(1)));
        assert_eq!(free_code(FreeError::Bypass), None);
        assert_eq!(touch_code(TouchError::OutOfMemory), CUresult(2));
        assert_eq!(touch_code(TouchError::Device(DeviceError::Gone)), CUresult(4));
    }

    #[test]
    fn nothing_runs_by_itself() {
        assert!(!is_running());
        assert!(running().is_none());
    }
}
