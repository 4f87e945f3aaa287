//! How fast segments go to a disk and come back, beside what that disk does by itself. For `ebb bench disk`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

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

/// Measures a disk.
///
/// # Errors
/// The system's: no such folder, no room on the disk or in memory.
pub fn measure_disk(plan: &DiskPlan) -> io::Result<DiskRates> {
    let folder = Folder::new(&plan.dir)?;
    let store = Store::open(&folder.0, Bytes::ZERO)?;
    if store.room()? < Bytes(plan.bytes.0.saturating_mul(2)) {
        return Err(io::Error::other(format!(
            "measuring with {} needs twice that on the disk, which has {} free",
            plan.bytes,
            store.room()?
        )));
    }
    let count = usize::try_from(plan.bytes.0.div_ceil(plan.segment.0)).unwrap_or(1);
    let mut segments: Vec<OwnedFd> = Vec::new();
    for seed in 0..count {
        let memory = crate::arena::make(plan.segment, false)?;
        noise(&memory, plan.segment, seed as u64)?;
        segments.push(memory);
    }
    let total = plan.segment.0 as f64 * count as f64;
    let mut rates = DiskRates {
        way: super::way(),
        direct: copy::is_direct(store.create()?.ours.as_fd()),
        ..DiskRates::default()
    };
    let bytes = plan.segment.0;
    for _ in 0..plan.rounds {
        let (plain, seconds) = on_all(plan.threads, &segments, |_| {
            let file = store.create().map_err(errno)?;
            with_lanes(|lanes| copy::raw(lanes, file.ours.as_fd(), bytes, super::lanes::Way::Write))?;
            Ok(file)
        })?;
        rates.write.push(total / seconds);
        let (files, seconds) = on_all(plan.threads, &segments, |memory| {
            let file = store.create().map_err(errno)?;
            let (off, packed) = (AtomicBool::new(false), plan.packed);
            with_lanes(|lanes| copy::spill(lanes, memory, bytes, file.ours.as_fd(), packed, 1, &off))?;
            Ok(file)
        })?;
        rates.spill.push(total / seconds);
        let (_, seconds) = on_all(plan.threads, &plain, |file: &SegmentFile| {
            with_lanes(|lanes| copy::raw(lanes, file.ours.as_fd(), bytes, super::lanes::Way::Read))
        })?;
        rates.read.push(total / seconds);
        drop(plain);
        let (_, seconds) = on_all(plan.threads, &files, |file: &SegmentFile| {
            let memory = crate::arena::make_bare(plan.segment, false).map_err(Trouble::Memory)?;
            let off = AtomicBool::new(false);
            with_lanes(|lanes| copy::load(lanes, file.ours.as_fd(), bytes, &memory, &off))
        })?;
        rates.load.push(total / seconds);
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

/// Does something with all of them, on so many threads; what came of it, and the seconds that it took.
fn on_all<T: Sync, R: Send>(
    threads: usize,
    all: &[T],
    work: impl Fn(&T) -> Result<R, Trouble> + Sync,
) -> io::Result<(Vec<R>, f64)> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads.min(all.len()) {
            scope.spawn(|| {
                while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let done = work(one);
                    results.lock().unwrap_or_else(PoisonError::into_inner).push(done);
                }
            });
        }
    });
    let seconds = began.elapsed().as_secs_f64();
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let results: Result<Vec<R>, Trouble> = results.into_iter().collect();
    Ok((results.map_err(io::Error::other)?, seconds))
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
        };
        let rates = measure_disk(&plan).unwrap();
        for rate in [&rates.write, &rates.spill, &rates.read, &rates.load] {
            assert!(
                rate.len() == 2 && rate.iter().all(|rate| *rate > 0.0),
                "{rates:?}"
            );
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
