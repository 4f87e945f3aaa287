//! [`Pool::check`]: every invariant, tested against the tables as they are.

use super::chunks::State;
use super::{Mark, Owner, Pool};

impl Pool {
    /// Tests every invariant. For tests and for finding faults: it walks everything.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        self.check_chunks()?;
        self.check_bytes()?;
        self.check_views()
    }

    fn check_chunks(&self) -> Result<(), String> {
        let (mut physical, mut idle, mut active, mut mappings) = (0, 0, 0, 0);
        for (id, chunk) in self.chunks.iter() {
            let name = format!("chunk {} at {:#x}", id.0, chunk.home);
            if chunk.len == 0 || !chunk.len.is_multiple_of(self.config.granule) {
                return Err(format!("{name} has {} bytes", chunk.len));
            }
            mappings += chunk.maps.len();
            for at in &chunk.maps {
                if self.chunks.at(*at) != Some(id) {
                    return Err(format!("{name} is not in the table of mappings at {at:#x}"));
                }
            }
            if chunk.exists {
                physical += chunk.len;
            }
            match chunk.state {
                State::Idle => {
                    idle += chunk.len;
                    if !chunk.maps.contains(&chunk.home) {
                        return Err(format!("{name} is idle and has no home"));
                    }
                    let free = self.runs.containing(chunk.home);
                    if free.is_none_or(|(start, run)| start + run.len < chunk.home + chunk.len) {
                        return Err(format!("{name} is idle and its home is not free as a whole"));
                    }
                }
                State::Active(at) => {
                    active += chunk.len;
                    if !chunk.maps.contains(&at) {
                        return Err(format!("{name} is used at {at:#x}, where it is not mapped"));
                    }
                    let mut blocks = self
                        .live
                        .range(..at + chunk.len)
                        .next_back()
                        .into_iter()
                        .map(|(_, block)| block)
                        .chain(self.late.iter().map(|late| &late.block));
                    let lives = blocks.any(|block| block.at < at + chunk.len && block.at + block.len > at);
                    if !lives && self.free_at(at, chunk.len) == Some(Owner::Anyone) {
                        return Err(format!("{name} is active and nothing lives in it"));
                    }
                }
                State::Held => {}
            }
        }
        if (physical, idle, active, mappings)
            != (
                self.chunks.physical(),
                self.chunks.idle_bytes(),
                self.chunks.active_bytes(),
                self.chunks.mappings(),
            )
        {
            return Err("sums of chunks are wrong".into());
        }
        let mut end = 0;
        let mut all: Vec<(u64, u64)> = self
            .chunks
            .iter()
            .flat_map(|(_, chunk)| chunk.maps.iter().map(|at| (*at, chunk.len)))
            .collect();
        all.sort_unstable();
        for (at, len) in all {
            if at < end {
                return Err(format!("two chunks are mapped at {at:#x}"));
            }
            end = at + len;
        }
        Ok(())
    }

    /// The owner of a span that is free as one run.
    fn free_at(&self, at: u64, len: u64) -> Option<Owner> {
        let (start, run) = self.runs.containing(at)?;
        (start + run.len >= at + len).then_some(run.owner)
    }

    /// Blocks and free bytes share no byte; each is mapped where it may be; together they are what is mapped for use.
    fn check_bytes(&self) -> Result<(), String> {
        let mut spans: Vec<(u64, u64, bool)> = self
            .live
            .values()
            .chain(self.late.iter().map(|late| &late.block))
            .map(|block| (block.at, block.len, true))
            .chain(self.runs.iter().map(|(at, run)| (at, run.len, false)))
            .collect();
        spans.sort_unstable();
        let (mut end, mut bytes) = (0, 0);
        for (at, len, block) in spans {
            if at < end {
                return Err(format!("two spans hold {at:#x}"));
            }
            end = at + len;
            bytes += len;
            if !self.chunks.gaps(at, len).is_empty() {
                return Err(format!("{at:#x}+{len:#x} has nothing behind a part of it"));
            }
            for (start, _, id) in self.chunks.over(at, len) {
                let state = self.chunks.get(id).map(|chunk| (chunk.state, chunk.home));
                let right = match state {
                    Some((State::Active(used), _)) => used == start,
                    Some((State::Idle, home)) => !block && home == start,
                    _ => false,
                };
                if !right {
                    return Err(format!(
                        "{at:#x}+{len:#x} lies at a mapping of a chunk that is {state:?}"
                    ));
                }
            }
        }
        // What plans hold is in no table.
        let held = self
            .chunks
            .iter()
            .any(|(_, chunk)| chunk.state == State::Held && chunk.exists);
        let physical = self.chunks.active_bytes() + self.chunks.idle_bytes();
        if bytes > physical || (!held && self.counters.in_plans == 0 && bytes != physical) {
            return Err(format!("{bytes} bytes are live or free of {physical} in chunks"));
        }
        for ((at, run), (next, other)) in self.runs.iter().zip(self.runs.iter().skip(1)) {
            if at + run.len == next && run.owner == other.owner {
                return Err(format!("free neighbours at {next:#x} are apart"));
            }
        }
        if self.runs.total() != self.runs.iter().map(|(_, run)| run.len).sum::<u64>() {
            return Err("the sum of free bytes is wrong".into());
        }
        Ok(())
    }

    fn check_views(&self) -> Result<(), String> {
        for view in self.views.iter() {
            let (mut busy, mut live) = (0, 0);
            for (at, id) in &view.parts {
                let Some(chunk) = self.chunks.get(*id).filter(|chunk| chunk.maps.contains(at)) else {
                    return Err(format!("the view at {:#x} has lost a part", view.at));
                };
                busy += usize::from(chunk.state != State::Idle);
                live += usize::from(chunk.state == State::Active(*at));
            }
            let counted = view.counts();
            if !view.is_dead() && (busy, live) != counted {
                return Err(format!(
                    "the view at {:#x} counts {counted:?}, and {:?} are",
                    view.at,
                    (busy, live)
                ));
            }
            if view.last.1 > Mark(0) && view.parts.is_empty() {
                return Err(format!("the view at {:#x} is empty", view.at));
            }
        }
        for at in self.stale.keys() {
            if self.chunks.at(*at).is_none() {
                return Err(format!(
                    "a mapping at {at:#x} that is gone is still to be taken away"
                ));
            }
        }
        Ok(())
    }
}
