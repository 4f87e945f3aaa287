//! Reservations, physical memory and mappings: the driver's rules about them.

use std::collections::{BTreeMap, HashMap};

use super::FakeHost;
use crate::{DeviceError, Direction, Grant, Handle, HostAddr, Location, Props};

#[derive(Debug)]
pub(super) struct Copy {
    pub(super) direction: Direction,
    pub(super) host: HostAddr,
    pub(super) dev: u64,
    pub(super) len: u64,
}

#[derive(Debug)]
struct Physical {
    bytes: Vec<u8>,
    released: bool,
    mappings: u32,
    props: Props,
}

#[derive(Debug)]
struct Mapping {
    size: u64,
    handle: u64,
    access: bool,
    /// What was said about others, and about this device, by [`State::grant`].
    grants: BTreeMap<Location, u32>,
}

/// The fake device as a location.
pub(super) const SELF: Location = Location { kind: 1, id: 0 };

#[derive(Debug)]
pub(super) struct State {
    next_address: u64,
    next_handle: u64,
    reservations: BTreeMap<u64, u64>,
    physical: HashMap<u64, Physical>,
    mappings: BTreeMap<u64, Mapping>,
    registered: BTreeMap<usize, u64>,
    violations: Vec<String>,
    /// Memory that is gone, and the card that gets it back: by what it was made as.
    gone: Vec<(Props, u64)>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            next_address: 0x7000_0000_0000,
            next_handle: 1,
            reservations: BTreeMap::new(),
            physical: HashMap::new(),
            mappings: BTreeMap::new(),
            registered: BTreeMap::new(),
            violations: Vec::new(),
            gone: Vec::new(),
        }
    }
}

const ILLEGAL_ADDRESS: DeviceError = DeviceError::Driver {
    code: 700,
    call: "kernel",
};

impl State {
    pub(super) fn violation(&mut self, text: String) {
        self.violations.push(text);
    }

    pub(super) fn violations(&self) -> &[String] {
        &self.violations
    }

    pub(super) fn reserve(&mut self, size: u64, align: u64) -> u64 {
        let at = self.next_address.next_multiple_of(align);
        self.next_address = at + size + align;
        self.reservations.insert(at, size);
        at
    }

    pub(super) fn unreserve(&mut self, addr: u64, size: u64) -> Result<(), ()> {
        let used = self.overlaps(addr, size);
        if self.reservations.get(&addr) != Some(&size) || used {
            self.violation(format!(
                "free_reservation of {addr:#x}+{size:#x}: not reserved so, or in use"
            ));
            return Err(());
        }
        self.reservations.remove(&addr);
        Ok(())
    }

    fn overlaps(&self, addr: u64, size: u64) -> bool {
        self.mappings
            .range(..addr + size)
            .next_back()
            .is_some_and(|(at, m)| at + m.size > addr)
    }

    pub(super) fn create(&mut self, size: u64, props: Props) -> Handle {
        let handle = self.next_handle;
        self.next_handle += 1;
        let len = usize::try_from(size).expect("test sizes are small");
        self.physical.insert(
            handle,
            Physical {
                bytes: vec![0xDD; len],
                released: false,
                mappings: 0,
                props,
            },
        );
        Handle(handle)
    }

    pub(super) fn release(&mut self, handle: Handle) -> Result<(), ()> {
        match self.physical.get_mut(&handle.0) {
            Some(physical) if !physical.released => {
                physical.released = true;
                self.drop_unused(handle.0);
                Ok(())
            }
            _ => {
                self.violation(format!("release of {handle:?}: no such handle"));
                Err(())
            }
        }
    }

    fn drop_unused(&mut self, handle: u64) {
        let unused = |p: &Physical| p.released && p.mappings == 0;
        if let Some(p) = self.physical.get(&handle).filter(|p| unused(p)) {
            self.gone.push((p.props, p.bytes.len() as u64));
            self.physical.remove(&handle);
        }
    }

