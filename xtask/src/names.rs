//! The name gate: refuses types, constants and functions that are named by a word without a
//! subject.
//!
//! `xtask/prose/names.txt` has the words. There is no baseline: the repository has no such name.
//! May break it: a definition that a macro makes. It is not seen.

use anyhow::{Result, bail};

use crate::prose;

/// The words of `names.txt`.
struct Words<'a> {
    types: Vec<&'a str>,
    constants: Vec<&'a str>,
    functions: Vec<&'a str>,
}

impl<'a> Words<'a> {
    fn parse(text: &'a str) -> Self {
        let of = |kind: &str| {
            let lines = text.lines().filter_map(|line| line.strip_prefix(kind));
            lines.flat_map(str::split_whitespace).collect()
        };
        Self { types: of("types "), constants: of("constants "), functions: of("functions ") }
    }

    /// The word that the definition in this line has as its name.
    fn defined_in<'line>(&self, line: &'line str) -> Option<&'line str> {
        // A string or a macro's pattern does not begin with a letter.
        let line = line.trim_start();
        line.starts_with(char::is_alphabetic).then_some(())?;
        // The path of a restricted visibility has words of its own.
        let line = match line.strip_prefix("pub(") {
            Some(restricted) => restricted.split_once(')')?.1,
            None => line,
        };
        let mut words = line
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty())
            .skip_while(|word| ["pub", "unsafe", "async"].contains(word));
        let stop_list = match words.next()? {
            "struct" | "enum" | "trait" | "type" | "union" => &self.types,
            "const" | "static" => &self.constants,
            "fn" => &self.functions,
            _ => return None,
        };
        words.next().filter(|name| stop_list.contains(name))
    }
}

/// Refuses names without a subject.
pub(crate) fn check() -> Result<()> {
    let text = std::fs::read_to_string(prose::folder().join("names.txt"))?;
    let words = Words::parse(&text);
    let mut found = Vec::new();
    for (path, source) in prose::files()? {
        for (number, line) in source.lines().enumerate().filter(|_| path.ends_with(".rs")) {
            if let Some(name) = words.defined_in(line) {
                found.push(format!("{path}:{}: `{name}`", number + 1));
            }
        }
    }
    if !found.is_empty() {
        bail!("these names have no subject; STYLE.md says what is a name:\n{}", found.join("\n"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_name_without_a_subject_is_found_and_others_are_not() {
        let words =
            Words::parse("# Words.\ntypes Told Known\ntypes On\nconstants MOST\nfunctions told");
        for (line, name) in [
            ("struct Told {", "Told"),
            ("    pub(in crate::a) enum Known<'a> {", "Known"),
            ("pub(crate) type On = u8;", "On"),
            ("    const MOST: usize = 1;", "MOST"),
            ("    pub(super) async fn told(&self) {", "told"),
        ] {
            assert_eq!(words.defined_in(line), Some(name), "{line}");
        }
        for line in
            ["struct Once;", "let Told = 1;", "// struct Told", "const fn MOST() {}", "Known,"]
        {
            assert_eq!(words.defined_in(line), None, "{line}");
        }
    }
}
