//! Priorities and scheduling. They are settings that are stored, and change nothing: the threads of
//! a guest take turns.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::prctl_state::PrctlState;
use crate::sentry::kernel::process_info::INIT_PID;
use crate::sentry::kernel::users::REAL;
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Which processes a priority is of (`PRIO_PROCESS` and its like).
const PROCESS: i32 = libc::PRIO_PROCESS as i32;
const GROUP: i32 = libc::PRIO_PGRP as i32;
const OF_USER: i32 = libc::PRIO_USER as i32;
const NICEST: i32 = 19;
const LEAST_NICE: i32 = -20;
/// Length of `struct sched_attr`: of its first version, and of the present one.
const ATTRIBUTES: std::ops::RangeInclusive<usize> = 48..=56;
/// Nanoseconds of a turn, as `sched_rr_get_interval` returns them.
const INTERVAL: u64 = 4_000_000;
/// Which processes `ioprio_get` and `ioprio_set` mean.
const IOPRIO_WHO_PROCESS: i32 = 1;
const IOPRIO_WHO_USER: i32 = 3;
/// Bits of an I/O priority that say its class.
const IOPRIO_CLASS: u32 = 13;

/// Whether a process without privilege may have a policy.
fn check_policy(policy: i32, priority: i32) -> Result<(), Errno> {
    match policy {
        libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE if priority == 0 => Ok(()),
        libc::SCHED_FIFO | libc::SCHED_RR if (1..=99).contains(&priority) => Err(Errno::PERM),
        _ => Err(Errno::INVAL),
    }
}

impl Sentry {
    /// The process with a thread of this number, the current one for 0.
    fn scheduled(&self, id: u64) -> Result<u32, Errno> {
        let (id, state) = (id as i32, &self.state);
        if id < 0 {
            return Err(Errno::INVAL);
        }
        if id == 0 || state.processes.current.threads.get(id as u32).is_some() {
            return Ok(state.processes.current_id());
        }
        if id as u32 == INIT_PID {
            return Ok(INIT_PID);
        }
        state.processes.info(id as u32).map(|info| info.id).ok_or(Errno::SRCH)
    }

    /// As [`Self::scheduled`]. Refuses a process of another user.
    fn schedulable(&self, id: u64) -> Result<u32, Errno> {
        let process = self.scheduled(id)?;
        if process != INIT_PID && self.state.may_schedule(process) {
            Ok(process)
        } else {
            Err(Errno::PERM)
        }
    }

    fn traits_of(&self, process: u32) -> Result<PrctlState, Errno> {
        if process == INIT_PID {
            return Ok(PrctlState::default());
        }
        self.state.processes.info(process).map(|info| info.traits).ok_or(Errno::SRCH)
    }

    fn change_traits(&mut self, process: u32, change: impl FnOnce(&mut PrctlState)) {
        self.change().with(process, |state| change(&mut state.processes.current.info.traits));
    }

    /// The processes that `getpriority` and its like mean.
    fn named_processes(&self, which: i32, who: u64) -> Result<Vec<u32>, Errno> {
        let (own, who) = (&self.state.current().info, who as u32);
        let found = match which {
            // A negative number is an unknown one here.
            PROCESS if (who as i32) < 0 => Vec::new(),
            PROCESS => vec![self.scheduled(who.into())?],
            GROUP => self.state.processes.group(if who == 0 { own.group } else { who }),
            OF_USER => {
                let user = |id| self.state.seen_ids(id).user[REAL];
                let meant = if who == 0 { user(own.id) } else { who };
                let all = self.state.processes.infos().map(|info| info.id);
                all.filter(|id| user(*id) == meant).collect()
            }
            _ => return Err(Errno::INVAL),
        };
        if found.is_empty() { Err(Errno::SRCH) } else { Ok(found) }
    }

    /// `getpriority(2)`: the nice value is that of a process, and its threads have the same.
    pub(in crate::sentry) fn sys_getpriority(&mut self, which: u64, who: u64) -> SyscallResult {
        let processes = self.named_processes(which as i32, who)?;
        let nices = processes.into_iter().map(|id| self.traits_of(id).map(|traits| traits.nice));
        let least = nices.collect::<Result<Vec<_>, _>>()?.into_iter().min().unwrap_or_default();
        // Never negative: 40 is -20.
        Ok(SyscallControl::Value((20 - i32::from(least)) as u64))
    }

