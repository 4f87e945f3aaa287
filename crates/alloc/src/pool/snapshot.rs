//! [`Pool::segments`]: what lies where, and the same in the form that PyTorch's memory tools read.

use std::collections::BTreeMap;

use super::{Block, Pool};

/// What a piece of a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A block, and what it was asked for.
    Block(u64),
    /// A freed block that several streams' work still uses.
    Late(u64),
    /// Free bytes.
    Free,
    /// Bytes that a block uses under the addresses of a view, or that a plan holds.
    Away,
}

/// A run of addresses that are mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub at: u64,
    /// Its bytes.
    pub len: u64,
    /// The addresses of a view: its bytes are those of other segments, there `Away`.
    pub view: bool,
    /// All of it, by address: start, length and use.
    pub pieces: Vec<(u64, u64, Use)>,
}

impl Pool {
    /// All segments, by address: physical memory at its home, and the blocks that live in views.
    #[must_use]
    pub fn segments(&self) -> Vec<Segment> {
        let mut spans: Vec<(u64, u64, Use)> = self
            .runs
            .iter()
            .map(|(at, run)| (at, run.len, Use::Free))
            .collect();
        let mut views = Vec::new();
        let mut shown: BTreeMap<u64, Pieces> = BTreeMap::new();
        let live = self.live.values().map(|block| (block, Use::Block(block.size)));
        let late = self
            .late
            .iter()
            .map(|late| (&late.block, Use::Late(late.block.size)));
        for (block, what) in live.chain(late) {
            let Block { at, len, .. } = *block;
            if self.views.extents(at, len).is_some() {
                views.push(Segment {
                    at,
                    len,
                    view: true,
                    pieces: vec![(at, len, what)],
                });
            } else if self.meshes.is_empty() {
                spans.push((at, len, what));
            } else {
                self.shown(at, len, what, &mut spans, &mut shown);
            }
        }
        for (at, mut pieces) in shown {
            pieces.sort_unstable_by_key(|piece| piece.0);
            views.push(Segment {
                at,
                len: self.config.granule,
                view: true,
                pieces: covered(at, self.config.granule, pieces),
            });
        }
        spans.sort_unstable_by_key(|span| span.0);
        let mut homes: Vec<(u64, u64)> = self
            .chunks
            .iter()
            .filter(|(_, chunk)| chunk.maps.contains(&chunk.home) && !self.meshes.has_place(chunk.home))
            .map(|(_, chunk)| (chunk.home, chunk.len))
            .collect();
        homes.sort_unstable();
        let mut segments: Vec<Segment> = Vec::new();
        for (at, len) in homes {
            match segments.last_mut() {
                Some(last) if last.at + last.len == at => last.len += len,
                _ => segments.push(Segment {
                    at,
                    len,
                    view: false,
                    pieces: Vec::new(),
                }),
            }
        }
        let mut spans = spans.into_iter().peekable();
        for segment in &mut segments {
            let end = segment.at + segment.len;
            let own = std::iter::from_fn(|| spans.next_if(|span| span.0 < end));
            segment.pieces = covered(segment.at, segment.len, own);
        }
        segments.append(&mut views);
        segments.sort_unstable_by_key(|segment| segment.at);
        segments
    }

    /// A block's pieces: at home, and in granules that others' memory is shown at, or that a plan moves. What it was asked for is said of
    /// the first bytes.
    fn shown(&self, at: u64, len: u64, what: Use, spans: &mut Pieces, shown: &mut BTreeMap<u64, Pieces>) {
        let (granule, end) = (self.config.granule, at + len);
        let mut from = at;
        while from < end {
            let start = self.config.down(from);
            let elsewhere = |start| self.meshes.shadows.contains_key(&start) || self.meshes.has_place(start);
            let mut to = start + granule;
            while !elsewhere(start) && to < end && !elsewhere(to) {
                to += granule;
            }
            let to = to.min(end);
            let part = |size: u64| size.saturating_sub(from - at).min(to - from);
            let what = match what {
                Use::Block(size) => Use::Block(part(size)),
                Use::Late(size) => Use::Late(part(size)),
                other => other,
            };
            if elsewhere(start) {
                shown.entry(start).or_default().push((from, to - from, what));
            } else {
                spans.push((from, to - from, what));
            }
            from = to;
        }
    }
}

