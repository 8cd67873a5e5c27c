//! The name gate: refuses types, constants, functions and fields that are named by a word without
//! a subject.
//!
//! `xtask/prose/names.txt` has the words. May break it: a definition that a macro makes. It is not
//! seen.

use anyhow::{Result, bail};

use crate::sources;

/// The words of `names.txt`.
struct Words<'a> {
    types: Vec<&'a str>,
    constants: Vec<&'a str>,
    /// Words for constants of sources that are no tests.
    source_constants: Vec<&'a str>,
    functions: Vec<&'a str>,
    fields: Vec<&'a str>,
}

impl<'a> Words<'a> {
    fn parse(text: &'a str) -> Self {
        let of = |kind: &str| {
            let lines = text.lines().filter_map(|line| line.strip_prefix(kind));
            lines.flat_map(str::split_whitespace).collect()
        };
        Self {
            types: of("types "),
            constants: of("constants "),
            source_constants: of("source-constants "),
            functions: of("functions "),
            fields: of("fields "),
        }
    }

    /// The word that the definition in this line has as its name. In a struct it can be a field.
    fn defined_in<'line>(
        &self,
        line: &'line str,
        is_source: bool,
        in_struct: bool,
    ) -> Option<&'line str> {
        // A string or a macro's pattern does not begin with a letter.
        let line = line.trim_start();
        line.starts_with(char::is_alphabetic).then_some(())?;
        // The path of a restricted visibility has other words.
        let line = match line.strip_prefix("pub(") {
            Some(restricted) => restricted.split_once(')')?.1,
            None => line,
        };
        let mut words = line
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| !word.is_empty())
            .skip_while(|word| ["pub", "unsafe", "async"].contains(word));
        let first = words.next()?;
        let name = words.next()?;
        let is_refused = match first {
            "struct" | "enum" | "trait" | "type" | "union" => self.types.contains(&name),
            "const" | "static" => {
                self.constants.contains(&name) || is_source && self.source_constants.contains(&name)
            }
            "fn" => self.functions.contains(&name),
            field => {
                let is_field = in_struct && line.contains(&format!("{field}: "));
                return Some(field).filter(|field| is_field && self.fields.contains(field));
            }
        };
        is_refused.then_some(name)
    }

    /// The lines of a file that define refused names.
    fn find<'text>(&self, path: &str, text: &'text str) -> Vec<(usize, &'text str)> {
        // Fuzz targets and tests may shorten.
        let is_source = path.contains("/src/");
        let mut in_struct = false;
        let mut found = Vec::new();
        for (number, line) in text.lines().enumerate() {
            if let Some(name) = self.defined_in(line, is_source, in_struct) {
                found.push((number + 1, name));
            }
            let code = line.trim();
            let is_head = code.split_whitespace().any(|word| word == "struct");
            in_struct = is_head && code.ends_with('{') || in_struct && code != "}";
        }
        found
    }
}

/// Refuses names without a subject.
pub(crate) fn check() -> Result<()> {
    let text = std::fs::read_to_string(sources::folder().join("names.txt"))?;
    let words = Words::parse(&text);
    let mut found = Vec::new();
    for (path, source) in sources::files()?.iter().filter(|(path, _)| path.ends_with(".rs")) {
        for (number, name) in words.find(path, source) {
            found.push(format!("{path}:{number}: `{name}`"));
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

    const LIST: &str = "# Words.\ntypes Told Known\ntypes On\nconstants MOST\nfunctions told\n\
        fields said\nsource-constants WHAT";

    #[test]
    fn a_planted_name_without_a_subject_is_found_and_others_are_not() {
        let words = Words::parse(LIST);
        for (line, name) in [
            ("struct Told {", "Told"),
            ("    pub(in crate::a) enum Known<'a> {", "Known"),
            ("pub(crate) type On = u8;", "On"),
            ("    const MOST: usize = 1;", "MOST"),
            ("    const WHAT: usize = 1;", "WHAT"),
            ("    pub(super) async fn told(&self) {", "told"),
        ] {
            assert_eq!(words.find("a/src/a.rs", line), [(1, name)], "{line}");
        }
        for line in [
            "struct Once;",
            "let Told = 1;",
            "// struct Told",
            "const fn MOST() {}",
            "Known,",
            "said: u8,",
        ] {
            assert_eq!(words.find("a/src/a.rs", line), [], "{line}");
        }
        assert_eq!(words.find("a/tests/a.rs", "const WHAT: u8 = 1;"), []);
    }

    #[test]
    fn a_field_of_a_struct_is_found_and_a_parameter_is_not() {
        let words = Words::parse(LIST);
        let text = "struct A {\n    pub(crate) said: Vec<u8>,\n    said: u8,\n}\n\
            fn f(\n    said: u8,\n) {\n    let said: u8 = 1;\n}\n";
        assert_eq!(words.find("a/src/a.rs", text), [(2, "said"), (3, "said")]);
    }
}
