//! Waiting for the GPU's work, with a bound.
//!
//! The driver's wait has none: it returns when the work is done. So a helper thread waits, and who asked stops waiting
//! for the helper. A helper that is still inside the driver is used again when it comes back; there is never a second one.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use ebb_device::{DeviceError, DeviceMemory};

use crate::threads;

/// The helper of one device.
#[derive(Debug, Default)]
pub(crate) struct Quiet(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Rounds asked for, begun, finished. A round that began before it was asked for proves nothing: work may have been
    /// submitted since.
    wanted: u64,
    begun: u64,
    finished: u64,
    result: Option<Result<(), DeviceError>>,
    /// Who waits at this moment: the device's owner, and owners of devices whose memory its work may use.
    waiting: u32,
    alive: bool,
    stop: bool,
}

impl Quiet {
    /// Waits for all work submitted so far. `None` if it did not end before the deadline.
    pub(crate) fn within(
        &self,
        memory: &Arc<dyn DeviceMemory>,
        deadline: Instant,
    ) -> Option<Result<(), DeviceError>> {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.alive {
            let (shared, memory) = (Arc::clone(&self.0), Arc::clone(memory));
            threads::spawn("ebb-quiet", move || help(&shared, &*memory)).ok()?;
            state.alive = true;
        }
        let round = state.begun + 1;
        state.wanted = round;
        state.waiting += 1;
        self.0.changed.notify_all();
        loop {
            if state.finished >= round {
                state.waiting -= 1;
                return state.result;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.stop {
                state.waiting -= 1;
                if state.waiting == 0 {
                    // Nobody waits for it any more: it must not start later, in the middle of a capture.
                    state.wanted = state.wanted.min(state.begun);
                }
                return None;
            }
            state = self
                .0
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).stop = true;
        self.0.changed.notify_all();
    }
}

fn help(shared: &Shared, memory: &dyn DeviceMemory) {
    let mut state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
    while !state.stop {
        if state.wanted <= state.begun {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        state.begun = state.wanted;
        let round = state.begun;
        drop(state);
        let result = memory.quiesce();
        state = shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.finished = round;
        state.result = Some(result);
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ebb_device::fake::{Call, Card, FakeDevice, FakeHost};
    use std::time::Duration;

    #[test]
    fn a_wait_ends_at_its_bound_and_the_helper_is_used_again() {
        let fake = Arc::new(FakeDevice::new(
            Card::new(4096),
            Arc::new(FakeHost::default()),
            4096,
        ));
        let memory: Arc<dyn DeviceMemory> = fake.clone();
        let quiet = Quiet::default();
        let soon = || Instant::now() + Duration::from_millis(20);
        let late = || Instant::now() + Duration::from_secs(60);
        assert_eq!(quiet.within(&memory, late()), Some(Ok(())));
        fake.begin_work();
        assert_eq!(quiet.within(&memory, soon()), None);
        assert_eq!(quiet.within(&memory, soon()), None);
        assert_eq!(
            fake.calls(Call::Quiesce),
            2,
            "one helper, still in its first wait"
        );
        fake.end_work();
        assert_eq!(quiet.within(&memory, late()), Some(Ok(())));
        assert_eq!(fake.calls(Call::Quiesce), 3, "an old round proves nothing");
    }
}
