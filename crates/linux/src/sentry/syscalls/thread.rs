//! System calls that create, end and suspend threads, and futexes.

use afresh_files::Node;
use rustix::io::Errno;

use crate::platform::{GUEST, Process};
use crate::sentry::Sentry;
use crate::sentry::kernel::streams::End;
use crate::sentry::kernel::threads::{FutexKey, NO_STACK, Thread, Threads, Wait, WaitReason};
use crate::sentry::kernel::tracing::EVENT_CLONE;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::length_in;

/// Flags that a clone needs to be a thread.
const SHARED: i32 =
    libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;

// Operations of `futex`, without the bits for private memory and the clock.
const WAIT: i32 = 0;
const WAKE: i32 = 1;
const REQUEUE: i32 = 3;
const CMP_REQUEUE: i32 = 4;
const WAKE_OP: i32 = 5;
const WAIT_BITSET: i32 = 9;
const WAKE_BITSET: i32 = 10;
const LOCK_PI: i32 = 6;
const UNLOCK_PI: i32 = 7;
const TRYLOCK_PI: i32 = 8;
const LOCK_PI2: i32 = 13;
pub(in crate::sentry) const PRIVATE: i32 = 128;
const REALTIME: i32 = 256;

/// Whether an operation of `futex` waits for a lock.
pub(in crate::sentry) fn takes_lock(operation: u64) -> bool {
    matches!(operation as i32 & 0x7f, LOCK_PI | LOCK_PI2)
}

