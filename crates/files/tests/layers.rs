//! Layers below a tree: honest layers are seen as they are, hostile ones lead nowhere and take
//! nothing.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::sync::Arc;

#[path = "common/archives.rs"]
mod archives;
mod common;

use afresh_files::{
    Access, Budget, Change, Kind, Layer, LayerBytes, LayerError, LayerLimits, Refused, Rename,
    SavedTree, Time, Tree, TreeError, Walk,
};
use archives::{FILE, entry, tarred};
use common::{LayerStore, Pages};

const NOW: Time = Time { seconds: 1, nanos: 2 };

fn empty() -> Tree {
    Tree::new(Budget::default())
}

fn over(layer: Layer) -> Tree {
    empty().with_layer("/", &layer).unwrap()
}

fn read(tree: &Tree, path: &str) -> Result<Vec<u8>, Refused> {
    tree.read_path(path, 1 << 20)
}

/// A directory with a bit of everything, and links that try to leave it.
fn host() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::create_dir_all(at("top/sub/deep")).unwrap();
    std::fs::write(at("secret"), b"not for guests").unwrap();
    std::fs::write(at("top/a"), [7; 10_000]).unwrap();
    std::fs::write(at("top/sub/b"), b"bee").unwrap();
    symlink("sub/b", at("top/link")).unwrap();
    symlink("../secret", at("top/out")).unwrap();
    symlink("/etc/passwd", at("top/absolute")).unwrap();
    symlink("../../..", at("top/sub/up")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("top/pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    directory
}

#[test]
fn a_host_directory_is_read_below_and_never_written_or_left() {
    let directory = host();
    let top = directory.path().join("top");
    let mut tree = over(Layer::open(&top, &LayerLimits::default()).unwrap());
    assert_eq!(read(&tree, "a").unwrap(), [7; 10_000]);
    assert_eq!(read(&tree, "link").unwrap(), b"bee");
    assert_eq!(read(&tree, "sub/../sub/b").unwrap(), b"bee");
    // Links are resolved within the tree.
    for path in ["out", "absolute", "sub/up/secret", "../secret", "sub/up/../../secret"] {
        assert_eq!(read(&tree, path), Err(Refused::Missing), "{path}");
    }
    let names: Vec<String> = tree
        .list_path("/")
        .unwrap()
        .iter()
        .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
        .collect();
    assert_eq!(
        names,
        ["a", "absolute", "link", "out", "sub"],
        "a pipe is none of a guest's business"
    );

    let before = tree.clone();
    let a = tree.find("a").unwrap();
    tree.write(a, 5000, b"changed", NOW).unwrap();
    tree.set_size(a, 9000, NOW).unwrap();
    tree.write_path("sub/deep/new", b"new", NOW).unwrap();
    tree.remove_path("link", NOW).unwrap();
    let place =
        |tree: &Tree, path: &str| tree.walk(path.as_bytes(), Walk::new(Tree::ROOT).name()).unwrap();
    let (from, to) = (place(&tree, "sub"), place(&tree, "moved"));
    tree.rename_at(&from, &to, Rename::Replace, NOW).unwrap();
    assert_eq!(read(&tree, "moved/b").unwrap(), b"bee");
    assert_eq!(tree.find("moved/deep/..").unwrap(), tree.find("moved").unwrap());
    let mut expected = vec![7; 9000];
    expected[5000..5007].copy_from_slice(b"changed");
    assert_eq!(read(&tree, "a").unwrap(), expected);
    assert!(tree.used().bytes < 10_000, "what is below is not paid for: {:?}", tree.used());

    // The relative, and the host, are unchanged.
    assert_eq!(read(&before, "link").unwrap(), b"bee");
    assert_eq!(std::fs::read(top.join("a")).unwrap(), [7; 10_000]);
    assert!(!top.join("moved").exists() && !top.join("sub/deep/new").exists());

    let found = before.diff(&tree).unwrap();
    let said: Vec<_> = found
        .changes
        .iter()
        .map(|change| (String::from_utf8_lossy(&change.path).into_owned(), change.change))
        .collect();
    let expected = [
        ("/a", Change::Changed),
        ("/link", Change::Removed),
        ("/moved", Change::Added),
        ("/moved/b", Change::Added),
        ("/moved/deep", Change::Added),
        ("/moved/deep/new", Change::Added),
        ("/moved/up", Change::Added),
        ("/sub", Change::Removed),
    ];
    for (path, change) in expected {
        assert!(said.contains(&(path.to_owned(), change)), "{path}: {said:?}");
    }
    assert_eq!(found.changes.iter().find(|c| c.path == b"/a").unwrap().bytes, 7 + 1000);

    // It comes back over the same directory in another process, and over nothing at all.
    let saved = tree.saved().unwrap();
    let again = over(Layer::directory(&top).unwrap()).restored(&saved).unwrap();
    assert!(tree.diff(&again).unwrap().is_empty());
    assert_eq!(again.used(), tree.used());
    assert!(matches!(empty().restored(&saved), Err(TreeError::Layers { .. })));
    // Entries that the tree names are known before the directory is listed, and a listing shows the
    // same.
    let beside = |tree: &Tree| -> Vec<_> {
        let entries = tree.list_path("/moved").unwrap().into_iter();
        entries.map(|entry| (entry.name.to_vec(), entry.node)).collect()
    };
    assert_eq!(beside(&again), beside(&tree));
    // A state is refused if a file that it names is missing, or is one that guests do not see.
    let (a, kept) = (top.join("a"), top.join("kept"));
    std::fs::rename(&a, &kept).unwrap();
    for instead in ["nothing", "a socket", "a link"] {
        match instead {
            "nothing" => {}
            "a socket" => drop(std::os::unix::net::UnixListener::bind(&a).unwrap()),
            _ => std::os::unix::fs::symlink("kept", &a).unwrap(),
        }
        let restored = over(Layer::directory(&top).unwrap()).restored(&saved);
        assert!(matches!(restored, Err(TreeError::Damaged { .. })), "{instead}: {restored:?}");
        let _ = std::fs::remove_file(&a);
    }
    std::fs::rename(&kept, &a).unwrap();
    let alone = LayerStore::new(&tree).tree(&tree);
    drop(directory);
    assert_eq!(read(&alone, "a").unwrap()[4999..5008], *b"\x07changed\x07");
    assert_eq!(read(&alone, "moved/b").unwrap(), b"bee");
    assert_eq!((alone.budget(), alone.used()), (tree.budget(), tree.used()));
    assert!(tree.diff(&tree).unwrap().is_empty());
}

#[test]
fn a_host_directory_is_kept_once_and_shown_as_it_was_then_to_all_relatives() {
    let directory = host();
    let top = directory.path().join("top");
    std::fs::write(top.join("seen-and-gone"), b"x").unwrap();
    let mut tree = over(Layer::directory(&top).unwrap());
    tree.list_path("/").unwrap();
    // It was listed, but never looked up.
    std::fs::remove_file(top.join("seen-and-gone")).unwrap();
    tree.write_path("/own", b"1", NOW).unwrap();
    let before = tree.clone();

    let first = LayerStore::new(&tree);
    let names = |tree: &Tree| -> Vec<_> {
        tree.list_path("/").unwrap().into_iter().map(|entry| entry.name.to_vec()).collect()
    };
    let alone = first.tree(&tree);
    assert!(!names(&alone).contains(&b"seen-and-gone".to_vec()));
    assert!(names(&alone).contains(&b"own".to_vec()));

    // Later changes on the host do not show, neither in a later state nor in an earlier one.
    std::fs::write(top.join("a"), b"other").unwrap();
    std::fs::remove_file(top.join("sub/b")).unwrap();
    std::fs::write(top.join("sub/later"), b"x").unwrap();
    tree.write_path("/own", b"2", NOW).unwrap();
    for tree in [&tree, &before, &first.tree(&tree), &first.tree(&before)] {
        assert_eq!(read(tree, "a").unwrap(), [7; 10_000]);
        assert_eq!(read(tree, "sub/b").unwrap(), b"bee");
        assert_eq!(read(tree, "sub/later"), Err(Refused::Missing));
    }
    assert_eq!(read(&first.tree(&tree), "own").unwrap(), b"2");
    // Keeping them again gives the same bytes.
    let again = LayerStore::new(&before);
    assert_eq!((again.description, again.bytes), (first.description, first.bytes));
}

#[test]
fn one_of_two_that_keep_a_host_directory_at_once_decides_for_both() {
    let directory = host();
    let tree = over(Layer::directory(directory.path().join("top")).unwrap());
    let (one, two) = (tree.stored_layers().unwrap(), tree.stored_layers().unwrap());
    let zeros: Arc<dyn LayerBytes> = Arc::new(Pages(vec![0; one.pages() as usize * 4096]));
    let ones: Arc<dyn LayerBytes> = Arc::new(Pages(vec![1; one.pages() as usize * 4096]));
    assert!(one.settle(&ones));
    assert!(!two.settle(&zeros), "what it has read may be otherwise");
    let two = tree.stored_layers().unwrap();
    assert!(two.settle(&zeros), "it has read what the first has kept");
    assert_eq!(read(&tree, "a").unwrap(), [1; 10_000]);
}

#[test]
fn a_file_lost_before_it_was_kept_is_named() {
    let directory = host();
    let top = directory.path().join("top");
    let tree = over(Layer::directory(&top).unwrap());
    assert_eq!(tree.stat(tree.find("/sub/b").unwrap()).unwrap().size, 3);
    std::fs::remove_file(top.join("sub/b")).unwrap();
    let kept = tree.stored_layers().unwrap();
    let error = kept.read(|_, _| Ok::<_, Refused>(())).unwrap_err();
    assert!(error.to_string().contains("sub/b"), "{error}");
}

#[test]
fn a_directory_exchanged_for_a_link_is_not_followed() {
    let directory = host();
    let top = directory.path().join("top");
    let tree = over(Layer::directory(&top).unwrap());
    assert!(tree.list_path("sub").is_ok());
    std::fs::rename(top.join("sub"), top.join("gone")).unwrap();
    symlink(directory.path(), top.join("sub")).unwrap();
    std::fs::write(directory.path().join("b"), b"outside").unwrap();
    assert_eq!(read(&tree, "sub/b"), Err(Refused::Missing));
}

#[test]
fn names_that_were_looked_up_stay_when_their_directory_is_listed() {
    let directory = host();
    let top = directory.path().join("top");
    let tree = over(Layer::directory(&top).unwrap());
    assert_eq!(read(&tree, "sub/b").unwrap(), b"bee");
    let (file, below) = (tree.find("sub/b").unwrap(), tree.find("sub/deep").unwrap());
    assert_eq!(tree.find("sub/late"), Err(Refused::Missing));
    assert_eq!(tree.find("sub/b/c"), Err(Refused::NotDirectory));
    std::fs::write(top.join("sub/late"), b"late").unwrap();
    assert!(tree.find("sub/late").is_ok(), "the directory was not listed");
    std::fs::remove_file(top.join("sub/b")).unwrap();
    std::fs::remove_dir(top.join("sub/deep")).unwrap();
    std::fs::write(top.join("sub/deep"), b"a file now").unwrap();
    let entries = tree.list_path("sub").unwrap();
    let found = |name: &[u8]| {
        let entry = entries.iter().find(|entry| *entry.name == *name);
        entry.map(|entry| (entry.node, entry.kind))
    };
    assert_eq!(found(b"b"), Some((file, Kind::File)));
    assert_eq!(found(b"deep"), Some((below, Kind::Directory)));
    assert!(found(b"late").is_some() && found(b"up").is_some());
    assert_eq!(tree.find("sub/b").unwrap(), file);
    assert_eq!(tree.stat(file).unwrap().size, 3);
}

#[test]
fn a_tree_whose_used_directory_the_host_removed_or_replaced_is_not_saved() {
    for replace in [false, true] {
        let directory = host();
        let top = directory.path().join("top");
        let tree = over(Layer::directory(&top).unwrap());
        assert_eq!(read(&tree, "sub/b").unwrap(), b"bee");
        std::fs::remove_dir_all(top.join("sub")).unwrap();
        if replace {
            std::fs::write(top.join("sub"), b"a file now").unwrap();
        }
        let error = tree.capture_host_directories().unwrap_err();
        assert!(matches!(&error, Refused::Layer(text) if text.starts_with("sub: ")), "{error:?}");
    }
}

#[test]
fn a_file_that_the_host_replaced_by_another_kind_is_saved_as_that() {
    let directory = host();
    let top = directory.path().join("top");
    let tree = over(Layer::directory(&top).unwrap());
    let links = tree.stat(tree.find("sub").unwrap()).unwrap().links;
    assert!(tree.list_path("sub").unwrap().iter().any(|entry| *entry.name == *b"deep"));
    std::fs::remove_dir_all(top.join("sub/deep")).unwrap();
    std::fs::write(top.join("sub/deep"), b"a file now").unwrap();
    let captured = tree.capture_host_directories().unwrap();
    let entries = captured.list_path("sub").unwrap();
    let deep = entries.iter().find(|entry| *entry.name == *b"deep").unwrap();
    assert_eq!(deep.kind, Kind::File);
    assert_eq!(read(&captured, "sub/deep").unwrap(), b"a file now");
    let above = captured.find("sub").unwrap();
    assert_eq!(captured.stat(above).unwrap().links, links - 1);
}

#[test]
fn a_directory_with_many_lookups_is_listed() {
    let directory = host();
    let top = directory.path().join("top");
    let tree = over(Layer::directory(&top).unwrap());
    for number in 0..100 {
        assert_eq!(tree.find(format!("sub/{number}")), Err(Refused::Missing));
    }
    std::fs::write(top.join("sub/late"), b"late").unwrap();
    assert_eq!(tree.find("sub/late"), Err(Refused::Missing));
    assert_eq!(read(&tree, "sub/b").unwrap(), b"bee");
}

#[test]
fn layers_stack_and_mount_at_paths() {
    let directory = host();
    let other = tempfile::tempdir().unwrap();
    std::fs::create_dir(other.path().join("sub")).unwrap();
    std::fs::write(other.path().join("sub/b"), b"above").unwrap();
    std::fs::write(other.path().join("sub/c"), b"sea").unwrap();
    let first = Layer::directory(directory.path().join("top")).unwrap();
    let second = Layer::directory(other.path()).unwrap();
    let tree = empty().with_layer("/", &first).unwrap().with_layer("/", &second).unwrap();
    let mut tree = tree.with_layer("/mnt/x", &second).unwrap();
    assert_eq!(read(&tree, "sub/b").unwrap(), b"above");
    assert_eq!(read(&tree, "mnt/x/sub/c").unwrap(), b"sea");
    assert_eq!(read(&tree, "link").unwrap(), b"above");
    assert_eq!(tree.find("sub/deep/../..").unwrap(), Tree::ROOT);
    assert_eq!(tree.used(), Budget { bytes: 0, files: 0 });
    tree.write_path("sub/deep/d", b"dee", NOW).unwrap();
    let saved = tree.saved().unwrap();
    let base = empty().with_layer("/", &first).unwrap().with_layer("/", &second).unwrap();
    let again = base.with_layer("/mnt/x", &second).unwrap().restored(&saved).unwrap();
    assert_eq!(read(&again, "sub/deep/d").unwrap(), b"dee");
    assert!(again.with_layer("/", &first).is_err(), "a tree that was changed gets no layers");
}

fn zipped(files: &[(&str, &[u8])]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut zip = zip::ZipWriter::new(file.reopen().unwrap());
    for (index, (name, bytes)) in files.iter().enumerate() {
        let method = [zip::CompressionMethod::Deflated, zip::CompressionMethod::Stored][index % 2];
        let options = zip::write::SimpleFileOptions::default().compression_method(method);
        match name.strip_suffix('/') {
            Some(name) => zip.add_directory(name, options).unwrap(),
            None => {
                zip.start_file(*name, options).unwrap();
                zip.write_all(bytes).unwrap();
            }
        }
    }
    zip.finish().unwrap();
    file
}

#[test]
fn a_zip_is_read_as_it_is_and_a_bomb_is_refused() {
    let long: Vec<u8> = (0..100_000_u32).map(|i| (i / 7) as u8).collect();
    let file =
        zipped(&[("dir/packed", &long), ("dir/plain", b"plain"), ("empty/", b""), ("/abs", b"in")]);
    let limits = LayerLimits::default();
    let mut tree = over(Layer::open(file.path(), &limits).unwrap());
    assert_eq!(read(&tree, "dir/packed").unwrap(), long);
    assert_eq!(read(&tree, "dir/plain").unwrap(), b"plain");
    // An absolute name is one below the root.
    assert_eq!(read(&tree, "abs").unwrap(), b"in");
    let packed = tree.find("dir/packed").unwrap();
    tree.write(packed, 50_000, b"x", NOW).unwrap();
    assert!(tree.used().bytes < 10_000);
    let saved = tree.saved().unwrap();
    let again = over(Layer::zip(file.path(), &limits).unwrap()).restored(&saved).unwrap();
    assert_eq!(
        read(&again, "dir/packed").unwrap()[49_999..50_002],
        [long[49_999], b'x', long[50_001]]
    );

    let bomb = zipped(&[("zeros", &vec![0; 4 << 20])]);
    assert!(std::fs::metadata(bomb.path()).unwrap().len() < 10_000);
    let tight = LayerLimits { bytes: 1 << 20, files: 10 };
    assert!(matches!(Layer::zip(bomb.path(), &tight), Err(LayerError::Limit { .. })));
    let many: Vec<(String, Vec<u8>)> = (0..20).map(|i| (format!("f{i}"), Vec::new())).collect();
    let many: Vec<(&str, &[u8])> = many.iter().map(|(n, b)| (&**n, &**b)).collect();
    assert!(matches!(Layer::zip(zipped(&many).path(), &tight), Err(LayerError::Limit { .. })));

    // A file that unpacks to more than its stated size is refused when it is read.
    let mut bytes = std::fs::read(bomb.path()).unwrap();
    let (long, short) = ((4_u32 << 20).to_le_bytes(), 1000_u32.to_le_bytes());
    for at in 0..bytes.len() - 4 {
        if bytes[at..at + 4] == long {
            bytes[at..at + 4].copy_from_slice(&short);
        }
    }
    std::fs::write(bomb.path(), bytes).unwrap();
    if let Ok(layer) = Layer::zip(bomb.path(), &tight) {
        assert!(matches!(read(&over(layer), "zeros"), Err(Refused::Layer(_))));
    }

    let escaping = zipped(&[("../../etc/cron.d/x", b"evil")]);
    let layer = Layer::zip(escaping.path(), &limits).unwrap();
    assert!(matches!(empty().with_layer("/", &layer), Err(LayerError::Bad { .. })));
}

/// One entry of a tar, with any name.
fn written(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

#[test]
fn a_tar_is_read_plain_and_packed_and_its_names_stay_inside() {
    let mut out = tar::Builder::new(Vec::new());
    entry(&mut out, "/etc/absolute", FILE, "", b"inside");
    entry(&mut out, "./a/b", FILE, "", &[3; 5000]);
    entry(&mut out, "a/same", tar::EntryType::Link, "./a/b", b"");
    entry(&mut out, "up", tar::EntryType::Symlink, "../../../../etc/passwd", b"");
    entry(&mut out, "device", tar::EntryType::Char, "", b"");
    let long = "long/".repeat(40) + "name";
    let mut header = tar::Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o600);
    out.append_data(&mut header, &long, &b"far!"[..]).unwrap();
    let plain = out.into_inner().unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let packed = [plain.clone(), gzip.finish().unwrap(), zstd::encode_all(&plain[..], 1).unwrap()];
    for bytes in packed {
        let file = written(&bytes);
        let tree = over(Layer::open(file.path(), &LayerLimits::default()).unwrap());
        assert_eq!(read(&tree, "/etc/absolute").unwrap(), b"inside");
        assert_eq!(read(&tree, "a/same").unwrap(), [3; 5000]);
        assert_eq!(tree.stat_path("a/b").unwrap().links, 2);
        assert_eq!(tree.stat_path("a/b").unwrap().mode, 0o640);
        assert_eq!(read(&tree, &long).unwrap(), b"far!");
        assert_eq!(read(&tree, "up"), Err(Refused::Missing));
        assert_eq!(tree.find("device"), Err(Refused::Missing));
        let tight = LayerLimits { bytes: 4000, files: 100 };
        assert!(matches!(Layer::open(file.path(), &tight), Err(LayerError::Limit { .. })));
    }
    // A bomb is stopped while it is unpacked.
    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    bomb.write_all(&vec![0; 32 << 20]).unwrap();
    let bomb = written(&bomb.finish().unwrap());
    let tight = LayerLimits { bytes: 1 << 20, files: 10 };
    assert!(matches!(Layer::tar(bomb.path(), &tight), Err(LayerError::Limit { .. })));
    for hostile in ["../out", "a/../../out", "a/.."] {
        let file = written(&tarred(&[(hostile, FILE, "", b"x")]));
        let layer = Layer::tar(file.path(), &LayerLimits::default()).unwrap();
        assert!(
            matches!(empty().with_layer("/", &layer), Err(LayerError::Bad { .. })),
            "{hostile}"
        );
    }
    // Cut anywhere it is refused, or shows less; nothing panics.
    for cut in (0..plain.len()).step_by(97) {
        let file = written(&plain[..cut]);
        if let Ok(layer) = Layer::tar(file.path(), &LayerLimits::default())
            && let Ok(tree) = empty().with_layer("/", &layer)
        {
            let _ = read(&tree, "a/b");
        }
    }
}

#[test]
fn bytes_from_strangers_are_a_tree_or_an_error() {
    let mut tree = empty();
    tree.write_path("/a/b/c", &[9; 9000], NOW).unwrap();
    tree.write_path("/a/d", b"dee", NOW).unwrap();
    let node = tree.find("/a/d").unwrap();
    let open = tree.open(node, Access::both()).unwrap();
    tree.remove_path("/a/d", NOW).unwrap();
    assert_eq!(open.read_at(&tree, 0, &mut [0; 3]), Ok(3), "what is open stays");
    let saved = tree.saved().unwrap();
    let bytes = saved.to_bytes();
    assert_eq!(SavedTree::from_bytes(&bytes).unwrap(), saved);
    let again = empty().restored(&saved).unwrap();
    assert_eq!(open.read_at(&again, 0, &mut [0; 3]), Ok(3));
    let mut accepted = 0;
    for at in 0..saved.description.len() {
        for flip in [1, 0x80, 0xff] {
            let mut bytes = bytes.clone();
            bytes[8 + at] ^= flip;
            let Ok(saved) = SavedTree::from_bytes(&bytes) else { continue };
            if let Ok(mut tree) = empty().restored(&saved) {
                accepted += 1;
                // Every accepted archive can be walked, emptied and saved.
                for entry in tree.list(Tree::ROOT).unwrap() {
                    let _ = tree.remove_path(&*entry.name, NOW);
                }
                tree.saved().unwrap();
            }
        }
    }
    assert!(accepted > 0, "a changed time makes no difference");
    for cut in 0..bytes.len() {
        let short = SavedTree::from_bytes(&bytes[..cut]).ok();
        assert!(short.is_none_or(|saved| empty().restored(&saved).is_err()), "{cut}");
    }
}

#[test]
fn a_layer_of_one_file_has_its_path_and_is_identified_by_its_known_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("library.zip");
    std::fs::write(&path, [7; 10_000]).unwrap();
    let layer = |known: Option<&str>| {
        let layer = Layer::file(&path, "python.zip").unwrap();
        let layer = match known {
            Some(known) => layer.known_as(known),
            None => layer,
        };
        empty().with_layer("/usr/lib", &layer).unwrap()
    };
    let mut tree = layer(Some("library 1"));
    assert_eq!(read(&tree, "/usr/lib/python.zip").unwrap(), [7; 10_000]);
    assert_eq!(tree.list_path("/usr/lib").unwrap().len(), 1);
    assert_eq!(tree.used().bytes, 0, "what layers hold is not paid for");
    tree.write_path("/own", b"1", NOW).unwrap();

    // A given name decides; without a name the bytes decide.
    assert!(!tree.has_unknown_layers() && layer(None).has_unknown_layers());
    let saved = tree.saved().unwrap();
    let again = layer(Some("library 1")).restored(&saved).unwrap();
    assert_eq!(read(&again, "/own").unwrap(), b"1");
    for other in [Some("library 2"), None] {
        let refused = layer(other).restored(&saved).unwrap_err();
        assert!(refused.to_string().contains("known:library 1"), "{refused}");
    }
    // A host directory cannot have a name.
    let host = Layer::directory(directory.path()).unwrap().known_as("library 1");
    assert!(empty().with_layer("/", &host).unwrap().has_unknown_layers());
    for missing in [directory.path().join("missing"), directory.path().to_owned()] {
        assert!(Layer::file(missing, "x").is_err());
    }
}

