//! Attributes of files in granted host directories: git finds the files of an index unchanged that
//! the host has written, without reading them.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use afresh_linux::{Program, Warm};

/// The usual user of guests, with which git compares the owner of files.
const USER: u32 = 1000;
/// A work tree of a hundred files, a symbolic link and two hard links.
const MAKE: &str = "git init -q . && mkdir a && for i in $(seq 100); do echo $i >a/$i; done && \
    ln -s a/1 link && ln a/3 hard && git add -A";

/// A work tree that this user has checked out on the host.
fn work_tree_of(user: u32) -> Option<tempfile::TempDir> {
    let caller = rustix::process::geteuid().as_raw();
    if caller != 0 && caller != user {
        println!("SKIPPED: user {caller} makes no files of user {user}");
        return None;
    }
    if !Path::new("/usr/bin/git").exists() {
        println!("SKIPPED: this host has no git");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut make = Command::new("/bin/sh");
    make.args(["-c", MAKE]).current_dir(folder.path()).env("HOME", folder.path());
    if caller == 0 {
        std::os::unix::fs::chown(folder.path(), Some(user), Some(user)).unwrap();
        make.uid(user).gid(user);
    }
    assert!(make.status().unwrap().success());
    Some(folder)
}

/// A work tree of the user of guests.
fn work_tree() -> Option<tempfile::TempDir> {
    work_tree_of(USER)
}

fn guest(folder: &Path, script: &str) -> Program {
    let script = format!("cd {} && {script}", folder.display());
    Program::new("/bin/sh").arg("-c").arg(script).env("HOME", "/tmp").grant(folder)
}

fn output(folder: &Path, script: &str) -> String {
    let run = guest(folder, script).run(b"").unwrap();
    assert_eq!(run.messages, "");
    String::from_utf8(run.output).unwrap()
}

/// `git diff-files` reads no file: it lists those whose attributes differ from the index.
#[test]
fn git_finds_the_attributes_of_its_index() {
    let Some(folder) = work_tree() else { return };
    // One of two hard links has another number than on the host.
    let listed = output(folder.path(), "git diff-files --name-only");
    assert!(["a/3\n", "hard\n"].contains(&listed.as_str()), "{listed}");
    let changed = "git update-index -q --refresh; echo more >>a/7; touch -d @1 a/8; \
        git diff-files --name-only";
    assert_eq!(output(folder.path(), changed), "a/7\na/8\n");
}

/// As `afresh exec` starts a guest, for callers of several users.
#[test]
fn git_finds_the_attributes_of_files_of_the_user_of_the_guest() {
    for user in [0, 501, 1001] {
        let Some(folder) = work_tree_of(user) else { continue };
        let listed = |user| {
            let run = guest(folder.path(), "git diff-files --name-only | wc -l").user(user, user);
            let run = run.run(b"").unwrap();
            (String::from_utf8(run.output).unwrap(), run.messages)
        };
        // One of the two hard links differs, and in a guest of another user all files do.
        assert_eq!(listed(user), ("1\n".to_owned(), String::new()), "user {user}");
        assert_eq!(listed(user + 1), ("102\n".to_owned(), String::new()), "user {user}");
    }
}

/// The files of a user namespace belong to its root, as those of the caller do.
#[test]
fn git_finds_the_attributes_of_files_of_root_as_root_of_a_user_namespace() {
    let Some(folder) = work_tree_of(0) else { return };
    // One of the two hard links differs.
    let script = "unshare -r git diff-files --name-only | wc -l; unshare -r git update-index -q \
        --refresh; echo more >>a/7; unshare -r git diff-files --name-only";
    assert_eq!(output(folder.path(), script), "1\na/7\n");
}

#[test]
fn lists_and_attributes_have_the_same_numbers() {
    let Some(folder) = work_tree() else { return };
    let script = "touch a/own; cp a/1 copy; \
        find . -printf '%i %p\\n' | sort >/tmp/found; \
        find . -exec stat -c '%i %n' {} + | sort >/tmp/seen; cmp /tmp/found /tmp/seen && \
        cut -d ' ' -f 1 /tmp/seen | uniq -d | wc -l";
    assert_eq!(output(folder.path(), script), "0\n");
}

#[test]
fn a_restored_guest_sees_the_same_numbers() {
    let Some(folder) = work_tree() else { return };
    let script = "echo more >>a/1; numbers() { stat -c %i a a/1 a/3 hard link; }; numbers >/tmp/n; \
        while read line; do numbers | cmp - /tmp/n && echo same $(git diff-files --name-only); \
        done";
    let warm = guest(folder.path(), script).request("\n").warm().unwrap();
    assert_eq!(warm.instance().call(b"\n").unwrap(), b"same a/1 hard\n");
    let frozen = warm.freeze().unwrap();
    let replaced: PathBuf = folder.path().join("a/2");
    std::fs::remove_file(&replaced).unwrap();
    std::fs::write(&replaced, b"new").unwrap();
    let opener = Program::new("/").grant(folder.path());
    let thawed = Warm::thaw(&frozen, &opener).unwrap();
    for _ in 0..2 {
        assert_eq!(thawed.instance().call(b"\n").unwrap(), b"same a/1 a/2 hard\n");
    }
}
