//! [`Imported`]: memory of another process at one range of addresses.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use ebb_abi::*;
use ebb_device::{DeviceError, DeviceMemory};
use ebb_units::Bytes;

use crate::{CudaDevice, check};

/// Memory of another process, mapped at one contiguous range, piece after piece. Unmapped when dropped: see
/// [`Imported::close`].
#[derive(Debug)]
pub struct Imported {
    device: Arc<CudaDevice>,
    base: u64,
    len: u64,
    /// Sizes of what is mapped so far, from the start.
    mapped: Vec<u64>,
    closed: bool,
}

impl Imported {
    /// Reserves addresses for `len` bytes of memory of `device`.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn reserve(device: Arc<CudaDevice>, len: u64) -> Result<Self, DeviceError> {
        let base = device.reserve(len, device.granularity())?;
        Ok(Self {
            device,
            base,
            len,
            mapped: Vec::new(),
            closed: false,
        })
    }

    /// Its first address.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing is mapped yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapped.is_empty()
    }

    /// Maps the next `len` bytes: all of the memory behind a descriptor.
    ///
    /// # Errors
    /// [`DeviceError`]; this piece is not mapped.
    pub fn add(&mut self, fd: BorrowedFd<'_>, len: u64) -> Result<(), DeviceError> {
        let at: u64 = self.mapped.iter().sum();
        if len == 0 || at.saturating_add(len) > self.len {
            return check("cuMemMap", CUresult::ERROR_INVALID_VALUE);
        }
        let table = &self.device.table;
        let _scope = self.device.scope()?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        // The descriptor's number stands in the pointer's place.
        let number = core::ptr::without_provenance_mut(fd.as_raw_fd().cast_unsigned() as usize);
        // SAFETY: a valid place for the answer, and an open descriptor, which is what this kind of handle is.
        check("cuMemImportFromShareableHandle", unsafe {
            table.cuMemImportFromShareableHandle(
                &raw mut handle,
                number,
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            )
        })?;
        // SAFETY: no pointers of the host; the driver checks range and handle.
        let mapped = check("cuMemMap", unsafe {
            table.cuMemMap(CUdeviceptr(self.base + at), Bytes(len).to_usize(), 0, handle, 0)
        });
        // The mapping keeps the memory.
        // SAFETY: a handle of ours, named here for the last time.
        let _ = unsafe { table.cuMemRelease(handle) };
        mapped?;
        self.mapped.push(len);
        Ok(())
    }

    /// Lets the memory's own device, and others, use all of it.
    ///
    /// # Errors
    /// [`DeviceError`], also if something is not mapped yet.
    pub fn give_access(&self, others: &[CUdevice]) -> Result<(), DeviceError> {
        let _scope = self.device.scope()?;
        let mut devices = vec![self.device.device];
        devices.extend(others.iter().filter(|other| **other != self.device.device));
        self.device.set_access_for(self.base, self.len, &devices)
    }

    /// Unmaps it and gives the addresses back. Nothing may use it any more.
    ///
    /// # Errors
    /// [`DeviceError`]; what the driver would not take back stays.
    pub fn close(mut self) -> Result<(), DeviceError> {
        self.take_down()
    }

    fn take_down(&mut self) -> Result<(), DeviceError> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        // Even if no context is left.
        let _scope = self.device.scope();
        let mut at = self.base;
        let mut result = Ok(());
        for len in self.mapped.drain(..) {
            // SAFETY: no pointers of the host; a mapping of ours. That no work uses it is the caller's contract.
            let unmapped = check("cuMemUnmap", unsafe {
                self.device
                    .table
                    .cuMemUnmap(CUdeviceptr(at), Bytes(len).to_usize())
            });
            result = result.and(unmapped);
            at += len;
        }
        result?;
        self.device.free_reservation(self.base, self.len)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let _ = self.take_down();
    }
}
