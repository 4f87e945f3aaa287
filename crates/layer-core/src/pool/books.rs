//! The sums of one device.

/// Sums in bytes. Every change goes with a change of the tables, under the same lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Books {
    /// What the daemon granted and has not got back.
    pub(crate) lease: u64,
    /// Physical bytes that exist, or are being made, because of us.
    pub(crate) used: u64,
    /// Of these: in cached spans.
    pub(crate) cached: u64,
    /// Of these: handles that the driver would not take back.
    pub(crate) stuck: u64,
    /// Of these: memory of the program that passes the pool by (pinned where it is).
    pub(crate) external: u64,
    /// Live allocations and segments in use, wherever their bytes are.
    pub(crate) allocated: u64,
    /// Bytes of chunks in host memory.
    pub(crate) evicted: u64,
    /// What the driver takes for contexts and the like.
    pub(crate) overhead: u64,
    /// What it takes for code of ours: the daemon hears of it, but a program is neither charged for it nor sees it.
    pub(crate) own: u64,
    /// Managed memory: charged, and the driver moves it by itself.
    pub(crate) managed: u64,
    /// The task's limit; the largest number if none.
    pub(crate) limit: u64,
    /// What the task's other processes are charged with.
    pub(crate) elsewhere: u64,
    /// There is no daemon: lease follows use.
    pub(crate) alone: bool,
}

impl Default for Books {
    fn default() -> Self {
        Self {
            lease: 0,
            used: 0,
            cached: 0,
            stuck: 0,
            external: 0,
            allocated: 0,
            evicted: 0,
            overhead: 0,
            own: 0,
            managed: 0,
            limit: u64::MAX,
            elsewhere: 0,
            alone: true,
        }
    }
}

impl Books {
    /// What counts against the limit.
    pub(crate) fn charged(&self) -> u64 {
        self.allocated
            .saturating_add(self.external)
            .saturating_add(self.overhead)
            .saturating_add(self.managed)
            .saturating_add(self.elsewhere)
    }

    /// Lease that nothing uses.
    pub(crate) fn unused(&self) -> u64 {
        self.lease.saturating_sub(self.used)
    }

    /// How much lease is missing for `len` more bytes. Alone, only the limit counts, cached bytes included.
    pub(crate) fn short_of(&self, len: u64) -> u64 {
        if self.alone {
            let total = self
                .used
                .saturating_add(self.overhead)
                .saturating_add(self.elsewhere)
                .saturating_add(len);
            return total.saturating_sub(self.limit).min(self.cached);
        }
        len.saturating_sub(self.unused())
    }

    /// Physical bytes are going to exist.
    pub(crate) fn take(&mut self, len: u64) {
        self.used += len;
        if self.alone {
            self.lease = self.lease.max(self.used);
        }
    }

    /// Physical bytes are gone.
    pub(crate) fn give(&mut self, len: u64) {
        debug_assert!(self.used >= len, "{} in use, {len} given", self.used);
        self.used = self.used.saturating_sub(len);
        if self.alone {
            self.lease = self.used;
        }
    }
}
