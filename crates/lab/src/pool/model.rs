//! Every policy, on random programs, against the checks of the replay.

use proptest::prelude::*;

use super::event::{Event, Op};
use super::kind::Kind;
use super::run::{Options, replay};

const MIB: u64 = 1 << 20;

/// What a random program does next.
#[derive(Debug, Clone, Copy)]
enum Step {
    Allocate(u64, u32),
    Free(u32, u32),
    Synchronize,
    Wait(u64),
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![
        3 => 1..4096u64,
        3 => 1..(2 * MIB),
        2 => 1..(64 * MIB),
        1 => (1..40u64).prop_map(|n| n * 2 * MIB),
        1 => prop::sample::select(vec![1, 511, 512, 513, MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 20 * MIB]),
    ];
    prop_oneof![
        10 => (size, 0..3u32).prop_map(|(size, stream)| Step::Allocate(size, stream)),
        8 => (any::<u32>(), 0..3u32).prop_map(|(which, stream)| Step::Free(which, stream)),
        1 => Just(Step::Synchronize),
        2 => (0..10_000_000u64).prop_map(Step::Wait),
        1 => Just(Step::End),
    ]
}

/// A program as events: frees are of blocks that are live, and a process that ends has freed all its blocks.
fn events(steps: &[Step]) -> Vec<Event> {
    let (mut at_ns, mut next, mut events) = (0, 0, Vec::new());
    let mut live: Vec<u32> = Vec::new();
    for &step in steps {
        let op = match step {
            Step::Allocate(size, stream) => {
                live.push(next);
                next += 1;
                Op::Allocate {
                    slot: next - 1,
                    size,
                    stream,
                }
            }
            Step::Free(which, stream) if !live.is_empty() => Op::Free {
                slot: live.swap_remove(which as usize % live.len()),
                stream,
            },
            Step::Free(..) => continue,
            Step::Synchronize => Op::Synchronize,
            Step::Wait(ns) => {
                at_ns += ns;
                continue;
            }
            Step::End => {
                for slot in live.drain(..) {
                    let op = Op::Free { slot, stream: 0 };
                    events.push(Event { at_ns, op });
                }
                Op::End { streams: 0..3 }
            }
        };
        events.push(Event { at_ns, op });
    }
    events
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_policy_gives_what_it_has_not(steps in prop::collection::vec(step(), 1..200), tight in any::<bool>()) {
        let options = Options {
            capacity: if tight { 256 * MIB } else { 1 << 46 },
            ..Options::default()
        };
        let events = events(&steps);
        for kind in Kind::ALL {
            let outcome = replay(events.iter().cloned(), &mut *kind.make(options.capacity), &options);
            let outcome = outcome.unwrap_or_else(|broken| panic!("{}: {broken}", kind.name()));
            prop_assert!(tight || outcome.refused + outcome.unjustified == 0, "{}", kind.name());
        }
    }

    #[test]
    fn the_same_program_gives_the_same_outcome(steps in prop::collection::vec(step(), 1..60)) {
        let (events, options) = (events(&steps), Options::default());
        for kind in Kind::ALL {
            let run = || replay(events.iter().cloned(), &mut *kind.make(1 << 46), &options);
            prop_assert_eq!(run(), run(), "{}", kind.name());
        }
    }
}
