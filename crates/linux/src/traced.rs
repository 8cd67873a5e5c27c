//! Traced threads: their stops while the guest runs, and the requests of tracers for registers and
//! memory.
//!
//! For a request the process of the tracee is made the current one, as when it runs, with the
//! thread in its stub. Memory that the tracee itself may not write is made writable for the write:
//! a breakpoint in text is a private copy of its page, and text that was changed for calls inside
//! has its original bytes first.
//!
//! Promises: afterwards the tracer is current again, and the protection of memory is what it was.

use rustix::io::Errno;

use crate::guest::{Guest, StopReason};
use crate::platform::{Call, Continuation, PlatformError, StubCommands, Trap};
use crate::sentry::{
    End, SignalDelivery, TraceOperation, TraceRequest, TracedEntry, read_some, write_some,
};

/// The answer of a request: bytes for the tracer and a result.
type Answer = Result<(Vec<u8>, u64), Errno>;

impl Guest {
    /// Lets the tracer of the current thread see its call before it is served. Returns the
    /// outcome, and the call as the tracer leaves it.
    pub(crate) fn enter_traced(&mut self, call: &mut Call) -> Result<TracedEntry, PlatformError> {
        if !self.sentry.is_traced() {
            return Ok(TracedEntry::Serves);
        }
        self.body.detach(call)?;
        call.place = Trap::Stub;
        Ok(self.sentry.enter_traced(&mut self.body.process, call))
    }

    /// As [`Guest::go_on`], of a traced thread. One that has to stop comes back at once.
    pub(crate) fn go_on_traced(&mut self) -> Result<Option<StopReason>, PlatformError> {
        self.sentry.end_step(&mut self.body.process);
        if self.sentry.has_injected()
            && let SignalDelivery::Ends(end) =
                self.sentry.served_signals(&mut self.body.process, false)?
        {
            return Ok(Some(StopReason::End(end, Trap::Stub)));
        }
        self.sentry.leave_traced();
        if self.sentry.has_due_stop() || self.sentry.has_signal() || self.turn_is_over() {
            self.body.process.interrupt()?;
        } else {
            self.sentry.begin_step(&mut self.body.process);
        }
        self.body.process.execute(&StubCommands::default(), Continuation::Resume)?;
        Ok(None)
    }

    /// Makes the stop of the current thread that is due, while it is in the stub. Returns how its
    /// process ends, if a signal ends it.
    pub(crate) fn stop_traced(&mut self) -> Result<Option<End>, PlatformError> {
        if !self.sentry.is_traced() {
            return Ok(None);
        }
        self.sentry.end_step(&mut self.body.process);
        if self.sentry.stop_if_due() || !self.sentry.has_signal() {
            return Ok(None);
        }
        Ok(match self.sentry.served_signals(&mut self.body.process, false)? {
            SignalDelivery::Ends(end) => Some(end),
            _ => None,
        })
    }

    /// Carries out the request of a tracer, which is the current process.
    pub(crate) fn trace(
        &mut self,
        call: &Call,
        request: TraceRequest,
    ) -> Result<Option<StopReason>, PlatformError> {
        self.body.detach(call)?;
        let own = self.sentry.state.processes.current_id();
        let TraceRequest { process, thread, operation, to, room, length_to, counts, moves } =
            request;
        self.switch_to(process)?;
        self.body.unpark()?;
        self.switch(thread);
        let answer = self.answer_tracer(thread, operation);
        self.switch_to(own)?;
        let (bytes, value) = match answer? {
            Ok(answer) => answer,
            Err(errno) => {
                let value = -i64::from(errno.raw_os_error());
                return self.finish(&Call { place: Trap::Stub, ..*call }, value as u64);
            }
        };
        let part = &bytes[..bytes.len().min(room as usize)];
        let process = &mut self.body.process;
        let mut written = part.is_empty() || process.write(to, part)?;
        if let Some(at) = length_to {
            let len = if bytes.is_empty() { room } else { part.len() as u64 };
            written = written && process.write(at, &len.to_le_bytes())?;
        }
        let value = match written {
            true if counts => bytes.len() as u64,
            true => value,
            false => -i64::from(libc::EFAULT) as u64,
        };
        if let Some(descriptor) = moves
            && value as i64 > 0
        {
            self.sentry.move_position(descriptor, value);
        }
        self.finish(&Call { place: Trap::Stub, ..*call }, value)
    }

