//! Who may depend on whom: the arrows of ARCHITECTURE.md, checked.

use std::collections::BTreeSet;

use anyhow::Result;

use crate::metadata::Workspace;
use crate::shell::{cargo, read};

/// A package, and the packages of this workspace that it may be built with. Packages that are not here may use all.
const ARROWS: &[(&str, &[&str])] = &[
    ("ebb-units", &[]),
    ("ebb-abi", &[]),
    ("ebb-demo-worker", &[]),
    ("ebb-protocol", &["ebb-units"]),
    ("ebb-policy", &["ebb-units"]),
    ("ebb-alloc", &["ebb-units"]),
    ("ebb-device", &["ebb-units"]),
    ("ebb-disk", &[]),
    ("ebb-cuda", &["ebb-abi", "ebb-device", "ebb-units"]),
    (
        "ebb-layer-core",
        &["ebb-alloc", "ebb-device", "ebb-disk", "ebb-protocol", "ebb-units"],
    ),
    (
        "ebb-layer",
        &[
            "ebb-layer-core",
            "ebb-cuda",
            "ebb-abi",
            "ebb-device",
            "ebb-disk",
            "ebb-protocol",
            "ebb-units",
        ],
    ),
    (
        "ebb-node",
        &["ebb-disk", "ebb-policy", "ebb-protocol", "ebb-abi", "ebb-units"],
    ),
    ("ebb-simdev", &["ebb-abi", "ebb-units"]),
    ("ebb-simgpu", &["ebb-simdev", "ebb-abi", "ebb-units"]),
    ("ebb-simnvml", &["ebb-simdev", "ebb-abi", "ebb-units"]),
    ("ebb-lab", &["ebb-policy", "ebb-alloc", "ebb-units"]),
    (
        "ebb-cli",
        &["ebb-node", "ebb-lab", "ebb-disk", "ebb-protocol", "ebb-units"],
    ),
];

/// Packages that use everything and that nothing uses.
const TOPS: &[&str] = &["xtask", "ebb-tests", "ebb-conformance"];

/// What may not come into other people's programs with the library, with why.
const NOT_IN_THE_LAYER: &[(&str, &str)] = &[
    (
        "tokio",
        "an async runtime starts threads in a program that is not ours",
    ),
    (
        "async-std",
        "an async runtime starts threads in a program that is not ours",
    ),
    (
        "serde",
        "messages have a fixed layout; a report is written by hand",
    ),
    (
        "serde_json",
        "messages have a fixed layout; a report is written by hand",
    ),
    ("tracing", "the library says nothing in its host"),
    ("log", "the library says nothing in its host"),
    (
        "parking_lot",
        "its parking lot is global and does not survive a fork",
    ),
    ("libloading", "its dlsym is our own hook"),
];

/// Everything that points the wrong way.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let mut faults = arrows(workspace);
    let tree = read(&mut cargo(&[
        "tree",
        "-p",
        "ebb-layer",
        "-e",
        "normal",
        "--prefix",
        "none",
        "--quiet",
    ]))?;
    faults.extend(layer(&tree));
    Ok(faults)
}

fn arrows(workspace: &Workspace) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, package) in &workspace.packages {
        if TOPS.contains(&name.as_str()) {
            continue;
        }
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| known == name) else {
            faults.push(format!(
                "{name} has no place in the layering: add it to xtask/src/layering.rs and ARCHITECTURE.md"
            ));
            continue;
        };
        let allowed: BTreeSet<&str> = allowed.iter().copied().collect();
        for used in package
            .uses
            .iter()
            .filter(|used| !allowed.contains(used.as_str()))
        {
            faults.push(format!("{name} depends on {used}, which it may not"));
        }
    }
    faults
}

fn layer(tree: &str) -> Vec<String> {
    let names: BTreeSet<&str> = tree
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    NOT_IN_THE_LAYER
        .iter()
        .filter(|(name, _)| names.contains(name))
        .map(|(name, why)| format!("ebb-layer is built with {name}: {why}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Package;

    #[test]
    fn an_arrow_that_points_up_is_found() {
        let package = |uses: &[&str]| Package {
            folder: Default::default(),
            uses: uses.iter().map(|name| (*name).to_owned()).collect(),
        };
        let workspace = Workspace {
            target: Default::default(),
            packages: [
                ("ebb-units".to_owned(), package(&["ebb-node"])),
                ("ebb-cli".to_owned(), package(&["ebb-node"])),
                ("ebb-new".to_owned(), package(&[])),
                ("xtask".to_owned(), package(&["ebb-cli"])),
            ]
            .into(),
        };
        let faults = arrows(&workspace);
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(
            faults[0].contains("ebb-new has no place") && faults[1].contains("ebb-units depends on ebb-node")
        );
    }

    #[test]
    fn what_may_not_be_in_the_library_is_found() {
        assert_eq!(layer("ebb-layer v0.1.0\nlibc v0.2.1\ntokio v1.0.0\n").len(), 1);
        assert!(layer("ebb-layer v0.1.0\ntokio-like v1\n").is_empty());
    }
}
