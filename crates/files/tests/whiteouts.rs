//! Layers of images against a model of how they are applied, and against umoci.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[path = "common/archives.rs"]
mod archives;
#[path = "common/layout.rs"]
#[allow(dead_code, reason = "other tests open images by name")]
mod layout;

use afresh_files::{Budget, Kind, Layer, LayerError, LayerLimits, Tree};
use archives::{FILE, tarred};
use layout::Layout;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sha2::{Digest, Sha256};
use tar::EntryType::{Char, Directory, Link, Symlink};

type Entries<'a> = Vec<(&'a str, tar::EntryType, &'a str, &'a [u8])>;

/// The tree of an image with these layers.
fn image(layers: &[Entries<'_>]) -> Result<Tree, LayerError> {
    image_of_tars(&layers.iter().map(|entries| tarred(entries)).collect::<Vec<_>>())
}

/// All paths of a tree: directories with a slash, links with their targets, files with their bytes.
fn listing(tree: &Tree) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut ahead = vec![(Tree::ROOT, String::new())];
    while let Some((node, path)) = ahead.pop() {
        for entry in tree.list(node).unwrap() {
            let path = format!("{path}{}", String::from_utf8_lossy(&entry.name));
            let shown = match entry.kind {
                Kind::Directory => {
                    ahead.push((entry.node, format!("{path}/")));
                    "/".to_owned()
                }
                Kind::Link => {
                    format!("-> {}", String::from_utf8_lossy(&tree.read_link(entry.node).unwrap()))
                }
                _ => {
                    let mut bytes = vec![0; tree.stat(entry.node).unwrap().size as usize];
                    tree.read(entry.node, 0, &mut bytes).unwrap();
                    String::from_utf8(bytes).unwrap()
                }
            };
            all.insert(path, shown);
        }
    }
    all
}

/// The paths of an image with these layers.
fn paths(layers: &[Entries<'_>]) -> Vec<String> {
    listing(&image(layers).unwrap()).into_keys().collect()
}

fn lower() -> Entries<'static> {
    vec![("usr/one", FILE, "", b"1"), ("lib", Symlink, "usr", b""), ("file", FILE, "", b"f")]
}

#[test]
fn a_removal_without_its_directory_changes_nothing() {
    for removal in ["file/.wh.x", "file/.wh..wh..opq", "none/.wh.x", "none/.wh..wh..opq", ".wh.x"] {
        let all = paths(&[lower(), vec![(removal, FILE, "", b"")]]);
        assert_eq!(all, ["file", "lib", "usr", "usr/one"], "{removal}");
    }
}

#[test]
fn a_directory_that_replaces_a_link_is_emptied_without_its_target() {
    let upper: Entries<'_> = vec![
        ("lib/", Directory, "", b""),
        ("lib/.wh..wh..opq", FILE, "", b""),
        ("lib/two", FILE, "", b"2"),
    ];
    assert_eq!(paths(&[lower(), upper]), ["file", "lib", "lib/two", "usr", "usr/one"]);
    // The link itself can be removed. A removal through it concerns its target.
    assert_eq!(paths(&[lower(), vec![(".wh.lib", FILE, "", b"")]]), ["file", "usr", "usr/one"]);
    assert_eq!(paths(&[lower(), vec![("lib/.wh.one", FILE, "", b"")]]), ["file", "lib", "usr"]);
}

#[test]
fn a_removal_keeps_what_its_own_layer_has() {
    let lower: Entries<'_> = vec![("d/e/old", FILE, "", b"1"), ("d/f", FILE, "", b"1")];
    for removal in [".wh.d", "d/.wh..wh..opq"] {
        for first in [true, false] {
            let mut upper: Entries<'_> = vec![("d/e/new", FILE, "", b"2")];
            upper.insert(usize::from(!first), (removal, FILE, "", b""));
            let all = paths(&[lower.clone(), upper]);
            assert_eq!(all, ["d", "d/e", "d/e/new"], "{removal} {first}");
        }
    }
}

#[test]
fn a_hard_link_to_a_link_is_a_name_of_the_link() {
    let tree = image(&[vec![
        ("a", Symlink, "target", b""),
        ("b", Link, "a", b""),
        ("target", FILE, "", b"t"),
    ]])
    .unwrap();
    assert_eq!(listing(&tree)["b"], "-> target");
}

