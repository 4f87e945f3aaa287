//! [`Mix`]: a day of one card on which jobs come, play their traces, and end, some of them before their time.
//!
//! Jobs arrive at random, up to [`AT_ONCE`] at once; each plays one of the traces, stretched to a random length. What a job has left
//! is freed when it ends, and its streams with it. The day is made event by event from a seed: a day of millions of events takes
//! the memory of the traces it is made of.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

use super::event::{Event, Op, Slot, Stream, Trace};

/// Jobs at once, at most.
pub const AT_ONCE: u32 = 8;
const MINUTE_NS: u64 = 60_000_000_000;
/// The length of a day.
pub const DAY_NS: u64 = 24 * 60 * MINUTE_NS;
/// How long a job takes if nothing ends it.
const LENGTH_NS: std::ops::Range<u64> = 5 * MINUTE_NS..60 * MINUTE_NS;
/// The mean between two arrivals: half of the jobs that may be there at once are, on average.
const ARRIVAL_NS: u64 = 8 * MINUTE_NS;
/// One job in so many is ended before its time.
const KILLED: u64 = 3;

/// The events of a day.
#[derive(Debug)]
pub struct Mix<'a> {
    traces: &'a [Trace],
    random: Pcg64Mcg,
    /// Slots and streams of one job.
    slots: u32,
    streams: u32,
    /// Jobs by their place; what is to be done next, by time.
    jobs: Vec<Option<Job<'a>>>,
    due: BinaryHeap<Reverse<(u64, u32)>>,
    arrival_ns: u64,
    /// Jobs that have begun.
    begun: u64,
}

/// A job that plays its trace.
#[derive(Debug)]
struct Job<'a> {
    trace: &'a Trace,
    begin_ns: u64,
    length_ns: u64,
    /// The next event of the trace, and where it is ended.
    next: usize,
    end: usize,
    /// Its live blocks: the stream that uses each.
    live: Vec<Option<Stream>>,
    /// When ending: the next slot to be freed.
    clearing: Option<Slot>,
}

impl Job<'_> {
    /// When its next event is.
    fn at_ns(&self) -> u64 {
        let last = self.trace.events.len().max(1) as u64;
        let span = self.trace.span_ns();
        // Traces without a clock are played event by event.
        let (done, of) = match self.trace.events.get(self.next) {
            Some(event) if span > 0 => (event.at_ns, span),
            _ => (self.next as u64, last),
        };
        let passed = u128::from(self.length_ns) * u128::from(done) / u128::from(of);
        self.begin_ns + u64::try_from(passed).unwrap_or(self.length_ns)
    }
}

impl<'a> Mix<'a> {
    /// The day of this seed. Traces without events are never played.
    ///
    /// # Panics
    /// If no trace has events, or if one uses more slots or streams than [`AT_ONCE`] jobs have numbers for: over 500 million.
    #[must_use]
    pub fn new(traces: &'a [Trace], seed: u64) -> Self {
        assert!(
            traces.iter().any(|trace| !trace.events.is_empty()),
            "no trace has events"
        );
        let most = |of: fn(&Trace) -> u32| traces.iter().map(of).max().unwrap_or(0);
        let (slots, streams) = (most(|trace| trace.slots), most(|trace| trace.streams));
        assert!(
            slots.max(streams) <= u32::MAX / AT_ONCE,
            "too many blocks or streams at once"
        );
        let mut mix = Self {
            traces,
            random: Pcg64Mcg::seed_from_u64(seed),
            slots,
            streams,
            jobs: (0..AT_ONCE).map(|_| None).collect(),
            due: BinaryHeap::new(),
            arrival_ns: 0,
            begun: 0,
        };
        mix.arrival_ns = mix.below(ARRIVAL_NS);
        mix
    }

