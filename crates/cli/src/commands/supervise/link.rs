//! [`Link`]: the daemon, as the parent of a program sees it over hours: it may die, and another one takes its place.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ebb_protocol::control::{Answer, Payload, Request, Snapshot, TaskNews};
use ebb_units::{Bytes, DeviceUuid, TaskId};

use crate::client::Client;

/// How long an answer to a question of the moment may take: meanwhile nobody looks after the program.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two attempts to find a daemon again.
const SEEK: Duration = Duration::from_secs(2);

/// A connection to the daemon, if there is one.
#[derive(Debug)]
pub(super) struct Link {
    client: Client,
    broken: bool,
    sought: Option<Instant>,
}

impl Link {
    pub(super) fn new(client: Client) -> Self {
        client.be_patient(PATIENCE);
        Self {
            client,
            broken: false,
            sought: None,
        }
    }

    /// Another connection to the same daemon, for what may take long.
    pub(super) fn another(&self) -> Option<Client> {
        self.client.again()
    }

    /// The answer, or nothing if nobody answers. A daemon that did not answer is looked for again, now and then: an answer that
    /// comes too late would be taken for that to the next question, so the connection is not used again.
    fn ask(&mut self, request: &Request) -> Option<Payload> {
        if self.broken {
            if self.sought.is_some_and(|at| at.elapsed() < SEEK) {
                return None;
            }
            self.sought = Some(Instant::now());
            self.client = self.client.again()?;
            self.client.be_patient(PATIENCE);
            self.broken = false;
        }
        match self.client.try_ask(request) {
            Ok(Answer::Ok(payload)) => Some(payload),
            Ok(Answer::Error(_)) => None,
            Err(_) => {
                self.broken = true;
                None
            }
        }
    }

    /// What happened to a task; nothing, as far as a daemon that does not answer goes.
    pub(super) fn news(&mut self, task: TaskId, gives_way: bool) -> Option<TaskNews> {
        let request = Request::News {
            task: task.to_string(),
            gives_way,
        };
        match self.ask(&request)? {
            Payload::News(news) => Some(news),
            _ => None,
        }
    }

    /// All that there is.
    pub(super) fn list(&mut self) -> Option<Snapshot> {
        match self.ask(&Request::List)? {
            Payload::List(snapshot) => Some(snapshot),
            _ => None,
        }
    }

    /// What the task has of each card, on it and in host memory: what it will want again.
    pub(super) fn note_held(&mut self, task: TaskId, held: &mut BTreeMap<DeviceUuid, Bytes>) {
        let Some(snapshot) = self.list() else { return };
        let mut sums = BTreeMap::new();
        for row in snapshot
            .tasks
            .iter()
            .filter(|row| row.task == task)
            .flat_map(|row| &row.processes)
        {
            if let Some(device) = row.device {
                let sum = sums.entry(device).or_insert(Bytes::ZERO);
                *sum = row
                    .resident
                    .saturating_add(row.evicted)
                    .saturating_add(row.overhead)
                    .saturating_add(*sum);
            }
        }
        if !sums.is_empty() {
            *held = sums;
        }
    }
}

/// Refusals of memory during one run of the program, from a count that begins anew with another daemon.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    seen: u64,
    last: Option<Instant>,
}

impl Refusals {
    /// Those before the run.
    pub(super) fn before(count: u64) -> Self {
        Self {
            seen: count,
            last: None,
        }
    }

    /// The count as it is now.
    pub(super) fn note(&mut self, count: u64) {
        if count > self.seen || (count < self.seen && count > 0) {
            self.last = Some(Instant::now());
        }
        self.seen = count;
    }

    /// How long ago the last was.
    pub(super) fn ago(&self) -> Option<Duration> {
        self.last.map(|at| at.elapsed())
    }
}

/// Whether the cards have what the task had.
pub(super) fn has_room(snapshot: &Snapshot, held: &BTreeMap<DeviceUuid, Bytes>) -> bool {
    snapshot.devices.iter().all(|card| {
        held.get(&card.uuid)
            .is_none_or(|held| card.free >= (*held).min(card.capacity))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_protocol::control::DeviceRow;

    #[test]
    fn room_is_what_it_had() {
        let card = |free: u64| DeviceRow {
            uuid: DeviceUuid([1; 16]),
            capacity: Bytes::gib(100),
            free: Bytes::gib(free),
            ..crate::fixtures::busy().devices[0].clone()
        };
        let snapshot = |free| Snapshot {
            devices: vec![card(free)],
            ..Snapshot::default()
        };
        let held = BTreeMap::from([(DeviceUuid([1; 16]), Bytes::gib(40))]);
        assert!(!has_room(&snapshot(39), &held));
        assert!(has_room(&snapshot(40), &held));
        assert!(has_room(&snapshot(0), &BTreeMap::new()));
    }

    #[test]
    fn refusals_are_counted_across_daemons() {
        let mut refusals = Refusals::before(3);
        refusals.note(3);
        assert_eq!(refusals.ago(), None, "those were of an earlier run");
        refusals.note(0);
        assert_eq!(refusals.ago(), None, "a new daemon has counted none");
        refusals.note(1);
        assert!(refusals.ago().is_some());
        let mut refusals = Refusals::before(3);
        refusals.note(1);
        assert!(refusals.ago().is_some(), "a new daemon has counted one");
    }
}
