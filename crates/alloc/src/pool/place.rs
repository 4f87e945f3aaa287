//! Where a block goes: among free bytes, in a view that is there, in a view that is made, or in new memory; in this order, but for
//! what [`super::ends`] says.

use std::collections::{BTreeMap, BTreeSet};

use super::chunks::{ChunkId, State};
use super::ends::Ends;
use super::plan::{Aim, Call, Draft, Plan};
use super::runs::Owner;
use super::views::View;
use super::{Mark, Pool, Request, Step, Stream, views};

/// How many fits are looked at to find the one that uses the fewest idle granules.
const LOOKS: usize = 8;
/// Chunks are cut into about so many parts, of a granule at least.
const PARTS: u64 = 32;
/// When so many mappings serve nobody, the next plan takes some away.
const STALE_MANY: usize = 64;

/// An idle chunk: home, id and length.
type Idle = (u64, ChunkId, u64);

/// Memory for a view: idle chunks, of the last of which perhaps only a part.
pub(super) struct Gathered {
    pub(super) chunks: Vec<(ChunkId, u64)>,
    pub(super) bytes: u64,
}

impl Pool {
    /// The next step of an allocation.
    pub fn allocate(&mut self, request: Request) -> Step {
        let Request {
            size,
            stream,
            align,
            asked,
        } = request;
        let Some(len) = self.config.round(size).filter(|len| *len <= u64::MAX >> 1) else {
            return Step::NoRoom(size);
        };
        let align = self.aligned(len, align);
        if let Some((uses, at)) = self.fit(stream, len, align) {
            return match self.thriftier(uses, size, len, align, stream) {
                Some(step) => step,
                None => self.use_run(at, size, len, stream),
            };
        }
        if let Some(at) = self.adjoining(stream, len, align) {
            return self.use_run(at, size, len, stream);
        }
        if let Some(at) = self.ready_view(size, len, align, stream) {
            return Step::Ready(at);
        }
        // What other streams have freed is looked at before anything is mapped.
        if !asked {
            let others: Vec<Stream> = self.others(stream);
            if !others.is_empty() {
                return Step::Ask(others);
            }
        }
        self.make_room(size, len, align, stream)
    }

    /// A block in new memory of its own, however much is idle: nothing has to be waited for. For who cannot wait, as while a graph is captured.
    /// Aligned to a granule at most.
    pub fn allocate_new(&mut self, request: &Request) -> Step {
        let Request { size, stream, .. } = *request;
        let Some(len) = self.config.round(size).filter(|len| *len <= u64::MAX >> 1) else {
            return Step::NoRoom(size);
        };
        let need = self.config.up(len);
        let left = self.config.limit.saturating_sub(self.chunks.physical());
        if need > left {
            return Step::NoRoom(need - left);
        }
        match self.space.first(need) {
            Some((end, _)) => match self.grown(end, end, need, size, len, stream) {
                Ok(mut plan) => {
                    self.hand_out(&mut plan);
                    Step::Run(Box::new(plan))
                }
                Err(step) => step,
            },
            None => Step::Addresses(need),
        }
    }

    /// A block, if there is one without any call of the driver and without asking how far streams are. Nothing else changes.
    pub fn allocate_mapped(&mut self, request: &Request) -> Option<u64> {
        let Request {
            size, stream, align, ..
        } = *request;
        let len = self.config.round(size).filter(|len| *len <= u64::MAX >> 1)?;
        let align = self.aligned(len, align);
        let place = self
            .fit(stream, len, align)
            .map(|(_, at)| at)
            .or_else(|| self.adjoining(stream, len, align));
        match place {
            Some(at) if self.parts_of_chunks(at, len).is_empty() => {
                self.put(at, size, len, stream);
                Some(at)
            }
            // Cutting is for the one who makes calls.
            Some(_) => None,
            None => self.ready_view(size, len, align, stream),
        }
    }

    /// Whole granules lie on whole granules: when they are free, all of them can go elsewhere.
    const fn aligned(&self, len: u64, align: u64) -> u64 {
        if len.is_multiple_of(self.config.granule) {
            self.config.granule
        } else if align > self.config.quantum {
            align
        } else {
            self.config.quantum
        }
    }

