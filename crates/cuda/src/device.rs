//! [`CudaDevice`]: one GPU's memory through the driver's calls.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::{
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ALLOC_GRANULARITY_MINIMUM, CU_MEM_ALLOCATION_TYPE_PINNED,
    CU_MEM_LOCATION_TYPE_DEVICE, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation, CUresult, CUstream,
    Zero,
};
use ebb_device::{DeviceError, DeviceMemory, Direction, Handle, HostAddr, Marker};

use crate::{CallScope, DriverTable};

const STREAM_NON_BLOCKING: u32 = 1;
/// An event that a thread sleeps for rather than spins: the program's threads need the processor.
const EVENT_BLOCKING_SYNC: u32 = 1;
const EVENT_DISABLE_TIMING: u32 = 2;
const HOST_REGISTER_PORTABLE: u32 = 1;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
const ATTRIBUTE_RDMA_WITH_VMM: CUdevice_attribute = CUdevice_attribute(110);

/// One GPU's memory, through contexts that belong to the program.
///
/// Memory and addresses belong to the process, not to a context, so they outlive each; streams and events do not, and are
/// made anew in another live context when theirs goes.
///
/// # Locks
/// `state` is held only to read or change the lists, never across a driver call that may wait. Making a stream or an event under
/// it is defended: those calls do not wait for work, and two threads must not both make the stream.
#[derive(Debug)]
pub struct CudaDevice {
    table: DriverTable,
    device: CUdevice,
    prop: CUmemAllocationProp,
    granularity: u64,
    state: Mutex<State>,
}

// SAFETY: the raw pointer in `prop` (a Windows field) is null and never followed; everything else is integers and a lock.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; `prop` is never written after construction.
unsafe impl Sync for CudaDevice {}

#[derive(Debug, Default)]
struct State {
    /// The program's live contexts on this device, oldest first. Copies run in the first.
    contexts: Vec<CUcontext>,
    /// Streams and spare events of the first context.
    copying: Option<Copying>,
}

#[derive(Debug)]
struct Copying {
    context: CUcontext,
    out: CUstream,
    in_: CUstream,
    spare: Vec<CUevent>,
}

