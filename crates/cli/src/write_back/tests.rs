//! Writing changed files to real directories.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;

use afresh::files::{Budget, Layer, New, Refused, Rename, Time};
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr};
use rustix::io::Errno;

use super::*;

/// Writes the changes between two trees below `top`.
fn write(top: &Path, before: &Tree, after: &Tree) -> Result<(), String> {
    let listed = changes(before, after).unwrap();
    let written = write_back(&[top.to_owned()], &listed, (before, after));
    written.map_err(|error| error.to_string())
}

#[test]
fn holes_stay_holes_and_other_nodes_than_files_are_reported_after_all_files() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
    let (before, now) = (Tree::new(Budget::default()), Time::default());
    let mut after = before.clone();
    let node = after.write_path(inside("holes"), b"first", now).unwrap();
    after.write(node, 1 << 33, b"last", now).unwrap();
    after.set_size(node, 1 << 35, now).unwrap();
    let above = after.find(inside("")).unwrap();
    after.create(above, b"a\npipe", New::Device(1), 0o600, now).unwrap();
    let message = write(&top, &before, &after).unwrap_err();
    assert!(message.contains("a\\u000apipe (Device)"), "{message}");
    let stat = std::fs::metadata(top.join("holes")).unwrap();
    assert_eq!(stat.len(), 1 << 35);
    assert!(stat.blocks() * 512 < 1 << 20, "{}", stat.blocks());
    let mut file = File::open(top.join("holes")).unwrap();
    let mut found = [0; 4];
    file.seek(SeekFrom::Start(1 << 33)).unwrap();
    std::io::Read::read_exact(&mut file, &mut found).unwrap();
    assert_eq!(&found, b"last");
}

#[test]
fn modes_and_plain_attributes_are_written_and_others_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let host = File::open(&top).unwrap();
    if fsetxattr(&host, "user.old", b"x", XattrFlags::empty()) == Err(Errno::NOTSUP) {
        return println!("SKIPPED: the file system of {} has no attributes", top.display());
    }
    let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
    let (mut before, now) = (Tree::new(Budget::default()), Time::default());
    let file = before.write_path(inside("below/file"), b"bytes", now).unwrap();
    let below = before.find(inside("below")).unwrap();
    let mut after = before.clone();
    let names = |path: &str| -> Vec<String> {
        let mut list = vec![0; 256];
        let len = rustix::fs::listxattr(top.join(path), &mut list[..]).unwrap();
        let all = String::from_utf8_lossy(&list[..len]).into_owned();
        let own = all.split_terminator('\0').filter(|name| name.starts_with("user."));
        own.map(str::to_owned).collect()
    };
    let mut change = |change: &dyn Fn(&mut Tree)| {
        change(&mut after);
        let written = write(&top, &before, &after);
        before = after.clone();
        written
    };
    change(&|tree| {
        tree.set_mode(file, 0o4751, now).unwrap();
        for node in [file, below] {
            tree.set_attribute(node, b"user.one", Some(b"1"), now).unwrap();
            tree.set_attribute(node, b"user.two", Some(b""), now).unwrap();
        }
    })
    .unwrap();
    change(&|tree| {
        tree.set_mode(below, 0o710, now).unwrap();
        tree.set_attribute(file, b"user.two", None, now).unwrap();
        tree.set_attribute(below, b"user.two", None, now).unwrap();
    })
    .unwrap();
    assert_eq!(
        (names("below"), names("below/file")),
        (vec!["user.one".to_owned()], vec!["user.one".to_owned()])
    );
    let mode = |path: &str| std::fs::metadata(top.join(path)).unwrap().mode() & 0o7777;
    assert_eq!((mode("below"), mode("below/file")), (0o710, 0o751));
    let told = change(&|tree| {
        tree.set_attribute(file, b"system.posix_acl_access", Some(b"list"), now).unwrap();
    });
    let told = told.unwrap_err();
    assert!(told.contains("below/file (system.posix_acl_access)"), "{told}");
    assert_eq!(names("below/file"), ["user.one"]);
}

/// A directory of the host with attributes, and its path.
fn folder_with_attributes() -> Option<(tempfile::TempDir, std::path::PathBuf)> {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let host = File::open(&top).unwrap();
    if fsetxattr(&host, "user.old", b"x", XattrFlags::empty()) == Err(Errno::NOTSUP) {
        println!("SKIPPED: the file system of {} has no attributes", top.display());
        return None;
    }
    Some((folder, top))
}

