//! PyTorch's memory snapshots: what `torch.cuda.memory._dump_snapshot` writes.
//!
//! A snapshot has the segments and blocks *as they are at its end*, and for each card the last events, as many as the recorder
//! kept. So the blocks at the start of the recording are found by going back from the end. A block lives until its
//! `free_completed`: between that and `free_requested` work of other streams still uses it.

use std::collections::HashMap;
use std::fmt;
use std::io::Read;

use super::builder::{Builder, TooMuch, by_card};
use super::{Place, Wrong};
use crate::pool::event::Trace;
use crate::read::pickle::{Limits, Node, Pickle, Text, Value};

/// Keys whose values are large and say nothing of memory.
const FORGET: [&str; 5] = [
    "frames",
    "user_metadata",
    "compile_context",
    "host_traces",
    "host_segments",
];

pub(super) fn read(input: &mut dyn Read) -> Result<Vec<Trace>, Wrong> {
    let pickle = Pickle::read(input, Limits::default(), &FORGET).map_err(|error| Wrong {
        place: Place::Byte(error.offset),
        what: error.to_string(),
    })?;
    let root = Way::root(&pickle);
    if let Value::List(_) = pickle.value(pickle.root()) {
        return Err(root.wrong(
            "found a list, which torch.cuda.memory_snapshot() makes: it has no events. Record with \
             torch.cuda.memory._record_memory_history() and write with torch.cuda.memory._dump_snapshot()",
        ));
    }
    let segments: Vec<Segment> = match root.find("segments")? {
        Some(way) => way
            .items()?
            .map(|(_, way)| segment(&way))
            .collect::<Result<_, _>>()?,
        None => Vec::new(),
    };
    let traces = root.get("device_traces")?;
    let mut found = Vec::new();
    for (card, way) in traces.items()? {
        let events: Vec<Recorded> = way
            .items()?
            .map(|(_, way)| event(&way))
            .collect::<Result<_, _>>()?;
        if !events.is_empty() {
            let of_card = segments.iter().filter(|segment| segment.card == card as u64);
            let builder = trace(of_card, &events).map_err(|TooMuch| way.wrong(TooMuch::EXPECTED))?;
            found.push((card as u64, builder));
        }
    }
    if found.is_empty() {
        return Err(traces.wrong(
            "holds no events: call torch.cuda.memory._record_memory_history() before what is to be recorded",
        ));
    }
    Ok(by_card(found))
}

/// A segment at the end of the recording.
struct Segment {
    card: u64,
    size: u64,
    stream: u64,
    /// Address and size of the blocks that are live.
    live: Vec<(u64, u64)>,
}

fn segment(way: &Way<'_>) -> Result<Segment, Wrong> {
    let number = |key, default| way.find(key)?.map_or(Ok(default), |way| way.number());
    let address = way.get("address")?.number()?;
    let mut segment = Segment {
        card: number("device", 0)?,
        size: way.get("total_size")?.number()?,
        stream: number("stream", 0)?,
        live: Vec::new(),
    };
    let mut next = address;
    let Some(blocks) = way.find("blocks")? else {
        return Ok(segment);
    };
    for (_, block) in blocks.items()? {
        let size = block.get("size")?.number()?;
        // Older snapshots have neither of the two.
        let at = block.find("address")?.map_or(Ok(next), |way| way.number())?;
        let asked = block
            .find("requested_size")?
            .map_or(Ok(size), |way| way.number())?;
        match block.get("state")?.text()? {
            // The last is what older ones call it.
            "active_allocated" | "active_awaiting_free" | "active_pending_free" => {
                segment.live.push((at, asked))
            }
            "inactive" => {}
            other => return Err(block.wrong(&format!("a block in the state `{other}`, which is not known"))),
        }
        next = at.saturating_add(size);
    }
    Ok(segment)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Allocate,
    Free,
    Reserve,
    Unreserve,
    OutOfMemory,
    /// Says nothing about memory.
    Nothing,
    /// A kind that we do not know.
    Other,
}

/// An event of a card.
struct Recorded {
    action: Action,
    address: u64,
    size: u64,
    stream: u64,
    /// 0 in old snapshots, which have no clock.
    time_us: u64,
}

