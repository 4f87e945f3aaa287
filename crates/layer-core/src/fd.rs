//! Descriptors inside somebody else's program.
//!
//! Programs close descriptors that they do not know (`closefrom`, daemons, `subprocess`) and open files of their own,
//! which get the same numbers. So a number alone proves nothing: each descriptor of this library is kept together with
//! the inode it was opened for, and looked at before every use. One that is not ours any more is forgotten and never
//! closed. They also live at high numbers, where few programs look and `select` of theirs needs no room.
//!
//! Between the look and the use another thread may still close and open. What this library does with a descriptor is
//! chosen so that even then no file is written: it sends (which only sockets take), receives, polls, and maps with a
//! second look afterwards.
//!
//! Only descriptors with an inode of their own can be told apart: sockets and memfds, but no eventfd (all of them share
//! one inode).

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// Where our descriptors live if the program's limits allow it: below 1,024, the usual limit.
const HIGH: RawFd = 700;

/// What [`widen_descriptor_table`] asks for: a little more than this library needs.
const HIGHEST: RawFd = 1_000;

/// Makes room for the high descriptors while the process has one thread, which costs nothing. In any other the kernel waits for a grace
/// period of all its processors, 5 to 30 ms, whenever the table grows; then it is left to the thread that needs the first of them.
pub fn widen_descriptor_table() {
    // Two links of a folder's own, and one for each thread.
    let single = rustix::fs::stat(c"/proc/self/task").is_ok_and(|folder| folder.st_nlink == 3);
    if single {
        // Closed again at once; a program's lower limit refuses it.
        let _ = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), HIGHEST);
    }
}

/// What an open file is. While one descriptor or mapping of it is left, no other file has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    dev: u64,
    ino: u64,
}

impl Identity {
    fn of(fd: BorrowedFd<'_>) -> Option<Self> {
        let stat = rustix::fs::fstat(fd).ok()?;
        Some(Self {
            dev: stat.st_dev,
            ino: stat.st_ino,
        })
    }
}

/// A descriptor that may stop being ours at any time.
#[derive(Debug)]
pub(crate) struct OurFd {
    /// `None` if it was lost before anybody looked.
    fd: Option<(OwnedFd, Identity)>,
}

impl OurFd {
    /// Takes a descriptor that was made just now and moves it out of the program's way.
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let Some(identity) = Identity::of(fd.as_fd()) else {
            let _ = fd.into_raw_fd();
            return Self { fd: None };
        };
        let low = Self {
            fd: Some((fd, identity)),
        };
        let high = low
            .get()
            .and_then(|fd| rustix::io::fcntl_dupfd_cloexec(fd, HIGH).ok());
        match high {
            // The duplicate is of whatever had the number by then, hence the second look.
            Some(high) => Self {
                fd: (Identity::of(high.as_fd()) == Some(identity)).then_some((high, identity)),
            },
            None => low,
        }
    }

    /// One that was never there.
    pub(crate) fn none() -> Self {
        Self { fd: None }
    }

    /// The descriptor for one use now, if it is still ours.
    pub(crate) fn get(&self) -> Option<BorrowedFd<'_>> {
        let (fd, identity) = self.fd.as_ref()?;
        (Identity::of(fd.as_fd()) == Some(*identity)).then_some(fd.as_fd())
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.get().is_some()
    }
}

impl Drop for OurFd {
    fn drop(&mut self) {
        let ours = self.is_ours();
        if let Some((fd, _)) = self.fd.take()
            && !ours
        {
            // Nothing has this number, or the program has: not ours to close.
            let _ = fd.into_raw_fd();
        }
    }
}

const FREE: RawFd = -1;
/// Somebody writes the identity.
const TAKEN: RawFd = -2;

/// A descriptor once more, where a forked child finds it without a lock.
#[derive(Debug)]
pub(crate) struct ChildSlot {
    fd: AtomicI32,
    dev: AtomicU64,
    ino: AtomicU64,
}

impl ChildSlot {
    pub(crate) const fn new() -> Self {
        Self {
            fd: AtomicI32::new(FREE),
            dev: AtomicU64::new(0),
            ino: AtomicU64::new(0),
        }
    }

    /// Whether the slot was free and holds the descriptor now. One that is lost already needs none.
    pub(crate) fn set(&self, ours: &OurFd) -> bool {
        let Some((fd, identity)) = &ours.fd else {
            return true;
        };
        if self
            .fd
            .compare_exchange(FREE, TAKEN, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            return false;
        }
        self.dev.store(identity.dev, Ordering::Relaxed);
        self.ino.store(identity.ino, Ordering::Relaxed);
        self.fd.store(fd.as_raw_fd(), Ordering::Release);
        true
    }

    /// Whether it holds this descriptor: not another one that got the same number after this one was lost.
    pub(crate) fn holds(&self, ours: &OurFd) -> bool {
        ours.fd.as_ref().is_some_and(|(fd, identity)| {
            self.fd.load(Ordering::Acquire) == fd.as_raw_fd() && self.identity() == *identity
        })
    }

    pub(crate) fn clear(&self) {
        self.fd.store(FREE, Ordering::Release);
    }

