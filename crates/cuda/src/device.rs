//! [`CudaDevice`]: [`DeviceMemory`] by the driver's calls.

use core::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use ebb_abi::*;
use ebb_device::{
    DeviceError, DeviceMemory, Direction, Fingerprint, Grant, Handle, HostAddr, Location, Marker, Props,
};
use ebb_units::{Bytes, DeviceUuid};

use crate::beside;
use crate::fingerprint::Printing;
use crate::lenders;
use crate::maps::Maps;
use crate::options::{Extras, Options};
use crate::{DriverTable, Scope, check};

/// What the driver says about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its identity.
    pub uuid: DeviceUuid,
    /// Its memory.
    pub total: Bytes,
    /// Whether it has virtual memory calls at all.
    pub vmm: bool,
    /// Whether network cards may read and write such memory.
    pub rdma: bool,
    /// Whether its contexts are clients of MPS.
    pub mps: bool,
}

impl DeviceFacts {
    /// Asks the driver.
    ///
    /// # Errors
    /// [`DeviceError`] if it does not know the device.
    pub fn read(table: &DriverTable, device: CUdevice) -> Result<Self, DeviceError> {
        let mut uuid = CUuuid::default();
        // SAFETY: a valid place for 16 bytes.
        let newer = unsafe { table.cuDeviceGetUuid_v2(&raw mut uuid, device) };
        if !newer.is_success() {
            // SAFETY: as above. Drivers before 11.4 have only this form.
            check("cuDeviceGetUuid", unsafe {
                table.cuDeviceGetUuid(&raw mut uuid, device)
            })?;
        }
        let mut total = 0usize;
        // SAFETY: a valid place for the answer.
        check("cuDeviceTotalMem", unsafe {
            table.cuDeviceTotalMem_v2(&raw mut total, device)
        })?;
        let has = |attribute| {
            let mut value = 0;
            // SAFETY: a valid place for the answer. An unknown attribute is an error, and then the answer is no.
            let known = unsafe { table.cuDeviceGetAttribute(&raw mut value, attribute, device) };
            known.is_success() && value != 0
        };
        Ok(Self {
            uuid: DeviceUuid(uuid.bytes.map(|byte| byte.cast_unsigned())),
            total: Bytes(total as u64),
            vmm: has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
            rdma: has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
            mps: has(CU_DEVICE_ATTRIBUTE_MPS_ENABLED),
        })
    }
}

/// One GPU's memory, by the driver's calls in a context of the program.
///
/// # Locks
/// `access` or `printing`, then `contexts`, then `lanes`. Driver calls are made under `lanes` (making a stream or event, rare) and
/// `access` (so that a peer which joins misses no range); neither waits for the GPU.
#[derive(Debug)]
pub struct CudaDevice {
    pub(crate) table: Arc<DriverTable>,
    pub(crate) device: CUdevice,
    granularity: u64,
    options: Options,
    /// The program's contexts on this device; calls are made in the first.
    contexts: RwLock<Vec<CUcontext>>,
    lanes: Mutex<Lanes>,
    access: Mutex<Access>,
    pub(crate) printing: Printing,
}

/// The streams of our own, made at the first copy, in the context that was the first then.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    context: CUcontext,
    out: CUstream,
    into: CUstream,
    /// For fingerprints, which must not wait for copies.
    look: CUstream,
    /// Events that nobody waits for.
    idle: Vec<CUevent>,
}

/// What is mapped, and who may use it.
#[derive(Debug, Default)]
struct Access {
    maps: Maps,
    /// Other devices that the program has enabled access from.
    peers: Vec<CUdevice>,
}

