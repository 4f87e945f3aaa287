//! The daemon as a process of its own: signals, and what it tells systemd. This program is both the test and the daemon.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_node::{Config, Daemon};
use rustix::process::{Pid, Signal, kill_process};

const CONFIG: &str = "EBB_NODE_TEST_CONFIG";
const PATIENCE: Duration = Duration::from_secs(30);

fn main() {
    if let Some(path) = std::env::var_os(CONFIG) {
        let path = Path::new(&path);
        let config = Config::load(path).expect("valid settings");
        let daemon = Daemon::start_as_process(config, Some(path)).expect("it starts");
        return daemon.run().expect("it ends well");
    }
    signals_reload_and_end_it_and_systemd_is_told();
    println!("test signals_reload_and_end_it_and_systemd_is_told ... ok");
}

/// Killed when dropped, so that a failed assertion leaves nothing behind.
struct Running(Child);

impl Running {
    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().cast_signed()).expect("a process id");
        kill_process(pid, signal).expect("our own child");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn signals_reload_and_end_it_and_systemd_is_told() {
    let dir = tempfile::Builder::new().prefix("ebb-n").tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let settings = format!(
        "socket_dir = {:?}\nstate_dir = {:?}\nnvml = \"off\"\nlog = \"info\"\n",
        at("run"),
        at("state")
    );
    std::fs::write(at("ebb.toml"), &settings).unwrap();
    let systemd = UnixDatagram::bind(at("notify")).unwrap();
    systemd.set_read_timeout(Some(PATIENCE)).unwrap();
    let heard = || {
        let mut text = [0; 1024];
        let n = systemd.recv(&mut text).expect("it says something");
        String::from_utf8_lossy(&text[..n]).into_owned()
    };
    let child = Command::new(std::env::current_exe().unwrap())
        .env(CONFIG, at("ebb.toml"))
        .env("NOTIFY_SOCKET", at("notify"))
        .env_remove("EBB_LOG")
        .env_remove("EBB_NVML")
        .env_remove("JOURNAL_STREAM")
        .stderr(Stdio::from(std::fs::File::create(at("err")).unwrap()))
        .spawn()
        .unwrap();
    let mut daemon = Running(child);
    let ready = heard();
    assert!(
        ready.contains("READY=1") && ready.contains("STATUS=serving in"),
        "{ready}"
    );

    let until_said = |what: &str| {
        let start = Instant::now();
        while !std::fs::read_to_string(at("err")).unwrap().contains(what) {
            assert!(start.elapsed() < PATIENCE, "never said: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    daemon.signal(Signal::HUP);
    until_said("settings read again");
    // A mistake in the file changes nothing, and is named.
    std::fs::write(at("ebb.toml"), settings.clone() + "[arena]\nbugdet = \"1Gi\"\n").unwrap();
    daemon.signal(Signal::HUP);
    until_said("the settings stay as they are");
    until_said("bugdet");
    // What cannot change at once is said to hold later.
    std::fs::write(at("ebb.toml"), settings + "[event_log]\nenabled = false\n").unwrap();
    daemon.signal(Signal::HUP);
    until_said("a new `event_log` holds from the next start");

    assert!(at("run/layer.sock").exists());
    daemon.signal(Signal::TERM);
    assert_eq!(heard(), "STOPPING=1\n");
    let status = daemon.0.wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(!at("run/layer.sock").exists() && !at("run/ctl.sock").exists());
    assert!(at("state/tasks.json").exists());
}
