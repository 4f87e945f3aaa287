//! Set-up, demo and checks of this repository: `cargo xtask <task>`.

#![forbid(unsafe_code)]

mod checks;
mod layering;
mod layout;
mod machine;
mod metadata;
mod shell;
mod tidy;

use std::process::ExitCode;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: cargo xtask <task>

  demo [ARGS]      build what `ebb demo` needs, and run it with these arguments
  test [FILTER]    everything that has to pass before a change goes in; with a filter, only the tests of that name
  soak [MINUTES]   the property tests with new seeds, round after round (10 minutes)
  miri             the tests of the pure allocator under Miri, which needs the nightly toolchain with `miri` and `rust-src`
  lint             only what is quick to check: layering, tidiness, format, clippy
  tidy             only layering and tidiness, in a second
  layout           build for development: target/debug/ebb then finds its library, worker and simulated GPU
  dist             build for shipping: target/dist/{bin,lib,share}";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<ExitCode> {
    let Some((task, rest)) = arguments.split_first() else {
        eprintln!("{USAGE}");
        return Ok(ExitCode::from(2));
    };
    match (task.as_str(), rest) {
        ("demo", rest) => layout::demo(rest),
        ("test", []) => checks::all(None),
        ("test", [filter]) => checks::all(Some(filter)),
        ("soak", []) => checks::soak("10"),
        ("soak", [minutes]) => checks::soak(minutes),
        ("miri", []) => checks::miri(),
        ("lint", []) => checks::lint(),
        ("tidy", []) => checks::tidiness(),
        ("layout", []) => layout::development().map(|()| ExitCode::SUCCESS),
        ("dist", []) => layout::dist().map(|()| ExitCode::SUCCESS),
        ("help" | "--help" | "-h", _) => {
            println!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        _ => bail!("`{}` is no task\n\n{USAGE}", arguments.join(" ")),
    }
}
