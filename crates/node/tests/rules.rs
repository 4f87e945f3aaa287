//! Rules of the operator, in a running daemon.

use ebb_node::test_util::TestDaemon;
use ebb_protocol::wire::ToLayer;
use ebb_units::Bytes;

const CARD: Bytes = Bytes::gib(10);

#[test]
fn child() {
    ebb_node::test_util::child_main();
}

#[test]
fn a_rule_notifies_and_takes_what_it_says() {
    let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
    let news = dir.path().join("news");
    let settings = format!(
        "rule = [{{ name = \"full\", when = \"device.used > 60% for 100ms\", do = [\"notify\", \"pause hog\"] }}, \
         {{ name = \"trial\", when = \"device.used > 10%\", do = [\"pause quiet\"], dry_run = true }}]\n\
         [notify]\ncommand = \"cat > '{0}.new' && mv '{0}.new' '{0}'\"\n",
        news.display()
    );
    let daemon = TestDaemon::start(dir.path(), &settings);
    let hog = daemon.task("hog", Bytes::ZERO, None);
    let quiet = daemon.task("quiet", Bytes::ZERO, None);
    let mut quiet = daemon.client(quiet);
    quiet.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    assert!(quiet.alloc(Bytes::gib(2)));
    let mut hog = daemon.client(hog);
    hog.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    let held = Bytes::gib(6);
    assert!(hog.alloc(held));
    // The rule sees it within a second or two, and the one that is named has to go.
    let order = loop {
        if let ToLayer::Reclaim { order, reason, .. } = hog.recv() {
            assert!(
                String::from_utf8_lossy(&reason).starts_with("paused"),
                "{reason:?}"
            );
            break order;
        }
    };
    hog.obey(order, held);
    daemon.until("the named task is paused, the other is not", |s| {
        let paused = |name: &str| s.tasks.iter().any(|t| t.name == name && t.paused);
        paused("hog") && !paused("quiet")
    });
    daemon.until("the news came", |_| news.exists());
    let text = std::fs::read_to_string(&news).unwrap();
    assert!(
        text.contains("\"rule\":\"full\"") && text.contains("pause hog"),
        "{text}"
    );
    daemon.stop();
}

#[test]
fn a_rule_that_meets_nobody_says_so() {
    use ebb_protocol::control::{Answer, Payload, Request};
    let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
    let rule = "rule = [{ name = \"full\", when = \"device.used > 60%\", \
                do = [\"shrink low\", \"pause nobody\", \"checkpoint train\", \"notify\"] }]\n";
    let daemon = TestDaemon::start(dir.path(), rule);
    let train = daemon.task("train", Bytes::ZERO, None);
    let mut client = daemon.client(train);
    client.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    assert!(client.alloc(Bytes::gib(7)));
    let rules = || match daemon.ask(&Request::Rules) {
        Answer::Ok(Payload::Rules { rules, fired, .. }) => (rules, fired),
        other => panic!("{other:?}"),
    };
    daemon.until("it fired", |_| !rules().1.is_empty());
    let (rules, fired) = rules();
    assert_eq!(
        (rules[0].cards[0].fired, rules[0].cards[0].state.as_str()),
        (1, "fired")
    );
    for part in [
        "shrink low (nobody of that priority is on the card)",
        "pause nobody (nobody is called `nobody`)",
        "checkpoint train (t1 train; without `ebb run --checkpoint`, so not told: t1 train)",
        "notify (nobody: there is no notify.command or notify.webhook)",
    ] {
        assert!(fired[0].done.contains(part), "{part} in {}", fired[0].done);
    }
    assert!(
        matches!(daemon.ask(&Request::Reload), Answer::Error(_)),
        "there is no file"
    );
    daemon.stop();
}

#[test]
fn who_is_refused_or_has_to_give_way_can_hear_of_it() {
    use ebb_protocol::control::{Answer, Payload, Request, TaskNews};
    let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
    let rule = "rule = [{ name = \"batch\", when = \"device.used > 60%\", do = [\"checkpoint train\"] }]\n";
    let daemon = TestDaemon::start(dir.path(), rule);
    let train = daemon.task("train", Bytes::ZERO, Some(Bytes::gib(8)));
    let mut client = daemon.client(train);
    client.attach(CARD, Bytes::ZERO, Bytes::ZERO);
    let news = || -> TaskNews {
        match daemon.ask(&Request::News {
            task: "train".into(),
            gives_way: true,
        }) {
            Answer::Ok(Payload::News(news)) => news,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(news(), TaskNews::default());
    assert!(!client.alloc(Bytes::gib(9)), "beyond its limit");
    let after = news();
    assert_eq!((after.denials, after.give_way_ms), (1, None));
    let report = after.report.unwrap();
    for part in [
        "`train` was refused memory",
        "would pass its limit of 8 GiB",
        "the card:",
        "what to change: a higher --limit",
    ] {
        assert!(report.contains(part), "{report}");
    }
    assert!(client.alloc(Bytes::gib(7)));
    daemon.until("it is told to give way", |_| news().give_way_ms.is_some());
    assert_eq!(news().give_way_ms, None, "once");
    daemon.stop();
}
