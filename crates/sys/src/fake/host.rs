//! The host reports nothing in the interpreter.

use std::time::Duration;

use crate::SysError;

/// Unknown here.
#[must_use]
pub fn memory_headroom() -> Option<u64> {
    None
}

/// Memory of the host or of a control group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRoom {
    /// Bytes that can still be allocated.
    pub left: u64,
    /// All bytes.
    pub total: u64,
}

/// Unknown here.
#[must_use]
pub fn memory_room() -> Option<MemoryRoom> {
    None
}

/// The tasks whose waits for memory are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PressureSource {
    /// Those of this process's control group.
    Group,
    /// Those of the host.
    Host,
}

/// Unknown here.
#[must_use]
pub fn pressure_source() -> Option<PressureSource> {
    None
}

/// Unknown here.
#[must_use]
pub fn memory_pressure() -> Option<f32> {
    None
}

/// Unknown.
#[must_use]
pub fn memory_stalls() -> Option<std::time::Duration> {
    None
}

/// The interpreter's allocator has nothing to trim.
pub fn trim_heap() {}

/// As by default.
#[must_use]
pub fn max_mappings() -> usize {
    65_530
}

/// Unknown here.
#[must_use]
pub fn mappings() -> Option<usize> {
    None
}

/// Nothing to change.
///
/// # Errors
/// None.
pub fn run_when_idle() -> Result<(), SysError> {
    Ok(())
}

/// Time does not pass.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    Duration::ZERO
}

/// The interpreter has no processes.
#[must_use]
pub fn process_cpu_time(_: u32) -> Option<Duration> {
    None
}

/// Drawn by the standard library.
#[must_use]
pub fn random_word() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// No limit.
#[must_use]
pub fn address_space() -> Option<u64> {
    None
}

/// Threads have no numbers here.
#[must_use]
pub fn thread_id() -> i32 {
    0
}
