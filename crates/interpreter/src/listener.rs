//! Requests of guests to their host during a call: to take printed text, and to call a host
//! function.
//!
//! It is host state of the lease ([`Host::state`]), so none of it outlives a call.

use std::time::Duration;

use afresh::wasm::wasmtime::{self, Caller, Extern, Linker, Memory};
use afresh::wasm::{Host, Imports, State, hand_over};

use crate::answer_limit::AnswerTooLong;
use crate::commands::Commands;
use crate::frame::{Frame, MAX_FRAME};

/// The module that guests of [`CallConvention::Array`](crate::CallConvention::Array) import their
/// host's functions from.
const INTERPRETER: &str = "afresh_interpreter";

/// The answer to a frame that cannot be taken.
const FAULT: i32 = -2;

/// Where a program prints to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// The terminal that a command of a Linux program was given.
    Terminal,
}

impl Stream {
    /// The stream that a guest means by a number.
    fn of(number: i32) -> Self {
        if number == 2 { Self::Stderr } else { Self::Stdout }
    }
}

/// Receives the output and requests of a guest call. An error ends the call.
pub trait HostCallbacks: Default + Send + 'static {
    /// Takes output of the program, at once. It may be any bytes, at least one.
    ///
    /// # Errors
    /// Any error, which ends the call.
    fn print(&mut self, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()>;

    /// Takes output of a command that a Linux program runs, or has left running: the one of this
    /// number. It has at least one byte.
    ///
    /// # Errors
    /// As [`HostCallbacks::print`].
    fn print_command(&mut self, number: u32, stream: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
        // Other processes were started by the code, so their output is part of its output.
        match self.commands().is_some_and(|all| all.print(number, stream, bytes)) {
            true => Ok(()),
            false => self.print(stream, bytes),
        }
    }

    /// The commands that receive their output, their ends and the answer to their start; `None`
    /// where they have no receivers.
    fn commands(&self) -> Option<&Commands> {
        None
    }

    /// Takes a result that the code of a Linux program displays: an object in JSON, from a guest
    /// that may send any bytes.
    ///
    /// # Errors
    /// As [`HostCallbacks::print`].
    fn display(&mut self, result: &[u8]) -> wasmtime::Result<()> {
        let _ = result;
        Ok(())
    }

    /// A command has ended, with this status: negative for a signal.
    fn command_ended(&mut self, number: u32, status: i32) {
        if let Some(commands) = self.commands() {
            commands.ended(number, status);
        }
    }

    /// The guest has answered, by a frame, and may continue.
    fn answered(&mut self, answer: &[u8]) {
        if let Some(commands) = self.commands() {
            commands.answered(answer);
        }
    }

    /// Maximum bytes of an answer, and of anything else that a guest sends at once: 64 MiB if not
    /// overridden. A longer answer is [`AnswerTooLong`], and anything else that is longer ends the
    /// call.
    fn max_frame(&self) -> usize {
        MAX_FRAME
    }

    /// Maximum CPU time of the call. The guest must be one that keeps such a limit
    /// ([`afresh::CallOptions::cpu_time_limit`]).
    fn cpu_time_limit(&self) -> Option<Duration> {
        None
    }

    /// Whether the cost of the call has the pages that differ afterwards, which takes a comparison
    /// of the pages that calls write.
    fn counts_pages(&self) -> bool {
        false
    }

    /// Bytes of output that it has dropped.
    fn dropped_bytes(&self) -> u64 {
        0
    }

    /// Whether the call may run on. While a Linux program runs this is called at least every 100
    /// ms.
    fn proceeds(&mut self) -> bool {
        true
    }

    /// Calls a host function: `[name, arguments]` or `[name, arguments, named arguments]` in CBOR.
    /// The answer is `[0, value]`, or `[1, name, message, number]` of an error.
    ///
    /// # Errors
    /// Any error, which ends the call. If no functions are offered, a guest that calls one is
    /// ended.
    fn call(&mut self, request: &[u8]) -> wasmtime::Result<Vec<u8>> {
        let _ = request;
        Err(wasmtime::Error::msg("the host offers no functions"))
    }
}

