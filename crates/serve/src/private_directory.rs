//! Directories that the server's user alone reads, with records, tokens and states of tenants.
//!
//! Promises: a directory that is made here has no access for other users from its first moment, and
//! one of this user that exists loses such access, if it has nothing but files of a server. One of
//! all users, such as `/tmp`, is refused if it has other files. May break it: a directory of
//! another user, with other files, or on a file system without modes, whose mode stays. The log
//! names it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Permissions of a directory and of a file of one user.
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;
/// The permissions of users other than the owner, and of users outside its group.
const ALL_OTHERS: u32 = 0o077;
#[cfg(feature = "fleet")]
const OUTSIDE_GROUP: u32 = 0o007;
/// Users remove only their own files.
const STICKY: u32 = 0o1000;
/// Files of a server in its directory, and of a fleet in its store.
const OWN_NAMES: [&str; 18] = [
    ".blob-lock",
    ".gc-lock",
    ".index-lock",
    "blobs",
    "cache",
    "collecting",
    "conditions",
    "index.json",
    "journals",
    "keepers",
    "lock",
    "lost+found",
    "oci-layout",
    "probe",
    "records",
    "sandboxes",
    "snapshots",
    "usage",
];
/// The ends of the names of records.
const OWN_EXTENSIONS: [&str; 4] = ["damaged", "json", "lock", "part"];

/// Makes a directory of this user alone, or removes the access of all others to one that exists.
pub(crate) fn open_private(dir: &Path) -> io::Result<()> {
    open_without(dir, ALL_OTHERS)
}

/// The same for a directory that hosts may share by their group. One that exists keeps the access
/// of its group.
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
    let path = dir.display();
    let has_other_files = has_other_files(dir)?;
    // An empty file system that is mounted in memory is such a directory by default.
    let is_of_all = mode & STICKY != 0 && has_other_files;
    if is_of_all || fs::canonicalize(dir)?.parent().is_none() {
        return Err(io::Error::other(format!(
            "{path} is a directory of all users, which may not have secrets: name one below it"
        )));
    }
    if has_other_files {
        tracing::warn!(dir = %path, "other users can open this directory, which has other files");
        return Ok(());
    }
    match fs::set_permissions(dir, Permissions::from_mode(mode & !removed & 0o7777)) {
        Err(error) if keeps_modes(error.kind()) => {
            tracing::warn!(dir = %path, %error, "other users can open this directory");
            Ok(())
        }
        changed => changed,
    }
}

/// Whether a directory has files that no server made.
fn has_other_files(dir: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        let has_own_extension = || {
            let extension = Path::new(&name).extension();
            extension.is_some_and(|extension| OWN_EXTENSIONS.iter().any(|own| extension == *own))
        };
        if !OWN_NAMES.iter().any(|own| name == *own) && !has_own_extension() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a directory with this error keeps its mode: another user owns it, or its file system has
/// no modes or takes no writes.
fn keeps_modes(error: io::ErrorKind) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem, Unsupported};
    matches!(error, PermissionDenied | ReadOnlyFilesystem | Unsupported)
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
        // With the files of a server, as at its next start.
        fs::write(made.join("lock"), "").unwrap();
        fs::write(made.join("id.json"), "").unwrap();
        fs::set_permissions(&made, Permissions::from_mode(0o755)).unwrap();
        open_private(&made).unwrap();
        assert_eq!(mode(&made), 0o700);
        let file = made.join("file");
        drop(create_private(&file).unwrap());
        assert_eq!(mode(&file), 0o600);
    }

    #[test]
    fn a_directory_of_others_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let project = dir.path().join("project");
        fs::create_dir(&project).unwrap();
        fs::write(project.join("main.py"), "").unwrap();
        fs::set_permissions(&project, Permissions::from_mode(0o755)).unwrap();
        open_private(&project).unwrap();
        // Also at the next start, which finds the lock of this one.
        fs::write(project.join("lock"), "").unwrap();
        open_private(&project).unwrap();
        assert_eq!(mode(&project), 0o755);
        let all_users = dir.path().join("tmp");
        fs::create_dir(&all_users).unwrap();
        fs::set_permissions(&all_users, Permissions::from_mode(0o1777)).unwrap();
        fs::write(all_users.join("letter"), "").unwrap();
        for refused in [&*all_users, Path::new("/")] {
            let why = open_private(refused).unwrap_err().to_string();
            assert!(why.contains("name one below it"), "{why}");
        }
        assert_eq!(mode(&all_users), 0o777);
        open_private(&all_users.join("below")).unwrap();
        // An empty one is a mounted file system for the server.
        fs::remove_dir(all_users.join("below")).unwrap();
        fs::remove_file(all_users.join("letter")).unwrap();
        open_private(&all_users).unwrap();
        assert_eq!(mode(&all_users), 0o700);
    }

    #[test]
    fn a_file_system_without_modes_is_no_error() {
        for code in [1, 13, 30, 95] {
            assert!(keeps_modes(io::Error::from_raw_os_error(code).kind()), "{code}");
        }
        assert!(!keeps_modes(io::Error::from_raw_os_error(5).kind()));
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
        // The next start finds what this one has put there, for the group as well.
        let place: afresh::Place = format!("file://{}", shared.display()).parse().unwrap();
        place.remote().unwrap().claim("fleet-test").unwrap();
        assert!(!has_other_files(&shared).unwrap());
    }
}
