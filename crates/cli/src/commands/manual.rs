//! `ebb completions` and `ebb man`: made from the same definition as the flags, so that they cannot differ from them.

use std::io::Write;
use std::path::Path;

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::error::{CliError, Result};

/// `ebb completions`.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    // Into memory first: the generator panics on a pipe whose reader has gone.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "ebb", &mut text);
    std::io::stdout().write_all(&text)?;
    Ok(())
}

/// `ebb man`.
pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        std::io::stdout().write_all(&page)?;
        return Ok(());
    };
    write_pages(dir).map_err(|error| {
        CliError::usage(
            format!("cannot write manual pages into {}: {error}", dir.display()),
            "choose another --dir",
        )
    })
}

/// A page for `ebb`, and one for each command.
pub(crate) fn write_pages(dir: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::command(), dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_page_for_every_command() {
        let dir = tempfile::tempdir().unwrap();
        write_pages(dir.path()).unwrap();
        let mut names: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        for command in Cli::command()
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
        {
            let name = format!("ebb-{}.1", command.get_name());
            assert!(names.contains(&name), "{name} is missing of {names:?}");
        }
        let run = std::fs::read_to_string(dir.path().join("ebb-run.1")).unwrap();
        assert!(
            run.contains("idle\\-release"),
            "the page of `ebb run` names its flags"
        );
    }
}
