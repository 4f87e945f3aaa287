//! [`Kind`]: the policies by name.

use super::buddy::Buddy;
use super::fit::{Choice, Fit};
use super::gmlake::Gmlake;
use super::ours::Ours;
use super::policy::Policy;
use super::torch::Torch;

/// What blocks are rounded to where a policy has no rule of its own: what PyTorch rounds to.
const UNIT: u64 = 512;

/// A policy that can be replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Our pool.
    Ebb,
    /// Our pool, which meshes granules in every pause.
    EbbMesh,
    /// The smallest hole of one arena.
    BestFit,
    /// The lowest hole of one arena.
    FirstFit,
    /// Powers of two.
    Buddy,
    /// A model of PyTorch's caching allocator.
    Torch,
    /// The same with expandable segments.
    TorchExpandable,
    /// A model of GMLake.
    Gmlake,
}

impl Kind {
    /// All of them, ours first.
    pub const ALL: [Self; 8] = [
        Self::Ebb,
        Self::EbbMesh,
        Self::BestFit,
        Self::FirstFit,
        Self::Buddy,
        Self::Torch,
        Self::TorchExpandable,
        Self::Gmlake,
    ];

    /// Its name, in tables and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ebb => "ebb",
            Self::EbbMesh => "ebb-mesh",
            Self::BestFit => "best-fit",
            Self::FirstFit => "first-fit",
            Self::Buddy => "buddy",
            Self::Torch => "pytorch",
            Self::TorchExpandable => "pytorch-expandable",
            Self::Gmlake => "gmlake",
        }
    }

    /// Those that are replayed if nobody says which: pauses of a recording are no time in which a program may be stopped.
    pub fn usual() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| *kind != Self::EbbMesh)
    }

    /// The one of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// An empty one that may hold so many physical bytes.
    #[must_use]
    pub fn make(self, capacity: u64) -> Box<dyn Policy> {
        match self {
            Self::Ebb => Box::new(Ours::new(capacity)),
            Self::EbbMesh => Box::new(Ours::meshing(capacity)),
            Self::BestFit => Box::new(Fit::new(Choice::Best, capacity, UNIT)),
            Self::FirstFit => Box::new(Fit::new(Choice::First, capacity, UNIT)),
            Self::Buddy => Box::new(Buddy::new(capacity)),
            Self::Torch => Box::new(Torch::new(capacity, false)),
            Self::TorchExpandable => Box::new(Torch::new(capacity, true)),
            Self::Gmlake => Box::new(Gmlake::new(capacity)),
        }
    }
}
