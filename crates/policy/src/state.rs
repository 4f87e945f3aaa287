//! What the arbiter remembers of devices, tasks and clients.

use std::collections::{BTreeMap, BTreeSet};

use core::time::Duration;

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

use crate::action::{Depth, ReclaimReason};
use crate::event::{AskId, AskKind, Outcome, TaskSpec};
use crate::time::{Time, nanos};
use crate::view::ClientState;

/// One GPU.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) capacity: Bytes,
    pub(crate) unmanaged: Bytes,
    pub(crate) peak: Bytes,
    /// The client for which room is being gathered: nobody else gets partial grants, or free room that it needs.
    pub(crate) gathering: Option<ClientId>,
    pub(crate) out: Rate,
    pub(crate) back: Rate,
    /// Copying that is not yet paid off by time on the GPU, in nanoseconds of GPU time still owed for it.
    pub(crate) debt: u64,
    /// Virtual time below which no task enters the contention: idling earns no credit.
    pub(crate) floor: u64,
    /// More is held than there is, by a change that no grant made.
    pub(crate) excused: bool,
}

/// A link's speed in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    per_second: u64,
    measured: bool,
}

impl Rate {
    pub(crate) fn assumed(per_second: u64) -> Self {
        Self {
            per_second: per_second.max(1),
            measured: false,
        }
    }

    /// Takes in one copy. Small ones say more about fixed costs than about the link.
    pub(crate) fn sample(&mut self, bytes: Bytes, nanos: u64) {
        if bytes < Bytes::mib(32) || nanos == 0 {
            return;
        }
        let seen = u64::try_from(u128::from(bytes.0) * 1_000_000_000 / u128::from(nanos)).unwrap_or(u64::MAX);
        self.per_second = if self.measured {
            u64::try_from((u128::from(self.per_second) * 3 + u128::from(seen)) / 4).unwrap_or(u64::MAX)
        } else {
            seen
        }
        .max(1);
        self.measured = true;
    }

    /// How long a copy takes, in nanoseconds.
    pub(crate) fn time(self, bytes: Bytes) -> u64 {
        u64::try_from(u128::from(bytes.0) * 1_000_000_000 / u128::from(self.per_second)).unwrap_or(u64::MAX)
    }
}

/// One `ebb run`.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) spec: TaskSpec,
    /// Devices that were named when it was added.
    pub(crate) named: BTreeSet<DeviceId>,
    /// What of its request holds on each device that it uses: all of it, unless others' requests left less.
    pub(crate) guaranteed: BTreeMap<DeviceId, Bytes>,
    /// Weighted time on each device.
    pub(crate) virtual_time: BTreeMap<DeviceId, u64>,
    pub(crate) paused: bool,
    pub(crate) pause_told: bool,
    /// A pause was asked for and waits for what the task is owed, until then at the longest.
    pub(crate) put_off: Option<Time>,
    /// Was paused before it ran: its clients come back together.
    pub(crate) resumed: bool,
    /// The limit was forced below what is live: evict to keep it.
    pub(crate) forced: bool,
    /// Devices on which it has more than its limit by a change that no grant made.
    pub(crate) excused: BTreeSet<DeviceId>,
}

impl Task {
    pub(crate) fn limit(&self) -> Bytes {
        self.spec.limit.unwrap_or(Bytes::MAX)
    }

    pub(crate) fn guaranteed(&self, device: DeviceId) -> Bytes {
        self.guaranteed.get(&device).copied().unwrap_or(Bytes::ZERO)
    }

    pub(crate) fn virtual_time(&self, device: DeviceId) -> u64 {
        self.virtual_time.get(&device).copied().unwrap_or(0)
    }

    /// Virtual nanoseconds for each nanosecond on the GPU: the inverse of the weights 4, 2 and 1.
    pub(crate) fn pace(&self) -> u64 {
        match self.spec.priority {
            Priority::High => 1,
            Priority::Normal => 2,
            Priority::Low => 4,
        }
    }
}

/// An open ask.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) id: AskId,
    pub(crate) kind: AskKind,
    pub(crate) left: Bytes,
    pub(crate) long: bool,
    pub(crate) since: Time,
}

