//! Debian's arm64 kernel and busybox, downloaded and unpacked, never installed.
//!
//! apt reads a separate index in a separate folder, so that the packages of the host stay as they
//! are. It checks the index against Debian's keys.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cross::{Pages, folder};
use crate::command::{find, output, run};
use crate::host;

/// Debian 13, whose kernel has userfaultfd's write protection on arm64 and `PAGEMAP_SCAN`.
const SUITE: &str = "trixie";
const MIRROR: &str = "http://deb.debian.org/debian";
const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The files that a machine boots from.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) kernel: PathBuf,
    pub(super) busybox: PathBuf,
}

impl Files {
    /// Finds or downloads them.
    pub(super) fn find_or_download(pages: Pages) -> Result<Self> {
        let meta = match pages {
            Pages::Small => "linux-image-cloud-arm64",
            Pages::Large => "linux-image-arm64-16k",
        };
        let debian = folder().join("debian");
        let files = Self { kernel: debian.join(meta), busybox: debian.join("busybox-static") };
        if !files.kernel.is_file() || !files.busybox.is_file() {
            if find("dpkg-deb").is_none() {
                bail!(
                    "the kernel is in a Debian package, and this host has no dpkg-deb to open it"
                );
            }
            if !Path::new(KEYS).is_file() {
                host::apt_install(&["debian-archive-keyring"])?;
            }
            let apt = Apt::new(&debian)?;
            apt.file("busybox-static", "./usr/bin/busybox", &files.busybox)?;
            let kernel = apt.kernel(meta)?;
            let version = kernel.trim_start_matches("linux-image-").to_owned();
            apt.file(&kernel, &format!("./boot/vmlinuz-{version}"), &files.kernel)?;
        }
        Ok(files)
    }
}

/// apt over an index of arm64 packages.
struct Apt {
    folder: PathBuf,
}

impl Apt {
    fn new(folder: &Path) -> Result<Self> {
        for part in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(folder.join(part))?;
        }
        fs::write(folder.join("status"), "")?;
        let source = format!("deb [signed-by={KEYS}] {MIRROR} {SUITE} main\n");
        fs::write(folder.join("sources.list"), source)?;
        let this = Self { folder: folder.to_owned() };
        run(this.command("apt-get").args(["-q", "update"]))?;
        Ok(this)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let mut set = |name: &str, value: &dyn std::fmt::Display| {
            command.args(["-o", &format!("{name}={value}")]);
        };
        let path = |name: &str| self.folder.join(name).display().to_string();
        set("Dir::State::lists", &path("lists"));
        set("Dir::State::status", &path("status"));
        set("Dir::Cache", &path("cache"));
        set("Dir::Etc::sourcelist", &path("sources.list"));
        set("Dir::Etc::sourceparts", &"/dev/null");
        set("APT::Architecture", &"arm64");
        set("APT::Architectures", &"arm64");
        // Descriptions in other languages and lists for graphical programs are megabytes that
        // nothing here reads.
        set("Acquire::Languages", &"none");
        set("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", &"false");
        // As another user it could not write here.
        set("APT::Sandbox::User", &"root");
        command.current_dir(&self.folder);
        command
    }

    /// The package with the kernel that the package `meta` stands for.
    fn kernel(&self, meta: &str) -> Result<String> {
        let depends = output(self.command("apt-cache").args(["depends", meta]))?;
        let kernel = depends.lines().find_map(|line| {
            let name = line.trim().strip_prefix("Depends: ")?;
            name.starts_with("linux-image-").then(|| name.to_owned())
        });
        kernel.with_context(|| format!("the package {meta} depends on no kernel"))
    }

    /// Downloads a package and copies one of its files.
    fn file(&self, package: &str, path: &str, to: &Path) -> Result<()> {
        run(self.command("apt-get").args(["-q", "download", package]))?;
        let archive = fs::read_dir(&self.folder)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(&format!("{package}_")) && name.ends_with(".deb")
            })
            .with_context(|| format!("apt downloaded no package {package}"))?;
        let unpacked = self.folder.join("unpacked");
        let mut tar = Command::new("sh");
        tar.args([
            "-c",
            "mkdir -p \"$2\" && dpkg-deb --fsys-tarfile \"$0\" | tar -xC \"$2\" \"$1\"",
        ]);
        run(tar.arg(&archive).arg(path).arg(&unpacked))?;
        // Moved last: the file is there whole or not at all.
        fs::rename(unpacked.join(path), to).with_context(|| to.display().to_string())?;
        fs::remove_file(&archive).with_context(|| archive.display().to_string())
    }
}
