//! [`Action`]: everything that the arbiter wants done, and why.

use core::fmt;

use ebb_units::{Bytes, ClientId, DeviceId, OrderId, Priority, TaskId};

use crate::event::{AskId, Outcome};
use crate::predict::Foresight;

/// Why a task, or a change to one, was refused. Always the caller's numbers against the moment's: another number, or
/// the same one later, may pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Refusal {
    /// The requests would not all fit.
    #[error(
        "a request of {request} does not fit {device}: {capacity} less {unmanaged} unmanaged, and other tasks have requested {requested}"
    )]
    RequestsDoNotFit {
        /// The device with the most room.
        device: DeviceId,
        /// The new request.
        request: Bytes,
        /// Requested by other live tasks there.
        requested: Bytes,
        /// Capacity of the device.
        capacity: Bytes,
        /// Held there by programs that are not managed.
        unmanaged: Bytes,
    },
    /// A guarantee above the cap says nothing.
    #[error("the request of {request} is above the limit of {limit}")]
    RequestAboveLimit {
        /// The request.
        request: Bytes,
        /// The limit.
        limit: Bytes,
    },
    /// The task holds more than that, and it was not forced.
    #[error("the task has {live} live{} on {device}, more than the new limit of {limit}", and_cached(*.cached))]
    LimitBelowLive {
        /// Where.
        device: DeviceId,
        /// The new limit.
        limit: Bytes,
        /// Live bytes: allocated, on the card or in host memory, and overhead.
        live: Bytes,
        /// What it keeps besides and nothing uses.
        #[cfg_attr(feature = "serde", serde(default))]
        cached: Bytes,
    },
    /// The id is taken.
    #[error("{task} exists already")]
    Exists {
        /// The task.
        task: TaskId,
    },
    /// There is no such task.
    #[error("there is no task {task}")]
    Unknown {
        /// The task.
        task: TaskId,
    },
}

fn and_cached(cached: Bytes) -> String {
    if cached.is_zero() {
        String::new()
    } else {
        format!(" and {cached} cached")
    }
}

/// Why an ask was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum DenyReason {
    /// It would pass the task's limit.
    #[error(
        "{asked} more than the {charged} that the task has on this device would pass its limit of {limit}"
    )]
    OverLimit {
        /// What was asked.
        asked: Bytes,
        /// What the task has, evicted bytes included.
        charged: Bytes,
        /// Its limit.
        limit: Bytes,
    },
    /// It can never fit the device beside what is guaranteed to others.
    #[error(
        "a footprint of {footprint} can never fit: the device leaves {usable} beside what is guaranteed to others"
    )]
    NeverFits {
        /// All that the client would have.
        footprint: Bytes,
        /// The most that it could get.
        usable: Bytes,
    },
    /// Everybody who holds what cannot be moved waits for more of it: one has to be refused, and it is this one.
    #[error(
        "a deadlock: {footprint} are wanted, but others that wait as well hold all but {usable} for good"
    )]
    Deadlock {
        /// All that the client would have.
        footprint: Bytes,
        /// The most that it could get.
        usable: Bytes,
    },
    /// No room within the time.
    #[error("no room within the time that an allocation waits")]
    TimedOut,
}

/// How far a reclaim may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Depth {
    /// Only lease without memory behind it and cached free memory; never evict.
    Unused,
    /// These first, then evict.
    Evict,
    /// Only what is loose of the overhead: managed memory, and what the driver keeps for graphs. No lease changes hands.
    Beside,
}

/// Why lease is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum ReclaimReason {
    /// Idle for as long as the task's `idle_release`.
    #[error("idle")]
    IdleRelease,
    /// Idle, waiting or unused, and another client needs it.
    #[error("idle memory needed by {client}")]
    Demand {
        /// Who needs it.
        client: ClientId,
    },
    /// It waits for lease itself, and what the driver placed for it, which needs none, makes room for that.
    #[error("its own allocation needs the room")]
    Own,
    /// Its turn is over.
    #[error("turn ended in favour of {client}")]
    TurnEnded {
        /// Whose turn it is.
        client: ClientId,
    },
    /// Another task asks for what it requested.
    #[error("{client} asks for memory that its task requested")]
    Guarantee {
        /// Who asks.
        client: ClientId,
    },
    /// The task has more than its limit.
    #[error("limit lowered")]
    LimitLowered,
    /// The task is paused.
    #[error("paused")]
    Paused,
    /// The operator, or a rule of his, wants it.
    #[error("asked for by the operator")]
    Operator,
    /// Little is free on the device: memory that idles goes before somebody has to wait for it.
    #[error("little is free")]
    LowMark,
    /// It idles, and another program that is expected sooner comes back into its place.
    #[error("{client} is expected back before it")]
    Foreseen {
        /// Who is expected.
        client: ClientId,
    },
    /// The device holds less than was granted: overhead or unmanaged memory grew.
    #[error("device overcommitted")]
    Overcommitted,
}