#[test]
fn a_hard_link_to_a_device_is_skipped_with_it() {
    let lower: Entries<'_> = vec![("null", FILE, "", b"old"), ("also", FILE, "", b"old")];
    let upper: Entries<'_> = vec![
        ("null", Char, "", b""),
        ("also", Link, "null", b""),
        ("more", Link, "also", b""),
        ("kept", FILE, "", b"k"),
    ];
    assert_eq!(listing(&image(&[lower, upper]).unwrap()).keys().collect::<Vec<_>>(), ["kept"]);
    // A hard link to a path that no layer has is refused.
    assert!(image(&[vec![("a", Link, "none", b"")]]).is_err());
}

/// The time of a million steps is seconds in a development build, that of the faults was minutes.
#[test]
fn many_removals_of_many_names_are_linear() {
    let names: Vec<_> = (0..20_000).map(|number| format!("d/{number}")).collect();
    let mut entries: Entries<'_> = names.iter().map(|name| (&**name, FILE, "", &b""[..])).collect();
    for _ in 0..10_000 {
        entries.push(("d/.wh..wh..opq", FILE, "", b""));
        entries.push((".wh.d", FILE, "", b""));
    }
    assert_eq!(paths(&[lower(), entries]).len(), 20_000 + 1 + lower().len() + 1);
}

#[test]
fn links_lead_through_a_limited_number_of_names() {
    let here = "x/../".repeat(18);
    let chain: Vec<_> = (0..39).map(|number| format!("l{number}")).collect();
    let mut entries: Entries<'_> = vec![("x", Directory, "", b""), ("l0", Symlink, &here, b"")];
    let targets: Vec<_> = chain.iter().map(|link| format!("{here}{link}")).collect();
    for (link, target) in chain[1..].iter().zip(&targets) {
        entries.push((link, Symlink, target, b""));
    }
    let path = "l38/".repeat(20);
    let files: Vec<_> = (0..200).map(|number| format!("{path}{number}")).collect();
    entries.extend(files.iter().map(|file| (&**file, FILE, "", &b""[..])));
    let refused = image(&[entries]).unwrap_err().to_string();
    let limit = "links of the layers lead through more than 1048576 names, and 64 for each item";
    assert!(refused.contains(limit), "{refused}");
}

/// The model: the specification over plain maps.
#[derive(Clone, Debug)]
enum Model {
    Directory(BTreeMap<String, Model>),
    File(String),
    Link(String),
}

impl Model {
    fn entries(&mut self) -> Option<&mut BTreeMap<String, Model>> {
        match self {
            Model::Directory(entries) => Some(entries),
            _ => None,
        }
    }

    fn list(&self, path: &str, all: &mut BTreeMap<String, String>) {
        match self {
            Model::Directory(entries) => {
                for (name, entry) in entries {
                    let path = format!("{path}{name}");
                    let shown = match entry {
                        Model::Directory(_) => "/".to_owned(),
                        Model::File(bytes) => bytes.clone(),
                        Model::Link(target) => format!("-> {target}"),
                    };
                    all.insert(path.clone(), shown);
                    entry.list(&format!("{path}/"), all);
                }
            }
            Model::File(_) | Model::Link(_) => {}
        }
    }
}

#[derive(Clone, Debug)]
enum Change {
    File(Vec<String>),
    Directory(Vec<String>),
    /// A link to a name at the top.
    Link(Vec<String>, String),
    Remove(Vec<String>),
    Clear(Vec<String>),
}

/// The entry at a path of real directories.
fn find<'m>(root: &'m mut Model, path: &[String]) -> Option<&'m mut Model> {
    let mut here = root;
    for name in path {
        here = here.entries()?.get_mut(name)?;
    }
    Some(here)
}