    /// The answer of a request about the current thread, which is in the stub.
    fn answer_tracer(
        &mut self,
        thread: u32,
        operation: TraceOperation,
    ) -> Result<Answer, PlatformError> {
        let (sentry, process) = (&mut self.sentry, &mut self.body.process);
        Ok(match operation {
            TraceOperation::Peek(at) => {
                let mut word = [0; 8];
                match process.read(at, &mut word)? || self.read_closed(at, &mut word)? {
                    true => Ok((word.to_vec(), 0)),
                    false => Err(Errno::IO),
                }
            }
            TraceOperation::Poke(at, word) => match self.poke(at, &word.to_le_bytes())? {
                true => Ok((Vec::new(), 0)),
                false => Err(Errno::IO),
            },
            TraceOperation::Read(at, len) => {
                let bytes = read_some(process, at, len)?;
                let count = bytes.len() as u64;
                if count == 0 && len > 0 { Err(Errno::IO) } else { Ok((bytes, count)) }
            }
            TraceOperation::Write(at, bytes) => {
                let mut done = write_some(process, at, &bytes)?;
                if done < bytes.len() as u64 && self.poke(at + done, &bytes[done as usize..])? {
                    done = bytes.len() as u64;
                }
                if done == 0 && !bytes.is_empty() { Err(Errno::IO) } else { Ok((Vec::new(), done)) }
            }
            TraceOperation::PeekUser(at) => {
                sentry.peek_user(process, thread, at).map(|word| (word.to_vec(), 0))
            }
            TraceOperation::PokeUser(at, word) => {
                sentry.poke_user(process, thread, at, word).map(|()| (Vec::new(), 0))
            }
            TraceOperation::GeneralRegisters => {
                sentry.general_registers(process, thread).map(|bytes| (bytes, 0))
            }
            TraceOperation::SetGeneralRegisters(bytes) => {
                sentry.set_general_registers(process, thread, &bytes).map(|()| (Vec::new(), 0))
            }
            TraceOperation::Vectors { extended } => {
                sentry.vectors_of_tracee(process, extended).map(|bytes| (bytes, 0))
            }
            TraceOperation::SetVectors { bytes, extended } => {
                sentry.set_vectors_of_tracee(process, &bytes, extended).map(|()| (Vec::new(), 0))
            }
            TraceOperation::CallInfo => sentry.call_info(process, thread).map(|bytes| (bytes, 0)),
        })
    }

    /// Writes memory of the current process, whatever its protection is. Returns whether it was
    /// written: all of it is mapped, and private where it is not writable.
    fn poke(&mut self, at: u64, bytes: &[u8]) -> Result<bool, PlatformError> {
        if self.body.process.write(at, bytes)? {
            return Ok(true);
        }
        let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        self.with_access(at, bytes.len(), access, |guest| guest.body.process.write(at, bytes))
    }

    /// Reads memory of the current process that it may not read itself.
    fn read_closed(&mut self, at: u64, bytes: &mut [u8]) -> Result<bool, PlatformError> {
        let (access, len) = (libc::PROT_READ as u64, bytes.len());
        self.with_access(at, len, access, |guest| guest.body.process.read(at, bytes))
    }

    fn with_access(
        &mut self,
        at: u64,
        len: usize,
        access: u64,
        work: impl FnOnce(&mut Self) -> Result<bool, PlatformError>,
    ) -> Result<bool, PlatformError> {
        let Some(parts) = self.sentry.private_parts(at, len) else { return Ok(false) };
        let mut opened = 0;
        for part in &parts {
            let change = self.sentry.open_part(&self.body.process, part, access)?;
            let Some(change) = change else { break };
            self.enact(change, Continuation::Ask)?;
            if self.sentry.unattached {
                self.attach()?;
            }
            opened += 1;
        }
        let done = opened == parts.len() && work(self)?;
        // The last one first, as the parts were one mapping before.
        for part in parts[..opened].iter().rev() {
            let change = self.sentry.close_part(part);
            self.enact(change, Continuation::Ask)?;
        }
        Ok(done)
    }
}
