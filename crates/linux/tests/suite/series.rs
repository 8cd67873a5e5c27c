//! Series of calls of programs whose text is not changed: the first calls reach the sentry, and the
//! code inside the process answers the others. Their results are the native ones.

use std::path::Path;
use std::process::Command;

use afresh_linux::{End, Program};

use crate::common;

/// The output of the program natively and in a guest, and the messages of the guest.
fn both(native: &[&str], guest: &[&str], grant: Option<&Path>) -> Option<(String, String, String)> {
    let path = common::compiled("series.c", &[])?;
    let expected = Command::new(&path).args(native).output().unwrap();
    assert!(expected.status.success(), "{expected:?}");
    let program = Program::new(&path).env("GUEST", "1").directory("/");
    let program = guest.iter().copied().fold(program, Program::arg);
    let program = grant.into_iter().fold(program, Program::grant);
    let program =
        program.user(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let run = common::here(program.run(b""))?;
    assert_eq!(run.end, End::Exit(0), "{}", run.messages);
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Some((text(expected.stdout), text(run.output), run.messages))
}

/// A directory with files, links and directories that changed long ago.
fn directory(parent: &Path, name: &str) -> String {
    let directory = parent.join(name);
    std::fs::create_dir(&directory).unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    for number in 0..600 {
        let path = directory.join(format!("f{number:04}"));
        match number {
            100..110 => std::os::unix::fs::symlink("somewhere", &path).unwrap(),
            200..205 => std::fs::create_dir(&path).unwrap(),
            _ => std::fs::write(&path, vec![b'a'; number]).unwrap(),
        }
        if !(100..205).contains(&number) {
            std::fs::File::open(&path).unwrap().set_modified(old).unwrap();
        }
    }
    directory.to_str().unwrap().to_owned()
}

/// Lines without the times of links and directories, which were made a moment ago.
fn comparable(output: &str, directory: &str) -> Vec<String> {
    let lines = output.lines().map(|line| line.replace(directory, "DIR"));
    let settled = |line: String| {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            [name, mode, size, links, time, owner] if *time != "1000000000" => {
                // A host file system decides the size and the links of a directory.
                let is_directory = mode.len() == 5;
                let (size, links) = if is_directory { ("", "") } else { (*size, *links) };
                [name, mode, size, links, owner].join(" ")
            }
            _ => line,
        }
    };
    lines.map(settled).collect()
}

#[test]
fn actions_of_signals_are_the_native_ones() {
    let Some((expected, output, messages)) = both(&["signals"], &["signals"], None) else { return };
    assert_eq!(output, expected);
    let changed = 1u64 << (libc::SIGALRM - 1) | 1 << (libc::SIGCHLD - 1);
    assert!(messages.contains(&format!("changed {changed:x}\n")), "{messages}");
}

#[test]
fn lookups_of_files_are_the_native_ones() {
    let parent = tempfile::tempdir().unwrap();
    let (native, guest) = (directory(parent.path(), "native"), directory(parent.path(), "guest"));
    let ran = both(&["files", &native], &["files", &guest], Some(parent.path()));
    let Some((expected, output, messages)) = ran else { return };
    assert_eq!(comparable(&output, &guest), comparable(&expected, &native));
    let inside = messages.lines().filter_map(|line| line.strip_prefix("inside "));
    let inside: Vec<usize> =
        inside.map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect();
    assert_eq!(inside.len(), 2, "{messages}");
    assert!(inside.iter().all(|inside| *inside > 300), "{messages}");
}

#[test]
fn forged_words_harm_the_guest_alone() {
    let parent = tempfile::tempdir().unwrap();
    let guest = directory(parent.path(), "guest");
    let ran = both(&["show"], &["forge", &guest], Some(parent.path()));
    let Some((_, output, _)) = ran else { return };
    let mut expected = "0 5\n".repeat(12);
    expected.push_str("forged 0\n");
    assert_eq!(output, expected);
}
