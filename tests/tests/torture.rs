//! Ten processes that allocate, plainly and in stream order, map memory by themselves, free, launch, copy, idle, fork and die at
//! random on two cards that hold a third of what they want. `EBB_SEED` repeats a run, `EBB_TORTURE_SECONDS` (60) makes it longer.

use std::time::{Duration, Instant};

use ebb_tests::{Options, Program, Reply, Stage, seed};
use ebb_units::Bytes;
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::Rng;

/// Memory of a program: name, bytes, what is in it.
struct Block {
    name: String,
    size: u64,
    value: u64,
    by_copy: bool,
    kind: Kind,
}

/// Where a block comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    /// Mapped by the program itself.
    Mapped,
    /// In stream order.
    Ordered,
}

/// One program and what its memory must hold.
struct Actor {
    program: Program,
    blocks: Vec<Block>,
    next: u64,
}

const CARD: u64 = 192 << 20;

fn pick(rng: &mut Pcg64Mcg, n: u64) -> u64 {
    rng.next_u64() % n
}

impl Actor {
    fn start(stage: &Stage, card: u64) -> Self {
        let mut program = stage.run(&["--idle-release", "300ms"]);
        program.ok(&format!("open {card}"));
        Self {
            program,
            blocks: Vec::new(),
            next: 0,
        }
    }

    fn held(&self) -> u64 {
        self.blocks.iter().map(|block| block.size).sum()
    }

    /// One random step; everything that is read back must be right.
    fn step(&mut self, rng: &mut Pcg64Mcg) {
        let share = CARD * 3 / 5; // five of these want three times their card
        match pick(rng, 10) {
            0..=2 => {
                let words = if pick(rng, 3) == 0 { 4096 } else { 6 << 18 };
                let size = 4 * (1 + pick(rng, words));
                if self.held() + size <= share {
                    let name = format!("m{}", self.next);
                    let value = rng.next_u64() % 1_000_000;
                    self.next += 1;
                    let (kind, alloc) = [
                        (Kind::Plain, "alloc"),
                        (Kind::Mapped, "mapalloc"),
                        (Kind::Ordered, "asyncalloc"),
                    ][usize::try_from(pick(rng, 3)).unwrap()];
                    match self.program.say(&format!("{alloc} {name} {size}")) {
                        Reply::Ok(_) => {
                            let by_copy = size < 1 << 20 && pick(rng, 2) == 0;
                            let verb = if by_copy { "write" } else { "fill" };
                            self.program.ok(&format!("{verb} {name} {value}"));
                            self.blocks.push(Block {
                                name,
                                size: if kind == Kind::Mapped {
                                    size.next_multiple_of(2 << 20)
                                } else {
                                    size
                                },
                                value,
                                by_copy,
                                kind,
                            });
                        }
                        Reply::Err(code) => {
                            panic!("an allocation that waiting would have served failed with {code}")
                        }
                    }
                }
            }
            3 if !self.blocks.is_empty() => {
                let at = usize::try_from(pick(rng, self.blocks.len() as u64)).unwrap();
                let block = self.blocks.swap_remove(at);
                let free = match block.kind {
                    Kind::Plain => "free",
                    Kind::Mapped => "mapfree",
                    Kind::Ordered => "asyncfree",
                };
                self.program.ok(&format!("{free} {}", block.name));
            }
            4..=7 if !self.blocks.is_empty() => {
                let at = usize::try_from(pick(rng, self.blocks.len() as u64)).unwrap();
                let Block {
                    name,
                    size,
                    value,
                    by_copy,
                    ..
                } = &self.blocks[at];
                let verb = if *by_copy { "read" } else { "check" };
                let wrong = self.program.ok(&format!("{verb} {name} {value}"))[0];
                assert_eq!(
                    wrong,
                    0,
                    "{name} of {size} bytes changed (pid {})",
                    self.program.pid()
                );
            }
            8 => {
                self.program.ok("info");
            }
            9 if pick(rng, 4) == 0 => {
                self.program.ok("fork");
            }
            _ => {}
        }
    }
}

#[test]
fn ten_programs_on_a_third_of_the_memory_they_want() {
    let seconds = std::env::var("EBB_TORTURE_SECONDS")
        .ok()
        .and_then(|t| t.parse().ok())
        .unwrap_or(60);
    let seed = seed();
    let mut rng = Pcg64Mcg::new(u128::from(seed) | 1);
    let stage = Stage::new(Options {
        card: Bytes(CARD),
        devices: 2,
        context: Bytes::mib(2),
        config: "[policy]\nmin_turn = \"50ms\"\nidle_after = \"100ms\"\n".into(),
        ..Options::default()
    });
    let stage = &stage;
    let seeds: Vec<u64> = (0..10).map(|_| rng.next_u64()).collect();
    let end = Instant::now() + Duration::from_secs(seconds);
    std::thread::scope(|scope| {
        for (card, actor_seed) in [0, 1].into_iter().cycle().zip(seeds) {
            scope.spawn(move || {
                let mut rng = Pcg64Mcg::new(u128::from(actor_seed) | 1);
                let mut actor = Actor::start(stage, card);
                let mut steps = 0u64;
                while Instant::now() < end {
                    actor.step(&mut rng);
                    steps += 1;
                    match pick(&mut rng, 60) {
                        0 => {
                            actor.program.kill(); // and another one takes its place
                            actor = Actor::start(stage, card);
                        }
                        1 => std::thread::sleep(Duration::from_millis(pick(&mut rng, 500))),
                        _ => {}
                    }
                }
                assert!(steps > 0);
            });
        }
    });
    stage.wait_until_empty();
    let totals = stage.snapshot().totals;
    assert!(
        totals.releases > 0,
        "nothing was ever released: the test is too mild ({totals:?})"
    );
}
