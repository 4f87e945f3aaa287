//! Where ebb is known to answer otherwise than the driver, with the reason. The suite fails on one that is not here, and on
//! one here that agrees (on the simulated GPU, whose answers do not vary). Entries for [`Mode::Plain`] are the simulated
//! GPU's: there it differs from what is known of the real one.

use crate::modes::Mode;

/// Disagreements that are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub names: &'static [&'static str],
    pub modes: &'static [Mode],
    pub why: &'static str,
}

/// However ebb is run.
const EBB: &[Mode] = &[Mode::Ebb, Mode::Evicting, Mode::Strict];

/// All of them.
pub(crate) const KNOWN: &[Known] = &[
    Known {
        names: &["alloc.all_ones_size_is_out_of_memory"],
        modes: EBB,
        why: "a size that overflows when it is rounded up is taken for a bad parameter",
    },
    Known {
        names: &["free.then_use_is_refused"],
        modes: &[Mode::Ebb],
        why: "freed memory stays mapped as cache, so that a use after free is not noticed until it is given back",
    },
    Known {
        names: &["copy.past_the_end_is_invalid"],
        modes: EBB,
        why: "the addresses behind an allocation are reserved by ebb, so that the driver finds out only while it copies",
    },
    Known {
        names: &[
            "pointer.of_an_allocation",
            "pointer.of_a_small_allocation",
            "ipc.memory_is_shared",
            "ipc.small_memory_is_shared",
            "ipc.same_memory_same_handle",
            "ipc.not_in_the_same_process",
            "ipc.memory_outlives_the_maker",
            "ipc.opened_twice",
            "ipc.close_then_use_is_refused",
            "ipc.attributes_of_opened_memory",
        ],
        modes: EBB,
        why: "legacy IPC is not offered for ebb's memory",
    },
    Known {
        names: &["ipc.opened_twice"],
        modes: &[Mode::Plain],
        why: "the simulated GPU maps a handle that is open already a second time",
    },
    Known {
        names: &["pointer.sync_memops_can_be_set"],
        modes: EBB,
        why: "SYNC_MEMOPS is not offered for ebb's memory",
    },
    Known {
        names: &["pointer.only_sync_memops_can_be_set"],
        modes: EBB,
        why: "every attribute is answered as SYNC_MEMOPS is",
    },
    Known {
        names: &["export.dma_buf_of_an_allocation"],
        modes: EBB,
        why: "no dma-buf of ebb's memory yet",
    },
];

/// The reason, if this one is known.
pub(crate) fn why(name: &str, mode: Mode) -> Option<&'static str> {
    KNOWN
        .iter()
        .find(|known| known.names.contains(&name) && known.modes.contains(&mode))
        .map(|known| known.why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_name_behaviours() {
        for name in KNOWN.iter().flat_map(|known| known.names) {
            assert!(
                crate::groups::all().any(|behaviour| behaviour.name == *name),
                "{name}"
            );
        }
    }
}
