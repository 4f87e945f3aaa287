//! What the command line asks for, what survives a restart, the arena over the wire, and the event log.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use ebb_node::test_util::{CARD, Client, ProcessClient, TestDaemon};
use ebb_node::{Daemon, PlaceError, StartError, replay};
use ebb_protocol::control::{Answer, Failure, NewTask, Payload, Request, Snapshot};
use ebb_protocol::wire::{ask_kind, outcome};
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::{Bytes, Priority};

const NO_TOKEN: [u8; 32] = [0; 32];
const TOTAL: Bytes = Bytes::mib(1024);

#[test]
fn child() {
    ebb_node::test_util::child_main();
}

fn folder() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap()
}

fn leased(snapshot: &Snapshot) -> Bytes {
    snapshot.devices.iter().map(|device| device.leased).sum()
}

fn failure(answer: Answer) -> Failure {
    match answer {
        Answer::Error(failure) => failure,
        other => panic!("that should not work: {other:?}"),
    }
}

fn message(answer: Answer) -> String {
    match answer {
        Answer::Ok(Payload::Done { message }) => message,
        other => panic!("that should work: {other:?}"),
    }
}

fn pause(task: &str, wait_ms: u64) -> Request {
    Request::Pause {
        task: task.into(),
        wait_ms: Some(wait_ms),
    }
}

fn new_task(request: Bytes, limit: Option<Bytes>) -> Request {
    let name = "new".into();
    Request::CreateTask(NewTask {
        name,
        request,
        limit,
        priority: Priority::Normal,
        idle_release_ms: None,
        hibernate_after_ms: None,
    })
}

/// A library that does not know the message says nothing, and is taken from as before.
#[test]
fn clean_memory_goes_first_and_the_order_says_so() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let [mut old, mut reader, mut third] =
        ["old", "reader", "third"].map(|name| daemon.process(daemon.task(name, Bytes::ZERO, None)));
    for process in [&mut old, &mut reader, &mut third] {
        process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    }
    for process in [&mut old, &mut reader] {
        assert!(process.alloc(Bytes::mib(400)));
        process.usage(Bytes::mib(400), Bytes::ZERO, 1);
    }
    reader.send(&ToDaemon::Clean {
        device: 0,
        bytes: Bytes::mib(300),
    });
    // An answer behind it: the daemon has heard it before the third one asks, on a line of its own.
    assert!(reader.alloc(Bytes::mib(2)));
    third.send(&ToDaemon::Ask {
        device: 0,
        ask: 77,
        kind: ask_kind::ALLOC,
        bytes: Bytes::mib(400),
        long: true,
    });
    let ToLayer::Reclaim {
        order, bytes, reason, ..
    } = reader.answer()
    else {
        panic!("what is clean is taken")
    };
    let reason = String::from_utf8(reason).unwrap();
    assert!(
        bytes <= Bytes::mib(300) && reason.contains("clean, idle"),
        "{bytes}: {reason}"
    );
    reader.obey(order, bytes);
    let answer = third.answer();
    assert!(matches!(answer, ToLayer::Grant { ask: 77, .. }), "{answer:?}");
}

