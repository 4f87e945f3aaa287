//! One module a command.

pub(crate) mod daemon;
pub(crate) mod doctor;
pub(crate) mod install;
pub(crate) mod manual;
pub(crate) mod ps;
pub(crate) mod rules;
pub(crate) mod run;
pub(crate) mod simulate;
pub(crate) mod supervise;
pub(crate) mod task;
pub(crate) mod top;
pub(crate) mod trim;
pub(crate) mod version;
mod watch;
