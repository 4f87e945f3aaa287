//! Physical memory: pages of a memory file, charged to the ledger as long as anything refers to them.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ebb_abi::{CUmemAllocationProp, CUresult};
use ebb_simdev::{HOST_DEVICE, Machine, Object};

use super::spans::Spans;

/// Room for offsets in the memory file: sparse, so only what is written takes memory.
const ARENA_BYTES: u64 = 1 << 46;

/// The memory file of this process: one descriptor for all physical memory that is not exported, so that a program with
/// thousands of chunks does not run out of descriptors.
#[derive(Debug)]
pub(crate) struct Arena {
    fd: OwnedFd,
    offsets: Mutex<Spans>,
}

impl Arena {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: the name is a valid string; the result is checked.
        let fd = unsafe { libc::memfd_create(c"ebb-sim-memory".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and is owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), ARENA_BYTES as i64) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            fd,
            offsets: Mutex::new(Spans::new(0, ARENA_BYTES)),
        })
    }

    /// The descriptor's number.
    pub(crate) fn fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }
}

/// The descriptors of objects, for a forked child to close. A list of plain numbers, because a child may take no lock; an object beyond
/// its end works, but stays alive as long as a child that was forked meanwhile.
static OBJECT_FDS: [AtomicI32; 8192] = [const { AtomicI32::new(-1) }; 8192];

fn note_object(fd: i32) {
    for place in &OBJECT_FDS {
        if place
            .compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return;
        }
    }
}

fn forget_object(fd: i32) {
    for place in &OBJECT_FDS {
        if place
            .compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return;
        }
    }
}

/// In a forked child: lets go of the parent's objects. Takes no lock and allocates nothing.
pub(crate) fn abandon_objects_after_fork() {
    for place in &OBJECT_FDS {
        let fd = place.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            // SAFETY: the descriptor is the driver's own, and nothing of the driver runs in the child.
            unsafe { libc::close(fd) };
        }
    }
}

#[derive(Debug)]
enum Backing {
    /// A span of the process's own memory file.
    Arena(u64),
    /// A file of its own, because it was made to be exported or came from another process.
    Object(Mutex<Option<Object>>, i32),
    /// A span of another process's memory file: legacy IPC. Not charged here.
    Foreign(OwnedFd, u64),
}

/// One piece of physical memory. It exists, and is charged, until the last handle and the last mapping drop it.
#[derive(Debug)]
pub(crate) struct Phys {
    machine: &'static Machine,
    arena: &'static Arena,
    backing: Backing,
    /// The physical index of its device; `None` is host memory, which costs the device nothing.
    pub(crate) device: Option<u32>,
    /// Its size.
    pub(crate) bytes: u64,
    /// What it was asked for as.
    pub(crate) properties: CUmemAllocationProp,
    /// Whether the ledger has its bytes: not while a checkpoint moved them to the host.
    charged: AtomicBool,
    /// The value of its handle, once it has one: a handle that is retained from an address is always the same.
    pub(crate) handle: std::sync::OnceLock<usize>,
    /// Distinguishes buffers for the program.
    pub(crate) id: u64,
}

// SAFETY: the raw pointer inside the properties is a value that the program gave and that is only handed back, never followed.
unsafe impl Send for Phys {}
// SAFETY: as above; everything that changes is atomic or behind a lock.
unsafe impl Sync for Phys {}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What an object keeps of its properties for those who import it: the allocation flags.
fn flags_of(properties: &CUmemAllocationProp) -> u64 {
    let [a, b, c, d] = properties.allocFlags.map(u64::from);
    a | b << 16 | c << 32 | d << 48
}

/// The reverse.
pub(crate) fn flags_from(word: u64) -> [u16; 4] {
    [0, 16, 32, 48].map(|shift| (word >> shift) as u16)
}

