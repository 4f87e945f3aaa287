//! The table of a file: where its blocks are and what they hash to.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::{BLOCK, Planes, Unpacker, padded};

const MAGIC: [u8; 8] = *b"ebb-seg1";
/// Magic, segment bytes, key, count.
const HEAD: usize = 32;
/// Offset, length, kind, hash.
const ENTRY: usize = 24;
const HASH: usize = 8;

/// The largest segment that is read: as much as the daemon's settings allow, and a bound for what is believed.
const MAX_BYTES: u64 = 16 << 30;

/// What is wrong with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// It was never finished, or is no such file at all.
    #[error("the file has no table")]
    NoTable,
    /// The table is damaged.
    #[error("the file's table does not have the hash that stands behind it")]
    TableHash,
    /// It holds another segment.
    #[error("the file holds a segment of {found} bytes and not of {wanted}")]
    Size {
        /// What the file says.
        found: u64,
        /// What was expected.
        wanted: u64,
    },
    /// An entry says what cannot be.
    #[error("block {0} has an impossible place or length")]
    Entry(usize),
    /// A later version may know it.
    #[error("block {block} is packed in a way that this version does not know ({kind})")]
    Packing {
        /// Which block.
        block: usize,
        /// The number of that way.
        kind: u32,
    },
    /// A block is damaged.
    #[error("block {0} does not have the hash that it was written with")]
    BlockHash(usize),
}

/// How a block is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is all zeros and not stored.
    Zero,
    /// As it is.
    Plain,
    /// Packed by LZ4.
    Lz4,
    /// Packed by zstd, after its bytes were put into this order.
    Zstd(Planes),
}

impl Kind {
    /// Its number in a table. Numbers are never used for something else.
    const fn number(self) -> u32 {
        match self {
            Self::Zero => 0,
            Self::Plain => 1,
            Self::Lz4 => 2,
            Self::Zstd(Planes::One) => 3,
            Self::Zstd(Planes::Two) => 4,
            Self::Zstd(Planes::Four) => 5,
        }
    }

    const fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Zero,
            1 => Self::Plain,
            2 => Self::Lz4,
            3 => Self::Zstd(Planes::One),
            4 => Self::Zstd(Planes::Two),
            5 => Self::Zstd(Planes::Four),
            _ => return None,
        })
    }
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where in the file, in bytes: a multiple of a page.
    pub at: u64,
    /// Stored bytes, without padding.
    pub len: u32,
    /// How.
    pub kind: Kind,
    /// Hash of the plain bytes, see [`Table::hash`].
    pub hash: u64,
}

/// The table of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    bytes: u64,
    key: u64,
    /// One for each block, in order.
    pub entries: Vec<Entry>,
}

/// Bytes of the table of a segment of so many bytes, padded: where the first block may begin.
#[must_use]
pub fn header_len(bytes: u64) -> usize {
    padded(HEAD + ENTRY * blocks(bytes) + HASH)
}

fn blocks(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(BLOCK as u64)).unwrap_or(usize::MAX / (2 * ENTRY))
}

impl Table {
    /// A table with no blocks yet, for a segment of so many bytes. The key should be one that no other file has.
    #[must_use]
    pub fn new(bytes: u64, key: u64) -> Self {
        Self {
            bytes,
            key,
            entries: Vec::with_capacity(blocks(bytes)),
        }
    }

    /// How many blocks the segment has.
    #[must_use]
    pub fn blocks(&self) -> usize {
        blocks(self.bytes)
    }

    /// The bytes of a block before it is packed.
    #[must_use]
    pub fn plain_len(&self, block: usize) -> usize {
        let from = (block as u64).saturating_mul(BLOCK as u64);
        usize::try_from(self.bytes.saturating_sub(from).min(BLOCK as u64)).unwrap_or(BLOCK)
    }

    /// What a block's plain bytes hash to in this file.
    #[must_use]
    pub fn hash(&self, block: usize, plain: &[u8]) -> u64 {
        // Neighbouring numbers must not give seeds that belong together.
        xxh3_64_with_seed(
            plain,
            self.key ^ (block as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15),
        )
    }

