//! Host memory that only fake devices can reach.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_units::Bytes;

use crate::{HostAddr, HostMemory};

/// Host segments as vectors. An address says where in which; unmapped ones are gone for good, and their addresses are
/// not used again. What is mapped from a file is read from it, and written to it when it is unmapped: whoever maps it
/// next finds it.
#[derive(Debug)]
pub struct FakeHost(Mutex<Segments>);

#[derive(Debug)]
struct Segments {
    next: usize,
    live: BTreeMap<usize, Vec<u8>>,
    files: BTreeMap<usize, File>,
    /// Those that nobody may write: what was in them.
    read_only: BTreeMap<usize, Vec<u8>>,
}

impl Default for FakeHost {
    fn default() -> Self {
        Self(Mutex::new(Segments {
            next: 0x10_0000,
            live: BTreeMap::new(),
            files: BTreeMap::new(),
            read_only: BTreeMap::new(),
        }))
    }
}

impl FakeHost {
    fn lock(&self) -> MutexGuard<'_, Segments> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new segment, filled with garbage.
    #[must_use]
    pub fn segment(&self, bytes: u64) -> HostAddr {
        let mut host = self.lock();
        let at = host.next;
        let len = usize::try_from(bytes).expect("test segments are small");
        // A gap behind it: a copy that runs over the end must not land in the next one.
        host.next += len.next_multiple_of(0x1000) + 0x10_0000;
        host.live.insert(at, vec![0xAA; len]);
        HostAddr(at)
    }

    /// Drops all segments: for the end of a test whose engine keeps this for ever.
    pub fn clear(&self) {
        let mut host = self.lock();
        host.live.clear();
        host.files.clear();
        host.read_only.clear();
    }

    /// Segments mapped at present.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.lock().live.len()
    }

    /// Runs `with` on host bytes, if they lie inside one segment.
    pub fn bytes<T>(&self, at: HostAddr, len: u64, with: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let mut host = self.lock();
        let (start, segment) = host.live.range_mut(..=at.0).next_back()?;
        let from = at.0 - start;
        let to = from.checked_add(usize::try_from(len).ok()?)?;
        segment.get_mut(from..to).map(with)
    }
}

impl HostMemory for FakeHost {
    fn map(&self, fd: BorrowedFd<'_>, bytes: u64) -> io::Result<HostAddr> {
        let file = File::from(fd.try_clone_to_owned()?);
        let at = self.segment(bytes);
        let mut host = self.lock();
        let segment = host.live.entry(at.0).or_default();
        if file.read_exact_at(segment, 0).is_ok() {
            host.files.insert(at.0, file);
        }
        Ok(at)
    }

    fn map_read_only(&self, fd: BorrowedFd<'_>, bytes: u64) -> io::Result<HostAddr> {
        let file = File::from(fd.try_clone_to_owned()?);
        let at = self.segment(bytes);
        let mut host = self.lock();
        let segment = host.live.entry(at.0).or_default();
        file.read_exact_at(segment, 0)?;
        let found = segment.clone();
        host.read_only.insert(at.0, found);
        Ok(at)
    }

    fn copy(&self, to: HostAddr, from: HostAddr, bytes: Bytes) {
        // What lies in no segment is not copied: the contents show it.
        if let Some(copy) = self.bytes(from, bytes.0, |source| source.to_vec()) {
            self.bytes(to, bytes.0, |target| target.copy_from_slice(&copy));
        }
    }

    fn unmap(&self, host: HostAddr, bytes: u64) -> io::Result<()> {
        let mut segments = self.lock();
        match segments.live.get(&host.0) {
            Some(segment) if segment.len() as u64 == bytes => {
                let segment = segments.live.remove(&host.0);
                let before = segments.read_only.remove(&host.0);
                assert!(
                    before.is_none() || before == segment,
                    "somebody wrote what can only be read"
                );
                match (segments.files.remove(&host.0), segment) {
                    (Some(file), Some(segment)) => file.write_all_at(&segment, 0),
                    _ => Ok(()),
                }
            }
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}
