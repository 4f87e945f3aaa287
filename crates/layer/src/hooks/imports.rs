//! Memory of others that this process holds: imported by a handle, from a pool, by a legacy handle of the driver's, or from another interface.
//!
//! Whoever made it is charged for it; here it is named, so that `ebb doctor` tells of it and the daemon knows how much of this card is in two
//! hands: what its maker lets go may stay because of us. An imported handle does not tell its size; the first mapping does.
//!
//! ```text
//!            import               first mapping             last handle and last mapping gone
//!   (nothing) ────► size unknown ───────────────► named ─────────────────────────────────────► (nothing)
//! ```
//! What this process exported and imports again counts here too: nobody can tell it from memory of others.
//!
//! # Locks
//! `BOOK` alone; it is not held across a call of the driver or into the engine.

use core::ffi::c_void;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ebb_abi::*;
use ebb_layer_core::ExternalKind;

use crate::bridge::Running;
use crate::hooks::external::{self, Id, reserve, settle};
use crate::hooks::with;
use crate::symbols::real;

/// Memory behind an imported handle.
#[derive(Debug, Default)]
struct Import {
    /// The engine's number of its device; `None` if it is on none that is managed.
    device: Option<usize>,
    /// 0: not known yet.
    bytes: u64,
    /// References that the program holds to the handle.
    handles: u32,
    mappings: u32,
}

/// A change of what is named on a device: bytes more, or less.
#[derive(Debug, PartialEq, Eq)]
enum Change {
    More(usize, u64),
    Less(usize, u64),
}

#[derive(Debug, Default)]
struct Book {
    imports: HashMap<u64, Import>,
    /// Mappings by address: size and handle.
    mapped: BTreeMap<u64, (u64, u64)>,
    /// Legacy handles by address: how often each is open.
    opened: HashMap<u64, u32>,
}

impl Book {
    fn imported(&mut self, handle: u64, device: Option<usize>) {
        let import = self.imports.entry(handle).or_default();
        import.device = device;
        import.handles += 1;
    }

    fn retained(&mut self, handle: u64) {
        if let Some(import) = self.imports.get_mut(&handle) {
            import.handles += 1;
        }
    }

    fn mapped(&mut self, handle: u64, at: u64, size: u64) -> Option<Change> {
        let import = self.imports.get_mut(&handle)?;
        import.mappings += 1;
        self.mapped.insert(at, (size, handle));
        if import.bytes > 0 {
            return None;
        }
        import.bytes = size;
        Some(Change::More(import.device?, size))
    }

    fn unmapped(&mut self, at: u64, size: u64) -> Vec<Change> {
        let gone: Vec<(u64, u64)> = self
            .mapped
            .range(at..at.saturating_add(size))
            .map(|(at, (_, handle))| (*at, *handle))
            .collect();
        gone.into_iter()
            .filter_map(|(at, handle)| {
                self.mapped.remove(&at);
                let import = self.imports.get_mut(&handle)?;
                import.mappings = import.mappings.saturating_sub(1);
                self.settle(handle)
            })
            .collect()
    }

    fn released(&mut self, handle: u64) -> Option<Change> {
        let import = self.imports.get_mut(&handle)?;
        import.handles = import.handles.saturating_sub(1);
        self.settle(handle)
    }

    /// Drops an import that nothing holds any more.
    fn settle(&mut self, handle: u64) -> Option<Change> {
        let import = self.imports.get(&handle)?;
        if import.handles > 0 || import.mappings > 0 {
            return None;
        }
        let import = self.imports.remove(&handle)?;
        Some(Change::Less(import.device?, import.bytes)).filter(|_| import.bytes > 0)
    }
}

static BOOK: Mutex<Option<Book>> = Mutex::new(None);
/// Imports and openings: most programs have none.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn change<T>(what: impl FnOnce(&mut Book) -> T) -> T {
    let mut guard = BOOK.lock().unwrap_or_else(PoisonError::into_inner);
    let book = guard.get_or_insert_default();
    let result = what(book);
    COUNT.store(book.imports.len() + book.opened.len(), Ordering::Release);
    result
}

fn tell(running: &Running, changes: impl IntoIterator<Item = Change>) {
    for change in changes {
        match change {
            // Named and not charged, so that nothing can refuse it.
            Change::More(device, bytes) => {
                let _ = running.reserve(device, ExternalKind::Imported, bytes);
            }
            Change::Less(device, bytes) => running.release(device, ExternalKind::Imported, bytes),
        }
    }
}

/// Whether anything is imported.
fn any() -> bool {
    COUNT.load(Ordering::Acquire) != 0
}

/// Changes the book if there is anything in it.
fn change_if_any<C: IntoIterator<Item = Change>>(what: impl FnOnce(&mut Book) -> C) {
    if any() {
        with(|running| {
            tell(running, change(what));
            Some(())
        });
    }
}

/// The driver mapped a handle of its own.
pub(crate) fn mapped(handle: CUmemGenericAllocationHandle, at: CUdeviceptr, size: usize) {
    change_if_any(|book| book.mapped(handle.0, at.0, size as u64));
}

/// The driver unmapped a range in which nothing of ours was.
pub(crate) fn unmapped(at: CUdeviceptr, size: usize) {
    change_if_any(|book| book.unmapped(at.0, size as u64));
}

/// The program gave back a handle of the driver's.
pub(crate) fn released(handle: CUmemGenericAllocationHandle) {
    change_if_any(|book| book.released(handle.0));
}

/// The program has a handle of the driver's once more, from an address.
pub(crate) fn retained(handle: CUmemGenericAllocationHandle) {
    change_if_any(|book| {
        book.retained(handle.0);
        None
    });
}

