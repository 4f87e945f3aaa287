//! Programs that sleep and meet a daemon which was not there when they went: in whatever order they come, say what they have and want back,
//! everybody is woken, and nobody before the driver was asked to.
//!
//! The helper is a script whose every step the test lets happen.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ebb_node::test_util::{Client, PATIENCE, ProcessClient, TestDaemon};
use ebb_protocol::control::Snapshot;
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;

const CARD: Bytes = Bytes::gib(1);
const ORDER: u64 = 77;

/// Not a test of its own: the process of a client.
#[test]
fn child() {
    ebb_node::test_util::child_main();
}

/// A helper that is ready, and answers each command, when a word is written to the pipe `gate`. What it is told goes to `told`.
/// The states that it sees are in `states`.
const HELPER: &str = r#"#!/bin/sh
cd DIR || exit 1
exec 9< gate
read word <&9
echo ready
while read command rest; do
    echo "$command $rest" >> told
    read word <&9
    case $command in
    look) for pid in $rest; do echo "state $pid $(cat states)"; done ;;
    up) for pid in $rest; do echo "restored $pid 1"; echo "unlocked $pid 1"; done ;;
    esac
    echo "did $command $rest" >> told
    echo done
done
"#;

struct Scene {
    daemon: TestDaemon,
    gate: std::fs::File,
    dir: PathBuf,
    _folder: tempfile::TempDir,
}

impl Scene {
    /// `state`: what the driver says of every process.
    fn new(state: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().to_path_buf();
        let mkfifo = std::process::Command::new("mkfifo")
            .arg(dir.join("gate"))
            .status();
        assert!(mkfifo.unwrap().success());
        std::fs::write(dir.join("states"), format!("{state}\n")).unwrap();
        std::fs::write(dir.join("told"), "").unwrap();
        let script = dir.join("helper");
        std::fs::write(&script, HELPER.replace("DIR", dir.to_str().unwrap())).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut config = TestDaemon::config(&dir, "");
        config.helper = script;
        // For both directions: opening waits for nobody.
        let gate = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(dir.join("gate"));
        Self {
            daemon: TestDaemon::start_with(&dir, config),
            gate: gate.unwrap(),
            dir,
            _folder: folder,
        }
    }

    /// Lets helpers go on by so many steps.
    fn go_on(&mut self, steps: usize) {
        self.gate.write_all("on\n".repeat(steps).as_bytes()).unwrap();
    }

    /// A helper starts, looks at a process, and what it sees is known.
    fn finds_asleep(&mut self, pid: u32) {
        self.go_on(1);
        self.until_told("look", pid);
        self.go_on(1);
        self.until_told("did", pid);
        self.daemon
            .until("it is hibernated", |seen| state(seen, pid) == "hibernated");
    }

    /// Waits until a helper was told something that begins and ends so.
    fn until_told(&self, command: &str, pid: u32) {
        let told = || std::fs::read_to_string(self.dir.join("told")).unwrap_or_default();
        let is_it = |line: &str| {
            let mut words = line.split(' ');
            words.next() == Some(command) && words.any(|word| word == pid.to_string())
        };
        self.daemon
            .until(&format!("a helper is told `{command}` of {pid}"), |_| {
                told().lines().any(is_it)
            });
    }
}

/// Everything that a client said has been read, and acted on.
fn heard(scene: &Scene) {
    // The daemon does one round after the other; what was sent before the first of these is in a round before the second's.
    let _ = scene.daemon.snapshot();
    let _ = scene.daemon.snapshot();
}

fn says_it_sleeps(client: &Client, order: u64, wanted: bool) {
    client.send(&ToDaemon::Sleeping { order });
    if wanted {
        client.send(&ToDaemon::WakeMe { order });
    }
}

/// Reads until the library is told that it is awake.
fn is_woken(client: &mut Client, order: u64) {
    loop {
        match client.recv() {
            ToLayer::Awake { order: of } => return assert_eq!(of, order),
            ToLayer::Deny { .. } => panic!("nothing was asked"),
            _ => {}
        }
    }
}

/// That it is not told so, as far as the daemon has got.
fn is_not_woken(scene: &Scene, client: &mut Client) {
    heard(scene);
    while let Some(message) = client.poll(Duration::ZERO) {
        assert!(!matches!(message, ToLayer::Awake { .. }), "{message:?}");
    }
}

fn state(snapshot: &Snapshot, pid: u32) -> String {
    let mut rows = snapshot.tasks.iter().flat_map(|task| &task.processes);
    rows.find(|row| row.pid == pid)
        .map_or(String::new(), |row| row.state.clone())
}

fn process(scene: &Scene, token: [u8; 32]) -> ProcessClient {
    ProcessClient::start(&scene.daemon.socket_dir(), token)
}

/// A process that sleeps, and has something on the card.
fn sleeper(scene: &Scene, token: [u8; 32], wanted: bool) -> ProcessClient {
    let mut one = process(scene, token);
    says_it_sleeps(&one, ORDER, wanted);
    let _ = one.attach(CARD, Bytes::mib(4), Bytes::mib(8));
    one
}

