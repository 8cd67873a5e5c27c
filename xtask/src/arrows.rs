//! The arrow gate: the files of a crate import each other in no larger circle than before.
//!
//! `xtask/arrows.txt` has the largest circle of each crate that has one; it may only shrink. A
//! `mod` declaration and a re-export in `lib.rs` are no arrows; a name that `lib.rs` re-exports
//! stands for the file that defines it. May break it: paths that a macro makes, and names that
//! other files than `lib.rs` re-export. They are not followed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::host::repository;

/// Imports by file: a file is the path of its module.
type Arrows = BTreeMap<Vec<String>, BTreeSet<Vec<String>>>;

/// Refuses crates whose largest circle has grown.
pub(crate) fn check() -> Result<()> {
    let limits = limits(&std::fs::read_to_string(repository().join("xtask/arrows.txt"))?)?;
    let mut over = String::new();
    let mut crates = std::fs::read_dir(repository().join("crates"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    crates.sort();
    for folder in crates.iter().filter(|folder| folder.join("src/lib.rs").exists()) {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let circle = largest_circle(&arrows(&sources(&folder.join("src"))?));
        let limit = limits.get(&name).copied().unwrap_or(1);
        let names = || circle.iter().map(|file| file.join("::")).collect::<Vec<_>>().join(", ");
        match circle.len().max(1).cmp(&limit) {
            std::cmp::Ordering::Greater => {
                writeln!(over, "{name}: {limit} files before, now {}", names())?
            }
            std::cmp::Ordering::Less => writeln!(
                over,
                "{name}: its largest circle has {} files now; write that into xtask/arrows.txt",
                circle.len()
            )?,
            std::cmp::Ordering::Equal => {}
        }
    }
    if !over.is_empty() {
        bail!("files import each other in larger circles, or in smaller ones than listed:\n{over}");
    }
    Ok(())
}

/// Crates, and the files of their largest circle.
fn limits(text: &str) -> Result<BTreeMap<String, usize>> {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, count) =
                line.split_once(' ').with_context(|| format!("no count: {line}"))?;
            Ok((name.to_owned(), count.trim().parse()?))
        })
        .collect()
}

/// The texts of a crate by module.
fn sources(folder: &Path) -> Result<BTreeMap<Vec<String>, String>> {
    let mut texts = BTreeMap::new();
    let mut folders = vec![(folder.to_owned(), Vec::new())];
    while let Some((folder, module)) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let is_test = name == "tests" || name == "testing";
            let mut own: Vec<String> = module.clone();
            if path.is_dir() && !is_test {
                own.push(name);
                folders.push((path, own));
            } else if path.extension().is_some_and(|kind| kind == "rs") && !is_test {
                if !["lib", "main", "mod"].contains(&&*name) {
                    own.push(name);
                }
                texts.insert(own, std::fs::read_to_string(&path)?);
            }
        }
    }
    Ok(texts)
}

/// The imports between files.
fn arrows(texts: &BTreeMap<Vec<String>, String>) -> Arrows {
    let file_of = |path: &[String]| {
        let length = (1..=path.len()).rev().find(|length| texts.contains_key(&path[..*length]))?;
        Some(path[..length].to_vec())
    };
    let root = texts.get(&Vec::new()).map(|text| imports(text, &[])).unwrap_or_default();
    let reexported: BTreeMap<String, Vec<String>> =
        root.iter().filter_map(|path| Some((path.last()?.clone(), file_of(path)?))).collect();
    let mut arrows = Arrows::new();
    for (module, text) in texts.iter().filter(|(module, _)| !module.is_empty()) {
        let to = imports(text, module).into_iter().filter_map(|path| {
            let named = |path: &[String]| reexported.get(path.first()?).cloned();
            let file = file_of(&path).or_else(|| named(&path))?;
            (file != *module).then_some(file)
        });
        arrows.insert(module.clone(), to.collect());
    }
    arrows
}

