//! Small blocks that keep granules apart from each other are brought together, without a change of any address: the calls for what
//! [`Pool::meshable`](crate::pool::Pool::meshable) finds.
//!
//! ```text
//!   meshable ─► pairs ─► for each: plan ─► copies, all at once ─► the other calls, one by one ─► finish
//!                                                                      │ one fails between two mappings
//!                                                                      ▼
//!                                                                    torn ─► mend, again and again
//! ```
//!
//! It is the caller's part that no work can touch any block meanwhile, neither queued nor to come, and that none begins before
//! [`Front::mend`] has succeeded. The books go on: threads may allocate and free.

use super::{AllocateError, Calls, Driver, Front};
use crate::pool::{Call, ChunkId, Pair, Plan};

impl<D: Driver> Front<D> {
    /// Bytes between blocks, in granules that something lives in: no more than these can come of meshing. Costs nothing.
    pub fn scattered(&self) -> u64 {
        super::lock(&self.pool).scattered()
    }

    /// A figure that changes with every block that comes or goes in the pool (not in shards).
    pub fn changes(&self) -> u64 {
        super::lock(&self.pool).changes()
    }

    /// Pairs of granules that can be made one each, of those chunks that may move.
    pub fn meshable(&self, may: impl Fn(ChunkId) -> bool) -> Vec<Pair> {
        super::lock(&self.pool).meshable_of(may)
    }

    /// Makes one of these pairs one; `false` if it has changed so that it cannot be. Afterwards something may be torn: [`Self::mend`].
    ///
    /// # Errors
    /// The driver's. What was done is done, no byte is lost.
    pub fn mesh(&self, pair: Pair) -> Result<bool, AllocateError<D::Error>> {
        let plan = super::lock(&self.pool).mesh(pair);
        match plan {
            Some(plan) => self.run_moving(plan).map(|()| true),
            None => Ok(false),
        }
    }

    /// Whether blocks have no memory behind their addresses: nothing may touch them before [`Self::mend`] has succeeded.
    pub fn torn(&self) -> bool {
        super::lock(&self.pool).torn()
    }

    /// Puts right what failed calls have torn.
    ///
    /// # Errors
    /// The driver's: something is torn still.
    pub fn mend(&self) -> Result<(), AllocateError<D::Error>> {
        loop {
            let plan = super::lock(&self.pool).mend();
            match plan {
                Some(plan) => self.run_moving(plan)?,
                None => return Ok(()),
            }
        }
    }

    /// Makes the calls of a plan that moves live bytes.
    fn run_moving(&self, plan: Plan) -> Result<(), AllocateError<D::Error>> {
        let calls = plan.calls();
        let (mut done, mut result) = (0, Ok(()));
        while done < calls.len() && result.is_ok() {
            let rest = &calls[done..];
            let is_copy = |call: &&Call| matches!(call, Call::Copy { .. });
            let copies = rest.iter().take_while(is_copy).count();
            let made = copies.max(1);
            result = if copies > 0 {
                self.driver.copy(&rest[..copies])
            } else {
                crate::pool::Backing::call(&mut Calls(&self.driver), &rest[0])
            };
            done += if result.is_ok() { made } else { 0 };
        }
        super::lock(&self.pool).finish(plan, done);
        result.map_err(AllocateError::Driver)
    }
}
