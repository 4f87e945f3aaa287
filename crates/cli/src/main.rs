//! The command `ebb`.
//!
//! Every command is one module of `commands`; what they share is beside them: the connection to the daemon ([`client`]),
//! starting one ([`background`]), the checks before a program is run ([`library`], [`program`], [`driver`]), and how
//! failures are said ([`error`]).

#![forbid(unsafe_code)]

mod args;
mod background;
mod bench;
mod client;
mod commands;
mod demo;
mod driver;
mod elf;
mod error;
#[cfg(test)]
mod fixtures;
mod library;
mod program;
mod table;
mod usage;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, ColorChoice, Command};
use error::Result;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage::report(&error),
    };
    match cli.global.color {
        ColorChoice::Auto => {}
        ColorChoice::Always => anstream::ColorChoice::Always.write_global(),
        ColorChoice::Never => anstream::ColorChoice::Never.write_global(),
    }
    match dispatch(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_broken_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            usage::say(&error);
            ExitCode::from(error.status)
        }
    }
}

fn dispatch(cli: &Cli) -> Result<()> {
    let global = &cli.global;
    match &cli.command {
        Command::Run(args) => commands::run::run(global, args),
        Command::Ps(args) => commands::ps::ps(global, args),
        Command::Top(args) => commands::top::top(global, args),
        Command::Rules(args) => commands::rules::rules(global, args),
        Command::Pause(args) => commands::task::pause(global, args),
        Command::Hibernate(args) => commands::task::hibernate(global, args),
        Command::Trim(args) => commands::trim::trim(global, args),
        Command::Resume(args) => commands::task::resume(global, args),
        Command::Limit(args) => commands::task::limit(global, args),
        Command::Doctor(args) => commands::doctor::doctor(global, args),
        Command::Demo(args) => demo::demo(args),
        Command::Bench(args) => bench::bench(args),
        Command::Simulate(args) => commands::simulate::simulate(args),
        Command::Daemon(args) => commands::daemon::daemon(global, args),
        Command::Install(args) => commands::install::install(global, args),
        Command::Completions(args) => commands::manual::completions(args),
        Command::Man(args) => commands::manual::man(args),
        Command::Version(args) => commands::version::version(global, args),
        Command::Supervised(args) => commands::supervise::become_program(args),
        Command::CheckpointHelper(args) => Ok(ebb_node::checkpoint::run(
            args.parent,
            std::io::stdin().lock(),
            std::io::stdout().lock(),
        )?),
    }
}