fn event(way: &Way<'_>) -> Result<Recorded, Wrong> {
    let action = match way.get("action")?.text()? {
        "alloc" => Action::Allocate,
        "free_completed" => Action::Free,
        "segment_alloc" | "segment_map" => Action::Reserve,
        "segment_free" | "segment_unmap" => Action::Unreserve,
        "oom" => Action::OutOfMemory,
        "free_requested" | "snapshot" | "annotate" => Action::Nothing,
        _ => Action::Other,
    };
    let number = |key| way.find(key)?.map_or(Ok(0), |way| way.number());
    let needed = |key| way.get(key)?.number();
    let nowhere = matches!(action, Action::OutOfMemory | Action::Nothing | Action::Other);
    Ok(Recorded {
        action,
        address: if nowhere { 0 } else { needed("addr")? },
        size: if nowhere { 0 } else { needed("size")? },
        stream: number("stream")?,
        time_us: number("time_us")?,
    })
}

/// Size and stream of what is at an address.
type At = HashMap<u64, (u64, u64)>;

/// In order of addresses.
fn sorted(at: At) -> Vec<(u64, (u64, u64))> {
    let mut all: Vec<_> = at.into_iter().collect();
    all.sort_unstable();
    all
}

fn trace<'a>(segments: impl Iterator<Item = &'a Segment>, events: &[Recorded]) -> Result<Builder, TooMuch> {
    let mut live = At::new();
    // Segments grow and shrink in parts: what was held at the start is what is held at the end, less all that came.
    let mut held = 0i128;
    for segment in segments {
        held += i128::from(segment.size);
        live.extend(
            segment
                .live
                .iter()
                .map(|&(at, size)| (at, (size, segment.stream))),
        );
    }
    for event in events.iter().rev() {
        let there = (event.size, event.stream);
        match event.action {
            Action::Allocate => _ = live.remove(&event.address),
            Action::Free => _ = live.insert(event.address, there),
            Action::Reserve => held -= i128::from(event.size),
            Action::Unreserve => held += i128::from(event.size),
            Action::OutOfMemory | Action::Nothing | Action::Other => {}
        }
    }
    let mut builder = Builder::default();
    builder.reserve(u64::try_from(held.max(0)).unwrap_or(u64::MAX));
    for (address, (size, stream)) in sorted(live) {
        builder.at_start(address, size, stream)?;
    }
    let began = events
        .iter()
        .map(|event| event.time_us)
        .find(|&us| us > 0)
        .unwrap_or(0);
    for event in events {
        builder.at(event.time_us.saturating_sub(began).saturating_mul(1000));
        match event.action {
            Action::Allocate => builder.allocate(event.address, event.size, event.stream)?,
            Action::Free => builder.free(event.address, Some(event.stream)),
            Action::Reserve => builder.reserve(event.size),
            Action::Unreserve => builder.unreserve(event.size),
            Action::OutOfMemory => builder.notes().out_of_memory += 1,
            Action::Nothing => {}
            Action::Other => builder.notes().ignored += 1,
        }
    }
    Ok(builder)
}

/// A value, and the way that leads there, for errors.
#[derive(Clone, Copy)]
struct Way<'a> {
    pickle: &'a Pickle,
    node: Node,
    step: Step,
    from: Option<&'a Way<'a>>,
}

#[derive(Clone, Copy)]
enum Step {
    Root,
    Key(&'static str),
    Item(usize),
}

impl<'a> Way<'a> {
    fn root(pickle: &'a Pickle) -> Self {
        Self {
            pickle,
            node: pickle.root(),
            step: Step::Root,
            from: None,
        }
    }

    fn wrong(&self, what: &str) -> Wrong {
        Wrong {
            place: Place::Value(self.to_string()),
            what: what.into(),
        }
    }

    fn expected(&self, what: &str) -> Wrong {
        let kind = self.pickle.value(self.node).kind();
        self.wrong(&format!("found {kind}, expected {what}"))
    }

    /// What a dict has under a key, if it has it.
    fn find(&'a self, key: &'static str) -> Result<Option<Way<'a>>, Wrong> {
        let Value::Dict(dict) = self.pickle.value(self.node) else {
            return Err(self.expected("a dict"));
        };
        let number: Option<Text> = self.pickle.number(key);
        let node = number.and_then(|number| self.pickle.get(dict, number));
        let known = node.filter(|node| self.pickle.value(*node) != Value::None);
        Ok(known.map(|node| Way {
            node,
            step: Step::Key(key),
            from: Some(self),
            ..*self
        }))
    }

