//! Lookups of a run that found nothing, for hints: files of the directory that the program started
//! in, and hosts that it may not connect to.
//!
//! Promises: a guest cannot make it hold more than [`MAX_NAMES`] names of each kind.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, PoisonError};

use afresh_files::{Node, Refused, ResolvedName};

/// Maximum names of each kind.
const MAX_NAMES: usize = 256;

/// Lookups of a run that found nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedLookups {
    /// Names that the directory in which the program started does not have.
    pub files: BTreeSet<OsString>,
    /// Hosts that the program may not connect to.
    pub hosts: BTreeSet<String>,
}

/// Notes the failed lookups of a run.
#[derive(Debug)]
pub(in crate::sentry) struct LookupWatch {
    /// The directory that the program started in.
    start: Node,
    failed: Mutex<FailedLookups>,
}

impl LookupWatch {
    pub(in crate::sentry) fn new(start: Node) -> Self {
        Self { start, failed: Mutex::default() }
    }

    fn change(&self, note: impl FnOnce(&mut FailedLookups)) {
        note(&mut self.failed.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Notes the result of a walk along `path` from the directory `from`.
    pub(in crate::sentry) fn walked(
        &self,
        from: Node,
        path: &[u8],
        found: &Result<ResolvedName, Refused>,
    ) {
        let name = match found {
            Ok(place) if place.found.is_none() && place.directory == self.start => &place.name[..],
            // A directory on the way is missing.
            Err(Refused::Missing) if from == self.start && !path.starts_with(b"/") => {
                let mut names = path.split(|byte| *byte == b'/');
                match names.find(|name| !name.is_empty() && *name != b".") {
                    // The missing directory is elsewhere.
                    None | Some(b"..") => return,
                    Some(name) => name,
                }
            }
            _ => return,
        };
        self.change(|failed| {
            if failed.files.len() < MAX_NAMES {
                failed.files.insert(OsStr::from_bytes(name).to_owned());
            }
        });
    }

    /// Notes a host that the guest resolved, and may not connect to.
    pub(in crate::sentry) fn refused_host(&self, name: &str) {
        self.change(|failed| {
            if failed.hosts.len() < MAX_NAMES {
                failed.hosts.insert(name.to_owned());
            }
        });
    }

    fn take(&self) -> FailedLookups {
        let mut failed = FailedLookups::default();
        self.change(|noted| std::mem::swap(noted, &mut failed));
        failed
    }
}

impl super::Console {
    /// The failed lookups so far.
    pub(crate) fn take_failed_lookups(&self) -> FailedLookups {
        self.lookups.take()
    }
}
