//! What is due when.

use std::time::Duration;

use ebb_policy::{Event, Time};
use ebb_units::TaskId;
use rustix::event::Timespec;

use super::{ConnId, ControlId, Driver};
use crate::say;

/// Something that is due. A timer whose reason is gone by then does nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A connection should have said who it is.
    Hello(ConnId),
    /// The next line of a watch.
    Watch(ControlId),
    /// A pause was waited for long enough.
    Pause(ControlId),
    /// A report was waited for long enough.
    Query(u64),
    /// What libraries give back was waited for long enough.
    Trim(u64),
    Arena,
    /// The next look for the operator's rules.
    Rules,
    /// The machine's memory is to be looked at.
    Memory,
    /// Programs had time enough to declare themselves after a restart.
    Recovery,
    /// Programs had time enough to say what they share.
    Shares,
    /// Somebody waits for memory of another program.
    Opening(u64),
    /// Something about a hibernated task is due.
    Sleep(TaskId),
    /// Time to look for idle tasks.
    Sleepy,
    /// Helpers may have had nothing to do for long.
    Helpers,
    /// Accepting may work again.
    Accept,
    Idle,
}

impl Driver {
    pub(super) fn after(&mut self, wait: Duration, timer: Timer) {
        let at = self.now().after(wait);
        self.timers.insert((at, timer));
    }

    pub(super) fn timeout(&self) -> Option<Timespec> {
        let now = self.now();
        let timer = self.timers.first().map(|(at, _)| *at);
        // A deadline that the arbiter does not move must not make the driver spin.
        let arbiter = self
            .arbiter
            .next_deadline()
            .map(|at| at.max(now.after(Duration::from_micros(200))));
        let at = timer.into_iter().chain(arbiter).min()?;
        let wait = at.since(now);
        Some(Timespec {
            // Longer than anything that has to be waited for, and short enough for every kernel.
            tv_sec: i64::try_from(wait.as_secs().min(3600)).unwrap_or(3600),
            tv_nsec: i64::from(wait.subsec_nanos()),
        })
    }

    pub(super) fn run_timers(&mut self) {
        let now = self.now();
        while let Some((at, timer)) = self.timers.first().copied() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            match timer {
                Timer::Hello(id) => {
                    if self.conns.get(&id).is_some_and(|conn| conn.peer.is_none()) {
                        say::debug!("a connection did not say who it is");
                        self.close_layer(id);
                    }
                }
                Timer::Watch(id) => self.send_watch(id),
                Timer::Pause(id) => self.pause_timed_out(id),
                Timer::Query(id) => self.query_timed_out(id),
                Timer::Trim(id) => self.trim_timed_out(id),
                Timer::Arena => self.arena_dirty = true,
                Timer::Rules => self.look_for_rules(),
                Timer::Memory => self.memory_due(),
                Timer::Recovery => self.end_recovery("the time is over"),
                Timer::Shares => self.shares_overdue(),
                Timer::Opening(hold) => self.opening_waits(hold),
                Timer::Sleep(task) => self.sleep_due(task),
                Timer::Sleepy => self.hibernate_idle(),
                Timer::Helpers => self.end_idle_helpers(),
                Timer::Accept => {
                    self.accept_layers();
                    self.accept_controls();
                }
                Timer::Idle => self.exit_if_idle(),
            }
            self.settle();
        }
        if self.arbiter.next_deadline().is_some_and(|at| at <= now) {
            self.feed(Event::Tick);
            self.settle();
        }
    }

    /// Remembers since when nobody needs the daemon.
    pub(super) fn note_idleness(&mut self) {
        let busy = !self.tasks.is_empty() || !self.conns.is_empty();
        if busy {
            self.idle_since = Time(u64::MAX);
        } else if self.idle_since == Time(u64::MAX) || self.idle_since == Time(0) {
            self.idle_since = self.now();
            if let Some(wait) = self.config.idle_exit {
                self.after(wait, Timer::Idle);
            }
        }
    }

    fn exit_if_idle(&mut self) {
        let Some(wait) = self.config.idle_exit else { return };
        let now = self.now();
        if self.idle_since == Time(u64::MAX) {
            return;
        }
        let idle = now.since(self.idle_since);
        if idle >= wait {
            say::info!("no task for {} s", idle.as_secs());
            self.stop = true;
        } else {
            self.after(wait - idle, Timer::Idle);
        }
    }
}
