//! The pool against a tiny card: every byte of physical memory is a cell that holds what was written last, and knows who used it
//! last. After each operation every block is read back.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

mod bugs;
mod mesh;
mod steady;

const GRANULE: u64 = 8;

/// A card of cells, with a driver that takes every call at its word and checks it.
#[derive(Debug, Default)]
pub(super) struct Card {
    chunks: BTreeMap<ChunkId, Vec<Cell>>,
    maps: BTreeMap<u64, (ChunkId, u64)>,
    /// The last work at each mapping.
    used: BTreeMap<u64, (Stream, Mark)>,
    /// How far streams are.
    progress: BTreeMap<Stream, Mark>,
    /// The most work that was handed to each stream.
    handed: BTreeMap<Stream, Mark>,
    pub(super) calls: u64,
    /// The numbers of the calls that fail.
    pub(super) fails: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The block that wrote it.
    holds: u64,
    last: Option<(Stream, Mark)>,
}

impl Card {
    pub(super) fn physical(&self) -> u64 {
        self.chunks.values().map(|cells| cells.len() as u64).sum()
    }

    fn cell(&mut self, at: u64) -> (&mut Cell, u64) {
        let (&start, &(id, len)) = self.maps.range(..=at).next_back().expect("a mapping");
        assert!(at - start < len, "nothing is mapped at {at:#x}");
        let cells = self.chunks.get_mut(&id).expect("the chunk exists");
        (&mut cells[usize::try_from(at - start).unwrap()], start)
    }

    pub(super) fn is_done(&self, (stream, mark): (Stream, Mark)) -> bool {
        self.progress.get(&stream).is_some_and(|done| *done >= mark) || mark == Mark(0)
    }

    /// Work of `stream` writes the block.
    pub(super) fn write(&mut self, block: u64, at: u64, len: u64, stream: Stream) {
        for byte in at..at + len {
            let progress = self.progress.clone();
            let (cell, _) = self.cell(byte);
            if let Some((last, mark)) = cell.last {
                assert!(
                    last == stream || progress.get(&last).is_some_and(|done| *done >= mark),
                    "{byte:#x} is still used by {last:?} up to {mark:?}"
                );
            }
            cell.holds = block;
        }
    }

    /// The block is read a last time and freed; the work that uses it ends at the marks.
    pub(super) fn free(&mut self, block: u64, at: u64, len: u64, last: (Stream, Mark)) {
        for byte in at..at + len {
            // Not readable just now, if a plan moves it.
            if self.is_mapped(byte) {
                let (cell, start) = self.cell(byte);
                assert_eq!(cell.holds, block, "{byte:#x} was overwritten");
                cell.last = Some(last);
                self.used.insert(start, last);
            }
        }
    }

    fn is_mapped(&self, at: u64) -> bool {
        let before = self.maps.range(..=at).next_back();
        before.is_some_and(|(start, (_, len))| at - start < *len)
    }

    /// Every byte holds what the block wrote; bytes that `moves` may have nothing behind them.
    fn verify(&self, block: u64, at: u64, len: u64, moves: impl Fn(u64) -> bool) {
        let mut from = at;
        while from < at + len {
            let there = self.maps.range(..=from).next_back();
            let Some((start, (id, n))) = there.filter(|(start, (_, n))| from - **start < *n) else {
                assert!(moves(from), "nothing is mapped at {from:#x} of block {block}");
                from = (from + 1).next_multiple_of(GRANULE);
                continue;
            };
            let to = (start + n).min(at + len);
            let cells = &self.chunks[id]
                [usize::try_from(from - start).unwrap()..usize::try_from(to - start).unwrap()];
            for (byte, cell) in (from..).zip(cells) {
                assert_eq!(cell.holds, block, "{byte:#x} was lost or overwritten");
            }
            from = to;
        }
    }

    /// The chunks behind these addresses.
    fn behind(&self, at: u64, len: u64) -> Vec<ChunkId> {
        let first = self.maps.range(..=at).next_back().map_or(at, |one| *one.0);
        self.maps.range(first..at + len).map(|one| one.1.0).collect()
    }

