//! [`Views`]: addresses under which idle chunks from many places lie next to each other.
//!
//! A view is made once, when a block fits nowhere although enough memory is idle, and kept: as long as nothing lives in its
//! chunks, the next block of its size gets it without a call of the driver. A program that repeats itself meets the same
//! state again, and the view that was made for it: of those that would do, the oldest is taken, which is the one that
//! was made in this state. So a loop maps nothing once it has gone round (Note in `docs/design/0005-pool.md`).

use std::collections::{BTreeMap, BTreeSet};

use super::chunks::ChunkId;
use super::{Mark, Stream};

/// The older, the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ViewId(u64);

#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) at: u64,
    pub(super) len: u64,
    /// Address and chunk.
    pub(super) parts: Vec<(u64, ChunkId)>,
    /// Chunks that are not idle, wherever they are used.
    busy: usize,
    /// Chunks that are used under this view's addresses.
    live: usize,
    /// One of its mappings is gone, or it is not wanted: no new block.
    dead: bool,
    /// When it was last used, in uses of views.
    used: u64,
    /// The work that may still use its addresses.
    pub(super) last: (Stream, Mark),
}

/// All views.
///
/// # Invariants
/// `ready` holds the views that are neither busy nor dead. `starts` holds every mapping of every view.
#[derive(Clone, Debug, Default)]
pub(super) struct Views {
    views: BTreeMap<ViewId, View>,
    starts: BTreeMap<u64, ViewId>,
    /// By bytes.
    ready: BTreeMap<u64, BTreeSet<ViewId>>,
    next: u64,
    uses: u64,
}

impl Views {
    /// Enters a view of which every chunk is held or idle; `busy` of them are held.
    pub(super) fn add(&mut self, at: u64, len: u64, parts: Vec<(u64, ChunkId)>, stream: Stream) -> ViewId {
        let id = ViewId(self.next);
        self.next += 1;
        self.uses += 1;
        for (start, _) in &parts {
            self.starts.insert(*start, id);
        }
        self.views.insert(
            id,
            View {
                at,
                len,
                parts,
                busy: 0,
                live: 0,
                dead: false,
                used: self.uses,
                last: (stream, Mark(0)),
            },
        );
        self.ready.entry(len).or_default().insert(id);
        id
    }

    /// Views of this size with all chunks idle, the oldest first.
    pub(super) fn ready(&self, len: u64) -> impl Iterator<Item = (ViewId, &View)> {
        self.ready
            .get(&len)
            .into_iter()
            .flatten()
            .filter_map(|id| Some((*id, self.views.get(id)?)))
    }

    pub(super) fn get(&self, id: ViewId) -> Option<&View> {
        self.views.get(&id)
    }

    pub(super) fn used(&mut self, id: ViewId) {
        self.uses += 1;
        if let Some(view) = self.views.get_mut(&id) {
            view.used = self.uses;
        }
    }

    fn of(&self, start: u64) -> Option<ViewId> {
        self.starts.get(&start).copied()
    }

    /// A chunk with a mapping here is not idle any more.
    pub(super) fn busier(&mut self, start: u64) {
        let Some(id) = self.of(start) else { return };
        if let Some(view) = self.views.get_mut(&id) {
            view.busy += 1;
            if view.busy == 1 && !view.dead {
                let len = view.len;
                self.unready(len, id);
            }
        }
    }

    /// A chunk with a mapping here is idle again.
    pub(super) fn idler(&mut self, start: u64) {
        let Some(id) = self.of(start) else { return };
        if let Some(view) = self.views.get_mut(&id) {
            view.busy -= 1;
            if view.busy == 0 && !view.dead {
                let len = view.len;
                self.ready.entry(len).or_default().insert(id);
            }
        }
    }

    fn unready(&mut self, len: u64, id: ViewId) {
        if let Some(ready) = self.ready.get_mut(&len) {
            ready.remove(&id);
            if ready.is_empty() {
                self.ready.remove(&len);
            }
        }
    }

