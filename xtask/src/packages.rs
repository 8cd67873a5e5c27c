//! Packages: checks that every published crate can be packaged, and the contents of each.
//!
//! `cargo package` makes the archive for a registry, with manifests as a registry reads them: it refuses a path
//! without a version, a missing readme, an unknown licence. Nothing is built from it, for the same sources were built
//! and tested here.

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
        ensure!(
            text.lines().any(|line| line.starts_with("description = ")),
            "{name} has no description"
        );
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
    // All at once, so that each finds the others, which no registry has yet.
    let mut package = packaging();
    package.args(["--no-verify", "--quiet"]);
    for name in &names {
        package.args(["--package", name]);
    }
    run(&mut package)
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
    fn the_command_and_the_front_door_are_published_and_this_program_is_not() -> Result<()> {
        let names = published()?;
        assert!(names.contains("afresh") && names.contains("afresh-cli"), "{names:?}");
        assert!(!names.contains("xtask"), "{names:?}");
        Ok(())
    }
}
