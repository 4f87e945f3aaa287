//! The copy and fill calls: they check their arguments and submit one piece of work.

use std::sync::Arc;

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::capture;
use crate::context;
use crate::memory::Place;
use crate::process::process;
use crate::stream::{Stream, submit};
use crate::work::{Copy, Fill, Side, Work};

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

/// Whether a call may return before its work is done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    Now,
    Later,
}

pub(crate) fn line(to: u64, from: u64, bytes: u64) -> Copy {
    Copy {
        to: Side::line(to),
        from: Side::line(from),
        width: bytes,
        height: 1,
        depth: 1,
    }
}

/// Whether an address is host memory that the driver cannot reach later on its own.
fn is_pageable(address: u64) -> bool {
    process().memory.read().place(address, 1, 0, false) == Place::Pageable
}

fn is_host(address: u64) -> bool {
    !process().memory.read().is_device(address)
}

/// As much as the driver checks when a copy is submitted: a device address must lie in somebody's reservation, and a copy
/// must not leave the blocks of an allocation. Whether memory is mapped there is found out when the copy runs; but mapped memory
/// of another device than the one that copies (`by`) has to let it in already now.
fn check_known(address: u64, bytes: u64, by: Option<u32>) -> R {
    let tables = process().memory.read();
    if !tables.is_device(address) {
        return Ok(());
    }
    let (base, reservation) = tables.reservation_at(address).ok_or(INVALID)?;
    let shut = by.is_some_and(|device| {
        let owner = tables
            .mapping_at(address)
            .and_then(|(_, mapping)| mapping.phys.device);
        owner.is_some_and(|owner| owner != device)
            && tables.place_for_copy(address, 1, device, false) == Place::Fault
    });
    if shut || address + bytes > base + reservation.size {
        Err(INVALID)
    } else {
        Ok(())
    }
}

pub(crate) fn copy(stream: &Arc<Stream>, copy: Copy, when: When) -> R {
    let bytes = copy.width * copy.height * copy.depth;
    if bytes == 0 {
        return stream.context.check();
    }
    let device = stream.context.device;
    check_known(copy.to.address, copy.width, Some(device))?;
    check_known(copy.from.address, copy.width, Some(device))?;
    let captured = stream.capturing.load(std::sync::atomic::Ordering::Acquire);
    if when == When::Now && captured {
        capture::refuse_captured(stream)?;
    }
    let ticket = submit(stream, Work::Copy(copy))?;
    if captured {
        return Ok(());
    }
    // Copies between devices never wait. With pageable memory the driver stages the bytes before it returns, so that the program
    // may use its buffer again: waiting has the same effect.
    let host = is_host(copy.to.address) || is_host(copy.from.address);
    let staged = is_pageable(copy.to.address) || is_pageable(copy.from.address);
    if (when == When::Now && host) || staged {
        stream.wait_for(ticket);
        return stream.context.check();
    }
    Ok(())
}

fn linear(c: &Caller, stream: CUstream, to: u64, from: u64, bytes: usize, when: When) -> R {
    context::current()?;
    if bytes > 0 && (to == 0 || from == 0) {
        return Err(INVALID);
    }
    copy(&c.stream(stream)?, line(to, from, bytes as u64), when)
}

