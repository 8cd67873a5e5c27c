//! Calls on security modules (`lsm_list_modules` and its kind). A guest has capabilities alone.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult};
use crate::sentry::syscalls::thread::int_in;

/// The numbers of the modules: that of capabilities.
const MODULES: [u64; 1] = [100];
const LEN: u32 = 8 * MODULES.len() as u32;
const LSM_FLAG_SINGLE: u64 = 1;

impl Sentry {
    /// `lsm_list_modules(2)`: capabilities are the only module.
    pub(in crate::sentry) fn sys_lsm_list_modules(
        &mut self,
        process: &mut Process,
        to: u64,
        size: u64,
        flags: u64,
    ) -> SyscallResult {
        if flags as u32 != 0 {
            return Err(Errno::INVAL.into());
        }
        let room = int_in(process, size)?;
        copy_out(process, size, &LEN.to_le_bytes())?;
        if room < LEN {
            return Err(Errno::TOOBIG.into());
        }
        copy_out(process, to, MODULES.map(u64::to_le_bytes).as_flattened())?;
        Ok(SyscallControl::Value(MODULES.len() as u64))
    }

    /// `lsm_get_self_attr(2)`: capabilities have no attributes (`EOPNOTSUPP`).
    pub(in crate::sentry) fn sys_lsm_get_self_attr(
        &mut self,
        process: &mut Process,
        &[attribute, context, size, flags, ..]: &[u64; 6],
    ) -> SyscallResult {
        let flags = u64::from(flags as u32);
        let is_single = flags == LSM_FLAG_SINGLE;
        if attribute as u32 == 0 || size == 0 || flags != 0 && (!is_single || context == 0) {
            return Err(Errno::INVAL.into());
        }
        int_in(process, size)?;
        if is_single {
            copy_in(process, context, 32)?;
        }
        copy_out(process, size, &[0; 4])?;
        Err(Errno::OPNOTSUPP.into())
    }

    /// `lsm_set_self_attr(2)`: capabilities have no attributes (`EOPNOTSUPP`).
    pub(in crate::sentry) fn sys_lsm_set_self_attr(
        &mut self,
        process: &Process,
        &[_, context, size, flags, ..]: &[u64; 6],
    ) -> SyscallResult {
        /// Bytes of `struct lsm_ctx`.
        const CONTEXT_LEN: u32 = 32;
        if flags as u32 != 0 || (size as u32) < CONTEXT_LEN {
            return Err(Errno::INVAL.into());
        }
        copy_in(process, context, CONTEXT_LEN as usize)?;
        Err(Errno::OPNOTSUPP.into())
    }
}
