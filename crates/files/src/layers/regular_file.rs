//! Regular files under a name that a stranger may have made.
//!
//! Promises: opening a pipe or a device neither waits nor starts it, and is an error.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// Those of the system; [`ErrorKind::InvalidInput`] for everything but a regular file.
pub(crate) fn open_regular(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, NO_WAIT);
    let file = options.open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

#[cfg(unix)]
const NO_WAIT: i32 =
    rustix::fs::OFlags::NONBLOCK.union(rustix::fs::OFlags::NOCTTY).bits().cast_signed();
