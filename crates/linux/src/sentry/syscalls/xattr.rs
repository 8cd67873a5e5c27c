//! Extended attributes: `setxattr`, `getxattr`, `listxattr`, `removexattr` and their kind.
//!
//! Promises: a program reads the attributes that it has set, of files and directories, within the
//! limits of Linux and the guest's budget of files. Those of granted host files are not shown.
//! Attributes of the kinds `trusted` and `security` take privileges that no guest has.

use afresh_files::{Kind, Node, Refused};
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::fs::access_lists::{ACCESS, AccessList, DEFAULT};
use crate::sentry::fs::permissions::{READ, WRITE};
use crate::sentry::fs::proc_files::ResolvedPath;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::open_fifo::Fifo;
use crate::sentry::mm::user_memory::{copy_in, copy_out, path_in, string_in};
use crate::sentry::name_lengths::NAME;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::tty::terminals::TerminalEnd;

/// Maximum bytes of a value, and of a list of names.
const MAX_VALUE: u64 = 64 << 10;

/// The kind of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    User,
    Trusted,
    Security,
    AccessList,
    /// None that a file can have.
    Unknown,
}

impl Namespace {
    fn of(name: &[u8]) -> Result<Self, Errno> {
        if name == ACCESS || name == DEFAULT {
            return Ok(Self::AccessList);
        }
        let kinds = [
            (&b"user."[..], Self::User),
            (b"trusted.", Self::Trusted),
            (b"security.", Self::Security),
        ];
        let found = kinds.into_iter().find(|(prefix, _)| name.starts_with(prefix));
        match found {
            Some((prefix, Self::User)) if name == prefix => Err(Errno::INVAL),
            Some((_, kind)) => Ok(kind),
            None => Ok(Self::Unknown),
        }
    }
}

/// The file that a call names: by a path, with or without its last link, or by a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum XattrFile {
    Path(u64),
    Link(u64),
    Descriptor(u64),
}

impl Sentry {
    /// The file of a call; `None` for an object without attributes.
    fn xattr_file(&self, process: &Process, file: XattrFile) -> SyscallResult<Option<Node>> {
        let (path, follow) = match file {
            XattrFile::Path(path) => (path, true),
            XattrFile::Link(path) => (path, false),
            XattrFile::Descriptor(descriptor) => {
                let description = self.state.table.get(descriptor)?;
                if description.is_path() {
                    return Err(Errno::BADF.into());
                }
                return Ok(match &description.open {
                    FileObject::File(open)
                    | FileObject::Device(_, open)
                    | FileObject::Fifo(Fifo { open, .. })
                    | FileObject::Terminal(TerminalEnd { open, .. }) => Some(open.node),
                    _ => None,
                });
            }
        };
        let path = path_in(process, path)?;
        match self.reach(libc::AT_FDCWD as u64, &path, |walk| walk.follow(follow))? {
            ResolvedPath::Place(place) => Ok(Some(place.node()?)),
            ResolvedPath::Own(meant) if follow => Ok(self.node_of(&meant).ok()),
            ResolvedPath::Own(_) => Ok(None),
        }
    }

    /// Refuses to set or remove an attribute of a file.
    fn may_set_xattr(&self, node: Option<Node>, kind: Namespace) -> SyscallResult<Node> {
        if matches!(kind, Namespace::Trusted | Namespace::Security) {
            return Err(Errno::PERM.into());
        }
        let node = node.ok_or(Errno::OPNOTSUPP)?;
        if kind == Namespace::User {
            if !matches!(self.state.tree.stat(node)?.kind, Kind::File | Kind::Directory) {
                return Err(Errno::PERM.into());
            }
            self.state.may(node, WRITE)?;
        }
        match kind {
            Namespace::Unknown => Err(Errno::OPNOTSUPP.into()),
            Namespace::User => Ok(node),
            _ => {
                self.state.check_ownership(node)?;
                Ok(node)
            }
        }
    }

    fn set_xattr(
        &mut self,
        process: &Process,
        file: XattrFile,
        [name, value, size, flags]: [u64; 4],
    ) -> SyscallResult {
        let flags = flags as i32;
        if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 {
            return Err(Errno::INVAL.into());
        }
        let name = name_in(process, name)?;
        if size > MAX_VALUE {
            return Err(Errno::TOOBIG.into());
        }
        let value = match size {
            0 => Vec::new(),
            size => copy_in(process, value, size as usize)?,
        };
        let node = self.xattr_file(process, file)?;
        let kind = Namespace::of(&name)?;
        let node = self.may_set_xattr(node, kind)?;
        let held = self.state.tree.attribute(node, &name)?.is_some();
        if held && flags & libc::XATTR_CREATE != 0 {
            return Err(Errno::EXIST.into());
        }
        if !held && flags & libc::XATTR_REPLACE != 0 {
            return Err(Errno::NODATA.into());
        }
        if kind == Namespace::AccessList {
            let list = AccessList::parse(&value)?;
            self.change().set_access_list(node, &name, list)?;
        } else {
            let now = crate::sentry::kernel::time::now();
            let set = self.change().tree.set_attribute(node, &name, Some(&value), now);
            set.map_err(|refused| match refused {
                Refused::TooLarge => Errno::TOOBIG,
                refused => refused.errno(),
            })?;
        }
        self.change().notify_file(node, libc::IN_ATTRIB);
        Ok(ZERO)
    }

