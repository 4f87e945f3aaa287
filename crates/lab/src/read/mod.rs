//! Reading what others recorded: one module a format.

pub mod finish;
pub mod gentd;
pub mod jobs;
pub mod open;
pub mod pickle;
pub mod pool;
pub mod table;
