//! The layers of `ARCHITECTURE.md`: its diagram and its table of crates against the manifests.
//!
//! Promises: the table has a row for each crate, with the direct dependencies of its manifest, and
//! no dependency of the diagram points up or to the left. Dependencies of tests alone do not count.
//! May break it: a dependency that a manifest names by another name.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use crate::host::repository;

const PAGE: &str = "ARCHITECTURE.md";
/// First row of the diagram.
const FIRST_ROW: &str = "interfaces ";

/// One line for each difference.
pub(crate) fn faults() -> Result<Vec<String>> {
    let page = std::fs::read_to_string(repository().join(PAGE)).context(PAGE)?;
    let mut faults = Vec::new();
    let mut crates = Vec::new();
    for entry in std::fs::read_dir(repository().join("crates"))? {
        let folder = entry?.path();
        let Ok(manifest) = std::fs::read_to_string(folder.join("Cargo.toml")) else { continue };
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        crates.push((name, manifest));
    }
    crates.sort();
    let names: BTreeSet<&str> = crates.iter().map(|(name, _)| name.as_str()).collect();
    for (name, manifest) in &crates {
        let real = dependencies(manifest, &names);
        match row(&page, name, &names) {
            None => faults.push(format!("{PAGE}: the table has no row `{name}`")),
            Some(listed) if listed != real => {
                faults.push(format!("{PAGE}: `{name}` depends on {real:?}, listed are {listed:?}"));
            }
            Some(_) => {}
        }
        let Some(from) = place(&page, name) else {
            faults.push(format!("{PAGE}: the diagram has no `{name}`"));
            continue;
        };
        for dependency in real {
            if place(&page, dependency).is_some_and(|to| to <= from) {
                faults.push(format!("{PAGE}: `{name}` depends on `{dependency}`, which is above"));
            }
        }
    }
    Ok(faults)
}

/// The crates that a manifest depends on, apart from its tests.
fn dependencies<'a>(manifest: &str, names: &BTreeSet<&'a str>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut is_section = false;
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            is_section = section == "dependencies"
                || section.starts_with("target.") && section.ends_with(".dependencies");
        } else if is_section {
            let name = line.split([' ', '=', '.']).next().unwrap_or_default();
            let name = name.strip_prefix("afresh-").unwrap_or(name);
            found.extend(names.get(name));
        }
    }
    found
}

/// The dependencies in the table's row of a crate.
fn row<'a>(page: &str, name: &str, names: &BTreeSet<&'a str>) -> Option<BTreeSet<&'a str>> {
    let begin = format!("| `{name}` | ");
    let line = page.lines().find_map(|line| line.strip_prefix(&begin))?;
    let cell = line.split(" | ").next()?;
    Some(cell.split('`').skip(1).step_by(2).filter_map(|name| names.get(name).copied()).collect())
}

/// Row and place of a crate in the diagram.
fn place(page: &str, name: &str) -> Option<(usize, usize)> {
    let rows = page.lines().skip_while(|line| !line.starts_with(FIRST_ROW));
    rows.take_while(|line| *line != "```").enumerate().find_map(|(row, line)| {
        // Behind the name of the layer, which two spaces end.
        let (_, crates) = line.split_once("  ")?;
        crates.split_whitespace().position(|found| found == name).map(|place| (row, place))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_and_the_diagram_are_those_of_the_manifests() {
        let faults = faults().unwrap();
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn dependencies_of_tests_do_not_count() {
        let names = BTreeSet::from(["sys", "store", "pager", "afresh"]);
        let manifest = "[dependencies]\nafresh-sys = { workspace = true }\nserde = \"1\"\n\
            [dev-dependencies]\nafresh-store = { path = \"../store\" }\n\
            [target.'cfg(unix)'.dependencies]\nafresh = { workspace = true }\n";
        assert_eq!(dependencies(manifest, &names), BTreeSet::from(["sys", "afresh"]));
    }

    #[test]
    fn places_go_down_and_to_the_right() {
        let page = "```text\ninterfaces   cli   bench\nstorage and pools   store\n```\nstore\n";
        assert_eq!(place(page, "bench"), Some((0, 1)));
        assert_eq!(place(page, "store"), Some((1, 0)));
        assert_eq!(place(page, "and"), None);
    }
}
