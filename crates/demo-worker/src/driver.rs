//! [`Driver`]: the dozen driver calls that this program makes, looked up in `libcuda.so.1` as any program would.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use libloading::Library;

/// The kernels: text that the simulated and the real driver take.
const KERNELS: &str = include_str!("../../simgpu/ptx/kernels.ptx");
/// Enough blocks to fill any card; the kernels stride over what is left.
const BLOCKS: c_uint = 2112;
const THREADS: c_uint = 256;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Why the driver is of no use. All but an out-of-memory are final.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DriverError {
    /// There is none.
    #[error("no driver: {0}")]
    Missing(#[from] libloading::Error),
    /// A call failed.
    #[error("{call} failed: {name} ({code})")]
    Call {
        /// Which.
        call: &'static str,
        /// The driver's number for it.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
}

impl DriverError {
    /// Whether the card had no room.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            Self::Call {
                code: OUT_OF_MEMORY,
                ..
            }
        )
    }
}

/// Device memory that this program holds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// Its address on the device.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

/// A stream; it lives as long as the driver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream(usize);

/// Memory on a second card.
#[derive(Debug)]
pub(crate) struct Second {
    device: c_int,
    context: usize,
    block: Block,
}

/// Pinned host memory. Freed when dropped, which waits for all work.
pub(crate) struct Pinned<'a> {
    driver: &'a Driver,
    at: *mut c_void,
    bytes: u64,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: `at` came from the driver's allocation of pinned memory and is freed once.
        let _ = unsafe { (self.driver.functions.host_free)(self.at) };
    }
}

type Code = u32;

/// Declares the table of the driver's functions and how it is filled.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($arg:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the driver documents this name with these parameters, all of which have the C layout
                        // of the driver's own types; the pointer is not used after the library is closed, since
                        // `Driver` keeps the library for as long as this table.
                        *unsafe { library.get(concat!($symbol, "\0").as_bytes())? }
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    can_access = "cuDeviceCanAccessPeer": fn(*mut c_int, c_int, c_int);
    enable_peer = "cuCtxEnablePeerAccess": fn(usize, c_uint);
    primary_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    peer_queued = "cuMemcpyPeerAsync": fn(u64, usize, u64, usize, usize, usize);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut usize, c_int);
    set_current = "cuCtxSetCurrent": fn(usize);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_uuid = "cuDeviceGetUuid": fn(*mut [u8; 16], c_int);
    device_total = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    mem_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    synchronize = "cuCtxSynchronize": fn();
    module_load = "cuModuleLoadData": fn(*mut usize, *const c_char);
    get_function = "cuModuleGetFunction": fn(*mut usize, usize, *const c_char);
    alloc = "cuMemAlloc_v2": fn(*mut u64, usize);
    free = "cuMemFree_v2": fn(u64);
    set_u32 = "cuMemsetD32_v2": fn(u64, c_uint, usize);
    to_host = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    launch = "cuLaunchKernel": fn(usize, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, usize, *mut *mut c_void, *mut *mut c_void);
    error_name = "cuGetErrorName": fn(c_uint, *mut *const c_char);
    stream_create = "cuStreamCreate": fn(*mut usize, c_uint);
    stream_wait = "cuStreamSynchronize": fn(usize);
    host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost": fn(*mut c_void);
    out_queued = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, usize);
    in_queued = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, usize);
    within_queued = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, usize);
}

/// The driver, with a context on the first device that is visible.
pub(crate) struct Driver {
    functions: Functions,
    device: c_int,
    context: usize,
    fill: usize,
    check: usize,
    _library: Library,
}

