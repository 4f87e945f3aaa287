//! Several behaviours in one process, one after the other, each in a new context: on a real card starting the driver takes far
//! longer than any behaviour.
//!
//! Only what passes in every way counts. Everything else is run again by itself, so that a crash, a hang or something that one
//! leaves to the next is never another one's result.

use std::collections::HashMap;
use std::time::Duration;

use crate::behaviour::{Behaviour, Need};
use crate::runner::{InMode, Result, Settings, Verdict, judge, several};
use crate::world::World;

/// Groups whose behaviours are about what is inside one context, and leave the process as it was.
const GROUPS: &[&str] = &[
    "alloc", "array", "async", "capture", "copy", "free", "graph", "host", "managed", "memset", "module",
    "pitch", "pointer", "pool", "stream", "vmm",
];

/// Breaks its context.
const BREAKS: &[&str] = &["stream.illegal_address_stays"];

/// Longer than one takes on a busy card.
const EACH: Duration = Duration::from_secs(5);

fn is_harmless(behaviour: &Behaviour) -> bool {
    GROUPS.contains(&behaviour.group())
        && !BREAKS.contains(&behaviour.name)
        && !behaviour.alone
        && !behaviour.raw
        && behaviour.peer.is_none()
        && !behaviour.needs.contains(&Need::SecondDevice)
}

/// Behaviours with their places in the list.
pub(crate) type Unit = Vec<(usize, &'static Behaviour)>;

/// What is run in one process: the harmless ones in tens or so, the others alone, in the order of the list.
pub(crate) fn units(wanted: impl Iterator<Item = (usize, &'static Behaviour)>, most: usize) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut open: Unit = Vec::new();
    for (at, behaviour) in wanted {
        if most > 1 && is_harmless(behaviour) {
            open.push((at, behaviour));
            if open.len() >= most {
                units.push(std::mem::take(&mut open));
            }
        } else {
            units.push(vec![(at, behaviour)]);
        }
    }
    units.extend((!open.is_empty()).then_some(open));
    units
}

/// Those of a unit that passed in all ways; nothing for one that is alone.
pub(crate) fn in_all_modes(unit: &Unit, world: &World, settings: &Settings) -> HashMap<&'static str, Result> {
    let mut left: Vec<&'static Behaviour> = unit.iter().map(|(_, behaviour)| *behaviour).collect();
    let mut passed: HashMap<&'static str, Vec<InMode>> = HashMap::new();
    for &mode in &settings.modes {
        if left.len() < 2 {
            return HashMap::new();
        }
        let limit = settings.limit + EACH * u32::try_from(left.len()).unwrap_or(u32::MAX);
        let Some(runs) = several(&left, mode, limit, world, settings) else {
            for behaviour in &left {
                passed
                    .entry(behaviour.name)
                    .or_default()
                    .push((mode, None, Verdict::NotApplicable));
            }
            continue;
        };
        let mut kept = Vec::new();
        for (behaviour, run) in left.into_iter().zip(runs) {
            let entry = passed.entry(behaviour.name).or_default();
            let plain = entry.first().and_then(|(_, run, _)| run.as_ref());
            let verdict = judge(behaviour, &run, plain);
            if verdict == Verdict::Passed {
                entry.push((mode, Some(run), verdict));
                kept.push(behaviour);
            }
        }
        left = kept;
    }
    left.into_iter()
        .filter_map(|behaviour| {
            let runs = passed.remove(behaviour.name)?;
            let together = true;
            Some((
                behaviour.name,
                Result {
                    behaviour,
                    runs,
                    together,
                },
            ))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Unit> {
        units(crate::groups::all().enumerate(), 8)
    }

    #[test]
    fn each_behaviour_is_run_once() {
        let mut places: Vec<usize> = all().iter().flatten().map(|(at, _)| *at).collect();
        places.sort_unstable();
        assert!(places.into_iter().eq(0..crate::groups::all().count()));
    }

    #[test]
    fn what_may_disturb_others_is_alone() {
        for unit in all().iter().filter(|unit| unit.len() > 1) {
            assert!(unit.len() <= 8 && unit.iter().all(|(_, behaviour)| is_harmless(behaviour)));
        }
        assert!(
            units(crate::groups::all().enumerate(), 1)
                .iter()
                .all(|unit| unit.len() == 1)
        );
        assert!(
            all().len() * 2 < crate::groups::all().count(),
            "most are together"
        );
    }
}
