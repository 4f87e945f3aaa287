//! What the command line says to the daemon: one JSON object a line, one answer a request.
//!
//! `{"op":"list"}` → `{"ok":{"kind":"list",...}}` or `{"error":{"message":...,"fix":...}}`. A connection may carry any
//! number of requests. [`Request::Watch`] is answered by a line whenever something changed, until the client hangs up.

use std::io::{BufRead, Write};

use ebb_units::{Bytes, DeviceUuid, Priority, TaskId};
use serde::{Deserialize, Serialize};

/// The longest line that either side accepts, in bytes.
pub const MAX_LINE: usize = 4 << 20;

/// A request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// Who are you?
    Hello,
    /// A new task whose first process is the caller (it becomes the program by `exec`).
    CreateTask(NewTask),
    /// All tasks, devices and the arena.
    List,
    /// [`Request::List`] again and again, a line whenever something changed and at least every `interval_ms`.
    Watch {
        /// At most one line in this time.
        interval_ms: u64,
    },
    /// Evict a task and keep it off the card.
    Pause {
        /// Which: `t3`, a name, or a process id.
        task: String,
        /// How long to wait for running work, in ms, before answering "busy".
        wait_ms: Option<u64>,
    },
    /// Take all of a task off the cards, contexts included, by the driver's own checkpoint. It comes back when it touches the GPU.
    Hibernate {
        /// Which.
        task: String,
        /// How long to wait for running work, in ms, before answering "busy".
        wait_ms: Option<u64>,
    },
    /// Give back what programs keep for later and nothing lives in: their caches, and what their pools do not need. Nothing is evicted.
    Trim {
        /// Which; `None`: all of the caller's, or all.
        task: Option<String>,
    },
    /// Let a paused task run again; bring a hibernated one back.
    Resume {
        /// Which.
        task: String,
    },
    /// Change a task's limit (and request, priority).
    Limit {
        /// Which.
        task: String,
        /// New limit a card; `None` leaves it.
        limit: Option<Bytes>,
        /// New request a card.
        request: Option<Bytes>,
        /// New priority.
        priority: Option<Priority>,
    },
    /// What happened to a task that whoever runs it should know. What is told to give way is told once.
    News {
        /// Which.
        task: String,
        /// Whether the caller has the program give way when it is told to; who does not is not told.
        #[serde(default)]
        gives_way: bool,
    },
    /// The operator's rules, where they stand, and what they did.
    Rules,
    /// Read the file of settings again.
    Reload,
    /// What was decided about tasks, and what they wait for.
    Why {
        /// Which; `None`: all.
        task: Option<String>,
    },
    /// What is intercepted and releasable in one process.
    Doctor {
        /// The process as the daemon sees it.
        pid: u32,
    },
    /// Stop the daemon; programs go on with what they have.
    Shutdown,
}

/// What `ebb run` wants for its program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewTask {
    /// Name to show; the program's if none was given.
    pub name: String,
    /// Bytes that are the task's for the asking, on each card that it uses.
    pub request: Bytes,
    /// Hard cap on each card; `None`: the card.
    pub limit: Option<Bytes>,
    /// Who goes first.
    pub priority: Priority,
    /// Idle time after which memory is released unasked, in ms; `None`: the daemon's default; 0: never.
    pub idle_release_ms: Option<u64>,
    /// Time after a release for idleness after which the task is hibernated unasked, in ms; `None`: the daemon's default; 0: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hibernate_after_ms: Option<u64>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(
    clippy::large_enum_variant,
    reason = "one at a time, written and forgotten at once"
)]
pub enum Answer {
    /// It worked.
    Ok(Payload),
    /// It did not.
    Error(Failure),
}

/// Why a request failed, for a person.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What was wrong, where.
    pub message: String,
    /// What to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// Whether the request itself was bad (exit status 2), rather than the moment.
    #[serde(default)]
    pub usage: bool,
}

