//! From a segment's memory to its file, and back.

use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use ebb_disk::{
    BLOCK, Entry, FormError, Kind, PAGE, Packer, Packing, Table, Unpacker, header_len, is_zero, padded,
};
use ebb_units::Bytes;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::lanes::{Lanes, Way};
use crate::sys::Window;

/// Why a segment did not reach its file, or did not come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Trouble {
    /// Nobody wants it any more.
    #[error("called off")]
    CalledOff,
    /// The file cannot be written or read.
    #[error("the disk: {0}")]
    Disk(Errno),
    /// The file ends too soon, or takes no more.
    #[error("the disk: a file ends too soon")]
    Short,
    /// The memory cannot be read or written.
    #[error("host memory: {0}")]
    Memory(Errno),
    /// What is read is not what was written.
    #[error("{0}")]
    Damaged(#[from] FormError),
    /// Less than the reserve would be left on the file system.
    #[error("the file system has too little free")]
    Reserve,
    /// The system's call to read or write several blocks at once does not work any more.
    #[error("reading and writing several blocks at once: {0}")]
    Lanes(Errno),
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    /// Bytes in the file, table and padding included.
    pub stored: u64,
    /// Of the segment's bytes: zeros, which take no place.
    pub zeros: u64,
}

/// A read or write that is under way.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    block: usize,
    at: u64,
    done: usize,
    len: usize,
    /// Straight to this place in the memory that is read into, and not to the lane's.
    into: Option<u64>,
}

/// Transfers over all lanes.
struct Pipe<'a> {
    lanes: &'a mut dyn Lanes,
    file: BorrowedFd<'a>,
    way: Way,
    under_way: Vec<Option<Transfer>>,
    /// What is read into.
    window: Option<Rc<Window>>,
}

impl<'a> Pipe<'a> {
    fn new(lanes: &'a mut dyn Lanes, file: BorrowedFd<'a>, way: Way) -> Self {
        let under_way = vec![None; lanes.count()];
        Self {
            lanes,
            file,
            way,
            under_way,
            window: None,
        }
    }

    fn free(&self) -> Option<usize> {
        self.under_way.iter().position(Option::is_none)
    }

    fn begin(&mut self, lane: usize, mut transfer: Transfer) -> Result<(), Trouble> {
        let at = transfer.at + transfer.done as u64;
        if let Some((window, to)) = self.window.as_ref().zip(transfer.into) {
            let (to, len) = (to + transfer.done as u64, transfer.len - transfer.done);
            self.under_way[lane] = Some(transfer);
            match self.lanes.begin_into(lane, self.file, window, to, len, at) {
                Some(result) => return result.map_err(Trouble::Lanes),
                // By way of the lane's place from its beginning.
                None => (transfer.into, transfer.done) = (None, 0),
            }
        }
        self.under_way[lane] = Some(transfer);
        let at = transfer.at + transfer.done as u64;
        self.lanes
            .begin(lane, self.way, self.file, transfer.done, transfer.len, at)
            .map_err(Trouble::Lanes)
    }

    /// Waits until one block is through, whole. `None` if none is under way.
    fn next(&mut self) -> Result<Option<(usize, Transfer)>, Trouble> {
        loop {
            let Some((lane, result)) = self.lanes.next() else {
                let lost = self.under_way.iter().any(Option::is_some);
                return if lost {
                    Err(Trouble::Lanes(Errno::IO))
                } else {
                    Ok(None)
                };
            };
            let Some(mut transfer) = self.under_way[lane].take() else {
                continue;
            };
            match result {
                Ok(0) => return Err(Trouble::Short),
                Ok(n) => transfer.done = (transfer.done + n).min(transfer.len),
                Err(Errno::INTR | Errno::AGAIN) => {}
                // A file system that wants other places or lengths, or no direct I/O at all after all.
                Err(Errno::INVAL) if is_direct(self.file) => {
                    let flags = rustix::fs::fcntl_getfl(self.file).map_err(Trouble::Disk)?;
                    rustix::fs::fcntl_setfl(self.file, flags - OFlags::DIRECT).map_err(Trouble::Disk)?;
                }
                Err(errno) => return Err(Trouble::Disk(errno)),
            }
            if transfer.done == transfer.len {
                return Ok(Some((lane, transfer)));
            }
            // Direct I/O goes on at a page; what it wrote of this one is written again.
            transfer.done -= transfer.done % PAGE;
            self.begin(lane, transfer)?;
        }
    }

    /// A part of the table, by itself in the first lane.
    fn head(&mut self, at: u64, len: usize) -> Result<(), Trouble> {
        let part = Transfer {
            block: 0,
            at,
            done: 0,
            len,
            into: None,
        };
        self.begin(0, part)?;
        while self.next()?.is_some() {}
        Ok(())
    }

