//! Registers and memory of a stopped thread, for its tracer. The thread is the current one, in the
//! stub.
//!
//! A waiting call has its number where the result goes, so that it can be repeated. The tracer sees
//! the number apart, as in Linux, and the result of an interrupted call.

use std::ops::Range;

use rustix::io::Errno;

use crate::platform::{PlatformError, Process, Register};
use crate::sentry::Sentry;
use crate::sentry::abi::{
    AUDIT_ARCH, DEBUG, GENERAL_LEN, LAST_ADDRESS, StructBuilder, USER_LEN, general, set_general,
    set_vectors, vectors_of,
};
use crate::sentry::kernel::tracing::{EVENT_STOP, TraceStop, interrupted_result, is_interrupted};
use crate::sentry::mm::layout::{Mapping, pages};
use crate::sentry::mm::stub_calls::Change;
use crate::sentry::result::{SyscallControl, SyscallError};

/// Bytes of the instruction that calls.
const CALL_LEN: u64 = 2;
/// Maximum parts of memory that one write opens.
const MAX_PARTS: usize = 16;

/// A part of a mapping, as it is before a tracer reads or writes it.
#[derive(Debug)]
pub(crate) struct PrivatePart {
    range: Range<u64>,
    was: Mapping,
}

impl Sentry {
    /// The number of the call that the tracer sees (`orig_rax`), and the result that it sees in
    /// the place of the one in the frame.
    fn seen_call(&self, process: &Process, thread: u32) -> (i64, Option<i64>) {
        let Some(trace) = self.state.processes.tracing.get(thread) else { return (-1, None) };
        let waits = self.state.current().threads.current().wait.is_some();
        match (&trace.stop, trace.call) {
            (Some(TraceStop::Entry), Some(call)) => (call.number.into(), Some(call.result)),
            (Some(TraceStop::Event(..)), Some(call)) if trace.held => {
                (call.number.into(), Some(call.result))
            }
            _ if waits => {
                let number = process.call().number;
                (number, Some(interrupted_result(number)))
            }
            (Some(TraceStop::Signal(_) | TraceStop::Group(_)), _) => (-1, None),
            (Some(TraceStop::Event(EVENT_STOP, _)), _) => (-1, None),
            _ => (trace.number.into(), None),
        }
    }

    pub(crate) fn general_registers(
        &self,
        process: &Process,
        thread: u32,
    ) -> Result<Vec<u8>, Errno> {
        let (original, result) = self.seen_call(process, thread);
        general(process, original, result).ok_or(Errno::IO)
    }

    /// Sets the general registers, or the first of them.
    pub(crate) fn set_general_registers(
        &mut self,
        process: &mut Process,
        thread: u32,
        given: &[u8],
    ) -> Result<(), Errno> {
        let mut bytes = self.general_registers(process, thread)?;
        let before = self.seen_call(process, thread);
        let len = given.len().min(GENERAL_LEN);
        bytes[..len].copy_from_slice(&given[..len]);
        let pointer = process.register(Register::POINTER);
        let set = set_general(process, &bytes)?;
        let moved = process.register(Register::POINTER) != pointer;
        let changed = moved || (set.original, Some(set.result)) != before;
        let waits = self.state.current().threads.current().wait.is_some();
        if waits && !changed {
            return Ok(());
        }
        if waits {
            // The call is not repeated.
            self.end_wait();
            self.unmask();
            if let Some(trace) = self.change().own_trace_mut() {
                trace.call = None;
            }
        }
        if !waits
            && let Some(trace) = self.change().own_trace_mut()
            && let Some(call) = trace.call.as_mut().filter(|_| trace.held)
        {
            (call.number, call.result) = (set.original as i32, set.result);
            trace.number = set.original as i32;
            process.set_register(Register::NUMBER, u64::from(set.original as u32));
            return Ok(());
        }
        process.set_register(Register::RESULT, set.result as u64);
        if set.original >= 0 && is_interrupted(set.result) {
            // The interrupted call of an earlier stop: it is made again.
            let pointer = process.register(Register::POINTER).wrapping_sub(CALL_LEN);
            process.set_register(Register::POINTER, pointer);
            process.set_register(Register::NUMBER, set.original as u64);
        }
        Ok(())
    }

    /// A word of `struct user`.
    pub(crate) fn peek_user(
        &self,
        process: &Process,
        thread: u32,
        at: u64,
    ) -> Result<[u8; 8], Errno> {
        if !at.is_multiple_of(8) || at >= USER_LEN {
            return Err(Errno::IO);
        }
        if at < GENERAL_LEN as u64 {
            let bytes = self.general_registers(process, thread)?;
            return Ok(*bytes[at as usize..].first_chunk().ok_or(Errno::IO)?);
        }
        let debug = || {
            let trace = self.state.processes.tracing.get(thread)?;
            trace.debug.get((at - DEBUG.start) as usize / 8).copied()
        };
        let word = if DEBUG.contains(&at) { debug().unwrap_or_default() } else { 0 };
        Ok(word.to_le_bytes())
    }

