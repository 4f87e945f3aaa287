//! The unsafe corner: the few system calls that `rustix` does not wrap, or that hand out raw memory.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Who is at the other end of a socket, as the kernel saw it when the peer connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Process id in the daemon's own pid namespace; 0 if the peer is not visible from here.
    pub pid: u32,
    pub uid: u32,
    pub gid: u32,
}

/// `SO_PEERCRED`. Read here rather than through `rustix`, whose type cannot hold the pid 0 of an invisible peer.
pub(crate) fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut cred = MaybeUninit::<libc::ucred>::zeroed();
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `getsockopt` writes at most `length` bytes to a valid, writable `ucred`, and the descriptor is open
    // for as long as `socket` is borrowed.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            cred.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all bytes are initialised (to zero, then by the kernel), and every bit pattern is a `ucred`.
    let cred = unsafe { cred.assume_init() };
    Ok(Peer {
        pid: cred.pid.cast_unsigned(),
        uid: cred.uid,
        gid: cred.gid,
    })
}

/// A pidfd of the peer itself, free of the race with a reused pid. `None` on kernels before 6.5.
pub(crate) fn peer_pidfd(socket: impl AsFd) -> Option<OwnedFd> {
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `getsockopt` writes one `int` to a valid, writable `int`; the descriptor is open while borrowed.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    // SAFETY: on success the kernel has installed a new descriptor that nobody else owns.
    (result == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Blocks these signals in the calling thread and those that it starts from now on, and returns a descriptor that
/// reads them.
pub(crate) fn signals(numbers: &[libc::c_int]) -> io::Result<OwnedFd> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set that the following calls change and read; the pointers are valid for
    // each call. `pthread_sigmask` touches only the calling thread's mask.
    let fd = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for number in numbers {
            libc::sigaddset(set.as_mut_ptr(), *number);
        }
        if libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) != 0 {
            return Err(io::Error::other("the signal mask cannot be set"));
        }
        libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The signal that a descriptor from [`signals`] has to tell, if any.
pub(crate) fn next_signal(fd: impl AsFd) -> Option<i32> {
    next_signal_with_code(fd).map(|(number, _)| number)
}

/// The same with the code that says who sent it.
pub(crate) fn next_signal_with_code(fd: impl AsFd) -> Option<(i32, i32)> {
    let mut info = [0; size_of::<libc::signalfd_siginfo>()];
    let read = rustix::io::read(fd, &mut info).ok()?;
    let number = |at: usize| i32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    // The number is the first field, the code the third.
    (read == info.len()).then(|| (number(0), number(8)))
}

/// Has a program that is started not be deaf for these signals because this process is.
pub(crate) fn unblocked(command: &mut Command, numbers: Vec<libc::c_int>) -> &mut Command {
    // SAFETY: what runs between `fork` and `exec` may only be what a signal handler may do: `sigemptyset`, `sigaddset` and
    // `pthread_sigmask` are; the list was made before, is only read, and nothing is allocated or freed there.
    unsafe {
        command.pre_exec(move || {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigemptyset(set.as_mut_ptr());
            for number in &numbers {
                libc::sigaddset(set.as_mut_ptr(), *number);
            }
            match libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut()) {
                0 => Ok(()),
                error => Err(io::Error::from_raw_os_error(error)),
            }
        })
    }
}

/// Faults in all pages of a memory file, in huge pages where the system allows, so that nobody waits for them later.
///
/// Nothing is dereferenced here: the kernel populates the mapping, and reports a shortage as an error instead of a
/// signal.
pub(crate) fn populate(memory: impl AsFd, bytes: usize) -> Result<(), Errno> {
    // SAFETY: a new shared mapping at an address of the kernel's choice overlaps nothing of ours.
    let address = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            &memory,
            0,
        )?
    };
    // SAFETY: the range is exactly the mapping made above; both pieces of advice change how it is backed and never
    // what is in it.
    let result = unsafe {
        // Refused where huge pages for shared memory are off: then small ones do.
        let _ = rustix::mm::madvise(address, bytes, Advice::LinuxHugepage);
        rustix::io::retry_on_intr(|| rustix::mm::madvise(address, bytes, Advice::LinuxPopulateWrite))
    };
    // SAFETY: the range is exactly the mapping made above, and no reference into it exists.
    let _ = unsafe { rustix::mm::munmap(address, bytes) };
    result
}

