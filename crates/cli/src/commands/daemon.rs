//! `ebb daemon`: in the foreground, in the background, or only its settings.

use std::io::Write;
use std::path::PathBuf;

struct Config;
impl Config {
    fn example() -> &'static str {
        ""
    }
}
use ebb_protocol::control::Request;

use crate::args::{DaemonArgs, Global};
use crate::background;
use crate::client::{Client, own_folder};
use crate::error::{CliError, Result};

/// `ebb daemon`.
pub(crate) fn daemon(global: &Global, args: &DaemonArgs) -> Result<()> {
    let mut out = anstream::stdout();
    if args.example {
        write!(out, "{}", Config::example())?;
        return Ok(());
    }
    if args.stop {
        Client::open(global)?.ask(&Request::Shutdown)?;
        writeln!(out, "the daemon stops; programs go on with what they have")?;
        return Ok(());
    }
    if args.background {
        let folder = global.socket_dir.clone().unwrap_or_else(own_folder);
        let config = args.config.clone().or_else(background::default_config);
        let started = background::start(&folder, config.as_deref())?;
        let what = if started {
            "the daemon runs in"
        } else {
            "a daemon runs already in"
        };
        writeln!(out, "{what} {}", folder.display())?;
        return Ok(());
    }
    serve(global, args)
}

fn serve(_: &Global, _: &DaemonArgs) -> Result<()> {
    let _: Option<PathBuf> = None;
    Err(CliError::failed("not yet"))
}
