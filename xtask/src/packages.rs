//! Packages: checks that every published crate can be packaged, and the contents of each.
//!
//! `cargo package` makes the archive for a registry, with manifests as a registry reads them: it
//! refuses a path without a version, a missing readme, an unknown licence. Nothing is built from
//! it, for the same sources were built and tested here. Each package states the oldest Rust that
//! builds it, and the command with one kind of guest builds from at most half of the packages of
//! the whole.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::command::{cargo, output, run};
use crate::host;

/// The files that every package must have in addition to its sources.
const NEEDED: &[&str] = &["Cargo.toml", "README.md", "src/"];

/// The published packages: members of the workspace that do not opt out.
fn published() -> Result<BTreeSet<String>> {
    let folder = host::repository().join("crates");
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let manifest = entry?.path().join("Cargo.toml");
        let text = std::fs::read_to_string(&manifest)
            .with_context(|| format!("cannot read {}", manifest.display()))?;
        let name = text
            .lines()
            .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'))
            .with_context(|| format!("no name in {}", manifest.display()))?;
        if text.lines().any(|line| line == "publish = false") {
            continue;
        }
        for key in ["description = ", "rust-version.workspace = true"] {
            ensure!(text.lines().any(|line| line.starts_with(key)), "{name} has no line {key:?}");
        }
        names.insert(name.to_owned());
    }
    if names.is_empty() {
        bail!("no package is published");
    }
    Ok(names)
}

/// Packages each of them.
pub(crate) fn all() -> Result<()> {
    let names = published()?;
    for name in &names {
        let mut list = packaging();
        list.args(["--list", "--package", name]);
        let files = output(&mut list)?;
        for needed in NEEDED {
            let there = files.lines().any(|file| file == *needed || file.starts_with(needed));
            ensure!(there, "the package {name} lacks {needed}");
        }
    }
    check_smallest()?;
    // All at once, so that each finds the others, which no registry has yet.
    let mut package = packaging();
    package.args(["--no-verify", "--quiet"]);
    for name in &names {
        package.args(["--package", name]);
    }
    run(&mut package)
}

/// Checks that the command for Linux programs alone, and for micro-VMs alone, needs at most half of
/// the packages that the default features need.
fn check_smallest() -> Result<()> {
    let all = linked(&[])?;
    for feature in ["linux", "vm"] {
        let some = linked(&["--no-default-features", "--features", feature])?;
        ensure!(
            2 * some <= all,
            "the command with the feature {feature} is built from {some} packages, more than half of all {all}: move \
             what it does not need behind a feature"
        );
    }
    Ok(())
}

/// The number of packages that the command is built from.
fn linked(features: &[&str]) -> Result<usize> {
    let mut tree = cargo();
    tree.current_dir(host::repository()).args(["tree", "--locked", "--package", "afresh-cli"]);
    tree.args(["--edges", "normal", "--prefix", "none", "--format", "{p}"]).args(features);
    Ok(count(&output(&mut tree)?))
}

/// The number of different packages in the output of `cargo tree`, which marks repeated ones.
fn count(tree: &str) -> usize {
    let package = |line: &str| -> Option<(String, String)> {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.to_owned()))
    };
    tree.lines().filter_map(package).collect::<BTreeSet<_>>().len()
}

fn packaging() -> Command {
    let mut package = cargo();
    package.current_dir(host::repository()).args(["package", "--locked", "--allow-dirty"]);
    package
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_in_several_places_counts_once_and_two_versions_count_twice() {
        let tree = "afresh v0.1.0 (/afresh)\nserde v1.0.1\n\nserde v1.0.1 (*)\nserde v0.9.0\n";
        assert_eq!(count(tree), 3);
    }

    #[test]
    fn the_command_and_the_front_door_are_published_and_this_program_is_not() -> Result<()> {
        let names = published()?;
        assert!(names.contains("afresh") && names.contains("afresh-cli"), "{names:?}");
        assert!(!names.contains("xtask"), "{names:?}");
        Ok(())
    }
}
