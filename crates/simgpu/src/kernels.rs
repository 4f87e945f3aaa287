//! The built-in kernels, with the same arithmetic as their PTX twins in `ptx/kernels.ptx`.
//!
//! | name | parameters | what it does |
//! | --- | --- | --- |
//! | `ebb_fill` | `u64 ptr, u64 n, u32 seed, u32 step` | writes `mix(i, seed, step)` to word `i` of `n` 32-bit words |
//! | `ebb_check` | `u64 ptr, u64 n, u32 seed, u32 step, u64 result` | adds the number of words that differ to the 64-bit word at `result` |
//! | `ebb_saxpy` | `u64 y, u64 x, f32 a, u64 n` | `y[i] = a * x[i] + y[i]`, rounded twice |
//! | `ebb_sum` | `u64 ptr, u64 n, u64 result` | adds the sum of `n` 32-bit words to the 64-bit word at `result` |
//! | `ebb_touch` | `u64 ptr, u64 n, u64 stride` | adds one to every `stride`-th of `n` 32-bit words |
//! | `ebb_spin` | `u64 nanoseconds` | runs for a time |
//! | `ebb_spin_until` | `u64 flag` | runs until the 32-bit word at `flag` is not zero |
//! | `ebb_empty` | | does nothing |
//! | `ebb_print` | `u64 blocks, u64 keys, u64 found` | fingerprints a block in each group of threads (in `fingerprint.rs`) |
//! | `ebb_local` | `u64 out, u64 index` | writes the low ten bits of `index` to the 32-bit word at `out`, by way of a table in local memory (in `ptx/local.ptx`) |

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ebb_abi::CUresult;
use ebb_simdev::now_ns;

use crate::context::Shared;
use crate::fingerprint;
use crate::work::{pieces, with_span};

/// The word at a position of a pattern: depends on position, seed and step in every bit.
pub(crate) fn mix(index: u32, seed: u32, step: u32) -> u32 {
    let mut x = index.wrapping_mul(0x9E37_79B1) ^ seed;
    x = x.wrapping_add(step.wrapping_mul(0x85EB_CA6B));
    x ^= x >> 15;
    x = x.wrapping_mul(0x2C1B_3C6D);
    x ^= x >> 12;
    x = x.wrapping_mul(0x297A_2D39);
    x ^ (x >> 15)
}

/// Which built-in kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Builtin {
    Fill,
    Check,
    Saxpy,
    Sum,
    Touch,
    Spin,
    SpinUntil,
    Empty,
    Local,
    Print,
}

impl Builtin {
    pub(crate) fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "ebb_fill" => Self::Fill,
            "ebb_check" => Self::Check,
            "ebb_saxpy" => Self::Saxpy,
            "ebb_sum" => Self::Sum,
            "ebb_touch" => Self::Touch,
            "ebb_spin" => Self::Spin,
            "ebb_spin_until" => Self::SpinUntil,
            "ebb_empty" => Self::Empty,
            "ebb_local" => Self::Local,
            "ebb_print" => Self::Print,
            _ => return None,
        })
    }

    /// The sizes of its parameters in bytes. Each is aligned to its size.
    pub(crate) fn parameters(self) -> &'static [usize] {
        match self {
            Self::Fill => &[8, 8, 4, 4],
            Self::Check => &[8, 8, 4, 4, 8],
            Self::Saxpy => &[8, 8, 4, 8],
            Self::Sum | Self::Touch | Self::Print => &[8, 8, 8],
            Self::Local => &[8, 8],
            Self::Spin | Self::SpinUntil => &[8],
            Self::Empty => &[],
        }
    }
}

/// Where parameters of these sizes lie in a parameter buffer.
pub(crate) fn offsets(sizes: &[usize]) -> Vec<usize> {
    let mut at = 0_usize;
    sizes
        .iter()
        .map(|size| {
            let offset = at.next_multiple_of(*size);
            at = offset + size;
            offset
        })
        .collect()
}

/// Most parameters that a built-in kernel has.
pub(crate) const MAX_PARAMETERS: usize = 5;

/// A kernel with its parameters, each as the low bytes of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    pub(crate) kernel: Builtin,
    /// The function's handle, for those who ask a graph's node.
    pub(crate) function: usize,
    pub(crate) parameters: [u64; MAX_PARAMETERS],
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
}

