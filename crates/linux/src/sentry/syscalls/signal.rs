//! Calls about signals: handlers, masks, stacks, and sending.

use rustix::io::Errno;

use crate::platform::{Process, Register};
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::process_info::INIT_PID;
use crate::sentry::kernel::signals::{SignalInfo, UNTOUCHABLE};
use crate::sentry::kernel::threads::NO_STACK;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallResult, ZERO};

/// Least bytes of a signal stack.
const SMALLEST_STACK: u64 = libc::MINSIGSTKSZ as u64;
/// `SI_TKILL`.
const TO_THREAD: i32 = -6;

impl Sentry {
    /// `kill(2)`, as on Linux.
    pub(in crate::sentry) fn sys_kill(&mut self, target: u64, number: u64) -> SyscallResult {
        if target as u32 == INIT_PID {
            return self.signal_init(number);
        }
        let processes = &self.state.processes;
        let own = processes.current_id();
        let targets = match target as i32 {
            -1 => processes.all_but(own),
            0 => processes.group(processes.current.info.group),
            group @ ..0 => processes.group(group.unsigned_abs()),
            // The number of a thread stands for its process.
            one => vec![self.home_of(None, one as u32).unwrap_or(one as u32)],
        };
        // A zombie exists until it is reaped, and takes no signal.
        let known = targets.iter().any(|id| processes.exists(*id));
        if !known {
            return Err(Errno::SRCH.into());
        }
        if number > 64 {
            return Err(Errno::INVAL.into());
        }
        let sender = self.state.sender(own);
        let info = |signal| SignalInfo::new(signal, 0, sender, 0);
        let all = targets.len();
        let targets: Vec<_> =
            targets.into_iter().filter(|target| self.state.may_signal(*target, number)).collect();
        if targets.is_empty() && all > 0 && target as i32 != -1 {
            return Err(Errno::PERM.into());
        }
        for target in targets.into_iter().filter(|_| number != 0) {
            if self.state.processes.lives(target) {
                self.change().send_to(target, None, info(number as u8));
            }
        }
        Ok(ZERO)
    }

    /// `tgkill`, or `tkill` when the first is no process: to one thread.
    pub(in crate::sentry) fn signal_thread(
        &mut self,
        process: Option<u64>,
        id: u64,
        number: u64,
    ) -> SyscallResult {
        if id as i32 <= 0 || process.is_some_and(|process| process as i32 <= 0) {
            return Err(Errno::INVAL.into());
        }
        let own = self.state.sender(self.state.processes.current_id());
        let thread = id as u32;
        let home = self.home_of(process.map(|process| process as u32), thread)?;
        self.post(home, Some(thread), number, |signal| SignalInfo::new(signal, TO_THREAD, own, 0))
    }

    /// `tgkill(2)`, as on Linux.
    pub(in crate::sentry) fn sys_tgkill(
        &mut self,
        pid: u64,
        tid: u64,
        signal: u64,
    ) -> SyscallResult {
        self.signal_thread(Some(pid), tid, signal)
    }

    /// `tkill(2)`, as on Linux.
    pub(in crate::sentry) fn sys_tkill(&mut self, tid: u64, signal: u64) -> SyscallResult {
        self.signal_thread(None, tid, signal)
    }

    /// The process of a thread, if that is the one which is meant.
    fn home_of(&self, process: Option<u32>, thread: u32) -> Result<u32, Errno> {
        let has = |id: &u32| {
            let home = self.state.processes.get(*id);
            home.is_some_and(|home| home.threads.get(thread).is_some())
        };
        let home = match process {
            Some(process) => Some(process).filter(has),
            None => self.state.processes.infos().map(|info| info.id).find(has),
        };
        home.ok_or(Errno::SRCH)
    }

    /// The process that a number names, which may be that of a thread.
    fn process_named(&self, id: u32) -> u32 {
        if self.state.processes.exists(id) { id } else { self.home_of(None, id).unwrap_or(id) }
    }

    /// With information of the sender: to a process, or to one of its threads.
    pub(in crate::sentry) fn queue_signal(
        &mut self,
        process: &Process,
        to: (u64, Option<u64>),
        number: u64,
        info: u64,
    ) -> SyscallResult {
        let id = self.process_named(to.0 as u32);
        let given = copy_in(process, info, 32)?;
        let code = i32::from_le_bytes([given[8], given[9], given[10], given[11]]);
        if let Some(thread) = to.1 {
            self.home_of(Some(id), thread as u32)?;
        } else if !self.state.processes.exists(id) {
            return Err(Errno::SRCH.into());
        }
        // Only to itself may a process claim another sender.
        if (code >= 0 || code == TO_THREAD) && id != self.state.processes.current_id() {
            return Err(Errno::PERM.into());
        }
        let thread = to.1.map(|thread| thread as u32);
        self.post(id, thread, number, |signal| SignalInfo::from_guest(signal, &given))
    }