    /// How many slots all events use.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots * AT_ONCE
    }

    /// How many jobs have begun so far.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun
    }

    fn below(&mut self, bound: u64) -> u64 {
        // The high half of a product: no division, and a bias that no day is long enough to show.
        let product = u128::from(self.random.next_u64()) * u128::from(bound);
        u64::try_from(product >> 64).unwrap_or(0)
    }

    /// A job begins at the time of the next arrival, if there is a place for it.
    fn arrive(&mut self) {
        let begin_ns = self.arrival_ns;
        self.arrival_ns += 1 + self.below(2 * ARRIVAL_NS);
        let length_ns = LENGTH_NS.start + self.below(LENGTH_NS.end - LENGTH_NS.start);
        let which = self.below(self.traces.len() as u64) as usize;
        let killed = self.below(KILLED) == 0;
        let cut = self.below(1 << 32);
        let trace = &self.traces[which];
        let Some(place) = self.jobs.iter().position(Option::is_none) else {
            return;
        };
        if trace.events.is_empty() {
            return;
        }
        let all = trace.events.len();
        let end = if killed {
            (((all as u128) * u128::from(cut)) >> 32) as usize
        } else {
            all
        };
        self.begun += 1;
        self.jobs[place] = Some(Job {
            trace,
            begin_ns,
            length_ns,
            next: 0,
            end,
            live: vec![None; trace.slots as usize],
            clearing: None,
        });
        self.due.push(Reverse((begin_ns, place as u32)));
    }

    /// The next event of a job; what a job itself says of its end is left to [`Op::End`] at its end here.
    fn step(&mut self, place: u32, now_ns: u64) -> Option<Event> {
        let (first_slot, first_stream) = (place * self.slots, place * self.streams);
        let streams = first_stream..first_stream + self.streams;
        let event = |op| Some(Event { at_ns: now_ns, op });
        let job = self.jobs[place as usize].as_mut()?;
        while job.clearing.is_none() && job.next < job.end {
            let op = &job.trace.events[job.next].op;
            job.next += 1;
            let again = Reverse((job.at_ns().max(now_ns), place));
            match *op {
                Op::Allocate { slot, size, stream } => {
                    job.live[slot as usize] = Some(first_stream + stream);
                    self.due.push(again);
                    return event(Op::Allocate {
                        slot: first_slot + slot,
                        size,
                        stream: first_stream + stream,
                    });
                }
                Op::Free { slot, stream } => {
                    job.live[slot as usize] = None;
                    self.due.push(again);
                    return event(Op::Free {
                        slot: first_slot + slot,
                        stream: first_stream + stream,
                    });
                }
                // Of one process: the work of the others goes on.
                Op::Synchronize | Op::End { .. } => {}
            }
        }
        let mut slot = job.clearing.unwrap_or(0);
        while let Some(owner) = job.live.get_mut(slot as usize) {
            slot += 1;
            if let Some(stream) = owner.take() {
                job.clearing = Some(slot);
                self.due.push(Reverse((now_ns, place)));
                return event(Op::Free {
                    slot: first_slot + slot - 1,
                    stream,
                });
            }
        }
        self.jobs[place as usize] = None;
        event(Op::End { streams })
    }
}

impl Iterator for Mix<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        loop {
            let next = self.due.peek().map(|&Reverse((at_ns, _))| at_ns);
            if self.arrival_ns < DAY_NS && next.is_none_or(|at_ns| self.arrival_ns <= at_ns) {
                self.arrive();
                continue;
            }
            let Reverse((at_ns, place)) = self.due.pop()?;
            // At the end of the day every job is ended.
            if at_ns >= DAY_NS
                && let Some(job) = &mut self.jobs[place as usize]
            {
                job.end = job.next;
            }
            if let Some(event) = self.step(place, at_ns.min(DAY_NS)) {
                return Some(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn traces() -> Vec<Trace> {
        let event = |at_ns, op| Event { at_ns, op };
        let allocate = |slot, size, stream| Op::Allocate { slot, size, stream };
        let clocked = Trace {
            events: vec![
                event(0, allocate(0, 100, 0)),
                event(10, allocate(1, 50, 1)),
                event(20, Op::Synchronize),
                event(90, Op::Free { slot: 0, stream: 1 }),
                event(100, allocate(0, 7, 0)),
            ],
            slots: 2,
            streams: 2,
            ..Trace::default()
        };
        let timeless = Trace {
            events: (0..20).map(|slot| event(0, allocate(slot, 1, 0))).collect(),
            slots: 20,
            streams: 1,
            ..Trace::default()
        };
        vec![clocked, Trace::default(), timeless]
    }

    #[test]
    fn a_day_is_in_order_and_leaves_nothing() {
        let traces = traces();
        for seed in 0..20 {
            let mut mix = Mix::new(&traces, seed);
            let slots = mix.slots();
            let (mut now_ns, mut live, mut ended) = (0, BTreeMap::new(), 0);
            let mut seen = BTreeSet::new();
            for event in mix.by_ref() {
                assert!(event.at_ns >= now_ns && event.at_ns <= DAY_NS, "seed {seed}");
                now_ns = event.at_ns;
                match event.op {
                    Op::Allocate { slot, stream, .. } => {
                        assert!(slot < slots);
                        seen.insert(stream / 2);
                        assert_eq!(live.insert(slot, stream / 2), None, "seed {seed}");
                    }
                    Op::Free { slot, stream } => {
                        assert_eq!(live.remove(&slot), Some(stream / 2), "seed {seed}")
                    }
                    Op::End { streams } => {
                        ended += 1;
                        assert!(live.values().all(|&job| job != streams.start / 2), "seed {seed}");
                    }
                    Op::Synchronize => panic!("of one process only"),
                }
            }
            assert!(live.is_empty(), "seed {seed}");
            assert_eq!(ended, mix.begun(), "seed {seed}");
            assert!((60..240).contains(&ended), "seed {seed}: {ended} jobs");
            assert!(seen.len() > 4, "seed {seed}: {} at once", seen.len());
        }
    }

    #[test]
    fn a_seed_is_a_day() {
        let traces = traces();
        assert!(Mix::new(&traces, 7).eq(Mix::new(&traces, 7)));
        assert!(!Mix::new(&traces, 7).eq(Mix::new(&traces, 8)));
    }
}
