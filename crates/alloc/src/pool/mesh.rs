//! Meshing: two granules that small blocks keep, at different offsets, become one. The blocks of one are copied into the free
//! bytes of the other, at the same offsets, and its addresses show the other from then on. No block's address changes.
//!
//! ```text
//!   before              copied                remapped             released
//!   A ▕a  a    ▏        A ▕a  a    ▏          B at A's addresses   A is gone: a granule more
//!   B ▕  b   b ▏        B ▕a ba  b ▏          ▕a ba  b ▏
//!        a plan is out: A and its places are *moving* ───┐
//!                                                        │ all calls done: its places are shadows of B
//!                                                        ├ some done: those places are; the rest is as before
//!                                                        └ a place has nothing mapped: *torn*, [`Pool::mend`] first
//! ```
//!
//! Every physical byte still has one home address: those of B are B's. A *shadow* has none: it gives out no bytes of its own. When the
//! last block at its addresses is freed, its mapping is one that serves nobody.
//!
//! A driver cannot put another memory behind addresses in one call. So a mesh may run only while no work can touch the
//! blocks ([`Plan::exclusive`](super::Plan::exclusive)): between taking a mapping away and making the other there is nothing. If just then a call fails, the place
//! is torn: the bytes are all there, in A, and `mend` maps it again. Nothing may touch the blocks before that is done.

use std::collections::{BTreeMap, BTreeSet};

use super::chunks::{ChunkId, State};
use super::plan::{Aim, Call, Plan};
use super::runs::{Owner, Run};
use super::{Finished, Mark, Pool, Stream};

/// How many granules are tried for the blocks of one.
const PROBES: usize = 256;

/// Two granules that can share one: of [`Pool::meshable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    from: ChunkId,
    to: ChunkId,
}

/// A block that cannot be pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// No live block begins there.
    #[error("no block begins at {0:#x}")]
    NotLive(u64),
    /// A plan is moving it: once that is finished, it can be pinned.
    #[error("the block at {0:#x} is being moved")]
    Moving(u64),
}

/// Addresses that show another granule than the one that was made for them.
#[derive(Clone, Debug)]
pub(super) struct Shadow {
    pub(super) chunk: ChunkId,
    /// Where the bytes have their home.
    pub(super) home: u64,
    /// Bytes of blocks here.
    pub(super) used: u64,
    /// The work that may still use these addresses.
    pub(super) last: Vec<(Stream, Mark)>,
}

/// A granule that a plan moves away.
#[derive(Debug)]
struct Moving {
    /// The number of the plan.
    plan: u64,
    to: ChunkId,
    places: Vec<Place>,
    /// Its free bytes.
    spare: Vec<(u64, Run)>,
    /// Bytes at its places that were freed meanwhile.
    parked: Vec<(u64, u64, Owner, Mark)>,
    /// A plan for it is under way.
    out: bool,
}

/// Addresses at which the granule is mapped and blocks lie.
#[derive(Debug)]
struct Place {
    at: u64,
    /// Offset and length of what lives here.
    pieces: Vec<(u64, u64)>,
    /// The free bytes of the other granule that it goes to.
    taken: Vec<(u64, Run)>,
}

/// What meshing keeps.
#[derive(Debug, Default)]
pub(super) struct Meshes {
    pub(super) shadows: BTreeMap<u64, Shadow>,
    moving: BTreeMap<ChunkId, Moving>,
    /// The places of those.
    places: BTreeMap<u64, ChunkId>,
    /// How often each block is pinned.
    pins: BTreeMap<u64, u32>,
}

impl Meshes {
    /// Whether blocks' bytes are where their addresses say.
    pub(super) fn is_empty(&self) -> bool {
        self.shadows.is_empty() && self.moving.is_empty()
    }

    pub(super) fn is_moving(&self) -> bool {
        !self.moving.is_empty()
    }

    pub(super) fn has_place(&self, at: u64) -> bool {
        self.places.contains_key(&at)
    }

