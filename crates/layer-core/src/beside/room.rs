//! Whether host memory has room for managed memory that leaves the card: the driver takes pages for it as they come, and a
//! container that goes beyond its limit is killed. So this looks before every piece, and leaves a part of the machine alone.

use std::path::Path;

/// A part of the machine's memory that is left to others.
const LEFT_ALONE: u64 = 16;

/// Whether so many bytes fit. Where nothing can be read, nothing is known, and the answer is no.
pub(super) fn is_there_for(bytes: u64) -> bool {
    left(Path::new("/")).is_some_and(|left| left >= bytes)
}

fn left(root: &Path) -> Option<u64> {
    let text = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let machine = of_machine(&text("proc/meminfo")?)?;
    let groups = text("proc/self/cgroup").unwrap_or_default();
    Some(machine.min(of_groups(root, &groups)))
}

fn of_machine(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line
            .trim_start_matches(':')
            .split_whitespace()
            .next()?
            .parse()
            .ok()?;
        kib.checked_mul(1024)
    };
    let (total, available) = (field("MemTotal")?, field("MemAvailable")?);
    Some(available.saturating_sub(total / LEFT_ALONE))
}

/// The least that is left in this process's control group and those above it.
fn of_groups(root: &Path, groups: &str) -> u64 {
    let mut least = u64::MAX;
    for line in groups.lines() {
        // `0::/path` is version 2; `9:memory:/path` is version 1.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (mount, limit, used, idle) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
            names if names.split(',').any(|name| name == "memory") => (
                "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
            _ => continue,
        };
        let mount = root.join(mount);
        // Inside a container the path may be the host's, and the mount shows the container's part alone.
        let inside = mount.join(path.trim_start_matches('/'));
        let start = if inside.is_dir() { inside } else { mount.clone() };
        for dir in start.ancestors().take_while(|dir| dir.starts_with(&mount)) {
            let text = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
            let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
            let (Some(limit), Some(used)) = (number(limit), number(used)) else {
                continue;
            };
            // File pages that nobody used for a while go first when the group needs room.
            let cache = text("memory.stat")
                .and_then(|stat| {
                    let line = stat
                        .lines()
                        .find_map(|line| line.strip_prefix(idle)?.strip_prefix(' '))?;
                    line.trim().parse::<u64>().ok()
                })
                .unwrap_or(0);
            let left = limit.saturating_sub(limit / LEFT_ALONE);
            least = least.min(left.saturating_sub(used.saturating_sub(cache)));
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       16777216 kB\nMemFree:          1024 kB\nMemAvailable:    8388608 kB\n",
    );

    #[test]
    fn a_part_of_the_machine_is_left_alone() {
        let root = machine(&[MEMINFO]);
        assert_eq!(left(root.path()), Some(7 << 30));
        assert_eq!(left(machine(&[]).path()), None, "nothing known: no room");
    }

    #[test]
    fn the_tightest_group_counts_and_its_idle_files_do_not() {
        let root = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/c1\n"),
            ("sys/fs/cgroup/pod/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/memory.current", "1\n"),
            ("sys/fs/cgroup/pod/c1/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/pod/c1/memory.current", "943718400\n"),
            (
                "sys/fs/cgroup/pod/c1/memory.stat",
                "anon 1\ninactive_file 104857600\n",
            ),
        ]);
        // 1024 MiB less 64 left alone, less 900 in use of which 100 are idle files.
        assert_eq!(left(root.path()), Some(160 * MIB));
    }

    #[test]
    fn groups_of_version_1_and_paths_of_the_host() {
        let root = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "9:cpu,memory:/not/here\n3:pids:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "536870912\n"),
        ]);
        assert_eq!(left(root.path()), Some(448 * MIB));
    }
}