fn value(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 256];
    let len = fgetxattr(File::open(path).unwrap(), name, &mut value[..]).ok()?;
    value.truncate(len);
    Some(value)
}

#[test]
fn an_attribute_that_the_host_refuses_or_that_gives_rights_is_reported_and_all_else_written() {
    let Some((_folder, top)) = folder_with_attributes() else { return };
    let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
    let (before, now) = (Tree::new(Budget::default()), Time::default());
    let mut after = before.clone();
    let first = after.write_path(inside("closed/first"), b"1", now).unwrap();
    after.write_path(inside("last"), b"2", now).unwrap();
    let rights = ["user.containers.override_stat", "user.overlay.opaque", "user.virtfs.uid"];
    for name in rights {
        after.set_attribute(first, name.as_bytes(), Some(b"0:0:4755"), now).unwrap();
    }
    // No name is empty in Linux.
    after.set_attribute(first, b"user.", Some(b"x"), now).unwrap();
    after.set_attribute(first, b"user.plain", Some(b"y"), now).unwrap();
    let closed = after.find(inside("closed")).unwrap();
    after.set_attribute(closed, b"user.plain", Some(b"z"), now).unwrap();
    after.set_mode(closed, 0o555, now).unwrap();
    let told = write(&top, &before, &after).unwrap_err();
    for name in rights {
        assert!(told.contains(&format!("closed/first ({name})")), "{told}");
        assert_eq!(value(&top.join("closed/first"), name), None);
    }
    assert!(told.contains("closed/first (user.: "), "{told}");
    assert_eq!(value(&top.join("closed/first"), "user.plain"), Some(b"y".to_vec()));
    assert_eq!(value(&top.join("closed"), "user.plain"), Some(b"z".to_vec()));
    assert_eq!(std::fs::metadata(top.join("closed")).unwrap().mode() & 0o7777, 0o555);
    assert_eq!(std::fs::read(top.join("last")).unwrap(), b"2");
    assert_eq!(top.join("closed").read_dir().unwrap().count(), 1);
    std::fs::set_permissions(
        top.join("closed"),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
}

#[test]
fn a_file_with_new_attributes_alone_stays_and_a_new_one_has_those_of_the_host() {
    let Some((_folder, top)) = folder_with_attributes() else { return };
    let path = top.join("file");
    let inside = path.to_str().unwrap();
    let (mut before, now) = (Tree::new(Budget::default()), Time::default());
    let node = before.write_path(inside, b"guest", now).unwrap();
    std::fs::write(&path, b"newer").unwrap();
    let host = File::open(&path).unwrap();
    fsetxattr(&host, "user.host", b"h", XattrFlags::empty()).unwrap();
    let inode = host.metadata().unwrap().ino();
    let mut after = before.clone();
    after.set_attribute(node, b"user.guest", Some(b"g"), now).unwrap();
    after.set_mode(node, 0o440, now).unwrap();
    write(&top, &before, &after).unwrap();
    let stat = std::fs::metadata(&path).unwrap();
    assert_eq!((stat.ino(), stat.mode() & 0o7777), (inode, 0o440));
    assert_eq!(std::fs::read(&path).unwrap(), b"newer");
    let both = || (value(&path, "user.host"), value(&path, "user.guest"));
    assert_eq!(both(), (Some(b"h".to_vec()), Some(b"g".to_vec())));
    // A file with two names may be outside of the directory, too.
    std::fs::hard_link(&path, top.join("other")).unwrap();
    let before = after.clone();
    after.set_mode(node, 0o400, now).unwrap();
    write(&top, &before, &after).unwrap();
    assert_eq!(std::fs::metadata(top.join("other")).unwrap().mode() & 0o7777, 0o440);
    assert_eq!(std::fs::read(&path).unwrap(), b"guest");
    assert_eq!(both(), (Some(b"h".to_vec()), Some(b"g".to_vec())));
}

#[test]
fn a_path_that_cannot_be_changed_is_reported_and_all_others_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let top = folder.path().canonicalize().unwrap();
    let inside = |name: &str| top.join(name).to_str().unwrap().to_owned();
    let (mut before, now) = (Tree::new(Budget::default()), Time::default());
    before.write_path(inside("build/visible"), b"1", now).unwrap();
    let after = {
        let mut after = before.clone();
        let build = after.find(inside("build")).unwrap();
        after.remove_file(build, b"visible", now).unwrap();
        let above = after.find(inside("")).unwrap();
        after.remove_directory(above, b"build", now).unwrap();
        after.write_path(inside(".afresh-partial/file"), b"2", now).unwrap();
        after.write_path(inside("last"), b"3", now).unwrap();
        after
    };
    std::fs::create_dir(top.join("build")).unwrap();
    std::fs::write(top.join("build/visible"), b"1").unwrap();
    // The guest does not see a file of this kind.
    std::fs::write(top.join("build/hidden"), b"host").unwrap();
    let told = write(&top, &before, &after).unwrap_err();
    assert!(told.contains("/build (Directory not empty"), "{told}");
    let names = |path: &str| {
        let entries = top.join(path).read_dir().unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names("build"), ["hidden"]);
    assert_eq!(names(""), [".afresh-partial", "build", "last"]);
    assert_eq!(std::fs::read(top.join(".afresh-partial/file")).unwrap(), b"2");
}

