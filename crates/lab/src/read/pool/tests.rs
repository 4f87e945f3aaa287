//! Small traces of our own, right and wrong.

use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::pool::event::{Event, Notes, Op};

/// A file of this content in a folder that goes away.
fn file(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, content).unwrap();
    (dir, path)
}

fn one(content: &str) -> Trace {
    let (_dir, path) = file("trace.csv", content.as_bytes());
    let traces = read(&path, &Options { unit: 10 }).unwrap();
    let [trace] = <[Trace; 1]>::try_from(traces).unwrap();
    trace
}

/// The error, without the folder's name.
fn error(content: &[u8]) -> String {
    let (dir, path) = file("trace.csv", content);
    let error = read(&path, &Options::default()).unwrap_err().to_string();
    let prefix = format!("{}/trace.csv: ", dir.path().display());
    error.strip_prefix(&prefix).unwrap_or(&error).to_owned()
}

fn allocate(at_ns: u64, slot: u32, size: u64, stream: u32) -> Event {
    let op = Op::Allocate { slot, size, stream };
    Event { at_ns, op }
}

fn free(at_ns: u64, slot: u32, stream: u32) -> Event {
    let op = Op::Free { slot, stream };
    Event { at_ns, op }
}

#[test]
fn allocator_events_become_slots() {
    let trace = one("seq,t_us,op,addr,size,stream\n\
         0,,s,0,2097152,0\n1,,p,512,100,0\n2,5,F,4096,7,0\n3,5,A,1024,200,3\n4,7,S,0,2097152,0\n5,6,F,512,100,0\n\
         6,8,A,1024,300,3\n7,8,A,9999,0,0\n8,9,T,0,2097152,0\n9,9,O,0,5,0\n");
    assert_eq!(
        trace.events,
        [
            allocate(0, 0, 100, 0),
            allocate(5000, 1, 200, 1),
            // The clock stepped back: time does not.
            free(7000, 0, 0),
            // The block at 1024 was never freed.
            free(8000, 1, 1),
            allocate(8000, 1, 300, 1),
        ]
    );
    assert_eq!((trace.slots, trace.streams, trace.preamble), (2, 2, 1));
    assert_eq!(trace.recorded.unwrap().peak_reserved, 4 << 20);
    assert_eq!(
        trace.notes,
        Notes {
            at_start: 1,
            at_start_bytes: 100,
            unknown_frees: 1,
            missed_frees: 1,
            ignored: 1,
            out_of_memory: 1,
        }
    );
    assert_eq!((trace.peak_live(), trace.peak_live_rounded(512)), (300, 1024));
}

#[test]
fn lifetimes_end_before_others_begin() {
    let trace = one("id,lower,upper,size\nx,0,4,3\ny,4,6,5\nz,2,4,0\n");
    assert_eq!(
        trace.events,
        [
            allocate(0, 0, 30, 0),
            free(4, 0, 0),
            allocate(4, 0, 50, 0),
            free(6, 0, 0),
        ]
    );
    assert_eq!(trace.notes.ignored, 1);
}

/// What spreadsheets, pandas and people make of the same table.
#[test]
fn tables_may_be_written_in_many_ways() {
    let plain = one("id,lower,upper,size\nx,0,4,3\ny,4,6,5\n");
    for other in [
        "\u{feff}id,lower,upper,size\r\nx,0,4,3\r\ny,4,6,5\r\n",
        "ID, Lower ,UPPER,Size\n\n x , 0 , 4 , 3 \n  \ny,4,6,5",
        "\"id\",\"lower\",\"upper\",\"size\"\n\"a \"\"b\"\", c\",\"0\",4,3\ny,4,6,\"5\"\n",
        "lower,upper,size\n0,4,3.0\n4.0,6.0,5\n",
        "id,lower,upper,size,\nx,-7,-3,3,,\ny,-3,-1,5,\nz,-3,-3,9,\n",
    ] {
        assert_eq!(one(other).events, plain.events, "{other}");
    }
    let plain = one("t_us,op,addr,size,stream\n,p,16,8,0\n5,A,32,9,0\n6,F,32,9,0\n");
    for other in [
        "op,addr,size,t_us\np,0x10,8,\nalloc,0X20,9,5.0\nfree_requested,0x20,9,5.5\nfree_completed,0x20,,6.25\n",
        "seq,T_US,Op,ADDR,size,stream,device\n0,,p,16,8,,3\n1,5,A,32,9,0,3\n2,6,free,32,9,0,3\n",
    ] {
        assert_eq!(one(other).events, plain.events, "{other}");
    }
    let (dir, path) = file("cards.csv", b"op,addr,size,device\nA,1,2,1\nA,1,3,0\nF,1,2,1\n");
    let traces = read(&path, &Options::default()).unwrap();
    let names: Vec<_> = traces.iter().map(|trace| trace.name.clone()).collect();
    let name = |card| format!("{}:gpu{card}", dir.path().join("cards.csv").display());
    assert_eq!(names, [name(0), name(1)]);
    assert_eq!(traces[1].events.len(), 2);
}

