//! Values of fields that are numbers: what an ask is for, how an order ended, and the like. Numbers and not enumerations: those of a newer
//! peer pass as they are.

/// What an [`ToDaemon::Ask`](super::ToDaemon::Ask) is for.
pub mod ask_kind {
    /// A new allocation: granted whole or not at all.
    pub const ALLOC: u32 = 0;
    /// Evicted bytes to come back: may be granted in several pieces, in order.
    pub const RESTORE: u32 = 1;
    /// A new allocation from what nobody holds now: granted whole or denied at once, and nobody is evicted for it.
    pub const STRICT: u32 = 2;
}

/// How a reclaim ended.
pub mod outcome {
    /// All the bytes that were ordered, or all that there were, are given back.
    pub const DONE: u32 = 0;
    /// Work on the GPU did not end in time; nothing was taken.
    pub const BUSY: u32 = 1;
    /// A driver call failed; what had not been given back yet is mapped again.
    pub const FAILED: u32 = 2;
    /// Nothing left that can be moved.
    pub const NOTHING_LEFT: u32 = 3;
    /// The host arena had no room for more.
    pub const NO_ROOM: u32 = 4;
    /// The program is capturing a graph; try later.
    pub const CAPTURING: u32 = 5;
}

/// What a daemon can do beyond the first version: bits of [`ToLayer::Features`](super::ToLayer::Features).
pub mod feature {
    /// Memory is shared between its programs: the messages that begin with `Share`.
    pub const SHARE: u64 = 1;
    /// It sees what each process has on a card: `AskHeld`.
    pub const HELD: u64 = 2;
    /// It lends room on one card to what another evicts: the messages that begin with `Lodging`.
    pub const LODGING: u64 = 4;
    /// Arena segments are not to be pinned, but for one: the ring that copies go through.
    pub const RING: u64 = 8;
    /// Host copies that are equal are had in common: the messages that begin with `ArenaCommon`, and `ArenaRest`.
    pub const COMMON: u64 = 16;
}

/// How a process stands to a checkpoint by the driver.
pub mod sleep {
    /// Nothing of it is in the way; after an order that is not only a question: it makes no driver call any more.
    pub const READY: u32 = 0;
    /// The driver does not checkpoint such a process: the text says why, a reason a line.
    pub const CANNOT: u32 = 1;
    /// Not at this moment: it uses the GPU, or a call of the driver has not returned.
    pub const BUSY: u32 = 2;
}

/// What came of opening shared memory.
pub mod share {
    /// Its next chunks are beside the message.
    pub const OK: u32 = 0;
    /// Nobody has such memory (any more).
    pub const UNKNOWN: u32 = 1;
    /// The process asks for its own memory.
    pub const OWN: u32 = 2;
    /// The program that has it could not hand it out.
    pub const FAILED: u32 = 3;

    /// Bytes of a handle.
    pub const HANDLE: usize = 64;
    /// Where in a handle the name of the process stands that gave it out. The rest is that process's own business.
    pub const NAME: core::ops::Range<usize> = 8..24;
}

/// Why an ask was denied.
pub mod deny {
    /// It would pass the task's limit. Final.
    pub const OVER_LIMIT: u32 = 1;
    /// It can never fit this card beside what is guaranteed to others. Final.
    pub const NEVER_FITS: u32 = 2;
    /// No room within the time; another try may wait longer.
    pub const TIMED_OUT: u32 = 3;
    /// The daemon is stopping.
    pub const STOPPING: u32 = 4;
}
