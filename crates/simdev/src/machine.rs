//! The machine as one process sees it: the mapped file, the ledger's lock, the process's slot.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::config::{Config, ConfigError};
use crate::file::{DeviceRow, LEDGER_LOCK, MAGIC, MAX_SLOTS, MachineFile, SLOT_LOCKS, SlotRow};

/// A process's place in the ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(pub(crate) usize);

impl Slot {
    /// The slot's number.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

/// What a device's memory is used for, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// The device's memory.
    pub total: u64,
    /// What live processes and objects hold.
    pub used: u64,
}

impl Usage {
    /// What nobody holds.
    #[must_use]
    pub fn free(self) -> u64 {
        self.total.saturating_sub(self.used)
    }
}

/// What one process holds on a device, in bytes, contexts and objects that it created included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProcessUse {
    /// The process.
    pub pid: u32,
    /// Its bytes.
    pub bytes: u64,
}

/// Why a machine could not be opened.
#[derive(Debug)]
pub enum AttachError {
    /// The environment does not make sense: the user's fault.
    Config(ConfigError),
    /// The state folder could not be used.
    Io(PathBuf, io::Error),
    /// The state folder was written by another version: remove it.
    Layout(PathBuf),
    /// All slots are taken by live processes.
    TooManyProcesses,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Layout(path) => write!(f, "{} is of another version; remove it", path.display()),
            Self::TooManyProcesses => write!(f, "{MAX_SLOTS} processes use this simulated machine already"),
        }
    }
}

impl std::error::Error for AttachError {}

/// A machine, attached. Holding one tells you that the file is mapped and initialised until the process ends: the mapping is
/// never undone, so rows may be borrowed for `'static`.
#[derive(Debug)]
pub struct Machine {
    config: Config,
    file: &'static MachineFile,
    /// The description that carries this process's locks; -1 in a forked child.
    lock_fd: AtomicI32,
    /// Open file description locks do not exclude threads of one process from each other; this does. Taken before the file's.
    lock_threads: Mutex<()>,
    slot: AtomicU32,
}

const NO_SLOT: u32 = u32::MAX;

/// The ledger's lock, held. Dropping it, or dying, gives it back.
#[derive(Debug)]
pub(crate) struct Ledger<'a> {
    machine: &'a Machine,
    _threads: MutexGuard<'a, ()>,
}

impl Drop for Ledger<'_> {
    fn drop(&mut self) {
        let _ = self.machine.set_lock(libc::F_UNLCK, LEDGER_LOCK, true);
    }
}

impl Machine {
    /// Opens the machine that the environment names, and makes it if it does not exist. Takes no slot: a process that only
    /// looks (NVML) is not in the ledger.
    ///
    /// # Errors
    /// A bad variable, or a state folder that cannot be used.
    pub fn open_from_env() -> Result<Self, AttachError> {
        Self::open(Config::from_env().map_err(AttachError::Config)?)
    }