pub(crate) fn cuMemcpy(c: &Caller, dst: CUdeviceptr, src: CUdeviceptr, ByteCount: usize) -> R {
    linear(c, CUstream::NULL, dst.0, src.0, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyAsync(
    c: &Caller,
    dst: CUdeviceptr,
    src: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    linear(c, hStream, dst.0, src.0, ByteCount, When::Later)
}

pub(crate) fn cuMemcpyHtoD_v2(
    c: &Caller,
    dstDevice: CUdeviceptr,
    srcHost: *const c_void,
    ByteCount: usize,
) -> R {
    linear(
        c,
        CUstream::NULL,
        dstDevice.0,
        srcHost as u64,
        ByteCount,
        When::Now,
    )
}

pub(crate) fn cuMemcpyDtoH_v2(
    c: &Caller,
    dstHost: *mut c_void,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> R {
    linear(
        c,
        CUstream::NULL,
        dstHost as u64,
        srcDevice.0,
        ByteCount,
        When::Now,
    )
}

pub(crate) fn cuMemcpyDtoD_v2(
    c: &Caller,
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
) -> R {
    linear(c, CUstream::NULL, dstDevice.0, srcDevice.0, ByteCount, When::Now)
}

pub(crate) fn cuMemcpyHtoDAsync_v2(
    c: &Caller,
    dstDevice: CUdeviceptr,
    srcHost: *const c_void,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    linear(c, hStream, dstDevice.0, srcHost as u64, ByteCount, When::Later)
}

pub(crate) fn cuMemcpyDtoHAsync_v2(
    c: &Caller,
    dstHost: *mut c_void,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    linear(c, hStream, dstHost as u64, srcDevice.0, ByteCount, When::Later)
}

pub(crate) fn cuMemcpyDtoDAsync_v2(
    c: &Caller,
    dstDevice: CUdeviceptr,
    srcDevice: CUdeviceptr,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    linear(c, hStream, dstDevice.0, srcDevice.0, ByteCount, When::Later)
}

pub(crate) fn cuMemcpyPeer(
    c: &Caller,
    dstDevice: CUdeviceptr,
    dstContext: CUcontext,
    srcDevice: CUdeviceptr,
    srcContext: CUcontext,
    ByteCount: usize,
) -> R {
    context::by_handle(dstContext)?;
    context::by_handle(srcContext)?;
    peer(c, CUstream::NULL, dstDevice, srcDevice, ByteCount)
}

pub(crate) fn cuMemcpyPeerAsync(
    c: &Caller,
    dstDevice: CUdeviceptr,
    dstContext: CUcontext,
    srcDevice: CUdeviceptr,
    srcContext: CUcontext,
    ByteCount: usize,
    hStream: CUstream,
) -> R {
    context::by_handle(dstContext)?;
    context::by_handle(srcContext)?;
    peer(c, hStream, dstDevice, srcDevice, ByteCount)
}

/// A copy between devices needs no access of one to the other's memory: it goes through a buffer.
fn peer(c: &Caller, stream: CUstream, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> R {
    context::current()?;
    peer_copy(&c.stream(stream)?, line(to.0, from.0, bytes as u64))
}

fn peer_copy(stream: &Arc<Stream>, copy: Copy) -> R {
    if copy.width * copy.height * copy.depth == 0 {
        return stream.context.check();
    }
    check_known(copy.to.address, copy.width, None)?;
    check_known(copy.from.address, copy.width, None)?;
    submit(stream, Work::PeerCopy(copy)).map(drop)
}

/// The same copy without its contexts, which are looked at.
fn without_contexts(p: &CUDA_MEMCPY3D_PEER) -> Result<CUDA_MEMCPY3D, CUresult> {
    context::by_handle(p.dstContext)?;
    context::by_handle(p.srcContext)?;
    Ok(CUDA_MEMCPY3D {
        srcXInBytes: p.srcXInBytes,
        srcY: p.srcY,
        srcZ: p.srcZ,
        srcLOD: p.srcLOD,
        srcMemoryType: p.srcMemoryType,
        srcHost: p.srcHost,
        srcDevice: p.srcDevice,
        srcArray: p.srcArray,
        srcPitch: p.srcPitch,
        srcHeight: p.srcHeight,
        dstXInBytes: p.dstXInBytes,
        dstY: p.dstY,
        dstZ: p.dstZ,
        dstLOD: p.dstLOD,
        dstMemoryType: p.dstMemoryType,
        dstHost: p.dstHost,
        dstDevice: p.dstDevice,
        dstArray: p.dstArray,
        dstPitch: p.dstPitch,
        dstHeight: p.dstHeight,
        WidthInBytes: p.WidthInBytes,
        Height: p.Height,
        Depth: p.Depth,
        ..CUDA_MEMCPY3D::default()
    })
}

pub(crate) fn cuMemcpy3DPeer(c: &Caller, pCopy: *const CUDA_MEMCPY3D_PEER) -> R {
    cuMemcpy3DPeerAsync(c, pCopy, CUstream::NULL)
}

pub(crate) fn cuMemcpy3DPeerAsync(c: &Caller, pCopy: *const CUDA_MEMCPY3D_PEER, hStream: CUstream) -> R {
    context::current()?;
    let copy = describe_3d(&without_contexts(&c.get(pCopy)?)?)?;
    peer_copy(&c.stream(hStream)?, copy)
}

/// The address and the shape of one side of a 2D or 3D copy.
fn side(
    kind: CUmemorytype,
    host: u64,
    device: CUdeviceptr,
    pitch: usize,
    rows: usize,
    at: [usize; 3],
    array: CUarray,
    extent: [usize; 3],
) -> Result<Side, CUresult> {
    if kind == CU_MEMORYTYPE_ARRAY {
        let [at, extent] = [at, extent].map(|place| place.map(|part| part as u64));
        let side = crate::memory::array::find(array)?.side(at, extent);
        let (address, pitch, plane) = side.ok_or(INVALID)?;
        return Ok(Side {
            address,
            pitch,
            plane,
        });
    }
    let start = match kind {
        CU_MEMORYTYPE_HOST => host,
        CU_MEMORYTYPE_DEVICE | CU_MEMORYTYPE_UNIFIED => device.0,
        _ => return Err(INVALID),
    };
    if start == 0 {
        return Err(INVALID);
    }
    let (pitch, plane) = (pitch as u64, (pitch * rows) as u64);
    let [x, y, z] = at.map(|part| part as u64);
    Ok(Side {
        address: start + x + y * pitch + z * plane,
        pitch,
        plane,
    })
}

/// A 2D copy as the driver's structure describes it.
pub(crate) fn describe_2d(p: &CUDA_MEMCPY2D) -> Result<Copy, CUresult> {
    let from = side(
        p.srcMemoryType,
        p.srcHost as u64,
        p.srcDevice,
        p.srcPitch,
        p.Height,
        [p.srcXInBytes, p.srcY, 0],
        p.srcArray,
        [p.WidthInBytes, p.Height, 1],
    )?;
    let to = side(
        p.dstMemoryType,
        p.dstHost as u64,
        p.dstDevice,
        p.dstPitch,
        p.Height,
        [p.dstXInBytes, p.dstY, 0],
        p.dstArray,
        [p.WidthInBytes, p.Height, 1],
    )?;
    let copy = Copy {
        to,
        from,
        width: p.WidthInBytes as u64,
        height: p.Height as u64,
        depth: 1,
    };
    if p.Height > 1 && (from.pitch < copy.width || to.pitch < copy.width) {
        return Err(INVALID);
    }
    Ok(copy)
}

/// A 3D copy as the driver's structure describes it.
pub(crate) fn describe_3d(p: &CUDA_MEMCPY3D) -> Result<Copy, CUresult> {
    let from_at = [p.srcXInBytes, p.srcY, p.srcZ];
    let to_at = [p.dstXInBytes, p.dstY, p.dstZ];
    let from = side(
        p.srcMemoryType,
        p.srcHost as u64,
        p.srcDevice,
        p.srcPitch,
        p.srcHeight.max(p.Height),
        from_at,
        p.srcArray,
        [p.WidthInBytes, p.Height, p.Depth],
    )?;
    let to = side(
        p.dstMemoryType,
        p.dstHost as u64,
        p.dstDevice,
        p.dstPitch,
        p.dstHeight.max(p.Height),
        to_at,
        p.dstArray,
        [p.WidthInBytes, p.Height, p.Depth],
    )?;
    let copy = Copy {
        to,
        from,
        width: p.WidthInBytes as u64,
        height: p.Height as u64,
        depth: p.Depth as u64,
    };
    if (p.Height > 1 || p.Depth > 1) && (from.pitch < copy.width || to.pitch < copy.width) {
        return Err(INVALID);
    }
    Ok(copy)
}

pub(crate) fn cuMemcpy2D_v2(c: &Caller, pCopy: *const CUDA_MEMCPY2D) -> R {
    context::current()?;
    copy(
        &c.stream(CUstream::NULL)?,
        describe_2d(&c.get(pCopy)?)?,
        When::Now,
    )
}

pub(crate) fn cuMemcpy2DUnaligned_v2(c: &Caller, pCopy: *const CUDA_MEMCPY2D) -> R {
    cuMemcpy2D_v2(c, pCopy)
}

pub(crate) fn cuMemcpy2DAsync_v2(c: &Caller, pCopy: *const CUDA_MEMCPY2D, hStream: CUstream) -> R {
    context::current()?;
    copy(&c.stream(hStream)?, describe_2d(&c.get(pCopy)?)?, When::Later)
}

pub(crate) fn cuMemcpy3D_v2(c: &Caller, pCopy: *const CUDA_MEMCPY3D) -> R {
    context::current()?;
    copy(
        &c.stream(CUstream::NULL)?,
        describe_3d(&c.get(pCopy)?)?,
        When::Now,
    )
}

pub(crate) fn cuMemcpy3DAsync_v2(c: &Caller, pCopy: *const CUDA_MEMCPY3D, hStream: CUstream) -> R {
    context::current()?;
    copy(&c.stream(hStream)?, describe_3d(&c.get(pCopy)?)?, When::Later)
}

pub(crate) fn cuMemcpyBatchAsync_v2(
    c: &Caller,
    dsts: *mut CUdeviceptr,
    srcs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    _attrs: *mut CUmemcpyAttributes,
    _attrsIdxs: *mut usize,
    _numAttrs: usize,
    hStream: CUstream,
) -> R {
    let stream = c.stream(hStream)?;
    if stream.is_legacy() {
        return Err(INVALID);
    }
    let to = c.array(dsts.cast_const(), count)?;
    let from = c.array(srcs.cast_const(), count)?;
    let sizes = c.array(sizes.cast_const(), count)?;
    for ((to, from), bytes) in to.iter().zip(from).zip(sizes) {
        copy(&stream, line(to.0, from.0, bytes as u64), When::Later)?;
    }
    Ok(())
}

fn fill(
    c: &Caller,
    stream: CUstream,
    to: u64,
    pitch: usize,
    value: u32,
    element: u64,
    shape: [usize; 2],
) -> R {
    context::current()?;
    let [width, height] = shape.map(|side| side as u64);
    let stream = c.stream(stream)?;
    if width == 0 || height == 0 {
        return stream.context.check();
    }
    let pitch = pitch as u64;
    if to == 0
        || !to.is_multiple_of(element)
        || (height > 1 && (pitch < width * element || !pitch.is_multiple_of(element)))
    {
        return Err(INVALID);
    }
    check_known(to, width * element, None)?;
    submit(
        &stream,
        Work::Fill(Fill {
            to: Side {
                address: to,
                pitch,
                plane: 0,
            },
            value,
            element,
            width,
            height,
        }),
    )
    .map(drop)
}

pub(crate) fn cuMemsetD8_v2(c: &Caller, dstDevice: CUdeviceptr, uc: u8, N: usize) -> R {
    fill(c, CUstream::NULL, dstDevice.0, 0, u32::from(uc), 1, [N, 1])
}

pub(crate) fn cuMemsetD16_v2(c: &Caller, dstDevice: CUdeviceptr, us: u16, N: usize) -> R {
    fill(c, CUstream::NULL, dstDevice.0, 0, u32::from(us), 2, [N, 1])
}

pub(crate) fn cuMemsetD32_v2(c: &Caller, dstDevice: CUdeviceptr, ui: u32, N: usize) -> R {
    fill(c, CUstream::NULL, dstDevice.0, 0, ui, 4, [N, 1])
}

pub(crate) fn cuMemsetD8Async(c: &Caller, dstDevice: CUdeviceptr, uc: u8, N: usize, hStream: CUstream) -> R {
    fill(c, hStream, dstDevice.0, 0, u32::from(uc), 1, [N, 1])
}

pub(crate) fn cuMemsetD16Async(
    c: &Caller,
    dstDevice: CUdeviceptr,
    us: u16,
    N: usize,
    hStream: CUstream,
) -> R {
    fill(c, hStream, dstDevice.0, 0, u32::from(us), 2, [N, 1])
}

pub(crate) fn cuMemsetD32Async(
    c: &Caller,
    dstDevice: CUdeviceptr,
    ui: u32,
    N: usize,
    hStream: CUstream,
) -> R {
    fill(c, hStream, dstDevice.0, 0, ui, 4, [N, 1])
}

pub(crate) fn cuMemsetD2D8_v2(
    c: &Caller,
    dst: CUdeviceptr,
    pitch: usize,
    uc: u8,
    Width: usize,
    Height: usize,
) -> R {
    fill(c, CUstream::NULL, dst.0, pitch, u32::from(uc), 1, [Width, Height])
}

pub(crate) fn cuMemsetD2D16_v2(
    c: &Caller,
    dst: CUdeviceptr,
    pitch: usize,
    us: u16,
    Width: usize,
    Height: usize,
) -> R {
    fill(c, CUstream::NULL, dst.0, pitch, u32::from(us), 2, [Width, Height])
}

pub(crate) fn cuMemsetD2D32_v2(
    c: &Caller,
    dst: CUdeviceptr,
    pitch: usize,
    ui: u32,
    Width: usize,
    Height: usize,
) -> R {
    fill(c, CUstream::NULL, dst.0, pitch, ui, 4, [Width, Height])
}

pub(crate) fn cuMemsetD2D8Async(
    c: &Caller,
    dst: CUdeviceptr,
    pitch: usize,
    uc: u8,
    Width: usize,
    Height: usize,
    hStream: CUstream,
) -> R {
    fill(c, hStream, dst.0, pitch, u32::from(uc), 1, [Width, Height])
}

pub(crate) fn cuMemsetD2D16Async(
    c: &Caller,
    dst: CUdeviceptr,
    pitch: usize,
    us: u16,
    Width: usize,
    Height: usize,
    hStream: CUstream,
) -> R {
    fill(c, hStream, dst.0, pitch, u32::from(us), 2, [Width, Height])
}

pub(crate) fn cuMemsetD2D32Async(
    c: &Caller,
    dst: CUdeviceptr,
    pitch: usize,
    ui: u32,
    Width: usize,
    Height: usize,
    hStream: CUstream,
) -> R {
    fill(c, hStream, dst.0, pitch, ui, 4, [Width, Height])
}