    /// Nothing is under way any more, whatever came of it.
    fn drain(&mut self) {
        while self.lanes.next().is_some() {}
        self.under_way.fill(None);
    }
}

pub(super) fn is_direct(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::DIRECT))
}

/// Writes a segment of `bytes` to a file that is empty.
///
/// # Errors
/// [`Trouble`]. The file is of no use then, and the segment as it was.
pub(crate) fn spill(
    lanes: &mut dyn Lanes,
    memory: impl AsFd,
    bytes: u64,
    file: BorrowedFd<'_>,
    packing: Packing,
    key: u64,
    off: &AtomicBool,
) -> Result<Written, Trouble> {
    let mut pipe = Pipe::new(lanes, file, Way::Write);
    let result = spill_blocks(&mut pipe, memory.as_fd(), bytes, packing, key, off);
    if result.is_err() {
        pipe.drain();
    }
    let written = result?;
    // Errors of the page cache come to light here. Direct writes have told theirs.
    if !is_direct(file) {
        rustix::fs::fdatasync(file).map_err(Trouble::Disk)?;
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }
    Ok(written)
}

fn spill_blocks(
    pipe: &mut Pipe<'_>,
    memory: BorrowedFd<'_>,
    bytes: u64,
    packing: Packing,
    key: u64,
    off: &AtomicBool,
) -> Result<Written, Trouble> {
    let mut table = Table::new(bytes, key);
    let mut at = header_len(bytes) as u64;
    let mut written = Written::default();
    let mut packer = Packer::new(packing);
    for block in 0..table.blocks() {
        if off.load(Ordering::Relaxed) {
            return Err(Trouble::CalledOff);
        }
        let lane = match pipe.free() {
            Some(lane) => lane,
            None => match pipe.next()? {
                Some((lane, _)) => lane,
                None => return Err(Trouble::Lanes(Errno::IO)),
            },
        };
        let plain = table.plain_len(block);
        let place = pipe.lanes.place(lane);
        read_memory(memory, &mut place[..plain], block as u64 * BLOCK as u64)?;
        let hash = table.hash(block, &place[..plain]);
        if is_zero(&place[..plain]) {
            written.zeros += plain as u64;
            table.entries.push(Entry {
                at: 0,
                len: 0,
                kind: Kind::Zero,
                hash,
            });
            continue;
        }
        let (kind, len) = match packer.pack(&place[..plain]) {
            Some((kind, packed)) => {
                let len = packed.len();
                place[..len].copy_from_slice(packed);
                (kind, len)
            }
            None => (Kind::Plain, plain),
        };
        place[len..padded(len)].fill(0);
        let len_stored = u32::try_from(len).map_err(|_| Trouble::Short)?;
        table.entries.push(Entry {
            at,
            len: len_stored,
            kind,
            hash,
        });
        pipe.begin(
            lane,
            Transfer {
                block,
                at,
                done: 0,
                len: padded(len),
                into: None,
            },
        )?;
        at += padded(len) as u64;
    }
    while pipe.next()?.is_some() {}
    // Last, so that a file with a table is whole.
    let head = table.encode();
    for (i, part) in head.chunks(BLOCK).enumerate() {
        pipe.lanes.place(0)[..part.len()].copy_from_slice(part);
        let at = (i * BLOCK) as u64;
        pipe.head(at, part.len())?;
    }
    written.stored = at;
    Ok(written)
}

/// Reads a segment of `bytes` from its file into memory that is all zeros and that nobody else has yet. It has all its pages then.
///
/// # Errors
/// [`Trouble`]. The file is as it was, and the memory is to be thrown away.
pub(crate) fn load(
    lanes: &mut dyn Lanes,
    file: BorrowedFd<'_>,
    bytes: u64,
    memory: impl AsFd,
    off: &AtomicBool,
) -> Result<(), Trouble> {
    // Not by `pwrite`, which memory of huge pages does not take.
    let window = Rc::new(Window::new(&memory, bytes).map_err(Trouble::Memory)?);
    match window.populate(0, PAGE.min(usize::try_from(bytes).unwrap_or(PAGE))) {
        // Kernels before 5.14.
        Err(Errno::INVAL | Errno::NOSYS) => {
            crate::arena::write_zeros(&memory, Bytes(bytes)).map_err(Trouble::Memory)?;
        }
        result => result.map_err(Trouble::Memory)?,
    }
    let mut pipe = Pipe::new(lanes, file, Way::Read);
    pipe.window = Some(Rc::clone(&window));
    let result = load_blocks(&mut pipe, bytes, &window, off);
    if result.is_err() {
        pipe.drain();
    }
    if result.is_ok() && !is_direct(file) {
        // It is not read again.
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }
    result
}

