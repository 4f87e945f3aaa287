//! [`Thrift`]: how much more than it needs a pool may have, so that it does not map the same memory again and again.
//!
//! A pool that has no byte more than what is live at the peak has to fit everything into every hole: a program whose steps are alike, but not
//! the same, maps in each of them. A mapping costs 30 to 100 µs and a byte costs nothing as long as nobody else wants it. So who has mapped
//! anew for some seconds without an end may grow instead, a little more each second that it goes on, up to [`Config::slack_permille`]; only into
//! room that is there without taking it from anybody; and what it has for it is idle, so that it is the first to go. Then it begins again.
//!
//! ```text
//!   tight ──── so many mappings a second, twice in a row ────► a step more ──── and again ────► the most
//!     ▲                                                             │
//!     └──────────────────── memory is given back ◄──────────────────┘
//! ```
//!
//! [`Config::slack_permille`]: super::Config::slack_permille

use super::Pool;

/// As many mappings in a second cost about one hundredth of it.
const MANY: u64 = 128;
/// So many such seconds in a row.
const ROW: u32 = 2;
/// A step is one of so many parts of what was needed.
const STEP: u64 = 64;

#[derive(Clone, Debug, Default)]
pub(super) struct Thrift {
    /// Mappings of memory that was there before, ever, and when the last second ended.
    remapped: u64,
    seen: u64,
    /// Seconds in a row in which there were many.
    row: u32,
    /// Bytes that may be idle at the peak.
    slack: u64,
    /// Bytes that nobody has to give up.
    room: u64,
}

impl Thrift {
    /// So much that existed is mapped once more.
    pub(super) fn remap(&mut self, mappings: usize) {
        self.remapped += u64::try_from(mappings).unwrap_or(u64::MAX);
    }

    /// Memory was given back: somebody else has a better use for it.
    pub(super) const fn given_back(&mut self) {
        self.slack = 0;
        self.row = 0;
    }

    /// It may have more than it needs, so that it maps less.
    pub(super) const fn has_slack(&self) -> bool {
        self.slack > 0
    }

    /// So much was taken of the room.
    pub(super) fn took(&mut self, bytes: u64) {
        self.room = self.room.saturating_sub(bytes);
    }
}

impl Pool {
    /// A second has passed. `room`: how much more there can be without taking it from anybody. How much the pool would like to have of it.
    pub fn second(&mut self, room: u64) -> u64 {
        let needed = self.needed(0);
        let most = u128::from(needed) * u128::from(self.config.slack_permille) / 1000;
        let most = u64::try_from(most).unwrap_or(u64::MAX);
        let physical = self.chunks.physical();
        let thrift = &mut self.thrift;
        let many = thrift.remapped - thrift.seen >= MANY;
        thrift.seen = thrift.remapped;
        thrift.row = if many { thrift.row + 1 } else { 0 };
        if thrift.row >= ROW {
            thrift.slack = (thrift.slack + needed / STEP).min(most);
        }
        thrift.room = room;
        if many {
            (needed + thrift.slack).saturating_sub(physical)
        } else {
            0
        }
    }

    /// Whether growing by so much for a block of `len` granules' bytes leaves no more idle than may be, though it could be stitched.
    pub(super) fn may_be_idle(&self, grows: u64, len: u64) -> bool {
        grows <= self.thrift.room && self.chunks.physical() + grows <= self.needed(len) + self.thrift.slack
    }

    /// Bytes in use at the most in this period and the last one, with a block of `len` now.
    pub(super) fn needed(&self, len: u64) -> u64 {
        self.demand[0]
            .max(self.demand[1])
            .max(self.chunks.active_bytes() + len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    const GRANULE: u64 = 2 << 20;

    fn pool(slack_permille: u64) -> Pool {
        let mut pool = Pool::new(Config {
            slack_permille,
            ..Config::for_granule(GRANULE)
        });
        // So much was in use at the most.
        pool.demand[0] = 1000 * GRANULE;
        pool
    }

    fn busy(pool: &mut Pool, room: u64) -> u64 {
        pool.thrift.remap(200);
        pool.second(room)
    }

    #[test]
    fn who_maps_on_and_on_may_have_a_step_more_each_second() {
        let mut pool = pool(125);
        let needed = 1000 * GRANULE;
        busy(&mut pool, u64::MAX);
        assert!(
            pool.may_be_idle(needed, 0) && !pool.may_be_idle(needed + 1, 0),
            "one second proves nothing"
        );
        busy(&mut pool, u64::MAX);
        assert!(
            pool.may_be_idle(needed + needed / STEP, 0) && !pool.may_be_idle(needed + needed / STEP + 1, 0)
        );
        for _ in 0..20 {
            busy(&mut pool, u64::MAX);
        }
        assert!(pool.may_be_idle(needed + needed / 8, 0) && !pool.may_be_idle(needed + needed / 8 + 1, 0));
        // A second without changes nothing of what it has, and what is given back ends it.
        assert_eq!(pool.second(u64::MAX), 0);
        assert!(pool.may_be_idle(needed + needed / 8, 0));
        pool.thrift.given_back();
        assert!(!pool.may_be_idle(needed + 1, 0));
        busy(&mut pool, u64::MAX);
        assert!(!pool.may_be_idle(needed + 1, 0), "two in a row");
    }

    #[test]
    fn it_grows_into_room_that_nobody_has_to_give_up_and_says_how_much_it_would_like() {
        let mut pool = pool(125);
        busy(&mut pool, 0);
        let wish = busy(&mut pool, 0);
        assert_eq!(wish, 1000 * GRANULE + 1000 * GRANULE / STEP);
        assert!(!pool.may_be_idle(GRANULE, 0));
        busy(&mut pool, 3 * GRANULE);
        assert!(pool.may_be_idle(3 * GRANULE, 0) && !pool.may_be_idle(4 * GRANULE, 0));
        pool.thrift.took(2 * GRANULE);
        assert!(pool.may_be_idle(GRANULE, 0) && !pool.may_be_idle(2 * GRANULE, 0));
    }

    #[test]
    fn slack_of_nothing_is_none() {
        let mut pool = pool(0);
        for _ in 0..10 {
            busy(&mut pool, u64::MAX);
        }
        assert!(!pool.may_be_idle(1000 * GRANULE + 1, 0));
    }
}
