//! Who comes, wants back, hangs up or is gone meanwhile.

use ebb_units::TaskId;

use super::{Stage, failure};
use crate::driver::{ControlId, Driver, PeerId};

impl Driver {
    /// `ebb resume` on a task that sleeps. `false`: it does not.
    pub(in crate::driver) fn resume_asleep(&mut self, control: ControlId, task: TaskId) -> bool {
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return false;
        };
        match sleep.stage {
            Stage::Asking | Stage::Evicting | Stage::Preparing => {
                sleep.resumers.push(control);
                self.give_up_sleep(task, "it was resumed", "");
            }
            _ => {
                sleep.resumers.push(control);
                self.sleeps.moved.insert(task);
            }
        }
        true
    }

    /// A session is gone for good.
    pub(in crate::driver) fn sleeper_left(&mut self, peer: PeerId) {
        self.forget_late(peer);
        let Some(task) = self.sleep_of(peer) else { return };
        let Some(sleep) = self.sleeps.tasks.get_mut(&task) else {
            return;
        };
        sleep.members.remove(&peer);
        if !sleep.members.is_empty() {
            self.sleeps.moved.insert(task);
            return;
        }
        if let Some(id) = sleep.helper.take() {
            // It may be amid a call about a process that is dead.
            self.drop_helper(id);
        }
        if let Some(sleep) = self.sleeps.tasks.remove(&task) {
            for control in sleep.hibernators.into_iter().chain(sleep.resumers) {
                self.answer(control, &failure(format!("{task} ended meanwhile"), ""));
            }
            self.begin_with(sleep.late);
        }
        self.sleeps.left_alone.remove(&task);
    }

    /// A session's connection is lost: one that was getting ready is not any more.
    pub(in crate::driver) fn sleeper_hung_up(&mut self, peer: PeerId) {
        let Some(task) = self.sleep_of(peer) else { return };
        let why = format!("process {} hung up", self.pid_of(peer));
        match self.sleeps.tasks.get(&task).map(|sleep| sleep.stage) {
            Some(Stage::Asking | Stage::Evicting | Stage::Preparing) => {
                self.give_up_sleep(task, &why, "");
            }
            // What was asked for it is taken back with all its asks.
            Some(Stage::Room) => self.up_failed(task, &why),
            _ => {}
        }
    }

    pub(in crate::driver) fn forget_sleep_waiter(&mut self, control: ControlId) {
        for sleep in self.sleeps.tasks.values_mut() {
            sleep.hibernators.retain(|waiting| *waiting != control);
            sleep.resumers.retain(|waiting| *waiting != control);
        }
    }
}
