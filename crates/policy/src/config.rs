//! [`PolicyConfig`]: every number that the arbiter decides by.

use core::time::Duration;

/// What the arbiter decides by. Plain fields; whoever reads configuration files fills them in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyConfig {
    /// A client that used the GPU within this time is active.
    pub idle_after: Duration,
    /// The shortest turn, however cheap a switch is.
    pub min_turn: Duration,
    /// A turn lasts at least this many times the copying that ends it: 20 keeps copying under a twentieth.
    pub turn_per_copy: u32,
    /// The turn that follows every restore, whoever wants the memory or a pause meanwhile.
    pub turn_owed: Duration,
    /// How long, besides the copying, a pause is put off for a restore and a turn that are owed.
    pub owed_max: Duration,
    /// A higher priority that waits takes the memory of lower ones that run, whatever their turns; without it priorities are
    /// weights of turns.
    pub preempt: bool,
    /// How long a client that is to give way to a higher priority has to save itself.
    pub preempt_grace: Duration,
    /// As long as this much of a card is free, in thousandths, idle memory stays where it is; 0: no such mark, and idle
    /// memory is released by time alone.
    pub low_mark: u32,
    /// If less is free, idle memory is released until this much is.
    pub high_mark: u32,
    /// Memory that is away comes back before its program asks, where the program's own idle times say when that will be.
    pub predict: bool,
    /// How long an allocation waits before a program that asked so gets an out-of-memory it may answer by flushing caches.
    pub alloc_wait: Duration,
    /// How long any allocation waits.
    pub alloc_wait_max: Duration,
    /// How long to leave a client alone after a reclaim that did not work; doubled each time.
    pub retry: Duration,
    /// The longest such pause.
    pub retry_max: Duration,
    /// An order without progress for this long is given up: the client counts as busy, other victims are sought.
    pub order_timeout: Duration,
    /// After waiting this long, a client that is next goes before everyone who would start to run behind it.
    pub patience: Duration,
    /// Who waited this long goes first, however little others had.
    pub starve_after: Duration,
    /// Bytes a second from the card to the host until some were measured.
    pub out_rate: u64,
    /// Bytes a second from the host to the card until some were measured.
    pub in_rate: u64,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        Self {
            idle_after: Duration::from_secs(1),
            min_turn: Duration::from_secs(1),
            turn_per_copy: 20,
            turn_owed: Duration::from_millis(100),
            owed_max: Duration::from_secs(5),
            preempt: false,
            preempt_grace: Duration::from_secs(2),
            low_mark: 0,
            high_mark: 0,
            predict: false,
            alloc_wait: Duration::from_secs(2),
            alloc_wait_max: Duration::from_secs(600),
            retry: Duration::from_millis(500),
            retry_max: Duration::from_secs(30),
            order_timeout: Duration::from_secs(30),
            patience: Duration::from_secs(5),
            starve_after: Duration::from_secs(300),
            out_rate: 20_000_000_000,
            in_rate: 20_000_000_000,
        }
    }
}
