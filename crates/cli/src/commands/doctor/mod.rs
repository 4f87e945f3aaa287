//! `ebb doctor`: without a process, whether everything is in place on this machine; with one, what of it ebb sees, what
//! it could release, and why not the rest.

mod machine;
mod process;

use crate::args::{DoctorArgs, Global};
use crate::error::Result;

/// `ebb doctor`.
pub(crate) fn doctor(global: &Global, args: &DoctorArgs) -> Result<()> {
    match &args.process {
        Some(named) => process::examine(global, process::find(global, named)?, args),
        None => machine::check(global, args.json),
    }
}
