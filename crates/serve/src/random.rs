//! Random names.

use rustix::rand::{GetRandomFlags, getrandom};

/// Random hex digits, two for each of `bytes` bytes; none if the host has no randomness.
pub(crate) fn hex_digits(bytes: usize) -> Option<String> {
    let mut random = vec![0; bytes];
    if getrandom(&mut random, GetRandomFlags::empty()) != Ok(bytes) {
        return None;
    }
    Some(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
