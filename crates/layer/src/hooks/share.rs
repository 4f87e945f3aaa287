//! What lets somebody else hold memory. What can be shared is pinned as long as somebody may hold it; what memory of
//! `cuMemAlloc` does not do, ours does not either, and `ebb doctor` names it. Legacy IPC is in [`super::ipc`].

use core::ffi::c_void;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebb_abi::*;
use ebb_layer_core::{Allocation, PinId, PinReason};
use ebb_units::Bytes;

use crate::barrier;
use crate::bridge::Running;
use crate::hooks::{imports, ipc, multicast, vmm, with};
use crate::symbols::real;

/// Refuses a call about memory of ours; `None` if it is not ours.
pub(super) fn refuse(what: &'static str, ptr: u64, code: CUresult) -> Option<CUresult> {
    with(|running| {
        if !running.engine.contains(ptr) && !ipc::contains(ptr) {
            return None;
        }
        // Once a call, not once a try: some programs ask for every buffer.
        static NOTED: AtomicU32 = AtomicU32::new(0);
        let bit = what
            .bytes()
            .fold(0u32, |hash, byte| hash.rotate_left(5) ^ u32::from(byte))
            % 32;
        if NOTED.fetch_or(1 << bit, Ordering::Relaxed) & 1 << bit == 0 {
            running.engine.note(&format!(
                "{what} on memory of the pool is answered as on memory of cuMemAlloc: {code:?}"
            ));
        }
        Some(code)
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemRetainAllocationHandle(
    handle: *mut CUmemGenericAllocationHandle,
    addr: *mut c_void,
) -> CUresult {
    if !handle.is_null()
        && let Some(ours) = vmm::retain(addr)
    {
        // SAFETY: not null, and the program's place for the answer.
        unsafe { handle.write(ours) };
        return CUresult::SUCCESS;
    }
    // As on memory of `cuMemAlloc`, which has no handle.
    refuse(
        "cuMemRetainAllocationHandle",
        addr.addr() as u64,
        CUresult::ERROR_INVALID_VALUE,
    )
    .unwrap_or_else(|| {
        // SAFETY: the program's own call.
        let result = unsafe { real::cuMemRetainAllocationHandle(handle, addr) };
        if result.is_success() {
            // SAFETY: the driver has just written it.
            imports::retained(unsafe { handle.read() });
        }
        result
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    dptr: CUdeviceptr,
    size: usize,
    handleType: CUmemRangeHandleType,
    flags: u64,
) -> CUresult {
    // SAFETY: the program's own call.
    let call = || unsafe { real::cuMemGetHandleForAddressRange(handle, dptr, size, handleType, flags) };
    if with(|running| running.engine.contains(dptr.0).then_some(())).is_none() {
        return vmm::shares(dptr, size, PinReason::DmaBuf, call);
    }
    // The driver looks at addresses, and what it hands out refers to the memory that lies there now.
    let passage = barrier::enter();
    if let barrier::Passage::Refused(code) = passage {
        return code;
    }
    let pinned = pin(dptr.0, size as u64, PinReason::DmaBuf);
    let result = call();
    if !result.is_success()
        && let Some(pin) = pinned
    {
        unpin(pin);
    }
    barrier::leave(passage);
    result
}

/// Pins allocations of ours in a range. Inside the gate.
fn pin(ptr: u64, len: u64, reason: PinReason) -> Option<PinId> {
    with(|running| running.engine.pin(ptr, Bytes(len), reason).ok())
}

fn unpin(pin: PinId) {
    with(|running| {
        running.engine.unpin(pin);
        Some(())
    });
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastBindAddr(
    mcHandle: CUmemGenericAllocationHandle,
    mcOffset: usize,
    memptr: CUdeviceptr,
    size: usize,
    flags: u64,
) -> CUresult {
    refuse("cuMulticastBindAddr", memptr.0, CUresult::ERROR_INVALID_VALUE).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        multicast::by_address(mcHandle, mcOffset, memptr, size, || unsafe {
            real::cuMulticastBindAddr(mcHandle, mcOffset, memptr, size, flags)
        })
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuMulticastBindAddr_v2(
    mcHandle: CUmemGenericAllocationHandle,
    dev: CUdevice,
    mcOffset: usize,
    memptr: CUdeviceptr,
    size: usize,
    flags: u64,
) -> CUresult {
    refuse("cuMulticastBindAddr", memptr.0, CUresult::ERROR_INVALID_VALUE).unwrap_or_else(|| {
        // SAFETY: the program's own call.
        multicast::by_address(mcHandle, mcOffset, memptr, size, || unsafe {
            real::cuMulticastBindAddr_v2(mcHandle, dev, mcOffset, memptr, size, flags)
        })
    })
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuPointerSetAttribute(
    value: *const c_void,
    attribute: CUpointer_attribute,
    ptr: CUdeviceptr,
) -> CUresult {
    let ours = with(|running| {
        running
            .lookup(ptr.0)
            .map(|allocation| (allocation.device, allocation))
    });
    let Some((_, allocation)) = ours else {
        // SAFETY: the program's own call.
        return vmm::shares(ptr, 1, PinReason::SyncMemops, || unsafe {
            real::cuPointerSetAttribute(value, attribute, ptr)
        });
    };
    if attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || value.is_null() {
        // The only attribute that can be set.
        return CUresult::ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, and the program's value of this attribute, which is a word. It may be of any alignment.
    let on = unsafe { value.cast::<u32>().read_unaligned() } != 0;
    let passage = barrier::enter();
    if let barrier::Passage::Refused(code) = passage {
        return code;
    }
    with(|running| {
        sync::set(running, &allocation, on);
        Some(())
    });
    barrier::leave(passage);
    CUresult::SUCCESS
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuCtxEnablePeerAccess(peerContext: CUcontext, Flags: u32) -> CUresult {
    // The driver's call does not cover memory like ours: access is set for each range. Through the gate, because that
    // must not meet a range on its way out.
    let passage = barrier::enter();
    if let barrier::Passage::Refused(code) = passage {
        return code;
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::cuCtxEnablePeerAccess(peerContext, Flags) };
    if matches!(
        result,
        CUresult::SUCCESS | CUresult::ERROR_PEER_ACCESS_ALREADY_ENABLED
    ) {
        with(|running| {
            let (from, owner) = (running.current_context()?, peerContext);
            let (user, device) = (running.current_device()?, running.device_of(owner)?);
            peers().insert(Peering {
                from,
                owner,
                user,
                device,
            });
            running.peers(device, user);
            Some(())
        });
    }
    barrier::leave(passage);
    result
}

/// # Safety
/// As the driver's function.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C-unwind" fn cuCtxDisablePeerAccess(peerContext: CUcontext) -> CUresult {
    let passage = barrier::enter();
    if let barrier::Passage::Refused(code) = passage {
        return code;
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::cuCtxDisablePeerAccess(peerContext) };
    if result.is_success() {
        with(|running| {
            let from = running.current_context()?;
            peering_ends(running, |peering| {
                peering.from == from && peering.owner == peerContext
            });
            Some(())
        });
    }
    barrier::leave(passage);
    result
}

/// A context that may use the memory of another one's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Peering {
    from: CUcontext,
    owner: CUcontext,
    user: CUdevice,
    device: CUdevice,
}

static PEERS: Mutex<Option<HashSet<Peering>>> = Mutex::new(None);

/// The peers, in a guard that makes an empty set where there is none.
struct Peers(MutexGuard<'static, Option<HashSet<Peering>>>);

fn peers() -> Peers {
    Peers(PEERS.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Peers {
    fn insert(&mut self, peering: Peering) {
        self.0.get_or_insert_default().insert(peering);
    }

    /// Takes some off. The pairs of devices of which none is left.
    fn take(&mut self, gone: impl Fn(&Peering) -> bool) -> Vec<(CUdevice, CUdevice)> {
        let all = self.0.get_or_insert_default();
        let off: Vec<Peering> = all.extract_if(|peering| gone(peering)).collect();
        off.into_iter()
            .map(|peering| (peering.device, peering.user))
            .filter(|pair| !all.iter().any(|left| (left.device, left.user) == *pair))
            .collect()
    }
}

/// Whether the program let a device use the memory of another one, by engine numbers.
pub(crate) fn reaches(running: &Running, user: usize, owner: usize) -> bool {
    let (Some(user), Some(owner)) = (running.by_index(user), running.by_index(owner)) else {
        return false;
    };
    let peers = peers();
    let mut all = peers.0.iter().flatten();
    all.any(|peering| peering.user == user.ordinal && peering.device == owner.ordinal)
}

/// Access ends where no context of the same device has it any more.
fn peering_ends(running: &Running, gone: impl Fn(&Peering) -> bool) {
    let pairs = peers().take(gone);
    for (device, user) in pairs {
        running.no_peer(device, user);
    }
}

/// A context goes, and with it the access that it had and gave.
pub(crate) fn context_goes(running: &Running, context: CUcontext) {
    peering_ends(running, |peering| {
        peering.from == context || peering.owner == context
    });
    sync::context_goes();
}

/// Memory whose operations are to be synchronous: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
///
/// Programs set it before they hand memory to a network card, by ways that nobody sees. So the memory is pinned. And
/// as long as there is any, operations of the synchronous kind are waited for, whatever they are about: the driver may
/// return from some of them early.
pub(crate) mod sync {
    use std::collections::btree_map::Entry;

    use super::*;

    /// By device and allocation id. Memory of another process has no pin here.
    type Set = BTreeMap<(usize, u64), Option<PinId>>;

    static SET: Mutex<Set> = Mutex::new(Set::new());
    static COUNT: AtomicUsize = AtomicUsize::new(0);

    fn table() -> MutexGuard<'static, Set> {
        SET.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is set.
    pub(crate) fn is_set(allocation: &Allocation) -> bool {
        COUNT.load(Ordering::Acquire) != 0 && table().contains_key(&(allocation.device, allocation.id))
    }

    /// Sets it, or takes it back. Inside the gate.
    pub(super) fn set(running: &Running, allocation: &Allocation, on: bool) {
        let key = (allocation.device, allocation.id);
        let mut table = table();
        if !on {
            if let Some(Some(pin)) = table.remove(&key) {
                running.engine.unpin(pin);
            }
        } else if let Entry::Vacant(place) = table.entry(key) {
            let bytes = Bytes(allocation.size);
            place.insert(
                running
                    .engine
                    .pin(allocation.base, bytes, PinReason::SyncMemops)
                    .ok(),
            );
        }
        COUNT.store(table.len(), Ordering::Release);
    }

    /// An allocation is freed; its pin goes by itself.
    pub(crate) fn freed(allocation: &Allocation) {
        if COUNT.load(Ordering::Acquire) != 0 {
            let mut table = table();
            table.remove(&(allocation.device, allocation.id));
            COUNT.store(table.len(), Ordering::Release);
        }
    }

    /// Many allocations may have gone.
    pub(super) fn context_goes() {
        if COUNT.load(Ordering::Acquire) == 0 {
            return;
        }
        with(|running| {
            let live: HashSet<(usize, u64)> = running.engine.live_ids();
            let mut table = table();
            table.retain(|key, _| live.contains(key));
            COUNT.store(table.len(), Ordering::Release);
            Some(())
        });
    }

    /// After a synchronous operation on memory: waits, if there is memory that wants it.
    #[inline]
    pub(crate) fn after(result: CUresult, per_thread: bool) -> CUresult {
        if COUNT.load(Ordering::Relaxed) == 0 || !result.is_success() {
            return result;
        }
        let stream = if per_thread {
            CU_STREAM_PER_THREAD
        } else {
            CUstream::NULL
        };
        with(|running| {
            // SAFETY: a stream that every context has.
            Some(unsafe { running.table.cuStreamSynchronize(stream) })
        })
        .unwrap_or(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peering(from: usize, owner: usize, user: i32, device: i32) -> Peering {
        Peering {
            from: CUcontext(from),
            owner: CUcontext(owner),
            user: CUdevice(user),
            device: CUdevice(device),
        }
    }

    #[test]
    fn access_ends_with_the_last_context_that_has_it() {
        let cell = Mutex::new(None);
        let cell: &'static Mutex<Option<HashSet<Peering>>> = Box::leak(Box::new(cell));
        let mut peers = Peers(cell.lock().unwrap());
        peers.insert(peering(1, 9, 0, 1));
        peers.insert(peering(1, 9, 0, 1));
        peers.insert(peering(2, 9, 0, 1));
        peers.insert(peering(3, 9, 2, 1));
        assert!(peers.take(|p| p.from == CUcontext(1)).is_empty());
        assert_eq!(
            peers.take(|p| p.from == CUcontext(2)),
            [(CUdevice(1), CUdevice(0))]
        );
        assert_eq!(
            peers.take(|p| p.owner == CUcontext(9)),
            [(CUdevice(1), CUdevice(2))]
        );
        assert!(peers.take(|_| true).is_empty());
    }
}
