//! Looks at blocks of host memory: which may be equal, which are, and one copy of those that nobody can write.
//!
//! ```text
//!   Look:   some pages of a block, at places that nobody else knows ──hash──> sample
//!   Merge:  blocks of one sample ──read, compared byte by byte──> new memory file ──sealed, opened again to be read──> handed out
//! ```
//! A sample is a hint, never a proof. The proof is that the very bytes which were compared with one block were written to the file, or
//! compared with what it has: a program may write its own segment at any time, and harms nobody but itself by it. After the seal (no write,
//! no change of size, no other seal) no process can change the file, the daemon included, whoever has which descriptor. It is handed out
//! opened to be read, since kernels before 6.7 refuse to map a sealed file that is open to be written.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use ebb_units::{Bytes, GRANULE};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::sys::Window;

/// What is compared and had in common as a whole.
pub(crate) const BLOCK: Bytes = GRANULE;
const PAGE: u64 = 4096;
/// Pages of a sample: a sixty-fourth of the block.
const PAGES: usize = 8;

/// What a few pages of a block hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sample(pub(crate) u128);

/// Which pages, and the hash's seed. Nobody but this daemon knows.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret {
    seed: u64,
    pages: [u64; PAGES],
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Of 32 random bytes.
    pub(crate) fn of(random: [u8; 32]) -> Self {
        let (head, rest) = random.split_at(8);
        let seed = u64::from_le_bytes(head.try_into().unwrap_or_default());
        // One page in each eighth, so that they differ.
        let span = BLOCK.0 / PAGE / PAGES as u64;
        let mut pages = [0; PAGES];
        for (n, (page, two)) in pages.iter_mut().zip(rest.as_chunks::<2>().0).enumerate() {
            *page = n as u64 * span + u64::from(u16::from_le_bytes(*two)) % span;
        }
        Self { seed, pages }
    }
}

/// A block.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) memory: Arc<OwnedFd>,
    pub(crate) offset: u64,
}

/// Blocks that may be equal.
#[derive(Clone, Debug)]
pub(crate) struct Alike {
    pub(crate) first: Block,
    /// The first is in a sealed file already.
    pub(crate) sealed: bool,
    pub(crate) others: Vec<Block>,
}

/// Something that takes time.
#[derive(Debug)]
pub(crate) enum Job {
    Look { blocks: Vec<Block>, secret: Arc<Secret> },
    Merge { key: u64, alike: Vec<Alike> },
}

/// How it ended.
#[derive(Debug)]
pub(crate) enum Done {
    /// In order; `None`: it cannot be read.
    Looked(Vec<Option<Sample>>),
    Merged {
        key: u64,
        result: Result<Merged, Errno>,
    },
}

/// What was found to be equal.
#[derive(Debug)]
pub(crate) struct Merged {
    /// The new file, and its size; `None`: there is nothing in it.
    pub(crate) memory: Option<(Arc<OwnedFd>, Bytes)>,
    /// In order; `None`: it was not come to, for want of memory.
    pub(crate) found: Vec<Option<Found>>,
}

/// What was found of one [`Alike`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Where in the new file.
    pub(crate) at: Option<u64>,
    /// Which of the others are equal.
    pub(crate) equal: Vec<bool>,
}

impl Job {
    /// Does it.
    pub(crate) fn run(self) -> Done {
        match self {
            Self::Look { blocks, secret } => {
                Done::Looked(blocks.iter().map(|block| look(block, &secret).ok()).collect())
            }
            Self::Merge { key, alike } => Done::Merged {
                key,
                result: merge(&alike),
            },
        }
    }
}

fn read(block: &Block, from: u64, buffer: &mut [u8]) -> Result<(), Errno> {
    let (mut at, mut rest) = (block.offset + from, buffer);
    while !rest.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::pread(&*block.memory, &mut *rest, at))? {
            0 => return Err(Errno::IO),
            n => {
                rest = &mut rest[n..];
                at += n as u64;
            }
        }
    }
    Ok(())
}

