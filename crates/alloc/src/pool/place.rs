//! Where a block goes: among free bytes, in a view that is there, in a view that is made, or in new memory; in this order.

use std::collections::{BTreeMap, BTreeSet};

use super::chunks::{ChunkId, State};
use super::plan::{Aim, Call, Plan};
use super::runs::{Owner, Run};
use super::{Mark, Pool, Request, Step, Stream};

/// How many fits a small block looks at to find one that uses no idle granule.
const LOOKS: usize = 8;
/// When so many mappings serve nobody, the next plan takes some away.
const STALE_MANY: usize = 64;

/// An idle chunk: home, id and length.
type Idle = (u64, ChunkId, u64);

/// Memory for a view: idle chunks, of the last of which perhaps only a part.
struct Gathered {
    chunks: Vec<(ChunkId, u64)>,
    bytes: u64,
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
        let mut align = align.max(self.config.quantum);
        // Whole granules lie on whole granules: when they are free, all of them can go elsewhere.
        if len.is_multiple_of(self.config.granule) {
            align = self.config.granule;
        }
        if let Some(at) = self.fit(stream, len, align) {
            return self.use_run(at, size, len, stream);
        }
        if let Some(at) = self.adjoining(stream, len, align) {
            return self.use_run(at, size, len, stream);
        }
        if let Some(at) = self.ready_view(stream, len) {
            self.put(at, size, len, stream);
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

    fn others(&self, stream: Stream) -> Vec<Stream> {
        let mut others: Vec<Stream> = self
            .late
            .iter()
            .flat_map(|late| late.others.iter().map(|other| other.0))
            .chain(self.runs.streams().into_iter().filter(|other| *other != stream))
            .collect();
        others.sort_unstable();
        others.dedup();
        others
    }

    /// Best fit. A small block rather takes bytes of granules that are in use anyhow.
    fn fit(&self, stream: Stream, len: u64, align: u64) -> Option<u64> {
        let looks = if len < self.config.granule { LOOKS } else { 1 };
        let mut best: Option<(u64, u64)> = None;
        let mut looked = 0;
        for (start, run_len) in self.runs.fitting(stream, len) {
            if let Some((uses, at)) = self.within(start, run_len, len, align) {
                if best.is_none_or(|(least, _)| uses < least) {
                    best = Some((uses, at));
                }
                looked += 1;
                if uses == 0 || looked == looks {
                    break;
                }
            }
        }
        best.map(|(_, at)| at)
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

    /// The oldest view of that size whose chunks are all idle and the stream's to use; opened.
    fn ready_view(&mut self, stream: Stream, len: u64) -> Option<u64> {
        let bytes = self.config.up(len);
        let (id, at) = self
            .views
            .ready(bytes)
            .find(|(_, view)| {
                view.parts
                    .iter()
                    .all(|(_, id)| self.usable(*id, stream).is_some())
            })
            .map(|(id, view)| (id, view.at))?;
        self.open_view(id, stream);
        Some(at)
    }

    /// The run that an idle chunk lies in, if the stream may use it.
    fn usable(&self, id: ChunkId, stream: Stream) -> Option<Run> {
        let chunk = self.chunks.get(id).filter(|chunk| chunk.state == State::Idle)?;
        let (_, run) = self.runs.containing(chunk.home)?;
        run.owner.allows(stream).then_some(run)
    }

    /// A block in free, mapped bytes: at once, unless it would cover only part of an idle chunk. That is cut first.
    fn use_run(&mut self, at: u64, size: u64, len: u64, stream: Stream) -> Step {
        let mut cut: Vec<(ChunkId, Vec<u64>)> = Vec::new();
        for (start, n, id) in self.chunks.over(at, len) {
            if n > self.config.granule
                && self
                    .chunks
                    .get(id)
                    .is_some_and(|chunk| chunk.state == State::Idle)
            {
                let cuts = self.cuts(start, n, at, len);
                if !cuts.is_empty() {
                    cut.push((id, cuts));
                }
            }
        }
        if cut.is_empty() {
            self.put(at, size, len, stream);
            return Step::Ready(at);
        }
        let mut plan = Plan::new(Aim::Block {
            at,
            size,
            len,
            stream,
            view: false,
        });
        self.hold_bytes(&mut plan, at, len);
        for (id, cuts) in cut {
            self.recut(&mut plan, id, &cuts, stream);
        }
        self.sweep(&mut plan);
        self.counters.in_plans += 1;
        Step::Run(plan)
    }

    /// Where a chunk at `[start, start + n)` has to be cut so that a block covers its parts wholly or not at all, and shares none but
    /// single granules with others.
    fn cuts(&self, start: u64, n: u64, at: u64, len: u64) -> Vec<u64> {
        let config = &self.config;
        let mut cuts = vec![
            config.down(at),
            config.up(at),
            config.down(at + len),
            config.up(at + len),
        ];
        cuts.retain(|cut| *cut > start && *cut < start + n);
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }

    /// Takes idle chunks and free bytes in these addresses out, for a plan.
    fn hold_bytes(&mut self, plan: &mut Plan, at: u64, len: u64) {
        for (_, _, id) in self.chunks.over(at, len) {
            if self
                .chunks
                .get(id)
                .is_some_and(|chunk| chunk.state == State::Idle)
            {
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
        self.count_busier(id);
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
                let last = self.views.last_at(at).or_else(|| self.stale.get(&at).copied());
                let last = last.unwrap_or((Stream(0), Mark(0)));
                self.wait(plan, last.0, last.1);
                if !kept.contains(&at) {
                    let unneeded = self.views.kill_at(at);
                    self.strand(unneeded, last);
                    // It goes with this plan.
                    self.stale.remove(&at);
                    plan.unmaps.push((at, last));
                }
            }
            plan.calls.push(Call::Unmap { chunk: id, at, len });
        }
        plan.calls.push(Call::Release { chunk: id, len });
    }

    /// Makes a held chunk anew, in parts; their ids.
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
        for to in cuts.iter().copied().chain([home + len]) {
            let len = to - from;
            let chunk = self.make(plan, from, len, stream);
            for at in &kept {
                let at = at + (from - home);
                plan.calls.push(Call::Map { chunk, at, len });
            }
            parts.push((chunk, len));
            from = to;
        }
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

    /// Neither free bytes nor a view: a view is made of idle chunks, or the pool grows.
    fn make_room(&mut self, size: u64, len: u64, align: u64, stream: Stream) -> Step {
        let need = self.config.up(len);
        let granule = self.config.granule;
        let gathered = self.gather(stream, need);
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
        let extra = need - gathered.bytes;
        let slack = u128::from(self.chunks.physical()) * u128::from(self.config.slack_permille) / 1000;
        let left = self.config.limit.saturating_sub(self.chunks.physical());
        if let Some((grows, at, end)) = growth
            && grows <= left
            && u128::from(grows) <= u128::from(extra) + slack
        {
            return self.grow(at, end, grows, size, len, stream);
        }
        if extra > left {
            let pending = self.pending(stream);
            if !pending.is_empty() {
                return Step::Wait(pending);
            }
            return Step::NoRoom(extra - left);
        }
        self.stitch(gathered, extra, size, len, stream)
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
    fn gather(&self, stream: Stream, need: u64) -> Gathered {
        let mut gathered = Gathered {
            chunks: Vec::new(),
            bytes: 0,
        };
        if self.chunks.idle_bytes() == 0 {
            return gathered;
        }
        let mut runs: BTreeMap<u64, (u64, Vec<Idle>)> = BTreeMap::new();
        for (len, id) in self.chunks.idle() {
            let Some(home) = self.chunks.get(id).map(|chunk| chunk.home) else {
                continue;
            };
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
        if !self.space.take_at(end, grows) {
            return Step::Addresses(grows);
        }
        let mut plan = Plan::new(Aim::Block {
            at,
            size,
            len,
            stream,
            view: false,
        });
        if at < end {
            // An idle chunk at the head may have to be cut.
            for (start, n, id) in self.chunks.over(at, end - at) {
                let idle = self
                    .chunks
                    .get(id)
                    .is_some_and(|chunk| chunk.state == State::Idle);
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
        self.sweep(&mut plan);
        self.counters.in_plans += 1;
        Step::Run(plan)
    }

    /// A view of these idle chunks and `extra` new bytes.
    fn stitch(&mut self, gathered: Gathered, extra: u64, size: u64, len: u64, stream: Stream) -> Step {
        let need = self.config.up(len);
        let granule = self.config.granule;
        if self.views.len() >= self.config.views_max
            && let Some(oldest) = self.views.oldest_unused()
        {
            self.drop_view(oldest);
        }
        // The new memory needs a home, too.
        let home = if extra > 0 {
            match self.space.first(extra) {
                Some((home, _)) if self.space.take_at(home, extra) => Some(home),
                _ => return Step::Addresses(extra),
            }
        } else {
            None
        };
        let Some(view) = self.space.take_last(need) else {
            if let Some(home) = home {
                self.give_addresses(home, extra);
            }
            return Step::Addresses(need);
        };
        let mut plan = Plan::new(Aim::Block {
            at: view,
            size,
            len,
            stream,
            view: true,
        });
        plan.ranges.push((view, need));
        // A part of a chunk, and a single granule for the end of the block if others may come behind it.
        let tail = len != need;
        let mut chunks = gathered.chunks;
        let mut parts: Vec<(ChunkId, u64)> = Vec::new();
        if extra > 0 {
            chunks.retain(|(_, n)| *n > 0);
        }
        let last = chunks.len().checked_sub(1).filter(|_| extra == 0);
        for (index, (id, used)) in chunks.into_iter().enumerate() {
            let Some((start, n)) = self.chunks.get(id).map(|chunk| (chunk.home, chunk.len)) else {
                continue;
            };
            let mut cuts = Vec::new();
            if Some(index) == last && tail && used > granule {
                cuts.push(start + used - granule);
            }
            if used < n {
                cuts.push(start + used);
            }
            self.hold(&mut plan, id);
            if cuts.is_empty() {
                parts.push((id, n));
            } else {
                let made = self.recut(&mut plan, id, &cuts, stream);
                let mut rest = used;
                for (id, n) in made {
                    if rest > 0 {
                        parts.push((id, n));
                        rest -= n;
                    }
                }
            }
        }
        if let Some(home) = home {
            plan.ranges.push((home, extra));
            let shared = tail && extra > granule;
            let whole = extra - if shared { granule } else { 0 };
            let mut from = home;
            for granules in self.config.cut(whole / granule) {
                let n = granules * granule;
                parts.push((self.make(&mut plan, from, n, stream), n));
                from += n;
            }
            if shared {
                parts.push((self.make(&mut plan, from, granule, stream), granule));
            }
        }
        let mut at = view;
        for (chunk, len) in parts {
            plan.calls.push(Call::Map { chunk, at, len });
            at += len;
        }
        self.counters.stitched += 1;
        self.sweep(&mut plan);
        self.counters.in_plans += 1;
        Step::Run(plan)
    }

    /// Takes mappings that serve nobody away with a plan, if they are many.
    fn sweep(&mut self, plan: &mut Plan) {
        if self.stale.len() >= STALE_MANY {
            self.unmap_stale(plan, STALE_MANY);
        }
    }
}
