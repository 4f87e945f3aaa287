//! [`Config`]: what the daemon is told by its file, and what it assumes where the file says nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_disk::Packing;
use ebb_policy::{PolicyConfig, TaskSpec};
use ebb_protocol::paths;
use ebb_units::{Bytes, GRANULE, Priority};
use serde::Deserialize;
use serde::de::{Deserializer, Visitor};

use crate::budget::HostMemory;
use crate::rules::{NotifyConfig, Rule};
use crate::say::Level;

/// Whom a daemon serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// The user who started it (and root).
    User,
    /// Everybody on the machine; tasks are managed by their owner and by root.
    System,
}

/// What the daemon is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whom it serves.
    pub scope: Scope,
    /// Folder of its sockets.
    pub socket_dir: PathBuf,
    /// Folder of what survives it.
    pub state_dir: PathBuf,
    /// NVML's library; `None`: do without.
    pub nvml: Option<PathBuf>,
    /// End after so long without tasks.
    pub idle_exit: Option<Duration>,
    /// How much to tell on stderr; `None`: as the program that starts the daemon has it.
    pub log: Option<Level>,
    /// What a process without `ebb run` gets.
    pub task: TaskSpec,
    /// How long after a release for idleness a task is hibernated unasked; `None`: never.
    pub hibernate_after: Option<Duration>,
    /// The program that is the helper for the driver's checkpoint: `ebb` itself.
    pub helper: PathBuf,
    /// Bytes of each card that are promised to nobody; `None`: measured.
    pub reserve: Option<Bytes>,
    /// The host arena.
    pub arena: ArenaConfig,
    /// The disk tier; `None`: nothing is written to disk.
    pub disk: Option<DiskConfig>,
    /// Room on one card for what another evicts.
    pub peer: PeerConfig,
    /// What the arbiter decides by.
    pub policy: PolicyConfig,
    /// Rules of the operator.
    pub rules: Vec<Rule>,
    /// Whom they notify.
    pub notify: NotifyConfig,
    /// Weights of users, by number, that do not weigh 1.
    pub tenants: BTreeMap<u32, u32>,
    /// How long a reclaim waits for running work.
    pub busy_wait: Duration,
    /// The event log.
    pub event_log: EventLogConfig,
    /// How long to wait for programs to declare themselves after a restart before anything is granted.
    pub recovery: Duration,
}

/// The host arena's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// Most that it holds; `None`: by what the machine has.
    pub budget: Option<Bytes>,
    /// Size of a segment.
    pub segment: Bytes,
    /// Take segments from the pool of huge pages.
    pub huge_pages: bool,
    /// Threads that prepare segments.
    pub threads: usize,
    /// What of it programs pin.
    pub pinned: Pinned,
    /// One host copy of what several tasks have alike.
    pub share: bool,
}

/// What programs pin of the arena segments that they have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pinned {
    /// All: copies go straight, at the link's rate.
    #[default]
    All,
    /// One segment of each process, through which threads copy.
    Ring,
}

/// The disk tier's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Folder of the files.
    pub dir: PathBuf,
    /// Most that they may take together.
    pub limit: Bytes,
    /// Bytes of the file system that stay free.
    pub reserve: Bytes,
    /// What is off the card for so long is written, although nobody needs the host memory; `None`: never for that.
    pub after: Option<Duration>,
    /// How what gets smaller by it is packed.
    pub compress: Packing,
    /// Threads that write and read.
    pub threads: usize,
}

/// Settings of the room that cards lend each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Whether any is lent. Only between cards that programs reach over NVLink, so it costs nothing elsewhere.
    pub enabled: bool,
    /// The most that one card lends.
    pub limit: Bytes,
}

/// The event log's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLogConfig {
    /// Whether there is one.
    pub enabled: bool,
    /// Its file; `None`: `events.jsonl` in the state folder.
    pub path: Option<PathBuf>,
    /// Size at which a new file is begun; the last two are kept.
    pub max_bytes: Bytes,
}

