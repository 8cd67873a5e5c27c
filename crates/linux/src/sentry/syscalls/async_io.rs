//! Asynchronous I/O: `io_submit` and its kind. Operations are done when they are submitted.
//!
//! A context is a mapping that begins with the ring of results, as on Linux, and its number is the
//! address. There is no other state: a snapshot has the ring as it has all memory.
//!
//! Promises: a ring that a guest has forged or changed reaches the memory and the files of its
//! process only, as other calls do.

use rustix::io::Errno;

use crate::platform::Process;
use crate::sentry::Sentry;
use crate::sentry::abi::StructBuilder;
use crate::sentry::kernel::fd_table::FileObject;
use crate::sentry::kernel::threads::{FutexKey, Wait, WaitReason};
use crate::sentry::mm::layout::{PAGE, READ_WRITE};
use crate::sentry::mm::stub_calls::Content;
use crate::sentry::mm::user_memory::{copy_in, copy_out, word_in};
use crate::sentry::result::{SyscallControl, SyscallError, SyscallResult};
use crate::sentry::syscalls::clock::length_in;
use crate::sentry::syscalls::read_write::{MAX_TRANSFER, pieces_of};

/// Operations that may be in a context (`aio-max-nr`).
const MAX_EVENTS: u64 = 1 << 16;
/// Operations beyond which a request is invalid.
const MAX_COUNT: u64 = 0x1000_0000 / EVENT_LEN;
/// Operations that one call performs, and the bytes after which it performs no more. A call returns
/// the number of the performed ones.
const MAX_SUBMITTED: u64 = 64;
/// The head of a ring (`struct aio_ring`), the places of its indexes there, and its magic number.
const HEAD_LEN: u64 = 32;
const HEAD: u64 = 8;
const TAIL: u64 = 12;
const MAGIC: u32 = 0xa10a_10a1;
/// Bytes of a result (`struct io_event`), and of an operation (`struct iocb`).
const EVENT_LEN: u64 = 32;
const OPERATION_LEN: usize = 64;
/// The flag of an operation whose end an `eventfd` counts.
const FLAG_EVENT: u32 = 1;

/// Flags of operations: `RWF_HIPRI` to `RWF_ATOMIC`.
const KNOWN_FLAGS: u32 = 0x7f;

// Kinds of operations.
const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const FSYNC: u16 = 2;
const FDSYNC: u16 = 3;
const PREADV: u16 = 7;
const PWRITEV: u16 = 8;

/// A ring of results: its address, its slots, and the first and the next result.
#[derive(Clone, Copy, Debug)]
struct ResultRing {
    at: u64,
    slots: u32,
    head: u32,
    tail: u32,
}

impl ResultRing {
    fn len(slots: u32) -> u64 {
        (HEAD_LEN + u64::from(slots) * EVENT_LEN).next_multiple_of(PAGE)
    }

    /// Results that it has.
    fn event_count(&self) -> u32 {
        (self.tail + self.slots - self.head) % self.slots
    }

    fn is_full(&self) -> bool {
        self.event_count() + 1 == self.slots
    }

    fn slot(&self, index: u32) -> u64 {
        self.at + HEAD_LEN + u64::from(index) * EVENT_LEN
    }

    /// Where threads wait for results.
    fn waiters(&self) -> FutexKey {
        FutexKey::private(self.at + TAIL)
    }
}

/// An operation as a guest describes it.
struct Operation {
    data: u64,
    kind: u16,
    descriptor: u64,
    buffer: u64,
    len: u64,
    offset: u64,
    /// The descriptor that counts its end.
    event: Option<u64>,
    /// Flags as those of `preadv2`.
    flags: u32,
}

impl Operation {
    fn decode(process: &Process, at: u64) -> SyscallResult<Self> {
        let bytes = copy_in(process, at, OPERATION_LEN)?;
        let (words, _) = bytes.as_chunks::<8>();
        let word = |at: usize| u64::from_le_bytes(words[at]);
        // Reserved, and a length beyond `SSIZE_MAX`.
        if word(6) != 0 || word(4) > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        let flags = word(7) as u32;
        Ok(Self {
            data: word(0),
            kind: word(2) as u16,
            descriptor: word(2) >> 32,
            buffer: word(3),
            len: word(4),
            offset: word(5),
            event: (flags & FLAG_EVENT != 0).then_some(word(7) >> 32),
            flags: (word(1) >> 32) as u32,
        })
    }

