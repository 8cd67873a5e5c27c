//! The process at the other end of a connection.
//!
//! Promises: only a process of the same user or of root is accepted. In a user namespace the kernel
//! reports one number for all users that are not mapped there (`overflowuid`), so that number is
//! refused, and so is every peer where this process has it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use afresh_sys::{SysError, socket};

/// The user at the other end, if it is neither this one nor root.
pub(super) fn other_user(stream: &UnixStream) -> Result<Option<u32>, SysError> {
    let user = socket::peer_user(stream)?;
    let accepted = accepts(user, socket::own_user(), socket::overflow_user());
    Ok((!accepted).then_some(user))
}

/// Whether a process of user `own` accepts one of `user`.
fn accepts(user: u32, own: u32, overflow: u32) -> bool {
    (user == own || user == 0) && user != overflow && own != overflow
}

/// Whether only this user and root can replace the socket of an image server at `path`: the
/// directory belongs to one of them, and no other user can write to it, or remove the files of
/// others in it. A directory that does not exist has no socket.
#[must_use]
pub fn is_protected(path: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    fs::metadata(parent.unwrap_or(Path::new(".")))
        .map_or(true, |directory| is_private(directory.uid(), directory.mode(), socket::own_user()))
}

/// [`is_protected`] for a directory of `owner` with `mode`.
fn is_private(owner: u32, mode: u32, own: u32) -> bool {
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    match owner {
        0 => mode & WRITABLE_BY_OTHERS == 0 || mode & STICKY != 0,
        owner => owner == own && mode & WRITABLE_BY_OTHERS == 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_and_root_are_accepted_and_unmapped_users_are_not() {
        const OVERFLOW: u32 = 65534;
        for (user, own, accepted) in [
            (1000, 1000, true),
            (0, 1000, true),
            (0, 0, true),
            (1001, 1000, false),
            (1000, 0, false),
            (OVERFLOW, 1000, false),
            (OVERFLOW, OVERFLOW, false),
            (0, OVERFLOW, false),
        ] {
            assert_eq!(accepts(user, own, OVERFLOW), accepted, "{user} for {own}");
        }
        assert!(accepts(OVERFLOW, OVERFLOW, 1), "another number stands for unmapped users");
    }

    #[test]
    fn a_directory_that_others_can_write_to_protects_no_socket() {
        for (owner, mode, private) in [
            (1000, 0o700, true),
            (1000, 0o755, true),
            (1000, 0o775, false),
            (1000, 0o1777, false),
            (0, 0o755, true),
            (0, 0o1777, true),
            (0, 0o777, false),
            (1001, 0o700, false),
        ] {
            assert_eq!(is_private(owner, mode, 1000), private, "{mode:o} of {owner}");
        }
    }
}
