//! The disk tier's part of the conversation with programs.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ebb_protocol::control::DiskRow;
use ebb_protocol::wire::{SegmentInfo, ToLayer};
use ebb_units::Bytes;

use super::{Driver, PeerId};
use crate::arena::{Arena, Move, TierSettings};
use crate::config::Config;
use crate::disk::{Done, Job, Store, Trouble};
use crate::say;
use crate::worker::{Answers, FromWorker, Worker};

/// Who does the work, and where.
#[derive(Debug)]
pub(crate) struct DiskTier {
    workers: Worker<Job>,
    store: Store,
    dir: String,
}

impl DiskTier {
    /// Starts the workers, if the settings name a folder. A folder that cannot be had costs the tier and not the service.
    pub(crate) fn start(
        config: &Config,
        arena: &mut Arena,
        answers: &Answers,
    ) -> std::io::Result<Option<Self>> {
        let Some(disk) = &config.disk else {
            return Ok(None);
        };
        let store = match Store::open(&disk.dir, disk.reserve) {
            Ok(store) => store,
            Err(e) => {
                say::error!("nothing goes to disk: {}: {e}", disk.dir.display());
                return Ok(None);
            }
        };
        say::info!(
            "cold memory goes to {} by {}",
            disk.dir.display(),
            crate::disk::way()
        );
        arena.set_tier(settings(disk));
        let (to_driver, folder) = (answers.clone(), store.clone());
        let workers = Worker::pool("ebb-disk", disk.threads, move |job: Job| {
            to_driver.send(FromWorker::Disk(job.run(Some(&folder))));
        })?;
        Ok(Some(Self {
            workers,
            store,
            dir: disk.dir.display().to_string(),
        }))
    }
}

/// What the arena needs of the settings.
pub(super) fn settings(disk: &crate::config::DiskConfig) -> TierSettings {
    TierSettings {
        limit: disk.limit,
        after: disk.after,
        packing: disk.compress,
        threads: disk.threads,
    }
}

impl Driver {
    pub(super) fn arena_parted(&mut self, peer: PeerId, ids: &[u64]) {
        let (now, mut moves) = (self.now(), Vec::new());
        self.arena.parted(now, peer, ids, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn arena_kept(&mut self, peer: PeerId, ids: &[u64]) {
        let mut moves = Vec::new();
        self.arena.kept(peer, ids, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn arena_fetch(&mut self, peer: PeerId, ids: &[u64]) {
        let mut moves = Vec::new();
        self.arena.fetch(peer, ids, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn arena_hung_up(&mut self, peer: PeerId) {
        let mut moves = Vec::new();
        self.arena.hung_up(peer, &mut moves);
        self.do_moves(moves);
    }

    /// Files are taken on only if a daemon made them here: what a program hands over is read for it, and a file of its
    /// own choice could make a worker wait for ever.
    pub(super) fn arena_declare_stored(
        &mut self,
        peer: PeerId,
        segments: Vec<SegmentInfo>,
        fds: Vec<OwnedFd>,
    ) {
        let Some(store) = self.disk.as_ref().map(|disk| &disk.store) else {
            return;
        };
        let files: Vec<(SegmentInfo, File)> = segments
            .into_iter()
            .zip(fds)
            .filter(|(info, fd)| !info.bytes.is_zero() && store.is_ours(fd.as_fd()))
            .map(|(info, fd)| (info, File::from(fd)))
            .collect();
        let mut moves = Vec::new();
        self.arena.declare_stored(peer, files, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn disk_done(&mut self, done: Done) {
        let (now, mut moves) = (self.now(), Vec::new());
        match done {
            Done::Spilled { key, off, result } => {
                if let Some(trouble) = self.arena.spilled(now, key, &off, result, &mut moves) {
                    say::warning!(
                        "nothing goes to disk for a while, what should have stays in host memory: {trouble}"
                    );
                    self.record_disk(&format!("not written: {trouble}"));
                }
            }
            Done::Loaded { key, off, result } => {
                match self.arena.loaded(now, key, &off, result, &mut moves) {
                    None => {}
                    Some(Trouble::Memory(e)) => {
                        say::warning!("no memory to read a segment into: {e}; trying again")
                    }
                    Some(trouble) => {
                        say::error!("a segment cannot be read back, its program tries by itself: {trouble}");
                        self.record_disk(&format!("not read: {trouble}"));
                    }
                }
            }
            Done::Forgotten => {}
        }
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    fn record_disk(&mut self, text: &str) {
        let t = self.now();
        if let Some(log) = &mut self.log {
            log.push(&crate::eventlog::Record::Disk { t, text: text.into() });
        }
    }

    /// What [`Driver::do_moves`] leaves to this file.
    pub(super) fn disk_move(&mut self, what: Move) {
        match what {
            Move::Disk(job) => {
                // Without workers nothing of the kind is begun.
                if let Some(disk) = &self.disk {
                    disk.workers.send(job);
                }
            }
            Move::Part { from, bytes } => self.send(from, &ToLayer::ArenaPart { bytes }, Vec::new()),
            Move::Stored { to, id, file } => {
                // The message keeps its own descriptor of the file.
                match file.as_fd().try_clone_to_owned() {
                    Ok(fd) => self.send(
                        to,
                        &ToLayer::ArenaStored { segments: vec![id] },
                        vec![Arc::new(fd)],
                    ),
                    // No descriptor left: the segment stays in memory.
                    Err(e) => {
                        say::warning!("a program cannot be given its file: {e}");
                        self.arena_fetch(to, &[id]);
                    }
                }
            }
            Move::Stay { to, ids } => self.send(to, &ToLayer::ArenaStay { segments: ids }, Vec::new()),
            Move::Back { to, segment, memory } => {
                let message = ToLayer::ArenaBack {
                    segments: vec![segment],
                };
                self.send(to, &message, vec![memory]);
            }
            Move::Broken { to, ids } => self.send(to, &ToLayer::ArenaBroken { segments: ids }, Vec::new()),
            _ => {}
        }
    }

    /// For `ebb ps`.
    pub(super) fn disk_row(&self) -> Option<DiskRow> {
        let totals = self.arena.tier_totals();
        Some(DiskRow {
            dir: self.disk.as_ref()?.dir.clone(),
            limit: self.arena.disk_limit().unwrap_or(Bytes::ZERO),
            stored: self.arena.stored(),
            segments: self.arena.on_disk(),
            spilled: totals.spilled,
            zeros: totals.zeros,
            loaded: totals.loaded,
            trouble: self
                .arena
                .disk_trouble()
                .map_or_else(String::new, |trouble| trouble.to_string()),
        })
    }
}