    /// `rt_sigqueueinfo(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_sigqueueinfo(
        &mut self,
        process: &Process,
        pid: u64,
        signal: u64,
        info: u64,
    ) -> SyscallResult {
        self.queue_signal(process, (pid, None), signal, info)
    }

    /// `rt_tgsigqueueinfo(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_tgsigqueueinfo(
        &mut self,
        process: &Process,
        pid: u64,
        tid: u64,
        signal: u64,
        info: u64,
    ) -> SyscallResult {
        self.queue_signal(process, (pid, Some(tid)), signal, info)
    }

    /// Sends to a process, which may be a zombie.
    pub(in crate::sentry) fn post(
        &mut self,
        id: u32,
        to: Option<u32>,
        number: u64,
        info: impl FnOnce(u8) -> SignalInfo,
    ) -> SyscallResult {
        if !self.state.processes.exists(id) {
            return Err(Errno::SRCH.into());
        }
        if number > 64 {
            return Err(Errno::INVAL.into());
        }
        if !self.state.may_signal(id, number) {
            return Err(Errno::PERM.into());
        }
        match number {
            1.. if self.state.processes.lives(id) => {
                let info = info(number as u8);
                let sent = self.change().send_to(id, to, info);
                if sent { Ok(ZERO) } else { Err(Errno::AGAIN.into()) }
            }
            _ => Ok(ZERO),
        }
    }

    /// `rt_sigaction(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_sigaction(
        &mut self,
        process: &mut Process,
        signal: u64,
        new: u64,
        old: u64,
        size: u64,
    ) -> SyscallResult {
        if !(1..=64).contains(&signal) || size != 8 {
            return Err(Errno::INVAL.into());
        }
        let known = self.state.current().handlers.get(&signal).copied().unwrap_or_default();
        if new != 0 {
            if UNTOUCHABLE & 1 << (signal - 1) != 0 {
                return Err(Errno::INVAL.into());
            }
            let bytes = copy_in(process, new, 32)?;
            let bytes: [u8; 32] = bytes.try_into().map_err(|_| Errno::FAULT)?;
            self.set_action(signal, bytes);
        }
        if old != 0 {
            copy_out(process, old, &known)?;
        }
        Ok(ZERO)
    }

    /// Sets the action of the current process for a signal, and drops pending ones that it ignores.
    pub(in crate::sentry) fn set_action(&mut self, signal: u64, mut action: [u8; 32]) {
        // A handler blocks neither of the two that cannot be blocked.
        for (byte, untouchable) in action[24..].iter_mut().zip(UNTOUCHABLE.to_le_bytes()) {
            *byte &= !untouchable;
        }
        let current = &mut self.change().processes.current;
        current.handlers.insert(signal, action);
        if action[..8] == [1, 0, 0, 0, 0, 0, 0, 0] {
            current.pending.drop_all(signal as u8);
            current.threads.values_mut().for_each(|t| t.pending.drop_all(signal as u8));
        }
        self.change().spread_action(signal);
    }

    /// `rt_sigprocmask(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_sigprocmask(
        &mut self,
        process: &mut Process,
        how: u64,
        set: u64,
        old: u64,
        size: u64,
    ) -> SyscallResult {
        if size != 8 {
            return Err(Errno::INVAL.into());
        }
        let blocked = self.state.current().threads.current().blocked;
        if set != 0 {
            let set = word_in(process, set)?;
            let new = match how as i32 {
                libc::SIG_BLOCK => blocked | set,
                libc::SIG_UNBLOCK => blocked & !set,
                libc::SIG_SETMASK => set,
                _ => return Err(Errno::INVAL.into()),
            };
            let new = new & !UNTOUCHABLE;
            if new != blocked {
                self.change().current_mut().threads.current_mut().blocked = new;
            }
        }
        if old != 0 {
            copy_out(process, old, &blocked.to_le_bytes())?;
        }
        Ok(ZERO)
    }

    /// `rt_sigpending(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_sigpending(
        &mut self,
        process: &mut Process,
        to: u64,
        size: u64,
    ) -> SyscallResult {
        if size > 8 {
            return Err(Errno::INVAL.into());
        }
        let thread = self.state.current().threads.current();
        let set = (thread.pending.set() | self.state.current().pending.set()) & thread.blocked;
        copy_out(process, to, &set.to_le_bytes()[..size as usize])?;
        Ok(ZERO)
    }

    /// `sigaltstack(2)`: `SS_AUTODISARM` is `EINVAL`.
    pub(in crate::sentry) fn sys_sigaltstack(
        &mut self,
        process: &mut Process,
        new: u64,
        old: u64,
    ) -> SyscallResult {
        let known = self.state.current().threads.current().signal_stack;
        let on_it = process.register(Register::STACK).wrapping_sub(known[0]) < known[2];
        if new != 0 {
            let mut stack = [0; 3];
            for (index, word) in stack.iter_mut().enumerate() {
                *word = word_in(process, new.wrapping_add(8 * index as u64))?;
            }
            stack[1] &= u64::from(u32::MAX);
            if on_it {
                return Err(Errno::PERM.into());
            }
            let stack = match stack[1] {
                2 => NO_STACK,
                0 | 1 if stack[2] < SMALLEST_STACK => return Err(Errno::NOMEM.into()),
                0 | 1 => [stack[0], 0, stack[2]],
                _ => return Err(Errno::INVAL.into()),
            };
            if stack != known {
                self.change().current_mut().threads.current_mut().signal_stack = stack;
            }
        }
        if old != 0 {
            let flags = if on_it { 1 } else { known[1] };
            let bytes = StructBuilder::default().word(known[0]).word(flags).word(known[2]);
            copy_out(process, old, &bytes.0)?;
        }
        Ok(ZERO)
    }
}