    /// Places that are or were being moved, with nothing mapped perhaps.
    pub(super) fn places(&self) -> impl Iterator<Item = u64> + '_ {
        self.places.keys().copied()
    }

    /// Where the first place or shadow is that has addresses in `[from, end)`.
    fn next_special(&self, from: u64, end: u64) -> u64 {
        let place = self.places.range(from..end).next().map(|one| *one.0);
        let shadow = self.shadows.range(from..end).next().map(|one| *one.0);
        place.into_iter().chain(shadow).min().unwrap_or(end)
    }

    pub(super) fn unpin_all(&mut self, at: u64) {
        self.pins.remove(&at);
    }

    /// Work of this stream is done, and its marks mean nothing any more; without one, all work is.
    pub(super) fn settled(&mut self, stream: Option<Stream>) {
        for shadow in self.shadows.values_mut() {
            shadow.last.retain(|last| stream.is_some_and(|one| last.0 != one));
        }
        for parked in self.moving.values_mut().flat_map(|one| &mut one.parked) {
            if stream.is_none_or(|one| parked.2 == Owner::Stream(one)) {
                (parked.2, parked.3) = (Owner::Anyone, Mark(0));
            }
        }
    }

    /// Bytes that were freed at these places and are still to be entered.
    pub(super) fn parked(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.moving
            .values()
            .flat_map(|one| one.parked.iter().map(|parked| (parked.0, parked.1)))
    }
}

/// A granule as meshing sees it.
struct Sketch {
    id: ChunkId,
    home: u64,
    /// Offset and length of free bytes, and their sum.
    free: Vec<(u64, u64)>,
    spare: u64,
    /// What lives in it, by the addresses that it is used at. Empty if something else is in it.
    places: Vec<Place>,
    /// Its own and only its blocks' mappings: it can go.
    can_go: bool,
    /// A bit for each 64th: not wholly free.
    mask: u64,
}

impl Sketch {
    /// What lives in it, without the places.
    fn pieces(&self) -> Vec<(u64, u64)> {
        let mut all: Vec<(u64, u64)> = self
            .places
            .iter()
            .flat_map(|place| place.pieces.iter().copied())
            .collect();
        all.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(all.len());
        for (at, n) in all {
            match joined.last_mut() {
                Some(last) if last.0 + last.1 == at => last.1 += n,
                _ => joined.push((at, n)),
            }
        }
        joined
    }

    fn masked(&mut self, granule: u64) {
        let bit = granule.div_ceil(64);
        let mut free = 0u64;
        for &(at, n) in &self.free {
            // Bits that lie in it as a whole.
            for one in at.div_ceil(bit)..((at + n) / bit) {
                free |= 1 << one;
            }
        }
        self.mask = !free;
        self.spare = self.free.iter().map(|free| free.1).sum();
    }

    /// Takes these bytes out of what is free.
    fn fill(&mut self, pieces: &[(u64, u64)], granule: u64) {
        for &(at, n) in pieces {
            let Some(index) = self
                .free
                .iter()
                .position(|free| free.0 <= at && at + n <= free.0 + free.1)
            else {
                continue;
            };
            let (from, len) = self.free.remove(index);
            let rests = [(from, at - from), (at + n, from + len - at - n)];
            let rests = rests.into_iter().filter(|rest| rest.1 > 0);
            self.free.splice(index..index, rests);
        }
        self.masked(granule);
    }

    /// Whether all these bytes are free here.
    fn holds(&self, pieces: &[(u64, u64)], mask: u64) -> bool {
        if mask & self.mask == 0 {
            return true;
        }
        let mut free = self.free.iter().peekable();
        pieces.iter().all(|&(at, n)| {
            while free.next_if(|free| free.0 + free.1 < at + n).is_some() {}
            free.peek().is_some_and(|free| free.0 <= at)
        })
    }
}

/// The bits that these bytes touch.
fn touched(pieces: &[(u64, u64)], granule: u64) -> u64 {
    let bit = granule.div_ceil(64);
    pieces
        .iter()
        .flat_map(|&(at, n)| at / bit..=(at + n - 1) / bit)
        .fold(0, |mask, one| mask | 1 << one)
}

