//! A program runs from its start to its end, its system calls served by us.

use crate::common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use afresh_linux::{End, Program, WarmError, cached_file_bytes};
use afresh_sys::planted::{self, Bug};
use afresh_sys::{PAGE_SIZE, run_isolated};

fn runs(flags: &[&str]) {
    let Some(path) = common::compiled("hello.c", flags) else { return };
    let program = Program::new(&path).arg("one").arg("two words").env("COLOUR", "green");
    let Some(run) = common::here(program.run(b"what goes in\n")) else { return };
    assert_eq!(run.end, End::Exit(13), "{}", run.messages);
    assert_eq!(run.output, b"3 two words green\nwhat goes in\n");
    assert_eq!(run.messages, "");
    assert!(!Path::new("/usr/new").exists() && !Path::new("/tmp/other").exists());
}

#[test]
fn a_static_program_runs() {
    runs(&["-static"]);
}

#[test]
fn a_static_position_independent_program_runs() {
    runs(&["-static-pie"]);
}

#[test]
fn a_dynamic_program_runs() {
    runs(&[]);
}

#[test]
fn a_file_that_is_no_program_is_refused_by_name() {
    let refused = |program: Program| program.run(b"").expect_err("it cannot run");
    assert!(matches!(refused(Program::new("/nowhere/at/all")), WarmError::NotFound(_)));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("by-nobody");
    std::fs::write(&path, "#!/nowhere/at/all -x\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let script = refused(Program::new(&path)).to_string();
    if !script.contains("cannot run Linux guests") {
        assert!(script.contains("is a script for /nowhere/at/all -x"), "{script}");
        assert!(script.contains("as its argument"), "{script}");
    }
    let shims = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shims");
    std::fs::create_dir_all(&shims).unwrap();
    let shim = shims.join("python3");
    std::fs::write(&shim, "#!/usr/bin/env bash\nexec something else\n").unwrap();
    let error = refused(Program::new(&shim)).to_string();
    if !error.contains("cannot run Linux guests") {
        assert!(error.contains("for bash") && error.contains("pyenv which python3"), "{error}");
    }
}

#[test]
fn a_script_is_run_by_what_its_first_line_names() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("script");
    std::fs::write(&path, "#!/bin/sh -e\necho $0 $1\nreadlink /proc/self/exe\nfalse\necho no\n")
        .unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = Program::new(&path).arg("one").env("PATH", "/usr/bin:/bin").run(b"");
    let Some(run) = common::here(run) else { return };
    let output = String::from_utf8_lossy(&run.output);
    assert!(output.starts_with(&format!("{} one\n/", path.display())), "{run:?}");
    assert!(!output.contains("no\n") && run.end == afresh_linux::End::Exit(1), "{run:?}");
}

#[test]
fn a_guest_opens_what_was_granted_and_nothing_else() {
    let Some(path) = common::compiled("open.c", &["-static"]) else { return };
    let held = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (file, link) = (held.join("Cargo.toml"), path.with_extension("link"));
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink("/etc/login.defs", &link).unwrap();
    let own = [
        "/proc/1/mem",
        "/proc/1/environ",
        "/proc/kallsyms",
        "/sys/firmware",
        "/dev/kmsg",
        "/dev/mem",
    ];
    let opened = |program: Program| {
        let named =
            own.iter().map(Path::new).chain([file.as_path(), &link, Path::new("/etc/login.defs")]);
        let program = named.fold(program, |program, path| program.arg(path));
        Some(String::from_utf8(common::here(program.run(b""))?.output).unwrap())
    };
    let Some(none) = opened(Program::new(&path)) else { return };
    assert_eq!(none, "");
    // A granted link leads to its target; a link in a granted directory leads only to granted
    // files.
    let directory = Program::new(&path).grant(held).grant(link.parent().unwrap());
    assert_eq!(opened(directory).unwrap(), format!("{}\n", file.display()));
    // Granting the root grants everything except the kernel's files about the host and the sentry.
    let all = format!("{}\n{}\n/etc/login.defs\n", file.display(), link.display());
    assert_eq!(opened(Program::new(&path).grant("/")).unwrap(), all);
}

#[test]
fn a_run_without_a_frozen_state_copies_no_host_file() {
    const NAME: &str = "start_to_end::a_run_without_a_frozen_state_copies_no_host_file";
    run_isolated(NAME, || {
        // A twin is a copy.
        let program = Program::new("/bin/true").answer_inside(false);
        let Some(run) = common::here(program.run(b"")) else { return };
        assert_eq!(run.end, End::Exit(0));
        assert_eq!(cached_file_bytes(), 0);
        if common::here(Program::new("/bin/cat").warm()).is_some() {
            assert!(cached_file_bytes() > 0);
        }
    });
}