pub(in crate::sentry) fn int_in(process: &Process, address: u64) -> SyscallResult<u32> {
    let bytes = copy_in(process, address, 4)?;
    Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

impl Sentry {
    /// A new thread of the guest: a value in the table of threads.
    pub(in crate::sentry) fn clone_thread(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        let [flags, stack, parent, child, base, _] = *a;
        let flags = flags as i32;
        if flags & SHARED != SHARED {
            return self.refuse_unknown(libc::SYS_clone);
        }
        self.state.current().threads.check_room()?;
        self.state.check_tasks()?;
        let base = (flags & libc::CLONE_SETTLS != 0).then_some(base);
        if base.is_some_and(|base| base >= GUEST.end) {
            return Err(Errno::PERM.into());
        }
        let context = process.context().child((stack != 0).then_some(stack), base);
        let threads = &mut self.change().current_mut().threads;
        let (blocked, name) = (threads.current().blocked, threads.current().name);
        let id = threads.add(Thread {
            context: Some(context),
            wait: None,
            blocked,
            masked: None,
            pending: Default::default(),
            signal_stack: NO_STACK,
            name,
            spent: 0,
            robust: 0,
            cleared: if flags & libc::CLONE_CHILD_CLEARTID != 0 { child } else { 0 },
        });
        if flags & libc::CLONE_UNTRACED == 0 {
            let own = self.state.processes.current_id();
            self.note_new(EVENT_CLONE, own, id);
        }
        for (flag, at) in [(libc::CLONE_PARENT_SETTID, parent), (libc::CLONE_CHILD_SETTID, child)] {
            if flags & flag != 0 {
                // As in Linux, a place that cannot be written is the guest's loss.
                let _ = process.write(at, &id.to_le_bytes())?;
            }
        }
        Ok(SyscallControl::Value(id.into()))
    }

    /// `exit(2)`, as on Linux.
    pub(in crate::sentry) fn sys_exit(
        &mut self,
        process: &mut Process,
        status: u64,
    ) -> SyscallResult {
        if self.state.current().threads.len() == 1 {
            return Ok(SyscallControl::End(End::Exit(status as i32 & 0xff)));
        }
        if let Err(SyscallError::Broken(error)) = self.mark_mutexes(process) {
            return Err(error.into());
        }
        let cleared = self.state.current().threads.current().cleared;
        if self.state.processes.timed {
            // Not the time of the thread that is current then.
            self.account(process);
        }
        if !self.state.processes.tracing.is_empty() {
            let own = self.state.current().threads.current_id();
            self.change().drop_tracee(own, (status as i32 & 0xff) << 8);
        }
        if let Some(context) = self.change().current_mut().threads.remove_current() {
            process.set_context(&context);
        }
        if !self.state.keys.is_empty() {
            self.change().drop_keyrings();
        }
        if cleared != 0 {
            let _ = process.write(cleared, &[0; 4])?;
            let futex = self.shared_futex(cleared);
            self.wake(futex, 1, u32::MAX);
        }
        Ok(SyscallControl::Gone)
    }

    /// `exit_group(2)`, as on Linux.
    pub(in crate::sentry) fn sys_exit_group(&mut self, status: u64) -> SyscallResult {
        Ok(SyscallControl::End(End::Exit(status as i32 & 0xff)))
    }

    /// `set_tid_address(2)`, as on Linux.
    pub(in crate::sentry) fn sys_set_tid_address(&mut self, address: u64) -> SyscallResult {
        if self.state.current().threads.current().cleared != address {
            self.change().current_mut().threads.current_mut().cleared = address;
        }
        Ok(SyscallControl::Value(self.state.current().threads.current_id().into()))
    }

    /// Wakes up to `count` waiters of a futex, and returns their number.
    pub(in crate::sentry) fn wake(&mut self, futex: FutexKey, count: u32, bits: u32) -> u64 {
        let mut woken = self.wake_own(futex, count, bits);
        woken += self.wake_others(futex, count - woken, bits);
        if let Some(unplaced) = futex.unplaced() {
            woken += self.wake_own(unplaced, count - woken, bits);
        }
        woken.into()
    }

    /// Wakes up to `count` waiters of the current process, and returns their number.
    fn wake_own(&mut self, futex: FutexKey, count: u32, bits: u32) -> u32 {
        let waiting = self.state.current().threads.waiting(futex, bits);
        let woken = waiting.len().min(count as usize);
        if woken > 0 {
            let threads = &mut self.change().current_mut().threads;
            for id in &waiting[..woken] {
                if let Some(wait) = threads.get_mut(*id).and_then(|thread| thread.wait.as_mut()) {
                    wait.wake(futex);
                }
            }
        }
        woken as u32
    }

    /// The futex whose word is at `address`, if the call has these flags.
    pub(in crate::sentry) fn futex_at(&self, address: u64, flags: i32) -> FutexKey {
        match flags & PRIVATE {
            0 => self.shared_futex(address),
            _ => FutexKey::private(address),
        }
    }

    /// The futex whose word is at `address`, which may be in shared memory.
    pub(in crate::sentry) fn shared_futex(&self, address: u64) -> FutexKey {
        let shared = || {
            let parts = self.state.layout.parts(&(address..address.checked_add(1)?));
            let share = parts.first().and_then(|(_, mapping)| mapping.share)?;
            Some(FutexKey::shared(address, share.node, share.offset(address)))
        };
        shared().unwrap_or(FutexKey::private(address))
    }

    /// Wakes up to `count` threads of other processes that wait at the same word. Returns their
    /// number.
    fn wake_others(&mut self, futex: FutexKey, count: u32, bits: u32) -> u32 {
        let has_place = futex.place.is_some();
        if count == 0 || !self.state.processes.has_other_threads(has_place) {
            return 0;
        }
        let mut left = count as usize;
        for threads in self.change().processes.other_threads_mut(has_place) {
            for id in threads.waiting(futex, bits).into_iter().take(left) {
                if let Some(wait) = threads.get_mut(id).and_then(|thread| thread.wait.as_mut()) {
                    wait.wake(futex);
                    left -= 1;
                }
            }
        }
        count - left as u32
    }

    /// Moves up to `most` waiters of other processes to another word, if both words or neither have
    /// a place in shared memory. Returns their number.
    fn requeue_others(
        &mut self,
        from: FutexKey,
        to: (u64, Option<(Node, u64)>),
        most: usize,
    ) -> usize {
        let has_place = from.place.is_some();
        let is_mixed = has_place != to.1.is_some();
        if is_mixed || most == 0 || !self.state.processes.has_other_threads(has_place) {
            return 0;
        }
        let mut moved = 0;
        for threads in self.change().processes.other_threads_mut(has_place) {
            let mut waiting = threads.waiting(from, u32::MAX);
            waiting.retain(|id| threads.waits_for_one(*id));
            let part = &waiting[..waiting.len().min(most - moved)];
            requeue(threads, part, to);
            moved += part.len();
        }
        moved
    }

    /// `futex(2)`: requeues between an ordinary futex and one with priority inheritance are
    /// `ENOSYS`, and owners inherit no priority. A requeue between a private word and another
    /// one moves threads of the calling process only.
    pub(in crate::sentry) fn sys_futex(
        &mut self,
        process: &mut Process,
        &[uaddr, futex_op, val, timeout, uaddr2, val3]: &[u64; 6],
    ) -> SyscallResult {
        if !uaddr.is_multiple_of(4) {
            return Err(Errno::INVAL.into());
        }
        let futex_op = futex_op as i32;
        match futex_op & 0x7f {
            kind @ (WAIT | WAIT_BITSET) => {
                let bits = if kind == WAIT { u32::MAX } else { val3 as u32 };
                if bits == 0 {
                    return Err(Errno::INVAL.into());
                }
                if let Some(wait) = &self.resumed {
                    // A thread that continues was woken, or its time is over.
                    return if wait.woken { Ok(ZERO) } else { Err(Errno::TIMEDOUT.into()) };
                }
                if int_in(process, uaddr)? != val as u32 {
                    return Err(Errno::AGAIN.into());
                }
                let until = match timeout {
                    0 => None,
                    at => {
                        let clock = match futex_op & REALTIME {
                            0 => libc::CLOCK_MONOTONIC,
                            _ => libc::CLOCK_REALTIME,
                        };
                        let length = length_in(process, at)?;
                        Some(self.moment_after(clock as u64, length, kind == WAIT_BITSET)?)
                    }
                };
                let order = self.change().current_mut().threads.next_order();
                let place = self.futex_at(uaddr, futex_op).place;
                let reason = WaitReason::Futex { address: uaddr, bits, order, place };
                Ok(SyscallControl::Wait(Wait::new(reason, until)))
            }
            WAKE => {
                let futex = self.futex_at(uaddr, futex_op);
                Ok(SyscallControl::Value(self.wake(futex, wakes(val), u32::MAX)))
            }
            WAKE_BITSET if val3 as u32 == 0 => Err(Errno::INVAL.into()),
            WAKE_BITSET => {
                let futex = self.futex_at(uaddr, futex_op);
                Ok(SyscallControl::Value(self.wake(futex, wakes(val), val3 as u32)))
            }
            REQUEUE | CMP_REQUEUE if (val as i32) < 0 || (timeout as i32) < 0 => {
                Err(Errno::INVAL.into())
            }
            kind @ (REQUEUE | CMP_REQUEUE) => {
                if kind == CMP_REQUEUE && int_in(process, uaddr)? != val3 as u32 {
                    return Err(Errno::AGAIN.into());
                }
                let from = self.futex_at(uaddr, futex_op);
                let to = self.futex_at(uaddr2, futex_op).place;
                let woken = self.wake(from, val as u32, u32::MAX);
                let threads = &self.state.current().threads;
                let mut waiting = threads.waiting_here(from, u32::MAX);
                waiting.retain(|id| threads.waits_for_one(*id));
                let most = timeout as u32 as usize;
                let moved = waiting.len().min(most);
                requeue(&mut self.change().current_mut().threads, &waiting[..moved], (uaddr2, to));
                let others = self.requeue_others(from, (uaddr2, to), most - moved);
                Ok(SyscallControl::Value(woken + (moved + others) as u64))
            }
            WAKE_OP => {
                let holds = operate(process, uaddr2, val3 as u32)?;
                let futex = self.futex_at(uaddr, futex_op);
                let mut woken = self.wake(futex, wakes(val), u32::MAX);
                if holds {
                    let second = self.futex_at(uaddr2, futex_op);
                    woken += self.wake(second, wakes(timeout), u32::MAX);
                }
                Ok(SyscallControl::Value(woken))
            }
            kind @ (LOCK_PI | LOCK_PI2) => {
                let until = match (&self.resumed, timeout) {
                    (Some(wait), _) => wait.until,
                    (None, 0) => None,
                    (None, at) => {
                        let real = kind == LOCK_PI || futex_op & REALTIME != 0;
                        let clock = if real { libc::CLOCK_REALTIME } else { libc::CLOCK_MONOTONIC };
                        Some(self.moment_after(clock as u64, length_in(process, at)?, true)?)
                    }
                };
                self.lock_futex(process, uaddr, until)
            }
            UNLOCK_PI => self.unlock_futex(process, uaddr),
            TRYLOCK_PI => self.try_lock_futex(process, uaddr),
            _ => Err(Errno::NOSYS.into()),
        }
    }

    /// `sched_yield(2)`: other threads of the guest run first.
    pub(in crate::sentry) fn sys_sched_yield(&mut self) -> SyscallResult {
        Ok(SyscallControl::Yield)
    }

    /// `rt_sigsuspend(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_sigsuspend(
        &mut self,
        process: &Process,
        set: u64,
        size: u64,
    ) -> SyscallResult {
        self.mask_in(process, set, size)?;
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Nothing, None)))
    }

    /// `pause(2)`, as on Linux.
    pub(in crate::sentry) fn sys_pause(&mut self, process: &Process) -> SyscallResult {
        // An empty set of signals, at address 0, leaves the mask as it is.
        self.sys_rt_sigsuspend(process, 0, 8)
    }

    /// `rt_sigtimedwait(2)`, as on Linux.
    pub(in crate::sentry) fn sys_rt_sigtimedwait(
        &mut self,
        process: &mut Process,
        set: u64,
        info: u64,
        timeout: u64,
        size: u64,
    ) -> SyscallResult {
        if size != 8 {
            return Err(Errno::INVAL.into());
        }
        let set = word_in(process, set)? & !crate::sentry::kernel::signals::UNTOUCHABLE;
        let pending = self.state.current().threads.current().pending.set()
            | self.state.current().pending.set();
        if pending & set != 0
            && let Some(taken) = self.change().take_signal(set)
        {
            if info != 0 {
                copy_out(process, info, &taken.all())?;
            }
            return Ok(SyscallControl::Value(taken.signal.into()));
        }
        let until = match (&self.resumed, timeout) {
            (Some(wait), _) => wait.until,
            (None, 0) => None,
            (None, at) => {
                let length = length_in(process, at)?;
                Some(self.moment_after(libc::CLOCK_MONOTONIC as u64, length, false)?)
            }
        };
        if self.passed(until) {
            return Err(Errno::AGAIN.into());
        }
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Signals(set), until)))
    }
}

