//! The interface of the kernel where it differs between processors.
//!
//! Numbers of system calls come from `libc`; those of ioctls, and the structures behind them, are
//! the same on both.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::{instruction, was_write};
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{instruction, was_write};

#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
compile_error!("afresh runs on x86_64 and aarch64");
