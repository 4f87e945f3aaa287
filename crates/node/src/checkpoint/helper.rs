//! The helper: commands in, steps out.

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_abi::{
    CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, CUprocessState,
    CUresult,
};

use super::driver::{Calls, Driver};
use super::meaning;

/// The driver's library, as the loader finds it.
const LIBRARY: &str = "libcuda.so.1";
/// How long a change of state that somebody else began may take.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);

/// A call that failed, with the process that it was for.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    pid: i32,
    call: &'static str,
    code: CUresult,
}

impl Failure {
    fn words(&self) -> String {
        let name = self.code.name().unwrap_or("an error");
        format!("{} {}: {} ({name})", self.call, self.code.0, meaning(self.code))
    }
}

/// Serves until the input ends. For the hidden command [`super::COMMAND`].
///
/// # Errors
/// Writing the answers.
pub fn run(input: impl BufRead, mut out: impl Write) -> std::io::Result<()> {
    let driver = match Driver::load(Path::new(LIBRARY)) {
        Ok(driver) => {
            say(&mut out, "ready")?;
            driver
        }
        Err(why) => return say(&mut out, &format!("unable {}", why.replace('\n', " "))),
    };
    for line in input.lines() {
        obey(&driver, &line?, &mut out)?;
    }
    Ok(())
}

fn say(out: &mut impl Write, line: &str) -> std::io::Result<()> {
    writeln!(out, "{line}")?;
    out.flush()
}

fn obey(calls: &impl Calls, line: &str, out: &mut impl Write) -> std::io::Result<()> {
    let mut words = line.split_whitespace();
    let command = words.next().unwrap_or_default();
    let limit = if command == "down" {
        words.next().and_then(|word| word.parse().ok()).unwrap_or(0)
    } else {
        0
    };
    let pids: Vec<i32> = words.filter_map(|word| word.parse().ok()).collect();
    let mut told = Ok(());
    let mut step = |what: &str, pid: i32, took: Duration| {
        let said = say(out, &format!("{what} {pid} {}", took.as_nanos()));
        if told.is_ok() {
            told = said;
        }
    };
    // Whoever reads may be gone: what was begun is carried out all the same.
    let result = match command {
        "down" => down(calls, &pids, limit, &mut step),
        "up" => up(calls, &pids, &mut step),
        "look" => {
            for pid in &pids {
                let state = calls.state(*pid).map_or(-1, |state| i64::from(state.0));
                say(out, &format!("state {pid} {state}"))?;
            }
            return say(out, "done");
        }
        _ => return Ok(()),
    };
    told?;
    match result {
        Ok(()) => say(out, "done"),
        Err((failure, stuck)) => {
            for one in &stuck {
                say(out, &format!("stuck {} {}", one.pid, one.words()))?;
            }
            say(out, &format!("failed {} {}", failure.pid, failure.words()))
        }
    }
}

type Step<'a> = &'a mut dyn FnMut(&str, i32, Duration);
/// The failure, and what could not be undone.
type Outcome = Result<(), (Failure, Vec<Failure>)>;

/// One call, timed.
fn call(
    step: Step<'_>,
    (name, what): (&'static str, &str),
    pid: i32,
    call: impl FnOnce() -> Result<(), CUresult>,
) -> Result<(), Failure> {
    let began = Instant::now();
    call().map_err(|code| Failure {
        pid,
        call: name,
        code,
    })?;
    step(what, pid, began.elapsed());
    Ok(())
}

const LOCK: (&str, &str) = ("cuCheckpointProcessLock", "locked");
const CHECKPOINT: (&str, &str) = ("cuCheckpointProcessCheckpoint", "checkpointed");
const RESTORE: (&str, &str) = ("cuCheckpointProcessRestore", "restored");
const UNLOCK: (&str, &str) = ("cuCheckpointProcessUnlock", "unlocked");

/// All of them or none: every process is locked before the first is checkpointed, and a failure undoes both.
fn down(calls: &impl Calls, pids: &[i32], limit: u32, step: Step<'_>) -> Outcome {
    let attempt = |step: Step<'_>| {
        for &pid in pids {
            // One that an order before this one left locked is so already.
            if steady(calls, pid)? == CU_PROCESS_STATE_RUNNING {
                call(step, LOCK, pid, || calls.lock(pid, limit))?;
            }
        }
        for &pid in pids {
            if steady(calls, pid)? == CU_PROCESS_STATE_LOCKED {
                call(step, CHECKPOINT, pid, || calls.checkpoint(pid))?;
            }
        }
        Ok(())
    };
    attempt(&mut *step).map_err(|failure| {
        let mut stuck = Vec::new();
        bring_back(calls, pids, step, &mut stuck);
        (failure, stuck)
    })
}

