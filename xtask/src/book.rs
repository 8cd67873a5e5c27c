//! `cargo xtask book`: checks the documentation without mdbook, then builds it with mdbook.
//!
//! Promises: `docs/SUMMARY.md` names every page under `docs` once. Every relative link of a
//! Markdown file leads to a file of the tree, and its anchor to a heading there, by GitHub's rule
//! and for pages of the book also by mdBook's. Links of pages stay in `docs`. May break
//! it: links in HTML other than `href` and `src`, and headings with HTML or underlines.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::{find, run};
use crate::host::repository;
use crate::{layers, promises, sources};

const BOOK: &str = "docs";
const SUMMARY: &str = "docs/SUMMARY.md";

/// `cargo xtask book`
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    if let Some(argument) = arguments.first() {
        bail!("unknown argument {argument:?}; usage: cargo xtask book");
    }
    check()?;
    if find("mdbook").is_none() {
        bail!("the book is not built: mdbook is missing; `cargo install mdbook --locked` adds it");
    }
    run(Command::new("mdbook").arg("build").current_dir(repository()))
}

/// Checks the pages and the links of all documents, the tests behind the threat model, and the
/// layers.
pub(crate) fn check() -> Result<()> {
    let tree = Tree::read()?;
    let mut faults = tree.faults();
    faults.extend(promises::faults()?);
    faults.extend(layers::faults()?);
    println!("{} documents have {} links", tree.documents.len(), tree.links());
    if !faults.is_empty() {
        let mut text = String::new();
        for fault in &faults {
            writeln!(text, "    {fault}")?;
        }
        bail!("{} faults in the documentation:\n{text}", faults.len());
    }
    Ok(())
}

/// The files that links can name.
struct Tree {
    /// Texts of Markdown files, by path.
    documents: BTreeMap<PathBuf, String>,
    /// Every file and folder.
    paths: BTreeSet<PathBuf>,
}

impl Tree {
    fn read() -> Result<Self> {
        let files = sources::paths()?;
        let mut documents = BTreeMap::new();
        for path in files.iter().filter(|path| is_document(path)) {
            let text = std::fs::read_to_string(repository().join(path))
                .with_context(|| path.display().to_string())?;
            documents.insert(path.clone(), text);
        }
        Ok(Self::new(documents, &files))
    }

    fn new(documents: BTreeMap<PathBuf, String>, files: &[PathBuf]) -> Self {
        let paths = files.iter().flat_map(|path| path.ancestors()).map(Path::to_owned).collect();
        Self { documents, paths }
    }

    fn links(&self) -> usize {
        self.documents.values().map(|text| links(text).len()).sum()
    }

    /// One line for each fault.
    fn faults(&self) -> Vec<String> {
        let mut faults = self.summary_faults();
        for (path, text) in &self.documents {
            for link in links(text) {
                if let Err(reason) = self.follow(path, &link.target) {
                    faults.push(format!(
                        "{}:{}: ({}): {reason}",
                        path.display(),
                        link.line,
                        link.target
                    ));
                }
            }
        }
        faults
    }

    /// Compares the summary with the pages.
    fn summary_faults(&self) -> Vec<String> {
        let Some(summary) = self.documents.get(Path::new(SUMMARY)) else {
            return vec![format!("{SUMMARY} is missing")];
        };
        let mut faults = Vec::new();
        let mut named = BTreeSet::new();
        for link in links(summary) {
            let Some(page) = resolve(Path::new(BOOK), &link.target) else { continue };
            if !named.insert(page.clone()) {
                faults.push(format!("{SUMMARY}:{}: names {} twice", link.line, page.display()));
            }
        }
        let pages = self.documents.keys().filter(|path| path.starts_with(BOOK));
        for page in pages.filter(|path| *path != Path::new(SUMMARY) && !named.contains(*path)) {
            faults.push(format!("{SUMMARY} does not name {}", page.display()));
        }
        faults
    }

    /// Follows a link of the document `from`, or returns the reason that it is broken.
    fn follow(&self, from: &Path, target: &str) -> Result<(), String> {
        if is_external(target) {
            return Ok(());
        }
        let (path, anchor) = match target.split_once('#') {
            Some((path, anchor)) => (path, Some(anchor)),
            None => (target, None),
        };
        let folder = from.parent().unwrap_or(Path::new(""));
        let to = match path {
            "" => from.to_owned(),
            _ => resolve(folder, path).ok_or("leaves the repository")?,
        };
        if !self.paths.contains(&to) {
            return Err(format!("{} does not exist", to.display()));
        }
        let is_page = from.starts_with(BOOK);
        if is_page && !to.starts_with(BOOK) {
            return Err(format!("{} is outside of the book; name it as code", to.display()));
        }
        if is_page && to.extension().is_none() {
            return Err(format!("{} is a folder, which the book does not show", to.display()));
        }
        let (Some(anchor), Some(text)) = (anchor, self.documents.get(&to)) else { return Ok(()) };
        let rules: &[SlugRule] =
            if is_page { &[SlugRule::GitHub, SlugRule::MdBook] } else { &[SlugRule::GitHub] };
        for rule in rules {
            if !anchors(text, *rule).contains(anchor) {
                return Err(format!("{} has no heading #{anchor} ({rule:?})", to.display()));
            }
        }
        Ok(())
    }
}

