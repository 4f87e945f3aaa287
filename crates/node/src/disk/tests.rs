//! Segments to files and back, over what goes wrong on the way.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use ebb_disk::{BLOCK, FormError, PAGE, Packing};
use ebb_units::GRANULE;
use rustix::io::Errno;

use super::lanes::Way;
use super::*;

const BYTES: Bytes = Bytes(2 * GRANULE.0 + GRANULE.0 / 2);

/// Memory of a segment: noise, zeros, and what can be packed.
fn segment() -> (OwnedFd, Vec<u8>) {
    let mut plain = vec![0; BYTES.to_usize()];
    let mut x = 3u64;
    for byte in &mut plain[..2 * BLOCK] {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = (x >> 56) as u8;
    }
    plain[3 * BLOCK..3 * BLOCK + 700].fill(9);
    *plain.last_mut().unwrap() = 1;
    let memory = crate::arena::make(BYTES, false).unwrap();
    assert_eq!(rustix::io::pwrite(&memory, &plain, 0), Ok(plain.len()));
    (memory, plain)
}

fn contents(memory: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; BYTES.to_usize()];
    assert_eq!(rustix::io::pread(memory, &mut bytes, 0), Ok(bytes.len()));
    bytes
}

struct Stage {
    store: Store,
    _dir: tempfile::TempDir,
}

fn stage() -> Stage {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("segments"), Bytes::ZERO).unwrap();
    Stage { store, _dir: dir }
}

fn go() -> Arc<AtomicBool> {
    Arc::default()
}

fn out(
    lanes: &mut dyn Lanes,
    file: &SegmentFile,
    memory: &OwnedFd,
    packing: Packing,
) -> Result<Written, Trouble> {
    copy::spill(lanes, memory, BYTES.0, file.ours.as_fd(), packing, 1, &go())
}

fn back(lanes: &mut dyn Lanes, file: &SegmentFile) -> Result<Vec<u8>, Trouble> {
    let memory = crate::arena::make(BYTES, false).unwrap();
    copy::load(lanes, file.ours.as_fd(), BYTES.0, &memory, &go())?;
    Ok(contents(&memory))
}

#[test]
fn a_segment_goes_and_comes_back_by_every_way() {
    let stage = stage();
    let (memory, plain) = segment();
    let mut ways: Vec<Box<dyn Lanes>> = vec![Box::new(Plain::new())];
    match Ring::new() {
        Ok(ring) => ways.push(Box::new(ring)),
        Err(e) => println!("no io_uring here: {e}"),
    }
    for lanes in &mut ways {
        let mut sizes = Vec::new();
        for packing in Packing::ALL {
            let file = stage.store.create().unwrap();
            let written = out(lanes.as_mut(), &file, &memory, packing).unwrap();
            assert!(
                back(lanes.as_mut(), &file).unwrap() == plain,
                "{}, {packing}",
                lanes.name()
            );
            assert_eq!(written.zeros, BLOCK as u64);
            assert_eq!(file.ours.metadata().unwrap().len(), written.stored);
            sizes.push(written.stored);
            // As the program reads it, without the daemon.
            let mut got = vec![0; plain.len()];
            let read = &mut |buffer: &mut [u8], at| Ok(rustix::io::pread(&*file.theirs, buffer, at)?);
            ebb_disk::load(BYTES.0, read, &mut |part, at| {
                let at = usize::try_from(at).unwrap();
                got[at..at + part.len()].copy_from_slice(part);
                Ok(())
            })
            .unwrap();
            assert!(got == plain);
        }
        assert!(sizes[1].max(sizes[2]) + BLOCK as u64 <= sizes[0], "{sizes:?}");
    }
}

/// What a call does instead of what it should.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Fails(Errno),
    /// Does so many bytes only.
    Short(usize),
    Ends,
    /// Reads something else.
    Flips,
}

/// Lanes of which one call goes wrong.
#[derive(Debug)]
struct Faulty {
    plain: Plain,
    calls: usize,
    at: Option<(usize, Fault)>,
    ended: VecDeque<(usize, Result<usize, Errno>)>,
}

impl Faulty {
    fn new(at: Option<(usize, Fault)>) -> Self {
        Self {
            plain: Plain::new(),
            calls: 0,
            at,
            ended: VecDeque::new(),
        }
    }
}

impl Lanes for Faulty {
    fn count(&self) -> usize {
        self.plain.count()
    }
    fn place(&mut self, lane: usize) -> &mut [u8] {
        self.plain.place(lane)
    }
    fn begin(
        &mut self,
        lane: usize,
        way: Way,
        file: BorrowedFd<'_>,
        from: usize,
        to: usize,
        at: u64,
    ) -> Result<(), Errno> {
        let fault = self
            .at
            .filter(|(call, _)| *call == self.calls)
            .map(|(_, fault)| fault);
        self.calls += 1;
        match fault {
            Some(Fault::Fails(errno)) => self.ended.push_back((lane, Err(errno))),
            Some(Fault::Ends) => self.ended.push_back((lane, Ok(0))),
            Some(Fault::Short(n)) => {
                // Direct I/O would not take odd lengths: what is short is so behind the call.
                self.plain.begin(lane, way, file, from, to, at)?;
                let (lane, result) = self.plain.next().unwrap();
                self.ended.push_back((lane, result.map(|done| done.min(n))));
            }
            Some(Fault::Flips) => {
                self.plain.begin(lane, way, file, from, to, at)?;
                let ended = self.plain.next().unwrap();
                self.plain.place(lane)[from + 17] ^= 1;
                self.ended.push_back(ended);
            }
            None => {
                self.plain.begin(lane, way, file, from, to, at)?;
                self.ended.extend(self.plain.next());
            }
        }
        Ok(())
    }
    fn next(&mut self) -> Option<(usize, Result<usize, Errno>)> {
        self.ended.pop_front()
    }
    fn name(&self) -> &'static str {
        "faulty"
    }
}

