//! Options of Linux programs: lookup in PATH, arguments, environment, directories.

use std::path::{Path, PathBuf};

use afresh::linux::{Destination, Program, find_in_path};
use anyhow::Context;

/// The file that a shell would run for `name`; the program itself where that is a shim of a version manager.
pub(crate) fn find(name: &str) -> anyhow::Result<String> {
    let path = Path::new(name);
    // A path, or a snapshot of a program.
    let found = if path.components().count() > 1 || path.is_file() {
        path.to_owned()
    } else {
        let found = find_in_path(name);
        found.with_context(|| format!("program {name} not found in PATH; give its path"))?
    };
    let found = behind_shim(&found).unwrap_or(found);
    found.into_os_string().into_string().ok().context("the program's path is not UTF-8")
}

/// The directory of shims, if `path` is one: `shims` of pyenv, rbenv, nodenv, asdf and the like.
fn shims(path: &Path) -> Option<&Path> {
    path.parent().filter(|folder| folder.file_name().is_some_and(|name| name == "shims"))
}

/// The program that a shim stands for, as its version manager answers (`pyenv which NAME`).
fn behind_shim(shim: &Path) -> Option<PathBuf> {
    let root = shims(shim)?.parent()?;
    let manager = root.file_name()?.to_str()?.trim_start_matches('.');
    let own = root.join("bin").join(manager);
    let manager = if own.is_file() { own } else { find_in_path(manager)? };
    let mut command = std::process::Command::new(manager);
    let output = command.arg("which").arg(shim.file_name()?).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    (output.status.success() && path.is_absolute() && path.is_file()).then_some(path)
}

/// The directory of a version that a version manager has installed, where `name` was its shim: a program needs the rest of that.
pub(crate) fn installation(name: &str, path: &Path) -> Option<PathBuf> {
    let named = match Path::new(name).components().count() {
        1 => find_in_path(name)?,
        _ => PathBuf::from(name),
    };
    shims(&named)?;
    path.parent()?.parent().map(Path::to_owned)
}

/// The options of a program.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    arguments: Vec<String>,
    env: Vec<(String, String)>,
    granted: Vec<PathBuf>,
    directory: Option<PathBuf>,
    reaches: Vec<Destination>,
    replaced: bool,
}

impl Shape {
    /// With `only` Linux programs, `--dir` entries in the form for Wasm guests are refused.
    pub(crate) fn new(
        arguments: &[String],
        env: &[(String, String)],
        dir: &[String],
        only: bool,
    ) -> anyhow::Result<Self> {
        let here = std::env::current_dir().and_then(std::fs::canonicalize).unwrap_or_default();
        let (mut granted, mut directory) = (Vec::new(), None);
        for entry in dir {
            let host = entry.strip_suffix(":rw").unwrap_or(entry);
            let host = host.split_once("::").map_or(host, |(host, _)| host);
            anyhow::ensure!(
                !only || host == entry,
                "--dir {entry}: a Linux program gets a directory at its own path, read-only; use --dir {host}"
            );
            let path = Path::new(host).canonicalize().with_context(|| format!("--dir {host}"))?;
            // Relative paths in arguments resolve here if the program has access.
            if here.starts_with(&path) {
                directory = Some(here.clone());
            }
            granted.push(path);
        }
        Ok(Self {
            arguments: arguments.to_vec(),
            env: env.to_vec(),
            granted,
            directory,
            reaches: Vec::new(),
            replaced: false,
        })
    }

    /// Allows connections to these destinations.
    pub(crate) fn reach(self, destinations: &[Destination]) -> Self {
        Self { reaches: destinations.to_vec(), ..self }
    }

    /// Ends the process at every reset if `replaced` is set.
    pub(crate) fn replace_processes(self, replaced: bool) -> Self {
        Self { replaced, ..self }
    }

    pub(crate) fn apply(&self, program: Program) -> Program {
        let mut program = program.replace_processes(self.replaced);
        for argument in &self.arguments {
            program = program.arg(argument);
        }
        for (name, value) in &self.env {
            program = program.env(name, value);
        }
        for path in &self.granted {
            program = program.grant(path);
        }
        for destination in &self.reaches {
            program = program.reach(destination.clone());
        }
        match &self.directory {
            Some(directory) => program.directory(directory),
            None => program,
        }
    }
}
