//! [`Runs`]: the bytes that can be given out now, as maximal runs of addresses, found by size.

use std::collections::{BTreeMap, BTreeSet};

use super::{Mark, Stream};

/// Who may use free bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Owner {
    /// Anyone: no work uses them any more.
    Anyone,
    /// Work of this stream may still use them: only what comes after it there may have them now.
    Stream(Stream),
}

impl Owner {
    pub(super) fn allows(self, stream: Stream) -> bool {
        self == Self::Anyone || self == Self::Stream(stream)
    }
}

/// A run, without its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) len: u64,
    pub(super) owner: Owner,
    /// The owner's work is past these bytes when it has come to this mark.
    pub(super) mark: Mark,
}

/// Free bytes.
///
/// # Invariants
/// Runs do not overlap. Runs of one owner do not touch. `sizes` holds the same runs as `runs`, and no empty set.
#[derive(Clone, Debug)]
pub(super) struct Runs {
    runs: BTreeMap<u64, Run>,
    /// Length and start.
    sizes: BTreeMap<Owner, BTreeSet<(u64, u64)>>,
    total: u64,
    /// A run shorter than this that anyone may use joins a neighbour that belongs to a stream. Longer ones stay apart:
    /// otherwise freeing a small block would lend the largest run to one stream.
    joins: u64,
}

impl Runs {
    pub(super) fn new(joins: u64) -> Self {
        Self {
            runs: BTreeMap::new(),
            sizes: BTreeMap::new(),
            total: 0,
            joins,
        }
    }

    /// Adds free bytes and joins them with their neighbours; the run that they are part of now, and from where to where
    /// in it something may be free as a whole that was not.
    pub(super) fn insert(&mut self, start: u64, len: u64, owner: Owner, mark: Mark) -> (u64, Run, [u64; 2]) {
        let mut at = start;
        let mut new = [start, start + len];
        let mark = if owner == Owner::Anyone { Mark(0) } else { mark };
        let mut run = Run { len, owner, mark };
        // Whose a run is may change when it joins one: then it may join the next, too.
        loop {
            if let Some((&before, &left)) = self.runs.range(..at).next_back()
                && before + left.len == at
                && let Some((owner, mark)) = self.joined(&left, &run)
            {
                self.remove(before);
                new[0] = at - 1;
                at = before;
                run = Run {
                    len: left.len + run.len,
                    owner,
                    mark,
                };
                continue;
            }
            let end = at + run.len;
            if let Some(&right) = self.runs.get(&end)
                && let Some((owner, mark)) = self.joined(&run, &right)
            {
                self.remove(end);
                new[1] = end + 1;
                run = Run {
                    len: run.len + right.len,
                    owner,
                    mark,
                };
                continue;
            }
            break;
        }
        self.put(at, run);
        (at, run, new)
    }

    fn joined(&self, a: &Run, b: &Run) -> Option<(Owner, Mark)> {
        if a.owner == b.owner {
            return Some((a.owner, a.mark.max(b.mark)));
        }
        let (stream, anyone) = match (a.owner, b.owner) {
            (Owner::Anyone, _) => (b, a),
            (_, Owner::Anyone) => (a, b),
            _ => return None,
        };
        (anyone.len < self.joins).then_some((stream.owner, stream.mark))
    }

    fn put(&mut self, at: u64, run: Run) {
        self.runs.insert(at, run);
        self.sizes.entry(run.owner).or_default().insert((run.len, at));
        self.total += run.len;
    }

    fn remove(&mut self, at: u64) -> Option<Run> {
        let run = self.runs.remove(&at)?;
        if let Some(sizes) = self.sizes.get_mut(&run.owner) {
            sizes.remove(&(run.len, at));
            if sizes.is_empty() {
                self.sizes.remove(&run.owner);
            }
        }
        self.total -= run.len;
        Some(run)
    }

    /// Takes bytes out that are free, all in one run. What it was; `None` (and no change) if they are not.
    pub(super) fn take(&mut self, at: u64, len: u64) -> Option<Run> {
        let (start, run) = self.containing(at)?;
        if at + len > start + run.len {
            return None;
        }
        self.remove(start);
        if at > start {
            self.put(
                start,
                Run {
                    len: at - start,
                    ..run
                },
            );
        }
        let end = start + run.len;
        if end > at + len {
            self.put(
                at + len,
                Run {
                    len: end - at - len,
                    ..run
                },
            );
        }
        Some(run)
    }

    /// Takes whatever of these bytes is free out. The pieces.
    pub(super) fn take_all(&mut self, at: u64, len: u64) -> Vec<(u64, Run)> {
        let end = at + len;
        let first = self.containing(at).map_or(at, |(start, _)| start);
        let found: Vec<(u64, u64)> = self
            .runs
            .range(first..end)
            .map(|(&start, run)| (start.max(at), (start + run.len).min(end)))
            .collect();
        found
            .into_iter()
            .filter_map(|(from, to)| {
                let run = self.take(from, to - from)?;
                Some((
                    from,
                    Run {
                        len: to - from,
                        ..run
                    },
                ))
            })
            .collect()
    }

