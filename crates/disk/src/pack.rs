//! Packing blocks, and unpacking them.
//!
//! LZ4 is quick and finds what repeats; weights it makes no smaller. zstd at its lowest level takes about twice as long and packs
//! numbers, too, once their bytes are apart: of a million floats the exponents are alike and the fractions are noise, so a block
//! is put into *planes* first, all first bytes of its numbers, then all second ones. What a block's numbers are nobody tells us: a
//! sample is packed in each order, and the block in the best one.

use std::fmt;

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use zstd::zstd_safe::{CCtx, DCtx, compress_bound};

use crate::{Kind, padded};

/// Higher levels take several times as long and save a hundredth.
const LEVEL: i32 = 1;
/// From the middle of a block: a page of other things at an end says nothing.
const SAMPLE: usize = 64 << 10;

/// How blocks are to be packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// They are stored as they are.
    #[default]
    None,
    /// LZ4: quick; for memory with many equal bytes.
    Lz4,
    /// zstd: slower; packs weights, too.
    Zstd,
}

impl Packing {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::None, Self::Lz4, Self::Zstd];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// In which order the bytes of a block are packed: as numbers of so many bytes, all first bytes first. What is left at the end
/// follows as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planes {
    /// As they are.
    One,
    /// Numbers of two bytes.
    Two,
    /// Numbers of four bytes.
    Four,
}

impl Planes {
    const ALL: [Self; 3] = [Self::One, Self::Two, Self::Four];

    /// Puts bytes into this order.
    fn split(self, plain: &[u8], into: &mut Vec<u8>) {
        into.resize(plain.len(), 0);
        match self {
            Self::One => into.copy_from_slice(plain),
            Self::Two => split::<2>(plain, into),
            Self::Four => split::<4>(plain, into),
        }
    }

    /// And back.
    fn join(self, apart: &[u8], into: &mut [u8]) {
        match self {
            Self::One => into.copy_from_slice(apart),
            Self::Two => join::<2>(apart, into),
            Self::Four => join::<4>(apart, into),
        }
    }
}

fn split<const N: usize>(plain: &[u8], into: &mut [u8]) {
    let (numbers, tail) = plain.as_chunks::<N>();
    let (planes, rest) = into.split_at_mut(numbers.len() * N);
    rest.copy_from_slice(tail);
    for (byte, plane) in planes.chunks_mut(numbers.len().max(1)).enumerate() {
        for (to, number) in plane.iter_mut().zip(numbers) {
            *to = number[byte];
        }
    }
}

fn join<const N: usize>(apart: &[u8], into: &mut [u8]) {
    let (numbers, tail) = into.as_chunks_mut::<N>();
    let (planes, rest) = apart.split_at(numbers.len() * N);
    tail.copy_from_slice(rest);
    for (byte, plane) in planes.chunks(numbers.len().max(1)).enumerate() {
        for (from, number) in plane.iter().zip(numbers.iter_mut()) {
            number[byte] = *from;
        }
    }
}

/// Packs blocks, one after the other.
pub struct Packer {
    packing: Packing,
    /// Made when it is needed first; without memory for it nothing is packed.
    zstd: Option<CCtx<'static>>,
    apart: Vec<u8>,
    packed: Vec<u8>,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer")
            .field("packing", &self.packing)
            .finish_non_exhaustive()
    }
}

impl Packer {
    /// One that packs in this way.
    #[must_use]
    pub fn new(packing: Packing) -> Self {
        Self {
            packing,
            zstd: None,
            apart: Vec::new(),
            packed: Vec::new(),
        }
    }

    /// Packs a block, if that makes it smaller by an eighth and by a page at least. `None`: store it as it is.
    pub fn pack(&mut self, plain: &[u8]) -> Option<(Kind, &[u8])> {
        let (kind, len) = match self.packing {
            Packing::None => return None,
            Packing::Lz4 => {
                self.packed.resize(get_maximum_output_size(plain.len()), 0);
                (Kind::Lz4, compress_into(plain, &mut self.packed).ok()?)
            }
            Packing::Zstd => {
                let from = plain.len().saturating_sub(SAMPLE) / 2 / 4 * 4;
                let sample = &plain[from..(from + SAMPLE).min(plain.len())];
                let lens = Planes::ALL.map(|planes| (self.zstd(planes, sample), planes));
                // Fewer planes are quicker to join: more of them only for a hundredth.
                let mut best = (usize::MAX, Planes::One);
                for (len, planes) in lens.into_iter().filter_map(|(len, planes)| Some((len?, planes))) {
                    if len < best.0 - best.0 / 100 {
                        best = (len, planes);
                    }
                }
                let planes = best.1;
                (Kind::Zstd(planes), self.zstd(planes, plain)?)
            }
        };
        let worth = plain.len() - plain.len() / 8;
        (padded(len) <= worth).then(|| (kind, &self.packed[..len]))
    }

