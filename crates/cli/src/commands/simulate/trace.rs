//! `--trace DIR`: whatever recording a folder holds.

use std::path::Path;

use ebb_lab::traces::{self, Kind};

use super::{Shown, file, mixed, papers, scenarios};
use crate::args::SimulateArgs;
use crate::error::{CliError, Result};

/// What is to be done with a folder.
pub(super) enum Found {
    /// A result.
    Shown(Box<Shown>),
    /// An event log, to be decided again.
    Log(std::path::PathBuf),
}

pub(super) fn trace(path: &Path, args: &SimulateArgs) -> Result<Found> {
    if path.extension().is_some_and(|e| e == "toml") {
        return file::scenario(path, args).map(|s| Found::Shown(Box::new(s)));
    }
    let kind = traces::recognise(path).map_err(|e| {
        CliError::usage(
            e.to_string(),
            "name the folder of one trace, or a daemon's event log",
        )
    })?;
    if kind == Kind::EventLog {
        return Ok(Found::Log(
            traces::event_log(path).unwrap_or_else(|| path.to_owned()),
        ));
    }
    let mut args = args.clone();
    path.clone_into(&mut args.data);
    let shown = match kind {
        Kind::Serving => scenarios::gentd26(&args)?,
        Kind::Requests => scenarios::lora(&args)?,
        Kind::Gangs => papers::shockwave(&args)?,
        Kind::Several => mixed::mixed(&args)?,
        Kind::Profiles | Kind::EventLog => {
            return Err(CliError::usage(
                format!("{} holds {kind}: by themselves they are no trace", path.display()),
                "name them in a scenario file, as `trace` of a job (docs/scenarios.md)",
            ));
        }
    };
    Ok(Found::Shown(Box::new(shown)))
}