/// The path of real directories that a path leads to. Links lead to names at the top.
fn resolve(root: &mut Model, path: &[String], make: bool, links: usize) -> Option<Vec<String>> {
    let mut at = Vec::new();
    for name in path {
        let entries = find(root, &at)?.entries()?;
        match entries.get(name) {
            Some(Model::Directory(_)) => at.push(name.clone()),
            Some(Model::Link(target)) if links > 0 => {
                let target = vec![target.clone()];
                at = resolve(root, &target, false, links - 1)?;
            }
            None if make => {
                entries.insert(name.clone(), Model::Directory(BTreeMap::new()));
                at.push(name.clone());
            }
            _ => return None,
        }
    }
    Some(at)
}

/// Removes all entries of a directory that were not added.
fn clear(root: &mut Model, path: &[String], added: &BTreeSet<Vec<String>>) {
    let Some(entries) = find(root, path).and_then(Model::entries) else { return };
    let names: Vec<String> = entries.keys().cloned().collect();
    for name in names {
        let path = [path, &[name]].concat();
        remove(root, &path, added);
    }
}

fn remove(root: &mut Model, path: &[String], added: &BTreeSet<Vec<String>>) {
    if added.contains(path) {
        return clear(root, path, added);
    }
    let Some((name, above)) = path.split_last() else { return };
    if let Some(entries) = find(root, above).and_then(Model::entries) {
        entries.remove(name);
    }
}

fn apply(root: &mut Model, layer: &[Change]) -> Option<()> {
    const LINKS: usize = 20;
    let mut added = BTreeSet::new();
    for change in layer {
        let (path, new) = match change {
            Change::File(path) => (path, Model::File(path.join("/"))),
            Change::Directory(path) => (path, Model::Directory(BTreeMap::new())),
            Change::Link(path, target) => (path, Model::Link(target.clone())),
            Change::Remove(path) => {
                let (name, above) = path.split_last()?;
                if let Some(at) = resolve(root, above, false, LINKS) {
                    remove(root, &[&at[..], std::slice::from_ref(name)].concat(), &added);
                }
                continue;
            }
            Change::Clear(path) => {
                if let Some(at) = resolve(root, path, false, LINKS) {
                    clear(root, &at, &added);
                }
                continue;
            }
        };
        let (name, above) = path.split_last()?;
        let at = resolve(root, above, true, LINKS)?;
        let entries = find(root, &at)?.entries()?;
        if !matches!((entries.get(name), &new), (Some(Model::Directory(_)), Model::Directory(_))) {
            entries.insert(name.clone(), new);
        }
        let path = [&at[..], std::slice::from_ref(name)].concat();
        added.extend((1..=path.len()).map(|len| path[..len].to_vec()));
    }
    Some(())
}

/// The tar of a layer: its changes in order.
fn entries(layer: &[Change]) -> Vec<(String, tar::EntryType, String, Vec<u8>)> {
    let marked = |path: &[String], mark: &str| match path.split_last() {
        Some((name, above)) if mark == ".wh." => {
            let above: String = above.iter().map(|name| format!("{name}/")).collect();
            format!("{above}.wh.{name}")
        }
        _ => path.iter().map(|name| format!("{name}/")).collect::<String>() + mark,
    };
    let entry = |change: &Change| match change {
        Change::File(path) => (path.join("/"), FILE, String::new(), path.join("/").into_bytes()),
        Change::Directory(path) => (path.join("/") + "/", Directory, String::new(), Vec::new()),
        Change::Link(path, target) => (path.join("/"), Symlink, format!("/{target}"), Vec::new()),
        Change::Remove(path) => (marked(path, ".wh."), FILE, String::new(), Vec::new()),
        Change::Clear(path) => (marked(path, ".wh..wh..opq"), FILE, String::new(), Vec::new()),
    };
    layer.iter().map(entry).collect()
}

fn change() -> impl Strategy<Value = Change> {
    let name = || prop::sample::select(vec!["a", "b", "c"]).prop_map(str::to_owned);
    let path = move || prop::collection::vec(name(), 1..=3);
    prop_oneof![
        3 => path().prop_map(Change::File),
        2 => path().prop_map(Change::Directory),
        2 => (path(), name()).prop_map(|(path, target)| Change::Link(path, target)),
        2 => path().prop_map(Change::Remove),
        1 => path().prop_map(Change::Clear),
    ]
}