    /// What a dict has under a key.
    fn get(&'a self, key: &'static str) -> Result<Way<'a>, Wrong> {
        self.find(key)?.ok_or_else(|| self.wrong(&format!("no `{key}`")))
    }

    fn items(&'a self) -> Result<impl Iterator<Item = (usize, Way<'a>)>, Wrong> {
        let Value::List(items) = self.pickle.value(self.node) else {
            return Err(self.expected("a list"));
        };
        Ok(items.iter().enumerate().map(|(number, &node)| {
            let way = Way {
                node,
                step: Step::Item(number),
                from: Some(self),
                ..*self
            };
            (number, way)
        }))
    }

    fn number(&self) -> Result<u64, Wrong> {
        let number = match self.pickle.value(self.node) {
            Value::Int(value) => u64::try_from(value).ok(),
            Value::Unsigned(value) => Some(value),
            _ => None,
        };
        number.ok_or_else(|| self.expected("a whole number that is not negative"))
    }

    fn text(&self) -> Result<&'a str, Wrong> {
        match self.pickle.value(self.node) {
            Value::Text(text) => Ok(self.pickle.text(text)),
            _ => Err(self.expected("a text")),
        }
    }
}

impl fmt::Display for Way<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.step, self.from) {
            (Step::Root, _) => f.write_str("the snapshot"),
            // The root has no name of its own below it.
            (Step::Key(key), Some(Way { step: Step::Root, .. }) | None) => f.write_str(key),
            (Step::Key(key), Some(from)) => write!(f, "{from}.{key}"),
            (Step::Item(number), Some(from)) => write!(f, "{from}[{number}]"),
            (Step::Item(number), None) => write!(f, "[{number}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::event::{Event, Op};

    /// A value to be written as a pickle.
    #[derive(Clone)]
    enum P {
        N(i64),
        T(&'static str),
        L(Vec<P>),
        D(Vec<(&'static str, P)>),
        /// `None`.
        D0,
    }
    use P::{D, D0, L, N, T};

    fn write(value: &P, to: &mut Vec<u8>) {
        let text = |text: &str, to: &mut Vec<u8>| {
            to.push(b'X');
            to.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
            to.extend(text.bytes());
        };
        match value {
            N(value) => {
                to.extend([0x8a, 8]);
                to.extend(value.to_le_bytes());
            }
            T(value) => text(value, to),
            D0 => to.push(b'N'),
            L(items) => {
                to.extend(b"](");
                items.iter().for_each(|item| write(item, to));
                to.push(b'e');
            }
            D(items) => {
                to.extend(b"}(");
                for (key, value) in items {
                    text(key, to);
                    write(value, to);
                }
                to.push(b'u');
            }
        }
    }

    fn read_value(value: &P) -> Result<Vec<Trace>, Wrong> {
        let mut bytes = vec![0x80, 2];
        write(value, &mut bytes);
        bytes.push(b'.');
        read(&mut &bytes[..])
    }

    fn happened(action: &'static str, addr: i64, size: i64, time_us: i64) -> P {
        D(vec![
            ("action", T(action)),
            ("addr", N(addr)),
            ("size", N(size)),
            ("stream", N(7)),
            ("frames", L(vec![D(vec![("name", T("f"))])])),
            ("time_us", N(time_us)),
        ])
    }

    fn snapshot(segments: Vec<P>, traces: Vec<P>) -> P {
        D(vec![("segments", L(segments)), ("device_traces", L(traces))])
    }

    /// A segment at 1000 of 100 bytes: 30 allocated (25 asked for), 20 free, 50 that other streams still use.
    fn a_segment(card: i64) -> P {
        let block = |size, asked: Option<i64>, state| {
            let mut block = vec![("size", N(size)), ("state", T(state))];
            block.extend(asked.map(|asked| ("requested_size", N(asked))));
            D(block)
        };
        D(vec![
            ("device", N(card)),
            ("address", N(1000)),
            ("total_size", N(100)),
            ("stream", N(7)),
            (
                "blocks",
                L(vec![
                    block(30, Some(25), "active_allocated"),
                    block(20, None, "inactive"),
                    block(50, None, "active_pending_free"),
                ]),
            ),
        ])
    }

    #[test]
    fn what_was_there_at_the_start_is_found_from_the_end() {
        let events = L(vec![
            happened("free_requested", 2000, 40, 10),
            happened("free_completed", 2000, 40, 11),
            happened("segment_free", 2000, 64, 12),
            happened("segment_alloc", 1000, 100, 13),
            happened("alloc", 1000, 25, 14),
            happened("user_defined", 0, 0, 15),
        ]);
        let traces = read_value(&snapshot(vec![a_segment(0)], vec![events])).unwrap();
        let [trace] = <[Trace; 1]>::try_from(traces).unwrap();
        let event = |at_ns, op| Event { at_ns, op };
        let allocate = |slot, size| Op::Allocate {
            slot,
            size,
            stream: 0,
        };
        assert_eq!(
            trace.events,
            [
                // The block at 1050 was there, though its segment came later: the recording says no better.
                event(0, allocate(0, 50)),
                event(0, allocate(1, 40)),
                event(1000, Op::Free { slot: 1, stream: 0 }),
                event(4000, allocate(1, 25)),
            ]
        );
        assert_eq!((trace.preamble, trace.notes.ignored), (2, 1));
        assert_eq!(trace.recorded.unwrap().peak_reserved, 100);
        assert_eq!(trace.name, "");
    }

    /// What recorders leave out, and what has no address.
    #[test]
    fn what_is_missing_is_nothing() {
        let bare = |action| D(vec![("action", T(action)), ("size", N(5))]);
        let events = L(vec![
            bare("oom"),
            bare("snapshot"),
            D(vec![
                ("action", T("free_completed")),
                ("addr", N(8)),
                ("size", N(3)),
            ]),
            D(vec![
                ("action", T("alloc")),
                ("addr", N(8)),
                ("size", N(4)),
                ("stream", D0),
            ]),
        ]);
        let traces = read_value(&D(vec![("device_traces", L(vec![L(vec![]), events]))])).unwrap();
        let [trace] = <[Trace; 1]>::try_from(traces).unwrap();
        let sizes: Vec<u64> = trace
            .events
            .iter()
            .filter_map(|event| match event.op {
                Op::Allocate { size, .. } => Some(size),
                _ => None,
            })
            .collect();
        assert_eq!((sizes, trace.notes.out_of_memory), (vec![3, 4], 1));
        let list = read_value(&L(vec![])).unwrap_err().to_string();
        assert!(list.contains("it has no events. Record with"), "{list}");
    }

    /// An expandable segment that was there, and grew: at the end it is one.
    #[test]
    fn parts_of_segments_are_counted_once() {
        let segment = D(vec![
            ("address", N(1 << 20)),
            ("total_size", N(10)),
            ("is_expandable", N(1)),
        ]);
        let events = L(vec![
            happened("segment_map", (1 << 20) + 6, 4, 1),
            happened("alloc", (1 << 20) + 6, 4, 2),
        ]);
        let traces = read_value(&snapshot(vec![segment], vec![events])).unwrap();
        assert_eq!(traces[0].recorded.unwrap().peak_reserved, 10);
    }

    #[test]
    fn every_card_is_a_trace_of_its_own() {
        let events = || L(vec![happened("alloc", 1000, 25, 14)]);
        let traces = vec![events(), L(vec![]), events()];
        let traces = read_value(&snapshot(vec![a_segment(2)], traces)).unwrap();
        let names: Vec<_> = traces
            .iter()
            .map(|trace| (trace.name.as_str(), trace.preamble))
            .collect();
        assert_eq!(names, [(":gpu0", 0), (":gpu2", 1)]);
    }

    #[test]
    fn what_is_wrong_is_said_with_the_way_to_it() {
        let wrong = |value: &P| read_value(value).unwrap_err().to_string();
        let one = |event| snapshot(vec![], vec![L(vec![event])]);
        assert_eq!(
            wrong(&N(1)),
            "the snapshot: found a whole number, expected a dict"
        );
        assert_eq!(
            wrong(&D(vec![("segments", L(vec![]))])),
            "the snapshot: no `device_traces`"
        );
        assert_eq!(
            wrong(&one(happened("alloc", -5, 1, 0))),
            "device_traces[0][0].addr: found a whole number, expected a whole number that is not negative"
        );
        assert_eq!(
            wrong(&one(D(vec![("action", T("alloc"))]))),
            "device_traces[0][0]: no `addr`"
        );
        assert_eq!(
            wrong(&one(L(vec![]))),
            "device_traces[0][0]: found a list, expected a dict"
        );
        let empty = wrong(&snapshot(vec![a_segment(0)], vec![L(vec![])]));
        assert!(
            empty.starts_with("device_traces: holds no events: call"),
            "{empty}"
        );
        let bytes = b"\x80\x02cos\nsystem\n.";
        let refused = read(&mut &bytes[..]).unwrap_err().to_string();
        assert!(refused.starts_with("byte 2: GLOBAL refused"), "{refused}");
    }
}
