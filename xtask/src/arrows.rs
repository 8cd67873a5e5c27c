//! The arrow gate: the files of a crate import each other in no larger circle than before.
//!
//! `xtask/arrows.txt` has the largest circle of each crate that has one; it may only shrink. A
//! `mod` declaration and a re-export of a child are no arrows. A name that any file re-exports
//! stands for the file that defines it. May break it: paths that a macro makes, and names behind
//! `pub use …::*`. They are not followed.

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
    crates.extend(["kubernetes", "xtask"].map(|folder| repository().join(folder)));
    crates.sort();
    for folder in crates.iter().filter(|folder| folder.join("src").is_dir()) {
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
    check_boundary()
}

/// The only link between the sandboxes and the fleet of `serve`.
const BOUNDARY: &str = "sandbox::records::store";

/// Refuses other imports between the sandboxes and the fleet than those of [`BOUNDARY`].
fn check_boundary() -> Result<()> {
    let texts = sources(&repository().join("crates/serve/src"))?;
    let mut over = String::new();
    for (module, text) in texts {
        let file = module.join("::");
        for import in imports(&text, &module, &BTreeMap::new()) {
            let path = import.path.join("::");
            if is_across_boundary(&file, &path) {
                writeln!(over, "{file} imports {path}")?;
            }
        }
    }
    if !over.is_empty() {
        bail!("{BOUNDARY} is the only link between sandboxes and fleet:\n{over}");
    }
    Ok(())
}

/// Whether an import leads from the fleet into the sandboxes beyond [`BOUNDARY`], or back.
fn is_across_boundary(file: &str, path: &str) -> bool {
    let is_in = |path: &str, folder: &str| path.split("::").next() == Some(folder);
    let enters = is_in(file, "fleet") && is_in(path, "sandbox") && !path.starts_with(BOUNDARY);
    enters || is_in(file, "sandbox") && is_in(path, "fleet")
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

/// The texts of a crate by module. Tests and the binaries in `bin` are omitted.
fn sources(folder: &Path) -> Result<BTreeMap<Vec<String>, String>> {
    let mut texts = BTreeMap::<_, String>::new();
    let mut folders = vec![(folder.to_owned(), Vec::new())];
    while let Some((folder, module)) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let is_test = name == "tests" || name == "testing" || name.ends_with("_tests");
            let is_binaries = name == "bin" && module.is_empty();
            let mut own: Vec<String> = module.clone();
            if path.is_dir() && !is_test && !is_binaries {
                own.push(name);
                folders.push((path, own));
            } else if path.extension().is_some_and(|kind| kind == "rs") && !is_test {
                if !["lib", "main", "mod"].contains(&&*name) {
                    own.push(name);
                }
                // A crate can have both `lib.rs` and `main.rs`.
                texts.entry(own).or_default().push_str(&std::fs::read_to_string(&path)?);
            }
        }
    }
    Ok(texts)
}

/// An import, or a path in code.
struct Import {
    /// The path from the root of the crate.
    path: Vec<String>,
    /// The name that other files can import it by.
    reexported: Option<String>,
}

/// The imports between files. The root of the crate is no file of a circle.
fn arrows(texts: &BTreeMap<Vec<String>, String>) -> Arrows {
    let imports: BTreeMap<_, _> =
        texts.iter().map(|(module, text)| (module, imports(text, module, texts))).collect();
    let mut exports = Exports::new();
    for (module, import) in imports.iter().flat_map(|(m, all)| all.iter().map(move |i| (m, i))) {
        if let Some(name) = &import.reexported {
            exports.entry((*module).clone()).or_default().insert(name.clone(), &import.path);
        }
    }
    let mut arrows = Arrows::new();
    for (module, imports) in imports.iter().filter(|(module, _)| !module.is_empty()) {
        let to = imports.iter().filter_map(|import| {
            let file = definition(import.path.clone(), texts, &exports);
            // A folder's file may re-export its children.
            let is_facade = import.reexported.is_some() && file.starts_with(module);
            (!file.is_empty() && file != **module && !is_facade).then_some(file)
        });
        arrows.insert((*module).clone(), to.collect());
    }
    arrows
}

/// The re-exports of each module: names, and the paths behind them.
type Exports<'a> = BTreeMap<Vec<String>, BTreeMap<String, &'a Vec<String>>>;

/// The file that defines the end of a path, behind any re-exports.
fn definition(
    mut path: Vec<String>,
    texts: &BTreeMap<Vec<String>, String>,
    exports: &Exports,
) -> Vec<String> {
    // Re-exports that name each other end here.
    for _ in 0..8 {
        let file = (0..=path.len()).rev().find(|length| texts.contains_key(&path[..*length]));
        let (file, rest) = path.split_at(file.unwrap_or(0));
        let Some((name, rest)) = rest.split_first() else { break };
        let Some(target) = exports.get(file).and_then(|names| names.get(name)) else {
            return file.to_vec();
        };
        path = [target.as_slice(), rest].concat();
    }
    path
}

