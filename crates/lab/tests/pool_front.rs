//! Loops through [`Front`], which threads share: after a few rounds nothing is mapped any more, whoever allocates and frees.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use ebb_alloc::front::{Driver, Front, Keep};
use ebb_alloc::pool::{Call, Config, Mark, Stream};

const MIB: u64 = 1 << 20;
const S: Stream = Stream(0);

/// A driver that counts; work is done a while after it was handed over.
#[derive(Debug, Default)]
struct Count {
    marks: AtomicU64,
    maps: AtomicU64,
    reserved: AtomicU64,
}

impl Driver for Count {
    type Error = ();

    fn call(&self, call: &Call) -> Result<(), ()> {
        if let Call::Map { .. } = call {
            self.maps.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn mark(&self, _stream: Stream) -> Mark {
        Mark(self.marks.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn done(&self, _stream: Stream) -> Mark {
        Mark(self.marks.load(Ordering::Relaxed).saturating_sub(7))
    }

    fn reserve(&self, bytes: u64) -> Result<(u64, u64), ()> {
        let number = self.reserved.fetch_add(1, Ordering::Relaxed);
        Ok(((1 << 40) + (number << 37), bytes.max(1 << 36)))
    }
}

/// What the second thread is to do, in the order in which it is told.
enum Do {
    Allocate(u64),
    Free(u64),
}

struct Threads<'a> {
    to: mpsc::Sender<Do>,
    from: mpsc::Receiver<u64>,
    front: &'a Front<Count>,
    live: u64,
    peak: u64,
    sizes: HashMap<u64, u64>,
}

impl Threads<'_> {
    fn allocate(&mut self, thread: usize, size: u64) -> u64 {
        let at = if thread == 0 {
            self.front.allocate(size, S).unwrap()
        } else {
            self.to.send(Do::Allocate(size)).unwrap();
            self.from.recv().unwrap()
        };
        let len = size.div_ceil(512) * 512;
        self.live += len;
        self.peak = self.peak.max(self.live);
        self.sizes.insert(at, len);
        at
    }

    fn free(&mut self, thread: usize, at: u64) {
        if thread == 0 {
            self.front.free(at, S, &[]).unwrap();
        } else {
            self.to.send(Do::Free(at)).unwrap();
            self.from.recv().unwrap();
        }
        self.live -= self.sizes.remove(&at).unwrap();
    }
}

/// A step of a transformer as PyTorch trains it in mixed precision: forward on thread 0, backward on thread 1, update on 0.
#[derive(Default)]
struct Training {
    weights: Vec<(u64, u64)>,
    moments: Vec<u64>,
    gradients: Vec<u64>,
}

const LAYERS: u64 = 8;
const WIDTH: u64 = 1024;
const HEADS: u64 = 16;
const BATCH: u64 = 16;
const VOCABULARY: u64 = 4096;

impl Training {
    fn start(on: &mut Threads<'_>) -> Self {
        let mut this = Self::default();
        let mut sizes = vec![VOCABULARY * WIDTH, 512 * WIDTH];
        for _ in 0..LAYERS {
            sizes.extend([WIDTH, WIDTH, 3 * WIDTH * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH]);
            sizes.extend([
                WIDTH,
                WIDTH,
                4 * WIDTH * WIDTH,
                4 * WIDTH,
                4 * WIDTH * WIDTH,
                WIDTH,
            ]);
        }
        for size in sizes {
            this.weights.push((on.allocate(0, 4 * size), 4 * size));
        }
        this
    }

    fn step(&mut self, on: &mut Threads<'_>, length: u64) {
        let tokens = BATCH * length;
        let mut kept = Vec::new();
        let mut casts = Vec::new();
        let mut x = on.allocate(0, tokens * WIDTH * 4);
        for _ in 0..LAYERS {
            let mut cast = |on: &mut Threads<'_>, n: u64| casts.push(on.allocate(0, 2 * n));
            kept.extend([on.allocate(0, 4 * tokens), on.allocate(0, 4 * tokens)]);
            let normed = on.allocate(0, tokens * WIDTH * 4);
            let low = on.allocate(0, tokens * WIDTH * 2);
            on.free(0, normed);
            cast(on, 3 * WIDTH * WIDTH);
            cast(on, 3 * WIDTH);
            let qkv = on.allocate(0, 3 * tokens * WIDTH * 2);
            let attended = on.allocate(0, tokens * WIDTH * 2);
            kept.extend([
                low,
                qkv,
                on.allocate(0, 4 * BATCH * HEADS * length),
                on.allocate(0, 16),
            ]);
            cast(on, WIDTH * WIDTH);
            cast(on, WIDTH);
            let out = on.allocate(0, tokens * WIDTH * 2);
            kept.push(attended);
            let sum = on.allocate(0, tokens * WIDTH * 4);
            on.free(0, out);
            kept.push(std::mem::replace(&mut x, sum));
            kept.extend([on.allocate(0, 4 * tokens), on.allocate(0, 4 * tokens)]);
            let normed = on.allocate(0, tokens * WIDTH * 4);
            let low = on.allocate(0, tokens * WIDTH * 2);
            on.free(0, normed);
            cast(on, 4 * WIDTH * WIDTH);
            cast(on, 4 * WIDTH);
            let up = on.allocate(0, 4 * tokens * WIDTH * 2);
            let active = on.allocate(0, 4 * tokens * WIDTH * 2);
            cast(on, 4 * WIDTH * WIDTH);
            cast(on, WIDTH);
            let down = on.allocate(0, tokens * WIDTH * 2);
            kept.extend([low, up, active]);
            let sum = on.allocate(0, tokens * WIDTH * 4);
            on.free(0, down);
            kept.push(std::mem::replace(&mut x, sum));
        }
        let logits = on.allocate(0, tokens * VOCABULARY * 2);
        let single = on.allocate(0, tokens * VOCABULARY * 4);
        let logs = on.allocate(0, tokens * VOCABULARY * 4);
        let loss = on.allocate(0, 4);
        kept.extend([logits, logs, x]);
        on.free(0, single);
        for at in self.gradients.drain(..) {
            on.free(0, at);
        }
        // Backward, on the other thread.
        let mut grad = on.allocate(1, tokens * VOCABULARY * 4);
        let mut sizes: Vec<u64> = self.weights.iter().map(|w| w.1).collect();
        let per = kept.len() / LAYERS as usize;
        while let Some(at) = kept.pop() {
            let scratch = on.allocate(1, tokens * WIDTH * 2);
            let next = on.allocate(1, tokens * WIDTH * 4);
            on.free(1, grad);
            grad = next;
            on.free(1, at);
            if kept.len() % per < 6 {
                for _ in 0..2 {
                    if let Some(size) = sizes.pop() {
                        let low = on.allocate(1, size / 2);
                        self.gradients.push(on.allocate(1, size));
                        on.free(1, low);
                    }
                }
            }
            on.free(1, scratch);
        }
        for size in sizes {
            self.gradients.push(on.allocate(1, size));
        }
        on.free(1, grad);
        for at in casts {
            on.free(0, at);
        }
        on.free(0, loss);
        if self.moments.is_empty() {
            for (_, size) in self.weights.clone() {
                self.moments.extend([on.allocate(0, size), on.allocate(0, size)]);
            }
        }
        let roots: Vec<u64> = self.weights.iter().map(|w| on.allocate(0, w.1)).collect();
        for at in roots {
            on.free(0, at);
        }
    }
}

fn with(keep: Keep, work: impl FnOnce(&mut Threads<'_>)) {
    let mut config = Config::for_granule(2 * MIB);
    config.limit = u64::MAX;
    let front = Front::new(config, keep, Count::default());
    std::thread::scope(|scope| {
        let (answer, from) = mpsc::channel();
        let (to, told) = mpsc::channel::<Do>();
        scope.spawn({
            let front = &front;
            move || {
                for what in told {
                    let at = match what {
                        Do::Allocate(size) => front.allocate(size, S).unwrap(),
                        Do::Free(at) => {
                            front.free(at, S, &[]).unwrap();
                            0
                        }
                    };
                    answer.send(at).unwrap();
                }
            }
        });
        let mut threads = Threads {
            to,
            from,
            front: &front,
            live: 0,
            peak: 0,
            sizes: HashMap::new(),
        };
        work(&mut threads);
        threads.front.check().unwrap();
    });
}

/// Mappings of each of so many steps, the most bytes that were live, and the physical ones.
fn steps(count: usize, keep: Keep, seconds: bool) -> (Vec<u64>, u64, u64) {
    let mut result = None;
    with(keep, |on| {
        let mut training = Training::start(on);
        let maps = |on: &Threads<'_>| on.front.driver().maps.load(Ordering::Relaxed);
        let mut made = Vec::new();
        for _ in 0..count {
            let before = maps(on);
            training.step(on, 384);
            made.push(maps(on) - before);
            if seconds {
                on.front.second(u64::MAX);
            }
        }
        result = Some((made, on.peak, on.front.stats().pool.reserved));
    });
    result.unwrap()
}

/// Gradients stay from one step to the next, wherever they were put: so no step begins as the one before. Without a byte to spare that is mapped
/// anew in every step.
#[test]
fn a_training_loop_on_two_threads_maps_nothing_in_the_end() {
    for keep in [
        Keep {
            bytes: 0,
            block: 0,
            shards: 2,
        },
        Keep::default(),
    ] {
        let (maps, peak, reserved) = steps(60, keep, true);
        assert!(maps[0] > 500, "{maps:?}");
        assert_eq!(maps[50..], [0; 10], "{keep:?}: {maps:?}");
        assert!(reserved <= peak + peak / 8, "{keep:?}: {reserved} for {peak}");
    }
}

#[test]
fn a_pool_that_may_not_grow_for_it_keeps_to_what_is_live() {
    let (maps, peak, reserved) = steps(
        20,
        Keep {
            bytes: 0,
            block: 0,
            shards: 2,
        },
        false,
    );
    assert!(reserved <= peak + peak / 100, "{reserved} for {peak}: {maps:?}");
}

/// What PyTorch asked for on an H200 while it trained a transformer of 8 layers (`scripts/gpu`, work `train`), from its start, and one step of it that is repeated
/// here: `ha` and `hf` allocate and free on the way there, `m` is a block that the step before has left, `a`, `f` and `p` allocate, and free
/// a block of this step or of the one before. One thread: PyTorch's second one computes while the first one waits.
#[test]
fn a_recorded_training_maps_nothing_after_some_seconds() {
    use std::io::Read;

    let mut text = String::new();
    let file = std::fs::File::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/recorded/pytorch-train.txt.gz"
    ))
    .unwrap();
    flate2::read::GzDecoder::new(file)
        .read_to_string(&mut text)
        .unwrap();
    with(Keep::default(), |on| {
        let (mut live, mut before): (HashMap<u64, u64>, HashMap<u64, u64>) = (HashMap::new(), HashMap::new());
        let mut step = Vec::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let (block, size): (u64, u64) = (words[1].parse().unwrap(), words[2].parse().unwrap());
            match words[0] {
                "ha" => drop(live.insert(block, on.allocate(0, size))),
                "hf" => on.free(0, live.remove(&block).unwrap()),
                "m" => drop(before.insert(size, live.remove(&block).unwrap())),
                what => step.push((what, block, size)),
            }
        }
        assert_eq!(step.len(), 1888);
        let mut mapped = Vec::new();
        for _second in 0..14 {
            let maps = on.front.driver().maps.load(Ordering::Relaxed);
            for _ in 0..25 {
                let mut now = HashMap::new();
                for &(what, block, size) in &step {
                    match what {
                        "a" => drop(now.insert(block, on.allocate(0, size))),
                        "f" => on.free(0, now.remove(&block).unwrap()),
                        _ => on.free(0, before.remove(&block).unwrap()),
                    }
                }
                assert!(before.is_empty(), "the step before has left what this one frees");
                before = now;
            }
            mapped.push(on.front.driver().maps.load(Ordering::Relaxed) - maps);
            on.front.second(u64::MAX);
        }
        assert!(mapped[1] > 1000, "{mapped:?}");
        assert_eq!(mapped[10..], [0; 4], "{mapped:?}");
        let stats = on.front.stats().pool;
        assert!(
            stats.reserved <= on.peak + on.peak / 8,
            "{} for {}",
            stats.reserved,
            on.peak
        );
    });
}
