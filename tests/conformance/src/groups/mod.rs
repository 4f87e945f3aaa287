//! The behaviours, a file for each part of the interface.

mod alloc;
mod contexts;
mod copy;
mod entry;
mod graph_changes;
mod graphs;
mod green;
mod host;
mod info;
mod managed;
mod modules;
mod nvml;
mod pointer;
mod pools;
mod share;
mod streams;
mod vmm;

use crate::behaviour::Behaviour;

/// All of them.
pub(crate) fn all() -> impl Iterator<Item = &'static Behaviour> {
    GROUPS.iter().copied().flatten()
}

const GROUPS: &[&[Behaviour]] = &[
    alloc::ALL,
    contexts::ALL,
    copy::ALL,
    entry::ALL,
    graph_changes::ALL,
    graphs::ALL,
    green::ALL,
    host::ALL,
    info::ALL,
    managed::ALL,
    modules::ALL,
    nvml::ALL,
    pointer::ALL,
    pools::ALL,
    share::ALL,
    streams::ALL,
    vmm::ALL,
];
