//! The emulated machine: its root and its boot.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::archive::Archive;
use super::cross::{LIBRARIES, Pages, compiler, folder};
use super::packages::Files;
use crate::command::{find, run, run_watched};
use crate::host;

/// Without output for this time the machine is ended. The longest test takes some minutes in the
/// emulator of a loaded host.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// Libraries that test programs and the command load.
const LOADED: [&str; 4] = ["ld-linux-aarch64.so.1", "libc.so.6", "libgcc_s.so.1", "libm.so.6"];

/// The commands of busybox in the machine.
const COMMANDS: [&str; 16] = [
    "cat", "cp", "echo", "grep", "gzip", "ip", "kill", "ls", "mkdir", "mount", "poweroff", "sh",
    "sleep", "tar", "timeout", "wget",
];

/// The first lines of the first program of the machine.
const INIT: &str = r"#!/bin/sh
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/shm /tmp
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
ip link set lo up
export HOME=/tmp TMPDIR=/tmp PATH=/bin
";

/// A machine that did not boot yet.
pub(super) struct Machine {
    kernel: PathBuf,
    path: PathBuf,
    root: Archive<BufWriter<File>>,
    /// The folders in the root.
    folders: BTreeSet<PathBuf>,
}

impl Machine {
    /// A machine with a shell and the C library.
    pub(super) fn new(pages: Pages) -> Result<Self> {
        // Its libraries come with it.
        compiler()?;
        if find("qemu-system-aarch64").is_none() {
            host::apt_install(&["qemu-system-arm"])?;
        }
        let files = Files::find_or_download(pages)?;
        let path = folder().join("root.cpio");
        let file = File::create(&path).with_context(|| path.display().to_string())?;
        let root = Archive::new(BufWriter::new(file));
        let mut this = Self { kernel: files.kernel, path, root, folders: BTreeSet::new() };
        for path in ["/dev", "/proc", "/sys", "/tmp"] {
            this.add_folder(Path::new(path))?;
        }
        this.add_file(&files.busybox, Path::new("/bin/busybox"))?;
        for command in COMMANDS {
            this.root.link(&format!("bin/{command}"), "busybox")?;
        }
        for library in LOADED {
            let path = Path::new(LIBRARIES).join(library);
            this.add_file(&path, &Path::new("/lib").join(library))?;
        }
        Ok(this)
    }

    /// Adds an empty folder, and those above it.
    pub(super) fn add_folder(&mut self, path: &Path) -> Result<()> {
        let above: Vec<_> = path.ancestors().filter(|path| path.parent().is_some()).collect();
        for path in above.into_iter().rev() {
            if self.folders.insert(path.to_owned()) {
                self.root.folder(inside(path))?;
            }
        }
        Ok(())
    }

    /// Adds a file with this content.
    pub(super) fn add(&mut self, path: &Path, content: &[u8]) -> Result<()> {
        self.add_folder(path.parent().context("a file is in a folder")?)?;
        self.root.program(inside(path), content).with_context(|| path.display().to_string())
    }

    /// Adds a symbolic link.
    pub(super) fn add_link(&mut self, path: &Path, to: &str) -> Result<()> {
        self.add_folder(path.parent().context("a link is in a folder")?)?;
        self.root.link(inside(path), to).with_context(|| path.display().to_string())
    }

    /// Adds a file of the host.
    pub(super) fn add_file(&mut self, from: &Path, path: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| from.display().to_string())?;
        self.add(path, &content)
    }

    /// Adds a program without its debug information, which would be most of the root.
    pub(super) fn add_program(&mut self, from: &Path, path: &Path) -> Result<()> {
        let stripped = folder().join("stripped");
        run(Command::new("aarch64-linux-gnu-strip").arg("-o").args([&stripped, from]))?;
        self.add_file(&stripped, path)
    }

    /// Adds the files, folders and links of a folder of the host, except those whose path in it
    /// `is_left_out`.
    pub(super) fn add_tree(
        &mut self,
        from: &Path,
        path: &Path,
        is_left_out: impl Fn(&Path) -> bool + Copy,
    ) -> Result<()> {
        self.add_below(from, Path::new(""), path, is_left_out)
    }

    /// Adds the part `part` of the folder `from`.
    fn add_below(
        &mut self,
        from: &Path,
        part: &Path,
        path: &Path,
        is_left_out: impl Fn(&Path) -> bool + Copy,
    ) -> Result<()> {
        self.add_folder(&path.join(part))?;
        let folder = from.join(part);
        let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
        let mut names = entries.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
        names.sort();
        for part in names.into_iter().map(|name| part.join(name)) {
            let (host, inside) = (from.join(&part), path.join(&part));
            let kind = host.symlink_metadata().with_context(|| host.display().to_string())?;
            if is_left_out(&part) {
                continue;
            } else if kind.is_dir() {
                self.add_below(from, &part, path, is_left_out)?;
            } else if kind.is_symlink() {
                let to = fs::read_link(&host)?;
                self.add_link(&inside, to.to_str().context("links are UTF-8")?)?;
            } else if kind.is_file() {
                self.add_file(&host, &inside)?;
            }
        }
        Ok(())
    }

    /// Boots it, runs the `script` in a shell, and passes each line of its output to `look`, which
    /// returns whether the line is shown.
    pub(super) fn boot(mut self, script: &str, look: impl FnMut(&str) -> bool) -> Result<()> {
        self.add(Path::new("/init"), format!("{INIT}{script}\npoweroff -f\n").as_bytes())?;
        self.root.finish().with_context(|| self.path.display().to_string())?;
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get().min(4));
        // As a child of another program, which the time limit without output ends.
        let mut qemu = Command::new("timeout");
        qemu.args(["10800", "qemu-system-aarch64"]);
        qemu.args(["-machine", "virt", "-cpu", "neoverse-n1", "-m", "3G", "-accel", "tcg"])
            .args(["-smp", &processors.to_string()])
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-serial", "stdio", "-append", "console=ttyAMA0 quiet panic=-1"])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.path);
        run_watched(&mut qemu, OUTPUT_TIMEOUT, look)
    }
}

/// A path in the root.
fn inside(path: &Path) -> &str {
    path.to_str().unwrap_or_default().trim_start_matches('/')
}
