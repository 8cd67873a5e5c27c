//! The groups of subcommands in `afresh help`: clap supports none.
//!
//! Promises: a test compares the groups with the subcommands of clap and with `docs/command.md`.

use std::fmt::Write;

use clap::{Command, CommandFactory, FromArgMatches};

use crate::Cli;

/// Heading of the options that every command has.
pub(crate) const EVERY_COMMAND: &str = "Options of every command";

/// Examples below the help of subcommands.
pub(crate) const RUN_EXAMPLE: &str = "\
Example:
  afresh run --linux --input '[1, 2]' jq -- -c 'map(. + 1)'";
pub(crate) const EXEC_EXAMPLE: &str = "\
Example:
  afresh exec --dir . -- python3 script.py";
pub(crate) const SERVE_EXAMPLE: &str = "\
Example:
  afresh serve --linux --dir . --warm 'GET /' node -- app.js";
#[cfg(feature = "mcp")]
pub(crate) const MCP_EXAMPLE: &str = "\
Example:
  afresh mcp python3 --linux --setup 'import json'";
pub(crate) const SNAPSHOT_EXAMPLE: &str = "\
Example:
  afresh snapshot guest.wasm --warm setup --to store@v1";

/// Heading and subcommands of each group, in the order of the help.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Guests", &["run", "exec", "repl", "fork", "verify"]),
    (
        "Snapshots",
        &[
            "snapshot", "inspect", "diff", "compact", "push", "pull", "list", "tag", "untag", "gc",
            "import", "export", "keygen",
        ],
    ),
    ("Serving", &["serve", "mcp", "nodes", "drain", "fleet", "pager", "images"]),
    ("Host", &["doctor", "completions", "man"]),
];

/// Parses the arguments of this process. Prints help or an error and exits where clap does.
pub(crate) fn parse() -> Cli {
    let matches = grouped(Cli::command()).get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// `command` with its subcommands in groups. Subcommands that this build lacks are omitted.
fn grouped(command: Command) -> Command {
    let heading = *command.get_styles().get_header();
    let literal = *command.get_styles().get_literal();
    let names = GROUPS.iter().flat_map(|(_, names)| *names);
    let width = names.map(|name| name.len()).max().unwrap_or_default();
    let mut text = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (group, names) in GROUPS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{heading}{group}:{heading:#}");
        for name in names {
            let Some(about) = command.find_subcommand(name).and_then(Command::get_about) else {
                continue;
            };
            let _ = writeln!(text, "  {literal}{name:<width$}{literal:#}  {about}");
        }
    }
    let _ = write!(text, "\n{heading}Options:{heading:#}\n{{options}}{{after-help}}");
    command
        .help_template(text)
        .after_help("`afresh help COMMAND` describes a command and its options.")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn help() -> String {
        grouped(Cli::command()).render_long_help().to_string()
    }

    #[test]
    fn every_subcommand_is_in_one_group_of_the_help() {
        let listed: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let unique: BTreeSet<&str> = listed.iter().copied().collect();
        assert_eq!(unique.len(), listed.len(), "a subcommand is in two groups: {listed:?}");
        let command = Cli::command();
        let real: BTreeSet<&str> = command
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
            .map(Command::get_name)
            .collect();
        let ungrouped: Vec<_> = real.difference(&unique).collect();
        assert!(ungrouped.is_empty(), "add {ungrouped:?} to a group in help.rs");
        // The fleet brings `serve` and `wasm`.
        if cfg!(all(feature = "fleet", linux_guests, feature = "mcp", feature = "seal")) {
            let stale: Vec<_> = unique.difference(&real).collect();
            assert!(stale.is_empty(), "remove {stale:?} from help.rs");
        }
    }

    #[test]
    fn the_help_shows_the_groups_with_the_text_of_each_subcommand() {
        let help = help();
        let positions: Vec<_> =
            GROUPS.iter().map(|(group, _)| help.find(&format!("\n{group}:\n"))).collect();
        assert!(positions.iter().all(Option::is_some) && positions.is_sorted(), "{help}");
        assert!(help.contains("\n  run          Warm a guest, or load a snapshot, and call it\n"));
        assert!(help.contains("--output <OUTPUT>"), "{help}");
        for line in help.split("\nOptions:").next().unwrap().lines() {
            assert!(line.len() <= 100, "{} characters: {line}", line.len());
        }
    }

    #[test]
    fn a_command_shows_its_own_options_before_those_of_guests_and_an_example() {
        let mut command = Cli::command();
        command.build();
        let mut long_help = |name: &str| {
            let found = command.find_subcommand_mut(name).unwrap();
            found.render_long_help().to_string()
        };
        for (name, option) in [("fork", "\n      --to "), ("run", "\n      --input ")] {
            let help = long_help(name);
            let place = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
            let (own, guests) = (place("\nOptions:\n"), place("\nOptions of guests:\n"));
            assert!(own < place(option) && place(option) < guests, "{help}");
            assert!(guests < place("--warm-times"), "{help}");
        }
        for name in ["run", "exec", "serve", "snapshot"] {
            let help = long_help(name);
            let example = format!("\nExample:\n  afresh {name} ");
            assert!(help.contains(&example), "{help}");
        }
    }

    /// The help of an option of `afresh run`.
    fn option_help(option: &str) -> String {
        let mut command = Cli::command();
        command.build();
        let run = command.find_subcommand("run").unwrap();
        let found = run.get_arguments().find(|argument| argument.get_long() == Some(option));
        found.unwrap().get_help().unwrap().to_string()
    }

    #[test]
    #[cfg(feature = "wasm")]
    fn the_help_names_each_strategy() {
        use afresh::memory::Strategy;
        let help = option_help("strategy");
        let listed = help.split_once(": ").unwrap().1.replace(" or ", ", ");
        let listed: BTreeSet<&str> = listed.trim_end_matches('.').split(", ").collect();
        let real: Vec<String> = [Strategy::Auto, Strategy::WriteSet(None)]
            .into_iter()
            .chain(Strategy::FORCED)
            .map(|strategy| strategy.to_string())
            .collect();
        assert_eq!(listed, real.iter().map(String::as_str).collect());
    }

    #[test]
    #[cfg(feature = "seal")]
    fn the_help_names_each_limit() {
        let help = option_help("limit");
        let listed = help.split_once(": ").unwrap().1.replace(" or ", ", ");
        let listed: BTreeSet<&str> = listed.trim_end_matches('.').split(", ").collect();
        assert_eq!(listed, afresh::store::Limits::NAMES.into_iter().collect());
    }

    #[test]
    fn the_page_of_the_command_has_the_same_groups() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/command.md");
        let Ok(page) = std::fs::read_to_string(path) else {
            println!("SKIPPED: {path} is not in this source package");
            return;
        };
        let table = page.split("## All commands").nth(1).unwrap().split("\n## ").next().unwrap();
        let mut group = String::new();
        let mut found = BTreeSet::new();
        for row in table.lines().filter(|line| line.starts_with("| ")).skip(1) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            if !cells[1].is_empty() {
                cells[1].clone_into(&mut group);
            }
            for name in cells[2].split('`').skip(1).step_by(2) {
                found.insert((group.clone(), name.to_owned()));
            }
        }
        let expected: BTreeSet<(String, String)> = GROUPS
            .iter()
            .flat_map(|(group, names)| {
                names.iter().map(|name| (group.to_lowercase(), (*name).to_owned()))
            })
            .collect();
        assert_eq!(found, expected, "docs/command.md and help.rs differ");
    }
}