/// The device of an imported handle's memory.
fn device_of(running: &Running, handle: CUmemGenericAllocationHandle) -> Option<usize> {
    let mut properties = CUmemAllocationProp::default();
    // SAFETY: a place for the answer, and a handle that the driver has just given out.
    let known = unsafe { real::cuMemGetAllocationPropertiesFromHandle(&raw mut properties, handle) };
    let there = known.is_success() && properties.location.type_ == CU_MEM_LOCATION_TYPE_DEVICE;
    let ordinal = there.then_some(CUdevice(properties.location.u.cast_signed()))?;
    running
        .index_of(ordinal)
        .or_else(|| running.attach(ordinal, None))
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemImportFromShareableHandle(
    handle: *mut CUmemGenericAllocationHandle,
    osHandle: *mut c_void,
    shHandleType: CUmemAllocationHandleType,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemImportFromShareableHandle(handle, osHandle, shHandleType) };
    if result.is_success() {
        with(|running| {
            // SAFETY: the driver has just written it.
            let handle = unsafe { handle.read() };
            let device = device_of(running, handle);
            change(|book| book.imported(handle.0, device));
            Some(())
        });
    }
    result
}

/// The device that an address belongs to, if it is managed.
fn device_at(running: &Running, address: CUdeviceptr) -> Option<usize> {
    let mut ordinal = CUdevice(0);
    // SAFETY: a place for the answer, which is a word.
    let known = unsafe {
        real::cuPointerGetAttribute(
            (&raw mut ordinal).cast(),
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
    };
    known.is_success().then(|| running.index_of(ordinal)).flatten()
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolExportPointer(
    shareData_out: *mut CUmemPoolPtrExportData,
    ptr: CUdeviceptr,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolExportPointer(shareData_out, ptr) };
    if result.is_success() {
        with(|running| {
            running.engine.pools_are_shared(device_at(running, ptr)?);
            Some(())
        });
    }
    result
}

/// Names memory that the driver has just given an address in this process.
fn name(address: CUdeviceptr) {
    let (mut base, mut size) = (CUdeviceptr::NULL, 0);
    // SAFETY: places for the answers.
    let known = unsafe { real::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address) };
    if !known.is_success() {
        return;
    }
    let piece = reserve(ExternalKind::Imported, Some(size as u64), |running| {
        device_at(running, address)
    });
    if let Ok(piece) = piece {
        settle(piece, Some(Id::Pointer(address.0)));
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemPoolImportPointer(
    ptr_out: *mut CUdeviceptr,
    pool: CUmemoryPool,
    shareData: *mut CUmemPoolPtrExportData,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuMemPoolImportPointer(ptr_out, pool, shareData) };
    if result.is_success() {
        with(|_| {
            // SAFETY: the driver has just written it.
            name(unsafe { ptr_out.read() });
            Some(())
        });
    }
    result
}

/// The driver opened a legacy handle of its own.
pub(crate) fn opened(address: CUdeviceptr) {
    let first = change(|book| {
        let count = book.opened.entry(address.0).or_default();
        *count += 1;
        *count == 1
    });
    if first {
        name(address);
    }
}

/// The driver closed what such a handle had opened.
pub(crate) fn closed(address: CUdeviceptr) {
    if !any() {
        return;
    }
    let last = change(|book| {
        let count = book.opened.get_mut(&address.0)?;
        *count -= 1;
        (*count == 0).then(|| book.opened.remove(&address.0))
    });
    if last.is_some() {
        external::gone(Id::Pointer(address.0));
    }
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuImportExternalMemory(
    extMem_out: *mut CUexternalMemory,
    memHandleDesc: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuImportExternalMemory(extMem_out, memHandleDesc) };
    if result.is_success() {
        // SAFETY: the driver accepted the description and has written the handle.
        let (handle, bytes) = unsafe { (extMem_out.read(), (*memHandleDesc).size) };
        let piece = reserve(ExternalKind::Imported, Some(bytes), |running| {
            Some(running.here()?.0)
        });
        if let Ok(piece) = piece {
            settle(piece, Some(Id::External(handle.0)));
        }
    }
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuDestroyExternalMemory(extMem: CUexternalMemory) -> CUresult {
    // SAFETY: the program's own call.
    let result = unsafe { real::cuDestroyExternalMemory(extMem) };
    if result.is_success() {
        external::gone(Id::External(extMem.0));
    }
    result
}

/// In the child of a fork: the parent's imports are not ours.
pub(crate) fn forget_in_child() {
    if let Ok(mut book) = BOOK.try_lock() {
        *book = None;
        COUNT.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_import_is_named_from_its_first_mapping_to_its_last_hold() {
        let mut book = Book::default();
        book.imported(7, Some(1));
        assert_eq!(book.mapped(7, 100, 20), Some(Change::More(1, 20)));
        assert_eq!(book.mapped(7, 200, 20), None, "the same memory");
        assert_eq!(book.mapped(8, 300, 20), None, "not imported");
        book.retained(7);
        assert_eq!((book.released(7), book.released(7)), (None, None));
        assert_eq!(book.unmapped(0, 150), []);
        assert_eq!(book.unmapped(200, 20), [Change::Less(1, 20)]);
        assert!(book.imports.is_empty() && book.mapped.is_empty());
    }

    #[test]
    fn what_is_never_mapped_and_what_is_on_no_device_is_not_named() {
        let mut book = Book::default();
        book.imported(7, Some(1));
        assert_eq!(book.released(7), None);
        book.imported(7, None);
        assert_eq!(book.mapped(7, 100, 20), None);
        assert_eq!(book.unmapped(100, 20), []);
        assert_eq!(book.released(7), None);
        assert!(book.imports.is_empty());
    }
}
