//! [`replay`]: a policy is led through a trace, and every answer is checked; [`Fast`] does the same without checks, to be timed.

use std::collections::BTreeMap;

use super::event::{Event, Op};
use super::policy::{Figures, Free, Policy, Request};
use super::timeline::Timeline;

/// What PyTorch rounds every block to, and what its *active* bytes count.
const ROUNDED: u64 = 512;
/// Addresses are multiples of this.
const ALIGNMENT: u64 = 256;
/// A gap of this length is time for what need not be done at once.
const IDLE_NS: u64 = 1_000_000;

/// How a trace is replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Physical bytes that there are; the policy was made with the same.
    pub capacity: u64,
    /// How long after a free the work that used the block is done.
    pub lag_ns: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            capacity: u64::MAX,
            lag_ns: 100_000,
        }
    }
}

/// What a replay showed.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Allocations and frees.
    pub operations: u64,
    /// Largest sum of live bytes, as asked for.
    pub peak_live: u64,
    /// The same with each block rounded up to 512 bytes.
    pub peak_rounded: u64,
    /// The most that the policy held.
    pub peak_physical: u64,
    /// Map calls of all events.
    pub map_calls: u64,
    /// Map calls of the second half of the events.
    pub late_map_calls: u64,
    /// Refusals of blocks that do not fit beside what is live.
    pub refused: u64,
    /// Refusals of blocks that do fit beside what is live: faults of the policy.
    pub unjustified: u64,
    /// Bytes of live blocks that it copied.
    pub copied: u64,
    /// What it held over time.
    pub timeline: Timeline,
}

/// A policy did what none may do. It is a fault of the policy (or of its adapter), at the same event every time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event {event}: {fault}")]
pub struct Broken {
    /// Counted from 0.
    pub event: u64,
    /// What it did.
    pub fault: Fault,
}

/// What no policy may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A block over another.
    #[error("the block at {0:#x} overlaps the one at {1:#x}")]
    Overlap(u64, u64),
    /// A block at an address that no driver would give.
    #[error("the block at {0:#x} is not aligned")]
    Misaligned(u64),
    /// A block that would end beyond the last address.
    #[error("the block at {0:#x} ends beyond all addresses")]
    Beyond(u64),
    /// More than there is.
    #[error("it holds {0} bytes of {1}")]
    AboveCapacity(u64, u64),
    /// Less memory than live bytes.
    #[error("it holds {0} bytes for {1} live ones")]
    BelowLive(u64, u64),
    /// It lost count.
    #[error("it counts {0} live bytes, and {1} are")]
    Miscounted(u64, u64),
}

/// A block that is live.
#[derive(Debug, Clone, Copy)]
struct Block {
    address: u64,
    size: u64,
}

/// Replays the events and checks every answer.
///
/// # Errors
/// If the policy gives a block that cannot be: see [`Fault`].
pub fn replay(
    events: impl IntoIterator<Item = Event>,
    policy: &mut dyn Policy,
    options: &Options,
) -> Result<Outcome, Broken> {
    let mut run = Run {
        options: *options,
        slots: Vec::new(),
        places: BTreeMap::new(),
        live: 0,
        rounded: 0,
        outcome: Outcome::default(),
    };
    let mut before_ns = 0;
    for (event, number) in events.into_iter().zip(0..) {
        if event.at_ns.saturating_sub(before_ns) >= IDLE_NS {
            policy.idle(before_ns);
        }
        before_ns = event.at_ns;
        run.step(&event, policy)
            .map_err(|fault| Broken { event: number, fault })?;
    }
    run.outcome.copied = policy.copied();
    run.outcome.late_map_calls = run.outcome.map_calls - run.outcome.timeline.map_calls_at_half();
    Ok(run.outcome)
}

struct Run {
    options: Options,
    slots: Vec<Option<Block>>,
    /// Live blocks: address and end.
    places: BTreeMap<u64, u64>,
    live: u64,
    rounded: u64,
    outcome: Outcome,
}

