//! The extended attributes that are written to the host: `user.*`, without those that give rights.

use std::fs::File;
use std::os::fd::AsFd;

use afresh::files::Tree;
use rustix::fs::{XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr};
use rustix::io::Errno;

/// The beginning of extended attributes that give no rights.
const PLAIN: &[u8] = b"user.";
/// Beginnings of those that give rights where programs of the host keep owners and modes in them:
/// stores of container images, overlay file systems and 9P servers.
const RIGHTS: [&[u8]; 5] = [
    b"user.containers.",
    b"user.fuseoverlayfs.",
    b"user.overlay.",
    b"user.rootlesscontainers",
    b"user.virtfs.",
];
/// Bytes that the names of all attributes of a file have at most, and a value (`XATTR_LIST_MAX`).
const MAX_NAMES: usize = 64 << 10;
const MAX_VALUE: usize = 64 << 10;

/// Attributes by name.
pub(super) type Attributes = Vec<(Vec<u8>, Vec<u8>)>;

/// The extended attributes of a path in a tree; none of a missing file.
pub(super) fn read_attributes(tree: &Tree, path: &[u8]) -> anyhow::Result<Attributes> {
    let Ok(node) = tree.find(path) else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    for name in tree.attribute_names(node)? {
        if let Some(value) = tree.attribute(node, &name)? {
            all.push((name.to_vec(), value.to_vec()));
        }
    }
    Ok(all)
}

/// Whether an attribute is written to the host.
pub(super) fn is_plain(name: &[u8]) -> bool {
    name.starts_with(PLAIN) && !RIGHTS.iter().any(|rights| name.starts_with(rights))
}

/// Gives a host file or directory the plain attributes in which the two lists differ, and removes
/// those that only the first one has. Returns the names of others, and of those that the host
/// refuses.
pub(super) fn set_attributes(
    file: impl AsFd,
    had: &[(Vec<u8>, Vec<u8>)],
    has: &[(Vec<u8>, Vec<u8>)],
) -> Vec<String> {
    let mut others = Vec::new();
    let mut report = |name: &[u8], error: Option<Errno>| {
        let name = String::from_utf8_lossy(name);
        others.push(error.map_or(name.to_string(), |error| format!("{name}: {error}")));
    };
    for (name, _) in had.iter().filter(|(name, _)| !has.iter().any(|(other, _)| other == name)) {
        if !is_plain(name) {
            report(name, None);
            continue;
        }
        match fremovexattr(&file, &name[..]) {
            // A file system without attributes has none to remove.
            Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
            Err(error) => report(name, Some(error)),
        }
    }
    for both @ (name, value) in has.iter().filter(|both| !had.contains(both)) {
        if !is_plain(name) {
            report(&both.0, None);
        } else if let Err(error) = fsetxattr(&file, &name[..], value, XattrFlags::empty()) {
            report(name, Some(error));
        }
    }
    others
}

/// Copies the plain attributes of a host file to the one that replaces it. Returns the names of
/// those that the host refuses.
pub(super) fn copy_attributes(from: &File, to: &File) -> Result<Vec<String>, Errno> {
    let mut names = vec![0; MAX_NAMES];
    let len = match flistxattr(from, &mut names[..]) {
        Err(Errno::OPNOTSUPP) => 0,
        len => len?,
    };
    let mut has = Vec::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| is_plain(name)) {
        let mut value = vec![0; MAX_VALUE];
        let len = fgetxattr(from, name, &mut value[..])?;
        value.truncate(len);
        has.push((name.to_vec(), value));
    }
    Ok(set_attributes(to, &[], &has))
}