/// Has threads wait at another word.
fn requeue(threads: &mut Threads, waiting: &[u32], to: (u64, Option<(Node, u64)>)) {
    for id in waiting {
        let wait = threads.get_mut(*id).and_then(|thread| thread.wait.as_mut());
        if let Some(Wait { reason: WaitReason::Futex { address, place, .. }, .. }) = wait {
            (*address, *place) = to;
        }
    }
}

/// The number of threads that a wake may resume. As in Linux, a number below 1 means one thread.
fn wakes(count: u64) -> u32 {
    (count as i32).max(1) as u32
}

/// Performs the operation of `FUTEX_WAKE_OP` on the word at `address`, and returns whether its
/// comparison holds.
fn operate(process: &mut Process, address: u64, code: u32) -> SyscallResult<bool> {
    let old = int_in(process, address)?;
    let part = |value: u32| ((value << 20) as i32 >> 20) as u32;
    let (mut argument, compared) = (part(code >> 12), part(code));
    if code >> 28 & 8 != 0 {
        argument = 1 << (argument & 31);
    }
    let new = match code >> 28 & 7 {
        0 => argument,
        1 => old.wrapping_add(argument),
        2 => old | argument,
        3 => old & !argument,
        4 => old ^ argument,
        _ => return Err(Errno::NOSYS.into()),
    };
    copy_out(process, address, &new.to_le_bytes())?;
    let (old, compared) = (old as i32, compared as i32);
    match code >> 24 & 15 {
        0 => Ok(old == compared),
        1 => Ok(old != compared),
        2 => Ok(old < compared),
        3 => Ok(old <= compared),
        4 => Ok(old > compared),
        5 => Ok(old >= compared),
        _ => Err(Errno::NOSYS.into()),
    }
}
