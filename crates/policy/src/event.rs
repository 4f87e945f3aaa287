//! [`Event`]: everything that can happen, as the arbiter hears of it.

use core::fmt;
use core::time::Duration;

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

/// Number of an ask, never reused by one client.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct AskId(pub u64);

impl fmt::Debug for AskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a{}", self.0)
    }
}

impl fmt::Display for AskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("a{}", self.0))
    }
}

/// What a client asks lease for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum AskKind {
    /// A new allocation: granted whole or not at all.
    Alloc,
    /// Its evicted bytes: granted piece by piece as room appears, after a reservation for the whole.
    Restore,
}

/// What a task may have.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TaskSpec {
    /// Bytes that are the task's for the asking, on each device that it uses.
    pub request: Bytes,
    /// Most that all its clients on one device may have, overhead included; `None`: the device.
    pub limit: Option<Bytes>,
    /// Who goes first.
    pub priority: Priority,
    /// A client idle for this long is released unasked; `None`: never, and then its request is not lent either.
    pub idle_release: Option<Duration>,
    /// Whose it is. Tenants share by their weights, and the tasks of each share what is the tenant's.
    #[cfg_attr(feature = "serde", serde(default))]
    pub tenant: Tenant,
}

/// Who tasks belong to: a user, a team. A number that the driver of the arbiter chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
pub struct Tenant(pub u32);

impl Default for TaskSpec {
    fn default() -> Self {
        Self {
            request: Bytes::ZERO,
            limit: None,
            priority: Priority::Normal,
            idle_release: Some(Duration::from_secs(60)),
            tenant: Tenant::default(),
        }
    }
}

/// How a reclaim ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Outcome {
    /// What was ordered, or all that there was, is given back.
    Done,
    /// Work on the GPU (or a graph capture) did not end in time.
    Busy,
    /// A driver call failed; what was not given back is mapped again.
    Failed,
    /// Nothing left that can be moved.
    NothingLeft,
    /// The host arena had no room for more.
    NoRoom,
}

/// What a client has, by its own account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Usage {
    /// Physical bytes that its lease backs at present, caches included.
    pub resident: Bytes,
    /// Of these, bytes that no allocation uses.
    pub cached: Bytes,
    /// Bytes in host memory.
    pub evicted: Bytes,
    /// Resident bytes that cannot be moved.
    pub pinned: Bytes,
    /// The driver's own memory for this process.
    pub overhead: Bytes,
    /// Of that: what the client can send off the device when it is ordered to, and what needs no lease to come back: managed memory, and
    /// what the driver keeps for graphs that are gone.
    #[cfg_attr(feature = "serde", serde(default))]
    pub loose: Bytes,
    /// Resident bytes that leave without a copy, as far as the client believes: host memory has them as they are. Of use for choosing, not for
    /// sums.
    #[cfg_attr(feature = "serde", serde(default))]
    pub clean: Bytes,
}

