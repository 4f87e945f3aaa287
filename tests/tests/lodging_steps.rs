//! Bytes on their way to another card, while they are there, and on their way on and home: whoever fails, dies or is stopped at whatever
//! call, and whoever needs what meanwhile.
//!
//! Each step has a card and a daemon of its own, so all but one of these take minutes: `cargo test -p ebb-tests --test lodging_steps -- --ignored`.

use ebb_protocol::control::Snapshot;
use ebb_tests::{
    Counts, Effect, Options, Program, Reply, Stage, Step, Trace, eventually, go_on, steps_between,
};
use ebb_units::Bytes;

const NAMES: [&str; 3] = ["a", "b", "c"];
/// Three of them, on a card of 128 MiB.
const PART: Bytes = Bytes::mib(20);
/// What displaces them.
const OTHER: Bytes = Bytes::mib(96);
/// What displaces them on the second card, too.
const OWNER: Bytes = Bytes::mib(110);

fn stage() -> Stage {
    Stage::new(Options {
        card: Bytes::mib(128),
        devices: 2,
        nvlink: true,
        // Turns change hands at once: there are hundreds of them.
        config: "[policy]\nmin_turn = \"10ms\"\nturn_per_copy = 1\nidle_after = \"10ms\"".into(),
        ..Options::default()
    })
}

fn lent(snapshot: &Snapshot) -> Bytes {
    snapshot.devices[1].lodged
}

/// What the guest has there.
fn lodged(snapshot: &Snapshot) -> Bytes {
    let guest = snapshot.tasks.iter().find(|task| task.name == "guest");
    let rows = guest.into_iter().flat_map(|task| &task.processes);
    rows.map(|row| row.lodged).sum()
}

/// A guest, whose bytes go to the second card; what makes them go; and who lives there.
struct Cast {
    guest: Program,
    other: Program,
    owner: Program,
    /// Where the guest's own calls are told to fail, they may.
    tries: usize,
}

/// The parts of the play. Each ends with every byte looked at that the next one does not need away.
const ACTS: [&str; 6] = ["held", "out", "home", "out again", "moved on", "home by the host"];

impl Cast {
    fn start(stage: &Stage, guest: &[(&str, &str)], owner: &[(&str, &str)]) -> Self {
        let mut other = stage.run(&["--name", "other"]);
        other.ok("open 0");
        let mut lives = stage.run_with_env(&["--name", "owner"], owner);
        lives.send("open 1");
        let _ = lives.poll(ebb_tests::PATIENCE);
        Self {
            guest: stage.run_with_env(&["--name", "guest"], guest),
            other,
            owner: lives,
            tries: 8,
        }
    }

    /// What one act tells whom; the guest's lines apart.
    fn guest_lines(act: &str) -> Vec<String> {
        match act {
            "held" => {
                let make = |(seed, name): (usize, &&str)| {
                    [format!("alloc {name} {}", PART.0), format!("fill {name} {seed}")]
                };
                NAMES.iter().enumerate().flat_map(make).collect()
            }
            "home" | "home by the host" => {
                let check = |(seed, name): (usize, &&str)| format!("check {name} {seed}");
                NAMES.iter().enumerate().map(check).collect()
            }
            _ => Vec::new(),
        }
    }

    fn guest_says(&mut self, act: &str, when: &str) {
        for line in Self::guest_lines(act) {
            let said = self
                .guest
                .in_the_end(&line, self.tries, &format!("{act}, {when}"));
            assert!(
                !line.starts_with("check") || said == "0",
                "{line}: {said} wrong; {act}, {when}"
            );
        }
    }

    fn others_say(&mut self, act: &str, when: &str) {
        match act {
            "out" => {
                self.other.ok(&format!("alloc m {}", OTHER.0));
                self.other.ok("fill m 9");
            }
            "out again" => assert_eq!(self.other.wrong("m", 9), 0, "{act}, {when}"),
            "moved on" => {
                self.owner
                    .in_the_end(&format!("alloc o {}", OWNER.0), self.tries, when);
                self.owner.in_the_end("fill o 7", self.tries, when);
            }
            _ => {}
        }
    }

    fn play(&mut self, act: &str, when: &str) {
        self.guest_says(act, when);
        self.others_say(act, when);
    }

    /// The end: everything is as it was written, and goes.
    fn all_is_well(mut self, stage: &Stage, when: &str) {
        self.guest_says("home", when);
        assert_eq!(self.other.wrong("m", 9), 0, "{when}");
        let said = self.owner.in_the_end("check o 7", self.tries, when);
        assert_eq!(said, "0", "{when}");
        drop(self);
        stage.wait_until_empty();
        assert_eq!(lent(&stage.snapshot()), Bytes::ZERO, "{when}");
    }
}

