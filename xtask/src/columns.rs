//! The column gate: lines of comments and Markdown end by column 100, in every language.
//!
//! Tables, code, headings, metadata and definitions of links may be longer, as may a line whose
//! text has no space to break at. The formatter of each language limits its code. May break it: a
//! string whose line begins like a comment. It is counted as one. A comment behind code is not
//! seen.

use std::fmt::Write as _;

use anyhow::{Context, Result, bail};

use crate::host::repository;

use crate::sources;

/// The last column of a line.
const MAX_COLUMN: usize = 100;

/// How the lines of a file mark prose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Syntax {
    Markdown,
    /// `//`, and blocks whose lines begin with `/*` or `*`.
    Slashes,
    /// `#`.
    Hashes,
}

impl Syntax {
    /// The syntax of a kind of files; `None` for one without comments that are checked.
    fn of(kind: &str) -> Option<Self> {
        match kind {
            "md" => Some(Self::Markdown),
            "rs" | "c" | "h" | "js" | "mjs" | "ts" | "mts" => Some(Self::Slashes),
            "py" | "pyi" | "sh" | "toml" | "yaml" | "yml" => Some(Self::Hashes),
            _ => None,
        }
    }
}

/// Refuses lines of comments and Markdown that end behind [`MAX_COLUMN`].
pub(crate) fn check() -> Result<()> {
    let mut over = String::new();
    for path in sources::paths()? {
        let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
        // STYLE.md has tables of sentences.
        let Some(syntax) = Syntax::of(kind).filter(|_| !path.ends_with("STYLE.md")) else {
            continue;
        };
        let bytes =
            std::fs::read(repository().join(&path)).with_context(|| path.display().to_string())?;
        for number in long_lines(&String::from_utf8_lossy(&bytes), syntax) {
            writeln!(over, "{}:{number}", path.display())?;
        }
    }
    if !over.is_empty() {
        bail!("these lines end behind column {MAX_COLUMN}:\n{over}");
    }
    Ok(())
}

/// The numbers of lines that are too long, from 1.
fn long_lines(text: &str, syntax: Syntax) -> Vec<usize> {
    let mut is_code = false;
    // Metadata at the beginning of a document.
    let mut is_matter = syntax == Syntax::Markdown && text.starts_with("---\n");
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if is_matter {
            is_matter = at == 0 || line != "---";
            continue;
        }
        let Some(text) = prose_of(line, syntax) else { continue };
        if text.starts_with("```") || text.starts_with("~~~") {
            is_code = !is_code;
        } else if !is_code && line.chars().count() > MAX_COLUMN && can_break(text) {
            found.push(at + 1);
        }
    }
    found
}

/// The text of a line of a comment, or of a document.
fn prose_of(line: &str, syntax: Syntax) -> Option<&str> {
    let line = line.trim_start();
    let text = match syntax {
        Syntax::Markdown => return Some(line),
        Syntax::Slashes => match line.strip_prefix("//") {
            Some(text) => text.trim_start_matches(['/', '!']),
            None => {
                line.strip_prefix("/*").or_else(|| line.strip_prefix("* "))?.trim_start_matches('*')
            }
        },
        Syntax::Hashes => line.strip_prefix('#').filter(|text| !text.starts_with('!'))?,
    };
    Some(text.trim_start())
}

fn can_break(text: &str) -> bool {
    let is_definition = text.starts_with('[') && text.contains("]: ");
    let is_whole = text.starts_with(['|', '#']) || is_definition;
    // Code and the text of a link stay on one line.
    let mut is_open = false;
    let words = text.trim_start_matches(['-', '*', '>', ' ']);
    !is_whole
        && words.chars().any(|char| {
            is_open = match char {
                '`' => !is_open,
                '[' => true,
                ']' => false,
                _ => is_open,
            };
            char == ' ' && !is_open
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_comment_is_found_and_tables_code_and_links_are_not() {
        let long = "word ".repeat(30);
        let code = "x".repeat(120);
        let lines = [
            format!("// {long}"),
            format!("let text = {long:?};"),
            format!("    //! {long}"),
            format!("/// | {long}"),
            "/// ```".to_owned(),
            format!("/// {long}"),
            "/// ```".to_owned(),
            format!("/// {code}"),
            format!("/// [{long}]: {code}"),
            "// short".to_owned(),
        ];
        assert_eq!(long_lines(&lines.join("\n"), Syntax::Slashes), [1, 3]);
        let lines = [long.clone(), format!("# {long}"), format!("- `{long}`")];
        assert_eq!(long_lines(&lines.join("\n"), Syntax::Markdown), [1]);
    }

    #[test]
    fn comments_of_every_language_are_seen() {
        let long = "word ".repeat(30);
        let lines = [
            format!("/* {long}"),
            format!(" * {long}"),
            format!(" * | {long}"),
            format!("    /** {long} */"),
            format!("    product = *{long};"),
            format!("#include {long}"),
        ];
        assert_eq!(long_lines(&lines.join("\n"), Syntax::Slashes), [1, 2, 4]);
        let lines = [format!("#!/bin/sh {long}"), format!("  # {long}"), format!("x = '{long}'")];
        assert_eq!(long_lines(&lines.join("\n"), Syntax::Hashes), [2]);
        assert_eq!(Syntax::of("json"), None);
    }
}
