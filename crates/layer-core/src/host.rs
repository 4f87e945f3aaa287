//! Arena segments in this process: `mmap`.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;

use ebb_device::{HostAddr, HostMemory};
use ebb_units::Bytes;
use rustix::fs::SealFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Maps segments with `mmap`. Children of a fork do not inherit the mappings.
#[derive(Clone, Copy, Debug, Default)]
pub struct MmapHost;

impl MmapHost {
    fn map_with(fd: BorrowedFd<'_>, bytes: u64, protection: ProtFlags) -> io::Result<HostAddr> {
        let len = Bytes(bytes).to_usize();
        // A segment shorter than it claims would kill the program with SIGBUS in the middle of a copy.
        if rustix::fs::fstat(fd)?.st_size < i64::try_from(bytes).unwrap_or(i64::MAX) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: a new mapping at an address of the kernel's choice: it replaces nothing.
        let at =
            unsafe { rustix::mm::mmap(core::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        // SAFETY: the range was mapped just now and nobody knows it yet; the advice changes what `fork` copies.
        // Without it (refused) a child maps the pages too, which costs nothing but address space.
        let _ = unsafe { rustix::mm::madvise(at, len, Advice::LinuxDontFork) };
        Ok(HostAddr(at.expose_provenance()))
    }
}

impl HostMemory for MmapHost {
    fn map(&self, fd: BorrowedFd<'_>, bytes: u64) -> io::Result<HostAddr> {
        Self::map_with(fd, bytes, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map_read_only(&self, fd: BorrowedFd<'_>, bytes: u64) -> io::Result<HostAddr> {
        // The kernel refuses a mapping that could be written, if the file is sealed. Of one that is not, another process could change the
        // bytes that two tasks live by.
        let seals = rustix::fs::fcntl_get_seals(fd)?;
        if !seals.contains(SealFlags::WRITE | SealFlags::SHRINK) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Self::map_with(fd, bytes, ProtFlags::READ)
    }

    fn copy(&self, to: HostAddr, from: HostAddr, bytes: Bytes) {
        let to: *mut u8 = core::ptr::with_exposed_provenance_mut(to.0);
        let from: *const u8 = core::ptr::with_exposed_provenance(from.0);
        // SAFETY: both ranges lie in mappings made by `map`, do not overlap and stay mapped (the trait's contract). No Rust reference into
        // either is ever made. Another process that writes its segment meanwhile changes which bytes are copied, which is its own affair: they
        // are not looked at here.
        unsafe { stream(to, from, bytes.to_usize()) };
    }

    fn unmap(&self, host: HostAddr, bytes: u64) -> io::Result<()> {
        let at = core::ptr::with_exposed_provenance_mut(host.0);
        // SAFETY: the range is a whole mapping made by `map` (the trait's contract), and the arena that owns it hands
        // out no piece of it any more. No Rust reference into it is ever made: only the device reads and writes it.
        Ok(unsafe { rustix::mm::munmap(at, Bytes(bytes).to_usize()) }?)
    }
}

/// Copies past the caches: what was copied is read by the copy engine next, or not for long, and a store that fetches its line first
/// costs the memory half as much again.
///
/// # Safety
/// Both ranges are valid for so many bytes and do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(to: *mut u8, from: *const u8, len: usize) {
    use core::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    // To a border of 16 bytes; segments and slots begin at pages, so that this is nothing.
    let head = to.align_offset(16).min(len);
    let lines = (len - head) / 64;
    // SAFETY: every access lies within the two ranges, and what is streamed to is aligned: `head` is the way to the border, and each step is 64.
    // Every processor of this architecture has these instructions.
    unsafe {
        core::ptr::copy_nonoverlapping(from, to, head);
        let (mut source, mut target) = (from.add(head), to.add(head));
        for _ in 0..lines {
            let [a, b, c, d] = [0, 1, 2, 3].map(|at| _mm_loadu_si128(source.cast::<__m128i>().add(at)));
            let line = target.cast::<__m128i>();
            _mm_stream_si128(line, a);
            _mm_stream_si128(line.add(1), b);
            _mm_stream_si128(line.add(2), c);
            _mm_stream_si128(line.add(3), d);
            (source, target) = (source.add(64), target.add(64));
        }
        core::ptr::copy_nonoverlapping(source, target, len - head - lines * 64);
        // The engine, and other threads, are told of the bytes only after they can see them.
        _mm_sfence();
    }
}

/// As above.
///
/// # Safety
/// Both ranges are valid for so many bytes and do not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn bytes_are_copied_to_the_last_one_wherever_they_begin() {
        let fd = rustix::fs::memfd_create("segment", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 65536).unwrap();
        let at = MmapHost.map(fd.as_fd(), 65536).unwrap();
        let mut all: Vec<u8> = (0..65536u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        rustix::io::pwrite(&fd, &all, 0).unwrap();
        for (to, from, len) in [
            (0, 32768, 32768),
            (3, 40000, 0),
            (17, 40001, 1),
            (1000, 33003, 4095),
            (63, 50000, 129),
            (16, 60000, 64),
        ] {
            MmapHost.copy(at.offset(to), at.offset(from), Bytes(len));
            let range = |at: u64| usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap();
            let copy = all[range(from)].to_vec();
            all[range(to)].copy_from_slice(&copy);
            let mut now = vec![0; all.len()];
            rustix::io::pread(&fd, &mut now, 0).unwrap();
            assert!(now == all, "{len} bytes from {from} to {to}");
        }
        MmapHost.unmap(at, 65536).unwrap();
    }

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