    /// Bytes that cards get back since this was asked last, by what they were made as.
    pub(super) fn take_gone(&mut self) -> Vec<(Props, u64)> {
        std::mem::take(&mut self.gone)
    }

    /// `part`: the mapping may be shorter than the handle.
    pub(super) fn map(&mut self, addr: u64, size: u64, handle: Handle, part: bool) -> Result<(), ()> {
        let inside = self
            .reservations
            .range(..=addr)
            .next_back()
            .is_some_and(|(at, len)| addr + size <= at + len);
        let fits = self
            .physical
            .get(&handle.0)
            .filter(|p| !p.released)
            .map(|p| p.bytes.len() as u64)
            .is_some_and(|len| len == size || part && size < len);
        if !inside || !fits || self.overlaps(addr, size) {
            self.violation(format!("map of {handle:?} at {addr:#x}+{size:#x}: not possible"));
            return Err(());
        }
        if let Some(physical) = self.physical.get_mut(&handle.0) {
            physical.mappings += 1;
        }
        self.mappings.insert(
            addr,
            Mapping {
                size,
                handle: handle.0,
                access: false,
                grants: BTreeMap::new(),
            },
        );
        Ok(())
    }

    /// The mappings that lie in a range, if they cover it without a gap or an overhang.
    fn covered(&self, addr: u64, size: u64) -> Option<Vec<u64>> {
        let mut at = addr;
        let mut found = Vec::new();
        while at < addr + size {
            let mapping = self.mappings.get(&at)?;
            found.push(at);
            at += mapping.size;
        }
        (at == addr + size).then_some(found)
    }

    pub(super) fn unmap(&mut self, addr: u64, size: u64) -> Result<(), ()> {
        let Some(found) = self.covered(addr, size) else {
            self.violation(format!(
                "unmap of {addr:#x}+{size:#x}: not a run of whole mappings"
            ));
            return Err(());
        };
        for at in found {
            if let Some(mapping) = self.mappings.remove(&at) {
                if let Some(physical) = self.physical.get_mut(&mapping.handle) {
                    physical.mappings -= 1;
                }
                self.drop_unused(mapping.handle);
            }
        }
        Ok(())
    }

    pub(super) fn set_access(&mut self, addr: u64, size: u64) -> Result<(), ()> {
        let Some(found) = self.covered(addr, size) else {
            self.violation(format!(
                "set_access of {addr:#x}+{size:#x}: not a run of whole mappings"
            ));
            return Err(());
        };
        for at in found {
            if let Some(mapping) = self.mappings.get_mut(&at) {
                mapping.access = true;
            }
        }
        Ok(())
    }

    pub(super) fn grant(&mut self, addr: u64, size: u64, grants: &[Grant]) -> Result<(), ()> {
        let found = self.covered(addr, size).ok_or(())?;
        for at in found {
            if let Some(mapping) = self.mappings.get_mut(&at) {
                for grant in grants {
                    if grant.location == SELF {
                        mapping.access = grant.flags == Grant::READ_WRITE;
                    }
                    mapping.grants.insert(grant.location, grant.flags);
                }
            }
        }
        Ok(())
    }

    /// The mapping at exactly that address: size, what its memory was asked for as, and what was granted.
    pub(super) fn mapping(&self, addr: u64) -> Option<(u64, Props, BTreeMap<Location, u32>)> {
        let mapping = self.mappings.get(&addr)?;
        let props = self.physical.get(&mapping.handle)?.props;
        Some((mapping.size, props, mapping.grants.clone()))
    }

    /// The pieces of a range: handle, offset in it, length. `None` if a byte has no access.
    fn pieces(&self, addr: u64, len: u64) -> Option<Vec<(u64, usize, usize)>> {
        let mut pieces = Vec::new();
        let mut at = addr;
        while at < addr + len {
            let (start, mapping) = self.mappings.range(..=at).next_back()?;
            let end = start + mapping.size;
            if !mapping.access || end <= at {
                return None;
            }
            let upto = end.min(addr + len);
            let as_usize = |n| usize::try_from(n).expect("test sizes are small");
            pieces.push((mapping.handle, as_usize(at - start), as_usize(upto - at)));
            at = upto;
        }
        Some(pieces)
    }

