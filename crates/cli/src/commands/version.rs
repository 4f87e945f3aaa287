//! `ebb version`.

use std::io::Write;

use ebb_protocol::control::{Payload, Request};

use crate::args::{Global, ListArgs};
use crate::client::Client;
use crate::error::Result;

/// `ebb version`: ours, and the daemon's if one runs.
pub(crate) fn version(global: &Global, args: &ListArgs) -> Result<()> {
    let daemon = Client::find(global)
        .ok()
        .and_then(|mut client| match client.ask(&Request::Hello) {
            Ok(Payload::Hello { version, pid, .. }) => {
                Some((version, pid, client.folder().display().to_string()))
            }
            _ => None,
        });
    let mut out = anstream::stdout();
    let own = env!("CARGO_PKG_VERSION");
    if args.json {
        let daemon = daemon.map(|(version, pid, folder)| {
            serde_json::json!({ "version": version, "pid": pid, "socket_dir": folder })
        });
        writeln!(out, "{}", serde_json::json!({ "version": own, "daemon": daemon }))?;
        return Ok(());
    }
    writeln!(out, "ebb {own}")?;
    match daemon {
        Some((version, pid, folder)) => writeln!(out, "daemon {version} (pid {pid}, {folder})")?,
        None => writeln!(out, "no daemon runs")?,
    }
    Ok(())
}
