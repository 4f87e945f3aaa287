//! Green contexts: parts of a device under its primary context. Each has streams of its own, whose work a release has to wait for, and holds the
//! primary context, which may be there for its sake alone. So it counts as a context of the device from its first moment; memory is not freed
//! with it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;

use crate::hooks::lifetime::{self, Going};
use crate::hooks::{capture, with};
use crate::symbols::real;

/// The contexts that green ones are.
static ALL: Mutex<Vec<CUcontext>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn all() -> MutexGuard<'static, Vec<CUcontext>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn change(change: impl FnOnce(&mut Vec<CUcontext>)) {
    let mut all = all();
    change(&mut all);
    COUNT.store(all.len(), Ordering::Release);
}

/// Whether a context is a green one.
pub(crate) fn is_one(context: CUcontext) -> bool {
    COUNT.load(Ordering::Acquire) != 0 && all().contains(&context)
}

/// The context that a green context is to the rest of the interface.
fn context_of(green: CUgreenCtx) -> Option<CUcontext> {
    let mut context = CUcontext::NULL;
    // SAFETY: a place for the answer; the driver checks the handle.
    let known = unsafe { real::cuCtxFromGreenCtx(&raw mut context, green) };
    (known.is_success() && !context.is_null()).then_some(context)
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGreenCtxCreate(
    phCtx: *mut CUgreenCtx,
    desc: CUdevResourceDesc,
    dev: CUdevice,
    flags: u32,
) -> CUresult {
    let before = lifetime::before(dev);
    let mut since = None;
    // SAFETY: the program's own call.
    let mut result = unsafe { real::cuGreenCtxCreate(phCtx, desc, dev, flags) };
    while lifetime::try_again(result, &mut since) {
        // SAFETY: as above; a call that failed has changed nothing.
        result = unsafe { real::cuGreenCtxCreate(phCtx, desc, dev, flags) };
    }
    // SAFETY: the driver has just written it.
    if let Some(Some(mut context)) = result.is_success().then(|| context_of(unsafe { phCtx.read() })) {
        change(|all| all.push(context));
        lifetime::context_made(&raw mut context, dev, before);
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuGreenCtxDestroy(hCtx: CUgreenCtx) -> CUresult {
    // Before: its streams still work, and can be waited for.
    let gone = with(|running| {
        let context = context_of(hCtx)?;
        let device = running.device_of(context)?;
        let index = running.index_of(device)?;
        // What the program made by handles outlives the context, and can be copied only while there is one.
        running.engine.vmm_bring_back(index);
        let _ = capture::without_captures(|| running.quiesce(index));
        let took = running.part_goes(context);
        Some((device, context, Going::new(running, device, took)))
    });
    // SAFETY: the program's own call.
    let result = unsafe { real::cuGreenCtxDestroy(hCtx) };
    if let Some((device, context, going)) = gone {
        with(|running| {
            if result.is_success() {
                change(|all| all.retain(|known| *known != context));
                if let Some(going) = going {
                    going.gone(running);
                }
                lifetime::after_primary(running, device, None);
            } else {
                running.attach(device, Some(context));
            }
            Some(())
        });
    }
    result
}
