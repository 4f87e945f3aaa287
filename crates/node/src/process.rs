//! What `/proc` says about a process: its birth, its name, its control group.

use std::path::PathBuf;

/// When a process was born, in clock ticks after boot. With the pid this is one process and no other, until the next boot.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Field 22; the name in field 2 may hold blanks and brackets.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Whether that very process still lives (a zombie does not: its memory is gone).
pub(crate) fn lives(pid: u32, start: u64) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    parse_start_time(&stat) == Some(start) && !matches!(parse_state(&stat), Some("Z" | "X") | None)
}

/// Whether it is held: by a stop signal or a debugger. It answers nothing meanwhile.
pub(crate) fn is_stopped(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| matches!(parse_state(&stat), Some("T" | "t")))
}

/// Field 3.
fn parse_state(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().next()
}

/// The control group, for display.
pub(crate) fn cgroup(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    text.lines()
        .find_map(|line| {
            line.strip_prefix("0::")
                .or_else(|| line.split_once(":memory:").map(|(_, path)| path))
        })
        .unwrap_or_default()
        .to_string()
}

/// The program's name as the kernel has it.
pub(crate) fn name(pid: u32) -> String {
    std::fs::read_link(format!("/proc/{pid}/exe"))
        .ok()
        .and_then(|path: PathBuf| path.file_name().map(|n| n.to_string_lossy().into_owned()))
        .or_else(|| {
            std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .ok()
                .map(|n| n.trim().to_string())
        })
        .unwrap_or_default()
}

/// The group of its files: what it would make new ones as.
pub(crate) fn group(pid: u32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    Some(std::fs::metadata(format!("/proc/{pid}")).ok()?.gid())
}

/// The number of a process in the pid namespace of another one; `None` if it has none there, or that cannot be seen.
pub(crate) fn pid_as_seen_by(caller: u32, pid: u32) -> Option<u32> {
    let numbers = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        Some((
            namespace_pids(&status),
            std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok(),
        ))
    };
    if caller == pid {
        return numbers(pid)?.0.last().copied();
    }
    seen_by(&numbers(caller)?, &numbers(pid)?)
}

/// The numbers of a process from the outermost namespace that we see to its own. Kernels before 4.1 do not tell: one number then.
fn namespace_pids(status: &str) -> Vec<u32> {
    let line = |name| status.lines().find_map(move |line| line.strip_prefix(name));
    line("NSpid:")
        .or_else(|| line("Pid:"))
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

type Seen = (Vec<u32>, Option<PathBuf>);

fn seen_by((caller, its_namespace): &Seen, (process, namespace): &Seen) -> Option<u32> {
    match caller.len() {
        // In our own namespace, or one above it, every process has the number that we see.
        0 | 1 => process.first().copied(),
        // One name for both, or both names unknown and as deep: the innermost number.
        depth if its_namespace == namespace && process.len() == depth => process.last().copied(),
        // Elsewhere, or further inside, which would need the namespaces between.
        _ => None,
    }
}

/// Whose the memory of a process is, beyond doubt: its user's, in these namespaces. `None`: that cannot be seen.
pub(crate) fn domain(pid: u32, uid: u32) -> Option<String> {
    let mut name = uid.to_string();
    for kind in ["user", "pid", "mnt"] {
        let space = std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()?;
        name.push(' ');
        name.push_str(&space.to_string_lossy());
    }
    Some(name)
}

/// This boot, so that pids of another are not mistaken for ours.
pub(crate) fn boot_id() -> &'static str {
    // Every write of the state file names it.
    static ID: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    ID.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .unwrap_or_default()
            .trim()
            .to_string()
    })
}

/// 32 bytes that nobody can guess.
pub(crate) fn random_token() -> std::io::Result<[u8; 32]> {
    let mut token = [0; 32];
    std::io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut token)?;
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_shift_the_fields() {
        let mut stat = String::from("42 (a) b) (c) S 1");
        for i in 5..=21 {
            stat.push_str(&format!(" {i}"));
        }
        stat.push_str(" 777 0 0");
        assert_eq!(parse_start_time(&stat), Some(777));
        assert_eq!(parse_state(&stat), Some("S"));
    }

    #[test]
    fn a_domain_is_of_one_user_and_one_set_of_namespaces() {
        let (own, parent) = (std::process::id(), rustix::process::getppid());
        let here = domain(own, 1000).unwrap();
        assert_ne!(domain(own, 1001), Some(here.clone()));
        if let Some(theirs) = parent.and_then(|pid| domain(pid.as_raw_pid().unsigned_abs(), 1000)) {
            assert_eq!(theirs, here);
        }
        assert_eq!(domain(u32::MAX, 1000), None);
    }

    #[test]
    fn this_process_lives_and_was_not_born_at_another_time() {
        let pid = std::process::id();
        let start = start_time(pid).unwrap();
        assert!(lives(pid, start));
        assert!(!lives(pid, start + 1));
        assert!(!name(pid).is_empty());
    }

    #[test]
    fn bug_142_a_process_has_the_number_of_the_namespace_that_asks() {
        let namespace = |name: &str| Some(PathBuf::from(name));
        let host = (vec![500], namespace("pid:[1]"));
        let inside = (vec![700, 7], namespace("pid:[2]"));
        let sibling = (vec![701, 8], namespace("pid:[2]"));
        let other = (vec![900, 8], namespace("pid:[3]"));
        let nested = (vec![800, 30, 2], namespace("pid:[4]"));
        assert_eq!(seen_by(&inside, &sibling), Some(8));
        assert_eq!(seen_by(&inside, &other), None, "another container's");
        assert_eq!(seen_by(&inside, &host), None, "the host's");
        assert_eq!(seen_by(&inside, &nested), None, "not to be told from here");
        assert_eq!(
            seen_by(&host, &sibling),
            Some(701),
            "the host sees all by its own numbers"
        );
        assert_eq!(seen_by(&host, &nested), Some(800));
        assert_eq!(namespace_pids("Name:\tx\nPid:\t700\nNSpid:\t700\t7\n"), [700, 7]);
        assert_eq!(namespace_pids("Name:\tx\nPid:\t700\n"), [700]);
        let own = std::process::id();
        assert_eq!(pid_as_seen_by(own, own), Some(own));
        assert_eq!(pid_as_seen_by(own, u32::MAX), None);
    }

    #[test]
    fn a_zombie_does_not_live() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let start = start_time(child.id()).unwrap();
        // A pidfd is readable once the process is a zombie: wait for that without reaping it.
        let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
        let fd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let mut poll = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut poll, None).unwrap();
        assert!(!lives(child.id(), start));
        child.wait().unwrap();
    }

    #[test]
    fn tokens_differ() {
        assert_ne!(random_token().unwrap(), random_token().unwrap());
    }
}
