//! Reads and writes by io_uring, from memory that the kernel knows beforehand.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;

use ebb_disk::BLOCK;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use super::lanes::{Lanes, Place, Way};
use crate::sys::Window;

/// Blocks under way at once: 8 MiB for each worker keeps every disk busy that a machine with GPUs has.
const LANES: usize = 8;

/// A ring, and the memory that it reads and writes.
pub(crate) struct Ring {
    ring: IoUring,
    /// Dropped only when nothing is under way, see `drop`.
    places: Vec<Place>,
    busy: [bool; LANES],
    /// What the kernel reads into beside the places.
    held: [Option<Rc<Window>>; LANES],
    /// The kernel has taken the places in: no look-up of pages at each call.
    registered: bool,
    /// An entry could not be handed over and lies in the queue still. It must never be: its file may be closed by then.
    broken: bool,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("busy", &self.busy)
            .field("registered", &self.registered)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring, if the kernel lets us have one: containers often forbid it.
    pub(crate) fn new() -> std::io::Result<Self> {
        let ring = IoUring::new(u32::try_from(LANES).unwrap_or(u32::MAX))?;
        let mut places: Vec<Place> = (0..LANES).map(|_| Place::new()).collect();
        let vectors: Vec<libc::iovec> = places
            .iter_mut()
            .map(|place| libc::iovec {
                iov_base: place.bytes().as_mut_ptr().cast(),
                iov_len: BLOCK,
            })
            .collect();
        // SAFETY: `register_buffers` needs the memory to stay where it is until it is unregistered or the ring is gone. The
        // places are heap memory that is never reallocated, and go after the ring, or never (`drop`).
        let registered = unsafe { ring.submitter().register_buffers(&vectors) }.is_ok();
        Ok(Self {
            ring,
            places,
            busy: [false; LANES],
            held: [const { None }; LANES],
            registered,
            broken: false,
        })
    }

    /// Gives the kernel an entry whose memory is the lane's place, or lies in the window that the lane holds.
    fn hand_over(&mut self, lane: usize, entry: &squeue::Entry) -> Result<(), Errno> {
        // SAFETY: `push` needs what the entry points to to be valid until it has completed. The descriptor is open now, and
        // the kernel takes its own hold of the file when it is submitted, which happens before this returns. The memory is
        // this lane's place, or of a window that the lane holds: `busy` keeps everybody off it until its completion was seen, and
        // `drop` frees nothing of a lane that is busy.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // As many entries as lanes: there is room.
        pushed.map_err(|_| Errno::BUSY)?;
        self.busy[lane] = true;
        let handed_over = self.submit_and_wait(0);
        self.broken = handed_over.is_err();
        handed_over
    }

    fn submit_and_wait(&mut self, want: usize) -> Result<(), Errno> {
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(_) => return Ok(()),
                Err(e) => match Errno::from_io_error(&e) {
                    Some(Errno::INTR | Errno::AGAIN) => {}
                    Some(errno) => return Err(errno),
                    None => return Err(Errno::IO),
                },
            }
        }
    }
}

impl Lanes for Ring {
    fn count(&self) -> usize {
        LANES
    }

    fn place(&mut self, lane: usize) -> &mut [u8] {
        assert!(!self.busy[lane], "the kernel has this place");
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
        let bytes = &mut self.place(lane)[from..to];
        let (pointer, len) = (bytes.as_mut_ptr(), bytes.len() as u32);
        let fd = types::Fd(file.as_raw_fd());
        let index = lane as u16;
        let entry = match (way, self.registered) {
            (Way::Read, true) => opcode::ReadFixed::new(fd, pointer, len, index).offset(at).build(),
            (Way::Write, true) => opcode::WriteFixed::new(fd, pointer, len, index)
                .offset(at)
                .build(),
            (Way::Read, false) => opcode::Read::new(fd, pointer, len).offset(at).build(),
            (Way::Write, false) => opcode::Write::new(fd, pointer, len).offset(at).build(),
        };
        self.hand_over(lane, &entry.user_data(lane as u64))
    }

    fn begin_into(
        &mut self,
        lane: usize,
        file: BorrowedFd<'_>,
        window: &Rc<Window>,
        to: u64,
        len: usize,
        at: u64,
    ) -> Option<Result<(), Errno>> {
        assert!(!self.busy[lane], "the kernel has this place");
        let entry = window.place(to, len).map(|place| {
            let fd = types::Fd(file.as_raw_fd());
            opcode::Read::new(fd, place, len as u32).offset(at).build()
        });
        Some(entry.and_then(|entry| {
            self.held[lane] = Some(Rc::clone(window));
            self.hand_over(lane, &entry.user_data(lane as u64))
        }))
    }

    fn next(&mut self) -> Option<(usize, Result<usize, Errno>)> {
        if self.broken || !self.busy.contains(&true) {
            return None;
        }
        loop {
            if let Some(done) = self.ring.completion().next() {
                let lane = usize::try_from(done.user_data())
                    .ok()
                    .filter(|lane| *lane < LANES)?;
                self.busy[lane] = false;
                self.held[lane] = None;
                let result = match usize::try_from(done.result()) {
                    Ok(n) => Ok(n),
                    Err(_) => Err(Errno::from_raw_os_error(-done.result())),
                };
                return Some((lane, result));
            }
            // If nothing can be waited for, the lanes stay busy, and their memory is never touched again.
            self.broken = self.submit_and_wait(1).is_err();
            if self.broken {
                return None;
            }
        }
    }

    fn name(&self) -> &'static str {
        if self.registered {
            "io_uring, registered memory"
        } else {
            "io_uring"
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while self.next().is_some() {}
        if self.busy.contains(&true) {
            // The kernel may still write there.
            std::mem::forget(std::mem::take(&mut self.places));
            std::mem::forget(std::mem::take(&mut self.held));
        }
    }
}