impl ReclaimReason {
    /// For whom it is taken, if for anybody.
    #[must_use]
    pub const fn beneficiary(self) -> Option<ClientId> {
        match self {
            Self::Demand { client }
            | Self::TurnEnded { client }
            | Self::Guarantee { client }
            | Self::Foreseen { client } => Some(client),
            Self::Own
            | Self::Overcommitted
            | Self::Operator
            | Self::IdleRelease
            | Self::LowMark
            | Self::LimitLowered
            | Self::Paused => None,
        }
    }

    /// It is taken because somebody who waits needs it: without that the order is void.
    pub(crate) const fn for_others(self) -> bool {
        match self {
            Self::Own
            | Self::Demand { .. }
            | Self::TurnEnded { .. }
            | Self::Guarantee { .. }
            | Self::Overcommitted => true,
            Self::Operator
            | Self::Foreseen { .. }
            | Self::IdleRelease
            | Self::LowMark
            | Self::LimitLowered
            | Self::Paused => false,
        }
    }
}

/// What was known of the one whose memory is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Grounds {
    /// It did not use the GPU for so long, in milliseconds.
    pub idle_ms: u64,
    /// It is taken to use the GPU all the same.
    pub active: bool,
    /// It waited for lease itself.
    pub waiting: bool,
    /// Only what nothing uses is taken: no byte is copied.
    pub unused: bool,
    /// Host memory has all that is taken, as far as the client believes: no byte is copied.
    #[cfg_attr(feature = "serde", serde(default))]
    pub clean: bool,
    /// Its task has more than what is guaranteed to it.
    pub burst: bool,
    /// Its task's priority.
    pub priority: Priority,
}

impl fmt::Display for Grounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.clean {
            f.write_str("clean, ")?;
        }
        if self.unused {
            f.write_str("unused, ")?;
        } else if self.waiting {
            f.write_str("waiting, ")?;
        } else if self.active {
            f.write_str("running, ")?;
        } else if self.idle_ms < 10_000 {
            write!(
                f,
                "idle {}.{} s, ",
                self.idle_ms / 1000,
                self.idle_ms % 1000 / 100
            )?;
        } else {
            write!(f, "idle {} s, ", self.idle_ms / 1000)?;
        }
        f.write_str(if self.burst { "burst" } else { "requested" })?;
        write!(f, ", priority {}", self.priority.as_str())
    }
}