fn look(block: &Block, secret: &Secret) -> Result<Sample, Errno> {
    let mut pages = [0; PAGES * PAGE as usize];
    for (page, part) in secret
        .pages
        .iter()
        .zip(pages.as_chunks_mut::<{ PAGE as usize }>().0)
    {
        read(block, page * PAGE, part)?;
    }
    Ok(Sample(xxh3_128_with_seed(&pages, secret.seed)))
}

/// A file in the making.
struct Writing {
    memory: OwnedFd,
    window: Window,
    used: u64,
}

impl Writing {
    fn new(bytes: u64) -> Result<Self, Errno> {
        let memory = rustix::fs::memfd_create("ebb-common", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&memory, bytes)?;
        let window = Window::new(&memory, bytes)?;
        Ok(Self {
            memory,
            window,
            used: 0,
        })
    }

    /// Adds a block; where.
    fn add(&mut self, bytes: &[u8]) -> Result<u64, Errno> {
        let at = self.used;
        self.window.populate(at, bytes.len())?;
        self.window.write(at, bytes)?;
        self.used += bytes.len() as u64;
        Ok(at)
    }

    /// From here on nobody can write it.
    fn seal(self) -> Result<Option<(Arc<OwnedFd>, Bytes)>, Errno> {
        let Self { memory, window, used } = self;
        drop(window);
        if used == 0 {
            return Ok(None);
        }
        rustix::fs::ftruncate(&memory, used)?;
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals)?;
        let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let read_only = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Some((Arc::new(read_only), Bytes(used))))
    }
}

fn merge(alike: &[Alike]) -> Result<Merged, Errno> {
    let new = alike.iter().filter(|one| !one.sealed).count() as u64;
    let mut writing = (new > 0).then(|| Writing::new(new * BLOCK.0)).transpose()?;
    let (mut one, mut other) = (vec![0; BLOCK.to_usize()], vec![0; BLOCK.to_usize()]);
    let mut found = Vec::with_capacity(alike.len());
    for group in alike {
        let readable = read(&group.first, 0, &mut one).is_ok();
        let equal: Vec<bool> = group
            .others
            .iter()
            .map(|block| readable && read(block, 0, &mut other).is_ok() && one == other)
            .collect();
        let mut at = None;
        if !group.sealed
            && equal.contains(&true)
            && let Some(writing) = &mut writing
        {
            match writing.add(&one) {
                Ok(place) => at = Some(place),
                Err(error) if writing.used == 0 => return Err(error),
                // What there is is good; the rest is for another time.
                Err(_) => break,
            }
        }
        found.push(Some(Found { at, equal }));
    }
    found.resize(alike.len(), None);
    let memory = writing.map_or(Ok(None), Writing::seal)?;
    Ok(Merged { memory, found })
}

/// Whether nobody can write this file any more, and it has this size.
pub(crate) fn is_sealed(memory: &OwnedFd, bytes: Bytes) -> bool {
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let sealed = rustix::fs::fcntl_get_seals(memory).is_ok_and(|found| found.contains(seals));
    let size = rustix::fs::fstat(memory).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    sealed && size == bytes.0 && size > 0 && size.is_multiple_of(BLOCK.0)
}

