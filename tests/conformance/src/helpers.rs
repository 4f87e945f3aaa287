//! What many behaviours do: short forms over [`Driver`] that end the behaviour if the driver refuses.

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use ebb_abi::*;

use crate::driver::Driver;
use crate::observe::short;

/// Bytes of a MiB.
pub(crate) const MIB: usize = 1 << 20;
/// The granule of physical memory on every card so far.
pub(crate) const GRANULE: usize = 2 * MIB;
/// The legacy default stream.
pub(crate) const NO_STREAM: CUstream = CUstream::NULL;

/// The kernels' text, which the simulated and the real driver take.
const KERNELS: &str = include_str!("../../../crates/simgpu/ptx/kernels.ptx");

/// A host function waits for this, so that a stream stays busy for as long as a behaviour wants.
static OPEN: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn wait_until_open(_: *mut c_void) {
    while !OPEN.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
}

/// Keeps a stream busy until [`unblock`]: then no call that waits for its work would come back.
#[track_caller]
pub(crate) fn block(cu: Driver, stream: CUstream) {
    OPEN.store(false, Ordering::Release);
    must(
        "cuLaunchHostFunc",
        cu.cuLaunchHostFunc(stream, Some(wait_until_open), null_mut()),
    );
}

/// Lets blocked streams go on.
pub(crate) fn unblock() {
    OPEN.store(true, Ordering::Release);
}

/// Panics with the driver's word if it refused.
#[track_caller]
pub(crate) fn must(what: &str, code: CUresult) {
    assert!(code == CUresult::SUCCESS, "{what} failed: {}", short(code));
}

/// An address further on.
pub(crate) fn plus(address: CUdeviceptr, bytes: usize) -> CUdeviceptr {
    CUdeviceptr(address.0 + bytes as u64)
}

/// Bytes that tell where they are.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at.wrapping_mul(31) >> 3) as u8 ^ at as u8 ^ seed)
        .collect()
}

/// "right", or the first place that is not.
pub(crate) fn compare(seen: &[u8], wanted: &[u8]) -> String {
    if seen.len() != wanted.len() {
        return format!("{} bytes instead of {}", seen.len(), wanted.len());
    }
    match seen.iter().zip(wanted).position(|(a, b)| a != b) {
        None => "right".into(),
        Some(at) => format!("wrong from byte {at}"),
    }
}

#[track_caller]
fn check(what: &str, code: CUresult) {
    must(what, code);
}

impl Driver {
    /// The primary context of a device, made current.
    #[track_caller]
    pub(crate) fn primary(self, ordinal: i32) -> CUcontext {
        let (mut device, mut context) = (CUdevice(0), CUcontext::NULL);
        check("cuDeviceGet", self.cuDeviceGet(&mut device, ordinal));
        check(
            "cuDevicePrimaryCtxRetain",
            self.cuDevicePrimaryCtxRetain(&mut context, device),
        );
        check("cuCtxSetCurrent", self.cuCtxSetCurrent(context));
        context
    }

    #[track_caller]
    pub(crate) fn alloc(self, bytes: usize) -> CUdeviceptr {
        let mut address = CUdeviceptr::NULL;
        check("cuMemAlloc", self.cuMemAlloc_v2(&mut address, bytes));
        address
    }

    #[track_caller]
    pub(crate) fn free(self, address: CUdeviceptr) {
        check("cuMemFree", self.cuMemFree_v2(address));
    }

