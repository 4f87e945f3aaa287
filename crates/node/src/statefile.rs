//! `tasks.json`: what a new daemon must know of the tasks that ran under the last one: their tokens and limits, and
//! which processes to wait for. Only the daemon's user may read it: it holds tokens.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use ebb_policy::TaskSpec;
use ebb_units::TaskId;
use serde::{Deserialize, Serialize};

use crate::process;

const VERSION: u32 = 1;

/// One process, whatever its pid is reused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct SavedProcess {
    pub pid: u32,
    pub start: u64,
    /// It had memory on a card: nothing is granted to others before it has said how much.
    pub attached: bool,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedTask {
    pub task: TaskId,
    /// 64 hexadecimal digits; empty for a task without a token.
    pub token: String,
    pub owner: u32,
    pub name: String,
    pub spec: TaskSpec,
    pub paused: bool,
    /// How long after a release for idleness it is hibernated unasked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hibernate_after: Option<std::time::Duration>,
    pub processes: Vec<SavedProcess>,
}

impl std::fmt::Debug for SavedTask {
    /// Without the token, which must not get into any log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SavedTask")
            .field("task", &self.task)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StateFile {
    pub version: u32,
    pub boot: String,
    /// No id below this is given out again.
    pub next_task: u64,
    pub tasks: Vec<SavedTask>,
    /// Which of this daemon's writes it is.
    #[serde(skip)]
    pub sequence: u64,
}

impl StateFile {
    pub(crate) fn new(sequence: u64, next_task: u64, tasks: Vec<SavedTask>) -> Self {
        Self {
            version: VERSION,
            boot: process::boot_id().into(),
            next_task,
            tasks,
            sequence,
        }
    }

    /// Replaces the file in one step: a reader sees the old or the new, never a part.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        let temporary = path.with_extension("new");
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&temporary)?;
        let written = serde_json::to_vec_pretty(self)
            .map_err(std::io::Error::from)
            .and_then(|text| file.write_all(&text))
            // Not synced: after a crash of the machine there is no process left that it could name.
            .and_then(|()| std::fs::rename(&temporary, path));
        if written.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        written
    }

    /// Reads the file of an earlier daemon; what is dead by now is left out. `Err` says why nothing of it is usable.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(e) => return Err(e.to_string()),
        };
        let mut state: Self = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
        if state.version != VERSION {
            return Err(format!("it has version {}, not {VERSION}", state.version));
        }
        if state.boot != process::boot_id() {
            return Ok(Self {
                next_task: state.next_task,
                ..Self::default()
            });
        }
        for task in &mut state.tasks {
            task.processes.retain(|p| process::lives(p.pid, p.start));
        }
        state.tasks.retain(|task| !task.processes.is_empty());
        Ok(state)
    }
}

/// A token as `ebb run` puts it into the environment.
pub(crate) fn hex(token: &[u8; 32]) -> String {
    // Every write of the state file has all tokens.
    let digits = b"0123456789abcdef";
    let digit = |value: u8| char::from(digits[usize::from(value)]);
    token
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

pub(crate) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let mut token = [0; 32];
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, byte) in token.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn saved(pid: u32, start: u64) -> SavedTask {
        SavedTask {
            task: TaskId(4),
            token: hex(&[9; 32]),
            owner: 1,
            name: "n".into(),
            spec: TaskSpec::default(),
            paused: true,
            hibernate_after: Some(std::time::Duration::from_secs(3)),
            processes: vec![SavedProcess {
                pid,
                start,
                attached: true,
            }],
        }
    }

    #[test]
    fn living_tasks_come_back_and_dead_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tasks.json");
        assert_eq!(StateFile::read(&path).unwrap(), StateFile::default());
        let pid = std::process::id();
        let start = process::start_time(pid).unwrap();
        let state = StateFile::new(1, 9, vec![saved(pid, start), saved(pid, start + 1)]);
        state.write(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let back = StateFile::read(&path).unwrap();
        assert_eq!((back.next_task, back.tasks), (9, vec![saved(pid, start)]));
        // After a reboot nothing lives, whatever the pids say.
        StateFile {
            boot: "another".into(),
            ..state
        }
        .write(&path)
        .unwrap();
        assert!(StateFile::read(&path).unwrap().tasks.is_empty());
        assert_eq!(StateFile::read(&path).unwrap().next_task, 9);
    }

    #[test]
    fn a_damaged_file_is_an_error_and_no_panic() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tasks.json");
        for text in [
            "",
            "{",
            "[]",
            r#"{"version":99,"boot":"","next_task":1,"tasks":[]}"#,
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(StateFile::read(&path).is_err(), "{text}");
        }
    }

    #[test]
    fn tokens_read_back_and_are_not_shown() {
        let token = std::array::from_fn(|i| u8::try_from(i * 7 % 256).unwrap());
        assert_eq!(from_hex(&hex(&token)), Some(token));
        assert_eq!(from_hex("00"), None);
        assert_eq!(from_hex(&"é".repeat(32)), None);
        assert!(!format!("{:?}", saved(1, 1)).contains("0909"));
    }
}
