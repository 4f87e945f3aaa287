//! Reading a whole file in the plain way, block after block.

use std::io;

use crate::{BLOCK, FormError, Kind, Table, Unpacker, header_len};

/// Why a segment could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is not what it should be.
    #[error(transparent)]
    Form(#[from] FormError),
    /// The file cannot be read.
    #[error("reading: {0}")]
    Read(io::Error),
    /// There is no place for what was read.
    #[error("storing what was read: {0}")]
    Write(io::Error),
}

/// Reads a segment of `bytes` by `read` (as `pread`: how much was read, 0 at the end) and hands every block that is not
/// all zeros to `write`, with its place in the segment. Whoever has the place for it begins with zeros.
///
/// # Errors
/// [`LoadError`]; what was handed over until then is right, and incomplete.
pub fn load(
    bytes: u64,
    read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>,
    write: &mut dyn FnMut(&[u8], u64) -> io::Result<()>,
) -> Result<(), LoadError> {
    let mut head = vec![0; header_len(bytes.min(u64::from(u32::MAX)))];
    fill(read, &mut head, 0)?;
    let table = Table::decode(&head, bytes)?;
    let (mut stored, mut plain) = (vec![0; BLOCK], vec![0; BLOCK]);
    let mut unpacker = Unpacker::default();
    for (block, entry) in table.entries.iter().enumerate() {
        let plain = &mut plain[..table.plain_len(block)];
        let stored = &mut stored[..entry.len as usize];
        if entry.kind != Kind::Zero {
            fill(read, stored, entry.at)?;
        }
        table.open(block, stored, plain, &mut unpacker)?;
        if entry.kind != Kind::Zero {
            write(plain, block as u64 * BLOCK as u64).map_err(LoadError::Write)?;
        }
    }
    Ok(())
}

fn fill(
    read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>,
    mut buffer: &mut [u8],
    mut at: u64,
) -> Result<(), LoadError> {
    while !buffer.is_empty() {
        match read(buffer, at) {
            Ok(0) => return Err(LoadError::Read(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => {
                let n = n.min(buffer.len());
                buffer = &mut buffer[n..];
                at += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(LoadError::Read(e)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Entry, PAGE, Packer, Packing, is_zero, padded};

    /// A file as the daemon writes it, packed where that helps.
    fn file(segment: &[u8], packing: Packing) -> Vec<u8> {
        let mut table = Table::new(segment.len() as u64, 5);
        let first = header_len(segment.len() as u64);
        let (mut data, mut packer) = (Vec::new(), Packer::new(packing));
        for (block, plain) in segment.chunks(BLOCK).enumerate() {
            let at = (first + data.len()) as u64;
            let hash = table.hash(block, plain);
            let (at, len, kind) = if is_zero(plain) {
                (0, 0, Kind::Zero)
            } else if let Some((kind, packed)) = packer.pack(plain) {
                data.extend(packed);
                (at, packed.len(), kind)
            } else {
                data.extend(plain);
                (at, plain.len(), Kind::Plain)
            };
            data.resize(padded(data.len()), 0);
            table.entries.push(Entry {
                at,
                len: u32::try_from(len).unwrap(),
                kind,
                hash,
            });
        }
        let mut file = table.encode();
        file.extend(data);
        file
    }

    /// Noise, numbers of two bytes that are alike in one of them, zeros, runs, and an end that is no whole block.
    fn segment() -> Vec<u8> {
        let mut segment = vec![0; 4 * BLOCK + 2 * PAGE];
        let mut x = 9u64;
        let mut random = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (x >> 56) as u8
        };
        segment[..BLOCK].fill_with(&mut random);
        for number in segment[BLOCK..2 * BLOCK].as_chunks_mut::<2>().0 {
            *number = [random(), 0x3c + random() % 4];
        }
        segment[3 * BLOCK + 5..3 * BLOCK + 900].fill(7);
        segment[4 * BLOCK + 1] = 1;
        segment
    }

    fn back(file: &[u8], bytes: usize, most: usize) -> Result<Vec<u8>, LoadError> {
        let mut got = vec![0; bytes];
        load(
            bytes as u64,
            &mut |buffer, at| {
                let rest = file.get(usize::try_from(at).unwrap()..).unwrap_or_default();
                let n = rest.len().min(buffer.len()).min(most);
                buffer[..n].copy_from_slice(&rest[..n]);
                Ok(n)
            },
            &mut |plain, at| {
                let at = usize::try_from(at).unwrap();
                got[at..at + plain.len()].copy_from_slice(plain);
                Ok(())
            },
        )?;
        Ok(got)
    }

    const ALL: [Packing; 3] = [Packing::None, Packing::Lz4, Packing::Zstd];

    #[test]
    fn what_was_stored_comes_back_in_whatever_pieces_it_is_read() {
        let segment = segment();
        let mut sizes = Vec::new();
        for packing in ALL {
            let file = file(&segment, packing);
            sizes.push(file.len());
            for most in [usize::MAX, 4096, 1000] {
                assert!(
                    back(&file, segment.len(), most).unwrap() == segment,
                    "{packing}, at most {most}"
                );
            }
        }
        // The runs are packed by both, the numbers by one.
        assert!(
            sizes[1] < sizes[0] - BLOCK / 2 && sizes[2] < sizes[1] - BLOCK / 4,
            "{sizes:?}"
        );
    }

    #[test]
    fn damage_anywhere_is_an_error_and_never_wrong_bytes() {
        let segment = segment();
        for packing in ALL {
            let good = file(&segment, packing);
            for at in (0..good.len()).step_by(5813).chain(0..40).chain([good.len() - 1]) {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                // Padding is nobody's.
                if let Ok(got) = back(&bad, segment.len(), usize::MAX) {
                    assert!(got == segment, "{packing}, byte {at}");
                }
            }
            assert!(matches!(
                back(&good[..good.len() - 2 * PAGE], segment.len(), usize::MAX),
                Err(LoadError::Read(_))
            ));
        }
        assert!(matches!(
            back(&[], segment.len(), usize::MAX),
            Err(LoadError::Read(_))
        ));
    }

    #[test]
    fn a_block_that_is_packed_in_another_way_than_it_says_is_damaged() {
        let segment = segment();
        for packing in [Packing::Lz4, Packing::Zstd] {
            let file = file(&segment, packing);
            let mut table = Table::decode(&file, segment.len() as u64).unwrap();
            for entry in &mut table.entries {
                entry.kind = match entry.kind {
                    Kind::Lz4 => Kind::Zstd(crate::Planes::One),
                    Kind::Zstd(_) => Kind::Lz4,
                    other => other,
                };
            }
            let mut other = table.encode();
            other.extend(&file[other.len()..]);
            let failed = back(&other, segment.len(), usize::MAX);
            assert!(
                matches!(failed, Err(LoadError::Form(FormError::BlockHash(_)))),
                "{packing}: {failed:?}"
            );
        }
    }
}
