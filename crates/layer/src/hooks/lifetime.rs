//! Start, contexts, and the driver's own look-ups.

use core::ffi::CStr;
use core::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use ebb_abi::*;

use crate::bridge::Running;
use crate::hooks::{capture, green, nvml, with};
use crate::library::CUDA;
use crate::symbols::{raw, real};
use crate::{barrier, bridge};

/// Registers this process for the barrier that closes the gate, before the driver makes threads. The kernel does it at once in a process of
/// one thread, and in any other waits some milliseconds for all processors. Where it is refused the gate finds that out by itself.
fn register_early() {
    const REGISTER_PRIVATE_EXPEDITED: core::ffi::c_int = 1 << 4;
    if !barrier::is_off() && !bridge::is_running() {
        // SAFETY: no pointers. Registering twice is registering once.
        unsafe { libc::syscall(libc::SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0) };
        barrier::catch(ebb_layer_core::widen_descriptor_table);
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuInit(Flags: u32) -> CUresult {
    register_early();
    // SAFETY: the program's own call.
    let result = unsafe { raw::cuInit(Flags) };
    if result.is_success() {
        barrier::run(bridge::start);
    }
    result
}

/// # Safety
/// `symbol` is null or ends with a zero byte; `pfn` is null or valid.
unsafe fn route(symbol: *const c_char, pfn: *mut *mut c_void, version: i32, flags: u64) {
    if symbol.is_null() || pfn.is_null() {
        return;
    }
    // SAFETY: not null, and the driver has just written it.
    let found = unsafe { pfn.read() }.expose_provenance();
    // SAFETY: this function's contract.
    let name = unsafe { CStr::from_ptr(symbol) };
    let routed = barrier::catch(AssertUnwindSafe(|| {
        let mut text = [0u8; 96];
        CUDA.route_pointer(found, expected(name, version, flags, &mut text))
    }));
    if let Some(routed) = routed
        && routed != found
    {
        // SAFETY: as above.
        unsafe { pfn.write(core::ptr::with_exposed_provenance_mut(routed)) };
    }
}

/// The symbol behind a name in a version, by our own table; nothing for versions that are newer than it.
fn expected<'a>(name: &CStr, version: i32, flags: u64, text: &'a mut [u8; 96]) -> Option<&'a CStr> {
    if version > CUDA_VERSION {
        return None;
    }
    let per_thread = flags & u64::from(CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.0) != 0;
    match versions::look_up(name.to_str().ok()?, version, per_thread) {
        versions::LookUp::Symbol(symbol) if symbol.len() < text.len() => {
            text[..symbol.len()].copy_from_slice(symbol.as_bytes());
            CStr::from_bytes_until_nul(text).ok()
        }
        _ => None,
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGetProcAddress(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: i32,
    flags: u64,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { raw::cuGetProcAddress(symbol, pfn, cudaVersion, flags) };
    if result.is_success() {
        // SAFETY: the driver accepted the same pointers.
        unsafe { route(symbol, pfn, cudaVersion, flags) };
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: i32,
    flags: u64,
    symbolStatus: *mut CUdriverProcAddressQueryResult,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { raw::cuGetProcAddress_v2(symbol, pfn, cudaVersion, flags, symbolStatus) };
    if result.is_success() {
        // SAFETY: the driver accepted the same pointers.
        unsafe { route(symbol, pfn, cudaVersion, flags) };
    }
    result
}

/// How long a context that finds the card full is tried again, and how often. The daemon keeps room for a context; when several
/// programs start at once it needs a moment to make more.
const CONTEXT_WAIT: Duration = Duration::from_secs(30);
const CONTEXT_PAUSE: Duration = Duration::from_millis(50);

/// Whether a context that the driver had no room for should be tried again: while a daemon may make room, for a bounded time.
pub(super) fn try_again(result: CUresult, since: &mut Option<Instant>) -> bool {
    if result != CUresult::ERROR_OUT_OF_MEMORY {
        return false;
    }
    let served = with(|running| Some(running.engine.may_wait())).unwrap_or(false);
    if !served || since.get_or_insert_with(Instant::now).elapsed() > CONTEXT_WAIT {
        return false;
    }
    std::thread::sleep(CONTEXT_PAUSE);
    true
}

/// What the process has on a managed device now; nothing before its first context.
fn has(running: &Running, dev: CUdevice) -> Option<(usize, u64)> {
    let index = running.index_of(dev)?;
    let device = running.by_index(index)?;
    let bytes = nvml::process_bytes(device.facts.uuid).unwrap_or_default();
    Some((index, bytes.0))
}

/// What the process had on a managed device before something new was made there.
pub(super) fn before(dev: CUdevice) -> Option<(usize, u64)> {
    with(|running| {
        if nvml::is_first() {
            // The first context of this process: it had nothing.
            return Some((running.index_of(dev)?, 0));
        }
        has(running, dev)
    })
}

/// A context was made: the device is managed from now on, and what a further context took is the driver's own.
pub(super) fn context_made(context: *mut CUcontext, dev: CUdevice, before: Option<(usize, u64)>) {
    with(|running| {
        // SAFETY: the driver has just written it.
        let context = unsafe { context.as_ref() }?;
        let index = running.attach(dev, Some(*context))?;
        if let Some((known, before)) = before
            && known == index
        {
            let device = running.by_index(index)?;
            let after = nvml::process_bytes(device.facts.uuid)?.0;
            running.overhead_grows(index, *context, after.saturating_sub(before));
        }
        running.works_on_current();
        Some(())
    });
}

macro_rules! create {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(pctx: *mut CUcontext $(, $parameter: $ty)*, dev: CUdevice) -> CUresult {
            let before = before(dev);
            let mut since = None;
            // SAFETY: the program's own call.
            let mut result = unsafe { real::$name(pctx $(, $parameter)*, dev) };
            while try_again(result, &mut since) {
                // SAFETY: as above; a call that failed has changed nothing.
                result = unsafe { real::$name(pctx $(, $parameter)*, dev) };
            }
            if result.is_success() {
                context_made(pctx, dev, before);
            }
            result
        }
    )*};
}
create! {
    cuCtxCreate(flags: u32);
    cuCtxCreate_v2(flags: u32);
    cuCtxCreate_v3(paramsArray: *mut CUexecAffinityParam, numParams: i32, flags: u32);
    cuCtxCreate_v4(ctxCreateParams: *mut CUctxCreateParams, flags: u32);
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuDevicePrimaryCtxRetain(
    pctx: *mut CUcontext,
    dev: CUdevice,
) -> CUresult {
    // A context that the program holds already is only held once more.
    let is_new = with(|running| running.primary_of(dev).is_none().then_some(())).is_some();
    let before = if is_new { before(dev) } else { None };
    let mut since = None;
    // SAFETY: the program's own call.
    let mut result = unsafe { real::cuDevicePrimaryCtxRetain(pctx, dev) };
    while try_again(result, &mut since) {
        // SAFETY: as above; a call that failed has changed nothing.
        result = unsafe { real::cuDevicePrimaryCtxRetain(pctx, dev) };
    }
    if result.is_success() {
        context_made(pctx, dev, before);
        with(|running| {
            // SAFETY: the driver has just written it.
            running.set_primary(dev, unsafe { pctx.read() });
            Some(())
        });
    }
    result
}

/// A context that is about to go from a device with others: what the driver took for it, and what the process had before.
pub(super) struct Going {
    device: CUdevice,
    took: u64,
    before: u64,
}

impl Going {
    /// `None` if nothing is known to have been taken for it, or if the device goes with it.
    pub(super) fn new(running: &Running, device: CUdevice, took: u64) -> Option<Self> {
        if took == 0 {
            return None;
        }
        let (_, before) = has(running, device)?;
        Some(Self { device, took, before })
    }

    /// It is gone: what the driver gave back counts no longer. Never more than was taken for it, for other threads may free at the same time.
    pub(super) fn gone(self, running: &Running) {
        if let Some((index, after)) = has(running, self.device) {
            running.overhead_shrinks(index, self.before.saturating_sub(after).min(self.took));
        }
    }
}

/// What became of a context before it is destroyed by name.
enum Before {
    /// It is forgotten, and its memory freed.
    Forgotten(Option<Going>),
    /// The driver will refuse it.
    Untouched,
}

/// Before a context is destroyed by name: its memory is freed while its streams still work.
fn before_destroy(context: CUcontext) -> Option<Before> {
    with(|running| {
        let device = running.device_of(context)?;
        if is_held_otherwise(running, device, context) {
            return Some(Before::Untouched);
        }
        let index = running.index_of(device)?;
        // The driver would let running work of the context die; ours must not have its memory taken away under it.
        let _ = capture::without_captures(|| running.quiesce(index));
        let took = running.context_goes(context, true);
        Some(Before::Forgotten(Going::new(running, device, took)))
    })
}

/// Whether a context does not go by its name: the driver refuses to destroy a primary or a green one so, and it stays.
fn is_held_otherwise(running: &Running, device: CUdevice, context: CUcontext) -> bool {
    running.primary_of(device) == Some(context) || green::is_one(context)
}

/// After a context was destroyed by name, whatever kind the driver took it for.
fn after_destroy(running: &Running, context: CUcontext, before: Before) {
    match before {
        Before::Forgotten(Some(going)) => going.gone(running),
        Before::Forgotten(None) => {}
        Before::Untouched => {
            running.context_goes(context, false);
        }
    }
}

macro_rules! destroy {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(ctx: CUcontext) -> CUresult {
            let before = before_destroy(ctx);
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(ctx) };
            if result.is_success() && let Some(before) = before {
                with(|running| { after_destroy(running, ctx, before); Some(()) });
            }
            result
        }
    )*};
}
destroy! { cuCtxDestroy cuCtxDestroy_v2 }