    /// Opens the machine in `config.dir`; if it exists already, its own figures replace those of `config`.
    ///
    /// # Errors
    /// A state folder that cannot be used.
    pub fn open(mut config: Config) -> Result<Self, AttachError> {
        let io_error = |path: &Path| {
            let path = path.to_owned();
            move |error| AttachError::Io(path, error)
        };
        std::fs::create_dir_all(&config.dir).map_err(io_error(&config.dir))?;
        let path = config.dir.join("machine");
        let open = || {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_CLOEXEC)
                .open(&path)
                .map_err(io_error(&path))
        };
        // Two descriptions: a mapping holds on to the one that it was made from, also in a forked child, and the locks must not
        // live as long as that.
        let (file, mapped_from) = (open()?, open()?);
        lock_bytes(file.as_raw_fd(), libc::F_WRLCK, LEDGER_LOCK, true).map_err(io_error(&path))?;
        let size = size_of::<MachineFile>() as u64;
        let old = file.metadata().map_err(io_error(&path))?.len();
        if old < size {
            file.set_len(size).map_err(io_error(&path))?;
        }
        let mapped = map(&mapped_from, size_of::<MachineFile>()).map_err(io_error(&path))?;
        match mapped.magic.load(Ordering::Acquire) {
            0 => initialise(mapped, &config),
            MAGIC => {}
            _ => return Err(AttachError::Layout(path)),
        }
        config.devices = mapped.devices.load(Ordering::Relaxed);
        config.memory = mapped.device[0].capacity.load(Ordering::Relaxed);
        config.context_bytes = mapped.context_bytes.load(Ordering::Relaxed);
        config.mps_client_bytes = mapped.mps_client_bytes.load(Ordering::Relaxed);
        config.mps_server_bytes = mapped.mps_server_bytes.load(Ordering::Relaxed);
        config.granularity = mapped.granularity.load(Ordering::Relaxed);
        config.link_bytes_per_s = mapped.link_bytes_per_s.load(Ordering::Relaxed);
        config.link_latency_ns = mapped.link_latency_ns.load(Ordering::Relaxed);
        lock_bytes(file.as_raw_fd(), libc::F_UNLCK, LEDGER_LOCK, true).map_err(io_error(&path))?;
        use std::os::fd::IntoRawFd;
        Ok(Self {
            config,
            file: mapped,
            lock_fd: AtomicI32::new(file.into_raw_fd()),
            lock_threads: Mutex::new(()),
            slot: AtomicU32::new(NO_SLOT),
        })
    }

    /// Takes a slot in the ledger for this process. Once per machine.
    ///
    /// # Errors
    /// All slots are taken.
    pub fn attach(&self) -> Result<Slot, AttachError> {
        let ledger = self.ledger();
        for index in 0..MAX_SLOTS {
            if self.slot_lock_is_taken(index)
                || self.set_lock(libc::F_WRLCK, slot_byte(index), false).is_err()
            {
                continue;
            }
            let row = &self.file.slot[index];
            // The lock is ours and the slot's former owner is dead: its figures go before the slot counts as ours.
            clear(row);
            row.pid.store(std::process::id(), Ordering::Release);
            self.file.slots_used.fetch_max(index as u32 + 1, Ordering::AcqRel);
            self.slot.store(index as u32, Ordering::Release);
            self.reap_objects(&ledger);
            return Ok(Slot(index));
        }
        Err(AttachError::TooManyProcesses)
    }

    /// The machine's figures.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// This process's slot, if it took one.
    #[must_use]
    pub fn own_slot(&self) -> Option<Slot> {
        match self.slot.load(Ordering::Acquire) {
            NO_SLOT => None,
            index => Some(Slot(index as usize)),
        }
    }

    /// Charges `bytes` of `device`'s memory to this process; `false` if there is no room for them.
    #[must_use]
    pub fn charge(&self, device: u32, bytes: u64) -> bool {
        self.charge_row(device, bytes, false)
    }

    /// The same for a context.
    #[must_use]
    pub fn charge_context(&self, device: u32, bytes: u64) -> bool {
        self.charge_row(device, bytes, true)
    }

    fn charge_row(&self, device: u32, bytes: u64, context: bool) -> bool {
        let Some(slot) = self.own_slot() else { return false };
        let ledger = self.ledger();
        // The first client's context on a device brings the server's share with it.
        let server = if context && !self.has_contexts(device) {
            self.mps_server()
        } else {
            0
        };
        if !self.has_room(&ledger, device, bytes.saturating_add(server)) {
            return false;
        }
        let row = &self.file.slot[slot.0].usage[device as usize];
        let cell = if context { &row.context_bytes } else { &row.bytes };
        cell.store(cell.load(Ordering::Relaxed) + bytes, Ordering::Release);
        true
    }

    /// Gives charged bytes back.
    pub fn credit(&self, device: u32, bytes: u64) {
        self.credit_row(device, bytes, false);
    }

    /// Gives a context's bytes back.
    pub fn credit_context(&self, device: u32, bytes: u64) {
        self.credit_row(device, bytes, true);
    }

    fn credit_row(&self, device: u32, bytes: u64, context: bool) {
        let Some(slot) = self.own_slot() else { return };
        let row = &self.file.slot[slot.0].usage[device as usize];
        let cell = if context { &row.context_bytes } else { &row.bytes };
        // Only this process writes its row, under its own lock or with this one instruction; readers see either value.
        let _ledger = self.ledger();
        cell.store(
            cell.load(Ordering::Relaxed).saturating_sub(bytes),
            Ordering::Release,
        );
    }

    pub(crate) fn has_room(&self, ledger: &Ledger<'_>, device: u32, bytes: u64) -> bool {
        let fits = |usage: Usage| {
            usage
                .used
                .checked_add(bytes)
                .is_some_and(|sum| sum <= usage.total)
        };
        // Cheap first: what the dead hold only matters when it stands in the way.
        if fits(self.sum(ledger, device, false)) {
            return true;
        }
        self.reap_objects(ledger);
        fits(self.sum(ledger, device, true))
    }

    /// How much of a device is used, the dead not counted.
    #[must_use]
    pub fn usage(&self, device: u32) -> Usage {
        let ledger = self.ledger();
        self.reap_objects(&ledger);
        self.sum(&ledger, device, true)
    }

    /// The live processes that hold bytes on a device.
    #[must_use]
    pub fn processes(&self, device: u32) -> Vec<ProcessUse> {
        let ledger = self.ledger();
        self.reap_objects(&ledger);
        let mut found = Vec::new();
        for index in self.live_slots() {
            let row = &self.file.slot[index];
            let usage = &row.usage[device as usize];
            let own = usage.bytes.load(Ordering::Acquire) + usage.context_bytes.load(Ordering::Acquire);
            let pid = row.pid.load(Ordering::Acquire);
            let bytes = own + self.objects_of(&ledger, device, pid);
            if bytes > 0 {
                found.push(ProcessUse { pid, bytes });
            }
        }
        found
    }

    fn sum(&self, ledger: &Ledger<'_>, device: u32, check_alive: bool) -> Usage {
        let used = self.file.slots_used.load(Ordering::Acquire) as usize;
        let mut sum = self.object_bytes(ledger, device);
        for index in 0..used {
            let usage = &self.file.slot[index].usage[device as usize];
            let bytes = usage.bytes.load(Ordering::Acquire) + usage.context_bytes.load(Ordering::Acquire);
            if bytes > 0 && (!check_alive || self.is_alive(Slot(index))) {
                sum += bytes;
            }
        }
        if self.has_contexts(device) {
            sum += self.mps_server();
        }
        Usage {
            total: self.file.device[device as usize].capacity.load(Ordering::Relaxed),
            used: sum,
        }
    }

    /// What the MPS server costs where it serves.
    fn mps_server(&self) -> u64 {
        match self.config.mps_client_bytes {
            0 => 0,
            _ => self.config.mps_server_bytes,
        }
    }

    /// Whether any live process has a context on a device.
    fn has_contexts(&self, device: u32) -> bool {
        self.mps_server() > 0
            && self.live_slots().into_iter().any(|index| {
                let usage = &self.file.slot[index].usage[device as usize];
                usage.context_bytes.load(Ordering::Acquire) > 0
            })
    }

    fn live_slots(&self) -> Vec<usize> {
        let used = self.file.slots_used.load(Ordering::Acquire) as usize;
        (0..used).filter(|index| self.is_alive(Slot(*index))).collect()
    }

    /// The live slot of a process, if it is attached.
    #[must_use]
    pub fn slot_of(&self, pid: u32) -> Option<Slot> {
        let used = self.file.slots_used.load(Ordering::Acquire) as usize;
        (0..used)
            .filter(|index| self.file.slot[*index].pid.load(Ordering::Acquire) == pid)
            .map(Slot)
            .find(|slot| self.is_alive(*slot))
    }

    /// Whether the process that took this slot still lives.
    #[must_use]
    pub fn is_alive(&self, slot: Slot) -> bool {
        self.own_slot() == Some(slot) || self.slot_lock_is_taken(slot.0)
    }

    /// Adds to the time for which a device was busy.
    pub fn add_busy(&self, device: u32, nanoseconds: u64) {
        self.device(device)
            .busy_ns
            .fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// For how long a device has been busy, in nanoseconds, since the machine was made.
    #[must_use]
    pub fn busy_ns(&self, device: u32) -> u64 {
        self.device(device).busy_ns.load(Ordering::Relaxed)
    }

    /// In a forked child: forgets the parent's locks, so that the parent's death is seen although the child lives.
    ///
    /// Safe in a child of a process with threads: it takes no lock and allocates nothing.
    pub fn abandon_after_fork(&self) {
        let fd = self.lock_fd.swap(-1, Ordering::AcqRel);
        self.slot.store(NO_SLOT, Ordering::Release);
        if fd >= 0 {
            // SAFETY: the descriptor is ours alone; nothing uses it after the swap.
            unsafe { libc::close(fd) };
        }
    }

    pub(crate) fn file(&self) -> &'static MachineFile {
        self.file
    }

    pub(crate) fn device(&self, index: u32) -> &'static DeviceRow {
        &self.file.device[index as usize]
    }

    pub(crate) fn ledger(&self) -> Ledger<'_> {
        let threads = self.lock_threads.lock().unwrap_or_else(PoisonError::into_inner);
        // The only way for this to fail is a closed descriptor (a forked child, which the driver turns away before) or the
        // kernel being out of lock records; going on without the lock beats stopping the host program.
        let _ = self.set_lock(libc::F_WRLCK, LEDGER_LOCK, true);
        Ledger {
            machine: self,
            _threads: threads,
        }
    }

    fn set_lock(&self, kind: i32, byte: i64, wait: bool) -> io::Result<()> {
        lock_bytes(self.lock_fd.load(Ordering::Acquire), kind, byte, wait)
    }

    fn slot_lock_is_taken(&self, index: usize) -> bool {
        let mut lock = lock_record(libc::F_WRLCK, slot_byte(index));
        // SAFETY: the descriptor is open, `lock` is a valid record that the call may write.
        let rc = unsafe { libc::fcntl(self.lock_fd.load(Ordering::Acquire), libc::F_OFD_GETLK, &mut lock) };
        rc == 0 && i32::from(lock.l_type) != libc::F_UNLCK
    }
}

