//! Properties of this host's kernel and processor that a guest depends on: its clock code, and the
//! form of its signal frames.
//!
//! A frozen guest has addresses within the kernel's vDSO in its memory, and the processor's whole
//! state in its signal frame. So it runs only where both are the same.

use serde::{Deserialize, Serialize};

use super::vdso;

/// Properties that must be equal where a frozen guest is thawed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostTraits {
    /// blake3 of the vDSO; zeros without one.
    clock: [u8; 32],
    /// Bytes that a signal frame takes.
    frame: u64,
}

impl HostTraits {
    /// The properties of this host.
    pub(crate) fn here() -> Self {
        let clock = std::fs::read_to_string("/proc/self/maps").ok().and_then(|list| clock(&list));
        Self { clock: clock.unwrap_or_default(), frame: rustix::param::linux_minsigstksz() as u64 }
    }

    /// The first property that differs on this host, if any.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let here = Self::here();
        if self.frame != here.frame {
            return Err("the processor's state (the size of a signal frame)");
        }
        if self.clock != here.clock {
            return Err("the kernel's clock code (its vDSO)");
        }
        Ok(())
    }
}

/// The digest of this process's vDSO, and of the position of its data.
fn clock(list: &str) -> Option<[u8; 32]> {
    let mappings = vdso::mappings(list);
    let from = mappings.first()?.0;
    let mut hasher = blake3::Hasher::new();
    for (start, len, _) in &mappings {
        hasher.update(&start.wrapping_sub(from).to_le_bytes()).update(&len.to_le_bytes());
    }
    hasher.update(&vdso::of_kernel(list)?.0);
    Some(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_kernel_or_processor_is_named() {
        let here = HostTraits::here();
        assert_eq!(here.check(), Ok(()));
        assert_eq!(here, HostTraits::here());
        let frame = here.frame + 64;
        assert!(HostTraits { frame, ..here.clone() }.check().unwrap_err().contains("processor"));
        let clock = [1; 32];
        assert!(HostTraits { clock, ..here }.check().unwrap_err().contains("kernel"));
    }
}
