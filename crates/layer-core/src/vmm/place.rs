//! Driver calls on one memory of the program, each sequence as a whole or not at all.
//!
//! What an undo could not undo is returned as [`Remains`], stays in the books as used, and is tried again later.

use ebb_device::{DeviceError, DeviceMemory, Grant, Handle, Props};

use super::Mapped;

/// What the driver would not take back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Remains {
    pub(crate) handle: Option<Handle>,
    pub(crate) len: u64,
    /// Where it is still mapped for the program: start and size.
    pub(crate) at: Vec<(u64, u64)>,
    /// Addresses of ours, and whether it is still mapped there.
    pub(crate) scratch: Option<(u64, bool)>,
}

impl Remains {
    fn is_empty(&self) -> bool {
        self.handle.is_none() && self.at.is_empty() && self.scratch.is_none()
    }

    /// Tries to take everything back; what is left, if something is.
    pub(crate) fn clear(mut self, memory: &dyn DeviceMemory) -> Option<Self> {
        self.at.retain(|(at, size)| memory.unmap_as(*at, *size).is_err());
        if let Some((at, mapped)) = self.scratch {
            let mapped = mapped && memory.unmap(at, self.len).is_err();
            let kept = mapped || memory.free_reservation(at, self.len).is_err();
            self.scratch = kept.then_some((at, mapped));
        }
        if let Some(handle) = self.handle
            && memory.release(handle).is_ok()
        {
            self.handle = None;
        }
        (!self.is_empty()).then_some(self)
    }

    /// Whether physical memory is still held by it.
    pub(crate) fn holds_memory(&self) -> bool {
        self.handle.is_some() || !self.at.is_empty() || self.scratch.is_some_and(|(_, mapped)| mapped)
    }
}

/// A failed sequence: the first error, and what is left of it.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: DeviceError,
    pub(crate) remains: Option<Remains>,
}

/// Where a memory's bytes can be copied from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seat {
    /// Its first byte, as copies reach it.
    pub(crate) at: u64,
    /// The addresses are ours, and go after the copy.
    scratch: bool,
}

impl Seat {
    /// A mapping of the program over all of the memory that this device may read and write.
    pub(crate) fn find(memory: &dyn DeviceMemory, len: u64, maps: &[Mapped]) -> Option<u64> {
        let own = Grant {
            location: memory.location(),
            flags: Grant::READ_WRITE,
        };
        let found = maps
            .iter()
            .find(|mapping| mapping.size == len && mapping.grants.contains(&own))?;
        Some(found.at)
    }

    /// A mapping of the program over all of the memory that this device may write, or one that we make.
    pub(crate) fn take(
        memory: &dyn DeviceMemory,
        len: u64,
        real: Handle,
        maps: &[Mapped],
    ) -> Result<Self, Failed> {
        if let Some(at) = Self::find(memory, len, maps) {
            return Ok(Self { at, scratch: false });
        }
        let failed = |error, remains: Option<Remains>| Failed {
            error,
            remains: remains.and_then(|remains| remains.clear(memory)),
        };
        let at = memory
            .reserve(len, memory.granularity())
            .map_err(|error| failed(error, None))?;
        let remains = |mapped| {
            Some(Remains {
                len,
                scratch: Some((at, mapped)),
                ..Remains::default()
            })
        };
        memory
            .map(at, len, real)
            .map_err(|error| failed(error, remains(false)))?;
        memory
            .set_access(at, len)
            .map_err(|error| failed(error, remains(true)))?;
        Ok(Self { at, scratch: true })
    }

    /// The copy is done, or given up.
    pub(crate) fn leave(self, memory: &dyn DeviceMemory, len: u64) -> Option<Remains> {
        if !self.scratch {
            return None;
        }
        let remains = Remains {
            len,
            scratch: Some((self.at, true)),
            ..Remains::default()
        };
        remains.clear(memory)
    }
}

/// Maps one mapping as it was.
fn map(memory: &dyn DeviceMemory, mapping: &Mapped, real: Handle) -> Result<(), (DeviceError, bool)> {
    memory
        .map_as(mapping.at, mapping.size, real)
        .map_err(|error| (error, false))?;
    // Nothing is what a new mapping has.
    let grants: Vec<Grant> = mapping
        .grants
        .iter()
        .filter(|grant| grant.flags != 0)
        .copied()
        .collect();
    if !grants.is_empty() {
        memory
            .grant(mapping.at, mapping.size, &grants)
            .map_err(|error| (error, true))?;
    }
    Ok(())
}

/// Makes the memory anew, maps it wherever it was and lets use it who could.
pub(crate) fn put_up(
    memory: &dyn DeviceMemory,
    len: u64,
    props: &Props,
    maps: &[Mapped],
) -> Result<Handle, Failed> {
    let real = memory
        .create_as(len, props)
        .map_err(|error| Failed { error, remains: None })?;
    for (done, mapping) in maps.iter().enumerate() {
        if let Err((error, mapped)) = map(memory, mapping, real) {
            let upto = done + usize::from(mapped);
            return Err(Failed {
                error,
                remains: discard(memory, len, real, &maps[..upto]),
            });
        }
    }
    Ok(real)
}

/// Unmaps and releases, whatever comes of it.
pub(crate) fn discard(memory: &dyn DeviceMemory, len: u64, real: Handle, maps: &[Mapped]) -> Option<Remains> {
    let remains = Remains {
        handle: Some(real),
        len,
        at: maps.iter().map(|mapping| (mapping.at, mapping.size)).collect(),
        scratch: None,
    };
    remains.clear(memory)
}

/// What came of [`take_down`].
#[derive(Debug)]
pub(crate) enum Down {
    /// It is gone from the card.
    Gone,
    /// It is as it was.
    Stands(DeviceError),
    /// It is gone for the program, and the driver would not take this back.
    Remains(DeviceError, Remains),
}

/// Takes a memory away whose bytes are safe.
pub(crate) fn take_down(memory: &dyn DeviceMemory, len: u64, real: Handle, maps: &[Mapped]) -> Down {
    for (done, mapping) in maps.iter().enumerate() {
        let Err(error) = memory.unmap_as(mapping.at, mapping.size) else {
            continue;
        };
        let back = maps[..done]
            .iter()
            .enumerate()
            .find_map(|(again, mapping)| Some((again, map(memory, mapping, real).err()?)));
        let Some((again, (_, mapped))) = back else {
            return Down::Stands(error);
        };
        // Neither out nor back: what is mapped must go, and it all comes back with the restore.
        let standing = maps[..again + usize::from(mapped)].iter().chain(&maps[done..]);
        let remains = Remains {
            handle: Some(real),
            len,
            at: standing.map(|mapping| (mapping.at, mapping.size)).collect(),
            scratch: None,
        };
        return match remains.clear(memory) {
            Some(remains) => Down::Remains(error, remains),
            None => Down::Gone,
        };
    }
    match memory.release(real) {
        Ok(()) => Down::Gone,
        Err(error) => Down::Remains(
            error,
            Remains {
                handle: Some(real),
                len,
                ..Remains::default()
            },
        ),
    }
}