impl Run {
    fn step(&mut self, event: &Event, policy: &mut dyn Policy) -> Result<(), Fault> {
        let now_ns = event.at_ns;
        match event.op {
            Op::Allocate { slot, size, stream } => {
                self.outcome.operations += 1;
                let request = Request { size, stream, now_ns };
                match policy.allocate(request) {
                    Ok(address) => self.place(slot, Block { address, size })?,
                    Err(_) if self.live.saturating_add(size) > self.options.capacity => {
                        self.outcome.refused += 1;
                    }
                    Err(_) => self.outcome.unjustified += 1,
                }
            }
            // A slot is empty if its block was refused.
            Op::Free { slot, stream } => {
                if let Some(block) = self.slots.get_mut(slot as usize).and_then(Option::take) {
                    self.outcome.operations += 1;
                    self.places.remove(&block.address);
                    self.live -= block.size;
                    self.rounded -= block.size.next_multiple_of(ROUNDED);
                    let free = Free {
                        stream,
                        now_ns,
                        done_ns: now_ns.saturating_add(self.options.lag_ns),
                    };
                    policy.free(block.address, free);
                }
            }
            Op::Synchronize => policy.synchronize(now_ns),
            Op::End { ref streams } => policy.end(streams.clone(), now_ns),
        }
        self.look(policy.figures(), now_ns)
    }

    fn place(&mut self, slot: u32, block: Block) -> Result<(), Fault> {
        let Block { address, size } = block;
        if !address.is_multiple_of(ALIGNMENT) {
            return Err(Fault::Misaligned(address));
        }
        let end = address.checked_add(size).ok_or(Fault::Beyond(address))?;
        let neighbour = self.places.range(..end).next_back();
        if let Some((&other, _)) = neighbour.filter(|&(_, &other_end)| other_end > address) {
            return Err(Fault::Overlap(address, other));
        }
        self.places.insert(address, end);
        let slot = slot as usize;
        if slot >= self.slots.len() {
            self.slots.resize(slot + 1, None);
        }
        self.slots[slot] = Some(block);
        self.live += size;
        self.rounded += size.next_multiple_of(ROUNDED);
        Ok(())
    }

    fn look(&mut self, figures: Figures, now_ns: u64) -> Result<(), Fault> {
        if figures.live != self.live {
            return Err(Fault::Miscounted(figures.live, self.live));
        }
        if figures.physical < self.live {
            return Err(Fault::BelowLive(figures.physical, self.live));
        }
        if figures.physical > self.options.capacity {
            return Err(Fault::AboveCapacity(figures.physical, self.options.capacity));
        }
        let outcome = &mut self.outcome;
        outcome.peak_live = outcome.peak_live.max(self.live);
        outcome.peak_rounded = outcome.peak_rounded.max(self.rounded);
        outcome.peak_physical = outcome.peak_physical.max(figures.physical);
        outcome.map_calls = figures.map_calls;
        outcome.timeline.add(now_ns, figures);
        Ok(())
    }
}

/// Replays without looking at the answers, as fast as the policy goes.
///
/// Whoever wants to know how fast reads a clock before and after [`Fast::go`]: nothing here does.
#[derive(Debug)]
pub struct Fast {
    lag_ns: u64,
    before_ns: u64,
    addresses: Vec<Option<u64>>,
}

impl Fast {
    /// For events with so many slots.
    #[must_use]
    pub fn new(slots: u32, options: &Options) -> Self {
        Self {
            lag_ns: options.lag_ns,
            before_ns: 0,
            addresses: vec![None; slots as usize],
        }
    }

    /// Goes on with these events; how many of them were allocations and frees.
    pub fn go(&mut self, events: &[Event], policy: &mut dyn Policy) -> u64 {
        let mut operations = 0;
        for event in events {
            let now_ns = event.at_ns;
            if now_ns.saturating_sub(self.before_ns) >= IDLE_NS {
                policy.idle(self.before_ns);
            }
            self.before_ns = now_ns;
            match event.op {
                Op::Allocate { slot, size, stream } => {
                    operations += 1;
                    self.addresses[slot as usize] = policy.allocate(Request { size, stream, now_ns }).ok();
                }
                Op::Free { slot, stream } => {
                    if let Some(address) = self.addresses[slot as usize].take() {
                        operations += 1;
                        let free = Free {
                            stream,
                            now_ns,
                            done_ns: now_ns.saturating_add(self.lag_ns),
                        };
                        policy.free(address, free);
                    }
                }
                Op::Synchronize => policy.synchronize(now_ns),
                Op::End { ref streams } => policy.end(streams.clone(), now_ns),
            }
        }
        operations
    }
}
