//! The parts of the platform that depend on the processor: the code that runs in guest processes,
//! the frame of a signal, and numbers of the kernel. Each processor has the same names.

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod recent_calls;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
