//! Opening memory of another process.
//!
//! Chunks come packet by packet, each asked for when the one before is mapped: a program has few descriptors.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ebb_protocol::ToDaemon;
use ebb_protocol::wire::share;
use ebb_units::{Bytes, DeviceUuid};

use super::{Import, ShareError, ShareHandle, random};
use crate::core::Core;
use crate::device::Device;
use crate::engine::Engine;
use crate::fd::OurFd;

/// The least time that an answer may take. Evicted memory has to come back first, which waits as an allocation does.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The number of this hold.
    pub hold: u64,
    /// The card.
    pub device: DeviceUuid,
    /// Bytes of the block in which the allocation lies: what is to be mapped.
    pub bytes: u64,
    /// Where in it the allocation begins.
    pub offset: u64,
    /// The allocation's size.
    pub size: u64,
    /// How many chunks the block has.
    pub count: u32,
    pub(crate) block: u64,
    pub(crate) from: u32,
    name: [u8; 16],
}

/// A chunk of it.
#[derive(Debug)]
pub struct Piece {
    /// Its size.
    pub len: u64,
    fd: OurFd,
}

impl Piece {
    /// Its descriptor, unless the program has closed it meanwhile.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.get()
    }
}

#[derive(Debug)]
pub(super) enum Answer {
    Found(Opening, Vec<Piece>),
    Refused(u32),
    /// The connection ended.
    Lost,
}

impl Opening {
    /// As it arrives. The rest is filled in by who asked.
    pub(crate) fn arrived(
        hold: u64,
        device: DeviceUuid,
        [block, bytes, offset, size]: [u64; 4],
        [from, count]: [u32; 2],
    ) -> Self {
        Self {
            hold,
            device,
            bytes,
            offset,
            size,
            count,
            block,
            from,
            name: [0; 16],
        }
    }

    /// Whether it can be: an allocation lies in its block.
    fn is_sane(&self) -> bool {
        self.size > 0
            && self.count > 0
            && self
                .offset
                .checked_add(self.size)
                .is_some_and(|end| end <= self.bytes)
    }
}

pub(super) fn answer(
    core: &Core,
    hold: u64,
    status: u32,
    found: Opening,
    chunks: Vec<Bytes>,
    fds: Vec<OurFd>,
) {
    let answer = if status == share::OK {
        let pieces = chunks
            .into_iter()
            .zip(fds)
            .map(|(len, fd)| Piece { len: len.get(), fd })
            .collect();
        Answer::Found(found, pieces)
    } else {
        Answer::Refused(status)
    };
    // Nobody waits any more: it has said so to the daemon.
    if let Some(waiting) = core.share.imports().waiting.get_mut(&hold) {
        *waiting = Some(answer);
    }
    core.share.answered.notify_all();
}

/// What is open here is counted to this process from now on.
pub(super) fn inherit(core: &Core, device: &Device, hold: u64, bytes: u64) {
    let mut state = device.lock();
    let mut imports = core.share.imports();
    // One that is closed already: the daemon hears of it, and takes this back.
    let Some(import) = imports.open.get_mut(&hold).filter(|import| import.inherited == 0) else {
        return;
    };
    import.inherited = bytes;
    drop(imports);
    state.pool.inherit(bytes);
    drop(state);
    core.events.note(format!(
        "device {}: {} of a program that is gone are open here and counted here now",
        device.index,
        Bytes(bytes)
    ));
    core.link.poke();
}

fn ask(core: &Core, hold: u64, handle: &ShareHandle, from: u32) -> Result<(Opening, Vec<Piece>), ShareError> {
    core.share.imports().waiting.insert(hold, None);
    core.link.send(ToDaemon::ShareOpen {
        hold,
        handle: *handle,
        from,
    });
    let deadline = Instant::now() + core.waits.alloc_max().max(PATIENCE);
    let mut imports = core.share.imports();
    loop {
        if let Some(Some(_)) = imports.waiting.get(&hold) {
            break;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || core.is_closed() || core.link.epoch() == 0 {
            imports.waiting.remove(&hold);
            return Err(ShareError::Failed);
        }
        imports = core
            .share
            .answered
            .wait_timeout(imports, left.min(Duration::from_secs(1)))
            .map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
    }
    match imports.waiting.remove(&hold).flatten() {
        Some(Answer::Found(mut found, pieces))
            if found.is_sane() && found.from == from && !pieces.is_empty() =>
        {
            found.name.copy_from_slice(&handle[share::NAME]);
            Ok((found, pieces))
        }
        Some(Answer::Refused(share::UNKNOWN)) => Err(ShareError::Gone),
        Some(Answer::Refused(share::OWN)) => Err(ShareError::Own),
        _ => Err(ShareError::Failed),
    }
}

impl Engine {
    /// Asks for the memory that a handle names, and waits: the program that has it may have to bring it back first. Call it
    /// outside the gate and with no lock held. Returns the first chunks; [`Self::more_of_share`] brings the others. A hold
    /// has begun, which [`Self::close_share`] ends.
    ///
    /// # Errors
    /// [`ShareError`]; no hold has begun.
    pub fn open_share(&self, handle: &ShareHandle) -> Result<(Opening, Vec<Piece>), ShareError> {
        let core = &self.core;
        if core.is_passthrough() {
            return Err(ShareError::Failed);
        }
        if core
            .share
            .exports()
            .name
            .is_some_and(|name| handle[share::NAME] == name)
        {
            return Err(ShareError::Own);
        }
        let hold = {
            let mut imports = core.share.imports();
            if imports.last == 0 {
                // Numbers of this process, which no other uses.
                imports.last = u64::from_le_bytes(random().ok_or(ShareError::Failed)?).max(1);
            }
            imports.last = imports.last.wrapping_add(1).max(1);
            imports.last
        };
        let opened = ask(core, hold, handle, 0);
        if opened.is_err() {
            core.link.send(ToDaemon::ShareClose { hold });
        }
        opened
    }

    /// The chunks from this one on: some of them.
    ///
    /// # Errors
    /// [`ShareError`]; end the hold.
    pub fn more_of_share(
        &self,
        handle: &ShareHandle,
        opening: &Opening,
        from: u32,
    ) -> Result<Vec<Piece>, ShareError> {
        let (more, pieces) = ask(&self.core, opening.hold, handle, from)?;
        if more.block != opening.block || more.bytes != opening.bytes || more.count != opening.count {
            return Err(ShareError::Gone);
        }
        Ok(pieces)
    }

    /// It is mapped: remembered until [`Self::close_share`], and declared to daemons that are new.
    pub fn share_is_open(&self, opening: &Opening, device: usize) {
        self.core.share.imports().open.insert(
            opening.hold,
            Import {
                name: opening.name,
                uuid: opening.device,
                device,
                block: opening.block,
                bytes: opening.bytes,
                inherited: 0,
            },
        );
    }

    /// A hold ends: nothing of it is mapped here any more.
    pub fn close_share(&self, hold: u64) {
        let core = &self.core;
        if core.is_child() {
            return;
        }
        let import = core.share.imports().open.remove(&hold);
        if let Some(import) = import.filter(|import| import.inherited > 0)
            && let Some(device) = core.device(import.device)
        {
            device.lock().pool.disinherit(import.inherited);
            core.link.poke();
        }
        core.link.send(ToDaemon::ShareClose { hold });
    }
}