/// After a primary context was let go: if that was the last hold on it, it is gone, and its memory with it. How many holds there
/// are only the driver knows for certain.
pub(super) fn after_primary(running: &Running, dev: CUdevice, before: Option<u64>) {
    let (mut flags, mut active) = (0, 1);
    // SAFETY: valid places for the answers.
    let known = unsafe {
        running
            .table
            .cuDevicePrimaryCtxGetState(dev, &raw mut flags, &raw mut active)
    };
    if known.is_success()
        && active == 0
        && let Some(context) = running.primary_of(dev)
    {
        let took = running.context_goes(context, false);
        if let Some(before) = before {
            Going {
                device: dev,
                took,
                before,
            }
            .gone(running);
        }
    }
}

macro_rules! primary {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name(dev: CUdevice) -> CUresult {
            // What the program made by handles outlives the context, and can be copied only while there is one.
            with(|running| { running.engine.vmm_bring_back(running.index_of(dev)?); Some(()) });
            // The figure is of use only if the device stays managed, with a context of the program's own.
            let before = with(|running| running.has_other_contexts(dev).then(|| has(running, dev))?);
            // SAFETY: the program's own call.
            let result = unsafe { real::$name(dev) };
            if result.is_success() {
                with(|running| { after_primary(running, dev, before.map(|(_, bytes)| bytes)); Some(()) });
            }
            result
        }
    )*};
}
primary! { cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2 }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expected_symbol_is_the_tables() {
        let mut text = [0; 96];
        let mut ask = |name, version, flags| expected(name, version, flags, &mut text).map(CStr::to_owned);
        assert_eq!(ask(c"cuMemAlloc", 13000, 0).as_deref(), Some(c"cuMemAlloc_v2"));
        assert_eq!(
            ask(c"cuMemcpyHtoD", 13000, 2).as_deref(),
            Some(c"cuMemcpyHtoD_v2_ptds")
        );
        assert_eq!(
            ask(c"cuMemAlloc", CUDA_VERSION + 10, 0),
            None,
            "a version that we do not know"
        );
        assert_eq!(ask(c"cuNothing", 13000, 0), None);
    }
}