#[test]
fn no_mapping_of_a_host_file_changes_it() {
    let Some(path) = common::compiled("mapped_host_file.c", &[]) else { return };
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mapped-host-file");
    std::fs::write(&file, [b'a'; 2 * PAGE_SIZE]).unwrap();
    let program = Program::new(path).arg(&file).grant(&file);
    let Some(run) = common::here(program.run(b"")) else { return };
    let output = String::from_utf8(run.output).unwrap();
    assert_eq!(run.end, End::Exit(0), "{output}{}", run.messages);
    let expected = "child 0 ba\nshared 13\nprocess_vm_writev -1\nmoved aba\nafter a write dda\n";
    assert_eq!(output, expected);
    assert_eq!(std::fs::read(&file).unwrap(), [b'a'; 2 * PAGE_SIZE]);
}

#[test]
fn a_guest_knows_who_it_is_and_its_own_machine() {
    let Some(python) = common::python() else { return };
    let script = "import grp, os, pwd, socket
own = pwd.getpwuid(os.getuid())
print(own.pw_name, os.path.expanduser('~'), os.path.isdir(own.pw_dir), grp.getgrgid(os.getgid()).gr_name, len(pwd.getpwall()))
print(socket.gethostbyname(socket.gethostname()), socket.getservbyname('https'))";
    let program = python.arg("-c").arg(script);
    let Some(run) = common::here(program.clone().run(b"")) else { return };
    let own = "user /home/user True user 3\n127.0.0.1 443\n";
    assert_eq!(String::from_utf8_lossy(&run.output), own, "{run:?}");

    // A given file replaces the generated one.
    let passwd = "mine:x:1000:1000::/tmp:/bin/sh\n";
    let run = program.file("/etc/passwd", passwd).run(b"").unwrap();
    assert!(run.output.starts_with(b"mine /tmp True user 1\n"), "{run:?}");
}

/// The storage of the pages in an image.
fn places(image: &afresh_memory::Image) -> std::collections::HashSet<usize> {
    let pages = image.stored().flat_map(|run| run.start..run.end());
    pages.map(|page| image.page(page).unwrap().as_ptr() as usize).collect()
}

/// The content of a library is in memory once, however many warm programs have it mapped, and is
/// never copied.
#[test]
fn warm_programs_share_what_their_libraries_hold() {
    let Some(program) = common::python() else { return };
    let program = program.arg("-c").arg("import sys; [print(line, end='') for line in sys.stdin]");
    let Some(one) = common::here(program.warm()) else { return };
    let other = program.warm().unwrap();
    let images = [&one, &other].map(|warm| warm.freeze().unwrap().image().clone());
    let [one, other] = images.each_ref().map(places);
    let (shared, all) = (one.intersection(&other).count(), one.len());
    assert!(3 * shared > all, "{shared} of {all} pages are shared");
}

/// Maps a file of some size, writes to a page of it in the middle, and checks that and the rest.
const MAPS: &str = r#"
import mmap, sys
name, held = "/bin/bash", None
for line in sys.stdin:
    with open(name, "rb") as file: whole = file.read()
    if line == "map\n":
        with open(name, "rb") as file: held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if line == "write\n": held[500000:500003] = b"new"
    if line != "map\n":
        middle = held[500000:500003] == b"new"
        rest = held[:500000] == whole[:500000] and held[500003:] == whole[500003:]
        print(middle, rest, flush=True)
    else: print("mapped", flush=True)
"#;

/// So it is in a state that is taken after calls, where memory is watched.
#[test]
fn mappings_of_a_call_are_listed_and_its_writes_are_kept() {
    let Some(program) = common::python() else { return };
    let program = program.arg("-c").arg(MAPS);
    let Some(warm) = common::here(program.warm()) else { return };
    let mut instance = warm.instance();
    let ask = |instance: &mut afresh_linux::Instance, request: &str| {
        String::from_utf8(instance.call(request.as_bytes()).unwrap()).unwrap()
    };
    assert_eq!(ask(&mut instance, "map\n"), "mapped\n");
    // One state before it is written to, and two after.
    let before = instance.freeze().unwrap();
    assert_eq!(ask(&mut instance, "write\n"), "True True\n");
    let after = instance.freeze().unwrap();
    let first = warm.freeze().unwrap();
    let own = |state: &afresh_linux::Frozen| &places(state.image()) - &places(first.image());
    let shared = own(&before).intersection(&own(&after)).count();
    assert!(shared > 200, "{shared} pages of what was mapped are shared");
    for (state, request, answer) in [
        (&before, "look\n", "False True\n"),
        (&before, "write\n", "True True\n"),
        (&after, "look\n", "True True\n"),
    ] {
        let thawed = afresh_linux::Warm::thaw(state, &program).unwrap();
        assert_eq!(ask(&mut thawed.instance(), request), answer, "{request}");
    }
    instance.reset();
    assert_eq!(ask(&mut instance, "map\n"), "mapped\n");
    assert_eq!(ask(&mut instance, "look\n"), "False True\n");
}

#[test]
fn planted_bugs_are_caught() {
    if common::python().is_none() {
        return;
    }
    planted::must_be_caught(
        &[Bug::Borrowed],
        &["start_to_end::mappings_of_a_call_are_listed_and_its_writes_are_kept"],
    );
}