    fn others(&self, stream: Stream) -> Vec<Stream> {
        let mut others: Vec<Stream> = self
            .late
            .iter()
            .flat_map(|late| late.others.iter().map(|other| other.0))
            .chain(self.runs.streams().into_iter().filter(|other| *other != stream))
            .filter(|other| !self.private.contains(other))
            .collect();
        others.sort_unstable();
        others.dedup();
        others
    }

    /// Best fit, among a few the one that takes most bytes of granules that are in use anyhow; and how many idle granules it uses.
    fn fit(&self, stream: Stream, len: u64, align: u64) -> Option<(u64, u64)> {
        let mut best: Option<(u64, u64)> = None;
        let mut looked = 0;
        for (start, run_len) in self.runs.fitting(stream, len) {
            if let Some((uses, at)) = self.within(start, run_len, len, align) {
                if best.is_none_or(|(least, _)| uses < least) {
                    best = Some((uses, at));
                }
                looked += 1;
                if uses == 0 || looked == LOOKS {
                    break;
                }
            }
        }
        best
    }

    /// The place for a block at one of the ends of a run, and how many idle granules it uses there.
    fn within(&self, start: u64, run_len: u64, len: u64, align: u64) -> Option<(u64, u64)> {
        let end = start + run_len;
        let head = start.next_multiple_of(align);
        if head + len > end {
            return None;
        }
        let tail = (end - len) / align * align;
        let (first, last) = (self.config.up(start), self.config.down(end));
        let idle = |at: u64| {
            let from = self.config.down(at).max(first);
            let to = self.config.up(at + len).min(last);
            to.saturating_sub(from) / self.config.granule
        };
        let (at_head, at_tail) = (idle(head), idle(tail));
        Some(if at_tail < at_head {
            (at_tail, tail)
        } else {
            (at_head, head)
        })
    }

    /// A place across neighbouring runs, each of which the stream may use.
    fn adjoining(&self, stream: Stream, len: u64, align: u64) -> Option<u64> {
        let (start, run_len) = self
            .runs
            .neighbours(stream, len + (align - self.config.quantum))?;
        self.within(start, run_len, len, align).map(|(_, at)| at)
    }

    /// A block in the oldest view of that size all of whose bytes are free and the stream's to use.
    fn ready_view(&mut self, size: u64, len: u64, align: u64, stream: Stream) -> Option<u64> {
        let most = self.config.up(len);
        let id = self.views.oldest_ready(len, most, |view| {
            view.at.is_multiple_of(align) && self.is_free(view, len, stream)
        })?;
        self.put_view(id, size, len, stream)
    }

    /// Whether a block of this length could live in a view: all its bytes are free, and the stream may use them.
    pub(super) fn is_free(&self, view: &View, len: u64, stream: Stream) -> bool {
        views::first(&view.extents, len).all(|(home, n)| self.usable_bytes(home, n, stream))
    }

    /// Whether all these bytes are free, and the stream may use them.
    fn usable_bytes(&self, at: u64, len: u64, stream: Stream) -> bool {
        let mut from = at;
        while from < at + len {
            match self.runs.containing(from) {
                Some((start, run)) if run.owner.allows(stream) => from = start + run.len,
                _ => return false,
            }
        }
        true
    }

    /// A block in free, mapped bytes: at once, unless it would cover only part of an idle chunk. That is cut first.
    fn use_run(&mut self, at: u64, size: u64, len: u64, stream: Stream) -> Step {
        let cut = self.parts_of_chunks(at, len);
        if cut.is_empty() {
            self.put(at, size, len, stream);
            return Step::Ready(at);
        }
        let mut plan = Plan::new(Aim::Block {
            at,
            size,
            len,
            stream,
            view: None,
        });
        self.hold_bytes(&mut plan, at, len);
        for (id, cuts) in cut {
            self.recut(&mut plan, id, &cuts, stream);
        }
        self.sweep(&mut plan, stream);
        self.hand_out(&mut plan);
        Step::Run(Box::new(plan))
    }

