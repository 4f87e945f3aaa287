//! Where recorded traces lie, for tests that need them. They are not part of the repository.

use std::path::{Path, PathBuf};

/// The folder of traces if those of that name are there: what `EBB_DATA` says, else `shared/data` beside the repository.
/// `None` if they are not, which is said.
pub(crate) fn for_tests(name: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("EBB_DATA").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
        PathBuf::from,
    );
    if dir.join(name).is_dir() {
        return Some(dir);
    }
    eprintln!("SKIPPED: no {name} in {}; set EBB_DATA", dir.display());
    None
}
