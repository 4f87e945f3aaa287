//! What cargo knows of the workspace.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell::{cargo, read};

/// A package of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    /// Its folder.
    pub folder: PathBuf,
    /// Packages of the workspace that it is built with, tests aside.
    pub uses: BTreeSet<String>,
}

/// The workspace.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Where cargo builds.
    pub target: PathBuf,
    /// By name.
    pub packages: BTreeMap<String, Package>,
}

/// The root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Asks cargo.
pub(crate) fn workspace() -> Result<Workspace> {
    let text = read(&mut cargo(&[
        "metadata",
        "--no-deps",
        "--format-version",
        "1",
        "--quiet",
    ]))?;
    parse(&text)
}

fn parse(text: &str) -> Result<Workspace> {
    let value: Value = serde_json::from_str(text).context("cargo metadata")?;
    let target = PathBuf::from(
        value["target_directory"]
            .as_str()
            .context("no target directory")?,
    );
    let mut packages = BTreeMap::new();
    for package in value["packages"].as_array().context("no packages")? {
        let name = package["name"].as_str().context("a package without a name")?;
        let manifest = Path::new(
            package["manifest_path"]
                .as_str()
                .context("a package without a manifest")?,
        );
        let dependencies = package["dependencies"].as_array().context("no dependencies")?;
        let uses = dependencies
            .iter()
            // Dependencies of tests have the kind `dev`.
            .filter(|dependency| dependency["kind"].as_str() != Some("dev") && dependency["path"].is_string())
            .filter_map(|dependency| dependency["name"].as_str().map(String::from))
            .collect();
        let folder = manifest
            .parent()
            .context("a manifest without a folder")?
            .to_path_buf();
        packages.insert(name.to_owned(), Package { folder, uses });
    }
    Ok(Workspace { target, packages })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dependencies_of_tests_do_not_count() {
        let text = r#"{"target_directory":"/t","packages":[{"name":"a","manifest_path":"/r/a/Cargo.toml","dependencies":[
            {"name":"b","kind":null,"path":"/r/b"},{"name":"c","kind":"dev","path":"/r/c"},{"name":"serde","kind":null,"path":null}]}]}"#;
        let workspace = parse(text).unwrap();
        assert_eq!(workspace.packages["a"].uses, BTreeSet::from(["b".to_owned()]));
        assert_eq!(workspace.packages["a"].folder, Path::new("/r/a"));
    }
}