/// The paths within the crate that a file names.
fn imports(text: &str, module: &[String]) -> Vec<Vec<String>> {
    let tests = text.match_indices("\nmod tests {").map(|(at, _)| at);
    let is_cfg = |at: &usize| {
        let line = text[..*at].lines().next_back().unwrap_or_default();
        line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test,")
    };
    let code: String = text[..tests.into_iter().find(is_cfg).unwrap_or(text.len())]
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join(" ");
    let mut paths = Vec::new();
    let mut rest = &*code;
    while let Some(at) = rest.find("use ") {
        let is_word = rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        rest = &rest[at + 4..];
        if let (false, Some((tree, _))) = (is_word, rest.split_once(';')) {
            expand(String::new(), tree, &mut paths);
        }
    }
    // Paths in code. The head of a tree of imports is not one.
    paths.extend(code.split("crate::").skip(1).filter_map(|path| {
        let end = path.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
        let path = &path[..end.unwrap_or(path.len())];
        (!path.ends_with("::")).then(|| format!("crate::{path}"))
    }));
    paths.iter().filter_map(|path| absolute(path, module)).collect()
}

/// The paths of a tree of imports.
fn expand(before: String, tree: &str, paths: &mut Vec<String>) {
    let Some((head, inner)) = tree.split_once('{') else {
        let name = tree.split(" as ").next().unwrap_or_default();
        return paths.push(format!("{before}{name}").split_whitespace().collect());
    };
    let inner = inner.rsplit_once('}').map_or(inner, |(inner, _)| inner);
    let (mut depth, mut start) = (0, 0);
    for (at, char) in inner.char_indices().chain([(inner.len(), ',')]) {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(format!("{before}{head}"), &inner[start..at], paths);
                start = (at + 1).min(inner.len());
            }
            _ => {}
        }
    }
}

/// A path from the root of the crate; `None` for one of another crate.
fn absolute(path: &str, module: &[String]) -> Option<Vec<String>> {
    let mut words: Vec<&str> = path.split("::").filter(|word| !word.is_empty()).collect();
    let mut base = module.to_vec();
    match *words.first()? {
        "crate" => base.clear(),
        "super" => drop(base.pop()),
        "self" => {}
        // In `lib.rs` a path may begin with a module.
        _ if module.is_empty() => {
            return Some(words.iter().map(|word| (*word).to_owned()).collect());
        }
        _ => return None,
    }
    words.remove(0);
    while words.first() == Some(&"super") {
        base.pop();
        words.remove(0);
    }
    base.extend(words.into_iter().map(str::to_owned));
    Some(base)
}

/// The files of the largest circle; none without one.
fn largest_circle(arrows: &Arrows) -> Vec<Vec<String>> {
    let reach = |from: &Vec<String>| {
        let mut seen = BTreeSet::new();
        let mut left = vec![from];
        while let Some(file) = left.pop() {
            for next in arrows.get(file).into_iter().flatten() {
                if seen.insert(next) {
                    left.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = arrows.keys().map(|file| (file, reach(file))).collect();
    let circle = |file: &Vec<String>| -> Vec<Vec<String>> {
        let mutual = |other: &&&Vec<String>| {
            reached.get(**other).is_some_and(|reached| reached.contains(file))
        };
        reached[file].iter().filter(mutual).map(|file| (**file).clone()).collect()
    };
    arrows.keys().map(circle).max_by_key(Vec::len).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(files: &[(&str, &str)]) -> BTreeMap<Vec<String>, String> {
        let module = |name: &str| -> Vec<String> {
            name.split("::").filter(|word| !word.is_empty()).map(str::to_owned).collect()
        };
        files.iter().map(|(name, text)| (module(name), (*text).to_owned())).collect()
    }

    #[test]
    fn files_that_import_each_other_are_found_also_by_names_of_the_root() {
        let files = [
            ("", "mod a;\npub use a::{A, inner::B};\n"),
            ("a", "mod inner;\nuse crate::c::{C, D as E};\n"),
            ("a::inner", "use super::super::d::X;\n// use crate::a::A;\n"),
            ("c", "use crate::{B, e};\nfn f() { crate::d::run() }\n"),
            (
                "d",
                "use std::fmt;\nuse crate::a::{inner};\n#[cfg(test)]\nmod tests {\nuse crate::a::A;\n}\n",
            ),
            ("e", "use crate::A;\n#[cfg(all(test, unix))]\nmod tests {\nuse crate::d::X;\n}\n"),
        ];
        let found = largest_circle(&arrows(&texts(&files)));
        assert_eq!(found.iter().map(|file| file.join("::")).collect::<Vec<_>>(), ["a", "c", "e"]);
        assert!(largest_circle(&arrows(&texts(&files[..4]))).is_empty());
    }

    #[test]
    fn limits_are_read_by_crate() {
        let limits = limits("# comment\nserve 3\n\nlinux 29\n").unwrap();
        assert_eq!(limits["serve"], 3);
        assert_eq!(limits["linux"], 29);
    }
}