/// One call's own.
#[derive(Default)]
pub(crate) struct ListenerState<L> {
    pub(crate) listener: L,
    /// The answer of a guest that answers by a frame.
    pub(crate) given: Option<Result<Vec<u8>, AnswerTooLong>>,
    /// The result of the last host function, until the guest takes it.
    reply: Vec<u8>,
    /// Bytes that a Wasm guest has sent by its imports.
    pub(crate) received: u64,
}

impl<L: HostCallbacks> ListenerState<L> {
    pub(crate) fn of(listener: L) -> Self {
        Self { listener, ..Self::default() }
    }

    /// Handles a frame, and returns the reply; `None` for an invalid frame.
    pub(crate) fn hear(&mut self, frame: &[u8]) -> wasmtime::Result<Option<Vec<u8>>> {
        let Some(frame) = Frame::parse(frame) else { return Ok(None) };
        match frame {
            Frame::Answer(answer) => {
                let (bytes, limit) = (answer.len(), self.listener.max_frame());
                self.given = Some(if bytes > limit {
                    Err(AnswerTooLong { bytes, limit })
                } else {
                    self.listener.answered(answer);
                    Ok(answer.to_vec())
                });
            }
            Frame::Ended(number, status) => self.listener.command_ended(number, status),
            // Without bytes it is no output: a guest could send it without end, and no limit of
            // bytes would be reached.
            Frame::TerminalOutput(_, []) | Frame::Stdout([]) | Frame::Stderr([]) => {}
            Frame::TerminalOutput(number, shown) => {
                self.listener.print_command(number, Stream::Terminal, shown)?;
            }
            Frame::Displayed(result) => self.listener.display(result)?,
            Frame::Stdout(bytes) => self.listener.print(Stream::Stdout, bytes)?,
            Frame::Stderr(bytes) => self.listener.print(Stream::Stderr, bytes)?,
            Frame::Tool(request) => return self.listener.call(request).map(Some),
        }
        Ok(Some(Vec::new()))
    }
}

/// Host state for guests that [`imports`] of the same type serve; `make` makes the listener of a
/// lease before its first call, and of warm-ups.
pub fn state<L: HostCallbacks>(make: impl Fn() -> L + Send + Sync + 'static) -> State {
    State::new(move || ListenerState::of(make()))
}

/// The listener of the present call of a lease.
pub fn listener<L: HostCallbacks>(host: &mut Host) -> &mut L {
    &mut host.state::<ListenerState<L>>().listener
}

/// The imports of guests with either convention, in addition to WASI.
#[must_use]
pub fn imports<L: HostCallbacks>() -> Imports {
    Imports::new(|linker: &mut Linker<Host>| {
        linker.func_wrap(INTERPRETER, "write", write::<L>)?;
        linker.func_wrap(INTERPRETER, "call", call::<L>)?;
        linker.func_wrap(INTERPRETER, "take", take::<L>)?;
        linker.func_wrap("host", "call", take_frame::<L>)?;
        Ok(())
    })
    .check_memory()
}

fn memory(caller: &mut Caller<'_, Host>) -> wasmtime::Result<Memory> {
    caller
        .get_export("memory")
        .and_then(Extern::into_memory)
        .ok_or_else(|| wasmtime::Error::msg("the guest exports no memory"))
}

/// The memory of a guest that calls, with the call's state.
fn parts<'a, L: HostCallbacks>(
    caller: &'a mut Caller<'_, Host>,
) -> wasmtime::Result<(&'a mut [u8], &'a mut ListenerState<L>)> {
    let (bytes, host) = memory(caller)?.data_and_store_mut(caller);
    Ok((bytes, host.state()))
}

/// As [`parts`], once the pages of the bytes at an address are there: a listener acts on them as it
/// reads them.
fn parts_with<'a, L: HostCallbacks>(
    caller: &'a mut Caller<'_, Host>,
    address: i32,
    len: i32,
) -> wasmtime::Result<(&'a [u8], &'a mut ListenerState<L>)> {
    let (bytes, host) = memory(caller)?.data_and_store_mut(caller);
    let bytes = named(bytes, address, len)?;
    host.fetch_memory(bytes)?;
    Ok((bytes, host.state()))
}