fn load_blocks(pipe: &mut Pipe<'_>, bytes: u64, memory: &Window, off: &AtomicBool) -> Result<(), Trouble> {
    let mut head = vec![0; header_len(bytes)];
    for (i, part) in head.chunks_mut(BLOCK).enumerate() {
        let at = (i * BLOCK) as u64;
        pipe.head(at, part.len())?;
        part.copy_from_slice(&pipe.lanes.place(0)[..part.len()]);
    }
    let table = Table::decode(&head, bytes)?;
    let (mut scratch, mut unpacker) = (Vec::new(), Unpacker::default());
    let mut blocks = (0..table.blocks()).filter(|block| table.entries[*block].kind != Kind::Zero);
    loop {
        if off.load(Ordering::Relaxed) {
            return Err(Trouble::CalledOff);
        }
        if let Some(lane) = pipe.free()
            && let Some(block) = blocks.next()
        {
            let entry = table.entries[block];
            let len = padded(entry.len as usize);
            let (to, plain_len) = (block as u64 * BLOCK as u64, table.plain_len(block));
            // What is stored as it is, in whole pages, needs no copy. To make pages takes as long as to read what goes into them: while
            // others are read.
            let straight = entry.kind == Kind::Plain && len == plain_len;
            if straight {
                give_pages(memory, to, plain_len as u64)?;
            }
            pipe.begin(
                lane,
                Transfer {
                    block,
                    at: entry.at,
                    done: 0,
                    len,
                    into: straight.then_some(to),
                },
            )?;
            continue;
        }
        let Some((lane, Transfer { block, into, .. })) = pipe.next()? else {
            // What is zeros and was not touched.
            return give_pages(memory, 0, bytes);
        };
        let entry = table.entries[block];
        let plain_len = table.plain_len(block);
        let at = block as u64 * BLOCK as u64;
        if into.is_some() {
            let check = |bytes: &[u8]| table.check(block, bytes);
            memory.look(at, plain_len, check).map_err(Trouble::Memory)??;
            continue;
        }
        let place = pipe.lanes.place(lane);
        give_pages(memory, at, plain_len as u64)?;
        if entry.kind == Kind::Plain {
            table.check(block, &place[..plain_len])?;
            memory.write(at, &place[..plain_len]).map_err(Trouble::Memory)?;
        } else {
            scratch.resize(plain_len, 0);
            table.open(block, &place[..entry.len as usize], &mut scratch, &mut unpacker)?;
            memory.write(at, &scratch).map_err(Trouble::Memory)?;
        }
    }
}

fn give_pages(memory: &Window, at: u64, len: u64) -> Result<(), Trouble> {
    let len = usize::try_from(len).map_err(|_| Trouble::Memory(Errno::OVERFLOW))?;
    match memory.populate(at, len) {
        // All pages are there already, see `load`.
        Err(Errno::INVAL | Errno::NOSYS) => Ok(()),
        result => result.map_err(Trouble::Memory),
    }
}

/// Writes so many bytes of whatever is in the lanes, or reads them: what the disk does by itself.
pub(super) fn raw(lanes: &mut dyn Lanes, file: BorrowedFd<'_>, bytes: u64, way: Way) -> Result<(), Trouble> {
    let mut pipe = Pipe::new(lanes, file, way);
    let mut at = 0;
    while at < bytes {
        let lane = match pipe.free() {
            Some(lane) => lane,
            None => match pipe.next()? {
                Some((lane, _)) => lane,
                None => return Err(Trouble::Lanes(Errno::IO)),
            },
        };
        let len = usize::try_from(bytes - at).map_or(BLOCK, |rest| rest.min(BLOCK));
        pipe.begin(
            lane,
            Transfer {
                block: 0,
                at,
                done: 0,
                len,
                into: None,
            },
        )?;
        at += len as u64;
    }
    while pipe.next()?.is_some() {}
    if way == Way::Write && !is_direct(file) {
        rustix::fs::fdatasync(file).map_err(Trouble::Disk)?;
    }
    if !is_direct(file) {
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }
    Ok(())
}

fn read_memory(memory: BorrowedFd<'_>, mut bytes: &mut [u8], mut at: u64) -> Result<(), Trouble> {
    while !bytes.is_empty() {
        let n = rustix::io::retry_on_intr(|| rustix::io::pread(memory, &mut *bytes, at))
            .map_err(Trouble::Memory)?;
        if n == 0 {
            return Err(Trouble::Memory(Errno::NXIO));
        }
        bytes = &mut bytes[n..];
        at += n as u64;
    }
    Ok(())
}
