//! The list of everything that is linked into the command, in the form of CycloneDX, and the
//! licences of it all.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::origin::{PACKAGE, time};
use crate::command::{cargo, metadata, output};
use crate::{guests, host};

/// The file of the list in a package.
pub(super) const NAME: &str = "afresh-cli.cdx.json";

/// The file of the list for a target, next to the packages.
pub(super) fn name_for(target: &str) -> String {
    format!("{PACKAGE}-{target}.cdx.json")
}

/// One package that is linked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Component {
    name: String,
    version: String,
    license: String,
    /// The folder of its sources.
    folder: PathBuf,
    is_ours: bool,
}

/// The packages that a target's command is built from, as cargo resolves them.
pub(super) fn components(target: &str) -> Result<Vec<Component>> {
    components_of(&host::repository(), PACKAGE, target)
}

/// The packages that `package` of the workspace in `folder` is built from.
pub(super) fn components_of(folder: &Path, package: &str, target: &str) -> Result<Vec<Component>> {
    let manifest = folder.join("Cargo.toml").display().to_string();
    let mut tree = cargo();
    tree.args(["tree", "--locked", "--manifest-path", &manifest, "--package", package]);
    tree.args(["--target", target, "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let lines = output(&mut tree)?;
    let used: std::collections::BTreeSet<(String, String)> =
        lines.lines().filter_map(name_and_version).collect();
    let metadata = metadata(&["--manifest-path", &manifest, "--filter-platform", target])?;
    let packages = metadata["packages"].as_array().context("cargo's metadata has packages")?;
    let mut components = Vec::new();
    for package in packages {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let (name, version) = (text("name"), text("version"));
        if !used.contains(&(name.clone(), version.clone())) {
            continue;
        }
        let folder = Path::new(&text("manifest_path")).parent().map(Path::to_owned);
        let (license, folder) = (text("license"), folder.unwrap_or_default());
        ensure!(!license.is_empty(), "{name} {version} states no licence");
        let is_ours = package["source"].is_null();
        components.push(Component { name, version, license, folder, is_ours });
    }
    ensure!(components.len() == used.len(), "cargo's metadata lacks a package of its tree");
    components.sort();
    Ok(components)
}

/// The name and version in a line of `cargo tree`.
fn name_and_version(line: &str) -> Option<(String, String)> {
    let mut words = line.split_whitespace();
    let (name, version) = (words.next()?, words.next()?);
    Some((name.to_owned(), version.strip_prefix('v')?.to_owned()))
}

/// The list as a CycloneDX document.
pub(super) fn json(components: &[Component]) -> Result<String> {
    let of = |component: &Component| {
        let Component { name, version, license, is_ours, .. } = component;
        let mut entry = json!({
            "type": "library", "name": name, "version": version,
            "licenses": [{"expression": license.replace('/', " OR ")}],
        });
        // Only packages of the registry have an address there.
        if !is_ours {
            entry["purl"] = json!(format!("pkg:cargo/{name}@{version}"));
        }
        entry
    };
    let own = components.iter().find(|component| component.name == PACKAGE);
    let version = &own.context("the command is one of its components")?.version;
    let document = json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {
            "timestamp": output(std::process::Command::new("date").args([
                "-u", "-d", &format!("@{}", time()?), "+%Y-%m-%dT%H:%M:%SZ",
            ]))?,
            "component": {"type": "application", "name": "afresh", "version": version},
        },
        "components": components.iter().map(of).collect::<Vec<_>>(),
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// The licences of all components: each text once, with the packages that have it.
pub(super) fn licences(components: &[Component]) -> Result<String> {
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut list = String::new();
    for component in components.iter().filter(|component| !component.is_ours) {
        let Component { name, version, license, folder, .. } = component;
        writeln!(list, "{name} {version}: {license}")?;
        for file in files(folder)? {
            let text =
                std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let text = String::from_utf8_lossy(&text).trim().to_owned();
            texts.entry(text).or_default().push(format!("{name} {version}"));
        }
    }
    let mut all = format!("Packages that are linked into afresh, with their licences.\n\n{list}");
    for (text, packages) in texts {
        write!(all, "\n{}\n{}\n\n{text}\n", "-".repeat(80), packages.join(", "))?;
    }
    Ok(all)
}

/// The licences of all that is linked into a library of the workspace for a language, and into its
/// JavaScript guest.
pub(super) fn licences_of_library(package: &str, target: &str) -> Result<String> {
    let repository = host::repository();
    let mut components = components_of(&repository, package, target)?;
    let guest = guests::named("quickjs")?;
    components.extend(components_of(
        &repository.join("guests"),
        "afresh-guest-quickjs",
        guest.target,
    )?);
    components.sort();
    components.dedup();
    licences(&components)
}

/// The licence files of a package: its own, and those of a C library in one of its folders.
fn files(package: &Path) -> Result<Vec<PathBuf>> {
    let entries = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder)
            .with_context(|| format!("cannot read {}", folder.display()))?;
        Ok(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
    };
    let mut all = entries(package)?;
    for folder in all.clone().iter().filter(|path| path.is_dir()) {
        all.extend(entries(folder)?);
    }
    all.retain(|path| path.is_file() && is_licence(path));
    all.sort();
    Ok(all)
}

fn is_licence(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_uppercase();
    ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT"]
        .iter()
        .any(|part| name.starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_tree_names_a_package() {
        let of = |line| name_and_version(line).map(|(name, version)| format!("{name}@{version}"));
        assert_eq!(of("serde v1.0.1 (*)").as_deref(), Some("serde@1.0.1"));
        assert_eq!(of("afresh v0.1.0 (/work)").as_deref(), Some("afresh@0.1.0"));
        assert_eq!(of(""), None);
        assert!(is_licence(Path::new("a/LICENSE-MIT")) && !is_licence(Path::new("a/README.md")));
    }

    #[test]
    fn the_licence_of_a_c_library_inside_a_package_is_found() -> Result<()> {
        let package = std::env::temp_dir().join(format!("afresh-bill-{}", std::process::id()));
        std::fs::create_dir_all(package.join("quickjs/docs"))?;
        for file in ["LICENSE", "README.md", "quickjs/LICENSE", "quickjs/docs/LICENSE"] {
            std::fs::write(package.join(file), file)?;
        }
        let found = files(&package)?;
        std::fs::remove_dir_all(&package)?;
        assert_eq!(found, ["LICENSE", "quickjs/LICENSE"].map(|file| package.join(file)));
        Ok(())
    }
}
