//! The behaviours, a file for each part of the interface.

mod alloc;
mod copy;
mod info;
mod pointer;
mod share;
mod vmm;

use crate::behaviour::Behaviour;

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static Behaviour> {
    GROUPS.iter().copied().flatten()
}

const GROUPS: &[&[Behaviour]] = &[
    alloc::ALL,
    copy::ALL,
    info::ALL,
    pointer::ALL,
    share::ALL,
    vmm::ALL,
];