fn is_document(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind == "md")
}

/// Whether the target is an address with a scheme, such as `https:`.
fn is_external(target: &str) -> bool {
    let scheme = target.split(['/', '#', '?']).next().unwrap_or_default();
    target.starts_with("//") || scheme.contains(':')
}

/// The path of a link in a folder, without `..`. None if it leaves the repository.
fn resolve(folder: &Path, path: &str) -> Option<PathBuf> {
    let mut resolved = folder.to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => resolved.push(name),
            Component::CurDir => {}
            Component::ParentDir if resolved.pop() => {}
            _ => return None,
        }
    }
    Some(resolved)
}

/// A link of a document.
#[derive(Debug, PartialEq, Eq)]
struct Link {
    line: usize,
    target: String,
}

/// The links of a document: inline links and images, definitions of references, `href` and `src`.
fn links(text: &str) -> Vec<Link> {
    let text = without_code(text);
    let mut found: Vec<(usize, &str)> = Vec::new();
    for (at, _) in text.match_indices("](") {
        let rest = &text[at + 2..];
        let target = match rest.strip_prefix('<') {
            Some(quoted) => quoted.split('>').next(),
            None => inline_target(rest),
        };
        found.extend(target.map(|target| (at, target)));
    }
    for (at, _) in text.match_indices("]: ") {
        let start = text[..at].rfind('\n').map_or(0, |end| end + 1);
        let label = text[start..at].trim_start();
        // A footnote is text, and a reference begins its line.
        if label.starts_with('[') && !label.starts_with("[^") && !label.contains(']') {
            found.extend(text[at + 3..].split_whitespace().next().map(|target| (at, target)));
        }
    }
    for name in ["href=\"", "src=\""] {
        for (at, _) in text.match_indices(name) {
            found.extend(text[at + name.len()..].split('"').next().map(|target| (at, target)));
        }
    }
    found.sort_unstable();
    let line = |at: usize| text[..at].matches('\n').count() + 1;
    found.into_iter().map(|(at, to)| Link { line: line(at), target: to.to_owned() }).collect()
}

/// The target at the start of `rest`, up to its closing parenthesis or a title.
fn inline_target(rest: &str) -> Option<&str> {
    let mut depth = 0;
    let end = rest.find(|c: char| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth < 0 || c.is_whitespace()
    })?;
    Some(&rest[..end])
}

/// The text with code replaced by spaces: fenced blocks, and spans between equal runs of backticks.
fn without_code(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut fence: Option<&str> = None;
    for line in text.split_inclusive('\n') {
        let start = line.trim_start();
        let is_mark = |mark: &str| start.starts_with(mark);
        match fence {
            Some(mark) => {
                if is_mark(mark) {
                    fence = None;
                }
                plain.push('\n');
            }
            None => {
                fence = ["```", "~~~"].into_iter().find(|mark| is_mark(mark));
                plain.push_str(if fence.is_some() { "\n" } else { line });
            }
        }
    }
    let mut result = String::with_capacity(plain.len());
    let mut rest = plain.as_str();
    while let Some(at) = rest.find('`') {
        let run = rest[at..].len() - rest[at..].trim_start_matches('`').len();
        let inside = &rest[at + run..];
        // A span ends in its own paragraph.
        let paragraph = &inside[..inside.find("\n\n").unwrap_or(inside.len())];
        let ticks = &rest[at..at + run];
        let end = paragraph.match_indices(ticks).map(|(end, _)| end).find(|end| {
            !paragraph[..*end].ends_with('`') && !paragraph[end + run..].starts_with('`')
        });
        result.push_str(&rest[..at]);
        let span = end.map_or(0, |end| end + run);
        result.extend(inside[..span].chars().map(|c| if c == '\n' { c } else { ' ' }));
        rest = &inside[span..];
    }
    result.push_str(rest);
    result
}

/// A program's rule for the anchor of a heading.
#[derive(Clone, Copy, Debug)]
enum SlugRule {
    GitHub,
    MdBook,
}

impl SlugRule {
    /// The anchor of a heading: lower case, `-` for a space, without punctuation.
    fn slug(self, heading: &str) -> String {
        let mut slug = String::new();
        for c in heading.trim().chars() {
            match self {
                _ if c.is_whitespace() => slug.push('-'),
                _ if !(c.is_alphanumeric() || c == '-' || c == '_') => {}
                Self::GitHub => slug.extend(c.to_lowercase()),
                Self::MdBook => slug.push(c.to_ascii_lowercase()),
            }
        }
        slug
    }
}

