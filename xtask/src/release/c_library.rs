//! The C library as an archive: header, shared and static library, and a description for
//! pkg-config.
//!
//! `afresh-c-TARGET-vVERSION.tar.gz` can be unpacked anywhere: the description finds its files by
//! its own place.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::installation::{copy, create, write};
use super::{GLIBC, artifacts, bill, compile, compress, pack};
use crate::command::run;
use crate::host;

const PACKAGE: &str = "afresh-capi";
/// The libraries of the system that a program with the static library needs.
const SYSTEM: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// Builds the archive.
pub(super) fn build(profile: &str, to: &Path) -> Result<PathBuf> {
    let version = env!("CARGO_PKG_VERSION");
    let shared = shared_name(version);
    let soname = format!("-Clink-arg=-Wl,-soname,{shared}");
    // Without the Rust library among the types, so that the profile's optimisation over crates
    // takes place.
    let types = ["--package", PACKAGE, "--lib", "--crate-type", "cdylib,staticlib"];
    compile(&types, &[&soname], GLIBC, profile)?;
    let built = artifacts(GLIBC, profile);
    let name = format!("afresh-c-{GLIBC}-v{version}");
    let folder = to.join(&name);
    for part in ["include", "lib/pkgconfig", "examples"] {
        create(&folder.join(part))?;
    }
    let sources = host::repository().join("crates/capi");
    copy(&sources.join("include/afresh.h"), &folder.join("include/afresh.h"))?;
    copy(&sources.join("README.md"), &folder.join("README.md"))?;
    for example in ["control.c", "restore.c"] {
        copy(&sources.join("examples").join(example), &folder.join("examples").join(example))?;
    }
    for license in ["LICENSE-APACHE", "LICENSE-MIT"] {
        copy(&host::repository().join(license), &folder.join(license))?;
    }
    let lib = folder.join("lib");
    copy(&built.join("libafresh.so"), &lib.join(&shared))?;
    symlink(&shared, lib.join("libafresh.so")).context("cannot link the shared library")?;
    copy(&built.join("libafresh.a"), &lib.join("libafresh.a"))?;
    run(Command::new("strip").arg("--strip-unneeded").arg(lib.join(&shared)))?;
    run(Command::new("strip").arg("--strip-debug").arg(lib.join("libafresh.a")))?;
    write(&lib.join("pkgconfig/afresh.pc"), description(version).as_bytes())?;
    let components = bill::components_of(&host::repository(), PACKAGE, GLIBC)?;
    let licences = bill::licences(&components)?;
    write(&folder.join("THIRD-PARTY-LICENSES"), licences.as_bytes())?;
    let archive = to.join(format!("{name}.tar"));
    pack(to, &[&name], &archive)?;
    std::fs::remove_dir_all(&folder)
        .with_context(|| format!("cannot remove {}", folder.display()))?;
    compress(&archive)
}

/// The name that programs load the shared library under. Before version 1 each minor version may
/// change the interface.
fn shared_name(version: &str) -> String {
    let mut parts = version.split('.');
    match (parts.next(), parts.next()) {
        (Some("0"), Some(minor)) => format!("libafresh.so.0.{minor}"),
        (major, _) => format!("libafresh.so.{}", major.unwrap_or_default()),
    }
}

/// The description for pkg-config.
fn description(version: &str) -> String {
    format!(
        "prefix=${{pcfiledir}}/../..\n\nName: afresh\n\
         Description: Restores a snapshot lazily at an address of the caller's choice\n\
         Version: {version}\nCflags: -I${{prefix}}/include\n\
         Libs: -L${{prefix}}/lib -lafresh\nLibs.private: {SYSTEM}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_versions_before_1_and_major_ones_after_have_a_name_each() {
        assert_eq!(shared_name("0.1.7"), "libafresh.so.0.1");
        assert_eq!(shared_name("2.3.4"), "libafresh.so.2");
        assert!(description("0.1.0").contains("prefix=${pcfiledir}/../..\n"));
    }
}
