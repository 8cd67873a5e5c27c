//! The tests behind the threat model: `docs/security.md` names a test for each promise.
//!
//! Promises: each point below "Every guest" names a test that exists, as `crate`: `test`, or begins
//! with "Not promised" or "Limit". A test is a function or a module with tests in the crate. May
//! break it: a point whose test exists and proves something else.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::host::repository;
use crate::sources::paths;

const PAGE: &str = "docs/security.md";
/// Heading of the first section with promises.
const FIRST_SECTION: &str = "## Every guest";
/// Beginnings of points that need no test.
const UNTESTED: [&str; 2] = ["Not promised", "Limit"];

/// One line for each promise without a test, and for each test that does not exist.
pub(crate) fn faults() -> Result<Vec<String>> {
    let page = std::fs::read_to_string(repository().join(PAGE)).context(PAGE)?;
    let (mut faults, paths) = (Vec::new(), paths()?);
    let mut crates: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    for point in points(&page) {
        let begin: String = point.chars().take(60).collect();
        let tests = tests(&point, |name| repository().join(folder(name)).is_dir());
        if tests.is_empty() && !UNTESTED.iter().any(|begin| point.starts_with(begin)) {
            faults.push(format!("{PAGE}: no test: {begin}"));
        }
        for (name, test) in tests {
            if !crates.contains_key(&name) {
                crates.insert(name.clone(), sources(&paths, &folder(&name))?);
            }
            if !exists(&crates[&name], &test) {
                faults.push(format!("{PAGE}: `{name}` has no test `{test}`: {begin}"));
            }
        }
    }
    Ok(faults)
}

/// The folder of a crate. The controller of Kubernetes is outside of the workspace.
fn folder(name: &str) -> PathBuf {
    match name {
        "kubernetes" => name.into(),
        name => Path::new("crates").join(name),
    }
}

/// The points of the lists with promises, each on one line.
fn points(page: &str) -> Vec<String> {
    let mut points: Vec<String> = Vec::new();
    let mut inside = false;
    for line in page.lines().skip_while(|line| *line != FIRST_SECTION) {
        if let Some(text) = line.strip_prefix("* ") {
            points.push(text.to_owned());
            inside = true;
        } else if let Some(text) = line.strip_prefix("  ").filter(|_| inside) {
            if let Some(point) = points.last_mut() {
                point.push(' ');
                point.push_str(text);
            }
        } else {
            inside = false;
        }
    }
    points
}

/// Crates and tests in a point: "`a`, `b`: `test` and `other`".
fn tests(point: &str, is_crate: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    // Texts at even places, code at odd ones.
    let parts: Vec<&str> = point.split('`').collect();
    let code = |at: usize| parts.get(at).copied().unwrap_or_default();
    let joins = |text: &str| matches!(text, ", " | " and " | ", and ");
    let mut tests = Vec::new();
    for at in (1..parts.len()).step_by(2) {
        if code(at + 1) != ": " || !is_crate(code(at)) {
            continue;
        }
        let mut crates = vec![code(at)];
        let mut before = at;
        while before > 2 && joins(code(before - 1)) && is_crate(code(before - 2)) {
            before -= 2;
            crates.push(code(before));
        }
        let mut test = at + 2;
        loop {
            tests.extend(crates.iter().map(|name| ((*name).to_owned(), code(test).to_owned())));
            let names_a_crate = code(test + 3) == ": " || is_crate(code(test + 2));
            if !joins(code(test + 1)) || names_a_crate {
                break;
            }
            test += 2;
        }
    }
    tests
}

/// A file of a crate.
struct Source {
    path: PathBuf,
    text: String,
}

/// The files of a crate that can have tests, among `paths` of the repository.
fn sources(paths: &[PathBuf], folder: &Path) -> Result<Vec<Source>> {
    let has_tests = |path: &&PathBuf| {
        let part = ["src", "tests"].iter().any(|part| path.starts_with(folder.join(part)));
        part && path.extension().is_some_and(|kind| kind == "rs" || kind == "py")
    };
    let read = |path: &PathBuf| {
        let text = std::fs::read_to_string(repository().join(path))
            .with_context(|| path.display().to_string())?;
        Ok(Source { path: path.clone(), text })
    };
    paths.iter().filter(has_tests).map(read).collect()
}

/// Whether a crate has a test, or a module with tests, of this name. An ellipsis ends a beginning.
fn exists(sources: &[Source], test: &str) -> bool {
    let last = test.rsplit("::").next().unwrap_or(test);
    let function = match last.strip_suffix('…') {
        Some(begin) => format!("fn {begin}"),
        None => format!("fn {last}("),
    };
    let module = format!("mod {last} {{");
    let marks = ["#[test]", "#[tokio::test", "proptest!", "def test_", "mod tests"];
    sources.iter().any(|Source { path, text }| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_module = name == last || name.strip_suffix(".rs") == Some(last);
        // A folder of tests, by its name.
        let is_folder = path.parent().and_then(Path::file_name).is_some_and(|name| name == last);
        is_folder
            || is_module && marks.iter().any(|mark| text.contains(mark))
            || text.contains(&function)
            || text.contains(&module)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threat_model_names_a_test_for_each_promise() {
        let faults = faults().unwrap();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn a_point_may_name_several_crates_and_tests() {
        let is_crate = |name: &str| ["a", "b"].contains(&name);
        let found = |point: &str| {
            let found = tests(point, is_crate);
            found.iter().map(|(name, test)| format!("{name}:{test}")).collect::<Vec<_>>()
        };
        assert_eq!(found("A promise: `a`: `x` and `y::z`; `b`: `w`."), ["a:x", "a:y::z", "b:w"]);
        assert_eq!(found("`a`, `b`: `x`, by `c`: `d`"), ["b:x", "a:x"]);
        assert_eq!(found("`a`: `x`, `b`: `y`"), ["a:x", "b:y"]);
        assert!(found("Sizes meet `limit`: `a` is small").is_empty());
    }

    #[test]
    fn points_begin_after_the_attackers_and_go_over_lines() {
        let page = "# A\n* no\n## Every guest\n* one\n  two\n* three\n\ntext\n  more\n";
        assert_eq!(points(page), ["one two", "three"]);
    }

    #[test]
    fn a_test_that_does_not_exist_is_found() {
        let sources = sources(&paths().unwrap(), Path::new("xtask")).unwrap();
        assert!(exists(&sources, "points_begin_…"));
        assert!(exists(&sources, "promises"));
        assert!(!exists(&sources, concat!("no_such_", "test")));
    }
}
