//! A Debian package, by dpkg-deb.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::installation::{Installation, binutil, copy, create, write};
use super::{size, time};
use crate::aarch64::TARGET as ARM64;
use crate::command::{find, run};
use crate::host;

/// Builds the package.
pub(super) fn build(installed: &Installation, to: &Path) -> Result<PathBuf> {
    if find("dpkg-deb").is_none() {
        host::apt_install(&["dpkg"])?;
    }
    let version = env!("CARGO_PKG_VERSION");
    // The control files would be in the packages that follow.
    let root = to.join("deb");
    run(Command::new("cp").arg("-a").arg(installed.root()).arg(&root))?;
    create(&root.join("DEBIAN"))?;
    let architecture = if installed.target == ARM64 { "arm64" } else { "amd64" };
    let kib = size(&root)? >> 10;
    let control = format!(
        "Package: afresh\nVersion: {version}\nArchitecture: {architecture}\nSection: utils\nPriority: optional\n\
         Installed-Size: {kib}\nDepends: libc6 (>= {}), libgcc-s1\nRecommends: ca-certificates\n\
         Maintainer: the authors of afresh\n\
         Description: start every run from the same memory\n \
         Warm a guest once and snapshot it. Then serve each request from a pristine copy, fork it,\n \
         roll it back, save it and restore it lazily.\n",
        required_glibc(&installed.command(), installed.target)?
    );
    write(&root.join("DEBIAN/control"), control.as_bytes())?;
    let documents = root.join("usr/share/doc/afresh");
    copy(&documents.join("LICENSE-MIT"), &documents.join("copyright"))?;
    let package = to.join(format!("afresh_{version}_{architecture}.deb"));
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.env("SOURCE_DATE_EPOCH", time()?).args(["--root-owner-group", "-Zxz", "--build"]);
    run(dpkg.arg(&root).arg(&package))?;
    std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
    Ok(package)
}

/// The newest version of glibc whose symbols the command needs.
pub(super) fn required_glibc(command: &Path, target: &str) -> Result<String> {
    let mut table = Command::new(binutil("objdump", target));
    let symbols = crate::command::output(table.arg("-T").arg(command))?;
    Ok(newest_version(&symbols).unwrap_or_else(|| "2.28".to_owned()))
}

/// The newest `GLIBC_x.y` in a table of symbols.
fn newest_version(symbols: &str) -> Option<String> {
    let versions = symbols.split("GLIBC_").skip(1).filter_map(|rest| {
        let version = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
        let mut parts = version.split('.').map(str::parse::<u32>);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    });
    versions.max().map(|(major, minor)| format!("{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_found_by_number_and_not_by_letter() {
        let table = "w DF *UND* (GLIBC_2.2.5) read\nDF *UND* (GLIBC_2.34) a\n(GLIBC_2.9) b\n";
        assert_eq!(newest_version(table).as_deref(), Some("2.34"));
        assert_eq!(newest_version("(GCC_3.0) x"), None);
    }
}
