//! Fingerprints: whether memory still holds what it held, told without comparing it.
//!
//! Memory is taken in blocks of [`BLOCK`] bytes, and each gets a [`Fingerprint`] by a hash with secret random keys. The GPU
//! computes it (`crates/cuda/kernels/fingerprint.cu`); [`Keys::of`] is the same on the processor, for the fake and for tests.
//!
//! # How
//! The building stone is NH, of UMAC: of a list of pairs of 32-bit words `(a, b)` with a pair of keys for each place,
//! `sum((a + k) * (b + k'))`, the inner sums modulo 2^32 and the outer one modulo 2^64. For two different lists of one
//! length it is the same for at most one in 2^32 of all keys. It is done four times; each time uses the keys one pair
//! further on (Toeplitz), which by UMAC's proof is as good as new ones: at the last place that differs, each pass meets
//! a pair of keys that no pass before it used there. So all four are the same for at most one in 2^128 of all keys.
//!
//! ```text
//!   line:   16 vectors of 16 bytes, 512 bytes apart                 32 pairs -> 4 sums   keys by place in the line
//!   lane:   the lines of one thread, one in each step of 64 KiB     32 x 4   -> 4 sums   keys by step
//!   block:  the 256 lanes                                           256 x 4  -> 4 sums   keys by lane
//! ```
//! The four sums of one level, each as a pair of words, are the list of the next. Two different blocks of one length have the
//! same fingerprint if any of three levels fails to tell two different lists apart: for less than **2^-126** of all keys.
//! That holds for blocks that were chosen without knowing the keys; they never leave the process, and a program that
//! reads them out of its own memory can only harm itself. A card of 128 GiB compared a thousand million times: 2^-80.
//!
//! Bytes behind the end of a short block count as zeros as far as their line has begun; lanes without a line add nothing.

/// Bytes of a block. The last block of a range may be shorter.
pub const BLOCK: u64 = 2 << 20;

const LANES: usize = 256;
const LINE: usize = 16;
const STEPS: usize = 32;
const PASSES: usize = 4;
/// By how many words the keys of the next pass are shifted.
const SHIFT: usize = 2;
/// Bytes of a step, of which each lane takes a line.
const STEP: usize = LANES * LINE * 16;

/// 32-bit words of keys for the lines and the lanes, which all lanes use alike.
pub const NEAR_KEYS: usize = LINE_KEYS + STEP_KEYS;
/// 32-bit words of all keys.
pub const KEYS: usize = NEAR_KEYS + LANES * 8 + (PASSES - 1) * SHIFT;
const LINE_KEYS: usize = LINE * 4 + (PASSES - 1) * SHIFT;
const STEP_KEYS: usize = STEPS * 8 + (PASSES - 1) * SHIFT;

/// What a block of memory is known by. Two that are equal, made with the same keys, are of the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// The hash.
    pub sums: [u64; PASSES],
    /// Whether all bytes are zero. This is exact.
    pub zero: bool,
}

/// The secret keys of a process.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys(Box<[u32]>);

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(secret)")
    }
}

impl Keys {
    /// Keys of a source of random bytes, which fills what it is given.
    ///
    /// # Errors
    /// The source's.
    pub fn random<E>(fill: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<Self, E> {
        let mut bytes = vec![0; KEYS * 4];
        fill(&mut bytes)?;
        let words = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|word| u32::from_ne_bytes(*word));
        Ok(Self(words.collect()))
    }

    /// Keys that are no secret, for tests.
    #[must_use]
    pub fn of_seed(seed: u64) -> Self {
        let mut state = seed;
        let mut next = || {
            // SplitMix64.
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut mixed = state;
            mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            low(mixed ^ mixed >> 31)
        };
        Self((0..KEYS).map(|_| next()).collect())
    }

    /// All words, in the order in which the kernel wants them.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// The fingerprint of one block.
    ///
    /// # Panics
    /// If it is longer than [`BLOCK`] or not of whole vectors of 16 bytes.
    #[must_use]
    pub fn of(&self, block: &[u8]) -> Fingerprint {
        let (vectors, rest) = block.as_chunks::<16>();
        assert!(block.len() as u64 <= BLOCK && rest.is_empty());
        let (line_keys, far) = self.0.split_at(LINE_KEYS);
        let (step_keys, last_keys) = far.split_at(STEP_KEYS);
        let mut sums = [0; PASSES];
        for lane in 0..LANES {
            let first = lane / 32 * (LINE * 32) + lane % 32;
            let mut outer = [0; PASSES];
            for (step, from) in (first..vectors.len()).step_by(STEP / 16).enumerate() {
                let mut line = [0; PASSES];
                for place in 0..LINE {
                    let vector = vectors.get(from + place * 32).unwrap_or(&[0; 16]);
                    let words = vector.as_chunks::<4>().0;
                    let word = |at: usize| u32::from_le_bytes(words[at]);
                    pair(&mut line, word(0), word(1), &line_keys[place * 4..]);
                    pair(&mut line, word(2), word(3), &line_keys[place * 4 + 2..]);
                }
                of_sums(&mut outer, line, &step_keys[step * 8..]);
            }
            if first < vectors.len() {
                of_sums(&mut sums, outer, &last_keys[lane * 8..]);
            }
        }
        Fingerprint {
            sums,
            zero: block.iter().all(|byte| *byte == 0),
        }
    }
}

