//! The generated reference of `afresh serve`, `docs/reference/all.md`, and the test that it is
//! current.
//!
//! Options come from clap, keys from the parser of the configuration, and metrics from their
//! registry. The meanings of keys, limits and environment variables come from the tables of the
//! other pages, which must have a row for each key.
//! `AFRESH_WRITE_REFERENCE=1 cargo test -p afresh-cli --all-features serve_reference` writes the
//! page.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::CommandFactory;

use crate::Cli;

const PAGE: &str = "docs/reference/all.md";
const HEAD: &str = "# All options, keys, limits and metrics of the server

This page is generated from the program, and a test compares it. [Configuration](configuration.md),
[limits](limits.md) and [metrics](metrics.md) explain the same by topic.
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(page: &str) -> String {
    std::fs::read_to_string(root().join(page)).unwrap_or_default()
}

/// The rows of the tables below a heading.
fn rows<'a>(page: &'a str, heading: &str) -> Vec<Vec<&'a str>> {
    let marker = format!("\n## {heading}\n");
    let section = page.split(&marker).nth(1).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let lines = section.lines().filter(|line| line.starts_with("| ") && !line.contains("| key |"));
    lines.map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect()).collect()
}

fn table(text: &mut String, heading: &str, columns: &[&str]) {
    let line = columns.iter().map(|_| "---|").collect::<String>();
    let _ = write!(text, "\n## {heading}\n\n| {} |\n|{line}\n", columns.join(" | "));
}

fn generate() -> String {
    let mut text = HEAD.to_owned();
    table(&mut text, "Options of `afresh serve`", &["option", "default", "meaning"]);
    let command = Cli::command();
    let serve = command.find_subcommand("serve").expect("it exists");
    for option in serve.get_arguments().filter(|option| !option.is_hide_set()) {
        let value = option.get_value_names().unwrap_or_default();
        let takes = option.get_action().takes_values();
        let value = if takes { value.join(" ") } else { String::new() };
        let name = match option.get_long() {
            Some(long) => format!("--{long} {value}"),
            None => value,
        };
        let defaults: Vec<_> =
            option.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let default = if takes { defaults.join(", ") } else { String::new() };
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.trim_end_matches('.').replace('\n', " ").replace('|', "\\|");
        let name = name.trim().replace('|', "\\|");
        let _ = writeln!(text, "| `{name}` | {default} | {help} |");
    }
    let configuration = read("docs/reference/configuration.md");
    for (heading, keys) in afresh_serve::reference::keys() {
        table(
            &mut text,
            &format!("Keys: {}", heading.to_lowercase()),
            &["key", "default", "meaning"],
        );
        let rows = rows(&configuration, heading);
        for key in keys {
            let quoted = format!("`{key}`");
            let row = rows.iter().find(|row| row[0].split(", ").any(|name| name == quoted));
            let row = row.unwrap_or_else(|| {
                panic!("docs/reference/configuration.md has no row {quoted} below `## {heading}`")
            });
            let _ = writeln!(text, "| {quoted} | {} | {} |", row[1], row[2..].join(" | "));
        }
    }
    table(&mut text, "Fixed limits", &["limit", "value"]);
    for row in rows(&read("docs/reference/limits.md"), "Server and sandboxes").iter().skip(1) {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    table(&mut text, "Environment variables", &["variable", "meaning"]);
    for row in rows(&configuration, "Environment variables").iter().skip(1) {
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    table(&mut text, "Metrics", &["metric", "type", "meaning"]);
    for metric in afresh_serve::reference::metrics() {
        let _ = writeln!(text, "| `{}` | {} | {} |", metric.name, metric.kind, metric.help);
    }
    text
}

#[test]
fn the_reference_is_current() {
    let path = root().join(PAGE);
    if read("docs/reference/configuration.md").is_empty() {
        println!("SKIPPED: the documents are not in this source package");
        return;
    }
    let text = generate();
    if std::env::var_os("AFRESH_WRITE_REFERENCE").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let differs =
        "run `AFRESH_WRITE_REFERENCE=1 cargo test -p afresh-cli --all-features serve_reference`";
    assert!(read(PAGE) == text, "{PAGE} is not current: {differs}");
    let metrics = read("docs/reference/metrics.md");
    for metric in afresh_serve::reference::metrics() {
        assert!(metrics.contains(&metric.name), "docs/reference/metrics.md lacks {}", metric.name);
    }
}
