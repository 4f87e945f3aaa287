//! The link between host and device: each direction carries one copy at a time, for all processes together.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::machine::Machine;

/// Which way a copy goes over the link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Host to device.
    ToDevice,
    /// Device to host.
    ToHost,
}

/// Nanoseconds of the system's monotonic clock: the same in all processes.
#[must_use]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for writing, and CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64
}

impl Machine {
    /// Takes the link for a copy of so many bytes and says when the copy is over (a value of [`now_ns`]); `None` if the
    /// configured link takes no time.
    ///
    /// A process that dies keeps the link at most until the end of the copies it had begun.
    #[must_use]
    pub fn take_link(&self, device: u32, direction: Direction, bytes: u64) -> Option<u64> {
        let config = self.config();
        if config.link_bytes_per_s == 0 && config.link_latency_ns == 0 {
            return None;
        }
        let transfer = match config.link_bytes_per_s {
            0 => 0,
            rate => (u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64,
        };
        let row = self.device(device);
        let lane = match direction {
            Direction::ToDevice => &row.to_device_free_at_ns,
            Direction::ToHost => &row.to_host_free_at_ns,
        };
        Some(reserve(lane, now_ns(), transfer + config.link_latency_ns))
    }
}

/// Appends `duration` to the lane's work and returns when it ends.
fn reserve(lane: &AtomicU64, now: u64, duration: u64) -> u64 {
    let mut free_at = lane.load(Ordering::Acquire);
    loop {
        let end = free_at.max(now) + duration;
        match lane.compare_exchange_weak(free_at, end, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return end,
            Err(seen) => free_at = seen,
        }
    }
}

/// Sleeps until [`now_ns`] has reached `end`.
pub(crate) fn sleep_until(end: u64) {
    loop {
        let now = now_ns();
        if now >= end {
            return;
        }
        std::thread::sleep(Duration::from_nanos(end - now));
    }
}

impl Machine {
    /// Waits until a copy that [`Machine::take_link`] announced is over.
    pub fn wait_link(&self, end: Option<u64>) {
        if let Some(end) = end {
            sleep_until(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_one_direction_follow_each_other() {
        let lane = AtomicU64::new(0);
        assert_eq!(reserve(&lane, 1000, 50), 1050);
        assert_eq!(reserve(&lane, 1010, 50), 1100);
        assert_eq!(reserve(&lane, 5000, 50), 5050);
    }
}