/// Start, length and use.
type Pieces = Vec<(u64, u64, Use)>;

/// The pieces, and what lies between them.
fn covered(at: u64, len: u64, pieces: impl IntoIterator<Item = (u64, u64, Use)>) -> Pieces {
    let (mut from, mut all) = (at, Pieces::new());
    for piece in pieces {
        if piece.0 > from {
            all.push((from, piece.0 - from, Use::Away));
        }
        from = piece.0 + piece.1;
        all.push(piece);
    }
    if from < at + len {
        all.push((from, at + len - from, Use::Away));
    }
    all
}

/// The segments as `torch.cuda.memory._snapshot()` would have them, pickled (protocol 2): for PyTorch's own viewer and tools.
#[must_use]
pub fn pickle(segments: &[Segment], device: u32) -> Vec<u8> {
    let mut out = Pickle(vec![0x80, 2]);
    out.dict(|out| {
        out.text("segments");
        out.list(segments, |out, segment| out.segment(segment, device));
        out.text("device_traces");
        out.list(&[()], |out, ()| out.list::<()>(&[], |_, ()| {}));
        out.text("allocator_settings");
        out.dict(|_| {});
    });
    out.0.push(b'.');
    out.0
}

struct Pickle(Vec<u8>);

impl Pickle {
    fn dict(&mut self, items: impl FnOnce(&mut Self)) {
        self.0.extend(b"}(");
        items(self);
        self.0.push(b'u');
    }

    fn list<T>(&mut self, items: &[T], each: impl Fn(&mut Self, &T)) {
        self.0.extend(b"](");
        for item in items {
            each(self, item);
        }
        self.0.push(b'e');
    }

    fn text(&mut self, text: &str) {
        self.0.push(b'X');
        self.0
            .extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.0.extend(text.as_bytes());
    }

    fn number(&mut self, number: u64) {
        // Nine bytes: the highest bit is the sign.
        self.0.extend([0x8a, 9]);
        self.0.extend(number.to_le_bytes());
        self.0.push(0);
    }

    fn field(&mut self, name: &str, number: u64) {
        self.text(name);
        self.number(number);
    }

    fn segment(&mut self, segment: &Segment, device: u32) {
        let sum = |of: fn(Use, u64) -> u64| segment.pieces.iter().map(|(_, len, what)| of(*what, *len)).sum();
        self.dict(|out| {
            out.field("device", device.into());
            out.field("address", segment.at);
            out.field("total_size", segment.len);
            out.field("stream", 0);
            out.text("segment_type");
            out.text("large");
            out.text("segment_pool_id");
            out.number(0);
            out.number(u64::from(segment.view));
            out.0.push(0x86);
            out.text("is_expandable");
            out.0.push(0x88);
            out.field(
                "allocated_size",
                sum(|what, len| if let Use::Block(_) = what { len } else { 0 }),
            );
            out.field(
                "active_size",
                sum(|what, len| if what == Use::Free { 0 } else { len }),
            );
            out.field(
                "requested_size",
                sum(|what, _| if let Use::Block(size) = what { size } else { 0 }),
            );
            out.text("frames");
            out.list::<()>(&[], |_, ()| {});
            out.text("blocks");
            out.list(&segment.pieces, |out, (at, len, what)| {
                let (size, state) = match what {
                    Use::Block(size) => (*size, "active_allocated"),
                    Use::Late(size) => (*size, "active_awaiting_free"),
                    Use::Free => (0, "inactive"),
                    Use::Away => (*len, "active_awaiting_free"),
                };
                out.dict(|out| {
                    out.field("address", *at);
                    out.field("size", *len);
                    out.field("requested_size", size);
                    out.text("state");
                    out.text(state);
                    out.text("frames");
                    out.list::<()>(&[], |_, ()| {});
                });
            });
        });
    }
}
