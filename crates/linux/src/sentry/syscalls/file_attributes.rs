//! Calls on the attributes of files that `chattr` sets (`file_getattr`, `file_setattr`). The tree
//! has none, as file systems of Linux that lack them.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::copy_in;
use crate::sentry::result::SyscallResult;

/// Bytes of the first `struct file_attr`.
const FILE_ATTR_LEN: u64 = 24;
const FLAGS: i32 = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;

impl Sentry {
    /// `file_getattr(2)`: no file has attributes (`EOPNOTSUPP`).
    pub(in crate::sentry) fn sys_file_getattr(
        &mut self,
        process: &Process,
        &[at, path, _, len, flags, _]: &[u64; 6],
    ) -> SyscallResult {
        self.check_attributes(process, (at, path), len, flags)?;
        Err(Errno::OPNOTSUPP.into())
    }

    /// `file_setattr(2)`: no file has attributes (`EOPNOTSUPP`).
    pub(in crate::sentry) fn sys_file_setattr(
        &mut self,
        process: &Process,
        &[at, path, attributes, len, flags, _]: &[u64; 6],
    ) -> SyscallResult {
        if (FILE_ATTR_LEN..=PAGE).contains(&len) {
            let given = copy_in(process, attributes, len as usize)?;
            if given[FILE_ATTR_LEN as usize..].iter().any(|byte| *byte != 0) {
                return Err(Errno::TOOBIG.into());
            }
        }
        self.check_attributes(process, (at, path), len, flags)?;
        Err(Errno::OPNOTSUPP.into())
    }

    /// Checks the arguments, and finds the file.
    fn check_attributes(
        &mut self,
        process: &Process,
        (at, path): (u64, u64),
        len: u64,
        flags: u64,
    ) -> SyscallResult<()> {
        if flags as i32 & !FLAGS != 0 {
            return Err(Errno::INVAL.into());
        }
        if len > PAGE {
            return Err(Errno::TOOBIG.into());
        }
        if len < FILE_ATTR_LEN {
            return Err(Errno::INVAL.into());
        }
        self.attributes_at(process, at, path, flags).map(drop)
    }
}