    /// The stream is gone; its number may come again, and its marks begin anew.
    fn end(&mut self, stream: Stream) {
        self.progress.remove(&stream);
        self.handed.remove(&stream);
        self.used.retain(|_, last| last.0 != stream);
        for cell in self.chunks.values_mut().flatten() {
            cell.last = cell.last.filter(|last| last.0 != stream);
        }
    }

    pub(super) fn next_mark(&mut self, stream: Stream) -> Mark {
        let handed = self.handed.entry(stream).or_insert(Mark(0));
        handed.0 += 1;
        *handed
    }

    pub(super) fn progress(&self, stream: Stream) -> Mark {
        self.progress.get(&stream).copied().unwrap_or(Mark(0))
    }

    /// The stream does all that it has.
    pub(super) fn advance(&mut self, stream: Stream) {
        let handed = self.handed.get(&stream).copied().unwrap_or(Mark(0));
        self.progress.insert(stream, handed);
    }
}

impl Backing for Card {
    type Error = u64;

    fn call(&mut self, call: &Call) -> Result<(), u64> {
        self.calls += 1;
        if self.fails.contains(&self.calls) {
            return Err(self.calls);
        }
        match *call {
            Call::Wait { stream, mark } => {
                // Marks of a stream that is gone are done.
                let mark = mark.min(self.handed.get(&stream).copied().unwrap_or(Mark(0)));
                let done = self.progress.entry(stream).or_insert(mark);
                *done = (*done).max(mark);
            }
            Call::Copy {
                from,
                to,
                offset,
                source,
                target,
                len,
            } => {
                assert!(len > 0 && offset + len <= GRANULE);
                assert_eq!(self.maps.get(&(source - offset)), Some(&(from, GRANULE)));
                assert_eq!(self.maps.get(&(target - offset)), Some(&(to, GRANULE)));
                let range = usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap();
                let bytes = self.chunks[&from][range.clone()].to_vec();
                for (to, from) in range.zip(bytes) {
                    let over = self.chunks[&self.maps[&(target - offset)].0][to];
                    assert!(
                        over.last.is_none_or(|last| self.is_done(last)),
                        "{over:?} is in use"
                    );
                    let id = self.maps[&(target - offset)].0;
                    self.chunks.get_mut(&id).unwrap()[to] = Cell { last: None, ..from };
                }
            }
            Call::Create { chunk, len } => {
                assert!(len > 0 && len.is_multiple_of(GRANULE));
                let cells = vec![Cell::default(); usize::try_from(len).unwrap()];
                assert!(self.chunks.insert(chunk, cells).is_none(), "{chunk:?} twice");
            }
            Call::Map { chunk, at, len } => {
                assert_eq!(self.chunks[&chunk].len() as u64, len);
                assert_eq!(at % GRANULE, 0);
                let before = self.maps.range(..at + len).next_back();
                assert!(
                    before.is_none_or(|(start, (_, n))| start + n <= at),
                    "mapped over another"
                );
                self.maps.insert(at, (chunk, len));
            }
            Call::Unmap { chunk, at, len } => {
                assert_eq!(self.maps.remove(&at), Some((chunk, len)));
                if let Some(last) = self.used.remove(&at) {
                    assert!(self.is_done(last), "{last:?} still uses the mapping at {at:#x}");
                }
            }
            Call::Release { chunk, len } => {
                assert!(
                    self.maps.values().all(|(id, _)| *id != chunk),
                    "released while mapped"
                );
                let cells = self.chunks.remove(&chunk).expect("it exists");
                assert_eq!(cells.len() as u64, len);
            }
        }
        Ok(())
    }
}

pub(super) fn tiny(limit: u64) -> Config {
    let mut config = Config::for_granule(GRANULE);
    config.quantum = 1;
    config.chunk_max = 4 * GRANULE;
    config.views_max = 6;
    config.limit = limit;
    config
}

pub(super) fn small(config: Config) -> Pool {
    let mut pool = Pool::new(config);
    assert!(pool.add_range(1 << 20, 1 << 20));
    pool
}

