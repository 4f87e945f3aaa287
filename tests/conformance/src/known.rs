//! Where ebb is known to answer otherwise than the driver, with the reason. The suite fails on one that is not here, and on
//! one here that agrees (on the simulated GPU, whose answers do not vary). Entries for [`Mode::Plain`] are the simulated
//! GPU's: there it differs from what is known of the real one.

use crate::modes::Mode;

/// Disagreements that are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub names: &'static [&'static str],
    pub modes: &'static [Mode],
    /// Whether it is seen in some runs only, because it depends on the moment: then agreeing is no surprise.
    pub sometimes: bool,
    pub why: &'static str,
}

/// However ebb is run.
const EBB: &[Mode] = &[Mode::Ebb, Mode::Evicting, Mode::Strict];

/// All of them.
pub(crate) const KNOWN: &[Known] = &[
    Known {
        names: &["pool.threshold_keeps_memory"],
        modes: &[Mode::Evicting],
        sometimes: true,
        why: "what a pool only keeps is given back before anything is released",
    },
    Known {
        names: &["free.then_use_is_refused"],
        modes: &[Mode::Ebb, Mode::Strict],
        sometimes: false,
        why: "freed memory stays mapped as cache, so that a use after free is not noticed until it is given back",
    },
    Known {
        names: &["copy.past_the_end_is_invalid"],
        modes: EBB,
        sometimes: false,
        why: "the addresses behind an allocation are reserved by ebb, so that the driver finds out only while it copies",
    },
    Known {
        names: &["stream.illegal_address_stays"],
        modes: &[Mode::Plain],
        sometimes: false,
        why: "the simulated GPU frees memory in a broken context",
    },
    Known {
        names: &["stream.illegal_address_stays"],
        modes: EBB,
        sometimes: false,
        why: "an allocation from the pool asks the driver nothing, so that it succeeds in a broken context",
    },
    Known {
        names: &["context.destroyed_gives_memory_back"],
        modes: EBB,
        sometimes: false,
        why: "what the driver takes for a context is measured from time to time, so that it is counted a little longer",
    },
    Known {
        names: &["context.a_thread_with_none", "context.free_in_a_thread_with_none"],
        modes: EBB,
        sometimes: false,
        why: "ranges and frees of ebb's memory are answered without asking for a current context",
    },
    Known {
        names: &[
            "capture.alloc_in_global_mode",
            "capture.alloc_in_thread_local_mode",
        ],
        modes: EBB,
        sometimes: false,
        why: "an allocation from the pool asks the driver nothing, so that it succeeds where a capture forbids it",
    },
    Known {
        names: &["copy.of_another_devices_memory"],
        modes: EBB,
        sometimes: false,
        why: "ebb's memory of one device is not shown to the others before peer access is enabled",
    },
    Known {
        names: &["pointer.sync_memops_can_be_set"],
        modes: EBB,
        sometimes: false,
        why: "the simulated GPU accepts SYNC_MEMOPS and forgets it; ebb answers what was set, as the driver does",
    },
];

/// The entry for this one, if it is known.
pub(crate) fn find(name: &str, mode: Mode) -> Option<&'static Known> {
    KNOWN
        .iter()
        .find(|known| known.names.contains(&name) && known.modes.contains(&mode))
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
