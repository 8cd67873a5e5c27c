//! System calls that wait for descriptors: `poll`, `select`, `epoll`.

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::{EPOLL_DATA, EPOLL_EVENT_LEN, StructBuilder};
use crate::sentry::kernel::device::Device;
use crate::sentry::kernel::epoll::{INTERESTS_UNCHECKED, MAX_INTERESTS, MAX_SETS, ReadySets};
use crate::sentry::kernel::epoll_set::{
    EDGE, EpollInterest, EpollSet, ONCE, READ_TOO, WRITE_TOO, plain,
};
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::poll_events::{ALWAYS, ERR, HUP, IN, OUT};
use crate::sentry::kernel::resource_limits::DESCRIPTORS;
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::MonotonicTime;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};
use crate::sentry::syscalls::clock::{length_in, micro_in};

use std::time::Duration;

use rustix::io::Errno;

/// The flag of a personality with which `select` leaves its timeout as it is.
const STICKY_TIMEOUTS: u32 = 0x400_0000;
/// Descriptors that one `poll` may ask about.
const MAX_POLLED: u64 = 1024;
/// Maximum events of one `epoll_wait`.
const MAX_EVENTS: u64 = 1024;

/// The ready events among the wanted ones, by the names that were wanted.
fn named(reported: u16, wanted: u16) -> u16 {
    let also =
        |name: u16, event: u16| if wanted & name != 0 && reported & event != 0 { name } else { 0 };
    reported & (wanted | ALWAYS) | also(READ_TOO, IN) | also(WRITE_TOO, OUT)
}

impl Sentry {
    /// When a call gives up: as it was when it began to wait, or as `new` says.
    fn until(
        &self,
        new: impl FnOnce() -> SyscallResult<Option<MonotonicTime>>,
    ) -> SyscallResult<Option<MonotonicTime>> {
        match &self.resumed {
            Some(wait) => Ok(wait.until),
            None => new(),
        }
    }

    fn in_millis(&self, timeout: u64) -> SyscallResult<Option<MonotonicTime>> {
        self.until(|| match timeout as i32 {
            ..0 => Ok(None),
            millis => {
                let length = Duration::from_millis(millis as u64);
                self.moment_after(libc::CLOCK_MONOTONIC as u64, length, false).map(Some)
            }
        })
    }

    fn in_length(&self, process: &Process, at: u64) -> SyscallResult<Option<MonotonicTime>> {
        self.until(|| match at {
            0 => Ok(None),
            at => {
                let length = length_in(process, at)?;
                self.moment_after(libc::CLOCK_MONOTONIC as u64, length, false).map(Some)
            }
        })
    }

    /// `poll(2)`: at most 1,024 descriptors, and more are `EINVAL`.
    pub(in crate::sentry) fn sys_poll(
        &mut self,
        process: &mut Process,
        list: u64,
        count: u64,
        timeout: u64,
    ) -> SyscallResult {
        let until = self.in_millis(timeout)?;
        self.poll_until(process, list, count, until)
    }

    /// `ppoll(2)`: as `poll`.
    pub(in crate::sentry) fn sys_ppoll(
        &mut self,
        process: &mut Process,
        &[fds, nfds, timeout, sigmask, size, _]: &[u64; 6],
    ) -> SyscallResult {
        let until = self.in_length(process, timeout)?;
        self.mask_in(process, sigmask, size)?;
        let outcome = self.poll_until(process, fds, nfds, until);
        self.leave_time(process, timeout, until, 1, outcome)
    }

