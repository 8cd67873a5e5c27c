//! The target, its compiler and the folder of its artifacts.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::command::find;
use crate::host;

pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Variables that make cargo link programs for arm64 with Debian's cross compiler.
pub(crate) const LINKER: (&str, &str) =
    ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc");

/// The page size of the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Pages {
    #[default]
    Small,
    /// 16 KiB, which afresh refuses.
    Large,
}

/// Installs what cross-compiling needs.
pub(crate) fn compiler() -> Result<()> {
    host::rust_target(TARGET)?;
    if find("aarch64-linux-gnu-gcc").is_none() || !Path::new(LIBRARIES).join("libc.so.6").is_file()
    {
        host::apt_install(&["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"])?;
    }
    Ok(())
}

/// Where Debian's cross compiler has the libraries of its programs.
pub(super) const LIBRARIES: &str = "/usr/aarch64-linux-gnu/lib";

/// The folder of everything here.
pub(super) fn folder() -> PathBuf {
    host::target_folder().join("aarch64")
}
