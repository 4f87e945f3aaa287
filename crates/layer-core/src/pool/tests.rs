//! The books alone.

use ebb_alloc::Piece;
use ebb_device::Handle;

use super::*;

const G: u64 = 64 << 10;
const MIB: u64 = 1 << 20;

fn pool() -> Pool {
    let mut pool = Pool::new(G, 64 * MIB, 8 * G);
    assert!(pool.add_range(1 << 40, 256 * MIB));
    pool
}

/// What the engine does with a plan, with a driver that never fails.
fn build(pool: &mut Pool, size: u64) -> u64 {
    match pool.plan(size, 7) {
        Plan::Ready(ptr) => ptr,
        Plan::Build { base, len, chunk } => match pool.built(base, &handles(len, chunk), size, 7) {
            Plan::Ready(ptr) => ptr,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

fn handles(len: u64, chunk: u64) -> Vec<(u64, Handle)> {
    let whole = (0..len / chunk).map(|i| (chunk, Handle(i)));
    let rest = len % chunk;
    whole.chain((rest > 0).then_some((rest, Handle(99)))).collect()
}

#[test]
fn chunks_are_whole_granules_and_few_for_large_sizes() {
    let largest = 128 * MIB;
    for granule in [64 << 10, 2 * MIB, 512 * MIB] {
        for len in [1, 3, 64, 500, 4000].map(|n| n * granule) {
            let chunk = chunk_size(len, granule, largest);
            assert!(chunk.is_multiple_of(granule) && chunk <= len && chunk > 0);
        }
    }
    assert_eq!(chunk_size(2 * MIB, 2 * MIB, largest), 2 * MIB);
    assert_eq!(chunk_size(256 * MIB, 2 * MIB, largest), 64 * MIB);
    assert_eq!(chunk_size(8 << 30, 2 * MIB, largest), 128 * MIB);
}

#[test]
fn a_range_overlaps_ours_if_any_address_does() {
    let pool = pool();
    let (start, end) = (1 << 40, (1 << 40) + 256 * MIB);
    assert!(pool.overlaps(start, 1) && pool.overlaps(end - 1, 1) && pool.overlaps(start + MIB, 0));
    assert!(pool.overlaps(start - MIB, 2 * MIB) && pool.overlaps(start - MIB, 1 << 30));
    assert!(!pool.overlaps(start - MIB, MIB) && !pool.overlaps(end, u64::MAX) && !pool.overlaps(0, 1 << 40));
}

/// Two threads need a segment at the same time: one of them is too many, and does not stay for ever.
#[test]
fn a_superfluous_segment_goes_to_the_cache() {
    let mut pool = pool();
    let plans = [pool.plan(100, 1), pool.plan(100, 2)];
    let mut all = Vec::new();
    for plan in plans {
        let Plan::Build { base, len, chunk } = plan else {
            panic!("{plan:?}")
        };
        match pool.built(base, &handles(len, chunk), 100, 1) {
            Plan::Ready(ptr) => all.push(ptr),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pool.books.used, 4 * MIB);
    for ptr in all {
        assert!(matches!(pool.free(ptr), Ok(Freed::Done)));
    }
    assert_eq!((pool.books.allocated, pool.books.cached), (0, 4 * MIB));
    let apart = pool.drop_cached(u64::MAX);
    pool.dismantled(&apart, &[]);
    assert_eq!((pool.books.used, pool.spans()), (0, 0));
}

#[test]
fn the_smallest_chunk_that_covers_the_rest_is_chosen() {
    let mut pool = pool();
    build(&mut pool, 2 * MIB + G); // chunks of 8 granules and one
    build(&mut pool, MIB); // chunks of 4
    let lens = |bytes: u64| -> Vec<u64> {
        let mut sum = 0;
        let mut taken = Vec::new();
        for (_, len) in pool.candidates(bytes) {
            if sum >= bytes {
                break;
            }
            sum += len;
            taken.push(len / G);
        }
        taken
    };
    assert_eq!(lens(1), [1]);
    assert_eq!(lens(3 * G), [4]);
    assert_eq!(lens(9 * G), [8, 1]);
    assert_eq!(lens(12 * G), [8, 4]);
    assert_eq!(lens(30 * G), [8, 8, 8, 8]);
    assert_eq!(lens(u64::MAX).iter().sum::<u64>(), 49);
}

#[test]
fn a_free_waits_for_what_moves_and_nothing_else_is_moved_then() {
    let mut pool = pool();
    let ptr = build(&mut pool, 2 * MIB);
    let all = pool.candidates(u64::MAX);
    let (_, len, handle, _) = pool.begin_out(all[0].0).unwrap();
    assert!(matches!(pool.free(ptr), Ok(Freed::Wait(span)) if span == ptr));
    assert!(matches!(pool.free(ptr), Err(FreeError::Invalid)), "freed twice");
    assert_eq!(
        pool.lookup(ptr),
        None,
        "it is freed for all that the program sees"
    );
    assert!(pool.begin_out(all[1].0).is_none());
    let piece = Piece {
        segment: 1,
        offset: 0,
        len,
    };
    pool.moved_out(all[0].0, HostCopy::plain(vec![piece]));
    let _ = handle;
    let Freed::Apart(apart, pieces) = pool.free_span(ptr) else {
        panic!("part of it is in host memory")
    };
    assert_eq!(pieces, [piece]);
    pool.dismantled(&apart, &[]);
    assert_eq!(
        (pool.books.used, pool.books.evicted, pool.books.allocated),
        (0, 0, 0)
    );
    assert_eq!((pool.spans(), pool.live_count()), (0, 0));
    let again = build(&mut pool, 256 * MIB);
    assert_eq!(again, 1 << 40, "all of the addresses are free again");
}

#[test]
fn alone_the_limit_counts_cached_bytes_and_drops_them() {
    let mut pool = pool();
    pool.books.limit = 4 * MIB;
    let ptr = build(&mut pool, 3 * MIB);
    assert!(matches!(pool.free(ptr), Ok(Freed::Done)));
    let Plan::Drop(apart) = pool.plan(3 * MIB + G, 1) else {
        panic!("what is cached does not serve, and with it the limit would be passed")
    };
    pool.dismantled(&apart, &[]);
    build(&mut pool, 3 * MIB + G);
    assert!(matches!(pool.plan(MIB, 1), Plan::OverLimit { .. }));
}