    fn poll_until(
        &mut self,
        process: &mut Process,
        list: u64,
        count: u64,
        until: Option<MonotonicTime>,
    ) -> SyscallResult {
        if count > MAX_POLLED {
            return Err(Errno::INVAL.into());
        }
        let bytes = copy_in(process, list, count as usize * 8)?;
        let (mut ready, mut reported, mut on) = (0, bytes.clone(), Vec::new());
        let mut sets = ReadySets::default();
        for (entry, out) in bytes.chunks_exact(8).zip(reported.chunks_exact_mut(8)) {
            let number = i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            let wanted = u16::from_le_bytes([entry[4], entry[5]]);
            let events = match self.state.table.id(number as u32 as u64) {
                _ if number < 0 => 0,
                Ok(id) => {
                    on.push((id, plain(wanted)));
                    let found = self.state.readiness(self.asker(), id, &mut sets);
                    named(found.map_or(0, |(events, _)| events), wanted)
                }
                Err(_) => libc::POLLNVAL as u16,
            };
            out[6..].copy_from_slice(&events.to_le_bytes());
            ready += u64::from(events != 0);
        }
        if ready == 0 && !self.passed(until) {
            return self.wait_for_files(on, until);
        }
        copy_out(process, list, &reported)?;
        Ok(SyscallControl::Value(ready))
    }

    /// Waits for any of the events, if all threads together wait for no more than they may.
    fn wait_for_files(&self, on: Vec<(u64, u16)>, until: Option<MonotonicTime>) -> SyscallResult {
        self.state.processes.check_wait(on.len())?;
        Ok(SyscallControl::Wait(Wait::new(WaitReason::Files(on), until)))
    }

    /// `select(2)`: no descriptor is ever in the exceptional set.
    pub(in crate::sentry) fn sys_select(
        &mut self,
        process: &mut Process,
        &[nfds, readfds, writefds, exceptfds, timeout, _]: &[u64; 6],
    ) -> SyscallResult {
        let until = match timeout {
            0 => None,
            at => self.until(|| {
                let length = Duration::from_nanos(micro_in(process, at)?);
                self.moment_after(libc::CLOCK_MONOTONIC as u64, length, false).map(Some)
            })?,
        };
        let outcome = self.select_until(process, nfds, [readfds, writefds, exceptfds], until);
        self.leave_time(process, timeout, until, 1000, outcome)
    }

    /// Stores the time that is left of a call which is over, in seconds and parts of `unit`
    /// nanoseconds.
    fn leave_time(
        &self,
        process: &mut Process,
        at: u64,
        until: Option<MonotonicTime>,
        unit: u64,
        outcome: SyscallResult,
    ) -> SyscallResult {
        let keeps = self.state.current().info.traits.persona & STICKY_TIMEOUTS != 0;
        if let (Ok(SyscallControl::Value(_)), Some(until), 1..) = (&outcome, until, at)
            && !keeps
        {
            let left = until.saturating_sub(self.now());
            let (seconds, rest) = (left / 1_000_000_000, left % 1_000_000_000 / unit);
            // As in Linux, a place that cannot be written does not undo the call.
            let _ = process.write(at, &StructBuilder::default().word(seconds).word(rest).0)?;
        }
        outcome
    }

    /// `pselect6(2)`: as `select`.
    pub(in crate::sentry) fn sys_pselect6(
        &mut self,
        process: &mut Process,
        &[nfds, readfds, writefds, exceptfds, timeout, sigmask]: &[u64; 6],
    ) -> SyscallResult {
        let until = self.in_length(process, timeout)?;
        if sigmask != 0 {
            let (set, size) =
                (word_in(process, sigmask)?, word_in(process, sigmask.wrapping_add(8))?);
            self.mask_in(process, set, size)?;
        }
        let outcome = self.select_until(process, nfds, [readfds, writefds, exceptfds], until);
        self.leave_time(process, timeout, until, 1, outcome)
    }