/// A file with every setting and much said about it is far smaller. A device such as `/dev/zero` has no end.
const MAX_FILE: u64 = 1 << 20;

/// Reads a file of settings, if it is not absurdly long.
///
/// # Errors
/// [`ConfigError::Read`].
pub fn read_settings(path: &Path) -> Result<String, ConfigError> {
    read(path).map_err(|source| ConfigError::Read {
        path: path.into(),
        source,
    })
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?
        .take(MAX_FILE + 1)
        .read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            "it is longer than 1 MiB",
        ));
    }
    Ok(text)
}

/// What is wrong with the settings. The user's to mend; trying again without a change is of no use.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("the settings {path} cannot be read: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("the settings {path} are wrong:\n{source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value that makes no sense.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: String,
        /// What to do.
        fix: String,
    },
}

impl ConfigError {
    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> String {
        match self {
            Self::Read { path, source } => match source.kind() {
                std::io::ErrorKind::InvalidData
                | std::io::ErrorKind::FileTooLarge
                | std::io::ErrorKind::IsADirectory => {
                    "name a file of settings: `ebb daemon --example` prints one".into()
                }
                _ => format!("check that {} exists and that you may read it", path.display()),
            },
            Self::Parse { .. } => "`ebb daemon --example` prints a file with all settings".into(),
            Self::Invalid { fix, .. } => fix.clone(),
        }
    }
}

/// What the surroundings say: who we are, and the environment's folders.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// Our user id.
    pub uid: u32,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// `XDG_STATE_HOME`.
    pub state_home: Option<PathBuf>,
    /// `HOME`.
    pub home: Option<PathBuf>,
    /// `EBB_NVML`.
    pub nvml: Option<String>,
    /// `EBB_LOG`.
    pub log: Option<String>,
}

impl Surroundings {
    /// Those of this process.
    #[must_use]
    pub fn here() -> Self {
        let dir = |name: &str| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let word = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        Self {
            uid: rustix::process::geteuid().as_raw(),
            runtime_dir: dir("XDG_RUNTIME_DIR"),
            state_home: dir("XDG_STATE_HOME"),
            home: dir("HOME"),
            nvml: word("EBB_NVML"),
            log: word("EBB_LOG"),
        }
    }
}