    /// The idle chunks of which a block here would cover only a part, and where each has to be cut.
    fn parts_of_chunks(&self, at: u64, len: u64) -> Vec<(ChunkId, Vec<u64>)> {
        let mut parts = Vec::new();
        for (start, n, id) in self.chunks.over(at, len) {
            if n > self.config.granule && self.is(id, State::Idle) {
                let cuts = self.cuts(start, n, at, len);
                if !cuts.is_empty() {
                    parts.push((id, cuts));
                }
            }
        }
        parts
    }

    /// Where a chunk at `[start, start + n)` has to be cut so that a block covers its parts wholly or not at all, and shares none but
    /// single granules with others.
    fn cuts(&self, start: u64, n: u64, at: u64, len: u64) -> Vec<u64> {
        let config = &self.config;
        let borders = [
            config.down(at),
            config.up(at),
            config.down(at + len),
            config.up(at + len),
        ];
        let inside = |cut: &u64| *cut > start && *cut < start + n;
        borders.into_iter().filter(inside).collect()
    }

    /// Takes idle chunks and free bytes in these addresses out, for a plan.
    fn hold_bytes(&mut self, plan: &mut Plan, at: u64, len: u64) {
        for (_, id) in self.parts(at, len) {
            if self.is(id, State::Idle) {
                self.hold(plan, id);
            }
        }
        plan.held.extend(self.runs.take_all(at, len));
    }

    /// Takes an idle chunk out, for a plan.
    pub(super) fn hold(&mut self, plan: &mut Plan, id: ChunkId) {
        let Some((home, len)) = self.chunks.get(id).map(|chunk| (chunk.home, chunk.len)) else {
            return;
        };
        let mut whose = (Owner::Anyone, Mark(0));
        for (_, run) in self.runs.take_all(home, len) {
            whose = (whose.0.max(run.owner), whose.1.max(run.mark));
        }
        self.chunks.set(id, State::Held);
        plan.chunks.push((id, whose.0, whose.1));
    }

    /// Waits, in a plan, until work is past what it may use.
    pub(super) fn wait(&self, plan: &mut Plan, stream: Stream, mark: Mark) {
        let call = Call::Wait { stream, mark };
        if !self.is_done(stream, mark) && !plan.calls.contains(&call) {
            plan.calls.push(call);
        }
    }

    /// Takes all mappings of a held chunk away, and the chunk. What lies under `kept` addresses will be mapped again.
    pub(super) fn unmake(&mut self, plan: &mut Plan, id: ChunkId, kept: &[u64]) {
        let Some((home, len, maps)) = self
            .chunks
            .get(id)
            .map(|chunk| (chunk.home, chunk.len, chunk.maps.clone()))
        else {
            return;
        };
        let whose = plan.chunks.iter().find(|held| held.0 == id).copied();
        if let Some((_, Owner::Stream(stream), mark)) = whose {
            self.wait(plan, stream, mark);
        }
        for at in maps {
            if at != home {
                let last = self.last_at(at);
                for &(stream, mark) in &last {
                    self.wait(plan, stream, mark);
                }
                if !kept.contains(&at) {
                    let of_view = self.views.last_at(at);
                    let unneeded = self.views.kill_at(at);
                    self.strand(unneeded, of_view);
                    // It goes with this plan.
                    self.stale.remove(&at);
                    plan.unmaps.push((at, last));
                }
            }
            plan.calls.push(Call::Unmap { chunk: id, at, len });
        }
        plan.calls.push(Call::Release { chunk: id, len });
    }

