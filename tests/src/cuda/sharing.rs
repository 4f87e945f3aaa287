//! Calls that share memory with other processes and devices.

use super::*;

/// A legacy interprocess handle: memory or event.
pub type IpcHandle = [u64; 8];

/// `CU_POINTER_ATTRIBUTE_*`, as many as tests ask for.
#[derive(Clone, Copy, Debug)]
pub struct Attribute(pub i32);

impl Attribute {
    /// Operations on it are synchronous.
    pub const SYNC_MEMOPS: Self = Self(6);
    /// A legacy handle of it can be had.
    pub const LEGACY_IPC: Self = Self(10);
    /// Network cards can use it.
    pub const RDMA: Self = Self(15);
}

impl Cuda {
    /// The handle of the memory at an address.
    ///
    /// # Errors
    /// The driver's code, as in all calls below.
    pub fn ipc_handle(&self, pointer: u64) -> Result<IpcHandle> {
        let mut handle = [u64::MAX; 8];
        call!(self, "cuIpcGetMemHandle"(&raw mut handle => *mut IpcHandle, pointer => u64))?;
        Ok(handle)
    }

    /// Opens memory of another process.
    ///
    /// # Errors
    /// The driver's code.
    pub fn ipc_open(&self, handle: IpcHandle) -> Result<u64> {
        let mut pointer = 0u64;
        call!(self, "cuIpcOpenMemHandle_v2"(&raw mut pointer => *mut u64, Bytes64(handle) => Bytes64, 1 => c_uint))?;
        Ok(pointer)
    }

    /// Closes it.
    ///
    /// # Errors
    /// The driver's code.
    pub fn ipc_close(&self, pointer: u64) -> Result<()> {
        call!(self, "cuIpcCloseMemHandle"(pointer => u64))
    }

    /// An event that other processes can open, and its handle.
    ///
    /// # Errors
    /// The driver's code.
    pub fn ipc_event(&self) -> Result<(u64, IpcHandle)> {
        let (mut event, mut handle) = (0usize, [0; 8]);
        // Interprocess, without timing.
        call!(self, "cuEventCreate"(&raw mut event => *mut usize, 6 => c_uint))?;
        call!(self, "cuIpcGetEventHandle"(&raw mut handle => *mut IpcHandle, event => usize))?;
        Ok((event as u64, handle))
    }

    /// Opens an event of another process.
    ///
    /// # Errors
    /// The driver's code.
    pub fn ipc_open_event(&self, handle: IpcHandle) -> Result<u64> {
        let mut event = 0usize;
        call!(self, "cuIpcOpenEventHandle"(&raw mut event => *mut usize, Bytes64(handle) => Bytes64))?;
        Ok(event as u64)
    }

    /// Records it on the default stream.
    ///
    /// # Errors
    /// The driver's code.
    pub fn record(&self, event: u64) -> Result<()> {
        call!(self, "cuEventRecord"(event as usize => usize, 0 => usize))
    }

    /// Waits for it.
    ///
    /// # Errors
    /// The driver's code.
    pub fn wait_event(&self, event: u64) -> Result<()> {
        call!(self, "cuEventSynchronize"(event as usize => usize))
    }

    /// An attribute of a pointer.
    ///
    /// # Errors
    /// The driver's code.
    pub fn attribute(&self, pointer: u64, attribute: Attribute) -> Result<u64> {
        let mut value = 0u64;
        call!(self, "cuPointerGetAttribute"((&raw mut value).cast() => *mut c_void, attribute.0 => c_int, pointer => u64))?;
        Ok(value)
    }

    /// Sets `SYNC_MEMOPS`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn set_sync_memops(&self, pointer: u64, on: bool) -> Result<()> {
        let value = c_uint::from(on);
        call!(self, "cuPointerSetAttribute"(
            (&raw const value).cast() => *const c_void, Attribute::SYNC_MEMOPS.0 => c_int, pointer => u64
        ))
    }

    /// A dma-buf of a range: its descriptor.
    ///
    /// # Errors
    /// The driver's code.
    pub fn dma_buf(&self, pointer: u64, bytes: u64) -> Result<c_int> {
        let mut fd: c_int = -1;
        call!(self, "cuMemGetHandleForAddressRange"(
            (&raw mut fd).cast() => *mut c_void, pointer => u64, bytes => usize_of_u64, 1 => c_int, 0 => u64
        ))?;
        Ok(fd)
    }

    /// The handle behind an address: refused for memory of `cuMemAlloc`.
    ///
    /// # Errors
    /// The driver's code.
    pub fn retain(&self, pointer: u64) -> Result<u64> {
        let mut handle = 0u64;
        call!(self, "cuMemRetainAllocationHandle"(&raw mut handle => *mut u64, pointer => u64))?;
        Ok(handle)
    }

    /// Lets kernels of this context use memory of a context of another device. That context.
    ///
    /// # Errors
    /// The driver's code.
    pub fn peer(&self, device: i32, on: bool) -> Result<()> {
        let mut context = 0usize;
        call!(self, "cuDevicePrimaryCtxRetain"(&raw mut context => *mut usize, device => c_int))?;
        if on {
            call!(self, "cuCtxEnablePeerAccess"(context => usize, 0 => c_uint))
        } else {
            call!(self, "cuCtxDisablePeerAccess"(context => usize))
        }
    }

    /// Allocates on another device.
    ///
    /// # Errors
    /// The driver's code.
    pub fn alloc_on(&self, device: i32, bytes: u64) -> Result<u64> {
        let (mut context, mut old) = (0usize, 0usize);
        call!(self, "cuDevicePrimaryCtxRetain"(&raw mut context => *mut usize, device => c_int))?;
        call!(self, "cuCtxPushCurrent_v2"(context => usize))?;
        let pointer = self.alloc(bytes);
        call!(self, "cuCtxPopCurrent_v2"(&raw mut old => *mut usize))?;
        pointer
    }

    /// Locks, checkpoints, restores or unlocks a process.
    ///
    /// # Errors
    /// The driver's code.
    pub fn checkpoint(&self, what: &str, pid: u64) -> Result<()> {
        let pid = c_int::try_from(pid).map_err(|_| CudaError(1))?;
        match what {
            "lock" => call!(self, "cuCheckpointProcessLock"(pid => c_int, null_mut() => *mut c_void)),
            "checkpoint" => {
                call!(self, "cuCheckpointProcessCheckpoint"(pid => c_int, null_mut() => *mut c_void))
            }
            "restore" => call!(self, "cuCheckpointProcessRestore"(pid => c_int, null_mut() => *mut c_void)),
            "unlock" => call!(self, "cuCheckpointProcessUnlock"(pid => c_int, null_mut() => *mut c_void)),
            _ => Err(CudaError(1)),
        }
    }
}

/// 64 bytes that are passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Bytes64(IpcHandle);

#[allow(non_camel_case_types, reason = "stands for `size_t` where the value is a u64")]
type usize_of_u64 = u64;
