//! The seam to one GPU's memory: [`DeviceMemory`], a fake of it, and the suite that both it and the real one must pass.
//!
//! Everything above this seam (pool, residency, arena of the layer) is tested with [`fake::FakeDevice`]. What the fake
//! promises is what the driver was measured to do; [`conformance`] checks that both keep the promise.
//!
//! # Words
//! *reserve* an address range, *create* physical memory (a [`Handle`]), *map* it, give *access*; *unmap*, *release*.

#![forbid(unsafe_code)]

pub mod conformance;
pub mod fake;
pub mod fingerprint;

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use ebb_units::{Bytes, DeviceUuid};
pub use fingerprint::Fingerprint;

/// Physical device memory, made by [`DeviceMemory::create`]. The number is the implementation's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(pub u64);

/// What a program asked for when it made physical memory by itself: words that only the implementation reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Props(pub [u64; 4]);

/// Who may use mapped memory: a kind of location and its number, as the driver has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Location {
    /// Device, host, a node of the host.
    pub kind: u32,
    /// Which of them.
    pub id: u32,
}

impl Location {
    /// The kind of a device.
    pub const DEVICE: u32 = 1;
}

/// What a location may do with mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// Who.
    pub location: Location,
    /// What: [`Grant::READ_WRITE`], less, or nothing.
    pub flags: u32,
}

impl Grant {
    /// Everything. Nothing is 0.
    pub const READ_WRITE: u32 = 3;
}

/// An address in this process's host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostAddr(pub usize);

impl HostAddr {
    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + Bytes(bytes).to_usize())
    }
}

/// Which way bytes go. Each has a stream of its own: the two run side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Device to host.
    Out,
    /// Host to device.
    In,
}

/// A place in a direction's stream: everything that was enqueued in that direction before it.
///
/// Made by [`DeviceMemory::mark`], given back by [`DeviceMemory::wait`]. It isn't `Clone`: an implementation may hold a
/// driver event behind it, which returns to its pool when the marker is waited for.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "copies are complete only when their marker was waited for"]
pub struct Marker(pub u64);

/// Why a device call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// No physical memory on the card. Others may free some: worth another try.
    #[error("the card has no memory left")]
    OutOfMemory,
    /// Any other answer of the driver.
    #[error("{call} failed with driver error {code}")]
    Driver {
        /// The driver's number.
        code: u32,
        /// The driver's function.
        call: &'static str,
    },
    /// The driver is shut down or the context is gone: no call will succeed again.
    #[error("the driver or its context is gone")]
    Gone,
}

impl DeviceError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub const fn may_pass(self) -> bool {
        !matches!(self, Self::Gone)
    }
}

/// The driver's code for what it cannot do.
const NOT_SUPPORTED: u32 = 801;

/// One GPU's memory, as this process sees it.
///
/// Calls may come from any thread, several at once, and none may need a current context from its caller or leave
/// another one current. No call but `wait`, `unregister_host` and `quiesce` waits for work of the program.
/// A call that fails has changed nothing.
///
/// Sizes and addresses of `reserve`, `create`, `map`, `unmap`, `set_access` are multiples of [`Self::granularity`].
pub trait DeviceMemory: Send + Sync + fmt::Debug {
    /// Smallest physical piece in bytes: a power of two.
    fn granularity(&self) -> u64;