#[test]
fn a_listed_name_stays_on_its_line() {
    let (before, now) = (Tree::new(Budget::default()), Time::default());
    let mut after = before.clone();
    after.write_path("/a\nD \u{e9}\\\u{1b}", b"", now).unwrap();
    let above = after.find("/").unwrap();
    after.create(above, b"\xff", New::File, 0o600, now).unwrap();
    let mut out = Vec::new();
    list(&changes(&before, &after).unwrap(), &mut out).unwrap();
    let expected = "A /a\\nD \u{e9}\\\\\\u{1b}\nA /\\xff\n";
    assert_eq!(String::from_utf8(out).unwrap(), expected);
}

/// A directory `top` of the host with the file `k/y`, and the path of another directory.
fn granted() -> (tempfile::TempDir, PathBuf, PathBuf, Tree) {
    let folder = tempfile::tempdir().unwrap();
    let host = folder.path().canonicalize().unwrap();
    let (top, other) = (host.join("top"), host.join("other"));
    std::fs::create_dir_all(top.join("k")).unwrap();
    std::fs::write(top.join("k/y"), "y\n").unwrap();
    std::fs::create_dir(top.join("k/empty")).unwrap();
    std::fs::create_dir_all(top.join("d/below")).unwrap();
    std::os::unix::fs::symlink("y", top.join("k/link")).unwrap();
    let layer = Layer::directory(&top).unwrap();
    let tree = Tree::new(Budget::default()).with_layer(top.to_str().unwrap(), &layer).unwrap();
    (folder, top, other, tree)
}

fn rename(tree: &mut Tree, from: &Path, to: &Path) -> Result<(), Refused> {
    let above = |tree: &Tree, path: &Path| tree.find(path.parent().unwrap().to_str().unwrap());
    let name = |path: &Path| path.file_name().unwrap().as_bytes().to_owned();
    let (above_from, above_to) = (above(tree, from)?, above(tree, to)?);
    let how = Rename::Replace;
    tree.rename(above_from, &name(from), above_to, &name(to), how, Time::default())
}

#[test]
fn a_granted_directory_keeps_its_name_and_gets_its_mode() {
    let (_folder, top, other, before) = granted();
    let mut after = before.clone();
    assert_eq!(rename(&mut after, &top, &other), Err(Refused::Busy));
    let node = after.find(top.to_str().unwrap()).unwrap();
    after.set_mode(node, 0o1710, Time::default()).unwrap();
    write(&top, &before, &after).unwrap();
    assert_eq!(std::fs::metadata(&top).unwrap().mode() & 0o7777, 0o1710);
}

