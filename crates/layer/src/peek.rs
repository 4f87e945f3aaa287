//! Lists of the program, read before the driver has said whether they can be read.
//!
//! A call may be wrong in several ways at once, and the driver may refuse it before it looks at a list that is as long as a mistake says, or lies
//! nowhere. Reading it ourselves would end the program where it gets an error code without us. The kernel reads without
//! that risk.

use core::ffi::c_void;

/// No list of the driver's functions is longer: these are devices, places and mappings.
const MOST: usize = 1 << 20;

/// A copy of a list; `None` if it cannot be read, or is longer than any.
///
/// # Safety
/// Any bytes are a `T`. If the kernel refuses to look, the list must be one that the driver is about to read.
pub(crate) unsafe fn list<T: Copy>(from: *const T, count: usize) -> Option<Vec<T>> {
    if count == 0 || from.is_null() || count > MOST || !from.is_aligned() {
        return (count == 0).then(Vec::new);
    }
    let mut copy: Vec<T> = Vec::new();
    copy.try_reserve_exact(count).ok()?;
    let bytes = count * size_of::<T>();
    let to = libc::iovec {
        iov_base: copy.as_mut_ptr().cast(),
        iov_len: bytes,
    };
    let from_here = libc::iovec {
        iov_base: from.cast_mut().cast::<c_void>(),
        iov_len: bytes,
    };
    // SAFETY: `to` is memory of ours of that size; the kernel checks the other side and reads it.
    // By its number: the function is younger than some C libraries.
    let read = unsafe {
        libc::syscall(
            libc::SYS_process_vm_readv,
            libc::getpid(),
            &raw const to,
            1usize,
            &raw const from_here,
            1usize,
            0usize,
        )
    };
    match usize::try_from(read) {
        Ok(read) if read == bytes => {}
        Ok(_) => return None,
        Err(_) => {
            let error = std::io::Error::last_os_error().raw_os_error();
            if error == Some(libc::EFAULT) {
                return None;
            }
            // Not allowed here (a filter of system calls): as the driver will.
            // SAFETY: the caller's promise.
            unsafe { core::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), count) };
        }
    }
    // SAFETY: all of them are written, and any bytes are a `T`.
    unsafe { copy.set_len(count) };
    Some(copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_read_is_and_what_cannot_is_not() {
        let three = [1u64, 2, 3];
        // SAFETY: any bytes are a number; the kernel may look in tests.
        let read = |from: *const u64, count| unsafe { list(from, count) };
        assert_eq!(read(three.as_ptr(), 3).unwrap(), three);
        assert_eq!(read(core::ptr::null(), 0).unwrap(), [0u64; 0]);
        assert!(read(core::ptr::null(), 1).is_none());
        assert!(read(core::ptr::without_provenance(16), 2).is_none());
        assert!(read(core::ptr::without_provenance(17), 2).is_none());
        assert!(read(three.as_ptr(), usize::MAX).is_none());
        assert!(read(three.as_ptr(), MOST + 1).is_none());
    }

    #[test]
    fn a_list_that_ends_before_its_end_is_not_read() {
        const PAGE: usize = 4096;
        // SAFETY: a new mapping, wherever there is room.
        let pages = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                2 * PAGE,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(pages, libc::MAP_FAILED);
        // SAFETY: the second page of the mapping, which nothing uses.
        assert_eq!(unsafe { libc::munmap(pages.byte_add(PAGE), PAGE) }, 0);
        // SAFETY: any bytes are a number; the kernel may look in tests.
        unsafe {
            assert_eq!(list::<u64>(pages.cast(), PAGE / 8).unwrap().len(), PAGE / 8);
            assert!(list::<u64>(pages.cast(), PAGE / 8 + 1).is_none());
            libc::munmap(pages, PAGE);
        }
    }
}
