//! Random programs that are like real ones: each is made of a seed, event by event.

use ebb_lab::pool::event::{Event, Op};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

const GRANULE: u64 = 2 << 20;
const KIB: u64 = 1 << 10;

pub(crate) struct Random(Pcg64Mcg);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    pub(crate) fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A program in the making: blocks by the number of their slot.
pub(crate) struct Program {
    events: Vec<Event>,
    empty: Vec<u32>,
    slots: u32,
    now_ns: u64,
    random: Random,
}

impl Program {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            events: Vec::new(),
            empty: Vec::new(),
            slots: 0,
            now_ns: 0,
            random: Random(Pcg64Mcg::seed_from_u64(seed)),
        }
    }

    pub(crate) fn push(&mut self, op: Op) {
        self.now_ns += 5_000 + self.random.below(30_000);
        let at_ns = self.now_ns;
        self.events.push(Event { at_ns, op });
    }

    pub(crate) fn allocate(&mut self, size: u64) -> u32 {
        self.allocate_on(size, 0)
    }

    pub(crate) fn allocate_on(&mut self, size: u64, stream: u32) -> u32 {
        let slot = self.empty.pop().unwrap_or_else(|| {
            self.slots += 1;
            self.slots - 1
        });
        let size = size.max(1);
        self.push(Op::Allocate { slot, size, stream });
        slot
    }

    pub(crate) fn free(&mut self, slot: u32) {
        self.free_on(slot, 0);
    }

    pub(crate) fn free_on(&mut self, slot: u32, stream: u32) {
        self.empty.push(slot);
        self.push(Op::Free { slot, stream });
    }

    pub(crate) fn free_all(&mut self, slots: impl IntoIterator<Item = u32>) {
        slots.into_iter().for_each(|slot| self.free(slot));
    }
}

/// Training of a transformer: weights, forward with activations that are kept, backward that frees them and makes gradients, an
/// update. Sizes, precision, sequence lengths, recomputation and how gradients are kept are random.
pub(crate) fn training(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed);
    let random = &mut program.random;
    let layers = 2 + random.below(16);
    let hidden = random.of(&[256, 384, 512, 768, 1024, 1536]);
    let vocabulary = random.of(&[1_000, 10_000, 32_000]);
    let (weight, activation) = random.of(&[(4, 4), (4, 2), (2, 2)]);
    let heads = hidden / 64;
    let batch = 1 + random.below(8);
    let longest = random.of(&[128, 256, 512]);
    let (varies, recomputes, keeps_gradients, casts) = (
        random.one_in(2),
        random.one_in(3),
        random.one_in(2),
        random.one_in(2) && weight == 4 && activation == 2,
    );
    let shapes = [
        3 * hidden * hidden,
        hidden * hidden,
        4 * hidden * hidden,
        4 * hidden * hidden,
        hidden,
        hidden,
        4 * hidden,
    ];
    let mut weights: Vec<u64> = vec![vocabulary * hidden * weight];
    for _ in 0..layers {
        weights.extend(shapes.iter().map(|n| n * weight));
    }
    let mut held: Vec<u32> = weights.iter().map(|&size| program.allocate(size)).collect();
    // Moments of the update, made in the first step.
    let mut moments = Vec::new();
    let mut gradients: Vec<u32> = Vec::new();
    for step in 0..2 + seed % 4 {
        let length = if varies {
            1 + program.random.below(longest)
        } else {
            longest
        };
        let tokens = batch * length;
        let mut kept: Vec<Vec<u32>> = Vec::new();
        let input = program.allocate(tokens * 8);
        for _ in 0..layers {
            let mut copies = Vec::new();
            if casts {
                copies = shapes.map(|n| program.allocate(n * activation)).to_vec();
            }
            let all = [
                tokens * hidden * activation,
                3 * tokens * hidden * activation,
                batch * heads * length * length * activation,
                batch * heads * length * length * activation,
                tokens * hidden * activation,
                tokens * 4 * hidden * activation,
                tokens * 4 * hidden * activation,
                tokens * 4,
                tokens * hidden * activation,
            ];
            let mut mine = Vec::new();
            for size in all {
                let scratch = program.allocate(size / 2 + 512);
                mine.push(program.allocate(size));
                program.free(scratch);
            }
            if recomputes {
                let last = mine.pop();
                program.free_all(mine.drain(..));
                mine.extend(last);
            }
            program.free_all(copies);
            kept.push(mine);
        }
        let logits = program.allocate(tokens * vocabulary * 4);
        let loss = program.allocate(4);
        let mut upstream = program.allocate(tokens * vocabulary * 4);
        let first = gradients.is_empty();
        let mut made = Vec::new();
        for mine in kept.into_iter().rev() {
            let mut again = Vec::new();
            if recomputes {
                again = (0..6)
                    .map(|n| program.allocate(tokens * hidden * activation * (1 + n % 4)))
                    .collect();
            }
            let next = program.allocate(tokens * hidden * activation);
            program.free(upstream);
            upstream = next;
            for slot in mine.into_iter().rev() {
                let scratch = program.allocate(tokens * hidden * activation);
                program.free(slot);
                program.free(scratch);
            }
            program.free_all(again);
            for size in shapes {
                let gradient = program.allocate(size * weight);
                if first {
                    made.push(gradient);
                } else {
                    program.free(gradient);
                }
            }
        }
        gradients.append(&mut made);
        program.free_all([upstream, logits, loss, input]);
        if step == 0 {
            for &size in weights.iter().chain(&weights) {
                moments.push(program.allocate(size * 4 / weight));
            }
        }
        // The update goes over the weights in groups.
        for group in weights.chunks(5) {
            let scratch: Vec<u32> = group.iter().map(|&size| program.allocate(size)).collect();
            program.free_all(scratch);
        }
        if !keeps_gradients {
            program.free_all(std::mem::take(&mut gradients));
        }
    }
    held.append(&mut moments);
    program.events
}

