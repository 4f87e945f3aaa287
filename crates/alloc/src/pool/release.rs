//! Giving memory back: when, how much, and which; and taking away mappings that serve nobody.

use super::chunks::State;
use super::plan::{Aim, Call, Plan};
use super::views::ViewId;
use super::{Mark, Pool};

/// When idle memory goes back to the device.
///
/// Not at every free: many small releases become one. Nothing goes as long as the device has `low` bytes free; then as much as brings it
/// to `high`, and at least `batch` unless that is all. Between the two nothing happens in either direction, and what a program
/// used since the last but one [`Pool::tick`] stays with it unless the device is below a quarter of `low`: so a loop that frees and
/// allocates the same again keeps its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    /// Bytes of the device that should be free.
    pub low: u64,
    /// Bytes that are free after a release.
    pub high: u64,
    /// Bytes of one release.
    pub batch: u64,
}

impl Pool {
    /// How much of the idle memory should go back, if the device has so many free bytes.
    #[must_use]
    pub fn surplus(&self, free: u64, marks: &Watermarks) -> u64 {
        if free >= marks.low {
            return 0;
        }
        let may_go = if free < marks.low / 4 {
            self.chunks.idle_bytes()
        } else {
            self.spare()
        };
        let wanted = marks.high.max(marks.low).saturating_sub(free).max(marks.batch);
        wanted.min(may_go)
    }

    /// Idle bytes beyond what the program used in this period and the one before it.
    #[must_use]
    pub fn spare(&self) -> u64 {
        let kept = self.needed(0) - self.chunks.active_bytes();
        self.chunks.idle_bytes().saturating_sub(kept)
    }

    /// A period has ended, an iteration or some seconds: what the program needs is what it used in the last two.
    pub fn tick(&mut self) {
        self.demand = [self.chunks.active_bytes(), self.demand[0]];
    }

    /// Calls that give back idle memory, `bytes` if there is so much, in as few chunks as possible; `None` if nothing is idle.
    /// Orphans of earlier failures go first.
    pub fn release(&mut self, bytes: u64) -> Option<Plan> {
        let mut plan = Plan::new(Aim::Less);
        let orphans: Vec<_> = std::mem::take(&mut self.orphans).into_iter().collect();
        for id in orphans {
            plan.chunks.push((id, super::Owner::Anyone, Mark(0)));
            self.unmake(&mut plan, id, &[]);
        }
        let mut left = bytes;
        let mut found = Vec::new();
        let mut smallest_larger = None;
        for (len, id) in self.chunks.idle_by_size() {
            if left == 0 {
                break;
            }
            if self.is_kept(id) {
                continue;
            }
            if len <= left {
                found.push(id);
                left -= len;
            } else {
                smallest_larger = Some(id);
            }
        }
        // More than was asked for rather than less.
        if left > 0 {
            found.extend(smallest_larger);
        }
        if !found.is_empty() {
            self.thrift.given_back();
        }
        for id in found {
            let Some((home, len)) = self.chunks.get(id).map(|chunk| (chunk.home, chunk.len)) else {
                continue;
            };
            self.hold(&mut plan, id);
            self.unmake(&mut plan, id, &[]);
            plan.ranges.push((home, len));
        }
        self.unmap_stale(&mut plan, usize::MAX);
        if plan.calls.is_empty() {
            return None;
        }
        self.hand_out(&mut plan);
        Some(plan)
    }

    /// Gives all idle memory back and forgets every view that nothing lives in.
    pub fn trim(&mut self) -> Option<Plan> {
        while let Some(view) = self.views.oldest_unused(&self.private) {
            self.drop_view(view);
        }
        self.release(u64::MAX)
    }

    /// Gives a view up.
    pub(super) fn drop_view(&mut self, id: ViewId) {
        let last = self.views.get(id).map(|view| view.last);
        let unneeded = self.views.kill(id);
        self.strand(unneeded, last);
    }

    /// Takes up to `most` mappings that serve nobody away. Those of chunks in use stay: another plan may come for the chunk.
    pub(super) fn unmap_stale(&mut self, plan: &mut Plan, most: usize) {
        let some: Vec<u64> = self.stale.keys().take(most).copied().collect();
        for at in some {
            let Some(chunk) = self.chunks.at(at) else {
                self.stale.remove(&at);
                continue;
            };
            let Some((len, state)) = self.chunks.get(chunk).map(|one| (one.len, one.state)) else {
                continue;
            };
            let ours = plan.swept.contains(&chunk);
            if state == State::Idle {
                self.hold(plan, chunk);
                plan.swept.push(chunk);
            } else if !ours {
                continue;
            }
            let last = self.stale.remove(&at).unwrap_or_default();
            for &(stream, mark) in &last {
                self.wait(plan, stream, mark);
            }
            plan.calls.push(Call::Unmap { chunk, at, len });
            plan.unmaps.push((at, last));
        }
    }
}
