//! How much host memory there is to evict into: the machine's, and what the cgroup leaves of it.

use std::path::{Path, PathBuf};

use ebb_units::Bytes;

/// Memory available on the machine without swapping, if the kernel says so.
pub(crate) fn available() -> Option<Bytes> {
    available_in(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn available_in(meminfo: &str) -> Option<Bytes> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.saturating_mul(1024)))
}

/// The tightest memory limit of the cgroups that this process is in, if any.
pub(crate) fn cgroup_limit() -> Option<Bytes> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    limit_in(Path::new("/sys/fs/cgroup"), &own)
}

/// Version 2 has one tree with `memory.max`, version 1 a tree `memory` with `memory.limit_in_bytes`. Limits of all
/// levels count. In a container the own path may not be visible; then the root of what is visible is the container's.
fn limit_in(root: &Path, own: &str) -> Option<Bytes> {
    let mut least: Option<u64> = None;
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (tree, file): (PathBuf, &str) = if number == "0" && controllers.is_empty() {
            (root.to_path_buf(), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let leaf = tree.join(path.trim_start_matches('/'));
        for folder in leaf.ancestors().take_while(|folder| folder.starts_with(&tree)) {
            let text = std::fs::read_to_string(folder.join(file)).unwrap_or_default();
            // `max` is no number, and version 1 says "no limit" by a number near 2^63.
            if let Ok(limit) = text.trim().parse::<u64>()
                && limit < 1 << 60
            {
                least = Some(least.map_or(limit, |known| known.min(limit)));
            }
        }
    }
    least.map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_says() {
        assert_eq!(
            available_in("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"),
            Some(Bytes::mib(2))
        );
        assert_eq!(available_in("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn the_tightest_level_counts_in_both_versions() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("a/memory.max", "1073741824\n");
        put("a/b/memory.max", "max\n");
        assert_eq!(limit_in(root.path(), "0::/a/b\n"), Some(Bytes::gib(1)));
        assert_eq!(limit_in(root.path(), "0::/elsewhere\n"), None);
        put("memory/pod/memory.limit_in_bytes", "536870912\n");
        put("memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(
            limit_in(root.path(), "5:cpu,memory:/pod\n3:cpuset:/\n"),
            Some(Bytes::mib(512))
        );
        assert_eq!(limit_in(root.path(), "nonsense"), None);
    }
}