/// The anchors of a document: headings, numbered where they repeat, and explicit `id` and `name`.
fn anchors(text: &str, rule: SlugRule) -> BTreeSet<String> {
    let mut counts: HashMap<String, usize> = HashMap::new();
    let mut found = BTreeSet::new();
    let plain = without_code(text);
    for (line, visible) in text.lines().zip(plain.lines()) {
        for name in ["id=\"", "name=\""] {
            let ids = visible.split(name).skip(1).filter_map(|rest| rest.split('"').next());
            found.extend(ids.map(str::to_owned));
        }
        let level = visible.len() - visible.trim_start_matches('#').len();
        if !(1..=6).contains(&level) || !visible[level..].starts_with(' ') {
            continue;
        }
        let slug = rule.slug(&without_targets(&line[level..]));
        let count = counts.entry(slug.clone()).or_default();
        found.insert(match *count {
            0 => slug,
            again => format!("{slug}-{again}"),
        });
        *count += 1;
    }
    found
}

/// A heading with the texts of its links alone.
fn without_targets(heading: &str) -> String {
    let mut parts = heading.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        text.push_str(part.split_once(')').map_or("", |(_, rest)| rest));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(documents: &[(&str, &str)]) -> Tree {
        let documents: BTreeMap<PathBuf, String> =
            documents.iter().map(|(path, text)| (path.into(), (*text).to_owned())).collect();
        let mut files: Vec<PathBuf> = documents.keys().cloned().collect();
        files.push("crates/a/src/lib.rs".into());
        Tree::new(documents, &files)
    }

    #[test]
    fn a_planted_broken_link_is_reported_with_its_line() {
        for (link, reason) in [
            ("b.md", "docs/b.md does not exist"),
            ("#Two", "docs/a.md has no heading #Two (GitHub)"),
            ("c/d.md#three", "docs/c/d.md has no heading #three (GitHub)"),
            ("../crates/a/src/lib.rs", "is outside of the book; name it as code"),
            ("../../other.md", "leaves the repository"),
            ("/a.md", "leaves the repository"),
            ("c", "docs/c is a folder, which the book does not show"),
        ] {
            let page = format!("# One\n\n## Two\n\nA [link\nto]({link}).\n");
            let faults = tree(&[
                (SUMMARY, "[One](a.md)\n- [Two](c/d.md)\n"),
                ("docs/a.md", &page),
                ("docs/c/d.md", "# One\n"),
            ])
            .faults();
            assert_eq!(faults.len(), 1, "{link}: {faults:?}");
            assert!(faults[0].starts_with("docs/a.md:6: ("), "{faults:?}");
            assert!(faults[0].ends_with(reason), "{faults:?}");
        }
    }

    #[test]
    fn good_links_are_accepted() {
        let faults = tree(&[
            (SUMMARY, "[One](a.md)\n"),
            (
                "docs/a.md",
                "# One\n## Two, *three*\n[x](#two-three) [y](https://a.example/b#c) [z](a.md#one)",
            ),
            ("crates/a/README.md", "[a](src/lib.rs) [b](../../docs/a.md#one) [c](src/) ![d][e]"),
        ])
        .faults();
        assert!(faults.is_empty(), "{faults:?}");
    }

    #[test]
    fn the_summary_names_each_page_once_and_no_other() {
        let faults = tree(&[
            (SUMMARY, "[One](a.md)\n[Again](a.md)\n[Gone](gone.md)\n"),
            ("docs/a.md", "# One"),
            ("docs/b/c.md", "# Two"),
        ])
        .faults();
        assert_eq!(
            faults,
            [
                "docs/SUMMARY.md:2: names docs/a.md twice",
                "docs/SUMMARY.md does not name docs/b/c.md",
                "docs/SUMMARY.md:3: (gone.md): docs/gone.md does not exist",
            ]
        );
    }

    #[test]
    fn links_are_found_outside_of_code_alone() {
        let text = "[a](b(c).md \"title\") `[d](e)` ``[f](`g)`` [h](<i j.md>)\n\
            ```\n[k](l)\n```\n![m](n.png) a ` tick\n\n[o](p)\n[q]: r.md\n[^1]: note\n\
            <img src=\"s.svg\">";
        let found: Vec<_> = links(text).into_iter().map(|link| (link.line, link.target)).collect();
        let expected =
            [(1, "b(c).md"), (1, "i j.md"), (5, "n.png"), (7, "p"), (8, "r.md"), (10, "s.svg")];
        assert_eq!(found, expected.map(|(line, target)| (line, target.to_owned())));
    }

    #[test]
    fn anchors_follow_the_rules_of_both_programs() {
        let text = "# What `fork_all()` does\n## A & B\n## A & B\n```\n# not\n```\n\
            ## [Éa](b.md), c\n<a id=\"here\">";
        let github = ["a--b", "a--b-1", "here", "what-fork_all-does", "éa-c"];
        assert_eq!(anchors(text, SlugRule::GitHub), github.map(str::to_owned).into());
        let mdbook = ["a--b", "a--b-1", "here", "what-fork_all-does", "Éa-c"];
        assert_eq!(anchors(text, SlugRule::MdBook), mdbook.map(str::to_owned).into());
    }

    #[test]
    fn the_documentation_has_no_faults() {
        check().unwrap();
    }
}