#[test]
fn pause_takes_everything_and_resume_lets_it_back() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut process = daemon.process(daemon.task("p", Bytes::ZERO, None));
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(200)));
    let mut control = daemon.control();
    control.send(&pause("p", 30_000));
    let ToLayer::Reclaim { order, bytes, .. } = process.answer() else {
        panic!("everything is taken")
    };
    process.obey(order, bytes);
    process.usage(Bytes::ZERO, Bytes::mib(200), 1);
    assert!(message(control.answer()).contains("paused"));
    let snapshot = daemon.snapshot();
    assert!(snapshot.tasks[0].paused && leased(&snapshot).is_zero());
    // A touch waits until the task is resumed.
    let ask = process.ask(ask_kind::RESTORE, Bytes::mib(200), true);
    assert_eq!(process.poll(Duration::from_millis(50)), None);
    assert!(message(daemon.ask(&Request::Resume { task: "p".into() })).contains("may run"));
    let mut granted = Bytes::ZERO;
    while granted < Bytes::mib(200) {
        match process.answer() {
            ToLayer::Grant { ask: of, bytes, .. } => {
                assert_eq!(of, ask);
                granted += bytes;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(granted, Bytes::mib(200));
    process.send(&ToDaemon::Restored {
        device: 0,
        copied: granted,
        nanos: 5,
    });
    let totals = daemon
        .until("the restore is counted", |s| s.totals.restores == 1)
        .totals;
    assert_eq!((totals.in_bytes, totals.out_bytes), (granted, granted));
}

#[test]
fn a_trim_is_the_sum_of_what_each_process_gives_back() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let [first, second] = ["one", "two"].map(|name| {
        let mut process = daemon.process(daemon.task(name, Bytes::ZERO, None));
        process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
        assert!(process.alloc(Bytes::mib(200)));
        process
    });
    let trim = |process: &mut ProcessClient, give: Bytes| {
        let ToLayer::Trim { device, query } = process.answer() else {
            panic!("it is asked")
        };
        process.give_back(give);
        process.send(&ToDaemon::Trimmed {
            device,
            query,
            bytes: give,
        });
    };
    let (mut first, mut second) = (first, second);
    let mut control = daemon.control();
    control.send(&Request::Trim { task: None });
    trim(&mut first, Bytes::mib(50));
    trim(&mut second, Bytes::ZERO);
    let given = |answer: Answer| match answer {
        Answer::Ok(Payload::Trimmed { tasks }) => tasks
            .into_iter()
            .map(|row| (row.name, row.bytes, row.silent))
            .collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        given(control.answer()),
        [("one".into(), Bytes::mib(50), 0), ("two".into(), Bytes::ZERO, 0)]
    );
    assert_eq!(leased(&daemon.snapshot()), Bytes::mib(350));
    // One that hangs up instead of answering; an answer that nobody asked for.
    control.send(&Request::Trim {
        task: Some("one".into()),
    });
    assert!(matches!(first.answer(), ToLayer::Trim { .. }));
    second.send(&ToDaemon::Trimmed {
        device: 0,
        query: 1,
        bytes: Bytes::mib(1),
    });
    drop(first);
    assert_eq!(given(control.answer()), [("one".into(), Bytes::ZERO, 1)]);
    assert!(
        failure(daemon.ask(&Request::Trim {
            task: Some("nobody".into())
        }))
        .usage
    );
    let idle = daemon.task("idle", Bytes::ZERO, None);
    let _ = idle;
    let answer = daemon.ask(&Request::Trim {
        task: Some("idle".into()),
    });
    assert_eq!(given(answer), [("idle".into(), Bytes::ZERO, 0)]);
}

#[test]
fn a_pause_that_does_not_work_in_time_says_busy_and_changes_nothing() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut process = daemon.process(daemon.task("busy", Bytes::ZERO, None));
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(200)));
    let mut control = daemon.control();
    control.send(&pause("busy", 300));
    let ToLayer::Reclaim { order, .. } = process.answer() else {
        panic!("it is asked")
    };
    let done = ToDaemon::ReclaimDone {
        device: 0,
        order,
        outcome: outcome::BUSY,
        copied: Bytes::ZERO,
        nanos: 0,
    };
    process.send(&done);
    let failure = failure(control.answer());
    assert!(failure.message.contains("busy") && !failure.usage, "{failure:?}");
    assert!(failure.fix.is_some());
    let snapshot = daemon.snapshot();
    assert!(!snapshot.tasks[0].paused);
    assert_eq!(leased(&snapshot), Bytes::mib(200));
    assert!(process.alloc(Bytes::mib(2)), "it is served as before");
}

#[test]
fn a_pause_is_not_ended_by_the_timer_of_an_earlier_one() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let _ = daemon.task("empty", Bytes::ZERO, None);
    let mut process = daemon.process(daemon.task("full", Bytes::ZERO, None));
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(20)));
    let mut control = daemon.control();
    assert!(message(control.ask(&pause("empty", 50))).contains("paused"));
    control.send(&pause("full", 30_000));
    let ToLayer::Reclaim { order, bytes, .. } = process.answer() else {
        panic!("it is asked")
    };
    // The first one's time passes.
    assert_eq!(process.poll(Duration::from_millis(200)), None);
    process.obey(order, bytes);
    process.usage(Bytes::ZERO, Bytes::mib(20), 1);
    assert!(message(control.answer()).contains("paused"));
}

#[test]
fn an_idle_daemon_sleeps() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut client = daemon.client(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(client.alloc(Bytes::mib(2)));
    assert!(matches!(daemon.ask(&Request::Hello), Answer::Ok(_)));
    let before = daemon.wakeups();
    std::thread::sleep(Duration::from_millis(500));
    let woken = daemon.wakeups() - before;
    assert!(woken < 50, "woken {woken} times for nothing");
}

