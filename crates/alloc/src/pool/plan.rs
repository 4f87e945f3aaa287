//! [`Plan`]: what the driver has to do before a pool can go on, as a value; [`Backing`]: who does it.
//!
//! The pool calls nobody. What an operation needs from the driver it hands out as a list of [`Call`]s; the caller makes
//! them in order, holding no lock, and tells [`Pool::finish`](super::Pool::finish) how many were done. The pool enters
//! exactly these. So a call that fails, the first or the last, leaves books that say what is.

use super::chunks::ChunkId;
use super::runs::{Owner, Run};
use super::{Mark, Stream, Works};

/// One call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Wait until the stream's work has come to this mark: what follows takes mappings away that it may use.
    Wait {
        /// Whose work.
        stream: Stream,
        /// How far.
        mark: Mark,
    },
    /// Make physical memory, under this id from now on.
    #[doc(alias = "cuMemCreate")]
    Create {
        /// Its id.
        chunk: ChunkId,
        /// Its size, whole granules.
        len: u64,
    },
    /// Map a chunk, readable and writable.
    #[doc(alias = "cuMemMap")]
    Map {
        /// Which.
        chunk: ChunkId,
        /// Where: nothing is mapped there.
        at: u64,
        /// Its size.
        len: u64,
    },
    /// Take one mapping of a chunk away.
    #[doc(alias = "cuMemUnmap")]
    Unmap {
        /// Which.
        chunk: ChunkId,
        /// Where.
        at: u64,
        /// Its size.
        len: u64,
    },
    /// Copy bytes of one chunk into another, at the same offset, and wait until they are there. Both are mapped.
    #[doc(alias = "cuMemcpyDtoD")]
    Copy {
        /// From which.
        from: ChunkId,
        /// To which.
        to: ChunkId,
        /// Where in both.
        offset: u64,
        /// An address of the first byte to read.
        source: u64,
        /// An address of the first byte to write.
        target: u64,
        /// How many bytes.
        len: u64,
    },
    /// Give a chunk back. It is mapped nowhere.
    #[doc(alias = "cuMemRelease")]
    Release {
        /// Which.
        chunk: ChunkId,
        /// Its size.
        len: u64,
    },
}

/// Who makes the calls: the driver, a simulation of it, or a count.
pub trait Backing {
    /// What can go wrong.
    type Error;

    /// Makes one call.
    ///
    /// # Errors
    /// If it was not done. Nothing may be left of a call that failed.
    fn call(&mut self, call: &Call) -> Result<(), Self::Error>;
}

/// Calls to be made, and what they are for.
///
/// Holding one tells you: what it uses is reserved, nobody else gets it. It has to go back to the pool, done or not.
#[must_use = "what a plan uses stays reserved until the pool hears what became of it"]
#[derive(Debug)]
pub struct Plan {
    /// How many plans there were with it.
    pub(super) number: u64,
    pub(super) calls: Vec<Call>,
    pub(super) aim: Aim,
    /// Free bytes of chunks in use that were taken out: they return first.
    pub(super) held: Vec<(u64, Run)>,
    /// Chunks that take part, old and new, and who may use their bytes if nothing comes of it.
    pub(super) chunks: Vec<(ChunkId, Owner, Mark)>,
    /// Addresses that may have nothing behind them afterwards.
    pub(super) ranges: Vec<(u64, u64)>,
    /// Mappings beside homes that it takes away, and the work that may use them.
    pub(super) unmaps: Vec<(u64, Works)>,
    /// Mappings in views that are made anew, in parts: start and length.
    pub(super) kept: Vec<(u64, u64)>,
    /// Chunks that it holds only to take mappings of them away.
    pub(super) swept: Vec<ChunkId>,
}

/// What a plan is for.
#[derive(Debug)]
pub(super) enum Aim {
    /// A block at these addresses.
    Block {
        at: u64,
        size: u64,
        len: u64,
        stream: Stream,
        /// It lies in a view that is made for it.
        view: Option<Draft>,
    },
    /// Less memory, or fewer mappings.
    Less,
    /// The blocks of this chunk in another one, at the addresses that they have; or what is left of such a plan put right.
    Mesh(ChunkId),
}

/// A view to be.
#[derive(Debug)]
pub(super) struct Draft {
    /// Where its mappings begin, and all their bytes.
    pub(super) base: u64,
    pub(super) len: u64,
    /// The bytes of the block, by their home addresses.
    pub(super) extents: Vec<(u64, u64)>,
}

impl Plan {
    pub(super) const fn new(aim: Aim) -> Self {
        Self {
            number: 0,
            calls: Vec::new(),
            aim,
            held: Vec::new(),
            chunks: Vec::new(),
            ranges: Vec::new(),
            unmaps: Vec::new(),
            kept: Vec::new(),
            swept: Vec::new(),
        }
    }

    /// Whether its calls may be made only while no work can touch any block, neither queued nor to come: it moves live bytes.
    #[must_use]
    pub const fn exclusive(&self) -> bool {
        matches!(self.aim, Aim::Mesh(_))
    }

    /// The calls, in the order in which they have to be made.
    #[must_use]
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Makes the calls up to the first that fails: how many were done, and why the next was not.
    pub fn run<B: Backing>(&self, backing: &mut B) -> (usize, Option<B::Error>) {
        for (done, call) in self.calls.iter().enumerate() {
            if let Err(error) = backing.call(call) {
                return (done, Some(error));
            }
        }
        (self.calls.len(), None)
    }
}
