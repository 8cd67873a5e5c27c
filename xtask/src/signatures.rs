//! The signature gate: types in public signatures of `crates/afresh` have names that its users can
//! write, without a dependency on the crates below.
//!
//! A type of one kind of guest is in the module of its crate (`afresh::linux::FileView`), and any
//! other at the root. The check reads sources and knows no types. May break it: signatures that a
//! macro makes, types in implementations of traits, types behind a private alias, and type
//! parameters of more than one letter, which it takes for types.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::host::repository;

/// The sources of the crate.
const SOURCES: &str = "crates/afresh/src";
/// Files whose `pub use` make the names at the root.
const ROOTS: [&str; 2] = ["lib.rs", "guests.rs"];
/// Crates whose types are reached through a module, as each belongs to one kind of guest or memory.
const MODULES: [&str; 6] =
    ["afresh_arena", "afresh_frames", "afresh_linux", "afresh_memory", "afresh_vm", "afresh_wasm"];
/// Names of the prelude.
const PRELUDE: &str = "AsRef Box Clone Copy Debug Default Err Fn FnMut FnOnce From Future Into \
     IntoIterator Iterator None Ok Option Result Self Send Some String Sync ToOwned Vec";

/// Refuses a signature with a type that has no name for users.
pub(crate) fn check() -> Result<()> {
    let folder = repository().join(SOURCES);
    let mut exports = Exports::default();
    for root in ROOTS {
        exports.add(&tokens(&read(&folder.join(root))?));
    }
    let mut found = Vec::new();
    visit(&folder, &mut |path| {
        let source = tokens(&read(path)?);
        for (line, name) in hidden_types(&source, &exports) {
            let path = path.strip_prefix(repository()).unwrap_or(path);
            found.push(format!("{}:{line}: `{name}`", path.display()));
        }
        Ok(())
    })?;
    if !found.is_empty() {
        bail!(
            "these types of public signatures have no name in the crate `afresh`; add them to a `pub use` of its \
             `lib.rs`:\n{}",
            found.join("\n")
        );
    }
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

fn visit(folder: &Path, look: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            visit(&path, look)?;
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            look(&path)?;
        }
    }
    Ok(())
}

/// A word or a sign of a source, with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    text: String,
    line: usize,
}

impl Token {
    fn is(&self, text: &str) -> bool {
        self.text == text
    }

    fn is_type(&self) -> bool {
        self.text.starts_with(char::is_uppercase)
    }
}

/// Words and signs without comments, attributes and strings.
fn tokens(source: &str) -> Vec<Token> {
    let mut all = Vec::new();
    for (at, line) in source.lines().enumerate() {
        let (mut rest, line) = (line, at + 1);
        while let Some(first) = rest.chars().next() {
            if rest.starts_with("//") {
                break;
            }
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let len = if is_word(first) {
                rest.find(|c| !is_word(c)).unwrap_or(rest.len())
            } else if first == '"' {
                // A string with an escaped quote ends early; its rest has no `pub`.
                rest[1..].find('"').map_or(rest.len(), |end| end + 2)
            } else if rest.starts_with("::") || rest.starts_with("->") {
                2
            } else {
                first.len_utf8()
            };
            let (text, after) = rest.split_at(len);
            if !first.is_whitespace() && first != '"' {
                all.push(Token { text: text.to_owned(), line });
            }
            rest = after;
        }
    }
    all
}

/// The names that a `use` brings: each with its path.
fn used(tokens: &[Token], prefix: &[String], names: &mut BTreeMap<String, Vec<String>>) {
    let mut path = prefix.to_vec();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        match token.text.as_str() {
            "{" => {
                let end = closing(tokens, at);
                for part in split(&tokens[at + 1..end]) {
                    used(part, &path, names);
                }
                return;
            }
            "as" => {
                if let Some(name) = tokens.get(at + 1) {
                    names.insert(name.text.clone(), path);
                }
                return;
            }
            "::" => {}
            text => path.push(text.to_owned()),
        }
        at += 1;
    }
    if let Some(name) = path.last().cloned() {
        names.insert(name, path);
    }
}