/// Restores what is checkpointed and unlocks what is locked, as far as that goes.
fn bring_back(calls: &impl Calls, pids: &[i32], step: Step<'_>, stuck: &mut Vec<Failure>) {
    for &pid in pids {
        let result = (|| {
            if steady(calls, pid)? == CU_PROCESS_STATE_CHECKPOINTED {
                call(&mut *step, RESTORE, pid, || calls.restore(pid))?;
            }
            if steady(calls, pid)? == CU_PROCESS_STATE_LOCKED {
                call(&mut *step, UNLOCK, pid, || calls.unlock(pid))?;
            }
            Ok(())
        })();
        if let Err(failure) = result {
            stuck.push(failure);
        }
    }
}

/// All of them or none: nobody is let in before everybody's memory is back, and a failure leaves every process as it was, so that
/// the same command may be given again.
fn up(calls: &impl Calls, pids: &[i32], step: Step<'_>) -> Outcome {
    let mut restored = Vec::new();
    for &pid in pids {
        let result = steady(calls, pid).and_then(|state| {
            if state == CU_PROCESS_STATE_CHECKPOINTED {
                call(&mut *step, RESTORE, pid, || calls.restore(pid))?;
                restored.push(pid);
            }
            Ok(())
        });
        if let Err(failure) = result {
            let mut stuck = Vec::new();
            for pid in restored {
                let again = call(&mut *step, CHECKPOINT, pid, || calls.checkpoint(pid));
                stuck.extend(again.err());
            }
            return Err((failure, stuck));
        }
    }
    for &pid in pids {
        let result = steady(calls, pid).and_then(|state| {
            if state == CU_PROCESS_STATE_LOCKED {
                call(&mut *step, UNLOCK, pid, || calls.unlock(pid))?;
            }
            Ok(())
        });
        // The memory of all is back: the others are let in, and the next `up` unlocks this one.
        if let Err(failure) = result {
            return Err((failure, Vec::new()));
        }
    }
    Ok(())
}

