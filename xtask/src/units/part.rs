//! A part of a package: the units that compile for users of only some features.

use std::collections::BTreeSet;

use serde_json::Value;

use super::Unit;

/// Some features of a package, with those that they bring.
#[derive(Debug)]
pub(super) struct Part {
    features: BTreeSet<String>,
    /// The crates of dependencies that only other features need.
    without: BTreeSet<String>,
}

impl Part {
    /// `package`: an entry in the output of `cargo metadata`.
    pub(super) fn new(package: &Value, features: &str) -> Self {
        let mut part = Self { features: BTreeSet::new(), without: BTreeSet::new() };
        let mut asked = BTreeSet::new();
        let mut next: Vec<&str> = features.split(',').collect();
        while let Some(name) = next.pop() {
            // "dep:name", "name/feature", "name?/feature", or another feature of the package.
            if let Some(dependency) = name.strip_prefix("dep:") {
                asked.insert(dependency);
            } else if let Some((dependency, _)) = name.split_once('/') {
                if !dependency.ends_with('?') {
                    asked.insert(dependency);
                }
            } else if part.features.insert(name.to_owned()) {
                let brought = package["features"][name].as_array().into_iter().flatten();
                next.extend(brought.filter_map(Value::as_str));
            }
        }
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let name = dependency["name"].as_str().unwrap_or_default();
            if dependency["optional"] == true && !asked.contains(name) {
                part.without.insert(name.replace('-', "_"));
            }
        }
        part
    }

    pub(super) fn of(&self, unit: &Unit) -> Unit {
        let mut words = Vec::new();
        let mut arguments = unit.arguments.iter().peekable();
        while let Some(word) = arguments.next() {
            let value = arguments.peek().map_or("", |word| word.as_str());
            let feature = value.strip_prefix("feature=\"").and_then(|name| name.strip_suffix('"'));
            // What build scripts set for the features `linux` and `vm`.
            let feature = feature.or_else(|| value.strip_suffix("_guests"));
            let dropped = match word.as_str() {
                "--cfg" => feature.is_some_and(|name| !self.features.contains(name)),
                "--extern" => {
                    value.split_once('=').is_some_and(|(name, _)| self.without.contains(name))
                }
                _ => false,
            };
            if dropped {
                arguments.next();
            } else {
                words.push(word.clone());
            }
        }
        Unit { arguments: words, ..unit.clone() }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::units::tests::unit;

    #[test]
    fn a_part_has_the_features_that_its_own_bring_and_not_what_others_ask_for() {
        let package = json!({
            "features": {
                "wasm": ["files", "dep:two", "three/x", "four?/x"], "files": [], "vm": ["dep:four"],
            },
            "dependencies": [
                {"name": "two", "optional": true}, {"name": "three", "optional": true},
                {"name": "four", "optional": true}, {"name": "five", "optional": false},
            ],
        });
        let mut words = vec!["--crate-name", "one", "one.rs"];
        let features =
            ["feature=\"files\"", "feature=\"vm\"", "vm_guests", "feature=\"wasm\"", "unix"];
        let externs = ["two=/2", "three=/3", "four=/4", "five=/5"];
        words.extend(features.iter().flat_map(|feature| ["--cfg", feature]));
        words.extend(externs.iter().flat_map(|name| ["--extern", name]));
        let part = Part::new(&package, "wasm").of(&unit(&words));
        let dropped: Vec<_> =
            words.iter().filter(|word| !part.arguments.contains(&(**word).into())).collect();
        assert_eq!(dropped, [&"feature=\"vm\"", &"vm_guests", &"four=/4"]);
        assert_eq!(part.arguments.len(), words.len() - 6, "{:?}", part.arguments);
    }
}
