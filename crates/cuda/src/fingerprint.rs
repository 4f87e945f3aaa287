//! The kernel that fingerprints memory: where it comes from, and how it is run.
//!
//! ```text
//!   text -- compile, while the program runs --> image -- load, when nothing runs --> module of one context
//! ```
//! The text (`kernels/fingerprint.ptx`) is compiled ahead, which is work of the processor alone. Loading may make the
//! driver wait for the context's work, and hold locks meanwhile; a program whose kernels wait for each other would hang
//! on that. So a module is loaded by the first call, when nothing runs by that call's contract, which takes no millisecond.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_device::DeviceError;
use ebb_device::fingerprint::{self, Fingerprint, Keys, NEAR_KEYS};

use crate::device::CudaDevice;
use crate::{DriverTable, Scope, beside, check};

/// With a zero at its end, as the driver wants it.
const TEXT: &str = concat!(include_str!("../kernels/fingerprint.ptx"), "\0");
/// Blocks of one launch, as `kernels/fingerprint.cu` has it: 32 GiB.
const MAX_BLOCKS: usize = 16384;
const THREADS: u32 = 256;
/// Words that the kernel writes for a block.
const FOUND: usize = 5;
/// What its variables take of the card, in the granules that the driver takes: all of the module but a little code.
const WORTH: u64 =
    ((MAX_BLOCKS * (16 + FOUND * 8) + (fingerprint::KEYS + NEAR_KEYS) * 4) as u64).next_multiple_of(2 << 20);

/// What a device has for it.
///
/// # Locks
/// `loaded` comes before the device's `contexts` and `lanes`, and is held for a whole call. `image` is held while it is compiled.
#[derive(Debug, Default)]
pub(crate) struct Printing {
    /// Made once, so that fingerprints can be compared as long as the device lives.
    keys: Mutex<Option<Keys>>,
    image: Mutex<Image>,
    loaded: Mutex<Option<Loaded>>,
    /// Bytes of the card that the module took, as far as can be seen.
    taken: AtomicU64,
}

#[derive(Debug, Default)]
enum Image {
    /// Nobody has tried.
    #[default]
    None,
    /// The driver would not: it gets the text.
    Text,
    Compiled(Vec<u64>),
}

/// The kernel in a context.
#[derive(Debug)]
struct Loaded {
    context: CUcontext,
    module: CUmodule,
    function: CUfunction,
    keys: CUdeviceptr,
    blocks: CUdeviceptr,
    found: CUdeviceptr,
}

