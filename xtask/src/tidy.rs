//! What clippy does not see: sizes of files, words that do not belong, where `unsafe` may be.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::metadata::{Workspace, root};
use crate::shell::{program, read};

/// Longer files hold two ideas.
const MAX_LINES: usize = 900;
/// Tests stand one after the other, and nobody has to keep the first in mind at the last.
const MAX_TEST_LINES: usize = 1500;

/// Packages in which `unsafe` may be; all others forbid it in their first file.
const UNSAFE: &[&str] = &[
    "ebb-cuda",
    "ebb-layer",
    "ebb-layer-core",
    "ebb-node",
    "ebb-simdev",
    "ebb-simgpu",
    "ebb-simnvml",
    "ebb-demo-worker",
    "ebb-tests",
    "ebb-conformance",
];

/// A word, the folders in which it does not belong, and what to do instead.
const WORDS: &[(&str, &[&str], &str)] = &[
    (
        concat!("TO", "DO"),
        &[""],
        "do it, or say in an issue what is missing",
    ),
    (concat!("FIX", "ME"), &[""], "fix it"),
    (concat!("todo", "!("), &[""], "write it"),
    (concat!("unimplemented", "!("), &[""], "write it"),
    (concat!("dbg", "!("), &[""], "remove it"),
    (
        "Instant::now",
        &["crates/policy/src", "crates/alloc/src"],
        "time comes in as a value: the same events give the same actions",
    ),
    (
        "SystemTime",
        &["crates/policy/src", "crates/alloc/src"],
        "time comes in as a value: the same events give the same actions",
    ),
    (
        "HashMap",
        &["crates/policy/src"],
        "BTreeMap: the order must not depend on a hash",
    ),
    (
        "HashSet",
        &["crates/policy/src"],
        "BTreeSet: the order must not depend on a hash",
    ),
    (
        "process::exit",
        &["crates/layer/src", "crates/layer-core/src", "crates/cuda/src"],
        "the program is not ours to end",
    ),
    (
        "process::abort",
        &["crates/layer/src", "crates/layer-core/src", "crates/cuda/src"],
        "the program is not ours to end",
    ),
    (
        "println!(",
        &["crates/layer/src", "crates/layer-core/src", "crates/cuda/src"],
        "the library prints nothing in its host",
    ),
];

/// Everything that is not tidy, as `file:line: what`.
pub(crate) fn faults(workspace: &Workspace) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    // What git would take: tracked, and new but not ignored.
    let listed = read(&mut program("git", &["ls-files", "-co", "--exclude-standard"]))?;
    for name in listed
        .lines()
        .filter(|name| name.ends_with(".rs") || name.ends_with(".py") || name.ends_with(".sh"))
    {
        let path = root().join(name);
        if path.is_file() {
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            faults.extend(file(name, &text));
        }
    }
    for (name, package) in &workspace.packages {
        faults.extend(forbids_unsafe(name, &package.folder)?);
    }
    Ok(faults)
}

fn file(name: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let lines = text.lines().count();
    let most = if name.contains("/tests/") || name.ends_with("tests.rs") {
        MAX_TEST_LINES
    } else {
        MAX_LINES
    };
    if lines > most {
        faults.push(format!(
            "{name}: {lines} lines; split it where the second idea begins (at most {most})"
        ));
    }
    // The words are about the product; its tests and build scripts may print and measure.
    let product = text.split("#[cfg(test)]").next().unwrap_or_default();
    let is_test = name.contains("/tests/") || name.ends_with("tests.rs") || name.ends_with("build.rs");
    for (number, line) in text.lines().enumerate() {
        for (word, folders, instead) in WORDS {
            let everywhere = folders == &[""];
            let applies = everywhere
                || !is_test
                    && folders.iter().any(|folder| name.starts_with(folder))
                    && number < product.lines().count();
            let comment = line.trim_start().starts_with("//") && !everywhere;
            if applies && !comment && line.contains(word) {
                faults.push(format!("{name}:{}: {word} - {instead}", number + 1));
            }
        }
        if line.ends_with([' ', '\t']) {
            faults.push(format!("{name}:{}: blanks at the end of the line", number + 1));
        }
    }
    faults
}

fn forbids_unsafe(package: &str, folder: &Path) -> Result<Option<String>> {
    if UNSAFE.contains(&package) {
        return Ok(None);
    }
    let firsts: Vec<PathBuf> = ["src/lib.rs", "src/main.rs"]
        .iter()
        .map(|name| folder.join(name))
        .filter(|path| path.is_file())
        .collect();
    for path in firsts {
        let text = std::fs::read_to_string(&path)?;
        if !text.contains("#![forbid(unsafe_code)]") {
            return Ok(Some(format!(
                "{}: #![forbid(unsafe_code)] is missing",
                path.display()
            )));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_where_they_do_not_belong() {
        assert_eq!(
            file("crates/policy/src/a.rs", "use std::collections::HashMap;\n").len(),
            1
        );
        assert!(file("crates/node/src/a.rs", "use std::collections::HashMap;\n").is_empty());
        assert!(file("crates/policy/src/a.rs", "/// No HashMap here.\n").is_empty());
        assert!(
            file(
                "crates/policy/src/a.rs",
                "#[cfg(test)]\nuse std::collections::HashMap;\n"
            )
            .is_empty()
        );
        assert_eq!(file("crates/x/src/a.rs", concat!("// TO", "DO later\n")).len(), 1);
        assert_eq!(file("crates/x/src/a.rs", "let a = 1; \n").len(), 1);
        assert_eq!(file("crates/x/src/a.rs", &"x\n".repeat(MAX_LINES + 1)).len(), 1);
    }
}