impl Launch {
    pub(crate) fn run(&self, context: &Shared) -> Result<(), CUresult> {
        let [a, b, c, d, e] = self.parameters;
        if !self.is_aligned() {
            return Err(CUresult::ERROR_MISALIGNED_ADDRESS);
        }
        match self.kernel {
            Builtin::Fill => each_word(context, a, b, true, |at, index| {
                // SAFETY: `each_word` gives words that may be written.
                unsafe { (at as *mut u32).write(mix(index as u32, c as u32, d as u32)) };
            }),
            Builtin::Check => {
                let mut wrong = 0_u64;
                each_word(context, a, b, false, |at, index| {
                    // SAFETY: `each_word` gives words that may be read.
                    let word = unsafe { (at as *const u32).read() };
                    wrong += u64::from(word != mix(index as u32, c as u32, d as u32));
                })?;
                add(context, e, wrong)
            }
            Builtin::Saxpy => {
                let factor = f32::from_bits(c as u32);
                for (offset, bytes) in pieces(d * 4) {
                    with_span(context, b + offset, bytes, false, |_| ())?;
                    with_span(context, a + offset, bytes, true, |_| ())?;
                    let mut x = vec![0_f32; (bytes / 4) as usize];
                    with_span(context, b + offset, bytes, false, |at| {
                        for (index, value) in x.iter_mut().enumerate() {
                            // SAFETY: the span may be read while it is given.
                            *value = unsafe { (at as *const f32).add(index).read() };
                        }
                    })?;
                    with_span(context, a + offset, bytes, true, |at| {
                        for (index, value) in x.iter().enumerate() {
                            // SAFETY: the span may be written while it is given.
                            unsafe {
                                let y = (at as *mut f32).add(index);
                                y.write(factor * value + y.read());
                            }
                        }
                    })?;
                }
                Ok(())
            }
            Builtin::Sum => {
                let mut sum = 0_u64;
                each_word(context, a, b, false, |at, _| {
                    // SAFETY: `each_word` gives words that may be read.
                    sum = sum.wrapping_add(u64::from(unsafe { (at as *const u32).read() }));
                })?;
                add(context, c, sum)
            }
            Builtin::Touch => {
                let stride = c.max(1);
                let mut index = 0;
                while index < b {
                    with_span(context, a + index * 4, 4, true, |at| {
                        // SAFETY: the word may be written while it is given.
                        unsafe {
                            let word = at as *mut u32;
                            word.write(word.read().wrapping_add(1));
                        }
                    })?;
                    index += stride;
                }
                Ok(())
            }
            Builtin::Spin => {
                let end = now_ns() + a;
                while now_ns() < end && !context.is_dying() {
                    let left = end.saturating_sub(now_ns());
                    if left > 200_000 {
                        std::thread::sleep(Duration::from_nanos((left - 100_000).min(2_000_000)));
                    }
                }
                Ok(())
            }
            Builtin::SpinUntil => loop {
                let set = with_span(context, a, 4, false, |at| {
                    // SAFETY: the word may be read while it is given, and is aligned.
                    unsafe { (*(at as *const AtomicU32)).load(Ordering::Acquire) != 0 }
                })?;
                if set || context.is_dying() {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_micros(50));
            },
            Builtin::Local => with_span(context, a, 4, true, |at| {
                // SAFETY: the word may be written while it is given, and is aligned.
                unsafe { (at as *mut u32).write(b as u32 & 1023) };
            }),
            Builtin::Print => fingerprint::run(context, self.grid[0], a, b, c),
            Builtin::Empty => Ok(()),
        }
    }

    /// Whether the addresses among the parameters have the alignment that the kernel's accesses need.
    fn is_aligned(&self) -> bool {
        let [a, b, c, _, e] = self.parameters;
        match self.kernel {
            Builtin::Fill | Builtin::Touch | Builtin::SpinUntil | Builtin::Local => a % 4 == 0,
            Builtin::Check => a % 4 == 0 && e % 8 == 0,
            Builtin::Saxpy => a % 4 == 0 && b % 4 == 0,
            Builtin::Sum => a % 4 == 0 && c % 8 == 0,
            Builtin::Print => a % 8 == 0 && b % 4 == 0 && c % 8 == 0,
            Builtin::Spin | Builtin::Empty => true,
        }
    }
}

fn each_word(
    context: &Shared,
    address: u64,
    count: u64,
    write: bool,
    mut body: impl FnMut(u64, u64),
) -> Result<(), CUresult> {
    for (offset, bytes) in pieces(count * 4) {
        with_span(context, address + offset, bytes, write, |at| {
            for word in 0..bytes / 4 {
                body(at + word * 4, offset / 4 + word);
            }
        })?;
    }
    Ok(())
}

fn add(context: &Shared, address: u64, value: u64) -> Result<(), CUresult> {
    with_span(context, address, 8, true, |at| {
        // SAFETY: the word may be written while it is given, and is aligned (checked above).
        unsafe { (*(at as *const AtomicU64)).fetch_add(value, Ordering::AcqRel) };
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_depends_on_everything() {
        assert_ne!(mix(0, 1, 0), mix(1, 1, 0));
        assert_ne!(mix(0, 1, 0), mix(0, 2, 0));
        assert_ne!(mix(0, 1, 0), mix(0, 1, 1));
        // A frozen value, computed outside of this crate: the PTX twin and workers elsewhere depend on it.
        assert_eq!(mix(12345, 678, 9), 0x4d2c_a4ac);
    }

    #[test]
    fn parameters_are_laid_out_as_in_c() {
        assert_eq!(offsets(Builtin::Check.parameters()), [0, 8, 16, 20, 24]);
        assert_eq!(offsets(Builtin::Saxpy.parameters()), [0, 8, 16, 24]);
    }
}