    /// Makes a held chunk anew, in parts with these borders among theirs; their ids. In many parts at once: or it would be cut again and
    /// again, at other places, and each time what is left of it is unmapped, for which work has to be waited for.
    fn recut(&mut self, plan: &mut Plan, id: ChunkId, cuts: &[u64], stream: Stream) -> Vec<(ChunkId, u64)> {
        let Some((home, len)) = self.chunks.get(id).map(|chunk| (chunk.home, chunk.len)) else {
            return Vec::new();
        };
        // Its views stay: the parts come where it was.
        let kept: Vec<u64> = self
            .chunks
            .get(id)
            .into_iter()
            .flat_map(|chunk| chunk.aliases())
            .filter(|&at| self.views.wants(at))
            .collect();
        self.unmake(plan, id, &kept);
        plan.ranges.push((home, len));
        let mut parts = Vec::new();
        let mut from = home;
        let part = self.config.up(len / PARTS).max(self.config.granule);
        let mut borders: Vec<u64> = (1..len.div_ceil(part)).map(|n| home + n * part).collect();
        borders.extend_from_slice(cuts);
        borders.push(home + len);
        borders.sort_unstable();
        borders.dedup();
        for to in borders {
            let len = to - from;
            let chunk = self.make(plan, from, len, stream);
            for at in &kept {
                let at = at + (from - home);
                plan.calls.push(Call::Map { chunk, at, len });
            }
            parts.push((chunk, len));
            from = to;
        }
        self.thrift.remap(parts.len() * (1 + kept.len()));
        plan.kept.extend(kept.into_iter().map(|at| (at, len)));
        self.counters.cuts += 1;
        parts
    }

    /// Creates a chunk and maps it at its home.
    fn make(&mut self, plan: &mut Plan, home: u64, len: u64, stream: Stream) -> ChunkId {
        let chunk = self.chunks.draft(home, len);
        plan.calls.push(Call::Create { chunk, len });
        plan.calls.push(Call::Map { chunk, at: home, len });
        plan.chunks.push((chunk, Owner::Stream(stream), Mark(0)));
        chunk
    }

    /// Neither free bytes nor a view: a view is made of what is free, or the pool grows.
    fn make_room(&mut self, size: u64, len: u64, align: u64, stream: Stream) -> Step {
        let need = self.config.up(len);
        let granule = self.config.granule;
        let left = self.config.limit.saturating_sub(self.chunks.physical());
        // Growing where addresses are free goes on in the free bytes before them.
        let growth = [granule, need]
            .into_iter()
            .filter_map(|least| {
                let (end, room) = self.space.first(least)?;
                let head = self
                    .runs
                    .ending_at(end)
                    .filter(|(_, run)| run.owner.allows(stream))
                    .map(|(start, _)| start.next_multiple_of(align))
                    .filter(|start| *start < end);
                let at = head.unwrap_or(end);
                let grows = self.config.up((at + len).saturating_sub(end));
                (grows <= room).then_some((grows, at, end))
            })
            .min();
        // Small blocks will fill ends of granules anyhow.
        let ends = if align == self.config.quantum && (len >= granule / 4 || left < granule) {
            self.ends(stream, len)
        } else {
            Ends::default()
        };
        let middle = self.config.up(len - ends.bytes());
        let gathered = self.gather(stream, middle);
        let extra = middle - gathered.bytes;
        if let Some((grows, at, end)) = growth
            && grows <= left
        {
            if grows + u64::from(at == end && ends.bytes() > 0) <= extra {
                return self.grow(at, end, grows, size, len, stream);
            }
            if self.may_be_idle(grows, need) {
                self.thrift.took(grows);
                return self.grow(at, end, grows, size, len, stream);
            }
        }
        if extra > left {
            let pending = self.pending(stream);
            if !pending.is_empty() {
                return Step::Wait(pending);
            }
            return Step::NoRoom(extra - left);
        }
        self.stitch(gathered, ends, extra, size, len, stream)
    }

    /// Work that keeps free memory from this stream.
    fn pending(&self, stream: Stream) -> Vec<(Stream, Mark)> {
        let mut pending: BTreeMap<Stream, Mark> = BTreeMap::new();
        let works = self
            .runs
            .streams()
            .into_iter()
            .filter(|other| *other != stream)
            .filter_map(|other| Some((other, self.runs.last_mark(other)?)))
            .chain(self.late.iter().flat_map(|late| late.others.iter().copied()))
            .filter(|&(other, mark)| !self.is_done(other, mark));
        for (stream, mark) in works {
            let last = pending.entry(stream).or_insert(mark);
            *last = (*last).max(mark);
        }
        pending.into_iter().collect()
    }