#[test]
fn a_caller_that_half_closes_and_waits_costs_no_time() {
    use std::io::{BufRead, BufReader};
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[event_log]\nenabled = false");
    let mut process = daemon.process(daemon.task("slow", Bytes::ZERO, None));
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(20)));
    let mut stream = std::os::unix::net::UnixStream::connect(daemon.socket_dir().join("ctl.sock")).unwrap();
    stream
        .write_all(b"{\"op\":\"pause\",\"task\":\"slow\",\"wait_ms\":30000}\n")
        .unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let ToLayer::Reclaim { order, bytes, .. } = process.answer() else {
        panic!("it is asked")
    };
    let busy_before = daemon.wakeups();
    std::thread::sleep(Duration::from_millis(300));
    let woken = daemon.wakeups() - busy_before;
    assert!(woken < 100, "woken {woken} times for nothing");
    process.obey(order, bytes);
    process.usage(Bytes::ZERO, Bytes::mib(20), 1);
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    assert!(line.contains("paused"), "{line}");
}

#[test]
fn a_pause_of_a_task_without_memory_is_done_at_once_and_one_that_ends_is_told() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let _token = daemon.task("empty", Bytes::ZERO, None);
    assert!(message(daemon.ask(&pause("empty", 30_000))).contains("paused"));
    let mut process = daemon.process(NO_TOKEN);
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(20)));
    let mut control = daemon.control();
    control.send(&pause(&process.pid().to_string(), 30_000));
    assert!(matches!(process.answer(), ToLayer::Reclaim { .. }));
    process.kill();
    assert!(failure(control.answer()).message.contains("ended"));
}

#[test]
fn limits_change_live_and_below_what_is_live_they_are_refused_with_the_figures() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut process = daemon.process(daemon.task("l", Bytes::ZERO, Some(Bytes::mib(512))));
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(300)));
    let limit = |bytes| Request::Limit {
        task: "l".into(),
        limit: Some(bytes),
        request: None,
        priority: None,
    };
    let refused = failure(daemon.ask(&limit(Bytes::mib(200))));
    assert!(
        refused.usage && refused.message.contains("300 MiB") && refused.message.contains("200 MiB"),
        "{refused:?}"
    );
    assert!(refused.fix.unwrap().contains("300Mi"));
    assert!(
        failure(daemon.ask(&limit(Bytes::gib(2))))
            .message
            .contains("above the card")
    );
    assert!(message(daemon.ask(&limit(Bytes::mib(400)))).contains("400 MiB"));
    loop {
        if let ToLayer::Limit { limit, .. } = process.recv() {
            assert_eq!(limit, Bytes::mib(400));
            break;
        }
    }
    assert!(!process.alloc(Bytes::mib(102)));
    assert!(process.alloc(Bytes::mib(100)));
    let priority = Some(Priority::High);
    let change = Request::Limit {
        task: "t1".into(),
        limit: None,
        request: Some(Bytes::mib(100)),
        priority,
    };
    assert!(message(daemon.ask(&change)).contains("high"));
    let row = daemon.snapshot().tasks[0].clone();
    assert_eq!(
        (row.limit, row.request, row.priority),
        (Some(Bytes::mib(400)), Bytes::mib(100), Priority::High)
    );
}

/// What a task keeps and does not use is in no limit's way: it is asked for that first.
#[test]
fn a_limit_takes_what_is_kept_before_it_is_refused() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut process = daemon.process(daemon.task("keeps", Bytes::ZERO, None));
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(process.alloc(Bytes::mib(300)));
    let cached = |process: &ProcessClient, resident, cached| {
        process.usage_cached(resident, cached);
        daemon.until("the cache is seen", |s| s.tasks[0].processes[0].cached == cached);
    };
    cached(&process, Bytes::mib(300), Bytes::mib(200));
    let limit = |mib| Request::Limit {
        task: "keeps".into(),
        limit: Some(Bytes::mib(mib)),
        request: None,
        priority: None,
    };
    let mut control = daemon.control();
    control.send(&limit(150));
    let trim = |process: &mut ProcessClient, give: Bytes, then: [Bytes; 2]| {
        let ToLayer::Trim { device, query } = process.answer() else {
            panic!("it is asked for what it keeps")
        };
        process.give_back(give);
        process.usage_cached(then[0], then[1]);
        process.send(&ToDaemon::Trimmed {
            device,
            query,
            bytes: give,
        });
    };
    trim(&mut process, Bytes::mib(200), [Bytes::mib(100), Bytes::ZERO]);
    assert!(message(control.answer()).contains("150 MiB"));
    assert_eq!(daemon.snapshot().tasks[0].limit, Some(Bytes::mib(150)));
    // Not enough of it is kept: refused, with live and cached apart.
    cached(&process, Bytes::mib(100), Bytes::mib(20));
    control.send(&limit(60));
    trim(&mut process, Bytes::ZERO, [Bytes::mib(100), Bytes::mib(20)]);
    let refused = failure(control.answer());
    assert!(
        refused.usage && refused.message.contains("80 MiB live and 20 MiB cached"),
        "{refused:?}"
    );
}

