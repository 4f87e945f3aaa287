//! Memory that passes the pool by: counted against the limit before the driver is asked, named in the report, and given
//! back when the program frees it. It is not moved.
//!
//! Where a size is not in the call (arrays) it is computed.

use core::ffi::c_void;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_layer_core::ExternalKind;

use crate::bridge::{self, Running};
use crate::hooks::with;
use crate::symbols::real;

/// What a piece of such memory is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Id {
    Pointer(u64),
    Array(usize),
    Mipmapped(usize),
    Host(usize),
    External(usize),
}

/// A piece of such memory that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(super) device: usize,
    kind: ExternalKind,
    bytes: u64,
}

impl Piece {
    #[cfg(test)]
    pub(super) const fn new(device: usize, kind: ExternalKind, bytes: u64) -> Self {
        Self { device, kind, bytes }
    }
}

#[derive(Debug, Default)]
struct Book {
    pieces: HashMap<Id, Piece>,
}

static BOOK: Mutex<Option<Book>> = Mutex::new(None);
/// Pieces in the book: most programs that free have none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn book() -> MutexGuard<'static, Option<Book>> {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Book {
    fn add(&mut self, id: Id, piece: Piece) -> Vec<Piece> {
        // An address that is given out anew: its end was not seen.
        self.pieces.insert(id, piece).into_iter().collect()
    }
}

/// Changes the book; what came off it is given back to the engine outside the lock.
fn change(running: &Running, change: impl FnOnce(&mut Book) -> Vec<Piece>) {
    let mut book = book();
    let book_now = book.get_or_insert_default();
    let off = change(book_now);
    COUNT.store(book_now.pieces.len(), Ordering::Release);
    drop(book);
    for piece in off {
        running.release(piece.device, piece.kind, piece.bytes);
    }
}

/// A piece of memory is freed. Unknown ones are none of ours.
pub(crate) fn gone(id: Id) {
    if COUNT.load(Ordering::Acquire) == 0 || !bridge::is_running() {
        return;
    }
    with(|running| {
        change(running, |book| {
            let off = book.pieces.remove(&id);
            if let (Some(piece), Id::Pointer(at)) = (off, id)
                && piece.kind == ExternalKind::Managed
            {
                running.engine.managed_gone(piece.device, at);
            }
            off.into_iter().collect()
        });
        Some(())
    });
}

/// Counts a piece before the driver is asked. `Ok(None)`: there is nothing to count it against.
pub(crate) fn reserve(
    kind: ExternalKind,
    bytes: Option<u64>,
    device: impl FnOnce(&Running) -> Option<usize>,
) -> Result<Option<Piece>, CUresult> {
    if !bridge::is_running() {
        return Ok(None);
    }
    with(|running| {
        let piece = Piece {
            device: device(running)?,
            kind,
            bytes: bytes.filter(|&bytes| bytes > 0)?,
        };
        Some(running.reserve(piece.device, kind, piece.bytes).map(|()| piece))
    })
    .transpose()
}

/// After the driver was asked: the piece is there under this name, or is not.
pub(crate) fn settle(piece: Option<Piece>, id: Option<Id>) {
    let Some(piece) = piece else { return };
    with(|running| {
        match id {
            Some(id) => {
                change(running, |book| book.add(id, piece));
                if let (ExternalKind::Managed, Id::Pointer(at)) = (piece.kind, id) {
                    running.engine.managed_made(piece.device, at, piece.bytes);
                }
            }
            None => running.release(piece.device, piece.kind, piece.bytes),
        }
        Some(())
    });
}

/// The device of the current context.
fn here(running: &Running) -> Option<usize> {
    Some(running.here()?.0)
}

/// Hooks that count: what it is, how much, where, the call, and what the new memory is known by.
macro_rules! counted {
    ($(
        $name:ident($($parameter:ident: $ty:ty),*) {
            $kind:ident, $bytes:expr, $device:expr, $id:expr
        }
    )*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($($parameter: $ty),*) -> CUresult {
            let piece = match reserve(ExternalKind::$kind, $bytes, $device) {
                Ok(piece) => piece,
                Err(code) => return code,
            };
            // SAFETY: the program's own call.
            let result = unsafe { real::$name($($parameter),*) };
            if piece.is_some() {
                settle(piece, result.is_success().then(|| $id));
            }
            result
        }
    )*};
}

/// Reads a place that the driver has just written.
macro_rules! written {
    ($place:expr) => {
        // SAFETY: the driver succeeded, so that it has written this place.
        unsafe { $place.read() }
    };
}