/// A memory file in this process, to be written.
#[derive(Debug)]
pub(crate) struct Window {
    at: *mut core::ffi::c_void,
    len: usize,
}

impl Window {
    /// Maps it. Nobody else should have the file who could take pages away that are there.
    pub(crate) fn new(memory: impl AsFd, bytes: u64) -> Result<Self, Errno> {
        let len = usize::try_from(bytes).map_err(|_| Errno::NOMEM)?;
        // SAFETY: a new shared mapping at an address of the kernel's choice overlaps nothing of ours.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &memory,
                0,
            )?
        };
        // SAFETY: the range is exactly the mapping made above; the advice changes how it is backed and never what is in it.
        // Refused where huge pages for shared memory are off: then small ones do.
        let _ = unsafe { rustix::mm::madvise(at, len, Advice::LinuxHugepage) };
        Ok(Self { at, len })
    }

    /// Gives a part of it its pages. A shortage is an error here and would be a signal later.
    pub(crate) fn populate(&self, at: u64, len: usize) -> Result<(), Errno> {
        const PAGE: usize = 4096;
        let at = usize::try_from(at).map_err(|_| Errno::OVERFLOW)?;
        let end = at
            .checked_add(len)
            .filter(|end| *end <= self.len)
            .ok_or(Errno::OVERFLOW)?;
        let at = at - at % PAGE;
        // SAFETY: the range lies inside the mapping made in `new`, which lives as long as `self`; the advice makes pages and
        // changes nothing that is in them.
        rustix::io::retry_on_intr(|| unsafe {
            rustix::mm::madvise(
                self.at.cast::<u8>().add(at).cast(),
                end - at,
                Advice::LinuxPopulateWrite,
            )
        })
    }

    /// A part of it that has its pages, for the kernel to write. Whoever hands it over sees to it that `self` lives until that has ended.
    pub(crate) fn place(&self, at: u64, len: usize) -> Result<*mut u8, Errno> {
        let at = usize::try_from(at)
            .ok()
            .filter(|at| at.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: `add` needs to stay inside one object: the mapping made in `new`, inside which the part lies.
        Ok(unsafe { self.at.cast::<u8>().add(at.ok_or(Errno::OVERFLOW)?) })
    }

    /// Looks at a part of it that has its pages and that nobody writes at this moment: the kernel has ended, and the file is nobody else's yet.
    pub(crate) fn look<T>(&self, at: u64, len: usize, look: impl FnOnce(&[u8]) -> T) -> Result<T, Errno> {
        let place = self.place(at, len)?;
        // SAFETY: `from_raw_parts` needs readable memory that nobody writes while the slice lives: it lies inside the mapping made in
        // `new`, which lives as long as `self`, and that nobody writes is the caller's contract.
        Ok(look(unsafe { std::slice::from_raw_parts(place, len) }))
    }

    /// Copies bytes to a place in it that has its pages.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        let at = usize::try_from(at)
            .ok()
            .filter(|at| at.checked_add(bytes.len()).is_some_and(|end| end <= self.len));
        let at = at.ok_or(Errno::OVERFLOW)?;
        // SAFETY: `copy_nonoverlapping` needs both ranges valid and apart: the target lies inside the mapping made in
        // `new`, which lives as long as `self` and to which no reference exists outside `look`; the source is a slice elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at.cast::<u8>().add(at), bytes.len()) };
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the range is exactly the mapping made in `new`, and no reference into it exists.
        let _ = unsafe { rustix::mm::munmap(self.at, self.len) };
    }
}

/// A write beyond the limit on the size of files is an error and not the daemon's end.
pub(crate) fn ignore_file_size_signal() {
    // SAFETY: `signal` with `SIG_IGN` installs no code, for a signal that nothing in this process handles.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = peer(&a).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        assert_eq!(peer.gid, rustix::process::getgid().as_raw());
    }

    #[test]
    fn populated_memory_is_there_and_zero() {
        let memory = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 4 << 20).unwrap();
        match populate(&memory, 4 << 20) {
            Ok(()) => assert_eq!(rustix::fs::fstat(&memory).unwrap().st_blocks * 512, 4 << 20),
            // Kernels before 5.14.
            Err(e) => assert_eq!(e, Errno::INVAL),
        }
        let mut byte = [1];
        assert_eq!(rustix::io::pread(&memory, &mut byte, (4 << 20) - 1), Ok(1));
        assert_eq!(byte, [0]);
    }
}
