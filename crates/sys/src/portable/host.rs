//! The host reports nothing of its memory and its limits.

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

/// Nothing to trim.
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

/// Not measured.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    Duration::ZERO
}

/// Unknown here.
#[must_use]
pub fn process_cpu_time(_: u32) -> Option<Duration> {
    None
}

/// 64 random bits.
///
/// # Panics
/// When the system has none, which no supported system reports.
#[must_use]
pub fn random_word() -> u64 {
    let mut bytes = [0; 8];
    assert!(system::fill(&mut bytes), "the system has no random bytes");
    u64::from_ne_bytes(bytes)
}

#[cfg(all(unix, not(miri)))]
mod system {
    pub(super) fn fill(bytes: &mut [u8; 8]) -> bool {
        // SAFETY: the buffer has room for as many bytes.
        unsafe { libc::getentropy(bytes.as_mut_ptr().cast(), bytes.len()) == 0 }
    }
}

#[cfg(all(windows, not(miri)))]
mod system {
    #[link(name = "advapi32")]
    unsafe extern "system" {
        /// `RtlGenRandom`.
        fn SystemFunction036(bytes: *mut u8, len: u32) -> u8;
    }

    pub(super) fn fill(bytes: &mut [u8; 8]) -> bool {
        // SAFETY: the buffer has room for as many bytes.
        unsafe { SystemFunction036(bytes.as_mut_ptr(), 8) != 0 }
    }
}

#[cfg(miri)]
mod system {
    use std::hash::{BuildHasher, RandomState};

    pub(super) fn fill(bytes: &mut [u8; 8]) -> bool {
        *bytes = RandomState::new().hash_one(0).to_ne_bytes();
        true
    }
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