impl CudaDevice {
    fn register(&self, host: HostAddr, len: u64, flags: u32) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: the caller's contract: the range is mapped and stays so until it is unregistered. With `READ_ONLY` it may be a mapping
        // that cannot be written.
        let answer = unsafe {
            self.table
                .cuMemHostRegister_v2(host_pointer(host), Bytes(len).to_usize(), flags)
        };
        check("cuMemHostRegister", answer)
    }

    /// A device, with the context that the program made on it if it has made one. Without a context addresses can be
    /// reserved and memory can be made, but nothing can be copied.
    ///
    /// # Errors
    /// [`DeviceError`] if the driver does not say a granularity, which means that it has no virtual memory calls for it.
    pub fn new(
        table: Arc<DriverTable>,
        device: CUdevice,
        context: Option<CUcontext>,
        facts: &DeviceFacts,
    ) -> Result<Self, DeviceError> {
        let mut this = Self {
            table,
            device,
            granularity: 0,
            options: Options::new(facts.rdma),
            contexts: RwLock::new(context.into_iter().collect()),
            lanes: Mutex::default(),
            access: Mutex::default(),
            printing: Printing::default(),
        };
        let mut granularity = 0usize;
        this.options.ask(|extras| {
            let prop = this.prop(extras);
            // SAFETY: valid places for the question and the answer.
            let answer = unsafe {
                this.table.cuMemGetAllocationGranularity(
                    &raw mut granularity,
                    &raw const prop,
                    CU_MEM_ALLOC_GRANULARITY_MINIMUM,
                )
            };
            check("cuMemGetAllocationGranularity", answer)
        })?;
        this.granularity = granularity as u64;
        if !this.granularity.is_power_of_two() {
            return Err(DeviceError::Driver {
                code: CUresult::ERROR_NOT_SUPPORTED.0,
                call: "cuMemGetAllocationGranularity",
            });
        }
        Ok(this)
    }

    /// The program made another context on this device.
    pub fn add_context(&self, context: CUcontext) {
        let mut contexts = self.contexts.write().unwrap_or_else(PoisonError::into_inner);
        if !contexts.contains(&context) {
            contexts.push(context);
        }
    }

    /// The program is about to destroy a context. Answers whether another one is left; if none is, the caller must have
    /// detached the device before. Our streams move to another context. No copy may be under way.
    pub fn remove_context(&self, context: CUcontext) -> bool {
        self.printing.leave(&self.table, context);
        let mut contexts = self.contexts.write().unwrap_or_else(PoisonError::into_inner);
        contexts.retain(|&known| known != context);
        let mut lanes = self.lanes();
        if lanes.context == context && !context.is_null() {
            self.drop_lanes(&mut lanes);
        }
        !contexts.is_empty()
    }

    /// A context is gone already, and our streams with it: no call is made in it any more.
    pub fn forget_context(&self, context: CUcontext) {
        self.printing.forget(context);
        let mut contexts = self.contexts.write().unwrap_or_else(PoisonError::into_inner);
        contexts.retain(|&known| known != context);
        let mut lanes = self.lanes();
        if lanes.context == context {
            *lanes = Lanes::default();
        }
    }

    /// Lets another device use all memory of this one, now and later.
    ///
    /// # Errors
    /// [`DeviceError`]; the peer has no access.
    pub fn add_peer(&self, peer: CUdevice) -> Result<(), DeviceError> {
        let mut access = self.access();
        if access.peers.contains(&peer) || peer == self.device {
            return Ok(());
        }
        let _scope = self.scope()?;
        for (addr, size) in access.maps.accessible() {
            self.set_access_for(addr, size, &[peer])?;
        }
        access.peers.push(peer);
        Ok(())
    }

    /// Takes the access of another device away again, on everything.
    ///
    /// # Errors
    /// [`DeviceError`]; it may still have access to some of it, but gets none to anything new.
    pub fn remove_peer(&self, peer: CUdevice) -> Result<(), DeviceError> {
        let mut access = self.access();
        if !access.peers.contains(&peer) {
            return Ok(());
        }
        access.peers.retain(|known| *known != peer);
        let _scope = self.scope()?;
        for (addr, size) in access.maps.accessible() {
            self.access_for(addr, size, &[peer], CU_MEM_ACCESS_FLAGS_PROT_NONE)?;
        }
        Ok(())
    }

    /// What memory of ours is made with, for who makes some by [`DeviceMemory::create_as`].
    ///
    /// # Errors
    /// [`DeviceError`] if the driver makes no memory at all, so that it is not known what it accepts.
    pub fn own_props(&self) -> Result<Props, DeviceError> {
        if self.options.known().is_none() {
            let probe = self.create(self.granularity)?;
            self.release(probe)?;
        }
        let extras = self.options.known().unwrap_or(Extras {
            export: false,
            rdma: false,
        });
        Ok(props_of(&self.prop(extras)))
    }

    /// Whether descriptors of our memory can be had; as long as none was made, whether it will be asked for.
    #[must_use]
    pub fn is_made_to_share(&self) -> bool {
        self.options.gives().export
    }

    /// Whether network cards may use our memory, in the same sense.
    #[must_use]
    pub fn is_made_for_network_cards(&self) -> bool {
        self.options.gives().rdma
    }

    fn prop(&self, extras: Extras) -> CUmemAllocationProp {
        let mut prop = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: if extras.export {
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            } else {
                CU_MEM_HANDLE_TYPE_NONE
            },
            location: location(self.device),
            ..CUmemAllocationProp::default()
        };
        // The bytes of the flags: compression, gpuDirectRDMACapable, usage (2 bytes), reserved.
        prop.allocFlags[0] = u16::from_ne_bytes([0, u8::from(extras.rdma)]);
        prop
    }

    /// For calls that belong to the process, not to a context: the driver needs none for them, and if there is one, it
    /// is made current all the same, since not every driver keeps to that.
    pub(crate) fn scope(&self) -> Result<Option<Scope<'_>>, DeviceError> {
        match self.first_context() {
            Ok((scope, _)) => Ok(Some(scope)),
            Err(DeviceError::Gone) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn first_context(&self) -> Result<(Scope<'_>, CUcontext), DeviceError> {
        let first = self
            .contexts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .first()
            .copied();
        let context = first.ok_or(DeviceError::Gone)?;
        Ok((Scope::enter(&self.table, context)?, context))
    }

    pub(crate) fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn access(&self) -> MutexGuard<'_, Access> {
        self.access.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream of a direction, in the first context, of which the caller holds a [`Scope`].
    pub(crate) fn stream(
        &self,
        lanes: &mut Lanes,
        first: CUcontext,
        direction: Direction,
    ) -> Result<CUstream, DeviceError> {
        if lanes.context.is_null() {
            lanes.context = first;
        }
        let stream = match direction {
            Direction::Out => &mut lanes.out,
            Direction::In => &mut lanes.into,
        };
        self.made(stream)
    }

    /// The stream for fingerprints; as [`Self::stream`].
    pub(crate) fn look_stream(&self, lanes: &mut Lanes, first: CUcontext) -> Result<CUstream, DeviceError> {
        if lanes.context.is_null() {
            lanes.context = first;
        }
        self.made(&mut lanes.look)
    }

    /// Makes a stream in the current context if it is not there yet.
    fn made(&self, stream: &mut CUstream) -> Result<CUstream, DeviceError> {
        if stream.is_null() {
            let mut new = CUstream::NULL;
            // SAFETY: a valid place. Non-blocking: never ordered with the program's own default stream.
            check("cuStreamCreate", unsafe {
                self.table.cuStreamCreate(&raw mut new, CU_STREAM_NON_BLOCKING.0)
            })?;
            *stream = new;
        }
        Ok(*stream)
    }

    /// Streams and events die with their context, so that errors are of no interest.
    fn drop_lanes(&self, lanes: &mut Lanes) {
        if let Ok(_scope) = Scope::enter(&self.table, lanes.context) {
            for stream in [lanes.out, lanes.into, lanes.look] {
                if !stream.is_null() {
                    // SAFETY: a stream of ours with no work on it (the caller's contract), named here for the last time.
                    let _ = unsafe { self.table.cuStreamDestroy_v2(stream) };
                }
            }
            for &event in &lanes.idle {
                // SAFETY: an event of ours that nobody waits for, named here for the last time.
                let _ = unsafe { self.table.cuEventDestroy_v2(event) };
            }
        }
        *lanes = Lanes::default();
    }

    /// Read and write. The caller holds a [`Scope`].
    pub(crate) fn set_access_for(
        &self,
        addr: u64,
        size: u64,
        devices: &[CUdevice],
    ) -> Result<(), DeviceError> {
        self.access_for(addr, size, devices, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    }

    fn access_for(
        &self,
        addr: u64,
        size: u64,
        devices: &[CUdevice],
        flags: CUmemAccess_flags,
    ) -> Result<(), DeviceError> {
        let descriptions: Vec<CUmemAccessDesc> = devices
            .iter()
            .map(|&device| CUmemAccessDesc {
                location: location(device),
                flags,
            })
            .collect();
        // SAFETY: the descriptions are valid for their count. The driver checks the range.
        let answer = unsafe {
            self.table.cuMemSetAccess(
                CUdeviceptr(addr),
                Bytes(size).to_usize(),
                descriptions.as_ptr(),
                descriptions.len(),
            )
        };
        check("cuMemSetAccess", answer)
    }
}

/// The program's properties as the seam carries them.
#[must_use]
pub fn props_of(prop: &CUmemAllocationProp) -> Props {
    // SAFETY: both are 32 bytes without padding (`abi` checks the layout), and every pattern of bits is valid for either;
    // the pointer in it (a Windows security descriptor) is handed back to the driver and never followed.
    Props(unsafe { core::mem::transmute::<CUmemAllocationProp, [u64; 4]>(*prop) })
}

fn prop_of(props: &Props) -> CUmemAllocationProp {
    // SAFETY: as in `props_of`.
    unsafe { core::mem::transmute::<[u64; 4], CUmemAllocationProp>(props.0) }
}

pub(crate) fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        type_: CU_MEM_LOCATION_TYPE_DEVICE,
        u: device.0.cast_unsigned(),
    }
}