/// What a request brought.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Payload {
    /// To [`Request::Hello`].
    Hello {
        /// Version of the daemon.
        version: String,
        /// Its process.
        pid: u32,
        /// Where its log is.
        event_log: Option<String>,
        /// What is not as it should be.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        troubles: Vec<Trouble>,
    },
    /// To [`Request::CreateTask`].
    Task {
        /// The task.
        task: TaskId,
        /// Its capability, 64 hexadecimal digits, for the program's environment.
        token: String,
    },
    /// To [`Request::List`] and [`Request::Watch`].
    List(Snapshot),
    /// To [`Request::Doctor`]: the layer's report and what the daemon adds.
    Doctor {
        /// The daemon's view of the process.
        process: ProcessRow,
        /// The layer's own report; `None` if it did not answer.
        report: Option<serde_json::Value>,
    },
    /// To [`Request::News`].
    News(TaskNews),
    /// To [`Request::Trim`].
    Trimmed {
        /// What each task gave back.
        tasks: Vec<TrimmedTask>,
    },
    /// To [`Request::Rules`].
    Rules {
        /// The file of settings that they come from.
        config: Option<String>,
        /// All of them, in the file's order.
        rules: Vec<RuleRow>,
        /// What they did last, the oldest first.
        fired: Vec<FiredRow>,
        /// What keeps them from it.
        troubles: Vec<Trouble>,
    },
    /// To [`Request::Why`].
    Why {
        /// One for each task.
        tasks: Vec<TaskWhy>,
        /// Tasks that ended after memory was refused to them, the last few, the oldest first.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        gone: Vec<GoneRow>,
    },
    /// To everything else.
    Done {
        /// A sentence for a person.
        message: String,
    },
}

/// What a task gave back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrimmedTask {
    /// The task.
    pub task: TaskId,
    /// Its name.
    pub name: String,
    /// How much, on all cards.
    pub bytes: Bytes,
    /// Processes that did not answer.
    pub silent: u32,
}

/// Something that the daemon goes on without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trouble {
    /// What does not work, and why.
    pub found: String,
    /// What to do.
    pub fix: String,
}

/// A rule of the operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleRow {
    /// Its name.
    pub name: String,
    /// Its condition.
    pub when: String,
    /// What it does then, in order.
    pub deeds: Vec<String>,
    /// By how much the condition has to fail before it fires again, in thousandths.
    pub margin_thousandths: u32,
    /// How long after it fired it does not fire again, in ms.
    pub rest_ms: u64,
    /// It only says what it would do.
    pub dry_run: bool,
    /// Where it stands on each card.
    pub cards: Vec<RuleCardRow>,
}

/// A rule on one card.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCardRow {
    /// Index of the card as `nvidia-smi` shows it.
    pub gpu: u32,
    /// `quiet`: the condition does not hold; `pending`: it does, and not for long enough; `fired`: it did, and the condition has not failed since.
    pub state: String,
    /// For how long, in ms; `None` if it is quiet.
    pub since_ms: Option<u64>,
    /// How often it fired.
    pub fired: u64,
    /// How long ago the last time was, in ms.
    pub last_ms: Option<u64>,
}

/// That a rule fired.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FiredRow {
    /// How long ago, in ms.
    pub ago_ms: u64,
    /// The rule.
    pub rule: String,
    /// Index of the card as `nvidia-smi` shows it.
    pub gpu: u32,
    /// What was seen.
    pub text: String,
    /// What was done, and to whom.
    pub done: String,
    /// It was only said.
    pub dry_run: bool,
}

/// What happened to a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskNews {
    /// It is to save itself and give way within so many milliseconds.
    pub give_way_ms: Option<u64>,
    /// Allocations that were refused for good so far.
    pub denials: u64,
    /// Of the last of these: who held what, why it did not fit, and what to change.
    pub report: Option<String>,
}

/// What was decided about a task, and what it waits for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskWhy {
    /// Its id.
    pub task: TaskId,
    /// Its name.
    pub name: String,
    /// What its processes wait for.
    pub waits: Vec<WaitRow>,
    /// The last decisions, the oldest first.
    pub decisions: Vec<DecisionRow>,
}

/// A task that ended after memory was refused to it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoneRow {
    /// Its id.
    pub task: TaskId,
    /// Its name.
    pub name: String,
    /// How long ago it ended, in ms.
    pub ended_ms: u64,
    /// How long ago memory was refused to it last, in ms.
    pub refused_ms: u64,
    /// Who held what then, why it did not fit, and what to change.
    pub report: String,
}

/// What a process waits for on a card.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WaitRow {
    /// Process id as the daemon sees it.
    pub pid: u32,
    /// Index of the card as `nvidia-smi` shows it.
    pub gpu: u32,
    /// How long it has waited, in ms.
    pub waited_ms: u64,
    /// What it needs next.
    pub needs: Bytes,
    /// What of its memory is away besides.
    pub later: Bytes,
    /// Free on the card.
    pub free: Bytes,
    /// What others were told to give back, and have not yet.
    pub coming: Bytes,
    /// What is missing beside these.
    pub short: Bytes,
    /// Its place among those who wait there, from 1.
    pub place: u32,
    /// The same in words, with what has to happen.
    pub text: String,
}