    /// The table as bytes, padded: [`header_len`] of them.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(header_len(self.bytes));
        out.extend(MAGIC);
        out.extend(self.bytes.to_le_bytes());
        out.extend(self.key.to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for entry in &self.entries {
            out.extend(entry.at.to_le_bytes());
            out.extend(entry.len.to_le_bytes());
            out.extend(entry.kind.number().to_le_bytes());
            out.extend(entry.hash.to_le_bytes());
        }
        out.extend(xxh3_64(&out).to_le_bytes());
        out.resize(header_len(self.bytes).max(out.len()), 0);
        out
    }

    /// Reads the table of a segment of `bytes` from the first [`header_len`] bytes of its file.
    ///
    /// # Errors
    /// [`FormError`] says why it is none.
    pub fn decode(head: &[u8], bytes: u64) -> Result<Self, FormError> {
        let word = |at: usize| {
            let found = head.get(at..at + 8).and_then(|word| word.try_into().ok());
            found.map(u64::from_le_bytes).ok_or(FormError::NoTable)
        };
        if bytes > MAX_BYTES || head.get(..8) != Some(&MAGIC) {
            return Err(FormError::NoTable);
        }
        let end = HEAD + ENTRY * blocks(bytes);
        let (found, key, count) = (word(8)?, word(16)?, word(24)?);
        if found != bytes {
            return Err(FormError::Size { found, wanted: bytes });
        }
        if count != blocks(bytes) as u64 {
            return Err(FormError::NoTable);
        }
        if word(end)? != xxh3_64(&head[..end]) {
            return Err(FormError::TableHash);
        }
        let mut table = Self::new(bytes, key);
        for (block, raw) in head[HEAD..end].as_chunks::<ENTRY>().0.iter().enumerate() {
            let entry = read_entry(raw).map_err(|kind| FormError::Packing { block, kind })?;
            let plain = table.plain_len(block);
            let len = entry.len as usize;
            let right = match entry.kind {
                Kind::Zero => len == 0,
                Kind::Plain => len == plain,
                Kind::Lz4 | Kind::Zstd(_) => len > 0 && len < plain,
            };
            let first = header_len(bytes) as u64;
            let placed = entry.kind == Kind::Zero
                || entry.at.is_multiple_of(crate::PAGE as u64)
                    && entry.at >= first
                    && entry.at <= first + bytes;
            if !right || !placed {
                return Err(FormError::Entry(block));
            }
            table.entries.push(entry);
        }
        Ok(table)
    }

    /// Unpacks a block if need be and checks it. `stored` holds what the entry says, `plain` has room for the block.
    ///
    /// # Errors
    /// [`FormError::BlockHash`].
    pub fn open(
        &self,
        block: usize,
        stored: &[u8],
        plain: &mut [u8],
        unpacker: &mut Unpacker,
    ) -> Result<(), FormError> {
        let wrong = FormError::BlockHash(block);
        let entry = self.entries.get(block).ok_or(wrong)?;
        match entry.kind {
            Kind::Zero => plain.fill(0),
            Kind::Plain => plain.copy_from_slice(stored.get(..plain.len()).ok_or(wrong)?),
            Kind::Lz4 | Kind::Zstd(_) => unpacker.unpack(entry.kind, stored, plain).ok_or(wrong)?,
        }
        self.check(block, plain)
    }

    /// Checks a block's plain bytes.
    ///
    /// # Errors
    /// [`FormError::BlockHash`].
    pub fn check(&self, block: usize, plain: &[u8]) -> Result<(), FormError> {
        let found = self.entries.get(block).map(|entry| entry.hash);
        if found == Some(self.hash(block, plain)) {
            Ok(())
        } else {
            Err(FormError::BlockHash(block))
        }
    }
}