/// Something that happened.
///
/// What a client says is an allegation: the arbiter never lets a number make another client's account wrong. Unknown
/// ids are ignored with a [`crate::Note`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "event", rename_all = "snake_case"))]
pub enum Event {
    /// A device is there, or its figures changed.
    Device {
        /// Which.
        device: DeviceId,
        /// What clients can get in sum: the device's memory less the driver's reserve.
        capacity: Bytes,
        /// Held by programs that no client accounts for.
        unmanaged: Bytes,
    },
    /// How much of each card a tenant is to have beside others that want it. Unknown tenants weigh 1.
    Tenant {
        /// Who.
        tenant: Tenant,
        /// Its weight, at least 1.
        weight: u32,
    },
    /// A new task. Answered by `TaskAccepted` or `TaskRefused`.
    TaskAdded {
        /// Its id, new.
        task: TaskId,
        /// What it may have.
        spec: TaskSpec,
        /// Devices that it will use; empty if nobody knows yet. With devices named, the request must fit on each of them.
        devices: Vec<DeviceId>,
        /// The task ran before this daemon did: it is accepted whatever the sums say.
        adopt: bool,
    },
    /// New figures for a task. Answered by `TaskChanged` or `ChangeRefused`.
    TaskChanged {
        /// Which.
        task: TaskId,
        /// All its figures, the unchanged ones included.
        spec: TaskSpec,
        /// Accept a limit below what is live: clients are then evicted and stay so until the limit fits again.
        force: bool,
    },
    /// A task ended. Clients of it that are still there leave with it.
    TaskRemoved {
        /// Which.
        task: TaskId,
    },
    /// A process made a context on a device, or declares itself again after the daemon restarted.
    ClientJoined {
        /// Its id, new.
        client: ClientId,
        /// The task that it belongs to.
        task: TaskId,
        /// Where.
        device: DeviceId,
        /// Lease that it holds already.
        lease: Bytes,
        /// Its bytes in host memory.
        evicted: Bytes,
        /// The driver's own memory for it.
        overhead: Bytes,
    },
    /// The process is dead or has left the device: all that it held is free, but for what others keep alive.
    ClientLeft {
        /// Which.
        client: ClientId,
        /// Of its lease: memory that other processes imported, which stays on the device and counts as unmanaged from now on.
        #[cfg_attr(feature = "serde", serde(default))]
        kept: Bytes,
    },
    /// More lease, please. Answered by grants that sum up to `bytes`, or one `Deny`.
    Ask {
        /// Who.
        client: ClientId,
        /// Number of the ask.
        ask: AskId,
        /// What for.
        kind: AskKind,
        /// How much.
        bytes: Bytes,
        /// An early out-of-memory is of no use to the program.
        long: bool,
    },
    /// An ask is not needed any more. Grants that crossed it stay granted.
    AskCancelled {
        /// Who.
        client: ClientId,
        /// Which.
        ask: AskId,
    },
    /// Lease that is not needed any more.
    Returned {
        /// Who.
        client: ClientId,
        /// How much.
        bytes: Bytes,
    },
    /// Memory that a client shares with another is counted to it from now on: the other one is gone, or has closed it.
    Inherited {
        /// Who.
        client: ClientId,
        /// Whose lease it was, if that client is still known: it moves in one step.
        from: Option<ClientId>,
        /// How much: lease that nobody granted.
        bytes: Bytes,
    },
    /// Lease that was granted for it the driver has taken for itself: the process is back from a checkpoint. One step, so that nobody
    /// else gets the bytes in between.
    BecameOverhead {
        /// Who.
        client: ClientId,
        /// How much of its lease is its overhead from now on.
        bytes: Bytes,
    },
    /// What a client has at present.
    Usage {
        /// Who.
        client: ClientId,
        /// What.
        usage: Usage,
    },
    /// The client used the GPU since it was last heard of (at most every 100 ms or so).
    Touched {
        /// Who.
        client: ClientId,
    },
    /// A step of a reclaim.
    ReclaimProgress {
        /// Who.
        client: ClientId,
        /// The order.
        order: OrderId,
        /// Lease freed in this step.
        bytes: Bytes,
    },
    /// End of a reclaim.
    ReclaimDone {
        /// Who.
        client: ClientId,
        /// The order.
        order: OrderId,
        /// How it ended.
        outcome: Outcome,
        /// Bytes copied to the host by this order.
        copied: Bytes,
        /// Time of that copying.
        nanos: u64,
    },
    /// Everything is back and the client runs.
    Restored {
        /// Who.
        client: ClientId,
        /// Bytes copied in.
        copied: Bytes,
        /// Time of that copying.
        nanos: u64,
    },
    /// Evict a task and keep it off its devices.
    Pause {
        /// Which.
        task: TaskId,
    },
    /// Let a paused task run again.
    Resume {
        /// Which.
        task: TaskId,
    },
    /// The operator wants back what nobody uses on a device.
    Trim {
        /// Where.
        device: DeviceId,
    },
    /// The operator wants idle tasks of a priority to give back what they have above their requests.
    Shrink {
        /// Where.
        device: DeviceId,
        /// Whose.
        priority: Priority,
    },
    /// A client looks for room on another card for bytes that leave its own. Answered by one `LodgingLent`, of nothing if there is none.
    LodgingAsked {
        /// Who.
        client: ClientId,
        /// Cards that its own can reach.
        lenders: Vec<DeviceId>,
        /// How much at most.
        bytes: Bytes,
        /// The most that any card is to lend in all.
        most: Bytes,
    },
    /// A client has left room that was lent to it.
    LodgingLeft {
        /// Who.
        client: ClientId,
        /// Whose room it was.
        lender: DeviceId,
        /// How much.
        bytes: Bytes,
    },
    /// All that a client has on other cards, by its own word: it is new here, or its connection is.
    LodgingHeld {
        /// Who.
        client: ClientId,
        /// Where, and how much.
        held: Vec<(DeviceId, Bytes)>,
    },
    /// Time passed: [`crate::Arbiter::next_deadline`] has come.
    Tick,
}