/// One decision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DecisionRow {
    /// How long ago, in ms.
    pub ago_ms: u64,
    /// What, and why.
    pub text: String,
}

/// Everything that can be shown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Milliseconds since the daemon started.
    pub uptime_ms: u64,
    /// The cards.
    pub devices: Vec<DeviceRow>,
    /// The tasks.
    pub tasks: Vec<TaskRow>,
    /// The host arena.
    pub arena: ArenaRow,
    /// Counted since the daemon started.
    pub totals: Totals,
}

/// One card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceRow {
    /// Identity.
    pub uuid: DeviceUuid,
    /// Index as `nvidia-smi` shows it.
    pub index: u32,
    /// Name.
    pub name: String,
    /// What the card has.
    pub total: Bytes,
    /// What tasks can get: total less the driver's reserve.
    pub capacity: Bytes,
    /// Granted to tasks, caches included.
    pub leased: Bytes,
    /// Contexts and such of the tasks.
    pub overhead: Bytes,
    /// Held by programs that ebb does not manage.
    pub unmanaged: Bytes,
    /// Lent to what other cards evicted.
    #[serde(default)]
    pub lodged: Bytes,
    /// Neither granted nor held.
    pub free: Bytes,
    /// The most that was ever granted and held at once.
    pub peak: Bytes,
    /// Processes on it that ebb does not manage, as far as they can be named; their bytes are in `unmanaged`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub strangers: Vec<StrangerRow>,
}

/// A process that holds memory of a card and has no account there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StrangerRow {
    /// Process id as the daemon sees it.
    pub pid: u32,
    /// The program.
    pub program: String,
    /// The task whose environment it has; its bytes count against that task's limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskId>,
    /// What it holds.
    pub bytes: Bytes,
    /// Why it is not managed, as far as can be seen from outside.
    pub why: String,
}

/// One task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskRow {
    /// Its id.
    pub task: TaskId,
    /// Its name.
    pub name: String,
    /// Who goes first.
    pub priority: Priority,
    /// Guaranteed bytes.
    pub request: Bytes,
    /// Cap; `None`: the card.
    pub limit: Option<Bytes>,
    /// Paused by hand.
    pub paused: bool,
    /// How long its last hibernation took, and the way back; `None` before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hibernation: Option<HibernationRow>,
    /// Its processes.
    pub processes: Vec<ProcessRow>,
}

/// A hibernation by its phases, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HibernationRow {
    /// From the order until nothing is on the card: `asked`, `evicted`, `quiet and unpinned`, `locked`, `checkpointed`; the last two for each process.
    pub down: Vec<PhaseRow>,
    /// From the wish for it until all is back: `room`, `restored`, `unlocked`, `copied in`.
    pub up: Vec<PhaseRow>,
}

/// A phase that is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseRow {
    /// Its name.
    pub what: String,
    /// How long it took, by the daemon's clock.
    pub ns: u64,
}

/// One process on one card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessRow {
    /// Process id as the daemon sees it.
    pub pid: u32,
    /// The program.
    pub program: String,
    /// The card; `None` before the program made a context.
    pub device: Option<DeviceUuid>,
    /// `active`, `idle`, `waiting`, `restoring`, `evicting`, `released`, `paused`, `hibernating`, `hibernated`, `waking`, `attached`,
    /// `not_connected`.
    pub state: String,
    /// Why it is in that state, if there is something to say.
    pub why: String,
    /// How long it has been so, in ms.
    pub since_ms: u64,
    /// Live allocations.
    pub allocated: Bytes,
    /// On the card.
    pub resident: Bytes,
    /// Off the card: in host memory, on disk, or on another card.
    pub evicted: Bytes,
    /// Of that: on other cards.
    #[serde(default)]
    pub lodged: Bytes,
    /// Of that: on disk.
    #[serde(default)]
    pub on_disk: Bytes,
    /// On the card and unused.
    pub cached: Bytes,
    /// Managed memory, which the driver moves between card and host by itself.
    #[serde(default)]
    pub managed: Bytes,
    /// Of that: pushed to the host by a release, and not touched on the GPU since.
    #[serde(default)]
    pub managed_out: Bytes,
    /// Cannot be moved.
    pub pinned: Bytes,
    /// The driver's own.
    pub overhead: Bytes,
    /// Of that, what NVML sees and the library does not: local memory of kernels, modules, the printf heap, or memory that came by
    /// another interface (Vulkan, OpenGL).
    #[serde(default)]
    pub unseen: Bytes,
    /// Granted.
    pub lease: Bytes,
    /// Times that memory was taken.
    pub releases: u64,
    /// Times that it was all brought back.
    pub restores: u64,
}

