//! The layout of the `machine` file. Every field that more than one process writes is an atomic.

use std::sync::atomic::{AtomicU32, AtomicU64};

/// Most devices that a machine can have.
pub const MAX_DEVICES: usize = 16;
/// Most processes that can be attached at once.
pub const MAX_SLOTS: usize = 512;
/// Most exported objects that can exist at once.
pub(crate) const MAX_OBJECTS: usize = 16_384;
/// Stands for the host where an object's device is asked for: it costs no device anything.
pub const HOST_DEVICE: u32 = u32::MAX;
/// Most interprocess events that can exist at once.
pub const MAX_EVENTS: usize = 1024;

/// "ebbsim" and the layout's version.
pub(crate) const MAGIC: u64 = 0x6562_6273_696d_0007;

/// A device's figures, and what its link and its engines are doing.
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct DeviceRow {
    pub(crate) capacity: AtomicU64,
    pub(crate) busy_ns: AtomicU64,
    pub(crate) to_device_free_at_ns: AtomicU64,
    pub(crate) to_host_free_at_ns: AtomicU64,
}

/// What one process holds on one device.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct UseRow {
    /// Memory in bytes, without contexts and without objects.
    pub(crate) bytes: AtomicU64,
    /// Contexts, in bytes.
    pub(crate) context_bytes: AtomicU64,
}

/// One process. Whose it is says the lock on its byte, see Note [Exact after kill -9].
#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct SlotRow {
    pub(crate) pid: AtomicU32,
    /// The state of the checkpoint interface, as the driver numbers it.
    pub(crate) checkpoint_state: AtomicU32,
    /// Counts requests of other processes; the process serves the request when it sees a new number.
    pub(crate) request_sequence: AtomicU32,
    pub(crate) request_code: AtomicU32,
    pub(crate) request_argument: AtomicU64,
    /// The last request that was answered, and the answer.
    pub(crate) answer_sequence: AtomicU32,
    pub(crate) answer_code: AtomicU32,
    pub(crate) usage: [UseRow; MAX_DEVICES],
}

/// Memory that was exported: a file `object-<id>` in the state folder. Free when `id` is zero.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ObjectRow {
    pub(crate) id: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) device: AtomicU32,
    pub(crate) creator_pid: AtomicU32,
    /// What its maker asked for besides; the driver's business.
    pub(crate) flags: AtomicU64,
}

/// An event that several processes use. Free when `owner` is zero (slot number plus one otherwise).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct EventRow {
    pub(crate) owner: AtomicU32,
    pub(crate) generation: AtomicU32,
    pub(crate) recorded: AtomicU64,
    pub(crate) completed: AtomicU64,
}

/// The whole file.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct MachineFile {
    /// Written last: a file without it is not initialised.
    pub(crate) magic: AtomicU64,
    pub(crate) devices: AtomicU32,
    /// One more than the highest slot ever used: where scans end.
    pub(crate) slots_used: AtomicU32,
    /// The same for objects.
    pub(crate) objects_used: AtomicU32,
    pub(crate) reserved: AtomicU32,
    pub(crate) context_bytes: AtomicU64,
    pub(crate) mps_server_bytes: AtomicU64,
    pub(crate) mps_client_bytes: AtomicU64,
    pub(crate) granularity: AtomicU64,
    pub(crate) link_bytes_per_s: AtomicU64,
    pub(crate) link_latency_ns: AtomicU64,
    pub(crate) next_object: AtomicU64,
    pub(crate) device: [DeviceRow; MAX_DEVICES],
    pub(crate) slot: [SlotRow; MAX_SLOTS],
    pub(crate) object: [ObjectRow; MAX_OBJECTS],
    pub(crate) event: [EventRow; MAX_EVENTS],
}

/// Where the file's lock bytes lie: far behind its contents.
pub(crate) const LEDGER_LOCK: i64 = 1 << 40;
/// The lock byte of slot 0; the others follow.
pub(crate) const SLOT_LOCKS: i64 = 1 << 41;