fn low(word: u64) -> u32 {
    (word & u64::from(u32::MAX)) as u32
}

fn pair(sums: &mut [u64; PASSES], a: u32, b: u32, keys: &[u32]) {
    for (pass, sum) in sums.iter_mut().enumerate() {
        let a = a.wrapping_add(keys[pass * SHIFT]);
        let b = b.wrapping_add(keys[pass * SHIFT + 1]);
        *sum = sum.wrapping_add(u64::from(a) * u64::from(b));
    }
}

fn of_sums(outer: &mut [u64; PASSES], sums: [u64; PASSES], keys: &[u32]) {
    for (at, sum) in sums.into_iter().enumerate() {
        pair(outer, low(sum), low(sum >> 32), &keys[2 * at..]);
    }
}

/// The blocks of a range: where each begins, and its bytes.
pub fn blocks(at: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..len.div_ceil(BLOCK)).map(move |n| (at + n * BLOCK, BLOCK.min(len - n * BLOCK)))
}

/// How many blocks a range has.
#[must_use]
pub const fn count(len: u64) -> u64 {
    len.div_ceil(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize, seed: u8) -> Vec<u8> {
        (0u64..)
            .map(|at| crate::conformance::pattern(seed, at))
            .take(len)
            .collect()
    }

    #[test]
    fn every_place_counts() {
        let keys = Keys::of_seed(1);
        for len in [16, 4096, 65536 + 48, BLOCK as usize] {
            let mut block = bytes(len, 1);
            let before = keys.of(&block);
            assert!(!before.zero);
            assert_eq!(keys.of(&block), before);
            for place in [0, 7, 15, len / 2, len - 1] {
                block[place] ^= 0x40;
                assert_ne!(keys.of(&block).sums, before.sums, "{len} bytes, place {place}");
                block[place] ^= 0x40;
            }
            assert_ne!(Keys::of_seed(2).of(&block).sums, before.sums);
        }
    }

    #[test]
    fn words_that_change_places_are_seen() {
        let keys = Keys::of_seed(3);
        let mut block = bytes(256 << 10, 1);
        let before = keys.of(&block);
        // Within a vector, a line, a step, and between steps.
        for (a, b) in [(0, 4), (0, 512), (16, 8192), (32, 65536), (48, 3 * 65536 + 1024)] {
            for byte in 0..4 {
                block.swap(a + byte, b + byte);
            }
            assert_ne!(keys.of(&block).sums, before.sums, "{a} and {b}");
            for byte in 0..4 {
                block.swap(a + byte, b + byte);
            }
        }
    }

    #[test]
    fn zero_is_exact() {
        let keys = Keys::of_seed(4);
        let mut block = vec![0; 128 << 10];
        assert!(keys.of(&block).zero);
        block[(128 << 10) - 1] = 1;
        assert!(!keys.of(&block).zero);
    }

    /// Computed once, by this code: the kernel and the simulated GPU must agree with it on any machine.
    #[test]
    fn a_frozen_value() {
        let print = Keys::of_seed(5).of(&bytes(BLOCK as usize, 9));
        assert_eq!(print.sums, FROZEN);
    }
    const FROZEN: [u64; 4] = [
        0x9266_7A70_5176_F58E,
        0xAB1E_6340_973F_965C,
        0xA3D1_4E21_BF8F_AB38,
        0xD3DB_4C75_1523_9E19,
    ];

    #[test]
    fn blocks_cover_a_range() {
        let all: Vec<_> = blocks(BLOCK, 2 * BLOCK + 4096).collect();
        assert_eq!(all, [(BLOCK, BLOCK), (2 * BLOCK, BLOCK), (3 * BLOCK, 4096)]);
        assert_eq!(count(2 * BLOCK + 4096), 3);
    }

    #[test]
    fn keys_say_nothing_of_themselves() {
        assert_eq!(format!("{:?}", Keys::of_seed(6)), "Keys(secret)");
    }
}
