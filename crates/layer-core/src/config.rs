//! What the engine is told at its start.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ebb_device::HostMemory;
use ebb_protocol::paths;
use ebb_units::Bytes;

/// What the engine is told at its start.
#[derive(Clone)]
pub struct Config {
    /// Sockets to try, best first.
    pub sockets: Vec<PathBuf>,
    /// The task's capability; zeros if there is none.
    pub token: [u8; 32],
    /// The program's name, for display.
    pub program: String,
    /// Events are appended to this file too.
    pub log: Option<PathBuf>,
    /// Whether the program's allocator answers an out-of-memory by freeing its caches and trying again. Asked at the
    /// moment of need, because such libraries are loaded late. Must not allocate device memory.
    pub program_retries: fn() -> bool,
    /// How long an allocation of such a program waits the first time. The daemon's word replaces it.
    pub alloc_wait: Duration,
    /// How long any allocation waits. The daemon's word replaces it.
    pub alloc_wait_max: Duration,
    /// How long an eviction waits for running work. The daemon's word replaces it.
    pub busy_wait: Duration,
    /// How long an eviction waits for more host memory, counted from the last that it got.
    pub arena_wait: Duration,
    /// How long an eviction waits for the daemon's word on room on another card. It answers at once if it lives.
    pub lodging_wait: Duration,
    /// How long an allocation that may be waits for a card that is full all the same. The daemon compares the card with its
    /// ledger every second, and then takes back what was promised too much; a killed process takes a while to be gone.
    pub full_wait: Duration,
    /// How long the start waits for the daemon's first answer. Without a daemon there is nothing to wait for.
    pub connect_wait: Duration,
    /// The daemon hears of use at most so often.
    pub usage_every: Duration,
    /// Physical memory that freed allocations may keep for the next ones, per device.
    pub cache_max: Bytes,
    /// The largest physical chunk. What a good size is: see `chunk_size` in `pool`.
    pub chunk_max: Bytes,
    /// Host memory that copies of what is back on the card may keep, as long as nobody needs it.
    pub keep_max: Bytes,
    /// An eviction that takes everything asks the GPU about so much at a time. Two waves of blocks on a large card: a millisecond.
    pub survey_slice: Bytes,
    /// Nothing is oversubscribed: an allocation that has no room now fails now, and free memory is what could be had without anybody's
    /// eviction.
    pub strict: bool,
    /// Most lease that is asked for before it is needed, when a program makes many small allocations; 0 for none.
    pub ahead_max: Bytes,
    /// Settings of the pool that frameworks allocate from, as `EBB_POOL` has them.
    pub pool: String,
    /// A device that nothing has touched for so long rests: then small blocks of that pool are brought together.
    pub pool_rest: Duration,
    /// Where arena segments appear.
    pub host: Arc<dyn HostMemory>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the token: whoever reads a log must not be able to join the task.
        f.debug_struct("Config")
            .field("sockets", &self.sockets)
            .field("program", &self.program)
            .field("log", &self.log)
            .finish_non_exhaustive()
    }
}

impl Config {
    /// Defaults, with no daemon to connect to.
    #[must_use]
    pub fn new(host: Arc<dyn HostMemory>) -> Self {
        Self {
            sockets: Vec::new(),
            token: [0; 32],
            program: String::new(),
            log: None,
            program_retries: || false,
            alloc_wait: Duration::from_millis(500),
            alloc_wait_max: Duration::from_secs(600),
            busy_wait: Duration::from_secs(2),
            arena_wait: Duration::from_secs(3),
            lodging_wait: Duration::from_millis(200),
            full_wait: Duration::from_secs(20),
            connect_wait: Duration::from_secs(2),
            usage_every: Duration::from_millis(100),
            cache_max: Bytes::gib(1),
            chunk_max: Bytes::mib(128),
            keep_max: Bytes(u64::MAX),
            survey_slice: Bytes::gib(4),
            strict: false,
            ahead_max: Bytes::mib(64),
            pool: String::new(),
            pool_rest: Duration::from_secs(5),
            host,
        }
    }

    /// As the environment of this process says: `EBB_SOCKET_DIR`, `EBB_TASK_TOKEN`, `EBB_LOG`, `EBB_STRICT`, `EBB_KEEP`,
    /// `EBB_POOL`.
    #[must_use]
    pub fn from_env(host: Arc<dyn HostMemory>) -> Self {
        let path = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let named = path(paths::ENV_SOCKET_DIR);
        let runtime = path("XDG_RUNTIME_DIR");
        let uid = rustix::process::geteuid().as_raw();
        Self {
            sockets: paths::candidates(named.as_deref(), runtime.as_deref(), uid)
                .into_iter()
                .map(|dir| dir.join(paths::LAYER_SOCKET))
                .collect(),
            token: std::env::var(paths::ENV_TOKEN)
                .ok()
                .and_then(|hex| parse_token(&hex))
                .unwrap_or([0; 32]),
            program: std::env::current_exe()
                .ok()
                .and_then(|exe| Some(exe.file_name()?.to_string_lossy().into_owned()))
                .unwrap_or_default(),
            log: path("EBB_LOG"),
            strict: std::env::var(paths::ENV_STRICT)
                .is_ok_and(|value| matches!(value.as_str(), "1" | "on" | "true" | "yes")),
            keep_max: std::env::var(paths::ENV_KEEP)
                .ok()
                .and_then(|text| text.parse().ok())
                .unwrap_or(Bytes(u64::MAX)),
            pool: std::env::var(paths::ENV_POOL).unwrap_or_default(),
            ..Self::new(host)
        }
    }
}

/// 64 hexadecimal digits.
fn parse_token(hex: &str) -> Option<[u8; 32]> {
    let digits = hex.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let digit = |at: usize| char::from(digits[at]).to_digit(16);
    let mut token = [0; 32];
    for (i, byte) in token.iter_mut().enumerate() {
        *byte = u8::try_from(digit(2 * i)? * 16 + digit(2 * i + 1)?).ok()?;
    }
    Some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens() {
        assert_eq!(parse_token(&"0f".repeat(32)), Some([15; 32]));
        assert_eq!(parse_token(&"0g".repeat(32)), None);
        assert_eq!(parse_token("0f"), None);
        assert_eq!(parse_token(&"é".repeat(32)), None);
    }
}
