//! Who comes, wants back, hangs up or is gone meanwhile.

use ebb_protocol::ToLayer;
use ebb_units::TaskId;

use super::{Member, Sleep, Stage, WAIT, failure};
use crate::driver::{ControlId, Driver, PeerId};
use crate::say;

impl Driver {
    /// A thread of a program that sleeps wants in.
    pub(in crate::driver) fn wake_me(&mut self, peer: PeerId, order: u64) {
        let Some(task) = self.sleep_of(peer) else {
            // Nobody here knows of it: nothing keeps it asleep.
            return self.send(peer, &ToLayer::Awake { order }, Vec::new());
        };
        if let Some(sleep) = self.sleeps.tasks.get_mut(&task) {
            sleep.wanted = true;
            self.sleeps.moved.insert(task);
        }
    }

    /// A session says that it sleeps: the connection, or this daemon, is new. Before it says what it holds.
    pub(in crate::driver) fn sleeping(&mut self, peer: PeerId, order: u64) {
        if let Some(task) = self.sleep_of(peer) {
            let known = self
                .sleeps
                .tasks
                .get(&task)
                .is_some_and(|sleep| sleep.order == order);
            if !known {
                self.send(peer, &ToLayer::Awake { order }, Vec::new());
            }
            return;
        }
        let Some(task) = self.peers.get(&peer).map(|peer| peer.task) else {
            return;
        };
        let now = self.now();
        let fresh = || Sleep::new(Stage::Asleep, order, WAIT, now);
        let sleep = self.sleeps.tasks.entry(task).or_insert_with(fresh);
        if sleep.order != order || sleep.stage != Stage::Asleep {
            return self.send(peer, &ToLayer::Awake { order }, Vec::new());
        }
        sleep.members.insert(peer, Member::default());
        sleep.unsure = true;
        say::info!("{task} was hibernated before this daemon started");
        // It looks whether that is so.
        self.take_helper(task);
    }

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