/// The host arena.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ArenaRow {
    /// Most it may hold.
    pub budget: Bytes,
    /// Held by segments at present.
    pub held: Bytes,
    /// Of those, in programs' hands.
    pub lent: Bytes,
    /// Of what is held: host copies that several tasks have in common.
    #[serde(default)]
    pub common: Bytes,
    /// What those would take beyond that if each had its own.
    #[serde(default)]
    pub spared: Bytes,
    /// The disk tier; `None` if there is none.
    #[serde(default)]
    pub disk: Option<DiskRow>,
}

/// The disk tier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskRow {
    /// Its folder.
    pub dir: String,
    /// Most that its files may take.
    pub limit: Bytes,
    /// What they take at present.
    pub stored: Bytes,
    /// Of segments that are there: their bytes in memory.
    pub segments: Bytes,
    /// Bytes of segments written since the daemon started, as they were in memory.
    pub spilled: Bytes,
    /// Of those, zeros, which take no room.
    pub zeros: Bytes,
    /// Bytes of segments read back.
    pub loaded: Bytes,
    /// Why nothing is written at present; empty if all is well.
    pub trouble: String,
}

/// Counters since the daemon started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Reclaims that took something by copying.
    pub releases: u64,
    /// Complete restores.
    pub restores: u64,
    /// Bytes copied out.
    pub out_bytes: Bytes,
    /// Time of that copying in ns.
    pub out_nanos: u64,
    /// Bytes copied in.
    pub in_bytes: Bytes,
    /// Time of that copying in ns.
    pub in_nanos: u64,
    /// Asks that were refused for good.
    pub denials: u64,
}

/// A line that is no message.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The socket failed.
    #[error("the connection to the daemon failed")]
    Io(#[from] std::io::Error),
    /// Not JSON of this shape.
    #[error("the peer sent a line that is no message")]
    Format(#[from] serde_json::Error),
    /// Longer than [`MAX_LINE`].
    #[error("the peer sent a line of more than {MAX_LINE} bytes")]
    TooLong,
    /// The peer hung up.
    #[error("the daemon closed the connection")]
    Closed,
}

/// Writes one message as a line.
///
/// # Errors
/// The writer's.
pub fn write_line<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), ControlError> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()?;
    Ok(())
}

/// Reads one line as a message.
///
/// # Errors
/// [`ControlError::Closed`] at the end of the stream, the reader's, or what is wrong with the line.
pub fn read_line<T: for<'de> Deserialize<'de>>(from: &mut impl BufRead) -> Result<T, ControlError> {
    let mut line = Vec::new();
    let limit = MAX_LINE as u64 + 1;
    std::io::Read::take(&mut *from, limit).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Err(ControlError::Closed);
    }
    if line.last() != Some(&b'\n') {
        return Err(if line.len() > MAX_LINE {
            ControlError::TooLong
        } else {
            ControlError::Closed
        });
    }
    Ok(serde_json::from_slice(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_look_as_documented() {
        assert_eq!(serde_json::to_string(&Request::List).unwrap(), r#"{"op":"list"}"#);
        let pause: Request = serde_json::from_str(r#"{"op":"pause","task":"t1"}"#).unwrap();
        assert_eq!(
            pause,
            Request::Pause {
                task: "t1".into(),
                wait_ms: None
            }
        );
        assert!(serde_json::from_str::<Request>(r#"{"op":"explode"}"#).is_err());
    }

    #[test]
    fn answers_read_back_line_by_line() {
        let answers = [
            Answer::Ok(Payload::List(Snapshot::default())),
            Answer::Ok(Payload::Task {
                task: TaskId(3),
                token: "00".into(),
            }),
            Answer::Error(Failure {
                message: "no".into(),
                fix: Some("do".into()),
                usage: true,
            }),
        ];
        let mut bytes = Vec::new();
        for answer in &answers {
            write_line(&mut bytes, answer).unwrap();
        }
        let mut reader = bytes.as_slice();
        for answer in &answers {
            assert_eq!(&read_line::<Answer>(&mut reader).unwrap(), answer);
        }
        assert!(matches!(
            read_line::<Answer>(&mut reader),
            Err(ControlError::Closed)
        ));
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut endless = std::io::BufReader::new(std::io::repeat(b'a'));
        assert!(matches!(
            read_line::<Answer>(&mut endless),
            Err(ControlError::TooLong)
        ));
    }
}
