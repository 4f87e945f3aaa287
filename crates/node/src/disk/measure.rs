//! How fast segments go to a disk and come back, beside what that disk does by itself. For `ebb bench disk`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_units::Bytes;

use super::{SegmentFile, Store, Trouble, copy, with_lanes};

/// What to measure.
#[derive(Clone, Debug)]
pub struct DiskPlan {
    /// A folder on the disk; a folder in it is made and removed again.
    pub dir: std::path::PathBuf,
    /// How much goes out and comes back.
    pub bytes: Bytes,
    /// In pieces of this size.
    pub segment: Bytes,
    /// By so many threads.
    pub threads: usize,
    /// So often.
    pub rounds: u32,
    /// Pack blocks.
    pub packed: bool,
    /// Ends after so long, with what there is by then.
    pub within: Duration,
}

/// Rates in bytes a second, one of each a round.
#[derive(Clone, Debug, Default)]
pub struct DiskRates {
    /// The disk's own: the same writes of the same memory.
    pub write: Vec<f64>,
    /// Segments to files.
    pub spill: Vec<f64>,
    /// The disk's own reads.
    pub read: Vec<f64>,
    /// Files to new segments.
    pub load: Vec<f64>,
    /// By what calls.
    pub way: &'static str,
    /// Past the page cache.
    pub direct: bool,
}

/// Measures a disk. `say` hears what is being done, for a person who waits. What does not fit into the time is left out: later rounds,
/// and of a round segments that were not begun.
///
/// # Errors
/// The system's: no such folder, no room on the disk or in memory.
pub fn measure_disk(plan: &DiskPlan, say: &dyn Fn(&str)) -> io::Result<DiskRates> {
    let folder = Folder::new(&plan.dir)?;
    let store = Store::open(&folder.0, Bytes::ZERO)?;
    if store.room()? < Bytes(plan.bytes.0.saturating_mul(2)) {
        return Err(io::Error::other(format!(
            "measuring with {} needs twice that on the disk, which has {} free",
            plan.bytes,
            store.room()?
        )));
    }
    let began = Instant::now();
    let count = usize::try_from(plan.bytes.0.div_ceil(plan.segment.0)).unwrap_or(1);
    let mut segments: Vec<OwnedFd> = Vec::new();
    for seed in 0..count {
        say(&format!(
            "making {} of memory: segment {} of {count}",
            plan.bytes,
            seed + 1
        ));
        let memory = crate::arena::make(plan.segment, false)?;
        noise(&memory, plan.segment, seed as u64)?;
        segments.push(memory);
        // Half of the time for what is to be measured with it.
        if began.elapsed() > plan.within / 2 {
            break;
        }
    }
    let mut rates = DiskRates {
        way: super::way(),
        direct: copy::is_direct(store.create()?.ours.as_fd()),
        ..DiskRates::default()
    };
    let bytes = plan.segment.0;
    for round in 0..plan.rounds {
        // In the first round each part has its share of the time, so that all are measured.
        let mut parts = 4;
        let mut until = |what: &str| {
            say(&format!("round {} of {}: {what}", round + 1, plan.rounds));
            let left = plan.within.saturating_sub(began.elapsed());
            let share = if round == 0 { left / parts } else { left };
            parts -= 1;
            Instant::now() + share
        };
        let write = |_: &OwnedFd| {
            let file = store.create().map_err(errno)?;
            with_lanes(|lanes| copy::raw(lanes, file.ours.as_fd(), bytes, super::lanes::Way::Write))?;
            Ok(file)
        };
        let plain = on_all(plan.threads, &segments, until("the disk's own writes"), write)?;
        let spill = |memory: &OwnedFd| {
            let file = store.create().map_err(errno)?;
            let (off, packed) = (AtomicBool::new(false), plan.packed);
            with_lanes(|lanes| copy::spill(lanes, memory, bytes, file.ours.as_fd(), packed, 1, &off))?;
            Ok(file)
        };
        let files = on_all(plan.threads, &segments, until("segments to files"), spill)?;
        let read = |file: &SegmentFile| {
            with_lanes(|lanes| copy::raw(lanes, file.ours.as_fd(), bytes, super::lanes::Way::Read))
        };
        let reads = on_all(plan.threads, &plain.done, until("the disk's own reads"), read)?;
        // What is read into is the program's then: giving it back is no part of this, and comes after.
        let load = |file: &SegmentFile| {
            let memory = crate::arena::make_bare(plan.segment, false).map_err(Trouble::Memory)?;
            let off = AtomicBool::new(false);
            with_lanes(|lanes| copy::load(lanes, file.ours.as_fd(), bytes, &memory, &off))?;
            Ok(memory)
        };
        let loads = on_all(plan.threads, &files.done, until("files to segments"), load)?;
        // A round that the end of the time cut short says less than one of a whole.
        let whole = loads.done.len() == segments.len();
        if round == 0 || whole {
            rates.write.push(plain.rate(bytes));
            rates.spill.push(files.rate(bytes));
            rates.read.push(reads.rate(bytes));
            rates.load.push(loads.rate(bytes));
        }
        if !whole || began.elapsed() >= plan.within {
            break;
        }
    }
    Ok(rates)
}

