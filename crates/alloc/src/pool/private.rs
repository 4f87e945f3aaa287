//! Private streams: what is freed on one stays its own until the caller says that it may be everybody's.
//!
//! A graph of the driver runs again with the addresses that it was captured with. So what was allocated and freed while it
//! was captured may be used again in that capture, and by nothing else as long as the graph may be launched: its bytes go to nobody,
//! its chunks are not released, and the views that its blocks lay in stay mapped. Nothing has to be waited for there: what is
//! captured does not run before the capture is over.

use super::chunks::ChunkId;
use super::runs::Owner;
use super::{Pool, Stream};

impl Pool {
    /// Makes a stream private, before its first block.
    pub fn keep(&mut self, stream: Stream) {
        self.private.insert(stream);
    }

    /// It is a stream like others from here on: what it freed is everybody's as soon as it is past its marks.
    pub fn keep_no_more(&mut self, stream: Stream) {
        self.private.remove(&stream);
    }

    /// Whether free bytes in these addresses are a private stream's.
    pub(super) fn keeps_in(&self, at: u64, len: u64) -> bool {
        !self.private.is_empty()
            && self.runs.inside(at, len).any(|(from, _)| {
                let run = self.runs.containing(from).map(|(_, run)| run.owner);
                matches!(run, Some(Owner::Stream(stream)) if self.private.contains(&stream))
            })
    }