/// The position of the bracket that closes the one at `open`.
fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// The parts of a list.
fn split(tokens: &[Token]) -> Vec<&[Token]> {
    let (mut parts, mut start, mut at) = (Vec::new(), 0, 0);
    while at < tokens.len() {
        if ["{", "(", "["].contains(&tokens[at].text.as_str()) {
            at = closing(tokens, at);
        } else if tokens[at].is(",") {
            parts.push(&tokens[start..at]);
            start = at + 1;
        }
        at += 1;
    }
    parts.push(&tokens[start.min(tokens.len())..]);
    parts.retain(|part| !part.is_empty());
    parts
}

/// The position of the first of `ends` outside of brackets and angle brackets.
fn end_of(tokens: &[Token], start: usize, ends: &[&str]) -> usize {
    let (mut at, mut angles) = (start, 0_usize);
    while let Some(token) = tokens.get(at) {
        if angles == 0 && ends.contains(&token.text.as_str()) {
            break;
        }
        match token.text.as_str() {
            "<" => angles += 1,
            ">" => angles = angles.saturating_sub(1),
            "(" | "[" => at = closing(tokens, at),
            _ => {}
        }
        at += 1;
    }
    at.min(tokens.len())
}

/// Names at the root of the crate, and crates that are modules of it.
#[derive(Default)]
struct Exports {
    /// With the path that each name stands for.
    names: BTreeMap<String, Vec<String>>,
    crates: BTreeSet<String>,
}

impl Exports {
    fn add(&mut self, source: &[Token]) {
        let mut names = BTreeMap::new();
        for (at, pair) in source.windows(2).enumerate() {
            if pair[0].is("pub") && pair[1].is("use") {
                used(&source[at + 2..end_of(source, at + 2, &[";"])], &[], &mut names);
            }
        }
        for (name, path) in names {
            if let [only] = path.as_slice() {
                self.crates.insert(only.clone());
            }
            self.names.insert(name, path);
        }
    }

    fn has(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// Whether a type of another crate has a name here.
    fn has_foreign(&self, owner: &str, name: &str) -> bool {
        let is_it = |path: &Vec<String>| {
            path[0] == owner && path[1..].last().is_some_and(|last| last == name)
        };
        self.names.values().any(is_it)
    }
}

/// Types of public signatures that the crate does not export, with their lines.
fn hidden_types(source: &[Token], exports: &Exports) -> Vec<(usize, String)> {
    let mut imports = BTreeMap::new();
    for (at, token) in source.iter().enumerate() {
        if token.is("use") {
            used(&source[at + 1..end_of(source, at + 1, &[";"])], &[], &mut imports);
        }
    }
    let scan = Scan { exports, imports: &imports };
    let mut found = Vec::new();
    scan.items(source, &mut found);
    found.dedup();
    found
}

struct Scan<'a> {
    exports: &'a Exports,
    imports: &'a BTreeMap<String, Vec<String>>,
}