fn host_pointer(host: HostAddr) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(host.0)
}

fn event_of(marker: &Marker) -> CUevent {
    CUevent(Bytes(marker.0).to_usize())
}

impl DeviceMemory for CudaDevice {
    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn lacks(&self) -> &'static str {
        self.options.lacks()
    }

    fn reserve(&self, size: u64, align: u64) -> Result<u64, DeviceError> {
        let _scope = self.scope()?;
        let mut at = CUdeviceptr::NULL;
        let align = if align <= self.granularity {
            0
        } else {
            Bytes(align).to_usize()
        };
        // SAFETY: a valid place for the answer.
        let answer = unsafe {
            self.table
                .cuMemAddressReserve(&raw mut at, Bytes(size).to_usize(), align, CUdeviceptr::NULL, 0)
        };
        check("cuMemAddressReserve", answer)?;
        Ok(at.0)
    }

    fn free_reservation(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: no pointers; the driver checks the range.
        check("cuMemAddressFree", unsafe {
            self.table
                .cuMemAddressFree(CUdeviceptr(addr), Bytes(size).to_usize())
        })
    }

    fn create(&self, size: u64) -> Result<Handle, DeviceError> {
        let _scope = self.scope()?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let mut make = |extras| {
            let prop = self.prop(extras);
            // SAFETY: valid places for the properties and the answer.
            let answer = unsafe {
                self.table
                    .cuMemCreate(&raw mut handle, Bytes(size).to_usize(), &raw const prop, 0)
            };
            check("cuMemCreate", answer)
        };
        let made = self.options.with(&mut make);
        match (made, self.options.gives()) {
            // The program's table of descriptors is full, say. It gets memory all the same, as of `cuMemAlloc`; this piece cannot be shared.
            (Err(DeviceError::Driver { code, .. }), Extras { export: true, rdma })
                if CUresult(code) == CUresult::ERROR_OPERATING_SYSTEM =>
            {
                make(Extras { export: false, rdma })?;
            }
            (made, _) => made?,
        }
        Ok(Handle(handle.0))
    }

    fn export(&self, handle: Handle) -> Result<OwnedFd, DeviceError> {
        let _scope = self.scope()?;
        let mut fd: i32 = -1;
        // SAFETY: a valid place for a descriptor's number, which is what this kind of handle is.
        check("cuMemExportToShareableHandle", unsafe {
            self.table.cuMemExportToShareableHandle(
                (&raw mut fd).cast(),
                CUmemGenericAllocationHandle(handle.0),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        })?;
        if fd < 0 {
            return Err(DeviceError::Driver {
                code: CUresult::ERROR_OPERATING_SYSTEM.0,
                call: "cuMemExportToShareableHandle",
            });
        }
        // SAFETY: `from_raw_fd` needs an open descriptor that nobody else owns: the driver made it for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn release(&self, handle: Handle) -> Result<(), DeviceError> {
        // SAFETY: no pointers; the driver checks the handle.
        check("cuMemRelease", unsafe {
            self.table.cuMemRelease(CUmemGenericAllocationHandle(handle.0))
        })
    }

    fn map(&self, addr: u64, size: u64, handle: Handle) -> Result<(), DeviceError> {
        let mut access = self.access();
        let _scope = self.scope()?;
        let handle = CUmemGenericAllocationHandle(handle.0);
        // SAFETY: no pointers of the host; the driver checks range and handle.
        let answer = unsafe {
            self.table
                .cuMemMap(CUdeviceptr(addr), Bytes(size).to_usize(), 0, handle, 0)
        };
        check("cuMemMap", answer)?;
        access.maps.map(addr, size);
        Ok(())
    }

    fn unmap(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let mut access = self.access();
        // The driver calls it a success to unmap what is not mapped; here that is a fault of ours, to be seen early.
        if !access.maps.are_whole(addr, size) {
            return check("cuMemUnmap", CUresult::ERROR_INVALID_VALUE);
        }
        // Even if no context is left (it was destroyed already): unmapping is what is left to do.
        let _scope = self.scope();
        // SAFETY: no pointers of the host; the driver checks the range. That no work uses it is the caller's contract.
        check("cuMemUnmap", unsafe {
            self.table.cuMemUnmap(CUdeviceptr(addr), Bytes(size).to_usize())
        })?;
        access.maps.unmap(addr, size);
        Ok(())
    }

    fn set_access(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let mut access = self.access();
        let _scope = self.scope()?;
        if access.peers.is_empty() {
            self.set_access_for(addr, size, &[self.device])?;
        } else {
            let devices: Vec<CUdevice> = core::iter::once(self.device)
                .chain(access.peers.iter().copied())
                .collect();
            self.set_access_for(addr, size, &devices)?;
        }
        access.maps.give_access(addr, size);
        Ok(())
    }

    fn copy_out(&self, host: HostAddr, dev: u64, len: u64) -> Result<(), DeviceError> {
        let (_scope, first) = self.first_context()?;
        let stream = self.stream(&mut self.lanes(), first, Direction::Out)?;
        // SAFETY: the caller's contract: `host` is `len` bytes that stay mapped, and that nobody else uses, until the copy's marker was
        // waited for. The driver checks the device's side.
        let answer = unsafe {
            self.table.cuMemcpyDtoHAsync_v2(
                host_pointer(host),
                CUdeviceptr(dev),
                Bytes(len).to_usize(),
                stream,
            )
        };
        check("cuMemcpyDtoHAsync", answer)
    }

    fn copy_in(&self, dev: u64, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        let (_scope, first) = self.first_context()?;
        let stream = self.stream(&mut self.lanes(), first, Direction::In)?;
        // SAFETY: as in `copy_out`.
        let answer = unsafe {
            self.table.cuMemcpyHtoDAsync_v2(
                CUdeviceptr(dev),
                host_pointer(host),
                Bytes(len).to_usize(),
                stream,
            )
        };
        check("cuMemcpyHtoDAsync", answer)
    }

    fn zero(&self, dev: u64, len: u64) -> Result<(), DeviceError> {
        let (_scope, first) = self.first_context()?;
        let stream = self.stream(&mut self.lanes(), first, Direction::In)?;
        // SAFETY: no pointers of the host; the driver checks the range. A stream of ours.
        check("cuMemsetD8Async", unsafe {
            self.table
                .cuMemsetD8Async(CUdeviceptr(dev), 0, Bytes(len).to_usize(), stream)
        })
    }

    fn fingerprint(&self, ranges: &[(u64, u64)]) -> Result<Vec<Fingerprint>, DeviceError> {
        self.fingerprints(ranges)
    }

    fn expect_fingerprints(&self) {
        self.compile_fingerprints();
    }

    fn mark(&self, direction: Direction) -> Result<Marker, DeviceError> {
        let (_scope, first) = self.first_context()?;
        let mut lanes = self.lanes();
        let stream = self.stream(&mut lanes, first, direction)?;
        let event = match lanes.idle.pop() {
            Some(event) => event,
            None => {
                let mut event = CUevent::NULL;
                let flags = CU_EVENT_DISABLE_TIMING.0 | CU_EVENT_BLOCKING_SYNC.0;
                // SAFETY: a valid place for the answer.
                check("cuEventCreate", unsafe {
                    self.table.cuEventCreate(&raw mut event, flags)
                })?;
                event
            }
        };
        // SAFETY: an event and a stream of ours, of one context.
        let answer = check("cuEventRecord", unsafe {
            self.table.cuEventRecord(event, stream)
        });
        if let Err(error) = answer {
            lanes.idle.push(event);
            return Err(error);
        }
        Ok(Marker(event.0 as u64))
    }

    fn wait(&self, marker: Marker) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        let event = event_of(&marker);
        // SAFETY: an event that `mark` made and that goes back to the idle ones only below.
        let answer = check("cuEventSynchronize", unsafe {
            self.table.cuEventSynchronize(event)
        });
        // After a failure nothing is known about the event: it is left behind.
        if answer.is_ok() {
            self.lanes().idle.push(event);
        }
        answer
    }

    fn done(&self, marker: &Marker) -> Result<bool, DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: as in `wait`.
        match unsafe { self.table.cuEventQuery(event_of(marker)) } {
            CUresult::ERROR_NOT_READY => Ok(false),
            other => check("cuEventQuery", other).map(|()| true),
        }
    }

    fn register_host(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        self.register(host, len, CU_MEMHOSTREGISTER_PORTABLE)
    }

    fn register_read_only(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        self.register(
            host,
            len,
            CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY,
        )
    }

    fn unregister_host(&self, host: HostAddr, _len: u64) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        // SAFETY: the start of a range that was registered as a whole.
        check("cuMemHostUnregister", unsafe {
            self.table.cuMemHostUnregister(host_pointer(host))
        })
    }

    fn quiesce(&self) -> Result<(), DeviceError> {
        let contexts = self.contexts.read().unwrap_or_else(PoisonError::into_inner);
        let (first, others) = match &contexts[..] {
            [] => return Ok(()),
            // Mostly there is one: programs wait here with every free.
            [one] => (*one, Vec::new()),
            [one, others @ ..] => (*one, others.to_vec()),
        };
        drop(contexts);
        for context in core::iter::once(first).chain(others) {
            // No capture is under way, by the caller's contract: there is none whose rules would have to be relaxed.
            let _scope = Scope::plainly(&self.table, context)?;
            // SAFETY: no arguments.
            check("cuCtxSynchronize", unsafe { self.table.cuCtxSynchronize() })?;
        }
        Ok(())
    }

    fn create_as(&self, size: u64, props: &Props) -> Result<Handle, DeviceError> {
        let _scope = self.scope()?;
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let prop = prop_of(props);
        // SAFETY: valid places for the properties and the answer.
        let answer = unsafe {
            self.table
                .cuMemCreate(&raw mut handle, Bytes(size).to_usize(), &raw const prop, 0)
        };
        check("cuMemCreate", answer)?;
        Ok(Handle(handle.0))
    }

    fn map_as(&self, addr: u64, size: u64, handle: Handle) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        let handle = CUmemGenericAllocationHandle(handle.0);
        // SAFETY: no pointers of the host; the driver checks range and handle.
        check("cuMemMap", unsafe {
            self.table
                .cuMemMap(CUdeviceptr(addr), Bytes(size).to_usize(), 0, handle, 0)
        })
    }

    fn unmap_as(&self, addr: u64, size: u64) -> Result<(), DeviceError> {
        let _scope = self.scope();
        // SAFETY: no pointers of the host; the driver checks the range. That no work uses it is the caller's contract.
        check("cuMemUnmap", unsafe {
            self.table.cuMemUnmap(CUdeviceptr(addr), Bytes(size).to_usize())
        })
    }

    fn grant(&self, addr: u64, size: u64, grants: &[Grant]) -> Result<(), DeviceError> {
        let _scope = self.scope()?;
        let descriptions: Vec<CUmemAccessDesc> = grants
            .iter()
            .map(|grant| CUmemAccessDesc {
                location: CUmemLocation {
                    type_: CUmemLocationType(grant.location.kind),
                    u: grant.location.id,
                },
                flags: CUmemAccess_flags(grant.flags),
            })
            .collect();
        // SAFETY: the descriptions are valid for their count. The driver checks the range.
        check("cuMemSetAccess", unsafe {
            self.table.cuMemSetAccess(
                CUdeviceptr(addr),
                Bytes(size).to_usize(),
                descriptions.as_ptr(),
                descriptions.len(),
            )
        })
    }

    fn lenders(&self) -> Vec<(DeviceUuid, Props)> {
        lenders::of(&self.table, self.device)
    }

    fn copy_between(&self, direction: Direction, to: u64, from: u64, len: u64) -> Result<(), DeviceError> {
        let (_scope, first) = self.first_context()?;
        let stream = self.stream(&mut self.lanes(), first, direction)?;
        // SAFETY: no pointers of the host; the driver checks both ranges. A stream of ours.
        check("cuMemcpyDtoDAsync", unsafe {
            self.table
                .cuMemcpyDtoDAsync_v2(CUdeviceptr(to), CUdeviceptr(from), Bytes(len).to_usize(), stream)
        })
    }

    fn push_to_host(&self, addr: u64, len: u64) -> Result<(), DeviceError> {
        let (_scope, first) = self.first_context()?;
        let stream = self.stream(&mut self.lanes(), first, Direction::Out)?;
        beside::push_to_host(&self.table, self.device, stream, addr, len)
    }

    fn trim_graphs(&self) -> Result<u64, DeviceError> {
        let _scope = self.first_context()?;
        beside::trim_graphs(&self.table, self.device)
    }

    fn occupied(&self) -> Result<u64, DeviceError> {
        let _scope = self.first_context()?;
        beside::occupied(&self.table)
    }

    fn taken_besides(&self) -> u64 {
        self.printing.taken()
    }

    fn peers(&self) -> Vec<Location> {
        let of = |device: &CUdevice| Location {
            kind: CU_MEM_LOCATION_TYPE_DEVICE.0,
            id: device.0.cast_unsigned(),
        };
        self.access().peers.iter().map(of).collect()
    }

    fn location(&self) -> Location {
        Location {
            kind: CU_MEM_LOCATION_TYPE_DEVICE.0,
            id: self.device.0.cast_unsigned(),
        }
    }

    fn can_copy(&self) -> bool {
        !self
            .contexts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_codes() {
        assert_eq!(check("x", CUresult::SUCCESS), Ok(()));
        assert_eq!(check("x", CUresult(2)), Err(DeviceError::OutOfMemory));
        assert_eq!(check("x", CUresult(4)), Err(DeviceError::Gone));
        assert_eq!(
            check("x", CUresult(1)),
            Err(DeviceError::Driver { code: 1, call: "x" })
        );
    }

    #[test]
    fn properties_pass_the_seam_unchanged() {
        let mut prop = CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: location(CUdevice(3)),
            ..CUmemAllocationProp::default()
        };
        prop.allocFlags = [0x0101, 2, 0, 9];
        let back = prop_of(&props_of(&prop));
        assert_eq!(
            (
                back.type_,
                back.requestedHandleTypes,
                back.location.u,
                back.allocFlags
            ),
            (prop.type_, prop.requestedHandleTypes, 3, prop.allocFlags)
        );
    }

    #[test]
    fn a_missing_function_is_an_error_of_its_call() {
        // SAFETY: null for every name.
        let table = unsafe { DriverTable::load(|_| core::ptr::null()) };
        // SAFETY: no arguments.
        assert_eq!(unsafe { table.cuCtxSynchronize() }, CUresult::ERROR_NOT_SUPPORTED);
        assert!(DeviceFacts::read(&table, CUdevice(0)).is_err());
    }
}