impl Pool {
    /// The block at this address stays where it is physically: it was exported, registered, or the like. As often as it was
    /// pinned it has to be unpinned; when it is freed it needs not.
    ///
    /// # Errors
    /// [`PinError`]; nothing changes.
    pub fn pin(&mut self, at: u64) -> Result<(), PinError> {
        let block = self.live.get(&at).ok_or(PinError::NotLive(at))?;
        let moving = (self.meshes.places)
            .range(self.config.down(at)..at + block.len)
            .next()
            .is_some();
        if moving {
            return Err(PinError::Moving(at));
        }
        *self.meshes.pins.entry(at).or_insert(0) += 1;
        Ok(())
    }

    /// Takes one pin of the block away; whether there was one.
    pub fn unpin(&mut self, at: u64) -> bool {
        let Some(pins) = self.meshes.pins.get_mut(&at) else {
            return false;
        };
        *pins -= 1;
        if *pins == 0 {
            self.meshes.pins.remove(&at);
        }
        true
    }

    /// Pairs of granules that can be made one each, in an order in which all can be. Nothing of a block that is
    /// pinned, or that work on several streams still uses. It walks all granules that small blocks are in.
    #[must_use]
    pub fn meshable(&self) -> Vec<Pair> {
        self.meshable_of(|_| true)
    }

    /// The same of those chunks only that the caller lets take part.
    #[must_use]
    pub fn meshable_of(&self, may: impl Fn(ChunkId) -> bool) -> Vec<Pair> {
        let granule = self.config.granule;
        let unmovable = self.unmovable();
        let mut sketches: Vec<Sketch> = self
            .chunks
            .iter()
            .filter(|(id, chunk)| chunk.len == granule && may(*id))
            .filter_map(|(id, _)| self.sketch(id, &unmovable))
            .collect();
        sketches.sort_unstable_by_key(|sketch| sketch.home);
        // The emptiest go first, each into the fullest that has room.
        let mut sources: Vec<usize> = (0..sketches.len()).filter(|&n| sketches[n].can_go).collect();
        sources.sort_by_key(|&n| (std::cmp::Reverse(sketches[n].spare), n));
        let mut targets: BTreeSet<(u64, usize)> =
            (0..sketches.len()).map(|n| (sketches[n].spare, n)).collect();
        let mut pairs = Vec::new();
        let mut settled = vec![false; sketches.len()];
        for source in sources {
            if settled[source] {
                continue;
            }
            let pieces = sketches[source].pieces();
            let (mask, used) = (touched(&pieces, granule), granule - sketches[source].spare);
            let found = targets
                .range((used, 0)..)
                .filter(|&&(_, n)| n != source)
                .take(PROBES)
                .find(|&&(_, n)| sketches[n].holds(&pieces, mask))
                .copied();
            let Some((spare, target)) = found else { continue };
            targets.remove(&(spare, target));
            targets.remove(&(sketches[source].spare, source));
            // What others have gone to stays.
            settled[source] = true;
            settled[target] = true;
            sketches[target].fill(&pieces, granule);
            targets.insert((sketches[target].spare, target));
            pairs.push(Pair {
                from: sketches[source].id,
                to: sketches[target].id,
            });
        }
        pairs
    }