    /// Idle chunks for so many bytes, from as few runs as possible; less if there is not so much.
    ///
    /// Whole runs: what lies beside an idle chunk in its run, free parts of granules that others use, is of no use to
    /// large blocks as long as the chunk is away.
    pub(super) fn gather(&self, stream: Stream, need: u64) -> Gathered {
        let mut gathered = Gathered {
            chunks: Vec::new(),
            bytes: 0,
        };
        if self.chunks.idle_bytes() == 0 {
            return gathered;
        }
        let mut runs: BTreeMap<u64, (u64, Vec<Idle>)> = BTreeMap::new();
        for (id, chunk) in self.chunks.idle() {
            let (home, len) = (chunk.home, chunk.len);
            if let Some((start, run)) = self.runs.containing(home)
                && run.owner.allows(stream)
            {
                let (bytes, chunks) = runs.entry(start).or_default();
                *bytes += len;
                chunks.push((home, id, len));
            }
        }
        let mut by_size: BTreeSet<(u64, u64)> = runs.iter().map(|(&start, run)| (run.0, start)).collect();
        while gathered.bytes < need {
            let rest = need - gathered.bytes;
            // The smallest that holds all the rest, or else the largest.
            let Some((bytes, start)) = by_size
                .range((rest, 0)..)
                .next()
                .or_else(|| by_size.last())
                .copied()
            else {
                break;
            };
            by_size.remove(&(bytes, start));
            let mut chunks = runs.remove(&start).map(|run| run.1).unwrap_or_default();
            chunks.sort_unstable();
            for (_, id, len) in chunks {
                let rest = need - gathered.bytes;
                if rest > 0 {
                    gathered.chunks.push((id, len.min(rest)));
                    gathered.bytes += len.min(rest);
                }
            }
        }
        gathered
    }

    /// New memory at `end`, for a block that begins at `at`, at or before it.
    fn grow(&mut self, at: u64, end: u64, grows: u64, size: u64, len: u64, stream: Stream) -> Step {
        match self.grown(at, end, grows, size, len, stream) {
            Ok(mut plan) => {
                self.sweep(&mut plan, stream);
                self.hand_out(&mut plan);
                Step::Run(Box::new(plan))
            }
            Err(step) => step,
        }
    }

    /// The plan for that, and nothing else. To be handed out.
    fn grown(
        &mut self,
        at: u64,
        end: u64,
        grows: u64,
        size: u64,
        len: u64,
        stream: Stream,
    ) -> Result<Plan, Step> {
        if !self.space.take_at(end, grows) {
            return Err(Step::Addresses(grows));
        }
        let mut plan = Plan::new(Aim::Block {
            at,
            size,
            len,
            stream,
            view: None,
        });
        if at < end {
            // An idle chunk at the head may have to be cut.
            let over: Vec<_> = self.chunks.over(at, end - at).collect();
            for (start, n, id) in over {
                let idle = self.is(id, State::Idle);
                let cuts = self.cuts(start, n, at, end - at);
                if idle && !cuts.is_empty() {
                    self.hold(&mut plan, id);
                    self.recut(&mut plan, id, &cuts, stream);
                }
            }
            self.hold_bytes(&mut plan, at, end - at);
        }
        plan.ranges.push((end, grows));
        // The last granule is shared with others if the block does not end at its end.
        let shared = self.config.up(at + len) != at + len && grows > self.config.granule;
        let whole = grows - if shared { self.config.granule } else { 0 };
        let mut from = end;
        for granules in self.config.cut(whole / self.config.granule) {
            let n = granules * self.config.granule;
            self.make(&mut plan, from, n, stream);
            from += n;
        }
        if shared {
            self.make(&mut plan, from, self.config.granule, stream);
        }
        Ok(plan)
    }

