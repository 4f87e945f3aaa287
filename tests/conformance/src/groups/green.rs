//! Green contexts: parts of a device with streams of their own.

use std::ptr::null_mut;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;

/// `CU_DEV_RESOURCE_TYPE_SM`, and `CU_GREEN_CTX_DEFAULT_STREAM`.
const MULTIPROCESSORS: CUdevResourceType = CUdevResourceType(1);
const DEFAULT_STREAM: u32 = 1;

/// A green context of the smallest part of device 0.
fn green(cu: Driver) -> Result<CUgreenCtx, CUresult> {
    let (mut whole, mut part) = (CUdevResource::default(), CUdevResource::default());
    cu.cuDeviceGetDevResource(CUdevice(0), &mut whole, MULTIPROCESSORS)
        .ok()?;
    let mut groups = 1;
    cu.cuDevSmResourceSplitByCount(&mut part, &mut groups, &whole, null_mut(), 0, 1)
        .ok()?;
    let (mut description, mut green) = (CUdevResourceDesc(0), CUgreenCtx(0));
    cu.cuDevResourceGenerateDesc(&mut description, &mut part, 1)
        .ok()?;
    cu.cuGreenCtxCreate(&mut green, description, CUdevice(0), DEFAULT_STREAM)
        .ok()?;
    Ok(green)
}

fn context(cu: Driver, green: CUgreenCtx) -> CUcontext {
    let mut context = CUcontext::NULL;
    must("cuCtxFromGreenCtx", cu.cuCtxFromGreenCtx(&mut context, green));
    context
}

fn stream(cu: Driver, green: CUgreenCtx) -> CUstream {
    let mut stream = CUstream::NULL;
    must(
        "cuGreenCtxStreamCreate",
        cu.cuGreenCtxStreamCreate(&mut stream, green, CU_STREAM_NON_BLOCKING.0, 0),
    );
    stream
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "green.work_in_its_stream",
        "A stream of a green context fills memory of the primary context, which waits for it",
        |t, cu| {
            let address = cu.alloc(MIB);
            let green = match green(cu) {
                Ok(green) => green,
                Err(code) => return t.code("green", code),
            };
            let stream = stream(cu, green);
            must("memset", cu.cuMemsetD8Async(address, 4, MIB, stream));
            cu.sync();
            t.see("bytes", compare(&cu.read(address, MIB), &vec![4; MIB]));
            t.code("destroy", cu.cuGreenCtxDestroy(green));
            t.see("bytes", compare(&cu.read(address, MIB), &vec![4; MIB]));
        },
    ),
    Behaviour::new(
        "green.memory_of_its_own",
        "Memory that is allocated while a green context is current is there after it is gone",
        |t, cu| {
            let mut primary = CUcontext::NULL;
            must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut primary));
            let green = match green(cu) {
                Ok(green) => green,
                Err(code) => return t.code("green", code),
            };
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(context(cu, green)));
            let address = cu.alloc(MIB);
            cu.write(address, &pattern(MIB, 3));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(primary));
            t.see("bytes", compare(&cu.read(address, MIB), &pattern(MIB, 3)));
            t.code("destroy", cu.cuGreenCtxDestroy(green));
            t.see("bytes", compare(&cu.read(address, MIB), &pattern(MIB, 3)));
            t.code("free", cu.cuMemFree_v2(address));
        },
    ),
    Behaviour::new(
        "green.is_no_context_to_destroy",
        "The context that a green context is cannot be destroyed by itself",
        |t, cu| {
            let green = match green(cu) {
                Ok(green) => green,
                Err(code) => return t.code("green", code),
            };
            let own = context(cu, green);
            let mut primary = CUcontext::NULL;
            must("cuCtxGetCurrent", cu.cuCtxGetCurrent(&mut primary));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(own));
            let address = cu.alloc(MIB);
            cu.write(address, &pattern(MIB, 9));
            must("cuCtxSetCurrent", cu.cuCtxSetCurrent(primary));
            t.see("refused", cu.cuCtxDestroy_v2(own) != CUresult::SUCCESS);
            // What became of the memory is not promised: driver 580 refuses, and its bytes are lost all the same.
            t.code("destroy", cu.cuGreenCtxDestroy(green));
        },
    ),
];