    /// `setpriority(2)`: the nice value is stored for a process, and threads take turns whatever it
    /// is.
    pub(in crate::sentry) fn sys_setpriority(
        &mut self,
        which: u64,
        who: u64,
        nice: u64,
    ) -> SyscallResult {
        let nice = (nice as i32).clamp(LEAST_NICE, NICEST) as i8;
        let mut result = Ok(ZERO);
        for process in self.named_processes(which as i32, who)? {
            if !self.state.may_schedule(process) {
                result = Err(Errno::PERM.into());
                continue;
            }
            if nice < self.traits_of(process)?.nice {
                return Err(Errno::ACCESS.into());
            }
            self.change_traits(process, |traits| traits.nice = nice);
        }
        result
    }

    /// `sched_getscheduler(2)`: the policy is stored for a process, and its threads have the same.
    pub(in crate::sentry) fn sys_sched_getscheduler(&mut self, id: u64) -> SyscallResult {
        let traits = self.traits_of(self.scheduled(id)?)?;
        Ok(SyscallControl::Value(u64::from(traits.policy)))
    }

    /// `sched_setscheduler(2)`: the policy is stored for a process, and threads take turns whatever
    /// it is. Real-time policies are `EPERM`.
    pub(in crate::sentry) fn sys_sched_setscheduler(
        &mut self,
        process: &Process,
        id: u64,
        policy: u64,
        parameters: u64,
    ) -> SyscallResult {
        if parameters == 0 || (id as i32) < 0 {
            return Err(Errno::INVAL.into());
        }
        let priority = int_in(process, parameters)?;
        let target = self.scheduled(id)?;
        // Whether children have it, too, which they do here.
        let policy = policy as i32 & !libc::SCHED_RESET_ON_FORK;
        // Linux looks at the policy before the user.
        let allowed = check_policy(policy, priority);
        if allowed != Err(Errno::INVAL) {
            self.schedulable(id)?;
        }
        allowed?;
        self.change_traits(target, |traits| traits.policy = policy as u8);
        Ok(ZERO)
    }

    /// `sched_getparam(2)`: the priority is 0.
    pub(in crate::sentry) fn sys_sched_getparam(
        &mut self,
        process: &mut Process,
        id: u64,
        to: u64,
    ) -> SyscallResult {
        if to == 0 {
            return Err(Errno::INVAL.into());
        }
        self.scheduled(id)?;
        copy_out(process, to, &[0; 4])?;
        Ok(ZERO)
    }

    /// `sched_setparam(2)`: as `sched_setscheduler`.
    pub(in crate::sentry) fn sys_sched_setparam(
        &mut self,
        process: &Process,
        id: u64,
        parameters: u64,
    ) -> SyscallResult {
        let policy = self.traits_of(self.schedulable(id)?)?.policy;
        check_policy(policy.into(), int_in(process, parameters)?)?;
        Ok(ZERO)
    }

    /// `sched_get_priority_max(2)`, as on Linux.
    pub(in crate::sentry) fn sys_sched_get_priority_max(&mut self, policy: u64) -> SyscallResult {
        priority(policy, 99)
    }

    /// `sched_get_priority_min(2)`, as on Linux.
    pub(in crate::sentry) fn sys_sched_get_priority_min(&mut self, policy: u64) -> SyscallResult {
        priority(policy, 1)
    }

    /// `sched_rr_get_interval(2)`: 4 ms for every process.
    pub(in crate::sentry) fn sys_sched_rr_get_interval(
        &mut self,
        process: &mut Process,
        id: u64,
        to: u64,
    ) -> SyscallResult {
        self.scheduled(id)?;
        copy_out(process, to, &StructBuilder::default().word(0).word(INTERVAL).0)?;
        Ok(ZERO)
    }