/// Serving: weights, a cache in blocks, and requests of random lengths whose tensors come and go.
pub(crate) fn serving(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed ^ 0x5e12);
    for _ in 0..20 + program.random.below(100) {
        let size = (1 + program.random.below(64)) * 256 * KIB;
        program.allocate(size);
    }
    let mut live: Vec<u32> = Vec::new();
    for _ in 0..1500 {
        let most = 4 + program.random.below(60) as usize;
        if live.len() < most {
            let size = match program.random.below(4) {
                0 => 1 + program.random.below(64 * KIB),
                1 => (1 + program.random.below(16)) * 512 * KIB,
                2 => 1 + program.random.below(4096 * KIB),
                _ => 1 + program.random.below(40_000 * KIB),
            };
            live.push(program.allocate(size));
        } else {
            let which = program.random.below(live.len() as u64) as usize;
            let slot = live.swap_remove(which);
            program.free(slot);
        }
    }
    program.events
}

/// Lifetimes of buffers of whole granules, as static planning has them.
pub(crate) fn lifetimes(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed ^ 0x1f3);
    let most = program.random.of(&[3, 30, 300, 10_000]);
    let mut ends: Vec<(u64, u32)> = Vec::new();
    for now in 0..50 + program.random.below(500) {
        ends.sort_unstable();
        let due = ends.partition_point(|end| end.0 <= now);
        let due: Vec<(u64, u32)> = ends.drain(..due).collect();
        program.free_all(due.into_iter().map(|end| end.1));
        for _ in 0..program.random.below(4) {
            let size = (1 + program.random.below(most)) * GRANULE;
            let length = 1 + program.random.of(&[2, 20, 200]) * (1 + program.random.below(3)) / 2;
            ends.push((now + length, program.allocate(size)));
        }
    }
    program.events
}

/// Many small blocks, of which few stay, everywhere; a pause; then large ones instead.
pub(crate) fn scattered(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed ^ 0xad5);
    let size = program.random.of(&[8, 16, 64, 200]) * KIB;
    let keeps = program.random.of(&[8, 16, 32, 64]);
    let small: Vec<u32> = (0..(512 << 20) / size).map(|_| program.allocate(size)).collect();
    let (mut kept, mut freed) = (0, Vec::new());
    for slot in small {
        if program.random.one_in(keeps) {
            kept += size;
        } else {
            freed.push(slot);
        }
    }
    program.free_all(freed);
    program.now_ns += 1_000_000_000;
    let mut left = (512 << 20) - kept;
    while left > 32 << 20 {
        let size = (1 + program.random.below(16)) << 20;
        program.allocate(size);
        left -= size;
    }
    program.events
}