impl Scan<'_> {
    /// The items of a file, or the members of an exported type.
    fn items(&self, source: &[Token], found: &mut Vec<(usize, String)>) {
        let mut at = 0;
        while at < source.len() {
            if source[at].is("impl") {
                let open = end_of(source, at, &["{"]);
                let end = closing(source, open);
                if self.is_exported(&source[at + 1..open]) {
                    self.items(&source[open + 1..end], found);
                }
                at = end + 1;
                continue;
            }
            if !source[at].is("pub") || source.get(at + 1).is_none_or(|token| token.is("(")) {
                at += 1;
                continue;
            }
            at = self.item(source, at + 1, found);
        }
    }

    /// Whether the type of an `impl` is exported; an implementation of a trait is left out.
    fn is_exported(&self, head: &[Token]) -> bool {
        let head = match head.first() {
            Some(token) if token.is("<") => &head[end_of_generics(head)..],
            _ => head,
        };
        let named = head.iter().find(|token| token.is_type());
        !head.iter().any(|token| token.is("for"))
            && named.is_some_and(|name| self.exports.has(&name.text))
    }

    /// One public item, at its word behind `pub`. Returns the end.
    fn item(&self, source: &[Token], start: usize, found: &mut Vec<(usize, String)>) -> usize {
        let mut at = start;
        while ["async", "unsafe", "extern"].iter().any(|word| source[at].is(word)) {
            at += 1;
        }
        let exported = |at: usize| source.get(at).is_some_and(|name| self.exports.has(&name.text));
        match source[at].text.as_str() {
            "use" | "mod" => end_of(source, at, &[";", "{"]),
            "fn" => {
                let end = end_of(source, at, &["{", ";"]);
                self.types(&source[at..end], found);
                end
            }
            "const" | "static" => {
                let end = end_of(source, at, &["=", ";", "{"]);
                self.types(&source[at..end], found);
                end
            }
            "type" => {
                let end = end_of(source, at, &[";"]);
                if exported(at + 1) {
                    self.types(&source[at + 2..end], found);
                }
                end
            }
            "struct" | "enum" | "union" => {
                let open = (at..source.len())
                    .find(|at| ["{", "(", ";"].iter().any(|sign| source[*at].is(sign)))
                    .unwrap_or(source.len());
                let end = closing(source, open);
                if exported(at + 1) && open < end {
                    let body = &source[open + 1..end];
                    match source[at].is("enum") {
                        true => self.variants(body, found),
                        false => self.fields(body, true, found),
                    }
                }
                end
            }
            _ => at + 1,
        }
    }

    fn variants(&self, body: &[Token], found: &mut Vec<(usize, String)>) {
        for variant in split(body) {
            let open = variant.iter().position(|token| token.is("{") || token.is("("));
            // Attributes come before the name.
            let open = open.filter(|at| *at > 0 && variant[at - 1].is_type());
            let Some(open) = open.or_else(|| last_bracket(variant)) else { continue };
            self.fields(&variant[open + 1..closing(variant, open)], false, found);
        }
    }

    /// Fields: those that are public, or all.
    fn fields(&self, body: &[Token], public: bool, found: &mut Vec<(usize, String)>) {
        for field in split(body) {
            let visible = field.iter().position(|token| token.is("pub"));
            let restricted = visible.is_some_and(|at| field.get(at + 1).is_some_and(|t| t.is("(")));
            if !public || visible.is_some() && !restricted {
                self.types(field, found);
            }
        }
    }

    /// The types among tokens.
    fn types(&self, tokens: &[Token], found: &mut Vec<(usize, String)>) {
        let mut at = 0;
        while at < tokens.len() {
            let mut path = vec![tokens[at].text.clone()];
            let line = tokens[at].line;
            while tokens.get(at + 1).is_some_and(|token| token.is("::"))
                && let Some(next) = tokens.get(at + 2)
            {
                path.push(next.text.clone());
                at += 2;
            }
            at += 1;
            let name = path.last().cloned().unwrap_or_default();
            let is_type = name.starts_with(char::is_uppercase) && name.len() > 1;
            // `Item` of `Iterator<Item = T>`.
            let is_associated = tokens.get(at).is_some_and(|token| token.is("="));
            let is_constant = name.chars().all(|c| c.is_uppercase() || c.is_numeric() || c == '_');
            if is_type && !is_associated && !is_constant && !self.has_name(&path) {
                found.push((line, path.join("::")));
            }
        }
    }

    /// Whether users of the crate can write the type.
    fn has_name(&self, path: &[String]) -> bool {
        let mut path = path.to_vec();
        if let Some(imported) = self.imports.get(&path[0]) {
            path.splice(..1, imported.iter().cloned());
        }
        let (first, last) = (path[0].as_str(), path[path.len() - 1].as_str());
        let is_alone = path.len() == 1;
        match first {
            "std" | "core" | "alloc" => true,
            _ if MODULES.contains(&first) => self.exports.crates.contains(first),
            _ if is_alone && PRELUDE.split_whitespace().any(|name| name == first) => true,
            _ if first.starts_with("afresh_") => self.exports.has_foreign(first, last),
            _ => self.exports.has(last),
        }
    }
}