/// The decoder gives what it has: the first line comes in two pieces.
#[test]
fn a_first_line_in_pieces_is_one() {
    struct Pieces(Vec<u8>);
    impl std::io::Read for Pieces {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            let n = to.len().min(self.0.len()).min(7);
            to[..n].copy_from_slice(&self.0[..n]);
            self.0.drain(..n);
            Ok(n)
        }
    }
    let mut pieces = Pieces(b"id,lower,upper,size\n0,1,2,3\n".to_vec());
    let traces = read_from(&mut pieces, std::path::Path::new("x"), &Options::default()).unwrap();
    assert_eq!(traces[0].events.len(), 2);
}

#[test]
fn columns_may_stand_in_any_order_and_others_between_them() {
    let trace = one("size, upper,hint,lower,id\n3,4,,0,x\n");
    assert_eq!(trace.events, [allocate(0, 0, 30, 0), free(4, 0, 0)]);
}

#[test]
fn what_is_wrong_is_said_with_its_line() {
    let cases: [(&str, &str); 14] = [
        (
            "t_us,op,addr,size,stream\n1,A,0,5,0\n2,X,0,5,0\n",
            "line 3: op is `X`, expected one of s, p, A, F, S, T, O",
        ),
        (
            "t_us,op,addr,size,stream\n1,A,0,-5,0\n",
            "line 2: size is `-5`, expected a whole number from 0 to 2^64 - 1",
        ),
        (
            "t_us,op,addr,size,stream\nsoon,A,0,5,0\n",
            "line 2: t_us is `soon`, expected microseconds, or nothing",
        ),
        (
            "t_us,op,addr,size,stream\n1,A,0,5,0\n,p,8,5,0\n",
            "line 3: op is `p`, expected no block of the start after the first event",
        ),
        (
            "id,lower,upper,size\n0,4,3,1\n",
            "line 2: upper is `3`, expected at least lower, which is 4",
        ),
        ("id,lower,upper,size\n\n0,3\n", "line 3: 2 columns, expected 4"),
        (
            "id,lower,upper,size\n0,3,4,18446744073709551615\n",
            "line 2: in units of 2097152 bytes more than 2^62 bytes would be live at once: take a smaller unit",
        ),
        (
            "t_us,op,addr,size,stream\n1,A,0,4611686018427387904,0\n1,A,1,1,0\n",
            "line 3: size is `1`, expected less: more than 2^62 bytes would be live at once",
        ),
        (
            "id,lower,upper,size\n0,1,2,3,4\n",
            "line 2: 5 columns, expected 4",
        ),
        (
            "id,lower,upper,size\n\"0,1,2,3\n",
            "line 2: a quote that is not closed",
        ),
        (
            "op,addr,size\nA,0x-1,2\n",
            "line 2: addr is `0x-1`, expected a whole number from 0 to 2^64 - 1",
        ),
        (
            "op,addr,size\nA,1,18446744073709551616\n",
            "line 2: size is `18446744073709551616`, expected a whole number from 0 to 2^64 - 1",
        ),
        (
            "PK\u{3}\u{4}",
            "it is packed with zip, or written by torch.save: unpack it first",
        ),
        ("", "it is empty; expected a PyTorch snapshot"),
    ];
    for (content, expected) in cases {
        let error = error(content.as_bytes());
        assert!(error.starts_with(expected), "{error}");
    }
    let error = error(b"id,lower,upper,size\n0,1,2,\xff\n");
    assert_eq!(error, "line 2: not text in UTF-8");
}

#[test]
fn a_file_of_another_kind_is_named_by_its_beginning() {
    let error = error(b"\x7fELF\x02\x01");
    assert!(
        error.starts_with("it begins with `\u{fffd}ELF\u{fffd}\u{fffd}`; expected"),
        "{error}"
    );
}

#[test]
fn our_own_format_says_all_that_a_replay_knows() {
    let trace = one(
        "ebb-pool-trace 1\n# a comment\n0 p 1 100\n\n5 a 2 200 7 # another\n6 f 1 7\n7 s\n8 a 3 1\n9 e\n",
    );
    let event = |at_ns, op| Event { at_ns, op };
    assert_eq!(
        trace.events,
        [
            allocate(0, 0, 100, 0),
            allocate(5, 1, 200, 1),
            free(6, 0, 1),
            event(7, Op::Synchronize),
            allocate(8, 0, 1, 0),
            free(9, 0, 0),
            free(9, 1, 1),
            event(9, Op::End { streams: 0..2 }),
        ]
    );
    assert_eq!(trace.preamble, 1);
    for (content, expected) in [
        (
            "1 a 2",
            "line 2: found the end of the line, expected a size in bytes",
        ),
        ("1 a 2 x", "line 2: found `x`, expected a size in bytes"),
        ("1 f 2 0 0", "line 2: found `0`, expected the end of the line"),
        ("1 q", "line 2: found `q`, expected one of p, a, f, s, e"),
        (
            "soon f 2",
            "line 2: found `soon`, expected a time in nanoseconds, or `gpu`",
        ),
        (
            "1 f 2\n1 p 3 4",
            "line 3: found `p`, expected blocks of the start before all else",
        ),
    ] {
        assert_eq!(
            error(format!("ebb-pool-trace 1\n{content}\n").as_bytes()),
            expected
        );
    }
}