#[test]
fn a_file_that_is_moved_to_a_place_that_is_not_written_is_kept() {
    let (_folder, top, other, before) = granted();
    let mut after = before.clone();
    rename(&mut after, &top.join("k"), &other).unwrap();
    after.write_path(top.join("new").to_str().unwrap(), b"new", Time::default()).unwrap();
    let message = write(&top, &before, &after).unwrap_err();
    let expected = format!("{} (moved to {}, which", top.join("k").display(), other.display());
    assert!(message.contains(&expected), "{message}");
    assert_eq!(message.matches("moved to").count(), 1, "{message}");
    assert_eq!(std::fs::read(top.join("k/y")).unwrap(), b"y\n");
    assert_eq!(std::fs::read(top.join("new")).unwrap(), b"new");
    // The directory that has both was renamed.
    let mut after = before.clone();
    let (from, to) = (top.parent().unwrap(), other.with_file_name("moved"));
    let to = from.parent().unwrap().join(to.file_name().unwrap());
    rename(&mut after, from, &to).unwrap();
    assert!(write(&top, &before, &after).unwrap_err().contains("has moved or removed"));
    assert_eq!(std::fs::read(top.join("k/y")).unwrap(), b"y\n");
}

#[test]
fn a_file_that_the_host_has_changed_is_kept_and_reported() {
    let now = Time::default();
    let path = |top: &Path, name: &str| top.join(name).to_str().unwrap().to_owned();
    // A change of `k/y` or `new` by the guest, and one by the host.
    type Step<'a> = &'a dyn Fn(&mut Tree, &Path);
    type HostStep<'a> = &'a dyn Fn(&Path);
    let look: Step<'_> = &|tree, top| {
        tree.stat_path(path(top, "k/y")).unwrap();
    };
    let append: Step<'_> = &|tree, top| {
        let node = tree.find(path(top, "k/y")).unwrap();
        let size = tree.stat(node).unwrap().size;
        tree.write(node, size, b"more\n", now).unwrap();
    };
    let remove: Step<'_> = &|tree, top| tree.remove_path(path(top, "k/y"), now).unwrap();
    let add: Step<'_> = &|tree, top| {
        tree.write_path(path(top, "new"), b"guest", now).unwrap();
    };
    // With another mode, the moved file refers to the bytes that were seen.
    let rename_unread: Step<'_> = &|tree, top| {
        let node = tree.find(path(top, "k/y")).unwrap();
        tree.set_mode(node, 0o600, now).unwrap();
        rename(tree, &top.join("k/y"), &top.join("k/moved")).unwrap();
    };
    let rename_to_new: Step<'_> =
        &|tree, top| rename(tree, &top.join("k/y"), &top.join("new")).unwrap();
    let make_directory: Step<'_> = &|tree, top| {
        tree.make_directories(path(top, "new"), now).unwrap();
    };
    let remove_link: Step<'_> = &|tree, top| {
        let above = tree.find(path(top, "k")).unwrap();
        tree.remove_file(above, b"link", now).unwrap();
    };
    let remove_directory: Step<'_> = &|tree, top| {
        let above = tree.find(path(top, "k")).unwrap();
        tree.remove_directory(above, b"empty", now).unwrap();
    };
    let replace_link: HostStep<'_> = &|top| {
        std::fs::remove_file(top.join("k/link")).unwrap();
        std::fs::write(top.join("k/link"), "precious").unwrap();
    };
    let replace_directory: HostStep<'_> = &|top| {
        std::fs::remove_dir(top.join("k/empty")).unwrap();
        std::fs::write(top.join("k/empty"), "precious").unwrap();
    };
    let overwrite: HostStep<'_> = &|top| std::fs::write(top.join("k/y"), "longer\n").unwrap();
    let replace: HostStep<'_> = &|top| {
        std::fs::write(top.join("k/y2"), "z\n").unwrap();
        std::fs::rename(top.join("k/y2"), top.join("k/y")).unwrap();
    };
    let make: HostStep<'_> = &|top| std::fs::write(top.join("new"), "host").unwrap();
    for (number, (guest, host, file, content)) in [
        (append, overwrite, "k/y", "longer\n"),
        (append, replace, "k/y", "z\n"),
        (remove, overwrite, "k/y", "longer\n"),
        (add, make, "new", "host"),
        (rename_unread, overwrite, "k/y", "longer\n"),
        (remove_link, replace_link, "k/link", "precious"),
        (remove_directory, replace_directory, "k/empty", "precious"),
        (rename_to_new, make, "k/y", "y\n"),
        (make_directory, make, "new", "host"),
    ]
    .into_iter()
    .enumerate()
    {
        let (_folder, top, _, before) = granted();
        let mut after = before.clone();
        look(&mut after, &top);
        guest(&mut after, &top);
        after.write_path(path(&top, "out"), b"out", now).unwrap();
        host(&top);
        let message = write(&top, &before, &after).unwrap_err();
        assert!(message.contains(top.join(file).to_str().unwrap()), "{number}: {message}");
        assert_eq!(std::fs::read_to_string(top.join(file)).unwrap(), content, "{number}");
        assert_eq!(std::fs::read(top.join("out")).unwrap(), b"out", "{number}");
    }
}

