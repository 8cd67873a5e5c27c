//! The C programs that tests of Linux guests run. The machine has no compiler: its `cc` copies the
//! programs that the host has compiled.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::cross::folder;
use super::machine::Machine;
use crate::command::run;
use crate::host;

/// Programs for x86-64 only: the tests of these are not compiled for arm64.
const OF_X86_64: [&str; 3] = ["bases.c", "inside.c", "stub.c"];
/// The program that a test links dynamically.
const DYNAMIC: &str = "canary.c";

/// Copies a program as if it was compiled: `cc [-static] … -o TO SOURCE`.
const CC: &str = r#"#!/bin/sh
kind=dynamic
while [ $# -gt 0 ]; do
    case $1 in
        -o) to=$2 source=$3; shift 2 ;;
        -static) kind=static ;;
    esac
    shift
done
exec cp "/tests/guests/${source##*/}.$kind" "$to"
"#;

/// Files of the crate that its tests show to guests.
const SHOWN_FILES: [&str; 5] =
    ["Cargo.toml", "src/lib.rs", "src/program.rs", "src/subprocess.rs", "src/warm.rs"];

/// Compiles the programs and adds them, and files that tests expect on each host.
pub(super) fn add(machine: &mut Machine) -> Result<()> {
    machine.add_link(Path::new("/usr/bin/env"), "/bin/busybox")?;
    machine.add(Path::new("/etc/login.defs"), b"# empty\n")?;
    let package = host::repository().join("crates/linux");
    for file in SHOWN_FILES.map(|file| package.join(file)) {
        machine.add_file(&file, &file)?;
    }
    let made = folder().join("guests");
    fs::create_dir_all(&made)?;
    machine.add(Path::new("/bin/cc"), CC.as_bytes())?;
    for entry in fs::read_dir(package.join("tests/guests"))? {
        let source = entry?.path();
        let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".c") || OF_X86_64.contains(&name.as_str()) {
            continue;
        }
        let mut kinds = vec![("static", &["-static", "-pthread"][..])];
        if name == DYNAMIC {
            kinds.push(("dynamic", &[]));
        }
        for (kind, flags) in kinds {
            let to = made.join(format!("{name}.{kind}"));
            let mut cc = Command::new("aarch64-linux-gnu-gcc");
            run(cc.args(["-O1", "-w"]).args(flags).arg("-o").args([&to, &source]))?;
            machine.add_file(&to, &Path::new("/tests/guests").join(format!("{name}.{kind}")))?;
        }
    }
    Ok(())
}
