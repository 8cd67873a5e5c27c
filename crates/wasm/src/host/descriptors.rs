//! WASI descriptors that a warm-up leaves behind.
//!
//! Every call finds the descriptors that it is given: standard input, output and error, and the
//! directories. A guest whose files are a tree in memory keeps its open descriptors
//! ([`crate::host::files`]). A guest with host directories does not: if its warm-up opened another
//! descriptor or closed one of these, a call would continue with a number that means another file,
//! or none. So the descriptors after the warm-up are compared with those that were given, and any
//! difference is refused.
//!
//! Promises: after a check that passed, every number that was open still is, is the same file with
//! the same name, rights and flags, and no other is open. May break it: an embedder that replaces
//! WASI functions by its own (`Imports`) keeps descriptors that this check does not see.

use crate::WarmError;
use crate::host::Host;

/// Compares the descriptors that `host` has now with those that a call is given.
///
/// # Errors
/// [`WarmError::Descriptors`] names the first that differs.
pub(crate) fn check(host: &Host) -> Result<(), WarmError> {
    // Descriptors of a file tree are part of the saved state.
    let Some(live) = host.live_on_host() else { return Ok(()) };
    let Some(given) = live.granted_descriptors() else { return Ok(()) };
    let files = live.lock();
    for (number, descriptor) in given {
        let what = match files.descriptors.get(number) {
            Some(now) if now == descriptor => continue,
            Some(_) => "changed",
            None => "closed",
        };
        return Err(WarmError::Descriptors(format!(
            "{what} descriptor {number}, which each call is given anew"
        )));
    }
    let mut opened = files.descriptors.keys().filter(|number| !given.contains_key(number));
    let Some(first) = opened.next() else { return Ok(()) };
    let many = match opened.count() {
        0 => "a file or directory".to_owned(),
        more => format!("{} files or directories", more + 1),
    };
    Err(WarmError::Descriptors(format!(
        "left {many} open that it had opened, the first being descriptor {first}"
    )))
}
