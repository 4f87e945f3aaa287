//! Nothing is left behind: an interrupted suite removes its folder, and its processes end with it.

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null_mut;

/// The signals by which a person or a job system ends the suite.
fn signals() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: a place for the set, which sigemptyset initialises before sigaddset adds to it.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// From now on such a signal removes `folder` and ends this process. To be called before any thread is started.
pub(crate) fn on_signal_remove(folder: PathBuf) {
    let set = signals();
    // SAFETY: a valid set; no memory but it is involved. All threads that come later inherit the mask.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, null_mut()) };
    std::thread::spawn(move || {
        let mut signal = 0;
        // SAFETY: a valid set of blocked signals and a place for the one that came.
        if unsafe { libc::sigwait(&set, &mut signal) } == 0 {
            let _ = std::fs::remove_dir_all(&folder);
            std::process::exit(128 + signal);
        }
    });
}

/// The process of this command ends when the thread that starts it does, and hears signals as usual.
pub(crate) fn bound_to_us(command: &mut Command) -> &mut Command {
    let set = signals();
    // SAFETY: between fork and exec only two system calls are made, which are safe there; `set` is a copy of plain data.
    unsafe {
        command.pre_exec(move || {
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &set, null_mut());
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    }
}