    /// Whether it is a write in several parts.
    fn is_long_write(&self, process: &Process) -> bool {
        match self.kind {
            PWRITE => self.len > MAX_TRANSFER,
            PWRITEV => {
                let pieces = pieces_of(process, self.buffer, self.len, MAX_TRANSFER + 1);
                let len = |(_, len): &(u64, u64)| *len;
                pieces.is_ok_and(|pieces| pieces.iter().map(len).sum::<u64>() > MAX_TRANSFER)
            }
            _ => false,
        }
    }
}

impl Sentry {
    /// `io_setup(2)`: `aio-max-nr` is 65,536 for each context.
    pub(in crate::sentry) fn sys_io_setup(
        &mut self,
        process: &mut Process,
        count: u64,
        to: u64,
    ) -> SyscallResult {
        let count = u64::from(count as u32);
        if word_in(process, to)? != 0 || count == 0 || count > MAX_COUNT {
            return Err(Errno::INVAL.into());
        }
        if count > MAX_EVENTS {
            return Err(Errno::AGAIN.into());
        }
        // One slot is always free, and the last page is full.
        let len = ResultRing::len(count as u32 + 1);
        let slots = ((len - HEAD_LEN) / EVENT_LEN) as u32;
        let planned = self.state.layout.plan(None, false, len, READ_WRITE, true)?;
        self.state.check_address_space(len, &planned, true)?;
        copy_out(process, to, &planned.start.to_le_bytes())?;
        let head = [0, slots, 0, 0, MAGIC, 1, 0, HEAD_LEN as u32];
        let head = head.into_iter().fold(StructBuilder::default(), StructBuilder::int);
        let content = Some(Content::Bytes(head.0));
        let at = Some(planned.start);
        let (_, change) = self.change().layout.map(at, false, len, READ_WRITE, content)?;
        Ok(SyscallControl::Memory(0, change))
    }

    /// The ring of a context.
    fn ring_of(&self, process: &Process, context: u64) -> SyscallResult<ResultRing> {
        let mut head = [0; HEAD_LEN as usize];
        if !context.is_multiple_of(PAGE) || !process.read(context, &mut head)? {
            return Err(Errno::INVAL.into());
        }
        let (ints, _) = head.as_chunks::<4>();
        let int = |at: usize| u32::from_le_bytes(ints[at]);
        let slots = int(1);
        let fits = (2..=MAX_EVENTS as u32 + 2 * PAGE as u32).contains(&slots);
        if int(4) != MAGIC || !fits {
            return Err(Errno::INVAL.into());
        }
        let end = context.checked_add(ResultRing::len(slots)).ok_or(Errno::INVAL)?;
        if !self.state.layout.allows(&(context..end), READ_WRITE) {
            return Err(Errno::INVAL.into());
        }
        // The guest can change the indexes.
        Ok(ResultRing { at: context, slots, head: int(2) % slots, tail: int(3) % slots })
    }

    /// `io_destroy(2)`: no operation is under way.
    pub(in crate::sentry) fn sys_io_destroy(
        &mut self,
        process: &Process,
        context: u64,
    ) -> SyscallResult {
        let ring = self.ring_of(process, context)?;
        let control = self.sys_munmap(context, ResultRing::len(ring.slots))?;
        self.wake(ring.waiters(), u32::MAX, u32::MAX);
        Ok(control)
    }

