//! The suite of `ebb-device` over the driver's calls: on the simulated GPU, and with `EBB_TEST_REAL_GPU=1` on the card of
//! this machine.
//!
//! The driver reads its environment when it is loaded, so each case is a child: this program again, with the ignored test below.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ebb_abi::{CUcontext, CUdevice, CUresult};
use ebb_cuda::{CudaDevice, DeviceFacts, DriverTable};
use ebb_device::{DeviceMemory, HostAddr, conformance};

/// Which driver the child opens.
const DRIVER: &str = "EBB_TEST_DRIVER";

#[derive(Default)]
struct Memory(RefCell<Vec<Vec<u64>>>);

impl conformance::Host for Memory {
    fn memory(&self, len: u64) -> HostAddr {
        // A page to spare: pinning wants whole pages of its own.
        let mut block = vec![0u64; usize::try_from(len).unwrap() / 8 + 1024];
        let at = block.as_mut_ptr().expose_provenance().next_multiple_of(4096);
        self.0.borrow_mut().push(block);
        HostAddr(at)
    }

    fn fill(&self, at: HostAddr, len: u64, seed: u8) {
        let place = core::ptr::with_exposed_provenance_mut::<u8>(at.0);
        for i in 0..len {
            // SAFETY: inside a block that `memory` made and that lives as long as `self`; no copy is under way.
            unsafe {
                place
                    .add(usize::try_from(i).unwrap())
                    .write(conformance::pattern(seed, i))
            };
        }
    }

    fn holds(&self, at: HostAddr, len: u64, seed: u8) -> bool {
        let place = core::ptr::with_exposed_provenance::<u8>(at.0);
        // SAFETY: as in `fill`.
        (0..len).all(
            |i| unsafe { place.add(usize::try_from(i).unwrap()).read() } == conformance::pattern(seed, i),
        )
    }
}

fn check(result: CUresult) {
    assert_eq!(result, CUresult::SUCCESS);
}

#[test]
#[ignore = "run by the other tests, with the environment that the driver needs"]
fn child() {
    let path = std::env::var_os(DRIVER).expect("the parent says which driver");
    // SAFETY: a driver's constructors are those of a GPU library; it is never unloaded.
    let library =
        std::mem::ManuallyDrop::new(unsafe { libloading::Library::new(path) }.expect("the driver loads"));
    // SAFETY: names of the driver's functions, in a driver, which stays loaded.
    let find = |name: &'static core::ffi::CStr| unsafe {
        library
            .get::<*const core::ffi::c_void>(name.to_bytes_with_nul())
            .map_or(core::ptr::null(), |symbol| *symbol)
    };
    // SAFETY: as above.
    let table = Arc::new(unsafe { DriverTable::load(find) });
    type Init = unsafe extern "C" fn(u32) -> CUresult;
    type Retain = unsafe extern "C" fn(*mut CUcontext, CUdevice) -> CUresult;
    let mut context = CUcontext::NULL;
    // SAFETY: the signatures of these two functions, a valid place for the context, and the first device.
    unsafe {
        check(library.get::<Init>(b"cuInit\0").expect("cuInit")(0));
        check(library
            .get::<Retain>(b"cuDevicePrimaryCtxRetain\0")
            .expect("retain")(&raw mut context, CUdevice(0)));
    }
    let facts = DeviceFacts::read(&table, CUdevice(0)).expect("facts");
    assert!(facts.vmm && facts.total.0 > 0);

    // Addresses and memory need no context.
    let bare =
        CudaDevice::new(Arc::clone(&table), CUdevice(0), None, &facts).expect("a device without a context");
    let g = bare.granularity();
    let at = bare.reserve(g, g).expect("reserve");
    bare.free_reservation(at, g).expect("free_reservation");

    let cuda =
        Arc::new(CudaDevice::new(Arc::clone(&table), CUdevice(0), Some(context), &facts).expect("a device"));
    let device: Arc<dyn DeviceMemory> = cuda.clone();
    let fill_up = std::env::var_os("EBB_SIM_DIR").is_some();
    let host = Memory::default();
    conformance::run(&device, &host, facts.total.0 / 2, fill_up);
    shares(&cuda, &host);
    for ahead in [false, true] {
        let other =
            CudaDevice::new(Arc::clone(&table), CUdevice(0), Some(context), &facts).expect("a device");
        prints_as_the_processor(&other, ahead);
        assert!(!other.remove_context(context));
    }
    // From a thread that has no context, and leaving none behind.
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let at = device.reserve(g, g).expect("reserve");
                let handle = device.create(g).expect("create");
                device.map(at, g, handle).expect("map");
                device.set_access(at, g).expect("set_access");
                device.unmap(at, g).expect("unmap");
                device.release(handle).expect("release");
                device.free_reservation(at, g).expect("free_reservation");
                let mut current = CUcontext(1);
                // SAFETY: a valid place for the answer.
                check(unsafe { table.cuCtxGetCurrent(&raw mut current) });
                assert!(current.is_null(), "a context was left behind");
            })
            .join()
            .expect("the thread ends well");
    });
    // The context's streams go with it; a device without contexts says so.
    assert!(!cuda.remove_context(context));
    assert_eq!(
        device.mark(ebb_device::Direction::Out),
        Err(ebb_device::DeviceError::Gone)
    );
    println!("conformance passed");
}

