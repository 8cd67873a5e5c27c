//! The contract with the host; the host's `abi` module states the same values.

/// Version of everything in this file.
pub const ABI_VERSION: u32 = 1;
/// First word of [`BootInfo`].
pub const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"AFRESHVM");
/// The port of a hypercall.
pub const PORT: u16 = 0xa8;

pub const CALL_READY: u32 = 1;
pub const CALL_DONE: u32 = 2;
pub const CALL_PANIC: u32 = 3;
pub const CALL_LOG: u32 = 4;
pub const CALL_FIND: u32 = 5;
pub const CALL_HOST: u32 = 6;
pub const CALL_RANDOM: u32 = 7;
pub const CALL_GENERATION: u32 = 8;

pub const ERR_NO_FUNCTION: i64 = -1;
pub const ERR_ARGUMENTS: i64 = -2;
pub const ERR_FAILED: i64 = -3;
pub const ERR_CAPACITY: i64 = -4;

pub const MAX_REGIONS: usize = 64;

/// What the host tells the guest at its start.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BootInfo {
    pub magic: u64,
    pub version: u32,
    pub region_count: u32,
    pub heap: u64,
    pub heap_len: u64,
    pub input: u64,
    pub input_capacity: u64,
    pub stack: u64,
    pub stack_len: u64,
    pub regions: [BootRegion; MAX_REGIONS],
}

/// One extra region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BootRegion {
    pub address: u64,
    pub len: u64,
    /// 0 read-write, 1 read-only, 2 shared with the host, 3 gap.
    pub kind: u64,
}