#[test]
fn figures_that_cannot_be_are_refused_with_numbers_and_a_fix() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut client = daemon.client(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    let cases = [
        (new_task(Bytes::mib(300), Some(Bytes::mib(200))), "300 MiB"),
        (new_task(Bytes::ZERO, Some(Bytes::gib(2))), "1 GiB"),
        (new_task(Bytes::gib(2), None), "2 GiB"),
        (new_task(Bytes::ZERO, Some(Bytes::ZERO)), "0 B"),
    ];
    for (request, number) in cases {
        let refused = failure(daemon.ask(&request));
        assert!(
            refused.usage && refused.fix.is_some() && refused.message.contains(number),
            "{refused:?}"
        );
    }
    // Each fits alone, both do not.
    let _first = daemon.task("first", Bytes::mib(600), None);
    let refused = failure(daemon.ask(&new_task(Bytes::mib(600), None)));
    assert!(
        refused.usage && refused.message.contains("600 MiB") && refused.message.contains("card 0"),
        "{refused:?}"
    );
}

#[test]
fn tasks_are_named_by_id_name_and_process() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    for name in ["one", "twin", "twin"] {
        let _ = daemon.task(name, Bytes::ZERO, None);
    }
    let resume = |task: &str| daemon.ask(&Request::Resume { task: task.into() });
    assert!(message(resume("one")).contains("t1"));
    assert!(message(resume("t3")).contains("t3"));
    let ambiguous = failure(resume("twin"));
    assert!(ambiguous.message.contains("t2, t3"), "{ambiguous:?}");
    for wrong in ["nobody", "t99", "4294967295", ""] {
        let unknown = failure(resume(wrong));
        assert!(unknown.usage && unknown.fix.is_some(), "{unknown:?}");
    }
    let process = daemon.process(NO_TOKEN);
    assert!(message(resume(&process.pid().to_string())).contains("t4"));
}

#[test]
fn doctor_brings_the_librarys_report_or_says_that_there_is_none() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut process = daemon.process(NO_TOKEN);
    process.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    let mut neighbour = daemon.process(NO_TOKEN);
    neighbour.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    let mut control = daemon.control();
    control.send(&Request::Doctor { pid: process.pid() });
    let ToLayer::Query { query } = process.answer() else {
        panic!("it is asked")
    };
    // Somebody else's answer is not taken for its own.
    neighbour.send(&ToDaemon::Report {
        query,
        text: b"{\"false\":1}".to_vec(),
    });
    assert!(neighbour.alloc(Bytes::mib(2)), "and it has arrived");
    process.send(&ToDaemon::Report {
        query,
        text: b"{\"pinned\":0}".to_vec(),
    });
    match control.answer() {
        Answer::Ok(Payload::Doctor { process: row, report }) => {
            assert_eq!((row.pid, row.device), (process.pid(), Some(CARD)));
            assert_eq!(report, Some(serde_json::json!({ "pinned": 0 })));
        }
        other => panic!("{other:?}"),
    }
    // It does not answer, and dies while it is asked.
    control.send(&Request::Doctor { pid: process.pid() });
    assert!(matches!(process.answer(), ToLayer::Query { .. }));
    assert!(matches!(
        control.answer(),
        Answer::Ok(Payload::Doctor { report: None, .. })
    ));
    control.send(&Request::Doctor { pid: process.pid() });
    assert!(matches!(process.answer(), ToLayer::Query { .. }));
    process.kill();
    assert!(failure(control.answer()).message.contains("ended"));
    assert!(failure(daemon.ask(&Request::Doctor { pid: 1 << 30 })).usage);
}