/// The bytes at an address that the guest gives; they may be outside its memory.
fn named(memory: &[u8], address: i32, len: i32) -> wasmtime::Result<&[u8]> {
    let (start, len) = (address as u32 as usize, len as u32 as usize);
    start
        .checked_add(len)
        .and_then(|end| memory.get(start..end))
        .ok_or_else(|| wasmtime::Error::msg("the guest names bytes outside of its memory"))
}

fn write<L: HostCallbacks>(
    mut caller: Caller<'_, Host>,
    stream: i32,
    address: i32,
    len: i32,
) -> wasmtime::Result<()> {
    let (bytes, hearing) = parts_with::<L>(&mut caller, address, len)?;
    hearing.received += bytes.len() as u64;
    match bytes {
        [] => Ok(()),
        bytes => hearing.listener.print(Stream::of(stream), bytes),
    }
}

fn call<L: HostCallbacks>(
    mut caller: Caller<'_, Host>,
    address: i32,
    len: i32,
) -> wasmtime::Result<i32> {
    let (request, hearing) = parts_with::<L>(&mut caller, address, len)?;
    hearing.received += request.len() as u64;
    hearing.reply = hearing.listener.call(request)?;
    i32::try_from(hearing.reply.len())
        .map_err(|_| wasmtime::Error::msg("a function's answer is larger than 2 GiB"))
}

fn take<L: HostCallbacks>(mut caller: Caller<'_, Host>, address: i32) -> wasmtime::Result<()> {
    let (memory, hearing) = parts::<L>(&mut caller)?;
    let reply = std::mem::take(&mut hearing.reply);
    let start = address as u32 as usize;
    let room = start.checked_add(reply.len()).and_then(|end| memory.get_mut(start..end));
    let Some(room) = room else {
        return Err(wasmtime::Error::msg("the guest has no room for a function's answer"));
    };
    room.copy_from_slice(&reply);
    Ok(())
}

/// Takes a guest frame, and writes the reply into memory from the guest's allocator. Its address
/// and its length are stored at the addresses that the guest passes. An empty reply allocates
/// nothing.
fn take_frame<L: HostCallbacks>(
    mut caller: Caller<'_, Host>,
    address: i32,
    len: i32,
    to_address: i32,
    to_len: i32,
) -> wasmtime::Result<i32> {
    let (frame, hearing) = parts_with::<L>(&mut caller, address, len)?;
    hearing.received += frame.len() as u64;
    let Some(reply) = hearing.hear(frame)? else {
        return Ok(FAULT);
    };
    let at = match reply.is_empty() {
        true => 0,
        false => match hand_over(&mut caller, &reply)? {
            Some(at) => at,
            None => return Ok(FAULT),
        },
    };
    let (memory, _) = parts::<L>(&mut caller)?;
    for (to, word) in [(to_address, at), (to_len, reply.len() as u32)] {
        let to = to as u32 as usize;
        let Some(room) = to.checked_add(4).and_then(|end| memory.get_mut(to..end)) else {
            return Ok(FAULT);
        };
        room.copy_from_slice(&word.to_le_bytes());
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Pieces(Vec<Vec<u8>>);

    impl HostCallbacks for Pieces {
        fn print(&mut self, _: Stream, bytes: &[u8]) -> wasmtime::Result<()> {
            self.0.push(bytes.to_vec());
            Ok(())
        }
    }

    #[test]
    fn output_without_bytes_is_not_passed_on() {
        let mut hearing = ListenerState::of(Pieces::default());
        for frame in
            [&b"\x01"[..], b"\x01out", b"\x02", b"\x02err", b"\x07\0\0\0\0", b"\x07\0\0\0\0shown"]
        {
            assert_eq!(hearing.hear(frame).unwrap(), Some(Vec::new()));
        }
        assert_eq!(hearing.listener.0, [&b"out"[..], b"err", b"shown"]);
    }
}
