//! The prose gate: counts sentences that read as translated, and refuses more of them. It reads
//! comments of every language, documents, docstrings, messages (the string literals of Rust code
//! that is no test) and the names of tests.
//!
//! `xtask/prose/markers.txt` has the words that mark such a sentence. A file may have 3 of them in
//! 100 sentences. May break it: code that looks like a comment in a string. It is counted as a
//! comment. Raw strings and comments behind code are not read.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::arrows;
use crate::columns;
use crate::feature_lines;
use crate::names;
use crate::signatures;
use crate::sources::{files, folder};

/// Marked sentences in 100 that a file may have.
const MAX_PERCENT: usize = 3;
/// Marked sentences that any file may have: a marker is no proof.
const MIN_MARKED: usize = 1;
/// Words of the shortest sentence that counts.
const MIN_WORDS: usize = 4;

/// `cargo xtask prose`
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode> {
    if !arguments.is_empty() {
        bail!("usage: cargo xtask prose");
    }
    names::check()?;
    signatures::check()?;
    columns::check()?;
    arrows::check()?;
    feature_lines::check()?;
    check()?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses files with more marked sentences than their share.
pub(crate) fn check() -> Result<()> {
    let markers = markers()?;
    let mut over = String::new();
    let mut sum = (0, 0);
    for (path, text) in files()? {
        let found = marked(&path, &text, &markers);
        sum = (sum.0 + found.marked.len(), sum.1 + found.sentences);
        if found.marked.len() > limit(found.sentences) {
            writeln!(over, "{path}: {} marked sentences", found.marked.len())?;
            for (marker, sentence) in &found.marked {
                let short: String = sentence.chars().take(120).collect();
                writeln!(over, "    [{marker}] {short}")?;
            }
        }
    }
    println!("{} of {} sentences have a marker", sum.0, sum.1);
    if !over.is_empty() {
        bail!(
            "these files have more than {MAX_PERCENT} % of marked sentences; STYLE.md has better ones:\n{over}"
        );
    }
    Ok(())
}

/// The marked sentences that a file of `sentences` may have.
fn limit(sentences: usize) -> usize {
    MIN_MARKED.max(sentences * MAX_PERCENT / 100)
}

/// Phrases by words. The first may be `^`, and one may be `'s`.
fn markers() -> Result<Vec<Vec<String>>> {
    let text = std::fs::read_to_string(folder().join("markers.txt"))?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    Ok(lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect())
}

/// The marked sentences of a file.
struct MarkedSentences {
    sentences: usize,
    /// Markers and sentences.
    marked: Vec<(String, String)>,
}

fn marked(path: &str, text: &str, markers: &[Vec<String>]) -> MarkedSentences {
    let kind = Path::new(path).extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    let prose = match kind {
        "md" => document(text),
        "rs" => [comments(text, &SLASHES), messages(path, text), test_names(text, "fn ")].concat(),
        "py" | "pyi" => {
            [comments(text, &HASHES), docstrings(text), test_names(text, "def test_")].concat()
        }
        "toml" => comments(text, &HASHES),
        _ => comments(text, &BLOCKS),
    };
    let mut found = MarkedSentences { sentences: 0, marked: Vec::new() };
    for sentence in prose.iter().flat_map(|block| sentences(block)) {
        found.sentences += 1;
        if let Some(marker) = marker_of(&sentence, markers) {
            found.marked.push((marker, sentence));
        }
    }
    found
}

/// The beginnings of lines of comments in Rust.
const SLASHES: [&str; 3] = ["///", "//!", "//"];
/// Those in C and JavaScript, whose comments can be blocks of lines.
const BLOCKS: [&str; 5] = ["//", "/**", "/*", "*/", "* "];
/// Those in Python and TOML.
const HASHES: [&str; 1] = ["# "];

/// Blocks of comment lines, which begin with one of `marks`.
fn comments(text: &str, marks: &[&str]) -> Vec<String> {
    let mut blocks = vec![String::new()];
    let mut in_code = false;
    for line in text.lines().chain([""]) {
        let line = line.trim_start();
        let comment = marks.iter().find_map(|mark| line.strip_prefix(mark));
        match (comment, blocks.last_mut()) {
            (Some(comment), Some(block)) => {
                if comment.trim_start().starts_with("```") {
                    in_code = !in_code;
                } else if !in_code {
                    block.push_str(comment.trim_end_matches("*/"));
                    block.push('\n');
                }
            }
            _ => {
                in_code = false;
                blocks.push(String::new());
            }
        }
    }
    blocks
}

/// The string literals of Rust code before its tests, which are messages of errors, logs and help.
/// A placeholder such as `{path}` counts as code.
fn messages(path: &str, text: &str) -> Vec<String> {
    if path.contains("/tests/") {
        return Vec::new();
    }
    let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n").replace("'\"'", "");
    let mut all = Vec::new();
    let mut rest = code.as_str();
    while let Some(start) = rest.find('"') {
        let (before, literal) = (&rest[..start], &rest[start + 1..]);
        let hashes = before.len() - before.trim_end_matches('#').len();
        let is_raw = before[..start - hashes].ends_with('r');
        // A raw string is code or a pattern. The end of a line in another one is continued.
        let end = if is_raw {
            literal.find(&format!("\"{}", "#".repeat(hashes)))
        } else {
            let escaped = literal.replace("\\\\", "__").replace("\\\"", "__");
            escaped.find('"')
        };
        let Some(end) = end else { break };
        if !is_raw {
            all.push(without_holes(&literal[..end].replace("\\n", " ").replace('\\', " ")));
        }
        rest = &literal[end + 1..];
    }
    all
}

/// `{path}` as code between backticks, and `{{` as it is.
fn without_holes(message: &str) -> String {
    message.replace("{{", "").replace(['{', '}'], "`")
}

/// The docstrings of Python code, without their examples.
fn docstrings(text: &str) -> Vec<String> {
    let is_prose = |line: &&str| {
        let line = line.trim_start();
        !line.starts_with(">>>") && !line.starts_with("...")
    };
    let prose = |text: &str| text.lines().filter(is_prose).collect::<Vec<_>>().join("\n");
    text.split("\"\"\"").skip(1).step_by(2).map(prose).collect()
}

/// The names of tests as sentences.
fn test_names(text: &str, before: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_test = before != "fn ";
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("#[test]") {
            is_test = true;
        } else if let Some((_, rest)) = line.split_once(before).filter(|_| is_test) {
            names.push(rest.split('(').next().unwrap_or_default().replace('_', " "));
            is_test = before != "fn ";
        }
    }
    names
}