    /// Calls that make these two granules one; `None` if they have changed so that they cannot be. The plan is
    /// [exclusive](Plan::exclusive). If it fails, see [`Self::mend`].
    pub fn mesh(&mut self, pair: Pair) -> Option<Plan> {
        let unmovable = self.unmovable();
        let source = self.sketch(pair.from, &unmovable).filter(|one| one.can_go)?;
        let target = self.sketch(pair.to, &unmovable)?;
        let granule = self.config.granule;
        let pieces = source.pieces();
        if pair.from == pair.to || !target.holds(&pieces, touched(&pieces, granule)) {
            return None;
        }
        let (from, to) = (pair.from, pair.to);
        let mut plan = Plan::new(Aim::Mesh(from));
        let mut places = source.places;
        // Its home is the last: as long as it is mapped there, it is a granule as any other.
        places.sort_by_key(|place| (place.at == source.home, place.at));
        // Work may still use what is overwritten, and the mappings that go.
        let spare = self.runs.take_all(source.home, granule);
        let mut works: Vec<(Owner, Mark)> = spare.iter().map(|(_, run)| (run.owner, run.mark)).collect();
        for place in &mut places {
            for &(offset, n) in &place.pieces {
                place.taken.extend(self.runs.take_all(target.home + offset, n));
            }
            works.extend(place.taken.iter().map(|(_, run)| (run.owner, run.mark)));
            if let Some(shadow) = self.meshes.shadows.get(&place.at) {
                works.extend(shadow.last.iter().map(|last| (Owner::Stream(last.0), last.1)));
            }
        }
        for (owner, mark) in works {
            if let Owner::Stream(stream) = owner {
                self.wait(&mut plan, stream, mark);
            }
        }
        let maps: Vec<u64> = self.chunks.get(from).map(|chunk| chunk.maps.clone())?;
        for at in maps {
            if !places.iter().any(|place| place.at == at) {
                let last = self.last_at(at);
                let of_view = self.views.last_at(at);
                let unneeded = self.views.kill_at(at);
                self.strand(unneeded, of_view);
                self.stale.remove(&at);
                for &(stream, mark) in &last {
                    self.wait(&mut plan, stream, mark);
                }
                let len = granule;
                plan.calls.push(Call::Unmap { chunk: from, at, len });
                plan.unmaps.push((at, last));
            }
        }
        for place in &places {
            for &(offset, len) in &place.pieces {
                plan.calls.push(Call::Copy {
                    from,
                    to,
                    offset,
                    source: place.at + offset,
                    target: target.home + offset,
                    len,
                });
            }
        }
        for place in &places {
            let (at, len) = (place.at, granule);
            plan.calls.push(Call::Unmap { chunk: from, at, len });
            plan.calls.push(Call::Map { chunk: to, at, len });
        }
        let len = granule;
        plan.calls.push(Call::Release { chunk: from, len });
        for place in &places {
            self.meshes.places.insert(place.at, from);
        }
        self.hand_out(&mut plan);
        let moving = Moving {
            plan: plan.number,
            to,
            places,
            spare,
            parked: Vec::new(),
            out: true,
        };
        self.meshes.moving.insert(from, moving);
        Some(plan)
    }

    /// Whether blocks have no memory behind their addresses, since a call of a mesh failed: nothing may touch them before
    /// [`Self::mend`] has mended that.
    #[must_use]
    pub fn torn(&self) -> bool {
        self.meshes.moving.values().any(|moving| !moving.out)
    }

    /// Calls that put back what a failed mesh has torn; `None` if nothing is. The plan is [exclusive](Plan::exclusive).
    pub fn mend(&mut self) -> Option<Plan> {
        let (&from, moving) = self.meshes.moving.iter_mut().find(|one| !one.1.out)?;
        let mut plan = Plan::new(Aim::Mesh(from));
        let len = self.config.granule;
        for place in &moving.places {
            if self.chunks.at(place.at).is_none() {
                let at = place.at;
                plan.calls.push(Call::Map { chunk: from, at, len });
            }
        }
        moving.out = true;
        self.hand_out(&mut plan);
        Some(plan)
    }

