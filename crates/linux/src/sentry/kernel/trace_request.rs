//! A request of a tracer for registers or memory of a stopped thread.

/// What it does.
#[derive(Debug)]
pub(crate) enum TraceOperation {
    /// Reads a word of memory.
    Peek(u64),
    /// Writes one.
    Poke(u64, u64),
    /// Reads a word of `struct user`.
    PeekUser(u64),
    PokeUser(u64, u64),
    GeneralRegisters,
    SetGeneralRegisters(Vec<u8>),
    /// The vector registers; with all extensions or without.
    Vectors {
        extended: bool,
    },
    SetVectors {
        bytes: Vec<u8>,
        extended: bool,
    },
    /// `PTRACE_GET_SYSCALL_INFO`.
    CallInfo,
    /// Reads a part of its memory, for a file in `/proc`.
    Read(u64, u64),
    /// Writes a part.
    Write(u64, Vec<u8>),
}

/// A request, which the guest's owner carries out.
#[derive(Debug)]
pub(crate) struct TraceRequest {
    pub(crate) process: u32,
    pub(crate) thread: u32,
    pub(crate) operation: TraceOperation,
    /// Where the answer goes in the memory of the tracer, and the room there.
    pub(crate) to: u64,
    pub(crate) room: u64,
    /// Where the length of the answer goes.
    pub(crate) length_to: Option<u64>,
    /// Whether the length is the result of the call.
    pub(crate) counts: bool,
    /// The descriptor whose position moves by the result.
    pub(crate) moves: Option<u64>,
}
