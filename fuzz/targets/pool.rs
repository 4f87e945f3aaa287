//! Any operations of the pool, with plans of several threads under way and calls that fail: its own check holds after each, no two
//! blocks share a byte, and at the end nothing is left.

#![no_main]

use std::collections::BTreeMap;

use ebb_alloc::pool::{Backing, Call, Config, Finished, Mark, Plan, Pool, Request, Step, Stream};
use libfuzzer_sys::fuzz_target;

/// Where each chunk is mapped; a call at odds with that is a fault.
#[derive(Default)]
struct Card {
    chunks: BTreeMap<u64, u64>,
    maps: BTreeMap<u64, (u64, u64)>,
    fails: bool,
}

impl Backing for Card {
    type Error = ();

    fn call(&mut self, call: &Call) -> Result<(), ()> {
        if std::mem::take(&mut self.fails) {
            return Err(());
        }
        match *call {
            Call::Wait { .. } => {}
            Call::Create { chunk, len } => assert!(self.chunks.insert(chunk.0, len).is_none()),
            Call::Map { chunk, at, len } => {
                assert_eq!(self.chunks.get(&chunk.0), Some(&len));
                let before = self.maps.range(..at + len).next_back();
                assert!(before.is_none_or(|(other, (_, n))| other + n <= at));
                self.maps.insert(at, (chunk.0, len));
            }
            Call::Unmap { chunk, at, len } => assert_eq!(self.maps.remove(&at), Some((chunk.0, len))),
            Call::Copy {
                from,
                to,
                offset,
                source,
                target,
                len,
            } => {
                assert!(len > 0 && offset + len <= 16);
                assert_eq!(self.maps.get(&(source - offset)), Some(&(from.0, 16)));
                assert_eq!(self.maps.get(&(target - offset)), Some(&(to.0, 16)));
            }
            Call::Release { chunk, len } => {
                assert!(self.maps.values().all(|(id, _)| *id != chunk.0));
                assert_eq!(self.chunks.remove(&chunk.0), Some(len));
            }
        }
        Ok(())
    }
}

struct World {
    pool: Pool,
    card: Card,
    live: BTreeMap<u64, u64>,
    plans: Vec<Plan>,
    marks: u64,
}

impl World {
    fn enter(&mut self, at: u64) {
        let block = self.pool.find(at).expect("it lives");
        let before = self.live.range(..at + block.len).next_back();
        assert!(before.is_none_or(|(other, n)| other + n <= at), "two blocks at {at:#x}");
        self.live.insert(at, block.len);
    }

    fn allocate(&mut self, size: u64, stream: Stream) {
        let mut request = Request {
            size,
            align: 1,
            stream,
            asked: false,
        };
        for _ in 0..4 {
            match self.pool.allocate(request) {
                Step::Ready(at) => return self.enter(at),
                Step::Run(plan) => return self.plans.push(*plan),
                Step::Ask(streams) => {
                    for stream in streams {
                        self.pool.done(stream, Mark(self.marks / 2));
                    }
                    request.asked = true;
                }
                Step::Wait(works) => {
                    for (stream, mark) in works {
                        self.pool.done(stream, mark);
                    }
                }
                Step::NoRoom(_) | Step::Addresses(_) => return,
            }
        }
    }

    fn finish(&mut self, index: usize, fails: bool) {
        let plan = self.plans.swap_remove(index);
        // If one fails, it is the one in the middle.
        let mut done = 0;
        for call in plan.calls() {
            self.card.fails = fails && done == plan.calls().len() / 2;
            if self.card.call(call).is_err() {
                break;
            }
            done += 1;
        }
        if let Finished::Block(at) = self.pool.finish(plan, done) {
            self.enter(at);
        }
    }

    fn free(&mut self, which: usize, stream: Stream, others: &[(Stream, Mark)]) {
        let at = self.live.keys().copied().nth(which % self.live.len().max(1));
        if let Some(at) = at {
            self.live.remove(&at);
            self.marks += 1;
            self.pool.free(at, stream, Mark(self.marks), others).expect("it lives");
            assert!(self.pool.free(at, stream, Mark(self.marks), &[]).is_err());
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut config = Config::for_granule(16);
    config.quantum = 1;
    config.chunk_max = 64;
    config.views_max = 4;
    config.limit = 1024;
    let mut pool = Pool::new(config);
    assert!(pool.add_range(1 << 20, 1 << 16));
    let mut world = World {
        pool,
        card: Card::default(),
        live: BTreeMap::new(),
        plans: Vec::new(),
        marks: 0,
    };
    for op in data.chunks_exact(3) {
        let (stream, value) = (Stream(u64::from(op[0] >> 6)), u64::from(op[1]));
        match op[0] % 8 {
            0..=2 => world.allocate(1 + value, stream),
            3 | 4 => {
                let others = [(Stream(u64::from(op[2] & 3)), Mark(world.marks + 1))];
                world.free(usize::from(op[1]), stream, &others[..usize::from(op[2] >> 7)]);
            }
            5 if !world.plans.is_empty() => {
                let index = usize::from(op[1]) % world.plans.len();
                world.finish(index, op[2] & 3 == 0);
            }
            6 => {
                if let Some(plan) = world.pool.release(value) {
                    world.plans.push(plan);
                }
            }
            7 if op[2] & 7 == 0 => world.pool.all_done(),
            7 if op[2] & 7 == 1 => {
                let plan = world.pool.meshable().first().and_then(|pair| world.pool.mesh(*pair));
                world.plans.extend(plan);
            }
            7 if op[2] & 7 == 2 => world.plans.extend(world.pool.mend()),
            7 if op[2] & 7 == 3 => {
                if let Some(at) = world.live.keys().copied().nth(usize::from(op[1])) {
                    _ = world.pool.pin(at);
                }
            }
            7 if op[2] & 7 == 4 => world.pool.end(stream),
            _ => world.pool.done(stream, Mark(world.marks)),
        }
        world.pool.check().expect("the pool's invariants hold");
    }
    world.plans.extend(world.pool.mend());
    while !world.plans.is_empty() {
        world.finish(0, false);
        world.plans.extend(world.pool.mend());
    }
    assert!(!world.pool.torn());
    while !world.live.is_empty() {
        world.free(0, Stream(0), &[]);
    }
    for _ in 0..2 {
        world.pool.all_done();
        if let Some(plan) = world.pool.trim() {
            world.plans.push(plan);
            world.finish(0, false);
        }
    }
    world.pool.check().expect("the pool's invariants hold");
    assert_eq!((world.pool.physical().0, world.card.maps.len()), (0, 0));
});