    /// The chunk with a mapping here is used through it from now on.
    pub(super) fn enter(&mut self, start: u64) {
        if let Some(view) = self.of(start).and_then(|id| self.views.get_mut(&id)) {
            view.live += 1;
        }
    }

    /// It is not any more. The mappings that nobody needs now, if the view is dead.
    pub(super) fn leave(&mut self, start: u64, last: (Stream, Mark)) -> Vec<(u64, ChunkId)> {
        let Some(id) = self.of(start) else {
            return Vec::new();
        };
        if let Some(view) = self.views.get_mut(&id) {
            view.live -= 1;
            view.last = last;
            if view.dead && view.live == 0 {
                return self.forget(id);
            }
        }
        Vec::new()
    }

    /// The view gives out nothing more. The mappings that nobody needs now.
    pub(super) fn kill(&mut self, id: ViewId) -> Vec<(u64, ChunkId)> {
        let Some(view) = self.views.get_mut(&id) else {
            return Vec::new();
        };
        let (len, live, was_dead) = (view.len, view.live, view.dead);
        view.dead = true;
        if !was_dead {
            self.unready(len, id);
        }
        if live > 0 {
            return Vec::new();
        }
        self.forget(id)
    }

    /// The same for the view with a mapping here.
    pub(super) fn kill_at(&mut self, start: u64) -> Vec<(u64, ChunkId)> {
        self.of(start).map_or_else(Vec::new, |id| self.kill(id))
    }

    fn forget(&mut self, id: ViewId) -> Vec<(u64, ChunkId)> {
        let Some(view) = self.views.remove(&id) else {
            return Vec::new();
        };
        for (start, _) in &view.parts {
            self.starts.remove(start);
        }
        view.parts
    }

    /// Whether a view with a mapping here may serve again.
    pub(super) fn wants(&self, start: u64) -> bool {
        self.of(start)
            .and_then(|id| self.views.get(&id))
            .is_some_and(|view| !view.dead)
    }

    /// In the place of the chunk that was mapped here these are mapped now, all idle. The first, at the same address, has
    /// been counted as idle in its place. `false` if no view has such a mapping.
    pub(super) fn replace(&mut self, start: u64, parts: &[(u64, ChunkId)]) -> bool {
        let Some(id) = self.of(start) else {
            return false;
        };
        let Some(view) = self.views.get_mut(&id).filter(|view| !view.dead) else {
            return false;
        };
        view.parts.retain(|(other, _)| *other != start);
        view.parts.extend_from_slice(parts);
        view.parts.sort_unstable();
        self.starts.remove(&start);
        for (part, _) in parts {
            self.starts.insert(*part, id);
        }
        true
    }

    /// The mapping here is gone.
    pub(super) fn unmapped(&mut self, start: u64) {
        if let Some(view) = self.starts.remove(&start).and_then(|id| self.views.get_mut(&id)) {
            view.parts.retain(|(other, _)| *other != start);
        }
    }

    /// The view that was not used for the longest time, among those that nothing lives in.
    pub(super) fn oldest_unused(&self) -> Option<ViewId> {
        self.views
            .iter()
            .filter(|(_, view)| view.live == 0 && !view.dead)
            .min_by_key(|(_, view)| view.used)
            .map(|(id, _)| *id)
    }

    /// The work that may still use the view with a mapping here.
    pub(super) fn last_at(&self, start: u64) -> Option<(Stream, Mark)> {
        self.views.get(&self.of(start)?).map(|view| view.last)
    }

    /// All work is done: nothing uses any view's addresses that nothing lives in.
    pub(super) fn settled(&mut self) {
        for view in self.views.values_mut() {
            view.last = (Stream(0), Mark(0));
        }
    }

    /// The stream's work is done, and its marks mean nothing any more.
    pub(super) fn ended(&mut self, stream: Stream) {
        for view in self.views.values_mut().filter(|view| view.last.0 == stream) {
            view.last = (Stream(0), Mark(0));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.views.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &View> {
        self.views.values()
    }
}

impl View {
    pub(super) const fn is_dead(&self) -> bool {
        self.dead
    }

    pub(super) const fn counts(&self) -> (usize, usize) {
        (self.busy, self.live)
    }
}
