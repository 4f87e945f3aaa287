//! `ebb rules`: the operator's rules, where they stand, and what they did.

use std::io::Write;

use ebb_protocol::control::{FiredRow, Payload, Request, RuleCardRow, RuleRow, Trouble};

use crate::args::{Global, RulesArgs};
use crate::client::{Client, unexpected};
use crate::error::Result;
use crate::table::{Align, BOLD, DIM, RESET, Table, harmless, time};

/// `ebb rules`.
pub(crate) fn rules(global: &Global, args: &RulesArgs) -> Result<()> {
    let answer = Client::open(global)?.ask(&Request::Rules)?;
    let Payload::Rules {
        config,
        rules,
        fired,
        troubles,
    } = answer
    else {
        return Err(unexpected(&answer));
    };
    let mut out = anstream::stdout().lock();
    if args.json {
        let all =
            serde_json::json!({ "config": config, "rules": rules, "fired": fired, "troubles": troubles });
        serde_json::to_writer_pretty(&mut out, &all)?;
        writeln!(out)?;
    } else {
        write_rules(&mut out, config.as_deref(), &rules, &fired, &troubles)?;
    }
    out.flush()?;
    Ok(())
}

/// The rules first, then what they did, the newest last: it stands next to the prompt.
fn write_rules(
    out: &mut impl Write,
    config: Option<&str>,
    rules: &[RuleRow],
    fired: &[FiredRow],
    troubles: &[Trouble],
) -> std::io::Result<()> {
    match (rules.is_empty(), config) {
        (true, Some(config)) => writeln!(
            out,
            "no rules in {}; `ebb daemon --example` shows how one is written",
            harmless(config)
        )?,
        (true, None) => writeln!(
            out,
            "no rules: the daemon was started without a file of settings; `ebb daemon --example` prints one"
        )?,
        (false, _) => table(out, rules)?,
    }
    if !fired.is_empty() {
        writeln!(out)?;
    }
    let width = fired.iter().map(|f| time(f.ago_ms).len()).max().unwrap_or(0);
    for fired in fired {
        let (ago, would) = (time(fired.ago_ms), if fired.dry_run { "would do " } else { "" });
        writeln!(
            out,
            "  {DIM}{ago:>width$} ago{RESET}  {BOLD}{}{RESET} on GPU {}: {would}{}",
            harmless(&fired.rule),
            fired.gpu,
            harmless(&fired.done)
        )?;
        writeln!(
            out,
            "  {:width$}      {DIM}saw {}{RESET}",
            "",
            harmless(&fired.text)
        )?;
    }
    for trouble in troubles {
        writeln!(
            out,
            "\n{BOLD}{}{RESET}\n  fix: {}",
            indented(&trouble.found),
            harmless(&trouble.fix)
        )?;
    }
    Ok(())
}

/// Several lines, each harmless.
fn indented(text: &str) -> String {
    text.lines().map(harmless).collect::<Vec<_>>().join("\n  ")
}

fn table(out: &mut impl Write, rules: &[RuleRow]) -> std::io::Result<()> {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("RULE", Left),
        ("WHEN", Left),
        ("DO", Left),
        ("GPU", Right),
        ("STATE", Left),
        ("FIRED", Right),
        ("LAST", Left),
    ]);
    for rule in rules {
        let deeds = rule.deeds.join(", ");
        let dry = if rule.dry_run { "(dry run) " } else { "" };
        let mut head = vec![rule.name.clone(), rule.when.clone(), format!("{dry}{deeds}")];
        if rule.cards.is_empty() {
            head.extend(["-", "no card yet", "0", "never"].map(String::from));
            table.row(head);
            continue;
        }
        for card in &rule.cards {
            let mut cells = std::mem::replace(&mut head, vec![String::new(); 3]);
            cells.extend([
                card.gpu.to_string(),
                state(card),
                card.fired.to_string(),
                card.last_ms
                    .map_or_else(|| "never".into(), |ms| format!("{} ago", time(ms))),
            ]);
            table.row(cells);
        }
    }
    table.write(out, 0)
}

fn state(card: &RuleCardRow) -> String {
    match (card.state.as_str(), card.since_ms) {
        ("pending", Some(ms)) => format!("holds for {}", time(ms)),
        ("fired", _) => "fired, still so".into(),
        (state, _) => state.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_what_they_did() {
        let card = |gpu, state: &str, since_ms, fired, last_ms| RuleCardRow {
            gpu,
            state: state.into(),
            since_ms,
            fired,
            last_ms,
        };
        let rules = [
            RuleRow {
                name: "full".into(),
                when: "device.used > 92% for 30s".into(),
                deeds: vec!["trim".into(), "shrink low".into(), "notify".into()],
                cards: vec![
                    card(0, "fired", Some(5_000), 2, Some(5_000)),
                    card(1, "pending", Some(12_000), 0, None),
                ],
                ..RuleRow::default()
            },
            RuleRow {
                name: "trial".into(),
                when: "device.waiting > 2".into(),
                deeds: vec!["checkpoint batch".into()],
                dry_run: true,
                cards: vec![card(0, "quiet", None, 0, None)],
                ..RuleRow::default()
            },
        ];
        let fired = [FiredRow {
            ago_ms: 5_000,
            rule: "full".into(),
            gpu: 0,
            text: "131 GiB of 140 GiB used, 0 B unmanaged, 1 waiting; arena 0 B of 64 GiB".into(),
            done: "trim, shrink low (t3 batch), notify".into(),
            dry_run: false,
        }];
        let troubles = [Trouble {
            found: "a change of the settings is refused, and the old ones hold: line 3".into(),
            fix: "mend the file, then `ebb daemon --reload`".into(),
        }];
        let mut out = Vec::new();
        write_rules(&mut out, Some("/etc/ebb/ebb.toml"), &rules, &fired, &troubles).unwrap();
        let text = anstream::adapter::strip_str(&String::from_utf8(out).unwrap()).to_string();
        for part in [
            "RULE   WHEN ",
            "fired, still so",
            "holds for 12 s",
            "(dry run) checkpoint batch",
            "5 s ago  full on GPU 0: trim, shrink low (t3 batch), notify\n",
            "saw 131 GiB of 140 GiB used",
            "fix: mend the file",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        let mut out = Vec::new();
        write_rules(&mut out, None, &[], &[], &[]).unwrap();
        assert!(
            String::from_utf8(out)
                .unwrap()
                .starts_with("no rules: the daemon was started without")
        );
    }
}