/// A pool, its card, and who holds what.
#[derive(Debug)]
pub(super) struct World {
    pub(super) pool: Pool,
    pub(super) card: Card,
    pub(super) live: Vec<(u64, u64, u64, Stream)>,
    pub(super) plans: Vec<(Plan, usize, u64)>,
    /// Pinned blocks, and the chunks that they were in then.
    pins: BTreeMap<u64, Vec<ChunkId>>,
    next: u64,
}

impl World {
    pub(super) fn new(limit: u64) -> Self {
        Self::with(tiny(limit))
    }

    pub(super) fn with(config: Config) -> Self {
        Self {
            pool: small(config),
            card: Card::default(),
            live: Vec::new(),
            plans: Vec::new(),
            pins: BTreeMap::new(),
            next: 1,
        }
    }

    /// Up to the point where calls of the driver are needed. The address, if there was none.
    pub(super) fn begin(&mut self, size: u64, align: u64, stream: Stream) -> Option<u64> {
        let mut request = Request {
            size,
            align,
            stream,
            asked: false,
        };
        for _ in 0..8 {
            match self.pool.allocate(request) {
                Step::Ready(at) => {
                    self.enter(at, stream);
                    return Some(at);
                }
                Step::Run(plan) => {
                    self.plans.push((*plan, 0, size));
                    return None;
                }
                Step::Ask(streams) => {
                    assert!(!request.asked);
                    for stream in streams {
                        self.pool.done(stream, self.card.progress(stream));
                    }
                    request.asked = true;
                }
                Step::Wait(works) => {
                    for (stream, mark) in works {
                        assert!(
                            !self.card.is_done((stream, mark)) || self.pool.done.get(&stream) < Some(&mark)
                        );
                        self.card.advance(stream);
                        self.pool.done(stream, self.card.progress(stream));
                    }
                }
                Step::NoRoom(short) => {
                    if self.plans.is_empty() {
                        let stats = self.pool.stats();
                        let room = stats.idle + self.pool.config.limit.saturating_sub(stats.reserved);
                        let need = self.pool.config.up(self.pool.config.round(size).unwrap());
                        assert!(room < need, "{room} bytes hold {need}");
                        assert!(short > 0 && short <= need);
                    }
                    return None;
                }
                Step::Addresses(_) => return None,
            }
        }
        panic!("an allocation goes in circles");
    }

    /// In new memory, if the limit leaves room for it.
    fn begin_new(&mut self, size: u64, stream: Stream) {
        let request = Request {
            size,
            align: 1,
            stream,
            asked: false,
        };
        let before = self.pool.stats();
        let need = self.pool.config.up(self.pool.config.round(size).unwrap());
        match self.pool.allocate_new(&request) {
            Step::Run(plan) => {
                let made: u64 = plan
                    .calls()
                    .iter()
                    .map(|call| match *call {
                        Call::Create { len, .. } => len,
                        _ => 0,
                    })
                    .sum();
                assert_eq!(made, need);
                assert!(!plan.calls().iter().any(|call| matches!(call, Call::Wait { .. })));
                self.plans.push((*plan, 0, size));
            }
            Step::NoRoom(short) => assert_eq!(
                before.reserved + need,
                self.pool.config.limit.max(before.reserved) + short
            ),
            Step::Addresses(_) => {}
            step => panic!("{step:?}"),
        }
        assert_eq!(self.pool.stats().idle, before.idle, "what is idle stays idle");
    }

    /// If it takes no call.
    fn allocate_mapped(&mut self, size: u64, stream: Stream) {
        let request = Request {
            size,
            align: 1,
            stream,
            asked: false,
        };
        let (calls, plans) = (self.card.calls, self.pool.counters.plans);
        if let Some(at) = self.pool.allocate_mapped(&request) {
            self.enter(at, stream);
        }
        assert_eq!((calls, plans), (self.card.calls, self.pool.counters.plans));
    }

