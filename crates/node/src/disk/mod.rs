//! The disk tier: segments whose bytes nobody needs now go to files, and come back.
//!
//! What is here takes time and runs on workers: [`Job`] in, [`Done`] out. When a segment goes and when it comes back is
//! decided in [`crate::arena`]; `docs/design/0004-tiers.md` has the states. The form of a file is `ebb_disk`'s.
//!
//! A file has no name: the daemon and the program that owns the bytes have it open, and it is gone with the last of
//! them, however they end. So nothing is left behind by a kill, and no name is there for others to open; and a daemon
//! that is killed takes no bytes along, because the program shows its file to the next one.

mod copy;
mod lanes;
mod measure;
mod ring;
mod store;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ebb_disk::Packing;
use ebb_units::Bytes;

pub(crate) use copy::{Trouble, Written};
use lanes::{Lanes, Plain};
pub use measure::{DiskContent, DiskPlan, DiskRates, PackedRates, measure_disk};
use ring::Ring;
pub(crate) use store::{SegmentFile, Store, taken};

/// Something that takes time. It ends early when `off` is set.
#[derive(Debug)]
pub(crate) enum Job {
    /// Write a segment to a new file.
    Spill {
        key: u64,
        bytes: Bytes,
        memory: Arc<OwnedFd>,
        packing: Packing,
        off: Arc<AtomicBool>,
    },
    /// Read one back into new memory.
    Load {
        key: u64,
        bytes: Bytes,
        file: Arc<File>,
        huge_pages: bool,
        off: Arc<AtomicBool>,
    },
    /// Close a file, which may be the end of it and take a while.
    Forget { file: Arc<File> },
}

/// How a [`Job`] ended.
#[derive(Debug)]
pub(crate) enum Done {
    Spilled {
        key: u64,
        off: Arc<AtomicBool>,
        result: Result<(SegmentFile, Written), Trouble>,
    },
    Loaded {
        key: u64,
        off: Arc<AtomicBool>,
        result: Result<Arc<OwnedFd>, Trouble>,
    },
    Forgotten,
}

/// Places for blocks, the best that there are here.
fn new_lanes() -> Box<dyn Lanes> {
    match Ring::new() {
        Ok(ring) => Box::new(ring),
        // Forbidden, or an old kernel.
        Err(_) => Box::new(Plain::new()),
    }
}

/// How this machine lets us read and write, for people.
pub(crate) fn way() -> &'static str {
    new_lanes().name()
}

/// Runs `with` on this thread's lanes, which are made anew if they broke.
fn with_lanes<T>(with: impl FnOnce(&mut dyn Lanes) -> Result<T, Trouble>) -> Result<T, Trouble> {
    thread_local! {
        static LANES: RefCell<Option<Box<dyn Lanes>>> = const { RefCell::new(None) };
    }
    LANES.with(|kept| {
        let mut kept = kept.borrow_mut();
        let result = with(kept.get_or_insert_with(new_lanes).as_mut());
        if matches!(result, Err(Trouble::Lanes(_))) {
            *kept = None;
        }
        result
    })
}

impl Job {
    /// Does it.
    pub(crate) fn run(self, store: Option<&Store>) -> Done {
        match self {
            Self::Spill {
                key,
                bytes,
                memory,
                packing,
                off,
            } => {
                let result = match store {
                    Some(store) => spill(store, &memory, bytes, packing, &off),
                    None => Err(Trouble::CalledOff),
                };
                Done::Spilled { key, off, result }
            }
            Self::Load {
                key,
                bytes,
                file,
                huge_pages,
                off,
            } => {
                // The pool of huge pages may have none left, which shows when they are taken. Others are made on the way.
                let huge = huge_pages.then(|| crate::arena::make(bytes, true).ok()).flatten();
                let result = huge
                    .map_or_else(|| crate::arena::make_bare(bytes, false), Ok)
                    .map_err(Trouble::Memory)
                    .and_then(|memory| {
                        with_lanes(|lanes| copy::load(lanes, file.as_fd(), bytes.0, &memory, &off))?;
                        Ok(Arc::new(memory))
                    });
                Done::Loaded { key, off, result }
            }
            Self::Forget { file } => {
                drop(file);
                Done::Forgotten
            }
        }
    }
}

fn spill(
    store: &Store,
    memory: &OwnedFd,
    bytes: Bytes,
    packing: Packing,
    off: &AtomicBool,
) -> Result<(SegmentFile, Written), Trouble> {
    let disk = |e: std::io::Error| {
        Trouble::Disk(rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO))
    };
    if store.room().map_err(disk)? < bytes {
        return Err(Trouble::Reserve);
    }
    let file = store.create().map_err(disk)?;
    let key = RandomState::new().hash_one(bytes.0);
    let written =
        with_lanes(|lanes| copy::spill(lanes, memory, bytes.0, file.ours.as_fd(), packing, key, off))?;
    Ok((file, written))
}