/// A folder for a while.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(dir: &Path) -> io::Result<Self> {
        let dir = dir.join(format!("ebb-bench-{}", std::process::id()));
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn errno(e: io::Error) -> Trouble {
    Trouble::Disk(rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO))
}

/// Fills memory with what nobody can pack.
fn noise(memory: &OwnedFd, bytes: Bytes, seed: u64) -> io::Result<()> {
    let mut x = seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut block = vec![0; 1 << 20];
    let mut at = 0;
    while at < bytes.0 {
        for word in block.as_chunks_mut::<8>().0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            *word = x.to_le_bytes();
        }
        let len = block.len().min(Bytes(bytes.0 - at).to_usize());
        at += rustix::io::pwrite(memory, &block[..len], at)? as u64;
    }
    Ok(())
}

/// What came of doing something with all of them.
struct OnAll<R> {
    done: Vec<R>,
    seconds: f64,
}

impl<R> OnAll<R> {
    /// Bytes a second, if each was of so many.
    fn rate(&self, bytes: u64) -> f64 {
        bytes as f64 * self.done.len() as f64 / self.seconds
    }
}

/// Does something with all of them, on so many threads. After `until` no further one is begun, but one by each thread.
fn on_all<T: Sync, R: Send>(
    threads: usize,
    all: &[T],
    until: Instant,
    work: impl Fn(&T) -> Result<R, Trouble> + Sync,
) -> io::Result<OnAll<R>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(all.len()) {
            scope.spawn(|| {
                while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let done = work(one);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push(done);
                    if Instant::now() >= until {
                        break;
                    }
                }
            });
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let results: Result<Vec<R>, Trouble> = results.into_iter().collect();
    let done = results.map_err(io::Error::other)?;
    Ok(OnAll { done, seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rate_is_measured_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let plan = DiskPlan {
            dir: dir.path().into(),
            bytes: Bytes::mib(8),
            segment: Bytes::mib(4),
            threads: 2,
            rounds: 2,
            packed: false,
            within: Duration::from_secs(60),
        };
        let rates = measure_disk(&plan, &|_| {}).unwrap();
        for rate in [&rates.write, &rates.spill, &rates.read, &rates.load] {
            assert!(
                rate.len() == 2 && rate.iter().all(|rate| *rate > 0.0),
                "{rates:?}"
            );
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn without_any_time_each_is_measured_once_with_what_every_thread_began() {
        let dir = tempfile::tempdir().unwrap();
        let plan = DiskPlan {
            dir: dir.path().into(),
            bytes: Bytes::mib(64),
            segment: Bytes::mib(2),
            threads: 2,
            rounds: 50,
            packed: false,
            within: Duration::ZERO,
        };
        let said = std::cell::RefCell::new(Vec::new());
        let rates = measure_disk(&plan, &|text| said.borrow_mut().push(text.to_owned())).unwrap();
        for rate in [&rates.write, &rates.spill, &rates.read, &rates.load] {
            assert!(rate.len() == 1 && rate[0] > 0.0, "{rates:?}");
        }
        assert!(said.borrow().iter().any(|text| text.contains("round 1 of 50")));
    }
}
