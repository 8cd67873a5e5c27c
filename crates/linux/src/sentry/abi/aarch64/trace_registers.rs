//! Threads of arm64 are not traced.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::abi::GivenRegisters;

pub(in crate::sentry) const TRACES: bool = false;
pub(in crate::sentry) const AUDIT_ARCH: u32 = 0xc000_00b7;
pub(in crate::sentry) const GENERAL_LEN: usize = 34 * 8;
pub(in crate::sentry) const USER_LEN: u64 = 0;
pub(in crate::sentry) const DEBUG: std::ops::Range<u64> = 0..0;
pub(in crate::sentry) const LAST_ADDRESS: u64 = 0;

pub(in crate::sentry) fn general(_: &Process, _: i64, _: Option<i64>) -> Option<Vec<u8>> {
    None
}

pub(in crate::sentry) fn set_general(_: &mut Process, _: &[u8]) -> Result<GivenRegisters, Errno> {
    Err(Errno::IO)
}

pub(in crate::sentry) fn set_step(_: &mut Process, _: bool) {}

pub(in crate::sentry) fn vectors_of(_: &Process, _: bool) -> Option<Vec<u8>> {
    None
}

pub(in crate::sentry) fn set_vectors(_: &mut Process, _: &[u8], _: bool) -> Result<(), Errno> {
    Err(Errno::IO)
}