/// The state of a process, once no change of it is under way.
fn steady(calls: &impl Calls, pid: i32) -> Result<CUprocessState, Failure> {
    let failure = |code| Failure {
        pid,
        call: "cuCheckpointProcessGetState",
        code,
    };
    let began = Instant::now();
    loop {
        let state = calls.state(pid).map_err(failure)?;
        let known = [
            CU_PROCESS_STATE_RUNNING,
            CU_PROCESS_STATE_LOCKED,
            CU_PROCESS_STATE_CHECKPOINTED,
        ];
        if known.contains(&state) {
            return Ok(state);
        }
        if began.elapsed() > PATIENCE {
            return Err(failure(CUresult::ERROR_ILLEGAL_STATE));
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::*;

    /// Processes as the driver sees them, and a call that fails.
    #[derive(Default)]
    struct Fake {
        states: RefCell<BTreeMap<i32, u32>>,
        fails: RefCell<Option<(&'static str, i32)>>,
    }

    impl Fake {
        fn new(states: &[(i32, u32)], fails: Option<(&'static str, i32)>) -> Self {
            Self {
                states: RefCell::new(states.iter().copied().collect()),
                fails: RefCell::new(fails),
            }
        }

        fn change(&self, call: &'static str, pid: i32, from: u32, to: u32) -> Result<(), CUresult> {
            if *self.fails.borrow() == Some((call, pid)) {
                *self.fails.borrow_mut() = None;
                return Err(CUresult::ERROR_NOT_SUPPORTED);
            }
            let mut states = self.states.borrow_mut();
            let state = states.get_mut(&pid).ok_or(CUresult::ERROR_INVALID_VALUE)?;
            if *state != from {
                return Err(CUresult::ERROR_ILLEGAL_STATE);
            }
            *state = to;
            Ok(())
        }

        fn tell(&self, line: &str) -> Vec<String> {
            let mut out = Vec::new();
            obey(self, line, &mut out).unwrap();
            let text = String::from_utf8(out).unwrap();
            text.lines()
                .map(|line| {
                    // Without the time.
                    let step = |what: &str| line.starts_with(what);
                    let steps = ["locked", "checkpointed", "restored", "unlocked"];
                    let cut = steps.iter().any(|what| step(what));
                    line.split(' ')
                        .take(if cut { 2 } else { 4 })
                        .collect::<Vec<_>>()
                        .join(" ")
                })
                .collect()
        }

        fn all(&self) -> Vec<u32> {
            self.states.borrow().values().copied().collect()
        }
    }

    impl Calls for Fake {
        fn state(&self, pid: i32) -> Result<CUprocessState, CUresult> {
            let states = self.states.borrow();
            let state = states.get(&pid).ok_or(CUresult::ERROR_INVALID_VALUE)?;
            Ok(CUprocessState(*state))
        }
        fn lock(&self, pid: i32, _: u32) -> Result<(), CUresult> {
            self.change("lock", pid, 0, 1)
        }
        fn checkpoint(&self, pid: i32) -> Result<(), CUresult> {
            self.change("checkpoint", pid, 1, 2)
        }
        fn restore(&self, pid: i32) -> Result<(), CUresult> {
            self.change("restore", pid, 2, 1)
        }
        fn unlock(&self, pid: i32) -> Result<(), CUresult> {
            self.change("unlock", pid, 1, 0)
        }
    }

    #[test]
    fn all_are_locked_before_one_is_checkpointed() {
        let fake = Fake::new(&[(7, 0), (8, 0)], None);
        assert_eq!(
            fake.tell("down 100 7 8"),
            ["locked 7", "locked 8", "checkpointed 7", "checkpointed 8", "done"]
        );
        assert_eq!(fake.all(), [2, 2]);
        assert_eq!(fake.tell("look 7 9"), ["state 7 2", "state 9 -1", "done"]);
        assert_eq!(
            fake.tell("up 7 8"),
            ["restored 7", "restored 8", "unlocked 7", "unlocked 8", "done"]
        );
        assert_eq!(fake.all(), [0, 0]);
        assert_eq!(fake.tell("up 7 8"), ["done"], "there is nothing to do");
    }

    #[test]
    fn a_refusal_at_any_step_is_undone() {
        for fails in [("lock", 7), ("lock", 8), ("checkpoint", 7), ("checkpoint", 8)] {
            let fake = Fake::new(&[(7, 0), (8, 0)], Some(fails));
            let said = fake.tell("down 100 7 8");
            assert!(said.last().unwrap().starts_with("failed"), "{fails:?}: {said:?}");
            assert_eq!(fake.all(), [0, 0], "{fails:?}");
            assert!(
                fake.tell("down 100 7 8").contains(&"done".into()),
                "and once more"
            );
        }
    }

    #[test]
    fn bug_082_a_restore_that_failed_is_done_again() {
        for fails in [("restore", 7), ("restore", 8), ("unlock", 7), ("unlock", 8)] {
            let fake = Fake::new(&[(7, 2), (8, 2)], Some(fails));
            let said = fake.tell("up 7 8");
            assert!(said.last().unwrap().starts_with("failed"), "{fails:?}: {said:?}");
            if fails.0 == "restore" {
                assert_eq!(fake.all(), [2, 2], "{fails:?}: as before");
            }
            assert_eq!(fake.tell("up 7 8").last().unwrap(), "done", "{fails:?}");
            assert_eq!(fake.all(), [0, 0], "{fails:?}");
        }
    }

    #[test]
    fn a_process_that_is_gone_takes_nobody_along() {
        let fake = Fake::new(&[(7, 0)], None);
        assert!(fake.tell("down 100 7 8").last().unwrap().starts_with("failed 8"));
        assert_eq!(fake.all(), [0]);
    }
}
