//! Copies of lines to and from one-dimensional arrays: the older calls.

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::copy::{When, copy, line};
use crate::memory::array::find;

/// Where a line of bytes in an array begins.
fn at(array: CUarray, offset: usize, bytes: usize) -> Result<u64, CUresult> {
    let (address, ..) = find(array)?
        .side([offset as u64, 0, 0], [bytes as u64, 1, 1])
        .ok_or(CUresult::ERROR_INVALID_VALUE)?;
    Ok(address)
}

fn run(c: &Caller, stream: CUstream, to: u64, from: u64, bytes: usize, when: When) -> R {
    context::current()?;
    if to == 0 || from == 0 {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    copy(&c.stream(stream)?, line(to, from, bytes as u64), when)
}

pub(crate) fn cuMemcpyAtoA_v2(
    c: &Caller,
    dstArray: CUarray,
    dstOffset: usize,
    srcArray: CUarray,
    srcOffset: usize,
    ByteCount: usize,
) -> R {
    let (to, from) = (
        at(dstArray, dstOffset, ByteCount)?,
        at(srcArray, srcOffset, ByteCount)?,
    );
    run(c, CUstream::NULL, to, from, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyAtoD_v2(
    c: &Caller,
    dstDevice: CUdeviceptr,
    srcArray: CUarray,
    srcOffset: usize,
    ByteCount: usize,
) -> R {
    let from = at(srcArray, srcOffset, ByteCount)?;
    run(c, CUstream::NULL, dstDevice.0, from, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyDtoA_v2(
    c: &Caller,
    dstArray: CUarray,
    dstOffset: usize,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> R {
    let to = at(dstArray, dstOffset, ByteCount)?;
    run(c, CUstream::NULL, to, srcDevice.0, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyAtoH_v2(
    c: &Caller,
    dstHost: *mut c_void,
    srcArray: CUarray,
    srcOffset: usize,
    ByteCount: usize,
) -> R {
    let from = at(srcArray, srcOffset, ByteCount)?;
    run(c, CUstream::NULL, dstHost as u64, from, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyAtoHAsync_v2(
    c: &Caller,
    dstHost: *mut c_void,
    srcArray: CUarray,
    srcOffset: usize,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    let from = at(srcArray, srcOffset, ByteCount)?;
    run(c, hStream, dstHost as u64, from, ByteCount, When::Later)
}

pub(crate) fn cuMemcpyHtoA_v2(
    c: &Caller,
    dstArray: CUarray,
    dstOffset: usize,
    srcHost: *const c_void,
    ByteCount: usize,
) -> R {
    let to = at(dstArray, dstOffset, ByteCount)?;
    run(c, CUstream::NULL, to, srcHost as u64, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyHtoAAsync_v2(
    c: &Caller,
    dstArray: CUarray,
    dstOffset: usize,
    srcHost: *const c_void,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    let to = at(dstArray, dstOffset, ByteCount)?;
    run(c, hStream, to, srcHost as u64, ByteCount, When::Later)
}