/// A number that no other buffer of this process has.
pub(crate) fn fresh_buffer_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl Phys {
    /// Makes memory on a device (`None`: the host).
    ///
    /// # Errors
    /// OUT_OF_MEMORY if the device has no room.
    pub(crate) fn new(
        machine: &'static Machine,
        arena: &'static Arena,
        device: Option<u32>,
        bytes: u64,
        properties: CUmemAllocationProp,
        exportable: bool,
    ) -> Result<Arc<Self>, CUresult> {
        let ask = || Self::back(machine, arena, device, bytes, &properties, exportable);
        let backing = match ask() {
            // What this process's pools only keep for later makes room for any other request of the same process.
            Err(CUresult::ERROR_OUT_OF_MEMORY) if crate::pool::give_back_kept(device) => ask()?,
            other => other?,
        };
        Ok(Arc::new(Self {
            machine,
            arena,
            backing,
            device,
            bytes,
            properties,
            charged: AtomicBool::new(true),
            handle: std::sync::OnceLock::new(),
            id: fresh_buffer_id(),
        }))
    }

    fn back(
        machine: &'static Machine,
        arena: &'static Arena,
        device: Option<u32>,
        bytes: u64,
        properties: &CUmemAllocationProp,
        exportable: bool,
    ) -> Result<Backing, CUresult> {
        Ok(match device {
            _ if exportable => {
                let flags = flags_of(properties);
                match machine.create_object(device.unwrap_or(HOST_DEVICE), bytes, flags) {
                    Ok(Some(object)) => {
                        let fd = object.fd();
                        note_object(fd);
                        Backing::Object(Mutex::new(Some(object)), fd)
                    }
                    Ok(None) => return Err(CUresult::ERROR_OUT_OF_MEMORY),
                    Err(_) => return Err(CUresult::ERROR_OPERATING_SYSTEM),
                }
            }
            _ => {
                if let Some(device) = device
                    && !machine.charge(device, bytes)
                {
                    return Err(CUresult::ERROR_OUT_OF_MEMORY);
                }
                let offset = arena
                    .offsets
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .take(bytes, 4096);
                let Some(offset) = offset else {
                    if let Some(device) = device {
                        machine.credit(device, bytes);
                    }
                    return Err(CUresult::ERROR_OUT_OF_MEMORY);
                };
                Backing::Arena(offset)
            }
        })
    }

    /// Memory behind a descriptor that another handle exported.
    pub(crate) fn import(
        machine: &'static Machine,
        arena: &'static Arena,
        object: Object,
        properties: CUmemAllocationProp,
    ) -> Arc<Self> {
        let (fd, device, bytes) = (object.fd(), object.device, object.bytes);
        note_object(fd);
        Arc::new(Self {
            machine,
            arena,
            backing: Backing::Object(Mutex::new(Some(object)), fd),
            device: (device != HOST_DEVICE).then_some(device),
            bytes,
            properties,
            charged: AtomicBool::new(true),
            handle: std::sync::OnceLock::new(),
            id: fresh_buffer_id(),
        })
    }

    /// Memory of another process, by legacy IPC.
    pub(crate) fn foreign(
        machine: &'static Machine,
        arena: &'static Arena,
        fd: OwnedFd,
        offset: u64,
        device: u32,
        bytes: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            machine,
            arena,
            backing: Backing::Foreign(fd, offset),
            device: Some(device),
            bytes,
            properties: CUmemAllocationProp::default(),
            charged: AtomicBool::new(true),
            handle: std::sync::OnceLock::new(),
            id: fresh_buffer_id(),
        })
    }

    /// What to map: a descriptor and an offset in it.
    pub(crate) fn pages(&self) -> (i32, u64) {
        match &self.backing {
            Backing::Arena(offset) => (self.arena.fd(), *offset),
            Backing::Object(_, fd) => (*fd, 0),
            Backing::Foreign(fd, offset) => (fd.as_raw_fd(), *offset),
        }
    }

    /// The descriptor to export, if it was made to be exported.
    pub(crate) fn exported_fd(&self) -> Option<i32> {
        match &self.backing {
            Backing::Object(_, fd) => Some(*fd),
            _ => None,
        }
    }

    /// The number of its object, by which another process of the machine finds it.
    pub(crate) fn object_id(&self) -> Option<u64> {
        match &self.backing {
            Backing::Object(object, _) => object
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .as_ref()
                .map(|object| object.id),
            _ => None,
        }
    }

    /// A descriptor of its pages with a position of its own, which stands at `offset` inside this memory: what stands for a dma-buf.
    pub(crate) fn buffer_fd(&self, offset: u64) -> io::Result<i32> {
        use std::os::fd::IntoRawFd;
        let (fd, start) = self.pages();
        let mut file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{fd}"))?;
        io::Seek::seek(&mut file, io::SeekFrom::Start(start + offset))?;
        Ok(file.into_raw_fd())
    }

    /// Whether its bytes are this process's own in the ledger.
    fn owes(&self) -> Option<u32> {
        match self.backing {
            Backing::Arena(_) => self.device,
            _ => None,
        }
    }

    /// Gives the bytes back to the device while the pages stay: what a checkpoint does. Returns what it gave back.
    pub(crate) fn park(&self) -> u64 {
        if let Backing::Object(object, _) = &self.backing {
            let object = object.lock().unwrap_or_else(PoisonError::into_inner);
            let parked = object
                .as_ref()
                .is_some_and(|object| self.machine.park_object(object));
            return if parked { self.bytes } else { 0 };
        }
        match self.owes() {
            Some(device) if self.charged.swap(false, Ordering::AcqRel) => {
                self.machine.credit(device, self.bytes);
                self.bytes
            }
            _ => 0,
        }
    }

    /// Takes the bytes again; `false` if there is no room.
    pub(crate) fn unpark(&self) -> bool {
        if let Backing::Object(object, _) = &self.backing {
            let object = object.lock().unwrap_or_else(PoisonError::into_inner);
            return object
                .as_ref()
                .is_none_or(|object| self.machine.unpark_object(object));
        }
        match self.owes() {
            Some(device) if !self.charged.load(Ordering::Acquire) => {
                let got = self.machine.charge(device, self.bytes);
                self.charged.store(got, Ordering::Release);
                got
            }
            _ => true,
        }
    }
}

impl Drop for Phys {
    fn drop(&mut self) {
        match &self.backing {
            Backing::Arena(offset) => {
                // SAFETY: the descriptor is open, and the span belonged to this memory alone.
                unsafe {
                    libc::fallocate(
                        self.arena.fd(),
                        libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                        *offset as i64,
                        self.bytes as i64,
                    )
                };
                self.arena
                    .offsets
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .give(*offset, self.bytes);
                if let Some(device) = self.device
                    && self.charged.load(Ordering::Acquire)
                {
                    self.machine.credit(device, self.bytes);
                }
            }
            Backing::Object(object, fd) => {
                forget_object(*fd);
                if let Some(object) = object.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    self.machine.release_object(object);
                }
            }
            Backing::Foreign(..) => {}
        }
    }
}