    /// What of these bytes is free, in order: start and length.
    pub(super) fn inside(&self, at: u64, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let end = at + len;
        let first = self.containing(at).map_or(at, |(start, _)| start);
        let runs = self.runs.range(first..end);
        let mut pieces = runs
            .map(move |(&start, run)| (start.max(at), (start + run.len).min(end) - start.max(at)))
            .peekable();
        // Runs of several owners may touch.
        std::iter::from_fn(move || {
            let mut piece = pieces.next()?;
            while let Some(next) = pieces.next_if(|next| piece.0 + piece.1 == next.0) {
                piece.1 += next.1;
            }
            Some(piece)
        })
    }

    /// The run with this address in it.
    pub(super) fn containing(&self, at: u64) -> Option<(u64, Run)> {
        let (&start, &run) = self.runs.range(..=at).next_back()?;
        (at - start < run.len).then_some((start, run))
    }

    /// The run that ends at this address.
    pub(super) fn ending_at(&self, at: u64) -> Option<(u64, Run)> {
        let (&start, &run) = self.runs.range(..at).next_back()?;
        (start + run.len == at).then_some((start, run))
    }

    /// Runs that the stream may use, of at least this length, the shortest first.
    pub(super) fn fitting(&self, stream: Stream, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        let mut own = self.by_size(Owner::Stream(stream), len).peekable();
        let mut anyone = self.by_size(Owner::Anyone, len).peekable();
        std::iter::from_fn(move || match (own.peek(), anyone.peek()) {
            (Some(a), Some(b)) if b < a => anyone.next(),
            (None, _) => anyone.next(),
            _ => own.next(),
        })
        .map(|(len, at)| (at, len))
    }

    fn by_size(&self, owner: Owner, len: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.sizes
            .get(&owner)
            .into_iter()
            .flat_map(move |sizes| sizes.range((len, 0)..).copied())
    }

    /// The streams that free bytes belong to.
    pub(super) fn streams(&self) -> Vec<Stream> {
        self.sizes
            .keys()
            .filter_map(|owner| match owner {
                Owner::Stream(stream) => Some(*stream),
                Owner::Anyone => None,
            })
            .collect()
    }

    /// The last mark that frees the stream's bytes for anyone.
    pub(super) fn last_mark(&self, stream: Stream) -> Option<Mark> {
        self.sizes
            .get(&Owner::Stream(stream))?
            .iter()
            .filter_map(|(_, at)| self.runs.get(at))
            .map(|run| run.mark)
            .max()
    }

    /// Takes the stream's runs out that its work is past.
    pub(super) fn take_done(&mut self, stream: Stream, done: Mark) -> Vec<(u64, u64)> {
        let past: Vec<u64> = self
            .sizes
            .get(&Owner::Stream(stream))
            .into_iter()
            .flatten()
            .map(|&(_, at)| at)
            .filter(|at| self.runs.get(at).is_some_and(|run| run.mark <= done))
            .collect();
        past.into_iter()
            .filter_map(|at| Some((at, self.remove(at)?.len)))
            .collect()
    }

    /// The best fit for the stream among neighbours, each of which it may use, that would be long enough as one run.
    pub(super) fn neighbours(&self, stream: Stream, len: u64) -> Option<(u64, u64)> {
        // Runs of one owner do not touch: such neighbours are of both kinds, and to begin with those of the rarer kind finds all of them.
        let own = self.sizes.get(&Owner::Stream(stream))?;
        let anyone = self.sizes.get(&Owner::Anyone)?;
        let rarer = if own.len() <= anyone.len() { own } else { anyone };
        rarer
            .iter()
            .filter_map(|&(own, at)| {
                let (mut start, mut end) = (at, at + own);
                while let Some((before, run)) = self.ending_at(start)
                    && run.owner.allows(stream)
                {
                    start = before;
                }
                while let Some(run) = self.runs.get(&end)
                    && run.owner.allows(stream)
                {
                    end += run.len;
                }
                (end - start >= len).then_some((end - start, start))
            })
            .min()
            .map(|(len, start)| (start, len))
    }

    /// All of them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Run)> + '_ {
        self.runs.iter().map(|(&at, &run)| (at, run))
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Sum of their bytes.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// The longest.
    pub(super) fn longest(&self) -> u64 {
        self.sizes
            .values()
            .filter_map(|sizes| sizes.last())
            .map(|(len, _)| *len)
            .max()
            .unwrap_or(0)
    }
}