impl Driver {
    /// Opens the driver, makes a context and loads the kernels.
    pub(crate) fn open() -> Result<Self, DriverError> {
        // SAFETY: loading the driver runs its constructors, which is what every GPU program does.
        let library = unsafe { Library::new("libcuda.so.1")? };
        let mut driver = Self {
            functions: Functions::load(&library)?,
            device: 0,
            context: 0,
            fill: 0,
            check: 0,
            _library: library,
        };
        let f = &driver.functions;
        let (mut device, mut context, mut module) = (0, 0, 0);
        let text = CString::new(KERNELS).expect("the kernels hold no zero byte");
        // SAFETY: takes a number only.
        driver.outcome("cuInit", unsafe { (f.init)(0) })?;
        // SAFETY: stores into a live integer of the type that it expects.
        driver.outcome("cuDeviceGet", unsafe { (f.device_get)(&raw mut device, 0) })?;
        // SAFETY: stores a handle into a live integer of a pointer's size; `device` is the driver's own number.
        driver.outcome("cuDevicePrimaryCtxRetain", unsafe {
            (f.primary_retain)(&raw mut context, device)
        })?;
        // SAFETY: `context` is the handle that the call before returned.
        driver.outcome("cuCtxSetCurrent", unsafe { (f.set_current)(context) })?;
        // SAFETY: stores a handle into a live integer; the text ends in a zero byte and lives through the call.
        driver.outcome("cuModuleLoadData", unsafe {
            (f.module_load)(&raw mut module, text.as_ptr())
        })?;
        driver.device = device;
        driver.context = context;
        driver.fill = driver.function(module, c"ebb_fill")?;
        driver.check = driver.function(module, c"ebb_check")?;
        Ok(driver)
    }

    fn function(&self, module: usize, name: &CStr) -> Result<usize, DriverError> {
        let mut function = 0;
        // SAFETY: stores a handle into a live integer; `module` is loaded and `name` a C string.
        let code = unsafe { (self.functions.get_function)(&raw mut function, module, name.as_ptr()) };
        self.outcome("cuModuleGetFunction", code).map(|()| function)
    }

    fn outcome(&self, call: &'static str, code: Code) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: stores a pointer to a constant string, or null for a number that it does not know.
        let known = unsafe { (self.functions.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: the driver stored a pointer to a C string that lives as long as the driver.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "unknown error".into()
        };
        Err(DriverError::Call { call, code, name })
    }

    /// The device: its name, identity, bytes in all, and free bytes.
    pub(crate) fn describe(&self) -> Result<(String, [u8; 16], usize, usize), DriverError> {
        let f = &self.functions;
        let (mut name, mut uuid, mut total) = ([0 as c_char; 256], [0; 16], 0);
        // SAFETY: writes at most 256 bytes, the zero at the end included, into an array of 256.
        self.outcome("cuDeviceGetName", unsafe {
            (f.device_name)(name.as_mut_ptr(), 256, self.device)
        })?;
        // SAFETY: stores 16 bytes into a live array of 16.
        self.outcome("cuDeviceGetUuid", unsafe {
            (f.device_uuid)(&raw mut uuid, self.device)
        })?;
        // SAFETY: stores a size into a live integer of its type.
        self.outcome("cuDeviceTotalMem", unsafe {
            (f.device_total)(&raw mut total, self.device)
        })?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: stores two sizes into live integers of their type; a context is current.
        self.outcome("cuMemGetInfo", unsafe {
            (f.mem_info)(&raw mut free, &raw mut all)
        })?;
        let name: Vec<u8> = name
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| c.to_ne_bytes()[0])
            .collect();
        Ok((String::from_utf8_lossy(&name).into_owned(), uuid, total, free))
    }

