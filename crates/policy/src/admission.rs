//! Which tasks get in, and what of their requests holds where.

use core::cmp::Reverse;
use std::collections::BTreeMap;

use ebb_units::{Bytes, DeviceId, TaskId};

use crate::Arbiter;
use crate::action::{Action, Note, Refusal};
use crate::event::TaskSpec;

impl Arbiter {
    /// Whether a request fits beside those of the other live tasks: on every named device, or, if none is named, on
    /// some device once every other task that has not chosen one yet was given the roomiest.
    pub(crate) fn admit(&self, task: TaskId, spec: &TaskSpec, devices: &[DeviceId]) -> Result<(), Refusal> {
        if let Some(limit) = spec.limit
            && spec.request > limit
        {
            return Err(Refusal::RequestAboveLimit {
                request: spec.request,
                limit,
            });
        }
        if spec.request.is_zero() || self.devices.is_empty() {
            return Ok(());
        }
        let mut rooms: BTreeMap<DeviceId, Bytes> = self
            .devices
            .keys()
            .map(|d| {
                let taken = self.guaranteed_beside(task, *d);
                (*d, self.devices[d].managed().saturating_sub(taken))
            })
            .collect();
        let undecided = self.undecided.iter().filter(|(_, id)| *id != task);
        for Reverse(request) in undecided.map(|(request, _)| *request) {
            if let Some(room) = rooms.values_mut().max() {
                *room = room.saturating_sub(request);
            }
        }
        let refusal = |device: DeviceId, room: Bytes| Refusal::RequestsDoNotFit {
            device,
            request: spec.request,
            requested: self.devices[&device].managed().saturating_sub(room),
            capacity: self.devices[&device].capacity,
            unmanaged: self.devices[&device].unmanaged,
        };
        if devices.is_empty() {
            // On equal room the first device speaks.
            let best = rooms
                .iter()
                .max_by_key(|(d, room)| (**room, core::cmp::Reverse(**d)));
            return match best {
                Some((device, room)) if *room < spec.request => Err(refusal(*device, *room)),
                _ => Ok(()),
            };
        }
        for device in devices {
            if let Some(room) = rooms.get(device)
                && *room < spec.request
            {
                return Err(refusal(*device, *room));
            }
        }
        Ok(())
    }

    /// Fixes how much of a task's request holds on a device that it uses.
    pub(crate) fn guarantee(&mut self, task: TaskId, device: DeviceId, out: &mut Vec<Action>) {
        if !self.devices.contains_key(&device) {
            return;
        }
        let room = self.devices[&device]
            .managed()
            .saturating_sub(self.guaranteed_beside(task, device));
        let Some(request) = self.tasks.get(&task).map(|t| t.spec.request) else {
            return;
        };
        let guaranteed = request.min(room);
        let before = self
            .edit_task(task, |t| t.guaranteed.insert(device, guaranteed))
            .flatten();
        if guaranteed < request && before != Some(guaranteed) {
            out.push(Action::Note(Note::GuaranteeCut {
                task,
                device,
                request,
                guaranteed,
            }));
        }
    }

    /// Gives room that became free to tasks whose guarantees were cut, the oldest first.
    pub(crate) fn mend_guarantees(&mut self, out: &mut Vec<Action>) {
        let cut: Vec<(TaskId, DeviceId)> = self.cut.iter().copied().collect();
        for (task, device) in cut {
            let before = self.tasks[&task].guaranteed(device);
            let room = self.devices[&device]
                .managed()
                .saturating_sub(self.guaranteed_beside(task, device));
            // What was promised stays promised, even if the device shrank.
            if room > before {
                self.guarantee(task, device, out);
            }
        }
    }
}
