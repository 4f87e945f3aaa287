//! How fast this machine's card fingerprints memory: `cargo run --release -p ebb-cuda --example fingerprint_speed -- 64`
//! (GiB). Also how long it takes to compile the kernel, and to load it.

use std::sync::Arc;
use std::time::Instant;

use ebb_abi::{CUcontext, CUdevice, CUresult};
use ebb_cuda::{CudaDevice, DeviceFacts, DriverTable};
use ebb_device::DeviceMemory;

/// Bytes of a chunk.
const CHUNK: u64 = 128 << 20;

fn main() {
    let gib: u64 = std::env::args()
        .nth(1)
        .map_or(16, |text| text.parse().expect("GiB"));
    // SAFETY: a driver's constructors are those of a GPU library; it is never unloaded.
    let library = std::mem::ManuallyDrop::new(
        unsafe { libloading::Library::new("libcuda.so.1") }.expect("the driver loads"),
    );
    // SAFETY: names of the driver's functions, in a driver, which stays loaded.
    let find = |name: &'static core::ffi::CStr| unsafe {
        library
            .get::<*const core::ffi::c_void>(name.to_bytes_with_nul())
            .map_or(core::ptr::null(), |symbol| *symbol)
    };
    // SAFETY: as above.
    let table = Arc::new(unsafe { DriverTable::load(find) });
    let mut context = CUcontext::NULL;
    type Init = unsafe extern "C" fn(u32) -> CUresult;
    type Retain = unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult;
    // SAFETY: the signatures of these two functions, a valid place for the context, and the first device.
    unsafe {
        assert!(library.get::<Init>(b"cuInit\0").expect("cuInit")(0).is_success());
        let retain = library
            .get::<Retain>(b"cuDevicePrimaryCtxRetain\0")
            .expect("retain");
        assert!(retain(&raw mut context, CUdevice(0)).is_success());
    }
    let facts = DeviceFacts::read(&table, CUdevice(0)).expect("facts");
    let device = CudaDevice::new(table, CUdevice(0), Some(context), &facts).expect("a device");
    let ranges: Vec<(u64, u64)> = (0..(gib << 30) / CHUNK)
        .map(|_| {
            let at = device.reserve(CHUNK, CHUNK).expect("reserve");
            let handle = device.create(CHUNK).expect("create");
            device.map(at, CHUNK, handle).expect("map");
            device.set_access(at, CHUNK).expect("set_access");
            (at, CHUNK)
        })
        .collect();
    let timed = |what: &str, bytes: u64, run: &dyn Fn()| {
        let began = Instant::now();
        run();
        let took = began.elapsed().as_secs_f64();
        println!(
            "{what}: {:.3} ms, {:.0} GB/s",
            took * 1e3,
            bytes as f64 / took / 1e9
        );
    };
    timed("compile", 0, &|| device.expect_fingerprints());
    let print = |ranges: &[(u64, u64)]| drop(device.fingerprint(ranges).expect("fingerprint"));
    timed("load, and one chunk", CHUNK, &|| print(&ranges[..1]));
    timed("one chunk", CHUNK, &|| print(&ranges[..1]));
    for _ in 0..5 {
        timed("all", gib << 30, &|| print(&ranges));
    }
}