    /// `sched_setaffinity(2)`: there is one processor, which the set must have.
    pub(in crate::sentry) fn sys_sched_setaffinity(
        &mut self,
        process: &Process,
        id: u64,
        len: u64,
        set: u64,
    ) -> SyscallResult {
        self.schedulable(id)?;
        let set = copy_in(process, set, len.min(8) as usize)?;
        match set.first() {
            Some(first) if first & 1 != 0 => Ok(ZERO),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// `sched_getattr(2)`: as `sched_getscheduler`, and all but the policy and the nice value is 0.
    pub(in crate::sentry) fn sys_sched_getattr(
        &mut self,
        process: &mut Process,
        id: u64,
        to: u64,
        len: u64,
        flags: u64,
    ) -> SyscallResult {
        if to == 0 || flags as u32 != 0 || (len as usize) < *ATTRIBUTES.start() || len > 4096 {
            return Err(Errno::INVAL.into());
        }
        let traits = self.traits_of(self.scheduled(id)?)?;
        let len = (len as usize).min(*ATTRIBUTES.end());
        let head = StructBuilder::default().int(len as u32).int(u32::from(traits.policy)).word(0);
        let mut bytes = head.int(i32::from(traits.nice) as u32).0;
        bytes.resize(len, 0);
        copy_out(process, to, &bytes)?;
        Ok(ZERO)
    }

    /// `sched_setattr(2)`: as `sched_setscheduler`. The policy and the nice value are stored, and
    /// the rest is ignored.
    pub(in crate::sentry) fn sys_sched_setattr(
        &mut self,
        process: &Process,
        id: u64,
        from: u64,
        flags: u64,
    ) -> SyscallResult {
        if from == 0 {
            return Err(Errno::INVAL.into());
        }
        let target = self.schedulable(id)?;
        let len = int_in(process, from)?;
        if len != 0 && (len as usize) < *ATTRIBUTES.start() {
            return Err(Errno::TOOBIG.into());
        }
        if flags as u32 != 0 {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, from, *ATTRIBUTES.start())?;
        let int = |at: usize| i32::from_le_bytes([0, 1, 2, 3].map(|n| bytes[at + n]));
        let (policy, nice, priority) = (int(4), int(16), int(20));
        check_policy(policy, priority)?;
        let nice = nice.clamp(LEAST_NICE, NICEST) as i8;
        if nice < self.traits_of(target)?.nice {
            return Err(Errno::PERM.into());
        }
        self.change_traits(target, |traits| (traits.policy, traits.nice) = (policy as u8, nice));
        Ok(ZERO)
    }

    /// `ioprio_get(2)`: the priority is that of a process, and its threads have the same.
    pub(in crate::sentry) fn sys_ioprio_get(&mut self, which: u64, who: u64) -> SyscallResult {
        let processes = self.ioprio_processes(which as i32, who)?;
        let first = processes.first().ok_or(Errno::SRCH)?;
        Ok(SyscallControl::Value(self.traits_of(*first)?.io_priority.into()))
    }

    /// `ioprio_set(2)`: the priority is stored for a process, and changes nothing.
    pub(in crate::sentry) fn sys_ioprio_set(
        &mut self,
        which: u64,
        who: u64,
        priority: u64,
    ) -> SyscallResult {
        let priority = priority as u32;
        match (priority >> IOPRIO_CLASS, priority & 7) {
            (0, 0) | (2 | 3, _) => {}
            // Real time is for privileged processes.
            (1, _) => return Err(Errno::PERM.into()),
            _ => return Err(Errno::INVAL.into()),
        }
        for process in self.ioprio_processes(which as i32, who)? {
            if !self.state.may_schedule(process) {
                return Err(Errno::PERM.into());
            }
            self.change_traits(process, |traits| traits.io_priority = priority as u16);
        }
        Ok(ZERO)
    }

    fn ioprio_processes(&self, which: i32, who: u64) -> Result<Vec<u32>, Errno> {
        match which {
            IOPRIO_WHO_PROCESS..=IOPRIO_WHO_USER => {
                self.named_processes(which - IOPRIO_WHO_PROCESS, who)
            }
            _ => Err(Errno::INVAL),
        }
    }
}

fn int_in(process: &Process, at: u64) -> SyscallResult<i32> {
    if at == 0 {
        return Err(Errno::INVAL.into());
    }
    let bytes = copy_in(process, at, 4)?;
    Ok(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// A bound of the priorities of a policy.
fn priority(policy: u64, real_time: u64) -> SyscallResult {
    match policy as i32 {
        libc::SCHED_FIFO | libc::SCHED_RR => Ok(SyscallControl::Value(real_time)),
        libc::SCHED_OTHER | libc::SCHED_BATCH | libc::SCHED_IDLE | libc::SCHED_DEADLINE => Ok(ZERO),
        _ => Err(Errno::INVAL.into()),
    }
}
