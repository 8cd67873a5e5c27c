//! The contract between a guest and its host: numbers and structures that both sides spell out.
//!
//! Promises: `guests/vm/sdk-rs/src/abi.rs` and `guests/vm/include/afresh.h` state the same values; a test
//! compares them. May break it: changing a value without raising `ABI_VERSION`.

/// Version of everything in this file; a guest built for another one is refused at start.
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

/// What a guest is told at its start, in a page that it can only read; RDI points to it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BootInfo {
    /// [`BOOT_MAGIC`].
    pub magic: u64,
    /// [`ABI_VERSION`].
    pub version: u32,
    /// How many of `regions` are in use.
    pub region_count: u32,
    /// First byte of the heap.
    pub heap: u64,
    /// Length of the heap in bytes.
    pub heap_len: u64,
    /// First byte of the input buffer.
    pub input: u64,
    /// Capacity of the input buffer in bytes.
    pub input_capacity: u64,
    /// Lowest usable byte of the stack.
    pub stack: u64,
    /// Length of the stack in bytes.
    pub stack_len: u64,
    /// The extra regions, in the order of the builder.
    pub regions: [BootRegion; MAX_REGIONS],
}

/// One extra region as the guest sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct BootRegion {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// 0 read-write, 1 read-only, 2 shared with the host, 3 gap (not accessible).
    pub kind: u64,
}

const _: () = assert!(size_of::<BootInfo>() <= 4096);
