//! How long a stream-ordered allocation and its free take from a warm pool: by the driver alone, and under the library.
//!
//! `cargo bench -p ebb-layer --bench pools` runs itself as a program on the simulated GPU, plain and preloaded, and prints
//! nanoseconds: the best of many batches, each the mean of its pairs. `EBB_BENCH_DRIVER=/path/of/its/folder` takes the driver from
//! there; the real card's figures are the ones that count.

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::time::Instant;

#[path = "../tests/common/mod.rs"]
mod common;

const BATCHES: usize = 200;
const PAIRS: u32 = 1000;
/// Sizes: one that shares a slab with others, and one with a slab of its own.
const SIZES: [usize; 2] = [4 << 10, 64 << 20];

type Code = i32;

/// The address of a driver function.
fn function(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: a library that `dlopen` has given, and a name that ends with a zero byte.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "the driver has no {name:?}");
    found
}

/// The program: one context, one stream, pairs.
fn program() {
    // SAFETY: a name that ends with a zero byte.
    let cuda = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    assert!(!cuda.is_null(), "there is no driver");
    // SAFETY: functions of these signatures, by the driver's documentation.
    let (init, retain, set, make, alloc, free, wait) = unsafe {
        use std::mem::transmute as of;
        (
            of::<*mut c_void, extern "C" fn(u32) -> Code>(function(cuda, c"cuInit")),
            of::<*mut c_void, extern "C" fn(*mut usize, i32) -> Code>(function(
                cuda,
                c"cuDevicePrimaryCtxRetain",
            )),
            of::<*mut c_void, extern "C" fn(usize) -> Code>(function(cuda, c"cuCtxSetCurrent")),
            of::<*mut c_void, extern "C" fn(*mut usize, u32) -> Code>(function(cuda, c"cuStreamCreate")),
            of::<*mut c_void, extern "C" fn(*mut u64, usize, usize) -> Code>(function(
                cuda,
                c"cuMemAllocAsync",
            )),
            of::<*mut c_void, extern "C" fn(u64, usize) -> Code>(function(cuda, c"cuMemFreeAsync")),
            of::<*mut c_void, extern "C" fn() -> Code>(function(cuda, c"cuCtxSynchronize")),
        )
    };
    let (mut context, mut stream) = (0, 0);
    assert_eq!(init(0), 0);
    assert_eq!(retain(&raw mut context, 0), 0);
    assert_eq!(set(context), 0);
    assert_eq!(make(&raw mut stream, 1), 0);
    for (name, stream) in [("own stream", stream), ("default stream", 0)] {
        for size in SIZES {
            // Something lives in the pool all the time, as in every program.
            let mut others = [0u64; 64];
            for other in &mut others {
                assert_eq!(alloc(other, 3000, stream), 0);
            }
            let mut best = f64::MAX;
            for _ in 0..BATCHES {
                let began = Instant::now();
                for _ in 0..PAIRS {
                    let mut pointer = 0;
                    let allocated = alloc(&raw mut pointer, size, stream);
                    let freed = free(pointer, stream);
                    assert_eq!((allocated, freed), (0, 0));
                }
                best = best.min(began.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS));
                assert_eq!(wait(), 0);
            }
            println!("{name:<16}{size:>12}{best:>12.0}");
            for other in others {
                assert_eq!(free(other, stream), 0);
            }
        }
    }
}

fn main() {
    if std::env::args().any(|argument| argument == "--program") {
        program();
        return;
    }
    let own = std::env::current_exe().expect("a process knows its program");
    let driver = std::env::var_os("EBB_BENCH_DRIVER").map(PathBuf::from);
    let driver: &Path = driver.as_deref().unwrap_or_else(|| common::sim());
    let bench = common::Bench::new();
    for (title, mut command) in [
        ("the driver alone", bench.plain(&own, driver)),
        ("preloaded", bench.command(&own, driver)),
    ] {
        println!("{title:<16}{:>12}{:>12}", "bytes", "ns a pair");
        print!("{}", common::run(command.arg("--program")));
    }
}
