//! [`View`]: the whole state as people and tools see it.

use core::fmt;

use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};

use crate::time::Time;

/// The state of a client in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum ClientState {
    /// Used the GPU a moment ago.
    Active,
    /// Did not.
    Idle,
    /// Idle, and (some of) its memory is in the host.
    Released,
    /// Waits for lease.
    Waiting,
    /// Gets its memory back.
    Restoring,
    /// Gives memory back.
    Evicting,
    /// Its task is paused.
    Paused,
}

impl ClientState {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Idle => "idle",
            Self::Released => "released",
            Self::Waiting => "waiting",
            Self::Restoring => "restoring",
            Self::Evicting => "evicting",
            Self::Paused => "paused",
        }
    }
}

impl fmt::Display for ClientState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The devices, by id.
    pub devices: Vec<DeviceView>,
    /// The tasks, by id.
    pub tasks: Vec<TaskView>,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceView {
    /// Its id.
    pub device: DeviceId,
    /// What clients can get in sum.
    pub capacity: Bytes,
    /// Held by programs that are not managed.
    pub unmanaged: Bytes,
    /// Granted.
    pub leased: Bytes,
    /// The driver's own, of all clients.
    pub overhead: Bytes,
    /// Neither granted nor held.
    pub free: Bytes,
    /// The most that was granted and held at once, unmanaged included.
    pub peak: Bytes,
    /// For whom room is being gathered.
    pub gathering_for: Option<ClientId>,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskView {
    /// Its id.
    pub task: TaskId,
    /// Guaranteed bytes.
    pub request: Bytes,
    /// Cap.
    pub limit: Option<Bytes>,
    /// Who goes first.
    pub priority: Priority,
    /// Paused by hand.
    pub paused: bool,
    /// Its clients, by id.
    pub clients: Vec<ClientView>,
}

/// One client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientView {
    /// Its id.
    pub client: ClientId,
    /// Where.
    pub device: DeviceId,
    /// Granted.
    pub lease: Bytes,
    /// In host memory.
    pub evicted: Bytes,
    /// Granted and not used by any allocation.
    pub unused: Bytes,
    /// Cannot be moved.
    pub pinned: Bytes,
    /// The driver's own.
    pub overhead: Bytes,
    /// Bytes that it waits for.
    pub asked: Bytes,
    /// In a word.
    pub state: ClientState,
    /// Since when.
    pub since: Time,
    /// Why, for a person; empty if there is nothing to say.
    pub why: String,
    /// Times that memory was taken.
    pub releases: u64,
    /// Times that it was all brought back.
    pub restores: u64,
}

/// What a task has on one device, for its `Limit` message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charged {
    /// Its limit there; [`Bytes::MAX`] if none.
    pub limit: Bytes,
    /// Lease and overhead of all its clients there.
    pub held: Bytes,
    /// Its bytes in host memory.
    pub evicted: Bytes,
}
