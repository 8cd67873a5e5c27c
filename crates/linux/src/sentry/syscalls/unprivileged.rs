//! Calls that take privileges that no guest has, and calls about hardware that a guest has one of.

use rustix::io::Errno;

use crate::platform::{Process, calls};
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::mm::layout::PAGE;
use crate::sentry::mm::user_memory::{copy_in, copy_out, path_in, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::{length_in, micro_in};

/// Bytes of `struct timex`, and the state of a clock that nothing adjusts.
const TIMEX_LEN: usize = 208;
const UNSYNCHRONISED: u64 = 0x40;
const CLOCK_ERROR: u64 = 5;
/// Modes of `adjtimex`: the offset, a request of `adjtime`, and one that changes nothing
/// (`ADJ_OFFSET_SS_READ`).
const ADJ_OFFSET: u32 = 1;
const ADJTIME: u32 = 0x8000;
const ADJTIME_READ: u32 = 0xa001;
/// Policies of memory, and flags in their number.
const POLICIES: u64 = 6;
const POLICY_FLAGS: u64 = 0xe000;
/// Maximum bits in a mask of nodes.
const MAX_NODES: u64 = 1 << 15;
/// The flag of `mbind` that moves pages of other processes, too (`MPOL_MF_MOVE_ALL`).
const MOVES_ALL: u64 = 4;
// Flags of `get_mempolicy`.
const OF_ADDRESS: u64 = 2;
const ALLOWED: u64 = 4;

/// Whether Linux refuses a call to a process without privileges, whatever its arguments are.
pub(in crate::sentry) fn takes_privilege(number: i64) -> bool {
    matches!(
        number,
        libc::SYS_mount
            | libc::SYS_umount2
            | libc::SYS_pivot_root
            | libc::SYS_sethostname
            | libc::SYS_setdomainname
            | libc::SYS_syslog
            | libc::SYS_acct
            | libc::SYS_swapon
            | libc::SYS_swapoff
            | libc::SYS_reboot
            | libc::SYS_vhangup
            | libc::SYS_open_by_handle_at
            | calls::SYS_iopl
            | calls::SYS_ioperm
    )
}

impl Sentry {
    /// `clock_settime(2)`: `EPERM`, after its arguments were checked. Clocks other than
    /// `CLOCK_REALTIME` are `EINVAL`.
    pub(in crate::sentry) fn sys_clock_settime(
        &mut self,
        process: &Process,
        clock: u64,
        time: u64,
    ) -> SyscallResult {
        if clock as i32 != libc::CLOCK_REALTIME {
            return Err(Errno::INVAL.into());
        }
        length_in(process, time)?;
        Err(Errno::PERM.into())
    }

    /// `settimeofday(2)`: `EPERM`, after its arguments were checked.
    pub(in crate::sentry) fn sys_settimeofday(
        &mut self,
        process: &Process,
        time: u64,
        zone: u64,
    ) -> SyscallResult {
        if time != 0 {
            micro_in(process, time)?;
        }
        if zone != 0 {
            word_in(process, zone)?;
        }
        Err(Errno::PERM.into())
    }

    /// `adjtimex(2)`: returns the state of a clock that cannot be adjusted. Adjustments are
    /// `EPERM`.
    pub(in crate::sentry) fn sys_adjtimex(
        &mut self,
        process: &mut Process,
        at: u64,
    ) -> SyscallResult {
        match word_in(process, at)? as u32 {
            0 | ADJTIME_READ => {}
            // `adjtime` changes the offset only.
            mode if mode & ADJTIME != 0 && mode & ADJ_OFFSET == 0 => {
                return Err(Errno::INVAL.into());
            }
            _ => return Err(Errno::PERM.into()),
        }
        // After the mode: offset, frequency, both errors, status.
        let reply = [0, 0, 0, 16_000_000, 16_000_000, UNSYNCHRONISED, 2, 1, 32_768_000];
        let mut reply = reply.into_iter().fold(StructBuilder::default(), StructBuilder::word);
        let now = crate::sentry::kernel::time::now();
        reply = reply.word(now.seconds as u64).word(u64::from(now.nanos) / 1000).word(10_000);
        reply.0.resize(TIMEX_LEN, 0);
        copy_out(process, at, &reply.0)?;
        Ok(SyscallControl::Value(CLOCK_ERROR))
    }

    /// `clock_adjtime(2)`: as `adjtimex`. Clocks other than `CLOCK_REALTIME` are `EOPNOTSUPP`.
    pub(in crate::sentry) fn sys_clock_adjtime(
        &mut self,
        process: &mut Process,
        clock: u64,
        at: u64,
    ) -> SyscallResult {
        match clock as i32 {
            libc::CLOCK_REALTIME => self.sys_adjtimex(process, at),
            _ => Err(Errno::OPNOTSUPP.into()),
        }
    }

    /// `get_mempolicy(2)`: there is one node, and the policy is the default.
    pub(in crate::sentry) fn sys_get_mempolicy(
        &mut self,
        process: &mut Process,
        &[mode, nodemask, maxnode, addr, flags, _]: &[u64; 6],
    ) -> SyscallResult {
        if flags & !7 != 0 || maxnode > MAX_NODES || flags & OF_ADDRESS == 0 && addr != 0 {
            return Err(Errno::INVAL.into());
        }
        if flags & OF_ADDRESS != 0 && !self.state.layout.touches(&(addr..addr.saturating_add(1))) {
            return Err(Errno::FAULT.into());
        }
        if mode != 0 {
            copy_out(process, mode, &0u32.to_le_bytes())?;
        }
        if nodemask != 0 {
            let mut bytes = vec![0; (maxnode.div_ceil(64) * 8) as usize];
            if let Some(first) = bytes.first_mut().filter(|_| flags & ALLOWED != 0) {
                *first = 1;
            }
            copy_out(process, nodemask, &bytes)?;
        }
        Ok(ZERO)
    }

    /// `set_mempolicy(2)`: there is one node. The policy is checked, and not stored.
    pub(in crate::sentry) fn sys_set_mempolicy(
        &mut self,
        process: &Process,
        mode: u64,
        mask: u64,
        bits: u64,
    ) -> SyscallResult {
        self.check_memory_policy(process, mode, mask, bits)
    }

    /// `mbind(2)`: as `set_mempolicy`.
    pub(in crate::sentry) fn sys_mbind(
        &mut self,
        process: &Process,
        &[addr, len, mode, nodemask, maxnode, flags]: &[u64; 6],
    ) -> SyscallResult {
        if flags & !7 != 0 {
            return Err(Errno::INVAL.into());
        }
        if flags & MOVES_ALL != 0 {
            return Err(Errno::PERM.into());
        }
        if !addr.is_multiple_of(PAGE) {
            return Err(Errno::INVAL.into());
        }
        let end = len.checked_next_multiple_of(PAGE).and_then(|len| addr.checked_add(len));
        let end = end.ok_or(Errno::INVAL)?;
        if end > addr && !self.state.layout.allows(&(addr..end), 0) {
            return Err(Errno::FAULT.into());
        }
        self.check_memory_policy(process, mode, nodemask, maxnode)
    }

    /// Every policy means the only node.
    fn check_memory_policy(
        &self,
        process: &Process,
        mode: u64,
        mask: u64,
        bits: u64,
    ) -> SyscallResult {
        let policy = mode & !POLICY_FLAGS;
        if policy > POLICIES || bits > MAX_NODES {
            return Err(Errno::INVAL.into());
        }
        let mut nodes = Vec::new();
        if mask != 0 && bits > 0 {
            nodes = copy_in(process, mask, (bits.div_ceil(64) * 8) as usize)?;
        }
        let beyond = nodes
            .iter()
            .enumerate()
            .any(|(at, byte)| *byte & if at == 0 { 0xfe } else { 0xff } != 0);
        let empty = nodes.iter().all(|byte| *byte == 0);
        // The default and the local policy have no nodes; preferred ones may have none; others need
        // one.
        let fits = match policy {
            0 | 4 => empty,
            1 | 5 => !beyond,
            _ => !beyond && !empty,
        };
        if fits { Ok(ZERO) } else { Err(Errno::INVAL.into()) }
    }

    /// `fchmodat2(2)`: as `fchmodat`. `AT_EMPTY_PATH` takes a descriptor, and with `AT_FDCWD` it is
    /// `ENOENT`.
    pub(in crate::sentry) fn sys_fchmodat2(
        &mut self,
        process: &Process,
        at: u64,
        path: u64,
        mode: u64,
        flags: u64,
    ) -> SyscallResult {
        let known = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
        if flags as i32 & !known != 0 {
            return Err(Errno::INVAL.into());
        }
        if flags as i32 & libc::AT_EMPTY_PATH != 0
            && at as i32 != libc::AT_FDCWD
            && path_in(process, path)?.is_empty()
        {
            return self.sys_fchmod(at, mode);
        }
        if flags as i32 & libc::AT_SYMLINK_NOFOLLOW != 0 {
            let path = path_in(process, path)?;
            let named = self.reach(at, &path, |walk| walk.follow(false))?;
            if let crate::sentry::fs::proc_files::ResolvedPath::Place(place) = &named
                && place.found.is_some_and(|(_, kind)| kind == afresh_files::Kind::Link)
            {
                return Err(Errno::OPNOTSUPP.into());
            }
        }
        self.sys_fchmodat(process, at, path, mode)
    }
}
