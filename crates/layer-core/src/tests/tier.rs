//! Segments that go to disk: what the library does of it, with a daemon that answers, lies, or is gone.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ebb_disk::{BLOCK, Entry, Kind, Table, header_len};
use ebb_protocol::wire::SegmentInfo;
use ebb_protocol::{ToDaemon, ToLayer};
use ebb_units::Bytes;

use crate::testing::{Daemon, G, Rig, Script, done};

const SEGMENT: u64 = 16 * G;

/// A program with all its memory off the card and let go of.
struct Scene {
    daemon: Daemon,
    rig: Arc<Rig>,
    ptr: u64,
    ids: Vec<u64>,
}

fn parted(daemon: &Daemon) -> Vec<u64> {
    daemon.expect("what it let go of", |m| match m {
        ToDaemon::ArenaParted { segments } => Some(segments.clone()),
        _ => None,
    })
}

fn scene(script: Script) -> Scene {
    let daemon = Daemon::start(script);
    let rig = Arc::new(Rig::new(Some(&daemon), 256 * G));
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    assert!(done(daemon.reclaim(u64::MAX)));
    daemon.send(ToLayer::ArenaPart { bytes: Bytes::MAX });
    let ids = parted(&daemon);
    assert_eq!(ids.len(), 4, "four segments hold it");
    assert_eq!(rig.engine.core.arena.sums().away, 4 * SEGMENT);
    Scene {
        daemon,
        rig,
        ptr,
        ids,
    }
}

/// The file of a segment as the daemon writes it.
fn file_of(memory: &OwnedFd) -> File {
    let mut plain = vec![0; usize::try_from(SEGMENT).unwrap()];
    let memory = File::from(memory.as_fd().try_clone_to_owned().unwrap());
    memory.read_exact_at(&mut plain, 0).unwrap();
    let mut table = Table::new(SEGMENT, 5);
    let file = tempfile::tempfile().unwrap();
    let mut at = header_len(SEGMENT) as u64;
    for (block, part) in plain.chunks(BLOCK).enumerate() {
        let len = u32::try_from(part.len()).unwrap();
        let hash = table.hash(block, part);
        table.entries.push(Entry {
            at,
            len,
            kind: Kind::Plain,
            hash,
        });
        file.write_all_at(part, at).unwrap();
        at += u64::from(len);
    }
    file.write_all_at(&table.encode(), 0).unwrap();
    file
}

impl Scene {
    /// The daemon has written them: the library has the files, and the memory is emptied.
    fn store(&self) -> Vec<File> {
        let files: Vec<File> = self
            .ids
            .iter()
            .map(|id| file_of(&self.daemon.memory(*id)))
            .collect();
        let fds: Vec<OwnedFd> = files
            .iter()
            .map(|f| f.as_fd().try_clone_to_owned().unwrap())
            .collect();
        let segments = self.ids.clone();
        self.daemon.send_with(ToLayer::ArenaStored { segments }, &fds);
        let kept = self.daemon.expect("that it has them", |m| match m {
            ToDaemon::ArenaKept { segments } => Some(segments.clone()),
            _ => None,
        });
        assert_eq!(kept, self.ids);
        for id in &self.ids {
            let memory = self.daemon.memory(*id);
            let memory = File::from(memory.as_fd().try_clone_to_owned().unwrap());
            memory
                .write_all_at(&vec![0xEE; usize::try_from(SEGMENT).unwrap()], 0)
                .unwrap();
        }
        files
    }

    /// A kernel of the program that needs it all.
    fn touch(&self) -> std::thread::JoinHandle<bool> {
        let (rig, ptr) = (self.rig.clone(), self.ptr);
        std::thread::spawn(move || rig.holds(ptr, 64 * G, 1))
    }

    fn fetched(&self) -> Vec<u64> {
        self.daemon.expect("a wish for them", |m| match m {
            ToDaemon::ArenaFetch { segments } => Some(segments.clone()),
            _ => None,
        })
    }

    fn end(self) {
        self.rig.engine.free(self.ptr).unwrap();
        Arc::into_inner(self.rig).unwrap().assert_gone_after_detach();
    }
}

#[test]
fn what_was_let_go_of_is_not_mapped_or_registered_and_comes_back_in_new_memory() {
    let scene = scene(Script::default());
    let unused = scene.rig.engine.core.arena.sums().segments - 4;
    assert_eq!(scene.rig.host.segments() as u64, unused, "nothing maps them");
    let files = scene.store();
    let touch = scene.touch();
    let mut fetched = Vec::new();
    // In the order in which they are copied in; what comes is used before the rest is there.
    while fetched.len() < 4 {
        for id in scene.fetched() {
            let memory = rustix::fs::memfd_create("back", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&memory, SEGMENT).unwrap();
            let at = scene.ids.iter().position(|other| *other == id).unwrap();
            ebb_disk::load(
                SEGMENT,
                &mut |buffer, from| files[at].read_at(buffer, from),
                &mut |part, to| {
                    rustix::io::pwrite(&memory, part, to)?;
                    Ok(())
                },
            )
            .unwrap();
            let bytes = Bytes(SEGMENT);
            let segments = vec![SegmentInfo { id, bytes }];
            scene.daemon.send_with(ToLayer::ArenaBack { segments }, &[memory]);
            fetched.push(id);
        }
    }
    assert!(touch.join().unwrap(), "every byte");
    assert_eq!(scene.rig.engine.core.arena.sums().away, 0);
    scene.end();
}

