//! The list of everything that is linked into the command, in the form of CycloneDX, and the licences of it all.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{PACKAGE, time};
use crate::command::{cargo, metadata, output};
use crate::host;

/// The file of the list.
pub(super) const NAME: &str = "afresh-cli.cdx.json";

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
    let mut tree = cargo();
    tree.current_dir(host::repository()).args(["tree", "--locked", "--package", PACKAGE]);
    tree.args(["--target", target, "--edges", "normal", "--prefix", "none", "--format", "{p}"]);
    let lines = output(&mut tree)?;
    let used: std::collections::BTreeSet<(String, String)> =
        lines.lines().filter_map(name_and_version).collect();
    let metadata = metadata(&["--filter-platform", target])?;
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
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
            .with_context(|| format!("cannot read {}", folder.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.is_file() && is_licence(path))
            .collect();
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            texts.entry(text.trim().to_owned()).or_default().push(format!("{name} {version}"));
        }
    }
    let mut all = format!("Packages that are linked into afresh, with their licences.\n\n{list}");
    for (text, packages) in texts {
        write!(all, "\n{}\n{}\n\n{text}\n", "-".repeat(80), packages.join(", "))?;
    }
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
}
