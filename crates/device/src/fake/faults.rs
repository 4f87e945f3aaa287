//! Which call fails, when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::DeviceError;

macro_rules! calls {
    ($($variant:ident = $name:literal),* $(,)?) => {
        /// A call of [`crate::DeviceMemory`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[expect(missing_docs, reason = "each is the trait's method of that name")]
        pub enum Call { $($variant),* }

        impl Call {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The method's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }
    };
}

calls! {
    Reserve = "reserve",
    FreeReservation = "free_reservation",
    Create = "create",
    Release = "release",
    Map = "map",
    Unmap = "unmap",
    SetAccess = "set_access",
    CopyOut = "copy_out",
    CopyIn = "copy_in",
    Zero = "zero",
    Fingerprint = "fingerprint",
    Mark = "mark",
    Wait = "wait",
    Done = "done",
    RegisterHost = "register_host",
    UnregisterHost = "unregister_host",
    Quiesce = "quiesce",
    CreateAs = "create_as",
    MapAs = "map_as",
    UnmapAs = "unmap_as",
    GrantAs = "grant",
    CopyBetween = "copy_between",
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    counts: BTreeMap<Call, u64>,
    total: u64,
    nth: BTreeMap<(Call, u64), DeviceError>,
    kth: BTreeMap<u64, DeviceError>,
    always: BTreeMap<Call, DeviceError>,
    delays: BTreeMap<Call, Duration>,
    blocks: BTreeSet<Call>,
}

impl Faults {
    pub(super) fn count(&mut self, call: Call) -> (Result<(), DeviceError>, Duration) {
        self.total += 1;
        let count = self.counts.entry(call).or_default();
        *count += 1;
        let error = self
            .nth
            .remove(&(call, *count))
            .or_else(|| self.kth.remove(&self.total))
            .or_else(|| self.always.get(&call).copied());
        let delay = self.delays.get(&call).copied().unwrap_or_default();
        (error.map_or(Ok(()), Err), delay)
    }

    pub(super) fn nth(&mut self, call: Call, n: u64, error: DeviceError) {
        let at = self.calls(call) + n;
        self.nth.insert((call, at), error);
    }

    pub(super) fn kth(&mut self, k: u64, error: DeviceError) {
        self.kth.insert(self.total + k, error);
    }

    pub(super) fn always(&mut self, call: Call, error: DeviceError) {
        self.always.insert(call, error);
    }

    pub(super) fn delay(&mut self, call: Call, by: Duration) {
        self.delays.insert(call, by);
    }

    pub(super) fn block(&mut self, call: Call) {
        self.blocks.insert(call);
    }

    pub(super) fn blocked(&self, call: Call) -> bool {
        self.blocks.contains(&call)
    }

    pub(super) fn heal(&mut self) {
        self.nth.clear();
        self.kth.clear();
        self.always.clear();
        self.delays.clear();
        self.blocks.clear();
    }

    pub(super) fn pending(&self) -> bool {
        !self.nth.is_empty() || !self.kth.is_empty()
    }

    pub(super) fn calls(&self, call: Call) -> u64 {
        self.counts.get(&call).copied().unwrap_or(0)
    }

    pub(super) const fn total(&self) -> u64 {
        self.total
    }
}