#[test]
fn a_file_that_was_moved_unread_has_its_present_bytes() {
    let (_folder, top, _, before) = granted();
    let mut after = before.clone();
    after.stat_path(top.join("k/y").to_str().unwrap()).unwrap();
    rename(&mut after, &top.join("k"), &top.join("e")).unwrap();
    std::fs::write(top.join("k/y"), "longer\n").unwrap();
    write(&top, &before, &after).unwrap();
    assert_eq!(std::fs::read(top.join("e/y")).unwrap(), b"longer\n");
    assert!(!top.join("k").exists());
}

#[test]
fn nothing_is_written_for_a_directory_that_was_moved_within_another_grant() {
    let (_folder, top, _, before) = granted();
    let mut after = before.clone();
    let inner = top.join("k");
    rename(&mut after, &inner, &top.join("e")).unwrap();
    after.write_path(inner.join("y").to_str().unwrap(), b"new", Time::default()).unwrap();
    let message = write(&inner, &before, &after).unwrap_err();
    assert!(message.contains("moved or removed the directory itself"), "{message}");
    assert_eq!(std::fs::read(inner.join("y")).unwrap(), b"y\n");
}

#[test]
fn a_moved_file_keeps_its_old_name_where_its_new_one_cannot_be_written() {
    let (_folder, top, _, before) = granted();
    let mut after = before.clone();
    rename(&mut after, &top.join("k/y"), &top.join("k/empty/y")).unwrap();
    after.write_path(top.join("new").to_str().unwrap(), b"new", Time::default()).unwrap();
    // The host has removed the directory.
    std::fs::remove_dir(top.join("k/empty")).unwrap();
    let message = write(&top, &before, &after).unwrap_err();
    assert!(message.contains("k/empty/y ("), "{message}");
    assert_eq!(std::fs::read(top.join("k/y")).unwrap(), b"y\n");
    assert_eq!(std::fs::read(top.join("new")).unwrap(), b"new");
}

#[test]
fn a_file_that_was_moved_between_two_directories_is_in_one_of_them() {
    for reversed in [false, true] {
        let (_folder, top, _, before) = granted();
        let mut after = before.clone();
        let mut tops = [top.join("k"), top.join("d")];
        rename(&mut after, &tops[0].join("y"), &tops[1].join("below/y")).unwrap();
        // The host has removed the directory.
        std::fs::remove_dir(tops[1].join("below")).unwrap();
        if reversed {
            tops.reverse();
        }
        let listed = changes(&before, &after).unwrap();
        let error = write_back(&tops, &listed, (&before, &after)).unwrap_err().to_string();
        assert!(error.contains("moved to"), "{reversed}: {error}");
        assert_eq!(std::fs::read(top.join("k/y")).unwrap(), b"y\n", "{reversed}");
    }
}

#[test]
fn a_file_takes_the_place_of_a_directory_and_a_directory_that_of_a_file() {
    let (_folder, top, _, before) = granted();
    let (mut after, now) = (before.clone(), Time::default());
    let path = |name: &str| top.join(name).to_str().unwrap().to_owned();
    rename(&mut after, &top.join("k"), &top.join("moved")).unwrap();
    after.write_path(path("k"), b"file", now).unwrap();
    rename(&mut after, &top.join("moved/y"), &top.join("y")).unwrap();
    after.write_path(path("moved/y/below"), b"below", now).unwrap();
    write(&top, &before, &after).unwrap();
    for (name, content) in [("k", "file"), ("y", "y\n"), ("moved/y/below", "below")] {
        assert_eq!(std::fs::read_to_string(top.join(name)).unwrap(), content, "{name}");
    }
}
