//! [`Views`]: addresses under which free memory from many places lies next to each other.
//!
//! A view is made once, when a block fits nowhere although enough memory is idle, and kept: whenever all its bytes are free,
//! the next block of its size gets it without a call of the driver. A program that repeats itself meets the same
//! state again, and the view that was made for it: of those that would do, the oldest is taken, which is the one that
//! was made in this state. So a loop maps nothing once it has gone round (Note [Steady state] in `docs/design/0005-pool.md`).

use std::collections::{BTreeMap, BTreeSet};

use super::chunks::ChunkId;
use super::{Mark, Stream};

/// The older, the smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ViewId(u64);

#[derive(Clone, Debug)]
pub(super) struct View {
    /// Where a block in it begins: inside its first mapping, perhaps.
    pub(super) at: u64,
    /// Address and chunk of every mapping.
    pub(super) parts: Vec<(u64, ChunkId)>,
    /// The bytes from `at` on, by their home addresses: start and length.
    pub(super) extents: Vec<(u64, u64)>,
    /// Sum of the extents.
    pub(super) len: u64,
    /// A block lives in it.
    used: bool,
    /// One of its mappings is gone: no new block.
    dead: bool,
    /// When it was last used, in uses of views.
    turn: u64,
    /// The work that may still use its addresses.
    pub(super) last: (Stream, Mark),
}

/// The first `len` bytes of these extents.
pub(super) fn first(extents: &[(u64, u64)], len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
    let mut rest = len;
    extents.iter().map_while(move |&(home, n)| {
        let taken = n.min(rest);
        rest -= taken;
        (taken > 0).then_some((home, taken))
    })
}

/// All views.
///
/// # Invariants
/// `ready` holds the views that are neither used nor dead. `starts` holds every mapping of every view, `blocks` where a
/// block in each would begin.
#[derive(Clone, Debug, Default)]
pub(super) struct Views {
    views: BTreeMap<ViewId, View>,
    starts: BTreeMap<u64, ViewId>,
    blocks: BTreeMap<u64, ViewId>,
    /// By bytes.
    ready: BTreeMap<u64, BTreeSet<ViewId>>,
    next: u64,
    turns: u64,
}

impl Views {
    pub(super) fn add(
        &mut self,
        at: u64,
        parts: Vec<(u64, ChunkId)>,
        extents: Vec<(u64, u64)>,
        stream: Stream,
    ) -> ViewId {
        let id = ViewId(self.next);
        self.next += 1;
        for (start, _) in &parts {
            self.starts.insert(*start, id);
        }
        self.blocks.insert(at, id);
        let len = extents.iter().map(|extent| extent.1).sum();
        self.ready.entry(len).or_default().insert(id);
        let view = View {
            at,
            parts,
            extents,
            len,
            used: false,
            dead: false,
            turn: self.turns,
            last: (stream, Mark(0)),
        };
        self.views.insert(id, view);
        id
    }

    /// The oldest of the views that no block lives in, of at least `len` bytes and at most `most`, that is `fit`.
    pub(super) fn oldest_ready(&self, len: u64, most: u64, fit: impl Fn(&View) -> bool) -> Option<ViewId> {
        let mut oldest: Option<ViewId> = None;
        for ids in self.ready.range(len..=most).map(|(_, ids)| ids) {
            let older = ids
                .iter()
                .take_while(|id| oldest.is_none_or(|found| **id < found));
            let found = older.copied().find(|id| self.views.get(id).is_some_and(&fit));
            oldest = found.or(oldest);
        }
        oldest
    }

    pub(super) fn get(&self, id: ViewId) -> Option<&View> {
        self.views.get(&id)
    }

    fn of(&self, start: u64) -> Option<ViewId> {
        self.starts.get(&start).copied()
    }

    fn unready(&mut self, len: u64, id: ViewId) {
        if let Some(ready) = self.ready.get_mut(&len) {
            ready.remove(&id);
            if ready.is_empty() {
                self.ready.remove(&len);
            }
        }
    }

    /// A block lives in it from now on.
    pub(super) fn enter(&mut self, id: ViewId) {
        self.turns += 1;
        let turn = self.turns;
        if let Some(view) = self.views.get_mut(&id) {
            view.used = true;
            view.turn = turn;
            let len = view.len;
            self.unready(len, id);
        }
    }

    /// Where the bytes are of a block at this address, if it lives in a view.
    pub(super) fn extents(&self, at: u64, len: u64) -> Option<Vec<(u64, u64)>> {
        let view = self.views.get(self.blocks.get(&at)?)?;
        view.used.then(|| first(&view.extents, len).collect())
    }

    /// The block at this address is gone. The mappings that nobody needs now.
    pub(super) fn leave(&mut self, at: u64, last: (Stream, Mark)) -> Vec<(u64, ChunkId)> {
        let Some(id) = self.blocks.get(&at).copied() else {
            return Vec::new();
        };
        let Some(view) = self.views.get_mut(&id) else {
            return Vec::new();
        };
        view.used = false;
        view.last = last;
        if view.dead {
            return self.forget(id);
        }
        let len = view.len;
        self.ready.entry(len).or_default().insert(id);
        Vec::new()
    }

    /// The view gives out nothing more. The mappings that nobody needs now.
    pub(super) fn kill(&mut self, id: ViewId) -> Vec<(u64, ChunkId)> {
        let Some(view) = self.views.get_mut(&id) else {
            return Vec::new();
        };
        view.dead = true;
        if view.used {
            return Vec::new();
        }
        let len = view.len;
        self.unready(len, id);
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
        self.blocks.remove(&view.at);
        view.parts
    }

    /// Whether a view with a mapping here may serve again.
    pub(super) fn wants(&self, start: u64) -> bool {
        self.of(start)
            .and_then(|id| self.views.get(&id))
            .is_some_and(|view| !view.dead)
    }

    /// In the place of the chunk that was mapped here these are mapped now. `false` if no view has such a mapping.
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
    pub(super) fn oldest_unused(&self, private: &BTreeSet<Stream>) -> Option<ViewId> {
        self.views
            .iter()
            .filter(|(_, view)| !view.used && !view.dead && !private.contains(&view.last.0))
            .min_by_key(|(_, view)| view.turn)
            .map(|(id, _)| *id)
    }

    /// Whether a block lives in the view with a mapping here.
    pub(super) fn is_used_at(&self, start: u64) -> bool {
        self.of(start)
            .and_then(|id| self.views.get(&id))
            .is_some_and(|view| view.used)
    }

    /// The work that may still use the view with a mapping here.
    pub(super) fn last_at(&self, start: u64) -> Option<(Stream, Mark)> {
        self.views.get(&self.of(start)?).map(|view| view.last)
    }

    /// All work is done: nothing uses the addresses of any view that no block lives in.
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
    pub(super) const fn is_used(&self) -> bool {
        self.used
    }

    pub(super) const fn is_dead(&self) -> bool {
        self.dead
    }
}
