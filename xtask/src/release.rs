//! `cargo xtask release [TARGET]`: an archive of the command as `cargo binstall` and users of `tar` expect it.
//!
//! `afresh-cli-TARGET-vVERSION.tar.gz` holds, in a folder of that name, the command, its manual pages and
//! completions, the licences and the README. The name is the one in the `binstall` metadata of the package.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, run};
use crate::host;

const PACKAGE: &str = "afresh-cli";

/// Builds the archive for the target, by default this host's own.
pub(crate) fn main(arguments: &[String]) -> Result<()> {
    let target = match arguments {
        [] => own_target()?,
        [target] => target.clone(),
        _ => bail!("usage: cargo xtask release [TARGET]"),
    };
    host::rust_target(&target)?;
    host::c_compiler()?;
    let mut build = cargo();
    build.current_dir(host::repository()).args(["build", "--release", "--locked"]);
    build.args(["--package", PACKAGE, "--target", &target]);
    run(&mut build)?;

    let name = name(&target, env!("CARGO_PKG_VERSION"));
    let archives = host::target_folder().join("release-archives");
    let folder = archives.join(&name);
    if folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    let command = host::target_folder().join(&target).join("release/afresh");
    fill(&folder, &command)?;
    let archive = archives.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"]);
    tar.arg(&archive).arg("-C").arg(&archives).arg(&name);
    run(&mut tar)?;
    std::fs::remove_dir_all(&folder)
        .with_context(|| format!("cannot remove {}", folder.display()))?;
    println!("{}", archive.display());
    Ok(())
}

/// The name of the archive, and of the folder in it.
fn name(target: &str, version: &str) -> String {
    format!("{PACKAGE}-{target}-v{version}")
}

fn own_target() -> Result<String> {
    let about = output(Command::new("rustc").arg("-vV"))?;
    let target = about.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(target.context("rustc does not report its host")?.to_owned())
}

/// Assembles the contents of the archive.
fn fill(folder: &Path, command: &Path) -> Result<()> {
    let made = |path: &Path| -> Result<PathBuf> {
        std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path.to_owned())
    };
    let copy = |from: &Path, name: &str| {
        let to = folder.join(name);
        std::fs::copy(from, to).map(drop).with_context(|| format!("cannot copy {}", from.display()))
    };
    made(folder)?;
    copy(command, "afresh")?;
    for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        copy(&host::repository().join(name), name)?;
    }
    run(Command::new(command).arg("man").arg(made(&folder.join("man"))?))?;
    let completions = made(&folder.join("completions"))?;
    for (shell, file) in [("bash", "afresh.bash"), ("fish", "afresh.fish"), ("zsh", "_afresh")] {
        let text = Command::new(command)
            .args(["completions", shell])
            .stdin(Stdio::null())
            .output()
            .context("cannot run the command that was built")?;
        if !text.status.success() {
            bail!("the command that was built has no completions for {shell}");
        }
        let file = completions.join(file);
        std::fs::write(&file, text.stdout)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_has_the_name_that_the_package_tells_binstall() -> Result<()> {
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