/// The text of a document without code, tables and headings.
fn document(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut block = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code && !line.starts_with(['|', '#']) {
            block.push_str(line);
            block.push('\n');
        }
    }
    vec![block]
}

/// The sentences of a block that have at least [`MIN_WORDS`] words.
fn sentences(block: &str) -> Vec<String> {
    let text = block.split_whitespace().collect::<Vec<_>>();
    let mut all = Vec::new();
    let mut sentence: Vec<&str> = Vec::new();
    for (at, word) in text.iter().enumerate() {
        sentence.push(word);
        let ends = word.trim_end_matches(['*', '`', ')', '"']).ends_with(['.', '!', '?', ':']);
        let next = text.get(at + 1).and_then(|next| next.chars().next());
        let begins = next.is_none_or(|c| c.is_uppercase() || "*`[(".contains(c));
        if ends && begins || next.is_none() {
            if sentence.len() >= MIN_WORDS {
                all.push(sentence.join(" "));
            }
            sentence.clear();
        }
    }
    all
}

/// The first marker of a sentence. Code between backticks counts for nothing.
fn marker_of(sentence: &str, markers: &[Vec<String>]) -> Option<String> {
    let plain: String = sentence.split('`').step_by(2).collect::<Vec<_>>().join(" _ ");
    let clean =
        |word: &str| word.trim_matches(|c: char| !c.is_alphanumeric() && c != '_').to_lowercase();
    let words: Vec<String> =
        plain.split_whitespace().map(clean).filter(|word| !word.is_empty()).collect();
    let question = sentence.ends_with('?');
    let fits = |part: &String, word: &String| match part.as_str() {
        "'s" => word.ends_with("'s") || word.ends_with("’s"),
        part => part == word,
    };
    markers.iter().find_map(|marker| {
        let found = match marker.split_first() {
            Some((first, rest)) if first == "^" => {
                !question
                    && words.len() >= rest.len()
                    && rest.iter().zip(&words).all(|(part, word)| fits(part, word))
            }
            _ => words
                .windows(marker.len())
                .any(|window| marker.iter().zip(window).all(|(part, word)| fits(part, word))),
        };
        found.then(|| marker.join(" "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn markers_in(path: &str, text: &str) -> Vec<String> {
        let markers = markers().unwrap();
        marked(path, text, &markers).marked.into_iter().map(|(marker, _)| marker).collect()
    }

    #[test]
    fn planted_sentences_are_marked() {
        for (text, marker) in [
            ("/// What is printed goes to the log.", "^ what"),
            ("// The reader is told of the end.", "told"),
            ("    //! A process of the guest's that waits.", "of the 's"),
            ("// Nobody waits for this one here.", "nobody"),
            ("/// The page lies where\n/// it was written before.", "lies"),
        ] {
            assert_eq!(markers_in("a.rs", text), [marker], "{text}");
        }
        assert_eq!(
            markers_in("a.md", "Text first.\n\nWho stops is\nended by the kernel."),
            ["^ who"]
        );
    }

    #[test]
    fn planted_comments_of_other_languages_are_marked() {
        for (path, text, marker) in [
            ("a.toml", "[a]\n# Nobody waits for this one here.\nb = 1", "nobody"),
            ("a.c", "/* The page lies where it was. */\nint a;", "lies"),
            ("a.h", "/**\n * What is printed goes to the log.\n */", "^ what"),
            ("a.js", "// The reader is told of the end.", "told"),
            ("a.d.ts", "    /** The page lies\n     * where it was. */", "lies"),
        ] {
            assert_eq!(markers_in(path, text), [marker], "{text}");
        }
        assert!(markers_in("a.c", "# nobody is told of it\n*told = lies(of, what);").is_empty());
    }

    #[test]
    fn planted_messages_docstrings_and_names_are_marked() {
        let refused = "bail!(\"the client is told of \\\n  {path}\");";
        for (path, text, marker) in [
            ("src/a.rs", refused, "told"),
            ("src/a.rs", "#[error(\"it lies outside of its pages\")]", "lies"),
            ("src/a.rs", "#[test]\n#[ignore]\nfn what_is_saved_is_read() {", "^ what"),
            ("a.py", "def f():\n    \"\"\"Nobody waits for this one.\"\"\"", "nobody"),
            ("a.py", "def test_what_is_saved_is_read(tmp_path):", "^ what"),
        ] {
            assert_eq!(markers_in(path, text), [marker], "{text}");
        }
        for (path, text) in [
            ("src/a.rs", "bail!(\"{what} of {}: {told}\", nobody, of, the, rest);"),
            ("src/a.rs", "#[cfg(test)]\nmod tests {\n    f(\"the client is told of it\");\n}"),
            ("crates/a/tests/b.rs", "f(\"the client is told of it\");"),
            ("a.py", "\"\"\"\n>>> print('nobody is told of it')\n\"\"\""),
        ] {
            assert!(markers_in(path, text).is_empty(), "{text}");
        }
    }

    #[test]
    fn plain_sentences_code_and_questions_are_not() {
        for text in [
            "/// Output goes to the log.",
            "/// What is the price of a page?",
            "/// The flag `told` is set by the reader once.",
            "/// ```\n/// // Nobody reads this line of code.\n/// ```",
            "let lies = 1; let told = nobody();",
        ] {
            assert!(markers_in("a.rs", text).is_empty(), "{text}");
        }
        assert!(
            markers_in("a.md", "| nobody | was told of what lies here |\n# What lies here")
                .is_empty()
        );
    }

    #[test]
    fn a_file_has_a_small_share() {
        assert_eq!((limit(100), limit(5)), (3, 1));
    }
}
