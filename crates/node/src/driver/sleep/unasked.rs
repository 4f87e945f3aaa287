//! Tasks that are hibernated unasked, a while after they were released for being idle.

use ebb_protocol::control::Answer;
use ebb_units::TaskId;

use super::{LEAVE_ALONE, LOOK};
use crate::driver::Driver;
use crate::driver::control::Reply;
use crate::driver::timers::Timer;
use crate::say;

impl Driver {
    /// Looks at idle tasks now and then, as long as there is one that is to be hibernated unasked.
    pub(in crate::driver) fn watch_idle_tasks(&mut self) {
        let any = self.tasks.values().any(|task| task.hibernate_after.is_some());
        if any && !std::mem::replace(&mut self.sleeps.looking, true) {
            self.after(LOOK, Timer::Sleepy);
        }
    }

    /// Hibernates what was released for being idle long enough ago.
    pub(in crate::driver) fn hibernate_idle(&mut self) {
        self.sleeps.looking = false;
        let now = self.now();
        let view = self.arbiter.snapshot();
        let due: Vec<TaskId> = view
            .tasks
            .iter()
            .filter(|view| {
                let Some(task) = self.tasks.get(&view.task) else {
                    return false;
                };
                let Some(after) = task.hibernate_after else {
                    return false;
                };
                let left_alone = self.sleeps.left_alone.get(&view.task);
                let released = |client: &ebb_policy::ClientView| {
                    let away = matches!(
                        client.state,
                        ebb_policy::ClientState::Released | ebb_policy::ClientState::Paused
                    );
                    away && client.asked.is_zero() && now.since(client.since) >= after
                };
                !self.sleeps.tasks.contains_key(&view.task)
                    && left_alone.is_none_or(|until| *until <= now)
                    && !view.clients.is_empty()
                    && view.clients.iter().all(released)
            })
            .map(|view| view.task)
            .collect();
        for task in due {
            if let Reply::Now(Answer::Error(failure)) = self.hibernate(None, task, None) {
                say::debug!("{failure}");
                self.sleeps.left_alone.insert(task, now.after(LEAVE_ALONE));
            }
        }
        self.watch_idle_tasks();
    }
}