    /// Three seconds, enough for slack if each was busy.
    fn seconds(&mut self, room: u64, busy: bool) {
        for _ in 0..3 {
            if busy {
                self.pool.thrift.remap(1000);
            }
            let wish = self.pool.second(room);
            let most = self.pool.needed(0) * (1000 + self.pool.config.slack_permille) / 1000;
            assert!(wish <= most, "{wish} of {most}");
        }
    }

    fn enter(&mut self, at: u64, stream: Stream) {
        let block = self.pool.find(at).expect("it lives");
        assert_eq!((block.at, block.stream), (at, stream));
        self.card.write(self.next, at, block.len, stream);
        self.live.push((self.next, at, block.len, stream));
        self.next += 1;
    }

    /// One call of a plan; the end of the plan if there is none left, or it fails.
    pub(super) fn step(&mut self, index: usize) -> Option<Finished> {
        let (plan, done, size) = &mut self.plans[index];
        let failed = match plan.calls().get(*done) {
            Some(call) => match self.card.call(call) {
                Ok(()) => {
                    *done += 1;
                    false
                }
                Err(_) => true,
            },
            None => false,
        };
        if !failed && *done < plan.calls().len() {
            return None;
        }
        let (done, size) = (*done, *size);
        let (plan, _, _) = self.plans.remove(index);
        let stream = match plan.aim {
            Aim::Block { stream, .. } => Some(stream),
            Aim::Less | Aim::Mesh(_) => None,
        };
        let finished = self.pool.finish(plan, done);
        assert_eq!(matches!(finished, Finished::Failed), failed);
        if let (Finished::Block(at), Some(stream)) = (finished, stream) {
            assert_eq!(self.pool.find(at).map(|block| block.size), Some(size));
            self.enter(at, stream);
        }
        Some(finished)
    }

    pub(super) fn finish_all(&mut self) {
        loop {
            while !self.plans.is_empty() {
                self.step(0);
            }
            if !self.mend() {
                break;
            }
        }
    }

    /// No work is queued, and none can come: the gate is closed while an exclusive plan is under way or something is torn.
    fn is_idle(&self) -> bool {
        self.pool.torn() || self.plans.iter().any(|(plan, _, _)| plan.exclusive())
    }

    fn go_idle(&mut self) {
        for stream in 0..4 {
            self.card.advance(Stream(stream));
        }
    }

    /// Begins to put right what is torn, if something is.
    fn mend(&mut self) -> bool {
        let plan = self.pool.mend();
        assert!(plan.is_some() || !self.pool.torn());
        let found = plan.is_some();
        self.plans.extend(plan.map(|plan| (plan, 0, 0)));
        found
    }

    /// Begins to mesh one of the pairs that can be.
    pub(super) fn mesh(&mut self, which: usize) -> bool {
        let pairs = self.pool.meshable();
        let Some(&pair) = pairs.get(which % pairs.len().max(1)) else {
            return false;
        };
        let plan = self.pool.mesh(pair);
        // Later pairs may need that the earlier ones are done.
        assert!(plan.is_some() || !which.is_multiple_of(pairs.len()));
        let Some(plan) = plan else { return false };
        assert!(plan.exclusive());
        self.go_idle();
        self.plans.push((plan, 0, 0));
        true
    }

    pub(super) fn mesh_all(&mut self) {
        while self.mesh(0) {
            self.finish_all();
        }
    }

    fn pin(&mut self, which: usize) {
        let (_, at, len, _) = self.live[which % self.live.len()];
        match self.pool.pin(at) {
            Ok(()) => {
                let chunks = self.card.behind(at, len);
                self.pins.entry(at).or_insert(chunks);
            }
            Err(error) => assert!(error == PinError::Moving(at) && self.is_idle()),
        }
    }

    /// At once; the address.
    pub(super) fn allocate(&mut self, size: u64, stream: Stream) -> Option<u64> {
        if let Some(at) = self.begin(size, 1, stream) {
            return Some(at);
        }
        let mut last = None;
        while !self.plans.is_empty() {
            last = self.step(0).or(last);
        }
        match last {
            Some(Finished::Block(at)) => Some(at),
            _ => None,
        }
    }

