//! A program of this host: its file, behind shims of version managers, and the directories that it
//! needs.
//!
//! Promises: beyond the program's own file, only directories are granted that a version manager or
//! a package manager of a language has made for programs: a toolchain of rustup, a version of
//! pyenv, a virtual environment, an installation of Node or conda. Never the home directory, or one
//! above it. A version manager is asked only about programs in directories of `PATH`, and a virtual
//! environment names only an installation of Python: both may be a stranger's, and the manager runs
//! outside the sandbox. Files of the current directory choose no version, for the same reason.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::program::{Program, find_in_path};

/// Files that mark the root of an installation that its programs need as a whole.
const MARKS: [&str; 4] = ["pyvenv.cfg", "conda-meta", "lib/node_modules/npm", "lib/rustlib"];
/// Bytes of a file that show whether it is a script.
const HEAD: u64 = 512;

/// A program of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostProgram {
    /// Its absolute path.
    pub path: PathBuf,
    /// The directories that it needs in addition to those of the system.
    pub folders: Vec<PathBuf>,
    /// Whether it is a text without an interpreter in its first line, which a shell runs.
    pub is_plain_script: bool,
}

impl HostProgram {
    /// Finds the program that a shell would run for `word`. A word without a slash never names a
    /// file of the present directory, which may be untrusted.
    ///
    /// # Errors
    /// For a word without a slash that is not in `PATH`.
    pub fn find(word: impl AsRef<OsStr>) -> io::Result<Self> {
        let named = Path::new(&word);
        let found = if named.as_os_str().as_encoded_bytes().contains(&b'/') {
            named.to_owned()
        } else {
            find_in_path(&word).ok_or_else(|| {
                let named = named.display();
                let why = match Path::new(&word).exists() {
                    true => format!("; ./{named} is the path of that in the present directory"),
                    false => "; give its path".to_owned(),
                };
                let why = format!("program {named} not found in PATH{why}");
                io::Error::new(io::ErrorKind::NotFound, why)
            })?
        };
        let found = std::path::absolute(found)?;
        let target = behind_shim(&found);
        let mut folders: Vec<_> = target.iter().filter_map(|path| root_of(path)).collect();
        let path = target.unwrap_or(found);
        folders.extend(installations(&path));
        folders.sort();
        folders.dedup();
        let is_plain_script = is_plain_script(&path);
        Ok(Self { path, folders, is_plain_script })
    }

    /// The search path `usual`, preceded by the directory of the program if it lacks that. Programs
    /// find themselves and other programs of their installation by it.
    #[must_use]
    pub fn search_path(&self, usual: &str) -> String {
        search_path(&self.path, usual)
    }

    /// The program, with the directories of its installation. A text without an interpreter is run
    /// by the shell.
    #[must_use]
    pub fn program(&self, word: impl AsRef<OsStr>) -> Program {
        let word = word.as_ref();
        let program = match self.is_plain_script {
            true => Program::new("/bin/sh").arg(&self.path).grant(&self.path),
            // A path may be relative to a directory that the program has no access to.
            false if word.as_encoded_bytes().contains(&b'/') => Program::new(&self.path),
            false => Program::new(&self.path).name(word),
        };
        self.folders.iter().fold(program, |program, folder| program.grant(folder))
    }
}

/// The search path `usual`, after the directory of the program at `path` where it lacks that.
pub(crate) fn search_path(path: &Path, usual: &str) -> String {
    match path.parent().and_then(Path::to_str) {
        Some(folder) if !usual.split(':').any(|known| known == folder) => {
            format!("{folder}:{usual}")
        }
        _ => usual.to_owned(),
    }
}

/// The directory above that of a program, which is the root of its installation, unless it has more
/// than that.
fn root_of(path: &Path) -> Option<PathBuf> {
    let root = path.parent()?.parent()?;
    is_grantable(root).then(|| root.to_owned())
}

/// The program that a shim stands for, as its version manager answers (`pyenv which NAME`,
/// `rustup which NAME`).
fn behind_shim(shim: &Path) -> Option<PathBuf> {
    let name = shim.file_name().filter(|name| !name.as_encoded_bytes().starts_with(b"-"))?;
    let manager = if is_rustup(shim) { manager_in_path("rustup")? } else { manager_of(shim)? };
    let output = query(&manager, name).output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    (output.status.success() && path.is_absolute() && path.is_file()).then_some(path)
}

/// The command that has a version manager resolve `name`: without files of the current directory
/// and those above it, which choose a version (`rust-toolchain.toml`, `.python-version`,
/// `.tool-versions`, `mise.toml`) and may have the manager download or run it. The versions that
/// the user has set for all directories and in the environment count.
fn query(manager: &Path, name: &OsStr) -> Command {
    let mut command = Command::new(manager);
    command.arg("which").arg(name).stdin(Stdio::null()).current_dir("/").env("PWD", "/");
    command.env("RUSTUP_AUTO_INSTALL", "0");
    // Managers like pyenv prefer this variable to their current directory. Their shims set it.
    let manager = manager.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
    if manager.ends_with("ENV") {
        command.env_remove(format!("{manager}_DIR"));
    }
    command
}

/// Whether a program is a link to rustup, which runs the toolchain's program of that name.
fn is_rustup(path: &Path) -> bool {
    let is_named = |path: &Path| path.file_name() == Some(OsStr::new("rustup"));
    !is_named(path) && path.canonicalize().is_ok_and(|target| is_named(&target))
}