impl Config {
    /// The file's text with every setting and its default, for people to start from.
    #[must_use]
    pub fn example() -> &'static str {
        include_str!("example.toml")
    }

    /// Without a file: a daemon of the user's own.
    #[must_use]
    pub fn defaults() -> Self {
        Self::from_raw(
            RawConfig::default(),
            &Surroundings {
                log: None,
                nvml: None,
                ..Surroundings::here()
            },
        )
        .expect("defaults are valid")
        .with_environment(&Surroundings::here())
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`] says where and what is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = read_settings(path)?;
        Self::parse(&text, path, &Surroundings::here())
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// [`ConfigError`] says where and what is wrong.
    pub fn parse(text: &str, path: &Path, around: &Surroundings) -> Result<Self, ConfigError> {
        let raw = toml::from_str(text).map_err(|source| ConfigError::Parse {
            path: path.into(),
            source: Box::new(source),
        })?;
        Ok(Self::from_raw(raw, around)?.with_environment(around))
    }

    /// The path of the event log; `None` if there is none.
    #[must_use]
    pub fn event_log_path(&self) -> Option<PathBuf> {
        let log = &self.event_log;
        log.enabled.then(|| {
            log.path
                .clone()
                .unwrap_or_else(|| self.state_dir.join("events.jsonl"))
        })
    }

    /// The arena's budget on this machine.
    ///
    /// # Errors
    /// A configured budget above what the machine or the control group has, with the numbers.
    pub fn arena_budget(&self, memory: &HostMemory) -> Result<Bytes, ConfigError> {
        let Some(budget) = self.arena.budget else {
            return Ok(memory.default_budget());
        };
        let wrong = |what: String, most: Bytes| ConfigError::Invalid {
            what,
            fix: format!(
                "set arena.budget to {} or less, or leave it out for {}",
                Bytes(most.0 / 10 * 9).round_down(Bytes::mib(1)).to_quantity(),
                memory.default_budget().round_down(Bytes::mib(1)).to_quantity()
            ),
        };
        if let Some(group) = memory.cgroup
            && budget > group.limit
        {
            return Err(wrong(
                format!(
                    "arena.budget is {budget}, but the daemon's control group may use {} (and uses {} already)",
                    group.limit, group.used
                ),
                group.left(),
            ));
        }
        if budget > memory.total {
            return Err(wrong(
                format!(
                    "arena.budget is {budget}, but the machine has {} ({} available)",
                    memory.total, memory.available
                ),
                memory.available,
            ));
        }
        Ok(budget)
    }

    fn with_environment(mut self, around: &Surroundings) -> Self {
        if let Some(level) = around.log.as_deref().and_then(Level::from_word) {
            self.log = Some(level);
        }
        if let Some(nvml) = &around.nvml {
            self.nvml = nvml_path(nvml);
        }
        self
    }

    fn from_raw(raw: RawConfig, around: &Surroundings) -> Result<Self, ConfigError> {
        let scope = raw.scope.unwrap_or(Scope::User);
        let user = scope == Scope::User;
        let socket_dir = raw.socket_dir.unwrap_or_else(|| {
            if user {
                paths::user_dir(around.runtime_dir.as_deref(), around.uid)
            } else {
                PathBuf::from(paths::SYSTEM_DIR)
            }
        });
        let state_dir = raw.state_dir.unwrap_or_else(|| {
            if !user {
                return PathBuf::from("/var/lib/ebb");
            }
            around
                .state_home
                .clone()
                .or_else(|| around.home.as_ref().map(|home| home.join(".local/state")))
                .filter(|dir| dir.is_absolute())
                .map_or_else(|| socket_dir.join("state"), |dir| dir.join("ebb"))
        });
        let idle_exit = raw
            .idle_exit
            .map_or(user.then_some(Duration::from_secs(600)), |t| t.0);
        let log = match raw.log.as_deref() {
            None => None,
            Some(word) => Some(Level::from_word(word).ok_or_else(|| ConfigError::Invalid {
                what: format!("log = \"{word}\" is no level"),
                fix: "write error, warn, info or debug".into(),
            })?),
        };
        let config = Self {
            scope,
            socket_dir,
            state_dir,
            nvml: nvml_path(raw.nvml.as_deref().unwrap_or("libnvidia-ml.so.1")),
            idle_exit,
            log,
            hibernate_after: raw.task.hibernate_after.as_ref().and_then(|t| t.0),
            helper: PathBuf::from("/proc/self/exe"),
            task: raw.task.resolve()?,
            reserve: raw.device.reserve.map(|s| s.0),
            arena: raw.arena.resolve()?,
            disk: raw.disk.resolve()?,
            peer: PeerConfig {
                enabled: raw.peer.enabled.unwrap_or(true),
                limit: raw.peer.limit.map_or(Bytes::MAX, |s| s.0),
            },
            busy_wait: raw.policy.busy_wait.map_or(Duration::from_secs(2), |t| t.0),
            policy: PolicyConfig {
                predict: raw.predict.enabled.unwrap_or(true),
                ..raw.policy.resolve()?
            },
            rules: raw.rule,
            notify: raw.notify,
            tenants: resolve_tenants(raw.tenants)?,
            event_log: EventLogConfig {
                enabled: raw.event_log.enabled.unwrap_or(true),
                path: raw.event_log.path,
                max_bytes: raw
                    .event_log
                    .max_bytes
                    .map_or(Bytes::mib(64), |s| s.0)
                    .max(Bytes::kib(64)),
            },
            recovery: Duration::from_secs(5),
        };
        let folders = [
            ("socket_dir", Some(&config.socket_dir)),
            ("state_dir", Some(&config.state_dir)),
            ("disk.dir", config.disk.as_ref().map(|disk| &disk.dir)),
        ];
        for (name, dir) in folders.into_iter().filter_map(|(name, dir)| Some((name, dir?))) {
            if !dir.is_absolute() {
                return Err(ConfigError::Invalid {
                    what: format!("{name} = \"{}\" is not an absolute path", dir.display()),
                    fix: "write the path from / on".into(),
                });
            }
        }
        Ok(config)
    }
}

/// Users by number. Names are not looked up: that may go over the network, and the daemon has to start without.
fn resolve_tenants(raw: BTreeMap<String, u32>) -> Result<BTreeMap<u32, u32>, ConfigError> {
    raw.into_iter()
        .map(|(user, weight)| {
            let number = user.parse().map_err(|_| ConfigError::Invalid {
                what: format!("tenants: `{user}` is no user id"),
                fix: "write the number that `id -u NAME` prints".into(),
            })?;
            if weight == 0 {
                return Err(ConfigError::Invalid {
                    what: format!("tenants: user {user} weighs nothing"),
                    fix: "write 1 or more".into(),
                });
            }
            Ok((number, weight))
        })
        .collect()
}

fn nvml_path(text: &str) -> Option<PathBuf> {
    (text != "off").then(|| PathBuf::from(text))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    #[serde(default)]
    rule: Vec<Rule>,
    #[serde(default)]
    notify: NotifyConfig,
    #[serde(default)]
    tenants: BTreeMap<String, u32>,
    scope: Option<Scope>,
    socket_dir: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    nvml: Option<String>,
    idle_exit: Option<Maybe>,
    log: Option<String>,
    #[serde(default)]
    task: RawTask,
    #[serde(default)]
    device: RawDevice,
    #[serde(default)]
    arena: RawArena,
    #[serde(default)]
    disk: RawDisk,
    #[serde(default)]
    peer: RawPeer,
    #[serde(default)]
    policy: RawPolicy,
    #[serde(default)]
    predict: RawPredict,
    #[serde(default)]
    event_log: RawEventLog,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTask {
    request: Option<Size>,
    limit: Option<Size>,
    priority: Option<Priority>,
    idle_release: Option<Maybe>,
    hibernate_after: Option<Maybe>,
}

impl RawTask {
    fn resolve(self) -> Result<TaskSpec, ConfigError> {
        let plain = TaskSpec::default();
        let spec = TaskSpec {
            request: self.request.map_or(plain.request, |s| s.0),
            limit: self.limit.map(|s| s.0),
            priority: self.priority.unwrap_or(plain.priority),
            idle_release: self.idle_release.map_or(plain.idle_release, |t| t.0),
            tenant: plain.tenant,
        };
        match spec.limit {
            Some(limit) if spec.request > limit => Err(ConfigError::Invalid {
                what: format!("task.request is {}, above task.limit, {limit}", spec.request),
                fix: "raise the limit or lower the request".into(),
            }),
            _ => Ok(spec),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDevice {
    reserve: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawArena {
    budget: Option<Size>,
    segment: Option<Size>,
    huge_pages: Option<bool>,
    threads: Option<usize>,
    pinned: Option<Pinned>,
    share: Option<bool>,
}

impl RawArena {
    fn resolve(self) -> Result<ArenaConfig, ConfigError> {
        let segment = self.segment.map_or(Bytes::mib(256), |s| s.0);
        if segment.is_zero() || !segment.0.is_multiple_of(GRANULE.0) || segment > Bytes::gib(16) {
            return Err(ConfigError::Invalid {
                what: format!("arena.segment is {segment}"),
                fix: "write a multiple of 2Mi up to 16Gi".into(),
            });
        }
        let threads = self.threads.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2).min(8))
        });
        if !(1..=64).contains(&threads) {
            return Err(ConfigError::Invalid {
                what: format!("arena.threads is {threads}"),
                fix: "write a number from 1 to 64".into(),
            });
        }
        Ok(ArenaConfig {
            budget: self.budget.map(|s| s.0),
            segment,
            huge_pages: self.huge_pages.unwrap_or(false),
            threads,
            pinned: self.pinned.unwrap_or_default(),
            share: self.share.unwrap_or(true),
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPeer {
    enabled: Option<bool>,
    limit: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDisk {
    dir: Option<PathBuf>,
    limit: Option<Size>,
    reserve: Option<Size>,
    after: Option<Maybe>,
    compress: Option<Compress>,
    threads: Option<usize>,
}

/// How blocks are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Compress {
    #[serde(alias = "off")]
    None,
    Lz4,
    Zstd,
}

impl From<Compress> for Packing {
    fn from(compress: Compress) -> Self {
        match compress {
            Compress::None => Self::None,
            Compress::Lz4 => Self::Lz4,
            Compress::Zstd => Self::Zstd,
        }
    }
}

impl RawDisk {
    fn resolve(self) -> Result<Option<DiskConfig>, ConfigError> {
        let Some(dir) = self.dir else {
            let others = self.limit.is_some() || self.after.is_some() || self.compress.is_some();
            if others || self.reserve.is_some() || self.threads.is_some() {
                return Err(ConfigError::Invalid {
                    what: "there are settings in [disk], and no disk.dir".into(),
                    fix: "name the folder, or leave the section out".into(),
                });
            }
            return Ok(None);
        };
        let threads = self.threads.unwrap_or(4);
        if !(1..=64).contains(&threads) {
            return Err(ConfigError::Invalid {
                what: format!("disk.threads is {threads}"),
                fix: "write a number from 1 to 64".into(),
            });
        }
        Ok(Some(DiskConfig {
            dir,
            limit: self.limit.map_or(Bytes::MAX, |s| s.0),
            reserve: self.reserve.map_or(Bytes::gib(10), |s| s.0),
            after: self.after.map_or(Some(Duration::from_secs(600)), |t| t.0),
            compress: self.compress.map_or(Packing::None, Packing::from),
            threads,
        }))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPredict {
    enabled: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPolicy {
    idle_after: Option<Time>,
    min_turn: Option<Time>,
    turn_per_copy: Option<u32>,
    turn_owed: Option<Time>,
    owed_max: Option<Time>,
    preempt: Option<bool>,
    preempt_grace: Option<Time>,
    low_mark: Option<Percent>,
    high_mark: Option<Percent>,
    alloc_wait: Option<Time>,
    alloc_wait_max: Option<Time>,
    busy_wait: Option<Time>,
    retry: Option<Time>,
    retry_max: Option<Time>,
    order_timeout: Option<Time>,
    patience: Option<Time>,
    starve_after: Option<Time>,
}

impl RawPolicy {
    fn resolve(self) -> Result<PolicyConfig, ConfigError> {
        let plain = PolicyConfig::default();
        let or = |t: Option<Time>, default| t.map_or(default, |t| t.0);
        let policy = PolicyConfig {
            idle_after: or(self.idle_after, plain.idle_after),
            min_turn: or(self.min_turn, plain.min_turn),
            turn_per_copy: self.turn_per_copy.unwrap_or(plain.turn_per_copy),
            turn_owed: or(self.turn_owed, plain.turn_owed),
            owed_max: or(self.owed_max, plain.owed_max),
            preempt: self.preempt.unwrap_or(plain.preempt),
            preempt_grace: or(self.preempt_grace, plain.preempt_grace),
            low_mark: self.low_mark.map_or(plain.low_mark, |p| p.0),
            high_mark: self.high_mark.or(self.low_mark).map_or(plain.high_mark, |p| p.0),
            alloc_wait: or(self.alloc_wait, plain.alloc_wait),
            alloc_wait_max: or(self.alloc_wait_max, plain.alloc_wait_max),
            retry: or(self.retry, plain.retry),
            retry_max: or(self.retry_max, plain.retry_max),
            order_timeout: or(self.order_timeout, plain.order_timeout),
            patience: or(self.patience, plain.patience),
            starve_after: or(self.starve_after, plain.starve_after),
            ..plain
        };
        for (low, high, names) in [
            (
                policy.alloc_wait,
                policy.alloc_wait_max,
                "alloc_wait is longer than alloc_wait_max",
            ),
            (policy.retry, policy.retry_max, "retry is longer than retry_max"),
        ] {
            if low > high {
                return Err(ConfigError::Invalid {
                    what: format!("policy.{names}"),
                    fix: "shorten the first or lengthen the second".into(),
                });
            }
        }
        if policy.high_mark < policy.low_mark {
            return Err(ConfigError::Invalid {
                what: "policy.high_mark is below policy.low_mark".into(),
                fix: "raise the first or lower the second".into(),
            });
        }
        if policy.retry.is_zero() || policy.order_timeout.is_zero() {
            return Err(ConfigError::Invalid {
                what: "policy.retry and policy.order_timeout must be above zero".into(),
                fix: "leave them out for the defaults".into(),
            });
        }
        Ok(policy)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEventLog {
    enabled: Option<bool>,
    path: Option<PathBuf>,
    max_bytes: Option<Size>,
}

/// A size as people write it, or a number of bytes.
#[derive(Clone, Copy, Debug)]
struct Size(Bytes);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size like \"20Gi\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map(Size).map_err(E::custom)
            }
            fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<Size, E> {
                u64::try_from(n)
                    .map(|n| Size(Bytes(n)))
                    .map_err(|_| E::custom(format!("{n} is negative; a size is zero or more")))
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// A part of a whole as people write it, `5%` or `12.5%`, in thousandths.
#[derive(Clone, Copy, Debug)]
struct Percent(u32);

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
        parse_percent(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

/// Reads a part such as `5%` or `12.5%`, in thousandths.
///
/// # Errors
/// A sentence that says what is wrong.
pub(crate) fn parse_percent(text: &str) -> Result<u32, String> {
    let wrong = || format!("`{text}` is not a part of a whole; write one like 5% or 12.5%");
    let number = text.trim().strip_suffix('%').ok_or_else(wrong)?.trim();
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(tenth) || tenth.len() > 1 {
        return Err(wrong());
    }
    let whole: u32 = whole.parse().map_err(|_| wrong())?;
    let tenth: u32 = tenth.parse().map_err(|_| wrong())?;
    let thousandths = whole.saturating_mul(10).saturating_add(tenth);
    if thousandths > 1000 {
        return Err(format!("`{text}` is more than the whole"));
    }
    Ok(thousandths)
}

/// A time as people write it.
#[derive(Clone, Copy, Debug)]
struct Time(Duration);

/// A time, or `off`.
#[derive(Clone, Copy, Debug)]
struct Maybe(Option<Duration>);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
        parse_duration(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Maybe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'_, str>>::deserialize(deserializer)?;
        if text == "off" || text == "never" {
            return Ok(Self(None));
        }
        parse_duration(&text)
            .map(|t| Self(Some(t)))
            .map_err(serde::de::Error::custom)
    }
}

/// Reads a time such as `250ms`, `30s`, `5m`, `1h`.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let wrong = || format!("`{text}` is not a time; write one like 250ms, 30s, 5m or 1h");
    let number: u64 = text[..end].parse().map_err(|_| wrong())?;
    let millis: u64 = match &text[end..] {
        "ms" => 1,
        "s" => 1_000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(millis)
        .map(Duration::from_millis)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests;
