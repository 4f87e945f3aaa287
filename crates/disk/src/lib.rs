//! The form in which a segment of the host arena lies on disk.
//!
//! ```text
//!   0            header_len(bytes)
//!   | table, hash | block | block | ...          every part begins on a page of the file
//! ```
//! A segment is cut into [`BLOCK`]s. Blocks of zeros are not stored, others as they are or packed ([`Packer`]), as the
//! writer chose for each. The table says where each one is, how it is packed, and what its bytes hash to, under a key of that file and the block's
//! own number, so that a block of another file, of another place or of an earlier time is not taken for it. The table is
//! written last: a file without a whole table holds nothing.
//!
//! Two read it: the daemon, which wrote it, and the library in the program, which gets its bytes back by itself when
//! there is no daemon to do so. What is read is an allegation and checked; nothing here trusts a length or an offset.
//! The hash finds what a disk or a bug did. It is no protection from the file's owner, who could only harm himself.

#![forbid(unsafe_code)]

mod load;
mod pack;
mod table;

pub use load::{LoadError, load};
pub use pack::{Packer, Packing, Planes, Unpacker};
pub use table::{Entry, FormError, Kind, Table, header_len};

/// Bytes of a block; the last one of a segment may be shorter.
pub const BLOCK: usize = 1 << 20;

/// What every part of the file begins on and is padded to: what direct I/O wants at most.
pub const PAGE: usize = 4096;

/// The next page.
#[must_use]
pub const fn padded(len: usize) -> usize {
    len.next_multiple_of(PAGE)
}

/// Whether a block is all zeros.
#[must_use]
pub fn is_zero(block: &[u8]) -> bool {
    let (words, tail) = block.as_chunks::<8>();
    // In one sweep over many words at a time: a search that stops at each word is several times slower.
    tail.iter().all(|byte| *byte == 0)
        && words
            .chunks(512)
            .all(|some| some.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_found_wherever_the_other_byte_is() {
        let mut block = vec![0; 5000];
        assert!(is_zero(&block) && is_zero(&[]));
        for at in [0, 7, 8, 4095, 4096, 4992, 4999] {
            block[at] = 1;
            assert!(!is_zero(&block), "at {at}");
            block[at] = 0;
        }
    }
}
