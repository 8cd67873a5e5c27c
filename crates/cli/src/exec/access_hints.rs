//! Hints for a program that failed: files of the host and servers that it has no access to, and the
//! options that grant them.
//!
//! Promises: a hint names a path that exists on the host and that the program does not have, or a
//! host that the program looked for.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use afresh::files::Tree;
use afresh::linux::FailedLookups;

use super::is_option;
use crate::linux::Shape;
use crate::output::{message, quoted};

/// Directories that are those of the system, or that every program has.
const SYSTEM: [&str; 9] =
    ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/dev", "/proc", "/sys", "/etc"];
/// Maximum servers that are named.
const MAX_HOSTS: usize = 5;

/// Host paths that a program may miss.
#[derive(Debug, Default)]
pub(super) struct AccessHints {
    /// Paths that arguments name.
    paths: Vec<PathBuf>,
    /// The present directory, if the program starts there and does not see it.
    here: Option<PathBuf>,
    /// Whether an argument is a relative path of a file there.
    names_here: bool,
}

impl AccessHints {
    /// The hints for a program with these arguments that starts in `start`.
    pub(super) fn new(arguments: &[OsString], shape: &Shape, start: Option<&Path>) -> Self {
        let hidden = |path: &Path| {
            path.is_absolute()
                && path.parent().is_some()
                && !shape.grants(path)
                && !SYSTEM.iter().any(|top| path.starts_with(top))
        };
        let here = Path::new(".").canonicalize().ok();
        let here = here.filter(|here| hidden(here) && start == Some(here.as_path()));
        let mut hints = Self { here, ..Self::default() };
        for word in arguments.iter().filter(|word| !word.is_empty() && !is_option(word)) {
            let word = Path::new(word);
            let Ok(path) = word.canonicalize() else { continue };
            if !hidden(&path) {
                continue;
            }
            match &hints.here {
                Some(here) if path == *here || word.is_relative() && path.starts_with(here) => {
                    hints.names_here = true;
                }
                _ => hints.paths.push(path),
            }
        }
        hints
    }

    /// Prints the hints for a program that has failed, with the files that it began with.
    pub(super) fn print(&self, files: &Tree, failed: &FailedLookups) {
        let is_there = |path: &Path| files.stat_path(path.as_os_str().as_bytes()).is_ok();
        for path in self.paths.iter().filter(|path| !is_there(path)) {
            message!("afresh: the program has no access to {0}; --dir {0} grants it", quoted(path));
        }
        if let Some(here) = &self.here {
            let missed = failed.files.iter().find(|name| here.join(name).exists());
            let plain = missed.and_then(|name| name.to_str());
            let plain = plain.filter(|name| !name.contains(char::is_control));
            match plain {
                Some(name) if !self.names_here => message!(
                    "afresh: the program looked for {name}, and does not see this directory; \
                     --dir . grants it"
                ),
                // A list alone is no sign: Python lists its directory for each import.
                _ if self.names_here || missed.is_some() => {
                    message!("afresh: the program does not see this directory; --dir . grants it");
                }
                _ => {}
            }
        }
        // A guest chooses these names.
        let is_plain = |name: &&String| {
            name.contains('.')
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
        };
        for host in failed.hosts.iter().filter(is_plain).take(MAX_HOSTS) {
            message!(
                "afresh: the program asked for {host}, which no --net grants; --net {host}:443 does"
            );
        }
    }
}