    fn select_until(
        &mut self,
        process: &mut Process,
        count: u64,
        sets: [u64; 3],
        until: Option<MonotonicTime>,
    ) -> SyscallResult {
        if count > i32::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        let count = count.min(DESCRIPTORS.into());
        let len = count.div_ceil(64) as usize * 8;
        let (mut ready, mut on) = (0, Vec::new());
        let (mut reported, mut looked_at) = (Vec::new(), ReadySets::default());
        // An end counts as something to read, an error as both.
        for (set, events) in sets.into_iter().zip([IN | HUP | ERR, OUT | ERR, 0]) {
            if set == 0 {
                continue;
            }
            let bytes = copy_in(process, set, len)?;
            let mut out = vec![0; len];
            for number in 0..count {
                let (at, bit) = (number as usize / 8, 1u8 << (number % 8));
                if bytes[at] & bit == 0 {
                    continue;
                }
                let id = match self.state.table.id(number) {
                    Ok(id) => id,
                    // As in Linux, one that was closed during the wait is ready.
                    Err(_) if self.resumed.is_some() => {
                        if events != 0 {
                            out[at] |= bit;
                            ready += 1;
                        }
                        continue;
                    }
                    Err(errno) => return Err(errno.into()),
                };
                let found = self.state.readiness(self.asker(), id, &mut looked_at);
                if found.is_some_and(|(ready, _)| ready & events != 0) {
                    out[at] |= bit;
                    ready += 1;
                } else if events != 0 {
                    on.push((id, events & !ALWAYS));
                }
            }
            reported.push((set, out));
        }
        if ready == 0 && !self.passed(until) {
            return self.wait_for_files(on, until);
        }
        for (set, out) in reported {
            copy_out(process, set, &out)?;
        }
        Ok(SyscallControl::Value(ready))
    }

    /// `epoll_create1(2)`: a guest has at most 1,024 sets.
    pub(in crate::sentry) fn sys_epoll_create1(&mut self, flags: u64) -> SyscallResult {
        if flags as i32 & !libc::EPOLL_CLOEXEC != 0 {
            return Err(Errno::INVAL.into());
        }
        if self.state.sets().count() >= MAX_SETS {
            return Err(Errno::MFILE.into());
        }
        self.add(FileObject::Epoll(EpollSet::default()), flags as i32 | libc::O_RDWR)
    }

    /// `epoll_create(2)`: as `epoll_create1`.
    pub(in crate::sentry) fn sys_epoll_create(&mut self, size: u64) -> SyscallResult {
        if size as i32 <= 0 {
            return Err(Errno::INVAL.into());
        }
        self.sys_epoll_create1(0)
    }

    /// `epoll_ctl(2)`: `EPOLLEXCLUSIVE` and `EPOLLWAKEUP` are accepted and change nothing.
    pub(in crate::sentry) fn sys_epoll_ctl(
        &mut self,
        process: &Process,
        set: u64,
        operation: u64,
        number: u64,
        event: u64,
    ) -> SyscallResult {
        let FileObject::Epoll(known) = &self.state.table.get(set)?.open else {
            return Err(Errno::INVAL.into());
        };
        let description = self.state.table.id(number)?;
        if description == self.state.table.id(set)? {
            return Err(Errno::INVAL.into());
        }
        let open = &self.state.table.get(number)?.open;
        let watched = matches!(open, FileObject::Device(Device::Generation(_), _));
        let plain = matches!(
            open,
            FileObject::File(_)
                | FileObject::Device(..)
                | FileObject::Folder(..)
                | FileObject::Proc(_)
        );
        if plain && !watched {
            return Err(Errno::PERM.into());
        }
        let number = number as u32;
        let is_there = known.get(number).is_some_and(|i| i.description == description);
        let interest = match operation as i32 {
            libc::EPOLL_CTL_DEL => None,
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD => {
                let bytes = copy_in(process, event, EPOLL_EVENT_LEN)?;
                let wanted = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                let data =
                    bytes[EPOLL_DATA..].iter().rev().fold(0, |word, &b| word << 8 | u64::from(b));
                Some(EpollInterest { description, wanted, data, reported: None, off: false })
            }
            _ => return Err(Errno::INVAL.into()),
        };
        match operation as i32 {
            libc::EPOLL_CTL_ADD if is_there => return Err(Errno::EXIST.into()),
            libc::EPOLL_CTL_ADD => {
                // A sum over all sets is not for every call.
                let is_rounded = known.len().is_multiple_of(INTERESTS_UNCHECKED);
                if is_rounded && self.state.all_interests() >= MAX_INTERESTS {
                    return Err(Errno::NOSPC.into());
                }
            }
            _ if !is_there => return Err(Errno::NOENT.into()),
            _ => {}
        }
        let is_set = matches!(open, FileObject::Epoll(_));
        // No other change makes more levels.
        let nests = is_set && !known.contains_set(description);
        let put = |state: &mut Kernel, interest: Option<EpollInterest>| {
            if let FileObject::Epoll(known) = &mut state.table.get_mut(set)?.open {
                match interest {
                    Some(interest) => known.insert(number, interest, is_set),
                    None => known.remove(number),
                }
            }
            Ok::<_, Errno>(())
        };
        put(self.change(), interest)?;
        if nests && let Err(error) = self.state.check_nesting() {
            put(self.change(), None)?;
            return Err(error.into());
        }
        Ok(ZERO)
    }

