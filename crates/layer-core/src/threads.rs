//! Threads of this library in somebody else's program.
//!
//! They take no signals. A signal to the process goes to any thread that does not block it: on one of ours a handler of the program would
//! run where it must not call the driver (the owner opens the gate at which that call would wait), and a signal that the program's own
//! threads all block, to read it by `sigwait` or a descriptor, would end the process.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::thread::{Builder, JoinHandle};

/// Starts a thread that blocks every signal.
///
/// # Errors
/// The system's, if there is no thread to be had.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A thread begins with the mask of the one that makes it. To block them in the thread itself would be too late.
    let before = block_all();
    let spawned = Builder::new().name(name.into()).spawn(work);
    if let Some(before) = before {
        set(&before);
    }
    spawned
}

/// Blocks all signals of the calling thread; the mask that it had.
fn block_all() -> Option<libc::sigset_t> {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: `sigfillset` makes the set that `pthread_sigmask` reads, which writes the old one to a valid place. Only the calling
    // thread's mask changes.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        let result = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        (result == 0).then(|| before.assume_init())
    }
}

fn set(mask: &libc::sigset_t) {
    // SAFETY: a mask that the kernel gave; the old one is not wanted. Only the calling thread's mask changes.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(signal: libc::c_int) -> bool {
        let mut now = MaybeUninit::uninit();
        // SAFETY: no new mask is set, and the present one is written to a valid place, which `sigismember` reads.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), now.as_mut_ptr());
            libc::sigismember(now.as_ptr(), signal) == 1
        }
    }

    #[test]
    fn signals_are_for_the_programs_threads() {
        let signals = [libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM, libc::SIGRTMIN()];
        let inside = spawn("ebb-test", move || signals.map(blocks)).unwrap();
        assert_eq!(inside.join().unwrap(), [true; 4]);
        assert_eq!(
            signals.map(blocks),
            [false; 4],
            "the program's thread is as it was"
        );
    }
}
