//! `ebb daemon`: in the foreground, in the background, or only its settings.

use std::io::Write;
use std::path::{Path, PathBuf};

use ebb_node::{
    Config, ConfigError, Daemon, HostMemory, Level, StartError, Surroundings, read_settings, set_level,
};
use ebb_protocol::control::{Payload, Request};

use crate::args::{DaemonArgs, Global};
use crate::background;
use crate::client::{Client, own_folder, unexpected};
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
    if args.reload {
        return match Client::open(global)?.ask(&Request::Reload)? {
            Payload::Done { message } => Ok(writeln!(out, "{message}")?),
            other => Err(unexpected(&other)),
        };
    }
    let file = args.config.clone().or_else(background::default_config);
    if args.background {
        let folder = global.socket_dir.clone().unwrap_or_else(own_folder);
        let started = background::start(&folder, file.as_deref())?;
        let what = if started {
            "the daemon runs in"
        } else {
            "a daemon runs already in"
        };
        writeln!(out, "{what} {}", folder.display())?;
        return Ok(());
    }
    // The first to be called: whatever is in the environment, a mistake in the file is said by its place in it.
    let config = settings(global, args, file.as_deref())?;
    if args.check {
        let budget = config.arena_budget(&HostMemory::read())?;
        writeln!(
            out,
            "the settings are right: sockets in {}, state in {}, a host arena of {budget}",
            config.socket_dir.display(),
            config.state_dir.display(),
        )?;
        return Ok(());
    }
    serve(
        config,
        file.or_else(background::default_place).as_deref(),
        args.detached,
    )
}

/// The settings of the file, or the defaults, with what the command line says over them.
fn settings(global: &Global, args: &DaemonArgs, file: Option<&Path>) -> Result<Config> {
    let mut around = Surroundings::here();
    if args.detached && around.runtime_dir.is_none() {
        // A daemon of the user's own, also root's: without this, root's would be the system's.
        around.runtime_dir = Some(PathBuf::from("/tmp"));
    }
    let (text, path) = match file {
        Some(path) => (read_settings(path)?, path),
        None => (String::new(), Path::new("ebb.toml")),
    };
    let mut config = Config::parse(&text, path, &around)?;
    let Some(folder) = &global.socket_dir else {
        return Ok(config);
    };
    let folder = std::path::absolute(folder).map_err(|error| CliError::failed(error.to_string()))?;
    if args.config.is_none() && folder != config.socket_dir && folder != own_folder() {
        // Two daemons, two states: the file that both read was not written for this one.
        config.state_dir = folder.join("state");
    }
    config.socket_dir = folder;
    Ok(config)
}

fn serve(mut config: Config, file: Option<&Path>, detached: bool) -> Result<()> {
    if detached {
        // Out of the terminal's session: what is sent to it there does not reach us. Fails only if that is so already.
        let _ = rustix::process::setsid();
    }
    set_level(*config.log.get_or_insert(Level::Info));
    let daemon = Daemon::start_as_process(config, file)?;
    daemon
        .run()
        .map_err(|error| CliError::failed(format!("the daemon cannot go on: {error}")))
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::usage(error.to_string().trim_end(), error.fix())
    }
}

impl From<StartError> for CliError {
    fn from(error: StartError) -> Self {
        let of_the_moment = matches!(error, StartError::System { .. });
        let said = Self::usage(error.to_string().trim_end(), error.fix());
        if of_the_moment {
            said.with_status(crate::error::FAILED)
        } else {
            said
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;
    use ebb_node::Scope;

    fn settings_of(words: &[&str], file: Option<&Path>) -> Result<Config> {
        let cli = Cli::try_parse_from([&["ebb", "daemon"], words].concat()).unwrap();
        let Command::Daemon(args) = &cli.command else {
            panic!("not daemon")
        };
        settings(&cli.global, args, file)
    }

    #[test]
    fn a_daemon_of_its_own_folder_has_a_state_of_its_own() {
        let config = settings_of(&["--socket-dir", "/x/run"], None).unwrap();
        assert_eq!(
            (config.socket_dir.as_path(), config.state_dir.as_path()),
            (Path::new("/x/run"), Path::new("/x/run/state"))
        );
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ebb.toml");
        std::fs::write(&file, "state_dir = \"/y\"\n").unwrap();
        let named = settings_of(
            &["--socket-dir", "/x/run", "--config", file.to_str().unwrap()],
            Some(&file),
        )
        .unwrap();
        assert_eq!(
            named.state_dir,
            Path::new("/y"),
            "a file that was named for this daemon counts"
        );
        let found = settings_of(&["--socket-dir", "/x/run"], Some(&file)).unwrap();
        assert_eq!(found.state_dir, Path::new("/x/run/state"));
    }

    #[test]
    fn a_background_daemon_is_the_users_own() {
        assert_eq!(settings_of(&["--detached"], None).unwrap().scope, Scope::User);
    }

    #[test]
    fn mistakes_in_the_file_are_of_the_users_to_mend() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ebb.toml");
        std::fs::write(&file, "[arena]\nbugdet = \"1Gi\"\n").unwrap();
        let error = settings_of(&[], Some(&file)).unwrap_err();
        assert_eq!(error.status, 2);
        assert!(
            error.message.contains("bugdet") && error.message.contains("line 2"),
            "{error}"
        );
        assert_eq!(
            settings_of(&[], Some(Path::new("/no/such.toml")))
                .unwrap_err()
                .status,
            2
        );
    }
}