/// How often each call was made by the guest, or the owner, at the end of each act.
fn rehearse(who: &str) -> Vec<Counts> {
    let stage = stage();
    let trace = Trace::default();
    let traced = [("EBB_SIM_TRACE", trace.path())];
    let (guest, owner): (&[_], &[_]) = if who == "guest" {
        (&traced, &[])
    } else {
        (&[], &traced)
    };
    let mut cast = Cast::start(&stage, guest, owner);
    let mut counts = vec![trace.counts()];
    for act in ACTS {
        cast.play(act, "rehearsal");
        counts.push(trace.counts());
        let away = matches!(act, "out" | "out again");
        eventually(
            &format!("the guest's bytes are where they should be: {act}"),
            || match lodged(&stage.snapshot()) {
                bytes if (bytes >= Bytes::mib(40)) == away && (away || bytes.is_zero()) => Ok(()),
                bytes => Err(format!("{bytes} are on the other card")),
            },
        );
    }
    cast.all_is_well(&stage, "rehearsal");
    counts
}

/// The steps of all acts after the first, with the act that each is in.
fn steps(who: &str, most: u64) -> Vec<(&'static str, Step)> {
    let counts = rehearse(who);
    let all = ACTS.iter().zip(counts.windows(2));
    let steps: Vec<_> = all
        .filter(|(act, _)| **act != "held")
        .flat_map(|(act, pair)| {
            let steps = steps_between(&pair[0], &pair[1], most);
            steps.into_iter().map(move |step| (*act, step))
        })
        .collect();
    println!("{} steps of the {who}: {steps:?}", steps.len());
    assert!(!steps.is_empty());
    steps
}

#[test]
#[ignore = "minutes"]
fn any_call_of_the_guest_failing_loses_nothing() {
    for (act, step) in steps("guest", 2) {
        let fault = step.fault(Effect::Fails(999));
        let when = format!("{act}: {fault}");
        let stage = stage();
        let mut cast = Cast::start(&stage, &[("EBB_SIM_FAULT", &fault)], &[]);
        for act in ACTS {
            cast.play(act, &when);
        }
        cast.all_is_well(&stage, &when);
    }
}

/// The link to the other card is lost for good while bytes lie there, or on the way: they go by the host from then on.
#[test]
fn a_lost_link_between_cards_loses_nothing() {
    let counts = rehearse("guest");
    let call = "cuMemcpyDtoDAsync_v2";
    let last = counts.last().unwrap()[call];
    assert!(last >= 6, "{last} copies between cards");
    for n in 1..=last {
        let fault = Step::new(call, n).fault(Effect::FailsFrom(719));
        let stage = stage();
        let mut cast = Cast::start(&stage, &[("EBB_SIM_FAULT", &fault)], &[]);
        for act in ACTS {
            cast.play(act, &fault);
        }
        cast.all_is_well(&stage, &fault);
    }
}

#[test]
#[ignore = "minutes"]
fn a_guest_killed_at_any_call_leaves_nothing_on_either_card_and_harms_nobody() {
    for (act, step) in steps("guest", 2) {
        let fault = step.fault(Effect::Dies);
        let when = format!("{act}: {fault}");
        let stage = stage();
        let mut cast = Cast::start(&stage, &[("EBB_SIM_FAULT", &fault)], &[]);
        let mut lives = true;
        for act in ACTS {
            lives = lives && cast.guest.hear_out(&Cast::guest_lines(act));
            cast.others_say(act, &when);
        }
        cast.guest.kill();
        eventually(&format!("nothing is lent: {when}, lives: {lives}"), || {
            let snapshot = stage.snapshot();
            let guests = snapshot.tasks.iter().filter(|task| task.name == "guest").count();
            if lent(&snapshot).is_zero() && guests == 0 {
                Ok(())
            } else {
                Err(format!("{snapshot:#?}"))
            }
        });
        assert_eq!(cast.other.wrong("m", 9), 0, "{when}");
        assert_eq!(cast.owner.wrong("o", 7), 0, "{when}");
        let Cast { other, owner, .. } = cast;
        drop((other, owner));
        stage.wait_until_empty();
    }
}

#[test]
#[ignore = "minutes"]
fn whoever_lends_may_be_killed_at_any_call() {
    for (act, step) in steps("owner", 3) {
        let fault = step.fault(Effect::Dies);
        let when = format!("{act}: {fault}");
        let stage = stage();
        let mut cast = Cast::start(&stage, &[], &[("EBB_SIM_FAULT", &fault)]);
        for act in ACTS {
            cast.guest_says(act, &when);
            if act == "moved on" {
                cast.owner
                    .hear_out(&[format!("alloc o {}", OWNER.0), "fill o 7".into()]);
                cast.owner.kill();
            } else {
                cast.others_say(act, &when);
            }
        }
        assert_eq!(cast.other.wrong("m", 9), 0, "{when}");
        eventually(&format!("the second card is nobody's: {when}"), || {
            let snapshot = stage.snapshot();
            let card = &snapshot.devices[1];
            if card.leased.is_zero() && card.overhead.is_zero() {
                Ok(())
            } else {
                Err(format!("{card:?}"))
            }
        });
        cast.guest_says("home", &when);
        drop(cast);
        stage.wait_until_empty();
    }
}

