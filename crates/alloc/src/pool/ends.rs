//! [`Ends`]: the free ends of granules that others use, and blocks that begin and end in them.
//!
//! What is free in a granule that something lives in is the only waste there is. Two blocks that leave a hole between them leave such parts at both
//! ends of it; whole granules in its middle go anywhere. A view whose first bytes are the free end of one granule, and whose last are the
//! free beginning of another, uses up both, and needs one or two idle granules less than its length says.
//!
//! That is done when the pool would have to grow otherwise, and [before](Pool::thriftier) a fit that takes more idle granules than ends would: these granules
//! are what the next blocks need, and by then the ends may be too short for each of them.

use super::chunks::State;
use super::{Pool, Step, Stream, views};

/// The ends of granules that save no granule are mapped for a block if they are at least one of so many parts of it.
const WORTH_MAPPING: u64 = 16;
/// As many mappings are made, beside those of two ends, for a block that would fit somewhere without any.
const CHUNKS_MAX: usize = 8;
/// Ends are looked for among all free runs: not among very many, for the sake of one granule.
const RUNS_MAX: usize = 4096;

/// Its length and its start.
type End = (u64, u64);

/// Free ends of granules that are in use, for the two ends of a block: start and length of each.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ends {
    /// For the beginning of the block: the end of a granule.
    pub(super) tail: Option<(u64, u64)>,
    /// For the end of the block: the beginning of a granule.
    pub(super) head: Option<(u64, u64)>,
}

impl Ends {
    pub(super) fn bytes(&self) -> u64 {
        self.tail.map_or(0, |end| end.1) + self.head.map_or(0, |end| end.1)
    }
}

impl Pool {
    /// A block of granules' ends and as many idle chunks as are left to be, although it fits among free bytes; if it takes fewer idle granules
    /// than the `uses` there. The oldest view that does, or a new one. Only when nearly as much is in use as at the most: before, there
    /// are idle granules enough for blocks that end before the rest comes. Nothing has to be waited for, released or made for it; and a
    /// pool that has [slack](super::thrift) to be faster does not map for it.
    pub(super) fn thriftier(
        &mut self,
        uses: u64,
        size: u64,
        len: u64,
        align: u64,
        stream: Stream,
    ) -> Option<Step> {
        let granule = self.config.granule;
        // Two ends are two granules at the most.
        let least = (len / granule).saturating_sub(1);
        let needed = self.needed(len);
        if uses <= least
            || self.chunks.active_bytes() + len < needed - needed / 4
            || self.runs.len() > RUNS_MAX
            || len < granule / 4
            || align != self.config.quantum
            || self.thrift.has_slack()
            || self.private.contains(&stream)
        {
            return None;
        }
        let ends = self.ends(stream, len);
        // Both ends together may be more than the block.
        let middle = self.config.up(len.checked_sub(ends.bytes())?);
        if ends.bytes() == 0 || middle / granule >= uses {
            return None;
        }
        let most = self.config.up(len);
        let ready = self.views.oldest_ready(len, most, |view| {
            self.is_free(view, len, stream) && self.idle_granules(&view.extents, len) < uses
        });
        if let Some(id) = ready {
            return self.put_view(id, size, len, stream).map(Step::Ready);
        }
        let gathered = self.gather(stream, middle);
        let whole = |&(id, used)| self.chunks.get(id).is_some_and(|chunk| chunk.len == used);
        if gathered.bytes < middle || gathered.chunks.len() > CHUNKS_MAX || !gathered.chunks.iter().all(whole)
        {
            return None;
        }
        // The last chunk would be cut if others may come behind the block in its last granule.
        let shared = ends.head.is_none() && !(len - ends.bytes()).is_multiple_of(granule);
        if shared && gathered.chunks.last().is_some_and(|last| last.1 > granule) {
            return None;
        }
        match self.stitch(gathered, ends, 0, size, len, stream) {
            // The fit needs none.
            Step::Addresses(_) => None,
            step => Some(step),
        }
    }

    /// How many of the granules are idle that the first bytes of these extents lie in.
    fn idle_granules(&self, extents: &[(u64, u64)], len: u64) -> u64 {
        let idle = views::first(extents, len).flat_map(|(home, n)| {
            let (from, to) = (self.config.down(home), self.config.up(home + n));
            self.chunks
                .over(from, to - from)
                .filter(|one| self.is(one.2, State::Idle))
                .map(move |(start, n, _)| (start + n).min(to) - start.max(from))
        });
        idle.sum::<u64>() / self.config.granule
    }

    /// Free ends of granules that others use, for a block that is no whole granules: so that it needs one granule less than its
    /// size says, or even two. The smallest that do; or else the largest, so that it is not one more afterwards.
    pub(super) fn ends(&self, stream: Stream, len: u64) -> Ends {
        let granule = self.config.granule;
        let over = len % granule;
        if over == 0 {
            return Ends::default();
        }
        // Length and start of free ends (towards the next granule) and of free beginnings.
        let (mut tails, mut heads) = (Vec::new(), Vec::new());
        for (start, run) in self.runs.iter().filter(|(_, run)| run.owner.allows(stream)) {
            let end = start + run.len;
            let (first, last) = (self.config.up(start), self.config.down(end));
            if start < first && first <= end && self.border(start, first) {
                tails.push((first - start, start));
            }
            if last < end && last >= start && self.border(last, last) {
                heads.push((end - last, last));
            }
        }
        tails.sort_unstable();
        heads.sort_unstable();
        let pair = |least: u64| {
            // The longer the one, the shorter the other may be.
            let mut from = heads.len();
            let mut best: Option<(u64, End, End)> = None;
            for &tail in tails.iter().take_while(|tail| tail.0 < least) {
                while from > 0 && tail.0 + heads[from - 1].0 >= least {
                    from -= 1;
                }
                let head = heads[from..]
                    .iter()
                    .find(|head| self.config.down(tail.1) != head.1);
                if let Some(&head) = head {
                    let found = (tail.0 + head.0, tail, head);
                    best = Some(best.map_or(found, |best| best.min(found)));
                }
            }
            best.map(|(_, (tail_len, tail), (head_len, head))| Ends {
                tail: Some((tail, tail_len)),
                head: Some((head, head_len.min(least - tail_len))),
            })
        };
        if len > granule
            && let Some(ends) = pair(over + granule)
        {
            return ends;
        }
        if let Some(ends) = pair(over) {
            return ends;
        }
        // All of an end of a granule: the block ends inside another one then, and what is free there is such an end again. So blocks that
        // follow each other leave one of them, not one each.
        let whole = |&(n, at): &(u64, u64)| Ends {
            tail: Some((at, n)),
            head: None,
        };
        let first = |all: &[(u64, u64)]| all.get(all.partition_point(|end| end.0 < over)).copied();
        let (tail, head) = (first(&tails), first(&heads));
        match (tail, head) {
            (Some(tail), head) if head.is_none_or(|head| tail.0 <= head.0) => whole(&tail),
            (_, Some(head)) => Ends {
                tail: None,
                head: Some((head.1, over)),
            },
            _ => {
                let most = tails
                    .last()
                    .filter(|tail| len > granule && tail.0 >= granule / WORTH_MAPPING);
                most.map(whole).unwrap_or_default()
            }
        }
    }

    /// Whether the chunk with these bytes has one of its borders at `border`.
    fn border(&self, at: u64, border: u64) -> bool {
        self.chunks
            .over(at, 1)
            .next()
            .is_some_and(|(start, n, _)| start == border || start + n == border)
    }
}
