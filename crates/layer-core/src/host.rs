//! Arena segments in this process: `mmap`.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;

use ebb_device::{HostAddr, HostMemory};
use ebb_units::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Maps segments with `mmap`. Children of a fork do not inherit the mappings.
#[derive(Clone, Copy, Debug, Default)]
pub struct MmapHost;

impl HostMemory for MmapHost {
    fn map(&self, fd: BorrowedFd<'_>, bytes: u64) -> io::Result<HostAddr> {
        let len = Bytes(bytes).to_usize();
        // A segment shorter than it claims would kill the program with SIGBUS in the middle of a copy.
        if rustix::fs::fstat(fd)?.st_size < i64::try_from(bytes).unwrap_or(i64::MAX) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: a new mapping at an address of the kernel's choice: it replaces nothing.
        let at = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        // SAFETY: the range was mapped just now and nobody knows it yet; the advice changes what `fork` copies.
        // Without it (refused) a child maps the pages too, which costs nothing but address space.
        let _ = unsafe { rustix::mm::madvise(at, len, Advice::LinuxDontFork) };
        Ok(HostAddr(at.expose_provenance()))
    }

    fn unmap(&self, host: HostAddr, bytes: u64) -> io::Result<()> {
        let at = core::ptr::with_exposed_provenance_mut(host.0);
        // SAFETY: the range is a whole mapping made by `map` (the trait's contract), and the arena that owns it hands
        // out no piece of it any more. No Rust reference into it is ever made: only the device reads and writes it.
        Ok(unsafe { rustix::mm::munmap(at, Bytes(bytes).to_usize()) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_segment_is_mapped_and_a_short_one_refused() {
        let fd = rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let at = MmapHost.map(fd.as_fd(), 8192).unwrap();
        assert!(at.0 != 0);
        MmapHost.unmap(at, 8192).unwrap();
        assert_eq!(
            MmapHost.map(fd.as_fd(), 16384).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}
