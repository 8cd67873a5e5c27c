//! The files of the command as an installed system has them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::bill;
use crate::aarch64::TARGET as ARM64;
use crate::command::{find, run};
use crate::host;

/// Folder of the documents, from the root.
const DOCUMENTS: &str = "usr/share/doc/afresh";

/// Shells, with the file of their completions from the root.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/afresh"),
    ("fish", "usr/share/fish/vendor_completions.d/afresh.fish"),
    ("zsh", "usr/share/zsh/vendor-completions/_afresh"),
];

/// A tree of installed files.
pub(super) struct Installation {
    root: PathBuf,
    pub(super) target: &'static str,
}

impl Installation {
    /// Puts the command, its manual pages and completions, the licences and the list of components
    /// into `root`.
    pub(super) fn assemble(root: &Path, command: &Path, target: &'static str) -> Result<Self> {
        let this = Self { root: root.to_owned(), target };
        for folder in ["usr/bin", "usr/share/man/man1", DOCUMENTS] {
            create(&root.join(folder))?;
        }
        copy(command, &this.command())?;
        // Profiles other than `dist` leave symbols.
        run(Command::new(binutil("strip", target)).arg(this.command()))?;
        run(started(command, target)?.arg("man").arg(this.manual()))?;
        for (shell, file) in COMPLETIONS {
            let output = started(command, target)?
                .args(["completions", shell])
                .stdin(Stdio::null())
                .output()
                .context("cannot run the command that was built")?;
            ensure!(output.status.success(), "the command has no completions for {shell}");
            let file = root.join(file);
            create(file.parent().unwrap_or(root))?;
            write(&file, &output.stdout)?;
        }
        for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            copy(&host::repository().join(name), &this.documents().join(name))?;
        }
        let components = bill::components(target)?;
        write(&this.documents().join(bill::NAME), bill::json(&components)?.as_bytes())?;
        let licences = bill::licences(&components)?;
        write(&this.documents().join("THIRD-PARTY-LICENSES"), licences.as_bytes())?;
        Ok(this)
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn command(&self) -> PathBuf {
        self.root.join("usr/bin/afresh")
    }

    pub(super) fn manual(&self) -> PathBuf {
        self.root.join("usr/share/man/man1")
    }

    pub(super) fn documents(&self) -> PathBuf {
        self.root.join(DOCUMENTS)
    }

    /// The completions of each shell, as a path below the root.
    pub(super) fn completions(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        let root = self.root.clone();
        COMPLETIONS.into_iter().map(move |(shell, file)| (shell, root.join(file)))
    }
}

/// The tool of binutils for a target.
pub(super) fn binutil(name: &str, target: &str) -> String {
    if target == ARM64 { format!("aarch64-linux-gnu-{name}") } else { name.to_owned() }
}

/// The command on this host, which emulates another processor for it. Emulation of a single program
/// is enough for its documents.
fn started(command: &Path, target: &str) -> Result<Command> {
    if target != ARM64 {
        return Ok(Command::new(command));
    }
    if find("qemu-aarch64").is_none() {
        host::apt_install(&["qemu-user"])?;
    }
    let mut emulator = Command::new("qemu-aarch64");
    emulator.args(["-L", "/usr/aarch64-linux-gnu"]).arg(command);
    Ok(emulator)
}

/// Creates a folder with those above it.
pub(super) fn create(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = std::fs::copy(from, to).map(drop);
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

pub(super) fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(file, bytes).with_context(|| format!("cannot write {}", file.display()))
}
