//! Which devices' memory a call may touch, from its name and its arguments.
//!
//! Asked only while some device of the process is closed, so it may take its time; and, in a process with several devices, for
//! every copy, because a copy in one device's stream may use the memory of another, which has to be known before that is moved.
//!
//! | call | may touch |
//! | --- | --- |
//! | kernel launch | memory of the current context's device and the stream's, and what those have access to |
//! | copy, fill, wait or write of a value | memory of the devices that its addresses belong to |
//! | anything else | everything |
//!
//! What a call is, is decided by its name when compiled; a name that no rule knows may touch everything.

use core::ffi::c_void;

use ebb_abi::*;
use ebb_layer_core::DeviceSet;

use crate::bridge::{self, Running};
use crate::symbols::real;

/// What kind of call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A kernel: anything that its device has access to.
    Kernel,
    /// Addresses that are all in the arguments.
    Addresses,
    /// Not known from the arguments, and there is work behind it.
    Anything,
    /// Not known from the arguments; no work is left behind when it returns, or another call submits it.
    Look,
}

/// What kind of call a function is.
pub(crate) const fn kind(name: &str) -> Kind {
    const KERNELS: &[&str] = &["cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync"];
    const ADDRESSES: &[&str] = &[
        "cuMemcpy2DAsync_v2",
        "cuMemcpy2DUnaligned_v2",
        "cuMemcpy2D_v2",
        "cuMemcpy3DAsync_v2",
        "cuMemcpy3DPeer",
        "cuMemcpy3D_v2",
        "cuMemcpyDtoD",
        "cuMemcpyDtoH",
        "cuMemcpyHtoD",
        "cuMemcpyPeer",
        "cuMemsetD",
        "cuStreamWaitValue",
        "cuStreamWriteValue",
    ];
    const ADDRESSES_WHOLE: &[&str] = &["cuMemcpy", "cuMemcpy_ptds", "cuMemcpyAsync", "cuMemcpyAsync_ptsz"];
    if is_one_of(name, KERNELS)
        || starts_with(name, "cuLaunchKernel")
        || starts_with(name, "cuLaunchCooperativeKernel")
            && !starts_with(name, "cuLaunchCooperativeKernelMulti")
    {
        Kind::Kernel
    } else if is_one_of(name, ADDRESSES_WHOLE) || starts_with_any(name, ADDRESSES) {
        Kind::Addresses
    } else if starts_with(name, "cuGraph") && !starts_with(name, "cuGraphLaunch")
        || starts_with(name, "cuTex")
        || starts_with(name, "cuTensorMap")
        || starts_with(name, "cuMemAdvise")
    {
        Kind::Look
    } else {
        Kind::Anything
    }
}

const fn starts_with(name: &str, start: &str) -> bool {
    let (name, start) = (name.as_bytes(), start.as_bytes());
    if name.len() < start.len() {
        return false;
    }
    let mut at = 0;
    while at < start.len() {
        if name[at] != start[at] {
            return false;
        }
        at += 1;
    }
    true
}

const fn starts_with_any(name: &str, list: &[&str]) -> bool {
    let mut at = 0;
    while at < list.len() {
        if starts_with(name, list[at]) {
            return true;
        }
        at += 1;
    }
    false
}

const fn is_one_of(name: &str, list: &[&str]) -> bool {
    let mut at = 0;
    while at < list.len() {
        if list[at].len() == name.len() && starts_with(name, list[at]) {
            return true;
        }
        at += 1;
    }
    false
}

/// What the arguments of a call say.
pub(crate) struct Call<'a> {
    running: &'a Running,
    /// The stream's device, and those of contexts that are named.
    named: DeviceSet,
    /// Addresses, and how many there are.
    addresses: [u64; ADDRESSES],
    count: usize,
    /// At least as many bytes as may be used at each of them.
    bytes: u64,
}

/// No call names more addresses.
const ADDRESSES: usize = 4;

impl<'a> Call<'a> {
    fn new(running: &'a Running) -> Self {
        Self {
            running,
            named: DeviceSet::NONE,
            addresses: [0; ADDRESSES],
            count: 0,
            bytes: 4,
        }
    }

    fn address(&mut self, address: u64) {
        if let Some(place) = self.addresses.get_mut(self.count) {
            *place = address;
        }
        self.count += 1;
    }

