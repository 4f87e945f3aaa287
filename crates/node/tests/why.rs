//! What the daemon says of its decisions.

use ebb_node::test_util::TestDaemon;
use ebb_protocol::control::{Answer, Payload, Request, TaskWhy};
use ebb_protocol::wire::{ToLayer, ask_kind};
use ebb_units::Bytes;

const CARD: Bytes = Bytes::gib(10);

#[test]
fn child() {
    ebb_node::test_util::child_main();
}

fn why(daemon: &TestDaemon, task: Option<&str>) -> Vec<TaskWhy> {
    let task = task.map(String::from);
    match daemon.ask(&Request::Why { task }) {
        Answer::Ok(Payload::Why { tasks, .. }) => tasks,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_gave_and_who_got_know_why_and_who_waits_knows_the_sum() {
    let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
    let daemon = TestDaemon::start(dir.path(), "[policy]\nidle_after = \"1ms\"\n");
    let chat = daemon.task("chat", Bytes::ZERO, None);
    let mut chat = daemon.client(chat);
    chat.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    let held = Bytes::gib(8);
    assert!(chat.alloc(held));
    chat.usage(held, Bytes::ZERO, 0);
    let train = daemon.task("train", Bytes::ZERO, None);
    let mut train = daemon.client(train);
    train.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    train.ask(ask_kind::ALLOC, Bytes::gib(9), true);
    let order = loop {
        if let ToLayer::Reclaim { order, .. } = chat.recv() {
            break order;
        }
    };
    // It waits for what the other one was told to give.
    let told = why(&daemon, Some("train"));
    assert_eq!((told.len(), told[0].name.as_str()), (1, "train"));
    let wait = &told[0].waits[0];
    assert_eq!(wait.needs, Bytes::gib(9));
    assert_eq!(
        wait.free.saturating_add(wait.coming).saturating_add(wait.short),
        wait.needs,
        "the sum is right: {wait:?}"
    );
    assert!(
        wait.text.contains("on its way") && wait.text.ends_with("it is next"),
        "{}",
        wait.text
    );
    chat.obey(order, held);
    while !matches!(train.recv(), ToLayer::Grant { .. }) {}
    let told = why(&daemon, None);
    let of = |name: &str| -> String {
        let task = told.iter().find(|t| t.name == name).unwrap();
        let lines = task.decisions.iter().map(|d| d.text.as_str());
        lines.collect::<Vec<_>>().join("\n")
    };
    let (gave, got) = (of("chat"), of("train"));
    assert!(
        gave.contains("idle memory needed by t2 train (idle 0.") && gave.contains("burst, priority normal)"),
        "{gave}"
    );
    assert!(gave.contains("GiB left in"), "{gave}");
    assert!(
        got.contains("taken from t1 chat: idle 0.") && got.contains("is next:"),
        "{got}"
    );
    assert!(told.iter().all(|t| t.waits.is_empty()), "{told:?}");
    assert!(matches!(
        daemon.ask(&Request::Why {
            task: Some("nobody".into())
        }),
        Answer::Error(_)
    ));
    daemon.stop();
}

/// A task is gone with its last process; why memory was refused to it can be asked afterwards.
#[test]
fn the_report_of_a_task_that_ended_is_kept() {
    let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
    let daemon = TestDaemon::start(dir.path(), "[task]\nlimit = \"8Gi\"\n");
    let mut process = daemon.process([0; 32]);
    process.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    assert!(!process.alloc(Bytes::gib(9)), "beyond its limit");
    let snapshot = daemon.snapshot();
    let id = snapshot.tasks[0].task;
    process.kill();
    daemon.until("its task is gone", |s| s.tasks.is_empty());
    for task in [None, Some(id.to_string())] {
        match daemon.ask(&Request::Why { task }) {
            Answer::Ok(Payload::Why { tasks, gone }) => {
                assert!(tasks.is_empty());
                assert_eq!((gone.len(), gone[0].task), (1, id));
                assert!(
                    gone[0].report.contains("would pass its limit of 8 GiB"),
                    "{gone:?}"
                );
                assert!(gone[0].ended_ms <= gone[0].refused_ms);
            }
            other => panic!("{other:?}"),
        }
    }
    daemon.stop();
}