    /// `io_submit(2)`: reads, writes and syncs of files, which are done before it returns, and
    /// reads and writes of streams that do not wait (`RWF_NOWAIT`, `O_NONBLOCK`). Polls are
    /// `EINVAL`. One call performs at most 64 operations, and none after 8 MiB. A longer write is
    /// the first of its call.
    pub(in crate::sentry) fn sys_io_submit(
        &mut self,
        process: &mut Process,
        context: u64,
        count: u64,
        list: u64,
    ) -> SyscallResult {
        let mut ring = self.ring_of(process, context)?;
        if (count as i64) < 0 {
            return Err(Errno::INVAL.into());
        }
        let (mut done, mut bytes) = (0, 0);
        while done < count.min(MAX_SUBMITTED) && bytes < MAX_TRANSFER {
            match self.submit_one(process, &mut ring, list.wrapping_add(done * 8), done == 0) {
                Ok(SyscallControl::Value(transferred)) => bytes += transferred,
                // The first one has to end at a limit: the call is made again, and continues it.
                Ok(control) => return Ok(control),
                Err(SyscallError::Errno(_) | SyscallError::Paused) if done > 0 => break,
                Err(error) => return Err(error),
            }
            done += 1;
            if self.resumed.is_some() {
                // The bytes of its wait are those of the first operation.
                break;
            }
        }
        if done > 0 {
            self.wake(ring.waiters(), u32::MAX, u32::MAX);
        }
        Ok(SyscallControl::Value(done))
    }

    /// Performs the operation whose address is at `at`, and returns the bytes that it transferred.
    /// A long write is the `first` of its call, which continues it.
    fn submit_one(
        &mut self,
        process: &mut Process,
        ring: &mut ResultRing,
        at: u64,
        first: bool,
    ) -> SyscallResult {
        let at = word_in(process, at)?;
        let operation = Operation::decode(process, at)?;
        if ring.is_full() {
            return Err(Errno::AGAIN.into());
        }
        let description = self.state.table.get(operation.descriptor)?;
        let allowed = match operation.kind {
            _ if description.is_path() => false,
            PREAD | PREADV => description.reads(),
            PWRITE | PWRITEV => description.writes(),
            _ => true,
        };
        if !allowed {
            return Err(Errno::BADF.into());
        }
        if operation.flags & !KNOWN_FLAGS != 0 {
            return Err(Errno::OPNOTSUPP.into());
        }
        let waits = operation.flags & libc::RWF_NOWAIT as u32 == 0
            && description.flags & libc::O_NONBLOCK as u32 == 0;
        let ready_only = description.open.is_stream() && !waits;
        if let Some(event) = operation.event
            && !matches!(self.state.table.get(event)?.open, FileObject::Event { .. })
        {
            return Err(Errno::INVAL.into());
        }
        if !first && !ready_only && operation.is_long_write(process) {
            return Err(Errno::AGAIN.into());
        }
        // The key that the kernel gives it.
        copy_out(process, at.wrapping_add(8), &[0; 4])?;
        let Operation { descriptor, buffer, len, offset, .. } = operation;
        let outcome = match operation.kind {
            // A stream has no positions.
            PREAD if ready_only => self.sys_read(process, descriptor, buffer, len),
            PWRITE if ready_only => self.sys_write(process, descriptor, buffer, len),
            PREADV if ready_only => self.sys_readv(process, descriptor, buffer, len),
            PWRITEV if ready_only => self.sys_writev(process, descriptor, buffer, len),
            PREAD => self.sys_pread64(process, descriptor, buffer, len, offset),
            PWRITE => self.sys_pwrite64(process, descriptor, buffer, len, offset),
            PREADV => self.sys_preadv(process, descriptor, buffer, len, offset),
            PWRITEV => self.sys_pwritev(process, descriptor, buffer, len, offset),
            FSYNC | FDSYNC if [buffer, len, offset] == [0; 3] => self.sys_fsync(descriptor),
            _ => return Err(Errno::INVAL.into()),
        };
        let result = match outcome {
            Ok(SyscallControl::Value(bytes)) => bytes as i64,
            Ok(SyscallControl::Wait(wait)) if wait.done > 0 && !ready_only => {
                return Ok(SyscallControl::Wait(wait));
            }
            Ok(SyscallControl::Wait(wait)) if wait.done > 0 => wait.done as i64,
            // Files do not wait, and streams only if they may.
            Ok(_) => -i64::from(libc::EAGAIN),
            Err(SyscallError::Errno(error)) => -i64::from(error.raw_os_error()),
            Err(error) => return Err(error),
        };
        let event = StructBuilder::default().word(operation.data).word(at);
        copy_out(process, ring.slot(ring.tail), &event.word(result as u64).word(0).0)?;
        ring.tail = (ring.tail + 1) % ring.slots;
        copy_out(process, ring.at + TAIL, &ring.tail.to_le_bytes())?;
        if let Some(event) = operation.event
            && let FileObject::Event { count, edges, .. } =
                &mut self.change().table.get_mut(event)?.open
        {
            *count = count.saturating_add(1).min(u64::MAX - 1);
            *edges += 1;
        }
        Ok(SyscallControl::Value(result.max(0) as u64))
    }