#[test]
fn layers_that_were_kept_are_those_that_they_were_kept_of() {
    let zip = zipped(&[("a", &[7; 10_000]), ("sub/b", b"bee"), ("empty", b""), ("c", b"sea")]);
    let tar = written(&tarred(&[
        ("sub/d", tar::EntryType::Regular, "", b"dee"),
        ("up", tar::EntryType::Symlink, "sub/d", b""),
    ]));
    let limits = LayerLimits::default();
    let zip = Layer::open(zip.path(), &limits).unwrap();
    let tar = Layer::open(tar.path(), &limits).unwrap();
    let clean = empty().with_layer("/", &zip).unwrap().with_layer("/", &tar).unwrap();
    let mut tree = clean.clone();
    let node = tree.find("/a").unwrap();
    tree.write(node, 5000, b"changed", NOW).unwrap();
    tree.remove_path("/c", NOW).unwrap();
    tree.write_path("/own", b"1", NOW).unwrap();
    let saved = tree.saved().unwrap();
    assert_eq!(saved.pages.len(), 2, "what the layers hold is not among its own");

    let kept = LayerStore::new(&tree);
    let over = |description: &[u8]| kept.open(description);
    let lower = over(&kept.description).unwrap();
    assert_eq!(lower.used(), Budget { bytes: 0, files: 0 });
    let again = lower.restored(&saved).unwrap();
    assert_eq!(again.used(), tree.used());
    assert_eq!(again.saved().unwrap(), saved);
    for (old, new) in [(&clean, &lower), (&tree, &again)] {
        assert!(old.diff(new).unwrap().is_empty());
        for path in ["/a", "/sub/b", "/sub/d", "/up", "/empty", "/c", "/own"] {
            assert_eq!(read(old, path), read(new, path), "{path}");
        }
    }
    // And again, from the stored bytes, without the archives.
    let twice = again.stored_layers().unwrap();
    assert_eq!(twice.description(), kept.description);
    // With a host directory among them.
    let host = host();
    let mixed = clean.with_layer("/host", &Layer::directory(host.path()).unwrap()).unwrap();
    let alone = LayerStore::new(&mixed).tree(&mixed);
    for path in ["/a", "/sub/d", "/host/top/a", "/host/top/sub/b"] {
        assert_eq!(read(&mixed, path), read(&alone, path), "{path}");
    }

    let mut accepted = 0;
    for at in 0..kept.description.len() {
        for flip in [1, 0x80, 0xff] {
            let mut description = kept.description.clone();
            description[at] ^= flip;
            let Ok(mut tree) = over(&description) else { continue };
            accepted += 1;
            // Every accepted one can be walked, read, emptied and saved.
            for entry in tree.list(Tree::ROOT).unwrap() {
                let _ = read(&tree, &String::from_utf8_lossy(&entry.name));
                let _ = tree.remove_path(&*entry.name, NOW);
            }
            tree.saved().unwrap();
        }
    }
    assert!(accepted > 0, "a changed time makes no difference");
    for cut in 0..kept.description.len() {
        assert!(over(&kept.description[..cut]).is_err(), "{cut}");
    }
}
