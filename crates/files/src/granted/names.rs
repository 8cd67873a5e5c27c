//! Names in a granted directory: making, moving and removing them.
//!
//! Each function opens the directory of the last name and passes that name alone to the kernel,
//! which follows no link in its place.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{HostHandle, refused, refused_path, resolve, whole};
use crate::error::Refused;

/// The last name of a path, and its directory.
struct NameInDirectory<'a> {
    directory: OwnedFd,
    /// With the slashes behind it, which the kernel heeds.
    name: &'a [u8],
}

impl HostHandle {
    /// The place of the last name of a path. A path to a directory's own name (`.`, `..`) has none,
    /// and is refused with `otherwise` by its last name.
    fn place<'a>(
        &self,
        path: &'a [u8],
        otherwise: impl FnOnce(&[u8]) -> Refused,
    ) -> Result<NameInDirectory<'a>, Refused> {
        if path.is_empty() {
            return Err(Refused::Missing);
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let open = |path: &[u8]| resolve(self.top()?, path, flags).map_err(refused_path);
        // A path of slashes alone is absolute.
        let end = path.iter().rposition(|byte| *byte != b'/').ok_or(Refused::NotPermitted)? + 1;
        let start = path[..end].iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let last = &path[start..end];
        if matches!(last, b"." | b"..") {
            open(path)?;
            return Err(otherwise(last));
        }
        let above = if start == 0 { &b"."[..] } else { &path[..start] };
        Ok(NameInDirectory { directory: open(above)?, name: &path[start..] })
    }

    /// Makes an empty directory.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] for a path that leads out, or where changes are not granted; the
    /// host's errors.
    pub fn create_directory(&self, path: &[u8]) -> Result<(), Refused> {
        self.check_writable()?;
        let place = self.place(path, |_| Refused::Exists)?;
        let mode = Mode::from_raw_mode(0o777);
        whole(|| rustix::fs::mkdirat(&place.directory, place.name, mode)).map_err(refused)
    }

    /// Makes a symbolic link. Its target is not checked, because a link that leads out is not
    /// followed.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] for an absolute target; as [`HostHandle::create_directory`].
    pub fn create_link(&self, target: &[u8], path: &[u8]) -> Result<(), Refused> {
        self.check_writable()?;
        if target.starts_with(b"/") {
            return Err(Refused::NotPermitted);
        }
        let place = self.place(path, |_| Refused::Exists)?;
        whole(|| rustix::fs::symlinkat(target, &place.directory, place.name)).map_err(refused)
    }

    /// Gives the file at `old` a further name in another directory or the same. A symbolic link is
    /// not followed.
    ///
    /// # Errors
    /// [`Refused::NotPermitted`] for a directory; [`Refused::CrossDevice`]; as
    /// [`HostHandle::create_directory`], for both directories.
    pub fn link(&self, old: &[u8], into: &Self, new: &[u8]) -> Result<(), Refused> {
        self.check_writable()?;
        into.check_writable()?;
        if old.ends_with(b"/") {
            // Only a directory can be meant. The kernel would follow a link here without staying
            // beneath.
            resolve(self.top()?, old, OFlags::PATH | OFlags::DIRECTORY).map_err(refused_path)?;
            return Err(Refused::NotPermitted);
        }
        let from = self.place(old, |_| Refused::NotPermitted)?;
        let to = into.place(new, |_| Refused::Exists)?;
        let flags = AtFlags::empty();
        whole(|| rustix::fs::linkat(&from.directory, from.name, &to.directory, to.name, flags))
            .map_err(moved)
    }

    /// Moves the file at `old` to the path `new` of another directory or the same, in place of the
    /// file there.
    ///
    /// # Errors
    /// [`Refused::CrossDevice`]; as [`HostHandle::create_directory`], for both directories.
    pub fn rename(&self, old: &[u8], into: &Self, new: &[u8]) -> Result<(), Refused> {
        self.check_writable()?;
        into.check_writable()?;
        let from = self.place(old, |_| Refused::Busy)?;
        let to = into.place(new, |_| Refused::Busy)?;
        whole(|| rustix::fs::renameat(&from.directory, from.name, &to.directory, to.name))
            .map_err(moved)
    }

    /// Removes the name of a file that is not a directory.
    ///
    /// # Errors
    /// [`Refused::IsDirectory`]; as [`HostHandle::create_directory`].
    pub fn remove_file(&self, path: &[u8]) -> Result<(), Refused> {
        self.check_writable()?;
        let place = self.place(path, |_| Refused::IsDirectory)?;
        whole(|| rustix::fs::unlinkat(&place.directory, place.name, AtFlags::empty()))
            .map_err(refused)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// [`Refused::NotEmpty`], [`Refused::NotDirectory`]; as [`HostHandle::create_directory`].
    pub fn remove_directory(&self, path: &[u8]) -> Result<(), Refused> {
        self.check_writable()?;
        let place = self.place(path, |last| match last {
            b"." => Refused::Invalid,
            _ => Refused::NotEmpty,
        })?;
        whole(|| rustix::fs::unlinkat(&place.directory, place.name, AtFlags::REMOVEDIR))
            .map_err(refused)
    }
}

/// An error of a call with two directories.
fn moved(error: Errno) -> Refused {
    match error {
        Errno::XDEV => Refused::CrossDevice,
        error => refused(error),
    }
}
