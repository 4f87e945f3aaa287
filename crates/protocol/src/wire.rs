//! The layer's messages and how they look as bytes.
//!
//! Every packet is a 16-byte header (magic, kind, version, payload length, reserved) and a payload of little-endian
//! fields in the order in which they are declared below. What arrives is an allegation: [`ToDaemon::decode`] and
//! [`ToLayer::decode`] check it once, and nothing behind them sees raw bytes.

mod items;
mod values;

use ebb_units::{Bytes, DeviceUuid};

pub use items::{CommonBlock, LodgedAt, RestingRun, WorldProcess};
pub use values::{ask_kind, deny, feature, outcome, share, sleep};

/// First four bytes of every packet.
pub const MAGIC: u32 = u32::from_le_bytes(*b"ebb1");
/// The version that this code speaks.
pub const VERSION: u16 = 1;
/// The oldest peer that it understands.
pub const MIN_VERSION: u16 = 1;
/// Bytes of the header.
pub const HEADER: usize = 16;
/// The largest packet, header included. Reports are cut to fit.
pub const MAX_PACKET: usize = 60 << 10;
/// The most file descriptors beside one packet.
pub const MAX_FDS: usize = 16;

/// Why a packet is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Shorter than its header or than its fields.
    #[error("the packet ends after {0} bytes, in the middle of a message")]
    Short(usize),
    /// Not our packet at all.
    #[error("the packet does not start with ebb's magic number")]
    Magic,
    /// A peer of another time.
    #[error("the peer speaks protocol version {0}; this side understands {MIN_VERSION} to {VERSION}")]
    Version(u16),
    /// A kind from a newer peer: skip it.
    #[error("message kind {0} is unknown here")]
    UnknownKind(u16),
    /// A field with a value that it cannot have.
    #[error("a field of message kind {0} holds an impossible value")]
    Value(u16),
    /// More than fits a packet.
    #[error("the message does not fit a packet of {MAX_PACKET} bytes")]
    TooLong,
}

impl WireError {
    /// Whether the receiver should skip the packet and go on, rather than drop the peer.
    #[must_use]
    pub const fn is_skippable(self) -> bool {
        matches!(self, Self::UnknownKind(_))
    }
}

/// A segment of the host arena: an id of the daemon's and its size. Its memfd travels beside the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// The daemon's id of the segment, never reused.
    pub id: u64,
    /// Its size.
    pub bytes: Bytes,
}

/// Reads fields off a payload. After the end of the payload every field reads as zero, but only for messages from a
/// peer of the same protocol that appended fields later; [`Reader::short`] says whether a *required* field was missing.
struct Reader<'a> {
    rest: &'a [u8],
    short: bool,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        if self.rest.len() < n {
            self.short = true;
            self.rest = &[];
            return &[];
        }
        let (head, tail) = self.rest.split_at(n);
        self.rest = tail;
        head
    }
}

trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(r: &mut Reader<'_>) -> Option<Self>;
}

macro_rules! int_field {
    ($($t:ty),*) => {$(
        impl Field for $t {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn get(r: &mut Reader<'_>) -> Option<Self> {
                let bytes = r.take(size_of::<$t>());
                Some(bytes.try_into().map_or(0, <$t>::from_le_bytes))
            }
        }
    )*};
}
int_field!(u32, u64);

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u32::from(*self).put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        match u32::get(r)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Field for Bytes {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        u64::get(r).map(Self)
    }
}

impl<const N: usize> Field for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(r.take(N).try_into().unwrap_or([0; N]))
    }
}

impl Field for DeviceUuid {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        <[u8; 16]>::get(r).map(Self)
    }
}

impl Field for SegmentInfo {
    fn put(&self, out: &mut Vec<u8>) {
        self.id.put(out);
        self.bytes.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            id: u64::get(r)?,
            bytes: <Bytes as Field>::get(r)?,
        })
    }
}