/// Generation with caches that grow by concatenation: in every step each layer of each sequence gets a longer cache, into which the old
/// one is copied. Sequences come and end at random.
pub(crate) fn growing_caches(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed ^ 0xcac4e);
    let random = &mut program.random;
    let layers = 2 + random.below(10);
    let width = random.of(&[128, 512, 1024, 2048]) * 2;
    let hidden = random.of(&[512, 1024, 2048]);
    let most = 1 + random.below(6) as usize;
    let prompt = random.of(&[64, 512, 2048]);
    for _ in 0..layers {
        for size in [4 * hidden * hidden * 2, hidden * hidden * 2, hidden * 2] {
            program.allocate(size);
        }
    }
    // Tokens, tokens to come, and a cache per layer.
    let mut sequences: Vec<(u64, u64, Vec<u32>)> = Vec::new();
    for _ in 0..60 + program.random.below(60) {
        if sequences.len() < most && program.random.one_in(3) {
            let tokens = 1 + program.random.below(prompt);
            let caches = (0..layers)
                .map(|_| {
                    let scratch = program.allocate(tokens * hidden * 4);
                    let cache = program.allocate(tokens * width);
                    program.free(scratch);
                    cache
                })
                .collect();
            sequences.push((tokens, 1 + program.random.below(80), caches));
        }
        for (tokens, left, caches) in &mut sequences {
            *tokens += 1;
            *left -= 1;
            for cache in caches {
                let (query, longer) = (program.allocate(hidden * 2), program.allocate(*tokens * width));
                program.free(std::mem::replace(cache, longer));
                let scores = program.allocate(*tokens * 64);
                program.free_all([scores, query]);
            }
        }
        let (ended, on): (Vec<_>, Vec<_>) = sequences.into_iter().partition(|one| one.1 == 0);
        sequences = on;
        for (_, _, caches) in ended {
            program.free_all(caches);
        }
    }
    program.events
}

/// A network of convolutions on pictures of sizes that change from step to step, trained: activations by stage, a workspace for each.
pub(crate) fn pictures(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed ^ 0x91c);
    let random = &mut program.random;
    let channels = random.of(&[16, 32, 64]);
    let blocks = 1 + random.below(4);
    let batch = 1 + random.below(16);
    let mut weights = Vec::new();
    for stage in 0..4 {
        for _ in 0..2 * blocks {
            let wide = channels << stage;
            weights.extend([9 * wide * wide * 4, wide * 4, wide * 4]);
        }
    }
    for &size in weights.iter().chain(&weights) {
        program.allocate(size);
    }
    let side = random_side(&mut program);
    for _ in 0..4 + seed % 5 {
        let (height, width) = if seed.is_multiple_of(3) {
            (side, side)
        } else {
            (random_side(&mut program), random_side(&mut program))
        };
        let input = program.allocate(batch * 3 * height * width * 4);
        let mut kept = Vec::new();
        for stage in 0..4 {
            let plane = (height >> (stage + 1)) * (width >> (stage + 1));
            for _ in 0..2 * blocks {
                let size = batch * (channels << stage) * plane * 4;
                let workspace = program.allocate(size * 9 / 4);
                let output = program.allocate(size);
                program.free(workspace);
                let mask = program.allocate(size / 8);
                kept.push((output, mask, size));
            }
        }
        let mut gradients = Vec::new();
        for (output, mask, size) in kept.into_iter().rev() {
            let upstream = program.allocate(size);
            let workspace = program.allocate(size * 3 / 2);
            gradients.push(program.allocate(weights[gradients.len() % weights.len()]));
            program.free_all([workspace, output, mask, upstream]);
        }
        program.free_all(gradients);
        program.free(input);
    }
    program.events
}

fn random_side(program: &mut Program) -> u64 {
    32 * (3 + program.random.below(18))
}