    /// What became of a plan that moves a granule.
    pub(super) fn finish_mesh(&mut self, from: ChunkId, made: &[Call], done: bool, plan: u64) -> Finished {
        let granule = self.config.granule;
        let Some(mut moving) = self.meshes.moving.remove(&from) else {
            return Finished::Failed;
        };
        let kept: Vec<(u64, u64)> = moving.places.iter().map(|place| (place.at, granule)).collect();
        if let Some(Call::Release { chunk, .. }) = made.last() {
            self.chunks.set(*chunk, State::Held);
        }
        self.enter_all(made, &kept, plan);
        if moving
            .places
            .iter()
            .any(|place| self.chunks.at(place.at).is_none())
        {
            moving.out = false;
            self.meshes.moving.insert(from, moving);
            self.counters.failed += 1;
            return Finished::Failed;
        }
        let to = moving.to;
        let homes = |id| self.chunks.get(id).map(|chunk| chunk.home);
        let (source, target) = (homes(from), homes(to).unwrap_or(0));
        let mut all = true;
        // What is given below is of granules that do not move any more.
        for place in &moving.places {
            self.meshes.places.remove(&place.at);
        }
        let mut free: Vec<(u64, u64)> = Vec::new();
        let mut held: Vec<(u64, Run)> = Vec::new();
        for place in moving.places {
            if self.chunks.at(place.at) != Some(to) {
                all = false;
                held.extend(place.taken);
                continue;
            }
            // The other granule's bytes are these blocks' now; nobody uses those that they were copied from.
            let before = self.meshes.shadows.remove(&place.at);
            let shadow = Shadow {
                chunk: to,
                home: target,
                used: place.pieces.iter().map(|piece| piece.1).sum(),
                last: before.map(|shadow| shadow.last).unwrap_or_default(),
            };
            if shadow.used > 0 {
                self.meshes.shadows.insert(place.at, shadow);
            } else {
                // Nothing lived at its home any more.
                self.stale.insert(place.at, shadow.last);
            }
            if let Some(home) = source {
                free.extend(place.pieces.iter().map(|&(at, n)| (home + at, n)));
            }
        }
        if all {
            self.counters.meshed += 1;
            if source.is_some() {
                self.chunks.set(from, State::Held);
                self.orphans.insert(from);
            }
        } else {
            for (at, len) in free {
                self.give(at, len, Owner::Anyone, Mark(0));
            }
            held.extend(moving.spare);
            for (at, run) in held {
                let (owner, mark) = self.since(moving.plan, run.owner, run.mark);
                self.give(at, run.len, owner, mark);
            }
        }
        for (at, len, owner, mark) in moving.parked {
            self.vacate_at(at, len, owner, mark);
        }
        if done {
            Finished::Less
        } else {
            self.counters.failed += 1;
            Finished::Failed
        }
    }

    /// Frees bytes of a block, by the addresses that it has them at.
    pub(super) fn vacate_at(&mut self, at: u64, len: u64, owner: Owner, mark: Mark) {
        let (granule, end) = (self.config.granule, at + len);
        let mut from = at;
        while from < end {
            let start = self.config.down(from);
            let special = self.meshes.next_special(start, end).max(from);
            if special > from {
                self.give(from, special - from, owner, mark);
                from = special;
                continue;
            }
            let to = (start + granule).min(end);
            if let Some(moving) = (self.meshes.places)
                .get(&start)
                .and_then(|id| self.meshes.moving.get_mut(id))
            {
                moving.parked.push((from, to - from, owner, mark));
            } else {
                self.leave_shadow(start, from, to - from, owner, mark);
            }
            from = to;
        }
    }

    fn leave_shadow(&mut self, start: u64, at: u64, len: u64, owner: Owner, mark: Mark) {
        let done = &self.done;
        let Some(shadow) = self.meshes.shadows.get_mut(&start) else {
            return;
        };
        shadow.used -= len;
        if let Owner::Stream(stream) = owner {
            let past = |last: &(Stream, Mark)| done.get(&last.0).is_some_and(|done| *done >= last.1);
            shadow
                .last
                .retain(|last| !past(last) && last.0 != stream || last.0 == stream && last.1 > mark);
            if !shadow.last.iter().any(|last| last.0 == stream) && !past(&(stream, mark)) {
                shadow.last.push((stream, mark));
            }
        }
        let home = shadow.home + (at - start);
        if shadow.used == 0
            && let Some(shadow) = self.meshes.shadows.remove(&start)
        {
            self.stale.insert(start, shadow.last);
        }
        self.give(home, len, owner, mark);
    }