/// The version manager of a shim: a program in a directory `shims` of pyenv, rbenv, nodenv, asdf
/// and the like. Any other directory of that name may be a stranger's, whose manager must not run.
fn manager_of(shim: &Path) -> Option<PathBuf> {
    let folder = shim.parent().filter(|folder| folder.file_name().is_some_and(|n| n == "shims"))?;
    if !is_searched(folder) {
        return None;
    }
    let root = folder.parent()?;
    let manager = root.file_name()?.to_str()?.trim_start_matches('.');
    let own = root.join("bin").join(manager);
    if own.is_file() { Some(own) } else { manager_in_path(manager) }
}

/// The directories of `PATH`, whose programs every shell of the user runs. Relative ones are left
/// out: their programs may be a stranger's.
fn searched() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).filter(|folder| folder.is_absolute()).collect()
}

fn is_searched(folder: &Path) -> bool {
    searched().iter().any(|searched| searched == folder)
}

fn manager_in_path(name: &str) -> Option<PathBuf> {
    searched().into_iter().map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The marked installations that a program belongs to: by its path, by the targets of its links,
/// and by the base of a virtual environment.
fn installations(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let target = path.canonicalize().ok();
    for path in [Some(path), target.as_deref()].into_iter().flatten() {
        let marked =
            path.ancestors().skip(2).find(|root| MARKS.iter().any(|m| root.join(m).exists()));
        let Some(root) = marked.filter(|root| is_grantable(root)) else { continue };
        if let Some(base) = base_of_environment(root) {
            found.push(base);
        }
        found.push(root.to_owned());
    }
    found
}

/// Whether a directory holds no more than programs: not the home directory, or one above it.
fn is_grantable(root: &Path) -> bool {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    root.parent().is_some() && !home.is_some_and(|home| home.starts_with(root))
}

/// The installation that a virtual environment of Python was made from.
fn base_of_environment(root: &Path) -> Option<PathBuf> {
    let text = std::fs::read_to_string(root.join("pyvenv.cfg")).ok()?;
    let home = text.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        (name.trim() == "home").then(|| value.trim())
    });
    let base = Path::new(home?).parent()?.to_owned();
    (is_grantable(&base) && is_python(&base)).then_some(base)
}

/// Whether a directory is an installation of Python: it has a standard library.
fn is_python(root: &Path) -> bool {
    let named = |name: &OsStr| {
        ["python", "pypy"].iter().any(|n| name.as_encoded_bytes().starts_with(n.as_bytes()))
    };
    ["lib", "lib64"].iter().any(|lib| {
        let folders = std::fs::read_dir(root.join(lib)).into_iter().flatten().flatten();
        let mut folders = folders.filter(|folder| named(&folder.file_name()));
        folders.any(|folder| folder.path().join("os.py").is_file())
    })
}

/// Whether a file is a text that names no interpreter. Shells run those themselves.
fn is_plain_script(path: &Path) -> bool {
    let mut head = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    read.is_ok_and(|len| len > 0) && !head.starts_with(b"#!") && !head.contains(&0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_manager_sees_no_file_of_the_current_directory() {
        let value = |manager: &str, variable: &str| {
            let command = query(Path::new(manager), OsStr::new("tool"));
            assert_eq!(command.get_current_dir(), Some(Path::new("/")), "{manager}");
            let mut set = command.get_envs();
            set.find(|(name, _)| *name == variable).map(|(_, value)| value.map(OsStr::to_owned))
        };
        // Managers look from here upwards.
        assert_eq!(value("/opt/asdf", "PWD"), Some(Some("/".into())));
        assert_eq!(value("/opt/rustup", "RUSTUP_AUTO_INSTALL"), Some(Some("0".into())));
        // These variables name the directory of the caller, and asdf's that of its installation.
        assert_eq!(value("/opt/pyenv", "PYENV_DIR"), Some(None));
        assert_eq!(value("/opt/rbenv", "RBENV_DIR"), Some(None));
        assert_eq!(value("/opt/asdf", "ASDF_DIR"), None);
        assert_eq!(behind_shim(Path::new("/opt/shims/--help")), None);
    }

    #[test]
    fn installations_are_found_by_their_marks_and_never_the_home_directory() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        let program = |path: &str| {
            let path = top.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "\x7fELF\0").unwrap();
            path
        };
        let base = program("python/bin/python3");
        let inner = program("env/bin/tool");
        std::fs::write(
            top.join("env/pyvenv.cfg"),
            format!("home = {}\n", base.parent().unwrap().display()),
        )
        .unwrap();
        // Any directory could be named there.
        assert!(installations(&inner).iter().all(|root| *root == top.join("env")));
        let library = top.join("python/lib/python3.13");
        std::fs::create_dir_all(&library).unwrap();
        std::fs::write(library.join("os.py"), "").unwrap();
        assert_eq!(installations(&inner)[..2], [top.join("python"), top.join("env")]);
        assert!(installations(&base).is_empty());
        assert!(!is_grantable(Path::new("/")));
        if let Some(home) = std::env::var_os("HOME") {
            assert!(!is_grantable(Path::new(&home)) && is_grantable(&Path::new(&home).join("env")));
        }
        let manager = program("manager/bin/manager");
        std::fs::write(&manager, "#!/bin/sh\n").unwrap();
        assert_eq!(manager_of(&program("manager/shims/tool")), None, "it is not in PATH");
        let script = program("script");
        assert!(!is_plain_script(&script));
        std::fs::write(&script, "echo one\n").unwrap();
        assert!(is_plain_script(&script));
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        assert!(!is_plain_script(&script));
    }
}
