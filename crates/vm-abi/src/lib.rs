//! Internal crate of `afresh`. The contract between a guest of a micro-VM and its host: numbers,
//! the boot page, and the wire format of host functions. Both sides use this crate;
//! `guests/vm/include/afresh.h` repeats it for C, and a test of `afresh-vm` compares them.
//!
//! Promises: each side decodes the other's encoding, or refuses it. May break it: changing a value
//! without raising [`ABI_VERSION`].

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod boot;
mod wire;

pub use boot::{BootInfo, BootRegion};
pub use wire::{FromWire, HostError, HostReturn, IntoWire};

/// Version of everything in this crate; a guest built for another one is refused at start.
pub const ABI_VERSION: u32 = 1;
/// First word of [`BootInfo`]: `AFRESHVM` in little-endian bytes.
pub const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"AFRESHVM");

/// The I/O port of a hypercall: `out PORT, eax` with the call's number in EAX, arguments in RDI,
/// RSI, RDX, R10 and R8, the result in RAX.
pub const PORT: u16 = 0xa8;

/// `ready(call_entry, abi_version)`: initialisation is over; calls start at `call_entry`.
pub const CALL_READY: u32 = 1;
/// `done(status, output, len)`: the call is over; its result is `len` bytes at `output`.
pub const CALL_DONE: u32 = 2;
/// `panic(message, len)`: the guest gave up.
pub const CALL_PANIC: u32 = 3;
/// `log(level, message, len)`: levels 1 (error) to 5 (trace).
pub const CALL_LOG: u32 = 4;
/// `find(name, len)`: the number of a host function, or a negative error.
pub const CALL_FIND: u32 = 5;
/// `host(function, arguments, len, result, capacity)`: length of the result, or a negative error.
pub const CALL_HOST: u32 = 6;
/// `random(buffer, len)`: fills the buffer with fresh randomness, different in every clone.
pub const CALL_RANDOM: u32 = 7;
/// `generation()`: a number that no other restore or fork shares, in this process or another.
pub const CALL_GENERATION: u32 = 8;

/// No host function has that name or number.
pub const ERR_NO_FUNCTION: i64 = -1;
/// The arguments do not decode as the host function's types.
pub const ERR_ARGUMENTS: i64 = -2;
/// The host function reported an error.
pub const ERR_FAILED: i64 = -3;
/// The result is longer than the guest's buffer.
pub const ERR_CAPACITY: i64 = -4;

/// The most bytes of a message (log, panic, function name).
pub const MAX_MESSAGE: u64 = 64 << 10;
/// The most extra regions a guest may have.
pub const MAX_REGIONS: usize = 64;