/// The tars of layers.
fn tars(layers: &[Vec<Change>]) -> Vec<Vec<u8>> {
    let tar = |layer: &Vec<Change>| {
        let all = entries(layer);
        tarred(&all.iter().map(|(n, k, t, b)| (&**n, *k, &**t, &**b)).collect::<Vec<_>>())
    };
    layers.iter().map(tar).collect()
}

/// The listing of a directory, with bytes and targets.
fn listing_of_directory(path: &Path, at: &str, all: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{at}{}", entry.file_name().into_string().unwrap());
        let kind = entry.file_type().unwrap();
        let shown = if kind.is_dir() {
            listing_of_directory(&entry.path(), &format!("{name}/"), all);
            "/".to_owned()
        } else if kind.is_symlink() {
            format!("-> {}", fs::read_link(entry.path()).unwrap().display())
        } else {
            fs::read_to_string(entry.path()).unwrap()
        };
        all.insert(name, shown);
    }
}

/// The program umoci, if it is installed.
fn umoci() -> Option<PathBuf> {
    let named = std::env::var_os("AFRESH_TEST_UMOCI").map(PathBuf::from);
    named.or_else(|| {
        let path = std::env::var_os("PATH")?;
        std::env::split_paths(&path).map(|folder| folder.join("umoci")).find(|file| file.is_file())
    })
}

/// Unpacks layers with umoci.
fn unpacked_by_umoci(umoci: &Path, layers: &[Vec<u8>]) -> Result<BTreeMap<String, String>, String> {
    let layout = Layout::new();
    let digests: Vec<String> = layers
        .iter()
        .map(|layer| {
            let hex: String = Sha256::digest(layer).iter().map(|b| format!("{b:02x}")).collect();
            format!("\"sha256:{hex}\"")
        })
        .collect();
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","created":"2020-01-01T00:00:00Z","config":{{}},
            "rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        digests.join(",")
    );
    let name = r#","annotations":{"org.opencontainers.image.ref.name":"test"}"#;
    layout.index(&[layout.image(layers, &config, name)]);
    let root = layout.path().join("root");
    let output = Command::new(umoci)
        .args(["raw", "unpack", "--rootless", "--image"])
        .arg(format!("{}:test", layout.path().display()))
        .arg(&root)
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let mut all = BTreeMap::new();
    listing_of_directory(&root, "", &mut all);
    Ok(all)
}

/// The tree of an image with these tars as layers.
fn image_of_tars(layers: &[Vec<u8>]) -> Result<Tree, LayerError> {
    let layout = Layout::new();
    layout.index(&[layout.image(layers, "{}", "")]);
    let layer = Layer::open(layout.path(), &LayerLimits::default())?;
    Tree::new(Budget::default()).with_layer("/", &layer)
}

fn layers(most: usize) -> impl Strategy<Value = Vec<Vec<Change>>> {
    prop::collection::vec(prop::collection::vec(change(), 0..most), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn random_layers_are_what_the_model_says(layers in layers(8)) {
        let mut model = Model::Directory(BTreeMap::new());
        let expected = layers.iter().try_for_each(|layer| apply(&mut model, layer));
        let tree = image_of_tars(&tars(&layers));
        prop_assert_eq!(tree.is_ok(), expected.is_some(), "{:?} {:?}", layers, tree.err());
        if let Ok(tree) = tree {
            let mut all = BTreeMap::new();
            model.list("", &mut all);
            let found: BTreeMap<_, _> =
                listing(&tree).into_iter().map(|(path, shown)| (path, shown.replace("-> /", "-> "))).collect();
            prop_assert_eq!(found, all);
        }
    }
}

#[test]
fn random_layers_are_what_umoci_unpacks() {
    let Some(umoci) = umoci() else {
        println!("SKIPPED: there is no umoci; AFRESH_TEST_UMOCI names one");
        return;
    };
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&layers(8), |layers| {
        let tars = tars(&layers);
        // umoci also makes the targets of dangling links, through which nothing is unpacked here,
        // and refuses removals through links that lead to themselves.
        if let Ok(tree) = image_of_tars(&tars) {
            match unpacked_by_umoci(&umoci, &tars) {
                Err(why) if why.contains("too many levels of symbolic links") => {}
                unpacked => prop_assert_eq!(Ok(listing(&tree)), unpacked),
            }
        }
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