    pub(super) fn free(&mut self, index: usize, others: &[Stream]) {
        let (block, at, len, stream) = self.live.swap_remove(index);
        let mark = self.card.next_mark(stream);
        self.pins.remove(&at);
        self.card.free(block, at, len, (stream, mark));
        let mut uses = Vec::new();
        for other in others.iter().filter(|other| **other != stream) {
            // The last word of each cell is the first stream's: the others' is checked by what may happen next.
            uses.push((*other, self.card.next_mark(*other)));
        }
        if let Some(&last) = uses.last() {
            for byte in at..at + len {
                if self.card.is_mapped(byte) {
                    self.card.cell(byte).0.last = Some(last);
                }
            }
        }
        if self.is_idle() {
            self.go_idle();
        }
        let freed = self.pool.free(at, stream, mark, &uses).expect("it lives");
        assert_eq!(freed.at, at);
        assert_eq!(self.pool.free(at, stream, mark, &[]), Err(FreeError::NotLive(at)));
    }

    pub(super) fn free_at(&mut self, at: u64) {
        let index = self
            .live
            .iter()
            .position(|block| block.1 == at)
            .expect("it lives");
        self.free(index, &[]);
    }

    pub(super) fn check(&self) {
        if let Err(what) = self.pool.check() {
            panic!("{what}");
        }
        for &(block, at, len, _) in &self.live {
            let moves = |byte| self.pool.meshes.has_place(self.pool.config.down(byte));
            self.card.verify(block, at, len, moves);
        }
        for (&at, chunks) in &self.pins {
            let len = self.pool.find(at).expect("it lives").len;
            assert_eq!(
                &self.card.behind(at, len),
                chunks,
                "the block at {at:#x} is pinned"
            );
        }
        if self.plans.is_empty() {
            assert_eq!(self.card.physical(), self.pool.physical().0, "physical bytes");
            assert_eq!(self.card.maps.len(), self.pool.chunks.mappings(), "mappings");
        }
        for (at, run) in self.pool.runs.iter() {
            if let Owner::Stream(stream) = run.owner {
                let handed = self.card.handed.get(&stream).copied().unwrap_or(Mark(0));
                assert!(
                    run.mark <= handed,
                    "{at:#x} waits for {:?} of {stream:?}",
                    run.mark
                );
            }
        }
        let (mut home, mut blocks) = (0, 0);
        for segment in self.pool.segments() {
            let mut from = segment.at;
            for (at, len, what) in &segment.pieces {
                assert_eq!(*at, from, "a segment is covered without a gap");
                from += len;
                if let Use::Block(_) = what {
                    blocks += len;
                }
            }
            assert_eq!(from, segment.at + segment.len);
            home += if segment.view { 0 } else { segment.len };
        }
        if self.plans.is_empty() && self.pool.orphans.is_empty() && !self.pool.torn() {
            assert_eq!(home, self.pool.physical().0, "segments");
        }
        let stats = self.pool.stats();
        assert_eq!(blocks, stats.allocated);
        assert_eq!(stats.blocks as usize, self.live.len());
        assert_eq!(
            stats.allocated,
            self.live.iter().map(|block| block.2).sum::<u64>()
        );
    }

