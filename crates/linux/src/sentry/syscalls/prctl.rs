//! `prctl`, and system calls on users and capabilities.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::kernel::prctl_state::CAPABILITIES;
use crate::sentry::kernel::process_info::INIT_PID;
use crate::sentry::kernel::signals::SignalInfo;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::user_namespaces::Credentials;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

use rustix::io::Errno;

const PR_SET_PTRACER: i32 = 0x5961_6d61;
const PR_SET_VMA: i32 = 0x5356_4d41;

impl Sentry {
    /// `prctl(2)`: names, the death signal, child subreapers, dumpability, `no_new_privs`, timer
    /// slack and capabilities. Names of memory and tracers are accepted, and most other options are
    /// `EINVAL`.
    pub(in crate::sentry) fn sys_prctl(
        &mut self,
        process: &mut Process,
        &[op, arg2, arg3, arg4, arg5, _]: &[u64; 6],
    ) -> SyscallResult {
        let value = arg2;
        let own = self.state.current().info.traits;
        let answer = |value: u64| Ok(SyscallControl::Value(value));
        let switch = match value {
            0 | 1 => Ok(value == 1),
            _ => Err(Errno::INVAL),
        };
        let mut new = own;
        match op as i32 {
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
            libc::PR_GET_DUMPABLE => return answer(u64::from(!own.undumpable)),
            libc::PR_SET_NO_NEW_PRIVS if value == 1 && [arg3, arg4, arg5] == [0; 3] => {
                new.unprivileged = true
            }
            libc::PR_GET_NO_NEW_PRIVS if [arg2, arg3, arg4, arg5] == [0; 4] => {
                return answer(own.unprivileged.into());
            }
            libc::PR_SET_TIMERSLACK => {
                let own = self.state.processes.current_id();
                new.slack = if value == 0 { self.state.slacks.of(own) } else { value };
            }
            libc::PR_GET_TIMERSLACK => return answer(own.slack),
            libc::PR_GET_TID_ADDRESS => {
                let at = self.state.current().threads.current().cleared;
                copy_out(process, value, &at.to_le_bytes())?;
            }
            libc::PR_CAPBSET_READ if value <= CAPABILITIES => {
                let bounding = self.state.bounding_set(self.state.credentials().namespace);
                return answer(bounding >> value & 1);
            }
            libc::PR_CAPBSET_DROP | libc::PR_SET_SECUREBITS | libc::PR_SET_MM => {
                return Err(Errno::PERM.into());
            }
            libc::PR_CAP_AMBIENT => match value as i32 {
                libc::PR_CAP_AMBIENT_CLEAR_ALL if [arg3, arg4, arg5] == [0; 3] => {}
                libc::PR_CAP_AMBIENT_IS_SET | libc::PR_CAP_AMBIENT_LOWER
                    if arg3 <= CAPABILITIES => {}
                libc::PR_CAP_AMBIENT_RAISE if arg3 <= CAPABILITIES => {
                    return Err(Errno::PERM.into());
                }
                _ => return Err(Errno::INVAL.into()),
            },
            libc::PR_SET_KEEPCAPS => {
                let (id, keeps) = (self.state.processes.current_id(), switch?);
                let credentials = Credentials { keeps, ..self.state.credentials() };
                self.change().namespaces.set(id, credentials);
            }
            libc::PR_GET_KEEPCAPS => return answer(self.state.credentials().keeps.into()),
            libc::PR_GET_SECUREBITS | libc::PR_GET_SECCOMP => {}
            libc::PR_GET_THP_DISABLE if [arg2, arg3, arg4, arg5] == [0; 4] => {}
            // There are no huge pages to disable.
            libc::PR_SET_THP_DISABLE if [arg3, arg4, arg5] == [0; 3] => {}
            // There is no tracer, and names of memory are not shown.
            PR_SET_PTRACER | PR_SET_VMA => {}
            _ => return Err(Errno::INVAL.into()),
        }
        if new != own {
            self.change().current_mut().info.traits = new;
        }
        Ok(ZERO)
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
            let parent = if self.processes.lives(heir) { heir } else { INIT_PID };
            if let Some(info) = self.processes.info_mut(child) {
                info.parent = parent;
            }
            if let Some(signal) = signal {
                let info = SignalInfo::new(signal, 0, self.sender(id), 0);
                self.send_to(child, None, info);
            }
        }
        self.processes.reparent_ended(id, heir);
    }
}