impl Field for HeldShare {
    fn put(&self, out: &mut Vec<u8>) {
        self.hold.put(out);
        self.name.put(out);
        self.device.put(out);
        self.block.put(out);
        self.bytes.put(out);
        self.inherited.put(out);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            hold: u64::get(r)?,
            name: <[u8; 16]>::get(r)?,
            device: <DeviceUuid as Field>::get(r)?,
            block: u64::get(r)?,
            bytes: <Bytes as Field>::get(r)?,
            inherited: bool::get(r)?,
        })
    }
}

impl<T: Field> Field for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        u32::try_from(self.len()).unwrap_or(u32::MAX).put(out);
        self.iter().for_each(|item| item.put(out));
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        let n = u32::get(r)? as usize;
        // No item is smaller than a byte: a length beyond the packet is a lie and must not allocate.
        if n > r.rest.len() {
            return None;
        }
        let mut items = Self::new();
        for _ in 0..n {
            items.push(T::get(r)?);
            if r.short {
                return None;
            }
        }
        Some(items)
    }
}

impl Field for u8 {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }
    fn get(r: &mut Reader<'_>) -> Option<Self> {
        Some(r.take(1).first().copied().unwrap_or(0))
    }
}

macro_rules! messages {
    (
        $(#[$enum_doc:meta])* $name:ident {
            $( $(#[$doc:meta])* $kind:literal $variant:ident { $( $(#[$fdoc:meta])* $field:ident: $ty:ty ),* $(,)? } )*
        }
    ) => {
        $(#[$enum_doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum $name {
            $( $(#[$doc])* $variant { $( $(#[$fdoc])* $field: $ty ),* } ),*
        }

        impl $name {
            /// The packet: header and payload.
            ///
            /// # Errors
            /// [`WireError::TooLong`] if it does not fit a packet.
            pub fn encode(&self) -> Result<Vec<u8>, WireError> {
                let mut out = vec![0; HEADER];
                let kind: u16 = match self {
                    $( Self::$variant { $($field),* } => { $( $field.put(&mut out); )* $kind } )*
                };
                seal(kind, out)
            }

            /// Reads a packet.
            ///
            /// # Errors
            /// [`WireError`] says why it is no message; see [`WireError::is_skippable`].
            pub fn decode(packet: &[u8]) -> Result<Self, WireError> {
                let (kind, payload) = open(packet)?;
                let mut r = Reader { rest: payload, short: false };
                let r = &mut r;
                let message = match kind {
                    $( $kind => (|| Some(Self::$variant { $( $field: <$ty as Field>::get(r)? ),* }))(), )*
                    _ => return Err(WireError::UnknownKind(kind)),
                };
                if r.short {
                    return Err(WireError::Short(packet.len()));
                }
                message.ok_or(WireError::Value(kind))
            }
        }
    };
}

fn seal(kind: u16, mut packet: Vec<u8>) -> Result<Vec<u8>, WireError> {
    if packet.len() > MAX_PACKET {
        return Err(WireError::TooLong);
    }
    let payload = u32::try_from(packet.len() - HEADER).map_err(|_| WireError::TooLong)?;
    packet[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    packet[4..6].copy_from_slice(&kind.to_le_bytes());
    packet[6..8].copy_from_slice(&VERSION.to_le_bytes());
    packet[8..12].copy_from_slice(&payload.to_le_bytes());
    Ok(packet)
}

fn open(packet: &[u8]) -> Result<(u16, &[u8]), WireError> {
    let short = || WireError::Short(packet.len());
    let header = packet.get(..HEADER).ok_or_else(short)?;
    let u16_at = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    if header[..4] != MAGIC.to_le_bytes() {
        return Err(WireError::Magic);
    }
    let version = u16_at(6);
    if version < MIN_VERSION {
        return Err(WireError::Version(version));
    }
    let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
    let payload = packet[HEADER..].get(..length).ok_or_else(short)?;
    Ok((u16_at(4), payload))
}

/// Shared memory that a process has open, as it declares it to a daemon that is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldShare {
    /// Its number, chosen by the process that opened it.
    pub hold: u64,
    /// The name of the process that gave it out.
    pub name: [u8; 16],
    /// The card.
    pub device: DeviceUuid,
    /// The block of that process.
    pub block: u64,
    /// Bytes of the block.
    pub bytes: Bytes,
    /// It is counted to the process that declares it, because the other one is gone.
    pub inherited: bool,
}

messages! {
    /// From the layer in a program to the daemon.
    ToDaemon {
        /// First message of a session. Who the process is comes from the socket, not from here.
        1 Hello {
            /// Process id as the process sees itself (it may live in a pid namespace): only for display.
            pid: u32,
            /// Capability that `ebb run` put into the environment; zeros if none. It names the task.
            token: [u8; 32],
            /// Name of the program, cut, padded with zeros.
            program: [u8; 64],
            /// Session id of an earlier connection of this same process, 0 at first.
            resumes: u64,
        }
        /// The program made its first context on a device (or the daemon is new and hears of it again).
        2 Attach {
            /// The card.
            device: DeviceUuid,
            /// What the driver says the card has.
            total: Bytes,
            /// Smallest physical piece.
            granularity: Bytes,
            /// Lease that this process already holds (after a daemon restart), else 0.
            lease: Bytes,
            /// Bytes that are in host memory at present.
            evicted: Bytes,
            /// Memory that the driver took by itself for this process, as far as the layer saw it.
            overhead: Bytes,
        }
        /// More lease, please.
        3 Ask {
            /// Slot from [`ToLayer::Attached`].
            device: u32,
            /// Number of this ask, never reused in a session.
            ask: u64,
            /// One of [`ask_kind`].
            kind: u32,
            /// How much.
            bytes: Bytes,
            /// The program will not do better after an early out-of-memory: wait as long as policy allows.
            long: bool,
        }
        /// Not needed any more. A grant that crosses it stays granted.
        4 CancelAsk { /** Slot. */ device: u32, /** The ask. */ ask: u64 }
        /// Lease that is not needed any more.
        5 Return { /** Slot. */ device: u32, /** How much. */ bytes: Bytes }
        /// What the process has, sent when something changed, at most every 100 ms.
        6 Usage {
            /// Slot.
            device: u32,
            /// Live allocations, rounded to granules.
            allocated: Bytes,
            /// Physical bytes mapped at present, caches included.
            resident: Bytes,
            /// Bytes in host memory.
            evicted: Bytes,
            /// Resident bytes that no allocation uses: given back without a copy.
            cached: Bytes,
            /// Bytes that cannot be moved, of all reasons.
            pinned: Bytes,
            /// Driver's own memory for this process as far as the layer saw it.
            overhead: Bytes,
            /// Gate passages so far: a change means that the program used the GPU.
            touches: u64,
            /// Live allocations.
            allocations: u64,
            /// Managed memory, wherever its pages are: the driver moves it.
            managed: Bytes,
            /// Of that: known to be in host memory, because a release pushed it there and the program was not on the GPU since.
            managed_out: Bytes,
            /// Memory of handles that were given to other processes, who may keep it alive.
            exported: Bytes,
            /// Memory of other processes, imported by handle, that is held here and charged there.
            imported: Bytes,
        }
        /// A step of a reclaim: these bytes of lease are free now.
        7 ReclaimProgress { /** Slot. */ device: u32, /** The order. */ order: u64, /** Lease freed in this step. */ bytes: Bytes }
        /// End of a reclaim.
        8 ReclaimDone {
            /// Slot.
            device: u32,
            /// The order.
            order: u64,
            /// One of [`outcome`].
            outcome: u32,
            /// Bytes copied to the host by this order.
            copied: Bytes,
            /// Time from first to last copy in nanoseconds, waiting for the gate not counted.
            nanos: u64,
        }
        /// Everything is back; the program runs.
        9 Restored { /** Slot. */ device: u32, /** Bytes copied in. */ copied: Bytes, /** Time of the copying in nanoseconds. */ nanos: u64 }
        /// How much arena this process would like to hold, all devices together. Given ahead of need, as the budget allows.
        10 ArenaWant { /** Total, not an increment. */ bytes: Bytes, /** A release is waiting for it. */ urgent: bool }
        /// Segments that it does not need any more and has unmapped.
        11 ArenaReturn { /** Ids. */ segments: Vec<u64> }
        /// Segments that it holds from a daemon that died; their memfds travel along, in the same order.
        12 ArenaDeclare { /** At most [`MAX_FDS`]. */ segments: Vec<SegmentInfo> }
        /// Answer to [`ToLayer::Query`]: a JSON object, cut to fit.
        13 Report { /** The query. */ query: u64, /** JSON text. */ text: Vec<u8> }
        /// The last context of a device is gone, and all memory with it.
        14 Detach { /** Slot. */ device: u32 }
        /// What does my task have on a card? May be asked without a session, by a process that only looks (`nvidia-smi`); answered by
        /// [`ToLayer::World`].
        40 AskWorld {
            /// As in `Hello`; zeros: the task of this process's session.
            token: [u8; 32],
            /// The card.
            device: DeviceUuid,
        }
        /// What does my process have on a card, by the driver's own account? Asked without a session, on a connection of its own; answered by
        /// [`ToLayer::Held`] when NVML was read after the question came.
        41 AskHeld { /** The card, or the slice of one. */ device: DeviceUuid }
        /// Handles of this process carry this name. Memory of it that others opened, as it knows: a daemon that knows better
        /// says so by [`ToLayer::ShareLet`].
        20 ShareName { /** The name. */ name: [u8; 16], /** Numbers of holds. */ lent: Vec<u64> }
        /// Memory of other processes that this one has open: all of it, or as much as fits a packet.
        21 ShareHeld { /** What. */ holds: Vec<HeldShare>, /** It is all of it. */ all: bool }
        /// Open the memory that a handle names, or go on with it. Answered by `ShareChunks`, one packet of chunks at a time.
        22 ShareOpen {
            /// Number of this hold, chosen here, used by nobody else.
            hold: u64,
            /// The handle.
            handle: [u8; share::HANDLE],
            /// The first chunk that is wanted.
            from: u32,
        }
        /// Answer to [`ToLayer::ShareAsk`]; descriptors of the chunks travel along, in the same order.
        23 ShareGive {
            /// The hold.
            hold: u64,
            /// One of [`share`].
            status: u32,
            /// Slot of the card.
            device: u32,
            /// A number of the block in this process, never reused.
            block: u64,
            /// Bytes of the block.
            bytes: Bytes,
            /// Where in the block the allocation begins.
            offset: Bytes,
            /// The size of the allocation.
            size: Bytes,
            /// The first of these chunks.
            from: u32,
            /// How many chunks the block has.
            count: u32,
            /// Sizes of these chunks, at most [`MAX_FDS`].
            chunks: Vec<Bytes>,
        }
        /// The memory of this hold is closed.
        24 ShareClose { /** The hold. */ hold: u64 }
        /// Answer to [`ToLayer::Sleep`]. Also, after a question that was answered with yes, [`sleep::BUSY`] with what could not be released: the
        /// order to release has failed, and may be given again.
        30 SleepAnswer {
            /// The order.
            order: u64,
            /// One of [`sleep`].
            outcome: u32,
            /// UTF-8 text: what is in the way, a reason a line.
            text: Vec<u8>,
        }
        /// A thread of the program waits for the driver: the process should be brought back.
        31 WakeMe { /** The order that it sleeps by. */ order: u64 }
        /// The process has been ready for a checkpoint since this order, and does not know what became of it. Comes before every `Attach`
        /// of a new connection.
        32 Sleeping { /** The order. */ order: u64 }
        /// Answer to [`ToLayer::ArenaPart`]: segments with bytes in them that this process has let go of (nothing of it maps or
        /// registers them) and that keep what is in them. None: nothing can be let go of now.
        50 ArenaParted { /** Ids. */ segments: Vec<u64> }
        /// The process has the files of [`ToLayer::ArenaStored`] and needs the memory no more.
        51 ArenaKept { /** Ids. */ segments: Vec<u64> }
        /// Segments that it let go of and needs back, in the order in which it will read them.
        52 ArenaFetch { /** Ids. */ segments: Vec<u64> }
        /// Segments whose bytes are in files that a daemon wrote which died; the files travel along, in the same order.
        53 ArenaDeclareStored { /** At most [`MAX_FDS`]. */ segments: Vec<SegmentInfo> }
        /// An allocation would have passed the task's limit, and was refused in the process itself. Told now and then, not each time.
        71 Refused { /** Slot. */ device: u32, /** How much. */ asked: Bytes, /** What counts already. */ charged: Bytes, /** The limit. */ limit: Bytes }
        /// Answer to [`ToLayer::Trim`]; what was given back was told before, by `Return`.
        70 Trimmed { /** Slot. */ device: u32, /** As it was asked. */ query: u64, /** How much. */ bytes: Bytes }
        /// What the driver placed by itself for this process on the card, beside its lease, and what an order could send off the card.
        80 Beside {
            /** Slot. */ device: u32,
            /// No more than so much: managed memory that is not known to be in host memory, and what the driver keeps for graphs that are gone.
            loose: Bytes,
            /// So much has left the card since the last such message, by orders.
            gone: Bytes,
        }
        /// Bytes on the card that would leave without a copy, as far as the library believes: host memory has them as they are. 0 until it is told.
        81 Clean { /** Slot. */ device: u32, /** How much. */ bytes: Bytes }
        /// Cards on which this one can have memory of its own, over a link that is faster than that to the host.
        60 LodgingLenders { /** Slot. */ device: u32, /** The cards. */ lenders: Vec<DeviceUuid> }
        /// Room on another card, for bytes that are about to leave this one. Answered by [`ToLayer::LodgingLent`]; one such question at a
        /// time.
        61 LodgingAsk { /** Slot. */ device: u32, /** How much at most. */ bytes: Bytes }
        /// Room on another card that is not needed (any more).
        62 LodgingLeft { /** Slot. */ device: u32, /** The card that lent it. */ lender: DeviceUuid, /** How much. */ bytes: Bytes }
        /// All the room on other cards that this process has; comes after every `Attached`.
        63 LodgingHeld { /** Slot. */ device: u32, /** Where, and how much. */ held: Vec<LodgedAt> }
        /// Bytes of copies in arena segments that nothing writes any more. What equals what others have may be had in common:
        /// [`ToLayer::ArenaCommon`].
        90 ArenaRest {
            /// A number that grows. Whoever names it later means what these places held when it was said.
            notice: u64,
            /// Where.
            runs: Vec<RestingRun>,
        }
        /// Answer to each [`ToLayer::ArenaCommon`].
        91 ArenaCommonHeld {
            /// The common segment.
            segment: u64,
            /// Some of this process's bytes are in it from now on, or were before.
            held: bool,
        }
        /// Nothing of this process's is in these common segments any more, and it has unmapped them.
        92 ArenaCommonLeft { /** Ids. */ segments: Vec<u64> }
        /// All common segments that the process has; their memfds travel along, in the same order. After every welcome of a daemon that has them.
        93 ArenaCommonDeclare {
            /// At most [`MAX_FDS`].
            segments: Vec<SegmentInfo>,
            /// The first such packet of this connection.
            first: bool,
        }
        /// Bytes of this process that lie in common segments; sent when that changed.
        94 ArenaCommonUse {
            /// Of what is off the card.
            away: Bytes,
            /// Of kept copies of what is on it.
            kept: Bytes,
        }
    }
}

messages! {
    /// From the daemon to the layer in a program.
    ToLayer {
        /// Answer to `Hello`.
        1 Welcome {
            /// This session's id.
            session: u64,
            /// The task that the process belongs to.
            task: u64,
            /// How long an allocation waits before the first out-of-memory answer, in ms.
            alloc_wait_ms: u64,
            /// How long a later one may wait, in ms.
            alloc_wait_max_ms: u64,
            /// How long a reclaim waits for running work, in ms.
            busy_wait_ms: u64,
        }
        /// The daemon will not serve this process; it runs as without ebb.
        2 Refused { /** UTF-8 text for `ebb doctor`. */ text: Vec<u8> }
        /// Answer to `Attach`.
        3 Attached {
            /// The card.
            uuid: DeviceUuid,
            /// Its slot in all later messages of this session.
            device: u32,
            /// The task's limit on this card; the largest number if none.
            limit: Bytes,
            /// What the task's other processes have charged against the limit.
            charged_elsewhere: Bytes,
            /// Capacity of the card as the daemon counts it.
            capacity: Bytes,
        }
        /// Lease for an ask. For a restore several may come for one ask, until their sum is what was asked.
        4 Grant { /** Slot. */ device: u32, /** The ask. */ ask: u64, /** How much. */ bytes: Bytes }
        /// No lease for an ask.
        5 Deny {
            /// Slot.
            device: u32,
            /// The ask.
            ask: u64,
            /// One of [`deny`].
            reason: u32,
            /// Trying again is of no use.
            last: bool,
        }
        /// Give lease back: unused first, then cached, then by eviction.
        6 Reclaim {
            /// Slot.
            device: u32,
            /// Number of the order.
            order: u64,
            /// How much at least; the largest number means everything.
            bytes: Bytes,
            /// UTF-8 text: why, for `ebb doctor`.
            reason: Vec<u8>,
        }
        /// An order that is not wanted any more. What was done stays done.
        7 CancelReclaim { /** Slot. */ device: u32, /** The order. */ order: u64 }
        /// Arena segments; their memfds travel along, in the same order.
        8 ArenaGive { /** At most [`MAX_FDS`]. */ segments: Vec<SegmentInfo> }
        /// Give empty arena segments back, as many as this.
        9 ArenaRecall { /** How much. */ bytes: Bytes }
        /// The limit changed, or what the task's other processes hold.
        10 Limit { /** Slot. */ device: u32, /** The limit. */ limit: Bytes, /** Charged by the task's other processes. */ charged_elsewhere: Bytes }
        /// Say what is intercepted and releasable.
        11 Query { /** To be repeated in the report. */ query: u64 }
        /// Bring back what is in host memory without waiting for a touch: it will be needed. A layer that does not know this waits for one.
        12 BringBack { /** Slot. */ device: u32 }
        /// Let go of segments with bytes in them, coldest first, so many bytes: they are to be written to disk. Answered by
        /// [`ToDaemon::ArenaParted`], by a library that knows the message.
        50 ArenaPart { /** How much. */ bytes: Bytes }
        /// These segments are written; their files, to be read only, travel along, in the same order. To be answered by
        /// [`ToDaemon::ArenaKept`]; until then the memory keeps the bytes as well.
        51 ArenaStored { /** At most [`MAX_FDS`]. */ segments: Vec<u64> }
        /// These segments are not written, or not any more: the memory is as it was, and the process may map it again.
        52 ArenaStay { /** Ids. */ segments: Vec<u64> }
        /// These segments are read back into new memory, whose memfds travel along, in the same order.
        53 ArenaBack { /** At most [`MAX_FDS`]. */ segments: Vec<SegmentInfo> }
        /// The daemon cannot read these segments back, or does not know them: it has done with them, and the process has the files.
        54 ArenaBroken { /** Ids. */ segments: Vec<u64> }
        /// These bytes of the process are also in a segment that nobody can write any more, whose memfd travels along. It may take its bytes from
        /// there, and use the room that they had otherwise.
        90 ArenaCommon {
            /// The common segment.
            segment: SegmentInfo,
            /// What of it.
            blocks: Vec<CommonBlock>,
        }
        /// The room of these common segments is needed: give up the kept copies that lie in them.
        91 ArenaCommonWanted { /** Ids. */ segments: Vec<u64> }
        /// Give back what is kept for later and nothing lives in: caches, and what pools do not need. Nothing is evicted. Answered by
        /// [`ToDaemon::Trimmed`], by a library that knows the message.
        70 Trim { /** Slot. */ device: u32, /** To be repeated in the answer. */ query: u64 }
        /// Send away what the driver placed by itself, and nothing else: no lease is given back. An order like [`ToLayer::Reclaim`], taken back
        /// and ended like one.
        80 SendAway {
            /** Slot. */ device: u32,
            /** Number of the order. */ order: u64,
            /** How much at least. */ bytes: Bytes,
            /** UTF-8 text: why, for `ebb doctor`. */ reason: Vec<u8>,
        }
        /// Answer to `LodgingAsk`.
        60 LodgingLent { /** Slot. */ device: u32, /** The card that lends it; zeros: there is none. */ lender: DeviceUuid, /** How much. */ bytes: Bytes }
        /// The card that lent this needs it: bring those bytes elsewhere, and say so by `LodgingLeft`.
        61 LodgingWanted { /** Slot. */ device: u32, /** The card. */ lender: DeviceUuid, /** How much at least. */ bytes: Bytes }
        /// Answer to `AskWorld`.
        40 World {
            /// The card.
            device: DeviceUuid,
            /// Whether there is such a task. If not, the rest says nothing.
            known: bool,
            /// The task's limit there; the largest number if none.
            limit: Bytes,
            /// What all of the task is charged with there.
            charged: Bytes,
            /// Its processes there that the caller can name.
            processes: Vec<WorldProcess>,
        }
        /// Answer to `AskHeld`.
        41 Held {
            /// The card.
            device: DeviceUuid,
            /// Whether the daemon sees that card and its processes.
            known: bool,
            /// What the process has there; nothing if it is not listed.
            bytes: Bytes,
        }
        /// What this daemon can do beyond the first version. Comes right after `Welcome`; from an older daemon it never comes.
        20 Features { /** Bits of [`feature`]. */ bits: u64 }
        /// Somebody opens memory of this process: pin it and hand it out.
        21 ShareAsk {
            /// Number of the hold.
            hold: u64,
            /// Process id of the one who opens it, for `ebb doctor`.
            pid: u32,
            /// The handle that this process gave out.
            handle: [u8; share::HANDLE],
            /// The first chunk that is wanted.
            from: u32,
        }
        /// A hold has ended: who had the memory open has closed it, or is dead.
        22 ShareLet { /** The hold. */ hold: u64 }
        /// Answer to `ShareOpen`; descriptors of the chunks travel along, in the same order.
        23 ShareChunks {
            /// The hold.
            hold: u64,
            /// One of [`share`]. If it is not [`share::OK`], the hold has ended and the other fields say nothing.
            status: u32,
            /// The card.
            device: DeviceUuid,
            /// The block.
            block: u64,
            /// Bytes of the block.
            bytes: Bytes,
            /// Where in the block the allocation begins.
            offset: Bytes,
            /// The size of the allocation.
            size: Bytes,
            /// The first of these chunks.
            from: u32,
            /// How many chunks the block has.
            count: u32,
            /// Sizes of these chunks.
            chunks: Vec<Bytes>,
        }
        /// Get ready for a checkpoint by the driver: all that can leave the card has left it; make no call of the driver, and let the program
        /// make none, until [`ToLayer::Awake`].
        30 Sleep {
            /// Number of the order.
            order: u64,
            /// Only say what is in the way.
            ask: bool,
            /// Threads that wait for their memory are no reason against it: the task is paused.
            patient: bool,
            /// How long to wait for calls that are under way, in ms.
            wait_ms: u64,
        }
        /// The driver lets calls in again (or never kept them out).
        31 Awake { /** The order. */ order: u64 }
        /// Answer to `ShareName`: from here on handles with this name can be opened.
        25 ShareNamed { /** The name. */ name: [u8; 16] }
        /// The process that had this memory is gone, or has handed it on. It is counted to this one from now on.
        24 ShareInherit { /** The hold. */ hold: u64, /** Slot. */ device: u32, /** Bytes of lease that come with it. */ bytes: Bytes }
    }
}

#[cfg(test)]
mod tests;