#[test]
fn cards_are_kept_apart() {
    let content = "ebb-pool-trace 1\ngpu 3\n1 a 1 10\ngpu 0\n0 a 1 20\ngpu 3\n2 f 1\n";
    let (dir, path) = file("two", content.as_bytes());
    let traces = read(&path, &Options::default()).unwrap();
    let names: Vec<_> = traces.iter().map(|trace| trace.name.as_str()).collect();
    let path = dir.path().join("two").display().to_string();
    assert_eq!(names, [format!("{path}:gpu0"), format!("{path}:gpu3")]);
    assert_eq!(traces[0].events, [allocate(0, 0, 20, 0)]);
    assert_eq!(traces[1].events, [allocate(1, 0, 10, 0), free(2, 0, 0)]);
}

#[test]
fn a_run_of_salus_is_a_process_with_one_block() {
    let trace = one("vgg,2.5,100.5,7,python x.py --a=1,2\nrnn,1,1,7,python\n");
    assert_eq!(trace.events.len(), 6);
    assert_eq!(trace.events[0], allocate(0, 0, 100_500_000, 0));
    assert_eq!(trace.events[3], allocate(2_500_000_000, 0, 1_000_000, 0));
    assert_eq!(trace.span_ns(), 3_500_000_000);
    assert_eq!(
        error(b"vgg,2.5,1,7,x\nvgg,long,1,7,x\n"),
        "line 2: seconds is `long`, expected a number that is not negative"
    );
}

#[test]
fn a_pickle_is_told_by_its_content_or_its_name() {
    // {'segments': [], 'device_traces': []}, of version 2 under a wrong name, and of version 0, which only its name tells.
    let new = b"\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces]u.";
    let old = b"(dVsegments\n(lsVdevice_traces\n(ls.";
    for (name, content) in [
        ("trace.csv", &new[..]),
        ("trace.pickle", &new[..]),
        ("trace.pkl", &old[..]),
    ] {
        let (_dir, path) = file(name, content);
        let error = read(&path, &Options::default()).unwrap_err().to_string();
        assert!(error.contains("device_traces: holds no events"), "{error}");
    }
    // And what only claims to be one.
    let (_dir, path) = file("trace.pickle", b"\xff\xff");
    let error = read(&path, &Options::default()).unwrap_err().to_string();
    assert!(
        error.ends_with("byte 0: 0xff is no operation of a pickle"),
        "{error}"
    );
    let (_dir, path) = file("trace.pickle", b"id,lower,upper,size\n0,1,2,3\n");
    assert_eq!(read(&path, &Options::default()).unwrap().len(), 1);
}

/// Right files of every format, to be spoilt.
const RIGHT: [&[u8]; 5] = [
    b"seq,t_us,op,addr,size,stream\n0,,p,512,100,0\n1,5,A,1024,200,3\n2,6,F,512,100,0\n3,7,S,0,99,0\n",
    b"id,lower,upper,size\n0,0,4,3\n1,1,3,2\n2,3,6,4\n",
    b"ebb-pool-trace 1\n0 p 1 100\n5 a 2 200 7\n6 f 1 7\n7 s\n9 e\ngpu 3\n1 a 1 10\n",
    b"vgg,2.5,100.5,7,python x.py\nrnn,1,1,7,python\n",
    b"\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces]]}(X\x06\x00\x00\x00actionX\x05\x00\x00\x00alloc\
      X\x04\x00\x00\x00addrK\x01X\x04\x00\x00\x00sizeK\x05uaau.",
];

#[test]
fn the_right_files_are_right() {
    for right in RIGHT {
        let (_dir, path) = file("trace", right);
        assert!(!read(&path, &Options::default()).unwrap().is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Spoilt files give a trace that can be replayed, or an error: never a panic.
    #[test]
    fn spoilt_files_do_no_harm(
        which in 0..RIGHT.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..6),
    ) {
        let mut bytes = RIGHT[which].to_vec();
        for (at, byte, how) in changes {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.truncate(at),
                _ => bytes.insert(at, byte),
            }
        }
        let path = std::path::Path::new("trace");
        for trace in read_from(&mut &bytes[..], path, &Options::default()).unwrap_or_default() {
            let options = crate::pool::run::Options { capacity: 1 << 62, ..Default::default() };
            let mut policy = crate::pool::kind::Kind::BestFit.make(options.capacity);
            let outcome = crate::pool::run::replay(trace.events.iter().cloned(), &mut *policy, &options);
            prop_assert!(outcome.is_ok(), "{outcome:?}");
        }
    }
}