/// An entry, or the number of a kind that is not known.
fn read_entry(raw: &[u8; ENTRY]) -> Result<Entry, u32> {
    let (at, rest) = raw.split_at(8);
    let (len, rest) = rest.split_at(4);
    let (kind, hash) = rest.split_at(4);
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let half = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    Ok(Entry {
        at: word(at),
        len: half(len),
        kind: Kind::of(half(kind)).ok_or(half(kind))?,
        hash: word(hash),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTES: u64 = 3 * BLOCK as u64 + 4096;

    fn some() -> Table {
        let mut table = Table::new(BYTES, 77);
        let first = header_len(BYTES) as u64;
        for block in 0..table.blocks() {
            let len = table.plain_len(block);
            let entry = match block {
                1 => Entry {
                    at: 0,
                    len: 0,
                    kind: Kind::Zero,
                    hash: table.hash(block, &vec![0; len]),
                },
                2 => Entry {
                    at: first + 8192,
                    len: 5000,
                    kind: Kind::Lz4,
                    hash: 3,
                },
                _ => Entry {
                    at: first + BLOCK as u64 * block as u64 / 4096 * 4096,
                    len: len as u32,
                    kind: Kind::Plain,
                    hash: 9,
                },
            };
            table.entries.push(entry);
        }
        table
    }

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let table = some();
        let bytes = table.encode();
        assert_eq!(bytes.len(), header_len(BYTES));
        assert_eq!(Table::decode(&bytes, BYTES), Ok(table));
        assert_eq!(
            Table::decode(&bytes, BYTES - 4096),
            Err(FormError::Size {
                found: BYTES,
                wanted: BYTES - 4096
            })
        );
        assert_eq!(
            Table::decode(&vec![0; bytes.len()], BYTES),
            Err(FormError::NoTable)
        );
    }

    #[test]
    fn impossible_entries_are_refused_although_the_hash_is_right() {
        let first = header_len(BYTES) as u64;
        let cases: [(usize, Entry); 5] = [
            (
                0,
                Entry {
                    at: first + 1,
                    len: BLOCK as u32,
                    kind: Kind::Plain,
                    hash: 0,
                },
            ),
            (
                0,
                Entry {
                    at: 0,
                    len: BLOCK as u32,
                    kind: Kind::Plain,
                    hash: 0,
                },
            ),
            (
                0,
                Entry {
                    at: first,
                    len: BLOCK as u32 - 1,
                    kind: Kind::Plain,
                    hash: 0,
                },
            ),
            (
                3,
                Entry {
                    at: 1 << 50,
                    len: 4096,
                    kind: Kind::Plain,
                    hash: 0,
                },
            ),
            (
                2,
                Entry {
                    at: first,
                    len: BLOCK as u32,
                    kind: Kind::Lz4,
                    hash: 0,
                },
            ),
        ];
        for (block, entry) in cases {
            let mut table = some();
            table.entries[block] = entry;
            assert_eq!(
                Table::decode(&table.encode(), BYTES),
                Err(FormError::Entry(block)),
                "{entry:?}"
            );
        }
    }

    #[test]
    fn a_kind_of_a_later_version_is_named() {
        let mut bytes = some().encode();
        let end = HEAD + ENTRY * some().blocks();
        bytes[HEAD + 2 * ENTRY + 12] = 77;
        let hash = xxh3_64(&bytes[..end]).to_le_bytes();
        bytes[end..end + HASH].copy_from_slice(&hash);
        let error = Table::decode(&bytes, BYTES).unwrap_err();
        assert_eq!(error, FormError::Packing { block: 2, kind: 77 });
        assert!(error.to_string().contains("does not know (77)"), "{error}");
    }

    #[test]
    fn every_kind_has_a_number_of_its_own() {
        for number in 0..6 {
            assert_eq!(Kind::of(number).map(Kind::number), Some(number));
        }
        assert_eq!(Kind::of(6), None);
    }

    #[test]
    fn a_block_of_another_place_or_file_is_not_taken_for_this_one() {
        let table = some();
        let (a, b) = (table.hash(0, b"same"), table.hash(3, b"same"));
        assert!(a != b && a != Table::new(BYTES, 78).hash(0, b"same"));
    }

    proptest! {
        #[test]
        fn every_changed_byte_is_noticed(at in any::<prop::sample::Index>(), to in 1u8..) {
            let table = some();
            let mut bytes = table.encode();
            let end = HEAD + ENTRY * table.blocks() + HASH;
            let at = at.index(end);
            bytes[at] ^= to;
            prop_assert!(Table::decode(&bytes, BYTES).is_err());
        }

        #[test]
        fn anything_is_refused_and_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400), len in any::<u64>()) {
            prop_assert!(Table::decode(&bytes, len).is_err());
            let mut begun = MAGIC.to_vec();
            begun.extend(bytes);
            prop_assert!(Table::decode(&begun, len % (1 << 24)).is_err());
        }
    }
}
