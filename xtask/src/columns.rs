//! The column gate: lines of comments and Markdown end by column 100.
//!
//! Tables, code, headings, metadata and definitions of links may be longer, as may a line whose
//! text has no space to break at. May break it: a string whose line begins like a comment. It is
//! counted as one.

use std::fmt::Write as _;

use anyhow::{Result, bail};

use crate::prose;

/// The last column of a line.
const MAX_COLUMN: usize = 100;

/// Refuses lines of comments and Markdown that end behind [`MAX_COLUMN`].
pub(crate) fn check() -> Result<()> {
    let mut over = String::new();
    for (path, text) in prose::files()? {
        let is_document = path.ends_with(".md");
        for number in long_lines(&text, is_document) {
            writeln!(over, "{path}:{number}")?;
        }
    }
    if !over.is_empty() {
        bail!("these lines end behind column {MAX_COLUMN}:\n{over}");
    }
    Ok(())
}

/// The numbers of lines that are too long, from 1.
fn long_lines(text: &str, is_document: bool) -> Vec<usize> {
    let mut is_code = false;
    // Metadata at the beginning of a document.
    let mut is_matter = is_document && text.starts_with("---\n");
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if is_matter {
            is_matter = at == 0 || line != "---";
            continue;
        }
        let Some(text) = prose_of(line, is_document) else { continue };
        if text.starts_with("```") || text.starts_with("~~~") {
            is_code = !is_code;
        } else if !is_code && line.chars().count() > MAX_COLUMN && can_break(text) {
            found.push(at + 1);
        }
    }
    found
}

/// The text of a line of a comment, or of a document.
fn prose_of(line: &str, is_document: bool) -> Option<&str> {
    let line = line.trim_start();
    if is_document {
        return Some(line);
    }
    let text = line.strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim_start())
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
        assert_eq!(long_lines(&lines.join("\n"), false), [1, 3]);
        let lines = [long.clone(), format!("# {long}"), format!("- `{long}`")];
        assert_eq!(long_lines(&lines.join("\n"), true), [1]);
    }
}