/// How many calls it takes.
fn calls(stage: &Stage, memory: &OwnedFd) -> (SegmentFile, usize, usize) {
    let file = stage.store.create().unwrap();
    let (mut w, mut r) = (Faulty::new(None), Faulty::new(None));
    out(&mut w, &file, memory, Packing::None).unwrap();
    back(&mut r, &file).unwrap();
    (file, w.calls, r.calls)
}

#[test]
fn a_full_or_failing_disk_at_every_step_leaves_the_segment_in_memory() {
    let stage = stage();
    let (memory, plain) = segment();
    let (_, writes, _) = calls(&stage, &memory);
    assert!(writes >= 4, "{writes}");
    for call in 0..writes {
        for errno in [Errno::NOSPC, Errno::IO, Errno::FBIG, Errno::DQUOT] {
            let file = stage.store.create().unwrap();
            let failed = out(
                &mut Faulty::new(Some((call, Fault::Fails(errno)))),
                &file,
                &memory,
                Packing::None,
            );
            assert_eq!(failed, Err(Trouble::Disk(errno)), "write {call}");
            assert!(contents(&memory) == plain);
            // What did get there is not taken for a segment.
            assert!(back(&mut Plain::new(), &file).is_err());
        }
        let file = stage.store.create().unwrap();
        let ends = out(
            &mut Faulty::new(Some((call, Fault::Ends))),
            &file,
            &memory,
            Packing::None,
        );
        assert_eq!(ends, Err(Trouble::Short));
    }
}

#[test]
fn short_writes_and_reads_are_gone_on_with() {
    let stage = stage();
    let (memory, plain) = segment();
    let (good, writes, reads) = calls(&stage, &memory);
    for n in [1, PAGE, PAGE + 512] {
        for call in 0..writes {
            let file = stage.store.create().unwrap();
            out(
                &mut Faulty::new(Some((call, Fault::Short(n)))),
                &file,
                &memory,
                Packing::None,
            )
            .unwrap();
            assert!(
                back(&mut Plain::new(), &file).unwrap() == plain,
                "write {call} of {n} bytes"
            );
        }
        for call in 0..reads {
            let got = back(&mut Faulty::new(Some((call, Fault::Short(n)))), &good).unwrap();
            assert!(got == plain, "read {call} of {n} bytes");
        }
    }
}

#[test]
fn a_read_error_is_an_error_and_a_changed_byte_is_never_used() {
    let stage = stage();
    let (memory, plain) = segment();
    let (file, _, reads) = calls(&stage, &memory);
    for call in 0..reads {
        let failed = back(&mut Faulty::new(Some((call, Fault::Fails(Errno::IO)))), &file);
        assert_eq!(failed, Err(Trouble::Disk(Errno::IO)), "read {call}");
        let flipped = back(&mut Faulty::new(Some((call, Fault::Flips))), &file);
        assert!(matches!(flipped, Err(Trouble::Damaged(_))), "read {call}");
    }
    // A disk that lost a write, which no call tells.
    let hole = vec![0; PAGE];
    let at = ebb_disk::header_len(BYTES.0) as u64 + BLOCK as u64;
    let writable = rustix::fs::fcntl_getfl(&*file.ours).unwrap() - rustix::fs::OFlags::DIRECT;
    rustix::fs::fcntl_setfl(&*file.ours, writable).unwrap();
    assert_eq!(rustix::io::pwrite(&*file.ours, &hole, at), Ok(PAGE));
    assert_eq!(
        back(&mut Plain::new(), &file),
        Err(Trouble::Damaged(FormError::BlockHash(1)))
    );
    assert!(contents(&memory) == plain);
}

#[test]
fn what_is_called_off_ends_and_what_the_reserve_forbids_does_not_begin() {
    let stage = stage();
    let (memory, _) = segment();
    let off: Arc<AtomicBool> = Arc::new(true.into());
    let memory = Arc::new(memory);
    let job = |off: &Arc<AtomicBool>| Job::Spill {
        key: 7,
        bytes: BYTES,
        memory: memory.clone(),
        packing: Packing::None,
        off: off.clone(),
    };
    let Done::Spilled { key: 7, result, .. } = job(&off).run(Some(&stage.store)) else {
        panic!()
    };
    assert_eq!(result.map(|(_, written)| written), Err(Trouble::CalledOff));
    let full = Store::open(&stage._dir.path().join("segments"), Bytes::MAX).unwrap();
    let Done::Spilled { result, .. } = job(&go()).run(Some(&full)) else {
        panic!()
    };
    assert_eq!(result.map(|(_, written)| written), Err(Trouble::Reserve));
    // And there and back by the jobs themselves.
    let Done::Spilled { result, .. } = job(&go()).run(Some(&stage.store)) else {
        panic!()
    };
    let (file, _) = result.unwrap();
    let load = Job::Load {
        key: 7,
        bytes: BYTES,
        file: file.ours,
        huge_pages: false,
        off: go(),
    };
    let Done::Loaded { result, .. } = load.run(None) else {
        panic!()
    };
    assert!(contents(&result.unwrap()) == contents(&memory));
}
