//! `prctl`, and system calls on users and capabilities. A guest has one user without privileges.

use crate::platform::Process;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::identity::USER;
use crate::sentry::kernel::prctl_state::{CAPABILITIES, SLACK};
use crate::sentry::kernel::process_info::NOBODY;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::{Kernel, Sentry, SyscallControl, SyscallResult, ZERO, copy_in, copy_out};

use rustix::io::Errno;

const PR_SET_PTRACER: i32 = 0x5961_6d61;
const PR_SET_VMA: i32 = 0x5356_4d41;
/// Form of `capget` and `capset`, the last one (`_LINUX_CAPABILITY_VERSION_3`).
const FORM: u32 = 0x2008_0522;

impl Sentry {
    pub(in crate::sentry) fn sys_prctl(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        let value = a[1];
        let own = self.state.current().info.traits;
        let told = |value: u64| Ok(SyscallControl::Value(value));
        let switch = match value {
            0 | 1 => Ok(value == 1),
            _ => Err(Errno::INVAL),
        };
        let mut new = own;
        match a[0] as i32 {
            libc::PR_SET_NAME => {
                // The name ends where its page may.
                let mut name = [0; 16];
                for (index, byte) in name[..15].iter_mut().enumerate() {
                    *byte = copy_in(process, value.wrapping_add(index as u64), 1)?[0];
                    if *byte == 0 {
                        break;
                    }
                }
                self.change().current_mut().threads.current_mut().name = name;
            }
            libc::PR_GET_NAME => {
                copy_out(process, value, &self.state.current().threads.current().name)?
            }
            libc::PR_SET_PDEATHSIG => match value {
                0 => new.death = None,
                1..=64 => new.death = Some(value as u8),
                _ => return Err(Errno::INVAL.into()),
            },
            libc::PR_GET_PDEATHSIG => {
                let signal = own.death.map_or(0, u32::from);
                copy_out(process, value, &signal.to_le_bytes())?;
            }
            libc::PR_SET_CHILD_SUBREAPER => new.adopts = value != 0,
            libc::PR_GET_CHILD_SUBREAPER => {
                copy_out(process, value, &u32::from(own.adopts).to_le_bytes())?;
            }
            libc::PR_SET_DUMPABLE => new.undumpable = !switch?,
            libc::PR_GET_DUMPABLE => return told(u64::from(!own.undumpable)),
            libc::PR_SET_NO_NEW_PRIVS if value == 1 && a[2..5] == [0; 3] => new.unprivileged = true,
            libc::PR_GET_NO_NEW_PRIVS if a[1..5] == [0; 4] => return told(own.unprivileged.into()),
            libc::PR_SET_TIMERSLACK => new.slack = if value == 0 { SLACK } else { value },
            libc::PR_GET_TIMERSLACK => return told(own.slack),
            libc::PR_GET_TID_ADDRESS => {
                let at = self.state.current().threads.current().cleared;
                copy_out(process, value, &at.to_le_bytes())?;
            }
            // As for a process without privileges: the bounding set is full, and no capability is
            // held.
            libc::PR_CAPBSET_READ if value <= CAPABILITIES => return told(1),
            libc::PR_CAPBSET_DROP | libc::PR_SET_SECUREBITS | libc::PR_SET_MM => {
                return Err(Errno::PERM.into());
            }
            libc::PR_CAP_AMBIENT => match value as i32 {
                libc::PR_CAP_AMBIENT_CLEAR_ALL if a[2..5] == [0; 3] => {}
                libc::PR_CAP_AMBIENT_IS_SET | libc::PR_CAP_AMBIENT_LOWER
                    if a[2] <= CAPABILITIES => {}
                libc::PR_CAP_AMBIENT_RAISE if a[2] <= CAPABILITIES => {
                    return Err(Errno::PERM.into());
                }
                _ => return Err(Errno::INVAL.into()),
            },
            libc::PR_SET_KEEPCAPS => drop(switch?),
            libc::PR_GET_KEEPCAPS
            | libc::PR_GET_SECUREBITS
            | libc::PR_GET_SECCOMP
            | libc::PR_GET_THP_DISABLE => {}
            // There is no tracer, and names of memory are not shown.
            PR_SET_PTRACER | PR_SET_VMA | libc::PR_SET_THP_DISABLE => {}
            _ => return Err(Errno::INVAL.into()),
        }
        if new != own {
            self.change().current_mut().info.traits = new;
        }
        Ok(ZERO)
    }

    /// `setuid` and its kind: only to the present ID.
    pub(in crate::sentry) fn set_ids(&mut self, ids: &[u64]) -> SyscallResult {
        let stays = |id: &u64| *id as u32 == u32::MAX || *id as u32 == USER as u32;
        if ids.iter().all(stays) { Ok(ZERO) } else { Err(Errno::PERM.into()) }
    }

    /// `capget`: none.
    pub(in crate::sentry) fn sys_capget(
        &mut self,
        process: &mut Process,
        head: u64,
        to: u64,
    ) -> SyscallResult {
        let known = copy_in(process, head, 8)?;
        if known[..4] != FORM.to_le_bytes() {
            copy_out(process, head, &FORM.to_le_bytes())?;
            return if to == 0 { Ok(ZERO) } else { Err(Errno::INVAL.into()) };
        }
        let id = u32::from_le_bytes([known[4], known[5], known[6], known[7]]);
        if id != 0 && !self.state.processes.lives(id) {
            return Err(Errno::SRCH.into());
        }
        if to != 0 {
            copy_out(process, to, &StructBuilder::default().zeros(24).0)?;
        }
        Ok(ZERO)
    }

    /// `capset`: to none.
    pub(in crate::sentry) fn sys_capset(
        &mut self,
        process: &Process,
        head: u64,
        from: u64,
    ) -> SyscallResult {
        if copy_in(process, head, 4)? != FORM.to_le_bytes() {
            return Err(Errno::INVAL.into());
        }
        let none = copy_in(process, from, 24)?.iter().all(|byte| *byte == 0);
        if none { Ok(ZERO) } else { Err(Errno::PERM.into()) }
    }
}

impl Kernel {
    /// Notifies the children of `id`, which ends, and gives them to the next ancestor that adopts
    /// orphans, else to `init`. `parent` is that of `id`.
    pub(in crate::sentry) fn leave_children(&mut self, id: u32, parent: u32) {
        let mut heir = parent;
        while let Some(info) = self.processes.info(heir).filter(|info| !info.traits.adopts) {
            heir = info.parent;
        }
        let children = self.processes.infos().filter(|info| info.parent == id);
        let children: Vec<_> = children.map(|info| (info.id, info.traits.death)).collect();
        for (child, signal) in children {
            let parent = if self.processes.lives(heir) { heir } else { NOBODY };
            if let Some(info) = self.processes.info_mut(child) {
                info.parent = parent;
            }
            if let Some(signal) = signal {
                let info = SignalInfo::new(signal, 0, id.into(), 0);
                self.with(child, |state| state.send(None, info));
            }
        }
        self.processes.reparent_ended(id, heir);
    }
}