/// The guest stands still at a step; `meanwhile` happens; it goes on. What a program that came meanwhile was told works.
fn amid(most: u64, mut meanwhile: impl FnMut(&mut Stage, &str) -> Option<Program>) {
    let (mut stopped, steps) = (0, steps("guest", most));
    for (at, step) in &steps {
        let fault = step.fault(Effect::Stops);
        let when = format!("{at}: {fault}");
        let mut stage = stage();
        let mut cast = Cast::start(&stage, &[("EBB_SIM_FAULT", &fault)], &[]);
        let pid = cast.guest.pid();
        for act in ACTS {
            if act != *at {
                cast.play(act, &when);
                continue;
            }
            // Whoever acts waits for the guest, which waits for us.
            let lines = Cast::guest_lines(act);
            let (asks, answers) = match act {
                "out" => (vec![format!("alloc m {}", OTHER.0), "fill m 9".into()], 2),
                "out again" => (vec!["check m 9".into()], 1),
                "moved on" => (vec![format!("alloc o {}", OWNER.0), "fill o 7".into()], 2),
                _ => (lines.clone(), lines.len()),
            };
            let guest_acts = !lines.is_empty();
            let actor = match act {
                "moved on" => &mut cast.owner,
                _ if guest_acts => &mut cast.guest,
                _ => &mut cast.other,
            };
            asks.iter().for_each(|line| actor.send(line));
            let mut heard = Vec::new();
            let held = eventually(&format!("the guest stops: {when}"), || {
                if ebb_tests::is_stopped(pid) {
                    return Ok(true);
                }
                heard.extend(actor.poll(std::time::Duration::from_millis(1)));
                if heard.len() == answers {
                    Ok(false)
                } else {
                    Err(format!("{heard:?}"))
                }
            });
            let mut one_more = None;
            if held {
                stopped += 1;
                one_more = meanwhile(&mut stage, &when);
                go_on(pid);
            }
            let actor = match act {
                "moved on" => &mut cast.owner,
                _ if guest_acts => &mut cast.guest,
                _ => &mut cast.other,
            };
            while heard.len() < answers {
                heard.push(actor.answer());
            }
            if let Some(mut one_more) = one_more {
                if matches!(one_more.answer(), Reply::Err(_)) {
                    one_more.in_the_end(&wants(), 8, &when);
                }
                one_more.ok("fill w 5");
                assert_eq!(one_more.wrong("w", 5), 0, "{when}");
                assert!(one_more.finish().success(), "{when}");
            }
            // An allocation may have had no daemon, or not in time: the next try has.
            for (line, said) in asks.iter().zip(&heard) {
                match said {
                    Reply::Ok(said) => {
                        assert!(
                            !line.starts_with("check") || said == "0",
                            "{line}: {said}; {when}"
                        );
                    }
                    Reply::Err(_) => drop(actor.in_the_end(line, 8, &when)),
                }
            }
        }
        // Should it have been late: a stopped process is killed only by name.
        go_on(pid);
        cast.all_is_well(&stage, &when);
    }
    println!("stopped at {stopped} of {} steps", steps.len());
    assert!(2 * stopped > steps.len(), "{stopped} of {}", steps.len());
}

/// What one more program on the second card is told.
fn wants() -> String {
    format!("alloc w {}", Bytes::mib(100).0)
}

#[test]
#[ignore = "minutes"]
fn a_daemon_killed_at_any_step_of_the_guest_is_not_missed() {
    amid(1, |stage, _| {
        stage.kill_daemon();
        stage.start_daemon();
        None
    });
}

#[test]
#[ignore = "minutes"]
fn whoever_lends_wants_its_room_back_at_any_step_of_the_guest() {
    amid(1, |stage, when| {
        let mut one = stage.run(&["--name", "wants"]);
        one.ok("open 1");
        one.send(&wants());
        // It may not have it before the guest goes on.
        eventually(&format!("it waits, or has it: {when}"), || {
            let snapshot = stage.snapshot();
            let row = snapshot.tasks.iter().find(|task| task.name == "wants");
            match row.and_then(|row| row.processes.first()) {
                Some(process) if process.state == "waiting" || process.lease >= Bytes::mib(100) => Ok(()),
                _ => Err(format!("{snapshot:#?}")),
            }
        });
        Some(one)
    });
}