fn slot_byte(index: usize) -> i64 {
    SLOT_LOCKS + index as i64
}

fn lock_record(kind: i32, byte: i64) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    }
}

fn lock_bytes(fd: i32, kind: i32, byte: i64, wait: bool) -> io::Result<()> {
    let record = lock_record(kind, byte);
    let command = if wait {
        libc::F_OFD_SETLKW
    } else {
        libc::F_OFD_SETLK
    };
    loop {
        // SAFETY: `record` is a valid lock record; a bad descriptor is answered with an error.
        if unsafe { libc::fcntl(fd, command, &record) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn map(file: &File, size: usize) -> io::Result<&'static MachineFile> {
    // SAFETY: a new shared mapping of a file that is at least `size` long; nothing else is replaced.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, large enough, never undone, and all its fields are atomics, for which every bit
    // pattern is valid and which other processes may change at any time.
    Ok(unsafe { &*address.cast::<MachineFile>() })
}

fn initialise(file: &MachineFile, config: &Config) {
    file.devices.store(config.devices, Ordering::Relaxed);
    for row in &file.device {
        row.capacity.store(config.memory, Ordering::Relaxed);
    }
    file.context_bytes.store(config.context_bytes, Ordering::Relaxed);
    file.mps_client_bytes
        .store(config.mps_client_bytes, Ordering::Relaxed);
    file.mps_server_bytes
        .store(config.mps_server_bytes, Ordering::Relaxed);
    file.granularity.store(config.granularity, Ordering::Relaxed);
    file.link_bytes_per_s
        .store(config.link_bytes_per_s, Ordering::Relaxed);
    file.link_latency_ns
        .store(config.link_latency_ns, Ordering::Relaxed);
    file.next_object.store(1, Ordering::Relaxed);
    file.magic.store(MAGIC, Ordering::Release);
}

fn clear(row: &SlotRow) {
    for usage in &row.usage {
        usage.bytes.store(0, Ordering::Release);
        usage.context_bytes.store(0, Ordering::Release);
    }
    row.checkpoint_state.store(0, Ordering::Release);
    row.request_code.store(0, Ordering::Release);
    row.answer_sequence
        .store(row.request_sequence.load(Ordering::Acquire), Ordering::Release);
}
