//! Where ebb is known to answer otherwise than the driver, with the reason. The suite fails on one that is not here, and on
//! one here that agrees (on the simulated GPU, whose answers do not vary). An entry holds on both GPUs or on one: a real driver
//! checks some things that the simulated one does not, and the other way round.

use crate::modes::Mode;

/// On which GPU a disagreement is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Both,
    Card,
    Simulated,
}

impl On {
    fn covers(self, simulated: bool) -> bool {
        match self {
            Self::Both => true,
            Self::Card => !simulated,
            Self::Simulated => simulated,
        }
    }
}

/// Disagreements that are known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub names: &'static [&'static str],
    pub modes: &'static [Mode],
    pub on: On,
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
        on: On::Both,
        sometimes: true,
        why: "what a pool only keeps is given back before anything is released",
    },
    Known {
        names: &["graph.memory_figures"],
        modes: &[Mode::Evicting],
        on: On::Both,
        sometimes: true,
        why: "what the driver only keeps for graphs is given back by a release",
    },
    Known {
        names: &["free.then_use_is_refused"],
        modes: &[Mode::Ebb, Mode::Strict],
        on: On::Both,
        sometimes: false,
        why: "freed memory stays mapped as cache, so that a use after free is not noticed until it is given back",
    },
    Known {
        names: &["copy.past_the_end_is_invalid"],
        modes: EBB,
        on: On::Simulated,
        sometimes: false,
        why: "the addresses behind an allocation are reserved by ebb, and the simulated GPU finds out only while it copies that nothing is there",
    },
    Known {
        names: &["copy.across_two_small_allocations"],
        modes: EBB,
        on: On::Card,
        sometimes: false,
        why: "small allocations are parts of one mapping: the driver checks copies against that, and does not know where one of ebb's ends",
    },
    Known {
        names: &["graph.instance_with_freed_memory"],
        modes: &[Mode::Ebb, Mode::Strict],
        on: On::Card,
        sometimes: false,
        why: "freed memory stays mapped as cache, so that the driver sees nothing wrong with a graph that uses it",
    },
    Known {
        names: &["stream.illegal_address_stays"],
        modes: EBB,
        on: On::Both,
        sometimes: false,
        why: "an allocation from the pool asks the driver nothing, so that it succeeds in a broken context",
    },
];

/// The entry for this one, if it is known on this GPU.
pub(crate) fn find(name: &str, mode: Mode, simulated: bool) -> Option<&'static Known> {
    KNOWN.iter().find(|known| {
        known.names.contains(&name) && known.modes.contains(&mode) && known.on.covers(simulated)
    })
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

    #[test]
    fn an_entry_holds_where_it_says() {
        let at = |name, simulated| find(name, Mode::Ebb, simulated).is_some();
        assert!(at("free.then_use_is_refused", true) && at("free.then_use_is_refused", false));
        assert!(at("copy.past_the_end_is_invalid", true) && !at("copy.past_the_end_is_invalid", false));
        assert!(
            !at("copy.across_two_small_allocations", true) && at("copy.across_two_small_allocations", false)
        );
    }
}