#[test]
fn a_watch_brings_line_after_line_and_a_reader_that_stops_costs_nobody() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut watcher = daemon.control();
    let mut sleeper = daemon.control();
    for control in [&mut watcher, &mut sleeper] {
        control.send(&Request::Watch { interval_ms: 1 });
    }
    let mut last = 0;
    for _ in 0..5 {
        match watcher.answer() {
            Answer::Ok(Payload::List(snapshot)) => {
                assert!(snapshot.uptime_ms >= last);
                last = snapshot.uptime_ms;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(
        matches!(daemon.ask(&Request::Hello), Answer::Ok(_)),
        "the one that never reads is no matter"
    );
}

#[test]
fn bad_lines_are_answered_and_endless_ones_end_the_connection() {
    use std::io::{BufRead, BufReader, Read};
    use std::os::unix::net::UnixStream;
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let connect = || UnixStream::connect(daemon.socket_dir().join("ctl.sock")).unwrap();
    let mut stream = connect();
    stream
        .write_all(b"{\"op\":\"explode\"}\n\nnonsense\n{\"op\":\"hello\"}\n")
        .unwrap();
    // A client may close its side and still read all the answers.
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let answers: Vec<Answer> = BufReader::new(stream)
        .lines()
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
        .collect();
    assert_eq!(answers.len(), 3);
    assert!(matches!(&answers[0], Answer::Error(failure) if failure.usage));
    assert!(matches!(&answers[1], Answer::Error(failure) if failure.usage));
    assert!(matches!(&answers[2], Answer::Ok(Payload::Hello { .. })));
    // Many at once, and one that waits in the middle.
    let _ = daemon.task("many", Bytes::ZERO, None);
    let mut stream = connect();
    let mut lines = "{\"op\":\"hello\"}\n".repeat(1000);
    lines += &"{\"op\":\"pause\",\"task\":\"many\"}\n{\"op\":\"resume\",\"task\":\"many\"}\n".repeat(500);
    stream.write_all(lines.as_bytes()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let answers: Vec<Answer> = BufReader::new(stream)
        .lines()
        .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
        .collect();
    assert_eq!(answers.len(), 2000);
    assert!(answers.iter().all(|answer| matches!(answer, Answer::Ok(_))));
    let mut endless = connect();
    let _ = endless.write_all(&vec![b'a'; 1 << 20]);
    let mut rest = Vec::new();
    let _ = endless.read_to_end(&mut rest);
    // Half a line and gone.
    connect().write_all(b"{\"op\":").unwrap();
    assert!(matches!(
        daemon.ask(&Request::Hello),
        Answer::Ok(Payload::Hello { .. })
    ));
}

#[test]
fn connections_left_open_lock_nobody_out() {
    use std::os::unix::net::UnixStream;
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let idle: Vec<UnixStream> = (0..600)
        .map_while(|_| UnixStream::connect(daemon.socket_dir().join("ctl.sock")).ok())
        .collect();
    assert_eq!(idle.len(), 600);
    assert!(matches!(
        daemon.ask(&Request::Hello),
        Answer::Ok(Payload::Hello { .. })
    ));
}

#[test]
fn a_change_that_cannot_be_kept_says_so() {
    let dir = folder();
    // In the way of the new state file.
    std::fs::create_dir_all(dir.path().join("state/tasks.new")).unwrap();
    let daemon = TestDaemon::start(dir.path(), "");
    let _ = daemon.task("l", Bytes::ZERO, Some(Bytes::mib(512)));
    let change = Request::Limit {
        task: "l".into(),
        limit: Some(Bytes::mib(400)),
        request: None,
        priority: None,
    };
    let said = message(daemon.ask(&change));
    assert!(
        said.contains("400 MiB") && said.contains("would forget it: tasks.json"),
        "{said}"
    );
    std::fs::remove_dir(dir.path().join("state/tasks.new")).unwrap();
    let said = message(daemon.ask(&change));
    assert!(!said.contains("forget"), "{said}");
}

/// What `kill -9` leaves: the state file as it was, not as a daemon writes it in peace.
fn stop_as_if_killed(daemon: TestDaemon, dir: &Path) {
    let file = dir.join("state/tasks.json");
    let then = std::fs::read(&file).unwrap();
    daemon.stop();
    std::fs::write(&file, then).unwrap();
}

#[test]
fn bug_124_twenty_clients_under_load_across_a_restart_keep_ledger_limits_and_pauses() {
    let dir = folder();
    let mut daemon = TestDaemon::start(dir.path(), "");
    let total = Bytes::gib(4);
    let tokens: Vec<_> = (0..20)
        .map(|i| daemon.task(&format!("p{i}"), Bytes::ZERO, Some(Bytes::mib(64))))
        .collect();
    let mut processes: Vec<ProcessClient> = tokens.iter().map(|token| daemon.process(*token)).collect();
    for (process, n) in processes.iter_mut().zip(1..) {
        process.attach(total, Bytes::ZERO, Bytes::ZERO);
        assert!(process.alloc(Bytes::mib(2 * n)));
    }
    let _ = daemon.task("asleep", Bytes::ZERO, Some(Bytes::mib(8)));
    assert!(message(daemon.ask(&pause("asleep", 30_000))).contains("paused"));
    let held: Bytes = (1..=20).map(|n| Bytes::mib(2 * n)).sum();
    for round in 0..3 {
        let before = daemon.snapshot();
        assert_eq!(leased(&before), held, "round {round}");
        // Under load: each has an ask on its way when the daemon dies.
        for process in &mut processes {
            process.ask(ask_kind::ALLOC, Bytes::mib(2), true);
            process.give_back(Bytes::mib(2));
            process.lease += Bytes::mib(2);
        }
        stop_as_if_killed(daemon, dir.path());
        daemon = TestDaemon::start(dir.path(), "");
        // One that asks before the others have said what they hold has to wait for them.
        let order: Vec<usize> = (0..20).map(|i| (i * 7 + round) % 20).collect();
        for (place, i) in order.iter().enumerate() {
            let process = &mut processes[*i];
            let (lease, session) = (process.lease, process.session);
            process.client = Client::hello(process.connect(), tokens[*i], session);
            let (_, limit, _) = process.attach(total, lease, Bytes::ZERO);
            assert_eq!(limit, Bytes::mib(64), "limits survive");
            process.used();
            if place == 0 {
                process.ask(ask_kind::ALLOC, Bytes::mib(2), true);
                assert_eq!(
                    process.poll(Duration::from_millis(50)),
                    None,
                    "nothing is granted yet"
                );
            }
        }
        let first = &mut processes[order[0]];
        assert!(matches!(first.answer(), ToLayer::Grant { .. }), "now it is");
        first.give_back(Bytes::mib(2));
        first.lease += Bytes::mib(2);
        let after = daemon.until("the ledger is as before", |s| leased(s) == held);
        assert_eq!(after.tasks.len(), 21);
        for (was, is) in before.tasks.iter().zip(&after.tasks) {
            assert_eq!(
                (was.task, &was.name, was.limit, was.paused),
                (is.task, &is.name, is.limit, is.paused)
            );
        }
    }
    // Ids go on above the old ones.
    let last = daemon.snapshot().tasks.last().unwrap().task;
    let _ = daemon.task("new", Bytes::ZERO, None);
    assert!(daemon.snapshot().tasks.last().unwrap().task > last);
}

#[test]
fn bug_125_a_program_that_never_returns_holds_up_nobody_for_ever() {
    let dir = folder();
    let mut daemon = TestDaemon::start(dir.path(), "");
    let token = daemon.task("silent", Bytes::ZERO, None);
    let mut silent = daemon.process(token);
    silent.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(silent.alloc(Bytes::mib(100)));
    let other = daemon.task("other", Bytes::ZERO, None);
    stop_as_if_killed(daemon, dir.path());
    let mut config = TestDaemon::config(dir.path(), "");
    config.recovery = Duration::from_millis(100);
    daemon = TestDaemon::start_with(dir.path(), config);
    // The silent one lives and never declares itself: others are served after a bounded wait.
    let mut client = daemon.client(other);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(client.alloc(Bytes::mib(100)));
}

#[test]
fn an_order_that_is_never_answered_is_given_up() {
    let dir = folder();
    let more = "[policy]\nidle_after = \"1ms\"\norder_timeout = \"100ms\"";
    let daemon = TestDaemon::start(dir.path(), more);
    let (a, b) = (
        daemon.task("stuck", Bytes::ZERO, None),
        daemon.task("waits", Bytes::ZERO, None),
    );
    let (mut stuck, mut waits) = (daemon.process(a), daemon.process(b));
    stuck.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    waits.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(stuck.alloc(Bytes::mib(900)));
    let ask = waits.ask(ask_kind::ALLOC, Bytes::mib(500), false);
    assert!(matches!(stuck.answer(), ToLayer::Reclaim { .. }));
    match waits.answer() {
        ToLayer::Deny { ask: of, last, .. } => assert_eq!((of, last), (ask, false)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_arena_is_lent_recalled_and_taken_on_after_a_restart() {
    let dir = folder();
    let more = "[arena]\nbudget = \"16Mi\"\nsegment = \"2Mi\"";
    let daemon = TestDaemon::start(dir.path(), more);
    let token = daemon.task("a", Bytes::ZERO, None);
    let mut a = daemon.process(token);
    a.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    a.send(&ToDaemon::ArenaWant {
        bytes: Bytes::mib(64),
        urgent: false,
    });
    while a.segments.len() < 8 {
        a.recv();
    }
    let row = daemon.snapshot().arena;
    assert_eq!(
        (row.budget, row.held, row.lent),
        (Bytes::mib(16), Bytes::mib(16), Bytes::mib(16))
    );
    for (info, memory) in &a.segments {
        let stat = rustix::fs::fstat(memory).unwrap();
        assert_eq!(stat.st_size as u64, info.bytes.0);
        assert_eq!(
            stat.st_blocks as u64 * 512,
            info.bytes.0,
            "faulted in ahead of need"
        );
        assert!(rustix::fs::ftruncate(memory, 0).is_err(), "sealed in size");
        rustix::io::pwrite(memory, b"secret", 0).unwrap();
    }
    // Another one needs room: what is empty is recalled.
    a.usage(Bytes::ZERO, Bytes::mib(8), 1);
    let mut b = daemon.process(daemon.task("b", Bytes::ZERO, None));
    b.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    b.send(&ToDaemon::ArenaWant {
        bytes: Bytes::mib(4),
        urgent: true,
    });
    loop {
        if let ToLayer::ArenaRecall { bytes } = a.recv() {
            assert_eq!(bytes, Bytes::mib(4));
            break;
        }
    }
    let back = a.segments.split_off(6);
    a.send(&ToDaemon::ArenaReturn {
        segments: back.iter().map(|(info, _)| info.id).collect(),
    });
    while b.segments.len() < 2 {
        b.recv();
    }
    for (info, memory) in &b.segments {
        let mut content = vec![1; info.bytes.to_usize()];
        assert_eq!(rustix::io::pread(memory, &mut content, 0), Ok(content.len()));
        assert!(
            content.iter().all(|byte| *byte == 0),
            "nothing of its neighbour's"
        );
        assert!(
            a.segments.iter().all(|(mine, _)| mine.id != info.id),
            "in one hand"
        );
    }
    // A restart: what is declared is counted again, and is given to nobody else.
    stop_as_if_killed(daemon, dir.path());
    let daemon = TestDaemon::start(dir.path(), more);
    a.client = {
        let mut again = Client::hello(a.connect(), token, a.session);
        again.segments = std::mem::take(&mut a.segments);
        again
    };
    a.attach(TOTAL, Bytes::ZERO, Bytes::mib(8));
    let infos = a.segments.iter().map(|(info, _)| *info).collect();
    let fds: Vec<&OwnedFd> = a.segments.iter().map(|(_, fd)| fd).collect();
    a.send_with(&ToDaemon::ArenaDeclare { segments: infos }, &fds);
    let row = daemon
        .until("they are counted", |s| s.arena.lent == Bytes::mib(12))
        .arena;
    assert_eq!((row.held, row.budget), (Bytes::mib(12), Bytes::mib(16)));
    let mut c = daemon.process(NO_TOKEN);
    c.send(&ToDaemon::ArenaWant {
        bytes: Bytes::mib(16),
        urgent: false,
    });
    while c.segments.len() < 2 {
        c.recv();
    }
    assert_eq!(daemon.snapshot().arena.held, Bytes::mib(16), "the budget holds");
    a.kill();
    while c.segments.len() < 8 {
        c.recv();
    }
    c.kill();
    b.kill();
    daemon.until("nobody holds any", |s| s.arena.held.is_zero());
}

#[test]
fn the_event_log_replays_to_the_same_actions() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "[policy]\nidle_after = \"1ms\"");
    let (x, y) = (
        daemon.task("x", Bytes::mib(100), None),
        daemon.task("y", Bytes::ZERO, Some(Bytes::mib(700))),
    );
    let (mut x, mut y) = (daemon.process(x), daemon.process(y));
    for client in [&mut x, &mut y] {
        client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    }
    assert!(x.alloc(Bytes::mib(900)));
    y.ask(ask_kind::ALLOC, Bytes::mib(500), true);
    let ToLayer::Reclaim { order, bytes, .. } = x.answer() else {
        panic!("x gives way")
    };
    x.obey(order, bytes);
    assert!(matches!(y.answer(), ToLayer::Grant { .. }));
    y.kill();
    daemon.until("y is gone", |s| s.tasks.len() == 2 && leased(s) < Bytes::mib(600));
    daemon.stop();
    let log = dir.path().join("state/events.jsonl");
    let report = replay(&log).unwrap();
    assert_eq!((report.runs, report.skipped, report.divergence), (1, 0, None));
    assert!(report.steps > 10, "{} steps", report.steps);
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("token"), "no capability is logged");
    // A log that was tampered with is told from one that was not.
    let forged: String = text
        .lines()
        .filter(|line| !line.contains("\"client_joined\""))
        .map(|line| format!("{line}\n"))
        .collect();
    std::fs::write(&log, forged).unwrap();
    assert!(replay(&log).unwrap().divergence.is_some());
}

#[test]
fn a_full_disk_under_the_event_log_stops_nothing_and_is_said() {
    let dir = folder();
    std::fs::create_dir(dir.path().join("state")).unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join("state/events.jsonl")).unwrap();
    let daemon = TestDaemon::start(dir.path(), "");
    let mut client = daemon.client(NO_TOKEN);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(client.alloc(Bytes::mib(10)));
    let start = std::time::Instant::now();
    loop {
        let Answer::Ok(Payload::Hello { event_log, .. }) = daemon.ask(&Request::Hello) else {
            panic!()
        };
        if event_log
            .as_ref()
            .is_some_and(|text| text.contains("No space left") && text.contains("lost"))
        {
            break;
        }
        assert!(start.elapsed() < ebb_node::test_util::PATIENCE, "{event_log:?}");
    }
    assert!(client.alloc(Bytes::mib(10)), "it serves on");
}

#[test]
fn a_state_folder_that_cannot_be_had_costs_the_log_and_not_the_service() {
    let dir = folder();
    std::fs::write(dir.path().join("state"), "a file").unwrap();
    let daemon = TestDaemon::start(dir.path(), "");
    let Answer::Ok(Payload::Hello { troubles, .. }) = daemon.ask(&Request::Hello) else {
        panic!()
    };
    let said = |trouble: &ebb_protocol::control::Trouble| trouble.found.contains("do not survive a restart");
    assert!(troubles.iter().any(said), "{troubles:?}");
    let token = daemon.task("x", Bytes::ZERO, Some(Bytes::mib(20)));
    let mut client = daemon.client(token);
    client.attach(TOTAL, Bytes::ZERO, Bytes::ZERO);
    assert!(client.alloc(Bytes::mib(20)));
}

#[test]
fn a_second_daemon_is_told_of_the_first() {
    let dir = folder();
    let daemon = TestDaemon::start(dir.path(), "");
    let error = Daemon::start(TestDaemon::config(dir.path(), "")).unwrap_err();
    assert_eq!(error.running(), Some(std::process::id()));
    assert!(error.to_string().contains("already running") && !error.fix().is_empty());
    assert!(matches!(daemon.ask(&Request::Hello), Answer::Ok(_)));
}

#[test]
fn an_arena_that_cannot_be_is_refused_at_start() {
    let dir = folder();
    let config = TestDaemon::config(dir.path(), "[arena]\nbudget = \"4Pi\"");
    let error = Daemon::start(config).unwrap_err();
    assert!(
        matches!(error, StartError::Config(_)) && error.to_string().contains("4096 TiB"),
        "{error}"
    );
    assert!(error.fix().contains("arena.budget"));
    assert!(!dir.path().join("run").exists(), "nothing was begun");
    let long = TestDaemon::config(&dir.path().join("x".repeat(110)), "");
    assert!(matches!(
        Daemon::start(long).unwrap_err(),
        StartError::Place(PlaceError::TooLong { .. })
    ));
}

#[test]
fn a_users_daemon_without_tasks_ends_by_itself() {
    let dir = folder();
    let mut config = TestDaemon::config(dir.path(), "");
    config.idle_exit = Some(Duration::from_millis(200));
    let daemon = TestDaemon::start_with(dir.path(), config.clone());
    daemon.wait();
    // One that has a task does not, until the task is gone.
    let daemon = TestDaemon::start_with(dir.path(), config);
    let mut process = daemon.process(NO_TOKEN);
    assert_eq!(process.poll(Duration::from_millis(600)), None);
    assert!(matches!(daemon.ask(&Request::Hello), Answer::Ok(_)));
    process.kill();
    daemon.wait();
}