/// Something for the log: a decision's grounds, or an event that made no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Note {
    /// An event named something that is not there (any more), or is there already.
    #[error("ignored: {what}")]
    Ignored {
        /// What was ignored.
        what: String,
    },
    /// A client gave back more than it held.
    #[error("{client} gave back {said} but held {held}")]
    GaveBackTooMuch {
        /// Who.
        client: ClientId,
        /// What it said.
        said: Bytes,
        /// What it held.
        held: Bytes,
    },
    /// Room for a whole restore or allocation is being gathered for one client.
    #[error("gathering {bytes} for {client}")]
    Reserved {
        /// For whom.
        client: ClientId,
        /// How much it still needs.
        bytes: Bytes,
    },
    /// That was given up; what the client got so far stays its own until someone else needs it.
    #[error("no longer gathering for {client}")]
    ReservationDropped {
        /// For whom.
        client: ClientId,
    },
    /// A reclaim did not work.
    #[error("{order} to {client} ended with {outcome:?}; left alone for {pause_ms} ms")]
    BackingOff {
        /// Who.
        client: ClientId,
        /// The order.
        order: OrderId,
        /// How it ended.
        outcome: Outcome,
        /// How long the client is left alone, in milliseconds.
        pause_ms: u64,
    },
    /// On a device of its own choice a task's request does not fit beside those of others.
    #[error("{task} requested {request} but only {guaranteed} can be guaranteed on {device}")]
    GuaranteeCut {
        /// The task.
        task: TaskId,
        /// Where.
        device: DeviceId,
        /// What it requested.
        request: Bytes,
        /// What it is guaranteed.
        guaranteed: Bytes,
    },
    /// Room is made for a client before it asks.
    #[error("{device}: room for {client}, {foresight}")]
    RoomAhead {
        /// Where.
        device: DeviceId,
        /// For whom.
        client: ClientId,
        /// Why that is expected. What the others may lose by it is in the regret.
        foresight: Foresight,
    },
    /// More is held than the device has.
    #[error("{device} is overcommitted by {bytes}")]
    Overcommitted {
        /// Which.
        device: DeviceId,
        /// By how much.
        bytes: Bytes,
    },
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(tag = "action", rename_all = "snake_case"))]
pub enum Action {
    /// The task is in.
    TaskAccepted {
        /// Which.
        task: TaskId,
    },
    /// The task is not in.
    TaskRefused {
        /// Which.
        task: TaskId,
        /// Why.
        why: Refusal,
    },
    /// The new figures hold.
    TaskChanged {
        /// Which.
        task: TaskId,
    },
    /// The old figures hold.
    ChangeRefused {
        /// Which.
        task: TaskId,
        /// Why.
        why: Refusal,
    },
    /// A paused task has nothing left on its devices that could be taken.
    PauseDone {
        /// Which.
        task: TaskId,
        /// What stays: pinned memory and overhead.
        left: Bytes,
    },
    /// A client of a paused task could not be evicted yet; it is tried again by itself.
    PauseBlocked {
        /// Which.
        task: TaskId,
        /// Its client.
        client: ClientId,
        /// What came in the way.
        outcome: Outcome,
    },
    /// Lease for an ask. Several may come for a restore, until their sum is what was asked.
    Grant {
        /// To whom.
        client: ClientId,
        /// For which ask.
        ask: AskId,
        /// How much.
        bytes: Bytes,
        /// Nothing more will come for this ask.
        complete: bool,
    },
    /// No (more) lease for an ask, which is closed by this.
    Deny {
        /// To whom.
        client: ClientId,
        /// For which ask.
        ask: AskId,
        /// Why.
        reason: DenyReason,
        /// Trying again is of no use.
        last: bool,
    },
    /// Give lease back.
    Reclaim {
        /// Who.
        client: ClientId,
        /// Number of the order.
        order: OrderId,
        /// How much at least; [`Bytes::MAX`] means everything.
        bytes: Bytes,
        /// How far to go.
        depth: Depth,
        /// Why.
        reason: ReclaimReason,
        /// Why of this one.
        #[cfg_attr(feature = "serde", serde(default))]
        grounds: Grounds,
    },
    /// A higher priority wants what this client has: it loses it after that time, and may save itself until then.
    Warn {
        /// Who.
        client: ClientId,
        /// For whom.
        by: ClientId,
        /// Milliseconds until then.
        within_ms: u64,
    },
    /// Bring back what is in host memory without waiting for a touch: it will be needed.
    BringBack {
        /// Who.
        client: ClientId,
        /// Why that is expected; `None`: another process of its task is back already.
        #[cfg_attr(feature = "serde", serde(default))]
        foresight: Option<Foresight>,
    },
    /// An order is not wanted any more. What was done stays done; `ReclaimDone` still ends it.
    CancelReclaim {
        /// Who.
        client: ClientId,
        /// The order.
        order: OrderId,
    },
    /// Room on another card, or none.
    LodgingLent {
        /// To whom.
        client: ClientId,
        /// Whose room.
        lender: Option<DeviceId>,
        /// How much.
        bytes: Bytes,
    },
    /// Somebody on the card that lent it needs the room: leave it.
    LodgingWanted {
        /// Who.
        client: ClientId,
        /// Whose room.
        lender: DeviceId,
        /// How much at least.
        bytes: Bytes,
    },
    /// For the log.
    Note(Note),
}
