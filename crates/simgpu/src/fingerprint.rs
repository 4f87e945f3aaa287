//! The kernel `ebb_print`, word for word what `crates/cuda/kernels/fingerprint.cu` computes.

use ebb_abi::CUresult;

use crate::context::Shared;
use crate::work::with_span;

const LINE_KEYS: usize = 16 * 4 + 6;
const STEP_KEYS: usize = 32 * 8 + 6;
const KEYS: usize = LINE_KEYS + STEP_KEYS + 256 * 8 + 6;
/// Vectors that the lanes together take in a step.
const STEP: usize = 4096;

/// Fingerprints the blocks that a list of addresses and lengths names: five words for each.
pub(crate) fn run(context: &Shared, count: u32, list: u64, keys: u64, found: u64) -> Result<(), CUresult> {
    let words = |at: u64, n: usize| -> Result<Vec<u64>, CUresult> {
        with_span(context, at, n as u64 * 8, false, |at| {
            // SAFETY: the span may be read while it is given, and is aligned (checked before).
            (0..n)
                .map(|i| unsafe { (at as *const u64).add(i).read() })
                .collect()
        })
    };
    let keys: Vec<u32> = with_span(context, keys, KEYS as u64 * 4, false, |at| {
        // SAFETY: as above.
        (0..KEYS)
            .map(|i| unsafe { (at as *const u32).add(i).read() })
            .collect()
    })?;
    for (number, block) in words(list, count as usize * 2)?.chunks_exact(2).enumerate() {
        let (at, bytes) = (block[0], block[1]);
        if at % 16 != 0 {
            return Err(CUresult::ERROR_MISALIGNED_ADDRESS);
        }
        let print = with_span(context, at, bytes, false, |at| {
            // SAFETY: the span may be read while it is given. Nothing else changes it: the kernel's user sees to that.
            let vectors = unsafe { std::slice::from_raw_parts(at as *const [u32; 4], (bytes / 16) as usize) };
            fingerprint(vectors, &keys)
        })?;
        with_span(context, found + number as u64 * 40, 40, true, |at| {
            // SAFETY: the span may be written while it is given, and is aligned (checked before).
            unsafe { (at as *mut [u64; 5]).write(print) };
        })?;
    }
    Ok(())
}

/// The keys of a pair for the four passes, side by side: the processor takes all four at once.
struct PairKeys {
    a: [u32; 4],
    b: [u32; 4],
}

impl PairKeys {
    fn new(keys: &[u32]) -> Self {
        Self {
            a: [keys[0], keys[2], keys[4], keys[6]],
            b: [keys[1], keys[3], keys[5], keys[7]],
        }
    }

    #[inline(always)]
    fn add(&self, sums: &mut [u64; 4], a: u32, b: u32) {
        for (sum, (key_a, key_b)) in sums.iter_mut().zip(self.a.iter().zip(&self.b)) {
            let a = u64::from(a.wrapping_add(*key_a));
            let b = u64::from(b.wrapping_add(*key_b));
            *sum = sum.wrapping_add(a * b);
        }
    }
}

fn fingerprint(vectors: &[[u32; 4]], keys: &[u32]) -> [u64; 5] {
    let (line_keys, far) = keys.split_at(LINE_KEYS);
    let (step_keys, last_keys) = far.split_at(STEP_KEYS);
    let line_keys: [PairKeys; 32] = std::array::from_fn(|pair| PairKeys::new(&line_keys[pair * 2..]));
    let mut sums = [0; 4];
    let mut any = 0;
    for lane in 0..256 {
        let first = lane / 32 * 512 + lane % 32;
        let mut outer = [0; 4];
        for (step, from) in (first..vectors.len()).step_by(STEP).enumerate() {
            let mut line = [0; 4];
            for place in 0..16 {
                let [a, b, c, d] = vectors.get(from + place * 32).copied().unwrap_or_default();
                any |= a | b | c | d;
                line_keys[place * 2].add(&mut line, a, b);
                line_keys[place * 2 + 1].add(&mut line, c, d);
            }
            pairs(&mut outer, line, &step_keys[step * 8..]);
        }
        if first < vectors.len() {
            pairs(&mut sums, outer, &last_keys[lane * 8..]);
        }
    }
    [sums[0], sums[1], sums[2], sums[3], u64::from(any)]
}

fn pairs(outer: &mut [u64; 4], sums: [u64; 4], keys: &[u32]) {
    for (at, sum) in sums.into_iter().enumerate() {
        PairKeys::new(&keys[2 * at..]).add(outer, sum as u32, (sum >> 32) as u32);
    }
}
