//! Whether the engine runs in *this* process: what every hook asks first.
//!
//! The answer lies in a page that the kernel empties in the child of a fork. A handler of ours (`fork.rs`) would come too late: in the child
//! handlers run in the order in which they were registered, and the program's may use the driver before; a fork by the bare system call runs none. Such
//! a call would wait for a lock that another thread held in the parent, and that nobody in the child lets go.
//! Kernels before 4.14 have no such pages. There the handler has to do.

use core::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Where the answer is; null until the engine runs.
static PLACE: AtomicPtr<AtomicBool> = AtomicPtr::new(core::ptr::null_mut());

const PAGE: usize = 1 << 16;
const MADV_WIPEONFORK: c_int = 18;

#[inline(always)]
fn place() -> Option<&'static AtomicBool> {
    // SAFETY: null, a static, or the start of a page that is never unmapped: zeroes or what was stored there, which are valid.
    unsafe { PLACE.load(Ordering::Acquire).as_ref() }
}

/// Whether the engine runs.
#[inline(always)]
pub(crate) fn is_running() -> bool {
    place().is_some_and(|running| running.load(Ordering::Relaxed))
}

/// Whether this is a child of a process in which it runs.
pub(crate) fn is_child() -> bool {
    place().is_some_and(|running| !running.load(Ordering::SeqCst))
}

/// It runs from now on.
pub(crate) fn begins() {
    let place = wiped_in_children().unwrap_or_else(|| {
        static PLAIN: AtomicBool = AtomicBool::new(false);
        core::ptr::from_ref(&PLAIN).cast_mut()
    });
    // SAFETY: a static, or a page of zeroes that was mapped just now.
    unsafe { &*place }.store(true, Ordering::SeqCst);
    PLACE.store(place, Ordering::Release);
}

/// In the child of a fork. Takes no lock.
pub(crate) fn ends() {
    if let Some(running) = place() {
        running.store(false, Ordering::SeqCst);
    }
}

fn wiped_in_children() -> Option<*mut AtomicBool> {
    let (access, kind) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    );
    // SAFETY: a new mapping at an address of the kernel's choice: it replaces nothing.
    let page = unsafe { libc::mmap(core::ptr::null_mut(), PAGE, access, kind, -1, 0) };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping just made, which nobody else knows.
    let advised = unsafe { libc::madvise(page, PAGE, MADV_WIPEONFORK) };
    // A page that is not emptied is of no use, and of no harm.
    (advised == 0).then(|| page.cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No handler runs in a child that is made by the system call itself.
    #[test]
    fn a_child_knows_before_any_handler_runs() {
        begins();
        assert!(is_running() && !is_child());
        // SAFETY: no arguments; the child reads two atomics and ends.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            let status = i32::from(is_running()) + 2 * i32::from(!is_child());
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: waits for the child just made; `status` is a live integer.
        let waited = unsafe { libc::waitpid(libc::pid_t::try_from(child).unwrap_or(-1), &raw mut status, 0) };
        assert!(waited > 0 && status == 0, "the child ended with {status:#x}");
        assert!(is_running(), "the parent goes on");
        ends();
        assert!(!is_running() && is_child());
    }
}