/// Experts: each step sends each of them a random number of tokens, mostly few and now and then nearly all.
pub(crate) fn experts(seed: u64) -> Vec<Event> {
    let mut program = Program::new(seed ^ 0xe8e);
    let random = &mut program.random;
    let layers = 2 + random.below(6);
    let count = random.of(&[4, 8, 16]);
    let hidden = random.of(&[256, 512, 1024]);
    let tokens = random.of(&[512, 2048, 8192]);
    for _ in 0..layers * count {
        program.allocate(4 * hidden * hidden * 2);
        program.allocate(4 * hidden * hidden * 2);
    }
    for _ in 0..8 + seed % 8 {
        let mut kept = Vec::new();
        for _ in 0..layers {
            kept.push(program.allocate(tokens * hidden * 2));
            let mut left = tokens * 2;
            for _ in 0..count {
                let spike = program.random.one_in(12);
                let most = if spike { left } else { left.min(4 * tokens / count) };
                let mine = program.random.below(most + 1);
                left -= mine;
                let dispatched = program.allocate(mine * hidden * 2);
                let inner = program.allocate(mine * 4 * hidden * 2);
                kept.push(program.allocate(mine * hidden * 2));
                program.free(dispatched);
                if program.random.one_in(2) {
                    program.free(inner);
                } else {
                    kept.push(inner);
                }
            }
        }
        while let Some(slot) = kept.pop() {
            let size = 1 + program.random.below(tokens * hidden * 2);
            let scratch = program.allocate(size);
            program.free(slot);
            program.free(scratch);
        }
    }
    program.events
}

/// Training on three streams: computing, gathering weights of the next layers ahead of time, and reducing gradients in buckets behind.
pub(crate) fn sharded(seed: u64) -> Vec<Event> {
    const COMPUTE: u32 = 0;
    const GATHER: u32 = 1;
    const REDUCE: u32 = 2;
    let mut program = Program::new(seed ^ 0xf5d);
    let random = &mut program.random;
    let layers = 4 + random.below(12) as usize;
    let hidden = random.of(&[256, 512, 768, 1024]);
    let ranks = random.of(&[2, 4, 8]);
    let tokens = 1 + random.below(4096);
    let varies = random.one_in(2);
    let full = 12 * hidden * hidden * 2;
    for _ in 0..layers {
        program.allocate(full / ranks);
        program.allocate(full * 2 / ranks);
        program.allocate(full * 2 / ranks);
    }
    for _ in 0..3 + seed % 4 {
        let tokens = if varies {
            1 + program.random.below(tokens)
        } else {
            tokens
        };
        let mut ahead: Vec<u32> = (0..2).map(|_| program.allocate_on(full, GATHER)).collect();
        let mut kept = Vec::new();
        for layer in 0..layers {
            if layer + 2 < layers {
                ahead.push(program.allocate_on(full, GATHER));
            }
            let gathered = ahead.remove(0);
            let scratch = program.allocate_on(tokens * hidden * 8, COMPUTE);
            kept.push(program.allocate_on(tokens * hidden * 2, COMPUTE));
            kept.push(program.allocate_on(tokens * hidden * 8, COMPUTE));
            program.free_on(scratch, COMPUTE);
            program.free_on(gathered, GATHER);
        }
        let mut bucket = Vec::new();
        for layer in 0..layers {
            let gathered = program.allocate_on(full, GATHER);
            let upstream = program.allocate_on(tokens * hidden * 2, COMPUTE);
            for slot in kept.split_off(kept.len() - 2) {
                program.free_on(slot, COMPUTE);
            }
            bucket.push(program.allocate_on(full, COMPUTE));
            program.free_on(upstream, COMPUTE);
            program.free_on(gathered, GATHER);
            if layer % 3 == 2 || layer + 1 == layers {
                let whole = program.allocate_on(full * bucket.len() as u64, REDUCE);
                for slot in bucket.drain(..) {
                    program.free_on(slot, REDUCE);
                }
                program.free_on(whole, REDUCE);
            }
        }
        program.push(Op::Synchronize);
    }
    program.events
}
