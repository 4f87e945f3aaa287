//! The driver as a program sees it that knows nothing of ebb: `dlopen`, `dlsym`, plain calls.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

/// The kernels' text, which the simulated and the real driver take.
pub const KERNELS: &str = include_str!("../../crates/simgpu/ptx/kernels.ptx");

/// The driver's error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaError(pub u32);

type Result<T> = std::result::Result<T, CudaError>;

/// The driver's calls, looked up by name each time they are first used.
#[derive(Debug)]
pub struct Cuda {
    library: *mut c_void,
    device: u32,
    fill: usize,
    check: usize,
    spin: usize,
}

macro_rules! call {
    ($cuda:expr, $name:literal ( $($arg:expr => $t:ty),* $(,)? )) => {{
        let symbol = $cuda.symbol($name)?;
        // SAFETY: `symbol` is the driver's function of this name, whose C signature is the one written at the call.
        let function = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($t),*) -> u32>(symbol) };
        // SAFETY: every pointer argument points to a live value of the type that the function expects.
        match unsafe { function($($arg),*) } {
            0 => Ok(()),
            code => Err(CudaError(code)),
        }
    }};
}

mod sharing;

pub use sharing::{Attribute, IpcHandle};

impl Cuda {
    /// Opens the driver, makes a context on `device` and loads the kernels.
    ///
    /// # Errors
    /// The driver's code, or 100 (no device) if there is no driver.
    pub fn open(device: i32) -> Result<Self> {
        // SAFETY: the name is a C string; loading a driver runs its constructors, which is what a program does.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(CudaError(100));
        }
        let mut cuda = Self {
            library,
            device: u32::try_from(device).unwrap_or(0),
            fill: 0,
            check: 0,
            spin: 0,
        };
        call!(cuda, "cuInit"(0 => c_uint))?;
        let (mut dev, mut ctx): (c_int, usize) = (0, 0);
        call!(cuda, "cuDeviceGet"(&raw mut dev => *mut c_int, device => c_int))?;
        call!(cuda, "cuDevicePrimaryCtxRetain"(&raw mut ctx => *mut usize, dev => c_int))?;
        call!(cuda, "cuCtxSetCurrent"(ctx => usize))?;
        let text = CString::new(KERNELS).expect("no zero byte in the kernels");
        let mut module = 0usize;
        call!(cuda, "cuModuleLoadData"(&raw mut module => *mut usize, text.as_ptr() => *const c_char))?;
        cuda.fill = cuda.function(module, c"ebb_fill")?;
        cuda.check = cuda.function(module, c"ebb_check")?;
        cuda.spin = cuda.function(module, c"ebb_spin")?;
        Ok(cuda)
    }

    fn function(&self, module: usize, name: &CStr) -> Result<usize> {
        let mut function = 0usize;
        call!(self, "cuModuleGetFunction"(&raw mut function => *mut usize, module => usize, name.as_ptr() => *const c_char))?;
        Ok(function)
    }

    fn symbol(&self, name: &str) -> Result<*mut c_void> {
        let name = CString::new(name).expect("a symbol has no zero byte");
        // SAFETY: the handle is open for the life of `self`, the name is a C string.
        let symbol = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        if symbol.is_null() {
            Err(CudaError(500))
        } else {
            Ok(symbol)
        }
    }

    /// # Errors
    /// The driver's code, as in all calls below.
    pub fn alloc(&self, bytes: u64) -> Result<u64> {
        let mut pointer = 0u64;
        call!(self, "cuMemAlloc_v2"(&raw mut pointer => *mut u64, bytes => u64))?;
        Ok(pointer)
    }

    /// # Errors
    /// The driver's code.
    pub fn free(&self, pointer: u64) -> Result<()> {
        call!(self, "cuMemFree_v2"(pointer => u64))
    }

    /// Stream-ordered allocation and free, on the default stream.
    ///
    /// # Errors
    /// The driver's code.
    pub fn alloc_async(&self, bytes: u64) -> Result<u64> {
        let mut pointer = 0u64;
        call!(self, "cuMemAllocAsync"(&raw mut pointer => *mut u64, bytes => u64, 0 => usize))?;
        Ok(pointer)
    }

    /// # Errors
    /// The driver's code.
    pub fn free_async(&self, pointer: u64) -> Result<()> {
        call!(self, "cuMemFreeAsync"(pointer => u64, 0 => usize))
    }

    /// Memory that the program makes by handles of `unit` bytes and maps into one reservation, as expandable segments do.
    ///
    /// # Errors
    /// The driver's code; nothing is kept.
    pub fn alloc_mapped(&self, bytes: u64, unit: u64) -> Result<u64> {
        let bytes = bytes.next_multiple_of(unit);
        let mut base = 0u64;
        call!(self, "cuMemAddressReserve"(&raw mut base => *mut u64, bytes => u64, 0 => usize, 0 => u64, 0 => u64))?;
        let mut mapped = 0;
        let grown = (0..bytes / unit).try_for_each(|n| {
            self.map_one(base + n * unit, unit)?;
            mapped += unit;
            Ok(())
        });
        if let Err(error) = grown {
            if mapped > 0 {
                call!(self, "cuMemUnmap"(base => u64, mapped => u64))?;
            }
            call!(self, "cuMemAddressFree"(base => u64, bytes => u64))?;
            return Err(error);
        }
        Ok(base)
    }

    /// One handle, mapped with access, and released: its mapping keeps it.
    fn map_one(&self, at: u64, size: u64) -> Result<()> {
        // Pinned, exportable by a descriptor, on our device; and that device reads and writes.
        let props: [u32; 8] = [1, 1, 1, self.device, 0, 0, 0, 0];
        let access: [u32; 3] = [1, self.device, 3];
        let mut handle = 0u64;
        call!(self, "cuMemCreate"(&raw mut handle => *mut u64, size => u64, props.as_ptr() => *const u32, 0 => u64))?;
        let mapped = call!(self, "cuMemMap"(at => u64, size => u64, 0 => usize, handle => u64, 0 => u64));
        call!(self, "cuMemRelease"(handle => u64))?;
        mapped?;
        call!(self, "cuMemSetAccess"(at => u64, size => u64, access.as_ptr() => *const u32, 1 => usize))
    }

    /// Gives back what [`Self::alloc_mapped`] gave. It waits first, as such allocators do: unmapping waits for nothing.
    ///
    /// # Errors
    /// The driver's code.
    pub fn free_mapped(&self, base: u64, bytes: u64, unit: u64) -> Result<()> {
        let bytes = bytes.next_multiple_of(unit);
        self.synchronize()?;
        call!(self, "cuMemUnmap"(base => u64, bytes => u64))?;
        call!(self, "cuMemAddressFree"(base => u64, bytes => u64))
    }

    /// Free and total bytes.
    ///
    /// # Errors
    /// The driver's code.
    pub fn info(&self) -> Result<(u64, u64)> {
        let (mut free, mut total) = (0u64, 0u64);
        call!(self, "cuMemGetInfo_v2"(&raw mut free => *mut u64, &raw mut total => *mut u64))?;
        Ok((free, total))
    }

    /// The card's bytes as `cuDeviceTotalMem` gives them.
    ///
    /// # Errors
    /// The driver's code.
    pub fn device_total(&self) -> Result<u64> {
        let mut total = 0u64;
        call!(self, "cuDeviceTotalMem_v2"(&raw mut total => *mut u64, 0 => c_int))?;
        Ok(total)
    }

    /// Base and size of the allocation that holds `pointer`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn address_range(&self, pointer: u64) -> Result<(u64, u64)> {
        let (mut base, mut size) = (0u64, 0u64);
        call!(self, "cuMemGetAddressRange_v2"(&raw mut base => *mut u64, &raw mut size => *mut u64, pointer => u64))?;
        Ok((base, size))
    }

    fn launch(&self, function: usize, arguments: &mut [*mut c_void]) -> Result<()> {
        call!(self, "cuLaunchKernel"(
            function => usize, 64 => c_uint, 1 => c_uint, 1 => c_uint, 256 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, 0 => usize, arguments.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void,
        ))
    }

    /// Launches the kernel that writes the pattern of `(seed, step)`; does not wait.
    ///
    /// # Errors
    /// The driver's code.
    pub fn launch_fill(&self, pointer: u64, bytes: u64, seed: u32, step: u32) -> Result<()> {
        let (mut p, mut n, mut s, mut t) = (pointer, bytes / 4, seed, step);
        self.launch(
            self.fill,
            &mut [
                (&raw mut p).cast(),
                (&raw mut n).cast(),
                (&raw mut s).cast(),
                (&raw mut t).cast(),
            ],
        )
    }

    /// Counts the words that do not have the pattern.
    ///
    /// # Errors
    /// The driver's code.
    pub fn count_wrong(&self, pointer: u64, bytes: u64, seed: u32, step: u32) -> Result<u64> {
        let result = self.alloc(8)?;
        let counted = (|| {
            self.write(result, &[0; 8])?;
            let (mut p, mut n, mut s, mut t, mut r) = (pointer, bytes / 4, seed, step, result);
            self.launch(
                self.check,
                &mut [
                    (&raw mut p).cast(),
                    (&raw mut n).cast(),
                    (&raw mut s).cast(),
                    (&raw mut t).cast(),
                    (&raw mut r).cast(),
                ],
            )?;
            let mut count = [0; 8];
            self.read(result, &mut count)?;
            Ok(u64::from_le_bytes(count))
        })();
        self.free(result)?;
        counted
    }

    /// Launches a kernel that runs for so long; does not wait.
    ///
    /// # Errors
    /// The driver's code.
    pub fn launch_spin(&self, millis: u64) -> Result<()> {
        let mut nanos = millis * 1_000_000;
        self.launch(self.spin, &mut [(&raw mut nanos).cast()])
    }

    /// Copies to the card.
    ///
    /// # Errors
    /// The driver's code.
    pub fn write(&self, pointer: u64, bytes: &[u8]) -> Result<()> {
        call!(self, "cuMemcpyHtoD_v2"(pointer => u64, bytes.as_ptr().cast() => *const c_void, bytes.len() => usize))
    }

    /// Copies from the card.
    ///
    /// # Errors
    /// The driver's code.
    pub fn read(&self, pointer: u64, bytes: &mut [u8]) -> Result<()> {
        call!(self, "cuMemcpyDtoH_v2"(bytes.as_mut_ptr().cast() => *mut c_void, pointer => u64, bytes.len() => usize))
    }

    /// Waits for everything.
    ///
    /// # Errors
    /// The driver's code.
    pub fn synchronize(&self) -> Result<()> {
        call!(self, "cuCtxSynchronize"())
    }

    /// Asks whether the default stream is done: a call that needs no memory.
    ///
    /// # Errors
    /// The driver's code; 600 is "not yet".
    pub fn query(&self) -> Result<()> {
        call!(self, "cuStreamQuery"(0 => usize))
    }

    /// Begins a capture on a new stream, launches a fill in it, ends it, and runs the graph once.
    ///
    /// # Errors
    /// The driver's code.
    pub fn capture_fill(&self, pointer: u64, bytes: u64, seed: u32) -> Result<()> {
        let (mut stream, mut graph, mut exec) = (0usize, 0usize, 0usize);
        call!(self, "cuStreamCreate"(&raw mut stream => *mut usize, 1 => c_uint))?;
        call!(self, "cuStreamBeginCapture_v2"(stream => usize, 2 => c_uint))?;
        let (mut p, mut n, mut s, mut t) = (pointer, bytes / 4, seed, 0u32);
        let mut arguments: [*mut c_void; 4] = [
            (&raw mut p).cast(),
            (&raw mut n).cast(),
            (&raw mut s).cast(),
            (&raw mut t).cast(),
        ];
        call!(self, "cuLaunchKernel"(
            self.fill => usize, 64 => c_uint, 1 => c_uint, 1 => c_uint, 256 => c_uint, 1 => c_uint, 1 => c_uint,
            0 => c_uint, stream => usize, arguments.as_mut_ptr() => *mut *mut c_void, null_mut() => *mut *mut c_void,
        ))?;
        call!(self, "cuStreamEndCapture"(stream => usize, &raw mut graph => *mut usize))?;
        call!(self, "cuGraphInstantiateWithFlags"(&raw mut exec => *mut usize, graph => usize, 0 => u64))?;
        call!(self, "cuGraphLaunch"(exec => usize, stream => usize))?;
        call!(self, "cuStreamSynchronize"(stream => usize))?;
        call!(self, "cuGraphExecDestroy"(exec => usize))?;
        call!(self, "cuGraphDestroy"(graph => usize))?;
        call!(self, "cuStreamDestroy_v2"(stream => usize))
    }

    /// The driver's name of a code, as a check that calls with C strings pass.
    ///
    /// # Errors
    /// The driver's code.
    pub fn error_name(&self, code: u32) -> Result<String> {
        let mut name: *const c_char = null();
        call!(self, "cuGetErrorName"(code => c_uint, &raw mut name => *mut *const c_char))?;
        // SAFETY: on success the driver stored a static C string.
        Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
    }
}