/// Pieces of memory leave by their descriptors and appear at one range elsewhere; each holds the memory by itself.
fn shares(cuda: &Arc<CudaDevice>, host: &Memory) {
    use conformance::Host;
    use ebb_device::Direction;
    use std::os::fd::AsFd;
    let g = cuda.granularity();
    assert_eq!(cuda.lacks(), "");
    let at = cuda.reserve(3 * g, g).expect("reserve");
    let mut fds = Vec::new();
    for (piece, len) in [(0, g), (g, 2 * g)] {
        let handle = cuda.create(len).expect("create");
        cuda.map(at + piece, len, handle).expect("map");
        fds.push((cuda.export(handle).expect("export"), len));
        cuda.release(handle).expect("release");
    }
    cuda.set_access(at, 3 * g).expect("set_access");
    let mut imported = ebb_cuda::Imported::reserve(Arc::clone(cuda), 3 * g).expect("reserve");
    assert!(imported.is_empty() && imported.base() != at && imported.len() == 3 * g);
    for (fd, len) in &fds {
        imported.add(fd.as_fd(), *len).expect("import");
    }
    assert!(imported.add(fds[0].0.as_fd(), g).is_err(), "it is full");
    imported.give_access(&[]).expect("access");
    drop(fds);
    let here = host.memory(3 * g);
    host.fill(here, 3 * g, 1);
    cuda.copy_in(at, here, 3 * g).expect("copy");
    cuda.wait(cuda.mark(Direction::In).expect("mark")).expect("wait");
    // The one who made it is gone.
    for (piece, len) in [(0, g), (g, 2 * g)] {
        cuda.unmap(at + piece, len).expect("unmap");
    }
    cuda.free_reservation(at, 3 * g).expect("free_reservation");
    host.fill(here, 3 * g, 2);
    cuda.copy_out(here, imported.base(), 3 * g).expect("copy");
    cuda.wait(cuda.mark(Direction::Out).expect("mark")).expect("wait");
    assert!(host.holds(here, 3 * g, 1));
    imported.close().expect("close");
}

/// The kernel and the processor agree, whatever the length, and whether the kernel was compiled ahead or not.
fn prints_as_the_processor(cuda: &CudaDevice, ahead: bool) {
    use ebb_device::Direction;
    let g = cuda.granularity();
    let len = 5 * g.min(1 << 20).next_multiple_of(g);
    let at = cuda.reserve(len, g).expect("reserve");
    let handle = cuda.create(len).expect("create");
    cuda.map(at, len, handle).expect("map");
    cuda.set_access(at, len).expect("set_access");
    let bytes: Vec<u8> = (0..len).map(|place| conformance::pattern(3, place)).collect();
    let here = HostAddr(bytes.as_ptr().expose_provenance());
    cuda.copy_in(at, here, len).expect("copy");
    cuda.wait(cuda.mark(Direction::In).expect("mark")).expect("wait");
    let keys = cuda.fingerprint_keys().expect("random bytes");
    let long = ebb_device::fingerprint::BLOCK.min(len);
    let lengths = [16, 48, 4096, 8192, 65536, 65536 + 512, long - 16, long];
    let ranges: Vec<(u64, u64)> = lengths.iter().map(|length| (at, *length)).collect();
    if ahead {
        cuda.expect_fingerprints();
    }
    let prints = cuda.fingerprint(&ranges).expect("fingerprint");
    for (length, print) in lengths.iter().zip(&prints) {
        let block = &bytes[..usize::try_from(*length).unwrap()];
        assert_eq!(*print, keys.of(block), "{length} bytes, compiled ahead: {ahead}");
    }
    cuda.unmap(at, len).expect("unmap");
    cuda.release(handle).expect("release");
    cuda.free_reservation(at, len).expect("free_reservation");
}

fn run_child(driver: &Path, environment: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().expect("a process knows its program"));
    command
        .args(["--ignored", "--exact", "child", "--nocapture"])
        .env(DRIVER, driver)
        .envs(environment.iter().copied());
    let output = command.output().expect("it starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("conformance passed"),
        "{environment:?}: {}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

fn simulated_driver() -> PathBuf {
    let exe = std::env::current_exe().expect("a process knows its program");
    let target = exe
        .ancestors()
        .find(|dir| dir.join("deps").is_dir())
        .expect("tests lie in a target folder");
    if std::env::var_os("EBB_TESTS_PREBUILT").is_none() {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo
            .args(["build", "--quiet", "-p", "ebb-simgpu", "--target-dir"])
            .arg(target.parent().expect("a parent"));
        if target.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        assert!(
            cargo.status().expect("cargo starts").success(),
            "the simulated GPU does not build"
        );
    }
    target.join("libsimcuda.so")
}

#[test]
fn over_the_simulated_gpu() {
    let driver = simulated_driver();
    for granularity in ["2Mi", "64Ki"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let sim = folder.path().to_str().expect("a plain path");
        let size = if granularity == "2Mi" { "128Mi" } else { "16Mi" };
        run_child(
            &driver,
            &[
                ("EBB_SIM_DIR", sim),
                ("EBB_SIM_GRANULARITY", granularity),
                ("EBB_SIM_MEMORY", size),
                ("EBB_SIM_CONTEXT_BYTES", "1Mi"),
            ],
        );
    }
}

#[test]
fn over_the_real_driver() {
    if std::env::var_os("EBB_TEST_REAL_GPU").is_none() {
        println!("not run: set EBB_TEST_REAL_GPU=1 on a machine with a GPU");
        return;
    }
    run_child(Path::new("libcuda.so.1"), &[]);
}