    fn zstd(&mut self, planes: Planes, plain: &[u8]) -> Option<usize> {
        if self.zstd.is_none() {
            self.zstd = CCtx::try_create();
        }
        let context = self.zstd.as_mut()?;
        self.packed.resize(compress_bound(plain.len()), 0);
        let bytes = if planes == Planes::One {
            plain
        } else {
            planes.split(plain, &mut self.apart);
            &self.apart
        };
        context.compress(&mut self.packed[..], bytes, LEVEL).ok()
    }
}

/// Unpacks blocks, one after the other.
#[derive(Default)]
pub struct Unpacker {
    zstd: Option<DCtx<'static>>,
    apart: Vec<u8>,
}

impl fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unpacker")
    }
}

impl Unpacker {
    /// Unpacks a block of which it is known how long it is. `None`: it is not what it should be, and `plain` holds anything; or
    /// there is no memory to do it with.
    pub(crate) fn unpack(&mut self, kind: Kind, stored: &[u8], plain: &mut [u8]) -> Option<()> {
        let len = match kind {
            Kind::Zero | Kind::Plain => return None,
            Kind::Lz4 => decompress_into(stored, plain).ok()?,
            Kind::Zstd(planes) => {
                if self.zstd.is_none() {
                    self.zstd = DCtx::try_create();
                }
                let context = self.zstd.as_mut()?;
                if planes == Planes::One {
                    context.decompress(plain, stored).ok()?
                } else {
                    self.apart.resize(plain.len(), 0);
                    let len = context.decompress(&mut self.apart[..], stored).ok()?;
                    if len == plain.len() {
                        planes.join(&self.apart, plain);
                    }
                    len
                }
            }
        };
        (len == plain.len()).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BLOCK, PAGE};
    use proptest::prelude::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut x = 1u64;
        std::iter::repeat_with(|| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (x >> 56) as u8
        })
        .take(len)
        .collect()
    }

    #[test]
    fn only_what_gets_smaller_is_packed() {
        let half: Vec<u8> = (0..BLOCK)
            .map(|i| if i < BLOCK / 2 { 0 } else { (i * 7) as u8 })
            .collect();
        let noise = noise(BLOCK);
        for packing in [Packing::Lz4, Packing::Zstd] {
            let mut packer = Packer::new(packing);
            let len = packer.pack(&half).map(|(_, packed)| packed.len());
            assert!(
                len.is_some_and(|len| len < BLOCK / 2 + PAGE),
                "{packing}: {len:?}"
            );
            assert_eq!(packer.pack(&noise), None, "{packing}");
            assert_eq!(packer.pack(&[]), None, "{packing}");
        }
        assert_eq!(Packer::new(Packing::None).pack(&half), None);
    }

    #[test]
    fn numbers_are_packed_in_the_planes_that_suit_them() {
        let mut block = noise(BLOCK);
        for number in block.as_chunks_mut::<2>().0 {
            number[1] = 0x3f - number[1] % 3;
        }
        let mut packer = Packer::new(Packing::Zstd);
        let (kind, packed) = packer.pack(&block).unwrap();
        assert_eq!(kind, Kind::Zstd(Planes::Two));
        assert!(packed.len() < BLOCK * 3 / 4, "{}", packed.len());
        assert_eq!(Packer::new(Packing::Lz4).pack(&block), None);
        let mut block = noise(BLOCK);
        for number in block.as_chunks_mut::<4>().0 {
            number[3] = 0xbf - number[3] % 2;
            number[2] = 1;
        }
        assert_eq!(packer.pack(&block).unwrap().0, Kind::Zstd(Planes::Four));
    }

    proptest! {
        #[test]
        fn what_was_put_apart_is_put_together(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            for planes in Planes::ALL {
                let (mut apart, mut back) = (Vec::new(), vec![0; bytes.len()]);
                planes.split(&bytes, &mut apart);
                planes.join(&apart, &mut back);
                prop_assert_eq!(&back, &bytes);
            }
        }

        #[test]
        fn anything_is_unpacked_or_refused_and_never_panics(
            stored in prop::collection::vec(any::<u8>(), 0..200),
            len in 0usize..300,
            framed: bool,
        ) {
            let mut unpacker = Unpacker::default();
            let mut stored = stored;
            if framed {
                // What a frame of zstd begins with.
                stored.splice(0..0, [0x28, 0xb5, 0x2f, 0xfd]);
            }
            let mut plain = vec![0; len];
            for kind in [Kind::Lz4, Kind::Zstd(Planes::One), Kind::Zstd(Planes::Two), Kind::Zstd(Planes::Four)] {
                let _ = unpacker.unpack(kind, &stored, &mut plain);
            }
        }
    }
}