    /// Whether an idle chunk is a private stream's. The bytes of an idle chunk are of one run.
    pub(super) fn is_kept(&self, id: ChunkId) -> bool {
        if self.private.is_empty() {
            return false;
        }
        let home = self.chunks.get(id).map(|chunk| chunk.home);
        let owner = home
            .and_then(|home| self.runs.containing(home))
            .map(|(_, run)| run.owner);
        matches!(owner, Some(Owner::Stream(stream)) if self.private.contains(&stream))
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;

    const GRANULE: u64 = 2 << 20;
    const GRAPH: Stream = Stream(7);
    const OTHER: Stream = Stream(1);

    #[derive(Debug, Default)]
    struct Calls {
        created: u64,
        released: u64,
        unmaps: u64,
        waits: Vec<Stream>,
    }

    impl Backing for Calls {
        type Error = std::convert::Infallible;

        fn call(&mut self, call: &Call) -> Result<(), Self::Error> {
            match *call {
                Call::Create { len, .. } => self.created += len,
                Call::Release { len, .. } => self.released += len,
                Call::Unmap { .. } => self.unmaps += 1,
                Call::Wait { stream, .. } => self.waits.push(stream),
                Call::Map { .. } | Call::Copy { .. } => {}
            }
            Ok(())
        }
    }

    fn allocate(pool: &mut Pool, calls: &mut Calls, size: u64, stream: Stream) -> u64 {
        let request = Request {
            size,
            align: 1,
            stream,
            asked: true,
        };
        match pool.allocate(request) {
            Step::Ready(at) => at,
            Step::Run(plan) => {
                let (done, _) = plan.run(calls);
                match pool.finish(*plan, done) {
                    Finished::Block(at) => at,
                    other => panic!("{other:?}"),
                }
            }
            other => panic!("{other:?}"),
        }
    }

    fn trim(pool: &mut Pool, calls: &mut Calls) {
        if let Some(plan) = pool.trim() {
            let (done, _) = plan.run(calls);
            assert_eq!(pool.finish(plan, done), Finished::Less);
        }
        pool.check().unwrap();
    }

    /// While a graph is captured no work can be waited for: mappings that serve nobody and that another stream's work may use stay for
    /// another time, and new memory is to be had without a wait however much there is that would have to be waited for.
    #[test]
    fn what_is_captured_waits_for_no_stream() {
        let mut pool = Pool::new(Config::for_granule(GRANULE));
        assert!(pool.add_range(1 << 40, 1 << 40));
        let mut calls = Calls::default();
        // What is larger than the holes between blocks that stay is stitched of them.
        let all: Vec<u64> = (0..200)
            .map(|_| allocate(&mut pool, &mut calls, GRANULE, OTHER))
            .collect();
        for at in all.iter().step_by(2) {
            pool.free(*at, OTHER, Mark(1), &[]).unwrap();
        }
        let wide = allocate(&mut pool, &mut calls, 90 * GRANULE, OTHER);
        pool.free(wide, OTHER, Mark(2), &[]).unwrap();
        while let Some(view) = pool.views.oldest_unused(&pool.private) {
            pool.drop_view(view);
        }
        assert!(pool.stale.len() >= 90);
        pool.keep(GRAPH);
        let request = Request {
            size: 2 * GRANULE,
            align: 1,
            stream: GRAPH,
            asked: true,
        };
        let Step::Run(plan) = pool.allocate(request) else {
            panic!("nothing is the graph's yet");
        };
        let waits = |plan: &Plan| plan.calls().iter().any(|call| matches!(call, Call::Wait { .. }));
        assert!(!waits(&plan), "{:?}", plan.calls());
        assert!(matches!(pool.finish(*plan, 0), Finished::Failed));
        let request = Request {
            stream: OTHER,
            ..request
        };
        let Step::Run(plan) = pool.allocate(request) else {
            panic!("no hole is so large");
        };
        assert!(waits(&plan), "another stream's plan takes them away");
        assert!(matches!(pool.finish(*plan, 0), Finished::Failed));
        pool.check().unwrap();
        let Step::Run(plan) = pool.allocate_new(&request) else {
            panic!("there are addresses");
        };
        assert!(!waits(&plan));
        let (done, _) = plan.run(&mut calls);
        assert!(matches!(pool.finish(*plan, done), Finished::Block(_)));
        pool.check().unwrap();
        pool.set_limit(pool.stats().reserved);
        assert!(matches!(pool.allocate_new(&request), Step::NoRoom(bytes) if bytes == 2 * GRANULE));
    }

    /// What a captured graph used stays where it is, mapped and nobody else's, until the graph is gone; inside the capture it is used again,
    /// also in other pieces.
    #[test]
    fn what_is_freed_on_a_private_stream_is_nobody_elses_until_it_ends() {
        let mut pool = Pool::new(Config::for_granule(GRANULE));
        assert!(pool.add_range(1 << 40, 1 << 40));
        let mut calls = Calls::default();
        pool.keep(GRAPH);
        let [a, b, c] = [(); 3].map(|()| allocate(&mut pool, &mut calls, 4 * GRANULE, GRAPH));
        for (at, mark) in [(a, 1), (c, 2)] {
            pool.free(at, GRAPH, Mark(mark), &[]).unwrap();
        }
        // Stitched of both holes.
        let wide = allocate(&mut pool, &mut calls, 7 * GRANULE, GRAPH);
        pool.free(wide, GRAPH, Mark(3), &[]).unwrap();
        let small = allocate(&mut pool, &mut calls, GRANULE / 2, GRAPH);
        pool.free(small, GRAPH, Mark(4), &[]).unwrap();
        assert_eq!(calls.waits, [], "what is captured does not run");
        pool.done(GRAPH, Mark(u64::MAX));
        assert_eq!(pool.streams(), []);
        let before = pool.stats().reserved;
        let unmaps = calls.unmaps;
        trim(&mut pool, &mut calls);
        assert_eq!(
            (calls.released, calls.unmaps),
            (calls.created - before, unmaps),
            "nothing goes"
        );
        let other = allocate(&mut pool, &mut calls, 4 * GRANULE, OTHER);
        for at in [a, b, c] {
            assert!(
                other.abs_diff(at) >= 4 * GRANULE,
                "another's block lies in the graph's"
            );
        }
        assert_eq!(pool.stats().reserved, before + 4 * GRANULE, "it grows");
        pool.free(other, OTHER, Mark(1), &[]).unwrap();
        pool.done(OTHER, Mark(1));
        trim(&mut pool, &mut calls);
        assert_eq!(pool.stats().reserved, before);

        pool.keep_no_more(GRAPH);
        assert_eq!(pool.streams(), [GRAPH]);
        pool.done(GRAPH, Mark(4));
        let reserved = pool.stats().reserved;
        let all = allocate(&mut pool, &mut calls, 8 * GRANULE, OTHER);
        assert_eq!(pool.stats().reserved, reserved, "it is everybody's");
        pool.free(all, OTHER, Mark(2), &[]).unwrap();
        pool.free(b, GRAPH, Mark(5), &[]).unwrap();
        pool.end(GRAPH);
        pool.end(OTHER);
        trim(&mut pool, &mut calls);
        assert_eq!((pool.stats().reserved, calls.released), (0, calls.created));
    }
}