/// An open order.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) id: OrderId,
    /// What it should bring; less than was written in the order if that was "everything".
    pub(crate) bytes: Bytes,
    pub(crate) got: Bytes,
    pub(crate) depth: Depth,
    pub(crate) reason: ReclaimReason,
    pub(crate) last_progress: Time,
    pub(crate) cancelled: bool,
    pub(crate) evicted_before: Bytes,
}

impl Order {
    /// What may still come of it, as far as anyone may count on.
    pub(crate) fn pending(&self) -> Bytes {
        if self.cancelled {
            Bytes::ZERO
        } else {
            self.bytes.saturating_sub(self.got)
        }
    }
}

/// One process on one device.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) task: TaskId,
    pub(crate) device: DeviceId,
    pub(crate) lease: Bytes,
    pub(crate) overhead: Bytes,
    /// In host memory, by its own account or by what its orders copied.
    pub(crate) evicted: Bytes,
    /// Granted for evicted bytes that are not known to be back yet.
    pub(crate) incoming: Bytes,
    pub(crate) pinned: Bytes,
    /// Lease that nothing uses, by its last account.
    pub(crate) unused: Bytes,
    pub(crate) asks: Vec<Ask>,
    pub(crate) order: Option<Order>,
    pub(crate) last_touch: Time,
    pub(crate) last_grant: Time,
    pub(crate) turn_start: Time,
    /// Copying that its turn was bought with, in nanoseconds: its turn is to be worth it.
    pub(crate) turn_cost: u64,
    /// All is granted and being copied in; not a victim until then, whatever becomes of the news that it is back.
    pub(crate) restoring_until: Time,
    /// Its memory is to come back before anything is taken from it again.
    pub(crate) owed_restore: bool,
    /// And then it is to have its turn.
    pub(crate) owed_until: Time,
    pub(crate) leave_alone_until: Time,
    pub(crate) pause: Duration,
    /// Counts as active while it is left alone: its GPU work did not end.
    pub(crate) busy: bool,
    pub(crate) idle_released: bool,
    /// Pausing it is done as far as it goes.
    pub(crate) settled: bool,
    pub(crate) last_reason: Option<ReclaimReason>,
    pub(crate) last_outcome: Option<Outcome>,
    pub(crate) state: ClientState,
    pub(crate) state_since: Time,
    pub(crate) releases: u64,
    pub(crate) restores: u64,
}

impl Client {
    /// Lease that could be moved at all.
    pub(crate) fn movable(&self) -> Bytes {
        self.lease.saturating_sub(self.pinned)
    }

    /// Lease and overhead.
    pub(crate) fn held(&self) -> Bytes {
        self.lease.saturating_add(self.overhead)
    }

    /// What stays on the device whatever is ordered.
    pub(crate) fn stuck(&self) -> Bytes {
        self.overhead.saturating_add(self.pinned.min(self.lease))
    }

    /// Bytes that need lease before the client can run again.
    pub(crate) fn away(&self) -> Bytes {
        self.evicted
            .saturating_sub(self.incoming)
            .max(self.asked(AskKind::Restore))
    }

    pub(crate) fn asked(&self, kind: AskKind) -> Bytes {
        self.asks.iter().filter(|a| a.kind == kind).map(|a| a.left).sum()
    }

    pub(crate) fn wants_back(&self) -> bool {
        self.asks.iter().any(|a| a.kind == AskKind::Restore)
    }

    /// Something of it is not on the device: it cannot run.
    pub(crate) fn suspended(&self) -> bool {
        !self.evicted.is_zero() || self.wants_back()
    }

    /// Leaves it alone for longer each time.
    pub(crate) fn back_off(&mut self, now: Time, first: Duration, most: Duration, busy: bool) -> u64 {
        self.pause = if self.pause.is_zero() {
            first
        } else {
            self.pause.saturating_mul(2).min(most)
        };
        self.leave_alone_until = now.after(self.pause);
        self.busy = busy;
        nanos(self.pause) / 1_000_000
    }
}