    /// A view of these ends and idle chunks, and of `extra` new bytes.
    pub(super) fn stitch(
        &mut self,
        gathered: Gathered,
        ends: Ends,
        extra: u64,
        size: u64,
        len: u64,
        stream: Stream,
    ) -> Step {
        let granule = self.config.granule;
        if self.views.len() >= self.config.views_max
            && let Some(oldest) = self.views.oldest_unused(&self.private)
        {
            self.drop_view(oldest);
        }
        // The chunks at the ends are mapped as a whole.
        let outer = |at: u64| self.chunks.over(at, 1).next();
        let tail = ends.tail.and_then(|(at, n)| Some((at, n, outer(at)?)));
        let head = ends.head.and_then(|(at, n)| Some((at, n, outer(at)?)));
        let before = tail.map_or(0, |(_, _, (_, n, _))| n);
        let after = head.map_or(0, |(_, _, (_, n, _))| n);
        let mapped = before + gathered.bytes + extra + after;
        // The new memory needs a home, too.
        let home = if extra > 0 {
            match self.space.first(extra) {
                Some((home, _)) if self.space.take_at(home, extra) => Some(home),
                _ => return Step::Addresses(extra),
            }
        } else {
            None
        };
        let Some(base) = self.space.take_last(mapped) else {
            if let Some(home) = home {
                self.give_addresses(home, extra);
            }
            return Step::Addresses(mapped);
        };
        let at = base + before - ends.tail.map_or(0, |(_, n)| n);
        let mut plan = Plan::new(Aim::Block {
            at,
            size,
            len,
            stream,
            view: None,
        });
        plan.ranges.push((base, mapped));
        let mut parts: Vec<(ChunkId, u64)> = Vec::new();
        let mut extents: Vec<(u64, u64)> = Vec::new();
        if let Some((from, n, (_, whole, id))) = tail {
            plan.held.extend(self.runs.take_all(from, n));
            parts.push((id, whole));
            extents.push((from, n));
        }
        // Where the block ends inside a granule that is idle now, others may come behind it: that is a chunk of its own.
        let shared = head.is_none() && !(len - ends.bytes()).is_multiple_of(granule);
        let last = gathered.chunks.len().checked_sub(1).filter(|_| extra == 0);
        for (index, (id, used)) in gathered.chunks.into_iter().enumerate() {
            let Some((start, n)) = self.chunks.get(id).map(|chunk| (chunk.home, chunk.len)) else {
                continue;
            };
            let mut cuts = Vec::new();
            if Some(index) == last && shared && used > granule {
                cuts.push(start + used - granule);
            }
            if used < n {
                cuts.push(start + used);
            }
            self.hold(&mut plan, id);
            extents.push((start, used));
            if cuts.is_empty() {
                parts.push((id, n));
                continue;
            }
            let mut rest = used;
            for (id, n) in self.recut(&mut plan, id, &cuts, stream) {
                if rest > 0 {
                    parts.push((id, n));
                    rest -= n;
                }
            }
        }
        if let Some(home) = home {
            plan.ranges.push((home, extra));
            extents.push((home, extra));
            let single = if shared && extra > granule { granule } else { 0 };
            let mut from = home;
            let lens = self.config.cut((extra - single) / granule);
            for n in lens.map(|granules| granules * granule).chain([single]) {
                if n > 0 {
                    parts.push((self.make(&mut plan, from, n, stream), n));
                    from += n;
                }
            }
        }
        if let Some((from, n, (_, whole, id))) = head {
            plan.held.extend(self.runs.take_all(from, n));
            parts.push((id, whole));
            extents.push((from, n));
        }
        // No longer than what looks for a view of this length, or it would not be found again.
        let total: u64 = extents.iter().map(|extent| extent.1).sum();
        if let Some(last) = extents.last_mut() {
            last.1 -= total.saturating_sub(self.config.up(len));
        }
        self.thrift.remap(parts.len());
        let mut to = base;
        for (chunk, len) in parts {
            plan.calls.push(Call::Map { chunk, at: to, len });
            to += len;
        }
        if let Aim::Block { view, .. } = &mut plan.aim {
            *view = Some(Draft {
                base,
                len: mapped,
                extents,
            });
        }
        self.counters.stitched += 1;
        self.sweep(&mut plan, stream);
        self.hand_out(&mut plan);
        Step::Run(Box::new(plan))
    }

    /// Takes mappings that serve nobody away with a plan for a stream, if they are many. Other streams' work may use them: not while a graph
    /// is captured, when nothing can be waited for.
    fn sweep(&mut self, plan: &mut Plan, stream: Stream) {
        if self.stale.len() >= STALE_MANY && !self.private.contains(&stream) {
            self.unmap_stale(plan, STALE_MANY);
        }
    }
}
