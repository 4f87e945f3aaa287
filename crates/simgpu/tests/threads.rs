//! Many threads use one driver at once: nothing is lost, nothing hangs, and at the end nothing is charged.

#![allow(non_snake_case, reason = "the driver's names")]

mod common;

use common::*;
use ebb_abi::*;

const THREADS: u64 = 6;
const ROUNDS: u64 = 150;

/// A number for each step: a plain generator, so that a failing run can be run again.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

struct Kernels {
    fill: CUfunction,
    check: CUfunction,
}

fn work(cuda: &Cuda, context: CUcontext, kernels: &Kernels, seed: u64) {
    ok(cuda.cuCtxSetCurrent(context));
    let mut state = seed;
    let stream = cuda.stream(if seed.is_multiple_of(2) {
        0
    } else {
        CU_STREAM_NON_BLOCKING.0
    });
    let event = cuda.event();
    let result = cuda.alloc(8);
    let space = cuda.reserve(4 * MIB);
    ok(cuda.cuMemsetD8Async(result, 0, 8, stream));
    for round in 0..ROUNDS {
        let words = next(&mut state) % 60_000 + 1;
        let bytes = words as usize * 4;
        let step = round & 0xffff;
        // Memory of one of three kinds, filled and checked by kernels.
        let kind = next(&mut state) % 3;
        let handle = (kind == 1).then(|| cuda.create(2 * MIB));
        let data = match (kind, handle) {
            (1, Some(handle)) => {
                cuda.map(space, 2 * MIB, handle);
                space
            }
            (2, _) => {
                let mut address = CUdeviceptr::NULL;
                ok(cuda.cuMemAllocAsync(&mut address, bytes, stream));
                address
            }
            _ => cuda.alloc(bytes),
        };
        ok(cuda.launch(kernels.fill, stream, &[data.0, words, seed, step]));
        ok(cuda.cuEventRecord(event, stream));
        // A detour over another stream, destroyed while its work may still be pending.
        let detour = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        ok(cuda.cuStreamWaitEvent(detour, event, 0));
        ok(cuda.launch(kernels.check, detour, &[data.0, words, seed, step, result.0]));
        ok(cuda.cuEventRecord(event, detour));
        ok(cuda.cuStreamWaitEvent(stream, event, 0));
        ok(cuda.cuStreamDestroy_v2(detour));
        match (kind, handle) {
            (1, Some(handle)) => {
                ok(cuda.cuStreamSynchronize(stream));
                ok(cuda.cuMemUnmap(space, 2 * MIB));
                ok(cuda.cuMemRelease(handle));
            }
            (2, _) => ok(cuda.cuMemFreeAsync(data, stream)),
            _ => ok(cuda.cuMemFree_v2(data)),
        }
        if round % 16 == 0 {
            ok(cuda.cuCtxSynchronize());
        }
    }
    ok(cuda.cuStreamSynchronize(stream));
    assert_eq!(
        cuda.read(result, 8),
        [0; 8],
        "wrong words of the thread with seed {seed}"
    );
    ok(cuda.cuMemFree_v2(result));
    ok(cuda.cuEventDestroy_v2(event));
    ok(cuda.cuStreamDestroy_v2(stream));
    ok(cuda.cuMemAddressFree(space, 4 * MIB));
}

#[test]
fn threads_do_not_disturb_each_other() {
    let variables = [("EBB_SIM_MEMORY", "256Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
    alone("threads_do_not_disturb_each_other", &variables, |cuda| {
        let mut context = CUcontext::NULL;
        ok(cuda.cuCtxGetCurrent(&mut context));
        let kernels = Kernels {
            fill: cuda.kernel("ebb_fill"),
            check: cuda.kernel("ebb_check"),
        };
        std::thread::scope(|scope| {
            for seed in 1..=THREADS {
                let kernels = &kernels;
                scope.spawn(move || work(cuda, context, kernels, seed));
            }
        });
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.free_bytes(), 256 * MIB);
    });
}