#[test]
fn the_daemon_dies_before_the_file_is_there_and_the_memory_is_as_it_was() {
    let scene = scene(Script::default());
    scene.daemon.disconnect();
    assert!(scene.touch().join().unwrap());
    scene.end();
}

#[test]
fn the_daemon_dies_when_the_bytes_are_in_files_alone_and_the_program_reads_them_itself() {
    let scene = scene(Script::default());
    let files = scene.store();
    drop(files);
    scene.daemon.disconnect();
    assert!(scene.touch().join().unwrap());
    // The memory of its own goes when it is empty.
    scene.rig.until("the memory to go", |rig| {
        rig.engine.core.arena.sums().segments == 0 || rig.engine.core.link.epoch() != 0
    });
    scene.end();
}

#[test]
fn a_new_daemon_hears_of_the_files() {
    let scene = scene(Script::default());
    scene.store();
    scene.daemon.disconnect();
    let declared = scene.daemon.expect("the files", |m| match m {
        ToDaemon::ArenaDeclareStored { segments } => Some(segments.iter().map(|s| s.id).collect::<Vec<_>>()),
        _ => None,
    });
    assert_eq!(declared, scene.ids);
    // It does not want them: the program reads them itself.
    let touch = scene.touch();
    let segments = scene.fetched();
    scene.daemon.send(ToLayer::ArenaBroken { segments });
    let mut left = scene.ids.len();
    while left > 0 && !touch.is_finished() {
        // Asked for piece by piece, as lease comes.
        scene.daemon.send(ToLayer::ArenaBroken {
            segments: scene.ids.clone(),
        });
        left -= 1;
    }
    assert!(touch.join().unwrap());
    scene.end();
}

#[test]
fn wanted_back_while_it_is_written_it_stays_and_a_late_file_is_not_taken() {
    let scene = scene(Script::default());
    let files: Vec<OwnedFd> = scene
        .ids
        .iter()
        .map(|id| file_of(&scene.daemon.memory(*id)).into())
        .collect();
    let touch = scene.touch();
    let mut wanted = scene.fetched();
    let segments = scene.ids.clone();
    scene.daemon.send_with(ToLayer::ArenaStored { segments }, &files);
    while wanted.len() < 4 {
        let first = std::mem::take(&mut wanted);
        scene.daemon.send(ToLayer::ArenaStay { segments: first });
        wanted = scene.fetched();
    }
    scene.daemon.send(ToLayer::ArenaStay {
        segments: scene.ids.clone(),
    });
    assert!(touch.join().unwrap());
    let took = |m: &ToDaemon| matches!(m, ToDaemon::ArenaKept { .. });
    assert!(!scene.daemon.saw(took), "no file was taken that was wanted back");
    scene.end();
}

#[test]
fn a_damaged_file_is_an_error_and_never_wrong_bytes() {
    let scene = scene(Script {
        alloc_wait_max: std::time::Duration::from_millis(300),
        ..Script::default()
    });
    let files = scene.store();
    let at = header_len(SEGMENT) as u64 + 77;
    let mut good = [0];
    files[2].read_exact_at(&mut good, at).unwrap();
    files[2].write_all_at(&[!good[0]], at).unwrap();
    scene.daemon.disconnect();
    // A call waits its time and is refused, perhaps before the file was read.
    scene.rig.until("the damage is found, and said", |rig| {
        let refused = rig.touch(|_| ());
        assert!(refused.is_err(), "the program's call hears of it: {refused:?}");
        rig.engine.report_json().contains("does not have the hash")
    });
    // Mended, it comes back: nothing was thrown away.
    files[2].write_all_at(&good, at).unwrap();
    scene.rig.until("it is back", |rig| rig.touch(|_| ()).is_ok());
    assert!(scene.rig.holds(scene.ptr, 64 * G, 1));
    scene.end();
}

#[test]
fn what_is_on_the_card_again_or_was_never_off_it_is_not_let_go_of() {
    let daemon = Daemon::start(Script::default());
    let rig = Rig::new(Some(&daemon), 256 * G);
    let ptr = rig.alloc(64 * G);
    rig.fill(ptr, 64 * G, 1);
    rig.until("arena", |rig| rig.engine.core.arena.sums().total >= 64 * G);
    daemon.send(ToLayer::ArenaPart { bytes: Bytes::MAX });
    assert_eq!(parted(&daemon), Vec::<u64>::new());
    assert!(done(daemon.reclaim(u64::MAX)));
    // As many as it takes, and no more.
    daemon.send(ToLayer::ArenaPart {
        bytes: Bytes(SEGMENT + 1),
    });
    let ids = parted(&daemon);
    assert_eq!(ids.len(), 2);
    daemon.send(ToLayer::ArenaStay { segments: ids });
    assert!(rig.holds(ptr, 64 * G, 1));
    rig.engine.free(ptr).unwrap();
    rig.assert_gone_after_detach();
}

#[test]
fn memory_that_is_freed_while_it_is_on_disk_takes_no_file_along() {
    let scene = scene(Script::default());
    scene.store();
    scene.rig.engine.free(scene.ptr).unwrap();
    let mut returned = Vec::new();
    while returned.len() < 4 {
        returned.extend(scene.daemon.expect("them to be returned", |m| match m {
            ToDaemon::ArenaReturn { segments } => Some(segments.clone()),
            _ => None,
        }));
    }
    returned.sort_unstable();
    assert_eq!(returned, scene.ids);
    Arc::into_inner(scene.rig).unwrap().assert_gone_after_detach();
}
