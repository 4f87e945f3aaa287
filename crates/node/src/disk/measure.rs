//! How fast segments go to a disk and come back, beside what that disk does by itself. For `ebb bench disk`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ebb_disk::Packing;
use ebb_units::Bytes;

use super::{SegmentFile, Store, Trouble, copy, with_lanes};

/// What is in the memory that is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskContent {
    /// What nobody can pack.
    #[default]
    Noise,
    /// Numbers as in the weights of a model: normally distributed, of two bytes (bfloat16).
    Weights,
}

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
    /// With blocks packed in each of these ways.
    pub packings: Vec<Packing>,
    /// What is in the memory.
    pub content: DiskContent,
    /// Ends after so long, with what there is by then.
    pub within: Duration,
}

/// Rates in bytes a second, one of each a round.
#[derive(Clone, Debug, Default)]
pub struct DiskRates {
    /// The disk's own: the same writes of the same memory.
    pub write: Vec<f64>,
    /// The disk's own reads.
    pub read: Vec<f64>,
    /// With blocks packed in each of the ways, in the order of the plan.
    pub ways: Vec<PackedRates>,
    /// By what calls.
    pub way: &'static str,
    /// Past the page cache.
    pub direct: bool,
}

/// Rates with blocks packed in one way: of the segments' bytes, not of the files'.
#[derive(Clone, Debug, Default)]
pub struct PackedRates {
    /// The way.
    pub packing: Packing,
    /// Segments to files.
    pub spill: Vec<f64>,
    /// Files to new segments.
    pub load: Vec<f64>,
    /// Bytes of the files over bytes of the segments.
    pub stored: f64,
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
    let pool = match plan.content {
        DiskContent::Noise => Vec::new(),
        DiskContent::Weights => weights(),
    };
    for seed in 0..count {
        say(&format!(
            "making {} of memory: segment {} of {count}",
            plan.bytes,
            seed + 1
        ));
        let memory = crate::arena::make(plan.segment, false)?;
        fill(&memory, plan.segment, seed as u64, &pool)?;
        segments.push(memory);
        // Half of the time for what is to be measured with it.
        if began.elapsed() > plan.within / 2 {
            break;
        }
    }
    let mut rates = DiskRates {
        way: super::way(),
        direct: copy::is_direct(store.create()?.ours.as_fd()),
        ways: plan
            .packings
            .iter()
            .map(|packing| PackedRates {
                packing: *packing,
                ..PackedRates::default()
            })
            .collect(),
        ..DiskRates::default()
    };
    let bytes = plan.segment.0;
    for round in 0..plan.rounds {
        // In the first round each part has its share of the time, so that all are measured.
        let mut parts = 2 + 2 * u32::try_from(plan.packings.len()).unwrap_or(1);
        let mut until = |what: &str| {
            say(&format!("round {} of {}: {what}", round + 1, plan.rounds));
            let left = plan.within.saturating_sub(began.elapsed());
            let share = if round == 0 { left / parts } else { left };
            parts = parts.saturating_sub(1).max(1);
            Instant::now() + share
        };
        let write = |_: &OwnedFd| {
            let file = store.create().map_err(errno)?;
            with_lanes(|lanes| copy::raw(lanes, file.ours.as_fd(), bytes, super::lanes::Way::Write))?;
            Ok(file)
        };
        let plain = on_all(plan.threads, &segments, until("the disk's own writes"), write)?;
        let read = |file: &SegmentFile| {
            with_lanes(|lanes| copy::raw(lanes, file.ours.as_fd(), bytes, super::lanes::Way::Read))
        };
        let reads = on_all(plan.threads, &plain.done, until("the disk's own reads"), read)?;
        // A round that the end of the time cut short says less than one of a whole.
        let mut whole = reads.done.len() == segments.len();
        let own = (plain.rate(bytes), reads.rate(bytes));
        drop(plain.done);
        let mut ours = Vec::new();
        for packing in &plan.packings {
            let how = match packing {
                Packing::None => String::new(),
                packing => format!(", packed by {packing}"),
            };
            let spill = |memory: &OwnedFd| {
                let file = store.create().map_err(errno)?;
                let off = AtomicBool::new(false);
                let written = with_lanes(|lanes| {
                    copy::spill(lanes, memory, bytes, file.ours.as_fd(), *packing, 1, &off)
                })?;
                Ok((file, written.stored))
            };
            let until_spilt = until(&format!("segments to files{how}"));
            let files = on_all(plan.threads, &segments, until_spilt, spill)?;
            // What is read into is the program's then: giving it back is no part of this, and comes after.
            let load = |(file, _): &(SegmentFile, u64)| {
                let memory = crate::arena::make_bare(plan.segment, false).map_err(Trouble::Memory)?;
                let off = AtomicBool::new(false);
                with_lanes(|lanes| copy::load(lanes, file.ours.as_fd(), bytes, &memory, &off))?;
                Ok(memory)
            };
            let until_loaded = until(&format!("files to segments{how}"));
            let loads = on_all(plan.threads, &files.done, until_loaded, load)?;
            whole &= loads.done.len() == segments.len();
            let stored: u64 = files.done.iter().map(|(_, stored)| stored).sum();
            let stored = stored as f64 / (bytes as f64 * files.done.len() as f64);
            ours.push((files.rate(bytes), loads.rate(bytes), stored));
        }
        if round == 0 || whole {
            rates.write.push(own.0);
            rates.read.push(own.1);
            for (rates, (spill, load, stored)) in rates.ways.iter_mut().zip(ours) {
                rates.spill.push(spill);
                rates.load.push(load);
                rates.stored = stored;
            }
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

/// A generator whose words look random.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(0x9E37_79B9_7F4A_7C15))
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Weights to cut blocks from: of a normal distribution, and as many as no packer sees at once.
fn weights() -> Vec<u8> {
    const NUMBERS: usize = 8 << 20;
    let mut random = Random::new(7);
    let mut bytes = Vec::with_capacity(2 * NUMBERS);
    for _ in 0..NUMBERS {
        // The sum of many small ones.
        let sum: u32 = random.next().to_le_bytes().map(u32::from).iter().sum();
        let fine = (random.next() & 0xffff) as f32 / 65_536.0;
        let number = (sum as f32 + fine - 1020.5) / 209.0 * 0.02;
        bytes.extend(((number.to_bits() >> 16) as u16).to_le_bytes());
    }
    bytes
}

/// Fills memory: with parts of `pool`, from random places, or without one with what nobody can pack.
fn fill(memory: &OwnedFd, bytes: Bytes, seed: u64, pool: &[u8]) -> io::Result<()> {
    let mut random = Random::new(seed);
    let mut block = vec![0; 1 << 20];
    let mut at = 0;
    while at < bytes.0 {
        let len = block.len().min(Bytes(bytes.0 - at).to_usize());
        let places = pool.len().saturating_sub(block.len()) as u64;
        if places > 0 {
            let from = usize::try_from(random.next() % places).unwrap_or(0) & !3;
            block.copy_from_slice(&pool[from..from + (1 << 20)]);
        } else {
            for word in block.as_chunks_mut::<8>().0 {
                *word = random.next().to_le_bytes();
            }
        }
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

    fn plan(dir: &tempfile::TempDir) -> DiskPlan {
        DiskPlan {
            dir: dir.path().into(),
            bytes: Bytes::mib(8),
            segment: Bytes::mib(4),
            threads: 2,
            rounds: 2,
            packings: vec![Packing::None],
            content: DiskContent::Noise,
            within: Duration::from_secs(60),
        }
    }

    fn all(rates: &DiskRates) -> Vec<&Vec<f64>> {
        let ours = rates.ways.iter().flat_map(|way| [&way.spill, &way.load]);
        [&rates.write, &rates.read].into_iter().chain(ours).collect()
    }

    #[test]
    fn every_rate_is_measured_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let rates = measure_disk(&plan(&dir), &|_| {}).unwrap();
        assert_eq!(all(&rates).len(), 4);
        for rate in all(&rates) {
            assert!(
                rate.len() == 2 && rate.iter().all(|rate| *rate > 0.0),
                "{rates:?}"
            );
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn weights_are_packed_by_zstd_and_by_nobody_else() {
        let dir = tempfile::tempdir().unwrap();
        let plan = DiskPlan {
            packings: Packing::ALL.to_vec(),
            content: DiskContent::Weights,
            ..plan(&dir)
        };
        let rates = measure_disk(&plan, &|_| {}).unwrap();
        let stored: Vec<f64> = rates.ways.iter().map(|way| way.stored).collect();
        assert!(stored[0] > 1.0 && stored[1] > 1.0, "{stored:?}");
        assert!(stored[2] < 0.8, "{stored:?}");
        for rate in all(&rates) {
            assert!(rate.len() == 2 && rate.iter().all(|rate| *rate > 0.0));
        }
    }

    #[test]
    fn without_any_time_each_is_measured_once_with_what_every_thread_began() {
        let dir = tempfile::tempdir().unwrap();
        let plan = DiskPlan {
            bytes: Bytes::mib(64),
            segment: Bytes::mib(2),
            rounds: 50,
            within: Duration::ZERO,
            ..plan(&dir)
        };
        let said = std::cell::RefCell::new(Vec::new());
        let rates = measure_disk(&plan, &|text| said.borrow_mut().push(text.to_owned())).unwrap();
        for rate in all(&rates) {
            assert!(rate.len() == 1 && rate[0] > 0.0, "{rates:?}");
        }
        assert!(said.borrow().iter().any(|text| text.contains("round 1 of 50")));
    }
}