/// The paths within the crate that a file names.
fn imports(text: &str, module: &[String], texts: &BTreeMap<Vec<String>, String>) -> Vec<Import> {
    let code = code(text);
    let mut imports = Vec::new();
    let mut add = |path: &str, reexported: Option<String>| {
        if let Some(path) = absolute(path, module, texts) {
            imports.push(Import { path, reexported });
        }
    };
    let mut rest = &*code;
    while let Some(at) = rest.find("use ") {
        let before = &rest[..at];
        let is_word = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let item = before.rsplit([';', '{', '}', ']']).next().unwrap_or_default();
        let is_public = item.trim_start().starts_with("pub");
        rest = &rest[at + 4..];
        if let (false, Some((tree, after))) = (is_word, rest.split_once(';')) {
            let mut leaves = Vec::new();
            expand(String::new(), tree, &mut leaves);
            for (path, name) in leaves {
                add(&path, is_public.then_some(name));
            }
            rest = after;
        }
    }
    // The head of a tree of imports is no path, and the path of a visibility is no import.
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let before = &code[..at];
            let is_part = before.ends_with(|c: char| c.is_alphanumeric() || "_:".contains(c));
            if is_part || before.ends_with("in ") || before.ends_with("use ") {
                continue;
            }
            let path = &code[at..];
            let end = path.find(|c: char| !(c.is_alphanumeric() || "_:".contains(c)));
            let path = &path[..end.unwrap_or(path.len())];
            if !path.ends_with("::") {
                add(path, None);
            }
        }
    }
    imports
}

/// A file before its tests, without comments, in one line.
fn code(text: &str) -> String {
    let mut lines = Vec::new();
    let mut is_test = false;
    for line in text.lines() {
        let starts_module = line.starts_with("mod ") && line.ends_with('{');
        if is_test && starts_module {
            break;
        }
        is_test = line.starts_with("#[cfg(test)]")
            || line.starts_with("#[cfg(all(test,")
            || is_test && line.starts_with("#[");
        lines.push(line.split("//").next().unwrap_or_default());
    }
    lines.join(" ")
}

/// The paths of a tree of imports, each with the name that it has in the file.
fn expand(before: String, tree: &str, leaves: &mut Vec<(String, String)>) {
    let Some((head, inner)) = tree.split_once('{') else {
        let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(p, a)| (p, Some(a)));
        let path: String = format!("{before}{path}").split_whitespace().collect();
        let name = alias.or(path.rsplit("::").next()).unwrap_or_default().trim().to_owned();
        return leaves.push((path, name));
    };
    let inner = inner.rsplit_once('}').map_or(inner, |(inner, _)| inner);
    let (mut depth, mut start) = (0, 0);
    for (at, char) in inner.char_indices().chain([(inner.len(), ',')]) {
        match char {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let leaf = &inner[start..at];
                if !leaf.trim().is_empty() {
                    expand(format!("{before}{head}"), leaf, leaves);
                }
                start = (at + 1).min(inner.len());
            }
            _ => {}
        }
    }
}

/// A path from the root of the crate; `None` for one of another crate.
fn absolute(
    path: &str,
    module: &[String],
    texts: &BTreeMap<Vec<String>, String>,
) -> Option<Vec<String>> {
    let mut words: Vec<&str> = path.split("::").filter(|word| !word.is_empty()).collect();
    let mut base = module.to_vec();
    let first = *words.first()?;
    match first {
        "crate" => base.clear(),
        "super" => drop(base.pop()),
        "self" => {}
        // A path may begin with a child of the module.
        child => {
            base.push(child.to_owned());
            texts.contains_key(&base).then_some(())?;
        }
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
    fn names_that_a_folder_reexports_lead_to_their_files() {
        // `room` re-exports names of its files and of another file.
        let files = [
            ("", "mod room;\nmod beside;\n"),
            (
                "room",
                "mod state;\npub(crate) use self::state::{State, Error as Failure};\npub use crate::beside::Beside;\n",
            ),
            ("room::state", "use crate::caller::Call;\n"),
            ("caller", "use crate::room::State;\nuse crate::room::Failure;\n"),
            ("beside", "use crate::caller;\n"),
        ];
        let found = largest_circle(&arrows(&texts(&files)));
        assert_eq!(
            found.iter().map(|file| file.join("::")).collect::<Vec<_>>(),
            ["caller", "room::state"]
        );
        // A file that imports the other name of the room is in the circle.
        let files: Vec<_> = files
            .iter()
            .map(|(name, text)| match *name {
                "room::state" => (*name, "use super::Beside;\n"),
                _ => (*name, *text),
            })
            .collect();
        let found = largest_circle(&arrows(&texts(&files)));
        assert_eq!(found.len(), 3, "{found:?}");
    }

    #[test]
    fn a_child_named_without_self_and_paths_in_code_are_arrows() {
        let files = [
            ("a", "mod inner;\nuse inner::Inner;\nfn f() {\n    self::inner::run()\n}\n"),
            ("a::inner", "pub(in crate::b) struct Inner;\nfn run() { super::run() }\n"),
            ("b", "use crate::a::inner::Inner;\n"),
        ];
        let found = largest_circle(&arrows(&texts(&files)));
        assert_eq!(found.iter().map(|file| file.join("::")).collect::<Vec<_>>(), ["a", "a::inner"]);
    }

    #[test]
    fn only_the_boundary_links_sandboxes_and_fleet() {
        for (file, path, is_refused) in [
            ("fleet::record", "sandbox::records::store::SandboxRecord", false),
            ("fleet::record", "sandbox::records::record::SandboxRecord", true),
            ("fleet::record", "fleet::nats::Nats", false),
            ("sandbox::life::sandbox", "fleet::Fleet", true),
            ("server", "fleet::FleetHost", false),
        ] {
            assert_eq!(is_across_boundary(file, path), is_refused, "{file} {path}");
        }
    }

    #[test]
    fn limits_are_read_by_crate() {
        let limits = limits("# comment\nserve 3\n\nlinux 29\n").unwrap();
        assert_eq!(limits["serve"], 3);
        assert_eq!(limits["linux"], 29);
    }
}