impl Printing {
    /// Bytes of the card that the module takes, as far as could be seen.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    fn loaded(&self) -> MutexGuard<'_, Option<Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn image(&self) -> MutexGuard<'_, Image> {
        self.image.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys, from the system's randomness at the first call.
    fn keys(&self) -> Result<Keys, DeviceError> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(keys) = &*keys {
            return Ok(keys.clone());
        }
        let fresh = Keys::random(|mut bytes| {
            while !bytes.is_empty() {
                match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
                    Ok(n) => bytes = &mut bytes[n..],
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        let fresh = fresh.map_err(|_| DeviceError::Driver {
            code: CUresult::ERROR_OPERATING_SYSTEM.0,
            call: "getrandom",
        })?;
        Ok(keys.insert(fresh).clone())
    }

    /// The context is about to be destroyed.
    pub(crate) fn leave(&self, table: &DriverTable, context: CUcontext) {
        let mut loaded = self.loaded();
        if let Some(here) = loaded.take_if(|loaded| loaded.context == context) {
            self.taken.store(0, Ordering::Relaxed);
            if let Ok(_scope) = Scope::enter(table, context) {
                unload(table, here.module);
            }
        }
    }

    /// The context is gone, and the module with it.
    pub(crate) fn forget(&self, context: CUcontext) {
        if self
            .loaded()
            .take_if(|loaded| loaded.context == context)
            .is_some()
        {
            self.taken.store(0, Ordering::Relaxed);
        }
    }
}

impl CudaDevice {
    /// The keys of its fingerprints.
    ///
    /// # Errors
    /// [`DeviceError`] if the system gives no random bytes.
    pub fn fingerprint_keys(&self) -> Result<Keys, DeviceError> {
        self.printing.keys()
    }

    /// Compiles the kernel, once.
    pub(crate) fn compile_fingerprints(&self) {
        let mut image = self.printing.image();
        if !matches!(*image, Image::None) {
            return;
        }
        // Without a context nothing can be copied, and nothing will be asked.
        if let Ok((_scope, _)) = self.first_context() {
            *image = compile(&self.table).map_or(Image::Text, Image::Compiled);
        }
    }

    pub(crate) fn fingerprints(&self, ranges: &[(u64, u64)]) -> Result<Vec<Fingerprint>, DeviceError> {
        let mut blocks: Vec<u64> = Vec::new();
        for (at, len) in ranges {
            for (at, len) in fingerprint::blocks(*at, *len) {
                blocks.extend([at, len]);
            }
        }
        let mut prints = Vec::with_capacity(blocks.len() / 2);
        if blocks.is_empty() {
            return Ok(prints);
        }
        let mut loaded = self.printing.loaded();
        let (_scope, first) = self.first_context()?;
        let stream = self.look_stream(&mut self.lanes(), first)?;
        // A module of another context died with it, or was unloaded before it.
        let here = match loaded.take().filter(|here| here.context == first) {
            Some(here) => here,
            None => self.load_fingerprints(first, stream)?,
        };
        let here = loaded.insert(here);
        for some in blocks.chunks(2 * MAX_BLOCKS) {
            let mut found = vec![0u64; some.len() / 2 * FOUND];
            here.run(&self.table, stream, some, &mut found)?;
            prints.extend(
                found
                    .as_chunks::<FOUND>()
                    .0
                    .iter()
                    .map(|[a, b, c, d, any]| Fingerprint {
                        sums: [*a, *b, *c, *d],
                        zero: *any == 0,
                    }),
            );
        }
        Ok(prints)
    }

    /// Loads the kernel into the current context, with its keys.
    fn load_fingerprints(&self, context: CUcontext, stream: CUstream) -> Result<Loaded, DeviceError> {
        let table = &*self.table;
        let keys = self.printing.keys()?;
        let image = self.printing.image();
        let from: *const c_void = match &*image {
            Image::Compiled(image) => image.as_ptr().cast(),
            Image::None | Image::Text => TEXT.as_ptr().cast(),
        };
        let mut module = CUmodule::NULL;
        let before = beside::occupied(table);
        // SAFETY: a valid place, and an image that the driver has made itself or text with a zero at its end. Both outlive the call.
        check("cuModuleLoadData", unsafe {
            table.cuModuleLoadData(&raw mut module, from)
        })?;
        let found = || {
            let near = variable(table, module, c"ebb_print_near", NEAR_KEYS * 4)?;
            let words = keys.words();
            let loaded = Loaded {
                context,
                module,
                function: function(table, module, c"ebb_print")?,
                keys: variable(table, module, c"ebb_print_keys", fingerprint::KEYS * 4)?,
                blocks: variable(table, module, c"ebb_print_blocks", MAX_BLOCKS * 16)?,
                found: variable(table, module, c"ebb_print_found", MAX_BLOCKS * FOUND * 8)?,
            };
            upload(table, near, &words[..NEAR_KEYS], stream)?;
            upload(table, loaded.keys, words, stream)?;
            Ok(loaded)
        };
        let loaded = found().inspect_err(|_| unload(table, module))?;
        // Nothing, where the driver had room for it. Others may take or give at the same time: no more than it can need.
        let taken = before.and_then(|before| Ok(beside::occupied(table)?.saturating_sub(before)));
        self.printing
            .taken
            .store(taken.unwrap_or(WORTH).min(WORTH), Ordering::Relaxed);
        Ok(loaded)
    }
}

impl Loaded {
    /// One launch: a block for each pair of words, and what came of it.
    fn run(
        &self,
        table: &DriverTable,
        stream: CUstream,
        blocks: &[u64],
        found: &mut [u64],
    ) -> Result<(), DeviceError> {
        let count = u32::try_from(blocks.len() / 2).unwrap_or(u32::MAX);
        debug_assert!(blocks.len() <= 2 * MAX_BLOCKS && found.len() == blocks.len() / 2 * FOUND);
        upload(table, self.blocks, blocks, stream)?;
        let (mut first, mut second, mut third) = (self.blocks, self.keys, self.found);
        let mut parameters: [*mut c_void; 3] = [
            (&raw mut first).cast(),
            (&raw mut second).cast(),
            (&raw mut third).cast(),
        ];
        // SAFETY: a kernel of three addresses, which are read before the call returns. That the blocks may be read is the
        // contract of `DeviceMemory::fingerprint`; they are not more than the variables have room for.
        check("cuLaunchKernel", unsafe {
            table.cuLaunchKernel(
                self.function,
                count,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                core::ptr::null_mut(),
            )
        })?;
        // SAFETY: `found` is a place for so many bytes, and lives until the stream was waited for, which is the next call;
        // if that fails the context is broken, and the driver writes nothing more.
        let answer = check("cuMemcpyDtoHAsync", unsafe {
            table.cuMemcpyDtoHAsync_v2(found.as_mut_ptr().cast(), self.found, size_of_val(found), stream)
        });
        // SAFETY: a stream of ours, which nobody captures.
        let waited = check("cuStreamSynchronize", unsafe {
            table.cuStreamSynchronize(stream)
        });
        answer.and(waited)
    }
}

/// Copies words to a variable. They are read before the call returns: they are not pinned.
fn upload<T: Copy>(
    table: &DriverTable,
    to: CUdeviceptr,
    words: &[T],
    stream: CUstream,
) -> Result<(), DeviceError> {
    // SAFETY: `words` may be read; the variable is at least as long (`variable` has asked).
    check("cuMemcpyHtoDAsync", unsafe {
        table.cuMemcpyHtoDAsync_v2(to, words.as_ptr().cast(), size_of_val(words), stream)
    })
}

fn function(table: &DriverTable, module: CUmodule, name: &CStr) -> Result<CUfunction, DeviceError> {
    let mut function = CUfunction::NULL;
    // SAFETY: a valid place, a module of ours, a name with its zero.
    check("cuModuleGetFunction", unsafe {
        table.cuModuleGetFunction(&raw mut function, module, name.as_ptr())
    })?;
    Ok(function)
}

/// Where a variable of so many bytes is.
fn variable(
    table: &DriverTable,
    module: CUmodule,
    name: &CStr,
    bytes: usize,
) -> Result<CUdeviceptr, DeviceError> {
    let (mut at, mut size) = (CUdeviceptr::NULL, 0usize);
    // SAFETY: valid places, a module of ours, a name with its zero.
    check("cuModuleGetGlobal", unsafe {
        table.cuModuleGetGlobal_v2(&raw mut at, &raw mut size, module, name.as_ptr())
    })?;
    if size < bytes {
        return Err(DeviceError::Driver {
            code: CUresult::ERROR_INVALID_IMAGE.0,
            call: "cuModuleGetGlobal",
        });
    }
    Ok(at)
}

fn unload(table: &DriverTable, module: CUmodule) {
    // SAFETY: a module of ours with no work on it, named here for the last time.
    let _ = unsafe { table.cuModuleUnload(module) };
}

/// The kernel for the current context's device, in words, so that it is aligned. `None` if the driver does not compile.
fn compile(table: &DriverTable) -> Option<Vec<u64>> {
    let mut state = CUlinkState::NULL;
    let none = core::ptr::null_mut;
    // SAFETY: no options, a valid place.
    let begun = unsafe { table.cuLinkCreate_v2(0, none(), core::ptr::null_mut(), &raw mut state) };
    if !begun.is_success() {
        return None;
    }
    let image = (|| {
        // SAFETY: a state that is begun; text with a zero at its end, which is only read; no name, no options.
        let given = unsafe {
            table.cuLinkAddData_v2(
                state,
                CU_JIT_INPUT_PTX,
                TEXT.as_ptr().cast_mut().cast(),
                TEXT.len(),
                core::ptr::null(),
                0,
                none(),
                core::ptr::null_mut(),
            )
        };
        let (mut image, mut bytes): (*mut c_void, usize) = (core::ptr::null_mut(), 0);
        // SAFETY: the same state, valid places.
        let made = unsafe { table.cuLinkComplete(state, &raw mut image, &raw mut bytes) };
        if !given.is_success() || !made.is_success() || image.is_null() || bytes == 0 {
            return None;
        }
        let mut copy = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: the driver's image is `bytes` long and lives until the state ends; `copy` is as long and another place.
        unsafe { core::ptr::copy_nonoverlapping(image.cast::<u8>(), copy.as_mut_ptr().cast(), bytes) };
        Some(copy)
    })();
    // SAFETY: the state, named for the last time.
    let _ = unsafe { table.cuLinkDestroy(state) };
    image
}
