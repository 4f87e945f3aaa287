//! Several reads or writes of a file under way at once.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use crate::sys::Window;
use ebb_disk::{BLOCK, PAGE};
use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

/// Places for blocks, each of which may have one read or write under way. Reads and writes are at offsets; what is short
/// is the caller's to go on with.
pub(crate) trait Lanes {
    /// How many there are.
    fn count(&self) -> usize;

    /// The place, [`BLOCK`] bytes, at an address that direct I/O takes.
    ///
    /// # Panics
    /// If something is under way there: the kernel reads or writes it.
    fn place(&mut self, lane: usize) -> &mut [u8];

    /// Begins with the bytes of a place from `from` to `to`. After an error all of it is of no use any more.
    ///
    /// # Panics
    /// If something is under way there.
    fn begin(
        &mut self,
        lane: usize,
        way: Way,
        file: BorrowedFd<'_>,
        from: usize,
        to: usize,
        at: u64,
    ) -> Result<(), Errno>;

    /// Begins to read straight into memory that has its pages, `len` bytes at `to` in it, which nobody looks at until that has ended. `None`: these
    /// lanes do not do that, and nothing was begun.
    fn begin_into(
        &mut self,
        lane: usize,
        file: BorrowedFd<'_>,
        window: &Rc<Window>,
        to: u64,
        len: usize,
        at: u64,
    ) -> Option<Result<(), Errno>> {
        let _ = (lane, file, window, to, len, at);
        None
    }

    /// Waits for the next one that ends: which, and how many bytes. `None`: nothing is under way, or can be waited for.
    fn next(&mut self) -> Option<(usize, Result<usize, Errno>)>;

    /// What it is called, for people.
    fn name(&self) -> &'static str;
}

/// A page of memory, where pages begin.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Memory for one block.
pub(super) struct Place(Vec<Page>);

impl Place {
    pub(super) fn new() -> Self {
        Self(vec![Page::new_zeroed(); BLOCK / PAGE])
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        self.0.as_mut_slice().as_mut_bytes()
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Place").field(&self.0.len()).finish()
    }
}

/// One after the other, by `pread` and `pwrite`: what works everywhere.
#[derive(Debug)]
pub(crate) struct Plain {
    places: Vec<Place>,
    ended: VecDeque<(usize, Result<usize, Errno>)>,
}

impl Plain {
    pub(crate) fn new() -> Self {
        // More would only be written later.
        Self {
            places: vec![Place::new(), Place::new()],
            ended: VecDeque::new(),
        }
    }
}

impl Lanes for Plain {
    fn count(&self) -> usize {
        self.places.len()
    }

    fn place(&mut self, lane: usize) -> &mut [u8] {
        self.places[lane].bytes()
    }

    fn begin(
        &mut self,
        lane: usize,
        way: Way,
        file: BorrowedFd<'_>,
        from: usize,
        to: usize,
        at: u64,
    ) -> Result<(), Errno> {
        let bytes = &mut self.places[lane].bytes()[from..to];
        let done = rustix::io::retry_on_intr(|| match way {
            Way::Read => rustix::io::pread(file, &mut *bytes, at),
            Way::Write => rustix::io::pwrite(file, bytes, at),
        });
        self.ended.push_back((lane, done));
        Ok(())
    }

    fn next(&mut self) -> Option<(usize, Result<usize, Errno>)> {
        self.ended.pop_front()
    }

    fn name(&self) -> &'static str {
        "pread and pwrite"
    }
}
