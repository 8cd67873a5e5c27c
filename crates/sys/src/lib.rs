//! System calls that the engine needs, each behind a safe or a documented interface.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub mod kvm;