    /// Everything goes; nothing may be left anywhere.
    pub(super) fn end(mut self) {
        self.card.fails.clear();
        self.finish_all();
        while !self.live.is_empty() {
            self.free(0, &[]);
        }
        for stream in 0..4 {
            self.card.advance(Stream(stream));
            self.pool.done(Stream(stream), self.card.progress(Stream(stream)));
        }
        for _ in 0..3 {
            if let Some(plan) = self.pool.trim() {
                self.plans.push((plan, 0, 0));
                self.finish_all();
            }
        }
        self.check();
        let stats = self.pool.stats();
        assert_eq!(
            (stats.reserved, stats.mapped, stats.active, stats.chunks),
            (0, 0, 0, 0)
        );
        assert_eq!(stats.shadows, 0);
        assert_eq!(stats.created_total, stats.released_total);
        assert_eq!(self.pool.space.free_total(), 1 << 20, "addresses");
        assert_eq!(self.pool.space.largest_free(), 1 << 20, "addresses in one piece");
        assert_eq!(self.pool.runs.len(), 0);
        assert!(self.card.chunks.is_empty() && self.card.maps.is_empty());
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate {
        size: u64,
        align: u32,
        stream: u64,
    },
    AllocateNew {
        size: u64,
        stream: u64,
    },
    AllocateMapped {
        size: u64,
        stream: u64,
    },
    Free {
        which: usize,
        others: u8,
    },
    Advance(u64),
    Tell(u64),
    Step(usize),
    Finish,
    Release(u64),
    Trim,
    AllDone,
    Mesh(usize),
    Mend,
    Pin(usize),
    Unpin(usize),
    End(u64),
    /// Seconds with so much room pass, in each of which the pool has mapped a lot or nothing.
    Seconds {
        room: u64,
        busy: bool,
    },
    /// A period ends, and what is surplus then goes.
    Tick {
        free: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => 1u64..8, 3 => 1u64..70, 2 => (1u64..9).prop_map(|n| n * GRANULE)];
    prop_oneof![
        10 => (size, 0u32..4, 0u64..3).prop_map(|(size, align, stream)| Op::Allocate { size, align, stream }),
        8 => (0usize..60, 0u8..8).prop_map(|(which, others)| Op::Free { which, others }),
        2 => (0u64..3).prop_map(Op::Advance),
        2 => (0u64..3).prop_map(Op::Tell),
        8 => (0usize..8).prop_map(Op::Step),
        4 => Just(Op::Finish),
        1 => (1u64..100).prop_map(Op::Release),
        1 => Just(Op::Trim),
        1 => Just(Op::AllDone),
        3 => (0usize..4).prop_map(Op::Mesh),
        1 => Just(Op::Mend),
        1 => (0usize..60).prop_map(Op::Pin),
        1 => (0usize..60).prop_map(Op::Unpin),
        1 => (0u64..3).prop_map(Op::End),
        1 => (1u64..40, 0u64..3).prop_map(|(size, stream)| Op::AllocateNew { size, stream }),
        1 => (1u64..40, 0u64..3).prop_map(|(size, stream)| Op::AllocateMapped { size, stream }),
        1 => (prop_oneof![Just(u64::MAX), 0u64..200], any::<bool>()).prop_map(|(room, busy)| Op::Seconds { room, busy }),
        1 => (0u64..300).prop_map(|free| Op::Tick { free }),
    ]
}

fn play(ops: Vec<Op>, config: Config, fails: impl IntoIterator<Item = u64>, at_once: bool) {
    let mut world = World::with(config);
    world.card.fails.extend(fails);
    for op in ops {
        match op {
            Op::Allocate { size, align, stream } => {
                world.begin(size, 1 << align, Stream(stream));
            }
            Op::AllocateNew { size, stream } => world.begin_new(size, Stream(stream)),
            Op::AllocateMapped { size, stream } => world.allocate_mapped(size, Stream(stream)),
            Op::Seconds { room, busy } => world.seconds(room, busy),
            Op::Tick { free } => {
                let marks = Watermarks {
                    low: 200,
                    high: 400,
                    batch: 16,
                };
                let surplus = world.pool.surplus(free, &marks);
                world.pool.tick();
                let plan = world.pool.release(surplus);
                world.plans.extend(plan.map(|plan| (plan, 0, 0)));
            }
            Op::Free { which, others } => {
                if !world.live.is_empty() {
                    let others: Vec<Stream> = (0..3)
                        .filter(|n| others & 4 != 0 && *n != 2 && others >> n & 1 == 1)
                        .map(Stream)
                        .collect();
                    world.free(which % world.live.len(), &others);
                }
            }
            Op::Advance(stream) => world.card.advance(Stream(stream)),
            Op::Tell(stream) => {
                let progress = world.card.progress(Stream(stream));
                world.pool.done(Stream(stream), progress);
            }
            Op::Step(which) => {
                if !world.plans.is_empty() {
                    world.step(which % world.plans.len());
                }
            }
            Op::Finish => world.finish_all(),
            Op::Release(bytes) => {
                if let Some(plan) = world.pool.release(bytes) {
                    world.plans.push((plan, 0, 0));
                }
            }
            Op::Trim => {
                if let Some(plan) = world.pool.trim() {
                    world.plans.push((plan, 0, 0));
                }
            }
            Op::AllDone => {
                for stream in 0..3 {
                    world.card.advance(Stream(stream));
                }
                world.pool.all_done();
            }
            Op::Mesh(which) => _ = world.mesh(which),
            Op::Mend => _ = world.mend(),
            Op::Pin(which) if !world.live.is_empty() => world.pin(which),
            Op::Pin(_) => {}
            Op::Unpin(which) => {
                let at = world.pins.keys().copied().nth(which % world.pins.len().max(1));
                if let Some(at) = at {
                    while world.pool.unpin(at) {}
                    world.pins.remove(&at);
                }
            }
            Op::End(stream) => {
                world.card.end(Stream(stream));
                world.pool.end(Stream(stream));
            }
        }
        if at_once {
            world.finish_all();
        }
        world.check();
    }
    world.end();
}

/// A chunk that a view shows is cut, and each call in turn fails. After a failure between unmapping the chunk's home and
/// unmapping it in the view, the view stayed as it was, over bytes that had no home any more.
#[test]
#[cfg_attr(miri, ignore = "minutes for each call that fails")]
fn a_view_goes_when_what_it_shows_has_lost_its_home() {
    let allocate = |size, align, stream| Op::Allocate { size, align, stream };
    let free = |which| Op::Free { which, others: 0 };
    let scene = [
        allocate(9, 0, 0),
        allocate(1, 0, 0),
        Op::Finish,
        free(0),
        allocate(1, 3, 1),
        allocate(9, 1, 1),
        free(0),
        Op::AllDone,
        allocate(40, 0, 0),
        Op::Step(0),
        Op::Step(0),
        free(0),
        allocate(1, 0, 0),
        Op::Finish,
        Op::Release(1),
        allocate(45, 2, 0),
        free(28),
        allocate(1, 2, 0),
        Op::Finish,
    ];
    for fails in 1..60 {
        play(scene.to_vec(), tiny(500), Some(fails), false);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any operations, with plans of several threads under way at once, their calls interleaved.
    #[test]
    fn no_byte_has_two_owners_and_none_is_lost(ops in prop::collection::vec(op(), 1..120), limit in 40u64..600) {
        play(ops, tiny(limit), None, false);
    }

    /// The same, and some call fails.
    #[test]
    fn a_failed_call_leaves_the_books_exact(ops in prop::collection::vec(op(), 1..60), fails in 1u64..60) {
        play(ops, tiny(500), Some(fails), false);
    }

    /// Any of the calls fail, every third on average.
    #[test]
    fn many_failed_calls_leave_the_books_exact(
        ops in prop::collection::vec(op(), 1..100),
        fails in prop::collection::btree_set(1u64..100, 1..40),
    ) {
        play(ops, tiny(500), fails, false);
    }

    /// Whatever the settings.
    #[test]
    fn any_settings(
        ops in prop::collection::vec(op(), 1..100),
        quantum in 0u32..4,
        divisions in 0u32..4,
        chunk_max in 1u64..9,
        slack_permille in 0u64..500,
        views_max in 0usize..9,
        fails in prop::option::of(1u64..80),
        at_once in any::<bool>(),
    ) {
        let mut config = tiny(600);
        config.quantum = 1 << quantum;
        config.divisions = if divisions == 0 { 0 } else { 1 << divisions };
        config.chunk_max = chunk_max * GRANULE;
        config.slack_permille = slack_permille;
        config.views_max = views_max;
        play(ops, config, fails, at_once);
    }

    /// One thread: every plan is done before the next operation.
    #[test]
    fn one_thread_at_a_time(ops in prop::collection::vec(op(), 1..200), limit in 40u64..400) {
        play(ops, tiny(limit), None, true);
    }
}