    /// What the driver refused to make memory with, in words for a person; empty if nothing.
    fn lacks(&self) -> &'static str {
        ""
    }

    /// Reserves addresses. No memory is behind them.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is reserved.
    fn reserve(&self, size: u64, align: u64) -> Result<u64, DeviceError>;

    /// Gives a whole reservation back. Nothing may be mapped in it.
    ///
    /// # Errors
    /// [`DeviceError`]; the reservation stands.
    fn free_reservation(&self, addr: u64, size: u64) -> Result<(), DeviceError>;

    /// Makes physical memory. Contents are undefined.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the card has no room.
    fn create(&self, size: u64) -> Result<Handle, DeviceError>;

    /// Gives a handle back. The memory behind it is free once it is mapped nowhere.
    ///
    /// # Errors
    /// [`DeviceError`]; the handle stands.
    fn release(&self, handle: Handle) -> Result<(), DeviceError>;

    /// Maps all of a handle (`size` is the size it was created with) at `addr`, without access.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is mapped.
    fn map(&self, addr: u64, size: u64, handle: Handle) -> Result<(), DeviceError>;

    /// Removes whole mappings. **No fence**: running work that still uses the range faults.
    ///
    /// # Errors
    /// [`DeviceError`]; everything is mapped as before.
    fn unmap(&self, addr: u64, size: u64) -> Result<(), DeviceError>;

    /// Lets this device read and write a mapped range, which may cover several mappings (one call costs about 30 µs and
    /// little more for a longer range).
    ///
    /// # Errors
    /// [`DeviceError`].
    fn set_access(&self, addr: u64, size: u64) -> Result<(), DeviceError>;

    /// A descriptor of a handle's memory, for another process. The memory lives as long as any descriptor, handle or
    /// mapping of it. Memory that was not made for this has none.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn export(&self, handle: Handle) -> Result<OwnedFd, DeviceError> {
        let _ = handle;
        Err(DeviceError::Driver {
            code: NOT_SUPPORTED,
            call: "export",
        })
    }

    /// Enqueues a copy to the host on the stream of [`Direction::Out`].
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was enqueued.
    fn copy_out(&self, host: HostAddr, dev: u64, len: u64) -> Result<(), DeviceError>;

    /// Enqueues a copy to the device on the stream of [`Direction::In`].
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was enqueued.
    fn copy_in(&self, dev: u64, host: HostAddr, len: u64) -> Result<(), DeviceError>;

    /// Enqueues that memory becomes zero, on the stream of [`Direction::In`]. Whole granules.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was enqueued.
    fn zero(&self, dev: u64, len: u64) -> Result<(), DeviceError>;

    /// What the blocks of these ranges (address and bytes, whole granules, mapped with access) hold, one
    /// [`Fingerprint`] for each block of each range, in order; see [`fingerprint::blocks`]. Equal ones of one device mean
    /// equal bytes. Waits for itself: some 20 ms for 64 GiB. Nothing may write the ranges meanwhile, no work of the program
    /// may run on the device (the first time, a kernel is loaded), and no capture be under way.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is known.
    fn fingerprint(&self, ranges: &[(u64, u64)]) -> Result<Vec<Fingerprint>, DeviceError>;

    /// Makes ready for [`Self::fingerprint`] what can be made ready while the program runs.
    fn expect_fingerprints(&self) {}

    /// Marks what has been enqueued so far in one direction.
    ///
    /// # Errors
    /// [`DeviceError`]; copies stay enqueued.
    fn mark(&self, direction: Direction) -> Result<Marker, DeviceError>;

    /// Waits until everything before the marker is complete. Only `Ok` means that the bytes are there.
    ///
    /// # Errors
    /// [`DeviceError`], also if a copy itself failed; then nothing is known about any copy before the marker.
    fn wait(&self, marker: Marker) -> Result<(), DeviceError>;

    /// Whether [`Self::wait`] would return at once.
    ///
    /// # Errors
    /// As [`Self::wait`].
    fn done(&self, marker: &Marker) -> Result<bool, DeviceError>;

    /// Pins host memory so that copies run at the link's speed, for all devices of the process.
    /// Copies work without it, slower.
    ///
    /// # Errors
    /// [`DeviceError`]; the memory is not pinned.
    fn register_host(&self, host: HostAddr, len: u64) -> Result<(), DeviceError>;

    /// As [`Self::register_host`], for memory that can only be read: it is copied to the card and never from it.
    ///
    /// # Errors
    /// [`DeviceError`]; the memory is not pinned. Not every driver can do this.
    fn register_read_only(&self, host: HostAddr, len: u64) -> Result<(), DeviceError> {
        let _ = (host, len);
        Err(DeviceError::Driver {
            code: NOT_SUPPORTED,
            call: "register_read_only",
        })
    }

    /// Unpins a range that was registered as a whole. Waits for all work on the device.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn unregister_host(&self, host: HostAddr, len: u64) -> Result<(), DeviceError>;

    /// Waits for all work that the program has submitted to this device so far, on all streams of all its contexts.
    /// May block for as long as a kernel runs. Must not be called while any thread captures a graph.
    ///
    /// # Errors
    /// [`DeviceError`]; the work may still run.
    fn quiesce(&self) -> Result<(), DeviceError>;

    // Memory that the program makes and maps by itself, in addresses of its own. It is made as it was asked for, mappings
    // may be shorter than the handle, and nobody has access but who is named.

    /// As [`Self::create`], as the program asked for it.
    ///
    /// # Errors
    /// As [`Self::create`]; the driver's own answer to what it does not accept.
    fn create_as(&self, size: u64, props: &Props) -> Result<Handle, DeviceError>;

    /// Maps the first `size` bytes of a handle at an address of the program.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing is mapped.
    fn map_as(&self, addr: u64, size: u64, handle: Handle) -> Result<(), DeviceError>;

    /// Removes whole mappings of [`Self::map_as`], or of the program's own call.
    ///
    /// # Errors
    /// [`DeviceError`]; everything is mapped as before.
    fn unmap_as(&self, addr: u64, size: u64) -> Result<(), DeviceError>;

    /// Says who may use one such mapping. Those not named keep what they have.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing has changed.
    fn grant(&self, addr: u64, size: u64, grants: &[Grant]) -> Result<(), DeviceError>;

    // Memory on other cards. It is made by [`Self::create_as`] with the properties that [`Self::lenders`] names, mapped by
    // [`Self::map_as`], and usable after [`Self::grant`] to [`Self::location`]; no context on the other card is needed.

    /// Other cards on which this one can have memory, over a link that is faster than that to the host, and what such memory is
    /// made with.
    fn lenders(&self) -> Vec<(DeviceUuid, Props)> {
        Vec::new()
    }

    /// Enqueues a copy between two places that this device reaches, on the stream of a direction.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was enqueued.
    fn copy_between(&self, direction: Direction, to: u64, from: u64, len: u64) -> Result<(), DeviceError> {
        let _ = (direction, to, from, len);
        Err(DeviceError::Driver {
            code: NOT_SUPPORTED,
            call: "copy_between",
        })
    }

    // What the driver places by itself.

    /// Enqueues on the stream of [`Direction::Out`] that managed memory moves to the host. Nothing is needed for it to come
    /// back: the driver brings pages when they are touched.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was enqueued. That the device or the driver cannot do it is an error as well.
    fn push_to_host(&self, addr: u64, len: u64) -> Result<(), DeviceError> {
        let _ = (addr, len);
        Err(DeviceError::Driver {
            code: NOT_SUPPORTED,
            call: "push_to_host",
        })
    }

    /// Lets go of what the driver keeps for graphs and no graph uses at present. Returns the bytes that it still keeps.
    ///
    /// # Errors
    /// [`DeviceError`].
    fn trim_graphs(&self) -> Result<u64, DeviceError> {
        Err(DeviceError::Driver {
            code: NOT_SUPPORTED,
            call: "trim_graphs",
        })
    }

    /// Bytes of the card that are in use, whoever uses them.
    ///
    /// # Errors
    /// [`DeviceError`]; it is not known.
    fn occupied(&self) -> Result<u64, DeviceError> {
        Err(DeviceError::Driver {
            code: NOT_SUPPORTED,
            call: "occupied",
        })
    }

    /// Bytes that this made the driver take on the card for itself, for code of its own.
    fn taken_besides(&self) -> u64 {
        0
    }

    /// Other devices that the program lets use this one's memory.
    fn peers(&self) -> Vec<Location> {
        Vec::new()
    }

    /// This device as a location.
    fn location(&self) -> Location;

    /// Whether copies are possible: memory can be made without a context, and copied only in one.
    fn can_copy(&self) -> bool;
}

/// Where arena segments appear in this process's memory: `mmap`, or the fake's own memory.
pub trait HostMemory: Send + Sync + fmt::Debug {
    /// Maps `bytes` of a memfd, shared.
    ///
    /// # Errors
    /// The system's.
    fn map(&self, fd: BorrowedFd<'_>, bytes: u64) -> std::io::Result<HostAddr>;

    /// Maps `bytes` of a memfd that nobody can write, shared, to be read only. Without this the system cannot.
    ///
    /// # Errors
    /// The system's.
    fn map_read_only(&self, fd: BorrowedFd<'_>, bytes: u64) -> std::io::Result<HostAddr> {
        let _ = (fd, bytes);
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Removes a whole mapping of [`Self::map`] or [`Self::map_read_only`].
    ///
    /// # Errors
    /// The system's.
    fn unmap(&self, host: HostAddr, bytes: u64) -> std::io::Result<()>;

    /// Copies between two ranges of [`Self::map`]'s memory that do not overlap and stay mapped meanwhile. Other processes may write the source at
    /// the same time; then what is copied is any mixture.
    fn copy(&self, to: HostAddr, from: HostAddr, bytes: Bytes);
}
