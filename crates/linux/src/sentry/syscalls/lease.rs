//! Leases of files (`F_SETLEASE`): the holder is notified before another open conflicts.
//!
//! A lease is a lock of its open file on a range behind all files, so that it ends when the file is
//! closed, and snapshots have it.
//!
//! Promises: an open or a truncation that conflicts waits until the holder gives the lease up, at
//! most [`BREAK_TIME`]. Then the lease ends, or becomes one for reading. The holder gets `SIGIO`
//! once, however often calls wait and are interrupted.

use std::time::Duration;

use afresh_files::{Kind, Node};
use rustix::io::Errno;

use crate::sentry::Sentry;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::file_locks::{FileLock, LockOwner};
use crate::sentry::kernel::signals::{KERNEL, SignalInfo};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::kernel::time::nanoseconds;
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

/// Where the range begins: other locks end here.
const START: u64 = i64::MAX as u64;
/// The wait for a holder, which is the default of Linux (`lease-break-time`).
const BREAK_TIME: Duration = Duration::from_secs(45);
/// `SI_KERNEL`.
const FROM_KERNEL: i32 = 0x80;

fn lease(node: Node, owner: LockOwner, writes: bool) -> FileLock {
    FileLock { node, owner, start: START, end: u64::MAX, writes, whole: false }
}

impl Kernel {
    /// The lease that an open file has.
    fn lease_of(&self, node: Node, owner: LockOwner) -> Option<&FileLock> {
        let locks = self.locks.0.iter();
        let mut own = locks.filter(|held| (held.node, held.owner) == (node, owner));
        own.find(|held| held.start == START)
    }

    /// Whether the opens of a file conflict with a lease of the open file `id`.
    fn conflicts_with_opens(&self, node: Node, id: u64, writes: bool) -> bool {
        self.table.descriptions().any(|(other, description)| match &description.open {
            FileObject::File(open) if open.node == node && !description.is_path() => {
                if writes {
                    other != id
                } else {
                    description.writes()
                }
            }
            _ => false,
        })
    }

    /// Notifies the holders of leases that exclude `wanted` and are not being broken.
    fn notify_holders(&mut self, wanted: &FileLock) {
        let is_new = |held: &&FileLock| held.excludes(wanted) && held.end == u64::MAX;
        let held = self.locks.0.iter().filter(is_new);
        let holders: Vec<_> = held.map(|held| held.owner).collect();
        let parts = self.table.parts(self.processes.current_id());
        let has = |id: u64| parts.descriptors.iter().find(|(_, _, open, _)| *open == id);
        let processes = holders.into_iter().filter_map(|owner| match owner {
            LockOwner::Description(id) => has(id).map(|(process, ..)| *process),
            LockOwner::Process(id) => Some(id),
        });
        for process in processes.collect::<Vec<_>>() {
            let signal = libc::SIGIO as u8;
            self.send_to(process, None, SignalInfo::new(signal, FROM_KERNEL, KERNEL, 0));
        }
    }
}

impl Sentry {
    /// `fcntl` with `F_GETLEASE`, or with `F_SETLEASE` and a kind.
    pub(in crate::sentry) fn control_lease(
        &mut self,
        descriptor: u64,
        kind: Option<u64>,
    ) -> SyscallResult {
        let id = self.state.table.id(descriptor)?;
        let owner = LockOwner::Description(id);
        let node = self.file_of(descriptor).ok_or(Errno::INVAL)?;
        let Some(kind) = kind else {
            let kind = match self.state.lease_of(node, owner) {
                Some(held) if held.writes => libc::F_WRLCK,
                Some(_) => libc::F_RDLCK,
                None => libc::F_UNLCK,
            };
            return Ok(SyscallControl::Value(kind as u64));
        };
        self.state.check_ownership(node).map_err(|_| Errno::ACCESS)?;
        if self.state.tree.stat(node)?.kind != Kind::File {
            return Err(Errno::INVAL.into());
        }
        let (writes, frees) = match kind as i32 {
            libc::F_RDLCK => (false, false),
            libc::F_WRLCK => (true, false),
            libc::F_UNLCK => (false, true),
            _ => return Err(Errno::INVAL.into()),
        };
        let lock = lease(node, owner, writes);
        let is_refused = if frees {
            self.state.lease_of(node, owner).is_none()
        } else {
            self.state.conflicts_with_opens(node, id, writes)
                || self.state.locks.against(&lock).is_some()
        };
        if is_refused {
            return Err(Errno::AGAIN.into());
        }
        self.change().locks.replace(&lock, !frees)?;
        Ok(ZERO)
    }

    /// Breaks the leases that an open or a truncation of a file conflicts with. Returns the wait of
    /// the call, if it has to wait.
    pub(in crate::sentry) fn break_leases(
        &mut self,
        node: Node,
        writes: bool,
        flags: i32,
    ) -> SyscallResult<Option<SyscallControl>> {
        let wanted = lease(node, LockOwner::Process(self.state.processes.current_id()), writes);
        if self.state.locks.0.is_empty() || self.state.locks.against(&wanted).is_none() {
            return Ok(None);
        }
        let until = Some(self.break_until(&wanted));
        if flags & libc::O_NONBLOCK != 0 {
            return Err(Errno::AGAIN.into());
        }
        if self.passed(until) {
            let locks = &mut self.change().locks.0;
            if writes {
                locks.retain(|held| !held.excludes(&wanted));
            } else {
                let held = locks.iter_mut().filter(|held| held.excludes(&wanted));
                held.for_each(|held| (held.writes, held.end) = (false, u64::MAX));
            }
            return Ok(None);
        }
        Ok(Some(SyscallControl::Wait(Wait::new(WaitReason::Lock(wanted), until))))
    }

    /// The end of the time that holders of conflicting leases have. It begins with the first open
    /// that a lease conflicts with, which notifies its holder.
    ///
    /// The lease itself has that time, as the end of its range: an open that a signal interrupts is
    /// made again, and its wait is lost.
    fn break_until(&mut self, wanted: &FileLock) -> u64 {
        let is_new = |held: &FileLock| held.excludes(wanted) && held.end == u64::MAX;
        if self.state.locks.0.iter().any(is_new) {
            // The range ends behind its start, and before that of a lease that is not broken.
            let until = self.now().saturating_add(nanoseconds(BREAK_TIME));
            let until = until.min(u64::MAX - START - 2);
            let state = self.change();
            state.notify_holders(wanted);
            let held = state.locks.0.iter_mut().filter(|held| is_new(held));
            held.for_each(|held| held.end = START + 1 + until);
        }
        let broken = self.state.locks.0.iter().filter(|held| held.excludes(wanted));
        broken.map(|held| held.end - START - 1).max().unwrap_or_default()
    }
}