/// The position behind the generics at the beginning.
fn end_of_generics(tokens: &[Token]) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate() {
        match token.text.as_str() {
            "<" => depth += 1,
            ">" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// The bracket before the fields of a variant, behind its attributes.
fn last_bracket(variant: &[Token]) -> Option<usize> {
    let pairs = variant.windows(2).enumerate();
    let mut named =
        pairs.filter(|(_, pair)| pair[0].is_type() && (pair[1].is("{") || pair[1].is("(")));
    named.next().map(|(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "pub use afresh_linux as linux;
        pub use afresh_files as files;
        pub use {afresh_files::{Stat, Tree as FileTree}, guests::{Guest, Failure}};";

    fn find_hidden(source: &str) -> Vec<String> {
        let mut exports = Exports::default();
        exports.add(&tokens(ROOT));
        hidden_types(&tokens(source), &exports).into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn a_planted_type_without_a_name_is_found() {
        for (source, name) in [
            ("impl Guest { pub fn tree(&self) -> Hidden { Hidden } }", "Hidden"),
            ("impl<'a> Guest { pub async fn with<T>(&self, it: &Hidden<'a>) -> T {} }", "Hidden"),
            ("use afresh_files::Node;\npub fn find() -> Option<Node> {}", "Node"),
            ("pub fn stat() -> afresh_store::Stat {}", "afresh_store::Stat"),
            ("pub fn find(it: impl Fn(afresh_files::Node) -> bool) {}", "afresh_files::Node"),
            ("pub struct Guest { pub id: u64, pub tree: Vec<Hidden> }", "Hidden"),
            ("pub struct Guest(pub Hidden);", "Hidden"),
            ("pub enum Failure { None, #[from(Other)] Files { source: Hidden } }", "Hidden"),
            ("pub enum Failure { Files(#[from] Hidden) }", "Hidden"),
            ("pub type Failure = Box<Hidden>;", "Hidden"),
            ("pub const LATEST: Hidden = Hidden::new();", "Hidden"),
        ] {
            assert_eq!(find_hidden(source), [name], "{source}");
        }
    }

    #[test]
    fn a_type_with_a_name_is_not_found() {
        for source in [
            "use std::path::Path;\nimpl Guest { pub fn open(path: &Path) -> Result<Self, Failure> {} }",
            "use afresh_files::Stat;\npub fn stat() -> Stat {}",
            "use afresh_linux::FileView as View;\nimpl Guest { pub fn view(&self) -> View {} }",
            "pub fn view() -> afresh_linux::FileView {}",
            "use afresh_files::Tree;\npub fn tree() -> Tree {}",
            "pub fn stats(all: impl IntoIterator<Item = Stat>) {}",
            "impl Hidden { pub fn tree(&self) -> Hidden {} }",
            "impl From<Hidden> for Guest { pub fn from(it: Hidden) -> Self {} }",
            "impl Guest { pub(crate) fn tree(&self) -> Hidden {} fn own(&self) -> Hidden {} }",
            "pub struct Guest { tree: Hidden, pub(crate) own: Hidden }",
            "/// Of [`Hidden`].\npub fn stat() -> u64 { Hidden::count() }",
            "pub struct Hidden { pub tree: Hidden }",
        ] {
            assert!(find_hidden(source).is_empty(), "{source}: {:?}", find_hidden(source));
        }
    }
}