    #[track_caller]
    pub(crate) fn write(self, address: CUdeviceptr, bytes: &[u8]) {
        check(
            "cuMemcpyHtoD",
            self.cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()),
        );
    }

    #[track_caller]
    pub(crate) fn read(self, address: CUdeviceptr, bytes: usize) -> Vec<u8> {
        let mut seen = vec![0xa5; bytes];
        check(
            "cuMemcpyDtoH",
            self.cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), address, bytes),
        );
        seen
    }

    #[track_caller]
    pub(crate) fn sync(self) {
        check("cuCtxSynchronize", self.cuCtxSynchronize());
    }

    /// A stream that does not wait for the legacy one.
    #[track_caller]
    pub(crate) fn stream(self) -> CUstream {
        let mut stream = CUstream::NULL;
        check(
            "cuStreamCreate",
            self.cuStreamCreate(&mut stream, CU_STREAM_NON_BLOCKING.0),
        );
        stream
    }

    #[track_caller]
    pub(crate) fn event(self) -> CUevent {
        let mut event = CUevent::NULL;
        check(
            "cuEventCreate",
            self.cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING.0),
        );
        event
    }

    /// A kernel by its name.
    #[track_caller]
    pub(crate) fn kernel(self, name: &str) -> CUfunction {
        let text = CString::new(KERNELS).expect("no zero byte in the kernels");
        let name = CString::new(name).expect("no zero byte in a name");
        let (mut module, mut function) = (CUmodule::NULL, CUfunction::NULL);
        check(
            "cuModuleLoadData",
            self.cuModuleLoadData(&mut module, text.as_ptr().cast()),
        );
        check(
            "cuModuleGetFunction",
            self.cuModuleGetFunction(&mut function, module, name.as_ptr()),
        );
        function
    }

    /// Launches with parameters of 8 bytes each (of which a kernel takes as many as it declares).
    pub(crate) fn launch(self, function: CUfunction, stream: CUstream, parameters: &[u64]) -> CUresult {
        let mut values = parameters.to_vec();
        let mut places: Vec<*mut c_void> = values.iter_mut().map(|v| std::ptr::from_mut(v).cast()).collect();
        self.cuLaunchKernel(
            function,
            8,
            1,
            1,
            64,
            1,
            1,
            0,
            stream,
            places.as_mut_ptr(),
            null_mut(),
        )
    }

    /// What to ask `cuMemCreate` for memory of a device.
    pub(crate) fn properties(self, ordinal: i32) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation::device(ordinal),
            ..CUmemAllocationProp::default()
        }
    }

    /// Physical memory of device 0.
    #[track_caller]
    pub(crate) fn create(self, bytes: usize) -> CUmemGenericAllocationHandle {
        let mut handle = CUmemGenericAllocationHandle::NULL;
        check(
            "cuMemCreate",
            self.cuMemCreate(&mut handle, bytes, &self.properties(0), 0),
        );
        handle
    }

    #[track_caller]
    pub(crate) fn reserve(self, bytes: usize) -> CUdeviceptr {
        let mut address = CUdeviceptr::NULL;
        check(
            "cuMemAddressReserve",
            self.cuMemAddressReserve(&mut address, bytes, 0, CUdeviceptr::NULL, 0),
        );
        address
    }

    pub(crate) fn access(self, address: CUdeviceptr, bytes: usize, flags: CUmemAccess_flags) -> CUresult {
        let access = CUmemAccessDesc {
            location: CUmemLocation::device(0),
            flags,
        };
        self.cuMemSetAccess(address, bytes, &access, 1)
    }

    /// Maps and makes it writable for device 0.
    #[track_caller]
    pub(crate) fn map(self, address: CUdeviceptr, bytes: usize, handle: CUmemGenericAllocationHandle) {
        check("cuMemMap", self.cuMemMap(address, bytes, 0, handle, 0));
        check(
            "cuMemSetAccess",
            self.access(address, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        );
    }

    /// One attribute of a pointer.
    pub(crate) fn attribute<T: Default>(
        self,
        attribute: CUpointer_attribute,
        address: CUdeviceptr,
    ) -> Result<T, CUresult> {
        let mut value = T::default();
        match self.cuPointerGetAttribute(std::ptr::from_mut(&mut value).cast(), attribute, address) {
            CUresult::SUCCESS => Ok(value),
            code => Err(code),
        }
    }

    /// Base (as an offset from `address`) and size of the allocation around an address.
    pub(crate) fn range(self, address: CUdeviceptr) -> Result<(u64, usize), CUresult> {
        let (mut base, mut size) = (CUdeviceptr::NULL, 0);
        match self.cuMemGetAddressRange_v2(&mut base, &mut size, address) {
            CUresult::SUCCESS => Ok((address.0.wrapping_sub(base.0), size)),
            code => Err(code),
        }
    }
}

/// A result or a value, as a line shows it.
pub(crate) fn either<T: std::fmt::Debug>(value: Result<T, CUresult>) -> String {
    match value {
        Ok(value) => format!("{value:?}"),
        Err(code) => short(code),
    }
}
