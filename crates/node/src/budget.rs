//! How much host memory the arena may hold: what the machine and the control group have to give, not what they have.
//!
//! Page cache counts as free in both: the kernel drops it before it kills anybody. Pure functions over the texts of
//! `/proc` and `/sys/fs/cgroup`, and one small reader of these.

use std::path::{Path, PathBuf};

use ebb_units::{Bytes, GRANULE};

/// What there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Memory of the machine.
    pub total: Bytes,
    /// Of that, what can be had without swapping.
    pub available: Bytes,
    /// The tightest limit of the control groups that the daemon is in.
    pub cgroup: Option<CgroupMemory>,
}

/// One control group's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The limit.
    pub limit: Bytes,
    /// Used against it, less page cache that can be dropped.
    pub used: Bytes,
}

impl CgroupMemory {
    /// What is left.
    #[must_use]
    pub fn left(&self) -> Bytes {
        self.limit.saturating_sub(self.used)
    }
}

impl HostMemory {
    /// The arena's budget if none is configured: half of what the machine has available, at most four fifths of what
    /// the control group has left.
    #[must_use]
    pub fn default_budget(&self) -> Bytes {
        let machine = Bytes(self.available.0 / 2);
        let group = self
            .cgroup
            .map_or(Bytes::MAX, |group| Bytes(group.left().0 / 5 * 4));
        machine.min(group).round_down(GRANULE)
    }

    /// The most that may be configured.
    #[must_use]
    pub fn most(&self) -> Bytes {
        self.cgroup
            .map_or(self.total, |group| group.limit.min(self.total))
    }

    /// The most that the arena may hold now, which holds `held` already: what others take, of the machine or of the control
    /// group, is theirs. Changes of a limit, and of what the programs have pinned themselves, show in it.
    #[must_use]
    pub fn bound(&self, held: Bytes) -> Bytes {
        let machine = self.available.saturating_add(held).min(self.total);
        let group = self.cgroup.map_or(Bytes::MAX, |group| {
            group.limit.saturating_sub(group.used.saturating_sub(held))
        });
        machine.min(group).round_down(GRANULE)
    }

    /// What this machine has.
    #[must_use]
    pub fn read() -> Self {
        Self::read_below(Path::new("/"))
    }

    /// What the machine whose `/proc` and `/sys` lie below `root` has.
    #[must_use]
    pub fn read_below(root: &Path) -> Self {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let (total, available) = meminfo(&text("proc/meminfo"));
        let groups = text("proc/self/cgroup");
        Self {
            total,
            available,
            cgroup: tightest(root, &groups),
        }
    }
}

/// `MemTotal` and `MemAvailable`.
fn meminfo(text: &str) -> (Bytes, Bytes) {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
            .map_or(Bytes::ZERO, Bytes::kib)
    };
    (field("MemTotal"), field("MemAvailable"))
}

/// The limit that leaves least, among the group and all groups above it.
fn tightest(root: &Path, groups: &str) -> Option<CgroupMemory> {
    let mut found: Vec<CgroupMemory> = Vec::new();
    for line in groups.lines() {
        // `0::/path` is version 2; `9:memory:/path` is version 1.
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (mount, read): (&str, fn(&Path) -> Option<CgroupMemory>) = if controllers.is_empty() {
            ("sys/fs/cgroup", version_2)
        } else if controllers.split(',').any(|c| c == "memory") {
            ("sys/fs/cgroup/memory", version_1)
        } else {
            continue;
        };
        let mount = root.join(mount);
        // In a container the path may be the host's while the mount shows only the container's part: then the
        // mount's own root is the group.
        let inside: PathBuf = mount.join(path.trim_start_matches('/'));
        let start = if inside.is_dir() { inside } else { mount.clone() };
        found.extend(
            start
                .ancestors()
                .take_while(|dir| dir.starts_with(&mount))
                .filter_map(read),
        );
    }
    found.into_iter().min_by_key(CgroupMemory::left)
}

fn number(dir: &Path, name: &str) -> Option<Bytes> {
    std::fs::read_to_string(dir.join(name))
        .ok()?
        .trim()
        .parse()
        .ok()
        .map(Bytes)
}

fn stat(dir: &Path, name: &str) -> Bytes {
    std::fs::read_to_string(dir.join("memory.stat"))
        .ok()
        .and_then(|text| {
            text.lines().find_map(|line| {
                let (key, value) = line.split_once(' ')?;
                (key == name).then(|| value.trim().parse().ok()).flatten()
            })
        })
        .map_or(Bytes::ZERO, Bytes)
}

fn version_2(dir: &Path) -> Option<CgroupMemory> {
    // `max` is no number: no limit here. Above `high` the kernel slows everything in the group down.
    let limits = [number(dir, "memory.max"), number(dir, "memory.high")];
    let limit = limits.into_iter().flatten().min()?;
    let cache = stat(dir, "inactive_file").saturating_add(stat(dir, "active_file"));
    Some(CgroupMemory {
        limit,
        used: number(dir, "memory.current")?.saturating_sub(cache),
    })
}