    pub(crate) fn poke_user(
        &mut self,
        process: &mut Process,
        thread: u32,
        at: u64,
        word: u64,
    ) -> Result<(), Errno> {
        if !at.is_multiple_of(8) || at >= USER_LEN {
            return Err(Errno::IO);
        }
        if at < GENERAL_LEN as u64 {
            let mut bytes = self.general_registers(process, thread)?;
            bytes[at as usize..at as usize + 8].copy_from_slice(&word.to_le_bytes());
            return self.set_general_registers(process, thread, &bytes);
        }
        if !DEBUG.contains(&at) {
            return Err(Errno::IO);
        }
        let place = (at - DEBUG.start) as usize / 8;
        match place {
            0..=3 if word > LAST_ADDRESS => return Err(Errno::INVAL),
            4 | 5 => return Err(Errno::IO),
            _ => {}
        }
        if let Some(trace) = self.change().processes.tracing.get_mut(thread) {
            trace.debug[place] = word;
        }
        Ok(())
    }

    pub(crate) fn vectors_of_tracee(
        &self,
        process: &Process,
        extended: bool,
    ) -> Result<Vec<u8>, Errno> {
        vectors_of(process, extended).ok_or(if extended { Errno::NODEV } else { Errno::IO })
    }

    pub(crate) fn set_vectors_of_tracee(
        &self,
        process: &mut Process,
        bytes: &[u8],
        extended: bool,
    ) -> Result<(), Errno> {
        set_vectors(process, bytes, extended)
    }

    /// Moves the position of a file that memory was read from or written through.
    pub(crate) fn move_position(&mut self, descriptor: u64, by: u64) {
        // It was open when the call began.
        let _ = self.advance(descriptor, by);
    }

    /// `struct ptrace_syscall_info`.
    pub(crate) fn call_info(&self, process: &Process, thread: u32) -> Result<Vec<u8>, Errno> {
        let trace = self.state.processes.tracing.get(thread).ok_or(Errno::SRCH)?;
        let (number, result) = self.seen_call(process, thread);
        let kind = match trace.stop {
            Some(TraceStop::Entry) => 1,
            Some(TraceStop::Exit) => 2,
            _ => 0,
        };
        let bytes = StructBuilder::default()
            .int(kind)
            .int(AUDIT_ARCH)
            .word(process.register(Register::POINTER))
            .word(process.register(Register::STACK));
        let mut bytes = match kind {
            1 => {
                let args = process.call().args;
                args.into_iter().fold(bytes.word(number as u64), StructBuilder::word)
            }
            2 => bytes.word(result.map_or(process.register(Register::RESULT), |r| r as u64)),
            _ => bytes,
        };
        if kind == 2 {
            let value = result.unwrap_or(process.register(Register::RESULT) as i64);
            bytes.0.push(u8::from((-4095..0).contains(&value)));
        }
        Ok(bytes.0)
    }

    /// The whole pages of a range, if all of them are mapped and private.
    pub(crate) fn private_parts(&self, at: u64, len: usize) -> Option<Vec<PrivatePart>> {
        let end = at.checked_add(len as u64)?;
        let first = at & !(crate::sentry::PAGE - 1);
        let range = pages(first, end - first).ok()?;
        let parts = self.state.layout.parts(&range);
        let covered: u64 = parts.iter().map(|(part, _)| part.end - part.start).sum();
        let private = parts.iter().all(|(_, m)| m.share.is_none() && !m.is_sparse());
        (covered == range.end - range.start && private && parts.len() <= MAX_PARTS)
            .then(|| parts.into_iter().map(|(range, was)| PrivatePart { range, was }).collect())
    }

    /// The change that adds rights to a part, as a call of the process does; `None` where there is
    /// no room for it.
    pub(crate) fn open_part(
        &mut self,
        process: &Process,
        part: &PrivatePart,
        access: u64,
    ) -> Result<Option<Change>, PlatformError> {
        let (range, protection) = (&part.range, part.was.protection | access);
        match self.sys_mprotect(process, range.start, range.end - range.start, protection) {
            Ok(SyscallControl::Memory(_, change)) => Ok(Some(change)),
            Err(SyscallError::Broken(error)) => Err(error),
            _ => Ok(None),
        }
    }

    /// The change that undoes that of [`Self::open_part`]. It needs no room.
    pub(crate) fn close_part(&mut self, part: &PrivatePart) -> Change {
        self.change().layout.put_back(part.range.clone(), part.was)
    }
}
