//! An RPM package, by rpmbuild.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::installation::{Installation, create, write};
use super::time;
use crate::command::{find, run};
use crate::host;

/// Builds the package.
pub(super) fn build(installed: &Installation, to: &Path) -> Result<PathBuf> {
    if find("rpmbuild").is_none() {
        host::apt_install(&["rpm"])?;
    }
    let version = env!("CARGO_PKG_VERSION");
    let scratch = to.join("rpm");
    create(&scratch)?;
    let specification = scratch.join("afresh.spec");
    // The files are stripped and compressed as they should be, so no script of the distribution
    // changes them.
    let text = format!(
        "Name: afresh\nVersion: {version}\nRelease: 1\nSummary: Start every run from the same memory\n\
         License: MIT OR Apache-2.0\nRecommends: ca-certificates\n\
         %global __os_install_post %{{nil}}\n%global debug_package %{{nil}}\n\
         %global clamp_mtime_to_source_date_epoch 1\n%global use_source_date_epoch_as_buildtime 1\n\
         %global _buildhost localhost\n%global _binary_payload w7.xzdio\n\
         %description\nWarm a guest once and snapshot it. Then serve each request from a pristine copy, fork it,\n\
         roll it back, save it and restore it lazily.\n\
         %install\ncp -a {}/. %{{buildroot}}/\n\
         %files\n%attr(0755, root, root) /usr/bin/afresh\n%defattr(0644, root, root, 0755)\n\
         /usr/share/man/man1/*\n/usr/share/doc/afresh\n/usr/share/bash-completion/completions/afresh\n\
         /usr/share/fish/vendor_completions.d/afresh.fish\n/usr/share/zsh/vendor-completions/_afresh\n",
        installed.root().display()
    );
    write(&specification, text.as_bytes())?;
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.env("SOURCE_DATE_EPOCH", time()?).args(["-bb", "--quiet", "--target", "x86_64"]);
    rpmbuild.arg("--define").arg(format!("_topdir {}", scratch.display()));
    run(rpmbuild.arg(&specification))?;
    let name = format!("afresh-{version}-1.x86_64.rpm");
    let package = to.join(&name);
    std::fs::rename(scratch.join("RPMS/x86_64").join(&name), &package)
        .with_context(|| format!("rpmbuild did not write {name}"))?;
    std::fs::remove_dir_all(&scratch)
        .with_context(|| format!("cannot remove {}", scratch.display()))?;
    Ok(package)
}