fn version_1(dir: &Path) -> Option<CgroupMemory> {
    let limit = number(dir, "memory.limit_in_bytes")?;
    // "No limit" is the largest page-aligned number.
    if limit.0 >= 1 << 60 {
        return None;
    }
    let cache = stat(dir, "total_inactive_file").saturating_add(stat(dir, "total_active_file"));
    Some(CgroupMemory {
        limit,
        used: number(dir, "memory.usage_in_bytes")?.saturating_sub(cache),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A `/` with these files.
    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: &str =
        "MemTotal:       79691776 kB\nMemFree:         1000 kB\nMemAvailable:   79691776 kB\n";

    #[test]
    fn bug_106_the_container_counts_not_the_machine_and_page_cache_is_free() {
        // 76 GiB on the machine, 8 GiB in the container, of which 7 GiB are page cache.
        let (gib, used) = (1u64 << 30, 7_680u64 << 20);
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/pod/c1\n"),
            ("sys/fs/cgroup/pod/c1/memory.max", &format!("{}\n", 8 * gib)),
            ("sys/fs/cgroup/pod/c1/memory.current", &format!("{used}\n")),
            (
                "sys/fs/cgroup/pod/c1/memory.stat",
                &format!(
                    "anon {}\nactive_file {}\ninactive_file {}\n",
                    gib / 2,
                    3 * gib,
                    4 * gib
                ),
            ),
            ("sys/fs/cgroup/pod/memory.max", "max\n"),
        ]);
        let memory = HostMemory::read_below(root.path());
        assert_eq!(memory.total, Bytes::gib(76));
        let group = memory.cgroup.unwrap();
        assert_eq!((group.limit, group.used), (Bytes::gib(8), Bytes::mib(512)));
        assert_eq!(
            memory.default_budget(),
            Bytes(group.left().0 / 5 * 4).round_down(GRANULE)
        );
        assert!(
            memory.default_budget() <= Bytes::gib(6),
            "{}",
            memory.default_budget()
        );
        assert_eq!(memory.most(), Bytes::gib(8));
    }

    #[test]
    fn bug_110_what_others_took_is_not_the_arenas_and_a_changed_limit_is_followed() {
        let (gib, mib) = (1u64 << 30, 1u64 << 20);
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/pod\n"),
            ("sys/fs/cgroup/pod/memory.max", &format!("{}\n", 16 * gib)),
            ("sys/fs/cgroup/pod/memory.current", &format!("{}\n", 9 * gib)),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "active_file 0\ninactive_file 0\n",
            ),
        ]);
        let bound = |held| HostMemory::read_below(root.path()).bound(held);
        // Of 9 GiB in use 2 are the arena's own: a program has pinned the other 7.
        assert_eq!(bound(Bytes::gib(2)), Bytes::gib(9));
        let set = |name: &str, text: String| {
            std::fs::write(root.path().join("sys/fs/cgroup/pod").join(name), text).unwrap();
        };
        set("memory.max", format!("{}\n", 10 * gib));
        assert_eq!(bound(Bytes::gib(2)), Bytes::gib(3));
        set("memory.high", format!("{}\n", 9 * gib + 512 * mib));
        assert_eq!(bound(Bytes::gib(2)), Bytes(2 * gib + 512 * mib));
        set("memory.max", "max\n".into());
        set("memory.high", "max\n".into());
        assert_eq!(bound(Bytes::gib(2)), Bytes::gib(76), "the machine's");
    }

    #[test]
    fn a_parent_group_may_be_the_tight_one() {
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "9000000000\n"),
            ("sys/fs/cgroup/a/b/memory.current", "0\n"),
            ("sys/fs/cgroup/a/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/a/memory.current", "1073741824\n"),
        ]);
        assert_eq!(
            HostMemory::read_below(root.path()).cgroup.unwrap().left(),
            Bytes::gib(3)
        );
    }

    #[test]
    fn version_1_is_read_and_its_infinity_is_no_limit() {
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            (
                "proc/self/cgroup",
                "5:cpu,cpuacct:/\n4:memory:/docker/x\n0::/docker/x\n",
            ),
            // The mount shows the container's own group only.
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "total_inactive_file 536870912\ntotal_active_file 0\n",
            ),
        ]);
        let group = HostMemory::read_below(root.path()).cgroup.unwrap();
        assert_eq!((group.limit, group.used), (Bytes::gib(2), Bytes::mib(512)));
        let root = machine(&[
            ("proc/meminfo", MEMINFO),
            ("proc/self/cgroup", "4:memory:/\n"),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
        ]);
        let memory = HostMemory::read_below(root.path());
        assert_eq!(memory.cgroup, None);
        assert_eq!(memory.default_budget(), Bytes::gib(38));
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = HostMemory::read();
        assert!(
            memory.total > Bytes::mib(64) && memory.available <= memory.total,
            "{memory:?}"
        );
    }
}
