//! An archive of the command as `cargo binstall` and users of `tar` expect it.
//!
//! `afresh-cli-TARGET-vVERSION.tar.gz` holds, in a folder of that name, the command, its manual
//! pages and completions, the licences and the README. The name is the one in the `binstall`
//! metadata of the package.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::installation::{Installation, copy, create};
use super::{PACKAGE, compress, pack};

/// Builds the archive.
pub(super) fn build(installed: &Installation, to: &Path, target: &str) -> Result<PathBuf> {
    let name = name(target, env!("CARGO_PKG_VERSION"));
    let folder = to.join(&name);
    create(&folder.join("man"))?;
    create(&folder.join("completions"))?;
    copy(&installed.command(), &folder.join("afresh"))?;
    for (from, into) in [(installed.documents(), ""), (installed.manual(), "man")] {
        for entry in std::fs::read_dir(&from).context("the installed files")? {
            let entry = entry?;
            copy(&entry.path(), &folder.join(into).join(entry.file_name()))?;
        }
    }
    for (shell, file) in installed.completions() {
        copy(&file, &folder.join("completions").join(format!("afresh.{shell}")))?;
    }
    let archive = to.join(format!("{name}.tar"));
    pack(to, &[&name], &archive)?;
    std::fs::remove_dir_all(&folder)
        .with_context(|| format!("cannot remove {}", folder.display()))?;
    compress(&archive)
}

/// The name of the archive, and of the folder in it.
fn name(target: &str, version: &str) -> String {
    format!("{PACKAGE}-{target}-v{version}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host;

    #[test]
    fn the_archive_has_the_name_of_the_binstall_metadata() -> Result<()> {
        let manifest = host::repository().join("crates/cli/Cargo.toml");
        let text = std::fs::read_to_string(manifest)?;
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
            line.map(|value| value.trim_matches('"').to_owned()).unwrap_or_default()
        };
        let filled = |text: String| {
            text.replace("{ name }", PACKAGE)
                .replace("{ target }", "x86_64-unknown-linux-gnu")
                .replace("{ version }", "1.2.3")
                .replace("{ bin }", "afresh")
                .replace("{ binary-ext }", "")
        };
        let name = name("x86_64-unknown-linux-gnu", "1.2.3");
        assert!(filled(value("pkg-url")).ends_with(&format!("/v1.2.3/{name}.tar.gz")));
        assert_eq!(filled(value("bin-dir")), format!("{name}/afresh"));
        assert_eq!(value("pkg-fmt"), "tgz");
        Ok(())
    }
}
