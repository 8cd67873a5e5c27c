//! System calls that lock files: `flock`, and the lock commands of `fcntl`.

use std::collections::BTreeSet;

use afresh_files::Node;
use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::file_locks::{FileLock, LockOwner};
use crate::sentry::kernel::state::Kernel;
use crate::sentry::kernel::threads::{Wait, WaitReason};
use crate::sentry::mm::user_memory::{copy_in, copy_out};
use crate::sentry::result::{SyscallControl, SyscallResult, ZERO};

impl Kernel {
    /// The files whose locks go with these descriptors of the current process.
    pub(in crate::sentry) fn locked_files(&self, descriptors: &[u64]) -> BTreeSet<Node> {
        if self.locks.0.is_empty() {
            return BTreeSet::new();
        }
        let open = descriptors.iter().filter_map(|number| self.table.get(*number).ok());
        // As in Linux, a descriptor that only names a file has none.
        let open = open.filter(|description| !description.is_path());
        let files = open.filter_map(|description| match &description.open {
            FileObject::File(open) => Some(open.node),
            _ => None,
        });
        files.collect()
    }
}

impl Sentry {
    /// The file that a descriptor is open on, if it is one.
    pub(in crate::sentry) fn file_of(&self, descriptor: u64) -> Option<Node> {
        match self.state.table.get(descriptor).map(|description| &description.open) {
            Ok(FileObject::File(open)) => Some(open.node),
            _ => None,
        }
    }

    /// Serves a call that may close descriptors, and gives up the locks that go with them.
    pub(in crate::sentry) fn closing(
        &mut self,
        closed: Vec<u64>,
        serve: impl FnOnce(&mut Self) -> SyscallResult,
    ) -> SyscallResult {
        if self.state.named_queues.has_requests(self.state.processes.current_id()) {
            self.drop_queue_requests(&closed);
        }
        if self.state.locks.0.is_empty() {
            return serve(self);
        }
        let files = self.state.locked_files(&closed);
        let outcome = serve(self)?;
        let own = self.state.processes.current_id();
        let state = self.change();
        state.locks.close(own, &files);
        state.drop_unowned();
        Ok(outcome)
    }

    /// The lock of the `struct flock` at `address`, and whether it is released.
    pub(in crate::sentry) fn lock_in(
        &self,
        process: &Process,
        descriptor: u64,
        address: u64,
        owner: LockOwner,
    ) -> SyscallResult<(Option<FileLock>, bool)> {
        let bytes = copy_in(process, address, 32)?;
        let half = |at: usize| i32::from(i16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let word = |at: usize| {
            bytes[at..at + 8].iter().rev().fold(0, |word, &b| word << 8 | u64::from(b)) as i64
        };
        let (kind, whence, start, len) = (half(0), half(2), word(8), word(16));
        let description = self.state.table.get(descriptor)?;
        let node = self.file_of(descriptor);
        let base = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => description.offset() as i64,
            libc::SEEK_END => match node {
                Some(node) => self.state.tree.stat(node)?.size as i64,
                None => 0,
            },
            _ => return Err(Errno::INVAL.into()),
        };
        let mut from = base.checked_add(start).ok_or(Errno::OVERFLOW)?;
        let mut end = match len {
            0 => i64::MAX,
            len => from.checked_add(len).ok_or(Errno::OVERFLOW)?,
        };
        if end < from {
            std::mem::swap(&mut from, &mut end);
        }
        if from < 0 {
            return Err(Errno::INVAL.into());
        }
        let writes = kind == libc::F_WRLCK;
        let frees = kind == libc::F_UNLCK;
        if !writes && !frees && kind != libc::F_RDLCK {
            return Err(Errno::INVAL.into());
        }
        let (start, end, whole) = (from as u64, end as u64, false);
        Ok((node.map(|node| FileLock { node, owner, start, end, writes, whole }), frees))
    }