/// The file, to be mapped by programs: tests read it by this.
#[cfg(test)]
pub(crate) fn content(memory: &OwnedFd, at: u64) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::from(memory.try_clone().unwrap());
    let mut bytes = vec![0; BLOCK.to_usize()];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn memory(blocks: &[u8]) -> Arc<OwnedFd> {
        let memory = crate::arena::make(Bytes(BLOCK.0 * blocks.len() as u64), false).unwrap();
        let file = File::from(memory.try_clone().unwrap());
        for (n, seed) in blocks.iter().enumerate() {
            let bytes: Vec<u8> = (0..BLOCK.0).map(|at| (at / 7) as u8 ^ seed).collect();
            file.write_all_at(&bytes, n as u64 * BLOCK.0).unwrap();
        }
        Arc::new(memory)
    }

    fn block(memory: &Arc<OwnedFd>, n: u64) -> Block {
        Block {
            memory: memory.clone(),
            offset: n * BLOCK.0,
        }
    }

    fn merged(alike: Vec<Alike>) -> Merged {
        match (Job::Merge { key: 1, alike }).run() {
            Done::Merged { result, .. } => result.unwrap(),
            Done::Looked(_) => unreachable!(),
        }
    }

    #[test]
    fn samples_are_of_the_content_and_the_secret() {
        let (a, b) = (memory(&[1, 2]), memory(&[2]));
        let look = |secret: &Secret| {
            let blocks = vec![block(&a, 0), block(&a, 1), block(&b, 0), block(&b, 1)];
            let secret = Arc::new(secret.clone());
            match (Job::Look { blocks, secret }).run() {
                Done::Looked(samples) => samples,
                Done::Merged { .. } => unreachable!(),
            }
        };
        let one = look(&Secret::of([7; 32]));
        assert!(one[0].is_some() && one[0] != one[1] && one[1] == one[2]);
        assert_eq!(one[3], None, "behind the end there is nothing to read");
        assert_ne!(look(&Secret::of([8; 32]))[0], one[0]);
        assert_eq!(format!("{:?}", Secret::of([7; 32])), "Secret");
    }

    #[test]
    fn what_is_equal_is_in_a_file_that_nobody_can_write() {
        let (a, b) = (memory(&[1, 2, 3]), memory(&[1, 2, 3]));
        // The last byte alone differs, which no sample has to see.
        let file = File::from(b.try_clone().unwrap());
        file.write_all_at(&[0xFF], 2 * BLOCK.0 - 1).unwrap();
        let alike = (0..3)
            .map(|n| Alike {
                first: block(&a, n),
                sealed: false,
                others: vec![block(&b, n)],
            })
            .collect();
        let merged = merged(alike);
        let (common, bytes) = merged.memory.unwrap();
        assert_eq!(bytes, Bytes(2 * BLOCK.0));
        let equal = |n: usize| merged.found[n].clone().unwrap();
        assert_eq!(
            (equal(0).at, equal(1).at, equal(2).at),
            (Some(0), None, Some(BLOCK.0))
        );
        assert_eq!(equal(1).equal, [false]);
        assert!(content(&common, BLOCK.0) == content(&a, 2 * BLOCK.0));
        assert!(is_sealed(&common, bytes) && !is_sealed(&a, Bytes(3 * BLOCK.0)));
        // By no way that a program has.
        let path = format!("/proc/self/fd/{}", common.as_raw_fd());
        if let Ok(again) = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            assert_eq!(rustix::io::pwrite(&again, &[1], 0), Err(Errno::PERM));
            assert!(rustix::fs::ftruncate(&again, 0).is_err());
            assert!(Window::new(&again, bytes.0).is_err(), "nor mapped to be written");
        }
        assert!(rustix::io::pwrite(&*common, &[1], 0).is_err());
    }

    #[test]
    fn who_comes_later_is_compared_with_the_sealed_file() {
        let (a, b, c) = (memory(&[1]), memory(&[1]), memory(&[1, 9]));
        let common = merged(vec![Alike {
            first: block(&a, 0),
            sealed: false,
            others: vec![block(&b, 0)],
        }]);
        let (common, _) = common.memory.unwrap();
        let later = merged(vec![Alike {
            first: block(&common, 0),
            sealed: true,
            others: vec![block(&c, 0), block(&c, 1), block(&c, 7)],
        }]);
        assert!(later.memory.is_none());
        let found = later.found[0].clone().unwrap();
        assert_eq!((found.at, found.equal), (None, vec![true, false, false]));
    }
}
