//! The part of the conversation with programs that is about host copies which several tasks have in common.

use std::os::fd::OwnedFd;

use ebb_protocol::wire::{RestingRun, SegmentInfo, ToLayer};
use ebb_units::Bytes;

use super::{Driver, PeerId};
use crate::arena::{Arena, Move};
use crate::config::Config;
use crate::equal::{Done, Job, Secret};
use crate::worker::{Answers, FromWorker, Worker};
use crate::{process, say};

/// Starts the thread that looks for equal blocks, if it is wanted. It has what the others leave of the processors.
pub(crate) fn start(
    config: &Config,
    arena: &mut Arena,
    answers: &Answers,
) -> std::io::Result<Option<Worker<Job>>> {
    if !config.arena.share {
        return Ok(None);
    }
    let secret = match process::random_token() {
        Ok(random) => Secret::of(random),
        Err(e) => {
            say::error!("equal host copies stay apart: there is no randomness: {e}");
            return Ok(None);
        }
    };
    arena.set_common(Some(secret));
    let to_driver = answers.clone();
    let worker = Worker::start("ebb-equal", true, move |jobs: std::sync::mpsc::Receiver<Job>| {
        // Of this thread alone; refused, it competes.
        let _ = rustix::process::setpriority_process(None, 19);
        for job in jobs {
            if !to_driver.send(FromWorker::Equal(job.run())) {
                return;
            }
        }
    })?;
    Ok(Some(worker))
}

impl Driver {
    /// Whether it is known whose the bytes of a program are. Without that nothing is compared with them.
    fn knows_domain(&mut self, peer: PeerId) -> bool {
        if self.arena.has_domain(peer) {
            return true;
        }
        let process = self.peers.get(&peer).map(|peer| peer.process);
        let process = process.and_then(|key| self.processes.get(&key));
        let Some(name) = process.and_then(|p| process::domain(p.pid, p.uid)) else {
            return false;
        };
        self.arena.set_domain(peer, name);
        true
    }

    pub(super) fn arena_rest(&mut self, peer: PeerId, notice: u64, runs: &[RestingRun]) {
        if self.arena.has_common() && self.knows_domain(peer) {
            self.arena.rest(peer, notice, runs);
            self.arena_dirty = true;
        }
    }

    /// `None`: the offer never reached it.
    pub(super) fn offer_answered(&mut self, peer: PeerId, segment: u64, held: Option<bool>) {
        let mut moves = Vec::new();
        self.arena.offer_answered(peer, segment, held, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn common_left(&mut self, peer: PeerId, segments: &[u64]) {
        let mut moves = Vec::new();
        self.arena.common_left(peer, segments, &mut moves);
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn common_use(&mut self, peer: PeerId, away: Bytes, kept: Bytes) {
        self.arena.common_use(peer, away, kept);
        self.arena_dirty = true;
    }

    /// Taken on also when nothing new is begun: what programs hold is counted.
    pub(super) fn common_declared(
        &mut self,
        peer: PeerId,
        first: bool,
        segments: &[SegmentInfo],
        fds: Vec<OwnedFd>,
    ) {
        self.knows_domain(peer);
        let mut moves = Vec::new();
        let taken = self.arena.declare_common(peer, first, segments, fds, &mut moves);
        if taken < segments.len() {
            say::debug!(
                "{} declared common segments are not taken on",
                segments.len() - taken
            );
        }
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    pub(super) fn equal_done(&mut self, done: Done) {
        let (now, mut moves) = (self.now(), Vec::new());
        if let Err(e) = self.arena.equal(now, done, &mut moves) {
            say::warning!("equal host copies stay apart for now: {e}");
        }
        self.do_moves(moves);
        self.arena_dirty = true;
    }

    /// What [`Driver::do_moves`] leaves to this file.
    pub(super) fn common_move(&mut self, what: Move) {
        match what {
            Move::Equal(job) => {
                // Without a worker nothing of the kind is begun.
                if let Some(worker) = &self.equal {
                    worker.send(job);
                }
            }
            Move::Offer {
                to,
                segment,
                blocks,
                memory,
            } => self.send(to, &ToLayer::ArenaCommon { segment, blocks }, vec![memory]),
            Move::Unkeep { to, ids } => {
                self.send(to, &ToLayer::ArenaCommonWanted { segments: ids }, Vec::new());
            }
            _ => {}
        }
    }
}