counted! {
    cuMemAllocManaged(dptr: *mut CUdeviceptr, bytesize: usize, flags: u32) {
        Managed, Some(bytesize as u64), here, Id::Pointer(written!(dptr).0)
    }
    cuArrayCreate(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY_DESCRIPTOR_v1) {
        Array,
        // SAFETY: the program's description, or null, which the driver will refuse.
        unsafe { pAllocateArray.as_ref() }.map(|d| array_bytes([d.Width.into(), d.Height.into(), 0], d.Format, d.NumChannels, 1)),
        here,
        Id::Array(written!(pHandle).0)
    }
    cuArrayCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY_DESCRIPTOR) {
        Array,
        // SAFETY: as above.
        unsafe { pAllocateArray.as_ref() }.map(|d| array_bytes([d.Width as u64, d.Height as u64, 0], d.Format, d.NumChannels, 1)),
        here,
        Id::Array(written!(pHandle).0)
    }
    cuArray3DCreate(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR_v1) {
        Array,
        // SAFETY: as above.
        unsafe { pAllocateArray.as_ref() }.map(|d| match d.Flags & CUDA_ARRAY3D_SPARSE {
            0 => array_bytes([d.Width.into(), d.Height.into(), d.Depth.into()], d.Format, d.NumChannels, 1),
            _ => 0,
        }),
        here,
        Id::Array(written!(pHandle).0)
    }
    cuArray3DCreate_v2(pHandle: *mut CUarray, pAllocateArray: *const CUDA_ARRAY3D_DESCRIPTOR) {
        Array,
        // SAFETY: as above.
        unsafe { pAllocateArray.as_ref() }.map(|d| described(d, 1)),
        here,
        Id::Array(written!(pHandle).0)
    }
    cuMipmappedArrayCreate(
        pHandle: *mut CUmipmappedArray, pMipmappedArrayDesc: *const CUDA_ARRAY3D_DESCRIPTOR, numMipmapLevels: u32
    ) {
        Array,
        // SAFETY: as above.
        unsafe { pMipmappedArrayDesc.as_ref() }.map(|d| described(d, numMipmapLevels)),
        here,
        Id::Mipmapped(written!(pHandle).0)
    }
    cuMemHostAlloc(pp: *mut *mut c_void, bytesize: usize, Flags: u32) {
        PinnedHost, Some(bytesize as u64), here, Id::Host(written!(pp).addr())
    }
    cuMemAllocHost(pp: *mut *mut c_void, bytesize: u32) {
        PinnedHost, Some(bytesize.into()), here, Id::Host(written!(pp).addr())
    }
    cuMemAllocHost_v2(pp: *mut *mut c_void, bytesize: usize) {
        PinnedHost, Some(bytesize as u64), here, Id::Host(written!(pp).addr())
    }
    cuMemHostRegister(p: *mut c_void, bytesize: usize, Flags: u32) {
        PinnedHost, Some(bytesize as u64), here, Id::Host(p.addr())
    }
    cuMemHostRegister_v2(p: *mut c_void, bytesize: usize, Flags: u32) {
        PinnedHost, Some(bytesize as u64), here, Id::Host(p.addr())
    }
}

/// Hooks of what frees: the call, and what is gone if it succeeded.
macro_rules! freed {
    ($($name:ident($parameter:ident: $ty:ty) { $id:expr })*) => {$(
        /// # Safety
        /// As the driver's function.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C-unwind" fn $name($parameter: $ty) -> CUresult {
            // SAFETY: the program's own call.
            let result = unsafe { real::$name($parameter) };
            if result.is_success() {
                gone($id);
            }
            result
        }
    )*};
}
freed! {
    cuArrayDestroy(hArray: CUarray) { Id::Array(hArray.0) }
    cuMipmappedArrayDestroy(hMipmappedArray: CUmipmappedArray) { Id::Mipmapped(hMipmappedArray.0) }
    cuMemFreeHost(p: *mut c_void) { Id::Host(p.addr()) }
    cuMemHostUnregister(p: *mut c_void) { Id::Host(p.addr()) }
}

fn described(d: &CUDA_ARRAY3D_DESCRIPTOR, levels: u32) -> u64 {
    if d.Flags & CUDA_ARRAY3D_SPARSE != 0 {
        return 0;
    }
    array_bytes(
        [d.Width as u64, d.Height as u64, d.Depth as u64],
        d.Format,
        d.NumChannels,
        levels,
    )
}

/// Bytes of an array with its smaller levels. The driver's own layout may take a little more.
fn array_bytes(extent: [u64; 3], format: CUarray_format, channels: u32, levels: u32) -> u64 {
    let texel = channel_bytes(format).saturating_mul(u64::from(channels.max(1)));
    (0..levels.clamp(1, 63))
        .map(|level| extent.map(|side| (side >> level).max(1)))
        .map(|sides| {
            sides
                .iter()
                .fold(texel, |bytes, &side| bytes.saturating_mul(side))
        })
        .fold(0, u64::saturating_add)
}

/// Bytes of one channel. Formats of blocks and planes have about one byte for each texel.
const fn channel_bytes(format: CUarray_format) -> u64 {
    match format {
        CU_AD_FORMAT_UNSIGNED_INT16 | CU_AD_FORMAT_SIGNED_INT16 | CU_AD_FORMAT_HALF => 2,
        CU_AD_FORMAT_UNSIGNED_INT32 | CU_AD_FORMAT_SIGNED_INT32 | CU_AD_FORMAT_FLOAT => 4,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(bytes: u64) -> Piece {
        Piece {
            device: 0,
            kind: ExternalKind::Array,
            bytes,
        }
    }

    #[test]
    fn arrays_have_bytes_not_elements() {
        assert_eq!(array_bytes([100, 0, 0], CU_AD_FORMAT_FLOAT, 1, 1), 400);
        assert_eq!(array_bytes([100, 10, 0], CU_AD_FORMAT_HALF, 4, 1), 8000);
        assert_eq!(
            array_bytes([4, 4, 4], CU_AD_FORMAT_UNSIGNED_INT8, 1, 3),
            64 + 8 + 1
        );
        assert_eq!(array_bytes([u64::MAX, 9, 9], CU_AD_FORMAT_FLOAT, 4, 63), u64::MAX);
    }

    #[test]
    fn an_address_given_out_again_replaces_its_piece() {
        let mut book = Book::default();
        assert!(book.add(Id::Pointer(64), piece(1)).is_empty());
        assert_eq!(book.add(Id::Pointer(64), piece(2)), [piece(1)]);
        assert!(
            book.add(Id::Array(64), piece(1)).is_empty(),
            "another kind of name"
        );
    }
}
