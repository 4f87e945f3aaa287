//! [`View`]: the whole state as people and tools see it.

use core::fmt;

use ebb_units::{Bytes, ClientId, DeviceId, Priority, TaskId};

use crate::action::Depth;
use crate::event::AskKind;
use crate::state::Client;
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
    /// Lent to what other cards evicted.
    pub lodged: Bytes,
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
    /// Of that: on other cards instead.
    pub lodged: Bytes,
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

impl crate::Arbiter {
    /// Everything, for listings.
    #[must_use]
    pub fn snapshot(&self) -> View {
        View {
            devices: self
                .devices
                .iter()
                .map(|(id, d)| DeviceView {
                    device: *id,
                    capacity: d.capacity,
                    unmanaged: d.unmanaged,
                    leased: self.on(*id).map(|(_, c)| c.lease).sum(),
                    overhead: self.on(*id).map(|(_, c)| c.overhead).sum(),
                    lodged: d.lodgers.bytes(),
                    free: self.free(*id),
                    peak: d.peak,
                    gathering_for: d.gathering,
                })
                .collect(),
            tasks: self
                .tasks
                .iter()
                .map(|(id, t)| TaskView {
                    task: *id,
                    request: t.spec.request,
                    limit: t.spec.limit,
                    priority: t.spec.priority,
                    paused: t.paused,
                    clients: t
                        .clients
                        .iter()
                        .map(|client| self.view(*client, &self.clients[client]))
                        .collect(),
                })
                .collect(),
        }
    }

    /// A client's lease; `None` if it is not known.
    #[must_use]
    pub fn lease(&self, client: ClientId) -> Option<Bytes> {
        self.clients.get(&client).map(|c| c.lease)
    }

    /// What is neither granted nor held on a device; `None` if it is not known.
    #[must_use]
    pub fn free_on(&self, device: DeviceId) -> Option<Bytes> {
        self.devices.contains_key(&device).then(|| self.free(device))
    }

    fn view(&self, id: ClientId, c: &Client) -> ClientView {
        ClientView {
            client: id,
            device: c.device,
            lease: c.lease,
            evicted: c.evicted,
            lodged: self.lodged(id).map(|(_, bytes)| bytes).sum(),
            unused: self.unused(c),
            pinned: c.pinned,
            overhead: c.overhead,
            asked: c.asks.iter().map(|a| a.left).sum(),
            state: c.state,
            since: c.state_since,
            why: self.why(id, c),
            releases: c.releases,
            restores: c.restores,
        }
    }

    /// What a task has on a device.
    #[must_use]
    pub fn charged(&self, task: TaskId, device: DeviceId) -> Charged {
        Charged {
            limit: self.tasks.get(&task).map_or(Bytes::MAX, |t| t.limit()),
            held: self.held(task, device),
            evicted: self.of(task, device).map(|(_, c)| c.away()).sum(),
        }
    }

    /// The clients on a device.
    fn on(&self, device: DeviceId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.devices[&device]
            .parts
            .values()
            .flat_map(|part| &part.clients)
            .map(|id| (*id, &self.clients[id]))
    }

    /// Keeps since when a client is in its state.
    pub(crate) fn note_state(&mut self, id: ClientId) {
        let Some(state) = self.clients.get(&id).map(|c| self.state(id, c)) else {
            return;
        };
        let now = self.now;
        if let Some(c) = self.clients.get_mut(&id).filter(|c| c.state != state) {
            c.state = state;
            c.state_since = now;
        }
    }

    fn state(&self, id: ClientId, c: &Client) -> ClientState {
        let evicting = c
            .order
            .as_ref()
            .is_some_and(|o| o.depth == Depth::Evict && !o.cancelled);
        let gathering = self.devices[&c.device].gathering == Some(id);
        if evicting {
            ClientState::Evicting
        } else if self.task_of(c).paused {
            ClientState::Paused
        } else if self.restoring(c) || (gathering && c.wants_back()) {
            ClientState::Restoring
        } else if !c.asks.is_empty() {
            ClientState::Waiting
        } else if !c.evicted.is_zero() {
            ClientState::Released
        } else if self.active(c) {
            ClientState::Active
        } else {
            ClientState::Idle
        }
    }

    fn why(&self, id: ClientId, c: &Client) -> String {
        let grounds = &c.last_grounds;
        let reason = || {
            c.last_reason
                .map_or_else(String::new, |r| format!("{r} ({grounds})"))
        };
        match c.state {
            ClientState::Evicting | ClientState::Released => reason(),
            ClientState::Paused => "paused by hand".into(),
            ClientState::Restoring => {
                let left = c.asked(AskKind::Restore);
                if left.is_zero() {
                    "copying in".into()
                } else {
                    format!("{left} still to come")
                }
            }
            ClientState::Waiting => self.why_waiting(id, c),
            ClientState::Active | ClientState::Idle => match c.last_outcome {
                Some(outcome) if self.left_alone(c) => format!("could not be released: {outcome:?}"),
                _ => String::new(),
            },
        }
    }

    fn why_waiting(&self, id: ClientId, c: &Client) -> String {
        let need: Bytes = c.asks.iter().map(|a| a.left).sum();
        if let Some(reason) = self.restore_over_limit(c).filter(|_| c.wants_back()) {
            return reason.to_string();
        }
        match self.devices[&c.device].gathering {
            Some(g) if g == id => return format!("gathering {need}"),
            Some(g) => return format!("needs {need}; {g} is served first"),
            None => {}
        }
        let Some(me) = c.linked.rank.map(|key| self.candidate(&key)) else {
            return format!("needs {need}");
        };
        if !self.possible(&me) {
            let usable = self.usable(id);
            return format!("needs {need}, but what others requested or cannot give leaves {usable}");
        }
        if !self.possible_now(&me) {
            return format!(
                "needs {need}, but those who hold it wait themselves and are busy until they are served"
            );
        }
        let holder = self
            .on(c.device)
            .filter(|(other, o)| *other != id && self.active(o) && !o.suspended())
            .max_by_key(|(other, o)| (self.turn_end(o, &me), *other));
        match holder {
            Some((other, _)) => format!("needs {need}; its turn comes after {other}"),
            None => format!("needs {need}"),
        }
    }
}