    /// Allocates.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<Block, DriverError> {
        let mut address = 0;
        let size = usize::try_from(bytes).expect("sizes fit 64-bit machines");
        // SAFETY: stores an address into a live integer.
        let code = unsafe { (self.functions.alloc)(&raw mut address, size) };
        self.outcome("cuMemAlloc", code)
            .map(|()| Block { address, bytes })
    }

    /// Frees.
    pub(crate) fn free(&self, block: Block) -> Result<(), DriverError> {
        // SAFETY: takes a number; the driver refuses what is no allocation.
        self.outcome("cuMemFree", unsafe { (self.functions.free)(block.address) })
    }

    /// Sets 32-bit words.
    pub(crate) fn set(&self, block: Block, value: u32) -> Result<(), DriverError> {
        let words = usize::try_from(block.bytes / 4).expect("sizes fit 64-bit machines");
        // SAFETY: writes device memory only, of a block that this program holds.
        self.outcome("cuMemsetD32", unsafe {
            (self.functions.set_u32)(block.address, value, words)
        })
    }

    /// Reads the 64-bit number at the block's start, after all work before.
    pub(crate) fn read_u64(&self, block: Block) -> Result<u64, DriverError> {
        let mut value = 0u64;
        // SAFETY: writes 8 bytes into a live integer of 8 bytes.
        let code = unsafe { (self.functions.to_host)((&raw mut value).cast(), block.address, 8) };
        self.outcome("cuMemcpyDtoH", code).map(|()| value)
    }

    /// Queues writing the pattern of (position, seed, step).
    pub(crate) fn queue_fill(&self, block: Block, seed: u32, step: u32) -> Result<(), DriverError> {
        let (mut address, mut words, mut seed, mut step) = (block.address, block.bytes / 4, seed, step);
        self.queue(
            self.fill,
            &mut [
                (&raw mut address).cast(),
                (&raw mut words).cast(),
                (&raw mut seed).cast(),
                (&raw mut step).cast(),
            ],
        )
    }

    /// Queues comparing with the pattern of (position, seed, step) and adding the number of wrong words to `result`.
    pub(crate) fn queue_check(
        &self,
        block: Block,
        seed: u32,
        step: u32,
        result: Block,
    ) -> Result<(), DriverError> {
        let (mut address, mut words, mut seed, mut step) = (block.address, block.bytes / 4, seed, step);
        let mut result = result.address;
        self.queue(
            self.check,
            &mut [
                (&raw mut address).cast(),
                (&raw mut words).cast(),
                (&raw mut seed).cast(),
                (&raw mut step).cast(),
                (&raw mut result).cast(),
            ],
        )
    }

    fn queue(&self, function: usize, arguments: &mut [*mut c_void]) -> Result<(), DriverError> {
        self.launch(function, BLOCKS, THREADS, arguments)
    }

    fn launch(
        &self,
        function: usize,
        blocks: c_uint,
        threads: c_uint,
        arguments: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        // SAFETY: `function` was found in our module; `arguments` point to live values of the kinds and in the order
        // that the kernel declares, and the driver copies them before it returns.
        let code = unsafe {
            (self.functions.launch)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                0,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        };
        self.outcome("cuLaunchKernel", code)
    }

    /// Launches a kernel that does nothing, and does not wait for it.
    pub(crate) fn launch_nothing(&self) -> Result<(), DriverError> {
        let (mut address, mut words, mut seed, mut step) = (0u64, 0u64, 0u32, 0u32);
        // No word is written, since the count is zero.
        self.launch(
            self.fill,
            1,
            1,
            &mut [
                (&raw mut address).cast(),
                (&raw mut words).cast(),
                (&raw mut seed).cast(),
                (&raw mut step).cast(),
            ],
        )
    }

    /// A stream that does not wait for others.
    pub(crate) fn stream(&self) -> Result<Stream, DriverError> {
        const NON_BLOCKING: c_uint = 1;
        let mut stream = 0;
        // SAFETY: stores a handle into a live integer of a pointer's size.
        let code = unsafe { (self.functions.stream_create)(&raw mut stream, NON_BLOCKING) };
        self.outcome("cuStreamCreate", code).map(|()| Stream(stream))
    }

    /// Waits for a stream.
    pub(crate) fn wait(&self, stream: Stream) -> Result<(), DriverError> {
        // SAFETY: takes a handle that the driver gave; streams are never destroyed here.
        self.outcome("cuStreamSynchronize", unsafe {
            (self.functions.stream_wait)(stream.0)
        })
    }

    /// Pinned host memory.
    pub(crate) fn pinned(&self, bytes: u64) -> Result<Pinned<'_>, DriverError> {
        let size = usize::try_from(bytes).expect("sizes fit 64-bit machines");
        let mut at = null_mut();
        // SAFETY: stores an address into a live pointer.
        let code = unsafe { (self.functions.host_alloc)(&raw mut at, size, 0) };
        self.outcome("cuMemHostAlloc", code).map(|()| Pinned {
            driver: self,
            at,
            bytes,
        })
    }

    /// Queues a copy of the whole block to pinned memory of the same size.
    pub(crate) fn queue_out(&self, to: &Pinned<'_>, from: Block, stream: Stream) -> Result<(), DriverError> {
        let size = usize::try_from(to.bytes.min(from.bytes)).expect("sizes fit 64-bit machines");
        // SAFETY: `to` is pinned memory of at least `size` bytes, which lives until its `Drop`; that comes after a wait for
        // the stream wherever this is called.
        let code = unsafe { (self.functions.out_queued)(to.at, from.address, size, stream.0) };
        self.outcome("cuMemcpyDtoHAsync", code)
    }

    /// Queues a copy of pinned memory to the block.
    pub(crate) fn queue_in(&self, to: Block, from: &Pinned<'_>, stream: Stream) -> Result<(), DriverError> {
        let size = usize::try_from(from.bytes.min(to.bytes)).expect("sizes fit 64-bit machines");
        // SAFETY: as in `queue_out`.
        let code = unsafe { (self.functions.in_queued)(to.address, from.at, size, stream.0) };
        self.outcome("cuMemcpyHtoDAsync", code)
    }

    /// Queues a copy of one block to another, as far as both go.
    pub(crate) fn queue_within(&self, to: Block, from: Block, stream: Stream) -> Result<(), DriverError> {
        let size = usize::try_from(from.bytes.min(to.bytes)).expect("sizes fit 64-bit machines");
        // SAFETY: takes addresses of the card, which the driver checks.
        let code = unsafe { (self.functions.within_queued)(to.address, from.address, size, stream.0) };
        self.outcome("cuMemcpyDtoDAsync", code)
    }

    /// How many cards this program sees.
    pub(crate) fn cards(&self) -> Result<c_int, DriverError> {
        let mut count = 0;
        // SAFETY: stores a number into a live integer of its type.
        self.outcome("cuDeviceGetCount", unsafe {
            (self.functions.device_count)(&raw mut count)
        })?;
        Ok(count)
    }

    fn make_current(&self, context: usize) -> Result<(), DriverError> {
        // SAFETY: a handle that the driver gave and that is still retained.
        self.outcome("cuCtxSetCurrent", unsafe {
            (self.functions.set_current)(context)
        })
    }

    /// Memory on the second card, for copies without a way through the host; `None` if there is no such card in reach.
    pub(crate) fn second(&self, bytes: u64) -> Result<Option<Second>, DriverError> {
        if self.cards()? < 2 {
            return Ok(None);
        }
        let f = &self.functions;
        let (mut device, mut can, mut context) = (0, 0, 0);
        // SAFETY: stores into a live integer of the type that it expects.
        self.outcome("cuDeviceGet", unsafe { (f.device_get)(&raw mut device, 1) })?;
        // SAFETY: as above; both are the driver's own numbers.
        self.outcome("cuDeviceCanAccessPeer", unsafe {
            (f.can_access)(&raw mut can, self.device, device)
        })?;
        if can == 0 {
            return Ok(None);
        }
        // SAFETY: stores a handle into a live integer of a pointer's size.
        self.outcome("cuDevicePrimaryCtxRetain", unsafe {
            (f.primary_retain)(&raw mut context, device)
        })?;
        self.make_current(context)?;
        let block = self.alloc(bytes);
        self.make_current(self.context)?;
        // SAFETY: a handle that the driver gave; a context of the first card is current.
        self.outcome("cuCtxEnablePeerAccess", unsafe { (f.enable_peer)(context, 0) })?;
        let block = block?;
        Ok(Some(Second {
            device,
            context,
            block,
        }))
    }

    /// Queues a copy of a block to the second card, as far as both go.
    pub(crate) fn queue_to_second(
        &self,
        to: &Second,
        from: Block,
        stream: Stream,
    ) -> Result<(), DriverError> {
        let ends = [(to.block, to.context), (from, self.context)];
        self.queue_between(ends, stream)
    }

    /// Queues a copy from the second card to a block, as far as both go.
    pub(crate) fn queue_from_second(
        &self,
        to: Block,
        from: &Second,
        stream: Stream,
    ) -> Result<(), DriverError> {
        let ends = [(to, self.context), (from.block, from.context)];
        self.queue_between(ends, stream)
    }

    fn queue_between(&self, [to, from]: [(Block, usize); 2], stream: Stream) -> Result<(), DriverError> {
        let size = usize::try_from(to.0.bytes.min(from.0.bytes)).expect("sizes fit 64-bit machines");
        // SAFETY: takes addresses of cards, which the driver checks, and handles that it gave.
        let code = unsafe {
            (self.functions.peer_queued)(to.0.address, to.1, from.0.address, from.1, size, stream.0)
        };
        self.outcome("cuMemcpyPeerAsync", code)
    }

    /// Gives memory and context there back.
    pub(crate) fn leave_second(&self, second: Second) -> Result<(), DriverError> {
        self.make_current(second.context)?;
        let freed = self.free(second.block);
        self.make_current(self.context)?;
        freed?;
        // SAFETY: takes a number; what was retained is released once.
        self.outcome("cuDevicePrimaryCtxRelease", unsafe {
            (self.functions.primary_release)(second.device)
        })
    }

    /// Waits for all work.
    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: takes nothing.
        self.outcome("cuCtxSynchronize", unsafe { (self.functions.synchronize)() })
    }
}