    /// `fcntl` with one of its commands about locks.
    pub(in crate::sentry) fn lock_range(
        &mut self,
        process: &mut Process,
        descriptor: u64,
        command: i32,
        address: u64,
    ) -> SyscallResult {
        let of_description =
            [libc::F_OFD_SETLK, libc::F_OFD_SETLKW, libc::F_OFD_GETLK].contains(&command);
        let owner = match of_description {
            true => LockOwner::Description(self.state.table.id(descriptor)?),
            false => LockOwner::Process(self.state.processes.current_id()),
        };
        let (lock, frees) = self.lock_in(process, descriptor, address, owner)?;
        if command == libc::F_GETLK || command == libc::F_OFD_GETLK {
            if frees {
                return Err(Errno::INVAL.into());
            }
            let Some(held) = lock.as_ref().and_then(|lock| self.state.locks.against(lock)) else {
                let free = (libc::F_UNLCK as u16).to_le_bytes();
                copy_out(process, address, &free)?;
                return Ok(ZERO);
            };
            let kind = if held.writes { libc::F_WRLCK } else { libc::F_RDLCK };
            let len = if held.end == i64::MAX as u64 { 0 } else { held.end - held.start };
            let by = match held.owner {
                LockOwner::Process(id) => id,
                LockOwner::Description(_) => u32::MAX,
            };
            let reply = StructBuilder::default().half(kind as u16).half(0).int(0).word(held.start);
            copy_out(process, address, &reply.word(len).int(by).0)?;
            return Ok(ZERO);
        }
        // Only files can be locked.
        let Some(lock) = lock else { return Ok(ZERO) };
        let description = self.state.table.get(descriptor)?;
        let may = if lock.writes { description.writes() } else { description.reads() };
        if !frees && !may {
            return Err(Errno::BADF.into());
        }
        let waits = command == libc::F_SETLKW || command == libc::F_OFD_SETLKW;
        self.lock(lock, frees, waits)
    }

    /// `flock(2)`: locks are for files and directories. On other descriptors the call changes
    /// nothing.
    pub(in crate::sentry) fn sys_flock(
        &mut self,
        descriptor: u64,
        operation: u64,
    ) -> SyscallResult {
        let operation = operation as i32;
        let owner = LockOwner::Description(self.state.table.id(descriptor)?);
        if self.state.table.get(descriptor)?.is_path() {
            return Err(Errno::BADF.into());
        }
        let (writes, frees) = match operation & !libc::LOCK_NB {
            libc::LOCK_SH => (false, false),
            libc::LOCK_EX => (true, false),
            libc::LOCK_UN => (false, true),
            _ => return Err(Errno::INVAL.into()),
        };
        let Some(node) = self.file_of(descriptor) else { return Ok(ZERO) };
        let lock = FileLock { node, owner, start: 0, end: u64::MAX, writes, whole: true };
        self.lock(lock, frees, operation & libc::LOCK_NB == 0)
    }

    pub(in crate::sentry) fn lock(
        &mut self,
        lock: FileLock,
        frees: bool,
        waits: bool,
    ) -> SyscallResult {
        if frees {
            if !self.state.locks.0.is_empty() {
                self.change().locks.replace(&lock, false)?;
            }
            return Ok(ZERO);
        }
        if let Some(held) = self.state.locks.against(&lock) {
            if !waits {
                return Err(Errno::AGAIN.into());
            }
            if self.waits_for_us(held.owner, &lock) {
                return Err(Errno::DEADLK.into());
            }
            return Ok(SyscallControl::Wait(Wait::new(WaitReason::Lock(lock), None)));
        }
        self.change().locks.replace(&lock, true)?;
        Ok(ZERO)
    }

    /// Whether `owner` waits, over others or not, for a lock of the process that wants `lock`.
    fn waits_for_us(&self, owner: LockOwner, lock: &FileLock) -> bool {
        let processes = &self.state.processes;
        self.state.locks.waits_for(owner, lock, |id| processes.wanted_locks(id))
    }
}
