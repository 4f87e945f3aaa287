//! Making calls fail: `EBB_SIM_FAULT`, and writing down which calls were made: `EBB_SIM_TRACE`.
//!
//! `EBB_SIM_FAULT` is a list of rules, separated by commas:
//!
//! | rule | what it does |
//! | --- | --- |
//! | `cuMemCreate:3:2` | the third `cuMemCreate` of this process returns error 2 and does nothing |
//! | `cuMemMap:2+:999` | the second and every later one |
//! | `cuMemMap:*:999` | every one |
//! | `cuMemMap:1:kill` | kills this process with SIGKILL in the first one, before it does anything |
//! | `cuMemMap:1:stop` | stops it with SIGSTOP there; SIGCONT lets it go on: a test does what it wants meanwhile |
//! | `cuMemMap:1:hang=250` | sleeps 250 ms in the first one, then does it |
//!
//! A name without a suffix means all forms of a call (`cuMemAlloc` counts `cuMemAlloc_v2` too, and `cuMemcpyHtoDAsync` also
//! `cuMemcpyHtoDAsync_v2_ptsz`); a full name means that symbol alone. `*` as the name means any call.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ebb_abi::CUresult;

use crate::R;

#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Error(CUresult),
    Kill,
    Stop,
    Hang(Duration),
}

#[derive(Debug)]
struct Rule {
    name: String,
    first: u64,
    last: u64,
    effect: Effect,
    calls: AtomicU64,
}

impl Rule {
    /// Counts a call and says whether the rule is for it.
    fn is_due(&self) -> bool {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        (self.first..=self.last).contains(&call)
    }
}

/// What this process was told to do on its calls.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    rules: Vec<Rule>,
    trace: Option<File>,
}

impl Faults {
    /// Reads the two variables. A rule that does not parse is an error: a test that injects nothing would pass for nothing.
    pub(crate) fn from_env() -> Result<Self, String> {
        let rules = match std::env::var("EBB_SIM_FAULT") {
            Ok(text) => parse(&text)?,
            Err(_) => Vec::new(),
        };
        let trace = match std::env::var_os("EBB_SIM_TRACE").filter(|path| !path.is_empty()) {
            Some(path) => Some(
                OpenOptions::new()
                    .append(true)
                    .create(true)
                    .open(&path)
                    .map_err(|error| format!("EBB_SIM_TRACE={}: {error}", path.display()))?,
            ),
            None => None,
        };
        Ok(Self { rules, trace })
    }

    /// Whether there is anything to do at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.rules.is_empty() && self.trace.is_none()
    }

    /// What happens at a call of this symbol before it does anything.
    pub(crate) fn at(&self, symbol: &str) -> R {
        if let Some(mut file) = self.trace.as_ref() {
            // One write call, so that lines of threads and processes do not mix. A full disk only loses the trace.
            let _ = file.write_all(format!("{symbol}\n").as_bytes());
        }
        // Every rule counts the call, whatever another rule makes of it.
        let due: Vec<&Rule> = self
            .rules
            .iter()
            .filter(|rule| names(&rule.name, symbol) && rule.is_due())
            .collect();
        for rule in due {
            match &rule.effect {
                Effect::Error(code) => return Err(*code),
                Effect::Hang(time) => std::thread::sleep(*time),
                Effect::Kill => signal(libc::SIGKILL),
                Effect::Stop => signal(libc::SIGSTOP),
            }
        }
        Ok(())
    }
}

fn signal(signal: libc::c_int) {
    // SAFETY: sending a signal to the own process has no preconditions.
    unsafe { libc::kill(libc::getpid(), signal) };
}

/// The name without `_ptds`/`_ptsz` and `_v2`.
fn base(symbol: &str) -> &str {
    let symbol = symbol
        .strip_suffix("_ptds")
        .or_else(|| symbol.strip_suffix("_ptsz"))
        .unwrap_or(symbol);
    match symbol.rsplit_once("_v") {
        Some((head, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => head,
        _ => symbol,
    }
}

fn names(rule: &str, symbol: &str) -> bool {
    rule == "*" || rule == symbol || rule == base(symbol)
}

fn parse(text: &str) -> Result<Vec<Rule>, String> {
    text.split(',')
        .map(str::trim)
        .filter(|rule| !rule.is_empty())
        .map(parse_rule)
        .collect()
}

fn parse_rule(rule: &str) -> Result<Rule, String> {
    let wrong = || {
        format!(
            "EBB_SIM_FAULT: {rule:?} is not name:n:code, name:n+:code, name:*:code, kill, stop or hang=MS"
        )
    };
    let mut parts = rule.splitn(3, ':');
    let (Some(name), Some(when), Some(what)) = (parts.next(), parts.next(), parts.next()) else {
        return Err(wrong());
    };
    let number = |text: &str| {
        text.parse::<u64>()
            .ok()
            .filter(|number| *number > 0)
            .ok_or_else(wrong)
    };
    let (first, last) = match when.strip_suffix('+') {
        Some(first) => (number(first)?, u64::MAX),
        None if when == "*" => (1, u64::MAX),
        None => (number(when)?, number(when)?),
    };
    let effect = match what.strip_prefix("hang=") {
        Some(time) => Effect::Hang(Duration::from_millis(time.parse().map_err(|_| wrong())?)),
        None if what == "kill" => Effect::Kill,
        None if what == "stop" => Effect::Stop,
        None => Effect::Error(CUresult(what.parse().map_err(|_| wrong())?)),
    };
    Ok(Rule {
        name: name.to_owned(),
        first,
        last,
        effect,
        calls: AtomicU64::new(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rules: &str, symbols: &[&str]) -> Vec<u32> {
        let faults = Faults {
            rules: parse(rules).unwrap(),
            trace: None,
        };
        symbols
            .iter()
            .map(|symbol| faults.at(symbol).err().map_or(0, |code| code.0))
            .collect()
    }

    #[test]
    fn counts_calls_of_all_forms() {
        assert_eq!(
            run(
                "cuMemCreate:2:2",
                &["cuMemCreate", "cuMemMap", "cuMemCreate", "cuMemCreate"]
            ),
            [0, 0, 2, 0]
        );
        assert_eq!(
            run(
                "cuMemAlloc:2+:9",
                &["cuMemAlloc", "cuMemAlloc_v2", "cuMemAlloc_v2"]
            ),
            [0, 9, 9]
        );
        assert_eq!(
            run(
                "cuMemcpyHtoDAsync:*:7",
                &["cuMemcpyHtoDAsync_v2_ptsz", "cuMemcpyHtoD_v2"]
            ),
            [7, 0]
        );
        assert_eq!(
            run(
                "cuMemAlloc_v2:1:7,*:3:1",
                &["cuMemAlloc", "cuMemAlloc_v2", "cuInit"]
            ),
            [0, 7, 1]
        );
    }

    #[test]
    fn hang_lets_the_call_go_on() {
        assert_eq!(run("cuInit:1:hang=1", &["cuInit"]), [0]);
    }

    #[test]
    fn bad_rules_are_told() {
        for rule in [
            "cuInit",
            "cuInit:0:1",
            "cuInit:x:1",
            "cuInit:1:boom",
            "cuInit:1:hang=soon",
        ] {
            assert!(parse(rule).is_err(), "{rule}");
        }
    }
}