    /// `io_getevents(2)`: a wait for more results than a context holds ends when it is full.
    pub(in crate::sentry) fn sys_io_getevents(
        &mut self,
        process: &mut Process,
        &[context, least, most, to, timeout, _]: &[u64; 6],
    ) -> SyscallResult {
        let until = match (&self.resumed, timeout) {
            (Some(wait), _) => wait.until,
            (None, 0) => None,
            (None, at) => {
                let length = length_in(process, at)?;
                Some(self.moment_after(libc::CLOCK_MONOTONIC as u64, length, false)?)
            }
        };
        let mut ring = self.ring_of(process, context)?;
        if least > most || most > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        let held = ring.event_count();
        if u64::from(held) < least && !ring.is_full() && !self.passed(until) {
            let order = self.change().current_mut().threads.next_order();
            let address = ring.at + TAIL;
            let reason = WaitReason::Futex { address, bits: u32::MAX, order, place: None };
            return Ok(SyscallControl::Wait(Wait::new(reason, until)));
        }
        let count = u64::from(held).min(most) as u32;
        let mut done = 0;
        while done < count {
            // Up to the end of the ring, then from its beginning.
            let part = (count - done).min(ring.slots - ring.head);
            let bytes = copy_in(process, ring.slot(ring.head), part as usize * EVENT_LEN as usize)?;
            copy_out(process, to.wrapping_add(u64::from(done) * EVENT_LEN), &bytes)?;
            done += part;
            ring.head = (ring.head + part) % ring.slots;
        }
        copy_out(process, ring.at + HEAD, &ring.head.to_le_bytes())?;
        Ok(SyscallControl::Value(done.into()))
    }

    /// `io_pgetevents(2)`: as `io_getevents`.
    pub(in crate::sentry) fn sys_io_pgetevents(
        &mut self,
        process: &mut Process,
        a: &[u64; 6],
    ) -> SyscallResult {
        if a[5] != 0 {
            let (set, size) = (word_in(process, a[5])?, word_in(process, a[5].wrapping_add(8))?);
            self.mask_in(process, set, size)?;
        }
        self.sys_io_getevents(process, a)
    }

    /// `io_cancel(2)`: `EINVAL`, for every submitted operation is done.
    pub(in crate::sentry) fn sys_io_cancel(
        &mut self,
        process: &Process,
        context: u64,
        operation: u64,
    ) -> SyscallResult {
        copy_in(process, operation, OPERATION_LEN)?;
        self.ring_of(process, context)?;
        Err(Errno::INVAL.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_has_one_free_slot_and_wraps_around() {
        let ring = |head, tail| ResultRing { at: PAGE, slots: 4, head, tail };
        assert_eq!(
            [(3, 3), (3, 0), (3, 2), (0, 3)].map(|(head, tail)| ring(head, tail).event_count()),
            [0, 1, 3, 3]
        );
        assert!(ring(3, 2).is_full() && !ring(3, 1).is_full());
        assert_eq!(ring(0, 0).slot(2), PAGE + 32 + 64);
        assert_eq!(
            (ResultRing::len(1), ResultRing::len(127), ResultRing::len(128)),
            (PAGE, PAGE, 2 * PAGE)
        );
    }
}
