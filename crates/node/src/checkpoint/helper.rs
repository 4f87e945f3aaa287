//! The helper: commands in, steps out.

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use ebb_abi::{
    CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, CUprocessState,
    CUresult,
};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::driver::{Calls, Driver};
use super::meaning;

/// The driver's library, as the loader finds it.
const LIBRARY: &str = "libcuda.so.1";
/// How long a change of state that somebody else began may take.
const PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(5);
/// How long the work of a process that runs is waited for, only to know that it does.
const SETTLE_MS: u32 = 2_000;

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
/// With a `parent` it lives no longer than that process, not even amid a command: the next daemon, which does not know of it, brings
/// back what sleeps, and nobody may take that away again behind its back.
///
/// # Errors
/// Writing the answers; the system's.
pub fn run(parent: Option<u32>, input: impl BufRead, mut out: impl Write) -> std::io::Result<()> {
    if let Some(parent) = parent {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have died before that.
        let now = getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
        if now != Some(parent) {
            return Ok(());
        }
    }
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
        "up" => up(calls, &pids, &mut step, true),
        // Who runs is believed to.
        "in" => up(calls, &pids, &mut step, false),
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
fn up(calls: &impl Calls, pids: &[i32], step: Step<'_>, settle: bool) -> Outcome {
    let mut did = Vec::new();
    for &pid in pids {
        if let Err(failure) = raise(calls, &mut *step, pid, CU_PROCESS_STATE_LOCKED, settle, &mut did) {
            let mut stuck = Vec::new();
            for (name, pid) in did {
                let again = match name {
                    RESTORE => call(&mut *step, CHECKPOINT, pid, || calls.checkpoint(pid)),
                    _ => call(&mut *step, UNLOCK, pid, || calls.unlock(pid)),
                };
                stuck.extend(again.err());
            }
            return Err((failure, stuck));
        }
    }
    for &pid in pids {
        // The memory of all is back: should one stay locked, the others are let in, and the next `up` unlocks it.
        raise(calls, &mut *step, pid, CU_PROCESS_STATE_RUNNING, settle, &mut did)
            .map_err(|failure| (failure, Vec::new()))?;
    }
    Ok(())
}

/// Brings a process to `goal`, locked or running, from wherever it is, and notes which calls that took. Without `settle`, one that runs is let be.
///
/// A helper before this one may have been killed amid a call, and the driver carries such a call out all the same: after it was looked at
/// here, and after this process was told that all is over, if nothing is done about that. So one that runs is locked too, and unlocked:
/// what was asked of the process before is done by then. And a call that finds another state than was seen is made again for that one.
fn raise(
    calls: &impl Calls,
    step: Step<'_>,
    pid: i32,
    goal: CUprocessState,
    settle: bool,
    did: &mut Vec<((&'static str, &'static str), i32)>,
) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let state = steady(calls, pid)?;
        if state == goal || state == CU_PROCESS_STATE_RUNNING && !settle {
            return Ok(());
        }
        let step = &mut *step;
        let (name, result) = match state {
            CU_PROCESS_STATE_CHECKPOINTED => (RESTORE, call(step, RESTORE, pid, || calls.restore(pid))),
            CU_PROCESS_STATE_LOCKED => (UNLOCK, call(step, UNLOCK, pid, || calls.unlock(pid))),
            _ => (LOCK, call(step, LOCK, pid, || calls.lock(pid, SETTLE_MS))),
        };
        match result {
            Ok(()) => did.push((name, pid)),
            Err(failure) if failure.code == CUresult::ERROR_ILLEGAL_STATE && began.elapsed() < PATIENCE => {
                std::thread::sleep(LOOK);
            }
            // It runs, and what was asked before has been done.
            Err(_) if name == LOCK => return Ok(()),
            Err(failure) => return Err(failure),
        }
    }
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
        /// What a helper that is dead asked of a process, and after how many looks at it that is carried out, at the latest; any
        /// other call waits for it.
        late: RefCell<Option<(&'static str, i32, u32)>>,
    }

    impl Fake {
        fn new(states: &[(i32, u32)], fails: Option<(&'static str, i32)>) -> Self {
            Self {
                states: RefCell::new(states.iter().copied().collect()),
                fails: RefCell::new(fails),
                late: RefCell::default(),
            }
        }

        fn with_late(states: &[(i32, u32)], call: &'static str, pid: i32, looks: u32) -> Self {
            let fake = Self::new(states, None);
            *fake.late.borrow_mut() = Some((call, pid, looks));
            fake
        }

        /// The call of the dead helper is carried out.
        fn carry_out(&self) {
            if let Some((call, pid, _)) = self.late.borrow_mut().take() {
                let (from, to) = match call {
                    "lock" => (0, 1),
                    "checkpoint" => (1, 2),
                    "restore" => (2, 1),
                    _ => (1, 0),
                };
                let _ = self.change(call, pid, from, to);
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
            let due = match &mut *self.late.borrow_mut() {
                Some((_, of, looks)) if *of == pid => {
                    *looks = looks.saturating_sub(1);
                    *looks == 0
                }
                _ => false,
            };
            let state = self.states.borrow().get(&pid).copied();
            if due {
                // Right after the look: what was seen is not so any more.
                self.carry_out();
            }
            state.map(CUprocessState).ok_or(CUresult::ERROR_INVALID_VALUE)
        }
        fn lock(&self, pid: i32, _: u32) -> Result<(), CUresult> {
            self.carry_out();
            self.change("lock", pid, 0, 1)
        }
        fn checkpoint(&self, pid: i32) -> Result<(), CUresult> {
            self.carry_out();
            self.change("checkpoint", pid, 1, 2)
        }
        fn restore(&self, pid: i32) -> Result<(), CUresult> {
            self.carry_out();
            self.change("restore", pid, 2, 1)
        }
        fn unlock(&self, pid: i32) -> Result<(), CUresult> {
            self.carry_out();
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
        assert_eq!(
            fake.tell("up 7 8"),
            ["locked 7", "locked 8", "unlocked 7", "unlocked 8", "done"],
            "they run, and it is seen that they do"
        );
        assert_eq!(fake.all(), [0, 0]);
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
    fn a_call_of_a_dead_helper_that_is_carried_out_late_leaves_nobody_asleep() {
        // Each state with each call that it allows, before each look: nothing may come after the end.
        for (state, late) in [(0, "lock"), (1, "checkpoint"), (2, "restore"), (1, "unlock")] {
            for looks in 1..8 {
                let fake = Fake::with_late(&[(7, state), (8, state)], late, 7, looks);
                let said = fake.tell("up 7 8");
                assert_eq!(said.last().unwrap(), "done", "{late} after {looks}: {said:?}");
                fake.carry_out();
                assert_eq!(fake.all(), [0, 0], "{late} after {looks} looks");
            }
        }
    }

    #[test]
    fn one_whose_work_does_not_end_runs_all_the_same() {
        let fake = Fake::new(&[(7, 0), (8, 2)], Some(("lock", 7)));
        assert_eq!(
            fake.tell("up 7 8").last().unwrap(),
            "done",
            "that it cannot be locked is no failure"
        );
        assert_eq!(fake.all(), [0, 0]);
    }

    #[test]
    fn who_runs_is_let_be_by_the_plain_command() {
        let fake = Fake::new(&[(7, 0), (8, 2), (9, 1)], Some(("lock", 7)));
        assert_eq!(
            fake.tell("in 7 8 9"),
            ["restored 8", "unlocked 8", "unlocked 9", "done"]
        );
        assert_eq!(fake.all(), [0, 0, 0]);
        assert_eq!(fake.tell("in 7 8 9"), ["done"]);
    }

    #[test]
    fn a_process_that_is_gone_takes_nobody_along() {
        let fake = Fake::new(&[(7, 0)], None);
        assert!(fake.tell("down 100 7 8").last().unwrap().starts_with("failed 8"));
        assert_eq!(fake.all(), [0]);
    }
}
