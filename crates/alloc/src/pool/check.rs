//! [`Pool::check`]: every invariant, tested against the tables as they are.

use super::Pool;
use super::chunks::State;

impl Pool {
    /// Tests every invariant. For tests and for finding faults: it walks everything.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        self.check_chunks()?;
        self.check_bytes()?;
        self.check_views()?;
        self.check_shadows()
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
                State::Active => {
                    active += chunk.len;
                    if self.plans_hold_nothing() && self.usable(chunk.home, chunk.len) {
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

    /// Whether a span is free, as one run.
    fn usable(&self, at: u64, len: u64) -> bool {
        self.runs
            .containing(at)
            .is_some_and(|(start, run)| start + run.len >= at + len)
    }

    /// Blocks and free bytes, by their home addresses, share no byte, and together they are what chunks hold.
    fn check_bytes(&self) -> Result<(), String> {
        let blocks = self.live.values().chain(self.late.iter().map(|late| &late.block));
        let mut spans: Vec<(u64, u64, bool)> =
            self.runs.iter().map(|(at, run)| (at, run.len, false)).collect();
        for block in blocks {
            match self.views.extents(block.at, block.len) {
                Some(extents) => {
                    if extents.iter().map(|extent| extent.1).sum::<u64>() != block.len {
                        return Err(format!(
                            "the block at {:#x} is not as long as its extents",
                            block.at
                        ));
                    }
                    spans.extend(extents.into_iter().map(|(home, len)| (home, len, true)));
                }
                None => spans.extend(
                    self.settled(block.at, block.len)
                        .map(|(home, len)| (home, len, true)),
                ),
            }
        }
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
                    Some((State::Active, home)) => home == start,
                    Some((State::Idle, home)) => !block && home == start,
                    _ => false,
                };
                if !right {
                    return Err(format!("{at:#x}+{len:#x} is of a chunk that is {state:?}"));
                }
            }
        }
        // What plans hold is in no table.
        let physical = self.chunks.active_bytes() + self.chunks.idle_bytes();
        if bytes > physical || (self.plans_hold_nothing() && bytes != physical) {
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

    /// Where the bytes of these addresses are that no plan moves, by their home addresses.
    fn settled(&self, at: u64, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let granule = self.config.granule;
        let (mut from, mut still) = (at, Vec::new());
        for place in self.meshes.places() {
            if place + granule > from && place < at + len {
                if place > from {
                    still.push((from, place - from));
                }
                from = place + granule;
            }
        }
        if from < at + len {
            still.push((from, at + len - from));
        }
        still.into_iter().flat_map(|(at, len)| self.homes(at, len))
    }

    /// What is shown in the place of granules that were meshed, and what lives there.
    fn check_shadows(&self) -> Result<(), String> {
        let granule = self.config.granule;
        let all = self.live.values().chain(self.late.iter().map(|late| &late.block));
        let all: Vec<(u64, u64)> = all
            .map(|block| (block.at, block.len))
            .chain(self.meshes.parked())
            .collect();
        for (&at, shadow) in &self.meshes.shadows {
            let chunk = self.chunks.get(shadow.chunk);
            if chunk.map(|chunk| (chunk.home, chunk.state)) != Some((shadow.home, State::Active)) {
                return Err(format!("{at:#x} shows a chunk that is {chunk:?}"));
            }
            if !self.meshes.has_place(at) && self.chunks.at(at) != Some(shadow.chunk) {
                return Err(format!("{at:#x} does not show chunk {}", shadow.chunk.0));
            }
            let used: u64 = all
                .iter()
                .map(|&(from, len)| (from + len).min(at + granule).saturating_sub(from.max(at)))
                .sum();
            if used != shadow.used || used == 0 {
                return Err(format!("{used} bytes are used at {at:#x}, not {}", shadow.used));
            }
            if !self.runs.inside(at, granule).eq([]) {
                return Err(format!("{at:#x} has free bytes and is not their home"));
            }
        }
        Ok(())
    }

    fn check_views(&self) -> Result<(), String> {
        for view in self.views.iter() {
            for (at, id) in &view.parts {
                if self.chunks.get(*id).is_none_or(|chunk| !chunk.maps.contains(at)) {
                    return Err(format!("the view at {:#x} has lost a part", view.at));
                }
            }
            let lives =
                self.live.contains_key(&view.at) || self.late.iter().any(|late| late.block.at == view.at);
            if lives != view.is_used() {
                return Err(format!(
                    "the view at {:#x} does not know whether it is used",
                    view.at
                ));
            }
            if self.plans_hold_nothing() && !view.is_dead() {
                let mut from = view.at;
                for (home, len) in &view.extents {
                    let ids = |at, len| -> Vec<_> { self.chunks.over(at, len).map(|one| one.2).collect() };
                    if ids(from, *len) != ids(*home, *len) {
                        return Err(format!(
                            "the view at {:#x} shows other chunks at {from:#x}",
                            view.at
                        ));
                    }
                    from += len;
                }
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