    /// Where these addresses' bytes are, by their home addresses. Not for what is moving.
    pub(super) fn homes(&self, at: u64, len: u64) -> Vec<(u64, u64)> {
        let (granule, end) = (self.config.granule, at + len);
        let (mut from, mut homes) = (at, Vec::new());
        for (&start, shadow) in self.meshes.shadows.range(self.config.down(at)..end) {
            if start > from {
                homes.push((from, start - from));
                from = start;
            }
            let to = (start + granule).min(end);
            homes.push((shadow.home + (from - start), to - from));
            from = to;
        }
        if from < end {
            homes.push((from, end - from));
        }
        homes
    }

    /// The granules, by their homes, in which something has to stay.
    fn unmovable(&self) -> BTreeSet<u64> {
        let pinned = self.meshes.pins.keys().filter_map(|at| self.live.get(at));
        let late = self.late.iter().map(|late| &late.block);
        // A graph uses a private stream's addresses also when their blocks are freed, and then nobody would know of them in a shadow.
        let live = self.live.values();
        let private = live.filter(|block| !self.private.is_empty() && self.private.contains(&block.stream));
        let mut granules = BTreeSet::new();
        for block in pinned.chain(late).chain(private) {
            let homes = self
                .views
                .extents(block.at, block.len)
                .unwrap_or_else(|| self.homes(block.at, block.len));
            for (home, len) in homes {
                let mut from = self.config.down(home);
                while from < home + len {
                    granules.insert(from);
                    from += self.config.granule;
                }
            }
        }
        granules
    }

    /// A granule that blocks share and something is free in, if nothing in it has to stay.
    fn sketch(&self, id: ChunkId, unmovable: &BTreeSet<u64>) -> Option<Sketch> {
        let granule = self.config.granule;
        let chunk = self.chunks.get(id)?;
        let home = chunk.home;
        if chunk.len != granule
            || chunk.state != State::Active
            || !chunk.maps.contains(&home)
            || self.meshes.moving.contains_key(&id)
            || unmovable.contains(&home)
            || self.keeps_in(home, granule)
        {
            return None;
        }
        let free: Vec<(u64, u64)> = self
            .runs
            .inside(home, granule)
            .map(|(at, n)| (at - home, n))
            .collect();
        if free.is_empty() {
            return None;
        }
        // Where its blocks are, if they are at home and in shadows only, and no plan has bytes of it.
        let shadows = chunk.aliases().filter(|at| self.meshes.shadows.contains_key(at));
        let places: Vec<Place> = shadows
            .chain([home])
            .map(|at| Place {
                at,
                pieces: self.pieces(at, granule),
                taken: Vec::new(),
            })
            .collect();
        let used: u64 = places
            .iter()
            .flat_map(|place| place.pieces.iter().map(|piece| piece.1))
            .sum();
        let mut sketch = Sketch {
            id,
            home,
            free,
            spare: 0,
            places,
            can_go: false,
            mask: 0,
        };
        sketch.masked(granule);
        sketch.can_go =
            used + sketch.spare == granule && !chunk.aliases().any(|at| self.views.is_used_at(at));
        // Wholly free, for several streams: it is going to be idle by itself.
        (sketch.spare < granule).then_some(sketch)
    }

    /// Offset and length of what lives at the addresses of a granule.
    fn pieces(&self, at: u64, granule: u64) -> Vec<(u64, u64)> {
        let before = self.live.range(..at).next_back();
        let mut pieces: Vec<(u64, u64)> = Vec::new();
        for (&start, block) in before.into_iter().chain(self.live.range(at..at + granule)) {
            let (from, to) = (start.max(at), (start + block.len).min(at + granule));
            if from >= to {
                continue;
            }
            match pieces.last_mut() {
                Some(last) if last.0 + last.1 == from - at => last.1 += to - from,
                _ => pieces.push((from - at, to - from)),
            }
        }
        pieces
    }
}