#[test]
fn a_sleeper_that_declares_itself_after_its_room_was_asked_for_is_woken() {
    for (state_then, lease) in [(2, Bytes::mib(4)), (0, Bytes::mib(4)), (2, Bytes::ZERO)] {
        let mut scene = Scene::new(state_then);
        let token = scene.daemon.task("t", Bytes::ZERO, None);
        let mut one = process(&scene, token);
        // It wants back, and its room is asked for: there is none to be asked for yet.
        says_it_sleeps(&one, ORDER, true);
        heard(&scene);
        let _ = one.attach(CARD, lease, Bytes::mib(8));
        is_not_woken(&scene, &mut one);
        // Ready; and whatever it is told.
        scene.go_on(3);
        is_woken(&mut one, ORDER);
        let snapshot = scene.daemon.snapshot();
        assert!(snapshot.devices[0].leased >= lease, "{snapshot:#?}");
        assert!(snapshot.devices[0].leased <= Bytes::mib(12), "{snapshot:#?}");
    }
}

#[test]
fn a_sleeper_that_comes_when_the_others_are_being_woken_is_woken_after_them_and_by_the_driver() {
    // By the order of the others, and by one of its own.
    for order in [ORDER, ORDER + 1] {
        let mut scene = Scene::new(2);
        let token = scene.daemon.task("t", Bytes::ZERO, None);
        let mut late = process(&scene, token);
        let mut one = sleeper(&scene, token, true);
        scene.go_on(1);
        scene.until_told("up", one.pid());
        // The helper is at it.
        says_it_sleeps(&late, order, true);
        is_not_woken(&scene, &mut late);
        let _ = late.attach(CARD, Bytes::mib(4), Bytes::mib(8));
        is_not_woken(&scene, &mut late);
        scene.go_on(1);
        is_woken(&mut one, ORDER);
        is_not_woken(&scene, &mut late);
        // Looks, if it is looked at first, and what it takes to bring it up.
        scene.go_on(2);
        is_woken(&mut late, order);
        scene.until_told("up", late.pid());
    }
}

#[test]
fn a_sleeper_that_nobody_waits_for_is_left_asleep_and_looked_at() {
    let mut scene = Scene::new(2);
    let token = scene.daemon.task("t", Bytes::ZERO, None);
    let mut one = sleeper(&scene, token, false);
    scene.finds_asleep(one.pid());
    is_not_woken(&scene, &mut one);
    assert_eq!(scene.daemon.snapshot().devices[0].leased, Bytes::ZERO);
    // A call of the earlier daemon's helper was carried out after that: a later look sees it.
    std::fs::write(scene.dir.join("states"), "1\n").unwrap();
    scene.go_on(4);
    is_woken(&mut one, ORDER);
}

#[test]
fn a_sleeper_that_has_woken_itself_is_not_taken_for_one_that_sleeps() {
    let mut scene = Scene::new(2);
    let token = scene.daemon.task("t", Bytes::ZERO, None);
    let mut one = sleeper(&scene, token, false);
    let pid = one.pid();
    scene.finds_asleep(pid);
    // Its connection is lost; it helps itself and comes again, awake.
    let again = one.connect();
    one.client = Client::hello(again, token, one.session);
    let _ = one.attach(CARD, Bytes::mib(12), Bytes::ZERO);
    let snapshot = scene.daemon.snapshot();
    assert_eq!(snapshot.devices[0].leased, Bytes::mib(12), "{snapshot:#?}");
    // The driver is asked to let it in all the same: the first helper may not have been done.
    scene.until_told("up", pid);
    scene.go_on(1);
    scene
        .daemon
        .until("it is a program like others", |seen| state(seen, pid) != "waking");
    assert_eq!(scene.daemon.snapshot().devices[0].leased, Bytes::mib(12));
}

#[test]
fn a_sleeper_that_comes_again_while_it_is_brought_up_keeps_what_it_says() {
    let mut scene = Scene::new(2);
    let token = scene.daemon.task("t", Bytes::ZERO, None);
    let mut one = sleeper(&scene, token, true);
    scene.go_on(1);
    scene.until_told("up", one.pid());
    let again = one.connect();
    one.client = Client::hello(again, token, one.session);
    says_it_sleeps(&one, ORDER, true);
    let _ = one.attach(CARD, Bytes::mib(4), Bytes::mib(8));
    heard(&scene);
    scene.go_on(1);
    // No lease is sent that the ledger has not.
    let mut granted = Bytes::ZERO;
    loop {
        match one.poll(PATIENCE).expect("it is told") {
            ToLayer::Awake { order } => {
                assert_eq!(order, ORDER);
                break;
            }
            ToLayer::Grant { bytes, .. } => granted += bytes,
            _ => {}
        }
    }
    let leased = scene.daemon.snapshot().devices[0].leased;
    assert_eq!(leased, Bytes::mib(4) + granted);
}

#[test]
fn a_helper_that_does_not_start_leaves_nobody_waiting_for_good() {
    let mut scene = Scene::new(2);
    let good = std::fs::read_to_string(scene.dir.join("helper")).unwrap();
    std::fs::write(scene.dir.join("helper"), "#!/bin/sh\nexit 1\n").unwrap();
    let token = scene.daemon.task("t", Bytes::ZERO, None);
    let mut one = sleeper(&scene, token, true);
    let pid = one.pid();
    scene.daemon.until("it is seen why", |seen| {
        let mut rows = seen.tasks.iter().flat_map(|task| &task.processes);
        rows.any(|row| row.pid == pid && row.why.contains("ended"))
    });
    is_not_woken(&scene, &mut one);
    replace(&scene.dir.join("helper"), &good);
    scene.go_on(2);
    is_woken(&mut one, ORDER);
}

/// A program that may be running cannot be written to.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(&new, path).unwrap();
}
