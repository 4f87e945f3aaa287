//! What messages list.

use ebb_units::{Bytes, DeviceUuid};

use super::{Field, Reader};

/// Room on another card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LodgedAt {
    /// The card that lends it.
    pub lender: DeviceUuid,
    /// How much.
    pub bytes: Bytes,
}

impl Field for LodgedAt {
    fn put(&self, out: &mut Vec<u8>) {
        self.lender.put(out);
        self.bytes.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            lender: <DeviceUuid as Field>::get(r)?,
            bytes: <Bytes as Field>::get(r)?,
        })
    }
}

/// A process of a task on one card, as another process of that task sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldProcess {
    /// Its number in the pid namespace of who asks.
    pub pid: u32,
    /// Its number as the daemon sees it, which is how NVML lists it if the daemon lives in the host's namespace.
    pub seen_pid: u32,
    /// What it is charged with.
    pub bytes: Bytes,
}

impl Field for WorldProcess {
    fn put(&self, out: &mut Vec<u8>) {
        self.pid.put(out);
        self.seen_pid.put(out);
        self.bytes.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            pid: u32::get(r)?,
            seen_pid: u32::get(r)?,
            bytes: <Bytes as Field>::get(r)?,
        })
    }
}

/// A run of bytes in an arena segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestingRun {
    /// The segment.
    pub segment: u64,
    /// Where in it.
    pub offset: u64,
    /// How long.
    pub bytes: Bytes,
}

impl Field for RestingRun {
    fn put(&self, out: &mut Vec<u8>) {
        self.segment.put(out);
        self.offset.put(out);
        self.bytes.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            segment: u64::get(r)?,
            offset: u64::get(r)?,
            bytes: <Bytes as Field>::get(r)?,
        })
    }
}

/// Bytes of a process that are in a common segment as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommonBlock {
    /// The process's own segment.
    pub segment: u64,
    /// Where in it.
    pub offset: u64,
    /// How many.
    pub bytes: Bytes,
    /// The notice that told of them: they are the same only if it still holds.
    pub notice: u64,
    /// Where in the common segment.
    pub at: u64,
}

impl Field for CommonBlock {
    fn put(&self, out: &mut Vec<u8>) {
        self.segment.put(out);
        self.offset.put(out);
        self.bytes.put(out);
        self.notice.put(out);
        self.at.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            segment: u64::get(r)?,
            offset: u64::get(r)?,
            bytes: <Bytes as Field>::get(r)?,
            notice: u64::get(r)?,
            at: u64::get(r)?,
        })
    }
}