    fn identity(&self) -> Identity {
        Identity {
            dev: self.dev.load(Ordering::Relaxed),
            ino: self.ino.load(Ordering::Relaxed),
        }
    }

    /// In a forked child: closes what it inherited, unless the number is the program's by now. Takes no lock.
    pub(crate) fn close_in_child(&self) {
        let fd = self.fd.swap(FREE, Ordering::AcqRel);
        if fd < 0 {
            return;
        }
        // SAFETY: `borrow_raw` needs an open descriptor that is not -1: it is not negative, and the borrow ends with the
        // `fstat` that finds out whether it is open. A child has one thread, so nobody closes it meanwhile.
        let now = Identity::of(unsafe { BorrowedFd::borrow_raw(fd) });
        if now == Some(self.identity()) {
            // SAFETY: `close` needs a descriptor that nobody uses afterwards: it is the child's copy of one that only
            // this library knows, and the child uses and drops nothing that owns it: it passes everything through.
            unsafe { rustix::io::close(fd) }
        }
    }
}

/// Does to descriptors what programs do.
#[cfg(test)]
pub(crate) mod program {
    use super::*;
    use std::mem::ManuallyDrop;
    use std::os::fd::FromRawFd;

    impl ChildSlot {
        pub(crate) fn number(&self) -> Option<RawFd> {
            Some(self.fd.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
        }
    }

    /// Closes a number that it does not own.
    pub(crate) fn close(number: RawFd) {
        // SAFETY: this is the rude thing that `OurFd` is for: what owned the number finds out before it uses it.
        unsafe { rustix::io::close(number) }
    }

    /// Closes a number and has its own file there at once.
    pub(crate) fn take_over(number: RawFd, file: impl AsFd) {
        // SAFETY: as in `close`; the number is replaced in one step and never closed by this value.
        let mut at = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        // The kernel is busy with a number that another thread is about to get.
        while let Err(error) = rustix::io::dup2(file.as_fd(), &mut at) {
            assert_eq!(error, rustix::io::Errno::BUSY);
        }
    }

    /// Whether the number is still this file's.
    pub(crate) fn still_has(number: RawFd, file: impl AsFd) -> bool {
        // SAFETY: the borrow ends with the `fstat`, which fails if nothing is open there.
        let there = Identity::of(unsafe { BorrowedFd::borrow_raw(number) });
        there.is_some() && there == Identity::of(file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
    use std::io::Read;

    fn pair() -> (OurFd, OwnedFd) {
        let (ours, peer) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        (OurFd::new(ours), peer)
    }

    fn number(fd: &OurFd) -> RawFd {
        fd.get().unwrap().as_raw_fd()
    }

    fn hung_up(peer: OwnedFd) -> bool {
        std::fs::File::from(peer).read(&mut [0]).unwrap() == 0
    }

    #[test]
    fn it_lives_high_and_is_closed_when_it_is_dropped() {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let (ours, peer) = pair();
        // Other tests of this process use numbers, too, but not all of them.
        assert!(limit.is_some_and(|n| n < 1000) || number(&ours) >= HIGH);
        rustix::net::send(ours.get().unwrap(), b"x", SendFlags::NOSIGNAL).unwrap();
        let mut one = [0];
        assert_eq!(rustix::io::read(&peer, &mut one), Ok(1));
        drop(ours);
        assert!(hung_up(peer));
    }

    /// The standard library ends a debug build that closes a closed descriptor.
    #[test]
    fn one_that_was_closed_is_lost_and_no_more() {
        let (ours, peer) = pair();
        program::close(number(&ours));
        assert!(!ours.is_ours());
        drop(ours);
        assert!(hung_up(peer));
    }

    #[test]
    fn a_file_that_got_the_number_is_left_alone() {
        let file = tempfile::tempfile().unwrap();
        let (ours, peer) = pair();
        let at = number(&ours);
        program::take_over(at, &file);
        assert!(!ours.is_ours() && hung_up(peer));
        drop(ours);
        assert!(program::still_has(at, &file));
        program::close(at);
        // Another of our own is another file, too.
        let (ours, _peer) = pair();
        let (other, _other_peer) = pair();
        let at = number(&ours);
        program::take_over(at, other.get().unwrap());
        assert!(!ours.is_ours());
        drop(ours);
        assert!(program::still_has(at, other.get().unwrap()));
        program::close(at);
    }

    #[test]
    fn a_child_closes_what_is_ours_and_nothing_else() {
        let slot = ChildSlot::new();
        let (ours, peer) = pair();
        assert!(slot.set(&ours) && slot.holds(&ours));
        assert!(!slot.set(&ours), "it is full");
        slot.close_in_child();
        assert!(hung_up(peer) && !slot.holds(&ours));
        drop(ours);
        let file = tempfile::tempfile().unwrap();
        let (ours, _peer) = pair();
        assert!(slot.set(&ours));
        let at = number(&ours);
        program::take_over(at, &file);
        slot.close_in_child();
        assert!(program::still_has(at, &file) && slot.number().is_none());
        program::close(at);
    }
}
