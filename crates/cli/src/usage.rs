//! How failures are said, those of the flags included: one shape for all.

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::error::{CliError, USAGE};
use crate::table::{BOLD, RED, RESET, harmless};

/// Prints a failure.
pub(crate) fn say(error: &CliError) {
    // The text may quote other people's names, line by line.
    let message: Vec<String> = error.message.lines().map(harmless).collect();
    anstream::eprintln!("{BOLD}{RED}error:{RESET} {}", message.join("\n"));
    if let Some(fix) = &error.fix {
        let fix: Vec<String> = fix.lines().map(harmless).collect();
        anstream::eprintln!("  {BOLD}fix:{RESET} {}", fix.join("\n       "));
    }
}

/// Prints what clap has to say: help and versions as they are, mistakes as we say ours.
pub(crate) fn report(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A reader that went away is no failure.
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(USAGE)
        }
        _ => {
            say(&explain(error));
            ExitCode::from(USAGE)
        }
    }
}

fn explain(error: &clap::Error) -> CliError {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    // Clap ends with the usage and a pointer to --help, which the fix says shorter.
    let end = ["\n\nUsage:", "\n\nFor more information"]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min()
        .unwrap_or(text.len());
    let mut message = text[..end].trim_end().to_owned();
    let mut fix = None;
    // Clap's own advice ("a similar argument exists") becomes ours.
    if let Some(at) = message.find("\n\n  tip: ") {
        fix = Some(
            message[at + "\n\n  tip: ".len()..]
                .replace("\n\n  tip: ", "\n")
                .replace("\n\n", "\n"),
        );
        message.truncate(at);
    }
    let argument = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument.as_str(),
        _ => "",
    };
    let fix = fix.unwrap_or_else(|| {
        if error.kind() == ErrorKind::ValueValidation && argument.contains("<SIZE>") {
            "write a size like 20Gi, 512Mi or 1500M".into()
        } else if argument.contains("<PRIORITY>") {
            "write high, normal or low".into()
        } else {
            format!("`{} --help` shows what it takes", command_of(error))
        }
    });
    CliError::usage(message, fix)
}

/// The command whose flags were wrong, from the usage line.
fn command_of(error: &clap::Error) -> String {
    let text = error.to_string();
    let usage = text.split_once("Usage: ").map_or("", |(_, usage)| usage);
    let words: Vec<&str> = usage
        .split_whitespace()
        .take_while(|word| word.starts_with(|c: char| c.is_ascii_lowercase()))
        .take(2)
        .collect();
    if words.is_empty() {
        let typed: Vec<String> = std::env::args()
            .skip(1)
            .filter(|word| word.bytes().all(|b| b.is_ascii_lowercase()))
            .take(1)
            .collect();
        return ["ebb".to_owned()]
            .into_iter()
            .chain(typed)
            .collect::<Vec<_>>()
            .join(" ");
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::Parser;

    fn said(args: &[&str]) -> CliError {
        explain(&Cli::try_parse_from([&["ebb"], args].concat()).unwrap_err())
    }

    #[test]
    fn a_malformed_size_has_one_message_and_a_fix() {
        let error = said(&["run", "--limit", "20Gb", "x"]);
        assert!(
            error.message.contains("--limit") && error.message.contains("`Gb` in `20Gb`"),
            "{error}"
        );
        assert_eq!(error.message.lines().count(), 1, "{error}");
        assert_eq!(
            error.fix.as_deref(),
            Some("write a size like 20Gi, 512Mi or 1500M")
        );
        assert_eq!(error.status, 2);
    }

    #[test]
    fn a_typing_mistake_gets_the_right_word() {
        let error = said(&["run", "--limt", "20Gi", "x"]);
        assert!(error.fix.as_deref().unwrap().contains("--limit"), "{error}");
        let error = said(&["pss"]);
        assert!(error.fix.as_deref().unwrap().contains("'ps'"), "{error}");
    }

    #[test]
    fn other_mistakes_point_to_the_commands_help() {
        let error = said(&["pause"]);
        assert_eq!(
            error.fix.as_deref(),
            Some("`ebb pause --help` shows what it takes")
        );
        let error = said(&["run", "--priority", "urgent", "x"]);
        assert_eq!(error.fix.as_deref(), Some("write high, normal or low"));
    }
}
