//! Directories that the server's user alone reads, with records, tokens and states of tenants.
//!
//! Promises: a directory that is made here has no access for other users from its first moment, and
//! one of this user that exists loses such access. May break it: a directory of another user, whose
//! mode stays. The log names it where every user can read it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Permissions of a directory and of a file of one user.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// The permissions of users other than the owner, and of users outside its group.
const ALL_OTHERS: u32 = 0o077;
const OUTSIDE_GROUP: u32 = 0o007;

/// Makes a directory of this user alone, or removes the access of all others to one that exists.
pub(crate) fn open_private(dir: &Path) -> io::Result<()> {
    open_without(dir, ALL_OTHERS)
}

/// The same for a directory that hosts may share by their group, which keeps its access.
#[cfg(feature = "fleet")]
pub(crate) fn open_group_private(dir: &Path) -> io::Result<()> {
    open_without(dir, OUTSIDE_GROUP)
}

fn open_without(dir: &Path, removed: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(dir)?;
    let mode = fs::metadata(dir)?.permissions().mode();
    if mode & removed == 0 {
        return Ok(());
    }
    match fs::set_permissions(dir, Permissions::from_mode(mode & !removed & 0o7777)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            if mode & OUTSIDE_GROUP != 0 {
                let dir = dir.display();
                tracing::warn!(%dir, "every user can open this directory of another user");
            }
            Ok(())
        }
        changed => changed,
    }
}

/// Makes a file of this user alone, or empties one that exists.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(FILE_MODE).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn directories_of_the_server_lose_the_access_of_other_users() {
        let dir = tempfile::tempdir().unwrap();
        let made = dir.path().join("a/b");
        open_private(&made).unwrap();
        assert_eq!([mode(&made), mode(&dir.path().join("a"))], [0o700, 0o700]);
        fs::set_permissions(&made, Permissions::from_mode(0o755)).unwrap();
        open_private(&made).unwrap();
        assert_eq!(mode(&made), 0o700);
        let file = made.join("file");
        drop(create_private(&file).unwrap());
        assert_eq!(mode(&file), 0o600);
    }

    #[test]
    #[cfg(feature = "fleet")]
    fn a_directory_that_hosts_share_keeps_the_access_of_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("store");
        open_group_private(&shared).unwrap();
        assert_eq!(mode(&shared), 0o700);
        fs::set_permissions(&shared, Permissions::from_mode(0o775)).unwrap();
        open_group_private(&shared).unwrap();
        assert_eq!(mode(&shared), 0o770);
    }
}