    /// Sizes, pitches and counts: their product is what a call may use at most, with elements of up to four bytes.
    fn size(&mut self, size: u64) {
        self.bytes = self.bytes.saturating_mul(size.max(1));
    }

    /// The devices that the addresses belong to.
    fn owners(&self) -> DeviceSet {
        match self.addresses.get(..self.count) {
            Some(addresses) => addresses.iter().fold(DeviceSet::NONE, |all, &address| {
                all.with(self.running.engine.devices_in(address, self.bytes))
            }),
            None => DeviceSet::ALL,
        }
    }

    fn stream(&mut self, stream: CUstream) {
        if stream.is_null() || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD {
            return; // Those of the current context.
        }
        let mut context = CUcontext::NULL;
        // SAFETY: the program's stream, and a valid place for the answer.
        let known = unsafe { real::cuStreamGetCtx(stream, &raw mut context) };
        if known.is_success() {
            self.context(context);
        } else {
            self.named = DeviceSet::ALL;
        }
    }

    fn context(&mut self, context: CUcontext) {
        if !context.is_null() {
            let device = self.running.index_of_context(context);
            self.named = self.named.with(device.map_or(DeviceSet::ALL, DeviceSet::one));
        }
    }

    /// The devices in whose streams the call may put work.
    fn users(&self) -> DeviceSet {
        let current = self.running.current_device();
        let current = current.and_then(|ordinal| self.running.index_of(ordinal));
        self.named.with(current.map_or(DeviceSet::ALL, DeviceSet::one))
    }

    fn needs(&self, kind: Kind) -> DeviceSet {
        match kind {
            Kind::Kernel => self.running.engine.reach_of(self.users()),
            Kind::Addresses => self.owners(),
            Kind::Anything | Kind::Look => DeviceSet::ALL,
        }
    }
}

/// Which devices a call may touch. `read` puts the arguments in.
pub(crate) fn needs(kind: Kind, read: impl FnOnce(&mut Call<'_>)) -> DeviceSet {
    match bridge::running() {
        Some(running) if bridge::several() && matches!(kind, Kind::Kernel | Kind::Addresses) => {
            let mut call = Call::new(running);
            read(&mut call);
            call.needs(kind)
        }
        _ => DeviceSet::ALL,
    }
}

/// In a process with several devices, before a call that puts work into streams which may use the memory of other devices than the
/// stream's: whose work has to be waited for. Inside the gate.
#[cold]
pub(crate) fn note(kind: Kind, read: impl FnOnce(&mut Call<'_>)) {
    let Some(running) = bridge::running() else { return };
    let mut call = Call::new(running);
    read(&mut call);
    let owners = match kind {
        Kind::Addresses => call.owners(),
        Kind::Anything => DeviceSet::ALL,
        Kind::Kernel | Kind::Look => return,
    };
    running.engine.copies(call.users(), owners);
}

/// An argument that says something.
pub(crate) trait Says {
    /// # Safety
    /// As the driver's function: a pointer is null or valid.
    unsafe fn tell(&self, call: &mut Call<'_>);
}

/// Any other argument. The method is found for these one reference further away, so that [`Says`] goes first.
pub(crate) trait SaysNothing {
    /// # Safety
    /// None.
    #[allow(clippy::unused_self, reason = "it is found by its receiver")]
    unsafe fn tell(&self, _: &mut Call<'_>) {}
}

impl<T> SaysNothing for &T {}

impl Says for CUstream {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        call.stream(*self);
    }
}

impl Says for CUcontext {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        call.context(*self);
    }
}

impl Says for CUdeviceptr {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        call.address(self.0);
    }
}

// With unified addresses a "host" pointer may be one of a device.
impl Says for *const c_void {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        call.address(self.addr() as u64);
    }
}

impl Says for *mut c_void {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        call.address(self.addr() as u64);
    }
}

impl Says for usize {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        call.size(*self as u64);
    }
}