    /// `epoll_wait(2)`: one call returns at most 1,024 events.
    pub(in crate::sentry) fn sys_epoll_wait(
        &mut self,
        process: &mut Process,
        &[epfd, events, maxevents, timeout, _, _]: &[u64; 6],
    ) -> SyscallResult {
        let until = self.in_millis(timeout)?;
        self.wait_set_until(process, epfd, events, maxevents, until)
    }

    /// As [`Sentry::sys_epoll_wait`], with signals blocked; `fine` says that the timeout is a
    /// length in memory.
    pub(in crate::sentry) fn epoll_pwait(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
        fine: bool,
    ) -> SyscallResult {
        let until = if fine { self.in_length(process, a[3])? } else { self.in_millis(a[3])? };
        self.mask_in(process, a[4], a[5])?;
        self.wait_set_until(process, a[0], a[1], a[2], until)
    }

    /// `epoll_pwait(2)`: as `epoll_wait`.
    pub(in crate::sentry) fn sys_epoll_pwait(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.epoll_pwait(process, a, false)
    }

    /// `epoll_pwait2(2)`: as `epoll_wait`.
    pub(in crate::sentry) fn sys_epoll_pwait2(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        self.epoll_pwait(process, a, true)
    }

    fn wait_set_until(
        &mut self,
        process: &mut Process,
        set: u64,
        to: u64,
        most: u64,
        until: Option<MonotonicTime>,
    ) -> SyscallResult {
        let FileObject::Epoll(known) = &self.state.table.get(set)?.open else {
            return Err(Errno::INVAL.into());
        };
        if !(1..=i32::MAX as u64).contains(&most) {
            return Err(Errno::INVAL.into());
        }
        let mut sets = ReadySets::default();
        let concerns = known.iter().filter_map(|(number, interest)| {
            let (events, edges) = self.state.concern(self.asker(), interest, &mut sets)?;
            Some((number, interest.clone(), events, edges))
        });
        let reported: Vec<_> = concerns.take(most.min(MAX_EVENTS) as usize).collect();
        if reported.is_empty() {
            if self.passed(until) {
                return Ok(ZERO);
            }
            let reason = WaitReason::Files(vec![(self.state.table.id(set)?, IN)]);
            return Ok(SyscallControl::Wait(Wait::new(reason, until)));
        }
        let mut bytes = Vec::with_capacity(EPOLL_EVENT_LEN * reported.len());
        for (_, interest, events, _) in &reported {
            bytes.extend(u32::from(named(*events, interest.wanted as u16)).to_le_bytes());
            bytes.extend([0; EPOLL_DATA - 4]);
            bytes.extend(interest.data.to_le_bytes());
        }
        copy_out(process, to, &bytes)?;
        // A level-triggered interest needs no state.
        if reported.iter().any(|(_, interest, ..)| interest.wanted & (EDGE | ONCE) != 0)
            && let FileObject::Epoll(known) = &mut self.change().table.get_mut(set)?.open
        {
            for (number, _, _, edges) in &reported {
                if let Some(interest) = known.get_mut(*number) {
                    interest.reported = Some(*edges);
                    interest.off = interest.wanted & ONCE != 0;
                }
            }
        }
        Ok(SyscallControl::Value(reported.len() as u64))
    }
}
