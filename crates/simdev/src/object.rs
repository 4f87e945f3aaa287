//! Objects: memory that was made to be exported, and may outlive the process that made it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use crate::file::{HOST_DEVICE, MAX_OBJECTS};
use crate::machine::{Ledger, Machine};

/// The device of an object whose bytes a checkpoint moved to the host.
const PARKED: u32 = u32::MAX;

/// One holder's grip on an object: an open file whose shared lock keeps the object alive.
///
/// Holding one tells you that the object's bytes are charged and its pages are there. Duplicates of its descriptor, in this
/// or any other process or in flight on a socket, keep it alive too.
#[derive(Debug)]
pub struct Object {
    file: File,
    /// Which object.
    pub id: u64,
    /// The physical index of its device.
    pub device: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// What its maker asked for besides; the driver's business.
    pub flags: u64,
}

impl Object {
    /// The descriptor to map, duplicate and export.
    #[must_use]
    pub fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}

impl Machine {
    fn object_path(&self, id: u64) -> PathBuf {
        self.config().dir.join(format!("object-{id}"))
    }

    /// Makes an object of `bytes` on a device ([`HOST_DEVICE`]: of the host); `Ok(None)` if there is no room.
    ///
    /// # Errors
    /// The state folder could not hold it, or the table is full.
    pub fn create_object(&self, device: u32, bytes: u64, flags: u64) -> io::Result<Option<Object>> {
        if self.own_slot().is_none() {
            return Ok(None);
        }
        let ledger = self.ledger();
        if device != HOST_DEVICE && !self.has_room(&ledger, device, bytes) {
            return Ok(None);
        }
        let rows = &self.file().object;
        let index = rows
            .iter()
            .position(|row| row.id.load(Ordering::Acquire) == 0)
            .ok_or_else(|| io::Error::other("too many exportable allocations"))?;
        let id = self.file().next_object.fetch_add(1, Ordering::AcqRel);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC)
            .open(self.object_path(id))?;
        lock_shared(&file)?;
        file.set_len(bytes)?;
        let row = &rows[index];
        row.bytes.store(bytes, Ordering::Release);
        row.device.store(device, Ordering::Release);
        row.flags.store(flags, Ordering::Release);
        row.creator_pid.store(std::process::id(), Ordering::Release);
        self.file()
            .objects_used
            .fetch_max(index as u32 + 1, Ordering::AcqRel);
        // From here on the object counts; before, a death leaves an empty file that the next reaping removes.
        row.id.store(id, Ordering::Release);
        Ok(Some(Object {
            file,
            id,
            device,
            bytes,
            flags,
        }))
    }

    /// Takes a grip on the object behind a descriptor that someone exported.
    ///
    /// # Errors
    /// The descriptor is not an object of this machine.
    pub fn import_object(&self, fd: i32) -> io::Result<Object> {
        // A description of our own: the exporter's may be closed at any time, and a lock belongs to a description.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(format!("/proc/self/fd/{fd}"))?;
        let ledger = self.ledger();
        lock_shared(&file)?;
        let meta = file.metadata()?;
        for row in self.object_rows(&ledger) {
            let id = row.id.load(Ordering::Acquire);
            if id == 0 {
                continue;
            }
            let same = std::fs::metadata(self.object_path(id))
                .is_ok_and(|found| found.ino() == meta.ino() && found.dev() == meta.dev());
            if same {
                let device = row.device.load(Ordering::Acquire);
                return Ok(Object {
                    file,
                    id,
                    device,
                    bytes: row.bytes.load(Ordering::Acquire),
                    flags: row.flags.load(Ordering::Acquire),
                });
            }
        }
        Err(io::Error::from(io::ErrorKind::InvalidInput))
    }

    /// Takes a grip on an object by its number, which another process told: what an allocation of a shared pool is named by.
    ///
    /// # Errors
    /// There is no such object (any more).
    pub fn open_object(&self, id: u64) -> io::Result<Object> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(self.object_path(id))?;
        self.import_object(file.as_raw_fd())
    }

    /// Lets go of an object; its bytes come back when nobody else holds it.
    pub fn release_object(&self, object: Object) {
        let ledger = self.ledger();
        let id = object.id;
        drop(object);
        // Only this one: a program may have thousands. Those of dead processes are looked for when room is needed.
        for row in self.object_rows(&ledger) {
            if row.id.load(Ordering::Acquire) == id {
                self.reap(row);
            }
        }
    }

    /// Gives an object's bytes back to its device while its pages stay: what a checkpoint does. `false` if they were not
    /// there.
    pub fn park_object(&self, object: &Object) -> bool {
        let ledger = self.ledger();
        self.object_rows(&ledger)
            .iter()
            .find(|row| row.id.load(Ordering::Acquire) == object.id)
            .is_some_and(|row| row.device.swap(PARKED, Ordering::AcqRel) != PARKED)
    }

    /// Takes the bytes again; `false` if there is no room.
    pub fn unpark_object(&self, object: &Object) -> bool {
        let ledger = self.ledger();
        let room = self.has_room(&ledger, object.device, object.bytes);
        let row = self
            .object_rows(&ledger)
            .iter()
            .find(|row| row.id.load(Ordering::Acquire) == object.id);
        match row {
            Some(row) if row.device.load(Ordering::Acquire) == PARKED => {
                if room {
                    row.device.store(object.device, Ordering::Release);
                }
                room
            }
            _ => true,
        }
    }

    fn object_rows(&self, _ledger: &Ledger<'_>) -> &'static [crate::file::ObjectRow] {
        let used = (self.file().objects_used.load(Ordering::Acquire) as usize).min(MAX_OBJECTS);
        &self.file().object[..used]
    }

    /// The bytes of a device that objects hold.
    pub(crate) fn object_bytes(&self, ledger: &Ledger<'_>, device: u32) -> u64 {
        self.object_rows(ledger)
            .iter()
            .filter(|row| row.id.load(Ordering::Acquire) != 0 && row.device.load(Ordering::Acquire) == device)
            .map(|row| row.bytes.load(Ordering::Acquire))
            .sum()
    }

    /// The bytes of a device in objects that this process made.
    pub(crate) fn objects_of(&self, ledger: &Ledger<'_>, device: u32, pid: u32) -> u64 {
        self.object_rows(ledger)
            .iter()
            .filter(|row| {
                row.id.load(Ordering::Acquire) != 0
                    && row.device.load(Ordering::Acquire) == device
                    && row.creator_pid.load(Ordering::Acquire) == pid
            })
            .map(|row| row.bytes.load(Ordering::Acquire))
            .sum()
    }

    /// Drops the objects that nobody holds any more.
    pub(crate) fn reap_objects(&self, ledger: &Ledger<'_>) {
        for row in self.object_rows(ledger) {
            self.reap(row);
        }
    }

    /// Drops an object if nobody holds it any more.
    fn reap(&self, row: &crate::file::ObjectRow) {
        let id = row.id.load(Ordering::Acquire);
        if id == 0 {
            return;
        }
        let path = self.object_path(id);
        let Ok(file) = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_CLOEXEC)
            .open(&path)
        else {
            row.id.store(0, Ordering::Release);
            return;
        };
        // SAFETY: the descriptor is open for the whole call.
        let rc = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
        if rc == 0 {
            let _ = std::fs::remove_file(&path);
            row.id.store(0, Ordering::Release);
        }
    }
}

fn lock_shared(file: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open for the whole call.
    let rc = unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_SH) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
