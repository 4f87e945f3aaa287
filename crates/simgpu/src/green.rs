//! Green contexts: a part of a device's multiprocessors under the device's primary context, with streams of its own.
//!
//! They cost nothing besides the primary context, which each of them holds. Memory that is allocated in one is not freed with it. All
//! multiprocessors of the simulation are alike, so that parts only count them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context::{Context, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRetain};
use crate::handles::fresh;
use crate::process::{lock, process};
use crate::stream::Stream;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: u32 = 1;
/// The device's multiprocessors, and the fewest that make a part; parts are multiples of that.
const ALL: u32 = 8;
const LEAST: u32 = 2;

#[derive(Debug)]
struct Green {
    context: Arc<Context>,
    device: CUdevice,
    multiprocessors: u32,
}

static GREENS: Mutex<BTreeMap<usize, Green>> = Mutex::new(BTreeMap::new());
static DESCRIPTIONS: Mutex<BTreeMap<usize, u32>> = Mutex::new(BTreeMap::new());

fn resource(multiprocessors: u32) -> CUdevResource {
    let mut resource = CUdevResource {
        type_: CUdevResourceType(SM),
        ..CUdevResource::default()
    };
    resource.u[0] = u64::from(multiprocessors) | u64::from(LEAST) << 32;
    resource.u[1] = u64::from(LEAST);
    resource
}

fn counted(resource: &CUdevResource) -> Result<u32, CUresult> {
    let count = resource.u[0] as u32;
    if resource.type_.0 != SM || count == 0 || count > ALL {
        return Err(CUresult::ERROR_INVALID_RESOURCE_TYPE);
    }
    Ok(count)
}

fn context_of(green: CUgreenCtx) -> Result<Arc<Context>, CUresult> {
    let greens = lock(&GREENS);
    let green = greens.get(&green.0).ok_or(INVALID)?;
    Ok(Arc::clone(&green.context))
}

pub(crate) fn cuDeviceGetDevResource(
    c: &Caller,
    device: CUdevice,
    resource_: *mut CUdevResource,
    type_: CUdevResourceType,
) -> R {
    process().physical(device.0)?;
    if type_.0 != SM {
        return Err(CUresult::ERROR_INVALID_RESOURCE_TYPE);
    }
    c.put(resource_, resource(ALL))
}

pub(crate) fn cuDevSmResourceSplitByCount(
    c: &Caller,
    result: *mut CUdevResource,
    nbGroups: *mut u32,
    input: *const CUdevResource,
    remainder: *mut CUdevResource,
    flags: u32,
    minCount: u32,
) -> R {
    let all = counted(&c.get(input)?)?;
    if flags != 0 || minCount > all {
        return Err(CUresult::ERROR_INVALID_RESOURCE_CONFIGURATION);
    }
    let each = minCount.max(1).next_multiple_of(LEAST);
    let possible = all / each;
    let asked = c.get(nbGroups.cast_const())?;
    let groups = if result.is_null() {
        possible
    } else {
        asked.min(possible)
    };
    c.put(nbGroups, groups)?;
    if result.is_null() {
        return Ok(());
    }
    for group in 0..groups {
        c.put(result.wrapping_add(group as usize), resource(each))?;
    }
    let left = all - groups * each;
    let rest = if left == 0 {
        CUdevResource::default()
    } else {
        resource(left)
    };
    c.put_optional(remainder, rest);
    Ok(())
}

pub(crate) fn cuDevResourceGenerateDesc(
    c: &Caller,
    phDesc: *mut CUdevResourceDesc,
    resources: *mut CUdevResource,
    nbResources: u32,
) -> R {
    let mut count = 0;
    for one in c.array(resources.cast_const(), nbResources as usize)? {
        count += counted(&one)?;
    }
    if count == 0 {
        return Err(INVALID);
    }
    let handle = fresh();
    lock(&DESCRIPTIONS).insert(handle, count);
    c.put(phDesc, CUdevResourceDesc(handle))
}

pub(crate) fn cuGreenCtxCreate(
    c: &Caller,
    phCtx: *mut CUgreenCtx,
    desc: CUdevResourceDesc,
    dev: CUdevice,
    flags: u32,
) -> R {
    let multiprocessors = lock(&DESCRIPTIONS).get(&desc.0).copied().ok_or(INVALID)?;
    // `CU_GREEN_CTX_DEFAULT_STREAM` or nothing.
    if phCtx.is_null() || flags > 1 {
        return Err(INVALID);
    }
    let mut primary = CUcontext::NULL;
    cuDevicePrimaryCtxRetain(c, &mut primary, dev)?;
    let context = match Context::green(dev.0, fresh()) {
        Ok(context) => context,
        Err(code) => {
            cuDevicePrimaryCtxRelease_v2(c, dev)?;
            return Err(code);
        }
    };
    let handle = fresh();
    lock(&GREENS).insert(
        handle,
        Green {
            context,
            device: dev,
            multiprocessors,
        },
    );
    c.put(phCtx, CUgreenCtx(handle))
}

pub(crate) fn cuGreenCtxDestroy(c: &Caller, hCtx: CUgreenCtx) -> R {
    let green = lock(&GREENS).remove(&hCtx.0).ok_or(INVALID)?;
    green.context.end();
    cuDevicePrimaryCtxRelease_v2(c, green.device)
}

pub(crate) fn cuCtxFromGreenCtx(c: &Caller, pContext: *mut CUcontext, hCtx: CUgreenCtx) -> R {
    c.put(pContext, CUcontext(context_of(hCtx)?.shared.handle))
}

pub(crate) fn cuGreenCtxGetDevResource(
    c: &Caller,
    hCtx: CUgreenCtx,
    resource_: *mut CUdevResource,
    type_: CUdevResourceType,
) -> R {
    let count = lock(&GREENS).get(&hCtx.0).ok_or(INVALID)?.multiprocessors;
    if type_.0 != SM {
        return Err(CUresult::ERROR_INVALID_RESOURCE_TYPE);
    }
    c.put(resource_, resource(count))
}

pub(crate) fn cuGreenCtxStreamCreate(
    c: &Caller,
    phStream: *mut CUstream,
    greenCtx: CUgreenCtx,
    flags: u32,
    priority: i32,
) -> R {
    let context = context_of(greenCtx)?;
    if flags != CU_STREAM_NON_BLOCKING.0 || phStream.is_null() {
        return Err(INVALID);
    }
    let stream = Stream::new(Arc::clone(&context.shared), flags, priority.clamp(-5, 0));
    context.shared.add_stream(Arc::clone(&stream));
    process().streams.insert(stream.handle, Arc::clone(&stream));
    c.put(phStream, CUstream(stream.handle))
}

pub(crate) fn cuGreenCtxRecordEvent(c: &Caller, hCtx: CUgreenCtx, hEvent: CUevent) -> R {
    let context = CUcontext(context_of(hCtx)?.shared.handle);
    crate::context::cuCtxRecordEvent(c, context, hEvent)
}

pub(crate) fn cuGreenCtxWaitEvent(c: &Caller, hCtx: CUgreenCtx, hEvent: CUevent) -> R {
    let context = CUcontext(context_of(hCtx)?.shared.handle);
    crate::context::cuCtxWaitEvent(c, context, hEvent)
}
