//! Launching kernels.

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::kernels::{Launch, MAX_PARAMETERS, offsets};
use crate::process::process;
use crate::stream::{Stream, submit};
use crate::work::Work;

/// What a launch was asked for, however it was asked.
pub(crate) struct Request {
    pub(crate) function: usize,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) parameters: *mut *mut c_void,
    pub(crate) extra: *mut *mut c_void,
}

/// Reads the parameters, checks the shape.
pub(crate) fn prepare(c: &Caller, request: &Request) -> Result<Launch, CUresult> {
    let function = process()
        .functions
        .get(request.function)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let kernel = function.builtin.ok_or(CUresult::ERROR_NOT_SUPPORTED)?;
    let threads = request
        .block
        .iter()
        .try_fold(1_u32, |product, side| product.checked_mul(*side));
    let grid_fits = request.grid[0] <= 0x7fff_ffff && request.grid[1] <= 65535 && request.grid[2] <= 65535;
    if !threads.is_some_and(|threads| (1..=1024).contains(&threads))
        || request.grid.contains(&0)
        || !grid_fits
    {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    if request.shared_bytes > 227 << 10 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let sizes = kernel.parameters();
    let mut parameters = [0_u64; MAX_PARAMETERS];
    if !request.parameters.is_null() {
        for (index, size) in sizes.iter().enumerate() {
            let place = c.get(request.parameters.wrapping_add(index).cast_const())?;
            parameters[index] = read(c, place.cast(), *size)?;
        }
    } else if !request.extra.is_null() {
        let buffer = buffer(c, request.extra)?;
        for (index, (size, offset)) in sizes.iter().zip(offsets(sizes)).enumerate() {
            parameters[index] = read(c, buffer.wrapping_add(offset), *size)?;
        }
    } else if !sizes.is_empty() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let Request {
        function,
        grid,
        block,
        shared_bytes,
        ..
    } = *request;
    Ok(Launch {
        kernel,
        function,
        parameters,
        grid,
        block,
        shared_bytes,
    })
}

/// Before a kernel runs, its context has the local memory that it needs. A launch that needs more than there was takes it here.
pub(crate) fn make_local_room(stream: &Stream, launch: &Launch) -> R {
    let process = process();
    let local = process.functions.get(launch.function).map_or(0, |it| it.local);
    match process.contexts.get(stream.context.handle) {
        Some(context) => context.ensure_local(local),
        None => Ok(()),
    }
}

fn read(c: &Caller, place: *const u8, size: usize) -> Result<u64, CUresult> {
    match size {
        4 => c.get(place.cast::<u32>()).map(u64::from),
        _ => c.get(place.cast::<u64>()),
    }
}

/// The parameter buffer of a launch's `extra` list.
fn buffer(c: &Caller, extra: *mut *mut c_void) -> Result<*const u8, CUresult> {
    let mut found: *const u8 = std::ptr::null();
    let mut at = 0;
    loop {
        match c.get(extra.wrapping_add(at).cast_const())? as usize {
            CU_LAUNCH_PARAM_END => break,
            CU_LAUNCH_PARAM_BUFFER_POINTER => {
                found = c
                    .get(extra.wrapping_add(at + 1).cast_const())?
                    .cast_const()
                    .cast()
            }
            CU_LAUNCH_PARAM_BUFFER_SIZE => {}
            _ => return Err(CUresult::ERROR_INVALID_VALUE),
        }
        at += 2;
    }
    if found.is_null() {
        Err(CUresult::ERROR_INVALID_VALUE)
    } else {
        Ok(found)
    }
}

pub(crate) fn cuLaunchKernel(
    c: &Caller,
    f: CUfunction,
    gridDimX: u32,
    gridDimY: u32,
    gridDimZ: u32,
    blockDimX: u32,
    blockDimY: u32,
    blockDimZ: u32,
    sharedMemBytes: u32,
    hStream: CUstream,
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> R {
    context::current()?;
    let launch = prepare(
        c,
        &Request {
            function: f.0,
            grid: [gridDimX, gridDimY, gridDimZ],
            block: [blockDimX, blockDimY, blockDimZ],
            shared_bytes: sharedMemBytes,
            parameters: kernelParams,
            extra,
        },
    )?;
    let stream = c.stream(hStream)?;
    stream.context.check()?;
    if !stream.capturing.load(std::sync::atomic::Ordering::Acquire) {
        make_local_room(&stream, &launch)?;
    }
    submit(&stream, Work::Kernel(launch)).map(drop)
}

pub(crate) fn cuLaunchKernelEx(
    c: &Caller,
    config: *const CUlaunchConfig,
    f: CUfunction,
    kernelParams: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> R {
    let config = c.get(config)?;
    cuLaunchKernel(
        c,
        f,
        config.gridDimX,
        config.gridDimY,
        config.gridDimZ,
        config.blockDimX,
        config.blockDimY,
        config.blockDimZ,
        config.sharedMemBytes,
        config.hStream,
        kernelParams,
        extra,
    )
}

pub(crate) fn cuLaunchCooperativeKernel(
    c: &Caller,
    f: CUfunction,
    gridDimX: u32,
    gridDimY: u32,
    gridDimZ: u32,
    blockDimX: u32,
    blockDimY: u32,
    blockDimZ: u32,
    sharedMemBytes: u32,
    hStream: CUstream,
    kernelParams: *mut *mut c_void,
) -> R {
    cuLaunchKernel(
        c,
        f,
        gridDimX,
        gridDimY,
        gridDimZ,
        blockDimX,
        blockDimY,
        blockDimZ,
        sharedMemBytes,
        hStream,
        kernelParams,
        std::ptr::null_mut(),
    )
}