macro_rules! descriptions {
    ($($ty:ty { |$copy:ident| $rows:expr, $layers:expr, [$($context:expr),*] })*) => {$(
        impl Says for *const $ty {
            unsafe fn tell(&self, call: &mut Call<'_>) {
                // SAFETY: this function's contract.
                let Some($copy) = (unsafe { self.as_ref() }) else { return };
                call.address($copy.srcDevice.0);
                call.address($copy.dstDevice.0);
                call.address($copy.srcHost.addr() as u64);
                call.address($copy.dstHost.addr() as u64);
                $(call.context($context);)*
                // More than from an address to the last byte of the box.
                let x = $copy.srcXInBytes.max($copy.dstXInBytes);
                let y = $copy.srcY.max($copy.dstY);
                let pitch = $copy.srcPitch.max($copy.dstPitch).max($copy.WidthInBytes);
                let rows: usize = $rows;
                call.size(pitch.saturating_add(x) as u64);
                call.size(rows.saturating_add(y) as u64);
                call.size($layers as u64);
            }
        }
    )*};
}
descriptions! {
    CUDA_MEMCPY2D { |copy| copy.Height, 1usize, [] }
    CUDA_MEMCPY3D {
        |copy| copy.Height.max(copy.srcHeight).max(copy.dstHeight),
        copy.Depth.saturating_add(copy.srcZ.max(copy.dstZ)), []
    }
    CUDA_MEMCPY3D_PEER {
        |copy| copy.Height.max(copy.srcHeight).max(copy.dstHeight),
        copy.Depth.saturating_add(copy.srcZ.max(copy.dstZ)), [copy.srcContext, copy.dstContext]
    }
}

impl Says for *const CUlaunchConfig {
    unsafe fn tell(&self, call: &mut Call<'_>) {
        // SAFETY: this function's contract.
        if let Some(config) = unsafe { self.as_ref() } {
            call.stream(config.hStream);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::{How, TABLE};

    #[test]
    fn calls_are_what_their_names_say() {
        for (name, expected) in [
            ("cuLaunch", Kind::Kernel),
            ("cuLaunchGridAsync", Kind::Kernel),
            ("cuLaunchKernelEx_ptsz", Kind::Kernel),
            ("cuLaunchCooperativeKernel_ptsz", Kind::Kernel),
            ("cuLaunchCooperativeKernelMultiDevice", Kind::Anything),
            ("cuMemcpy", Kind::Addresses),
            ("cuMemcpyAsync_ptsz", Kind::Addresses),
            ("cuMemcpyDtoHAsync_v2_ptsz", Kind::Addresses),
            ("cuMemcpy3DPeerAsync", Kind::Addresses),
            ("cuMemcpy3DBatchAsync_v2", Kind::Anything),
            ("cuMemcpyBatchAsync", Kind::Anything),
            ("cuMemcpyWithAttributesAsync", Kind::Anything),
            ("cuMemcpy2D", Kind::Anything),
            ("cuMemcpy2DUnaligned", Kind::Anything),
            ("cuMemcpyHtoA_v2", Kind::Anything),
            ("cuMemcpyAtoD_v2", Kind::Anything),
            ("cuMemsetD2D32Async_ptsz", Kind::Addresses),
            ("cuStreamWriteValue64_v2", Kind::Addresses),
            ("cuStreamBatchMemOp_v2", Kind::Anything),
            ("cuGraphLaunch_ptsz", Kind::Anything),
            ("cuGraphInstantiate", Kind::Look),
            ("cuTexObjectCreate", Kind::Look),
            ("cuSomethingNew", Kind::Anything),
        ] {
            assert_eq!(kind(name), expected, "{name}");
        }
    }

    /// Calls whose addresses are said to be in the arguments have an argument that says so.
    #[test]
    fn addresses_are_in_the_arguments() {
        const SAYING: &[&str] = &[
            "CUdeviceptr",
            "*const CUDA_MEMCPY2D",
            "*const CUDA_MEMCPY3D",
            "*const CUDA_MEMCPY3D_PEER",
            "u32",
        ];
        let mut checked = 0;
        macro_rules! check {
            ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {$(
                let name = stringify!($name);
                let gated = TABLE.iter().any(|(known, _, how)| *known == name && matches!(how, How::Gate | How::Sync));
                if gated && kind(name) == Kind::Addresses {
                    let types: &[&str] = &[$(stringify!($ty)),*];
                    assert!(types.iter().any(|ty| SAYING.contains(&&*ty.replace("* ", "*"))), "{name}: {types:?}");
                    checked += 1;
                }
            )*};
        }
        ebb_abi::for_each_driver_function!(check);
        assert!(checked > 80, "{checked}");
    }
}