    fn get_xattr(
        &mut self,
        process: &mut Process,
        file: XattrFile,
        [name, to, size]: [u64; 3],
    ) -> SyscallResult {
        let name = name_in(process, name)?;
        let node = self.xattr_file(process, file)?;
        let kind = Namespace::of(&name)?;
        if matches!(kind, Namespace::Trusted | Namespace::Security) {
            return Err(Errno::NODATA.into());
        }
        let node = node.ok_or(Errno::OPNOTSUPP)?;
        let file_kind = self.state.tree.stat(node)?.kind;
        match kind {
            Namespace::User if !matches!(file_kind, Kind::File | Kind::Directory) => {
                return Err(Errno::NODATA.into());
            }
            Namespace::User => self.state.may(node, READ)?,
            Namespace::AccessList if file_kind != Kind::Link => {}
            _ => return Err(Errno::OPNOTSUPP.into()),
        }
        let value = self.state.tree.attribute(node, &name)?.ok_or(Errno::NODATA)?;
        answer(process, &value, to, size)
    }

    fn list_xattr(
        &mut self,
        process: &mut Process,
        file: XattrFile,
        to: u64,
        size: u64,
    ) -> SyscallResult {
        let Some(node) = self.xattr_file(process, file)? else { return Ok(ZERO) };
        let names = self.state.tree.attribute_names(node)?;
        let list: Vec<u8> = names.iter().flat_map(|name| name.iter().copied().chain([0])).collect();
        answer(process, &list, to, size)
    }

    fn remove_xattr(&mut self, process: &Process, file: XattrFile, name: u64) -> SyscallResult {
        let name = name_in(process, name)?;
        let node = self.xattr_file(process, file)?;
        let kind = Namespace::of(&name)?;
        let node = self.may_set_xattr(node, kind)?;
        if kind == Namespace::AccessList {
            // It is no error to remove a list that a file does not have.
            self.change().set_access_list(node, &name, None)?;
        } else {
            self.state.tree.attribute(node, &name)?.ok_or(Errno::NODATA)?;
            let now = crate::sentry::kernel::time::now();
            self.change().tree.set_attribute(node, &name, None, now)?;
        }
        self.change().notify_file(node, libc::IN_ATTRIB);
        Ok(ZERO)
    }
}

// The calls: each names its file by a path, by one whose last link is not followed (`l`), or by a
// descriptor (`f`).
impl Sentry {
    /// `setxattr(2)`: attributes are `user.*` and access control lists. Those of granted host files
    /// and of images are not shown.
    pub(in crate::sentry) fn sys_setxattr(
        &mut self,
        p: &Process,
        &[path, name, value, size, flags, _]: &[u64; 6],
    ) -> SyscallResult {
        self.set_xattr(p, XattrFile::Path(path), [name, value, size, flags])
    }

    /// `lsetxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_lsetxattr(
        &mut self,
        p: &Process,
        &[path, name, value, size, flags, _]: &[u64; 6],
    ) -> SyscallResult {
        self.set_xattr(p, XattrFile::Link(path), [name, value, size, flags])
    }

    /// `fsetxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_fsetxattr(
        &mut self,
        p: &Process,
        &[fd, name, value, size, flags, _]: &[u64; 6],
    ) -> SyscallResult {
        self.set_xattr(p, XattrFile::Descriptor(fd), [name, value, size, flags])
    }

    /// `getxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_getxattr(
        &mut self,
        p: &mut Process,
        &[path, name, value, size, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.get_xattr(p, XattrFile::Path(path), [name, value, size])
    }

    /// `lgetxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_lgetxattr(
        &mut self,
        p: &mut Process,
        &[path, name, value, size, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.get_xattr(p, XattrFile::Link(path), [name, value, size])
    }

    /// `fgetxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_fgetxattr(
        &mut self,
        p: &mut Process,
        &[fd, name, value, size, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.get_xattr(p, XattrFile::Descriptor(fd), [name, value, size])
    }

    /// `listxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_listxattr(
        &mut self,
        p: &mut Process,
        &[path, list, size, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.list_xattr(p, XattrFile::Path(path), list, size)
    }

    /// `llistxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_llistxattr(
        &mut self,
        p: &mut Process,
        &[path, list, size, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.list_xattr(p, XattrFile::Link(path), list, size)
    }

    /// `flistxattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_flistxattr(
        &mut self,
        p: &mut Process,
        &[fd, list, size, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.list_xattr(p, XattrFile::Descriptor(fd), list, size)
    }

    /// `removexattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_removexattr(
        &mut self,
        p: &Process,
        &[path, name, _, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.remove_xattr(p, XattrFile::Path(path), name)
    }

    /// `lremovexattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_lremovexattr(
        &mut self,
        p: &Process,
        &[path, name, _, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.remove_xattr(p, XattrFile::Link(path), name)
    }

    /// `fremovexattr(2)`: as `setxattr`.
    pub(in crate::sentry) fn sys_fremovexattr(
        &mut self,
        p: &Process,
        &[fd, name, _, _, _, _]: &[u64; 6],
    ) -> SyscallResult {
        self.remove_xattr(p, XattrFile::Descriptor(fd), name)
    }
}

/// The name of an attribute.
fn name_in(process: &Process, at: u64) -> SyscallResult<Vec<u8>> {
    let name = string_in(process, at, NAME + 1)?.filter(|name| !name.is_empty());
    Ok(name.ok_or(Errno::RANGE)?)
}

/// Returns bytes, or only their number if the caller has no room.
fn answer(process: &mut Process, bytes: &[u8], to: u64, size: u64) -> SyscallResult {
    if size != 0 {
        if bytes.len() as u64 > size {
            return Err(Errno::RANGE.into());
        }
        if !bytes.is_empty() {
            copy_out(process, to, bytes)?;
        }
    }
    Ok(SyscallControl::Value(bytes.len() as u64))
}
