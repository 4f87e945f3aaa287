// Tells whether memory still holds what it held: a keyed hash of every block of 2 MiB, and whether all of it is zero.
//
// What is computed, and why two different blocks agree with a probability of less than 2^-126, is written in
// crates/device/src/fingerprint.rs, which computes the same on the processor. `generate.py` makes fingerprint.ptx of this.
//
// One group of 256 threads takes one block. In each step of 64 KiB a thread reads one line: 16 vectors of 16 bytes, 512
// bytes apart, so that a warp reads whole runs of 512 bytes. Bytes are hashed as they come in; nothing waits on another
// thread before the end of the block.

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define LINE 16       // vectors of a line
#define STEPS 32      // lines of a thread in a whole block
#define PASSES 4
#define SHIFT 2       // words by which the keys of the next pass are shifted
#define LINE_KEYS (LINE * 4 + (PASSES - 1) * SHIFT)
#define STEP_KEYS (STEPS * 8 + (PASSES - 1) * SHIFT)
#define LAST_KEYS (THREADS * 8 + (PASSES - 1) * SHIFT)
#define MAX_BLOCKS 16384

extern "C" {

// The keys of the first two levels, which all threads read at once.
__constant__ u32 ebb_print_near[LINE_KEYS + STEP_KEYS];
// All keys: those two levels, then the last one.
__device__ u32 ebb_print_keys[LINE_KEYS + STEP_KEYS + LAST_KEYS];
// Where blocks are, two words each: address and bytes (a multiple of 16).
__device__ u64 ebb_print_blocks[MAX_BLOCKS * 2];
// What was found, five words each: four sums, and all words of the block or-ed together.
__device__ u64 ebb_print_found[MAX_BLOCKS * 5];

}

__device__ __forceinline__ void pair(u64 sums[PASSES], u32 a, u32 b, const u32 *keys)
{
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        sums[pass] += (u64)(a + keys[pass * SHIFT]) * (b + keys[pass * SHIFT + 1]);
}

__device__ __forceinline__ void line(u64 sums[PASSES], u32 &any, const uint4 *at, u32 left)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 vectors[LINE / 2];
#pragma unroll
        for (int i = 0; i < LINE / 2; i++) {
            u32 step = (half * (LINE / 2) + i) * 32;
            vectors[i] = step < left ? __ldcs(at + step) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < LINE / 2; i++) {
            const u32 *keys = ebb_print_near + (half * (LINE / 2) + i) * 4;
            uint4 v = vectors[i];
            any |= v.x | v.y | v.z | v.w;
            pair(sums, v.x, v.y, keys);
            pair(sums, v.z, v.w, keys + 2);
        }
    }
}

// The parameter `keys` is the address of ebb_print_keys, `blocks` and `found` those of the other two.
extern "C" __global__ __launch_bounds__(THREADS, 3)
void ebb_print(const u64 *blocks, const u32 *keys, u64 *found)
{
    const uint4 *at = (const uint4 *)blocks[blockIdx.x * 2];
    u32 vectors = (u32)(blocks[blockIdx.x * 2 + 1] / 16);
    u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    u32 first = warp * 512 + lane, any = 0;
    u64 outer[PASSES] = {0, 0, 0, 0};
    bool whole = vectors % 512 == 0;
    const u32 *step_keys = ebb_print_near + LINE_KEYS;
    for (u32 from = first; from < vectors; from += 4096, step_keys += 8) {
        u64 sums[PASSES] = {0, 0, 0, 0};
        if (whole)
            line(sums, any, at + from, 0xffffffffu);
        else
            line(sums, any, at + from, vectors - from);
#pragma unroll
        for (int i = 0; i < PASSES; i++)
            pair(outer, (u32)sums[i], (u32)(sums[i] >> 32), step_keys + 2 * i);
    }
    u64 last[PASSES] = {0, 0, 0, 0};
    if (first < vectors) {
        const u32 *last_keys = keys + LINE_KEYS + STEP_KEYS + thread * 8;
#pragma unroll
        for (int i = 0; i < PASSES; i++)
            pair(last, (u32)outer[i], (u32)(outer[i] >> 32), last_keys + 2 * i);
    }
#pragma unroll
    for (int away = 16; away > 0; away /= 2) {
        any |= __shfl_xor_sync(0xffffffffu, any, away);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            last[pass] += __shfl_xor_sync(0xffffffffu, last[pass], away);
    }
    __shared__ u64 of_warps[THREADS / 32][PASSES + 1];
    if (lane == 0) {
        for (int pass = 0; pass < PASSES; pass++)
            of_warps[warp][pass] = last[pass];
        of_warps[warp][PASSES] = any;
    }
    __syncthreads();
    if (thread <= PASSES) {
        u64 sum = 0, all = 0;
        for (int i = 0; i < THREADS / 32; i++) {
            sum += of_warps[i][thread];
            all |= of_warps[i][thread];
        }
        found[blockIdx.x * 5 + thread] = thread == PASSES ? all : sum;
    }
}