impl CudaDevice {
    /// A device with its first context.
    ///
    /// # Errors
    /// The driver's, for instance if it has no virtual-memory calls.
    pub fn new(table: DriverTable, device: CUdevice, context: CUcontext) -> Result<Self, DeviceError> {
        let mut prop = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_DEVICE,
                u: device.0.cast_unsigned(),
            },
            ..CUmemAllocationProp::ZERO
        };
        let mut rdma = 0;
        // SAFETY: `rdma` is a live integer. A driver that does not know the attribute leaves it 0.
        let known = unsafe { table.device_attribute(&raw mut rdma, ATTRIBUTE_RDMA_WITH_VMM, device) };
        if known.is_ok() && rdma != 0 {
            // `cuMemAlloc` memory can be registered for RDMA; so can ours. Byte 1 of the flags is `gpuDirectRDMACapable`.
            prop.allocFlags[0] = u16::from_ne_bytes([0, 1]);
        }
        let mut granularity = 0;
        // SAFETY: `granularity` and `prop` are live values.
        unsafe {
            table.granularity(
                &raw mut granularity,
                &raw const prop,
                CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        }?;
        let state = State {
            contexts: vec![context],
            copying: None,
        };
        Ok(Self {
            table,
            device,
            prop,
            granularity: granularity as u64,
            state: Mutex::new(state),
        })
    }

    /// The calls that it makes.
    #[must_use]
    pub const fn table(&self) -> &DriverTable {
        &self.table
    }

    /// A further context of the program's on this device.
    pub fn add_context(&self, context: CUcontext) {
        let mut state = self.state();
        if !state.contexts.contains(&context) {
            state.contexts.push(context);
        }
    }

    /// A context is about to be destroyed: its streams are used no more. Whether others are left.
    pub fn remove_context(&self, context: CUcontext) -> bool {
        let mut state = self.state();
        state.contexts.retain(|c| *c != context);
        // The driver destroys the streams and events with their context.
        state.copying.take_if(|copying| copying.context == context);
        !state.contexts.is_empty()
    }

    /// What the driver says is free and in all on the card.
    ///
    /// # Errors
    /// The driver's.
    pub fn driver_mem_info(&self) -> Result<(u64, u64), DeviceError> {
        let (mut free, mut total) = (0, 0);
        let _scope = self.scope()?;
        // SAFETY: both are live integers.
        unsafe { self.table.mem_info(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn first_context(&self) -> Result<CUcontext, DeviceError> {
        self.state().contexts.first().copied().ok_or(DeviceError::Gone)
    }

    fn scope(&self) -> Result<CallScope<'_>, DeviceError> {
        CallScope::enter(&self.table, self.first_context()?)
    }

    /// The context of the copies and a direction's stream in it, made when first needed.
    fn stream(&self, direction: Direction) -> Result<(CUcontext, CUstream), DeviceError> {
        let mut state = self.state();
        if state.copying.is_none() {
            let context = state.contexts.first().copied().ok_or(DeviceError::Gone)?;
            state.copying = Some(self.make_streams(context)?);
        }
        let copying = state.copying.as_ref().ok_or(DeviceError::Gone)?;
        let stream = match direction {
            Direction::Out => copying.out,
            Direction::In => copying.in_,
        };
        Ok((copying.context, stream))
    }

    fn make_streams(&self, context: CUcontext) -> Result<Copying, DeviceError> {
        let _scope = CallScope::enter(&self.table, context)?;
        let (mut out, mut in_) = (CUstream::NULL, CUstream::NULL);
        // SAFETY: `out` is a live handle to be written.
        unsafe { self.table.stream_create(&raw mut out, STREAM_NON_BLOCKING) }?;
        // SAFETY: as above.
        if let Err(error) = unsafe { self.table.stream_create(&raw mut in_, STREAM_NON_BLOCKING) } {
            // SAFETY: the stream was just made and nobody else knows it.
            let _ = unsafe { self.table.stream_destroy(out) };
            return Err(error);
        }
        Ok(Copying {
            context,
            out,
            in_,
            spare: Vec::new(),
        })
    }

    /// Puts an event back for the next marker, if its context still lives.
    fn recycle(&self, context: CUcontext, event: CUevent) {
        let mut state = self.state();
        if let Some(copying) = state
            .copying
            .as_mut()
            .filter(|copying| copying.context == context)
        {
            copying.spare.push(event);
        }
    }

    fn copying_context(&self) -> Result<CUcontext, DeviceError> {
        self.state()
            .copying
            .as_ref()
            .map(|copying| copying.context)
            .ok_or(DeviceError::Gone)
    }
}

fn size(bytes: u64) -> Result<usize, DeviceError> {
    let too_large = DeviceError::Driver {
        code: CUresult::ERROR_INVALID_VALUE.0,
        call: "a size beyond addresses",
    };
    usize::try_from(bytes).map_err(|_| too_large)
}

impl DeviceMemory for CudaDevice {
    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&self, bytes: u64, align: u64) -> Result<u64, DeviceError> {
        let mut ptr = CUdeviceptr(0);
        let _scope = self.scope()?;
        // SAFETY: `ptr` is a live value to be written; no fixed address is asked for.
        unsafe {
            self.table
                .address_reserve(&raw mut ptr, size(bytes)?, size(align)?, CUdeviceptr(0), 0)
        }?;
        Ok(ptr.0)
    }

    fn free_reservation(&self, addr: u64, bytes: u64) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: plain integers; the driver refuses what is no reservation.
        unsafe { self.table.address_free(CUdeviceptr(addr), size(bytes)?) }
    }

    fn create(&self, bytes: u64) -> Result<Handle, DeviceError> {
        let mut handle = CUmemGenericAllocationHandle(0);
        let _scope = self.scope()?;
        // SAFETY: `handle` and `prop` are live values.
        unsafe {
            self.table
                .create(&raw mut handle, size(bytes)?, &raw const self.prop, 0)
        }?;
        Ok(Handle(handle.0))
    }

    fn release(&self, handle: Handle) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: the handle came from `create` and is released once: the pool owns it.
        unsafe { self.table.release(CUmemGenericAllocationHandle(handle.0)) }
    }

    fn map(&self, addr: u64, bytes: u64, handle: Handle) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: plain integers; the driver checks that the range is reserved and unmapped.
        unsafe {
            self.table.map(
                CUdeviceptr(addr),
                size(bytes)?,
                0,
                CUmemGenericAllocationHandle(handle.0),
                0,
            )
        }
    }

    fn unmap(&self, addr: u64, bytes: u64) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: the caller has closed the gate and waited for all work, or nothing of the program uses the range.
        unsafe { self.table.unmap(CUdeviceptr(addr), size(bytes)?) }
    }

    fn set_access(&self, addr: u64, bytes: u64) -> Result<(), DeviceError> {
        let access = CUmemAccessDesc {
            location: CUmemLocation {
                type_: CU_MEM_LOCATION_TYPE_DEVICE,
                u: self.device.0.cast_unsigned(),
            },
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let _scope = self.scope()?;
        // SAFETY: one live descriptor, count 1.
        unsafe {
            self.table
                .set_access(CUdeviceptr(addr), size(bytes)?, &raw const access, 1)
        }
    }

    fn copy_out(&self, host: HostAddr, dev: u64, len: u64) -> Result<(), DeviceError> {
        let (context, stream) = self.stream(Direction::Out)?;
        let _scope = CallScope::enter(&self.table, context)?;
        // SAFETY: the caller keeps `len` bytes of host memory and the device range alive until it has waited for a marker
        // behind this copy (contract of `DeviceMemory`).
        unsafe {
            self.table
                .copy_out_async(host.0 as *mut _, CUdeviceptr(dev), size(len)?, stream)
        }
    }

    fn copy_in(&self, dev: u64, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        let (context, stream) = self.stream(Direction::In)?;
        let _scope = CallScope::enter(&self.table, context)?;
        // SAFETY: as in `copy_out`.
        unsafe {
            self.table
                .copy_in_async(CUdeviceptr(dev), host.0 as *const _, size(len)?, stream)
        }
    }

    fn mark(&self, direction: Direction) -> Result<Marker, DeviceError> {
        let (context, stream) = self.stream(direction)?;
        let spare = self
            .state()
            .copying
            .as_mut()
            .and_then(|copying| copying.spare.pop());
        let _scope = CallScope::enter(&self.table, context)?;
        let event = match spare {
            Some(event) => event,
            None => {
                let mut event = CUevent::NULL;
                // SAFETY: `event` is a live handle to be written.
                unsafe {
                    self.table
                        .event_create(&raw mut event, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)
                }?;
                event
            }
        };
        // SAFETY: event and stream are live ones of this context.
        if let Err(error) = unsafe { self.table.event_record(event, stream) } {
            self.recycle(context, event);
            return Err(error);
        }
        Ok(Marker(event.0 as u64))
    }

    fn wait(&self, marker: Marker) -> Result<(), DeviceError> {
        let context = self.copying_context()?;
        let event = CUevent(size(marker.0)?);
        let _scope = CallScope::enter(&self.table, context)?;
        // SAFETY: the event came from `mark` and is waited for once.
        let waited = unsafe { self.table.event_synchronize(event) };
        if waited.is_ok() {
            self.recycle(context, event);
        } else {
            // SAFETY: nobody else knows the event; after an error it is not trusted with another marker.
            let _ = unsafe { self.table.event_destroy(event) };
        }
        waited
    }

    fn done(&self, marker: &Marker) -> Result<bool, DeviceError> {
        let _scope = CallScope::enter(&self.table, self.copying_context()?)?;
        // SAFETY: the event came from `mark` and has not been waited for.
        match unsafe { self.table.event_query(CUevent(size(marker.0)?)) } {
            Ok(()) => Ok(true),
            Err(DeviceError::Driver { code, .. }) if code == CUresult::ERROR_NOT_READY.0 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn register_host(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: the caller keeps the range mapped until it has unregistered it.
        unsafe {
            self.table
                .host_register(host.0 as *mut _, size(len)?, HOST_REGISTER_PORTABLE)
        }
    }

    fn unregister_host(&self, host: HostAddr, _len: u64) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: the driver refuses what is not registered.
        unsafe { self.table.host_unregister(host.0 as *mut _) }
    }

    fn quiesce(&self) -> Result<(), DeviceError> {
        let contexts = self.state().contexts.clone();
        for context in contexts {
            let waited = CallScope::enter(&self.table, context).and_then(|_scope| {
                // SAFETY: waits for the current context's work; no capture is active, by this method's contract.
                unsafe { self.table.context_synchronize() }
            });
            match waited {
                // Destroyed since the list was read: nothing of it runs any more.
                Err(DeviceError::Gone) if !self.state().contexts.contains(&context) => {}
                other => other?,
            }
        }
        Ok(())
    }
}
