//! A Debian root for arm64 with Python and Node and without a compiler, for packages of them.
//!
//! Its packages are unpacked and not installed: their scripts would need an arm64 processor.
//! Python and Node need none of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::cross::{Pages, folder};
use super::machine::Machine;
use crate::command::{find, run};
use crate::host;

/// The release whose C library Debian's cross compiler links with, and whose Node is the oldest
/// that is supported.
const RELEASE: &str = "bookworm";
const PACKAGES: &str = "ca-certificates,nodejs,python3-venv";
/// The root in the machine.
const ROOT: &str = "debian";
/// Folders that no program reads.
const UNREAD: [&str; 4] = ["usr/share/doc", "usr/share/locale", "usr/share/man", "var"];

/// Lines of a script that runs `inside COMMAND` in the root, which has the machine's shell.
pub(super) const ENTER: &str = "
mkdir -p /debian/bin
cp /bin/busybox /debian/bin/busybox
busybox ln -s busybox /debian/bin/sh
for folder in proc dev tmp root; do mkdir -p /debian/$folder; done
mount -t proc none /debian/proc
mount -t devtmpfs none /debian/dev
mkdir -p /debian/dev/shm
mount -t tmpfs none /debian/dev/shm
inside() {
    busybox chroot /debian /bin/busybox env -i HOME=/root PATH=/usr/bin:/bin LANG=C.UTF-8 \"$@\"
}
";

/// A machine with the root.
pub(super) fn machine() -> Result<Machine> {
    let mut machine = Machine::new(Pages::Small)?;
    let unread = |path: &Path| UNREAD.iter().any(|folder| path == Path::new(folder));
    machine.add_tree(&unpacked()?, &path(""), unread)?;
    Ok(machine)
}

/// A path in the root, in the machine.
pub(super) fn path(inside: &str) -> PathBuf {
    Path::new("/").join(ROOT).join(inside)
}

/// The root on this host, made once.
fn unpacked() -> Result<PathBuf> {
    let root = folder().join("debian").join(format!("{RELEASE}-root"));
    if root.is_dir() {
        return Ok(root);
    }
    if find("mmdebstrap").is_none() {
        host::apt_install(&["mmdebstrap"])?;
    }
    // Moved last: the root is there whole or not at all.
    let making = root.with_extension("making");
    if making.exists() {
        fs::remove_dir_all(&making).with_context(|| making.display().to_string())?;
    }
    fs::create_dir_all(&making).with_context(|| making.display().to_string())?;
    let mut debian = Command::new("mmdebstrap");
    debian.args(["--quiet", "--variant=extract", "--architectures=arm64"]);
    debian.args([&format!("--include={PACKAGES}"), RELEASE]);
    run(debian.arg(&making))?;
    fs::rename(&making, &root).with_context(|| root.display().to_string())?;
    Ok(root)
}