    pub(super) fn accessible(&self, addr: u64, len: u64) -> bool {
        self.pieces(addr, len).is_some()
    }

    pub(super) fn write(&mut self, addr: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let pieces = self.pieces(addr, bytes.len() as u64).ok_or(ILLEGAL_ADDRESS)?;
        let mut rest = bytes;
        for (handle, from, len) in pieces {
            let (now, later) = rest.split_at(len);
            if let Some(physical) = self.physical.get_mut(&handle) {
                physical.bytes[from..from + len].copy_from_slice(now);
            }
            rest = later;
        }
        Ok(())
    }

    pub(super) fn read(&self, addr: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let pieces = self.pieces(addr, bytes.len() as u64).ok_or(ILLEGAL_ADDRESS)?;
        let mut rest = bytes;
        for (handle, from, len) in pieces {
            let (now, later) = rest.split_at_mut(len);
            if let Some(physical) = self.physical.get(&handle) {
                now.copy_from_slice(&physical.bytes[from..from + len]);
            }
            rest = later;
        }
        Ok(())
    }

    pub(super) fn copy(&mut self, copy: &Copy, host: &FakeHost) -> Result<(), DeviceError> {
        let result = host.bytes(copy.host, copy.len, |bytes| match copy.direction {
            Direction::Out => self.read(copy.dev, bytes),
            Direction::In => self.write(copy.dev, bytes),
        });
        match result {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => {
                self.violation(format!("{copy:?} ran when the device memory was gone"));
                Err(error)
            }
            None => {
                self.violation(format!("{copy:?} ran when the host memory was gone"));
                Err(ILLEGAL_ADDRESS)
            }
        }
    }

    pub(super) fn between(&mut self, to: u64, from: u64, len: u64) -> Result<(), DeviceError> {
        let mut bytes = vec![0; usize::try_from(len).expect("test sizes are small")];
        let copied = self.read(from, &mut bytes).and_then(|()| self.write(to, &bytes));
        copied.inspect_err(|_| {
            self.violation(format!(
                "a copy of {from:#x}+{len:#x} to {to:#x} ran when memory was gone"
            ));
        })
    }

    pub(super) fn zero(&mut self, dev: u64, len: u64) -> Result<(), DeviceError> {
        let zeros = vec![0; usize::try_from(len).expect("test sizes are small")];
        self.write(dev, &zeros).inspect_err(|_| {
            self.violation(format!(
                "zeros at {dev:#x}+{len:#x} came when the device memory was gone"
            ));
        })
    }

    pub(super) fn register(&mut self, host: HostAddr, len: u64) -> Result<(), ()> {
        let overlaps = self
            .registered
            .range(..host.offset(len).0)
            .next_back()
            .is_some_and(|(at, n)| HostAddr(*at).offset(*n).0 > host.0);
        if overlaps {
            self.violation(format!("register_host of {host:?}: registered already"));
            return Err(());
        }
        self.registered.insert(host.0, len);
        Ok(())
    }

    pub(super) fn unregister(&mut self, host: HostAddr, len: u64) -> Result<(), ()> {
        if self.registered.get(&host.0) != Some(&len) {
            self.violation(format!("unregister_host of {host:?}: not registered so"));
            return Err(());
        }
        self.registered.remove(&host.0);
        Ok(())
    }

    pub(super) fn handles(&self) -> usize {
        self.physical.values().filter(|p| !p.released).count()
    }

    /// All memory, by what it was made as.
    pub(super) fn physical(&self) -> Vec<(Props, u64)> {
        self.physical
            .values()
            .map(|p| (p.props, p.bytes.len() as u64))
            .collect()
    }

    pub(super) fn mapped(&self) -> u64 {
        self.mappings.values().map(|m| m.size).sum()
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reservations.values().sum()
    }

    pub(super) fn registered(&self) -> usize {
        self.registered.len()
    }
}
